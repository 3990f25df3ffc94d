-- The operator's hand: pause, force-admit and drain, and what to do with dead jobs.
begin;
select plan(99);

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

create function pg_temp.define(p_policy text, p_gates jsonb default '[]')
returns void
language plpgsql
as $$
begin
  perform dispatch_define_policy(p_policy, jsonb_build_object('partition_by', 'k', 'gates', p_gates));
end;
$$;

create function pg_temp.stage(p_policy text, p_key text, p_count integer default 1, p_more jsonb default '{}')
returns void
language plpgsql
as $$
begin
  perform dispatch_stage_many(p_policy, (
    select jsonb_agg(jsonb_build_object('task_name', p_key || i, 'context', jsonb_build_object('k', p_key)) || p_more)
    from generate_series(1, p_count) as i
  ));
end;
$$;

create function pg_temp.partition(p_policy text, p_key text default 'a')
returns dispatch_partitions
language sql
begin atomic
  select * from dispatch_partitions where policy_name = p_policy and partition_key = p_key;
end;

create function pg_temp.finish(p_policy text, p_count integer)
returns void
language sql
begin atomic
  select dispatch_finish(job_id, true)
  from (select job_id from dispatch_inflight_jobs where policy_name = p_policy order by job_id limit p_count) as jobs;
end;

create function pg_temp.dead(p_name text)
returns bigint
language sql
begin atomic
  select id from dispatch_dead_jobs where task_name = p_name;
end;

-- Pauses.
do $$
begin
  perform pg_temp.define('pause');
  perform dispatch_pause('pause');
  perform dispatch_pause('pause', 'a');
  perform dispatch_pause('pause', '');
  perform pg_temp.at(5);
end;
$$;
select lives_ok($$ select dispatch_pause('pause', 'a') $$, 'what is paused may be paused again');
select results_eq(
  $$ select policy_name, partition_key, paused_at from dispatch_pauses order by partition_key nulls first $$,
  $$ values ('pause', null, pg_temp.clock(0)), ('pause', '', pg_temp.clock(0)), ('pause', 'a', pg_temp.clock(0)) $$,
  'and is paused since the first time; the policy and the partition with the empty key are two things');
do $$
begin
  perform pg_temp.stage('pause', 'a'), pg_temp.stage('pause', ''), pg_temp.stage('pause', 'b');
  perform dispatch_tick('pause');
  perform dispatch_resume('pause');
end;
$$;
select is((select array[jobs_admitted, partitions_denied] from dispatch_tick('pause')), '{1,2}', 'a resumed policy leaves the pauses of its partitions');
select lives_ok($$ select dispatch_resume('pause') $$, 'what is not paused may be resumed');
do $$
begin
  perform dispatch_resume('pause', '');
end;
$$;
select is((select jobs_admitted from dispatch_tick('pause')), 1, 'a resumed partition leaves the pauses of others');
do $$
begin
  perform dispatch_resume('pause', 'a');
  perform dispatch_resume('pause', 'never seen');
end;
$$;
select is((select jobs_admitted from dispatch_tick('pause')), 1, 'until it is their turn');
select is((select count(*) from dispatch_pauses), 0::bigint, 'nothing is paused any more');
select is((select count(*) from dispatch_partitions where policy_name = 'pause'), 3::bigint, 'resuming a key that was never seen makes no partition');
select is((select count(*) from dispatch_inbox where policy_name = 'pause'), 0::bigint, 'and leaves no note');
select throws_ok($$ select dispatch_pause('nobody') $$, 'PD001', null, 'an unknown policy cannot be paused');
select throws_ok($$ select dispatch_resume('nobody', 'a') $$, 'PD001', null, 'or resumed');
do $$
begin
  perform pg_temp.define('running', '[{"type": "concurrency", "max": 1}]');
  perform pg_temp.stage('running', 'a', 2);
  perform dispatch_tick('running');
  perform dispatch_pause('running', 'a');
  perform pg_temp.finish('running', 1);
end;
$$;
select is((select array[jobs_admitted, partitions_denied] from dispatch_tick('running')), '{0,1}', 'a finish lifts no pause');
select is((pg_temp.partition('running')).in_flight_count, 0, 'but frees its slot');

-- Force-admit.
do $$
begin
  perform pg_temp.at(100);
  perform pg_temp.define('force', '[{"type": "throttle", "rate": 1, "per": 10, "burst": 2}, {"type": "concurrency", "max": 2, "full_backoff": 5}]');
  perform pg_temp.stage('force', 'a', 10);
  perform dispatch_tick('force');
end;
$$;
select is((select array[in_flight_count, total_admitted] from dispatch_partitions where policy_name = 'force'), '{2,2}', 'the gates are closed');
select is(dispatch_force_admit('force', 'a', 3), 3, 'force-admit goes past them');
-- case: force-admitted jobs are not counted in flight
select is((select count(*) from dispatch_inflight_jobs where policy_name = 'force'), 5::bigint, 'its jobs hold slots');
select is((pg_temp.partition('force')).in_flight_count, 5, 'and count as in flight');
select is((pg_temp.partition('force')).gate_state -> 'throttle' -> 'tokens', '-3'::jsonb, 'they are paid for in tokens, on credit');
select is((pg_temp.partition('force')).pending_count, 5::bigint, 'they are pending no longer');
select is((select array_agg(task_name::text order by id) from procrastinate_jobs where id in (select job_id from dispatch_inflight_jobs where policy_name = 'force')),
  '{a1,a2,a3,a4,a5}', 'and arrive in their order');
select is((select count(*) from dispatch_admissions where policy_name = 'force'), 5::bigint, 'with an admission each');
select is((pg_temp.partition('force')).due_at, pg_temp.clock(140), 'the partition is due when the debt is paid');
do $$
begin
  perform pg_temp.finish('force', 3);
  perform pg_temp.at(139.9);
end;
$$;
select is((select jobs_admitted from dispatch_tick('force')), 0, 'the bucket makes up for it');
do $$
begin
  perform pg_temp.at(140);
end;
$$;
select is((select array[jobs_admitted, partitions_denied] from dispatch_tick('force')), '{0,1}', 'and so does the cap, while too many run');
do $$
begin
  perform pg_temp.finish('force', 1);
end;
$$;
select is((select jobs_admitted from dispatch_tick('force')), 1, 'when both are made up for, the gates open again');

do $$
begin
  perform pg_temp.define('picky');
  perform dispatch_pause('picky', 'a');
  perform pg_temp.stage('picky', 'a', 1, jsonb_build_object('task_name', 'later', 'priority', 9, 'scheduled_at', pg_temp.clock(1000)));
  perform pg_temp.stage('picky', 'a', 1, '{"task_name": "low"}');
  perform pg_temp.stage('picky', 'a', 1, '{"task_name": "high", "priority": 5}');
  perform pg_temp.stage('picky', 'b');
end;
$$;
select is(dispatch_force_admit('picky', 'a', 1), 1, 'force-admit goes past a pause too');
select is((select task_name from dispatch_staged_jobs where policy_name = 'picky' and task_name in ('low', 'high')), 'low', 'the first of the order goes first');
select is(dispatch_force_admit('picky', 'a', 10), 1, 'a job that is not due stays');
select is(dispatch_force_admit('picky', 'a', 10), 0, 'when nothing is due, nothing is admitted');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'picky' and partition_key = 'b'), 1::bigint, 'other partitions are left alone');
select is(dispatch_force_admit('picky', 'nobody', 10), 0, 'so is a key that was never seen');
do $$
begin
  perform pg_temp.at(1000);
  perform dispatch_tick('picky');
end;
$$;
select is((select array_agg(task_name) from dispatch_staged_jobs where policy_name = 'picky'), '{later}', 'the pause is still there afterwards');
select throws_ok($$ select dispatch_force_admit('nobody', 'a', 1) $$, 'PD001', null, 'an unknown policy is an error');
select throws_ok(format('select dispatch_force_admit(%L, %L, %L)', 'force', 'a', n), 'PD009', null, format('so is a limit of %s', coalesce(n::text, 'null')))
from unnest(array[0, -1, 10001, null]) as n;

-- Drain.
do $$
begin
  perform pg_temp.at(2000);
  perform pg_temp.define('drain', '[{"type": "throttle", "rate": 1, "per": 3600}, {"type": "concurrency", "max": 1}]');
  perform pg_temp.stage('drain', 'a', 4), pg_temp.stage('drain', 'b', 2);
  perform pg_temp.stage('drain', 'c', 2, jsonb_build_object('scheduled_at', pg_temp.clock(2500)));
  perform pg_temp.stage('drain', 'd', 1, jsonb_build_object('scheduled_at', pg_temp.clock(2400)));
  perform dispatch_tick('drain');
end;
$$;
select results_eq(
  $$ select admitted, ready, later, next_at, why from dispatch_drain('drain', 'a', 2) $$,
  $$ values (2, 1::bigint, 0::bigint, null::timestamptz, '1 are over the limit of 2: call again') $$, 'a drain that stops at its limit says so');
select results_eq(
  $$ select admitted, ready, later, next_at, why from dispatch_drain('drain', 'a') $$,
  $$ values (1, 0::bigint, 0::bigint, null::timestamptz, '') $$, 'one that leaves nothing says that');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'drain' and partition_key = 'b'), 1::bigint, 'other partitions are left alone');
-- case: "drained 0, n remain" for ever, because what remains is scheduled for later
select results_eq(
  $$ select admitted, ready, later, next_at, why from dispatch_drain('drain') $$,
  $$ values (1, 0::bigint, 3::bigint, pg_temp.clock(2400), format('3 are scheduled or wait for a queueing lock, the next at %s', pg_temp.clock(2400))) $$,
  'what is scheduled stays, and the answer says until when');
select results_eq(
  $$ select admitted, ready, later from dispatch_drain('drain') $$, $$ values (0, 0::bigint, 3::bigint) $$, 'again and again');
select ok((pg_temp.partition('drain', 'c')).last_checked_at is null, 'what has nothing to drain is not looked at');
do $$
begin
  perform pg_temp.at(2400);
end;
$$;
select results_eq(
  $$ select admitted, ready, later, next_at from dispatch_drain('drain') $$, $$ values (1, 0::bigint, 2::bigint, pg_temp.clock(2500)) $$, 'when its time has come it goes');
select is((select sum(in_flight_count) from dispatch_partitions where policy_name = 'drain'), (select count(*) from dispatch_inflight_jobs where policy_name = 'drain'),
  'drained jobs count as in flight');
select is((pg_temp.partition('drain')).gate_state -> 'throttle' -> 'tokens', '-3'::jsonb, 'and are paid for');
do $$
begin
  perform pg_temp.define('spread');
  perform pg_temp.stage('spread', 'p' || i, 2) from generate_series(1, 4) as i;
  perform pg_temp.stage('spread', 'p1', 1, jsonb_build_object('scheduled_at', pg_temp.clock(9999)));
end;
$$;
select results_eq(
  $$ select admitted, ready, later, why from dispatch_drain('spread', null, 5) $$,
  $$ values (5, 3::bigint, 1::bigint, format('3 are over the limit of 5: call again; 1 are scheduled or wait for a queueing lock, the next at %s', pg_temp.clock(9999))) $$,
  'the limit is for all partitions together, and every reason is told');
do $$
begin
  perform pg_temp.define('locked');
  perform procrastinate_defer_jobs_v1(array[row('default', 'holder', 0, null, 'Q', '{}', null)::procrastinate_job_to_defer_v1]);
  perform dispatch_stage_many('locked', '[{"task_name": "waits", "queueing_lock": "other"}]');
  update dispatch_staged_jobs set queueing_lock = 'Q' where task_name = 'waits';
end;
$$;
select results_eq(
  $$ select admitted, ready, later, next_at from dispatch_drain('locked') $$,
  $$ values (0, 0::bigint, 1::bigint, dispatch_now() + interval '1 second') $$, 'a job whose queueing lock is held waits for it, drained or not');
do $$
begin
  perform dispatch_pause('locked');
  update procrastinate_jobs set status = 'doing' where task_name = 'holder';
  perform set_config('dispatch.fake_now', (dispatch_now() + interval '1 second')::text, true);
end;
$$;
select is((select admitted from dispatch_drain('locked')), 1, 'drain goes past a paused policy');
select results_eq(
  $$ select admitted, ready, later, why from dispatch_drain('locked', 'nobody') $$, $$ values (0, 0::bigint, 0::bigint, '') $$, 'a key that was never seen has nothing to drain');
select throws_ok($$ select dispatch_drain('nobody') $$, 'PD001', null, 'an unknown policy is an error');
select throws_ok(format('select dispatch_drain(%L, null, %L)', 'drain', n), 'PD009', null, format('so is a limit of %s', coalesce(n::text, 'null')))
from unnest(array[0, 100001, null]) as n;

-- Dead jobs.
do $$
begin
  perform pg_temp.at(3000);
  alter table procrastinate_jobs add constraint no_poison check (not args ? 'poison');
  perform pg_temp.define('dead', '[{"type": "throttle", "rate": 1, "per": 1, "burst": 100}]');
  perform dispatch_stage_many('dead', jsonb_build_array(jsonb_build_object('task_name', 'dead' || i, 'context', '{"k": "a"}'::jsonb, 'args', '{"poison": 1}'::jsonb,
    'priority', i, 'lock', 'L', 'queueing_lock', 'D' || i, 'queue_name', 'own', 'scheduled_at', pg_temp.clock(2900))))
  from generate_series(1, 5) as i;
end;
$$;
create temporary table before as select * from dispatch_staged_jobs where policy_name = 'dead';
do $$
begin
  perform dispatch_tick('dead');
  perform pg_temp.at(3010);
end;
$$;
select results_eq(
  $$ select d.id, d.partition_id, d.staged_at, d.died_at, d.scheduled_at, d.priority, d.policy_name, d.partition_key, d.task_name, d.queue_name, d.lock, d.queueing_lock, d.args, d.context
     from dispatch_dead_jobs as d order by id $$,
  $$ select b.id, b.partition_id, b.staged_at, pg_temp.clock(3000), b.scheduled_at, b.priority, b.policy_name, b.partition_key, b.task_name, b.queue_name, b.lock, b.queueing_lock, b.args, b.context
     from before as b order by id $$,
  'a dead job keeps all that it was staged with');
select ok((select bool_and(error like '%"no_poison"%') from dispatch_dead_jobs), 'and its error');

create temporary table one as select pg_temp.dead('dead1') as id;
select lives_ok($$ select dispatch_requeue_dead(id) from one $$, 'a dead job is requeued');
select results_eq(
  $$ select s.* from dispatch_staged_jobs as s where s.task_name = 'dead1' $$, $$ select b.* from before as b where b.task_name = 'dead1' $$, 'it is staged as it was, under its id');
select is((dispatch_job(id)).state, 'staged', 'and no longer dead') from one;
select throws_ok(format('select dispatch_requeue_dead(%s)', id), 'PD006', null, 'so it cannot be requeued again') from one;
select is((select array[jobs_admitted, handoff_failures] from dispatch_tick('dead')), '{0,1}', 'what is still bad dies again');
select is((select died_at from dispatch_dead_jobs where task_name = 'dead1'), pg_temp.clock(3010), 'now');
do $$
begin
  alter table procrastinate_jobs drop constraint no_poison;
  perform dispatch_requeue_dead(pg_temp.dead('dead1'));
end;
$$;
select is((select array[jobs_admitted, handoff_failures] from dispatch_tick('dead')), '{1,0}', 'what has been mended is admitted');
select is((select job_id is not null from dispatch_job((select id from one))), true, 'under the same id');
select is((select array[pending_count, in_flight_count] from dispatch_partitions where policy_name = 'dead'), '{0,1}', 'the counters agree');

do $$
begin
  perform dispatch_stage_many('dead', '[{"task_name": "newer", "context": {"k": "a"}, "queueing_lock": "D2"}]');
end;
$$;
select throws_ok($$ select dispatch_requeue_dead(pg_temp.dead('dead2')) $$, 'PD004', null, 'a dead job cannot be requeued while another waits with its queueing lock');
select isnt(pg_temp.dead('dead2'), null, 'it stays dead then');
do $$
begin
  perform dispatch_tick('dead');
  perform dispatch_requeue_dead(pg_temp.dead('dead2'));
end;
$$;
select is((select array[jobs_admitted, handoff_failures] from dispatch_tick('dead')), '{0,0}', 'requeued while the other is queued, it waits its turn');

create temporary table third as select pg_temp.dead('dead3') as id;
do $$
begin
  perform dispatch_discard_dead(id) from third;
end;
$$;
select is(pg_temp.dead('dead3'), null, 'a discarded job is gone');
select is((dispatch_job(id)).state, 'cancelled', 'and counts as cancelled') from third;
select is(dispatch_job_status(id), 'cancelled', 'in procrastinate''s word too') from third;
select is((select count(*) from dispatch_staged_jobs where task_name = 'dead3'), 0::bigint, 'it is not staged');
select throws_ok(format('select dispatch_discard_dead(%s)', id), 'PD006', null, 'it cannot be discarded again') from third;
select throws_ok('select dispatch_requeue_dead(-1)', 'PD006', null, 'an unknown job cannot be requeued');
select throws_ok('select dispatch_discard_dead(null)', 'PD006', null, 'nor can no job be discarded');

do $$
begin
  perform dispatch_drop_policy('dead', true);
end;
$$;
select is((select error from dispatch_dead_jobs where task_name = 'dead2'), 'policy dropped', 'jobs of a policy that is dropped by force are dead');
select throws_ok($$ select dispatch_requeue_dead(pg_temp.dead('dead4')) $$, 'PD001', null, 'a dead job cannot be requeued into a policy that is gone');
select isnt(pg_temp.dead('dead4'), null, 'it stays dead then');
select lives_ok($$ select dispatch_discard_dead(pg_temp.dead('dead4')) $$, 'but it can be discarded');
do $$
begin
  perform pg_temp.define('dead');
  perform dispatch_requeue_dead(pg_temp.dead('dead5'));
end;
$$;
select is((select jobs_admitted from dispatch_tick('dead')), 1, 'or requeued when the policy is back');
select is((select array[pending_count, in_flight_count] from dispatch_partitions where policy_name = 'dead'), '{0,1}', 'in a new partition');

-- Dead retries, whose rows are parked.
create function pg_temp.bury_retry(p_name text, p_retry_at timestamptz default null)
returns bigint
language plpgsql
as $$
declare
  v_id constant bigint := dispatch_stage('parked', p_name, '{}', p_priority => 3, p_lock => 'L', p_queueing_lock => 'Q ' || p_name);
begin
  perform dispatch_tick('parked');
  update procrastinate_jobs set status = 'doing' where id = v_id;
  perform procrastinate_retry_job_v2(v_id, p_retry_at, null, null, null);
  perform dispatch_bury(array[v_id], '{no}', dispatch_now());
  return v_id;
end;
$$;
create temporary table buried (name text, id bigint);
do $$
begin
  perform pg_temp.at(5000);
  delete from procrastinate_jobs;
  perform dispatch_define_policy('parked', '{}');
end;
$$;
insert into buried select name, pg_temp.bury_retry(name) from unnest(array['moved', 'cancelled', 'deleted', 'discarded', 'retried', 'requeued']) as name;
create function pg_temp.buried(p_name text)
returns bigint
language sql
begin atomic
  select id from buried where name = p_name;
end;
select is((select count(*) from dispatch_dead_jobs where policy_name = 'parked' and parked), 6::bigint, 'a dead retry has its row in procrastinate still');
update procrastinate_jobs set scheduled_at = null where id = pg_temp.buried('moved');
select is((select scheduled_at from procrastinate_jobs where id = pg_temp.buried('moved')), dispatch_parked_until(), 'whoever gives that row a schedule does not make a worker run it: it stays parked');
select is((select task_name from procrastinate_fetch_job_v2(null, null)), null, 'and no worker gets a job of the policy past it');
do $$ begin perform dispatch_cancel_job(pg_temp.buried('cancelled'), false, false); end; $$;
select is(
  (select format('%s %s %s', (dispatch_job(pg_temp.buried('cancelled'))).state, dispatch_job_status(pg_temp.buried('cancelled')), (select count(*) from dispatch_dead_jobs where id = pg_temp.buried('cancelled')))),
  case (select status::text from procrastinate_jobs where id = pg_temp.buried('cancelled')) when 'cancelled' then 'cancelled cancelled 0' else 'dead failed 1' end,
  'whether a dead retry can be cancelled or not, it is not both cancelled and dead');
delete from procrastinate_jobs where id = pg_temp.buried('deleted');
select is((select count(*) from dispatch_dead_jobs where id = pg_temp.buried('deleted')), 0::bigint, 'a dead retry whose row is deleted is gone, for nothing of it can be tried again');
do $$ begin perform dispatch_discard_dead(pg_temp.buried('discarded')); end; $$;
select results_eq(
  $$ select status::text, priority, lock, queueing_lock, scheduled_at from procrastinate_jobs where id = pg_temp.buried('discarded') $$,
  $$ values ('cancelled', 3, 'L', 'Q discarded', null::timestamptz) $$, 'the row of a dead retry that is discarded is what the job was');
update procrastinate_jobs set status = 'todo' where id = pg_temp.buried('discarded');
select results_eq(
  $$ select priority, lock, queueing_lock, eligible_at from dispatch_staged_jobs where id = pg_temp.buried('discarded') $$,
  $$ values (3, 'L', 'Q discarded', '-infinity'::timestamptz) $$, 'so that it can be retried by hand');
do $$ begin perform dispatch_retry_job(pg_temp.buried('retried'), pg_temp.clock(5100), 9, 'elsewhere', 'M'); end; $$;
select results_eq(
  $$ select parked, priority, lock, queueing_lock, queue_name, eligible_at, attempts from dispatch_staged_jobs where id = pg_temp.buried('retried') $$,
  $$ values (true, 9, 'M', 'Q retried', 'elsewhere', pg_temp.clock(5100), 1) $$, 'procrastinate''s retry of a dead job stages it as it says');
do $$ begin perform dispatch_requeue_dead(pg_temp.buried('requeued')); end; $$;
select is((select jobs_admitted from dispatch_tick('parked')), 2, 'a requeued one goes');
do $$ begin perform pg_temp.at(5100); end; $$;
select is((select jobs_admitted from dispatch_tick('parked')), 1, 'and a retried one when its time has come');
select results_eq(
  $$ select priority, lock, scheduled_at from procrastinate_jobs where id = pg_temp.buried('retried') $$, $$ values (9, 'M', pg_temp.clock(5100)) $$, 'as it was retried');
select throws_like(format('select dispatch_retry_job(%s, null, null, null, null)', pg_temp.buried('retried')), '%invalid status to retry%', 'one that is queued is procrastinate''s to refuse');
select throws_like('select dispatch_retry_job(-1, null, null, null, null)', '%not found%', 'so is an unknown one');

do $$
declare
  v_id constant bigint := dispatch_stage('parked', 'scheduled', '{}', p_scheduled_at => pg_temp.clock(99999));
begin
  perform dispatch_bury(array[v_id], '{no}', dispatch_now());
  perform dispatch_fold('parked', dispatch_now());
  perform dispatch_retry_job(v_id, null, null, null, null);
end;
$$;
select is((select jobs_admitted from dispatch_tick('parked')), 1, 'a dead job that was scheduled for later goes at once, when it is retried at once');

-- All jobs, as procrastinate would show them.
do $$
begin
  delete from procrastinate_jobs;
  delete from dispatch_staged_jobs;
  delete from dispatch_dead_jobs;
  perform dispatch_define_policy('parked', '{}');
  perform dispatch_stage('parked', 'queued', p_priority => 1);
  perform dispatch_tick('parked');
  perform dispatch_stage('parked', 'staged', '{"x": 1}', p_queue_name => 'q', p_priority => 2, p_lock => 'l', p_queueing_lock => 'ql', p_scheduled_at => pg_temp.clock(6000));
  perform pg_temp.bury_retry('dead retry', pg_temp.clock(7000));
  perform dispatch_bury(array[dispatch_stage('parked', 'dead')], '{no}', dispatch_now());
  insert into procrastinate_jobs (queue_name, task_name, status) values ('default', 'foreign', 'failed');
end;
$$;
select is((select array_agg(task_name order by task_name) from dispatch_jobs), '{dead,dead retry,foreign,queued,staged}', 'dispatch_jobs has every job once');
select results_eq(
  $$ select task_name, status::text, queue_name, priority, lock, queueing_lock, args, scheduled_at, attempts, abort_requested, worker_id from dispatch_jobs where task_name in ('staged', 'dead retry') order by 1 $$,
  $$ values ('dead retry', 'failed', 'default', 3, 'L', 'Q dead retry', '{}'::jsonb, pg_temp.clock(7000), 1, false, null::bigint),
    ('staged', 'todo', 'q', 2, 'l', 'ql', '{"x": 1}', pg_temp.clock(6000), 0, false, null) $$, 'those that wait and those that are dead as they are, parked or not');
do $$ begin perform dispatch_requeue_dead(id) from dispatch_dead_jobs where task_name = 'dead retry'; end; $$;
select results_eq(
  $$ select status::text, priority, lock, scheduled_at from dispatch_jobs where task_name = 'dead retry' $$, $$ values ('todo', 3, 'L', pg_temp.clock(7000)) $$, 'a parked one with what it waits with');
select is(
  (select array_agg(dispatch_job_status(id) = status::text) from dispatch_jobs), '{t,t,t,t,t}', 'dispatch_job_status says of each what is said there');

select * from finish();
rollback;
