"""The demo's players: an application with policies, its tenants, a worker and a driver."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

from procrastinate import App, JobContext, PsycopgConnector
from typing_extensions import Self

from pydispatch import AdaptiveConcurrency, Concurrency, Dispatch, Driver, Throttle, ctx

__all__ = ["Look", "Scene", "Tenant"]

PATIENCE = 60.0
"""Seconds after which jobs that did not run count as lost."""

WORKER_CONCURRENCY = 30

TABLES = """
create table demo_tenants (
  tenant text primary key, place int, rate numeric, burst numeric, cap int
);
create table demo_sent (number int primary key, tenant text, sent_at timestamptz);
create table demo_runs (
  id bigint generated always as identity primary key, number int, tenant text, job_id bigint,
  started_at timestamptz, finished_at timestamptz
);
"""


@dataclasses.dataclass(frozen=True)
class Tenant:
    """Who sends jobs, how many, and what is allowed.

    Attributes:
        task: The task whose jobs it sends, and so the policy that they follow.
        jobs: How many.
        seconds: How long each of them runs.
        cap: How many may run at once.
        rate: How many may be admitted in a second; None for no such limit.
        burst: How many more at once after a rest.
        every: Seconds between two jobs; 0 sends all of them at the start.
    """

    name: str
    task: str
    jobs: int
    seconds: float
    cap: int
    rate: float | None = None
    burst: int | None = None
    every: float = 0

    @property
    def limits(self) -> str:
        """The limits in words."""
        cap = f"{self.cap} at once"
        if self.task == "search":
            return f"adapts, up to {cap}"
        return cap if self.rate is None else f"{cap}, {self.rate:g}/s burst {self.burst}"


TENANTS = (
    Tenant("flood", "call", jobs=300, seconds=0.08, cap=4, rate=30, burst=10),
    Tenant("steady", "call", jobs=90, seconds=0.1, cap=5, rate=10, burst=10),
    Tenant("trickle", "call", jobs=24, seconds=0.2, cap=1, rate=2.5, burst=1),
    Tenant("slow", "export", jobs=12, seconds=2, cap=3),
    Tenant("adaptive", "search", jobs=120, seconds=0.2, cap=8),
    Tenant("quiet", "call", jobs=14, seconds=0.05, cap=2, rate=5, burst=5, every=0.6),
)


@dataclasses.dataclass(frozen=True)
class Look:
    """Where a tenant's jobs are at the moment, and what the waiting ones wait for."""

    waiting: int
    running: int
    done: int
    why: str | None


class Scene:
    """Runs the application, the worker, the driver and the senders between enter and exit."""

    def __init__(self, dsn: str, tenants: tuple[Tenant, ...] = TENANTS) -> None:
        self.tenants = tenants
        self._app = App(connector=PsycopgConnector(conninfo=dsn, max_size=10))
        self._dispatch = Dispatch(self._app)
        self._tasks = self._declare()
        self._driver = Driver(self._dispatch, sync=False, install_signal_handlers=False)
        self._playing: list[asyncio.Task[Any]] = []
        self._sending: asyncio.Task[None]
        self._deadline = time.monotonic() + PATIENCE

    def _declare(self) -> dict[str, Any]:
        """Declare tasks and policies, as an application does."""
        app, dispatch = self._app, self._dispatch
        limits = {tenant.name: dataclasses.asdict(tenant) for tenant in self.tenants}

        async def work(context: JobContext, tenant: str, number: int) -> None:
            (row,) = await app.connector.execute_query_all_async(
                """
                insert into demo_runs (number, tenant, job_id, started_at)
                values (%(number)s, %(tenant)s, %(job_id)s, clock_timestamp())
                returning id
                """,
                number=number,
                tenant=tenant,
                job_id=context.job.id,
            )
            await asyncio.sleep(limits[tenant]["seconds"])
            await app.connector.execute_query_async(
                "update demo_runs set finished_at = clock_timestamp() where id = %(id)s", **row
            )

        @dispatch.policy(
            "calls",
            partition_by="tenant",
            gates=[
                Throttle(rate=ctx("rate"), per=1, burst=ctx("burst")),
                Concurrency(max=ctx("cap")),
            ],
            context=lambda tenant, **_: {"tenant": tenant, **limits[tenant]},
        )
        @app.task(name="call", queue="calls", pass_context=True)
        async def call(context: JobContext, tenant: str, number: int) -> None:
            await work(context, tenant, number)

        @dispatch.policy("exports", partition_by="tenant", gates=[Concurrency(max=3)])
        @app.task(name="export", queue="exports", pass_context=True)
        async def export(context: JobContext, tenant: str, number: int) -> None:
            await work(context, tenant, number)

        @dispatch.policy(
            "searches",
            partition_by="tenant",
            gates=[AdaptiveConcurrency(initial_max=2, target_lag_ms=250, max=8)],
        )
        @app.task(name="search", queue="searches", pass_context=True)
        async def search(context: JobContext, tenant: str, number: int) -> None:
            await work(context, tenant, number)

        return {"call": call, "export": export, "search": search}

    async def __aenter__(self) -> Self:
        await self._app.open_async()
        connector = self._app.connector
        await connector.execute_query_async(TABLES)
        for place, tenant in enumerate(self.tenants):
            await connector.execute_query_async(
                """
                insert into demo_tenants
                values (%(name)s, %(place)s, %(rate)s, %(burst)s, %(cap)s)
                """,
                place=place,
                **dataclasses.asdict(tenant),
            )
        await self._dispatch.sync_async()
        self._sending = self._play(self._send())
        self._play(self._driver.run())
        self._play(
            self._app.run_worker_async(
                concurrency=WORKER_CONCURRENCY,
                install_signal_handlers=False,
                shutdown_graceful_timeout=0,
            )
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        self._driver.stop()
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        await self._app.close_async()

    def _play(self, coroutine: Any) -> asyncio.Task[Any]:
        self._playing.append(asyncio.create_task(coroutine))
        return self._playing[-1]

    async def _send(self) -> None:
        """Send the jobs of all tenants, the flood first."""
        number = 0
        dripping = []
        for tenant in self.tenants:
            numbers = range(number, number + tenant.jobs)
            number += tenant.jobs
            if tenant.every:
                dripping.append(self._drip(tenant, numbers))
                continue
            await self._note(tenant, numbers)
            await self._tasks[tenant.task].batch_defer_async(
                *({"tenant": tenant.name, "number": number} for number in numbers)
            )
        await asyncio.gather(*dripping)

    async def _drip(self, tenant: Tenant, numbers: range) -> None:
        for number in numbers:
            await asyncio.sleep(tenant.every)
            await self._note(tenant, [number])
            await self._tasks[tenant.task].defer_async(tenant=tenant.name, number=number)

    async def _note(self, tenant: Tenant, numbers: range | list[int]) -> None:
        """Write down what is about to be sent."""
        await self._app.connector.execute_query_async(
            """
            insert into demo_sent
            select number, %(tenant)s, clock_timestamp() from unnest(%(numbers)s::int[]) as number
            """,
            tenant=tenant.name,
            numbers=list(numbers),
        )

    async def is_over(self) -> bool:
        """Tell whether all jobs were sent and ran, or patience is at an end.

        Raises:
            Exception: Whatever ended the worker, the driver or a sender.
        """
        for task in self._playing:
            if task.done() and task is not self._sending:
                task.result()
                raise RuntimeError("the worker or the driver stopped before the end")
        if self._sending.done():
            self._sending.result()
            looks = await self.look()
            if all(looks[tenant.name].done >= tenant.jobs for tenant in self.tenants):
                return True
        return time.monotonic() > self._deadline

    async def look(self) -> dict[str, Look]:
        """Count each tenant's jobs."""
        rows = await self._app.connector.execute_query_all_async(
            """
            select
              t.tenant,
              (select count(*) from demo_sent as s where s.tenant = t.tenant)
                - count(r.id) as waiting,
              count(r.id) - count(r.finished_at) as running,
              count(r.finished_at) as done,
              max(case p.blocked_reason
                when 'throttle_empty' then 'waits for its rate'
                when 'concurrency_full' then 'waits for a slot'
              end) as why
            from demo_tenants as t
            left join demo_runs as r on r.tenant = t.tenant
            left join dispatch_partitions as p on p.partition_key = t.tenant
            group by t.tenant
            """
        )
        return {row.pop("tenant"): Look(**row) for row in rows}
