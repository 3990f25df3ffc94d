"""The cost curve: what ticking and staging cost as partitions and backlog grow.

A point is measured in turns with bare procrastinate, which takes as many jobs a call and does not
know of the backlog, so points that were measured at different times can be compared.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import psycopg

from bench import work
from bench.admission import PARTITION_BATCH, WARM_UP, defers, tick
from bench.plan import Plan
from bench.race import race

JOBS_A_PARTITION = 5
JOBS_A_TICK = 2 * PARTITION_BATCH
JOBS_A_CALL = 1_000
PARTITIONS = 1_000  # of the points that differ in their backlog

# Each sweep in ascending order: a point's database grows into the next one's.
MANY_PARTITIONS = (1_000, 10_000, 100_000, 1_000_000)
MANY_JOBS = (10_000, 100_000, 1_000_000, 5_000_000)


def cost_curve(plan: Plan, *, large: bool) -> list[dict[str, Any]]:
    """Measure the points of both sweeps; the large ones take many minutes."""
    if plan.small:
        return [*_partitions_sweep(plan, (100, 200)), *_jobs_sweep(plan, (5_000, 6_000))]
    last = None if large else 2
    return [
        *_partitions_sweep(plan, MANY_PARTITIONS[:last]),
        *_jobs_sweep(plan, MANY_JOBS[:last]),
    ]


def _partitions_sweep(plan: Plan, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """More and more partitions, all of them due, with a few jobs each."""
    with plan.server.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        _define(conn)
        before = 0
        for size in sizes:
            work.seed(conn, range(before, size), jobs=JOBS_A_PARTITION)
            before = size
            yield _point(plan, "partitions", dsn, size, size * JOBS_A_PARTITION)


def _jobs_sweep(plan: Plan, sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """More and more jobs in the same partitions."""
    with plan.server.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        _define(conn)
        before = 0
        for size in sizes:
            more = (size - before) // PARTITIONS
            work.seed(conn, range(PARTITIONS), jobs=more, known=before > 0)
            before = size
            yield _point(plan, "jobs", dsn, PARTITIONS, size)


def _define(conn: psycopg.Connection[Any]) -> None:
    work.define(
        conn, dataclasses.replace(work.POLICY, admission_batch_size=JOBS_A_TICK // PARTITION_BATCH)
    )


def _point(plan: Plan, sweep: str, dsn: str, partitions: int, jobs: int) -> dict[str, Any]:
    """Tick and stage in turns. What is staged makes up for what is admitted, more or less."""
    plan.server.checkpoint()
    count = plan.size(30, 2)
    with plan.server.database(bare=True) as bare:
        laps = race(
            _ticks(dsn, count),
            defers(bare, count * JOBS_A_TICK, JOBS_A_TICK),
            _stages(dsn, count, partitions),
            defers(bare, count * JOBS_A_CALL, JOBS_A_CALL),
        )
    tick_ms, bare_tick_ms, stage_ms, bare_stage_ms = (
        statistics.median(lap.steps) * 1000 for lap in laps
    )
    return {
        "sweep": sweep,
        "partitions": partitions,
        "jobs": jobs,
        "partitions_a_tick": PARTITION_BATCH,
        "jobs_a_tick": laps[0].done / count,
        "tick_ms": tick_ms,
        "admitted_per_s": laps[0].done / count / tick_ms * 1000,
        "bare_tick_ms": bare_tick_ms,
        "stage_ms": stage_ms,
        "bare_stage_ms": bare_stage_ms,
    }


def _ticks(dsn: str, count: int) -> Iterator[int]:
    with psycopg.connect(dsn, autocommit=True) as conn:
        for _ in range(WARM_UP):
            tick(conn)
        yield 0
        for _ in range(count):
            yield tick(conn)


def _stages(dsn: str, count: int, partitions: int) -> Iterator[int]:
    """Stage 1,000 jobs a call, spread over the partitions."""
    size = JOBS_A_CALL
    with psycopg.connect(dsn, autocommit=True) as conn:
        work.stage(conn, [work.arguments(number) for number in range(10)])
        yield 0
        for call in range(count):
            numbers = range(call * size, (call + 1) * size)
            # A large odd stride: neighbours in a call are no neighbours among the partitions.
            work.stage(conn, [work.arguments(n * 7_919 % partitions, n) for n in numbers])
            yield size
