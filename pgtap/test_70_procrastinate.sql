-- procrastinate: what it is given, what it refuses, and jobs that come back for a retry.
begin;
select plan(206);

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
  (select array_agg(task_name::text order by priority desc, id) from procrastinate_jobs),
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
  $$ select id, partition_id, eligible_at, staged_at, scheduled_at, parked, priority, attempts, task_name, queue_name, lock, queueing_lock, args, context
     from dispatch_staged_jobs where policy_name = 'retries' $$,
  $$ select o.id, o.partition_id, pg_temp.clock(60), o.staged_at, pg_temp.clock(60), true, 4, 1, o.task_name, 'q', 'L', 'Q', o.args, o.context
     from origin as o join admitted as a on a.id = o.id $$,
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
  $$ select slot.job_id, slot.admitted_at from dispatch_inflight_jobs as slot where slot.policy_name = 'retries' $$,
  $$ select o.id, pg_temp.clock(60) from origin as o join admitted as a on a.id = o.id $$, 'it holds a slot again');
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
select is((select array[id::text, parked::text] from pg_temp.waiting('job')), (select array[id::text, 'true'] from admitted), 'which goes on waiting');
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
  $$ select id, parked, attempts, lock, error from dispatch_dead_jobs where task_name = 'refused' $$,
  $$ select id, true, 1, 'R', 'new row for relation "procrastinate_jobs" violates check constraint "no_lock" (SQLSTATE 23514)' from pg_temp.job('refused') $$,
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
  $$ select id, parked, eligible_at, attempts, lock from pg_temp.waiting('failing') $$,
  $$ select id, true, pg_temp.clock(130), 2, 'F' from pg_temp.job('failing') $$, 'a failed job that is retried by hand waits in its policy');
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
  $$ select id, parked, attempts, lock, error from dispatch_dead_jobs where task_name = 'parked' $$,
  $$ select id, true, 1, 'G', 'policy dropped' from pg_temp.job('parked') $$, 'a parked retry of a policy that is dropped by force is dead, with its row');
do $$
begin
  perform dispatch_discard_dead(id) from dispatch_dead_jobs where task_name = 'parked';
end;
$$;
select is((pg_temp.job('parked')).status::text, 'cancelled', 'discarding it cancels that row');

-- A retry that a hand ran while it was parked, and that comes back.
do $$
declare
  v_id bigint;
begin
  perform pg_temp.define('hand_run');
  v_id := pg_temp.stage('hand_run', 'run and retried', '{"priority": 3, "lock": "HL", "queueing_lock": "HQ"}');
  perform dispatch_tick('hand_run');
  perform pg_temp.start('run and retried');
  perform procrastinate_retry_job_v2(v_id, null, null, null, null);
  perform pg_temp.start('run and retried');
  perform procrastinate_retry_job_v2(v_id, pg_temp.clock(900), null, null, null);
  perform dispatch_fold('hand_run', dispatch_now());
end;
$$;
select results_eq(
  $$ select priority, lock, queueing_lock, eligible_at, attempts from pg_temp.waiting('run and retried') $$,
  $$ values (3, 'HL', 'HQ', pg_temp.clock(900), 2) $$, 'a parked retry that a hand ran and that is retried again is what it was');
select is((select array[pending_count, in_flight_count] from dispatch_partitions where policy_name = 'hand_run'), '{1,0}', 'and waits once');

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

-- One id, and what is written under it.
do $$
begin
  delete from procrastinate_jobs;
  perform pg_temp.at(5000);
  perform dispatch_define_policy('one_id', '{}');
  perform pg_temp.stage('one_id', 'new'), pg_temp.stage('one_id', 'again', '{"priority": 2, "lock": "OL", "queueing_lock": "OQ"}');
  perform dispatch_tick('one_id');
  perform pg_temp.start('again');
  perform procrastinate_retry_job_v2((pg_temp.job('again')).id, pg_temp.clock(5000), null, null, null);
  perform pg_temp.stage('one_id', 'newer');
end;
$$;
create temporary table to_queue as select id, task_name, parked, ctid as place from dispatch_staged_jobs where policy_name = 'one_id';
select is(
  (select dispatch_hand_over(array_agg(id), array_agg(place), true, pg_temp.clock(5001)) from to_queue), '{}', 'new jobs and parked ones are handed over');
select results_eq(
  $$ select job.id, job.task_name::text, job.status::text, job.attempts, job.priority, job.lock, job.queueing_lock, job.scheduled_at
     from procrastinate_jobs as job join to_queue using (id) order by 1 $$,
  $$ select id, task_name, 'todo', attempts, priority, lock, queueing_lock, scheduled_at
     from (values ('again', 1, 2, 'OL', 'OQ', pg_temp.clock(5000)), ('newer', 0, 0, null, null, null)) as expected (task_name, attempts, priority, lock, queueing_lock, scheduled_at)
     join to_queue using (task_name) order by 1 $$,
  'each is queued under the id that it was staged with, as it was staged');
select is_empty('select from dispatch_staged_jobs where id in (select id from to_queue)', 'neither is staged any more');
select results_eq(
  $$ select job_id, observed, admitted_at from dispatch_inflight_jobs where job_id in (select id from to_queue) order by 1 $$,
  $$ select id, true, pg_temp.clock(5001) from to_queue order by 1 $$, 'each has a slot');
select results_eq(
  $$ select job_id, admitted_at, ending from dispatch_admissions where job_id in (select id from to_queue) order by 1 $$,
  $$ select id, pg_temp.clock(5001), null::text from to_queue order by 1 $$, 'and an admission, once');
select is(pg_temp.events('newer'), '{deferred}', 'procrastinate has its event of the new one');
select is(pg_temp.events('again'), '{deferred,started,deferred_for_retry,scheduled}', 'and of the parked one that of its schedule');
select is((select array_agg(at) from procrastinate_events where job_id = (pg_temp.job('again')).id and type = 'scheduled'), array[pg_temp.clock(5000)],
  'which is the retry''s and none of parking''s');
select throws_ok('select dispatch_hand_over(array_agg(id), array_agg(place), false, dispatch_now()) from to_queue', 'PD008', null,
  'what is not staged any more is not handed over');
select is(dispatch_hand_over('{}', '{}', false, dispatch_now()), '{}', 'nor is nothing');
select is(
  dispatch_inserted(7)::jsonb, '{"type": "job_inserted", "job_id": 7}', 'of a parked job that comes back workers are told as of one that procrastinate inserts');

-- Bad jobs among many, each for a reason of its own.
do $$
begin
  delete from procrastinate_jobs;
  perform dispatch_define_policy('bad', '{"admission_batch_size": 1000, "gates": [{"type": "throttle", "rate": 1000, "per": 1000}]}');
end;
$$;
create function pg_temp.choosy()
returns trigger
language plpgsql
as $$
begin
  assert new.task_name not like '%assert%', 'it should not be';
  if new.task_name like '%raise%' then
    raise exception 'no %', new.task_name using errcode = coalesce(new.args ->> 'sqlstate', 'P0001');
  end if;
  return new;
end;
$$;
create trigger choosy before insert or update on procrastinate_jobs for each row execute function pg_temp.choosy();
do $$
begin
  perform dispatch_stage_many('bad', (
    select jsonb_agg(jsonb_build_object('task_name', case when i % 100 = 7 then 'raise' when i % 100 = 13 then 'assert' when i = 150 then 'check' else 'good' end || i,
      'args', case when i = 150 then '{"poison": 1}' else '{}' end::jsonb))
    from generate_series(1, 300) as i));
end;
$$;
select results_eq($$ select jobs_admitted, handoff_failures from dispatch_tick('bad') $$, $$ values (293, 7) $$, 'bad jobs of several kinds cost 293 good ones nothing');
select results_eq(
  $$ select task_name, error from dispatch_dead_jobs where policy_name = 'bad' order by id $$,
  $$ values ('raise7', 'no raise7 (SQLSTATE P0001)'), ('assert13', 'it should not be (SQLSTATE P0004)'), ('raise107', 'no raise107 (SQLSTATE P0001)'),
    ('assert113', 'it should not be (SQLSTATE P0004)'), ('check150', 'new row for relation "procrastinate_jobs" violates check constraint "no_poison" (SQLSTATE 23514)'),
    ('raise207', 'no raise207 (SQLSTATE P0001)'), ('assert213', 'it should not be (SQLSTATE P0004)') $$,
  'each is dead with what it met');
select is((select (gate_state -> 'throttle' ->> 'tokens')::numeric from dispatch_partitions where policy_name = 'bad'), 707::numeric, 'and has paid nothing');

create function pg_temp.alone(p_sqlstate text, p_name text default 'raise')
returns text
language plpgsql
as $$
declare
  v_result dispatch_tick_result;
begin
  perform pg_temp.stage('bad', p_name, jsonb_build_object('args', jsonb_build_object('sqlstate', p_sqlstate)));
  v_result := dispatch_tick('bad');
  return format('%s gone, %s dead, %s staged', v_result.jobs_admitted, v_result.handoff_failures,
    (select count(*) from dispatch_staged_jobs where policy_name = 'bad'));
end;
$$;
select is(pg_temp.alone(failure), '0 gone, 1 dead, 0 staged', 'a job that fails alone with ' || failure || ' is dead')
from unnest(array['P0001', '23514', '22003', '54000', '2F002']) as failure;
select is(pg_temp.alone('', 'assert'), '0 gone, 1 dead, 0 staged', 'so is one that fails alone with an assertion');
create function pg_temp.cleared() returns void language sql begin atomic select dispatch_cancel_job(id, false, true) from dispatch_staged_jobs where policy_name = 'bad'; end;
select is(pg_temp.alone('55P03'), '0 gone, 0 dead, 1 staged', 'a job in whose way somebody is waits, alone as it is');
do $$ begin perform pg_temp.cleared(); end; $$;
select throws_ok(format('select pg_temp.alone(%L)', failure), failure, 'no raise', 'a job that fails alone with ' || failure || ' says nothing of itself, so the tick fails')
from unnest(array['40001', '40P01', '42501', '42P01', '53100', '57P01', '58030', 'XX000', '08006', '25006']) as failure;
select is_empty($$ select from dispatch_staged_jobs where policy_name = 'bad' $$, 'and nothing of that stays');

-- What looks like nobody's fault is a job's, where others go.
create function pg_temp.beside(p_sqlstate text, p_bad integer, p_good integer)
returns text
language plpgsql
as $$
declare
  v_result dispatch_tick_result;
  v_text text;
begin
  perform pg_temp.stage('bad', case when i > p_good then 'raise' else 'good' end, jsonb_build_object('args', jsonb_build_object('sqlstate', p_sqlstate)))
  from generate_series(1, p_good + p_bad) as i;
  v_result := dispatch_tick('bad');
  v_text := format('%s gone, %s dead, %s staged', v_result.jobs_admitted, v_result.handoff_failures,
    (select count(*) from dispatch_staged_jobs where policy_name = 'bad'));
  perform pg_temp.cleared();
  return v_text;
end;
$$;
select is(pg_temp.beside(failure, 3, 1), '1 gone, 3 dead, 0 staged', 'jobs that fail with ' || failure || ' where another one goes are dead')
from unnest(array['42501', 'XX000', '53100', 'P0004', 'P0001']) as failure;
select is(pg_temp.beside(failure, 3, 1), '1 gone, 0 dead, 3 staged', 'jobs in whose way somebody is wait (' || failure || '), where another one goes')
from unnest(array['55P03', '40001', '40P01']) as failure;
select throws_ok(format('select pg_temp.beside(%L, %s, 0)', failure, jobs), failure, 'no raise', format('where %s jobs fail with %s and none goes, it is of none of them', jobs, failure))
from unnest(array['42501', 'XX000', '53100']) as failure cross join unnest(array[2, 9, 10, 30]) as jobs;
select is(pg_temp.beside(failure, 30, 0), '0 gone, 30 dead, 0 staged', 'where all fail with ' || failure || ', it is of each of them')
from unnest(array['P0001', '23514']) as failure;
do $$
begin
  delete from dispatch_dead_jobs;
  drop trigger choosy on procrastinate_jobs;
end;
$$;

-- A row-level policy on procrastinate's table, and rights that are missing.
create role "pgtap driver";
grant usage on schema public to "pgtap driver";
grant all on all tables in schema public to "pgtap driver";
grant all on all sequences in schema public to "pgtap driver";
alter table procrastinate_jobs enable row level security;
create policy see on procrastinate_jobs for select using (true);
create policy change on procrastinate_jobs for update using (true);
create policy put on procrastinate_jobs for insert with check (task_name not like 'refused%');
-- Stages jobs, ticks as the driver, and tells what became of them.
create function pg_temp.driven(p_names text[])
returns text
language plpgsql
as $$
declare
  v_result dispatch_tick_result;
  v_text text;
begin
  perform pg_temp.stage('bad', name) from unnest(p_names) as name;
  set local role "pgtap driver";
  v_result := dispatch_tick('bad');
  reset role;
  v_text := format('%s gone, %s dead, %s staged', v_result.jobs_admitted, v_result.handoff_failures,
    (select count(*) from dispatch_staged_jobs where policy_name = 'bad'));
  perform pg_temp.cleared();
  return v_text;
exception
  when others then
    return sqlstate || ' ' || sqlerrm;
end;
$$;
select is(pg_temp.driven('{fine}'), '1 gone, 0 dead, 0 staged', 'a driver that is not the owner hands off what row-level policies let pass');
select is(pg_temp.driven('{fine,refused,fine}'), '2 gone, 1 dead, 0 staged', 'one that they refuse is dead, and costs its neighbours nothing');
select is((select array_agg(error) from dispatch_dead_jobs where policy_name = 'bad'),
  array['new row violates row-level security policy for table "procrastinate_jobs" (SQLSTATE 42501)'], 'with what it met');
select is(pg_temp.driven('{refused}'), '0 gone, 1 dead, 0 staged', 'one that is refused alone is dead, too');
select is(pg_temp.driven('{fine}'), '1 gone, 0 dead, 0 staged', 'so that the next one goes');
select is(pg_temp.driven('{refused1,refused2,refused3}'), '42501 new row violates row-level security policy for table "procrastinate_jobs"',
  'where several are refused and none goes, that is raised: a right may be missing');
revoke insert on procrastinate_jobs from "pgtap driver";
delete from dispatch_dead_jobs;
select is(pg_temp.driven(names::text[]), '42501 permission denied for table procrastinate_jobs', 'where the right is missing altogether, that is raised of ' || names)
from (values ('{fine}'), ('{fine,fine}'), ('{refused}')) as tried (names);
alter table procrastinate_jobs disable row level security;
select is(pg_temp.driven('{fine}'), '42501 permission denied for table procrastinate_jobs', 'with row-level policies or without');
select is_empty('select from dispatch_dead_jobs', 'and nothing is buried');
do $$
begin
  drop policy see on procrastinate_jobs;
  drop policy change on procrastinate_jobs;
  drop policy put on procrastinate_jobs;
  drop owned by "pgtap driver";
  drop role "pgtap driver";
end;
$$;

-- Queueing locks: of a new job and a retry, and of jobs that procrastinate has.
do $$
begin
  delete from procrastinate_jobs;
  perform pg_temp.at(6000);
  perform pg_temp.define('rivals');
  perform pg_temp.stage('rivals', 'older', '{"queueing_lock": "R", "priority": 9}');
  perform dispatch_tick('rivals');
  perform pg_temp.start('older');
  perform procrastinate_retry_job_v2((pg_temp.job('older')).id, null, null, null, null);
  perform pg_temp.stage('rivals', 'younger', '{"queueing_lock": "R"}');
end;
$$;
select results_eq(
  $$ select jobs_admitted, handoff_failures from dispatch_tick('rivals') $$, $$ values (1, 0) $$, 'of a new job and a retry with one queueing lock one goes');
select is((select task_name from dispatch_staged_jobs where policy_name = 'rivals'), 'older', 'the new one, whatever their priorities');
select is((pg_temp.waiting('older')).eligible_at, pg_temp.clock(6000) + dispatch_setting_span('queueing_lock_backoff'), 'the retry waits a while');
select is((pg_temp.job('older')).scheduled_at, dispatch_parked_until(), 'parked');
do $$
begin
  perform pg_temp.stage('rivals', 'youngest', '{"queueing_lock": "R2"}');
  perform pg_temp.defer('foreigner', null, 'R2');
  perform pg_temp.stage('rivals', 'free' || i, jsonb_build_object('queueing_lock', 'free' || i)) from generate_series(1, 5) as i;
end;
$$;
select results_eq(
  $$ select jobs_admitted, handoff_failures from dispatch_tick('rivals') $$, $$ values (5, 0) $$, 'a queueing lock that a queued job of nobody''s holds holds one job, and none with another lock');
select is((select array_agg(task_name order by id) from dispatch_staged_jobs where policy_name = 'rivals'), '{older,youngest}', 'which waits');

-- A parked row in other hands.
create function pg_temp.far_events()
returns bigint
language sql
begin atomic
  select count(*) from procrastinate_events where at = dispatch_parked_until();
end;
create function pg_temp.park(p_name text, p_at timestamptz default null)
returns bigint
language plpgsql
as $$
begin
  perform pg_temp.stage('foreign_hands', p_name);
  perform dispatch_tick('foreign_hands');
  perform pg_temp.start(p_name);
  update procrastinate_jobs set worker_id = (select worker_id from procrastinate_register_worker_v1()) where id = (pg_temp.job(p_name)).id;
  perform procrastinate_retry_job_v2((pg_temp.job(p_name)).id, p_at, null, null, null);
  return (pg_temp.job(p_name)).id;
end;
$$;
do $$
begin
  delete from procrastinate_jobs;
  perform pg_temp.at(7000);
  perform pg_temp.define('foreign_hands', '{"gates": [{"type": "concurrency", "max": 1}]}');
  perform pg_temp.park('kept', pg_temp.clock(7100));
end;
$$;
select is((pg_temp.job('kept')).worker_id, null, 'a parked row has no worker');
do $$ begin delete from procrastinate_workers; end; $$;
select is(pg_temp.far_events(), 0::bigint, 'so when that one unregisters no event of the far schedule is written');
update procrastinate_jobs set args = '{"changed": 1}' where task_name = 'kept';
update procrastinate_jobs set queue_name = 'elsewhere' where task_name = 'kept';
select is((select scheduled_at from procrastinate_jobs where task_name = 'kept'), dispatch_parked_until(), 'whoever changes something else leaves it parked');
do $$ begin perform pg_temp.at(7100), dispatch_cancel((pg_temp.job('kept')).id); end; $$;
select is(pg_temp.far_events(), 0::bigint, 'cancelled, it leaves no event of parking, whatever was changed');
do $$ begin perform pg_temp.park('released'); update procrastinate_jobs set args = '{}' where task_name = 'released'; perform dispatch_tick('foreign_hands'); end; $$;
select is(format('%s, %s events', (pg_temp.job('released')).scheduled_at, pg_temp.far_events()), ', 0 events', 'nor does one that is released');
do $$ begin perform pg_temp.start('released'); perform procrastinate_finish_job_v1((pg_temp.job('released')).id, 'succeeded', false); end; $$;
do $$ begin perform pg_temp.park('deleted'); update procrastinate_jobs set args = '{}' where task_name = 'deleted'; delete from procrastinate_jobs where task_name = 'deleted'; end; $$;
select is(pg_temp.far_events(), 0::bigint, 'nor one that is deleted');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'foreign_hands'), 0::bigint, 'which waits no longer');
do $$ begin perform pg_temp.park('aborted'); update procrastinate_jobs set args = '{}' where task_name = 'aborted'; perform procrastinate_cancel_job_v1((pg_temp.job('aborted')).id, true, false); end; $$;
select is(format('%s, %s events', (pg_temp.job('aborted')).status, pg_temp.far_events()), 'cancelled, 0 events', 'nor one that is to be aborted');
do $$ begin perform pg_temp.park('finished'); update procrastinate_jobs set args = '{}' where task_name = 'finished'; perform procrastinate_finish_job_v1((pg_temp.job('finished')).id, 'failed', false); end; $$;
select is(format('%s, %s events', (pg_temp.job('finished')).status, pg_temp.far_events()), 'failed, 0 events', 'nor one that is ended while it waits');
do $$ begin perform pg_temp.park('run'); update procrastinate_jobs set args = '{}' where task_name = 'run'; perform pg_temp.start('run'); perform procrastinate_finish_job_v1((pg_temp.job('run')).id, 'succeeded', false); end; $$;
select is(format('%s, %s events', (pg_temp.job('run')).status, pg_temp.far_events()), 'succeeded, 0 events', 'nor one that somebody runs by hand');

-- A schedule that somebody gives to a parked row is the retry's.
create temporary table times (sentence text, at timestamptz);
insert into times values ('earlier', pg_temp.clock(7250)), ('later', pg_temp.clock(8000)), ('null', null), ('infinity', 'infinity');
do $$ begin perform pg_temp.at(7200), pg_temp.park('moved', pg_temp.clock(7500)), pg_temp.stage('foreign_hands', 'other'); end; $$;
do $$ begin perform dispatch_tick('foreign_hands'); end; $$;
create function pg_temp.move(p_at timestamptz)
returns text
language plpgsql
as $$
begin
  update procrastinate_jobs set scheduled_at = p_at where task_name = 'moved';
  perform dispatch_fold('foreign_hands', dispatch_now());
  return format('%s %s %s, parked %s',
    (select s.scheduled_at is not distinct from p_at from dispatch_staged_jobs as s where task_name = 'moved'),
    (select s.eligible_at is not distinct from coalesce(p_at, '-infinity') from dispatch_staged_jobs as s where task_name = 'moved'),
    (select count(*) from dispatch_staged_jobs where task_name = 'moved' and parked),
    (pg_temp.job('moved')).scheduled_at = dispatch_parked_until());
end;
$$;
select is(pg_temp.move(at), 't t 1, parked t', 'a parked row whose schedule becomes ' || sentence || ' stays parked, and waits for that in its policy') from times where sentence <> 'infinity';
select is((select status::text from procrastinate_jobs where task_name = 'other'), 'todo', 'the cap of one is taken by another job');
select is(pg_temp.fetch(), 'other', 'which is the only one that workers find');
select is(pg_temp.fetch(), null, 'so a cap of one never has two');
select is((select jobs_admitted from dispatch_tick('foreign_hands')), 0, 'nor do ticks');
do $$ begin perform procrastinate_finish_job_v1((pg_temp.job('other')).id, 'succeeded', false); end; $$;
select is((select jobs_admitted from dispatch_tick('foreign_hands')), 1, 'when that has ended the retry goes, as its new schedule says');
select is((pg_temp.job('moved')).scheduled_at, null, 'with that schedule');
select is(pg_temp.far_events(), 0::bigint, 'and no event of parking is left');
do $$ begin perform pg_temp.start('moved'); perform procrastinate_retry_job_v2((pg_temp.job('moved')).id, pg_temp.clock(7500), null, null, null), pg_temp.move(pg_temp.clock(7300)); end; $$;
select is((select due_at from dispatch_partitions where policy_name = 'foreign_hands'), pg_temp.clock(7300), 'a partition is due when the new schedule says, if that is earlier');
do $$ begin perform pg_temp.at(7300); end; $$;
select is((select jobs_admitted from dispatch_tick('foreign_hands')), 1, 'and is ticked then');

-- A retry by hand from whatever end.
create temporary table ends (status text, strategy text);
insert into ends select * from unnest(array['failed', 'succeeded', 'cancelled', 'aborted']) as status cross join unnest(array['restage', 'bypass']) as strategy;
create function pg_temp.by_hand(p_status text, p_strategy text)
returns text
language plpgsql
as $$
declare
  v_name constant text := p_status || ' ' || p_strategy;
  v_text text;
begin
  perform dispatch_define_policy(v_name, jsonb_build_object('retry_strategy', p_strategy, 'gates', '[{"type": "concurrency", "max": 1}]'::jsonb));
  perform pg_temp.stage(v_name, v_name);
  perform dispatch_tick(v_name);
  if p_status = 'cancelled' then
    perform procrastinate_cancel_job_v1((pg_temp.job(v_name)).id, false, false);
  else
    perform pg_temp.start(v_name);
    perform procrastinate_finish_job_v1((pg_temp.job(v_name)).id, p_status::procrastinate_job_status, false);
  end if;
  v_text := format('%s slots', (select count(*) from dispatch_inflight_jobs where policy_name = v_name));
  update procrastinate_jobs set status = 'todo' where task_name = v_name;
  v_text := format('%s, %s staged %s slots', v_text, (select count(*) from dispatch_staged_jobs where policy_name = v_name and parked),
    (select count(*) from dispatch_inflight_jobs where policy_name = v_name));
  perform pg_temp.stage(v_name, v_name || ' next');
  perform dispatch_tick(v_name);
  return format('%s, %s in flight, %s slots', v_text, (select in_flight_count from dispatch_partitions where policy_name = v_name),
    (select count(*) from dispatch_inflight_jobs where policy_name = v_name));
end;
$$;
select is(pg_temp.by_hand(status, strategy), '0 slots, ' || case strategy when 'restage' then '1 staged 0 slots' else '0 staged 1 slots' end || ', 1 in flight, 1 slots',
  format('a job that was %s and that a hand sets to todo goes back to its policy (%s), and a cap of one has one', status, strategy))
from ends;
select is(pg_temp.far_events(), 0::bigint, 'without an event of parking');
do $$
begin
  perform dispatch_define_policy('never', '{"gates": [{"type": "concurrency", "max": 1}]}');
  perform pg_temp.stage('never', 'never1');
  perform dispatch_cancel(id) from dispatch_staged_jobs where task_name = 'never1';
  update procrastinate_jobs set status = 'todo' where task_name = 'never1';
end;
$$;
select is((select array[parked::text, task_name] from dispatch_staged_jobs where policy_name = 'never'), '{true,never1}', 'also one that was cancelled before it was ever handed off');
select is((dispatch_job((pg_temp.job('never1')).id)).state, 'staged', 'of which dispatch_job says that it is staged');
do $$ begin perform dispatch_tick('never'); end; $$;
select results_eq(
  $$ select state, finished_at from dispatch_job((pg_temp.job('never1')).id) $$, $$ values ('queued', null::timestamptz) $$, 'and then queued');

-- A truncated queue, as tests of applications do it.
do $$
begin
  perform pg_temp.at(9000);
  perform dispatch_define_policy('emptied', '{"gates": [{"type": "concurrency", "max": 4}, {"type": "throttle", "rate": 1, "per": 1000, "burst": 9}]}');
  perform pg_temp.stage('emptied', 'e' || i) from generate_series(1, 6) as i;
  perform dispatch_tick('emptied');
  perform pg_temp.start('e1'), pg_temp.start('e2'), pg_temp.start('e3');
  perform procrastinate_finish_job_v1((pg_temp.job('e1')).id, 'succeeded', false);
  perform procrastinate_retry_job_v2((pg_temp.job('e2')).id, pg_temp.clock(9999), null, null, null);
  perform dispatch_bury(array(select id from dispatch_staged_jobs where task_name = 'e6'), '{no}', dispatch_now());
  insert into dispatch_dead_notes (id, partition_id, died_at, jobs, policy_name, kind, error)
  values (1, dispatch_partition_id('emptied', null), dispatch_now(), 1, 'emptied', 'staged', 'no');
  perform dispatch_pause('emptied', 'held');
  delete from dispatch_audit_log;
end;
$$;
create temporary table before as select * from dispatch_partitions where policy_name = 'emptied';
create temporary table staged_before as select count(*) as waiting, (select count(*) from dispatch_inflight_jobs) as in_flight, (select count(*) from dispatch_dead_jobs) as dead from dispatch_staged_jobs;
select lives_ok('truncate procrastinate_jobs restart identity cascade', 'procrastinate''s jobs can be truncated, with jobs in every state');
select is(
  (select array[(select count(*) from dispatch_staged_jobs), (select count(*) from dispatch_inflight_jobs), (select count(*) from dispatch_admissions),
    (select count(*) from dispatch_dead_jobs), (select count(*) from dispatch_inbox), (select count(*) from dispatch_dead_notes)]), '{0,0,0,0,0,0}', 'all that belongs to them goes with them');
select results_eq(
  $$ select pending_count, in_flight_count, due_at, waiting_since, blocked_until, blocked_reason from dispatch_partitions where policy_name = 'emptied' $$,
  $$ values (0::bigint, 0, null::timestamptz, null::timestamptz, null::timestamptz, null::text) $$, 'the partitions count none');
select results_eq(
  $$ select total_admitted, gate_state, decayed_admits, context from dispatch_partitions where policy_name = 'emptied' $$,
  'select total_admitted, gate_state, decayed_admits, context from before', 'but keep what was spent');
select is((select count(*) from dispatch_pauses where policy_name = 'emptied'), 1::bigint, 'pauses stay as well');
select results_eq(
  'select actor = session_user, action, outcome from dispatch_audit_log', $$ select true, 'truncate', to_jsonb(b) from staged_before as b $$, 'the audit log has how many were lost');
do $$ begin perform pg_temp.stage('emptied', 'f' || i, '{"context": {"plan": "new"}}') from generate_series(1, 6) as i; end; $$;
select is((select array_agg(id order by id) from dispatch_staged_jobs where policy_name = 'emptied'), '{1,2,3,4,5,6}', 'ids begin anew');
select results_eq($$ select jobs_admitted, handoff_failures from dispatch_tick('emptied') $$, $$ values (4, 0) $$, 'and jobs go as before');
select is((select context from dispatch_partitions where policy_name = 'emptied'), '{"plan": "new"}', 'with limits from the new jobs'' context, low as their ids are');
select is((select array_agg(id order by id) from procrastinate_jobs), '{1,2,3,4}', 'under them');
select is((select (gate_state -> 'throttle' ->> 'tokens')::numeric from dispatch_partitions where policy_name = 'emptied'),
  (select (gate_state -> 'throttle' ->> 'tokens')::numeric - 4 from before), 'paid for from the buckets as they were');
do $$
begin
  truncate procrastinate_jobs restart identity cascade;
  delete from dispatch_audit_log;
end;
$$;
select lives_ok('truncate procrastinate_jobs restart identity cascade', 'where nothing is, that can be truncated too');
select is((select count(*) from dispatch_audit_log), 0::bigint, 'and says nothing');

select * from finish();
rollback;
