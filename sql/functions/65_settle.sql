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
    insert into dispatch_dead_jobs (id, partition_id, staged_at, died_at, scheduled_at, parked, priority, attempts, policy_name,
      partition_key, task_name, queue_name, lock, queueing_lock, args, context, error)
    select id, partition_id, staged_at, p_now, scheduled_at, parked, priority, attempts, policy_name,
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

create or replace function dispatch_write_outcomes(p_outcomes dispatch_outcome[], p_now timestamptz)
returns void
language plpgsql
set search_path from current
as $$
begin
  perform dispatch_bury(
    array(select o.id from unnest(p_outcomes) as o where o.kind = 'failed' order by o.id),
    array(select o.error from unnest(p_outcomes) as o where o.kind = 'failed' order by o.id),
    p_now);
  update dispatch_staged_jobs as s
  set eligible_at = p_now + dispatch_setting_span('queueing_lock_backoff')
  where s.id = any (array(select o.id from unnest(p_outcomes) as o where o.kind = 'held'));
end;
$$;
comment on function dispatch_write_outcomes(dispatch_outcome[], timestamptz) is 'Of jobs that were not handed off, the bad ones go to dispatch_dead_jobs; those whose queueing lock or row somebody holds wait a while.';

-- The claims after the hand-off. They pay for what went. Where that was less than the gates had allowed, there is room for
-- one more: a job that goes makes no gate allow more than one less. (But for an adaptive gate, which lets an idle partition
-- begin above its cap.) All others are asked once more: the answer is when to look again.
create or replace function dispatch_claims_after(p_policy dispatch_policies, p_claims dispatch_claim[], p_jobs integer[], p_now timestamptz)
returns dispatch_claim[]
language plpgsql
stable
set search_path from current
as $$
declare
  v_buckets constant text[] := array(select gate ->> 'name' from jsonb_array_elements(p_policy.gates) as gate where gate ->> 'type' = 'throttle');
  v_adaptive constant boolean := dispatch_adapts(p_policy.gates);
  v_claim dispatch_claim;
  v_jobs integer;
  v_room boolean;
  v_again dispatch_claim[] := '{}';
begin
  foreach v_claim in array p_claims loop
    v_jobs := p_jobs[v_claim.ordinal];
    continue when v_jobs = 0 and v_claim.reason is not null;
    v_room := v_claim.retry_at is null and v_jobs < v_claim.allowed and not (v_adaptive and v_claim.in_flight = 0);
    continue when v_room and v_jobs = 0;
    v_claim.gate_state := dispatch_spend(v_claim.gate_state, v_buckets, v_jobs);
    if v_room then
      p_claims[v_claim.ordinal] := v_claim;
    else
      v_claim.in_flight := v_claim.in_flight + v_jobs;
      v_claim.allowed := p_policy.admission_batch_size;
      v_claim.retry_at := null;
      v_claim.retry_after_finish := null;
      v_claim.reason := null;
      v_again := v_again || v_claim;
    end if;
  end loop;

  if v_again <> '{}' then
    foreach v_claim in array dispatch_pass_gates(p_policy.gates, v_again, p_now) loop
      p_claims[v_claim.ordinal] := v_claim;
    end loop;
  end if;
  return p_claims;
end;
$$;
comment on function dispatch_claims_after(dispatch_policies, dispatch_claim[], integer[], timestamptz) is 'The claims once p_jobs (by ordinal) were handed off. A claim with a retry_at is asked again however much it was allowed.';

create or replace function dispatch_write_partitions(p_policy dispatch_policies, p_claims dispatch_claim[], p_jobs integer[], p_next timestamptz[], p_now timestamptz)
returns void
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
begin
  update dispatch_partitions as p
  set
    due_at = case
      when claim.reason = 'queue_full' and claim.retry_at is null then p.due_at
      when claim.next_at is not null then greatest(claim.next_at, p_now, claim.retry_at)
    end,
    blocked_until = claim.retry_at,
    blocked_after_finish = claim.retry_after_finish,
    blocked_reason = claim.reason,
    last_checked_at = p_now,
    last_admitted_at = case when claim.jobs > 0 then p_now else p.last_admitted_at end,
    pending_count = p.pending_count - claim.jobs,
    waiting_since = case
      when p.pending_count <= claim.jobs then null
      when claim.jobs > 0 or p.waiting_since is null or claim.next_at > p_now then greatest(claim.next_at, p_now)
      else p.waiting_since
    end,
    in_flight_count = p.in_flight_count + claim.jobs,
    total_admitted = p.total_admitted + claim.jobs,
    decayed_admits = case
      when claim.jobs > 0 then
        claim.jobs + dispatch_decay(p.decayed_admits, extract(epoch from p_now - p.decayed_at)::double precision, p_policy.half_life)
      else p.decayed_admits
    end,
    decayed_at = case when claim.jobs > 0 then p_now else p.decayed_at end,
    gate_state = claim.gate_state
  from unnest(p_claims, p_jobs, p_next) as claim (ordinal, partition_id, partition_key, context, params, gate_state,
    in_flight, allowed, retry_at, retry_after_finish, reason, jobs, next_at)
  cross join lateral (
    select ctid as place from dispatch_partitions where id = claim.partition_id limit 1
  ) as held
  where p.ctid = held.place;
end;
$$;
comment on function dispatch_write_partitions(dispatch_policies, dispatch_claim[], integer[], timestamptz[], timestamptz) is 'Writes the claimed partitions, each once: counters, gate state, and when to look again.';

create or replace function dispatch_next_eligible(p_claims dispatch_claim[], p_jobs integer[], p_ordinals integer[], p_now timestamptz)
returns timestamptz[]
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
begin
  return array(
    select case
      -- Allowed and not taken: another transaction has cancelled them and is still open. At once would be again and again.
      when next.eligible_at <= p_now and p_jobs[c.ordinal] = 0 and c.reason is null and c.ordinal <> all (p_ordinals) then
        p_now + interval '100 milliseconds'
      else next.eligible_at
    end
    from unnest(p_claims) as c
    left join lateral (
      select s.eligible_at from dispatch_staged_jobs as s where s.partition_id = c.partition_id order by s.eligible_at limit 1
    ) as next on true
    order by c.ordinal
  );
end;
$$;
comment on function dispatch_next_eligible(dispatch_claim[], integer[], integer[], timestamptz) is 'When the next waiting job of each claim may go, once p_jobs (by ordinal) were handed off of those picked (p_ordinals), -infinity: at once; null where none waits. Where others hold all that may go, a tenth of a second from now.';

create or replace function dispatch_settle_outcomes(p_policy dispatch_policies, p_handoff dispatch_handoffs, p_outcomes dispatch_outcome[])
returns dispatch_tick_result
language plpgsql
set search_path from current
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now constant timestamptz := p_handoff.decided_at;
  v_not_handed constant bigint[] := array(select o.id from unnest(p_outcomes) as o);
  v_jobs integer[] := '{}';
  v_reasons text[];
  v_next timestamptz[];
  v_result dispatch_tick_result;
begin
  if p_handoff.claims <> '{}' then
    v_jobs := array(
      select count(id)::integer
      from (
        select ordinal, id
        from unnest(p_handoff.ordinals, p_handoff.staged_ids) as picked (ordinal, id)
        where id <> all (v_not_handed)
        union all
        select ordinal, null
        from generate_series(1, cardinality(p_handoff.claims)) as ordinal
      ) as handed
      group by ordinal
      order by ordinal
    );
  end if;
  if p_outcomes <> '{}' then
    perform dispatch_write_outcomes(p_outcomes, v_now);
  end if;
  if p_handoff.claims <> '{}' then
    v_next := dispatch_next_eligible(p_handoff.claims, v_jobs, p_handoff.ordinals, v_now);
    v_reasons := array(
      select case when v_jobs[c.ordinal] = 0 then c.reason end
      from unnest(p_handoff.claims) as c
      order by c.ordinal
    );
    perform dispatch_write_partitions(p_policy, dispatch_claims_after(p_policy, p_handoff.claims, v_jobs, v_now),
      v_jobs, v_next, v_now);
  end if;

  select
    p_policy.policy_name,
    count(*),
    count(*) filter (where jobs > 0),
    count(*) filter (where reason is not null),
    coalesce(sum(jobs), 0),
    (select count(*) from unnest(p_outcomes) as o where o.kind = 'failed'),
    coalesce((
      select jsonb_object_agg(kind, partitions)
      from (
        select split_part(reason, ':', 1) as kind, count(*) as partitions
        from unnest(v_reasons) as reason
        where reason is not null
        group by 1
      ) as kinds
    ), '{}'),
    extract(epoch from clock_timestamp() - p_handoff.started_at) * 1000
  into v_result
  from unnest(v_jobs, v_reasons) as settled (jobs, reason);

  if v_result.partitions_seen > 0 then
    insert into dispatch_tick_samples (at, policy_name, shard, partitions_seen, partitions_admitted, partitions_denied, jobs_admitted,
      handoff_failures, denied_reasons, duration_ms)
    values (v_now, v_result.policy_name, p_handoff.shard, v_result.partitions_seen, v_result.partitions_admitted,
      v_result.partitions_denied, v_result.jobs_admitted, v_result.handoff_failures, v_result.denied_reasons, v_result.duration_ms);
  end if;
  return v_result;
end;
$$;
comment on function dispatch_settle_outcomes(dispatch_policies, dispatch_handoffs, dispatch_outcome[]) is 'Writes down a tick whose jobs were handed off, all but those of the outcomes, and returns what it did.';

create or replace function dispatch_payloads(p_handoff dispatch_handoffs)
returns setof dispatch_payload
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
  return query
    select p_handoff.id, s.id, s.policy_name, s.partition_key, s.task_name, s.queue_name, s.priority, s.lock, s.queueing_lock,
      s.scheduled_at, s.args, s.attempts, null::dispatch_tick_result
    from unnest(p_handoff.staged_ids) with ordinality as picked (id, place)
    cross join lateral (
      select * from dispatch_staged_jobs as s where s.id = picked.id limit 1
    ) as s
    where not s.parked
    order by picked.place;
end;
$$;
comment on function dispatch_payloads(dispatch_handoffs) is 'The jobs of a hand-off that a driver has to pass on, in hand-off order: all but the parked retries.';

create or replace function dispatch_admit(p_policy text, p_shard text default null)
returns setof dispatch_payload
language plpgsql
set search_path from current
as $$
declare
  v_policy constant dispatch_policies := dispatch_policy(p_policy);
  v_handoff dispatch_handoffs;
  v_nothing dispatch_payload;
begin
  perform dispatch_await_queue();
  v_handoff := dispatch_decide(v_policy, p_shard);
  if v_handoff.staged_ids = '{}' then
    v_nothing.tick := dispatch_settle_outcomes(v_policy, v_handoff, '{}');
    return next v_nothing;
    return;
  end if;
  insert into dispatch_handoffs (policy_name, shard, decided_at, started_at, claims, staged_ids, places, ordinals, contested_ids)
  values (v_handoff.policy_name, v_handoff.shard, v_handoff.decided_at, v_handoff.started_at, v_handoff.claims, v_handoff.staged_ids,
    v_handoff.places, v_handoff.ordinals, v_handoff.contested_ids)
  returning id into v_handoff.id;
  return query select * from dispatch_payloads(v_handoff);
  -- Retries only: procrastinate knows them.
  if not found then
    v_nothing.tick := dispatch_settle(v_handoff.id);
    return next v_nothing;
  end if;
end;
$$;
comment on function dispatch_admit(text, text) is 'One tick of a policy up to the hand-off, for a driver that looks at the jobs first: returns those admitted that procrastinate does not know yet. The driver must settle with dispatch_settle() in the same transaction; a commit without that is refused (PD008). Where there is no such job, and so nothing to settle, it returns one row, whose tick says what was done and whose other columns are null. Raises PD001 for an unknown policy.';

create or replace function dispatch_settle(p_handoff_id bigint, p_ids bigint[] default '{}', p_errors text[] default '{}')
returns dispatch_tick_result
language plpgsql
set search_path from current
as $$
declare
  v_handoff dispatch_handoffs;
  v_policy dispatch_policies;
  v_turned_back constant dispatch_outcome[] := array(
    select row(id, coalesce(error, 'turned back'), 'failed')::dispatch_outcome from unnest(p_ids, p_errors) as refused (id, error)
  );
begin
  delete from dispatch_handoffs where id = p_handoff_id returning * into v_handoff;
  if not found then
    perform dispatch_raise('PD008', format('hand-off %s is not open', p_handoff_id), null,
      'Call dispatch_settle() once for each dispatch_admit() that returned jobs, in the same transaction.');
  end if;
  if cardinality(p_ids) <> (select count(*) from (select unnest(p_ids) intersect select unnest(v_handoff.staged_ids)) as admitted)
    or cardinality(p_errors) > cardinality(p_ids) then
    perform dispatch_raise('PD008', format('hand-off %s is settled for other jobs than were admitted', p_handoff_id), null,
      'p_ids names those that dispatch_admit() returned and that are turned back.');
  end if;
  v_policy := dispatch_policy(v_handoff.policy_name);
  return dispatch_settle_outcomes(v_policy, v_handoff, v_turned_back || dispatch_hand_off(v_policy, v_handoff, p_ids));
end;
$$;
comment on function dispatch_settle(bigint, bigint[], text[]) is 'Ends what dispatch_admit() began: hands the admitted jobs over to procrastinate, all but p_ids, which the driver turns back: those go to dispatch_dead_jobs, each with its error of p_errors (a parallel array). Raises PD008 when the hand-off is not open, or an id is none of the admitted.';

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
