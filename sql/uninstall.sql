-- Takes pydispatch out of one schema and leaves everything else, procrastinate above all, as it was.
-- Drops exactly what the ledger says that our files made; what depends on it and is not ours stops
-- the whole with Postgres's own message, which names it.
do $pydispatch$
declare
  v_schema constant text := coalesce(null /* schema */, current_schema());
  v_force constant boolean := coalesce(null /* force */, false);

  v_search_path constant text := current_setting('search_path');
  v_client_min_messages constant text := current_setting('client_min_messages');
  v_holds boolean := false;
  v_doomed text[];
  v_kept text[];
  v_object text;
  v_dropped text[] := '{}';
begin
  perform pg_advisory_xact_lock(hashtextextended('dispatch_migrations', 0));
  perform set_config('search_path', format('%I, pg_temp', v_schema), true);
  perform set_config('client_min_messages', 'warning', true);

  if to_regclass('dispatch_migrations') is not null then
    if to_regclass('dispatch_staged_jobs') is not null then
      -- Enqueuers have to wait from here on, or a job could slip in behind the look.
      lock table dispatch_staged_jobs, dispatch_dead_jobs in share row exclusive mode;
      v_holds := exists (select from dispatch_staged_jobs)
        or exists (select from dispatch_dead_jobs);
    end if;
    if v_holds and not v_force then
      raise exception 'jobs are still staged or dead in schema %', quote_ident(v_schema)
        using errcode = 'PD005',
          hint = 'Let them be admitted, cancel or discard them, or force the removal, which loses them.';
    end if;
    if v_holds then
      -- Retries are procrastinate's own rows: what waits goes back into its queue, what is dead ends.
      if dispatch_hand_over(array(select id from dispatch_staged_jobs where parked order by id),
        array(select ctid from dispatch_staged_jobs where parked order by id), false, dispatch_now()) <> '{}' then
        raise exception 'a retried job cannot go back into its queue yet'
          using errcode = 'PD005',
            detail = 'Another job holds its queueing lock, or another session its row.',
            hint = 'Try again later, or cancel it.';
      end if;
      perform procrastinate_cancel_job_v1(id, false, false)
      from dispatch_dead_jobs
      where parked;
    end if;

    select array_agg(distinct o) into v_doomed from dispatch_migrations m, unnest(m.creates) o;
    v_dropped := coalesce(v_doomed, '{}') || 'table dispatch_migrations'::text;
    while v_doomed <> '{}' loop
      v_kept := '{}';
      foreach v_object in array v_doomed loop
        begin
          execute 'drop ' || regexp_replace(v_object, '^(\w+) ', '\1 if exists ');
        exception when dependent_objects_still_exist then
          v_kept := v_kept || v_object;
        end;
      end loop;
      if v_kept = v_doomed then
        execute 'drop ' || v_kept[1];
      end if;
      v_doomed := v_kept;
    end loop;
    drop table dispatch_migrations;
  end if;

  perform set_config('client_min_messages', v_client_min_messages, true);
  perform set_config('search_path', v_search_path, true);
  perform set_config('dispatch.dropped', to_jsonb(v_dropped)::text, true);
  foreach v_object in array v_dropped loop
    raise notice 'dropped %', v_object;
  end loop;
end
$pydispatch$;
