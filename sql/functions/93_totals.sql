-- Counters that never go back, though the samples they are made of are removed: what one sample counts for, and how the
-- sweep adds samples up.
-- Invariant: a sample is marked as counted in the statement that adds it, and removed only afterwards. So whoever sums up
-- totals and uncounted samples in one statement sees each tick that has committed exactly once.

create or replace function dispatch_denial_reasons()
returns text[]
language sql
immutable
parallel safe
return array['throttle_empty', 'rate_zero', 'concurrency_full', 'max_zero', 'budget_exhausted', 'queue_full', 'paused', 'limit_error'];
comment on function dispatch_denial_reasons() is 'Every reason for which a partition can be denied.';

create or replace function dispatch_tick_counts(p_sample dispatch_tick_samples)
returns table (counter text, label text, value numeric)
language sql
immutable
parallel safe
begin atomic
  select 'ticks', '', 1::numeric
  union all
  select 'jobs_admitted', '', p_sample.jobs_admitted
  union all
  select 'handoff_failures', '', p_sample.handoff_failures
  union all
  select 'tick_seconds', '', round(greatest(p_sample.duration_ms, 0)::numeric / 1000, 6)
  union all
  select 'tick_seconds_bucket', bound::text, case when p_sample.duration_ms <= bound * 1000 then 1 else 0 end
  from unnest(array[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0]) as bound
  union all
  select 'partitions_denied', reason.key, reason.value::numeric
  from jsonb_each_text(p_sample.denied_reasons) as reason;
end;
comment on function dispatch_tick_counts(dispatch_tick_samples) is 'What one tick adds to each counter of dispatch_totals. Buckets are cumulative: a tick counts in each whose bound it does not exceed.';

create or replace function dispatch_count_ticks(p_now timestamptz, p_limit integer)
returns bigint
language plpgsql
set search_path from current
as $$
declare
  v_count bigint;
begin
  with picked as (
    select id
    from dispatch_tick_samples
    where not counted
    order by id
    limit p_limit
    for update skip locked
  ), counted as (
    update dispatch_tick_samples as s
    set counted = true
    from picked
    where s.id = picked.id
    returning s as sample
  ), added as (
    insert into dispatch_tick_totals as t (policy_name, counter, label, value, updated_at)
    select (sample).policy_name, c.counter, c.label, sum(c.value), p_now
    from counted
    cross join lateral dispatch_tick_counts(sample) as c
    group by (sample).policy_name, c.counter, c.label
    order by (sample).policy_name, c.counter, c.label
    on conflict on constraint dispatch_tick_totals_pkey do update
    set (value, updated_at) = (t.value + excluded.value, excluded.updated_at)
  )
  select count(*) into v_count from counted;

  delete from dispatch_tick_totals as t
  where t.updated_at < p_now - dispatch_setting_span('metrics_retention')
    and not exists (select from dispatch_policies as policy where policy.policy_name = t.policy_name);
  return v_count;
end;
$$;
comment on function dispatch_count_ticks(timestamptz, integer) is 'Adds tick samples to the totals, each once, and forgets the totals of policies that are gone for metrics_retention.';
