-- Why does this job not run? What holds it, with the numbers and in words, and about when it is its turn.
-- Invariant: the first row says what the next tick does, for it follows from the functions of 91_foresee.sql; nothing is
-- written or locked.

create or replace function dispatch_explain_pauses(p_job dispatch_staged_jobs)
returns setof dispatch_explanation
language plpgsql
stable
set search_path from current
as $$
begin
  return query
    select 'pause', null, null, true, 'paused', '{}'::jsonb, q.paused_at, null::timestamptz,
      format('%s %L is paused since %s. dispatch_resume() lets it go on.', case when q.partition_key is null then 'Policy' else 'Partition' end,
        left(coalesce(q.partition_key, q.policy_name), 200), dispatch_say_time(q.paused_at))
    from dispatch_pauses as q
    where q.id in (dispatch_partition_id(p_job.policy_name, null), p_job.partition_id)
    order by q.partition_key nulls first;
end;
$$;
comment on function dispatch_explain_pauses(dispatch_staged_jobs) is 'A row for each pause of a job''s policy and partition.';

create or replace function dispatch_explain_schedule(p_job dispatch_staged_jobs, p_now timestamptz)
returns setof dispatch_explanation
language plpgsql
stable
as $$
begin
  return query
    select 'schedule', null, null, true, kind.reason,
      jsonb_build_object('eligible_at', p_job.eligible_at, 'scheduled_at', p_job.scheduled_at, 'attempts', p_job.attempts),
      p_job.staged_at, p_job.eligible_at,
      format(kind.message, dispatch_say_time(p_job.eligible_at))
    from (
      select
        case
          when p_job.eligible_at is distinct from p_job.scheduled_at then 'queueing_lock_held'
          when p_job.parked then 'retry'
          else 'scheduled'
        end,
        case
          when p_job.eligible_at is distinct from p_job.scheduled_at then 'Its queueing lock was held when it was to go; it is tried again at %s.'
          when p_job.parked then 'It is to be retried, not before %s.'
          else 'It is scheduled for %s.'
        end
    ) as kind (reason, message)
    where p_job.eligible_at > p_now;
end;
$$;
comment on function dispatch_explain_schedule(dispatch_staged_jobs, timestamptz) is 'The row for a time that a job waits for, if it does: its schedule, a retry''s, or the next try after its queueing lock was held.';

-- Where a retry and a new job have the same queueing lock, the new one goes first.
create or replace function dispatch_rival_goes(p_job dispatch_staged_jobs, p_now timestamptz)
returns boolean
language plpgsql
stable
set search_path from current
as $$
begin
  return p_job.parked and exists (
    select
    from dispatch_staged_jobs as rival
    cross join lateral (
      select blocks from dispatch_explain_staged(rival, p_now) limit 1
    ) as explained
    where rival.queueing_lock = p_job.queueing_lock
      and not rival.parked
      and rival.policy_name = p_job.policy_name
      and not explained.blocks
  );
end;
$$;
comment on function dispatch_rival_goes(dispatch_staged_jobs, timestamptz) is 'Whether the next tick admits a new job with the queueing lock of a retry.';

create or replace function dispatch_explain_locks(p_job dispatch_staged_jobs, p_now timestamptz)
returns setof dispatch_explanation
language plpgsql
stable
as $$
declare
  v_holders record;
  v_rival boolean;
begin
  select * into v_holders from dispatch_lock_holders(p_job.lock, p_job.queueing_lock);
  v_rival := v_holders.queued_id is null and dispatch_rival_goes(p_job, p_now);
  if v_holders.queued_id is not null or v_rival then
    return query
      select 'queueing_lock', null, null, true, 'queueing_lock_held',
        jsonb_build_object('queueing_lock', p_job.queueing_lock, 'job_id', v_holders.queued_id), null::timestamptz, null::timestamptz,
        case
          when v_rival then format('A new job with its queueing lock %L goes first.', left(p_job.queueing_lock, 200))
          else format('Its queueing lock %L is held by job %s, which is queued; it can go once that has started.',
            left(p_job.queueing_lock, 200), v_holders.queued_id)
        end;
  end if;
  if v_holders.running_id is not null then
    return query
      select 'lock', null, null, false, 'lock_held', jsonb_build_object('lock', p_job.lock, 'job_id', v_holders.running_id),
        null::timestamptz, null::timestamptz,
        format('Job %s runs under its lock %L: it can be admitted, but workers leave it in the queue meanwhile.',
          v_holders.running_id, left(p_job.lock, 200));
  end if;
end;
$$;
comment on function dispatch_explain_locks(dispatch_staged_jobs, timestamptz) is 'A row for each lock of a job that another one has: the queueing lock holds it, the lock does not.';

create or replace function dispatch_explain_throttle(p_row dispatch_explanation, p_passed dispatch_claim, p_place integer, p_now timestamptz)
returns dispatch_explanation
language plpgsql
stable
as $$
declare
  v_rate constant numeric := (p_passed).params ->> (p_row.gate_name || '.rate');
  v_per constant numeric := (p_passed).params ->> (p_row.gate_name || '.per');
  v_burst constant jsonb := (p_passed).params -> (p_row.gate_name || '.burst');
  v_capacity constant numeric := dispatch_capacity(v_rate, (v_burst #>> '{}')::numeric);
  v_tokens constant numeric := (p_passed).gate_state -> p_row.gate_name ->> 'tokens';
  v_bucket constant text[] := array[p_row.gate_name];
  v_next_at timestamptz;
begin
  if p_passed.reason is distinct from 'rate_zero' then
    if v_tokens < v_capacity then
      v_next_at := dispatch_nth_token(p_passed, v_bucket, least(greatest(dispatch_whole_tokens(v_tokens), 0), 2000000000)::integer + 1, p_now);
    end if;
    p_row.estimated_at := dispatch_nth_token(p_passed, v_bucket, p_place, p_now);
  end if;
  p_row.numbers := p_row.numbers || jsonb_build_object('tokens', trim_scale(round(v_tokens, 6)), 'rate', v_rate, 'per', v_per,
    'burst', v_burst, 'capacity', v_capacity, 'next_token_at', v_next_at);
  p_row.message := case
    when p_passed.reason = 'rate_zero' then format('Shut: its rate is %s.', coalesce(trim_scale(v_rate)::text, 'not known'))
    else format('%s of %s tokens are there, %s come in %s s%s.', trim_scale(round(v_tokens, 3)), trim_scale(v_capacity), trim_scale(v_rate),
      trim_scale(v_per), ', the next at ' || dispatch_say_time(v_next_at))
  end;
  return p_row;
end;
$$;
comment on function dispatch_explain_throttle(dispatch_explanation, dispatch_claim, integer, timestamptz) is 'A throttle''s row with its tokens, and when the job at a place finds one.';

create or replace function dispatch_explain_concurrency(p_row dispatch_explanation, p_passed dispatch_claim)
returns dispatch_explanation
language plpgsql
stable
as $$
declare
  v_max constant numeric := (p_passed).params ->> (p_row.gate_name || '.max');
begin
  p_row.numbers := p_row.numbers || jsonb_build_object('in_flight', p_passed.in_flight, 'max', v_max);
  p_row.message := case
    when p_passed.reason = 'max_zero' then format('Shut: its max is %s.', coalesce(trim_scale(v_max)::text, 'not known'))
    else format('%s in flight of at most %s.', p_passed.in_flight, trim_scale(floor(v_max)))
  end;
  return p_row;
end;
$$;
comment on function dispatch_explain_concurrency(dispatch_explanation, dispatch_claim) is 'A concurrency gate''s row with its slots.';

create or replace function dispatch_explain_adaptive_concurrency(p_row dispatch_explanation, p_passed dispatch_claim, p_policy text, p_now timestamptz)
returns dispatch_explanation
language plpgsql
stable
as $$
declare
  v_seen record;
  v_knobs record;
  v_stats dispatch_adaptive_stats;
  v_max integer;
begin
  select * into v_seen from dispatch_observations(p_policy, p_passed.partition_id);
  v_stats := dispatch_as_learned(p_passed, p_row.gate_name, v_seen.observations, p_now);
  select * into v_knobs from dispatch_aimd_params((p_passed).params, p_row.gate_name);
  v_max := dispatch_adaptive_cap(v_stats.current_max, p_passed.in_flight, v_knobs.initial_max, v_knobs.floor_max, v_knobs.top_max);
  p_row.numbers := p_row.numbers || jsonb_build_object('in_flight', p_passed.in_flight, 'max', v_max, 'current_max', v_stats.current_max,
    'initial_max', v_knobs.initial_max, 'lowest_max', v_knobs.floor_max, 'highest_max', v_knobs.top_max,
    'ewma_lag_ms', v_stats.ewma_lag_ms, 'target_lag_ms', v_knobs.target_lag_ms, 'samples', v_stats.sample_count);
  p_row.message := format('%s in flight of at most %s now; jobs wait %s ms for a worker, aimed at are %s ms (%s observed).',
    p_passed.in_flight, v_max, round(v_stats.ewma_lag_ms::numeric, 1), v_knobs.target_lag_ms, v_stats.sample_count);
  return p_row;
end;
$$;
comment on function dispatch_explain_adaptive_concurrency(dispatch_explanation, dispatch_claim, text, timestamptz) is 'An adaptive gate''s row with its slots and what it has learned, notes that are not folded included.';

create or replace function dispatch_explain_gate(
  p_policy text, p_gate jsonb, p_claim dispatch_claim, p_place integer, p_rate double precision, p_now timestamptz
)
returns dispatch_explanation
language plpgsql
stable
set search_path from current
as $$
declare
  v_passed dispatch_claim;
  v_row dispatch_explanation;
begin
  v_row.item := 'gate';
  v_row.gate_name := p_gate ->> 'name';
  v_row.gate_type := p_gate ->> 'type';
  if (p_claim).reason is not null then
    v_row.blocks := true;
    v_row.reason := split_part((p_claim).reason, ':', 1);
    v_row.numbers := '{}';
    v_row.message := 'Not asked: ' || rtrim((p_claim).reason, '. ') || '.';
    return v_row;
  end if;

  v_passed := (dispatch_foresee_gate(p_policy, p_gate, array[p_claim], p_now))[1];
  v_row.blocks := v_passed.allowed < p_place;
  v_row.reason := case when v_row.blocks then coalesce(v_passed.reason, 'behind_others') end;
  v_row.numbers := jsonb_build_object('allowed', v_passed.allowed);
  if v_row.gate_type <> 'throttle' and v_passed.reason is distinct from 'max_zero' then
    v_row.estimated_at := dispatch_foresee_slot(p_place, v_passed.allowed, p_rate, p_now);
  end if;
  v_row := case v_row.gate_type
    when 'throttle' then dispatch_explain_throttle(v_row, v_passed, p_place, p_now)
    when 'concurrency' then dispatch_explain_concurrency(v_row, v_passed)
    when 'adaptive_concurrency' then dispatch_explain_adaptive_concurrency(v_row, v_passed, p_policy, p_now)
  end;
  if v_row.reason = 'behind_others' then
    v_row.message := v_row.message || format(' It lets %s pass now, and %s go first.', v_passed.allowed, p_place - 1);
  end if;
  return v_row;
end;
$$;
comment on function dispatch_explain_gate(text, jsonb, dispatch_claim, integer, double precision, timestamptz) is 'One gate''s part in whether the job at a place of its partition may go. p_rate: jobs a second that the partition was admitted lately, or null.';

create or replace function dispatch_explain_gates(
  p_policy dispatch_policies, p_claim dispatch_claim, p_place integer, p_rate double precision, p_now timestamptz
)
returns setof dispatch_explanation
language plpgsql
stable
as $$
declare
  v_gate jsonb;
begin
  for v_gate in select jsonb_array_elements(p_policy.gates) loop
    return next dispatch_explain_gate(p_policy.policy_name, v_gate, p_claim, p_place, p_rate, p_now);
  end loop;
end;
$$;
comment on function dispatch_explain_gates(dispatch_policies, dispatch_claim, integer, double precision, timestamptz) is 'A row for each gate of a policy, in their order.';

create or replace function dispatch_explain_budget(p_policy dispatch_policies, p_partition_id uuid, p_place integer, p_allowed integer, p_now timestamptz)
returns setof dispatch_explanation
language plpgsql
stable
set search_path from current
as $$
declare
  v_budget constant record := dispatch_budget(p_policy, p_now);
  v_share integer;
  v_queued integer;
  v_row dispatch_explanation;
begin
  -- Shared evenly among as many as a tick claims, it is enough for the job in any case.
  if v_budget.jobs is null or (not v_budget.scarce and p_place <= v_budget.jobs / p_policy.partition_batch_size) then
    return;
  end if;
  v_share := dispatch_foresee_budget(p_policy, p_partition_id, p_now);
  if not v_budget.scarce and coalesce(v_share >= least(p_place, p_allowed), true) then
    return;
  end if;
  v_queued := dispatch_queued(p_policy, p_now);
  v_row.item := case v_budget.reason when 'queue_full' then 'queue' else 'budget' end;
  v_row.blocks := v_share is not null and v_share < least(p_place, p_allowed);
  v_row.reason := case when v_row.blocks then v_budget.reason end;
  v_row.numbers := case v_budget.reason
    when 'queue_full' then
      jsonb_build_object('max_queued', p_policy.max_queued, 'queued', v_queued, 'allowed', v_share)
    else jsonb_build_object('tick_admission_budget', p_policy.tick_admission_budget, 'allowed', v_share)
  end;
  v_row.message := case v_budget.reason
    when 'queue_full' then format('%s jobs of the policy wait for a worker, of at most %s', v_queued, p_policy.max_queued)
    else format('A tick admits at most %s jobs of the policy', p_policy.tick_admission_budget)
  end || case
    when v_budget.jobs = 0 then '.'
    when v_share is null then '; the next tick does not come to this partition.'
    else format('; %s of the next tick are for this partition.', v_share)
  end;
  return next v_row;
end;
$$;
comment on function dispatch_explain_budget(dispatch_policies, uuid, integer, integer, timestamptz) is 'The row for tick_admission_budget, or where that is less for the room in the queue (unless that is half free and holds nobody): the part in whether the job at a place of its partition may go, of which the gates let p_allowed pass.';

create or replace function dispatch_explain_order(p_job dispatch_staged_jobs, p_policy dispatch_policies, p_now timestamptz)
returns setof dispatch_explanation
language plpgsql
stable
as $$
declare
  v_room constant integer := dispatch_queue_room(p_policy, p_now);
  v_overdue record;
  v_id bigint;
  v_row dispatch_explanation;
begin
  -- A full queue says so by itself.
  if coalesce(v_room, 0) = 0 then
    return;
  end if;
  v_overdue := dispatch_overdue(p_policy, p_job.id, v_room, p_now);
  select id into v_id
  from unnest(v_overdue.queue_names, v_overdue.priorities, v_overdue.ids) as overdue (queue_name, priority, id)
  where queue_name = p_job.queue_name
    and priority = p_job.priority;
  if v_id is not null then
    v_row.item := 'order';
    v_row.blocks := true;
    v_row.reason := 'queue_full';
    v_row.numbers := jsonb_build_object('job_id', v_id);
    v_row.message := format('It would go before job %s, which waits for a worker and was let wait for enough others.', v_id);
    return next v_row;
  end if;
end;
$$;
comment on function dispatch_explain_order(dispatch_staged_jobs, dispatch_policies, timestamptz) is 'A row where a job would go before one that is overdue in the queue.';

create or replace function dispatch_allowed_by(p_policy dispatch_policies, p_claim dispatch_claim, p_parts dispatch_explanation[])
returns integer
language sql
immutable
parallel safe
return least(p_claim.allowed, p_policy.admission_batch_size, (select min((part.numbers ->> 'allowed')::integer) from unnest(p_parts) as part));
comment on function dispatch_allowed_by(dispatch_policies, dispatch_claim, dispatch_explanation[]) is 'How many jobs of a partition all gates and the budget let pass, by their rows.';

create or replace function dispatch_explain_parts(
  p_job dispatch_staged_jobs, p_policy dispatch_policies, p_claim dispatch_claim, p_place integer, p_rate double precision, p_now timestamptz
)
returns dispatch_explanation[]
language plpgsql
stable
as $$
declare
  v_parts constant dispatch_explanation[] := array(select e from dispatch_explain_pauses(p_job) as e)
    || array(select e from dispatch_explain_schedule(p_job, p_now) as e)
    || array(select e from dispatch_explain_locks(p_job, p_now) as e)
    || array(select e from dispatch_explain_gates(p_policy, p_claim, p_place, p_rate, p_now) as e);
begin
  return v_parts || array(
    select e
    from dispatch_explain_budget(p_policy, p_job.partition_id, p_place, dispatch_allowed_by(p_policy, p_claim, v_parts), p_now) as e
  ) || array(select e from dispatch_explain_order(p_job, p_policy, p_now) as e);
end;
$$;
comment on function dispatch_explain_parts(dispatch_staged_jobs, dispatch_policies, dispatch_claim, integer, double precision, timestamptz) is 'All that has a part in whether the job at a place of its partition may go: its pauses, schedule and locks, the gates, the budget or the queue.';

create or replace function dispatch_foremost_hold(p_parts dispatch_explanation[])
returns dispatch_explanation
language plpgsql
stable
as $$
declare
  v_hold dispatch_explanation;
begin
  select true, reason, since, case when gate_name is not null then format('Gate %s: ', gate_name) else '' end || message
  into v_hold.blocks, v_hold.reason, v_hold.since, v_hold.message
  from unnest(p_parts) with ordinality
  where blocks
    and reason <> 'behind_others'
  order by ordinality
  limit 1;
  return v_hold;
end;
$$;
comment on function dispatch_foremost_hold(dispatch_explanation[]) is 'What comes first of that which holds a job all by itself: blocks, reason, since and message; nulls when nothing does.';

create or replace function dispatch_explain_free(p_job dispatch_staged_jobs, p_partition dispatch_partitions, p_now timestamptz)
returns dispatch_explanation
language plpgsql
stable
as $$
declare
  v_long_ago constant timestamptz := p_now - interval '2 minutes';
  v_last_tick_at timestamptz;
  v_hold dispatch_explanation;
begin
  v_hold.blocks := false;
  v_hold.message := 'Nothing holds it: the next tick admits it.';
  if greatest(p_partition.due_at, p_job.eligible_at, p_job.staged_at) < v_long_ago then
    v_last_tick_at := dispatch_last_tick_at(p_job.policy_name);
    if coalesce(v_last_tick_at < v_long_ago, true) then
      v_hold.reason := 'no_tick';
      v_hold.message := v_hold.message || format(' But nobody ticks: the last time was %s. Start a driver, or dispatch_tick() from cron.',
        coalesce(dispatch_say_time(v_last_tick_at), 'never'));
    end if;
  end if;
  return v_hold;
end;
$$;
comment on function dispatch_explain_free(dispatch_staged_jobs, dispatch_partitions, timestamptz) is 'Of a job that nothing holds, whether anybody ticks.';

create or replace function dispatch_explain_turn(
  p_job dispatch_staged_jobs, p_policy dispatch_policies, p_partition dispatch_partitions, p_claim dispatch_claim, p_before integer,
  p_allowed integer, p_now timestamptz
)
returns dispatch_explanation
language plpgsql
stable
as $$
declare
  v_hold dispatch_explanation;
begin
  v_hold.blocks := true;
  if p_claim.reason is not null then
    v_hold.reason := split_part(p_claim.reason, ':', 1);
    v_hold.message := p_claim.reason;
  elsif p_partition.due_at is null or p_partition.due_at > p_now then
    v_hold.reason := 'backoff';
    v_hold.message := format('No tick looks at its partition before %s, as the last one saw: %s. dispatch_resume() makes the next one look.',
      coalesce(dispatch_say_time(p_partition.due_at), 'more jobs come'), coalesce(p_partition.blocked_reason, 'nothing to do'));
  elsif p_before >= p_allowed then
    v_hold.reason := 'behind_others';
    v_hold.message := format('The next tick admits %s of its partition.', p_allowed);
  elsif dispatch_due_before(p_policy, p_partition, p_now) >= p_policy.partition_batch_size then
    v_hold.reason := 'not_its_turn';
    v_hold.message := format('A tick looks at %s partitions, and more than those are due before this one.', p_policy.partition_batch_size);
  else
    return dispatch_explain_free(p_job, p_partition, p_now);
  end if;
  return v_hold;
end;
$$;
comment on function dispatch_explain_turn(dispatch_staged_jobs, dispatch_policies, dispatch_partitions, dispatch_claim, integer, integer, timestamptz) is 'Whether the next tick comes to a job that none of its rows holds by itself: what holds its partition, or it together with the p_before jobs before it, of which p_allowed pass.';

create or replace function dispatch_say_unknown(p_claim dispatch_claim, p_parts dispatch_explanation[])
returns text
language plpgsql
stable
as $$
begin
  if p_claim.reason is not null then
    return 'the limits of its partition are not known';
  end if;
  return (
    select case
      when item = 'pause' then 'a pause ends by hand'
      when item = 'queueing_lock' then 'it depends on when another job starts'
      when item = 'budget' then 'other partitions have a part in the budget'
      when item in ('queue', 'order') then 'it depends on how soon workers take what is queued'
      when reason in ('rate_zero', 'max_zero') then format('gate %s lets nothing pass', gate_name)
      when gate_type = 'throttle' then format('gate %s has no token for it within a hundred years', gate_name)
      else format('how soon gate %s has room is not known, as its partition was admitted too little lately', gate_name)
    end
    from unnest(p_parts) with ordinality
    where blocks
      and estimated_at is null
    order by ordinality
    limit 1
  );
end;
$$;
comment on function dispatch_say_unknown(dispatch_claim, dispatch_explanation[]) is 'Why nobody knows when a job goes; null when that can be estimated.';

create or replace function dispatch_estimate(
  p_job dispatch_staged_jobs, p_partition dispatch_partitions, p_claim dispatch_claim, p_parts dispatch_explanation[], p_reason text,
  p_before integer, p_rate double precision, p_now timestamptz, out estimated_at timestamptz, out sources text
)
language plpgsql
stable
as $$
declare
  v_ready_at constant timestamptz := greatest(p_job.eligible_at, p_now);
  v_buckets constant text[] := array(
    select e.gate_name
    from unnest(p_parts) with ordinality as e
    where e.gate_type = 'throttle'
      and e.reason is distinct from 'rate_zero'
    order by e.ordinality
  );
  v_cap_at timestamptz;
  v_sources text[] := '{}';
begin
  estimated_at := v_ready_at;
  if v_buckets <> '{}' then
    estimated_at := dispatch_foresee_tokens(p_job, p_claim, v_buckets, p_before, p_now);
    if estimated_at > v_ready_at then
      v_sources := v_sources || format('the tokens still to come at %s', array_to_string(v_buckets, ' and '));
    end if;
  end if;
  for v_cap_at in select e.estimated_at from unnest(p_parts) as e where e.item = 'gate' and e.gate_type <> 'throttle' and e.blocks loop
    estimated_at := greatest(estimated_at, v_cap_at);
    v_sources := v_sources || format('%s jobs a second that its partition was admitted lately', trim_scale(round(p_rate::numeric, 3)));
  end loop;
  if p_reason is distinct from 'concurrency_full' and p_partition.due_at > estimated_at then
    estimated_at := p_partition.due_at;
    v_sources := v_sources || 'the next look'::text;
  end if;
  sources := nullif(array_to_string(v_sources, ' and '), '');
end;
$$;
comment on function dispatch_estimate(dispatch_staged_jobs, dispatch_partitions, dispatch_claim, dispatch_explanation[], text, integer, double precision, timestamptz) is 'About when a job goes (null: not within a hundred years) and what says so (null: nothing but its schedule). p_reason: what it waits for now; p_before: jobs that go or are shown before it; p_rate: jobs a second that its partition was admitted lately.';

create or replace function dispatch_say_place(p_before integer)
returns text
language sql
stable
parallel safe
return case when p_before = 10000 then 'At least 10000 of its partition go first.' else format('Place %s of its partition.', p_before + 1) end;
comment on function dispatch_say_place(integer) is 'A job''s place, by how many go before it.';

create or replace function dispatch_say_estimate(p_scheduled boolean, p_before integer, p_estimated_at timestamptz, p_sources text, p_unknown text)
returns text
language sql
stable
parallel safe
return case
  when p_estimated_at is null then 'No estimate' || coalesce(': ' || p_unknown, '') || '.'
  when p_sources is null and not p_scheduled then 'It goes as soon as ticks come to it.'
  else format('%s %s, from %s.', case when p_before = 10000 then 'Not before' else 'About' end, dispatch_say_time(p_estimated_at),
    coalesce(p_sources, 'its schedule'))
end;
comment on function dispatch_say_estimate(boolean, integer, timestamptz, text, text) is 'When a job that is held goes and what that follows from, or why that is not known.';

create or replace function dispatch_waits_since(p_job dispatch_staged_jobs, p_partition dispatch_partitions, p_now timestamptz)
returns timestamptz
language sql
immutable
parallel safe
return greatest(p_job.staged_at, least(p_job.eligible_at, p_now), case when p_partition.waiting_since <= p_now then p_partition.waiting_since end);
comment on function dispatch_waits_since(dispatch_staged_jobs, dispatch_partitions, timestamptz) is 'Since when a job has waited for its turn: since it could go, or the last admission of its partition.';

create or replace function dispatch_explain_waiting(
  p_row dispatch_explanation, p_job dispatch_staged_jobs, p_policy dispatch_policies, p_partition dispatch_partitions, p_now timestamptz
)
returns setof dispatch_explanation
language plpgsql
stable
as $$
declare
  v_claim constant dispatch_claim := dispatch_foresee_claim(p_policy, p_partition, p_now);
  v_rate constant double precision := dispatch_admission_rate(p_policy, p_partition, p_now);
  v_before constant integer := case when p_job.eligible_at > p_now then dispatch_jobs_earlier(p_job) else dispatch_jobs_before(p_job, p_now) end;
  v_parts constant dispatch_explanation[] := dispatch_explain_parts(p_job, p_policy, v_claim, v_before + 1, v_rate, p_now);
  v_allowed constant integer := dispatch_allowed_by(p_policy, v_claim, v_parts);
  v_unknown constant text := dispatch_say_unknown(v_claim, v_parts);
  v_hold dispatch_explanation := dispatch_foremost_hold(v_parts);
  v_sources text;
begin
  if v_hold.reason is null then
    v_hold := dispatch_explain_turn(p_job, p_policy, p_partition, v_claim, v_before, v_allowed, p_now);
  end if;
  if v_unknown is null and p_partition.due_at < 'infinity' then
    select estimated_at, sources
    into p_row.estimated_at, v_sources
    from dispatch_estimate(p_job, p_partition, v_claim, v_parts, v_hold.reason, v_before, v_rate, p_now);
  end if;

  p_row.blocks := v_hold.blocks;
  p_row.reason := v_hold.reason;
  p_row.since := coalesce(v_hold.since, dispatch_waits_since(p_job, p_partition, p_now));
  p_row.numbers := p_row.numbers || jsonb_build_object('place', v_before + 1, 'place_is_at_least', v_before = 10000,
    'allowed', v_allowed, 'pending', p_partition.pending_count, 'in_flight', p_partition.in_flight_count, 'due_at', p_partition.due_at);
  p_row.message := concat_ws(' ', v_hold.message, dispatch_say_place(v_before),
    case when v_hold.blocks then dispatch_say_estimate(p_job.eligible_at > p_now, v_before, p_row.estimated_at, v_sources, v_unknown) end);
  return next p_row;
  return query select * from unnest(v_parts);
end;
$$;
comment on function dispatch_explain_waiting(dispatch_explanation, dispatch_staged_jobs, dispatch_policies, dispatch_partitions, timestamptz) is 'The rows for a job in its partition as the next tick finds it: the job''s, which p_row begins, and those of its parts.';

create or replace function dispatch_explain_staged(p_job dispatch_staged_jobs, p_now timestamptz)
returns setof dispatch_explanation
language plpgsql
stable
set search_path from current
as $$
declare
  v_policy dispatch_policies;
  v_partition dispatch_partitions;
  v_job dispatch_explanation;
begin
  v_job.item := 'job';
  v_job.blocks := true;
  v_job.since := p_job.staged_at;
  v_job.numbers := jsonb_build_object('state', 'staged', 'policy_name', p_job.policy_name, 'partition_key', p_job.partition_key,
    'task_name', p_job.task_name, 'priority', p_job.priority, 'attempts', p_job.attempts);
  select * into v_policy from dispatch_policies where policy_name = p_job.policy_name;
  if not found then
    v_job.reason := 'policy_gone';
    v_job.message := format('Its policy %L does not exist. The next sweep sets the job aside as dead.', p_job.policy_name);
    return next v_job;
    return;
  end if;
  select * into v_partition from dispatch_as_folded(v_policy, p_job.partition_id, p_now);
  if not found then
    v_job.reason := 'not_folded';
    v_job.message := 'The tick has more than 10000 notes to take in before it comes to the one of this job.';
    return next v_job;
    return;
  end if;
  return query select * from dispatch_explain_waiting(v_job, p_job, v_policy, v_partition, p_now);
end;
$$;
comment on function dispatch_explain_staged(dispatch_staged_jobs, timestamptz) is 'The rows of dispatch_explain() for a job that waits in a policy.';

create or replace function dispatch_explain_queued(
  p_row dispatch_explanation, p_state dispatch_job_state, p_scheduled_at timestamptz, p_lock text, p_now timestamptz
)
returns dispatch_explanation
language plpgsql
stable
as $$
declare
  v_workers constant bigint := dispatch_workers_alive(p_now);
  v_holder bigint;
begin
  select running_id into v_holder from dispatch_lock_holders(p_lock, null);
  p_row.blocks := true;
  p_row.since := p_state.admitted_at;
  p_row.estimated_at := case when p_scheduled_at > p_now then p_scheduled_at end;
  p_row.reason := case
    when p_scheduled_at > p_now then 'scheduled'
    when v_workers = 0 then 'no_worker'
    when v_holder is not null then 'lock_held'
    else 'queued'
  end;
  p_row.numbers := p_row.numbers || jsonb_build_object('workers', v_workers, 'lock_holder', v_holder);
  p_row.message := case p_row.reason
    when 'scheduled' then format('procrastinate runs it not before %s.', dispatch_say_time(p_scheduled_at))
    when 'no_worker' then format('It waits for a worker in the queue %L, and no worker is alive.', p_state.queue_name)
    when 'lock_held' then format('It waits in the queue %L until job %s ends, which runs under its lock %L.',
      p_state.queue_name, v_holder, left(p_lock, 200))
    else format('It waits for a worker in the queue %L; %s alive, for this queue or others.', p_state.queue_name,
      case v_workers when 1 then '1 worker is' else v_workers || ' workers are' end)
  end || coalesce(' Admitted at ' || dispatch_say_time(p_state.admitted_at) || '.', '');
  return p_row;
end;
$$;
comment on function dispatch_explain_queued(dispatch_explanation, dispatch_job_state, timestamptz, text, timestamptz) is 'The row of a job that procrastinate has and no worker has taken: what it waits for there.';

create or replace function dispatch_explain_admitted(p_state dispatch_job_state, p_now timestamptz)
returns dispatch_explanation
language plpgsql
stable
set search_path from current
as $$
declare
  v_stale_since constant timestamptz := p_now - dispatch_setting_span('inflight_stale_after');
  v_facts record;
  v_job dispatch_explanation;
begin
  v_job.item := 'job';
  v_job.blocks := false;
  v_job.numbers := jsonb_strip_nulls(jsonb_build_object('state', p_state.state, 'policy_name', p_state.policy_name,
    'partition_key', p_state.partition_key, 'task_name', p_state.task_name, 'queue_name', p_state.queue_name, 'job_id', p_state.job_id,
    'attempts', p_state.attempts, 'admitted_at', p_state.admitted_at, 'finished_at', p_state.finished_at));
  select * into v_facts from dispatch_job_facts(p_state.job_id);

  case p_state.state
    when 'queued' then
      v_job := dispatch_explain_queued(v_job, p_state, v_facts.scheduled_at, v_facts.lock, p_now);
    when 'running' then
      v_job.since := v_facts.started_at;
      v_job.reason := case when coalesce(v_facts.worker_seen_at < v_stale_since, true) then 'worker_lost' else 'running' end;
      v_job.numbers := v_job.numbers || jsonb_build_object('worker_seen_at', v_facts.worker_seen_at);
      v_job.message := format('A worker runs it since %s%s.', coalesce(dispatch_say_time(v_facts.started_at), 'some time'),
        case when v_job.reason = 'worker_lost' then '; that worker gives no sign any more, and dispatch_sweep() frees its slot' end);
    when 'dead' then
      v_job.since := p_state.finished_at;
      v_job.reason := 'dead';
      v_job.blocks := true;
      v_job.message := format('It could not be handed off: %s. dispatch_requeue_dead() tries it again, dispatch_discard_dead() removes it.',
        (select error from dispatch_dead_jobs where id = p_state.id));
      v_job.numbers := v_job.numbers || jsonb_build_object('error', (select error from dispatch_dead_jobs where id = p_state.id));
    else
      v_job.since := p_state.finished_at;
      v_job.reason := coalesce(v_facts.status, p_state.state);
      v_job.message := format('It ended%s: %s.', ' at ' || dispatch_say_time(p_state.finished_at), v_job.reason);
  end case;
  return v_job;
end;
$$;
comment on function dispatch_explain_admitted(dispatch_job_state, timestamptz) is 'The row of dispatch_explain() for a job that does not wait in a policy.';

create or replace function dispatch_explain(p_id bigint)
returns setof dispatch_explanation
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
declare
  v_state constant dispatch_job_state := dispatch_job(p_id);
  v_job dispatch_staged_jobs;
begin
  select * into v_job from dispatch_staged_jobs where id = v_state.id;
  if found then
    return query select * from dispatch_explain_staged(v_job, dispatch_now());
  else
    return next dispatch_explain_admitted(v_state, dispatch_now());
  end if;
end;
$$;
comment on function dispatch_explain(bigint) is 'Why a job does not run. The first row is the job: where it is, what it waits for now, since when and until about when. For a job that waits in a policy follow what else there is: its pauses, schedule and locks, each gate with its numbers, the budget, the queue where it is filling up. blocks = false in the first row says that the next tick would admit it. Writes nothing; asks the policy''s limit functions as a tick does. Raises PD006 for an unknown id.';
