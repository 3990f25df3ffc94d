-- What cannot be done stands in the way of nothing else: notes that wait for somebody are put off, those that cannot be folded
-- are set aside, and creating partitions takes no place in the server's table of locks.

-- Ticks take these tables in their own order, and this run alters them: so all at once or none, and not for long, for
-- everybody else has to queue behind.
do $$
declare
  v_until constant timestamptz := clock_timestamp() + interval '10 seconds';
begin
  loop
    begin
      lock table dispatch_policies, dispatch_inbox in access exclusive mode nowait;
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

-- The fold reads the notes that are not put off from the oldest on, and of the others a partition's. An insert pays for one
-- index, as before.
alter table dispatch_inbox add column put_off boolean not null default false;
comment on column dispatch_inbox.put_off is 'Somebody held its partition when a fold came to it and found too many of its kind in the way: it waits by partition, and others go before it.';
alter table dispatch_inbox drop constraint dispatch_inbox_pkey;
alter table dispatch_inbox add constraint dispatch_inbox_pkey primary key (policy_name, put_off, id);
create index dispatch_inbox_put_off_idx on dispatch_inbox (policy_name, partition_id, id) where put_off;

create table dispatch_dead_notes (
  id bigint not null,
  partition_id uuid not null,
  died_at timestamptz not null,
  due_at timestamptz,
  newest_id bigint,
  lag_ms double precision,
  jobs integer not null,
  succeeded boolean,
  policy_name text not null,
  kind text not null,
  partition_key text,
  shard text,
  context jsonb,
  error text not null,
  constraint dispatch_dead_notes_pkey primary key (id)
);
create index dispatch_dead_notes_policy_idx on dispatch_dead_notes (policy_name, died_at);
comment on table dispatch_dead_notes is 'Notes that could not be folded, each with its error. They stay until dispatch_requeue_note() or dispatch_discard_note().';
comment on column dispatch_dead_notes.id is 'Id of the note.';
comment on column dispatch_dead_notes.partition_id is 'The partition that it speaks of.';
comment on column dispatch_dead_notes.died_at is 'When it was set aside.';
comment on column dispatch_dead_notes.due_at is 'When the first of the staged jobs becomes eligible.';
comment on column dispatch_dead_notes.newest_id is 'Id of the newest staged job.';
comment on column dispatch_dead_notes.lag_ms is 'For an observation: milliseconds from admission to start.';
comment on column dispatch_dead_notes.jobs is 'By how much it would have changed the number of waiting jobs or of slots taken.';
comment on column dispatch_dead_notes.succeeded is 'For an observation: did the job succeed?';
comment on column dispatch_dead_notes.policy_name is 'The policy.';
comment on column dispatch_dead_notes.kind is 'staged, removed, finished or resumed, as in dispatch_inbox.';
comment on column dispatch_dead_notes.partition_key is 'The key, for a partition to be created.';
comment on column dispatch_dead_notes.shard is 'The shard, for a partition to be created.';
comment on column dispatch_dead_notes.context is 'The context of the newest staged job.';
comment on column dispatch_dead_notes.error is 'Why it could not be folded.';

-- A row stands for the creation of the partitions of a policy whose ids begin with its byte. Row locks are kept in the rows, so
-- a transaction may hold any number of them.
create table dispatch_creations (
  policy_name text not null,
  bucket integer not null,
  constraint dispatch_creations_pkey primary key (policy_name, bucket),
  constraint dispatch_creations_policy_fkey foreign key (policy_name) references dispatch_policies on delete cascade
);
comment on table dispatch_creations is 'Who creates partitions of a policy locks the row for their ids'' first byte: 256 rows a policy, which never change.';
comment on column dispatch_creations.policy_name is 'The policy.';
comment on column dispatch_creations.bucket is 'The first byte of the ids.';
insert into dispatch_creations (policy_name, bucket)
select policy_name, bucket
from dispatch_policies
cross join generate_series(0, 255) as bucket;

alter type dispatch_observation add attribute in_flight integer;
comment on type dispatch_observation is 'What one finished job told: did it succeed, how many milliseconds had it waited from admission to start, and how many of its partition were in flight, the job among them, when its end was noted.';
