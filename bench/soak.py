"""A soak: minutes of steady work, with an old snapshot held open in the middle of it.

``python -m bench.soak --minutes 5``. A report or a dump that reads for minutes keeps every row that
was deleted or replaced meanwhile, vacuum or not. The table says what ticks cost before, during, and
after the snapshot is gone.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import psycopg
import rich.box
import typer
from rich.console import Console
from rich.table import Table

from bench import work
from bench.race import percentile
from bench.server import SETTINGS, Server, open_server

PARTITIONS = 1_000
JOBS = 100  # in each cycle: two for each of the partitions that a tick takes up
WINDOWS = (3, 4, 5)  # slices of the time before, during and after

PHASES = ("before", "during", "after")

DEAD = """
select relname, n_dead_tup
from pg_stat_user_tables
where relname = any (%s)
"""
TABLES = ("dispatch_partitions", "dispatch_inbox", "dispatch_staged_jobs", "dispatch_inflight_jobs")

FINISH = """
select count(procrastinate_finish_job_v1(id, 'succeeded', false)), max(id)
from procrastinate_jobs
where id > %s and status = 'todo'
"""


@dataclasses.dataclass
class Window:
    """What one slice of the time showed."""

    phase: str
    ticks: list[float]
    """Milliseconds of each."""
    cpu: list[float]
    """Milliseconds of the server's CPU of each, where the server is on this machine."""
    dead: dict[str, int]
    """Dead rows by table at the end, as the server counts them."""
    end: float
    """Seconds since the start."""


def soak(server: Server, seconds: float) -> Iterator[Window]:
    """Stage, tick and finish over and over; yield each window when it is over."""
    with (
        server.database() as dsn,
        psycopg.connect(dsn, autocommit=True) as conn,
        psycopg.connect(dsn) as reader,
    ):
        reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        work.define(conn)
        done, number = 0, 0
        for _ in range(2 * PARTITIONS // JOBS):
            done, number, _, _ = _cycle(conn, done, number)
        began = time.perf_counter()
        for phase, count in zip(PHASES, WINDOWS, strict=True):
            if phase == "during":
                reader.execute("select count(*) from dispatch_partitions")
            elif phase == "after":
                reader.rollback()
            for _ in range(count):
                window = Window(phase, [], [], {}, 0.0)
                until = time.perf_counter() + seconds / sum(WINDOWS)
                while not window.ticks or time.perf_counter() < until:
                    done, number, took, cpu = _cycle(conn, done, number)
                    window.ticks.append(took * 1000)
                    if cpu is not None:
                        window.cpu.append(cpu * 1000)
                window.dead = dict(conn.execute(DEAD, [list(TABLES)]).fetchall())
                window.end = time.perf_counter() - began
                yield window


def _cycle(
    conn: psycopg.Connection[Any], done: int, number: int
) -> tuple[int, int, float, float | None]:
    """Stage, tick, end what was admitted; return the last job, and what the tick took."""
    keys = range(number, number + JOBS)
    work.stage(conn, [work.arguments(key // 2 % PARTITIONS, key) for key in keys])
    before, began = _cpu(conn), time.perf_counter()
    conn.execute("select * from dispatch_tick('bench')")
    took, after = time.perf_counter() - began, _cpu(conn)
    row = conn.execute(FINISH, [done]).fetchone()
    assert row is not None
    cpu = None if before is None or after is None else after - before
    return row[1] or done, number + JOBS, took, cpu


def _cpu(conn: psycopg.Connection[Any]) -> float | None:
    """Return the seconds of CPU time of the session's server process, if it can be seen."""
    try:
        text = Path(f"/proc/{conn.info.backend_pid}/schedstat").read_text(encoding="ascii")
    except OSError:
        return None
    return int(text.split()[0]) / 1e9


def show(windows: list[Window]) -> Table:
    """Return the table of a soak."""
    table = Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("snapshot", "until, s", "ticks", "median, ms", "p95, ms", "CPU, ms"):
        table.add_column(heading, justify="left" if heading == "snapshot" else "right")
    for name in TABLES:
        table.add_column(f"dead: {name.removeprefix('dispatch_')}", justify="right")
    for window in windows:
        table.add_row(
            window.phase,
            f"{window.end:.0f}",
            f"{len(window.ticks):,}",
            f"{statistics.median(window.ticks):.1f}",
            f"{percentile(window.ticks, 0.95):.1f}",
            f"{statistics.median(window.cpu):.1f}" if window.cpu else "",
            *(f"{window.dead.get(name, 0):,}" for name in TABLES),
        )
    return table


def main(
    minutes: Annotated[float, typer.Option(min=0.01, help="How long, in all.")] = 5.0,
) -> None:
    """Tick for minutes; for a third of the time an old snapshot is held open.

    BENCH_DSN names a server whose user may create databases; without it an embedded one is started,
    on which autovacuum looks every 10 seconds, so that a few minutes show what it does.
    """
    with open_server({**SETTINGS, "autovacuum_naptime": "10s"}) as server:
        Console(width=140).print(show(list(soak(server, minutes * 60))))


if __name__ == "__main__":
    typer.run(main)
