"""Pages show every row once, in the order of a full sort; no cursor is an error.

Case: a forged page cursor gives an internal error. Case: the list of waiting jobs shows another
order than the one in which they are admitted.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.properties.support import START, Database, tries

SORTS = ("pending", "admitted", "stale", "recent", "key")
MOMENTS = st.none() | st.integers(0, 5).map(lambda n: START + timedelta(microseconds=n))
KEYS = st.sampled_from(
    ["", "a", "A", "b", "B", "é", "z", "%", "_", "100%", "a_b", "\\", "'", "😀", "\t", "k" * 300]
) | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
PARTITIONS = st.lists(
    st.fixed_dictionaries(
        {
            "policy_name": st.sampled_from(["p", "q"]),
            "partition_key": KEYS,
            "pending_count": st.sampled_from([-1, 0, 0, 1, 2, 2**40]),
            "total_admitted": st.sampled_from([0, 0, 1, 2**53 + 1]),
            "last_checked_at": MOMENTS,
            "last_admitted_at": MOMENTS,
        }
    ),
    max_size=14,
    unique_by=lambda row: (row["policy_name"], row["partition_key"]),
)
BEFORE = datetime.min.replace(tzinfo=START.tzinfo)


@contextmanager
def partitions(db: Database, rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Fill the table and return what is in it."""
    with db.rehearsal():
        db.define("p")
        db.define("q")
        for row in rows:
            db.conn.execute(
                """insert into dispatch_partitions (id, first_seen_at, policy_name, partition_key,
                  pending_count, total_admitted, last_checked_at, last_admitted_at)
                values (dispatch_partition_id(%(policy_name)s, %(partition_key)s), now(),
                  %(policy_name)s, %(partition_key)s, %(pending_count)s, %(total_admitted)s,
                  %(last_checked_at)s, %(last_admitted_at)s)""",
                row,
            )
        yield db.all("select * from dispatch_partitions")


def page(db: Database, sort: str, **options: Any) -> list[dict[str, Any]]:
    """Return a page; the options are the arguments without their p_."""
    options = {"policy": None, "sort": sort, **options}
    arguments = ", ".join(f"p_{name} => %s" for name in options)
    return db.all(f"select * from dispatch_partitions_page({arguments})", *options.values())


def place(sort: str, row: dict[str, Any]) -> tuple[Any, Any]:
    """Return what the order goes by."""

    def ago(moment: datetime | None) -> timedelta:
        return START - (moment or BEFORE)

    by = {
        "pending": lambda: -max(row["pending_count"], 0),
        "admitted": lambda: -row["total_admitted"],
        "stale": lambda: -ago(row["last_checked_at"]),
        "recent": lambda: ago(row["last_admitted_at"]),
        "key": lambda: row["partition_key"].encode(),
    }
    return by[sort](), row["id"].bytes


def walk(db: Database, sort: str, limit: int, **options: Any) -> list[Any]:
    """Return the ids of all pages."""
    ids: list[Any] = []
    cursor = None
    while rows := page(db, sort, limit=limit, cursor=cursor, **options):
        assert len(rows) <= limit
        ids += [row["id"] for row in rows]
        cursor = rows[-1]["cursor"]
    return ids


@given(
    rows=PARTITIONS,
    limit=st.integers(1, 4),
    policy=st.sampled_from([None, "p"]),
    only_pending=st.booleans(),
    search=st.none() | KEYS | st.sampled_from(["b", "%", "_", "\\", "É"]),
)
@tries(40)
def test_a_walk_shows_each_partition_once_in_the_order_of_a_full_sort(
    db: Database,
    rows: list[dict[str, Any]],
    limit: int,
    policy: str | None,
    only_pending: bool,
    search: str | None,
) -> None:
    with partitions(db, rows) as there:
        for sort in SORTS:
            options = {"policy": policy, "only_pending": only_pending}
            found = walk(db, sort, limit, search=search, **options)
            wanted = [
                row["id"]
                for row in sorted(there, key=lambda row: place(sort, row))
                if policy in (None, row["policy_name"])
                and (not only_pending or row["pending_count"] > 0)
                and (not search or _is_in(db, search, row["partition_key"]))
            ]
            assert found == wanted, sort


def _is_in(db: Database, search: str, key: str) -> bool:
    """Compare letters as the database does, which need not be as Python does."""
    lower = "select lower(%s::text)"
    return db.one(lower, search) in db.one(lower, key)


@given(rows=PARTITIONS)
@tries(40)
def test_a_cursor_is_the_base64_of_value_and_id(db: Database, rows: list[dict[str, Any]]) -> None:
    with partitions(db, rows):
        for sort, column in (
            ("pending", "pending_count"),
            ("admitted", "total_admitted"),
            ("stale", "last_checked_at"),
            ("recent", "last_admitted_at"),
            ("key", "partition_key"),
        ):
            for row in page(db, sort):
                cursor = row["cursor"]
                assert set(cursor) <= set("-_" + "".join(map(chr, range(48, 123)))), cursor
                value, id_ = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
                assert id_ == str(row["id"])
                if sort == "key":
                    assert value == row[column][:200]
                elif isinstance(row[column], datetime):
                    assert datetime.fromisoformat(value) == row[column]
                else:
                    assert value == row[column]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63) - 1, 10**400, 1.5, 1e308])
    | st.text()
    | st.sampled_from(
        [
            "infinity",
            "-infinity",
            "NaN",
            "now",
            "0000-01-01T00:00:00+00:00",
            "300000-01-01T00:00:00+00:00",
            "2026-01-01T00:00:00",
            "2026-13-01T00:00:00+00:00",
            "2026-01-01T00:00:00+99:99",
            "\0",
            "\ud800",
            "x" * 2000,
        ]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=6,
)
IDS = st.sampled_from(
    ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff", "", 7, None]
)
TEXTS = (
    st.text(st.characters(codec="utf-8", exclude_characters="\0"))
    | st.text("ABCabc019-_=+/ \n")
    | st.sampled_from(["A" * 1_000_000, "[" * 3000, "W10", "W10=", "bnVsbA", "é"])
)


def encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


RAW = (
    st.binary(max_size=60)
    | st.sampled_from(
        [
            b"[NaN, 1]",
            b"[Infinity, 1]",
            b"[1e999999, 1]",
            b"[" * 2900,
            b'["\\u0000", "\\u0000"]',
            b'["\\ud800", 1]',
            b"[1,2]garbage",
            b"\xff\xfe",
        ]
    )
).map(encoded)
FORGED = (JSON | st.tuples(JSON, JSON | IDS)).map(lambda value: encoded(json.dumps(value).encode()))
A_TIME = "2026-01-01T00:00:00+00:00"
OF_ANOTHER_SORT: dict[str, list[Any]] = {
    "pending": [A_TIME, None, "a", -1, 1.5, 2**63],
    "admitted": [A_TIME, None, "a", -1, 1.5, 2**63],
    "stale": [7, "a", "infinity", "2026-01-01"],
    "recent": [7, "a", "infinity", "2026-01-01"],
    "key": [7, None, [], {}],
}
SOME = [
    {
        "policy_name": "p",
        "partition_key": key,
        "pending_count": n,
        "total_admitted": n,
        "last_checked_at": START + timedelta(seconds=n) if n else None,
        "last_admitted_at": START + timedelta(seconds=n) if n else None,
    }
    for n, key in enumerate("abc")
]


@given(cursor=TEXTS | RAW | FORGED)
@example(cursor="")
@tries(40)
def test_what_is_no_cursor_gives_the_first_page(db: Database, cursor: str) -> None:
    """Unless what was forged happens to be a whole cursor: then it gives some page."""
    with partitions(db, SOME):
        db.stage("p", [{"task_name": "t", "context": {}}] * 3)
        for sort in SORTS:
            found = page(db, sort, cursor=cursor)
            if not _may_be_a_cursor(cursor):
                assert found == page(db, sort)
        waiting = "select id from dispatch_waiting_page('p', '', p_cursor => %s)"
        if not _may_be_a_cursor(cursor):
            assert db.all(waiting, cursor) == db.all(waiting, None)
        else:
            db.all(waiting, cursor)


def _may_be_a_cursor(cursor: str) -> bool:
    if not re.fullmatch("[A-Za-z0-9_-]+", cursor, re.ASCII):
        return False
    try:
        value = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and len(value) == 2


@pytest.mark.parametrize("sort", SORTS)
def test_a_cursor_with_a_value_of_another_kind_gives_the_first_page(
    db: Database, sort: str
) -> None:
    with partitions(db, SOME) as there:
        first = page(db, sort)
        for row in there:
            for value in OF_ANOTHER_SORT[sort]:
                cursor = encoded(json.dumps([value, str(row["id"])]).encode())
                assert page(db, sort, cursor=cursor) == first, value
        for id_ in (7, None, "", "x" * 36, str(there[0]["id"]).upper(), [str(there[0]["id"])]):
            cursor = encoded(json.dumps([1 if sort[0] in "pa" else A_TIME, id_]).encode())
            assert page(db, sort, cursor=cursor) == first, id_


def test_keys_of_ten_thousand_characters_are_walked(db: Database) -> None:
    rows = [
        {**SOME[0], "partition_key": "k" * n + end}
        for n in (199, 200, 201, 9_999)
        for end in ("", "a", "b", "é")
    ]
    with partitions(db, rows) as there:
        wanted = sorted(there, key=lambda row: place("key", row))
        assert walk(db, "key", 1) == [row["id"] for row in wanted]
        cursor = page(db, "key", limit=15)[-1]["cursor"]
        assert len(cursor) < 1_000
        # Forgotten meanwhile: what its cursor still has of the key is where the page begins.
        db.conn.execute("delete from dispatch_partitions where id = %s", [wanted[14]["id"]])
        assert page(db, "key", cursor=cursor)[-1]["id"] == wanted[15]["id"]


@given(
    jobs=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 5, -7, 2**31 - 1]), st.sampled_from([None, None, -3, 0, 1, 1, 9])
        ),
        max_size=12,
    ),
    limit=st.integers(1, 4),
)
@tries(40)
def test_waiting_jobs_are_listed_in_the_order_in_which_they_are_admitted(
    db: Database, jobs: list[tuple[int, float | None]], limit: int
) -> None:
    with db.rehearsal():
        db.define("p", admission_batch_size=1)
        for priority, delay in jobs:
            at = None if delay is None else (db.now + timedelta(seconds=delay)).isoformat()
            db.stage("p", [{"task_name": "t", "priority": priority, "scheduled_at": at}])

        listed: list[dict[str, Any]] = []
        query = "select * from dispatch_waiting_page('p', '', %s, %s)"
        while rows := db.all(query, limit, listed[-1]["cursor"] if listed else None):
            assert len(rows) <= limit
            listed += rows
        assert [row["place"] for row in listed] == [*range(1, len(jobs) + 1)]

        admitted: list[int] = []
        waiting = {row["id"] for row in listed}
        while (due := db.next_due()) is not None:
            db.set_clock(max(due, db.now))
            db.tick("p")
            left = {row["id"] for row in db.all("select id from dispatch_staged_jobs")}
            admitted += waiting - left
            waiting = left
        assert [row["id"] for row in listed] == admitted
