"""``truncate procrastinate_jobs restart identity cascade`` while others are at work.

Case: it is run, then jobs are deferred, and every tick fails on ids that were given out twice.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.concurrency.conftest import Background
from tests.concurrency.stops import LIMIT, POINTS, Stops
from tests.concurrency.support import (
    assert_balanced,
    cap,
    define,
    finish,
    places,
    stage,
    start,
    value,
)
from tests.fixtures import Connect
from tests.support import wait_for
from tests.ticks import Tick

TRUNCATE = "truncate procrastinate_jobs restart identity cascade"
TABLES = ("staged_jobs", "inflight_jobs", "admissions", "dead_jobs", "inbox")


def assert_all_settles(conn: psycopg.Connection, tick: Tick, ids: list[int]) -> None:
    """Let these jobs, all that there are, go to a worker, and check that each ends, once."""
    assert len(set(ids)) == len(ids), "an id was given out twice"
    assert places(conn).keys() == set(ids)
    ended = []
    for _ in range(len(ids) + 2):
        tick(conn, "p")
        while (job_id := start(conn)) is not None:
            finish(conn, job_id)
            ended.append(job_id)
    assert sorted(ended) == sorted(ids)
    assert set(places(conn).values()) <= {"ended"}
    assert not value(conn, "select count(*) from dispatch_dead_jobs")
    assert_balanced(conn)
    newest = stage(conn, "a")
    assert not set(newest) & set(ids)


@pytest.mark.parametrize("point", POINTS)
def test_in_the_middle_of_a_tick(
    point, tick: Tick, stops: Stops, conn, connect: Connect, background: Background, is_blocked
):
    define(conn, **cap(LIMIT), retry_strategy="restage")
    stage(conn, *"aaabbbccc")
    tick(conn, "p")
    first = start(conn)
    conn.execute("select procrastinate_retry_job_v2(%s, null, null, null, null)", [first])
    stage(conn, "d", "d")
    ticking = connect(options=Stops.options(point))
    ticked = background(tick, ticking, "p")
    stops.wait(ticking.info.backend_pid)
    truncating = connect()
    truncated = background(truncating.execute, TRUNCATE)
    wait_for(lambda: truncated.done() or is_blocked(truncating.info.backend_pid))
    stops.release()
    ticked.result()
    truncated.result()
    ids = stage(conn, *"aaabbc")
    assert min(ids) == 1, "ids begin anew"
    assert_all_settles(conn, tick, ids)


def test_while_somebody_has_staged_and_not_committed(
    conn, connect: Connect, tick: Tick, background: Background, wait_blocked
):
    define(conn)
    stage(conn, "a", "b")
    enqueuer = connect(autocommit=False)
    stage(enqueuer, "a", "a", "c")
    truncating = connect()
    truncated = background(truncating.execute, TRUNCATE)
    wait_blocked(truncating.info.backend_pid)
    enqueuer.commit()
    truncated.result()
    assert [value(conn, f"select count(*) from dispatch_{table}") for table in TABLES] == [0] * 5
    assert_all_settles(conn, tick, stage(conn, "a", "c"))


def test_while_somebody_who_has_staged_stages_more(
    conn, connect: Connect, tick: Tick, background: Background, wait_blocked
):
    define(conn)
    enqueuer = connect(autocommit=False)
    stage(enqueuer, "a", "a", "c")
    truncating = connect()
    truncated = background(truncating.execute, TRUNCATE)
    wait_blocked(truncating.info.backend_pid)
    # Who waits for it has nothing that it needs: no deadlock.
    stage(enqueuer, "a", "a", "c")
    enqueuer.commit()
    truncated.result()
    assert_all_settles(conn, tick, stage(conn, "a", "c"))


def test_who_stages_while_the_truncation_is_not_committed_waits_and_has_an_id_of_the_new_count(
    conn, connect: Connect, tick: Tick, background: Background, wait_blocked
):
    define(conn)
    stage(conn, *"abcdef")
    truncating = connect(autocommit=False)
    truncating.execute(TRUNCATE)
    enqueuer = connect()
    staged = background(stage, enqueuer, "a", "b")
    wait_blocked(enqueuer.info.backend_pid)
    truncating.commit()
    assert_all_settles(conn, tick, [*staged.result(), *stage(conn, "a", "b")])


@pytest.mark.parametrize("restart", ["restart identity", "continue identity"])
def test_what_is_rolled_back_has_changed_nothing(conn, connect: Connect, tick: Tick, restart: str):
    define(conn, **cap(2))
    ids = stage(conn, *"aaabbb")
    tick(conn, "p")
    before = places(conn)
    truncating = connect(autocommit=False)
    truncating.execute(f"truncate procrastinate_jobs {restart} cascade")
    truncating.rollback()
    assert places(conn) == before
    assert_all_settles(conn, tick, ids)


def test_while_a_worker_ends_a_job(conn, connect: Connect, tick: Tick, background, wait_blocked):
    define(conn)
    stage(conn, "a", "b")
    tick(conn, "p")
    worker = connect(autocommit=False)
    job_id = start(worker)
    assert job_id is not None
    truncating = connect()
    truncated = background(truncating.execute, TRUNCATE)
    wait_blocked(truncating.info.backend_pid)
    finish(worker, job_id)
    worker.commit()
    truncated.result()
    assert_all_settles(conn, tick, stage(conn, "a", "c"))


@pytest.mark.timeout(120)
def test_again_and_again_with_enqueuers_ticks_and_workers(conn, connect: Connect, tick: Tick):
    define(conn, **cap(3))
    done = threading.Event()

    def work() -> None:
        session = connect()
        while not done.is_set():
            if (job_id := start(session)) is not None:
                # Where it was truncated meanwhile, procrastinate refuses to end it.
                with contextlib.suppress(psycopg.errors.RaiseException):
                    finish(session, job_id)

    def enqueue() -> None:
        session = connect()
        while not done.is_set():
            stage(session, "a", "b", "c")

    def ticks() -> None:
        session = connect()
        while not done.is_set():
            tick(session, "p")

    with ThreadPoolExecutor(max_workers=5) as threads:
        others = [threads.submit(what) for what in (work, enqueue, enqueue, ticks, ticks)]
        session = connect()
        try:
            for _ in range(20):
                session.execute(TRUNCATE)
                wait_for(
                    lambda: (
                        value(session, "select count(*) from procrastinate_jobs")
                        or any(other.done() for other in others)
                    )
                )
        finally:
            done.set()
        for other in others:
            other.result()
    conn.execute(TRUNCATE)
    assert_all_settles(conn, tick, stage(conn, *"aaabbc"))
