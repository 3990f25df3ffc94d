"""A batch that procrastinate refuses is split until the bad job is alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from procrastinate.jobs import Job

from pydispatch.handoff import Verdict, _hand_off

HELD, BAD = Verdict(), Verdict(error="bad")


def hand_off(fates: dict[int, Verdict | None]) -> tuple[dict[int, Verdict], list[list[int]]]:
    """Hand off jobs of which some have another fate than to be queued.

    Returns what became of each, and the batches that were tried, in order.
    """
    batch = [(n, Job(id=n, queue="q", lock=None, queueing_lock=None, task_name="t")) for n in fates]
    verdicts: dict[int, Verdict] = {}
    tries: list[list[int]] = []
    steps = _hand_off(batch, verdicts)
    outcome: Any = None
    while True:
        try:
            step = steps.send(outcome)
        except StopIteration:
            return verdicts, tries
        tries.append([job.id or 0 for job in step.jobs])
        refusals = [fate for n in tries[-1] if (fate := fates[n]) is not None]
        outcome = (
            refusals[0] if refusals else [job.evolve(id=1000 + (job.id or 0)) for job in step.jobs]
        )


def test_a_good_batch_is_one_try():
    verdicts, tries = hand_off(dict.fromkeys(range(100)))
    assert verdicts == {n: Verdict(job_id=1000 + n) for n in range(100)}
    assert len(tries) == 1


@pytest.mark.parametrize("place", [0, 1, 49, 50, 98, 99])
@pytest.mark.parametrize("fate", [HELD, BAD])
def test_one_bad_job_is_found_in_few_tries(place, fate):
    fates = dict.fromkeys(range(100)) | {place: fate}
    verdicts, tries = hand_off(fates)
    assert verdicts.pop(place) == fate
    assert verdicts == {n: Verdict(job_id=1000 + n) for n in range(100) if n != place}
    assert len(tries) <= 1 + 2 * 7
    assert sum(tried == [place] for tried in tries) == 1


def test_jobs_are_handed_off_in_their_order():
    chance = random.Random(1)
    for _ in range(200):
        fates = {n: chance.choice([None, None, None, HELD, BAD]) for n in range(30)}
        verdicts, tries = hand_off(fates)
        assert {n: v._replace(job_id=None) for n, v in verdicts.items()} == {
            n: fate or Verdict() for n, fate in fates.items()
        }
        queued = [n for tried in tries if all(fates[n] is None for n in tried) for n in tried]
        assert queued == [n for n, fate in fates.items() if fate is None]
