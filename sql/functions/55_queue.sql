-- How many of a policy's jobs may wait in procrastinate's queue. procrastinate runs its queue in the order of staging, so a
-- tenant that came first with many would go first with all of them: what is fair between tenants is so only before.
-- Invariants: with any number of ticks at once, no tick adds to a queue of max_queued jobs; and while a job waits in the queue,
-- ticks hand over about as many as are queued that go before it, and no more.

create or replace function dispatch_counts_until(p_policy dispatch_policies, p_now timestamptz)
returns timestamptz
language sql
immutable
parallel safe
return case p_policy.retry_strategy when 'bypass' then p_now else 'infinity' end;
comment on function dispatch_counts_until(dispatch_policies, timestamptz) is 'Slots as of when count as queued or running. A retry of procrastinate''s own has one as of the time for which it is planned: it waits for that, not for a worker.';

create or replace function dispatch_queued(p_policy dispatch_policies, p_now timestamptz)
returns integer
language plpgsql
stable
set search_path from current
as $$
declare
  v_until constant timestamptz := dispatch_counts_until(p_policy, p_now);
  v_running constant integer := dispatch_running_count(p_policy.policy_name, v_until);
begin
  return dispatch_slots_up_to(p_policy.policy_name, v_until, p_policy.max_queued + v_running) - v_running;
end;
$$;
comment on function dispatch_queued(dispatch_policies, timestamptz) is 'How many jobs of a policy are queued, max_queued standing for that many or more. Reads so many slots at most, besides those of running jobs.';

create or replace function dispatch_queue_room(p_policy dispatch_policies, p_now timestamptz)
returns integer
language plpgsql
stable
set search_path from current
as $$
declare
  v_half constant integer := p_policy.max_queued / 2;
  -- A row has 68 bytes or more.
  v_most integer := least(pg_relation_size('dispatch_inflight_jobs') / 68, 2147483647);
begin
  if p_policy.max_queued is null then
    return null;
  end if;
  -- Far from full, more may count as queued than is: what the table of slots can hold at all, so that nothing is counted; or
  -- all slots of the policy, so that running jobs are not looked for.
  if v_most > v_half then
    v_most := dispatch_slots_up_to(p_policy.policy_name, dispatch_counts_until(p_policy, p_now), v_half + 1);
  end if;
  if v_most > v_half then
    v_most := dispatch_queued(p_policy, p_now);
  end if;
  return greatest(p_policy.max_queued - v_most, 0);
end;
$$;
comment on function dispatch_queue_room(dispatch_policies, timestamptz) is 'How many more jobs of a policy may be queued; null where there is no bound. While it is less than half full, it may say too little.';

create or replace function dispatch_queue_is_full(p_policy dispatch_policies, p_now timestamptz)
returns boolean
language plpgsql
stable
set search_path from current
as $$
begin
  return p_policy.max_queued is not null
    and dispatch_slots_up_to(p_policy.policy_name, 'infinity', p_policy.max_queued) = p_policy.max_queued
    and dispatch_queue_room(p_policy, p_now) = 0;
end;
$$;
comment on function dispatch_queue_is_full(dispatch_policies, timestamptz) is 'Would a tick of a policy find no room in the queue? Mostly the number of slots tells.';

create or replace function dispatch_slots_up_to(p_policy text, p_until timestamptz, p_limit integer)
returns integer
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
  return (
    select count(*)
    from (
      select from dispatch_inflight_jobs where policy_name = p_policy and admitted_at <= p_until order by partition_id limit p_limit
    ) as slots
  );
end;
$$;
comment on function dispatch_slots_up_to(text, timestamptz, integer) is 'How many slots a policy''s jobs hold as of a time, counted up to a limit.';

create or replace function dispatch_budget(
  p_policy dispatch_policies, p_now timestamptz, out room integer, out jobs integer, out reason text, out scarce boolean
)
language plpgsql
stable
as $$
begin
  room := dispatch_queue_room(p_policy, p_now);
  jobs := room;
  reason := 'queue_full';
  if p_policy.tick_admission_budget < jobs or jobs is null then
    jobs := p_policy.tick_admission_budget;
    reason := 'budget_exhausted';
  end if;
  scarce := jobs < p_policy.max_queued - p_policy.max_queued / 2 or reason = 'budget_exhausted';
end;
$$;
comment on function dispatch_budget(dispatch_policies, timestamptz) is 'What the claims of the next tick of a policy have to share: the room in the queue, so many jobs (null: no limit), and the reason for those who get none. scarce = it is a budget, or less than half of the queue is free.';

-- What was deferred before goes before what is queued. So a tenant with much from before would go on overtaking those that came
-- later, however few are queued, as long as each tick hands over more of it.
create or replace function dispatch_overdue(
  p_policy dispatch_policies, p_above bigint, p_room integer, p_now timestamptz,
  out queue_names text[], out priorities integer[], out ids bigint[]
)
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set enable_sort = off
as $$
declare
  -- As many as are queued, lest workers run out of jobs while one is waited for; of a short queue some more.
  v_patience constant integer := greatest(p_policy.max_queued - p_room, least(p_policy.max_queued / 10, 100));
  v_until constant timestamptz := dispatch_counts_until(p_policy, p_now);
  v_since timestamptz;
  v_before timestamptz;
begin
  -- Mostly jobs are handed over in the order of their ids, and none has a higher one.
  select min(admitted_at) filter (where job_id > p_above) into v_since
  from dispatch_inflight_jobs
  where policy_name = p_policy.policy_name
    and admitted_at <= v_until;
  if v_since is not null then
    v_before := (
      select admitted_at
      from dispatch_admissions
      where policy_name = p_policy.policy_name
        and admitted_at > v_since
        and ending is null
      order by admitted_at desc
      offset v_patience
      limit 1
    );
  end if;
  if v_before is not null then
    select * into queue_names, priorities, ids from dispatch_startable(p_policy.policy_name, p_above, least(v_before, v_until), p_now);
  else
    ids := '{}';
  end if;
end;
$$;
comment on function dispatch_overdue(dispatch_policies, bigint, integer, timestamptz) is 'Of a policy''s jobs that wait in the queue though more others were handed over after them than are queued (by p_room, for how many there is room), the highest id of each queue and priority, where it is above p_above: what has a lower one waits until they have started.';

create or replace function dispatch_waits_for_queue(p_policy dispatch_policies, p_partition_id uuid, p_reason text, p_now timestamptz)
returns boolean
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $$
declare
  v_first bigint;
begin
  if p_policy.max_queued is null then
    return false;
  end if;
  if dispatch_queue_is_full(p_policy, p_now) then
    return true;
  end if;
  if p_reason = 'queue_full' then
    select id into v_first from dispatch_staged_jobs where partition_id = p_partition_id order by priority desc, eligible_at, id limit 1;
  end if;
  return v_first is not null and (dispatch_overdue(p_policy, v_first, dispatch_queue_room(p_policy, p_now), p_now)).ids <> '{}';
end;
$$;
comment on function dispatch_waits_for_queue(dispatch_policies, uuid, text, timestamptz) is 'Would a tick find no room for a partition that is due, or no job of it that may go before what is overdue? p_reason: why the last tick denied it.';

-- Ticks do not see what other ticks have handed off and not committed. So each announces how many it is about to hand off, by
-- a lock that keeps nobody out, and only then looks: at what others have announced, and in a later statement at what is
-- committed. Of two that announce at once, each sees the other; who ends in between is seen in one of the two looks. Who finds
-- no room beside the others takes its announcement back, lest all of them stand aside for each other.
create or replace function dispatch_take_room(p_policy dispatch_policies, p_jobs integer, p_now timestamptz)
returns integer
language plpgsql
set search_path from current
as $$
declare
  v_key constant integer := hashtext(concat_ws(' ', current_database(), 'dispatch_policies'::regclass::oid, p_policy.policy_name));
  v_jobs constant integer := least(p_jobs, 1048575);
  v_others integer;
  v_room integer;
begin
  if p_policy.max_queued is null or p_jobs = 0 then
    return p_jobs;
  end if;
  for v_try in 1 .. 3 loop
    begin
      -- The number, and above it a random one, lest two announcements of one transaction be one lock.
      perform pg_advisory_xact_lock_shared(v_key, floor(random() * 2048)::integer << 20 | v_jobs);
      select coalesce(sum(objid::bigint & 1048575), 0)
      into v_others
      from pg_locks
      where locktype = 'advisory'
        and classid = (v_key::bigint & 4294967295)::oid
        and objsubid = 2
        and pid is distinct from pg_backend_pid();
      v_room := dispatch_queue_room(p_policy, p_now) - v_others;
      if v_room > 0 then
        return least(v_jobs, v_room);
      end if;
      raise exception using errcode = 'UNDO0', message = 'the announcement is taken back';
    exception
      when sqlstate 'UNDO0' then
        exit when v_others = 0;
    end;
  end loop;
  return 0;
end;
$$;
comment on function dispatch_take_room(dispatch_policies, integer, timestamptz) is 'How many of p_jobs a tick may hand off, with what other ticks are about to hand off counted as queued.';

-- Who is due while the queue is full keeps its place: claimed and put off, it would come behind those that were due after it.
create or replace function dispatch_claim_none(p_policy dispatch_policies, p_shard text, p_now timestamptz)
returns dispatch_claim[]
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
begin
  return array(
    select dispatch_narrow(c, c.gate_state, 0, null, null, 'queue_full')
    from unnest(dispatch_to_claims(p_policy, array(
      select p
      from dispatch_partitions as p
      where p.id = any (array(
          select due.id
          from dispatch_partitions as due
          where due.policy_name = p_policy.policy_name
            and due.due_at <= p_now
            and (p_shard is null or due.shard = p_shard)
          order by due.due_at
          limit p_policy.partition_batch_size
        ))
        and (p.blocked_reason is distinct from 'queue_full' or exists (select from dispatch_pauses as pause where pause.id = p.id))
      for update skip locked
    ), p_now)) as c
    order by c.ordinal
  );
end;
$$;
comment on function dispatch_claim_none(dispatch_policies, text, timestamptz) is 'Of the partitions that the next tick would look at, those of which it is not written down yet that the queue is full, locked, as claims that are denied for it.';
