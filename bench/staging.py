"""Deferring: many jobs a call, one job, and eight programs at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import statistics
from collections.abc import Iterator

import psycopg
from psycopg import sql

from bench import work
from bench.measurement import Measurement, compare
from bench.plan import Plan
from bench.race import race
from pydispatch import Dispatch

ENQUEUERS = 8

ENQUEUE = """
do $$
begin
  for v_i in 1 .. {jobs} loop
    perform dispatch_stage('bench', {task}, {args});
    commit;
  end loop;
end;
$$
"""


def stage_many(plan: Plan) -> Iterator[Measurement]:
    """1,000 jobs a call, by the function and by ``task.batch_defer``; bare, by the latter."""
    calls, size = plan.size(20, 3), plan.size(1_000, 100)
    laps = []
    for _ in range(plan.repeat):
        with (
            plan.server.database() as called,
            plan.server.database() as deferred,
            plan.server.database(bare=True) as bare,
        ):
            plan.server.checkpoint()
            laps.append(
                race(
                    stage_calls(called, calls, size),
                    batch_defers(work.sync_program(deferred), calls, size),
                    batch_defers(work.sync_program(bare, policy=None), calls, size),
                )
            )
    for place, (name, how, bar) in enumerate(
        [
            ("stage_many", "dispatch_stage_many called from Python", 2.0),
            ("batch_defer", "dispatch_stage_many by task.batch_defer", 1.8),
        ]
    ):
        yield compare(
            name,
            f"{how}, {size:,} a call, jobs/s",
            bar=bar,
            at_least=True,
            ours=[lap[place].rate for lap in laps],
            reference=[lap[2].rate for lap in laps],
            unit="jobs/s",
        )


def stage_calls(dsn: str, calls: int, size: int) -> Iterator[int]:
    """Write that many batches out as JSON, stage them and take the ids."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        work.define(conn)
        batches = list(work.batches(1_000, calls * size, size))
        work.stage(conn, batches[0][:10])
        yield 0
        for batch in batches:
            assert len(work.stage(conn, batch)) == size
            yield size


def batch_defers(program: work.Program, calls: int, size: int) -> Iterator[int]:
    """Defer that many batches."""
    with program.app.open():
        _sync(program)
        batches = list(work.batches(1_000, calls * size, size))
        program.task.batch_defer(*batches[0][:10])
        yield 0
        for batch in batches:
            program.task.batch_defer(*batch)
            yield size


def one_defer(plan: Plan) -> Iterator[Measurement]:
    """``task.defer``, with a policy and without."""
    jobs = plan.size(500, 20)
    medians = []
    for _ in range(plan.repeat):
        with plan.server.database() as dsn, plan.server.database(bare=True) as bare_dsn:
            plan.server.checkpoint()
            laps = race(
                defers(work.sync_program(dsn), jobs),
                defers(work.sync_program(bare_dsn, policy=None), jobs),
            )
        medians.append([statistics.median(lap.steps) * 1000 for lap in laps])
    yield compare(
        "one_defer",
        "one task.defer, median ms",
        bar=1.1,
        at_least=False,
        ours=[ours for ours, _ in medians],
        reference=[bare for _, bare in medians],
        unit="ms",
    )


def defers(program: work.Program, jobs: int) -> Iterator[int]:
    """Defer that many jobs, one at a time."""
    with program.app.open():
        _sync(program)
        for number in range(10):
            program.task.defer(**work.arguments(number))
        yield 0
        for number in range(jobs):
            program.task.defer(**work.arguments(number % 1_000, number))
            yield 1


def _sync(program: work.Program) -> None:
    """Write the policy, where there is one."""
    with contextlib.suppress(LookupError):
        Dispatch.of(program.app).sync()


def enqueuers(plan: Plan) -> Iterator[Measurement]:
    """Eight sessions that stage into one partition, against eight partitions; a commit a job."""
    rounds, jobs = plan.size(10, 2), plan.size(100, 5)
    laps = []
    for _ in range(plan.repeat):
        with plan.server.database() as one, plan.server.database() as many:
            plan.server.checkpoint()
            laps.append(race(enqueue(one, 1, rounds, jobs), enqueue(many, ENQUEUERS, rounds, jobs)))
    yield compare(
        "enqueuers",
        f"{ENQUEUERS} enqueuers on one key, against {ENQUEUERS} keys, jobs/s",
        bar=0.9,
        at_least=True,
        ours=[one.rate for one, _ in laps],
        reference=[many.rate for _, many in laps],
        unit="jobs/s",
        against=f"{ENQUEUERS} keys",
    )


def enqueue(dsn: str, keys: int, rounds: int, jobs: int) -> Iterator[int]:
    """Let all sessions at once stage that many jobs each, once a round."""
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(ENQUEUERS))
        sessions = [
            stack.enter_context(psycopg.connect(dsn, autocommit=True)) for _ in range(ENQUEUERS)
        ]
        work.define(sessions[0])

        def run(place: int, count: int) -> None:
            args = json.dumps(work.arguments(place % keys))
            statement = sql.SQL(ENQUEUE).format(
                jobs=sql.Literal(count), task=sql.Literal(work.TASK), args=sql.Literal(args)
            )
            sessions[place].execute(statement)

        list(threads.map(run, range(ENQUEUERS), [5] * ENQUEUERS))
        yield 0
        for _ in range(rounds):
            list(threads.map(run, range(ENQUEUERS), [jobs] * ENQUEUERS))
            yield ENQUEUERS * jobs
