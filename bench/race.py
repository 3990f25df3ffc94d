"""Timing: contenders take turns, a step each, so that what disturbs one disturbs the other."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator

__all__ = ["Lap", "percentile", "race"]


@dataclasses.dataclass
class Lap:
    """What one contender did."""

    done: int = 0
    """Jobs, or whatever its steps count."""
    steps: list[float] = dataclasses.field(default_factory=list)
    """Seconds of each step."""

    @property
    def seconds(self) -> float:
        """The time of all steps."""
        return sum(self.steps)

    @property
    def rate(self) -> float:
        """Jobs a second."""
        return self.done / self.seconds


def race(*contenders: Iterator[int]) -> list[Lap]:
    """Run contenders in turns until all have ended.

    A contender is a generator. It sets itself up until its first ``yield``, which is not timed;
    each further step yields how many jobs it did.
    """
    for contender in contenders:
        next(contender)
    laps = [Lap() for _ in contenders]
    running = list(zip(contenders, laps, strict=True))
    while running:
        for entry in list(running):
            contender, lap = entry
            began = time.perf_counter()
            done = next(contender, None)
            took = time.perf_counter() - began
            if done is None:
                running.remove(entry)
            else:
                lap.done += done
                lap.steps.append(took)
    return laps


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least this share of all values does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
