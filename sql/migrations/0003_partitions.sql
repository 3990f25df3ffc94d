-- What only the tick and the sweep change, each holding the partition's row lock until it commits.

create table dispatch_partitions (
  id uuid not null,
  due_at timestamptz,
  blocked_until timestamptz,
  blocked_after_finish timestamptz,
  first_seen_at timestamptz not null,
  last_checked_at timestamptz,
  last_admitted_at timestamptz,
  decayed_at timestamptz,
  pending_count bigint not null default 0,
  total_admitted bigint not null default 0,
  newest_id bigint not null default 0,
  decayed_admits double precision not null default 0,
  in_flight_count integer not null default 0,
  policy_name text not null,
  partition_key text not null,
  shard text not null default 'default',
  blocked_reason text,
  context jsonb not null default '{}',
  gate_state jsonb not null default '{}',
  constraint dispatch_partitions_pkey primary key (id)
)
with (fillfactor = 80);
-- The claim: the longest due first, and what is in backoff costs nothing.
create index dispatch_partitions_due_idx on dispatch_partitions (policy_name, due_at) where due_at is not null;
create index dispatch_partitions_shard_due_idx on dispatch_partitions (policy_name, shard, due_at) where due_at is not null and shard <> 'default';
comment on table dispatch_partitions is 'One row a partition that was ever seen: its counters, its gates'' state, and when it is next worth looking at.';
comment on column dispatch_partitions.id is 'dispatch_partition_id(policy_name, partition_key): a hash, so that an enqueuer knows it without a look and a key may have any length.';
comment on column dispatch_partitions.due_at is 'When the partition is next worth looking at; null when nothing waits, infinity while it is paused.';
comment on column dispatch_partitions.blocked_until is 'The gates let nothing pass before, unless a job finishes; null when they are open.';
comment on column dispatch_partitions.blocked_after_finish is 'What blocked_until becomes when a job finishes: the gates that do not count running jobs.';
comment on column dispatch_partitions.first_seen_at is 'When its first job was folded in.';
comment on column dispatch_partitions.last_checked_at is 'When a tick last asked its gates.';
comment on column dispatch_partitions.last_admitted_at is 'When a job was last admitted.';
comment on column dispatch_partitions.decayed_at is 'The moment that decayed_admits stands for.';
comment on column dispatch_partitions.pending_count is 'Jobs waiting, as of the notes folded so far. A sum of notes and takes, which come in any order, so it may be below zero for a moment.';
comment on column dispatch_partitions.total_admitted is 'Jobs ever admitted.';
comment on column dispatch_partitions.newest_id is 'Id of the staged job whose context counts.';
comment on column dispatch_partitions.decayed_admits is 'Admissions, each halved every half_life: how much the partition was served lately.';
comment on column dispatch_partitions.in_flight_count is 'Slots taken: rows in dispatch_inflight_jobs and finishes not yet folded. Never below the number of rows.';
comment on column dispatch_partitions.policy_name is 'The policy.';
comment on column dispatch_partitions.partition_key is 'The key: any text.';
comment on column dispatch_partitions.shard is 'The shard, pinned when the partition is first seen.';
comment on column dispatch_partitions.blocked_reason is 'What keeps the partition from admitting more, as the last tick saw it; null when its gates are open.';
comment on column dispatch_partitions.context is 'The newest staged context; it counts for all waiting jobs.';
comment on column dispatch_partitions.gate_state is 'State of each gate, keyed by the gate''s name; a throttle''s is {tokens, at: seconds since 1970}.';

create table dispatch_inflight_jobs (
  job_id bigint not null,
  staged_id bigint not null,
  partition_id uuid not null,
  admitted_at timestamptz not null,
  orphaned_at timestamptz,
  policy_name text not null,
  partition_key text not null,
  constraint dispatch_inflight_jobs_pkey primary key (job_id)
);
create index dispatch_inflight_jobs_partition_idx on dispatch_inflight_jobs (partition_id);
comment on table dispatch_inflight_jobs is 'The slots: one row a job that was admitted and has not ended. Deleting a row frees its slot; doing so twice does nothing.';
comment on column dispatch_inflight_jobs.job_id is 'procrastinate''s job id.';
comment on column dispatch_inflight_jobs.staged_id is 'The id that defer returned.';
comment on column dispatch_inflight_jobs.partition_id is 'The partition whose slot it holds.';
comment on column dispatch_inflight_jobs.admitted_at is 'When it was admitted.';
comment on column dispatch_inflight_jobs.orphaned_at is 'When a sweep first saw the job running with its worker forgotten by procrastinate.';
comment on column dispatch_inflight_jobs.policy_name is 'The policy.';
comment on column dispatch_inflight_jobs.partition_key is 'The partition''s key.';

create table dispatch_admissions (
  staged_id bigint not null,
  job_id bigint,
  partition_id uuid not null,
  staged_at timestamptz not null,
  admitted_at timestamptz not null,
  policy_name text not null,
  partition_key text not null,
  context jsonb not null,
  constraint dispatch_admissions_pkey primary key (staged_id)
);
create index dispatch_admissions_job_idx on dispatch_admissions (job_id);
create index dispatch_admissions_admitted_idx on dispatch_admissions using brin (admitted_at);
comment on table dispatch_admissions is 'Which staged job became which procrastinate job, or was cancelled. Kept for admission_retention after the job is gone, so that the id that defer returned goes on working.';
comment on column dispatch_admissions.staged_id is 'The id that defer returned.';
comment on column dispatch_admissions.job_id is 'procrastinate''s job id; null when the job was cancelled before it was admitted.';
comment on column dispatch_admissions.partition_id is 'The partition.';
comment on column dispatch_admissions.staged_at is 'When it was staged.';
comment on column dispatch_admissions.admitted_at is 'When it was last admitted, or cancelled.';
comment on column dispatch_admissions.policy_name is 'The policy.';
comment on column dispatch_admissions.partition_key is 'The partition''s key.';
comment on column dispatch_admissions.context is 'The context that it was staged with.';

create table dispatch_adaptive_stats (
  partition_id uuid not null,
  gate_name text not null,
  current_max integer not null,
  ewma_lag_ms double precision not null default 0,
  sample_count bigint not null default 0,
  updated_at timestamptz not null,
  constraint dispatch_adaptive_stats_pkey primary key (partition_id, gate_name),
  constraint dispatch_adaptive_stats_partition_fkey foreign key (partition_id) references dispatch_partitions on delete cascade,
  constraint dispatch_adaptive_stats_current_max_check check (current_max >= 1),
  constraint dispatch_adaptive_stats_lag_check check (ewma_lag_ms >= 0)
);
comment on table dispatch_adaptive_stats is 'What each adaptive_concurrency gate has learned of a partition. No row yet means initial_max.';
comment on column dispatch_adaptive_stats.partition_id is 'The partition.';
comment on column dispatch_adaptive_stats.gate_name is 'The gate''s name in the policy.';
comment on column dispatch_adaptive_stats.current_max is 'The cap it has come to.';
comment on column dispatch_adaptive_stats.ewma_lag_ms is 'Moving average of the time from admission to start, milliseconds.';
comment on column dispatch_adaptive_stats.sample_count is 'Observations so far.';
comment on column dispatch_adaptive_stats.updated_at is 'When the last observation was folded in.';

create table dispatch_tick_samples (
  id bigint generated always as identity,
  at timestamptz not null,
  policy_name text not null,
  shard text,
  partitions_seen integer not null,
  partitions_admitted integer not null,
  partitions_denied integer not null,
  jobs_admitted integer not null,
  handoff_failures integer not null,
  denied_reasons jsonb not null,
  duration_ms double precision not null,
  constraint dispatch_tick_samples_pkey primary key (id)
);
create index dispatch_tick_samples_policy_idx on dispatch_tick_samples (policy_name, at);
create index dispatch_tick_samples_at_idx on dispatch_tick_samples using brin (at);
comment on table dispatch_tick_samples is 'One row for each tick of a policy that looked at a partition. Kept for metrics_retention.';
comment on column dispatch_tick_samples.id is 'Surrogate key.';
comment on column dispatch_tick_samples.at is 'When the tick decided.';
comment on column dispatch_tick_samples.policy_name is 'The policy.';
comment on column dispatch_tick_samples.shard is 'The shard that the tick was limited to; null for all.';
comment on column dispatch_tick_samples.partitions_seen is 'Partitions claimed.';
comment on column dispatch_tick_samples.partitions_admitted is 'Partitions that were admitted at least one job.';
comment on column dispatch_tick_samples.partitions_denied is 'Partitions that a gate, the budget or a pause denied.';
comment on column dispatch_tick_samples.jobs_admitted is 'Jobs handed off.';
comment on column dispatch_tick_samples.handoff_failures is 'Jobs set aside as dead.';
comment on column dispatch_tick_samples.denied_reasons is 'Denied partitions by reason.';
comment on column dispatch_tick_samples.duration_ms is 'How long the tick took for this policy, milliseconds.';

create table dispatch_sweep_positions (
  walk text not null,
  position uuid,
  constraint dispatch_sweep_positions_pkey primary key (walk)
);
comment on table dispatch_sweep_positions is 'How far the sweep''s walks have come.';
comment on column dispatch_sweep_positions.walk is 'What is walked over.';
comment on column dispatch_sweep_positions.position is 'The last id of the last page; null to begin anew.';

-- The working set of a tick. A gate is given claims and gives the same claims back with a smaller
-- `allowed`; none of it is spent before the hand-off is known.
create type dispatch_claim as (
  ordinal integer,
  partition_id uuid,
  partition_key text,
  context jsonb,
  params jsonb,
  gate_state jsonb,
  in_flight integer,
  allowed integer,
  retry_at timestamptz,
  retry_after_finish timestamptz,
  reason text
);
comment on type dispatch_claim is 'A claimed partition on its way through the gates: ordinal = place in fairness order, params = resolved gate parameters, allowed = jobs that all gates so far let pass, retry_at = when to look again (retry_after_finish: if a job finishes before), reason = the first gate that let none pass.';

create type dispatch_observation as (
  partition_id uuid,
  succeeded boolean,
  lag_ms double precision
);
comment on type dispatch_observation is 'What one finished job told: did it succeed, and how many milliseconds it had waited from admission to start.';

create type dispatch_tick_result as (
  policy_name text,
  partitions_seen integer,
  partitions_admitted integer,
  partitions_denied integer,
  jobs_admitted integer,
  handoff_failures integer,
  denied_reasons jsonb,
  duration_ms double precision
);
comment on type dispatch_tick_result is 'What one tick did for one policy.';

create type dispatch_outcome as (
  id bigint,
  job_id bigint,
  error text
);
comment on type dispatch_outcome is 'What became of an admitted job: its procrastinate job id, or the error that sets it aside, or neither when its queueing lock is held.';

create type dispatch_payload as (
  handoff_id bigint,
  id bigint,
  policy_name text,
  partition_key text,
  task_name text,
  queue_name text,
  priority integer,
  lock text,
  queueing_lock text,
  scheduled_at timestamptz,
  args jsonb,
  attempts integer,
  tick dispatch_tick_result
);
comment on type dispatch_payload is 'An admitted job on its way to procrastinate, as a driver gets it from dispatch_admit(); or, with all else null, the result of a tick that has nothing to hand off.';

create type dispatch_job_state as (
  id bigint,
  state text,
  policy_name text,
  partition_key text,
  job_id bigint,
  task_name text,
  queue_name text,
  attempts integer,
  staged_at timestamptz,
  admitted_at timestamptz,
  finished_at timestamptz
);
comment on type dispatch_job_state is 'Where a job is: staged, queued, running, finished, dead or cancelled.';

create type dispatch_drain_result as (
  admitted integer,
  ready bigint,
  later bigint,
  next_at timestamptz,
  why text
);
comment on type dispatch_drain_result is 'What dispatch_drain() did: jobs admitted; jobs left that are due (ready) and that wait for their time (later), the first of them at next_at; why they are left.';

-- A tick whose hand-off is in somebody else's hands (a driver's). The row lives only inside that
-- driver's transaction: dispatch_settle() removes it, and a commit without it is refused.
create table dispatch_handoffs (
  id bigint generated always as identity,
  policy_name text not null,
  shard text,
  decided_at timestamptz not null,
  started_at timestamptz not null,
  claims dispatch_claim[] not null,
  staged_ids bigint[] not null,
  ordinals integer[] not null,
  parked_ids bigint[] not null,
  constraint dispatch_handoffs_pkey primary key (id)
);
comment on table dispatch_handoffs is 'The tick that a driver is handing off, between dispatch_admit() and dispatch_settle(); no other transaction ever sees a row.';
comment on column dispatch_handoffs.id is 'What dispatch_admit() returns as handoff_id.';
comment on column dispatch_handoffs.policy_name is 'The policy.';
comment on column dispatch_handoffs.shard is 'The shard that the tick was limited to; null for all.';
comment on column dispatch_handoffs.decided_at is 'The tick''s clock.';
comment on column dispatch_handoffs.started_at is 'When the tick began, by the wall clock.';
comment on column dispatch_handoffs.claims is 'The claims after the gates.';
comment on column dispatch_handoffs.staged_ids is 'The admitted jobs in hand-off order.';
comment on column dispatch_handoffs.ordinals is 'Beside each admitted job, the ordinal of its claim.';
comment on column dispatch_handoffs.parked_ids is 'The admitted jobs that are retries and so have a row in procrastinate already.';
