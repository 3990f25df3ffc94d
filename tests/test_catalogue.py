"""The house rules, as far as the catalogue of an installed database shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pydispatch.migrate import sql_root

PIN = "search_path=public, pg_temp"

# What plpgsql_check says and we leave as it is: (function, message), each with the reason.
ACCEPTED = {
    # It only raises: marked otherwise, the planner might call it early or not at all.
    ("dispatch_raise", "routine is marked as VOLATILE, should be IMMUTABLE"),
    # A parameter of type record has its structure from the caller alone.
    ("dispatch_check_parameter", 'record "p_spec" is not assigned yet'),
    ("dispatch_check_parameter", 'unused parameter "p_spec"'),
    # They lock rows, in a subquery.
    ("dispatch_claim_none", "routine is marked as VOLATILE, should be STABLE"),
    ("dispatch_held", "routine is marked as VOLATILE, should be STABLE"),
    ("dispatch_in_other_hands", "routine is marked as VOLATILE, should be STABLE"),
}
# An assignment casts to the declared type: that is what the type is declared for.
ACCEPTED_EVERYWHERE = {"target type is different type than source type"}

# Triggers fire in the order of their names, and this one has to come after procrastinate's own.
NAMED_OTHERWISE = {"zz_dispatch_ended"}

FUNCTIONS = """
    select
        p.proname as name, p.oid::regprocedure::text as signature,
        exists (select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as acl
            where acl.grantee = 0) as is_public,
        p.prosqlbody is not null as is_bound,
        coalesce(pg_get_function_sqlbody(p.oid), p.prosrc) as body,
        p.provolatile as volatility, p.proparallel as parallel, p.prosecdef as security_definer,
        coalesce(p.proconfig, '{}') as settings, p.prorettype = 'trigger'::regtype as is_trigger,
        coalesce(p.proargnames[:p.pronargs], '{}') as arguments, p.pronargs as argument_count,
        obj_description(p.oid, 'pg_proc') as comment
    from pg_proc as p
    where p.pronamespace = 'public'::regnamespace
        and p.proname like 'dispatch\\_%'
    order by signature
"""


def rows(conn: psycopg.Connection, query: str, parameters: list[Any] | None = None) -> list[Any]:
    """Return rows that have their columns as attributes."""
    with conn.cursor(row_factory=psycopg.rows.namedtuple_row) as cursor:
        return cursor.execute(query.encode(), parameters).fetchall()


@pytest.fixture
def functions(conn: psycopg.Connection) -> list[Any]:
    found = rows(conn, FUNCTIONS)
    assert len(found) > 50
    return found


@pytest.fixture
def relations(conn: psycopg.Connection) -> list[str]:
    """All tables and views, procrastinate's as well."""
    found = rows(
        conn,
        "select relname from pg_class where relnamespace = 'public'::regnamespace"
        " and relkind in ('r', 'v', 'm', 'p')",
    )
    return [row.relname for row in found]


def source() -> Iterator[str]:
    """Yield the SQL files, without their comments."""
    paths = [sql_root() / "install.sql"]
    for folder in ("migrations", "functions", "views"):
        paths += sorted((sql_root() / folder).glob("*.sql"))
    for path in paths:
        yield re.sub(r"--.*", "", path.read_text())


def body_without_texts(function: Any) -> str:
    """Return the body of a function without comments and quoted texts."""
    return re.sub(r"--.*|'(?:[^']|'')*'", "", function.body)


def test_every_table_view_and_type_and_each_of_its_columns_has_a_comment(conn):
    missing = rows(
        conn,
        """
        select c.relname, a.attname
        from pg_class as c
        left join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
        where c.relnamespace = 'public'::regnamespace
            and c.relname like 'dispatch\\_%'
            and c.relkind in ('r', 'v', 'm', 'p')
            and num_nulls(obj_description(c.oid, 'pg_class'), col_description(c.oid, a.attnum)) > 0
        union all
        select t.typname, null
        from pg_type as t
        left join pg_class as c on c.oid = t.typrelid
        where t.typnamespace = 'public'::regnamespace
            and t.typname like 'dispatch\\_%'
            and (t.typtype in ('e', 'd', 'r') or c.relkind = 'c')
            and obj_description(t.oid, 'pg_type') is null
        """,
    )
    assert missing == []


def test_every_function_has_a_comment(functions):
    assert [function.signature for function in functions if not function.comment] == []


def test_every_name_says_whose_it_is(conn):
    """What the files create, they create under our prefix, on procrastinate's tables as well."""
    created = {
        name
        for text in source()
        for name in re.findall(
            r"\bcreate\s+(?:or\s+replace\s+)?(?:unique\s+)?(?:constraint\s+)?"
            r"(?:table|view|type|index|function|procedure|trigger|sequence|domain)\s+(\w+)",
            text,
        )
    }
    assert len(created) > 100
    assert {name for name in created if not name.startswith("dispatch_")} == NAMED_OTHERWISE


def test_every_constraint_was_named_by_us(conn):
    given = {
        name
        for text in source()
        for name in re.findall(r"(?<!\bon )\bconstraint\s+(?:trigger\s+)?(\w+)", text)
    }
    constraints = rows(
        conn,
        """
        select conrelid::regclass::text as relation, conname
        from pg_constraint
        where connamespace = 'public'::regnamespace
            and conrelid::regclass::text like 'dispatch\\_%'
            and contype <> 'n'
        """,
    )
    assert len(constraints) > 30
    for constraint in constraints:
        assert constraint.conname in given, constraint
        assert constraint.conname.startswith("dispatch_"), constraint


def test_every_foreign_key_is_indexed(conn):
    unindexed = rows(
        conn,
        """
        select c.conname
        from pg_constraint as c
        where c.contype = 'f'
            and c.conrelid::regclass::text like 'dispatch\\_%'
            and not exists (
                select from pg_index as i
                where i.indrelid = c.conrelid
                    and i.indpred is null
                    and (i.indkey::int2[])[0:cardinality(c.conkey) - 1] = c.conkey
            )
        """,
    )
    assert unindexed == []


@pytest.mark.parametrize("table", ["dispatch_staged_jobs", "dispatch_inbox"])
def test_what_enqueuers_append_to_locks_no_row_of_another_table(conn, table):
    assert (
        rows(
            conn,
            "select conname from pg_constraint where contype = 'f' and conrelid = %s::regclass",
            [table],
        )
        == []
    )
    assert rows(conn, "select tgname from pg_trigger where tgrelid = %s::regclass", [table]) == []


def test_arguments_are_told_from_columns_by_their_prefix(functions):
    wrong = [
        (function.signature, name)
        for function in functions
        for name in function.arguments
        if not name.startswith("p_")
    ]
    assert wrong == []
    unnamed = [f.signature for f in functions if len(f.arguments) < f.argument_count]
    assert unnamed == []


def test_locals_are_told_from_columns_by_their_prefix(functions):
    wrong = []
    for function in functions:
        for block in re.findall(
            r"\bdeclare\b(.*?)\bbegin\b", body_without_texts(function), re.DOTALL
        ):
            for declaration in re.split(r";\s*", block.strip()):
                name = declaration.strip().split(" ")[0]
                if name and not name.startswith("v_"):
                    wrong.append((function.signature, name))
    assert wrong == []


def test_a_function_that_touches_a_table_pins_its_search_path(functions, relations):
    touches = re.compile(
        rf"\b(?:from|join|into|update|using|table|only)\s+(?:{'|'.join(relations)})\b"
    )
    # A body that was parsed when it was created has found its tables once and for all.
    touching = [f for f in functions if not f.is_bound and touches.search(body_without_texts(f))]
    assert len(touching) > 20
    assert [f.signature for f in touching if PIN not in f.settings] == []


def test_a_pin_is_the_schema_and_nothing_else(functions):
    wrong = [
        (function.signature, setting)
        for function in functions
        for setting in function.settings
        if setting.startswith("search_path=") and setting != PIN
    ]
    assert wrong == []


def test_the_callers_path_does_not_matter(conn):
    """Tables and functions of the same names, first in the path, are not taken for ours."""
    conn.execute("create schema decoy")
    for (table,) in conn.execute(
        "select relname from pg_class where relnamespace = 'public'::regnamespace"
        " and relkind = 'r' and relname ~ '^(dispatch|procrastinate)_'"
    ).fetchall():
        conn.execute(f"create table decoy.{table} (no_such_column int)")
        if table.startswith("dispatch_"):
            conn.execute(f"create temporary table {table} (no_such_column int)")
    conn.execute("create function decoy.dispatch_now() returns text return 'a decoy'")
    conn.execute("create function decoy.dispatch_wake(p_policy text) returns text return 1 / 0")
    conn.execute("set search_path to pg_temp, decoy")
    conn.execute(
        """
        select public.dispatch_define_policy('p', '{"partition_by": "k", "tick_admission_budget": 9,
            "gates": [{"type": "throttle", "rate": {"ctx": "rate", "default": 60}, "per": 60},
                {"type": "adaptive_concurrency", "initial_max": 3, "target_lag_ms": 1}]}');
        select public.dispatch_map_task('t', 'p');
        select public.dispatch_set('metrics_retention', 100);
        select public.dispatch_stage('p', 't', '{"k": 1}', p_queueing_lock => 'l');
        select public.dispatch_stage('p', 't', '{"k": 1}');
        select public.dispatch_cancel(public.dispatch_stage('p', 't', '{"k": 1}'));
        select public.dispatch_pause('p', '1');
        select public.dispatch_resume('p', '1');
        """
    )
    admitted = rows(conn, "select jobs_admitted from public.dispatch_tick()")
    assert admitted == [(2,)]
    # procrastinate's own triggers need its schema; ours still meet the temporary tables.
    conn.execute("set search_path to public")
    conn.execute("update procrastinate_jobs set status = 'doing'")
    conn.execute("update procrastinate_jobs set status = 'succeeded'")
    conn.execute("set search_path to pg_temp, decoy")
    assert rows(conn, "select count(*) from public.dispatch_inflight_jobs") == [(0,)]
    assert rows(conn, "select public.dispatch_next_due() is null") == [(False,)]
    conn.execute("call public.dispatch_run('1 second')")
    conn.execute("select public.dispatch_stage('p', 't', '{\"k\": 2}') from generate_series(1, 9)")
    conn.execute("select public.dispatch_force_admit('p', '2', 1), public.dispatch_drain('p')")
    conn.execute("select public.dispatch_finish(job_id, true) from public.dispatch_inflight_jobs")
    conn.execute("select public.dispatch_sweep()")
    conn.execute("select public.dispatch_drop_policy('p')")
    # Two by the tick, nine by hand, and the one that was cancelled while it was staged.
    assert rows(conn, "select count(*) from public.procrastinate_jobs") == [(12,)]


def test_trigger_functions_are_pinned_for_they_run_under_anybodys_path(functions):
    triggers = [function for function in functions if function.is_trigger]
    assert len(triggers) >= 3
    assert [function.signature for function in triggers if PIN not in function.settings] == []


def test_nothing_but_pinned_triggers_runs_with_the_owners_rights(functions):
    definers = [function for function in functions if function.security_definer]
    assert [f.signature for f in definers if not f.is_trigger or PIN not in f.settings] == []


def test_nobody_may_make_triggers_of_what_runs_with_the_owners_rights(functions):
    """On a table of anybody's they would free slots as its owner likes."""
    definers = [function for function in functions if function.security_definer]
    assert [f.signature for f in definers if f.is_public] == []


def test_nothing_depends_on_the_language_of_messages(functions):
    texts = re.compile(r"\b(?:pg_context|pg_exception_context|message_text)\b", re.IGNORECASE)
    assert [f.signature for f in functions if texts.search(f.body)] == []


def test_what_procrastinates_statements_fire_runs_with_the_owners_rights(conn):
    """A worker's role need not have rights on our tables."""
    fired = rows(
        conn,
        """
        select t.tgname, p.prosecdef
        from pg_trigger as t
        join pg_proc as p on p.oid = t.tgfoid
        where t.tgrelid = 'procrastinate_jobs'::regclass
            and p.proname like 'dispatch\\_%'
        """,
    )
    assert len(fired) >= 3
    assert [row.tgname for row in fired if not row.prosecdef] == []


def test_only_volatile_functions_write_lock_or_notify(functions):
    writes = re.compile(
        r"\b(?:insert\s+into|update\s+\w+\s+(?:as\s+\w+\s+)?set|delete\s+from"
        r"|for\s+(?:no key\s+)?update|pg_notify|nextval)\b"
    )
    writing = [f for f in functions if writes.search(body_without_texts(f))]
    assert len(writing) > 20
    assert [f.signature for f in writing if f.volatility != "v"] == []
    assert [f.signature for f in writing if f.parallel != "u"] == []


def test_the_clock_alone_knows_what_time_it_is(functions):
    """Only the database's one clock counts; the wall clock may measure how long something took."""
    asks = re.compile(
        r"\b(?:now\(\)|current_timestamp|transaction_timestamp|statement_timestamp|localtimestamp|current_date)"
    )
    assert [
        f.signature
        for f in functions
        if asks.search(re.sub(r"dispatch_now\(\)", "", body_without_texts(f)))
    ] == []
    measuring = {f.name for f in functions if "clock_timestamp()" in body_without_texts(f)}
    assert measuring <= {
        "dispatch_now",
        "dispatch_decide",
        "dispatch_settle_outcomes",
        "dispatch_force",
        "dispatch_run",
        "dispatch_resolve",
        "dispatch_sweep_partitions",
    }


def test_plpgsql_check_finds_nothing(plpgsql_check, conn):
    conn.execute("set search_path to public, pg_temp")
    found = rows(
        conn,
        """
        select p.proname as name, p.oid::regprocedure::text, finding.lineno, finding.message
        from pg_proc as p
        join pg_language as l on l.oid = p.prolang
        left join lateral (
            select tgrelid from pg_trigger where tgfoid = p.oid limit 1
        ) as fired on true
        cross join lateral lint.plpgsql_check_function_tb(
            p.oid::regprocedure, coalesce(fired.tgrelid, 0)::regclass, fatal_errors => false,
            performance_warnings => true, extra_warnings => true, security_warnings => true
        ) as finding
        where p.pronamespace = 'public'::regnamespace
            and p.proname like 'dispatch\\_%'
            and l.lanname = 'plpgsql'
        """,
    )
    findings = [row for row in found if row.message not in ACCEPTED_EVERYWHERE]
    assert [row for row in findings if (row.name, row.message) not in ACCEPTED] == []
    assert {(row.name, row.message) for row in findings} == ACCEPTED, (
        "an exception that is none any more"
    )


# The SQL surface: these names are API, and Postgres cannot rename an argument in place.
SURFACE = {
    "dispatch_define_policy": "p_name text, p_definition jsonb",
    "dispatch_drop_policy": "p_name text, p_force boolean DEFAULT false",
    "dispatch_stage": (
        "p_policy text, p_task_name text, p_args jsonb DEFAULT '{}'::jsonb, "
        "p_context jsonb DEFAULT NULL::jsonb, p_queue_name text DEFAULT NULL::text, "
        "p_priority integer DEFAULT 0, p_lock text DEFAULT NULL::text, "
        "p_queueing_lock text DEFAULT NULL::text, "
        "p_scheduled_at timestamp with time zone DEFAULT NULL::timestamp with time zone"
    ),
    "dispatch_stage_many": "p_policy text, p_jobs jsonb",
    "dispatch_tick": "p_policy text DEFAULT NULL::text, p_shard text DEFAULT NULL::text",
    "dispatch_run": "IN p_max_duration interval",
    "dispatch_admit": "p_policy text, p_shard text DEFAULT NULL::text",
    "dispatch_settle": "p_handoff_id bigint, p_ids bigint[] DEFAULT '{}'::bigint[],"
    " p_errors text[] DEFAULT '{}'::text[]",
    "dispatch_next_due": "p_policy text DEFAULT NULL::text, p_shard text DEFAULT NULL::text",
    "dispatch_finish": "p_job_id bigint, p_succeeded boolean",
    "dispatch_cancel": "p_id bigint",
    "dispatch_pause": "p_policy text, p_partition_key text DEFAULT NULL::text",
    "dispatch_resume": "p_policy text, p_partition_key text DEFAULT NULL::text",
    "dispatch_force_admit": "p_policy text, p_partition_key text, p_limit integer",
    "dispatch_drain": (
        "p_policy text, p_partition_key text DEFAULT NULL::text, p_limit integer DEFAULT 10000"
    ),
    "dispatch_requeue_dead": "p_id bigint",
    "dispatch_discard_dead": "p_id bigint",
    "dispatch_sweep": "",
    "dispatch_job": "p_id bigint",
    "dispatch_map_task": "p_task_name text, p_policy text",
    "dispatch_set": "p_name text, p_value numeric",
    "dispatch_setting": "p_name text",
    "dispatch_explain": "p_id bigint",
    "dispatch_partitions_page": (
        "p_policy text, p_sort text DEFAULT 'pending'::text, p_cursor text DEFAULT NULL::text, "
        "p_limit integer DEFAULT 50, p_search text DEFAULT NULL::text, "
        "p_only_pending boolean DEFAULT false"
    ),
    "dispatch_waiting_page": (
        "p_policy text, p_partition_key text, p_limit integer DEFAULT 50, "
        "p_cursor text DEFAULT NULL::text"
    ),
    "dispatch_now": "",
    "dispatch_channel": "",
}


def test_public_functions_take_what_they_always_took(conn):
    found = rows(
        conn,
        "select proname, pg_get_function_arguments(oid) as arguments from pg_proc"
        " where pronamespace = 'public'::regnamespace and proname = any (%s)",
        [list(SURFACE)],
    )
    assert len(found) == len(SURFACE)  # no second one of the name
    assert {row.proname: row.arguments for row in found} == SURFACE


# Columns that users read.
COLUMNS = {
    "dispatch_partitions": (
        "policy_name partition_key shard pending_count in_flight_count total_admitted"
        " decayed_admits due_at last_checked_at last_admitted_at context gate_state"
    ),
    "dispatch_adaptive_stats": "current_max ewma_lag_ms sample_count",
    "dispatch_inflight_jobs": "job_id policy_name partition_key admitted_at",
    "dispatch_staged_jobs": (
        "id task_name queue_name args context priority scheduled_at attempts staged_at"
    ),
    "dispatch_tick_result": (
        "policy_name partitions_seen partitions_admitted partitions_denied jobs_admitted"
        " handoff_failures denied_reasons duration_ms"
    ),
}


def test_columns_that_users_read_keep_their_names(conn):
    found = rows(
        conn,
        "select attrelid::regclass::text as relation, attname from pg_attribute"
        " where attrelid = any (%s::regclass[]) and attnum > 0",
        [list(COLUMNS)],
    )
    there = {(row.relation, row.attname) for row in found}
    promised = {(relation, name) for relation in COLUMNS for name in COLUMNS[relation].split()}
    assert promised <= there
