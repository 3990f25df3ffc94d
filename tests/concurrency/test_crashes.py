"""Drivers are killed, Postgres crashes: nothing is lost, nothing is doubled, all go on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from pydispatch import Driver
from pydispatch.embedded import EmbeddedPostgres
from tests.concurrency.app import LOG, OVERLAPS, Application, process, stage_work
from tests.concurrency.stops import LIMIT, POINTS, Stops
from tests.concurrency.support import assert_balanced, cap, column, define, places, value
from tests.support import async_wait_for, set_clock, wait_for

ROLES = ["driver", "sql-driver"]


@pytest.fixture
def application(dsn: str, conn: psycopg.Connection) -> Application:
    application = Application(dsn)
    conn.execute(LOG)
    application.dispatch.sync(conn)
    return application


def work(jobs: int, keys: int = 5, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"k": f"key {n % keys}", "cap": n % keys % 3 + 1, "n": n, "seconds": n % 3 / 1000}
        for n in range(first, first + jobs)
    ]


def assert_all_ran_once(conn: psycopg.Connection, ids: list[int]) -> None:
    """Check that these jobs, and no others, ran once each, and never more than a key's cap."""
    found = places(conn)
    assert {found.get(id_) for id_ in ids} == {"ended"}
    assert found.keys() == set(ids)
    jobs = len(ids)
    assert value(conn, "select count(*) from procrastinate_jobs") == jobs
    for event in ("start", "finish"):
        ran = conn.execute(
            "select count(*), count(distinct n) from run_log where event = %s", [event]
        )
        assert ran.fetchone() == (jobs, jobs)
    assert_caps_were_kept(conn)
    assert_balanced(conn)


def assert_caps_were_kept(conn: psycopg.Connection) -> None:
    overlaps: dict[str, int] = dict(conn.execute(OVERLAPS).fetchall())
    assert all(most <= int(key.split()[1]) % 3 + 1 for key, most in overlaps.items()), overlaps


@contextlib.asynccontextmanager
async def going_on(application: Application, *drivers: Driver) -> AsyncIterator[None]:
    """Run a worker and drivers in this process meanwhile."""
    worker = asyncio.create_task(application.run_worker(install_signal_handlers=False))
    tasks = [asyncio.create_task(driver.run()) for driver in drivers]
    try:
        yield
    finally:
        for driver in drivers:
            driver.stop()
        worker.cancel()
        results = await asyncio.gather(worker, *tasks, return_exceptions=True)
    assert [result for result in results[1:] if result] == []


async def all_ended(conn: psycopg.Connection, jobs: int) -> None:
    await async_wait_for(
        lambda: (
            value(conn, "select count(*) = %s from run_log where event = 'finish'", jobs)
            and not value(conn, "select count(*) from dispatch_inflight_jobs")
        ),
        timeout=60,
    )


async def gone(conn: psycopg.Connection, pid: int) -> None:
    """Wait until a session has ended."""
    query = "select not exists (select from pg_stat_activity where pid = %s)"
    await async_wait_for(lambda: value(conn, query, pid))


async def admitted(conn: psycopg.Connection, jobs: int) -> None:
    """Wait until so many jobs are admitted."""
    query = "select count(*) >= %s from dispatch_admissions"
    await async_wait_for(lambda: value(conn, query, jobs), timeout=30)


@pytest.mark.parametrize("role", ROLES)
async def test_a_driver_that_is_killed_in_the_middle_of_a_tick_loses_and_doubles_nothing(
    role, application: Application, stops: Stops, conn: psycopg.Connection, dsn: str
):
    """At each point in turn: what the tick had done is undone, until it is about to commit."""
    define(conn, "work", **cap(LIMIT))
    ids: list[int] = []
    for point in POINTS:
        # A new key each time, so that there is one to be created.
        ids += stage_work(conn, work(1, keys=100, first=len(ids)))
        with process(role, dsn, Stops.options(point)) as driver:
            pid = await asyncio.to_thread(stops.wait, timeout=30)
            driver.kill()
            driver.wait()
            stops.release()
            await gone(conn, pid)
            stops.hold()
        committed = point == "commit"
        assert set(places(conn).values()) == {"in flight" if committed else "staged"}
        assert value(conn, "select count(*) from procrastinate_jobs") == committed * len(ids)
        assert value(conn, "select count(*) from dispatch_inflight_jobs") == committed * len(ids)
    async with going_on(application, Driver(application.dispatch, conninfo=dsn)):
        await all_ended(conn, len(ids))
    assert_all_ran_once(conn, ids)


async def test_drivers_that_are_killed_at_random_moments_lose_and_double_nothing(
    application: Application, conn: psycopg.Connection, dsn: str
):
    chance = random.Random(4)
    jobs = work(400)
    ids = stage_work(conn, jobs[:200])
    survivor = Driver(application.dispatch, conninfo=dsn)
    async with going_on(application):
        for n in range(6):
            with process(ROLES[n % 2], dsn) as driver:
                before = value(conn, "select count(*) from dispatch_admissions")
                await admitted(conn, before + chance.randint(1, 40))
                driver.kill()
        ids += stage_work(conn, jobs[200:])
        assert value(conn, "select count(*) from dispatch_staged_jobs") > 0
        task = asyncio.create_task(survivor.run())
        await all_ended(conn, len(ids))
        survivor.stop()
        await task
    assert_all_ran_once(conn, ids)


# case: a worker is killed with -9, and its slot comes back within the stale timeout, not a day
@pytest.mark.parametrize("stalled", ["leave", "retry"])
def test_a_worker_that_is_killed_gives_its_slots_back_after_the_stale_timeout_and_not_before(
    application: Application, conn: psycopg.Connection, dsn: str, stalled: str
):
    define(conn, "work", **cap(2), stalled=stalled)
    long = [{"k": "a", "cap": 2, "n": n, "seconds": 3600} for n in range(3)]
    first, second, third = stage_work(conn, long)
    assert value(conn, "select jobs_admitted from dispatch_tick('work')") == 2
    with process("worker", dsn) as worker:
        wait_for(lambda: value(conn, "select count(*) = 2 from run_log"), timeout=30)
        worker.kill()
        worker.wait()
    # No worker is there to sign any more: from here on time is the test's own.
    last_sign: datetime = value(conn, "select max(last_heartbeat) from procrastinate_workers")

    def swept(seconds: float) -> int:
        set_clock(conn, last_sign + timedelta(seconds=seconds))
        query = "select affected from dispatch_sweep() where task = 'slots of lost workers'"
        return int(value(conn, query))

    assert swept(300) == 0
    assert value(conn, "select count(*) from dispatch_inflight_jobs") == 2
    assert value(conn, "select jobs_admitted from dispatch_tick('work')") == 0
    assert swept(300.001) == 2
    assert value(conn, "select count(*) from dispatch_inflight_jobs") == 0

    # What was running stays in its partition, and counts there again when it is retried.
    assert value(conn, "select jobs_admitted from dispatch_tick('work')") == (
        2 if stalled == "retry" else 1
    )
    waiting = {"retry": {third: "staged"}, "leave": {}}[stalled]
    assert places(conn) == {first: "in flight", second: "in flight", third: "in flight"} | waiting
    slots = column(conn, "select job_id from dispatch_inflight_jobs order by job_id")
    assert slots == ([first, second] if stalled == "retry" else [third])
    assert column(conn, "select partition_key from dispatch_partitions") == ["a"]
    assert swept(301) == 0


class Enqueuer(threading.Thread):
    """Stages jobs until it is stopped, in a new connection whenever the last was lost."""

    def __init__(self, dsn: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged: list[int] = []
        self._dsn = dsn
        self._stopping = threading.Event()

    def run(self) -> None:
        n = 0
        while not self._stopping.is_set():
            with (
                contextlib.suppress(psycopg.OperationalError),
                psycopg.connect(self._dsn, autocommit=True) as conn,
            ):
                while not self._stopping.wait(0.1):
                    n += 5
                    self.acknowledged += stage_work(conn, work(5, first=n - 5))

    def stop(self) -> None:
        self._stopping.set()
        self.join()


@pytest.mark.timeout(180)
async def test_when_postgres_crashes_nothing_is_lost_or_doubled_and_all_go_on(
    own_server: EmbeddedPostgres,
):
    """Two drivers, a worker and an enqueuer, and all server processes killed twice."""
    dsn = own_server.dsn("dispatch")
    application = Application(dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(LOG)
        conn.execute("select dispatch_set('inflight_stale_after', 2)")
        define(conn, "work", **cap({"ctx": "cap"}), stalled="retry")
    drivers = [
        Driver(application.dispatch, conninfo=dsn, sync=False, sweep_interval=1),
        Driver(conninfo=dsn, sweep_interval=1),
    ]
    driving = [asyncio.create_task(driver.run()) for driver in drivers]
    enqueuer = Enqueuer(dsn)
    enqueuer.start()
    running: list[int] = []
    for jobs in (60, 150):
        with process("worker", dsn):
            with psycopg.connect(dsn, autocommit=True) as conn:
                await admitted(conn, jobs)
            await asyncio.to_thread(own_server.restart, "immediate")
            with psycopg.connect(dsn, autocommit=True) as conn:
                running += column(conn, "select id from procrastinate_jobs where status = 'doing'")
                assert value(conn, "select count(*) from dispatch_admissions") >= jobs
        # A new worker each time: a job that the old one has fetched, but was not told of, would be
        # its for as long as it lived.
    with process("worker", dsn), psycopg.connect(dsn, autocommit=True) as conn:
        await admitted(conn, 250)
        enqueuer.stop()
        waiting = """
            select exists (select from dispatch_staged_jobs)
              or exists (select from dispatch_inflight_jobs)
        """
        await async_wait_for(lambda: not value(conn, waiting), timeout=60)
        for driver in drivers:
            driver.stop()
        assert await asyncio.gather(*driving) == [None, None]

        found = places(conn)
        assert set(enqueuer.acknowledged) <= found.keys()
        assert len(found.keys() - set(enqueuer.acknowledged)) <= 2 * 5, "committed, but not told"
        assert set(found.values()) == {"ended"}
        assert value(conn, "select count(*) from procrastinate_jobs") == len(found)
        starts = "select job_id from run_log where event = 'start' group by 1 having count(*) > 1"
        again = set(column(conn, starts))
        assert again <= set(running), "only what the crash interrupted may run again"
        # The interrupted ones have no end in the log.
        conn.execute(
            "delete from run_log where job_id in"
            " (select job_id from run_log group by 1 having count(*) <> 2)"
        )
        assert_caps_were_kept(conn)
        assert_balanced(conn)
