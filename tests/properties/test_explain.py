"""What dispatch_explain() says of a job is what the next tick decides, after any history.

For throttles the time that it names is the time at which the job goes.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import psycopg
from hypothesis import example, given, note
from hypothesis import strategies as st
from hypothesis.stateful import invariant, run_state_machine_as_test

from tests.properties.support import Database, tries
from tests.properties.test_histories import Histories

FIRST_ROWS = """
select s.id, s.partition_key, explained.*
from dispatch_staged_jobs as s
cross join lateral (select * from dispatch_explain(s.id) limit 1) as explained
order by s.id
"""


def explain_all(db: Database) -> dict[int, dict[str, Any]]:
    """Return the first row of each staged job's explanation, by the job's id."""
    with db.conn.transaction(force_rollback=True):
        db.conn.execute("set transaction read only")
        return {row["id"]: row for row in db.all(FIRST_ROWS)}


def staged(db: Database) -> set[int]:
    return {row["id"] for row in db.all("select id from dispatch_staged_jobs")}


class Explained(Histories):
    """After each step, explains all that waits, and rehearses a tick."""

    def what_always_holds(self) -> None:
        """Leave to the other test what it tests."""

    @invariant()
    def the_next_tick_does_what_was_said(self) -> None:
        with self.db.conn.transaction(force_rollback=True):
            self.db.conn.execute("update dispatch_policies set partition_batch_size = 10000")
            said = explain_all(self.db)
            self.db.tick("p")
            admitted = said.keys() - staged(self.db)
        for id_, row in said.items():
            note(f"{id_}: {row}")
            assert row["item"] == "job"
            assert row["blocks"] == (id_ not in admitted)
            assert row["blocks"] == (row["reason"] not in (None, "no_tick"))
            assert row["message"]


def test_after_any_history_the_next_tick_admits_what_nothing_is_said_to_hold(db: Database) -> None:
    class Here(Explained):
        def __init__(self) -> None:
            super().__init__(db)

    run_state_machine_as_test(Here, settings=tries(8))


RATES = st.sampled_from([0.5, 1, 2.5, 7, 10, 60])
THROTTLES = st.fixed_dictionaries(
    {"rate": RATES, "per": st.sampled_from([1, 3, 60, 3600])},
    optional={"burst": st.sampled_from([1, 2, 5, 20])},
)
JOBS = st.lists(
    st.fixed_dictionaries(
        {"priority": st.sampled_from([0, 0, 0, 1, 5])},
        optional={"delay": st.sampled_from([0.000001, 0.5, 3, 7, 60, 1000])},
    ),
    min_size=1,
    max_size=12,
)


def simulate(db: Database) -> dict[int, datetime]:
    """Tick whenever something is due until no job waits; return when each of them went."""
    went: dict[int, datetime] = {}
    waiting = staged(db)
    for _ in range(500):
        db.tick("p")
        left = staged(db)
        went |= dict.fromkeys(waiting - left, db.now)
        waiting = left
        if not waiting:
            return went
        due = db.next_due()
        assert due is not None
        db.set_clock(max(due, db.now))
    raise AssertionError(f"{len(waiting)} jobs still wait")


@given(
    throttles=st.lists(THROTTLES, min_size=1, max_size=2),
    before=st.integers(0, 8),
    pause=st.sampled_from([0, 0.3, 1, 10, 100]),
    jobs=JOBS,
    batch=st.sampled_from([100, 1]),
)
@example(  # a bucket of one token loses what a rounded time leaves beside it
    throttles=[{"rate": 7, "per": 1, "burst": 1}],
    before=1,
    pause=0,
    jobs=[{"priority": 0}] * 12,
    batch=100,
)
@tries(40)
def test_behind_throttles_a_job_goes_when_it_was_said(
    db: Database,
    throttles: list[dict[str, Any]],
    before: int,
    pause: float,
    jobs: list[dict[str, Any]],
    batch: int,
) -> None:
    with db.rehearsal():
        gates = [{"type": "throttle", "name": f"t{n}"} | it for n, it in enumerate(throttles)]
        db.define("p", gates=gates, admission_batch_size=batch)
        if before:
            db.stage("p", [{"task_name": "before"}] * before)
            db.tick("p")
        db.advance(pause)
        db.stage(
            "p",
            [
                {"task_name": "t", "priority": job["priority"]}
                | (
                    {"scheduled_at": (db.now + timedelta(seconds=job["delay"])).isoformat()}
                    if "delay" in job
                    else {}
                )
                for job in jobs
            ],
        )
        now = db.now
        later = {
            row["id"]
            for row in db.all("select id from dispatch_staged_jobs where eligible_at > %s", now)
        }
        said = explain_all(db)
        went = simulate(db)
        for id_, row in said.items():
            note(f"{id_}: went {went[id_]}, said {row}")
            if id_ not in later:
                assert row["estimated_at"] == went[id_]


KEYS = st.sampled_from("abcd")
LOCKS = st.none() | st.sampled_from(["l1", "l2"])
GATES: list[dict[str, Any]] = [
    {"type": "throttle", "rate": 2, "per": 10},
    {"type": "concurrency", "max": {"ctx": "max", "default": 2}},
    {"type": "adaptive_concurrency", "initial_max": 2, "target_lag_ms": 100},
]
POLICIES = st.fixed_dictionaries(
    {
        "gates": st.lists(
            st.sampled_from(GATES),
            unique_by=lambda gate: gate["type"],
        ),
        "tick_admission_budget": st.sampled_from([None, 1, 3, 3, 5]),
        "admission_batch_size": st.sampled_from([100, 2]),
        "fairness": st.sampled_from(
            [{}, {"half_life": None}, {"weight": {"ctx": "weight", "default": 1}}]
        ),
    }
)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("stage"),
            st.lists(
                st.fixed_dictionaries(
                    {"key": KEYS, "queueing_lock": LOCKS, "priority": st.sampled_from([0, 0, 3])},
                    optional={"max": st.integers(0, 3), "weight": st.sampled_from([0.5, 1, 7])},
                ),
                min_size=1,
                max_size=6,
            ),
        ),
        st.tuples(st.just("defer"), st.sampled_from(["l1", "l2"])),
        st.tuples(st.sampled_from(["tick", "fetch", "finish", "retry", "fail"])),
        st.tuples(st.just("advance"), st.sampled_from([0.5, 5, 100, -3])),
        st.tuples(st.sampled_from(["pause", "resume"]), st.none() | KEYS),
    ),
    max_size=15,
)


class Steps:
    """A policy's small world: each method is one thing that may happen in it."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.worker = db.one("select worker_id from procrastinate_register_worker_v1()")

    def stage(self, jobs: list[dict[str, Any]]) -> None:
        for job in jobs:
            context = {name: job[name] for name in ("key", "max", "weight") if name in job}
            rest = {name: job[name] for name in ("queueing_lock", "priority")}
            with suppress(psycopg.Error), self.db.conn.transaction():
                self.db.stage("p", [{"task_name": "t", "context": context} | rest])

    def defer(self, queueing_lock: str) -> None:
        with suppress(psycopg.Error), self.db.conn.transaction():
            self.db.one(
                """select procrastinate_defer_jobs_v1(array[
                  row('q', 't', 9, null, %s, '{}', null)::procrastinate_job_to_defer_v1])""",
                queueing_lock,
            )

    def tick(self) -> None:
        self.db.tick("p")

    def fetch(self) -> None:
        self.db.one("select id from procrastinate_fetch_job_v2(null, %s)", self.worker)

    def finish(self) -> None:
        self._end("select procrastinate_finish_job_v1(%s, 'succeeded', false)")

    def fail(self) -> None:
        self._end("select procrastinate_finish_job_v1(%s, 'failed', false)")

    def retry(self) -> None:
        self._end("select procrastinate_retry_job_v2(%s, null, null, null, null)")

    def _end(self, query: str) -> None:
        running = self.db.one("select min(id) from procrastinate_jobs where status = 'doing'")
        if running is not None:
            with suppress(psycopg.errors.UniqueViolation), self.db.conn.transaction():
                self.db.all(query, running)

    def advance(self, seconds: float) -> None:
        self.db.set_clock(self.db.now + timedelta(seconds=seconds))

    def pause(self, key: str | None) -> None:
        self.db.all("select dispatch_pause('p', %s)", key)

    def resume(self, key: str | None) -> None:
        self.db.all("select dispatch_resume('p', %s)", key)


@given(policy=POLICIES, steps=STEPS)
@tries(60)
def test_budgets_locks_and_pauses_are_told_as_the_tick_takes_them(
    db: Database, policy: dict[str, Any], steps: list[tuple[Any, ...]]
) -> None:
    with db.rehearsal():
        db.define("p", partition_by="key", **policy)
        world = Steps(db)
        for name, *arguments in steps:
            getattr(world, name)(*arguments)
        said = explain_all(db)
        db.tick("p")
        admitted = said.keys() - staged(db)
        for id_, row in said.items():
            note(f"{id_}: {row}")
            assert row["blocks"] == (id_ not in admitted)
