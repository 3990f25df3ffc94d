"""Every statement of the pages. None reads more of a backlog than it shows.

What grows with the number of partitions is one pass over them (the totals), with the number of
ticks the last hour's samples; staged jobs are only ever read by index, a page at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from datetime import datetime, timedelta
from typing import Any

from pydispatch.errors import UnknownJob, translate
from pydispatch.web.charts import Chart, Series, span_of
from pydispatch.web.database import Reader, Row

__all__ = [
    "AUDIT_PAGE",
    "DEAD_PAGE",
    "HINTS",
    "PARTITIONS_PAGE",
    "SORTS",
    "WAITING_PAGE",
    "Partition",
    "adaptive",
    "adaptive_charts",
    "admissions_chart",
    "audit_page",
    "capacity",
    "database_time",
    "dead_job",
    "dead_page",
    "denials",
    "explain",
    "fairness",
    "find_partition",
    "find_partitions",
    "gate_texts",
    "hints",
    "history_charts",
    "in_flight",
    "job",
    "names",
    "partitions_page",
    "payload",
    "policies",
    "policy",
    "policy_exists",
    "stalled",
    "tasks",
    "to_id",
    "waiting_page",
    "workers",
]

PARTITIONS_PAGE = 50
WAITING_PAGE = 25
DEAD_PAGE = 50
AUDIT_PAGE = 100
HINTS = 20
"""Rows a page shows at most."""

SORTS = {
    "pending": "most waiting",
    "admitted": "most admitted",
    "stale": "longest not looked at",
    "recent": "latest admission",
    "key": "key",
}
"""The orders of partitions, and what each puts first."""

SPAN = timedelta(hours=1)
"""How far back charts go."""

STEP = timedelta(minutes=1)


BIGINT = 2**63 - 1


def to_id(text: str) -> int | None:
    """The number of a job that a text is, or None."""
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        return None
    number = int(text)
    return number if number <= BIGINT else None


async def database_time(reader: Reader) -> datetime:
    """The time by the database's clock."""
    moment: datetime = await reader.value("select dispatch_now()")
    return moment


# -- policies


async def policies(reader: Reader, name: str | None = None) -> list[Row]:
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


async def policy(reader: Reader, name: str) -> Row | None:
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


async def policy_exists(reader: Reader, name: str) -> bool:
    """Is there such a policy?"""
    return bool(
        await reader.value(
            "select exists (select from dispatch_policies where policy_name = %(name)s)", name=name
        )
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


async def hints(
    reader: Reader,
    *,
    policy: str | None = None,
    partition_key: str | None = None,
    limit: int = HINTS,
) -> list[Row]:
    """What an operator should look at, the worst first; of a partition with those of its policy."""
    return await reader.rows(
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
        policy=policy,
        key=partition_key,
        limit=limit,
    )


async def workers(reader: Reader, moment: datetime) -> int:
    """How many of procrastinate's workers do not count as lost."""
    count: int = await reader.value("select dispatch_workers_alive(%(now)s)", now=moment)
    return count


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


# -- charts


async def admissions_chart(reader: Reader, moment: datetime, name: str | None = None) -> Chart:
    """Jobs admitted in each minute of the last hour, of one policy or of all."""
    times = span_of(moment, SPAN, STEP)
    rows = await reader.rows(
        """
        select date_bin('1 minute', at, 'epoch') as minute, sum(jobs_admitted)::bigint as jobs
        from dispatch_tick_samples
        where at >= %(since)s
          and at < %(until)s
          and (%(name)s::text is null or policy_name = %(name)s)
        group by 1
        """,
        since=times[0],
        until=times[-1] + STEP,
        name=name,
    )
    jobs = {row["minute"]: row["jobs"] for row in rows}
    return Chart(
        "throughput-chart",
        "Jobs admitted, each minute of the last hour (UTC)",
        "jobs a minute",
        times,
        [Series("admitted", [jobs.get(each, 0) for each in times] if jobs else [], steps=True)]
        if jobs
        else [],
        empty="Nothing was admitted in the last hour.",
    )


async def history_charts(
    reader: Reader, moment: datetime, name: str | None = None
) -> tuple[Chart, Chart]:
    """What the sweeps saw in the last hour: jobs waiting and in flight; their lag."""
    times = span_of(moment, SPAN, STEP)
    rows = await reader.rows(
        """
        with minutes as (
          select
            policy_name,
            date_bin('1 minute', at, 'epoch') as minute,
            max(pending) as pending,
            max(in_flight) as in_flight,
            max(queued) as queued,
            avg(lag_ms) as lag_ms
          from dispatch_policy_samples
          where at >= %(since)s
            and at < %(until)s
            and (%(name)s::text is null or policy_name = %(name)s)
          group by 1, 2
        )
        select
          minute,
          sum(pending)::bigint as pending,
          sum(in_flight)::bigint as in_flight,
          sum(queued)::bigint as queued,
          avg(lag_ms) as lag_ms
        from minutes
        group by minute
        """,
        since=times[0],
        until=times[-1] + STEP,
        name=name,
    )
    seen = {row["minute"]: row for row in rows}

    def line(column: str) -> list[float | None]:
        values = [seen.get(each, {}).get(column) for each in times]
        return [None if value is None else float(value) for value in values]

    empty = "No sweep wrote anything down in the last hour. The driver sweeps, or else cron has to."
    return (
        Chart(
            "pending-chart",
            "Jobs waiting and in flight, each minute of the last hour (UTC)",
            "jobs",
            times,
            [
                Series("waiting", line("pending"), area=True),
                Series("in flight", line("in_flight")),
                Series("of them queued", line("queued")),
            ],
            empty=empty,
        ),
        Chart(
            "lag-chart",
            "Mean time from admission to start, each minute of the last hour (UTC)",
            "milliseconds",
            times,
            [Series("lag", line("lag_ms"), area=True)],
            empty="No adaptive_concurrency gate of this policy measured anything in the last hour.",
        ),
    )


async def denials(reader: Reader, moment: datetime, name: str) -> list[Row]:
    """How often partitions of a policy were denied in the last 15 minutes, by reason."""
    return await reader.rows(
        """
        select reason.key as reason, sum(reason.value::bigint)::bigint as partitions,
          max(sample.at) as last_at
        from dispatch_tick_samples as sample
        cross join lateral jsonb_each_text(sample.denied_reasons) as reason
        where sample.policy_name = %(name)s
          and sample.at > %(since)s
        group by reason.key
        order by 2 desc, 1
        """,
        name=name,
        since=moment - timedelta(minutes=15),
    )


# -- partitions


async def partitions_page(
    reader: Reader,
    *,
    policy: str | None = None,
    sort: str = "pending",
    cursor: str | None = None,
    search: str | None = None,
    only_pending: bool = False,
    limit: int = PARTITIONS_PAGE,
) -> tuple[list[Row], str | None]:
    """A page of partitions, and the cursor of the next if there is one."""
    rows = await reader.rows(
        """
        select * from dispatch_partitions_page(%(policy)s, %(sort)s, %(cursor)s, %(limit)s,
          %(search)s, %(only_pending)s)
        """,
        policy=policy,
        sort=sort,
        cursor=cursor,
        limit=limit + 1,
        search=search,
        only_pending=only_pending,
    )
    return _page(rows, limit)


def _page(rows: list[Row], limit: int) -> tuple[list[Row], str | None]:
    """The rows of a page that was asked for with one more than it has room for."""
    return rows[:limit], rows[limit - 1]["cursor"] if len(rows) > limit else None


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition's id leads to its names, also where no tick has looked at it yet."""

    id: str
    policy: str
    key: str
    status: Row | None
    paused_at: datetime | None


async def find_partition(reader: Reader, id: str) -> Partition | None:
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


async def find_partitions(reader: Reader, key: str) -> list[Row]:
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


async def waiting_page(
    reader: Reader, policy: str, key: str, cursor: str | None = None, limit: int = WAITING_PAGE
) -> tuple[list[Row], str | None]:
    """The next waiting jobs of a partition in the order of admission, and the next cursor."""
    rows = await reader.rows(
        "select * from dispatch_waiting_page(%(policy)s, %(key)s, %(limit)s, %(cursor)s)",
        policy=policy,
        key=key,
        cursor=cursor,
        limit=limit + 1,
    )
    return _page(rows, limit)


async def in_flight(reader: Reader, partition_id: str, limit: int) -> list[Row]:
    """The jobs of a partition that hold a slot, the longest admitted first."""
    return await reader.rows(
        """
        select job_id, staged_id, admitted_at, state, task_name, queue_name, attempts
        from dispatch_inflight
        -- An array, not a join: then the slots are found by index before their jobs are looked up.
        where job_id = any (array(
          select job_id
          from dispatch_inflight_jobs
          where partition_id = %(id)s
          order by admitted_at, job_id
          limit %(limit)s
        ))
        order by admitted_at, job_id
        """,
        id=partition_id,
        limit=limit,
    )


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


async def adaptive_charts(
    reader: Reader, moment: datetime, partition_id: str
) -> tuple[Chart, Chart]:
    """What the adaptive gates of a partition came to in the last hour: their caps; their lags."""
    times = span_of(moment, SPAN, STEP)
    rows = await reader.rows(
        """
        select gate_name, minute, current_max, ewma_lag_ms
        from dispatch_adaptive_samples
        where partition_id = %(id)s
          and minute < %(until)s
        order by gate_name, minute
        """,
        id=partition_id,
        until=times[-1] + STEP,
    )

    def lines(column: str) -> list[Series]:
        # What a gate has come to stays until it learns more.
        series = []
        for gate in dict.fromkeys(row["gate_name"] for row in rows):
            known = [row for row in rows if row["gate_name"] == gate]
            values = [
                next((float(row[column]) for row in reversed(known) if row["minute"] <= each), None)
                for each in times
            ]
            series.append(Series(gate, values))
        return series

    empty = "No adaptive gate learned anything of this partition in the last hour."
    return (
        Chart(
            "cap-chart",
            "Cap that each adaptive gate came to, in the last hour (UTC)",
            "jobs",
            times,
            lines("current_max"),
            empty=empty,
        ),
        Chart(
            "partition-lag-chart",
            "Moving average of the time from admission to start, in the last hour (UTC)",
            "milliseconds",
            times,
            lines("ewma_lag_ms"),
            empty=empty,
        ),
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
          where policy_name = %(name)s
            and due_at <= %(now)s
            and id <> %(id)s::uuid
          order by due_at
          limit 1000
        ) as p
        cross join (
          select decayed_admits from dispatch_partition_status where id = %(id)s
        ) as mine
        """,
        now=moment,
        name=name,
        id=id,
    )


# -- jobs


async def job(reader: Reader, id: int) -> Row | None:
    """Where a job is, or None when there is none of this id."""
    with contextlib.suppress(UnknownJob):
        async with reader.savepoint():
            with translate():
                return await reader.row("select * from dispatch_job(%(id)s::bigint)", id=id)
    return None


async def explain(reader: Reader, id: int) -> list[Row]:
    """What a job waits for; nothing when it is gone meanwhile."""
    with contextlib.suppress(UnknownJob):
        async with reader.savepoint():
            with translate():
                return await reader.rows("select * from dispatch_explain(%(id)s::bigint)", id=id)
    return []


async def stalled(reader: Reader, job_id: int) -> Row | None:
    """Of a running job, what is known of its lost worker; None when nothing is wrong."""
    return await reader.row(
        "select * from dispatch_stalled_jobs where job_id = %(job_id)s", job_id=job_id
    )


async def dead_job(reader: Reader, id: int) -> Row | None:
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


async def payload(reader: Reader, id: int) -> Row | None:
    """The args and the context of a job that is staged or dead, the context also afterwards."""
    return await reader.row(
        """
        select args, context from dispatch_staged_jobs where id = %(id)s
        union all
        select args, context from dispatch_dead_jobs where id = %(id)s
        union all
        select null, context from dispatch_admissions where staged_id = %(id)s
        limit 1
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


async def dead_page(
    reader: Reader,
    *,
    policy: str | None = None,
    cursor: tuple[datetime, int] | None = None,
    limit: int = DEAD_PAGE,
) -> tuple[list[Row], tuple[datetime, int] | None]:
    """Dead jobs, the latest first, and where the next page begins.

    Names of policies are found by skipping through the index, since jobs of a policy that was
    dropped have none in dispatch_policies; of each, one page is read.
    """
    rows = await reader.rows(
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
        policy=policy,
        at=cursor[0] if cursor else None,
        id=cursor[1] if cursor else None,
        limit=limit + 1,
    )
    shown = rows[:limit]
    more = len(rows) > limit
    return shown, (shown[-1]["died_at"], shown[-1]["id"]) if more else None


async def audit_page(
    reader: Reader, *, policy: str | None = None, before: int | None = None, limit: int = AUDIT_PAGE
) -> tuple[list[Row], int | None]:
    """What was done by hand, the latest first, and where the next page begins."""
    rows = await reader.rows(
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
        policy=policy,
        before=before,
        limit=limit + 1,
    )
    shown = rows[:limit]
    return shown, shown[-1]["id"] if len(rows) > limit else None


# -- definitions


def gate_texts(gates: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """The gates of a policy, each as its name, its type and its limits in a line."""

    def value(number: Any) -> str:
        if not isinstance(number, dict):
            return f"{number:,}" if isinstance(number, (int, float)) else str(number)
        source = f"context {number['ctx']}" if "ctx" in number else f"function {number['sql']}"
        default = number.get("default")
        return source if default is None else f"{source}, else {default}"

    texts = []
    for gate in gates:
        limits = [
            f"{name.replace('_', ' ')} {value(number)}"
            for name, number in gate.items()
            if name not in ("name", "type") and number is not None
        ]
        texts.append((gate["name"], gate["type"], "; ".join(limits)))
    return texts
