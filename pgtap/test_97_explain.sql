-- Why a job does not run. That it agrees with the tick is tried in tests/properties/test_explain.py.
begin;
select plan(95);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';
set local timezone = 'UTC';

create function pg_temp.at(p_seconds double precision)
returns timestamptz
language plpgsql
as $$
begin
  perform set_config('dispatch.fake_now', ('2026-01-01 00:00:00+00'::timestamptz + make_interval(secs => p_seconds))::text, true);
  return dispatch_now();
end;
$$;

create function pg_temp.define(p_policy text, p_gates jsonb default '[]', p_more jsonb default '{}')
returns void
language sql
return dispatch_define_policy(p_policy, jsonb_build_object('partition_by', 'k', 'gates', p_gates) || p_more);

create function pg_temp.row(p_id bigint, p_item text default 'job', p_gate text default null)
returns dispatch_explanation
language sql
begin atomic
  select e from dispatch_explain(p_id) as e where item = p_item and gate_name is not distinct from p_gate;
end;

create temporary table ids (name text, id bigint);
create function pg_temp.stage(p_policy text, p_name text, p_args jsonb default '{"k": "a"}')
returns bigint
language sql
begin atomic
  insert into ids select p_name, dispatch_stage(p_policy, p_name, p_args) returning id;
end;
create function pg_temp.id(p_name text)
returns bigint
language sql
begin atomic
  select id from ids where name = p_name;
end;

-- Errors.
select throws_ok($$select dispatch_explain(-1)$$, 'PD006', null, 'an unknown id is refused');
select throws_ok($$select dispatch_explain(null)$$, 'PD006', null, 'so is none');

-- Nothing in the way.
do $$
begin
  perform pg_temp.define('free');
  perform pg_temp.stage('free', 'free');
end;
$$;
select results_eq(
  $$select item, blocks, reason, estimated_at, numbers ->> 'state' from dispatch_explain(pg_temp.id('free'))$$,
  $$values ('job', false, null, dispatch_now(), 'staged')$$,
  'a job that nothing holds has one row: the next tick admits it, also before its note is folded');
do $$ begin perform pg_temp.at(121); end; $$;
select is((pg_temp.row(pg_temp.id('free'))).reason, 'no_tick', 'when nobody ticks for two minutes, that is the reason');
select is((pg_temp.row(pg_temp.id('free'))).blocks, false, 'it does not count as held');
select matches((pg_temp.row(pg_temp.id('free'))).message, 'Start a driver', 'and the message says what to do');

-- A throttle.
do $$
begin
  perform pg_temp.at(0);
  perform pg_temp.define('slow', '[{"type": "throttle", "name": "t", "rate": 2, "per": 60}]');
  perform pg_temp.stage('slow', 'slow' || n) from generate_series(1, 5) as n;
  perform dispatch_tick('slow');
  perform pg_temp.at(15);
end;
$$;
select is((pg_temp.row(pg_temp.id('slow3'))).reason, 'throttle_empty', 'a job waits for a token');
select is((pg_temp.row(pg_temp.id('slow3'))).estimated_at, '2026-01-01 00:00:30+00', 'the estimate is when its token comes');
select is((pg_temp.row(pg_temp.id('slow5'))).estimated_at, '2026-01-01 00:01:30+00', 'those behind it wait for theirs');
select is(((pg_temp.row(pg_temp.id('slow5'))).numbers ->> 'place')::integer, 3, 'and know their place');
select is((pg_temp.row(pg_temp.id('slow3'))).since, '2026-01-01 00:00:00+00', 'it waits since the last admission');
select is(
  (pg_temp.row(pg_temp.id('slow3'), 'gate', 't')).numbers,
  '{"allowed": 0, "tokens": 0.5, "rate": 2, "per": 60, "burst": null, "capacity": 2, "next_token_at": "2026-01-01T00:00:30+00:00"}',
  'a throttle shows its tokens, rate, capacity and next token');
do $$ begin perform pg_temp.at(30); end; $$;
select is((pg_temp.row(pg_temp.id('slow3'))).blocks, false, 'when its token is there, the next tick admits it');
select is((pg_temp.row(pg_temp.id('slow4'))).reason, 'behind_others', 'the one behind it waits for it');

do $$
begin
  perform pg_temp.at(0);
  perform pg_temp.define('shut', '[{"type": "throttle", "name": "t", "rate": {"ctx": "rate", "default": 0}, "per": 60}]');
  perform pg_temp.stage('shut', 'shut');
end;
$$;
select is((pg_temp.row(pg_temp.id('shut'))).reason, 'rate_zero', 'a rate of 0 lets nothing pass');
select is((pg_temp.row(pg_temp.id('shut'))).estimated_at, null, 'and then there is no estimate');

-- Caps.
do $$
begin
  perform pg_temp.define('cap', '[{"type": "concurrency", "max": 2}]');
  perform pg_temp.stage('cap', 'cap' || n) from generate_series(1, 4) as n;
  perform dispatch_tick('cap');
end;
$$;
select is((pg_temp.row(pg_temp.id('cap3'))).reason, 'concurrency_full', 'a job waits for a slot');
select is(
  (pg_temp.row(pg_temp.id('cap3'), 'gate', 'concurrency')).numbers, '{"allowed": 0, "in_flight": 2, "max": 2}',
  'a cap shows what is in flight, and how much may be');
select is((pg_temp.row(pg_temp.id('cap3'))).estimated_at, null, 'of a partition that is new nobody knows how fast it goes');
select matches((pg_temp.row(pg_temp.id('cap3'))).message, 'No estimate: how soon', 'and the message says so');
do $$ begin perform dispatch_finish(job_id, true) from dispatch_inflight_jobs where job_id = pg_temp.id('cap1'); end; $$;
select is((pg_temp.row(pg_temp.id('cap3'))).blocks, false, 'a finish counts before a tick has folded it');
select is((pg_temp.row(pg_temp.id('cap4'))).reason, 'behind_others', 'it makes room for one');

do $$
begin
  perform pg_temp.define('steady', '[{"type": "concurrency", "max": 1}]');
  perform pg_temp.stage('steady', 'steady' || n) from generate_series(1, 200) as n;
  -- One in two seconds, for four minutes.
  for v_n in 1 .. 120 loop
    perform pg_temp.at(2 * v_n);
    perform dispatch_tick('steady');
    perform dispatch_finish(job_id, true) from dispatch_inflight_jobs where policy_name = 'steady';
  end loop;
  perform dispatch_tick('steady');
end;
$$;
select cmp_ok(
  extract(epoch from (pg_temp.row(pg_temp.id('steady131'))).estimated_at - dispatch_now()), '>', 19::numeric,
  'the tenth in a partition that goes one in two seconds starts in about 20 s');
select cmp_ok(
  extract(epoch from (pg_temp.row(pg_temp.id('steady131'))).estimated_at - dispatch_now()), '<', 23::numeric, 'and not much later');
select matches((pg_temp.row(pg_temp.id('steady131'))).message, 'from 0.5\d* jobs a second', 'the message says what that follows from');

do $$
begin
  perform pg_temp.at(0);
  perform pg_temp.define('adaptive', '[{"type": "adaptive_concurrency", "name": "a", "initial_max": 3, "target_lag_ms": 100}]');
  perform pg_temp.stage('adaptive', 'adaptive' || n) from generate_series(1, 4) as n;
  perform dispatch_tick('adaptive');
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs, succeeded, lag_ms)
  values ('adaptive', dispatch_partition_id('adaptive', 'a'), 'finished', 0, false, 40);
end;
$$;
select is(
  (pg_temp.row(pg_temp.id('adaptive4'), 'gate', 'a')).numbers - 'highest_max',
  '{"allowed": -2, "in_flight": 3, "max": 1, "current_max": 1, "initial_max": 3, "lowest_max": 1, "ewma_lag_ms": 20, "target_lag_ms": 100, "samples": 1}'
    || '{"allowed": 0}'::jsonb,
  'an adaptive cap shows what it has learned, unread notes included');

-- Pauses, schedules, locks.
do $$
begin
  perform pg_temp.define('held');
  perform pg_temp.stage('held', 'held');
  perform dispatch_pause('held', 'a');
end;
$$;
select results_eq(
  $$select item, blocks, reason, since from dispatch_explain(pg_temp.id('held'))$$,
  $$values ('job', true, 'paused', dispatch_now()), ('pause', true, 'paused', dispatch_now())$$, 'a pause of the partition is told, and since when');
do $$ begin perform dispatch_resume('held', 'a'); perform dispatch_pause('held'); end; $$;
select matches((pg_temp.row(pg_temp.id('held'), 'pause')).message, 'Policy ''held'' is paused', 'so is a pause of the policy');

do $$
begin
  perform dispatch_resume('held');
  insert into ids select 'later', dispatch_stage('held', 't', '{"k": "a"}', p_scheduled_at => '2026-01-01 01:00:00+00');
  insert into ids select 'locked', dispatch_stage('held', 't', '{"k": "a"}', p_lock => 'l', p_queueing_lock => 'q');
end;
$$;
select results_eq(
  $$select reason, estimated_at, (numbers ->> 'place')::integer from dispatch_explain(pg_temp.id('later')) where item = 'job'$$,
  $$values ('scheduled', '2026-01-01 01:00:00+00'::timestamptz, 3)$$, 'a job waits for its schedule, behind what may go before');
do $$ begin perform pg_temp.at(60); end; $$;
select is((pg_temp.row(pg_temp.id('later'))).since, '2026-01-01 00:00:00+00', 'since it was staged');
do $$ begin perform pg_temp.at(0); end; $$;
select is((pg_temp.row(pg_temp.id('later'), 'schedule')).numbers ->> 'eligible_at', '2026-01-01T01:00:00+00:00', 'which has a row of its own');
select is((pg_temp.row(pg_temp.id('locked'))).blocks, false, 'a lock that is free holds nothing');
insert into procrastinate_jobs (queue_name, task_name, lock, queueing_lock, status) values ('default', 'stranger', 'l', null, 'doing');
select is((pg_temp.row(pg_temp.id('locked'))).blocks, false, 'a lock under which another job runs does not keep it from admission');
select is(
  (pg_temp.row(pg_temp.id('locked'), 'lock')).numbers ->> 'job_id', (select id::text from procrastinate_jobs where task_name = 'stranger'),
  'but is told, with who runs under it');
insert into procrastinate_jobs (queue_name, task_name, queueing_lock) values ('default', 'rival', 'q');
select is((pg_temp.row(pg_temp.id('locked'))).reason, 'queueing_lock_held', 'a queueing lock of a queued job holds it');
select is(
  (pg_temp.row(pg_temp.id('locked'), 'queueing_lock')).numbers,
  jsonb_build_object('queueing_lock', 'q', 'job_id', (select id from procrastinate_jobs where task_name = 'rival')),
  'and it is told which job holds it');
do $$ begin perform dispatch_tick('held'); end; $$;
select is((pg_temp.row(pg_temp.id('locked'), 'schedule')).reason, 'queueing_lock_held', 'after a try it waits for the next');

-- A retry and a new job with one queueing lock.
do $$
begin
  delete from procrastinate_jobs;
  perform pg_temp.define('again');
  insert into ids select 'retry', dispatch_stage('again', 't', '{"k": "a"}', p_queueing_lock => 'again');
  perform dispatch_tick('again');
  perform procrastinate_fetch_job_v2(null, null);
  insert into ids select 'newer', dispatch_stage('again', 't', '{"k": "a"}', p_queueing_lock => 'again');
  perform procrastinate_retry_job_v2(job_id, null, null, null, null) from dispatch_inflight_jobs where job_id = pg_temp.id('retry');
end;
$$;
select is((pg_temp.row(pg_temp.id('newer'))).blocks, false, 'of a retry and a new job with one queueing lock, the new one goes');
select is((pg_temp.row(pg_temp.id('retry'))).reason, 'queueing_lock_held', 'and the retry waits for it');

-- Limits that cannot be asked.
do $$
begin
  create function broken_limit(p_partition_key text, p_context jsonb) returns numeric language plpgsql as
    'begin raise exception ''the table of limits is gone''; end';
  perform pg_temp.define('broken', '[{"type": "concurrency", "max": {"sql": "broken_limit", "default": 1}}]');
  perform pg_temp.stage('broken', 'broken');
end;
$$;
select is((pg_temp.row(pg_temp.id('broken'))).reason, 'limit_error', 'a limit function that raises is the reason');
select matches((pg_temp.row(pg_temp.id('broken'))).message, 'limit_error: the table of limits is gone\. Place 1 of', 'with what it raised, as a sentence');
do $$ begin drop function broken_limit(text, jsonb); end; $$;
select is((pg_temp.row(pg_temp.id('broken'))).reason, 'limit_error', 'so is one that does not exist any more');

-- The budget.
do $$
begin
  perform pg_temp.define('budget', '[]', '{"tick_admission_budget": 2}');
  perform pg_temp.stage('budget', 'budget' || n) from generate_series(1, 3) as n;
  perform pg_temp.stage('budget', 'other', '{"k": "b"}');
end;
$$;
select is((pg_temp.row(pg_temp.id('budget1'))).blocks, false, 'the budget is shared, so each partition gets one');
select is((pg_temp.row(pg_temp.id('budget2'))).reason, 'budget_exhausted', 'and its second job waits');
select is(
  (pg_temp.row(pg_temp.id('budget2'), 'budget')).numbers, '{"tick_admission_budget": 2, "allowed": 1}', 'the budget''s row has its numbers');

-- The queue.
create function pg_temp.work(p_policy text, p_jobs integer)
returns void
language sql
begin atomic
  update procrastinate_jobs set status = 'doing'
  where id in (
    select job.id from procrastinate_jobs as job join dispatch_inflight_jobs as slot on slot.job_id = job.id
    where slot.policy_name = p_policy and job.status = 'todo' order by job.id limit p_jobs);
end;
-- Which jobs go, as their first rows say, and as the next tick does.
create function pg_temp.agrees(p_policy text)
returns text
language plpgsql
as $$
declare
  v_said constant text[] := array(
    with waiting as materialized (select name, id from ids join dispatch_staged_jobs using (id) where policy_name = p_policy)
    select name from waiting where not (select blocks from dispatch_explain(id) limit 1) order by id);
  v_done text[];
  v_before constant bigint[] := array(select job_id from dispatch_inflight_jobs);
begin
  begin
    perform dispatch_tick(p_policy);
    v_done := array(select name from ids join dispatch_inflight_jobs on job_id = id where policy_name = p_policy and id <> all (v_before) order by id);
    raise exception using errcode = 'UNDO1', message = 'only tried';
  exception
    when sqlstate 'UNDO1' then null;
  end;
  return case when v_said = v_done then cardinality(v_done) || ' go' else format('said %s, done %s', v_said, v_done) end;
end;
$$;
do $$
begin
  perform pg_temp.define('queue', '[]', '{"max_queued": 10}');
  perform pg_temp.stage('queue', 'queue' || n) from generate_series(1, 4) as n;
  perform dispatch_tick('queue');
  perform pg_temp.stage('queue', 'queue' || n) from generate_series(5, 9) as n;
end;
$$;
select is((pg_temp.row(pg_temp.id('queue5'), 'queue')).item, null, 'a queue that is less than half full has no row');
select is(pg_temp.agrees('queue'), '5 go', 'and holds nobody');
do $$ begin perform dispatch_tick('queue'); perform pg_temp.stage('queue', 'queue' || n) from generate_series(10, 12) as n; end; $$;
select is(
  (pg_temp.row(pg_temp.id('queue10'), 'queue')).numbers, '{"max_queued": 10, "queued": 9, "allowed": 1}', 'one that is more than half full has one, with its numbers');
select is((pg_temp.row(pg_temp.id('queue10'), 'queue')).message, '9 jobs of the policy wait for a worker, of at most 10; 1 of the next tick are for this partition.', 'in words');
select results_eq(
  $$select blocks, reason from dispatch_explain(pg_temp.id('queue10')) where item in ('job', 'queue')$$, $$values (false, null), (false, null)$$, 'a job for which there is room is not held');
select results_eq(
  $$select blocks, reason from dispatch_explain(pg_temp.id('queue11')) where item in ('job', 'queue')$$, $$values (true, 'queue_full'), (true, 'queue_full')$$, 'one for which there is none is');
select is(pg_temp.agrees('queue'), '1 go', 'and the tick does so');
do $$ begin perform dispatch_tick('queue'); end; $$;
select results_eq(
  $$select item, blocks, reason, numbers - 'state' from dispatch_explain(pg_temp.id('queue11')) where item = 'queue'$$,
  $$values ('queue', true, 'queue_full', '{"max_queued": 10, "queued": 10, "allowed": 0}'::jsonb)$$, 'when it is full it lets none pass');
select is((pg_temp.row(pg_temp.id('queue11'), 'queue')).message, '10 jobs of the policy wait for a worker, of at most 10.', 'and says so');
select is((pg_temp.row(pg_temp.id('queue11'))).reason, 'queue_full', 'the first row says the same');
select matches((pg_temp.row(pg_temp.id('queue11'))).message,
  '^10 jobs of the policy wait for a worker, of at most 10[.] Place 1 of its partition[.] No estimate: it depends on how soon workers take what is queued[.]$', 'and that nobody knows when');
select is((pg_temp.row(pg_temp.id('queue11'))).estimated_at, null, 'so there is no estimate');
do $$ begin perform dispatch_tick('queue'); end; $$;
select is((pg_temp.row(pg_temp.id('queue11'))).reason, 'queue_full', 'also once a tick has written it down');
select is(pg_temp.agrees('queue'), '0 go', 'and the tick admits none');
do $$ begin perform pg_temp.work('queue', 1); end; $$;
select is((pg_temp.row(pg_temp.id('queue11'))).blocks, false, 'when one has started, the next may go');
select is((pg_temp.row(pg_temp.id('queue12'))).reason, 'queue_full', 'and the one after it waits');
select is(pg_temp.agrees('queue'), '1 go', 'as the tick does');
select is((pg_temp.row(pg_temp.id('queue1'))).numbers ->> 'state', 'running', 'of one that runs it is told that it runs');

do $$ begin perform pg_temp.work('queue', 9); end; $$;
select is(pg_temp.agrees('queue'), '2 go', 'when all of them run, the queue holds nobody');
do $$
begin
  perform dispatch_finish(job_id, true) from dispatch_inflight_jobs where policy_name = 'queue' and job_id in (select id from ids where name ~ '^queue[1-5]$');
  perform pg_temp.stage('queue', 'queue' || n) from generate_series(13, 24) as n;
end;
$$;
select unalike((pg_temp.row(pg_temp.id('queue24'))).message, '5 jobs of the policy wait for a worker%', 'jobs that run are not said to wait for a worker');

do $$
begin
  perform pg_temp.define('both', '[]', '{"max_queued": 10, "tick_admission_budget": 3}');
  perform pg_temp.stage('both', 'both' || n) from generate_series(1, 30) as n;
end;
$$;
select is((pg_temp.row(pg_temp.id('both4'))).reason, 'budget_exhausted', 'where the budget is less than the room, it holds');
select is((pg_temp.row(pg_temp.id('both4'), 'queue')).item, null, 'and the queue has no row');
select is(pg_temp.agrees('both'), '3 go', 'as the tick does');
do $$ begin perform dispatch_tick('both'); perform dispatch_tick('both'); perform dispatch_tick('both'); end; $$;
select is((select count(*) from dispatch_inflight_jobs where policy_name = 'both'), 9::bigint, 'three ticks later');
select is((pg_temp.row(pg_temp.id('both11'))).reason, 'queue_full', 'where the room is less than the budget, it holds');
select is((pg_temp.row(pg_temp.id('both11'), 'budget')).item, null, 'and the budget has no row');
select is(pg_temp.agrees('both'), '1 go', 'as the tick does');

-- More than there is room for at once.
do $$
begin
  perform pg_temp.define('crowd', '[]', '{"max_queued": 10}');
  perform pg_temp.stage('crowd', 'crowd' || k || n, jsonb_build_object('k', k)) from generate_series(1, 8) as n cross join unnest(array['a', 'b', 'c']) as k;
end;
$$;
select is((pg_temp.row(pg_temp.id('crowda8'))).reason, 'queue_full', 'an empty queue holds those for whom it is too small');
select is((pg_temp.row(pg_temp.id('crowda8'), 'queue')).numbers ->> 'max_queued', '10', 'and has a row for them');
select is((pg_temp.row(pg_temp.id('crowda1'), 'queue')).item, null, 'but none for those whom it holds not');
select is(pg_temp.agrees('crowd'), '10 go', 'which of them go is told beforehand');
do $$ begin perform dispatch_tick('crowd'); perform pg_temp.work('crowd', 4); end; $$;
select is(pg_temp.agrees('crowd'), '4 go', 'so it is when there is little room');
do $$
begin
  perform pg_temp.define('heavy', '[]', '{"max_queued": 9, "fairness": {"weight": {"ctx": "w"}}}');
  perform pg_temp.stage('heavy', 'heavy' || k || n, jsonb_build_object('k', k, 'w', case k when 'a' then 2 else 1 end)) from generate_series(1, 9) as n cross join unnest(array['a', 'b']) as k;
end;
$$;
select is(pg_temp.agrees('heavy'), '9 go', 'and where weights count');
do $$ begin perform dispatch_tick('heavy'); perform pg_temp.work('heavy', 3); end; $$;
select is(pg_temp.agrees('heavy'), '3 go', 'in what comes later, too');
do $$
begin
  perform dispatch_force_admit('heavy', 'b', 3);
end;
$$;
select is((pg_temp.row(pg_temp.id('heavya9'), 'queue')).numbers ->> 'allowed', '0', 'a queue that is more than full by force lets none pass');
select is(pg_temp.agrees('heavy'), '0 go', 'as the tick does');
do $$ begin delete from dispatch_policies where policy_name in ('queue', 'both', 'crowd', 'heavy'); end; $$;

-- A tick takes up few partitions, and looks at none before its time.
do $$
begin
  perform pg_temp.define('many', '[]', '{"partition_batch_size": 1}');
  perform pg_temp.stage('many', 'first', '{"k": "a"}');
  perform pg_temp.at(1);
  perform pg_temp.stage('many', 'second', '{"k": "b"}');
end;
$$;
select is((pg_temp.row(pg_temp.id('second'))).reason, 'not_its_turn', 'a partition is behind one whose note is not folded yet');
do $$ begin perform dispatch_fold('many', dispatch_now()); end; $$;
select is((pg_temp.row(pg_temp.id('first'))).blocks, false, 'of two partitions the tick takes up that which is due longer');
select is((pg_temp.row(pg_temp.id('second'))).reason, 'not_its_turn', 'the other waits its turn');
do $$ begin update dispatch_partitions set due_at = pg_temp.at(1) + interval '5 seconds' where partition_key = 'b' and policy_name = 'many'; end; $$;
select results_eq(
  $$select reason, estimated_at from dispatch_explain(pg_temp.id('second')) where item = 'job'$$,
  $$values ('backoff', '2026-01-01 00:00:06+00'::timestamptz)$$, 'a partition at which no tick looks before a time waits for it');

-- Jobs that do not wait in a policy.
do $$
begin
  perform pg_temp.at(0);
  delete from procrastinate_jobs;
  perform dispatch_tick('free');
end;
$$;
select is((pg_temp.row(pg_temp.id('free'))).reason, 'no_worker', 'a queued job of which no worker lives says so');
insert into procrastinate_workers (last_heartbeat) values (dispatch_now());
select results_eq(
  $$select item, blocks, reason, since, numbers ->> 'state' from dispatch_explain(pg_temp.id('free'))$$,
  $$values ('job', true, 'queued', dispatch_now(), 'queued')$$, 'a queued job waits for a worker since it was admitted');
do $$ begin perform procrastinate_fetch_job_v2(null, (select max(id) from procrastinate_workers)); end; $$;
select is((pg_temp.row(pg_temp.id('free'))).reason, 'running', 'a running job runs');
update procrastinate_workers set last_heartbeat = dispatch_now() - interval '1 hour';
select is((pg_temp.row(pg_temp.id('free'))).reason, 'worker_lost', 'or its worker is lost');
do $$ begin perform procrastinate_finish_job_v1((select max(id) from procrastinate_jobs where status = 'doing'), 'failed', false); end; $$;
select is((pg_temp.row(pg_temp.id('free'))).reason, 'failed', 'a finished job says how');
select isnt((pg_temp.row(pg_temp.id('free'))).since, null, 'and when');
do $$
begin
  perform dispatch_cancel(pg_temp.id('later'));
  perform dispatch_bury(array[pg_temp.id('shut')], array['no such task'], dispatch_now());
  delete from dispatch_policies where policy_name = 'budget';
end;
$$;
select is((pg_temp.row(pg_temp.id('later'))).reason, 'cancelled', 'a cancelled job was cancelled');
select matches((pg_temp.row(pg_temp.id('shut'))).message, 'no such task', 'a dead job has its error');
do $$
begin
  perform pg_temp.define('centuries', '[{"type": "throttle", "rate": 0.01, "per": 315360000}]');
  perform pg_temp.stage('centuries', 'century1');
  perform pg_temp.stage('centuries', 'century2');
  perform dispatch_tick('centuries');
end;
$$;
select matches((pg_temp.row(pg_temp.id('century2'))).message, 'No estimate: gate throttle has no token for it within a hundred years[.]',
  'a job that waits for centuries is told so');
select is((pg_temp.row(pg_temp.id('budget1'))).reason, 'policy_gone', 'a job whose policy was dropped waits for the sweep');

select finish();
rollback;
