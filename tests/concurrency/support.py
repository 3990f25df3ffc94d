"""What the tests with several connections share."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.types.json import Jsonb

IMPATIENT = "-c lock_timeout=1s -c statement_timeout=20s"
"""Options of a session that fails where it waits for somebody who stands still.

Whoever is only passing, on a busy machine too, has let go by then.
"""


def define(conn: psycopg.Connection, name: str = "p", **definition: Any) -> None:
    """Define a policy whose partition key is ``k``."""
    conn.execute(
        "select dispatch_define_policy(%s, %s)",
        [name, Jsonb({"partition_by": ["k"], **definition})],
    )


def cap(most: Any, **options: Any) -> dict[str, Any]:
    """Return a definition's part: at most ``most`` jobs of a partition in flight."""
    return {"gates": [{"type": "concurrency", "max": most, **options}]}


def stage(conn: psycopg.Connection, *keys: str, policy: str = "p") -> list[int]:
    """Stage a job for each key, all in one statement."""
    jobs = [{"task_name": "t", "args": {"k": key}} for key in keys]
    cursor = conn.execute("select dispatch_stage_many(%s, %s)", [policy, Jsonb(jobs)])
    return [row[0] for row in cursor.fetchall()]


def tick(conn: psycopg.Connection, policy: str = "p") -> int:
    """Tick in SQL and return the number of jobs admitted."""
    return int(value(conn, "select sum(jobs_admitted) from dispatch_tick(%s)", policy))


def start(conn: psycopg.Connection) -> int | None:
    """Start the first queued job as a worker does, and return its id; None when none is queued."""
    job_id = value(conn, "select (procrastinate_fetch_job_v2(null, null)).id")
    return None if job_id is None else int(job_id)


def finish(conn: psycopg.Connection, job_id: int, status: str = "succeeded") -> None:
    """End a job as a worker does."""
    conn.execute("select procrastinate_finish_job_v1(%s, %s, false)", [job_id, status])


def value(conn: psycopg.Connection, query: str, *arguments: Any) -> Any:
    """Return the first column of the only row."""
    (row,) = conn.execute(query.encode(), arguments).fetchall()
    return row[0]


def column(conn: psycopg.Connection, query: str, *arguments: Any) -> list[Any]:
    """Return the first column of all rows."""
    return [row[0] for row in conn.execute(query.encode(), arguments)]


def in_flight(conn: psycopg.Connection, policy: str = "p") -> dict[str, int]:
    """Return the number of slots taken by partition key."""
    rows = conn.execute(
        "select partition_key, count(*) from dispatch_inflight_jobs where policy_name = %s"
        " group by partition_key",
        [policy],
    )
    return dict(rows.fetchall())


# Every id that was ever staged and where its job is now, told from the tables themselves.
PLACES = """
select s.id, 'staged' from dispatch_staged_jobs as s
union all
select d.id, 'dead' from dispatch_dead_jobs as d
union all
select
  a.job_id,
  case
    when a.ending is not null then a.ending
    when job.status in ('todo', 'doing') then 'in flight'
    else 'ended'
  end
from dispatch_admissions as a
left join procrastinate_jobs as job on job.id = a.job_id
where not exists (select from dispatch_staged_jobs as s where s.id = a.job_id)
  and not exists (select from dispatch_dead_jobs as d where d.id = a.job_id)
"""


def places(conn: psycopg.Connection) -> dict[int, str]:
    """Return where each job is: staged, dead, cancelled, in flight or ended.

    Fails when a job is in two places.
    """
    rows = conn.execute(PLACES).fetchall()
    found: dict[int, str] = dict(rows)
    assert len(found) == len(rows), "a job is in two places"
    return found


# What has to hold whenever the inbox is empty: a row for each thing that is off.
IMBALANCES = """
select 'pending_count', p.partition_key, p.pending_count, waiting.jobs
from dispatch_partitions as p
cross join lateral (
  select count(*) as jobs from dispatch_staged_jobs as s where s.partition_id = p.id
) as waiting
where p.pending_count <> waiting.jobs
union all
select 'in_flight_count', p.partition_key, p.in_flight_count, slots.jobs
from dispatch_partitions as p
cross join lateral (
  select count(*) as jobs from dispatch_inflight_jobs as j where j.partition_id = p.id
) as slots
where p.in_flight_count <> slots.jobs
union all
select 'no partition', s.partition_key, null, null
from dispatch_staged_jobs as s
where not exists (select from dispatch_partitions as p where p.id = s.partition_id)
union all
select 'a slot without a job', j.partition_key, j.job_id, null
from dispatch_inflight_jobs as j
where not exists (
  select from procrastinate_jobs as job where job.id = j.job_id and job.status in ('todo', 'doing')
)
union all
select 'a job without a slot', a.partition_key, a.job_id, null
from dispatch_admissions as a
join procrastinate_jobs as job on job.id = a.job_id
where job.status in ('todo', 'doing')
  and not exists (select from dispatch_inflight_jobs as j where j.job_id = a.job_id)
  and not exists (select from dispatch_staged_jobs as s where s.id = a.job_id)
"""


def assert_balanced(conn: psycopg.Connection) -> None:
    """Fold what is in the inbox, and check that all counters agree with the rows."""
    with conn.transaction():
        for policy in column(conn, "select policy_name from dispatch_policies"):
            while value(conn, "select dispatch_fold(%s, dispatch_now())", policy):
                pass
    assert not value(conn, "select count(*) from dispatch_inbox"), "notes that nobody folds"
    imbalances = conn.execute(IMBALANCES).fetchall()
    assert not imbalances, imbalances
