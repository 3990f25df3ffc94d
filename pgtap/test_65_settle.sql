-- Settling: what was handed off is written down and paid for, all of it together, and nothing else is.
begin;
select plan(72);

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
  $$ select slot.staged_id, slot.partition_id, slot.admitted_at, slot.policy_name, slot.partition_key, job.task_name::text
     from dispatch_inflight_jobs as slot join procrastinate_jobs as job on job.id = slot.job_id order by job.id $$,
  $$ select id, partition_id, pg_temp.clock(1), policy_name, partition_key, task_name from staged where task_name <> 'a3' order by id $$,
  'each holds a slot, which names both ids');
select results_eq(
  $$ select a.staged_id, a.staged_at, a.admitted_at, a.context, job.task_name::text
     from dispatch_admissions as a join procrastinate_jobs as job on job.id = a.job_id order by a.staged_id $$,
  $$ select id, staged_at, pg_temp.clock(1), context, task_name from staged where task_name <> 'a3' order by id $$,
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

-- Tokens are for what was handed off. A driver says what became of each job.
do $$
begin
  perform pg_temp.define('verdicts', '[{"type": "throttle", "rate": 10, "per": 10}, {"type": "concurrency", "max": 5}]');
  perform pg_temp.stage('verdicts', 'a', 3);
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
return format('select dispatch_settle(%s, %L, %L, %L)', coalesce(p_handoff_id, (select min(handoff_id) from payload)), p_ids,
  array_fill(null::bigint, array[cardinality(p_ids)]), array_fill('boom'::text, array[cardinality(p_ids)]));

create temporary table ids as select array_agg(id order by id) as ids, max(id) as newest from payload;
select throws_ok(pg_temp.settle(ids[1:2]), 'PD008', null, 'a settlement that leaves a job out is refused') from ids;
select throws_ok(pg_temp.settle(ids || newest + 1), 'PD008', null, 'one that names a stranger as well is refused') from ids;
select throws_ok(pg_temp.settle(ids[1:2] || newest + 1), 'PD008', null, 'one that names a stranger instead is refused') from ids;
select throws_ok(pg_temp.settle(ids || newest), 'PD008', null, 'one that names a job twice is refused') from ids;
select throws_ok(pg_temp.settle(array[ids[1], ids[1], ids[2]]), 'PD008', null, 'one that names a job twice and another not at all is refused') from ids;
select throws_ok(pg_temp.settle('{}'), 'PD008', null, 'one that names nothing is refused');
select throws_ok(pg_temp.settle(ids, -1), 'PD008', null, 'a hand-off that does not exist cannot be settled') from ids;
select throws_ok(pg_temp.settle('{}', -1), 'PD008', null, 'not even with nothing');
select throws_ok('set constraints all immediate', 'PD008', null, 'after all that the hand-off is still open');

create temporary table settled as
select (settled).*
from ids, dispatch_settle(
  (select min(handoff_id) from payload), array[ids[3], ids[1], ids[2]], array[null, 900001, null], array['no such task', null, null]) as settled;
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
return (select format('select dispatch_settle(%s, array[%s], array[%s], array[null])', handoff_id, id, 910000 + handoff_id) from twice where handoff_id = p_handoff_id);
select is((select array[count(*), count(distinct id)] from twice), '{2,1}', 'a driver that admits twice is given the same job twice');
select lives_ok(pg_temp.settle_twice(min(handoff_id)), 'it may hand it off once') from twice;
select throws_ok(pg_temp.settle_twice(max(handoff_id)), 'PD008', 'jobs of policy ''twice'' that were handed off are not staged any more',
  'and not a second time') from twice;
delete from dispatch_handoffs where policy_name = 'twice';

select is(
  (select array[partitions_seen, partitions_admitted, partitions_denied, jobs_admitted, handoff_failures] from settled), '{1,1,0,1,1}',
  'settling tells what a tick tells');
select is(pg_temp.tokens('verdicts'), 9::numeric, 'only the job that was handed off has paid');
select is((pg_temp.partition('verdicts')).in_flight_count, 1, 'only that one counts as in flight');
select is((select array_agg(job_id) from dispatch_inflight_jobs where policy_name = 'verdicts'), '{900001}', 'under the id that the driver gave');
select results_eq(
  $$ select task_name, error, died_at from dispatch_dead_jobs where policy_name = 'verdicts' $$,
  $$ values ('a3', 'no such task', dispatch_now()) $$, 'the one with an error is set aside with it');
select results_eq(
  $$ select task_name, eligible_at from dispatch_staged_jobs where policy_name = 'verdicts' $$,
  $$ values ('a2', dispatch_now() + interval '1 second') $$, 'the one with neither waits its turn');
select is((pg_temp.partition('verdicts')).due_at, dispatch_now() + interval '1 second', 'its partition is not due before, so that no tick is wasted');
do $$
begin
  perform dispatch_fold('verdicts', dispatch_now());
end;
$$;
select is((pg_temp.partition('verdicts')).pending_count, 1::bigint, 'one job is pending');

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
select is((select count(*) from procrastinate_jobs where task_name like 'a_' and id > (select max(id) from dispatch_staged_jobs where policy_name = 'broken')), 0::bigint,
  'and none of them in the queue');

select * from finish();
rollback;
