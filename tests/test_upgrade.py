"""An installation that holds jobs is brought up to this version while people work with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from procrastinate.schema import SchemaManager
from psycopg import sql

from pydispatch.embedded import EmbeddedPostgres
from pydispatch.migrate import migrate, sql_root
from tests.support import wait_for

PARTITIONS = """
insert into dispatch_partitions (id, policy_name, partition_key, first_seen_at, pending_count,
  due_at, blocked_until, blocked_reason, last_admitted_at)
select gen_random_uuid(), 'p', key, '2026-01-01', pending, due_at, blocked_until, reason, admitted
from (values
  ('empty', 0, null::timestamptz, null::timestamptz, null, '2026-01-02'::timestamptz),
  ('below none', -1, null, null, null, null),
  ('new', 2, '2026-01-01', null, null, null),
  ('served', 2, '2026-01-01', null, null, '2026-01-02'),
  ('throttled', 2, '2100-01-01', '2100-01-01', 'throttle_empty', '2026-01-02'),
  ('paused', 2, 'infinity', 'infinity', 'paused', '2026-01-02'),
  ('future', 2, '2100-01-01', null, null, '2026-01-02')
) as old (key, pending, due_at, blocked_until, reason, admitted)
"""


@pytest.fixture
def old(
    server: EmbeddedPostgres, admin: psycopg.Connection, tmp_path: Path
) -> Iterator[psycopg.Connection]:
    """A session in a database as it was before there was a history, with partitions."""
    name = "upgrade"
    root = shutil.copytree(sql_root(), tmp_path / "sql")
    for path in sorted((root / "migrations").glob("*.sql"))[3:]:
        path.unlink()
    for path in (*(root / "functions").glob("*.sql"), *(root / "views").glob("*.sql")):
        path.unlink()
    admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    with psycopg.connect(server.dsn(name), autocommit=True) as conn:
        migrate(conn, root=root, with_procrastinate=True)
        conn.execute(PARTITIONS)
        yield conn
    admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def empty_procrastinate(
    server: EmbeddedPostgres, admin: psycopg.Connection
) -> Iterator[psycopg.Connection]:
    """A session in a database that has procrastinate's schema and nothing of ours."""
    name = "first"
    admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    with psycopg.connect(server.dsn(name), autocommit=True) as conn:
        conn.execute(SchemaManager.get_schema().encode())
        yield conn
    admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def test_partitions_that_hold_jobs_say_since_when(old: psycopg.Connection) -> None:
    migrate(old)
    found = old.execute(
        "select partition_key, to_char(waiting_since at time zone 'utc', 'YYYY-MM-DD')"
        " from dispatch_partitions"
    ).fetchall()
    # At the latest; and in the future where only that is waited for.
    assert dict(found) == {
        "empty": None,
        "below none": None,
        "new": "2026-01-01",
        "served": "2026-01-02",
        "throttled": "2026-01-02",
        "paused": "2026-01-02",
        "future": "2100-01-01",
    }


def test_the_upgrade_waits_for_a_tick_and_is_in_nobodys_way_meanwhile(
    old: psycopg.Connection, admin: psycopg.Connection
) -> None:
    tries = "select 1 from pg_stat_activity where datname = %s and wait_event = 'PgSleep'"
    with ThreadPoolExecutor() as threads, psycopg.connect(old.info.dsn) as tick:
        tick.execute("select from dispatch_inbox for update")
        tick.execute("select from dispatch_partitions order by id for update")
        upgrade = threads.submit(migrate, old.info.dsn)
        wait_for(lambda: admin.execute(tries, [old.info.dbname]).fetchone())
        # Who has one table and needs the next gets it.
        tick.execute("update dispatch_partitions set pending_count = 1 where pending_count > 0")
        tick.execute("select from dispatch_inflight_jobs, dispatch_tick_samples")
        old.execute(
            "set lock_timeout = '5 s'; select from dispatch_partitions for share skip locked"
        )
        assert not upgrade.done()
        tick.commit()
        assert "migrations/0004_history.sql" in upgrade.result(timeout=30)
    assert old.execute(
        "select count(*) from dispatch_partitions"
        " where (pending_count > 0) = (waiting_since is null)"
    ).fetchone() == (0,)
    # And on it goes.
    old.execute("select dispatch_define_policy('q', '{}'), dispatch_stage('q', 't')")
    assert old.execute("select jobs_admitted from dispatch_tick('q')").fetchone() == (1,)


def test_somebody_who_only_reads_puts_the_upgrade_off_and_nobody_has_to_wait_for_that(
    old: psycopg.Connection, admin: psycopg.Connection
) -> None:
    tries = "select 1 from pg_stat_activity where datname = %s and wait_event = 'PgSleep'"
    # Of its triggers, one at least will be dropped.
    old.execute(
        "create trigger dispatch_ended before update on procrastinate_jobs"
        " for each row execute function suppress_redundant_updates_trigger()"
    )
    with ThreadPoolExecutor() as threads, psycopg.connect(old.info.dsn) as report:
        report.execute("select from procrastinate_jobs")
        upgrade = threads.submit(migrate, old.info.dsn)
        wait_for(lambda: admin.execute(tries, [old.info.dbname]).fetchone())
        old.execute("set lock_timeout = '5 s'; update procrastinate_jobs set priority = 1")
        assert not upgrade.done()
        report.commit()
        assert "migrations/0004_history.sql" in upgrade.result(timeout=30)


def test_who_only_reads_does_not_put_off_the_first_installation(
    empty_procrastinate: psycopg.Connection,
) -> None:
    with psycopg.connect(empty_procrastinate.info.dsn) as report:
        report.execute("select from procrastinate_jobs")
        assert "migrations/0004_history.sql" in migrate(empty_procrastinate)


# -- from before a job had one id

LANDED = """
select setval('procrastinate_jobs_id_seq', 1000);
insert into dispatch_policies (policy_name, definition, partition_by, shard_by, queue_name, gates,
  literals, lookups, context_paths, half_life, partition_batch_size, admission_batch_size,
  retry_strategy, stalled, created_at, updated_at)
values ('p', '{"partition_by": "k", "gates": [{"type": "concurrency", "max": 3}]}', '{k}', '{}',
  'default', '[{"type": "concurrency", "name": "concurrency", "max": 3, "full_backoff": 1}]',
  '{"concurrency.max": 3, "concurrency.full_backoff": 1, "fairness.weight": 1}', '[]', '{k}', 60,
  50, 100, 'restage', 'leave', now(), now());
insert into procrastinate_jobs (id, queue_name, task_name, status, attempts, scheduled_at, priority)
values
  (102, 'default', 'queued', 'todo', 0, null, 0),
  (103, 'default', 'running', 'doing', 0, null, 0),
  (104, 'default', 'finished', 'succeeded', 1, null, 0),
  (105, 'default', 'failed', 'failed', 1, null, 0),
  (106, 'default', 'parked', 'todo', 1, '3000-01-01 00:00:00+00', -2147483648),
  (107, 'default', 'dead retry', 'todo', 1, '3000-01-01 00:00:00+00', -2147483648),
  (111, 'default', 'twice', 'succeeded', 1, null, 0);
insert into dispatch_staged_jobs (id, partition_id, staged_at, job_id, attempts, policy_name,
  partition_key, task_name, queue_name, queueing_lock, args, context)
select id, ID, now(), job_id, attempts, 'p', 'a', name, 'default', lock, '{"k": "a"}', '{"k": "a"}'
from (values
  (1, null, 0, 'staged', null),
  (6, 106, 1, 'parked', 'lock'),
  (9, null, 0, 'locked', 'lock')
) as jobs (id, job_id, attempts, name, lock);
insert into dispatch_dead_jobs (id, partition_id, staged_at, died_at, job_id, priority, attempts,
  policy_name, partition_key, task_name, queue_name, args, context, error)
select id, ID, now(), now(), job_id, 0, 0, 'p', 'a', name, 'default', '{"k": "a"}', '{"k": "a"}',
  'no'
from (values (8, null, 'dead'), (7, 107, 'dead retry')) as jobs (id, job_id, name);
insert into dispatch_inflight_jobs (job_id, staged_id, partition_id, admitted_at, policy_name,
  partition_key)
values (102, 2, ID, now(), 'p', 'a'), (103, 3, ID, now(), 'p', 'a');
insert into dispatch_admissions (staged_id, job_id, partition_id, staged_at, admitted_at,
  policy_name, partition_key, context)
select staged_id, job_id, ID, now(), at, 'p', 'a', '{"k": "a"}'
from (values
  (2, 102, now()), (3, 103, now()), (4, 104, now()), (5, 105, now()), (6, 106, now()),
  (7, 107, now()), (10, null, now()), (11, 111, now() - interval '1 day'), (12, 111, now()),
  (13, 113, now())
) as admissions (staged_id, job_id, at);
insert into dispatch_partitions (id, policy_name, partition_key, first_seen_at, pending_count,
  in_flight_count, newest_id, context, due_at)
values (ID, 'p', 'a', now(), 3, 2, 9, '{"k": "a"}', now());
"""


@pytest.fixture
def landed(
    server: EmbeddedPostgres, admin: psycopg.Connection, tmp_path: Path
) -> Iterator[psycopg.Connection]:
    """A session in a database as it was when ids were mapped, with a job in every state."""
    name = "landed"
    root = shutil.copytree(sql_root(), tmp_path / "landed")
    for path in sorted((root / "migrations").glob("*.sql"))[9:]:
        path.unlink()
    for path in (*(root / "functions").glob("*.sql"), *(root / "views").glob("*.sql")):
        path.unlink()
    admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    with psycopg.connect(server.dsn(name), autocommit=True) as conn:
        migrate(conn, root=root, with_procrastinate=True)
        # The view that reads a column which goes.
        conn.execute(
            "create view dispatch_inflight as select job_id, staged_id, policy_name, partition_key,"
            " admitted_at, null::interval as age, null::text as state, null::text as task_name,"
            " null::text as queue_name, null::integer as attempts from dispatch_inflight_jobs"
        )
        partition = "encode(substring(sha256(convert_to(e'p\\na', 'UTF8')) from 1 for 16), 'hex')"
        conn.execute(LANDED.replace("ID,", f"{partition}::uuid,").encode())
        yield conn
    admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def test_every_job_is_kept_under_the_id_that_procrastinate_has_it_under(
    landed: psycopg.Connection,
) -> None:
    migrate(landed)
    states = landed.execute(
        "select id, job.state, job.task_name, job.job_id"
        " from generate_series(1, 120) as ids (given), dispatch_job_states(given) as job order by 1"
    ).fetchall()
    assert states == [
        (1, "staged", "staged", None),
        (8, "dead", "dead", None),
        (9, "staged", "locked", None),
        (10, "cancelled", None, None),
        (102, "queued", "queued", 102),
        (103, "running", "running", 103),
        (104, "finished", "finished", 104),
        (105, "finished", "failed", 105),
        (106, "staged", "parked", 106),
        (107, "dead", "dead retry", 107),
        (111, "finished", "twice", 111),
        (113, "finished", None, None),
    ]
    assert landed.execute("select max_queued from dispatch_policies").fetchone() == (1000,)
    assert landed.execute(
        "select job_id, staged_id, state from dispatch_inflight order by 1"
    ).fetchall() == [(102, 102, "queued"), (103, 103, "running")]


def test_every_job_goes_its_way_after_the_upgrade(landed: psycopg.Connection) -> None:
    def one(query: str) -> object:
        row = landed.execute(query.encode()).fetchone()
        return None if row is None else row[0]

    migrate(landed)
    assert one("select jobs_admitted from dispatch_tick('p')") == 1, "two of three slots are taken"
    landed.execute("select procrastinate_finish_job_v1(103, 'succeeded', false)")
    landed.execute("select procrastinate_cancel_job_v1(102, false, false)")
    assert one("select count(*) from dispatch_inflight_jobs") == 1
    # The retry's queueing lock is the new job's first.
    landed.execute("select dispatch_tick('p')")
    assert landed.execute(
        "select id, attempts from procrastinate_jobs"
        " where status = 'todo' and priority = 0 order by 1"
    ).fetchall() == [(1, 0), (9, 0)]
    landed.execute(
        "update procrastinate_jobs set status = 'doing' where id in (1, 9);"
        "update procrastinate_jobs set status = 'succeeded' where id in (1, 9);"
        "update dispatch_staged_jobs set eligible_at = '-infinity';"
        "update dispatch_partitions set due_at = now()"
    )
    assert one("select jobs_admitted from dispatch_tick('p')") == 1
    assert one("select attempts from procrastinate_jobs where id = 106 and priority = 0") == 1
    # A failed one is tried again, through the policy; the dead come back or go.
    landed.execute("select procrastinate_retry_job_v2(105, null, null, null, null)")
    landed.execute("select dispatch_requeue_dead(8), dispatch_discard_dead(107)")
    assert landed.execute("select id from dispatch_staged_jobs order by 1").fetchall() == [
        (8,),
        (105,),
    ]
    landed.execute("select dispatch_tick('p')")
    assert landed.execute(
        "select id, status::text from procrastinate_jobs where id in (8, 105, 107) order by 1"
    ).fetchall() == [(8, "todo"), (105, "todo"), (107, "cancelled")]
    assert landed.execute(
        "select in_flight_count, pending_count, (select count(*) from dispatch_inflight_jobs)"
        " from dispatch_partitions"
    ).fetchall() == [(3, 0, 3)]


def test_the_upgrade_to_one_id_waits_for_a_tick_and_holds_up_nobody_meanwhile(
    landed: psycopg.Connection, admin: psycopg.Connection
) -> None:
    tries = "select 1 from pg_stat_activity where datname = %s and wait_event = 'PgSleep'"
    with ThreadPoolExecutor() as threads, psycopg.connect(landed.info.dsn) as tick:
        tick.execute("select from dispatch_staged_jobs for update")
        upgrade = threads.submit(migrate, landed.info.dsn)
        wait_for(lambda: admin.execute(tries, [landed.info.dbname]).fetchone())
        tick.execute("update procrastinate_jobs set priority = 1 where id = 104")
        tick.execute("update dispatch_dead_jobs set error = 'still no'")
        landed.execute("set lock_timeout = '5 s'; select from dispatch_inflight_jobs for share")
        assert not upgrade.done()
        tick.commit()
        assert "migrations/0010_one_id.sql" in upgrade.result(timeout=30)
