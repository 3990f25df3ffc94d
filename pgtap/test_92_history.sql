-- Since when jobs wait, samples of policies, the audit log.
begin;
select plan(45);

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

create function pg_temp.stage(p_policy text, p_jobs integer, p_more jsonb default '{}')
returns void
language plpgsql
as $$
begin
  perform dispatch_stage_many(p_policy, (select jsonb_agg('{"task_name": "t"}' || p_more) from generate_series(1, p_jobs)));
end;
$$;

-- Since when, in seconds of the test's clock.
create function pg_temp.since(p_policy text)
returns double precision
language sql
begin atomic
  select date_part('epoch', waiting_since - pg_temp.clock(0)) from dispatch_partitions where policy_name = p_policy;
end;

create function pg_temp.tick(p_policy text)
returns integer
language sql
begin atomic
  select jobs_admitted from dispatch_tick(p_policy);
end;

-- dispatch_waiting_since.
select is(dispatch_waiting_since(3, null, pg_temp.clock(0), pg_temp.clock(9)), pg_temp.clock(9), 'the first jobs wait from the fold on');
select is(dispatch_waiting_since(3, null, pg_temp.clock(20), pg_temp.clock(9)), pg_temp.clock(20), 'or from their time on');
select is(dispatch_waiting_since(3, pg_temp.clock(5), pg_temp.clock(0), pg_temp.clock(9)), pg_temp.clock(5), 'more jobs do not wait longer than the first');
select is(dispatch_waiting_since(3, pg_temp.clock(50), pg_temp.clock(0), pg_temp.clock(9)), pg_temp.clock(9), 'a job that may go counts before one that may not yet');
select is(dispatch_waiting_since(3, pg_temp.clock(50), null, pg_temp.clock(9)), pg_temp.clock(50), 'where none came in, nothing changes');
select is(dispatch_waiting_since(3, null, null, pg_temp.clock(9)), pg_temp.clock(9), 'what is not known begins now');
select is(dispatch_waiting_since(0, pg_temp.clock(5), pg_temp.clock(0), pg_temp.clock(9)), null, 'no job, no wait');
select is(dispatch_waiting_since(-1, pg_temp.clock(5), pg_temp.clock(0), pg_temp.clock(9)), null, 'nor below none');

-- In a partition's life.
do $$
begin
  perform dispatch_define_policy('p', '{"gates": [{"type": "throttle", "rate": 1, "per": 10}]}');
  perform pg_temp.stage('p', 3);
  perform pg_temp.at(1);
  perform dispatch_tick('p');
end;
$$;
select is(pg_temp.since('p'), 1::double precision, 'where a tick admits and leaves some, they wait since that tick');
do $$
begin
  perform pg_temp.at(6);
  perform pg_temp.stage('p', 1);
  perform dispatch_tick('p');
end;
$$;
select is(pg_temp.since('p'), 1::double precision, 'a tick that admits none, and jobs that come in, change nothing');
select is((select waiting_since from dispatch_partition_status where policy_name = 'p'), pg_temp.clock(1), 'the view of partitions says so');
select is((select oldest_wait from dispatch_policy_status where policy_name = 'p'), interval '5 seconds', 'and that of policies how long it is');
select is((select waiting from dispatch_policy_status where policy_name = 'p'), 3::bigint, 'and how many wait');
do $$
begin
  perform pg_temp.at(11);
  perform dispatch_tick('p');
end;
$$;
select is(pg_temp.since('p'), 11::double precision, 'the next admission begins it anew');
do $$
begin
  perform dispatch_cancel(id) from dispatch_staged_jobs;
  perform dispatch_tick('p');
end;
$$;
select is(pg_temp.since('p'), null, 'when the last is cancelled, none waits');
select is((select oldest_wait from dispatch_policy_status where policy_name = 'p'), null, 'nor in the view');

-- Jobs that wait for their time.
do $$
begin
  perform pg_temp.at(100);
  perform dispatch_define_policy('f', '{"gates": [{"type": "concurrency", "max": 1}]}');
  perform pg_temp.stage('f', 2, jsonb_build_object('scheduled_at', pg_temp.clock(500)));
  perform dispatch_tick('f');
end;
$$;
select is(pg_temp.since('f'), 500::double precision, 'jobs that wait for their time wait from then on');
select is((select waiting_since from dispatch_partition_status where policy_name = 'f'), null, 'until then the view shows no wait');
select is((select oldest_wait from dispatch_policy_status where policy_name = 'f'), null, 'of the policy neither');
select is((select array[pending, waiting] from dispatch_policy_status where policy_name = 'f'), '{2,0}', 'they are pending and do not wait');
do $$
begin
  perform pg_temp.at(530);
end;
$$;
select is((select oldest_wait from dispatch_policy_status where policy_name = 'f'), interval '30 seconds', 'then they do');
do $$
begin
  perform pg_temp.stage('f', 1, jsonb_build_object('scheduled_at', pg_temp.clock(900), 'priority', -1));
  perform dispatch_tick('f');
end;
$$;
select is(pg_temp.since('f'), 530::double precision, 'one admitted, one left to wait');
do $$
begin
  perform dispatch_force_admit('f', '', 1);
end;
$$;
select is(pg_temp.since('f'), 900::double precision, 'when only the future is left, nothing waits any more');
do $$
begin
  perform pg_temp.stage('f', 1, jsonb_build_object('scheduled_at', pg_temp.clock(700)));
  perform dispatch_fold('f', dispatch_now());
end;
$$;
select is(pg_temp.since('f'), 700::double precision, 'the earlier of two times counts');
do $$
begin
  perform pg_temp.stage('f', 1);
  perform dispatch_fold('f', dispatch_now());
end;
$$;
select is(pg_temp.since('f'), 530::double precision, 'and a job that may go at once before any');
do $$
begin
  perform dispatch_cancel(min(id)) from dispatch_staged_jobs where scheduled_at is null and policy_name = 'f';
  perform pg_temp.at(540);
  perform dispatch_tick('f');
end;
$$;
select is(pg_temp.since('f'), 700::double precision, 'a tick that finds the ready one cancelled sees that none waits');

-- Paused.
do $$
begin
  perform pg_temp.at(1000);
  perform dispatch_pause('f', '');
  perform dispatch_tick('f');
end;
$$;
select is((select oldest_wait from dispatch_policy_status where policy_name = 'f'), null, 'what is paused is not waited for');
do $$
begin
  perform dispatch_resume('f', '');
  perform dispatch_pause('f');
  perform dispatch_tick('f');
end;
$$;
select is((select oldest_wait from dispatch_policy_status where policy_name = 'f'), null, 'nor while the whole policy is paused');
select results_eq($$ select due, oldest_due_at from dispatch_policy_status where policy_name = 'f' $$,
  $$ values (0::bigint, null::timestamptz) $$, 'of which nothing is due then');

-- Queued and running.
select is((select array[queued, running] from dispatch_policy_status where policy_name = 'f'), '{2,0}', 'slots of jobs that no worker has taken are queued');
select is((select oldest_queued_at from dispatch_policy_status where policy_name = 'f'), pg_temp.clock(530), 'since the first was admitted');
do $$
begin
  update procrastinate_jobs set status = 'doing' where id = (select min(job_id) from dispatch_inflight_jobs where policy_name = 'f');
end;
$$;
select is((select array[queued, running] from dispatch_policy_status where policy_name = 'f'), '{1,1}', 'one that a worker has taken runs');

-- Samples.
do $$
begin
  delete from dispatch_policy_samples;
  delete from dispatch_policies where policy_name = 'p';
  perform dispatch_resume('f');
  perform dispatch_tick('f');
end;
$$;
select is((select affected from dispatch_sweep() where task = 'policies sampled'), 1::bigint, 'a sweep writes a sample of each policy');
select results_eq(
  $$ select policy_name, at, partitions, pending, waiting, in_flight, due, blocked, queued, oldest_wait_seconds, oldest_queued_seconds, lag_ms
  from dispatch_policy_samples $$,
  $$ select 'f', pg_temp.clock(1000), 1::bigint, 2::bigint, 2::bigint, 2::bigint, 0::bigint, 1::bigint, 1::bigint, 300::float8, 470::float8, null::float8 $$,
  'with what it saw');
do $$
begin
  perform pg_temp.at(1009.9);
end;
$$;
select is((select affected from dispatch_sweep() where task = 'policies sampled'), 0::bigint, 'not more often than each 10 seconds');
do $$
begin
  perform dispatch_define_policy('a', '{"partition_by": "k", "gates": [{"type": "adaptive_concurrency", "initial_max": 1, "target_lag_ms": 9}]}');
  perform dispatch_stage('a', 't', jsonb_build_object('k', k)) from generate_series(1, 2) as k;
  perform dispatch_tick('a');
  insert into dispatch_adaptive_stats (partition_id, gate_name, current_max, ewma_lag_ms, updated_at)
  values (dispatch_partition_id('a', '1'), 'adaptive_concurrency', 1, 10, dispatch_now()),
    (dispatch_partition_id('a', '2'), 'adaptive_concurrency', 1, 30, dispatch_now());
  perform pg_temp.at(1010);
  perform dispatch_sweep();
end;
$$;
select is((select lag_ms from dispatch_policy_samples where policy_name = 'a'), 20::double precision, 'the lag is the mean of the adaptive gates');
select is((select count(*) from dispatch_policy_samples where policy_name = 'f'), 2::bigint, 'samples make a series');
select is((select array[pending, oldest_wait_seconds] from dispatch_policy_history where policy_name = 'f' and minute = pg_temp.clock(960)), '{2,310}', 'of which each minute shows the highest');
do $$
begin
  perform dispatch_set('metrics_retention', 3600);
  perform pg_temp.at(1010 + 3600);
end;
$$;
select is((select affected from dispatch_sweep() where task = 'policy samples'), 1::bigint, 'a sample older than metrics_retention goes');
select is((select min(at) from dispatch_policy_samples), pg_temp.clock(1010), 'the others stay');

-- The audit log.
do $$
begin
  perform dispatch_audit('ann', 'pause', 'f', 'k', null, '{"paused": true}');
  perform dispatch_audit(repeat('x', 300), 'requeue', null, null, 7, null);
end;
$$;
select results_eq(
  $$ select at, actor, action, policy_name, partition_key, job_id, outcome from dispatch_audit_log order by id $$,
  $$ values (pg_temp.clock(4610), 'ann', 'pause', 'f', 'k', null::bigint, '{"paused": true}'::jsonb),
    (pg_temp.clock(4610), repeat('x', 200), 'requeue', null, null, 7, '{}') $$,
  'an entry says who did what, and when');
select throws_ok($$ select dispatch_audit('', 'pause', 'f', null, null, null) $$, 'PD009', 'an audit entry needs an actor and an action', 'not without an actor');
select throws_ok($$ select dispatch_audit('ann', null, 'f', null, null, null) $$, 'PD009', 'an audit entry needs an actor and an action', 'nor without an action');
do $$
begin
  perform pg_temp.at(4610 + 7776000);
  perform dispatch_sweep();
end;
$$;
select is((select count(*) from dispatch_audit_log), 2::bigint, 'entries are kept for audit_retention');
do $$
begin
  perform pg_temp.at(4610 + 7776000.001);
end;
$$;
select is((select affected from dispatch_sweep() where task = 'audit entries'), 2::bigint, 'and then removed');

select * from finish();
rollback;
