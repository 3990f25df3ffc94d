"""Adaptive concurrency against a model of ten lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.properties.support import Database, tries


@dataclass(frozen=True)
class Knobs:
    """An adaptive gate's parameters."""

    initial_max: int
    target_lag_ms: float
    min: int = 1
    max: int | None = None
    ewma_alpha: float = 0.5
    failure_decrease_factor: float = 0.5
    overload_decrease_factor: float = 0.95


@dataclass(frozen=True)
class Stats:
    current_max: int
    ewma_lag_ms: float = 0.0
    sample_count: int = 0


def step(stats: Stats, knobs: Knobs, succeeded: bool, lag_ms: float) -> Stats:
    """The model."""
    faded = stats.ewma_lag_ms * (1 - knobs.ewma_alpha) if stats.ewma_lag_ms >= 1e-9 else 0
    ewma = faded + knobs.ewma_alpha * lag_ms
    if not succeeded:
        cap = floor(stats.current_max * knobs.failure_decrease_factor)
    elif ewma > knobs.target_lag_ms:
        cap = floor(stats.current_max * knobs.overload_decrease_factor)
    else:
        cap = stats.current_max + 1
    cap = max(cap if knobs.max is None else min(cap, knobs.max), knobs.min)
    return Stats(cap, ewma, stats.sample_count + 1)


def fold(knobs: Knobs, seen: Sequence[tuple[bool, float]]) -> Stats:
    stats = Stats(knobs.initial_max)
    for succeeded, lag_ms in seen:
        stats = step(stats, knobs, succeeded, lag_ms)
    return stats


@st.composite
def knobs(draw: st.DrawFn) -> Knobs:
    lowest = draw(st.integers(1, 20))
    initial = draw(st.integers(lowest, lowest + 50))
    between = st.floats(0, 1, exclude_min=True, exclude_max=True).map(lambda x: max(x, 1e-9))
    return Knobs(
        initial_max=initial,
        target_lag_ms=draw(st.floats(1e-3, 1e6)),
        min=lowest,
        max=draw(st.none() | st.integers(initial, initial + 100)),
        ewma_alpha=draw(st.just(0.5) | st.just(1.0) | between),
        failure_decrease_factor=draw(st.just(0.5) | between),
        overload_decrease_factor=draw(st.just(0.95) | between),
    )


LAGS = st.integers(0, 10**10).map(lambda microseconds: microseconds / 1000) | st.just(0.0)
SEEN = st.tuples(st.booleans() | st.just(True), LAGS)


def steps(db: Database, knobs: Knobs, stats: Stats, succeeded: bool, lag_ms: float) -> Stats:
    row = db.all(
        """select * from dispatch_aimd_step(%s::integer, %s::float8, %s, %s::float8, %s::float8,
          %s::float8, %s::float8, %s::float8, %s::integer, %s::integer, %s::integer)""",
        stats.current_max,
        stats.ewma_lag_ms,
        succeeded,
        lag_ms,
        knobs.target_lag_ms,
        knobs.ewma_alpha,
        knobs.failure_decrease_factor,
        knobs.overload_decrease_factor,
        knobs.min,
        knobs.max,
        stats.current_max,
    )[0]
    return Stats(row["current_max"], row["ewma_lag_ms"], stats.sample_count + 1)


@tries(1000)
@given(knobs(), st.integers(1, 10**6), st.floats(0, 1e9), SEEN)
def test_a_step_is_the_models(
    db: Database, knobs: Knobs, current_max: int, ewma: float, seen: tuple[bool, float]
) -> None:
    before = Stats(current_max, ewma)
    assert steps(db, knobs, before, *seen) == step(before, knobs, *seen)


def start(db: Database, gates: dict[str, Knobs], keys: Sequence[str], **context: Any) -> None:
    """Define a policy with these gates and make its partitions known."""
    looked_up = {name: {"ctx": name} for name in context}
    db.define(
        "p",
        partition_by="key",
        gates=[
            {"type": "adaptive_concurrency", "name": name, **vars(gate), **looked_up}
            for name, gate in gates.items()
        ],
    )
    db.stage("p", [{"task_name": "t", "args": {"key": key, **context}} for key in keys])
    db.one("select dispatch_fold('p', dispatch_now())")
    # A cap grows only while it is in use.
    db.conn.execute("update dispatch_partitions set in_flight_count = 2000000000")


def observe(db: Database, seen: Sequence[tuple[str, bool, float]]) -> None:
    """Write the notes that finished jobs leave."""
    db.conn.execute(
        """insert into dispatch_inbox (policy_name, partition_id, kind, jobs, succeeded, lag_ms)
        select 'p', dispatch_partition_id('p', key), 'finished', -1, succeeded, lag_ms
        from unnest(%s::text[], %s::boolean[], %s::float8[]) with ordinality
          as seen (key, succeeded, lag_ms, place)
        order by place""",
        [list(column) for column in zip(*seen, strict=True)],
    )


def learned(db: Database) -> dict[tuple[str, str], Stats]:
    rows = db.all(
        """select p.partition_key, s.gate_name, s.current_max, s.ewma_lag_ms, s.sample_count
        from dispatch_adaptive_stats as s join dispatch_partitions as p on p.id = s.partition_id"""
    )
    return {
        (row["partition_key"], row["gate_name"]): Stats(
            row["current_max"], row["ewma_lag_ms"], row["sample_count"]
        )
        for row in rows
    }


@tries(300)
@given(
    st.dictionaries(st.sampled_from(["slow", "quick"]), knobs(), min_size=1),
    st.lists(st.tuples(st.sampled_from("abcdefgh"), *[st.booleans(), LAGS]), min_size=1),
    st.integers(1, 40),
)
def test_a_fold_equals_one_step_after_the_other_however_it_is_cut(
    db: Database, gates: dict[str, Knobs], seen: list[tuple[str, bool, float]], bite: int
) -> None:
    with db.rehearsal():
        start(db, gates, "abcdefgh")
        observe(db, seen)
        while db.one("select dispatch_fold('p', dispatch_now(), %s)", bite):
            pass
        assert learned(db) == {
            (key, name): fold(gate, [(ok, lag) for k, ok, lag in seen if k == key])
            for key in {key for key, _, _ in seen}
            for name, gate in gates.items()
        }


@tries(10)
@given(knobs(), st.integers(1000, 3000))
def test_the_average_fades_to_nothing_when_nobody_waits(
    db: Database, knobs: Knobs, jobs: int
) -> None:
    with db.rehearsal():
        start(db, {"g": knobs}, "a")
        seen = [("a", True, 5.0)] + [("a", True, 0.0)] * jobs
        observe(db, seen)
        db.one("select dispatch_fold('p', dispatch_now())")
        assert learned(db)["a", "g"] == fold(knobs, [(ok, lag) for _, ok, lag in seen])


@tries(50)
@given(
    st.dictionaries(
        st.sampled_from(["initial_max", "min", "max", "target_lag_ms", "ewma_alpha"]),
        st.integers(-10, 10**13)
        | st.floats(-2, 2)
        | st.text("0123456789.-e x", max_size=5)
        | st.none(),
    ),
    st.lists(SEEN, max_size=20),
)
def test_whatever_a_context_says_the_cap_keeps_its_range(
    db: Database, context: dict[str, Any], seen: list[tuple[bool, float]]
) -> None:
    with db.rehearsal():
        start(db, {"g": Knobs(initial_max=3, target_lag_ms=100)}, "a", **context)
        (allowed,) = (row["allowed"] for row in asked(db, in_flight=0))
        lowest, highest = limits(context)
        assert lowest <= allowed <= highest
        if seen:
            observe(db, [("a", *one) for one in seen])
            db.one("select dispatch_fold('p', dispatch_now())")
            assert lowest <= learned(db)["a", "g"].current_max <= highest


def asked(db: Database, in_flight: int) -> list[dict[str, Any]]:
    """Ask the gates of partition a."""
    return db.all(
        """select claim.allowed
        from dispatch_policies as policy
        join dispatch_partitions as p using (policy_name)
        cross join lateral (select (dispatch_new_claim(policy, p, 1)).*) as new
        cross join unnest(dispatch_pass_gates(policy.gates, dispatch_resolve(policy, array[
          row(1, p.id, p.partition_key, p.context, new.params, '{}', %s, 1000000000, null, null,
            null)::dispatch_claim], dispatch_now()), dispatch_now())) as claim""",
        in_flight,
    )


def limits(context: dict[str, Any]) -> tuple[int, float]:
    """Return the range that a cap has to keep, whatever else is looked up."""

    def number(name: str) -> float | None:
        value = context.get(name)
        if isinstance(value, str) and re.fullmatch(r"[-+]?\d{1,12}(\.\d{1,12})?", value):
            value = float(value)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    lowest = min(max(number("min") or 1, 1), 1e9)
    highest = number("max")
    # A cap is a whole number near a limit that is none.
    return floor(lowest), 1e9 if highest is None else ceil(max(min(highest, 1e9), lowest))


@tries(100)
@given(knobs(), st.integers(0, 300), st.lists(SEEN, max_size=10))
def test_an_idle_partition_leaves_the_floor_and_a_busy_one_keeps_its_cap(
    db: Database, knobs: Knobs, in_flight: int, seen: list[tuple[bool, float]]
) -> None:
    with db.rehearsal():
        start(db, {"g": knobs}, "a")
        if seen:
            observe(db, [("a", *one) for one in seen])
            db.one("select dispatch_fold('p', dispatch_now())")
        cap = fold(knobs, seen).current_max
        (allowed,) = (row["allowed"] for row in asked(db, in_flight))
        free = max(cap, knobs.initial_max) if in_flight == 0 else cap - in_flight
        assert allowed == max(free, 0)


def test_the_model_grows_by_one_and_shrinks_by_its_factors() -> None:
    knobs = Knobs(initial_max=10, target_lag_ms=100)
    assert step(Stats(10), knobs, True, 100).current_max == 11
    assert step(Stats(10), knobs, False, 0).current_max == 5
    assert step(Stats(10, 500), knobs, True, 100).current_max == 9
    assert step(Stats(10), replace(knobs, max=10), True, 0).current_max == 10
