"""Helpers for tests that use a real server: moving the clock, waiting for a condition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, timezone
from typing import TypeVar

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

T = TypeVar("T")

PAUSE = 0.01  # seconds between two looks at a condition


def wait_for(condition: Callable[[], T], timeout: float = 60.0) -> T:
    """Call ``condition`` until it returns something true, and return that.

    Fails the test after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {condition}"
        time.sleep(PAUSE)
    return value


async def async_wait_for(condition: Callable[[], T | Awaitable[T]], timeout: float = 60.0) -> T:
    """Do the same as ``wait_for`` without blocking the event loop; may be given a coroutine."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout} s: {condition}"
        await asyncio.sleep(PAUSE)


def set_clock(conn: psycopg.Connection, moment: datetime) -> None:
    """Set what ``dispatch_now()`` returns in this session."""
    conn.execute("select set_config('dispatch.fake_now', %s, false)", [moment.isoformat()])


class Clock:
    """The clock of one test's database, as ``dispatch_now()`` shows it.

    It stands still until it is moved. A move is seen by sessions that are opened later, whoever
    opens them, and by the open connections of the fixtures ``conn`` and ``connect``, except
    those in a transaction; other open sessions need ``set_clock``.
    """

    def __init__(self, admin: psycopg.Connection, connections: list[psycopg.Connection]) -> None:
        self._admin = admin
        self._connections = connections
        self.now = datetime(2026, 1, 1, tzinfo=timezone.utc)
        self.set(self.now)

    def set(self, moment: datetime) -> None:
        """Move the clock to a moment, forwards or backwards."""
        self.now = moment
        self._admin.execute(
            sql.SQL("alter database {} set dispatch.fake_now = {}").format(
                sql.Identifier(self._admin.info.dbname), moment.isoformat()
            )
        )
        for conn in self._connections:
            if not conn.closed and conn.info.transaction_status == TransactionStatus.IDLE:
                set_clock(conn, moment)

    def advance(self, seconds: float) -> datetime:
        """Move the clock by that many seconds and return where it is."""
        self.set(self.now + timedelta(seconds=seconds))
        return self.now
