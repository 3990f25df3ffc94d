"""What the property tests share: a database that forgets, exact numbers, how many examples."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from fractions import Fraction
from typing import Any

import psycopg
from hypothesis import settings
from psycopg.rows import dict_row

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
MICROSECOND = Fraction(1, 10**6)


def tries(short: int) -> settings:
    """Try so many examples, or, in a long run, what PROPERTIES_EXAMPLES says (20 times as many)."""
    if os.environ.get("PROPERTIES") != "long":
        return settings(max_examples=short)
    return settings(max_examples=int(os.environ.get("PROPERTIES_EXAMPLES", short * 20)))


def moment(seconds: float | Fraction) -> datetime:
    """Return the moment that many seconds, in whole microseconds, after ``START``."""
    return START + timedelta(microseconds=int(Fraction(seconds) * 10**6))


def seconds(moment: datetime) -> Fraction:
    """Return how many seconds a moment is after ``START``, exactly."""
    return Fraction((moment - START) // timedelta(microseconds=1), 10**6)


class Database:
    """A connection with the clock in its hand, and empty tables outside of a test's
    ``rehearsal()`` or ``run()``.
    """

    def __init__(self, conn: psycopg.Connection) -> None:
        self.conn = conn
        self.now = START

    def all(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """Return the rows of a query."""
        with self.conn.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query.encode(), values).fetchall()

    def one(self, query: str, *values: Any) -> Any:
        """Return the one value that a query gives."""
        row = self.conn.execute(query.encode(), values).fetchone()
        assert row is not None
        return row[0]

    def set_clock(self, moment: datetime) -> None:
        """Set what ``dispatch_now()`` returns."""
        self.now = moment
        self.conn.execute("select set_config('dispatch.fake_now', %s, false)", [moment.isoformat()])

    def advance(self, seconds: float | Fraction) -> None:
        """Move the clock."""
        self.set_clock(self.now + timedelta(microseconds=int(Fraction(seconds) * 10**6)))

    def define(self, name: str, **definition: Any) -> None:
        """Define a policy."""
        self.one("select dispatch_define_policy(%s, %s)", name, json.dumps(definition))

    def stage(self, policy: str, jobs: Sequence[dict[str, Any]]) -> list[int]:
        """Stage jobs and return their ids."""
        rows = self.all("select dispatch_stage_many(%s, %s) as id", policy, json.dumps(jobs))
        return [row["id"] for row in rows]

    def tick(self, policy: str | None = None) -> dict[str, Any]:
        """Tick one policy and return what was done."""
        (result,) = self.all("select * from dispatch_tick(%s)", policy)
        return result

    def next_due(self) -> datetime | None:
        """Return when a tick is worth its while."""
        due = self.one("select dispatch_next_due()")
        assert due is None or isinstance(due, datetime)
        return due

    @contextmanager
    def rehearsal(self) -> Iterator[Database]:
        """Start with empty tables at ``START``, and undo at the end whatever was done."""
        with self.conn.transaction(force_rollback=True):
            self.set_clock(START)
            yield self

    @contextmanager
    def run(self) -> Iterator[Database]:
        """Do the same, committing each statement: a long run leaves too many dead rows."""
        self.set_clock(START)
        try:
            yield self
        finally:
            names = self.one(
                """select string_agg(oid::regclass::text, ', ') from pg_class
                where relkind = 'r' and relname ~ '^(dispatch|procrastinate)_'
                  and relname not in ('dispatch_migrations', 'procrastinate_version')"""
            )
            self.conn.execute(f"truncate {names} restart identity cascade".encode())
