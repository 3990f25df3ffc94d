-- Settling: what was handed off is written down, in the transaction that handed it off.
-- Invariant: staged row, slot, admission, gate state, counters and procrastinate's row commit together or not at all; and
-- a job is paid for (tokens, slot) only when it was handed off.

create or replace function dispatch_bury(p_ids bigint[], p_errors text[], p_now timestamptz)
returns void
language plpgsql
set search_path from current
as $$
begin
  with buried as (
    delete from dispatch_staged_jobs as s
    using unnest(p_ids, p_errors) as failed (id, error)
    where s.id = failed.id
    returning s.*, failed.error
  ), dead as (
    insert into dispatch_dead_jobs (id, partition_id, staged_at, died_at, scheduled_at, job_id, priority, attempts, policy_name,
      partition_key, task_name, queue_name, lock, queueing_lock, args, context, error)
    select id, partition_id, staged_at, p_now, scheduled_at, job_id, priority, attempts, policy_name,
      partition_key, task_name, queue_name, lock, queueing_lock, args, context, error
    from buried
  )
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs)
  select policy_name, partition_id, 'removed', -count(*)
  from buried
  group by policy_name, partition_id;
end;
$$;
comment on function dispatch_bury(bigint[], text[], timestamptz) is 'Moves staged jobs to dispatch_dead_jobs, each with its error.';

create or replace function dispatch_settle_outcomes(p_policy dispatch_policies, p_handoff dispatch_handoffs, p_outcomes dispatch_outcome[])
returns dispatch_tick_result
language plpgsql
set search_path from current
as $$
declare
  v_now constant timestamptz := p_handoff.decided_at;
  v_handed jsonb;
  v_after dispatch_claim[];
  v_result dispatch_tick_result;
begin
  with handed as (
    delete from dispatch_staged_jobs as s
    using unnest(p_outcomes) as o
    where s.id = o.id
      and o.job_id is not null
    returning s.id, o.job_id, s.partition_id, s.staged_at, s.policy_name, s.partition_key, s.context
  ), slots as (
    insert into dispatch_inflight_jobs (job_id, staged_id, partition_id, admitted_at, policy_name, partition_key)
    select job_id, id, partition_id, v_now, policy_name, partition_key
    from handed
  ), admissions as (
    insert into dispatch_admissions (staged_id, job_id, partition_id, staged_at, admitted_at, policy_name, partition_key, context)
    select id, job_id, partition_id, staged_at, v_now, policy_name, partition_key, context
    from handed
    on conflict on constraint dispatch_admissions_pkey do update
    set admitted_at = excluded.admitted_at
  ), counts as (
    select partition_id, count(*) as jobs
    from handed
    group by partition_id
  )
  select coalesce(jsonb_object_agg(partition_id, jobs), '{}')
  into v_handed
  from counts;

  if exists (select from unnest(p_outcomes) as o where o.job_id is null) then
    perform dispatch_bury(
      array(select o.id from unnest(p_outcomes) as o where o.error is not null order by o.id),
      array(select o.error from unnest(p_outcomes) as o where o.error is not null order by o.id),
      v_now);
    update dispatch_staged_jobs as s
    set eligible_at = v_now + make_interval(secs => dispatch_setting('queueing_lock_backoff')::double precision)
    from unnest(p_outcomes) as o
    where s.id = o.id
      and o.job_id is null
      and o.error is null;
  end if;

  -- The gates are asked once more, now with what was handed off: their answer is when to look again.
  v_after := dispatch_pass_gates(p_policy.gates, array(
    select row(
      c.ordinal, c.partition_id, c.partition_key, c.context, c.params,
      dispatch_spend(c.gate_state, coalesce((v_handed ->> c.partition_id::text)::integer, 0)),
      c.in_flight + coalesce((v_handed ->> c.partition_id::text)::integer, 0),
      p_policy.admission_batch_size, null, null, null
    )::dispatch_claim
    from unnest(p_handoff.claims) as c
    order by c.ordinal
  ), v_now);

  with settled as (
    update dispatch_partitions as p
    set
      due_at = case when next.eligible_at is not null then greatest(next.eligible_at, v_now, open.retry_at) end,
      blocked_until = open.retry_at,
      blocked_after_finish = open.retry_after_finish,
      blocked_reason = case when jobs = 0 then before.reason end,
      last_checked_at = v_now,
      last_admitted_at = case when jobs > 0 then v_now else p.last_admitted_at end,
      pending_count = p.pending_count - jobs,
      in_flight_count = p.in_flight_count + jobs,
      total_admitted = p.total_admitted + jobs,
      decayed_admits = case when jobs > 0
        then jobs + dispatch_decay(p.decayed_admits, extract(epoch from v_now - p.decayed_at)::double precision, p_policy.half_life)
        else p.decayed_admits end,
      decayed_at = case when jobs > 0 then v_now else p.decayed_at end,
      gate_state = after.gate_state
    from unnest(p_handoff.claims) as before
    join unnest(v_after) as after on after.ordinal = before.ordinal
    cross join lateral (
      select coalesce((v_handed ->> before.partition_id::text)::integer, 0) as jobs
    ) as handed
    cross join lateral (
      select
        case when jobs = 0 and before.reason is not null then before.retry_at else after.retry_at end as retry_at,
        case when jobs = 0 and before.reason is not null then before.retry_after_finish else after.retry_after_finish end as retry_after_finish
    ) as open
    cross join lateral (
      select min(s.eligible_at) as eligible_at
      from dispatch_staged_jobs as s
      where s.partition_id = before.partition_id
    ) as next
    where p.id = before.partition_id
    returning jobs, case when jobs = 0 then before.reason end as reason
  ), reasons as (
    select split_part(reason, ':', 1) as reason, count(*) as partitions
    from settled
    where reason is not null
    group by 1
  )
  select
    p_policy.policy_name,
    count(*),
    count(*) filter (where jobs > 0),
    count(*) filter (where reason is not null),
    coalesce(sum(jobs), 0),
    (select count(*) from unnest(p_outcomes) as o where o.error is not null),
    coalesce((select jsonb_object_agg(reasons.reason, reasons.partitions) from reasons), '{}'),
    extract(epoch from clock_timestamp() - p_handoff.started_at) * 1000
  into v_result
  from settled;

  if v_result.partitions_seen > 0 then
    insert into dispatch_tick_samples (at, policy_name, shard, partitions_seen, partitions_admitted, partitions_denied, jobs_admitted,
      handoff_failures, denied_reasons, duration_ms)
    values (v_now, v_result.policy_name, p_handoff.shard, v_result.partitions_seen, v_result.partitions_admitted,
      v_result.partitions_denied, v_result.jobs_admitted, v_result.handoff_failures, v_result.denied_reasons, v_result.duration_ms);
  end if;
  return v_result;
end;
$$;
comment on function dispatch_settle_outcomes(dispatch_policies, dispatch_handoffs, dispatch_outcome[]) is 'Writes down a tick whose hand-off has the given outcomes, and returns what it did.';

create or replace function dispatch_admit(p_policy text, p_shard text default null)
returns setof dispatch_payload
language plpgsql
set search_path from current
as $$
declare
  v_policy constant dispatch_policies := dispatch_policy(p_policy);
  v_handoff dispatch_handoffs := dispatch_decide(v_policy, p_shard);
  v_nothing dispatch_payload;
begin
  if not exists (select from dispatch_staged_jobs where id = any (v_handoff.staged_ids) and job_id is null) then
    v_nothing.tick := dispatch_settle_outcomes(v_policy, v_handoff, dispatch_release(v_handoff.staged_ids));
    return next v_nothing;
    return;
  end if;

  insert into dispatch_handoffs (policy_name, shard, decided_at, started_at, claims, staged_ids)
  values (v_handoff.policy_name, v_handoff.shard, v_handoff.decided_at, v_handoff.started_at, v_handoff.claims, v_handoff.staged_ids)
  returning id into v_handoff.id;

  return query
    select v_handoff.id, s.id, s.policy_name, s.partition_key, s.task_name, s.queue_name, s.priority, s.lock, s.queueing_lock,
      s.scheduled_at, s.args, s.attempts, null::dispatch_tick_result
    from unnest(v_handoff.staged_ids) with ordinality as picked (id, place)
    join dispatch_staged_jobs as s on s.id = picked.id
    where s.job_id is null
    order by picked.place;
end;
$$;
comment on function dispatch_admit(text, text) is 'One tick of a policy up to the hand-off, for a driver that hands off itself: returns the admitted jobs in hand-off order, which the driver must pass on and settle with dispatch_settle() in the same transaction; a commit without that is refused (PD008). Where there is nothing to hand off, and so nothing to settle, it returns one row, whose tick says what was done and whose other columns are null. Raises PD001 for an unknown policy.';

create or replace function dispatch_settle(p_handoff_id bigint, p_ids bigint[], p_job_ids bigint[], p_errors text[])
returns dispatch_tick_result
language plpgsql
set search_path from current
as $$
declare
  v_handoff dispatch_handoffs;
  v_parked bigint[];
begin
  delete from dispatch_handoffs where id = p_handoff_id returning * into v_handoff;
  if not found then
    perform dispatch_raise('PD008', format('hand-off %s is not open', p_handoff_id), null,
      'Call dispatch_settle() once for each dispatch_admit() that returned jobs, in the same transaction.');
  end if;

  v_parked := array(
    select picked.id
    from unnest(v_handoff.staged_ids) with ordinality as picked (id, place)
    join dispatch_staged_jobs as s on s.id = picked.id
    where s.job_id is not null
    order by place
  );
  if (select array_agg(id order by id) from unnest(p_ids) as id)
    is distinct from (select array_agg(id order by id) from unnest(v_handoff.staged_ids) as id where id <> all (v_parked)) then
    perform dispatch_raise('PD008', format('hand-off %s is settled for other jobs than were admitted', p_handoff_id), null,
      'p_ids must name every id that dispatch_admit() returned once.');
  end if;

  return dispatch_settle_outcomes(dispatch_policy(v_handoff.policy_name), v_handoff,
    array(select row(id, job_id, error)::dispatch_outcome from unnest(p_ids, p_job_ids, p_errors) as outcomes (id, job_id, error))
    || dispatch_release(v_parked));
end;
$$;
comment on function dispatch_settle(bigint, bigint[], bigint[], text[]) is 'Ends what dispatch_admit() began. The arrays are parallel: with a job id the job was handed off, with an error it goes to dispatch_dead_jobs, with neither its queueing lock is held and it waits its turn. Raises PD008 when the hand-off is not open or the ids are not exactly the admitted ones.';

create or replace function dispatch_refuse_open_handoff()
returns trigger
language plpgsql
set search_path from current
as $$
begin
  if exists (select from dispatch_handoffs where id = new.id) then
    perform dispatch_raise('PD008', format('hand-off %s of policy %L was not settled', new.id, new.policy_name), null,
      'Call dispatch_settle() in the transaction that called dispatch_admit(), or roll it back.');
  end if;
  return null;
end;
$$;
comment on function dispatch_refuse_open_handoff() is 'Trigger: refuses to commit a tick whose payloads were taken and not settled.';

do $$
begin
  if not exists (select from pg_trigger where tgname = 'dispatch_handoffs_settled' and tgrelid = 'dispatch_handoffs'::regclass) then
    create constraint trigger dispatch_handoffs_settled
      after insert on dispatch_handoffs
      deferrable initially deferred
      for each row execute function dispatch_refuse_open_handoff();
  end if;
end;
$$;
