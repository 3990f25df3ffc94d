-- Pages for people: partitions in five orders, and the waiting jobs of one partition in the order in which they go.
-- Invariants: a page begins after the row that its cursor names, so walking all pages shows each row once, however many
-- rows come before; no cursor, whatever is in it, raises an error: what cannot be one gives the first page; partitions are
-- read once a page and staged jobs about as many as are shown.

create or replace function dispatch_to_cursor(p_value jsonb, p_id jsonb)
returns text
language sql
immutable
parallel safe
return translate(encode(convert_to(jsonb_build_array(p_value, p_id)::text, 'UTF8'), 'base64'), e'+/=\n', '-_');
comment on function dispatch_to_cursor(jsonb, jsonb) is 'A cursor: the JSON array [value, id] in URL-safe base64 without padding.';

create or replace function dispatch_from_cursor(p_cursor text)
returns jsonb
language plpgsql
immutable
strict
as $$
declare
  v_cursor jsonb;
begin
  -- Ours are shorter, and what is longer is not worth the parsing.
  if length(p_cursor) > 4000 or p_cursor !~ '^[A-Za-z0-9_-]+$' then
    return null;
  end if;
  v_cursor := convert_from(decode(rpad(translate(p_cursor, '-_', '+/'), (length(p_cursor) + 3) / 4 * 4, '='), 'base64'), 'UTF8')::jsonb;
  return case when jsonb_typeof(v_cursor) = 'array' and jsonb_array_length(v_cursor) = 2 then v_cursor end;
exception
  when data_exception then
    return null;
end;
$$;
comment on function dispatch_from_cursor(text) is 'The two elements of a cursor as a JSON array; null for anything that is none.';

create or replace function dispatch_cursor_time(p_time timestamptz)
returns jsonb
language sql
immutable
parallel safe
return case
  when isfinite(p_time) then to_jsonb((to_jsonb(p_time at time zone 'UTC') #>> '{}') || '+00:00')
  else to_jsonb(p_time::text)
end;
comment on function dispatch_cursor_time(timestamptz) is 'A time in a cursor, to the microsecond and the same in every time zone.';

create or replace function dispatch_cursor_moment(p_value jsonb)
returns timestamptz
language plpgsql
stable
strict
as $$
begin
  if jsonb_typeof(p_value) = 'null' then
    return '-infinity';
  end if;
  return case when jsonb_typeof(p_value) = 'string' then dispatch_parse_time(p_value #>> '{}') end;
end;
$$;
comment on function dispatch_cursor_moment(jsonb) is 'A finite time of a cursor; never (null) is -infinity; null for anything else.';

create or replace function dispatch_cursor_number(p_value jsonb, p_lowest bigint, p_highest bigint)
returns bigint
language sql
immutable
parallel safe
return case
  when jsonb_typeof(p_value) = 'number' then
    case
      when (p_value #>> '{}')::numeric between p_lowest and p_highest and (p_value #>> '{}')::numeric % 1 = 0 then (p_value #>> '{}')::numeric::bigint
    end
end;
comment on function dispatch_cursor_number(jsonb, bigint, bigint) is 'A whole number of a cursor within its range; null for anything else.';

-- Where a page of partitions begins. A key is cut in its cursor, which has its place in addresses; the partition itself
-- then has the rest.
create or replace function dispatch_page_position(
  p_sort text, p_cursor text,
  out number bigint, out moment timestamptz, out key text, out id uuid
)
language plpgsql
stable
set search_path from current
as $$
declare
  v_cursor constant jsonb := dispatch_from_cursor(p_cursor);
  v_value constant jsonb := v_cursor -> 0;
  v_id constant text := v_cursor ->> 1;
begin
  if jsonb_typeof(v_cursor -> 1) is distinct from 'string' or v_id !~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then
    return;
  end if;

  if p_sort in ('pending', 'admitted') then
    number := dispatch_cursor_number(v_value, 0, 9223372036854775807);
  elsif p_sort = 'key' and jsonb_typeof(v_value) = 'string' then
    key := v_value #>> '{}';
    key := coalesce((
      select p.partition_key
      from dispatch_partitions as p
      where p.id = v_id::uuid
        and left(p.partition_key, 200) = key
    ), key);
  elsif p_sort in ('stale', 'recent') then
    moment := dispatch_cursor_moment(v_value);
  end if;
  id := case when coalesce(number::text, moment::text, key) is not null then v_id end;
end;
$$;
comment on function dispatch_page_position(text, text) is 'The row after which a page begins, in the sort given; all null for the first page, which is also what a cursor that cannot be of that sort leads to.';

create or replace function dispatch_partitions_page(
  p_policy text,
  p_sort text default 'pending',
  p_cursor text default null,
  p_limit integer default 50,
  p_search text default null,
  p_only_pending boolean default false
)
returns setof dispatch_partition_page
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_custom_plan
set jit = off
as $$
declare
  v_after record;
begin
  perform dispatch_check_argument('p_limit', p_limit, 1, 1000, 'Pass the cursor of the last row as p_cursor for the next page.');
  if p_sort is null or p_sort not in ('pending', 'admitted', 'stale', 'recent', 'key') then
    perform dispatch_raise('PD009', format('unknown sort %L', left(p_sort, 200)), null, 'Sort by pending, admitted, stale, recent or key.');
  end if;
  if p_policy is not null then
    perform dispatch_policy(p_policy);
  end if;
  select * into v_after from dispatch_page_position(p_sort, p_cursor);

  return query
    with found as (
      select p.id, sort.*
      from dispatch_partitions as p
      cross join lateral (
        select
          case p_sort when 'pending' then greatest(p.pending_count, 0) when 'admitted' then p.total_admitted end as number,
          case when p_sort = 'stale' then coalesce(p.last_checked_at, '-infinity') end as checked,
          case when p_sort = 'recent' then coalesce(p.last_admitted_at, '-infinity') end as admitted,
          case when p_sort = 'key' then p.partition_key end collate "C" as key
      ) as sort
      where (p_policy is null or p.policy_name = p_policy)
        and (not p_only_pending or p.pending_count > 0)
        and (nullif(p_search, '') is null or strpos(lower(p.partition_key), lower(p_search)) > 0)
    ), page as materialized (
      select found.*
      from found
      where v_after.id is null
        or found.number < v_after.number
        or found.checked > v_after.moment
        or found.admitted < v_after.moment
        or found.key > v_after.key
        or (
          coalesce(found.number = v_after.number, coalesce(found.checked, found.admitted) = v_after.moment, found.key = v_after.key)
          and found.id > v_after.id
        )
      order by found.number desc, found.checked, found.admitted desc, found.key, found.id
      limit p_limit
    )
    select
      status.policy_name, status.partition_key, status.shard, status.pending_count, status.in_flight_count, status.total_admitted,
      status.decayed_admits, status.due_at, status.blocked_until, status.blocked_reason, status.paused, status.waiting_since,
      status.last_checked_at, status.last_admitted_at, status.first_seen_at, status.context, status.gate_state, status.id,
      dispatch_to_cursor(
        case p_sort
          when 'stale' then dispatch_cursor_time(status.last_checked_at)
          when 'recent' then dispatch_cursor_time(status.last_admitted_at)
          when 'key' then to_jsonb(left(status.partition_key, 200))
          else to_jsonb(page.number)
        end,
        to_jsonb(status.id))
    from page
    cross join lateral (
      select * from dispatch_partition_status as s where s.id = page.id limit 1
    ) as status
    order by page.number desc, page.checked, page.admitted desc, page.key, page.id;
end;
$$;
comment on function dispatch_partitions_page(text, text, text, integer, text, boolean) is 'A page of the partitions of a policy (null: of all), as dispatch_partition_status shows them. p_sort: pending (most waiting first), admitted (most ever admitted first), stale (longest not looked at first, never before all), recent (last admission first, never at the end) or key (in the order of its bytes); ties by id. p_cursor: the cursor of the last row of the page before; anything that is none of this sort gives the first page. p_limit: 1 to 1000 rows. p_search: part of the key, upper and lower case alike, no wildcards. p_only_pending: those with waiting jobs. Raises PD001 for an unknown policy, PD009 for an unknown sort or a limit out of range.';

-- The jobs of a partition that become eligible within a span, in the order of admission. The index has that order within a
-- priority; so it is read priority by priority, each only within the span. Planner settings are pinned as in 30_inbox.sql.
create or replace function dispatch_waiting_between(
  p_partition_id uuid, p_from timestamptz, p_to timestamptz, p_after dispatch_waiting_job, p_limit integer
)
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
set enable_sort = off
as $$
declare
  v_priority integer;
  v_at timestamptz := p_from;
  v_id bigint := -9223372036854775808;
  v_left integer := p_limit;
  v_found integer;
begin
  select s.priority into v_priority
  from dispatch_staged_jobs as s
  where s.partition_id = p_partition_id
    and s.priority <= coalesce(p_after.priority, 2147483647)
  order by s.priority desc
  limit 1;
  if v_priority = p_after.priority then
    v_at := p_after.eligible_at;
    v_id := p_after.id;
  end if;

  while v_priority is not null and v_left > 0 loop
    return query
      select s.*
      from dispatch_staged_jobs as s
      where s.partition_id = p_partition_id
        and s.priority = v_priority
        and (s.eligible_at, s.id) > (v_at, v_id)
        and s.eligible_at <= p_to
      order by s.eligible_at, s.id
      limit v_left;
    get diagnostics v_found = row_count;
    v_left := v_left - v_found;
    v_at := p_from;
    v_id := -9223372036854775808;
    select s.priority into v_priority
    from dispatch_staged_jobs as s
    where s.partition_id = p_partition_id
      and s.priority < v_priority
    order by s.priority desc
    limit 1;
  end loop;
end;
$$;
comment on function dispatch_waiting_between(uuid, timestamptz, timestamptz, dispatch_waiting_job, integer) is 'The first p_limit jobs of a partition after p_after (null: from the start), in the order of admission, of those that become eligible from p_from to p_to. Reads about as many rows as it returns, and one a priority.';

create or replace function dispatch_waiting_later(p_partition_id uuid, p_now timestamptz, p_after dispatch_waiting_job, p_limit integer)
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
  v_from constant timestamptz := greatest(p_now, p_after.eligible_at);
  v_left integer := p_limit;
  v_found integer;
  v_last timestamptz;
begin
  if p_after.eligible_at > p_now then
    return query select * from dispatch_waiting_between(p_partition_id, v_from, v_from, p_after, v_left);
    get diagnostics v_found = row_count;
    v_left := v_left - v_found;
  end if;

  -- Many may wait for one moment: of the last that is looked at, as many as there is room for, in their order.
  select max(next.eligible_at) into v_last
  from (
    select s.eligible_at
    from dispatch_staged_jobs as s
    where s.partition_id = p_partition_id
      and s.eligible_at > v_from
    order by s.eligible_at
    limit v_left
  ) as next;
  return query
    select s.*
    from dispatch_staged_jobs as s
    where s.partition_id = p_partition_id
      and s.eligible_at > v_from
      and s.eligible_at < v_last
    order by s.eligible_at, s.priority desc, s.id;
  get diagnostics v_found = row_count;
  v_left := v_left - v_found;
  return query select * from dispatch_waiting_between(p_partition_id, v_last, v_last, null, v_left);
end;
$$;
comment on function dispatch_waiting_later(uuid, timestamptz, dispatch_waiting_job, integer) is 'The first p_limit jobs of a partition after p_after that are not eligible yet, by when they become so, and in the order of admission where that is the same.';

create or replace function dispatch_waiting_position(p_cursor text)
returns dispatch_waiting_job
language plpgsql
stable
as $$
declare
  v_cursor constant jsonb := dispatch_from_cursor(p_cursor);
  v_value constant jsonb := v_cursor -> 0;
  v_after dispatch_waiting_job;
begin
  if jsonb_typeof(v_value) is distinct from 'array' or jsonb_array_length(v_value) <> 3 then
    return null;
  end if;
  v_after.priority := dispatch_cursor_number(v_value -> 0, -2147483648, 2147483647);
  v_after.eligible_at := case when v_value ->> 1 = 'infinity' then 'infinity' else dispatch_cursor_moment(v_value -> 1) end;
  v_after.place := dispatch_cursor_number(v_value -> 2, 1, 1000000000000000);
  v_after.id := dispatch_cursor_number(v_cursor -> 1, -9223372036854775808, 9223372036854775807);
  if v_after.priority is null or v_after.eligible_at is null or v_after.place is null or v_after.id is null then
    return null;
  end if;
  return v_after;
end;
$$;
comment on function dispatch_waiting_position(text) is 'The job after which a page begins; null for the first page, which is also what a cursor that cannot be one leads to.';

create or replace function dispatch_waiting_page(
  p_policy text,
  p_partition_key text,
  p_limit integer default 50,
  p_cursor text default null
)
returns setof dispatch_waiting_job
language plpgsql
stable
set search_path from current
as $$
declare
  v_partition_id constant uuid := dispatch_partition_id(p_policy, p_partition_key);
  v_now constant timestamptz := dispatch_now();
  v_after constant dispatch_waiting_job := dispatch_waiting_position(p_cursor);
  v_job dispatch_staged_jobs;
  v_place bigint := coalesce(v_after.place, 0);
  v_left integer := p_limit;
begin
  perform dispatch_check_argument('p_limit', p_limit, 1, 1000, 'Pass the cursor of the last row as p_cursor for the next page.');
  perform dispatch_policy(p_policy);

  if coalesce(v_after.eligible_at <= v_now, true) then
    for v_job in select * from dispatch_waiting_between(v_partition_id, '-infinity', v_now, v_after, v_left) loop
      v_place := v_place + 1;
      v_left := v_left - 1;
      return next dispatch_waiting_row(v_job, v_place);
    end loop;
  end if;
  if v_left > 0 then
    for v_job in select * from dispatch_waiting_later(v_partition_id, v_now, v_after, v_left) loop
      v_place := v_place + 1;
      return next dispatch_waiting_row(v_job, v_place);
    end loop;
  end if;
end;
$$;
comment on function dispatch_waiting_page(text, text, integer, text) is 'A page of the waiting jobs of a partition in the order in which they are admitted: priority, then eligible_at (at once first), then id; those not eligible yet come after them, by when they become so. No args are shown. p_cursor: the cursor of the last row of the page before; anything that is none gives the first page. place counts from the first page on. p_limit: 1 to 1000 rows. Raises PD001 for an unknown policy, PD009 for a limit out of range.';

create or replace function dispatch_waiting_row(p_job dispatch_staged_jobs, p_place bigint)
returns dispatch_waiting_job
language plpgsql
immutable
as $$
declare
  v_eligible_at constant timestamptz := nullif(p_job.eligible_at, '-infinity');
begin
  return row(p_job.id, p_job.task_name, p_job.queue_name, p_job.priority, p_job.scheduled_at, v_eligible_at, p_job.attempts,
    p_job.staged_at, p_job.lock, p_job.queueing_lock, p_place,
    dispatch_to_cursor(jsonb_build_array(p_job.priority, dispatch_cursor_time(v_eligible_at), p_place), to_jsonb(p_job.id))
  )::dispatch_waiting_job;
end;
$$;
comment on function dispatch_waiting_row(dispatch_staged_jobs, bigint) is 'A waiting job as it is shown.';
