"""An application to run in processes of its own: ``python -m tests.concurrency.app ROLE DSN``.

Its task ``work`` writes a row when it starts and one when it ends, each committed at once, so that
``run_log`` tells what ran when by the database's clock. A job with ``meet`` ends no sooner than
that many jobs of its key have started. Roles: ``driver`` (the application hands off),
``sql-driver`` (the database does), ``worker``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
from procrastinate import App, JobContext, PsycopgConnector
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

from pydispatch import Concurrency, Dispatch, Driver, ctx

CONCURRENCY = 10
"""Jobs that one worker runs at once."""

LOG = """
create table run_log (
  id bigint generated always as identity primary key,
  at timestamptz not null default clock_timestamp(),
  job_id bigint not null,
  n integer not null,
  k text not null,
  event text not null
)
"""

# The most jobs of each key that ran at once, beside the key's cap.
OVERLAPS = """
select k, max(running) as most
from (
  select k, sum(case event when 'start' then 1 else -1 end) over (partition by k order by at, id)
    as running
  from run_log
) as changes
group by k
"""


class Application:
    """The application, on a database."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.app = App(connector=PsycopgConnector(conninfo=dsn))
        self.dispatch = Dispatch(self.app)
        self._log: psycopg.AsyncConnection[Any] | None = None
        self._connecting = asyncio.Lock()

        @self.dispatch.policy(
            "work", partition_by="k", gates=[Concurrency(max=ctx("cap", default=1))]
        )
        @self.app.task(name="work", pass_context=True)
        async def work(
            context: JobContext, k: str, cap: int, n: int, seconds: float = 0, meet: int = 0
        ) -> None:
            await self._note(context, "start", k, n)
            while meet and await self._started(k) < meet:  # noqa: ASYNC110  # in other processes
                await asyncio.sleep(0.01)
            await asyncio.sleep(seconds)
            await self._note(context, "finish", k, n)

        self.task = work

    async def _note(self, context: JobContext, event: str, k: str, n: int) -> None:
        log = await self._open_log()
        await log.execute(
            "insert into run_log (job_id, n, k, event) values (%s, %s, %s, %s)",
            [context.job.id, n, k, event],
        )

    async def _started(self, k: str) -> int:
        log = await self._open_log()
        cursor = await log.execute(
            "select count(*) from run_log where k = %s and event = 'start'", [k]
        )
        ((started,),) = await cursor.fetchall()
        return int(started)

    async def _open_log(self) -> psycopg.AsyncConnection[Any]:
        async with self._connecting:
            if self._log is None or self._log.closed:
                self._log = await psycopg.AsyncConnection.connect(self.dsn, autocommit=True)
        return self._log

    async def run_worker(self, **options: Any) -> None:
        """Run a worker until it is cancelled or stopped by a signal."""
        options = {
            "concurrency": CONCURRENCY,
            "fetch_job_polling_interval": 0.5,
            "update_heartbeat_interval": 0.5,
            **options,
        }
        try:
            async with self.app.open_async():
                await self.app.run_worker_async(**options)
        finally:
            if self._log is not None:
                await self._log.close()


def stage_work(conn: psycopg.Connection, jobs: list[dict[str, Any]]) -> list[int]:
    """Stage jobs with these arguments in the application's policy."""
    cursor = conn.execute(
        "select dispatch_stage_many('work', %s)",
        [Jsonb([{"task_name": "work", "args": args} for args in jobs])],
    )
    return [row[0] for row in cursor.fetchall()]


@contextlib.contextmanager
def process(role: str, dsn: str, options: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Run the application in a process, which is killed at the end if it still runs."""
    dsn = make_conninfo(dsn, application_name=f"test {role}", options=options)
    child = subprocess.Popen([sys.executable, "-m", __name__, role, dsn])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def main(role: str, dsn: str) -> None:
    logging.basicConfig(level=logging.ERROR)
    application = Application(dsn)
    if role == "worker":
        asyncio.run(application.run_worker())
    elif role == "driver":
        application.dispatch.run(conninfo=dsn, sync=False)
    elif role == "sql-driver":
        asyncio.run(Driver(conninfo=dsn).run())
    else:
        raise ValueError(role)


if __name__ == "__main__":
    main(*sys.argv[1:])
