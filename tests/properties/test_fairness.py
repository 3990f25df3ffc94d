"""Random load on the stopped clock, for hours (a week in a long run): who got how much?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from math import floor
from random import Random
from typing import Any

import pytest

from tests.properties.support import Database, seconds

HOURS = 168 if os.environ.get("PROPERTIES") == "long" else 3


def jain(shares: Iterable[float]) -> float:
    """Jain's index: 1 when all get the same, 1/n when one gets everything."""
    shares = list(shares)
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def finish(db: Database, jobs: int) -> None:
    """Let the workers end so many jobs, the oldest first."""
    db.all(
        """select procrastinate_finish_job_v1(id, 'succeeded', true) from (
          select id from procrastinate_jobs where status = 'todo' order by id limit %s) as old""",
        jobs,
    )


def counts(db: Database, column: str) -> Counter[str]:
    rows = db.all(f"select partition_key, {column} as number from dispatch_partitions")
    return Counter({row["partition_key"]: row["number"] for row in rows})


def job(tenant: str, **context: float) -> dict[str, Any]:
    return {"task_name": "t", "context": {"tenant": tenant, **context}}


def test_a_budget_is_shared_fairly_under_bursts(db: Database) -> None:
    """Ten equal tenants who want too much in bursts, one that counts double, five modest ones."""
    random = Random(42)
    busy = [f"busy {n}" for n in range(10)]
    modest = [f"modest {n}" for n in range(5)]
    cap, budget = 25, 34
    with db.run():
        db.define(
            "p",
            partition_by="tenant",
            gates=[{"type": "concurrency", "max": cap}],
            fairness={"half_life": 600, "weight": {"ctx": "weight", "default": 1}},
            tick_admission_budget=budget,
        )
        db.stage("p", [job(tenant) for tenant in busy] * 60 + [job("double", weight=2)] * 200)
        db.tick("p")
        first = counts(db, "total_admitted")
        waited = 0
        while seconds(db.now) < HOURS * 3600:
            db.advance(Fraction(random.randint(10_000, 90_000), 1000))
            new = [job("double", weight=2)] * 10 + [
                job(tenant) for tenant in busy for _ in range(random.choice([0, 0, 0, 20]))
            ]
            calm = [job(tenant) for tenant in modest if random.random() < 0.2]
            db.stage("p", new + calm)
            finish(db, random.randint(20, 60))
            result = db.tick("p")
            assert result["jobs_admitted"] == budget, "the budget is used up while jobs wait"
            assert max(counts(db, "in_flight_count").values()) <= cap
            pending = counts(db, "pending_count")
            waited += sum(pending[tenant] for tenant in modest)
            assert min(pending[tenant] for tenant in [*busy, "double"]) >= 0
        got = counts(db, "total_admitted")
        shares = [got[tenant] - first[tenant] for tenant in busy]
        assert waited == 0, "who wants less than its share never waits for the next tick"
        assert jain(shares) > 0.99
        assert abs((got["double"] - first["double"]) / (sum(shares) / 10) - 2) < 0.05


def test_equals_get_the_same_when_a_tick_looks_at_a_few_only(db: Database) -> None:
    random = Random(7)
    tenants = [f"tenant {n}" for n in range(20)]
    with db.run():
        db.define(
            "p",
            partition_by="tenant",
            partition_batch_size=6,
            admission_batch_size=5,
            tick_admission_budget=10,
            max_queued=None,
        )
        db.stage("p", [job(tenant) for tenant in tenants] * 40)
        while seconds(db.now) < HOURS * 600:
            db.advance(Fraction(random.randint(1_000, 20_000), 1000))
            loud = random.choice(tenants)
            backlog = counts(db, "pending_count")
            poor = [tenant for tenant in tenants if backlog[tenant] < 10]
            db.stage("p", [job(loud)] * 20 + [job(tenant) for tenant in poor] * 10)
            assert db.tick("p")["jobs_admitted"] == 10
        assert jain(counts(db, "total_admitted").values()) > 0.999


def test_rates_are_exact_in_the_long_run(db: Database) -> None:
    """A driver that comes when it should, up to 20 s late, and finds a backlog."""
    random = Random(1)
    limits = {
        "150 an hour": (150, 3600, 150),
        "2.5 a minute": (2.5, 60, 2.5),
        "1 in 10 min": (1, 600, 2),
        "1 in 7 min": (1, 420, 2),
        "70 an hour, at most 3 at once": (70, 3600, 3),
    }
    with db.run():
        db.define(
            "p",
            partition_by="tenant",
            admission_batch_size=1000,
            gates=[
                {
                    "type": "throttle",
                    "rate": {"ctx": "rate"},
                    "per": {"ctx": "per"},
                    "burst": {"ctx": "burst"},
                }
            ],
        )
        speeds = {
            tenant: Fraction(rate) / Fraction(per) for tenant, (rate, per, _) in limits.items()
        }
        while True:
            pending = counts(db, "pending_count")
            db.stage(
                "p",
                [
                    job(tenant, rate=rate, per=per, burst=burst)
                    for tenant, (rate, per, burst) in limits.items()
                    for _ in range(0 if pending[tenant] > 100 else 200)
                ]
                or [job("late", rate=1, per=1, burst=1)],
            )
            db.tick("p")
            finish(db, 1000)
            passed, admitted = seconds(db.now), counts(db, "total_admitted")
            for tenant, (_, _, burst) in limits.items():
                earned = floor(Fraction(burst) + speeds[tenant] * passed)
                late = 1 + floor(20 * speeds[tenant])
                assert earned - 1 - late <= admitted[tenant] <= earned
            if passed >= HOURS * 3600:
                break
            due = db.next_due()
            assert due is not None
            db.set_clock(max(due, db.now))
            db.advance(Fraction(random.randint(0, 20_000), 1000))
        # At the end, a look without delay: all that was earned is there.
        for tenant, (_, _, burst) in limits.items():
            assert admitted[tenant] == floor(Fraction(burst) + speeds[tenant] * passed)


@pytest.mark.parametrize("half_life", [None, 1, 60])
def test_a_budget_of_less_than_one_each_goes_round(db: Database, half_life: int | None) -> None:
    with db.rehearsal():
        tenants = [f"tenant {n}" for n in range(7)]
        db.define(
            "p", partition_by="tenant", fairness={"half_life": half_life}, tick_admission_budget=2
        )
        db.stage("p", [job(tenant) for tenant in tenants] * 10)
        for _ in range(7 * 3):
            db.advance(Fraction(1))
            db.tick("p")
        assert set(counts(db, "total_admitted").values()) <= {5, 6, 7}


def test_weights_hold_when_the_budget_is_less_than_one_each(db: Database) -> None:
    with db.rehearsal():
        weights = {"a": 1, "b": 2, "c": 3, "d": 6}
        db.define(
            "p",
            partition_by="tenant",
            fairness={"half_life": 30, "weight": {"ctx": "weight"}},
            tick_admission_budget=2,
        )
        db.stage("p", [job(tenant, weight=n) for tenant, n in weights.items() for _ in range(150)])
        for _ in range(120):
            db.advance(Fraction(1))
            db.tick("p")
        got = counts(db, "total_admitted")
        for tenant, weight in weights.items():
            assert abs(got[tenant] - 20 * weight) <= 6
