-- Staging: keys, contexts, ids, locks, schedules; a bad job costs its batch and nothing else.
begin;
select plan(156);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';
set local client_min_messages = error; -- shards that are finer than partitions
set local track_functions = 'pl';

do $$ begin
  perform dispatch_define_policy('by_k', '{"partition_by": "k", "shard_by": "region", "queue": "http"}');
  perform dispatch_define_policy('by_two', '{"partition_by": ["a", "b.c"], "shard_by": ["x", "y"]}');
  perform dispatch_define_policy('by_nothing', '{}');
  perform dispatch_define_policy('by_plan', '{"partition_by": "account.id", "shard_by": "account.region", "gates": [
    {"type": "concurrency", "max": {"ctx": "account.plan.max", "default": 1}}], "fairness": {"weight": {"ctx": "weight"}}}');
end $$;

-- The row of a job that is staged with this context, or with these keys.
create function pg_temp.staged(p_policy text, p_job jsonb) returns dispatch_staged_jobs language plpgsql as $$
declare
  v_id constant bigint := (select id from dispatch_stage_many(p_policy, jsonb_build_array('{"task_name": "t"}' || p_job)) as id);
  v_staged dispatch_staged_jobs;
begin
  select * into v_staged from dispatch_staged_jobs where id = v_id;
  return v_staged;
end $$;

create function pg_temp.key_of(p_policy text, p_context jsonb) returns text language sql
return (pg_temp.staged(p_policy, jsonb_build_object('context', p_context))).partition_key;

create function pg_temp.detail_of(p_statement text) returns text language plpgsql as $$
declare
  v_detail text;
begin
  execute p_statement;
  return null;
exception
  when others then
    get stacked diagnostics v_detail = pg_exception_detail;
    return v_detail;
end $$;

create function pg_temp.fold(p_policy text) returns void language sql as $$
  select dispatch_fold(p_policy, dispatch_now());
$$;

-- The partition key ---------------------------------------------------------------------------------

select is(pg_temp.key_of('by_k', context), key, sentence)
from (values
  ('{"k": "a"}'::jsonb, 'a', 'the key is the value at partition_by'),
  ('{"k": 7}', '7', 'a number is a key, as text'),
  ('{"k": 7.50}', '7.50', 'a number keeps its decimals'),
  ('{"k": true}', 'true', 'true is a key, as text'),
  ('{"k": {"b": 1, "a": [2]}}', '{"a": [2], "b": 1}', 'an object is a key, as text'),
  ('{"k": null}', '', 'null is the empty key'),
  ('{}', '', 'a missing value is the empty key'),
  ('{"k": ""}', '', 'an empty text is the empty key'),
  ('{"k": "*"}', '*', 'a star is a key like any other'),
  ('{"k": " a "}', ' a ', 'blanks are kept'),
  ('{"k": "a\nb\tc"}', e'a\nb\tc', 'line ends are kept'),
  ('{"k": "🐘👩‍👩‍👧 ünï"}', '🐘👩‍👩‍👧 ünï', 'any Unicode is kept'),
  ('{"k": "%s \\ '' \""}', '%s \ '' "', 'nothing in a key is special'),
  (jsonb_build_object('k', repeat('é', 10000)), repeat('é', 10000), 'a key may have 10000 characters')
) as keys (context, key, sentence);

select is(pg_temp.key_of('by_two', context::jsonb), key, sentence)
from (values
  ('{"a": "x", "b": {"c": 7}}', '["x", 7]', 'several values make a JSON array'),
  ('{"a": "7", "b": {"c": 7}}', '["7", 7]', 'in which text and number differ'),
  ('{"b": {"c": "x"}}', '[null, "x"]', 'and what is missing is null'),
  ('{"a": ["x", null]}', '[["x", null], null]', 'so that no two combinations are one key')
) as keys (context, key, sentence);

select is(pg_temp.key_of('by_nothing', '{"k": "a"}'), '', 'without partition_by all jobs share the empty key');

do $$ begin perform pg_temp.fold('by_k'), pg_temp.fold('by_nothing'); end $$;
select results_eq(
  $$select length(partition_key), pending_count from dispatch_partitions where policy_name = 'by_k' and partition_key in ('', '*', repeat('é', 10000)) order by 1$$,
  $$values (0, 3::bigint), (1, 1), (10000, 1)$$, 'each key becomes a partition, odd ones too');
select is(
  (select count(distinct id) from dispatch_partitions where partition_key = ''), 2::bigint, 'the empty keys of two policies are two partitions');
select isnt(
  dispatch_partition_id('p', null), dispatch_partition_id('p', ''), 'the empty key is not the policy itself');
select is(
  (select count(distinct dispatch_partition_id('p', key)) from unnest(array['a', 'A', ' a', 'a ', e'a\n', 'ä', 'á', 'a']) as key), 7::bigint,
  'keys that look alike are different partitions');

-- The shard -----------------------------------------------------------------------------------------

do $$ begin
  perform dispatch_stage('by_k', 't', p_context => '{"k": "s1", "region": "eu"}');
  perform dispatch_stage('by_k', 't', p_context => '{"k": "s2"}');
  perform dispatch_stage('by_k', 't', p_context => '{"k": "s3", "region": ""}');
  perform dispatch_stage('by_k', 't', p_context => '{"k": "s4", "region": "🐘"}');
  perform dispatch_stage('by_two', 't', p_context => '{"a": "s5", "x": "eu", "y": 1}');
  perform pg_temp.fold('by_k'), pg_temp.fold('by_two');
  perform dispatch_stage('by_k', 't', p_context => '{"k": "s1", "region": "us"}');
  perform pg_temp.fold('by_k');
end $$;
select is(shard, expected, sentence)
from (values
  ('s1', 'eu', 'a partition stays in the shard in which it was seen first'),
  ('s2', 'default', 'without a value the shard is ''default'''),
  ('s3', 'default', 'so it is with an empty one'),
  ('s4', '🐘', 'any text is a shard'),
  ('["s5", null]', '["eu", 1]', 'several values make a shard as they make a key')
) as shards (partition_key, expected, sentence)
join dispatch_partitions using (partition_key);

-- The context ---------------------------------------------------------------------------------------

select is((pg_temp.staged('by_plan', job::jsonb)).context, context::jsonb, sentence)
from (values
  ('{"context": {"any": ["thing"]}, "args": {"weight": 2}}', '{"any": ["thing"]}', 'a context is kept as it was given'),
  ('{"args": {"account": {"id": 7, "name": "x", "region": "eu", "plan": {"max": 5, "price": 9}}, "weight": 2, "body": "long"}}',
    '{"account": {"id": 7, "region": "eu", "plan": {"max": 5}}, "weight": 2}', 'without one it is what the policy names of the args'),
  ('{"context": null, "args": {"weight": 2}}', '{"weight": 2}', 'a null context is none'),
  ('{"args": {"account": 7, "weight": null}}', '{"weight": null}', 'a path that the args do not have is left out'),
  ('{"args": {}}', '{}', 'no args make an empty context'),
  ('{"context": {}, "args": {"weight": 2}}', '{}', 'an empty context is one')
) as contexts (job, context, sentence);
select is(dispatch_named_part('{"a": {"b": 1, "c": 2}, "d": 3}', paths), part::jsonb, sentence)
from (values
  ('{}'::text[], '{}', 'no paths name nothing'),
  ('{a.b,a}', '{"a": {"b": 1, "c": 2}}', 'a path and a part of it name the whole'),
  ('{a,a.b}', '{"a": {"b": 1, "c": 2}}', 'in any order'),
  ('{a.b,d,e}', '{"a": {"b": 1}, "d": 3}', 'of several paths, those that are there')
) as parts (paths, part, sentence);
select is(dispatch_named_part('{"a": [[1, 2], {"b": 3}]}', paths), part::jsonb, sentence)
from (values
  ('{a,a.0,a.1.b}'::text[], '{"a": [[1, 2], {"b": 3}]}', 'an array that is named whole and in parts stays whole'),
  ('{a.0.1,a}', '{"a": [[1, 2], {"b": 3}]}', 'in any order'),
  ('{a.0.1,a.1}', '{"a": {"0": {"1": 2}, "1": {"b": 3}}}', 'of one that is named in parts alone the parts are found by the same paths')
) as parts (paths, part, sentence);

do $$ begin
  perform dispatch_stage_many('by_plan', '[
    {"task_name": "t", "context": {"account": {"id": "n"}, "v": 1}, "priority": 9},
    {"task_name": "t", "context": {"account": {"id": "n"}, "v": 2}, "scheduled_at": "2030-01-01T00:00:00Z"}]');
  perform pg_temp.fold('by_plan');
end $$;
select is(context -> 'v', '2', 'of one batch the last context of a partition counts, whatever its priority or schedule')
from dispatch_partitions where policy_name = 'by_plan' and partition_key = 'n';
do $$ begin
  perform dispatch_stage('by_plan', 't', p_context => '{"account": {"id": "n"}, "v": 3}');
  perform dispatch_stage('by_plan', 't', p_context => '{"account": {"id": "n"}, "v": 4}');
  perform dispatch_stage('by_plan', 't', p_context => '{"account": {"id": "other"}, "v": 5}');
  perform pg_temp.fold('by_plan');
end $$;
select is(context -> 'v', '4', 'of several batches the newest context counts')
from dispatch_partitions where policy_name = 'by_plan' and partition_key = 'n';
do $$ begin
  perform dispatch_stage('by_plan', 't', '{"account": {"id": "n"}}');
  perform pg_temp.fold('by_plan');
end $$;
select is(context, '{"account": {"id": "n"}}', 'the newest context replaces the older one whole')
from dispatch_partitions where policy_name = 'by_plan' and partition_key = 'n';

-- What is written -----------------------------------------------------------------------------------

select results_eq(
  $$select task_name, queue_name, priority, lock, queueing_lock, scheduled_at, eligible_at, staged_at, args, attempts, parked
    from pg_temp.staged('by_k', '{"task_name": "app.fetch", "queue_name": "slow", "priority": -5, "lock": "l", "queueing_lock": "ql",
      "scheduled_at": "2030-01-31T12:00:00+02:00", "args": {"n": [1, null]}}')$$,
  $$values ('app.fetch', 'slow', -5, 'l', 'ql', '2030-01-31 10:00+00'::timestamptz, '2030-01-31 10:00+00'::timestamptz,
    '2026-01-01 00:00+00'::timestamptz, '{"n": [1, null]}'::jsonb, 0, false)$$,
  'a job is staged as it was deferred');
select results_eq(
  $$select queue_name, priority, lock, queueing_lock, scheduled_at, eligible_at, args from pg_temp.staged('by_k', '{}')$$,
  $$values ('http', 0, null, null, null::timestamptz, '-infinity'::timestamptz, '{}'::jsonb)$$,
  'what a job leaves out has its default, the queue the policy''s');
select results_eq(
  $$select queue_name, priority, lock, args from pg_temp.staged('by_k', '{"queue_name": null, "priority": null, "lock": null, "args": null}')$$,
  $$values ('http', 0, null, '{}'::jsonb)$$, 'null is the same as leaving a key out');
select is((pg_temp.staged('by_k', '{"priority": 3.0}')).priority, 3, 'a whole number may be written with decimals');
select is((pg_temp.staged('by_k', '{"priority": 2e3}')).priority, 2000, 'or with an exponent');
do $$ begin perform dispatch_stage('by_k', 'app.fetch', '{"n": 1}', '{"k": "a"}', 'slow', 4, 'l', 'ql2', '2030-01-31 12:00+02'); end $$;
select is(
  (select row(task_name, queue_name, priority, lock, queueing_lock, scheduled_at, args, context)::text from dispatch_staged_jobs where queueing_lock = 'ql2'),
  row('app.fetch', 'slow', 4, 'l', 'ql2', '2030-01-31 10:00+00'::timestamptz, '{"n": 1}'::jsonb, '{"k": "a"}'::jsonb)::text,
  'dispatch_stage stages one job from its arguments');

-- One job, staged alone and as a batch of one: what is written, but for ids.
create function pg_temp.written(p_sql text) returns text language plpgsql as $$
declare
  v_id bigint;
begin
  execute p_sql into v_id;
  return (
    select (to_jsonb(s) - 'id' || jsonb_build_object('note', to_jsonb(i) - 'id' - 'newest_id', 'newest', i.newest_id = s.id))::text
    from dispatch_staged_jobs as s
    join dispatch_inbox as i on i.newest_id = s.id
    where s.id = v_id);
end $$;
create function pg_temp.alone(p_policy text, p_job jsonb) returns text language sql
return pg_temp.written(format('select dispatch_stage(%L, %s)', p_policy, (
  select string_agg(format('p_%s => %L', key, p_job ->> key), ', ') from jsonb_object_keys(p_job) as key)));
create function pg_temp.in_batch(p_policy text, p_job jsonb) returns text language sql
return pg_temp.written(format('select dispatch_stage_many(%L, %L)', p_policy, jsonb_build_array(p_job)));

select is(pg_temp.alone(policy, job::jsonb), pg_temp.in_batch(policy, job::jsonb), 'one job is staged as a batch of one: ' || sentence)
from (values
  ('by_k', '{"task_name": "t"}', 'with defaults'),
  ('by_k', '{"task_name": "t", "args": {"k": 1, "v": [2]}, "context": {"k": "🐘", "region": "eu"}, "queue_name": "q", "priority": 7, "lock": "l"}', 'with everything'),
  ('by_k', '{"task_name": "t", "context": null, "args": {"k": 3, "v": 4}, "queue_name": null, "lock": null}', 'with nulls'),
  ('by_k', '{"task_name": "t", "priority": null, "args": null}', 'with null where there is a default'),
  ('by_plan', '{"task_name": "t", "args": {"account": {"id": 7, "name": "x", "plan": {"max": 5}}, "weight": 2}}', 'without a context'),
  ('by_two', '{"task_name": "t", "context": {"a": 1, "x": 2}}', 'in a shard of several values'),
  ('by_nothing', '{"task_name": "t", "scheduled_at": "2030-01-31T12:00:00+02:00"}', 'for later'),
  ('by_nothing', '{"task_name": "t", "scheduled_at": "2020-01-31T12:00:00+02:00"}', 'for a time that is past')
) as jobs (policy, job, sentence);

-- Ids -----------------------------------------------------------------------------------------------

create temporary table ids on commit drop as
select row_number() over () as place, id
from dispatch_stage_many('by_k', (select jsonb_agg(jsonb_build_object('task_name', 't' || i, 'context', jsonb_build_object('k', i % 3))) from generate_series(1, 500) as i)) as id;
select is(
  array(select s.task_name from ids join dispatch_staged_jobs as s using (id) order by ids.place),
  array(select 't' || i from generate_series(1, 500) as i), 'ids come in the order of the array');
select is(array(select id from ids order by place), array(select id from ids order by id), 'and rise with it');
select is(currval('procrastinate_jobs_id_seq'), max(id), 'ids are taken from procrastinate''s own sequence') from ids;
select is(
  (procrastinate_defer_jobs_v1(array[row('q', 't', 0, null, null, '{}', null)::procrastinate_job_to_defer_v1]))[1], (select max(id) + 1 from ids),
  'so that no job of procrastinate has the id of a staged one');
select is(count(*), 3::bigint, 'a batch writes one note a partition') from dispatch_inbox where newest_id in (select id from ids);
select is(array_agg(jobs order by partition_key), '{166,167,167}', 'which says how many came') from dispatch_inbox where newest_id in (select id from ids);
select is_empty($$select dispatch_stage_many('by_k', '[]')$$, 'an empty batch has no ids');

-- Bad jobs ------------------------------------------------------------------------------------------

create temporary table before on commit drop as
select (select count(*) from dispatch_staged_jobs) as staged, (select count(*) from dispatch_inbox) as notes;

select throws_ok(
  format('select dispatch_stage_many(''by_k'', %L)', jsonb_build_array('{"task_name": "good"}'::jsonb, bad::jsonb, '{}'::jsonb)),
  'PD003', 'invalid job at position 1: ' || problem, sentence)
from (values
  ('7', 'it must be an object', 'a number is no job'),
  ('null', 'it must be an object', 'null is no job'),
  ('[]', 'it must be an object', 'an array is no job'),
  ('{}', 'task_name must be a string of 1 to 128 characters', 'a job has a task'),
  ('{"task_name": null}', 'task_name must be a string of 1 to 128 characters', 'a task''s name is not null'),
  ('{"task_name": 7}', 'task_name must be a string of 1 to 128 characters', 'a task''s name is no number'),
  ('{"task_name": ""}', 'task_name must be a string of 1 to 128 characters', 'a task''s name is not empty'),
  (format('{"task_name": "%s"}', repeat('x', 129)), 'task_name must be a string of 1 to 128 characters', 'a task''s name has 128 characters at most'),
  ('{"task_name": "t", "task": "x"}', 'task is not known; known are task_name, args, context, queue_name, priority, lock, queueing_lock, scheduled_at', 'an unknown key is refused'),
  ('{"task_name": "t", "args": [7]}', 'args must be an object', 'args are an object'),
  ('{"task_name": "t", "args": "{}"}', 'args must be an object', 'args are no text'),
  ('{"task_name": "t", "context": 7}', 'context must be an object', 'a context is an object'),
  ('{"task_name": "t", "queue_name": ""}', 'queue_name must be a string of 1 to 40 bytes', 'a queue has a name'),
  (format('{"task_name": "t", "queue_name": "%s"}', repeat('x', 41)), 'queue_name must be a string of 1 to 40 bytes', 'procrastinate takes no jobs of a queue with a longer name'),
  ('{"task_name": "t", "lock": 7}', 'lock must be a string', 'a lock is a text'),
  ('{"task_name": "t", "queueing_lock": true}', 'queueing_lock must be a string of at most 2600 bytes', 'a queueing lock is a text'),
  ('{"task_name": "t", "priority": "5"}', 'priority must be a whole number between -2147483647 and 2147483647', 'a priority is no text'),
  ('{"task_name": "t", "priority": 1.5}', 'priority must be a whole number between -2147483647 and 2147483647', 'a priority is a whole number'),
  ('{"task_name": "t", "priority": 2147483648}', 'priority must be a whole number between -2147483647 and 2147483647', 'a priority fits an integer'),
  ('{"task_name": "t", "priority": 1e400}', 'priority must be a whole number between -2147483647 and 2147483647', 'an enormous priority is refused as such'),
  ('{"task_name": "t", "scheduled_at": 7}', 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"', 'a schedule is no number'),
  ('{"task_name": "t", "scheduled_at": "tomorrow"}', 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"', 'a schedule is a time'),
  ('{"task_name": "t", "scheduled_at": "infinity"}', 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"', 'a schedule is not infinite'),
  ('{"task_name": "t", "scheduled_at": "2030-01-31T12:00:00"}', 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"', 'a schedule without an offset is refused, for it depends on the reader'),
  ('{"task_name": "t", "scheduled_at": "2030-02-31T12:00:00Z"}', 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"', 'a schedule is a day of the calendar'),
  ('{"task_name": "t", "scheduled_at": "99999999-01-01T00:00:00Z"}', 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"', 'a schedule is a time that the database can hold'),
  ('{"task_name": "t", "scheduled_at": "0001-01-01T00:00:00+14:00"}', 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"', 'a schedule does not lie before our era, where no client could read it'),
  ('{"task_name": "t", "scheduled_at": "10000-01-01T00:00:00Z"}', 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"', 'nor in the year 10000')
) as bad (bad, problem, sentence);

select is(
  pg_temp.detail_of($$select dispatch_stage_many('by_k', '[{"task_name": "t"}, {"task_name": 7}]')$$),
  'The job is {"task_name": 7}.', 'the detail shows the job');
select throws_ok(format('select dispatch_stage_many(''by_k'', %L)', jobs), 'PD003', 'invalid jobs: an array of objects is needed', sentence)
from (values ('{"task_name": "t"}', 'one job is no array of jobs'), ('"text"', 'a text is no array of jobs'), (null, 'null is no array of jobs')) as jobs (jobs, sentence);
select throws_ok(format('select dispatch_stage(''by_k'', %s)', arguments), 'PD003', 'invalid job at position 0: ' || problem, 'dispatch_stage refuses like dispatch_stage_many: ' || sentence)
from (values
  ('null', 'task_name must be a string of 1 to 128 characters', 'no task'),
  ($$''$$, 'task_name must be a string of 1 to 128 characters', 'a task without a name'),
  ($$repeat('x', 129)$$, 'task_name must be a string of 1 to 128 characters', 'a task with too long a name'),
  ($$'t', '[7]'$$, 'args must be an object', 'args that are no object'),
  ($$'t', p_context => '7'$$, 'context must be an object', 'a context that is none'),
  ($$'t', p_queue_name => ''$$, 'queue_name must be a string of 1 to 40 bytes', 'a queue without a name'),
  ($$'t', p_queue_name => repeat('ä', 21)$$, 'queue_name must be a string of 1 to 40 bytes', 'a queue with too long a name'),
  ($$'t', p_priority => -2147483648$$, 'priority must be a whole number between -2147483647 and 2147483647', 'the priority of parked jobs'),
  ($$'t', p_scheduled_at => 'infinity'$$, 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"', 'a schedule that never comes'),
  ($$'t', p_scheduled_at => '-infinity'$$, 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"', 'a schedule that always was'),
  ($$'t', p_scheduled_at => '0044-03-15 12:00+00 BC'$$, 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"', 'a schedule before our era'),
  ($$'t', p_scheduled_at => '10000-01-01 00:00+00'$$, 'scheduled_at must be an ISO 8601 time with its offset from UTC, of the years 1 to 9999, like "2030-01-31T12:00:00+00:00"', 'a schedule in the year 10000')
) as bad (arguments, problem, sentence);
select throws_ok($$select dispatch_stage('no_such', 't')$$, 'PD001', 'unknown policy ''no_such''', 'an unknown policy takes no job');
select throws_ok($$select dispatch_stage_many('no_such', '[]')$$, 'PD001', 'unknown policy ''no_such''', 'nor an empty batch');
select throws_ok($$select dispatch_stage(null, 't')$$, 'PD001', 'unknown policy NULL', 'nor does no policy');

select results_eq(
  'select count(*) from dispatch_staged_jobs union all select count(*) from dispatch_inbox', 'select staged from before union all select notes from before',
  'with one bad job in a batch none is staged');

select is((pg_temp.staged('by_k', jsonb_build_object('scheduled_at', given))).scheduled_at, meant::timestamptz, format('%s is a schedule', given))
from (values
  ('2030-01-31T12:00:00Z', '2030-01-31 12:00+00'),
  ('2030-01-31 12:00:00.123456+05:30', '2030-01-31 06:30:00.123456+00'),
  ('2030-01-31t12:00-0800', '2030-01-31 20:00+00'),
  ('0001-01-01T00:00:00+00:00', '0001-01-01 00:00+00'),
  ('9999-12-31T23:59:59.999999+00:00', '9999-12-31 23:59:59.999999+00')
) as times (given, meant);

-- Queueing locks ------------------------------------------------------------------------------------

select lives_ok($$select dispatch_stage('by_k', 't', p_queueing_lock => 'one')$$, 'a free queueing lock is taken');
update before set staged = (select count(*) from dispatch_staged_jobs), notes = (select count(*) from dispatch_inbox);
select throws_ok(
  $$select dispatch_stage('by_k', 't', p_queueing_lock => 'one')$$,
  'PD004', 'already enqueued: a job with the queueing lock ''one'' waits', 'a staged job holds its queueing lock');
select throws_ok(
  $$select dispatch_stage('by_nothing', 't', p_queueing_lock => 'one')$$,
  'PD004', 'already enqueued: a job with the queueing lock ''one'' waits', 'also against jobs of another policy');
select throws_ok(
  $$select dispatch_stage_many('by_k', '[{"task_name": "t"}, {"task_name": "t", "queueing_lock": "two"}, {"task_name": "t", "queueing_lock": "two"}]')$$,
  'PD004', 'already enqueued: a job with the queueing lock ''two'' waits', 'two jobs of one batch cannot have one queueing lock');
select throws_ok(
  $$select dispatch_stage_many('by_k', '[{"task_name": "t"}, {"task_name": "t", "queueing_lock": "one"}]')$$,
  'PD004', 'already enqueued: a job with the queueing lock ''one'' waits', 'a held queueing lock refuses the whole batch');
select is(
  pg_temp.detail_of($$select dispatch_stage_many('by_k', '[{"task_name": "t"}, {"task_name": "t"}, {"task_name": "t", "queueing_lock": "one"}]')$$),
  'It is held against the job at position 2.', 'the detail names the position of the job');
do $$ begin
  perform procrastinate_defer_jobs_v1(array[row('q', 't', 0, null, 'queued', '{}', null)::procrastinate_job_to_defer_v1]);
end $$;
select throws_ok(
  $$select dispatch_stage('by_k', 't', p_queueing_lock => 'queued')$$,
  'PD004', 'already enqueued: a job with the queueing lock ''queued'' waits', 'a job in procrastinate''s queue holds its queueing lock, too');
select results_eq(
  'select count(*) from dispatch_staged_jobs union all select count(*) from dispatch_inbox', 'select staged from before union all select notes from before',
  'where a queueing lock was held nothing was staged');
select lives_ok(
  $$select dispatch_stage_many('by_k', '[{"task_name": "t", "queueing_lock": "three"}, {"task_name": "t", "queueing_lock": "four"}, {"task_name": "t"}, {"task_name": "t"}]')$$,
  'jobs without a queueing lock stand in nobody''s way');
do $$ begin update procrastinate_jobs set status = 'doing' where queueing_lock = 'queued'; end $$;
select lives_ok($$select dispatch_stage('by_k', 't', p_queueing_lock => 'queued')$$, 'once the queued job runs its queueing lock is free');
do $$ begin perform dispatch_cancel(id) from dispatch_staged_jobs where queueing_lock = 'one'; end $$;
select lives_ok($$select dispatch_stage('by_k', 't', p_queueing_lock => 'one')$$, 'cancelling the staged job frees its queueing lock');

-- Backlogs ------------------------------------------------------------------------------------------

do $$ begin
  perform dispatch_define_policy('short', '{"partition_by": "k", "max_pending": 3}');
  perform dispatch_pause('short');
  perform dispatch_stage_many('short', '[{"task_name": "t", "args": {"k": "a"}}, {"task_name": "t", "args": {"k": "a"}}, {"task_name": "t", "args": {"k": "a"}}]');
  perform pg_temp.fold('short');
end $$;
select throws_ok(
  $$select dispatch_stage_many('short', '[{"task_name": "t", "args": {"k": "b"}}, {"task_name": "t", "args": {"k": "a"}}]')$$,
  'PD007', 'backlog of partition ''a'' is full', 'a backlog of max_pending jobs takes no more');
select is(
  pg_temp.detail_of($$select dispatch_stage('short', 't', '{"k": "a"}')$$),
  '3 jobs wait; policy ''short'' allows 3.', 'the detail says how many wait and how many may');
select is(count(*), 0::bigint, 'and the whole batch is refused') from dispatch_staged_jobs where policy_name = 'short' and partition_key = 'b';
select throws_ok(
  $$select dispatch_stage_many('short', (select jsonb_agg('{"task_name": "t", "args": {"k": "b"}}'::jsonb) from generate_series(1, 4)))$$,
  'PD007', 'backlog of partition ''b'' is full', 'a batch that is larger than max_pending is refused');
select lives_ok(
  $$select dispatch_stage_many('short', (select jsonb_agg('{"task_name": "t", "args": {"k": "b"}}'::jsonb) from generate_series(1, 3)))$$,
  'another partition has a backlog of its own');
do $$ begin
  perform dispatch_cancel(min(id)) from dispatch_staged_jobs where policy_name = 'short' and partition_key = 'a';
  perform pg_temp.fold('short');
end $$;
select lives_ok($$select dispatch_stage('short', 't', '{"k": "a"}')$$, 'where a job left there is room for another');

-- Notes and notifications ---------------------------------------------------------------------------

create function pg_temp.wakes(p_statement text) returns bigint language plpgsql as $$
declare
  v_before constant bigint := coalesce(pg_stat_get_xact_function_calls('dispatch_wake(text)'::regprocedure), 0);
begin
  execute p_statement;
  return coalesce(pg_stat_get_xact_function_calls('dispatch_wake(text)'::regprocedure), 0) - v_before;
end $$;

select is(pg_temp.wakes(statement), wakes::bigint, sentence)
from (values
  ($$select dispatch_stage('by_k', 't')$$, 1, 'staging a job notifies once'),
  ($$select dispatch_stage_many('by_k', (select jsonb_agg(jsonb_build_object('task_name', 't', 'context', jsonb_build_object('k', i))) from generate_series(1, 300) as i))$$,
    1, 'staging 300 jobs in 300 partitions notifies once'),
  ($$select dispatch_stage_many('by_k', '[]')$$, 0, 'staging nothing notifies nobody')
) as statements (statement, wakes, sentence);

create function pg_temp.note_of(p_schedules text[]) returns timestamptz language plpgsql as $$
begin
  perform dispatch_stage_many('by_nothing', (
    select jsonb_agg(jsonb_build_object('task_name', 't', 'scheduled_at', schedule)) from unnest(p_schedules) as schedule));
  return (select due_at from dispatch_inbox order by id desc limit 1);
end $$;
select is(pg_temp.note_of(schedules), due_at::timestamptz, sentence)
from (values
  (array[null, null], '2026-01-01 00:00+00', 'a note says that its jobs are due now'),
  (array['2030-01-01T00:00:00Z', '2029-01-01T00:00:00Z'], '2029-01-01 00:00+00', 'or when the first of their schedules comes'),
  (array['2030-01-01T00:00:00Z', null], '2026-01-01 00:00+00', 'which is now when one of them has none'),
  (array['2020-01-01T00:00:00Z'], '2026-01-01 00:00+00', 'and when it is past')
) as notes (schedules, due_at, sentence);

-- The caller's transaction --------------------------------------------------------------------------

update before set staged = (select count(*) from dispatch_staged_jobs), notes = (select count(*) from dispatch_inbox);
savepoint caller;
do $$ begin perform dispatch_stage('by_k', 't', p_queueing_lock => 'caller'); end $$;
rollback to savepoint caller;
select results_eq(
  'select count(*) from dispatch_staged_jobs union all select count(*) from dispatch_inbox', 'select staged from before union all select notes from before',
  'staging rolls back with the caller');
select lives_ok($$select dispatch_stage('by_k', 't', p_queueing_lock => 'caller')$$, 'and its queueing lock is free again');

set local timezone = 'Europe/Amsterdam';
set local datestyle = 'SQL, DMY';
select lives_ok($$select dispatch_stage('by_k', 't', p_queueing_lock => 'an old time', p_scheduled_at => '1930-06-01 12:00:00+00')$$, 'a schedule may be old');
select is(
  (select scheduled_at from dispatch_staged_jobs where queueing_lock = 'an old time'),
  '1930-06-01 12:00:00+00', 'a schedule is the same instant in any time zone and date style');
select is(dispatch_shard('{a,b}', '{"a": null}'), 'default', 'a shard of several paths is the default one when all its values are missing');
select is(dispatch_shard('{a,b}', '{"a": 1}'), '[1, null]', 'and like a key when one of them is there');

-- Texts that are too long for an index ----------------------------------------------------------------

-- Text that does not compress.
create function pg_temp.long(p_length integer) returns text language sql
return (select left(string_agg(md5(n::text), ''), p_length) from generate_series(1, p_length / 32 + 1) as n);

do $$ begin
  perform dispatch_define_policy('long', '{"partition_by": ["k"], "shard_by": ["k"]}');
  perform dispatch_stage('long', 't', jsonb_build_object('k', pg_temp.long(9600)));
  -- As it was noted before shards were cut.
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs, due_at, newest_id, partition_key, shard, context)
  values ('long', dispatch_partition_id('long', 'old'), 'staged', 0, dispatch_now(), 1, 'old', pg_temp.long(9600), '{}');
end $$;
select is(jobs_admitted, 1, 'a key and a shard may be of any length') from dispatch_tick('long');
select results_eq(
  $$select length(partition_key), octet_length(shard), shard like left(partition_key, 30) || ' %' from dispatch_partitions where policy_name = 'long' and partition_key <> 'old'$$,
  $$values (9600, 95, true)$$, 'of a long shard the beginning is kept, and a hash');
select is(count(distinct shard), 1::bigint, 'also of one that was noted whole') from dispatch_partitions where policy_name = 'long';
select is(dispatch_shard_name(repeat('ü', 100)), repeat('ü', 100), 'one of 200 bytes is kept as it is');
select ok(octet_length(dispatch_shard_name(repeat('😀', 100))) < 200 and dispatch_shard_name(dispatch_shard_name(repeat('😀', 100))) = dispatch_shard_name(repeat('😀', 100)),
  'what was cut is not cut again');
select lives_ok($$select dispatch_stage('long', 't', p_lock => pg_temp.long(2600), p_queueing_lock => pg_temp.long(2600))$$, 'locks may be as long as an index takes');
select is(jobs_admitted, 1, 'in any index') from dispatch_tick('long');
select throws_ok($$select dispatch_stage('long', 't', p_queueing_lock => pg_temp.long(2601))$$, 'PD003',
  'invalid job at position 0: queueing_lock must be a string of at most 2600 bytes', 'a longer queueing lock is refused');

select * from finish();
rollback;
