"""pgTAP and plpgsql_check for the test server: found on the machine, or unpacked from Debian.

pgTAP is plain SQL, so one copy serves any server. plpgsql_check is a library: it serves only
the server that it was compiled for.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from pydispatch.embedded import EmbeddedPostgres

CACHE = Path(__file__).resolve().parent.parent / ".cache"


class UnavailableError(Exception):
    """An extension cannot be had here; the message says why and what to do."""


def pgtap_sql() -> str:
    """Return pgTAP as SQL, without psql's commands.

    Taken from the file that the environment variable PGTAP_SQL names, else from an installed
    PostgreSQL, else from Debian's package, which is unpacked into the cache.
    """
    named = os.environ.get("PGTAP_SQL")
    if named:
        if not Path(named).is_file():
            raise UnavailableError(f"PGTAP_SQL: there is no file {named}")
        return _without_psql_commands(Path(named))
    script = _newest_script(_installed_folders())
    if script is None:
        try:
            script = _newest_script([unpack_debian(r"postgresql-[0-9]+-pgtap")])
        except UnavailableError as error:
            raise UnavailableError(
                "pgTAP is not installed: install it with your system's package manager "
                f"(Debian: postgresql-NN-pgtap), or set PGTAP_SQL to its pgtap.sql. ({error})"
            ) from error
        assert script is not None, "Debian's package holds no pgtap--VERSION.sql"
    return _without_psql_commands(script)


def load_plpgsql_check(server: EmbeddedPostgres, conn: psycopg.Connection) -> None:
    """Load plpgsql_check into the schema ``lint`` of the connection's database."""
    conn.execute("create schema lint")
    installed = conn.execute(
        "select from pg_available_extensions where name = 'plpgsql_check'"
    ).fetchone()
    if installed:
        conn.execute("create extension plpgsql_check schema lint")
        return
    version = conn.execute("select version()").fetchone()
    assert version is not None
    if "Debian" not in version[0]:
        raise UnavailableError("plpgsql_check has to be compiled for the server: run with Debian's")
    major = conn.info.server_version // 10000
    package = unpack_debian(f"postgresql-{major}-plpgsql-check")
    library = next(package.rglob("plpgsql_check.so"))
    # Beside the data, where the server's user can read it.
    copy = Path(server.base_dir, library.name)
    shutil.copyfile(library, copy)
    copy.chmod(0o644)
    script = _without_psql_commands(next(package.rglob("plpgsql_check--*.sql")))
    script = script.replace("MODULE_PATHNAME", str(copy)).replace("@extschema@", "lint")
    with conn.transaction():
        conn.execute("set local search_path to lint")
        conn.execute(script.encode())


def unpack_debian(pattern: str) -> Path:
    """Unpack the newest Debian package whose name matches, and return the folder.

    Nothing is installed and no privilege needed: apt works on package lists of its own, from
    the system's sources.
    """
    with _locked(CACHE), tempfile.TemporaryDirectory(dir=CACHE) as work:
        for known in CACHE.iterdir():
            if re.fullmatch(pattern, known.name):
                return known
        if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            raise UnavailableError("this system has no apt-get to fetch it with")
        for folder in ("lists/partial", "archives/partial", "download"):
            Path(work, folder).mkdir(parents=True)
        options = [
            *("-o", f"Dir::State={work}"),
            *("-o", f"Dir::State::Lists={work}/lists"),
            *("-o", f"Dir::Cache={work}"),
            *("-o", "Debug::NoLocking=1"),
            *("-o", "APT::Sandbox::User=root"),  # no other user may enter our folder
        ]
        _run(["apt-get", *options, "update", "-qq"])
        found = _run(["apt-cache", *options, "search", "--names-only", f"^{pattern}$"])
        names = sorted((line.split(" ")[0] for line in found.splitlines()), key=_version)
        if not names:
            raise UnavailableError(f"the system's package sources have no {pattern}")
        _run(["apt-get", *options, "download", "-qq", names[-1]], folder=f"{work}/download")
        (package,) = Path(work, "download").glob("*.deb")
        _run(["dpkg-deb", "-x", str(package), f"{work}/unpacked"])
        return Path(work, "unpacked").rename(CACHE / names[-1])


def _installed_folders() -> Iterator[Path]:
    """Yield the folders where an installed PostgreSQL keeps its extensions."""
    for name in ("/usr/share", "/usr/local/share", "/opt/homebrew/share"):
        yield from Path(name).glob("postgresql*")
    for program in {shutil.which("pg_config"), _config_of(os.environ.get("PG_BIN"))} - {None}:
        yield Path(_run([str(program), "--sharedir"]).strip())


def _config_of(bin_dir: str | None) -> str | None:
    return shutil.which("pg_config", path=bin_dir) if bin_dir else None


def _newest_script(folders: Iterator[Path] | list[Path]) -> Path | None:
    """Return pgTAP's install script (not one of its upgrades) of the newest version."""
    scripts = [
        script
        for folder in folders
        for script in folder.rglob("pgtap--*.sql")
        if script.stem.count("--") == 1
    ]
    return max(scripts, key=lambda script: _version(script.stem), default=None)


def _version(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _without_psql_commands(script: Path) -> str:
    return re.sub(r"^\\.*$", "", script.read_text(), flags=re.MULTILINE)


def _run(command: list[str], *, folder: str | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise UnavailableError(f"{command[0]} failed: {last}")
    return done.stdout


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other test processes out of a folder of the cache."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
