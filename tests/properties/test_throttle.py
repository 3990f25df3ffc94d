"""The throttle from end to end: staged jobs, ticks, procrastinate's queue, on the stopped clock."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from fractions import Fraction
from itertools import pairwise
from math import floor
from random import Random
from typing import NamedTuple

import pytest

from tests.properties.support import START, Database, moment, seconds

TENTH = Fraction(1, 10)

RUN = """
create temporary table looks (place serial, at timestamptz, admitted bigint);

create procedure pg_temp.run(p_moments timestamptz[], p_until timestamptz)
language plpgsql
as $$
declare
  v_admitted bigint := 0;
  v_now timestamptz := dispatch_now();
  v_due timestamptz;
begin
  for v_i in 1 .. coalesce(cardinality(p_moments), 1000000) loop
    v_now := coalesce(p_moments[v_i], v_due, v_now);
    exit when v_now > p_until;
    perform set_config('dispatch.fake_now', v_now::text, false);
    v_admitted := v_admitted + (select jobs_admitted from dispatch_tick('p'));
    insert into pg_temp.looks (at, admitted) values (v_now, v_admitted);
    commit;
    v_due := dispatch_next_due();
  end loop;
end;
$$
"""


class Look(NamedTuple):
    """A tick: when, in seconds after the start, and how many were admitted up to and with it."""

    passed: Fraction
    admitted: int


@pytest.fixture(scope="module", autouse=True)
def procedure(db: Database) -> None:
    """One call for all ticks of a run: thousands of round trips would be slow."""
    db.conn.execute(RUN.encode())


def throttle(name: str, rate: float, per: float, **more: float) -> dict[str, object]:
    return {"type": "throttle", "name": name, "rate": rate, "per": per, **more}


def backlog(db: Database, jobs: int, *gates: dict[str, object]) -> None:
    """Stage more jobs in one partition than the test can admit, in a policy with these gates."""
    db.define("p", gates=list(gates), admission_batch_size=10_000, max_queued=None)
    db.stage("p", [{"task_name": "t"}] * jobs)


def ticks(db: Database, gaps: Iterator[Fraction], until: int) -> list[Look]:
    """Tick now and after each gap until so many seconds passed since the start."""
    moments = [seconds(db.now)]
    while (following := moments[-1] + next(gaps)) <= until:
        moments.append(following)
    return run(db, [moment(one) for one in moments], until)


def when_due(db: Database, until: int) -> list[Look]:
    """Tick when dispatch_next_due() says, as a driver does."""
    return run(db, None, until)


def run(db: Database, moments: list[datetime] | None, until: int) -> list[Look]:
    db.conn.execute("truncate pg_temp.looks")
    db.conn.execute("call pg_temp.run(%s, %s)", [moments, moment(until)])
    return [
        Look(seconds(row["at"]), row["admitted"])
        for row in db.all("select at, admitted from pg_temp.looks order by place")
    ]


def at_random(low: float, high: float) -> Iterator[Fraction]:
    random = Random(4711)
    while True:
        yield Fraction(round(random.uniform(low, high) * 10**6), 10**6)


def each(gap: Fraction) -> Iterator[Fraction]:
    while True:
        yield gap


@pytest.mark.parametrize(
    "gaps",
    [each(TENTH), each(Fraction(2)), at_random(0, 30)],
    ids=["each 0.1 s", "each 2 s", "up to 30 s apart"],
)
def test_150_a_minute_is_never_exceeded_and_never_more_than_one_behind(
    db: Database, gaps: Iterator[Fraction]
) -> None:
    with db.run():
        backlog(db, 1800, throttle("throttle", 150, 60))
        looks = ticks(db, gaps, until=600)
        for passed, admitted in looks:
            earned = floor(150 + Fraction(5, 2) * passed)
            assert earned - 1 <= admitted <= earned
        assert looks[-1].admitted >= 1550


@pytest.mark.parametrize(
    ("rate", "per"),
    [(2.5, 1), (0.5, 1), (1, 3), (150, 60), (7, 1)],
    ids=["2.5/s", "0.5/s", "1 in 3 s", "150/min", "7/s"],
)
def test_the_tick_that_comes_when_due_gets_every_token(
    db: Database, rate: float, per: float
) -> None:
    with db.run():
        speed, burst = Fraction(rate) / Fraction(per), max(Fraction(rate), Fraction(1))
        until = round(200 / speed)
        backlog(db, 700, throttle("throttle", rate, per))
        looks = when_due(db, until)
        for passed, admitted in looks:
            earned = floor(burst + speed * passed)
            assert earned - 1 <= admitted <= earned
        assert looks[-1].admitted >= floor(burst + speed * until) - 1
        # No look is in vain: the time that next_due gave had a token for it.
        assert all(after.admitted > before.admitted for before, after in pairwise(looks))


@pytest.mark.parametrize("rate", [0.5, 2.5])
def test_a_fraction_of_a_token_is_kept(db: Database, rate: float) -> None:
    """Case: 0.5 a second is truncated to 0, 2.5 becomes 2."""
    with db.run():
        backlog(db, 700, throttle("throttle", rate, 1))
        last = ticks(db, each(TENTH), until=60)[-1]
        assert last == Look(Fraction(60), floor(max(rate, 1) + rate * 60))


def test_two_throttles_of_a_policy_hold_both(db: Database) -> None:
    """Case: 10 a minute and 600 an hour degrade to "10 a tick"."""
    with db.run():
        backlog(db, 2_000, throttle("minute", 10, 60), throttle("hour", 600, 3600, burst=60))
        looks = when_due(db, 3600)
        for before, first in pairwise([Look(Fraction(0), 0), *looks]):
            for last in looks[:: len(looks) // 50]:
                window, passing = last.passed - first.passed, last.admitted - before.admitted
                assert last.passed < first.passed or passing <= min(10, 60) + window / 6
        assert looks[-1].admitted == 10 + 600


def test_the_narrower_of_two_throttles_governs(db: Database) -> None:
    with db.run():
        backlog(db, 700, throttle("second", 5, 1), throttle("minute", 60, 60))
        admitted = dict(when_due(db, 300))
        assert admitted[Fraction(0)] == 5
        assert max(admitted.values()) == 60 + 300
        for passed, count in admitted.items():
            assert count <= min(5 + 5 * passed, 60 + passed)


def test_a_clock_that_goes_back_admits_nothing_extra(db: Database) -> None:
    with db.run():
        backlog(db, 700, throttle("throttle", 150, 60))
        random = Random(7)
        latest, admitted = START, 0
        for _ in range(400):
            latest = max(latest, db.now)
            admitted += db.tick("p")["jobs_admitted"]
            assert admitted <= floor(150 + Fraction(5, 2) * seconds(latest))
            db.advance(Fraction(random.randint(-2_000, 2_500), 1000))
        db.set_clock(latest)
        for passed, more in ticks(db, each(Fraction(2)), until=round(seconds(latest)) + 20):
            earned = floor(150 + Fraction(5, 2) * passed)
            assert earned - 1 <= admitted + more <= earned


def test_the_rate_that_a_context_brings_counts_from_the_next_tick_on(db: Database) -> None:
    """Case: queued jobs carry the old limit and bring it back after a change."""
    with db.run():
        db.define("p", gates=[throttle("throttle", 1, 1) | {"rate": {"ctx": "rate"}}])
        db.stage("p", [{"task_name": "t", "args": {"rate": 10}}] * 300)
        assert db.tick("p")["jobs_admitted"] == 10
        db.stage("p", [{"task_name": "t", "args": {"rate": 2}}])
        for second in range(1, 20):
            db.set_clock(START)
            db.advance(Fraction(second))
            assert db.tick("p")["jobs_admitted"] == 2
        db.stage("p", [{"task_name": "t", "args": {"rate": 0}}])
        db.advance(Fraction(1))
        assert db.tick("p")["denied_reasons"] == {"rate_zero": 1}
        assert db.tick("p")["partitions_seen"] == 0, "it backs off"
        db.stage("p", [{"task_name": "t", "args": {"rate": 3}}])
        assert db.tick("p")["jobs_admitted"] == 3


def test_a_raised_rate_counts_for_a_partition_that_was_empty_meanwhile(db: Database) -> None:
    with db.rehearsal():
        backlog(db, 1, throttle("throttle", 1, 3600))
        assert db.tick("p")["jobs_admitted"] == 1
        db.advance(Fraction(1))
        backlog(db, 1, throttle("throttle", 1, 1))
        assert db.tick("p")["jobs_admitted"] == 1


def test_a_finish_does_not_bring_back_a_limit_that_was_lifted(db: Database) -> None:
    with db.rehearsal():
        backlog(db, 1, throttle("throttle", 1, 3600))
        assert db.tick("p")["jobs_admitted"] == 1
        db.define("p")
        db.tick("p")
        job_id = db.one("select job_id from dispatch_inflight_jobs")
        assert db.one("select dispatch_finish(%s, true)", job_id)
        db.stage("p", [{"task_name": "t"}])
        assert db.tick("p")["jobs_admitted"] == 1
