"""The fixture ``tick``: a test that uses it runs twice, by both ways to tick.

``dispatch_tick()`` is all in SQL; the driver's tick takes what ``dispatch_admit()`` gives out,
hands it to procrastinate in Python and settles. What can be seen of the two has to be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pytest
from procrastinate import App, SyncPsycopgConnector

from pydispatch import Dispatch
from pydispatch.handoff import Handoff

Tick = Callable[..., list[dict[str, Any]]]


class AnyTask(Dispatch):
    """An application that has every task, so that tests may name any."""

    def knows(self, task_name: str) -> bool:
        return True


class EveryPolicy(Handoff):
    """Takes no policy for another application's."""

    def ours(self, only: Sequence[str] | None = None) -> dict[str, Any]:
        return {"only": only, "policies": None, "tasks": None}


@pytest.fixture(params=["sql", "driver"])
def tick(request: pytest.FixtureRequest) -> Tick:
    """A function that ticks once: ``tick(conn, policy=None, shard=None)``.

    Returns what ``dispatch_tick()`` does, a dict a policy. In autocommit a tick is a transaction
    of its own; otherwise it is part of the connection's.
    """
    dispatch = AnyTask(App(connector=SyncPsycopgConnector())) if request.param == "driver" else None
    handoff = EveryPolicy(dispatch)

    def tick(
        conn: psycopg.Connection, policy: str | None = None, shard: str | None = None
    ) -> list[dict[str, Any]]:
        results = handoff.run(conn, handoff.ticks(policy, shard))
        return [dataclasses.asdict(result) for result in results]

    return tick
