-- Fairness: in which order the claimed partitions of a tick come, and how a budget is shared among them.
-- Fairness decides order and shares inside the claim, never who is claimed.

create or replace function dispatch_decay(p_decayed double precision, p_elapsed double precision, p_half_life double precision)
returns double precision
language sql
immutable
parallel safe
return case
  when p_half_life is null or p_elapsed is null then p_decayed
  else p_decayed * exp(greatest(-greatest(p_elapsed, 0) * ln(2::double precision) / greatest(p_half_life, 1e-6), -600))
end;
comment on function dispatch_decay(double precision, double precision, double precision) is 'An exponentially decayed count after p_elapsed seconds: it halves every p_half_life seconds. The exponent is clamped, so that neither a long idle time can underflow nor a clock that went back overflow.';

create or replace function dispatch_share(p_demands integer[], p_weights double precision[], p_budget integer)
returns integer[]
language plpgsql
immutable
parallel safe
as $$
declare
  v_shares integer[];
  v_left double precision := p_budget;
  v_share double precision;
  v_rest integer;
  v_row record;
begin
  if p_budget is null or p_budget >= (select coalesce(sum(demand), 0) from unnest(p_demands) as demand) then
    return p_demands;
  end if;

  -- Water-filling: those who want least per weight are served first and leave what they do not use to the others.
  v_shares := array_fill(0, array[cardinality(p_demands)]);
  for v_row in
    select
      ordinality::integer as i, demand, weight,
      -- Summed up from the other end: nothing is subtracted, so small weights are not lost beside large ones.
      sum(weight) over (order by demand / weight desc, ordinality desc rows unbounded preceding) as weight_from_here
    from unnest(p_demands, p_weights) with ordinality as claims (demand, weight, ordinality)
    order by demand / weight, ordinality
  loop
    v_share := least(v_row.demand, v_left * (v_row.weight / v_row.weight_from_here));
    v_shares[v_row.i] := floor(v_share + 1e-9);
    v_left := v_left - v_share;
  end loop;

  -- What rounding down left goes out one each, to those who came first.
  v_rest := p_budget - (select sum(share) from unnest(v_shares) as share);
  while v_rest > 0 loop
    for v_row in
      select ordinality::integer as i
      from unnest(p_demands, v_shares) with ordinality as claims (demand, share, ordinality)
      where share < demand
      order by ordinality
      limit v_rest
    loop
      v_shares[v_row.i] := v_shares[v_row.i] + 1;
      v_rest := v_rest - 1;
    end loop;
  end loop;
  return v_shares;
end;
$$;
comment on function dispatch_share(integer[], double precision[], integer) is 'Max-min fair shares of a budget by weight (Bertsekas and Gallager, Data Networks, 6.5.2), in whole jobs: nobody gets more than it wants, nothing is left over while somebody wants it, and of what rounding leaves the first get one each. A null budget gives everybody its demand.';

create or replace function dispatch_turns(p_policy dispatch_policies, p_claims dispatch_claim[], p_weights double precision[], p_now timestamptz)
returns integer[]
language plpgsql
stable
set search_path from current
as $$
begin
  if p_policy.half_life is null or p_weights = array_fill(p_weights[1], array[cardinality(p_weights)]) then
    return array(select ordinal from unnest(p_claims) order by ordinal);
  end if;
  return array(
    select c.ordinal
    from unnest(p_claims) as c
    left join dispatch_partitions as p on p.id = c.partition_id
    order by
      coalesce(dispatch_decay(p.decayed_admits, extract(epoch from p_now - p.decayed_at)::double precision, p_policy.half_life), 0) / p_weights[c.ordinal],
      c.ordinal
  );
end;
$$;
comment on function dispatch_turns(dispatch_policies, dispatch_claim[], double precision[], timestamptz) is 'In which order claims are given what rounding leaves of their shares: who was served least for its weight comes first, so that weights hold in the long run however small the budget.';

create or replace function dispatch_share_budget(
  p_policy dispatch_policies, p_claims dispatch_claim[], p_budget integer, p_reason text, p_now timestamptz
)
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
set enable_sort = off
as $$
declare
  v_demands integer[];
  v_weights double precision[];
  v_turns integer[];
  v_shares_by_turn integer[];
  v_shares integer[];
begin
  if p_budget is null or p_budget >= (select coalesce(sum(c.allowed), 0) from unnest(p_claims) as c) then
    return p_claims;
  end if;

  v_demands := array(
    select (
      select count(*)
      from (
        select
        from dispatch_staged_jobs as s
        where s.partition_id = c.partition_id
          and s.eligible_at <= p_now
        order by s.eligible_at
        limit least(c.allowed, p_budget)
      ) as ready
    )::integer
    from unnest(p_claims) as c
    order by c.ordinal
  );
  v_weights := array(
    select case when weight > 0 then least(greatest(weight, 1e-6), 1e6) else 1 end::double precision
    from unnest(p_claims) as c
    cross join lateral (
      select (c.params ->> 'fairness.weight')::numeric as weight
    ) as given
    order by c.ordinal
  );
  v_turns := dispatch_turns(p_policy, p_claims, v_weights, p_now);
  v_shares_by_turn := dispatch_share(
    array(select v_demands[ordinal] from unnest(v_turns) with ordinality as turns (ordinal, turn) order by turn),
    array(select v_weights[ordinal] from unnest(v_turns) with ordinality as turns (ordinal, turn) order by turn),
    p_budget);

  v_shares := array(select share from unnest(v_turns, v_shares_by_turn) as turns (ordinal, share) order by ordinal);

  return array(
    select case
      when v_shares[c.ordinal] = v_demands[c.ordinal] and v_demands[c.ordinal] < p_budget then c
      else dispatch_narrow(c, c.gate_state, v_shares[c.ordinal], p_now, p_now, p_reason)
    end
    from unnest(p_claims) as c
    order by c.ordinal
  );
end;
$$;
comment on function dispatch_share_budget(dispatch_policies, dispatch_claim[], integer, text, timestamptz) is 'The claims after sharing a budget (null: there is none) among those that have ready jobs; who gets none is denied with p_reason and due again at once.';
