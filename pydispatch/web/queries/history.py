"""What happened lately, from samples: charts of the last hour, denials of the last minutes."""

from __future__ import annotations

from datetime import datetime, timedelta

from pydispatch.web.charts import Chart, Series, span_of
from pydispatch.web.database import Reader, Row

__all__ = ["adaptive", "admissions", "backlog", "denials"]

SPAN = timedelta(hours=1)
"""How far back charts go."""

STEP = timedelta(minutes=1)

DENIALS = timedelta(minutes=15)
"""How far back denials are counted."""


async def _of_hour(
    reader: Reader, moment: datetime, statement: str, **arguments: str | None
) -> tuple[list[datetime], list[Row]]:
    """The minutes of the last hour, and what a statement reads of them."""
    times = span_of(moment, SPAN, STEP)
    rows = await reader.rows(statement, since=times[0], until=times[-1] + STEP, **arguments)
    return times, rows


async def admissions(reader: Reader, moment: datetime, name: str | None = None) -> Chart:
    """Jobs admitted in each minute of the last hour, of one policy or of all."""
    times, rows = await _of_hour(
        reader,
        moment,
        """
        select date_bin('1 minute', at, 'epoch') as minute, sum(jobs_admitted)::bigint as jobs
        from dispatch_tick_samples
        where at >= %(since)s
          and at < %(until)s
          and (%(name)s::text is null or policy_name = %(name)s)
        group by 1
        """,
        name=name,
    )
    jobs = {row["minute"]: row["jobs"] for row in rows}
    return Chart(
        "throughput-chart",
        "Jobs admitted, each minute of the last hour (UTC)",
        "jobs a minute",
        times,
        [Series("admitted", [jobs.get(each, 0) for each in times], steps=True)] if jobs else [],
        empty="Nothing was admitted in the last hour.",
    )


async def backlog(reader: Reader, moment: datetime, name: str | None = None) -> tuple[Chart, Chart]:
    """What the sweeps saw in the last hour: jobs waiting and in flight; their lag."""
    times, rows = await _of_hour(
        reader,
        moment,
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


async def adaptive(reader: Reader, moment: datetime, partition_id: str) -> tuple[Chart, Chart]:
    """What the adaptive gates of a partition came to in the last hour: their caps; their lags."""
    times, rows = await _of_hour(
        reader,
        moment,
        """
        select gate_name, minute, current_max, ewma_lag_ms
        from dispatch_adaptive_samples
        where partition_id = %(id)s
          and minute < %(until)s
        order by gate_name, minute
        """,
        id=partition_id,
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
        since=moment - DENIALS,
    )
