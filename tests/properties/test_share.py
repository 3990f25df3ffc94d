"""Sharing a budget, and the decay that says whose turn it is, against small models."""

from __future__ import annotations

from fractions import Fraction
from math import exp, floor, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.support import Database, tries

Claim = tuple[int, float]  # demand, weight

DEMANDS = st.integers(0, 200) | st.integers(0, 3) | st.just(10_000)
WEIGHTS = st.just(1.0) | st.sampled_from([0.5, 2.0, 3.0]) | st.floats(1e-6, 1e6)
CLAIMS = st.lists(st.tuples(DEMANDS, WEIGHTS), min_size=1, max_size=60)
BUDGETS = st.integers(1, 100) | st.integers(1, 1_000_000)


def shares(db: Database, claims: list[Claim], budget: int | None) -> list[int]:
    demands, weights = zip(*claims, strict=True)
    given = db.one(
        "select dispatch_share(%s::integer[], %s::float8[], %s::integer)",
        list(demands),
        list(weights),
        budget,
    )
    assert isinstance(given, list)
    return given


def fair(claims: list[Claim], budget: int) -> list[Fraction]:
    """The model: pour until nobody wants more or the budget is used up."""
    share = [Fraction(0)] * len(claims)
    thirsty = {i for i, (demand, _) in enumerate(claims) if demand}
    left = Fraction(budget)
    while thirsty and left:
        weight = sum(Fraction(claims[i][1]) for i in thirsty)
        level = min(
            left / weight, *((claims[i][0] - share[i]) / Fraction(claims[i][1]) for i in thirsty)
        )
        for i in thirsty:
            share[i] += level * Fraction(claims[i][1])
        left -= level * weight
        thirsty = {i for i in thirsty if share[i] < claims[i][0]}
    return share


@tries(300)
@given(CLAIMS, BUDGETS)
def test_the_budget_is_used_up_and_nobody_gets_more_than_it_wants(
    db: Database, claims: list[Claim], budget: int
) -> None:
    given = shares(db, claims, budget)
    assert sum(given) == min(budget, sum(demand for demand, _ in claims))
    assert all(0 <= share <= demand for share, (demand, _) in zip(given, claims, strict=True))


@tries(300)
@given(CLAIMS, BUDGETS)
def test_everybody_gets_its_fair_share_to_within_one_job(
    db: Database, claims: list[Claim], budget: int
) -> None:
    for share, ideal in zip(shares(db, claims, budget), fair(claims, budget), strict=True):
        # A float may put an exactly whole share a hair below, and its job then goes to the first.
        assert floor(ideal - Fraction(1, 10**6)) <= share <= floor(ideal + Fraction(1, 10**6)) + 1


@tries(200)
@given(st.lists(DEMANDS, min_size=1, max_size=60), st.integers(1, 5_000))
def test_equals_are_dealt_one_each_in_turn(db: Database, demands: list[int], budget: int) -> None:
    dealt = [0] * len(demands)
    while budget and dealt != demands:
        for i, demand in enumerate(demands):
            if budget and dealt[i] < demand:
                dealt[i] += 1
                budget -= 1
    given = sum(dealt) if dealt == demands else sum(dealt) + budget
    assert shares(db, [(demand, 1.0) for demand in demands], given) == dealt


@tries(200)
@given(CLAIMS.flatmap(lambda claims: st.tuples(st.just(claims), st.permutations(claims))), BUDGETS)
def test_the_order_of_the_claims_moves_one_job_at_most(
    db: Database, orders: tuple[list[Claim], list[Claim]], budget: int
) -> None:
    one, other = (sorted(zip(claims, shares(db, claims, budget), strict=True)) for claims in orders)
    assert [claim for claim, _ in one] == [claim for claim, _ in other]
    assert all(abs(a - b) <= 1 for (_, a), (_, b) in zip(one, other, strict=True))


@tries(100)
@given(st.lists(st.tuples(DEMANDS, st.floats(1e-12, 1e12)), min_size=1, max_size=40), BUDGETS)
def test_no_weights_are_too_far_apart(db: Database, claims: list[Claim], budget: int) -> None:
    given = shares(db, claims, budget)
    assert sum(given) == min(budget, sum(demand for demand, _ in claims))


def test_small_weights_count_beside_a_huge_one(db: Database) -> None:
    claims = [(1, 1e12), (100, 3e-6), (100, 1e-6)]
    assert shares(db, claims, 41) == [1, 30, 10]


def test_no_budget_gives_everybody_what_it_wants(db: Database) -> None:
    assert shares(db, [(7, 1.0), (0, 2.0)], None) == [7, 0]


@tries(200)
@given(
    st.just(0.0) | st.floats(1, 1e12),
    st.integers(-(10**16), 10**16).map(lambda microseconds: microseconds / 10**6),
    st.floats(1e-300, 315_360_000) | st.floats(1, 100),
)
def test_decay_halves_each_half_life_and_survives_any_time(
    db: Database, decayed: float, elapsed: float, half_life: float
) -> None:
    now = db.one(
        "select dispatch_decay(%s::float8, %s::float8, %s::float8)", decayed, elapsed, half_life
    )
    exponent = -max(elapsed, 0) * log(2) / max(half_life, 1e-6)
    assert now == pytest.approx(decayed * exp(max(exponent, -600)), rel=1e-9)
    assert now <= decayed


@pytest.mark.parametrize("half_life", [1, 60, 86_400])
def test_decay_after_years_of_idling_is_next_to_nothing(db: Database, half_life: int) -> None:
    (idle,) = db.all(
        """select dispatch_decay(1e9, 3650 * 86400, %s::integer) as years,
          dispatch_decay(8, %s::integer, %s::integer) as once,
          dispatch_decay(8, null, 1) as never_served, dispatch_decay(8, 1, null) as no_half_life""",
        *[half_life] * 3,
    )
    assert idle["years"] < 1e-12 * 1e9
    assert (idle["once"], idle["never_served"], idle["no_half_life"]) == (4, 8, 8)
