-- How the cap of an adaptive gate came to where it is: for each partition the last hour, a row a minute at most.

create table dispatch_adaptive_samples (
  partition_id uuid not null,
  gate_name text not null,
  minute timestamptz not null,
  current_max integer not null,
  ewma_lag_ms double precision not null,
  constraint dispatch_adaptive_samples_pkey primary key (partition_id, gate_name, minute),
  constraint dispatch_adaptive_samples_stats_fkey foreign key (partition_id, gate_name) references dispatch_adaptive_stats on delete cascade
);
comment on table dispatch_adaptive_samples is 'What an adaptive gate had come to in each minute with observations, of an hour up to the last one. Goes with its partition.';
comment on column dispatch_adaptive_samples.partition_id is 'The partition.';
comment on column dispatch_adaptive_samples.gate_name is 'The gate''s name in the policy.';
comment on column dispatch_adaptive_samples.minute is 'The minute.';
comment on column dispatch_adaptive_samples.current_max is 'The cap after the minute''s first fold of observations.';
comment on column dispatch_adaptive_samples.ewma_lag_ms is 'The moving average of the lag then, milliseconds.';
