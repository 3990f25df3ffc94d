-- Folding the inbox: notes become counters, contexts and due times of partitions.
-- Invariants: a note is folded exactly once, in the transaction that deletes it; a partition's notes are folded in
-- the order of their ids; sums are never clamped, so that they come out right in any order; nothing here waits for
-- another tick: notes and partitions that one holds are left to it; and no note keeps those of other partitions from being
-- folded. So those that are left and fill half of a batch are put off: then they wait by partition, of which one look tells
-- whether it is free again, and the newer ones of their partition wait behind them. One that cannot be folded is set aside.
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
  if (select count(*) from dispatch_inbox where policy_name = p_policy and not put_off and id <= v_last)
    = (select count(*) from unnest(p_notes) where not put_off) then
    return '{}';
  end if;
  return array(
    select distinct partition_id
    from (
      select id, partition_id from dispatch_inbox where policy_name = p_policy and not put_off and id <= v_last
      except
      select id, partition_id from unnest(p_notes)
    ) as others
  );
end;
$$;
comment on function dispatch_notes_in_other_hands(text, dispatch_inbox[]) is 'Partitions of which another tick holds an older note than the last of these, which are in the order of their ids.';

create or replace function dispatch_bucket(p_partition_id uuid)
returns integer
language sql
immutable
parallel safe
return get_byte(uuid_send(p_partition_id), 0);
comment on function dispatch_bucket(uuid) is 'Which row of dispatch_creations stands for the creation of a partition.';

create or replace function dispatch_policy_created()
returns trigger
language plpgsql
security definer
set search_path from current
as $$
begin
  insert into dispatch_creations (policy_name, bucket)
  select new.policy_name, bucket
  from generate_series(0, 255) as bucket;
  return null;
end;
$$;
comment on function dispatch_policy_created() is 'Trigger: gives a new policy its rows in dispatch_creations.';
revoke all on function dispatch_policy_created() from public;
create or replace trigger dispatch_policy_created
after insert on dispatch_policies
for each row execute function dispatch_policy_created();

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
  v_buckets integer[];
begin
  if p_partitions = '{}' then
    return '{}';
  end if;
  v_buckets := array(select distinct dispatch_bucket(id) from unnest(p_partitions) as id);
  v_buckets := array(
    select bucket
    from dispatch_creations
    where policy_name = p_policy
      and bucket = any (v_buckets)
    order by bucket
    for update skip locked
  );
  -- In a later statement, so that what was created before a lock became free is seen.
  return array(
    select id from unnest(p_partitions) as id where dispatch_bucket(id) <> all (v_buckets)
    union
    select p.id from dispatch_partitions as p where p.id = any (p_partitions)
  );
end;
$$;
comment on function dispatch_in_other_hands(text, uuid[]) is 'Of partitions whose rows could not be locked, those that another tick holds or may be creating; the others do not exist, and nobody else can create them before this transaction ends. That locks the rows of their buckets.';

create or replace function dispatch_put_off_in_hand(p_policy text)
returns uuid[]
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_ids uuid[];
  v_free uuid[];
begin
  -- From the lowest id on, and from anywhere: lest many that are held hide the one that is free.
  v_ids := array(
    with recursive found as (
      select first.partition_id
      from (values ('00000000-0000-0000-0000-000000000000'::uuid), (gen_random_uuid())) as starts (id)
      cross join lateral (
        select note.partition_id
        from dispatch_inbox as note
        where note.policy_name = p_policy
          and note.put_off
          and note.partition_id >= starts.id
        order by note.partition_id
        limit 1
      ) as first
      union all
      select next.partition_id
      from found
      cross join lateral (
        select note.partition_id
        from dispatch_inbox as note
        where note.policy_name = p_policy
          and note.put_off
          and note.partition_id > found.partition_id
        order by note.partition_id
        limit 1
      ) as next
    )
    select distinct partition_id from (select partition_id from found limit 1000) as page
  );
  v_free := array(select p.id from dispatch_partitions as p where p.id = any (v_ids) order by p.id for update skip locked);
  v_ids := array(select unnest(v_ids) except select unnest(v_free));
  return v_free || array(select unnest(v_ids) except select unnest(dispatch_in_other_hands(p_policy, v_ids)));
end;
$$;
comment on function dispatch_put_off_in_hand(text) is 'Of the partitions that have notes put off, up to 1000 that nobody else holds or may be creating, locked.';

create or replace function dispatch_take_put_off(
  p_policy text, p_limit integer, p_before bigint, out notes dispatch_inbox[], out places tid[]
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
declare
  v_free constant uuid[] := dispatch_put_off_in_hand(p_policy);
  v_share constant integer := p_limit / greatest(cardinality(v_free), 1) + 1;
begin
  select coalesce(array_agg(taken.note), '{}'), coalesce(array_agg(taken.place), '{}')
  into notes, places
  from unnest(v_free) as free (id)
  cross join lateral (
    select i as note, i.ctid as place
    from dispatch_inbox as i
    where i.policy_name = p_policy
      and i.put_off
      and i.partition_id = free.id
      and i.id < p_before
    order by i.id
    limit v_share
    for update skip locked
  ) as taken;
end;
$$;
comment on function dispatch_take_put_off(text, integer, bigint) is 'Locks about p_limit notes that were put off, of partitions that are free, and these as well; only such as are older than p_before.';

create or replace function dispatch_behind_put_off(p_policy text, p_notes dispatch_inbox[])
returns bigint[]
language plpgsql
stable
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set jit = off
as $$
begin
  return array(
    select note.id
    from (
      select partition_id, coalesce(max(id) filter (where put_off), 0) as last_id
      from unnest(p_notes)
      group by partition_id
    ) as known
    cross join lateral (
      select i.id
      from dispatch_inbox as i
      where i.policy_name = p_policy
        and i.put_off
        and i.partition_id = known.partition_id
        and i.id > known.last_id
      order by i.id
      limit 1
    ) as next
    join unnest(p_notes) as note on note.partition_id = known.partition_id and note.id > next.id
  );
end;
$$;
comment on function dispatch_behind_put_off(text, dispatch_inbox[]) is 'Those of some notes that stand behind one of their partition which is put off and not among them.';

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
  p_due_at timestamptz, p_was_blocked_until timestamptz, p_blocked_until timestamptz, p_jobs_due_at timestamptz, p_any_resumed boolean,
  p_now timestamptz
)
returns timestamptz
language sql
immutable
parallel safe
return least(
  p_due_at,
  case
    when (p_any_resumed or p_blocked_until is distinct from p_was_blocked_until) and p_due_at is not null then greatest(p_blocked_until, p_now)
  end,
  case when p_jobs_due_at is not null then greatest(p_jobs_due_at, p_blocked_until) end
);
comment on function dispatch_due_with_notes(timestamptz, timestamptz, timestamptz, timestamptz, boolean, timestamptz) is 'When to look at a partition once notes are folded: at once where something was lifted, or (p_any_resumed) somebody wants it looked at whatever it sleeps for; and when the first of the new jobs (p_jobs_due_at; null: none came) may go.';

create or replace function dispatch_take_notes(
  p_policy text, p_limit integer, p_only bigint[], out notes dispatch_inbox[], out places tid[], out behind bigint[]
)
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_some_put_off constant boolean := exists (select from dispatch_inbox where policy_name = p_policy and put_off);
  v_put_off record;
begin
  behind := '{}';
  if p_only is not null then
    select array_agg(locked.note), array_agg(locked.place)
    into notes, places
    from (
      select i as note, i.ctid as place
      from dispatch_inbox as i
      where i.policy_name = p_policy
        and i.put_off = any ('{false,true}')
        and i.id = any (p_only)
      order by i.id
      for update skip locked
    ) as locked;
  else
    select array_agg(locked.note), array_agg(locked.place)
    into notes, places
    from (
      select i as note, i.ctid as place
      from dispatch_inbox as i
      where i.policy_name = p_policy
        and not i.put_off
      order by i.id
      limit p_limit
      for update skip locked
    ) as locked;
    if v_some_put_off then
      v_put_off := dispatch_take_put_off(p_policy, p_limit,
        case when cardinality(notes) = p_limit then notes[p_limit].id else 9223372036854775807 end);
      select array_agg(note order by (note).id), array_agg(place order by (note).id)
      into notes, places
      from (select unnest(notes || v_put_off.notes) as note, unnest(places || v_put_off.places) as place) as taken;
    end if;
  end if;
  if v_some_put_off and notes is not null then
    behind := dispatch_behind_put_off(p_policy, notes);
  end if;
end;
$$;
comment on function dispatch_take_notes(text, integer, bigint[]) is 'Locks the notes that a fold may take, in the order of their ids: the oldest p_limit, and of those put off about as many that are free; or (p_only) some. behind = those of them that have to wait for older ones which were put off.';

create or replace function dispatch_to_observations(p_notes dispatch_inbox[], p_partitions dispatch_partitions[])
returns dispatch_observation[]
language plpgsql
immutable
parallel safe
as $$
begin
  return array(
    select row(note.partition_id, note.succeeded, note.lag_ms, p.in_flight_count + note.slots)::dispatch_observation
    from (
      select
        id, partition_id, succeeded, lag_ms,
        coalesce(sum(jobs) filter (where kind = 'finished')
          over (partition by partition_id order by id rows between unbounded preceding and 1 preceding), 0) as slots
      from unnest(p_notes)
    ) as note
    left join unnest(p_partitions) as p on p.id = note.partition_id
    where note.succeeded is not null
    order by note.id
  );
end;
$$;
comment on function dispatch_to_observations(dispatch_inbox[], dispatch_partitions[]) is 'What notes tell the adaptive gates, in the order of their ids, and how many were in flight at each, of partitions as they stand before the fold.';

create or replace function dispatch_apply_notes(
  p_policy text, p_notes dispatch_inbox[], p_held dispatch_partitions[], p_rows tid[], p_now timestamptz
)
returns void
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set jit = off
as $$
begin
  with changes as materialized (
    select
      sums.*,
      held.place,
      dispatch_still_blocked(held.blocked_until, held.blocked_after_finish, any_finished,
        any_resumed or (sums.newest_id > held.newest_id and sums.context <> held.context)) as still_blocked_until
    from dispatch_sum_notes(p_notes) as sums
    left join (
      select place, id, newest_id, context, blocked_until, blocked_after_finish
      from rows from (unnest(p_rows), unnest(p_held)) as held (place, id, due_at, blocked_until, blocked_after_finish, first_seen_at,
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
      due_at = dispatch_due_with_notes(p.due_at, p.blocked_until, still_blocked_until, changes.due_at, changes.any_resumed, p_now)
    from changes
    where p.ctid = changes.place
  )
  -- A job that procrastinate retries by itself may hold a slot of a partition that was forgotten meanwhile.
  insert into dispatch_partitions (id, policy_name, partition_key, shard, context, newest_id, pending_count, waiting_since, in_flight_count, due_at,
    first_seen_at)
  select
    partition_id, p_policy, partition_key, dispatch_shard_name(shard), context, newest_id, jobs, dispatch_waiting_since(jobs, null, due_at, p_now),
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

  if exists (select from unnest(p_notes) where succeeded is not null) then
    perform dispatch_adapt(p_policy, dispatch_to_observations(p_notes, p_held), p_now);
  end if;
end;
$$;
comment on function dispatch_apply_notes(text, dispatch_inbox[], dispatch_partitions[], tid[], timestamptz) is 'Changes partitions by what notes say, and creates those that are new. p_held: the locked ones as they are, beside where their rows are.';

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
  v_behind bigint[];
  v_partitions uuid[];
  v_held dispatch_partitions[];
  v_rows tid[];
  v_left uuid[];
  v_waiting tid[];
  v_folded integer := 0;
  v_set_aside integer := 0;
  -- Of a batch that failed, the notes that are still to be folded, and how many of them are tried next.
  v_todo bigint[];
  v_size integer;
begin
  loop
    v_waiting := '{}';
    begin
      select notes, places, behind into v_notes, v_places, v_behind from dispatch_take_notes(p_policy, p_limit, v_todo[:v_size]);
      if v_notes is not null then
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
        if v_left <> '{}' or v_behind <> '{}' then
          select
            coalesce(array_agg(note order by (note).id) filter (where not stays), '{}'),
            coalesce(array_agg(place order by (note).id) filter (where not stays), '{}'),
            coalesce(array_agg(place) filter (where stays and not (note).put_off), '{}')
          into v_notes, v_places, v_waiting
          from (
            select note, place, (note).partition_id = any (v_left) or (note).id = any (v_behind) as stays
            from (select unnest(v_notes) as note, unnest(v_places) as place) as locked
          ) as locked;
          if v_todo is null and cardinality(v_waiting) > p_limit / 2 then
            update dispatch_inbox set put_off = true where ctid = any (v_waiting);
          end if;
        end if;
        if v_notes <> '{}' then
          delete from dispatch_inbox where ctid = any (v_places);
          perform dispatch_apply_notes(p_policy, v_notes, v_held, v_rows, p_now);
        end if;
        v_folded := v_folded + cardinality(v_notes);
      end if;
      v_todo := v_todo[v_size + 1:];
      v_size := v_size * 2;
    exception
      when others or assert_failure then
        if v_notes is null or dispatch_is_nobodys_fault(sqlstate) then
          raise;
        end if;
        if cardinality(v_notes) = 1 then
          perform dispatch_set_note_aside(v_notes[1], sqlerrm, p_now);
          v_set_aside := v_set_aside + 1;
          v_todo := array_remove(v_todo, v_notes[1].id);
          v_size := 1;
        else
          v_todo := coalesce(v_todo, array(select id from unnest(v_notes)));
          v_size := greatest(least(v_size, cardinality(v_notes)) / 2, 1);
        end if;
    end;
    exit when coalesce(v_todo, '{}') = '{}' or v_set_aside = 100;
  end loop;
  return v_folded;
end;
$$;
comment on function dispatch_fold(text, timestamptz, integer) is 'Folds up to p_limit notes of a policy into its partitions, and as many of those that were put off, and returns how many it folded. A batch that fails is halved until what cannot be folded stands alone; that goes to dispatch_dead_notes.';
