-- Adaptive concurrency: a cap that each partition finds for itself, by additive increase and multiplicative decrease
-- (Chiu and Jain 1989; Jacobson 1988) on a moving average of the time that jobs wait from admission to start.
-- Invariant: folding many observations equals applying them one by one in the order they were made.

create or replace function dispatch_aimd_step(
  p_current_max integer, p_ewma_lag_ms double precision, p_succeeded boolean, p_lag_ms double precision,
  p_target_lag_ms double precision, p_alpha double precision, p_failure_factor double precision, p_overload_factor double precision,
  p_min integer, p_max integer,
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
    else p_current_max + 1
  end;
  current_max := greatest(least(current_max, p_max), p_min);
end;
$$;
comment on function dispatch_aimd_step(integer, double precision, boolean, double precision, double precision, double precision, double precision, double precision, integer, integer) is 'One observation: the moving average takes in the lag, then the cap is cut (failure, or average above target) or grows by one; never below p_min nor above p_max (null: no top).';

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

create or replace function dispatch_sample_adaptive(p_partition_id uuid, p_gate text, p_current_max integer, p_ewma_lag_ms double precision, p_now timestamptz)
returns void
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
begin
  insert into dispatch_adaptive_samples (partition_id, gate_name, minute, current_max, ewma_lag_ms)
  values (p_partition_id, p_gate, date_trunc('minute', p_now), p_current_max, p_ewma_lag_ms)
  on conflict on constraint dispatch_adaptive_samples_pkey do nothing;
  if found then
    delete from dispatch_adaptive_samples
    where partition_id = p_partition_id
      and gate_name = p_gate
      and minute < p_now - interval '1 hour';
  end if;
end;
$$;
comment on function dispatch_sample_adaptive(uuid, text, integer, double precision, timestamptz) is 'Keeps what a gate has come to, once a minute, and forgets what is older than an hour.';

create or replace function dispatch_adapt(p_policy text, p_observations dispatch_observation[], p_now timestamptz)
returns void
language plpgsql
set search_path from current
as $$
declare
  v_policy constant dispatch_policies := dispatch_policy(p_policy);
  v_seen record;
  v_gate text;
  v_params jsonb;
  v_knobs record;
  v_stats dispatch_adaptive_stats;
  v_step record;
begin
  if not dispatch_adapts(v_policy.gates) then
    return;
  end if;

  for v_seen in
    select
      o.partition_id,
      array_agg(o.succeeded order by o.ordinality) as succeeded,
      array_agg(o.lag_ms order by o.ordinality) as lag_ms
    from unnest(p_observations) with ordinality as o
    group by o.partition_id
    order by o.partition_id
  loop
    select c.params into v_params
    from dispatch_partitions as p
    cross join lateral unnest(dispatch_resolve(v_policy, array[dispatch_new_claim(v_policy, p, 1)], p_now)) as c
    where p.id = v_seen.partition_id;
    continue when not found;

    for v_gate in select gate ->> 'name' from jsonb_array_elements(v_policy.gates) as gate where gate ->> 'type' = 'adaptive_concurrency' loop
      v_knobs := dispatch_aimd_params(v_params, v_gate);
      select * into v_stats from dispatch_adaptive_stats where partition_id = v_seen.partition_id and gate_name = v_gate;
      if not found then
        v_stats := row(v_seen.partition_id, v_gate, v_knobs.initial_max, 0, 0, p_now)::dispatch_adaptive_stats;
      end if;

      for v_i in 1 .. cardinality(v_seen.succeeded) loop
        v_step := dispatch_aimd_step(v_stats.current_max, v_stats.ewma_lag_ms, v_seen.succeeded[v_i], v_seen.lag_ms[v_i],
          v_knobs.target_lag_ms, v_knobs.alpha, v_knobs.failure_factor, v_knobs.overload_factor, v_knobs.floor_max, v_knobs.top_max);
        v_stats.current_max := v_step.current_max;
        v_stats.ewma_lag_ms := v_step.ewma_lag_ms;
      end loop;

      insert into dispatch_adaptive_stats (partition_id, gate_name, current_max, ewma_lag_ms, sample_count, updated_at)
      values (v_seen.partition_id, v_gate, v_stats.current_max, v_stats.ewma_lag_ms, v_stats.sample_count + cardinality(v_seen.succeeded), p_now)
      on conflict on constraint dispatch_adaptive_stats_pkey do update
      set (current_max, ewma_lag_ms, sample_count, updated_at)
        = (excluded.current_max, excluded.ewma_lag_ms, excluded.sample_count, excluded.updated_at);
      perform dispatch_sample_adaptive(v_seen.partition_id, v_gate, v_stats.current_max, v_stats.ewma_lag_ms, p_now);
    end loop;
  end loop;
end;
$$;
comment on function dispatch_adapt(text, dispatch_observation[], timestamptz) is 'Folds observations, in the order given, into the adaptive gates'' statistics of their partitions.';
