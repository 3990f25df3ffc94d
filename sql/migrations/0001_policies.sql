-- What people declare: settings, policies, the tasks that follow them, pauses.
-- These tables are small and change rarely. Nothing on a hot path locks their rows.

create table dispatch_settings (
  name text not null,
  value text not null,
  constraint dispatch_settings_pkey primary key (name)
);
comment on table dispatch_settings is 'Settings that differ from their defaults; dispatch_setting_spec() lists all of them with units and ranges. Write with dispatch_set().';
comment on column dispatch_settings.name is 'Name of the setting.';
comment on column dispatch_settings.value is 'Its value as text, in the unit that dispatch_setting_spec() names.';

create table dispatch_policies (
  policy_name text not null,
  definition jsonb not null,
  partition_by text[] not null,
  shard_by text[] not null,
  queue_name text not null,
  gates jsonb not null,
  literals jsonb not null,
  lookups jsonb not null,
  context_paths text[] not null,
  half_life double precision,
  partition_batch_size integer not null,
  admission_batch_size integer not null,
  tick_admission_budget integer,
  max_pending bigint,
  retry_strategy text not null,
  stalled text not null,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  constraint dispatch_policies_pkey primary key (policy_name),
  constraint dispatch_policies_name_check check (policy_name ~ '^[^[:cntrl:]]{1,128}$'),
  constraint dispatch_policies_queue_check check (length(queue_name) between 1 and 128),
  constraint dispatch_policies_gates_check check (jsonb_typeof(gates) = 'array'),
  constraint dispatch_policies_half_life_check check (half_life > 0),
  constraint dispatch_policies_partition_batch_check check (partition_batch_size between 1 and 10000),
  constraint dispatch_policies_admission_batch_check check (admission_batch_size between 1 and 10000),
  constraint dispatch_policies_budget_check check (tick_admission_budget between 1 and 1000000),
  constraint dispatch_policies_max_pending_check check (max_pending > 0),
  constraint dispatch_policies_retry_strategy_check check (retry_strategy in ('restage', 'bypass')),
  constraint dispatch_policies_stalled_check check (stalled in ('leave', 'retry'))
);
comment on table dispatch_policies is 'One row a policy. Written by dispatch_define_policy() alone, which derives every other column from the definition.';
comment on column dispatch_policies.policy_name is 'Name of the policy: 1 to 128 characters, no control characters.';
comment on column dispatch_policies.definition is 'The definition as it was declared.';
comment on column dispatch_policies.partition_by is 'Dotted paths in a job''s context whose values make its partition key.';
comment on column dispatch_policies.shard_by is 'Dotted paths in a job''s context whose values make its shard; empty for the shard ''default''.';
comment on column dispatch_policies.queue_name is 'procrastinate queue for jobs staged without one.';
comment on column dispatch_policies.gates is 'The gates in order, every key present: defaults filled in.';
comment on column dispatch_policies.literals is 'The gate parameters that are plain numbers, keyed gate.parameter.';
comment on column dispatch_policies.lookups is 'The gate parameters that are asked at tick time: array of {name, ctx | sql, default}, name as in literals.';
comment on column dispatch_policies.context_paths is 'Dotted paths kept of a job''s args when the caller stages no context.';
comment on column dispatch_policies.half_life is 'Seconds in which a partition''s decayed_admits halves; null keeps due order.';
comment on column dispatch_policies.partition_batch_size is 'Most partitions one tick claims.';
comment on column dispatch_policies.admission_batch_size is 'Most jobs one partition is admitted in one tick.';
comment on column dispatch_policies.tick_admission_budget is 'Most jobs one tick admits; null for no limit.';
comment on column dispatch_policies.max_pending is 'Most jobs that may wait in one partition, as counted at the last tick; null for no limit.';
comment on column dispatch_policies.retry_strategy is 'What a retried job does: restage (waits in the policy again) or bypass (procrastinate runs it as scheduled).';
comment on column dispatch_policies.stalled is 'What the sweep does with a job whose worker is gone: leave or retry.';
comment on column dispatch_policies.created_at is 'When the policy was first defined.';
comment on column dispatch_policies.updated_at is 'When the definition last changed.';

create table dispatch_tasks (
  task_name text not null,
  policy_name text not null,
  constraint dispatch_tasks_pkey primary key (task_name),
  constraint dispatch_tasks_policy_fkey foreign key (policy_name) references dispatch_policies on delete cascade,
  constraint dispatch_tasks_name_check check (length(task_name) between 1 and 128)
);
create index dispatch_tasks_policy_idx on dispatch_tasks (policy_name);
comment on table dispatch_tasks is 'Which policy a task follows. Written by dispatch_map_task(); a driver reads it to leave policies alone whose tasks its application does not have.';
comment on column dispatch_tasks.task_name is 'procrastinate''s task name.';
comment on column dispatch_tasks.policy_name is 'The policy its jobs follow.';

create table dispatch_pauses (
  id uuid not null,
  policy_name text not null,
  partition_key text,
  paused_at timestamptz not null,
  constraint dispatch_pauses_pkey primary key (id)
);
comment on table dispatch_pauses is 'What is paused: a whole policy or one partition, also one that does not exist yet. Written by dispatch_pause() and dispatch_resume().';
comment on column dispatch_pauses.id is 'dispatch_partition_id(policy_name, partition_key).';
comment on column dispatch_pauses.policy_name is 'The paused policy, or the policy of the paused partition.';
comment on column dispatch_pauses.partition_key is 'The paused partition; null pauses the whole policy.';
comment on column dispatch_pauses.paused_at is 'Since when.';
