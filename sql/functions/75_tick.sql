-- The tick, whole in SQL, and what tells its caller when to come back.
-- Any number of ticks may run at once: row locks keep them apart, and none waits for another.

create or replace function dispatch_tick_policy(p_policy dispatch_policies, p_shard text)
returns dispatch_tick_result
language plpgsql
set search_path from current
as $$
declare
  v_handoff dispatch_handoffs;
begin
  perform dispatch_await_queue();
  v_handoff := dispatch_decide(p_policy, p_shard);
  return dispatch_settle_outcomes(p_policy, v_handoff, dispatch_hand_off(p_policy, v_handoff));
end;
$$;
comment on function dispatch_tick_policy(dispatch_policies, text) is 'One tick of one policy, hand-off included.';

create or replace function dispatch_tick(p_policy text default null, p_shard text default null)
returns setof dispatch_tick_result
language plpgsql
set search_path from current
as $$
declare
  v_policy dispatch_policies;
  v_all_failed boolean;
  v_sqlstate text;
  v_message text;
begin
  if p_policy is not null then
    return next dispatch_tick_policy(dispatch_policy(p_policy), p_shard);
    return;
  end if;

  for v_policy in select * from dispatch_policies order by policy_name loop
    begin
      return next dispatch_tick_policy(v_policy, p_shard);
      v_all_failed := false;
    exception
      when others or assert_failure then
        v_all_failed := coalesce(v_all_failed, true) and dispatch_is_nobodys_fault(sqlstate);
        v_sqlstate := sqlstate;
        v_message := sqlerrm;
        raise warning 'pydispatch: the tick of policy % failed: % (SQLSTATE %)', v_policy.policy_name, sqlerrm, sqlstate;
        return next row(v_policy.policy_name, 0, 0, 0, 0, 0, jsonb_build_object('tick_error', 1), 0)::dispatch_tick_result;
    end;
  end loop;
  if v_all_failed then
    raise exception using errcode = v_sqlstate, message = v_message;
  end if;
end;
$$;
comment on function dispatch_tick(text, text) is 'One tick of a policy, or of all (null), for one shard or for all (null): folds the inbox, claims due partitions, passes their gates, hands the admitted jobs to procrastinate and settles, all in this transaction. One row a policy. Of several policies, one that fails is reported (a warning, and tick_error among denied_reasons) and stops no other; when all fail and it is not theirs, as for lack of rights, that is raised. Raises PD001 for an unknown policy.';

create or replace function dispatch_first_due(p_policy text, p_shard text)
returns dispatch_partitions
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
  -- As dispatch_lock_due() looks for them: that index has no partition of the shard 'default'.
  if p_shard is null or p_shard = 'default' then
    return (
      select p
      from dispatch_partitions as p
      where policy_name = p_policy
        and due_at < 'infinity'
        and (p_shard is null or shard = p_shard)
      order by due_at
      limit 1
    );
  end if;
  return (
    select p
    from dispatch_partitions as p
    where policy_name = p_policy
      and shard = p_shard
      and shard <> 'default'
      and due_at < 'infinity'
    order by due_at
    limit 1
  );
end;
$$;
comment on function dispatch_first_due(text, text) is 'The partition of a policy that is due first, of one shard or of all (null); null where none is.';

create or replace function dispatch_next_due(p_policy text default null, p_shard text default null)
returns timestamptz
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
begin
  return (
    select min(case
      when exists (select from dispatch_inbox as i where i.policy_name = policy.policy_name and not i.put_off) then dispatch_now()
      when exists (select from dispatch_pauses as pause where pause.id = dispatch_partition_id(policy.policy_name, null)) then null
      -- A worker that takes a job makes room, and tells nobody.
      when due.due_at <= dispatch_now() and dispatch_waits_for_queue(policy, due.id, due.blocked_reason, dispatch_now()) then
        dispatch_now() + interval '250 milliseconds'
      else least(due.due_at, waiting.at)
    end)
    from dispatch_policies as policy
    left join lateral dispatch_first_due(policy.policy_name, p_shard) as due on true
    -- Nobody tells when a partition is free again whose notes were put off.
    left join lateral (
      select dispatch_now() + interval '250 milliseconds'
      from dispatch_inbox as i
      where i.policy_name = policy.policy_name
        and i.put_off
      limit 1
    ) as waiting (at) on true
    where p_policy is null or policy.policy_name = p_policy
  );
end;
$$;
comment on function dispatch_next_due(text, text) is 'When the next tick is worth its while: a driver may sleep until then, or until it is notified. Null when nothing waits for a time; in the past when something is due.';

-- A procedure that commits may not pin its search_path, so it is made with the name of its schema in it.
do $make$
begin
  execute replace($create$
create or replace procedure dispatch_run(p_max_duration interval)
language plpgsql
as $$
declare
  v_until constant timestamptz := clock_timestamp() + p_max_duration;
  v_policy text;
  v_seen bigint;
  v_due boolean;
  v_notes bigint;
  v_notes_before bigint;
  v_all_failed boolean;
  v_sqlstate text;
  v_message text;
begin
  loop
    v_seen := 0;
    v_all_failed := null;
    -- In no order: where the time is up before the last one, it is another one that comes last the next time.
    foreach v_policy in array array(select policy_name from SCHEMA.dispatch_policies order by random()) loop
      begin
        v_seen := v_seen + (select coalesce(sum(partitions_seen), 0) from SCHEMA.dispatch_tick(v_policy));
        v_all_failed := false;
      exception
        when others or assert_failure then
          v_all_failed := coalesce(v_all_failed, true) and SCHEMA.dispatch_is_nobodys_fault(sqlstate);
          v_sqlstate := sqlstate;
          v_message := sqlerrm;
          raise warning 'pydispatch: the tick of policy % failed: % (SQLSTATE %)', v_policy, sqlerrm, sqlstate;
      end;
      commit;
    end loop;
    if v_all_failed then
      raise exception using errcode = v_sqlstate, message = v_message;
    end if;
    v_due := coalesce(SCHEMA.dispatch_next_due() <= SCHEMA.dispatch_now(), false);
    exit when clock_timestamp() >= v_until or not v_due;
    -- A round that saw no partition may have folded notes, with more to come; else others hold what is due.
    v_notes := null;
    if v_seen = 0 then
      select count(*) into v_notes from SCHEMA.dispatch_inbox where not put_off;
      exit when v_notes = 0 or v_notes >= v_notes_before;
    end if;
    v_notes_before := v_notes;
  end loop;
end;
$$
  $create$, 'SCHEMA', quote_ident(current_schema()));
end;
$make$;
comment on procedure dispatch_run(interval) is 'For cron: ticks all policies in turn, committing each tick of each, until nothing is due (or other ticks hold all that is), or the time is up. Call it outside a transaction. Errors as dispatch_tick().';
