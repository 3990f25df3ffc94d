-- Ends that come by hand: finishing for other workers, cancelling, and where a job is at any time.
begin;
select plan(81);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';

create function pg_temp.define(p_policy text, p_gates jsonb default '[{"type": "concurrency", "max": 2}]')
returns void
language plpgsql
as $$
begin
  perform dispatch_define_policy(p_policy, jsonb_build_object('partition_by', 'k', 'queue', 'q', 'gates', p_gates));
end;
$$;

create function pg_temp.stage(p_policy text, p_name text, p_more jsonb default '{}')
returns bigint
language sql
begin atomic
  select id from dispatch_stage_many(p_policy, jsonb_build_array(jsonb_build_object('task_name', p_name) || p_more)) as id;
end;

create function pg_temp.job_id(p_name text)
returns bigint
language sql
begin atomic
  select max(id) from procrastinate_jobs where task_name = p_name;
end;

-- The id that staging returned.
create function pg_temp.id(p_name text)
returns bigint
language sql
return coalesce(
  (select max(id) from dispatch_staged_jobs where task_name = p_name),
  (select staged_id from dispatch_admissions where job_id = pg_temp.job_id(p_name)),
  (select max(id) from dispatch_dead_jobs where task_name = p_name));

create function pg_temp.start(p_name text)
returns void
language sql
begin atomic
  update procrastinate_jobs set status = 'doing' where id = pg_temp.job_id(p_name) and status = 'todo';
end;

create function pg_temp.retry(p_name text)
returns void
language sql
begin atomic
  select procrastinate_retry_job_v2(pg_temp.job_id(p_name), null, null, null, null);
end;

create function pg_temp.status(p_name text)
returns text
language sql
return (select status::text from procrastinate_jobs where id = pg_temp.job_id(p_name));

create function pg_temp.counters(p_policy text)
returns bigint[]
language plpgsql
as $$
begin
  perform dispatch_fold(p_policy, dispatch_now());
  return (select array[pending_count, in_flight_count] from dispatch_partitions where policy_name = p_policy);
end;
$$;

-- Finishing.
do $$
begin
  perform pg_temp.define('finish');
  perform pg_temp.stage('finish', format('f%s', i)) from generate_series(1, 5) as i;
  perform dispatch_tick('finish');
end;
$$;
select is(pg_temp.counters('finish'), '{3,2}', 'two jobs are in flight, three wait');
select ok(dispatch_finish(pg_temp.job_id('f1'), true), 'finishing a job frees its slot');
-- case: the same job is finished twice
select ok(not dispatch_finish(pg_temp.job_id('f1'), true), 'finishing it again does nothing');
select ok(not dispatch_finish(pg_temp.job_id('f1'), false), 'whatever the second one says');
select is((select count(*) from dispatch_inflight_jobs where policy_name = 'finish'), 1::bigint, 'one slot is free');
select is(pg_temp.counters('finish'), '{3,1}', 'the counter knows of one finish');
select is((select jobs_admitted from dispatch_tick('finish')), 1, 'and one job takes its place');
do $$
begin
  perform pg_temp.start('f2');
  perform procrastinate_finish_job_v1(pg_temp.job_id('f2'), 'succeeded', false);
end;
$$;
select ok(not dispatch_finish(pg_temp.job_id('f2'), true), 'a job that procrastinate has finished is finished');
select ok(not dispatch_finish(-1, true), 'finishing a job that does not exist does nothing');
select ok(not dispatch_finish(null, true), 'nor does finishing no job');
select ok(not dispatch_finish(pg_temp.id('f5'), true), 'nor does finishing one that is still staged');
select is(pg_temp.counters('finish'), '{2,1}', 'the counter stays with the truth');
select ok(dispatch_finish(pg_temp.job_id('f3'), null), 'a finish may say nothing of success');

do $$
begin
  perform pg_temp.define('observed', '[{"type": "adaptive_concurrency", "initial_max": 3, "target_lag_ms": 100}]');
  perform pg_temp.stage('observed', format('o%s', i)) from generate_series(1, 3) as i;
  perform dispatch_tick('observed');
  perform pg_temp.start(format('o%s', i)) from generate_series(1, 3) as i;
  update procrastinate_events set at = dispatch_now() + interval '40 ms' where type = 'started';
  perform dispatch_finish(pg_temp.job_id('o1'), true);
  perform dispatch_finish(pg_temp.job_id('o2'), false);
  perform dispatch_finish(pg_temp.job_id('o3'), null);
end;
$$;
select results_eq(
  $$ select jobs, succeeded, lag_ms from dispatch_inbox where policy_name = 'observed' order by id $$,
  $$ values (-1, true, 40::double precision), (-1, false, 40), (-1, null::boolean, null) $$,
  'a finish with a verdict is an observation, one without is none');

-- Cancelling a staged job.
do $$
begin
  perform pg_temp.define('cancel');
  perform pg_temp.stage('cancel', 'c1', '{"queueing_lock": "Q"}');
  perform pg_temp.stage('cancel', 'c2');
  perform dispatch_fold('cancel', dispatch_now());
end;
$$;
create temporary table cancelled as select pg_temp.id('c1') as id;
select ok(dispatch_cancel(id), 'a staged job is cancelled') from cancelled;
select ok(not dispatch_cancel(id), 'once') from cancelled;
select is(pg_temp.counters('cancel'), '{1,0}', 'it is pending no longer');
select is((dispatch_job(id)).state, 'cancelled', 'its state says so') from cancelled;
select is(dispatch_job_status(id), 'cancelled', 'in procrastinate''s word too') from cancelled;
select is((select finished_at from dispatch_job(id)), dispatch_now(), 'since when') from cancelled;
select lives_ok($$ select pg_temp.stage('cancel', 'c3', '{"queueing_lock": "Q"}') $$, 'its queueing lock is free');
select ok(not dispatch_cancel(-1), 'a job that does not exist is not cancelled');
select ok(not dispatch_cancel(null), 'nor is no job');
select ok(not dispatch_cancel_job(-1, true, true), 'by either function');

-- Cancelling one that is admitted.
do $$
begin
  perform dispatch_tick('cancel');
end;
$$;
select ok(not dispatch_cancel(pg_temp.id('c2')), 'an admitted job is staged no longer, so dispatch_cancel leaves it');
select is(pg_temp.status('c2'), 'todo', 'in the queue');
select ok(dispatch_cancel_job(pg_temp.id('c2'), false, false), 'dispatch_cancel_job cancels it there, by the id that staging returned');
select is(pg_temp.status('c2'), 'cancelled', 'as procrastinate does');
select is((dispatch_job(pg_temp.id('c2'))).state, 'cancelled', 'its state says so');
select ok(not dispatch_cancel_job(pg_temp.id('c2'), false, false), 'once');
select is(pg_temp.counters('cancel'), '{0,1}', 'its slot is free');
do $$
begin
  perform pg_temp.start('c3');
end;
$$;
select ok(not dispatch_cancel_job(pg_temp.job_id('c3'), false, false), 'a running job is not cancelled');
select ok(dispatch_cancel_job(pg_temp.job_id('c3'), true, false), 'but asked to abort, by procrastinate''s id as well');
select is((select abort_requested from procrastinate_jobs where id = pg_temp.job_id('c3')), true, 'as procrastinate does');
select is(pg_temp.counters('cancel'), '{0,1}', 'it keeps its slot while it runs');
do $$
begin
  perform procrastinate_finish_job_v1(pg_temp.job_id('c3'), 'aborted', false);
end;
$$;
select is(pg_temp.counters('cancel'), '{0,0}', 'and gives it back when it has stopped');

-- Cancelling a retry that waits.
do $$
begin
  perform pg_temp.define('parked');
  perform pg_temp.stage('parked', format('r%s', i)) from generate_series(1, 2) as i;
  perform dispatch_tick('parked');
  perform pg_temp.start('r1'), pg_temp.start('r2');
  perform pg_temp.retry('r1'), pg_temp.retry('r2');
end;
$$;
select is(pg_temp.counters('parked'), '{2,0}', 'two retries wait');
create temporary table parked as select pg_temp.id('r1') as r1, pg_temp.id('r2') as r2;
select ok(dispatch_cancel(r1), 'a retry that waits is cancelled') from parked;
select is(pg_temp.status('r1'), 'cancelled', 'in procrastinate as well');
select is((dispatch_job(r1)).state, 'cancelled', 'its state says so') from parked;
select ok(not dispatch_cancel(r1), 'once') from parked;
select is(pg_temp.counters('parked'), '{1,0}', 'it is pending no longer');
select ok(dispatch_cancel_job(pg_temp.job_id('r2'), true, false), 'procrastinate''s id serves to cancel one too');
select is(pg_temp.counters('parked'), '{0,0}', 'with the same effect');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'parked'), 0::bigint, 'nothing is staged');

-- Cancelling without a trace.
do $$
begin
  perform pg_temp.define('trace');
  perform pg_temp.stage('trace', 't1');
  perform dispatch_tick('trace');
  perform pg_temp.start('t1');
  perform pg_temp.retry('t1');
  perform pg_temp.stage('trace', 't2');
  perform dispatch_tick('trace');
  perform dispatch_pause('trace');
  perform pg_temp.start('t1');
  perform pg_temp.retry('t1');
  perform pg_temp.stage('trace', 't3');
end;
$$;
create temporary table trace as select pg_temp.id('t1') as t1, pg_temp.id('t2') as t2, pg_temp.id('t3') as t3;
select ok(dispatch_cancel_job(t1, false, true), 'a retry that waits can be cancelled and deleted') from trace;
select ok(dispatch_cancel_job(t2, false, true), 'a queued job too') from trace;
select ok(dispatch_cancel_job(t3, false, true), 'a staged job too') from trace;
select is((select count(*) from procrastinate_jobs where task_name in ('t1', 't2', 't3')), 0::bigint, 'none is left in procrastinate');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'trace'), 0::bigint, 'or staged');
select throws_ok(format('select dispatch_job(%s)', id), 'PD006', null, 'nothing is known of a ' || what || ' any more')
from trace
cross join lateral (values (t1, 'retry that waited'), (t2, 'queued job'), (t3, 'staged job')) as gone (id, what);
select is(dispatch_job_status(t2), null, 'least of all that it succeeded') from trace;
select is(pg_temp.counters('trace'), '{0,0}', 'the counters are clear');

-- Where a job is.
do $$
begin
  perform pg_temp.define('life');
  perform pg_temp.stage('life', 'job', '{"context": {"k": "key"}}');
end;
$$;
create temporary table life as select pg_temp.id('job') as id;
select results_eq(
  $$ select j.id, state, policy_name, partition_key, job_id, task_name, queue_name, attempts, staged_at, admitted_at, finished_at from life, dispatch_job(id) as j $$,
  $$ select id, 'staged', 'life', 'key', null::bigint, 'job', 'q', 0, dispatch_now(), null::timestamptz, null::timestamptz from life $$,
  'dispatch_job tells of a staged job');
select is(dispatch_job_status(id), 'todo', 'which procrastinate would call todo') from life;
do $$
begin
  perform set_config('dispatch.fake_now', '2026-01-01 00:00:10+00', true);
  perform dispatch_tick('life');
end;
$$;
select results_eq(
  $$ select j.id, state, policy_name, partition_key, job_id, task_name, queue_name, attempts, staged_at, admitted_at, finished_at from life, dispatch_job(id) as j $$,
  $$ select id, 'queued', 'life', 'key', pg_temp.job_id('job'), 'job', 'q', 0, timestamptz '2026-01-01 00:00:00+00', dispatch_now(), null::timestamptz from life $$,
  'of a queued one');
select results_eq(
  $$ select dispatch_job(pg_temp.job_id('job')) $$, $$ select dispatch_job(id) from life $$, 'by procrastinate''s id as well');
select is(dispatch_job_status(id), 'todo', 'still todo') from life;
do $$
begin
  perform pg_temp.start('job');
end;
$$;
select is((dispatch_job(id)).state, 'running', 'of a running one') from life;
select is(dispatch_job_status(id), 'doing', 'doing') from life;
do $$
begin
  perform pg_temp.retry('job');
end;
$$;
select is((select array[state, job_id::text, attempts::text] from dispatch_job(id)), array['staged', pg_temp.job_id('job')::text, '1'], 'of a retry that waits') from life;
select is((dispatch_job(pg_temp.job_id('job'))).id, id, 'by procrastinate''s id as well') from life;
select is(dispatch_job_status(pg_temp.job_id('job')), 'todo', 'todo again') from life;
do $$
begin
  perform dispatch_tick('life');
  perform pg_temp.start('job');
  perform procrastinate_finish_job_v1(pg_temp.job_id('job'), 'failed', false);
  update procrastinate_events set at = '2026-01-01 00:00:30+00' where type = 'failed';
end;
$$;
select is((select array[state, finished_at::text] from dispatch_job(id)), array['finished', timestamptz '2026-01-01 00:00:30+00'::text], 'of one that has ended, and when') from life;
select is(dispatch_job_status(id), 'failed', 'as it ended') from life;
do $$
begin
  delete from procrastinate_jobs where id = pg_temp.job_id('job');
end;
$$;
select is((dispatch_job(id)).state, 'finished', 'of one that has ended and is deleted') from life;
select is(dispatch_job_status(id), 'succeeded', 'which then counts as succeeded') from life;
do $$
begin
  perform pg_temp.stage('life', 'dead');
  alter table procrastinate_jobs add constraint no_dead check (task_name <> 'dead');
  perform dispatch_tick('life');
end;
$$;
select is((select array[state, finished_at::text] from dispatch_job(pg_temp.id('dead'))), array['dead', dispatch_now()::text], 'of a dead one');
select is(dispatch_job_status(pg_temp.id('dead')), 'failed', 'failed');
do $$
begin
  perform procrastinate_defer_jobs_v1(array[row('default', 'foreign', 0, null, null, '{}', null)::procrastinate_job_to_defer_v1]);
end;
$$;
select results_eq(
  $$ select id, state, policy_name, job_id, task_name from dispatch_job(pg_temp.job_id('foreign')) $$,
  $$ select pg_temp.job_id('foreign'), 'queued', null::text, pg_temp.job_id('foreign'), 'foreign' $$, 'of one that never had a policy');
select ok(dispatch_cancel_job(pg_temp.job_id('foreign'), false, false), 'which can be cancelled like any other');
select throws_ok('select dispatch_job(-1)', 'PD006', null, 'an unknown job is an error');
select is(dispatch_job_status(-1), null, 'and has no status');

-- Periodic jobs.
do $$
begin
  perform pg_temp.define('periodic', '[]');
end;
$$;
create temporary table first_time as select dispatch_stage_periodic('periodic', '{"task_name": "beat", "args": {"timestamp": 100}, "queueing_lock": "P"}', 'p', 100) as id;
select is((select array_agg(id) from dispatch_staged_jobs where policy_name = 'periodic'), array[id], 'a periodic job is staged') from first_time;
select is(dispatch_stage_periodic('periodic', '{"task_name": "beat", "args": {"timestamp": 100}}', 'p', 100), null, 'once for each of its times, however many workers try');
select throws_ok(
  $$ select dispatch_stage_periodic('periodic', '{"task_name": "beat", "args": {"timestamp": 200}, "queueing_lock": "P"}', 'p', 200) $$, 'PD004', null,
  'its queueing lock holds');
select isnt(dispatch_stage_periodic('periodic', '{"task_name": "beat", "args": {"timestamp": 200}}', 'p', 200), null, 'what was refused left the time free');
select is(
  (select array_agg(defer_timestamp) from procrastinate_periodic_defers where task_name = 'beat'), '{200}', 'earlier times are forgotten');
select isnt(dispatch_stage_periodic('periodic', '{"task_name": "beat"}', 'other', 100), null, 'another period of the task has times of its own');

select * from finish();
rollback;
