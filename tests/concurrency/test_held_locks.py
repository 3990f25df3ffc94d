"""Somebody's open transaction holds queueing locks, or rows of retries: only those jobs wait.

Case: a tick of 400 jobs takes 0.3 s where nobody holds a lock, 1.7 s with one, 5.3 s with 20; with
150 among 1,000 it times out and none of the other 850 goes.
"""

from __future__ import annotations

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.concurrency.support import assert_balanced, column, define, stage, value
from tests.fixtures import Connect
from tests.support import Clock
from tests.ticks import Tick

DEFER = """
select procrastinate_defer_jobs_v1(array_agg(
  row('default', 'stranger', 0, null, name, '{}', null)::procrastinate_job_to_defer_v1
))
from unnest(%s::text[]) as name
"""

PATIENCE = "set statement_timeout to '20s'"
"""Of a tick that waits 0.1 s for each of 150 locks nothing would come within that."""


def stage_locked(conn: psycopg.Connection, jobs: int) -> list[int]:
    """Stage jobs of seven keys; the job n has the queueing lock ``n``."""
    staged = [
        {"task_name": "t", "args": {"k": str(n % 7), "n": n}, "queueing_lock": str(n)}
        for n in range(jobs)
    ]
    return column(conn, "select dispatch_stage_many('p', %s)", Jsonb(staged))


def done(result: list[dict[str, int]]) -> tuple[int, int]:
    return result[0]["jobs_admitted"], result[0]["handoff_failures"]


def park(conn: psycopg.Connection) -> None:
    """Let a worker start and retry each job that is queued: they wait parked then."""
    conn.execute("update procrastinate_jobs set status = 'doing' where status = 'todo'")
    conn.execute(
        "select procrastinate_retry_job_v2(id, null, null, null, null)"
        " from procrastinate_jobs where status = 'doing'"
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("retries", [False, True])
@pytest.mark.parametrize(("held", "jobs"), [(1, 400), (20, 400), (150, 1000)])
def test_one_tick_hands_over_all_jobs_whose_queueing_lock_nobody_holds(
    conn, connect: Connect, tick: Tick, clock: Clock, held: int, jobs: int, retries: bool
):
    define(conn, admission_batch_size=1000, max_queued=None)
    ids = stage_locked(conn, jobs)
    if retries:
        assert done(tick(conn, "p")) == (jobs, 0)
        park(conn)
    # Spread over all of them: what is tried together always meets some.
    locked = [n * jobs // held for n in range(held)]
    stranger = connect(autocommit=False)
    stranger.execute(DEFER, [[str(n) for n in locked]])

    ticking = connect()
    ticking.execute(PATIENCE)
    assert done(tick(ticking, "p")) == (jobs - held, 0)
    assert column(conn, "select id from dispatch_staged_jobs order by id") == [
        ids[n] for n in locked
    ]
    queued = column(
        conn, "select queueing_lock from procrastinate_jobs where status = 'todo' and priority = 0"
    )
    assert sorted(queued, key=int) == [str(n) for n in range(jobs) if n not in locked]

    stranger.rollback()
    clock.advance(2)
    assert done(tick(ticking, "p")) == (held, 0)
    assert sorted(column(conn, "select id from procrastinate_jobs")) == ids
    assert not value(conn, "select count(*) from dispatch_dead_jobs")
    assert_balanced(conn)


def test_when_the_locks_are_taken_for_good_their_jobs_wait_until_they_are_free(
    conn, connect: Connect, tick: Tick, clock: Clock
):
    define(conn, admission_batch_size=1000)
    stage_locked(conn, 100)
    stranger = connect(autocommit=False)
    stranger.execute(DEFER, [["0", "50", "99"]])
    conn.execute(PATIENCE)
    assert done(tick(conn, "p")) == (97, 0)
    stranger.commit()
    clock.advance(2)
    assert done(tick(conn, "p")) == (0, 0)
    conn.execute("update procrastinate_jobs set status = 'doing' where task_name = 'stranger'")
    clock.advance(2)
    assert done(tick(conn, "p")) == (3, 0)
    assert_balanced(conn)


def test_a_stranger_who_wants_the_lock_of_a_job_that_is_just_handed_over_is_no_deadlock(
    conn, connect: Connect, tick: Tick, background, wait_blocked, clock: Clock
):
    define(conn)
    stage_locked(conn, 10)
    stranger = connect(autocommit=False)
    stranger.execute(DEFER, [["9"]])
    ticking = connect(autocommit=False)
    assert done(tick(ticking, "p")) == (9, 0)
    # Now each has a lock that the other one wants, and only the stranger waits.
    wanting = background(stranger.execute, DEFER, [["0"]])
    wait_blocked(stranger.info.backend_pid)
    ticking.commit()
    with pytest.raises(psycopg.errors.UniqueViolation):
        wanting.result()
    stranger.rollback()
    clock.advance(2)
    assert done(tick(conn, "p")) == (1, 0)
    assert_balanced(conn)


# What somebody may do with the parked row of a retry, in a transaction that stays open.
HOLDS = {
    "locks it": "select from procrastinate_jobs where id = %s for update",
    "locks it for a key": "select from procrastinate_jobs where id = %s for key share",
    "changes its arguments": 'update procrastinate_jobs set args = \'{"k": "a", "new": 1}\''
    " where id = %s",
    "raises its priority": "update procrastinate_jobs set priority = 7 where id = %s",
    "plans it for another time": "update procrastinate_jobs set scheduled_at = '2026-01-01'"
    " where id = %s",
    "cancels it": "select procrastinate_cancel_job_v1(%s, false, false)",
    "cancels it by our way": "select dispatch_cancel(%s)",
    "deletes it": "delete from procrastinate_jobs where id = %s",
}
GONE = {"cancels it", "cancels it by our way", "deletes it"}


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("hold", HOLDS)
def test_an_open_transaction_with_a_retrys_row_delays_that_job_alone(
    conn, connect: Connect, tick: Tick, clock: Clock, hold: str, commits: bool
):
    define(conn, admission_batch_size=100)
    ids = stage_locked(conn, 20)
    assert done(tick(conn, "p")) == (20, 0)
    park(conn)
    user = connect(autocommit=False)
    user.execute(HOLDS[hold].encode(), [ids[3]])

    ticking = connect()
    ticking.execute(PATIENCE)
    assert done(tick(ticking, "p")) == (19, 0)
    assert column(conn, "select id from dispatch_staged_jobs") == [ids[3]]
    user.commit() if commits else user.rollback()
    clock.advance(2)
    gone = commits and hold in GONE
    assert done(tick(ticking, "p")) == (0 if gone else 1, 0)
    assert not value(conn, "select count(*) from dispatch_staged_jobs")
    queued = "select count(*) from procrastinate_jobs where status = 'todo' and priority = 0"
    assert value(conn, queued) == (19 if gone else 20)
    assert not value(conn, "select count(*) from dispatch_dead_jobs")
    far = "select count(*) from procrastinate_events where at > '2999-01-01'"
    assert value(conn, far) == 0, "retention by age would never come to such a job"
    assert_balanced(conn)


def test_many_rows_of_retries_that_somebody_holds_delay_those_jobs_alone(
    conn, connect: Connect, tick: Tick, clock: Clock
):
    define(conn, admission_batch_size=1000, max_queued=None)
    ids = stage_locked(conn, 400)
    assert done(tick(conn, "p")) == (400, 0)
    park(conn)
    fresh = stage(conn, *(str(n % 7) for n in range(100)))
    user = connect(autocommit=False)
    user.execute("select from procrastinate_jobs where id = any (%s) for update", [ids[:150]])
    conn.execute(PATIENCE)
    assert done(tick(conn, "p")) == (350, 0)
    assert column(conn, "select id from dispatch_staged_jobs order by 1") == ids[:150]
    user.rollback()
    clock.advance(2)
    assert done(tick(conn, "p")) == (150, 0)
    assert sorted(column(conn, "select id from procrastinate_jobs")) == ids + fresh
    assert_balanced(conn)
