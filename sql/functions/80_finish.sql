-- Ends that procrastinate's triggers do not see: jobs that other workers run, and staged jobs that are cancelled.

create or replace function dispatch_finish(p_job_id bigint, p_succeeded boolean)
returns boolean
language plpgsql
set search_path from current
as $$
begin
  return dispatch_free_slot(p_job_id, p_succeeded);
end;
$$;
comment on function dispatch_finish(bigint, boolean) is 'For workers other than procrastinate''s: job p_job_id ended, so its slot is free. True when it had one; calling again does nothing.';

create or replace function dispatch_cancel(p_id bigint)
returns boolean
language plpgsql
set search_path from current
as $$
declare
  v_job dispatch_staged_jobs;
begin
  select * into v_job from dispatch_staged_jobs where id = p_id;
  if not found then
    return false;
  elsif v_job.job_id is not null then
    -- A parked retry: procrastinate cancels its row, and the trigger on it removes the staged one.
    return procrastinate_cancel_job_v1(v_job.job_id, false, false) is not null;
  end if;

  delete from dispatch_staged_jobs where id = p_id;
  if not found then
    return false;
  end if;
  insert into dispatch_inbox (policy_name, partition_id, kind, jobs)
  values (v_job.policy_name, v_job.partition_id, 'removed', -1);
  return true;
end;
$$;
comment on function dispatch_cancel(bigint) is 'Cancels a staged job. False when no job of that id is staged (any more). Waits for a tick that is just admitting it.';
