"""What a row of the table is made of."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

__all__ = ["Measurement", "compare"]


@dataclasses.dataclass
class Measurement:
    """One bar, and what was measured against it.

    ``values`` has one number a repetition, in ``unit`` ("x": ours over the reference's).
    ``details`` has the numbers that it was made of, by what they are.
    """

    name: str
    what: str
    bar: float
    at_least: bool
    unit: str
    values: list[float]
    details: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    worst: bool = False
    """Whether the bar is for each of the repetitions; else it is for their median."""

    @property
    def measured(self) -> float:
        """The median of the repetitions, or the worst of them where the bar is for each."""
        if self.worst:
            return min(self.values) if self.at_least else max(self.values)
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        return self.measured >= self.bar if self.at_least else self.measured <= self.bar

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        return {**dataclasses.asdict(self), "measured": self.measured, "met": self.met}


def compare(
    name: str,
    what: str,
    *,
    bar: float,
    at_least: bool,
    ours: list[float],
    reference: list[float],
    unit: str,
    against: str = "bare",
) -> Measurement:
    """Return the ratio of ours to the reference, repetition by repetition."""
    return Measurement(
        name,
        what,
        bar,
        at_least,
        "x",
        [mine / other for mine, other in zip(ours, reference, strict=True)],
        {f"ours, {unit}": ours, f"{against}, {unit}": reference},
    )
