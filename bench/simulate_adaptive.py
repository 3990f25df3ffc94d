"""The adaptive gate on a simulated worker pool: ``python -m bench.simulate_adaptive``.

pydispatch and procrastinate are real and in a real database; only the workers are simulated, and
the clock stands still between their events. They take jobs from procrastinate's queue, first come,
first served, and each runs one job at a time, for as long as the phase says. The picture shows how
the cap follows what they can take.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated

import psycopg
import typer

from bench.picture import Band, Line, Panel, draw
from pydispatch.embedded import EmbeddedPostgres
from pydispatch.migrate import migrate

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "adaptive.svg"
START = datetime(2026, 1, 1, tzinfo=timezone.utc)

WORKERS = 8
TARGET_LAG = 1.0  # seconds
INITIAL_MAX = 4
TICK = 0.1  # seconds from one tick to the next
BACKLOG = 100  # jobs that wait in the policy at any time, but for the idle phase


@dataclass(frozen=True)
class Phase:
    """A stretch of time in which the workers and the tenant behave alike.

    Args:
        name: As it stands in the picture.
        seconds: How long it lasts.
        run_time: Seconds that a job runs on average.
        failing: Which part of the jobs fails, at once.
        staged: Jobs that come in at its beginning, on top of the backlog.
        idle: Does nothing come in at all?
    """

    name: str
    seconds: float
    run_time: float = 0.5
    failing: float = 0.0
    staged: int = 0
    idle: bool = False

    @property
    def fitting(self) -> float:
        """Jobs in flight at which a new one waits for just the target lag."""
        return WORKERS + TARGET_LAG * WORKERS / self.run_time


PHASES = [
    Phase("steady", 60),
    Phase("burst", 30, staged=1000),
    Phase("slow", 90, run_time=2),
    Phase("fast again", 60),
    Phase("failures", 40, failing=0.6),
    Phase("healed", 60),
    Phase("idle", 40, idle=True),
    Phase("back", 60),
]


@dataclass
class Sample:
    """How things stood at one second."""

    second: float
    cap: int
    in_flight: int
    lag: float
    waiting: int
    fitting: float


@dataclass
class Pool:
    """The simulated workers: who is busy until when, and with which job."""

    conn: psycopg.Connection
    random: Random
    running: list[tuple[float, int]] = field(default_factory=list)
    started: int = 0

    def work(self, until: float, phase: Phase) -> None:
        """End what is over, and start what waits, event by event."""
        self.start(max(until - TICK, 0), phase)
        while self.running and self.running[0][0] <= until:
            at, job_id = heapq.heappop(self.running)
            failed = self.random.random() < phase.failing
            self.conn.execute(
                "select procrastinate_finish_job_v1(%s, %s, false)",
                [job_id, "failed" if failed else "succeeded"],
            )
            self.start(at, phase)

    def start(self, now: float, phase: Phase) -> None:
        """Give each idle worker a job; its start is written down as of the simulated clock."""
        while len(self.running) < WORKERS:
            row = self.conn.execute(
                "select id from procrastinate_fetch_job_v2(null, null)"
            ).fetchone()
            if row is None or row[0] is None:
                return
            self.conn.execute(
                """update procrastinate_events set at = %s
                where id = (select max(id) from procrastinate_events where job_id = %s)""",
                [START + timedelta(seconds=now), row[0]],
            )
            run_time = 0.05 if phase.failing else phase.run_time
            heapq.heappush(self.running, (now + self.random.uniform(0.5, 1.5) * run_time, row[0]))
            self.started += 1


def simulate(conn: psycopg.Connection, phases: Sequence[Phase], seed: int = 1) -> list[Sample]:
    """Run the phases and return a sample a second.

    Args:
        conn: A connection in autocommit to a database with nothing staged. Its clock is changed.
        phases: What happens, in this order.
        seed: Of the run times and failures.
    """
    gate = {
        "type": "adaptive_concurrency",
        "initial_max": INITIAL_MAX,
        "target_lag_ms": TARGET_LAG * 1000,
    }
    conn.execute("set synchronous_commit to off")
    set_clock(conn, 0)
    conn.execute("select dispatch_define_policy('simulation', %s)", [json.dumps({"gates": [gate]})])
    pool = Pool(conn, Random(seed))
    samples: list[Sample] = []
    ticks, end = 0, 0.0
    for phase in phases:
        end += phase.seconds
        stage(conn, phase.staged)
        while ticks * TICK < end:
            now = ticks * TICK
            set_clock(conn, now)
            if ticks % 5 == 0 and not phase.idle:
                stage(conn, BACKLOG - waiting(conn))
            conn.execute("select from dispatch_tick('simulation')")
            if ticks % 10 == 0:
                samples.append(look(conn, now, phase))
            ticks += 1
            pool.work(ticks * TICK, phase)
    return samples


def set_clock(conn: psycopg.Connection, second: float) -> None:
    """Move the clock to so many seconds after the start."""
    moment = START + timedelta(seconds=second)
    conn.execute("select set_config('dispatch.fake_now', %s, false)", [moment.isoformat()])


def stage(conn: psycopg.Connection, jobs: int) -> None:
    """Stage so many jobs, if any."""
    if jobs > 0:
        conn.execute(
            "select dispatch_stage_many('simulation', %s)",
            [json.dumps([{"task_name": "t"}] * jobs)],
        )


def waiting(conn: psycopg.Connection) -> int:
    """Return how many jobs wait in the policy."""
    row = conn.execute("select count(*) from dispatch_staged_jobs").fetchone()
    assert row is not None
    return int(row[0])


def look(conn: psycopg.Connection, second: float, phase: Phase) -> Sample:
    """Return how things stand."""
    row = conn.execute(
        """select coalesce(max(s.current_max), %s), coalesce(max(s.ewma_lag_ms), 0) / 1000,
          (select count(*) from dispatch_inflight_jobs)
        from dispatch_adaptive_stats as s""",
        [INITIAL_MAX],
    ).fetchone()
    assert row is not None
    return Sample(second, row[0], row[2], row[1], waiting(conn), phase.fitting)


def averages(samples: Sequence[Sample], width: int) -> list[float]:
    """Return the mean cap of so many samples around each."""
    around = (
        samples[max(place - width // 2, 0) : place + width // 2 + 1]
        for place in range(len(samples))
    )
    return [fmean(sample.cap for sample in some) for some in around]


def picture(samples: Sequence[Sample], phases: Sequence[Phase]) -> str:
    """Draw the samples as an SVG."""
    seconds = [sample.second for sample in samples]
    bands, start = [], 0.0
    for phase in phases:
        bands.append(Band(phase.name, start, start + phase.seconds))
        start += phase.seconds
    return draw(
        title=f"An adaptive gate before {WORKERS} simulated workers",
        x_label="seconds",
        xs=seconds,
        bands=bands,
        panels=[
            Panel(
                "jobs in flight",
                [
                    Line("in flight", [float(s.in_flight) for s in samples], "light"),
                    Line("what fits in the target lag", [s.fitting for s in samples], "dashed"),
                    Line("cap, average of 20 s", averages(samples, 20), "strong"),
                ],
            ),
            Panel(
                "lag, seconds (average)",
                [
                    Line("target", [TARGET_LAG] * len(samples), "dashed"),
                    Line("from admission to start", [s.lag for s in samples], "strong"),
                ],
            ),
            Panel(
                "jobs waiting in the policy",
                [Line("staged", [float(s.waiting) for s in samples], "strong")],
            ),
        ],
    )


def main(
    out: Annotated[Path, typer.Option(help="Where to write the picture.")] = PICTURE,
) -> None:
    """Simulate all phases and draw what the gate did."""
    with EmbeddedPostgres() as server:
        migrate(server.dsn(), with_procrastinate=True)
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            samples = simulate(conn, PHASES)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(picture(samples, PHASES))
    typer.echo(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
