"""The driver's pauses: it never spins, and a notification ends what it can end."""

from __future__ import annotations

import pytest

from pydispatch import TickResult
from pydispatch.driver import GAP, LONGEST_PAUSE, LONGEST_RETRY, Pace


def result(seen: int = 0, admitted: int = 0, failures: int = 0) -> TickResult:
    return TickResult("p", seen, min(seen, admitted), 0, admitted, failures, {}, 1.0)


@pytest.mark.parametrize("done", [result(1, admitted=1), result(1, failures=1)])
def test_after_work_the_next_tick_may_follow_at_once(done):
    pace = Pace()
    pace.ticked(done, now=100.0)
    assert pace.not_before == 100.0


def test_after_denials_alone_the_next_tick_waits_a_moment():
    pace = Pace()
    for now in (100.0, 101.0, 102.0):
        pace.ticked(result(seen=50), now)
        assert pace.not_before == now + GAP


@pytest.mark.parametrize("nothing", [result(), None])
def test_what_others_hold_is_tried_again_after_growing_pauses(nothing):
    pace, pauses = Pace(), []
    for _ in range(12):
        pace.ticked(nothing, now=100.0)
        pauses.append(pace.not_before - 100.0)
    assert pauses[0] <= GAP
    assert all(pause >= GAP / 2 for pause in pauses)
    assert LONGEST_PAUSE / 2 <= pauses[-1] <= LONGEST_PAUSE
    pace.ticked(result(1, admitted=1), now=100.0)
    pace.ticked(nothing, now=100.0)
    assert pace.not_before - 100.0 <= GAP


def test_a_notification_ends_a_pause_for_what_others_hold():
    pace = Pace()
    for _ in range(12):
        pace.ticked(None, now=100.0)
    pace.notified()
    assert pace.not_before == 100.0 + GAP
    pace.ticked(None, now=100.0)
    assert pace.not_before - 100.0 <= GAP


def test_a_failing_policy_is_tried_again_after_growing_pauses_that_nothing_ends():
    pace = Pace()
    pauses = [pace.failed(now=100.0) for _ in range(15)]
    assert pauses[0] <= 0.1
    assert LONGEST_RETRY / 2 <= pauses[-1] <= LONGEST_RETRY
    not_before = pace.not_before
    pace.notified()
    assert pace.not_before == not_before
    pace.ticked(result(1, admitted=1), now=200.0)
    assert pace.failed(now=200.0) <= 0.1
