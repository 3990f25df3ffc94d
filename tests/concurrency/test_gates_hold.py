"""A gate is never exceeded, however many ticks run at once and whatever happens meanwhile.

Case: cap 1, two ticks at once, each counts 0 in flight, each takes another row. Case: many jobs
of one transaction have one timestamp, and a key exceeds its cap. Case: a job is finished twice.
Case: the cap is lowered, then raised, while all slots are taken.
"""

from __future__ import annotations

import time
from collections import defaultdict
from datetime import datetime

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.concurrency.conftest import Background
from tests.concurrency.stops import LIMIT, POINTS, Stops
from tests.concurrency.support import (
    IMPATIENT,
    assert_balanced,
    cap,
    column,
    define,
    finish,
    in_flight,
    stage,
    start,
    value,
)
from tests.concurrency.support import tick as sql_tick
from tests.fixtures import Connect
from tests.support import Clock, wait_for
from tests.ticks import Tick

SOON = 0.001
"""Seconds after which a full partition is looked at again."""


def admitted(results: list[dict[str, int]]) -> int:
    return sum(result["jobs_admitted"] for result in results)


# -- how many at once


@pytest.mark.parametrize("point", POINTS)
def test_ticks_that_stand_still_side_by_side_admit_no_more_than_one(
    point, tick: Tick, stops: Stops, conn, connect: Connect, background: Background
):
    define(conn, **cap(LIMIT, full_backoff=SOON))
    stage(conn, *["a", "b", "c"] * 20)
    ticks = [background(tick, connect(options=Stops.options(point)), "p") for _ in range(4)]
    wait_for(lambda: len(stops.stopped()) + sum(t.done() for t in ticks) == len(ticks))
    assert stops.stopped()
    for _ in range(3):
        tick(connect(options=IMPATIENT), "p")
    assert max(in_flight(conn).values(), default=1) == 1
    stops.release()
    total = sum(admitted(t.result()) for t in ticks)
    assert 0 < total <= 3
    while tick(conn, "p")[0]["jobs_admitted"]:
        pass
    assert in_flight(conn) == {"a": 1, "b": 1, "c": 1}
    assert value(conn, "select count(*) from procrastinate_jobs") == 3
    assert_balanced(conn)


def test_thousands_of_jobs_of_one_transaction_run_within_the_caps_of_their_keys(
    conn, connect: Connect, background: Background
):
    caps = {f"key {n}": n for n in range(1, 7)}
    define(conn, **cap({"ctx": "cap"}))
    with conn.transaction():
        for n in range(3):
            jobs = [
                {"task_name": "t", "args": {"k": key, "cap": most, "n": n}}
                for _ in range(167)
                for key, most in caps.items()
            ]
            conn.execute("select dispatch_stage_many('p', %s)", [Jsonb(jobs)])
    assert value(conn, "select count(distinct staged_at) from dispatch_staged_jobs") <= 3
    staged = 3 * 167 * 6
    done = False

    def ticks(session: psycopg.Connection) -> None:
        while not done:
            sql_tick(session)

    def work(session: psycopg.Connection) -> int:
        ended = 0
        while not done:
            started = [job for _ in range(3) if (job := start(session)) is not None]
            for job in started:
                finish(session, job)
            ended += len(started)
        return ended

    ticking = [background(ticks, connect()) for _ in range(3)]
    working = [background(work, connect()) for _ in range(3)]
    try:
        most: dict[str, int] = defaultdict(int)

        def all_ended() -> bool:
            for key, jobs in in_flight(conn).items():
                most[key] = max(most[key], jobs)
            # Both are index lookups while jobs wait.
            return not value(
                conn,
                "select exists (select from dispatch_staged_jobs)"
                " or exists (select from dispatch_inflight_jobs)",
            )

        wait_for(all_ended, timeout=60)
    finally:
        done = True
    for future in ticking:
        future.result()
    assert sum(future.result() for future in working) == staged
    assert all(most[key] <= caps[key] for key in caps), dict(most)
    assert_balanced(conn)


@pytest.mark.parametrize("point", POINTS)
def test_a_job_that_finishes_during_a_tick_does_not_wait_and_frees_one_slot(
    point, tick: Tick, stops: Stops, conn, connect: Connect, background: Background
):
    define(conn, **cap(LIMIT, full_backoff=SOON))
    stage(conn, *["a"] * 3)
    assert admitted(tick(conn, "p")) == 1
    job_id = start(conn)
    assert job_id is not None
    stage(conn, "b", "b")
    wait_for(lambda: value(conn, "select bool_and(due_at < now()) from dispatch_partitions"))
    slow = connect(options=Stops.options(point))
    ticked = background(tick, slow, "p")
    stops.wait(slow.info.backend_pid)
    finish(connect(options=IMPATIENT), job_id)
    tick(connect(options=IMPATIENT), "p")
    stops.release()
    ticked.result()
    assert max(in_flight(conn).values()) == 1
    for _ in range(3):
        tick(conn, "p")
    assert in_flight(conn) == {"a": 1, "b": 1}
    assert value(conn, "select count(*) from procrastinate_jobs") == 3
    assert_balanced(conn)


def test_a_job_that_is_finished_twice_frees_one_slot(tick: Tick, conn, connect: Connect):
    define(conn, **cap(2, full_backoff=SOON))
    stage(conn, *["a"] * 6)
    assert admitted(tick(conn, "p")) == 2
    first, second = column(conn, "select job_id from dispatch_inflight_jobs order by job_id")
    finish(conn, first)
    for _ in range(3):
        assert not value(conn, "select dispatch_finish(%s, true)", first)
        with pytest.raises(psycopg.errors.RaiseException, match="not found"):
            finish(conn, first)
    assert admitted(tick(conn, "p")) == 1
    assert value(conn, "select dispatch_finish(%s, true)", second)
    finish(conn, second)
    assert admitted(tick(conn, "p")) == 1
    assert in_flight(conn) == {"a": 2}
    assert admitted(tick(conn, "p")) == 0
    assert_balanced(conn)


def test_a_job_that_is_finished_by_two_at_once_frees_one_slot(
    tick: Tick, conn, connect: Connect, background: Background, wait_blocked
):
    define(conn, **cap(1, full_backoff=SOON))
    stage(conn, *["a"] * 4)
    tick(conn, "p")
    (job_id,) = column(conn, "select job_id from dispatch_inflight_jobs")
    one, other = connect(autocommit=False), connect()
    assert value(one, "select dispatch_finish(%s, true)", job_id)
    finished = background(value, other, "select dispatch_finish(%s, true)", job_id)
    wait_blocked(other.info.backend_pid)
    one.commit()
    assert not finished.result()
    finish(conn, job_id)
    assert admitted(tick(conn, "p")) == 1
    assert admitted(tick(conn, "p")) == 0
    assert in_flight(conn) == {"a": 1}
    assert_balanced(conn)


def test_a_cap_that_is_lowered_and_raised_counts_the_slots_that_are_taken(
    tick: Tick, conn, connect: Connect
):
    define(conn, **cap(5))
    stage(conn, *["a"] * 30)
    assert admitted(tick(conn, "p")) == 5
    running = column(conn, "select job_id from dispatch_inflight_jobs order by job_id")
    define(conn, **cap(2))
    assert admitted(tick(conn, "p")) == 0
    for job_id in running[:3]:
        finish(conn, job_id)
        assert admitted(tick(conn, "p")) == 0
    finish(conn, running[3])
    assert admitted(tick(conn, "p")) == 1
    define(conn, **cap(5))
    assert admitted(tick(conn, "p")) == 3
    assert admitted(tick(conn, "p")) == 0
    define(conn, **cap(1))
    define(conn, **cap(5))
    assert admitted(tick(conn, "p")) == 0
    assert in_flight(conn) == {"a": 5}
    assert_balanced(conn)


@pytest.mark.parametrize("point", POINTS)
def test_a_limit_that_is_changed_during_a_tick_holds_from_the_next_one_on(
    point, tick: Tick, stops: Stops, conn, connect: Connect, background: Background
):
    """What the tick finds under the old limit, to come back in an hour, counts no longer."""
    define(conn, **cap(LIMIT, full_backoff=3600))
    stage(conn, *["a"] * 9, *["b"] * 2)
    slow = connect(options=Stops.options(point))
    ticked = background(tick, slow, "p")
    stops.wait(slow.info.backend_pid)
    define(conn, **cap(4, full_backoff=3600))
    define(conn, **cap(2, full_backoff=3600))
    stops.release()
    assert admitted(ticked.result()) == 2
    assert in_flight(conn) == {"a": 1, "b": 1}
    assert admitted(tick(conn, "p")) == 2
    assert admitted(tick(conn, "p")) == 0
    define(conn, **cap(4, full_backoff=3600))
    assert admitted(tick(conn, "p")) == 2
    assert in_flight(conn) == {"a": 4, "b": 2}
    assert_balanced(conn)


# -- how many in a time

BUCKET = {"type": "throttle", "rate": 10, "per": 1, "burst": 5}


def test_ticks_at_once_share_one_bucket(
    tick: Tick, clock: Clock, conn, connect: Connect, background: Background
):
    define(conn, gates=[BUCKET])
    stage(conn, *["a", "b", "c"] * 40)
    for tokens in (5, 3, 1, 5):
        sessions = [connect() for _ in range(4)]

        def ticks(session: psycopg.Connection) -> int:
            return sum(admitted(tick(session, "p")) for _ in range(3))

        futures = [background(ticks, session) for session in sessions]
        total = sum(future.result() for future in futures) + admitted(tick(conn, "p"))
        assert total == 3 * tokens
        clock.advance({5: 0.3, 3: 0.1, 1: 9}[tokens])
    assert_balanced(conn)


# case: an application server 60 s fast gets twice the rate; two servers at a window's edge reset
# each other's count
@pytest.mark.parametrize(
    "begin",
    ["2026-03-28T23:30+00:00", "2026-03-29T00:30+00:00", "2026-10-25T00:30+00:00"],
    ids=["midnight", "clocks go forward", "clocks go back"],
)
def test_servers_with_other_clocks_and_time_zones_share_one_bucket(
    tick: Tick, clock: Clock, conn, connect: Connect, monkeypatch: pytest.MonkeyPatch, begin: str
):
    clock.set(datetime.fromisoformat(begin))
    define(conn, gates=[{"type": "throttle", "rate": 60, "per": 3600, "burst": 3}])
    stage(conn, *["a"] * 100)
    minute = 60.0
    skews = {"Europe/Berlin": 0.0, "America/New_York": minute, "Pacific/Kiritimati": -3600.0}
    servers = [(connect(options=f"-c timezone={zone}"), skew) for zone, skew in skews.items()]
    real = time.time
    total = 0
    for passed in range(60):
        for session, skew in servers:
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda skew=skew: real() + skew)
                total += admitted(tick(session, "p"))
            assert total == 3 + passed
        clock.advance(minute)


@pytest.mark.parametrize("point", POINTS)
def test_a_tick_that_stands_still_holds_the_tokens_of_its_partitions_alone(
    point, tick: Tick, stops: Stops, clock: Clock, conn, connect: Connect, background: Background
):
    unbounded = {"type": "throttle", "name": "asked", "rate": 1e6, "per": LIMIT}
    define(conn, gates=[BUCKET, unbounded])
    stage(conn, *["a"] * 20)
    slow = connect(options=Stops.options(point))
    ticked = background(tick, slow, "p")
    stops.wait(slow.info.backend_pid)
    stage(conn, *["a", "b"] * 10)
    other = connect(options=IMPATIENT)
    assert admitted(tick(other, "p")) == 5
    stops.release()
    assert admitted(ticked.result()) == 5
    assert admitted(tick(conn, "p")) == 0
    clock.advance(0.25)
    assert admitted(tick(conn, "p")) == 4
    assert_balanced(conn)


def test_in_no_window_do_ticks_at_once_exceed_burst_and_rate(
    tick: Tick, conn, connect: Connect, background: Background
):
    rate, burst, seconds = 40, 5, 1.5
    define(conn, gates=[{"type": "throttle", "rate": rate, "per": 1, "burst": burst}])
    stage(conn, *["a", "b"] * 200)
    until = time.monotonic() + seconds

    def ticks(session: psycopg.Connection) -> None:
        while time.monotonic() < until:
            tick(session, "p")

    for future in [background(ticks, connect()) for _ in range(4)]:
        future.result()
    for key in "ab":
        moments = column(
            conn,
            "select extract(epoch from admitted_at)::float8 from dispatch_admissions"
            " where partition_key = %s order by admitted_at",
            key,
        )
        # From each admission to each later one: the window that they just fit in.
        for first, begin in enumerate(moments):
            for last in range(first, len(moments)):
                fits = burst + rate * (moments[last] - begin)
                assert last - first + 1 <= fits + 1e-3
        assert len(moments) >= 0.7 * rate * seconds, "nothing to see"
    assert_balanced(conn)
