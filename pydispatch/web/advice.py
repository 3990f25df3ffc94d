"""What to change so that a job runs: sentences, from its explanation and its policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["advice"]

_PARAMETERS = {
    "throttle_empty": ("rate", "burst"),
    "rate_zero": ("rate",),
    "concurrency_full": ("max",),
    "max_zero": ("max",),
}
"""The gate's parameters that make the difference, by the reason why it holds a job."""

_SAID = {
    "paused": "Resume it, if whoever paused it agrees: the audit log may say who that was.",
    "limit_error": "Correct the limit function, then let the next tick ask it with Look anew.",
    "backoff": "If the limits were changed meanwhile, Look anew makes the next tick ask its gates.",
    "not_its_turn": "Run another driver (pydispatch run), or raise the policy's "
    "partition_batch_size: more partitions are due than a tick takes.",
    "not_folded": "Run another driver (pydispatch run): ticks do not keep up with what comes in.",
    "no_tick": "Start a driver (pydispatch run), or let cron call dispatch_run().",
    "budget_exhausted": "Raise the policy's tick_admission_budget, or tick more often: the budget "
    "of a tick goes to others first.",
    "queue_full": "Start workers for its queue, or raise the policy's max_queued: as many of its "
    "jobs as that allows wait for a worker.",
    "queueing_lock_held": "Nothing: it goes when the job that holds its queueing lock has started.",
    "scheduled": "Nothing: it was deferred for later. Force-admit and drain keep to the schedule.",
    "retry": "Nothing: it failed, and its retry strategy makes it wait.",
    "queued": "If it waits for long, start workers for this queue: those alive are busy, or serve "
    "others.",
    "no_worker": "Start a worker of procrastinate for this queue.",
    "worker_lost": "A sweep frees its slot; the driver sweeps twice a minute. Whether the job runs "
    'again says the policy\'s "stalled".',
}


def advice(
    explanation: Sequence[Mapping[str, Any]],
    gates: Sequence[Mapping[str, Any]],
    *,
    none_runs: bool = False,
) -> str:
    """What to do about the reason that the first row gives; empty when there is nothing to say.

    Args:
        explanation: The rows of ``dispatch_explain``.
        gates: Those of the policy, with defaults filled in.
        none_runs: No worker takes the jobs that hold the partition's slots.
    """
    if not explanation or not explanation[0]["reason"]:
        return ""
    reason = explanation[0]["reason"]
    if reason == "concurrency_full" and none_runs:
        return (
            "Start workers for the queue of the jobs in flight: no worker takes them, and each "
            "holds its slot until it has run. More slots would only fill with more of them."
        )
    if reason not in _PARAMETERS:
        return _SAID.get(reason, "")
    held = next(
        (
            row
            for row in explanation[1:]
            if row["item"] == "gate" and row["blocks"] and row["reason"] == reason
        ),
        None,
    )
    if held is None:
        return ""
    name = held["gate_name"]
    gate = next((each for each in gates if each["name"] == name), None)
    if gate is None:
        return ""
    if reason in ("rate_zero", "max_zero"):
        (parameter,) = _PARAMETERS[reason]
        source = gate.get(parameter)
        if isinstance(source, Mapping) and held["numbers"].get(parameter) is None:
            return _supply(name, parameter, source)
    more = (
        " For a few jobs now, force-admit them past the gates."
        if reason in ("throttle_empty", "concurrency_full")
        else ""
    )
    if gate["type"] == "adaptive_concurrency":
        return (
            "See whether the jobs in flight run: the cap adapts to how soon they start and whether "
            f"they fail. More workers raise it by themselves; so do, in gate {name}, a higher "
            f"target_lag_ms, and a higher min.{more}"
        )
    raised = [_raise(parameter, gate.get(parameter)) for parameter in _PARAMETERS[reason]]
    first = "See whether the jobs in flight run. " if reason == "concurrency_full" else ""
    return (
        f"{first}To let more of its jobs go, {' or '.join(filter(None, raised))} (gate {name}). "
        f"The next tick goes by it.{more}"
    )


def _supply(name: str, parameter: str, source: Mapping[str, Any]) -> str:
    """How a parameter gets a value that had none."""
    if "sql" in source:
        return (
            f"The function {source['sql']} returns null as {parameter} (gate {name}): let it "
            f"return a number for this partition, or give {parameter} a default in the policy."
        )
    return (
        f"The context of the newest staged job has no number at {source['ctx']}, which is "
        f"{parameter} (gate {name}): stage a job whose context has it, or give {parameter} a "
        "default in the policy."
    )


def _raise(parameter: str, source: Any) -> str:
    """How a parameter is raised, by where its value comes from."""
    if source is None:
        return ""
    if not isinstance(source, Mapping):
        return f"raise {parameter}, which the policy's definition sets to {source}"
    if "sql" in source:
        return f"change what the function {source['sql']} returns as {parameter}"
    default = source.get("default")
    otherwise = "" if default is None else f", else {default}"
    return (
        f"raise {parameter}, which is {source['ctx']} in the context of the newest staged job"
        f"{otherwise}"
    )
