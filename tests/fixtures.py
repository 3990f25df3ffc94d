"""Fixtures: one server a test process, one fresh database a test.

The binaries come from the embedded wheel; PG_VERSION chooses one of its versions, PG_BIN a
folder with others.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pydispatch.embedded import EmbeddedPostgres
from pydispatch.migrate import migrate
from tests.extensions import UnavailableError, load_plpgsql_check, pgtap_sql
from tests.support import Clock, wait_for

TEMPLATE = "dispatch_template"
OUR_VARIABLES = ("PG_BIN", "PG_VERSION", "PGTAP_SQL")
Connect = Callable[..., psycopg.Connection]


def pytest_configure() -> None:
    """Keep what leads to a database of the developer's out of the tests."""
    for name in list(os.environ):
        if name == "DATABASE_URL" or (name.startswith("PG") and name not in OUR_VARIABLES):
            del os.environ[name]


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedPostgres]:
    """The server that all tests of this process share. Never stop it: see ``own_server``."""
    with start_server() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[EmbeddedPostgres]:
    """A server for one test, to be stopped, crashed and restarted at will.

    Its database ``own_server.dsn("dispatch")`` is like the one that ``dsn`` gives.
    """
    with start_server() as server:
        create_database(server, "dispatch")
        yield server


@pytest.fixture(scope="session")
def admin(server: EmbeddedPostgres) -> Iterator[psycopg.Connection]:
    """A superuser's connection to no test's database: for looking on from outside."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        yield conn


@pytest.fixture
def dsn(server: EmbeddedPostgres, admin: psycopg.Connection) -> Iterator[str]:
    """The conninfo of a fresh database with procrastinate's schema and ours."""
    name = f"test_{next(_numbers)}"
    create_database(server, name)
    yield server.dsn(name)
    admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def connections() -> Iterator[list[psycopg.Connection]]:
    """The connections that ``connect`` has made, closed at the end."""
    connections: list[psycopg.Connection] = []
    yield connections
    for conn in connections:
        conn.close()


@pytest.fixture
def connect(dsn: str, connections: list[psycopg.Connection]) -> Connect:
    """A function that opens a further connection to the test's database.

    Takes what ``psycopg.connect`` takes; autocommit unless told otherwise.
    """

    def connect(**options: Any) -> psycopg.Connection:
        conn = psycopg.connect(dsn, **{"autocommit": True, **options})
        connections.append(conn)
        return conn

    return connect


@pytest.fixture
def conn(connect: Connect) -> psycopg.Connection:
    """A connection to the test's database, in autocommit."""
    return connect()


@pytest.fixture
def clock(dsn: str, connections: list[psycopg.Connection]) -> Iterator[Clock]:
    """The test database's clock, stopped at 2026-01-01 00:00 UTC; see ``Clock``."""
    with psycopg.connect(dsn, autocommit=True) as admin:
        yield Clock(admin, connections)


@pytest.fixture
def is_blocked(admin: psycopg.Connection) -> Callable[[int], bool]:
    """A function that tells whether the session with this process id waits for another's lock."""

    def is_blocked(pid: int) -> bool:
        row = admin.execute("select pg_blocking_pids(%s) <> '{}'", [pid]).fetchone()
        assert row is not None
        return bool(row[0])

    return is_blocked


@pytest.fixture
def wait_blocked(is_blocked: Callable[[int], bool]) -> Callable[..., None]:
    """A function that returns once the session with this process id waits for another's lock.

    Use ``conn.info.backend_pid``; fails the test after ``timeout`` seconds.
    """

    def wait_blocked(pid: int, timeout: float = 60.0) -> None:
        wait_for(lambda: is_blocked(pid), timeout)

    return wait_blocked


@pytest.fixture
def plpgsql_check(server: EmbeddedPostgres, conn: psycopg.Connection) -> None:
    """Loads plpgsql_check into the schema ``lint`` of the test's database, or skips the test."""
    try:
        load_plpgsql_check(server, conn)
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def pgtap_connection(server: EmbeddedPostgres) -> Iterator[psycopg.Connection]:
    """The connection on which pytest-pgtap runs the files in ``pgtap/``."""
    name = "pgtap"
    create_database(server, name)
    try:
        load_pgtap(server.dsn(name))
    except UnavailableError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    with psycopg.connect(server.dsn(name)) as conn:
        yield conn


def start_server(**settings: str) -> EmbeddedPostgres:
    """Start a server that holds the template database."""
    # A vacuum in the midst of a test would change plans now and then.
    server = EmbeddedPostgres(settings={"autovacuum": "off", **settings}, folder=memory())
    try:
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            conn.execute(sql.SQL("create database {}").format(sql.Identifier(TEMPLATE)))
        migrate(server.dsn(TEMPLATE), with_procrastinate=True)
    except BaseException:
        server.stop()
        raise
    return server


def memory() -> Path | None:
    """A folder in memory with room for a test run, if there is one: files come and go faster."""
    folder = Path("/dev/shm")
    roomy = folder.is_dir() and shutil.disk_usage(folder).free > 8 * 2**30
    return folder if roomy and os.access(folder, os.W_OK) else None


def create_database(server: EmbeddedPostgres, name: str) -> None:
    """Copy the template database."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute(
            sql.SQL("create database {} template {}").format(
                sql.Identifier(name), sql.Identifier(TEMPLATE)
            )
        )


def load_pgtap(dsn: str) -> None:
    """Load pgTAP into the schema ``tap``, and let sessions find both it and our functions."""
    script = pgtap_sql()
    with psycopg.connect(dsn) as conn:
        conn.execute("create schema tap")
        conn.execute("set local search_path to tap")
        conn.execute(script.encode())
        conn.execute(
            sql.SQL("alter database {} set search_path to public, tap").format(
                sql.Identifier(conn.info.dbname)
            )
        )


_numbers = itertools.count(1)
