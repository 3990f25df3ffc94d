-- Why does this job not run? What holds it, with the numbers and in words, and about when it is its turn.
-- Invariant: the first row says what the next tick does, for it follows from the functions of 91_foresee.sql; nothing is
-- written or locked.

create or replace function dispatch_explain_gate(
  p_policy dispatch_policies, p_gate jsonb, p_claim dispatch_claim, p_place integer, p_rate double precision, p_now timestamptz
)
returns dispatch_explanation
language plpgsql
stable
set search_path from current
as $$
declare
  v_name constant text := p_gate ->> 'name';
  v_type constant text := p_gate ->> 'type';
  v_passed dispatch_claim;
  v_rate constant numeric := (p_claim).params ->> (v_name || '.rate');
  v_per constant numeric := (p_claim).params ->> (v_name || '.per');
  v_capacity constant numeric := dispatch_capacity(v_rate, ((p_claim).params ->> (v_name || '.burst'))::numeric);
  v_tokens numeric;
  v_next_at timestamptz;
  v_stats dispatch_adaptive_stats;
  v_knobs record;
  v_max numeric;
  v_row dispatch_explanation;
begin
  v_row.item := 'gate';
  v_row.gate_name := v_name;
  v_row.gate_type := v_type;
  if (p_claim).reason is not null then
    v_row.blocks := true;
    v_row.reason := split_part((p_claim).reason, ':', 1);
    v_row.numbers := '{}';
    v_row.message := 'Not asked: ' || rtrim((p_claim).reason, '. ') || '.';
    return v_row;
  end if;

  v_passed := (dispatch_foresee_gate(p_policy.policy_name, p_gate, array[p_claim], p_now))[1];
  v_row.blocks := v_passed.allowed < p_place;
  v_row.reason := case when v_row.blocks then coalesce(v_passed.reason, 'behind_others') end;
  v_row.numbers := jsonb_build_object('allowed', v_passed.allowed);
  v_row.estimated_at := case when not v_row.blocks then p_now end;

  if v_type = 'throttle' then
    v_tokens := v_passed.gate_state -> v_name ->> 'tokens';
    if v_passed.reason is distinct from 'rate_zero' then
      v_next_at := case when v_tokens < v_capacity then
        dispatch_nth_token(v_passed, array[v_name], least(greatest(dispatch_whole_tokens(v_tokens), 0), 2000000000)::integer + 1, p_now)
      end;
      v_row.estimated_at := dispatch_nth_token(v_passed, array[v_name], p_place, p_now);
    end if;
    v_row.numbers := v_row.numbers || jsonb_build_object('tokens', trim_scale(round(v_tokens, 6)), 'rate', v_rate, 'per', v_per,
      'burst', (p_claim).params -> (v_name || '.burst'), 'capacity', v_capacity, 'next_token_at', v_next_at);
    v_row.message := case
      when v_passed.reason = 'rate_zero' then format('Shut: its rate is %s.', coalesce(trim_scale(v_rate)::text, 'not known'))
      else format('%s of %s tokens are there, %s come in %s s%s.', trim_scale(round(v_tokens, 3)), trim_scale(v_capacity), trim_scale(v_rate),
        trim_scale(v_per), ', the next at ' || dispatch_say_time(v_next_at))
    end;
  else
    if v_type = 'concurrency' then
      v_max := (p_claim).params ->> (v_name || '.max');
      v_row.numbers := v_row.numbers || jsonb_build_object('in_flight', (p_claim).in_flight, 'max', v_max);
      v_row.message := case
        when v_passed.reason = 'max_zero' then format('Shut: its max is %s.', coalesce(trim_scale(v_max)::text, 'not known'))
        else format('%s in flight of at most %s.', (p_claim).in_flight, trim_scale(floor(v_max)))
      end;
    elsif v_type = 'adaptive_concurrency' then
      select learned.* into v_stats
      from (select) as one
      left join dispatch_observations(p_policy.policy_name, (p_claim).partition_id) as seen on true
      cross join lateral dispatch_as_learned(p_claim, v_name, seen.succeeded, seen.lags_ms, p_now) as learned;
      select * into v_knobs from dispatch_aimd_params((p_claim).params, v_name);
      v_max := dispatch_adaptive_cap(v_stats.current_max, (p_claim).in_flight, v_knobs.initial_max, v_knobs.floor_max, v_knobs.top_max);
      v_row.numbers := v_row.numbers || jsonb_build_object('in_flight', (p_claim).in_flight, 'max', v_max, 'current_max', v_stats.current_max,
        'initial_max', v_knobs.initial_max, 'lowest_max', v_knobs.floor_max, 'highest_max', v_knobs.top_max,
        'ewma_lag_ms', v_stats.ewma_lag_ms, 'target_lag_ms', v_knobs.target_lag_ms, 'samples', v_stats.sample_count);
      v_row.message := format('%s in flight of at most %s now; jobs wait %s ms for a worker, aimed at are %s ms (%s observed).',
        (p_claim).in_flight, v_max, round(v_stats.ewma_lag_ms::numeric, 1), v_knobs.target_lag_ms, v_stats.sample_count);
    end if;
    if v_row.blocks and v_passed.reason is distinct from 'max_zero' and p_rate > 0 then
      v_row.estimated_at := p_now + make_interval(secs => least((p_place - v_passed.allowed) / p_rate, 3155760000));
    end if;
  end if;
  if v_row.reason = 'behind_others' then
    v_row.message := v_row.message || format(' It lets %s pass now, and %s go first.', v_passed.allowed, p_place - 1);
  end if;
  return v_row;
end;
$$;
comment on function dispatch_explain_gate(dispatch_policies, jsonb, dispatch_claim, integer, double precision, timestamptz) is 'One gate''s part in whether the job at a place of its partition may go.';

create or replace function dispatch_explain_around(p_job dispatch_staged_jobs, p_now timestamptz)
returns setof dispatch_explanation
language plpgsql
stable
set search_path from current
as $$
declare
  v_holders record;
  v_rival boolean := false;
begin
  return query
    select 'pause', null, null, true, 'paused', '{}'::jsonb, q.paused_at, null::timestamptz,
      format('%s %L is paused since %s. dispatch_resume() lets it go on.', case when q.partition_key is null then 'Policy' else 'Partition' end,
        left(coalesce(q.partition_key, q.policy_name), 200), dispatch_say_time(q.paused_at))
    from dispatch_pauses as q
    where q.id in (dispatch_partition_id(p_job.policy_name, null), p_job.partition_id)
    order by q.partition_key nulls first;

  if p_job.eligible_at > p_now then
    return query
      select 'schedule', null, null, true, kind.reason,
        jsonb_build_object('eligible_at', p_job.eligible_at, 'scheduled_at', p_job.scheduled_at, 'attempts', p_job.attempts),
        p_job.staged_at, p_job.eligible_at,
        format(kind.message, dispatch_say_time(p_job.eligible_at))
      from (
        select
          case
            when p_job.eligible_at is distinct from p_job.scheduled_at then 'queueing_lock_held'
            when p_job.job_id is not null then 'retry'
            else 'scheduled'
          end,
          case
            when p_job.eligible_at is distinct from p_job.scheduled_at then 'Its queueing lock was held when it was to go; it is tried again at %s.'
            when p_job.job_id is not null then 'It is to be retried, not before %s.'
            else 'It is scheduled for %s.'
          end
      ) as kind (reason, message);
  end if;

  select * into v_holders from dispatch_lock_holders(p_job.lock, p_job.queueing_lock);
  -- Where a retry and a new job have the same queueing lock, the new one goes first.
  if p_job.job_id is not null and v_holders.queued_id is null then
    select not explained.blocks into v_rival
    from dispatch_staged_jobs as s
    cross join lateral (
      select blocks from dispatch_explain_staged(s, p_now) limit 1
    ) as explained
    where s.queueing_lock = p_job.queueing_lock
      and s.job_id is null
      and s.policy_name = p_job.policy_name;
  end if;
  if v_holders.queued_id is not null or v_rival then
    return query
      select 'queueing_lock', null, null, true, 'queueing_lock_held', jsonb_build_object('queueing_lock', p_job.queueing_lock, 'job_id', v_holders.queued_id),
        null::timestamptz, null::timestamptz,
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
comment on function dispatch_explain_around(dispatch_staged_jobs, timestamptz) is 'What may hold a waiting job beside its gates: pauses, its schedule, its locks.';

create or replace function dispatch_explain_budget(p_policy dispatch_policies, p_partition_id uuid, p_place integer, p_allowed integer, p_now timestamptz)
returns dispatch_explanation
language plpgsql
stable
set search_path from current
as $$
declare
  v_share constant integer := dispatch_foresee_budget(p_policy, p_partition_id, p_now);
  v_row dispatch_explanation;
begin
  v_row.item := 'budget';
  v_row.blocks := v_share is not null and v_share < least(p_place, p_allowed);
  v_row.reason := case when v_row.blocks then 'budget_exhausted' end;
  v_row.numbers := jsonb_build_object('tick_admission_budget', p_policy.tick_admission_budget, 'allowed', v_share);
  v_row.message := format('A tick admits at most %s jobs of the policy; %s.', p_policy.tick_admission_budget,
    case when v_share is null then 'the next one does not come to this partition' else format('%s of the next one are for this partition', v_share) end);
  return v_row;
end;
$$;
comment on function dispatch_explain_budget(dispatch_policies, uuid, integer, integer, timestamptz) is 'The part of tick_admission_budget in whether the job at a place of its partition may go, of which the gates let p_allowed pass.';

create or replace function dispatch_last_tick_at(p_policy text)
returns timestamptz
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
begin
  return (select at from dispatch_tick_samples where policy_name = p_policy order by at desc limit 1);
end;
$$;
comment on function dispatch_last_tick_at(text) is 'When a tick of a policy last looked at a partition; null when none is known.';

create or replace function dispatch_explain_staged(p_job dispatch_staged_jobs, p_now timestamptz)
returns setof dispatch_explanation
language plpgsql
stable
set search_path from current
as $$
declare
  v_ready_at constant timestamptz := greatest(p_job.eligible_at, p_now);
  v_policy dispatch_policies;
  v_partition dispatch_partitions;
  v_claim dispatch_claim;
  v_gate jsonb;
  v_rate double precision;
  v_before integer;
  v_allowed integer;
  v_buckets text[] := '{}';
  v_row dispatch_explanation;
  v_rows dispatch_explanation[] := '{}';
  v_job dispatch_explanation;
  v_what text;
  v_how text[] := '{}';
  v_unknown text;
  v_due_since timestamptz;
  v_last_tick_at timestamptz;
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

  v_before := case when p_job.eligible_at > p_now then dispatch_jobs_earlier(p_job) else dispatch_jobs_before(p_job, p_now) end;
  v_rate := dispatch_admission_rate(v_policy, v_partition, p_now);
  v_rows := array(select e from dispatch_explain_around(p_job, p_now) as e);

  v_claim := dispatch_new_claim(v_policy, v_partition, 1);
  v_claim.allowed := 2147483647;
  v_claim := (dispatch_resolve(v_policy, array[v_claim], p_now))[1];
  v_allowed := least(v_claim.allowed, v_policy.admission_batch_size);
  for v_gate in select jsonb_array_elements(v_policy.gates) loop
    v_row := dispatch_explain_gate(v_policy, v_gate, v_claim, v_before + 1, v_rate, p_now);
    v_allowed := least(v_allowed, (v_row.numbers ->> 'allowed')::integer);
    if v_row.gate_type = 'throttle' and v_row.reason is distinct from 'rate_zero' and v_claim.reason is null then
      v_buckets := v_buckets || v_row.gate_name;
    end if;
    v_rows := v_rows || v_row;
  end loop;
  if v_policy.tick_admission_budget is not null then
    v_row := dispatch_explain_budget(v_policy, p_job.partition_id, v_before + 1, v_allowed, p_now);
    v_allowed := least(v_allowed, (v_row.numbers ->> 'allowed')::integer);
    v_rows := v_rows || v_row;
  end if;

  -- What it waits for now: the first that holds it all by itself, then what holds it together with the jobs before it.
  v_row := null;
  select reason, since, message, gate_name
  into v_row.reason, v_row.since, v_row.message, v_row.gate_name
  from unnest(v_rows) with ordinality
  where blocks and reason <> 'behind_others'
  order by ordinality
  limit 1;
  v_job.reason := v_row.reason;
  if found then
    v_what := case when v_row.gate_name is not null then format('Gate %s: ', v_row.gate_name) else '' end || v_row.message;
  elsif v_claim.reason is not null then
    v_job.reason := split_part(v_claim.reason, ':', 1);
    v_what := v_claim.reason;
  elsif v_partition.due_at is null or v_partition.due_at > p_now then
    v_job.reason := 'backoff';
    v_what := format('No tick looks at its partition before %s, as the last one saw: %s. dispatch_resume() makes the next one look.',
      coalesce(dispatch_say_time(v_partition.due_at), 'more jobs come'), coalesce(v_partition.blocked_reason, 'nothing to do'));
  elsif v_before >= v_allowed then
    v_job.reason := 'behind_others';
    v_what := format('The next tick admits %s of its partition.', v_allowed);
  elsif dispatch_due_before(v_policy, v_partition) >= v_policy.partition_batch_size then
    v_job.reason := 'not_its_turn';
    v_what := format('A tick looks at %s partitions, and more than those are due before this one.', v_policy.partition_batch_size);
  else
    v_job.blocks := false;
    v_due_since := greatest(v_partition.due_at, p_job.eligible_at, p_job.staged_at);
    v_last_tick_at := dispatch_last_tick_at(p_job.policy_name);
    v_what := 'Nothing holds it: the next tick admits it.';
    if v_due_since < p_now - interval '2 minutes' and coalesce(v_last_tick_at < p_now - interval '2 minutes', true) then
      v_job.reason := 'no_tick';
      v_what := v_what || format(' But nobody ticks: the last time was %s. Start a driver, or dispatch_tick() from cron.',
        coalesce(dispatch_say_time(v_last_tick_at), 'never'));
    end if;
  end if;

  v_unknown := case
    when v_claim.reason is not null then 'the limits of its partition are not known'
    else (
      select case
        when item = 'pause' then 'a pause ends by hand'
        when item = 'queueing_lock' then 'it depends on when another job starts'
        when item = 'budget' then 'other partitions have a part in the budget'
        when reason in ('rate_zero', 'max_zero') then format('gate %s lets nothing pass', gate_name)
        else format('how soon gate %s has room is not known, as its partition was admitted too little lately', gate_name)
      end
      from unnest(v_rows) with ordinality
      where blocks
        and estimated_at is null
      order by ordinality
      limit 1
    )
  end;
  if v_unknown is null and v_partition.due_at < 'infinity' then
    v_job.estimated_at := v_ready_at;
    if v_buckets <> '{}' then
      v_job.estimated_at := dispatch_foresee_tokens(p_job, v_claim, v_buckets, v_before, p_now);
      if v_job.estimated_at > v_ready_at then
        v_how := v_how || format('the tokens still to come at %s', array_to_string(v_buckets, ' and '));
      end if;
    end if;
    for v_row in select * from unnest(v_rows) where item = 'gate' and gate_type <> 'throttle' and blocks loop
      v_job.estimated_at := greatest(v_job.estimated_at, v_row.estimated_at);
      v_how := v_how || format('%s jobs a second that its partition was admitted lately', trim_scale(round(v_rate::numeric, 3)));
    end loop;
    if v_job.reason is distinct from 'concurrency_full' and v_partition.due_at > v_job.estimated_at then
      v_job.estimated_at := v_partition.due_at;
      v_how := v_how || 'the next look'::text;
    end if;
  end if;

  v_job.since := coalesce(v_row.since,
    greatest(p_job.staged_at, least(p_job.eligible_at, p_now), case when v_partition.waiting_since <= p_now then v_partition.waiting_since end));
  v_job.numbers := v_job.numbers || jsonb_build_object('place', v_before + 1, 'place_is_at_least', v_before = 10000,
    'allowed', v_allowed, 'pending', v_partition.pending_count, 'in_flight', v_partition.in_flight_count, 'due_at', v_partition.due_at);
  v_job.message := concat_ws(' ', v_what,
    case when v_before = 10000 then 'At least 10000 of its partition go first.' else format('Place %s of its partition.', v_before + 1) end,
    case
      when not v_job.blocks then null
      when v_job.estimated_at is null then 'No estimate' || coalesce(': ' || v_unknown, '') || '.'
      when v_how = '{}' and p_job.eligible_at <= p_now then 'It goes as soon as ticks come to it.'
      else format('%s %s, from %s.', case when v_before = 10000 then 'Not before' else 'About' end, dispatch_say_time(v_job.estimated_at),
        coalesce(nullif(array_to_string(v_how, ' and '), ''), 'its schedule'))
    end);
  return next v_job;
  return query select * from unnest(v_rows);
end;
$$;
comment on function dispatch_explain_staged(dispatch_staged_jobs, timestamptz) is 'The rows of dispatch_explain() for a job that waits in a policy.';

create or replace function dispatch_explain_admitted(p_state dispatch_job_state, p_now timestamptz)
returns dispatch_explanation
language plpgsql
stable
set search_path from current
as $$
declare
  v_stale_since constant timestamptz := p_now - dispatch_setting_span('inflight_stale_after');
  v_facts record;
  v_holder bigint;
  v_workers bigint;
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
      select running_id into v_holder from dispatch_lock_holders(v_facts.lock, null);
      v_workers := dispatch_workers_alive(p_now);
      v_job.since := p_state.admitted_at;
      v_job.estimated_at := case when v_facts.scheduled_at > p_now then v_facts.scheduled_at end;
      v_job.reason := case
        when v_facts.scheduled_at > p_now then 'scheduled'
        when v_workers = 0 then 'no_worker'
        when v_holder is not null then 'lock_held'
        else 'queued'
      end;
      v_job.blocks := true;
      v_job.numbers := v_job.numbers || jsonb_build_object('workers', v_workers, 'lock_holder', v_holder);
      v_job.message := case v_job.reason
        when 'scheduled' then format('procrastinate runs it not before %s.', dispatch_say_time(v_facts.scheduled_at))
        when 'no_worker' then format('It waits for a worker in the queue %L, and no worker is alive.', p_state.queue_name)
        when 'lock_held' then format('It waits in the queue %L until job %s ends, which runs under its lock %L.',
          p_state.queue_name, v_holder, left(v_facts.lock, 200))
        else format('It waits for a worker in the queue %L; %s alive, for this queue or others.', p_state.queue_name,
          case v_workers when 1 then '1 worker is' else v_workers || ' workers are' end)
      end || coalesce(' Admitted at ' || dispatch_say_time(p_state.admitted_at) || '.', '');
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
comment on function dispatch_explain(bigint) is 'Why a job does not run, by the id that defer returned or by procrastinate''s. The first row is the job: where it is, what it waits for now, since when and until about when. For a job that waits in a policy follow what else there is: its pauses, schedule and locks, each gate with its numbers, the budget. blocks = false in the first row says that the next tick would admit it. Writes nothing; asks the policy''s limit functions as a tick does. Raises PD006 for an unknown id.';
