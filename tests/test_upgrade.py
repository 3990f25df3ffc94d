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
