-- procrastinate: the one file that knows its tables. Hand-off, parking of retried jobs, and what its rows say of a job.
-- Invariants: a new job goes through procrastinate's public function; a job that cannot be handed off costs its neighbours
-- nothing; no row of procrastinate is waited for (a held lock counts as "not yet").

create or replace function dispatch_next_job_id()
returns bigint
language sql
volatile
return nextval('procrastinate_jobs_id_seq'::regclass);
comment on function dispatch_next_job_id() is 'An id from procrastinate''s own sequence.';

create or replace function dispatch_queueing_lock_queued(p_queueing_lock text)
returns boolean
language plpgsql
stable
set search_path from current
as $$
begin
  return exists (select from procrastinate_jobs where queueing_lock = p_queueing_lock and status = 'todo');
end;
$$;
comment on function dispatch_queueing_lock_queued(text) is 'Does a job in procrastinate''s queue hold the queueing lock?';

create or replace function dispatch_is_nobodys_fault(p_sqlstate text)
returns boolean
language sql
immutable
parallel safe
return left(p_sqlstate, 2) in ('08', '40', '53', '57', '58', 'F0', 'XX') or p_sqlstate in ('25006', '42501');
comment on function dispatch_is_nobodys_fault(text) is 'Errors that say nothing of a job (connection, serialization, resources, shutdown, system, rights): the tick fails as a whole and is tried again.';

create or replace function dispatch_defer(p_ids bigint[])
returns dispatch_outcome[]
language plpgsql
set search_path from current
set lock_timeout = '100ms'
as $$
declare
  v_job_ids bigint[];
  v_half constant integer := cardinality(p_ids) / 2;
  v_constraint text;
begin
  if p_ids = '{}' then
    return '{}';
  end if;
  begin
    select procrastinate_defer_jobs_v1(array_agg(
      row(s.queue_name, s.task_name, s.priority, s.lock, s.queueing_lock, s.args, s.scheduled_at)::procrastinate_job_to_defer_v1
      order by picked.place))
    into v_job_ids
    from unnest(p_ids) with ordinality as picked (id, place)
    join dispatch_staged_jobs as s on s.id = picked.id;
    return array(
      select row(id, job_id, null)::dispatch_outcome
      from unnest(p_ids, v_job_ids) as handed (id, job_id)
    );
  exception
    when others then
      if dispatch_is_nobodys_fault(sqlstate) then
        raise;
      end if;
      get stacked diagnostics v_constraint = constraint_name;
      if cardinality(p_ids) = 1 then
        return array[row(p_ids[1], null,
          case
            when sqlstate = '23505' and v_constraint = 'procrastinate_jobs_queueing_lock_idx_v1' then null
            when sqlstate = '55P03' then null
            else format('%s (SQLSTATE %s)', sqlerrm, sqlstate)
          end)::dispatch_outcome];
      end if;
  end;
  -- Something in the batch is bad: halve it until the bad ones are alone.
  return dispatch_defer(p_ids[:v_half]) || dispatch_defer(p_ids[v_half + 1:]);
end;
$$;
comment on function dispatch_defer(bigint[]) is 'Defers staged jobs through procrastinate_defer_jobs_v1, in the order given: a job id for each, or the error, or neither when its queueing lock is held.';

create or replace function dispatch_parked_until()
returns timestamptz
language sql
immutable
parallel safe
return '3000-01-01 00:00:00+00'::timestamptz;
comment on function dispatch_parked_until() is 'The schedule of a parked job in procrastinate_jobs: far away, and a time that every client can read.';

create or replace function dispatch_release(p_ids bigint[])
returns dispatch_outcome[]
language plpgsql
set search_path from current
as $$
declare
  v_outcomes dispatch_outcome[] := '{}';
  v_job record;
begin
  for v_job in
    select s.*
    from unnest(p_ids) with ordinality as picked (id, place)
    join dispatch_staged_jobs as s on s.id = picked.id
    where s.job_id is not null
    order by picked.place
  loop
    begin
      perform 1
      from procrastinate_jobs
      where id = v_job.job_id
        and status = 'todo'
        and (v_job.queueing_lock is null or not dispatch_queueing_lock_queued(v_job.queueing_lock))
      for update skip locked;
      if found then
        update procrastinate_jobs
        set (scheduled_at, priority, lock, queueing_lock) = (v_job.scheduled_at, v_job.priority, v_job.lock, v_job.queueing_lock)
        where id = v_job.job_id;
        perform
          pg_notify(channel, json_build_object('type', 'job_inserted', 'job_id', v_job.job_id)::text)
        from unnest(array['procrastinate_queue_v1#' || v_job.queue_name, 'procrastinate_any_queue_v1']) as channel;
        v_outcomes := v_outcomes || row(v_job.id, v_job.job_id, null)::dispatch_outcome;
      else
        v_outcomes := v_outcomes || row(v_job.id, null, null)::dispatch_outcome;
      end if;
    exception
      when unique_violation then
        v_outcomes := v_outcomes || row(v_job.id, null, null)::dispatch_outcome;
    end;
  end loop;
  return v_outcomes;
end;
$$;
comment on function dispatch_release(bigint[]) is 'Brings parked retries among the given staged jobs back into procrastinate''s queue, and wakes its workers. A row that somebody holds, or whose queueing lock is taken, is left for later.';

create or replace function dispatch_hand_off(p_ids bigint[])
returns dispatch_outcome[]
language plpgsql
set search_path from current
as $$
begin
  if p_ids = '{}' then
    return '{}';
  end if;
  -- Whoever alters the table is waited for here, once; below, a lock that is not free soon counts as held.
  lock table procrastinate_jobs in row exclusive mode;
  return dispatch_defer(array(
    select picked.id
    from unnest(p_ids) with ordinality as picked (id, place)
    join dispatch_staged_jobs as s on s.id = picked.id
    where s.job_id is null
    order by picked.place
  )) || dispatch_release(p_ids);
end;
$$;
comment on function dispatch_hand_off(bigint[]) is 'Hands staged jobs over to procrastinate: new ones are deferred, parked ones released.';

create or replace function dispatch_lag_ms(p_job_id bigint, p_admitted_at timestamptz)
returns double precision
language plpgsql
stable
set search_path from current
as $$
begin
  return (
    select extract(epoch from min(at) - p_admitted_at) * 1000
    from procrastinate_events
    where job_id = p_job_id
      and type = 'started'
      and at >= p_admitted_at
  );
end;
$$;
comment on function dispatch_lag_ms(bigint, timestamptz) is 'Milliseconds from a job''s admission to its first start after it; null when it did not start.';

create or replace function dispatch_free_slot(p_job_id bigint, p_succeeded boolean)
returns boolean
language plpgsql
set search_path from current
as $$
declare
  v_slot dispatch_inflight_jobs;
  v_removed dispatch_staged_jobs;
  v_lag_ms double precision;
begin
  delete from dispatch_inflight_jobs where job_id = p_job_id returning * into v_slot;
  if found then
    if p_succeeded is not null and exists (
      select from dispatch_policies
      where policy_name = v_slot.policy_name
        and gates @? '$[*].type ? (@ == "adaptive_concurrency")'
    ) then
      v_lag_ms := dispatch_lag_ms(p_job_id, v_slot.admitted_at);
    end if;
    insert into dispatch_inbox (policy_name, partition_id, kind, jobs, succeeded, lag_ms)
    values (v_slot.policy_name, v_slot.partition_id, 'finished', -1, case when v_lag_ms is not null then p_succeeded end, v_lag_ms);
    perform dispatch_wake(v_slot.policy_name);
    return true;
  end if;

  -- A parked retry that was cancelled or deleted waits no longer.
  delete from dispatch_staged_jobs where job_id = p_job_id returning * into v_removed;
  if found then
    insert into dispatch_inbox (policy_name, partition_id, kind, jobs)
    values (v_removed.policy_name, v_removed.partition_id, 'removed', -1);
  end if;
  return false;
end;
$$;
comment on function dispatch_free_slot(bigint, boolean) is 'Frees the slot of a procrastinate job that ended and notes the observation (null: it is none). Returns whether it had a slot; a second call does nothing.';

create or replace function dispatch_restage(p_job procrastinate_jobs, p_staged_id bigint, p_policy dispatch_policies, p_partition_id uuid)
returns void
language plpgsql
set search_path from current
as $$
declare
  v_now constant timestamptz := dispatch_now();
  v_admission dispatch_admissions;
begin
  select * into strict v_admission from dispatch_admissions where staged_id = p_staged_id;
  insert into dispatch_staged_jobs (id, partition_id, eligible_at, staged_at, scheduled_at, job_id, priority, attempts, policy_name,
    partition_key, task_name, queue_name, lock, queueing_lock, args, context)
  values (p_staged_id, p_partition_id, coalesce(p_job.scheduled_at, '-infinity'), v_admission.staged_at, p_job.scheduled_at, p_job.id,
    p_job.priority, p_job.attempts, p_policy.policy_name, v_admission.partition_key, p_job.task_name, p_job.queue_name, p_job.lock,
    p_job.queueing_lock, p_job.args, v_admission.context);
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs, due_at, newest_id, partition_key, shard, context)
  values (p_policy.policy_name, p_partition_id, 'staged', 1, greatest(p_job.scheduled_at, v_now), 0, v_admission.partition_key,
    dispatch_shard(p_policy, v_admission.context), v_admission.context);
  perform dispatch_wake(p_policy.policy_name);
end;
$$;
comment on function dispatch_restage(procrastinate_jobs, bigint, dispatch_policies, uuid) is 'Puts a retried job back into its policy, as it is and under the id that defer returned; its row in procrastinate_jobs stays, parked.';

create or replace function dispatch_retried()
returns trigger
language plpgsql
security definer
set search_path from current
as $$
declare
  v_admission dispatch_admissions;
  v_policy dispatch_policies;
begin
  select * into v_admission from dispatch_admissions where job_id = new.id order by admitted_at desc limit 1;
  if not found then
    return new;
  end if;
  select * into v_policy from dispatch_policies where policy_name = v_admission.policy_name;
  if not found then
    return new;
  end if;

  if v_policy.retry_strategy = 'restage' then
    perform dispatch_free_slot(new.id, false);
    perform dispatch_restage(new, v_admission.staged_id, v_policy, v_admission.partition_id);
    new.scheduled_at := dispatch_parked_until();
    new.priority := -2147483648;
    new.lock := null;
    new.queueing_lock := null;
  elsif old.status = 'failed' then
    -- procrastinate runs it again by itself: it counts as in flight from here on.
    insert into dispatch_inflight_jobs (job_id, staged_id, partition_id, admitted_at, policy_name, partition_key)
    values (new.id, v_admission.staged_id, v_admission.partition_id, dispatch_now(), v_admission.policy_name, v_admission.partition_key);
    insert into dispatch_inbox (policy_name, partition_id, kind, jobs)
    values (v_admission.policy_name, v_admission.partition_id, 'finished', 1);
  end if;
  return new;
exception
  when others then
    raise warning 'pydispatch: job % is retried by procrastinate alone: % (SQLSTATE %)', new.id, sqlerrm, sqlstate;
    return new;
end;
$$;
comment on function dispatch_retried() is 'Trigger: a job of a policy goes back to todo. With retry_strategy restage the policy holds it, and its row is parked: far schedule and lowest priority (so that a worker''s fetch reads it last), no locks (so that it stands in nobody''s way).';

create or replace function dispatch_ended()
returns trigger
language plpgsql
security definer
set search_path from current
as $$
begin
  if tg_op = 'DELETE' then
    perform dispatch_free_slot(old.id, case when old.status = 'doing' then true end);
    return old;
  end if;
  perform dispatch_free_slot(new.id, case when old.status = 'doing' then case new.status when 'succeeded' then true when 'failed' then false end end);
  return new;
exception
  when others then
    raise warning 'pydispatch: the slot of job % is freed by the next sweep: % (SQLSTATE %)', old.id, sqlerrm, sqlstate;
    return case when tg_op = 'DELETE' then old else new end;
end;
$$;
comment on function dispatch_ended() is 'Trigger: a job ended (succeeded, failed, aborted, cancelled, deleted) and frees its slot. Never fails the statement that ended it.';

create or replace function dispatch_forget_parking()
returns trigger
language plpgsql
security definer
set search_path from current
as $$
begin
  delete from procrastinate_events
  where job_id = new.id
    and type = 'scheduled'
    and at = new.scheduled_at;
  return null;
exception
  when others then
    raise warning 'pydispatch: the parking of job % stays among its events: % (SQLSTATE %)', new.id, sqlerrm, sqlstate;
    return null;
end;
$$;
comment on function dispatch_forget_parking() is 'Trigger: takes the far schedule of a parked job out of procrastinate''s events, which retention by age would stumble over.';

create or replace trigger dispatch_retried
  before update of status on procrastinate_jobs
  for each row
  when (old.status in ('doing', 'failed') and new.status = 'todo')
  execute function dispatch_retried();

create or replace trigger dispatch_ended
  after update of status on procrastinate_jobs
  for each row
  when (old.status in ('todo', 'doing') and new.status in ('succeeded', 'failed', 'aborted', 'cancelled'))
  execute function dispatch_ended();

create or replace trigger dispatch_deleted
  before delete on procrastinate_jobs
  for each row
  when (old.status in ('todo', 'doing'))
  execute function dispatch_ended();

-- Named to fire after procrastinate's own trigger, which writes the event.
create or replace trigger zz_dispatch_forget_parking
  after update of status on procrastinate_jobs
  for each row
  when (new.status = 'todo' and new.scheduled_at = '3000-01-01 00:00:00+00')
  execute function dispatch_forget_parking();
