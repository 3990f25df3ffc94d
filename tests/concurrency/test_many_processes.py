"""Drivers of both kinds and workers, each a process of its own, on one database."""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg
import pytest

from tests.concurrency.app import LOG, OVERLAPS, Application, process, stage_work
from tests.concurrency.support import assert_balanced, value
from tests.support import wait_for


@pytest.mark.timeout(600)
def test_four_drivers_and_three_workers_run_every_job_once_within_its_cap(
    dsn: str, conn: psycopg.Connection
):
    jobs, keys = 5000, 50
    caps = {f"key {n}": n % 3 + 1 for n in range(keys)}
    conn.execute(LOG)
    Application(dsn).dispatch.sync(conn)
    # Of three keys, the first jobs that may run at once end only when all of them have started.
    meeting = {"key 2": 3, "key 4": 2, "key 5": 3}
    work: list[dict[str, Any]] = [
        {"k": f"key {n % keys}", "cap": caps[f"key {n % keys}"], "n": n, "seconds": n % 5 / 1000}
        for n in range(jobs)
    ]
    for job in work[: 3 * keys]:
        if job["n"] // keys < meeting.get(job["k"], 0):
            job["meet"] = meeting[job["k"]]
    stage_work(conn, work[: jobs // 2])
    with contextlib.ExitStack() as stack:
        for role in ["driver", "sql-driver"] * 2 + ["worker"] * 3:
            stack.enter_context(process(role, dsn))
        # The other half comes in while the first is at work, in statements of all sizes.
        position, size = jobs // 2, 1
        while position < jobs:
            stage_work(conn, work[position : position + size])
            position, size = position + size, size % 97 + 8
        wait_for(
            lambda: (
                value(conn, "select count(*) = %s from run_log", 2 * jobs)
                and not value(conn, "select count(*) from dispatch_inflight_jobs")
            ),
            timeout=540,
        )
    starts = conn.execute(
        "select count(*), count(distinct n), count(distinct job_id)"
        " from run_log where event = 'start'"
    )
    assert starts.fetchone() == (jobs, jobs, jobs)
    overlaps: dict[str, int] = dict(conn.execute(OVERLAPS).fetchall())
    assert {key: most for key, most in overlaps.items() if most > caps[key]} == {}
    assert set(overlaps) == set(caps)
    assert {key: overlaps[key] for key in meeting} == meeting
    assert_balanced(conn)
