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
set enable_seqscan = off
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

create or replace function dispatch_refusal(p_sqlstate text, p_constraint text, p_message text)
returns text
language sql
immutable
parallel safe
return case
  when p_sqlstate = '23505' and p_constraint = 'procrastinate_jobs_queueing_lock_idx_v1' then null
  when p_sqlstate = '55P03' then null
  else p_message || ' (SQLSTATE ' || p_sqlstate || ')'
end;
comment on function dispatch_refusal(text, text, text) is 'Why procrastinate''s table refused a single job; null when its queueing lock is held, so that it waits its turn.';

create or replace function dispatch_defer(p_ids bigint[])
returns dispatch_outcome[]
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
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
    cross join lateral (
      select * from dispatch_staged_jobs as s where s.id = picked.id limit 1
    ) as s;
    return array(
      select row(id, job_id, null)::dispatch_outcome
      from unnest(p_ids, v_job_ids) as handed (id, job_id)
    );
  exception
    when others then
      -- Without the function no job can go: procrastinate's schema is not the one that this was made for.
      if dispatch_is_nobodys_fault(sqlstate) or to_regproc('procrastinate_defer_jobs_v1') is null then
        raise;
      end if;
      get stacked diagnostics v_constraint = constraint_name;
      if cardinality(p_ids) = 1 then
        return array[row(p_ids[1], null, dispatch_refusal(sqlstate, v_constraint, sqlerrm))::dispatch_outcome];
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
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set lock_timeout = '100ms'
as $$
declare
  v_outcomes dispatch_outcome[] := '{}';
  v_job record;
  v_constraint text;
begin
  for v_job in
    select s.*
    from unnest(p_ids) with ordinality as picked (id, place)
    cross join lateral (
      select * from dispatch_staged_jobs as s where s.id = picked.id limit 1
    ) as s
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
      when others then
        if dispatch_is_nobodys_fault(sqlstate) then
          raise;
        end if;
        get stacked diagnostics v_constraint = constraint_name;
        v_outcomes := v_outcomes || row(v_job.id, null, dispatch_refusal(sqlstate, v_constraint, sqlerrm))::dispatch_outcome;
    end;
  end loop;
  return v_outcomes;
end;
$$;
comment on function dispatch_release(bigint[]) is 'Brings parked retries back into procrastinate''s queue, and wakes its workers. A row that somebody holds, or whose queueing lock is taken, is left for later.';

create or replace function dispatch_await_queue()
returns void
language plpgsql
set search_path from current
as $$
begin
  lock table procrastinate_jobs in row exclusive mode;
end;
$$;
comment on function dispatch_await_queue() is 'Waits for whoever alters procrastinate''s table or indexes it, before a hand-off, in which a lock that is not free soon counts as held by another job.';

create or replace function dispatch_hand_off(p_ids bigint[], p_parked_ids bigint[])
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
  if p_parked_ids = '{}' then
    return dispatch_defer(p_ids);
  end if;
  return dispatch_defer(array(
    select picked.id
    from unnest(p_ids) with ordinality as picked (id, place)
    where picked.id <> all (p_parked_ids)
    order by picked.place
  )) || dispatch_release(p_parked_ids);
end;
$$;
comment on function dispatch_hand_off(bigint[], bigint[]) is 'Hands staged jobs over to procrastinate: new ones are deferred, the parked ones among them released.';

create or replace function dispatch_lag_ms(p_job_id bigint, p_admitted_at timestamptz)
returns double precision
language plpgsql
stable
set search_path from current
set enable_seqscan = off
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

create or replace function dispatch_slots_without_job(p_limit integer)
returns setof bigint
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
begin
  return query
    select slot.job_id
    from dispatch_inflight_jobs as slot
    left join lateral (
      select j.status from procrastinate_jobs as j where j.id = slot.job_id limit 1
    ) as job on true
    where coalesce(job.status not in ('todo', 'doing'), true)
    order by slot.job_id
    limit p_limit
    for update of slot skip locked;
end;
$$;
comment on function dispatch_slots_without_job(integer) is 'Slots, locked, whose job is neither queued nor running: procrastinate''s triggers were off, or the row went without them.';

create or replace function dispatch_stalled(p_now timestamptz, p_since timestamptz)
returns table (job_id bigint, policy_name text, worker_id bigint, last_sign_at timestamptz)
language plpgsql
stable
rows 20
set search_path from current
set enable_seqscan = off
as $$
begin
  return query
    select job.id, admission.policy_name, job.worker_id, coalesce(worker.last_heartbeat, slot.orphaned_at, p_now)
    from procrastinate_jobs as job
    join lateral (
      select a.policy_name from dispatch_admissions as a where a.job_id = job.id limit 1
    ) as admission on true
    left join lateral (
      select w.id, w.last_heartbeat from procrastinate_workers as w where w.id = job.worker_id limit 1
    ) as worker on true
    left join lateral (
      select s.job_id, s.orphaned_at from dispatch_inflight_jobs as s where s.job_id = job.id limit 1
    ) as slot on true
    where job.status = 'doing'
      and (
        coalesce(worker.last_heartbeat, slot.orphaned_at) < p_since
        or (worker.id is null and slot.job_id is null)
      );
end;
$$;
comment on function dispatch_stalled(timestamptz, timestamptz) is 'Running jobs of policies whose worker gave no sign since p_since. A worker that procrastinate has forgotten gave its last sign when a sweep first missed it, or long ago where the job has lost its slot.';

-- Few jobs run, many may be queued, and of procrastinate's other jobs there may be any number. So what is queued is what has
-- a slot and does not run: slots are read once, procrastinate's table only for what runs.
create or replace function dispatch_running_jobs()
returns setof bigint
language plpgsql
stable
rows 100
set search_path from current
set enable_seqscan = off
as $$
begin
  return query select id from procrastinate_jobs where status = 'doing';
end;
$$;
comment on function dispatch_running_jobs() is 'The jobs that workers run, also those of no policy.';

create or replace function dispatch_slot_counts(p_now timestamptz)
returns table (policy_name text, queued bigint, running bigint, oldest_queued_at timestamptz)
language plpgsql
stable
rows 20
set search_path from current
set enable_nestloop = off
as $$
begin
  return query
    select
      slot.policy_name,
      count(*) filter (where running.job_id is null),
      count(running.job_id),
      min(slot.admitted_at) filter (where running.job_id is null and slot.admitted_at <= p_now)
    from dispatch_inflight_jobs as slot
    left join dispatch_running_jobs() as running (job_id) on running.job_id = slot.job_id
    group by slot.policy_name;
end;
$$;
comment on function dispatch_slot_counts(timestamptz) is 'Per policy, how many slots belong to jobs that no worker has taken, and to jobs that run; and when the longest queued was admitted (a retry of procrastinate''s own counts from the time for which it is planned). Reads all slots once, however many jobs are staged.';

create or replace function dispatch_queued_since(p_policy text, p_admitted_at timestamptz)
returns table (job_id bigint, partition_key text, queue_name text)
language plpgsql
stable
rows 1
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_sort = off
as $$
begin
  return query
    select slot.job_id, slot.partition_key, job.queue_name::text
    from dispatch_inflight_jobs as slot
    cross join lateral (
      select j.queue_name from procrastinate_jobs as j where j.id = slot.job_id and j.status = 'todo' limit 1
    ) as job
    where slot.policy_name = p_policy
      and slot.admitted_at = p_admitted_at
    order by slot.job_id
    limit 1;
end;
$$;
comment on function dispatch_queued_since(text, timestamptz) is 'The first of a policy''s queued jobs that were admitted at that moment. Reads slots in the order of their jobs, so that the longest queued are found soon.';

create or replace function dispatch_workers_alive(p_now timestamptz)
returns bigint
language plpgsql
stable
set search_path from current
as $$
declare
  v_since constant timestamptz := p_now - dispatch_setting_span('inflight_stale_after');
begin
  return (select count(*) from procrastinate_workers where last_heartbeat >= v_since);
end;
$$;
comment on function dispatch_workers_alive(timestamptz) is 'Workers of procrastinate, for whatever queue, that gave a sign within inflight_stale_after: those that do not count as lost.';

create or replace function dispatch_lock_stalled(p_now timestamptz, p_since timestamptz, p_limit integer)
returns table (job_id bigint, what text)
language plpgsql
set search_path from current
as $$
begin
  return query
    select job.id, policy.stalled
    from dispatch_stalled(p_now, p_since) as stalled
    join dispatch_policies as policy on policy.policy_name = stalled.policy_name
    join procrastinate_jobs as job on job.id = stalled.job_id
    where job.status = 'doing'
      and case policy.stalled
        when 'leave' then exists (select from dispatch_inflight_jobs as slot where slot.job_id = job.id)
        -- Past the policy a retry takes its queueing lock at once, so it has to be free.
        else policy.retry_strategy = 'restage' or job.queueing_lock is null or not dispatch_queueing_lock_queued(job.queueing_lock)
      end
    order by job.id
    limit p_limit
    for update of job skip locked;
end;
$$;
comment on function dispatch_lock_stalled(timestamptz, timestamptz, integer) is 'Locks the stalled jobs with which the sweep has something to do, and says what: retry, or leave (free the slot).';

create or replace function dispatch_note_orphans(p_now timestamptz, p_limit integer)
returns void
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
begin
  update dispatch_inflight_jobs
  set orphaned_at = p_now
  where job_id = any (array(
    select slot.job_id
    from dispatch_inflight_jobs as slot
    cross join lateral (
      select j.status, j.worker_id from procrastinate_jobs as j where j.id = slot.job_id limit 1
    ) as job
    where job.status = 'doing'
      and job.worker_id is null
      and slot.orphaned_at is null
    order by slot.job_id
    limit p_limit
    for update of slot skip locked
  ));
end;
$$;
comment on function dispatch_note_orphans(timestamptz, integer) is 'procrastinate forgets a lost worker, and with it the heartbeat: notes when that was first seen.';

create or replace function dispatch_retries_without_job(p_limit integer)
returns setof bigint
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
begin
  return query
    select s.id
    from dispatch_staged_jobs as s
    left join lateral (
      select j.status from procrastinate_jobs as j where j.id = s.job_id limit 1
    ) as job on true
    where s.job_id is not null
      and job.status is distinct from 'todo'
    order by s.job_id
    limit p_limit
    for update of s skip locked;
end;
$$;
comment on function dispatch_retries_without_job(integer) is 'Staged retries, locked, whose parked row is gone.';

create or replace function dispatch_ended_admissions(p_before timestamptz, p_limit integer)
returns setof bigint
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
begin
  return query
    select a.staged_id
    from dispatch_admissions as a
    left join lateral (
      select j.status from procrastinate_jobs as j where j.id = a.job_id limit 1
    ) as job on true
    where a.admitted_at < p_before
      and coalesce(job.status not in ('todo', 'doing'), true)
    limit p_limit
    for update of a skip locked;
end;
$$;
comment on function dispatch_ended_admissions(timestamptz, integer) is 'Admissions from before a time, locked, whose job is neither queued nor running.';

create or replace function dispatch_retry_stalled(p_job_id bigint)
returns boolean
language plpgsql
set search_path from current
set lock_timeout = '100ms'
as $$
begin
  perform procrastinate_retry_job_v2(p_job_id, null, null, null, null);
  return true;
exception
  when others then
    if dispatch_is_nobodys_fault(sqlstate) then
      raise;
    end if;
    raise warning 'pydispatch: job %, whose worker is lost, is not retried: % (SQLSTATE %)', p_job_id, sqlerrm, sqlstate;
    return false;
end;
$$;
comment on function dispatch_retry_stalled(bigint) is 'Retries a running job whose worker is lost. False, with a warning, when procrastinate''s table refuses (somebody is just taking its queueing lock): the next sweep tries again.';

create or replace function dispatch_free_slot(p_job_id bigint, p_succeeded boolean)
returns boolean
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
declare
  v_slot dispatch_inflight_jobs;
  v_removed dispatch_staged_jobs;
  v_lag_ms double precision;
begin
  delete from dispatch_inflight_jobs where job_id = p_job_id returning * into v_slot;
  if found then
    v_lag_ms := case when v_slot.observed and p_succeeded is not null then dispatch_lag_ms(p_job_id, v_slot.admitted_at) end;
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
set enable_seqscan = off
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
    dispatch_shard(p_policy.shard_by, v_admission.context), v_admission.context);
  perform dispatch_wake(p_policy.policy_name);
end;
$$;
comment on function dispatch_restage(procrastinate_jobs, bigint, dispatch_policies, uuid) is 'Puts a retried job back into its policy, as it is and under the id that defer returned; its row in procrastinate_jobs stays, parked.';

create or replace function dispatch_retried()
returns trigger
language plpgsql
security definer
set search_path from current
set enable_seqscan = off
as $$
declare
  v_admission dispatch_admissions;
  v_policy dispatch_policies;
  v_slot dispatch_inflight_jobs;
  v_lag_ms double precision;
begin
  if old.status not in ('doing', 'failed') then
    return new;
  end if;
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
  else
    -- procrastinate runs it again by itself: it counts as in flight, also when it had failed or lost its slot.
    select * into v_slot from dispatch_inflight_jobs where job_id = new.id;
    if found then
      v_lag_ms := case when v_slot.observed then dispatch_lag_ms(new.id, v_slot.admitted_at) end;
      update dispatch_inflight_jobs
      set (admitted_at, orphaned_at) = (greatest(dispatch_now(), new.scheduled_at), null)
      where job_id = new.id;
      insert into dispatch_inbox (policy_name, partition_id, kind, succeeded, lag_ms)
      select v_slot.policy_name, v_slot.partition_id, 'finished', false, v_lag_ms
      where v_lag_ms is not null;
    else
      insert into dispatch_inflight_jobs (job_id, staged_id, partition_id, admitted_at, policy_name, partition_key)
      values (new.id, v_admission.staged_id, v_admission.partition_id, greatest(dispatch_now(), new.scheduled_at), v_admission.policy_name,
        v_admission.partition_key);
      insert into dispatch_inbox (policy_name, partition_id, kind, jobs)
      values (v_admission.policy_name, v_admission.partition_id, 'finished', 1);
    end if;
  end if;
  return new;
exception
  when others then
    raise warning 'pydispatch: job % is retried by procrastinate alone: % (SQLSTATE %)', new.id, sqlerrm, sqlstate;
    return new;
end;
$$;
comment on function dispatch_retried() is 'Trigger: a job of a policy goes back to todo. With retry_strategy restage the policy holds it, and its row is parked: far schedule and lowest priority (so that a worker''s fetch reads it last), no locks (so that it stands in nobody''s way).';

-- One call for each job that ends, in the worker's transaction: so what it does for a running one stands here itself, where
-- a call of dispatch_free_slot(), with its pins, would cost a quarter more.
create or replace function dispatch_ended()
returns trigger
language plpgsql
security definer
set search_path from current
set enable_seqscan = off
as $$
declare
  v_succeeded boolean;
  v_slot record;
  v_lag_ms double precision;
begin
  if tg_op = 'UPDATE' and new.status = 'todo' then
    -- It did not end, it waits again: if parked, procrastinate has just written the far schedule down as an event.
    if new.scheduled_at = dispatch_parked_until() then
      delete from procrastinate_events
      where job_id = new.id
        and type = 'scheduled'
        and at = new.scheduled_at;
    end if;
  elsif old.status = 'doing' then
    v_succeeded := case when tg_op = 'DELETE' or new.status = 'succeeded' then true when new.status = 'failed' then false end;
    delete from dispatch_inflight_jobs where job_id = old.id returning policy_name, partition_id, admitted_at, observed into v_slot;
    if found then
      if v_slot.observed and v_succeeded is not null then
        v_lag_ms := dispatch_lag_ms(old.id, v_slot.admitted_at);
      end if;
      insert into dispatch_inbox (policy_name, partition_id, kind, jobs, succeeded, lag_ms)
      values (v_slot.policy_name, v_slot.partition_id, 'finished', -1, case when v_lag_ms is not null then v_succeeded end, v_lag_ms);
      perform pg_notify(dispatch_channel(), v_slot.policy_name);
    elsif old.scheduled_at = dispatch_parked_until() then
      -- Somebody ran it by hand while the policy held it.
      perform dispatch_free_slot(old.id, null);
    end if;
  elsif old.status = 'todo' then
    perform dispatch_free_slot(old.id, null);
    -- Deleted before it ran: of such a job nothing is known any more, here as in procrastinate.
    if tg_op = 'DELETE' then
      delete from dispatch_admissions where job_id = old.id;
    end if;
  end if;
  return old;
exception
  when others then
    raise warning 'pydispatch: the slot of job % is freed by the next sweep: % (SQLSTATE %)', old.id, sqlerrm, sqlstate;
    return old;
end;
$$;
comment on function dispatch_ended() is 'Trigger: a job ended (succeeded, failed, aborted, cancelled, deleted) and frees its slot. Of one that was parked, takes the far schedule out of procrastinate''s events, which retention by age would stumble over. Never fails the statement that ended it.';

create or replace function dispatch_job_states(p_id bigint)
returns setof dispatch_job_state
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
begin
  return query
    with staged as (
      select s.id, 'staged', s.policy_name, s.partition_key, s.job_id, s.task_name, s.queue_name, s.attempts, s.staged_at,
        null::timestamptz, null::timestamptz
      from dispatch_staged_jobs as s
      where s.id = p_id or s.job_id = p_id
    ), dead as (
      select d.id, 'dead', d.policy_name, d.partition_key, d.job_id, d.task_name, d.queue_name, d.attempts, d.staged_at,
        null::timestamptz, d.died_at
      from dispatch_dead_jobs as d
      where d.id = p_id or d.job_id = p_id
    ), admitted as (
      select
        a.staged_id,
        case
          when a.job_id is null or job.status = 'cancelled' then 'cancelled'
          when job.status = 'todo' then 'queued'
          when job.status = 'doing' then 'running'
          else 'finished'
        end,
        a.policy_name, a.partition_key, a.job_id, job.task_name::text, job.queue_name::text, job.attempts, a.staged_at,
        case when a.job_id is not null then a.admitted_at end,
        case when a.job_id is null then a.admitted_at else dispatch_ended_at(a.job_id) end
      from dispatch_admissions as a
      left join procrastinate_jobs as job on job.id = a.job_id
      where a.staged_id = p_id or a.job_id = p_id
    ), foreign_jobs as (
      select
        job.id,
        case job.status when 'todo' then 'queued' when 'doing' then 'running' when 'cancelled' then 'cancelled' else 'finished' end,
        null::text, null::text, job.id, job.task_name::text, job.queue_name::text, job.attempts, null::timestamptz, null::timestamptz,
        dispatch_ended_at(job.id)
      from procrastinate_jobs as job
      where job.id = p_id
    )
    select * from staged
    union all
    select * from dead
    union all
    select * from admitted
    union all
    select * from foreign_jobs
    limit 1;
end;
$$;
comment on function dispatch_job_states(bigint) is 'Where a job is, by the id that defer returned or by procrastinate''s; no row for an id that is neither.';

create or replace function dispatch_ended_at(p_job_id bigint)
returns timestamptz
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
begin
  return (
    select max(at)
    from procrastinate_events
    where job_id = p_job_id
      and type in ('succeeded', 'failed', 'cancelled', 'aborted')
      and exists (select from procrastinate_jobs where id = p_job_id and status not in ('todo', 'doing'))
  );
end;
$$;
comment on function dispatch_ended_at(bigint) is 'When a job ended, by procrastinate''s events; null while it has not, or when its row is gone.';

create or replace function dispatch_job_status(p_id bigint)
returns text
language plpgsql
stable
set search_path from current
as $$
declare
  v_job dispatch_job_state;
begin
  select * into v_job from dispatch_job_states(p_id);
  return case v_job.state
    when 'staged' then 'todo'
    when 'queued' then 'todo'
    when 'running' then 'doing'
    when 'cancelled' then 'cancelled'
    when 'dead' then 'failed'
    when 'finished' then coalesce((select status::text from procrastinate_jobs where id = v_job.job_id), 'succeeded')
  end;
end;
$$;
comment on function dispatch_job_status(bigint) is 'procrastinate''s word (todo, doing, succeeded, failed, cancelled, aborted) for any job, staged or not; null when there is none. A finished job whose row is deleted counts as succeeded.';

create or replace function dispatch_lock_holders(p_lock text, p_queueing_lock text, out running_id bigint, out queued_id bigint)
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
begin
  select id into running_id from procrastinate_jobs where lock = p_lock and status = 'doing';
  select id into queued_id from procrastinate_jobs where queueing_lock = p_queueing_lock and status = 'todo';
end;
$$;
comment on function dispatch_lock_holders(text, text) is 'The job that runs under a lock, and the job in procrastinate''s queue that holds a queueing lock; null for none.';

create or replace function dispatch_job_facts(
  p_job_id bigint,
  out status text, out scheduled_at timestamptz, out lock text, out started_at timestamptz, out worker_seen_at timestamptz
)
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
begin
  select job.status::text, job.scheduled_at, job.lock, worker.last_heartbeat
  into status, scheduled_at, lock, worker_seen_at
  from procrastinate_jobs as job
  left join procrastinate_workers as worker on worker.id = job.worker_id
  where job.id = p_job_id;
  select max(event.at) into started_at from procrastinate_events as event where event.job_id = p_job_id and event.type = 'started';
end;
$$;
comment on function dispatch_job_facts(bigint) is 'What procrastinate knows of a job: its status, its schedule, its lock, when it last started and when its worker gave its last sign. All null when its row is gone.';

create or replace function dispatch_cancel_job(p_id bigint, p_abort boolean, p_delete_job boolean)
returns boolean
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
begin
  -- A retry that waits has a row in procrastinate, so procrastinate cancels or deletes it.
  if not exists (select from dispatch_staged_jobs where id = p_id and job_id is not null) and dispatch_cancel(p_id) then
    if p_delete_job then
      delete from dispatch_admissions where staged_id = p_id and job_id is null;
    end if;
    return true;
  end if;
  -- In a statement of its own: what a tick has admitted meanwhile is seen here.
  return procrastinate_cancel_job_v1(
    coalesce((select job_id from dispatch_admissions where staged_id = p_id), p_id), p_abort, p_delete_job) is not null;
end;
$$;
comment on function dispatch_cancel_job(bigint, boolean, boolean) is 'What procrastinate''s cancel does, for any job: one that is staged is cancelled here (p_delete_job: without a trace), any other by procrastinate, with its meaning of p_abort and p_delete_job.';

create or replace function dispatch_stage_periodic(p_policy text, p_job jsonb, p_periodic_id text, p_defer_timestamp bigint)
returns bigint
language plpgsql
set search_path from current
as $$
declare
  v_task_name constant text := p_job ->> 'task_name';
begin
  insert into procrastinate_periodic_defers (task_name, periodic_id, defer_timestamp)
  values (v_task_name, p_periodic_id, p_defer_timestamp)
  on conflict do nothing;
  if not found then
    return null;
  end if;

  delete from procrastinate_periodic_defers
  where id in (
    select id
    from procrastinate_periodic_defers
    where task_name = v_task_name
      and periodic_id = p_periodic_id
      and defer_timestamp < p_defer_timestamp
    order by id
    for update
  );
  return (select id from dispatch_stage_many(p_policy, jsonb_build_array(p_job)) as id);
end;
$$;
comment on function dispatch_stage_periodic(text, jsonb, text, bigint) is 'Stages a periodic task''s job for one of its times, at most once however many workers try: null when another was first. Errors as dispatch_stage_many().';

-- A trigger on a table of anybody's would run these with the owner's rights, too, and free slots as it likes. To fire
-- them, procrastinate's statements need no right on them.
revoke all on function dispatch_retried(), dispatch_ended() from public;

-- Postgres reads the text of each condition anew in each statement, a worker's fetch included: the shorter the better. What
-- else has to hold is asked in the function.
create or replace trigger dispatch_retried
  before update of status on procrastinate_jobs
  for each row
  when (new.status = 'todo')
  execute function dispatch_retried();

-- Named to fire after procrastinate's own trigger, which writes the event.
create or replace trigger zz_dispatch_ended
  after update of status on procrastinate_jobs
  for each row
  when (new.status <> 'doing')
  execute function dispatch_ended();

create or replace trigger dispatch_deleted
  before delete on procrastinate_jobs
  for each row
  when (old.status in ('todo', 'doing'))
  execute function dispatch_ended();
