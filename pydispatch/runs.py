"""What the workers of this process run, and how the last of their jobs ended.

A worker says the end of a job once. If its connection breaks at that moment, or a failover loses
what was committed, the job stays ``doing`` under a worker that is alive: nobody takes it for lost,
and its slot is taken for ever. So the job manager remembers what it handed to each worker and what
was said at the end, compares with what is ``doing`` under the worker, and says the end again.

An end is said again only for the run that it is the end of: a run is told by its worker and by the
number of tries before it, which each end and each retry counts up.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

from procrastinate.jobs import Job
from procrastinate.sql import queries
from typing_extensions import LiteralString

__all__ = ["DOING", "REMEMBERED", "Ending", "Question", "Run", "Runs"]

REMEMBERED = 10_000
"""Ends that were written and are remembered, for a failover that loses the last of them."""

# A worker that gave no sign for a while may have been pruned, and its jobs are nobody's then.
DOING: LiteralString = """
select id, attempts
from procrastinate_jobs
where status = 'doing'
  and (worker_id = %(worker_id)s or (worker_id is null and id = any(%(unwritten)s::bigint[])))
"""

# Whoever holds the row is about to end the job: perhaps the first try, which is still under way.
RUN: LiteralString = """
with run as materialized (
  select id
  from procrastinate_jobs
  where id = %(job_id)s
    and status = 'doing'
    and attempts = %(attempts)s
    and coalesce(worker_id, %(worker_id)s) = %(worker_id)s
  for update skip locked
)
"""


def _of_the_run(query: LiteralString) -> LiteralString:
    """Return one of procrastinate's statements as one that ends this run or does nothing."""
    return RUN + query.strip().rstrip(";").replace("%(job_id)s", "run.id") + " from run"


ENDS = {name: _of_the_run(queries[name]) for name in ("finish_job", "retry_job")}


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a job."""

    job_id: int
    worker_id: int
    attempts: int
    """Tries before this one."""


@dataclasses.dataclass
class Ending:
    """What was said at the end of a run."""

    run: Run
    statement: str
    """procrastinate's name for it, a key of ``ENDS``."""
    said: dict[str, Any]
    """The statement's other arguments."""
    number: int = 0
    """Ends are counted in the order in which they are first said."""
    again: bool = False
    """It was said again since."""

    @property
    def query(self) -> LiteralString:
        """The statement that ends the run, and returns no row if that was done."""
        return ENDS[self.statement]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``query``."""
        return {**self.said, **dataclasses.asdict(self.run)}


@dataclasses.dataclass(frozen=True)
class Question:
    """Asks what is ``doing`` under a worker, as of a moment."""

    worker_id: int
    unwritten: list[int]
    """The worker's jobs whose ends the database is not known to have."""
    number: int
    """Ends from this one on were not yet said: what the answer shows of them is old."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``DOING``."""
        return {"worker_id": self.worker_id, "unwritten": self.unwritten}


class Runs:
    """The runs of any number of workers that share one job manager."""

    def __init__(self) -> None:
        self._running: dict[int, Run] = {}
        self._unwritten: dict[int, Ending] = {}
        self._written: OrderedDict[int, Ending] = OrderedDict()
        self._ends = 0
        self._fetching: Counter[int] = Counter()
        self._lost_fetches: set[int] = set()

    @contextlib.contextmanager
    def fetching(self, worker_id: int) -> Iterator[None]:
        """Note that a worker fetches, and when it fails that a job may be on its way to nobody."""
        self._fetching[worker_id] += 1
        try:
            yield
        except BaseException:
            self._lost_fetches.add(worker_id)
            raise
        finally:
            self._fetching[worker_id] -= 1

    def begin(self, job: Job, worker_id: int) -> None:
        """Note that a worker got a job to run."""
        assert job.id is not None
        self._unwritten.pop(job.id, None)
        self._written.pop(job.id, None)
        self._running[job.id] = Run(job.id, worker_id, job.attempts)

    def end(self, job_id: int, statement: str, said: dict[str, Any]) -> Ending | None:
        """Note what is about to be said at the end of a job; None when no worker here runs it."""
        run = self._running.pop(job_id, None)
        if run is None:
            return None
        ending = Ending(run, statement, said, self._ends)
        self._ends += 1
        self._unwritten[job_id] = ending
        return ending

    def written(self, ending: Ending) -> None:
        """Note that the database has an end."""
        if self._unwritten.get(ending.run.job_id) is ending:
            del self._unwritten[ending.run.job_id]
            self._written[ending.run.job_id] = ending
        while len(self._written) > REMEMBERED:
            self._written.popitem(last=False)

    def refused(self, ending: Ending) -> None:
        """Note that there is nothing to end."""
        if self._unwritten.get(ending.run.job_id) is ending:
            del self._unwritten[ending.run.job_id]

    def is_in_doubt(self, worker_id: int) -> bool:
        """Tell whether something that a worker said or asked may have been lost."""
        return worker_id in self._lost_fetches or bool(self.question(worker_id).unwritten)

    def question(self, worker_id: int) -> Question:
        """Return what to ask about a worker now."""
        unwritten = [
            job_id
            for job_id, ending in self._unwritten.items()
            if ending.run.worker_id == worker_id
        ]
        return Question(worker_id, unwritten, self._ends)

    def to_say_again(self, question: Question, doing: Iterable[tuple[int, int]]) -> list[Ending]:
        """Return the ends that the database does not have.

        Args:
            question: What was asked.
            doing: The answer: ids and attempts.
        """
        found = dict(doing)
        for job_id in question.unwritten:
            if job_id not in found and job_id in self._unwritten:
                self.written(self._unwritten[job_id])
        endings = [
            self._missing(question, Run(id, question.worker_id, tries))
            for id, tries in found.items()
        ]
        return [ending for ending in endings if ending is not None]

    def _missing(self, question: Question, run: Run) -> Ending | None:
        if run.job_id in self._running:
            return None
        ending = self._unwritten.get(run.job_id) or self._written.get(run.job_id)
        if ending is not None:
            return ending if ending.run == run and ending.number < question.number else None
        # What a fetch took that is under way or came back meanwhile is not lost.
        if run.worker_id in self._lost_fetches and not self._fetching[run.worker_id]:
            return _given_back(run)
        return None

    def forget(self, worker_id: int) -> None:
        """Forget a worker, which has ended."""
        for runs in (self._running, self._unwritten, self._written):
            for job_id in [id for id, each in runs.items() if _run(each).worker_id == worker_id]:
                del runs[job_id]
        del self._fetching[worker_id]
        self._lost_fetches.discard(worker_id)


def _given_back(run: Run) -> Ending:
    """Return the end of a run that never began: the job waits again."""
    arguments = ("retry_at", "new_priority", "new_queue_name", "new_lock")
    return Ending(run, "retry_job", dict.fromkeys(arguments))


def _run(each: Run | Ending) -> Run:
    return each.run if isinstance(each, Ending) else each
