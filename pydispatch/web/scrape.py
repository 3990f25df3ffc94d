"""The page that Prometheus scrapes: ``pydispatch.metrics``, of the dashboard's database."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import psycopg
from starlette.types import Receive, Scope, Send

from pydispatch.connect import Source
from pydispatch.metrics import asgi

__all__ = ["Metrics"]


class Metrics:
    """An ASGI application that shows the metrics of the database that a source leads to."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._options: dict[str, Any] = {}
        self._app = asgi(self._connect)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a scrape. Where to connect is asked anew: a password may change."""
        self._options = await self._source.options(connect_timeout=5)
        await self._app(scope, receive, send)

    def _connect(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        return psycopg.connect(**self._options)
