"""Every way of deferring a task with a policy stages its job."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import json
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
from procrastinate import App, Blueprint, PsycopgConnector, SyncPsycopgConnector, cli, exceptions
from procrastinate.jobs import Job, Status
from procrastinate.periodic import PeriodicDeferrer
from procrastinate.testing import InMemoryConnector
from psycopg.rows import dict_row

from pydispatch import Concurrency, Dispatch, errors
from pydispatch.manager import TAKES_CONNECTION
from tests.support import async_wait_for

UTC = datetime.timezone.utc


class Staging:
    """An application with two tasks that have policies and one that has none."""

    def __init__(self, connector: Any) -> None:
        self.app = App(connector=connector)
        self.dispatch = Dispatch(self.app)

        @self.dispatch.policy("endpoints", partition_by="endpoint", gates=[Concurrency(max=1)])
        @self.app.task(name="fetch", queue="http", priority=3, aliases=["old_fetch"])
        def fetch(endpoint: int, **rest: Any) -> None: ...

        @self.dispatch.policy("accounts", partition_by="account")
        @self.app.task(name="charge")
        def charge(account: int) -> None: ...

        @self.app.task(name="plain")
        def plain(n: int) -> None: ...

        self.fetch, self.charge, self.plain = fetch, charge, plain

    async def call(self, owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method in the way of the callers this application is for."""
        raise NotImplementedError


class SyncStaging(Staging):
    """For synchronous callers."""

    async def call(self, owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, name)(*args, **kwargs)


class AsyncStaging(Staging):
    """For asynchronous callers."""

    async def call(self, owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(owner, f"{name}_async")(*args, **kwargs)


@pytest.fixture(params=["async", "sync", "sync connector"])
async def staging(request, dsn) -> AsyncIterator[Staging]:
    """The application, open, with its policies written."""
    staging: Staging
    if request.param == "async":
        staging = AsyncStaging(PsycopgConnector(conninfo=dsn, min_size=1))
        async with staging.app.open_async():
            await staging.dispatch.sync_async()
            yield staging
    else:
        kind = PsycopgConnector if request.param == "sync" else SyncPsycopgConnector
        staging = SyncStaging(kind(conninfo=dsn, min_size=1))
        with staging.app.open():
            staging.dispatch.sync()
            yield staging


@pytest.fixture
async def transaction(staging, dsn) -> AsyncIterator[Any]:
    """A connection of the kind that the application takes, in a transaction."""
    if isinstance(staging, AsyncStaging):
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            yield connection
    else:
        with psycopg.connect(dsn) as connection:
            yield connection


async def end(transaction: Any, how: str) -> None:
    result = getattr(transaction, how)()
    if result is not None:
        await result


Rows = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def staged(conn: psycopg.Connection) -> Rows:
    """A function that returns the staged jobs in the order of their ids."""
    cursor = conn.cursor(row_factory=dict_row)
    return lambda: cursor.execute(
        "select id, policy_name, partition_key, task_name, queue_name, priority, lock,"
        " queueing_lock, scheduled_at, args, context from dispatch_staged_jobs order by id"
    ).fetchall()


@pytest.fixture
def queued(conn: psycopg.Connection) -> Rows:
    """A function that returns procrastinate's jobs in the order of their ids."""
    cursor = conn.cursor(row_factory=dict_row)
    return lambda: cursor.execute("select * from procrastinate_jobs order by id").fetchall()


# -- one job


async def test_defer_stages(staging, staged, queued):
    job_id = await staging.call(staging.fetch, "defer", endpoint=7, url="u")
    (row,) = staged()
    assert (row["id"], row["policy_name"], row["partition_key"]) == (job_id, "endpoints", "7")
    assert (row["task_name"], row["queue_name"], row["priority"]) == ("fetch", "http", 3)
    assert row["args"] == {"endpoint": 7, "url": "u"}
    assert row["context"] == {"endpoint": 7}
    assert (row["lock"], row["queueing_lock"], row["scheduled_at"]) == (None, None, None)
    assert queued() == []


async def test_a_task_without_policy_is_queued(staging, staged, queued):
    job_id = await staging.call(staging.plain, "defer", n=1)
    assert [row["id"] for row in queued()] == [job_id]
    assert staged() == []


async def test_configure_stages_with_all_it_says(staging, staged):
    moment = datetime.datetime(2030, 1, 31, 12, 30, 0, 123456, tzinfo=UTC)
    deferrer = staging.fetch.configure(
        queue="slow",
        priority=-5,
        lock="l",
        queueing_lock="q",
        schedule_at=moment,
        task_kwargs={"a": 1},
    )
    await staging.call(deferrer, "defer", endpoint=None)
    (row,) = staged()
    assert (row["queue_name"], row["priority"], row["lock"]) == ("slow", -5, "l")
    assert (row["queueing_lock"], row["scheduled_at"]) == ("q", moment)
    assert row["args"] == {"a": 1, "endpoint": None}
    assert row["partition_key"] == ""


async def test_what_was_configured_before_there_was_a_dispatch_stages(dsn, conn, staged):
    conn.execute("select dispatch_define_policy('p', '{}')")
    app = App(connector=PsycopgConnector(conninfo=dsn, min_size=1))
    task = app.task(name="t")(lambda k: None)
    kept = task.configure(lock="l")
    Dispatch(app).policy("p")(task)
    async with app.open_async():
        ids = [await kept.defer_async(k=1)] + await kept.batch_defer_async({"k": 2}, {"k": 3})
    assert [row["id"] for row in staged()] == ids
    with app.open():
        assert kept.defer(k=4) == staged()[-1]["id"]


@pytest.mark.parametrize("name", ["fetch", "old_fetch"])
async def test_a_task_that_is_named_stages(staging, staged, name):
    await staging.call(staging.app.configure_task(name), "defer", endpoint=7)
    (row,) = staged()
    assert (row["task_name"], row["policy_name"]) == ("fetch", "endpoints")


async def test_a_task_of_another_program_stages(staging, staged):
    staging.dispatch.policy("endpoints")("elsewhere.fetch")
    await staging.call(staging.app.configure_task("elsewhere.fetch"), "defer", endpoint=7)
    assert [row["task_name"] for row in staged()] == ["elsewhere.fetch"]


async def test_defer_in_the_callers_transaction(staging, transaction, staged):
    deferrer = staging.fetch.configure(connection=transaction)
    await staging.call(deferrer, "defer", endpoint=7)
    assert staged() == []
    await end(transaction, "rollback")
    assert staged() == []
    job_id = await staging.call(deferrer, "defer", endpoint=8)
    await end(transaction, "commit")
    assert [row["id"] for row in staged()] == [job_id]


async def test_bypass_queues(staging, staged, queued):
    with staging.dispatch.bypass():
        job_id = await staging.call(staging.fetch, "defer", endpoint=7)
    assert [row["id"] for row in queued()] == [job_id]
    assert staged() == []


async def test_one_defer_is_one_statement(staging, monkeypatch):
    connector = staging.app.connector.get_sync_connector()
    statements = []

    def logged(function):
        def call(query, **arguments):
            statements.append(query)
            return function(query, **arguments)

        return call

    for name in [name for name in dir(connector) if name.startswith("execute_query")]:
        monkeypatch.setattr(connector, name, logged(getattr(connector, name)))
    await staging.call(staging.fetch, "defer", endpoint=7)
    assert len(statements) == 1


class Region(str):
    """Text, of a class of its own."""


class Plan(enum.Enum):
    FREE = "free plan"


class Tier(str, enum.Enum):
    GOLD = "gold tier"


class Level(enum.IntEnum):
    HIGH = 7


VALUES = [
    7,
    2**40,
    -(2**70),
    True,
    1.5,
    decimal.Decimal("10.00"),
    uuid.UUID(int=5),
    datetime.date(2026, 1, 31),
    datetime.datetime(2026, 1, 31, 12, tzinfo=UTC),
    datetime.timedelta(hours=1),
    b"\x00bytes",
    [1, 2],
    "",
    'ünï\\code, "quoted"',
    Region("eu"),
    Plan.FREE,
    Tier.GOLD,
    Level.HIGH,
    object(),
]


async def outcome(staging: Staging, task: Any, method: str, **options: Any) -> bool:
    """Defer a job and tell whether it was accepted."""
    jobs = [{"endpoint": 1}] if task is staging.fetch else [{"n": 1}]
    try:
        if method == "defer":
            await staging.call(task.configure(**options), method, **jobs[0])
        else:
            await staging.call(task.configure(**options), method, *jobs)
    except (exceptions.ConnectorException, errors.DispatchError):
        return False
    return True


@pytest.mark.parametrize("field", ["lock", "queueing_lock", "queue", "priority"])
@pytest.mark.parametrize("method", ["defer", "batch_defer"])
async def test_a_value_is_written_as_that_of_a_job_without_policy(
    staging, staged, queued, conn, method, field
):
    column = {"queue": "queue_name"}.get(field, field)
    wrong = []
    for value in VALUES:
        accepted = await outcome(staging, staging.plain, method, **{field: value})
        bare = [row[column] for row in queued()]
        conn.execute("delete from procrastinate_jobs")
        accepted_here = await outcome(staging, staging.fetch, method, **{field: value})
        here = [row[column] for row in staged()]
        conn.execute("delete from dispatch_staged_jobs")
        if (accepted_here, here) != (accepted, bare):
            wrong.append((value, bare, here))
    assert wrong == []


async def test_jobs_with_and_without_a_policy_share_a_lock_that_is_no_text(staging):
    key = uuid.UUID(int=5)
    await staging.call(staging.plain.configure(queueing_lock=key), "defer", n=1)
    with pytest.raises(exceptions.AlreadyEnqueued):
        await staging.call(staging.fetch.configure(queueing_lock=key), "defer", endpoint=1)
    await staging.call(staging.fetch.configure(queueing_lock=Plan.FREE), "defer", endpoint=1)
    with pytest.raises(exceptions.AlreadyEnqueued):
        await staging.call(
            staging.charge.configure(queueing_lock=Plan.FREE), "batch_defer", {"account": 1}
        )


# -- many jobs


async def test_batch_defer_stages_in_order(staging, staged):
    ids = await staging.call(
        staging.fetch, "batch_defer", *({"endpoint": n % 3, "n": n} for n in range(100))
    )
    assert [(row["id"], row["args"]["n"]) for row in staged()] == list(
        zip(ids, range(100), strict=True)
    )
    assert [row["partition_key"] for row in staged()[:4]] == ["0", "1", "2", "0"]


async def test_an_empty_batch_is_nothing(staging):
    assert await staging.call(staging.fetch, "batch_defer") == []


async def test_a_batch_beyond_the_limit_of_bound_values(staging, conn):
    ids = await staging.call(
        staging.fetch, "batch_defer", *({"endpoint": n} for n in range(10_000))
    )
    assert ids == sorted(set(ids))
    assert conn.execute("select count(*) from dispatch_staged_jobs").fetchone() == (10_000,)


def mixed(staging) -> list[Job]:
    deferrers = [
        (staging.fetch, {"endpoint": 1}),
        (staging.plain, {"n": 2}),
        (staging.charge, {"account": 3}),
        (staging.fetch, {"endpoint": 4}),
        (staging.plain, {"n": 5}),
    ]
    return [task.configure(task_kwargs=kwargs).job for task, kwargs in deferrers]


async def test_a_mixed_batch_keeps_its_order(staging, staged, queued):
    jobs = await staging.call(staging.app.job_manager, "batch_defer_jobs", mixed(staging))
    where = {row["id"]: row["args"] for row in staged() + queued()}
    assert [where[job.id] for job in jobs] == [
        {"endpoint": 1},
        {"n": 2},
        {"account": 3},
        {"endpoint": 4},
        {"n": 5},
    ]
    assert [job.status for job in jobs] == ["todo"] * 5
    assert (len(staged()), len(queued())) == (3, 2)


@pytest.mark.parametrize("bad", range(5))
async def test_a_mixed_batch_is_all_or_nothing(staging, staged, queued, bad):
    jobs = mixed(staging)
    jobs[bad] = jobs[bad].evolve(queue="q" * 129)
    with pytest.raises((errors.InvalidJob, exceptions.ConnectorException)):
        await staging.call(staging.app.job_manager, "batch_defer_jobs", jobs)
    assert (staged(), queued()) == ([], [])


async def test_a_mixed_batch_in_the_callers_transaction(staging, transaction, staged, queued):
    manager = staging.app.job_manager
    await staging.call(manager, "batch_defer_jobs", mixed(staging), connection=transaction)
    assert (staged(), queued()) == ([], [])
    await end(transaction, "commit")
    assert (len(staged()), len(queued())) == (3, 2)


# -- queueing locks


@pytest.mark.parametrize("first", ["fetch", "plain"])
async def test_a_queueing_lock_holds_across_staged_and_queued(staging, staged, queued, first):
    tasks = {"fetch": (staging.fetch, {"endpoint": 1}), "plain": (staging.plain, {"n": 1})}
    task, kwargs = tasks[first]
    await staging.call(task.configure(queueing_lock="q"), "defer", **kwargs)
    with pytest.raises(exceptions.AlreadyEnqueued):
        await staging.call(staging.fetch.configure(queueing_lock="q"), "defer", endpoint=2)
    await staging.call(staging.fetch.configure(queueing_lock="other"), "defer", endpoint=2)
    assert len(staged() + queued()) == 2


@pytest.mark.parametrize("method", ["defer", "batch_defer"])
@pytest.mark.parametrize("first", ["fetch", "plain"])
async def test_the_cause_of_a_held_lock_tells_it_as_procrastinates_does(staging, method, first):
    """As that of a task without a policy, which goes through the same."""
    lock = "it's 'q'"
    await staging.call(
        getattr(staging, first).configure(queueing_lock=lock),
        "defer",
        **{"fetch": {"endpoint": 1}, "plain": {"n": 1}}[first],
    )
    told = []
    for task, kwargs in ((staging.fetch, {"endpoint": 2}), (staging.plain, {"n": 2})):
        if task is staging.plain and first == "fetch":
            continue  # procrastinate's own constraint sees only what is queued
        arguments = [kwargs] if method == "batch_defer" else []
        keywords = kwargs if method == "defer" else {}
        with pytest.raises(exceptions.AlreadyEnqueued) as raised:
            await staging.call(task.configure(queueing_lock=lock), method, *arguments, **keywords)
        cause = raised.value.__cause__
        assert isinstance(cause, exceptions.UniqueViolation)
        told.append((cause.constraint_name, cause.queueing_lock))
    assert set(told) == {("procrastinate_jobs_queueing_lock_idx_v1", lock)}


@pytest.mark.parametrize("held", ["a", "it's 'a'", "back\\slash", "l" * 500])
async def test_of_the_locks_of_a_batch_the_cause_tells_the_one_that_is_held(staging, held):
    await staging.call(staging.charge.configure(queueing_lock=held), "defer", account=1)
    locks = ["a", "it's 'a'", "back\\slash", "l" * 500, None]
    jobs = [
        staging.fetch.configure(queueing_lock=lock, task_kwargs={"endpoint": 1}).job
        for lock in locks
    ]
    with pytest.raises(exceptions.AlreadyEnqueued) as raised:
        await staging.call(staging.app.job_manager, "batch_defer_jobs", jobs)
    assert isinstance(raised.value.__cause__, exceptions.UniqueViolation)
    assert raised.value.__cause__.queueing_lock == held


async def test_a_queueing_lock_refuses_the_whole_batch(staging, staged):
    await staging.call(staging.fetch.configure(queueing_lock="q"), "defer", endpoint=1)
    with pytest.raises(exceptions.AlreadyEnqueued):
        await staging.call(
            staging.fetch.configure(queueing_lock="q"), "batch_defer", {"endpoint": 2}
        )
    with pytest.raises(exceptions.AlreadyEnqueued):
        await staging.call(
            staging.fetch.configure(queueing_lock="r"),
            "batch_defer",
            {"endpoint": 2},
            {"endpoint": 3},
        )
    assert [row["queueing_lock"] for row in staged()] == ["q"]


async def test_a_queued_lock_refuses_a_mixed_batch(staging, staged, queued):
    await staging.call(staging.plain.configure(queueing_lock="q"), "defer", n=1)
    jobs = mixed(staging)
    jobs[1] = jobs[1].evolve(queueing_lock="q")
    with pytest.raises(exceptions.AlreadyEnqueued):
        await staging.call(staging.app.job_manager, "batch_defer_jobs", jobs)
    assert (len(staged()), len(queued())) == (0, 1)


# -- what is refused


@pytest.mark.parametrize(
    "call", ["defer", "batch_defer", "get_job_status", "cancel_job_by_id", "list_jobs"]
)
async def test_who_has_not_migrated_is_told_so(staging, conn, call):
    conn.execute("alter schema public rename to another")
    conn.execute("create schema public")
    owner, arguments = staging.app.job_manager, list[Any]()
    if call.endswith("defer"):
        owner, arguments = staging.fetch, [{"endpoint": 1}] if call == "batch_defer" else []
    elif call.endswith(("status", "id")):
        arguments = [1]
    with pytest.raises(errors.NotMigrated, match="pydispatch migrate"):
        await staging.call(owner, call, *arguments, **({"endpoint": 1} if call == "defer" else {}))


async def test_an_unknown_policy_is_named(staging):
    staging.dispatch.policy("no such policy")(staging.plain)
    with pytest.raises(errors.UnknownPolicy, match="no such policy"):
        await staging.call(staging.plain, "defer", n=1)


async def test_an_invalid_job_is_refused(staging, staged):
    with pytest.raises(errors.InvalidJob, match="queue_name"):
        await staging.call(staging.fetch.configure(queue="q" * 129), "defer", endpoint=1)
    assert staged() == []


@pytest.mark.parametrize("method", ["defer", "batch_defer"])
@pytest.mark.parametrize(
    "context",
    [lambda: 1 / 0, lambda: "text", lambda: {"key": uuid.uuid4()}, lambda: {"key": float("nan")}],
    ids=["raises", "no dict", "no JSON", "not a number"],
)
async def test_nothing_is_staged_when_a_context_fails(staging, staged, method, context):
    task = staging.app.task(name="other")(lambda: None)
    staging.dispatch.policy("endpoints", context=context)(task)
    with pytest.raises(errors.InvalidJob, match="'other'"):
        await staging.call(task, method, *([{}, {}] if method == "batch_defer" else []))
    assert staged() == []


async def test_the_context_counts_and_not_the_arguments(staging, staged):
    task = staging.app.task(name="other")(lambda account: None)
    staging.dispatch.policy("accounts", context=lambda account: {"account": f"<{account}>"})(task)
    await staging.call(task, "defer", account=1)
    await staging.call(task, "batch_defer", {"account": 2}, {"account": 3})
    assert [row["partition_key"] for row in staged()] == ["<1>", "<2>", "<3>"]
    assert staged()[0]["args"] == {"account": 1}


# -- the application's own JSON


def dumps(value: Any) -> str:
    """Wrap each document, as one that encrypts would."""
    return json.dumps({"wrapped": value}, default=str)


def loads(text: str | bytes) -> Any:
    return json.loads(text)["wrapped"]


@pytest.mark.parametrize("method", ["defer", "batch_defer"])
async def test_arguments_are_written_by_the_applications_own_json_dumps(dsn, staged, method):
    connector = SyncPsycopgConnector(conninfo=dsn, json_dumps=dumps, json_loads=loads)
    staging = SyncStaging(connector)
    staging.dispatch.policy("accounts", context=lambda account: {"account": str(account)})(
        staging.plain
    )
    one: Any = uuid.UUID(int=1)
    with staging.app.open():
        staging.dispatch.sync()
        if method == "defer":
            staging.plain.configure(task_kwargs={"account": one}).defer()
        else:
            staging.plain.batch_defer({"account": one})
    (row,) = staged()
    assert row["args"] == {"wrapped": {"account": str(one)}}
    assert row["partition_key"] == str(one)


# -- periodic tasks


@pytest.fixture
async def periodic(dsn) -> AsyncIterator[AsyncStaging]:
    staging = AsyncStaging(PsycopgConnector(conninfo=dsn, min_size=1))

    @staging.app.periodic(cron="*/5 * * * *", periodic_id="a", queueing_lock="q")
    @staging.dispatch.policy("endpoints")
    @staging.app.task(name="cron", queue="crons")
    def cron(timestamp: int) -> None: ...

    async with staging.app.open_async():
        await staging.dispatch.sync_async()
        yield staging


@pytest.fixture
async def periodic_dsn(dsn, conn) -> AsyncIterator[str]:
    """A database whose policies are written, and in the end one without the role ``weak``."""
    conn.execute("select dispatch_define_policy('endpoints', '{}')")
    yield dsn
    if conn.execute("select from pg_roles where rolname = 'weak'").fetchone():
        conn.execute("drop owned by weak")
        conn.execute("drop role weak")


async def defer_periodic(staging: Staging, at: float) -> None:
    """Do what one of several workers does at a moment."""
    deferrer = PeriodicDeferrer(registry=staging.app.periodic_registry, max_delay=600)
    await deferrer.defer_jobs(deferrer.get_previous_tasks(at=at))


async def test_a_periodic_job_is_staged_once_for_each_timestamp(periodic, staged, conn):
    for at in (600.5, 600.5, 601):
        await defer_periodic(periodic, at)
    (row,) = staged()
    assert (row["task_name"], row["queue_name"]) == ("cron", "crons")
    assert row["args"] == {"timestamp": 600}
    conn.execute("delete from dispatch_staged_jobs")
    for at in (900.5, 900.5):
        await defer_periodic(periodic, at)
    assert [row["args"] for row in staged()] == [{"timestamp": 900}]


async def test_a_periodic_jobs_locks_need_not_be_text(periodic, staged):
    task = periodic.app.tasks["cron"]
    job = task.configure(lock=7, queueing_lock=uuid.UUID(int=5), priority=Level.HIGH).job
    job = job.evolve(task_kwargs={"timestamp": 600})
    await periodic.app.job_manager.defer_periodic_job(job, "b", 600)
    (row,) = staged()
    assert (row["lock"], row["queueing_lock"]) == ("7", uuid.UUID(int=5).hex)
    assert row["priority"] == 7


async def test_a_periodic_job_waits_for_its_queueing_lock(periodic, staged, conn):
    await defer_periodic(periodic, 600.5)
    await defer_periodic(periodic, 900.5)
    assert [row["args"] for row in staged()] == [{"timestamp": 600}]
    conn.execute("delete from dispatch_staged_jobs")
    await defer_periodic(periodic, 900.5)
    assert [row["args"] for row in staged()] == [{"timestamp": 900}]


async def test_periodic_jobs_need_their_own_timestamp(periodic):
    job = periodic.app.tasks["cron"].configure(task_kwargs={"timestamp": 1}).job
    with pytest.raises(exceptions.InvalidTimestamp):
        await periodic.app.job_manager.defer_periodic_job(job, "a", 2)


async def test_a_periodic_task_without_policy_is_queued(periodic, staged, queued):
    staging = periodic
    staging.app.periodic(cron="*/5 * * * *")(staging.app.task(name="p")(lambda timestamp: None))
    await defer_periodic(staging, 600.5)
    assert [row["task_name"] for row in queued()] == ["p"]
    assert [row["task_name"] for row in staged()] == ["cron"]


NOTHING_MIGRATED = "alter function dispatch_stage_periodic rename to moved"
NO_RIGHTS = """
create role weak login;
grant usage on schema public to weak;
grant select, insert, update, delete on all tables in schema public to weak;
grant usage on all sequences in schema public to weak;
revoke insert on dispatch_staged_jobs from weak
"""


@pytest.mark.parametrize(
    ("fault", "role", "advice"),
    [
        pytest.param(NOTHING_MIGRATED, "postgres", "pydispatch migrate", id="not migrated"),
        pytest.param(NO_RIGHTS, "weak", "grant the worker's role", id="a right is missing"),
    ],
)
async def test_a_worker_outlives_a_periodic_task_that_cannot_be_staged(
    periodic_dsn, conn, caplog, fault, role, advice
):
    conn.execute(fault)
    staging = AsyncStaging(PsycopgConnector(conninfo=f"{periodic_dsn} user={role}", min_size=1))
    ran = asyncio.Event()
    staging.app.task(name="set")(ran.set)

    @staging.app.periodic(cron="* * * * *")
    @staging.dispatch.policy("endpoints")
    @staging.app.task(name="cron")
    def cron(timestamp: int) -> None: ...

    async with staging.app.open_async():
        worker = asyncio.create_task(staging.app.run_worker_async(install_signal_handlers=False))
        await async_wait_for(lambda: "cannot be staged" in caplog.text or worker.done())
        await staging.app.configure_task("set").defer_async()
        await asyncio.wait_for(ran.wait(), 60)
        assert not worker.done()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    record = next(r for r in caplog.records if r.name == "pydispatch.manager")
    assert (record.levelname, record.action) == ("ERROR", "periodic_job_refused")
    assert advice in record.getMessage()


async def test_a_periodic_job_that_is_refused_does_not_stop_the_worker(periodic, staged, caplog):
    periodic.app.periodic(cron="*/5 * * * *")(
        periodic.dispatch.policy("endpoints", context=lambda **_: 1 / 0)(
            periodic.app.task(name="bad")(lambda timestamp: None)
        )
    )
    await defer_periodic(periodic, 600.5)
    assert [row["task_name"] for row in staged()] == ["cron"]
    (record,) = [r for r in caplog.records if r.name == "pydispatch.manager"]
    assert record.levelname == "ERROR"
    assert "bad[None](timestamp=600)" in record.getMessage()


# -- procrastinate's own command line


async def test_procrastinates_command_line_stages(dsn, staged):
    staging = AsyncStaging(PsycopgConnector(conninfo=dsn, min_size=1))
    async with staging.app.open_async():
        await staging.dispatch.sync_async()
    await cli.execute_command(
        {
            "command": "defer",
            "app": staging.app,
            "func": cli.defer,
            "task": "fetch",
            "json_args": '{"endpoint": 7}',
            "ignore_already_enqueued": False,
            "unknown": False,
        }
    )
    assert [row["partition_key"] for row in staged()] == ["7"]


# -- what the returned id is good for


async def test_the_id_works_before_admission(staging, staged):
    manager = staging.app.job_manager
    job_id = await staging.call(staging.fetch, "defer", endpoint=7)
    assert await staging.call(manager, "get_job_status", job_id) == Status.TODO
    assert await staging.call(manager, "cancel_job_by_id", job_id) is True
    assert staged() == []
    assert await staging.call(manager, "cancel_job_by_id", job_id) is False


async def test_the_id_works_after_admission(staging, conn, tick, staged):
    manager = staging.app.job_manager
    job_id = await staging.call(staging.fetch, "defer", endpoint=7)
    tick(conn)
    assert staged() == []
    assert await staging.call(manager, "get_job_status", job_id) == Status.TODO
    conn.execute("update procrastinate_jobs set status = 'doing'")
    assert await staging.call(manager, "get_job_status", job_id) == Status.DOING
    assert await staging.call(manager, "cancel_job_by_id", job_id) is False
    assert await staging.call(manager, "cancel_job_by_id", job_id, abort=True) is True
    conn.execute("update procrastinate_jobs set status = 'aborted'")
    assert await staging.call(manager, "get_job_status", job_id) == Status.ABORTED


@pytest.mark.parametrize("delete_job", [True, False])
async def test_a_queued_job_is_cancelled_by_the_id_that_defer_returned(
    staging, conn, tick, queued, delete_job
):
    job_id = await staging.call(staging.fetch, "defer", endpoint=7)
    tick(conn)
    manager = staging.app.job_manager
    assert await staging.call(manager, "cancel_job_by_id", job_id, delete_job=delete_job) is True
    assert [row["status"] for row in queued()] == ([] if delete_job else ["cancelled"])


async def test_ids_of_jobs_without_policy_work_too(staging):
    manager = staging.app.job_manager
    job_id = await staging.call(staging.plain, "defer", n=1)
    assert await staging.call(manager, "get_job_status", job_id) == Status.TODO
    assert await staging.call(manager, "cancel_job_by_id", job_id) is True
    assert await staging.call(manager, "get_job_status", job_id) == Status.CANCELLED


async def test_an_unknown_id_is_reported_as_procrastinate_does(staging):
    manager = staging.app.job_manager
    with pytest.raises(exceptions.NoResult):
        await staging.call(manager, "get_job_status", 123456789)
    assert await staging.call(manager, "cancel_job_by_id", 123456789) is False


async def test_status_and_cancel_in_the_callers_transaction(staging, transaction, staged):
    manager = staging.app.job_manager
    deferrer = staging.fetch.configure(connection=transaction)
    job_id = await staging.call(deferrer, "defer", endpoint=7)
    with pytest.raises(exceptions.NoResult):
        await staging.call(manager, "get_job_status", job_id)
    status = await staging.call(manager, "get_job_status", job_id, connection=transaction)
    assert status == Status.TODO
    await end(transaction, "commit")
    assert await staging.call(manager, "cancel_job_by_id", job_id, connection=transaction)
    await end(transaction, "rollback")
    assert [row["id"] for row in staged()] == [job_id]


def test_cancelling_waits_for_the_tick_that_is_admitting(dsn, conn, connect, wait_blocked, queued):
    staging = SyncStaging(SyncPsycopgConnector(conninfo=dsn, min_size=1))
    ticking, cancelling = connect(autocommit=False), connect()
    results = []
    with staging.app.open():
        staging.dispatch.sync()
        job_id = staging.fetch.defer(endpoint=7)
        ticking.execute("select * from dispatch_tick()")
        thread = threading.Thread(
            target=lambda: results.append(
                staging.app.job_manager.cancel_job_by_id(job_id, connection=cancelling)
            )
        )
        thread.start()
        wait_blocked(cancelling.info.backend_pid)
        ticking.commit()
        thread.join(10)
    assert results == [True]
    assert [row["status"] for row in queued()] == ["cancelled"]


# -- writing the policies


async def test_sync_writes_policies_and_tasks(staging, conn):
    rows = conn.execute("select task_name, policy_name from dispatch_tasks order by 1").fetchall()
    assert rows == [("charge", "accounts"), ("fetch", "endpoints"), ("old_fetch", "endpoints")]
    rows = conn.execute("select policy_name, definition from dispatch_policies order by 1")
    assert rows.fetchall() == [
        ("accounts", {"partition_by": ["account"]}),
        (
            "endpoints",
            {"partition_by": ["endpoint"], "gates": [{"type": "concurrency", "max": 1}]},
        ),
    ]


async def test_sync_is_all_or_nothing(staging, conn):
    staging.dispatch.policy("a good one", partition_by="key")
    staging.dispatch.policy("a bad one", gates=[Concurrency(max=-1, name="")])
    with pytest.raises(errors.InvalidDefinition):
        await staging.call(staging.dispatch, "sync")
    assert conn.execute("select count(*) from dispatch_policies").fetchone() == (2,)


async def test_sync_in_the_callers_transaction(staging, transaction, conn):
    staging.dispatch.policy("new", partition_by="key")
    await staging.call(staging.dispatch, "sync", connection=transaction)
    assert conn.execute("select count(*) from dispatch_policies").fetchone() == (2,)
    await end(transaction, "commit")
    assert conn.execute("select count(*) from dispatch_policies").fetchone() == (3,)


async def test_sync_refuses_a_task_whose_policy_is_nowhere(staging):
    staging.dispatch.policy("nowhere")(staging.plain)
    with pytest.raises(errors.UnknownPolicy, match="nowhere"):
        await staging.call(staging.dispatch, "sync")


async def test_sync_warns_of_a_task_that_is_not_in_the_application(staging, caplog):
    staging.dispatch.policy("accounts")(Blueprint().task(name="lost")(lambda: None))
    await staging.call(staging.dispatch, "sync")
    assert "Task lost has a policy but is not in the application" in caplog.text


# -- without a database


class Noting(InMemoryConnector):
    """Notes the connections that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def execute_query_one_with_connection(self, connection: Any, query: str, **rest: Any) -> Any:
        self.given.append(connection)
        return super().execute_query_one_with_connection(connection, query, **rest)

    async def execute_query_one_async_with_connection(
        self, connection: Any, query: str, **rest: Any
    ) -> Any:
        self.given.append(connection)
        return await super().execute_query_one_async_with_connection(connection, query, **rest)


@pytest.mark.parametrize("kind", [SyncStaging, AsyncStaging])
async def test_a_connection_reaches_a_connector_in_memory(kind):
    connector = Noting()
    staging = kind(connector)
    job_id = await staging.fetch.defer_async(endpoint=1)
    manager = staging.app.job_manager
    for method in ("get_job_status", "cancel_job_by_id"):
        call = getattr(manager, method if kind is SyncStaging else f"{method}_async")
        if kind is SyncStaging:
            await asyncio.to_thread(call, job_id, connection="mine")
        else:
            await call(job_id, connection="mine")
    assert connector.given == (["mine"] * 2 if TAKES_CONNECTION else [])
