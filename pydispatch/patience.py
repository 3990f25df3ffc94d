"""A connection that waits for an answer for a bounded time.

The server ends its own statements, but only where it hears of them and is heard. A proxy or a
firewall that swallows everything leaves a connection open and silent, and the kernel, which knows
of lost packets only, sees nothing wrong. So the client counts, and closes what is silent for too
long: whoever waits gets an error as from any connection that is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg

__all__ = ["PatientConnection"]

T = TypeVar("T")


class PatientConnection(psycopg.AsyncConnection[Any]):
    """Raises ``psycopg.OperationalError`` where the server gives no answer in time.

    Attributes:
        patience: Seconds to wait for each answer, from the next one on.
    """

    patience: float = math.inf
    _timer: asyncio.TimerHandle | None = None
    _waited: float | None = None  # seconds, after which the connection was closed

    async def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        """Do what a statement has to do, as psycopg does, but not for ever."""
        self._arm(self.patience)
        try:
            return await super().wait(gen, *args, **kwargs)
        except psycopg.OperationalError:
            if self._waited is None:
                raise
            message = f"the server gave no answer within {self._waited:g} s"
            raise psycopg.OperationalError(message) from None
        finally:
            self._disarm()

    def hurry(self, patience: float) -> None:
        """Wait no longer than this for an answer, also for one that is waited for now."""
        self.patience = min(self.patience, patience)
        if self._timer is not None:
            self._arm(self.patience)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        if seconds < math.inf:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._give_up, seconds)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, waited: float) -> None:
        """End the connection below libpq, which then finds it closed by the server."""
        self._timer = None
        self._waited = waited
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
