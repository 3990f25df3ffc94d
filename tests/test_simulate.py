"""Simulations beside everybody else, on the command line, and as docs/simulate.md shows them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from pydispatch import errors
from pydispatch.cli import app
from tests.support import wait_for
from tests.test_docs import blocks, page, rows, section, words

CALLS = {
    "partition_by": "shop",
    "gates": [
        {"type": "throttle", "rate": 60, "per": 60, "burst": 20},
        {"type": "concurrency", "max": 5},
    ],
}
PAGE = page("docs/simulate.md")
SIMULATE = 'select * from dispatch_simulate(\'calls\', p_load => \'[{"key": "a", "jobs": 30}]\')'
Connect = Callable[..., psycopg.Connection]


@pytest.fixture(autouse=True)
def policy(conn: psycopg.Connection) -> None:
    conn.execute("select dispatch_define_policy('calls', %s)", [json.dumps(CALLS)])


def stage(conn: psycopg.Connection, jobs: int, shop: str = "a") -> None:
    conn.execute(
        "select dispatch_stage('calls', 't', %s::jsonb) from generate_series(1, %s)",
        [json.dumps({"shop": shop}), jobs],
    )


def contents(conn: psycopg.Connection) -> dict[str, list[str]]:
    """Every row of every table, and how far the job ids have come."""
    tables = conn.execute(
        """
        select oid::regclass::text from pg_class
        where relnamespace = 'public'::regnamespace and relkind = 'r'
        """
    ).fetchall()
    queries = {table: f"select t::text from {table} as t" for (table,) in tables}
    queries["ids"] = "select last_value::text from procrastinate_jobs_id_seq"
    return {
        name: sorted(row for (row,) in conn.execute(query.encode()))
        for name, query in queries.items()
    }


# -- beside everybody else


def test_nothing_stays_and_nobody_hears_of_it(conn: psycopg.Connection, connect: Connect) -> None:
    stage(conn, 30)
    conn.execute("select dispatch_tick()")
    listener = connect()
    (channel,) = listener.execute("select dispatch_channel()").fetchone() or ("",)
    listener.execute(f'listen "{channel}"'.encode())
    before = contents(conn)

    simulated = conn.execute(b"select sum(admitted) from dispatch_simulate('calls')").fetchone()
    conn.execute(SIMULATE.encode())

    assert simulated == (30,)
    assert contents(conn) == before
    conn.execute("select dispatch_resume('calls')")  # is heard, after all that came before it
    heard = [note.payload for note in listener.notifies(timeout=10, stop_after=1)]
    assert heard == ["calls"]
    assert list(listener.notifies(timeout=0)) == []


def test_a_transaction_goes_on_with_its_own_work_and_its_clock(connect: Connect) -> None:
    conn = connect(autocommit=False)
    conn.execute("set local dispatch.fake_now = '2026-05-01 12:00:00+00'")
    stage(conn, 3)
    simulated = conn.execute(b"select sum(staged) from dispatch_simulate('calls')").fetchone()
    assert simulated == (3,), "what it has staged itself is simulated"
    assert conn.execute("select dispatch_now()::text").fetchone() == ("2026-05-01 12:00:00+00",)
    conn.commit()
    assert connect().execute("select count(*) from dispatch_staged_jobs").fetchone() == (3,)


def test_no_lock_is_kept_that_keeps_anybody_from_working(connect: Connect) -> None:
    """What a sequence is locked with until the transaction ends hinders only who alters it."""
    conn = connect(autocommit=False)
    conn.execute(SIMULATE.encode())
    locks = conn.execute(
        """
        select locktype, relation::regclass::text, mode
        from pg_locks
        left join pg_class on pg_class.oid = relation
        where pid = pg_backend_pid()
          and mode <> 'AccessShareLock'
          and locktype not in ('virtualxid', 'transactionid')
          and relkind is distinct from 'S'
        """
    ).fetchall()
    assert locks == []


def test_ticks_and_simulations_do_not_wait_for_each_other(
    conn: psycopg.Connection, connect: Connect, is_blocked: Callable[[int], bool]
) -> None:
    stage(conn, 30)
    ticking = connect(autocommit=False)
    ticking.execute("select * from dispatch_tick('calls')")  # and holds the partition
    conn.execute("set statement_timeout = '30s'")
    first = conn.execute(b"select sum(admitted) from dispatch_simulate('calls')").fetchone()
    assert first == (30,)

    # Hold a simulation in its midst: a limit function of its definition waits for a lock of ours.
    conn.execute(
        """
        create table gate (n int);
        create function slow_limit(partition_key text, context jsonb) returns numeric
        language plpgsql as $$ begin lock table gate; return 1; end $$
        """
    )
    holder = connect(autocommit=False)
    holder.execute("lock table gate")
    definition = {
        "partition_by": "shop",
        "gates": [{"type": "concurrency", "max": {"sql": "public.slow_limit"}}],
    }
    simulating = [connect(), connect()]
    found: list[Any] = []

    def simulate(connection: psycopg.Connection) -> None:
        found.append(
            connection.execute(
                "select sum(admitted) from dispatch_simulate('calls', %s)", [json.dumps(definition)]
            ).fetchone()
        )

    threads = [Thread(target=simulate, args=[each]) for each in simulating]
    for thread in threads:
        thread.start()
    wait_for(lambda: all(is_blocked(each.info.backend_pid) for each in simulating))

    ticking.commit()
    conn.execute("select dispatch_finish(job_id, true) from dispatch_inflight_jobs")
    stage(conn, 5, shop="new")
    result = conn.execute("select jobs_admitted from dispatch_tick('calls')").fetchone()
    assert result == (10,)
    conn.execute("select * from dispatch_sweep()")
    conn.execute("select dispatch_define_policy('calls', %s)", [json.dumps(definition)])
    holder.commit()
    for thread in threads:
        thread.join(60)
    assert [admitted for (admitted,) in found] == [30, 30]


def test_a_read_only_transaction_is_told_why_it_cannot(conn: psycopg.Connection) -> None:
    conn.execute("set default_transaction_read_only = on")
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction, match="cannot simulate") as refused:
        conn.execute(SIMULATE.encode())
    assert "read write" in str(refused.value.diag.message_hint)


def test_the_rights_of_a_driver_and_those_of_the_page_are_enough(
    conn: psycopg.Connection, connect: Connect
) -> None:
    stage(conn, 3)
    a_driver = section(page("docs/operations.md"), "## Rights").partition("A driver, or cron")[2]
    conn.execute("create role driver")
    try:
        for block in (blocks(a_driver, "sql")[0], blocks(PAGE, "sql")[0]):
            conn.execute(block.encode())
        conn.execute("set role driver")
        simulated = conn.execute(b"select sum(admitted) from dispatch_simulate('calls')").fetchone()
        assert simulated == (3,)
        conn.execute("reset role")
    finally:
        owner = connect()
        owner.execute("drop owned by driver; drop role driver")


def test_a_simulation_that_is_cancelled_leaves_nothing(conn: psycopg.Connection) -> None:
    before = contents(conn)
    load = json.dumps([{"key": "a", "jobs": 10_000, "every": 1}])
    conn.execute("set statement_timeout = '300ms'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        conn.execute("select * from dispatch_simulate('calls', p_load => %s)", [load])
    conn.execute("set statement_timeout = 0")
    assert contents(conn) == before


def test_a_large_backlog_is_read_only_as_far_as_needed(
    conn: psycopg.Connection, connect: Connect
) -> None:
    stage(conn, 20_000)
    stage(conn, 20, shop="b")
    conn.execute("select dispatch_fold('calls', dispatch_now(), 30000)")
    read = """
        select coalesce(sum(idx_tup_fetch + seq_tup_read), 0) from pg_stat_xact_all_tables
        where relname in ('dispatch_staged_jobs', 'dispatch_partitions', 'dispatch_inbox')
    """
    sample = "select partition_key, count(*) from dispatch_waiting_sample('calls', 60) group by 1"
    conn = connect()  # which has read nothing yet
    with conn.transaction():
        assert dict(conn.execute(sample.encode()).fetchall()) == {"a": 40, "b": 20}
        fetched = conn.execute(read.encode()).fetchone()
    assert fetched is not None
    assert 60 <= fetched[0] <= 100
    shown = conn.execute("select note from dispatch_simulate('calls', p_max_jobs => 60)").fetchone()
    assert shown is not None
    assert "60 jobs" in shown[0]
    assert "left out: 19960 of 20020 waiting jobs" in shown[0]


# -- the command


@pytest.fixture
def cli(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that runs the command in a folder with the load of the page."""
    (tmp_path / "load.json").write_text(blocks(PAGE, "json")[0])
    monkeypatch.chdir(tmp_path)

    def cli(*arguments: str, code: int = 0, **options: Any) -> Any:
        result = CliRunner().invoke(app, ["--dsn", dsn, "simulate", *arguments], **options)
        assert result.exit_code == code, result.output + repr(result.exception)
        return json.loads(result.stdout) if "--json" in arguments and not code else result

    return cli


LOAD = ["--load", "load.json", "--service-time", "2s"]


def test_the_page_shows_what_the_command_prints(cli: Callable[..., Any]) -> None:
    (block,) = blocks(PAGE, "console")
    command, _, printed = block.partition("\n")
    _, program, name, *arguments = command.split()
    assert (program, name) == ("pydispatch", "simulate")
    assert cli(*arguments).stdout == printed


def test_the_page_shows_what_the_function_returns(conn: psycopg.Connection) -> None:
    define, select = (each.removeprefix("=> ").partition(";\n") for each in blocks(PAGE, "psql"))
    conn.execute(define[0].encode())
    definition = conn.execute("select definition from dispatch_policies").fetchone()
    assert definition == (CALLS,)
    result = conn.execute(select[0].encode()).pgresult
    assert result is not None
    places = range(result.nfields)
    shown = [[(result.fname(place) or b"").decode() for place in places]]
    shown += [
        [(result.get_value(row, place) or b"").decode() for place in places]
        for row in range(result.ntuples)
    ]
    assert shown == [
        [cell.strip() for cell in line.split("|")]
        for line in select[2].splitlines()
        if line and not set(line) <= set("-+")
    ]


def test_the_page_has_every_key_of_a_load_with_its_range(conn: psycopg.Connection) -> None:
    documented = {words(row[0])[0]: row for row in rows(section(PAGE, "## A load"))}
    spec = conn.execute("select * from dispatch_load_spec()").fetchall()
    assert set(documented) == {name for name, *_ in spec} | {"key", "context"}
    for name, default, minimum, maximum, whole in spec:
        _, value, given, _ = documented[name]
        span = f"{minimum:,f}".rstrip("0").rstrip(".") if minimum % 1 else f"{minimum:,.0f}"
        assert value == f"{'whole number' if whole else 'seconds'}, {span} to {maximum:,.0f}"
        assert given == ("none" if default is None else f"{default:g}")


def test_before_and_after_are_the_same_jobs(cli: Callable[..., Any]) -> None:
    report = cli("calls", *LOAD, "--set", "gates.throttle.rate=120", "--groups", "2", "--json")
    before, after = report["runs"]
    assert (before["name"], after["name"]) == ("in force", "changed")
    assert before["definition"] == CALLS
    assert after["definition"]["gates"][0]["rate"] == 120
    for run in (before, after):
        assert [(row["partition_key"], row["jobs"]) for row in run["summary"]] == [
            ("flood", 600),
            ("steady", 90),
            (None, 30),
        ]
        assert sum(row["admitted"] for row in run["series"]) == 720
    assert after["summary"][0]["longest_wait"] * 2 == before["summary"][0]["longest_wait"]


def test_the_past_is_simulated_by_default(
    cli: Callable[..., Any], conn: psycopg.Connection
) -> None:
    assert cli("calls").stdout == "no jobs to simulate\n"
    assert cli("calls", "--json")["runs"][0]["series"] == []
    stage(conn, 8)
    conn.execute("select dispatch_tick()")
    report = cli("calls", "--set", "gates.concurrency.max=8", "--last", "10 m", "--json")
    admitted = [
        [run["summary"][0]["most_in_flight"], run["summary"][0]["admitted"]]
        for run in report["runs"]
    ]
    assert admitted == [[5, 8], [8, 8]]


def test_a_definition_from_a_file_or_standard_input(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "new.json").write_text(json.dumps({**CALLS, "gates": []}))
    runs = cli("calls", *LOAD, "--definition", "new.json", "--json")["runs"]
    assert [run["summary"][0]["most_in_flight"] for run in runs] == [5, 600]
    runs = cli("calls", *LOAD, "--definition", "-", "--json", input=json.dumps(CALLS))["runs"]
    assert [run["name"] for run in runs] == ["in force"], "the same is no change"
    (run,) = cli("other", *LOAD, "--definition", "new.json", "--json")["runs"]
    assert run["name"] == "changed"


def test_ticks_now_and_then(cli: Callable[..., Any]) -> None:
    arguments = ["calls", *LOAD, "--tick-every", "1 m", "--set", "gates.concurrency.max=1000"]
    (_, changed) = cli(*arguments, "--json")["runs"]
    assert changed["summary"][0]["drained_at"] > 20 * 60


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--set", "gates.nothing.rate=1"], "there is no 'nothing', but throttle, concurrency"),
        (["--set", "gates.7.rate=1"], "there is no '7'"),
        (["--set", "partition_by.x=1"], "there is no 'x'"),
        (["--set", "gates"], "is not like path=value"),
        (["--last", "soon"], "is not like 90s"),
        (["--service-time", "-1s"], "is not like 90s"),
        (["--load", "no_such_file"], "no_such_file"),
        (["--definition", "-"], "Expecting value"),
        (["--definition", "null.json"], "there is nothing but null"),
        (["--load", "null.json"], "there is nothing but null"),
        (["--load", "deep.json"], "recursion"),
        (["--max-jobs", "0"], "Invalid value"),
    ],
)
def test_what_is_not_understood_is_bad_usage(
    cli: Callable[..., Any], arguments: list[str], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "null.json").write_text("null")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    result = cli("calls", *arguments, code=2, input="")
    assert problem in " ".join(result.stderr.replace("│", " ").split())


def test_what_the_database_refuses_is_an_error(cli: Callable[..., Any], tmp_path: Path) -> None:
    refused = cli("calls", *LOAD, "--set", "gates.throttle.rate=-1", code=1).stderr
    assert refused.startswith("error PD002: invalid definition: gates[0].rate")
    (tmp_path / "load.json").write_text('[{"jobs": -1}]')
    assert "load[0].jobs" in cli("calls", *LOAD, code=1).stderr
    assert cli("nobody", code=1).stderr.startswith("error PD001: ")
    assert errors.UnknownPolicy.sqlstate == "PD001"


def test_a_terminal_of_any_width_shows_it(dsn: str, cli: Callable[..., Any]) -> None:
    for columns in (60, 90):
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [sys.executable, "-m", "pydispatch", "--dsn", dsn, "simulate", "calls", *LOAD],
            stdout=theirs,
            env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"},
        ):
            os.close(theirs)
            shown = b""
            with contextlib.suppress(OSError):  # the end of a terminal
                while part := os.read(ours, 1000):
                    shown += part
        os.close(ours)
        text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
        lines = text.splitlines()
        assert max(map(len, lines)) <= columns
        assert any(line.startswith("flood ") and "█" in line for line in lines)
