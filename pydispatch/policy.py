"""Policies as Python values, and the JSON that the database understands.

Nothing is validated here beyond types: the database knows the rules, names the path of an
offending value, and fills in the defaults of whatever is left out.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

__all__ = [
    "AdaptiveConcurrency",
    "Concurrency",
    "Context",
    "Duration",
    "Fairness",
    "Gate",
    "Param",
    "Policy",
    "SqlFunction",
    "Throttle",
    "ctx",
    "sql_function",
]


class Unset(enum.Enum):
    """Tells "not given" from None where None means something."""

    UNSET = enum.auto()


UNSET: Final = Unset.UNSET


@dataclasses.dataclass(frozen=True)
class Context:
    """A number read from the partition's context when the gate is asked; see ``ctx``."""

    path: str
    default: float | None = None

    def definition(self) -> dict[str, Any]:
        """Return the JSON of this parameter."""
        return _without_none({"ctx": self.path, "default": self.default})


@dataclasses.dataclass(frozen=True)
class SqlFunction:
    """A number that a function in the database returns; see ``sql_function``."""

    name: str
    default: float | None = None

    def definition(self) -> dict[str, Any]:
        """Return the JSON of this parameter."""
        return _without_none({"sql": self.name, "default": self.default})


def ctx(path: str, default: float | None = None) -> Context:
    """Read a number from the partition's newest staged context.

    Args:
        path: Keys joined by dots, such as ``"plan.weight"``.
        default: The number where the context has none. Without it, a missing value denies.
    """
    return Context(path, default)


def sql_function(name: str, default: float | None = None) -> SqlFunction:
    """Ask a function ``(partition_key text, context jsonb) returns numeric`` at each tick.

    Args:
        name: The function, with its schema: ``"billing.rate_of"``.
        default: The number where the function returns null. Without it, null denies.
    """
    return SqlFunction(name, default)


Param: TypeAlias = float | Context | SqlFunction
"""A number of a gate: a literal, ``ctx(...)`` or ``sql_function(...)``."""

Duration: TypeAlias = Param | datetime.timedelta
"""Seconds, or a timedelta."""


@runtime_checkable
class Gate(Protocol):
    """What a policy can have in ``gates``: anything that gives a gate's JSON."""

    def definition(self) -> dict[str, Any]:
        """Return the JSON of this gate."""


@dataclasses.dataclass(frozen=True)
class Throttle:
    """A token bucket: ``rate`` jobs per ``per`` seconds, and up to ``burst`` at once.

    Args:
        rate: Jobs; fractions are kept. Null or <= 0 at tick time denies.
        per: Seconds, or a timedelta.
        burst: The bucket's capacity in jobs. Default: the rate, at least 1.
        name: Needed when a policy has two throttles. Default: ``throttle``.
    """

    rate: Param
    per: Duration
    burst: Param | None = None
    name: str | None = None

    def definition(self) -> dict[str, Any]:
        """Return the JSON of this gate."""
        return _gate("throttle", self)


@dataclasses.dataclass(frozen=True)
class Concurrency:
    """At most ``max`` jobs of a partition admitted and not finished.

    Args:
        max: Jobs. Null or <= 0 at tick time denies.
        full_backoff: Seconds (or a timedelta) after which a full partition is looked at again
            should no finish wake it before. Default: 1.
        name: Needed when a policy has two such gates. Default: ``concurrency``.
    """

    max: Param
    full_backoff: Duration | None = None
    name: str | None = None

    def definition(self) -> dict[str, Any]:
        """Return the JSON of this gate."""
        return _gate("concurrency", self)


@dataclasses.dataclass(frozen=True)
class AdaptiveConcurrency:
    """A concurrency cap that finds itself: up after a good job, down when jobs queue or fail.

    Args:
        initial_max: The cap to begin with, and again when a partition was idle.
        target_lag_ms: Milliseconds from admission to start that are still good.
        min: The cap never falls below. Default: 1.
        max: The cap never rises above. Default: no limit.
        ewma_alpha: Weight of the newest lag in the moving average, above 0, at most 1.
            Default: 0.5.
        failure_decrease_factor: The cap is multiplied by it when a job fails, between 0 and 1.
            Default: 0.5.
        overload_decrease_factor: The same when the average lag is over the target. Default: 0.95.
        full_backoff: Seconds (or a timedelta), as for ``Concurrency``. Default: 1.
        name: Needed when a policy has two such gates. Default: ``adaptive_concurrency``.
    """

    initial_max: Param
    target_lag_ms: Param
    min: Param | None = None
    max: Param | None = None
    ewma_alpha: Param | None = None
    failure_decrease_factor: Param | None = None
    overload_decrease_factor: Param | None = None
    full_backoff: Duration | None = None
    name: str | None = None

    def definition(self) -> dict[str, Any]:
        """Return the JSON of this gate."""
        return _gate("adaptive_concurrency", self)


@dataclasses.dataclass(frozen=True)
class Fairness:
    """How the partitions that one tick looks at share it.

    Args:
        half_life: Seconds (or a timedelta) in which what a partition was lately served counts
            half. None: partitions come in the order in which they fell due. Default: 60.
        weight: Shares of the tick's budget. Default: 1.
    """

    half_life: float | datetime.timedelta | Unset | None = UNSET
    weight: Param | None = None

    def definition(self) -> dict[str, Any]:
        """Return the JSON of ``fairness``."""
        definition: dict[str, Any] = {}
        if self.half_life is not UNSET:
            definition["half_life"] = _plain(self.half_life)
        if self.weight is not None:
            definition["weight"] = _plain(self.weight)
        return definition


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which jobs belong together, and what admits them.

    Args:
        name: 1 to 128 characters.
        partition_by: Dotted path in a job's context, or several. None: all jobs are one partition.
        shard_by: Dotted path or paths by which ticks can be divided. Default: one shard.
        queue: procrastinate's queue for jobs that are staged without one. Jobs of a task always
            have one, so this is for those staged in SQL.
        gates: All of them must let a job pass. No gates: the policy only balances partitions.
        fairness: See ``Fairness``.
        partition_batch_size: Most partitions that one tick looks at. Default: 50.
        admission_batch_size: Most jobs of a partition in one tick. Default: 100.
        tick_admission_budget: Most jobs in one tick. Default: no limit.
        max_queued: Most jobs of the policy that may wait in procrastinate's queue for a worker.
            None: no limit. Default: 1000.
        max_pending: Most jobs that may wait in one partition. Default: no limit.
        retry_strategy: Whether a job's retry waits in the policy again (``"restage"``, the
            default) or is procrastinate's alone (``"bypass"``).
        stalled: Whether a job whose worker is gone is left as it is (``"leave"``, the default) or
            retried (``"retry"``).
    """

    name: str
    partition_by: str | Sequence[str] | None = None
    shard_by: str | Sequence[str] | None = None
    queue: str | None = None
    gates: Sequence[Gate] = ()
    fairness: Fairness | None = None
    partition_batch_size: int | None = None
    admission_batch_size: int | None = None
    tick_admission_budget: int | None = None
    max_queued: int | Unset | None = UNSET
    max_pending: int | None = None
    retry_strategy: Literal["restage", "bypass"] | None = None
    stalled: Literal["leave", "retry"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"the name of a policy is a string, not {self.name!r}")
        object.__setattr__(self, "gates", tuple(self.gates))
        for gate in self.gates:
            if not isinstance(gate, Gate) or isinstance(gate, type):
                raise TypeError(f"policy {self.name!r}: {gate!r} is not a gate")

    def definition(self) -> dict[str, Any]:
        """Return the JSON for ``dispatch_define_policy``, without what was left out."""
        definition = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "name"
        }
        for key in ("partition_by", "shard_by"):
            if definition[key] is not None:
                definition[key] = _paths(definition[key])
        definition["gates"] = [gate.definition() for gate in self.gates] or None
        definition["fairness"] = self.fairness.definition() if self.fairness else None
        del definition["max_queued"]
        definition = _without_none(definition)
        if self.max_queued is not UNSET:
            definition["max_queued"] = self.max_queued
        return definition


def _gate(kind: str, gate: Any) -> dict[str, Any]:
    """Return a gate's JSON: its type, then its fields that were given."""
    parameters = {
        field.name: _plain(getattr(gate, field.name)) for field in dataclasses.fields(gate)
    }
    return {"type": kind, **_without_none(parameters)}


def _plain(value: Any) -> Any:
    """Return a parameter as JSON: seconds for a timedelta, an object for a reference."""
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, (Context, SqlFunction)):
        return value.definition()
    return value


def _paths(paths: str | Sequence[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
