"""A small run of the adaptive simulation: the cap follows what the workers can take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from xml.etree import ElementTree

import pytest

from bench.simulate_adaptive import INITIAL_MAX, WORKERS, Phase, Sample, picture, simulate
from tests.properties.support import Database

PHASES = {
    "steady": Phase("steady", 24),
    "slow": Phase("slow", 30, run_time=2),
    "failing": Phase("failing", 10, failing=0.6),
    "healed": Phase("healed", 24, staged=300),
    "idle": Phase("idle", 32, idle=True),
    "back": Phase("back", 8),
}


@pytest.fixture(scope="module")
def samples(db: Database) -> dict[str, list[Sample]]:
    """The samples of each phase, without its first quarter, in which the cap is on its way."""
    with db.run():
        samples = simulate(db.conn, list(PHASES.values()))
    by_phase, start = {}, 0.0
    for name, phase in PHASES.items():
        end = start + phase.seconds
        settled = start + phase.seconds / 4
        by_phase[name] = [sample for sample in samples if settled <= sample.second < end]
        start = end
    return by_phase


def cap(samples: Sequence[Sample]) -> float:
    return fmean(sample.cap for sample in samples)


@pytest.mark.parametrize("name", ["steady", "healed"])
def test_the_cap_is_about_what_the_workers_can_take(
    samples: dict[str, list[Sample]], name: str
) -> None:
    assert WORKERS / 2 < cap(samples[name]) < 1.5 * PHASES[name].fitting
    assert fmean(sample.lag for sample in samples[name]) < 2


def test_the_cap_shrinks_when_the_workers_slow_down(samples: dict[str, list[Sample]]) -> None:
    assert cap(samples["slow"]) < cap(samples["steady"])


def test_failures_bring_the_cap_down_to_the_floor(samples: dict[str, list[Sample]]) -> None:
    assert cap(samples["failing"]) < 4
    assert max(sample.in_flight for sample in samples["failing"]) <= INITIAL_MAX + 1


def test_a_burst_waits_in_the_policy_and_not_in_the_queue(
    samples: dict[str, list[Sample]],
) -> None:
    assert samples["healed"][0].waiting > 200
    assert max(sample.in_flight for sample in samples["healed"]) < 4 * PHASES["healed"].fitting


def test_after_an_idle_time_work_goes_on_at_once(samples: dict[str, list[Sample]]) -> None:
    assert samples["idle"][-1].in_flight == samples["idle"][-1].waiting == 0
    assert samples["back"][0].in_flight >= INITIAL_MAX


def test_the_picture_is_an_svg_with_a_curve_a_line(samples: dict[str, list[Sample]]) -> None:
    everything = [sample for some in samples.values() for sample in some]
    root = ElementTree.fromstring(picture(everything, list(PHASES.values())))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall("{*}polyline")) == 6
