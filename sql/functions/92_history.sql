-- What is written down for people to look back on: the samples of ticks, one of each policy a sweep, and who did what by
-- hand.

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

create or replace function dispatch_sample_policies(p_now timestamptz)
returns bigint
language plpgsql
set search_path from current
as $$
declare
  v_count bigint;
begin
  -- More often than that tells a chart nothing; sweeps may be called by many.
  if exists (select from dispatch_policy_samples where at > p_now - interval '10 seconds' and at <= p_now) then
    return 0;
  end if;
  insert into dispatch_policy_samples (policy_name, at, partitions, pending, waiting, in_flight, due, blocked, queued,
    oldest_wait_seconds, oldest_queued_seconds, lag_ms)
  select
    status.policy_name, p_now, status.partitions, status.pending, status.waiting, status.in_flight, status.due, status.blocked,
    status.queued, extract(epoch from status.oldest_wait), extract(epoch from p_now - status.oldest_queued_at), lags.lag_ms
  from dispatch_policy_status as status
  left join (
    select p.policy_name, avg(stats.ewma_lag_ms) as lag_ms
    from dispatch_adaptive_stats as stats
    join dispatch_partitions as p on p.id = stats.partition_id
    group by p.policy_name
  ) as lags on lags.policy_name = status.policy_name
  on conflict on constraint dispatch_policy_samples_pkey do nothing;
  get diagnostics v_count = row_count;
  return v_count;
end;
$$;
comment on function dispatch_sample_policies(timestamptz) is 'Writes a sample of each policy, unless there is one of the last 10 seconds; returns how many it wrote. One pass over the partitions, the slots and the adaptive gates'' statistics.';

create or replace function dispatch_audit(p_actor text, p_action text, p_policy text, p_partition_key text, p_job_id bigint, p_outcome jsonb)
returns void
language plpgsql
set search_path from current
as $$
begin
  if coalesce(p_actor, '') = '' or coalesce(p_action, '') = '' then
    perform dispatch_raise('PD009', 'an audit entry needs an actor and an action', null, 'Nothing was written. Say who did what.');
  end if;
  insert into dispatch_audit_log (at, actor, action, policy_name, partition_key, job_id, outcome)
  values (dispatch_now(), left(p_actor, 200), left(p_action, 200), p_policy, p_partition_key, p_job_id, coalesce(p_outcome, '{}'));
end;
$$;
comment on function dispatch_audit(text, text, text, text, bigint, jsonb) is 'Writes down who did what by hand. Call it in the transaction of the action, so that both are done or neither. Policy, partition, job and outcome may be null; actor and action are cut at 200 characters. Raises PD009 without an actor or an action.';
