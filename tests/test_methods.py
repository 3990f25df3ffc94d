"""procrastinate's own methods and shell do with a job that has a policy what they do without.

Each test makes two jobs that differ in nothing but that one task has a policy, brings both into
the same state, does the same to both, and compares what came of it.
"""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Iterable
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from procrastinate import App, PsycopgConnector, exceptions
from procrastinate.jobs import Job, Status
from procrastinate.shell import ProcrastinateShell
from psycopg.rows import dict_row

from pydispatch import Dispatch

LATER = datetime.datetime(2040, 1, 1, tzinfo=datetime.timezone.utc)
POLICY, BARE = "policy", "bare"
WAITING = ("staged", "queued")
ENDED = ("succeeded", "failed", "aborted", "cancelled")
STATES = (*WAITING, "running", *ENDED)


class Twins:
    """An application with one task that has a policy and one that has none, and a job of each."""

    def __init__(self, app: App, conn: psycopg.Connection[Any]) -> None:
        self.app = app
        self.dispatch = Dispatch(app)
        self.conn = conn
        self.manager = app.job_manager
        self.ids: dict[str, int] = {}

        @self.dispatch.policy("p", partition_by="n")
        @app.task(name=POLICY)
        def with_policy(n: int) -> None: ...

        @app.task(name=BARE)
        def bare(n: int) -> None: ...

    async def bring(self, state: str) -> None:
        """Defer both jobs and bring them into a state; ``staged`` has its like in the queue."""
        for name in (POLICY, BARE):
            self.ids[name] = await self.app.configure_task(
                name, queue=f"q-{name}", priority=3, lock=f"lock-{name}", queueing_lock=f"ql-{name}"
            ).defer_async(n=1)
        if state == "staged":
            return
        self.tick()
        if state == "queued":
            return
        if state == "cancelled":
            for id in self.ids.values():
                assert await self.manager.cancel_job_by_id_async(id)
            return
        worker = await self.manager.register_worker()
        for name in (POLICY, BARE):
            job = await self.manager.fetch_job([f"q-{name}"], worker)
            assert job is not None
            assert job.id == self.ids[name]
            if state == "aborted":
                assert await self.manager.cancel_job_by_id_async(job.id, abort=True)
            if state != "running":
                await self.manager.finish_job(job, Status(state), delete_job=False)

    def tick(self) -> None:
        self.conn.execute("select from dispatch_tick()")

    async def both(self, method: str, **arguments: Any) -> list[Any]:
        """What a method gives for each of the two by its id, its error included."""
        outcomes: list[Any] = []
        for name in (POLICY, BARE):
            try:
                given = await getattr(self.manager, method)(job_id=self.ids[name], **arguments)
            except exceptions.ProcrastinateException as error:
                cause = error.__cause__ or error
                said = str(cause).splitlines()[0].replace(f"id: {self.ids[name]}", "id: ID")
                given = (type(error).__name__, said)
            outcomes.append(given)
        return outcomes

    def rows(self) -> list[dict[str, Any] | None]:
        """Both jobs as a reader of all jobs sees them, without what tells the two apart."""
        return [self._row(name) for name in (POLICY, BARE)]

    def _row(self, name: str) -> dict[str, Any] | None:
        with self.conn.cursor(row_factory=dict_row) as cursor:
            cursor.execute("select * from dispatch_jobs where id = %s", [self.ids[name]])
            row = cursor.fetchone()
        if row is not None:
            for column in ("id", "task_name", "worker_id"):
                del row[column]
            for column in ("queue_name", "lock", "queueing_lock"):
                row[column] = row[column] and row[column].replace(name, "NAME")
        return row

    def events(self) -> list[list[str]]:
        """The events of both jobs."""
        return [
            [
                row[0]
                for row in self.conn.execute(
                    "select type::text from procrastinate_events where job_id = %s"
                    " and type <> 'scheduled' order by id",
                    [self.ids[name]],
                )
            ]
            for name in (POLICY, BARE)
        ]


@pytest.fixture
async def twins(dsn: str, conn: psycopg.Connection[Any]) -> AsyncIterator[Twins]:
    app = App(connector=PsycopgConnector(conninfo=dsn, min_size=1))
    twins = Twins(app, conn)
    async with app.open_async():
        await twins.dispatch.sync_async()
        yield twins


def alike(pair: Iterable[Any]) -> Any:
    """What two have in common: all."""
    mine, bare = pair
    assert mine == bare
    return mine


@pytest.mark.parametrize("state", STATES)
async def test_the_status_is_the_same(twins: Twins, state: str) -> None:
    await twins.bring(state)
    expected = {"staged": "todo", "queued": "todo", "running": "doing"}.get(state, state)
    assert alike(await twins.both("get_job_status_async")) is Status(expected)
    assert [await sync_to_async(twins.manager.get_job_status)(id) for id in twins.ids.values()] == [
        Status(expected)
    ] * 2


@pytest.mark.parametrize("delete_job", [False, True])
@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("state", STATES)
async def test_cancelling_comes_to_the_same(
    twins: Twins, state: str, abort: bool, delete_job: bool
) -> None:
    await twins.bring(state)
    done = alike(await twins.both("cancel_job_by_id_async", abort=abort, delete_job=delete_job))
    assert done == (state in WAITING or (state == "running" and abort))
    row = alike(twins.rows())
    assert (row is None) == (state in WAITING and delete_job)
    alike(twins.events())


@pytest.mark.parametrize("delete_job", [False, True])
@pytest.mark.parametrize("status", [Status.SUCCEEDED, Status.FAILED])
@pytest.mark.parametrize("state", STATES)
async def test_finishing_comes_to_the_same(
    twins: Twins, state: str, status: Status, delete_job: bool
) -> None:
    await twins.bring(state)
    outcome = alike(
        await twins.both("finish_job_by_id_async", status=status, delete_job=delete_job)
    )
    assert (outcome is None) == (state not in ENDED)
    alike(twins.rows())
    alike(twins.events())
    twins.tick()
    assert await twins.manager.fetch_job([f"q-{POLICY}"], 1) is None


@pytest.mark.parametrize("state", STATES)
async def test_retrying_comes_to_the_same_and_goes_through_the_policy(
    twins: Twins, state: str
) -> None:
    await twins.bring(state)
    changes = {"retry_at": LATER, "priority": 7, "queue": "q", "lock": "l"}
    outcome = alike(await twins.both("retry_job_by_id_async", **changes))
    assert (outcome is None) == (state in ("running", "failed"))
    row = alike(twins.rows())
    if outcome is not None:
        return
    assert (row["status"], row["scheduled_at"], row["attempts"]) == (
        "todo",
        LATER,
        1 + (state == "failed"),
    )
    alike(twins.events())
    assert twins.conn.execute(
        "select array_agg(id) from dispatch_staged_jobs where parked"
    ).fetchone() == ([twins.ids[POLICY]],)
    twins.conn.execute("select set_config('dispatch.fake_now', %s, false)", [str(LATER)])
    twins.tick()
    alike(twins.rows())
    table = twins.conn.execute(
        "select priority, queue_name, lock, scheduled_at, attempts from procrastinate_jobs"
        " where id = any (%s)",
        [list(twins.ids.values())],
    ).fetchall()
    alike(table)


@pytest.mark.parametrize("state", STATES)
async def test_lists_show_it_alike(twins: Twins, state: str) -> None:
    await twins.bring(state)
    status = {"staged": "todo", "queued": "todo", "running": "doing"}.get(state, state)
    for name in (POLICY, BARE):
        # Each filter by itself finds the one and not the other.
        for filter in (
            {"id": twins.ids[name]},
            {"queue": f"q-{name}", "status": status},
            {"task": name},
            {"lock": f"lock-{name}"},
            {"queueing_lock": f"ql-{name}"},
        ):
            (job,) = await twins.manager.list_jobs_async(**filter)
            assert (job.id, job.status, job.task_kwargs) == (twins.ids[name], status, {"n": 1})
            (same,) = await sync_to_async(twins.manager.list_jobs)(**filter)
            assert same == job
        assert not list(await twins.manager.list_jobs_async(task=name, status="aborting"))
    for kind, label in (("queues", "q-{}"), ("tasks", "{}"), ("locks", "lock-{}")):
        found = {
            row.pop("name"): row for row in await getattr(twins.manager, f"list_{kind}_async")()
        }
        assert found[label.format(POLICY)] == found[label.format(BARE)]
        assert found[label.format(POLICY)][status] == 1
        assert list(
            await sync_to_async(getattr(twins.manager, f"list_{kind}"))(status=status)
        ) == list(await getattr(twins.manager, f"list_{kind}_async")(status=status))


async def test_running_jobs_alone_are_stalled_or_to_abort(twins: Twins) -> None:
    await twins.bring("staged")
    with pytest.raises(AssertionError):
        alike(twins.events())  # it is in no table of procrastinate's yet
    assert not list(await twins.manager.list_jobs_to_abort_async())
    assert not list(await twins.manager.get_stalled_jobs(seconds_since_heartbeat=0))


@pytest.mark.parametrize("state", [*ENDED, "staged and cancelled"])
async def test_old_jobs_are_deleted_alike(twins: Twins, state: str) -> None:
    await twins.bring("staged" if state == "staged and cancelled" else state)
    if state == "staged and cancelled":
        await twins.both("cancel_job_by_id_async")
    twins.conn.execute("update procrastinate_events set at = at - interval '2 hours'")
    await twins.manager.delete_old_jobs(
        nb_hours=1, include_failed=True, include_cancelled=True, include_aborted=True
    )
    assert alike(twins.rows()) is None


async def test_a_dead_job_is_failed_and_can_be_retried(twins: Twins) -> None:
    await twins.bring("staged")
    twins.conn.execute(
        "alter table procrastinate_jobs add constraint no check (task_name <> 'policy') not valid"
    )
    twins.tick()
    assert twins.conn.execute("select id from dispatch_dead_jobs").fetchone() == (
        twins.ids[POLICY],
    )
    id = twins.ids[POLICY]
    assert await twins.manager.get_job_status_async(id) is Status.FAILED
    (job,) = await twins.manager.list_jobs_async(id=id)
    assert job.status == "failed"
    assert not await twins.manager.cancel_job_by_id_async(id)
    with pytest.raises(exceptions.ConnectorException):
        await twins.manager.finish_job_by_id_async(id, Status.SUCCEEDED, delete_job=False)
    twins.conn.execute("alter table procrastinate_jobs drop constraint no")
    await twins.manager.retry_job_by_id_async(id, retry_at=LATER, priority=9, queue="other")
    (job,) = await twins.manager.list_jobs_async(id=id)
    assert (job.status, job.priority, job.queue, job.scheduled_at) == ("todo", 9, "other", LATER)


@pytest.mark.parametrize("state", STATES)
async def test_the_shell_says_the_same(
    twins: Twins, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await twins.bring(state)
    shell = ProcrastinateShell(twins.manager)

    async def say(name: str, command: str) -> str:
        await sync_to_async(shell.onecmd)(command.format(id=twins.ids[name], name=name))
        said = capsys.readouterr()
        text = said.out + said.err.rpartition("procrastinate.")[2]
        return text.replace(f"#{twins.ids[name]} ", "#ID ").replace(name, "NAME")

    for command in (
        "list_jobs id={id} details",
        "list_queues queue=q-{name}",
        "list_tasks task={name}",
        "list_locks lock=lock-{name}",
        "cancel {id}",
        "retry {id}",
    ):
        said = [await say(name, command) for name in (POLICY, BARE)]
        assert alike(said)


async def test_the_worker_sees_the_id_that_defer_returned(twins: Twins) -> None:
    seen: list[int | None] = []

    @twins.dispatch.policy("p")
    @twins.app.task(name="look", pass_context=True)
    def look(context: Any, n: int) -> None:
        seen.append(context.job.id)

    id = await look.defer_async(n=1)
    many = [
        job.id
        for job in await twins.manager.batch_defer_jobs_async(
            [
                Job(
                    id=None,
                    queue="default",
                    lock=None,
                    queueing_lock=None,
                    task_name="look",
                    task_kwargs={"n": n},
                )
                for n in range(3)
            ]
        )
    ]
    twins.tick()
    await twins.app.run_worker_async(wait=False, listen_notify=False)
    assert seen == [id, *many]
