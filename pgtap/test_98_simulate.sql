-- Simulations: what they count, from what they start, where they end, what they refuse, and that nothing of them stays.
begin;
select plan(74);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';

create function pg_temp.gates(variadic p_gates jsonb[] default '{}')
returns jsonb
language sql
return jsonb_build_object('partition_by', 'k', 'gates', to_jsonb(p_gates));

create function pg_temp.cap(p_max numeric)
returns jsonb
language sql
return jsonb_build_object('type', 'concurrency', 'max', p_max);

create function pg_temp.throttle(p_rate numeric, p_per numeric, p_burst numeric default 1)
returns jsonb
language sql
return jsonb_build_object('type', 'throttle', 'rate', p_rate, 'per', p_per, 'burst', p_burst);

-- One step a second; only those in which something happens.
create function pg_temp.series(p_definition jsonb, p_load jsonb, p_service_time interval default '1 s')
returns table (second numeric, key text, staged integer, admitted integer, finished integer, pending integer, in_flight integer)
language sql
begin atomic
  select extract(epoch from elapsed), partition_key, staged, admitted, finished, pending, in_flight
  from dispatch_simulate('p', p_definition, p_load, p_service_time => p_service_time, p_step => '1 s')
  where staged > 0 or admitted > 0 or finished > 0;
end;

create function pg_temp.note(p_definition jsonb, p_load jsonb)
returns text
language sql
return (select distinct note from dispatch_simulate('p', p_definition, p_load));

-- Everything that is in our tables and procrastinate's, and what the sequences will give.
create function pg_temp.everything()
returns text
language plpgsql
as $$
declare
  v_table text;
  v_hash text;
  v_all text := '';
begin
  for v_table in
    select oid::regclass from pg_class
    where relnamespace = 'public'::regnamespace and relkind = 'r' and relname ~ '^(dispatch|procrastinate)_' order by relname
  loop
    execute format('select md5(string_agg(t::text, e''\n'' order by t::text)) from %s as t', v_table) into v_hash;
    v_all := concat_ws(e'\n', v_all, v_table || ' ' || coalesce(v_hash, 'empty'));
  end loop;
  select concat_ws(e'\n', v_all, last_value || ' jobs') into v_all from procrastinate_jobs_id_seq;
  return v_all;
end;
$$;

-- What is counted.

select results_eq(
  $$ select * from pg_temp.series(pg_temp.gates(pg_temp.cap(2)), '[{"key": "a", "jobs": 5}]') $$,
  $$ values
    (0::numeric, 'a', 5, 2, 0, 3, 2),
    (1, 'a', 0, 2, 2, 1, 2),
    (2, 'a', 0, 1, 2, 0, 1),
    (3, 'a', 0, 0, 1, 0, 0) $$,
  'a cap of 2 lets two jobs of a second each go a second');
select results_eq(
  $$ select * from pg_temp.series(pg_temp.gates(pg_temp.throttle(1, 2)), '[{"key": "a", "jobs": 3, "start": 1}]', '0.5 s') $$,
  $$ values
    (1::numeric, 'a', 3, 1, 1, 2, 1),
    (3, 'a', 0, 1, 1, 1, 1),
    (5, 'a', 0, 1, 1, 0, 1) $$,
  'a throttle lets one go when its token comes');
select results_eq(
  $$ select * from pg_temp.series(pg_temp.gates(), '[{"key": "a", "jobs": 3, "every": 1.5}]', '10 s') $$,
  $$ values
    (0::numeric, 'a', 1, 1, 0, 0, 1),
    (1, 'a', 1, 1, 0, 0, 2),
    (3, 'a', 1, 1, 0, 0, 3),
    (10, 'a', 0, 0, 1, 0, 2),
    (11, 'a', 0, 0, 1, 0, 2),
    (13, 'a', 0, 0, 1, 0, 0) $$,
  'without a gate all go as they come, and are in flight until they finish');
select results_eq(
  $$ select * from pg_temp.series(pg_temp.gates() || '{"max_queued": 1, "admission_batch_size": 5000}', '[{"key": "a", "jobs": 1200}]') $$,
  $$ values
    (0::numeric, 'a', 1200, 1200, 0, 0, 1200),
    (1, 'a', 0, 0, 1200, 0, 0) $$,
  'jobs that are admitted start at once or after a lag, so nothing is bound by max_queued');
select results_eq(
  $$ select sum(admitted), sum((denied ->> 'queue_full')::integer), max(longest_wait)
     from dispatch_simulate('p', pg_temp.gates() || '{"max_queued": 1}', '[{"key": "a", "jobs": 20}]', p_lag => '5 s') $$,
  $$ values (20::bigint, null::bigint, '0 s'::interval) $$, 'nor denied for it, however late they start');
select results_eq(
  $$ select partition_key, longest_wait, mean_wait
     from dispatch_simulate('p', pg_temp.gates(pg_temp.throttle(1, 2)), '[{"key": "a", "jobs": 3}]', p_step => '1 minute') $$,
  $$ values ('a', '4 s'::interval, '2 s'::interval) $$,
  'waits are from when a job could have gone to its admission');
select results_eq(
  $$ select partition_key, denied
     from dispatch_simulate('p', pg_temp.gates(pg_temp.cap(1)), '[{"key": "a", "jobs": 2}]', p_service_time => '2.5 s', p_step => '1 hour') $$,
  $$ values ('a', '{"concurrency_full": 2}'::jsonb) $$,
  'each look that lets nothing pass is a denial: here at full_backoff');
select results_eq(
  $$ select * from pg_temp.series(
       pg_temp.gates('{"type": "adaptive_concurrency", "initial_max": 1, "target_lag_ms": 1000}'), '[{"key": "a", "jobs": 6}]') $$,
  $$ values
    (0::numeric, 'a', 6, 1, 0, 5, 1),
    (1, 'a', 0, 2, 1, 3, 2),
    (2, 'a', 0, 3, 2, 0, 3),
    (3, 'a', 0, 0, 3, 0, 0) $$,
  'an adaptive cap grows with each job that finishes and did not queue');
select results_eq(
  $$ select sum(admitted), max(in_flight)
     from dispatch_simulate('p', pg_temp.gates('{"type": "adaptive_concurrency", "initial_max": 1, "target_lag_ms": 1000}'),
       '[{"key": "a", "jobs": 6}]', p_lag => '5 s') $$,
  $$ values (6::bigint, 1) $$,
  'and does not where they queue longer than its target');
select results_eq(
  $$ select * from pg_temp.series(
       pg_temp.gates(pg_temp.cap(1)), '[{"key": "a", "jobs": 2, "service_time": 3}, {"key": "b", "jobs": 2}]') where admitted > 0 $$,
  $$ values
    (0::numeric, 'a', 2, 1, 0, 1, 1),
    (0, 'b', 2, 1, 0, 1, 1),
    (1, 'b', 0, 1, 1, 0, 1),
    (3, 'a', 0, 1, 1, 0, 1) $$,
  'an entry may have a service time of its own');
select results_eq(
  $$ select elapsed, admitted
     from dispatch_simulate('p', pg_temp.gates() || '{"tick_admission_budget": 2}', '[{"key": "a", "jobs": 5}]',
       p_tick_every => '10 s', p_step => '10 s') where admitted > 0 $$,
  $$ values ('0 s'::interval, 2), ('10 s', 2), ('20 s', 1) $$,
  'with p_tick_every one tick comes at each multiple of it');
select is(
  (select max(admitted) from dispatch_simulate('p', pg_temp.gates() || '{"tick_admission_budget": 2}', '[{"key": "a", "jobs": 5}]')),
  5, 'without it ticks follow each other at the same moment until nothing is due');
select results_eq(
  $$ select elapsed, admitted
     from dispatch_simulate('p', pg_temp.gates(), '[{"key": "a", "jobs": 2, "start": 0.5}]', p_tick_every => '1 minute', p_step => '1 minute')
     where admitted > 0 $$,
  $$ values ('1 minute'::interval, 2) $$,
  'a job that comes in between two ticks waits for the next');

-- Keys, contexts, groups.

select results_eq(
  $$ select partition_key, partitions, sum(staged)
     from dispatch_simulate('p', pg_temp.gates(),
       '[{"key": "a"}, {"key": "b", "jobs": 3}, {"key": "c", "jobs": 2}, {"key": "d"}, {"jobs": 4}]', p_groups => 3)
     group by 1, 2 order by 3 desc, 1 $$,
  $$ values ('', 1, 4::bigint), ('b', 1, 3), ('c', 1, 2), (null, 2, 2) $$,
  'the partitions with the most jobs are shown by themselves, and all others together; no key is the empty key');
select results_eq(
  $$ select distinct partition_key from dispatch_simulate('p', '{"partition_by": "account.id"}',
       '[{"key": 7}, {"key": "8", "context": {"account": {"plan": 1}}}, {"context": {"account": {"id": "x"}}}]') order by 1 $$,
  $$ values ('7'), ('8'), ('x') $$,
  'a key is put where partition_by reads it, beside what the context has there');
select results_eq(
  $$ select distinct partition_key from dispatch_simulate('p', '{"partition_by": ["a", "b.c"]}', '[{"key": [1, "x"]}]') $$,
  $$ values ('[1, "x"]') $$,
  'with several paths the key is an array');
select results_eq(
  $$ select partition_key, max(in_flight)
     from dispatch_simulate('p', pg_temp.gates('{"type": "concurrency", "max": {"ctx": "cap", "default": 1}}'),
       '[{"key": "a", "jobs": 4, "context": {"cap": 3}}, {"key": "b", "jobs": 4}]') group by 1 order by 1 $$,
  $$ values ('a', 3), ('b', 1) $$,
  'limits are read from the context of the load');
select results_eq(
  $$ select partition_key, min(elapsed) filter (where admitted > 0)
     from dispatch_simulate('p', pg_temp.gates(pg_temp.cap(1)) || '{"partition_by": []}',
       '[{"jobs": 2}, {"jobs": 1, "priority": 9}]', p_step => '1 s') group by 1 $$,
  $$ values ('', '0 s'::interval) $$,
  'without partition_by there is one partition');

-- The policy's own past.

do $$
begin
  perform dispatch_define_policy('q', pg_temp.gates(pg_temp.cap(2)));
  -- Ten jobs of a, one a second, each of which takes three: the cap of 2 keeps them waiting.
  for v_second in 0 .. 20 loop
    perform set_config('dispatch.fake_now', ('2026-01-01 00:00:00+00'::timestamptz + v_second * interval '1 second')::text, true);
    if v_second < 10 then
      perform dispatch_stage('q', 't', '{"k": "a"}');
    end if;
    perform dispatch_finish(job_id, true) from dispatch_inflight_jobs where admitted_at <= dispatch_now() - interval '3 seconds';
    perform dispatch_tick('q');
  end loop;
end;
$$;
create temporary table happened on commit drop as
select extract(epoch from admitted_at - '2026-01-01 00:00:00+00') as second, count(*) as admitted
from dispatch_admissions where policy_name = 'q' group by 1;

select results_eq(
  $$ select extract(epoch from elapsed), admitted::bigint
     from dispatch_simulate('q', p_since => '2026-01-01 00:00:00+00', p_service_time => '3 s', p_step => '1 s') where admitted > 0 $$,
  $$ select second, admitted from happened order by second $$,
  'the definition in force, on the jobs of the past, admits as it did');
select results_eq(
  $$ select sum(admitted), max(longest_wait)
     from dispatch_simulate('q', pg_temp.gates(pg_temp.cap(3)), p_since => '2026-01-01 00:00:00+00', p_service_time => '3 s') $$,
  $$ values (10::bigint, '0 s'::interval) $$,
  'with a slot more nobody would have waited');
select is(
  (select distinct note from dispatch_simulate('q', p_service_time => '3 s')),
  '10 jobs; in flight for 3 s each, as given', 'the note says how many jobs it were and how long they were in flight');
select is_empty(
  $$ select * from dispatch_simulate('q', p_since => dispatch_now() + interval '1 second') $$, 'without jobs there are no rows');
select is(
  (select note from dispatch_simulate('q') limit 1), '10 jobs; in flight for 1 s each, as nothing is known',
  'where procrastinate knows no end, a second is assumed');
update procrastinate_jobs set status = 'succeeded' where status = 'todo';
insert into procrastinate_events (job_id, type, at)
select job_id, kind::procrastinate_job_event_type, admitted_at + after
from dispatch_admissions, (values ('started', interval '0.5 s'), ('succeeded', '3 s')) as events (kind, after);
delete from procrastinate_events where at > '2026-02-01';
select is(
  (select note from dispatch_simulate('q') limit 1), '10 jobs; in flight for 3 s each, the median of the last 10',
  'else the median of what it knows');

do $$ begin perform dispatch_stage('q', 't', '{"k": "b"}') from generate_series(1, 30); end; $$;
select results_eq(
  $$ select partition_key, sum(staged) from dispatch_simulate('q') group by 1 order by 1 $$,
  $$ values ('a', 10::bigint), ('b', 30) $$,
  'what waits is simulated too, also before a tick has seen it');
do $$ begin perform dispatch_tick('q'); end; $$;
select results_eq(
  $$ select sum(staged) from dispatch_simulate('q', p_since => dispatch_now() + interval '1 second') $$,
  $$ values (28::bigint) $$,
  'and after');
select results_eq(
  $$ select min(at) from dispatch_simulate('q', p_since => '2025-12-31 23:59:50+00') $$,
  $$ values ('2025-12-31 23:59:50+00'::timestamptz) $$,
  'it starts at p_since');
select is_empty(
  $$ select * from dispatch_simulate('q', p_until => '2025-12-31 23:59:59+00') $$, 'only jobs that were staged by p_until');
select is(
  (select extract(epoch from max(longest_wait)) from dispatch_simulate('q', pg_temp.gates(), p_since => dispatch_now() + interval '5 s')),
  5::numeric, 'who waited at the start has waited since it was staged');
do $$ begin perform dispatch_cancel(min(id)) from dispatch_staged_jobs; end; $$;
select is(
  (select sum(staged) from dispatch_simulate('q', p_since => dispatch_now() + interval '1 second')), 27::bigint,
  'who was cancelled is left out');
do $$ begin perform dispatch_pause('q'); end; $$;
select cmp_ok((select sum(admitted) from dispatch_simulate('q')), '>', 0::bigint, 'a pause does not count');
select results_eq(
  $$ select partition_key, sum(staged) from dispatch_simulate('q', p_max_jobs => 10) group by 1 order by 1 $$,
  $$ values ('a', 3::bigint), ('b', 7) $$,
  'of more jobs than p_max_jobs at least half go to the newest admissions, and the rest to those that wait');
select matches(
  (select note from dispatch_simulate('q', p_max_jobs => 10) limit 1),
  'left out: jobs admitted before 2026-01-01 00:00:.*, 22 of 27 waiting jobs', 'and it says what was left out');

-- Where it ends.

select matches(
  pg_temp.note(pg_temp.gates(pg_temp.cap(0)), '[{"key": "a", "jobs": 3}]'), 'stopped where all that is left waits .*, with 3 jobs not admitted',
  'it stops where nothing will pass');
select matches(
  (select note from dispatch_simulate('p', pg_temp.gates(pg_temp.throttle(1, 3600)), '[{"key": "a", "jobs": 9}]', p_horizon => '2 h') limit 1),
  'stopped at the horizon, with 6 jobs not admitted', 'it stops at the horizon');
select matches(
  (select note from dispatch_simulate('p', pg_temp.gates(pg_temp.throttle(1, 1)), '[{"key": "a", "jobs": 9}]', p_max_ticks => 3) limit 1),
  'stopped after 3 ticks, with 6 jobs not admitted', 'it stops after p_max_ticks');
select results_eq(
  $$ select sum(staged), min(note) from dispatch_simulate('p', pg_temp.gates(), '[{"key": "a", "jobs": 5}, {"key": "b"}]', p_max_jobs => 4) $$,
  $$ values (4::bigint, '4 jobs; in flight for 1 s each, as nothing is known; left out: the last 2 of 6 jobs') $$,
  'it takes the first p_max_jobs of a load');
select cmp_ok(
  (select count(*) from dispatch_simulate('p', pg_temp.gates(pg_temp.throttle(1, 60)), '[{"key": "a", "jobs": 40}]', p_step => '0.01 s')),
  '<=', 1000::bigint, 'a step that is too short is made longer');
select cmp_ok(
  (select count(*) from dispatch_simulate('p', pg_temp.gates(pg_temp.throttle(1, 60)), '[{"key": "a", "jobs": 40}]')),
  '<=', 60::bigint, 'by default there are at most 60 steps');
select results_eq(
  $$ select sum(staged), sum(admitted), sum(finished), max(in_flight)
     from dispatch_simulate('p', pg_temp.gates(pg_temp.throttle(60, 60, 60), pg_temp.cap(5)), '[{"key": "a", "jobs": 900, "every": 0.1}]') $$,
  $$ values (900::bigint, 900::bigint, 900::bigint, 5) $$,
  'a long one is carried over from part to part');
select results_eq(
  $$ select sum(staged), sum(admitted), sum(finished), max(in_flight)
     from dispatch_simulate('p', pg_temp.gates(pg_temp.cap(800)), '[{"key": "a", "jobs": 1200}]') $$,
  $$ values (1200::bigint, 1200::bigint, 1200::bigint, 800) $$,
  'any number may come in at one moment');
select results_eq(
  $$ select sum(staged), sum(admitted), sum(finished), max(in_flight)
     from dispatch_simulate('p', pg_temp.gates(), '[{"key": "a", "jobs": 1200, "every": 0.01}]', p_tick_every => '1 minute') $$,
  $$ values (1200::bigint, 1200::bigint, 1200::bigint, 100) $$,
  'and between two ticks');
select is_empty($$ select * from dispatch_simulate('p', '{}', '[]') $$, 'no load, no rows');

-- What it refuses.

prepare simulate_load(jsonb) as select * from dispatch_simulate('p', '{"partition_by": "k"}', $1);
select throws_ok($$ execute simulate_load('{}') $$, 'PD009', 'invalid load: the load must be an array of objects');
select throws_ok($$ execute simulate_load('[1]') $$, 'PD009', 'invalid load: load[0] must be an object');
select throws_ok($$ execute simulate_load('[{}, {"job": 1}]') $$, 'PD009',
  'invalid load: load[1].job is not known; known here: key, context, jobs, start, every, priority, service_time');
select throws_ok($$ execute simulate_load('[{"jobs": 0}]') $$, 'PD009',
  'invalid load: load[0].jobs must be a whole number between 1 and 1000000');
select throws_ok($$ execute simulate_load('[{"jobs": 1.5}]') $$, 'PD009', null, 'half a job');
select lives_ok($$ execute simulate_load('[{"key": "a", "jobs": 2.0, "priority": 1.0}]') $$, 'a whole number may be written as a decimal');
select throws_ok($$ execute simulate_load('[{"every": "1 s"}]') $$, 'PD009', null, 'a time that is no number');
select throws_ok($$ execute simulate_load('[{"start": -1}]') $$, 'PD009', null, 'a start before the start');
select throws_ok($$ execute simulate_load('[{"service_time": 0}]') $$, 'PD009', null, 'no service time');
select throws_ok($$ execute simulate_load('[{"context": []}]') $$, 'PD009', 'invalid load: load[0].context must be an object');
select throws_ok($$ execute simulate_load('[{"key": {}}]') $$, 'PD009', 'invalid load: load[0].key must be a string, the value at k');
select throws_ok($$ execute simulate_load('[{"jobs": 999999}, {"jobs": 2}]') $$, 'PD009',
  'invalid load: load[1].jobs brings the load over 1000000 jobs');
select throws_ok($$ select * from dispatch_simulate('p', '{}', '[{"key": "a"}]') $$, 'PD009',
  'invalid load: load[0].key must be left out: the definition has no partition_by');
select throws_ok($$ select * from dispatch_simulate('p', '{"partition_by": ["a", "b"]}', '[{"key": "a"}]') $$, 'PD009',
  'invalid load: load[0].key must be an array of the values at a, b');
select throws_ok($$ select * from dispatch_simulate('p', '{"gates": [{"type": "throttle", "rate": -1, "per": 1}]}', '[]') $$, 'PD002',
  'invalid definition: gates[0].rate must be at least 0');
select throws_ok($$ select * from dispatch_simulate('p', '{}') $$, 'PD001', null, 'the past of an unknown policy');
select throws_ok($$ select * from dispatch_simulate('p', p_load => '[]') $$, 'PD001', null, 'the definition of an unknown policy');
select throws_ok($$ select * from dispatch_simulate(null, '{}', '[{}]') $$, 'PD001', null, 'no policy at all');
select throws_ok(format('select * from dispatch_simulate(%L, p_since => %L)', 'q', since), 'PD009', null, 'no clock starts at ' || since)
from unnest(array['-infinity', 'infinity', '0001-01-01 BC', '290000-01-01']) as since;
select is((select sum(admitted) from dispatch_simulate('p', '{}', '[{"jobs": 3, "every": 1e-400}]')), 3::bigint,
  'a time shorter than any other is none');
select throws_ok($$ select * from dispatch_simulate('q', p_max_jobs => 0) $$, 'PD009', 'p_max_jobs must lie between 1 and 100000, not be 0');
select throws_ok($$ select * from dispatch_simulate('q', p_groups => null) $$, 'PD009', 'p_groups must lie between 1 and 100, not be null');
select throws_ok($$ select * from dispatch_simulate('q', p_tick_every => '-1 s') $$, 'PD009', null, 'a negative time between ticks');

-- Nothing stays.

create function pg_temp.settings()
returns text
language sql
return (select string_agg(name || '=' || setting, e'\n' order by name) from pg_settings);

create temporary table before on commit drop as
select pg_temp.everything() as everything, current_setting('dispatch.fake_now') as fake_now, pg_temp.settings() as settings;
do $$
begin
  perform * from dispatch_simulate('q');
  perform * from dispatch_simulate('q', pg_temp.gates(pg_temp.cap(1), '{"type": "adaptive_concurrency", "initial_max": 1, "target_lag_ms": 1}'),
    '[{"key": "b", "jobs": 9}, {"key": "c"}]');
end;
$$;
select is(pg_temp.everything(), (select everything from before), 'every table is as it was');
select is(current_setting('dispatch.fake_now'), (select fake_now from before), 'so is the clock');
select is(pg_temp.settings(), (select settings from before), 'and every setting of the session');
set local dispatch.fake_now = '';
do $$ begin perform * from dispatch_simulate('q', pg_temp.gates(), '[{"key": "b", "jobs": 9}]'); end; $$;
select is(current_setting('dispatch.fake_now'), '', 'also where it was not stopped');
set local datestyle = 'German';
set local timezone = 'Europe/Berlin';
select is(
  (select sum(admitted) from dispatch_simulate('p', pg_temp.gates(pg_temp.throttle(1, 600)), '[{"key": "b", "jobs": 9}]',
    p_since => '2025-10-26 00:30:00+00')), 9::bigint,
  'how the session writes times does not matter, nor that an hour comes twice');

select * from finish();
rollback;
