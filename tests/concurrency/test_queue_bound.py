"""What ticks at once announce to each other, so that together they keep to max_queued."""

from __future__ import annotations

import psycopg

from tests.concurrency.support import define, finish, stage, start, value
from tests.fixtures import Connect

QUEUED = "select count(*) from procrastinate_jobs where status = 'todo'"


def test_what_a_tick_is_about_to_hand_over_counts_before_it_commits(
    conn: psycopg.Connection, connect: Connect
):
    define(conn, max_queued=10, partition_batch_size=1)
    stage(conn, *["a"] * 6, *["b"] * 6, *["c"] * 6)
    conn.execute("select dispatch_fold('p', dispatch_now())")
    first, second = connect(autocommit=False), connect(autocommit=False)
    tick = "select jobs_admitted from dispatch_tick('p')"
    assert value(first, tick) == 6
    assert value(second, tick) == 4
    assert value(conn, tick) == 0
    second.rollback()
    assert value(conn, tick) == 4, "what is rolled back has never been announced"
    first.commit()
    assert value(conn, QUEUED) == 10
    assert value(conn, tick) == 0
    assert value(conn, "select dispatch_next_due('p') > dispatch_now()")
    job_id = start(conn)
    assert job_id is not None
    assert value(conn, tick) == 1, "a job that starts makes room"
    finish(conn, job_id)
    assert value(conn, tick) == 0, "its end makes no more"


def test_several_ticks_of_one_transaction_are_announced_each(
    conn: psycopg.Connection, connect: Connect
):
    define(conn, max_queued=10, partition_batch_size=1, admission_batch_size=3)
    stage(conn, *["a", "b", "c", "d"] * 9)
    conn.execute("select dispatch_fold('p', dispatch_now())")
    first = connect(autocommit=False)
    tick = "select jobs_admitted from dispatch_tick('p')"
    assert (value(first, tick), value(first, tick)) == (3, 3)
    assert (value(conn, tick), value(conn, tick), value(conn, tick)) == (3, 1, 0)
    first.commit()
    assert value(conn, QUEUED) == 10
