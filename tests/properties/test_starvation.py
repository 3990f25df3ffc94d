"""No partition starves: whatever is due is looked at within ceil(due / batch) ticks."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from math import ceil
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.properties.support import MICROSECOND, Database, tries

POPULATIONS = st.fixed_dictionaries(
    {
        "loud": st.integers(0, 12),
        "quiet": st.integers(1, 25),
        "scheduled": st.integers(0, 8),
        "full": st.integers(0, 8),
        "throttled": st.integers(0, 8),
    }
)
GATES = [
    {"type": "concurrency", "max": {"ctx": "max", "default": 10**6}, "full_backoff": 2},
    {"type": "throttle", "rate": {"ctx": "rate", "default": 10**6}, "per": 60},
]


def jobs(population: dict[str, int]) -> list[dict[str, Any]]:
    """Stage so many partitions of each kind; the loud ones outnumber everybody."""
    kinds: dict[str, dict[str, Any]] = {
        "loud": {"count": 30},
        "quiet": {"count": 1},
        "scheduled": {"count": 5, "at": "2026-01-01T01:00:00+00:00"},
        "full": {"count": 5, "max": 0},
        "throttled": {"count": 5, "rate": 1},
    }
    return [
        {
            "task_name": "t",
            "context": {"key": f"{kind} {n}"} | {k: how[k] for k in ("max", "rate") if k in how},
            "scheduled_at": how.get("at"),
        }
        for kind, how in kinds.items()
        for n in range(population[kind])
        for _ in range(how["count"])
    ]


def looked_at(db: Database) -> dict[str, tuple[datetime | None, datetime | None]]:
    rows = db.all("select partition_key, due_at, last_checked_at from dispatch_partitions")
    return {row["partition_key"]: (row["due_at"], row["last_checked_at"]) for row in rows}


@tries(25)
@given(
    POPULATIONS,
    st.integers(1, 12),
    st.sampled_from([1, 3, 100]),
    st.none() | st.integers(1, 20),
    st.lists(st.sampled_from(["loud 0", "loud 1", "late", "later"]), max_size=10),
)
def test_every_due_partition_is_looked_at_within_its_turn(
    db: Database,
    population: dict[str, int],
    batch: int,
    most: int,
    budget: int | None,
    newcomers: list[str],
) -> None:
    with db.rehearsal():
        db.define(
            "p",
            partition_by="key",
            gates=GATES,
            partition_batch_size=batch,
            admission_batch_size=most,
            tick_admission_budget=budget,
        )
        db.stage("p", jobs(population))
        db.one("select dispatch_fold('p', dispatch_now())")
        waits: Counter[str] = Counter()
        turn = 0
        for step in range(40):
            # While they wait, others come and want their turn, too.
            if step < len(newcomers):
                newcomer = {"task_name": "t", "context": {"key": newcomers[step]}}
                db.stage("p", [newcomer] * 20)
                db.one("select dispatch_fold('p', dispatch_now())")
            db.advance(MICROSECOND)
            before = looked_at(db)
            due = {key for key, (at, _) in before.items() if at is not None and at <= db.now}
            turn = max(ceil(len(due) / batch), turn)
            seen = db.tick("p")["partitions_seen"]
            assert seen == min(batch, len(due))
            after = looked_at(db)
            for key in due:
                waits[key] = 0 if after[key][1] == db.now else waits[key] + 1
                assert waits[key] < turn, f"{key} was passed over {waits[key]} times"
