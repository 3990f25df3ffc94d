"""Whole histories: whatever people, ticks, workers and the clock do, in whatever order.

After each step the tables are compared with the model's, and what must always hold is checked.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from fractions import Fraction
from itertools import cycle
from typing import Any, NamedTuple, TypeVar

import psycopg
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.properties.model import ALWAYS, Gate, Job, Model, Partition, Policy
from tests.properties.support import START, Database, tries

KEYS = st.sampled_from("aab")
LOCKS = st.none() | st.none() | st.sampled_from(["l1", "l2"])
PRIORITIES = st.sampled_from([0, 0, 0, 5, -1])
DELAYS = st.none() | st.none() | st.sampled_from([-5.0, 0.0, 0.5, 3.0, 90.0])
LIMITS = st.sampled_from([0, 1, 2, 3])
CONTEXTS = st.fixed_dictionaries({}, optional={"max": LIMITS, "rate": LIMITS | st.just(0.5)})
F = TypeVar("F", bound=Callable[..., None])

NOTHING: dict[str, Any] = {}


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    gates: list[Gate] = []
    params: dict[str, float | str]
    for name in draw(st.sets(st.sampled_from(["t1", "t2", "cap", "adaptive"]))):
        if name == "cap":
            params = {"max": draw(CAPS), "full_backoff": draw(BACKOFFS)}
            gates.append(Gate("concurrency", name, params))
        elif name == "adaptive":
            initial, top = draw(st.integers(1, 4)), draw(st.integers(4, 6))
            params = {"initial_max": initial, "max": top, "target_lag_ms": draw(TARGETS)}
            gates.append(Gate("adaptive_concurrency", name, params))
        else:
            params = {"rate": draw(RATES), "per": draw(st.sampled_from([1, 3, 60]))}
            params |= draw(st.sampled_from([{}, {}, {"burst": 1}, {"burst": 5}]))
            gates.append(Gate("throttle", name, params))
    return Policy(
        gates=sorted(gates, key=lambda gate: gate.name),
        retry_strategy=draw(st.sampled_from(["restage", "restage", "bypass"])),
        partition_batch_size=draw(st.sampled_from([50, 50, 2, 1])),
        admission_batch_size=draw(st.sampled_from([100, 100, 2, 1])),
        tick_admission_budget=draw(st.sampled_from([None, None, None, 1, 4])),
    )


CAPS: st.SearchStrategy[float | str] = st.sampled_from([1, 2, 3, "max", "max"])
RATES: st.SearchStrategy[float | str] = st.sampled_from([0.5, 1, 2.5, 10, "rate", "rate"])
BACKOFFS = st.sampled_from([0.5, 1, 10])
TARGETS = st.sampled_from([100, 1000, 60_000])
JOBS = st.fixed_dictionaries(
    {"key": KEYS, "priority": PRIORITIES, "queueing_lock": LOCKS, "lock": LOCKS, "delay": DELAYS},
    optional={"context": CONTEXTS},
)

OUTCOMES = st.lists(
    st.sampled_from(["handed", "handed", "handed", "error"]), min_size=1, max_size=5
)
ENDS = st.sampled_from(["succeeded", "succeeded", "failed", "aborted", "deleted"])

SNAPSHOT = """
select jsonb_build_object(
  'staged', (select coalesce(jsonb_object_agg(id, jsonb_build_object('key', partition_key,
      'priority', priority, 'eligible_at', nullif(eligible_at, '-infinity'), 'parked', parked,
      'attempts', attempts)), '{}') from dispatch_staged_jobs),
  'dead', (select coalesce(jsonb_object_agg(id, error), '{}') from dispatch_dead_jobs),
  'jobs', (select coalesce(jsonb_object_agg(id, jsonb_build_object('status', status, 'priority',
      priority, 'attempts', attempts, 'parked', scheduled_at = dispatch_parked_until())), '{}')
    from procrastinate_jobs),
  'slots', (select coalesce(jsonb_object_agg(job_id, admitted_at), '{}')
    from dispatch_inflight_jobs),
  'partitions', (select coalesce(jsonb_object_agg(partition_key, jsonb_build_object(
      'pending', pending_count, 'in_flight', in_flight_count, 'due_at', due_at, 'context', context,
      'version', ctid, 'gates', gate_state, 'waiting_since', waiting_since)), '{}')
    from dispatch_partitions),
  'notes', (select coalesce(jsonb_object_agg(partition_id, sums), '{}') from (
      select partition_id, jsonb_build_object(
        'pending', coalesce(sum(jobs) filter (where kind <> 'finished'), 0),
        'finished', coalesce(-sum(jobs) filter (where kind = 'finished'), 0)) as sums
      from dispatch_inbox group by partition_id) as notes),
  'ids', (select jsonb_object_agg(key, dispatch_partition_id('p', key))
    from unnest(array['a', 'b']) as key),
  'handoffs', (select count(*) from dispatch_handoffs))
"""


def time(value: str | None) -> datetime:
    if value is None:
        return ALWAYS
    # Python 3.10 reads six digits after the point, and Postgres writes as few as it needs.
    whole, _, rest = value.partition(".")
    return datetime.fromisoformat(f"{whole}.{rest[:-6]:0<6}{rest[-6:]}" if rest else whole)


class Action(NamedTuple):
    """Something that may happen, and how often; to a job in one of the states that it needs."""

    weight: int
    needs: tuple[str, ...]
    draws: dict[str, st.SearchStrategy[Any]]


ACTIONS: dict[str, Action] = {}
NAMES = st.deferred(
    lambda: st.sampled_from([name for name, how in ACTIONS.items() for _ in range(how.weight)])
)


def sometimes(
    weight: int, needs: tuple[str, ...] = (), **draws: st.SearchStrategy[Any]
) -> Callable[[F], F]:
    def register(method: F) -> F:
        ACTIONS[method.__name__] = Action(weight, needs, draws)
        return method

    return register


class Histories(RuleBasedStateMachine):
    """One policy in an empty database, and its model."""

    def __init__(self, db: Database) -> None:
        super().__init__()
        self.db = db
        self.undo = db.rehearsal()
        self.undo.__enter__()
        self.model = Model(Policy([]), START)
        self.worker = db.one("select worker_id from procrastinate_register_worker_v1()")

    def teardown(self) -> None:
        try:
            self.everything_comes_to_an_end()
        finally:
            self.undo.__exit__(None, None, None)

    # Looking.

    def snapshot(self) -> dict[str, Any]:
        found = self.db.one(SNAPSHOT)
        assert isinstance(found, dict)
        return found

    def refused(self, query: str, *values: Any) -> str | None:
        """Run a statement in a savepoint; return the SQLSTATE if it failed."""
        try:
            with self.db.conn.transaction():
                self.db.all(query, *values)
        except psycopg.Error as error:
            return error.sqlstate
        return None

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        """One rule for all: hypothesis would leave some out in most histories, such as staging."""
        # What is drawn depends on no row, whose order the database may choose.
        name = data.draw(NAMES, label="what")
        given = data.draw(st.fixed_dictionaries(ACTIONS[name].draws), label="how")
        which = data.draw(st.integers(0, 99), label="to which")
        if needs := ACTIONS[name].needs:
            jobs = sorted(self.model.by_state(*needs), key=lambda job: job.id)
            if not jobs:
                self.tick()
                return
            given["job"] = jobs[which % len(jobs)]
            note(f"to {given['job']}")
        getattr(self, name)(**given)

    # People.

    @initialize(policy=policies())
    def define(self, policy: Policy) -> None:
        self.model.policy = policy
        self.db.define("p", **policy.definition())

    @sometimes(2, policy=policies())
    def redefine(self, policy: Policy) -> None:
        self.define(policy)

    @sometimes(5, jobs=st.lists(JOBS, min_size=1, max_size=8))
    def stage(self, jobs: list[dict[str, Any]]) -> None:
        model = self.model
        staged: list[dict[str, Any]] = []
        for job in jobs:
            at = None if job["delay"] is None else model.now + timedelta(seconds=job["delay"])
            context = {"key": job["key"], **job.get("context", NOTHING)}
            staged.append(
                {
                    "task_name": "t",
                    "args": {"n": len(staged)},
                    "context": context,
                    "priority": job["priority"],
                    "lock": job["lock"],
                    "queueing_lock": job["queueing_lock"],
                    "scheduled_at": None if at is None else at.isoformat(),
                }
            )
        locks = Counter(job["queueing_lock"] for job in jobs if job["queueing_lock"])
        held = any(count > 1 or model.lock_is_held(lock) for lock, count in locks.items())
        if held:
            query = "select dispatch_stage_many('p', %s)"
            assert self.refused(query, json.dumps(staged)) == "PD004"
            return
        ids = self.db.stage("p", staged)
        assert ids == sorted(ids)
        for id_, job in zip(ids, staged, strict=True):
            assert id_ not in model.jobs
            at = job["scheduled_at"]
            model.add(
                Job(
                    id_,
                    job["context"]["key"],
                    job["priority"],
                    None if at is None else datetime.fromisoformat(at),
                    job["queueing_lock"],
                    job["context"],
                )
            )

    @sometimes(4, seconds=st.sampled_from([0, 1e-6, 0.1, 0.333333, 1, 2, 7.5, 60]))
    def advance(self, seconds: float) -> None:
        self.move_clock(self.model.latest + timedelta(seconds=seconds))

    @sometimes(1, seconds=st.sampled_from([0.5, 3, 100]))
    def step_back(self, seconds: float) -> None:
        """Until the next step forwards, nothing has to be admitted, and nothing extra may be."""
        self.move_clock(max(self.model.now - timedelta(seconds=seconds), START))

    def move_clock(self, now: datetime) -> None:
        self.model.now = now
        self.model.latest = max(now, self.model.latest)
        self.db.set_clock(now)

    @sometimes(1, needs=("staged",))
    def cancel_staged(self, job: Job) -> None:
        assert self.db.one("select dispatch_cancel(%s)", job.id) is True
        job.state, job.handed = "cancelled", True
        assert self.db.one("select dispatch_cancel(%s)", job.id) is False

    @sometimes(1, key=st.none() | KEYS, paused=st.booleans())
    def pause_or_resume(self, key: str | None, paused: bool) -> None:
        self.db.one(f"select dispatch_{'pause' if paused else 'resume'}('p', %s)", key)
        if key is None:
            self.model.paused = paused
        else:
            self.model.partition(key).paused = paused

    @sometimes(2)
    def resume_everything(self) -> None:
        self.pause_or_resume(None, False)
        for partition in list(self.model.partitions.values()):
            if partition.paused:
                self.pause_or_resume(partition.key, False)

    @sometimes(1, key=KEYS, limit=st.integers(1, 3))
    def force_admit(self, key: str, limit: int) -> None:
        admitted = self.db.one("select dispatch_force_admit('p', %s, %s)", key, limit)
        model = self.model
        model.fold()
        if key in self.snapshot()["partitions"]:
            model.look(key)
        picked = model.ready(key)[:limit]
        model.hand_off(picked)
        assert admitted == sum(job.state == "queued" for job in picked)

    @sometimes(1, needs=("dead",), requeue=st.booleans())
    def deal_with_the_dead(self, job: Job, requeue: bool) -> None:
        if not requeue:
            self.db.one("select dispatch_discard_dead(%s)", job.id)
            job.state = "cancelled"
            return
        waiting = {j.queueing_lock for j in self.model.by_state("staged") if not j.handed}
        refused = self.refused("select dispatch_requeue_dead(%s)", job.id)
        if job.queueing_lock is not None and job.queueing_lock in waiting:
            assert refused == "PD004"
        else:
            assert refused is None
            job.state, job.eligible_at = "staged", job.scheduled_at or ALWAYS

    @sometimes(1)
    def sweep(self) -> None:
        self.db.all("select * from dispatch_sweep()")
        known = self.snapshot()["partitions"]
        for key in [*self.model.partitions]:
            if key not in known:
                self.may_be_forgotten(self.model.partition(key))

    def may_be_forgotten(self, partition: Partition) -> None:
        """Drop a partition that the database does not know (any more): nothing may be lost."""
        found = self.snapshot()
        if partition.newest_id == 0 or found["ids"][partition.key] in found["notes"]:
            return  # not folded in yet
        model = self.model
        assert not model.staged(partition.key)
        assert model.in_flight(partition.key) == 0
        for gate in model.policy.gates:
            if gate.type == "throttle" and gate.name in partition.buckets:
                _, capacity = model.throttle(gate, partition.context)
                assert model.bucket(gate, partition).tokens >= capacity
        model.partitions[partition.key] = Partition(partition.key, paused=partition.paused)

    @sometimes(1)
    def come_back_after_a_day(self) -> None:
        self.move_clock(self.model.latest + timedelta(hours=25))

    # Ticks.

    def before_a_tick(self) -> dict[str, Any]:
        """Fold by itself, so that what else changes a partition is the tick's look at it."""
        self.db.one("select dispatch_fold('p', dispatch_now())")
        self.model.fold()
        return self.snapshot()

    @sometimes(6)
    def tick(self) -> None:
        before = self.before_a_tick()
        result = self.db.tick("p")
        self.check_tick(before, result, {})

    @sometimes(3, outcomes=OUTCOMES)
    def admit_and_settle(self, outcomes: list[str]) -> None:
        before = self.before_a_tick()
        rows = self.db.all("select * from dispatch_admit('p')")
        if rows[0]["id"] is None:
            (row,) = rows
            names = ("partitions_seen", "jobs_admitted", "handoff_failures")
            result = self.db.all(
                f"select {', '.join(f'(%s::dispatch_tick_result).{name}' for name in names)}",
                *[row["tick"]] * 3,
            )[0]
            self.check_tick(before, result, {})
            return
        # In turns, one of each partition, then the second of each.
        turn: Counter[str] = Counter()
        turns = []
        for row in rows:
            turns.append(turn[row["partition_key"]])
            turn[row["partition_key"]] += 1
        if not any(job.handed for job in self.model.by_state("staged")):
            assert turns == sorted(turns), "not one each in turn"
        became = {row["id"]: outcome for row, outcome in zip(rows, cycle(outcomes), strict=False)}
        bad = [id_ for id_, outcome in became.items() if outcome == "error"]
        (result,) = self.db.all(
            "select * from dispatch_settle(%s, %s, %s)",
            rows[0]["handoff_id"],
            bad,
            ["bad"] * len(bad),
        )
        self.check_tick(before, result, became)

    @sometimes(1)
    def admit_and_roll_back(self) -> None:
        """A driver that dies leaves nothing behind."""
        with self.db.conn.transaction(force_rollback=True):
            self.db.all("select * from dispatch_admit('p')")
        with self.db.conn.transaction(force_rollback=True):
            self.db.tick("p")

    def check_tick(
        self, before: dict[str, Any], result: dict[str, Any], outcomes: dict[int, str]
    ) -> None:
        """Hold what the database did against what the model's gates let pass."""
        model, policy = self.model, self.model.policy
        after = self.snapshot()
        moved = {
            id_
            for id_, row in before["staged"].items()
            if row["eligible_at"] != after["staged"].get(id_, NOTHING).get("eligible_at", "gone")
        }
        assert result["jobs_admitted"] == len(before["staged"]) - len(after["staged"]) - len(
            after["dead"]
        ) + len(before["dead"])

        picked: dict[str, list[Job]] = {}
        wanted: dict[str, int] = {}
        for key in {job.key for job in model.by_state("staged")}:
            ready = model.ready(key)
            wanted[key] = min(model.allowed(key), len(ready))
            picked[key] = [job for job in ready if str(job.id) in moved]
            assert picked[key] == ready[: len(picked[key])], "not in order"
            assert len(picked[key]) <= wanted[key], "more than the gates let pass"
        assert len(moved) == sum(map(len, picked.values())), "moved before its time"
        for key, row in after["partitions"].items():
            looked_at = row["version"] != before["partitions"][key]["version"]
            if looked_at and not model.partition(key).paused:
                model.look(key)

        all_seen = result["partitions_seen"] < policy.partition_batch_size
        if model.now >= model.latest:
            self.check_nobody_was_passed_over(picked, wanted, all_seen)

        turns = sorted(
            (turn, job.id, job) for jobs in picked.values() for turn, job in enumerate(jobs)
        )
        dead = [job for _, _, job in turns if outcomes.get(job.id) == "error"]
        model.hand_off([job for _, _, job in turns if job not in dead])
        for job in dead:
            job.state = "dead"

    def check_nobody_was_passed_over(
        self, picked: dict[str, list[Job]], wanted: dict[str, int], all_seen: bool
    ) -> None:
        got = {key: len(jobs) for key, jobs in picked.items()}
        budget = self.model.policy.tick_admission_budget
        looked_at = [key for key in got if all_seen or got[key]]
        if budget is None:
            for key in looked_at:
                assert got[key] == wanted[key], "less than the gates let pass"
            return
        assert sum(got.values()) <= budget
        if all_seen:
            assert sum(got.values()) == min(budget, sum(wanted.values())), "budget not used"
        for key in looked_at:
            if got[key] < wanted[key]:
                assert all(got[other] <= got[key] + 1 for other in got), "not shared fairly"

    @sometimes(3)
    def tick_until_nothing_is_due(self) -> None:
        """Then no job waits behind an open gate, and the partition is due when it opens."""
        for _ in range(200):
            self.tick()
            due = self.db.next_due()
            if due is None or due > self.model.now:
                break
        else:
            pytest.fail("a busy loop")
        if self.model.now >= self.model.latest:
            self.check_quiet()

    def check_quiet(self) -> None:
        model = self.model
        partitions = self.snapshot()["partitions"]
        for key in {job.key for job in model.by_state("staged")}:
            if model.paused or model.partition(key).paused:
                continue
            due_at = time(partitions[key]["due_at"])
            if not model.ready(key):
                continue
            assert model.allowed(key) == 0, "a job waits behind an open gate"
            token_at, others = model.next_token(key)
            note(f"{key}: due {due_at}, token {token_at}, others {others}")
            if not others:
                assert due_at == token_at, "due when the token comes"
            elif not model.is_shut(key):
                assert due_at <= max(token_at or ALWAYS, model.now + timedelta(seconds=10))

    # Workers.

    @sometimes(5, jobs=st.integers(1, 4))
    def fetch(self, jobs: int) -> None:
        for _ in range(jobs):
            fetched = self.db.one(
                "select id from procrastinate_fetch_job_v2(null, %s)", self.worker
            )
            if fetched is None:
                return
            (job,) = (job for job in self.model.by_state("queued") if job.id == fetched)
            job.state = "running"
            job.starts.append(self.model.now)
            self.db.conn.execute(
                """update procrastinate_events set at = dispatch_now()
                where id = (select max(id) from procrastinate_events where job_id = %s)""",
                [fetched],
            )

    @sometimes(5, needs=("running",), how=ENDS)
    def finish(self, job: Job, how: str) -> None:
        status = "succeeded" if how == "deleted" else how
        self.db.all(
            "select procrastinate_finish_job_v1(%s, %s, %s)", job.id, status, how == "deleted"
        )
        self.model.end(job, how)
        job.abort_requested = False

    @sometimes(2, needs=("running", "failed"), delay=DELAYS, priority=st.none() | PRIORITIES)
    def retry(self, job: Job, delay: float | None, priority: int | None) -> None:
        model = self.model
        at = None if delay is None else model.now + timedelta(seconds=delay)
        refused = self.refused(
            "select procrastinate_retry_job_v2(%s, %s, %s, null, null)", job.id, at, priority
        )
        if job.abort_requested and job.state == "failed":
            assert refused == "23514", "procrastinate does not retry what was to be aborted"
            return
        if job.abort_requested:
            model.free(job, False)
            job.state = "failed"
        elif model.policy.retry_strategy == "bypass" and model.lock_is_queued(job.queueing_lock):
            assert refused == "23505"
            return
        else:
            job.priority = job.priority if priority is None else priority
            model.retry(job, at)
        assert refused is None

    @sometimes(1, needs=("queued", "running"), abort=st.booleans(), delete=st.booleans())
    def cancel_in_procrastinate(self, job: Job, abort: bool, delete: bool) -> None:
        done = self.db.one("select procrastinate_cancel_job_v1(%s, %s, %s)", job.id, abort, delete)
        if job.state == "queued":
            assert done is not None
            job.abort_requested = abort and not delete
            self.model.end(job, "deleted" if delete else "cancelled")
        else:
            assert (done is not None) == abort
            job.abort_requested |= abort

    # What always holds.

    @invariant()
    def what_always_holds(self) -> None:
        found = self.snapshot()
        self.every_job_is_in_one_place(found)
        self.counters_are_sums_of_rows_and_notes(found)
        self.buckets_hold_what_they_should(found["partitions"])

    def every_job_is_in_one_place(self, found: dict[str, Any]) -> None:
        model = self.model
        assert found["handoffs"] == 0
        staged = {
            str(job.id): (job.key, job.priority, job.eligible_at, job.handed, job.attempts)
            for job in model.by_state("staged")
        }
        assert staged == {
            id_: (
                row["key"],
                row["priority"],
                time(row["eligible_at"]),
                row["parked"],
                row["attempts"],
            )
            for id_, row in found["staged"].items()
        }
        assert {str(job.id) for job in model.by_state("dead")} == set(found["dead"])

        words = {"queued": "todo", "running": "doing", "staged": "todo"}
        rows = {
            str(job.id): (words.get(job.state, job.state), job.state == "staged")
            for job in model.jobs.values()
            if job.handed and job.state != "deleted"
        }
        assert rows == {
            id_: (row["status"], row["status"] == "todo" and row["parked"] is True)
            for id_, row in found["jobs"].items()
        }
        for job in model.by_state("queued", "running", "succeeded", "failed"):
            row = found["jobs"][str(job.id)]
            assert (row["priority"], row["attempts"]) == (job.priority, job.attempts)

        slots = {
            str(job.id): job.slot_since for job in model.jobs.values() if job.slot_since is not None
        }
        assert slots == {id_: time(admitted_at) for id_, admitted_at in found["slots"].items()}

    def counters_are_sums_of_rows_and_notes(self, found: dict[str, Any]) -> None:
        nothing = {"pending": 0, "finished": 0}
        for key, id_ in found["ids"].items():
            notes = found["notes"].get(id_, nothing)
            staged = [row for row in found["staged"].values() if row["key"] == key]
            if key not in found["partitions"]:
                assert notes["pending"] == len(staged)
                continue
            partition = found["partitions"][key]
            assert partition["pending"] + notes["pending"] == len(staged)
            assert partition["in_flight"] == self.model.in_flight(key) + notes["finished"]
            if staged and id_ not in found["notes"]:
                assert partition["due_at"] is not None, "jobs wait and nobody will look"
            since = partition["waiting_since"]
            assert (partition["pending"] > 0) == (since is not None)
            if since is not None and time(since) > self.model.latest and id_ not in found["notes"]:
                # Nobody waits yet: not before the first job may go.
                assert all(time(row["eligible_at"]) >= time(since) for row in staged)

    def buckets_hold_what_they_should(self, partitions: dict[str, Any]) -> None:
        for key, row in partitions.items():
            buckets = self.model.partition(key).buckets
            assert set(row["gates"]) == set(buckets)
            for name, bucket in buckets.items():
                state = row["gates"][name]
                assert abs(Fraction(state["tokens"]) - bucket.tokens) < Fraction(1, 10**9)
                assert abs(state["at"] - bucket.at.timestamp()) < 1e-6

    # The end.

    def everything_comes_to_an_end(self) -> None:
        """Nothing waits for ever, but where a limit is 0."""
        model = self.model
        self.move_clock(model.latest)
        self.resume_everything()
        shut = [key for key in ("a", "b") if model.is_shut(key)]
        for _ in range(600):
            self.db.tick("p")
            self.db.all(
                """select procrastinate_finish_job_v1(id, 'succeeded', false)
                from procrastinate_jobs
                where status in ('todo', 'doing') and scheduled_at is distinct from
                  dispatch_parked_until()"""
            )
            (rest,) = self.db.all(
                """select count(*) as jobs, min(p.due_at) as due_at
                from dispatch_staged_jobs as s left join dispatch_partitions as p
                  on p.id = s.partition_id
                where s.partition_key <> all (%s)""",
                shut,
            )
            if rest["jobs"] == 0:
                return
            due = self.db.next_due()
            assert due is not None, "jobs wait and nobody will look"
            assert rest["due_at"] is not None, "jobs wait and nobody will look at them"
            # Nobody waits for a partition that is shut, which is looked at again and again.
            self.move_clock(max(rest["due_at"], due, model.now))
        pytest.fail("jobs wait for ever")


def test_any_history_agrees_with_the_model(db: Database) -> None:
    class Here(Histories):
        def __init__(self) -> None:
            super().__init__(db)

    run_state_machine_as_test(Here, settings=tries(15))


def test_a_partition_is_not_forgotten_before_its_notes_are_folded_in(db: Database) -> None:
    with db.rehearsal():
        db.define("p")
        db.stage("p", [{"task_name": "t"}])
        (row,) = db.all("select * from dispatch_admit('p')")
        db.one(
            "select jobs_admitted from dispatch_settle(%s, array[%s], array['bad'])",
            row["handoff_id"],
            row["id"],
        )
        db.advance(90_000)
        db.all("select * from dispatch_sweep()")
        db.stage("p", [{"task_name": "t"}])
        db.one("select dispatch_fold('p', dispatch_now())")
        assert db.one("select pending_count from dispatch_partitions") == 1


def test_a_slot_counts_in_a_partition_that_was_forgotten(db: Database) -> None:
    with db.rehearsal():
        cap = {"type": "concurrency", "max": 1}
        db.define("p", gates=[cap], retry_strategy="bypass")
        db.stage("p", [{"task_name": "t"}])
        db.tick("p")
        job_id = db.one("select job_id from dispatch_inflight_jobs")
        worker = db.one("select worker_id from procrastinate_register_worker_v1()")
        db.one("select (procrastinate_fetch_job_v2(null, %s)).id", worker)
        db.all("select procrastinate_finish_job_v1(%s, 'failed', false)", job_id)
        db.tick("p")
        db.advance(90_000)
        db.all("select * from dispatch_sweep()")
        assert db.one("select count(*) from dispatch_partitions") == 0
        db.all("select procrastinate_retry_job_v2(%s, null, null, null, null)", job_id)
        db.tick("p")
        db.stage("p", [{"task_name": "t"}])
        assert db.tick("p")["jobs_admitted"] == 0
