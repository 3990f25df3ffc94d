-- How the tables that come and go are kept small, and what a row costs those who append.
--
-- These tables turn over while they keep their size: what counts is how many dead rows stand before the living ones in the
-- index that a tick reads from its front, not which share of the table is dead. So they are vacuumed by number rather than
-- by share. And never truncated: vacuum would take an exclusive lock for it, and an enqueuer has to wait for nobody.

-- All of it turns over, often within a second; the fold reads it from its oldest entry.
alter table dispatch_inbox set (
  autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 2000,
  vacuum_truncate = off
);

-- May hold millions of rows that wait while thousands go. A vacuum reads all of its indexes, hence the small share beside the
-- number: with 5,000,000 waiting after 105,000 dead, by default after 1,000,000.
alter table dispatch_staged_jobs set (
  autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_threshold = 5000,
  vacuum_truncate = off
);

-- As many as jobs run, and all of them new within minutes. Nobody reads it in order, so a few thousand dead rows do no harm.
alter table dispatch_inflight_jobs set (
  autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_threshold = 2000,
  vacuum_truncate = off
);

-- Each settling moves due_at, which is indexed, so it leaves a dead entry at the front of the claim's index; a fold mostly
-- does not, and then finds room for the new version on the page (fillfactor).
alter table dispatch_partitions set (
  autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_threshold = 2000,
  vacuum_truncate = off
);

-- Grows for days before the sweep takes from its old end; by default a fifth of it would be dead before that is reused.
alter table dispatch_admissions set (
  autovacuum_vacuum_scale_factor = 0.05,
  vacuum_truncate = off
);

-- A check is read from its text in each statement that inserts. These two made up two thirds of what a note cost, and only
-- functions of ours write notes.
alter table dispatch_inbox drop constraint dispatch_inbox_kind_check;
alter table dispatch_inbox drop constraint dispatch_inbox_staged_check;

-- Whether a job's end is an observation has to be known in the worker's transaction: beside the slot it costs nothing.
alter table dispatch_inflight_jobs add column observed boolean not null default true;
comment on column dispatch_inflight_jobs.observed is 'Does a gate of the policy learn from the job''s lag? As of the admission.';

-- A row lives for a moment within a driver's transaction: packing what it holds would cost more than it saves.
alter table dispatch_handoffs
  alter column claims set storage external,
  alter column staged_ids set storage external,
  alter column ordinals set storage external;
