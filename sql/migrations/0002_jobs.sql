-- What enqueuers and workers append to. They never update a row here, and no foreign key makes them
-- lock a row of another table, so no enqueuer waits for anybody (but for a queueing lock).

create table dispatch_staged_jobs (
  id bigint not null,
  partition_id uuid not null,
  eligible_at timestamptz not null default '-infinity',
  staged_at timestamptz not null,
  scheduled_at timestamptz,
  job_id bigint,
  priority integer not null default 0,
  attempts integer not null default 0,
  policy_name text not null,
  partition_key text not null,
  task_name text not null,
  queue_name text not null,
  lock text,
  queueing_lock text,
  args jsonb not null default '{}',
  context jsonb not null default '{}',
  constraint dispatch_staged_jobs_pkey primary key (id),
  constraint dispatch_staged_jobs_task_check check (length(task_name) between 1 and 128),
  constraint dispatch_staged_jobs_queue_check check (length(queue_name) between 1 and 128),
  constraint dispatch_staged_jobs_args_check check (jsonb_typeof(args) = 'object'),
  constraint dispatch_staged_jobs_context_check check (jsonb_typeof(context) = 'object'),
  constraint dispatch_staged_jobs_attempts_check check (attempts >= 0)
);
-- The order of admission, so that taking n jobs reads n entries however many wait.
create index dispatch_staged_jobs_order_idx on dispatch_staged_jobs (partition_id, priority desc, eligible_at, id);
-- When is a partition's next job eligible, and does it hold any that is not yet?
create index dispatch_staged_jobs_eligible_idx on dispatch_staged_jobs (partition_id, eligible_at);
-- A queueing lock is held by one staged job. A retried job came back without asking, so it does not count.
create unique index dispatch_staged_jobs_queueing_lock_idx on dispatch_staged_jobs (queueing_lock) where queueing_lock is not null and job_id is null;
create unique index dispatch_staged_jobs_job_idx on dispatch_staged_jobs (job_id) where job_id is not null;
comment on table dispatch_staged_jobs is 'Jobs that wait in a policy. A row leaves in the transaction that hands its job to procrastinate, cancels it or sets it aside as dead.';
comment on column dispatch_staged_jobs.id is 'Id of the staged job, from procrastinate''s own sequence of job ids: never another job''s id.';
comment on column dispatch_staged_jobs.partition_id is 'dispatch_partition_id(policy_name, partition_key).';
comment on column dispatch_staged_jobs.eligible_at is 'Not admitted before: the schedule, the retry time, or the next try for a held queueing lock; -infinity for at once.';
comment on column dispatch_staged_jobs.staged_at is 'When the job was staged.';
comment on column dispatch_staged_jobs.scheduled_at is 'The schedule that the job was deferred with.';
comment on column dispatch_staged_jobs.job_id is 'For a retried job: procrastinate''s row, parked until the policy admits it again.';
comment on column dispatch_staged_jobs.priority is 'Higher first.';
comment on column dispatch_staged_jobs.attempts is 'Tries so far, as procrastinate counts them.';
comment on column dispatch_staged_jobs.policy_name is 'The policy it waits in.';
comment on column dispatch_staged_jobs.partition_key is 'The partition it waits in.';
comment on column dispatch_staged_jobs.task_name is 'procrastinate''s task name.';
comment on column dispatch_staged_jobs.queue_name is 'procrastinate''s queue.';
comment on column dispatch_staged_jobs.lock is 'procrastinate''s lock.';
comment on column dispatch_staged_jobs.queueing_lock is 'procrastinate''s queueing lock.';
comment on column dispatch_staged_jobs.args is 'The task''s arguments.';
comment on column dispatch_staged_jobs.context is 'What the policy''s limits are read from.';

create table dispatch_inbox (
  policy_name text not null,
  id bigint generated always as identity,
  partition_id uuid not null,
  kind text not null,
  jobs integer not null default 0,
  due_at timestamptz,
  newest_id bigint,
  partition_key text,
  shard text,
  context jsonb,
  succeeded boolean,
  lag_ms double precision,
  constraint dispatch_inbox_pkey primary key (policy_name, id),
  constraint dispatch_inbox_kind_check check (kind in ('staged', 'removed', 'finished', 'resumed')),
  constraint dispatch_inbox_staged_check check (kind <> 'staged' or (partition_key is not null and shard is not null and due_at is not null))
);
comment on table dispatch_inbox is 'Small notes for the tick, which folds them into dispatch_partitions in the order of their ids: jobs were staged, removed or finished. Enqueuers and workers only append here.';
comment on column dispatch_inbox.policy_name is 'The policy.';
comment on column dispatch_inbox.id is 'Order of the notes.';
comment on column dispatch_inbox.partition_id is 'The partition; it need not exist yet when the note says staged.';
comment on column dispatch_inbox.kind is 'staged: jobs came in; removed: waiting jobs left without being admitted; finished: a slot became free; resumed: a pause was lifted.';
comment on column dispatch_inbox.jobs is 'By how much the number of waiting jobs changes; for finished, the number of slots freed, negative.';
comment on column dispatch_inbox.due_at is 'When the first of the staged jobs becomes eligible.';
comment on column dispatch_inbox.newest_id is 'Id of the newest staged job, whose context this is.';
comment on column dispatch_inbox.partition_key is 'The key, for a partition to be created.';
comment on column dispatch_inbox.shard is 'The shard, for a partition to be created.';
comment on column dispatch_inbox.context is 'The newest context; null leaves the partition''s as it is.';
comment on column dispatch_inbox.succeeded is 'For an observation: did the job succeed? Null for no observation.';
comment on column dispatch_inbox.lag_ms is 'For an observation: milliseconds from admission to start.';

create table dispatch_dead_jobs (
  id bigint not null,
  partition_id uuid not null,
  staged_at timestamptz not null,
  died_at timestamptz not null,
  scheduled_at timestamptz,
  job_id bigint,
  priority integer not null,
  attempts integer not null,
  policy_name text not null,
  partition_key text not null,
  task_name text not null,
  queue_name text not null,
  lock text,
  queueing_lock text,
  args jsonb not null,
  context jsonb not null,
  error text not null,
  constraint dispatch_dead_jobs_pkey primary key (id)
);
create index dispatch_dead_jobs_policy_idx on dispatch_dead_jobs (policy_name, died_at);
create unique index dispatch_dead_jobs_job_idx on dispatch_dead_jobs (job_id) where job_id is not null;
comment on table dispatch_dead_jobs is 'Jobs that could not be handed off, each with its error. They stay until dispatch_requeue_dead() or dispatch_discard_dead().';
comment on column dispatch_dead_jobs.id is 'Id of the staged job.';
comment on column dispatch_dead_jobs.partition_id is 'dispatch_partition_id(policy_name, partition_key).';
comment on column dispatch_dead_jobs.staged_at is 'When the job was staged.';
comment on column dispatch_dead_jobs.died_at is 'When it was set aside.';
comment on column dispatch_dead_jobs.scheduled_at is 'The schedule that the job was deferred with.';
comment on column dispatch_dead_jobs.job_id is 'procrastinate''s parked row, for a retried job.';
comment on column dispatch_dead_jobs.priority is 'Its priority.';
comment on column dispatch_dead_jobs.attempts is 'Tries so far, as procrastinate counts them.';
comment on column dispatch_dead_jobs.policy_name is 'The policy it waited in.';
comment on column dispatch_dead_jobs.partition_key is 'The partition it waited in.';
comment on column dispatch_dead_jobs.task_name is 'procrastinate''s task name.';
comment on column dispatch_dead_jobs.queue_name is 'procrastinate''s queue.';
comment on column dispatch_dead_jobs.lock is 'procrastinate''s lock.';
comment on column dispatch_dead_jobs.queueing_lock is 'procrastinate''s queueing lock.';
comment on column dispatch_dead_jobs.args is 'The task''s arguments.';
comment on column dispatch_dead_jobs.context is 'What the policy''s limits were read from.';
comment on column dispatch_dead_jobs.error is 'Why it could not be handed off.';
