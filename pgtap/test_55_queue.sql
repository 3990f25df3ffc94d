-- max_queued: how many of a policy's jobs may wait in procrastinate's queue, and who goes when there is little room.
begin;
select plan(103);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';
set local timezone = 'UTC';

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

create function pg_temp.define(p_policy text, p_max_queued integer, p_more jsonb default '{}')
returns void
language sql
return dispatch_define_policy(p_policy, jsonb_build_object('partition_by', 'k', 'max_queued', p_max_queued) || p_more);

-- Stages jobs whose task is named for the policy.
create function pg_temp.stage(p_policy text, p_jobs integer, p_key text default 'a', p_context jsonb default '{}')
returns void
language plpgsql
as $$
begin
  perform dispatch_stage_many(p_policy, (
    select jsonb_agg(jsonb_build_object('task_name', p_policy, 'context', p_context || jsonb_build_object('k', p_key)))
    from generate_series(1, p_jobs)));
end;
$$;

-- How many jobs a tick admits, and why partitions were denied.
create function pg_temp.tick(p_policy text, out jobs integer, out reasons jsonb)
language sql
begin atomic
  select jobs_admitted, denied_reasons from dispatch_tick(p_policy);
end;

-- Admitted by a tick, per partition: a3 b1.
create function pg_temp.shares(p_policy text)
returns text
language plpgsql
as $$
begin
  perform dispatch_tick(p_policy);
  return (
    select string_agg(partition_key || jobs, ' ' order by partition_key)
    from (
      select partition_key, count(*) as jobs
      from dispatch_inflight_jobs
      where policy_name = p_policy and admitted_at = dispatch_now()
      group by partition_key
    ) as admitted);
end;
$$;

create function pg_temp.queued(p_policy text)
returns bigint
language sql
begin atomic
  select count(*) from procrastinate_jobs where task_name = p_policy and status = 'todo';
end;

create function pg_temp.room(p_policy text)
returns integer
language sql
return dispatch_queue_room(dispatch_policy(p_policy), dispatch_now());

-- A worker takes the first jobs of the queue.
create function pg_temp.start(p_policy text, p_jobs integer)
returns void
language sql
begin atomic
  update procrastinate_jobs set status = 'doing'
  where id in (select id from procrastinate_jobs where task_name = p_policy and status = 'todo' order by id limit p_jobs);
end;

-- Workers end the first running jobs.
create function pg_temp.finish(p_policy text, p_jobs integer, p_status text default 'succeeded')
returns void
language sql
begin atomic
  select procrastinate_finish_job_v1(id, p_status::procrastinate_job_status, false)
  from (select id from procrastinate_jobs where task_name = p_policy and status = 'doing' order by id limit p_jobs) as running;
end;

create function pg_temp.partition(p_policy text, p_key text default 'a')
returns dispatch_partitions
language sql
begin atomic
  select * from dispatch_partitions where policy_name = p_policy and partition_key = p_key;
end;

-- Filling it.
do $$
begin
  perform pg_temp.define('bound', 5);
  perform pg_temp.stage('bound', 20);
end;
$$;
select results_eq($$select * from pg_temp.tick('bound')$$, $$values (5, '{}'::jsonb)$$, 'a tick fills the queue to the bound and no further');
select is(pg_temp.room('bound'), 0, 'then there is no room');
select is((pg_temp.partition('bound')).due_at, pg_temp.clock(0), 'what is left is due');
do $$ begin perform pg_temp.at(1); end; $$;
select results_eq($$select * from pg_temp.tick('bound')$$, $$values (0, '{"queue_full": 1}'::jsonb)$$, 'the next tick admits none, and says why');
select results_eq(
  $$select blocked_reason, blocked_until, due_at, last_checked_at, pending_count, in_flight_count from dispatch_partitions where policy_name = 'bound'$$,
  $$values ('queue_full', null::timestamptz, pg_temp.clock(0), pg_temp.clock(1), 15::bigint, 5)$$,
  'the partition says so too, and keeps its place among those that are due');
create temporary table written as select ctid as place, * from dispatch_partitions;
do $$ begin perform pg_temp.at(2); end; $$;
select results_eq(
  $$select partitions_seen, partitions_denied, jobs_admitted, denied_reasons from dispatch_tick('bound')$$, $$values (0, 0, 0, '{}'::jsonb)$$,
  'a further tick looks at none');
select results_eq('select ctid, * from dispatch_partitions', 'select * from written', 'and writes nothing');
select is((select count(*) from dispatch_tick_samples where policy_name = 'bound'), 2::bigint, 'not even a sample');
select is(dispatch_next_due('bound'), pg_temp.clock(2.25), 'a driver is to look again after a quarter of a second');
select is(dispatch_next_due(), pg_temp.clock(2.25), 'among all policies too');
select is(dispatch_next_due('bound', 'default'), pg_temp.clock(2.25), 'and by shard');
do $$
begin
  perform pg_temp.define('other', 5);
  perform pg_temp.stage('other', 3);
end;
$$;
select is(pg_temp.tick('other')::text, '(3,{})', 'another policy has a queue of its own');
do $$
begin
  perform pg_temp.stage('bound', 4, 'b');
end;
$$;
select is(dispatch_next_due('bound'), pg_temp.clock(2), 'what was staged is worth a tick at once');
select is(pg_temp.tick('bound')::text, '(0,"{""queue_full"": 1}")', 'which tells the new partition, and no other, that the queue is full');
select is((pg_temp.partition('bound', 'b')).blocked_reason, 'queue_full', 'as it then says');

-- What makes room.
do $$ begin perform pg_temp.start('bound', 2); end; $$;
select is(pg_temp.room('bound'), 2, 'two jobs that start make room for two');
select is(dispatch_next_due('bound'), pg_temp.clock(0), 'then those that wait are due');
select is(pg_temp.shares('bound'), 'a1 b1', 'and two go, one of each partition');
select is((pg_temp.partition('bound')).blocked_reason, null, 'of a partition that was admitted a job the queue is not full any more');
select is(pg_temp.tick('bound')::text, '(0,"{""queue_full"": 2}")', 'till the next tick finds it full');
do $$ begin perform pg_temp.finish('bound', 2); end; $$;
select is((pg_temp.tick('bound')).jobs, 0, 'running jobs that end make none: they were not in the queue');
do $$ begin perform procrastinate_cancel_job_v1(min(id), false, false) from procrastinate_jobs where task_name = 'bound' and status = 'todo'; end; $$;
select is((pg_temp.tick('bound')).jobs, 1, 'a queued job that is cancelled makes room for one');
do $$ begin delete from procrastinate_jobs where id in (select id from procrastinate_jobs where task_name = 'bound' and status = 'todo' order by id limit 2); end; $$;
select is((pg_temp.tick('bound')).jobs, 2, 'two that are deleted make room for two');
do $$ begin perform dispatch_finish(min(id), true) from procrastinate_jobs where task_name = 'bound' and status = 'todo'; end; $$;
select is((pg_temp.tick('bound')).jobs, 1, 'one that another worker has finished makes room for one');
do $$ begin update procrastinate_jobs set status = 'succeeded' where id in (select min(id) from procrastinate_jobs where task_name = 'bound' and status = 'todo' and id in (select job_id from dispatch_inflight_jobs)); end; $$;
select is((pg_temp.tick('bound')).jobs, 1, 'and so does one that procrastinate ends in the queue');
select is((select count(*) from dispatch_inflight_jobs where policy_name = 'bound'), 5::bigint, 'after all that exactly as many are queued as may be');
do $$
begin
  perform pg_temp.define('bound', 8);
end;
$$;
select is((pg_temp.tick('bound')).jobs, 3, 'a raised bound counts from the next tick on');
do $$
begin
  perform pg_temp.define('bound', 2);
  perform pg_temp.start('bound', 6);
end;
$$;
select is((pg_temp.tick('bound')).jobs, 0, 'a lowered one makes no room before the queue is that short');
do $$ begin perform pg_temp.start('bound', 2); end; $$;
select cmp_ok((pg_temp.tick('bound')).jobs, '<=', 2, 'then as much as it says');
do $$
begin
  perform pg_temp.define('bound', null);
end;
$$;
select is(pg_temp.room('bound'), null, 'without a bound there is no limit to the room');
select is(dispatch_next_due('bound'), dispatch_now(), 'and no waiting for it');

-- Where little is queued nothing is counted, and what runs may count for queued: never too much room.
do $$
begin
  perform pg_temp.define('half', 10);
  perform pg_temp.stage('half', 60);
end;
$$;
select is((pg_temp.tick('half')).jobs, 10, 'an empty queue is filled by one tick');
do $$ begin perform pg_temp.start('half', 10); end; $$;
select is(pg_temp.room('half'), 10, 'when all of it runs there is room for as many again');
do $$ begin perform pg_temp.finish('half', 5); end; $$;
select is(pg_temp.room('half'), 5, 'with few slots in all, those that run may be taken for queued');
select is((pg_temp.tick('half')).jobs + (pg_temp.tick('half')).jobs, 10, 'so two ticks fill the queue then');
select is(pg_temp.queued('half'), 10::bigint, 'to the bound');
select is((pg_temp.tick('half')).jobs, 0, 'and no further');

-- Announcements.
select is(dispatch_take_room(dispatch_policy('half'), jobs, dispatch_now()), room, sentence)
from (values
  (0, 0, 'nothing takes no room'),
  (7, 0, 'where there is no room nothing can be taken')
) as takes (jobs, room, sentence);
do $$ begin perform pg_temp.start('half', 4); end; $$;
select is(dispatch_take_room(dispatch_policy('half'), jobs, dispatch_now()), room, sentence)
from (values
  (3, 3, 'what is left is taken'),
  (4, 4, 'up to the last'),
  (9, 4, 'but no more; what the same transaction has announced before is no other''s')
) as takes (jobs, room, sentence);
select is(dispatch_take_room(dispatch_policy('bound'), 123456, dispatch_now()), 123456, 'without a bound there is room for all');

-- Who goes, when there is little room.
do $$
begin
  perform pg_temp.at(100);
  perform pg_temp.define('weights', 12, '{"fairness": {"weight": {"ctx": "w"}}}');
  perform pg_temp.stage('weights', 3, 'a', '{"w": 3}'), pg_temp.stage('weights', 1, 'b', '{"w": 1}') from generate_series(1, 16);
end;
$$;
select is(pg_temp.shares('weights'), 'a9 b3', 'an empty queue that cannot take all is shared by weight');
do $$ begin perform pg_temp.start('weights', 4), pg_temp.at(101); end; $$;
select is(pg_temp.shares('weights'), 'a3 b1', 'so is what room comes later');
do $$
begin
  for v_n in 102 .. 113 loop
    perform pg_temp.start('weights', 1), pg_temp.at(v_n);
    perform dispatch_tick('weights');
  end loop;
end;
$$;
select is(
  (select string_agg(partition_key || total_admitted, ' ' order by partition_key) from dispatch_partitions where policy_name = 'weights'), 'a21 b7',
  'and where it comes one by one, weights hold over time');
select is(pg_temp.queued('weights'), 12::bigint, 'while the queue is full all the time');

do $$
begin
  perform pg_temp.at(200);
  perform pg_temp.define('even', 10);
  perform pg_temp.stage('even', 50, 'a');
  perform pg_temp.at(201);
  perform pg_temp.stage('even', 1, 'b');
  perform pg_temp.at(202);
  perform pg_temp.stage('even', 50, 'c');
  perform pg_temp.at(203);
end;
$$;
select is(pg_temp.shares('even'), 'a5 b1 c4', 'of equal weights each gets as much, and what one does not want goes to the others');
select is(
  (select string_agg(partition_key || ' ' || coalesce(blocked_reason, 'free'), ', ' order by partition_key) from dispatch_partitions where policy_name = 'even'),
  'a free, b free, c free', 'whose limits hold none of them');
do $$ begin perform pg_temp.start('even', 1), pg_temp.at(204); end; $$;
select results_eq(
  $$select partitions_seen, partitions_admitted, partitions_denied, jobs_admitted, denied_reasons from dispatch_tick('even')$$,
  $$values (2, 1, 1, 1, '{"queue_full": 1}'::jsonb)$$, 'with room for one, one is admitted one and the other says that the queue is full');
select results_eq(
  $$select partition_key, total_admitted, blocked_reason, due_at from dispatch_partitions where policy_name = 'even' order by 1$$,
  $$values ('a', 5::bigint, 'queue_full', dispatch_now()), ('b', 1, null, null), ('c', 5, null, dispatch_now())$$,
  'the one that was served less goes, the other is due at once');

-- A thousand, without being asked.
do $$
begin
  perform pg_temp.at(300);
  perform dispatch_define_policy('default', '{"partition_by": "k", "admission_batch_size": 800}');
  perform pg_temp.stage('default', 900, 'a'), pg_temp.stage('default', 900, 'b');
end;
$$;
do $$
begin
  -- What is little beside the bound may be taken for more than it is, so a tick may leave something to the next.
  while (pg_temp.tick('default')).jobs > 0 loop
    null;
  end loop;
  perform pg_temp.at(301);
  perform pg_temp.stage('default', 1, 'c');
end;
$$;
select is(pg_temp.queued('default'), 1000::bigint, 'by default a thousand jobs may be queued');
select is(
  (select string_agg(partition_key || in_flight_count, ' ' order by partition_key) from dispatch_partitions where policy_name = 'default'), 'a500 b500',
  'shared evenly');
select is(pg_temp.tick('default')::text, '(0,"{""queue_full"": 1}")', 'and not one more, of whomever');
do $$
begin
  perform dispatch_define_policy('default', '{"partition_by": "k", "admission_batch_size": 800, "max_queued": null}');
end;
$$;
select is((pg_temp.tick('default')).jobs, 801, 'null is no bound');

-- The budget and the room.
do $$
begin
  perform pg_temp.at(400);
  perform pg_temp.define('both', 5, '{"tick_admission_budget": 3}');
  perform pg_temp.stage('both', 20, 'a'), pg_temp.stage('both', 20, 'b');
end;
$$;
select is((pg_temp.tick('both')).jobs, 3, 'of a budget of 3 and room for 5 the budget counts');
select is((pg_temp.tick('both')).jobs, 2, 'of a budget of 3 and room for 2 the room does');
select is(pg_temp.tick('both')::text, '(0,"{""queue_full"": 2}")', 'and when it is full, that is the reason');
do $$ begin perform pg_temp.start('both', 4), pg_temp.define('both', 5, '{"tick_admission_budget": 1}'); end; $$;
select is(pg_temp.tick('both')::text, '(1,"{""budget_exhausted"": 1}")', 'where the budget is less, it is the reason');
do $$ begin perform pg_temp.start('both', 1), pg_temp.define('both', 2, '{"tick_admission_budget": 5}'); end; $$;
select is((pg_temp.tick('both')).reasons ? 'budget_exhausted', false, 'where the room is less, the budget is not');

-- What is queued for later.
do $$
begin
  perform pg_temp.at(500);
  perform pg_temp.define('later', 3, '{"retry_strategy": "bypass"}');
  perform pg_temp.stage('later', 10);
  perform dispatch_tick('later');
  perform pg_temp.start('later', 2);
  perform procrastinate_retry_job_v2(id, pg_temp.clock(900), null, null, null) from procrastinate_jobs where task_name = 'later' and status = 'doing';
end;
$$;
select is(pg_temp.queued('later'), 3::bigint, 'where retries go past the policy, they are in the queue');
select is(pg_temp.room('later'), 2, 'but those that are planned for later take no room');
select is((pg_temp.tick('later')).jobs, 2, 'so others go');
select is((pg_temp.tick('later')).jobs, 0, 'to the bound');
do $$ begin perform pg_temp.at(900); end; $$;
select is(pg_temp.room('later'), 0, 'when their time has come they wait for a worker like others');
do $$ begin perform pg_temp.start('later', 4); end; $$;
select is(pg_temp.room('later'), 2, 'and count until they start');

do $$
begin
  perform pg_temp.at(1000);
  perform pg_temp.define('parked', 2);
  perform pg_temp.stage('parked', 6);
  perform dispatch_tick('parked');
  perform pg_temp.start('parked', 2);
  perform procrastinate_retry_job_v2(id, pg_temp.clock(1900), null, null, null) from procrastinate_jobs where task_name = 'parked' and status = 'doing';
end;
$$;
select is((pg_temp.tick('parked')).jobs, 2, 'a retry that is parked takes no room');
do $$
begin
  perform pg_temp.at(1900);
  perform dispatch_tick('parked');
end;
$$;
select is((select count(*) from dispatch_staged_jobs where policy_name = 'parked' and parked), 2::bigint, 'and is not released into a full queue');

-- The operator's hand.
do $$
begin
  perform pg_temp.at(2000);
  perform pg_temp.define('by_hand', 2);
  perform pg_temp.stage('by_hand', 6, 'a'), pg_temp.stage('by_hand', 3, 'b');
  perform dispatch_tick('by_hand');
  perform dispatch_tick('by_hand');
end;
$$;
select is(dispatch_force_admit('by_hand', 'a', 2), 2, 'dispatch_force_admit goes past a full queue');
select is(pg_temp.room('by_hand'), 0, 'there is no less room than none');
do $$ begin perform pg_temp.start('by_hand', 2); end; $$;
select is((pg_temp.tick('by_hand')).jobs, 0, 'and none before what is too much has gone');
do $$ begin perform pg_temp.start('by_hand', 1); end; $$;
select is((pg_temp.tick('by_hand')).jobs, 1, 'then ticks go on');
create temporary table drained as select * from dispatch_drain('by_hand');
select is((select array[admitted, ready, later] from drained), '{4,0,0}', 'dispatch_drain goes past a full queue too');
select is((pg_temp.tick('by_hand')).jobs, 0, 'after which nothing waits');
select is(dispatch_next_due('by_hand'), null, 'and nobody has to look');

-- Beside what else holds jobs.
do $$
begin
  perform pg_temp.at(3000);
  perform pg_temp.define('gated', 2, '{"gates": [{"type": "throttle", "rate": 1, "per": 100, "burst": 5}]}');
  perform pg_temp.stage('gated', 9);
  perform dispatch_tick('gated');
end;
$$;
select is((pg_temp.partition('gated')).gate_state -> 'throttle' -> 'tokens', '3', 'only what goes is paid for');
do $$ begin perform dispatch_tick('gated'); end; $$;
select is((pg_temp.partition('gated')).gate_state -> 'throttle' -> 'tokens', '3', 'a full queue costs no token');
do $$
begin
  for v_n in 1 .. 3 loop
    perform pg_temp.start('gated', 1);
    perform dispatch_tick('gated');
  end loop;
end;
$$;
select results_eq(
  $$select blocked_reason, due_at from pg_temp.partition('gated')$$, $$values ('throttle_empty', pg_temp.clock(3100))$$, 'where the gate holds as well, it is the gate that is waited for');
select is(dispatch_next_due('gated'), pg_temp.clock(3100), 'by the driver too');

do $$
begin
  perform pg_temp.define('held', 1);
  perform pg_temp.stage('held', 3, 'a'), pg_temp.stage('held', 3, 'b'), pg_temp.stage('held', 3, 'c');
  perform dispatch_tick('held');
  perform dispatch_pause('held', 'b');
  perform dispatch_tick('held');
end;
$$;
select results_eq(
  $$select partition_key, blocked_reason, due_at from dispatch_partitions where policy_name = 'held' order by 1$$,
  $$values ('a', 'queue_full', dispatch_now()), ('b', 'paused', 'infinity'), ('c', 'queue_full', dispatch_now())$$, 'a pause is told before the queue');
do $$ begin perform dispatch_pause('held'); end; $$;
select is((select partitions_seen from dispatch_tick('held')), 0, 'of a paused policy no partition is looked at');
select is(dispatch_next_due('held'), null, 'full or not');

-- Who is at the head of those that wait stays there.
do $$
begin
  perform pg_temp.at(4000);
  perform pg_temp.define('place', 1, '{"partition_batch_size": 2}');
  for v_n in 1 .. 5 loop
    perform pg_temp.at(4000 + v_n), pg_temp.stage('place', 2, 'p' || v_n);
  end loop;
  perform pg_temp.at(4010);
  perform dispatch_tick('place');
  perform dispatch_tick('place');
end;
$$;
select is(
  (select string_agg(partition_key, ' ' order by partition_key) from dispatch_partitions where policy_name = 'place' and blocked_reason = 'queue_full'), 'p2 p3 p4',
  'beside the one that was left out of the last room, as many as a tick looks at are told that the queue is full');
select is((select string_agg(due_at::text, ' ' order by due_at) from dispatch_partitions where policy_name = 'place' and partition_key in ('p3', 'p4')),
  format('%s %s', pg_temp.clock(4003), pg_temp.clock(4004)), 'and are due as before, at the head of all others');
-- What came to the queue later and was deferred before goes before; not for ever.
do $$
begin
  perform pg_temp.at(5000);
  perform pg_temp.define('order', 4);
  perform pg_temp.stage('order', 60, 'a');
  perform dispatch_tick('order');
  perform pg_temp.at(5001);
  perform pg_temp.stage('order', 1, 'b');
  perform dispatch_force_admit('order', 'b', 1);
  perform pg_temp.start('order', 1);
end;
$$;
create function pg_temp.start_and_tick(p_seconds double precision)
returns text
language plpgsql
as $$
begin
  perform pg_temp.at(p_seconds), pg_temp.start('order', 1);
  return pg_temp.tick('order')::text;
end;
$$;
-- Would a tick admit a job of this partition, if it were staged?
create function pg_temp.goes(p_key text, p_more jsonb)
returns boolean
language plpgsql
as $$
declare
  v_admitted bigint;
begin
  begin
    perform dispatch_stage_many('order', jsonb_build_array(jsonb_build_object('task_name', 'order', 'context', jsonb_build_object('k', p_key)) || p_more));
    perform dispatch_tick('order');
    select total_admitted into v_admitted from dispatch_partitions where policy_name = 'order' and partition_key = p_key;
    raise exception using errcode = 'UNDO1';
  exception
    when sqlstate 'UNDO1' then
      return v_admitted > 0;
  end;
end;
$$;
-- The one of b while something is changed about it: is it still waited for?
create function pg_temp.holds(p_change text)
returns boolean
language plpgsql
as $$
declare
  v_held boolean;
begin
  begin
    execute p_change using (select job_id from dispatch_inflight_jobs where policy_name = 'order' and partition_key = 'b');
    v_held := (pg_temp.tick('order')).jobs = 0;
    raise exception using errcode = 'UNDO1';
  exception
    when sqlstate 'UNDO1' then
      return v_held;
  end;
end;
$$;
select is(
  (select string_agg(pg_temp.start_and_tick(5001 + n), ' ' order by n) from generate_series(1, 4) as n), '(1,{}) (1,{}) (1,{}) (1,{})',
  'of a tenant that came before, as many go before a job in the queue as wait there');
select is(pg_temp.start_and_tick(5006), '(0,"{""queue_full"": 1}")', 'but not one more');
select is(pg_temp.tick('order')::text, '(0,"{""queue_full"": 1}")', 'however often one ticks');
select is(dispatch_next_due('order'), pg_temp.clock(5006.25), 'a driver is to look again after a quarter of a second');
select results_eq(
  $$select item, blocks, reason, numbers - 'state', message
    from dispatch_explain((select min(id) from dispatch_staged_jobs where policy_name = 'order')) where item = 'order'$$,
  $$select 'order', true, 'queue_full', jsonb_build_object('job_id', job_id),
    format('It would go before job %s, which waits for a worker and was let wait for enough others.', job_id)
    from dispatch_inflight_jobs where policy_name = 'order' and partition_key = 'b'$$,
  'explain says so');
select results_eq(
  $$select blocks, reason from dispatch_explain((select min(id) from dispatch_staged_jobs where policy_name = 'order')) where item = 'job'$$,
  $$values (true, 'queue_full')$$, 'in the first row as well');
select is(pg_temp.goes('c', more), goes, sentence)
from (values
  ('{}'::jsonb, true, 'what was deferred after it goes meanwhile'),
  ('{"priority": -1}', true, 'also with a lower priority')
) as jobs (more, goes, sentence);
update dispatch_staged_jobs set priority = 1 where id = (select max(id) from dispatch_staged_jobs where policy_name = 'order');
select is((pg_temp.tick('order')).jobs, 1, 'and so does what has a higher priority');
update dispatch_staged_jobs set queue_name = 'elsewhere' where id = (select min(id) from dispatch_staged_jobs where policy_name = 'order');
do $$ begin perform pg_temp.start('order', 1); end; $$;
select is((pg_temp.tick('order')).jobs, 1, 'or is for another queue');
do $$ begin perform pg_temp.define('order', 10); end; $$;
select is(pg_temp.holds(change), holds, sentence)
from (values
  ('select $1', true, 'while it may start it holds them'),
  ('update procrastinate_jobs set scheduled_at = dispatch_now() + interval ''1 s'' where id = $1', false, 'not when it is put off'),
  ('update procrastinate_jobs set scheduled_at = dispatch_now() where id = $1', true, 'to a time that has not come'),
  ('update procrastinate_jobs set lock = ''l'' where id = $1', true, 'with a lock of its own it does'),
  ('update procrastinate_jobs set lock = ''l'' where id = $1 or id = (select id from procrastinate_jobs where status = ''doing'' limit 1)', false,
    'not with a running job''s'),
  ('update procrastinate_jobs set lock = ''l'' where id = $1 or id = (select id from procrastinate_jobs where status = ''todo'' order by id limit 1)', false,
    'nor with that of one before it'),
  ('update procrastinate_jobs set lock = ''l'', priority = 1 where id = $1', false, 'with a priority of its own it goes first anyway'),
  ('update dispatch_policies set max_queued = null where $1 > 0 and policy_name = ''order''', false, 'and without a bound there is no waiting')
) as changes (change, holds, sentence);
do $$ begin perform pg_temp.start('order', 10), pg_temp.at(5010); end; $$;
select is((pg_temp.tick('order')).jobs, 10, 'once it has started, all go on');
select * from finish();
rollback;
