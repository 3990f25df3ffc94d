"""Fixtures for tests with several connections."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests.concurrency.stops import Stops
from tests.fixtures import Connect

Background = Callable[..., Future[Any]]


@pytest.fixture
def background(connections: list[psycopg.Connection]) -> Iterator[Background]:
    """A function that runs another in a thread, and returns a ``Future``.

    What the connections of the test still do at its end is cancelled.
    """
    executor = ThreadPoolExecutor(max_workers=32)
    yield executor.submit
    for conn in connections:
        with contextlib.suppress(psycopg.Error):
            conn.cancel_safe()
    executor.shutdown()


@pytest.fixture
def stops(connect: Connect, background: Background) -> Iterator[Stops]:
    """Stops sessions of the test's database in the middle of what they do."""
    stops = Stops(connect())
    yield stops
    stops.release()
