-- What is kept for people to look back on: since when jobs wait, what the sweep saw of each policy, who did what.
-- Partitions that hold jobs are written once, since from now on each of them says since when: 100,000 take about a second.

-- Ticks, workers and whoever ends a job take these tables in different orders, and this run alters all of them: so all at
-- once or none, lest it waits with one of them in hand for somebody who waits for it. Where triggers of ours on
-- procrastinate_jobs will be dropped, that is taken whole: whoever only reads it, a report in a long transaction, is waited
-- for here as well.
do $$
declare
  v_until constant timestamptz := clock_timestamp() + interval '10 seconds';
  v_lock_timeout constant text := current_setting('lock_timeout');
  v_mode constant text := case
    when exists (select from pg_trigger where tgrelid = 'procrastinate_jobs'::regclass and tgname ~ 'dispatch_') then 'access exclusive'
    else 'share row exclusive'
  end;
begin
  while clock_timestamp() < v_until loop
    begin
      execute format('lock table procrastinate_jobs in %s mode nowait', v_mode);
      lock table dispatch_inbox, dispatch_partitions, dispatch_inflight_jobs, dispatch_admissions, dispatch_adaptive_stats,
        dispatch_tick_samples in access exclusive mode nowait;
      return;
    exception
      when lock_not_available then
        perform pg_sleep(0.002);
    end;
  end loop;
  -- Then as they come: an autovacuum gives way to a waiter after deadlock_timeout (1 s). But not for long, for everybody else
  -- has to queue behind: rather fail and be run again.
  perform set_config('lock_timeout', '3s', true) from pg_settings where name = 'lock_timeout' and setting::integer not between 1 and 3000;
  execute format('lock table procrastinate_jobs in %s mode', v_mode);
  lock table dispatch_inbox, dispatch_partitions, dispatch_inflight_jobs, dispatch_admissions, dispatch_adaptive_stats,
    dispatch_tick_samples in access exclusive mode;
  perform set_config('lock_timeout', v_lock_timeout, true);
end;
$$;

alter table dispatch_partitions add column waiting_since timestamptz;
comment on column dispatch_partitions.waiting_since is 'Since when jobs wait here and none was admitted: the later of the last admission and the moment at which the first of them became eligible. In the future where all wait for their time; null exactly when pending_count is not above 0.';

-- How long they have waited is not known. The last admission is the latest it may be, unless only the future is waited for.
update dispatch_partitions
set waiting_since = case
  when due_at < 'infinity' and due_at > clock_timestamp() and (blocked_until is null or blocked_until < due_at) then due_at
  else coalesce(last_admitted_at, first_seen_at)
end
where pending_count > 0;

create table dispatch_policy_samples (
  policy_name text not null,
  at timestamptz not null,
  partitions bigint not null,
  pending bigint not null,
  waiting bigint not null,
  in_flight bigint not null,
  due bigint not null,
  blocked bigint not null,
  queued bigint not null,
  oldest_wait_seconds double precision,
  oldest_queued_seconds double precision,
  lag_ms double precision,
  constraint dispatch_policy_samples_pkey primary key (policy_name, at)
);
create index dispatch_policy_samples_at_idx on dispatch_policy_samples using brin (at);
comment on table dispatch_policy_samples is 'What a sweep saw of each policy: one row a policy and sweep, at most one in 10 seconds. Kept for metrics_retention; dispatch_policy_history has it by the minute.';
comment on column dispatch_policy_samples.policy_name is 'The policy.';
comment on column dispatch_policy_samples.at is 'When the sweep looked.';
comment on column dispatch_policy_samples.partitions is 'Partitions known.';
comment on column dispatch_policy_samples.pending is 'Jobs waiting.';
comment on column dispatch_policy_samples.waiting is 'Those of them in partitions where at least one could go now, by its schedule.';
comment on column dispatch_policy_samples.in_flight is 'Jobs admitted that had not ended.';
comment on column dispatch_policy_samples.due is 'Partitions that the next tick would have looked at.';
comment on column dispatch_policy_samples.blocked is 'Partitions with waiting jobs that a gate, the budget or a pause held back.';
comment on column dispatch_policy_samples.queued is 'Jobs admitted that no worker had taken.';
comment on column dispatch_policy_samples.oldest_wait_seconds is 'The longest that a partition had had waiting jobs and none admitted, seconds; null where none waited. Paused partitions do not count.';
comment on column dispatch_policy_samples.oldest_queued_seconds is 'How long ago the longest queued job had been admitted, seconds; null where none was queued.';
comment on column dispatch_policy_samples.lag_ms is 'Mean ewma_lag_ms over the policy''s adaptive gates; null without.';

create table dispatch_audit_log (
  id bigint generated always as identity,
  at timestamptz not null,
  actor text not null,
  action text not null,
  policy_name text,
  partition_key text,
  job_id bigint,
  outcome jsonb not null default '{}',
  constraint dispatch_audit_log_pkey primary key (id),
  constraint dispatch_audit_log_actor_check check (length(actor) between 1 and 200),
  constraint dispatch_audit_log_action_check check (length(action) between 1 and 200)
);
create index dispatch_audit_log_policy_idx on dispatch_audit_log (policy_name, id);
create index dispatch_audit_log_at_idx on dispatch_audit_log using brin (at);
comment on table dispatch_audit_log is 'Who did what by hand through the dashboard or another caller of dispatch_audit(). Kept for audit_retention.';
comment on column dispatch_audit_log.id is 'Order of the entries.';
comment on column dispatch_audit_log.at is 'When.';
comment on column dispatch_audit_log.actor is 'Who, as the caller knows them.';
comment on column dispatch_audit_log.action is 'What: pause, resume, drain, force_admit, cancel, requeue, discard or a word of the caller''s.';
comment on column dispatch_audit_log.policy_name is 'The policy, where there is one.';
comment on column dispatch_audit_log.partition_key is 'The partition, where there is one.';
comment on column dispatch_audit_log.job_id is 'The job, where there is one: the id that defer returned.';
comment on column dispatch_audit_log.outcome is 'What came of it.';
