"""A simulation under the definition that really ran admits when the ticks really admitted."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from tests.properties.model import Gate, Job, Model, Policy
from tests.properties.support import START, Database, tries

MICROSECOND = timedelta(microseconds=1)
END = START + timedelta(hours=2)
LAG = timedelta(seconds=0.3)
Admission = tuple[str, datetime, datetime]  # partition, staged, admitted
Steps = dict[tuple[str, timedelta], tuple[int, timedelta]]  # admitted, longest wait


@dataclass
class Load:
    """A burst or a stream of jobs; times in thousandths of a second."""

    key: str
    jobs: int
    every: int
    start: int
    context: dict[str, int] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        times = {"every": self.every / 1000, "start": self.start / 1000}
        return {"key": self.key, "jobs": self.jobs, "context": self.context, **times}


def arrivals(loads: Iterable[Load]) -> list[tuple[datetime, dict[str, Any]]]:
    """When each job comes in, with its context; those of one moment in the order of the load."""
    coming = [
        (START + timedelta(milliseconds=load.start + turn * load.every), place, load)
        for place, load in enumerate(loads)
        for turn in range(load.jobs)
    ]
    coming.sort(key=lambda job: job[:2])
    return [(at, {**load.context, "key": load.key}) for at, _, load in coming]


NUMBERS = st.integers(1, 4)
LIMITS = NUMBERS | st.just({"ctx": "limit", "default": 2})
THROTTLES = st.fixed_dictionaries(
    {
        "type": st.just("throttle"),
        "rate": LIMITS,
        "per": st.sampled_from([1, 3, 10]),
        "burst": st.none() | NUMBERS,
    }
)
CAPS = st.fixed_dictionaries(
    {
        "type": st.just("concurrency"),
        "max": LIMITS,
        "full_backoff": st.sampled_from([0.25, 1, 600]),
    }
)
ADAPTIVE = st.fixed_dictionaries(
    {
        "type": st.just("adaptive_concurrency"),
        "initial_max": NUMBERS,
        "target_lag_ms": st.sampled_from([100, 1000]),
        "max": st.just(4),
    }
)
GATES = st.tuples(st.none() | THROTTLES, st.none() | CAPS, st.none() | ADAPTIVE).map(
    lambda gates: [gate for gate in gates if gate is not None]
)
LOADS = st.lists(
    st.builds(
        Load,
        key=st.sampled_from("abc"),
        jobs=st.integers(1, 8),
        every=st.sampled_from([0, 250, 300, 1000]),
        start=st.integers(0, 20).map(lambda n: n * 250),
        context=st.just({}) | st.builds(lambda n: {"limit": n}, NUMBERS),
    ),
    min_size=1,
    max_size=4,
)
SERVICES = st.sampled_from([0.1, 0.75, 2.5]).map(lambda seconds: timedelta(seconds=seconds))


class History:
    """What really happens when jobs are staged, ticked for and finished."""

    def __init__(
        self, db: Database, loads: list[Load], service: timedelta, every: timedelta | None
    ) -> None:
        self.db = db
        self.coming = arrivals(loads)
        self.service = service
        self.every = every
        self.running: list[tuple[datetime, int]] = []

    def play(self) -> None:
        now: datetime | None = self.coming[0][0]
        while now is not None and now < END:
            now = self.on_grid(now)
            self.stage(now)
            self.db.set_clock(now)
            self.finish()
            self.tick()
            while self.every is None and (self.db.next_due() or END) <= now:
                self.tick()
            now = self.next()

    def on_grid(self, at: datetime) -> datetime:
        """The next moment at which a tick comes."""
        return at if self.every is None else START + -(-(at - START) // self.every) * self.every

    def next(self) -> datetime | None:
        moments = [at for at, *_ in self.coming[:1] + sorted(self.running)[:1]]
        due = self.db.next_due()
        if due is not None:
            moments.append(due)
        if not moments:
            return None
        return min(moments) if self.every is None else max(min(moments), self.db.now + MICROSECOND)

    def stage(self, now: datetime) -> None:
        """Stage each by itself, at its own moment."""
        while self.coming and self.coming[0][0] <= now:
            at, context = self.coming.pop(0)
            self.db.set_clock(at)
            self.db.stage("p", [{"task_name": "t", "context": context}])

    def finish(self) -> None:
        self.running.sort()
        while self.running and self.running[0][0] <= self.db.now:
            at, job_id = self.running.pop(0)
            self.db.one(
                """insert into procrastinate_events (job_id, type, at)
                values (%s, 'started', %s) returning job_id""",
                job_id,
                at - self.service + LAG,
            )
            self.db.one("select dispatch_finish(%s, true)", job_id)

    def tick(self) -> None:
        if self.db.tick("p")["jobs_admitted"]:
            known = {job_id for _, job_id in self.running}
            self.running += [
                (self.db.now + self.service, row["job_id"])
                for row in self.db.all("select job_id from dispatch_inflight_jobs")
                if row["job_id"] not in known
            ]

    def admissions(self) -> list[Admission]:
        rows = self.db.all("select partition_key, staged_at, admitted_at from dispatch_admissions")
        return [(row["partition_key"], row["staged_at"], row["admitted_at"]) for row in rows]


def by_step(admissions: list[Admission], step: timedelta) -> Steps:
    """The same as steps of a series."""
    steps: dict[tuple[str, timedelta], list[timedelta]] = defaultdict(list)
    for key, staged_at, admitted_at in admissions:
        place = (admitted_at - START) // step * step
        steps[key, place].append(admitted_at - staged_at)
    return {place: (len(waits), max(waits)) for place, waits in steps.items()}


def simulate(
    db: Database, definition: Any, load: Any, service: timedelta, every: timedelta | None
) -> tuple[Steps, timedelta]:
    """What a simulation admits in each of its steps, and how long a step is."""
    rows = db.all(
        """select * from dispatch_simulate('p', %s, %s, p_since => %s, p_service_time => %s,
          p_lag => %s, p_tick_every => %s, p_step => '0.25 s')""",
        None if definition is None else json.dumps(definition),
        None if load is None else json.dumps(load),
        START,
        service,
        LAG,
        every,
    )
    assert "stopped" not in rows[0]["note"]
    later = [row["elapsed"] for row in rows if row["elapsed"]]
    steps = {
        (row["partition_key"], row["elapsed"]): (row["admitted"], row["longest_wait"])
        for row in rows
        if row["admitted"]
    }
    return steps, min(later, default=timedelta(seconds=0.25))


@tries(20)
@given(
    GATES,
    st.fixed_dictionaries(
        {
            "tick_admission_budget": st.none() | NUMBERS,
            "fairness": st.fixed_dictionaries(
                {
                    "half_life": st.sampled_from([None, 1, 60]),
                    "weight": st.just({"ctx": "limit", "default": 1}),
                }
            ),
            # Of those that are due at one moment, more than a batch, any may be claimed first.
            "partition_batch_size": st.sampled_from([3, 50]),
            "admission_batch_size": st.sampled_from([1, 3, 100]),
        }
    ),
    LOADS,
    SERVICES,
    st.none() | st.sampled_from([0.5, 1]).map(lambda seconds: timedelta(seconds=seconds)),
)
def test_a_simulation_of_what_ran_gives_what_happened(
    db: Database,
    gates: list[dict[str, Any]],
    more: dict[str, Any],
    loads: list[Load],
    service: timedelta,
    every: timedelta | None,
) -> None:
    definition = {"partition_by": "key", "gates": gates, **more}
    with db.rehearsal():
        db.define("p", **definition)
        history = History(db, loads, service, every)
        history.play()
        happened = history.admissions()
        assert len(happened) == sum(load.jobs for load in loads)

        load = [load.entry() for load in loads]
        for what in (load, None):
            steps, step = simulate(db, None, what, service, every)
            assert steps == by_step(happened, step), "given" if what else "replayed"
        event(f"waits {max(at - since for _, since, at in happened) > timedelta(0)}")

        # What is simulated does not depend on what is defined or has happened.
        db.define("p", partition_by="key")
        assert simulate(db, definition, load, service, every)[0] == steps


class Ideal:
    """The model of a policy, in which every partition gets at once what its gates let pass."""

    def __init__(self, gates: list[dict[str, Any]], loads: list[Load], service: timedelta) -> None:
        self.model = Model(Policy([self.gate(gate) for gate in gates]), START)
        self.coming = arrivals(loads)
        self.service = service
        self.admissions: list[Admission] = []
        self.running: list[tuple[datetime, int]] = []

    @staticmethod
    def gate(gate: dict[str, Any]) -> Gate:
        params = {
            name: value["ctx"] if isinstance(value, dict) else value
            for name, value in gate.items()
            if name not in ("type", "full_backoff") and value is not None
        }
        return Gate(gate["type"], gate["type"], params)

    def play(self) -> list[Admission]:
        while moments := self.moments():
            self.model.now = min(moments)
            self.come()
            self.finish()
            self.admit()
        return self.admissions

    def moments(self) -> list[datetime]:
        moments = [at for at, _ in self.coming[:1]] + [at for at, _ in self.running]
        for key in {job.key for job in self.model.by_state("staged")}:
            at, _ = self.model.next_token(key)
            if at is not None:
                moments.append(at)
        return moments

    def come(self) -> None:
        while self.coming and self.coming[0][0] <= self.model.now:
            at, context = self.coming.pop(0)
            id_ = len(self.model.jobs) + 1
            self.model.add(Job(id_, context["key"], 0, at, None, context))

    def finish(self) -> None:
        for at, id_ in [job for job in self.running if job[0] <= self.model.now]:
            self.running.remove((at, id_))
            job = self.model.jobs[id_]
            job.starts = [at - self.service + LAG]
            self.model.free(job, True)
            job.state = "succeeded"
        self.model.fold()

    def admit(self) -> None:
        model = self.model
        for key in {job.key for job in model.by_state("staged")}:
            model.look(key)
            going = model.ready(key)[: model.allowed(key)]
            model.hand_off(going)
            for job in going:
                assert job.scheduled_at is not None
                self.admissions.append((key, job.scheduled_at, model.now))
                self.running.append((model.now + self.service, job.id))


@tries(20)
@given(GATES, LOADS, SERVICES)
def test_a_simulation_agrees_with_the_model(
    db: Database, gates: list[dict[str, Any]], loads: list[Load], service: timedelta
) -> None:
    # The model looks at each moment, the database when it is worth it, which is the same as long as
    # a bucket's rate is.
    for load in loads:
        load.context = next(each.context for each in loads if each.key == load.key)
    expected = Ideal(gates, loads, service).play()
    definition = {"partition_by": "key", "gates": gates}
    with db.rehearsal():
        steps, step = simulate(db, definition, [load.entry() for load in loads], service, None)
        assert steps == by_step(expected, step)
