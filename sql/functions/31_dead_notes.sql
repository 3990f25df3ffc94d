-- Notes that cannot be folded. Invariant: one is set aside with its error and harms no other; it is never dropped but by an
-- operator.

create or replace function dispatch_set_note_aside(p_note dispatch_inbox, p_error text, p_now timestamptz)
returns void
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
begin
  -- It was locked, but that is rolled back with what failed: somebody else may have it.
  with taken as (
    delete from dispatch_inbox
    where ctid = any (array(
      select i.ctid
      from dispatch_inbox as i
      where i.policy_name = p_note.policy_name
        and i.put_off = p_note.put_off
        and i.id = p_note.id
      for update skip locked
    ))
    returning *
  )
  insert into dispatch_dead_notes (id, partition_id, died_at, due_at, newest_id, lag_ms, jobs, succeeded, policy_name, kind, partition_key,
    shard, context, error)
  select id, partition_id, p_now, due_at, newest_id, lag_ms, jobs, succeeded, policy_name, kind, partition_key, shard, context,
    left(p_error, 500)
  from taken;
  raise warning 'pydispatch: note % of policy % cannot be folded and is set aside: %', p_note.id, p_note.policy_name, p_error;
end;
$$;
comment on function dispatch_set_note_aside(dispatch_inbox, text, timestamptz) is 'Moves a note to dispatch_dead_notes, with its error.';

create or replace function dispatch_take_dead_note(p_id bigint)
returns dispatch_dead_notes
language plpgsql
set search_path from current
as $$
declare
  v_dead dispatch_dead_notes;
begin
  delete from dispatch_dead_notes where id = p_id returning * into v_dead;
  if not found then
    perform dispatch_raise('PD006', format('no dead note %s', coalesce(p_id::text, 'null')), null, 'See dispatch_dead_notes for those that are.');
  end if;
  return v_dead;
end;
$$;
comment on function dispatch_take_dead_note(bigint) is 'Removes a note from dispatch_dead_notes. Raises PD006 when there is none.';

create or replace function dispatch_requeue_note(p_id bigint)
returns void
language plpgsql
set search_path from current
as $$
declare
  v_dead constant dispatch_dead_notes := dispatch_take_dead_note(p_id);
begin
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs, due_at, newest_id, partition_key, shard, context, succeeded, lag_ms)
  values (v_dead.policy_name, v_dead.partition_id, v_dead.kind, v_dead.jobs, v_dead.due_at, coalesce(v_dead.newest_id, 0),
    v_dead.partition_key, v_dead.shard, v_dead.context, v_dead.succeeded, v_dead.lag_ms);
  perform dispatch_wake(v_dead.policy_name);
end;
$$;
comment on function dispatch_requeue_note(bigint) is 'Puts a dead note back into the inbox, to be folded once more. Raises PD006 when no such note is dead.';

create or replace function dispatch_discard_note(p_id bigint)
returns void
language plpgsql
set search_path from current
as $$
declare
  v_dead constant dispatch_dead_notes := dispatch_take_dead_note(p_id);
begin
  -- Its jobs stay staged, whatever it said of them.
  insert into dispatch_inbox (policy_name, partition_id, kind)
  values (v_dead.policy_name, v_dead.partition_id, 'resumed');
  perform dispatch_wake(v_dead.policy_name);
end;
$$;
comment on function dispatch_discard_note(bigint) is 'Removes a dead note for good: what it said is not counted. Jobs that it told of stay staged; they go with the next one of their partition. Raises PD006 when no such note is dead.';
