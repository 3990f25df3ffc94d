-- Folding the inbox: notes become counters, contexts and due times of partitions.
-- Invariants: a note is folded exactly once, in the transaction that deletes it; a partition's notes are folded in
-- the order of their ids; sums are never clamped, so that they come out right in any order; nothing here waits for
-- another tick: notes and partitions that one holds are left to it.
-- A cached plan meets tables that grow from nothing to millions of rows within its life, so nothing here and in the files
-- of the tick leaves it to statistics how a row is found. Planner settings are pinned, and each statement has a form that
-- can be done in one way only: a look-up by key stands in a lateral with a limit (the planner may turn a join round and
-- read the whole table), what was locked before is changed by its ctid, the first of an index is asked for by order and
-- limit (with sorting off) rather than by min or exists.

create or replace function dispatch_notes_in_other_hands(p_policy text, p_notes dispatch_inbox[])
returns uuid[]
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_last constant bigint := p_notes[cardinality(p_notes)].id;
begin
  if (select count(*) from dispatch_inbox where policy_name = p_policy and id <= v_last) = cardinality(p_notes) then
    return '{}';
  end if;
  return array(
    select distinct partition_id
    from (
      select id, partition_id from dispatch_inbox where policy_name = p_policy and id <= v_last
      except
      select id, partition_id from unnest(p_notes)
    ) as others
  );
end;
$$;
comment on function dispatch_notes_in_other_hands(text, dispatch_inbox[]) is 'Partitions of which another tick holds an older note than the last of these.';

create or replace function dispatch_in_other_hands(p_policy text, p_partitions uuid[])
returns uuid[]
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_theirs integer[];
begin
  if p_partitions = '{}' then
    return '{}';
  end if;
  v_theirs := array(
    select bucket
    from (select distinct dispatch_bucket(p_policy, id) from unnest(p_partitions) as id) as buckets (bucket)
    where not pg_try_advisory_xact_lock('dispatch_partitions'::regclass::oid::integer, bucket)
  );
  -- In a later statement, so that what was created before a lock became free is seen.
  return array(
    select id from unnest(p_partitions) as id where dispatch_bucket(p_policy, id) = any (v_theirs)
    union
    select p.id from dispatch_partitions as p where p.id = any (p_partitions)
  );
end;
$$;
comment on function dispatch_in_other_hands(text, uuid[]) is 'Of partitions whose rows could not be locked, those that another tick holds or may be creating; the others do not exist, and nobody else can create them before this transaction ends. That takes an advisory lock for each of 256 buckets of ids, so that a tick takes few locks however many partitions are new.';

create or replace function dispatch_bucket(p_policy text, p_partition_id uuid)
returns integer
language sql
immutable
parallel safe
return hashtext(p_policy) & -256 | get_byte(uuid_send(p_partition_id), 0);
comment on function dispatch_bucket(text, uuid) is 'The advisory lock that stands for the creation of a partition.';

create or replace function dispatch_waiting_since(p_pending bigint, p_since timestamptz, p_due_at timestamptz, p_now timestamptz)
returns timestamptz
language sql
immutable
parallel safe
return case
  when p_pending > 0 then coalesce(least(p_since, case when p_due_at is not null then greatest(p_due_at, p_now) end), p_now)
end;
comment on function dispatch_waiting_since(bigint, timestamptz, timestamptz, timestamptz) is 'Since when a partition''s jobs wait, once more came in of which the first is due at p_due_at (null: none came): in the future as long as all wait for their time, null when no job waits.';

create or replace function dispatch_sum_notes(p_notes dispatch_inbox[])
returns table (
  partition_id uuid, jobs bigint, slots bigint, any_finished boolean, any_resumed boolean, due_at timestamptz, newest_id bigint,
  context jsonb, partition_key text, shard text
)
language sql
immutable
parallel safe
begin atomic
  -- The newest context counts; the key is the same in all notes; the shard is that of the first job.
  select
    partition_id,
    coalesce(sum(jobs) filter (where kind <> 'finished'), 0),
    coalesce(sum(jobs) filter (where kind = 'finished'), 0),
    bool_or(kind = 'finished' and jobs < 0),
    bool_or(kind = 'resumed'),
    min(due_at),
    max(newest_id),
    (array_agg(context) filter (where kind = 'staged'))[1],
    max(partition_key),
    (array_agg(shard) filter (where kind = 'staged'))[count(*) filter (where kind = 'staged')]
  from (select * from unnest(p_notes) order by partition_id, newest_id desc, id desc) as newest_first
  group by partition_id;
end;
comment on function dispatch_sum_notes(dispatch_inbox[]) is 'What notes say together of each partition: jobs that came and slots that became free, the newest context, when the first of the jobs is due.';

create or replace function dispatch_still_blocked(p_blocked_until timestamptz, p_blocked_after_finish timestamptz, p_any_finished boolean, p_lifted boolean)
returns timestamptz
language sql
immutable
parallel safe
return case
  when p_lifted then null
  when p_any_finished and p_blocked_until is not null then p_blocked_after_finish
  else p_blocked_until
end;
comment on function dispatch_still_blocked(timestamptz, timestamptz, boolean, boolean) is 'Until when gates block a partition once notes are folded: a finish lifts what only waits for slots; a new context or a lifted pause (p_lifted) lifts everything.';

create or replace function dispatch_due_with_notes(
  p_due_at timestamptz, p_was_blocked_until timestamptz, p_blocked_until timestamptz, p_jobs_due_at timestamptz, p_now timestamptz
)
returns timestamptz
language sql
immutable
parallel safe
return least(
  p_due_at,
  case when p_blocked_until is distinct from p_was_blocked_until and p_due_at is not null then greatest(p_blocked_until, p_now) end,
  case when p_jobs_due_at is not null then greatest(p_jobs_due_at, p_blocked_until) end
);
comment on function dispatch_due_with_notes(timestamptz, timestamptz, timestamptz, timestamptz, timestamptz) is 'When to look at a partition once notes are folded: at once where something was lifted, and when the first of the new jobs (p_jobs_due_at; null: none came) may go.';

create or replace function dispatch_fold(p_policy text, p_now timestamptz, p_limit integer default 10000)
returns integer
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_notes dispatch_inbox[];
  v_places tid[];
  v_partitions uuid[];
  v_held dispatch_partitions[];
  v_rows tid[];
  v_left uuid[];
  v_observations dispatch_observation[];
begin
  select array_agg(locked.note), array_agg(locked.place)
  into v_notes, v_places
  from (
    select i as note, i.ctid as place
    from dispatch_inbox as i
    where i.policy_name = p_policy
    order by i.id
    limit p_limit
    for update skip locked
  ) as locked;
  if v_notes is null then
    return 0;
  end if;

  v_partitions := array(select distinct partition_id from unnest(v_notes));
  select array_agg(held.place), array_agg(held.partition)
  into v_rows, v_held
  from (
    select p.ctid as place, p as partition
    from dispatch_partitions as p
    where p.id = any (v_partitions)
    order by p.id
    for update skip locked
  ) as held;
  v_left := dispatch_notes_in_other_hands(p_policy, v_notes);
  if cardinality(v_partitions) > coalesce(cardinality(v_held), 0) then
    v_left := v_left || dispatch_in_other_hands(p_policy, array(
      select unnest(v_partitions)
      except
      select id from unnest(v_held)
    ));
  end if;
  if v_left <> '{}' then
    select coalesce(array_agg(note), '{}'), coalesce(array_agg(place), '{}')
    into v_notes, v_places
    from (select unnest(v_notes) as note, unnest(v_places) as place) as locked
    where (note).partition_id <> all (v_left);
  end if;

  delete from dispatch_inbox where ctid = any (v_places);
  with changes as materialized (
    select
      sums.*,
      held.place,
      dispatch_still_blocked(held.blocked_until, held.blocked_after_finish, any_finished,
        any_resumed or (sums.newest_id > held.newest_id and sums.context <> held.context)) as still_blocked_until
    from dispatch_sum_notes(v_notes) as sums
    left join (
      select place, id, newest_id, context, blocked_until, blocked_after_finish
      from rows from (unnest(v_rows), unnest(v_held)) as held (place, id, due_at, blocked_until, blocked_after_finish, first_seen_at,
        last_checked_at, last_admitted_at, decayed_at, pending_count, total_admitted, newest_id, decayed_admits, in_flight_count,
        policy_name, partition_key, shard, blocked_reason, context, gate_state)
    ) as held on held.id = sums.partition_id
  ), updated as (
    update dispatch_partitions as p
    set
      pending_count = p.pending_count + changes.jobs,
      waiting_since = dispatch_waiting_since(p.pending_count + changes.jobs, p.waiting_since, changes.due_at, p_now),
      in_flight_count = p.in_flight_count + changes.slots,
      newest_id = greatest(p.newest_id, changes.newest_id),
      context = case when changes.newest_id > p.newest_id then changes.context else p.context end,
      blocked_until = still_blocked_until,
      due_at = dispatch_due_with_notes(p.due_at, p.blocked_until, still_blocked_until, changes.due_at, p_now)
    from changes
    where p.ctid = changes.place
  )
  -- A job that procrastinate retries by itself may hold a slot of a partition that was forgotten meanwhile.
  insert into dispatch_partitions (id, policy_name, partition_key, shard, context, newest_id, pending_count, waiting_since, in_flight_count, due_at,
    first_seen_at)
  select
    partition_id, p_policy, partition_key, shard, context, newest_id, jobs, dispatch_waiting_since(jobs, null, due_at, p_now),
    (
      select count(*)
      from dispatch_inflight_jobs as slot
      where slot.policy_name = p_policy
        and slot.partition_id = changes.partition_id
    ),
    due_at, p_now
  from changes
  where place is null
    and partition_key is not null
  order by partition_id;

  v_observations := array(
    select row(partition_id, succeeded, lag_ms)::dispatch_observation
    from unnest(v_notes)
    where succeeded is not null
    order by id
  );
  if v_observations <> '{}' then
    perform dispatch_adapt(p_policy, v_observations, p_now);
  end if;
  return cardinality(v_notes);
end;
$$;
comment on function dispatch_fold(text, timestamptz, integer) is 'Folds up to p_limit notes of a policy into its partitions and returns how many it folded.';
