-- Concurrency: at most `max` admitted and not finished, whatever happens in between.
begin;
select plan(46);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';

create function pg_temp.at(p_seconds numeric) returns timestamptz language sql
return '2026-01-01 00:00+00'::timestamptz + make_interval(secs => p_seconds::float8);

-- The gate ------------------------------------------------------------------------------------------

-- What a gate says of a partition with so many in flight: jobs allowed, reason, seconds to rest.
create function pg_temp.ask(p_max numeric, p_in_flight integer, p_backoff numeric default 1) returns text language sql as $$
  select concat_ws(' ', allowed, reason, extract(epoch from retry_at - pg_temp.at(0))::float8,
    case when retry_at is not null then case when retry_after_finish is null then 'or a finish' else 'at least' end end)
  from unnest(dispatch_gate_concurrency(array[row(1, null, 'k', '{}', jsonb_build_object('x.max', p_max, 'x.full_backoff', p_backoff),
    '{}', p_in_flight, 1000, null, null, null)::dispatch_claim], 'x', pg_temp.at(0)))
$$;

select is(pg_temp.ask(max, in_flight, backoff), expected, sentence)
from (values
  (5::numeric, 0, 1::numeric, '5', 'nothing in flight leaves all slots'),
  (5, 3, 1, '2', 'what is in flight holds its slots'),
  (5, 5, 1, '0 concurrency_full 1 or a finish', 'a full partition rests for its backoff or until a finish'),
  (5, 9, 1, '0 concurrency_full 1 or a finish', 'so does one that is over a lowered cap'),
  (5, 5, 2.5, '0 concurrency_full 2.5 or a finish', 'the backoff is full_backoff'),
  (5, 5, null, '0 concurrency_full 1 or a finish', 'a second where it could not be looked up'),
  (5, 5, 0, '0 concurrency_full 0.001 or a finish', 'a millisecond at least'),
  (5, 5, 1e12, '0 concurrency_full 86400 or a finish', 'a day at most'),
  (5, -2, 1, '7', 'notes that came early are made up for later'),
  (2.9, 0, 1, '2', 'a fraction of a slot is none'),
  (0, 0, 1, '0 max_zero 1 at least', 'a max of 0 denies'),
  (0.9, 0, 1, '0 max_zero 1 at least', 'so does one below 1'),
  (-5, 0, 1, '0 max_zero 1 at least', 'or below 0'),
  (null, 0, 1, '0 max_zero 1 at least', 'or one that could not be looked up'),
  (1e12, 0, 1, '1000', 'an enormous one does not overflow')
) as asked (max, in_flight, backoff, expected, sentence);

-- Through ticks -------------------------------------------------------------------------------------

create function pg_temp.tick(p_policy text, p_seconds numeric) returns integer language sql as $$
  select set_config('dispatch.fake_now', pg_temp.at(p_seconds)::text, true);
  select jobs_admitted from dispatch_tick(p_policy)
$$;
create function pg_temp.due(p_policy text) returns float8 language sql
return (select extract(epoch from due_at - pg_temp.at(0)) from dispatch_partitions where policy_name = p_policy);
create function pg_temp.finish(p_policy text, p_jobs integer default 1) returns void language sql as $$
  select dispatch_finish(job_id, true)
  from (select job_id from dispatch_inflight_jobs where policy_name = p_policy order by job_id limit p_jobs) as jobs
$$;
create function pg_temp.cap(p_policy text, p_max numeric) returns void language sql as $$
  select dispatch_define_policy(p_policy, jsonb_build_object('partition_by', 'k', 'gates', jsonb_build_array(jsonb_build_object('type', 'concurrency', 'max', p_max))))
$$;
create function pg_temp.stage(p_policy text, p_jobs integer, p_keys integer default 1) returns void language sql as $$
  select dispatch_stage_many(p_policy, (select jsonb_agg(jsonb_build_object('task_name', 't', 'args', jsonb_build_object('k', i % p_keys))) from generate_series(1, p_jobs) as i));
$$;

do $$ begin perform pg_temp.cap('c', 2), pg_temp.stage('c', 20); end $$;
select is(pg_temp.tick('c', 0), 2, 'a cap of 2 admits two');
select is(pg_temp.due('c'), 1::float8, 'and is then looked at again after a second');
select is(array[pg_temp.tick('c', 0), pg_temp.tick('c', 0.9), pg_temp.tick('c', 5)], '{0,0,0}', 'however often and long it is asked, it admits no third');
select is(pg_temp.due('c'), 6::float8, 'and rests for a second each time');
do $$ begin perform pg_temp.finish('c'); end $$;
select is(pg_temp.tick('c', 5), 1, 'a finish admits the next at once');
do $$ begin perform pg_temp.finish('c', 2); end $$;
select is(pg_temp.tick('c', 5), 2, 'two finishes the next two');

-- case: the same job is finished twice
create temporary table finished on commit drop as select min(job_id) as job_id from dispatch_inflight_jobs where policy_name = 'c';
select is(dispatch_finish(job_id, true), true, 'finishing a job frees its slot') from finished;
select is(dispatch_finish(job_id, true), false, 'finishing it again does not') from finished;
select is(dispatch_finish(-1, true), false, 'nor does finishing what never was');
select is(pg_temp.tick('c', 5), 1, 'so that one job is admitted for it, not two');
select is(in_flight_count, 2, 'and the count is what runs') from dispatch_partitions where policy_name = 'c';

-- case: the cap is lowered, then raised, while all slots are taken
do $$ begin perform pg_temp.cap('c', 1); end $$;
select is(pg_temp.tick('c', 6), 0, 'a lowered cap admits none while too many run');
do $$ begin perform pg_temp.finish('c'); end $$;
select is(pg_temp.tick('c', 6), 0, 'nor when it is just full');
do $$ begin perform pg_temp.cap('c', 3); end $$;
select is(pg_temp.tick('c', 6), 2, 'raised again, it counts what runs');

-- case: jobs that were forced past the gate are not counted
do $$ begin perform pg_temp.cap('forced', 3), pg_temp.stage('forced', 20), pg_temp.tick('forced', 10); end $$;
select is(dispatch_force_admit('forced', '0', 4), 4, 'jobs are forced past a full gate');
select is(in_flight_count, 7, 'they count in flight') from dispatch_partitions where policy_name = 'forced';
do $$ begin perform pg_temp.finish('forced', 4); end $$;
select is(pg_temp.tick('forced', 10), 0, 'and have to end before the next is admitted');
do $$ begin perform pg_temp.finish('forced'); end $$;
select is(pg_temp.tick('forced', 10), 1, 'which then is');

-- case: jobs staged in one transaction, with one timestamp
do $$ begin perform pg_temp.cap('burst', 3), pg_temp.stage('burst', 1000, 7), pg_temp.tick('burst', 20); end $$;
select results_eq(
  $$select partition_key, in_flight_count, (select count(*) from dispatch_inflight_jobs as j where j.partition_id = p.id) from dispatch_partitions as p where policy_name = 'burst' order by 1$$,
  $$select i::text, 3, 3::bigint from generate_series(0, 6) as i$$, 'of 1000 jobs of one moment each of seven partitions has three in flight');

-- case: a job passes the gate, is then throttled, and keeps the slot
do $$ begin
  perform dispatch_define_policy('both', '{"gates": [{"type": "concurrency", "max": 5}, {"type": "throttle", "rate": 2, "per": 60}]}');
  perform dispatch_stage('both', 't') from generate_series(1, 9);
end $$;
select is(pg_temp.tick('both', 20), 2, 'a throttle behind the cap lets two pass');
select is(in_flight_count, 2, 'and those alone hold slots') from dispatch_partitions where policy_name = 'both';
select is(pg_temp.tick('both', 50), 1, 'so that the next is admitted when its token comes');

-- Two caps ------------------------------------------------------------------------------------------

do $$ begin
  perform dispatch_define_policy('two', '{"gates": [{"type": "concurrency", "name": "plan", "max": {"ctx": "max"}}, {"type": "concurrency", "name": "always", "max": 4}]}');
  perform dispatch_stage('two', 't', p_context => '{"max": 3}') from generate_series(1, 9);
end $$;
select is(pg_temp.tick('two', 60), 3, 'of two caps the smaller counts');
do $$ begin perform dispatch_stage('two', 't', p_context => '{"max": 9}'); end $$;
select is(pg_temp.tick('two', 60), 1, 'also when the other was raised');
do $$ begin perform dispatch_stage('two', 't', p_context => '{}'), pg_temp.finish('two', 2); end $$;
select is(pg_temp.tick('two', 60), 0, 'a context without the number admits nothing');
select is(blocked_reason, 'max_zero', 'and the partition says why') from dispatch_partitions where policy_name = 'two';
do $$ begin perform pg_temp.finish('two'); end $$;
select is(pg_temp.tick('two', 60), 0, 'a finish does not help it');
select is(pg_temp.due('two'), 61::float8, 'so it rests for the backoff all the same');

-- A max of 0 ----------------------------------------------------------------------------------------

do $$ begin perform pg_temp.cap('closed', 0), pg_temp.stage('closed', 3); end $$;
select results_eq(
  $$select jobs_admitted, partitions_seen, denied_reasons from dispatch_tick('closed')$$,
  $$values (0, 1, '{"max_zero": 1}'::jsonb)$$, 'a max of 0 admits nothing');
select is(partitions_seen, 0, 'and is not looked at again before its backoff is over') from dispatch_tick('closed');
do $$ begin perform pg_temp.cap('closed', 1); end $$;
select is(pg_temp.tick('closed', 60), 1, 'once it is raised it opens');

select * from finish();
rollback;
