"""What the dashboard tells to change, by the reason why a job does not run."""

from __future__ import annotations

from typing import Any

import pytest

from pydispatch.web.advice import advice


def explained(reason: str | None, gate: str | None = None) -> list[dict[str, Any]]:
    rows = [{"item": "job", "gate_name": None, "blocks": True, "reason": reason}]
    if gate is not None:
        rows.append({"item": "gate", "gate_name": "other", "blocks": False, "reason": None})
        rows.append({"item": "gate", "gate_name": gate, "blocks": True, "reason": reason})
    return rows


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (5, "raise rate, which the policy's definition sets to 5"),
        ({"ctx": "plan.rate", "default": 3}, "which is plan.rate in the context of the newest"),
        ({"ctx": "plan.rate", "default": 3}, "staged job, else 3"),
        ({"sql": "limits", "default": None}, "change what the function limits returns as rate"),
    ],
)
def test_a_limit_is_changed_where_it_comes_from(source, said):
    gates = [
        {"name": "other", "type": "throttle", "rate": 1},
        {"name": "slow", "type": "throttle", "rate": source, "per": 60, "burst": None},
    ]
    text = advice(explained("throttle_empty", "slow"), gates)
    assert said in text
    assert "(gate slow)" in text
    assert "burst" not in text
    assert "force-admit" in text


def test_a_full_cap_may_be_full_of_jobs_that_do_not_run():
    gates = [{"name": "c", "type": "concurrency", "max": 2}]
    text = advice(explained("concurrency_full", "c"), gates)
    assert text.startswith("See whether the jobs in flight run. To let more of its jobs go, raise")


@pytest.mark.parametrize(
    ("source", "rate", "said"),
    [
        ({"ctx": "plan.rate", "default": None}, None, "has no number at plan.rate, which is rate"),
        ({"sql": "limits", "default": None}, None, "The function limits returns null as rate"),
        ({"ctx": "plan.rate", "default": None}, 0, "raise rate, which is plan.rate"),
        (0, 0, "raise rate, which the policy's definition sets to 0"),
    ],
)
def test_a_limit_that_is_missing_is_not_raised(source, rate, said):
    rows = explained("rate_zero", "t")
    rows[-1]["numbers"] = {"rate": rate}
    assert said in advice(rows, [{"name": "t", "type": "throttle", "rate": source}])


@pytest.mark.parametrize("kind", ["concurrency", "adaptive_concurrency"])
def test_no_limit_is_raised_for_slots_that_wait_for_a_worker(kind):
    gates = [{"name": "c", "type": kind, "max": 2}]
    text = advice(explained("concurrency_full", "c"), gates, none_runs=True)
    assert text.startswith("Start workers")
    assert "raise" not in text
    assert "raise rate" in advice(
        explained("throttle_empty", "t"),
        [{"name": "t", "type": "throttle", "rate": 2}],
        none_runs=True,
    )


def test_a_cap_that_adapts_is_not_raised_by_hand():
    gates = [{"name": "a", "type": "adaptive_concurrency", "initial_max": 3}]
    assert "More workers raise it" in advice(explained("concurrency_full", "a"), gates)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("paused", "Resume"),
        ("no_tick", "pydispatch run"),
        ("no_worker", "worker"),
        ("queued", "workers"),
        ("limit_error", "Look anew"),
        ("not_its_turn", "partition_batch_size"),
        ("behind_others", ""),
        ("something_new", ""),
        (None, ""),
    ],
)
def test_other_reasons_have_their_own(reason, said):
    text = advice(explained(reason), [])
    assert said in text
    assert bool(text) == bool(said)


def test_a_gate_that_is_gone_meanwhile_is_not_spoken_of():
    assert advice(explained("throttle_empty", "gone"), []) == ""
    assert advice([], []) == ""
