"""A proxy before a server, whose connections break where a test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class Proxy:
    """Passes on what clients and the server say, until it is told otherwise.

    Attributes:
        dsn: Leads through the proxy.
        broken: How many connections were cut off.
        swallowing: Nothing is passed on, in connections that stay open.
        swallowed: How many times something was not passed on.
    """

    def __init__(self, dsn: str, port: int) -> None:
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable")
        self.broken = 0
        self.swallowing = False
        self.swallowed = 0
        self.passes_on = False
        self._words: list[bytes] = []
        self._times = 0
        self._target = conninfo_to_dict(dsn)

    def cut(self, *words: str, passes_on: bool, times: int = 1) -> None:
        """Cut a connection off in which a client says these words, one after the other.

        With ``passes_on`` the server hears the last of them, and its answer is lost.
        """
        self._words = [word.encode() for word in words]
        self._times = times
        self.passes_on = passes_on

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client."""
        path = f"{self._target['host']}/.s.PGSQL.{self._target['port']}"
        with contextlib.suppress(OSError):
            server_reader, server_writer = await asyncio.open_unix_connection(path)
            connection = Connection(self, reader, writer, server_reader, server_writer)
            await connection.run()

    def heard(self, said: list[bytes], data: bytes) -> bool:
        """Tell whether a client has now said the words at which to cut its connection."""
        if not self._times:
            return False
        if self._words[len(said)] in data:
            said.append(data)
        if len(said) < len(self._words):
            return False
        self._times -= 1
        self.broken += 1
        return True


class Connection:
    """One client's connection to the server."""

    def __init__(
        self,
        proxy: Proxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._reader, self._writer = reader, writer
        self._server_reader, self._server_writer = server_reader, server_writer
        self._answer_is_lost = False

    async def run(self) -> None:
        """Pass on both ways until one side closes or the connection is cut off."""
        ways = [asyncio.create_task(self._to_server()), asyncio.create_task(self._to_client())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._writer.close()
            self._server_writer.close()

    async def _to_server(self) -> None:
        said: list[bytes] = []
        while data := await self._reader.read(65536):
            if self._proxy.heard(said, data):
                if not self._proxy.passes_on:
                    return
                self._answer_is_lost = True
            await self._pass(self._server_writer, data)

    async def _to_client(self) -> None:
        while data := await self._server_reader.read(65536):
            if self._answer_is_lost:
                return
            await self._pass(self._writer, data)

    async def _pass(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if self._proxy.swallowing:
            self._proxy.swallowed += 1
            return
        writer.write(data)
        await writer.drain()


@contextlib.asynccontextmanager
async def proxy(dsn: str) -> AsyncIterator[Proxy]:
    """A proxy before the server that a conninfo names."""
    clients: set[asyncio.Task[Any]] = set()
    made: list[Proxy] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        clients.add(task)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await made[0].serve(reader, writer)
        clients.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.append(Proxy(dsn, server.sockets[0].getsockname()[1]))
    try:
        yield made[0]
    finally:
        server.close()
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
