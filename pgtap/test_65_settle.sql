-- Settling: what was handed off is written down and paid for, all of it together, and nothing else is.
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

create function pg_temp.define(p_policy text, p_gates jsonb default '[]', p_more jsonb default '{}')
returns void
language plpgsql
as $$
begin
  perform dispatch_define_policy(p_policy, jsonb_build_object('partition_by', 'k', 'gates', p_gates) || p_more);
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

create function pg_temp.tokens(p_policy text, p_gate text default 'throttle')
returns numeric
language sql
return ((pg_temp.partition(p_policy)).gate_state -> p_gate ->> 'tokens')::numeric;

create function pg_temp.finish(p_policy text)
returns void
language sql
begin atomic
  select dispatch_finish(job_id, true) from dispatch_inflight_jobs where policy_name = p_policy;
end;

-- Everything moves together.
do $$
begin
  perform pg_temp.define('whole', '[{"type": "throttle", "rate": 1, "per": 10, "burst": 5}]', '{"admission_batch_size": 2}');
  perform pg_temp.stage('whole', 'a', 3, '{"context": {"k": "a", "plan": "gold"}}');
  perform pg_temp.at(1);
end;
$$;
create temporary table staged as select * from dispatch_staged_jobs;
create temporary table result as select * from dispatch_tick('whole');

select is(
  (select array[partitions_seen, partitions_admitted, partitions_denied, jobs_admitted, handoff_failures] from result), '{1,1,0,2,0}',
  'a tick says what it did');
select is((select denied_reasons from result), '{}', 'and that nothing was denied');
select ok((select duration_ms > 0 from result), 'and how long it took');
select is(
  (select array_agg(task_name) from dispatch_staged_jobs), '{a3}', 'the admitted jobs are staged no longer');
select is(
  (select array_agg(task_name::text order by id) from procrastinate_jobs where status = 'todo'), '{a1,a2}', 'they are in procrastinate''s queue');
select results_eq(
  $$ select slot.job_id, slot.partition_id, slot.admitted_at, slot.policy_name, slot.partition_key, job.task_name::text
     from dispatch_inflight_jobs as slot join procrastinate_jobs as job on job.id = slot.job_id order by job.id $$,
  $$ select id, partition_id, pg_temp.clock(1), policy_name, partition_key, task_name from staged where task_name <> 'a3' order by id $$,
  'each holds a slot, under the id that it was staged with');
select results_eq(
  $$ select a.job_id, a.staged_at, a.admitted_at, a.ending, a.context, job.task_name::text
     from dispatch_admissions as a join procrastinate_jobs as job on job.id = a.job_id order by a.job_id $$,
  $$ select id, staged_at, pg_temp.clock(1), null::text, context, task_name from staged where task_name <> 'a3' order by id $$,
  'its admission is kept, with the context it was staged with');
select results_eq(
  $$ select pending_count, in_flight_count, total_admitted, last_checked_at, last_admitted_at, decayed_admits, decayed_at, blocked_reason
     from dispatch_partitions $$,
  $$ values (1::bigint, 2, 2::bigint, pg_temp.clock(1), pg_temp.clock(1), 2::double precision, pg_temp.clock(1), null::text) $$,
  'the partition''s counters agree');
select is(pg_temp.tokens('whole'), 3::numeric, 'each job has paid a token');
select results_eq(
  $$ select at, policy_name, partitions_seen, partitions_admitted, partitions_denied, jobs_admitted, handoff_failures, denied_reasons, duration_ms
     from dispatch_tick_samples $$,
  $$ select pg_temp.clock(1), * from result $$,
  'a sample keeps the result');

do $$
begin
  perform dispatch_tick('whole');
  perform dispatch_tick('whole');
end;
$$;
select is((select count(*) from dispatch_tick_samples), 2::bigint, 'a tick that looks at nothing leaves no sample');
select is((pg_temp.partition('whole')).decayed_admits, 3::double precision, 'admissions at one moment add up');
do $$
begin
  perform pg_temp.stage('whole', 'a');
  perform pg_temp.at(61);
  perform dispatch_tick('whole');
end;
$$;
select is((pg_temp.partition('whole')).decayed_admits, 2.5::double precision, 'and halve with each half-life');

-- Tokens are for what was handed off. A driver turns jobs back, and the queueing lock of another job holds one.
do $$
begin
  perform pg_temp.define('verdicts', '[{"type": "throttle", "rate": 10, "per": 10}, {"type": "concurrency", "max": 5}]');
  perform pg_temp.stage('verdicts', 'a', 1);
  perform dispatch_stage('verdicts', 'a' || i, p_context => '{"k": "a"}', p_queueing_lock => 'Q' || i) from unnest(array[2, 3]) as i;
end;
$$;
create temporary table payload as select * from dispatch_admit('verdicts');
select is((select array_agg(task_name order by id) from payload), '{a1,a2,a3}', 'dispatch_admit gives out the jobs that the gates let pass');
select is((select count(distinct handoff_id) from payload where tick is null), 1::bigint, 'as one hand-off');
select is((select array_agg(p.id = s.id) from payload as p full join dispatch_staged_jobs as s on s.id = p.id where s.policy_name = 'verdicts'), '{t,t,t}',
  'they stay staged until it is settled');
select throws_ok('set constraints all immediate', 'PD008', null, 'a hand-off that is not settled cannot be committed');

create function pg_temp.settle(p_ids bigint[], p_handoff_id bigint default null)
returns text
language sql
return format('select dispatch_settle(%s, %L, %L)', coalesce(p_handoff_id, (select min(handoff_id) from payload)), p_ids,
  array_fill('boom'::text, array[cardinality(p_ids)]));

create temporary table ids as select array_agg(id order by id) as ids, max(id) as newest from payload;
select throws_ok(pg_temp.settle(ids || newest + 1), 'PD008', null, 'a settlement that turns a stranger back as well is refused') from ids;
select throws_ok(pg_temp.settle(ids[1:2] || newest + 1), 'PD008', null, 'one that turns a stranger back instead is refused') from ids;
select throws_ok(pg_temp.settle(array[newest + 1]), 'PD008', null, 'one that turns only a stranger back is refused') from ids;
select throws_ok(pg_temp.settle(ids || newest), 'PD008', null, 'one that turns a job back twice is refused') from ids;
select throws_ok(pg_temp.settle(array[ids[1], ids[1], ids[2]]), 'PD008', null, 'one that turns a job back twice and another not at all is refused') from ids;
select throws_ok(pg_temp.settle(array[ids[1], null]), 'PD008', null, 'one that turns no job back beside another is refused') from ids;
select throws_ok(pg_temp.settle(ids, -1), 'PD008', null, 'a hand-off that does not exist cannot be settled') from ids;
select throws_ok(pg_temp.settle('{}', -1), 'PD008', null, 'not even with nothing');
select throws_ok('set constraints all immediate', 'PD008', null, 'after all that the hand-off is still open');

insert into procrastinate_jobs (queue_name, task_name, queueing_lock) values ('default', 'stranger', 'Q2');
create temporary table settled as
select (settled).*
from ids, dispatch_settle((select min(handoff_id) from payload), array[ids[3]], array['no such task']) as settled;
select lives_ok('set constraints all immediate', 'a settled hand-off can be committed');
set constraints all deferred;
select throws_ok(pg_temp.settle(ids), 'PD008', null, 'a hand-off is settled once') from ids;
-- Within its own transaction nothing keeps a driver from a job that it has admitted already.
do $$
begin
  perform pg_temp.define('twice', '[{"type": "concurrency", "max": 1}]');
  perform pg_temp.stage('twice', 'a', 1);
end;
$$;
create temporary table twice as
select handoff_id, id from dispatch_admit('twice')
union all
select handoff_id, id from dispatch_admit('twice');
create function pg_temp.settle_twice(p_handoff_id bigint)
returns text
language sql
return format('select dispatch_settle(%s)', p_handoff_id);
select is((select array[count(*), count(distinct id)] from twice), '{2,1}', 'a driver that admits twice is given the same job twice');
select lives_ok(pg_temp.settle_twice(min(handoff_id)), 'it may hand it off once') from twice;
select throws_ok(pg_temp.settle_twice(max(handoff_id)), 'PD008', 'jobs that were admitted are not staged any more',
  'and not a second time') from twice;
delete from dispatch_handoffs where policy_name = 'twice';

select is(
  (select array[partitions_seen, partitions_admitted, partitions_denied, jobs_admitted, handoff_failures] from settled), '{1,1,0,1,1}',
  'settling tells what a tick tells');
select is(pg_temp.tokens('verdicts'), 9::numeric, 'only the job that was handed off has paid');
select is((pg_temp.partition('verdicts')).in_flight_count, 1, 'only that one counts as in flight');
select is((select array_agg(job_id) from dispatch_inflight_jobs where policy_name = 'verdicts'), ids[1:1], 'under the id that staging gave it') from ids;
select results_eq(
  $$ select task_name, error, died_at from dispatch_dead_jobs where policy_name = 'verdicts' $$,
  $$ values ('a3', 'no such task', dispatch_now()) $$, 'the one that was turned back is set aside with its error');
select results_eq(
  $$ select task_name, eligible_at from dispatch_staged_jobs where policy_name = 'verdicts' $$,
  $$ values ('a2', dispatch_now() + interval '1 second') $$, 'the one whose queueing lock is held waits its turn');
select is((pg_temp.partition('verdicts')).due_at, dispatch_now() + interval '1 second', 'its partition is not due before, so that no tick is wasted');
do $$
begin
  perform dispatch_fold('verdicts', dispatch_now());
end;
$$;
select is((pg_temp.partition('verdicts')).pending_count, 1::bigint, 'one job is pending');

-- Turning back, and what a driver may do in between.
create function pg_temp.admitted(p_policy text, p_jobs integer)
returns dispatch_payload[]
language plpgsql
as $$
begin
  perform pg_temp.define(p_policy, '[{"type": "concurrency", "max": 50}]');
  perform pg_temp.stage(p_policy, 'a', p_jobs);
  return array(select p from dispatch_admit(p_policy) as p);
end;
$$;
create temporary table back as select pg_temp.admitted('back', 4) as jobs;
select is((select array_agg(task_name) from back, unnest(jobs)), '{a1,a2,a3,a4}', 'a driver is given four jobs');
create temporary table back_result as
select settled.* from back, dispatch_settle(jobs[1].handoff_id, array[jobs[3].id, jobs[1].id], array['too large']) as settled;
select is((select array[jobs_admitted, handoff_failures] from back_result), '{2,2}', 'it turns two back and names no other: those go');
select results_eq(
  $$ select task_name, error from dispatch_dead_jobs where policy_name = 'back' order by id $$,
  $$ values ('a1', 'turned back'), ('a3', 'too large') $$, 'those turned back are dead, each with its error or with that');
select is((select array_agg(job_id order by job_id) from dispatch_inflight_jobs where policy_name = 'back'), array[jobs[2].id, jobs[4].id], 'the others have their slots') from back;
select is((pg_temp.partition('back')).in_flight_count, 2, 'and are counted');
do $$
begin
  perform dispatch_requeue_dead(id) from dispatch_dead_jobs where policy_name = 'back' and task_name = 'a3';
end;
$$;
create temporary table requeued as select * from dispatch_admit('back');
select is((select array_agg(task_name) from requeued), '{a3}', 'a dead one that is requeued is admitted anew');
select is((select (dispatch_settle(handoff_id)).jobs_admitted from requeued), 1, 'and may go');
do $$ begin perform pg_temp.stage('back', 'a', 3); end; $$;
create temporary table all_back as select array_agg(p) as jobs from dispatch_admit('back') as p;
select results_eq(
  $$ select jobs_admitted, handoff_failures from all_back, dispatch_settle(jobs[1].handoff_id, array[jobs[1].id, jobs[2].id, jobs[3].id], '{x,y,z}') $$,
  $$ values (0, 3) $$, 'all can be turned back');
select is((pg_temp.partition('back')).in_flight_count, 3, 'which changes nothing that is counted');

create function pg_temp.between(p_name text, p_statement text, p_jobs integer default 3)
returns text
language plpgsql
as $$
declare
  v_jobs dispatch_payload[];
  v_settled dispatch_tick_result;
begin
  v_jobs := pg_temp.admitted(p_name, p_jobs);
  execute format(p_statement, v_jobs[1].id, v_jobs[2].id);
  v_settled := dispatch_settle(v_jobs[1].handoff_id);
  return format('%s went', v_settled.jobs_admitted);
exception
  when sqlstate 'PD008' then
    return sqlerrm;
end;
$$;
select is(pg_temp.between('between', statement), said, sentence)
from (values
  ('select 1', '3 went', 'when nothing happens in between, the hand-off is settled'),
  ('select dispatch_cancel(%s)', 'jobs that were admitted are not staged any more', 'a driver that cancels a job in between, in the same transaction, cannot settle'),
  ('select dispatch_cancel_job(%2$s, false, true)', 'jobs that were admitted are not staged any more', 'nor one that cancels and deletes it'),
  ('select dispatch_tick(''between'')', 'jobs that were admitted are not staged any more', 'nor one that ticks'),
  ('select dispatch_force_admit(''between'', ''a'', 1)', 'jobs that were admitted are not staged any more', 'nor one that forces a job past the gates'),
  ('select dispatch_bury(array[%s], array[''x''], dispatch_now())', 'jobs that were admitted are not staged any more', 'nor one whose job is dead'),
  ('select dispatch_pause(''between'')', '3 went', 'a pause comes after what is admitted')
) as happens (statement, said, sentence);
select is((select array[count(*), count(*) filter (where not exists (select from procrastinate_jobs as job where job.id = slot.job_id))] from dispatch_inflight_jobs as slot where policy_name = 'between'),
  '{6,0}', 'what could not be settled has left nothing');
do $$ begin perform dispatch_resume('between'); end; $$;

create temporary table later_settled as select pg_temp.admitted('turned', 2) as jobs;
do $$ begin perform dispatch_cancel((select jobs[1].id from later_settled)); end; $$;
select results_eq(
  $$ select jobs_admitted, handoff_failures from later_settled, dispatch_settle(jobs[1].handoff_id, array[jobs[1].id]) $$,
  $$ values (1, 1) $$, 'one that is cancelled in between and turned back costs the other nothing');
select is((select (pg_temp.partition('turned')).in_flight_count), 1, 'which is counted');

create temporary table longer as select pg_temp.admitted('longer', 2) as jobs;
select throws_ok(format('select dispatch_settle(%s, array[%s], array[''for one'', ''for nobody''])', jobs[1].handoff_id, jobs[1].id), 'PD008', null,
  'an error of no job is refused') from longer;
do $$ begin delete from dispatch_handoffs where policy_name = 'longer'; end; $$;

-- A retry beside new jobs is not shown to a driver, and goes when it settles.
do $$
begin
  perform pg_temp.define('retry_beside', '[{"type": "concurrency", "max": 5}]');
  perform pg_temp.stage('retry_beside', 'a', 1);
  perform dispatch_tick('retry_beside');
  update procrastinate_jobs set status = 'doing' where id = (select job_id from dispatch_inflight_jobs where policy_name = 'retry_beside');
  perform procrastinate_retry_job_v2(job_id, null, null, null, null) from dispatch_inflight_jobs where policy_name = 'retry_beside';
end;
$$;
create temporary table only_retry as select * from dispatch_admit('retry_beside');
select is((select array_agg(id) from only_retry), array[null::bigint], 'where there are retries only, no job is shown');
select is((select (tick).jobs_admitted from only_retry), 1, 'and the tick has handed them off');
select lives_ok('set constraints all immediate', 'there is nothing to settle');
set constraints all deferred;
do $$
begin
  update procrastinate_jobs set status = 'doing' where id = (select job_id from dispatch_inflight_jobs where policy_name = 'retry_beside');
  perform procrastinate_retry_job_v2(job_id, null, null, null, null) from dispatch_inflight_jobs where policy_name = 'retry_beside';
  perform pg_temp.stage('retry_beside', 'a', 2);
end;
$$;
create temporary table with_retry as select * from dispatch_admit('retry_beside');
select is((select count(*) from with_retry), 2::bigint, 'beside new jobs, those are shown');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'retry_beside' and parked), 1::bigint, 'the retry stays parked so long');
select is((select (dispatch_settle(min(handoff_id), array_agg(id))).jobs_admitted from with_retry), 1, 'and goes with the settlement, though all that was shown is turned back');
select is((select count(*) from procrastinate_jobs as job join dispatch_inflight_jobs as slot on slot.job_id = job.id where slot.policy_name = 'retry_beside' and job.scheduled_at is null), 1::bigint,
  'out of where it was parked');

-- Nothing to hand off.
create temporary table nothing as select * from dispatch_admit('verdicts');
select is((select array_agg(handoff_id is null and id is null) from nothing), '{t}', 'with nothing to hand off, dispatch_admit gives one row without a job');
select is((select (tick).partitions_seen from nothing), 0, 'whose tick says what was done');
select lives_ok('set constraints all immediate', 'and there is nothing to settle');
set constraints all deferred;

-- case: a job passes the concurrency gate, is then throttled, and keeps the slot
do $$
begin
  perform pg_temp.define('slot_first', '[{"type": "concurrency", "max": 1}, {"type": "throttle", "rate": 1, "per": 60}]');
  perform pg_temp.stage('slot_first', 'a', 2);
  perform dispatch_tick('slot_first');
  perform pg_temp.finish('slot_first');
  perform dispatch_resume('slot_first', 'a');
end;
$$;
select is((select denied_reasons from dispatch_tick('slot_first')), '{"throttle_empty": 1}', 'a job may find a slot and no token');
select is((select count(*) from dispatch_inflight_jobs where policy_name = 'slot_first'), 0::bigint, 'then it keeps no slot');
select is((pg_temp.partition('slot_first')).in_flight_count, 0, 'nor counts for one');
do $$
begin
  perform pg_temp.define('token_first', '[{"type": "throttle", "rate": 5, "per": 60}, {"type": "concurrency", "max": 1}]');
  perform pg_temp.stage('token_first', 'a', 3);
  perform dispatch_tick('token_first');
  perform pg_temp.at(61.5);
end;
$$;
select is((select jobs_admitted from dispatch_tick('token_first')), 0, 'a job may find a token and no slot');
select is(pg_temp.tokens('token_first'), 4::numeric, 'then it pays no token');
do $$
begin
  perform pg_temp.define('narrow', '[{"type": "throttle", "name": "wide", "rate": 10, "per": 60}, {"type": "throttle", "name": "tight", "rate": 2, "per": 60},
    {"type": "concurrency", "max": 5}]');
  perform pg_temp.stage('narrow', 'a', 20);
end;
$$;
select is((select jobs_admitted from dispatch_tick('narrow')), 2, 'of several gates the narrowest decides how many pass');
select is(array[pg_temp.tokens('narrow', 'wide'), pg_temp.tokens('narrow', 'tight')], '{8,0}', 'and each bucket pays for those, and no more');

-- When to look again after admitting.
do $$
begin
  perform pg_temp.at(100);
  perform pg_temp.define('next_token', '[{"type": "throttle", "rate": 1, "per": 10}]');
  perform pg_temp.stage('next_token', 'a', 2);
  perform dispatch_tick('next_token');

  perform pg_temp.define('next_slot', '[{"type": "concurrency", "max": 1, "full_backoff": 3}]');
  perform pg_temp.stage('next_slot', 'a', 2);
  perform dispatch_tick('next_slot');

  perform pg_temp.define('next_both', '[{"type": "throttle", "rate": 1, "per": 10}, {"type": "concurrency", "max": 1, "full_backoff": 30}]');
  perform pg_temp.stage('next_both', 'a', 2);
  perform dispatch_tick('next_both');

  perform pg_temp.define('next_schedule', '[{"type": "throttle", "rate": 1, "per": 10}]');
  perform pg_temp.stage('next_schedule', 'a');
  perform pg_temp.stage('next_schedule', 'a', 1, jsonb_build_object('scheduled_at', pg_temp.clock(150)));
  perform dispatch_tick('next_schedule');

  perform pg_temp.define('next_none', '[{"type": "throttle", "rate": 1, "per": 10}]');
  perform pg_temp.stage('next_none', 'a');
  perform dispatch_tick('next_none');
end;
$$;
select is((pg_temp.partition('next_token')).due_at, pg_temp.clock(110), 'after admitting, a throttled partition is due when the next token comes');
select is((pg_temp.partition('next_slot')).due_at, pg_temp.clock(103), 'a full one after full_backoff');
select is((pg_temp.partition('next_both')).due_at, pg_temp.clock(130), 'one that is both, when both allow it');
select is((pg_temp.partition('next_schedule')).due_at, pg_temp.clock(150), 'one with only a future job, at its schedule');
select is((pg_temp.partition('next_none')).due_at, null, 'an empty one never');
select is(dispatch_next_due('next_none'), null, 'and it keeps no driver awake');

do $$
begin
  perform pg_temp.finish('next_slot');
  perform pg_temp.finish('next_both');
  perform pg_temp.finish('next_none');
  perform dispatch_fold(policy_name, dispatch_now()) from dispatch_policies;
end;
$$;
select is((pg_temp.partition('next_slot')).due_at, pg_temp.clock(100), 'a finish makes a full partition due at once');
select is((pg_temp.partition('next_both')).due_at, pg_temp.clock(110), 'or when its next token comes, if that is later');
select is((pg_temp.partition('next_none')).due_at, null, 'but not one in which nothing waits');
do $$
begin
  perform pg_temp.stage('next_none', 'a');
  perform dispatch_fold('next_none', dispatch_now());
end;
$$;
select is((pg_temp.partition('next_none')).due_at, pg_temp.clock(110), 'a job that comes to an empty bucket waits for its token, unclaimed');

-- Whether there is room for one more.
select pg_temp.define('room', '[{"type": "throttle", "rate": 10, "per": 100}, {"type": "concurrency", "max": 20}]');
select pg_temp.stage('room', 'left', 9);
select pg_temp.stage('room', 'none', 10);
select is((select jobs_admitted from dispatch_tick('room')), 19, 'of two partitions, one takes all its tokens and one leaves one');
select results_eq(
  $$select partition_key, blocked_until, blocked_reason from dispatch_partitions where policy_name = 'room' order by partition_key$$,
  $$values ('left', null, null), ('none', dispatch_now() + interval '10 s', 'throttle_empty')$$,
  'the next job of the first may go at once, and that of the second when its token comes');

select pg_temp.define('idle', '[{"type": "adaptive_concurrency", "initial_max": 3, "target_lag_ms": 100}]');
select pg_temp.stage('idle', 'a', 2);
insert into dispatch_adaptive_stats (partition_id, gate_name, current_max, updated_at)
select dispatch_partition_id('idle', 'a'), 'adaptive_concurrency', 1, dispatch_now()
from dispatch_fold('idle', dispatch_now());
select is((select jobs_admitted from dispatch_tick('idle')), 2, 'an idle partition may begin above its cap');
select is((pg_temp.partition('idle')).blocked_reason, 'concurrency_full', 'and is full then, though the gate had allowed one more');

select pg_temp.define('forced', '[{"type": "throttle", "rate": 1, "per": 100}]');
select pg_temp.stage('forced', 'a', 3);
do $$ begin perform dispatch_force_admit('forced', 'a', 10); end; $$;
select is((pg_temp.partition('forced')).blocked_until, dispatch_now() + interval '300 s',
  'jobs that were forced past a bucket are paid for, however many more might have been forced');

-- What is denied.
do $$
begin
  perform pg_temp.at(200);
  perform pg_temp.define('denied', '[{"type": "throttle", "rate": {"ctx": "rate"}, "per": 60}, {"type": "concurrency", "max": {"ctx": "max"}}]');
  perform pg_temp.stage('denied', 'open', 1, '{"context": {"k": "open", "rate": 1, "max": 1}}');
  perform pg_temp.stage('denied', 'no_rate', 3, '{"context": {"k": "no_rate", "max": 1}}');
  perform pg_temp.stage('denied', 'zero', 3, '{"context": {"k": "zero", "rate": 0, "max": 1}}');
  perform pg_temp.stage('denied', 'no_max', 1, '{"context": {"k": "no_max", "rate": 1}}');
  perform pg_temp.stage('denied', 'neither', 1, '{"context": {"k": "neither"}}');
end;
$$;
create temporary table denied as select * from dispatch_tick('denied');
select is(
  (select denied_reasons from denied), '{"rate_zero": 3, "max_zero": 1}',
  'each denied partition is counted once, under its first reason, whatever waits in it');
select is((select array[partitions_seen, partitions_admitted, partitions_denied, jobs_admitted] from denied), '{5,1,4,1}', 'partitions are seen, admitted or denied');
select results_eq(
  $$ select partition_key, blocked_reason, last_checked_at, last_admitted_at, due_at from dispatch_partitions where policy_name = 'denied' order by 1 $$,
  $$ values
    ('neither', 'rate_zero', pg_temp.clock(200), null, pg_temp.clock(260)),
    ('no_max', 'max_zero', pg_temp.clock(200), null, pg_temp.clock(201)),
    ('no_rate', 'rate_zero', pg_temp.clock(200), null, pg_temp.clock(260)),
    ('open', 'throttle_empty', pg_temp.clock(200), pg_temp.clock(200), null),
    ('zero', 'rate_zero', pg_temp.clock(200), null, pg_temp.clock(260)) $$,
  'a partition tells what keeps it from admitting more, and backs off');
select is((select partitions_seen from dispatch_tick('denied')), 0, 'and is not written again while it does');
do $$
begin
  perform pg_temp.stage('denied', 'zero', 1, '{"context": {"k": "zero", "rate": 5, "max": 1}}');
end;
$$;
select is((select array[partitions_seen, jobs_admitted] from dispatch_tick('denied')), '{1,1}', 'a new context is looked at in the next tick');
select is((pg_temp.partition('denied', 'zero')).blocked_reason, 'concurrency_full', 'and the reason is what holds it now');

-- A tick that fails as a whole leaves everything as it was.
do $$
begin
  perform pg_temp.define('broken', '[{"type": "throttle", "rate": 5, "per": 60}]');
  perform pg_temp.stage('broken', 'a', 2);
  begin
    perform dispatch_tick('broken');
    raise exception 'no';
  exception
    when raise_exception then null;
  end;
end;
$$;
select is((select count(*) from dispatch_staged_jobs where policy_name = 'broken'), 2::bigint, 'a tick that is rolled back leaves its jobs staged');
select is((select count(*) from procrastinate_jobs where id in (select id from dispatch_staged_jobs where policy_name = 'broken')), 0::bigint,
  'and none of them in the queue');

select * from finish();
rollback;
