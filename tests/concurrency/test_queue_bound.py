"""max_queued holds with any number of ticks at once, and keeps nobody from going in the end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.concurrency.support import assert_balanced, define, finish, stage, start, value
from tests.fixtures import Connect

TICKS = 8
QUEUED = "select count(*) from procrastinate_jobs where status = 'todo'"


@pytest.mark.parametrize("bound", [1, 5, 50])
@pytest.mark.timeout(180)
def test_never_more_of_a_policy_are_queued_with_many_ticks_at_once(
    conn: psycopg.Connection, connect: Connect, bound: int
):
    define(conn, max_queued=bound, admission_batch_size=20)
    jobs = 40 * bound**0.5
    stage(conn, *(str(n % 7) for n in range(int(jobs))))
    done = threading.Event()
    most = 0

    def tick() -> None:
        session = connect()
        while not done.is_set():
            session.execute("select dispatch_tick('p')")

    def watch() -> None:
        nonlocal most
        session = connect()
        while not done.is_set():
            most = max(most, value(session, QUEUED))

    def work() -> None:
        session = connect()
        while value(session, "select count(*) from dispatch_staged_jobs") or value(session, QUEUED):
            if (job_id := start(session)) is not None:
                finish(session, job_id)

    with ThreadPoolExecutor(max_workers=TICKS + 2) as threads:
        others = [threads.submit(tick) for _ in range(TICKS)] + [threads.submit(watch)]
        try:
            threads.submit(work).result(timeout=120)
        finally:
            done.set()
        for other in others:
            other.result()
    assert 0 < most <= bound
    assert value(conn, "select count(*) from procrastinate_jobs") == int(jobs)
    assert_balanced(conn)


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
