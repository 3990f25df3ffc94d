-- What a monitoring system reads beside dispatch_policy_status. Neither view reads dispatch_staged_jobs.

create or replace view dispatch_totals as
select policy_name, parts.counter, parts.label, sum(parts.value) as value
from dispatch_policies
join (
  select t.policy_name, t.counter, t.label, t.value
  from dispatch_tick_totals as t
  union all
  select sample.policy_name, c.counter, c.label, c.value
  from dispatch_tick_samples as sample
  cross join lateral dispatch_tick_counts(sample) as c
  where not sample.counted
  union all
  -- Each counter of each policy begins at 0, so that its first step is seen as one.
  select policy.policy_name, c.counter, c.label, 0
  from dispatch_policies as policy
  cross join lateral dispatch_tick_counts(row(0, '-infinity', policy.policy_name, null, 0, 0, 0, 0, 0,
    (select jsonb_object_agg(reason, 0) from unnest(dispatch_denial_reasons()) as reason), 0, true)::dispatch_tick_samples) as c
) as parts using (policy_name)
group by policy_name, parts.counter, parts.label;
comment on view dispatch_totals is 'Per policy, counters that never go back: what all its ticks did, also those whose samples are removed. Exact at every moment: each committed tick is in it once.';
comment on column dispatch_totals.policy_name is 'The policy. One that is dropped and defined anew within metrics_retention goes on counting.';
comment on column dispatch_totals.counter is 'ticks (that looked at a partition; forced admissions count as ticks); jobs_admitted; handoff_failures (jobs set aside as dead); partitions_denied; tick_seconds (their sum); tick_seconds_bucket.';
comment on column dispatch_totals.label is 'For partitions_denied the reason, for tick_seconds_bucket its upper bound in seconds (a tick counts in each bucket that it fits in); else empty.';
comment on column dispatch_totals.value is 'The count, or the sum.';
