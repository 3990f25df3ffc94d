"""The soak shows ticks around an old snapshot, and a run finds its way into the documentation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.publish import PAGE, publish
from pydispatch.embedded import EmbeddedPostgres

RUN = {
    "at": "2030-01-31T12:00:00+00:00",
    "cpus": 4,
    "python": "3.12.1",
    "server": {"server_version": "18.0 (Debian)"},
    "repeat": 3,
    "rows": [
        {
            "name": "one",
            "what": "one thing",
            "bar": 0.8,
            "at_least": True,
            "unit": "x",
            "values": [0.5, 0.7, 0.9],
            "details": {"ours, jobs/s": [1000.0, 1100.0], "bare, jobs/s": [2000.0]},
            "measured": 0.7,
            "met": False,
        },
        {
            "name": "other",
            "what": "another",
            "bar": 50.0,
            "at_least": False,
            "unit": "ms",
            "values": [17.0],
            "details": {},
            "measured": 17.0,
            "met": True,
        },
    ],
    "curve": [
        {
            "partitions": 1000,
            "jobs": 5000,
            "tick_ms": 20.0,
            "bare_tick_ms": 4.0,
            "stage_ms": 30.0,
            "bare_stage_ms": 20.0,
        }
    ],
}


def test_a_run_is_written_between_the_marks_of_the_page():
    page = PAGE.read_text(encoding="utf-8")
    written = publish(RUN, page).splitlines()
    assert "PostgreSQL 18.0, Python 3.12.1, 4 CPUs; 3 repetitions; 2030-01-31." in written
    assert "| one thing | 1,050 | 2,000 | ≥ 0.80 | 0.70 | 0.50 to 0.90 | no |" in written
    assert "| another |  |  | ≤ 50.0 ms | 17.0 ms | 17.0 to 17.0 | yes |" in written
    assert "| 1,000 | 5,000 | 20.0 ms | 5.00 | 30.0 ms | 1.50 |" in written
    assert publish(RUN, "\n".join(written) + "\n").splitlines() == written


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="substring not found"):
        publish(RUN, "# Performance\n")


@pytest.mark.timeout(120)
def test_a_short_soak_shows_ticks_before_during_and_after_an_old_snapshot(
    server: EmbeddedPostgres,
):
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", "--minutes=0.05"],
        env={**os.environ, "BENCH_DSN": server.dsn(), "COLUMNS": "200"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [line[0] for line in lines] == ["before"] * 3 + ["during"] * 4 + ["after"] * 5
    for _, _, ticks, median, p95, *_ in lines:
        assert int(ticks.replace(",", "")) > 0
        assert 0 < float(median) <= float(p95)
