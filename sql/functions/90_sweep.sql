-- The sweep: what no tick and no trigger sees. It sets slots and counters right by procrastinate's rows, gives the slots of
-- lost workers back, sets orphans aside and forgets what is old.
-- Invariants: a queued job keeps its slot however long it queues; a partition is forgotten only when a new one would start
-- no better off; each bite is bounded and skips what others hold; one sweep at a time.

create or replace function dispatch_sweep_ended(p_limit integer)
returns bigint
language plpgsql
set search_path from current
as $$
begin
  return (
    select count(*) filter (where dispatch_free_slot(job_id, null))
    from dispatch_slots_without_job(p_limit) as job_id
  );
end;
$$;
comment on function dispatch_sweep_ended(integer) is 'Frees slots whose procrastinate job ended or vanished behind the triggers'' back.';

create or replace function dispatch_sweep_stalled(p_now timestamptz, p_limit integer)
returns bigint
language plpgsql
set search_path from current
as $$
declare
  v_since constant timestamptz := p_now - dispatch_setting_span('inflight_stale_after');
begin
  perform dispatch_note_orphans(p_now, p_limit);
  return (
    select count(*) filter (where case what when 'retry' then dispatch_retry_stalled(job_id) else dispatch_free_slot(job_id, null) end)
    from dispatch_lock_stalled(p_now, v_since, p_limit)
  );
end;
$$;
comment on function dispatch_sweep_stalled(timestamptz, integer) is 'Takes the slots of running jobs whose worker gave no sign for inflight_stale_after; where the policy says so, the jobs are retried.';

create or replace function dispatch_sweep_orphans(p_now timestamptz, p_limit integer)
returns bigint
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
  v_policy text;
  v_orphans bigint[];
  v_count bigint := 0;
begin
  -- Notes of a policy that does not exist: its jobs were staged while it was dropped.
  select min(policy_name) into v_policy from dispatch_inbox;
  while v_policy is not null loop
    if not exists (select from dispatch_policies where policy_name = v_policy) then
      v_orphans := array(
        select s.id
        from dispatch_staged_jobs as s
        where s.partition_id in (select partition_id from dispatch_inbox where policy_name = v_policy)
        order by s.id
        limit p_limit
        for update skip locked
      );
      perform dispatch_bury(v_orphans, array_fill(format('policy %L does not exist', v_policy), array[cardinality(v_orphans)]), p_now);
      v_count := v_count + cardinality(v_orphans);
      delete from dispatch_inbox
      where policy_name = v_policy
        and id in (
          select note.id
          from dispatch_inbox as note
          where note.policy_name = v_policy
            and not exists (select from dispatch_staged_jobs as s where s.partition_id = note.partition_id)
          order by note.id
          limit p_limit
          for update skip locked
        );
    end if;
    select min(policy_name) into v_policy from dispatch_inbox where policy_name > v_policy;
  end loop;

  -- Retries whose parked row is gone wait for nothing.
  with gone as (
    delete from dispatch_staged_jobs
    where id in (select dispatch_retries_without_job(p_limit))
    returning policy_name, partition_id
  ), notes as (
    insert into dispatch_inbox (policy_name, partition_id, kind, jobs)
    select policy_name, partition_id, 'removed', -count(*)
    from gone
    group by policy_name, partition_id
  )
  select v_count + count(*) into v_count from gone;
  return v_count;
end;
$$;
comment on function dispatch_sweep_orphans(timestamptz, integer) is 'Sets staged jobs whose policy is gone aside as dead, and drops retries whose procrastinate job is gone.';

create or replace function dispatch_buckets_full(p_policy dispatch_policies, p_partition dispatch_partitions, p_now timestamptz)
returns boolean
language plpgsql
stable
set search_path from current
as $$
begin
  if not p_partition.gate_state @? '$.*.tokens' then
    return true;
  end if;
  return not exists (
    select
    from unnest(dispatch_resolve(dispatch_only_lookups(p_policy, 'throttle'), array[dispatch_new_claim(p_policy, p_partition, 1)], p_now)) as c
    cross join jsonb_array_elements(p_policy.gates) as gate
    cross join lateral (
      select
        c.gate_state -> (gate ->> 'name') as state,
        (c.params ->> (gate ->> 'name' || '.rate'))::numeric as rate,
        (c.params ->> (gate ->> 'name' || '.per'))::numeric as per,
        (c.params ->> (gate ->> 'name' || '.burst'))::numeric as burst
    ) as bucket
    where gate ->> 'type' = 'throttle'
      and bucket.state is not null
      -- Null: nobody knows now, a limit function raises perhaps.
      and (
        bucket.rate is null
        or bucket.per is null
        or (bucket.state ->> 'tokens')::numeric
          + greatest(extract(epoch from p_now) - (bucket.state ->> 'at')::numeric, 0) * greatest(bucket.rate, 0) / greatest(bucket.per, 1e-6)
          < dispatch_capacity(bucket.rate, bucket.burst)
      )
  );
end;
$$;
comment on function dispatch_buckets_full(dispatch_policies, dispatch_partitions, timestamptz) is 'Is every bucket of a partition full again, so that forgetting it gives nothing away?';

-- Called under the partitions' locks and a statement later, so that rows and notes are seen as they stand. The notes are read
-- once, not once a partition: there may be many of both when nobody has ticked for a while.
create or replace function dispatch_reconcile(p_partitions uuid[], p_now timestamptz)
returns bigint
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
  v_policies text[] := array(select distinct policy_name from dispatch_partitions where id = any (p_partitions));
  v_reconciled bigint;
begin
  if p_partitions = '{}' then
    return 0;
  end if;
  with set_right as (
    update dispatch_partitions as p
    set in_flight_count = truth.slots, due_at = case when p.due_at is not null then p_now end, blocked_until = null, blocked_after_finish = null
    from (
      select id, sum(slots) as slots
      from (
        select p.id, (select count(*) from dispatch_inflight_jobs as slot where slot.policy_name = p.policy_name and slot.partition_id = p.id) as slots, true as asked_for
        from dispatch_partitions as p
        where p.id = any (p_partitions)
        union all
        select note.partition_id, -note.jobs, false
        from dispatch_inbox as note
        where note.policy_name = any (v_policies)
          and note.kind = 'finished'
      ) as counted
      group by id
      having bool_or(asked_for)
    ) as truth
    cross join lateral (
      select ctid as place from dispatch_partitions where id = truth.id limit 1
    ) as held
    where p.ctid = held.place
      and p.in_flight_count <> truth.slots
    returning p.policy_name
  )
  select count(*), array_agg(distinct policy_name) into v_reconciled, v_policies from set_right;
  perform dispatch_wake(policy_name) from unnest(v_policies) as policy_name;
  return v_reconciled;
end;
$$;
comment on function dispatch_reconcile(uuid[], timestamptz) is 'Sets in_flight_count of partitions that the caller has locked right by their slots and the finishes that are not folded yet. Returns how many it had to change.';

create or replace function dispatch_sweep_partitions(p_now timestamptz, p_limit integer, p_ask boolean default true, out reconciled bigint, out forgotten bigint)
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
  v_inactive_since constant timestamptz := p_now - dispatch_setting_span('partition_inactive_after');
  v_from uuid;
  v_page uuid[];
  v_suspects uuid[];
  v_held uuid[];
  v_until timestamptz;
  v_last uuid;
  v_id uuid;
begin
  forgotten := 0;
  -- A walk over all partitions in id order, a page a sweep.
  select position into v_from from dispatch_sweep_positions where walk = 'partitions' for update;
  v_page := array(
    select id from dispatch_partitions where v_from is null or id > v_from order by id limit p_limit
  );
  insert into dispatch_sweep_positions (walk, position)
  values ('partitions', case when cardinality(v_page) = p_limit then v_page[p_limit] end)
  on conflict on constraint dispatch_sweep_positions_pkey do update set position = excluded.position;

  v_suspects := array(
    select p.id
    from dispatch_partitions as p
    where p.id = any (v_page)
      and (
        p.in_flight_count <> (select count(*) from dispatch_inflight_jobs as slot where slot.policy_name = p.policy_name and slot.partition_id = p.id)
        or (p.due_at is null and p.in_flight_count = 0
          and greatest(p.last_checked_at, p.last_admitted_at, p.first_seen_at) < v_inactive_since)
        or not exists (select from dispatch_policies as policy where policy.policy_name = p.policy_name)
      )
    order by p.id
  );

  v_held := array(select id from dispatch_partitions where id = any (v_suspects) order by id for update skip locked);
  reconciled := dispatch_reconcile(array(
    select p.id
    from dispatch_partitions as p
    where p.id = any (v_held)
      and p.in_flight_count <> (select count(*) from dispatch_inflight_jobs as slot where slot.policy_name = p.policy_name and slot.partition_id = p.id)
  ), p_now);

  -- Limit functions are asked here, which may take their time: where it is up, the next sweep goes on.
  v_until := clock_timestamp() + interval '2 seconds';
  foreach v_id in array v_held loop
    if clock_timestamp() > v_until and v_last is not null then
      update dispatch_sweep_positions set position = v_last where walk = 'partitions';
      exit;
    end if;
    v_last := v_id;
    delete from dispatch_partitions as p
    using dispatch_policies as policy
    where p.id = v_id
      and policy.policy_name = p.policy_name
      and p.due_at is null
      and p.in_flight_count = 0
      and p.pending_count = 0
      and greatest(p.last_checked_at, p.last_admitted_at, p.first_seen_at) < v_inactive_since
      and not exists (select from dispatch_staged_jobs as s where s.partition_id = p.id)
      and (p_ask or not policy.lookups @? '$[*].sql')
      and dispatch_buckets_full(policy, p, p_now);
    if found then
      forgotten := forgotten + 1;
    end if;

    -- A tick that began before its policy was dropped may commit after it. The note leads to the jobs that wait: the next sweep,
    -- or should the policy be defined again before that, a tick.
    with gone as (
      delete from dispatch_partitions as p
      where p.id = v_id
        and not exists (select from dispatch_policies as policy where policy.policy_name = p.policy_name)
      returning *
    )
    insert into dispatch_inbox (policy_name, partition_id, kind, jobs, due_at, newest_id, partition_key, shard, context)
    select policy_name, id, 'staged', pending_count, coalesce(due_at, p_now), newest_id, partition_key, shard, context
    from gone
    where exists (select from dispatch_staged_jobs as s where s.partition_id = gone.id);
  end loop;
end;
$$;
comment on function dispatch_sweep_partitions(timestamptz, integer, boolean) is 'Walks over the partitions: sets in_flight_count right by the slots, forgets those idle for partition_inactive_after whose buckets are full again. After about 2 seconds it leaves the rest to the next. Without p_ask, no limit function is asked, and who would need one stays.';

create or replace function dispatch_sweep_old(p_now timestamptz, p_limit integer,
  out samples bigint, out policy_samples bigint, out admissions bigint, out audit_entries bigint)
language plpgsql
set search_path from current
as $$
declare
  v_metrics_since constant timestamptz := p_now - dispatch_setting_span('metrics_retention');
begin
  delete from dispatch_tick_samples
  where id in (
    select id
    from dispatch_tick_samples
    where at < v_metrics_since
      and counted
    limit p_limit
    for update skip locked
  );
  get diagnostics samples = row_count;

  delete from dispatch_policy_samples
  where ctid = any (array(
    select ctid
    from dispatch_policy_samples
    where at < v_metrics_since
    limit p_limit
    for update skip locked
  ));
  get diagnostics policy_samples = row_count;

  delete from dispatch_admissions
  where job_id in (
    select dispatch_ended_admissions(p_now - dispatch_setting_span('admission_retention'), p_now, p_limit)
  );
  get diagnostics admissions = row_count;

  delete from dispatch_audit_log
  where id in (
    select id
    from dispatch_audit_log
    where at < p_now - dispatch_setting_span('audit_retention')
    limit p_limit
    for update skip locked
  );
  get diagnostics audit_entries = row_count;
end;
$$;
comment on function dispatch_sweep_old(timestamptz, integer) is 'Forgets samples past metrics_retention (of ticks only those that are counted), admissions past admission_retention whose job has ended, and audit entries past audit_retention.';

create or replace function dispatch_sweep()
returns table (task text, affected bigint)
language plpgsql
set search_path from current
as $$
declare
  v_now constant timestamptz := dispatch_now();
  v_limit constant integer := 10000;
  v_ended bigint;
  v_stalled bigint;
  v_orphans bigint;
  v_partitions record;
  v_old record;
begin
  if not pg_try_advisory_xact_lock(hashtext('dispatch_sweep'), 'dispatch_partitions'::regclass::oid::integer) then
    return;
  end if;
  v_ended := dispatch_sweep_ended(v_limit);
  v_stalled := dispatch_sweep_stalled(v_now, v_limit);
  v_orphans := dispatch_sweep_orphans(v_now, v_limit);
  return query values ('slots of ended jobs', v_ended), ('slots of lost workers', v_stalled), ('orphaned jobs', v_orphans);
  -- A limit function may never come back: what was recovered is committed before one is asked.
  v_partitions := dispatch_sweep_partitions(v_now, v_limit, v_ended + v_stalled + v_orphans = 0);
  return query values ('counters set right', v_partitions.reconciled), ('idle partitions', v_partitions.forgotten);
  return query select 'ticks counted', dispatch_count_ticks(v_now, v_limit);
  v_old := dispatch_sweep_old(v_now, v_limit);
  return query values ('tick samples', v_old.samples), ('policy samples', v_old.policy_samples), ('admissions', v_old.admissions),
    ('audit entries', v_old.audit_entries);
  return query select 'policies sampled', dispatch_sample_policies(v_now);
end;
$$;
comment on function dispatch_sweep() is 'Recovery and retention; call it every 30 seconds or so (a driver does). Returns how many rows each task touched; nothing when another session sweeps. Takes at most 10000 rows a task, and asks limit functions for about 2 seconds, so a large backlog of work takes several sweeps.';
