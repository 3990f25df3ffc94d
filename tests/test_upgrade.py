"""An installation that holds jobs is brought up to this version while people work with it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from procrastinate.schema import SchemaManager
from psycopg import sql

from pydispatch.embedded import EmbeddedPostgres
from pydispatch.errors import MigrationRefused
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


def test_each_job_can_be_found_ended_and_tried_again_after_the_upgrade(
    landed: psycopg.Connection,
) -> None:
    def one(query: str) -> object:
        row = landed.execute(query.encode()).fetchone()
        return None if row is None else row[0]

    def jobs_and_slots() -> list[tuple[int, int]]:
        landed.execute("select dispatch_tick('p')")
        return landed.execute(
            "select in_flight_count - (select count(*) from dispatch_inflight_jobs),"
            " pending_count - (select count(*) from dispatch_staged_jobs) from dispatch_partitions"
        ).fetchall()

    before = one("select count(*) from procrastinate_jobs")
    migrate(landed)
    words = landed.execute(
        "select id, dispatch_job_status(id)"
        " from unnest('{1,8,10,102,103,104,105,106,107,113}'::bigint[]) as id"
    ).fetchall()
    assert dict(words) == {
        1: "todo",
        8: "failed",
        10: "cancelled",
        102: "todo",
        103: "doing",
        104: "succeeded",
        105: "failed",
        106: "todo",
        107: "failed",
        113: "succeeded",
    }

    # A staged one is cancelled: procrastinate has it then, with its events.
    assert one("select dispatch_cancel(1)") is True
    assert one("select status::text from procrastinate_jobs where id = 1") == "cancelled"
    assert landed.execute(
        "select type::text from procrastinate_events where job_id = 1 order by id"
    ).fetchall() == [("deferred",), ("cancelled",)]
    # A retry is cancelled: its row has no far schedule any more.
    assert one("select dispatch_cancel(106)") is True
    assert landed.execute(
        "select status::text, scheduled_at, queueing_lock from procrastinate_jobs where id = 106"
    ).fetchall() == [("cancelled", None, "lock")]
    assert jobs_and_slots() == [(0, 0)]

    # One that runs is tried again, and one that is queued is deleted.
    landed.execute("select procrastinate_retry_job_v2(103, null, null, null, null)")
    landed.execute("delete from procrastinate_jobs where id = 102")
    assert one("select parked from dispatch_staged_jobs where id = 103") is True
    assert jobs_and_slots() == [(0, 0)]
    assert one("select state from dispatch_job(103)") == "queued"
    assert one("select count(*) from dispatch_job_states(102)") == 0

    # A dead one that had been tried before comes back, under the same id, and ends.
    landed.execute("select dispatch_requeue_dead(107)")
    assert one("select parked from dispatch_staged_jobs where id = 107") is True
    assert jobs_and_slots() == [(0, 0)]
    assert landed.execute(
        "select status::text, attempts, scheduled_at, priority from procrastinate_jobs"
        " where id = 107"
    ).fetchall() == [("todo", 1, None, 0)]
    landed.execute("update procrastinate_jobs set status = 'doing' where id = 107")
    landed.execute("select procrastinate_finish_job_v1(107, 'succeeded', false)")
    assert one("select state from dispatch_job(107)") == "finished"
    assert jobs_and_slots() == [(0, 0)]

    # A new one has an id that no job ever had.
    new = landed.execute("select dispatch_stage('p', 't', '{\"k\": \"a\"}')").fetchone()
    assert new is not None
    assert new[0] > 1000
    assert jobs_and_slots() == [(0, 0)]
    # The one with a queueing lock, the new one, and the one that was staged and cancelled.
    assert one("select count(*) from procrastinate_jobs") == int(str(before)) - 1 + 3
    assert one("select count(*) from procrastinate_events where at > '2999-01-01'") == 0


def test_a_worker_that_goes_after_the_upgrade_touches_no_parked_retry(
    landed: psycopg.Connection,
) -> None:
    landed.execute(
        "insert into procrastinate_workers (id) overriding system value values (7), (8);"
        "update procrastinate_jobs set worker_id = 7 where id in (106, 107)"
    )
    migrate(landed)
    landed.execute("select procrastinate_unregister_worker_v1(7)")
    landed.execute("select dispatch_discard_dead(107)")
    landed.execute("select dispatch_cancel(1), dispatch_cancel(9)")
    landed.execute("select dispatch_tick('p')")
    assert landed.execute("select state from dispatch_job(106)").fetchone() == ("queued",)
    assert (
        landed.execute(
            "select job_id, at from procrastinate_events where at > '2999-01-01'"
        ).fetchall()
        == []
    )


# case: ids were given out twice, since procrastinate's tables were truncated and its ids restarted
def test_jobs_whose_ids_were_given_out_twice_are_all_kept(landed: psycopg.Connection) -> None:
    landed.execute(
        """
        -- A staged and a dead one have the ids of retries' rows, and one a finished job's.
        update dispatch_staged_jobs set id = 106 where id = 1;
        update dispatch_dead_jobs set id = 107 where id = 8;
        update dispatch_staged_jobs set id = 104 where id = 9;
        """
    )
    migrate(landed)
    assert landed.execute(
        "select task_name, parked, id in (104, 106, 107) from dispatch_staged_jobs order by 1"
    ).fetchall() == [("locked", False, False), ("parked", True, True), ("staged", False, False)]
    assert landed.execute(
        "select task_name, parked, id = 107 from dispatch_dead_jobs order by 1"
    ).fetchall() == [("dead", False, False), ("dead retry", True, True)]


@pytest.mark.parametrize(
    "holder",
    [
        "select from dispatch_staged_jobs for update",
        "select from dispatch_admissions",
        "update procrastinate_jobs set priority = 1 where id = 104",
    ],
)
def test_the_upgrade_to_one_id_gives_up_after_10_s_and_has_changed_nothing(
    landed: psycopg.Connection, admin: psycopg.Connection, holder: str
) -> None:
    def facts() -> list[tuple[object, ...]]:
        return landed.execute(
            "select id, job_id, task_name from dispatch_staged_jobs order by 1"
        ).fetchall()

    before = facts()
    with psycopg.connect(landed.info.dsn) as other:
        other.execute(holder.encode())
        begin = time.monotonic()
        with pytest.raises(MigrationRefused) as caught:
            migrate(landed.info.dsn)
        assert 9 < time.monotonic() - begin < 30
        assert caught.value.sqlstate == "55P03"
        assert facts() == before
    assert migrate(landed)[0] == "migrations/0010_one_id.sql"
    names = landed.execute("select task_name from dispatch_staged_jobs order by 1").fetchall()
    assert names == [("locked",), ("parked",), ("staged",)]


@pytest.mark.parametrize("mode", ["access share", "row share"])
def test_who_reads_or_fetches_puts_the_upgrade_to_one_id_off_and_gets_what_it_wants_next(
    landed: psycopg.Connection, admin: psycopg.Connection, tmp_path: Path, mode: str
) -> None:
    tries = "select 1 from pg_stat_activity where datname = %s and wait_event = 'PgSleep'"
    # A trigger, and a function that cannot be replaced in place: so all are dropped and made anew.
    (tmp_path / "landed" / "functions" / "70_procrastinate.sql").write_text(
        "create or replace function dispatch_cancel(p_staged_id bigint) returns boolean"
        " language sql return false;\n"
        "create or replace function dispatch_retried() returns trigger language plpgsql as"
        " $$ begin return new; end $$;\n"
        "create or replace trigger dispatch_retried before update of status on procrastinate_jobs"
        " for each row when (new.status = 'todo') execute function dispatch_retried();\n"
    )
    migrate(landed, root=tmp_path / "landed")
    with ThreadPoolExecutor() as threads, psycopg.connect(landed.info.dsn) as worker:
        # As a worker's fetch does, before it asks for the lock to change a row.
        worker.execute(f"lock table procrastinate_jobs in {mode} mode".encode())
        upgrade = threads.submit(migrate, landed.info.dsn)
        wait_for(lambda: upgrade.done() or admin.execute(tries, [landed.info.dbname]).fetchone())
        # Nobody stands behind the upgrade, be it for a while.
        for _ in range(20):
            landed.execute("set lock_timeout = '5 s'; update procrastinate_jobs set args = '{}'")
        worker.execute("update procrastinate_jobs set priority = 1 where id = 104")
        assert not upgrade.done()
        worker.commit()
        assert "migrations/0010_one_id.sql" in upgrade.result(timeout=30)
