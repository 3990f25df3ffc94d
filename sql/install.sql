-- Brings one schema to this version: the frame that `pydispatch migrate` runs and `migrate --print`
-- prints, with the files of migrations/, functions/ and views/ filled in. One statement, so it is
-- one transaction wherever it runs, and psql, Alembic and Django apply it just as Python does.
--
-- Guards: a migration is applied once and never changes; functions and views are those of the
-- files, no more and no fewer; a run with nothing to do writes nothing.
do $pydispatch$
declare
  v_schema constant text := coalesce(null /* schema */, current_schema());
  v_procrastinate constant text := null /* procrastinate */;
  -- A row a file, in the order of application: kind, name, checksum, text.
  v_files constant text[] := null /* files */;

  v_namespace constant regnamespace := to_regnamespace(quote_ident(v_schema));
  v_search_path constant text := current_setting('search_path');
  v_client_min_messages constant text := current_setting('client_min_messages');
  v_lock_timeout constant text := current_setting('lock_timeout');
  -- What a subtransaction ($1) made or replaced in the schema ($2), but for what is known ($3).
  -- A trigger touches its table's row as well: hence only names of ours, and no table, type or
  -- index unless a migration ran ($4), for what a repeatable file made may be dropped any time.
  v_created_by constant text := $sql$
    with made (object) as (
      select case prokind when 'p' then 'procedure ' else 'function ' end || oid::regprocedure
      from pg_proc
      where xmin = $1 and pronamespace = $2 and proname like 'dispatch\_%'
      union all
      select 'view ' || c.oid::regclass
      from pg_class c
      join pg_rewrite r on r.ev_class = c.oid
      where r.xmin = $1 and c.relnamespace = $2 and c.relname like 'dispatch\_%' and c.relkind = 'v'
      union all
      select case relkind when 'c' then 'type ' when 'S' then 'sequence ' else 'table ' end
        || oid::regclass
      from pg_class
      where xmin = $1 and relnamespace = $2 and relname like 'dispatch\_%'
        and relkind in ('r', 'p', 'c', 'S')
        and not exists (  -- a sequence that goes with its table
          select from pg_depend d
          where d.classid = 'pg_class'::regclass and d.objid = pg_class.oid and relkind = 'S'
            and d.deptype in ('a', 'i')
        )
      union all
      select format('trigger %I on %s', t.tgname, t.tgrelid::regclass)
      from pg_trigger t
      join pg_class c on c.oid = t.tgrelid
      where t.xmin = $1 and c.relnamespace = $2 and not t.tgisinternal
      union all
      select 'index ' || i.oid::regclass
      from pg_class i
      join pg_index x on x.indexrelid = i.oid
      join pg_class t on t.oid = x.indrelid
      where i.xmin = $1 and i.relnamespace = $2 and i.relname like 'dispatch\_%'
        and t.relname not like 'dispatch\_%'
      union all
      select case typtype when 'd' then 'domain ' else 'type ' end || oid::regtype
      from pg_type
      where xmin = $1 and typnamespace = $2 and typname like 'dispatch\_%' and typtype in ('d', 'e')
    )
    select coalesce(array_agg(object), '{}')
    from made
    where object <> all ($3) and ($4 or object ~ '^(function|procedure|view|trigger) ')
  $sql$;
  -- Owner and grants of objects ($1) of the schema ($2), as statements for their successors.
  v_rights_of constant text := $sql$
    with kept (object, target, owner, acl, public_by_default) as (
      select o, o, proowner, proacl, true
      from pg_proc, concat(case prokind when 'p' then 'procedure ' else 'function ' end,
        oid::regprocedure) o
      where pronamespace = $2
      union all
      select 'view ' || oid::regclass, 'table ' || oid::regclass, relowner, relacl, false
      from pg_class
      where relnamespace = $2 and relkind = 'v'
    )
    select coalesce(array_agg(array[object, statement] order by step), '{}')
    from (
      select 1 as step, object, format('alter %s owner to %s', object, owner::regrole) as statement
      from kept
      where owner <> (select oid from pg_roles where rolname = current_user)
      union all
      select 2, object, format('revoke all on %s from public', target)
      from kept
      where public_by_default and acl is not null
        and not exists (select from aclexplode(acl) where grantee = 0)
      union all
      select 3, object, format('grant %s on %s to %s%s', a.privilege_type, target,
        case a.grantee when 0 then 'public' else a.grantee::regrole::text end,
        case when a.is_grantable then ' with grant option' else '' end)
      from kept, aclexplode(acl) a
      where a.grantee not in (owner, 0) or not public_by_default and a.grantee = 0
    ) statements
    where object = any ($1)
  $sql$;

  v_file text[];
  v_name text;
  v_checksum text;
  v_stale boolean := false;
  v_pass text;
  v_replaced boolean := false;
  v_old text[];
  v_doomed text[];
  v_kept text[];
  v_rights text[] := '{}';
  v_object text;
  v_xid xid;
  v_seen text[];
  v_new text[];
  v_applied text[] := '{}';
begin
  if current_setting('server_version_num')::int < 140000 then
    raise exception 'PostgreSQL % is too old', current_setting('server_version')
      using errcode = 'PD011', hint = 'pydispatch needs PostgreSQL 14 or newer.';
  end if;
  if v_namespace is null then
    raise exception 'there is no schema % to install into', coalesce(quote_ident(v_schema), 'at all')
      using errcode = 'PD011',
        detail = format('The search path is %s.', v_search_path),
        hint = 'Create the schema, or name another one.';
  end if;

  -- Whoever comes second waits here, and then finds nothing to do.
  perform pg_advisory_xact_lock(hashtextextended('dispatch_migrations', 0));
  perform set_config('search_path', format('%I, pg_temp', v_schema), true);
  perform set_config('client_min_messages', 'warning', true);
  -- Everybody would have to queue behind a lock that this waits for: rather fail and be run again.
  perform set_config('lock_timeout', '10s', true) where v_lock_timeout = '0';

  if to_regclass('procrastinate_jobs') is null and v_procrastinate is not null then
    execute v_procrastinate;
    v_applied := v_applied || 'procrastinate'::text;
  end if;
  if to_regclass('procrastinate_jobs') is null then
    raise exception 'procrastinate is not installed in schema %', quote_ident(v_schema)
      using errcode = 'PD010',
        detail = coalesce((
          select 'It is in schema ' || string_agg(relnamespace::regnamespace::text, ', ') || '.'
          from pg_class
          where relname = 'procrastinate_jobs'
        ), 'It is in no schema of this database.'),
        hint = 'Run "procrastinate --app=... schema --apply" or '
          '"pydispatch migrate --with-procrastinate", or name the schema that it is in.';
  end if;
  select string_agg(needed, ', ')
  into v_name
  from unnest(array['procrastinate_defer_jobs_v1', 'procrastinate_retry_job_v2']) needed
  where not exists (
    select from pg_proc where pronamespace = v_namespace and proname = needed
  );
  if v_name is not null then
    raise exception 'procrastinate''s schema is too old'
      using errcode = 'PD010',
        detail = format('Schema %I lacks %s.', v_schema, v_name),
        hint = 'Apply the migrations of procrastinate 3.9 or newer first.';
  end if;

  if to_regclass('dispatch_migrations') is null then
    create table dispatch_migrations (
      name text not null,
      kind text not null,
      checksum text not null,
      creates text[] not null default '{}',
      applied_at timestamptz not null default now(),
      constraint dispatch_migrations_pkey primary key (name),
      constraint dispatch_migrations_kind_check check (kind in ('migration', 'repeatable'))
    );
    comment on table dispatch_migrations is
      'The SQL files that made this schema what it is; only the migrator writes it.';
    comment on column dispatch_migrations.name is 'The file, relative to sql/.';
    comment on column dispatch_migrations.kind is
      'migration: applied once; repeatable: applied again whenever any file changes.';
    comment on column dispatch_migrations.checksum is 'SHA-256 of the text as applied.';
    comment on column dispatch_migrations.creates is
      'What the file made, so that exactly this is dropped when it is no longer wanted.';
    comment on column dispatch_migrations.applied_at is 'When the file was last applied.';
  end if;

  select min(m.name)
  into v_name
  from dispatch_migrations m
  where m.kind = 'migration' and m.name <> all (v_files[:][2:2]);
  if v_name is not null then
    raise exception 'migration % is unknown to this version of pydispatch', v_name
      using errcode = 'PD011',
        detail = format('It was applied to schema %I.', v_schema),
        hint = 'The schema is newer than this code: upgrade pydispatch.';
  end if;
  foreach v_file slice 1 in array v_files loop
    select m.checksum into v_checksum from dispatch_migrations m where m.name = v_file[2];
    if v_file[1] = 'migration' and v_checksum <> v_file[3] then
      raise exception 'migration % was edited after it was applied', v_file[2]
        using errcode = 'PD011',
          detail = format('Schema %I has %s, the file is %s.', v_schema, v_checksum, v_file[3]),
          hint = 'Restore the file, and put the change into a new migration.';
    end if;
    v_stale := v_stale or v_checksum is distinct from v_file[3];
  end loop;
  v_stale := v_stale or exists (
    select from dispatch_migrations m where m.name <> all (v_files[:][2:2])
  );

  -- Functions and views are replaced in place, which keeps their grants and disturbs nobody. What
  -- cannot be (another result type, renamed arguments, a view's columns) is dropped and made anew.
  -- In the end, what no file makes any more goes, unless something of the user's depends on it.
  foreach v_pass in array array['migrate', 'replace', 'recreate', 'clean'] loop
    exit when not v_stale;
    continue when v_pass = 'recreate' and v_replaced;
    begin
      if v_pass in ('migrate', 'replace') then
        v_doomed := '{}';
        select coalesce(array_agg(o), '{}')
        into v_old
        from dispatch_migrations m, unnest(m.creates) o
        where m.kind = 'repeatable';
      elsif v_pass = 'recreate' then
        v_doomed := v_old;
        execute v_rights_of into v_rights using v_old, v_namespace;
      else
        select coalesce(array_agg(o), '{}') into v_doomed from unnest(v_old) o where o <> all (v_seen);
        delete from dispatch_migrations m where m.name <> all (v_files[:][2:2]);
      end if;

      while v_doomed <> '{}' loop
        v_kept := '{}';
        foreach v_object in array v_doomed loop
          begin
            execute 'drop ' || regexp_replace(v_object, '^(\w+) ', '\1 if exists ');
          exception when dependent_objects_still_exist then
            v_kept := v_kept || v_object;
          end;
        end loop;
        exit when v_kept = v_doomed;
        v_doomed := v_kept;
      end loop;

      v_seen := '{}';
      foreach v_file slice 1 in array v_files loop
        continue when v_pass = 'clean' or (v_pass = 'migrate') <> (v_file[1] = 'migration');
        continue when v_pass = 'migrate' and exists (
          select from dispatch_migrations m where m.name = v_file[2]
        );
        execute v_file[4];
        insert into dispatch_migrations as m (kind, name, checksum)
        values (v_file[1], v_file[2], v_file[3])
        on conflict (name) do update
          set checksum = excluded.checksum, applied_at = excluded.applied_at
        returning m.xmin into v_xid;
        execute v_created_by into v_new using v_xid, v_namespace, v_seen, v_pass = 'migrate';
        update dispatch_migrations m set creates = v_new where m.name = v_file[2];
        v_seen := v_seen || v_new;
        v_applied := array_remove(v_applied, v_file[2]) || v_file[2];
      end loop;
      v_replaced := v_pass = 'replace';
      if v_pass = 'recreate' then
        for i in 1 .. cardinality(v_rights) / 2 loop
          if v_rights[i][1] = any (v_seen) then
            execute v_rights[i][2];
          end if;
        end loop;
      end if;
    exception
      when syntax_error_or_access_rule_violation or dependent_objects_still_exist then
        if v_pass <> 'replace' then
          raise;
        end if;
    end;
  end loop;

  perform set_config('lock_timeout', v_lock_timeout, true);
  perform set_config('client_min_messages', v_client_min_messages, true);
  perform set_config('search_path', v_search_path, true);
  perform set_config('dispatch.applied', to_jsonb(v_applied)::text, true);
  foreach v_name in array v_applied loop
    raise notice 'applied %', v_name;
  end loop;
end
$pydispatch$;
