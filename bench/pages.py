"""What looking costs in a big installation: each page of the dashboard, and what the others ask.

Pages are asked for through ASGI, without a network or a browser. Everything is asked for several
times, and the worst has to be within the bar.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psycopg

from bench.crowd import FLOOD, Crowd, fill
from bench.measurement import Measurement
from bench.plan import Plan
from pydispatch.metrics import Collector
from pydispatch.web import dashboard

BAR = 300.0  # milliseconds
WARM_UP = 2  # until templates are compiled and connections open

SMALL = Crowd(
    partitions=1_000, jobs=2_000, slots=100, dead=10, admissions=100, ticks=100, samples=100
)

PAGES = {
    "overview": "/",
    "search": "/search?q=tenant-0077",
    "hints": "/hints",
    "policies": "/policies",
    "policy": "/policy?name=calls",
    "partitions": "/partitions",
    "search in partitions": "/partitions?policy=calls&sort=key&q=nt-0077&pending=1",
    "partition": "/partitions/{partition}",
    "job": "/jobs/{job}",
    "dead": "/dead",
    "audit": "/audit",
}

QUERIES = {
    "status": "select * from dispatch_policy_status",
    "hints": "select * from dispatch_hints",
}


def looks(plan: Plan) -> Iterator[Measurement]:
    """Fill a database, and look at it."""
    with plan.server.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        fill(conn, SMALL if plan.small else Crowd())
        plan.server.checkpoint()
        size = "{:,} partitions, {:,} jobs".format(
            *_one(conn, "select count(*) from dispatch_partitions"),
            *_one(conn, "select count(*) from dispatch_staged_jobs"),
        )
        for name, times in asyncio.run(_page_times(dsn, _paths(conn), plan.repeat)).items():
            yield _row(f"page_{name.replace(' ', '_')}", f"dashboard's {name}, {size}", times)
        for name, query in QUERIES.items():
            times = _times(functools.partial(conn.execute, query.encode()), plan.repeat)
            yield _row(f"query_{name}", f"query of {name}, {size}", times)
        collector = Collector(dsn)
        times = _times(lambda: list(collector.collect()), plan.repeat)
        yield _row("scrape", f"scrape of the metrics, {size}", times)


def _paths(conn: psycopg.Connection[Any]) -> dict[str, str]:
    """Return the pages' paths, with the partition and a job of the flood."""
    (partition,) = _one(conn, "select dispatch_partition_id('calls', %s)", FLOOD)
    (job,) = _one(
        conn,
        """
        select id from dispatch_staged_jobs where partition_id = %s
        order by priority desc, eligible_at, id limit 1
        """,
        partition,
    )
    return {name: path.format(partition=partition, job=job) for name, path in PAGES.items()}


async def _page_times(dsn: str, paths: dict[str, str], repeat: int) -> dict[str, list[float]]:
    """Ask for all pages in turns, and return how many milliseconds each took each time."""
    application = dashboard(dsn)
    times: dict[str, list[float]] = {name: [] for name in paths}
    async with (
        application.router.lifespan_context(application),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(application), base_url="http://localhost"
        ) as client,
    ):
        for turn in range(WARM_UP + repeat):
            for name, path in paths.items():
                began = time.perf_counter()
                response = await client.get(path)
                took = (time.perf_counter() - began) * 1000
                response.raise_for_status()
                if turn >= WARM_UP:
                    times[name].append(took)
    return times


def _times(look: Callable[[], object], repeat: int) -> list[float]:
    """Return how many milliseconds each look took."""
    times = []
    for _ in range(WARM_UP + repeat):
        began = time.perf_counter()
        look()
        times.append((time.perf_counter() - began) * 1000)
    return times[WARM_UP:]


def _row(name: str, what: str, times: list[float]) -> Measurement:
    return Measurement(
        name,
        f"{what}, worst ms",
        bar=BAR,
        at_least=False,
        unit="ms",
        values=times,
        details={"median, ms": [statistics.median(times)]},
        worst=True,
    )


def _one(conn: psycopg.Connection[Any], query: str, *values: Any) -> tuple[Any, ...]:
    row = conn.execute(query.encode(), values or None).fetchone()
    assert row is not None
    return tuple(row)
