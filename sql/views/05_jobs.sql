-- All jobs as procrastinate would show them if it had had them all along. Like its own table it grows with the backlog: for
-- looking up and listing, not for watching.

create or replace view dispatch_jobs as
select
  job.id, job.queue_name::text as queue_name, job.task_name::text as task_name, job.priority, job.lock, job.queueing_lock, job.args,
  job.status, job.scheduled_at, job.attempts, job.abort_requested, job.worker_id
from procrastinate_jobs as job
where not exists (select from dispatch_staged_jobs as parked where parked.id = job.id and parked.parked)
  and not exists (select from dispatch_dead_jobs as dead where dead.id = job.id)
union all
select id, queue_name, task_name, priority, lock, queueing_lock, args, 'todo', scheduled_at, attempts, false, null
from dispatch_staged_jobs
union all
select id, queue_name, task_name, priority, lock, queueing_lock, args, 'failed', scheduled_at, attempts, false, null
from dispatch_dead_jobs;
comment on view dispatch_jobs is 'All jobs, in the columns of procrastinate_jobs: those of that table, as todo those that wait in a policy (a retry with the schedule, priority and locks that it waits with), as failed those that are dead.';
comment on column dispatch_jobs.id is 'The id that defer returned.';
comment on column dispatch_jobs.queue_name is 'procrastinate''s queue.';
comment on column dispatch_jobs.task_name is 'procrastinate''s task name.';
comment on column dispatch_jobs.priority is 'Higher first.';
comment on column dispatch_jobs.lock is 'procrastinate''s lock.';
comment on column dispatch_jobs.queueing_lock is 'procrastinate''s queueing lock.';
comment on column dispatch_jobs.args is 'The task''s arguments.';
comment on column dispatch_jobs.status is 'procrastinate''s word for where the job is.';
comment on column dispatch_jobs.scheduled_at is 'The schedule that the job was deferred with, or a retry''s.';
comment on column dispatch_jobs.attempts is 'Tries so far.';
comment on column dispatch_jobs.abort_requested is 'Was it asked to abort?';
comment on column dispatch_jobs.worker_id is 'The worker that has it.';
