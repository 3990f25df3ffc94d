-- Admission up to the hand-off: claim the due partitions, pass the gates, share the budget, pick the jobs.
-- Invariants: a claimed partition's row is locked until the tick commits, so no other tick decides for it; the claim reads
-- one index in due order, so the longest waiting comes first; jobs are picked in (priority desc, eligible_at, id), read
-- from the index of that order. Nothing is written here but by the fold, with which a tick begins. Planner settings are
-- pinned as in 30_inbox.sql.

create or replace function dispatch_lock_due(p_policy dispatch_policies, p_shard text, p_now timestamptz)
returns setof dispatch_partitions
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
  if p_shard is null or p_shard = 'default' then
    return query
      select *
      from dispatch_partitions
      where policy_name = p_policy.policy_name
        and due_at <= p_now
        and (p_shard is null or shard = p_shard)
      order by due_at
      limit p_policy.partition_batch_size
      for update skip locked;
  else
    return query
      select *
      from dispatch_partitions
      where policy_name = p_policy.policy_name
        and shard = p_shard
        and shard <> 'default'
        and due_at <= p_now
      order by due_at
      limit p_policy.partition_batch_size
      for update skip locked;
  end if;
end;
$$;
comment on function dispatch_lock_due(dispatch_policies, text, timestamptz) is 'Locks the partitions that are due longest, up to partition_batch_size; those that another tick holds are left to it.';

create or replace function dispatch_new_claim(p_policy dispatch_policies, p_partition dispatch_partitions, p_ordinal integer)
returns dispatch_claim
language plpgsql
immutable
parallel safe
as $$
begin
  return row(p_ordinal, p_partition.id, p_partition.partition_key, p_partition.context, p_policy.literals, p_partition.gate_state,
    p_partition.in_flight_count, p_policy.admission_batch_size, null, null, null)::dispatch_claim;
end;
$$;
comment on function dispatch_new_claim(dispatch_policies, dispatch_partitions, integer) is 'A partition as a claim that no gate has seen yet.';

create or replace function dispatch_to_claims(p_policy dispatch_policies, p_partitions dispatch_partitions[], p_now timestamptz)
returns dispatch_claim[]
language plpgsql
stable
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
    select case
      when pause.id is not null then dispatch_narrow(claim, (claim).gate_state, 0, 'infinity', 'infinity', 'paused')
      else claim
    end
    from (
      select
        id,
        dispatch_new_claim(p_policy, p, row_number() over (
          order by
            case when p_policy.half_life is not null then
              dispatch_decay(p.decayed_admits, extract(epoch from p_now - p.decayed_at)::double precision, p_policy.half_life)
            end,
            p.due_at, p.last_admitted_at nulls first, p.id
        )::integer) as claim
      from unnest(p_partitions) as p
    ) as claims
    left join lateral (
      select id from dispatch_pauses where id = claims.id limit 1
    ) as pause on true
    order by (claim).ordinal
  );
end;
$$;
comment on function dispatch_to_claims(dispatch_policies, dispatch_partitions[], timestamptz) is 'Partitions as claims, the least recently served first; those that are paused are denied already.';

-- The ready jobs of a partition in order. Where jobs of a higher priority wait for their time, they stand in front of the
-- ready ones in the index. So the ready ones are read by their time, and put in order, if they are few. Of more, those of the
-- first priorities are read priority by priority, each only up to now; behind these the index is read as it is.
create or replace function dispatch_pick_ready(p_partition_id uuid, p_now timestamptz, p_limit integer)
returns table (id bigint, place tid, contested boolean)
language plpgsql
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
  v_few constant integer := 1000;
  v_ready tid[];
  v_priority integer;
  v_left integer := p_limit;
  v_found integer;
  v_looks integer := 0;
begin
  v_ready := array(
    select s.ctid
    from dispatch_staged_jobs as s
    where s.partition_id = p_partition_id
      and s.eligible_at <= p_now
    order by s.eligible_at
    limit v_few + 1
  );
  if cardinality(v_ready) <= v_few then
    return query
      select s.id, s.ctid, s.parked or s.queueing_lock is not null
      from dispatch_staged_jobs as s
      where s.ctid = any (v_ready)
        and s.partition_id = p_partition_id
        and s.eligible_at <= p_now
      order by s.priority desc, s.eligible_at, s.id
      limit v_left
      for update skip locked;
    return;
  end if;

  select s.priority into v_priority from dispatch_staged_jobs as s where s.partition_id = p_partition_id order by s.priority desc limit 1;
  while v_priority is not null and v_left > 0 and v_looks < 100 loop
    return query
      select s.id, s.ctid, s.parked or s.queueing_lock is not null
      from dispatch_staged_jobs as s
      where s.partition_id = p_partition_id
        and s.priority = v_priority
        and s.eligible_at <= p_now
      order by s.eligible_at, s.id
      limit v_left
      for update skip locked;
    get diagnostics v_found = row_count;
    v_left := v_left - v_found;
    v_looks := v_looks + 1;
    select s.priority into v_priority
    from dispatch_staged_jobs as s
    where s.partition_id = p_partition_id
      and s.priority < v_priority
    order by s.priority desc
    limit 1;
  end loop;
  if v_priority is not null and v_left > 0 then
    return query
      select s.id, s.ctid, s.parked or s.queueing_lock is not null
      from dispatch_staged_jobs as s
      where s.partition_id = p_partition_id
        and s.priority <= v_priority
        and s.eligible_at <= p_now
      order by s.priority desc, s.eligible_at, s.id
      limit v_left
      for update skip locked;
  end if;
end;
$$;
comment on function dispatch_pick_ready(uuid, timestamptz, integer) is 'Locks the first p_limit ready jobs of a partition some of whose jobs are not ready yet.';

-- Across partitions the batch is interleaved, one each in fairness order, then the second each, and so on.
create or replace function dispatch_pick(
  p_claims dispatch_claim[], p_now timestamptz, out ids bigint[], out places tid[], out ordinals integer[], out contested bigint[]
)
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set enable_sort = off
as $$
begin
  with claims as materialized (
    select
      c.ordinal, c.partition_id, c.allowed,
      (
        select true
        from dispatch_staged_jobs as s
        where s.partition_id = c.partition_id
          and s.eligible_at > p_now
        order by s.eligible_at
        limit 1
      ) as some_wait
    from unnest(p_claims) as c
    where c.allowed > 0
  ), picked as (
    select claims.ordinal, jobs.id, jobs.place, jobs.contested, jobs.turn
    from claims
    cross join lateral (
      select ready.*, row_number() over () as turn
      from (
        select s.id, s.ctid as place, s.parked or s.queueing_lock is not null as contested
        from dispatch_staged_jobs as s
        where s.partition_id = claims.partition_id
        order by s.priority desc, s.eligible_at, s.id
        limit claims.allowed
        for update skip locked
      ) as ready
    ) as jobs
    where claims.some_wait is null
    union all
    select claims.ordinal, jobs.id, jobs.place, jobs.contested, jobs.turn
    from claims
    cross join lateral dispatch_pick_ready(claims.partition_id, p_now, claims.allowed) with ordinality as jobs (id, place, contested, turn)
    where claims.some_wait
  )
  select
    coalesce(array_agg(picked.id), '{}'),
    coalesce(array_agg(picked.place), '{}'),
    coalesce(array_agg(ordinal), '{}'),
    coalesce(array_agg(picked.id) filter (where picked.contested), '{}')
  into ids, places, ordinals, contested
  from (select * from picked order by turn, ordinal) as picked;
end;
$$;
comment on function dispatch_pick(dispatch_claim[], timestamptz) is 'Locks the jobs that the claims allow and returns their ids in hand-off order, beside where their rows are and the ordinals of their claims; and which of the ids are contested: parked retries, and jobs with a queueing lock.';

create or replace function dispatch_cut(p_handoff dispatch_handoffs, p_kept boolean[])
returns dispatch_handoffs
language plpgsql
immutable
parallel safe
as $$
declare
  v_left integer[];
begin
  select
    coalesce(array_agg(id order by turn) filter (where kept), '{}'),
    coalesce(array_agg(place order by turn) filter (where kept), '{}'),
    coalesce(array_agg(ordinal order by turn) filter (where kept), '{}'),
    coalesce(array_agg(distinct ordinal) filter (where not kept), '{}')
  into p_handoff.staged_ids, p_handoff.places, p_handoff.ordinals, v_left
  from unnest(p_handoff.staged_ids, p_handoff.places, p_handoff.ordinals, p_kept) with ordinality as jobs (id, place, ordinal, kept, turn);
  p_handoff.contested_ids := array(select unnest(p_handoff.contested_ids) intersect select unnest(p_handoff.staged_ids));
  p_handoff.claims := array(
    select case
      when c.ordinal = any (v_left) then
        dispatch_narrow(c, c.gate_state, (select count(*) from unnest(p_handoff.ordinals) as ordinal where ordinal = c.ordinal),
          p_handoff.decided_at, p_handoff.decided_at, 'queue_full')
      else c
    end
    from unnest(p_handoff.claims) as c
    order by c.ordinal
  );
  return p_handoff;
end;
$$;
comment on function dispatch_cut(dispatch_handoffs, boolean[]) is 'A hand-off of only those of its jobs, in their order, that p_kept says.';

create or replace function dispatch_cut_overtakers(p_policy dispatch_policies, p_handoff dispatch_handoffs, p_room integer)
returns dispatch_handoffs
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_overdue record;
  v_kept boolean[];
begin
  if p_policy.max_queued is null or p_handoff.staged_ids = '{}' then
    return p_handoff;
  end if;
  v_overdue := dispatch_overdue(p_policy, (select min(id) from unnest(p_handoff.staged_ids) as id), p_room, p_handoff.decided_at);
  if v_overdue.ids = '{}' then
    return p_handoff;
  end if;
  v_kept := array(
    select not exists (
      select
      from unnest(v_overdue.queue_names, v_overdue.priorities, v_overdue.ids) as overdue (queue_name, priority, id)
      where overdue.queue_name = job.queue_name
        and overdue.priority = job.priority
        and overdue.id > job.id
    )
    from unnest(p_handoff.places) with ordinality as picked (place, turn)
    cross join lateral (
      select s.id, s.queue_name, s.priority from dispatch_staged_jobs as s where s.ctid = picked.place
    ) as job
    order by picked.turn
  );
  return dispatch_cut(p_handoff, v_kept);
end;
$$;
comment on function dispatch_cut_overtakers(dispatch_policies, dispatch_handoffs, integer) is 'A hand-off without the jobs that would go before one that is overdue in the queue, in which there is p_room.';

create or replace function dispatch_decide(p_policy dispatch_policies, p_shard text)
returns dispatch_handoffs
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
as $$
declare
  v_handoff dispatch_handoffs;
  v_budget record;
  v_jobs integer;
begin
  v_handoff.policy_name := p_policy.policy_name;
  v_handoff.shard := p_shard;
  v_handoff.started_at := clock_timestamp();
  v_handoff.decided_at := dispatch_now();
  v_handoff.claims := '{}';
  v_handoff.staged_ids := '{}';
  v_handoff.places := '{}';
  v_handoff.ordinals := '{}';
  v_handoff.contested_ids := '{}';

  perform dispatch_fold(p_policy.policy_name, v_handoff.decided_at);
  if exists (select from dispatch_pauses where id = dispatch_partition_id(p_policy.policy_name, null)) then
    return v_handoff;
  end if;

  v_budget := dispatch_budget(p_policy, v_handoff.decided_at);
  if v_budget.jobs = 0 then
    v_handoff.claims := dispatch_claim_none(p_policy, p_shard, v_handoff.decided_at);
    return v_handoff;
  end if;
  v_handoff.claims := dispatch_to_claims(p_policy,
    array(select p from dispatch_lock_due(p_policy, p_shard, v_handoff.decided_at) as p), v_handoff.decided_at);
  if v_handoff.claims <> '{}' then
    v_handoff.decided_at := dispatch_now();
    v_handoff.claims := dispatch_pass_gates(p_policy.gates,
      dispatch_resolve(p_policy, v_handoff.claims, v_handoff.decided_at), v_handoff.decided_at);
    -- Where nobody weighs more than others, cutting off in turns what is too much comes to the same, and seldom has to be done.
    if v_budget.scarce or p_policy.literals -> 'fairness.weight' is distinct from '1' then
      v_handoff.claims := dispatch_share_budget(p_policy, v_handoff.claims, v_budget.jobs, v_budget.reason, v_handoff.decided_at);
    end if;
    select ids, places, ordinals, contested
    into v_handoff.staged_ids, v_handoff.places, v_handoff.ordinals, v_handoff.contested_ids
    from dispatch_pick(v_handoff.claims, v_handoff.decided_at);
    v_handoff := dispatch_cut_overtakers(p_policy, v_handoff, v_budget.room);
    v_jobs := dispatch_take_room(p_policy, cardinality(v_handoff.staged_ids), v_handoff.decided_at);
    if v_jobs < cardinality(v_handoff.staged_ids) then
      -- Other ticks have taken the room for the rest.
      v_handoff := dispatch_cut(v_handoff, array(select turn <= v_jobs from generate_series(1, cardinality(v_handoff.staged_ids)) as turn));
    end if;
  end if;
  return v_handoff;
end;
$$;
comment on function dispatch_decide(dispatch_policies, text) is 'One tick of a policy up to the hand-off: what is claimed, what the gates say, which jobs are to go. The clock is read once the claims are locked.';
