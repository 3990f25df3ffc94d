"""The sweep beside others: one at a time, waiting for nobody, and not held up by what they hold."""

from __future__ import annotations

import psycopg
import pytest

from tests.concurrency.support import cap, column, define, finish, stage, start, tick, value
from tests.fixtures import Connect
from tests.support import Clock

DAY = 86400.0
LONG_AGO = 8 * DAY  # longer than any retention

# Each task of the sweep, by what it works on: what others may hold, and a bite of one row.
BITES = {
    "slots of ended jobs": (
        "dispatch_inflight_jobs order by job_id",
        "select dispatch_sweep_ended(1)",
    ),
    "lost workers": (
        "procrastinate_jobs where status = 'doing' order by id",
        "select dispatch_sweep_stalled(dispatch_now(), 1)",
    ),
    "forgotten workers": (
        "dispatch_inflight_jobs order by job_id",
        "select dispatch_note_orphans(dispatch_now(), 1)",
    ),
    "orphaned jobs": (
        "dispatch_staged_jobs where policy_name = 'gone' order by id",
        "select dispatch_sweep_orphans(dispatch_now(), 1)",
    ),
    "orphaned retries": (
        "dispatch_staged_jobs where parked order by id",
        "select dispatch_sweep_orphans(dispatch_now(), 1)",
    ),
    "ticks not counted": (
        "dispatch_tick_samples order by id",
        "select dispatch_count_ticks(dispatch_now(), 1)",
    ),
    "tick samples": (
        "dispatch_tick_samples order by id",
        "select samples from dispatch_sweep_old(dispatch_now(), 1)",
    ),
    "admissions": (
        "dispatch_admissions order by job_id",
        "select admissions from dispatch_sweep_old(dispatch_now(), 1)",
    ),
}

COUNTS = {
    "slots of ended jobs": "dispatch_inflight_jobs",
    "lost workers": "dispatch_inflight_jobs",
    "forgotten workers": "dispatch_inflight_jobs where orphaned_at is null",
    "orphaned jobs": "dispatch_staged_jobs",
    "orphaned retries": "dispatch_staged_jobs",
    "ticks not counted": "dispatch_tick_samples where not counted",
    "tick samples": "dispatch_tick_samples",
    "admissions": "dispatch_admissions",
}


def without_triggers(conn: psycopg.Connection, statement: str) -> None:
    """Change procrastinate's table behind the triggers' back."""
    conn.execute("set session_replication_role to replica")
    conn.execute(statement.encode())
    conn.execute("set session_replication_role to origin")


def leave(conn: psycopg.Connection, clock: Clock, what: str) -> None:
    """Leave three rows of work to a task of the sweep."""
    define(conn, "gone" if what == "orphaned jobs" else "p")
    if what == "orphaned jobs":
        stage(conn, "a", "b", "c", policy="gone")
        conn.execute("delete from dispatch_policies")
        return
    stage(conn, "a", "b", "c")
    tick(conn)
    if what == "slots of ended jobs":
        without_triggers(conn, "delete from procrastinate_jobs")
    elif what in ("ticks not counted", "tick samples"):
        for key in ("d", "e"):
            stage(conn, key)
            tick(conn)
        if what == "tick samples":
            conn.execute("select dispatch_count_ticks(dispatch_now(), 3)")
    else:
        conn.execute("insert into procrastinate_workers (last_heartbeat) values (dispatch_now())")
        for job_id in column(conn, "select id from procrastinate_jobs"):
            start(conn)
            if what == "admissions":
                finish(conn, job_id)
            elif what == "orphaned retries":
                conn.execute(
                    "select procrastinate_retry_job_v2(%s, null, null, null, null)", [job_id]
                )
    if what == "lost workers":
        conn.execute(
            "update procrastinate_jobs set worker_id = (select id from procrastinate_workers)"
        )
    elif what == "orphaned retries":
        without_triggers(conn, "delete from procrastinate_jobs")
    clock.advance(LONG_AGO)


def left(conn: psycopg.Connection, what: str) -> int:
    """Return how many rows of that work are left."""
    return int(value(conn, f"select count(*) from {COUNTS[what]}"))


def test_a_second_sweep_at_the_same_time_returns_nothing(conn, connect):
    first = connect(autocommit=False)
    assert len(first.execute("select * from dispatch_sweep()").fetchall()) > 1
    assert conn.execute("select * from dispatch_sweep()").fetchall() == []
    first.commit()
    assert len(conn.execute("select * from dispatch_sweep()").fetchall()) > 1


@pytest.mark.parametrize("what", BITES)
def test_what_others_hold_does_not_hide_the_rest_of(conn, connect: Connect, clock, what):
    rows, bite = BITES[what]
    leave(conn, clock, what)
    assert left(conn, what) == 3
    conn.execute("set lock_timeout to '5s'")
    holder = connect(autocommit=False)
    holder.execute(f"select from {rows} limit 1 for update")
    for expected in (2, 1, 1):
        conn.execute(bite)
        assert left(conn, what) == expected
    holder.rollback()
    conn.execute(bite)
    assert left(conn, what) == 0


@pytest.mark.parametrize("what", BITES)
def test_the_sweep_waits_for_nobody_who_holds_all_of(conn, connect: Connect, clock, what):
    rows, _ = BITES[what]
    leave(conn, clock, what)
    conn.execute("set lock_timeout to '5s'")
    holder = connect(autocommit=False)
    holder.execute(f"select from {rows} for update")
    holder.execute("select from dispatch_partitions for update")
    conn.execute("select dispatch_sweep()")
    assert left(conn, what) == 3
    holder.rollback()
    conn.execute("select dispatch_sweep()")
    assert left(conn, what) == 0


def test_a_partition_in_a_ticks_hands_is_set_right_by_the_next_walk(conn, connect, clock):
    define(conn, **cap(1))
    stage(conn, "a", "a")
    tick(conn)
    conn.execute("delete from dispatch_inflight_jobs")
    conn.execute("set lock_timeout to '5s'")
    holder = connect(autocommit=False)
    holder.execute("select from dispatch_partitions for update")
    conn.execute("select dispatch_sweep()")
    assert value(conn, "select in_flight_count from dispatch_partitions") == 1
    holder.rollback()
    conn.execute("select dispatch_sweep()")
    assert value(conn, "select in_flight_count from dispatch_partitions") == 0


def test_a_job_that_is_being_finished_is_not_retried_by_the_sweep(conn, connect, clock):
    define(conn, stalled="retry")
    leave_one = stage(conn, "a")
    tick(conn)
    conn.execute("insert into procrastinate_workers (last_heartbeat) values (dispatch_now())")
    job_id = start(conn)
    assert job_id is not None
    conn.execute("update procrastinate_jobs set worker_id = (select id from procrastinate_workers)")
    clock.advance(301)
    worker = connect(autocommit=False)
    finish(worker, job_id)
    conn.execute("set lock_timeout to '5s'")
    conn.execute("select dispatch_sweep()")
    worker.commit()
    conn.execute("select dispatch_sweep()")
    assert column(conn, "select status::text from procrastinate_jobs") == ["succeeded"]
    assert value(conn, "select state from dispatch_job(%s)", leave_one[0]) == "finished"


@pytest.mark.parametrize("what", ["a slot is freed", "a counter is set right"])
def test_drivers_are_woken_when(conn, connect, clock, what):
    define(conn, **cap(1, full_backoff=3600))
    stage(conn, "a", "a")
    tick(conn)
    if what == "a slot is freed":
        without_triggers(conn, "delete from procrastinate_jobs")
    else:
        conn.execute("delete from dispatch_inflight_jobs")
    driver = connect()
    driver.execute(f'listen "{value(conn, "select dispatch_channel()")}"')
    conn.execute("select dispatch_sweep()")
    woken = [notice.payload for notice in driver.notifies(timeout=10, stop_after=1)]
    assert woken == ["p"]
    assert tick(conn) == 1
