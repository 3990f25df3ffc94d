"""Counts what a session reads, table by table, from its own statistics of the moment.

They are exact, show at once, and count what nested statements and triggers read too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import psycopg

GROWING = (
    "dispatch_staged_jobs",
    "dispatch_partitions",
    "dispatch_inbox",
    "dispatch_inflight_jobs",
    "dispatch_admissions",
    "dispatch_dead_jobs",
    "procrastinate_jobs",
    "procrastinate_events",
)
"""The tables that grow with the work."""

LOOK = """
select
  coalesce(index.indrelid, c.oid)::regclass::text as table_name,
  c.relname,
  index.indrelid is null as is_table,
  pg_stat_get_xact_numscans(c.oid) as scans,
  pg_stat_get_xact_tuples_returned(c.oid) as rows
from pg_class as c
left join pg_index as index on index.indexrelid = c.oid
where c.relkind in ('r', 'i')
  and c.relnamespace = current_schema()::regnamespace
"""


@dataclass
class Reads:
    """What was read: rows by table, scans of whole tables, index scans, temporary files."""

    rows: dict[str, int] = field(default_factory=dict)
    scanned: dict[str, int] = field(default_factory=dict)
    indexes: dict[str, int] = field(default_factory=dict)
    temporary_files: list[str] = field(default_factory=list)

    def growing(self) -> dict[str, int]:
        """Return the rows read of the growing tables."""
        return {name: rows for name, rows in self.rows.items() if name in GROWING}

    def check(self, *, others: int = 0, **most: int) -> None:
        """Check that no growing table was scanned, and how many rows were read of each.

        Args:
            others: The most rows of a table that is not named.
            most: The most rows of a table, such as ``staged_jobs=100``.
        """
        assert self.temporary_files == []
        scanned = {name: n for name, n in self.scanned.items() if name in GROWING}
        assert not scanned, f"scanned: {scanned}"
        named = {name if name in GROWING else f"dispatch_{name}": n for name, n in most.items()}
        limits = {name: named.pop(name, others) for name in GROWING}
        assert not named, f"no such table: {named}"
        over = {name: rows for name, rows in self.growing().items() if rows > limits[name]}
        assert not over, f"read: {over} by {self.indexes}"


@contextlib.contextmanager
def reads(conn: psycopg.Connection) -> Iterator[Reads]:
    """Count what the block reads. What it does is rolled back."""
    found = Reads()

    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        if "temporary file" in (diagnostic.message_primary or ""):
            found.temporary_files.append(diagnostic.message_primary or "")

    conn.add_notice_handler(note)
    try:
        with conn.transaction(force_rollback=True):
            conn.execute("set local log_temp_files = 0")
            conn.execute("set local client_min_messages = log")
            before = {row[1]: row for row in conn.execute(LOOK)}
            yield found
            for table, name, is_table, scans, rows in conn.execute(LOOK).fetchall():
                scans -= before[name][3]
                rows -= before[name][4]
                if rows:
                    found.rows[table] = found.rows.get(table, 0) + rows
                if scans:
                    (found.scanned if is_table else found.indexes)[name] = scans
    finally:
        conn.remove_notice_handler(note)


def fill(
    conn: psycopg.Connection,
    policy: str,
    jobs: int,
    *,
    keys: int = 1,
    eligible: str = "'-infinity'",
    due: str = "now()",
    priority: str = "0",
) -> None:
    """Write a backlog as staging and ticks would have left it.

    Args:
        policy: Its name; it has to exist.
        jobs: How many wait; the n-th of them in the partition ``n % keys``.
        keys: How many partitions.
        eligible: SQL for ``eligible_at`` of the n-th job.
        due: SQL for ``due_at`` of the k-th partition.
        priority: SQL for the priority of the n-th job.
    """
    conn.execute(
        f"""
        create temporary table backlog on commit drop as
        select k, dispatch_partition_id('{policy}', k::text) as id
        from generate_series(0, {keys} - 1) as k
        """.encode()
    )
    conn.execute(
        f"""
        insert into dispatch_staged_jobs (id, partition_id, eligible_at, staged_at, priority,
          policy_name, partition_key, task_name, queue_name, args, context)
        select dispatch_next_job_id(), backlog.id, {eligible}, now(), {priority}, '{policy}',
          k::text, 't', 'default', jsonb_build_object('k', k), jsonb_build_object('k', k)
        from generate_series(0, {jobs} - 1) as n
        join backlog on k = n % {keys}
        """.encode()
    )
    conn.execute(
        f"""
        insert into dispatch_partitions (id, policy_name, partition_key, first_seen_at, context,
          pending_count, waiting_since, due_at)
        select id, '{policy}', k::text, now(), jsonb_build_object('k', k), {jobs} / {keys}, now(),
          {due}
        from backlog
        """.encode()
    )
    conn.execute("drop table backlog")


def fill_history(
    conn: psycopg.Connection, policy: str, jobs: int, *, running: int, queued: int = 0
) -> None:
    """Write jobs of a policy that have ended, and some that run or are queued, with their slots.

    All are of one partition; procrastinate's triggers and ours stay out of it.
    """
    conn.execute("set local session_replication_role = replica")
    conn.execute(
        f"""
        with jobs as (
          insert into procrastinate_jobs (queue_name, task_name, status, attempts)
          select 'default', 't', (case
              when n < {running} then 'doing'
              when n < {running + queued} then 'todo'
              else 'succeeded' end)::procrastinate_job_status, 1
          from generate_series(0, {jobs} - 1) as n
          returning id, status
        ), events as (
          insert into procrastinate_events (job_id, type)
          select id, 'started' from jobs
        ), slots as (
          insert into dispatch_inflight_jobs
            (job_id, partition_id, admitted_at, policy_name, partition_key)
          select id, dispatch_partition_id('{policy}', 'history'), now(), '{policy}', 'history'
          from jobs
          where status <> 'succeeded'
        ), partition as (
          insert into dispatch_partitions
            (id, policy_name, partition_key, first_seen_at, in_flight_count)
          values (dispatch_partition_id('{policy}', 'history'), '{policy}', 'history', now(),
            {running + queued})
        )
        insert into dispatch_admissions
          (job_id, partition_id, staged_at, admitted_at, policy_name, partition_key, context)
        select id, dispatch_partition_id('{policy}', 'history'), now(), now(), '{policy}',
          'history', '{{}}'
        from jobs
        """.encode()
    )
    conn.execute("set local session_replication_role = origin")
