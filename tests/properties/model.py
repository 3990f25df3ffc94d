"""What pydispatch should do, in plain Python: one policy, its partitions and its jobs.

The model knows nothing of inboxes, due times and claims: at a tick every partition gets what its
gates let pass. That the database looks at the right time is what the tests check against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from math import ceil, floor
from typing import Any

Context = dict[str, Any]

ALWAYS = datetime.min.replace(tzinfo=timezone.utc)
MICROSECOND = timedelta(microseconds=1)
QUEUEING_LOCK_BACKOFF = timedelta(seconds=1)


@dataclass
class Gate:
    """One gate of a policy; a parameter is a number, or the name of a context value."""

    type: str
    name: str
    params: dict[str, float | str]

    def definition(self) -> dict[str, Any]:
        return {"type": self.type, "name": self.name} | {
            name: {"ctx": value, "default": 2} if isinstance(value, str) else value
            for name, value in self.params.items()
        }

    def get(self, name: str, context: Context) -> float | None:
        value = self.params.get(name)
        if not isinstance(value, str):
            return value
        found = context.get(value)
        return found if isinstance(found, int | float) else 2


@dataclass
class Policy:
    """A policy's definition."""

    gates: list[Gate]
    retry_strategy: str = "restage"
    partition_batch_size: int = 50
    admission_batch_size: int = 100
    tick_admission_budget: int | None = None

    def definition(self) -> dict[str, Any]:
        return vars(self) | {
            "partition_by": "key",
            "gates": [gate.definition() for gate in self.gates],
        }

    def has_adaptive(self) -> bool:
        return any(gate.type == "adaptive_concurrency" for gate in self.gates)


@dataclass
class Job:
    """A job, wherever it is."""

    id: int
    key: str
    priority: int
    scheduled_at: datetime | None
    queueing_lock: str | None
    context: Context
    eligible_at: datetime = ALWAYS
    state: str = "staged"  # then queued, running; or dead; or an end, in procrastinate's words
    handed: bool = False  # does procrastinate have a row of it?
    attempts: int = 0
    abort_requested: bool = False
    slot_since: datetime | None = None
    observed: bool = True  # does a gate learn from it? as of its admission
    starts: list[datetime] = field(default_factory=list)

    def order(self) -> tuple[int, datetime, int]:
        return (-self.priority, self.eligible_at, self.id)


@dataclass
class Bucket:
    """A throttle's state."""

    tokens: Fraction
    at: datetime


@dataclass
class Stats:
    """What an adaptive gate has learned."""

    current_max: int
    ewma_lag_ms: float = 0.0


@dataclass
class Partition:
    """A partition."""

    key: str
    context: Context = field(default_factory=dict)
    newest_id: int = 0
    paused: bool = False
    buckets: dict[str, Bucket] = field(default_factory=dict)
    stats: dict[str, Stats] = field(default_factory=dict)
    seen: list[tuple[bool, float]] = field(default_factory=list)


class Model:
    """All of it. ``now`` is the clock, ``latest`` the highest that it ever showed."""

    def __init__(self, policy: Policy, now: datetime) -> None:
        self.policy = policy
        self.now = self.latest = now
        self.paused = False
        self.jobs: dict[int, Job] = {}
        self.partitions: dict[str, Partition] = {}

    def by_state(self, *states: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.state in states]

    def partition(self, key: str) -> Partition:
        return self.partitions.setdefault(key, Partition(key))

    def in_flight(self, key: str) -> int:
        return sum(job.key == key and job.slot_since is not None for job in self.jobs.values())

    def staged(self, key: str) -> list[Job]:
        """The waiting jobs of a partition in the order in which they go."""
        return sorted((j for j in self.by_state("staged") if j.key == key), key=Job.order)

    def ready(self, key: str) -> list[Job]:
        return [job for job in self.staged(key) if job.eligible_at <= self.now]

    def lock_is_queued(self, queueing_lock: str | None) -> bool:
        queued = self.by_state("queued")
        return queueing_lock is not None and queueing_lock in {job.queueing_lock for job in queued}

    def lock_is_held(self, queueing_lock: str | None) -> bool:
        """Would staging a job with this lock be refused?"""
        waiting = {job.queueing_lock for job in self.by_state("staged") if not job.handed}
        return self.lock_is_queued(queueing_lock) or (
            queueing_lock is not None and queueing_lock in waiting
        )

    def add(self, job: Job) -> None:
        job.eligible_at = job.scheduled_at or ALWAYS
        self.jobs[job.id] = job
        partition = self.partition(job.key)
        if job.id > partition.newest_id:
            partition.newest_id, partition.context = job.id, job.context

    # What a tick does.

    def fold(self) -> None:
        """Take in what was observed."""
        for partition in self.partitions.values():
            for gate in self.policy.gates:
                if gate.type == "adaptive_concurrency":
                    self._adapt(partition, gate)
            partition.seen.clear()

    def _adapt(self, partition: Partition, gate: Gate) -> None:
        def knob(name: str) -> float:
            value = gate.get(name, partition.context)
            assert value is not None
            return value

        for succeeded, lag_ms in partition.seen:
            initial = Stats(round(knob("initial_max")))
            stats = partition.stats.setdefault(gate.name, initial)
            stats.ewma_lag_ms = stats.ewma_lag_ms * 0.5 + 0.5 * lag_ms
            if not succeeded:
                cap = floor(stats.current_max * 0.5)
            elif stats.ewma_lag_ms > knob("target_lag_ms"):
                cap = floor(stats.current_max * 0.95)
            else:
                cap = stats.current_max + 1
            stats.current_max = max(min(cap, round(knob("max"))), 1)

    def bucket(self, gate: Gate, partition: Partition) -> Bucket:
        """A throttle's bucket as it would be now."""
        speed, capacity = self.throttle(gate, partition.context)
        bucket = partition.buckets.get(gate.name, Bucket(capacity, self.now))
        if speed <= 0:
            return bucket
        elapsed = Fraction(max(self.now - bucket.at, timedelta(0)) // MICROSECOND, 10**6)
        tokens = min(bucket.tokens + elapsed * speed, capacity)
        return Bucket(tokens, max(bucket.at, self.now))

    def look(self, key: str) -> None:
        """Bring the buckets up to now, as a tick does that asks the gates."""
        partition = self.partition(key)
        for gate in self.policy.gates:
            if gate.type == "throttle" and self.throttle(gate, partition.context)[0] > 0:
                partition.buckets[gate.name] = self.bucket(gate, partition)

    def passing(self, gate: Gate, partition: Partition) -> int:
        """How many jobs a gate would let pass now."""
        in_flight = self.in_flight(partition.key)
        if gate.type == "concurrency":
            return floor(gate.get("max", partition.context) or 0) - in_flight
        if gate.type == "adaptive_concurrency":
            initial = round(gate.get("initial_max", partition.context) or 0)
            stats = partition.stats.get(gate.name, Stats(initial))
            cap = min(stats.current_max, round(gate.get("max", partition.context) or 0))
            return max(cap, initial) if in_flight == 0 else cap - in_flight
        speed, _ = self.throttle(gate, partition.context)
        return floor(self.bucket(gate, partition).tokens) if speed > 0 else 0

    def throttle(self, gate: Gate, context: Context) -> tuple[Fraction, Fraction]:
        """Return tokens a second, and the capacity."""
        rate, per = gate.get("rate", context), gate.get("per", context)
        assert rate is not None
        assert per is not None
        burst = gate.get("burst", context)
        return Fraction(rate) / Fraction(per), max(
            Fraction(rate if burst is None else burst), Fraction(1)
        )

    def allowed(self, key: str) -> int:
        """How many jobs of a partition may go now, were all of them ready."""
        partition = self.partition(key)
        passing = [self.passing(gate, partition) for gate in self.policy.gates]
        if self.paused or partition.paused:
            return 0
        return max(min([self.policy.admission_batch_size, *passing]), 0)

    def next_token(self, key: str) -> tuple[datetime | None, bool]:
        """When the throttles are open again, and whether any other gate is closed."""
        partition = self.partition(key)
        at, others = None, False
        for gate in self.policy.gates:
            if self.passing(gate, partition) >= 1:
                continue
            speed, _ = self.throttle(gate, partition.context) if gate.type == "throttle" else (0, 0)
            if speed <= 0:
                others = True
                continue
            bucket = self.bucket(gate, partition)
            wait = ceil((1 - bucket.tokens) / speed * 10**6) * MICROSECOND
            at = bucket.at + wait if at is None else max(at, bucket.at + wait)
        return at, others

    def is_shut(self, key: str) -> bool:
        """Will the partition never admit anything, as it is limited now?"""
        context = self.partition(key).context
        return any(
            (gate.type == "throttle" and self.throttle(gate, context)[0] <= 0)
            or (gate.type == "concurrency" and (gate.get("max", context) or 0) < 1)
            for gate in self.policy.gates
        )

    def hand_off(self, jobs: Iterable[Job]) -> None:
        """Hand these over: the new ones in this order, then those that wait to be retried."""
        jobs = list(jobs)
        for job in [j for j in jobs if not j.handed] + [j for j in jobs if j.handed]:
            if self.lock_is_queued(job.queueing_lock):
                job.eligible_at = self.now + QUEUEING_LOCK_BACKOFF
            else:
                job.state, job.slot_since, job.handed = "queued", self.now, True
                job.observed = self.policy.has_adaptive()
                for gate in self.policy.gates:
                    bucket = self.partition(job.key).buckets.get(gate.name)
                    if gate.type == "throttle" and bucket is not None:
                        bucket.tokens -= 1

    # What workers do.

    def free(self, job: Job, succeeded: bool | None) -> None:
        """Free a job's slot, with an observation if it succeeded or failed."""
        since, job.slot_since = job.slot_since, None
        if since is None or succeeded is None or not job.observed:
            return
        starts = [start for start in job.starts if start >= since]
        if starts:
            lag = Fraction((min(starts) - since) // MICROSECOND, 1000)
            self.partition(job.key).seen.append((succeeded, float(lag)))

    def end(self, job: Job, state: str) -> None:
        succeeded = {"succeeded": True, "failed": False, "deleted": True}.get(state)
        self.free(job, succeeded if job.state == "running" else None)
        job.attempts += job.state == "running"
        job.state = state

    def retry(self, job: Job, at: datetime | None) -> None:
        job.attempts += 1
        job.scheduled_at = at
        if self.policy.retry_strategy == "bypass":
            job.observed = job.observed or job.slot_since is None
            self.free(job, False if job.state == "running" else None)
            job.slot_since = max(self.now, at or self.now)
            job.state = "queued"
        else:
            self.free(job, False)
            job.state = "staged"
            job.eligible_at = at or ALWAYS
