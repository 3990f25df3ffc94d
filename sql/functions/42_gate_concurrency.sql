-- The concurrency gate: at most `max` jobs of a partition in flight, that is admitted and not ended.

create or replace function dispatch_gate_concurrency(p_claims dispatch_claim[], p_gate text, p_now timestamptz)
returns dispatch_claim[]
language plpgsql
stable
as $$
begin
  return array(
    select case
      when coalesce(cap.most, 0) < 1 then
        dispatch_narrow(c, c.gate_state, 0, p_now + cap.backoff, p_now + cap.backoff, 'max_zero')
      else
        dispatch_narrow(c, c.gate_state, cap.most - c.in_flight, p_now + cap.backoff, null, 'concurrency_full')
    end
    from unnest(p_claims) as c
    cross join lateral (
      select
        floor((c.params ->> (p_gate || '.max'))::numeric) as most,
        dispatch_full_backoff(c.params, p_gate) as backoff
    ) as cap
    order by c.ordinal
  );
end;
$$;
comment on function dispatch_gate_concurrency(dispatch_claim[], text, timestamptz) is 'Lets max - in flight jobs pass. Denies with concurrency_full for full_backoff or until a job finishes, with max_zero where max is null or below 1.';

create or replace function dispatch_full_backoff(p_params jsonb, p_gate text)
returns interval
language sql
immutable
parallel safe
return make_interval(secs => least(greatest(coalesce((p_params ->> (p_gate || '.full_backoff'))::numeric, 1), 0.001), 86400)::double precision);
comment on function dispatch_full_backoff(jsonb, text) is 'How long a full partition rests when no finish wakes it: full_backoff, 1 ms to a day.';
