"""A job's end reaches the database, whatever becomes of the connection in which it is said.

A real worker, whose connections break where a proxy or the server breaks them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from typing import Any

import psycopg
import pytest
from procrastinate import App, PsycopgConnector, exceptions
from procrastinate.jobs import Job, Status

from pydispatch import Concurrency, Dispatch
from pydispatch.runs import Runs
from tests.concurrency.support import cap, define, in_flight, tick, value
from tests.proxy import Proxy, proxy
from tests.support import async_wait_for

FINISH, RETRY, FETCH = "finish_job", "retry_job", "fetch_job"
NEVER = 3600.0  # seconds: a heartbeat that must not be needed

BREAKS = [
    pytest.param("statement", False, id="before it is said"),
    pytest.param("statement", True, id="before it is answered"),
    pytest.param("commit", False, id="before it is committed"),
    pytest.param("commit", True, id="before the commit is answered"),
]

Way = tuple[str, dict[str, Any], list[str]]
WAYS: dict[str, Way] = {
    "succeeded": (FINISH, {}, ["succeeded"]),
    "failed": (FINISH, {"fails": True}, ["failed"]),
    "deleted": (FINISH, {}, []),
    "retried": (RETRY, {"fails": True, "retry": True}, ["todo"]),
}


class Application:
    """An application whose task ``t`` has a cap of 1 a key, and ends when it is let go."""

    def __init__(self, dsn: str) -> None:
        self.app = App(connector=PsycopgConnector(conninfo=dsn, min_size=1))
        self.dispatch = Dispatch(self.app)
        self.ran: list[int | None] = []
        self.let_go = asyncio.Event()
        self.let_go.set()
        self.task = self._task("t", retry=False)
        self.retried = self._task("r", retry=True)

    def _task(self, name: str, retry: bool) -> Any:
        @self.dispatch.policy("p", partition_by="k", gates=[Concurrency(max=1)])
        @self.app.task(name=name, retry=retry, pass_context=True)
        async def task(context: Any, k: str, fails: bool = False) -> None:
            self.ran.append(context.job.id)
            await self.let_go.wait()
            if fails:
                raise ValueError("this run fails")

        return task

    @contextlib.asynccontextmanager
    async def worker(self, **options: Any) -> AsyncIterator[asyncio.Task[None]]:
        """A worker beside the test; its heart beats every 50 ms unless told otherwise."""
        options = {
            "update_heartbeat_interval": 0.05,
            "fetch_job_polling_interval": 0.05,
            "install_signal_handlers": False,
            "listen_notify": False,
            **options,
        }
        async with self.app.open_async():
            task = asyncio.create_task(self.app.run_worker_async(**options))
            try:
                yield task
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def between(dsn: str) -> AsyncIterator[Proxy]:
    async with proxy(dsn) as between:
        yield between


@pytest.fixture
def application(between: Proxy, conn: psycopg.Connection) -> Application:
    define(conn, **cap(1))
    return Application(between.dsn)


def statuses(conn: psycopg.Connection, job_id: int) -> list[str]:
    rows = conn.execute("select status::text from procrastinate_jobs where id = %s", [job_id])
    return [row[0] for row in rows]


async def until_ended(
    conn: psycopg.Connection, job_id: int, expected: list[str], attempts: int = 1
) -> None:
    """Wait until a run of a job has come to its end, and its slot is free."""
    slots = "select count(*) from dispatch_inflight_jobs where job_id = %s"
    tries = "select count(*) from procrastinate_jobs where id = %s and attempts = %s"
    await async_wait_for(
        lambda: statuses(conn, job_id) == expected and not value(conn, slots, job_id), 20
    )
    assert value(conn, tries, job_id, attempts) == len(expected)


async def admit(conn: psycopg.Connection) -> None:
    await async_wait_for(lambda: tick(conn) == 1, 20)


@pytest.mark.parametrize(("place", "passes_on"), BREAKS)
@pytest.mark.parametrize("way", WAYS)
async def test_an_end_is_written_though_its_connection_breaks(
    application: Application,
    between: Proxy,
    conn: psycopg.Connection,
    way: str,
    place: str,
    passes_on: bool,
) -> None:
    said, how, status = WAYS[way]
    words = [said, "COMMIT"] if place == "commit" else [said]
    delete = "always" if way == "deleted" else "never"
    async with application.worker(update_heartbeat_interval=NEVER, delete_jobs=delete):
        task = application.retried if how.get("retry") else application.task
        between.cut(*words, passes_on=passes_on)
        job_id = await task.defer_async(k="a", fails=how.get("fails", False))
        await admit(conn)
        await until_ended(conn, job_id, status)
        assert between.broken == 1
        ran = len(application.ran)
        await application.task.defer_async(k="a")
        await admit(conn)
        await async_wait_for(lambda: len(application.ran) > ran)


@pytest.mark.parametrize("way", ["succeeded", "retried"])
async def test_an_end_that_fails_twice_is_said_at_the_next_heartbeat(
    application: Application, between: Proxy, conn: psycopg.Connection, way: str, caplog: Any
) -> None:
    said, how, status = WAYS[way]
    async with application.worker():
        task = application.retried if how.get("retry") else application.task
        between.cut(said, passes_on=False, times=3)
        job_id = await task.defer_async(k="a", fails=how.get("fails", False))
        await admit(conn)
        await until_ended(conn, job_id, status)
        assert between.broken == 3
    assert "could not be written and is said again" in caplog.text


async def test_a_worker_that_is_stopped_says_what_is_missing_before_it_goes(
    application: Application, between: Proxy, conn: psycopg.Connection
) -> None:
    async with application.worker(update_heartbeat_interval=NEVER):
        between.cut(FINISH, passes_on=False, times=2)
        job_id = await application.task.defer_async(k="a")
        await admit(conn)
        await async_wait_for(lambda: between.broken == 2, 20)
        assert statuses(conn, job_id) == ["doing"]
    assert statuses(conn, job_id) == ["succeeded"]
    assert in_flight(conn) == {}


async def test_an_end_whose_session_the_server_ends_is_written(
    application: Application,
    conn: psycopg.Connection,
    connect: Callable[..., psycopg.Connection],
    admin: psycopg.Connection,
) -> None:
    application.let_go.clear()
    async with application.worker(update_heartbeat_interval=NEVER):
        job_id = await application.task.defer_async(k="a")
        await admit(conn)
        await async_wait_for(lambda: statuses(conn, job_id) == ["doing"])
        with connect(autocommit=False) as other:
            other.execute("select from procrastinate_jobs where id = %s for share", [job_id])
            application.let_go.set()
            ended = (
                "select count(pg_terminate_backend(pid)) from pg_stat_activity"
                " where datname = %s and wait_event_type = 'Lock'"
            )
            await async_wait_for(lambda: value(admin, ended, conn.info.dbname))
            other.rollback()
        await until_ended(conn, job_id, ["succeeded"])


def newer(conn: psycopg.Connection, query: str, last: Any) -> bool:
    return bool(value(conn, query) > last)


@pytest.fixture
def failover(conn: psycopg.Connection) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A function: what is committed inside its ``with`` block is lost at the end of it.

    Of the tables that the end of a job changes; as a standby does that had not received it.
    """
    tables = (
        "procrastinate_jobs",
        "dispatch_staged_jobs",
        "dispatch_inflight_jobs",
        "dispatch_inbox",
    )

    @contextlib.contextmanager
    def failover() -> Iterator[None]:
        for table in tables:
            conn.execute(f"create table saved_{table} as table {table}".encode())
        yield
        with conn.transaction():
            conn.execute("set local session_replication_role = replica")
            for table in tables:
                conn.execute(f"delete from {table}".encode())
                conn.execute(
                    f"insert into {table} overriding system value table saved_{table}".encode()
                )

    return failover


@pytest.mark.parametrize("way", ["succeeded", "failed", "retried"])
async def test_ends_that_a_failover_loses_are_said_again(
    application: Application,
    conn: psycopg.Connection,
    failover: Callable[[], contextlib.AbstractContextManager[None]],
    way: str,
) -> None:
    _, how, status = WAYS[way]
    application.let_go.clear()
    async with application.worker(concurrency=3):
        task = application.retried if how.get("retry") else application.task
        ids = [await task.defer_async(k=k, fails=how.get("fails", False)) for k in "abc"]
        assert tick(conn) == 3
        await async_wait_for(lambda: len(application.ran) == 3)
        with failover():
            application.let_go.set()
            for job_id in ids:
                await until_ended(conn, job_id, status)
        for job_id in ids:
            await until_ended(conn, job_id, status)
    assert in_flight(conn) == {}


async def test_a_job_whose_fetch_was_not_answered_waits_again(
    application: Application, between: Proxy, conn: psycopg.Connection
) -> None:
    async with application.worker(update_heartbeat_interval=NEVER) as worker:
        between.cut(FETCH, "COMMIT", passes_on=True)
        job_id = await application.task.defer_async(k="a")
        await admit(conn)
        await asyncio.wait([worker])  # procrastinate's worker ends when it cannot fetch
        assert application.ran == []
        assert statuses(conn, job_id) == ["todo"]
        assert in_flight(conn) == {}
    async with application.worker():
        await admit(conn)
        await until_ended(conn, job_id, ["succeeded"], attempts=2)


async def test_a_job_that_runs_is_left_alone_at_each_heartbeat(
    application: Application, conn: psycopg.Connection
) -> None:
    beat = "select last_heartbeat from procrastinate_workers"
    application.let_go.clear()
    async with application.worker():
        job_id = await application.task.defer_async(k="a")
        await admit(conn)
        await async_wait_for(lambda: application.ran)
        for _ in range(5):
            last = value(conn, beat)
            await async_wait_for(partial(newer, conn, beat, last))
        assert statuses(conn, job_id) == ["doing"]
        application.let_go.set()
        await until_ended(conn, job_id, ["succeeded"])


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("finish", {"status": Status.FAILED, "delete_job": False}),
        ("retry", {"retry_at": datetime(2030, 1, 1, tzinfo=timezone.utc)}),
    ],
)
async def test_who_is_no_worker_is_told_that_it_failed(
    application: Application,
    between: Proxy,
    conn: psycopg.Connection,
    method: str,
    arguments: dict[str, Any],
) -> None:
    manager = application.app.job_manager
    async with application.app.open_async():
        job_id = await application.task.defer_async(k="a")
        await admit(conn)
        between.cut(FINISH if method == "finish" else RETRY, passes_on=False)
        with pytest.raises(exceptions.ConnectorException):
            await getattr(manager, f"{method}_job_by_id_async")(job_id, **arguments)
    assert statuses(conn, job_id) == ["todo"]


# -- what is remembered


def begun(runs: Runs, job_id: int, worker_id: int = 1, attempts: int = 0) -> None:
    job = Job(id=job_id, queue="q", task_name="t", lock=None, queueing_lock=None, attempts=attempts)
    runs.begin(job, worker_id)


def again(runs: Runs, worker_id: int, *doing: tuple[int, int]) -> list[int]:
    """Return the jobs whose end is to be said again when these are doing."""
    return [each.run.job_id for each in runs.to_say_again(runs.question(worker_id), doing)]


def test_an_end_is_that_of_its_run_and_of_no_later_one() -> None:
    runs = Runs()
    begun(runs, 7)
    ending = runs.end(7, "retry_job", {})
    assert ending is not None
    assert again(runs, 1, (7, 0)) == [7]
    assert again(runs, 1, (7, 1)) == []
    begun(runs, 7, attempts=1)
    assert again(runs, 1, (7, 1)) == []
    runs.written(ending)
    runs.end(7, "finish_job", {})
    assert [each.statement for each in runs.to_say_again(runs.question(1), [(7, 1)])] == [
        "finish_job"
    ]


def test_workers_that_share_a_manager_do_not_end_each_others_jobs() -> None:
    runs = Runs()
    begun(runs, 1, worker_id=1)
    begun(runs, 2, worker_id=2)
    runs.end(1, "finish_job", {})
    runs.end(2, "finish_job", {})
    assert again(runs, 1, (1, 0), (2, 0)) == [1]
    assert again(runs, 2, (1, 0), (2, 0)) == [2]
    runs.forget(1)
    assert again(runs, 2, (2, 0)) == [2]
    assert not runs.is_in_doubt(1)


def test_what_ends_while_it_is_asked_is_not_missing() -> None:
    runs = Runs()
    begun(runs, 7)
    question = runs.question(1)
    runs.end(7, "finish_job", {})
    assert runs.to_say_again(question, [(7, 0)]) == []


def test_what_a_fetch_may_have_taken_is_given_back_once_no_fetch_is_under_way() -> None:
    runs = Runs()
    assert again(runs, 1, (7, 0)) == []
    with contextlib.suppress(ConnectionError), runs.fetching(1):
        raise ConnectionError
    assert again(runs, 2, (7, 0)) == []
    with runs.fetching(1):
        assert again(runs, 1, (7, 0)) == []
    assert again(runs, 1, (7, 0)) == [7]


def test_only_the_last_written_ends_are_remembered_and_all_that_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pydispatch.runs.REMEMBERED", 100)
    runs = Runs()
    begun(runs, 0)
    runs.end(0, "finish_job", {})
    for job_id in range(1, 1000):
        begun(runs, job_id)
        ending = runs.end(job_id, "finish_job", {})
        assert ending is not None
        runs.written(ending)
    doing = [(job_id, 0) for job_id in range(1000)]
    assert again(runs, 1, *doing) == [0, *range(900, 1000)]
