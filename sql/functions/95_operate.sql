-- The operator's hand: pause and resume, force, drain, and what to do with dead jobs.

create or replace function dispatch_pause(p_policy text, p_partition_key text default null)
returns void
language plpgsql
set search_path from current
as $$
begin
  perform dispatch_policy(p_policy);
  insert into dispatch_pauses (id, policy_name, partition_key, paused_at)
  values (dispatch_partition_id(p_policy, p_partition_key), p_policy, p_partition_key, dispatch_now())
  on conflict on constraint dispatch_pauses_pkey do nothing;
end;
$$;
comment on function dispatch_pause(text, text) is 'Holds a policy, or one partition (also one not seen yet), until dispatch_resume(). What is handed off already runs on. Raises PD001 for an unknown policy.';

create or replace function dispatch_resume(p_policy text, p_partition_key text default null)
returns void
language plpgsql
set search_path from current
as $$
begin
  perform dispatch_policy(p_policy);
  delete from dispatch_pauses where id = dispatch_partition_id(p_policy, p_partition_key);
  if p_partition_key is not null then
    insert into dispatch_inbox (policy_name, partition_id, kind)
    values (p_policy, dispatch_partition_id(p_policy, p_partition_key), 'resumed');
  end if;
  perform dispatch_wake(p_policy);
end;
$$;
comment on function dispatch_resume(text, text) is 'Lifts a pause. Of a partition that is not paused, the next tick asks the gates anew: use it after a change to what a limit function reads. Raises PD001 for an unknown policy.';

create or replace function dispatch_force(p_policy dispatch_policies, p_partition_id uuid, p_limit integer)
returns integer
language plpgsql
set search_path from current
as $$
declare
  v_partition dispatch_partitions;
  v_handoff dispatch_handoffs;
begin
  select * into v_partition from dispatch_partitions where id = p_partition_id for update;
  if not found then
    return 0;
  end if;
  v_handoff.policy_name := p_policy.policy_name;
  v_handoff.started_at := clock_timestamp();
  v_handoff.decided_at := dispatch_now();

  -- The gates are asked, so that their state is as of now when it pays; their answer does not count, and they are asked
  -- again afterwards (retry_at).
  v_handoff.claims := array(
    select row(c.ordinal, c.partition_id, c.partition_key, c.context, c.params, c.gate_state, c.in_flight, p_limit,
      v_handoff.decided_at, null, null)::dispatch_claim
    from unnest(dispatch_pass_gates(p_policy.gates,
      dispatch_resolve(p_policy, array[dispatch_new_claim(p_policy, v_partition, 1)], v_handoff.decided_at), v_handoff.decided_at)) as c
  );
  select ids, places, ordinals, contested
  into v_handoff.staged_ids, v_handoff.places, v_handoff.ordinals, v_handoff.contested_ids
  from dispatch_pick(v_handoff.claims, v_handoff.decided_at);
  return (dispatch_settle_outcomes(p_policy, v_handoff, dispatch_hand_off(p_policy, v_handoff))).jobs_admitted;
end;
$$;
comment on function dispatch_force(dispatch_policies, uuid, integer) is 'Admits up to p_limit ready jobs of one partition past its gates. They count in flight and are paid for in tokens, so the gates make up for them later.';

create or replace function dispatch_force_admit(p_policy text, p_partition_key text, p_limit integer)
returns integer
language plpgsql
set search_path from current
as $$
declare
  v_policy constant dispatch_policies := dispatch_policy(p_policy);
begin
  perform dispatch_check_argument('p_limit', p_limit, 1, 10000, 'Call again for more.');
  perform dispatch_await_queue();
  perform dispatch_operate_alone(p_policy);
  perform dispatch_fold(p_policy, dispatch_now());
  return dispatch_force(v_policy, dispatch_partition_id(p_policy, p_partition_key), p_limit);
end;
$$;
comment on function dispatch_force_admit(text, text, integer) is 'Hands up to p_limit (1 to 10000) waiting jobs of a partition over past its gates and pauses, those only that are due, and returns how many. They count in flight and are paid for in tokens. Raises PD001 for an unknown policy, PD009 for a limit out of range.';

create or replace function dispatch_drain(p_policy text, p_partition_key text default null, p_limit integer default 10000)
returns dispatch_drain_result
language plpgsql
set search_path from current
as $$
declare
  v_policy constant dispatch_policies := dispatch_policy(p_policy);
  v_only constant uuid := case when p_partition_key is not null then dispatch_partition_id(p_policy, p_partition_key) end;
  v_now timestamptz;
  v_partition_id uuid;
  v_result dispatch_drain_result;
begin
  perform dispatch_check_argument('p_limit', p_limit, 1, 100000, 'Call again for more.');
  perform dispatch_await_queue();
  perform dispatch_operate_alone(p_policy);
  perform dispatch_fold(p_policy, dispatch_now());
  v_now := dispatch_now();
  v_result.admitted := 0;
  for v_partition_id in
    select p.id
    from dispatch_partitions as p
    where p.policy_name = p_policy
      and p.due_at is not null
      and (v_only is null or p.id = v_only)
      and exists (select from dispatch_staged_jobs as s where s.partition_id = p.id and s.eligible_at <= v_now)
    order by p.id
  loop
    exit when v_result.admitted >= p_limit;
    v_result.admitted := v_result.admitted + dispatch_force(v_policy, v_partition_id, p_limit - v_result.admitted);
  end loop;

  v_now := dispatch_now();
  select
    count(*) filter (where s.eligible_at <= v_now),
    count(*) filter (where s.eligible_at > v_now),
    min(s.eligible_at) filter (where s.eligible_at > v_now)
  into v_result.ready, v_result.later, v_result.next_at
  from dispatch_partitions as p
  join dispatch_staged_jobs as s on s.partition_id = p.id
  where p.policy_name = p_policy
    and (v_only is null or p.id = v_only);

  v_result.why := concat_ws('; ',
    case when v_result.ready > 0 and v_result.admitted >= p_limit then format('%s are over the limit of %s: call again', v_result.ready, p_limit) end,
    case when v_result.ready > 0 and v_result.admitted < p_limit then format('%s came in or were held by others meanwhile: call again', v_result.ready) end,
    case when v_result.later > 0 then format('%s are scheduled or wait for a queueing lock, the next at %s', v_result.later, v_result.next_at) end);
  return v_result;
end;
$$;
comment on function dispatch_drain(text, text, integer) is 'Hands everything that is due in a policy, or in one of its partitions, over past the gates, up to p_limit (1 to 100000), and says what is left and why. Raises PD001 for an unknown policy, PD009 for a limit out of range.';

create or replace function dispatch_requeue_dead(p_id bigint)
returns void
language plpgsql
set search_path from current
as $$
declare
  v_now constant timestamptz := dispatch_now();
  v_dead dispatch_dead_jobs;
begin
  delete from dispatch_dead_jobs where id = p_id returning * into v_dead;
  if not found then
    perform dispatch_raise('PD006', format('no dead job %s', coalesce(p_id::text, 'null')), null, 'See dispatch_dead_jobs for those that are.');
  end if;
  insert into dispatch_staged_jobs (id, partition_id, eligible_at, staged_at, scheduled_at, parked, priority, attempts, policy_name,
    partition_key, task_name, queue_name, lock, queueing_lock, args, context)
  values (v_dead.id, v_dead.partition_id, coalesce(v_dead.scheduled_at, '-infinity'), v_dead.staged_at, v_dead.scheduled_at, v_dead.parked,
    v_dead.priority, v_dead.attempts, v_dead.policy_name, v_dead.partition_key, v_dead.task_name, v_dead.queue_name, v_dead.lock,
    v_dead.queueing_lock, v_dead.args, v_dead.context)
  on conflict (queueing_lock) where queueing_lock is not null and not parked do nothing;
  if not found then
    perform dispatch_raise('PD004', format('already enqueued: a job with the queueing lock %L waits', left(v_dead.queueing_lock, 200)),
      'Nothing was changed.', 'Requeue the dead job when that one has started, or discard it.');
  end if;
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs, due_at, newest_id, partition_key, shard, context)
  select v_dead.policy_name, v_dead.partition_id, 'staged', 1, greatest(v_dead.scheduled_at, v_now), 0, v_dead.partition_key,
    dispatch_shard(policy.shard_by, v_dead.context), v_dead.context
  from dispatch_policy(v_dead.policy_name) as policy;
  perform dispatch_wake(v_dead.policy_name);
end;
$$;
comment on function dispatch_requeue_dead(bigint) is 'Stages a dead job again, under its id. Raises PD006 when no such job is dead, PD001 when its policy is gone, PD004 when another job has its queueing lock.';

create or replace function dispatch_discard_dead(p_id bigint)
returns void
language plpgsql
set search_path from current
as $$
declare
  v_dead dispatch_dead_jobs;
begin
  delete from dispatch_dead_jobs where id = p_id returning * into v_dead;
  if not found then
    perform dispatch_raise('PD006', format('no dead job %s', coalesce(p_id::text, 'null')), null, 'See dispatch_dead_jobs for those that are.');
  end if;
  if v_dead.parked then
    perform procrastinate_cancel_job_v1(p_id, false, false);
    perform dispatch_unpark(p_id, v_dead.scheduled_at, v_dead.priority, v_dead.lock, v_dead.queueing_lock);
  end if;
  insert into dispatch_admissions as a (job_id, partition_id, staged_at, admitted_at, policy_name, partition_key, context, ending)
  values (p_id, v_dead.partition_id, v_dead.staged_at, dispatch_now(), v_dead.policy_name, v_dead.partition_key, v_dead.context, 'cancelled')
  on conflict on constraint dispatch_admissions_pkey do update set (admitted_at, ending) = (excluded.admitted_at, excluded.ending);
end;
$$;
comment on function dispatch_discard_dead(bigint) is 'Removes a dead job for good; it then counts as cancelled. Raises PD006 when no such job is dead.';

create or replace function dispatch_retry_job(p_id bigint, p_retry_at timestamptz, p_priority integer, p_queue_name text, p_lock text)
returns void
language plpgsql
set search_path from current
as $$
begin
  if not exists (select from dispatch_dead_jobs where id = p_id) then
    perform procrastinate_retry_job_v2(p_id, p_retry_at, p_priority, p_queue_name, p_lock);
    return;
  end if;
  update dispatch_dead_jobs set scheduled_at = p_retry_at where id = p_id;
  perform dispatch_requeue_dead(p_id);
  update dispatch_staged_jobs as s
  set (scheduled_at, eligible_at, priority, queue_name, lock)
    = (p_retry_at, coalesce(p_retry_at, '-infinity'), coalesce(p_priority, s.priority), coalesce(p_queue_name, s.queue_name), coalesce(p_lock, s.lock))
  where s.id = p_id;
end;
$$;
comment on function dispatch_retry_job(bigint, timestamptz, integer, text, text) is 'What procrastinate''s retry does, for any job: a dead one is staged again, any other is procrastinate''s to retry, or to refuse. Errors as procrastinate_retry_job_v2() and dispatch_requeue_dead().';
