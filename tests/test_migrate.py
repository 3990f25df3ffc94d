"""Migrating and uninstalling: once, whole, and nothing but what is ours."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from procrastinate.schema import SchemaManager
from psycopg import sql

from pydispatch import errors
from pydispatch.embedded import EmbeddedPostgres
from pydispatch.migrate import migrate, script, sql_files, sql_root, uninstall

SMALL = {
    "migrations/0001_things.sql": """
        create type dispatch_colour as enum ('red', 'green');
        create table dispatch_things (id bigint generated always as identity primary key);
    """,
    "migrations/0002_trigger.sql": """
        create function dispatch_watch() returns trigger
        language plpgsql set search_path from current as 'begin return null; end';
        create trigger dispatch_watch after update on procrastinate_jobs
        for each row execute function dispatch_watch();
        create index dispatch_jobs_idx on procrastinate_jobs (task_name, id);
    """,
    "functions/10_count.sql": """
        create or replace function dispatch_count() returns bigint
        language sql set search_path from current as 'select count(*) from dispatch_things';
    """,
    "functions/20_twice.sql": """
        create or replace function dispatch_twice(p_n int) returns int
        language sql immutable return 2 * p_n;
        create or replace procedure dispatch_nothing() language plpgsql as 'begin end';
    """,
    "views/10_first.sql": """
        create or replace view dispatch_first as select id from dispatch_things;
    """,
    "views/20_second.sql": """
        create or replace view dispatch_second as select id from dispatch_first;
    """,
}

_numbers = itertools.count(1)
Write = Callable[..., Path]


@pytest.fixture
def empty(server: EmbeddedPostgres, admin: psycopg.Connection) -> Iterator[str]:
    """The conninfo of a database that holds procrastinate's schema alone."""
    name = f"migrate_{next(_numbers)}"
    admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    with psycopg.connect(server.dsn(name)) as conn:
        conn.execute(SchemaManager.get_schema())
    yield server.dsn(name)
    admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def db(empty: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(empty, autocommit=True) as conn:
        yield conn


@pytest.fixture
def role(db: psycopg.Connection) -> Iterator[sql.Identifier]:
    """A role that may log in and nothing else."""
    role = sql.Identifier(f'A "role" of {db.info.dbname}')
    db.execute(sql.SQL("create role {} login").format(role))
    yield role
    db.execute(sql.SQL("drop owned by {0} cascade; drop role {0}").format(role))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that lays a folder of SQL files: the small ones, some changed (None: absent)."""

    def write(changes: dict[str, str | None] | None = None) -> Path:
        root = tmp_path / str(next(_numbers))
        for folder in ("migrations", "functions", "views"):
            (root / folder).mkdir(parents=True)
        for name, text in {**SMALL, **(changes or {})}.items():
            if text is not None:
                (root / name).write_text(text)
        return root

    return write


def psql(
    server: EmbeddedPostgres, dsn: str, text: str, *options: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [server.bin_dir / "psql", "-XqAt", "-v", "ON_ERROR_STOP=1", *options, "-f", "-", dsn],
        input=text,
        capture_output=True,
        text=True,
    )


def dump(server: EmbeddedPostgres, dsn: str) -> list[str]:
    """The whole database as SQL, without the lines that differ from dump to dump."""
    shown = subprocess.run(
        [server.bin_dir / "pg_dump", dsn], check=True, capture_output=True, text=True
    ).stdout
    return [
        line for line in shown.splitlines() if not line.startswith(("\\restrict", "\\unrestrict"))
    ]


def value(conn: psycopg.Connection, query: str, *parameters: object) -> Any:
    row = conn.execute(query.encode(), parameters).fetchone()
    assert row is not None
    return row[0]


def ours(conn: psycopg.Connection) -> set[str]:
    """Every object in the database with our prefix."""
    return {
        row[0]
        for row in conn.execute(
            """
            select oid::regprocedure::text from pg_proc where proname like 'dispatch\\_%'
            union all select oid::regclass::text from pg_class where relname like 'dispatch\\_%'
            union all select typname from pg_type where typname like 'dispatch\\_%'
            union all select tgname from pg_trigger where tgname like 'dispatch\\_%'
            """
        )
    }


class TestMigrate:
    def test_applies_migrations_then_functions_then_views_by_name(self, empty, write):
        assert migrate(empty, root=write()) == list(SMALL)

    def test_second_run_writes_nothing(self, db, write):
        root = write()
        migrate(db, root=root)
        with db.transaction():
            assert migrate(db, root=root) == []
            assert value(db, "select pg_current_xact_id_if_assigned()") is None

    def test_new_migration_is_applied_and_all_repeatables_again(self, db, write):
        migrate(db, root=write())
        root = write({"migrations/0003_more.sql": "alter table dispatch_things add n int;"})
        repeatables = [name for name in SMALL if not name.startswith("migrations")]
        assert migrate(db, root=root) == ["migrations/0003_more.sql", *repeatables]

    def test_line_ends_of_a_checkout_do_not_matter(self, db, write):
        migrate(db, root=write())
        root = write()
        for file in root.glob("*/*.sql"):
            file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
        assert migrate(db, root=root) == []

    def test_is_part_of_the_callers_transaction(self, db, write):
        before = ours(db)
        with db.transaction(force_rollback=True):
            migrate(db, root=write())
            assert "dispatch_things" in ours(db)
        assert ours(db) == before

    def test_leaves_the_session_as_it_was(self, db, write):
        changed = ("search_path", "client_min_messages", "lock_timeout")
        db.execute("set search_path to public, pg_catalog")
        db.execute("set client_min_messages to log")
        with db.transaction():
            migrate(db, root=write())
            inside = [value(db, f"show {name}") for name in changed]
        after = [value(db, f"show {name}") for name in changed]
        assert inside == after == ["public, pg_catalog", "log", "0"]

    def test_works_for_an_owner_without_further_rights(self, empty, db, role, write):
        db.execute(sql.SQL("create schema mine authorization {}").format(role))
        dsn = psycopg.conninfo.make_conninfo(
            empty, user=role.as_string()[1:-1].replace('""', '"'), options="-c search_path=mine"
        )
        migrate(dsn, root=write(), with_procrastinate=True)
        assert value(db, "select count(*) from mine.dispatch_second") == 0
        assert uninstall(dsn)

    def test_twenty_processes_at_once_all_succeed_and_one_applies(self, empty, write):
        root = write()
        code = (
            "import sys, pathlib; from pydispatch.migrate import migrate;"
            " sys.stdin.readline();"
            " print(len(migrate(sys.argv[1], root=pathlib.Path(sys.argv[2]))))"
        )
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, empty, str(root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(20)
        ]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        applied = [process.communicate(timeout=60)[0].strip() for process in processes]
        assert [process.returncode for process in processes] == [0] * 20
        assert sorted(applied) == ["0"] * 19 + [str(len(SMALL))]


class TestRefusal:
    def test_edited_migration_is_refused_by_name_and_nothing_changes(self, db, write):
        migrate(db, root=write())
        before = ours(db)
        root = write(
            {
                "migrations/0002_trigger.sql": "select 1;",
                "migrations/0003_more.sql": "create table dispatch_more ();",
            }
        )
        with pytest.raises(
            errors.MigrationRefused, match=r"migrations/0002_trigger\.sql"
        ) as caught:
            migrate(db, root=root)
        assert caught.value.sqlstate == "PD011"
        assert caught.value.hint
        assert ours(db) == before

    def test_ledger_newer_than_the_code_is_refused(self, db, write):
        migrate(db, root=write({"migrations/0003_more.sql": "create table dispatch_more ();"}))
        with pytest.raises(errors.MigrationRefused, match=r"migrations/0003_more\.sql"):
            migrate(db, root=write())

    def test_failing_file_is_named_with_its_line_and_all_is_rolled_back(self, db, write):
        before = ours(db)
        root = write({"functions/20_twice.sql": "select 1;\n\nselect no_such_column;\n"})
        with pytest.raises(
            errors.MigrationRefused, match=r"sql/functions/20_twice\.sql, line 3: .*no_such_column"
        ) as caught:
            migrate(db, root=root)
        assert caught.value.sqlstate == "42703"
        assert ours(db) == before

    def test_gives_up_rather_than_let_others_queue_behind_it(self, empty, db, write):
        before = ours(db)
        db.execute("set lock_timeout to '50ms'")
        with psycopg.connect(empty) as worker:
            worker.execute("lock table procrastinate_jobs in row exclusive mode")
            with pytest.raises(errors.MigrationRefused, match=r"0002_trigger\.sql") as caught:
                migrate(db, root=write())
        assert caught.value.sqlstate == "55P03"
        assert ours(db) == before

    def test_error_of_the_connection_is_no_refusal(self):
        with pytest.raises(psycopg.OperationalError):
            migrate("host=/nonexistent")

    def test_old_server_is_refused(self, db):
        statement = script().replace("< 140000", "< 990000")
        with errors.translate(), pytest.raises(psycopg.DatabaseError, match="too old") as caught:
            db.execute(statement.encode())
        assert isinstance(errors.translated(caught.value), errors.MigrationRefused)

    def test_folder_without_files_is_refused(self, db, tmp_path):
        with pytest.raises(FileNotFoundError):
            migrate(db, root=tmp_path)


class TestProcrastinate:
    def test_missing_schema_is_an_error_that_names_the_command_and_the_place(self, db, write):
        db.execute("create schema elsewhere")
        with pytest.raises(errors.ProcrastinateMissing, match="elsewhere") as caught:
            migrate(db, schema="elsewhere", root=write())
        assert "procrastinate --app=... schema --apply" in str(caught.value.hint)
        assert "pydispatch migrate --with-procrastinate" in str(caught.value.hint)
        assert caught.value.detail == "It is in schema public."

    def test_old_schema_is_refused(self, db, write):
        db.execute("drop function procrastinate_defer_jobs_v1 cascade")
        with pytest.raises(errors.ProcrastinateMissing, match="too old") as caught:
            migrate(db, root=write())
        assert "procrastinate_defer_jobs_v1" in str(caught.value.detail)

    def test_is_applied_on_request_and_only_where_absent(self, db, write):
        db.execute("create schema elsewhere")
        root = write()
        first = migrate(db, schema="elsewhere", with_procrastinate=True, root=root)
        assert first == ["procrastinate", *SMALL]
        assert value(db, "select count(*) from elsewhere.procrastinate_jobs") == 0
        assert migrate(db, schema="elsewhere", with_procrastinate=True, root=root) == []


class TestSchema:
    @pytest.mark.parametrize("name", ["plain", 'Odd "Schema", é'])
    def test_any_schema_by_argument_or_search_path(self, db, write, name):
        db.execute(sql.SQL("create schema {}").format(sql.Identifier(name)))
        root = write()
        assert migrate(db, schema=name, with_procrastinate=True, root=root)
        db.execute(sql.SQL("set search_path to {}, public").format(sql.Identifier(name)))
        assert migrate(db, root=root) == []
        assert value(db, "select to_regclass('public.dispatch_things')") is None
        db.execute("set search_path to public")
        call = sql.SQL("select {}.dispatch_count()").format(sql.Identifier(name))
        assert db.execute(call).fetchone() == (0,)

    def test_a_run_ticks_the_schema_that_it_is_in_whatever_the_path_is_and_was(self, db):
        for schema in ("one", 'the "other"'):
            db.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))
            migrate(db, schema=schema, with_procrastinate=True)
            db.execute(sql.SQL("set search_path to {}").format(sql.Identifier(schema)))
            db.execute("select dispatch_define_policy('p', '{}')")
            db.execute("call dispatch_run('1 second')")
            db.execute("select dispatch_stage('p', 't')")
        db.execute("call one.dispatch_run('1 second')")
        waiting = "select count(*) from {}.dispatch_staged_jobs"
        one = db.execute(sql.SQL(waiting).format(sql.Identifier("one"))).fetchone()
        other = db.execute(sql.SQL(waiting).format(sql.Identifier('the "other"'))).fetchone()
        assert (one, other) == ((0,), (1,))

    def test_two_schemas_live_side_by_side(self, db, write):
        db.execute("create schema other")
        root = write()
        migrate(db, root=root)
        migrate(db, schema="other", with_procrastinate=True, root=root)
        uninstall(db, schema="other")
        assert migrate(db, root=root) == []
        assert value(db, "select dispatch_count()") == 0

    def test_functions_are_pinned_to_the_schema_and_nothing_else(self, db, write):
        db.execute("set search_path to '$user', public, pg_catalog")
        migrate(db, root=write())
        pinned = value(db, "select proconfig from pg_proc where proname = 'dispatch_count'")
        assert pinned == ["search_path=public, pg_temp"]

    @pytest.mark.parametrize("by_argument", [True, False])
    def test_missing_schema_is_refused(self, db, write, by_argument):
        db.execute("set search_path to nowhere")
        with pytest.raises(errors.MigrationRefused, match="no schema"):
            migrate(db, schema="nowhere" if by_argument else None, root=write())


class TestRepeatables:
    def test_are_replaced_in_place_with_their_grants(self, db, write):
        migrate(db, root=write())
        before = value(db, "select 'dispatch_count()'::regprocedure::oid")
        db.execute("grant execute on function dispatch_count() to pg_monitor")
        migrate(db, root=write({"functions/10_count.sql": SMALL["functions/10_count.sql"] + "--"}))
        assert value(db, "select 'dispatch_count()'::regprocedure::oid") == before
        assert "pg_monitor" in value(
            db, "select proacl::text from pg_proc where proname = 'dispatch_count'"
        )

    def test_all_real_ones_can_be_replaced_in_place(self, conn, tmp_path):
        root = shutil.copytree(sql_root(), tmp_path / "sql")
        first = min((root / "functions").glob("*.sql"))
        first.write_text(first.read_text() + "-- changed\n")
        query = """
            select oid::regprocedure::text, oid from pg_proc where proname like 'dispatch%'
            union all
            select oid::regclass::text, oid from pg_class where relname like 'dispatch%'
        """
        before = dict(conn.execute(query).fetchall())
        assert f"functions/{first.name}" in migrate(conn, root=root)
        after = dict(conn.execute(query).fetchall())
        assert {name for name in before | after if before.get(name) != after.get(name)} == set()

    def test_no_table_is_theirs(self, conn):
        made = conn.execute(
            "select distinct split_part(o, ' ', 1) from dispatch_migrations, unnest(creates) o"
            " where kind = 'repeatable'"
        ).fetchall()
        assert {kind for (kind,) in made} == {"function", "procedure", "view", "trigger"}

    def test_that_no_file_makes_any_more_are_dropped(self, db, write):
        migrate(db, root=write())
        migrate(
            db,
            root=write(
                {
                    "functions/20_twice.sql": None,
                    "views/20_second.sql": None,
                    "views/10_first.sql": None,
                }
            ),
        )
        gone = {
            "dispatch_twice(integer)",
            "dispatch_nothing()",
            "dispatch_first",
            "dispatch_second",
        }
        assert not gone & ours(db)
        assert "dispatch_watch()" in ours(db), "a migration's own function stays"

    def test_trigger_goes_with_the_file_that_made_it(self, db, write):
        trigger = """
            create or replace function dispatch_look() returns trigger
            language plpgsql as 'begin return null; end';
            create or replace trigger zz_dispatch_look after insert on procrastinate_jobs
            for each statement execute function dispatch_look();
        """
        migrate(db, root=write({"functions/30_look.sql": trigger}))
        migrate(db, root=write())
        assert not {"dispatch_look()", "dispatch_look"} & ours(db)
        assert value(db, "select count(*) from pg_trigger where tgname like 'zz%%'") == 0

    def test_signature_that_changed_leaves_no_overload_behind(self, db, write):
        migrate(db, root=write())
        migrate(
            db,
            root=write(
                {
                    "functions/20_twice.sql": """
                        create or replace function dispatch_twice(p_n bigint, p_m int = 0)
                        returns bigint language sql immutable return 2 * p_n;
                    """
                }
            ),
        )
        assert {name for name in ours(db) if "twice" in name} == {"dispatch_twice(bigint,integer)"}

    @pytest.mark.parametrize(
        ("name", "text", "query", "expected"),
        [
            (
                "functions/20_twice.sql",
                "create or replace function dispatch_twice(p_n int) returns text"
                " language sql immutable return '2' || p_n;",
                "select dispatch_twice(1)",
                "21",
            ),
            (
                "functions/20_twice.sql",
                "create or replace function dispatch_twice(p_other int) returns int"
                " language sql immutable return 3 * p_other;",
                "select dispatch_twice(p_other => 2)",
                6,
            ),
            (
                "views/10_first.sql",
                "create or replace view dispatch_first as select 'x' as extra, 7 as id;",
                "select id from dispatch_second",
                7,
            ),
        ],
        ids=["another result type", "a renamed argument", "a view's other columns"],
    )
    def test_that_cannot_be_replaced_are_made_anew_with_rights(
        self, db, role, write, name, text, query, expected
    ):
        migrate(db, root=write())
        for statement in (
            "grant execute on function dispatch_twice(int) to {} with grant option",
            "revoke execute on function dispatch_twice(int) from public",
            "grant select on dispatch_first to {}, public",
            "alter view dispatch_first owner to {}",
        ):
            db.execute(sql.SQL(statement).format(role))
        rights = """
            select coalesce(proacl::text, '') from pg_proc where proname = 'dispatch_twice'
            union all
            select coalesce(relacl::text, '') || relowner::regrole
            from pg_class where relname = 'dispatch_first'
        """
        before = db.execute(rights).fetchall()
        migrate(db, root=write({name: text}))
        assert value(db, query) == expected
        assert db.execute(rights).fetchall() == before

    def test_rows_survive_when_all_is_made_anew(self, db, write):
        trigger = """
            create or replace function dispatch_look() returns trigger
            language plpgsql as 'begin return null; end';
            create or replace trigger dispatch_look after insert on dispatch_things
            for each statement execute function dispatch_look();
        """
        migrate(db, root=write({"functions/30_look.sql": trigger}))
        db.execute("insert into dispatch_things default values")
        views = {"views/10_first.sql": "create view dispatch_first as select 1 as id;"}
        for changes in (views, {"functions/30_look.sql": trigger, **views}, views):
            migrate(db, root=write(changes))
            migrate(db, root=write({**changes, "functions/99_last.sql": "select 1;"}))
            assert value(db, "select count(*) from dispatch_things") == 1

    def test_users_view_on_a_view_that_is_replaced_survives(self, db, write):
        migrate(db, root=write())
        db.execute("create view report as select id from dispatch_second")
        migrate(
            db,
            root=write(
                {
                    "views/10_first.sql": "create or replace view dispatch_first as"
                    " select id, 1 as n from dispatch_things;",
                    "views/20_second.sql": None,
                }
            ),
        )
        assert db.execute("select id from report").fetchall() == []
        assert "dispatch_second" in ours(db), "kept, since something depends on it"

    def test_users_objects_with_our_prefix_are_left_alone(self, db, write):
        migrate(db, root=write())
        db.execute("create table dispatch_orders ()")
        db.execute("create function dispatch_limit() returns int language sql return 1")
        migrate(db, root=write({"functions/20_twice.sql": None}))
        uninstall(db)
        assert {"dispatch_orders", "dispatch_limit()"} <= ours(db)


class TestScript:
    def test_psql_applies_it_once_and_a_second_time_changes_nothing(self, server, empty, db, write):
        text = script(root=write())
        first = psql(server, empty, text)
        assert first.returncode == 0, first.stderr
        assert "applied views/20_second.sql" in first.stderr
        before = dump(server, empty)
        second = psql(server, empty, text)
        assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
        assert dump(server, empty) == before

    def test_is_the_same_as_migrating(self, server, empty, db, write):
        root = write()
        migrate(empty, root=root)
        assert psql(server, empty, script(root=root)).stderr == ""
        uninstall(empty)
        psql(server, empty, script(root=root))
        assert migrate(empty, root=root) == []

    def test_is_all_that_psql_needs(self, server, empty):
        done = psql(
            server,
            empty,
            script()
            + """
            select dispatch_define_policy('p', '{"gates": [{"type": "concurrency", "max": 1}]}');
            select dispatch_stage('p', 'a_task'), dispatch_stage('p', 'a_task');
            select jobs_admitted from dispatch_tick();
            select jobs_admitted from dispatch_tick();
            select procrastinate_finish_job_v1(
              (procrastinate_fetch_job_v2(null, null)).id, 'succeeded', false
            );
            select jobs_admitted from dispatch_tick();
            select status from procrastinate_jobs order by id;
            """,
        )
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.isalnum()]
        assert lines[-5:] == ["1", "0", "1", "succeeded", "todo"]

    def test_refuses_an_edited_migration_by_name(self, server, empty, write):
        migrate(empty, root=write())
        done = psql(server, empty, script(root=write({"migrations/0001_things.sql": "select 1;"})))
        assert done.returncode == 3
        assert "migrations/0001_things.sql was edited" in done.stderr

    def test_carries_procrastinate_and_the_schema(self, server, empty, db):
        db.execute("create schema other")
        text = script(schema="other", with_procrastinate=True)
        assert psql(server, empty, text, "--single-transaction").returncode == 0
        assert migrate(db, schema="other") == []

    def test_is_one_statement_without_commands_of_psql(self):
        lines = script(with_procrastinate=True).splitlines()
        assert not [line for line in lines if line.startswith("\\")]
        assert lines[-1] == "$pydispatch$;"

    def test_text_with_any_quotes_arrives(self, db, write):
        nasty = "do $sql$begin perform $q$'\\%s :x$q$; end$sql$; select '$$' || $a$ $ $a$ -- $"
        migrate(db, root=write({"functions/30_nasty.sql": nasty}))


class TestUninstall:
    def test_leaves_the_database_as_it_was(self, server, empty, write):
        before = dump(server, empty)
        migrate(empty, root=write())
        dropped = uninstall(empty)
        assert dump(server, empty) == before
        assert {"table dispatch_things", "view dispatch_second", "type dispatch_colour"} <= set(
            dropped
        )

    def test_of_the_real_files_leaves_the_database_as_it_was(self, server, empty):
        before = dump(server, empty)
        assert migrate(empty)
        uninstall(empty)
        assert dump(server, empty) == before

    def test_twice_is_once(self, empty, write):
        migrate(empty, root=write())
        assert uninstall(empty)
        assert uninstall(empty) == []

    def test_what_the_user_built_on_it_stops_it(self, db, write):
        migrate(db, root=write())
        db.execute("create view report as select id from dispatch_second")
        before = ours(db)
        with pytest.raises(psycopg.errors.DependentObjectsStillExist, match="report"):
            uninstall(db)
        assert ours(db) == before

    def test_staged_jobs_stop_it_unless_forced(self, conn):
        conn.execute("select dispatch_define_policy('p', '{}'), dispatch_stage('p', 'task')")
        with pytest.raises(errors.PolicyNotEmpty, match="staged"):
            uninstall(conn)
        assert value(conn, "select count(*) from dispatch_staged_jobs") == 1
        uninstall(conn, force=True)
        assert ours(conn) == set()

    def retry(self, conn):
        """A job whose retry waits in its policy, and when it is to run."""
        conn.execute("select dispatch_define_policy('p', '{}')")
        conn.execute("select dispatch_stage('p', 'task')")
        conn.execute("select * from dispatch_tick()")
        job = value(conn, "select (procrastinate_fetch_job_v2(null, null)).id")
        retry_at = value(conn, "select date_trunc('second', now()) + interval '1 hour'")
        conn.execute(
            "select procrastinate_retry_job_v2(%s, %s, 7, null, 'a lock')", [job, retry_at]
        )
        assert value(conn, "select scheduled_at from procrastinate_jobs") != retry_at
        return retry_at

    def test_retry_that_waits_goes_back_into_procrastinates_queue(self, conn):
        retry_at = self.retry(conn)
        with pytest.raises(errors.PolicyNotEmpty):
            uninstall(conn)
        uninstall(conn, force=True)
        row = conn.execute("select scheduled_at, priority, lock from procrastinate_jobs").fetchone()
        assert row == (retry_at, 7, "a lock")

    def test_retry_that_cannot_go_back_yet_stops_it(self, conn, connect):
        retry_at = self.retry(conn)
        holder = connect(autocommit=False)
        holder.execute("select from procrastinate_jobs for update")
        with pytest.raises(errors.PolicyNotEmpty, match="retried"):
            uninstall(conn, force=True)
        holder.rollback()
        uninstall(conn, force=True)
        assert value(conn, "select scheduled_at from procrastinate_jobs") == retry_at

    def test_retry_that_is_dead_stops_it_or_is_cancelled(self, conn):
        self.retry(conn)
        conn.execute(
            "select dispatch_bury(array_agg(id), array['no'], now()) from dispatch_staged_jobs"
        )
        with pytest.raises(errors.PolicyNotEmpty, match="dead"):
            uninstall(conn)
        uninstall(conn, force=True)
        assert value(conn, "select status from procrastinate_jobs") == "cancelled"


class TestFiles:
    def test_real_files_are_found_in_the_checkout(self):
        assert (sql_root() / "install.sql").is_file()
        names = [file.name for file in sql_files()]
        assert names == sorted(
            names, key=lambda name: ("migrations functions views".find(name.split("/")[0]), name)
        )

    def test_folder_inside_the_package_comes_first(self, tmp_path):
        package = tmp_path / "pydispatch"
        shutil.copytree(Path(__file__).parents[1] / "pydispatch", package)
        shutil.copytree(sql_root(), package / "sql")
        (tmp_path / "sql").mkdir()
        shown = subprocess.run(
            [sys.executable, "-c", "import pydispatch.migrate as m; print(m.sql_root())"],
            check=True,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        ).stdout.strip()
        assert Path(shown) == package / "sql"
