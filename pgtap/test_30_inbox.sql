-- The inbox: notes become counters, contexts and due times, whatever the order and however many at a time.
begin;
select plan(75);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';

do $$ begin
  perform dispatch_define_policy('p', '{"partition_by": "k", "gates": [{"type": "throttle", "rate": {"ctx": "rate", "default": 60}, "per": 60}, {"type": "concurrency", "max": {"ctx": "max", "default": 5}}]}');
  perform dispatch_define_policy('other', '{"partition_by": "k"}');
end $$;

create function pg_temp.seconds(p_at timestamptz) returns numeric language sql
return case when p_at < 'infinity' then extract(epoch from p_at - '2026-01-01 00:00+00') end;

create function pg_temp.at(p_seconds numeric) returns timestamptz language sql
return '2026-01-01 00:00+00'::timestamptz + make_interval(secs => p_seconds::float8);

-- A partition of policy p as it stands, in few words.
create function pg_temp.state(p_key text) returns text language sql stable as $$
  select format('%s waiting, %s in flight, due %s', pending_count, in_flight_count, coalesce(pg_temp.seconds(due_at)::float8::text, 'never'))
  from dispatch_partitions
  where policy_name = 'p' and partition_key = p_key
$$;

-- Writes a note as an enqueuer, a worker or an operator would.
create function pg_temp.note(p_key text, p_kind text, p_jobs integer default 0, p_due numeric default null, p_newest bigint default null, p_context jsonb default null)
returns void language sql as $$
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs, due_at, newest_id, partition_key, shard, context)
  select 'p', dispatch_partition_id('p', p_key), p_kind, p_jobs, pg_temp.at(p_due), p_newest,
    case when p_kind = 'staged' then p_key end, case when p_kind = 'staged' then 'default' end, p_context
$$;

-- Folds at a moment and tells how many notes.
create function pg_temp.fold(p_seconds numeric default 0, p_limit integer default 10000) returns integer language sql
return dispatch_fold('p', pg_temp.at(p_seconds), p_limit);

-- Brings a partition into a state that ticks and folds have left behind.
create function pg_temp.put(p_key text, p_due numeric, p_blocked numeric, p_blocked_after_finish numeric) returns void language sql as $$
  insert into dispatch_partitions (id, policy_name, partition_key, first_seen_at, pending_count, in_flight_count, newest_id, context, due_at, blocked_until, blocked_after_finish)
  values (dispatch_partition_id('p', p_key), 'p', p_key, dispatch_now(), 3, 2, 100, '{"k": "x"}',
    pg_temp.at(p_due), pg_temp.at(p_blocked), pg_temp.at(p_blocked_after_finish))
  on conflict (id) do update set (pending_count, in_flight_count, newest_id, context, due_at, blocked_until, blocked_after_finish)
    = (3, 2, 100, '{"k": "x"}', excluded.due_at, excluded.blocked_until, excluded.blocked_after_finish)
$$;

-- Creating ------------------------------------------------------------------------------------------

do $$ begin perform pg_temp.note('new', 'staged', 2, 5, 11, '{"k": "new"}'); end $$;
select is(pg_temp.fold(), 1, 'folding tells how many notes it folded');
select is(pg_temp.state('new'), '2 waiting, 0 in flight, due 5', 'the first note of a key creates its partition');
select results_eq(
  $$select first_seen_at, shard, newest_id, context, gate_state, blocked_until, total_admitted from dispatch_partitions where partition_key = 'new'$$,
  $$values (pg_temp.at(0), 'default', 11::bigint, '{"k": "new"}'::jsonb, '{}'::jsonb, null::timestamptz, 0::bigint)$$,
  'which has the note''s context and has seen no gate yet');
select is(pg_temp.fold(), 0, 'a note is folded once');
select is(pg_temp.state('new'), '2 waiting, 0 in flight, due 5', 'and changes nothing a second time');

do $$ begin
  perform pg_temp.note('a', 'staged', 1, 7, 21, '{"k": "a"}');
  perform pg_temp.note('b', 'staged', 2, 8, 23, '{"k": "b"}');
  perform pg_temp.note('a', 'staged', 4, 3, 27, '{"k": "a2"}');
  perform pg_temp.note('b', 'removed', -1);
  perform dispatch_stage('other', 't', '{"k": "a"}');
end $$;
select is(pg_temp.fold(), 4, 'many notes are folded at once');
select is(pg_temp.state('a'), '5 waiting, 0 in flight, due 3', 'the notes of a partition are summed, the earliest time counts');
select is(pg_temp.state('b'), '1 waiting, 0 in flight, due 8', 'also when one of the jobs has left before the partition is there');
select is(count(*), 1::bigint, 'the notes of other policies are left alone') from dispatch_inbox where policy_name = 'other';

-- In any order, any number at a time ----------------------------------------------------------------

-- Five notes of one partition, in all their orders, folded n at a time.
create temporary table results on commit drop as select ''::text as state, 0 as context where false;
do $$
declare
  v_order int[];
begin
  for v_order in
    select array[a, b, c, d, e]
    from generate_series(1, 5) a, generate_series(1, 5) b, generate_series(1, 5) c, generate_series(1, 5) d, generate_series(1, 5) e
    where array[a, b, c, d, e] @> array[1, 2, 3, 4, 5]
  loop
    for v_bite in 1 .. 5 loop
      perform pg_temp.put('x', 2, null, null);
      for v_i in 1 .. 5 loop
        case v_order[v_i]
          when 1 then perform pg_temp.note('x', 'staged', 4, 6, 101, '{"v": 1}');
          when 2 then perform pg_temp.note('x', 'staged', 1, 1, 103, '{"v": 3}');
          when 3 then perform pg_temp.note('x', 'staged', 2, 8, 102, '{"v": 2}');
          when 4 then perform pg_temp.note('x', 'removed', -9);
          when 5 then perform pg_temp.note('x', 'finished', -3);
        end case;
      end loop;
      while pg_temp.fold(0, v_bite) > 0 loop
        null;
      end loop;
      insert into results
      select pg_temp.state('x'), (context ->> 'v')::int from dispatch_partitions where partition_key = 'x';
    end loop;
  end loop;
end $$;
select results_eq(
  'select count(*), state, context from results group by state, context',
  $$values (600::bigint, '1 waiting, -1 in flight, due 1', 3)$$,
  'in whatever order notes come and however many are folded at a time, the sums and the newest context are the same');

-- Below zero ----------------------------------------------------------------------------------------

do $$ begin
  perform dispatch_stage('p', 't', '{"k": "early"}');
  perform pg_temp.fold();
  perform dispatch_stage('p', 't', '{"k": "early"}'), dispatch_stage('p', 't', '{"k": "early"}');
end $$;
select is(dispatch_force(dispatch_policy('p'), dispatch_partition_id('p', 'early'), 10), 3, 'jobs are admitted before their note is folded');
select is(pg_temp.state('early'), '-2 waiting, 3 in flight, due never', 'the number that waits is below zero for a moment');
do $$ begin perform pg_temp.fold(); end $$;
select is(pg_temp.state('early'), '0 waiting, 3 in flight, due 0', 'and right when the note is folded');
select is(jobs_admitted, 0, 'the tick that finds nothing there') from dispatch_tick('p');
select is(pg_temp.state('early'), '0 waiting, 3 in flight, due never', 'leaves the partition alone from then on');

-- Notes of unknown partitions -----------------------------------------------------------------------

do $$ begin
  perform pg_temp.note('unknown', 'removed', -1), pg_temp.note('unknown', 'finished', -1), pg_temp.note('unknown', 'resumed');
end $$;
select is(pg_temp.fold(), 3, 'notes of a partition that does not exist are folded away');
select is(pg_temp.state('unknown'), null, 'and create none');
do $$ begin
  perform pg_temp.note('unknown', 'removed', -1), pg_temp.note('known', 'staged', 1, 0, 1, '{}');
  perform pg_temp.fold();
end $$;
select is(pg_temp.state('known'), '1 waiting, 0 in flight, due 0', 'nor do they harm their neighbours');

-- What lifts a block --------------------------------------------------------------------------------

-- A partition with jobs waiting that the throttle blocks until 60 and, until a finish or 90, the cap.
create function pg_temp.after(p_notes text, p_now numeric, p_due numeric default 90, p_blocked numeric default 90, p_after_finish numeric default 60)
returns text language plpgsql as $$
begin
  perform pg_temp.put('x', p_due, p_blocked, p_after_finish);
  execute 'select ' || p_notes;
  perform pg_temp.fold(p_now);
  return (select format('due %s, blocked until %s', coalesce(pg_temp.seconds(due_at)::float8::text, 'never'), coalesce(pg_temp.seconds(blocked_until)::float8::text, 'open'))
    from dispatch_partitions where partition_key = 'x');
end $$;

select is(pg_temp.after(notes, 10), expected, sentence)
from (values
  ($$pg_temp.note('x', 'staged', 1, 10, 101, '{"k": "x"}')$$, 'due 90, blocked until 90', 'a new job does not make a blocked partition due'),
  ($$pg_temp.note('x', 'staged', 1, 200, 101, '{"k": "x"}')$$, 'due 90, blocked until 90', 'nor does a scheduled one push it back'),
  ($$pg_temp.note('x', 'removed', -1)$$, 'due 90, blocked until 90', 'nor does a cancelled one'),
  ($$pg_temp.note('x', 'finished', -1)$$, 'due 60, blocked until 60', 'a finish lifts the cap and leaves the throttle'),
  ($$pg_temp.note('x', 'finished', -1), pg_temp.note('x', 'staged', 1, 10, 101, '{"k": "x"}')$$, 'due 60, blocked until 60', 'also when a job comes in at the same time'),
  ($$pg_temp.note('x', 'resumed')$$, 'due 10, blocked until open', 'a resume lifts all'),
  ($$pg_temp.note('x', 'finished', -1), pg_temp.note('x', 'resumed')$$, 'due 10, blocked until open', 'also beside a finish'),
  ($$pg_temp.note('x', 'staged', 1, 10, 101, '{"k": "x", "rate": 99}')$$, 'due 10, blocked until open', 'a changed context lifts all, for the limits may have changed'),
  ($$pg_temp.note('x', 'staged', 1, 10, 99, '{"k": "x", "rate": 99}')$$, 'due 90, blocked until 90', 'an older context that comes late lifts nothing'),
  ($$pg_temp.note('x', 'staged', 1, 200, 101, '{"k": "x", "rate": 99}')$$, 'due 10, blocked until open', 'a changed context counts for those that wait already, even if its own job is scheduled')
) as lifts (notes, expected, sentence);

select is(pg_temp.after($$pg_temp.note('x', 'finished', -1)$$, 10, 11, 11, null), 'due 10, blocked until open', 'where only the cap was full a finish makes the partition due at once');
select is(pg_temp.after($$pg_temp.note('x', 'finished', -1)$$, 10, null, 11, null), 'due never, blocked until open', 'where nothing waits a finish makes nothing due');
select is(pg_temp.after($$pg_temp.note('x', 'resumed')$$, 10, null, 11, 11), 'due never, blocked until open', 'nor does a resume');
select is(pg_temp.after($$pg_temp.note('x', 'staged', 1, 10, 101, '{"k": "x"}')$$, 10, null, null, null), 'due 10, blocked until open', 'a job makes an idle partition due');
select is(pg_temp.after($$pg_temp.note('x', 'staged', 1, 50, 101, '{"k": "x"}')$$, 10, null, null, null), 'due 50, blocked until open', 'at the time of its schedule');
select is(pg_temp.after($$pg_temp.note('x', 'staged', 1, 10, 101, '{"k": "x"}')$$, 10, null, 40, 40), 'due 40, blocked until 40', 'but not before the gates open');
select is(pg_temp.after($$pg_temp.note('x', 'staged', 1, 20, 101, '{"k": "x"}')$$, 10, 50, null, null), 'due 20, blocked until open', 'a job that is due sooner brings an open partition forward');
select is(pg_temp.after($$pg_temp.note('x', 'staged', 1, 60, 101, '{"k": "x"}')$$, 10, 50, null, null), 'due 50, blocked until open', 'one that is due later does not push it back');

-- Through the front door ----------------------------------------------------------------------------

do $$ begin
  perform set_config('dispatch.fake_now', pg_temp.at(1000)::text, true);
  perform dispatch_tick('p');
  perform dispatch_stage_many('p', (select jsonb_agg('{"task_name": "t", "args": {"k": "door"}, "context": {"k": "door", "rate": 2, "max": 9}}'::jsonb) from generate_series(1, 5)));
end $$;
select is(jobs_admitted, 2, 'a throttle of 2 a minute admits two') from dispatch_tick('p');
select is(pg_temp.state('door'), '3 waiting, 2 in flight, due 1030', 'and the partition is due when the next token comes');
do $$ begin
  perform dispatch_stage('p', 't', p_context => '{"k": "door", "rate": 2, "max": 9}') from generate_series(1, 3);
end $$;
select is(partitions_seen, 0, 'more jobs do not make a tick look before') from dispatch_tick('p');
select is(pg_temp.state('door'), '6 waiting, 2 in flight, due 1030', 'they are only counted');
do $$ begin perform dispatch_finish(min(job_id), true) from dispatch_inflight_jobs where partition_key = 'door'; end $$;
select is(partitions_seen, 0, 'nor does a finish') from dispatch_tick('p');
select is(pg_temp.state('door'), '6 waiting, 1 in flight, due 1030', 'which frees its slot');
do $$ begin perform dispatch_cancel(max(id)) from dispatch_staged_jobs where partition_key = 'door'; end $$;
select is(partitions_seen, 0, 'nor does cancelling a job') from dispatch_tick('p');
select is(pg_temp.state('door'), '5 waiting, 1 in flight, due 1030', 'which takes it off the count');

do $$ begin
  perform dispatch_stage('p', 't', p_context => '{"k": "door", "rate": 60, "max": 3}');
end $$;
select is(partitions_seen, 1, 'a context with other limits does') from dispatch_tick('p');
select is(pg_temp.state('door'), '6 waiting, 1 in flight, due 1001', 'and they count from then on: a token a second');
do $$ begin perform set_config('dispatch.fake_now', pg_temp.at(1010)::text, true); end $$;
select is(jobs_admitted, 2, 'up to the new cap') from dispatch_tick('p');
select is(pg_temp.state('door'), '4 waiting, 3 in flight, due 1011', 'a full partition rests for its backoff');
do $$ begin perform dispatch_finish(min(job_id), true) from dispatch_inflight_jobs where partition_key = 'door'; end $$;
select is(jobs_admitted, 1, 'or until a job finishes') from dispatch_tick('p');

do $$ begin
  perform dispatch_cancel(id) from dispatch_staged_jobs where partition_key = 'door';
  perform dispatch_finish(job_id, true) from dispatch_inflight_jobs where partition_key = 'door';
  perform dispatch_tick('p');
end $$;
select is(pg_temp.state('door'), '0 waiting, 0 in flight, due never', 'a partition whose last jobs are cancelled comes to rest');

-- A clock that was fast ----------------------------------------------------------------------------

do $$ begin
  perform dispatch_tick('other');
  perform set_config('dispatch.fake_now', '2026-01-01 06:00+00', true);
  perform dispatch_stage('other', 't', '{"k": "early"}');
  perform dispatch_fold('other', dispatch_now());
  perform set_config('dispatch.fake_now', '2026-01-01 00:00+00', true);
end $$;
select is(jobs_admitted, 0, 'a job that was staged while the clock was fast waits for that time') from dispatch_tick('other');
do $$ begin perform dispatch_resume('other', 'early'); end $$;
select is(jobs_admitted, 1, 'unless its partition is resumed: then it is looked at whatever it sleeps for') from dispatch_tick('other');
do $$ begin
  perform set_config('dispatch.fake_now', '2026-01-01 06:00+00', true);
  perform dispatch_stage('other', 't', '{"k": "early"}');
  perform dispatch_fold('other', dispatch_now());
  perform set_config('dispatch.fake_now', '2026-01-01 00:00+00', true);
  perform dispatch_define_policy('other', '{"partition_by": "k", "max_queued": 7}');
end $$;
select is(jobs_admitted, 1, 'or its definition is changed') from dispatch_tick('other');

-- Notes that cannot be folded ------------------------------------------------------------------------

set local client_min_messages = error;
do $$ begin perform pg_temp.note('good', 'staged', 1, 0, 1, '{}'), pg_temp.note('bad', 'staged', 1, 0, 1, '{}'); perform pg_temp.fold(); end $$;
do $$ begin
  perform pg_temp.note('good', 'staged', 2, 0, 2, '{}'), pg_temp.note('bad', 'finished', -2147483647), pg_temp.note('no id', 'staged', 1, 0, null, '{}'),
    pg_temp.note('bad', 'finished', -2147483647), pg_temp.note('bad', 'staged', 3, 0, 3, '{}'), pg_temp.note('good', 'removed', -1);
end $$;
select is(pg_temp.fold(), 4, 'a note that cannot be folded keeps none from being folded');
select is(pg_temp.state('good'), '2 waiting, 0 in flight, due 0', 'neither of another partition');
select is(pg_temp.state('bad'), '4 waiting, -2147483647 in flight, due 0', 'nor of its own');
select results_eq(
  $$select kind, jobs, error like '%integer out of range%' or error like '%newest_id%' from dispatch_dead_notes order by id$$,
  $$values ('staged', 1, true), ('finished', -2147483647, true)$$,
  'it is set aside, with its error');
select is(pg_temp.fold(), 0, 'and not tried again by itself');
select results_eq(
  $$select level, partition_key is null, message ~ '^2 notes could not be folded' from dispatch_hints where hint = 'dead_notes'$$,
  $$values ('warning', true, true)$$,
  'a hint says so');
do $$ begin perform dispatch_requeue_note(min(id)) from dispatch_dead_notes; end $$;
select is(pg_temp.fold(), 1, 'it can be tried again');
select is(pg_temp.state('no id'), '1 waiting, 0 in flight, due 0', 'what could be mended is folded then');
do $$ begin perform dispatch_discard_note(min(id)) from dispatch_dead_notes; end $$;
select is(count(*), 0::bigint, 'or thrown away') from dispatch_dead_notes;
select throws_ok('select dispatch_requeue_note(1)', 'PD006', null, 'one that is not dead cannot be requeued');
select throws_ok('select dispatch_discard_note(1)', 'PD006', null, 'nor discarded');

do $$ begin
  perform pg_temp.fold();
  perform pg_temp.note('crowd ' || n, 'staged', 1, 0, case when n % 3 > 0 then 1 end, '{}') from generate_series(1, 90) as n;
end $$;
select is(pg_temp.fold(), 60, 'however many there are');
select is(count(*), 30::bigint, 'all of them are set aside') from dispatch_dead_notes;
do $$ begin
  perform pg_temp.note('crowd', 'staged', 1, 0, null, '{}') from generate_series(1, 150) as n;
  perform pg_temp.note('after', 'staged', 1, 0, 1, '{}');
end $$;
select is(pg_temp.fold(), 0, 'a hundred at a time');
select is(pg_temp.fold(), 1, 'and then the rest, and what is behind them');

-- Notes that are put off -----------------------------------------------------------------------------

do $$ begin
  delete from dispatch_inbox where policy_name = 'p';
  perform pg_temp.note('off', 'staged', 1, 0, 11, '{"v": 1}'), pg_temp.note('off', 'staged', 1, 0, 12, '{"v": 2}'), pg_temp.note('on', 'staged', 1, 0, 13, '{}');
  update dispatch_inbox set put_off = true where policy_name = 'p';
  perform pg_temp.note('off', 'staged', 1, 0, 14, '{"v": 4}'), pg_temp.note('on', 'finished', -1);
end $$;
select is((dispatch_behind_put_off('p', array(select i from dispatch_inbox as i where policy_name = 'p' and not put_off order by id))),
  array(select id from dispatch_inbox where policy_name = 'p' and not put_off order by id), 'notes wait behind those of their partition that are put off');
select is(pg_temp.fold(0, 1), 2, 'of those that are put off, each partition that is free has its share');
select is(pg_temp.fold(), 3, 'and then all come that wait');
select is(pg_temp.state('off'), '3 waiting, 0 in flight, due 0', 'they are summed with the others');

-- The rules of a fold by themselves ---------------------------------------------------------------

select results_eq(
  $$select finished, lifted, pg_temp.seconds(dispatch_still_blocked(pg_temp.at(60), pg_temp.at(9), finished, lifted))
    from unnest(array[false, true]) as finished cross join unnest(array[false, true]) as lifted order by 1, 2$$,
  $$values (false, false, 60::numeric), (false, true, null), (true, false, 9), (true, true, null)$$,
  'a finish leaves what waits for more than slots, and what is lifted leaves nothing');
select is(dispatch_still_blocked(null, pg_temp.at(9), true, false), null, 'a finish blocks nothing that was not blocked');
select results_eq(
  $$select pg_temp.seconds(dispatch_due_with_notes(pg_temp.at(due), pg_temp.at(was), pg_temp.at(blocked), pg_temp.at(jobs), resumed, pg_temp.at(5)))
    from (values
      (60, 60, 60, 0, false), (60, 60, 60, null, false), (60, 60, 9, null, false), (60, 60, null, null, false), (null, null, null, 7, false),
      (null, 60, null, null, false), (3, null, null, 7, false), (60, null, null, null, true), (null, null, null, null, true)
    ) as cases (due, was, blocked, jobs, resumed)$$,
  $$values (60::numeric), (60), (9), (5), (7), (null), (3), (5), (null)$$,
  'a partition is due when what was lifted lets it, or when the first new job may go, and never later than it was');

select * from finish();
rollback;
