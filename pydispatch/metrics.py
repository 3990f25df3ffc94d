"""What Prometheus scrapes: the state of each policy, and counters of what its ticks did.

Every number is read from the database when it is asked for, so any number of processes may be
scraped and all show the same; one is enough. Labels are policies and reasons of denial, never
partitions: the number of series does not grow with the number of tenants.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from pydispatch.connect import CONNECTION

try:
    from prometheus_client import CollectorRegistry, exposition
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector as _Collector
except ModuleNotFoundError as error:
    if error.name != "prometheus_client":
        raise
    raise ModuleNotFoundError(
        'metrics need the extra "web" (prometheus_client is not installed): '
        "pip install 'dispatch-policy[web]'",
        name=error.name,
    ) from None

__all__ = ["Collector", "Where", "asgi"]

logger = logging.getLogger(__name__)

Where: TypeAlias = str | Callable[[], AbstractContextManager[psycopg.Connection[Any]]]
"""A conninfo, or a function that gives a connection for the length of a ``with`` block, as
``psycopg_pool.ConnectionPool.connection`` does."""

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class _Named:
    """A metric: its name without ``_total``, its HELP text, and where its value is found."""

    name: str
    help: str
    source: str


# Gauges by policy: the source is a column of STATUS.
GAUGES = (
    _Named("dispatch_jobs_pending", "Jobs that wait to be admitted.", "pending"),
    _Named(
        "dispatch_jobs_in_flight", "Jobs admitted that have not ended: slots used.", "in_flight"
    ),
    _Named("dispatch_jobs_queued", "Jobs in flight that no worker has taken yet.", "queued"),
    _Named("dispatch_jobs_running", "Jobs in flight that a worker runs.", "running"),
    _Named("dispatch_jobs_dead", "Jobs set aside because they cannot be handed off.", "dead"),
    _Named("dispatch_jobs_stalled", "Running jobs whose worker gives no sign of life.", "stalled"),
    _Named(
        "dispatch_slots",
        "Slots that the caps of the partitions with jobs in flight give them together; "
        "0 where no cap is known.",
        "slots",
    ),
    _Named(
        "dispatch_partitions_full",
        "Partitions that use all the slots of their caps.",
        "full_partitions",
    ),
    _Named("dispatch_partitions", "Partitions known.", "partitions"),
    _Named("dispatch_partitions_due", "Partitions that wait for the next tick.", "due"),
    _Named(
        "dispatch_partitions_blocked",
        "Partitions with waiting jobs that a gate, the budget or a pause holds back.",
        "blocked",
    ),
    _Named(
        "dispatch_inbox_notes",
        "Notes of jobs staged and ended that no tick has read yet; no more than 10000 are counted.",
        "notes",
    ),
    _Named("dispatch_policy_paused", "1 while the whole policy is paused, else 0.", "paused"),
    _Named(
        "dispatch_oldest_due_seconds",
        "How long the longest due partition has been due: what waits for a tick.",
        "oldest_due",
    ),
    _Named(
        "dispatch_oldest_wait_seconds",
        "The longest that a partition has had jobs waiting and none admitted: "
        "what waits for a gate or a tick.",
        "oldest_wait",
    ),
    _Named(
        "dispatch_oldest_queued_seconds",
        "How long ago the oldest job that no worker has taken was admitted: "
        "what waits for a worker.",
        "oldest_queued",
    ),
)

# Counters by policy: the source is a counter of dispatch_totals.
COUNTERS = (
    _Named("dispatch_jobs_admitted", "Jobs handed off to procrastinate.", "jobs_admitted"),
    _Named(
        "dispatch_handoff_failures",
        "Jobs set aside as dead because procrastinate refused them.",
        "handoff_failures",
    ),
)
DENIED = _Named(
    "dispatch_partitions_denied",
    "Times that a tick looked at a partition and admitted none of its jobs.",
    "partitions_denied",
)
TICKS = _Named("dispatch_tick_seconds", "Duration of ticks that looked at a partition.", "ticks")

WORKERS = _Named("dispatch_workers", "procrastinate's workers that give signs of life.", "")
UP = _Named("dispatch_up", "1 if the database answered this scrape, else 0.", "")
SCRAPE_SECONDS = _Named("dispatch_scrape_seconds", "How long this scrape took.", "")
SCRAPE_ERRORS = _Named(
    "dispatch_scrape_errors", "Scrapes by this process that the database did not answer.", ""
)

STATUS = """
select
  status.policy_name, status.pending, status.in_flight, status.queued, status.running,
  status.dead, status.partitions, status.due, status.blocked, status.paused::int as paused,
  stalled.jobs as stalled, slots.slots, slots.full_partitions, inbox.notes,
  extract(epoch from dispatch_now() - oldest_due_at) as oldest_due,
  extract(epoch from oldest_wait) as oldest_wait,
  extract(epoch from dispatch_now() - oldest_queued_at) as oldest_queued
from dispatch_policy_status as status
left join (
  select policy_name, count(*) as jobs from dispatch_stalled_jobs group by policy_name
) as stalled on stalled.policy_name = status.policy_name
left join dispatch_slot_use as slots on slots.policy_name = status.policy_name
cross join lateral (
  select count(*) as notes
  from (
    select from dispatch_inbox as note where note.policy_name = status.policy_name limit 10000
  ) as note
) as inbox
order by status.policy_name
"""
ALIVE = "select dispatch_workers_alive(dispatch_now()) as workers"
TOTALS = "select policy_name, counter, label, value from dispatch_totals order by 1, 2, 3"


class Collector(_Collector):
    """Collects the metrics for a ``prometheus_client`` registry: ``REGISTRY.register(...)``.

    A database that does not answer gives ``dispatch_up`` 0 and a warning in the log. Scrapes of
    one collector go one at a time, so a slow database is not asked twice at once.

    Args:
        where: A conninfo (``""`` takes libpq's variables), or what gives a connection.
        timeout: Seconds after which the database ends a query of ours, and, for a conninfo
            without a ``connect_timeout``, an attempt to connect is given up.
    """

    def __init__(self, where: Where = "", *, timeout: float = 5.0) -> None:
        self._where = where
        self._timeout = timeout
        self._lock = threading.Lock()
        self._errors = 0

    def describe(self) -> Iterable[Metric]:
        """Nothing: a registry then asks the database for nothing when the collector joins it."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Ask the database, and yield the metrics."""
        with self._lock:
            started = time.monotonic()
            try:
                found = self._ask()
            except Exception as error:
                self._errors += 1
                found = []
                # A psycopg error says all there is; any other is a fault in what gives connections.
                unforeseen = not isinstance(error, psycopg.Error)
                logger.warning("the database gave no metrics: %s", error, exc_info=unforeseen)
            yield _gauge(UP, 1 if found else 0)
            yield _gauge(SCRAPE_SECONDS, time.monotonic() - started)
            failures = CounterMetricFamily(SCRAPE_ERRORS.name, SCRAPE_ERRORS.help)
            failures.add_metric([], self._errors)
            yield failures
        yield from found

    def _ask(self) -> list[Metric]:
        with (
            self._connect() as connection,
            connection.transaction(),
            connection.cursor(row_factory=dict_row) as cursor,
        ):
            milliseconds = str(max(1, round(self._timeout * 1000)))
            cursor.execute("select set_config('statement_timeout', %s, true)", [milliseconds])
            (alive,) = cursor.execute(ALIVE).fetchall()
            status = cursor.execute(STATUS).fetchall()
            totals = cursor.execute(TOTALS).fetchall()
        return [_gauge(WORKERS, alive["workers"]), *_gauges(status), *_counters(totals)]

    def _connect(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        if not isinstance(self._where, str):
            return self._where()
        options: dict[str, Any] = {
            **CONNECTION,
            "connect_timeout": max(1, round(self._timeout)),
            **conninfo_to_dict(self._where),
        }
        return psycopg.connect(**options)


def _gauge(named: _Named, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(named.name, named.help, value=value)


def _gauges(rows: list[dict[str, Any]]) -> Iterator[Metric]:
    """The gauges of all policies, from the rows of STATUS."""
    for named in GAUGES:
        gauge = GaugeMetricFamily(named.name, named.help, labels=["policy"])
        for row in rows:
            gauge.add_metric([row["policy_name"]], max(float(row[named.source] or 0), 0))
        yield gauge


def _counters(rows: list[dict[str, Any]]) -> Iterator[Metric]:
    """The counters of all policies, and the histogram, from the rows of TOTALS."""
    policies: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        counters = policies.setdefault(row["policy_name"], {})
        counters.setdefault(row["counter"], {})[row["label"]] = float(row["value"])

    for named in COUNTERS:
        counter = CounterMetricFamily(named.name, named.help, labels=["policy"])
        for policy, counters in policies.items():
            counter.add_metric([policy], counters[named.source][""])
        yield counter

    denied = CounterMetricFamily(DENIED.name, DENIED.help, labels=["policy", "reason"])
    ticks = HistogramMetricFamily(TICKS.name, TICKS.help, labels=["policy"])
    for policy, counters in policies.items():
        for reason, count in counters[DENIED.source].items():
            denied.add_metric([policy, reason], count)
        bounds = sorted(counters["tick_seconds_bucket"].items(), key=lambda item: float(item[0]))
        ticks.add_metric(
            [policy],
            buckets=[*bounds, ("+Inf", counters[TICKS.source][""])],
            sum_value=counters["tick_seconds"][""],
        )
    yield denied
    yield ticks


class _Exposition:
    """An ASGI application that answers every GET with a scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] != "http":
            raise ValueError(f"no way to answer {scope['type']}")
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, [(b"allow", b"GET, HEAD")], b"")
            return
        accept = ",".join(
            value.decode("latin-1") for name, value in scope["headers"] if name == b"accept"
        )
        encode, content_type = exposition.choose_encoder(accept)
        body = await asyncio.to_thread(encode, self._registry)
        await _answer(send, 200, [(b"content-type", content_type.encode())], body)


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def asgi(where: Where = "", *, timeout: float = 5.0) -> _Exposition:
    """An ASGI application that shows the metrics, and nothing else of its process, to Prometheus.

    It answers at any path: serve it by itself, or mount it, as in
    ``app.mount("/metrics", asgi("..."))``. The database is asked in a thread. It says the same to
    everybody who can reach it: names of policies and numbers.

    Args:
        where: A conninfo (``""`` takes libpq's variables), or what gives a connection.
        timeout: Seconds after which a database that does not answer counts as down.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(where, timeout=timeout))
    return _Exposition(registry)
