"""What is read does not grow with what waits.

Case: 1,000,000 jobs of a paused policy slow every tick of the others. Case: taking 100 jobs from
a partition with 200,000 waiting costs 15 times what it costs with 1,000. Case: a scheduled job
with high priority stands first in its partition, and the ready ones behind it wait for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from pydispatch.driver import SETTINGS
from pydispatch.embedded import EmbeddedPostgres
from tests.concurrency.support import cap, define, finish, stage, start, value
from tests.fixtures import Connect, create_database
from tests.plans.support import GROWING, fill, fill_history, reads
from tests.ticks import Tick

LARGE, SMALL = 100_000, 1_000
PAUSED = int(os.environ.get("PLANS_PAUSED_JOBS", LARGE))
"""Jobs that wait in a paused policy."""
BATCH = 100
"""Jobs that a tick takes from one partition."""
CLAIM = 50
"""Partitions that a tick takes up."""
FOLD = 10_000
"""Notes that a tick folds."""


def no_vacuum(conn: psycopg.Connection) -> None:
    """Keep autovacuum from changing plans in the middle of a test."""
    for table in GROWING:
        conn.execute(f"alter table {table} set (autovacuum_enabled = off)".encode())


@pytest.fixture(scope="module")
def large(server: EmbeddedPostgres, admin: psycopg.Connection) -> Iterator[str]:
    """The conninfo of a database with a hundred thousand of everything."""
    create_database(server, "plans")
    with psycopg.connect(server.dsn("plans")) as conn:
        no_vacuum(conn)
        for policy in ("paused", "backoff", "deep", "shallow", "future", "priorities"):
            define(conn, policy, **cap(BATCH), admission_batch_size=BATCH)
        fill(conn, "paused", PAUSED, keys=LARGE)
        conn.execute("select dispatch_pause('paused')")
        backoff = f"now() + case when k < {LARGE - CLAIM} then interval '1 hour' else '0' end"
        fill(conn, "backoff", LARGE, keys=LARGE, due=backoff)
        fill(conn, "deep", LARGE)
        fill(conn, "shallow", SMALL)
        # All but one are for later, and of a higher priority than the one.
        later = "case when n > 0 then now() + interval '1 hour' else '-infinity' end"
        fill(conn, "future", LARGE + 1, eligible=later, priority="sign(n)")
        fill(conn, "priorities", SMALL + 1, eligible=later, priority="n % 20")
        define(conn, "ended", max_queued=None)
        fill_history(conn, "ended", LARGE, running=SMALL)
        conn.execute(
            """
            insert into dispatch_dead_jobs
              (id, partition_id, staged_at, died_at, priority, attempts, policy_name,
              partition_key, task_name, queue_name, args, context, error)
            select dispatch_next_job_id(), dispatch_partition_id('ended', ''), now(), now(), 0, 0,
              'ended', '', 't', 'default', '{}', '{}', 'an error'
            from generate_series(1, %s)
            """,
            [10 * SMALL],
        )
    with psycopg.connect(server.dsn("plans"), autocommit=True) as conn:
        conn.execute("vacuum analyze")
    yield server.dsn("plans")
    admin.execute("drop database plans with (force)")


@pytest.fixture
def big(large: str) -> Iterator[psycopg.Connection]:
    """A connection to that database. What tests do there has to be rolled back."""
    with psycopg.connect(large, autocommit=True) as conn:
        yield conn
        conn.execute(f"vacuum (index_cleanup on) {', '.join(GROWING)}".encode())


# -- ticks


def test_a_tick_reads_the_due_partitions_and_the_jobs_that_it_takes(big, tick: Tick):
    with reads(big) as found:
        (result,) = tick(big, "backoff")
    assert (result["partitions_seen"], result["jobs_admitted"]) == (CLAIM, CLAIM)
    found.check(partitions=2 * CLAIM, staged_jobs=4 * CLAIM, procrastinate_jobs=CLAIM)


def test_taking_jobs_from_a_large_backlog_reads_as_much_as_from_a_small_one(big, tick: Tick):
    with reads(big) as deep:
        assert tick(big, "deep")[0]["jobs_admitted"] == BATCH
    with reads(big) as shallow:
        assert tick(big, "shallow")[0]["jobs_admitted"] == BATCH
    deep.check(partitions=2, staged_jobs=4 * BATCH + 5, procrastinate_jobs=BATCH)
    assert deep.growing() == shallow.growing()
    assert deep.indexes == shallow.indexes


def test_a_ready_job_behind_a_backlog_for_later_is_found_at_once(big, tick: Tick):
    with reads(big) as found:
        assert tick(big, "future")[0]["jobs_admitted"] == 1
    found.check(partitions=2, staged_jobs=10, procrastinate_jobs=1)


def test_priorities_that_wait_cost_a_look_each(big, tick: Tick):
    with reads(big) as found:
        assert tick(big, "priorities")[0]["jobs_admitted"] == 1
    found.check(partitions=2, staged_jobs=2 * 20 + 10, procrastinate_jobs=1)


def test_many_priorities_that_wait_cost_no_look_each(big, tick: Tick):
    """One job that is ready is found at once; for many, the index is read once at most."""
    later = "case when n > {0} then now() + interval '1 hour' else '-infinity' end"
    for ready, most in ((0, 10), (2 * SMALL, LARGE)):
        with big.transaction(force_rollback=True):
            define(big, "many", **cap(BATCH), admission_batch_size=BATCH)
            priority = f"case when n > {ready} then n else -n % 7 end"
            fill(big, "many", LARGE // 2, eligible=later.format(ready), priority=priority)
            begin = time.perf_counter()
            with reads(big) as found:
                assert tick(big, "many")[0]["jobs_admitted"] == min(ready + 1, BATCH)
            took = time.perf_counter() - begin
        assert found.growing()["dispatch_staged_jobs"] < most
        assert took < 1


def test_the_time_to_sleep_of_one_shard_is_found_without_a_look_at_the_others(big):
    with big.transaction(force_rollback=True):
        big.execute("update dispatch_partitions set shard = 'north' where policy_name = 'backoff'")
        big.execute(
            "update dispatch_partitions set shard = 'south', due_at = now() + interval '2 hours'"
            " where policy_name = 'backoff' and partition_key = '7'"
        )
        with reads(big) as found:
            big.execute("select dispatch_next_due('backoff', 'south')")
        found.check(others=10)


def test_a_paused_policy_costs_nothing(big, tick: Tick):
    with reads(big) as found:
        assert tick(big, "paused")[0]["partitions_seen"] == 0
    found.check()


def test_a_tick_reads_what_it_would_without_the_backlogs_of_other_policies(
    big, connect: Connect, tick: Tick
):
    """Those of the paused one, of throttled partitions, of jobs for later: the same look-ups."""
    alone = connect()
    no_vacuum(alone)
    found = {}
    for conn in (alone, big):
        with conn.transaction(force_rollback=True):
            define(conn, "other", **cap(BATCH), admission_batch_size=BATCH)
            fill(conn, "other", 2 * CLAIM, keys=CLAIM)
            stage(conn, *map(str, range(CLAIM)), policy="other")
            with reads(conn) as found[conn]:
                (result,) = tick(conn, "other")
        assert (result["partitions_seen"], result["jobs_admitted"]) == (CLAIM, 3 * CLAIM)
        found[conn].check(
            inbox=4 * CLAIM, partitions=5 * CLAIM, staged_jobs=12 * CLAIM, procrastinate_jobs=150
        )
    # Versions that the fold has just replaced may be met once more, or not.
    for table, rows in found[big].growing().items():
        assert rows <= found[alone].growing()[table] + CLAIM, table


def test_a_tick_of_all_policies_reads_what_ticks_of_each_do(big, tick: Tick):
    with reads(big) as found:
        admitted = sum(result["jobs_admitted"] for result in tick(big))
    assert admitted == CLAIM + 2 * BATCH + 2
    jobs, partitions = admitted, CLAIM + 4
    found.check(partitions=2 * partitions, staged_jobs=4 * jobs + 100, procrastinate_jobs=admitted)


def test_a_budget_is_shared_without_counting_the_backlog(big, tick: Tick):
    with big.transaction(force_rollback=True):
        define(big, "deep", tick_admission_budget=10, admission_batch_size=BATCH)
        assert tick(big, "deep")[0]["jobs_admitted"] == 10
        with reads(big) as found:
            assert tick(big, "deep")[0]["jobs_admitted"] == 10
    found.check(
        inbox=1,
        partitions=6,
        staged_jobs=BATCH + 4 * 10 + 50,
        inflight_jobs=3 * 10,
        procrastinate_jobs=10,
    )


def test_what_is_overdue_in_the_queue_is_found_among_what_is_queued(conn, tick: Tick):
    no_vacuum(conn)
    queued, running, staged = SMALL // 2, 10, 20
    define(conn, max_queued=SMALL)
    stage(conn, *["a"] * staged)
    fill_history(conn, "p", LARGE // 10, running=running, queued=queued)
    conn.execute("update dispatch_inflight_jobs set admitted_at = now() - interval '1 minute'")
    conn.execute("vacuum analyze")
    with reads(conn) as found:
        (result,) = tick(conn, "p")
    assert (result["jobs_admitted"], result["denied_reasons"]) == (0, {"queue_full": 1})
    found.check(
        inbox=2,
        partitions=10,
        staged_jobs=3 * staged + 10,
        inflight_jobs=5 * (queued + running),
        procrastinate_jobs=queued + 3 * running,
        admissions=queued + running + 1,
    )


def test_the_queues_bound_costs_nothing_while_it_is_far_and_never_more_than_it_allows(
    big, tick: Tick
):
    """Besides the jobs that run, which are looked up once they and the queued ones are many."""
    with big.transaction(force_rollback=True):
        define(big, "ended", max_queued=1_000_000)
        with reads(big) as far:
            assert tick(big, "ended")[0]["partitions_seen"] == 0
        far.check(partitions=2)
        define(big, "ended", max_queued=SMALL)
        with reads(big) as near:
            assert tick(big, "ended")[0]["partitions_seen"] == 0
        near.check(partitions=2, inflight_jobs=4 * SMALL, procrastinate_jobs=SMALL)
        for bound in (SMALL, 10, None):
            define(big, "deep", max_queued=bound)
            with reads(big) as asked:
                big.execute("select dispatch_next_due('deep')")
            asked.check(others=10)


def test_the_time_to_sleep_is_found_without_a_look_at_the_backlog(big):
    for policy in ("paused", "backoff", "deep", "future", None):
        with reads(big) as found:
            big.execute("select dispatch_next_due(%s)", [policy])
        found.check(others=10)


def test_a_tick_folds_a_part_of_a_full_inbox(big, tick: Tick):
    with reads(big) as found:
        big.execute(
            """
            insert into dispatch_inbox (policy_name, partition_id, kind, jobs, due_at, newest_id,
              partition_key, shard, context)
            select 'shallow', dispatch_partition_id('shallow', k::text), 'staged', 1,
              'infinity', 1, k::text, 'default', '{}'
            from generate_series(1, %s) as n
            cross join lateral (select n %% 100 as k) as key
            """,
            [2 * FOLD],
        )
        tick(big, "shallow")
        assert value(big, "select count(*) from dispatch_inbox") == FOLD
    found.scanned.pop("dispatch_inbox", None)  # the count
    found.check(inbox=2 * FOLD + 4 * FOLD, partitions=10 * 100, others=4 * BATCH + 5)


def test_a_tick_locks_no_more_than_it_takes(big, large: str, tick: Tick):
    free = """
        select
          (select count(*) from (select from dispatch_partitions for update skip locked) as p),
          (select count(*) from (
            select from dispatch_staged_jobs where policy_name = 'backoff' for update skip locked
          ) as s)
    """
    count = """
        select
          (select count(*) from dispatch_partitions),
          (select count(*) from dispatch_staged_jobs where policy_name = 'backoff')
    """
    with psycopg.connect(large) as other:
        partitions, jobs = other.execute(count).fetchall()[0]
        with big.transaction(force_rollback=True):
            tick(big, "backoff")
            free_partitions, free_jobs = other.execute(free).fetchall()[0]
        other.rollback()
    assert (partitions - free_partitions, jobs - free_jobs) == (CLAIM, CLAIM)


# -- all else that is done for each job


def call(query: str, *arguments: Any) -> Callable[[psycopg.Connection], object]:
    return lambda conn: conn.execute(query.encode(), arguments)


SMALL_STEPS: dict[str, Callable[[psycopg.Connection], object]] = {
    "staging a job": call("select dispatch_stage('deep', 't', '{\"k\": 0}')"),
    "staging with a queueing lock": call(
        "select dispatch_stage('deep', 't', '{\"k\": 0}', p_queueing_lock => 'one')"
    ),
    "staging for later": call(
        "select dispatch_stage('deep', 't', '{\"k\": 0}', p_scheduled_at => now() + '1 hour')"
    ),
    "cancelling a job": call("select dispatch_cancel((select min(id) from dispatch_staged_jobs))"),
    "finding a waiting job": call(
        "select dispatch_job((select max(id) from dispatch_staged_jobs))"
    ),
    "finding an ended job": call(
        "select dispatch_job((select min(job_id) from dispatch_admissions))"
    ),
    "finding a dead job": call("select dispatch_job((select min(id) from dispatch_dead_jobs))"),
    "telling a status": call(
        "select dispatch_job_status((select min(job_id) from dispatch_admissions))"
    ),
    "finishing a job": call(
        "select procrastinate_finish_job_v1((select min(job_id) from dispatch_inflight_jobs),"
        " 'succeeded', false)"
    ),
    "deleting a finished job": call(
        "select procrastinate_finish_job_v1((select min(job_id) from dispatch_inflight_jobs),"
        " 'succeeded', true)"
    ),
    "retrying a job": call(
        "select procrastinate_retry_job_v2((select min(job_id) from dispatch_inflight_jobs),"
        " now(), null, null, null)"
    ),
    "finishing for another worker": call(
        "select dispatch_finish((select min(job_id) from dispatch_inflight_jobs), true)"
    ),
    "pausing a partition": call("select dispatch_pause('backoff', '1')"),
    "resuming a partition": call("select dispatch_resume('backoff', '1')"),
}


@pytest.mark.parametrize("step", SMALL_STEPS)
def test_a_small_step_reads_a_few_rows(step, big):
    with reads(big) as found:
        SMALL_STEPS[step](big)
    found.check(others=10)


def test_forcing_a_job_reads_what_it_takes(big):
    with reads(big) as found:
        assert value(big, "select dispatch_force_admit('deep', '0', 10)") == 10
    found.check(inbox=5, partitions=4, staged_jobs=4 * 10 + 5, procrastinate_jobs=10)


@pytest.mark.parametrize("policy", ["deep", "limited"])
def test_staging_many_reads_a_few_rows_a_job(policy, big):
    with big.transaction(force_rollback=True):
        define(big, "limited", max_pending=1_000_000)
        with reads(big) as found:
            stage(big, *map(str, range(BATCH)), policy=policy)
    found.check(others=2 * BATCH)


def test_ten_thousand_jobs_are_staged_in_one_call(big):
    """In a time that grows with their number, not with its square."""
    took = {}
    for jobs in (1_000, 10_000):
        keys = [str(n) for n in range(jobs)]
        with big.transaction(force_rollback=True):
            begin = time.perf_counter()
            assert len(set(stage(big, *keys, policy="deep"))) == jobs
            took[jobs] = time.perf_counter() - begin
    assert took[10_000] < 10 * 4 * took[1_000], took


def test_a_sweep_reads_its_pages_and_no_backlog(big):
    with reads(big) as found:
        big.execute("select * from dispatch_sweep()")
    assert found.scanned.pop("dispatch_inflight_jobs") <= 3, "it looks at all slots"
    assert found.scanned.pop("dispatch_partitions") == 1, "once, for the samples of the policies"
    every = value(big, "select count(*) from dispatch_partitions")
    found.check(partitions=every + 4 * FOLD, others=7 * SMALL)


def test_a_sweep_whose_plans_are_older_than_the_slots_reads_each_a_few_times(conn):
    no_vacuum(conn)
    conn.execute("vacuum analyze")
    jobs = 2 * SMALL
    define(conn, admission_batch_size=jobs, max_queued=None)
    for _ in range(8):  # from the sixth on, a session keeps the plan that it has
        conn.execute("select * from dispatch_sweep()")
    stage(conn, *["a"] * jobs)
    assert value(conn, "select jobs_admitted from dispatch_tick()") == jobs
    worker = value(conn, "insert into procrastinate_workers default values returning id")
    conn.execute("update procrastinate_jobs set status = 'doing', worker_id = %s", [worker])
    with reads(conn) as found:
        conn.execute("select * from dispatch_sweep()")
    found.scanned.clear()  # once is right: there is nothing but these jobs
    found.check(others=8 * jobs)


def test_a_sweep_of_many_partitions_reads_the_notes_that_nobody_has_folded_once(conn):
    no_vacuum(conn)
    define(conn, partition_batch_size=SMALL)
    stage(conn, *[str(n) for n in range(SMALL)])
    assert value(conn, "select jobs_admitted from dispatch_tick()") == SMALL
    for status in ("doing", "succeeded"):
        conn.execute("update procrastinate_jobs set status = %s", [status])
    conn.execute("update dispatch_partitions set in_flight_count = 7 where partition_key = '7'")
    with reads(conn) as found:
        result = dict(conn.execute("select * from dispatch_sweep()").fetchall())
        assert result["counters set right"] == 1
    found.scanned.clear()  # once is right: there is nothing but these jobs
    found.check(partitions=16 * SMALL, others=8 * SMALL)  # of each partition 4 versions


# -- looking


@pytest.mark.parametrize("sort", ["pending", "admitted", "stale", "recent", "key"])
def test_a_page_of_partitions_reads_no_waiting_job(sort, big):
    with reads(big) as found:
        query = "select cursor from dispatch_partitions_page(null, %s)"
        cursor = big.execute(query, [sort]).fetchall()[-1][0]
        query = "select count(*) from dispatch_partitions_page(null, %s, %s, p_search => '1')"
        assert value(big, query, sort, cursor) == 50
    assert found.scanned.pop("dispatch_partitions") == 2
    found.check(partitions=found.rows["dispatch_partitions"])
    assert found.rows["dispatch_partitions"] < 2 * 3 * LARGE


@pytest.mark.parametrize("policy", ["deep", "future", "priorities"])
def test_a_page_of_waiting_jobs_reads_about_a_page(policy, big):
    """Also where all wait for one moment, and in the middle of the list."""
    query = "select place, cursor from dispatch_waiting_page(%s, '0', 50, %s)"
    cursor = None
    for n in range(3):
        with reads(big) as found:
            rows = big.execute(query.encode(), [policy, cursor]).fetchall()
        assert [place for place, _ in rows] == [*range(50 * n + 1, 50 * n + 51)]
        cursor = rows[-1][1]
        found.check(staged_jobs=3 * 50 + 2 * 20 + 10)


@pytest.mark.parametrize("policy", ["deep", "future", "priorities", "backoff", "paused"])
def test_an_explanation_looks_at_ten_thousand_jobs_at_most(policy, big):
    ids = "select {}(id) from dispatch_staged_jobs where policy_name = %s"
    for which, most in (("min", 100), ("max", 4 * FOLD)):
        id_ = value(big, ids.format(which), policy)
        with reads(big) as found:
            row = big.execute("select numbers from dispatch_explain(%s)", [id_]).fetchone()
            assert row is not None
        found.check(staged_jobs=most, partitions=2 * CLAIM + 5, others=5)


@pytest.mark.parametrize("view", ["dispatch_policy_status", "dispatch_hints"])
def test_what_is_shown_of_policies_reads_partitions_and_slots_once_and_no_waiting_job(view, big):
    partitions, slots, running = (
        value(big, f"select count(*) from {name}")
        for name in (
            "dispatch_partitions",
            "dispatch_inflight_jobs",
            "procrastinate_jobs where status = 'doing'",
        )
    )
    with reads(big) as found:
        shown = big.execute(f"select * from {view}".encode()).fetchall()
    assert len(shown) >= 2
    assert found.scanned.pop("dispatch_partitions") == 1
    assert found.scanned.pop("dispatch_inflight_jobs") == 1
    found.scanned.pop("dispatch_dead_jobs", None)  # counted
    found.scanned.pop("dispatch_inbox", None)  # which is empty
    found.check(
        staged_jobs=0,
        partitions=partitions + 100,
        inflight_jobs=slots + 2 * running + 100,
        procrastinate_jobs=3 * running + 100,
        inbox=1000,
        dead_jobs=10 * SMALL + 100,
        admissions=2 * running + 100,
    )


# -- plans that outlive what they were made for


@pytest.mark.parametrize("known", ["nothing", "a little", "the backlog"])
def test_a_session_whose_plans_are_older_than_the_work_reads_no_more(
    known, connect: Connect, tick: Tick
):
    """As a driver's after a quiet night: plans and statistics are from when there was less."""
    conn, driving, other = connect(), connect(), connect(autocommit=False)
    driving.execute(SETTINGS, {"timeout": "20s"})
    no_vacuum(conn)
    for policy in ("p", "deep"):
        define(conn, policy, **cap(BATCH), admission_batch_size=BATCH, max_queued=None)

    def backlog() -> None:
        fill(other, "p", LARGE // 10, keys=LARGE // 10, due="now() + interval '1 hour'")
        fill(other, "deep", LARGE // 10)
        other.commit()

    if known == "the backlog":
        backlog()
    elif known == "a little":
        define(other, "small")
        fill_history(other, "small", 40, running=20, queued=10)
        fill(other, "small", 20, keys=5, eligible="now() + interval '1 hour'", due="'infinity'")
        other.commit()
    conn.execute("vacuum analyze")
    steps = """
        select dispatch_stage('p', 't', p_queueing_lock => %s), dispatch_next_due(),
          dispatch_cancel(0), dispatch_job_status(0)
    """
    for n in range(7):
        for policy in ("p", "deep"):
            stage(conn, "first", "second", policy=policy)
            tick(driving, policy)
        conn.execute(steps, [str(n)])
        while (job_id := start(conn)) is not None:
            finish(conn, job_id)
    if known != "the backlog":
        backlog()
    fill_history(other, "deep", LARGE // 10, running=SMALL, queued=LARGE // 20)
    other.commit()

    stage(conn, *map(str, range(CLAIM)))
    few = LARGE // 100
    for policy in ("p", "deep"):
        with reads(driving) as found:
            assert tick(driving, policy)[0]["jobs_admitted"] >= CLAIM
        found.check(others=few)
    job_id = value(conn, "select min(job_id) from dispatch_inflight_jobs")
    staged_id = value(conn, "select min(id) from dispatch_staged_jobs")
    with reads(conn) as found:
        conn.execute(steps, ["another"])
        finish(conn, job_id)
        conn.execute("select dispatch_job_status(%s), dispatch_cancel(%s)", [staged_id, staged_id])
    # By procrastinate itself, for the job that it finished; and by its foreign key, for the event
    # of that and the two of the one that was cancelled.
    assert found.scanned.pop("procrastinate_jobs", 0) <= 4
    found.rows.pop("procrastinate_jobs")
    found.check(others=few)
