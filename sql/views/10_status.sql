-- What is going on, for people and dashboards. No view reads dispatch_staged_jobs, so none grows with the backlog. No time is
-- infinite, since hardly any client can read that.

create or replace view dispatch_partition_status as
select
  p.policy_name,
  p.partition_key,
  p.shard,
  greatest(p.pending_count, 0) as pending_count,
  p.in_flight_count,
  p.total_admitted,
  dispatch_decay(p.decayed_admits, extract(epoch from dispatch_now() - p.decayed_at)::double precision, policy.half_life) as decayed_admits,
  nullif(p.due_at, 'infinity') as due_at,
  nullif(p.blocked_until, 'infinity') as blocked_until,
  p.blocked_reason,
  pause.id is not null as paused,
  p.last_checked_at,
  p.last_admitted_at,
  p.first_seen_at,
  p.context,
  p.gate_state,
  p.id,
  case when p.waiting_since <= dispatch_now() then p.waiting_since end as waiting_since
from dispatch_partitions as p
join dispatch_policies as policy on policy.policy_name = p.policy_name
left join dispatch_pauses as pause on pause.id = p.id;
comment on view dispatch_partition_status is 'One row a partition: its counters as of the last tick, and what it waits for.';
comment on column dispatch_partition_status.policy_name is 'The policy.';
comment on column dispatch_partition_status.partition_key is 'The key.';
comment on column dispatch_partition_status.shard is 'The shard.';
comment on column dispatch_partition_status.pending_count is 'Jobs waiting.';
comment on column dispatch_partition_status.in_flight_count is 'Jobs admitted that have not ended.';
comment on column dispatch_partition_status.total_admitted is 'Jobs ever admitted.';
comment on column dispatch_partition_status.decayed_admits is 'How much it was served lately, decayed to this moment.';
comment on column dispatch_partition_status.due_at is 'When a tick looks at it next; null when nothing waits, or while it is paused.';
comment on column dispatch_partition_status.blocked_until is 'Until when its gates let nothing pass (unless a job finishes); null while it is paused.';
comment on column dispatch_partition_status.blocked_reason is 'What keeps it from admitting more, as the last tick saw it.';
comment on column dispatch_partition_status.paused is 'Is this partition paused by itself?';
comment on column dispatch_partition_status.last_checked_at is 'When a tick last looked.';
comment on column dispatch_partition_status.last_admitted_at is 'When a job was last admitted.';
comment on column dispatch_partition_status.first_seen_at is 'When it was first seen.';
comment on column dispatch_partition_status.context is 'The context that counts.';
comment on column dispatch_partition_status.gate_state is 'State of each gate, by the gate''s name.';
comment on column dispatch_partition_status.id is 'The partition''s id.';
comment on column dispatch_partition_status.waiting_since is 'Since when jobs wait and none was admitted; null when none waits, or all wait for their time.';

-- One pass over the partitions and one over the slots, however many policies there are, and none over staged jobs.
create or replace view dispatch_policy_status as
with clock as materialized (
  select dispatch_now() as now
), sums as (
  select
    p.policy_name,
    count(*) as partitions,
    sum(greatest(p.pending_count, 0))::bigint as pending,
    sum(p.in_flight_count)::bigint as in_flight,
    count(*) filter (where p.due_at <= (select now from clock)) as due,
    count(*) filter (where p.blocked_reason is not null and p.due_at is not null) as blocked,
    min(p.due_at) filter (where p.due_at < 'infinity') as oldest_due_at,
    min(p.waiting_since) filter (where p.waiting_since <= (select now from clock) and p.blocked_reason is distinct from 'paused') as waiting_since,
    coalesce(sum(p.pending_count) filter (where p.waiting_since <= (select now from clock)), 0)::bigint as waiting
  from dispatch_partitions as p
  group by p.policy_name
)
select
  policy.policy_name,
  coalesce(sums.partitions, 0) as partitions,
  coalesce(sums.pending, 0) as pending,
  coalesce(sums.in_flight, 0) as in_flight,
  case when pause.id is null then coalesce(sums.due, 0) else 0 end as due,
  coalesce(sums.blocked, 0) as blocked,
  case when pause.id is null then sums.oldest_due_at end as oldest_due_at,
  coalesce(recent.admitted, 0) as admitted_last_minute,
  coalesce(dead.jobs, 0) as dead,
  pause.id is not null as paused,
  coalesce(paused.partitions, 0) as paused_partitions,
  recent.last_tick_at,
  policy.updated_at,
  coalesce(slots.queued, 0) as queued,
  coalesce(slots.running, 0) as running,
  slots.oldest_queued_at,
  case when pause.id is null then clock.now - sums.waiting_since end as oldest_wait,
  coalesce(sums.waiting, 0) as waiting
from dispatch_policies as policy
cross join clock
left join dispatch_pauses as pause on pause.id = dispatch_partition_id(policy.policy_name, null)
left join sums on sums.policy_name = policy.policy_name
left join dispatch_slot_counts((select now from clock)) as slots on slots.policy_name = policy.policy_name
cross join lateral (
  select sum(s.jobs_admitted)::bigint as admitted, max(s.at) as last_tick_at
  from dispatch_tick_samples as s
  where s.policy_name = policy.policy_name
    and s.at > clock.now - interval '1 minute'
) as recent
left join (
  select d.policy_name, count(*) as jobs from dispatch_dead_jobs as d group by d.policy_name
) as dead on dead.policy_name = policy.policy_name
left join (
  select q.policy_name, count(*) as partitions
  from dispatch_pauses as q
  where q.partition_key is not null
  group by q.policy_name
) as paused on paused.policy_name = policy.policy_name;
comment on view dispatch_policy_status is 'One row a policy: what waits, what runs, what stands still.';
comment on column dispatch_policy_status.policy_name is 'The policy.';
comment on column dispatch_policy_status.partitions is 'Partitions known.';
comment on column dispatch_policy_status.pending is 'Jobs waiting, as of the last tick.';
comment on column dispatch_policy_status.in_flight is 'Jobs admitted that have not ended.';
comment on column dispatch_policy_status.due is 'Partitions that the next tick would look at.';
comment on column dispatch_policy_status.blocked is 'Partitions with waiting jobs that a gate, the budget, a full queue or a pause holds back.';
comment on column dispatch_policy_status.oldest_due_at is 'Since when the longest waiting partition is due; far in the past when nobody ticks; null when nothing waits, or all that waits is paused.';
comment on column dispatch_policy_status.admitted_last_minute is 'Jobs admitted in the last 60 seconds.';
comment on column dispatch_policy_status.dead is 'Jobs in dispatch_dead_jobs.';
comment on column dispatch_policy_status.paused is 'Is the whole policy paused?';
comment on column dispatch_policy_status.paused_partitions is 'Partitions paused by themselves.';
comment on column dispatch_policy_status.last_tick_at is 'When a tick last looked at a partition, within the last minute.';
comment on column dispatch_policy_status.updated_at is 'When the definition last changed.';
comment on column dispatch_policy_status.queued is 'Jobs admitted that no worker has taken: they wait for a worker, not for a gate.';
comment on column dispatch_policy_status.running is 'Jobs that a worker runs.';
comment on column dispatch_policy_status.oldest_queued_at is 'When the longest queued of them was admitted; null where none is queued.';
comment on column dispatch_policy_status.oldest_wait is 'The longest that a partition has had waiting jobs and none admitted; null where none waits. Not counted: paused partitions, and jobs that wait for their time.';
comment on column dispatch_policy_status.waiting is 'Jobs waiting in partitions of which at least one could go now, by its schedule.';

create or replace view dispatch_inflight as
select
  slot.job_id,
  slot.job_id as staged_id,
  slot.policy_name,
  slot.partition_key,
  slot.admitted_at,
  dispatch_now() - slot.admitted_at as age,
  state.state,
  state.task_name,
  state.queue_name,
  state.attempts
from dispatch_inflight_jobs as slot
left join lateral dispatch_job_states(slot.job_id) as state on true;
comment on view dispatch_inflight is 'One row a slot, with what procrastinate says of its job: queued tells that no worker has taken it yet.';
comment on column dispatch_inflight.job_id is 'The job.';
comment on column dispatch_inflight.staged_id is 'The same, for queries of before there was one id.';
comment on column dispatch_inflight.policy_name is 'The policy.';
comment on column dispatch_inflight.partition_key is 'The partition.';
comment on column dispatch_inflight.admitted_at is 'When it was admitted.';
comment on column dispatch_inflight.age is 'Time since.';
comment on column dispatch_inflight.state is 'queued: waits for a worker; running: a worker has it.';
comment on column dispatch_inflight.task_name is 'procrastinate''s task name.';
comment on column dispatch_inflight.queue_name is 'procrastinate''s queue.';
comment on column dispatch_inflight.attempts is 'Tries so far.';

create or replace view dispatch_stalled_jobs as
select
  stalled.job_id,
  stalled.policy_name,
  stalled.worker_id,
  stalled.last_sign_at,
  slot.job_id is not null as holds_slot,
  slot.partition_key
from dispatch_stalled(dispatch_now(), dispatch_now() - dispatch_setting_span('inflight_stale_after')) as stalled
left join dispatch_inflight_jobs as slot on slot.job_id = stalled.job_id;
comment on view dispatch_stalled_jobs is 'Running jobs whose worker gave no sign for inflight_stale_after. The sweep takes their slots; those of policies with "stalled": "retry" it retries.';
comment on column dispatch_stalled_jobs.job_id is 'The job.';
comment on column dispatch_stalled_jobs.policy_name is 'The policy.';
comment on column dispatch_stalled_jobs.worker_id is 'The worker; null when procrastinate has forgotten it.';
comment on column dispatch_stalled_jobs.last_sign_at is 'Its last heartbeat, or when a sweep first missed it.';
comment on column dispatch_stalled_jobs.holds_slot is 'False once a sweep has taken its slot.';
comment on column dispatch_stalled_jobs.partition_key is 'The partition, while it holds a slot.';

create or replace view dispatch_throughput as
select
  policy_name,
  date_trunc('minute', at) as minute,
  count(*) as ticks,
  sum(jobs_admitted)::bigint as jobs_admitted,
  sum(partitions_seen)::bigint as partitions_seen,
  sum(partitions_denied)::bigint as partitions_denied,
  sum(handoff_failures)::bigint as handoff_failures,
  max(duration_ms) as longest_tick_ms
from dispatch_tick_samples
group by policy_name, date_trunc('minute', at);
comment on view dispatch_throughput is 'Per policy and minute, from the tick samples kept (metrics_retention).';
comment on column dispatch_throughput.policy_name is 'The policy.';
comment on column dispatch_throughput.minute is 'The minute.';
comment on column dispatch_throughput.ticks is 'Ticks that looked at a partition.';
comment on column dispatch_throughput.jobs_admitted is 'Jobs handed off.';
comment on column dispatch_throughput.partitions_seen is 'Partitions looked at.';
comment on column dispatch_throughput.partitions_denied is 'Partitions denied.';
comment on column dispatch_throughput.handoff_failures is 'Jobs set aside as dead.';
comment on column dispatch_throughput.longest_tick_ms is 'The longest tick, milliseconds.';

create or replace view dispatch_denials as
select
  sample.policy_name,
  date_trunc('minute', sample.at) as minute,
  reason.key as reason,
  sum(reason.value::bigint)::bigint as partitions
from dispatch_tick_samples as sample
cross join lateral jsonb_each_text(sample.denied_reasons) as reason
group by sample.policy_name, date_trunc('minute', sample.at), reason.key;
comment on view dispatch_denials is 'Per policy, minute and reason: how often a partition was denied.';
comment on column dispatch_denials.policy_name is 'The policy.';
comment on column dispatch_denials.minute is 'The minute.';
comment on column dispatch_denials.reason is 'The reason: throttle_empty, rate_zero, concurrency_full, max_zero, budget_exhausted, queue_full, paused, limit_error.';
comment on column dispatch_denials.partitions is 'Denials.';

create or replace view dispatch_policy_history as
select
  policy_name,
  date_trunc('minute', at) as minute,
  max(partitions) as partitions,
  max(pending) as pending,
  max(waiting) as waiting,
  max(in_flight) as in_flight,
  max(due) as due,
  max(blocked) as blocked,
  max(queued) as queued,
  max(oldest_wait_seconds) as oldest_wait_seconds,
  max(oldest_queued_seconds) as oldest_queued_seconds,
  avg(lag_ms) as lag_ms
from dispatch_policy_samples
group by policy_name, date_trunc('minute', at);
comment on view dispatch_policy_history is 'Per policy and minute, the highest of what the sweep saw (metrics_retention): for charts of pending jobs, waits and slots.';
comment on column dispatch_policy_history.policy_name is 'The policy.';
comment on column dispatch_policy_history.minute is 'The minute.';
comment on column dispatch_policy_history.partitions is 'Partitions known.';
comment on column dispatch_policy_history.pending is 'Jobs waiting.';
comment on column dispatch_policy_history.waiting is 'Those of them in partitions of which at least one could go, by its schedule.';
comment on column dispatch_policy_history.in_flight is 'Jobs admitted that had not ended.';
comment on column dispatch_policy_history.due is 'Partitions that a tick would have looked at.';
comment on column dispatch_policy_history.blocked is 'Partitions with waiting jobs that a gate, the budget or a pause held back.';
comment on column dispatch_policy_history.queued is 'Jobs admitted that no worker had taken.';
comment on column dispatch_policy_history.oldest_wait_seconds is 'The longest that a partition had had waiting jobs and none admitted, seconds.';
comment on column dispatch_policy_history.oldest_queued_seconds is 'How long ago the longest queued job had been admitted, seconds.';
comment on column dispatch_policy_history.lag_ms is 'Mean of the adaptive gates'' ewma_lag_ms, milliseconds; null without.';
