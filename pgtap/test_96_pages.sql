-- Pages: what they show, what they refuse. Walks and hostile cursors are in tests/properties/test_pages.py.
begin;
select plan(28);

set local dispatch.fake_now = '2026-01-01 00:00:00+00';
set local timezone = 'UTC';

create function pg_temp.keys(p_page text)
returns text[]
language plpgsql
as $$
declare
  v_keys text[];
begin
  execute format('select array_agg(partition_key) from dispatch_partitions_page(%s)', p_page) into v_keys;
  return v_keys;
end;
$$;

create function pg_temp.cursor(p_json text)
returns text
language sql
return translate(encode(convert_to(p_json, 'UTF8'), 'base64'), e'+/=\n', '-_');

do $$
begin
  perform dispatch_define_policy('p', '{"partition_by": "k"}');
  perform dispatch_define_policy('q', '{"partition_by": "k"}');
  perform dispatch_define_policy('wait', '{"partition_by": "k"}');
end;
$$;
insert into dispatch_partitions (id, policy_name, partition_key, first_seen_at, pending_count, total_admitted, in_flight_count,
  last_checked_at, last_admitted_at, waiting_since, blocked_reason)
select dispatch_partition_id(policy, key), policy, key, '2025-01-01 00:00:00+00', pending, admitted, 0, checked::timestamptz, last::timestamptz,
  case when pending > 0 then '2025-12-31 23:59:00+00'::timestamptz end, null
from (
  values
    ('p', 'b', 3, 10, '2025-12-31 00:00:00.000001+00', null),
    ('p', 'a', 0, 30, null, '2025-12-30 00:00:00+00'),
    ('p', 'B', 7, 20, '2025-12-31 00:00:00.000002+00', '2025-12-31 00:00:00+00'),
    ('q', '100%_\', 1, 5, '2025-12-29 00:00:00+00', '2025-12-29 00:00:00+00')
) as given (policy, key, pending, admitted, checked, last);

select is(pg_temp.keys($$'p'$$), '{B,b,a}', 'the most waiting come first by default');
select is(pg_temp.keys($$'p', 'admitted'$$), '{a,B,b}', 'admitted: the most ever admitted come first');
select is(pg_temp.keys($$'p', 'stale'$$), '{a,b,B}', 'stale: never looked at comes first, then the longest ago, to the microsecond');
select is(pg_temp.keys($$'p', 'recent'$$), '{B,a,b}', 'recent: the last admission comes first, never admitted last');
select is(pg_temp.keys($$'p', 'key'$$), '{B,a,b}', 'key: bytes decide, whatever the language of the database');
select is(pg_temp.keys($$null, 'key'$$), array['100%_\', 'B', 'a', 'b'], 'a null policy shows the partitions of all');
select is(pg_temp.keys($$'p', p_only_pending => true$$), '{B,b}', 'partitions without waiting jobs can be left out');
select is(pg_temp.keys($$'p', p_search => 'B'$$), '{B,b}', 'a search takes upper and lower case alike');
select is(pg_temp.keys($$null, p_search => '0%_'$$), array['100%_\'], 'a search is for the very characters');
select is(pg_temp.keys($$null, p_search => '_'$$), array['100%_\'], '_ stands for itself');
select is(pg_temp.keys($$null, p_search => '%'$$), array['100%_\'], '% stands for itself');
select is(pg_temp.keys($$null, p_search => '\'$$), array['100%_\'], '\ stands for itself');
select is(pg_temp.keys($$'p', p_search => ''$$), '{B,b,a}', 'an empty search is none');
select is(pg_temp.keys($$'p', p_limit => 1$$), '{B}', 'a page has p_limit rows at most');

select is(
  (select convert_from(decode(rpad(translate(cursor, '-_', '+/'), (length(cursor) + 3) / 4 * 4, '='), 'base64'), 'UTF8')::jsonb
   from dispatch_partitions_page('p', 'stale', p_limit => 2) where partition_key = 'b'),
  jsonb_build_array('2025-12-31T00:00:00.000001+00:00', dispatch_partition_id('p', 'b')),
  'a cursor is the base64 of [value, id], its time to the microsecond');
select is(
  (select waiting_since from dispatch_partitions_page('p', p_limit => 1)), '2025-12-31 23:59:00+00',
  'a row says since when its jobs wait');
select is(
  pg_temp.keys(format($$'p', 'recent', %L$$, pg_temp.cursor(format('["2025-12-30T01:00:00+01:00", "%s"]', dispatch_partition_id('p', 'a'))))),
  '{b}', 'a time of another zone in a cursor is the same time');

select throws_ok($$select dispatch_partitions_page('p', 'size')$$, 'PD009', 'unknown sort ''size''', 'an unknown sort is refused');
select throws_ok($$select dispatch_partitions_page('p', null)$$, 'PD009', null, 'so is none');
select throws_ok($$select dispatch_partitions_page('nowhere')$$, 'PD001', null, 'an unknown policy is refused');
select throws_ok($$select dispatch_partitions_page('p', p_limit => 0)$$, 'PD009', null, 'a page has at least one row');
select throws_ok($$select dispatch_partitions_page('p', p_limit => 1001)$$, 'PD009', null, 'a page has at most 1000 rows');
select throws_ok($$select dispatch_waiting_page('wait', 'a', null)$$, 'PD009', null, 'a page of waiting jobs needs a size, too');
select throws_ok($$select dispatch_waiting_page('nowhere', 'a')$$, 'PD001', null, 'and a policy that there is');

do $$
begin
  perform dispatch_stage('wait', 'low', '{"k": "a"}');
  perform dispatch_stage('wait', 'soon', '{"k": "a"}', p_scheduled_at => '2026-01-01 00:01:00+00');
  perform dispatch_stage('wait', 'high', '{"k": "a"}', p_priority => 9, p_lock => 'l', p_queueing_lock => 'q');
  perform dispatch_stage('wait', 'past', '{"k": "a"}', p_scheduled_at => '2025-01-01 00:00:00+00');
  perform dispatch_stage('wait', 'later', '{"k": "a"}', p_priority => 9, p_scheduled_at => '2026-01-01 00:02:00+00');
  perform dispatch_stage('wait', 'soon, and before the other', '{"k": "a"}', p_priority => 1, p_scheduled_at => '2026-01-01 00:01:00+00');
  perform dispatch_stage('wait', 'elsewhere', '{"k": "b"}');
end;
$$;
select results_eq(
  $$select place, task_name from dispatch_waiting_page('wait', 'a')$$,
  $$values (1::bigint, 'high'), (2, 'low'), (3, 'past'), (4, 'soon, and before the other'), (5, 'soon'), (6, 'later')$$,
  'waiting jobs: priority, then eligible_at, then id; those that wait for their time after the ready ones');
select results_eq(
  $$select eligible_at, lock, queueing_lock from dispatch_waiting_page('wait', 'a', 3)$$,
  $$values (null::timestamptz, 'l', 'q'), (null, null, null), ('2025-01-01 00:00:00+00', null, null)$$,
  'eligible_at is null for a job that may go at once');
select is_empty($$select from dispatch_waiting_page('wait', 'nobody')$$, 'an unknown partition has no waiting jobs');

do $$
begin
  create temporary table times (name text, eligible_at timestamptz);
  insert into times values ('from a long time ago', '0001-01-01 00:00:00+00'), ('late', '9999-12-31 23:59:59.999999+00'), ('never', 'infinity');
  perform dispatch_stage('wait', name, '{"k": "any time"}') from times;
  update dispatch_staged_jobs as job set eligible_at = times.eligible_at from times where task_name = name;
end;
$$;
select results_eq(
  $$
    with recursive walk as (
      select 1 as page, first.* from dispatch_waiting_page('wait', 'any time', 1) as first
      union all
      select page + 1, next.* from walk cross join lateral dispatch_waiting_page('wait', 'any time', 1, walk.cursor) as next where page < 9
    )
    select task_name from walk order by page
  $$,
  $$values ('from a long time ago'), ('late'), ('never')$$,
  'a page begins after the one before at whatever time its last job may go');

select finish();
rollback;
