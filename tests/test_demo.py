"""The demo runs, tells a broken promise from a kept one, and ends when it is told to."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pydispatch.demo.report import Report, measure
from pydispatch.demo.scene import TABLES, TENANTS, Tenant

COMMAND = [sys.executable, "-m", "pydispatch"]


@pytest.fixture
def temporary(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary folder is the test's, open to the server's user."""
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    return {**os.environ, "TMPDIR": str(tmp_path)}


def test_the_demo_keeps_all_promises_and_shows_it_as_json() -> None:
    ended = subprocess.run([*COMMAND, "demo", "--json"], capture_output=True, text=True, timeout=90)

    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["kept"]
    assert report["broken"] == []
    assert report["proven"].startswith(f"Each of {sum(each.jobs for each in TENANTS)} jobs ran")
    by_tenant = {row["tenant"]: row for row in report["tenants"]}
    assert list(by_tenant) == [tenant.name for tenant in TENANTS]
    for tenant in TENANTS:
        row = by_tenant[tenant.name]
        assert (row["sent"], row["ran"], row["ran_twice"]) == (tenant.jobs, tenant.jobs, 0)
        assert 1 <= row["running"] <= tenant.cap


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("line", ["PostgreSQL", "  0."])
def test_a_signal_ends_the_demo_and_leaves_nothing_behind(
    tmp_path: Path, temporary: dict[str, str], number: signal.Signals, line: str
) -> None:
    process = subprocess.Popen(
        [*COMMAND, "demo"],
        env={**temporary, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert any(shown.startswith(line) for shown in process.stdout)

    process.send_signal(number)
    rest, complaints = process.communicate(timeout=20)

    assert process.returncode == 130
    assert rest.splitlines()[-1].startswith("interrupted")
    assert complaints == ""
    assert list(tmp_path.iterdir()) == []


# -- what it measures

FLOOD = Tenant("flood", "call", jobs=40, seconds=0.1, cap=4, rate=10, burst=5)
QUIET = Tenant("quiet", "call", jobs=1, seconds=0.1, cap=1)


@dataclasses.dataclass
class Run:
    """A job as its task wrote it down; seconds since the start."""

    number: int
    admitted: float
    started: float
    finished: float | None
    tenant: str = "flood"


def kept_history() -> list[Run]:
    """A run that uses its limits up: 5 at once, then one each 0.1 s; none runs longer."""
    admitted = [0.0] * 4 + [0.1] + [0.1 * place for place in range(1, 36)]
    runs = [Run(number, at, at + 0.01, at + 0.09) for number, at in enumerate(admitted)]
    return [*runs, Run(40, 0.5, 0.51, 0.6, "quiet")]


@pytest.fixture
def judge(conn: psycopg.Connection) -> Any:
    """A function that has a history measured."""

    def judge(runs: list[Run]) -> Report:
        conn.execute(TABLES)
        for place, tenant in enumerate((FLOOD, QUIET)):
            conn.execute(
                "insert into demo_tenants values (%s, %s, %s, %s, %s)",
                [tenant.name, place, tenant.rate, tenant.burst, tenant.cap],
            )
        conn.execute("insert into demo_sent select generate_series(0, 39), 'flood', 'epoch'")
        conn.execute("insert into demo_sent values (40, 'quiet', 'epoch'::timestamptz + '0.5 s')")
        for job_id, run in enumerate(runs, start=1):
            conn.execute(
                """
                insert into procrastinate_jobs (id, queue_name, task_name)
                overriding system value values (%s, 'q', 'call')
                """,
                [job_id],
            )
            conn.execute(
                """
                update procrastinate_events
                set at = 'epoch'::timestamptz + make_interval(secs => %s) where job_id = %s
                """,
                [run.admitted, job_id],
            )
            conn.execute(
                """
                insert into demo_runs (number, tenant, job_id, started_at, finished_at) values
                  (%s, %s, %s, 'epoch'::timestamptz + make_interval(secs => %s),
                   'epoch'::timestamptz + make_interval(secs => %s))
                """,
                [run.number, run.tenant, job_id, run.started, run.finished],
            )
            conn.execute(
                """
                insert into dispatch_admissions (job_id, partition_id, staged_at, admitted_at,
                  policy_name, partition_key, context)
                values (%s, dispatch_partition_id('calls', %s), 'epoch',
                  'epoch'::timestamptz + make_interval(secs => %s), 'calls', %s, '{}')
                """,
                [job_id, run.tenant, run.admitted, run.tenant],
            )
        return measure(conn, (FLOOD, QUIET), seconds=4.0)

    return judge


def test_a_run_that_uses_its_limits_up_is_within_them(judge: Any) -> None:
    report = judge(kept_history())

    assert report.kept, report.broken
    flood, quiet = report.reports
    assert (flood.sent, flood.ran, flood.running) == (40, 40, 4)
    assert flood.admitted == flood.most_in_a_second(FLOOD) == 15
    assert flood.bucket_of_admissions == pytest.approx(5)
    assert flood.longest_in_queue == pytest.approx(0.01)
    assert (flood.first_wait, flood.last_wait) == pytest.approx((0.01, 3.51))
    assert quiet.longest_wait == pytest.approx(0.01)


def test_a_job_that_did_not_end_is_lost(judge: Any) -> None:
    runs = kept_history()
    runs[7].finished = None

    assert judge(runs).broken == ("flood: 1 of 40 jobs did not run",)


def test_a_job_that_ran_twice_is_doubled(judge: Any) -> None:
    runs = kept_history()
    runs.append(dataclasses.replace(runs[39], admitted=9, started=9, finished=9.1))

    assert judge(runs).broken == ("flood: 1 jobs ran more than once",)


def test_one_job_too_many_at_once_breaks_the_cap(judge: Any) -> None:
    runs = kept_history()
    runs[4].started = 0.05

    assert judge(runs).broken[0] == "flood: 5 jobs ran at once, 4 may"


def test_one_admission_too_early_breaks_the_rate(judge: Any) -> None:
    runs = kept_history()
    runs[30].admitted -= 0.1

    (broken,) = judge(runs).broken
    assert broken.startswith("flood: admissions keep 10/s only with a burst of 6.000; 5 is allowed")


def test_starts_that_the_queue_does_not_explain_break_the_rate(judge: Any) -> None:
    runs = kept_history()
    for run in runs[10:16]:
        run.admitted = run.started = run.finished = runs[15].admitted

    assert any("starts keep 10/s only with" in broken for broken in judge(runs).broken)


def test_a_quiet_tenant_behind_the_flood_breaks_the_promise(judge: Any) -> None:
    runs = kept_history()
    runs[40].started = runs[40].finished = 3.4

    assert judge(runs).broken == ("quiet: a job waited 2.90 s, the flood's 3.51 s",)


def test_without_the_embedded_server_it_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['testing.postgresql'] = None; "
    ended = subprocess.run(
        [sys.executable, "-c", f"{hidden}from pydispatch.demo import main; sys.exit(main())"],
        capture_output=True,
        text=True,
    )

    assert ended.returncode == 1
    assert "pip install 'dispatch-policy[embedded]'" in ended.stderr
    assert "Traceback" not in ended.stderr
