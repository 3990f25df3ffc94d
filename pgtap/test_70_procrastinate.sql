-- procrastinate: what it is given, what it refuses, and jobs that come back for a retry.
begin;
select plan(86);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';

create function pg_temp.clock(p_seconds double precision)
returns timestamptz
language sql
return '2026-01-01 00:00:00+00'::timestamptz + make_interval(secs => p_seconds);

create function pg_temp.at(p_seconds double precision)
returns void
language plpgsql
as $$
begin
  perform set_config('dispatch.fake_now', pg_temp.clock(p_seconds)::text, true);
end;
$$;

create function pg_temp.define(p_policy text, p_more jsonb default '{}')
returns void
language plpgsql
as $$
begin
  perform dispatch_define_policy(p_policy, '{"partition_by": "k"}' || p_more);
end;
$$;

create function pg_temp.stage(p_policy text, p_name text, p_more jsonb default '{}')
returns bigint
language sql
begin atomic
  select id from dispatch_stage_many(p_policy, jsonb_build_array(jsonb_build_object('task_name', p_name) || p_more)) as id;
end;

-- A job that procrastinate was given without us.
create function pg_temp.defer(p_name text, p_lock text default null, p_queueing_lock text default null)
returns bigint
language plpgsql
as $$
begin
  return (procrastinate_defer_jobs_v1(array[row('default', p_name, 0, p_lock, p_queueing_lock, '{}', null)::procrastinate_job_to_defer_v1]))[1];
end;
$$;

create function pg_temp.job(p_name text)
returns procrastinate_jobs
language sql
begin atomic
  select * from procrastinate_jobs where task_name = p_name order by id desc limit 1;
end;

create function pg_temp.waiting(p_name text)
returns dispatch_staged_jobs
language sql
begin atomic
  select * from dispatch_staged_jobs where task_name = p_name;
end;

create function pg_temp.events(p_name text)
returns text[]
language sql
return array(select type::text from procrastinate_events where job_id = (pg_temp.job(p_name)).id order by id);

-- A worker takes this very job.
create function pg_temp.start(p_name text)
returns void
language sql
begin atomic
  update procrastinate_jobs set status = 'doing' where id = (pg_temp.job(p_name)).id and status = 'todo';
end;

-- Which job a worker gets now, if any.
create function pg_temp.fetch()
returns text
language plpgsql
as $$
begin
  return (select task_name from procrastinate_fetch_job_v2(null, null));
end;
$$;

-- Attributes.
do $$
begin
  perform pg_temp.define('attributes', '{"queue": "policy_queue"}');
  perform pg_temp.stage('attributes', 'full', '{"args": {"a": [1, null, "x"], "unicode": "ß\u2603"}, "queue_name": "own", "priority": -3, "lock": "L", "queueing_lock": "Q",
    "scheduled_at": "2025-12-31T23:59:59.123456+00:00"}');
  perform pg_temp.stage('attributes', 'bare');
  perform dispatch_tick('attributes');
end;
$$;
select results_eq(
  $$ select queue_name::text, priority, lock, queueing_lock, args, scheduled_at, status::text, attempts from procrastinate_jobs where task_name = 'full' $$,
  $$ values ('own', -3, 'L', 'Q', '{"a": [1, null, "x"], "unicode": "ß\u2603"}'::jsonb, '2025-12-31 23:59:59.123456+00'::timestamptz, 'todo', 0) $$,
  'a job arrives with the attributes it was deferred with');
select results_eq(
  $$ select queue_name::text, priority, lock, queueing_lock, args, scheduled_at from procrastinate_jobs where task_name = 'bare' $$,
  $$ values ('policy_queue', 0, null::text, null::text, '{}'::jsonb, null::timestamptz) $$,
  'what was not given is procrastinate''s default, but for the policy''s queue');
select is(pg_temp.events('full'), '{scheduled,deferred}', 'procrastinate keeps its own events of it');

-- What procrastinate refuses.
do $$
begin
  delete from procrastinate_jobs;
  alter table procrastinate_jobs add constraint no_poison check (not args ? 'poison');
  perform pg_temp.define('poison', '{"gates": [{"type": "throttle", "rate": 1000, "per": 1000}, {"type": "concurrency", "max": 1000}]}');
  perform dispatch_stage_many('poison', (
    select jsonb_agg(jsonb_build_object('task_name', 'p' || i, 'args', case when i in (1, 2, 40, 77, 100) then '{"poison": true}' else '{}' end::jsonb))
    from generate_series(1, 100) as i));
end;
$$;
create temporary table poisoned as select * from dispatch_tick('poison');
select is((select array[jobs_admitted, handoff_failures] from poisoned), '{95,5}', 'bad jobs cost their neighbours nothing');
select is(
  (select array_agg(task_name::text order by id) from procrastinate_jobs),
  (select array_agg('p' || i order by i) from generate_series(1, 100) as i where i not in (1, 2, 40, 77, 100)),
  'the neighbours arrive in order');
select set_eq(
  $$ select task_name, error from dispatch_dead_jobs where policy_name = 'poison' $$,
  $$ select 'p' || i as task_name, 'new row for relation "procrastinate_jobs" violates check constraint "no_poison" (SQLSTATE 23514)' as error from unnest(array[1, 2, 40, 77, 100]) as i $$,
  'each bad job is set aside with its error');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'poison'), 0::bigint, 'none of them is staged any longer');
select is(
  (select gate_state -> 'throttle' ->> 'tokens' from dispatch_partitions where policy_name = 'poison')::numeric, 905::numeric,
  'none of them has paid a token');
select is((select count(*) from dispatch_inflight_jobs where policy_name = 'poison'), 95::bigint, 'or holds a slot');
do $$
begin
  perform dispatch_fold('poison', dispatch_now());
end;
$$;
select is((select array[pending_count, in_flight_count] from dispatch_partitions where policy_name = 'poison'), '{0,95}', 'the counters say the same');
select is((select array[jobs_admitted, handoff_failures] from dispatch_tick('poison')), '{0,0}', 'no later tick tries them again');
do $$
begin
  perform pg_temp.stage('poison', 'alone', '{"args": {"poison": true}}');
  perform dispatch_tick('poison');
  perform pg_temp.stage('poison', 'later');
end;
$$;
select is((select array[jobs_admitted, handoff_failures] from dispatch_tick('poison')), '{1,0}', 'a partition whose only job was bad goes on with the next');

-- What says nothing of a job.
create function pg_temp.fail() returns trigger language plpgsql as $$ begin raise exception 'not now' using errcode = tg_argv[0]; end $$;
do $$
begin
  perform pg_temp.define('weather');
  perform pg_temp.stage('weather', 'w1');
  create trigger weather before insert on procrastinate_jobs for each row execute function pg_temp.fail('53100');
end;
$$;
select throws_ok($$ select dispatch_tick('weather') $$, '53100', 'not now', 'a full disk is no fault of a job''s: the tick fails');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'weather'), 1::bigint, 'and the job stays staged');
do $$
begin
  drop trigger weather on procrastinate_jobs;
  create trigger weather before insert on procrastinate_jobs for each row execute function pg_temp.fail('P0001');
end;
$$;
select is((select handoff_failures from dispatch_tick('weather')), 1, 'a refusal by a user''s own trigger is about the job');
do $$
begin
  drop trigger weather on procrastinate_jobs;
end;
$$;

-- A held queueing lock.
do $$
begin
  delete from procrastinate_jobs;
  perform pg_temp.define('queueing', '{"gates": [{"type": "throttle", "rate": 9, "per": 60}]}');
  perform pg_temp.stage('queueing', 'before');
  perform pg_temp.stage('queueing', 'held', '{"queueing_lock": "Q2"}');
  perform pg_temp.stage('queueing', 'after');
  perform pg_temp.stage('queueing', 'far', jsonb_build_object('scheduled_at', pg_temp.clock(5000)));
  perform pg_temp.defer('stranger', null, 'Q2');
end;
$$;
select is((select array[jobs_admitted, handoff_failures] from dispatch_tick('queueing')), '{2,0}', 'a job whose queueing lock is held waits, its neighbours go');
select is((pg_temp.waiting('held')).eligible_at, dispatch_now() + interval '1 second', 'it is tried again after queueing_lock_backoff');
select is((select due_at from dispatch_partitions where policy_name = 'queueing'), dispatch_now() + interval '1 second', 'and not in a hot loop before');
select is(
  (select gate_state -> 'throttle' ->> 'tokens' from dispatch_partitions where policy_name = 'queueing')::numeric, 7::numeric, 'it has paid nothing');
do $$
begin
  perform dispatch_set('queueing_lock_backoff', 7);
  perform pg_temp.at(1);
end;
$$;
select is((select array[partitions_seen, jobs_admitted, handoff_failures] from dispatch_tick('queueing')), '{1,0,0}', 'while the lock is held, it goes on waiting');
select is((pg_temp.waiting('held')).eligible_at, pg_temp.clock(8), 'as long as the setting says');
do $$
begin
  perform pg_temp.start('stranger');
  perform pg_temp.at(8);
end;
$$;
select is((select jobs_admitted from dispatch_tick('queueing')), 1, 'it gets its turn once the holder has started');
select is((pg_temp.job('held')).queueing_lock, 'Q2', 'with its queueing lock');

-- A retry waits in the policy again; procrastinate's row is parked.
do $$
begin
  delete from procrastinate_jobs;
  perform pg_temp.define('retries', '{"gates": [{"type": "concurrency", "max": 5}, {"type": "throttle", "rate": 100, "per": 100}]}');
  perform pg_temp.stage('retries', 'job', '{"context": {"k": "a", "plan": "gold"}, "args": {"x": 1}, "queue_name": "q", "priority": 4, "lock": "L", "queueing_lock": "Q",
    "scheduled_at": "2025-06-01T00:00:00+00:00"}');
end;
$$;
create temporary table origin as select * from dispatch_staged_jobs where task_name = 'job';
do $$
begin
  perform dispatch_tick('retries');
end;
$$;
create temporary table admitted as select * from pg_temp.job('job');
do $$
begin
  perform pg_temp.start('job');
  perform pg_temp.at(10);
  perform procrastinate_retry_job_v2((pg_temp.job('job')).id, pg_temp.clock(60), null, null, null);
end;
$$;
select results_eq(
  $$ select id, status::text, attempts, scheduled_at, priority, lock, queueing_lock, queue_name, args from pg_temp.job('job') $$,
  $$ select id, 'todo', 1, dispatch_parked_until(), -2147483648, null::text, null::text, queue_name, args from admitted $$,
  'a retried job''s row is parked: far schedule, lowest priority, no locks; its id and attempts are kept');
select results_eq(
  $$ select id, partition_id, eligible_at, staged_at, scheduled_at, job_id, priority, attempts, task_name, queue_name, lock, queueing_lock, args, context
     from dispatch_staged_jobs where policy_name = 'retries' $$,
  $$ select o.id, o.partition_id, pg_temp.clock(60), o.staged_at, pg_temp.clock(60), a.id, 4, 1, o.task_name, 'q', 'L', 'Q', o.args, o.context
     from origin as o cross join admitted as a $$,
  'it is staged again under the id that defer returned, not before its retry time, with all its attributes');
select is(pg_temp.fetch(), null, 'no worker gets it meanwhile');
select is(pg_temp.events('job'), '{scheduled,deferred,started,deferred_for_retry}', 'its events are kept');
select is((select count(*) from procrastinate_events where at = dispatch_parked_until()), 0::bigint, 'and the far schedule is not among them');
select is((select count(*) from dispatch_inflight_jobs where policy_name = 'retries'), 0::bigint, 'its slot is free');
do $$
begin
  perform dispatch_fold('retries', dispatch_now());
end;
$$;
select results_eq(
  $$ select pending_count, in_flight_count, due_at, context from dispatch_partitions where policy_name = 'retries' $$,
  $$ select 1::bigint, 0, pg_temp.clock(60), context from origin $$, 'its partition counts it as pending and is due at the retry time');
select results_eq(
  $$ select state, job_id, attempts from dispatch_job((select id from origin)) $$, $$ select 'staged', id, 1 from admitted $$, 'dispatch_job shows it as staged');

-- It stands in nobody's way.
do $$
begin
  perform pg_temp.defer('same_lock', 'L');
  perform pg_temp.defer('same_queueing_lock', null, 'Q');
end;
$$;
select is(pg_temp.fetch(), 'same_lock', 'a parked job keeps no other from its lock');
select is(pg_temp.fetch(), 'same_queueing_lock', 'nor from its queueing lock');

-- Admission brings it back.
do $$
begin
  perform pg_temp.at(59);
end;
$$;
select is((select jobs_admitted from dispatch_tick('retries')), 0, 'a retry is not admitted before its time');
do $$
begin
  perform pg_temp.at(60);
end;
$$;
select is((select array[jobs_admitted, handoff_failures] from dispatch_tick('retries')), '{1,0}', 'it is admitted through the gates like any other');
select results_eq(
  $$ select id, status::text, attempts, scheduled_at, priority, lock, queueing_lock, queue_name, args from pg_temp.job('job') $$,
  $$ select id, 'todo', 1, pg_temp.clock(60), 4, 'L', 'Q', queue_name, args from admitted $$,
  'then its row is itself again: retry time, priority and locks');
select is((select count(*) from procrastinate_jobs where task_name = 'job'), 1::bigint, 'it is the only row');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'retries'), 0::bigint, 'and staged no longer');
select results_eq(
  $$ select slot.staged_id, slot.job_id, slot.admitted_at from dispatch_inflight_jobs as slot where slot.policy_name = 'retries' $$,
  $$ select o.id, a.id, pg_temp.clock(60) from origin as o cross join admitted as a $$, 'it holds a slot again');
select is((select array[pending_count, in_flight_count, total_admitted] from dispatch_partitions where policy_name = 'retries'), '{0,1,2}', 'the counters say so');
select is(
  (select gate_state -> 'throttle' ->> 'tokens' from dispatch_partitions where policy_name = 'retries')::numeric, 99::numeric, 'it has paid again');
select is((select array_agg(admitted_at) from dispatch_admissions where policy_name = 'retries'), array[pg_temp.clock(60)], 'its admission is the newest');
select is(pg_temp.events('job'), '{scheduled,deferred,started,deferred_for_retry,scheduled}', 'procrastinate notes the retry''s schedule when it is back');

-- The first version of the retry function, at once, with other attributes.
do $$
begin
  delete from procrastinate_jobs where task_name <> 'job';
  perform pg_temp.start('job');
  perform procrastinate_retry_job_v1((pg_temp.job('job')).id, null, 9, 'other', 'M');
end;
$$;
select results_eq(
  $$ select eligible_at, scheduled_at, priority, queue_name, lock, queueing_lock, attempts from pg_temp.waiting('job') $$,
  $$ values ('-infinity'::timestamptz, null::timestamptz, 9, 'other', 'M', 'Q', 2) $$,
  'a retry may change queue, priority and lock, by the older function too; without a time it may go at once');
select is((pg_temp.job('job')).lock, null, 'the new lock is parked as well');
do $$
begin
  perform dispatch_tick('retries');
end;
$$;
select results_eq(
  $$ select queue_name::text, priority, lock, queueing_lock, attempts, scheduled_at from pg_temp.job('job') $$,
  $$ values ('other', 9, 'M', 'Q', 2, null::timestamptz) $$, 'it comes back as the retry changed it');

-- A newer job holds the queueing lock.
do $$
begin
  perform pg_temp.start('job');
  perform procrastinate_retry_job_v2((pg_temp.job('job')).id, null, null, null, null);
  perform pg_temp.stage('retries', 'newer', '{"context": {"k": "a"}, "queueing_lock": "Q"}');
  perform pg_temp.stage('retries', 'neighbour', '{"context": {"k": "a"}}');
end;
$$;
select is((select array[jobs_admitted, handoff_failures] from dispatch_tick('retries')), '{2,0}', 'a queueing lock that a newer job takes delays only the retry');
select is((pg_temp.waiting('job')).job_id, (select id from admitted), 'which goes on waiting');
select is((pg_temp.job('job')).scheduled_at, dispatch_parked_until(), 'parked');
do $$
begin
  perform pg_temp.start('newer');
  perform pg_temp.at(120);
end;
$$;
select is((select jobs_admitted from dispatch_tick('retries')), 1, 'it gets its turn when that one has started');
select is((pg_temp.job('job')).queueing_lock, 'Q', 'and has its queueing lock back');

-- Two retries with one queueing lock.
do $$
begin
  perform pg_temp.start('job');
  perform procrastinate_retry_job_v2(id, null, null, null, null) from procrastinate_jobs where task_name in ('job', 'newer');
end;
$$;
select is((select array[jobs_admitted, handoff_failures] from dispatch_tick('retries')), '{1,0}', 'of two retries with one queueing lock one goes first');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'retries'), 1::bigint, 'and the other waits');

-- A retry that cannot come back.
do $$
begin
  perform dispatch_tick('retries');
  perform pg_temp.define('stuck');
  perform pg_temp.stage('stuck', 'refused', '{"lock": "R"}');
  perform pg_temp.stage('stuck', 'fine');
  perform dispatch_tick('stuck');
  perform pg_temp.start('refused'), pg_temp.start('fine');
  perform procrastinate_retry_job_v2(id, null, null, null, null) from procrastinate_jobs where task_name in ('refused', 'fine');
  alter table procrastinate_jobs add constraint no_lock check (lock <> 'R') not valid;
end;
$$;
select is((select array[jobs_admitted, handoff_failures] from dispatch_tick('stuck')), '{1,1}', 'a retry that procrastinate''s table refuses costs its neighbours nothing');
select results_eq(
  $$ select job_id, attempts, lock, error from dispatch_dead_jobs where task_name = 'refused' $$,
  $$ select id, 1, 'R', 'new row for relation "procrastinate_jobs" violates check constraint "no_lock" (SQLSTATE 23514)' from pg_temp.job('refused') $$,
  'it is set aside with the error');
select is((pg_temp.job('refused')).scheduled_at, dispatch_parked_until(), 'its row stays parked');
select is((select count(*) from dispatch_inflight_jobs where policy_name = 'stuck'), 1::bigint, 'and holds no slot');
do $$
begin
  alter table procrastinate_jobs drop constraint no_lock;
  perform dispatch_requeue_dead(id) from dispatch_dead_jobs where task_name = 'refused';
end;
$$;
select is((select array[jobs_admitted, handoff_failures] from dispatch_tick('stuck')), '{1,0}', 'requeued, it comes back');
select is((pg_temp.job('refused')).lock, 'R', 'as it was');

-- A manual retry of a failed job.
do $$
begin
  perform pg_temp.define('manual', '{"gates": [{"type": "concurrency", "max": 1}]}');
  perform pg_temp.stage('manual', 'failing', '{"lock": "F"}');
  perform dispatch_tick('manual');
  perform pg_temp.start('failing');
  perform procrastinate_finish_job_v1((pg_temp.job('failing')).id, 'failed', false);
end;
$$;
select is((select count(*) from dispatch_inflight_jobs where policy_name = 'manual'), 0::bigint, 'a failed job holds no slot');
do $$
begin
  perform procrastinate_retry_job_v2((pg_temp.job('failing')).id, pg_temp.clock(130), null, null, null);
end;
$$;
select results_eq(
  $$ select job_id, eligible_at, attempts, lock from pg_temp.waiting('failing') $$,
  $$ select id, pg_temp.clock(130), 2, 'F' from pg_temp.job('failing') $$, 'a failed job that is retried by hand waits in its policy');
select is((pg_temp.job('failing')).scheduled_at, dispatch_parked_until(), 'parked');
select is(pg_temp.events('failing'), '{deferred,started,failed,retried}', 'with its events');
do $$
begin
  perform pg_temp.at(130);
  perform dispatch_tick('manual');
end;
$$;
select is((select in_flight_count from dispatch_partitions where policy_name = 'manual'), 1, 'and is admitted through the gates');
select is((pg_temp.job('failing')).lock, 'F', 'as it was');

-- An abort during a retry.
do $$
begin
  perform pg_temp.start('failing');
  perform procrastinate_cancel_job_v1((pg_temp.job('failing')).id, true, false);
  perform procrastinate_retry_job_v2((pg_temp.job('failing')).id, null, null, null, null);
end;
$$;
select is((pg_temp.job('failing')).status::text, 'failed', 'procrastinate fails a job that is to be aborted and asks for a retry');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'manual'), 0::bigint, 'such a job is not staged again');
select is((select count(*) from dispatch_inflight_jobs where policy_name = 'manual'), 0::bigint, 'and its slot is free');

-- retry_strategy bypass.
do $$
begin
  perform pg_temp.define('bypass', '{"retry_strategy": "bypass", "gates": [{"type": "concurrency", "max": 1}]}');
  perform pg_temp.stage('bypass', 'passing', '{"priority": 3, "lock": "B", "queueing_lock": "BQ"}');
  perform dispatch_tick('bypass');
  perform pg_temp.start('passing');
  perform procrastinate_retry_job_v2((pg_temp.job('passing')).id, pg_temp.clock(300), null, null, null);
end;
$$;
select results_eq(
  $$ select status::text, attempts, scheduled_at, priority, lock, queueing_lock from pg_temp.job('passing') $$,
  $$ values ('todo', 1, pg_temp.clock(300), 3, 'B', 'BQ') $$, 'with retry_strategy bypass procrastinate runs a retry as scheduled');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'bypass'), 0::bigint, 'it does not wait in the policy');
select is((select count(*) from dispatch_inflight_jobs where policy_name = 'bypass'), 1::bigint, 'and counts as in flight');
select is(pg_temp.events('passing'), '{deferred,started,scheduled,deferred_for_retry}', 'its events are procrastinate''s');
do $$
begin
  perform pg_temp.start('passing');
  perform procrastinate_finish_job_v1((pg_temp.job('passing')).id, 'failed', false);
  perform dispatch_fold('bypass', dispatch_now());
end;
$$;
select is((select in_flight_count from dispatch_partitions where policy_name = 'bypass'), 0, 'when it has failed for good its slot is free');
do $$
begin
  perform procrastinate_retry_job_v2((pg_temp.job('passing')).id, null, null, null, null);
  perform pg_temp.stage('bypass', 'behind');
end;
$$;
select is((pg_temp.job('passing')).scheduled_at, null, 'a manual retry bypasses the policy too');
select is((select denied_reasons from dispatch_tick('bypass')), '{"concurrency_full": 1}', 'but takes a slot that counts against the gate');
select is((select in_flight_count from dispatch_partitions where policy_name = 'bypass'), 1, 'once');
do $$
begin
  perform pg_temp.start('passing');
  perform procrastinate_finish_job_v1((pg_temp.job('passing')).id, 'succeeded', false);
end;
$$;
select is((select jobs_admitted from dispatch_tick('bypass')), 1, 'and gives it back');

-- Jobs that are no policy's.
do $$
begin
  perform pg_temp.defer('foreign', 'FL', 'FQ');
  perform pg_temp.start('foreign');
  perform procrastinate_retry_job_v2((pg_temp.job('foreign')).id, pg_temp.clock(500), null, null, null);
end;
$$;
select results_eq(
  $$ select status::text, scheduled_at, lock, queueing_lock from pg_temp.job('foreign') $$,
  $$ values ('todo', pg_temp.clock(500), 'FL', 'FQ') $$, 'a job that no policy admitted is retried by procrastinate alone');
do $$
begin
  perform pg_temp.define('dropped');
  perform pg_temp.stage('dropped', 'survivor');
  perform dispatch_tick('dropped');
  perform pg_temp.start('survivor');
  perform dispatch_drop_policy('dropped');
  perform procrastinate_retry_job_v2((pg_temp.job('survivor')).id, pg_temp.clock(500), null, null, null);
end;
$$;
select is((pg_temp.job('survivor')).scheduled_at, pg_temp.clock(500), 'so is one whose policy was dropped');

-- A retry that its policy gives up.
do $$
begin
  perform pg_temp.define('given_up');
  perform pg_temp.stage('given_up', 'parked', '{"lock": "G"}');
  perform dispatch_tick('given_up');
  perform pg_temp.start('parked');
  perform procrastinate_retry_job_v2((pg_temp.job('parked')).id, null, null, null, null);
  perform dispatch_drop_policy('given_up', true);
end;
$$;
select results_eq(
  $$ select job_id, attempts, lock, error from dispatch_dead_jobs where task_name = 'parked' $$,
  $$ select id, 1, 'G', 'policy dropped' from pg_temp.job('parked') $$, 'a parked retry of a policy that is dropped by force is dead, with its row');
do $$
begin
  perform dispatch_discard_dead(id) from dispatch_dead_jobs where task_name = 'parked';
end;
$$;
select is((pg_temp.job('parked')).status::text, 'cancelled', 'discarding it cancels that row');

-- Lag: from the admission to the first start after it.
do $$
begin
  perform pg_temp.define('lag', '{"gates": [{"type": "adaptive_concurrency", "initial_max": 3, "target_lag_ms": 1000}]}');
  perform pg_temp.at(1000);
  perform pg_temp.stage('lag', 'timed');
  perform dispatch_tick('lag');
  perform pg_temp.start('timed');
  update procrastinate_events set at = pg_temp.clock(1000.25) where job_id = (pg_temp.job('timed')).id and type = 'started';
  perform pg_temp.at(1009);
  perform procrastinate_retry_job_v2((pg_temp.job('timed')).id, null, null, null, null);
end;
$$;
select results_eq(
  $$ select succeeded, lag_ms from dispatch_inbox where policy_name = 'lag' and kind = 'finished' $$,
  $$ values (false, 250::double precision) $$, 'a try that is retried is an observation: it failed, and its lag was the time from admission to start');
do $$
begin
  perform dispatch_tick('lag');
  perform pg_temp.start('timed');
  insert into procrastinate_events (job_id, type, at) select (pg_temp.job('timed')).id, 'started', pg_temp.clock(s) from unnest(array[1010, 1012]) as s;
  perform pg_temp.at(1020);
  perform procrastinate_finish_job_v1((pg_temp.job('timed')).id, 'succeeded', false);
end;
$$;
select results_eq(
  $$ select succeeded, lag_ms from dispatch_inbox where policy_name = 'lag' and kind = 'finished' $$,
  $$ values (true, 1000::double precision) $$, 'the next try''s lag is from its own admission to the first start after that');
do $$
begin
  perform dispatch_fold('lag', dispatch_now());
  perform pg_temp.stage('lag', 'unstarted');
  perform dispatch_tick('lag');
  perform procrastinate_cancel_job_v1((pg_temp.job('unstarted')).id, false, false);
end;
$$;
select results_eq(
  $$ select jobs, succeeded, lag_ms from dispatch_inbox where policy_name = 'lag' and kind = 'finished' $$,
  $$ values (-1, null::boolean, null::double precision) $$, 'a job that never started frees its slot and is no observation');
select results_eq(
  $$ select current_max, ewma_lag_ms, sample_count from dispatch_adaptive_stats $$,
  $$ values (2, 562.5::double precision, 2::bigint) $$, 'the gate has learned from the two tries and from nothing else');

-- A parked row is nobody's to run, but a hand may do so.
do $$
begin
  perform dispatch_define_policy('by_hand', '{}');
  perform pg_temp.stage('by_hand', 'run by hand');
  perform dispatch_tick('by_hand');
  perform pg_temp.start('run by hand');
  perform procrastinate_retry_job_v2((pg_temp.job('run by hand')).id, null, null, null, null);
  perform pg_temp.start('run by hand');
  perform procrastinate_finish_job_v1((pg_temp.job('run by hand')).id, 'succeeded', false);
  perform dispatch_fold('by_hand', dispatch_now());
end;
$$;
select results_eq(
  $$ select p.pending_count, p.in_flight_count, s.id from dispatch_partitions as p left join dispatch_staged_jobs as s on s.partition_id = p.id where p.policy_name = 'by_hand' $$,
  $$ values (0::bigint, 0, null::bigint) $$, 'a parked retry that somebody ran by hand waits no longer once it has ended');

select * from finish();
rollback;
