"""Partitions: to choose from, and all that is known of one."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from pydispatch.web.database import Reader, Row

__all__ = ["SORTS", "adaptive", "fairness", "find", "in_flight", "of_key", "page", "waiting"]

PAGE = 50
WAITING = 25
IN_FLIGHT = 20
"""Rows a page shows at most."""

SORTS = {
    "pending": "most waiting",
    "admitted": "most admitted",
    "stale": "longest not looked at",
    "recent": "latest admission",
    "key": "key",
}
"""The orders of partitions, and what each puts first."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition's id leads to its names, also where no tick has looked at it yet."""

    id: str
    policy: str
    key: str
    status: Row | None
    paused_at: datetime | None


async def page(
    reader: Reader,
    *,
    policy: str | None = None,
    sort: str = "pending",
    cursor: str | None = None,
    search: str | None = None,
    only_pending: bool = False,
    limit: int = PAGE,
) -> tuple[list[Row], str | None]:
    """A page of partitions, and the cursor of the next if there is one."""
    rows, last = await reader.page(
        """
        select * from dispatch_partitions_page(%(policy)s, %(sort)s, %(cursor)s, %(limit)s,
          %(search)s, %(only_pending)s)
        """,
        limit,
        policy=policy,
        sort=sort,
        cursor=cursor,
        search=search,
        only_pending=only_pending,
    )
    return rows, last["cursor"] if last else None


async def find(reader: Reader, id: str) -> Partition | None:
    """A partition that a tick has seen, or that is paused, or in which a job is staged."""
    status = await reader.row("select * from dispatch_partition_status where id = %(id)s", id=id)
    pause = await reader.row(
        "select policy_name, partition_key, paused_at from dispatch_pauses where id = %(id)s", id=id
    )
    names = (
        status
        or pause
        or await reader.row(
            """
            select policy_name, partition_key from dispatch_staged_jobs
            where partition_id = %(id)s
            order by partition_id, priority desc, eligible_at, id
            limit 1
            """,
            id=id,
        )
    )
    if names is None or names["partition_key"] is None:
        return None
    return Partition(
        str(id),
        names["policy_name"],
        names["partition_key"],
        status,
        pause["paused_at"] if pause else None,
    )


async def of_key(reader: Reader, key: str) -> list[Row]:
    """The partitions with exactly this key, of whatever policy; each by its id."""
    return await reader.rows(
        """
        select policy.policy_name, %(key)s::text as partition_key, named.id,
          p.pending_count, p.in_flight_count
        from dispatch_policies as policy
        cross join lateral dispatch_partition_id(policy.policy_name, %(key)s) as named (id)
        left join dispatch_partitions as p on p.id = named.id
        where p.id is not null
          or exists (select from dispatch_pauses as pause where pause.id = named.id)
          or exists (select from dispatch_staged_jobs as s where s.partition_id = named.id)
        order by p.pending_count desc nulls last, policy.policy_name
        limit 100
        """,
        key=key,
    )


async def waiting(
    reader: Reader, policy: str, key: str, cursor: str | None = None, limit: int = WAITING
) -> tuple[list[Row], str | None]:
    """The next waiting jobs of a partition in the order of admission, and the next cursor."""
    rows, last = await reader.page(
        "select * from dispatch_waiting_page(%(policy)s, %(key)s, %(limit)s, %(cursor)s)",
        limit,
        policy=policy,
        key=key,
        cursor=cursor,
    )
    return rows, last["cursor"] if last else None


async def in_flight(reader: Reader, partition_id: str) -> tuple[list[Row], bool]:
    """The jobs that hold its slots, the longest admitted first; and whether there are more."""
    rows, last = await reader.page(
        """
        select job_id, admitted_at, state, task_name, queue_name, attempts
        from dispatch_inflight
        -- An array, not a join: then the slots are found by index before their jobs are looked up.
        where job_id = any (array(
          select job_id
          from dispatch_inflight_jobs
          where policy_name = (select policy_name from dispatch_partitions where id = %(id)s)
            and partition_id = %(id)s
          order by admitted_at, job_id
          limit %(limit)s
        ))
        order by admitted_at, job_id
        """,
        IN_FLIGHT,
        id=partition_id,
    )
    return rows, last is not None


async def adaptive(reader: Reader, partition_id: str) -> list[Row]:
    """What each adaptive gate has learned of a partition, beside what it was told."""
    return await reader.rows(
        """
        select
          stats.gate_name, stats.current_max, stats.ewma_lag_ms, stats.sample_count,
          stats.updated_at, gate as definition
        from dispatch_adaptive_stats as stats
        join dispatch_partitions as p on p.id = stats.partition_id
        join dispatch_policies as policy on policy.policy_name = p.policy_name
        left join lateral jsonb_array_elements(policy.gates) as gate
          on gate ->> 'name' = stats.gate_name
        where stats.partition_id = %(id)s
        order by stats.gate_name
        """,
        id=partition_id,
    )


async def fairness(reader: Reader, moment: datetime, name: str, id: str) -> Row | None:
    """How a partition was served lately beside the others that are due with it."""
    return await reader.row(
        """
        select
          count(*) as partitions,
          count(*) filter (where p.decayed_admits < mine.decayed_admits) as served_less,
          sum(p.decayed_admits) as decayed_sum
        from (
          select decayed_admits from dispatch_partition_status
          -- Found in the table: it has an index on this, which the view's due_at hides.
          where id = any (array(
            select id from dispatch_partitions
            where policy_name = %(name)s
              and due_at <= %(now)s
              and id <> %(id)s::uuid
            order by due_at
            limit 1000
          ))
        ) as p
        cross join (
          select decayed_admits from dispatch_partition_status where id = %(id)s
        ) as mine
        """,
        now=moment,
        name=name,
        id=id,
    )
