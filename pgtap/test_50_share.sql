-- Sharing a tick: the decay that orders claims, max-min shares of a budget, and both through whole ticks.
begin;
select plan(52);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';

create function pg_temp.clock(p_seconds numeric) returns void language sql as $$
  select set_config('dispatch.fake_now', ('2026-01-01 00:00+00'::timestamptz + make_interval(secs => p_seconds::float8))::text, true)
$$;

-- Decay ---------------------------------------------------------------------------------------------

select is(round(dispatch_decay(decayed, elapsed, half_life)::numeric, 6), expected, sentence)
from (values
  (8::float8, 0::float8, 60::float8, 8::numeric, 'no time decays nothing'),
  (8, 60, 60, 4, 'a half-life halves'),
  (8, 180, 60, 1, 'three halve three times'),
  (8, 30, 60, 5.656854, 'half a half-life divides by the root of 2'),
  (8, 60, null, 8, 'without a half-life nothing decays'),
  (8, null, 60, 8, 'nor does what was never served'),
  (8, -60, 60, 8, 'a clock that went back adds nothing'),
  (8, -1e9, 0.001, 8, 'however far'),
  (8, 1e9, 60, 0, 'after years of idling next to nothing is left, without an underflow'),
  (0, 1e12, 0.001, 0, 'nothing stays nothing')
) as decays (decayed, elapsed, half_life, expected, sentence);

-- Shares --------------------------------------------------------------------------------------------

select is(dispatch_share(demands::integer[], weights::float8[], budget), shares::integer[], sentence)
from (values
  ('{5,5,5}', '{1,1,1}', null, '{5,5,5}', 'without a budget everybody gets what it wants'),
  ('{5,5,5}', '{1,1,1}', 15, '{5,5,5}', 'a budget that is enough is no limit'),
  ('{5,5,5}', '{1,1,1}', 99, '{5,5,5}', 'nor is a larger one, and nobody gets more than it wants'),
  ('{5,5,5}', '{1,1,1}', 9, '{3,3,3}', 'equals share equally'),
  ('{5,5,5}', '{1,1,1}', 10, '{4,3,3}', 'what does not divide goes to the first'),
  ('{5,5,5}', '{1,1,1}', 11, '{4,4,3}', 'one each'),
  ('{1,9,9}', '{1,1,1}', 11, '{1,5,5}', 'what one does not want goes to those who do'),
  ('{2,100,4,100}', '{1,1,1,1}', 20, '{2,7,4,7}', 'in as many rounds as it takes'),
  ('{9,1}', '{1,1}', 9, '{8,1}', 'a small want is met in full beside a large one'),
  ('{9,9,9,9}', '{1,1,1,1}', 2, '{1,1,0,0}', 'of less than one each the first get one'),
  ('{0,9,0,9}', '{1,1,1,1}', 1, '{0,1,0,0}', 'who wants nothing gets nothing and takes no turn'),
  ('{0,0}', '{1,1}', 5, '{0,0}', 'when nobody wants anything all is left over'),
  ('{9,9}', '{2,1}', 9, '{6,3}', 'a weight of 2 gets twice as much'),
  ('{9,9}', '{0.5,0.25}', 9, '{6,3}', 'weights count by their proportion'),
  ('{4,9,9}', '{2,1,1}', 10, '{4,3,3}', 'also when the heavy one does not want its share'),
  ('{9,9,9}', '{3,2,1}', 12, '{6,4,2}', '3 to 2 to 1'),
  ('{100,100}', '{1,99}', 50, '{1,49}', 'a light one gets what rounding leaves'),
  ('{9,9}', '{1e6,1e-6}', 10, '{9,1}', 'weights far apart: the light one gets what the heavy one leaves'),
  ('{9,9}', '{1e-6,1e6}', 9, '{0,9}', 'which may be nothing'),
  ('{9}', '{1}', 1, '{1}', 'one alone gets all'),
  ('{}', '{}', 5, '{}', 'among nobody nothing is shared')
) as shares (demands, weights, budget, shares, sentence);

-- 300 cases of no order.
create temporary table cases on commit drop as
select n, demands, weights, budget, dispatch_share(demands, weights, budget) as shares
from generate_series(1, 300) as n
cross join lateral (
  select
    array(select (n * 7919 + i * i * 104729) % 13 from generate_series(1, 1 + n % 9) as i) as demands,
    array(select 1 + (n * 31 + i * 17) % 5 from generate_series(1, 1 + n % 9) as i)::float8[] as weights,
    1 + n * 101 % 40 as budget
) as given;
create temporary table rows on commit drop as
select n, demand, weight, share, budget, ordinality as i
from cases
cross join unnest(demands, weights, shares) with ordinality as u (demand, weight, share, ordinality);
select is_empty(
  'select n from rows group by n, budget having sum(share) <> least(budget, sum(demand))',
  'the budget or the demand is used up');
select is_empty('select * from rows where share not between 0 and demand', 'nobody gets less than nothing or more than it wants');
select is_empty(
  'select a.n, a.i, b.i from rows as a join rows as b using (n) where a.share < a.demand and b.share - 1 > 0 and (b.share - 1) / b.weight > (a.share + 1) / a.weight',
  'whoever wants more has, to within a job, as much for its weight as any other');

-- Budgets through ticks -----------------------------------------------------------------------------

create function pg_temp.stage(p_policy text, p_key text, p_jobs integer, p_context jsonb default '{}') returns void language sql as $$
  select dispatch_stage_many(p_policy, (select jsonb_agg(jsonb_build_object('task_name', p_key, 'context', p_context || jsonb_build_object('k', p_key))) from generate_series(1, p_jobs)));
$$;
-- Ticks and tells what it admitted: keys in the order of the hand-off.
create function pg_temp.tick(p_policy text) returns text language plpgsql as $$
declare
  v_jobs constant dispatch_payload[] := array(select job from dispatch_admit(p_policy) as job);
begin
  perform dispatch_settle(v_jobs[1].handoff_id) where v_jobs[1].handoff_id is not null;
  return (
    select string_agg(arrived.task_name, '' order by job.ordinality)
    from unnest(v_jobs) with ordinality as job
    join procrastinate_jobs as arrived on arrived.id = job.id);
end $$;

do $$ begin
  perform dispatch_define_policy('budget', '{"partition_by": "k", "tick_admission_budget": 6}');
  perform pg_temp.stage('budget', 'a', 100), pg_temp.clock(1), pg_temp.stage('budget', 'b', 1), pg_temp.clock(2), pg_temp.stage('budget', 'c', 100), pg_temp.clock(3);
end $$;
select is(pg_temp.tick('budget'), 'abcaca', 'a budget is shared in turns, the longest due first; what one does not want goes to the others');
select is(pg_temp.tick('budget'), 'cacaca', 'who was served less lately comes first');
do $$ begin perform pg_temp.stage('budget', 'd', 100); end $$;
select is(pg_temp.tick('budget'), 'dcadca', 'a newcomer before all others');
do $$ begin perform pg_temp.clock(3 + 3600), pg_temp.stage('budget', 'b', 1); end $$;
select is(pg_temp.tick('budget'), 'bdcadc', 'after a long time all that is forgotten but the order');
select is(decayed_admits::numeric, 2::numeric, 'for then only the last jobs weigh') from dispatch_partitions where policy_name = 'budget' and partition_key = 'd';

-- case: one loud key and nine quiet ones
do $$ begin
  perform dispatch_define_policy('loud', '{"partition_by": "k", "tick_admission_budget": 10}');
  perform pg_temp.stage('loud', 'L', 1000), pg_temp.clock(4000);
  perform pg_temp.stage('loud', i::text, 1) from generate_series(1, 9) as i;
end $$;
select is(length(replace(pg_temp.tick('loud'), 'L', '')), 9, 'beside one with 1000 jobs nine with one job each are all served in one tick');
select is(pg_temp.tick('loud'), 'LLLLLLLLLL', 'and when they are through the loud one has the whole budget');

-- Fewer jobs than partitions
do $$ begin
  perform dispatch_define_policy('scarce', '{"partition_by": "k", "tick_admission_budget": 2, "gates": [{"type": "throttle", "rate": 100, "per": 60}]}');
  perform pg_temp.clock(5000 + ascii(k)), pg_temp.stage('scarce', k, 9) from unnest('{a,b,c,d,e}'::text[]) as k;
  perform pg_temp.clock(6000);
end $$;
select is(pg_temp.tick('scarce'), 'ab', 'a budget of two serves the two that are due longest');
select results_eq(
  $$select partition_key, blocked_reason, due_at = dispatch_now(), (gate_state -> 'throttle' ->> 'tokens')::numeric from dispatch_partitions where policy_name = 'scarce' order by 1$$,
  $$values ('a', null, true, 99::numeric), ('b', null, true, 99), ('c', 'budget_exhausted', true, 100), ('d', 'budget_exhausted', true, 100), ('e', 'budget_exhausted', true, 100)$$,
  'the others say so, are due again at once and pay nothing');
select is(
  (select string_agg(distinct letter, '') from regexp_split_to_table(pg_temp.tick('scarce') || pg_temp.tick('scarce'), '') as letter where letter not in ('a', 'b')), 'cde',
  'within two more ticks everybody has had its turn');
select results_eq(
  $$select jobs_admitted, partitions_seen, partitions_admitted, partitions_denied, denied_reasons from dispatch_tick('scarce')$$,
  $$values (2, 5, 2, 3, '{"budget_exhausted": 3}'::jsonb)$$, 'a tick counts whom the budget left out');

-- Work-conserving: what gates and schedules hold back is no demand
do $$ begin
  perform pg_temp.clock(7000);
  perform dispatch_define_policy('conserving', '{"partition_by": "k", "tick_admission_budget": 10, "gates": [{"type": "concurrency", "max": {"ctx": "max"}}]}');
  perform pg_temp.stage('conserving', 'a', 50, '{"max": 2}'), pg_temp.stage('conserving', 'b', 3, '{"max": 50}'), pg_temp.stage('conserving', 'c', 50, '{"max": 50}');
  perform dispatch_stage('conserving', 'd', p_context => '{"k": "d", "max": 50}', p_scheduled_at => '2030-01-01 00:00+00') from generate_series(1, 50);
  perform dispatch_stage('conserving', 'd', p_context => '{"k": "d", "max": 50}');
end $$;
select is(
  (select string_agg(letter, '' order by letter) from regexp_split_to_table(pg_temp.tick('conserving'), '') as letter), 'aabbbccccd',
  'of a budget of 10, two go where the cap is 2, three where three wait, one where the rest is scheduled, the rest where there is more');

-- case: tokens are spent twice when leftover budget goes round a second time in one tick
do $$ begin
  perform pg_temp.clock(7500);
  perform dispatch_define_policy('leftover', '{"partition_by": "k", "tick_admission_budget": 30, "gates": [{"type": "throttle", "rate": {"ctx": "rate"}, "per": 3600}]}');
  perform pg_temp.stage('leftover', 'a', 50, '{"rate": 2}'), pg_temp.stage('leftover', 'b', 3, '{"rate": 50}'), pg_temp.stage('leftover', 'c', 50, '{"rate": 12}'), pg_temp.stage('leftover', 'd', 50, '{"rate": 20}');
end $$;
select is(
  (select string_agg(letter || jobs, ' ' order by letter) from (select letter, count(*) as jobs from regexp_split_to_table(pg_temp.tick('leftover'), '') as letter group by 1) as given),
  'a2 b3 c12 d13', 'what tenants with few tokens leave of the budget goes to those who have more');
select results_eq(
  $$select partition_key, (gate_state -> 'throttle' ->> 'tokens')::numeric from dispatch_partitions where policy_name = 'leftover' order by 1$$,
  $$values ('a', 0::numeric), ('b', 47), ('c', 0), ('d', 7)$$, 'each job that went has paid one token, however often the budget went round');
select is(pg_temp.tick('leftover'), 'ddddddd', 'and the next tick finds what is left in the buckets');

-- Weights
do $$ begin
  perform pg_temp.clock(8000);
  perform dispatch_define_policy('weighted', '{"partition_by": "k", "tick_admission_budget": 18, "fairness": {"weight": {"ctx": "plan.weight"}}}');
  perform pg_temp.stage('weighted', 'g', 50, '{"plan": {"weight": 4}}'), pg_temp.stage('weighted', 's', 50, '{"plan": {"weight": 1}}'), pg_temp.stage('weighted', 'n', 50),
    pg_temp.stage('weighted', 'z', 50, '{"plan": {"weight": 0}}'), pg_temp.stage('weighted', 'm', 50, '{"plan": {"weight": -3}}'), pg_temp.stage('weighted', 'e', 50, '{"plan": {"weight": 1e-400}}');
end $$;
select is(
  (select string_agg(letter, '' order by letter) from regexp_split_to_table(pg_temp.tick('weighted'), '') as letter), 'eeggggggggmmnnsszz',
  'a weight of 4 counts four, one that is missing or not above 0 counts one');

-- Without a half-life
do $$ begin
  perform dispatch_define_policy('due', '{"partition_by": "k", "admission_batch_size": 2, "fairness": {"half_life": null}}');
  perform pg_temp.clock(9000), pg_temp.stage('due', 'b', 3), pg_temp.clock(9001), pg_temp.stage('due', 'a', 3), pg_temp.clock(9002);
end $$;
select is(pg_temp.tick('due'), 'baba', 'without a budget each partition is admitted its batch, in turns');
do $$ begin perform pg_temp.clock(9003), pg_temp.stage('due', 'c', 1); end $$;
select is(right(pg_temp.tick('due'), 1), 'c', 'without a half-life the longest due comes first, however little the others were served');

select * from finish();
rollback;
