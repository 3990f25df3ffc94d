-- Folding the inbox: notes become counters, contexts and due times of partitions.
-- Invariants: a note is folded exactly once, in the transaction that deletes it; a partition's notes are folded in
-- the order of their ids; sums are never clamped, so that they come out right in any order; nothing here waits for
-- another tick: notes and partitions that one holds are left to it.

create or replace function dispatch_fold(p_policy text, p_now timestamptz, p_limit integer default 10000)
returns integer
language plpgsql
set search_path from current
as $$
declare
  v_folded integer;
  v_observations dispatch_observation[];
begin
  with taken as materialized (
    select *
    from dispatch_inbox
    where policy_name = p_policy
    order by id
    limit p_limit
    for update skip locked
  ), contended as materialized (
    -- Another note of the partition is in another tick's hands: that tick may be creating the partition. Notes are
    -- committed in any order, so it may be a newer one as well; where the limit cut off, only older ones are told apart.
    select distinct i.partition_id
    from dispatch_inbox as i
    where i.policy_name = p_policy
      and i.id <= (select case when count(*) < p_limit then 9223372036854775807 else max(id) end from taken)
      and not exists (select from taken where taken.id = i.id)
  ), mine as (
    select distinct partition_id
    from taken
    where partition_id not in (select partition_id from contended)
  ), known as materialized (
    select mine.partition_id, p.id is not null as exists
    from mine
    left join dispatch_partitions as p on p.id = mine.partition_id
  ), held as materialized (
    select p.id, p.newest_id, p.context, p.blocked_until, p.blocked_after_finish
    from dispatch_partitions as p
    where p.id in (select partition_id from known where known.exists)
    order by p.id
    for update skip locked
  ), folded as (
    delete from dispatch_inbox as i
    using taken
    where i.policy_name = p_policy
      and i.id = taken.id
      and (
        taken.partition_id in (select id from held)
        or taken.partition_id in (select partition_id from known where not known.exists)
      )
    returning i.*
  ), newest as (
    select distinct on (partition_id) partition_id, newest_id, context, partition_key, shard
    from folded
    where kind = 'staged'
    order by partition_id, newest_id desc
  ), sums as (
    select
      partition_id,
      coalesce(sum(jobs) filter (where kind <> 'finished'), 0) as jobs,
      coalesce(sum(-jobs) filter (where kind = 'finished'), 0) as finished,
      coalesce(bool_or(kind = 'finished'), false) as any_finished,
      coalesce(bool_or(kind = 'resumed'), false) as any_resumed,
      min(due_at) as due_at
    from folded
    group by partition_id
  ), changes as (
    select
      sums.*, newest.newest_id, newest.context, newest.partition_key, newest.shard,
      held.id is not null as is_known,
      held.blocked_until,
      -- A finish lifts what only waits for slots; a new context or a lifted pause lifts everything.
      case
        when any_resumed or (newest.newest_id > held.newest_id and newest.context <> held.context) then null
        when any_finished then held.blocked_after_finish
        else held.blocked_until
      end as still_blocked_until
    from sums
    left join newest using (partition_id)
    left join held on held.id = sums.partition_id
  ), updated as (
    update dispatch_partitions as p
    set
      pending_count = p.pending_count + changes.jobs,
      in_flight_count = p.in_flight_count - changes.finished,
      newest_id = greatest(p.newest_id, changes.newest_id),
      context = case when changes.newest_id > p.newest_id then changes.context else p.context end,
      blocked_until = changes.still_blocked_until,
      due_at = least(
        p.due_at,
        case when changes.still_blocked_until is distinct from changes.blocked_until and p.due_at is not null then greatest(changes.still_blocked_until, p_now) end,
        case when changes.due_at is not null then greatest(changes.due_at, changes.still_blocked_until) end
      )
    from changes
    where p.id = changes.partition_id
      and changes.is_known
  ), created as (
    insert into dispatch_partitions as p (id, policy_name, partition_key, shard, context, newest_id, pending_count, due_at, first_seen_at)
    select partition_id, p_policy, partition_key, shard, context, newest_id, jobs, due_at, p_now
    from changes
    where not is_known
      and partition_key is not null
    order by partition_id
    -- Another tick created it after all, from notes beyond the limit: the one wait here, for that tick.
    on conflict on constraint dispatch_partitions_pkey do update
    set
      pending_count = p.pending_count + excluded.pending_count,
      newest_id = greatest(p.newest_id, excluded.newest_id),
      context = case when excluded.newest_id > p.newest_id then excluded.context else p.context end,
      due_at = least(p.due_at, greatest(excluded.due_at, p.blocked_until))
  )
  select
    count(*),
    array_agg(row(partition_id, succeeded, lag_ms)::dispatch_observation order by id) filter (where succeeded is not null)
  into v_folded, v_observations
  from folded;

  if v_observations is not null then
    perform dispatch_adapt(p_policy, v_observations, p_now);
  end if;
  return v_folded;
end;
$$;
comment on function dispatch_fold(text, timestamptz, integer) is 'Folds up to p_limit notes of a policy into its partitions and returns how many it folded.';
