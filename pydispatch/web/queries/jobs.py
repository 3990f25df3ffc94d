"""Jobs: where each is and what it waits for, and those that are dead."""

from __future__ import annotations

import contextlib
from datetime import datetime

from pydispatch.errors import UnknownJob, translate
from pydispatch.web.database import Reader, Row

__all__ = ["dead", "dead_of_partition", "explain", "find", "find_dead", "payload", "stalled"]

Position = tuple[datetime, int]
"""Where a page of dead jobs begins: when a job died, and its id."""

DEAD = 50
"""Rows a page shows at most."""


async def find(reader: Reader, id: int) -> Row | None:
    """Where a job is, also by its partition's id; None when there is none of this id."""
    rows = await _of_job(
        reader,
        """
        select
          job.*,
          case when job.partition_key is not null then
            dispatch_partition_id(job.policy_name, job.partition_key)
          end as partition_id
        from dispatch_job(%(id)s::bigint) as job
        """,
        id,
    )
    return rows[0] if rows else None


async def explain(reader: Reader, id: int) -> list[Row]:
    """What a job waits for; nothing when it is gone meanwhile."""
    return await _of_job(reader, "select * from dispatch_explain(%(id)s::bigint)", id)


async def _of_job(reader: Reader, statement: str, id: int) -> list[Row]:
    """The rows of a statement that fails when there is no such job; then none."""
    with contextlib.suppress(UnknownJob):
        async with reader.savepoint():
            with translate():
                return await reader.rows(statement, id=id)
    return []


async def stalled(reader: Reader, job_id: int) -> Row | None:
    """Of a running job, what is known of its lost worker; None when nothing is wrong."""
    return await reader.row(
        "select * from dispatch_stalled_jobs where job_id = %(job_id)s", job_id=job_id
    )


async def payload(reader: Reader, id: int) -> Row | None:
    """The args and the context of a job that is staged or dead, the context also afterwards."""
    return await reader.row(
        """
        select args, context from dispatch_staged_jobs where id = %(id)s
        union all
        select args, context from dispatch_dead_jobs where id = %(id)s
        union all
        select null, context from dispatch_admissions where job_id = %(id)s
        limit 1
        """,
        id=id,
    )


async def find_dead(reader: Reader, id: int) -> Row | None:
    """A dead job without its payload, or None."""
    return await reader.row(
        """
        select id, policy_name, partition_key, partition_id, task_name, queue_name, attempts,
          priority, lock, queueing_lock, scheduled_at, staged_at, died_at, error
        from dispatch_dead_jobs
        where id = %(id)s
        """,
        id=id,
    )


async def dead_of_partition(reader: Reader, policy: str, key: str) -> Row | None:
    """How many of the last 1,000 dead jobs of a policy are this partition's, and the latest."""
    return await reader.row(
        """
        select count(*) as jobs, (array_agg(id order by died_at desc, id desc))[1] as newest_id
        from (
          select id, died_at, partition_key
          from dispatch_dead_jobs
          where policy_name = %(policy)s
          order by died_at desc
          limit 1000
        ) as newest
        where partition_key = %(key)s
        having count(*) > 0
        """,
        policy=policy,
        key=key,
    )


async def dead(
    reader: Reader, *, policy: str | None = None, begin: Position | None = None
) -> tuple[list[Row], Position | None]:
    """Dead jobs, the latest first, and where the next page begins.

    Names of policies are found by skipping through the index, since jobs of a policy that was
    dropped have none in dispatch_policies; of each, one page is read.
    """
    rows, last = await reader.page(
        """
        with recursive names as (
          select min(policy_name) as policy_name from dispatch_dead_jobs
          where %(policy)s::text is null or policy_name = %(policy)s
          union all
          select (
            select min(d.policy_name) from dispatch_dead_jobs as d
            where d.policy_name > names.policy_name
              and %(policy)s::text is null
          )
          from names
          where names.policy_name is not null
        )
        select dead.*
        from names
        cross join lateral (
          select id, policy_name, partition_key, partition_id, task_name, attempts, died_at, error
          from dispatch_dead_jobs as d
          where d.policy_name = names.policy_name
            and (%(at)s::timestamptz is null or (d.died_at, d.id) < (%(at)s, %(id)s::bigint))
          order by d.died_at desc, d.id desc
          limit %(limit)s
        ) as dead
        order by dead.died_at desc, dead.id desc
        limit %(limit)s
        """,
        DEAD,
        policy=policy,
        at=begin[0] if begin else None,
        id=begin[1] if begin else None,
    )
    return rows, (last["died_at"], last["id"]) if last else None
