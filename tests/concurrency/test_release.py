"""A retry that comes back into the queue: workers hear of it, and it waits for nobody.

And what a job does that somebody is just cancelling.
"""

from __future__ import annotations

import json
from datetime import timedelta

import psycopg
import pytest

from tests.concurrency.conftest import Background
from tests.concurrency.support import column, define, stage, start, value
from tests.fixtures import Connect
from tests.support import Clock
from tests.ticks import Tick

DEFER = """
select procrastinate_defer_jobs_v1(
  array[row('default', 'stranger', 0, null, 'Q', '{}', null)::procrastinate_job_to_defer_v1])
"""


@pytest.fixture
def retry(conn: psycopg.Connection, clock: Clock, tick: Tick) -> int:
    """The procrastinate id of a job that waits in its policy for its second try."""
    define(conn)
    conn.execute(
        "select dispatch_stage('p', 'retried', p_queue_name => 'q', p_queueing_lock => 'Q')"
    )
    tick(conn, "p")
    job_id = start(conn)
    assert job_id is not None
    conn.execute("select procrastinate_retry_job_v2(%s, null, null, null, null)", [job_id])
    conn.execute("set statement_timeout to '20s'")
    return job_id


def admitted(result: list[dict[str, int]]) -> tuple[int, int]:
    return result[0]["jobs_admitted"], result[0]["handoff_failures"]


def test_workers_are_woken_for_a_retry_that_comes_back(conn, connect, tick, retry):
    worker = connect()
    channels = ["procrastinate_any_queue_v1", "procrastinate_queue_v1#q"]
    for channel in channels:
        worker.execute(f'listen "{channel}"')
    tick(conn, "p")
    heard = list(worker.notifies(timeout=10, stop_after=2))
    assert sorted(notice.channel for notice in heard) == channels
    assert [json.loads(notice.payload) for notice in heard] == [
        {"type": "job_inserted", "job_id": retry}
    ] * 2
    assert start(conn) == retry


def test_a_strangers_open_transaction_with_its_queueing_lock_delays_the_retry_alone(
    conn, connect: Connect, clock, tick, retry
):
    stranger = connect(autocommit=False)
    stranger.execute(DEFER)
    conn.execute("select dispatch_stage('p', 'neighbour', p_context => '{\"k\": \"other\"}')")
    conn.execute("select dispatch_stage('p', 'neighbour')")
    assert admitted(tick(conn, "p")) == (2, 0)
    assert column(conn, "select id from dispatch_staged_jobs where parked") == [retry]
    stranger.rollback()
    clock.advance(1)
    assert admitted(tick(conn, "p")) == (1, 0)
    assert value(conn, "select queueing_lock from procrastinate_jobs where id = %s", retry) == "Q"


def test_who_holds_its_row_delays_the_retry_alone(conn, connect: Connect, clock, tick, retry):
    holder = connect(autocommit=False)
    holder.execute("select from procrastinate_jobs where id = %s for update", [retry])
    conn.execute("select dispatch_stage('p', 'neighbour')")
    assert admitted(tick(conn, "p")) == (1, 0)
    holder.rollback()
    clock.advance(1)
    assert admitted(tick(conn, "p")) == (1, 0)


def test_a_retry_that_is_cancelled_meanwhile_does_not_come_back(
    conn, connect: Connect, clock, tick, retry
):
    user = connect(autocommit=False)
    user.execute("select procrastinate_cancel_job_v1(%s, false, false)", [retry])
    assert admitted(tick(conn, "p")) == (0, 0)
    user.commit()
    clock.advance(1)
    assert admitted(tick(conn, "p")) == (0, 0)
    assert column(conn, "select status::text from procrastinate_jobs") == ["cancelled"]
    assert value(conn, "select pending_count from dispatch_partitions") == 0


def test_a_job_that_comes_back_while_it_is_cancelled_is_cancelled_as_the_retry_that_it_is(
    conn, connect: Connect, clock, tick, background: Background, wait_blocked
):
    define(conn)
    staged_id = value(conn, "select dispatch_stage('p', 't')")
    other = connect(autocommit=False)
    other.execute("lock table dispatch_staged_jobs in share mode")
    cancelling = background(value, conn, "select dispatch_cancel(%s)", staged_id)
    wait_blocked(conn.info.backend_pid)
    tick(other, "p")
    other.execute("select procrastinate_retry_job_v2(%s, null, null, null, null)", [start(other)])
    other.commit()
    assert cancelling.result() is True
    assert column(other, "select status::text from procrastinate_jobs") == ["cancelled"]
    assert column(other, "select id from dispatch_staged_jobs") == []


def test_a_job_in_an_open_transaction_that_cancels_it_is_not_looked_for_again_and_again(
    conn, connect: Connect, clock: Clock, tick
):
    define(conn)
    job_id, _ = stage(conn, "a", "a")
    user = connect(autocommit=False)
    user.execute("select dispatch_cancel(%s)", [job_id])
    assert admitted(tick(conn, "p")) == (1, 0)
    assert admitted(tick(conn, "p")) == (0, 0)
    assert value(conn, "select dispatch_next_due('p')") == clock.now + timedelta(milliseconds=100)
    stage(conn, "a")
    assert admitted(tick(conn, "p")) == (1, 0), "who comes in meanwhile does not wait"
    user.rollback()
    clock.advance(0.1)
    assert admitted(tick(conn, "p")) == (1, 0)
