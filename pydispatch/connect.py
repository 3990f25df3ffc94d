"""Where an application's connector connects to, for connections of our own to the same place."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from procrastinate import PsycopgConnector, SyncPsycopgConnector
from psycopg.conninfo import conninfo_to_dict

if TYPE_CHECKING:
    from procrastinate.connector import BaseConnector

__all__ = ["CONNECTION", "READABLE", "READ_COMMITTED", "Source"]

ConnectionT = TypeVar("ConnectionT", bound="psycopg.AsyncConnection[Any]")

CONNECTION = {
    "fallback_application_name": "pydispatch",
    "connect_timeout": 10,
    # A network that swallows everything is noticed within half a minute.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}
"""libpq's options for a connection of ours, where the user's conninfo has none."""

READABLE = "set datestyle = 'ISO'; set intervalstyle = 'postgres'"
"""Has the database write times as psycopg reads them, whatever a role's settings are."""

READ_COMMITTED = "set default_transaction_isolation = 'read committed'"
"""Gives each statement a snapshot of its own: a tick counts after it has locked."""


class Source:
    """Makes connections like those of a connector, or as a conninfo says.

    Args:
        conninfo: A libpq connection string or URL; stronger than the connector's own.
        connector: One of procrastinate's, on psycopg.

    Raises:
        ValueError: There is no conninfo, and the connector does not tell one.
    """

    def __init__(self, conninfo: str | None = None, connector: BaseConnector | None = None) -> None:
        self._conninfo = conninfo
        self._connector = None if conninfo is not None else _psycopg_connector(connector)

    async def options(self, **defaults: Any) -> dict[str, Any]:
        """Return what ``psycopg.connect`` takes, for a connection in autocommit.

        Args:
            defaults: libpq's options in place of those in ``CONNECTION``, where the user's
                conninfo has none.
        """
        conninfo: Any = self._conninfo
        options: Any = {}
        if self._connector is not None:
            arguments = self._connector._pool_args
            pool = getattr(self._connector, "_async_pool", None)
            conninfo = pool.conninfo if pool else arguments.get("conninfo", "")
            options = (pool.kwargs if pool else arguments.get("kwargs")) or {}
        conninfo, options = await _called(conninfo), await _called(options)
        return {
            **CONNECTION,
            **defaults,
            **conninfo_to_dict(conninfo),
            **options,
            "autocommit": True,
        }

    async def connect(self, kind: type[ConnectionT], **defaults: Any) -> ConnectionT:
        """Open a connection of this class in autocommit; takes what ``options`` does.

        Raises:
            psycopg.Error: There is no connection.
        """
        connection = await kind.connect(**await self.options(**defaults))
        configure = self._connector._pool_args.get("configure") if self._connector else None
        if inspect.iscoroutinefunction(configure):
            await configure(connection)
            await connection.set_autocommit(True)
        return connection


async def _called(value: Any) -> Any:
    """Return a value, or what the function (perhaps async) returns that stands for it."""
    if callable(value):
        value = value()
    return await value if inspect.isawaitable(value) else value


def _psycopg_connector(
    connector: BaseConnector | None,
) -> PsycopgConnector | SyncPsycopgConnector:
    """Return the connector that tells where to connect."""
    worker_connector = getattr(connector, "get_worker_connector", None)
    if worker_connector is not None:
        connector = worker_connector()
    if not isinstance(connector, (PsycopgConnector, SyncPsycopgConnector)):
        raise ValueError("there is no telling where to connect: give conninfo")
    return connector
