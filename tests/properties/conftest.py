"""One database a module and how hard hypothesis tries.

By default the examples are the same in every run and few. ``PROPERTIES=long`` tries many random
ones; ``PROPERTIES_EXAMPLES`` says how many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg import sql

from pydispatch.embedded import EmbeddedPostgres
from tests.fixtures import create_database
from tests.properties.support import Database

PATIENT = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile(
    "short", deadline=None, suppress_health_check=PATIENT, derandomize=True, print_blob=True
)
settings.register_profile("long", settings.get_profile("short"), derandomize=False)
settings.load_profile(os.environ.get("PROPERTIES", "short"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a long run take its time."""
    if os.environ.get("PROPERTIES") == "long":
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.timeout(0))


@pytest.fixture(scope="module")
def db(
    request: pytest.FixtureRequest, server: EmbeddedPostgres, admin: psycopg.Connection
) -> Iterator[Database]:
    """A database for the module's tests; each starts with empty tables."""
    name = f"test_{request.module.__name__.rpartition('.')[2]}"
    create_database(server, name)
    with psycopg.connect(server.dsn(name), autocommit=True) as conn:
        conn.execute("set synchronous_commit to off")
        yield Database(conn)
    admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
