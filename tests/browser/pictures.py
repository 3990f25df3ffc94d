"""Takes the dashboard's pictures in ``docs/images``: ``python -m tests.browser.pictures``.

Nothing in them is made up: an application with three policies, a driver and a worker runs on a
private server for some minutes, and one of its tenants has a limit that is too low for what it
sends. Needs Chromium; writes each file anew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psycopg
from procrastinate import App, PsycopgConnector

from pydispatch import AdaptiveConcurrency, Concurrency, Dispatch, Driver, Throttle, ctx
from pydispatch.embedded import EmbeddedPostgres
from pydispatch.migrate import migrate
from pydispatch.web import dashboard
from tests.browser.chromium import ABSENT, find_chromium, open_browser
from tests.browser.serving import serve

FOLDER = Path(__file__).parents[2] / "docs" / "images"
WIDTH = 1280
ColorScheme: TypeAlias = Literal["light", "dark"]
LIMITS = {"acme": 600, "globex": 300, "hooli": 600, "initech": 12, "umbrella": 300, "wayne": 600}
"""Calls a minute of each account. What ``initech`` sends is more than that."""


class Company:
    """An application, its accounts and what they send."""

    def __init__(self, dsn: str) -> None:
        self.random = random.Random(7)
        self.app = App(connector=PsycopgConnector(conninfo=dsn, max_size=8))
        self.dispatch = Dispatch(self.app)

        @self.dispatch.policy(
            "payments",
            partition_by="account",
            gates=[
                Throttle(rate=ctx("calls_a_minute", default=300), per=60, burst=12),
                Concurrency(max=4),
            ],
            context=lambda account, **_: {"account": account, "calls_a_minute": LIMITS[account]},
        )
        @self.app.task(name="charge", queue="payments")
        async def charge(account: str, order: int) -> None:
            await self.work(0.2)

        @self.dispatch.policy(
            "search",
            partition_by="account",
            gates=[AdaptiveConcurrency(initial_max=2, target_lag_ms=150, max=12)],
        )
        @self.app.task(name="reindex", queue="search")
        async def reindex(account: str, order: int) -> None:
            await self.work(0.4)

        @self.dispatch.policy("exports", partition_by="account", gates=[Concurrency(max=2)])
        @self.app.task(name="export", queue="exports")
        async def export(account: str, order: int) -> None:
            await self.work(4)

        self.charge, self.reindex, self.export = charge, reindex, export

    async def work(self, seconds: float) -> None:
        """Take about that long."""
        await asyncio.sleep(seconds * self.random.uniform(0.5, 1.8))

    async def send(self, task: Any, account: str, *, most: int, every: float) -> None:
        """Send up to so many jobs about every so many seconds, for ever."""
        order = 10_000
        while True:
            jobs = self.random.randint(1, most)
            await task.batch_defer_async(
                *({"account": account, "order": order + number} for number in range(jobs))
            )
            order += jobs
            await asyncio.sleep(every * self.random.uniform(0.3, 1.7))

    def senders(self) -> list[Coroutine[Any, Any, None]]:
        """Everybody who sends."""
        return [
            self.send(self.charge, "acme", most=60, every=10),
            self.send(self.charge, "globex", most=12, every=4),
            self.send(self.charge, "hooli", most=8, every=5),
            self.send(self.charge, "initech", most=20, every=20),
            self.send(self.charge, "umbrella", most=2, every=40),
            self.send(self.charge, "wayne", most=90, every=25),
            self.send(self.reindex, "acme", most=60, every=15),
            self.send(self.reindex, "hooli", most=25, every=12),
            self.send(self.export, "globex", most=3, every=15),
            self.send(self.export, "wayne", most=2, every=12),
        ]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let senders, driver and worker run until the ``with`` block ends."""
        async with self.app.open_async():
            await self.dispatch.sync_async()
            # Somebody has paused an account.
            await self.app.connector.execute_query_async(
                "select dispatch_pause('payments', 'umbrella'),"
                " dispatch_audit('on call', 'pause', 'payments', 'umbrella', null, '{}')"
            )
            driver = Driver(self.dispatch, sync=False, install_signal_handlers=False)
            worker = self.app.run_worker_async(
                concurrency=24, install_signal_handlers=False, shutdown_graceful_timeout=0
            )
            playing = [
                asyncio.ensure_future(each) for each in (driver.run(), worker, *self.senders())
            ]
            try:
                yield
                assert not any(each.done() for each in playing), "somebody stopped"
            finally:
                for each in playing:
                    each.cancel()
                await asyncio.gather(*playing, return_exceptions=True)


def take(dsn: str, folder: Path) -> None:
    """Take the pictures of what is there now."""
    program = find_chromium()
    assert program is not None, ABSENT
    application = dashboard(dsn, authorize=lambda *_: "on call")
    with (
        psycopg.connect(dsn, autocommit=True) as conn,
        serve(application) as url,
        open_browser(program) as browser,
    ):
        for name, path, scheme, height in pictures(conn):
            page = browser.new_page(
                base_url=url,
                color_scheme=scheme,
                viewport={"width": WIDTH, "height": height},
            )
            shown = page.goto(path)
            assert shown, path
            assert shown.ok, f"no picture of an error at {path}"
            page.screenshot(path=folder / f"dashboard-{name}.png")
            page.close()


def pictures(conn: psycopg.Connection) -> Iterator[tuple[str, str, ColorScheme, int]]:
    """Yield each picture's name, its page's path, light or dark, and its height in pixels."""
    slow = conn.execute(
        """
        select dispatch_partition_id('payments', 'initech'), max(id)
        from dispatch_staged_jobs
        where policy_name = 'payments' and partition_key = 'initech'
        """
    ).fetchone()
    assert slow is not None
    partition, job = slow
    yield "overview", "/", "light", 1060
    yield "policy", "/policy?name=payments", "dark", 900
    yield "partition", f"/partitions/{partition}", "light", 860
    yield "job", f"/jobs/{job}", "light", 780


async def main(minutes: float, folder: Path) -> None:
    """Let the company run, and take its pictures while it does."""
    logging.getLogger("procrastinate").setLevel(logging.CRITICAL)
    with EmbeddedPostgres() as server:
        migrate(server.dsn(), with_procrastinate=True)
        async with Company(server.dsn()).running():
            await asyncio.sleep(minutes * 60)
            # In a thread: Playwright brings an event loop of its own.
            await asyncio.to_thread(take, server.dsn(), folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.browser.pictures")
    parser.add_argument("--minutes", type=float, default=20, help="how long to run before")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    asyncio.run(main(options.minutes, options.folder))
