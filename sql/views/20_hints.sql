-- What an operator should do now. Each problem of a policy is one row, however many partitions have it, with the worst of
-- them as the example; a system in order gives no row. Thresholds are settings (hint_...), which say their reasons.
-- One pass over the partitions with waiting jobs and one over the slots, the tick samples of 5 minutes, the policy samples
-- of 15, the first 100 notes of a policy. Nothing reads staged jobs.

create or replace view dispatch_hints as
with limits as materialized (
  select
    dispatch_now() as now,
    dispatch_setting_span('hint_due_after') as due_after,
    dispatch_setting_span('hint_wait_after') as wait_after,
    dispatch_setting_span('hint_drain_after') as drain_after,
    dispatch_setting_span('hint_queued_after') as queued_after,
    dispatch_setting_span('hint_sweep_after') as sweep_after,
    dispatch_setting_span('hint_pause_after') as pause_after,
    dispatch_setting_span('inflight_stale_after') as stale_after,
    dispatch_setting('hint_failure_percent') as failure_percent,
    dispatch_setting('hint_growth_percent') as growth_percent,
    dispatch_setting('hint_tick_ms')::double precision as tick_ms
), slot_counts as materialized (
  select counts.* from limits cross join lateral dispatch_slot_counts(limits.now) as counts
), policies as materialized (
  select
    policy.policy_name, policy.created_at, policy.updated_at, policy.partition_by, policy.shard_by, policy.partition_batch_size,
    policy.stalled, dispatch_needed_paths(policy.gates) as needed, pause.paused_at,
    coalesce(counts.queued >= policy.max_queued, false) as queue_full
  from dispatch_policies as policy
  left join dispatch_pauses as pause on pause.id = dispatch_partition_id(policy.policy_name, null)
  left join slot_counts as counts on counts.policy_name = policy.policy_name
), waiting as (
  -- Partitions whose jobs wait, those that wait for their time left out.
  select
    p.policy_name, p.id, p.pending_count, p.in_flight_count, p.last_checked_at,
    case when policies.queue_full and p.due_at <= (select now from limits) then 'queue_full' else split_part(p.blocked_reason, ':', 1) end as reason,
    case when p.due_at < (select now - due_after from limits) and not policies.queue_full then p.due_at else p.waiting_since end as since,
    case
      when policies.paused_at is not null or p.blocked_reason = 'paused' then 'paused'
      when p.due_at < (select now - due_after from limits) and not policies.queue_full then 'unchecked'
      when p.blocked_reason like 'limit_error%' then 'limit_error'
      when p.blocked_reason in ('rate_zero', 'max_zero') and exists (
        select from unnest(policies.needed) as path where dispatch_to_number(p.context #> string_to_array(path, '.')) is null
      ) then 'limit_missing'
      when (p.blocked_reason is not null or policies.queue_full and p.due_at <= (select now from limits))
        and p.waiting_since < (select now - wait_after from limits) then 'gate'
    end as problem
  from dispatch_partitions as p
  join policies on policies.policy_name = p.policy_name
  where p.waiting_since <= (select now from limits)
  offset 0
), grouped as materialized (
  select
    policy_name, problem, reason,
    count(*) as partitions,
    sum(pending_count)::bigint as jobs,
    sum(in_flight_count)::bigint as in_flight,
    count(*) filter (where last_checked_at is null) as never_checked,
    min(since) as since,
    -- The worst is the one that waits longest: its time, as text in the order of times, and its id.
    min(encode(timestamptz_send(since) || uuid_send(id), 'hex') collate "C")
      filter (where problem in ('unchecked', 'limit_error', 'limit_missing', 'gate')) as worst
  from waiting
  group by policy_name, problem, reason
), problems as materialized (
  select
    g.policy_name, g.problem, g.reason, g.partitions, g.jobs, g.in_flight, g.never_checked, g.since,
    p.partition_key, p.shard, p.context, p.blocked_reason, p.pending_count as worst_jobs
  from (
    select
      policy_name, problem, case when problem = 'gate' then reason end as reason,
      sum(partitions)::bigint as partitions, sum(jobs)::bigint as jobs, sum(in_flight)::bigint as in_flight,
      sum(never_checked)::bigint as never_checked, min(since) as since, min(worst) as worst
    from grouped
    where problem is not null
    group by policy_name, problem, case when problem = 'gate' then reason end
  ) as g
  left join lateral (
    select * from dispatch_partitions as worst where worst.id = substr(g.worst, 17)::uuid limit 1
  ) as p on true
), backlogs as (
  select
    policy_name,
    sum(jobs)::bigint as jobs,
    (array_agg(reason order by jobs desc) filter (where reason <> ''))[1] as reason,
    max(jobs) filter (where reason <> '') as reason_jobs
  from grouped
  where problem is distinct from 'paused'
  group by policy_name
), ticks as materialized (
  select
    policies.policy_name, dispatch_last_tick_at(policies.policy_name) as last_at, recent.jobs, recent.failures, recent.seen,
    recent.longest_ms, recent.longest_at, recent.first_failure_at, recent.shards
  from policies
  cross join limits
  cross join lateral (
    select
      coalesce(sum(s.jobs_admitted), 0)::bigint as jobs,
      coalesce(sum(s.handoff_failures), 0)::bigint as failures,
      coalesce(sum(s.partitions_seen), 0)::bigint as seen,
      max(s.duration_ms) as longest_ms,
      min(s.at) filter (where s.duration_ms > limits.tick_ms) as longest_at,
      min(s.at) filter (where s.handoff_failures > 0) as first_failure_at,
      -- Null: some were for all shards.
      case when bool_and(s.shard is not null) then array_agg(distinct s.shard) end as shards
    from dispatch_tick_samples as s
    where s.policy_name = policies.policy_name
      and s.at > limits.now - interval '5 minutes'
  ) as recent
), trends as materialized (
  select policies.policy_name, last_sample.at as last_at, recent.*
  from policies
  cross join limits
  left join lateral (
    select s.at
    from dispatch_policy_samples as s
    where s.policy_name = policies.policy_name
      and s.at <= limits.now
    order by s.at desc
    limit 1
  ) as last_sample on true
  cross join lateral (
    select
      avg(s.waiting) filter (where s.at <= limits.now - interval '10 minutes') as early,
      avg(s.waiting) filter (where s.at > limits.now - interval '10 minutes' and s.at <= limits.now - interval '5 minutes') as middle,
      avg(s.waiting) filter (where s.at > limits.now - interval '5 minutes') as late,
      -- Since when there has been a backlog all the time, within the last 6 minutes.
      case when bool_and(s.waiting > 0 or s.at <= limits.now - interval '6 minutes') then
        min(s.at) filter (where s.at > limits.now - interval '6 minutes')
      end as backlog_since
    from dispatch_policy_samples as s
    where s.policy_name = policies.policy_name
      and s.at > limits.now - interval '15 minutes'
      and s.at <= limits.now
  ) as recent
), slots as materialized (
  select counts.policy_name, counts.queued, counts.running, counts.oldest_queued_at
  from limits
  cross join slot_counts as counts
  where counts.oldest_queued_at < limits.now - limits.queued_after
), dead as (
  select policy_name, count(*) as jobs, min(died_at) as since, max(died_at) as newest_at
  from dispatch_dead_jobs
  group by policy_name
), hints as (
  select
    'critical' as level, 'no_tick' as hint, policies.policy_name, problem.partition_key,
    case when problem.partitions > 0 then format('%s been due for over %s and no tick looks, the longest (%s) for %s; %s never checked.',
        dispatch_say_count(problem.partitions, 'partition') || case when problem.partitions = 1 then ' has' else ' have' end,
        dispatch_say_span(limits.due_after), dispatch_say_name(problem.partition_key), dispatch_say_span(limits.now - problem.since),
        dispatch_say_number(problem.never_checked) || case when problem.never_checked = 1 then ' was' else ' were' end)
      else format('Staged jobs have not been looked at for %s.', dispatch_say_span(limits.now - note.since))
    end || coalesce(' The last tick of this policy was ' || dispatch_say_span(limits.now - ticks.last_at) || ' ago.',
      ' No tick of this policy is known.') as message,
    case
      when exists (select from ticks as others where others.last_at > limits.now - limits.due_after) then
        'Other policies are ticked, so the tick of this one fails (tick_failed in the driver''s log, tick_error in what select * from dispatch_tick() returns), or each driver leaves it alone since its application has none of the policy''s tasks. See "What runs" in docs/operations.md.'
      else
        'Run a driver: pydispatch run; or have cron call dispatch_run(''55 seconds''). If one runs, its log says what fails. Now, by hand: select * from dispatch_tick(); or: pydispatch tick. See "What runs" in docs/operations.md.'
    end as what_to_do,
    least(problem.since, note.since) as since
  from policies
  cross join limits
  join ticks on ticks.policy_name = policies.policy_name
  left join problems as problem on problem.policy_name = policies.policy_name and problem.problem = 'unchecked'
  left join lateral (
    select min(due_at) as since
    from (select i.due_at from dispatch_inbox as i where i.policy_name = policies.policy_name and not i.put_off order by i.id limit 100) as oldest
  ) as note on note.since < limits.now - limits.due_after
  where (problem.partitions > 0 or note.since is not null)
    and coalesce(ticks.last_at, '-infinity') < limits.now - limits.due_after
  union all
  select
    'warning', 'tick_behind', problem.policy_name, problem.partition_key,
    format('%s due for over %s though ticks run: they come round too slowly. The longest (%s%s) is due for %s; %s never checked. The ticks of the last 5 min looked at %s.',
      dispatch_say_count(problem.partitions, 'partition') || case when problem.partitions = 1 then ' is' else ' are' end,
      dispatch_say_span(limits.due_after), dispatch_say_name(problem.partition_key),
      case when problem.shard <> 'default' then ', shard ' || dispatch_say_name(problem.shard) else '' end,
      dispatch_say_span(limits.now - problem.since),
      dispatch_say_number(problem.never_checked) || case when problem.never_checked = 1 then ' was' else ' were' end,
      dispatch_say_count(ticks.seen, 'partition')),
    case
      when problem.shard <> all (ticks.shards) then
        format('No tick was for its shard: run a driver for it (pydispatch run --shard %s) or one for all shards (pydispatch run).',
          dispatch_say_word(left(problem.shard, 200)))
      else
        format('Run another driver (pydispatch run), or raise partition_batch_size, which is %s (select dispatch_define_policy(%L, ...)). If single ticks are slow, look for transactions that have been open for long (pg_stat_activity.xact_start).',
          policies.partition_batch_size, problem.policy_name)
    end,
    problem.since
  from problems as problem
  cross join limits
  join policies on policies.policy_name = problem.policy_name
  join ticks on ticks.policy_name = problem.policy_name
  where problem.problem = 'unchecked'
    and ticks.last_at >= limits.now - limits.due_after
  union all
  select
    'warning', 'limit_missing', problem.policy_name, problem.partition_key,
    format('%s wait in %s whose context has no number at %s, which a gate needs and for which it has no default; nothing of them is admitted. The longest (%s): for %s.',
      dispatch_say_count(problem.jobs, 'job'), dispatch_say_count(problem.partitions, 'partition'),
      (select string_agg(dispatch_say_name(path), ', ') from unnest(dispatch_missing_paths(policies.needed, problem.context)) as path),
      dispatch_say_name(problem.partition_key), dispatch_say_span(limits.now - problem.since)),
    format('Stage jobs with a context that has it; the newest one counts for all that wait. Or give the gate a default, as in {"ctx": "%s", "default": 1} (select dispatch_define_policy(%L, ...)). See "Context" in docs/policies.md.',
      (dispatch_missing_paths(policies.needed, problem.context))[1], problem.policy_name),
    problem.since
  from problems as problem
  cross join limits
  join policies on policies.policy_name = problem.policy_name
  where problem.problem = 'limit_missing'
  union all
  select
    'warning', 'limit_error', problem.policy_name, problem.partition_key,
    format('%s wait in %s whose limit function fails; nothing of them is admitted. The longest (%s): for %s. %s',
      dispatch_say_count(problem.jobs, 'job'), dispatch_say_count(problem.partitions, 'partition'),
      dispatch_say_name(problem.partition_key), dispatch_say_span(limits.now - problem.since), problem.blocked_reason),
    'Mend the function, or define the policy without it. It is asked again within 10 s; at once after '
      || dispatch_say_call('dispatch_resume', 'resume', problem.policy_name, problem.partition_key) || '.',
    problem.since
  from problems as problem
  cross join limits
  where problem.problem = 'limit_error'
  union all
  select
    case when problem.reason in ('concurrency_full', 'budget_exhausted', 'queue_full') then 'warning' else 'info' end,
    'waits_for_gate', problem.policy_name, problem.partition_key,
    format('%s had waiting jobs and none admitted for over %s: %s. The longest (%s, %s) for %s. %s for the gate, %s; %s in flight.',
      dispatch_say_count(problem.partitions, 'partition') || case when problem.partitions = 1 then ' has' else ' have' end,
      dispatch_say_span(limits.wait_after), problem.reason, dispatch_say_name(problem.partition_key),
      dispatch_say_count(problem.worst_jobs, 'job'), dispatch_say_span(limits.now - problem.since),
      case when problem.jobs = 1 then 'This job waits' else 'These ' || dispatch_say_count(problem.jobs, 'job') || ' wait' end,
      case when slots.policy_name is null then 'not for a worker' else 'and slots of this policy are held by jobs that no worker takes' end,
      dispatch_say_number(problem.in_flight) || case when problem.in_flight = 1 then ' is' else ' are' end),
    -- More slots would fill with jobs that no worker takes, too.
    case when slots.policy_name is null then dispatch_say_remedy(problem.reason, problem.policy_name, problem.partition_key)
      else 'See to the workers first, as the hint waits_for_worker says: an admitted job holds its slot until it has run.'
    end,
    problem.since
  from problems as problem
  cross join limits
  left join slots on slots.policy_name = problem.policy_name and problem.reason in ('concurrency_full', 'queue_full')
  where problem.problem = 'gate'
  union all
  select
    case when workers.alive = 0 then 'critical' else 'warning' end,
    'waits_for_worker', slots.policy_name, oldest.partition_key,
    format('%s admitted and no worker has taken %s, the longest (job %s, queue %s) for %s; %s. These wait for a worker, not for a gate. %s alive.',
      dispatch_say_count(slots.queued, 'job') || case when slots.queued = 1 then ' is' else ' are' end,
      case when slots.queued = 1 then 'it' else 'them' end,
      oldest.job_id, dispatch_say_name(oldest.queue_name), dispatch_say_span(limits.now - slots.oldest_queued_at),
      dispatch_say_number(slots.running) || case when slots.running = 1 then ' runs' else ' run' end,
      case workers.alive when 0 then 'No worker is' when 1 then '1 worker is' else workers.alive || ' workers are' end),
    case
      when workers.alive = 0 then
        format('Start a worker: procrastinate worker --queues %s', dispatch_say_word(oldest.queue_name))
      else
        format('The workers are busy, or none serves the queue (procrastinate worker --queues %s): start more. Or a job with the same lock runs for long: select * from dispatch_inflight where policy_name = %L order by admitted_at.',
          dispatch_say_word(oldest.queue_name), slots.policy_name)
    end,
    slots.oldest_queued_at
  from limits
  cross join slots
  cross join lateral dispatch_workers_alive(limits.now) as workers (alive)
  left join lateral dispatch_queued_since(slots.policy_name, slots.oldest_queued_at) as oldest on true
  union all
  select
    'warning', 'slow_backlog', backlogs.policy_name, null,
    format('%s wait and %s admitted in the last 5 min: at this pace the backlog is gone in %s.%s',
      dispatch_say_count(backlogs.jobs, 'job'), dispatch_say_count(ticks.jobs, 'job') || case when ticks.jobs = 1 then ' was' else ' were' end,
      dispatch_say_span(backlogs.jobs * interval '5 minutes' / ticks.jobs),
      coalesce(' ' || dispatch_say_count(backlogs.reason_jobs, 'job') || ' of it wait in partitions that ' || backlogs.reason || ' holds back.', '')),
    case
      when backlogs.reason_jobs > backlogs.jobs / 2 then dispatch_say_remedy(backlogs.reason, backlogs.policy_name, null)
      else format('No gate holds most of it: run another driver (pydispatch run), or raise admission_batch_size and partition_batch_size (select dispatch_define_policy(%L, ...)).',
        backlogs.policy_name)
    end,
    trends.backlog_since
  from backlogs
  cross join limits
  join policies on policies.policy_name = backlogs.policy_name and policies.paused_at is null
  join ticks on ticks.policy_name = backlogs.policy_name and ticks.jobs > 0
  -- Only what has been there all the time that the pace is measured over.
  join trends on trends.policy_name = backlogs.policy_name and trends.backlog_since <= limits.now - interval '4 minutes'
  where backlogs.jobs * interval '5 minutes' / ticks.jobs > limits.drain_after
  union all
  select
    'warning', 'pending_grows', trends.policy_name, null,
    format('%s wait now; 15 min ago it was %s (each a mean of 5 min). Meanwhile jobs are admitted, %s in the last 5 min: more comes in than goes.',
      dispatch_say_count(trends.late::bigint, 'job'), dispatch_say_number(trends.early::bigint), dispatch_say_number(ticks.jobs)),
    case when backlogs.reason_jobs > backlogs.jobs / 2 then dispatch_say_remedy(backlogs.reason, trends.policy_name, null)
      else 'See who stages so much: select partition_key, pending_count from dispatch_partition_status where policy_name = '
        || quote_literal(trends.policy_name) || ' order by pending_count desc limit 20. Run another driver if ticks are the limit (pydispatch run).'
    end,
    limits.now - interval '15 minutes'
  from trends
  cross join limits
  join policies on policies.policy_name = trends.policy_name and policies.paused_at is null
  join ticks on ticks.policy_name = trends.policy_name and ticks.jobs > 0
  left join backlogs on backlogs.policy_name = trends.policy_name
  where trends.early < trends.middle
    and trends.middle < trends.late
    -- A hundred jobs more are no trend, whatever share they are.
    and trends.late > greatest(trends.early + 100, trends.early * (1 + limits.growth_percent / 100))
  union all
  select
    case when ticks.failures > ticks.jobs then 'critical' else 'warning' end,
    'handoff_failures', ticks.policy_name, null,
    format('%s of %s could not be handed off in the last 5 min (%s %%) and %s set aside as dead.',
      dispatch_say_number(ticks.failures), dispatch_say_count(ticks.failures + ticks.jobs, 'job'),
      round(100.0 * ticks.failures / (ticks.failures + ticks.jobs), 1), case when ticks.failures = 1 then 'is' else 'are' end),
    format('See their errors (select id, task_name, error from dispatch_dead_jobs where policy_name = %L order by died_at desc limit 20; or: pydispatch dead list --policy %s). A task that no application of a driver knows means that the driver is older than what enqueues: restart it.',
      ticks.policy_name, dispatch_say_word(ticks.policy_name)),
    ticks.first_failure_at
  from ticks
  cross join limits
  where ticks.failures > 0
    and ticks.failures * 100.0 > limits.failure_percent * (ticks.failures + ticks.jobs)
  union all
  select
    'warning', 'slow_tick', ticks.policy_name, null,
    format('A tick took %s ms in the last 5 min; the driver ends one at tick_max_duration (25 s by default), and nothing of it remains.',
      dispatch_say_number(ticks.longest_ms::bigint)),
    format('Lower partition_batch_size and admission_batch_size (select dispatch_define_policy(%L, ...)); see whether a limit function is slow, or a transaction has been open for long (pg_stat_activity.xact_start). See "What to watch" in docs/operations.md.',
      ticks.policy_name),
    ticks.longest_at
  from ticks
  cross join limits
  where ticks.longest_ms > limits.tick_ms
  union all
  select
    'warning', 'dead_jobs', dead.policy_name, newest.partition_key,
    format('%s could not be handed off and %s set aside, the last one (%s, %s) %s ago: %s',
      dispatch_say_count(dead.jobs, 'job'), case when dead.jobs = 1 then 'is' else 'are' end, newest.id, newest.task_name,
      dispatch_say_span(limits.now - newest.died_at), left(newest.error, 200)),
    format('Mend the cause, then select dispatch_requeue_dead(%s); or: pydispatch dead requeue %s. Or throw it away: select dispatch_discard_dead(%s); or: pydispatch dead discard %s. All of them: pydispatch dead list --policy %s',
      newest.id, newest.id, newest.id, newest.id, dispatch_say_word(dead.policy_name)),
    dead.since
  from dead
  cross join limits
  cross join lateral (
    select d.id, d.partition_key, d.task_name, d.error, d.died_at
    from dispatch_dead_jobs as d
    where d.policy_name = dead.policy_name
    order by d.died_at desc
    limit 1
  ) as newest
  union all
  select
    'warning', 'dead_notes', notes.policy_name, null,
    format('%s could not be folded and %s set aside, the last one (%s, of kind %s) %s ago: %s',
      dispatch_say_count(notes.notes, 'note'), case when notes.notes = 1 then 'is' else 'are' end, newest.id, newest.kind,
      dispatch_say_span(limits.now - newest.died_at), left(newest.error, 200)),
    format('See who wrote it (select * from dispatch_dead_notes where policy_name = %L order by died_at desc limit 20), then select dispatch_requeue_note(%s), or throw it away: select dispatch_discard_note(%s). Until then the counters of its partition lack what it says.',
      notes.policy_name, newest.id, newest.id),
    notes.since
  from (
    select policy_name, count(*) as notes, min(died_at) as since from dispatch_dead_notes group by policy_name
  ) as notes
  cross join limits
  cross join lateral (
    select n.id, n.kind, n.error, n.died_at from dispatch_dead_notes as n where n.policy_name = notes.policy_name order by n.died_at desc, n.id desc limit 1
  ) as newest
  union all
  select
    'warning', 'stalled_jobs', stalled.policy_name, null,
    format('%s on workers that gave no sign for %s, as job %s, silent for %s.',
      dispatch_say_count(stalled.jobs, 'job') || case when stalled.jobs = 1 then ' runs' else ' run' end,
      dispatch_say_span(limits.stale_after), stalled.job_id, dispatch_say_span(limits.now - stalled.since)),
    case when policies.stalled = 'retry' then
      'A sweep retries them: select dispatch_sweep(); or: pydispatch sweep. A driver does so each 30 s.'
    else
      format('If their workers are gone (select * from dispatch_stalled_jobs), retry them: app.job_manager.retry_job_by_id; the sweep does so for a policy with "stalled": "retry" (select dispatch_define_policy(%L, ...)).',
        stalled.policy_name)
    end,
    stalled.since
  from (
    select s.policy_name, count(*) as jobs, min(s.last_sign_at) as since, min(s.job_id) as job_id
    from limits
    cross join lateral dispatch_stalled(limits.now, limits.now - limits.stale_after) as s
    group by s.policy_name
  ) as stalled
  cross join limits
  join policies on policies.policy_name = stalled.policy_name
  union all
  select
    case when problem.jobs > 0 and policies.paused_at < limits.now - limits.pause_after then 'warning' else 'info' end,
    'paused', policies.policy_name, null,
    format('The policy has been paused for %s; %s.', dispatch_say_span(limits.now - policies.paused_at),
      dispatch_say_count(coalesce(problem.jobs, 0), 'job') || case when problem.jobs = 1 then ' waits' else ' wait' end),
    'To go on: ' || dispatch_say_call('dispatch_resume', 'resume', policies.policy_name) || '.',
    policies.paused_at
  from policies
  cross join limits
  left join problems as problem on problem.policy_name = policies.policy_name and problem.problem = 'paused'
  where policies.paused_at is not null
  union all
  select
    case when problem.jobs > 0 and pauses.since < limits.now - limits.pause_after then 'warning' else 'info' end,
    'paused', policies.policy_name, pauses.partition_key,
    format('%s paused, %s; %s in paused partitions.',
      dispatch_say_count(pauses.partitions, 'partition') || case when pauses.partitions = 1 then ' is' else ' are' end,
      case when pauses.partitions = 1 then '' else 'the longest ' end
        || dispatch_say_name(pauses.partition_key) || ' for ' || dispatch_say_span(limits.now - pauses.since),
      dispatch_say_count(coalesce(problem.jobs, 0), 'job') || case when problem.jobs = 1 then ' waits' else ' wait' end),
    'To go on: ' || dispatch_say_call('dispatch_resume', 'resume', policies.policy_name, pauses.partition_key) || '.'
      || case when pauses.partitions > 1 then ' All of them: select partition_key from dispatch_pauses where policy_name = '
        || quote_literal(policies.policy_name) || '.' else '' end,
    pauses.since
  from (
    select
      q.policy_name, count(*) as partitions, min(q.paused_at) as since, (array_agg(q.partition_key order by q.paused_at, q.partition_key))[1] as partition_key
    from dispatch_pauses as q
    where q.partition_key is not null
    group by q.policy_name
  ) as pauses
  cross join limits
  join policies on policies.policy_name = pauses.policy_name and policies.paused_at is null
  left join problems as problem on problem.policy_name = pauses.policy_name and problem.problem = 'paused'
  union all
  select
    'info', 'shard_finer', policy_name, null,
    format('shard_by names %s, which partition_by does not. A partition stays in the shard of its first job, so its limits hold over all shards, and one shard''s ticks admit what all of them should share.',
      (select string_agg(dispatch_say_name(path), ', ') from unnest(shard_by) as path where path <> all (partition_by))),
    format('If the limits are meant per shard, add the path to partition_by; else take it out of shard_by (select dispatch_define_policy(%L, ...)).',
      policy_name),
    updated_at
  from policies
  where not shard_by <@ partition_by
  union all
  select
    'warning', 'no_sweep', null, null,
    coalesce('The last sweep was ' || dispatch_say_span(limits.now - swept.at) || ' ago.', 'No sweep is known.')
      || ' Without one, the slots of lost workers are not given back, and nothing old is removed.',
    'Run a driver, which sweeps (pydispatch run), or have cron call dispatch_sweep() each minute. Now, by hand: select * from dispatch_sweep(); or: pydispatch sweep. See "What runs" in docs/operations.md.',
    coalesce(swept.at, first_policy.created_at)
  from limits
  cross join (
    select min(created_at) as created_at from policies
  ) as first_policy
  cross join (
    select max(last_at) as at from trends
  ) as swept
  where first_policy.created_at < limits.now - limits.sweep_after
    and coalesce(swept.at, '-infinity') < limits.now - limits.sweep_after
)
select level, hint, policy_name, partition_key, message, what_to_do, since
from hints
order by array_position(array['critical', 'warning', 'info'], level), policy_name nulls first, hint, partition_key;
comment on view dispatch_hints is 'What an operator should do now, the worst first; no row when all is well. One row for each problem of a policy, whatever the number of partitions that have it. Thresholds are the settings hint_...; docs/operations.md has every hint.';
comment on column dispatch_hints.level is 'critical: jobs do not move; warning: somebody has to look; info: good to know.';
comment on column dispatch_hints.hint is 'Which problem: a word that stays the same, for alerts to go by.';
comment on column dispatch_hints.policy_name is 'The policy; null for the whole installation.';
comment on column dispatch_hints.partition_key is 'The partition that has had the problem longest, as an example; null when it is the policy''s.';
comment on column dispatch_hints.message is 'What is wrong, with the numbers.';
comment on column dispatch_hints.what_to_do is 'What to do: the call in SQL and on the command line, or where to read.';
comment on column dispatch_hints.since is 'Since when, as far as is known.';
