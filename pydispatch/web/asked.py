"""What a request says: texts, ids, cursors, forms, and the policy that it names."""

from __future__ import annotations

import base64
import binascii
import json
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs

from starlette.exceptions import HTTPException
from starlette.requests import Request

from pydispatch.web import queries, shown
from pydispatch.web.database import Reader, Row
from pydispatch.web.queries.jobs import Position

__all__ = ["Fields", "clean", "cursor", "first", "form_of", "known_policy", "position", "to_id"]

LONGEST_FORM = 65_536
"""Bytes of a form."""

BIGINT = 2**63 - 1

Fields = dict[str, list[str]]
"""What a form or a query has, each field with its values."""


def clean(text: str) -> str:
    """A text as PostgreSQL can hold it: it has no zero characters, and so nothing with one."""
    return text.replace("\0", "�")


def to_id(text: str) -> int | None:
    """The number of a job that a text is, or None."""
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        return None
    number = int(text)
    return number if number <= BIGINT else None


def cursor(position: Position) -> str:
    """A position as a text for an address."""
    text = json.dumps([position[0].isoformat(), position[1]])
    return base64.urlsafe_b64encode(text.encode()).decode()


def position(cursor: str | None) -> Position | None:
    """Where a page begins; anything that is no cursor of ours means the first page."""
    try:
        value: Any = json.loads(base64.urlsafe_b64decode(cursor or ""))
        moment, id = datetime.fromisoformat(value[0]), value[1]
        if moment.tzinfo is None or not isinstance(id, int) or abs(id) > BIGINT:
            return None
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, binascii.Error):
        return None
    return moment, id


def first(fields: Fields, name: str, default: str = "") -> str:
    """The first value of a field."""
    return fields.get(name, [default])[0]


async def form_of(request: Request) -> Fields:
    """The fields of the form that was sent.

    Raises:
        HTTPException: 413, it is longer than any of ours; 415, it is none; 400, it is broken.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "Only forms are taken.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LONGEST_FORM:
            raise HTTPException(413, "The form is too long.")
    try:
        return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=500)
    except ValueError:
        raise HTTPException(400, "The form cannot be read.") from None


async def known_policy(reader: Reader, name: str) -> Row:
    """The definition of the policy that is named.

    Raises:
        HTTPException: 404, there is no such policy.
    """
    found = await queries.policies.find(reader, clean(name))
    if found is None:
        raise HTTPException(404, f"There is no policy “{shown.plain(shown.shortened(name, 130))}”.")
    return found
