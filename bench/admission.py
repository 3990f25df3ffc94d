"""Ticks: in SQL, by the driver, and with most of the partitions in backoff."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from typing import Any

import psycopg
from procrastinate.jobs import Job

from bench import work
from bench.measurement import Measurement, compare
from bench.plan import Plan
from bench.race import Lap, race
from pydispatch import Dispatch

PARTITION_BATCH = 50  # a policy's default: partitions of one tick
WARM_UP = 6  # ticks until a session keeps its plans

RENDER = """
select array_agg(
  row('bench', %(task)s, 0, null, null, args, null)::procrastinate_job_to_defer_v1 order by place
)::text
from jsonb_array_elements(%(args)s) with ordinality as jobs (args, place)
"""


def sql_tick(plan: Plan) -> Iterator[Measurement]:
    """``dispatch_tick()`` against ``procrastinate_defer_jobs_v1``, both called from a client."""
    for partitions, bar in ((1_000, 0.68), (10_000, 0.55)):
        yield _tick_row(
            plan,
            f"sql_tick_{partitions // 1000}k",
            f"dispatch_tick(), {partitions:,} partitions, jobs/s",
            partitions,
            bar,
            ticks,
            defers,
        )


def driver_tick(plan: Plan) -> Iterator[Measurement]:
    """The driver's tick against ``batch_defer_jobs``."""
    for partitions, bar in ((1_000, 0.75), (10_000, 0.60)):
        yield _tick_row(
            plan,
            f"driver_tick_{partitions // 1000}k",
            f"driver's tick, {partitions:,} partitions, jobs/s",
            partitions,
            bar,
            driver_ticks,
            python_defers,
        )


def _tick_row(
    plan: Plan, name: str, what: str, partitions: int, bar: float, ours: Any, bare: Any
) -> Measurement:
    partitions //= plan.size(1, 20)
    jobs = plan.size(20_000, 1_000)
    batch = PARTITION_BATCH * (jobs // partitions)
    laps: list[list[Lap]] = []
    for _ in range(plan.repeat):
        with plan.server.database() as dsn, plan.server.database(bare=True) as bare_dsn:
            plan.server.checkpoint()
            laps.append(race(ours(dsn, partitions, jobs), bare(bare_dsn, jobs, batch)))
    return compare(
        name,
        f"{what}, {batch:,} a batch",
        bar=bar,
        at_least=True,
        ours=[mine.rate for mine, _ in laps],
        reference=[other.rate for _, other in laps],
        unit="jobs/s",
    )


def ticks(dsn: str, partitions: int, jobs: int) -> Iterator[int]:
    """Tick until all jobs are admitted; each has a note of its own to be folded."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        work.define(conn)
        for number in range(WARM_UP):
            work.stage(conn, [work.arguments(number)])
            tick(conn)
        work.stage_all(conn, partitions, jobs)
        yield 0
        done = 0
        while done < jobs:
            admitted = tick(conn)
            done += admitted
            yield admitted


def tick(conn: psycopg.Connection[Any]) -> int:
    """Tick once and return how many jobs were admitted: never none."""
    row = conn.execute("select sum(jobs_admitted) from dispatch_tick('bench')").fetchone()
    if row is None or not row[0]:
        raise RuntimeError("a tick admitted nothing although jobs are due")
    return int(row[0])


def defers(dsn: str, jobs: int, batch: int) -> Iterator[int]:
    """Give procrastinate the same jobs, a call a batch; the calls are written beforehand."""
    call = "select procrastinate_defer_jobs_v1(%s::procrastinate_job_to_defer_v1[])"
    with psycopg.connect(dsn, autocommit=True) as conn:
        rendered = []
        for args in work.batches(1_000, jobs, batch):
            values = {"task": work.TASK, "args": json.dumps(args)}
            rendered.append(conn.execute(RENDER, values).fetchone())
        for _ in range(WARM_UP):
            conn.execute(call, conn.execute(RENDER, {**values, "args": "[{}]"}).fetchone())
        yield 0
        for text in rendered:
            conn.execute(call, text)
            yield batch


def driver_ticks(dsn: str, partitions: int, jobs: int) -> Iterator[int]:
    """Let a program tick until all jobs are admitted."""
    app = work.sync_program(dsn).app
    dispatch = Dispatch.of(app)
    with app.open(), psycopg.connect(dsn, autocommit=True) as conn:
        dispatch.sync()
        for number in range(WARM_UP):
            work.stage(conn, [work.arguments(number)])
            dispatch.tick(conn, work.POLICY.name)
        work.stage_all(conn, partitions, jobs)
        yield 0
        done = 0
        while done < jobs:
            (result,) = dispatch.tick(conn, work.POLICY.name)
            if not result.jobs_admitted:
                raise RuntimeError("a tick admitted nothing although jobs are due")
            done += result.jobs_admitted
            yield result.jobs_admitted


def python_defers(dsn: str, jobs: int, batch: int) -> Iterator[int]:
    """Let a program defer the same jobs, a batch at a time."""
    app = work.sync_program(dsn, policy=None).app
    with app.open(), psycopg.connect(dsn, autocommit=True) as conn:
        prepared = [
            [_job(args) for args in batch_args] for batch_args in work.batches(1_000, jobs, batch)
        ]
        for _ in range(WARM_UP):
            app.job_manager.batch_defer_jobs([_job(work.arguments(0))], conn)
        yield 0
        for some in prepared:
            app.job_manager.batch_defer_jobs(some, conn)
            yield len(some)


def _job(args: dict[str, Any]) -> Job:
    return Job(queue="bench", lock=None, queueing_lock=None, task_name=work.TASK, task_kwargs=args)


def backoff(plan: Plan) -> Iterator[Measurement]:
    """A tick with a million partitions, 99.9 % of them in backoff, against one with a thousand."""
    partitions, due = plan.size(1_000_000, 10_000), plan.size(1_000, 100)
    round_ = due // PARTITION_BATCH
    rounds = plan.repeat * plan.size(3, 1)
    with plan.server.database() as many, plan.server.database() as few:
        laps = race(
            ticks_over_backlog(many, partitions, due, rounds * round_),
            ticks_over_backlog(few, due, due, rounds * round_),
        )
    share = len(laps[0].steps) // plan.repeat
    medians = [
        [statistics.median(lap.steps[i * share :][:share]) * 1000 for i in range(plan.repeat)]
        for lap in laps
    ]
    yield compare(
        "backoff",
        f"a tick of {PARTITION_BATCH} partitions, {partitions:,} known and {partitions - due:,} in "
        f"backoff, against {due:,} known, ms",
        bar=1.5,
        at_least=False,
        ours=medians[0],
        reference=medians[1],
        unit="ms",
        against=f"{due:,} partitions",
    )


def ticks_over_backlog(dsn: str, partitions: int, due: int, count: int) -> Iterator[int]:
    """Tick that often over partitions of which some are due; one job a partition and tick."""
    turns = count * PARTITION_BATCH // due
    with psycopg.connect(dsn, autocommit=True) as conn:
        work.define(conn, dataclasses.replace(work.POLICY, admission_batch_size=1))
        work.seed(conn, range(due), jobs=turns + WARM_UP)
        if partitions > due:
            work.seed(conn, range(due, partitions), jobs=1, due=0)
        for _ in range(WARM_UP):
            tick(conn)
        yield 0
        for _ in range(count):
            yield tick(conn)
