"""Operators who force and drain at the same time wait for each other, and never in a circle."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import psycopg
import pytest

from tests.concurrency.conftest import Background
from tests.concurrency.support import (
    IMPATIENT,
    assert_balanced,
    cap,
    column,
    define,
    in_flight,
    stage,
    value,
)
from tests.fixtures import Connect
from tests.support import wait_for

OTHERS = {
    "drains": "select (dispatch_drain('p')).admitted",
    "forces": "select dispatch_force_admit('p', %(first)s, 10)",
    "drops": "select dispatch_drop_policy('p', true)",
}


@pytest.fixture
def keys(conn: psycopg.Connection) -> list[str]:
    """Three keys, in the order of their partitions' ids; each runs one job and has one waiting."""
    define(conn, **cap(1))
    stage(conn, *"abc" * 2)
    value(conn, "select jobs_admitted from dispatch_tick('p')")
    return column(conn, "select partition_key from dispatch_partitions order by id")


@pytest.mark.parametrize("other", OTHERS)
def test_one_who_holds_the_first_partition_gets_the_last_though_another_has_folded_its_notes(
    other: str,
    keys: list[str],
    conn: psycopg.Connection,
    connect: Connect,
    background: Background,
    is_blocked: Any,
):
    first, _, last = keys
    holder, second = connect(autocommit=False), connect()
    force = "select dispatch_force_admit('p', %s, 1)"
    assert value(holder, force, first) == 1
    stage(conn, last)
    waiting: Future[Any] = background(second.execute, OTHERS[other], {"first": first})
    wait_for(lambda: waiting.done() or is_blocked(second.info.backend_pid))
    assert not waiting.done()
    assert value(holder, force, last) == 1
    holder.commit()
    waiting.result()
    if other != "drops":
        expected = {key: 3 if key == last else 2 for key in keys}
        if other == "forces":
            expected = {first: 2, keys[1]: 1, last: 2}
        assert in_flight(conn) == expected
        assert_balanced(conn)


def test_no_tick_waits_for_an_operator_and_none_makes_an_operator_wait_in_a_circle(
    keys: list[str], conn: psycopg.Connection, connect: Connect, background: Background
):
    first, _, last = keys
    holder = connect(autocommit=False)
    assert value(holder, "select dispatch_force_admit('p', %s, 1)", first) == 1
    stage(conn, last, "new")
    impatient = connect(options=IMPATIENT)
    assert value(impatient, "select jobs_admitted from dispatch_tick('p')") == 1, "the new one"
    assert value(holder, "select dispatch_force_admit('p', %s, 1)", last) == 1
    holder.commit()
    assert_balanced(conn)
