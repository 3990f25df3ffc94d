-- What a simulation works on, and the index by which it reads back what was admitted lately.

-- Two tell-tale things: nothing here is ever committed, so nothing need be logged; and no index is unique, so that two
-- simulations never wait for each other.
create unlogged table dispatch_simulated_jobs (
  policy_name text not null,
  id bigint not null,
  next_at timestamptz not null,
  staged_at timestamptz not null,
  scheduled_at timestamptz,
  admitted_at timestamptz,
  service_time interval not null,
  priority integer not null default 0,
  group_number integer not null default 0,
  partition_id uuid not null,
  partition_key text not null,
  context jsonb not null
);
create index dispatch_simulated_jobs_next_idx on dispatch_simulated_jobs (policy_name, next_at);
create index dispatch_simulated_jobs_id_idx on dispatch_simulated_jobs (policy_name, id);
comment on table dispatch_simulated_jobs is 'The jobs of a simulation while it runs; no other transaction ever sees a row.';
comment on column dispatch_simulated_jobs.policy_name is 'The simulation''s scratch policy.';
comment on column dispatch_simulated_jobs.id is 'Invented, below zero; ascending in the order in which the jobs come in.';
comment on column dispatch_simulated_jobs.next_at is 'When something happens to it next, or did last: it comes in, or, once it is admitted, it finishes.';
comment on column dispatch_simulated_jobs.staged_at is 'When it was staged.';
comment on column dispatch_simulated_jobs.scheduled_at is 'Not admitted before.';
comment on column dispatch_simulated_jobs.admitted_at is 'When the simulation admitted it.';
comment on column dispatch_simulated_jobs.service_time is 'Time from its admission to its finish.';
comment on column dispatch_simulated_jobs.priority is 'Higher first.';
comment on column dispatch_simulated_jobs.group_number is 'The group of partitions it is counted in; 0 for all others.';
comment on column dispatch_simulated_jobs.partition_id is 'Its partition in the simulation.';
comment on column dispatch_simulated_jobs.partition_key is 'The key, as the simulated definition makes it.';
comment on column dispatch_simulated_jobs.context is 'What limits are read from.';

create index dispatch_admissions_policy_idx on dispatch_admissions (policy_name, admitted_at);

create type dispatch_simulation as (
  at timestamptz,
  elapsed interval,
  partition_key text,
  partitions integer,
  staged integer,
  admitted integer,
  finished integer,
  pending integer,
  in_flight integer,
  denied jsonb,
  longest_wait interval,
  mean_wait interval,
  service_time interval,
  note text
);
comment on type dispatch_simulation is 'What a simulation shows of one group of partitions in one step of time. at and elapsed = when the step begins; partition_key = the group''s one partition, null for all others together; partitions = how many it has; staged, admitted, finished = jobs in the step; pending = jobs waiting at its end; in_flight = the most at one moment of it; denied = how often a tick let none of a partition''s jobs pass, by reason; longest_wait, mean_wait = of the jobs admitted in it, from when they could have gone; service_time = the time from admission to finish that was assumed; note = how, and what was left out, the same in each row.';
comment on column dispatch_simulation.at is 'When the step begins, on the simulated clock.';
comment on column dispatch_simulation.elapsed is 'The same, since the simulation''s start.';
comment on column dispatch_simulation.partition_key is 'The partition; null for all those together that are not shown by themselves.';
comment on column dispatch_simulation.partitions is 'Partitions in the group.';
comment on column dispatch_simulation.staged is 'Jobs that came in.';
comment on column dispatch_simulation.admitted is 'Jobs admitted.';
comment on column dispatch_simulation.finished is 'Jobs that finished.';
comment on column dispatch_simulation.pending is 'Jobs waiting at the end of the step.';
comment on column dispatch_simulation.in_flight is 'The most jobs in flight at one moment of the step.';
comment on column dispatch_simulation.denied is 'How often a tick let none of a partition''s jobs pass, by reason.';
comment on column dispatch_simulation.longest_wait is 'The longest that a job admitted in the step had waited since it could have gone (staged, and its schedule come); null when none was admitted.';
comment on column dispatch_simulation.mean_wait is 'The mean of the same.';
comment on column dispatch_simulation.service_time is 'The time from admission to finish that was assumed, but for jobs of a load that have their own.';
comment on column dispatch_simulation.note is 'What was assumed and what was left out, in words; the same in each row.';
