"""The command line: what it does, what it prints for whom, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from typer.testing import CliRunner

from pydispatch.cli import app
from tests.support import wait_for

SHOP = """
from procrastinate import App, PsycopgConnector
from pydispatch import Concurrency, Dispatch, Throttle

app = App(connector=PsycopgConnector(conninfo={dsn!r}))
dispatch = Dispatch(app)
bare = App(connector=PsycopgConnector(conninfo={dsn!r}))

@dispatch.policy("orders", partition_by="shop", gates=[Concurrency(max=2)])
@app.task(queue="orders")
def order(shop): ...
"""

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("PG") or name in ("DATABASE_URL", "PYDISPATCH_APP"):
            monkeypatch.delenv(name)


@pytest.fixture
def cli(dsn: str) -> Cli:
    """A function that runs the command in this process, against the test's database."""

    def cli(*arguments: str, to: str | None = dsn, code: int = 0, **options: Any) -> Any:
        where = [] if to is None else ["--dsn", to]
        result = CliRunner().invoke(app, [*where, *arguments], **options)
        assert result.exit_code == code, result.output + repr(result.exception)
        return json.loads(result.stdout) if "--json" in arguments and not code else result

    return cli


@pytest.fixture
def shop(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with an application."""
    name = f"shop_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(SHOP.format(dsn=dsn))
    monkeypatch.chdir(tmp_path)
    return name


def stage(conn: psycopg.Connection, policy: str, jobs: int, **context: object) -> None:
    conn.execute(
        "select dispatch_define_policy(%s, '{}') where not exists"
        " (select from dispatch_policies where policy_name = %s)",
        [policy, policy],
    )
    for _ in range(jobs):
        conn.execute(
            "select dispatch_stage(%s, 'a_task', %s::jsonb)", [policy, json.dumps(context)]
        )


def count_jobs(conn: psycopg.Connection) -> int:
    return sum(1 for _ in conn.execute("select from procrastinate_jobs"))


class TestMigrate:
    def test_says_what_it_applied_and_then_that_nothing_is_left(self, cli, conn):
        conn.execute("create schema other")
        arguments = ["migrate", "--schema", "other", "--with-procrastinate"]
        shown = cli(*arguments).stdout.split()
        assert shown[:2] == ["applied", "procrastinate"]
        assert cli(*arguments).stdout == "up to date\n"
        assert cli(*arguments, "--json") == {"applied": []}

    def test_prints_a_script_without_connecting(self, cli):
        printed = cli("migrate", "--print", to="host=/nonexistent").stdout
        assert printed.endswith("$pydispatch$;\n")

    def test_missing_procrastinate_ends_with_an_error_that_names_the_command(self, cli, conn):
        conn.execute("create schema other")
        result = cli("migrate", "--schema", "other", code=1)
        assert result.stdout == ""
        assert result.stderr.startswith("error PD010: ")
        assert "detail: It is in schema public." in result.stderr
        assert "pydispatch migrate --with-procrastinate" in result.stderr

    def test_errors_are_json_for_scripts(self, cli, conn):
        conn.execute("create schema other")
        result = cli("--json", "migrate", "--schema", "other", code=1)
        error = json.loads(result.stderr)["error"]
        assert error["sqlstate"] == "PD010"
        assert error["hint"]


def test_version(cli):
    assert cli("--version").stdout.strip()


class TestUninstall:
    def test_asks_first(self, cli, conn):
        result = cli("uninstall", input="n\n", code=1)
        assert "schema public" in result.stderr
        assert conn.execute("select to_regclass('dispatch_policies') is null").fetchone() == (
            False,
        )
        assert "table dispatch_policies" in cli("uninstall", input="y\n").stdout
        assert conn.execute("select to_regclass('dispatch_policies') is null").fetchone() == (True,)
        assert cli("uninstall", "--yes").stdout == "nothing to drop\n"

    def test_refuses_while_jobs_are_staged(self, cli, conn):
        stage(conn, "p", 1)
        assert "error PD005" in cli("uninstall", "--yes", code=1).stderr
        assert "table dispatch_policies" in cli("uninstall", "-y", "--force", "--json")["dropped"]


class TestWhere:
    def test_database_url_and_libpq_variables(self, cli, dsn, monkeypatch):
        parts = psycopg.conninfo.conninfo_to_dict(dsn)
        url = "postgresql+psycopg://{user}@/{dbname}?host={host}&port={port}".format(**parts)
        monkeypatch.setenv("DATABASE_URL", url)
        assert cli("migrate", "--json", to=None) == {"applied": []}
        monkeypatch.delenv("DATABASE_URL")
        for name in ("host", "port", "user", "dbname"):
            variable = {"dbname": "PGDATABASE"}.get(name, f"PG{name.upper()}")
            monkeypatch.setenv(variable, str(parts[name]))
        assert cli("migrate", "--json", to=None) == {"applied": []}

    def test_any_schema(self, cli, conn):
        name = 'My "odd" \\ schema'
        conn.execute(sql.SQL("create schema {}").format(sql.Identifier(name)))
        cli("migrate", "--schema", name, "--with-procrastinate")
        assert cli("status", "--schema", name, "--json") == []
        conn.execute("drop table dispatch_policies cascade")
        assert cli("--schema", name, "tick", "--json") == []

    @pytest.mark.parametrize("attribute", [":app", ".app", ":dispatch"])
    def test_application_by_its_name(self, cli, shop, attribute):
        assert cli("--app", shop + attribute, "tick", "--json", to=None) == []

    def test_application_by_the_environment(self, cli, shop, monkeypatch):
        monkeypatch.setenv("PYDISPATCH_APP", f"{shop}:app")
        assert [row["policy_name"] for row in cli("sync", "--json", to=None)] == ["orders"]

    @pytest.mark.parametrize(
        ("path", "problem"),
        [
            ("nothing", "is not like"),
            ("no_such_module:app", "cannot import"),
            ("SHOP:missing", "cannot import"),
            ("SHOP:order", "not a Dispatch or a procrastinate App"),
            ("SHOP:bare", "has no Dispatch"),
        ],
    )
    def test_application_that_is_none_is_a_usage_error(self, cli, shop, path, problem):
        result = cli("tick", "--app", path.replace("SHOP", shop), code=2)
        assert problem in " ".join(result.stderr.replace("│", " ").split())

    def test_schema_of_an_application_is_its_own(self, cli, shop):
        cli("tick", "--app", f"{shop}:app", "--schema", "public", to=None, code=2)

    def test_no_server_is_an_error_without_a_traceback(self, cli):
        result = cli("tick", to="host=/nonexistent", code=1)
        assert result.stderr.startswith("error: ")
        assert "Traceback" not in result.output

    def test_schema_that_was_not_migrated_is_an_error_with_a_hint(self, cli, conn):
        conn.execute("create schema other")
        assert "pydispatch migrate" in cli("tick", "--schema", "other", code=1).stderr


class TestSync:
    def test_writes_policies_and_tasks(self, cli, shop, conn):
        rows = cli("sync", "--app", f"{shop}:app", "--json", to=None)
        assert rows == [{"policy_name": "orders", "tasks": [f"{shop}.order"]}]
        assert conn.execute("select policy_name from dispatch_policies").fetchall() == [("orders",)]
        assert "orders" in cli("sync", "--app", f"{shop}:app", to=None).stdout

    def test_needs_an_application(self, cli):
        assert "--app" in cli("sync", code=2).stderr


class TestTick:
    def test_admits_in_sql_without_an_application(self, cli, conn):
        stage(conn, "p", 3)
        (row,) = cli("tick", "--json")
        assert (row["policy_name"], row["jobs_admitted"]) == ("p", 3)
        assert count_jobs(conn) == 3

    def test_admits_through_the_application(self, cli, shop, conn):
        cli("sync", "--app", f"{shop}:app", to=None)
        for _ in range(3):
            conn.execute("select dispatch_stage('orders', %s, '{\"shop\": 1}')", [f"{shop}.order"])
        (row,) = cli("tick", "--app", f"{shop}:app", "--json", to=None)
        assert row["jobs_admitted"] == 2
        assert count_jobs(conn) == 2

    def test_one_policy(self, cli, conn):
        stage(conn, "p", 1)
        stage(conn, "q", 1)
        (row,) = cli("tick", "--policy", "q", "--json")
        assert row["policy_name"] == "q"

    def test_unknown_policy_is_an_error(self, cli):
        result = cli("tick", "--policy", "nobody", code=1)
        assert result.stderr.startswith("error PD001: ")


class TestStatus:
    def test_shows_each_policy(self, cli, conn):
        stage(conn, "p", 3)
        stage(conn, "q", 1)
        cli("tick", "--policy", "q")
        rows = {row["policy_name"]: row for row in cli("status", "--json")}
        assert rows["q"]["in_flight"] == 1
        assert list(rows) == ["p", "q"]
        assert [row["policy_name"] for row in cli("status", "--policy", "q", "--json")] == ["q"]

    def test_without_policies_says_so(self, cli):
        assert cli("status").stdout == "no policy is defined\n"

    def test_unknown_policy_is_an_error(self, cli):
        assert cli("status", "--policy", "nobody", code=1).stderr.startswith("error PD001: ")

    def test_plain_output_cuts_nothing_and_has_no_colour(self, cli, conn):
        name = "a policy with [bold]a name[/bold] that is long " + "x" * 80
        stage(conn, name, 1)
        shown = cli("status").stdout
        assert name in shown
        assert "\x1b" not in shown
        assert len(shown.splitlines()) == 2


class TestOperate:
    def test_cancel(self, cli, conn):
        stage(conn, "p", 1)
        ((job_id,),) = conn.execute("select id from dispatch_staged_jobs").fetchall()
        assert cli("cancel", str(job_id)).stdout == f"cancelled {job_id}\n"
        assert conn.execute("select id from dispatch_staged_jobs").fetchall() == []
        assert cli("cancel", str(job_id), code=1).stderr.startswith("error PD006: ")

    @pytest.mark.parametrize(
        "arguments",
        [
            ["cancel", str(2**63)],
            ["job", str(2**63)],
            ["dead", "requeue", str(2**63)],
            ["dead", "list", "--limit", str(2**63)],
            ["drain", "p", "--limit", "3000000000"],
            ["force-admit", "p", "7", "--limit", "3000000000"],
        ],
        ids=" ".join,
    )
    def test_what_the_database_cannot_count_to_is_bad_usage(self, cli, arguments):
        assert "Invalid value" in cli(*arguments, code=2).stderr

    def test_job(self, cli, conn):
        stage(conn, "p", 1)
        ((job_id,),) = conn.execute("select id from dispatch_staged_jobs").fetchall()
        (row,) = cli("job", str(job_id), "--json")
        assert (row["id"], row["state"]) == (job_id, "staged")
        assert cli("job", "0", code=1).stderr.startswith("error PD006: ")

    @pytest.mark.parametrize("key", [[], ["7"], [""]])
    def test_pause_and_resume(self, cli, conn, key):
        stage(conn, "p", 1)
        assert cli("pause", "p", *key, "--json") == {
            "paused": "p",
            "partition": key[0] if key else None,
        }
        assert conn.execute(
            "select policy_name, partition_key from dispatch_pauses"
        ).fetchall() == [("p", key[0] if key else None)]
        assert cli("resume", "p", *key).stdout.startswith("resumed p")
        assert conn.execute("select from dispatch_pauses").fetchall() == []
        assert cli("pause", "nobody", *key, code=1).stderr.startswith("error PD001: ")

    def test_force_admit(self, cli, conn):
        stage(conn, "p", 3)
        cli("pause", "p")
        assert cli("force-admit", "p", "", "--limit", "2", "--json") == {"admitted": 2}
        assert cli("force-admit", "p", "").stdout == "admitted 1\n"
        assert count_jobs(conn) == 3

    def test_drain(self, cli, conn):
        stage(conn, "p", 3)
        conn.execute(
            "select dispatch_stage('p', 'a_task', p_scheduled_at => now() + interval '1 hour')"
        )
        (row,) = cli("drain", "p", "--json")
        assert (row["admitted"], row["ready"], row["later"]) == (3, 0, 1)
        assert row["why"] in cli("drain", "p").stdout

    def test_dead(self, cli, conn):
        stage(conn, "p", 3)
        conn.execute(
            "select dispatch_bury(array_agg(id), array['a', 'b', 'c'], now())"
            " from dispatch_staged_jobs"
        )
        first, second, third = (row["id"] for row in cli("dead", "list", "--json"))
        assert len(cli("dead", "list", "--limit", "1", "--json")) == 1
        assert cli("dead", "requeue", str(first), "0", code=1).stderr.startswith("error PD006: ")
        assert cli("dead", "requeue", str(first), str(second), "--json") == {
            "requeued": [first, second]
        }
        cli("dead", "discard", str(third))
        assert cli("dead", "list").stdout == "no job is dead\n"
        assert [row for (row,) in conn.execute("select id from dispatch_staged_jobs")] == [
            first,
            second,
        ]

    def test_sweep(self, cli):
        assert all(row["affected"] == 0 for row in cli("sweep", "--json"))

    def test_settings(self, cli, conn):
        before = {row["name"]: row for row in cli("settings", "--json")}
        assert before["metrics_retention"]["value"] == 86400
        (row,) = cli("settings", "metrics_retention", "3600.5", "--json")
        assert (row["value"], row["default_value"]) == (3600.5, 86400)
        (row,) = cli("settings", "metrics_retention", "default", "--json")
        assert row["value"] == 86400
        assert "metrics_retention" in cli("settings").stdout

    @pytest.mark.parametrize(
        "arguments", [["nothing"], ["nothing", "1"], ["metrics_retention", "-1"]]
    )
    def test_wrong_setting_is_an_error(self, cli, arguments):
        result = cli("settings", "--", *arguments, code=1)
        assert result.stderr.startswith("error PD009: ")

    def test_value_that_is_no_number_is_an_error(self, cli):
        assert "soon" in cli("settings", "metrics_retention", "soon", code=1).stderr


class TestProcess:
    """What only a process of its own shows."""

    def command(self, *arguments: str, dsn: str) -> list[str]:
        return [sys.executable, "-m", "pydispatch", *arguments, "--dsn", dsn]

    def test_module_runs_as_the_command(self, dsn):
        done = subprocess.run(
            self.command("migrate", "--json", dsn=dsn), capture_output=True, text=True
        )
        assert (done.returncode, json.loads(done.stdout)) == (0, {"applied": []})

    def test_mistake_is_status_2(self, dsn):
        done = subprocess.run(self.command("fly", dsn=dsn), capture_output=True, text=True)
        assert done.returncode == 2

    @pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
    def test_run_admits_until_it_is_told_to_stop(self, dsn, conn, stop):
        stage(conn, "p", 1)
        with subprocess.Popen(
            self.command("run", dsn=dsn), stderr=subprocess.PIPE, text=True
        ) as process:
            wait_for(lambda: count_jobs(conn) == 1)
            stage(conn, "p", 1)
            wait_for(lambda: count_jobs(conn) == 2)
            process.send_signal(stop)
            _, log = process.communicate(timeout=20)
        assert process.returncode == 0, log
        assert "Driver stopped" in log


class TestTerminal:
    def shown(self, rows: list[dict[str, Any]], columns: int) -> str:
        ours, theirs = pty.openpty()
        code = "import sys; from pydispatch.cli_output import *;"
        code += " print_rows(eval(sys.argv[1]), empty='')"
        subprocess.run(
            [sys.executable, "-c", code, repr(rows)],
            stdout=theirs,
            check=True,
            env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"},
        )
        os.close(theirs)
        text = os.read(ours, 10_000).decode()
        lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
        return "\n".join(line.rstrip() for line in lines)

    def test_values_cannot_control_it(self):
        assert "a\\x1b]0;title\\x07b\\nc" in self.shown([{"key": "a\x1b]0;title\x07b\nc"}], 80)

    def test_table_breaks_text_between_words(self):
        shown = self.shown([{"id": 1234, "error": "it did not work"}], 20)
        assert shown.splitlines() == [
            "  id   error",
            "─" * 20,
            "1234   it did not",
            "       work",
        ]

    def test_row_that_is_too_wide_becomes_a_list(self):
        shown = self.shown([{"id": 1234, "key": "x" * 12}, {"id": 5, "key": "y"}], 16)
        assert shown.splitlines() == [
            "id   1234",
            "key  xxxxxxxxxxx",
            "     x",
            "",
            "id   5",
            "key  y",
        ]
