-- Foresight: what the next tick would decide, and when the tokens and slots for a job would be there.
-- Invariants: nothing is written or locked, so it runs in a read-only transaction; the gates are asked by the tick's own
-- functions, for the partition as the tick's fold would leave it; however long the backlog, at most 10,000 jobs and notes
-- are looked at.

create or replace function dispatch_unfolded(p_policy text, p_partition_id uuid default null)
returns setof dispatch_inbox
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
begin
  return query
    select next.*
    from (
      select * from dispatch_inbox as i where i.policy_name = p_policy and not i.put_off order by i.id limit 10000
    ) as next
    where p_partition_id is null or next.partition_id = p_partition_id;
end;
$$;
comment on function dispatch_unfolded(text, uuid) is 'The notes that the next fold of a policy takes, or those of them that are about one partition.';

create or replace function dispatch_as_folded(p_policy dispatch_policies, p_only uuid, p_now timestamptz)
returns setof dispatch_partitions
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_notes constant dispatch_inbox[] := array(select note from dispatch_unfolded(p_policy.policy_name, p_only) as note);
begin
  return query
    with sums as materialized (
      select * from dispatch_sum_notes(v_notes)
    ), wanted as (
      select p_only as id where p_only is not null
      union
      select partition_id from sums
      union
      select due.id
      from (
        select p.id
        from dispatch_partitions as p
        where p.policy_name = p_policy.policy_name
          and p.due_at <= p_now
          and p_only is null
        order by p.due_at
        limit p_policy.partition_batch_size
      ) as due
    )
    select folded.*
    from wanted
    left join sums on sums.partition_id = wanted.id
    left join lateral (
      select p as row, p.* from dispatch_partitions as p where p.id = wanted.id limit 1
    ) as known on true
    cross join lateral dispatch_still_blocked(known.blocked_until, known.blocked_after_finish, sums.any_finished,
      sums.any_resumed or (sums.newest_id > known.newest_id and sums.context <> known.context)) as still_blocked_until
    cross join lateral jsonb_populate_record(known.row, case
      when sums.partition_id is null then '{}'
      when known.id is null then jsonb_build_object(
        'id', wanted.id, 'policy_name', p_policy.policy_name, 'partition_key', sums.partition_key, 'shard', sums.shard,
        'context', sums.context, 'newest_id', sums.newest_id, 'pending_count', sums.jobs, 'due_at', sums.due_at,
        'in_flight_count', (
          select count(*)
          from dispatch_inflight_jobs as slot
          where slot.policy_name = p_policy.policy_name
            and slot.partition_id = wanted.id
        ),
        'first_seen_at', p_now, 'gate_state', '{}'::jsonb, 'total_admitted', 0, 'decayed_admits', 0)
      else jsonb_build_object(
        'pending_count', known.pending_count + sums.jobs,
        'in_flight_count', known.in_flight_count + sums.slots,
        'newest_id', greatest(known.newest_id, sums.newest_id),
        'context', case when sums.newest_id > known.newest_id then sums.context else known.context end,
        'blocked_until', still_blocked_until,
        'due_at', dispatch_due_with_notes(known.due_at, known.blocked_until, still_blocked_until, sums.due_at, sums.any_resumed, p_now))
    end) as folded
    where known.id is not null or sums.partition_key is not null;
end;
$$;
comment on function dispatch_as_folded(dispatch_policies, uuid, timestamptz) is 'One partition as the next dispatch_fold() would leave it; with a null, those that the next tick may claim. A later note than the next 10,000 is not seen.';

create or replace function dispatch_observations(p_policy text, p_only uuid)
returns table (partition_id uuid, observations dispatch_observation[])
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
declare
  v_notes constant dispatch_inbox[] := array(select note from dispatch_unfolded(p_policy, p_only) as note);
begin
  return query
    select o.partition_id, array_agg(row(o.partition_id, o.succeeded, o.lag_ms, o.in_flight)::dispatch_observation order by o.ordinality)
    from unnest(dispatch_to_observations(v_notes, array(
      select p from dispatch_partitions as p where p.id = any (array(select distinct note.partition_id from unnest(v_notes) as note))
    ))) with ordinality as o
    group by o.partition_id;
end;
$$;
comment on function dispatch_observations(text, uuid) is 'What adaptive gates learn at the next fold, of one partition or (null) of all.';

create or replace function dispatch_as_learned(p_claim dispatch_claim, p_gate text, p_observations dispatch_observation[], p_now timestamptz)
returns dispatch_adaptive_stats
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
declare
  v_knobs record;
  v_stats dispatch_adaptive_stats;
  v_learned record;
begin
  select * into v_knobs from dispatch_aimd_params((p_claim).params, p_gate);
  select * into v_stats from dispatch_adaptive_stats where partition_id = (p_claim).partition_id and gate_name = p_gate;
  if not found then
    v_stats := row((p_claim).partition_id, p_gate, v_knobs.initial_max, 0, 0, p_now)::dispatch_adaptive_stats;
  end if;
  v_learned := dispatch_aimd_steps(v_stats.current_max, v_stats.ewma_lag_ms, p_observations, v_knobs.target_lag_ms, v_knobs.alpha,
    v_knobs.failure_factor, v_knobs.overload_factor, v_knobs.floor_max, v_knobs.top_max);
  v_stats.current_max := v_learned.current_max;
  v_stats.ewma_lag_ms := v_learned.ewma_lag_ms;
  v_stats.sample_count := v_stats.sample_count + coalesce(cardinality(p_observations), 0);
  return v_stats;
end;
$$;
comment on function dispatch_as_learned(dispatch_claim, text, dispatch_observation[], timestamptz) is 'What an adaptive gate will know of a partition once it has learned from some observations.';

create or replace function dispatch_foresee_claim(p_policy dispatch_policies, p_partition dispatch_partitions, p_now timestamptz)
returns dispatch_claim
language plpgsql
stable
as $$
declare
  v_claim dispatch_claim := dispatch_new_claim(p_policy, p_partition, 1);
begin
  v_claim.allowed := 2147483647;
  return (dispatch_resolve(p_policy, array[v_claim], p_now))[1];
end;
$$;
comment on function dispatch_foresee_claim(dispatch_policies, dispatch_partitions, timestamptz) is 'A partition as its gates are asked about it, each by itself: with its limits looked up, and as if no other held anything back.';

create or replace function dispatch_foresee_gate(p_policy text, p_gate jsonb, p_claims dispatch_claim[], p_now timestamptz)
returns dispatch_claim[]
language plpgsql
stable
set search_path from current
as $$
declare
  v_name constant text := p_gate ->> 'name';
begin
  if p_gate ->> 'type' <> 'adaptive_concurrency' then
    return dispatch_pass_gates(jsonb_build_array(p_gate), p_claims, p_now);
  end if;
  return array(
    select case
      when c.reason is not null then c
      else dispatch_narrow(c, c.gate_state,
        dispatch_adaptive_cap((dispatch_as_learned(c, v_name, seen.observations, p_now)).current_max, c.in_flight,
          knobs.initial_max, knobs.floor_max, knobs.top_max) - c.in_flight,
        p_now + dispatch_full_backoff(c.params, v_name), null, 'concurrency_full')
    end
    from unnest(p_claims) as c
    cross join lateral dispatch_aimd_params(c.params, v_name) as knobs
    left join dispatch_observations(p_policy, case when cardinality(p_claims) = 1 then p_claims[1].partition_id end) as seen
      on seen.partition_id = c.partition_id
    order by c.ordinal
  );
end;
$$;
comment on function dispatch_foresee_gate(text, jsonb, dispatch_claim[], timestamptz) is 'The claims after one gate, which has learned from the notes that are not folded yet.';

create or replace function dispatch_foresee_budget(p_policy dispatch_policies, p_partition_id uuid, p_now timestamptz)
returns integer
language plpgsql
stable
set search_path from current
as $$
declare
  v_budget constant record := dispatch_budget(p_policy, p_now);
  v_claims dispatch_claim[];
  v_gate jsonb;
begin
  if v_budget.jobs = 0 then
    return 0;
  end if;
  v_claims := dispatch_resolve(p_policy, dispatch_to_claims(p_policy, array(
    select folded
    from dispatch_as_folded(p_policy, null, p_now) as folded
    where folded.due_at <= p_now
    order by folded.due_at
    limit p_policy.partition_batch_size
  ), p_now), p_now);
  for v_gate in select jsonb_array_elements(p_policy.gates) loop
    v_claims := dispatch_foresee_gate(p_policy.policy_name, v_gate, v_claims, p_now);
  end loop;
  return (
    select c.allowed
    from unnest(dispatch_share_budget(p_policy, v_claims, v_budget.jobs, v_budget.reason, p_now)) as c
    where c.partition_id = p_partition_id
  );
end;
$$;
comment on function dispatch_foresee_budget(dispatch_policies, uuid, timestamptz) is 'How many jobs the next tick lets a partition have of its budget and of the room in the queue; null when it does not come to the partition.';

create or replace function dispatch_due_before(p_policy dispatch_policies, p_partition dispatch_partitions, p_now timestamptz)
returns bigint
language plpgsql
stable
as $$
begin
  return (select count(*) from dispatch_as_folded(p_policy, null, p_now) as folded where folded.due_at < p_partition.due_at);
end;
$$;
comment on function dispatch_due_before(dispatch_policies, dispatch_partitions, timestamptz) is 'How many partitions are due before one: all, or at least as many as the next tick takes up.';

create or replace function dispatch_jobs_before(p_job dispatch_staged_jobs, p_until timestamptz)
returns integer
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set enable_sort = off
as $$
declare
  v_priority integer;
  v_before integer := 0;
begin
  select s.priority into v_priority from dispatch_staged_jobs as s where s.partition_id = p_job.partition_id order by s.priority desc limit 1;
  for v_look in 1 .. 10000 loop
    exit when v_priority is null or v_priority <= p_job.priority or v_before = 10000;
    v_before := v_before + (
      select count(*)
      from (
        select
        from dispatch_staged_jobs as s
        where s.partition_id = p_job.partition_id
          and s.priority = v_priority
          and s.eligible_at <= p_until
        order by s.eligible_at
        limit 10000 - v_before
      ) as before
    );
    select s.priority into v_priority
    from dispatch_staged_jobs as s
    where s.partition_id = p_job.partition_id
      and s.priority < v_priority
    order by s.priority desc
    limit 1;
  end loop;
  return v_before + (
    select count(*)
    from (
      select
      from dispatch_staged_jobs as s
      where s.partition_id = p_job.partition_id
        and s.priority = p_job.priority
        and (s.eligible_at, s.id) < (p_job.eligible_at, p_job.id)
        and s.eligible_at <= p_until
      order by s.eligible_at, s.id
      limit 10000 - v_before
    ) as before
  );
end;
$$;
comment on function dispatch_jobs_before(dispatch_staged_jobs, timestamptz) is 'How many jobs go before one, of those that are eligible by a time: 10000 stands for that many or more.';

create or replace function dispatch_jobs_earlier(p_job dispatch_staged_jobs)
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
  return least(10000, (
    select count(*)
    from (
      select from dispatch_staged_jobs as s where s.partition_id = p_job.partition_id and s.eligible_at < p_job.eligible_at limit 10000
    ) as earlier
  ) + (
    select count(*)
    from (
      select s.priority, s.id from dispatch_staged_jobs as s where s.partition_id = p_job.partition_id and s.eligible_at = p_job.eligible_at limit 10000
    ) as same
    where same.priority > p_job.priority or (same.priority = p_job.priority and same.id < p_job.id)
  ));
end;
$$;
comment on function dispatch_jobs_earlier(dispatch_staged_jobs) is 'How many jobs are shown before one that is not eligible yet: 10000 stands for that many or more.';

create or replace function dispatch_nth_token(p_claim dispatch_claim, p_gates text[], p_jobs integer, p_now timestamptz)
returns timestamptz
language plpgsql
stable
as $$
declare
  v_steps constant integer := least(p_jobs, 1000);
  v_begin constant numeric := extract(epoch from p_now);
  v_now numeric := v_begin;
  v_next numeric;
  v_rates numeric[] := '{}';
  v_pers numeric[] := '{}';
  v_capacities numeric[] := '{}';
  v_tokens numeric[] := '{}';
  v_times numeric[] := '{}';
  v_gate text;
  v_slowest numeric := 0;
begin
  foreach v_gate in array p_gates loop
    v_rates := v_rates || ((p_claim).params ->> (v_gate || '.rate'))::numeric;
    v_pers := v_pers || ((p_claim).params ->> (v_gate || '.per'))::numeric;
    v_capacities := v_capacities || dispatch_capacity(
      ((p_claim).params ->> (v_gate || '.rate'))::numeric, ((p_claim).params ->> (v_gate || '.burst'))::numeric);
    v_tokens := v_tokens || ((p_claim).gate_state -> v_gate ->> 'tokens')::numeric;
    v_times := v_times || ((p_claim).gate_state -> v_gate ->> 'at')::numeric;
  end loop;

  -- A single bucket never runs over while jobs wait for it, so its tokens come evenly. Only one that holds a single token loses
  -- what a microsecond's rounding up leaves beside it.
  if cardinality(p_gates) = 1 then
    v_tokens[1] := dispatch_refill(v_tokens[1], v_now - v_times[1], v_rates[1], v_pers[1], v_capacities[1]);
    v_next := case
      when v_capacities[1] = 1 then
        dispatch_seconds_to_token(v_tokens[1], v_rates[1], v_pers[1]) + (p_jobs - 1) * dispatch_seconds_to_token(0, v_rates[1], v_pers[1])
      else dispatch_seconds_to_token(v_tokens[1] - (p_jobs - 1), v_rates[1], v_pers[1])
    end;
    v_now := v_now + v_next + case when v_next > 0 then greatest(v_times[1] - v_now, 0) else 0 end;
  else
    for v_step in 1 .. v_steps loop
      v_next := v_now;
      for v_i in 1 .. cardinality(p_gates) loop
        v_tokens[v_i] := dispatch_refill(v_tokens[v_i], v_now - v_times[v_i], v_rates[v_i], v_pers[v_i], v_capacities[v_i]);
        v_times[v_i] := greatest(v_times[v_i], v_now);
        if dispatch_whole_tokens(v_tokens[v_i]) < 1 then
          v_next := greatest(v_next, v_times[v_i] + dispatch_seconds_to_token(v_tokens[v_i], v_rates[v_i], v_pers[v_i]));
        end if;
      end loop;
      v_now := v_next;
      for v_i in 1 .. cardinality(p_gates) loop
        v_tokens[v_i] := dispatch_refill(v_tokens[v_i], v_now - v_times[v_i], v_rates[v_i], v_pers[v_i], v_capacities[v_i]) - 1;
        v_times[v_i] := greatest(v_times[v_i], v_now);
        v_slowest := greatest(v_slowest, v_pers[v_i] / v_rates[v_i]);
      end loop;
    end loop;
    v_now := v_now + (p_jobs - v_steps) * v_slowest;
  end if;
  if v_now - v_begin > 3155760000 then
    return null;
  end if;
  return p_now + make_interval(secs => (v_now - v_begin)::double precision);
end;
$$;
comment on function dispatch_nth_token(dispatch_claim, text[], integer, timestamptz) is 'When the n-th job from now on finds a whole token in each of some buckets, if all before it take theirs as they come: exact for one bucket, and for several up to the thousandth job. Null for more than a hundred years.';

-- For throttles the time follows from arithmetic. Jobs that come to stand before it until then, because they are scheduled
-- and of a higher priority, put it off, until none does any more.
create or replace function dispatch_foresee_tokens(p_job dispatch_staged_jobs, p_claim dispatch_claim, p_gates text[], p_earlier integer, p_now timestamptz)
returns timestamptz
language plpgsql
stable
set search_path from current
as $$
declare
  v_ready_at constant timestamptz := greatest(p_job.eligible_at, p_now);
  v_gone integer := 0;
  v_last integer := p_earlier;
  v_middle integer;
  v_before integer;
  v_at timestamptz;
begin
  -- As long as it is not eligible, those that are shown before it go, as far as there are tokens for them.
  if p_job.eligible_at > p_now then
    while v_gone < v_last loop
      v_middle := (v_gone + v_last + 1) / 2;
      if dispatch_nth_token(p_claim, p_gates, v_middle, p_now) <= p_job.eligible_at then
        v_gone := v_middle;
      else
        v_last := v_middle - 1;
      end if;
    end loop;
  end if;

  v_before := greatest(v_gone, dispatch_jobs_before(p_job, v_ready_at));
  for v_try in 1 .. 20 loop
    v_at := greatest(v_ready_at, dispatch_nth_token(p_claim, p_gates, v_before + 1, p_now));
    exit when v_at is null or dispatch_jobs_before(p_job, v_at) <= v_before;
    v_before := dispatch_jobs_before(p_job, v_at);
  end loop;
  return v_at;
end;
$$;
comment on function dispatch_foresee_tokens(dispatch_staged_jobs, dispatch_claim, text[], integer, timestamptz) is 'When a job finds its token in each of some buckets. p_earlier jobs are shown before it.';

create or replace function dispatch_admission_rate(p_policy dispatch_policies, p_partition dispatch_partitions, p_now timestamptz)
returns double precision
language plpgsql
immutable
parallel safe
as $$
declare
  v_age constant double precision := extract(epoch from p_now - p_partition.first_seen_at);
  v_decayed constant double precision := dispatch_decay(p_partition.decayed_admits,
    extract(epoch from p_now - p_partition.decayed_at)::double precision, p_policy.half_life);
begin
  if p_policy.half_life is null or v_decayed < 1 or v_age < p_policy.half_life then
    return null;
  end if;
  return v_decayed * ln(2) / p_policy.half_life / (1 - dispatch_decay(1, v_age, p_policy.half_life));
end;
$$;
comment on function dispatch_admission_rate(dispatch_policies, dispatch_partitions, timestamptz) is 'Jobs a second that a partition was admitted lately, from decayed_admits; null where that is less than a job, or the partition is younger than a half_life.';

create or replace function dispatch_foresee_slot(p_place integer, p_allowed integer, p_rate double precision, p_now timestamptz)
returns timestamptz
language sql
stable
parallel safe
return case
  when p_allowed >= p_place then p_now
  when p_rate > 0 then p_now + make_interval(secs => least((p_place - p_allowed) / p_rate, 3155760000))
end;
comment on function dispatch_foresee_slot(integer, integer, double precision, timestamptz) is 'About when the job at a place finds a slot, of which p_allowed are there and others come free at a rate of jobs a second; null where none is known.';
