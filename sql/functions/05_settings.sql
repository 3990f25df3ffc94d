-- Settings: what each means, its default and its range stand in one place; the table holds only what differs.

create or replace function dispatch_setting_spec()
returns table (name text, default_value numeric, minimum numeric, maximum numeric, meaning text)
language sql
immutable
parallel safe
begin atomic
  values
    ('inflight_stale_after', 300.0, 1.0, 31536000.0, 'Seconds without a heartbeat after which a worker counts as lost and its running jobs give their slots back.'),
    ('partition_inactive_after', 86400.0, 1.0, 315360000.0, 'Seconds after which an idle partition is forgotten, unless a window of its gates is longer.'),
    ('metrics_retention', 86400.0, 60.0, 315360000.0, 'Seconds for which samples of ticks and policies are kept.'),
    ('admission_retention', 604800.0, 60.0, 315360000.0, 'Seconds for which an admission is kept after its job is gone.'),
    ('audit_retention', 7776000.0, 60.0, 315360000.0, 'Seconds for which entries of the audit log are kept.'),
    ('queueing_lock_backoff', 1.0, 0.01, 3600.0, 'Seconds after which a job whose queueing lock was held is tried again.'),
    ('limit_timeout', 1.0, 0.001, 3600.0, 'Seconds that a limit function may take for one partition, which is denied when it takes longer; a tick asks for five times as long in all, and leaves the rest to the next.'),
    -- What dispatch_hints speaks of, each with the reason for its default.
    ('hint_due_after', 120.0, 1.0, 31536000.0, 'Hints: seconds for which something may be due and not looked at. A driver looks within a second; of cron''s runs, one a minute, two would be missed.'),
    ('hint_wait_after', 1800.0, 1.0, 31536000.0, 'Hints: seconds for which a gate may hold a partition''s jobs with none admitted. Most limits are per second, minute or a few; raise it where a rate is per hour.'),
    ('hint_drain_after', 1800.0, 1.0, 31536000.0, 'Hints: seconds in which a backlog should be gone at the pace of the last 5 minutes. A shorter one is over before somebody has looked.'),
    ('hint_queued_after', 300.0, 1.0, 31536000.0, 'Hints: seconds for which an admitted job may be queued. As long as a worker may be silent before it counts as lost.'),
    ('hint_failure_percent', 1.0, 0.0, 100.0, 'Hints: percent of hand-offs that may fail in 5 minutes. A bad job now and then is set aside and harms no other; more is a fault of the deployment.'),
    ('hint_growth_percent', 20.0, 1.0, 100000.0, 'Hints: percent by which waiting jobs may grow within 15 minutes while jobs are admitted. Less is the ebb and flow of a day.'),
    ('hint_tick_ms', 12500.0, 1.0, 86400000.0, 'Hints: milliseconds that a tick may take. Half of the driver''s tick_max_duration: a tick that is ended there leaves no sample, so it has to be seen before.'),
    ('hint_sweep_after', 300.0, 1.0, 31536000.0, 'Hints: seconds without a sweep. The driver sweeps each 30 seconds; later, the slots of lost workers are missed.'),
    ('hint_pause_after', 3600.0, 1.0, 31536000.0, 'Hints: seconds after which a pause with jobs waiting is a warning. Whoever pauses for a deployment or an outage is back within the hour, or has forgotten it.');
end;
comment on function dispatch_setting_spec() is 'Every setting with its default, its range and its meaning.';

create or replace function dispatch_setting(p_name text)
returns numeric
language plpgsql
stable
set search_path from current
as $$
declare
  v_value numeric;
begin
  select coalesce(s.value::numeric, spec.default_value)
  into v_value
  from dispatch_setting_spec() as spec
  left join dispatch_settings as s on s.name = spec.name
  where spec.name = p_name;

  if not found then
    perform dispatch_raise('PD009', format('unknown setting %L', p_name), null,
      'select * from dispatch_setting_spec() lists the settings.');
  end if;
  return v_value;
end;
$$;
comment on function dispatch_setting(text) is 'The value of a setting in force. Raises PD009 for an unknown name.';

create or replace function dispatch_setting_span(p_name text)
returns interval
language sql
stable
return make_interval(secs => dispatch_setting(p_name)::double precision);
comment on function dispatch_setting_span(text) is 'A setting that is a number of seconds, as a span of time.';

create or replace function dispatch_set(p_name text, p_value numeric)
returns void
language plpgsql
set search_path from current
as $$
declare
  v_spec record;
begin
  select * into v_spec from dispatch_setting_spec() as spec where spec.name = p_name;
  if not found then
    perform dispatch_raise('PD009', format('unknown setting %L', p_name), null,
      'select * from dispatch_setting_spec() lists the settings.');
  elsif p_value is not null and not (p_value between v_spec.minimum and v_spec.maximum) then
    perform dispatch_raise('PD009', format('%s is out of range for setting %s', p_value, p_name),
      format('It must lie between %s and %s.', v_spec.minimum, v_spec.maximum), v_spec.meaning);
  elsif p_value is null or p_value = v_spec.default_value then
    delete from dispatch_settings as s where s.name = p_name;
  else
    insert into dispatch_settings (name, value)
    values (p_name, p_value::text)
    on conflict on constraint dispatch_settings_pkey do update set value = excluded.value;
  end if;
end;
$$;
comment on function dispatch_set(text, numeric) is 'Changes a setting, at once and for everybody; null brings the default back. Raises PD009 for an unknown name or a value out of range.';
