-- Simulation: what would another definition have admitted? The jobs of the recent past, or of a given load, come in on the
-- fake clock; the functions of the tick fold, claim, ask the gates, share and settle for a scratch policy; the jobs finish
-- after a service time. procrastinate is left out: a job's id in its queue is invented.
-- Invariant: nothing of it stays and nobody waits for it. All is done in subtransactions that always end with an error of
-- our own, and only variables come out of them. Rows are told from everybody else's by ids that no other session makes:
-- the scratch policy's name is random, jobs have ids far below zero, and a partition's id is that of the real one (so that
-- those who are due at once come in the same order) with its second half replaced.
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

create or replace function dispatch_refuse_load(p_path text, p_problem text, p_value jsonb)
returns void
language plpgsql
as $$
begin
  perform dispatch_raise('PD009', format('invalid load: %s %s', p_path, p_problem),
    case when p_value is null then 'It is missing.' else format('Its value is %s.', left(p_value::text, 200)) end,
    'A load is an array like [{"key": "a", "jobs": 100, "every": 0.5}]; see docs/simulate.md.');
end;
$$;
comment on function dispatch_refuse_load(text, text, jsonb) is 'Raises PD009, naming the path and the value that are wrong in the load of a simulation.';

create or replace function dispatch_load_spec()
returns table (name text, default_value numeric, minimum numeric, maximum numeric, whole boolean)
language sql
immutable
parallel safe
begin atomic
  values
    ('jobs', 1::numeric, 1::numeric, 1000000::numeric, true),
    ('start', 0, 0, 315360000, false),
    ('every', 0, 0, 315360000, false),
    ('priority', 0, -2147483647, 2147483647, true),
    ('service_time', null, 0.001, 315360000, false);
end;
comment on function dispatch_load_spec() is 'The numbers in an entry of a simulation''s load: defaults and ranges.';

create or replace function dispatch_check_load(p_load jsonb, p_partition_by text[])
returns void
language plpgsql
as $$
declare
  v_entry record;
  v_spec record;
  v_path text;
  v_key text;
  v_value jsonb;
  v_jobs numeric := 0;
begin
  if jsonb_typeof(p_load) is distinct from 'array' then
    perform dispatch_refuse_load('the load', 'must be an array of objects', p_load);
  end if;
  for v_entry in
    select value, format('load[%s]', ordinality - 1) as path
    from jsonb_array_elements(p_load) with ordinality
  loop
    if jsonb_typeof(v_entry.value) <> 'object' then
      perform dispatch_refuse_load(v_entry.path, 'must be an object', v_entry.value);
    end if;
    for v_key, v_value in select key, value from jsonb_each(v_entry.value) order by key loop
      v_path := v_entry.path || '.' || v_key;
      if v_key = 'context' then
        if jsonb_typeof(v_value) <> 'object' then
          perform dispatch_refuse_load(v_path, 'must be an object', v_value);
        end if;
      elsif v_key = 'key' then
        if p_partition_by = '{}' then
          perform dispatch_refuse_load(v_path, 'must be left out: the definition has no partition_by', v_value);
        elsif cardinality(p_partition_by) = 1 and jsonb_typeof(v_value) not in ('string', 'number', 'boolean') then
          perform dispatch_refuse_load(v_path, format('must be a string, the value at %s', p_partition_by[1]), v_value);
        elsif cardinality(p_partition_by) > 1 and (
          jsonb_typeof(v_value) <> 'array' or jsonb_array_length(v_value) <> cardinality(p_partition_by)
        ) then
          perform dispatch_refuse_load(v_path,
            format('must be an array of the values at %s', array_to_string(p_partition_by, ', ')), v_value);
        end if;
      else
        select * into v_spec from dispatch_load_spec() as spec where spec.name = v_key;
        if not found then
          perform dispatch_refuse_load(v_path, format('is not known; known here: key, context, %s',
            (select string_agg(spec.name, ', ') from dispatch_load_spec() as spec)), v_value);
        elsif jsonb_typeof(v_value) <> 'number'
          or (v_value #>> '{}')::numeric not between v_spec.minimum and v_spec.maximum
          or v_spec.whole and (v_value #>> '{}')::numeric <> trunc((v_value #>> '{}')::numeric) then
          perform dispatch_refuse_load(v_path, format('must be a %s between %s and %s',
            case when v_spec.whole then 'whole number' else 'number' end, v_spec.minimum, v_spec.maximum), v_value);
        end if;
      end if;
    end loop;
    v_jobs := v_jobs + coalesce((v_entry.value ->> 'jobs')::numeric, 1);
    if v_jobs > 1000000 then
      perform dispatch_refuse_load(v_entry.path || '.jobs', 'brings the load over 1000000 jobs', v_entry.value -> 'jobs');
    end if;
  end loop;
end;
$$;
comment on function dispatch_check_load(jsonb, text[]) is 'Raises PD009 for the first thing that is wrong with the load of a simulation, naming its path and its value.';

create or replace function dispatch_put(p_object jsonb, p_path text[], p_value jsonb)
returns jsonb
language plpgsql
immutable
parallel safe
as $$
begin
  if cardinality(p_path) > 1 then
    p_value := dispatch_put(case jsonb_typeof(p_object -> p_path[1]) when 'object' then p_object -> p_path[1] else '{}' end,
      p_path[2:], p_value);
  end if;
  return p_object || jsonb_build_object(p_path[1], p_value);
end;
$$;
comment on function dispatch_put(jsonb, text[], jsonb) is 'An object with a value put at a path, and objects made on the way there.';

create or replace function dispatch_load_context(p_entry jsonb, p_partition_by text[])
returns jsonb
language plpgsql
immutable
parallel safe
as $$
declare
  v_context jsonb := coalesce(p_entry -> 'context', '{}');
begin
  if p_entry ? 'key' then
    for v_i in 1 .. cardinality(p_partition_by) loop
      v_context := dispatch_put(v_context, string_to_array(p_partition_by[v_i], '.'),
        case when cardinality(p_partition_by) = 1 then p_entry -> 'key' else p_entry -> 'key' -> v_i - 1 end);
    end loop;
  end if;
  return v_context;
end;
$$;
comment on function dispatch_load_context(jsonb, text[]) is 'The context of a load''s entry, with its key put where partition_by reads it.';

create or replace function dispatch_simulated_partition(p_scratch text, p_policy text, p_partition_key text)
returns uuid
language sql
stable
parallel safe
return (left(dispatch_partition_id(p_policy, p_partition_key)::text, 18) || right(p_scratch, 18))::uuid;
comment on function dispatch_simulated_partition(text, text, text) is 'A partition''s id in a simulation: it sorts like the real one and is no other simulation''s.';

create or replace function dispatch_given_jobs(p_scratch dispatch_policies, p_policy text, p_load jsonb, p_start timestamptz, p_service_time interval, p_limit integer)
returns dispatch_simulated_jobs[]
language plpgsql
stable
as $$
begin
  return array(
    select row(
      p_scratch.policy_name, 0, came_at, came_at, null, null,
      coalesce(make_interval(secs => (entry ->> 'service_time')::double precision), p_service_time),
      coalesce((entry ->> 'priority')::integer, 0), 0,
      dispatch_simulated_partition(p_scratch.policy_name, p_policy, partition_key), partition_key, context
    )::dispatch_simulated_jobs
    from (
      select entry, ordinality, context, dispatch_partition_key(p_scratch.partition_by, context) as partition_key
      from jsonb_array_elements(p_load) with ordinality as entries (entry, ordinality)
      cross join lateral dispatch_load_context(entry, p_scratch.partition_by) as context
    ) as entries
    cross join lateral (
      select
        n,
        p_start + make_interval(secs => (coalesce((entry ->> 'start')::numeric, 0) + n * coalesce((entry ->> 'every')::numeric, 0))::double precision)
          as came_at
      from generate_series(0, least(coalesce((entry ->> 'jobs')::integer, 1), p_limit) - 1) as n
    ) as coming
    order by came_at, ordinality, n
    limit p_limit
  );
end;
$$;
comment on function dispatch_given_jobs(dispatch_policies, text, jsonb, timestamptz, interval, integer) is 'The first p_limit jobs of a load, in the order in which they come in.';

create or replace function dispatch_recent_admissions(p_policy text, p_since timestamptz, p_limit integer)
returns setof dispatch_admissions
language plpgsql
stable
set search_path from current
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $$
begin
  return query
    select *
    from dispatch_admissions
    where policy_name = p_policy
      and admitted_at >= p_since
      and job_id is not null
    order by admitted_at desc
    limit p_limit;
end;
$$;
comment on function dispatch_recent_admissions(text, timestamptz, integer) is 'The last p_limit admissions of a policy since a time, the newest first.';

create or replace function dispatch_waiting_sample(p_policy text, p_limit integer)
returns setof dispatch_staged_jobs
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_ids uuid[];
  v_waiting integer[];
  v_shares integer[];
begin
  -- The counters are those of the last tick, and the notes tell what came in since.
  select coalesce(array_agg(id), '{}'), coalesce(array_agg(least(jobs, p_limit)::integer), '{}')
  into v_ids, v_waiting
  from (
    select id, sum(jobs) as jobs
    from (
      (
        select p.id, p.pending_count as jobs
        from dispatch_partitions as p
        where p.policy_name = p_policy
          and p.due_at is not null
        order by p.due_at
        limit p_limit
      )
      union all
      (
        select i.partition_id, i.jobs
        from dispatch_inbox as i
        where i.policy_name = p_policy
          and i.kind in ('staged', 'removed')
        order by i.id
        limit p_limit
      )
    ) as counted
    group by id
    having sum(jobs) > 0
    order by id
    limit p_limit
  ) as partitions;
  v_shares := dispatch_share(v_waiting, array_fill(1::double precision, array[cardinality(v_ids)]), p_limit);

  return query
    select waiting.*
    from unnest(v_ids, v_shares) as partitions (id, share)
    cross join lateral (
      select s.*
      from dispatch_staged_jobs as s
      where s.partition_id = partitions.id
      order by s.priority desc, s.eligible_at, s.id
      limit partitions.share
    ) as waiting
    where waiting.job_id is null;
end;
$$;
comment on function dispatch_waiting_sample(text, integer) is 'Up to p_limit jobs that wait in a policy, shared evenly among its partitions, and of each those that are next. Retries are left out.';

create or replace function dispatch_waiting_count(p_policy text)
returns bigint
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
begin
  return (
    select coalesce(sum(greatest(p.pending_count, 0)), 0)
    from dispatch_partitions as p
    where p.policy_name = p_policy
      and p.due_at is not null
  ) + (
    select coalesce(sum(noted.jobs), 0)
    from (
      select i.jobs from dispatch_inbox as i where i.policy_name = p_policy and i.kind in ('staged', 'removed') order by i.id limit 10000
    ) as noted
  );
end;
$$;
comment on function dispatch_waiting_count(text) is 'Jobs that wait in a policy, by the counters of its partitions and the first notes of what came in since.';

create or replace function dispatch_usual_times(p_admissions dispatch_admissions[], out jobs bigint, out service_time interval, out lag interval)
language plpgsql
stable
set search_path from current
as $$
begin
  select
    count(times.ended_after),
    make_interval(secs => percentile_cont(0.5) within group (order by times.ended_after)),
    make_interval(secs => percentile_cont(0.5) within group (order by times.lag_ms) / 1000)
  into jobs, service_time, lag
  from (
    select
      extract(epoch from dispatch_ended_at(a.job_id) - a.admitted_at)::double precision as ended_after,
      dispatch_lag_ms(a.job_id, a.admitted_at) as lag_ms
    from unnest(p_admissions) as a
  ) as times
  where times.ended_after > 0;
end;
$$;
comment on function dispatch_usual_times(dispatch_admissions[]) is 'The median time from admission to finish, and from admission to start, of those admissions whose job has ended and that procrastinate still knows.';

create or replace function dispatch_replayed_jobs(p_scratch dispatch_policies, p_policy text, p_admissions dispatch_admissions[], p_waiting dispatch_staged_jobs[], p_start timestamptz, p_service_time interval)
returns dispatch_simulated_jobs[]
language plpgsql
stable
as $$
begin
  return array(
    select row(
      p_scratch.policy_name, 0, greatest(staged_at, p_start), staged_at, scheduled_at, null, p_service_time, priority, 0,
      dispatch_simulated_partition(p_scratch.policy_name, p_policy, partition_key), partition_key, context
    )::dispatch_simulated_jobs
    from (
      select a.staged_id as id, a.staged_at, null as scheduled_at, 0 as priority, a.context
      from unnest(p_admissions) as a
      union all
      select s.id, s.staged_at, nullif(s.eligible_at, '-infinity'), s.priority, s.context
      from unnest(p_waiting) as s
    ) as jobs
    cross join lateral dispatch_partition_key(p_scratch.partition_by, context) as partition_key
    order by greatest(staged_at, p_start), id
  );
end;
$$;
comment on function dispatch_replayed_jobs(dispatch_policies, text, dispatch_admissions[], dispatch_staged_jobs[], timestamptz, interval) is 'The jobs of a policy''s recent past, in the order in which they came in; those that waited at the start come in then.';

create or replace function dispatch_simulated_coming(p_scratch dispatch_policies, p_after timestamptz, p_now timestamptz, p_lag_ms double precision, out came integer, out wakes boolean)
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_job record;
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
  into came, wakes
  from coming
  left join lateral (
    select id, context, due_at, blocked_until from dispatch_partitions where id = coming.partition_id limit 1
  ) as p on true;

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
    wakes := wakes or v_job.wakes;
    perform dispatch_finish(v_job.id, true);
    -- procrastinate's events, which tell the lag, know nothing of the job.
    if p_lag_ms is not null then
      insert into dispatch_inbox (policy_name, partition_id, kind, succeeded, lag_ms)
      values (p_scratch.policy_name, v_job.partition_id, 'finished', true, p_lag_ms);
    end if;
  end loop;
end;
$$;
comment on function dispatch_simulated_coming(dispatch_policies, timestamptz, timestamptz, double precision) is 'What happens of itself in a simulation after one moment and up to another: jobs come in, and jobs finish, each with an observation when p_lag_ms is given. wakes tells whether a fold would change when some partition is looked at: where none does, the notes may as well wait for the next tick that has something to do.';

create or replace function dispatch_simulated_tick(p_scratch dispatch_policies, p_now timestamptz)
returns dispatch_handoffs
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_handoff constant dispatch_handoffs := dispatch_decide(p_scratch, null);
begin
  if v_handoff.claims <> '{}' then
    update dispatch_simulated_jobs as job
    set (admitted_at, next_at) = (p_now, p_now + job.service_time)
    where job.policy_name = p_scratch.policy_name
      and job.id = any (v_handoff.staged_ids);
    perform dispatch_settle_outcomes(p_scratch, v_handoff,
      array(select row(id, id, null)::dispatch_outcome from unnest(v_handoff.staged_ids) as id));
  end if;
  return v_handoff;
end;
$$;
comment on function dispatch_simulated_tick(dispatch_policies, timestamptz) is 'A tick whose hand-off is invented: each job''s id in procrastinate is its own.';

create or replace function dispatch_simulated_next(p_scratch dispatch_policies, p_now timestamptz, out job_at timestamptz, out due_at timestamptz)
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
  job_at := (
    select next_at
    from dispatch_simulated_jobs
    where policy_name = p_scratch.policy_name
      and next_at > p_now
    order by next_at
    limit 1
  );
  due_at := (
    select p.due_at
    from dispatch_partitions as p
    where p.policy_name = p_scratch.policy_name
      and p.due_at < 'infinity'
    order by p.due_at
    limit 1
  );
end;
$$;
comment on function dispatch_simulated_next(dispatch_policies, timestamptz) is 'When the next job of a simulation comes in or finishes, and when a tick has something to look at; null when nothing does.';

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

create or replace function dispatch_grid(p_start timestamptz, p_at timestamptz, p_every interval)
returns timestamptz
language sql
immutable
parallel safe
return p_start + ceil(extract(epoch from p_at - p_start) / extract(epoch from p_every)) * extract(epoch from p_every)::double precision * interval '1 second';
comment on function dispatch_grid(timestamptz, timestamptz, interval) is 'The first moment from p_at on that is a whole number of p_every after p_start.';

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

create or replace function dispatch_play(
  p_scratch dispatch_policies, p_jobs dispatch_simulated_jobs[], p_groups uuid[], p_start timestamptz, p_until timestamptz,
  p_tick_every interval, p_lag_ms double precision, p_max_ticks integer,
  out jobs dispatch_simulated_jobs[], out denied_at timestamptz[], out denied_group integer[], out denied_reason text[],
  out denied_times integer[], out ended_at timestamptz, out stopped text
)
language plpgsql
set search_path from current
as $$
declare
  -- Ticks in one subtransaction: more, and they grow slow; fewer, and carrying over costs more, the more so the more wait.
  v_short constant integer := 100;
  -- Jobs to come are put into the table so many at a time, and with them all that come in at the same moment.
  v_few constant integer := 1000;
  v_ids constant uuid[] := array(select distinct partition_id from unnest(p_jobs));
  v_now timestamptz := case
    when p_tick_every is null then p_jobs[1].next_at
    else dispatch_grid(p_start, p_jobs[1].next_at, p_tick_every)
  end;
  v_after timestamptz := '-infinity';
  v_next timestamptz;
  v_upcoming record;
  v_coming record;
  v_beyond timestamptz;
  v_ticks integer := 0;
  v_ticks_here integer;
  v_came integer := 0;
  v_upto integer;
  v_waiting integer := 0;
  v_open dispatch_simulated_jobs[] := '{}';
  v_staged dispatch_staged_jobs[] := '{}';
  v_notes dispatch_inbox[] := '{}';
  v_partitions dispatch_partitions[] := '{}';
  v_slots dispatch_inflight_jobs[] := '{}';
  v_stats dispatch_adaptive_stats[] := '{}';
  v_handoff dispatch_handoffs;
  v_denied record;
begin
  jobs := '{}';
  while v_now is not null loop
    v_upto := (
      select count(*) from unnest(p_jobs) as job
      where job.next_at <= greatest(v_now, p_jobs[least(v_came + v_few, cardinality(p_jobs))].next_at)
    );
    v_beyond := p_jobs[v_upto + 1].next_at;
    begin
      insert into dispatch_policies select (p_scratch).*;
      insert into dispatch_partitions select * from unnest(v_partitions);
      insert into dispatch_adaptive_stats select * from unnest(v_stats);
      insert into dispatch_inflight_jobs select * from unnest(v_slots);
      insert into dispatch_staged_jobs select * from unnest(v_staged);
      insert into dispatch_inbox overriding system value select * from unnest(v_notes);
      insert into dispatch_simulated_jobs select * from unnest(v_open || p_jobs[v_came + 1:v_upto]);

      v_ticks_here := 0;
      loop
        perform set_config('dispatch.fake_now', to_jsonb(v_now at time zone 'UTC') #>> '{}' || '+00', true);
        v_coming := dispatch_simulated_coming(p_scratch, v_after, v_now, p_lag_ms);
        v_came := v_came + v_coming.came;
        v_waiting := v_waiting + v_coming.came;
        v_after := v_now;
        v_handoff := null;
        if v_waiting > 0 and (v_coming.wakes or (dispatch_simulated_next(p_scratch, v_now)).due_at <= v_now) then
          v_handoff := dispatch_simulated_tick(p_scratch, v_now);
          v_waiting := v_waiting - cardinality(v_handoff.staged_ids);
          v_ticks := v_ticks + 1;
          v_ticks_here := v_ticks_here + 1;
          for v_denied in
            select coalesce(array_position(p_groups, c.partition_id), 0) as group_number, split_part(c.reason, ':', 1) as reason, count(*) as times
            from unnest(v_handoff.claims) as c
            where c.reason is not null
              and c.ordinal <> all (v_handoff.ordinals)
            group by 1, 2
          loop
            denied_at := denied_at || v_now;
            denied_group := denied_group || v_denied.group_number;
            denied_reason := denied_reason || v_denied.reason;
            denied_times := denied_times || v_denied.times::integer;
          end loop;
        end if;

        v_upcoming := dispatch_simulated_next(p_scratch, v_now);
        v_next := least(v_upcoming.job_at, v_beyond);
        if v_waiting > 0 then
          -- A tick that saw nothing though something is due is not tried again at the same moment.
          v_next := least(v_next, greatest(v_upcoming.due_at, case when v_handoff.claims = '{}' then v_now + interval '1 millisecond' else v_now end));
        end if;
        if p_tick_every is not null and v_next is not null then
          v_next := dispatch_grid(p_start, greatest(v_next, v_now + interval '1 microsecond'), p_tick_every);
        end if;
        stopped := case
          when v_next is null then null
          when v_ticks >= p_max_ticks then format('after %s ticks', v_ticks)
          when v_next > p_until then 'at the horizon'
          when v_upcoming.job_at is null and v_beyond is null and v_handoff.staged_ids = '{}' and dispatch_simulated_shut(p_scratch) then
            'where all that is left waits for a limit that lets nothing pass'
        end;
        if stopped is not null then
          v_next := null;
        end if;
        exit when v_next is null or v_next >= v_beyond or (v_ticks_here >= greatest(v_short, cardinality(v_staged) / 20) and v_next > v_now);
        v_now := v_next;
      end loop;

      ended_at := v_now;
      jobs := jobs || array(
        select job from dispatch_simulated_jobs as job
        where job.policy_name = p_scratch.policy_name and job.admitted_at is not null and job.next_at <= v_now
      );
      v_open := array(
        select job from dispatch_simulated_jobs as job
        where job.policy_name = p_scratch.policy_name and (job.admitted_at is null) = (job.next_at <= v_now)
      );
      v_staged := array(select s from dispatch_staged_jobs as s where s.partition_id = any (v_ids));
      v_notes := array(select i from dispatch_inbox as i where i.policy_name = p_scratch.policy_name);
      v_partitions := array(select p from dispatch_partitions as p where p.id = any (v_ids));
      v_slots := array(select slot from dispatch_inflight_jobs as slot where slot.partition_id = any (v_ids));
      v_stats := array(select s from dispatch_adaptive_stats as s where s.partition_id = any (v_ids));
      raise exception using errcode = 'PDSIM', message = 'the end of a part of a simulation';
    exception
      when sqlstate 'PDSIM' then
        v_now := v_next;
    end;
  end loop;
  jobs := jobs || v_open || p_jobs[v_came + 1:];
end;
$$;
comment on function dispatch_play(dispatch_policies, dispatch_simulated_jobs[], uuid[], timestamptz, timestamptz, interval, double precision, integer) is 'Runs a simulation, from one moment at which something happens to the next, and takes everything back: only what became of the jobs, and who was denied when, is returned.';

create or replace function dispatch_simulation_series(
  p_jobs dispatch_simulated_jobs[], p_keys text[], p_partitions integer[], p_start timestamptz, p_ended_at timestamptz, p_step interval,
  p_denied_at timestamptz[], p_denied_group integer[], p_denied_reason text[], p_denied_times integer[]
)
returns setof dispatch_simulation
language plpgsql
stable
as $$
declare
  v_step constant numeric := extract(epoch from p_step);
  v_last constant integer := floor(extract(epoch from p_ended_at - p_start) / v_step);
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
      select group_number, p_start + step * p_step, 0, 0, 0, null from groups cross join generate_series(0, v_last) as step
    ), placed as (
      select
        *,
        floor(extract(epoch from at - p_start) / v_step)::integer as step,
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
        select group_number, reason, sum(times) as times, floor(extract(epoch from at - p_start) / v_step)::integer as step
        from unnest(p_denied_at, p_denied_group, p_denied_reason, p_denied_times) as denied (at, group_number, reason, times)
        group by 1, 2, 4
      ) as by_reason
      group by group_number, step
    )
    select
      p_start + step * p_step,
      step * p_step,
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
      null::interval,
      null::text
    from counted
    join groups using (group_number)
    left join denials using (group_number, step)
    order by step, nullif(group_number, 0) nulls last;
end;
$$;
comment on function dispatch_simulation_series(dispatch_simulated_jobs[], text[], integer[], timestamptz, timestamptz, interval, timestamptz[], integer[], text[], integer[]) is 'What became of the jobs of a simulation, as a series of steps for each group of partitions; p_keys and p_partitions begin with the group of all others.';

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
  v_name constant text := 'simulation ' || gen_random_uuid();
  -- Ids of our own: a random place in the deep, and room for all jobs above it.
  v_first_id constant bigint := -4611686018427387904 + (random() * 1e12)::bigint * 1048576;
  v_waiting bigint;
  v_admissions dispatch_admissions[] := '{}';
  v_staged dispatch_staged_jobs[] := '{}';
  v_usual record;
  v_service_time interval;
  v_jobs dispatch_simulated_jobs[];
  v_keys text[];
  v_ids uuid[];
  v_partitions integer[];
  v_play record;
  v_last_at timestamptz;
  v_left text[] := '{}';
  v_step interval;
  v_note text;
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

  v_scratch := dispatch_parse_policy(v_name,
    case when p_definition is null then (dispatch_policy(p_policy)).definition else p_definition end, v_start);

  -- What came in, and how long it took.
  if p_load is null then
    perform dispatch_policy(p_policy);
    v_waiting := dispatch_waiting_count(p_policy);
    v_admissions := array(
      select a from dispatch_recent_admissions(p_policy, v_start, greatest(p_max_jobs - v_waiting, p_max_jobs / 2, 1)::integer + 1) as a
    );
    if cardinality(v_admissions) > greatest(p_max_jobs - v_waiting, p_max_jobs / 2, 1) then
      v_admissions := trim_array(v_admissions, 1);
      v_start := v_admissions[cardinality(v_admissions)].admitted_at;
      v_left := v_left || format('jobs admitted before %s', v_start);
    end if;
    if cardinality(v_admissions) < p_max_jobs then
      v_staged := array(select s from dispatch_waiting_sample(p_policy, p_max_jobs - cardinality(v_admissions)) as s);
    end if;
    if v_waiting > cardinality(v_staged) then
      v_left := v_left || format('%s of %s waiting jobs', v_waiting - cardinality(v_staged), v_waiting);
    end if;
    if p_until is not null then
      v_admissions := array(select a from unnest(v_admissions) as a where a.staged_at <= p_until);
      v_staged := array(select s from unnest(v_staged) as s where s.staged_at <= p_until);
    end if;
  else
    v_admissions := array(select a from dispatch_recent_admissions(p_policy, dispatch_now() - interval '1 hour', 1000) as a);
    perform dispatch_check_load(p_load, v_scratch.partition_by);
  end if;
  v_usual := dispatch_usual_times(v_admissions[:1000]);
  v_service_time := coalesce(p_service_time, case when v_usual.jobs > 0 then greatest(v_usual.service_time, '1 ms') end, '1 s');
  v_jobs := case
    when p_load is null then dispatch_replayed_jobs(v_scratch, p_policy, v_admissions, v_staged, v_start, v_service_time)
    else dispatch_given_jobs(v_scratch, p_policy, p_load, v_start, v_service_time, p_max_jobs)
  end;
  if v_jobs = '{}' then
    return;
  end if;
  if p_load is not null then
    v_waiting := (select sum(coalesce((entry ->> 'jobs')::bigint, 1)) from jsonb_array_elements(p_load) as entry);
    if v_waiting > cardinality(v_jobs) then
      v_left := v_left || format('the last %s of %s jobs', v_waiting - cardinality(v_jobs), v_waiting);
    end if;
  end if;

  -- The partitions with the most jobs are shown by themselves, all others as one group.
  with partitions as (
    select partition_id, partition_key, row_number() over (order by count(*) desc, partition_key) as place
    from unnest(v_jobs)
    group by partition_id, partition_key
  )
  select
    array_agg(partition_id order by place) filter (where place <= p_groups),
    array[null] || array_agg(partition_key order by place) filter (where place <= p_groups),
    array[count(*) filter (where place > p_groups)::integer] || array_agg(1 order by place) filter (where place <= p_groups)
  into v_ids, v_keys, v_partitions
  from partitions;
  v_jobs := array(
    select row(
      policy_name, v_first_id + place, next_at, staged_at, scheduled_at, admitted_at, service_time, priority,
      coalesce(array_position(v_ids, partition_id), 0), partition_id, partition_key, context
    )::dispatch_simulated_jobs
    from unnest(v_jobs) with ordinality as jobs (policy_name, id, next_at, staged_at, scheduled_at, admitted_at, service_time, priority,
      group_number, partition_id, partition_key, context, place)
    order by place
  );
  v_last_at := v_jobs[cardinality(v_jobs)].next_at;

  v_play := dispatch_play(v_scratch, v_jobs, v_ids, v_start, v_last_at + p_horizon, p_tick_every,
    case
      when dispatch_adapts(v_scratch.gates)
        then (extract(epoch from coalesce(p_lag, v_usual.lag, '0 s')) * 1000)::double precision
    end, p_max_ticks);

  v_step := greatest(
    coalesce(p_step, dispatch_round_step(v_play.ended_at - v_start, 60)),
    dispatch_round_step(v_play.ended_at - v_start, 1000));
  v_note := concat_ws('; ',
    format('%s jobs', cardinality(v_jobs)),
    case
      when p_service_time is not null then format('in flight for %s s each, as given', extract(epoch from v_service_time)::double precision)
      when v_usual.service_time is not null then
        format('in flight for %s s each, the median of the last %s', round(extract(epoch from v_service_time), 3)::double precision, v_usual.jobs)
      else 'in flight for 1 s each, as nothing is known'
    end,
    'left out: ' || nullif(array_to_string(v_left, ', '), ''),
    'stopped ' || v_play.stopped || format(', with %s jobs not admitted',
      (select count(*) from unnest(v_play.jobs) as job where job.admitted_at is null)));
  return query
    select at, elapsed, partition_key, partitions, staged, admitted, finished, pending, in_flight, denied, longest_wait, mean_wait,
      v_service_time, v_note
    from dispatch_simulation_series(v_play.jobs, v_keys, v_partitions, v_start, v_play.ended_at, v_step, v_play.denied_at,
      v_play.denied_group, v_play.denied_reason, v_play.denied_times);
end;
$$;
comment on function dispatch_simulate(text, jsonb, jsonb, timestamptz, timestamptz, interval, interval, interval, interval, interval, integer, integer, integer) is 'What would another definition have admitted? Null for p_definition is the one in force. Simulated are the jobs of p_load, or else those that were admitted since p_since (default: 1 hour ago) and those that wait, if they were staged by p_until (default: now). They come in on the fake clock, the tick''s own functions admit them, and they finish p_service_time after that (default: the median of the policy''s last 1000, else 1 second). p_lag: the part of it that they queue, which is what adaptive_concurrency learns from (default: the median, else none). p_tick_every: one tick at each multiple of it, as from cron; null ticks whenever something happens, as a driver does. p_step: length of a step in the result (default: a round one, at most 60 steps). Shown by themselves are the p_groups (1 to 100) partitions with the most jobs. It ends when nothing is left, p_horizon after the last job came in, or after p_max_ticks (1 to 1000000), and takes p_max_jobs (1 to 100000) at most; the column note says what was left out. No row when there is no job. All of it is rolled back. Raises PD001 (unknown policy), PD002 (invalid definition), PD009 (invalid load or argument), 25006 (read-only transaction).';
