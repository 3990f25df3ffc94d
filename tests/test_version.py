"""Code and schema that are not of one version are told apart before something fails."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from procrastinate import App, SyncPsycopgConnector

from pydispatch import Dispatch, Driver
from tests.support import async_wait_for

FAULTS = {
    "older": (
        "delete from dispatch_migrations where name = (select max(name) from dispatch_migrations"
        " where kind = 'migration')",
        "is not applied. Run `pydispatch migrate`",
    ),
    "other functions": (
        "update dispatch_migrations set checksum = 'x' where name like '%20_stage.sql'",
        "sql/functions/20_stage.sql is not applied. Run `pydispatch migrate`",
    ),
    "newer": (
        "insert into dispatch_migrations (kind, name, checksum)"
        " values ('migration', 'migrations/9999_new.sql', 'x')",
        "migrations/9999_new.sql, which is newer. Upgrade pydispatch here",
    ),
}


@pytest.fixture
def dispatch(dsn: str) -> Any:
    app = App(connector=SyncPsycopgConnector(conninfo=dsn, min_size=1))
    dispatch = Dispatch(app)
    dispatch.policy("p", partition_by="k")(app.task(name="t")(lambda k: None))
    with app.open():
        yield dispatch


async def run_driver(dispatch: Dispatch, **options: Any) -> None:
    """Run a driver until it has started."""
    driver = Driver(dispatch, install_signal_handlers=False, **options)
    task = asyncio.create_task(driver.run())
    await async_wait_for(lambda: driver._started or task.done())
    driver.stop()
    await task


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("who", ["sync", "sync in a transaction", "driver"])
async def test_who_meets_a_schema_of_another_version_warns(
    dispatch: Dispatch, dsn: str, conn: psycopg.Connection, caplog: Any, fault: str, who: str
) -> None:
    statement, advice = FAULTS[fault]
    conn.execute(statement.encode())
    if who == "driver":
        await run_driver(dispatch)
    elif who == "sync":
        dispatch.sync()
    else:
        with psycopg.connect(dsn) as connection:
            dispatch.sync(connection)
    (record,) = [each for each in caplog.records if each.name == "pydispatch.version"]
    assert (record.levelname, record.action) == ("WARNING", "schema_differs")
    assert advice in record.getMessage()
    assert conn.execute("select policy_name from dispatch_policies").fetchall() == [("p",)]


@pytest.mark.parametrize("readable", [True, False], ids=["the same", "not to be read"])
async def test_nothing_is_said_of_a_schema_that_is(
    dispatch: Dispatch, dsn: str, conn: psycopg.Connection, caplog: Any, readable: bool
) -> None:
    if not readable:
        conn.execute("update dispatch_migrations set checksum = 'x'")
        conn.execute("create role blind login")
        conn.execute("grant usage on schema public to blind")
        conn.execute("grant all on all tables in schema public to blind")
        conn.execute("grant all on all sequences in schema public to blind")
        conn.execute("revoke all on dispatch_migrations from blind")
    try:
        role = "postgres" if readable else "blind"
        with psycopg.connect(f"{dsn} user={role}") as connection:
            dispatch.sync(connection)
        await run_driver(dispatch, conninfo=f"{dsn} user={role}")
    finally:
        if not readable:
            conn.execute("drop owned by blind")
            conn.execute("drop role blind")
    assert "schema_differs" not in [getattr(each, "action", None) for each in caplog.records]
