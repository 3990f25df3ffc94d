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

create or replace view dispatch_slot_use as
with gates as materialized (
  select policy.policy_name, gate ->> 'name' as gate_name, gate ->> 'type' = 'adaptive_concurrency' as adapts, highest, initial, lowest
  from dispatch_policies as policy
  cross join jsonb_array_elements(policy.gates) as gate
  cross join dispatch_limit(gate -> 'max') as highest
  cross join dispatch_limit(gate -> 'initial_max') as initial
  cross join dispatch_limit(gate -> 'min') as lowest
  where gate ->> 'type' in ('concurrency', 'adaptive_concurrency')
    -- What a limit function would say is known to a tick alone.
    and not policy.gates @? '$[*] ? (@.type == "concurrency" || @.type == "adaptive_concurrency").*.sql'
), caps as (
  select
    p.policy_name,
    p.in_flight_count,
    greatest(floor(min(
      case
        when gates.adapts then
          dispatch_adaptive_cap(stats.current_max, p.in_flight_count, params.initial_max::integer, greatest(params.min, 1)::integer, params.max::integer)
        else params.max
      end
    )), 0) as slots
  from dispatch_partitions as p
  join gates on gates.policy_name = p.policy_name
  left join dispatch_adaptive_stats as stats on stats.partition_id = p.id and stats.gate_name = gates.gate_name
  -- As dispatch_aimd_params() has them: its call for each partition would take most of the time.
  cross join lateral (
    select
      least(greatest(coalesce(
        dispatch_to_number(p.context #> (highest).path), (highest).fallback, case when gates.adapts then 1e9 else 0 end), 0), 1e9) as max,
      least(greatest(coalesce(dispatch_to_number(p.context #> (initial).path), (initial).fallback), 0), 1e9) as initial_max,
      least(greatest(coalesce(dispatch_to_number(p.context #> (lowest).path), (lowest).fallback), 0), 1e9) as min
  ) as params
  where p.in_flight_count > 0
  group by p.id
)
select
  policy_name,
  count(*) as partitions,
  sum(in_flight_count)::bigint as in_flight,
  sum(slots)::bigint as slots,
  count(*) filter (where in_flight_count >= slots) as full_partitions
from caps
group by policy_name;
comment on view dispatch_slot_use is 'Per policy, how full its caps are: of the partitions with jobs in flight, the slots used and those there are. No row for a policy that has no cap, asks a limit function for it, or has nothing in flight.';
comment on column dispatch_slot_use.policy_name is 'The policy.';
comment on column dispatch_slot_use.partitions is 'Partitions with jobs in flight.';
comment on column dispatch_slot_use.in_flight is 'Slots that they use.';
comment on column dispatch_slot_use.slots is 'Slots that their lowest caps give them together.';
comment on column dispatch_slot_use.full_partitions is 'Those of them that use all of theirs.';
