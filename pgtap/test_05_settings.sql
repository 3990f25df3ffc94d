-- Settings: defaults, ranges, and a table that holds only what differs.
begin;
select plan(77);

select is(dispatch_setting(name), value, format('%s is %s unless it is set', name, value))
from (values
  ('inflight_stale_after', 300::numeric),
  ('partition_inactive_after', 86400),
  ('metrics_retention', 86400),
  ('admission_retention', 604800),
  ('audit_retention', 7776000),
  ('queueing_lock_backoff', 1),
  ('limit_timeout', 1),
  ('hint_due_after', 120),
  ('hint_wait_after', 1800),
  ('hint_drain_after', 1800),
  ('hint_queued_after', 300),
  ('hint_failure_percent', 1),
  ('hint_growth_percent', 20),
  ('hint_tick_ms', 12500),
  ('hint_sweep_after', 300),
  ('hint_pause_after', 3600)
) as defaults (name, value);

select is(count(*), 16::bigint, 'there are no other settings than these') from dispatch_setting_spec();

select lives_ok(
  format('select dispatch_set(%L, %s), dispatch_set(%L, %s)', name, minimum, name, maximum),
  format('%s may be anything from %s to %s, both included', name, minimum, maximum))
from dispatch_setting_spec();

select throws_ok(
  format('select dispatch_set(%L, %s)', name, minimum - 0.001),
  'PD009', format('%s is out of range for setting %s', minimum - 0.001, name),
  format('%s may not be less than %s', name, minimum))
from dispatch_setting_spec();

select throws_ok(
  format('select dispatch_set(%L, %s)', name, maximum + 0.001),
  'PD009', format('%s is out of range for setting %s', maximum + 0.001, name),
  format('%s may not be more than %s', name, maximum))
from dispatch_setting_spec();

select throws_ok(
  format('select dispatch_set(%L, %L)', 'metrics_retention', value),
  'PD009', format('%s is out of range for setting metrics_retention', value),
  format('%s is no value for a setting', value))
from (values ('NaN'), ('Infinity'), ('-Infinity')) as odd (value);

delete from dispatch_settings;

do $$ begin perform dispatch_set('metrics_retention', 120.5); end $$;
select is(dispatch_setting('metrics_retention'), 120.5, 'a setting counts as soon as it is set');
select is(dispatch_setting('admission_retention'), 604800::numeric, 'setting one leaves the others alone');

do $$ begin perform dispatch_set('metrics_retention', 240); end $$;
select results_eq(
  'select name, value from dispatch_settings', $$values ('metrics_retention', '240')$$,
  'setting it again replaces the value');

do $$ begin perform dispatch_set('metrics_retention', null); end $$;
select is(dispatch_setting('metrics_retention'), 86400::numeric, 'null brings the default back');

do $$ begin perform dispatch_set('metrics_retention', 240), dispatch_set('metrics_retention', 86400); end $$;
select is_empty('select * from dispatch_settings', 'the table holds only what differs from the defaults');

select throws_ok(
  'select dispatch_setting(''no_such'')', 'PD009', 'unknown setting ''no_such''',
  'an unknown setting has no value');
select throws_ok(
  'select dispatch_set(''no_such'', 1)', 'PD009', 'unknown setting ''no_such''',
  'an unknown setting cannot be set');
select throws_ok(
  'select dispatch_set(null, 1)', 'PD009', 'unknown setting NULL',
  'a setting without a name is unknown too');
select throws_ok(
  'select dispatch_set(''no_such'', null)', 'PD009', 'unknown setting ''no_such''',
  'nor can an unknown setting be brought back to a default');

select * from finish();
rollback;
