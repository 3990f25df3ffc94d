-- Policies: what a definition may say, what it becomes, and what a change of it does.
begin;
select plan(185);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';
set local client_min_messages = error; -- shards that are finer than partitions

create function pg_temp.clock(p_seconds numeric) returns void language sql as $$
  select set_config('dispatch.fake_now', ('2026-01-01 00:00+00'::timestamptz + make_interval(secs => p_seconds::float8))::text, true)
$$;

-- What dispatch_define_policy() says against a definition: message, without the policy's name, and detail; null when it
-- takes it.
create function pg_temp.refusal(p_definition jsonb, p_name text default 'tried') returns text language plpgsql as $$
declare
  v_message text;
  v_detail text;
begin
  perform dispatch_define_policy(p_name, p_definition);
  return null;
exception
  when sqlstate 'PD002' then
    get stacked diagnostics v_message = message_text, v_detail = pg_exception_detail;
    return replace(v_message, format(' of policy %L:', left(p_name, 200)), ':') || '. ' || v_detail;
end;
$$;

create function pg_temp.gate(p_gate jsonb) returns jsonb language sql
return jsonb_build_object('gates', jsonb_build_array(p_gate));

create function limit_of(partition_key text, context jsonb) returns numeric language sql return 5;
create function not_a_number_of(partition_key text, context jsonb) returns text language sql return 'five';

-- The name ------------------------------------------------------------------------------------------

select is(
  pg_temp.refusal('{}', name),
  format('invalid definition: the policy''s name must have 1 to 128 characters and no control characters. Its name is %L.', left(name, 200)),
  sentence)
from (values
  (null, 'a policy without a name is refused'),
  ('', 'an empty name is refused'),
  (e'two\nlines', 'a name with a line end is refused'),
  (e'bell\x07', 'a name with a control character is refused'),
  (repeat('x', 129), 'a name of 129 characters is refused')
) as names (name, sentence);

select is(pg_temp.refusal('{}', name), null, format('%L is a name', left(name, 40)))
from (values (repeat('ü', 128)), ('*'), ('two words'), ('"quoted" ''name'''), ('🐘'), ('%s')) as names (name);

select throws_like($$select dispatch_define_policy('it''s mine', '{"gates": [{"type": "concurrency", "max": -1}]}')$$,
  'invalid definition of policy ''it''''s mine'': gates[0].max %', 'what is refused names its policy');

-- The shape -----------------------------------------------------------------------------------------

select is(pg_temp.refusal(definition::jsonb), 'invalid definition: ' || refusal, sentence)
from (values
  (null, 'the definition must be an object. It is missing.', 'a definition is needed'),
  ('null', 'the definition must be an object. Its value is null.', 'JSON''s null is no definition'),
  ('[]', 'the definition must be an object. Its value is [].', 'an array is no definition'),
  ('"text"', 'the definition must be an object. Its value is "text".', 'a text is no definition'),
  ('{"partition_key": "a"}',
    'partition_key is not known; known here: partition_by, shard_by, queue, gates, fairness, partition_batch_size, '
    'admission_batch_size, tick_admission_budget, max_queued, max_pending, retry_strategy, stalled. Its value is "a".',
    'an unknown key is refused by its name'),

  ('{"partition_by": 7}', 'partition_by must be a dotted path, like "account.id". Its value is 7.', 'partition_by is no number'),
  ('{"partition_by": {"a": 1}}', 'partition_by must be a dotted path, like "account.id". Its value is {"a": 1}.', 'partition_by is no object'),
  ('{"partition_by": ""}', 'partition_by must be a dotted path, like "account.id". Its value is "".', 'partition_by is no empty text'),
  ('{"partition_by": ".a"}', 'partition_by must be a dotted path, like "account.id". Its value is ".a".', 'a path does not begin with a dot'),
  ('{"partition_by": "a."}', 'partition_by must be a dotted path, like "account.id". Its value is "a.".', 'a path does not end with a dot'),
  ('{"partition_by": "a..b"}', 'partition_by must be a dotted path, like "account.id". Its value is "a..b".', 'a path has no empty step'),
  ('{"partition_by": ["a", "b", 7]}', 'partition_by[2] must be a dotted path, like "account.id". Its value is 7.', 'the offending one of several paths is named'),
  ('{"partition_by": [["a"]]}', 'partition_by[0] must be a dotted path, like "account.id". Its value is ["a"].', 'paths are not nested'),
  ('{"shard_by": ["a", null]}', 'shard_by[1] must be a dotted path, like "account.id". Its value is null.', 'shard_by is checked like partition_by'),

  ('{"queue": 7}', 'queue must be a string of 1 to 40 bytes. Its value is 7.', 'a queue is no number'),
  ('{"queue": ""}', 'queue must be a string of 1 to 40 bytes. Its value is "".', 'a queue has a name'),
  ('{"queue": "äääääääääääääääääääää"}', 'queue must be a string of 1 to 40 bytes. Its value is "äääääääääääääääääääää".', 'procrastinate takes no jobs of a queue with a longer name'),

  ('{"partition_batch_size": 0}', 'partition_batch_size must be at least 1. Its value is 0.', 'a tick claims one partition at least'),
  ('{"partition_batch_size": 10001}', 'partition_batch_size must be at most 10000. Its value is 10001.', 'a tick claims 10000 partitions at most'),
  ('{"partition_batch_size": "50"}', 'partition_batch_size must be a number. Its value is "50".', 'a batch size is no text'),
  ('{"admission_batch_size": 0}', 'admission_batch_size must be at least 1. Its value is 0.', 'a partition may be admitted one job at least'),
  ('{"admission_batch_size": 10001}', 'admission_batch_size must be at most 10000. Its value is 10001.', 'a partition is admitted 10000 jobs at most'),
  ('{"admission_batch_size": 1.5}', 'admission_batch_size must be a whole number. Its value is 1.5.', 'a batch size is a whole number'),
  ('{"tick_admission_budget": 0}', 'tick_admission_budget must be at least 1. Its value is 0.', 'a budget is one job at least'),
  ('{"tick_admission_budget": 1000001}', 'tick_admission_budget must be at most 1000000. Its value is 1000001.', 'a budget is a million jobs at most'),
  ('{"max_queued": 0}', 'max_queued must be at least 1. Its value is 0.', 'a queue holds one job at least'),
  ('{"max_queued": -1}', 'max_queued must be at least 1. Its value is -1.', 'and not less than none'),
  ('{"max_queued": 1000001}', 'max_queued must be at most 1000000. Its value is 1000001.', 'a queue holds a million jobs at most'),
  ('{"max_queued": 1.5}', 'max_queued must be a whole number. Its value is 1.5.', 'a queue holds whole jobs'),
  ('{"max_queued": "9"}', 'max_queued must be a number. Its value is "9".', 'a bound of the queue is no text'),
  ('{"max_queued": false}', 'max_queued must be a number. Its value is false.', 'nor false'),
  ('{"max_queued": [9]}', 'max_queued must be a number. Its value is [9].', 'nor an array'),
  ('{"max_pending": -1}', 'max_pending must be at least 1. Its value is -1.', 'a backlog may hold one job at least'),
  ('{"max_pending": 1000000001}', 'max_pending must be at most 1000000000. Its value is 1000000001.', 'a backlog may hold a milliard jobs at most'),
  ('{"max_pending": true}', 'max_pending must be a number. Its value is true.', 'true is no number'),
  ('{"retry_strategy": "later"}', 'retry_strategy must be one of restage, bypass. Its value is "later".', 'an unknown retry strategy is refused'),
  ('{"retry_strategy": 1}', 'retry_strategy must be one of restage, bypass. Its value is 1.', 'a retry strategy is a word'),
  ('{"stalled": "kill"}', 'stalled must be one of leave, retry. Its value is "kill".', 'an unknown way with stalled jobs is refused'),

  ('{"fairness": 60}', 'fairness must be an object. Its value is 60.', 'fairness is an object'),
  ('{"fairness": {"halflife": 60}}', 'fairness.halflife is not known; known here: half_life, weight. Its value is 60.', 'an unknown key of fairness is refused'),
  ('{"fairness": {"half_life": 0}}', 'fairness.half_life must be at least 0.001. Its value is 0.', 'a half-life of 0 is refused'),
  ('{"fairness": {"half_life": 1e-400}}', 'fairness.half_life must be at least 0.001. Its value is ' || left((1e-400)::text, 200) || '.', 'a half-life next to 0 is refused'),
  ('{"fairness": {"half_life": "60"}}', 'fairness.half_life must be a number. Its value is "60".', 'a half-life is no text'),
  ('{"fairness": {"half_life": 315360001}}', 'fairness.half_life must be at most 315360000. Its value is 315360001.', 'a half-life is ten years at most'),
  ('{"fairness": {"weight": 0}}', 'fairness.weight must be at least 0.000001. Its value is 0.', 'a weight of 0 is refused'),
  ('{"fairness": {"weight": 1000001}}', 'fairness.weight must be at most 1000000. Its value is 1000001.', 'a weight is a million at most'),
  ('{"fairness": {"weight": {"ctx": ""}}}', 'fairness.weight.ctx must be a dotted path, like "account.id". Its value is "".', 'a weight is looked up by a path'),
  ('{"fairness": {"weight": {"ctx": "w", "default": -1}}}', 'fairness.weight.default must be at least 0.000001. Its value is -1.', 'the default of a weight is in its range'),

  ('{"gates": {}}', 'gates must be an array. Its value is {}.', 'gates are an array'),
  ('{"gates": [7]}', 'gates[0] must be an object. Its value is 7.', 'a gate is an object'),
  ('{"gates": [{"type": "concurrency", "max": 1}, {"max": 1}]}',
    'gates[1].type must be one of adaptive_concurrency, concurrency, throttle. It is missing.', 'a gate has a type, and the one without is named'),
  ('{"gates": [{"type": "semaphore"}]}', 'gates[0].type must be one of adaptive_concurrency, concurrency, throttle. Its value is "semaphore".', 'an unknown type is refused'),
  ('{"gates": [{"type": "fairness"}]}', 'gates[0].type must be one of adaptive_concurrency, concurrency, throttle. Its value is "fairness".', 'fairness is no gate'),
  ('{"gates": [{"type": ["throttle"]}]}', 'gates[0].type must be one of adaptive_concurrency, concurrency, throttle. Its value is ["throttle"].', 'a type is a text'),
  ('{"gates": [{"type": "concurrency", "max": 1, "burst": 2}]}',
    'gates[0].burst is not known; known here: type, name, max, full_backoff. Its value is 2.', 'a parameter of another type of gate is refused'),
  ('{"gates": [{"type": "concurrency", "max": 1, "name": 7}]}', 'gates[0].name must be a string. Its value is 7.', 'a gate''s name is no number'),
  ('{"gates": [{"type": "concurrency", "max": 1, "name": ""}]}',
    'gates[0].name must be a word of letters, digits, - and _ other than "fairness". Its value is "".', 'a gate''s name is not empty'),
  ('{"gates": [{"type": "concurrency", "max": 1, "name": "a.b"}]}',
    'gates[0].name must be a word of letters, digits, - and _ other than "fairness". Its value is "a.b".', 'a gate''s name has no dot'),
  ('{"gates": [{"type": "concurrency", "max": 1, "name": "fairness"}]}',
    'gates[0].name must be a word of letters, digits, - and _ other than "fairness". Its value is "fairness".', 'no gate is named fairness'),
  ('{"gates": [{"type": "concurrency", "max": 1}, {"type": "concurrency", "max": 2}]}',
    'gates[1].name must differ from the names of the other gates (it defaults to the type). Its value is "concurrency".', 'two gates of one type need names'),
  ('{"gates": [{"type": "concurrency", "max": 1, "name": "a"}, {"type": "throttle", "rate": 1, "per": 1, "name": "a"}]}',
    'gates[1].name must differ from the names of the other gates (it defaults to the type). Its value is "a".', 'gates of two types do not share a name'),
  ('{"gates": [{"type": "concurrency", "max": 1, "name": "throttle"}, {"type": "throttle", "rate": 1, "per": 1}]}',
    'gates[1].name must differ from the names of the other gates (it defaults to the type). Its value is "throttle".', 'nor does one bear the other''s default name')
) as refused (definition, refusal, sentence);

-- The bound of the queue.
create function pg_temp.max_queued(p_definition jsonb) returns text language plpgsql as $$
begin
  perform dispatch_define_policy('queued', p_definition);
  return coalesce((select max_queued::text from dispatch_policies where policy_name = 'queued'), 'none');
end;
$$;
select is(pg_temp.max_queued(definition::jsonb), bound, sentence)
from (values
  ('{}', '1000', 'by default a thousand jobs may be queued'),
  ('{"max_queued": 1}', '1', 'one is a bound'),
  ('{"max_queued": 1000000}', '1000000', 'so is a million'),
  ('{"max_queued": 7.0}', '7', 'a whole number may be written with decimals'),
  ('{"max_queued": null}', 'none', 'null is none'),
  ('{}', '1000', 'left out again, it is a thousand')
) as bounds (definition, bound, sentence);
select throws_ok(format('update dispatch_policies set max_queued = %s where policy_name = ''queued''', bound), '23514', null, format('the table takes no bound of %s either', bound))
from unnest(array[0, -1]) as bound;
delete from dispatch_policies where policy_name = 'queued';

-- A gate's parameters -------------------------------------------------------------------------------

select is(
  pg_temp.refusal(pg_temp.gate(case parameter_of
    when 'throttle' then '{"rate": 60, "per": 60}'::jsonb
    when 'concurrency' then '{"max": 5}'
    else '{"initial_max": 3, "target_lag_ms": 1000}'
  end || jsonb_build_object('type', parameter_of, parameter, value::jsonb))),
  format('invalid definition: gates[0].%s %s. Its value is %s.', parameter, problem, value),
  format('%s.%s %s, so %s is refused', parameter_of, parameter, problem, value))
from (values
  ('throttle', 'rate', '-0.001', 'must be at least 0'),
  ('throttle', 'rate', '1000000001', 'must be at most 1000000000'),
  ('throttle', 'rate', '"60"', 'must be a number'),
  ('throttle', 'rate', '[60]', 'must be a number'),
  ('throttle', 'rate', 'true', 'must be a number'),
  ('throttle', 'rate', 'null', 'is required'),
  ('throttle', 'per', '0', 'must be at least 0.001'),
  ('throttle', 'per', '-60', 'must be at least 0.001'),
  ('throttle', 'per', '315360001', 'must be at most 315360000'),
  ('throttle', 'per', '"1 minute"', 'must be a number'),
  ('throttle', 'per', 'null', 'is required'),
  ('throttle', 'burst', '0.5', 'must be at least 1'),
  ('throttle', 'burst', '1000000001', 'must be at most 1000000000'),
  ('concurrency', 'max', '-1', 'must be at least 0'),
  ('concurrency', 'max', '1000000001', 'must be at most 1000000000'),
  ('concurrency', 'max', 'null', 'is required'),
  ('concurrency', 'full_backoff', '0', 'must be greater than 0'),
  ('concurrency', 'full_backoff', '86401', 'must be at most 86400'),
  ('adaptive_concurrency', 'initial_max', '0', 'must be at least 1'),
  ('adaptive_concurrency', 'initial_max', '1000000001', 'must be at most 1000000000'),
  ('adaptive_concurrency', 'initial_max', 'null', 'is required'),
  ('adaptive_concurrency', 'target_lag_ms', '0', 'must be greater than 0'),
  ('adaptive_concurrency', 'target_lag_ms', '1000000001', 'must be at most 1000000000'),
  ('adaptive_concurrency', 'target_lag_ms', 'null', 'is required'),
  ('adaptive_concurrency', 'min', '0', 'must be at least 1'),
  ('adaptive_concurrency', 'max', '0', 'must be at least 1'),
  ('adaptive_concurrency', 'ewma_alpha', '0', 'must be greater than 0'),
  ('adaptive_concurrency', 'ewma_alpha', '1.01', 'must be at most 1'),
  ('adaptive_concurrency', 'failure_decrease_factor', '0', 'must be greater than 0'),
  ('adaptive_concurrency', 'failure_decrease_factor', '1', 'must be less than 1'),
  ('adaptive_concurrency', 'failure_decrease_factor', '1.5', 'must be less than 1'),
  ('adaptive_concurrency', 'overload_decrease_factor', '0', 'must be greater than 0'),
  ('adaptive_concurrency', 'overload_decrease_factor', '1', 'must be less than 1'),
  ('adaptive_concurrency', 'full_backoff', '0', 'must be greater than 0')
) as refused (parameter_of, parameter, value, problem);

select is(
  pg_temp.refusal(pg_temp.gate(gate::jsonb)), 'invalid definition: ' || refusal, sentence)
from (values
  ('{"type": "throttle", "per": 60}', 'gates[0].rate is required. It is missing.', 'a throttle has a rate'),
  ('{"type": "throttle", "rate": 60}', 'gates[0].per is required. It is missing.', 'a throttle says per how many seconds'),
  ('{"type": "concurrency"}', 'gates[0].max is required. It is missing.', 'a concurrency gate has a max'),
  ('{"type": "adaptive_concurrency", "target_lag_ms": 1}', 'gates[0].initial_max is required. It is missing.', 'an adaptive gate has a cap to begin with'),
  ('{"type": "adaptive_concurrency", "initial_max": 1}', 'gates[0].target_lag_ms is required. It is missing.', 'an adaptive gate has a lag to aim at'),
  ('{"type": "adaptive_concurrency", "target_lag_ms": 1, "initial_max": 2, "min": 3}',
    'gates[0].initial_max must be at least min, which is 3. Its value is 2.', 'initial_max is not below min'),
  ('{"type": "adaptive_concurrency", "target_lag_ms": 1, "initial_max": 3, "max": 2}',
    'gates[0].max must be at least initial_max, which is 3. Its value is 2.', 'max is not below initial_max')
) as refused (gate, refusal, sentence);

select is(
  pg_temp.refusal(pg_temp.gate(jsonb_build_object('type', 'throttle', 'per', 60, 'rate', rate::jsonb))),
  'invalid definition: gates[0].rate' || refusal, sentence)
from (values
  ('{}', ' must have one of "ctx" and "sql". Its value is {}.', 'a looked-up number says where to look'),
  ('{"default": 5}', ' must have one of "ctx" and "sql". Its value is {"default": 5}.', 'a default alone is no number'),
  ('{"ctx": "a", "sql": "limit_of"}', ' must have one of "ctx" and "sql". Its value is {"ctx": "a", "sql": "limit_of"}.', 'a number is looked up in one place'),
  ('{"ctx": "a", "fallback": 5}', '.fallback is not known; known here: ctx, sql, default. Its value is 5.', 'an unknown key beside ctx is refused'),
  ('{"ctx": 7}', '.ctx must be a dotted path, like "plan.rate". Its value is 7.', 'a path is a text'),
  ('{"ctx": ["a"]}', '.ctx must be a dotted path, like "plan.rate". Its value is ["a"].', 'a number has one path only'),
  ('{"ctx": "a..b"}', '.ctx must be a dotted path, like "account.id". Its value is "a..b".', 'the path of a number has no empty step'),
  ('{"ctx": "a", "default": "5"}', '.default must be a number. Its value is "5".', 'a default is a number'),
  ('{"ctx": "a", "default": -1}', '.default must be at least 0. Its value is -1.', 'a default lies in the range of its parameter'),
  ('{"sql": "limit_of", "default": {"ctx": "a"}}', '.default must be a number. Its value is {"ctx": "a"}.', 'a default is not looked up'),
  ('{"sql": 7}', '.sql must name an existing function, schema and all, (partition_key text, context jsonb) returns numeric. Its value is 7.', 'a function''s name is a text'),
  ('{"sql": "no_such"}', '.sql must name an existing function, schema and all, (partition_key text, context jsonb) returns numeric. Its value is "no_such".', 'the function exists'),
  ('{"sql": "not_a_number_of"}', '.sql must name an existing function, schema and all, (partition_key text, context jsonb) returns numeric. Its value is "not_a_number_of".', 'the function returns a number'),
  ('{"sql": "limit_of(text, jsonb)"}', '.sql must name an existing function, schema and all, (partition_key text, context jsonb) returns numeric. Its value is "limit_of(text, jsonb)".', 'the function is named without its arguments'),
  ('{"sql": "limit_of(''k'', ''{}''); drop table t; --"}', '.sql must name an existing function, schema and all, (partition_key text, context jsonb) returns numeric. Its value is "limit_of(''k'', ''{}''); drop table t; --".', 'a statement is no function''s name')
) as refused (rate, refusal, sentence);

-- What is taken -------------------------------------------------------------------------------------

select is(pg_temp.refusal(definition::jsonb), null, sentence)
from (values
  ('{}', 'no gates at all is a policy: it balances tenants'),
  ('{"partition_by": null, "shard_by": null, "queue": null, "gates": null, "fairness": null, "partition_batch_size": null, '
    '"admission_batch_size": null, "tick_admission_budget": null, "max_pending": null, "retry_strategy": null, "stalled": null}',
    'null is the same as leaving a key out'),
  ('{"partition_batch_size": 10000, "admission_batch_size": 10000, "tick_admission_budget": 1000000, "max_pending": 1000000000}', 'the largest sizes are taken'),
  ('{"partition_batch_size": 1.0}', 'a whole number may be written with decimals'),
  ('{"gates": [{"type": "throttle", "rate": 0, "per": 0.5}]}', 'a rate of 0 may be meant: it stops the policy'),
  ('{"gates": [{"type": "concurrency", "max": 0}]}', 'so may a max of 0'),
  ('{"gates": [{"type": "throttle", "rate": 0.5, "per": 1}]}', 'a rate below 1 is taken'),
  ('{"gates": [{"type": "throttle", "rate": {"ctx": "a.b", "default": null}, "per": {"ctx": "c"}}]}', 'a looked-up number needs no default'),
  ('{"gates": [{"type": "throttle", "rate": {"sql": "limit_of"}, "per": 1, "burst": {"sql": "public.limit_of", "default": 2}}]}', 'a function may be named with its schema'),
  ('{"gates": [{"type": "throttle", "rate": 1, "per": 1, "name": "per_second"}, {"type": "throttle", "rate": 60, "per": 3600, "name": "per-hour"}]}', 'two gates of one type have their own names'),
  ('{"gates": [{"type": "adaptive_concurrency", "initial_max": 3, "min": 3, "max": 3, "target_lag_ms": 0.5, "ewma_alpha": 1}]}', 'an adaptive gate may be pinned'),
  ('{"gates": [{"type": "adaptive_concurrency", "initial_max": {"ctx": "a"}, "min": 9, "target_lag_ms": 1}]}', 'what is known at tick time only is not compared'),
  ('{"fairness": {"half_life": null}}', 'a half-life of null keeps due order'),
  ('{"fairness": {"half_life": 0.001, "weight": {"sql": "limit_of", "default": 1}}}', 'a weight may be asked of a function')
) as taken (definition, sentence);

-- What a definition becomes -------------------------------------------------------------------------

do $$
begin
  perform dispatch_define_policy('endpoints', '{
    "partition_by": ["account.id", "endpoint_id"],
    "shard_by": "region",
    "queue": "http",
    "gates": [
      {"type": "throttle", "name": "per_minute", "rate": {"ctx": "rate_limit", "default": 60}, "per": 60},
      {"type": "concurrency", "max": {"sql": "limit_of"}}
    ],
    "fairness": {"half_life": 30, "weight": {"ctx": "plan.weight"}},
    "tick_admission_budget": 500,
    "retry_strategy": "bypass"
  }');
  perform dispatch_define_policy('plain', '{}');
end;
$$;

select results_eq(
  $$select partition_by, shard_by, queue_name, half_life, partition_batch_size, admission_batch_size, tick_admission_budget,
      max_pending, retry_strategy, stalled, created_at, updated_at
    from dispatch_policies where policy_name = 'endpoints'$$,
  $$values ('{account.id,endpoint_id}'::text[], '{region}'::text[], 'http', 30::double precision, 50, 100, 500,
      null::bigint, 'bypass', 'leave', '2026-01-01 00:00+00'::timestamptz, '2026-01-01 00:00+00'::timestamptz)$$,
  'each key has its column');
select is(gates, '[
    {"type": "throttle", "name": "per_minute", "rate": {"ctx": "rate_limit", "default": 60}, "per": 60, "burst": null},
    {"type": "concurrency", "name": "concurrency", "max": {"sql": "limit_of"}, "full_backoff": 1}
  ]'::jsonb, 'gates get their names and defaults')
from dispatch_policies where policy_name = 'endpoints';
select is(literals, '{"per_minute.per": 60, "concurrency.full_backoff": 1}'::jsonb, 'plain numbers are kept by gate and parameter')
from dispatch_policies where policy_name = 'endpoints';
select is(lookups, '[
    {"name": "concurrency.max", "sql": "limit_of"},
    {"name": "fairness.weight", "ctx": "plan.weight"},
    {"name": "per_minute.rate", "ctx": "rate_limit", "default": 60}
  ]'::jsonb, 'numbers to be looked up are kept apart')
from dispatch_policies where policy_name = 'endpoints';
select is(context_paths, '{account.id,endpoint_id,plan.weight,rate_limit,region}', 'every path that the definition names is kept of the args')
from dispatch_policies where policy_name = 'endpoints';

select results_eq(
  $$select partition_by, shard_by, queue_name, gates, literals, lookups, context_paths, half_life, partition_batch_size,
      admission_batch_size, tick_admission_budget, max_pending, retry_strategy, stalled
    from dispatch_policies where policy_name = 'plain'$$,
  $$values ('{}'::text[], '{}'::text[], 'default', '[]'::jsonb, '{"fairness.weight": 1}'::jsonb, '[]'::jsonb, '{}'::text[], 60::double precision, 50,
      100, null::integer, null::bigint, 'restage', 'leave')$$,
  'what a definition leaves out has its default');
select is(
  array(select v || ' ' || (p).half_life from (values ('{}'), ('{"fairness": {"weight": 2}}'), ('{"fairness": {"half_life": null}}')) as d (v),
    dispatch_parse_policy('p', v::jsonb, dispatch_now()) as p where (p).half_life is not null),
  '{"{} 60","{\"fairness\": {\"weight\": 2}} 60"}', 'the half-life is 60 seconds unless it is given as null');

-- Changing a policy ---------------------------------------------------------------------------------

do $$
begin
  perform dispatch_define_policy('capped', '{"partition_by": "k", "gates": [{"type": "concurrency", "max": 1, "full_backoff": 3600}]}');
  perform dispatch_stage('capped', 't', '{"k": "a"}') from generate_series(1, 6);
end;
$$;
select is(jobs_admitted, 1, 'a cap of 1 admits one job') from dispatch_tick('capped');
select is(partitions_seen, 0, 'the full partition is not looked at again') from dispatch_tick('capped');

set local track_functions = 'pl';
do $$ begin
  perform pg_temp.clock(10);
  perform dispatch_define_policy('capped', '{"gates": [{"max": 1.0, "full_backoff": 3600, "type": "concurrency"}], "partition_by": "k"}');
end $$;
select is(updated_at, '2026-01-01 00:00+00', 'the same definition in other words changes nothing')
from dispatch_policies where policy_name = 'capped';
select is_empty($$select from dispatch_inbox where policy_name = 'capped'$$, 'nor does it write a note');
select is(coalesce(pg_stat_get_xact_function_calls('dispatch_wake(text)'::regprocedure), 0), 0::bigint, 'nor does it wake anybody');

do $$ begin perform dispatch_define_policy('capped', '{"partition_by": "k", "gates": [{"type": "concurrency", "max": 3, "full_backoff": 3600}]}'); end $$;
select results_eq(
  $$select created_at, updated_at from dispatch_policies where policy_name = 'capped'$$,
  $$values ('2026-01-01 00:00:00+00'::timestamptz, '2026-01-01 00:00:10+00'::timestamptz)$$,
  'a change is dated, the policy stays as old as it is');
select is(pg_stat_get_xact_function_calls('dispatch_wake(text)'::regprocedure), 1::bigint, 'a change wakes the drivers');
select is(jobs_admitted, 2, 'a raised cap counts at the next tick') from dispatch_tick('capped');

do $$ begin perform dispatch_define_policy('capped', '{"partition_by": "k", "gates": [{"type": "concurrency", "max": 1}]}'); end $$;
select is(jobs_admitted, 0, 'a cap lowered below what runs admits nothing') from dispatch_tick('capped');
do $$ begin perform dispatch_define_policy('capped', '{"partition_by": "k", "gates": [{"type": "concurrency", "max": 4}]}'); end $$;
select is(jobs_admitted, 1, 'and raised again it still counts what runs') from dispatch_tick('capped');

do $$ begin
  perform dispatch_define_policy('hourly', '{"gates": [{"type": "throttle", "rate": 2, "per": 3600}]}');
  perform dispatch_stage('hourly', 't') from generate_series(1, 50);
end $$;
select is(jobs_admitted, 2, 'a rate of 2 admits two jobs') from dispatch_tick('hourly');
do $$ begin
  perform dispatch_define_policy('hourly', '{"gates": [{"type": "throttle", "rate": 3600, "per": 3600}]}');
end $$;
select is(jobs_admitted, 0, 'a raised rate gives no tokens for the time before') from dispatch_tick('hourly');
do $$ begin perform pg_temp.clock(15); end $$;
select is(jobs_admitted, 5, 'a raised rate counts from the change on') from dispatch_tick('hourly');

do $$ begin
  perform dispatch_pause('capped');
  perform dispatch_define_policy('capped', '{"partition_by": "k", "gates": [{"type": "concurrency", "max": 9}]}');
end $$;
select is(jobs_admitted, 0, 'a changed limit lifts no pause') from dispatch_tick('capped');

-- Tasks ---------------------------------------------------------------------------------------------

do $$ begin
  perform dispatch_map_task('app.fetch', 'capped'), dispatch_map_task('app.send', 'capped'), dispatch_map_task('app.send', 'hourly');
end $$;
select results_eq(
  'select task_name, policy_name from dispatch_tasks order by task_name', $$values ('app.fetch', 'capped'), ('app.send', 'hourly')$$,
  'a task follows the policy that it was mapped to last');
select throws_ok(
  $$select dispatch_map_task('app.fetch', 'no_such')$$, 'PD001', 'unknown policy ''no_such''', 'a task cannot follow an unknown policy');

-- Dropping ------------------------------------------------------------------------------------------

select throws_ok($$select dispatch_drop_policy('no_such')$$, 'PD001', 'unknown policy ''no_such''', 'an unknown policy cannot be dropped');
select throws_ok($$select dispatch_drop_policy(null)$$, 'PD001', 'unknown policy NULL', 'nor can none');
select throws_ok(
  $$select dispatch_drop_policy('capped')$$, 'PD005', 'policy ''capped'' still holds 2 jobs', 'a policy is not dropped while jobs are staged');
do $$ begin perform dispatch_stage('capped', 't', '{"k": "new"}'); end $$;
select throws_ok(
  $$select dispatch_drop_policy('capped')$$, 'PD005', 'policy ''capped'' still holds 3 jobs', 'jobs that no tick has seen yet count as well');

do $$ begin perform dispatch_drop_policy('capped', p_force => true); end $$;
select results_eq(
  $$select partition_key, task_name, error, died_at from dispatch_dead_jobs where policy_name = 'capped' order by id$$,
  $$values ('a', 't', 'policy dropped', '2026-01-01 00:00:15+00'::timestamptz), ('a', 't', 'policy dropped', '2026-01-01 00:00:15+00'::timestamptz),
    ('new', 't', 'policy dropped', '2026-01-01 00:00:15+00'::timestamptz)$$,
  'forced, its waiting jobs go to the dead ones, with the reason');
select is(
  (select count(*) from dispatch_policies where policy_name = 'capped')
  + (select count(*) from dispatch_partitions where policy_name = 'capped')
  + (select count(*) from dispatch_staged_jobs where policy_name = 'capped')
  + (select count(*) from dispatch_inbox where policy_name = 'capped')
  + (select count(*) from dispatch_inflight_jobs where policy_name = 'capped')
  + (select count(*) from dispatch_pauses where policy_name = 'capped')
  + (select count(*) from dispatch_tasks where policy_name = 'capped'),
  0::bigint, 'and nothing else of it is left');
select is((select count(*) from procrastinate_jobs where status = 'todo'), 4 + 7::bigint, 'what was handed off stays in procrastinate''s queue');
select is(count(*), 43::bigint, 'another policy''s jobs are not touched') from dispatch_staged_jobs where policy_name = 'hourly';

do $$ begin
  perform dispatch_define_policy('capped', '{"partition_by": "k", "gates": [{"type": "concurrency", "max": 1}]}');
  perform dispatch_stage('capped', 't', '{"k": "a"}');
end $$;
select is(jobs_admitted, 1, 'defined anew, a policy starts with free slots') from dispatch_tick('capped');
select lives_ok($$select dispatch_drop_policy('capped')$$, 'a policy whose jobs are all handed off is dropped without force');

select * from finish();
rollback;
