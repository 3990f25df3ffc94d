-- The jobs of a simulation: those of a given load, or those of a policy's recent past and those that wait in it now.
-- Invariants: a load is refused before anything is made of it; however long the past and the backlog are, no more of them
-- is read than is simulated.

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

create or replace function dispatch_check_load_key(p_path text, p_key jsonb, p_partition_by text[])
returns void
language plpgsql
as $$
begin
  if p_partition_by = '{}' then
    perform dispatch_refuse_load(p_path, 'must be left out: the definition has no partition_by', p_key);
  elsif cardinality(p_partition_by) = 1 and jsonb_typeof(p_key) not in ('string', 'number', 'boolean') then
    perform dispatch_refuse_load(p_path, format('must be a string, the value at %s', p_partition_by[1]), p_key);
  elsif cardinality(p_partition_by) > 1
    and (jsonb_typeof(p_key) <> 'array' or jsonb_array_length(p_key) <> cardinality(p_partition_by)) then
    perform dispatch_refuse_load(p_path, format('must be an array of the values at %s', array_to_string(p_partition_by, ', ')), p_key);
  end if;
end;
$$;
comment on function dispatch_check_load_key(text, jsonb, text[]) is 'Raises PD009 for a key in a load that partition_by cannot read.';

create or replace function dispatch_check_load_number(p_path text, p_name text, p_value jsonb)
returns void
language plpgsql
as $$
declare
  v_spec record;
begin
  select * into v_spec from dispatch_load_spec() as spec where spec.name = p_name;
  if not found then
    perform dispatch_refuse_load(p_path, format('is not known; known here: key, context, %s',
      (select string_agg(spec.name, ', ') from dispatch_load_spec() as spec)), p_value);
  elsif jsonb_typeof(p_value) <> 'number'
    or (p_value #>> '{}')::numeric not between v_spec.minimum and v_spec.maximum
    or v_spec.whole and (p_value #>> '{}')::numeric <> trunc((p_value #>> '{}')::numeric) then
    perform dispatch_refuse_load(p_path, format('must be a %s between %s and %s',
      case when v_spec.whole then 'whole number' else 'number' end, v_spec.minimum, v_spec.maximum), p_value);
  end if;
end;
$$;
comment on function dispatch_check_load_number(text, text, jsonb) is 'Raises PD009 for a name in a load that is not known, or a number that is out of its range.';

create or replace function dispatch_check_load(p_load jsonb, p_partition_by text[])
returns void
language plpgsql
as $$
declare
  v_entry record;
  v_path text;
  v_name text;
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
    for v_name, v_value in select key, value from jsonb_each(v_entry.value) order by key loop
      v_path := v_entry.path || '.' || v_name;
      if v_name = 'key' then
        perform dispatch_check_load_key(v_path, v_value, p_partition_by);
      elsif v_name <> 'context' then
        perform dispatch_check_load_number(v_path, v_name, v_value);
      elsif jsonb_typeof(v_value) <> 'object' then
        perform dispatch_refuse_load(v_path, 'must be an object', v_value);
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

create or replace function dispatch_given_jobs(
  p_scratch dispatch_policies, p_policy text, p_load jsonb, p_start timestamptz, p_service_time interval, p_limit integer
)
returns dispatch_simulated_jobs[]
language plpgsql
stable
as $$
begin
  return array(
    select row(
      p_scratch.policy_name, 0, came_at, came_at, null, null,
      coalesce(make_interval(secs => (entry ->> 'service_time')::double precision), p_service_time),
      coalesce((entry ->> 'priority')::numeric::integer, 0), 0,
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
        p_start + make_interval(secs =>
          round(coalesce((entry ->> 'start')::numeric, 0) + n * coalesce((entry ->> 'every')::numeric, 0), 6)::double precision)
          as came_at
      from generate_series(0, least(coalesce((entry ->> 'jobs')::numeric::integer, 1), p_limit) - 1) as n
    ) as coming
    order by came_at, ordinality, n
    limit p_limit
  );
end;
$$;
comment on function dispatch_given_jobs(dispatch_policies, text, jsonb, timestamptz, interval, integer) is 'The first p_limit jobs of a load, in the order in which they come in.';

create or replace function dispatch_load_left_out(p_load jsonb, p_taken integer)
returns text
language sql
stable
parallel safe
begin atomic
  select format('the last %s of %s jobs', jobs - p_taken, jobs)
  from (
    select sum(coalesce((entry ->> 'jobs')::numeric::bigint, 1)) as jobs from jsonb_array_elements(p_load) as entry
  ) as load
  where jobs > p_taken;
end;
comment on function dispatch_load_left_out(jsonb, integer) is 'What is left out of a load of which only the first p_taken jobs are simulated, in words; null when nothing is.';

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
      and ending is null
    order by admitted_at desc
    limit p_limit;
end;
$$;
comment on function dispatch_recent_admissions(text, timestamptz, integer) is 'The last p_limit admissions of a policy since a time, the newest first.';

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
      select i.jobs from dispatch_inbox as i where i.policy_name = p_policy and i.kind in ('staged', 'removed') order by i.put_off, i.id limit 10000
    ) as noted
  );
end;
$$;
comment on function dispatch_waiting_count(text) is 'Jobs that wait in a policy, by the counters of its partitions and the first notes of what came in since.';

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
        order by i.put_off, i.id
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
    where not waiting.parked;
end;
$$;
comment on function dispatch_waiting_sample(text, integer) is 'Up to p_limit jobs that wait in a policy, shared evenly among its partitions, and of each those that are next. Retries are left out.';

create or replace function dispatch_past(
  p_policy text, p_since timestamptz, p_until timestamptz, p_max_jobs integer,
  out since timestamptz, out admissions dispatch_admissions[], out waiting dispatch_staged_jobs[], out left_out text
)
language plpgsql
stable
set search_path from current
as $$
declare
  v_waiting constant bigint := dispatch_waiting_count(p_policy);
  v_room constant integer := greatest(p_max_jobs - v_waiting, p_max_jobs / 2, 1);
begin
  since := p_since;
  admissions := array(select a from dispatch_recent_admissions(p_policy, p_since, v_room + 1) as a);
  if cardinality(admissions) > v_room then
    admissions := trim_array(admissions, 1);
    since := admissions[v_room].admitted_at;
    left_out := format('jobs admitted before %s', since);
  end if;
  waiting := array(select s from dispatch_waiting_sample(p_policy, p_max_jobs - cardinality(admissions)) as s);
  if v_waiting > cardinality(waiting) then
    left_out := concat_ws(', ', left_out, format('%s of %s waiting jobs', v_waiting - cardinality(waiting), v_waiting));
  end if;
  if p_until is not null then
    admissions := array(select a from unnest(admissions) as a where a.staged_at <= p_until);
    waiting := array(select s from unnest(waiting) as s where s.staged_at <= p_until);
  end if;
end;
$$;
comment on function dispatch_past(text, timestamptz, timestamptz, integer) is 'The last admissions of a policy since a time, the newest first, and the jobs that wait in it, p_max_jobs together, of which at least half may be admissions; then only those that were staged by p_until. left_out says in words what there is more; since is later than p_since when admissions are left out.';

create or replace function dispatch_replayed_jobs(
  p_scratch dispatch_policies, p_policy text, p_admissions dispatch_admissions[], p_waiting dispatch_staged_jobs[],
  p_start timestamptz, p_service_time interval
)
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
      select a.job_id as id, a.staged_at, null as scheduled_at, 0 as priority, a.context
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

create or replace function dispatch_assumed_times(
  p_admissions dispatch_admissions[], p_service_time interval, p_lag interval,
  out service_time interval, out lag interval, out note text
)
language plpgsql
stable
set search_path from current
as $$
declare
  v_known record;
begin
  select
    count(times.ended_after) as jobs,
    make_interval(secs => percentile_cont(0.5) within group (order by times.ended_after)) as service_time,
    make_interval(secs => percentile_cont(0.5) within group (order by times.lag_ms) / 1000) as lag
  into v_known
  from (
    select
      extract(epoch from dispatch_ended_at(a.job_id) - a.admitted_at)::double precision as ended_after,
      dispatch_lag_ms(a.job_id, a.admitted_at) as lag_ms
    from unnest(p_admissions) as a
  ) as times
  where times.ended_after > 0;

  service_time := coalesce(p_service_time, case when v_known.jobs > 0 then greatest(v_known.service_time, '1 ms') else '1 s' end);
  lag := coalesce(p_lag, v_known.lag, '0 s');
  note := format('in flight for %s s each, %s',
    round(extract(epoch from service_time), case when p_service_time is null then 3 else 6 end)::double precision,
    case
      when p_service_time is not null then 'as given'
      when v_known.jobs > 0 then format('the median of the last %s', v_known.jobs)
      else 'as nothing is known'
    end);
end;
$$;
comment on function dispatch_assumed_times(dispatch_admissions[], interval, interval) is 'The time from admission to finish, and from admission to start, that a simulation assumes: what is given, else the median of those admissions whose job has ended and that procrastinate still knows, else 1 second and nothing. note says which, in words.';
