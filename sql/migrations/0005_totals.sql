-- Totals of what the ticks did, which outlive the samples. The sweep adds each sample once and marks it as counted in the
-- same transaction. So a total is what is added plus the samples not yet counted, at any moment and whoever is still busy:
-- a tick that commits late is simply counted late.

-- Counting begins here: a day of samples from before would keep the first scrapes busy.
alter table dispatch_tick_samples add column counted boolean not null default true;
alter table dispatch_tick_samples alter column counted set default false;
comment on column dispatch_tick_samples.counted is 'Has a sweep added it to dispatch_tick_totals? Only then may it be removed.';
create index dispatch_tick_samples_uncounted_idx on dispatch_tick_samples (id) where not counted;

create table dispatch_tick_totals (
  policy_name text not null,
  counter text not null,
  label text not null,
  value numeric not null,
  updated_at timestamptz not null,
  constraint dispatch_tick_totals_pkey primary key (policy_name, counter, label),
  constraint dispatch_tick_totals_value_check check (value >= 0)
);
comment on table dispatch_tick_totals is 'What the counted tick samples add up to. dispatch_totals adds those that are not counted yet. Only the sweep writes here.';
comment on column dispatch_tick_totals.policy_name is 'The policy. A policy that is dropped and defined anew goes on counting where it was; its rows are removed once it is gone for metrics_retention.';
comment on column dispatch_tick_totals.counter is 'What is counted, as in dispatch_totals.';
comment on column dispatch_tick_totals.label is 'Which of them, as in dispatch_totals.';
comment on column dispatch_tick_totals.value is 'The sum.';
comment on column dispatch_tick_totals.updated_at is 'When a sweep last added to it.';
