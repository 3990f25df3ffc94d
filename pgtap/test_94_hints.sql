-- dispatch_hints: each hint shows when there is reason, once a policy, and goes when there is none any more.
begin;
select plan(92);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';
alter table procrastinate_jobs add constraint no_bad_queue check (queue_name <> 'bad');

create function pg_temp.at(p_seconds double precision)
returns void
language plpgsql
as $$
begin
  perform set_config('dispatch.fake_now', ('2026-01-01 00:00:00+00'::timestamptz + make_interval(secs => p_seconds))::text, true);
end;
$$;

create function pg_temp.later(p_seconds double precision)
returns void
language plpgsql
as $$
begin
  perform set_config('dispatch.fake_now', (dispatch_now() + make_interval(secs => p_seconds))::text, true);
  perform dispatch_sweep();
end;
$$;

create function pg_temp.stage(p_policy text, p_keys text[], p_more jsonb default '{}')
returns void
language plpgsql
as $$
begin
  perform dispatch_stage_many(p_policy, (
    select jsonb_agg(jsonb_build_object('task_name', 't', 'args', jsonb_build_object('k', key)) || p_more) from unnest(p_keys) as key));
end;
$$;

create function pg_temp.define(p_policy text, p_gates jsonb default '[]', p_more jsonb default '{}')
returns void
language plpgsql
as $$
begin
  perform dispatch_define_policy(p_policy, jsonb_build_object('partition_by', 'k', 'gates', p_gates) || p_more);
end;
$$;

create function pg_temp.worker(p_heartbeat timestamptz)
returns bigint
language sql
begin atomic
  insert into procrastinate_workers (last_heartbeat) values (p_heartbeat) returning id;
end;

-- By default with a worker that never dies.
create function pg_temp.start(p_policy text, p_heartbeat timestamptz default '2100-01-01 00:00:00+00')
returns void
language sql
begin atomic
  update procrastinate_jobs
  set status = 'doing', worker_id = pg_temp.worker(p_heartbeat)
  where status = 'todo'
    and id in (select job_id from dispatch_inflight_jobs where policy_name = p_policy);
end;

create function pg_temp.finish(p_policy text)
returns void
language sql
begin atomic
  update procrastinate_jobs
  set status = 'succeeded'
  where status = 'doing'
    and id in (select job_id from dispatch_inflight_jobs where policy_name = p_policy);
end;

-- The hints of a policy in a word each: level, hint, partition.
create function pg_temp.hints(p_policy text)
returns text[]
language sql
return array(
  select concat_ws(' ', level, hint, partition_key) from dispatch_hints where policy_name is not distinct from p_policy);

create function pg_temp.hint(p_policy text, p_hint text)
returns dispatch_hints
language sql
begin atomic
  select * from dispatch_hints where policy_name = p_policy and hint = p_hint;
end;

-- How numbers, times and names are said.
select is(array[dispatch_say_count(0, 'job'), dispatch_say_count(1, 'job'), dispatch_say_count(1234567, 'job')], '{0 jobs,1 job,"1,234,567 jobs"}', 'counts');
select is(
  array(select dispatch_say_span(make_interval(secs => s)) from unnest(array[-5, 0.4, 119, 120, 7199, 7200, 172799, 172800]) as s),
  '{0 s,0 s,119 s,2 min,119 min,2 h,47 h,2 days}', 'times');
select is(dispatch_say_name(e'a\nb' || repeat('x', 100)), '"a b' || repeat('x', 57) || '..."', 'a long name on one line, cut');
select is(
  array[dispatch_say_word('http://a.b/c'), dispatch_say_word('it''s $HOME'), dispatch_say_word(''), dispatch_say_word('-x')],
  array['http://a.b/c', '''it''\''''s $HOME''', '''''', '''-x'''], 'words of a command line');
select is(dispatch_say_call('dispatch_resume', 'resume', 'p'), 'select dispatch_resume(''p''); or: pydispatch resume p', 'a call for a policy');
select is(
  dispatch_say_call('dispatch_resume', 'resume', 'p', e'-it''s'),
  'select dispatch_resume(''p'', ''-it''''s''); or: pydispatch resume -- p ''-it''\''''s''', 'a call for a partition, quoted twice over');
select is(
  dispatch_say_call('dispatch_resume', 'resume', 'p', repeat('x', 10000)),
  'select dispatch_resume(''p'', KEY); or: pydispatch resume p KEY, with the partition_key of this hint', 'a key that nobody would read is not repeated');

-- All is well: 25 minutes of it, seen each 10 seconds.
do $$
begin
  create temporary table unwell (at timestamptz, hint text, message text);
  perform pg_temp.define('well', '[{"type": "throttle", "rate": 60, "per": 60}, {"type": "concurrency", "max": 3}]');
  perform pg_temp.define('idle');
  perform pg_temp.stage('well', array['future'], jsonb_build_object('scheduled_at', dispatch_now() + interval '20 h'));
  for i in 0 .. 150 loop
    perform pg_temp.at(10 * i);
    perform pg_temp.stage('well', array['a', 'a', 'a', 'b', 'k' || i]);
    -- What is there when the driver has just been woken, or has just gone to sleep again.
    insert into unwell select dispatch_now(), hint, message from dispatch_hints;
    perform dispatch_tick('well');
    insert into unwell select dispatch_now(), hint, message from dispatch_hints;
    perform pg_temp.start('well');
    if i % 3 = 0 then
      perform dispatch_sweep();
    end if;
    insert into unwell select dispatch_now(), hint, message from dispatch_hints;
    perform pg_temp.finish('well');
    perform dispatch_tick('well');
  end loop;
end;
$$;
select is_empty('select * from unwell', 'all through half an hour in which all is well there is no hint');
select is((select count(*) > 50 from dispatch_policy_samples where policy_name = 'well'), true, 'with a history');

-- Nobody sweeps.
select is(pg_temp.hints(null), '{}', 'a sweep is known');
do $$
begin
  perform pg_temp.at(10000);
end;
$$;
select is(pg_temp.hints(null), '{warning no_sweep}', 'no_sweep: when there was none for hint_sweep_after');
select ok((select message ~ '^The last sweep was 2 h ago' from dispatch_hints where hint = 'no_sweep'), 'it says since when');
do $$
begin
  perform pg_temp.later(0);
end;
$$;
select is(pg_temp.hints(null), '{}', 'and goes with the next');

-- Nobody ticks.
do $$
begin
  delete from dispatch_policies where policy_name in ('well', 'idle');
  perform pg_temp.define('nt');
  perform pg_temp.stage('nt', array['x', 'y']);
  perform pg_temp.later(120);
end;
$$;
select is(pg_temp.hints('nt'), '{}', 'what has been due for hint_due_after may yet be looked at');
do $$
begin
  perform pg_temp.later(1);
end;
$$;
select is(pg_temp.hints('nt'), '{critical no_tick}', 'no_tick: when staged jobs are not looked at for longer');
do $$
begin
  perform dispatch_fold('nt', dispatch_now());
end;
$$;
select is(pg_temp.hints('nt'), array['critical no_tick ' || (select partition_key from dispatch_partitions where policy_name = 'nt' order by id limit 1)], 'when partitions are due for longer, one of them is named');
select matches((pg_temp.hint('nt', 'no_tick')).message, '^2 partitions have been due for over 2 min and no tick looks, the longest \("[xy]"\) for 2 min; 2 were never checked. No tick of this policy is known.$', 'with the numbers');
select matches((pg_temp.hint('nt', 'no_tick')).what_to_do, 'pydispatch run.*dispatch_run.*select \* from dispatch_tick\(\)', 'and what to run');
do $$
begin
  perform pg_temp.define('ticked');
  perform pg_temp.stage('ticked', array['x']);
  perform dispatch_tick('ticked');
end;
$$;
select matches((pg_temp.hint('nt', 'no_tick')).what_to_do, '^Other policies are ticked', 'where others are ticked, that is another fault');
do $$
begin
  perform dispatch_pause('nt');
end;
$$;
select is(pg_temp.hints('nt'), '{info paused}', 'what is paused is not due');
do $$
begin
  perform dispatch_resume('nt');
  perform dispatch_tick('nt');
end;
$$;
select is(pg_temp.hints('nt'), '{}', 'no_tick goes with the next tick');

-- Ticks do not come round.
do $$
begin
  perform pg_temp.define('tb', '[]', '{"partition_by": ["k", "s"], "shard_by": "s"}');
  perform pg_temp.stage('tb', array['1', '2', '3'], '{"args": {"k": 1, "s": "eu"}}');
  perform dispatch_fold('tb', dispatch_now());
  perform pg_temp.later(500);
  perform pg_temp.stage('tb', array['1'], '{"args": {"k": 1, "s": "us"}}');
  perform dispatch_tick('tb', 'us');
end;
$$;
select is(pg_temp.hints('tb'), '{"warning tick_behind [1, \"eu\"]"}', 'tick_behind: when ticks run and something is due for long');
select matches((pg_temp.hint('tb', 'tick_behind')).message, '^1 partition is due for over 2 min though ticks run: .*shard "eu"\) is due for 8 min; 1 was never checked', 'with the numbers');
select matches((pg_temp.hint('tb', 'tick_behind')).what_to_do, 'pydispatch run --shard eu', 'where no tick is for the shard, that is to be done');
do $$
begin
  perform pg_temp.stage('tb', array['1'], '{"args": {"k": 2, "s": "us"}}');
  perform dispatch_define_policy('tb', '{"partition_by": ["k", "s"], "shard_by": "s", "partition_batch_size": 1}');
  perform dispatch_fold('tb', dispatch_now());
  update dispatch_partitions set due_at = dispatch_now() - interval '1 day' where policy_name = 'tb' and shard = 'us';
  perform dispatch_tick('tb');
end;
$$;
select matches((pg_temp.hint('tb', 'tick_behind')).what_to_do, '^Run another driver \(pydispatch run\), or raise partition_batch_size, which is 1 ', 'else a further driver');
do $$
begin
  perform dispatch_tick('tb') from generate_series(1, 5);
end;
$$;
select is(pg_temp.hints('tb'), '{}', 'it goes when they have come round');

-- A value that a gate needs is missing.
do $$
begin
  perform pg_temp.define('lm', '[{"type": "throttle", "rate": {"ctx": "plan.rate"}, "per": 60}]');
  perform pg_temp.stage('lm', array['a'], '{"context": {"k": "a", "plan": {"rate": 0}}}');
  perform dispatch_tick('lm');
end;
$$;
select is(pg_temp.hints('lm'), '{}', 'a limit of 0 is not a missing one');
do $$
begin
  perform pg_temp.stage('lm', array(select 'm' || i from generate_series(1, 100) as i));
  perform dispatch_define_policy('lm', (select definition || '{"partition_batch_size": 200}' from dispatch_policies where policy_name = 'lm'));
  perform dispatch_tick('lm');
  perform pg_temp.later(30);
end;
$$;
select is(cardinality(pg_temp.hints('lm')), 1, 'limit_missing: one row for a hundred partitions');
select matches((pg_temp.hint('lm', 'limit_missing')).message, '^100 jobs wait in 100 partitions whose context has no number at "plan.rate"', 'with the path and the numbers');
select matches((pg_temp.hint('lm', 'limit_missing')).partition_key, '^m[0-9]+$', 'and one of them as the example');
select matches((pg_temp.hint('lm', 'limit_missing')).what_to_do, '\{"ctx": "plan.rate", "default": 1\}', 'it says how to give a default');
do $$
begin
  perform pg_temp.define('lm', '[{"type": "throttle", "rate": {"ctx": "plan.rate", "default": 1}, "per": 60}]', '{"partition_batch_size": 200}');
  perform dispatch_tick('lm');
end;
$$;
select is(pg_temp.hints('lm'), '{}', 'it goes with a default');

-- A limit function that fails.
create function pg_temp.limit_of(p_key text, p_context jsonb) returns numeric language plpgsql as $$ begin raise 'no such tenant'; end $$;
do $$
begin
  perform pg_temp.define('le', jsonb_build_array(jsonb_build_object('type', 'concurrency', 'max',
    jsonb_build_object('sql', (select nspname from pg_namespace where oid = pg_my_temp_schema()) || '.limit_of'))));
  perform pg_temp.stage('le', array['a', 'b', 'b']);
  perform dispatch_tick('le');
end;
$$;
select matches((pg_temp.hints('le'))[1], '^warning limit_error [ab]$', 'limit_error: when a limit function fails');
select matches((pg_temp.hint('le', 'limit_error')).message, '^3 jobs wait in 2 partitions whose limit function fails.*limit_error: no such tenant$', 'with what it says');
create or replace function pg_temp.limit_of(p_key text, p_context jsonb) returns numeric language sql return 9;
do $$
begin
  perform pg_temp.later(10);
  perform dispatch_tick('le');
end;
$$;
select is(pg_temp.hints('le'), '{}', 'it goes when the function is mended');

-- What waits for a gate, and what for a worker (case: an alert cannot tell one from the other).
do $$
begin
  delete from procrastinate_workers;
  delete from dispatch_policies;
  perform pg_temp.define('g', '[{"type": "concurrency", "max": 1}]');
  perform pg_temp.define('w');
  perform pg_temp.stage('g', array['a', 'a', 'a']);
  perform pg_temp.stage('w', array['a', 'a', 'a'], '{"queue_name": "http"}');
  perform dispatch_tick();
  perform pg_temp.later(300);
end;
$$;
select is(pg_temp.hints('w'), '{}', 'a job may be queued for hint_queued_after');
do $$
begin
  perform pg_temp.later(0.1);
end;
$$;
select is(pg_temp.hints('w'), '{critical waits_for_worker a}', 'waits_for_worker: critical where no worker is alive');
select is(
  (pg_temp.hint('w', 'waits_for_worker')).message,
  '3 jobs are admitted and no worker has taken them, the longest (job ' || (select min(job_id) from dispatch_inflight_jobs where policy_name = 'w')
    || ', queue "http") for 5 min; 0 run. These wait for a worker, not for a gate. No worker is alive.', 'with the numbers');
select is((pg_temp.hint('w', 'waits_for_worker')).what_to_do, 'Start a worker: procrastinate worker --queues http', 'and what to start');
do $$
begin
  perform pg_temp.worker(dispatch_now());
end;
$$;
select is(pg_temp.hints('w'), '{warning waits_for_worker a}', 'a warning where one is alive');
select matches((pg_temp.hint('w', 'waits_for_worker')).message, '1 worker is alive\.$', 'which it says');
do $$
begin
  perform dispatch_set('hint_queued_after', 9999);
end;
$$;
select is(pg_temp.hints('w'), '{}', 'thresholds are settings');
do $$
begin
  perform dispatch_set('hint_queued_after', null);
  perform pg_temp.start('w');
  perform pg_temp.start('g');
end;
$$;
select is(pg_temp.hints('w'), '{}', 'it goes when a worker has taken them');

do $$
begin
  perform pg_temp.later(1499.8);
  perform dispatch_tick('g');
end;
$$;
select is(pg_temp.hints('g'), '{}', 'a gate may hold jobs for hint_wait_after');
do $$
begin
  perform pg_temp.later(0.2);
end;
$$;
select is(pg_temp.hints('g'), '{warning waits_for_gate a}', 'waits_for_gate: when it holds them longer');
select is(
  (pg_temp.hint('g', 'waits_for_gate')).message,
  '1 partition has had waiting jobs and none admitted for over 30 min: concurrency_full. The longest ("a", 2 jobs) for 30 min. '
    || 'These 2 jobs wait for the gate, not for a worker; 1 is in flight.', 'with the numbers');
select matches(
  (pg_temp.hint('g', 'waits_for_gate')).what_to_do,
  'dispatch_inflight.*dispatch_define_policy.*select dispatch_force_admit\(''g'', ''a'', 10\); or: pydispatch force-admit --limit 10 g a\.$', 'and what to do');
select is((pg_temp.hint('g', 'waits_for_gate')).since, (select waiting_since from dispatch_partitions where policy_name = 'g'), 'and since when');
do $$
begin
  perform pg_temp.finish('g');
  perform dispatch_tick('g');
end;
$$;
select is(pg_temp.hints('g'), '{}', 'it goes when a job is admitted');

-- Slots that fill up since no worker takes what holds them (case: somebody raises a cap, and more jobs are queued).
do $$
begin
  perform pg_temp.later(1799.9);
  perform dispatch_tick('g');
  perform pg_temp.later(0.2);
end;
$$;
select is(pg_temp.hints('g'), '{warning waits_for_gate a,warning waits_for_worker a}', 'a full cap whose jobs no worker takes is a problem of workers first');
select matches(
  (pg_temp.hint('g', 'waits_for_gate')).message,
  'This job waits for the gate, and slots of this policy are held by jobs that no worker takes; 1 is in flight.$', 'which its gate says');
select is(
  (pg_temp.hint('g', 'waits_for_gate')).what_to_do,
  'See to the workers first, as the hint waits_for_worker says: an admitted job holds its slot until it has run.', 'without a word of a higher cap');

-- A limit that a function does not know is no zero that somebody wrote.
do $$
begin
  create function pg_temp.no_limit(partition_key text, context jsonb) returns numeric language sql as 'select null::numeric';
  perform pg_temp.define('nl', '[{"type": "concurrency", "max": {"sql": "pg_temp.no_limit"}}]');
  perform pg_temp.stage('nl', array['a']);
  perform dispatch_tick('nl');
  perform pg_temp.later(1799.9);
  perform dispatch_tick('nl');
  perform pg_temp.later(0.2);
end;
$$;
select matches((pg_temp.hint('nl', 'waits_for_gate')).what_to_do, '^Its max is 0, or its limit function returns null: correct the function', 'a null of a limit function');

-- A full queue.
do $$
begin
  perform pg_temp.define('fq', '[]', '{"max_queued": 2}');
  perform pg_temp.stage('fq', array['a', 'a', 'a', 'b', 'b']);
  perform dispatch_tick('fq');
  perform dispatch_tick('fq');
  perform pg_temp.later(1799.9);
  perform dispatch_tick('fq');
end;
$$;
select is(pg_temp.hints('fq')::text like '%waits_for_gate%', false, 'a full queue may hold jobs for hint_wait_after');
do $$ begin perform pg_temp.later(0.2); end; $$;
select is(pg_temp.hints('fq')::text like '%warning waits_for_gate%', true, 'waits_for_gate: when it holds them longer');
select alike((pg_temp.hint('fq', 'waits_for_gate')).message, '2 partitions have had waiting jobs and none admitted for over 30 min: queue_full.%', 'which says that it is the queue');
select unalike((pg_temp.hint('fq', 'waits_for_gate')).message, '%not for a worker%', 'nor that it is not a matter of workers');
select ok(not pg_temp.hints('fq')::text like '%nobody_ticks%' and not pg_temp.hints('fq')::text like '%unchecked%', 'and not that nobody ticks, though the partitions are due');
select is(
  dispatch_say_remedy('queue_full', 'fq', 'a'),
  'As many of its jobs as max_queued allows wait for a worker: start more workers, or raise max_queued (select dispatch_define_policy(''fq'', ...), '
    || 'or the application''s declaration and pydispatch sync). A few jobs past the gates: select dispatch_force_admit(''fq'', ''a'', 10); or: pydispatch force-admit --limit 10 fq a.',
  'the remedy names the bound');
select alike(dispatch_say_remedy('queue_full', 'fq', null), 'As many of its jobs as max_queued allows%pydispatch sync).', 'for a policy as well');
do $$ begin perform dispatch_pause('fq', 'b'); perform dispatch_tick('fq'); end; $$;
select alike((pg_temp.hint('fq', 'waits_for_gate')).message, '1 partition has%queue_full.%', 'a paused partition is not said to wait for the queue');
do $$ begin perform dispatch_resume('fq', 'b'); perform pg_temp.start('fq'); perform dispatch_tick('fq'); end; $$;
select is(pg_temp.hints('fq')::text like '%waits_for_gate%', false, 'it goes when workers have made room');
do $$ begin perform dispatch_drop_policy('fq', true); delete from dispatch_dead_jobs where policy_name = 'fq'; end; $$;

-- A backlog that takes long.
do $$
begin
  perform pg_temp.define('sb', '[{"type": "throttle", "rate": 1, "per": 10, "burst": 1}]');
  perform pg_temp.stage('sb', array(select 'a' from generate_series(1, 300)));
  for i in 0 .. 36 loop
    perform dispatch_tick('sb');
    perform pg_temp.start('sb');
    perform pg_temp.later(10);
    if i = 10 then
      insert into unwell select dispatch_now(), hint, message from dispatch_hints where policy_name = 'sb';
    end if;
  end loop;
end;
$$;
select is_empty('select * from unwell', 'a backlog that has just come tells nothing of its pace');
select is(pg_temp.hints('sb'), '{warning slow_backlog}', 'slow_backlog: when it takes longer than hint_drain_after at the pace of 5 minutes');
select matches((pg_temp.hint('sb', 'slow_backlog')).message, '^263 jobs wait and 29 jobs were admitted in the last 5 min: at this pace the backlog is gone in 45 min. 263 jobs of it wait in partitions that throttle_empty holds back.$', 'with the numbers');
select matches((pg_temp.hint('sb', 'slow_backlog')).what_to_do, '^The rate is too low for what comes in: raise rate or burst \(select dispatch_define_policy\(''sb'', ', 'and which limit to change');
do $$
begin
  perform dispatch_drain('sb');
  perform pg_temp.start('sb');
end;
$$;
select is(pg_temp.hints('sb'), '{}', 'it goes with the backlog');

-- A backlog that grows.
do $$
begin
  delete from dispatch_policies;
  perform pg_temp.define('pg', '[{"type": "throttle", "rate": 200, "per": 60, "burst": 1}]');
  for i in 0 .. 15 loop
    perform pg_temp.stage('pg', array(select 'a' from generate_series(1, 30)));
    perform dispatch_tick('pg');
    perform pg_temp.start('pg');
    perform pg_temp.later(60);
  end loop;
end;
$$;
select ok('warning pending_grows' = any (pg_temp.hints('pg')), 'pending_grows: when waiting jobs grow while jobs are admitted');
select matches((pg_temp.hint('pg', 'pending_grows')).message, '^[0-9,]+ jobs wait now; 15 min ago it was [0-9,]+ ', 'with the numbers');
do $$
begin
  perform dispatch_drain('pg');
  perform pg_temp.start('pg');
  perform pg_temp.later(100) from generate_series(1, 4);
end;
$$;
select ok('warning pending_grows' <> all (pg_temp.hints('pg')), 'it goes when they do not');

-- Hand-offs that fail, and the dead.
do $$
begin
  perform pg_temp.define('hf');
  perform pg_temp.stage('hf', array(select 'a' from generate_series(1, 99)));
  perform pg_temp.stage('hf', array['a'], '{"queue_name": "bad"}');
  perform dispatch_tick('hf') from generate_series(1, 3);
  perform pg_temp.start('hf');
end;
$$;
select is(pg_temp.hints('hf'), '{warning dead_jobs a}', 'one in a hundred is not over hint_failure_percent; dead_jobs: but the job is dead');
select matches((pg_temp.hint('hf', 'dead_jobs')).message, '^1 job could not be handed off and is set aside, the last one \([0-9]+, t\) 0 s ago: .*SQLSTATE', 'with its error');
select matches((pg_temp.hint('hf', 'dead_jobs')).what_to_do, 'select dispatch_requeue_dead\(([0-9]+)\); or: pydispatch dead requeue \1\. Or throw it away: select dispatch_discard_dead\(\1\); or: pydispatch dead discard \1\. ', 'and what to do with it');
do $$
begin
  perform pg_temp.stage('hf', array['a', 'a'], '{"queue_name": "bad"}');
  perform dispatch_tick('hf');
end;
$$;
select is(pg_temp.hints('hf'), '{warning dead_jobs a,warning handoff_failures}', 'handoff_failures: over hint_failure_percent');
select matches((pg_temp.hint('hf', 'handoff_failures')).message, '^3 of 102 jobs could not be handed off in the last 5 min \(2.9 %\) and are set aside as dead.$', 'with the numbers');
do $$
begin
  perform pg_temp.later(301);
  perform dispatch_discard_dead(id) from dispatch_dead_jobs where policy_name = 'hf';
end;
$$;
select is(pg_temp.hints('hf'), '{}', 'they go after 5 minutes, and with the dead');

-- Slow ticks.
do $$
begin
  perform pg_temp.define('st');
  insert into dispatch_tick_samples (at, policy_name, partitions_seen, partitions_admitted, partitions_denied, jobs_admitted,
    handoff_failures, denied_reasons, duration_ms)
  select dispatch_now(), 'st', 1, 1, 0, 1, 0, '{}', ms from unnest(array[12500, 13000.4]) as ms;
end;
$$;
select is(pg_temp.hints('st'), '{warning slow_tick}', 'slow_tick: when a tick took longer than hint_tick_ms');
select matches((pg_temp.hint('st', 'slow_tick')).message, '^A tick took 13,000 ms', 'with the number');
do $$
begin
  perform pg_temp.later(301);
end;
$$;
select is(pg_temp.hints('st'), '{}', 'it goes after 5 minutes');

-- Stalled jobs.
do $$
begin
  perform pg_temp.define('sj');
  perform pg_temp.stage('sj', array['a']);
  perform dispatch_tick('sj');
  perform pg_temp.start('sj', dispatch_now());
  perform pg_temp.later(301);
end;
$$;
select is(pg_temp.hints('sj'), '{warning stalled_jobs}', 'stalled_jobs: when a worker gives no sign, also when a sweep has taken the slot');
select matches((pg_temp.hint('sj', 'stalled_jobs')).message, '^1 job runs on workers that gave no sign for 5 min, as job [0-9]+, silent for 5 min\.$', 'with the numbers');
do $$
begin
  update procrastinate_jobs set status = 'succeeded' where status = 'doing' and worker_id is not null;
end;
$$;
select is(pg_temp.hints('sj'), '{}', 'it goes with the end of the job');

-- Pauses.
do $$
begin
  perform pg_temp.define('pa');
  perform dispatch_pause('pa', 'one');
  perform pg_temp.later(60);
  perform dispatch_pause('pa', e'two\nlines');
  perform pg_temp.stage('pa', array['one', 'one', e'two\nlines']);
  perform dispatch_tick('pa');
end;
$$;
select is(pg_temp.hints('pa'), '{info paused one}', 'paused: one row for all paused partitions');
select is((pg_temp.hint('pa', 'paused')).message, '2 partitions are paused, the longest "one" for 60 s; 3 jobs wait in paused partitions.', 'with the numbers');
do $$
begin
  perform pg_temp.later(3601);
end;
$$;
select is(pg_temp.hints('pa'), '{warning paused one}', 'a warning when jobs wait and it was paused over hint_pause_after ago');
do $$
begin
  perform dispatch_pause('pa');
end;
$$;
select is((pg_temp.hint('pa', 'paused')).message, 'The policy has been paused for 0 s; 3 jobs wait.', 'a paused policy says so alone');
do $$
begin
  perform dispatch_resume('pa');
  perform dispatch_resume('pa', partition_key) from dispatch_pauses where policy_name = 'pa';
  perform dispatch_tick('pa');
end;
$$;
select is(pg_temp.hints('pa'), '{}', 'it goes with the pause');

-- Shards finer than partitions.
do $$
begin
  set local client_min_messages = error;
  perform dispatch_define_policy('sh', '{"partition_by": "k", "shard_by": ["k", "region"]}');
end;
$$;
select is(pg_temp.hints('sh'), '{info shard_finer}', 'shard_finer: when shard_by names what partition_by does not');
do $$
begin
  perform dispatch_define_policy('sh', '{"partition_by": ["k", "region"], "shard_by": ["k", "region"]}');
end;
$$;
select is(pg_temp.hints('sh'), '{}', 'it goes when it does');

-- Dead notes ----------------------------------------------------------------------------------------

set local client_min_messages = error;
do $$
begin
  perform dispatch_define_policy('dn', '{}');
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs, due_at, partition_key, shard, context)
  values ('dn', dispatch_partition_id('dn', ''), 'staged', 1, dispatch_now(), '', 'default', '{}');
  perform dispatch_fold('dn', dispatch_now());
end;
$$;
select is(pg_temp.hints('dn'), '{warning dead_notes}', 'dead_notes: when a note could not be folded');
select matches((pg_temp.hint('dn', 'dead_notes')).message, '^1 note could not be folded and is set aside, the last one \([0-9]+, of kind staged\) 0 s ago: .*newest_id', 'with its error');
select matches((pg_temp.hint('dn', 'dead_notes')).what_to_do, 'select dispatch_requeue_note\(([0-9]+)\), or throw it away: select dispatch_discard_note\(\1\)\.', 'and what to do with it');

select * from finish();
rollback;
