-- Simulation: what would another definition have admitted? The jobs of the recent past, or of a given load, come in on the
-- fake clock; the functions of the tick fold, claim, ask the gates, share and settle for a scratch policy; the jobs finish
-- after a service time. procrastinate is left out: a job's id in its queue is invented.
-- Invariant: nothing of it stays and nobody waits for it. All that writes is called by dispatch_play, in subtransactions that
-- always end with an error of our own, and only variables come out of them. Rows are told from everybody else's by ids that
-- no other session makes: the scratch policy's name is random, jobs have ids far below zero, and a partition's id is that of
-- the real one (so that those who are due at once come in the same order) with its second half replaced.
-- A transaction cannot clean up after itself, so its indexes fill with entries of rows that it has deleted. Hence the
-- subtransactions are short: what one came to is carried over into the next, which starts with clean indexes.

create or replace function dispatch_check_interval(p_name text, p_value interval, p_minimum interval, p_maximum interval)
returns void
language plpgsql
as $$
begin
  if p_value not between p_minimum and p_maximum then
    perform dispatch_raise('PD009', format('%s must lie between %s and %s, not be %s', p_name, p_minimum, p_maximum, p_value), null,
      'It is a length of time, like ''5 minutes''.');
  end if;
end;
$$;
comment on function dispatch_check_interval(text, interval, interval, interval) is 'Raises PD009 for a length of time that is out of range; null is in range.';

create or replace function dispatch_check_simulation(
  p_service_time interval, p_lag interval, p_tick_every interval, p_step interval, p_horizon interval, p_groups integer, p_max_jobs integer,
  p_max_ticks integer
)
returns void
language plpgsql
as $$
begin
  if current_setting('transaction_read_only')::boolean then
    perform dispatch_raise('25006', 'cannot simulate in a read-only transaction', 'A simulation writes rows, and rolls them back.',
      'Call it on the primary, in a transaction that is read write.');
  end if;
  perform dispatch_check_interval('p_service_time', p_service_time, '0.001 s', '3650 days');
  perform dispatch_check_interval('p_lag', p_lag, '0 s', '3650 days');
  perform dispatch_check_interval('p_tick_every', p_tick_every, '0.001 s', '1 day');
  perform dispatch_check_interval('p_step', p_step, '0.001 s', '3650 days');
  perform dispatch_check_interval('p_horizon', coalesce(p_horizon, '-1 s'), '0 s', '3650 days');
  perform dispatch_check_argument('p_groups', p_groups, 1, 100, 'It is a whole number.');
  perform dispatch_check_argument('p_max_jobs', p_max_jobs, 1, 100000, 'It is a whole number.');
  perform dispatch_check_argument('p_max_ticks', p_max_ticks, 1, 1000000, 'It is a whole number.');
end;
$$;
comment on function dispatch_check_simulation(interval, interval, interval, interval, interval, integer, integer, integer) is 'Raises PD009 for the first argument of a simulation that is out of range, and 25006 where nothing can be written.';

create or replace function dispatch_grouped_jobs(
  p_jobs dispatch_simulated_jobs[], p_groups integer,
  out jobs dispatch_simulated_jobs[], out ids uuid[], out keys text[], out partitions integer[]
)
language plpgsql
as $$
declare
  -- Ids of our own: a random place in the deep, and room for all jobs above it.
  v_first_id constant bigint := -4611686018427387904 + (random() * 1e12)::bigint * 1048576;
begin
  with counted as (
    select partition_id, partition_key, row_number() over (order by count(*) desc, partition_key) as place
    from unnest(p_jobs)
    group by partition_id, partition_key
  )
  select
    array_agg(partition_id order by place) filter (where place <= p_groups),
    array[null] || array_agg(partition_key order by place) filter (where place <= p_groups),
    array[count(*) filter (where place > p_groups)::integer] || array_agg(1 order by place) filter (where place <= p_groups)
  into ids, keys, partitions
  from counted;
  jobs := array(
    select row(
      policy_name, v_first_id + ordinality, next_at, staged_at, scheduled_at, admitted_at, service_time, priority,
      coalesce(array_position(ids, partition_id), 0), partition_id, partition_key, context
    )::dispatch_simulated_jobs
    from unnest(p_jobs) with ordinality
    order by ordinality
  );
end;
$$;
comment on function dispatch_grouped_jobs(dispatch_simulated_jobs[], integer) is 'The jobs of a simulation with ids in their order and the numbers of their groups. The p_groups partitions with the most jobs are groups by themselves, numbered as in ids; keys and partitions (how many) begin with group 0, all others.';

create or replace function dispatch_simulated_arrivals(
  p_scratch dispatch_policies, p_after timestamptz, p_now timestamptz, out jobs integer, out wakes boolean
)
language plpgsql
set search_path from current
as $$
begin
  with coming as materialized (
    select *
    from dispatch_simulated_jobs
    where policy_name = p_scratch.policy_name
      and next_at > p_after
      and next_at <= p_now
      and admitted_at is null
    order by id
  ), staged as (
    insert into dispatch_staged_jobs (id, partition_id, eligible_at, staged_at, scheduled_at, priority, policy_name, partition_key,
      task_name, queue_name, context)
    select id, partition_id, coalesce(scheduled_at, '-infinity'), staged_at, scheduled_at, priority, policy_name, partition_key,
      'simulated', p_scratch.queue_name, context
    from coming
  ), notes as (
    insert into dispatch_inbox (policy_name, partition_id, kind, jobs, due_at, newest_id, partition_key, shard, context)
    select policy_name, partition_id, 'staged', count(*), min(greatest(scheduled_at, next_at)), max(id), partition_key, 'default',
      (array_agg(context order by id desc))[1]
    from coming
    group by policy_name, partition_id, partition_key
    order by min(id)
  )
  select count(*), coalesce(bool_or(
    p.id is null
    or p.context <> coming.context
    or coalesce(p.due_at > greatest(coming.scheduled_at, coming.next_at, p.blocked_until), true)
  ), false)
  into jobs, wakes
  from coming
  left join lateral (
    select id, context, due_at, blocked_until from dispatch_partitions where id = coming.partition_id limit 1
  ) as p on true;
end;
$$;
comment on function dispatch_simulated_arrivals(dispatch_policies, timestamptz, timestamptz) is 'Lets the jobs of a simulation come in that do so after one moment and up to another, and returns how many. wakes tells whether a fold would change when some partition is looked at: where none does, the notes may as well wait for the next tick that has something to do.';

create or replace function dispatch_simulated_finishes(p_scratch dispatch_policies, p_after timestamptz, p_now timestamptz, p_lag interval)
returns boolean
language plpgsql
set search_path from current
as $$
declare
  v_adapts constant boolean := dispatch_adapts(p_scratch.gates);
  v_job record;
  v_wakes boolean := false;
begin
  for v_job in
    select job.id, job.partition_id, p.blocked_until is distinct from p.blocked_after_finish as wakes
    from dispatch_simulated_jobs as job
    cross join lateral (
      select blocked_until, blocked_after_finish from dispatch_partitions where id = job.partition_id limit 1
    ) as p
    where job.policy_name = p_scratch.policy_name
      and job.next_at > p_after
      and job.next_at <= p_now
      and job.admitted_at is not null
    order by job.next_at, job.id
  loop
    v_wakes := v_wakes or v_job.wakes;
    -- procrastinate's events, which tell the lag, know nothing of the job. It is in flight until its end is noted.
    if v_adapts then
      insert into dispatch_inbox (policy_name, partition_id, kind, succeeded, lag_ms)
      values (p_scratch.policy_name, v_job.partition_id, 'finished', true, extract(epoch from p_lag) * 1000);
    end if;
    perform dispatch_finish(v_job.id, true);
  end loop;
  return v_wakes;
end;
$$;
comment on function dispatch_simulated_finishes(dispatch_policies, timestamptz, timestamptz, interval) is 'Lets the jobs of a simulation finish that do so after one moment and up to another, each with an observation of p_lag where a cap learns from it. Tells whether a fold would change when some partition is looked at.';

create or replace function dispatch_simulated_hand_off(p_scratch dispatch_policies, p_ids bigint[], p_now timestamptz)
returns void
language plpgsql
set search_path from current
as $$
begin
  with taken as (
    delete from dispatch_staged_jobs where id = any (p_ids) returning id, partition_id, partition_key
  )
  insert into dispatch_inflight_jobs (job_id, partition_id, admitted_at, policy_name, partition_key)
  select id, partition_id, p_now, p_scratch.policy_name, partition_key
  from taken;
end;
$$;
comment on function dispatch_simulated_hand_off(dispatch_policies, bigint[], timestamptz) is 'Jobs of a simulation leave dispatch_staged_jobs and take their slots; procrastinate hears nothing of it.';

create or replace function dispatch_simulated_tick(
  p_scratch dispatch_policies, p_groups uuid[], p_now timestamptz, out seen integer, out admitted integer, out denied jsonb
)
language plpgsql
set search_path from current
as $$
declare
  v_handoff constant dispatch_handoffs := dispatch_decide(p_scratch, null);
begin
  seen := cardinality(v_handoff.claims);
  admitted := cardinality(v_handoff.staged_ids);
  if seen > 0 then
    update dispatch_simulated_jobs as job
    set (admitted_at, next_at) = (p_now, p_now + job.service_time)
    where job.policy_name = p_scratch.policy_name
      and job.id = any (v_handoff.staged_ids);
    perform dispatch_simulated_hand_off(p_scratch, v_handoff.staged_ids, p_now);
    perform dispatch_settle_outcomes(p_scratch, v_handoff, '{}');
  end if;
  denied := (
    select jsonb_agg(jsonb_build_object('at', p_now, 'group_number', group_number, 'reason', reason, 'times', times))
    from (
      select coalesce(array_position(p_groups, c.partition_id), 0) as group_number, split_part(c.reason, ':', 1) as reason, count(*) as times
      from unnest(v_handoff.claims) as c
      where c.reason is not null
        and c.ordinal <> all (v_handoff.ordinals)
      group by 1, 2
    ) as denials
  );
end;
$$;
comment on function dispatch_simulated_tick(dispatch_policies, uuid[], timestamptz) is 'A tick whose hand-off is invented. seen = partitions looked at, admitted = jobs, denied = how often a partition of a group got nothing, by reason; null when none was denied.';

create or replace function dispatch_simulated_due(p_scratch dispatch_policies)
returns timestamptz
language plpgsql
stable
set search_path from current
set enable_sort = off
as $$
begin
  return (
    select p.due_at
    from dispatch_partitions as p
    where p.policy_name = p_scratch.policy_name
      and p.due_at < 'infinity'
    order by p.due_at
    limit 1
  );
end;
$$;
comment on function dispatch_simulated_due(dispatch_policies) is 'When a tick of a simulation has something to look at, without its notes; null when it never has.';

create or replace function dispatch_simulated_moment(
  p_scratch dispatch_policies, p_groups uuid[], p_after timestamptz, p_now timestamptz, p_waiting integer, p_lag interval,
  out waiting integer, out seen integer, out admitted integer, out denied jsonb
)
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
-- The settings are for all that is called here.
declare
  v_arrived record;
  v_wakes boolean;
begin
  perform set_config('dispatch.fake_now', to_jsonb(p_now at time zone 'UTC') #>> '{}' || '+00', true);
  v_arrived := dispatch_simulated_arrivals(p_scratch, p_after, p_now);
  v_wakes := dispatch_simulated_finishes(p_scratch, p_after, p_now, p_lag);

  waiting := p_waiting + v_arrived.jobs;
  if waiting > 0 and (v_arrived.wakes or v_wakes or dispatch_simulated_due(p_scratch) <= p_now) then
    select tick.seen, tick.admitted, tick.denied into seen, admitted, denied from dispatch_simulated_tick(p_scratch, p_groups, p_now) as tick;
    waiting := waiting - admitted;
  end if;
end;
$$;
comment on function dispatch_simulated_moment(dispatch_policies, uuid[], timestamptz, timestamptz, integer, interval) is 'One moment of a simulation: sets the clock, lets jobs come in and finish, and ticks if a tick has something to look at. waiting = jobs that wait then; seen, admitted, denied = the tick''s, null when none came.';

create or replace function dispatch_grid(p_start timestamptz, p_at timestamptz, p_every interval)
returns timestamptz
language sql
immutable
parallel safe
return case
  when p_every is null then p_at
  else p_start + ceil(extract(epoch from p_at - p_start) / extract(epoch from p_every)) * extract(epoch from p_every)::double precision
    * interval '1 second'
end;
comment on function dispatch_grid(timestamptz, timestamptz, interval) is 'The first moment from p_at on that is a whole number of p_every after p_start; p_at itself without p_every.';

create or replace function dispatch_simulated_next(
  p_scratch dispatch_policies, p_now timestamptz, p_beyond timestamptz, p_waiting integer, p_seen integer, p_start timestamptz,
  p_tick_every interval, out comes_at timestamptz, out next_at timestamptz
)
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
begin
  comes_at := least(p_beyond, (
    select job.next_at
    from dispatch_simulated_jobs as job
    where job.policy_name = p_scratch.policy_name
      and job.next_at > p_now
    order by job.next_at
    limit 1
  ));
  next_at := comes_at;
  if p_waiting > 0 then
    -- A tick that saw nothing though something is due is not tried again at the same moment.
    next_at := least(next_at, greatest(dispatch_simulated_due(p_scratch), p_now + case when p_seen = 0 then interval '1 ms' else interval '0' end));
  end if;
  if p_tick_every is not null and next_at is not null then
    next_at := dispatch_grid(p_start, greatest(next_at, p_now + interval '1 microsecond'), p_tick_every);
  end if;
end;
$$;
comment on function dispatch_simulated_next(dispatch_policies, timestamptz, timestamptz, integer, integer, timestamptz, interval) is 'When the next job of a simulation comes in or finishes (comes_at; p_beyond = when the first does that is not in the table yet), and the next moment, for that or for what waits; null when nothing happens any more.';

create or replace function dispatch_simulated_shut(p_scratch dispatch_policies)
returns boolean
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
begin
  return not exists (
    select
    from dispatch_partitions
    where policy_name = p_scratch.policy_name
      and due_at is not null
      and (blocked_reason is null or blocked_reason !~ '^(max_zero|rate_zero|limit_error)')
  );
end;
$$;
comment on function dispatch_simulated_shut(dispatch_policies) is 'Does all that waits in a simulation wait for a limit that lets nothing pass, ever?';

create or replace function dispatch_write_scratch(
  p_scratch dispatch_policies, p_partitions dispatch_partitions[], p_stats dispatch_adaptive_stats[], p_slots dispatch_inflight_jobs[],
  p_staged dispatch_staged_jobs[], p_notes dispatch_inbox[], p_jobs dispatch_simulated_jobs[]
)
returns void
language plpgsql
set search_path from current
as $$
begin
  insert into dispatch_policies select (p_scratch).*;
  insert into dispatch_partitions select * from unnest(p_partitions);
  insert into dispatch_adaptive_stats select * from unnest(p_stats);
  insert into dispatch_inflight_jobs select * from unnest(p_slots);
  insert into dispatch_staged_jobs select * from unnest(p_staged);
  insert into dispatch_inbox overriding system value select * from unnest(p_notes);
  insert into dispatch_simulated_jobs select * from unnest(p_jobs);
end;
$$;
comment on function dispatch_write_scratch(dispatch_policies, dispatch_partitions[], dispatch_adaptive_stats[], dispatch_inflight_jobs[], dispatch_staged_jobs[], dispatch_inbox[], dispatch_simulated_jobs[]) is 'Writes the scratch policy of a simulation, with the rows that were read from it before; to be rolled back.';

create or replace function dispatch_read_scratch(
  p_scratch dispatch_policies, p_ids uuid[], p_now timestamptz,
  out partitions dispatch_partitions[], out stats dispatch_adaptive_stats[], out slots dispatch_inflight_jobs[],
  out staged dispatch_staged_jobs[], out notes dispatch_inbox[], out present dispatch_simulated_jobs[], out finished dispatch_simulated_jobs[]
)
language plpgsql
stable
set search_path from current
as $$
begin
  partitions := array(select p from dispatch_partitions as p where p.id = any (p_ids));
  stats := array(select s from dispatch_adaptive_stats as s where s.partition_id = any (p_ids));
  slots := array(select slot from dispatch_inflight_jobs as slot where slot.policy_name = p_scratch.policy_name);
  staged := array(select s from dispatch_staged_jobs as s where s.partition_id = any (p_ids));
  notes := array(select i from dispatch_inbox as i where i.policy_name = p_scratch.policy_name);
  present := array(
    select job from dispatch_simulated_jobs as job
    where job.policy_name = p_scratch.policy_name and (job.admitted_at is null) = (job.next_at <= p_now)
  );
  finished := array(
    select job from dispatch_simulated_jobs as job
    where job.policy_name = p_scratch.policy_name and job.admitted_at is not null and job.next_at <= p_now
  );
end;
$$;
comment on function dispatch_read_scratch(dispatch_policies, uuid[], timestamptz) is 'The rows of a simulation''s scratch policy, to be written again. present = jobs that wait or are in flight, finished = those that are through; jobs that are yet to come in are left out.';

create or replace function dispatch_play(
  p_scratch dispatch_policies, p_jobs dispatch_simulated_jobs[], p_groups uuid[], p_start timestamptz, p_horizon interval,
  p_tick_every interval, p_lag interval, p_max_ticks integer,
  out jobs dispatch_simulated_jobs[], out denied jsonb[], out ended_at timestamptz, out stopped text
)
language plpgsql
as $$
declare
  -- Ticks in one subtransaction: more, and they grow slow; fewer, and carrying over costs more, the more so the more wait.
  v_short constant integer := 100;
  -- Jobs to come are put into the table so many at a time, and with them all that come in at the same moment.
  v_few constant integer := 1000;
  v_ids constant uuid[] := array(select distinct partition_id from unnest(p_jobs));
  v_until constant timestamptz := p_jobs[cardinality(p_jobs)].next_at + p_horizon;
  v_now timestamptz := dispatch_grid(p_start, p_jobs[1].next_at, p_tick_every);
  v_next timestamptz;
  v_last_at timestamptz;
  v_beyond timestamptz;
  v_moment record;
  v_upcoming record;
  v_came integer := 0;
  v_upto integer;
  v_waiting integer := 0;
  v_ticks integer := 0;
  v_enough integer;
  v_partitions dispatch_partitions[];
  v_stats dispatch_adaptive_stats[];
  v_slots dispatch_inflight_jobs[];
  v_staged dispatch_staged_jobs[];
  v_notes dispatch_inbox[];
  v_present dispatch_simulated_jobs[];
  v_finished dispatch_simulated_jobs[];
begin
  ended_at := '-infinity';
  while v_now is not null loop
    v_last_at := greatest(v_now, p_jobs[least(v_came + v_few, cardinality(p_jobs))].next_at);
    v_upto := (select count(*) from unnest(p_jobs) as job where job.next_at <= v_last_at);
    v_beyond := p_jobs[v_upto + 1].next_at;
    v_enough := v_ticks + greatest(v_short, cardinality(v_staged) / 20);
    -- What is written is written in this block, and it ends with an error, always: all is rolled back, but for the variables.
    begin
      perform dispatch_write_scratch(p_scratch, v_partitions, v_stats, v_slots, v_staged, v_notes,
        v_present || p_jobs[v_came + 1:v_upto]);
      loop
        v_moment := dispatch_simulated_moment(p_scratch, p_groups, ended_at, v_now, v_waiting, p_lag);
        ended_at := v_now;
        v_waiting := v_moment.waiting;
        if v_moment.seen is not null then
          v_ticks := v_ticks + 1;
          denied := denied || v_moment.denied;
        end if;

        v_upcoming := dispatch_simulated_next(p_scratch, v_now, v_beyond, v_waiting, v_moment.seen, p_start, p_tick_every);
        v_next := v_upcoming.next_at;
        stopped := case
          when v_next is null then null
          when v_ticks >= p_max_ticks then format('after %s ticks', v_ticks)
          when v_next > v_until then 'at the horizon'
          when v_upcoming.comes_at is null and v_moment.admitted = 0 and dispatch_simulated_shut(p_scratch) then
            'where all that is left waits for a limit that lets nothing pass'
        end;
        exit when stopped is not null or v_next is null or v_next >= v_beyond or (v_ticks >= v_enough and v_next > v_now);
        v_now := v_next;
      end loop;
      select * into v_partitions, v_stats, v_slots, v_staged, v_notes, v_present, v_finished
      from dispatch_read_scratch(p_scratch, v_ids, ended_at);
      raise exception using errcode = 'PDSIM', message = 'the end of a part of a simulation';
    exception
      when sqlstate 'PDSIM' then null;
    end;
    jobs := jobs || v_finished;
    v_came := cardinality(jobs) + cardinality(v_present);
    v_now := case when stopped is null then v_next end;
  end loop;
  jobs := jobs || v_present || p_jobs[v_came + 1:];
end;
$$;
comment on function dispatch_play(dispatch_policies, dispatch_simulated_jobs[], uuid[], timestamptz, interval, interval, interval, integer) is 'Runs a simulation, from one moment at which something happens to the next, and takes everything back: only what became of the jobs, and who was denied when (one element a tick), is returned.';

create or replace function dispatch_round_step(p_span interval, p_steps integer)
returns interval
language sql
immutable
parallel safe
begin atomic
  select make_interval(secs => coalesce(
    min(seconds),
    (floor(extract(epoch from p_span) / p_steps / 86400) + 1) * 86400
  )::double precision)
  from unnest(array[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600,
    43200, 86400]) as seconds
  where seconds * p_steps > extract(epoch from p_span);
end;
comment on function dispatch_round_step(interval, integer) is 'A round length of time of which at most p_steps cover a span.';

create or replace function dispatch_simulation_series(
  p_jobs dispatch_simulated_jobs[], p_denied jsonb[], p_keys text[], p_partitions integer[], p_start timestamptz, p_ended_at timestamptz,
  p_step interval, p_service_time interval, p_note text
)
returns setof dispatch_simulation
language plpgsql
stable
as $$
declare
  v_span constant interval := p_ended_at - p_start;
  v_step constant interval := greatest(coalesce(p_step, dispatch_round_step(v_span, 60)), dispatch_round_step(v_span, 1000));
  v_seconds constant numeric := extract(epoch from v_step);
  v_last constant integer := floor(extract(epoch from v_span) / v_seconds);
begin
  return query
    with groups as (
      select ordinality::integer - 1 as group_number, key, partitions
      from unnest(p_keys, p_partitions) with ordinality as groups (key, partitions, ordinality)
      where partitions > 0
    ), played as materialized (
      select
        group_number,
        greatest(staged_at, p_start) as came_at,
        greatest(staged_at, scheduled_at) as ready_at,
        admitted_at,
        case when admitted_at is not null and next_at <= p_ended_at then next_at end as finished_at
      from unnest(p_jobs)
      where greatest(staged_at, p_start) <= p_ended_at
    ), moments as (
      select group_number, came_at as at, 1 as staged, 0 as admitted, 0 as finished, null::interval as wait from played
      union all
      select group_number, admitted_at, 0, 1, 0, admitted_at - ready_at from played where admitted_at is not null
      union all
      select group_number, finished_at, 0, 0, 1, null from played where finished_at is not null
      union all
      select group_number, p_start + step * v_step, 0, 0, 0, null from groups cross join generate_series(0, v_last) as step
    ), placed as (
      select
        *,
        floor(extract(epoch from at - p_start) / v_seconds)::integer as step,
        sum(admitted - finished) over (partition by group_number order by at) as in_flight
      from moments
    ), counted as (
      select group_number, step, sum(staged) as staged, sum(admitted) as admitted, sum(finished) as finished,
        max(in_flight) as in_flight, max(wait) as longest_wait, avg(wait) as mean_wait
      from placed
      group by group_number, step
    ), denials as (
      select group_number, step, jsonb_object_agg(reason, times order by reason) as denied
      from (
        select group_number, reason, sum(times) as times, floor(extract(epoch from at - p_start) / v_seconds)::integer as step
        from unnest(p_denied) as tick
        cross join lateral jsonb_to_recordset(tick) as denied (at timestamptz, group_number integer, reason text, times integer)
        group by 1, 2, 4
      ) as by_reason
      group by group_number, step
    )
    select
      p_start + step * v_step,
      step * v_step,
      groups.key,
      groups.partitions,
      counted.staged::integer,
      counted.admitted::integer,
      counted.finished::integer,
      (sum(counted.staged - counted.admitted) over (partition by group_number order by step))::integer,
      counted.in_flight::integer,
      coalesce(denials.denied, '{}'),
      counted.longest_wait,
      counted.mean_wait,
      p_service_time,
      p_note
    from counted
    join groups using (group_number)
    left join denials using (group_number, step)
    order by step, nullif(group_number, 0) nulls last;
end;
$$;
comment on function dispatch_simulation_series(dispatch_simulated_jobs[], jsonb[], text[], integer[], timestamptz, timestamptz, interval, interval, text) is 'What became of the jobs of a simulation, as a series of steps for each group of partitions; p_keys and p_partitions begin with the group of all others. A step that is not given, or too short, is a round one.';

create or replace function dispatch_simulate(
  p_policy text,
  p_definition jsonb default null,
  p_load jsonb default null,
  p_since timestamptz default null,
  p_until timestamptz default null,
  p_service_time interval default null,
  p_lag interval default null,
  p_tick_every interval default null,
  p_step interval default null,
  p_horizon interval default '1 day',
  p_groups integer default 10,
  p_max_jobs integer default 10000,
  p_max_ticks integer default 20000
)
returns setof dispatch_simulation
language plpgsql
set search_path from current
as $$
declare
  v_start timestamptz := coalesce(p_since, dispatch_now() - case when p_load is null then interval '1 hour' else interval '0' end);
  v_scratch dispatch_policies;
  v_past record;
  v_left_out text;
  v_assumed record;
  v_jobs dispatch_simulated_jobs[];
  v_groups record;
  v_play record;
begin
  perform dispatch_check_simulation(p_service_time, p_lag, p_tick_every, p_step, p_horizon, p_groups, p_max_jobs, p_max_ticks);
  -- Its clock starts there, and never comes to an end of time.
  if v_start not between '0001-01-01 00:00:00+00' and '9999-12-31 00:00:00+00' then
    perform dispatch_raise('PD009', format('p_since must lie in the years 1 to 9999, not be %s', v_start), null,
      'For all of the past, pass a time from before it.');
  end if;
  v_scratch := dispatch_parse_policy('simulation ' || gen_random_uuid(),
    case when p_definition is null then (dispatch_policy(p_policy)).definition else p_definition end, v_start);
  -- No workers are played, so no job in flight is known to be queued.
  v_scratch.max_queued := null;

  if p_load is null then
    perform dispatch_policy(p_policy);
    v_past := dispatch_past(p_policy, v_start, p_until, p_max_jobs);
    v_start := v_past.since;
    v_left_out := v_past.left_out;
    v_assumed := dispatch_assumed_times((v_past.admissions)[:1000], p_service_time, p_lag);
    v_jobs := dispatch_replayed_jobs(v_scratch, p_policy, v_past.admissions, v_past.waiting, v_start, v_assumed.service_time);
  else
    if p_policy is null then
      perform dispatch_policy(p_policy);
    end if;
    perform dispatch_check_load(p_load, v_scratch.partition_by);
    v_assumed := dispatch_assumed_times(
      array(select a from dispatch_recent_admissions(p_policy, dispatch_now() - interval '1 hour', 1000) as a), p_service_time, p_lag);
    v_jobs := dispatch_given_jobs(v_scratch, p_policy, p_load, v_start, v_assumed.service_time, p_max_jobs);
    v_left_out := dispatch_load_left_out(p_load, cardinality(v_jobs));
  end if;
  if v_jobs = '{}' then
    return;
  end if;

  v_groups := dispatch_grouped_jobs(v_jobs, p_groups);
  v_play := dispatch_play(v_scratch, v_groups.jobs, v_groups.ids, v_start, p_horizon, p_tick_every, v_assumed.lag, p_max_ticks);
  return query
    select *
    from dispatch_simulation_series(v_play.jobs, v_play.denied, v_groups.keys, v_groups.partitions, v_start, v_play.ended_at, p_step,
      v_assumed.service_time,
      concat_ws('; ',
        format('%s jobs', cardinality(v_jobs)),
        v_assumed.note,
        'left out: ' || v_left_out,
        'stopped ' || v_play.stopped || format(', with %s jobs not admitted',
          (select count(*) from unnest(v_play.jobs) as job where job.admitted_at is null))));
end;
$$;
comment on function dispatch_simulate(text, jsonb, jsonb, timestamptz, timestamptz, interval, interval, interval, interval, interval, integer, integer, integer) is 'What would another definition have admitted? Null for p_definition is the one in force. Simulated are the jobs of p_load, or else those that were admitted since p_since (default: 1 hour ago) and those that wait, if they were staged by p_until (default: now). They come in on the fake clock, the tick''s own functions admit them, and they finish p_service_time after that (default: the median of the policy''s last 1000, else 1 second). p_lag: the part of it that they queue, which is what adaptive_concurrency learns from (default: the median, else none). p_tick_every: one tick at each multiple of it, as from cron; null ticks whenever something happens, as a driver does. p_step: length of a step in the result (default: a round one, at most 60 steps). Shown by themselves are the p_groups (1 to 100) partitions with the most jobs. It ends when nothing is left, p_horizon after the last job came in, or after p_max_ticks (1 to 1000000), and takes p_max_jobs (1 to 100000) at most; the column note says what was left out. No row when there is no job. All of it is rolled back. Raises PD001 (unknown policy), PD002 (invalid definition), PD009 (invalid load or argument), 25006 (read-only transaction).';
