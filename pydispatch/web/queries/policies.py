"""Policies: as they are defined, and what there is of each now."""

from __future__ import annotations

from pydispatch.web.database import Reader, Row

__all__ = ["capacity", "find", "names", "statuses", "tasks"]


async def statuses(reader: Reader, name: str | None = None) -> list[Row]:
    """The status of each policy, those with most jobs waiting first."""
    return await reader.rows(
        """
        select status.*, pause.paused_at
        from dispatch_policy_status as status
        left join dispatch_pauses as pause
          on pause.id = dispatch_partition_id(status.policy_name, null)
        where %(name)s::text is null or status.policy_name = %(name)s
        order by status.pending desc, status.policy_name
        """,
        name=name,
    )


async def find(reader: Reader, name: str) -> Row | None:
    """A policy as it is defined, or None."""
    return await reader.row(
        """
        select policy.*, pause.paused_at
        from dispatch_policies as policy
        left join dispatch_pauses as pause
          on pause.id = dispatch_partition_id(policy.policy_name, null)
        where policy.policy_name = %(name)s
        """,
        name=name,
    )


async def names(reader: Reader) -> tuple[list[str], list[str]]:
    """The names of the policies, a thousand at most, and of those of them that are paused."""
    rows = await reader.rows(
        """
        select policy.policy_name, pause.id is not null as paused
        from dispatch_policies as policy
        left join dispatch_pauses as pause
          on pause.id = dispatch_partition_id(policy.policy_name, null)
        order by policy.policy_name
        limit 1000
        """
    )
    return (
        [row["policy_name"] for row in rows],
        [row["policy_name"] for row in rows if row["paused"]],
    )


async def tasks(reader: Reader, name: str) -> list[str]:
    """The tasks that follow a policy, as far as they were declared."""
    rows = await reader.rows(
        "select task_name from dispatch_tasks where policy_name = %(name)s order by 1 limit 100",
        name=name,
    )
    return [row["task_name"] for row in rows]


async def capacity(reader: Reader, name: str | None = None) -> dict[str, Row]:
    """Per policy with a cap that is known and jobs in flight, how full its caps are."""
    rows = await reader.rows(
        """
        select * from dispatch_slot_use
        where %(name)s::text is null or policy_name = %(name)s
        """,
        name=name,
    )
    return {row["policy_name"]: row for row in rows}
