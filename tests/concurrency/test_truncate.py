"""procrastinate's table is truncated while others are at work: nothing of the old jobs stays."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from tests.concurrency.conftest import Background
from tests.concurrency.support import assert_balanced, define, finish, stage, start, tick, value
from tests.fixtures import Connect

TRUNCATE = "truncate procrastinate_jobs restart identity cascade"
LEFT = """
select (select count(*) from procrastinate_jobs) + (select count(*) from dispatch_staged_jobs)
  + (select count(*) from dispatch_inflight_jobs) + (select count(*) from dispatch_admissions)
  + (select count(*) from dispatch_inbox)
"""


def begin_anew(conn: psycopg.Connection) -> None:
    """Ids begin with 1, and none of them is in the way of another."""
    assert value(conn, LEFT) == 0
    assert_balanced(conn)
    assert stage(conn, *"abcabc") == [1, 2, 3, 4, 5, 6]
    assert tick(conn) == 6
    while (job_id := start(conn)) is not None:
        finish(conn, job_id)
    assert_balanced(conn)


def test_whoever_has_staged_and_not_committed_is_waited_for(
    conn: psycopg.Connection,
    connect: Connect,
    background: Background,
    wait_blocked: Callable[..., None],
):
    define(conn)
    stage(conn, "a")
    enqueuer, truncating = connect(autocommit=False), connect()
    stage(enqueuer, "b", "c")
    waiting = background(truncating.execute, TRUNCATE)
    wait_blocked(truncating.info.backend_pid)
    enqueuer.commit()
    waiting.result()
    begin_anew(conn)


def test_a_tick_in_the_midst_ends_before_or_not_at_all(
    conn: psycopg.Connection,
    connect: Connect,
    background: Background,
    wait_blocked: Callable[..., None],
):
    define(conn, gates=[{"type": "concurrency", "max": 2}])
    stage(conn, *"aabbcc")
    ticking, truncating = connect(autocommit=False), connect()
    rows = ticking.execute("select handoff_id from dispatch_admit('p')").fetchall()
    waiting = background(truncating.execute, TRUNCATE)
    wait_blocked(truncating.info.backend_pid)
    # Each has what the other waits for, so one of them has to give up.
    ended = []
    for act in (
        lambda: (ticking.execute("select dispatch_settle(%s)", rows[0]), ticking.commit()),
        waiting.result,
    ):
        try:
            act()
            ended.append(act)
        except psycopg.errors.DeadlockDetected:
            ticking.rollback()
    assert ended
    conn.execute(TRUNCATE)
    begin_anew(conn)


@pytest.mark.parametrize("what", ["todo", "doing"])
def test_with_the_jobs_go_their_slots(conn: psycopg.Connection, what: str):
    define(conn, gates=[{"type": "concurrency", "max": 1}])
    stage(conn, *"aab")
    assert tick(conn) == 2
    if what == "doing":
        assert start(conn) is not None
    conn.execute(TRUNCATE)
    begin_anew_capped = stage(conn, "a", "b")
    assert begin_anew_capped == [1, 2]
    assert tick(conn) == 2
