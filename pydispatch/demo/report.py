"""What the demo proves, measured from the log that the worker's tasks kept.

Running at once: a job has its slot from admission to finish, so the log, which is inside of
that, may never show more than the cap.

Rate: the bucket promises at most burst + rate * t *admissions* in any window of t seconds, and
that is held exactly, for every window, against the times of the admissions. A start follows its
admission after a moment in procrastinate's queue. Were the longest such moment L, the starts in
a window of t seconds were admitted within t + L; so at most burst + rate * (t + L) may start,
and that is held against the workers' log alone, with L from procrastinate's own events.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import psycopg
from psycopg.rows import class_row

from pydispatch.demo.scene import Tenant

__all__ = ["Report", "TenantReport", "measure"]

MEASURE = """
with runs as materialized (
  select
    r.tenant, r.started_at, r.finished_at, s.sent_at, a.admitted_at, e.at as queued_at,
    row_number() over (partition by r.tenant order by a.admitted_at, r.id) as admission,
    row_number() over (partition by r.tenant order by r.started_at, r.id) as start
  from demo_runs as r
  join demo_sent as s using (number)
  left join dispatch_admissions as a using (job_id)
  left join procrastinate_events as e on e.job_id = r.job_id and e.type = 'deferred'
), moments as (
  select tenant, started_at as at, 1 as change from runs
  union all
  select tenant, finished_at, -1 from runs where finished_at is not null
), running as (
  -- of an end and a start at one moment, the end counts first
  select tenant, sum(change) over (partition by tenant order by at, change) as jobs
  from moments
), windows as (
  select
    tenant,
    count(*) over (
      partition by tenant order by admitted_at
      range between interval '1 second' preceding and current row
    ) as admitted,
    count(*) over (
      partition by tenant order by started_at
      range between interval '1 second' preceding and current row
    ) as started
  from runs
), fills as (
  -- What a bucket of this rate has to hold to let all of them pass: the most, over all pairs i, j,
  -- of (j - i + 1) - rate * (time of j - time of i).
  select
    tenant,
    admission - rate * extract(epoch from admitted_at) as by_admission,
    min(admission - rate * extract(epoch from admitted_at)) over (
      partition by tenant order by admission
    ) as least_by_admission,
    start - rate * extract(epoch from started_at) as by_start,
    min(start - rate * extract(epoch from started_at)) over (
      partition by tenant order by start
    ) as least_by_start
  from runs
  join demo_tenants using (tenant)
), buckets as (
  select
    tenant,
    max(by_admission - least_by_admission) + 1 as bucket_of_admissions,
    max(by_start - least_by_start) + 1 as bucket_of_starts
  from fills
  group by tenant
), counts as (
  select tenant, count(*) as times, count(finished_at) as finished
  from demo_runs
  group by tenant, number
)
select
  t.tenant,
  (select count(*) from demo_sent as s where s.tenant = t.tenant) as sent,
  (select count(*) from counts as c where c.tenant = t.tenant and finished > 0) as ran,
  (select count(*) from counts as c where c.tenant = t.tenant and times > 1) as ran_twice,
  coalesce((select max(jobs) from running as r where r.tenant = t.tenant), 0) as running,
  coalesce((select max(admitted) from windows as w where w.tenant = t.tenant), 0) as admitted,
  coalesce((select max(started) from windows as w where w.tenant = t.tenant), 0) as started,
  buckets.bucket_of_admissions,
  buckets.bucket_of_starts,
  waits.*
from demo_tenants as t
left join buckets using (tenant)
cross join lateral (
  select
    extract(epoch from (array_agg(started_at - sent_at order by started_at))[1])::float8
      as first_wait,
    extract(epoch from (array_agg(started_at - sent_at order by started_at desc))[1])::float8
      as last_wait,
    extract(epoch from max(started_at - sent_at))::float8 as longest_wait,
    extract(epoch from max(started_at - queued_at))::float8 as longest_in_queue
  from runs
  where runs.tenant = t.tenant
) as waits
order by t.place
"""


@dataclasses.dataclass(frozen=True)
class TenantReport:
    """What became of one tenant's jobs. Waits are seconds from the defer to the start.

    Attributes:
        sent: Jobs sent.
        ran: Jobs that ran to their end.
        ran_twice: Jobs that ran more than once.
        running: Most that ran at once.
        admitted: Most admitted in any second.
        started: Most started in any second.
        bucket_of_admissions: The smallest burst with which all admissions keep the rate.
        bucket_of_starts: The same for the starts.
        first_wait: Of the first to start.
        last_wait: Of the last to start.
        longest_wait: Of any.
        longest_in_queue: Seconds that any of them was in procrastinate's queue.
    """

    tenant: str
    sent: int
    ran: int
    ran_twice: int
    running: int
    admitted: int
    started: int
    bucket_of_admissions: float | None
    bucket_of_starts: float | None
    first_wait: float | None
    last_wait: float | None
    longest_wait: float | None
    longest_in_queue: float | None

    def most_in_a_second(self, limits: Tenant, queued: float = 0) -> int | None:
        """How many the rate lets through in a second and ``queued`` seconds of delay."""
        if limits.rate is None or limits.burst is None:
            return None
        return math.floor(limits.burst + limits.rate * (1 + queued))

    def broken(self, limits: Tenant) -> list[str]:
        """The promises that were not kept, in words."""
        broken = []
        if self.ran != limits.jobs:
            broken.append(f"{limits.jobs - self.ran} of {limits.jobs} jobs did not run")
        if self.ran_twice:
            broken.append(f"{self.ran_twice} jobs ran more than once")
        if self.running > limits.cap:
            broken.append(f"{self.running} jobs ran at once, {limits.cap} may")
        if limits.rate is not None and limits.burst is not None and self.ran:
            rounding = 1e-6
            if self.bucket_of_admissions is None:
                broken.append("its admissions were not written down")
            elif self.bucket_of_admissions > limits.burst + rounding:
                broken.append(
                    f"admissions keep {limits.rate:g}/s only with a burst of "
                    f"{self.bucket_of_admissions:.3f}; {limits.burst} is allowed"
                )
            late = limits.rate * (self.longest_in_queue or 0)
            if (self.bucket_of_starts or 0) > limits.burst + late + rounding:
                broken.append(
                    f"starts keep {limits.rate:g}/s only with a burst of "
                    f"{self.bucket_of_starts:.3f}; {limits.burst} and {late:.3f} for the time in "
                    "the queue are allowed"
                )
        return [f"{self.tenant}: {each}" for each in broken]


@dataclasses.dataclass(frozen=True)
class Report:
    """What the demo has shown."""

    tenants: tuple[Tenant, ...]
    reports: tuple[TenantReport, ...]
    seconds: float
    broken: tuple[str, ...]

    @property
    def kept(self) -> bool:
        """Were all promises kept?"""
        return not self.broken

    @property
    def longest_in_queue(self) -> float:
        """Seconds that any job was in procrastinate's queue."""
        return max(report.longest_in_queue or 0 for report in self.reports)

    @property
    def proven(self) -> str:
        """What was proven, or what was not, in a sentence."""
        if self.broken:
            return "A promise was broken. " + "; ".join(self.broken) + "."
        quiet, flood = self._of("quiet"), self._of("flood")
        return (
            f"Each of {sum(report.ran for report in self.reports)} jobs ran once, no cap and no "
            f"rate was exceeded, and while the flood's jobs waited up to {flood.longest_wait:.1f} "
            f"s, none of the quiet tenant's waited more than {quiet.longest_wait:.2f} s."
        )

    def _of(self, tenant: str) -> TenantReport:
        return next(report for report in self.reports if report.tenant == tenant)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "kept": self.kept,
            "proven": self.proven,
            "broken": list(self.broken),
            "seconds": round(self.seconds, 3),
            "tenants": [
                {
                    **dataclasses.asdict(report),
                    "cap": limits.cap,
                    "rate": limits.rate,
                    "burst": limits.burst,
                    "most_in_a_second": report.most_in_a_second(limits),
                }
                for limits, report in zip(self.tenants, self.reports, strict=True)
            ],
        }


def measure(
    connection: psycopg.Connection[Any], tenants: tuple[Tenant, ...], seconds: float
) -> Report:
    """Hold the worker's log against the limits."""
    with connection.cursor(row_factory=class_row(TenantReport)) as cursor:
        reports = tuple(cursor.execute(MEASURE).fetchall())
    broken = [
        each
        for limits, report in zip(tenants, reports, strict=True)
        for each in report.broken(limits)
    ]
    waits = {report.tenant: report.longest_wait or math.inf for report in reports}
    # Behind the flood it would wait about as long as the flood itself.
    if waits["quiet"] > waits["flood"] / 4:
        broken.append(
            f"quiet: a job waited {waits['quiet']:.2f} s, the flood's {waits['flood']:.2f} s"
        )
    return Report(tenants, reports, seconds, tuple(broken))
