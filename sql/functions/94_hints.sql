-- What hints and explanations need to say things: numbers, times and names as people read them. All of it is arithmetic on
-- text.

create or replace function dispatch_say_number(p_number bigint)
returns text
language sql
stable
parallel safe
return to_char(p_number, 'FM999,999,999,999,990');
comment on function dispatch_say_number(bigint) is 'A whole number: 1,234,567.';

create or replace function dispatch_say_count(p_count bigint, p_what text)
returns text
language sql
stable
parallel safe
return dispatch_say_number(p_count) || ' ' || p_what || case when p_count = 1 then '' else 's' end;
comment on function dispatch_say_count(bigint, text) is 'A count of something: 1 job, 1,200 jobs.';

create or replace function dispatch_say_span(p_span interval)
returns text
language sql
immutable
parallel safe
return (
  select case
    when p_span is null then null
    when seconds < 120 then format('%s s', floor(seconds))
    when seconds < 7200 then format('%s min', floor(seconds / 60))
    when seconds < 172800 then format('%s h', floor(seconds / 3600))
    else format('%s days', floor(seconds / 86400))
  end
  from (select greatest(extract(epoch from p_span), 0) as seconds) as span
);
comment on function dispatch_say_span(interval) is 'A span of time in its largest fitting unit: 90 s, 45 min, 30 h, 9 days; null for null.';

create or replace function dispatch_say_time(p_time timestamptz)
returns text
language sql
stable
parallel safe
return to_char(p_time, 'YYYY-MM-DD HH24:MI:SSOF');
comment on function dispatch_say_time(timestamptz) is 'A time in a message, in the session''s time zone.';

create or replace function dispatch_say_name(p_name text)
returns text
language sql
immutable
parallel safe
return '"' || regexp_replace(left(p_name, 60), '[[:cntrl:]]', ' ', 'g') || case when length(p_name) > 60 then '...' else '' end || '"';
comment on function dispatch_say_name(text) is 'A key or a name within a sentence: cut at 60 characters, on one line, in quotes.';

create or replace function dispatch_say_word(p_word text)
returns text
language sql
immutable
parallel safe
return case
  when p_word ~ '^[A-Za-z0-9_][A-Za-z0-9_.:/@%+-]*$' then p_word
  else '''' || replace(p_word, '''', '''\''''') || ''''
end;
comment on function dispatch_say_word(text) is 'A word of a command line, quoted for a shell where it has to be.';

create or replace function dispatch_say_call(p_function text, p_command text, p_policy text, p_partition_key text default null)
returns text
language sql
immutable
parallel safe
return case
  when length(p_partition_key) > 200 then
    format('select %s(%L, KEY); or: pydispatch %s %s KEY, with the partition_key of this hint', p_function, p_policy, p_command,
      dispatch_say_word(p_policy))
  else
    format('select %s(%s); or: pydispatch %s', p_function, concat_ws(', ', quote_literal(p_policy), quote_literal(p_partition_key)),
      concat_ws(' ', p_command, case when left(p_policy, 1) = '-' or left(p_partition_key, 1) = '-' then '--' end,
        dispatch_say_word(p_policy), dispatch_say_word(p_partition_key)))
end;
comment on function dispatch_say_call(text, text, text, text) is 'How a function is called for a policy or one of its partitions, in SQL and on the command line.';

create or replace function dispatch_needed_paths(p_gates jsonb)
returns text[]
language sql
immutable
parallel safe
return array(
  select distinct parameter.value ->> 'ctx'
  from jsonb_array_elements(p_gates) as gate
  cross join lateral jsonb_each(gate) as parameter
  where gate ->> 'type' in ('throttle', 'concurrency')
    and parameter.key in ('rate', 'per', 'max')
    and jsonb_typeof(parameter.value) = 'object'
    and parameter.value ? 'ctx'
    and coalesce(jsonb_typeof(parameter.value -> 'default'), 'null') = 'null'
  order by 1
);
comment on function dispatch_needed_paths(jsonb) is 'Paths that gates read from the context with no default: without a number there, they let nothing pass.';

create or replace function dispatch_missing_paths(p_needed text[], p_context jsonb)
returns text[]
language sql
immutable
parallel safe
return array(
  select path
  from unnest(p_needed) as path
  where dispatch_to_number(p_context #> string_to_array(path, '.')) is null
);
comment on function dispatch_missing_paths(text[], jsonb) is 'Those of the needed paths at which a context has no number.';

create or replace function dispatch_say_remedy(p_reason text, p_policy text, p_partition_key text)
returns text
language sql
immutable
parallel safe
return case p_reason
  when 'throttle_empty' then 'The rate is too low for what comes in: raise rate or burst'
  when 'rate_zero' then 'Its rate is 0, or its limit function returns null: correct the function or the context that it is read from, or raise rate'
  when 'max_zero' then 'Its max is 0, or its limit function returns null: correct the function or the context that it is read from, or raise max'
  when 'concurrency_full' then format(
    'All its slots are taken: see what holds them (select * from dispatch_inflight where policy_name = %L order by admitted_at), or raise max',
    p_policy)
  when 'budget_exhausted' then 'The tick''s budget is too small: raise tick_admission_budget'
  when 'queue_full' then 'As many of its jobs as max_queued allows wait for a worker: start more workers, or raise max_queued'
  else 'See what its limits are'
end || format(' (select dispatch_define_policy(%L, ...), or the application''s declaration and pydispatch sync).', p_policy)
  || case when p_partition_key is not null then
    ' A few jobs past the gates: ' || replace(
      dispatch_say_call('dispatch_force_admit', 'force-admit --limit 10', p_policy, p_partition_key), '); or', ', 10); or') || '.'
    else '' end;
comment on function dispatch_say_remedy(text, text, text) is 'What to do about a gate that holds jobs too long, by the reason that it gives.';
