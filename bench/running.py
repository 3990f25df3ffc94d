"""Jobs that run: what our triggers cost a worker, and how soon a freed slot is taken."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from procrastinate import PsycopgConnector
from procrastinate.jobs import Status
from psycopg.conninfo import conninfo_to_dict

from bench import work
from bench.admission import defers, tick
from bench.measurement import Measurement, compare
from bench.plan import Plan
from bench.race import percentile, race
from pydispatch import Concurrency, Policy

PATIENCE = 30.0  # seconds for a job that has to come

COMMITS = "select xact_commit + xact_rollback from pg_stat_database where datname = %s"


def worker(plan: Plan) -> Iterator[Measurement]:
    """A worker's fetch and finish of jobs that a policy admitted, against bare procrastinate."""
    jobs = plan.size(500, 20)
    laps = []
    for _ in range(plan.repeat):
        with plan.server.database() as dsn, plan.server.database(bare=True) as bare_dsn:
            _fill(dsn, jobs)
            for _ in defers(bare_dsn, jobs, jobs):
                pass
            plan.server.checkpoint()
            laps.append(race(work_off(dsn, jobs), work_off(bare_dsn, jobs)))
    yield compare(
        "worker",
        "a worker's fetch and finish, jobs/s",
        bar=0.95,
        at_least=True,
        ours=[ours.rate for ours, _ in laps],
        reference=[bare.rate for _, bare in laps],
        unit="jobs/s",
    )


def _fill(dsn: str, jobs: int) -> None:
    """Put jobs into the queue by way of the policy."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        work.define(conn)
        work.stage_all(conn, 50, jobs)
        done = 0
        while done < jobs:
            done += tick(conn)


def work_off(dsn: str, jobs: int) -> Iterator[int]:
    """Fetch and finish that many jobs as procrastinate's worker does."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("vacuum analyze procrastinate_jobs, procrastinate_events")
    loop = asyncio.new_event_loop()
    app = work.program(PsycopgConnector(conninfo=dsn), policy=None).app
    manager = app.job_manager
    loop.run_until_complete(app.open_async())
    worker_id = loop.run_until_complete(manager.register_worker())

    async def run() -> None:
        job = await manager.fetch_job(queues=["bench"], worker_id=worker_id)
        assert job is not None
        await manager.finish_job(job, status=Status.SUCCEEDED, delete_job=False)

    warm_up = jobs // 10
    for _ in range(warm_up):
        loop.run_until_complete(run())
    yield 0
    for _ in range(jobs - warm_up):
        loop.run_until_complete(run())
        yield 1
    loop.run_until_complete(app.close_async())
    loop.close()


def latency(plan: Plan) -> Iterator[Measurement]:
    """A driver process: from a finish to the next admission of a full partition, and idle."""
    policy = Policy(work.POLICY.name, partition_by="tenant", gates=[Concurrency(max=1)])
    finishes, idle = plan.size(100, 10), plan.size(10, 1)
    waits, statements = [], []
    for _ in range(plan.repeat):
        with plan.server.database() as dsn:
            with (
                psycopg.connect(dsn, autocommit=True) as conn,
                psycopg.connect(dsn, autocommit=True) as listener,
            ):
                work.define(conn, policy)
                listener.execute("listen procrastinate_any_queue_v1")
                work.stage(conn, [work.arguments(0, number) for number in range(finishes + 6)])
                with _driver(dsn):
                    for _ in range(5):
                        _finish_one(conn, listener)
                    samples = [_finish_one(conn, listener) for _ in range(finishes)]
            waits.append(percentile(samples, 0.95) * 1000)
            with _driver(dsn):
                statements.append(_commits_per_second(plan, dsn, idle))
    yield Measurement(
        "latency",
        "from a finish to the next admission of a full partition, p95 ms",
        bar=50.0,
        at_least=False,
        unit="ms",
        values=waits,
    )
    yield Measurement(
        "idle",
        "statements of an idle driver, /s",
        bar=2.0,
        at_least=False,
        unit="/s",
        values=statements,
    )


def _finish_one(conn: psycopg.Connection[Any], listener: psycopg.Connection[Any]) -> float:
    """Finish the one job that is queued and return the seconds until another one is."""
    job_id = _await_job(conn, listener)
    conn.execute("select procrastinate_finish_job_v1(%s, 'succeeded', false)", [job_id])
    began = time.perf_counter()
    _await_job(conn, listener)
    return time.perf_counter() - began


def _await_job(conn: psycopg.Connection[Any], listener: psycopg.Connection[Any]) -> int:
    """Return the job that is queued, as soon as a notification tells of it."""
    while True:
        row = conn.execute(
            "select min(id) from procrastinate_jobs where status = 'todo'"
        ).fetchone()
        assert row is not None
        if row[0] is not None:
            return int(row[0])
        if not list(listener.notifies(timeout=PATIENCE, stop_after=1)):
            raise TimeoutError("the driver admits nothing")


@contextlib.contextmanager
def _driver(dsn: str) -> Iterator[None]:
    """Run ``pydispatch run`` in a process of its own."""
    command = [sys.executable, "-m", "pydispatch", "--app", "bench.app.app", "run", "--no-sync"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "BENCH_APP_DSN": dsn},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _commits_per_second(plan: Plan, dsn: str, seconds: float) -> float:
    """Count the transactions in a database in which only an idle driver is at work.

    Sessions report theirs about once a second: it is counted from one report to the next. The
    median of those counts, since autovacuum comes by now and then.
    """
    name = [conninfo_to_dict(dsn)["dbname"]]
    with psycopg.connect(plan.server.dsn("postgres"), autocommit=True) as conn:
        time.sleep(2 + seconds / 2)  # until it has started and has nothing left to do
        reports = [_report(conn, name)]
        while reports[-1][1] < reports[0][1] + seconds:
            reports.append(_report(conn, name))
    return statistics.median(
        (count - before) / (at - began)
        for (before, began), (count, at) in itertools.pairwise(reports)
    )


def _report(conn: psycopg.Connection[Any], name: list[Any]) -> tuple[int, float]:
    """Wait for the next report; return the count and the time."""
    counts: list[int] = []
    while len(set(counts)) < 2:
        row = conn.execute(COMMITS, name).fetchone()
        assert row is not None
        counts.append(row[0])
        time.sleep(0.02)
    return counts[-1], time.perf_counter()
