"""The server that is measured, and new databases on it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping

import psycopg
from procrastinate import App, SyncPsycopgConnector
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pydispatch.embedded import EmbeddedPostgres
from pydispatch.migrate import migrate

SETTINGS = {
    # Memory and log space that any server of some size has. All else is Postgres's default,
    # durable commits included.
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "15min",
}


class Server:
    """Makes databases: with procrastinate alone (``bare``), or with pydispatch too.

    Args:
        dsn: A database of the server, whose user may create databases.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._prefix = f"dispatch_bench_{os.getpid()}"
        self._numbers = itertools.count(1)
        self._templates = {False: f"{self._prefix}_ours", True: f"{self._prefix}_bare"}

    @contextlib.contextmanager
    def open(self) -> Iterator[Server]:
        """Make the templates of the databases, and drop them at the end."""
        try:
            for bare, name in self._templates.items():
                self._execute("create database {}", name)
                if bare:
                    with App(connector=SyncPsycopgConnector(conninfo=self.dsn(name))).open() as app:
                        app.schema_manager.apply_schema()
                else:
                    migrate(self.dsn(name), with_procrastinate=True)
            yield self
        finally:
            for name in self._templates.values():
                self._execute("drop database if exists {} with (force)", name)

    @contextlib.contextmanager
    def database(self, *, bare: bool = False) -> Iterator[str]:
        """Make a database for as long as the ``with`` block lasts; gives its conninfo."""
        name = f"{self._prefix}_{next(self._numbers)}"
        self._execute("create database {} template {}", name, self._templates[bare])
        try:
            yield self.dsn(name)
        finally:
            self._execute("drop database {} with (force)", name)

    def dsn(self, database: str) -> str:
        """Return the conninfo of a database."""
        return make_conninfo(self._dsn, dbname=database)

    def checkpoint(self) -> None:
        """Begin anew with what the server has to write, where its user may ask for that."""
        with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
            self._execute("checkpoint")

    def description(self) -> dict[str, str]:
        """Return what a reader of the numbers has to know of the server."""
        names = ("server_version", "fsync", "synchronous_commit", *SETTINGS)
        with psycopg.connect(self._dsn) as conn:
            rows = conn.execute(
                "select name, current_setting(name) from unnest(%s::text[]) as name", [list(names)]
            ).fetchall()
        return dict(rows)

    def _execute(self, statement: str, *names: str) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            conn.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


@contextlib.contextmanager
def open_server(settings: Mapping[str, str] = SETTINGS) -> Iterator[Server]:
    """Open the server that BENCH_DSN names, else start an embedded one that is durable."""
    dsn = os.environ.get("BENCH_DSN")
    if dsn:
        with Server(dsn).open() as server:
            yield server
        return
    with (
        EmbeddedPostgres(durable=True, settings=settings) as embedded,
        Server(embedded.dsn()).open() as server,
    ):
        yield server
