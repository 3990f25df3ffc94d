-- What is shown of partitions, of waiting jobs, and of why a job waits.

create type dispatch_partition_page as (
  policy_name text,
  partition_key text,
  shard text,
  pending_count bigint,
  in_flight_count integer,
  total_admitted bigint,
  decayed_admits double precision,
  due_at timestamptz,
  blocked_until timestamptz,
  blocked_reason text,
  paused boolean,
  waiting_since timestamptz,
  last_checked_at timestamptz,
  last_admitted_at timestamptz,
  first_seen_at timestamptz,
  context jsonb,
  gate_state jsonb,
  id uuid,
  cursor text
);
comment on type dispatch_partition_page is 'A row of dispatch_partitions_page(): the columns of dispatch_partition_status, and the cursor with which the next page begins after this row.';

create type dispatch_waiting_job as (
  id bigint,
  task_name text,
  queue_name text,
  priority integer,
  scheduled_at timestamptz,
  eligible_at timestamptz,
  attempts integer,
  staged_at timestamptz,
  lock text,
  queueing_lock text,
  place bigint,
  cursor text
);
comment on type dispatch_waiting_job is 'A row of dispatch_waiting_page(): a job without its args, eligible_at = not admitted before (null: at once), place = how many go before it and one, cursor = with which the next page begins after it.';

create type dispatch_explanation as (
  item text,
  gate_name text,
  gate_type text,
  blocks boolean,
  reason text,
  numbers jsonb,
  since timestamptz,
  estimated_at timestamptz,
  message text
);
comment on type dispatch_explanation is 'A row of dispatch_explain(). item: job (the whole, always first), pause, schedule, queueing_lock, lock, gate or budget; blocks = for the job, will the next tick leave it; for the others, do they hold it now; reason = a stable code; numbers = what the item counts with; since when; estimated_at = when it may be over (null: not known); message = the same in words.';
