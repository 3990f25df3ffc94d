"""A dashboard to test, and the database that it shows."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import psycopg

from pydispatch.embedded import EmbeddedPostgres
from pydispatch.web import dashboard
from tests.browser.scene import Scene
from tests.browser.serving import serve
from tests.fixtures import create_database


@dataclasses.dataclass
class Site:
    """A dashboard, where every action is allowed, and the database that it shows."""

    url: str
    conn: psycopg.Connection

    @property
    def scene(self) -> Scene:
        """What a ``Scene`` knows of the database."""
        return Scene(self.conn)


@contextlib.contextmanager
def open_site(server: EmbeddedPostgres) -> Iterator[Site]:
    """Serve the dashboard of a new database, in autocommit."""
    name = f"browser_{next(_numbers)}"
    create_database(server, name)
    dsn = server.dsn(name)
    application = dashboard(dsn, authorize=lambda *_: "tester")
    with psycopg.connect(dsn, autocommit=True) as conn, serve(application) as url:
        yield Site(url, conn)
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute(f"drop database {name} with (force)".encode())


_numbers = itertools.count(1)
