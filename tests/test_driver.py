"""The driver: awake when there is something to do, asleep otherwise, and hard to kill."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector
from procrastinate.testing import InMemoryConnector
from procrastinate.types import JSONDict
from psycopg.types.json import Jsonb

from pydispatch import Concurrency, Dispatch, Driver, Throttle
from pydispatch.driver import GAP
from tests.proxy import proxy
from tests.support import async_wait_for

NEVER = 3600.0  # seconds: a pause that must not be needed


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a driver wait for what is late, or current at its stop, for a second only."""
    monkeypatch.setattr("pydispatch.driver.GRACE", 1.0)


class Application:
    """An application with a task ``t`` whose jobs are partitioned by ``k``."""

    def __init__(self, dsn: str, **policy: Any) -> None:
        self.app = App(connector=SyncPsycopgConnector(conninfo=dsn, min_size=1))
        self.dispatch = Dispatch(self.app)
        self.task = self.app.task(name="t")(lambda k: None)
        self.dispatch.policy("p", partition_by="k", **policy)(self.task)
        self.app.open()

    def defer(self, *keys: int) -> list[int]:
        jobs: list[JSONDict] = [{"k": key} for key in keys]
        return self.task.batch_defer(*jobs)


@pytest.fixture
def application(dsn):
    application = Application(dsn)
    yield application
    application.app.close()


class Running:
    """A driver that runs beside the test, and what it did."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.looks: list[float] = []
        self.ticks: list[str] = []
        self.task: asyncio.Task[None] | None = None
        look, tick = driver._look, driver._tick

        async def counted_look(connection: Any) -> list[str]:
            self.looks.append(time.monotonic())
            return await look(connection)

        async def counted_tick(connection: Any, name: str) -> None:
            self.ticks.append(name)
            await tick(connection, name)

        driver._look = counted_look  # type: ignore[method-assign]
        driver._tick = counted_tick  # type: ignore[method-assign]

    async def idle(self) -> None:
        """Wait until the driver has looked and gone to sleep."""
        seen = len(self.looks)
        await async_wait_for(lambda: len(self.looks) > seen or self.looks)
        await async_wait_for(lambda: not self.driver._active)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """A function that starts a driver; it is stopped at the end of the test."""
    running: list[Running] = []

    async def start(
        dispatch: Dispatch | None = None, *, idle_pause: float = NEVER, **options: Any
    ) -> Running:
        options = {"sweep_interval": NEVER, "install_signal_handlers": False, **options}
        each = Running(Driver(dispatch, idle_pause=idle_pause, **options))
        each.task = asyncio.create_task(each.driver.run())
        running.append(each)
        await async_wait_for(lambda: each.looks or (each.task and each.task.done()))
        return each

    yield start
    for each in running:
        assert each.task is not None
        each.driver.stop()
        await asyncio.wait_for(each.task, 10)


async def until(number: Callable[[], int], expected: int) -> None:
    """Wait until a function returns a number."""
    await async_wait_for(lambda: number() == expected)


@pytest.fixture
def queued(conn: psycopg.Connection) -> Callable[[], int]:
    """A function that returns how many jobs procrastinate has."""

    def queued() -> int:
        row = conn.execute("select count(*) from procrastinate_jobs").fetchone()
        assert row is not None
        return int(row[0])

    return queued


def finish(conn: psycopg.Connection) -> None:
    """End all jobs that procrastinate has queued, as a worker does."""
    conn.execute("update procrastinate_jobs set status = 'doing' where status = 'todo'")
    conn.execute(
        "select procrastinate_finish_job_v1(id, 'succeeded', false)"
        " from procrastinate_jobs where status = 'doing'"
    )


# -- waking


async def test_what_was_staged_before_the_start_is_admitted(application, start, queued):
    application.dispatch.sync()
    application.defer(1, 2, 3)
    await start(application.dispatch)
    await until(queued, 3)


async def test_a_defer_wakes_the_driver(application, start, queued):
    running = await start(application.dispatch)
    for n in range(1, 4):
        await running.idle()
        application.defer(1)
        await until(queued, n)


async def test_a_finish_wakes_the_driver(dsn, start, queued, conn):
    application = Application(dsn, gates=[Concurrency(max=1, full_backoff=1000)])
    running = await start(application.dispatch)
    application.defer(*[1] * 5)
    for n in range(1, 6):
        await until(queued, n)
        await running.idle()
        finish(conn)
    application.app.close()


async def test_the_database_without_an_application(dsn, application, start, queued):
    application.dispatch.sync()
    running = await start(conninfo=dsn)
    await running.idle()
    application.defer(1, 2)
    await until(queued, 2)


async def test_the_driver_sleeps_until_the_next_token(dsn, start, queued, conn):
    application = Application(dsn, gates=[Throttle(rate=2.5, per=1, burst=1)])
    running = await start(application.dispatch, idle_pause=3600)
    application.defer(*[1] * 6)
    await until(queued, 6)
    (rate,) = conn.execute(
        "select 5 / extract(epoch from max(admitted_at) - min(admitted_at))"
        " from dispatch_inflight_jobs"
    ).fetchone()
    assert 1.0 <= rate <= 2.51  # late admissions lose time: the bucket holds one token
    assert len(running.looks) < 60
    application.app.close()


async def test_a_scheduled_job_is_admitted_on_time(application, start, queued, conn):
    running = await start(application.dispatch, idle_pause=3600)
    await running.idle()
    application.task.configure(schedule_in={"milliseconds": 300}).defer(k=1)
    await until(queued, 1)
    (late,) = conn.execute(
        "select extract(epoch from i.admitted_at - j.scheduled_at)"
        " from dispatch_inflight_jobs as i join procrastinate_jobs as j on j.id = i.job_id"
    ).fetchone()
    assert 0 <= late < 2


async def test_the_poll_makes_up_for_a_lost_notification(application, start, queued, conn):
    running = await start(application.dispatch, idle_pause=0.05)
    conn.execute(
        "create or replace function dispatch_wake(p_policy text) returns void language plpgsql"
        " as 'begin end'"
    )
    await running.idle()
    application.defer(1)
    await until(queued, 1)


# -- sleeping


async def test_an_idle_driver_runs_one_statement_for_each_pause(application, start):
    running = await start(application.dispatch, idle_pause=0.1)
    await running.idle()
    begin = len(running.looks)
    await async_wait_for(lambda: len(running.looks) >= begin + 10)
    looks = running.looks[begin:]
    assert all(b - a >= 0.099 for a, b in pairwise(looks[1:]))
    assert running.ticks == []


async def test_many_notifications_are_gathered(application, start, conn):
    running = await start(application.dispatch)
    await running.idle()
    begin, started = len(running.looks), time.monotonic()
    for _ in range(300):
        conn.execute("select pg_notify(dispatch_channel(), 'p')")
        await asyncio.sleep(0)
    elapsed = time.monotonic() - started
    assert len(running.looks) - begin <= elapsed / GAP + 2
    assert running.ticks == []


async def test_what_another_session_holds_is_not_asked_for_again_and_again(
    application, start, connect, queued
):
    application.dispatch.sync()
    application.defer(1)
    with connect(autocommit=False) as other:
        other.execute("select * from dispatch_tick()")
        running = await start(application.dispatch)
        begin = time.monotonic()
        await async_wait_for(lambda: len(running.ticks) >= 8)
        # pauses of 10, 20, 40, ... ms, each cut short by half at most
        assert time.monotonic() - begin > 0.4
        other.rollback()
    await until(queued, 1)


# -- failing


def break_policy(conn: psycopg.Connection, name: str) -> None:
    """Let the ticks of a policy that admit something fail."""
    conn.execute(
        f"""
        create function fail() returns trigger language plpgsql as $$
        begin raise exception 'out of order'; end
        $$;
        create trigger fail before insert on dispatch_tick_samples for each row
        when (new.policy_name = '{name}') execute function fail();
        """
    )


async def test_a_policy_that_fails_stops_no_other_and_is_tried_again(
    application, start, queued, conn, caplog
):
    other = application.app.task(name="other")(lambda k: None)
    application.dispatch.policy("bad", partition_by="k")(other)
    application.dispatch.sync()
    break_policy(conn, "bad")
    other.defer(k=1)
    running = await start(application.dispatch)
    for n in range(1, 4):
        application.defer(1)
        await until(queued, n)
    await async_wait_for(lambda: running.ticks.count("bad") >= 2)
    assert running.ticks.count("bad") < 10
    record = next(r for r in caplog.records if r.levelno == logging.ERROR)
    assert "Tick of policy bad failed" in record.getMessage()
    assert (record.action, record.policy) == ("tick_failed", "bad")
    conn.execute("drop trigger fail on dispatch_tick_samples")
    await until(queued, 4)


async def test_a_policy_that_is_refused_keeps_the_others_going(
    application, start, queued, conn, caplog
):
    other = application.app.task(name="other")(lambda k: None)
    application.dispatch.policy("bad", gates=[Concurrency(max="many")])(other)  # type: ignore[arg-type]
    await start(application.dispatch)
    assert "Policy bad was refused" in caplog.text
    application.defer(1)
    await until(queued, 1)


async def test_a_policy_that_is_dropped_is_forgotten(application, start, queued, conn):
    running = await start(application.dispatch)
    application.defer(1)
    await until(queued, 1)
    conn.execute("select dispatch_drop_policy('p', true)")
    conn.execute("select pg_notify(dispatch_channel(), 'p')")
    await async_wait_for(lambda: running.driver._paces == {})
    assert not running.task.done()


@pytest.mark.parametrize("server_ends", ["session", "immediate", "fast"])
async def test_a_lost_connection_is_made_anew(own_server, start, server_ends, caplog):
    dsn = own_server.dsn("dispatch")
    application = Application(dsn)
    running = await start(application.dispatch)

    def queued() -> int:
        with psycopg.connect(dsn) as conn:
            return len(conn.execute("select id from procrastinate_jobs").fetchall())

    application.defer(1)
    await until(queued, 1)
    await running.idle()
    if server_ends == "session":
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name = 'pydispatch'"
            )
    else:
        await asyncio.to_thread(own_server.restart, server_ends)
    application.app.close()
    application = Application(dsn)
    application.defer(2)
    await until(queued, 2)
    assert "Connection lost" in caplog.text
    application.app.close()


async def test_a_connection_that_goes_silent_is_made_anew(dsn, start, conn, queued, caplog):
    async with proxy(dsn) as between:
        application = Application(dsn)
        await start(
            application.dispatch, conninfo=between.dsn, idle_pause=0.05, tick_max_duration=0.1
        )
        application.defer(1)
        await until(queued, 1)
        between.swallowing = True
        application.defer(2)
        await async_wait_for(lambda: "gave no answer within 1.1 s" in caplog.text)
        between.swallowing = False
        await until(queued, 2)
    (record,) = [r for r in caplog.records if "gave no answer" in r.getMessage()]
    assert (record.levelno, record.action) == (logging.WARNING, "connection_lost")
    application.app.close()


@pytest.mark.parametrize("when", ["it looks", "it connects"])
async def test_a_driver_whose_connection_is_silent_stops_when_it_is_told(dsn, when, caplog):
    async with proxy(dsn) as between:
        application = Application(dsn)
        driver = Driver(application.dispatch, conninfo=between.dsn, idle_pause=0.05)
        task = asyncio.create_task(driver.run())
        if when == "it looks":
            await async_wait_for(lambda: driver._started)
        between.swallowing = True
        await async_wait_for(lambda: between.swallowed)
        driver.stop()
        started = time.monotonic()
        await asyncio.wait_for(task, 10)
        assert time.monotonic() - started < 5
    application.app.close()


async def test_what_is_wrong_at_the_start_is_raised(dsn, application):
    with pytest.raises(psycopg.OperationalError):
        await Driver(application.dispatch, conninfo=f"{dsn} port=1").run()
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create schema elsewhere")
    with pytest.raises(psycopg.errors.UndefinedFunction):
        await Driver(
            application.dispatch, conninfo=f"{dsn} options='-c search_path=elsewhere'"
        ).run()
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("alter table dispatch_policies rename to moved")
    with pytest.raises(psycopg.errors.UndefinedTable):
        await Driver(application.dispatch, sync=False).run()


async def test_a_look_that_fails_later_is_tried_again(application, start, queued, conn, caplog):
    running = await start(application.dispatch, idle_pause=0.05)
    await running.idle()
    conn.execute("alter table dispatch_policies rename to moved")
    await async_wait_for(lambda: "Looking for work failed" in caplog.text)
    conn.execute("alter table moved rename to dispatch_policies")
    application.defer(1)
    await until(queued, 1)


def test_a_driver_needs_to_know_where_to_connect():
    for dispatch in (None, Dispatch(App(connector=InMemoryConnector()))):
        with pytest.raises(ValueError, match="give conninfo"):
            Driver(dispatch)


# -- what it ticks


async def test_policies_and_shards_can_be_divided(application, start, queued, conn):
    conn.execute(
        'select dispatch_define_policy(\'other\', \'{"partition_by": ["k"],'
        ' "shard_by": ["region"]}\')'
    )
    running = await start(application.dispatch, policies=["other"], shard="east", sync=True)
    application.app.task(name="u")(lambda **_: None)
    application.defer(1)
    for region in ("east", "west"):
        conn.execute(
            "select dispatch_stage('other', 'u', %s)", [Jsonb({"k": region, "region": region})]
        )
    await until(queued, 1)
    await running.idle()
    rows = conn.execute("select args ->> 'region' from procrastinate_jobs").fetchall()
    assert rows == [("east",)]
    assert set(running.ticks) == {"other"}


async def test_the_driver_sweeps_now_and_then(application, start, conn):
    conn.execute("create table sweeps (at timestamptz)")
    conn.execute("drop function dispatch_sweep")
    conn.execute(
        "create function dispatch_sweep() returns void begin atomic"
        " insert into sweeps values (clock_timestamp()); end"
    )
    await start(application.dispatch, idle_pause=0.01, sweep_interval=0.05)
    await async_wait_for(
        lambda: conn.execute("select count(*) >= 5 from sweeps").fetchone() == (True,)
    )
    rows = conn.execute("select extract(epoch from at - lag(at) over ()) from sweeps offset 1")
    assert all(pause >= 0.04 for (pause,) in rows)


async def test_a_sweep_that_fails_is_logged(application, start, queued, conn, caplog):
    conn.execute("drop function dispatch_sweep")
    await start(application.dispatch, idle_pause=0.01, sweep_interval=0.05)
    await async_wait_for(lambda: "Sweep failed" in caplog.text)
    application.defer(1)
    await until(queued, 1)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_each_transaction_is_read_committed_whatever_the_roles_default(
    dsn, application, start, queued, conn, level
):
    conn.execute(
        f"alter role postgres in database {conn.info.dbname} "
        f"set default_transaction_isolation = '{level}'"
    )
    conn.execute(
        """
        create table levels (what text, level text);
        create function note() returns trigger language plpgsql as $$
        begin
          insert into levels values ('tick', current_setting('transaction_isolation'));
          return null;
        end
        $$;
        create trigger note after insert on procrastinate_jobs execute function note();
        drop function dispatch_sweep;
        create function dispatch_sweep() returns void begin atomic
          insert into levels values ('sweep', current_setting('transaction_isolation'));
        end
        """
    )
    await start(application.dispatch, idle_pause=0.01, sweep_interval=0.05)
    application.defer(1)
    await until(queued, 1)
    levels = (
        "select array_agg(distinct what || ' ' || level order by what || ' ' || level) from levels"
    )
    await async_wait_for(
        lambda: (
            conn.execute(levels).fetchone() == (["sweep read committed", "tick read committed"],)
        )
    )


@pytest.mark.parametrize(
    ("addition", "name"), [("", "pydispatch"), (" application_name=mine", "mine")]
)
async def test_the_session_can_be_recognized(dsn, start, application, conn, addition, name):
    await start(application.dispatch, conninfo=dsn + addition)
    names = conn.execute("select application_name from pg_stat_activity").fetchall()
    assert (name,) in names


async def test_a_tick_that_stands_still_is_ended_by_the_server(
    application, start, conn, connect, queued, caplog
):
    application.dispatch.sync()
    application.defer(1)
    with connect(autocommit=False) as other:
        other.execute("lock table dispatch_partitions in exclusive mode")
        await start(application.dispatch, tick_max_duration=0.2)
        await async_wait_for(lambda: "Connection lost" in caplog.text or "failed" in caplog.text)
        other.rollback()
    await until(queued, 1)


async def test_a_policy_that_is_named_and_missing_is_reported(application, start, caplog):
    await start(application.dispatch, policies=["p", "typo"])
    await async_wait_for(lambda: "There is no policy typo" in caplog.text)
    assert "There is no policy p" not in caplog.text.replace("policy typo", "")


async def test_the_applications_own_pool_tells_where_to_connect(dsn, start, queued, conn):
    configured = []

    async def configure(connection: psycopg.AsyncConnection) -> None:
        configured.append(connection)
        await connection.execute("set search_path to public, pg_temp")
        await connection.commit()

    app = App(
        connector=PsycopgConnector(
            conninfo=dsn, kwargs={"application_name": "mine"}, configure=configure, min_size=1
        )
    )
    dispatch = Dispatch(app)
    dispatch.policy("p", partition_by="k")(app.task(name="t")(lambda k: None))
    async with app.open_async():
        running = await start(dispatch)
        assert running.task.done() is False
        before = len(configured)
        await app.tasks["t"].defer_async(k=1)
        await until(queued, 1)
        assert before >= 1
    rows = conn.execute("select application_name from pg_stat_activity").fetchall()
    assert ("mine",) in rows


# -- stopping


async def test_stop_from_another_thread(application):
    running = Running(Driver(application.dispatch, idle_pause=NEVER))
    task = asyncio.create_task(running.driver.run())
    await running.idle()
    threading.Thread(target=running.driver.stop).start()
    await asyncio.wait_for(task, 5)


async def test_stop_before_the_start(application):
    driver = Driver(application.dispatch)
    driver.stop()
    await asyncio.wait_for(driver.run(), 5)


PROGRAM = """
import asyncio, logging, sys
from procrastinate import App, PsycopgConnector
from pydispatch import Dispatch
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
app = App(connector=PsycopgConnector(conninfo=sys.argv[1]))
dispatch = Dispatch(app)
dispatch.policy("p", partition_by="k")(app.task(name="t")(lambda k: None))
dispatch.run(idle_pause=3600)
"""


async def read_until(process: asyncio.subprocess.Process, text: bytes) -> None:
    """Read the program's log up to a line that contains the text."""
    assert process.stdout is not None
    while text not in (line := await asyncio.wait_for(process.stdout.readline(), 10)):
        assert line, "the driver ended"


@contextlib.asynccontextmanager
async def program(dsn: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A driver in a process of its own, started."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, dsn, stdout=asyncio.subprocess.PIPE
    )
    try:
        await read_until(process, b"Driver started")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def tick_that_waits(
    conn: psycopg.Connection, other: psycopg.Connection, admin: psycopg.Connection
) -> AsyncIterator[None]:
    """A driver in the middle of a tick, where another session's lock holds it until the end."""
    other.execute("lock table dispatch_partitions in exclusive mode")
    conn.execute("select dispatch_stage('p', 't', '{\"k\": 1}')")
    waiting = (
        "select count(*) = 1 from pg_stat_activity"
        " where application_name = 'pydispatch' and wait_event_type = 'Lock'"
    )
    await async_wait_for(lambda: admin.execute(waiting).fetchone() == (True,))
    yield
    other.rollback()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_the_driver_cleanly(dsn, number):
    async with program(dsn) as process:
        process.send_signal(number)
        await read_until(process, b"Driver stopped")
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_a_signal_lets_the_current_tick_end(dsn, conn, connect, admin, queued):
    async with program(dsn) as process:
        async with tick_that_waits(conn, connect(autocommit=False), admin):
            process.send_signal(signal.SIGTERM)
            await read_until(process, b"Driver stops")
        await read_until(process, b"Driver stopped")
        assert await asyncio.wait_for(process.wait(), 10) == 0
    assert queued() == 1


async def test_the_second_signal_is_not_held_off(dsn, conn, connect, admin):
    async with program(dsn) as process, tick_that_waits(conn, connect(autocommit=False), admin):
        process.send_signal(signal.SIGTERM)
        await read_until(process, b"Driver stops")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == -signal.SIGTERM


async def test_a_driver_killed_in_a_tick_loses_and_doubles_nothing(
    dsn, conn, connect, admin, start, queued
):
    async with program(dsn) as process, tick_that_waits(conn, connect(autocommit=False), admin):
        process.kill()
        await process.wait()
    assert queued() == 0
    application = Application(dsn)
    await start(application.dispatch)
    await until(queued, 1)
    assert conn.execute("select count(*) from dispatch_staged_jobs").fetchone() == (0,)
    application.app.close()
