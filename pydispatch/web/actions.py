"""What can be done: each action with its question, its call, and what it came to in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from pydispatch.web import queries
from pydispatch.web.database import Reader
from pydispatch.web.security import Target

__all__ = ["ACTIONS", "MOST_JOBS", "Action", "Outcome", "dead_left", "jobs", "remains"]

MOST_JOBS = 100
"""Jobs that one action is done to at most: two pages of dead ones."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an action came to.

    Attributes:
        level: As a flash has it: ``done``, ``nothing``, ``failed``; or ``refused``.
        text: The sentences for who did it.
        noted: For the audit log.
    """

    level: str
    text: str
    noted: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Action:
    """Something that can be done.

    Attributes:
        name: In addresses, for ``authorize`` and in the audit log.
        verb: On its button.
        of: What it may be about: ``policy``, ``partition``, ``job``, ``dead job``.
        what: What will happen, in a sentence or two.
        do: Does it to one target, with a limit.
        limit: What the limit is before it is changed, and its most; None where there is none.
        harsh: Can it not be taken back?
        past: What was done, where that can be to several at once.
    """

    name: str
    verb: str
    of: tuple[str, ...]
    what: str
    do: Callable[[Reader, Target, int], Awaitable[Outcome]]
    limit: tuple[int, int] | None = None
    harsh: bool = False
    past: str = ""


async def remains(reader: Reader, target: Target) -> tuple[str, dict[str, Any]]:
    """How many jobs wait and how many hold slots, in words and as numbers."""
    row = await reader.row(
        """
        select coalesce(sum(greatest(pending_count, 0)), 0)::bigint as pending,
          coalesce(sum(in_flight_count), 0)::bigint as in_flight
        from dispatch_partitions
        where policy_name = %(policy)s
          and (
            %(partition_key)s::text is null
            or id = dispatch_partition_id(%(policy)s, %(partition_key)s)
          )
        """,
        **vars(target),
    )
    assert row is not None
    pending = row["pending"]
    return f"{jobs(pending)} {_wait(pending)}, {row['in_flight']:,} in flight.", row


async def dead_left(reader: Reader, policies: set[str | None]) -> str:
    """How many dead jobs policies still have, in a sentence."""
    left = await reader.value(
        """
        select count(*) from (
          select from dispatch_dead_jobs where policy_name = any (%(policies)s) limit 10001
        ) as dead
        """,
        policies=sorted(policy for policy in policies if policy is not None),
    )
    if left > 10_000:
        return "More than 10,000 dead jobs are left."
    return f"{left:,} dead {'job is' if left == 1 else 'jobs are'} left."


def jobs(count: int) -> str:
    """So many jobs, in words."""
    return f"{count:,} job" if count == 1 else f"{count:,} jobs"


def _wait(count: int) -> str:
    return "waits" if count == 1 else "wait"


# -- the calls


async def _is_paused(reader: Reader, target: Target) -> bool:
    return bool(
        await reader.value(
            """
            select exists (select from dispatch_pauses
              where id = dispatch_partition_id(%(policy)s, %(partition_key)s::text))
            """,
            **vars(target),
        )
    )


async def _pause(reader: Reader, target: Target, limit: int) -> Outcome:
    before = await _is_paused(reader, target)
    await reader.row("select dispatch_pause(%(policy)s, %(partition_key)s)", **vars(target))
    text, numbers = await remains(reader, target)
    if before:
        return Outcome("nothing", f"It was paused already. {text}", {"was_paused": True, **numbers})
    return Outcome("done", f"Paused. {text} What is in flight runs on.", numbers)


async def _resume(reader: Reader, target: Target, limit: int) -> Outcome:
    before = await _is_paused(reader, target)
    await reader.row("select dispatch_resume(%(policy)s, %(partition_key)s)", **vars(target))
    text, numbers = await remains(reader, target)
    if not before:
        said = "It was not paused; the next tick asks its gates anew."
        return Outcome("nothing", f"{said} {text}", {"was_paused": False, **numbers})
    held = target.partition_key is not None and await _is_paused(
        reader, Target(policy=target.policy)
    )
    if held:
        text += " The whole policy is paused, so nothing is admitted yet."
    return Outcome("done", f"Resumed. {text}", {"policy_is_paused": held, **numbers})


async def _drain(reader: Reader, target: Target, limit: int) -> Outcome:
    row = await reader.row(
        "select * from dispatch_drain(%(policy)s, %(partition_key)s, %(limit)s::int)",
        limit=limit,
        **vars(target),
    )
    assert row is not None
    admitted, ready, later = row["admitted"], row["ready"] or 0, row["later"] or 0
    left = f"Left: {row['why']}." if ready or later else "Nothing is left."
    return Outcome(
        "done" if admitted else "nothing",
        f"Admitted {jobs(admitted)} past the gates. {left}",
        {"limit": limit, "admitted": admitted, "ready": ready, "later": later},
    )


async def _force_admit(reader: Reader, target: Target, limit: int) -> Outcome:
    admitted = await reader.value(
        "select dispatch_force_admit(%(policy)s, %(partition_key)s, %(limit)s::int)",
        limit=limit,
        **vars(target),
    )
    text, numbers = await remains(reader, target)
    noted = {"limit": limit, "admitted": admitted, **numbers}
    if not admitted:
        said = "Nothing was admitted: no job that is due waits here."
        return Outcome("nothing", f"{said} {text}", noted)
    return Outcome("done", f"Admitted {jobs(admitted)} past the gates. {text}", noted)


async def _cancel(reader: Reader, target: Target, limit: int) -> Outcome:
    if not await reader.value("select dispatch_cancel(%(job_id)s::bigint)", **vars(target)):
        found = await queries.jobs.find(reader, target.job_id or 0)
        state = found["state"] if found else "unknown"
        return Outcome(
            "failed",
            f"Nothing was cancelled: it is {state}, and only a staged job can be cancelled here.",
            {"error": f"the job is {state}"},
        )
    left = await reader.value(
        """
        select count(*) from (
          select from dispatch_staged_jobs
          where partition_id = dispatch_partition_id(%(policy)s, %(partition_key)s)
          limit 1001
        ) as waiting
        """,
        **vars(target),
    )
    some = "More than 1,000 jobs" if left > 1000 else jobs(left)
    text = f"It will not run. {some} of its partition still {_wait(left)}."
    return Outcome("done", text, {"waiting": left})


async def _requeue(reader: Reader, target: Target, limit: int) -> Outcome:
    await reader.row("select dispatch_requeue_dead(%(job_id)s::bigint)", **vars(target))
    return Outcome("done", "Requeued: it waits in its policy again.", {})


async def _discard(reader: Reader, target: Target, limit: int) -> Outcome:
    await reader.row("select dispatch_discard_dead(%(job_id)s::bigint)", **vars(target))
    return Outcome("done", "Discarded. It counts as cancelled now.", {})


ACTIONS = {
    action.name: action
    for action in (
        Action(
            "pause",
            "Pause",
            ("policy", "partition"),
            "No job is admitted until it is resumed. Jobs can still be deferred, and what is in "
            "flight runs on.",
            _pause,
        ),
        Action(
            "resume",
            "Resume",
            ("policy", "partition"),
            "The pause is lifted, and the next tick asks the gates. Of a partition that is not "
            "paused, the limits are looked up anew.",
            _resume,
        ),
        Action(
            "drain",
            "Drain",
            ("policy", "partition"),
            "Everything that is due is admitted at once, past gates and pauses, up to the limit. "
            "Caps and rates are exceeded; the gates make up for it later.",
            _drain,
            limit=(1000, 10_000),
            harsh=True,
        ),
        Action(
            "force-admit",
            "Force-admit",
            ("partition",),
            "The next jobs that are due are admitted at once, past gates and pauses. They count in "
            "flight and are paid for in tokens.",
            _force_admit,
            limit=(1, 1000),
            harsh=True,
        ),
        Action(
            "cancel",
            "Cancel job",
            ("job",),
            "A job that is still staged is removed and will never run. One that was admitted "
            "meanwhile is left as it is.",
            _cancel,
            harsh=True,
            past="Cancelled",
        ),
        Action(
            "requeue",
            "Requeue",
            ("dead job",),
            "The dead jobs wait in their policies again, each under its id. What made them fail "
            "will do so again unless it was mended.",
            _requeue,
            past="Requeued",
        ),
        Action(
            "discard",
            "Discard",
            ("dead job",),
            "The dead jobs are removed for good, with their arguments. They count as cancelled.",
            _discard,
            harsh=True,
            past="Discarded",
        ),
    )
}
"""What can be done, by name."""
