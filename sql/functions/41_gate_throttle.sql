-- The throttle: a token bucket (Turner 1986, "New directions in communications"; as a meter in ITU-T I.371).
-- Invariant: in any window of t seconds at most capacity + t * rate / per jobs pass. Numbers are exact decimals, so
-- nothing drifts, and a debt (jobs forced past the gate) stays until it is paid.

create or replace function dispatch_capacity(p_rate numeric, p_burst numeric)
returns numeric
language sql
immutable
parallel safe
return greatest(coalesce(p_burst, p_rate), 1);
comment on function dispatch_capacity(numeric, numeric) is 'Tokens that a bucket holds: the burst, or else max(rate, 1).';

create or replace function dispatch_refill(p_tokens numeric, p_elapsed numeric, p_rate numeric, p_per numeric, p_capacity numeric)
returns numeric
language sql
immutable
parallel safe
return case
  when p_tokens is null then p_capacity
  else round(least(p_capacity, p_tokens + (greatest(p_elapsed, 0) * p_rate)::numeric(60, 24) / p_per), 18)
end;
comment on function dispatch_refill(numeric, numeric, numeric, numeric, numeric) is 'Tokens after p_elapsed seconds at p_rate tokens in p_per seconds, up to the capacity; a new bucket (null) is full, a clock that went back adds nothing.';

create or replace function dispatch_whole_tokens(p_tokens numeric)
returns numeric
language sql
immutable
parallel safe
return floor(p_tokens + 1e-12);
comment on function dispatch_whole_tokens(numeric) is 'Whole tokens in a bucket. A token that a division left a rounding error short of whole is whole; it is then paid in full, so nothing is gained.';

create or replace function dispatch_seconds_to_token(p_tokens numeric, p_rate numeric, p_per numeric)
returns numeric
language sql
immutable
parallel safe
return ceil(greatest(1 - 1e-12 - p_tokens, 0) * p_per / p_rate * 1e6) / 1e6;
comment on function dispatch_seconds_to_token(numeric, numeric, numeric) is 'Seconds until the bucket holds a whole token by dispatch_whole_tokens(), rounded up to a microsecond.';

create or replace function dispatch_throttle_claim(p_claim dispatch_claim, p_gate text, p_now timestamptz)
returns dispatch_claim
language plpgsql
stable
as $$
declare
  v_rate constant numeric := (p_claim).params ->> (p_gate || '.rate');
  v_per constant numeric := (p_claim).params ->> (p_gate || '.per');
  v_state constant jsonb := (p_claim).gate_state -> p_gate;
  v_at constant numeric := v_state ->> 'at';
  v_now constant numeric := extract(epoch from p_now);
  v_tokens numeric;
  v_retry_at timestamptz;
begin
  if v_per is null or v_per <= 0 or v_rate is null or v_rate <= 0 then
    v_retry_at := p_now + make_interval(secs => case when v_per > 0 then greatest(least(v_per, 315360000), 0.1) else 60 end);
    return dispatch_narrow(p_claim, (p_claim).gate_state, 0, v_retry_at, v_retry_at, 'rate_zero');
  end if;

  v_tokens := dispatch_refill((v_state ->> 'tokens')::numeric, v_now - v_at, v_rate, v_per,
    dispatch_capacity(v_rate, ((p_claim).params ->> (p_gate || '.burst'))::numeric));
  if dispatch_whole_tokens(v_tokens) < 1 then
    v_retry_at := p_now + make_interval(secs => least(
      dispatch_seconds_to_token(v_tokens, v_rate, v_per) + greatest(v_at - v_now, 0), 315360000)::double precision);
  end if;
  return dispatch_narrow(p_claim,
    (p_claim).gate_state || jsonb_build_object(p_gate, jsonb_build_object('tokens', v_tokens, 'at', greatest(v_at, v_now))),
    dispatch_whole_tokens(v_tokens), v_retry_at, v_retry_at, 'throttle_empty');
end;
$$;
comment on function dispatch_throttle_claim(dispatch_claim, text, timestamptz) is 'One claim at a throttle; see dispatch_gate_throttle().';

create or replace function dispatch_gate_throttle(p_claims dispatch_claim[], p_gate text, p_now timestamptz)
returns dispatch_claim[]
language plpgsql
stable
as $$
begin
  return array(select dispatch_throttle_claim(c, p_gate, p_now) from unnest(p_claims) as c order by c.ordinal);
end;
$$;
comment on function dispatch_gate_throttle(dispatch_claim[], text, timestamptz) is 'Lets the whole tokens of a bucket pass. Denies with throttle_empty until the next whole token, with rate_zero for one `per` where the rate is null or not above 0.';

create or replace function dispatch_spend(p_gate_state jsonb, p_gates text[], p_jobs integer)
returns jsonb
language plpgsql
immutable
parallel safe
as $$
declare
  v_gate text;
begin
  foreach v_gate in array p_gates loop
    continue when p_jobs = 0 or not p_gate_state ? v_gate;
    p_gate_state := jsonb_set(p_gate_state, array[v_gate, 'tokens'], to_jsonb((p_gate_state -> v_gate ->> 'tokens')::numeric - p_jobs));
  end loop;
  return p_gate_state;
end;
$$;
comment on function dispatch_spend(jsonb, text[], integer) is 'Gate state after p_jobs were handed off: each bucket named pays a token a job.';
