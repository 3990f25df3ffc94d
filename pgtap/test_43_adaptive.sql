-- Adaptive concurrency: steps computed by hand, a fold that equals single steps, and what counts as an observation.
begin;
select plan(70);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';

create function pg_temp.at(p_seconds numeric) returns timestamptz language sql
return '2026-01-01 00:00+00'::timestamptz + make_interval(secs => p_seconds::float8);

-- One step ------------------------------------------------------------------------------------------

-- Target 1000 ms, alpha 0.5, factors 0.5 and 0.95: the cap and the average after one observation.
create function pg_temp.step(p_cap integer, p_average float8, p_succeeded boolean, p_lag float8, p_min integer default 1, p_max integer default null, p_alpha float8 default 0.5, p_in_flight integer default null)
returns text language sql
return (select current_max || ' ' || ewma_lag_ms from dispatch_aimd_step(p_cap, p_average, p_succeeded, p_lag, 1000, p_alpha, 0.5, 0.95, p_min, p_max, p_in_flight));

select is(result, expected, sentence)
from (values
  (pg_temp.step(3, 0, true, 100), '4 50', 'a quick success raises the cap by one and the average half way'),
  (pg_temp.step(3, 600, true, 1400), '4 1000', 'an average on target is on target'),
  (pg_temp.step(20, 600, true, 1600), '19 1100', 'an average above it cuts the cap by the overload factor, rounded down'),
  (pg_temp.step(20, 4000, true, 0), '19 2000', 'the average counts, not the one lag'),
  (pg_temp.step(20, 1900, true, 0), '21 950', 'and it counts with the new lag in it'),
  (pg_temp.step(10, 0, false, 0), '5 0', 'a failure halves the cap, however quick it was'),
  (pg_temp.step(7, 0, false, 0), '3 0', 'rounded down'),
  (pg_temp.step(10, 5000, false, 5000), '5 5000', 'a slow failure cuts once, not twice'),
  (pg_temp.step(3, 2000, true, 2000), '2 2000', 'a small cap shrinks by one at least'),
  (pg_temp.step(1, 2000, true, 2000), '1 2000', 'but never below 1'),
  (pg_temp.step(1, 0, false, 0), '1 0', 'a failure neither'),
  (pg_temp.step(8, 0, false, 0, p_min => 6), '6 0', 'nor below min'),
  (pg_temp.step(8, 0, true, 0, p_max => 8), '8 0', 'a success does not raise it above max'),
  (pg_temp.step(20, 0, true, 0, p_max => 8), '8 0', 'a lowered max cuts it'),
  (pg_temp.step(2, 0, true, 0, p_min => 6), '6 0', 'a raised min lifts it'),
  (pg_temp.step(2, 0, true, 0, p_min => 6, p_max => 4), '6 0', 'where max is below min, min holds'),
  (pg_temp.step(3, 0, true, 300, p_alpha => 1), '4 300', 'with an alpha of 1 the average is the last lag'),
  (pg_temp.step(3, 1000, true, 0, p_alpha => 0.25), '4 750', 'a smaller alpha moves it less'),
  (pg_temp.step(10, 0, true, 0, p_in_flight => 5), '11 0', 'a cap of which half is in use grows'),
  (pg_temp.step(11, 0, true, 0, p_in_flight => 5), '11 0', 'one of which less is does not'),
  (pg_temp.step(11, 0, false, 0, p_in_flight => 1), '5 0', 'though it is cut')
) as steps (result, expected, sentence);

-- The knobs -----------------------------------------------------------------------------------------

-- initial_max, target, min, max, alpha, failure factor, overload factor, as the gate counts with them.
create function pg_temp.knobs(p_params text) returns text language sql as $$
  select concat_ws(' ', initial_max, target_lag_ms, floor_max, top_max, alpha, failure_factor, overload_factor)
  from dispatch_aimd_params((select jsonb_object_agg('x.' || key, value) from jsonb_each(
    '{"initial_max": 3, "target_lag_ms": 500, "min": 2, "max": 9, "ewma_alpha": 0.2, "failure_decrease_factor": 0.4, "overload_decrease_factor": 0.9}'::jsonb || p_params::jsonb)), 'x')
$$;

select is(pg_temp.knobs(params), expected, sentence)
from (values
  ('{}', '3 500 2 9 0.2 0.4 0.9', 'numbers in range are taken as they are'),
  ('{"initial_max": null, "target_lag_ms": null, "min": null, "max": null, "ewma_alpha": null, "failure_decrease_factor": null, "overload_decrease_factor": null}',
    '1 1000 1 1000000000 0.5 0.5 0.95', 'each number that could not be looked up has a sound stand-in'),
  ('{"initial_max": -5}', '2 500 2 9 0.2 0.4 0.9', 'initial_max is not below min'),
  ('{"initial_max": 50}', '9 500 2 9 0.2 0.4 0.9', 'nor above max'),
  ('{"min": 0}', '3 500 1 9 0.2 0.4 0.9', 'min is not below 1'),
  ('{"min": 20}', '20 500 20 20 0.2 0.4 0.9', 'a min above max wins'),
  ('{"max": 0}', '2 500 2 2 0.2 0.4 0.9', 'max is not below min'),
  ('{"min": 1e12, "max": 1e12, "initial_max": 1e12}', '1000000000 500 1000000000 1000000000 0.2 0.4 0.9', 'enormous numbers do not overflow'),
  ('{"target_lag_ms": 0}', '3 1000 2 9 0.2 0.4 0.9', 'a target of 0 is none'),
  ('{"target_lag_ms": -7}', '3 1000 2 9 0.2 0.4 0.9', 'nor is one below 0'),
  ('{"ewma_alpha": 0}', '3 500 2 9 0.5 0.4 0.9', 'an alpha of 0 would freeze the average'),
  ('{"ewma_alpha": 1.5}', '3 500 2 9 0.5 0.4 0.9', 'an alpha above 1 would make it swing'),
  ('{"ewma_alpha": 1}', '3 500 2 9 1 0.4 0.9', 'an alpha of 1 is in range'),
  ('{"failure_decrease_factor": 1.5}', '3 500 2 9 0.2 0.5 0.9', 'a failure factor above 1 would grow on failure'),
  ('{"failure_decrease_factor": 0}', '3 500 2 9 0.2 0.5 0.9', 'one of 0 would drive the cap to the floor at once'),
  ('{"overload_decrease_factor": 1}', '3 500 2 9 0.2 0.4 0.95', 'an overload factor of 1 would not decrease'),
  ('{"overload_decrease_factor": -1}', '3 500 2 9 0.2 0.4 0.95', 'one below 0 is none')
) as knobs (params, expected, sentence);

-- The gate ------------------------------------------------------------------------------------------

do $$ begin
  perform dispatch_define_policy('a', '{"partition_by": "k", "gates": [{"type": "adaptive_concurrency", "initial_max": 3, "target_lag_ms": 1000, "min": 2, "full_backoff": 4}]}');
  perform dispatch_define_policy('plain', '{"partition_by": "k", "gates": [{"type": "concurrency", "max": 3}]}');
  perform dispatch_stage('a', 't', '{"k": "x"}', p_scheduled_at => '2030-01-01 00:00+00');
  perform dispatch_stage('a', 't', '{"k": "y"}', p_scheduled_at => '2030-01-01 00:00+00');
  perform dispatch_tick('a');
end $$;

create function pg_temp.learned(p_key text, p_cap integer, p_average float8) returns void language sql as $$
  insert into dispatch_adaptive_stats values (dispatch_partition_id('a', p_key), 'adaptive_concurrency', p_cap, p_average, 0, pg_temp.at(0))
  on conflict (partition_id, gate_name) do update set (current_max, ewma_lag_ms, sample_count) = (p_cap, p_average, 0);
$$;
create function pg_temp.stats(p_key text) returns text language sql stable as $$
  select concat_ws(' ', current_max, ewma_lag_ms, sample_count) from dispatch_adaptive_stats where partition_id = dispatch_partition_id('a', p_key);
$$;
-- What the gate says of partition x with this cap and so many in flight, where max is 12.
create function pg_temp.ask(p_cap integer, p_in_flight integer) returns text language plpgsql as $$
begin
  delete from dispatch_adaptive_stats;
  if p_cap is not null then
    perform pg_temp.learned('x', p_cap, 0);
  end if;
  return (
    select concat_ws(' ', allowed, reason, extract(epoch from retry_at - pg_temp.at(0))::float8, case when retry_at is not null and retry_after_finish is null then 'or a finish' end)
    from unnest(dispatch_gate_adaptive_concurrency(array[row(1, dispatch_partition_id('a', 'x'), 'x', '{}',
      (select literals || '{"adaptive_concurrency.max": 12}' from dispatch_policies where policy_name = 'a'),
      '{}', p_in_flight, 1000, null, null, null)::dispatch_claim], 'adaptive_concurrency', pg_temp.at(0))));
end $$;

select is(pg_temp.ask(cap, in_flight), expected, sentence)
from (values
  (null, 0, '3', 'a new partition begins with initial_max'),
  (null, 2, '1', 'less what is in flight'),
  (10, 4, '6', 'later the learned cap counts'),
  (10, 10, '0 concurrency_full 4 or a finish', 'a full partition rests for its backoff or until a finish'),
  (10, 12, '0 concurrency_full 4 or a finish', 'so does one whose cap was cut below what runs'),
  (1, 1, '1', 'a cap below min counts as min'),
  (2, 0, '3', 'with nothing in flight at least initial_max passes, so that no partition stays at the floor for ever'),
  (2, 1, '1', 'with something in flight the cap holds'),
  (10, 0, '10', 'a cap above initial_max is not lowered by idling'),
  (20, 0, '12', 'a cap above a lowered max counts as max')
) as asked (cap, in_flight, expected, sentence);

-- Folding -------------------------------------------------------------------------------------------

create function pg_temp.adapt(variadic p_observations dispatch_observation[]) returns void language sql as $$
  select dispatch_adapt('a', p_observations, pg_temp.at(50));
$$;
create function pg_temp.saw(p_key text, p_succeeded boolean, p_lag float8) returns dispatch_observation language sql
return row(dispatch_partition_id('a', p_key), p_succeeded, p_lag, null)::dispatch_observation;

do $$ begin
  delete from dispatch_adaptive_stats;
  perform pg_temp.adapt(pg_temp.saw('x', true, 800), pg_temp.saw('y', false, 0), pg_temp.saw('x', true, 1000), pg_temp.saw('x', true, 2000), pg_temp.saw('x', false, 0));
end $$;
-- 3, 0 ms -> 4, 400 -> 5, 700 -> floor(5 * 0.95) = 4, 1350 -> floor(4 * 0.5) = 2, 675
select is(pg_temp.stats('x'), '2 675 4', 'observations are applied one after the other, beginning at initial_max and an average of 0');
select is(pg_temp.stats('y'), '2 0 1', 'each partition for itself, not below min');
select is(updated_at, pg_temp.at(50), 'and dated') from dispatch_adaptive_stats limit 1;
do $$ begin perform pg_temp.adapt(pg_temp.saw('x', true, 325)); end $$;
select is(pg_temp.stats('x'), '3 500 5', 'the next fold goes on where the last one ended');

create function pg_temp.history() returns text language sql stable as $$
  select string_agg(format('%s: %s, %s', extract(epoch from minute - date_trunc('minute', pg_temp.at(0)))::integer, current_max, ewma_lag_ms), '; ' order by minute)
  from dispatch_adaptive_samples
  where partition_id = dispatch_partition_id('a', 'x');
$$;
select is(pg_temp.history(), '0: 2, 675', 'the history has what the first fold of a minute came to');
do $$ begin
  perform dispatch_adapt('a', array[pg_temp.saw('x', true, 500)], pg_temp.at(120));
  perform dispatch_adapt('a', array[pg_temp.saw('x', true, 500)], pg_temp.at(3600));
end $$;
select is(pg_temp.history(), '0: 2, 675; 120: 4, 500; 3600: 5, 500', 'a row a minute');
do $$ begin
  perform dispatch_adapt('a', array[pg_temp.saw('x', true, 500)], pg_temp.at(3720));
end $$;
select is(pg_temp.history(), '120: 4, 500; 3600: 5, 500; 3720: 6, 500', 'of an hour');
do $$ begin perform dispatch_adapt('a', array[row(gen_random_uuid(), true, 5, 1)::dispatch_observation], pg_temp.at(50)), dispatch_adapt('plain', array[pg_temp.saw('x', true, 5)], pg_temp.at(50)); end $$;
select is(count(*), 2::bigint, 'a partition that is gone, or a policy without such a gate, learns nothing') from dispatch_adaptive_stats;

-- 200 observations of no order, folded whole, in bites of 7, and one by one.
create temporary table seen on commit drop as
select i, pg_temp.saw('x', i * 7919 % 10 > 1, (i * 104729 % 2500)::float8) as observation from generate_series(1, 200) as i;
create function pg_temp.fold_by(p_bite integer) returns text language plpgsql as $$
begin
  perform pg_temp.learned('x', 3, 0);
  perform dispatch_adapt('a', bite, pg_temp.at(60)) from (select array_agg(observation order by i) as bite from seen group by (i - 1) / p_bite order by min(i)) as bites;
  return pg_temp.stats('x');
end $$;
select is(pg_temp.fold_by(7), pg_temp.fold_by(1), 'folding in bites equals folding one by one');
select is(pg_temp.fold_by(200), pg_temp.fold_by(1), 'and so does folding all at once');
select isnt(pg_temp.fold_by(200), '3 0 0', 'which is not to say that nothing happens');

do $$ begin
  perform dispatch_define_policy('a', '{"partition_by": "k", "gates": [
    {"type": "adaptive_concurrency", "name": "slow", "initial_max": 3, "target_lag_ms": 10000},
    {"type": "adaptive_concurrency", "name": "quick", "initial_max": {"ctx": "first", "default": 5}, "target_lag_ms": 10}]}');
  delete from dispatch_adaptive_stats;
  perform pg_temp.adapt(pg_temp.saw('x', true, 1000));
end $$;
select results_eq(
  'select gate_name, current_max from dispatch_adaptive_stats order by gate_name', $$values ('quick', 4), ('slow', 4)$$,
  'two adaptive gates learn each for itself, with numbers looked up');

-- What is an observation ----------------------------------------------------------------------------

do $$ begin
  perform dispatch_define_policy('jobs', '{"gates": [{"type": "adaptive_concurrency", "initial_max": 8, "target_lag_ms": 1000}]}');
  perform dispatch_stage('jobs', 't') from generate_series(1, 8);
  perform dispatch_tick('jobs');
end $$;
-- Ends a running job which started p_lag seconds after it was admitted.
create function pg_temp.run(p_lag numeric, p_end text) returns text language plpgsql as $$
declare
  v_job_id constant bigint := (select min(job_id) from dispatch_inflight_jobs where policy_name = 'jobs');
begin
  if p_lag is not null then
    update procrastinate_jobs set status = 'doing' where id = v_job_id;
    update procrastinate_events set at = pg_temp.at(p_lag) where job_id = v_job_id and type = 'started';
  end if;
  if p_end = 'deleted' then
    delete from procrastinate_jobs where id = v_job_id;
  else
    update procrastinate_jobs set status = p_end::procrastinate_job_status where id = v_job_id;
  end if;
  perform dispatch_fold('jobs', pg_temp.at(100));
  return (select concat_ws(' ', current_max, ewma_lag_ms, sample_count) || format(', %s in flight', in_flight_count)
    from dispatch_partitions as p left join dispatch_adaptive_stats as s on s.partition_id = p.id where p.policy_name = 'jobs');
end $$;
select is(pg_temp.run(null, 'cancelled'), ', 7 in flight', 'a job cancelled before it started frees its slot and teaches nothing');
select is(pg_temp.run(null, 'deleted'), ', 6 in flight', 'so does one that was deleted');
select is(pg_temp.run(0.5, 'succeeded'), '9 250 1, 5 in flight', 'a success teaches the time from admission to start, not its run time');
select is(pg_temp.run(0.5, 'failed'), '4 375 2, 4 in flight', 'a failure halves the cap');
select is(pg_temp.run(0.625, 'aborted'), '4 375 2, 3 in flight', 'an aborted job is neither');
select is(pg_temp.run(0.625, 'deleted'), '5 500 3, 2 in flight', 'a running job that is deleted has succeeded: so a worker ends it where jobs are deleted on success');
do $$ begin
  perform dispatch_stage('jobs', 't');
  perform dispatch_tick('jobs');
  perform dispatch_finish(max(job_id), true) from dispatch_inflight_jobs where policy_name = 'jobs';
end $$;
select is(
  (select (select dispatch_fold('jobs', pg_temp.at(100))) || ' note, ' || current_max || ' ' || ewma_lag_ms || ' ' || sample_count
    from dispatch_adaptive_stats join dispatch_partitions as p on p.id = partition_id where p.policy_name = 'jobs'),
  '1 note, 5 500 3', 'a job of another worker, whose start nobody saw, frees its slot and teaches nothing');
select is(pg_temp.run(3.5, 'succeeded'), '4 2000 4, 1 in flight', 'jobs that wait too long for a worker cut the cap');

-- A cap that is not in use ------------------------------------------------------------------------------

do $$ begin
  perform dispatch_define_policy('single', '{"gates": [{"type": "adaptive_concurrency", "initial_max": 2, "target_lag_ms": 1000}]}');
  for v_i in 1 .. 20 loop
    perform dispatch_stage('single', 't');
    perform dispatch_tick('single');
    update procrastinate_jobs as job set status = 'doing' from dispatch_inflight_jobs as slot where slot.job_id = job.id and slot.policy_name = 'single';
    update procrastinate_events set at = dispatch_now();
    update procrastinate_jobs as job set status = 'succeeded' from dispatch_inflight_jobs as slot where slot.job_id = job.id and slot.policy_name = 'single';
  end loop;
  perform dispatch_stage('single', 't') from generate_series(1, 50);
end $$;
select is(jobs_admitted, 3, 'however many jobs went one after the other, the cap is not what was never in flight') from dispatch_tick('single');
do $$ begin
  update dispatch_partitions set in_flight_count = 6 where policy_name = 'single';
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs, succeeded, lag_ms)
  select 'single', dispatch_partition_id('single', ''), 'finished', -1, true, 0 from generate_series(1, 6);
  perform dispatch_fold('single', pg_temp.at(0));
end $$;
select is(current_max, 7, 'of many that end together, each is counted as in flight until its turn: with 6, 5, 4 and 3 of them it grows')
from dispatch_adaptive_stats where partition_id = dispatch_partition_id('single', '');

select * from finish();
rollback;
