-- Counters that never go back, whatever becomes of the samples.
begin;
select plan(24);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';

create function pg_temp.at(p_seconds double precision)
returns void
language plpgsql
as $$
begin
  perform set_config('dispatch.fake_now', ('2026-01-01 00:00:00+00'::timestamptz + make_interval(secs => p_seconds))::text, true);
end;
$$;

create function pg_temp.sample(p_policy text, p_duration_ms double precision, p_admitted integer default 0, p_failures integer default 0, p_reasons jsonb default '{}')
returns void
language sql
begin atomic
  insert into dispatch_tick_samples (at, policy_name, partitions_seen, partitions_admitted, partitions_denied, jobs_admitted,
    handoff_failures, denied_reasons, duration_ms)
  values (dispatch_now(), p_policy, 1, 0, 0, p_admitted, p_failures, p_reasons, p_duration_ms);
end;

create function pg_temp.total(p_counter text, p_label text default '', p_policy text default 'p')
returns numeric
language sql
begin atomic
  select value from dispatch_totals where policy_name = p_policy and counter = p_counter and label = p_label;
end;

create function pg_temp.counted(p_limit integer default 10000)
returns bigint
language sql
return dispatch_count_ticks(dispatch_now(), p_limit);

select is_empty('select * from dispatch_totals', 'without a policy there is nothing to count');

do $$
begin
  perform dispatch_define_policy('p', '{"partition_by": "k", "gates": [{"type": "concurrency", "max": 1}]}');
end;
$$;

select results_eq(
  'select counter, count(*), sum(value) from dispatch_totals group by counter order by counter',
  $$ values ('handoff_failures', 1::bigint, 0::numeric), ('jobs_admitted', 1, 0), ('partitions_denied', 8, 0), ('tick_seconds', 1, 0),
    ('tick_seconds_bucket', 12, 0), ('ticks', 1, 0) $$,
  'each counter of a new policy is there and stands at 0');

do $$
begin
  perform dispatch_stage_many('p', '[{"task_name": "t", "args": {"k": 1}}, {"task_name": "t", "args": {"k": 1}}]');
  perform dispatch_tick('p');
  perform pg_temp.at(10);
  perform dispatch_tick('p');
end;
$$;
select is(pg_temp.total('ticks'), 2::numeric, 'a tick counts at once');
select is(pg_temp.total('jobs_admitted'), 1::numeric, 'so do the jobs that it admitted');
select is(pg_temp.total('partitions_denied', 'concurrency_full'), 1::numeric, 'and the partitions that it denied, by reason');
select is(pg_temp.total('tick_seconds_bucket', '25.0'), 2::numeric, 'its time is in a bucket');

create temporary table before as select * from dispatch_totals;
select is(pg_temp.counted(), 2::bigint, 'the sweep adds up what is not counted yet');
select is(pg_temp.counted(), 0::bigint, 'each sample once');
select set_eq('select * from dispatch_totals', 'select * from before', 'which changes nothing for who reads');

do $$
begin
  delete from dispatch_tick_samples;
end;
$$;
select set_eq('select * from dispatch_totals', 'select * from before', 'nor does it when the samples go');

do $$
begin
  perform dispatch_drop_policy('p', true);
  perform dispatch_define_policy('p', '{}');
  perform dispatch_define_policy('q', '{}');
  perform pg_temp.sample('p', 5, 3, 2, '{"paused": 4, "throttle_empty": 1}');
  perform pg_temp.sample('p', 30000, 4, 0, '{"paused": 1}');
  perform pg_temp.sample('q', 5.001, 1);
  perform pg_temp.sample('q', -1);
end;
$$;
select is(pg_temp.total('jobs_admitted'), 8::numeric, 'a policy that is defined anew goes on counting');
select is(pg_temp.counted(1), 1::bigint, 'a bite is bounded');
select is(pg_temp.total('jobs_admitted'), 8::numeric, 'and half of the way changes nothing either');
select is(pg_temp.counted(), 3::bigint, 'the rest is next');
select is(pg_temp.total('handoff_failures'), 2::numeric, 'failures are summed up');
select is(pg_temp.total('partitions_denied', 'paused'), 5::numeric, 'so are denials, reason by reason');
select is(pg_temp.total('tick_seconds_bucket', '0.005', 'q'), 1::numeric, 'a tick beyond a bound is not in its bucket');
select is(pg_temp.total('tick_seconds_bucket', '0.01', 'q'), 2::numeric, 'but in all above');
select is(pg_temp.total('tick_seconds_bucket', '25.0') - 2, 1::numeric, 'the longest are in none');
select is(pg_temp.total('tick_seconds', '', 'q'), 0.005001, 'a clock that was set back takes no time away');

-- Retention.
do $$
begin
  perform pg_temp.sample('p', 1);
  perform pg_temp.at(10 + 86401);
  create temporary table retained as select * from dispatch_sweep_old(dispatch_now(), 100);
end;
$$;
select is((select samples from retained), 4::bigint, 'samples past metrics_retention go');
select is((select count(*) from dispatch_tick_samples where not counted), 1::bigint, 'except for those that are not counted yet');

do $$
begin
  perform dispatch_drop_policy('q', true);
  perform pg_temp.counted();
end;
$$;
select is_empty($$ select * from dispatch_tick_totals where policy_name = 'q' $$,
  'what a policy added up to is forgotten once it is gone for metrics_retention');
select isnt_empty($$ select * from dispatch_tick_totals where policy_name = 'p' $$, 'that of a policy that is idle stays');

select * from finish();
rollback;
