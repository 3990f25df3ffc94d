-- Ticks and sweeps inside of Postgres. Apply it with psql to the database that pg_cron is in (1.5 or
-- newer, for schedules in seconds), as the role that is to tick.
-- A run that takes longer than its turn delays the next one of the same name, and harms nothing.

select cron.schedule('dispatch_run', '5 seconds', $$call dispatch_run('4 seconds')$$);
select cron.schedule('dispatch_sweep', '30 seconds', $$select dispatch_sweep()$$);

-- pg_cron keeps a row for each run.
select cron.schedule('dispatch_cron_log', '0 3 * * *',
  $$delete from cron.job_run_details where end_time < now() - interval '1 day'$$);
