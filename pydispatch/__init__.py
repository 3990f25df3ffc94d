"""Per-partition admission control for procrastinate, inside Postgres."""

from pydispatch.dispatch import ContextFunction, Dispatch
from pydispatch.driver import Driver
from pydispatch.errors import DispatchError
from pydispatch.handoff import TickResult
from pydispatch.policy import (
    AdaptiveConcurrency,
    Concurrency,
    Fairness,
    Gate,
    Policy,
    Throttle,
    ctx,
    sql_function,
)

__all__ = [
    "AdaptiveConcurrency",
    "Concurrency",
    "ContextFunction",
    "Dispatch",
    "DispatchError",
    "Driver",
    "Fairness",
    "Gate",
    "Policy",
    "Throttle",
    "TickResult",
    "ctx",
    "sql_function",
]
