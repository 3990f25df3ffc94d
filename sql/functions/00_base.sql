-- What every other file leans on: the clock, the errors, the identity of a partition, paths in a context.

create or replace function dispatch_now()
returns timestamptz
language sql
volatile
parallel safe
return coalesce(nullif(current_setting('dispatch.fake_now', true), '')::timestamptz, clock_timestamp());
comment on function dispatch_now() is 'The one clock: the wall clock of the database, or the session setting dispatch.fake_now (a timestamp''s text) in tests and simulations.';

create or replace function dispatch_raise(p_sqlstate text, p_message text, p_detail text, p_hint text)
returns void
language plpgsql
as $$
begin
  if p_detail is null then
    raise exception using errcode = p_sqlstate, message = p_message, hint = p_hint;
  end if;
  raise exception using errcode = p_sqlstate, message = p_message, detail = p_detail, hint = p_hint;
end;
$$;
comment on function dispatch_raise(text, text, text, text) is 'Raises an error of class PD with a hint that says what to do, and a detail where there is one.';

create or replace function dispatch_check_argument(p_name text, p_value integer, p_minimum integer, p_maximum integer, p_hint text)
returns void
language plpgsql
immutable
as $$
begin
  if p_value is null or p_value not between p_minimum and p_maximum then
    perform dispatch_raise('PD009',
      format('%s must lie between %s and %s, not be %s', p_name, p_minimum, p_maximum, coalesce(p_value::text, 'null')), null, p_hint);
  end if;
end;
$$;
comment on function dispatch_check_argument(text, integer, integer, integer, text) is 'Raises PD009 for a whole number that is null or out of range.';

create or replace function dispatch_partition_id(p_policy text, p_partition_key text)
returns uuid
language sql
stable
parallel safe
return encode(substring(sha256(convert_to(
  case when p_partition_key is null then p_policy else p_policy || e'\n' || p_partition_key end, 'UTF8')) from 1 for 16), 'hex')::uuid;
comment on function dispatch_partition_id(text, text) is 'Identity of a partition: the first 128 bits of a SHA-256 over policy and key. With a null key, the identity of the policy itself.';

create or replace function dispatch_partition_key(p_paths text[], p_context jsonb)
returns text
language plpgsql
immutable
parallel safe
as $$
begin
  if cardinality(p_paths) = 0 then
    return '';
  elsif cardinality(p_paths) = 1 then
    return coalesce(p_context #>> string_to_array(p_paths[1], '.'), '');
  end if;
  return (
    select jsonb_agg(p_context #> string_to_array(path, '.') order by ordinality)::text
    from unnest(p_paths) with ordinality as paths (path, ordinality)
  );
end;
$$;
comment on function dispatch_partition_key(text[], jsonb) is 'The partition key of a context: the value at one path as text (empty when missing or null), or the values at several as the text of a JSON array.';

-- The table's oid tells the installations of one database apart, whatever the caller's search_path is.
create or replace function dispatch_channel()
returns text
language sql
stable
parallel safe
return 'dispatch:' || 'dispatch_policies'::regclass::oid;
comment on function dispatch_channel() is 'The channel to LISTEN on: each statement that stages, finishes or resumes notifies it once, with the policy''s name as payload.';

create or replace function dispatch_wake(p_policy text)
returns void
language plpgsql
as $$
begin
  perform pg_notify(dispatch_channel(), p_policy);
end;
$$;
comment on function dispatch_wake(text) is 'Wakes the drivers when the transaction commits; equal notifications of one transaction are one.';
