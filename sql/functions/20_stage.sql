-- Staging: enqueuers append a row a job and a note a partition, and nothing else.
-- Invariant: no enqueuer takes a lock that a tick, the sweep or another enqueuer holds until it commits
-- (but for two jobs with one queueing lock: uniqueness has to wait).

create or replace function dispatch_has_plain_year(p_time timestamptz)
returns boolean
language sql
immutable
parallel safe
return p_time >= '0001-01-01 00:00:00+00' and p_time < '10000-01-01 00:00:00+00';
comment on function dispatch_has_plain_year(timestamptz) is 'Is a time of the years 1 to 9999, UTC, as every client can read it? Workers, drivers and dashboards would stumble over others.';

create or replace function dispatch_parse_time(p_text text)
returns timestamptz
language plpgsql
stable
strict
as $$
declare
  v_time timestamptz;
begin
  if p_text !~* '^[0-9]{4,}-[0-9]{2}-[0-9]{2}[t ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)? *(z|[+-][0-9]{2}(:?[0-9]{2})?)$' then
    return null;
  end if;
  v_time := p_text;
  return case when dispatch_has_plain_year(v_time) then v_time end;
exception
  when data_exception then
    return null;
end;
$$;
comment on function dispatch_parse_time(text) is 'An ISO 8601 time with its offset from UTC, of the years 1 to 9999; null when the text is anything else.';

create or replace function dispatch_job_problem(p_job jsonb)
returns text
language plpgsql
stable
as $$
declare
  v_known constant text[] := array['task_name', 'args', 'context', 'queue_name', 'priority', 'lock', 'queueing_lock', 'scheduled_at'];
begin
  if jsonb_typeof(p_job) <> 'object' then
    return 'it must be an object';
  end if;

  if p_job - v_known <> '{}' then
    return format('%s is not known; known are %s',
      (select string_agg(key, ', ' order by key) from jsonb_object_keys(p_job - v_known) as key), array_to_string(v_known, ', '));
  end if;

  return case
    when coalesce(jsonb_typeof(p_job -> 'task_name'), 'null') <> 'string' or length(p_job ->> 'task_name') not between 1 and 128
      then 'task_name must be a string of 1 to 128 characters'
    when jsonb_typeof(p_job -> 'args') not in ('object', 'null')
      then 'args must be an object'
    when jsonb_typeof(p_job -> 'context') not in ('object', 'null')
      then 'context must be an object'
    when jsonb_typeof(p_job -> 'queue_name') not in ('string', 'null') or octet_length(p_job ->> 'queue_name') not between 1 and 40
      then 'queue_name must be a string of 1 to 40 bytes'
    when jsonb_typeof(p_job -> 'lock') not in ('string', 'null')
      then 'lock must be a string'
    -- Our index takes no more, whatever the text is. What procrastinate's do not take is set aside in the hand-off.
    when jsonb_typeof(p_job -> 'queueing_lock') not in ('string', 'null') or octet_length(p_job ->> 'queueing_lock') > 2600
      then 'queueing_lock must be a string of at most 2600 bytes'
    when jsonb_typeof(p_job -> 'priority') not in ('number', 'null')
      or (p_job ->> 'priority')::numeric not between -2147483647 and 2147483647
      or (p_job ->> 'priority')::numeric <> trunc((p_job ->> 'priority')::numeric)
      then 'priority must be a whole number between -2147483647 and 2147483647'
    when jsonb_typeof(p_job -> 'scheduled_at') not in ('string', 'null')
      or (p_job ->> 'scheduled_at' is not null and dispatch_parse_time(p_job ->> 'scheduled_at') is null)
      then 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"'
  end;
end;
$$;
comment on function dispatch_job_problem(jsonb) is 'What is wrong with a job that is to be staged; null when nothing is.';

create or replace function dispatch_refuse_jobs(p_jobs jsonb)
returns void
language plpgsql
as $$
declare
  v_bad record;
begin
  if jsonb_typeof(p_jobs) is distinct from 'array' then
    perform dispatch_raise('PD003', 'invalid jobs: an array of objects is needed', format('Given was %s.', coalesce(jsonb_typeof(p_jobs), 'null')),
      'Nothing was staged. Pass an array, like [{"task_name": "send", "args": {"to": 7}}].');
  end if;
  select position - 1 as position, dispatch_job_problem(job) as problem, job
  into v_bad
  from jsonb_array_elements(p_jobs) with ordinality as jobs (job, position)
  where dispatch_job_problem(job) is not null
  limit 1;
  if found then
    perform dispatch_raise('PD003', format('invalid job at position %s: %s', v_bad.position, v_bad.problem),
      format('The job is %s.', left(v_bad.job::text, 500)), 'Nothing was staged. Positions count from 0.');
  end if;
end;
$$;
comment on function dispatch_refuse_jobs(jsonb) is 'Raises PD003 for the first invalid job, naming its position.';

create or replace function dispatch_shard_name(p_shard text)
returns text
language sql
immutable
parallel safe
return case
  when octet_length(p_shard) <= 200 then p_shard
  else left(p_shard, 30) || ' ' || encode(sha256(convert_to(p_shard, 'UTF8')), 'hex')
end;
comment on function dispatch_shard_name(text) is 'A shard as it is kept, which an index has to take: of more than 200 bytes the first 30 characters, and a hash of all.';

create or replace function dispatch_shard(p_paths text[], p_context jsonb)
returns text
language plpgsql
immutable
parallel safe
as $$
begin
  -- On its own, so that the usual case is one look at an array.
  if p_paths = '{}' then
    return 'default';
  end if;
  if not exists (select from unnest(p_paths) as path where p_context #>> string_to_array(path, '.') <> '') then
    return 'default';
  end if;
  return dispatch_shard_name(dispatch_partition_key(p_paths, p_context));
end;
$$;
comment on function dispatch_shard(text[], jsonb) is 'The shard of a context: made like a partition key; ''default'' when all its values are missing or empty.';

create or replace function dispatch_put(p_object jsonb, p_path text[], p_value jsonb)
returns jsonb
language plpgsql
immutable
parallel safe
as $$
begin
  if cardinality(p_path) > 1 then
    p_value := dispatch_put(case jsonb_typeof(p_object -> p_path[1]) when 'object' then p_object -> p_path[1] else '{}' end,
      p_path[2:], p_value);
  end if;
  return p_object || jsonb_build_object(p_path[1], p_value);
end;
$$;
comment on function dispatch_put(jsonb, text[], jsonb) is 'An object with a value put at a path, and objects made on the way there.';

create or replace function dispatch_named_part(p_args jsonb, p_paths text[])
returns jsonb
language plpgsql
immutable
parallel safe
as $$
declare
  v_part jsonb := '{}';
  v_dotted text;
  v_path text[];
  v_value jsonb;
begin
  foreach v_dotted in array p_paths loop
    v_path := string_to_array(v_dotted, '.');
    v_value := p_args #> v_path;
    if v_value is not null and cardinality(v_path) = 1 then
      v_part := v_part || jsonb_build_object(v_dotted, v_value);
    -- Part of what another path kept already: an array stays one.
    elsif v_value is not null and v_part #> v_path is distinct from v_value then
      v_part := dispatch_put(v_part, v_path, v_value);
    end if;
  end loop;
  return v_part;
end;
$$;
comment on function dispatch_named_part(jsonb, text[]) is 'Of an object, the values at some dotted paths: the context of a job that was staged without one.';

create or replace function dispatch_stage_many(p_policy text, p_jobs jsonb)
returns setof bigint
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
declare
  v_now constant timestamptz := dispatch_now();
  v_policy constant dispatch_policies := dispatch_policy(p_policy);
  v_new_ids bigint[];
  v_ids bigint[];
  v_staged bigint;
  v_held record;
  v_full record;
begin
  perform dispatch_refuse_jobs(p_jobs);
  -- Before the tables are touched, as whoever truncates procrastinate's does: sequence, then tables.
  v_new_ids := array(select dispatch_next_job_id() from jsonb_array_elements(p_jobs));

  -- Materialized, each step, so that what a step makes is made once and not wherever a later step names it.
  with given as materialized (
    select
      v_new_ids[position] as id,
      position,
      job,
      coalesce(nullif(job -> 'args', 'null'), '{}') as args,
      nullif(job -> 'context', 'null') as context,
      dispatch_parse_time(job ->> 'scheduled_at') as scheduled_at
    from jsonb_array_elements(p_jobs) with ordinality as given (job, position)
  ), contexts as materialized (
    select *, coalesce(context, dispatch_named_part(args, v_policy.context_paths)) as kept
    from given
  ), keyed as materialized (
    select *, dispatch_partition_key(v_policy.partition_by, kept) as partition_key
    from contexts
  ), jobs as materialized (
    select *, dispatch_partition_id(p_policy, partition_key) as partition_id
    from keyed
  ), staged as (
    insert into dispatch_staged_jobs (id, partition_id, eligible_at, staged_at, scheduled_at, priority, policy_name, partition_key,
      task_name, queue_name, lock, queueing_lock, args, context)
    select
      id, partition_id, coalesce(scheduled_at, '-infinity'), v_now, scheduled_at,
      coalesce((job ->> 'priority')::numeric::integer, 0), p_policy, partition_key,
      job ->> 'task_name', coalesce(job ->> 'queue_name', v_policy.queue_name),
      job ->> 'lock', job ->> 'queueing_lock', args, kept
    from jobs
    on conflict (queueing_lock) where queueing_lock is not null and not parked do nothing
    returning id
  ), partitions as (
    select partition_id, count(*) as jobs, greatest(min(coalesce(scheduled_at, v_now)), v_now) as due_at, max(id) as newest_id
    from jobs
    group by partition_id
  ), notes as (
    insert into dispatch_inbox (policy_name, partition_id, kind, jobs, due_at, newest_id, partition_key, shard, context)
    select
      p_policy, partitions.partition_id, 'staged', partitions.jobs, partitions.due_at, newest.id, newest.partition_key,
      dispatch_shard(v_policy.shard_by, newest.kept),
      newest.kept
    from partitions
    join jobs as newest on newest.id = partitions.newest_id
  )
  select coalesce(array_agg(id order by position), '{}'), (select count(*) from staged)
  into v_ids, v_staged
  from jobs;

  -- A queueing lock is held by a job that waits here (no row was written) or that procrastinate has queued.
  if v_staged < cardinality(v_ids) or p_jobs @? '$[*].queueing_lock ? (@ != null)' then
    select position - 1 as position, job ->> 'queueing_lock' as queueing_lock
    into v_held
    from jsonb_array_elements(p_jobs) with ordinality as given (job, position)
    where job ->> 'queueing_lock' is not null
      and (
        (select s.id from dispatch_staged_jobs as s where s.id = v_ids[position]) is null
        or dispatch_queueing_lock_queued(job ->> 'queueing_lock')
      )
    order by position
    limit 1;
    if found then
      perform dispatch_raise('PD004', format('already enqueued: a job with the queueing lock %L waits', left(v_held.queueing_lock, 200)),
        format('It is held against the job at position %s.', v_held.position), 'Nothing was staged. The lock is free again once the waiting job starts.');
    end if;
  end if;

  if v_policy.max_pending is not null then
    select added.partition_key, coalesce(p.pending_count, 0) as pending_count
    into v_full
    from (
      select s.partition_id, s.partition_key, count(*) as jobs
      from dispatch_staged_jobs as s
      where s.id = any (v_ids)
      group by s.partition_id, s.partition_key
    ) as added
    left join lateral (
      select pending_count from dispatch_partitions where id = added.partition_id limit 1
    ) as p on true
    where coalesce(p.pending_count, 0) + added.jobs > v_policy.max_pending
    order by added.partition_key
    limit 1;
    if found then
      perform dispatch_raise('PD007', format('backlog of partition %L is full', left(v_full.partition_key, 200)),
        format('%s jobs wait; policy %L allows %s.', v_full.pending_count, p_policy, v_policy.max_pending), 'Nothing was staged. Try again when jobs were admitted.');
    end if;
  end if;

  if v_ids <> '{}' then
    perform dispatch_wake(p_policy);
  end if;
  return query select unnest(v_ids);
end;
$$;
comment on function dispatch_stage_many(text, jsonb) is 'Stages an array of jobs, all or nothing, and returns their ids in the order of the array. A job is an object with task_name and, if wanted, args, context, queue_name, priority, lock, queueing_lock, scheduled_at (ISO 8601 with offset). Raises PD001 (unknown policy), PD003 (invalid job, with its position), PD004 (queueing lock held), PD007 (backlog full).';

create or replace function dispatch_stage(
  p_policy text,
  p_task_name text,
  p_args jsonb default '{}',
  p_context jsonb default null,
  p_queue_name text default null,
  p_priority integer default 0,
  p_lock text default null,
  p_queueing_lock text default null,
  p_scheduled_at timestamptz default null
)
returns bigint
language plpgsql
set search_path from current
as $$
declare
  v_now constant timestamptz := dispatch_now();
  v_id bigint;
  v_policy record;
  v_context jsonb := p_context;
  v_partition_key text;
  v_partition_id uuid;
begin
  select queue_name, partition_by, shard_by, context_paths
  into v_policy
  from dispatch_policies
  where policy_name = p_policy
    and max_pending is null;

  -- The short way, for what is plainly right; all else, and every error, is dispatch_stage_many()'s.
  if not found
    or p_queueing_lock is not null
    or not (
      length(p_task_name) between 1 and 128
      and jsonb_typeof(p_args) = 'object'
      and coalesce(jsonb_typeof(p_context), 'object') = 'object'
      and coalesce(octet_length(p_queue_name), 1) between 1 and 40
      and p_priority > -2147483648
      and coalesce(dispatch_has_plain_year(p_scheduled_at), true)
    ) is true
  then
    return (
      select id
      from dispatch_stage_many(p_policy, jsonb_build_array(jsonb_build_object(
        'task_name', p_task_name, 'args', p_args, 'context', p_context, 'queue_name', p_queue_name, 'priority', p_priority,
        'lock', p_lock, 'queueing_lock', p_queueing_lock, 'scheduled_at', to_jsonb(p_scheduled_at at time zone 'UTC') #>> '{}' || '+00'
      ))) as id
    );
  end if;

  if v_context is null then
    v_context := dispatch_named_part(p_args, v_policy.context_paths);
  end if;
  v_partition_key := dispatch_partition_key(v_policy.partition_by, v_context);
  v_partition_id := dispatch_partition_id(p_policy, v_partition_key);

  v_id := dispatch_next_job_id();
  insert into dispatch_staged_jobs (id, partition_id, eligible_at, staged_at, scheduled_at, priority, policy_name, partition_key,
    task_name, queue_name, lock, args, context)
  values (v_id, v_partition_id, coalesce(p_scheduled_at, '-infinity'), v_now, p_scheduled_at, p_priority, p_policy,
    v_partition_key, p_task_name, coalesce(p_queue_name, v_policy.queue_name), p_lock, p_args, v_context)
  returning id into v_id;
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs, due_at, newest_id, partition_key, shard, context)
  values (p_policy, v_partition_id, 'staged', 1, greatest(p_scheduled_at, v_now), v_id, v_partition_key,
    dispatch_shard(v_policy.shard_by, v_context), v_context);
  perform dispatch_wake(p_policy);
  return v_id;
end;
$$;
comment on function dispatch_stage(text, text, jsonb, jsonb, text, integer, text, text, timestamptz) is 'Stages one job in a policy and returns its id; commits and rolls back with the caller''s transaction. The context, from which limits are read, defaults to the named parts of args. Errors as dispatch_stage_many().';
