"""What concerns an operator: what to look at, whether anybody works, what was done by hand."""

from __future__ import annotations

from datetime import datetime

from pydispatch.web.database import Reader, Row

__all__ = ["audit", "hints", "workers"]

HINTS = 20
AUDIT = 100
"""Rows a page shows at most."""


async def hints(
    reader: Reader,
    *,
    policy: str | None = None,
    partition_key: str | None = None,
    limit: int = HINTS,
) -> tuple[list[Row], bool]:
    """What an operator should look at, the worst first; and whether there is more.

    Of a partition, with what is of its whole policy.
    """
    rows, last = await reader.page(
        """
        select
          hint.*,
          case when hint.partition_key is not null then
            dispatch_partition_id(hint.policy_name, hint.partition_key)
          end as partition_id
        from dispatch_hints as hint
        where (%(policy)s::text is null or coalesce(hint.policy_name, %(policy)s) = %(policy)s)
          and (%(key)s::text is null or coalesce(hint.partition_key, %(key)s) = %(key)s)
        order by
          array_position(array['critical', 'warning', 'info'], hint.level), hint.since,
          hint.policy_name, hint.partition_key, hint.hint
        limit %(limit)s
        """,
        limit,
        policy=policy,
        key=partition_key,
    )
    return rows, last is not None


async def workers(reader: Reader, moment: datetime) -> int:
    """How many of procrastinate's workers do not count as lost."""
    count: int = await reader.value("select dispatch_workers_alive(%(now)s)", now=moment)
    return count


async def audit(
    reader: Reader, *, policy: str | None = None, before: int | None = None
) -> tuple[list[Row], int | None]:
    """What was done by hand, the latest first, and where the next page begins."""
    rows, last = await reader.page(
        """
        select
          log.*,
          case when log.partition_key is not null then
            dispatch_partition_id(log.policy_name, log.partition_key)
          end as partition_id
        from dispatch_audit_log as log
        where (%(policy)s::text is null or log.policy_name = %(policy)s)
          and (%(before)s::bigint is null or log.id < %(before)s)
        order by log.id desc
        limit %(limit)s
        """,
        AUDIT,
        policy=policy,
        before=before,
    )
    return rows, last["id"] if last else None
