"""Bring a schema to this version of pydispatch, and take it out again.

The work is done by ``sql/install.sql``, one ``do`` statement that carries all SQL files and the
ledger's rules. ``migrate`` runs it and ``script`` prints it, so psql and Python cannot differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import psycopg.rows
from procrastinate.schema import SchemaManager

from pydispatch.errors import MigrationRefused, translate

__all__ = ["SqlFile", "migrate", "script", "sql_files", "sql_root", "uninstall"]

_KINDS = {"migrations": "migration", "functions": "repeatable", "views": "repeatable"}


@dataclass(frozen=True)
class SqlFile:
    """One file under ``sql/``.

    Attributes:
        name: the path relative to the root, which is its name in the ledger.
        kind: ``migration`` (applied once) or ``repeatable`` (applied again when changed).
        text: the content, with Unix line ends.
    """

    name: str
    kind: str
    text: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the text, as hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def sql_root() -> Path:
    """The folder of SQL files: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parent
    return next(root for root in (package / "sql", package.parent / "sql") if root.is_dir())


def sql_files(root: Path | None = None) -> list[SqlFile]:
    """All SQL files, in the order in which they are applied."""
    root = sql_root() if root is None else root
    found = [
        SqlFile(f"{folder}/{file.name}", kind, file.read_text(encoding="utf-8"))
        for folder, kind in _KINDS.items()
        for file in sorted((root / folder).glob("*.sql"))
    ]
    if not found:
        raise FileNotFoundError(f"no SQL files in {root}")
    return found


def script(
    *,
    schema: str | None = None,
    with_procrastinate: bool = False,
    root: Path | None = None,
) -> str:
    """The migration as one SQL statement, for psql or another tool that runs SQL.

    It does all that ``migrate`` does, and it changes nothing where nothing is to be done.

    Args:
        schema: the schema to install into; by default the first of the search path.
        with_procrastinate: also apply procrastinate's own schema where it is absent.
        root: another folder of SQL files than the package's, laid out in the same way.
    """
    rows = ",\n".join(
        f"    array['{file.kind}', {_quoted(file.name)}, '{file.checksum}', {_quoted(file.text)}]"
        for file in sql_files(root)
    )
    return _filled(
        "install.sql",
        schema="null" if schema is None else _quoted(schema),
        procrastinate=_quoted(SchemaManager.get_schema()) if with_procrastinate else "null",
        files=f"array[\n{rows}\n  ]",
    )


def migrate(
    target: psycopg.Connection[Any] | str = "",
    *,
    schema: str | None = None,
    with_procrastinate: bool = False,
    root: Path | None = None,
) -> list[str]:
    """Bring a schema to this version, in one transaction, and say what was applied.

    Safe to run from many places at once: all but one wait and find nothing to do. Functions and
    views are all applied again when any file changed.

    Args:
        target: a connection, or a connection string (``""`` takes libpq's variables). In a
            connection's open transaction the work is part of it, and the caller commits.
        schema: the schema to install into; by default the first of the search path.
        with_procrastinate: also apply procrastinate's own schema where it is absent.
        root: another folder of SQL files than the package's, laid out in the same way.

    Returns:
        The files applied, in order (and ``procrastinate`` first when its schema was); empty when
        the schema was up to date.

    Raises:
        ProcrastinateMissing: procrastinate's schema is not there, or too old.
        MigrationRefused: a migration was edited after it was applied, or the schema is newer than
            this code, or the server is too old, or the schema does not exist, or a file failed
            (its name, line and the server's SQLSTATE are then in the error).
    """
    statement = script(schema=schema, with_procrastinate=with_procrastinate, root=root)
    with _connected(target) as connection:
        try:
            return _run(connection, statement, "dispatch.applied")
        except psycopg.Error as error:
            place = _place(error, sql_files(root))
            if place is None:
                raise
            raise MigrationRefused(
                f"{place}: {error.diag.message_primary}",
                detail=error.diag.message_detail,
                hint=error.diag.message_hint,
                sqlstate=error.sqlstate,
            ) from error


def uninstall(
    target: psycopg.Connection[Any] | str = "",
    *,
    schema: str | None = None,
    force: bool = False,
) -> list[str]:
    """Drop everything that ``migrate`` made in a schema, and nothing else.

    Args:
        target: a connection, or a connection string (``""`` takes libpq's variables).
        schema: the schema to clear; by default the first of the search path.
        force: go ahead while jobs are staged. They are lost.

    Returns:
        What was dropped; empty when there was nothing.

    Raises:
        PolicyNotEmpty: jobs are staged, and ``force`` was not given.
    """
    statement = _filled(
        "uninstall.sql",
        schema="null" if schema is None else _quoted(schema),
        force="true" if force else "null",
    )
    with _connected(target) as connection:
        return _run(connection, statement, "dispatch.dropped")


def _filled(name: str, **literals: str) -> str:
    """A frame of ``sql/`` with its placeholders, like ``null /* schema */``, filled in."""
    text = (sql_root() / name).read_text(encoding="utf-8")
    for key, literal in literals.items():
        text = text.replace(f"null /* {key} */", literal)
    return text


def _quoted(text: str) -> str:
    """A SQL literal that leaves the text readable."""
    tag = "$sql$"
    while tag in text:
        tag = f"${hashlib.sha256((tag + text).encode()).hexdigest()[:8]}$"
    return f"{tag}{text}{tag}"


@contextmanager
def _connected(target: psycopg.Connection[Any] | str) -> Iterator[psycopg.Connection[Any]]:
    """The connection itself, or a new one that is closed afterwards."""
    if isinstance(target, str):
        with psycopg.connect(target) as connection:
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            yield connection
    else:
        yield target


def _run(connection: psycopg.Connection[Any], statement: str, report: str) -> list[str]:
    """Run a frame in one transaction; its report is in a setting that ends with the transaction."""
    with (
        translate(),
        connection.transaction(),
        connection.cursor(row_factory=psycopg.rows.scalar_row) as cursor,
    ):
        cursor.execute(statement.encode(connection.info.encoding))
        cursor.execute("select current_setting(%s)", [report])
        return list(json.loads(cursor.fetchone() or "[]"))


def _place(error: psycopg.Error, files: list[SqlFile]) -> str | None:
    """The file in which the server found an error, with the line where it knows it."""
    for file in files:
        if error.diag.internal_query == file.text:
            line = file.text.count("\n", 0, int(error.diag.internal_position or 0)) + 1
            return f"sql/{file.name}, line {line}"
        if file.text in (error.diag.context or ""):
            return f"sql/{file.name}"
    return None
