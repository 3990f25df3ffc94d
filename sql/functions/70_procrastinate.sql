-- procrastinate: the one file that knows its tables. Hand-off, parking of retried jobs, and what its rows say of a job.
-- Invariants: a job has one id, the one it was staged with; a job that cannot be handed off costs its neighbours nothing; no
-- row of procrastinate is waited for (a held lock counts as "not yet").

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
set enable_bitmapscan = off
set enable_sort = off
as $$
begin
  -- A range and an order, so that no index will do but the one on the lock. (An exists would do without the order.)
  return coalesce((
    select true
    from procrastinate_jobs
    where queueing_lock between p_queueing_lock and p_queueing_lock
      and status = 'todo'
    order by queueing_lock
    limit 1
  ), false);
end;
$$;
comment on function dispatch_queueing_lock_queued(text) is 'Does a job in procrastinate''s queue hold the queueing lock?';

create or replace function dispatch_parked_until()
returns timestamptz
language sql
immutable
parallel safe
return '3000-01-01 00:00:00+00'::timestamptz;
comment on function dispatch_parked_until() is 'The schedule of a parked job in procrastinate_jobs: far away, and a time that every client can read.';

create or replace function dispatch_forget_parking(p_job_ids bigint[])
returns void
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
begin
  delete from procrastinate_events
  where job_id = any (p_job_ids)
    and type = 'scheduled'
    and at = dispatch_parked_until();
end;
$$;
comment on function dispatch_forget_parking(bigint[]) is 'procrastinate writes each schedule down as an event, that of parking too. Retention by age would never come to such a job.';

create or replace function dispatch_inserted(p_job_id bigint)
returns text
language sql
immutable
parallel safe
return json_build_object('type', 'job_inserted', 'job_id', p_job_id)::text;
comment on function dispatch_inserted(bigint) is 'What procrastinate notifies its workers with of a job that came into the queue.';

-- What a hand-off writes that may fail, in one statement: procrastinate's row comes (or comes back from where it was parked),
-- slot and admission are noted. The staged row stays until that is known to have gone well: the tick has locked it, and whoever
-- deletes in a subtransaction what is locked outside makes a multixact of it. But a retry's goes first, for by that
-- dispatch_rescheduled() knows a hand-off.
create or replace function dispatch_queue(p_places tid[], p_observed boolean, p_now timestamptz)
returns bigint
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_jobs bigint;
begin
  with parked as (
    delete from dispatch_staged_jobs where ctid = any (p_places) and parked returning *
  ), taken as (
    select * from dispatch_staged_jobs where ctid = any (p_places) and not parked
    union all
    select * from parked
  ), queued as (
    insert into procrastinate_jobs (id, queue_name, task_name, priority, lock, queueing_lock, args, scheduled_at, attempts)
    select id, queue_name, task_name, priority, lock, queueing_lock, args, scheduled_at, attempts
    from taken
    where not parked
  ), released as (
    update procrastinate_jobs as job
    set (scheduled_at, priority, lock, queueing_lock) = (taken.scheduled_at, taken.priority, taken.lock, taken.queueing_lock)
    from taken
    cross join lateral (
      select j.ctid as place from procrastinate_jobs as j where j.id = taken.id limit 1
    ) as row
    where taken.parked
      and job.ctid = row.place
    returning
      pg_notify('procrastinate_queue_v1#' || job.queue_name, dispatch_inserted(job.id)),
      pg_notify('procrastinate_any_queue_v1', dispatch_inserted(job.id))
  ), admitted as (
    insert into dispatch_admissions (job_id, partition_id, staged_at, admitted_at, policy_name, partition_key, context)
    select id, partition_id, staged_at, p_now, policy_name, partition_key, context
    from taken
    where not parked
  ), admitted_again as (
    update dispatch_admissions
    set (admitted_at, ending) = (p_now, null)
    where job_id = any (array(select id from taken where parked))
  ), slots as (
    insert into dispatch_inflight_jobs (job_id, partition_id, admitted_at, policy_name, partition_key, observed)
    select id, partition_id, p_now, policy_name, partition_key, p_observed
    from taken
  )
  select count(*) into v_jobs from taken;
  return v_jobs;
end;
$$;
comment on function dispatch_queue(tid[], boolean, timestamptz) is 'Hands staged jobs, whose rows are locked, over to procrastinate, all or none, each under its id. Returns how many there were; dispatch_hand_over() takes their rows away. p_observed: does a gate learn from them?';

create or replace function dispatch_is_held(p_sqlstate text, p_constraint text)
returns boolean
language sql
immutable
parallel safe
return left(p_sqlstate, 2) = '40' or p_sqlstate = '55P03'
  or (p_sqlstate = '23505' and p_constraint = 'procrastinate_jobs_queueing_lock_idx_v1');
comment on function dispatch_is_held(text, text) is 'Errors that say that somebody is in a job''s way for now: a job with its queueing lock, whoever has a lock that does not come free soon, a deadlock.';

create or replace function dispatch_outcome_of(p_id bigint, p_sqlstate text, p_constraint text, p_message text)
returns dispatch_outcome
language sql
immutable
parallel safe
return case
  when dispatch_is_held(p_sqlstate, p_constraint) then row(p_id, null, 'held')::dispatch_outcome
  else row(p_id, p_message || ' (SQLSTATE ' || p_sqlstate || ')', 'failed')::dispatch_outcome
end;
comment on function dispatch_outcome_of(bigint, text, text, text) is 'What an error means for the job that met it, all alone.';

create or replace function dispatch_is_nobodys_fault(p_sqlstate text)
returns boolean
language sql
immutable
parallel safe
return left(p_sqlstate, 2) in ('08', '25', '40', '42', '53', '57', '58', 'F0', 'XX');
comment on function dispatch_is_nobodys_fault(text) is 'Errors that may say nothing of a job: connection, read-only transaction, serialization, rights or a schema of another version, resources, shutdown, system.';

create or replace function dispatch_may_be_its_fault(p_sqlstate text)
returns boolean
language plpgsql
stable
set search_path from current
as $$
begin
  return not dispatch_is_nobodys_fault(p_sqlstate)
    -- A row-level policy of procrastinate's table speaks with the SQLSTATE of a missing right.
    or (p_sqlstate = '42501' and row_security_active('procrastinate_jobs') and has_table_privilege('procrastinate_jobs', 'insert'));
end;
$$;
comment on function dispatch_may_be_its_fault(text) is 'Can an error be of the job that met it, where no other job tells?';

create or replace function dispatch_try_each(p_ids bigint[], p_places tid[], p_observed boolean, p_now timestamptz)
returns dispatch_outcome[]
language plpgsql
set search_path from current
as $$
declare
  v_outcomes dispatch_outcome[] := '{}';
  v_at integer := 0;
  v_doubtful integer := 0;
  v_passed boolean := false;
  v_constraint text;
  v_sqlstate text;
  v_message text;
begin
  while v_at < cardinality(p_ids) loop
    begin
      while v_at < cardinality(p_ids) loop
        v_at := v_at + 1;
        perform dispatch_queue(p_places[v_at:v_at], p_observed, p_now);
        v_passed := true;
      end loop;
      raise exception using errcode = 'UNDO0', message = 'all of it is taken back';
    exception
      when sqlstate 'UNDO0' then
        null;
      when others or assert_failure then
        get stacked diagnostics v_constraint = constraint_name;
        if dispatch_is_nobodys_fault(sqlstate) then
          v_doubtful := v_doubtful + 1;
          v_sqlstate := sqlstate;
          v_message := sqlerrm;
        end if;
        v_outcomes := v_outcomes || dispatch_outcome_of(p_ids[v_at], sqlstate, v_constraint, sqlerrm);
        -- Whoever has waited for one has waited for all.
        perform set_config('lock_timeout', '1ms', true);
    end;
    exit when v_doubtful = 10 and not v_passed;
  end loop;
  if not v_passed and (v_doubtful > 1 or (v_doubtful = 1 and not dispatch_may_be_its_fault(v_sqlstate))) then
    raise exception using errcode = v_sqlstate, message = v_message;
  end if;
  return v_outcomes;
end;
$$;
comment on function dispatch_try_each(bigint[], tid[], boolean, timestamptz) is 'Tries to hand jobs over one by one, takes all of it back, and returns what became of those that cannot go. Where none can and some meet what may be nobody''s fault, that is raised.';

create or replace function dispatch_hand_over(p_ids bigint[], p_places tid[], p_observed boolean, p_now timestamptz)
returns dispatch_outcome[]
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set lock_timeout = '100ms'
as $$
declare
  v_outcomes dispatch_outcome[] := '{}';
  v_stopped dispatch_outcome[];
  v_queued bigint;
  v_constraint text;
begin
  while p_ids <> '{}' loop
    begin
      v_queued := dispatch_queue(p_places, p_observed, p_now);
    exception
      when others or assert_failure then
        get stacked diagnostics v_constraint = constraint_name;
        if cardinality(p_ids) = 1 and not dispatch_may_be_its_fault(sqlstate) then
          raise;
        end if;
        v_stopped := array[dispatch_outcome_of(p_ids[1], sqlstate, v_constraint, sqlerrm)];
    end;
    exit when v_queued is not null;
    if cardinality(p_ids) > 1 then
      v_stopped := dispatch_try_each(p_ids, p_places, p_observed, p_now);
    end if;
    -- Each can go by itself now: whoever was in the way has just gone.
    if v_stopped = '{}' then
      v_stopped := array(select row(id, null, 'held')::dispatch_outcome from unnest(p_ids) as id);
    end if;
    v_outcomes := v_outcomes || v_stopped;
    select coalesce(array_agg(id order by turn), '{}'), coalesce(array_agg(place order by turn), '{}')
    into p_ids, p_places
    from unnest(p_ids, p_places) with ordinality as jobs (id, place, turn)
    where id <> all (array(select o.id from unnest(v_stopped) as o));
  end loop;

  delete from dispatch_staged_jobs where ctid = any (p_places);
  -- Nobody else can take a job that is locked, but whoever shares the transaction can: admit twice before settling, or cancel.
  if v_queued < cardinality(p_ids) then
    perform dispatch_raise('PD008', 'jobs that were admitted are not staged any more', null,
      'Settle a hand-off before the same transaction admits, ticks or cancels in its policy again.');
  end if;
  return v_outcomes;
end;
$$;
comment on function dispatch_hand_over(bigint[], tid[], boolean, timestamptz) is 'Hands staged jobs, whose rows are locked, over to procrastinate, and returns what became of those that cannot go. Raises what is nobody''s fault, and PD008 when one of them is not staged.';

create or replace function dispatch_held(p_ids bigint[])
returns bigint[]
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_free constant bigint[] := array(
    select job.id
    from unnest(p_ids) as contested (id)
    cross join lateral (
      select j.id, j.status from procrastinate_jobs as j where j.id = contested.id limit 1 for update skip locked
    ) as job
    where job.status = 'todo'
  );
begin
  return array(
    select s.id
    from unnest(p_ids) as contested (id)
    cross join lateral (
      select * from dispatch_staged_jobs as s where s.id = contested.id limit 1
    ) as s
    where (s.parked and s.id <> all (v_free))
      or (s.parked and exists (
        select
        from dispatch_staged_jobs as rival
        where rival.queueing_lock = s.queueing_lock
          and not rival.parked
          and rival.id = any (p_ids)
      ))
      or dispatch_queueing_lock_queued(s.queueing_lock)
  );
end;
$$;
comment on function dispatch_held(bigint[]) is 'Of staged jobs, those whose queueing lock a queued job has, and the retries whose parked row somebody holds. The rows of the other retries are locked then.';

create or replace function dispatch_await_queue()
returns void
language plpgsql
set search_path from current
as $$
begin
  lock table procrastinate_jobs in row exclusive mode;
end;
$$;
comment on function dispatch_await_queue() is 'Waits for whoever alters procrastinate''s table, indexes or truncates it: before anything else, so that those never wait for what a waiting tick has locked; in a hand-off, a lock that is not free soon counts as held by another job.';

create or replace function dispatch_hand_off(p_policy dispatch_policies, p_handoff dispatch_handoffs, p_turned_back bigint[] default '{}')
returns dispatch_outcome[]
language plpgsql
set search_path from current
as $$
declare
  v_observed constant boolean := dispatch_adapts(p_policy.gates);
  v_held bigint[];
  v_jobs record;
begin
  if p_handoff.staged_ids = '{}' then
    return '{}';
  end if;
  if p_handoff.contested_ids = '{}' and p_turned_back = '{}' then
    return dispatch_hand_over(p_handoff.staged_ids, p_handoff.places, v_observed, p_handoff.decided_at);
  end if;

  v_held := dispatch_held(array(select unnest(p_handoff.contested_ids) except select unnest(p_turned_back)));
  select
    coalesce(array_agg(id order by turn) filter (where not contested), '{}') as free_ids,
    coalesce(array_agg(place order by turn) filter (where not contested), '{}') as free_places,
    coalesce(array_agg(id order by turn) filter (where contested), '{}') as contested_ids,
    coalesce(array_agg(place order by turn) filter (where contested), '{}') as contested_places
  into v_jobs
  from (
    select *, id = any (p_handoff.contested_ids) as contested
    from unnest(p_handoff.staged_ids, p_handoff.places) with ordinality as jobs (id, place, turn)
    where id <> all (p_turned_back || v_held)
  ) as jobs;
  return dispatch_hand_over(v_jobs.free_ids, v_jobs.free_places, v_observed, p_handoff.decided_at)
    || dispatch_hand_over(v_jobs.contested_ids, v_jobs.contested_places, v_observed, p_handoff.decided_at)
    || array(select row(id, null, 'held')::dispatch_outcome from unnest(v_held) as id);
end;
$$;
comment on function dispatch_hand_off(dispatch_policies, dispatch_handoffs, bigint[]) is 'Hands the jobs of a tick over to procrastinate, all but those that a driver turns back, and returns what became of those that did not go. Those that may have to wait for somebody go by themselves.';

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

create or replace function dispatch_running_count(p_policy text, p_until timestamptz)
returns integer
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
begin
  return (
    select count(*)
    from dispatch_running_jobs() as running (job_id)
    cross join lateral (
      select policy_name, admitted_at from dispatch_inflight_jobs as slot where slot.job_id = running.job_id limit 1
    ) as slot
    where slot.policy_name = p_policy
      and slot.admitted_at <= p_until
  );
end;
$$;
comment on function dispatch_running_count(text, timestamptz) is 'How many of the jobs that hold a policy''s slots as of a time run.';

-- A lock's jobs run one after the other, in the order of the queue; so only the first of them can be next.
create or replace function dispatch_startable(
  p_policy text, p_above bigint, p_before timestamptz, p_now timestamptz, out queue_names text[], out priorities integer[], out ids bigint[]
)
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_mergejoin = off
set jit = off
as $$
begin
  with waiting as materialized (
    select job.*
    from dispatch_inflight_jobs as slot
    cross join lateral (
      select j.id, j.queue_name, j.priority, j.lock
      from procrastinate_jobs as j
      where j.id = slot.job_id
        and j.id > p_above
        and j.status = 'todo'
        and (j.scheduled_at is null or j.scheduled_at <= p_now)
      order by j.id
      limit 1
    ) as job
    where slot.policy_name = p_policy
      and slot.admitted_at < p_before
  ), first as (
    select distinct on (j.lock) j.id
    from procrastinate_jobs as j
    where j.status in ('todo', 'doing')
      and j.lock in (select lock from waiting where lock is not null)
    order by j.lock, (j.status = 'doing') desc, j.priority desc, j.id
  ), foremost as (
    select queue_name, priority, max(id) as id
    from waiting
    where lock is null
      or id in (select first.id from first)
    group by queue_name, priority
  )
  select coalesce(array_agg(queue_name), '{}'), coalesce(array_agg(priority), '{}'), coalesce(array_agg(id), '{}')
  into queue_names, priorities, ids
  from foremost;
end;
$$;
comment on function dispatch_startable(text, bigint, timestamptz, timestamptz) is 'Of a policy''s jobs that were handed off before a time and that a worker could start now, the highest id of each queue and priority, where it is above p_above.';

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
      and slot.orphaned_at is null
      and not exists (select from procrastinate_workers as w where w.id = job.worker_id)
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
      select j.status from procrastinate_jobs as j where j.id = s.id limit 1
    ) as job on true
    where s.parked
      and job.status is distinct from 'todo'
    order by s.id
    limit p_limit
    for update of s skip locked;
end;
$$;
comment on function dispatch_retries_without_job(integer) is 'Staged retries, locked, whose parked row is gone.';

create or replace function dispatch_ended_admissions(p_before timestamptz, p_now timestamptz, p_limit integer)
returns setof bigint
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
begin
  return query
    select a.job_id
    from dispatch_admissions as a
    left join lateral (
      select j.status from procrastinate_jobs as j where j.id = a.job_id limit 1
    ) as job on true
    where a.admitted_at < p_before
      and coalesce(job.status not in ('todo', 'doing'), true)
      -- An end that lies in the future is on another clock.
      and not coalesce(dispatch_ended_at(a.job_id) between p_before and p_now, false)
    limit p_limit
    for update of a skip locked;
end;
$$;
comment on function dispatch_ended_admissions(timestamptz, timestamptz, integer) is 'Admissions of jobs that ended before a time, or were admitted before it and are gone, locked.';

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
  delete from dispatch_staged_jobs where id = p_job_id and parked returning * into v_removed;
  if found then
    insert into dispatch_inbox (policy_name, partition_id, kind, jobs)
    values (v_removed.policy_name, v_removed.partition_id, 'removed', -1);
  end if;
  return false;
end;
$$;
comment on function dispatch_free_slot(bigint, boolean) is 'Frees the slot of a procrastinate job that ended and notes the observation (null: it is none). Returns whether it had a slot; a second call does nothing.';

create or replace function dispatch_restage(p_job procrastinate_jobs, p_admission dispatch_admissions, p_policy dispatch_policies)
returns void
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
declare
begin
  insert into dispatch_staged_jobs (id, parked, partition_id, eligible_at, staged_at, scheduled_at, priority, attempts, policy_name,
    partition_key, task_name, queue_name, lock, queueing_lock, args, context)
  values (p_job.id, true, p_admission.partition_id, coalesce(p_job.scheduled_at, '-infinity'), p_admission.staged_at, p_job.scheduled_at,
    p_job.priority, p_job.attempts, p_policy.policy_name, p_admission.partition_key, p_job.task_name, p_job.queue_name, p_job.lock,
    p_job.queueing_lock, p_job.args, p_admission.context);
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs, due_at, newest_id, partition_key, shard, context)
  values (p_policy.policy_name, p_admission.partition_id, 'staged', 1, greatest(p_job.scheduled_at, dispatch_now()), 0,
    p_admission.partition_key, dispatch_shard(p_policy.shard_by, p_admission.context), p_admission.context);
  perform dispatch_wake(p_policy.policy_name);
end;
$$;
comment on function dispatch_restage(procrastinate_jobs, dispatch_admissions, dispatch_policies) is 'Puts a retried job back into its policy, as it is; its row in procrastinate_jobs stays, parked.';

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
  v_waiting dispatch_staged_jobs;
  v_lag_ms double precision;
begin
  if old.status = 'todo' then
    return new;
  end if;
  select * into v_admission from dispatch_admissions where job_id = new.id;
  if not found then
    return new;
  end if;
  select * into v_policy from dispatch_policies where policy_name = v_admission.policy_name;
  if not found then
    return new;
  end if;

  if v_policy.retry_strategy = 'restage' then
    -- Somebody ran it by hand while it was parked.
    select * into v_waiting from dispatch_staged_jobs where id = new.id and parked;
    if found then
      new.priority := greatest(new.priority, v_waiting.priority);
      new.lock := coalesce(new.lock, v_waiting.lock);
      new.queueing_lock := coalesce(new.queueing_lock, v_waiting.queueing_lock);
      if new.scheduled_at = dispatch_parked_until() then
        new.scheduled_at := v_waiting.scheduled_at;
      end if;
    end if;
    perform dispatch_free_slot(new.id, false);
    perform dispatch_restage(new, v_admission, v_policy);
    new.scheduled_at := dispatch_parked_until();
    new.priority := -2147483648;
    new.worker_id := null;
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
      insert into dispatch_inflight_jobs (job_id, partition_id, admitted_at, policy_name, partition_key)
      values (new.id, v_admission.partition_id, greatest(dispatch_now(), new.scheduled_at), v_admission.policy_name, v_admission.partition_key);
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
comment on function dispatch_retried() is 'Trigger: a job of a policy goes back to todo. With retry_strategy restage the policy holds it, and its row is parked: far schedule and lowest priority (so that a worker''s fetch reads it last), no locks (so that it stands in nobody''s way), no worker (whose end would touch it).';

create or replace function dispatch_unpark(p_job_id bigint, p_scheduled_at timestamptz, p_priority integer, p_lock text, p_queueing_lock text)
returns void
language plpgsql
set search_path from current
as $$
begin
  update procrastinate_jobs
  set (scheduled_at, priority, lock, queueing_lock) = (p_scheduled_at, p_priority, p_lock, p_queueing_lock)
  where id = p_job_id;
  if found and p_scheduled_at is not null then
    insert into procrastinate_events (job_id, type, at) values (p_job_id, 'scheduled', p_scheduled_at);
  end if;
end;
$$;
comment on function dispatch_unpark(bigint, timestamptz, integer, text, text) is 'Of a parked job that ended, gives its row in procrastinate_jobs its schedule, priority and locks back.';

create or replace function dispatch_rescheduled()
returns trigger
language plpgsql
security definer
set search_path from current
set enable_seqscan = off
as $$
declare
  v_job dispatch_staged_jobs;
begin
  update dispatch_staged_jobs
  set (scheduled_at, eligible_at) = (new.scheduled_at, coalesce(new.scheduled_at, '-infinity'))
  where id = new.id
    and parked
  returning * into v_job;
  if found then
    insert into dispatch_inbox (policy_name, partition_id, kind, due_at)
    values (v_job.policy_name, v_job.partition_id, 'resumed', greatest(new.scheduled_at, dispatch_now()));
    perform dispatch_wake(v_job.policy_name);
    new.scheduled_at := old.scheduled_at;
  elsif exists (select from dispatch_dead_jobs where id = new.id and parked) then
    new.scheduled_at := old.scheduled_at;
  else
    perform dispatch_forget_parking(array[new.id]);
  end if;
  return new;
end;
$$;
comment on function dispatch_rescheduled() is 'Trigger: a parked job gets another schedule. Where that is a tick''s hand-off, which has taken the job out of its policy before, it is not parked any more. Else somebody''s hand did it: its policy takes that for when the job is next to go, and its row stays parked.';

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
  v_parked dispatch_staged_jobs;
begin
  if tg_op = 'UPDATE' and new.status = 'todo' then
    -- It did not end, it waits again.
    if new.scheduled_at = dispatch_parked_until() then
      perform dispatch_forget_parking(array[new.id]);
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
      select * into v_parked from dispatch_staged_jobs where id = old.id and parked;
      perform dispatch_free_slot(old.id, null);
    end if;
  elsif old.status = 'todo' then
    select * into v_parked from dispatch_staged_jobs where id = old.id and parked and old.scheduled_at = dispatch_parked_until();
    perform dispatch_free_slot(old.id, null);
    -- Deleted before it ran: of such a job nothing is known any more, here as in procrastinate.
    if tg_op = 'DELETE' then
      delete from dispatch_admissions where job_id = old.id;
    end if;
  end if;
  if old.scheduled_at = dispatch_parked_until() and not (tg_op = 'UPDATE' and new.status = 'todo') then
    perform dispatch_forget_parking(array[old.id]);
    delete from dispatch_dead_jobs where id = old.id and parked;
    if tg_op = 'UPDATE' and v_parked.id is not null then
      perform dispatch_unpark(old.id, v_parked.scheduled_at, v_parked.priority, v_parked.lock, v_parked.queueing_lock);
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
      select s.id, 'staged', s.policy_name, s.partition_key, case when s.parked then s.id end, s.task_name, s.queue_name, s.attempts,
        s.staged_at, null::timestamptz, null::timestamptz
      from dispatch_staged_jobs as s
      where s.id = p_id
    ), dead as (
      select d.id, 'dead', d.policy_name, d.partition_key, case when d.parked then d.id end, d.task_name, d.queue_name, d.attempts,
        d.staged_at, null::timestamptz, d.died_at
      from dispatch_dead_jobs as d
      where d.id = p_id
    ), handed as (
      select
        ids.id,
        case
          when a.ending is not null then a.ending
          when job.status = 'todo' then 'queued'
          when job.status = 'doing' then 'running'
          when job.status = 'cancelled' then 'cancelled'
          else 'finished'
        end,
        a.policy_name, a.partition_key, job.id, job.task_name::text, job.queue_name::text, job.attempts, a.staged_at,
        case when a.ending is null then a.admitted_at end,
        case when a.ending is null then dispatch_ended_at(p_id) else a.admitted_at end
      from (values (p_id)) as ids (id)
      left join dispatch_admissions as a on a.job_id = ids.id
      left join procrastinate_jobs as job on job.id = ids.id
      where a.job_id is not null or job.id is not null
    )
    select * from staged
    union all
    select * from dead
    union all
    select * from handed
    limit 1;
end;
$$;
comment on function dispatch_job_states(bigint) is 'Where a job is; no row for an id that no job has. job_id is null as long as procrastinate has no row of it.';

create or replace function dispatch_status_of(p_job_id bigint)
returns text
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
begin
  return (select status::text from procrastinate_jobs where id = p_job_id);
end;
$$;
comment on function dispatch_status_of(bigint) is 'procrastinate''s word for where a job is that it has; null for any other.';

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

-- As if procrastinate had had it all along: with its row, and the events that tell procrastinate's retention how old it is. Where
-- its table refuses the job, or the caller may not, the job ends all the same: what is known of it is in dispatch_admissions.
create or replace function dispatch_write_ended(p_job dispatch_staged_jobs, p_status text, p_abort boolean, p_now timestamptz)
returns void
language plpgsql
set search_path from current
as $$
begin
  insert into procrastinate_jobs (id, queue_name, task_name, priority, lock, queueing_lock, args, scheduled_at, status, abort_requested)
  values (p_job.id, p_job.queue_name, p_job.task_name, p_job.priority, p_job.lock, p_job.queueing_lock, p_job.args, p_job.scheduled_at,
    p_status::procrastinate_job_status, p_abort);
  insert into procrastinate_events (job_id, type, at)
  select p_job.id, type::procrastinate_job_event_type, at
  from (
    values ('scheduled', p_job.scheduled_at), ('deferred', p_job.staged_at), ('abort_requested', p_now), ('cancelled', p_now)
  ) as events (type, at)
  where (p_abort or type <> 'abort_requested')
    and at is not null;
exception
  when others or assert_failure then
    null;
end;
$$;
comment on function dispatch_write_ended(dispatch_staged_jobs, text, boolean, timestamptz) is 'Writes a staged job that ends without being handed off into procrastinate''s tables.';

create or replace function dispatch_end_staged(p_id bigint, p_status text, p_delete_job boolean, p_abort boolean default false)
returns boolean
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
declare
  v_now constant timestamptz := dispatch_now();
  v_job dispatch_staged_jobs;
begin
  delete from dispatch_staged_jobs where id = p_id and not parked returning * into v_job;
  if not found then
    return false;
  end if;
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs)
  values (v_job.policy_name, v_job.partition_id, 'removed', -1);
  if not p_delete_job then
    insert into dispatch_admissions (job_id, partition_id, staged_at, admitted_at, policy_name, partition_key, context, ending)
    values (p_id, v_job.partition_id, v_job.staged_at, v_now, v_job.policy_name, v_job.partition_key, v_job.context,
      case p_status when 'cancelled' then 'cancelled' else 'finished' end);
    perform dispatch_write_ended(v_job, p_status, p_abort, v_now);
  end if;
  return true;
end;
$$;
comment on function dispatch_end_staged(bigint, text, boolean, boolean) is 'Ends a job that is staged and was never handed off, with one of procrastinate''s words, or without a trace (p_delete_job). p_abort notes that it was asked to abort. False when there is no such job (any more). Waits for a tick that is just admitting it.';

create or replace function dispatch_cancel_job(p_id bigint, p_abort boolean, p_delete_job boolean)
returns boolean
language plpgsql
set search_path from current
as $$
begin
  -- One after the other: what a tick has admitted meanwhile is seen by the second.
  return dispatch_end_staged(p_id, 'cancelled', p_delete_job, p_abort) or procrastinate_cancel_job_v1(p_id, p_abort, p_delete_job) is not null;
end;
$$;
comment on function dispatch_cancel_job(bigint, boolean, boolean) is 'What procrastinate''s cancel does, for any job: one that is staged is cancelled here (p_delete_job: without a trace), any other by procrastinate, with its meaning of p_abort and p_delete_job.';

-- In test suites everywhere. What procrastinate forgets is forgotten here, for its ids may be given out anew; what was spent
-- (tokens, what adaptive gates have learned, fairness) is not.
create or replace function dispatch_truncated()
returns trigger
language plpgsql
security definer
set search_path from current
as $$
declare
  v_waiting bigint;
  v_in_flight bigint;
  v_dead bigint;
begin
  -- Whoever has staged and not committed is waited for: its ids would be given out anew. Deleted, not truncated, for the same
  -- statement may truncate these tables too.
  lock table dispatch_staged_jobs, dispatch_inflight_jobs, dispatch_admissions, dispatch_dead_jobs, dispatch_inbox, dispatch_dead_notes
    in share row exclusive mode;
  delete from dispatch_staged_jobs;
  get diagnostics v_waiting = row_count;
  delete from dispatch_inflight_jobs;
  get diagnostics v_in_flight = row_count;
  delete from dispatch_dead_jobs;
  get diagnostics v_dead = row_count;
  delete from dispatch_admissions;
  delete from dispatch_inbox;
  delete from dispatch_dead_notes;
  update dispatch_partitions
  set (due_at, blocked_until, blocked_after_finish, blocked_reason, waiting_since, pending_count, in_flight_count, newest_id)
    = (null, null, null, null, null, 0, 0, 0);
  if v_waiting + v_in_flight + v_dead > 0 then
    perform dispatch_audit(session_user, 'truncate', null, null, null,
      jsonb_build_object('waiting', v_waiting, 'in_flight', v_in_flight, 'dead', v_dead));
    raise notice 'pydispatch: with procrastinate_jobs went % waiting jobs, % slots and % dead jobs', v_waiting, v_in_flight, v_dead;
  end if;
  return null;
end;
$$;
comment on function dispatch_truncated() is 'Trigger: procrastinate_jobs was truncated, and so is what belongs to its jobs. Policies, pauses and the partitions'' gates stay. Says so in a notice and in the audit log.';

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
revoke all on function dispatch_retried(), dispatch_rescheduled(), dispatch_ended(), dispatch_truncated() from public;

-- Postgres reads the text of each condition anew in each statement, a worker's fetch included: the shorter the better. What
-- else has to hold is asked in the function.
create or replace trigger dispatch_retried
  before update of status on procrastinate_jobs
  for each row
  when (new.status = 'todo')
  execute function dispatch_retried();

create or replace trigger dispatch_rescheduled
  before update of scheduled_at on procrastinate_jobs
  for each row
  when (old.status = 'todo' and old.scheduled_at = '3000-01-01 00:00:00+00' and new.scheduled_at is distinct from old.scheduled_at)
  execute function dispatch_rescheduled();

create or replace trigger dispatch_truncated
  after truncate on procrastinate_jobs
  for each statement
  execute function dispatch_truncated();

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
