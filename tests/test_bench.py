"""The benchmark measures what it says, whatever it finds: its shape, not its numbers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from pydispatch.embedded import EmbeddedPostgres

# What is promised of each: a ratio to bare procrastinate, or a number.
AT_LEAST = {
    "sql_tick_1k": 0.68,
    "sql_tick_10k": 0.55,
    "driver_tick_1k": 0.75,
    "driver_tick_10k": 0.6,
    "stage_many": 2.0,
    "batch_defer": 1.8,
    "enqueuers": 0.9,
    "worker": 0.95,
}
AT_MOST = {"one_defer": 1.1, "backoff": 1.5, "latency": 50.0, "idle": 2.0}
# Milliseconds of each look at an installation, the worst of them.
LOOKS = {
    *(f"page_{page}" for page in ("overview", "search", "hints", "policies", "policy")),
    *(f"page_{page}" for page in ("partitions", "search_in_partitions", "partition")),
    *(f"page_{page}" for page in ("job", "dead", "audit")),
    *("query_status", "query_hints", "scrape"),
}
AT_MOST |= dict.fromkeys(LOOKS, 300.0)


@pytest.mark.timeout(300)
def test_a_small_benchmark_measures_every_bar_and_leaves_nothing_behind(
    server: EmbeddedPostgres, admin: psycopg.Connection, tmp_path: Path
):
    databases = "select count(*) from pg_database"
    before = admin.execute(databases).fetchone()
    file = tmp_path / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--small", "--repeat=1", f"--json={file}"],
        env={**os.environ, "BENCH_DSN": server.dsn(), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert admin.execute(databases).fetchone() == before

    measured = json.loads(file.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in measured["rows"]}
    assert {name: row["bar"] for name, row in rows.items() if row["at_least"]} == AT_LEAST
    assert {name: row["bar"] for name, row in rows.items() if not row["at_least"]} == AT_MOST
    for name, row in rows.items():
        assert row["what"] in " ".join(done.stdout.split()), name
        assert 0 < min(row["values"]) <= row["measured"] <= max(row["values"]) < math.inf, name
        met = row["measured"] >= row["bar"] if row["at_least"] else row["measured"] <= row["bar"]
        assert row["met"] == met, name
        assert not row["worst"] or row["measured"] == max(row["values"]), name
        assert row["worst"] == (name in LOOKS), name
    assert len(measured["curve"]) >= 4
    for point in measured["curve"]:
        assert min(point["tick_ms"], point["stage_ms"], point["admitted_per_s"]) > 0
        assert point["jobs"] >= point["partitions"]
    assert measured["server"]["server_version"]
