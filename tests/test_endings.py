"""Every way a job can end or come back, under each gate and both retry strategies.

Two jobs of one partition wait behind a gate that lets one of them through: the subject, to which
the ending happens, and the follower. After the ending are looked at: the slot, the observation,
the partition's counters and due time, how many live copies of the subject there are, and whether
the gate lets the next job through; in the end, that everything runs once and leaves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from tests.support import Clock
from tests.ticks import Tick

GATES: dict[str, dict[str, Any]] = {
    "throttle": {"type": "throttle", "rate": 1, "per": 60},
    "concurrency": {"type": "concurrency", "max": 1, "full_backoff": 30},
    "adaptive": {
        "type": "adaptive_concurrency",
        "initial_max": 1,
        "target_lag_ms": 1000,
        "full_backoff": 30,
    },
}
TOKEN = timedelta(seconds=60)  # from the admission to the next token
BACKOFF = timedelta(seconds=30)  # from the admission to the next look at a full partition
MILLISECOND = timedelta(milliseconds=1)
LAG = timedelta(milliseconds=200)  # from the admission to the start
STALE = 300.0  # inflight_stale_after, seconds


class World:
    """A policy with one partition, and what a worker, a user and an operator do to its jobs."""

    def __init__(
        self, conn: psycopg.Connection, clock: Clock, tick: Tick, gate: str, strategy: str
    ) -> None:
        self.conn = conn
        self.clock = clock
        self.gate = gate
        self.strategy = strategy
        self.policy = f"{gate}, {strategy}"
        self.subject = f"{self.policy}: subject"
        self.follower = f"{self.policy}: follower"
        self._tick = tick
        self.define()
        self.subject_id = self.stage(self.subject)
        self.stage(self.follower)

    # -- the policy

    def define(self, **more: Any) -> None:
        definition = {
            "partition_by": "k",
            "gates": [GATES[self.gate]],
            "retry_strategy": self.strategy,
            **more,
        }
        self.run("select dispatch_define_policy(%s, %s)", self.policy, Jsonb(definition))

    def stage(self, task: str) -> int:
        query = "select dispatch_stage(%s, %s, p_lock => %s)"
        return int(self.value(query, self.policy, task, task))

    def tick(self) -> dict[str, Any]:
        (result,) = self._tick(self.conn, self.policy)
        return result

    def fold(self) -> None:
        self.run("select dispatch_fold(%s, dispatch_now())", self.policy)

    # -- what happens to its jobs

    def start(self, task: str | None = None) -> None:
        """Let a worker fetch a job, this very one, LAG after its admission."""
        job_id = self.job_id(task)
        self.run(
            "with worker as (insert into procrastinate_workers (last_heartbeat)"
            "  values (dispatch_now()) returning id)"
            " update procrastinate_jobs as job set status = 'doing', worker_id = worker.id"
            " from worker where job.id = %s and status = 'todo'",
            job_id,
        )
        self.run(
            "update procrastinate_events set at = %s + (select max(admitted_at)"
            "  from dispatch_admissions where job_id = %s)"
            " where id = (select max(id) from procrastinate_events"
            "  where type = 'started' and job_id = %s)",
            LAG,
            job_id,
            job_id,
        )

    def finish(
        self, status: str = "succeeded", *, delete: bool = False, task: str | None = None
    ) -> None:
        self.run(
            "select procrastinate_finish_job_v1(%s, %s, %s)", self.job_id(task), status, delete
        )

    def finish_elsewhere(self) -> None:
        self.run("select dispatch_finish(%s, true)", self.job_id())

    def cancel(self, *, abort: bool = False, delete: bool = False) -> None:
        self.run("select procrastinate_cancel_job_v1(%s, %s, %s)", self.job_id(), abort, delete)

    def retry(self, *, version: int = 2, after: float | None = None) -> None:
        at = None if after is None else self.clock.now + timedelta(seconds=after)
        self.run(
            f"select procrastinate_retry_job_v{version}(%s, %s, null, null, null)",
            self.job_id(),
            at,
        )

    def lose_worker(self) -> None:
        """Let the subject's worker die; a sweep comes when it has been silent for too long."""
        self.start()
        self.clock.advance(STALE + 1)
        self.run("select dispatch_sweep()")

    def refuse(self, yes: bool) -> None:
        """Let procrastinate's table refuse the subject, or take it again."""
        self.run("alter table procrastinate_jobs drop constraint if exists refusal")
        if yes:
            self.run(
                "alter table procrastinate_jobs add constraint refusal"
                f" check (task_name <> '{self.subject}') not valid"
            )

    def by_id(self, query: str) -> None:
        """Run a query with ``{id}`` replaced by the id that defer returned."""
        self.run(query.format(id=self.subject_id))

    # -- what there is to see

    def run(self, query: str, *arguments: Any) -> psycopg.Cursor:
        return self.conn.execute(query.encode(), arguments)

    def value(self, query: str, *arguments: Any) -> Any:
        row = self.run(query, *arguments).fetchone()
        assert row is not None
        return row[0]

    def job_id(self, task: str | None = None) -> int:
        query = "select max(id) from procrastinate_jobs where task_name = %s"
        return int(self.value(query, task or self.subject))

    def partition(self) -> dict[str, Any]:
        cursor = self.conn.cursor(row_factory=dict_row)
        cursor.execute("select * from dispatch_partitions where policy_name = %s", [self.policy])
        row = cursor.fetchone()
        assert row is not None
        return row

    def slots(self) -> list[int]:
        """Return the procrastinate ids of the jobs that hold a slot."""
        query = "select job_id from dispatch_inflight_jobs where policy_name = %s"
        return [job_id for (job_id,) in self.run(query, self.policy)]

    def observations(self) -> list[tuple[bool, float]]:
        return self.run(
            "select succeeded, lag_ms from dispatch_inbox"
            " where policy_name = %s and succeeded is not null order by id",
            self.policy,
        ).fetchall()

    def learned(self) -> int:
        """Return how many observations the gate has taken in."""
        query = "select sum(sample_count) from dispatch_adaptive_stats where partition_id = %s"
        return int(self.value(query, self.partition()["id"]) or 0)

    def copies(self, task: str | None = None) -> tuple[int, int, int]:
        """Return how often a job is staged, how often a worker may run it, how often it is parked.

        A parked row is no copy of its own: it goes with a staged one.
        """
        row = self.run(
            "select"
            " (select count(*) from dispatch_staged_jobs where task_name = %s),"
            " count(*) filter (where scheduled_at is distinct from dispatch_parked_until()),"
            " count(*) filter (where scheduled_at = dispatch_parked_until())"
            " from procrastinate_jobs"
            " where task_name = %s and status in ('todo', 'doing')",
            *[task or self.subject] * 2,
        ).fetchone()
        assert row is not None
        return row

    def statuses(self, task: str) -> list[str]:
        """Return the status of each row that procrastinate has of a job."""
        query = "select status::text from procrastinate_jobs where task_name = %s"
        return [status for (status,) in self.run(query, task)]

    def state(self) -> str | None:
        """Return the subject's state, None when nothing is known of it any more."""
        row = self.run("select state from dispatch_job_states(%s)", self.subject_id).fetchone()
        return row[0] if row else None


@dataclasses.dataclass(frozen=True)
class After:
    """What is to be seen after an ending.

    Attributes:
        state: What ``dispatch_job`` says, None for an unknown job.
        slot: The subject has a slot.
        tries: The tries that are observed, by their success.
        copies: The subject's copies: staged, runnable, parked.
        waits: Seconds for which the subject itself must not be admitted yet.
        woken: The partition is looked at again, although the slot was taken again at once.
    """

    state: str | None
    slot: bool = False
    tries: tuple[bool, ...] = ()
    copies: tuple[int, int, int] = (0, 0, 0)
    waits: float = 0
    woken: bool = False


@dataclasses.dataclass(frozen=True)
class Ending:
    """A way to end.

    Attributes:
        happens: What happens to the subject.
        restage: What is then to be seen, when retried jobs wait in the policy again.
        bypass: The same, when procrastinate retries them alone.
        before: What happens before the first tick.
        admitted: The first tick admits the subject: True; finds it refused: False; there is no
            first tick, because the ending comes before: None.
    """

    happens: Callable[[World], None]
    restage: After
    bypass: After
    before: Callable[[World], None]
    admitted: bool | None


def ending(
    happens: Callable[[World], None],
    restage: After,
    bypass: After | None = None,
    *,
    before: Callable[[World], None] = lambda world: None,
    admitted: bool | None = True,
) -> Ending:
    return Ending(happens, restage, bypass or restage, before, admitted)


def do(method: str, *arguments: Any, **options: Any) -> Callable[[World], None]:
    return lambda world: getattr(world, method)(*arguments, **options)


def steps(*each: Callable[[World], None]) -> Callable[[World], None]:
    def happens(world: World) -> None:
        for step in each:
            step(world)

    return happens


start = do("start")
finish = do("finish")
fail = do("finish", "failed")
retry = do("retry")
cancel = do("cancel")
ask_to_abort = do("cancel", abort=True)
lose_worker = do("lose_worker")
refuse = do("refuse", True)
nothing = steps()

QUEUED = After("queued", slot=True, copies=(0, 1, 0))
PARKED = After("staged", tries=(False,), copies=(1, 0, 1))
RUNS_AGAIN = dataclasses.replace(QUEUED, tries=(False,))

ENDINGS: dict[str, Ending] = {
    # A worker ends it.
    "succeeded": ending(steps(start, finish), After("finished", tries=(True,))),
    "failed": ending(steps(start, fail), After("finished", tries=(False,))),
    "aborted": ending(steps(start, ask_to_abort, do("finish", "aborted")), After("finished")),
    "asked to abort and failed": ending(
        steps(start, ask_to_abort, fail), After("finished", tries=(False,))
    ),
    "asked to abort and still running": ending(
        steps(start, ask_to_abort), After("running", slot=True, copies=(0, 1, 0))
    ),
    "deleted on success": ending(
        steps(start, do("finish", delete=True)), After("finished", tries=(True,))
    ),
    "finished without a start": ending(finish, After("finished")),
    "finished by another kind of worker": ending(
        do("finish_elsewhere"), dataclasses.replace(QUEUED, slot=False)
    ),
    "finished three times": ending(
        steps(start, do("finish_elsewhere"), do("finish_elsewhere"), finish),
        After("finished", tries=(True,)),
    ),
    # A user ends it.
    "cancelled while staged": ending(
        nothing,
        After("cancelled"),
        before=do("by_id", "select dispatch_cancel({id})"),
        admitted=None,
    ),
    "cancelled and deleted while staged": ending(
        nothing,
        After(None),
        before=do("by_id", "select dispatch_cancel_job({id}, false, true)"),
        admitted=None,
    ),
    "cancelled while queued": ending(cancel, After("cancelled")),
    "cancelled while queued, by defer's id": ending(
        do("by_id", "select dispatch_cancel_job({id}, false, false)"), After("cancelled")
    ),
    "aborted while queued": ending(ask_to_abort, After("cancelled")),
    "aborted while running, by defer's id": ending(
        steps(
            start,
            do("by_id", "select dispatch_cancel_job({id}, true, false)"),
            do("finish", "aborted"),
        ),
        After("finished"),
    ),
    "deleted while queued": ending(do("cancel", delete=True), After(None)),
    # It comes back.
    "retried": ending(steps(start, retry), PARKED, RUNS_AGAIN),
    "retried by the older function": ending(
        steps(start, do("retry", version=1)), PARKED, RUNS_AGAIN
    ),
    "retried for later": ending(
        steps(start, do("retry", after=1000)), dataclasses.replace(PARKED, waits=1000), RUNS_AGAIN
    ),
    "failed and retried by hand": ending(
        steps(start, fail, retry), PARKED, dataclasses.replace(QUEUED, tries=(False,), woken=True)
    ),
    "asked to abort and to retry": ending(
        steps(start, ask_to_abort, retry), After("finished", tries=(False,))
    ),
    "retried, then cancelled": ending(
        steps(start, retry, cancel), After("cancelled", tries=(False,))
    ),
    "retried, then cancelled by defer's id": ending(
        steps(start, retry, do("by_id", "select dispatch_cancel_job({id}, false, false)")),
        After("cancelled", tries=(False,)),
    ),
    "retried, then deleted": ending(
        steps(start, retry, do("cancel", delete=True)),
        After(None, tries=(False,)),
    ),
    # Its worker is gone.
    "worker lost": ending(lose_worker, After("running", copies=(0, 1, 0))),
    "worker lost, and the job retried by the sweep": ending(
        lose_worker, PARKED, RUNS_AGAIN, before=do("define", stalled="retry")
    ),
    "worker lost, and the job retried by hand": ending(
        steps(lose_worker, retry), dataclasses.replace(PARKED, tries=()), QUEUED
    ),
    "worker lost, but it finishes after all": ending(steps(lose_worker, finish), After("finished")),
    # It cannot be handed off.
    "dead": ending(nothing, After("dead"), before=refuse, admitted=False),
    "dead and discarded": ending(
        do("by_id", "select dispatch_discard_dead({id})"),
        After("cancelled"),
        before=refuse,
        admitted=False,
    ),
    "dead and requeued": ending(
        steps(do("refuse", False), do("by_id", "select dispatch_requeue_dead({id})")),
        After("staged", copies=(1, 0, 0)),
        before=refuse,
        admitted=False,
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_everything_agrees_after_a_job_is(
    conn: psycopg.Connection, clock: Clock, tick: Tick, subtests: pytest.Subtests, name: str
):
    for gate in GATES:
        for strategy in ("restage", "bypass"):
            with subtests.test(gate=gate, strategy=strategy):
                check(World(conn, clock, tick, gate, strategy), ENDINGS[name])


def check(world: World, ending: Ending) -> None:
    clock = world.clock
    after = ending.bypass if world.strategy == "bypass" else ending.restage
    ending.before(world)
    admitted_at = clock.now
    if ending.admitted is not None:
        result = world.tick()
        assert result["jobs_admitted"] == ending.admitted
        assert result["handoff_failures"] == (not ending.admitted)
    clock.advance(10)

    ending.happens(world)

    assert world.state() == after.state
    assert world.slots() == ([world.job_id()] if after.slot else [])
    assert world.copies() == after.copies
    tries = after.tries if world.gate == "adaptive" else ()
    assert world.observations() == [(succeeded, LAG / MILLISECOND) for succeeded in tries]

    world.fold()
    partition = world.partition()
    assert partition["in_flight_count"] == after.slot
    assert partition["pending_count"] == 1 + after.copies[0]
    assert world.learned() == len(tries)
    opens_at: datetime | None = admitted_at  # with nothing admitted the gate stays open
    due_at = admitted_at
    if ending.admitted and world.gate == "throttle":
        opens_at = due_at = admitted_at + TOKEN
    elif ending.admitted:
        opens_at = None if after.slot else clock.now
        due_at = admitted_at + BACKOFF
        if not after.slot or after.woken:
            due_at = min(due_at, clock.now)
    assert partition["due_at"] == due_at

    # The gate lets the next job through when it should: the subject if it waits, or the follower.
    opens = opens_at is not None and opens_at <= clock.now
    assert world.tick()["jobs_admitted"] == opens
    if opens:
        subject_next = after.copies[0] == 1 and not after.waits
        assert world.copies(world.subject if subject_next else world.follower) == (0, 1, 0)
    run_to_the_end(world, after)


def run_to_the_end(world: World, after: After) -> None:
    """Let all that is left run: nothing stays behind, and nothing is there twice."""
    world.refuse(False)
    if after.state == "queued" and not after.slot:
        world.cancel(delete=True)  # the other worker's
    for _ in range(5):
        queued = world.run(
            "select task_name, status::text from procrastinate_jobs"
            " where status in ('todo', 'doing')"
            " and scheduled_at is distinct from dispatch_parked_until()"
        ).fetchall()
        for task, status in queued:
            if status == "todo":
                world.start(task)
            world.finish(task=task)
        world.clock.advance(TOKEN.total_seconds() + after.waits)
        world.tick()

    for table in ("staged_jobs", "inflight_jobs", "inbox", "dead_jobs", "handoffs"):
        query = f"select count(*) from dispatch_{table} where policy_name = %s"
        assert world.value(query, world.policy) == (table == "dead_jobs" and after.state == "dead")
    partition = world.partition()
    assert (partition["pending_count"], partition["in_flight_count"]) == (0, 0)
    assert partition["due_at"] is None
    assert world.statuses(world.follower) == ["succeeded"]
    if after.slot or after.copies[0]:
        assert world.statuses(world.subject) == ["succeeded"]
    else:
        assert len(world.statuses(world.subject)) <= 1
