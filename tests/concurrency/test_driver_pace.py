"""A running driver is neither late nor restless: it wakes for what happens, and only then.

Case: a limiter admits half its rate, because nobody looks when its token comes. Case: cap 1 and
short jobs, and a full partition sleeps out its backoff after each finish. Case: a release falls
between "is a slot free?" and "note that I wait", and the waiter sleeps on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pydispatch import Driver
from tests.concurrency.app import LOG, Application, stage_work
from tests.concurrency.stops import LIMIT, POINTS, Stops
from tests.concurrency.support import cap, column, define, finish, stage, start, tick, value
from tests.fixtures import Connect
from tests.support import async_wait_for

KINDS = ["driver", "sql-driver"]

HOUR = 3600.0
SLEEPY: dict[str, Any] = {"idle_pause": HOUR, "sweep_interval": HOUR, "sync": False}
"""A driver that does nothing by itself but what is due."""


def make_driver(
    kind: str, dsn: str, options: str = "", policy: str = "p", **arguments: Any
) -> Driver:
    """Return a driver that hands off in Python, or in SQL."""
    dispatch = None
    if kind == "driver":
        application = Application(dsn)
        application.dispatch.policy(policy)("t")
        dispatch = application.dispatch
    dsn = make_conninfo(dsn, options=options, application_name=kind)
    return Driver(dispatch, conninfo=dsn, **{**SLEEPY, **arguments})


@contextlib.asynccontextmanager
async def running(*drivers: Driver) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(driver.run()) for driver in drivers]
    try:
        yield
    finally:
        for driver in drivers:
            driver.stop()
        await asyncio.gather(*tasks)


async def test_a_throttle_of_two_and_a_half_a_second_is_used_up_and_never_exceeded(
    conn: psycopg.Connection, dsn: str
):
    rate, seconds = 2.5, 5.0
    gate = {"type": "throttle", "rate": rate, "per": 1}
    drivers = []
    for kind in KINDS:
        define(conn, kind, gates=[gate])
        stage(conn, *["a"] * 100, policy=kind)
        drivers.append(make_driver(kind, dsn, policy=kind, policies=[kind]))
    moments = (
        "select extract(epoch from admitted_at)::float8 from dispatch_admissions"
        " where policy_name = %s order by admitted_at"
    )

    def span(kind: str) -> float:
        found = column(conn, moments, kind)
        return found[-1] - found[0] if found else 0

    async with running(*drivers):
        await async_wait_for(lambda: min(map(span, KINDS)) >= seconds, timeout=3 * seconds)
    for kind in KINDS:
        found = column(conn, moments, kind)
        for n, moment in enumerate(found, start=1):
            elapsed = moment - found[0]
            assert n <= rate + rate * elapsed + 1e-3, (kind, n, elapsed)
        # A machine that stops for a second loses what the full bucket cannot hold.
        assert len(found) >= 0.7 * rate * (1 + found[-1] - found[0]), (kind, found)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_partition_of_short_jobs_is_filled_again_as_soon_as_one_ends(
    kind, conn: psycopg.Connection, dsn: str
):
    """Cap 1, jobs of 20 ms and a backoff of an hour: each admission waits for a wake-up."""
    jobs, seconds = 30, 0.02
    application = Application(dsn)
    conn.execute(LOG)
    define(conn, "work", **cap(1, full_backoff=HOUR))
    driver = make_driver(kind, dsn)
    async with running(driver):
        worker = asyncio.create_task(application.run_worker(install_signal_handlers=False))
        # Its first fetch is over, and from here on it listens.
        await async_wait_for(lambda: value(conn, LISTENING))
        stage_work(conn, [{"k": "a", "cap": 1, "n": n, "seconds": seconds} for n in range(jobs)])
        ended = "select count(*) = %s from run_log where event = 'finish'"
        await async_wait_for(lambda: value(conn, ended, jobs), timeout=30)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    took = value(conn, "select extract(epoch from max(at) - min(at))::float8 from run_log")
    assert jobs / took >= 4, f"{jobs / took:.1f} jobs a second"


LISTENING = """
select exists (
  select from pg_stat_activity
  where datname = current_database() and query ilike 'listen%%procrastinate%%' and state = 'idle'
)
"""


async def test_an_idle_driver_runs_two_statements_a_second_at_most(
    conn: psycopg.Connection, dsn: str
):
    """Seen from outside: how often the session's last statement is a new one."""
    define(conn, "p", **cap(1, full_backoff=HOUR))
    stage(conn, "a", "a", "b")
    drivers = [make_driver(kind, dsn, idle_pause=0.5) for kind in KINDS]
    look = (
        "select application_name, query_start from pg_stat_activity"
        " where datname = current_database() and application_name = any (%s)"
    )
    seen: dict[str, set[Any]] = {kind: set() for kind in KINDS}
    async with running(*drivers):
        await async_wait_for(lambda: value(conn, "select count(*) = 2 from dispatch_admissions"))
        await async_wait_for(lambda: not value(conn, "select count(*) from dispatch_inbox"))
        begin = time.monotonic()
        while (elapsed := time.monotonic() - begin) < 4:
            for kind, moment in conn.execute(look, [KINDS]):
                seen[kind].add(moment)
            await asyncio.sleep(0.002)
    counts = [len(moments) for moments in seen.values()]
    assert max(counts) <= 2 * elapsed + 6, "and a few that end what went before"
    assert min(counts) >= elapsed, "nothing was seen"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", POINTS)
async def test_a_job_that_ends_between_the_look_and_the_commit_of_a_tick_wakes_the_driver(
    point, kind, stops: Stops, conn: psycopg.Connection, connect: Connect, dsn: str
):
    define(conn, "p", **cap(LIMIT, full_backoff=HOUR))
    stage(conn, "a", "a")
    assert tick(conn) == 1
    job_id = start(conn)
    assert job_id is not None
    async with running(make_driver(kind, dsn, Stops.options(point))):
        # Its next tick looks at the full partition, and has something to do beside it.
        with conn.transaction():
            conn.execute("select dispatch_resume('p', 'a')")
            stage(conn, "b")
        await asyncio.to_thread(stops.wait)
        finish(conn, job_id)
        stops.release()
        admitted = "select count(*) = 3 from dispatch_admissions"
        await async_wait_for(lambda: value(conn, admitted), timeout=5)
