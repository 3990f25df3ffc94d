-- Policies: what a definition may say, checked whole before anything is written.
-- What gates know is data (dispatch_gate_spec), so a new gate type is a few rows here and one function in 4x_gate_*.sql.

create or replace function dispatch_gate_spec()
returns table (gate_type text, parameter text, required boolean, default_value numeric, minimum numeric, above numeric, maximum numeric, below numeric)
language sql
immutable
parallel safe
begin atomic
  values
    ('throttle', 'rate', true, null::numeric, 0::numeric, null::numeric, 1e9::numeric, null::numeric),
    ('throttle', 'per', true, null, 0.001, null, 315360000, null),
    ('throttle', 'burst', false, null, 1, null, 1e9, null),
    ('concurrency', 'max', true, null, 0, null, 1e9, null),
    ('concurrency', 'full_backoff', false, 1, null, 0, 86400, null),
    ('adaptive_concurrency', 'initial_max', true, null, 1, null, 1e9, null),
    ('adaptive_concurrency', 'target_lag_ms', true, null, null, 0, 1e9, null),
    ('adaptive_concurrency', 'min', false, 1, 1, null, 1e9, null),
    ('adaptive_concurrency', 'max', false, null, 1, null, 1e9, null),
    ('adaptive_concurrency', 'ewma_alpha', false, 0.5, null, 0, 1, null),
    ('adaptive_concurrency', 'failure_decrease_factor', false, 0.5, null, 0, null, 1),
    ('adaptive_concurrency', 'overload_decrease_factor', false, 0.95, null, 0, null, 1),
    ('adaptive_concurrency', 'full_backoff', false, 1, null, 0, 86400, null),
    ('fairness', 'weight', false, 1, 0.000001, null, 1e6, null);
end;
comment on function dispatch_gate_spec() is 'The parameters of each gate type (and of fairness): defaults and ranges, inclusive (minimum, maximum) or exclusive (above, below).';

create or replace function dispatch_refuse_definition(p_path text, p_problem text, p_value jsonb)
returns void
language plpgsql
as $$
begin
  perform dispatch_raise('PD002', format('invalid definition: %s %s', p_path, p_problem),
    case when p_value is null then 'It is missing.' else format('Its value is %s.', left(p_value::text, 200)) end,
    'Nothing was changed. See docs/policies.md for what a definition may say.');
end;
$$;
comment on function dispatch_refuse_definition(text, text, jsonb) is 'Raises PD002, naming the path and the value that are wrong.';

create or replace function dispatch_check_keys(p_path text, p_object jsonb, p_known text[])
returns void
language plpgsql
as $$
declare
  v_key text;
begin
  if jsonb_typeof(p_object) is distinct from 'object' then
    perform dispatch_refuse_definition(coalesce(nullif(p_path, ''), 'the definition'), 'must be an object', p_object);
  end if;
  select key into v_key
  from jsonb_object_keys(p_object) as key
  where key <> all (p_known)
  order by key
  limit 1;
  if found then
    perform dispatch_refuse_definition(ltrim(p_path || '.' || v_key, '.'),
      format('is not known; known here: %s', array_to_string(p_known, ', ')), p_object -> v_key);
  end if;
end;
$$;
comment on function dispatch_check_keys(text, jsonb, text[]) is 'Refuses anything but an object with known keys.';

create or replace function dispatch_check_number(p_path text, p_value jsonb, p_minimum numeric, p_above numeric, p_maximum numeric, p_below numeric, p_whole boolean default false)
returns void
language plpgsql
as $$
declare
  v_number numeric;
begin
  if jsonb_typeof(p_value) is distinct from 'number' then
    perform dispatch_refuse_definition(p_path, 'must be a number', p_value);
  end if;
  v_number := (p_value #>> '{}')::numeric;
  if p_whole and v_number <> trunc(v_number) then
    perform dispatch_refuse_definition(p_path, 'must be a whole number', p_value);
  elsif v_number < p_minimum then
    perform dispatch_refuse_definition(p_path, format('must be at least %s', p_minimum), p_value);
  elsif v_number <= p_above then
    perform dispatch_refuse_definition(p_path, format('must be greater than %s', p_above), p_value);
  elsif v_number > p_maximum then
    perform dispatch_refuse_definition(p_path, format('must be at most %s', p_maximum), p_value);
  elsif v_number >= p_below then
    perform dispatch_refuse_definition(p_path, format('must be less than %s', p_below), p_value);
  end if;
end;
$$;
comment on function dispatch_check_number(text, jsonb, numeric, numeric, numeric, numeric, boolean) is 'Refuses anything but a number in range.';

create or replace function dispatch_check_paths(p_path text, p_value jsonb)
returns text[]
language plpgsql
as $$
declare
  v_paths constant jsonb := case coalesce(jsonb_typeof(p_value), 'null') when 'array' then p_value when 'null' then '[]' else jsonb_build_array(p_value) end;
  v_element record;
begin
  for v_element in
    select element, ordinality - 1 as position
    from jsonb_array_elements(v_paths) with ordinality as elements (element, ordinality)
  loop
    if jsonb_typeof(v_element.element) <> 'string' or v_element.element #>> '{}' !~ '^[^.]+(\.[^.]+)*$' then
      perform dispatch_refuse_definition(
        case when jsonb_typeof(p_value) = 'array' then format('%s[%s]', p_path, v_element.position) else p_path end,
        'must be a dotted path, like "account.id"', v_element.element);
    end if;
  end loop;
  return array(select jsonb_array_elements_text(v_paths));
end;
$$;
comment on function dispatch_check_paths(text, jsonb) is 'The dotted paths of a definition''s partition_by or shard_by: one string, or an array of strings.';

create or replace function dispatch_limit_function(p_name text)
returns regprocedure
language plpgsql
stable
set search_path from current
as $$
begin
  if p_name !~ '^([A-Za-z_][A-Za-z0-9_$]*|"[^"]+")(\.([A-Za-z_][A-Za-z0-9_$]*|"[^"]+"))?$' then
    return null;
  end if;
  return to_regprocedure(p_name || '(text, jsonb)');
end;
$$;
comment on function dispatch_limit_function(text) is 'The user''s limit function (partition_key text, context jsonb) of that name; null when there is none.';

create or replace function dispatch_check_parameter(p_path text, p_value jsonb, p_spec record)
returns void
language plpgsql
as $$
begin
  if jsonb_typeof(p_value) is distinct from 'object' then
    perform dispatch_check_number(p_path, p_value, p_spec.minimum, p_spec.above, p_spec.maximum, p_spec.below);
    return;
  end if;

  perform dispatch_check_keys(p_path, p_value, array['ctx', 'sql', 'default']);
  if (p_value ? 'ctx') = (p_value ? 'sql') then
    perform dispatch_refuse_definition(p_path, 'must have one of "ctx" and "sql"', p_value);
  elsif p_value ? 'ctx' then
    if jsonb_typeof(p_value -> 'ctx') <> 'string' then
      perform dispatch_refuse_definition(p_path || '.ctx', 'must be a dotted path, like "plan.rate"', p_value -> 'ctx');
    end if;
    perform dispatch_check_paths(p_path || '.ctx', p_value -> 'ctx');
  elsif jsonb_typeof(p_value -> 'sql') <> 'string'
    or dispatch_limit_function(p_value ->> 'sql') is null
    or (select prorettype <> 'numeric'::regtype from pg_proc where oid = dispatch_limit_function(p_value ->> 'sql')) then
    perform dispatch_refuse_definition(p_path || '.sql',
      'must name an existing function, schema and all, (partition_key text, context jsonb) returns numeric', p_value -> 'sql');
  end if;
  if jsonb_typeof(p_value -> 'default') <> 'null' then
    perform dispatch_check_number(p_path || '.default', p_value -> 'default', p_spec.minimum, p_spec.above, p_spec.maximum, p_spec.below);
  end if;
end;
$$;
comment on function dispatch_check_parameter(text, jsonb, record) is 'Refuses anything but a number in range, {"ctx": path, "default": n} or {"sql": function, "default": n}.';

create or replace function dispatch_check_gates(p_gates jsonb)
returns jsonb
language plpgsql
set search_path from current
as $$
declare
  v_gates jsonb := '[]';
  v_gate jsonb;
  v_index integer := -1;
  v_path text;
  v_name text;
  v_spec record;
begin
  if jsonb_typeof(p_gates) <> 'array' then
    perform dispatch_refuse_definition('gates', 'must be an array', p_gates);
  end if;
  for v_gate in select jsonb_array_elements(p_gates) loop
    v_index := v_index + 1;
    v_path := format('gates[%s]', v_index);
    if jsonb_typeof(v_gate) <> 'object' then
      perform dispatch_refuse_definition(v_path, 'must be an object', v_gate);
    elsif not exists (select from dispatch_gate_spec() where gate_type = v_gate ->> 'type' and gate_type <> 'fairness') then
      perform dispatch_refuse_definition(v_path || '.type', format('must be one of %s',
        (select string_agg(distinct gate_type, ', ') from dispatch_gate_spec() where gate_type <> 'fairness')), v_gate -> 'type');
    end if;
    perform dispatch_check_keys(v_path, v_gate, array['type', 'name'] || array(
      select parameter from dispatch_gate_spec() where gate_type = v_gate ->> 'type'));

    if jsonb_typeof(coalesce(v_gate -> 'name', 'null')) not in ('string', 'null') then
      perform dispatch_refuse_definition(v_path || '.name', 'must be a string', v_gate -> 'name');
    end if;
    v_name := coalesce(v_gate ->> 'name', v_gate ->> 'type');
    if v_name !~ '^[A-Za-z_][A-Za-z0-9_-]{0,62}$' or v_name = 'fairness' then
      perform dispatch_refuse_definition(v_path || '.name', 'must be a word of letters, digits, - and _ other than "fairness"', v_gate -> 'name');
    elsif exists (select from jsonb_array_elements(v_gates) as earlier where earlier ->> 'name' = v_name) then
      perform dispatch_refuse_definition(v_path || '.name', 'must differ from the names of the other gates (it defaults to the type)', to_jsonb(v_name));
    end if;

    v_gate := v_gate || jsonb_build_object('name', v_name);
    for v_spec in select * from dispatch_gate_spec() as spec where spec.gate_type = v_gate ->> 'type' loop
      if jsonb_typeof(coalesce(v_gate -> v_spec.parameter, 'null')) = 'null' then
        if v_spec.required then
          perform dispatch_refuse_definition(v_path || '.' || v_spec.parameter, 'is required', v_gate -> v_spec.parameter);
        end if;
        v_gate := v_gate || jsonb_build_object(v_spec.parameter, v_spec.default_value);
      else
        perform dispatch_check_parameter(v_path || '.' || v_spec.parameter, v_gate -> v_spec.parameter, v_spec);
      end if;
    end loop;

    if v_gate ->> 'type' = 'adaptive_concurrency' then
      perform dispatch_check_order(v_path || '.initial_max', v_gate -> 'initial_max', 'min', v_gate -> 'min');
      perform dispatch_check_order(v_path || '.max', v_gate -> 'max', 'initial_max', v_gate -> 'initial_max');
    end if;
    v_gates := v_gates || jsonb_build_array(v_gate);
  end loop;
  return v_gates;
end;
$$;
comment on function dispatch_check_gates(jsonb) is 'The gates of a definition with names and defaults filled in. Raises PD002.';

create or replace function dispatch_check_order(p_path text, p_value jsonb, p_lower_name text, p_lower jsonb)
returns void
language plpgsql
as $$
begin
  if jsonb_typeof(p_value) = 'number' and jsonb_typeof(p_lower) = 'number'
    and (p_value #>> '{}')::numeric < (p_lower #>> '{}')::numeric then
    perform dispatch_refuse_definition(p_path, format('must be at least %s, which is %s', p_lower_name, p_lower), p_value);
  end if;
end;
$$;
comment on function dispatch_check_order(text, jsonb, text, jsonb) is 'Refuses a number that is below another of the same gate; numbers known only at tick time are clamped then.';

create or replace function dispatch_check_whole(p_definition jsonb, p_key text, p_default bigint, p_maximum bigint)
returns bigint
language plpgsql
as $$
begin
  if jsonb_typeof(coalesce(p_definition -> p_key, 'null')) = 'null' then
    return p_default;
  end if;
  perform dispatch_check_number(p_key, p_definition -> p_key, 1, null, p_maximum, null, true);
  return (p_definition ->> p_key)::numeric;
end;
$$;
comment on function dispatch_check_whole(jsonb, text, bigint, bigint) is 'A whole number from 1 up in a definition, or its default.';

create or replace function dispatch_check_word(p_definition jsonb, p_key text, p_words text[])
returns text
language plpgsql
as $$
begin
  if jsonb_typeof(coalesce(p_definition -> p_key, 'null')) = 'null' then
    return p_words[1];
  elsif jsonb_typeof(p_definition -> p_key) <> 'string' or p_definition ->> p_key <> all (p_words) then
    perform dispatch_refuse_definition(p_key, format('must be one of %s', array_to_string(p_words, ', ')), p_definition -> p_key);
  end if;
  return p_definition ->> p_key;
end;
$$;
comment on function dispatch_check_word(jsonb, text, text[]) is 'One of some words in a definition; the first is the default.';

-- The row that a definition stands for. Everything a definition may get wrong is found here.
create or replace function dispatch_parse_policy(p_name text, p_definition jsonb, p_now timestamptz)
returns dispatch_policies
language plpgsql
stable
set search_path from current
as $$
declare
  v_policy dispatch_policies;
  v_fairness jsonb := coalesce(nullif(p_definition -> 'fairness', 'null'), '{}');
  v_weight record;
begin
  if p_name is null or p_name !~ '^[^[:cntrl:]]{1,128}$' then
    perform dispatch_raise('PD002', 'invalid definition: the policy''s name must have 1 to 128 characters and no control characters',
      format('Its name is %L.', left(p_name, 200)), 'Nothing was changed. Choose another name.');
  end if;
  perform dispatch_check_keys('', p_definition, array['partition_by', 'shard_by', 'queue', 'gates', 'fairness',
    'partition_batch_size', 'admission_batch_size', 'tick_admission_budget', 'max_queued', 'max_pending', 'retry_strategy', 'stalled']);

  v_policy.policy_name := p_name;
  v_policy.definition := p_definition;
  v_policy.partition_by := dispatch_check_paths('partition_by', p_definition -> 'partition_by');
  v_policy.shard_by := dispatch_check_paths('shard_by', p_definition -> 'shard_by');

  if jsonb_typeof(coalesce(p_definition -> 'queue', 'null')) not in ('string', 'null')
    -- procrastinate notifies a channel with the queue's name in it, and refuses every job of a queue that has a longer one.
    or octet_length(p_definition ->> 'queue') not between 1 and 40 then
    perform dispatch_refuse_definition('queue', 'must be a string of 1 to 40 bytes', p_definition -> 'queue');
  end if;
  v_policy.queue_name := coalesce(p_definition ->> 'queue', 'default');

  v_policy.gates := dispatch_check_gates(coalesce(nullif(p_definition -> 'gates', 'null'), '[]'));

  perform dispatch_check_keys('fairness', v_fairness, array['half_life', 'weight']);
  if not v_fairness ? 'half_life' then
    v_policy.half_life := 60;
  elsif v_fairness -> 'half_life' <> 'null' then
    perform dispatch_check_number('fairness.half_life', v_fairness -> 'half_life', 0.001, null, 315360000, null);
    v_policy.half_life := (v_fairness ->> 'half_life')::numeric;
  end if;
  select * into v_weight from dispatch_gate_spec() as spec where spec.gate_type = 'fairness' and spec.parameter = 'weight';
  if jsonb_typeof(coalesce(v_fairness -> 'weight', 'null')) = 'null' then
    v_fairness := jsonb_build_object('weight', v_weight.default_value);
  else
    perform dispatch_check_parameter('fairness.weight', v_fairness -> 'weight', v_weight);
  end if;

  v_policy.partition_batch_size := dispatch_check_whole(p_definition, 'partition_batch_size', 50, 10000);
  v_policy.admission_batch_size := dispatch_check_whole(p_definition, 'admission_batch_size', 100, 10000);
  v_policy.tick_admission_budget := dispatch_check_whole(p_definition, 'tick_admission_budget', null, 1000000);
  -- A null of one's own is no bound.
  v_policy.max_queued := dispatch_check_whole(p_definition, 'max_queued', case when p_definition ? 'max_queued' then null else 1000 end, 1000000);
  v_policy.max_pending := dispatch_check_whole(p_definition, 'max_pending', null, 1000000000);
  v_policy.retry_strategy := dispatch_check_word(p_definition, 'retry_strategy', array['restage', 'bypass']);
  v_policy.stalled := dispatch_check_word(p_definition, 'stalled', array['leave', 'retry']);

  with parameters as (
    select gate ->> 'name' || '.' || spec.parameter as name, gate -> spec.parameter as value
    from (
      select jsonb_array_elements(v_policy.gates) as gate
      union all
      select v_fairness || '{"name": "fairness", "type": "fairness"}'
    ) as gates
    join dispatch_gate_spec() as spec on spec.gate_type = gate ->> 'type'
  )
  select
    coalesce(jsonb_object_agg(name, value) filter (where jsonb_typeof(value) = 'number'), '{}'),
    coalesce(jsonb_agg(value || jsonb_build_object('name', name) order by name) filter (where jsonb_typeof(value) = 'object'), '[]'),
    array(
      select path
      from (
        select unnest(v_policy.partition_by || v_policy.shard_by)
        union
        select lookups.value ->> 'ctx' from parameters as lookups where lookups.value ? 'ctx'
      ) as paths (path)
      order by path
    )
  into v_policy.literals, v_policy.lookups, v_policy.context_paths
  from parameters;

  v_policy.created_at := p_now;
  v_policy.updated_at := p_now;
  return v_policy;
end;
$$;
comment on function dispatch_parse_policy(text, jsonb, timestamptz) is 'The row of dispatch_policies that a definition stands for. Raises PD002, naming the path of the offending value.';

create or replace function dispatch_define_policy(p_name text, p_definition jsonb)
returns void
language plpgsql
set search_path from current
as $$
declare
  v_now constant timestamptz := dispatch_now();
  v_policy dispatch_policies;
  v_known dispatch_policies;
  v_detail text;
  v_hint text;
begin
  -- Of many that are written at once, the error has to say which one it is about.
  begin
    v_policy := dispatch_parse_policy(p_name, p_definition, v_now);
  exception when sqlstate 'PD002' then
    get stacked diagnostics v_detail = pg_exception_detail, v_hint = pg_exception_hint;
    perform dispatch_raise('PD002',
      replace(sqlerrm, 'invalid definition:', format('invalid definition of policy %L:', left(p_name, 200))), nullif(v_detail, ''), v_hint);
  end;

  select * into v_known from dispatch_policies where policy_name = p_name;
  if found and (v_known.definition, v_known.literals, v_known.lookups, v_known.gates)
    = (v_policy.definition, v_policy.literals, v_policy.lookups, v_policy.gates) then
    return;
  end if;

  insert into dispatch_policies
  select (v_policy).*
  on conflict on constraint dispatch_policies_pkey do update
  set (definition, partition_by, shard_by, queue_name, gates, literals, lookups, context_paths, half_life, partition_batch_size,
       admission_batch_size, tick_admission_budget, max_queued, max_pending, retry_strategy, stalled, updated_at)
    = (excluded.definition, excluded.partition_by, excluded.shard_by, excluded.queue_name, excluded.gates, excluded.literals,
       excluded.lookups, excluded.context_paths, excluded.half_life, excluded.partition_batch_size, excluded.admission_batch_size,
       excluded.tick_admission_budget, excluded.max_queued, excluded.max_pending, excluded.retry_strategy, excluded.stalled, excluded.updated_at);

  if not v_policy.shard_by <@ v_policy.partition_by then
    raise warning 'policy %: shard_by names %, which partition_by does not', p_name,
      (select string_agg(path, ', ') from unnest(v_policy.shard_by) as path where path <> all (v_policy.partition_by))
      using hint = 'Limits hold per partition, so a partition stays whole, in the shard of its first job. If the limits are meant per shard, add the path to partition_by.';
  end if;

  -- New limits count from the next tick on, so whoever waits for an old one is looked at again: now, or when the tick is
  -- over that just looks at it, or creates it, under the old definition. So does a partition that is empty and closed.
  insert into dispatch_inbox (policy_name, partition_id, kind)
  select p_name, id, 'resumed'
  from (
    select id from dispatch_partitions where policy_name = p_name and (due_at is not null or blocked_until > v_now)
    union
    select partition_id from dispatch_inbox where policy_name = p_name
  ) as waiting (id);
  perform dispatch_wake(p_name);
end;
$$;
comment on function dispatch_define_policy(text, jsonb) is 'Creates or replaces a policy. The definition is validated whole (PD002 names the path of the offending value); the same definition changes nothing. Gate state, waiting jobs, slots and pauses stay as they are.';

create or replace function dispatch_map_task(p_task_name text, p_policy text)
returns void
language plpgsql
set search_path from current
as $$
begin
  perform dispatch_policy(p_policy);
  insert into dispatch_tasks as t (task_name, policy_name)
  values (p_task_name, p_policy)
  on conflict on constraint dispatch_tasks_pkey do update
  set policy_name = excluded.policy_name
  where t.policy_name <> excluded.policy_name;
end;
$$;
comment on function dispatch_map_task(text, text) is 'Notes which policy a task follows. Raises PD001 for an unknown policy.';

create or replace function dispatch_policy(p_policy text)
returns dispatch_policies
language plpgsql
stable
set search_path from current
as $$
declare
  v_policy dispatch_policies;
begin
  select * into v_policy from dispatch_policies where policy_name = p_policy;
  if not found then
    perform dispatch_raise('PD001', format('unknown policy %L', left(p_policy, 200)), null,
      'Define it with dispatch_define_policy(), or run dispatch.sync() or `pydispatch sync`.');
  end if;
  return v_policy;
end;
$$;
comment on function dispatch_policy(text) is 'The row of a policy. Raises PD001 when there is none.';

create or replace function dispatch_operate_alone(p_policy text)
returns void
language plpgsql
set search_path from current
as $$
begin
  perform pg_advisory_xact_lock('dispatch_policies'::regclass::oid::integer, hashtext(p_policy));
end;
$$;
comment on function dispatch_operate_alone(text) is 'Waits for whoever forces, drains or drops the policy until that transaction ends. They fold, which locks partitions in any order, and then wait for others: two at once could wait in a circle.';

create or replace function dispatch_drop_policy(p_name text, p_force boolean default false)
returns void
language plpgsql
set search_path from current
as $$
declare
  v_now constant timestamptz := dispatch_now();
  v_partitions uuid[];
  v_waiting bigint[];
begin
  perform dispatch_policy(p_name);
  perform dispatch_operate_alone(p_name);
  while dispatch_fold(p_name, v_now) > 0 loop
    null;
  end loop;
  -- Waits for the ticks at work. What is staged or made meanwhile is an orphan, which the sweep sets aside.
  v_partitions := array(select id from dispatch_partitions where policy_name = p_name order by id for update);

  v_waiting := array(
    select s.id
    from unnest(v_partitions) as partition_id
    join dispatch_staged_jobs as s using (partition_id)
  );
  if cardinality(v_waiting) > 0 and not p_force then
    perform dispatch_raise('PD005', format('policy %L still holds %s jobs', p_name, cardinality(v_waiting)), null,
      'Let them run, cancel them, or drop the policy with p_force => true: then they go to dispatch_dead_jobs.');
  end if;
  perform dispatch_bury(v_waiting, array_fill('policy dropped'::text, array[cardinality(v_waiting)]), v_now);

  delete from dispatch_inflight_jobs where policy_name = p_name;
  delete from dispatch_partitions where id = any (v_partitions);
  -- A note of a job that was just staged is left: it leads the sweep to the orphan.
  delete from dispatch_inbox where policy_name = p_name and kind <> 'staged';
  delete from dispatch_dead_notes where policy_name = p_name;
  delete from dispatch_pauses where policy_name = p_name;
  delete from dispatch_policies where policy_name = p_name;
end;
$$;
comment on function dispatch_drop_policy(text, boolean) is 'Drops a policy. Raises PD001 when there is none, PD005 while jobs are staged; with p_force they go to dispatch_dead_jobs. Jobs already handed off run on, without a slot.';
