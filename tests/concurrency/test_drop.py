"""A policy is dropped while others are at work on it: no job is lost, whatever the moment."""

from __future__ import annotations

import contextlib

import psycopg
import pytest

from pydispatch import errors
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


def drop(conn: psycopg.Connection) -> None:
    conn.execute("select dispatch_drop_policy('p', true)")


def assert_each_ends_or_is_dead(conn: psycopg.Connection, ids: list[int]) -> None:
    """Let the sweep and the workers do the rest, and check that it is all."""
    # One finds the partitions, the next what waits in them.
    for _ in range(2):
        conn.execute("select * from dispatch_sweep()")
    found = places(conn)
    assert found.keys() == set(ids)
    assert set(found.values()) <= {"in flight", "dead"}
    while (job_id := start(conn)) is not None:
        finish(conn, job_id)
    for _ in range(2):
        conn.execute("select * from dispatch_sweep()")
    left = {table: value(conn, f"select count(*) from dispatch_{table}") for table in EMPTY}
    assert set(left.values()) == {0}, left


EMPTY = ("staged_jobs", "partitions", "inflight_jobs", "inbox")


@pytest.mark.parametrize("point", POINTS)
def test_when_it_is_dropped_in_the_middle_of_a_tick_each_job_is_handed_off_or_dead(
    point,
    tick: Tick,
    stops: Stops,
    conn,
    connect: Connect,
    background: Background,
    is_blocked,
):
    """The tick creates partitions that the drop does not see; so does a late enqueuer."""
    define(conn, **cap(LIMIT))
    ids = stage(conn, "a", "a", "b")
    slow, dropping, late = connect(options=Stops.options(point)), connect(), connect()
    ticked = background(tick, slow, "p")
    stops.wait(slow.info.backend_pid)
    late.autocommit = False
    ids += stage(late, "c")
    dropped = background(drop, dropping)
    wait_for(lambda: dropped.done() or is_blocked(dropping.info.backend_pid))
    stops.release()
    # A driver's tick that has not settled yet is undone.
    with contextlib.suppress(errors.UnknownPolicy):
        ticked.result()
    dropped.result()
    late.commit()
    assert_each_ends_or_is_dead(conn, ids)


def test_a_partition_that_a_tick_commits_in_the_middle_of_the_drop_is_left_to_the_sweep(
    tick: Tick,
    stops: Stops,
    conn,
    connect: Connect,
    background: Background,
    wait_blocked,
):
    define(conn, **cap(1, full_backoff=1000))
    ids = stage(conn, "a", "a")
    tick(conn, "p")
    ids += stage(conn, "b", "b")
    slow = connect(options=Stops.options("commit"))
    ticked = background(tick, slow, "p")
    stops.wait(slow.info.backend_pid)
    holding, dropping = connect(autocommit=False), connect()
    holding.execute("lock table dispatch_dead_jobs in share mode")
    dropped = background(drop, dropping)
    # It knows what waits, and is about to write that down.
    wait_blocked(dropping.info.backend_pid)
    stops.release()
    ticked.result()
    holding.rollback()
    dropped.result()
    assert_each_ends_or_is_dead(conn, ids)


def test_a_policy_that_is_dropped_and_defined_again_goes_on_with_what_was_late(
    tick: Tick, conn, connect: Connect
):
    define(conn, **cap(1))
    stage(conn, "a")
    late = connect(autocommit=False)
    ids = stage(late, "a", "b")
    drop(conn)
    late.commit()
    define(conn, **cap(1))
    assert tick(conn, "p")[0]["jobs_admitted"] == 2
    assert {id_ for id_, place in places(conn).items() if place == "in flight"} == set(ids)
    assert_balanced(conn)


def test_while_all_are_at_work_no_job_is_lost(conn, connect: Connect, background: Background):
    """Enqueuers, ticks and sweeps go on while the policy comes and goes."""
    define(conn, **cap(3))
    done = False

    def enqueue(session: psycopg.Connection) -> list[int]:
        ids: list[int] = []
        for n in range(60):
            with contextlib.suppress(errors.UnknownPolicy), errors.translate():
                ids += stage(session, *"abcd"[: n % 4 + 1])
        return ids

    def drive(session: psycopg.Connection) -> None:
        while not done:
            session.execute("select * from dispatch_tick()")
            session.execute("select * from dispatch_sweep()")

    enqueuing = [background(enqueue, connect()) for _ in range(3)]
    driving = [background(drive, connect()) for _ in range(2)]
    try:
        while not all(future.done() for future in enqueuing):
            drop(conn)
            define(conn, **cap(3))
    finally:
        done = True
    for future in driving:
        future.result()
    ids = [id_ for future in enqueuing for id_ in future.result()]
    drop(conn)
    assert_each_ends_or_is_dead(conn, ids)
