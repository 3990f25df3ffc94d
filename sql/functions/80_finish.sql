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
comment on function dispatch_finish(bigint, boolean) is 'For workers other than procrastinate''s: job p_job_id ended, so its slot is free. True when it had one; calling again does nothing. p_succeeded is an observation for adaptive_concurrency only where procrastinate has noted the job''s start, which tells its lag.';

create or replace function dispatch_cancel(p_id bigint)
returns boolean
language plpgsql
set search_path from current
set enable_seqscan = off
as $$
begin
  if dispatch_end_staged(p_id, 'cancelled', false) then
    return true;
  end if;
  -- A parked retry: procrastinate cancels its row, and the trigger on it removes the staged one. In a statement of its own: the
  -- first one may have waited for it to come back.
  return exists (select from dispatch_staged_jobs where id = p_id and parked) and procrastinate_cancel_job_v1(p_id, false, false) is not null;
end;
$$;
comment on function dispatch_cancel(bigint) is 'Cancels a staged job. False when no job of that id is staged (any more). Waits for a tick that is just admitting it.';

create or replace function dispatch_job(p_id bigint)
returns dispatch_job_state
language plpgsql
stable
set search_path from current
as $$
declare
  v_job dispatch_job_state;
begin
  select * into v_job from dispatch_job_states(p_id);
  if not found then
    perform dispatch_raise('PD006', format('unknown job %s', coalesce(p_id::text, 'null')), null,
      'Pass the id that defer or dispatch_stage() returned. A job is forgotten admission_retention after its end.');
  end if;
  return v_job;
end;
$$;
comment on function dispatch_job(bigint) is 'Where a job is: staged, queued, running, finished, dead or cancelled. Raises PD006 for an unknown id.';

create or replace function dispatch_job_status(p_id bigint)
returns text
language plpgsql
stable
set search_path from current
set enable_seqscan = off
as $$
declare
  v_state constant text := (select state from dispatch_job_states(p_id));
begin
  return case v_state
    when 'staged' then 'todo'
    when 'dead' then 'failed'
    else coalesce(dispatch_status_of(p_id), case v_state when 'cancelled' then 'cancelled' when 'finished' then 'succeeded' end)
  end;
end;
$$;
comment on function dispatch_job_status(bigint) is 'procrastinate''s word (todo, doing, succeeded, failed, cancelled, aborted) for any job, staged or not; null when there is none. A finished job whose row is deleted counts as succeeded.';
