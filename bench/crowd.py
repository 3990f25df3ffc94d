"""A big installation as ticks leave it, written in a few set-based statements.

Three policies with many partitions and a backlog, slots that workers and the queue hold, and a
day of history. The counters agree with the rows that they count.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import psycopg

from pydispatch import AdaptiveConcurrency, Concurrency, Policy, Throttle, ctx

__all__ = ["FLOOD", "Crowd", "fill"]

POLICIES = (
    Policy(
        "calls",
        partition_by="tenant",
        queue="http",
        gates=[Throttle(rate=ctx("rate", default=60), per=60), Concurrency(max=5)],
    ),
    Policy(
        "searches",
        partition_by="tenant",
        queue="search",
        gates=[AdaptiveConcurrency(initial_max=3, target_lag_ms=500)],
    ),
    Policy("exports", partition_by="tenant", queue="export", gates=[Concurrency(max=2)]),
)
FLOOD = "tenant-0000000"
"""The partition in which a fifth of all jobs wait, all of ``calls``."""


@dataclasses.dataclass(frozen=True)
class Crowd:
    """How much there is.

    Attributes:
        partitions: Partitions of all policies.
        jobs: Staged jobs, about.
        slots: Jobs in flight; four of five run, the others wait for a worker.
        dead: Jobs set aside.
        admissions: Jobs that were admitted and are done.
        ticks: Ticks of each policy in the last 24 hours.
        samples: Samples of each policy in the last 24 hours.
    """

    partitions: int = 100_000
    jobs: int = 1_000_000
    slots: int = 10_000
    dead: int = 2_000
    admissions: int = 100_000
    ticks: int = 86_400
    samples: int = 8_640


# Of ten partitions, seven are of calls, two of searches, one of exports. One of ten is idle, the
# others differ in what waits there and why.
NUMBERS = """
create temporary table crowd as
with numbers as (
  select
    number,
    case
      when number %% 10 < 7 then 'calls'
      when number %% 10 < 9 then 'searches'
      else 'exports'
    end as policy,
    'tenant-' || lpad(number::text, 7, '0') as key,
    case
      when number = 0 then %(jobs)s / 5
      when number / 10 %% 10 = 9 then 0
      else 1 + number::bigint * 7919 %% greatest(2 * (%(jobs)s * 9 / 10 / %(partitions)s), 1)
    end as pending,
    case when number < %(slots)s then 1 else 0 end as in_flight
  from generate_series(0, %(partitions)s - 1) as number
)
select
  *,
  dispatch_partition_id(policy, key) as id,
  now() - make_interval(secs => number %% 3600) as since,
  case
    when pending = 0 then null
    when number / 10 %% 100 = 1 then 'paused'
    when number / 10 %% 10 = 2 then null
    when policy = 'calls' and in_flight = 0 then 'throttle_empty'
    else 'concurrency_full'
  end as reason
from numbers;
create unique index on crowd (number);
analyze crowd;
"""

PARTITIONS = """
insert into dispatch_partitions (id, policy_name, partition_key, due_at, blocked_until,
  blocked_after_finish, blocked_reason, first_seen_at, last_checked_at, last_admitted_at,
  decayed_at, decayed_admits, total_admitted, pending_count, in_flight_count, waiting_since,
  context, gate_state)
select
  id, policy, key,
  case
    when pending = 0 then null
    when reason = 'paused' then 'infinity'
    when reason is null then since
    else now() + interval '1 hour' + make_interval(secs => number)
  end,
  case when reason in ('throttle_empty', 'concurrency_full') then now() + interval '1 hour' end,
  case when reason = 'throttle_empty' then now() + interval '1 hour' end,
  reason, now() - interval '2 days', since,
  case when number %% 20 > 0 then since - interval '1 minute' end,
  since, number %% 97, number %% 997, pending, in_flight,
  case when pending > 0 then since end,
  jsonb_build_object('tenant', key, 'rate', 60),
  case policy
    when 'calls' then jsonb_build_object('throttle',
      jsonb_build_object('tokens', 0.5, 'at', extract(epoch from since)))
    else '{}'
  end
from crowd;
insert into dispatch_adaptive_stats (partition_id, gate_name, current_max, ewma_lag_ms,
  sample_count, updated_at)
select id, 'adaptive_concurrency', 1 + number %% 8, number %% 700, number %% 997, since
from crowd
where policy = 'searches';
insert into dispatch_pauses (id, policy_name, partition_key, paused_at)
select id, policy, key, since from crowd where reason = 'paused';
"""

JOBS = """
insert into dispatch_staged_jobs (id, partition_id, policy_name, partition_key, task_name,
  queue_name, priority, staged_at, scheduled_at, eligible_at, args, context)
select
  nextval('procrastinate_jobs_id_seq'), id, policy, key, policy || '.run', policy,
  turn %% 3, since, later, coalesce(later, '-infinity'),
  jsonb_build_object('tenant', key, 'url', 'https://api.example.com/v1/orders?page=' || turn),
  jsonb_build_object('tenant', key, 'rate', 60)
from crowd
cross join lateral generate_series(1, pending) as turn
cross join lateral (
  select case when turn %% 50 = 49 then now() + interval '1 hour' end as later
) as schedule
"""

# Four of five slots' jobs run, at one of ten workers; the fifth waits for a worker.
SLOTS = """
insert into procrastinate_workers (last_heartbeat) select now() from generate_series(1, 10);
with queued as (
  insert into procrastinate_jobs (queue_name, task_name, args)
  select policy, policy || '.run', jsonb_build_object('tenant', key, 'number', number)
  from crowd
  where in_flight > 0
  returning id, args
)
insert into dispatch_inflight_jobs (job_id, partition_id, admitted_at, policy_name, partition_key)
select queued.id, crowd.id, since, policy, key
from queued
join crowd on crowd.number = (queued.args ->> 'number')::int;
update procrastinate_jobs as job
set status = 'doing', attempts = 0,
  worker_id = (select min(id) from procrastinate_workers) + job.id %% 10
where job.id %% 5 > 0;
insert into dispatch_admissions (job_id, partition_id, staged_at, admitted_at, policy_name,
  partition_key, context)
select
  job_id, partition_id, admitted_at - interval '1 minute', admitted_at, policy_name,
  partition_key, '{}'
from dispatch_inflight_jobs;
"""

HISTORY = """
insert into dispatch_admissions (job_id, partition_id, staged_at, admitted_at, policy_name,
  partition_key, context)
select
  nextval('procrastinate_jobs_id_seq'), id,
  moment - interval '1 minute', moment, policy, key, '{}'
from generate_series(1, %(admissions)s) as turn
join crowd on crowd.number = turn %% %(partitions)s
cross join lateral (
  select now() - interval '24 hours' * (1 - turn::float8 / %(admissions)s) as moment
) as times;
insert into dispatch_dead_jobs (id, partition_id, policy_name, partition_key, staged_at, died_at,
  priority, attempts, task_name, queue_name, args, context, error)
select
  nextval('procrastinate_jobs_id_seq'), id, policy, key, since - interval '1 minute', since, 0, 0,
  policy || '.gone', policy, '{}', '{}', 'unknown task: ' || policy || '.gone'
from crowd
where number < %(dead)s;
insert into dispatch_tick_samples (at, policy_name, partitions_seen, partitions_admitted,
  partitions_denied, jobs_admitted, handoff_failures, denied_reasons, duration_ms, counted)
select
  now() - interval '24 hours' * (1 - turn::float8 / %(ticks)s), policy_name,
  50, 20, 30, 20 + turn %% 30, (turn %% 1000 = 0)::int,
  '{"throttle_empty": 20, "concurrency_full": 10}', 5 + turn %% 40, turn < %(ticks)s - 30
from dispatch_policies
cross join generate_series(1, %(ticks)s) as turn;
insert into dispatch_policy_samples (policy_name, at, partitions, pending, waiting, in_flight, due,
  blocked, queued, oldest_wait_seconds, oldest_queued_seconds, lag_ms)
select
  policy, now() - interval '24 hours' * (1 - turn::float8 / %(samples)s), partitions,
  pending * (1 + sin(turn / 500.0)) / 2, waiting, in_flight, 100 + turn %% 50, blocked, turn %% 20,
  turn %% 600, turn %% 7, turn %% 300
from (
  select
    policy, count(*) as partitions, sum(pending) as pending,
    count(*) filter (where pending > 0) as waiting, sum(in_flight) as in_flight,
    count(reason) as blocked
  from crowd
  group by policy
) as sums
cross join generate_series(1, %(samples)s) as turn;
insert into dispatch_audit_log (at, actor, action, policy_name, partition_key)
select since, 'somebody', 'pause', policy, key from crowd where reason = 'paused';
"""

VACUUM = """
vacuum analyze dispatch_partitions, dispatch_staged_jobs, dispatch_inflight_jobs,
  dispatch_admissions, dispatch_adaptive_stats, dispatch_dead_jobs, dispatch_pauses,
  dispatch_tick_samples, dispatch_policy_samples, dispatch_audit_log, procrastinate_jobs
"""


def fill(conn: psycopg.Connection[Any], crowd: Crowd = Crowd()) -> None:
    """Write all of it into a database that has no jobs.

    Args:
        conn: In autocommit.
        crowd: How much.
    """
    for policy in POLICIES:
        conn.execute(
            "select dispatch_define_policy(%s, %s)", [policy.name, json.dumps(policy.definition())]
        )
        conn.execute("select dispatch_map_task(%s, %s)", [f"{policy.name}.run", policy.name])
    with psycopg.ClientCursor(conn) as cursor:  # several statements at once
        for statements in (NUMBERS, PARTITIONS, JOBS, SLOTS, HISTORY):
            cursor.execute(statements, dataclasses.asdict(crowd))
    conn.execute("drop table crowd")
    conn.execute(VACUUM)
