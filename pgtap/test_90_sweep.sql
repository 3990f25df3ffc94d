-- The sweep: slots and counters set right, lost workers, orphans, and what is forgotten.
begin;
select plan(91);

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
  perform dispatch_define_policy(p_policy, '{"partition_by": "k", "gates": [{"type": "concurrency", "max": 2, "full_backoff": 9999}]}' || p_more);
end;
$$;

create function pg_temp.stage(p_policy text, p_name text, p_more jsonb default '{}')
returns void
language plpgsql
as $$
begin
  perform dispatch_stage_many(p_policy, jsonb_build_array(jsonb_build_object('task_name', p_name) || p_more));
end;
$$;

create function pg_temp.job(p_name text)
returns procrastinate_jobs
language sql
begin atomic
  select * from procrastinate_jobs where task_name = p_name order by id desc limit 1;
end;

create function pg_temp.worker(p_heartbeat timestamptz)
returns bigint
language sql
begin atomic
  insert into procrastinate_workers (last_heartbeat) values (p_heartbeat) returning id;
end;

create function pg_temp.start(p_name text, p_worker bigint)
returns void
language sql
begin atomic
  update procrastinate_jobs set status = 'doing', worker_id = p_worker where id = (pg_temp.job(p_name)).id and status = 'todo';
end;

create function pg_temp.has_slot(p_name text)
returns boolean
language sql
return exists (select from dispatch_inflight_jobs where job_id = (pg_temp.job(p_name)).id);

create function pg_temp.in_flight(p_policy text)
returns integer
language plpgsql
as $$
begin
  perform dispatch_fold(p_policy, dispatch_now());
  return (select sum(in_flight_count) from dispatch_partitions where policy_name = p_policy);
end;
$$;

create function pg_temp.swept(p_task text)
returns bigint
language sql
begin atomic
  select affected from dispatch_sweep() where task = p_task;
end;

select results_eq(
  'select * from dispatch_sweep()',
  $$ values ('slots of ended jobs', 0::bigint), ('slots of lost workers', 0), ('orphaned jobs', 0), ('counters set right', 0),
    ('idle partitions', 0), ('ticks counted', 0), ('tick samples', 0), ('policy samples', 0), ('admissions', 0), ('audit entries', 0),
    ('policies sampled', 0) $$,
  'with nothing to do the sweep says so, task by task');

-- A queued job keeps its slot, however long it queues.
do $$
begin
  perform pg_temp.define('queued');
  perform pg_temp.stage('queued', 'patient');
  perform dispatch_tick('queued');
  perform pg_temp.at(86400 * 30);
  perform dispatch_sweep();
end;
$$;
select ok(pg_temp.has_slot('patient'), 'a job that has queued for weeks keeps its slot');
select is(pg_temp.in_flight('queued'), 1, 'and counts as in flight');

-- A running job keeps its slot as long as its worker gives signs.
do $$
begin
  perform pg_temp.at(0);
  perform pg_temp.define('stale');
  perform pg_temp.stage('stale', 's' || i) from generate_series(1, 3) as i;
  perform dispatch_tick('stale');
  perform pg_temp.start('s1', pg_temp.worker(pg_temp.clock(0)));
  perform pg_temp.at(300);
  perform dispatch_sweep();
end;
$$;
select ok(pg_temp.has_slot('s1'), 'a heartbeat inflight_stale_after old is not too old');
do $$
begin
  update procrastinate_workers set last_heartbeat = pg_temp.clock(86400);
  perform pg_temp.at(86400 + 200);
  perform dispatch_sweep();
end;
$$;
select ok(pg_temp.has_slot('s1'), 'a running job with a live worker keeps its slot for a day');
do $$
begin
  perform pg_temp.at(86400 + 300.001);
end;
$$;
select is(pg_temp.swept('slots of lost workers'), 1::bigint, 'when the heartbeat is older than that, the worker is lost');
select ok(not pg_temp.has_slot('s1'), 'and its job''s slot is free');
select is((pg_temp.job('s1')).status::text, 'doing', 'the job itself is left as it is');
select is((select array[succeeded::text, lag_ms::text] from dispatch_inbox where policy_name = 'stale'), '{null,null}', 'a lost worker is no observation');
select is((select jobs_admitted from dispatch_tick('stale')), 1, 'the next job takes its place');
select is(pg_temp.swept('slots of lost workers'), 0::bigint, 'the next sweep does nothing more');
do $$
begin
  perform procrastinate_finish_job_v1((pg_temp.job('s1')).id, 'succeeded', false);
end;
$$;
select is(pg_temp.in_flight('stale'), 2, 'when the lost worker''s job ends after all, no second slot is freed');
do $$
begin
  perform dispatch_set('inflight_stale_after', 10);
  perform pg_temp.start('s2', pg_temp.worker(dispatch_now()));
  perform set_config('dispatch.fake_now', (dispatch_now() + interval '10.5 s')::text, true);
end;
$$;
select is(pg_temp.swept('slots of lost workers'), 1::bigint, 'how old is too old is a setting');
do $$
begin
  perform dispatch_set('inflight_stale_after', null);
end;
$$;

-- A worker that procrastinate has forgotten.
do $$
begin
  perform pg_temp.at(200000);
  perform pg_temp.define('forgotten');
  perform pg_temp.stage('forgotten', 'orphan');
  perform dispatch_tick('forgotten');
  perform pg_temp.start('orphan', pg_temp.worker(dispatch_now()));
  delete from procrastinate_workers where id = (pg_temp.job('orphan')).worker_id;
  perform pg_temp.at(200100);
  perform dispatch_sweep();
end;
$$;
select ok(pg_temp.has_slot('orphan'), 'a job whose worker is forgotten keeps its slot at first');
do $$
begin
  perform pg_temp.at(200400);
  perform dispatch_sweep();
end;
$$;
select ok(pg_temp.has_slot('orphan'), 'until inflight_stale_after has passed since a sweep missed the worker');
do $$
begin
  perform pg_temp.at(200400.001);
  perform dispatch_sweep();
end;
$$;
select ok(not pg_temp.has_slot('orphan'), 'then its slot is free');

-- A worker whose row is gone where no foreign key tells the job.
do $$
begin
  perform pg_temp.at(250000);
  alter table procrastinate_jobs drop constraint procrastinate_jobs_worker_id_fkey;
  perform pg_temp.define('unkeyed');
  perform pg_temp.stage('unkeyed', 'u' || i) from generate_series(1, 3) as i;
  perform dispatch_tick('unkeyed');
  perform pg_temp.start('u1', 987654321);
  perform pg_temp.start('u2', pg_temp.worker(pg_temp.clock(251000)));
  perform dispatch_sweep();
end;
$$;
select is((select orphaned_at from dispatch_inflight_jobs where job_id = (pg_temp.job('u1')).id), pg_temp.clock(250000), 'a job whose worker has no row is noted, though it names one');
select is((select orphaned_at from dispatch_inflight_jobs where job_id = (pg_temp.job('u2')).id), null, 'one whose worker has a row is not');
do $$ begin perform pg_temp.at(250300); end; $$;
select is(pg_temp.swept('slots of lost workers'), 0::bigint, 'it keeps its slot for inflight_stale_after');
select results_eq(
  $$ select job_id, worker_id, last_sign_at from dispatch_stalled_jobs where policy_name = 'unkeyed' $$, $$ select 0::bigint, 0::bigint, now() where false $$, 'till then it does not count as stalled');
do $$ begin perform pg_temp.at(250300.001); end; $$;
select results_eq(
  $$ select job_id, worker_id, last_sign_at from dispatch_stalled_jobs where policy_name = 'unkeyed' $$,
  $$ select id, 987654321::bigint, pg_temp.clock(250000) from pg_temp.job('u1') $$, 'then it does, since it was noted');
select is(pg_temp.swept('slots of lost workers'), 1::bigint, 'and gives its slot back');
select is(array[pg_temp.has_slot('u1'), pg_temp.has_slot('u2')], '{f,t}', 'it alone');
select is((select jobs_admitted from dispatch_tick('unkeyed')), 1, 'so that the next job goes');
do $$
begin
  delete from procrastinate_workers where id = (pg_temp.job('u2')).worker_id;
  perform pg_temp.at(251000);
  perform dispatch_sweep();
end;
$$;
select is((select orphaned_at from dispatch_inflight_jobs where job_id = (pg_temp.job('u2')).id), pg_temp.clock(251000), 'one whose worker''s row is deleted is noted as well');
do $$
begin
  delete from procrastinate_jobs where task_name in ('u1', 'u2', 'u3');
  update procrastinate_jobs as job set worker_id = null where not exists (select from procrastinate_workers as worker where worker.id = job.worker_id);
  alter table procrastinate_jobs add constraint procrastinate_jobs_worker_id_fkey foreign key (worker_id) references procrastinate_workers (id) on delete set null;
end;
$$;

-- stalled: retry.
do $$
begin
  perform pg_temp.at(300000);
  perform pg_temp.define('again', '{"stalled": "retry"}');
  perform pg_temp.stage('again', 'a' || i, '{"lock": "A"}') from generate_series(1, 1) as i;
  perform dispatch_tick('again');
  perform pg_temp.start('a1', pg_temp.worker(dispatch_now()));
  perform pg_temp.at(300300.5);
end;
$$;
select is(pg_temp.swept('slots of lost workers'), 1::bigint, 'where the policy says so, a lost worker''s job is retried');
select is((select array[id, attempts] from dispatch_staged_jobs where policy_name = 'again' and parked), (select array[id, 1] from pg_temp.job('a1')), 'it waits in the policy again');
select ok(not pg_temp.has_slot('a1'), 'without a slot');
select is(pg_temp.swept('slots of lost workers'), 0::bigint, 'and is retried once');
do $$
begin
  perform dispatch_tick('again');
  perform pg_temp.start('a1', pg_temp.worker(dispatch_now()));
  delete from dispatch_inflight_jobs where policy_name = 'again';
end;
$$;
select is(pg_temp.swept('slots of lost workers'), 0::bigint, 'a running job that lost its slot is not retried while its worker lives');
select is((pg_temp.job('a1')).status::text, 'doing', 'it runs on');
do $$
begin
  perform pg_temp.at(300700);
end;
$$;
select is(pg_temp.swept('slots of lost workers'), 1::bigint, 'when its worker is lost it is retried, slot or no slot');
-- case: recovery of stale jobs is itself stopped by the full cap
do $$
begin
  perform pg_temp.at(310000);
  perform pg_temp.define('full', '{"stalled": "retry"}');
  perform pg_temp.stage('full', 'f' || i) from generate_series(1, 4) as i;
  perform dispatch_tick('full');
  perform pg_temp.start('f1', pg_temp.worker(dispatch_now())), pg_temp.start('f2', pg_temp.worker(dispatch_now()));
  perform pg_temp.at(310301);
  perform dispatch_sweep();
end;
$$;
select is((select jobs_admitted from dispatch_tick('full')), 2, 'a cap full of lost jobs is free again after the sweep');

-- stalled: retry, with retry_strategy bypass.
do $$
begin
  perform pg_temp.at(320000);
  perform pg_temp.define('past', '{"stalled": "retry", "retry_strategy": "bypass", "gates": []}');
  perform pg_temp.stage('past', 'p1', '{"queueing_lock": "P"}');
  perform dispatch_tick('past');
  perform pg_temp.start('p1', pg_temp.worker(dispatch_now()));
  perform procrastinate_defer_jobs_v1(array[row('default', 'newer', 0, null, 'P', '{}', null)::procrastinate_job_to_defer_v1]);
  perform pg_temp.stage('past', 'p2');
  perform dispatch_tick('past');
  perform pg_temp.start('p2', pg_temp.worker(dispatch_now()));
  perform pg_temp.at(320301);
end;
$$;
-- case: a retry meets a queueing_lock that a newer job holds, and the whole batch is stuck with it
select is(dispatch_sweep_stalled(dispatch_now(), 1), 1::bigint, 'a retry that has to wait for its queueing lock does not hide the next one from a small bite');
select is((select array[(pg_temp.job('p1')).status::text, (pg_temp.job('p2')).status::text]), '{doing,todo}', 'the first waits, the next is retried');
select ok(pg_temp.has_slot('p2'), 'and keeps its slot while procrastinate runs it again');
do $$
begin
  perform pg_temp.start('newer', pg_temp.worker(dispatch_now()));
end;
$$;
select is(pg_temp.swept('slots of lost workers'), 1::bigint, 'the first has its turn when the lock is free');
do $$
begin
  perform pg_temp.at(330000);
  perform pg_temp.stage('past', 'p3');
  perform dispatch_tick('past');
  perform pg_temp.start('p3', null);
  perform dispatch_sweep();
  perform procrastinate_retry_job_v2((pg_temp.job('p3')).id, null, null, null, null);
  perform pg_temp.at(330200);
  perform pg_temp.start('p3', null);
  perform pg_temp.at(330400);
  perform dispatch_sweep();
end;
$$;
select is((pg_temp.job('p3')).status::text, 'doing', 'a second try''s time is counted from when its own worker was missed');

-- A retry by hand of a job that has lost its slot.
do $$
begin
  perform pg_temp.at(340000);
  perform pg_temp.define('left', '{"retry_strategy": "bypass", "gates": [{"type": "concurrency", "max": 1}]}');
  perform pg_temp.stage('left', 'l1');
  perform dispatch_tick('left');
  perform pg_temp.start('l1', pg_temp.worker(dispatch_now()));
  perform pg_temp.at(340301);
  perform dispatch_sweep();
  perform procrastinate_retry_job_v2((pg_temp.job('l1')).id, null, null, null, null);
end;
$$;
select ok(pg_temp.has_slot('l1'), 'a lost job that somebody retries past the policy has a slot again');
select is(pg_temp.in_flight('left'), 1, 'and counts once');

-- Slots whose job ended behind the triggers' back.
do $$
begin
  perform pg_temp.at(400000);
  perform pg_temp.define('behind', '{"gates": [{"type": "concurrency", "max": 5, "full_backoff": 9999}]}');
  perform pg_temp.stage('behind', 'b' || i) from generate_series(1, 6) as i;
  perform dispatch_tick('behind');
  perform pg_temp.start('b3', pg_temp.worker(dispatch_now()));
  alter table procrastinate_jobs disable trigger user;
  delete from procrastinate_jobs where task_name = 'b1';
  update procrastinate_jobs set status = 'succeeded' where task_name = 'b2';
  update procrastinate_jobs set status = 'cancelled' where task_name = 'b4';
  alter table procrastinate_jobs enable trigger user;
end;
$$;
select is(dispatch_sweep_ended(2), 2::bigint, 'the sweep takes bounded bites');
select is(dispatch_sweep_ended(2), 1::bigint, 'and the rest in the next');
select is(
  (select array_agg(pg_temp.has_slot('b' || i)) from generate_series(1, 5) as i), '{f,f,t,f,t}', 'a slot is freed when its job has ended or vanished, queued and running ones stay');
select is(pg_temp.in_flight('behind'), 2, 'the counter follows');
select is((select due_at from dispatch_partitions where policy_name = 'behind'), dispatch_now(), 'and the partition is due');

-- Counters set right by the slots.
do $$
begin
  perform pg_temp.at(500000);
  perform pg_temp.define('by_hand');
  perform pg_temp.stage('by_hand', 'h' || i) from generate_series(1, 4) as i;
  perform dispatch_tick('by_hand');
  delete from dispatch_inflight_jobs where policy_name = 'by_hand';
end;
$$;
select is((select jobs_admitted from dispatch_tick('by_hand')), 0, 'slots deleted by hand leave the counter full');
select is(pg_temp.swept('counters set right'), 1::bigint, 'the sweep sets it right');
select is((select in_flight_count from dispatch_partitions where policy_name = 'by_hand'), 0, 'by the rows');
select is((select jobs_admitted from dispatch_tick('by_hand')), 2, 'and the next jobs go at once');
do $$
begin
  perform dispatch_finish((pg_temp.job('h3')).id, true);
end;
$$;
select is(pg_temp.swept('counters set right'), 0::bigint, 'a finish that is not folded yet is no error');
select is(pg_temp.in_flight('by_hand'), 1, 'and is counted once');
do $$
begin
  update dispatch_partitions set in_flight_count = -5 where policy_name = 'by_hand';
  perform dispatch_sweep();
end;
$$;
select is(pg_temp.in_flight('by_hand'), 1, 'a counter is raised as well as lowered');

do $$
begin
  perform pg_temp.define('pages', '{"gates": []}');
  perform pg_temp.stage('pages', 'x', jsonb_build_object('context', jsonb_build_object('k', i))) from generate_series(1, 5) as i;
  perform dispatch_fold('pages', dispatch_now());
  update dispatch_partitions set in_flight_count = 9 where policy_name = 'pages';
  delete from dispatch_sweep_positions;
  perform dispatch_sweep_partitions(dispatch_now(), 3)
  from generate_series(1, (select ceil(count(*) / 3.0)::integer from dispatch_partitions));
end;
$$;
select is((select sum(in_flight_count) from dispatch_partitions where policy_name = 'pages'), 0::bigint, 'page by page the walk comes to every partition');

-- Idle partitions are forgotten, but not before a new one would start no better off.
do $$
begin
  perform pg_temp.at(600000);
  delete from dispatch_sweep_positions;
  perform pg_temp.define('idle', '{"gates": [{"type": "throttle", "name": "slow", "rate": 1, "per": 172800, "burst": 1}, {"type": "adaptive_concurrency", "initial_max": 2, "target_lag_ms": 1}]}');
  perform pg_temp.stage('idle', 'i1');
  perform dispatch_tick('idle');
  perform dispatch_finish((pg_temp.job('i1')).id, null);
  perform dispatch_tick('idle');
end;
$$;
create function pg_temp.seen(p_policy text)
returns bigint
language plpgsql
as $$
begin
  perform dispatch_sweep();
  return (select count(*) from dispatch_partitions where policy_name = p_policy);
end;
$$;
do $$
begin
  perform pg_temp.at(600000 + 90000);
end;
$$;
-- case: the bucket of an idle partition is garbage-collected before its window is over and starts full
select is(pg_temp.seen('idle'), 1::bigint, 'a partition whose bucket is not full again is not forgotten');
do $$
begin
  perform pg_temp.at(600000 + 172800);
end;
$$;
select is(pg_temp.seen('idle'), 0::bigint, 'it is when the bucket is full and it was idle for partition_inactive_after');
do $$
begin
  perform pg_temp.define('brief', '{"gates": [{"type": "throttle", "rate": 1, "per": 1}]}');
  perform pg_temp.stage('brief', 'i2');
  perform dispatch_tick('brief');
  perform dispatch_finish((pg_temp.job('i2')).id, null);
  perform dispatch_tick('brief');
  perform pg_temp.at(600000 + 172800 + 86400);
end;
$$;
select is(pg_temp.seen('brief'), 1::bigint, 'nor is it forgotten before partition_inactive_after, full or not');
do $$
begin
  perform dispatch_set('partition_inactive_after', 3600);
end;
$$;
select is(pg_temp.seen('brief'), 0::bigint, 'which is a setting');

create function public.limit_of(p_key text, p_context jsonb)
returns numeric
language plpgsql
as $$
begin
  if current_setting('test.broken', true) = 'yes' then
    raise exception 'no limit today';
  end if;
  return 5;
end;
$$;
do $$
begin
  perform pg_temp.at(1000000);
  perform pg_temp.define('asked', '{"gates": [{"type": "throttle", "rate": {"sql": "public.limit_of"}, "per": 36000}]}');
  perform pg_temp.stage('asked', 'i3');
  perform dispatch_tick('asked');
  perform dispatch_finish((pg_temp.job('i3')).id, null);
  perform dispatch_tick('asked');
  perform pg_temp.at(1000000 + 3601);
  perform set_config('test.broken', 'yes', true);
end;
$$;
select is(pg_temp.seen('asked'), 1::bigint, 'a bucket whose limit cannot be told is not taken for full');
do $$
begin
  perform set_config('test.broken', 'no', true);
  perform pg_temp.define('asked', '{"gates": [{"type": "throttle", "name": "renamed", "rate": {"sql": "public.limit_of"}, "per": 7200}]}');
end;
$$;
select is(pg_temp.seen('asked'), 0::bigint, 'a bucket that no gate uses any more keeps no partition');

do $$
begin
  perform pg_temp.define('kept', '{"gates": []}');
  perform pg_temp.stage('kept', 'k1', '{"context": {"k": "future"}, "scheduled_at": "2040-01-01T00:00:00+00:00"}');
  perform pg_temp.stage('kept', 'k2', '{"context": {"k": "running"}}');
  perform dispatch_tick('kept');
  perform dispatch_pause('kept', 'paused');
  perform pg_temp.stage('kept', 'k3', '{"context": {"k": "paused"}}');
  perform dispatch_tick('kept');
  perform pg_temp.at(9000000);
end;
$$;
select is(pg_temp.seen('kept'), 3::bigint, 'a partition in which a job waits, runs or is paused is not idle');
do $$
begin
  update dispatch_partitions set due_at = null where policy_name = 'kept' and partition_key = 'future';
end;
$$;
select is(pg_temp.seen('kept'), 3::bigint, 'nor is one that only looks so');

-- Retention.
do $$
begin
  perform pg_temp.at(10000000);
  delete from dispatch_tick_samples;
  insert into dispatch_tick_samples (at, policy_name, partitions_seen, partitions_admitted, partitions_denied, jobs_admitted, handoff_failures, denied_reasons, duration_ms, counted)
  select dispatch_now() - make_interval(secs => age), 'kept', 0, 0, 0, 0, 0, '{}', 0, true from unnest(array[86400, 86401, 86402, 5]) as age;
end;
$$;
select is((select samples from dispatch_sweep_old(dispatch_now(), 1)), 1::bigint, 'old samples go in bounded bites');
select is(pg_temp.swept('tick samples'), 1::bigint, 'the rest in the next');
select is((select count(*) from dispatch_tick_samples), 2::bigint, 'those within metrics_retention stay');

do $$
begin
  perform pg_temp.define('history', '{"gates": []}');
  perform pg_temp.stage('history', 'y' || i) from generate_series(1, 6) as i;
  perform dispatch_tick('history');
  perform pg_temp.start('y' || i, pg_temp.worker(dispatch_now() + interval '700000 s')) from unnest(array[2, 3, 4]) as i;
  perform procrastinate_finish_job_v1((pg_temp.job('y3')).id, 'succeeded', false);
  perform procrastinate_retry_job_v2((pg_temp.job('y4')).id, null, null, null, null);
  perform dispatch_pause('history');
  perform procrastinate_cancel_job_v1((pg_temp.job('y5')).id, false, false);
  perform pg_temp.stage('history', 'y7');
  perform dispatch_cancel(id) from dispatch_staged_jobs where task_name = 'y7';
  -- procrastinate's clock is the wall's.
  update procrastinate_events set at = dispatch_now() where job_id in ((pg_temp.job('y3')).id, (pg_temp.job('y5')).id);
  perform dispatch_set('admission_retention', 604800);
  perform pg_temp.at(10000000 + 604800);
  perform dispatch_sweep();
end;
$$;
select is((select count(*) from dispatch_admissions where policy_name = 'history'), 7::bigint, 'admissions are kept for admission_retention');
do $$
begin
  perform pg_temp.at(10000000 + 604800.5);
  perform dispatch_sweep();
end;
$$;
select is(
  (select array_agg(job.task_name::text order by job.task_name) from dispatch_admissions as a join procrastinate_jobs as job on job.id = a.job_id where a.policy_name = 'history'),
  '{y1,y2,y4,y6}', 'then those go whose job has ended; a job that is queued, runs or is parked keeps its own');
select is((select count(*) from dispatch_admissions where policy_name = 'history' and ending is not null), 0::bigint, 'cancelled ones go as well');

-- Retention counts from the end.
do $$
begin
  perform pg_temp.at(12000000);
  perform pg_temp.define('long', '{"gates": [{"type": "concurrency", "max": 1}]}');
  perform pg_temp.stage('long', 'marathon');
  perform dispatch_tick('long');
  perform pg_temp.start('marathon', pg_temp.worker('2100-01-01 00:00:00+00'));
  perform pg_temp.at(12000000 + 604800 * 2);
  perform procrastinate_finish_job_v1((pg_temp.job('marathon')).id, 'failed', false);
  update procrastinate_events set at = dispatch_now() where job_id = (pg_temp.job('marathon')).id and type = 'failed';
  perform pg_temp.at(12000000 + 604800 * 2 + 30);
  perform dispatch_sweep();
end;
$$;
select is((select count(*) from dispatch_admissions where policy_name = 'long'), 1::bigint, 'a job that ran longer than admission_retention is known for that long after its end');
do $$ begin perform procrastinate_retry_job_v2((pg_temp.job('marathon')).id, null, null, null, null); end; $$;
select is((select array_agg(task_name) from dispatch_staged_jobs where policy_name = 'long' and parked), '{marathon}', 'so that a retry by hand goes back to its policy');
do $$
begin
  perform dispatch_tick('long');
  perform pg_temp.start('marathon', pg_temp.worker('2100-01-01 00:00:00+00'));
  perform procrastinate_finish_job_v1((pg_temp.job('marathon')).id, 'failed', false);
  update procrastinate_events set at = dispatch_now() where job_id = (pg_temp.job('marathon')).id and type = 'failed' and at > dispatch_now();
  perform pg_temp.at(12000000 + 604800 * 3 + 30);
  perform dispatch_sweep();
end;
$$;
select is((select count(*) from dispatch_admissions where policy_name = 'long'), 1::bigint, 'of several ends the last one counts');
do $$ begin perform pg_temp.at(12000000 + 604800 * 3 + 30.5); perform dispatch_sweep(); end; $$;
select is((select count(*) from dispatch_admissions where policy_name = 'long'), 0::bigint, 'and in the end it is forgotten');
do $$
begin
  perform pg_temp.stage('long', 'vanished');
  perform dispatch_tick('long');
  perform pg_temp.start('vanished', pg_temp.worker('2100-01-01 00:00:00+00'));
  delete from procrastinate_jobs where task_name = 'vanished';
  perform set_config('dispatch.fake_now', (dispatch_now() + interval '604801 s')::text, true);
  perform dispatch_sweep();
end;
$$;
select is((select count(*) from dispatch_admissions where policy_name = 'long'), 0::bigint, 'of a job whose row is deleted nobody knows the end: it is forgotten by its admission');

-- Orphans.
do $$
begin
  perform pg_temp.define('dropped');
  perform dispatch_drop_policy('dropped');
  -- What an enqueuer committed while the policy was being dropped.
  perform pg_temp.define('dropped');
  perform pg_temp.stage('dropped', 'd' || i) from generate_series(1, 3) as i;
  delete from dispatch_policies where policy_name = 'dropped';
end;
$$;
select is(dispatch_sweep_orphans(dispatch_now(), 2), 2::bigint, 'jobs of a policy that is gone are set aside, in bounded bites');
select is(dispatch_sweep_orphans(dispatch_now(), 2), 1::bigint, 'the rest in the next');
select is(
  (select array_agg(task_name || ': ' || error order by id) from dispatch_dead_jobs where policy_name = 'dropped'),
  '{"d1: policy ''dropped'' does not exist","d2: policy ''dropped'' does not exist","d3: policy ''dropped'' does not exist"}',
  'as dead, with the reason');
select is(dispatch_sweep_orphans(dispatch_now(), 2), 0::bigint, 'then there is nothing more to do');
do $$
begin
  perform dispatch_sweep_orphans(dispatch_now(), 100);
end;
$$;
select is((select count(*) from dispatch_inbox where policy_name = 'dropped'), 0::bigint, 'and no note is left');
do $$
begin
  -- A tick that began before the drop and committed after it.
  perform pg_temp.define('late');
  perform pg_temp.stage('late', 'l');
  perform dispatch_fold('late', dispatch_now());
  delete from dispatch_policies where policy_name = 'late';
  perform dispatch_sweep(), dispatch_sweep();
  perform dispatch_sweep();
end;
$$;
select is((select count(*) from dispatch_dead_jobs where policy_name = 'late'), 1::bigint, 'so are those in a partition of a policy that is gone');
select is((select count(*) from dispatch_partitions where policy_name = 'late'), 0::bigint, 'which goes as well');
do $$
begin
  -- The same, and the policy comes back before the second sweep.
  perform pg_temp.define('back', '{"gates": []}');
  perform pg_temp.stage('back', 'b1'), pg_temp.stage('back', 'b2');
  perform dispatch_fold('back', dispatch_now());
  delete from dispatch_policies where policy_name = 'back';
  perform dispatch_sweep();
  perform pg_temp.define('back', '{"gates": []}');
end;
$$;
select is((select jobs_admitted from dispatch_tick('back')), 2, 'where the policy is defined again before they are set aside, they go');
select results_eq(
  $$select pending_count, in_flight_count from dispatch_partitions where policy_name = 'back'$$, $$values (0::bigint, 2)$$, 'and are counted');

-- Retries whose row in procrastinate is gone.
do $$
begin
  perform pg_temp.at(20000000);
  perform pg_temp.define('lost', '{"gates": []}');
  perform pg_temp.stage('lost', 'z' || i) from generate_series(1, 3) as i;
  perform dispatch_tick('lost');
  perform pg_temp.start('z' || i, null) from generate_series(1, 3) as i;
  perform procrastinate_retry_job_v2((pg_temp.job('z' || i)).id, dispatch_now() + interval '1 h', null, null, null) from generate_series(1, 3) as i;
  alter table procrastinate_jobs disable trigger user;
  delete from procrastinate_jobs where task_name in ('z1', 'z2');
  alter table procrastinate_jobs enable trigger user;
end;
$$;
select is(dispatch_sweep_orphans(dispatch_now(), 1), 1::bigint, 'a waiting retry whose row is gone waits for nothing');
select is(pg_temp.swept('orphaned jobs'), 1::bigint, 'they go in bounded bites');
do $$
begin
  perform dispatch_fold('lost', dispatch_now());
end;
$$;
select is((select pending_count from dispatch_partitions where policy_name = 'lost'), 1::bigint, 'the counter follows');
select is((select array_agg(task_name) from dispatch_staged_jobs where policy_name = 'lost'), '{z3}', 'one whose row is parked waits on');

-- Limit functions that take their time ----------------------------------------------------------------

create function public.slow_limit(text, jsonb) returns numeric language plpgsql as $$ begin perform pg_sleep(0.1); return 5; end $$;
do $$ begin
  delete from dispatch_sweep_positions;
  perform dispatch_define_policy('slow', '{"partition_by": "k", "gates": [{"type": "throttle", "rate": {"sql": "public.slow_limit", "default": null}, "per": 1}]}');
  insert into dispatch_partitions (id, policy_name, partition_key, first_seen_at, gate_state)
  select dispatch_partition_id('slow', n::text), 'slow', n::text, dispatch_now() - interval '9 days', '{"throttle": {"tokens": 1, "at": 0}}'
  from generate_series(1, 50) as n;
end $$;
create temporary table walk on commit drop as select (dispatch_sweep_partitions(dispatch_now(), 10000, false)).forgotten as unasked;
select is(unasked, 0::bigint, 'a sweep that has recovered something asks no limit function before that is committed') from walk;
select ok(forgotten between 5 and 40, 'one that takes long is asked for about two seconds') from dispatch_sweep_partitions(dispatch_now(), 10000);
select ok(forgotten between 5 and 40, 'and the next sweep goes on') from dispatch_sweep_partitions(dispatch_now(), 10000);
select ok(count(*) <= 25, 'where the last one left off') from dispatch_partitions where policy_name = 'slow';
do $$ begin
  perform dispatch_define_policy('slow', '{"partition_by": "k", "gates": [{"type": "throttle", "rate": 1, "per": 1}, {"type": "concurrency", "max": {"sql": "public.slow_limit", "default": null}}]}');
  delete from dispatch_sweep_positions;
end $$;
create temporary table begun on commit drop as select clock_timestamp() as at;
do $$ begin perform dispatch_sweep_partitions(dispatch_now(), 10000); end $$;
select ok(clock_timestamp() < at + interval '1 second', 'a limit that has no bucket is not asked for') from begun;
select is(count(*), 0::bigint, 'and the rest is forgotten at once') from dispatch_partitions where policy_name = 'slow';

select * from finish();
rollback;
