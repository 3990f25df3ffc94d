-- Gates: where their numbers come from, what happens when there is none, and how several are passed.
begin;
select plan(65);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';

create function limit_of(partition_key text, context jsonb) returns numeric language plpgsql as $$
begin
  case partition_key
    when 'raises' then raise exception 'no limit for %', partition_key;
    when 'asserts' then assert false, 'a limit is expected';
    when 'divides' then return 1 / (context ->> 'zero')::numeric;
    when 'null' then return null;
    when 'nan' then return 'NaN';
    when 'infinite' then return 'Infinity';
    when 'tiny' then return 1e-400;
    when 'asked' then return (context ->> 'wanted')::numeric;
    else return 2;
  end case;
end $$;

-- Numbers -------------------------------------------------------------------------------------------

select is(dispatch_to_number(value::jsonb), number, format('%s in a context is %s', left(value, 40), coalesce(number::text, 'no number')))
from (values
  ('7', 7::numeric), ('-2.5', -2.5), ('0', 0), ('"7"', 7), ('"+2.50"', 2.50), ('"-3"', -3),
  ('1e400', 1e12), ('-1e400', -1e12), ('1e-400', 0), ('0.1234567890123', 0.123456789012),
  ('"123456789012"', 123456789012),
  ('"1234567890123"', null), ('"1e3"', null), ('"NaN"', null), ('"Infinity"', null), ('""', null), ('" 7"', null), ('"7\n"', null), ('"seven"', null),
  ('"٣"', null), ('"7; drop table t"', null), ('true', null), ('null', null), ('[7]', null), ('{"a": 7}', null)
) as numbers (value, number);
select is(dispatch_to_number(null), null, 'nothing in a context is no number');

-- Looking up ----------------------------------------------------------------------------------------

do $$ begin
  perform dispatch_define_policy('looks', '{"gates": [
    {"type": "throttle", "rate": {"ctx": "plan.rate", "default": 60}, "per": {"ctx": "per"}, "burst": 9},
    {"type": "concurrency", "max": {"sql": "limit_of", "default": 4}}], "fairness": {"weight": {"ctx": "weights.1", "default": 1}}}');
end $$;

-- What the policy's parameters are for a partition: rate, per, burst, max, weight.
create function pg_temp.claim(p_key text, p_context jsonb, p_ordinal integer default 1) returns dispatch_claim language sql
return row(p_ordinal, dispatch_partition_id('looks', p_key), p_key, p_context, '{"throttle.burst": 9}'::jsonb, '{}'::jsonb, 0, 100, null, null, null)::dispatch_claim;
create function pg_temp.resolved(p_key text, p_context jsonb) returns text language sql as $$
  select concat_ws(' ', coalesce(params ->> 'throttle.rate', 'null'), coalesce(params ->> 'throttle.per', 'null'), params ->> 'throttle.burst',
    coalesce(params ->> 'concurrency.max', 'null'), params ->> 'fairness.weight')
  from unnest(dispatch_resolve(dispatch_policy('looks'), array[pg_temp.claim(p_key, p_context)], dispatch_now()))
$$;

select is(pg_temp.resolved(key, context::jsonb), expected, sentence)
from (values
  ('k', '{"plan": {"rate": 5}, "per": 10, "weights": [1, 3]}', '5 10 9 2 3', 'numbers are looked up at their paths, beside the literal ones'),
  ('k', '{"plan": {"rate": "0.5"}, "per": "10"}', '0.5 10 9 2 1', 'a number may be written as text'),
  ('k', '{}', '60 null 9 2 1', 'a missing number has its default, and is null without one'),
  ('k', '{"plan": {"rate": "fast"}, "per": [1]}', '60 null 9 2 1', 'so has what is no number'),
  ('k', '{"plan": 7, "weights": {"1": 8}}', '60 null 9 2 8', 'a path that leads nowhere is a missing number'),
  ('k', '{"plan": {"rate": null}}', '60 null 9 2 1', 'so is null'),
  ('k', '{"plan": {"rate": -5}, "per": 0}', '-5 0 9 2 1', 'a number out of range is the gate''s affair'),
  ('null', '{}', '60 null 9 4 1', 'a function that returns null leaves it to the default'),
  ('nan', '{}', '60 null 9 4 1', 'so does one that returns NaN'),
  ('infinite', '{}', '60 null 9 1000000000000 1', 'an infinite limit is a large one'),
  ('tiny', '{}', '60 null 9 0 1', 'a tiny limit is none'),
  ('asked', '{"wanted": 42}', '60 null 9 42 1', 'a function is given the key and the context')
) as lookups (key, context, expected, sentence);

-- A function that raises ----------------------------------------------------------------------------

create temporary table asked on commit drop as
select c.*
from unnest(dispatch_resolve(dispatch_policy('looks'), array[
    pg_temp.claim('k', '{"per": 1}', 1), pg_temp.claim('raises', '{"per": 1}', 2), pg_temp.claim('divides', '{"zero": 0, "per": 1}', 3),
    pg_temp.claim('asserts', '{"per": 1}', 4), pg_temp.claim('l', '{"per": 1}', 5)], dispatch_now())) as c;
select results_eq(
  'select partition_key, allowed, reason from asked order by ordinal',
  $$values ('k', 100, null), ('raises', 0, 'limit_error: no limit for raises'), ('divides', 0, 'limit_error: division by zero'),
    ('asserts', 0, 'limit_error: a limit is expected'), ('l', 100, null)$$,
  'a limit function that raises denies the partition that it was asked for, and no other');
select is(array_agg(distinct retry_at - dispatch_now()), '{00:00:10}', 'it is asked again after 10 seconds') from asked where reason is not null;
select is(array_agg(distinct retry_after_finish), array_agg(distinct retry_at), 'whoever finishes') from asked where reason is not null;

do $$ begin
  perform dispatch_define_policy('errs', '{"partition_by": "k", "gates": [
    {"type": "concurrency", "max": 5}, {"type": "throttle", "rate": {"sql": "limit_of"}, "per": 3600}]}');
  perform dispatch_stage_many('errs', '[{"task_name": "t", "args": {"k": "fine"}}, {"task_name": "t", "args": {"k": "raises"}}, {"task_name": "t", "args": {"k": "asserts"}}]');
end $$;
select results_eq(
  $$select jobs_admitted, partitions_denied, denied_reasons from dispatch_tick('errs')$$,
  $$values (1, 2, '{"limit_error": 2}'::jsonb)$$, 'a tick admits what it can and counts the errors');
select results_eq(
  $$select partition_key, blocked_reason, due_at - dispatch_now() from dispatch_partitions where policy_name = 'errs' and due_at is not null order by 1$$,
  $$values ('asserts', 'limit_error: a limit is expected', interval '10 s'), ('raises', 'limit_error: no limit for raises', interval '10 s')$$,
  'the partition shows the error and rests for 10 seconds, not for what a gate without numbers would say');
do $$ begin
  perform set_config('dispatch.fake_now', '2026-01-01 00:00:10+00', true);
  create or replace function limit_of(partition_key text, context jsonb) returns numeric language sql return 2;
end $$;
select is(jobs_admitted, 2, 'once the function is mended the jobs go') from dispatch_tick('errs');

do $$ begin
  perform dispatch_stage('errs', 't', '{"k": "fine"}');
  drop function limit_of;
end $$;
select is(denied_reasons, '{"limit_error": 1}', 'a function that is gone is an error like any other') from dispatch_tick('errs');
select is(blocked_reason, 'limit_error: limit function limit_of(text, jsonb) does not exist any more', 'which says so')
from dispatch_partitions where policy_name = 'errs' and partition_key = 'fine';

-- Passing several -----------------------------------------------------------------------------------

select results_eq(
  format('select (c).allowed, (c).reason, (c).retry_at, (c).retry_after_finish from dispatch_narrow(%L::dispatch_claim, %L, %s, %L, %L, %L) as c',
    row(1, dispatch_partition_id('p', 'k'), 'k', '{}'::jsonb, '{}'::jsonb, '{}'::jsonb, 0, before_allowed, before_retry_at::timestamptz, null::timestamptz, before_reason)::dispatch_claim,
    '{}', allowed, '2026-01-01 00:00:05+00', '2026-01-01 00:00:03+00', 'new'),
  format('select %s, %L::text, %L::timestamptz, %L::timestamptz', expected_allowed, expected_reason, expected_retry_at, expected_after_finish), sentence)
from (values
  (10, null, null, 4.0, 4, null, null, null, 'a gate lets fewer jobs pass'),
  (3, null, null, 4.0, 3, null, null, null, 'never more than the gates before it'),
  (10, null, null, 0.0, 0, 'new', '2026-01-01 00:00:05+00', '2026-01-01 00:00:03+00', 'a gate that lets none pass gives its reason and its time'),
  (10, null, null, -2.0, 0, 'new', '2026-01-01 00:00:05+00', '2026-01-01 00:00:03+00', 'less than none is none'),
  (0, 'old', '2026-01-01 00:00:09+00', 0.0, 0, 'old', '2026-01-01 00:00:09+00', '2026-01-01 00:00:03+00', 'the first reason stays, the later time counts'),
  (0, 'old', '2026-01-01 00:00:01+00', 0.0, 0, 'old', '2026-01-01 00:00:05+00', '2026-01-01 00:00:03+00', 'also when it is the second gate''s'),
  (0, 'old', '2026-01-01 00:00:09+00', 7.0, 0, 'old', '2026-01-01 00:00:09+00', null, 'an open gate changes nothing of a denial')
) as steps (before_allowed, before_reason, before_retry_at, allowed, expected_allowed, expected_reason, expected_retry_at, expected_after_finish, sentence);

create temporary table passed on commit drop as
select c.*
from unnest(dispatch_pass_gates(
  '[{"type": "throttle", "name": "rate"}, {"type": "concurrency", "name": "cap"}, {"type": "throttle", "name": "day"}]',
  array(
    select row(ordinality, gen_random_uuid(), 'k', '{}'::jsonb,
      '{"rate.rate": 6, "rate.per": 60, "cap.max": 4, "cap.full_backoff": 2, "day.rate": 100, "day.per": 1000}'::jsonb,
      jsonb_build_object('rate', jsonb_build_object('tokens', tokens, 'at', extract(epoch from dispatch_now())), 'day', jsonb_build_object('tokens', day_tokens, 'at', extract(epoch from dispatch_now()))),
      in_flight, 100, null, null, reason)::dispatch_claim
    from unnest(array[6, 3, 0, 6, 6, 6], array[100, 100, 100, 100, 0.5, 100], array[0, 0, 4, 4, 4, 0], array[null, null, null, null, null, 'paused'])
      with ordinality as claims (tokens, day_tokens, in_flight, reason, ordinality)
  ), dispatch_now())) as c;
select results_eq(
  'select ordinal, allowed, reason, extract(epoch from retry_at - dispatch_now()), extract(epoch from retry_after_finish - dispatch_now()) from passed',
  $$values (1, 4, null, null::numeric, null::numeric), (2, 3, null, null, null), (3, 0, 'throttle_empty', 10, 10), (4, 0, 'concurrency_full', 2, null),
    (5, 0, 'concurrency_full', 5, 5), (6, 100, 'paused', null, null)$$,
  'a job passes all gates or none; a denial lasts until all are open; what is denied already asks no gate; the claims stay in order');
select is(count(*), 5::bigint, 'every gate that was asked gives its state') from passed where gate_state ->> 'rate' is not null and ordinal < 6;
select is(dispatch_pass_gates('[]', array[pg_temp.claim('k', '{}')], dispatch_now()), array[pg_temp.claim('k', '{}')], 'no gates let everything pass');
select is(dispatch_pass_gates('[{"type": "throttle", "name": "t"}]', '{}', dispatch_now()), '{}', 'nobody passes no gate');

-- Spending ------------------------------------------------------------------------------------------

select is(dispatch_spend(state::jsonb, '{a,b}', jobs), spent::jsonb, sentence)
from (values
  ('{"a": {"tokens": 5.5, "at": 1}, "b": {"tokens": 600, "at": 2}}', 3, '{"a": {"tokens": 2.5, "at": 1}, "b": {"tokens": 597, "at": 2}}', 'each bucket pays a token a job'),
  ('{"a": {"tokens": 1, "at": 1}}', 4, '{"a": {"tokens": -3, "at": 1}}', 'into debt where it must'),
  ('{"a": {"tokens": 1, "at": 1}}', 0, '{"a": {"tokens": 1, "at": 1}}', 'no job costs nothing'),
  ('{"c": {"tokens": 5}}', 2, '{"c": {"tokens": 5}}', 'what is no bucket of the policy pays nothing'),
  ('{}', 2, '{}', 'a gate that was never asked has no bucket yet')
) as spending (state, jobs, spent, sentence);

-- A limit function that takes too long ----------------------------------------------------------------

create function public.sleepy_limit(p_key text, p_context jsonb) returns numeric language plpgsql as $$
begin
  perform pg_sleep(case when p_key ~ 'slow' then 0.05 else 0 end);
  return 5;
end $$;
do $$ begin
  perform dispatch_set('limit_timeout', 0.02);
  perform dispatch_define_policy('sleepy', '{"partition_by": "k", "gates": [{"type": "concurrency", "max": {"sql": "public.sleepy_limit", "default": null}}]}');
  perform dispatch_stage('sleepy', 't', '{"k": "a"}'), dispatch_stage('sleepy', 't', '{"k": "slow"}'), dispatch_stage('sleepy', 't', '{"k": "z"}');
end $$;
select results_eq(
  $$select jobs_admitted, denied_reasons from dispatch_tick('sleepy')$$, $$values (2, '{"limit_error": 1}'::jsonb)$$,
  'a limit function that takes longer than limit_timeout denies its partition, and no other');
select results_eq(
  $$select blocked_reason ~ '^limit_error: it took 0\.0[5-9].* s, and limit_timeout is 0.02 s', due_at - dispatch_now() from dispatch_partitions where policy_name = 'sleepy' and partition_key = 'slow'$$,
  $$values (true, interval '10 s')$$,
  'with the reason, and for a while');
do $$ begin
  perform dispatch_stage('sleepy', 't', jsonb_build_object('k', 'slow ' || n)) from generate_series(1, 10) as n;
  perform dispatch_tick('sleepy');
end $$;
select ok(count(*) between 5 and 9, 'of many that take long, a tick asks a few and leaves the others to the next')
from dispatch_partitions
where policy_name = 'sleepy'
  and due_at = dispatch_now();

select * from finish();
rollback;
