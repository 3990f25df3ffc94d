-- Admission up to the hand-off: who is claimed, in what order jobs go, and what has to wait.
begin;
select plan(42);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';

create function pg_temp.at(p_seconds double precision)
returns void
language plpgsql
as $$
begin
  perform set_config('dispatch.fake_now', ('2026-01-01 00:00:00+00'::timestamptz + make_interval(secs => p_seconds))::text, true);
end;
$$;

create function pg_temp.clock(p_seconds double precision)
returns timestamptz
language sql
return '2026-01-01 00:00:00+00'::timestamptz + make_interval(secs => p_seconds);

create function pg_temp.define(p_policy text, p_more jsonb default '{}')
returns void
language plpgsql
as $$
begin
  perform dispatch_define_policy(p_policy, '{"partition_by": "k", "shard_by": "s"}' || p_more);
end;
$$;

-- Stages a job whose task has the given name.
create function pg_temp.stage(p_policy text, p_key text, p_name text, p_more jsonb default '{}')
returns bigint
language sql
begin atomic
  select id
  from dispatch_stage_many(p_policy, jsonb_build_array(
    jsonb_build_object('task_name', p_name, 'context', jsonb_build_object('k', p_key)) || p_more)) as id;
end;

-- Ticks once and returns the names of the jobs that arrived, in the order of the hand-off.
create function pg_temp.tick(p_policy text, p_shard text default null)
returns text[]
language plpgsql
as $$
declare
  v_jobs constant dispatch_payload[] := array(select job from dispatch_admit(p_policy, p_shard) as job);
begin
  perform dispatch_settle(v_jobs[1].handoff_id) where v_jobs[1].handoff_id is not null;
  return array(
    select arrived.task_name::text
    from unnest(v_jobs) with ordinality as job
    join procrastinate_jobs as arrived on arrived.id = job.id
    order by job.ordinality);
end;
$$;

-- The longest due partitions are claimed, however the keys or the staged ids sort.
do $$
begin
  perform pg_temp.define('claims', '{"partition_batch_size": 2}');
  perform pg_temp.at(1);
  perform pg_temp.stage('claims', 'c', 'c1');
  perform pg_temp.at(2);
  perform pg_temp.stage('claims', 'a', 'a1');
  perform pg_temp.at(3);
  perform pg_temp.stage('claims', 'b', 'b1');
  perform pg_temp.at(10);
end;
$$;
select is(pg_temp.tick('claims'), '{c1,a1}', 'a tick claims the partitions that are due longest, as many as partition_batch_size');
select is(pg_temp.tick('claims'), '{b1}', 'the next tick claims the next ones');
select is(pg_temp.tick('claims'), '{}', 'a tick with nothing due admits nothing');

create temporary table taken (name text);
do $$
begin
  perform pg_temp.define('queue', '{"partition_batch_size": 2, "admission_batch_size": 1}');
  for v_key in 1 .. 5 loop
    for v_job in 1 .. 3 loop
      perform pg_temp.stage('queue', v_key::text, v_key::text);
    end loop;
  end loop;
  for v_tick in 1 .. 3 loop
    perform pg_temp.at(10 + v_tick / 1000.0);
    insert into taken select unnest(pg_temp.tick('queue'));
  end loop;
end;
$$;
select set_eq(
  'select name from taken', 'select generate_series(1, 5)::text',
  'every due partition is looked at within ceil(due partitions / partition_batch_size) ticks, though those served are due again at once');

-- How many of a partition.
do $$
begin
  perform pg_temp.define('batches', '{"admission_batch_size": 2}');
  perform pg_temp.stage('batches', 'a', format('a%s', i)) from generate_series(1, 5) as i;
end;
$$;
select is(pg_temp.tick('batches'), '{a1,a2}', 'a partition is admitted at most admission_batch_size jobs a tick');
select is((select due_at from dispatch_partitions where policy_name = 'batches'), dispatch_now(), 'what the batch limit held back is due again at once');
select is(pg_temp.tick('batches') || pg_temp.tick('batches'), '{a3,a4,a5}', 'the rest follows in order');

-- Shards.
do $$
begin
  perform pg_temp.define('shards');
  perform pg_temp.stage('shards', 'n', 'north', '{"context": {"k": "n", "s": "north"}}');
  perform pg_temp.stage('shards', 's', 'south', '{"context": {"k": "s", "s": "south"}}');
  perform pg_temp.stage('shards', 'd', 'unsharded');
end;
$$;
select is(pg_temp.tick('shards', 'nowhere'), '{}', 'a shard without partitions admits nothing');
select is(pg_temp.tick('shards', 'south'), '{south}', 'a tick of one shard leaves the others');
select is(pg_temp.tick('shards', 'default'), '{unsharded}', 'the shard default is a shard like any other');
do $$
begin
  perform pg_temp.stage('shards', 'd', 'unsharded2');
end;
$$;
select set_eq($$ select unnest(pg_temp.tick('shards')) $$, array['north', 'unsharded2'], 'a tick without a shard takes them all');
select is(
  (select array_agg(shard order by id) from dispatch_tick_samples where policy_name = 'shards'),
  array['south', 'default', null], 'a sample names the shard that the tick was limited to');

-- The order inside a partition.
do $$
begin
  perform pg_temp.define('order');
  perform pg_temp.at(100);
  perform pg_temp.stage('order', 'a', 'low', '{"priority": -1}');
  perform pg_temp.stage('order', 'a', 'scheduled_late', jsonb_build_object('scheduled_at', pg_temp.clock(60)));
  perform pg_temp.stage('order', 'a', 'scheduled_early', jsonb_build_object('scheduled_at', pg_temp.clock(50)));
  perform pg_temp.stage('order', 'a', 'first');
  perform pg_temp.stage('order', 'a', 'second');
  perform pg_temp.stage('order', 'a', 'high_scheduled', jsonb_build_object('priority', 7, 'scheduled_at', pg_temp.clock(70)));
  perform pg_temp.stage('order', 'a', 'high', '{"priority": 7}');
end;
$$;
select is(pg_temp.tick('order'), '{high,high_scheduled,first,second,scheduled_early,scheduled_late,low}',
  'jobs go by priority, the unscheduled before the scheduled, then by id');

do $$
begin
  perform dispatch_define_policy('order', '{"partition_by": "k", "admission_batch_size": 2}');
  perform pg_temp.stage('order', 'a', 'low2', '{"priority": -1}');
  perform pg_temp.stage('order', 'a', 'future', jsonb_build_object('scheduled_at', pg_temp.clock(1000)));
  perform pg_temp.stage('order', 'a', 'past', jsonb_build_object('scheduled_at', pg_temp.clock(99)));
  perform pg_temp.stage('order', 'a', 'future_high', jsonb_build_object('priority', 7, 'scheduled_at', pg_temp.clock(1000)));
  perform pg_temp.stage('order', 'a', 'now');
  perform pg_temp.stage('order', 'a', 'now_high', '{"priority": 7}');
end;
$$;
select is(pg_temp.tick('order') || pg_temp.tick('order') || pg_temp.tick('order'), '{now_high,now,past,low2}',
  'the order is the same, over several ticks too, where jobs that are not due stand between');

-- case: a scheduled job with high priority stands first, and the ready ones behind it wait for it
do $$
begin
  perform pg_temp.define('future');
  perform pg_temp.stage('future', 'a', 'later', jsonb_build_object('priority', 100, 'scheduled_at', pg_temp.clock(160)));
  perform pg_temp.stage('future', 'a', 'ready');
end;
$$;
select is(pg_temp.tick('future'), '{ready}', 'a job of high priority that is not due blocks no job that is');
select is((select due_at from dispatch_partitions where policy_name = 'future'), pg_temp.clock(160), 'the partition is next due when that job is');
select is((select partitions_seen from dispatch_tick('future')), 0, 'before that it is not claimed');
do $$
begin
  perform pg_temp.at(159.999);
end;
$$;
select is(pg_temp.tick('future'), '{}', 'a scheduled job is not admitted before its time');
do $$
begin
  perform pg_temp.at(160);
end;
$$;
select is(pg_temp.tick('future'), '{later}', 'it is admitted at its time');
do $$
begin
  perform pg_temp.stage('future', 'a', 'later', jsonb_build_object('scheduled_at', pg_temp.clock(9000)));
  perform pg_temp.stage('future', 'a', 'ready', '{"priority": -5}');
end;
$$;
select is(pg_temp.tick('future'), '{ready}', 'nor does a future job of any other priority block one that is behind it');

-- case: partitions that hold only future jobs are claimed at every tick and push out those with ready jobs
do $$
begin
  perform pg_temp.define('horizon', '{"partition_batch_size": 2}');
  perform pg_temp.stage('horizon', 'future' || i, 'later', jsonb_build_object('scheduled_at', pg_temp.clock(9000))) from generate_series(1, 10) as i;
  perform pg_temp.stage('horizon', 'ready', 'ready');
end;
$$;
select is(pg_temp.tick('horizon'), '{ready}', 'partitions that hold only future jobs take no place in the claim');

-- case: the limit of what is picked counts ready jobs only
do $$
begin
  perform pg_temp.define('priorities', '{"admission_batch_size": 3}');
  perform pg_temp.stage('priorities', 'a', format('p%s', i), jsonb_build_object('priority', i))
  from generate_series(1, 8) as i;
  perform pg_temp.stage('priorities', 'a', 'later', jsonb_build_object('priority', i, 'scheduled_at', pg_temp.clock(9000)))
  from generate_series(1, 8) as i;
end;
$$;
select is(pg_temp.tick('priorities'), '{p8,p7,p6}', 'a full batch is found over several priorities, each with jobs that are not due');
select is(pg_temp.tick('priorities'), '{p5,p4,p3}', 'and the next one behind it');

-- Across partitions.
do $$
begin
  perform pg_temp.define('mixed');
  perform pg_temp.stage('mixed', 'a', format('a%s', i)) from generate_series(1, 3) as i;
  perform pg_temp.stage('mixed', 'b', 'b1');
  perform pg_temp.stage('mixed', 'c', format('c%s', i), '{"priority": 9}') from generate_series(1, 2) as i;
end;
$$;
create temporary table mixed as select * from unnest(pg_temp.tick('mixed')) with ordinality as t (name, place);
select is((select array_agg(left(name, 1) order by left(name, 1)) from mixed where place <= 3), '{a,b,c}', 'the batch takes one job of each partition first');
select is((select array_agg(left(name, 1) order by left(name, 1)) from mixed where place in (4, 5)), '{a,c}', 'then the second of each');
select is((select name from mixed where place = 6), 'a3', 'and so on');
select is(
  (select array_agg(name order by place) from mixed where name like 'a%'), '{a1,a2,a3}', 'each partition keeps its own order in it');

do $$
begin
  perform pg_temp.stage('mixed', 'a', 'busy');
  perform pg_temp.stage('mixed', 'b', 'quiet');
  perform pg_temp.stage('mixed', 'c', 'between');
end;
$$;
select is(pg_temp.tick('mixed'), '{quiet,between,busy}', 'the partition that was served least comes first');

do $$
begin
  perform pg_temp.define('plain', '{"fairness": {"half_life": null}}');
  perform pg_temp.stage('plain', 'a', format('a%s', i)) from generate_series(1, 3) as i;
  perform pg_temp.tick('plain');
  perform pg_temp.stage('plain', 'a', 'busy');
  perform pg_temp.at(161);
  perform pg_temp.stage('plain', 'b', 'quiet');
end;
$$;
select is(pg_temp.tick('plain'), '{busy,quiet}', 'without a half-life the partition that is due longest comes first');

-- A paused policy.
do $$
begin
  perform pg_temp.define('paused');
  perform pg_temp.stage('paused', 'a', 'a1');
  perform dispatch_pause('paused');
end;
$$;
select is(pg_temp.tick('paused'), '{}', 'a paused policy admits nothing');
select is((select count(*) from dispatch_staged_jobs where policy_name = 'paused'), 1::bigint, 'its jobs stay');
select is((select pending_count from dispatch_partitions where policy_name = 'paused'), 1::bigint, 'its inbox is folded all the same');
select is((select partitions_seen from dispatch_tick('paused')), 0, 'none of its partitions is claimed');
do $$
begin
  perform dispatch_resume('paused');
end;
$$;
select is(pg_temp.tick('paused'), '{a1}', 'a resumed policy goes on at once');

-- A paused partition, one of them not seen yet.
do $$
begin
  perform pg_temp.define('held');
  perform dispatch_pause('held', 'unseen');
  perform pg_temp.stage('held', 'a', 'a1');
  perform pg_temp.stage('held', 'unseen', 'u1');
end;
$$;
select is(pg_temp.tick('held'), '{a1}', 'a partition that was paused before it was ever seen admits nothing, the others do');
select is((select blocked_reason from dispatch_partitions where policy_name = 'held' and partition_key = 'unseen'), 'paused', 'it says why');
do $$
begin
  perform pg_temp.stage('held', 'unseen', 'u2');
end;
$$;
select is((select partitions_seen from dispatch_tick('held')), 0, 'it is looked at once and then costs no tick anything');
-- case: a limit change lifts the pause
do $$
begin
  perform pg_temp.define('held', '{"gates": [{"type": "concurrency", "max": 9}]}');
end;
$$;
select is(pg_temp.tick('held'), '{}', 'a changed definition does not lift the pause');
do $$
begin
  perform pg_temp.stage('held', 'unseen', 'u3', '{"context": {"k": "unseen", "more": 1}}');
end;
$$;
select is(pg_temp.tick('held'), '{}', 'nor does a changed context');
do $$
begin
  perform dispatch_resume('held', 'unseen');
end;
$$;
select is(pg_temp.tick('held'), '{u1,u2,u3}', 'a resumed partition goes on at once');

-- What is not there any more.
do $$
begin
  perform pg_temp.define('gone');
  perform dispatch_cancel(pg_temp.stage('gone', 'a', 'a1'));
  perform pg_temp.stage('gone', 'a', 'a2');
end;
$$;
select is(pg_temp.tick('gone'), '{a2}', 'a cancelled job is not admitted');
select is((select array[pending_count, in_flight_count, total_admitted] from dispatch_partitions where policy_name = 'gone'), '{0,1,1}', 'and leaves no trace in the counters');

select * from finish();
rollback;
