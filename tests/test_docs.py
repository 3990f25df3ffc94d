"""What README.md, docs/ and examples/ say is tried here: code, commands, tables, links."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer
from psycopg import sql

from pydispatch import errors
from pydispatch.cli import app as command_line
from pydispatch.demo.scene import TENANTS
from pydispatch.driver import Driver, DriverOptions
from pydispatch.embedded import EmbeddedPostgres
from tests import commands, reference
from tests.support import wait_for

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a language in a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def section(text: str, heading: str) -> str:
    """What is under a heading, with the sections below it."""
    level = heading.split(" ")[0]
    pattern = rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)"
    found = re.search(pattern, text, re.DOTALL | re.MULTILINE)
    assert found, f"no heading {heading}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in a text, without their heads."""
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    rules = [place for place, row in enumerate(cells) if set(row[0]) == {"-"}]
    heads = {place - 1 for place in rules} | set(rules)
    return [row for place, row in enumerate(cells) if place not in heads]


def words(cell: str) -> list[str]:
    """What is set as code in a cell."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture
def empty_database(server: EmbeddedPostgres, admin: psycopg.Connection) -> Iterator[str]:
    """The name of a database that nothing was installed into."""
    name = f"empty_{next(_numbers)}"  # what a test started may outlive it by a moment
    admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    yield name
    admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


Environment = Callable[[str], dict[str, str]]
_numbers = itertools.count(1)


@pytest.fixture
def environment(server: EmbeddedPostgres) -> Environment:
    """A function that gives the environment of a shell in which a database is at hand."""
    assert (server.bin_dir / "psql").exists() or shutil.which("psql")

    def environment(database: str) -> dict[str, str]:
        folders = [str(Path(sys.executable).parent), str(server.bin_dir), os.environ["PATH"]]
        return {
            **os.environ,
            **server.environment(database),
            "PATH": os.pathsep.join(folders),
            "PYTHONUNBUFFERED": "1",
        }

    return environment


@pytest.fixture
def run_shell(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """A function that runs a block with bash; what goes on in the background ends with the test."""
    groups: list[int] = []

    def run_shell(block: str, environment: dict[str, str]) -> str:
        with (tmp_path / "shown").open("w+") as shown:
            process = subprocess.Popen(
                ["bash", "-euc", block],
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=shown,
                stderr=shown,
                start_new_session=True,
            )
            groups.append(process.pid)
            status = process.wait(60)
            shown.seek(0)
            text = shown.read()
        assert status == 0, text
        return text

    yield run_shell
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)


def run_python(code: str, names: dict[str, Any]) -> None:
    """Run code that may await at its top level."""
    names.setdefault("__name__", "docs")
    compiled = compile(code, "docs", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, names)
    if inspect.iscoroutine(result):
        asyncio.run(result)


# -- everywhere


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}
            assert anchor in anchors, link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_of_the_schema_exists(path: Path, conn: psycopg.Connection) -> None:
    known = {
        name
        for (name,) in conn.execute(
            """
            select proname from pg_proc where pronamespace = 'public'::regnamespace
            union all
            select relname from pg_class where relnamespace = 'public'::regnamespace
            union all
            select typname from pg_type where typnamespace = 'public'::regnamespace
            """
        )
    }
    named = set(
        re.findall(r"\b(?:dispatch|procrastinate)_[a-z0-9_]+", path.read_text(encoding="utf-8"))
    )
    metrics = set(re.findall(r"`(dispatch_\w+)`", reference.metrics()))
    allowed = {"procrastinate_retry_job_v1", "dispatch_cron_log"} | metrics
    assert named - known - allowed == set()


def test_every_command_exists() -> None:
    command = typer.main.get_command(command_line)
    commands = set(command.commands)  # type: ignore[attr-defined]
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for line in re.findall(r"pydispatch ((?:--[\w=.]+ )*[a-z][\w-]*)", text):
            name = line.split()[-1]
            if "`pydispatch " + line in text or "\npydispatch " + line in text:
                assert name in commands, line


def test_other_pages_use_public_functions_only(conn: psycopg.Connection) -> None:
    functions = {
        name
        for (name,) in conn.execute(
            "select proname from pg_proc where pronamespace = 'public'::regnamespace"
        )
    }
    public = {name for names in reference.FUNCTIONS.values() for name in names}
    for path in PAGES:
        used = set(re.findall(r"\bdispatch_[a-z0-9_]+", path.read_text(encoding="utf-8")))
        assert used & functions - public == set(), path.name


def test_the_package_calls_public_functions_only(conn: psycopg.Connection) -> None:
    functions = {
        name
        for (name,) in conn.execute(
            "select proname from pg_proc where pronamespace = 'public'::regnamespace"
        )
    }
    public = {name for names in reference.FUNCTIONS.values() for name in names}
    used = {
        name
        for path in (ROOT / "pydispatch").rglob("*.py")
        for name in re.findall(r"\b(dispatch_[a-z0-9_]+)\(", path.read_text(encoding="utf-8"))
    }
    assert used & functions - public - {"dispatch_is_nobodys_fault"} == set()


# -- README.md


def test_the_readme_shows_the_demo_as_it_is() -> None:
    text = page("README.md")
    for tenant in TENANTS:
        assert re.search(rf"^ {tenant.name} +{tenant.limits} +{tenant.jobs} ", text, re.MULTILINE)


def test_the_quick_start_in_python_works(
    tmp_path: Path,
    empty_database: str,
    environment: Environment,
    run_shell: Callable[..., str],
    server: EmbeddedPostgres,
) -> None:
    text = section(page("README.md"), "## Quick start in Python")
    declare, defer = blocks(text, "python")
    (commands,) = blocks(text, "sh")
    (tmp_path / "app.py").write_text(declare)
    shell = environment(empty_database)

    run_shell(commands, shell)
    with psycopg.connect(server.dsn(empty_database), autocommit=True) as conn:
        run_shell(f"{sys.executable} -c '{defer}'", shell)

        def succeeded() -> int:
            query = "select count(*) from procrastinate_jobs where status = 'succeeded'"
            row = conn.execute(query).fetchone()
            assert row is not None
            return int(row[0])

        wait_for(lambda: succeeded() >= 60, 60)
        row = conn.execute(
            "select total_admitted, pending_count from dispatch_partitions"
        ).fetchone()
    assert row is not None
    assert 60 <= row[0] < 100
    assert row[1] == 100 - row[0]


def test_the_quick_start_with_psql_shows_what_it_says(
    empty_database: str, environment: Environment, run_shell: Callable[..., str]
) -> None:
    text = section(page("README.md"), "## Quick start with psql")
    shell = environment(empty_database)
    run_shell(blocks(text, "sh")[0], shell)
    try_session(blocks(text, "psql"), shell)


def test_what_the_readme_asks_in_sql_can_be_asked(dsn: str) -> None:
    text = section(page("README.md"), "## Seeing and steering")
    queries = [each for each in re.findall(r"`(select [^`]+)`", text) if "..." not in each]
    assert len(queries) >= 4
    with psycopg.connect(dsn) as conn:
        conn.execute("select dispatch_define_policy('p', '{}')")
        (job,) = conn.execute("select dispatch_stage('p', 't')").fetchall()[0]
        for query in queries:
            conn.execute(query.replace("(42)", f"({job})").encode())


def try_session(sessions: list[str], shell: dict[str, str]) -> None:
    """Type the statements of psql sessions, and compare what is shown where something is."""
    for step in re.split(r"^=> ", "".join(sessions), flags=re.MULTILINE)[1:]:
        statement, _, expected = step.partition(";\n")
        done = subprocess.run(
            ["psql", "-X", "-q", "-P", "footer=off", "-v", "ON_ERROR_STOP=1", "-c", statement],
            env=shell,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        shown = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
        if expected.strip():
            assert shown == expected.strip("\n").splitlines(), statement


# -- docs/seeing.md


def test_the_sessions_of_the_seeing_page_show_what_they_say(
    conn: psycopg.Connection, environment: Environment
) -> None:
    at_noon = "-c dispatch.fake_now=2026-01-01T12:00:00+00 -c timezone=UTC"
    shell = {**environment(conn.info.dbname), "PGOPTIONS": at_noon}
    try_session(blocks(page("docs/seeing.md"), "psql"), shell)


def test_the_seeing_page_has_every_item_and_reason_of_an_explanation() -> None:
    source = (ROOT / "sql/functions/97_explain.sql").read_text(encoding="utf-8")
    text = section(page("docs/seeing.md"), "## Why does this job not run?")
    items, reasons = text.split("| reason | what |")
    given = set(re.findall(r"item := '(\w+)'|select '(\w+)', null, null", source))
    (shares,) = re.findall(r"item := case .*? then '(\w+)' else '(\w+)' end", source)
    given |= {(item, "") for item in shares}
    assert {words(row[0])[0] for row in rows(items)} == {a or b for a, b in given}

    given = set(re.findall(r"reason := '(\w+)'", source))
    for cases in re.findall(r"reason := case(.*?)end(?: end)?;", source, re.DOTALL):
        given |= set(re.findall(r"(?:then|else|, )\s*'(\w+)'", cases))
    given |= {words(row[0])[0] for row in rows(section(POLICIES, "## Reasons"))}
    documented = {word for row in rows("| reason | what |" + reasons) for word in words(row[0])}
    ends = {"succeeded", "failed", "aborted", "cancelled", "finished"}
    kinds = {"scheduled", "retry", "queueing_lock_held", "lock_held"}
    assert documented - ends == given | kinds


# -- docs/policies.md

POLICIES = page("docs/policies.md")
MINIMAL = {
    "throttle": {"rate": 1, "per": 1},
    "concurrency": {"max": 1},
    "adaptive_concurrency": {"initial_max": 1, "target_lag_ms": 1},
}


def define(conn: psycopg.Connection, definition: Any, name: str = "p") -> None:
    with errors.translate():
        conn.execute("select dispatch_define_policy(%s, %s)", [name, json.dumps(definition)])


def refuses(conn: psycopg.Connection, definition: Any) -> bool:
    try:
        define(conn, definition)
    except errors.InvalidDefinition:
        return True
    return False


def test_the_definitions_in_the_policies_page_are_the_same(conn: psycopg.Connection) -> None:
    conn.execute(
        """
        create function max_of_endpoint(partition_key text, context jsonb) returns numeric
        language sql return 5
        """
    )
    (in_sql,) = blocks(POLICIES, "sql")
    conn.execute(in_sql.encode())
    first = conn.execute("select definition from dispatch_policies").fetchone()

    class Recorder:
        def policy(self, name: str, **options: Any) -> None:
            from pydispatch import Policy

            define(conn, Policy(name, **options).definition(), name)

    (in_python,) = blocks(POLICIES, "python")
    names = {"dispatch": Recorder()}
    run_python("from datetime import timedelta\nfrom pydispatch import *\n" + in_python, names)
    assert conn.execute("select definition from dispatch_policies").fetchone() == first


def documented_policy_keys() -> list[list[str]]:
    return rows(section(POLICIES, "## The policy"))


def test_the_policies_page_has_every_key(conn: psycopg.Connection) -> None:
    with pytest.raises(errors.InvalidDefinition) as refused:
        define(conn, {"nonsense": 1})
    known = refused.value.message.partition("known here: ")[2].split(", ")
    keys = {words(row[0])[0].partition(".")[0] for row in documented_policy_keys()}
    assert keys | {"fairness"} == set(known)


@pytest.mark.parametrize("row", documented_policy_keys(), ids=lambda row: words(row[0])[0])
def test_a_key_of_a_policy_has_the_range_and_default_that_the_page_says(
    row: list[str], conn: psycopg.Connection
) -> None:
    key, value, span, default = words(row[0])[0], row[1], row[2], row[3]
    outer, _, inner = key.partition(".")

    def definition(value: Any) -> dict[str, Any]:
        return {outer: {inner: value}} if inner else {outer: value}

    define(conn, {})
    column = {"queue": "queue_name", "fairness.half_life": "half_life"}.get(key, key)
    query = sql.SQL("select {} from dispatch_policies").format(sql.Identifier(column))
    stored = conn.execute(query).fetchone()
    assert stored is not None
    expected = "none" if not stored[0] else str(stored[0]).removesuffix(".0")
    assert default.strip("`").replace(",", "") == expected

    if numbers := [float(each.replace(",", "")) for each in re.findall(r"[\d,.]*\d", span)]:
        low, high = numbers
        good: list[Any]
        bad: list[Any]
        if "bytes" in span:
            good = ["x" * int(low), "x" * int(high), "ä" * int(high / 2)]
            bad = ["", "x" * int(high + 1), "ä" * int(high / 2 + 1)]
        elif "whole" in value:
            good, bad = [int(low), int(high)], [int(low) - 1, int(high) + 1, low + 0.5]
        else:
            good, bad = [low, high], [low * 0.999, high + 1]
    elif "path" in value:
        good, bad = ["a", "a.b", ["a", "b.c"], []], ["", "a..b", 1, {}]
    elif "gates" in value:
        good, bad = [[]], [{}, "throttle", [1]]
    else:
        good, bad = words(value), ["else", 1]
        assert good
    for each in good:
        assert not refuses(conn, definition(each)), each
    for each in bad:
        assert refuses(conn, definition(each)), each
    assert "or null" not in value or not refuses(conn, definition(None))


def documented_parameters() -> list[tuple[str, list[str]]]:
    found = []
    for kind in MINIMAL:
        found += [(kind, row) for row in rows(section(POLICIES, f"### `{kind}`"))]
    return [*found, *(("fairness", row) for row in rows(section(POLICIES, "## Fairness")))]


def test_the_parameters_in_the_page_are_those_of_the_specification(
    conn: psycopg.Connection,
) -> None:
    specified = {}
    for kind, name, required, default, minimum, above, maximum, below in conn.execute(
        "select * from dispatch_gate_spec()"
    ):
        bounds = (("≥", minimum), (">", above), ("≤", maximum), ("<", below))
        specified[kind, name] = [
            ", ".join(
                f"{sign} {reference.number(bound)}" for sign, bound in bounds if bound is not None
            ),
            "required" if required else "none" if default is None else reference.number(default),
        ]
    documented = {(kind, words(row[0])[0]): row[1:3] for kind, row in documented_parameters()}
    assert documented == specified


def test_a_parameter_is_refused_beyond_its_range(conn: psycopg.Connection) -> None:
    for kind, row in documented_parameters():
        if kind == "fairness":
            continue
        key = words(row[0])[0]
        for sign, bound in re.findall(r"([≥>≤<]) ([\d,.]*\d)", row[1]):
            value = float(bound.replace(",", ""))
            beyond = {"≥": value - 0.0001, ">": value, "≤": value * 1.001, "<": value}[sign]
            gate = {"type": kind, **MINIMAL[kind], key: beyond}
            assert refuses(conn, {"gates": [gate]}), gate
            if sign in "≥≤" and key not in ("max", "min"):
                gate[key] = value
                assert not refuses(conn, {"gates": [gate]}), gate


def test_the_page_has_every_reason() -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "sql/functions").glob("4*.sql")
    )
    source += (ROOT / "sql/functions/50_share.sql").read_text(encoding="utf-8")
    source += (ROOT / "sql/functions/60_admit.sql").read_text(encoding="utf-8")
    source += (ROOT / "sql/functions/55_queue.sql").read_text(encoding="utf-8")
    given = set(re.findall(r"dispatch_narrow\([^;]*?'([a-z_]+)'\)", source)) | {"limit_error"}
    given |= set(re.findall(r"reason := '([a-z_]+)'", source))
    assert {words(row[0])[0] for row in rows(section(POLICIES, "## Reasons"))} == given


# -- docs/errors.md


def documented_errors() -> dict[str, str]:
    table = rows(page("docs/errors.md").partition("## What is no error")[0])
    return {words(row[0])[0]: words(row[1])[0] for row in table}


def test_the_errors_page_has_every_error() -> None:
    raised = {
        sqlstate
        for path in (ROOT / "sql").rglob("*.sql")
        for sqlstate in re.findall(r"'(PD\d{3})'", path.read_text(encoding="utf-8"))
    }
    classes = {each.sqlstate: each.__name__ for each in errors.DispatchError.__subclasses__()}
    assert documented_errors() == classes
    assert raised == set(classes) - {errors.NotMigrated.sqlstate}


@pytest.mark.parametrize(
    ("sqlstate", "statement"),
    [
        ("PD001", "select dispatch_stage('nowhere', 't')"),
        ("PD002", "select dispatch_define_policy('q', '[]')"),
        ("PD003", "select dispatch_stage('p', '')"),
        ("PD003", """select dispatch_stage_many('p', '[{"task_name": "t"}, {"task_name": 1}]')"""),
        ("PD004", "select dispatch_stage('p', 't', p_queueing_lock => 'taken')"),
        ("PD005", "select dispatch_drop_policy('p')"),
        ("PD006", "select dispatch_job(-1)"),
        ("PD006", "select dispatch_requeue_dead(-1)"),
        (
            "PD007",
            """select dispatch_stage_many('p', '[{"task_name": "t"}, {"task_name": "t"}]')""",
        ),
        ("PD008", "select dispatch_admit('p')"),
        ("PD008", "select dispatch_settle(-1)"),
        ("PD009", "select dispatch_set('nonsense', 1)"),
        ("PD009", "select dispatch_force_admit('p', '', 0)"),
        ("PD009", "select dispatch_partitions_page('p', 'size')"),
        ("PD009", "select dispatch_waiting_page('p', '', 0)"),
    ],
)
def test_an_error_is_raised_when_the_page_says_so(
    sqlstate: str, statement: str, conn: psycopg.Connection
) -> None:
    define(conn, {"max_pending": 1})
    conn.execute("select dispatch_stage('p', 't', p_queueing_lock => 'taken')")
    with pytest.raises(errors.DispatchError) as raised, errors.translate():
        conn.execute(statement.encode())
    assert raised.value.sqlstate == sqlstate
    assert type(raised.value).__name__ == documented_errors()[sqlstate]
    assert raised.value.hint


# -- docs/cli.md


def test_the_page_of_commands_has_each_with_its_options() -> None:
    assert page("docs/cli.md") == commands.page(), "run: python -m tests.reference"


# -- docs/sql.md and docs/operations.md


def test_the_sql_page_says_what_the_database_says(conn: psycopg.Connection) -> None:
    assert page("docs/sql.md") == reference.reference(conn), "run: python -m tests.reference"


def test_the_operations_page_has_every_setting(conn: psycopg.Connection) -> None:
    text = page("docs/operations.md")
    assert text == reference.with_part(text, "settings", reference.settings(conn)), (
        "run: python -m tests.reference"
    )


def test_the_queries_of_the_operations_page_run(conn: psycopg.Connection) -> None:
    gate = {"type": "throttle", "rate": 1, "per": 3600}
    define(conn, {"gates": [gate]}, "endpoints")
    conn.execute("select dispatch_stage('endpoints', 't')")
    conn.execute("select dispatch_tick()")
    conn.execute("select dispatch_stage('endpoints', 't')")
    conn.execute("update dispatch_partitions set due_at = 'epoch'")
    conn.execute("select dispatch_tick()")
    queries = blocks(section(page("docs/operations.md"), "## What to watch"), "sql")
    assert len(queries) == 4
    for query in queries:
        assert conn.execute(query.encode()).fetchall(), query


def test_cron_commands_run(
    dsn: str, conn: psycopg.Connection, environment: Environment, run_shell: Callable[..., str]
) -> None:
    define(conn, {})
    conn.execute("select dispatch_stage('p', 't')")
    text = section(page("docs/operations.md"), "### cron")
    example = (EXAMPLES / "crontab").read_text(encoding="utf-8")
    shell = {**environment(conn.info.dbname), "DATABASE_URL": dsn}
    for source in (text, example):
        commands = re.findall(r"^\* \* \* \* \*  (psql .*)$", source, re.MULTILINE)
        assert len(commands) == 2
        for command in commands:
            assert run_shell(command, shell) == ""
    assert conn.execute("select count(*) from procrastinate_jobs").fetchone() == (1,)


def test_pg_cron_commands_run(conn: psycopg.Connection) -> None:
    """pg_cron is played by three lines of SQL: what it is told to run is run."""
    conn.execute("create schema cron")
    conn.execute("create table cron.job_run_details (end_time timestamptz)")
    conn.execute("create table cron.job (name text, schedule text, command text)")
    conn.execute(
        """
        create function cron.schedule(text, text, text) returns void
        language sql begin atomic insert into cron.job values ($1, $2, $3); end
        """
    )
    define(conn, {})
    conn.execute("select dispatch_stage('p', 't')")
    (page_block,) = blocks(section(page("docs/operations.md"), "### pg_cron"), "sql")
    for source in (page_block, (EXAMPLES / "pg_cron.sql").read_text(encoding="utf-8")):
        conn.execute(source.encode())
    commands = conn.execute("select command from cron.job").fetchall()
    assert len(commands) == 5
    for (command,) in commands:
        conn.execute(command.encode())
    assert conn.execute("select count(*) from procrastinate_jobs").fetchone() == (1,)


@pytest.fixture
def roles(conn: psycopg.Connection) -> Iterator[Callable[[str], None]]:
    """The roles of the operations page with the rights that it gives them."""
    names = ("enqueuer", "driver", "worker", "reader")
    conn.execute("revoke create on schema public from public")
    for name in names:
        conn.execute(sql.SQL("create role {}").format(sql.Identifier(name)))
    for block in blocks(section(page("docs/operations.md"), "## Rights"), "sql"):
        conn.execute(block.encode())
    conn.execute(
        """
        grant select, insert, update, delete on procrastinate_jobs, procrastinate_events,
          procrastinate_workers, procrastinate_periodic_defers to worker;
        grant usage on all sequences in schema public to worker;
        """
    )

    def become(role: str) -> None:
        conn.execute("reset role")
        conn.execute(sql.SQL("set role {}").format(sql.Identifier(role)))

    yield become
    conn.execute("reset role")
    for name in names:
        conn.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(name)))


def test_roles_have_the_rights_that_they_need(
    roles: Callable[[str], None], conn: psycopg.Connection
) -> None:
    roles("driver")
    define(conn, {"max_pending": 9, "gates": [{"type": "concurrency", "max": 1}]})
    conn.execute("select dispatch_map_task('t', 'p')")

    roles("enqueuer")
    job = {"task_name": "t"}
    staged = [
        *conn.execute("select dispatch_stage('p', 't', p_queueing_lock => 'one')"),
        *conn.execute("select dispatch_stage_many('p', %s)", [json.dumps([job] * 3)]),
    ]
    assert len(staged) == 4
    with pytest.raises(errors.AlreadyEnqueued), errors.translate():
        conn.execute("select dispatch_stage('p', 't', p_queueing_lock => 'one')")
    cancel = "select dispatch_cancel_job(%s, false, false)"
    assert conn.execute(cancel, staged[3]).fetchone() == (True,)

    roles("driver")
    tick = "select jobs_admitted from dispatch_tick()"
    assert conn.execute(tick).fetchall() == [(1,)]

    roles("enqueuer")
    for (staged_id,), state in zip(
        staged, ("queued", "staged", "staged", "cancelled"), strict=True
    ):
        query = "select (dispatch_job(%s)).state"
        assert conn.execute(query, [staged_id]).fetchone() == (state,)
    assert conn.execute("select dispatch_job_status(%s)", staged[0]).fetchone() == ("todo",)
    assert conn.execute(cancel, staged[0]).fetchone() == (True,)

    roles("driver")
    assert conn.execute(tick).fetchall() == [(1,)]

    roles("worker")
    fetch = "select id, status from procrastinate_fetch_job_v2(null, null)"
    job_id, status = conn.execute(fetch).fetchone() or (None, None)
    assert status == "doing"
    conn.execute("select procrastinate_retry_job_v2(%s, null, null, null, null)", [job_id])

    roles("driver")
    conn.execute("select dispatch_sweep()")
    conn.execute("call dispatch_run('1 second')")

    roles("worker")
    assert conn.execute(fetch).fetchone() == (job_id, "doing")
    conn.execute("select procrastinate_finish_job_v1(%s, 'succeeded', false)", [job_id])
    conn.execute("select procrastinate_defer_jobs_v1('{}')")

    roles("driver")
    assert conn.execute("select dispatch_next_due() <= dispatch_now()").fetchone() == (True,)
    conn.execute(
        "select dispatch_admit('p'), set_config('dispatch.ok', '', false)"
    ) if False else None
    assert conn.execute(tick).fetchall() == [(1,)]

    roles("reader")
    for query in blocks(section(page("docs/operations.md"), "## What to watch"), "sql"):
        conn.execute(query.encode())
    for view in ("dispatch_inflight", "dispatch_stalled_jobs", "dispatch_dead_jobs"):
        conn.execute(sql.SQL("select * from {}").format(sql.Identifier(view)))
    conn.execute("select dispatch_job(%s)", staged[0])


def test_roles_have_no_rights_that_they_do_not_need(
    roles: Callable[[str], None], conn: psycopg.Connection
) -> None:
    define(conn, {})
    for role, statement in [
        ("enqueuer", "select dispatch_define_policy('q', '{}')"),
        ("enqueuer", "select dispatch_tick()"),
        ("enqueuer", "update dispatch_partitions set due_at = null"),
        ("worker", "select from dispatch_staged_jobs"),
        ("reader", "select dispatch_stage('p', 't')"),
        ("driver", "select dispatch_pause('p')"),
    ]:
        roles(role)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(statement.encode())


# -- docs/python.md


def test_the_code_of_the_python_page_runs(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in psycopg.conninfo.conninfo_to_dict(dsn).items():
        monkeypatch.setenv({"dbname": "PGDATABASE"}.get(name, f"PG{name.upper()}"), str(value))
    conn.execute("create table accounts (id int, exported_at timestamptz)")
    conn.execute("insert into accounts values (7, null)")
    names: dict[str, Any] = {"connection": conn}

    start, declare, defer, own, tick, drive, testing = blocks(page("docs/python.md"), "python")
    for block in (start, declare):
        run_python(block, names)
    with names["app"].open():
        names["dispatch"].sync()
        run_python(defer, names)
        run_python(own, names)
    assert conn.execute(
        "select policy_name, partition_key from dispatch_staged_jobs"
    ).fetchall() == [("exports", '[7, "eu"]')]
    assert conn.execute("select exported_at is null from accounts").fetchone() == (False,)
    names["connection"] = conn
    run_python(tick, {**names, "results": None})
    assert conn.execute("select status::text from procrastinate_jobs order by id").fetchall() == [
        ("cancelled",),
        ("todo",),
    ]
    run_python(drive, names)
    run_python(testing, names)


def test_the_python_page_has_every_option_of_the_driver() -> None:
    documented = {
        words(row[0])[0]: row[1] for row in rows(section(page("docs/python.md"), "## The driver"))
    }
    parameters = inspect.signature(Driver).parameters
    assert set(documented) == set(DriverOptions.__annotations__)
    for name, default in documented.items():
        value = parameters[name].default
        if value is None:
            assert not re.match(r"[\d`]", default)
        else:
            assert float(default.strip("`") == "True" or default) == float(value)


def test_the_python_page_has_every_action_that_the_driver_logs() -> None:
    code = (ROOT / "pydispatch" / "driver.py").read_text(encoding="utf-8")
    logged = {word for line in re.findall(r'"action": ([^}]+)', code) for word in _actions(line)}
    text = section(page("docs/python.md"), "## The driver").partition("an `action`:")[2]
    assert set(re.findall(r"`(\w+)`", text.partition(".\n")[0])) == logged


def _actions(expression: str) -> list[str]:
    """Return the actions of a record's extra: the first string, and an alternative to it."""
    return re.findall(r'(?:^|else )"(\w+)"', expression)


def test_the_errors_page_code_runs(
    dsn: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fetch:
        def defer(self, **_: Any) -> None:
            with errors.translate():
                conn.execute("select dispatch_stage('p', 't')")

    define(conn, {"max_pending": 1})
    (block,) = blocks(page("docs/errors.md"), "python")
    for _ in range(2):
        run_python(block, {"fetch": Fetch()})
        conn.execute("select dispatch_fold('p', dispatch_now())")


# -- examples/


def test_the_example_runs_as_its_page_says(
    tmp_path: Path,
    empty_database: str,
    environment: Environment,
    run_shell: Callable[..., str],
    server: EmbeddedPostgres,
) -> None:
    shutil.copy(EXAMPLES / "app.py", tmp_path)
    shell = environment(empty_database)
    (commands, _, _) = blocks(page("examples/README.md"), "sh")
    lines = [line for line in commands.splitlines() if not line.startswith("pip ")]
    *before, worker, driver = lines
    assert worker.endswith("&")

    shown = run_shell("\n".join([*before, worker, f"{driver} &"]), shell)
    assert re.search(r"the report is job \d+, todo", shown)

    with psycopg.connect(server.dsn(empty_database), autocommit=True) as conn:

        def done() -> dict[str, int]:
            return dict(
                conn.execute(
                    """
                    select policy_name || '/' || partition_key, count(*)
                    from dispatch_admissions join procrastinate_jobs on job_id = id
                    where status = 'succeeded'
                    group by 1
                    """
                ).fetchall()
            )

        wait_for(lambda: done().get("reports/acme") == 1, 30)
        wait_for(lambda: done().get("calls/acme", 0) >= 20, 30)
        wait_for(lambda: done().get("calls/zenith", 0) >= 10, 30)
        (most,) = conn.execute(
            "select max(total_admitted) from dispatch_partitions where partition_key = 'zenith'"
        ).fetchone() or (0,)
        assert most < 20


def test_the_systemd_unit_starts_a_command_that_exists(tmp_path: Path) -> None:
    unit = (EXAMPLES / "pydispatch.service").read_text(encoding="utf-8")
    (start,) = re.findall(r"^ExecStart=\S+/(pydispatch .*)$", unit, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", *start.split(), "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

    verify = shutil.which("systemd-analyze")
    if verify is None:
        return
    found = tmp_path / "pydispatch.service"
    found.write_text(unit.replace("/srv/app/.venv/bin/pydispatch", sys.executable))
    checked = subprocess.run([verify, "verify", found], capture_output=True, text=True)
    complaints = [line for line in checked.stderr.splitlines() if "pydispatch.service" in line]
    assert complaints == [], textwrap.indent(checked.stderr, "  ")
