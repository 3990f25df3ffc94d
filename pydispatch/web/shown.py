"""How values look on a page: keys as text whatever is in them, times, numbers."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

from markupsafe import Markup, escape

__all__ = [
    "ago",
    "as_json",
    "duration",
    "gates",
    "key",
    "number",
    "numbers",
    "plain",
    "reason",
    "said",
    "seconds",
    "shortened",
    "words",
]

SHORT = 64
"""Characters of a key in a table; the rest is in the title and on the partition's own page."""

TITLE = 500
"""Characters of a key in a title: a page holds many."""

NONE = "\N{EN DASH}"
"""A number that is not known."""

FAR = 9000
"""A year from which on a time means "never": the database's infinity, or beyond any calendar."""

_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?\+00(?::00)?")
"""A time inside of JSON, in a session whose time zone is UTC."""

_REASONS = {
    "backoff": "waits for the next look",
    "behind_others": "others go first",
    "budget_exhausted": "tick's budget used up",
    "concurrency_full": "all slots taken",
    "limit_error": "limit function failed",
    "lock_held": "its lock is held",
    "max_zero": "cap is zero or missing",
    "no_tick": "nobody ticks",
    "no_worker": "no worker is alive",
    "not_folded": "not read in yet",
    "not_its_turn": "others are due first",
    "paused": "paused",
    "policy_gone": "its policy is gone",
    "queue_full": "the queue is full",
    "queueing_lock_held": "its queueing lock is held",
    "rate_zero": "rate is zero or missing",
    "retry": "waits to be tried again",
    "scheduled": "waits for its time",
    "throttle_empty": "waits for its rate",
    "tick_error": "tick failed",
    "worker_lost": "its worker is lost",
}


# -- text


def key(value: str | None, length: int | None = SHORT) -> Markup:
    """A key, name or other foreign text: isolated from its surroundings, nothing in it invisible.

    What is not printable is shown as an escape that looks unlike a character; so are spaces at
    either end. A long one is cut (None: not), with more of it in the title.
    """
    if value is None:
        return Markup('<span class="none">none</span>')
    if value == "":
        return Markup('<span class="none">(empty)</span>')
    cut = value if length is None else shortened(value, length)
    title = Markup(' title="{}"').format(plain(value[:TITLE])) if cut != value else Markup()
    return Markup('<bdi class="key"{}>{}</bdi>').format(title, _visible(cut))


def said(value: str | None) -> Markup:
    """A sentence that may quote keys: on its own direction, nothing in it invisible."""
    return Markup("<bdi>{}</bdi>").format(_visible(value or "", keep="\n"))


def shortened(value: str, length: int = SHORT) -> str:
    """The text, or its beginning and an ellipsis."""
    return value if len(value) <= length else value[: length - 1] + "…"


def plain(value: str) -> str:
    """A text on one line without anything invisible, for where there is no markup."""
    return "".join(_escaped(char) if hidden else char for char, hidden in _classified(value))


def _visible(value: str, keep: str = "") -> Markup:
    parts: list[Markup] = []
    text = ""
    for char, hidden in _classified(value):
        if not hidden or char in keep:
            text += char
            continue
        parts += [escape(text), Markup('<span class="esc">{}</span>').format(_escaped(char))]
        text = ""
    return Markup().join([*parts, escape(text)])


def _classified(value: str) -> list[tuple[str, bool]]:
    """Each character, and whether it has to be shown as an escape."""
    inner = range(len(value) - len(value.lstrip()), len(value.rstrip()))
    return [
        (char, place not in inner if char.isspace() and char == " " else _is_hidden(value, place))
        for place, char in enumerate(value)
    ]


def _is_hidden(value: str, place: int) -> bool:
    char = value[place]
    if char == "\u200d" and 0 < place < len(value) - 1:
        # What joins two signs into one emoji is seen as that.
        return not all(
            unicodedata.category(beside) in ("So", "Sk", "Mn")
            for beside in (value[place - 1], value[place + 1])
        )
    return not char.isprintable()


def _escaped(char: str) -> str:
    return "␣" if char == " " else char.encode("unicode_escape").decode()


def reason(value: str | None) -> str:
    """Why a partition admits nothing, in words."""
    if not value:
        return ""
    name, colon, more = value.partition(": ")
    return _REASONS.get(name, name.replace("_", " ")) + colon + more


def words(value: str) -> str:
    """A name from the database in words."""
    return value.replace("_", " ")


def gates(definitions: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The gates of a policy, each as its name, its type and its limits in a line."""
    return [(gate["name"], gate["type"], "; ".join(_limits(gate))) for gate in definitions]


def _limits(gate: Mapping[str, Any]) -> Iterator[str]:
    for name, value in gate.items():
        if name not in ("name", "type") and value is not None:
            yield f"{words(name)} {_limit(value)}"


def _limit(value: Any) -> str:
    """A gate's limit, or where it comes from."""
    if not isinstance(value, Mapping):
        return f"{value:,}" if isinstance(value, (int, float)) else str(value)
    source = f"context {value['ctx']}" if "ctx" in value else f"function {value['sql']}"
    default = value.get("default")
    return source if default is None else f"{source}, else {default}"


def as_json(value: Any) -> str:
    """A value as indented JSON, with nothing invisible in it but spaces and line ends."""
    text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    return "\n".join(
        "".join(char if char.isprintable() else _escaped(char) for char in line)
        for line in text.split("\n")
    )


# -- numbers and times


def number(value: Any, digits: int | None = None) -> str:
    """A number with separated thousands, and at most three digits after the point."""
    if value is None:
        return NONE
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        return str(value)
    if digits is not None:
        return f"{value:,.{digits}f}"
    if isinstance(value, int) or value == value // 1:
        return f"{value:,.0f}"
    whole, _, fraction = f"{value:,.3f}".partition(".")
    fraction = fraction.rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole


def seconds(value: Any) -> float | None:
    """A duration as seconds."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    return None if value is None else float(value)


def duration(value: Any) -> str:
    """A time span (a timedelta, or seconds) in its two largest units."""
    length = seconds(value)
    if length is None:
        return NONE
    sign = "-" if length < 0 else ""
    length = abs(length)
    if length < 0.9995:
        return f"{sign}{length * 1000:.0f} ms"
    if length < 9.95:
        return f"{sign}{length:.1f} s"
    whole = round(length)
    for name, below, size, small_name in (
        ("s", 60, 1, ""),
        ("min", 3600, 60, "s"),
        ("h", 86400, 3600, "min"),
        ("d", float("inf"), 86400, "h"),
    ):
        if whole < below:
            count, rest = divmod(whole, size)
            small = rest // {"min": 1, "h": 60, "d": 3600}[name] if small_name else 0
            return f"{sign}{count} {name}" + (f" {small} {small_name}" if small else "")
    raise AssertionError


def ago(value: datetime | None, now: datetime, form: str = "{} ago") -> Markup:
    """A time as seen from now, with the exact time beside it.

    The form says how a time that is past is put, such as ``"for {}"``.
    """
    if value is None:
        return Markup('<span class="none">never</span>')
    if value.year >= FAR or value.year <= 1:
        return Markup("<span>{}</span>").format("no end" if value.year >= FAR else "always")
    value = value.astimezone(timezone.utc)
    away = (now - value).total_seconds()
    if abs(away) < 1 and form == "{} ago":
        text = "now"
    elif away >= 0:
        # Rounded down, as the database does in its messages, which stand beside.
        text = form.format(_one_unit(away, math.floor))
    else:
        text = f"in {_one_unit(-away)}"
    exact = value.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", " UTC")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        value.isoformat(timespec="milliseconds").replace("+00:00", "Z"), exact, text
    )


def _one_unit(length: float, whole: Callable[[float], int] = round) -> str:
    if length < 1:
        return "less than 1 s"
    for name, size, until in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if length < until:
            return f"{whole(length / size)} {name}"
    return f"{whole(length / 86400):,} d"


def numbers(values: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What a gate counts, as names in words and values."""
    shown = []
    for name, value in (values or {}).items():
        if value is None or isinstance(value, (dict, list)):
            continue
        if isinstance(value, bool):
            value = "yes" if value else "no"
        if isinstance(value, str):
            value = _MOMENT.sub(r"\1 \2 UTC", value)
        shown.append((words(name), number(value)))
    return shown
