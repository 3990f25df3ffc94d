"""Policies in Python and the JSON they stand for."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from datetime import timedelta

import pytest

from pydispatch import (
    AdaptiveConcurrency,
    Concurrency,
    Fairness,
    Policy,
    Throttle,
    ctx,
    sql_function,
)


def test_what_was_not_given_is_absent():
    assert Policy("p").definition() == {}
    assert Policy("p", gates=[Concurrency(5)]).definition() == {
        "gates": [{"type": "concurrency", "max": 5}]
    }


def test_everything_that_was_given_is_there():
    policy = Policy(
        "endpoints",
        partition_by="endpoint_id",
        shard_by=["region"],
        queue="http",
        gates=[
            Throttle(
                name="per_minute", rate=ctx("rate_limit", default=60), per=timedelta(minutes=1)
            ),
            Throttle(name="per_hour", rate=600, per=3600, burst=1),
            Concurrency(max=sql_function("billing.cap", default=5), full_backoff=0.5),
            AdaptiveConcurrency(
                initial_max=3,
                target_lag_ms=1000,
                min=1,
                max=20,
                ewma_alpha=0.25,
                failure_decrease_factor=0.75,
                overload_decrease_factor=0.9,
                full_backoff=2,
            ),
        ],
        fairness=Fairness(half_life=timedelta(seconds=90), weight=ctx("plan.weight")),
        partition_batch_size=10,
        admission_batch_size=20,
        tick_admission_budget=30,
        max_pending=40,
        retry_strategy="bypass",
        stalled="retry",
    )
    assert policy.definition() == {
        "partition_by": ["endpoint_id"],
        "shard_by": ["region"],
        "queue": "http",
        "gates": [
            {
                "type": "throttle",
                "name": "per_minute",
                "rate": {"ctx": "rate_limit", "default": 60},
                "per": 60,
            },
            {"type": "throttle", "name": "per_hour", "rate": 600, "per": 3600, "burst": 1},
            {
                "type": "concurrency",
                "max": {"sql": "billing.cap", "default": 5},
                "full_backoff": 0.5,
            },
            {
                "type": "adaptive_concurrency",
                "initial_max": 3,
                "target_lag_ms": 1000,
                "min": 1,
                "max": 20,
                "ewma_alpha": 0.25,
                "failure_decrease_factor": 0.75,
                "overload_decrease_factor": 0.9,
                "full_backoff": 2,
            },
        ],
        "fairness": {"half_life": 90, "weight": {"ctx": "plan.weight"}},
        "partition_batch_size": 10,
        "admission_batch_size": 20,
        "tick_admission_budget": 30,
        "max_pending": 40,
        "retry_strategy": "bypass",
        "stalled": "retry",
    }


def test_zero_is_something_that_was_given():
    assert Throttle(rate=0, per=1, burst=0).definition() == {
        "type": "throttle",
        "rate": 0,
        "per": 1,
        "burst": 0,
    }
    assert ctx("a.b", default=0).definition() == {"ctx": "a.b", "default": 0}


def test_no_half_life_differs_from_the_default_one():
    assert Fairness(weight=2).definition() == {"weight": 2}
    assert Fairness(half_life=None).definition() == {"half_life": None}


def test_one_path_may_be_given_as_a_string():
    assert Policy("p", partition_by="account.id") == Policy("p", partition_by="account.id")
    assert Policy("p", partition_by="account.id").definition() == {"partition_by": ["account.id"]}
    assert Policy("p", partition_by=("a", "b")).definition() == {"partition_by": ["a", "b"]}


def test_the_users_own_gate_is_a_gate():
    @dataclass(frozen=True)
    class Business:
        opens: int

        def definition(self):
            return {"type": "business_hours", "opens": self.opens}

    assert Policy("p", gates=[Business(9)]).definition() == {
        "gates": [{"type": "business_hours", "opens": 9}]
    }


@pytest.mark.parametrize("gate", [5, None, {"type": "throttle"}, Throttle])
def test_what_is_no_gate_is_refused(gate):
    with pytest.raises(TypeError, match="is not a gate"):
        Policy("p", gates=[gate])


def test_a_policy_does_not_change():
    gates = [Concurrency(1)]
    policy = Policy("p", gates=gates)
    gates.append(Concurrency(2, name="other"))
    assert policy.gates == (Concurrency(1),)
    with pytest.raises(FrozenInstanceError):
        policy.name = "q"  # type: ignore[misc]
