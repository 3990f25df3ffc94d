"""The commands that show what goes on: what people and scripts get, and on a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from pydispatch import cli_look
from pydispatch.cli import app
from tests.concurrency.support import cap, define, finish, stage, start, tick, value
from tests.fixtures import Connect
from tests.support import Clock, wait_for

Cli = Callable[..., Any]
NEVER = {"gates": [{"type": "throttle", "rate": 1, "per": 86400, "burst": 1}]}


@pytest.fixture
def cli(dsn: str) -> Cli:
    """A function that runs the command in this process; with ``--json`` it returns the document."""

    def cli(*arguments: str, to: str = dsn, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["--dsn", to, *arguments])
        assert result.exit_code == code, result.output + repr(result.exception)
        return json.loads(result.stdout) if "--json" in arguments and not code else result

    return cli


def rows(shown: str) -> list[list[str]]:
    """The cells of plain columns, without the heads."""
    return [re.split(r" {2,}", line.strip()) for line in shown.splitlines()[1:] if line.strip()]


class TestStatus:
    def test_says_for_how_long_what_waits(self, cli: Cli, conn: psycopg.Connection, clock: Clock):
        define(conn, **cap(1))
        stage(conn, "a", "a", "b")
        tick(conn)
        clock.advance(7260)
        tick(conn)
        (row,) = cli("status", "--json")
        assert (row["pending"], row["in_flight"], row["queued"], row["running"]) == (1, 2, 2, 0)
        assert row["oldest_wait"] == 7260
        assert row["hints"]["critical"] >= 1
        shown = cli("status").stdout
        assert shown.count("2 h 01 min") == 2
        assert len(rows(shown)) == 1

    def test_paused_for_good_is_no_time(self, cli: Cli, conn: psycopg.Connection):
        define(conn)
        conn.execute("select dispatch_pause('p', 'a')")
        stage(conn, "a")
        tick(conn)
        (row,) = cli("status", "--json")
        assert row["oldest_due_at"] is None
        (row,) = cli("partitions", "--json")
        assert row["due_at"] is None
        assert cli("partitions").stdout.count("paused") == 1


@pytest.mark.parametrize(
    "settings", ["datestyle=German", "datestyle=SQL,DMY", "intervalstyle=iso_8601"]
)
def test_times_are_read_however_the_role_writes_them(
    cli: Cli, conn: psycopg.Connection, dsn: str, settings: str
) -> None:
    define(conn, "p", **NEVER)
    _, id = stage(conn, "a", "a")
    tick(conn)
    to = f"{dsn} options='-c {settings}'"
    for command in (
        ("status",),
        ("top",),
        ("partitions",),
        ("hints",),
        ("explain", str(id)),
        ("simulate", "p"),
    ):
        cli(*command, "--json", to=to)
        cli(*command, to=to)


def test_an_encoding_that_lacks_a_character_gets_an_escape(
    conn: psycopg.Connection, dsn: str
) -> None:
    define(conn, "caf\u00e9 \U0001f600")
    run = [sys.executable, "-m", "pydispatch", "--dsn", dsn, "status"]
    options: Any = {"env": {**os.environ, "PYTHONIOENCODING": "latin-1"}, "check": True}
    shown = subprocess.run(run, stdout=subprocess.PIPE, **options).stdout.decode("latin-1")
    assert "caf\u00e9 \\U0001f600" in shown
    shown = subprocess.run([*run, "--json"], stdout=subprocess.PIPE, **options).stdout.decode()
    assert json.loads(shown)[0]["policy_name"] == "caf\u00e9 \U0001f600"


@pytest.mark.parametrize("option", ["--search", "--cursor"])
def test_what_is_no_utf_8_is_bad_usage(cli: Cli, option: str) -> None:
    assert "'\\udcff' is not UTF-8" in cli("partitions", option, "\udcff", code=2).stderr


class TestPartitions:
    def test_shows_the_most_waiting_first(self, cli: Cli, conn: psycopg.Connection):
        define(conn, **cap(1))
        define(conn, "q")
        stage(conn, "few", "many", "many", "many")
        stage(conn, "other", policy="q")
        tick(conn)
        shown = cli("partitions", "p").stdout
        assert [(row[0], row[1]) for row in rows(shown)] == [("many", "2"), ("few", "0")]
        assert "concurrency_full" in shown
        assert "more:" not in shown
        assert {row["policy_name"] for row in cli("partitions", "--json")} == {"p"}
        tick(conn, "q")
        assert {row["policy_name"] for row in cli("partitions", "--json")} == {"p", "q"}

    def test_sorts_searches_and_pages(self, cli: Cli, conn: psycopg.Connection):
        define(conn)
        keys = [f"key {number}" for number in range(7)] + ["50%", "50"]
        stage(conn, *keys)
        tick(conn)
        seen = []
        arguments: list[str] = []
        while True:
            page = cli("partitions", "p", "--sort", "key", "--limit", "4", *arguments)
            seen += [row[0] for row in rows(page.stdout) if not row[0].startswith("more")]
            more = re.search(r"^more: (--cursor) (\S+)$", page.stdout, re.MULTILINE)
            if more is None:
                break
            arguments = [more[1], more[2]]
        assert seen == sorted(keys)

        def keys_of(*more: str) -> list[str]:
            found = cli("partitions", "p", "--sort", "key", "--json", *more)
            return [row["partition_key"] for row in found]

        assert keys_of("--search", "50%") == ["50%"]
        assert keys_of("--search", "KEY 3") == ["key 3"]
        assert keys_of("--limit", "2") == ["50", "50%"]
        assert keys_of("--cursor", "forged", "--limit", "1") == ["50"]
        assert keys_of("--pending") == []
        assert cli("partitions", "p", "--pending").stdout == "no partition\n"

    def test_all_of_them_are_more_than_a_page(self, cli: Cli, conn: psycopg.Connection):
        define(conn)
        keys = [f"{number:04}" for number in range(1100)]
        stage(conn, *keys)
        tick(conn)
        shown = cli("partitions", "p", "--all", "--sort", "key").stdout
        assert [row[0] for row in rows(shown)] == keys
        assert len(cli("partitions", "--all", "--json")) == 1100

    @pytest.mark.parametrize(
        "key",
        ["a\x1b[2Jb\nc", "[bold]x[/bold]", "x" * 10_000, "\N{SNAKE}\u202e", "'; drop table", ""],
        ids=["control", "markup", "long", "emoji", "sql", "empty"],
    )
    def test_any_key_is_text(self, cli: Cli, conn: psycopg.Connection, key: str):
        define(conn)
        stage(conn, key)
        tick(conn)
        (row,) = cli("partitions", "p", "--json")
        assert row["partition_key"] == key
        for command in (["partitions", "p"], ["top"]):
            shown = cli(*command).stdout
            assert (
                "".join(
                    char if char.isprintable() else char.encode("unicode_escape").decode()
                    for char in key
                )
                in shown
            )
            assert not set("\x1b\u202e") & set(shown)

    def test_unknown_policy_is_an_error(self, cli: Cli):
        assert cli("partitions", "nobody", code=1).stderr.startswith("error PD001: ")

    @pytest.mark.parametrize("wrong", [["--sort", "best"], ["--limit", "0"], ["--limit", "1000"]])
    def test_what_there_is_not_is_bad_usage(self, cli: Cli, wrong: list[str]):
        cli("partitions", *wrong, code=2)


class TestExplain:
    def test_says_what_a_job_waits_for(self, cli: Cli, conn: psycopg.Connection):
        define(conn, "p", **NEVER)
        first, second = stage(conn, "a", "a")
        tick(conn)
        shown = cli("explain", str(second)).stdout
        assert shown.startswith(f"job {second}: staged, policy p, partition a\n")
        assert "gate throttle" in shown
        items = {row["item"]: row for row in cli("explain", str(second), "--json")}
        assert items["job"]["blocks"] is True
        assert items["gate"]["gate_name"] == "throttle"
        assert items["job"]["message"] in shown
        assert cli("explain", str(first)).stdout.startswith(f"job {first}: queued")

    def test_unknown_job_is_an_error(self, cli: Cli):
        assert cli("explain", "0", code=1).stderr.startswith("error PD006: ")


class TestHints:
    def test_says_that_nothing_is_wrong(self, cli: Cli):
        assert cli("hints").stdout == "nothing is wrong\n"
        assert cli("hints", "--json", "--fail-on", "info") == []

    def test_fails_where_somebody_asks_it_to(
        self, cli: Cli, conn: psycopg.Connection, clock: Clock
    ):
        define(conn)
        conn.execute("select dispatch_sweep()")
        conn.execute("select dispatch_pause('p')")
        (row,) = cli("hints", "--json")
        assert (row["level"], row["hint"], row["policy_name"]) == ("info", "paused", "p")
        cli("hints")
        cli("hints", "--fail-on", "warning")
        cli("hints", "--fail-on", "info", code=1)
        cli("hints", "--fail-on", "info", "--policy", "another")
        stage(conn, "a")
        tick(conn)
        clock.advance(7200)
        conn.execute("select dispatch_sweep()")
        shown = cli("hints", "--fail-on", "warning", code=1).stdout
        assert shown.startswith("warning: paused, policy p\n")
        assert "pydispatch resume p" in shown
        cli("hints", "--fail-on", "critical")


class TestTop:
    def test_one_page_for_whoever_is_no_terminal(
        self, cli: Cli, conn: psycopg.Connection, clock: Clock
    ):
        define(conn, **cap(1))
        stage(conn, "held", "held", "served")
        tick(conn)
        clock.advance(3600)
        shown = cli("top").stdout
        assert "policies 1   pending 1   in flight 2   dead 0" in shown
        assert "critical waits_for_worker p: " in shown
        waiting, _, served = shown.partition("most waiting")[2].partition("last admitted\n")
        assert "held" in waiting
        assert "served" not in waiting
        assert "served" in served
        assert cli("top", "--policy", "p", "--once").stdout.count("held") == shown.count("held")
        cli("top", "--policy", "nobody", code=1)

    def test_scripts_get_a_document(self, cli: Cli, conn: psycopg.Connection):
        define(conn, **cap(1))
        conn.execute("select dispatch_pause('p', 'never admitted')")
        stage(conn, "a", "a", "never admitted")
        tick(conn)
        found = cli("top", "--json")
        assert set(found) == {"policies", "waiting", "served", "hints"}
        assert found["waiting"][0]["pending"] == 1
        assert [row["partition"] for row in found["served"]] == ["a"]

    def test_without_policies_says_so(self, cli: Cli):
        assert "no policy is defined" in cli("top").stdout


class Terminal:
    """A terminal with a command in it."""

    def __init__(self, command: list[str], lines: int = 24, columns: int = 120) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.text = ""
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
            # As in a terminal: whoever runs in the background of a script is born deaf to it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def shows(self, text: str) -> bool:
        """Has it shown this since the last time that it was asked for?"""
        self.read()
        found = text in self.text
        if found:
            self.text = self.text.rpartition(text)[2]
        return found

    def read(self) -> None:
        while select.select([self.ours], [], [], 0)[0]:
            self.text += os.read(self.ours, 65536).decode(errors="replace")

    def ended(self) -> bool:
        """Has the command ended? Until then what it shows is read, lest it wait for that."""
        self.read()
        return self.process.poll() is not None

    def key(self, key: str) -> None:
        os.write(self.ours, key.encode())


@contextmanager
def in_terminal(*arguments: str, dsn: str) -> Iterator[Terminal]:
    terminal = Terminal([sys.executable, "-m", "pydispatch", *arguments, "--dsn", dsn])
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.ours)
        os.close(terminal.theirs)


LEFT = "\x1b[?1049l"  # the terminal's own screen is back


class TestTopInATerminal:
    def test_shows_what_changes_until_q(self, dsn: str, conn: psycopg.Connection):
        define(conn, **cap(1))
        with in_terminal("top", "--interval", "0.2", dsn=dsn) as terminal:
            wait_for(lambda: terminal.shows("pending 0"), 30)
            stage(conn, "a tenant", "a tenant", "a tenant")
            tick(conn)
            wait_for(lambda: terminal.shows("pending 2"), 30)
            wait_for(lambda: terminal.shows("a tenant"), 30)
            terminal.key("x")
            wait_for(lambda: terminal.shows("pending 2"), 30)
            terminal.key("q")
            wait_for(terminal.ended, 30)
            assert terminal.process.returncode == 0
            assert terminal.shows(LEFT)
            assert termios.tcgetattr(terminal.theirs) == terminal.before

    @pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
    def test_gives_the_terminal_back_whoever_ends_it(self, dsn: str, stop: signal.Signals):
        with in_terminal("top", dsn=dsn) as terminal:
            wait_for(lambda: terminal.shows("no policy is defined"), 30)
            terminal.process.send_signal(stop)
            wait_for(terminal.ended, 30)
            assert terminal.process.returncode == 0
            assert terminal.shows(LEFT)
            assert termios.tcgetattr(terminal.theirs) == terminal.before

    def test_goes_on_when_the_database_comes_back(self, own_server: Any):
        with in_terminal("top", "--interval", "0.2", dsn=own_server.dsn("dispatch")) as terminal:
            wait_for(lambda: terminal.shows("no policy is defined"), 30)
            own_server.terminate()
            wait_for(lambda: terminal.shows("no answer:"), 30)
            own_server.start()
            with psycopg.connect(own_server.dsn("dispatch"), autocommit=True) as conn:
                define(conn, "back again")
            wait_for(lambda: terminal.shows("back again"), 30)

    def test_everything_has_its_place_however_much_there_is(
        self, dsn: str, conn: psycopg.Connection
    ):
        for number in range(30):
            define(conn, f"policy {number:02}", **cap(1))
        stage(conn, *[f"{number}" for number in range(90)] * 2, policy="policy 29")
        tick(conn, "policy 29")
        with in_terminal("top", dsn=dsn) as terminal:
            wait_for(lambda: terminal.shows("policies 30"), 30)
            wait_for(lambda: terminal.shows("policy 29"), 30)
            wait_for(lambda: terminal.shows("and 24 more policies"), 30)
            wait_for(lambda: terminal.shows("most waiting"), 30)
            wait_for(lambda: terminal.shows("last admitted"), 30)
            wait_for(lambda: terminal.shows("policy 29"), 30)


class TestMetrics:
    def test_prints_what_prometheus_reads(self, cli: Cli, conn: psycopg.Connection):
        define(conn)
        stage(conn, "a")
        tick(conn)
        text = cli("metrics").stdout
        found = {family.name: family for family in text_string_to_metric_families(text)}
        (sample,) = found["dispatch_jobs_admitted"].samples
        assert (sample.labels, sample.value) == ({"policy": "p"}, 1)
        samples = cli("metrics", "--json")
        (up,) = (sample for sample in samples if sample["name"] == "dispatch_up")
        assert repr(up["value"]) == "1", "a number like the others, and not true"

    def test_without_a_database_says_so_and_fails(self, cli: Cli):
        result = cli("metrics", to="host=/nonexistent", code=1)
        assert "dispatch_up 0.0\n" in result.stdout
        assert "Traceback" not in result.output

    def test_without_the_extra_names_it(self, cli: Cli, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.delitem(sys.modules, "pydispatch.metrics", raising=False)
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        result = cli("metrics", code=1)
        assert "pip install 'dispatch-policy[web]'" in result.stderr


@pytest.mark.parametrize(
    "statement",
    [cli_look._STATUS, cli_look._GLANCE, cli_look._HINTS, f"select * {cli_look._PAGE}"],
    ids=["status", "glance", "hints", "partitions"],
)
def test_no_look_reads_staged_jobs(
    conn: psycopg.Connection, connect: Connect, statement: str
) -> None:
    define(conn, **cap(1))
    stage(conn, "a", "a", "b")
    tick(conn)
    names = ("policy", "cursor", "search")
    arguments = {**dict.fromkeys(names), "sort": "pending", "limit": 10, "pending": False}
    looking = connect(autocommit=False)  # a session that has counted nothing yet
    with looking.transaction():
        looking.execute(statement.encode(), arguments).fetchall()
        read = looking.execute(
            """
            select relname, seq_scan + coalesce(idx_scan, 0) > 0
            from pg_stat_xact_user_tables
            where relname in ('dispatch_staged_jobs', 'dispatch_partitions')
            """
        ).fetchall()
    assert dict(read) == {"dispatch_staged_jobs": False, "dispatch_partitions": True}


# -- what an operator has to be told


def test_what_a_drain_leaves_is_explained(cli: Cli, conn: psycopg.Connection, clock: Clock) -> None:
    """case: "Drained 0, n remain" for ever, because what remains is scheduled for later."""
    define(conn)
    stage(conn, "a")
    later = [
        value(
            conn,
            "select dispatch_stage('p', 't', '{\"k\": \"a\"}', p_scheduled_at => %s)",
            clock.now.replace(hour=hour),
        )
        for hour in (9, 6)
    ]
    tick(conn)
    for _ in range(2):
        (row,) = cli("drain", "p", "a", "--json")
        assert (row["admitted"], row["ready"], row["later"]) == (0, 0, 2)
        assert row["next_at"] == "2026-01-01T06:00:00+00:00"
        assert "scheduled" in row["why"]
        assert "06:00:00" in row["why"]
    shown = cli("drain", "p").stdout
    assert row["why"] in shown
    for job_id, hour in zip(later, (9, 6), strict=True):
        shown = cli("explain", str(job_id)).stdout
        assert f"2026-01-01 {hour:02}:00:00" in shown
        assert "scheduled" in shown
    (row,) = cli("status", "--json")
    assert (row["pending"], row["oldest_wait"]) == (2, None), "what is scheduled does not wait yet"

    clock.set(clock.now.replace(hour=6))
    (row,) = cli("drain", "p", "a", "--json")
    assert (row["admitted"], row["later"]) == (1, 1)


@pytest.mark.parametrize("what", ["gate", "worker"])
def test_waiting_for_a_gate_is_told_from_waiting_for_a_worker(
    cli: Cli, conn: psycopg.Connection, clock: Clock, what: str
) -> None:
    """case: an alert cannot tell "waits for a gate" from "no worker takes it"."""
    define(conn, "p", **(NEVER if what == "gate" else cap(1)))
    admitted, waiting = stage(conn, "a", "a")
    tick(conn)
    if what == "gate":
        job_id = start(conn)
        assert job_id is not None
        finish(conn, job_id)
    clock.advance(7200)
    tick(conn)
    conn.execute("select dispatch_sweep()")

    (row,) = cli("status", "--json")
    assert row["oldest_wait"] == 7200
    assert (row["queued"], row["oldest_queued_at"] is None) == (
        int(what == "worker"),
        what == "gate",
    )
    found = [row["hint"] for row in cli("hints", "--json")]
    assert found[0] == f"waits_for_{what}"
    assert ("waits_for_worker" in found) == (what == "worker")
    cli("hints", "--fail-on", "critical", code=int(what == "worker"))
    state = {"gate": "finished", "worker": "queued"}[what]
    assert cli("explain", str(admitted)).stdout.startswith(f"job {admitted}: {state}")
    gate = {"gate": "gate throttle", "worker": "gate concurrency"}[what]
    assert gate in cli("explain", str(waiting)).stdout
