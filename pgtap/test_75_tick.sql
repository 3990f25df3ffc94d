-- The tick as a whole, over one policy or all, and what tells its caller when to come back.
begin;
select plan(54);

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

create function pg_temp.stage(p_policy text, p_key text, p_more jsonb default '{}')
returns bigint
language sql
begin atomic
  select id
  from dispatch_stage_many(p_policy, jsonb_build_array(
    jsonb_build_object('task_name', p_policy, 'context', jsonb_build_object('k', p_key, 's', p_key)) || p_more)) as id;
end;

select is((select count(*) from dispatch_tick()), 0::bigint, 'without policies there is nothing to tick');
select is(dispatch_next_due(), null, 'and nothing to wait for');

do $$
begin
  perform dispatch_define_policy(name, '{"partition_by": "k", "shard_by": "s"}') from unnest(array['c', 'a', 'b']) as name;
  perform pg_temp.stage('a', 'north');
  perform pg_temp.stage('a', 'south');
  perform pg_temp.stage('c', 'north');
end;
$$;
select results_eq(
  $$ select policy_name, partitions_seen, jobs_admitted from dispatch_tick(p_shard => 'north') $$,
  $$ values ('a', 1, 1), ('b', 0, 0), ('c', 1, 1) $$, 'a tick of all policies gives one row a policy, and keeps to the shard');
select results_eq(
  $$ select policy_name, jobs_admitted from dispatch_tick('a') $$, $$ values ('a', 1) $$, 'a tick of one policy gives one row');
select is((select count(*) from procrastinate_jobs), 3::bigint, 'every job has arrived');

select throws_ok($$ select dispatch_tick('nobody') $$, 'PD001', null, 'an unknown policy is an error');
select throws_ok($$ select dispatch_admit('nobody') $$, 'PD001', null, 'for a driver too');

-- One policy that fails.
do $$
begin
  perform pg_temp.stage(name, 'x') from unnest(array['a', 'b', 'c']) as name;
  update dispatch_policies set gates = '[{"type": "unheard_of", "name": "x"}]' where policy_name = 'b';
end;
$$;
select results_eq(
  $$ select policy_name, jobs_admitted, denied_reasons from dispatch_tick() $$,
  $$ values ('a', 1, '{}'::jsonb), ('b', 0, '{"tick_error": 1}'), ('c', 1, '{}') $$, 'a policy that fails stops no other, and says that it failed');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'b'), 1::bigint, 'its jobs stay staged');
select is((select count(*) from dispatch_inbox where policy_name = 'b'), 1::bigint, 'with all that belongs to them');
select throws_ok($$ select dispatch_tick('b') $$, '20000', null, 'ticked alone, it raises its error');
do $$
begin
  perform dispatch_define_policy('b', '{"partition_by": "k", "fairness": {"half_life": 30}}');
end;
$$;
select is((select sum(jobs_admitted) from dispatch_tick()), 1::bigint, 'mended, it goes on');

-- Whatever it fails with, also what says nothing of a policy; but not when it says the same of all.
create function pg_temp.fail() returns trigger language plpgsql as $$ begin raise exception 'no room' using errcode = tg_argv[0]; end $$;
create function pg_temp.failing(p_sqlstate text, p_policies text[])
returns text
language plpgsql
as $$
declare
  v_rows text;
begin
  execute format('create trigger weather before insert on dispatch_tick_samples for each row when (new.policy_name = any (%L::text[])) execute function pg_temp.fail(%L)',
    p_policies, p_sqlstate);
  perform pg_temp.stage(name, 'x') from unnest(array['a', 'b', 'c']) as name;
  begin
    select string_agg(format('%s: %s %s', policy_name, jobs_admitted, denied_reasons), ', ' order by policy_name)
    into v_rows
    from dispatch_tick();
  exception
    when others or query_canceled or assert_failure then
      v_rows := format('%s, %s staged', sqlstate, (select count(*) from dispatch_staged_jobs));
  end;
  drop trigger weather on dispatch_tick_samples;
  perform dispatch_tick();
  return v_rows || case when exists (select from dispatch_staged_jobs) then ', and some wait for ever' else '' end;
end;
$$;
select is(pg_temp.failing(failure, '{b}'), 'a: 1 {}, b: 0 {"tick_error": 1}, c: 1 {}', 'a policy that fails with ' || failure || ' stops no other')
from unnest(array['42501', 'P0004', 'XX000', '53100', '25006', 'P0001', '23514']) as failure;
select is(pg_temp.failing(failure, '{a,b}'), 'a: 0 {"tick_error": 1}, b: 0 {"tick_error": 1}, c: 1 {}', 'nor do several that fail with ' || failure)
from unnest(array['42501', 'XX000']) as failure;
select is(pg_temp.failing(failure, '{a,b,c}'), failure || ', 3 staged', 'when all fail with ' || failure || ', that is raised, and nothing is done')
from unnest(array['42501', 'XX000', '53100', '25006']) as failure;
select is(
  pg_temp.failing(failure, '{a,b,c}'), 'a: 0 {"tick_error": 1}, b: 0 {"tick_error": 1}, c: 0 {"tick_error": 1}',
  'when all fail with ' || failure || ', which says that it is of them, each says so')
from unnest(array['P0004', 'P0001', '23514']) as failure;
select is(pg_temp.failing('57014', '{b}'), '57014, 3 staged', 'a tick that is cancelled ends, whichever policy it is at');

do $$
begin
  create trigger weather before insert on procrastinate_jobs for each row when (new.task_name = 'b') execute function pg_temp.fail('53100');
  perform pg_temp.stage(name, 'x') from unnest(array['a', 'b', 'c']) as name;
end;
$$;
select results_eq(
  $$ select policy_name, jobs_admitted, handoff_failures, denied_reasons from dispatch_tick() $$,
  $$ values ('a', 1, 0, '{}'::jsonb), ('b', 0, 0, '{"tick_error": 1}'), ('c', 1, 0, '{}') $$,
  'a hand-off that fails for what is nobody''s fault fails its policy''s tick');
select is((select array_agg(policy_name) from dispatch_staged_jobs), '{b}', 'and its job stays staged');
select throws_ok($$ select dispatch_tick('b') $$, '53100', 'no room', 'ticked alone, that policy raises it');
do $$
begin
  drop trigger weather on procrastinate_jobs;
  perform dispatch_tick();
end;
$$;

-- When to come back.
select is(dispatch_next_due(), null, 'when nothing waits, there is nothing to come back for');
select is(dispatch_next_due('nobody'), null, 'nor for a policy that does not exist');
do $$
begin
  perform pg_temp.stage('a', 'north');
end;
$$;
select is(dispatch_next_due('a'), pg_temp.clock(0), 'what was just staged is due now');
select is(dispatch_next_due(), pg_temp.clock(0), 'whichever policy it is in');
select is(dispatch_next_due('b'), null, 'but not for another policy');

do $$
begin
  perform dispatch_tick();
  perform pg_temp.stage('a', 'north', jsonb_build_object('scheduled_at', pg_temp.clock(50)));
  perform pg_temp.stage('a', 'south', jsonb_build_object('scheduled_at', pg_temp.clock(40)));
  perform pg_temp.stage('c', 'north', jsonb_build_object('scheduled_at', pg_temp.clock(60)));
  perform dispatch_tick();
end;
$$;
select is(dispatch_next_due(), pg_temp.clock(40), 'the next job''s time is the next thing to wait for');
select is(dispatch_next_due('a', 'north'), pg_temp.clock(50), 'of one shard');
select is(dispatch_next_due(p_shard => 'north'), pg_temp.clock(50), 'in any policy');
select is(dispatch_next_due('c'), pg_temp.clock(60), 'or of one policy');
select is(dispatch_next_due('a', 'west'), null, 'nothing, in a shard without partitions');
do $$
begin
  perform pg_temp.at(45);
end;
$$;
select is(dispatch_next_due(), pg_temp.clock(40), 'what is overdue lies in the past');

do $$
begin
  perform dispatch_pause('a', 'south');
  perform dispatch_tick();
end;
$$;
select is(dispatch_next_due('a'), pg_temp.clock(50), 'a paused partition keeps nobody awake');
do $$
begin
  perform dispatch_pause('c', 'north');
  perform pg_temp.stage('c', 'north');
  perform dispatch_tick('c');
end;
$$;
select is(dispatch_next_due('c'), null, 'nor do several, when there is nothing else');
do $$
begin
  perform dispatch_pause('a');
end;
$$;
select is(dispatch_next_due('a'), null, 'nor does a paused policy');
do $$
begin
  perform pg_temp.stage('a', 'north');
  perform dispatch_tick();
end;
$$;
select is(dispatch_next_due('a'), null, 'whatever is staged in it, once that is folded');
do $$
begin
  perform dispatch_resume('a');
end;
$$;
select is(dispatch_next_due('a'), pg_temp.clock(45), 'resumed, what waited is due');

-- Behind a gate.
do $$
begin
  perform dispatch_define_policy('gated', '{"partition_by": "k", "gates": [{"type": "throttle", "rate": 1, "per": 20}, {"type": "concurrency", "max": 1, "full_backoff": 90}]}');
  perform pg_temp.stage('gated', 'x') from generate_series(1, 2);
  perform dispatch_tick('gated');
end;
$$;
select is(dispatch_next_due('gated'), pg_temp.clock(135), 'behind the gates, the time at which they may open');
do $$
begin
  perform dispatch_finish(job_id, true) from dispatch_inflight_jobs where policy_name = 'gated';
end;
$$;
select is(dispatch_next_due('gated'), pg_temp.clock(45), 'a finish is worth a tick');
do $$
begin
  perform dispatch_tick('gated');
end;
$$;
select is(dispatch_next_due('gated'), pg_temp.clock(65), 'which finds out when the next token comes, and goes round in no loop');
do $$
begin
  perform pg_temp.at(65);
end;
$$;
select is((select jobs_admitted from dispatch_tick('gated')), 1, 'a caller that comes back at that time is not too early');
select is(dispatch_next_due('gated'), null, 'and after the last job there is nothing to come back for');

do $$
begin
  insert into dispatch_inbox (policy_name, partition_id, kind, put_off) values ('gated', dispatch_partition_id('gated', 'held'), 'resumed', true);
end;
$$;
select is(dispatch_next_due('gated'), dispatch_now() + interval '250 ms', 'a note that was put off is looked after now and then');

select * from finish();
rollback;
