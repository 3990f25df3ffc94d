"""The loop that ticks: it sleeps until something is due, and wakes when something happens.

Any number of drivers may run beside each other. Each guards that it never spins (what it cannot
get because another holds it, or what fails, is tried again after a growing pause) and that it
never oversleeps: the database's clock says how long to sleep, a notification ends the sleep, and
a poll makes up for a notification that was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg
from procrastinate.exceptions import ConnectorException
from psycopg import sql
from psycopg.rows import dict_row
from typing_extensions import LiteralString, TypedDict

from pydispatch.connect import Source
from pydispatch.errors import DispatchError, UnknownPolicy
from pydispatch.handoff import OURS, Handoff, TickResult
from pydispatch.patience import PatientConnection
from pydispatch.version import version_steps

if TYPE_CHECKING:
    from pydispatch.dispatch import Dispatch

__all__ = ["Driver", "DriverOptions"]

logger = logging.getLogger(__name__)

AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]

# Seconds until each of our policies is due, by the database's clock; null when nothing waits.
LOOK: LiteralString = (
    """
    with ours as materialized (
      select p.policy_name, dispatch_next_due(p.policy_name, %(shard)s) as due_at
      from dispatch_policies as p
      where """
    + OURS
    + """
    )
    select
      policy_name,
      case when due_at < 'infinity' then
        extract(epoch from greatest(due_at, 'epoch'::timestamptz) - dispatch_now())::float8
      end as wait
    from ours
    """
)

# Plans outlive the quiet night that they were made in, those of procrastinate's foreign keys too:
# rows are found by index, however few there were. A tick counts after it has locked, which needs a
# snapshot for each statement, whatever the role's default is.
SETTINGS: LiteralString = """
select
  dispatch_channel() as channel,
  set_config('enable_seqscan', 'off', false),
  set_config('default_transaction_isolation', 'read committed', false),
  set_config('statement_timeout', %(timeout)s, false),
  set_config('idle_in_transaction_session_timeout', %(timeout)s, false)
"""

GAP = 0.01
"""Seconds between two looks, or two ticks of a policy, that find nothing: wake-ups are gathered."""

LONGEST_PAUSE = 0.25
"""Seconds between two tries to get what another driver holds."""

LONGEST_RETRY = 30.0
"""Seconds between two tries of a policy whose tick fails."""

LONGEST_RECONNECT = 5.0
"""Seconds between two tries to connect."""


GRACE = 5.0
"""Seconds that an answer may take beyond the time after which the server ends the statement, and
those that the current tick may take once the driver is to stop."""


@dataclasses.dataclass
class Pace:
    """When a policy that is due may be ticked again, on the event loop's clock."""

    not_before: float = 0.0
    last_tick: float = 0.0
    fruitless: int = 0
    failures: int = 0

    def ticked(self, result: TickResult | None, now: float) -> None:
        """Take up a tick's result; None when the policy is gone."""
        self.last_tick = now
        self.failures = 0
        if result is not None and (result.jobs_admitted or result.handoff_failures):
            self.fruitless = 0
            self.not_before = now
        elif result is not None and result.partitions_seen:
            self.fruitless = 0
            self.not_before = now + GAP
        else:
            self.not_before = now + _growing(GAP, self.fruitless, LONGEST_PAUSE)
            self.fruitless += 1

    def failed(self, now: float) -> float:
        """Take up that a tick failed, and return the seconds until the next try."""
        pause = _growing(0.1, self.failures, LONGEST_RETRY)
        self.failures += 1
        self.not_before = now + pause
        return pause

    def notified(self) -> None:
        """Take up that something happened in the policy: a pause that it cuts short is over."""
        if not self.failures:
            self.fruitless = 0
            self.not_before = min(self.not_before, self.last_tick + GAP)


class DriverOptions(TypedDict, total=False):
    """The options of ``Driver``."""

    conninfo: str | None
    policies: Sequence[str] | None
    shard: str | None
    sync: bool
    idle_pause: float
    sweep_interval: float
    tick_max_duration: float
    install_signal_handlers: bool


class Driver:
    """Ticks policies for as long as it runs, in a connection of its own.

    Args:
        dispatch: The application that hands jobs off. None: the database does all of it, and
            ``conninfo`` is needed.
        conninfo: A libpq connection string. Default: where the application's connector connects.
        policies: Names of the policies to tick. Default: all but those that only other
            applications have tasks for.
        shard: Tick only the partitions of this shard. Default: all.
        sync: Write the application's policies at the start. One that is refused is logged and
            keeps its old definition.
        idle_pause: Seconds between two looks when nothing happens.
        sweep_interval: Seconds between two sweeps.
        tick_max_duration: Seconds after which the server ends a statement, or a transaction that
            stands still. A connection in which it gives no answer 5 s later is made anew.
        install_signal_handlers: Stop on SIGTERM and SIGINT, after the current tick; one that takes
            5 s more is broken off. The second signal has its usual effect.

    Raises:
        ValueError: There is no conninfo, and the connector does not tell one.
    """

    def __init__(
        self,
        dispatch: Dispatch | None = None,
        *,
        conninfo: str | None = None,
        policies: Sequence[str] | None = None,
        shard: str | None = None,
        sync: bool = True,
        idle_pause: float = 0.5,
        sweep_interval: float = 30.0,
        tick_max_duration: float = 25.0,
        install_signal_handlers: bool = True,
    ) -> None:
        self._dispatch = dispatch
        self._handoff = Handoff(dispatch)
        self._source = Source(conninfo, dispatch.app.connector if dispatch else None)
        self._policies = policies
        self._missing = frozenset(policies or ())  # as far as is known
        self._shard = shard
        self._sync = sync and dispatch is not None
        self._idle_pause = idle_pause
        self._sweep_interval = sweep_interval
        self._tick_max_duration = tick_max_duration
        self._patience = tick_max_duration + GRACE
        self._install_signal_handlers = install_signal_handlers
        self._paces: dict[str, Pace] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Task[PatientConnection] | None = None
        self._connection: PatientConnection | None = None
        self._woken = asyncio.Event()
        self._started = self._stopping = False
        self._active = True  # there was something to do since the last sleep
        self._losses = 0  # of the connection, since the last look
        self._last_look = self._wake_at = self._next_sweep = 0.0

    def stop(self) -> None:
        """Let ``run`` return after the current tick. May be called from any thread."""
        if not self._stopping:
            self._stopping = True
            logger.info("Driver stops after the current tick", extra={"action": "driver_stopping"})
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hurry)

    def _hurry(self) -> None:
        """Let nothing that is waited for hold off the end of the loop."""
        self._woken.set()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.hurry(GRACE)

    async def run(self) -> None:
        """Run until ``stop`` is called or a signal comes.

        A lost connection is made anew, and a policy that fails is tried again; only what goes
        wrong at the very start is raised.

        Raises:
            psycopg.Error: There is no connection, or no dispatch schema, to begin with.
        """
        self._loop = asyncio.get_running_loop()
        self._next_sweep = self._loop.time() + random.uniform(0, self._sweep_interval)
        with self._signals():
            while not self._stopping:
                try:
                    await self._attend()
                except (psycopg.Error, ConnectorException) as error:
                    if not self._started:
                        raise
                    pause = _growing(0.1, self._losses, LONGEST_RECONNECT)
                    self._losses += 1
                    cause = error.__cause__ or error
                    lost = isinstance(cause, (psycopg.OperationalError, psycopg.InterfaceError))
                    logger.warning(
                        "%s, next try in %.1f s: %s",
                        "Connection lost" if lost else "Looking for work failed",
                        pause,
                        cause,
                        extra={"action": "connection_lost" if lost else "look_failed"},
                    )
                    await self._wait(pause)
        logger.info("Driver stopped", extra={"action": "driver_stopped"})

    # -- the connection

    async def _attend(self) -> None:
        """Connect, and serve until the connection is lost or the driver is to stop."""
        connection = await self._connect()
        if connection is None:
            return
        async with connection:
            self._connection = connection
            connection.patience = self._patience
            if self._stopping:
                self._hurry()
            try:
                await self._prepare(connection)
                await self._serve(connection)
            finally:
                self._connection = None

    async def _connect(self) -> PatientConnection | None:
        """Return a new connection, or None when the driver is to stop meanwhile."""
        self._connecting = asyncio.create_task(self._source.connect(PatientConnection))
        try:
            done, _ = await asyncio.wait([self._connecting], timeout=self._patience)
            if not done:
                raise psycopg.OperationalError(f"no connection within {self._patience:g} s")
            return None if self._connecting.cancelled() else self._connecting.result()
        finally:
            self._connecting.cancel()
            self._connecting = None

    async def _prepare(self, connection: AsyncConnection) -> None:
        """Set the session up, listen, and write the policies if that was not done yet."""
        await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        connection.add_notify_handler(lambda notify: self._notified(notify.payload))
        async with connection.cursor(row_factory=dict_row) as cursor:
            milliseconds = max(1, round(self._tick_max_duration * 1000))
            await cursor.execute(SETTINGS, {"timeout": f"{milliseconds}ms"})
            row = await cursor.fetchone()
            assert row is not None
            await cursor.execute(sql.SQL("listen {}").format(sql.Identifier(row["channel"])))
        if not self._started:
            await self._handoff.run_async(connection, version_steps())
        if self._dispatch is not None and self._sync and not self._started:
            for name in self._dispatch.policy_names():
                await self._sync_policy(connection, self._dispatch, name)

    async def _sync_policy(
        self, connection: AsyncConnection, dispatch: Dispatch, name: str
    ) -> None:
        try:
            await self._handoff.run_async(connection, dispatch.sync_steps([name]))
        except DispatchError:
            logger.exception(
                "Policy %s was refused",
                name,
                extra={"action": "policy_refused", "policy": name},
            )

    # -- the loop

    async def _serve(self, connection: AsyncConnection) -> None:
        """Look, tick what is due, sleep; one statement for each time that nothing is due."""
        while not self._stopping:
            if self._now() >= self._next_sweep:
                await self._sweep(connection)
            else:
                ready = await self._look(connection)
                for name in ready:
                    if self._stopping:
                        return
                    await self._tick(connection, name)
                if ready:
                    self._active = True
                    continue
            await self._sleep(connection)

    async def _look(self, connection: AsyncConnection) -> list[str]:
        """Return the policies to tick now, and note when to look again."""
        self._last_look = self._now()
        arguments = {"shard": self._shard, **self._handoff.ours(self._policies)}
        async with connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(LOOK, arguments)
            waits = {row["policy_name"]: row["wait"] for row in await cursor.fetchall()}
        self._losses = 0
        if not self._started:
            self._started = True
            logger.info("Driver started", extra={"action": "driver_started"})
        for name in self._missing - waits.keys():
            logger.warning(
                "There is no policy %s", name, extra={"action": "policy_missing", "policy": name}
            )
        self._missing = frozenset()
        now = self._now()
        self._paces = {name: self._paces.get(name) or Pace() for name in waits}
        moments = {
            name: max(now + wait, self._paces[name].not_before)
            for name, wait in waits.items()
            if wait is not None
        }
        self._wake_at = min(moments.values(), default=math.inf)
        ready = [name for name, moment in moments.items() if moment <= now]
        random.shuffle(ready)
        return ready

    async def _tick(self, connection: AsyncConnection, name: str) -> None:
        pace = self._paces[name]
        try:
            steps = self._handoff.ticks(name, self._shard)
            results = await self._handoff.run_async(connection, steps)
        except UnknownPolicy:
            pace.ticked(None, self._now())
        except Exception as error:
            if _lost(connection, error):
                raise
            pause = pace.failed(self._now())
            logger.exception(
                "Tick of policy %s failed, next try in %.1f s",
                name,
                pause,
                extra={"action": "tick_failed", "policy": name, "pause": pause},
            )
        else:
            pace.ticked(results[0] if results else None, self._now())
            for result in results:
                logger.log(
                    logging.WARNING if result.handoff_failures else logging.DEBUG,
                    "Tick of policy %s: %d jobs admitted, %d set aside",
                    name,
                    result.jobs_admitted,
                    result.handoff_failures,
                    extra={"action": "ticked", **dataclasses.asdict(result)},
                )

    async def _sweep(self, connection: AsyncConnection) -> None:
        self._next_sweep = self._now() + self._sweep_interval * random.uniform(0.9, 1.1)
        try:
            await connection.execute("select dispatch_sweep()")
        except psycopg.Error as error:
            if _lost(connection, error):
                raise
            logger.exception("Sweep failed", extra={"action": "sweep_failed"})

    async def _sleep(self, connection: AsyncConnection) -> None:
        """Sleep until something is due, a notification comes or the idle pause is over.

        Drivers that were woken by the same notification would go on to look at the same moment;
        so the first pause after there was something to do is cut short at random.
        """
        assert self._loop is not None
        pause = random.uniform(0, self._idle_pause) if self._active else self._idle_pause
        self._active = False
        pause = min(pause, self._wake_at - self._now())
        if pause <= 0:
            return
        # Only this socket tells of a notification. Its reader is ours while no statement runs.
        socket = connection.fileno()
        self._loop.add_reader(socket, self._woken.set)
        try:
            self._hear(connection)
            woken = await self._wait(pause)
        finally:
            self._loop.remove_reader(socket)
        if woken and not self._stopping:
            self._active = True
            self._hear(connection)
            await asyncio.sleep(self._last_look + GAP - self._now())

    async def _wait(self, seconds: float) -> bool:
        """Sleep, and return whether something ended the sleep before its time."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), 0 if self._stopping else seconds)
        woken = self._woken.is_set()
        self._woken.clear()
        return woken

    def _hear(self, connection: AsyncConnection) -> None:
        """Take up the notifications that have arrived. An error shows at the next statement."""
        with contextlib.suppress(psycopg.Error):
            connection.pgconn.consume_input()
            while notify := connection.pgconn.notifies():
                self._notified(notify.extra.decode(errors="replace"))

    def _notified(self, policy: str) -> None:
        self._woken.set()
        if policy in self._paces:
            self._paces[policy].notified()
            self._wake_at = min(self._wake_at, self._paces[policy].not_before)

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop at the first signal; the second is not held off."""
        installed: set[signal.Signals] = set()
        loop = self._loop
        assert loop is not None

        def restore(number: signal.Signals) -> None:
            installed.discard(number)
            loop.remove_signal_handler(number)

        def stop(number: signal.Signals) -> None:
            restore(number)
            self.stop()

        if self._install_signal_handlers and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop, number)
                installed.add(number)
        try:
            yield
        finally:
            for number in list(installed):
                restore(number)


def _growing(first: float, tries: int, longest: float) -> float:
    """Return a pause that doubles with each try, up to a limit, and is a little at random."""
    return float(min(first * 2 ** min(tries, 30), longest) * random.uniform(0.5, 1))


def _lost(connection: AsyncConnection, error: Exception) -> bool:
    """Tell whether the connection is gone, or the server is about to end it."""
    cause = error.__cause__ if isinstance(error, ConnectorException) else error
    return connection.closed or (getattr(cause, "sqlstate", None) or "").startswith("57P")
