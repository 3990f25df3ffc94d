"""Many sessions do everything at once, at random; afterwards every job is in exactly one place.

The choices are those of a fixed seed, their interleaving is the machine's.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import psycopg
import pytest
from procrastinate import App, SyncPsycopgConnector

from pydispatch import errors
from tests.concurrency.conftest import Background
from tests.concurrency.support import assert_balanced, column, define, in_flight, places, value
from tests.fixtures import Connect
from tests.support import wait_for
from tests.ticks import AnyTask, EveryPolicy

KEYS = ["a", "b", "c", "d", "e", "f"]
CAPS = {key: n % 3 + 1 for n, key in enumerate(KEYS)}

somebody_else_was_first = contextlib.suppress(psycopg.errors.RaiseException, errors.UnknownJob)


class Session:
    """One session: what it may do, and what it has staged."""

    def __init__(self, conn: psycopg.Connection, seed: int) -> None:
        self.conn = conn
        self.chance = random.Random(seed)
        self.staged: list[int] = []
        self.deleted: set[int] = set()
        """Of which no trace is left, unless they were running already."""
        self.done: Counter[str] = Counter()
        dispatch = AnyTask(App(connector=SyncPsycopgConnector()))
        self.handoff = EveryPolicy(dispatch)

    def run(self, steps: dict[str, int], n: int) -> None:
        """Take so many steps, each with its weight."""
        for name in self.chance.choices([*steps], [*steps.values()], k=n):
            getattr(self, name)()
            self.done[name] += 1

    def any(self, query: str) -> int | None:
        """Return one of the ids that a query gives, by chance."""
        found = column(self.conn, query)
        return self.chance.choice(found) if found else None

    # -- enqueuers

    def stage(self) -> None:
        jobs = [
            {
                "task_name": self.chance.choice(["t", "t", "t", "t", "poison"]),
                "args": {"k": key, "cap": CAPS[key]},
                "priority": self.chance.randint(-1, 1),
            }
            for key in self.chance.choices(KEYS, k=self.chance.randint(1, 6))
        ]
        if self.chance.random() < 0.2:
            jobs[0]["scheduled_at"] = value(self.conn, "select (now() + interval '50 ms')::text")
        rows = self.conn.execute(
            "select dispatch_stage_many(%s, %s)",
            [self.chance.choice(["p", "q"]), psycopg.types.json.Jsonb(jobs)],
        )
        self.staged += [row[0] for row in rows]

    def stage_late(self) -> None:
        """Stage in a transaction that stays open for a while, and is perhaps rolled back."""
        before = list(self.staged)
        with self.conn.transaction(force_rollback=self.chance.random() < 0.3) as transaction:
            self.stage()
            value(self.conn, "select count(*) from procrastinate_jobs")
            self.stage()
        if transaction.force_rollback:
            self.staged = before

    def cancel(self) -> None:
        job_id = self.any("select id from dispatch_staged_jobs order by id desc limit 50")
        if job_id is not None:
            self.conn.execute("select dispatch_cancel(%s)", [job_id])

    def cancel_as_procrastinate_does(self) -> None:
        job_id = self.any("select job_id from dispatch_admissions order by 1 desc limit 50")
        if job_id is not None:
            abort, delete = self.chance.random() < 0.5, self.chance.random() < 0.3
            query = "select dispatch_cancel_job(%s, %s, %s)"
            if value(self.conn, query, job_id, abort, delete) and delete:
                self.deleted.add(job_id)

    # -- drivers

    def tick(self) -> None:
        self.conn.execute("select * from dispatch_tick()")

    def tick_by_driver(self) -> None:
        for policy in ("p", "q"):
            self.handoff.run(self.conn, self.handoff.ticks(policy, None))

    def tick_in_vain(self) -> None:
        """Tick, and lose the connection before the commit."""
        with self.conn.transaction(force_rollback=True):
            self.tick()

    def sweep(self) -> None:
        self.conn.execute("select * from dispatch_sweep()")

    # -- workers

    def work(self) -> None:
        job_id = value(self.conn, "select (procrastinate_fetch_job_v2(null, null)).id")
        if job_id is None:
            return
        how, delete = self.chance.random(), self.chance.random() < 0.3
        with somebody_else_was_first:
            if how < 0.2:
                self._retry(job_id)
            else:
                status = "succeeded" if how < 0.7 else "failed" if how < 0.9 else "aborted"
                self.conn.execute(
                    "select procrastinate_finish_job_v1(%s, %s, %s)", [job_id, status, delete]
                )

    def finish_twice(self) -> None:
        job_id = self.any("select job_id from dispatch_inflight_jobs")
        if job_id is not None:
            with somebody_else_was_first:
                self.conn.execute(
                    "select procrastinate_finish_job_v1(%s, 'succeeded', false)", [job_id]
                )
            self.conn.execute("select dispatch_finish(%s, true)", [job_id])

    def retry_failed(self) -> None:
        job_id = self.any(
            "select id from procrastinate_jobs where status = 'failed' and not abort_requested"
        )
        if job_id is not None:
            with somebody_else_was_first:
                self._retry(job_id)

    def _retry(self, job_id: int) -> None:
        self.conn.execute(
            "select procrastinate_retry_job_v2(%s, now() + interval '20 ms', null, null, null)",
            [job_id],
        )

    # -- operators

    def redefine(self) -> None:
        define_both(self.conn, self.chance.choice([10, 20, 50]))

    def pause(self) -> None:
        key = self.chance.choice([*KEYS, None])
        self.conn.execute("select dispatch_pause('p', %s)", [key])
        self.conn.execute("select dispatch_resume('p', %s)", [key])

    def requeue_dead(self) -> None:
        job_id = self.any("select id from dispatch_dead_jobs")
        if job_id is not None:
            again = self.chance.random() < 0.5
            call = "dispatch_requeue_dead" if again else "dispatch_discard_dead"
            with somebody_else_was_first, errors.translate():
                self.conn.execute(f"select {call}(%s)".encode(), [job_id])


def define_both(conn: psycopg.Connection, batch: int) -> None:
    gate = {"type": "concurrency", "max": {"ctx": "cap"}, "full_backoff": 0.05}
    fast = {"type": "throttle", "rate": 2000, "per": 1}
    define(conn, "p", gates=[gate], admission_batch_size=batch)
    define(conn, "q", gates=[fast, gate], tick_admission_budget=batch, retry_strategy="restage")


ENQUEUER = {"stage": 6, "stage_late": 2, "cancel": 2, "cancel_as_procrastinate_does": 2}
DRIVER = {"tick": 4, "tick_by_driver": 4, "tick_in_vain": 1, "sweep": 1}
WORKER = {"work": 20, "finish_twice": 1, "retry_failed": 1}
OPERATOR = {"redefine": 1, "pause": 2, "requeue_dead": 4, "sweep": 1, "cancel": 2}


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens_at_once_every_job_is_in_one_place_and_no_cap_is_exceeded(
    seed, conn: psycopg.Connection, connect: Connect, background: Background
):
    conn.execute(
        """
        create function refuse() returns trigger language plpgsql as $$
        begin raise exception 'poison'; end $$;
        create trigger refuse before insert on procrastinate_jobs
          for each row when (new.task_name = 'poison') execute function refuse();
        """
    )
    define_both(conn, 50)
    plan = [(ENQUEUER, 60)] * 3 + [(DRIVER, 80)] * 3 + [(WORKER, 250)] * 3 + [(OPERATOR, 60)]
    sessions = [
        Session(connect(options="-c statement_timeout=20s"), seed * 100 + n)
        for n in range(len(plan))
    ]
    futures = [
        background(session.run, steps, n)
        for session, (steps, n) in zip(sessions, plan, strict=True)
    ]
    most: Counter[str] = Counter()

    def all_done() -> bool:
        for policy in ("p", "q"):
            for key, jobs in in_flight(conn, policy).items():
                most[key] = max(most[key], jobs)
        return all(future.done() for future in futures)

    wait_for(all_done, timeout=100)
    for future in futures:
        future.result()
    assert all(jobs <= CAPS[key] for key, jobs in most.items()), most
    assert_balanced(conn)
    staged = {id_ for session in sessions for id_ in session.staged}
    deleted = {id_ for session in sessions for id_ in session.deleted}
    found = places(conn)
    assert found.keys() <= staged
    assert staged - found.keys() <= deleted

    # Nothing is stuck: it all comes to its end.
    last = sessions[-1]

    def ended() -> bool:
        last.tick()
        last.tick_by_driver()
        for job_id in column(conn, "select job_id from dispatch_inflight_jobs"):
            conn.execute("select procrastinate_finish_job_v1(%s, 'succeeded', false)", [job_id])
        return not value(conn, "select count(*) from dispatch_staged_jobs")

    wait_for(ended, timeout=60)
    assert_balanced(conn)
    assert places(conn).keys() == found.keys()
    found = places(conn)
    assert set(found.values()) == {"ended", "cancelled", "dead"}
    done = sum((session.done for session in sessions), Counter[str]())
    assert {name for steps, _ in plan for name in steps} <= done.keys(), "something was left out"
