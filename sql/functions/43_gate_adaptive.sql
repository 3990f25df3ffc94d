-- Adaptive concurrency: a cap that each partition finds for itself, by additive increase and multiplicative decrease
-- (Chiu and Jain 1989; Jacobson 1988) on a moving average of the time that jobs wait from admission to start.
-- Invariants: folding many observations equals applying them one by one in the order they were made; a cap grows only while
-- at least half of it is in use, for of what was never in flight nothing is known.

create or replace function dispatch_aimd_step(
  p_current_max integer, p_ewma_lag_ms double precision, p_succeeded boolean, p_lag_ms double precision,
  p_target_lag_ms double precision, p_alpha double precision, p_failure_factor double precision, p_overload_factor double precision,
  p_min integer, p_max integer, p_in_flight integer,
  out current_max integer, out ewma_lag_ms double precision
)
language plpgsql
immutable
parallel safe
as $$
begin
  -- A float may not fade below its smallest value, so what is next to nothing counts as nothing.
  ewma_lag_ms := case when p_ewma_lag_ms < 1e-9 then 0 else p_ewma_lag_ms * (1 - p_alpha) end + p_alpha * p_lag_ms;
  current_max := case
    when not p_succeeded then floor(p_current_max * p_failure_factor)
    when ewma_lag_ms > p_target_lag_ms then floor(p_current_max * p_overload_factor)
    when p_in_flight < p_current_max / 2.0 then p_current_max
    else p_current_max + 1
  end;
  current_max := greatest(least(current_max, p_max), p_min);
end;
$$;
comment on function dispatch_aimd_step(integer, double precision, boolean, double precision, double precision, double precision, double precision, double precision, integer, integer, integer) is 'One observation: the moving average takes in the lag, then the cap is cut (failure, or average above target) or, if p_in_flight (the job itself among them) are at least half of it, grows by one; never below p_min nor above p_max (null: no top).';

create or replace function dispatch_aimd_steps(
  p_current_max integer, p_ewma_lag_ms double precision, p_observations dispatch_observation[],
  p_target_lag_ms double precision, p_alpha double precision, p_failure_factor double precision, p_overload_factor double precision,
  p_min integer, p_max integer,
  out current_max integer, out ewma_lag_ms double precision
)
language plpgsql
immutable
parallel safe
as $$
declare
  v_seen dispatch_observation;
begin
  current_max := p_current_max;
  ewma_lag_ms := p_ewma_lag_ms;
  foreach v_seen in array coalesce(p_observations, '{}') loop
    select step.current_max, step.ewma_lag_ms
    into current_max, ewma_lag_ms
    from dispatch_aimd_step(current_max, ewma_lag_ms, v_seen.succeeded, v_seen.lag_ms, p_target_lag_ms, p_alpha, p_failure_factor,
      p_overload_factor, p_min, p_max, v_seen.in_flight) as step;
  end loop;
end;
$$;
comment on function dispatch_aimd_steps(integer, double precision, dispatch_observation[], double precision, double precision, double precision, double precision, integer, integer) is 'Observations one after the other, each as in dispatch_aimd_step().';

create or replace function dispatch_aimd_params(p_params jsonb, p_gate text,
  out initial_max integer, out target_lag_ms double precision, out floor_max integer, out top_max integer,
  out alpha double precision, out failure_factor double precision, out overload_factor double precision)
language sql
immutable
parallel safe
begin atomic
  select
    least(greatest((p_params ->> (p_gate || '.initial_max'))::numeric, knob.lowest), knob.highest, 1e9)::integer,
    coalesce(nullif(greatest((p_params ->> (p_gate || '.target_lag_ms'))::numeric, 0), 0), 1000),
    least(knob.lowest, 1e9)::integer,
    least(knob.highest, 1e9)::integer,
    case when knob.alpha > 0 and knob.alpha <= 1 then greatest(knob.alpha, 1e-12) else 0.5 end,
    case when knob.failure_factor > 0 and knob.failure_factor < 1 then greatest(knob.failure_factor, 1e-12) else 0.5 end,
    case when knob.overload_factor > 0 and knob.overload_factor < 1 then greatest(knob.overload_factor, 1e-12) else 0.95 end
  from (
    select
      lowest,
      (p_params ->> (p_gate || '.ewma_alpha'))::numeric as alpha,
      (p_params ->> (p_gate || '.failure_decrease_factor'))::numeric as failure_factor,
      (p_params ->> (p_gate || '.overload_decrease_factor'))::numeric as overload_factor,
      case when p_params ->> (p_gate || '.max') is not null then greatest((p_params ->> (p_gate || '.max'))::numeric, lowest) end as highest
    from greatest((p_params ->> (p_gate || '.min'))::numeric, 1) as lowest
  ) as knob;
end;
comment on function dispatch_aimd_params(jsonb, text) is 'The knobs of an adaptive gate among resolved parameters, each brought into its range: a value looked up at tick time may be anything.';

create or replace function dispatch_adapts(p_gates jsonb)
returns boolean
language sql
immutable
parallel safe
return p_gates @? '$[*].type ? (@ == "adaptive_concurrency")';
comment on function dispatch_adapts(jsonb) is 'Is there a gate among these that learns from how jobs go?';

create or replace function dispatch_adaptive_cap(p_current_max integer, p_in_flight integer, p_initial_max integer, p_floor_max integer, p_top_max integer)
returns integer
language sql
immutable
parallel safe
return greatest(
  least(coalesce(p_current_max, p_initial_max), p_top_max),
  p_floor_max,
  case when p_in_flight = 0 then p_initial_max end
);
comment on function dispatch_adaptive_cap(integer, integer, integer, integer, integer) is 'The cap of a partition whose gate has come to p_current_max (null: has learned nothing yet). With nothing in flight it is at least initial_max, so that an idle partition leaves the floor.';

create or replace function dispatch_gate_adaptive_concurrency(p_claims dispatch_claim[], p_gate text, p_now timestamptz)
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
    select dispatch_narrow(
      c, c.gate_state,
      dispatch_adaptive_cap(stats.current_max, c.in_flight, knobs.initial_max, knobs.floor_max, knobs.top_max) - c.in_flight,
      p_now + dispatch_full_backoff(c.params, p_gate), null, 'concurrency_full')
    from unnest(p_claims) as c
    cross join lateral dispatch_aimd_params(c.params, p_gate) as knobs
    left join lateral (
      select current_max from dispatch_adaptive_stats where partition_id = c.partition_id and gate_name = p_gate limit 1
    ) as stats on true
    order by c.ordinal
  );
end;
$$;
comment on function dispatch_gate_adaptive_concurrency(dispatch_claim[], text, timestamptz) is 'Lets max(current_max, min) - in flight jobs pass; with nothing in flight at least initial_max, so that an idle partition leaves the floor.';

create or replace function dispatch_adapt(p_policy text, p_observations dispatch_observation[], p_now timestamptz)
returns void
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_nestloop = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_policy constant dispatch_policies := dispatch_only_lookups(dispatch_policy(p_policy), 'adaptive_concurrency');
  v_claims dispatch_claim[];
begin
  if not dispatch_adapts(v_policy.gates) then
    return;
  end if;
  v_claims := dispatch_resolve(v_policy, array(
    select dispatch_new_claim(v_policy, p, (row_number() over (order by p.id))::integer)
    from dispatch_partitions as p
    where p.id = any (array(select distinct partition_id from unnest(p_observations)))
    order by p.id
  ), p_now);

  with seen as (
    select
      o.partition_id,
      array_agg(row(o.partition_id, o.succeeded, o.lag_ms, o.in_flight)::dispatch_observation order by o.ordinality) as observations
    from unnest(p_observations) with ordinality as o
    group by o.partition_id
  ), learned as (
    insert into dispatch_adaptive_stats as known (partition_id, gate_name, current_max, ewma_lag_ms, sample_count, updated_at)
    select c.partition_id, gate.name, steps.current_max, steps.ewma_lag_ms, coalesce(stats.sample_count, 0) + cardinality(seen.observations), p_now
    from unnest(v_claims) as c
    join seen on seen.partition_id = c.partition_id
    cross join lateral (
      select gate ->> 'name' as name from jsonb_array_elements(v_policy.gates) as gate where gate ->> 'type' = 'adaptive_concurrency'
    ) as gate
    cross join lateral dispatch_aimd_params(c.params, gate.name) as knobs
    left join lateral (
      select * from dispatch_adaptive_stats where partition_id = c.partition_id and gate_name = gate.name limit 1
    ) as stats on true
    cross join lateral dispatch_aimd_steps(coalesce(stats.current_max, knobs.initial_max), coalesce(stats.ewma_lag_ms, 0),
      seen.observations, knobs.target_lag_ms, knobs.alpha, knobs.failure_factor, knobs.overload_factor, knobs.floor_max, knobs.top_max) as steps
    on conflict on constraint dispatch_adaptive_stats_pkey do update
    set (current_max, ewma_lag_ms, sample_count, updated_at)
      = (excluded.current_max, excluded.ewma_lag_ms, excluded.sample_count, excluded.updated_at)
    returning known.partition_id, known.gate_name, known.current_max, known.ewma_lag_ms
  ), samples as (
    insert into dispatch_adaptive_samples (partition_id, gate_name, minute, current_max, ewma_lag_ms)
    select partition_id, gate_name, date_trunc('minute', p_now), current_max, ewma_lag_ms
    from learned
    on conflict on constraint dispatch_adaptive_samples_pkey do nothing
    returning partition_id, gate_name
  )
  delete from dispatch_adaptive_samples as old
  using samples
  cross join lateral (
    select ctid as place
    from dispatch_adaptive_samples
    where partition_id = samples.partition_id
      and gate_name = samples.gate_name
      and minute < p_now - interval '1 hour'
  ) as past
  where old.ctid = past.place;
end;
$$;
comment on function dispatch_adapt(text, dispatch_observation[], timestamptz) is 'Folds observations, in the order given, into the adaptive gates'' statistics of their partitions. Keeps what a gate has come to, once a minute, and forgets what is older than an hour.';
