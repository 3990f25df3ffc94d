-- One id for life: a job is handed off under the id that it was staged with, so nothing maps ids any more. What was handed off
-- before goes on under procrastinate's id, and so do retries that wait and dead ones that were tried before.

-- Ticks, workers and whoever ends a job take these tables in different orders, and this run alters all of them: so all at
-- once or none, and not for long, for everybody else has to queue behind.
do $$
declare
  v_until constant timestamptz := clock_timestamp() + interval '10 seconds';
  -- Triggers that are there are dropped and made anew. To ask for that later would be a deadlock with a worker that fetches.
  v_mode constant text := case
    when exists (select from pg_trigger where tgrelid = 'procrastinate_jobs'::regclass and tgname ~ 'dispatch_') then 'access exclusive'
    else 'share row exclusive'
  end;
begin
  loop
    begin
      execute format('lock table procrastinate_jobs in %s mode nowait', v_mode);
      lock table dispatch_policies, dispatch_staged_jobs, dispatch_inflight_jobs, dispatch_admissions, dispatch_dead_jobs,
        dispatch_handoffs in access exclusive mode nowait;
      return;
    exception
      when lock_not_available then
        if clock_timestamp() >= v_until then
          raise;
        end if;
        perform pg_sleep(0.002);
    end;
  end loop;
end;
$$;

alter table dispatch_admissions add column ending text;
comment on column dispatch_admissions.ending is 'How the job ended without being handed off: cancelled; null when it was handed off.';
alter table dispatch_admissions drop constraint dispatch_admissions_pkey;
drop index dispatch_admissions_job_idx;
update dispatch_admissions set (job_id, ending) = (staged_id, 'cancelled') where job_id is null;
alter table dispatch_admissions drop column staged_id;
do $$
begin
  alter table dispatch_admissions add constraint dispatch_admissions_pkey primary key (job_id);
exception
  -- Ids were given out twice, by a sequence that was set back: the last one counts.
  when unique_violation then
    delete from dispatch_admissions as a
    using dispatch_admissions as newer
    where newer.job_id = a.job_id
      and (newer.admitted_at, newer.ctid) > (a.admitted_at, a.ctid);
    alter table dispatch_admissions add constraint dispatch_admissions_pkey primary key (job_id);
end;
$$;
comment on table dispatch_admissions is 'What became of staged jobs: handed to procrastinate, or ended before. Kept for admission_retention after the job''s end, so that its policy is known when it is tried again.';
comment on column dispatch_admissions.job_id is 'The job.';
comment on column dispatch_admissions.admitted_at is 'When it was last admitted, or ended.';

-- The view of the version before reads the column. Its successor comes with the views.
do $$
begin
  if to_regclass('dispatch_inflight') is not null then
    create or replace view dispatch_inflight as
    select job_id, job_id as staged_id, policy_name, partition_key, admitted_at, null::interval as age, null::text as state,
      null::text as task_name, null::text as queue_name, null::integer as attempts
    from dispatch_inflight_jobs;
  end if;
end;
$$;
alter table dispatch_inflight_jobs drop column staged_id;
comment on column dispatch_inflight_jobs.job_id is 'The job.';
-- How many jobs of a policy are queued is asked at each tick: one index counts by partition and by policy.
create index dispatch_inflight_jobs_policy_idx on dispatch_inflight_jobs (policy_name, partition_id);
drop index dispatch_inflight_jobs_partition_idx;

alter table dispatch_staged_jobs add column parked boolean not null default false;
comment on column dispatch_staged_jobs.parked is 'A retry: its row in procrastinate_jobs, of the same id, is parked until the policy admits it again.';
-- Ids were given out twice, by a sequence that was set back: a job that procrastinate does not have yet gets a new one.
alter table dispatch_staged_jobs drop constraint dispatch_staged_jobs_pkey;
update dispatch_staged_jobs set id = nextval('procrastinate_jobs_id_seq') where job_id is null and id in (select id from procrastinate_jobs);
update dispatch_staged_jobs set (id, parked) = (job_id, true) where job_id is not null;
alter table dispatch_staged_jobs add constraint dispatch_staged_jobs_pkey primary key (id);
alter table dispatch_staged_jobs drop column job_id;
create unique index dispatch_staged_jobs_queueing_lock_idx on dispatch_staged_jobs (queueing_lock) where queueing_lock is not null and not parked;
create index dispatch_staged_jobs_parked_idx on dispatch_staged_jobs (id) where parked;
comment on column dispatch_staged_jobs.id is 'The job''s id, from procrastinate''s own sequence: what defer returned, and what procrastinate calls it once it is handed off.';

alter table dispatch_dead_jobs add column parked boolean not null default false;
comment on column dispatch_dead_jobs.parked is 'A retry: its row in procrastinate_jobs, of the same id, is parked.';
alter table dispatch_dead_jobs drop constraint dispatch_dead_jobs_pkey;
update dispatch_dead_jobs set id = nextval('procrastinate_jobs_id_seq') where job_id is null and id in (select id from procrastinate_jobs);
update dispatch_dead_jobs set (id, parked) = (job_id, true) where job_id is not null;
alter table dispatch_dead_jobs add constraint dispatch_dead_jobs_pkey primary key (id);
alter table dispatch_dead_jobs drop column job_id;
comment on column dispatch_dead_jobs.id is 'The job''s id.';

-- A hand-off names what it did not do: all else went.
alter type dispatch_outcome drop attribute job_id;
alter type dispatch_outcome add attribute kind text;
comment on type dispatch_outcome is 'Why an admitted job was not handed off. kind: failed (its error sets it aside), held (another has its queueing lock or its row: it waits a while), left (it stood behind one that was held: next time).';

alter table dispatch_handoffs drop column parked_ids;
alter table dispatch_handoffs
  add column places tid[] not null,
  add column contested_ids bigint[] not null;
alter table dispatch_handoffs alter column places set storage external;
comment on column dispatch_handoffs.places is 'Beside each admitted job, where its row is, which the tick has locked.';
comment on column dispatch_handoffs.contested_ids is 'Those of them whose hand-off may have to wait for somebody: parked retries, and jobs with a queueing lock.';

-- procrastinate runs its queue in the order of staging, so what is fair between partitions has to be so before.
alter table dispatch_policies
  add column max_queued integer default 1000,
  add constraint dispatch_policies_max_queued_check check (max_queued > 0);
alter table dispatch_policies alter column max_queued drop default;
comment on column dispatch_policies.max_queued is 'Most jobs of the policy that may wait in procrastinate''s queue for a worker; null for no limit.';
