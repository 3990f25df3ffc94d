"""The dashboard's connections: few, opened when first needed, and never trusted to be alive.

A page reads in one read-only transaction, an action writes in one. Each has a statement timeout,
so no page can become the database's burden. Nothing here needs a lifespan: a mounted application
has none. When the database comes back, the next page finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timezone
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.rows import dict_row
from psycopg.types.datetime import TimestamptzLoader

from pydispatch.connect import READABLE, Source

__all__ = ["READING", "WRITING", "Database", "Reader", "Row", "UnreachableError"]

Row = dict[str, Any]

READING = 5.0
"""Seconds after which the server ends a page's statement."""

WRITING = 25.0
"""Seconds after which the server ends an action's statement."""

PATIENCE = 5.0
"""Seconds to wait for a connection while others use all of them."""

_OPTIONS: dict[str, Any] = {
    "fallback_application_name": "pydispatch web",
    "connect_timeout": 3,
    # Behind a pooler that hands connections around by transaction there are none to come back to.
    "prepare_threshold": None,
    "row_factory": dict_row,
}


class _Moment(TimestamptzLoader):
    """Reads the ends of time, and times beyond Python's, as its first and its last moment."""

    def load(self, data: Buffer) -> datetime:
        """Read a time."""
        try:
            return super().load(data)
        except psycopg.DataError:
            before = bytes(data).startswith(b"-") or bytes(data).endswith(b"BC")
            return (datetime.min if before else datetime.max).replace(tzinfo=timezone.utc)


class UnreachableError(Exception):
    """There is no connection to the database, or it was lost; the message is libpq's."""


class Reader:
    """Runs statements in one transaction."""

    def __init__(self, connection: psycopg.AsyncConnection[Row]) -> None:
        self._connection = connection

    @property
    def is_lost(self) -> bool:
        """Is the connection gone, and the transaction with it?"""
        return self._connection.closed

    async def rows(self, statement: str, **arguments: Any) -> list[Row]:
        """Run a statement and return its rows."""
        cursor = await self._connection.execute(statement.encode(), arguments)
        return await cursor.fetchall()

    async def row(self, statement: str, **arguments: Any) -> Row | None:
        """Run a statement and return its first row, or None."""
        cursor = await self._connection.execute(statement.encode(), arguments)
        return await cursor.fetchone()

    async def value(self, statement: str, **arguments: Any) -> Any:
        """Run a statement and return the only value of its only row."""
        row = await self.row(statement, **arguments)
        return None if row is None else next(iter(row.values()))

    async def page(
        self, statement: str, limit: int, **arguments: Any
    ) -> tuple[list[Row], Row | None]:
        """Run a statement that takes a limit; return so many rows, and the last if more follow."""
        rows = await self.rows(statement, limit=limit + 1, **arguments)
        return rows[:limit], rows[limit - 1] if len(rows) > limit else None

    async def database_time(self) -> datetime:
        """Return the time by the database's clock."""
        moment: datetime = await self.value("select dispatch_now()")
        return moment

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Undo what is done inside if it raises, and go on in the same transaction."""
        async with self._connection.transaction():
            yield


class Database:
    """At most ``size`` connections at once, those that are idle kept for the next page."""

    def __init__(self, source: Source, size: int = 4) -> None:
        self._source = source
        self._size = size
        self._idle: list[psycopg.AsyncConnection[Row]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free = asyncio.Semaphore(size)

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[Reader]:
        """One read-only transaction in which everything is seen as of one moment.

        Raises:
            UnreachableError: There is no database.
        """
        begin = "begin transaction isolation level repeatable read, read only"
        async with self._transaction(begin, READING) as reader:
            yield reader

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[Reader]:
        """One transaction that commits unless the block raises.

        Raises:
            UnreachableError: There is no database, or it was lost; what was done is then not
                known to have been committed.
        """
        begin = "begin transaction isolation level read committed, read write"
        async with self._transaction(begin, WRITING) as reader:
            yield reader

    async def close(self) -> None:
        """Close what is idle. The next page opens anew."""
        while self._idle:
            await self._idle.pop().close()

    @contextlib.asynccontextmanager
    async def _transaction(self, begin: str, timeout: float) -> AsyncIterator[Reader]:
        self._enter_loop()
        free = self._free
        try:
            await asyncio.wait_for(free.acquire(), PATIENCE)
        except asyncio.TimeoutError:
            raise UnreachableError("all of the dashboard's connections are in use") from None
        connection = None
        try:
            connection = await self._begun(
                [begin, f"set local statement_timeout = {round(timeout * 1000)}"]
            )
            try:
                yield Reader(connection)
            except psycopg.Error as error:
                if connection.closed or _is_outage(error):
                    raise UnreachableError(_first_line(error)) from error
                raise
            try:
                await connection.execute("commit")
            except psycopg.OperationalError as error:
                if connection.closed or _is_outage(error):
                    raise UnreachableError(_first_line(error)) from error
                raise
        finally:
            free.release()
            if connection is not None:
                await self._put_back(connection)

    async def _begun(self, statements: Sequence[str]) -> psycopg.AsyncConnection[Row]:
        """Return a connection with a transaction begun; one that died while idle is replaced."""
        script = "; ".join(statements).encode()
        while self._idle:
            connection = self._idle.pop()
            try:
                await connection.execute(script)
            except psycopg.OperationalError:
                await connection.close()
                await self.close()  # the others died with it
            except BaseException:
                await connection.close()
                raise
            else:
                return connection
        try:
            connection = await self._source.connect(psycopg.AsyncConnection, **_OPTIONS)
        except psycopg.OperationalError as error:
            raise UnreachableError(_first_line(error)) from error
        connection.adapters.register_loader("timestamptz", _Moment)
        try:
            # Estimates of functions that return rows are high; compiling would take longer.
            await connection.execute(f"set jit = off; set timezone = 'UTC'; {READABLE}".encode())
            await connection.execute(script)
        except psycopg.OperationalError as error:
            await connection.close()
            raise UnreachableError(_first_line(error)) from error
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _put_back(self, connection: psycopg.AsyncConnection[Row]) -> None:
        status = connection.pgconn.transaction_status
        usable = not connection.closed and status != psycopg.pq.TransactionStatus.ACTIVE
        if usable and status != psycopg.pq.TransactionStatus.IDLE:
            with contextlib.suppress(psycopg.Error):
                await connection.rollback()
        if usable and connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            self._idle.append(connection)
        else:
            await connection.close()

    def _enter_loop(self) -> None:
        """Forget the connections of an event loop that is not the running one: they are its own."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        for connection in self._idle:
            connection.pgconn.finish()
        self._idle = []
        self._free = asyncio.Semaphore(self._size)
        self._loop = loop


def _is_outage(error: psycopg.Error) -> bool:
    """Tell whether the server is shutting down, starting, or has no room; not a slow statement."""
    state = error.sqlstate or ""
    return state[:2] == "08" or state[:3] == "57P" or state == "53300"


def _first_line(error: psycopg.Error) -> str:
    """What libpq says, without its list of tries; never with a password, which it does not show."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
