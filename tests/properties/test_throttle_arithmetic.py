"""The token bucket's arithmetic, look by look, against exact fractions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.properties.support import MICROSECOND, Database, moment, seconds, tries

LOOKS = """
create function pg_temp.claim(p_params jsonb, p_state jsonb, p_wants integer)
returns dispatch_claim[]
language sql
return array[
  row(1, null, '', '{}', p_params, p_state, 0, p_wants, null, null, null)::dispatch_claim
];

create function pg_temp.looks(
  p_params jsonb[], p_looks timestamptz[], p_wants integer[], p_when_due boolean
)
returns table (at timestamptz, admitted integer, tokens numeric, retry_at timestamptz)
language plpgsql
as $$
declare
  v_claim dispatch_claim;
  v_state jsonb := '{}';
begin
  for v_i in 1 .. cardinality(p_looks) loop
    loop
      at := p_looks[v_i];
      if p_when_due and retry_at < at then
        at := retry_at;
      end if;
      v_claim := (dispatch_gate_throttle(
        pg_temp.claim(p_params[v_i], v_state, p_wants[v_i]), 'g', at))[1];
      admitted := v_claim.allowed;
      v_state := dispatch_spend(v_claim.gate_state, array['g'], admitted);
      tokens := v_state #>> '{g,tokens}';
      -- As after a hand-off: the gate says when to look again.
      v_claim := (dispatch_gate_throttle(pg_temp.claim(p_params[v_i], v_state, 1), 'g', at))[1];
      retry_at := v_claim.retry_at;
      return next;
      exit when at = p_looks[v_i];
    end loop;
  end loop;
end;
$$
"""


@pytest.fixture(scope="module", autouse=True)
def looks(db: Database) -> None:
    db.conn.execute(LOOKS.encode())


@dataclass(frozen=True)
class Limit:
    """A throttle's parameters, exactly."""

    rate: Fraction
    per: Fraction
    burst: Fraction | None

    @property
    def capacity(self) -> Fraction:
        return max(self.rate if self.burst is None else self.burst, Fraction(1))

    @property
    def speed(self) -> Fraction:
        return self.rate / self.per

    def params(self) -> str:
        """Write them as JSON: a float with so few digits is written exactly."""
        burst = None if self.burst is None else float(self.burst)
        return json.dumps({"g.rate": float(self.rate), "g.per": float(self.per), "g.burst": burst})


@dataclass(frozen=True)
class Look:
    at: datetime
    admitted: int
    tokens: Fraction
    retry_at: datetime | None


class Bucket:
    """The model."""

    def __init__(self) -> None:
        self.tokens: Fraction | None = None
        self.at = Fraction(0)

    def look(self, limit: Limit, now: Fraction, wants: int) -> tuple[int, Fraction | None]:
        """Take up to ``wants`` tokens; return how many, and when the next one comes."""
        if self.tokens is None:
            self.tokens, self.at = limit.capacity, now
        elapsed = max(now - self.at, Fraction(0))
        self.tokens = min(self.tokens + elapsed * limit.speed, limit.capacity)
        self.at = max(self.at, now)
        admitted = max(min(floor(self.tokens), wants), 0)
        self.tokens -= admitted
        if self.tokens >= 1:
            return admitted, None
        wait = ceil((1 - self.tokens) / limit.speed / MICROSECOND) * MICROSECOND
        return admitted, self.at + wait


def run(
    db: Database,
    limits: Limit | Iterable[Limit],
    looks: Sequence[Fraction],
    wants: Iterable[int] | None = None,
    when_due: bool = False,
) -> list[Look]:
    """Look at a bucket at these seconds; ``when_due`` also whenever the next token comes."""
    limits = [limits] * len(looks) if isinstance(limits, Limit) else limits
    rows = db.all(
        "select * from pg_temp.looks(%s::jsonb[], %s, %s, %s)",
        [limit.params() for limit in limits],
        [moment(look) for look in looks],
        list(wants) if wants is not None else [10**6] * len(looks),
        when_due,
    )
    return [Look(**{**row, "tokens": Fraction(row["tokens"])}) for row in rows]


def hundredths(low: int, high: int) -> st.SearchStrategy[Fraction]:
    return st.integers(low, high).map(lambda n: Fraction(n, 100))


RATES = st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(5, 2), Fraction(150)]) | hundredths(
    1, 100_000
)
PERS = st.sampled_from([Fraction(n) for n in (1, 3, 7, 60, 3600)]) | hundredths(1, 1_000)
LIMITS = st.builds(Limit, rate=RATES, per=PERS, burst=st.none() | hundredths(100, 20_000))
GAPS = st.integers(0, 10**6).map(lambda n: n * MICROSECOND) | hundredths(0, 6_000)
BACK = hundredths(-6_000, 0)
FULL_DAY = Fraction(86_400)


def at(gaps: Sequence[Fraction]) -> list[Fraction]:
    """Turn gaps into seconds, never before the day before the start."""
    moments = [Fraction(0)]
    for gap in gaps:
        moments.append(max(moments[-1] + gap, -FULL_DAY))
    return moments


def high_water(looks: Iterable[Look]) -> list[Fraction]:
    """Return the highest that the clock had ever shown at each look."""
    shown: list[Fraction] = []
    for look in looks:
        shown.append(max([seconds(look.at), *shown[-1:]]))
    return shown


def assert_never_too_many(looks: Sequence[Look], speed: Fraction, capacity: Fraction) -> None:
    """Check all windows at once: ``most`` is the largest surplus of one that ends here."""
    most, before = Fraction(0), None
    for look, time in zip(looks, high_water(looks), strict=True):
        most -= speed * (time - (time if before is None else before))
        most = max(most, Fraction(0)) + look.admitted
        assert most <= capacity
        before = time


@tries(150)
@given(LIMITS, st.lists(st.tuples(GAPS | BACK, st.integers(0, 300)), max_size=25))
def test_each_look_agrees_with_exact_fractions(
    db: Database, limit: Limit, steps: list[tuple[Fraction, int]]
) -> None:
    wants = [300, *(want for _, want in steps)]
    bucket = Bucket()
    for look, want in zip(run(db, limit, at([gap for gap, _ in steps]), wants), wants, strict=True):
        admitted, retry_at = bucket.look(limit, seconds(look.at), want)
        assert bucket.tokens is not None
        assert look.admitted == admitted
        assert abs(look.tokens - bucket.tokens) < Fraction(1, 10**15)
        assert look.retry_at == (None if retry_at is None else moment(retry_at))


@tries(100)
@given(LIMITS, st.lists(GAPS | BACK, max_size=25))
def test_no_window_lets_more_than_burst_and_rate_pass(
    db: Database, limit: Limit, gaps: list[Fraction]
) -> None:
    assert_never_too_many(run(db, limit, at(gaps)), limit.speed, limit.capacity)


@tries(100)
@given(LIMITS, st.lists(GAPS, max_size=12))
@example(Limit(Fraction(1), Fraction(3), None), [Fraction(1)] * 12)
@example(Limit(Fraction(5, 2), Fraction(1), None), [Fraction(3)] * 4)
@example(Limit(Fraction(1, 2), Fraction(1), None), [Fraction(7)] * 4)
@example(Limit(Fraction(1, 10_000), Fraction(1), None), [FULL_DAY] * 2)
def test_a_backlog_looked_at_when_due_gets_every_token(
    db: Database, limit: Limit, gaps: list[Fraction]
) -> None:
    assume(sum(gaps) * limit.speed < 100)
    looks = run(db, limit, at(gaps), when_due=True)
    admitted = 0
    for look in looks:
        earned = floor(limit.capacity + limit.speed * seconds(look.at))
        admitted += look.admitted
        assert earned - 1 <= admitted <= earned
    assert_never_too_many(looks, limit.speed, limit.capacity)


@tries(100)
@given(LIMITS, GAPS)
def test_the_next_token_is_neither_early_nor_a_microsecond_late(
    db: Database, limit: Limit, gap: Fraction
) -> None:
    retry_at = run(db, limit, at([gap]))[-1].retry_at
    assert retry_at is not None
    due = seconds(retry_at)
    assert run(db, limit, [*at([gap]), due])[-1].admitted >= 1
    if due - MICROSECOND > gap:
        assert run(db, limit, [*at([gap]), due - MICROSECOND])[-1].admitted == 0


@tries(100)
@given(st.lists(st.tuples(GAPS | BACK, LIMITS), min_size=1, max_size=15), LIMITS)
def test_changing_limits_never_let_more_pass_than_the_widest_of_them(
    db: Database, steps: list[tuple[Fraction, Limit]], first: Limit
) -> None:
    limits = [first, *(limit for _, limit in steps)]
    looks = run(db, limits, at([gap for gap, _ in steps]))
    speed = max(limit.speed for limit in limits)
    assert_never_too_many(looks, speed, max(limit.capacity for limit in limits))
    for look, limit in zip(looks, limits, strict=True):
        assert look.admitted + look.tokens <= limit.capacity, "clamped to the new capacity"


@tries(50)
@given(
    st.floats(1e-9, 1e9),
    st.floats(1e-6, 3e8),
    st.floats(0, 1e9) | st.none(),
    st.lists(GAPS, max_size=5),
)
def test_any_numbers_give_an_answer_that_keeps_the_law(
    db: Database, rate: float, per: float, burst: float | None, gaps: list[Fraction]
) -> None:
    params = json.dumps({"g.rate": rate, "g.per": per, "g.burst": burst})
    steps = at(gaps)
    rows: list[dict[str, Any]] = db.all(
        "select * from pg_temp.looks(%s::jsonb[], %s, %s, false)",
        [params] * len(steps),
        [moment(step) for step in steps],
        [10**9] * len(steps),
    )
    speed = Fraction(repr(rate)) / Fraction(repr(per))
    capacity = max(Fraction(repr(rate if burst is None else burst)), Fraction(1))
    slack = Fraction(1, 10**9)
    looks = [Look(**{**row, "tokens": Fraction(row["tokens"])}) for row in rows]
    assert_never_too_many(looks, speed, capacity + slack)
    for look in looks:
        assert look.retry_at is None or look.retry_at >= look.at


@tries(100)
@given(LIMITS, st.integers(1, 1000), GAPS)
def test_a_debt_is_paid_before_anything_passes(
    db: Database, limit: Limit, debt: int, gap: Fraction
) -> None:
    tokens = db.one(
        "select dispatch_refill(%s, %s::numeric / 1000000, %s, %s, %s)",
        Decimal(-debt),
        Decimal(int(gap / MICROSECOND)),
        *(Decimal(repr(float(number))) for number in (limit.rate, limit.per, limit.capacity)),
    )
    assert abs(Fraction(tokens) - min(limit.capacity, gap * limit.speed - debt)) < MICROSECOND
