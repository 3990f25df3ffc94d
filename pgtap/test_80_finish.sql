-- Ends that come by hand: finishing for other workers, cancelling, and where a job is at any time.
begin;
select plan(146);

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
  (select job_id from dispatch_admissions where job_id = pg_temp.job_id(p_name)),
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

-- Ended before it ran, a job looks in procrastinate's tables as if procrastinate had had it all along: each is compared with one
-- that procrastinate was given without us, and to which the same was done.
create function pg_temp.into(p_name text, p_state text)
returns bigint
language plpgsql
as $$
declare
  v_id bigint := pg_temp.job_id(p_name);
begin
  if p_state not in ('staged', 'queued', 'cancelled') then
    perform pg_temp.start(p_name);
  end if;
  if p_state = 'parked' then
    perform procrastinate_retry_job_v2(v_id, dispatch_now() + interval '1 hour', 5, 'elsewhere', null);
  elsif p_state = 'cancelled' then
    perform procrastinate_cancel_job_v1(v_id, false, false);
  elsif p_state in ('succeeded', 'failed', 'aborted') then
    perform procrastinate_finish_job_v1(v_id, p_state::procrastinate_job_status, false);
  end if;
  return v_id;
end;
$$;
create function pg_temp.trace(p_id bigint)
returns text
language sql
begin atomic
  select coalesce(
    (
      select format('%s in %s, attempts %s, abort %s, priority %s, lock %s, queueing lock %s, at %s, args %s: ', status, queue_name, attempts, abort_requested, priority,
        lock, split_part(queueing_lock, ' ', 1), scheduled_at, args)
      from procrastinate_jobs where id = p_id
    ) || array(select type::text from procrastinate_events where job_id = p_id order by type <> 'scheduled', id)::text,
    'gone');
end;
create function pg_temp.twins(p_state text, p_ours text, p_theirs text, p_scheduled_at timestamptz default null)
returns text
language plpgsql
as $$
declare
  v_ours bigint;
  v_theirs bigint;
  v_said text;
  v_they_said text;
begin
  v_ours := dispatch_stage('twins', 'ours', '{"x": 1}', p_priority => 3, p_lock => 'L', p_queueing_lock => 'Q ours', p_scheduled_at => p_scheduled_at);
  if p_state <> 'staged' then
    perform dispatch_tick('twins');
    perform pg_temp.into('ours', p_state);
  end if;
  begin
    execute format('select %s', format(p_ours, v_ours)) into v_said;
  exception
    when raise_exception then v_said := 'refused';
  end;
  -- One lock: one after the other.
  create temporary table ours as select pg_temp.trace(v_ours) as trace;
  delete from procrastinate_jobs where id = v_ours;
  perform procrastinate_defer_jobs_v1(array[row('q', 'theirs', 3, 'L', 'Q theirs', '{"x": 1}', p_scheduled_at)::procrastinate_job_to_defer_v1]);
  v_theirs := pg_temp.into('theirs', p_state);
  begin
    execute format('select %s', format(p_theirs, v_theirs)) into v_they_said;
  exception
    when raise_exception then v_they_said := 'refused';
  end;
  v_said := case
    when (v_said, (select trace from ours)) is distinct from (v_they_said, pg_temp.trace(v_theirs)) then
      format(e'%s, %s\nand not %s, %s', v_said, (select trace from ours), v_they_said, pg_temp.trace(v_theirs))
  end;
  drop table ours;
  delete from procrastinate_jobs where id = v_theirs;
  delete from dispatch_staged_jobs where policy_name = 'twins';
  return v_said;
end;
$$;
do $$ begin perform dispatch_define_policy('twins', '{"queue": "q"}'); end; $$;
select is(
  pg_temp.twins(state, format('dispatch_cancel_job(%%s, %L, %L)', abort, deleted), format('procrastinate_cancel_job_v1(%%s, %L, %L) is not null', abort, deleted)),
  null, format('dispatch_cancel_job does with a %s job what procrastinate does%s%s', state, case when abort then ', aborting' else '' end, case when deleted then ', deleting' else '' end))
from unnest(array['staged', 'parked', 'queued', 'running', 'succeeded', 'failed', 'cancelled', 'aborted']) as state
cross join unnest(array[false, true]) as abort
cross join unnest(array[false, true]) as deleted;
select is(
  pg_temp.twins('staged', format('dispatch_cancel_job(%%s, %L, false)', abort), format('procrastinate_cancel_job_v1(%%s, %L, false) is not null', abort), '2030-01-01 00:00:00+00'),
  null, 'also with one that is scheduled for later' || case when abort then ', aborting' else '' end)
from unnest(array[false, true]) as abort;
select is(
  pg_temp.twins('staged', format('dispatch_end_staged(%%s, %L, false)', word), format('procrastinate_finish_job_v1(%%s, %L, false) is not null', word)),
  null, format('dispatch_end_staged leaves a job that ends as %s as procrastinate does', word))
from unnest(array['succeeded', 'failed']) as word;
select is(
  pg_temp.twins('staged', 'dispatch_end_staged(%s, ''failed'', true)', 'procrastinate_finish_job_v1(%s, ''failed'', true) is not null'), null, 'or leaves nothing of it');
select is(
  pg_temp.twins(state, 'dispatch_cancel(%s)', 'procrastinate_cancel_job_v1(%s, false, false) is not null'), null, format('dispatch_cancel does with a %s job what procrastinate does', state))
from unnest(array['staged', 'parked']) as state;
select is(
  pg_temp.twins(state, 'dispatch_retry_job(%s, ''2026-02-01 00:00:00+00'', 7, ''other'', ''M'')', 'procrastinate_retry_job_v2(%s, ''2026-02-01 00:00:00+00'', 7, ''other'', ''M'')'),
  null, format('dispatch_retry_job refuses a %s job as procrastinate does', state))
from unnest(array['queued', 'succeeded', 'cancelled', 'aborted']) as state;
select ok(not dispatch_end_staged(-1, 'failed', false), 'dispatch_end_staged ends no job that does not exist');

-- What is known of jobs in each state.
create function pg_temp.known(p_state text)
returns text
language plpgsql
as $$
declare
  v_id constant bigint := dispatch_stage('twins', 'ours', '{"x": 1}');
  v_state dispatch_job_state;
begin
  if p_state not like 'staged%' then
    perform dispatch_tick('twins');
    perform pg_temp.into('ours', replace(p_state, ', deleted', ''));
  end if;
  if p_state like 'staged, %' then
    perform dispatch_end_staged(v_id, split_part(p_state, ', ', 2), false);
  elsif p_state like '%, deleted' then
    delete from procrastinate_jobs where id = v_id;
  end if;
  v_state := dispatch_job(v_id);
  return format('%s %s %s, row %s, admitted %s, ended %s', v_state.id = v_id, v_state.state, dispatch_job_status(v_id), v_state.job_id is not null,
    v_state.admitted_at is not null, v_state.finished_at is not null);
end;
$$;
select is(pg_temp.known(state), 't ' || known, 'what is known of a job that is ' || state)
from (values
  ('staged', 'staged todo, row f, admitted f, ended f'),
  ('parked', 'staged todo, row t, admitted f, ended f'),
  ('queued', 'queued todo, row t, admitted t, ended f'),
  ('running', 'running doing, row t, admitted t, ended f'),
  ('succeeded', 'finished succeeded, row t, admitted t, ended t'),
  ('failed', 'finished failed, row t, admitted t, ended t'),
  ('cancelled', 'cancelled cancelled, row t, admitted t, ended t'),
  ('aborted', 'finished aborted, row t, admitted t, ended t'),
  ('succeeded, deleted', 'finished succeeded, row f, admitted t, ended f'),
  ('staged, cancelled', 'cancelled cancelled, row t, admitted f, ended t'),
  ('staged, failed', 'finished failed, row t, admitted f, ended t'),
  ('staged, succeeded', 'finished succeeded, row t, admitted f, ended t')
) as states (state, known);
do $$
begin
  perform dispatch_stage('twins', 'once cancelled');
  perform dispatch_cancel(id) from dispatch_staged_jobs where task_name = 'once cancelled';
  delete from procrastinate_jobs where task_name = 'once cancelled';
end;
$$;
select is((select array_agg(distinct dispatch_job_status(job_id) || (dispatch_job(job_id)).state) from dispatch_admissions where ending = 'cancelled' and not exists (select from procrastinate_jobs where id = job_id)),
  '{cancelledcancelled}', 'a job that was cancelled counts as cancelled, also when procrastinate has deleted its row');

-- A retry by hand of a retry that was ended while it waited.
create function pg_temp.revived(p_how text)
returns text
language plpgsql
as $$
declare
  v_id bigint := dispatch_stage('revived', p_how, '{}', p_priority => 3, p_lock => 'RL', p_queueing_lock => 'RQ ' || p_how);
begin
  perform dispatch_tick('revived');
  perform pg_temp.start(p_how);
  perform procrastinate_retry_job_v2(v_id, dispatch_now(), null, null, null);
  if p_how = 'cancelled' then
    perform procrastinate_cancel_job_v1(v_id, false, false);
  elsif p_how = 'ended' then
    perform procrastinate_finish_job_v1(v_id, 'failed', false);
  else
    perform pg_temp.start(p_how);
    perform procrastinate_finish_job_v1(v_id, 'failed', false);
  end if;
  update procrastinate_jobs set status = 'todo' where id = v_id;
  return (select format('priority %s, lock %s, queueing lock %s, eligible %s', priority, lock, queueing_lock, eligible_at <= dispatch_now()) from dispatch_staged_jobs where id = v_id);
end;
$$;
do $$ begin perform dispatch_define_policy('revived', '{}'); end; $$;
select is(pg_temp.revived(how), format('priority 3, lock RL, queueing lock RQ %s, eligible t', how), format('a retry that was %s while it waited, and is retried by hand, is what it was', how))
from unnest(array['cancelled', 'ended', 'run by hand']) as how;

-- A job that procrastinate's table would refuse can be cancelled all the same.
create temporary table refused as select dispatch_stage('revived', 'dead', p_queueing_lock => 'dead') as id;
select ok(dispatch_cancel(id), 'a staged job that procrastinate''s table would refuse is cancelled') from refused;
select is_empty('select from procrastinate_jobs where id in (select id from refused)', 'without a row there');
select is((dispatch_job(id)).state, 'cancelled', 'its state says so') from refused;
select is(dispatch_job_status(id), 'cancelled', 'in procrastinate''s word too') from refused;
select ok(not dispatch_cancel_job(id, false, false), 'and it is not cancelled twice') from refused;

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
