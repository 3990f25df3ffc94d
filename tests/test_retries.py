"""A task that fails and is retried, as its code sees it: a real worker, with a driver beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
from procrastinate import App, JobContext, PsycopgConnector, RetryStrategy

from pydispatch import Concurrency, Dispatch, Driver
from tests.concurrency.support import value
from tests.support import async_wait_for

STRATEGIES = ["restage", "bypass"]


class Application:
    """An application with a task that fails until its last try, and what its tries saw."""

    def __init__(self, dsn: str, strategy: Any, *, retries: int, succeeds: bool) -> None:
        self.app = App(connector=PsycopgConnector(conninfo=dsn))
        self.dispatch = Dispatch(self.app)
        self.tries: list[tuple[int, int]] = []
        """The job's id and ``context.job.attempts``, as each try saw them."""

        @self.dispatch.policy(
            "p",
            partition_by="k",
            gates=[Concurrency(max=1)],
            retry_strategy=strategy,
        )
        @self.app.task(name="t", pass_context=True, retry=RetryStrategy(max_attempts=retries))
        async def task(context: JobContext, k: str) -> None:
            assert context.job.id is not None
            self.tries.append((context.job.id, context.job.attempts))
            if not (succeeds and context.job.attempts == retries):
                raise ValueError("this try fails")

        self.task = task


@pytest.fixture
async def running() -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Tasks that are cancelled at the end of the test."""
    tasks: list[asyncio.Task[Any]] = []
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("succeeds", [True, False], ids=["succeeds", "fails"])
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_task_is_tried_as_often_as_it_says_and_knows_which_try_it_is(
    dsn: str,
    conn: psycopg.Connection,
    running: list[asyncio.Task[Any]],
    strategy: str,
    succeeds: bool,
):
    application = Application(dsn, strategy, retries=3, succeeds=succeeds)
    application.dispatch.sync(conn)
    manager = application.app.job_manager
    async with application.app.open_async():
        driver = Driver(application.dispatch, install_signal_handlers=False)
        running.append(asyncio.create_task(driver.run()))
        running.append(
            asyncio.create_task(
                application.app.run_worker_async(
                    install_signal_handlers=False, fetch_job_polling_interval=0.2
                )
            )
        )
        job_id = await application.task.defer_async(k="a")
        ended = "select dispatch_job_status(%s) in ('succeeded', 'failed')"
        await async_wait_for(lambda: value(conn, ended, job_id), 30)
        status = (await manager.get_job_status_async(job_id)).value
        driver.stop()
        await running[0]

    assert status == ("succeeded" if succeeds else "failed")
    assert len({its_id for its_id, _ in application.tries}) == 1, "it stays the same job"
    assert [attempts for _, attempts in application.tries] == [0, 1, 2, 3]
    ((its_id, attempts),) = conn.execute("select id, attempts from procrastinate_jobs").fetchall()
    assert (its_id, attempts) == (application.tries[0][0], 4)
    events = conn.execute(
        "select type::text, count(*) from procrastinate_events where job_id = %s group by 1",
        [its_id],
    )
    seen: dict[str, int] = dict(events.fetchall())
    assert seen.pop("scheduled", 0) <= 3
    assert seen == {"deferred": 1, "started": 4, "deferred_for_retry": 3, status: 1}
    conn.execute("select dispatch_fold('p', dispatch_now())")
    assert conn.execute(
        "select pending_count, in_flight_count from dispatch_partitions"
    ).fetchall() == [(0, 0)]
    assert not conn.execute("select from dispatch_inflight_jobs").fetchall()
