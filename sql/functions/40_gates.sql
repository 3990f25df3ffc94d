-- Gates: a set of claims goes in, the same claims come out with a smaller `allowed` and, where it is 0, the time to look
-- again and the reason. Invariant: a gate decides and changes nothing; what a job costs is paid in dispatch_settle(), once
-- it is known to be handed off, and a job passes all gates or none.
-- A gate type is one function dispatch_gate_TYPE(claims, name, now), listed in dispatch_pass_gates.

create or replace function dispatch_sane(p_number numeric)
returns numeric
language sql
immutable
parallel safe
return case when p_number <> 'NaN' then trim_scale(round(least(greatest(p_number, -1e12), 1e12), 12)) end;
comment on function dispatch_sane(numeric) is 'A number from outside as gates can count with it: clamped to +-1e12, 12 decimals; null for NaN.';

create or replace function dispatch_to_number(p_value jsonb)
returns numeric
language sql
immutable
parallel safe
return case
  when jsonb_typeof(p_value) = 'number' then dispatch_sane((p_value #>> '{}')::numeric)
  when jsonb_typeof(p_value) = 'string' and p_value #>> '{}' ~ '^[-+]?[0-9]{1,12}(\.[0-9]{1,12})?$' then (p_value #>> '{}')::numeric
end;
comment on function dispatch_to_number(jsonb) is 'A number, or the text of one, as found in a context; null for anything else.';

create or replace function dispatch_limit(p_parameter jsonb, out path text[], out fallback numeric)
language sql
immutable
parallel safe
begin atomic
  select string_to_array(p_parameter ->> 'ctx', '.'), dispatch_to_number(case when p_parameter ? 'ctx' then p_parameter -> 'default' else p_parameter end);
end;
comment on function dispatch_limit(jsonb) is 'Where a gate''s parameter is in a partition''s context (null: nowhere), and its value otherwise.';

create or replace function dispatch_ask_limit(p_function text, p_default jsonb, p_partition_key text, p_context jsonb)
returns numeric
language plpgsql
set search_path from current
as $$
declare
  v_function constant regprocedure := dispatch_limit_function(p_function);
  v_value numeric;
begin
  if v_function is null then
    perform dispatch_raise('PD002', format('limit function %s(text, jsonb) does not exist any more', p_function), null,
      'Create it again, or define the policy without it.');
  end if;
  execute format('select %s($1, $2)', v_function::regproc) into v_value using p_partition_key, p_context;
  return coalesce(dispatch_sane(v_value), dispatch_to_number(p_default));
end;
$$;
comment on function dispatch_ask_limit(text, jsonb, text, jsonb) is 'What a user''s limit function says of a partition; its default when it returns null. Raises what the function raises.';

create or replace function dispatch_only_lookups(p_policy dispatch_policies, p_gate_type text)
returns dispatch_policies
language plpgsql
immutable
parallel safe
as $$
begin
  p_policy.lookups := (
    select coalesce(jsonb_agg(lookup), '[]')
    from jsonb_array_elements(p_policy.gates) as gate
    join jsonb_array_elements(p_policy.lookups) as lookup on split_part(lookup ->> 'name', '.', 1) = gate ->> 'name'
    where gate ->> 'type' = p_gate_type
  );
  return p_policy;
end;
$$;
comment on function dispatch_only_lookups(dispatch_policies, text) is 'A policy of which dispatch_resolve() looks up what gates of one type need, and nothing else.';

-- What a user's function does cannot be broken off from here. So it is kept from waiting for a lock; one that takes too long
-- denies its partition, as one that raises does; and once all of them have had their time, the rest is asked the next time.
create or replace function dispatch_resolve(p_policy dispatch_policies, p_claims dispatch_claim[], p_now timestamptz)
returns dispatch_claim[]
language plpgsql
set search_path from current
set lock_timeout = '100ms'
as $$
declare
  v_claim dispatch_claim;
  v_lookup jsonb;
  v_timeout interval;
  v_until timestamptz;
  v_begin timestamptz;
begin
  if p_policy.lookups = '[]' then
    return p_claims;
  end if;

  p_claims := array(
    select row(
      c.ordinal, c.partition_id, c.partition_key, c.context,
      c.params || coalesce((
        select jsonb_object_agg(
          lookup ->> 'name',
          coalesce(dispatch_to_number(c.context #> string_to_array(lookup ->> 'ctx', '.')), dispatch_to_number(lookup -> 'default')))
        from jsonb_array_elements(p_policy.lookups) as lookup
        where lookup ? 'ctx'
      ), '{}'),
      c.gate_state, c.in_flight, c.allowed, c.retry_at, c.retry_after_finish, c.reason
    )::dispatch_claim
    from unnest(p_claims) as c
    order by c.ordinal
  );
  if not p_policy.lookups @? '$[*].sql' then
    return p_claims;
  end if;

  v_timeout := dispatch_setting_span('limit_timeout');
  v_until := clock_timestamp() + 5 * v_timeout;
  -- A user's function may raise: it then denies the partition that it was asked for, and no other.
  for v_i in 1 .. cardinality(p_claims) loop
    v_claim := p_claims[v_i];
    v_begin := clock_timestamp();
    begin
      if v_begin > v_until then
        raise exception using errcode = 'UNDO0', message = 'not asked yet, for limit functions took too long';
      end if;
      for v_lookup in select lookup from jsonb_array_elements(p_policy.lookups) as lookup where lookup ? 'sql' loop
        v_claim.params := v_claim.params || jsonb_build_object(v_lookup ->> 'name',
          dispatch_ask_limit(v_lookup ->> 'sql', v_lookup -> 'default', v_claim.partition_key, v_claim.context));
      end loop;
      if clock_timestamp() > v_begin + v_timeout then
        raise exception 'it took % s, and limit_timeout is % s', round(extract(epoch from clock_timestamp() - v_begin)::numeric, 3),
          extract(epoch from v_timeout)::float8;
      end if;
    exception
      when others or assert_failure then
        if sqlstate = '55P03' then
          -- Whoever has waited for one has waited for all.
          perform set_config('lock_timeout', '1ms', true);
        end if;
        v_claim.allowed := 0;
        v_claim.retry_at := p_now + case when sqlstate = 'UNDO0' then '0' else interval '10 seconds' end;
        v_claim.retry_after_finish := v_claim.retry_at;
        v_claim.reason := format('limit_error: %s', left(sqlerrm, 200));
    end;
    p_claims[v_i] := v_claim;
  end loop;
  return p_claims;
end;
$$;
comment on function dispatch_resolve(dispatch_policies, dispatch_claim[], timestamptz) is 'The claims with their gate parameters looked up: from the partition''s context or from the user''s limit functions. A function that raises, waits for a lock or takes longer than limit_timeout denies its partition for 10 seconds, with the error as the reason. After five times limit_timeout no more are asked: the rest is denied, and due again at once.';

create or replace function dispatch_narrow(p_claim dispatch_claim, p_gate_state jsonb, p_allowed numeric, p_retry_at timestamptz, p_retry_after_finish timestamptz, p_reason text)
returns dispatch_claim
language plpgsql
immutable
parallel safe
as $$
begin
  p_claim.gate_state := p_gate_state;
  p_claim.allowed := greatest(least(p_claim.allowed, p_allowed), 0);
  if p_allowed < 1 then
    p_claim.retry_at := greatest(p_claim.retry_at, p_retry_at);
    p_claim.retry_after_finish := greatest(p_claim.retry_after_finish, p_retry_after_finish);
    p_claim.reason := coalesce(p_claim.reason, p_reason);
  end if;
  return p_claim;
end;
$$;
comment on function dispatch_narrow(dispatch_claim, jsonb, numeric, timestamptz, timestamptz, text) is 'A claim after one more gate: at most p_allowed jobs pass; when that is none, not before p_retry_at, or p_retry_after_finish if a job finishes (null: at once).';

create or replace function dispatch_pass_gates(p_gates jsonb, p_claims dispatch_claim[], p_now timestamptz)
returns dispatch_claim[]
language plpgsql
stable
set search_path from current
as $$
declare
  v_denied constant dispatch_claim[] := array(select c from unnest(p_claims) as c where c.reason is not null);
  v_gate jsonb;
begin
  if v_denied <> '{}' then
    p_claims := array(select c from unnest(p_claims) as c where c.reason is null order by c.ordinal);
  end if;
  for v_gate in select jsonb_array_elements(p_gates) loop
    case v_gate ->> 'type'
      when 'throttle' then
        p_claims := dispatch_gate_throttle(p_claims, v_gate ->> 'name', p_now);
      when 'concurrency' then
        p_claims := dispatch_gate_concurrency(p_claims, v_gate ->> 'name', p_now);
      when 'adaptive_concurrency' then
        p_claims := dispatch_gate_adaptive_concurrency(p_claims, v_gate ->> 'name', p_now);
    end case;
  end loop;
  if v_denied <> '{}' then
    p_claims := array(select c from unnest(p_claims || v_denied) as c order by c.ordinal);
  end if;
  return p_claims;
end;
$$;
comment on function dispatch_pass_gates(jsonb, dispatch_claim[], timestamptz) is 'The claims after all gates of a policy; one that is denied already (paused, or its limits could not be asked) passes none. Changes nothing.';
