-- The throttle: rows computed by hand, and the same arithmetic through whole ticks.
begin;
select plan(84);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';

create function pg_temp.at(p_seconds numeric) returns timestamptz language sql
return '2026-01-01 00:00+00'::timestamptz + make_interval(secs => p_seconds::float8);

-- Arithmetic ----------------------------------------------------------------------------------------

select is(dispatch_capacity(rate, burst), capacity, sentence)
from (values
  (60, null, 60::numeric, 'a bucket holds what its rate is'),
  (60, 10, 10, 'or its burst'),
  (60, 600, 600, 'which may be more than the rate'),
  (2.5, null, 2.5, 'fractions of a token are kept'),
  (0.5, null, 1, 'a bucket holds one token at least'),
  (60, 0.2, 1, 'also with a burst below 1'),
  (60, -5, 1, 'or below 0')
) as capacities (rate, burst, capacity, sentence);

select is(dispatch_refill(tokens, elapsed, rate, per, capacity), expected, sentence)
from (values
  (null, null, 60, 60, 60::numeric, 60::numeric, 'a new bucket is full'),
  (0, 0, 60, 60, 60, 0, 'no time brings no token'),
  (0, 1, 60, 60, 60, 1, '60 a minute is one a second'),
  (10, 30, 60, 60, 60, 40, 'what is left stays in the bucket'),
  (50, 30, 60, 60, 60, 60, 'a full bucket takes no more'),
  (0, 86400, 60, 60, 60, 60, 'however long it was left alone'),
  (0, 1, 0.5, 1, 1, 0.5, '0.5 a second is half a token a second'),
  (0.5, 1, 0.5, 1, 1, 1, 'and a whole one in two'),
  (0, 1, 2.5, 1, 2.5, 2.5, '2.5 a second is 2.5 a second'),
  (0, 0.1, 2.5, 1, 2.5, 0.25, 'a quarter of a token in a tenth of one'),
  (0, 1, 1, 3, 1, 0.333333333333333333, 'a third has 18 decimals'),
  (7, -60, 60, 60, 60, 7, 'a clock that went back adds nothing'),
  (60, 0, 10, 60, 10, 10, 'a bucket is cut to a smaller capacity'),
  (-3, 1, 1, 1, 5, -2, 'a debt is paid off at the rate'),
  (-3, 10, 1, 1, 5, 5, 'until the bucket is full again'),
  (0, 1e10, 1e9, 0.001, 1e9, 1e9, 'large numbers do not overflow')
) as refills (tokens, elapsed, rate, per, capacity, expected, sentence);

select is(dispatch_whole_tokens(tokens), whole, format('%s tokens let %s jobs pass', tokens, whole))
from (values (0::numeric, 0::numeric), (0.999, 0), (1, 1), (1.999, 1), (59.5, 59), (-0.5, -1), (0.9999999999999, 1), (2.9999999999999, 3), (0.9999999999, 0)) as buckets (tokens, whole);

select is(dispatch_seconds_to_token(tokens, rate, per), seconds, sentence)
from (values
  (0, 60, 60, 1::numeric, 'an empty bucket of 60 a minute waits a second'),
  (0.5, 60, 60, 0.5, 'a half full one half of it'),
  (0, 0.5, 1, 2, 'at 0.5 a second a token takes two'),
  (0.5, 2.5, 1, 0.2, 'at 2.5 a second half a token takes 0.2'),
  (0, 1, 3600, 3600, 'at one an hour it takes an hour'),
  (-2, 1, 1, 3, 'a debt is waited for as well'),
  (0, 3, 1, 0.333334, 'seconds are rounded up to the microsecond, not to before the token'),
  (1, 60, 60, 0, 'a whole token is not waited for')
) as waits (tokens, rate, per, seconds, sentence);

-- The gate ------------------------------------------------------------------------------------------

-- What a throttle says at second 100 of a bucket left at second p_at: jobs allowed, seconds to wait, reason, tokens, at.
create function pg_temp.ask(p_tokens numeric, p_at numeric, p_rate numeric, p_per numeric, p_burst numeric default null) returns text language sql as $$
  select concat_ws(' ',
    allowed, reason, extract(epoch from retry_at - pg_temp.at(100))::float8, case when retry_after_finish is distinct from retry_at then 'or a finish' end,
    'with', (gate_state -> 'x' ->> 'tokens')::float8, 'at', ((gate_state -> 'x' ->> 'at')::numeric - extract(epoch from pg_temp.at(0)))::float8)
  from unnest(dispatch_gate_throttle(array[row(1, null, 'k', '{}', jsonb_build_object('x.rate', p_rate, 'x.per', p_per, 'x.burst', p_burst),
    case when p_tokens is null then '{}' else jsonb_build_object('x', jsonb_build_object('tokens', p_tokens, 'at', extract(epoch from pg_temp.at(p_at)))) end,
    9, 1000, null, null, null)::dispatch_claim], 'x', pg_temp.at(100)))
$$;

select is(pg_temp.ask(tokens, left_at, rate, per, burst), expected, sentence)
from (values
  (null, null, 60, 60, null, '60 with 60 at 100', 'a new bucket lets its capacity pass'),
  (null, null, 60, 60, 5, '5 with 5 at 100', 'which is the burst where there is one'),
  (0, 70, 60, 60, null, '30 with 30 at 100', 'after 30 seconds, half a minute''s jobs'),
  (0.4, 99, 2.5, 1, null, '2 with 2.5 at 100', 'whole jobs pass, the fraction stays'),
  (0, 99, 0.5, 1, null, '0 throttle_empty 1 with 0.5 at 100', 'at 0.5 a second none passes after one second'),
  (0, 98, 0.5, 1, null, '1 with 1 at 100', 'and one after two'),
  (0, 100, 1, 3600, null, '0 throttle_empty 3600 with 0 at 100', 'one an hour rests for an hour'),
  (0.25, 100, 2.5, 1, null, '0 throttle_empty 0.3 with 0.25 at 100', 'an empty bucket rests until its next whole token'),
  (-3, 100, 1, 1, null, '0 throttle_empty 4 with -3 at 100', 'a debt rests until it is paid and a token more'),
  (60, 100, 10, 60, null, '10 with 10 at 100', 'a lowered rate cuts what is in the bucket'),
  (2, 100, 600, 60, null, '2 with 2 at 100', 'a raised one gives nothing for the time before'),
  (5, 160, 60, 60, null, '5 with 5 at 160', 'a clock that went back a minute adds nothing and keeps its place'),
  (0, 160, 60, 60, null, '0 throttle_empty 61 with 0 at 160', 'nor does it count the minute twice'),
  (null, null, 0, 60, null, '0 rate_zero 60 with at', 'a rate of 0 denies for one period'),
  (7, 50, 0, 60, null, '0 rate_zero 60 with 7 at 50', 'and leaves the bucket alone'),
  (null, null, -1, 5, null, '0 rate_zero 5 with at', 'a rate below 0 denies the same'),
  (null, null, null, 5, null, '0 rate_zero 5 with at', 'so does one that could not be looked up'),
  (null, null, 60, null, null, '0 rate_zero 60 with at', 'without a period it denies for a minute'),
  (null, null, 60, 0, null, '0 rate_zero 60 with at', 'a period of 0 is none'),
  (0, 100, 1e-12, 1e12, null, '0 throttle_empty 315360000 with 0 at 100', 'nobody rests longer than ten years'),
  (0, 0, 1e12, 1e-12, null, '1000 with 1000000000000 at 100', 'numbers out of all proportion raise nothing')
) as asked (tokens, left_at, rate, per, burst, expected, sentence);

-- Through ticks -------------------------------------------------------------------------------------

create function pg_temp.tick(p_policy text, p_seconds numeric) returns integer language sql as $$
  select set_config('dispatch.fake_now', pg_temp.at(p_seconds)::text, true);
  select jobs_admitted from dispatch_tick(p_policy)
$$;
create function pg_temp.due(p_policy text) returns float8 language sql
return (select extract(epoch from due_at - pg_temp.at(0)) from dispatch_partitions where policy_name = p_policy);
create function pg_temp.tokens(p_policy text, p_gate text default 'throttle') returns float8 language sql
return (select (gate_state -> p_gate ->> 'tokens')::float8 from dispatch_partitions where policy_name = p_policy);
create function pg_temp.stage(p_policy text, p_jobs integer) returns void language sql as $$
  select dispatch_stage_many(p_policy, (select jsonb_agg('{"task_name": "t"}'::jsonb) from generate_series(1, p_jobs)));
$$;
-- Defines a policy with these gates and some jobs waiting from second 0 on.
create function pg_temp.policy(p_policy text, p_gates jsonb, p_jobs integer) returns void language sql as $$
  select set_config('dispatch.fake_now', pg_temp.at(0)::text, true);
  select dispatch_define_policy(p_policy, jsonb_build_object('gates', p_gates));
  select pg_temp.stage(p_policy, p_jobs);
$$;

do $$ begin perform pg_temp.policy('half', '[{"type": "throttle", "rate": 0.5, "per": 1}]', 20); end $$;
select is(
  array(select pg_temp.tick('half', second) from generate_series(0, 9) as second), '{1,0,1,0,1,0,1,0,1,0}',
  'a rate of 0.5 a second admits one each two seconds');
select is(pg_temp.due('half'), 10::float8, 'and is due when its next token comes');

do $$ begin perform pg_temp.policy('two_and_a_half', '[{"type": "throttle", "rate": 2.5, "per": 1, "burst": 5}]', 200); end $$;
select is(
  array(select pg_temp.tick('two_and_a_half', second) from generate_series(0, 10) as second), '{5,2,3,2,3,2,3,2,3,2,3}',
  'a rate of 2.5 a second admits, after the burst, 25 in 10 ticks a second apart');
select is(
  (select sum(pg_temp.tick('two_and_a_half', 10 + 0.1 * step)) from generate_series(1, 200) as step), 50::bigint,
  'and 50 more in 200 ticks a tenth of a second apart: nothing is lost to rounding');

do $$ begin perform pg_temp.policy('thirds', '[{"type": "throttle", "rate": 3, "per": 10, "burst": 2}]', 20); end $$;
select is(pg_temp.tick('thirds', 0), 2, 'a burst of 2 admits two jobs at once');
select is(
  array(select pg_temp.due('thirds') from generate_series(1, 6) where pg_temp.tick('thirds', pg_temp.due('thirds')::numeric) = 1),
  '{6.666667,10,13.333334,16.666667,20,23.333334}', 'then each look at the time when the partition is due admits one, three in ten seconds');

do $$ begin perform pg_temp.policy('spends', '[{"type": "throttle", "rate": 10, "per": 60}, {"type": "concurrency", "max": 6}]', 1); end $$;
select is(pg_temp.tick('spends', 0), 1, 'a bucket of 10 admits the one job that waits');
select is(pg_temp.tokens('spends'), 9::float8, 'and is paid for that one alone');
do $$ begin perform pg_temp.stage('spends', 20); end $$;
select is(pg_temp.tick('spends', 0), 5, 'where another gate lets fewer pass');
select is(pg_temp.tokens('spends'), 4::float8, 'it is paid for those');
select is(pg_temp.tick('spends', 3), 0, 'where another gate lets none pass');
select is(pg_temp.tokens('spends'), 4.5::float8, 'it is not paid');
select is(dispatch_force_admit('spends', '', 8), 8, 'jobs forced past the gates');
select is(pg_temp.tokens('spends'), -3.5::float8, 'are paid for, into debt');
do $$ begin perform dispatch_finish(job_id, true) from dispatch_inflight_jobs where policy_name = 'spends'; end $$;
select is(array[pg_temp.tick('spends', 29), pg_temp.tick('spends', 30)], '{0,1}', 'which has to be paid off before the next');

do $$ begin perform pg_temp.policy('twice', '[
  {"type": "throttle", "name": "minute", "rate": 10, "per": 60}, {"type": "throttle", "name": "hour", "rate": 25, "per": 3600}]', 100); end $$;
select is(
  array(select pg_temp.tick('twice', second) from unnest(array[0, 60, 120, 180]) as second), '{10,10,5,1}',
  'two throttles under different names have a bucket each');
select is(pg_temp.tokens('twice', 'minute'), 9::float8, 'one could let nine more pass');
select is(pg_temp.due('twice'), 288::float8, 'while the other says when the next token comes');

do $$ begin perform pg_temp.policy('zero', '[{"type": "throttle", "rate": 0, "per": 60}]', 5); end $$;
select results_eq(
  $$select jobs_admitted, partitions_seen, denied_reasons from dispatch_tick('zero')$$,
  $$values (0, 1, '{"rate_zero": 1}'::jsonb)$$, 'a rate of 0 admits nothing');
select is(pg_temp.due('zero'), 60::float8, 'and is not due again before its period is over');
select is(partitions_seen, 0, 'so that no tick looks at it before') from dispatch_tick('zero');

do $$ begin perform pg_temp.policy('back', '[{"type": "throttle", "rate": 60, "per": 60}]', 300); end $$;
select is(
  array(select pg_temp.tick('back', second) from unnest(array[1000, 940, 970, 1000, 1001, 1005, 990, 1006]) as second),
  '{60,0,0,0,1,4,0,1}', 'whatever the clock does on the way, no token comes twice');

select is(
  (select sum(pg_temp.tick('back', 1006 + gap)) from unnest(array[0.4, 0.9, 1.7, 3, 3.1, 9.99, 10]) as gap), 10::bigint,
  'however the looks are spread, ten seconds bring ten jobs');

select * from finish();
rollback;
