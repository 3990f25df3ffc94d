"""What the command line prints: tables for people, JSON for scripts.

On a terminal tables have lines and colour and fold to its width. Elsewhere they are plain columns
and nothing is cut off, however long. No value can send control characters to the terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, Literal

import rich.box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pydispatch.errors import DispatchError

__all__ = [
    "cut_table",
    "print_error",
    "print_json",
    "print_line",
    "print_rows",
    "screen",
    "shown",
]

_WIDE = 100_000  # columns of a page that is no terminal
_GAP = 3  # columns between two columns of a table
_SHORTEST = 6  # columns that are left of a text that is cut


def print_json(value: Any) -> None:
    """Print one JSON document. Times are ISO 8601, durations seconds."""
    narrow = (sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")
    print(json.dumps(value, default=_plain, ensure_ascii=narrow, indent=2))


def print_line(line: str) -> None:
    """Print a line for people."""
    screen().print(shown(line))


def print_rows(rows: Sequence[Mapping[str, Any]], *, empty: str) -> None:
    """Print rows as a table with their keys as headings, or the sentence that there are none.

    Where a terminal is too narrow for the columns, each row becomes a list of names and values.
    """
    if not rows:
        print_line(empty)
        return
    console = screen()
    with console.capture() as page:
        for place, part in enumerate(_table(rows, console) or map(_list, rows)):
            if place:
                console.print()
            console.print(part)
    for line in page.get().splitlines():
        print(line.rstrip())


def _table(rows: Sequence[Mapping[str, Any]], console: Console) -> list[Table] | None:
    """The rows as one table, or None when it would have to break words."""
    columns = {name.replace("_", " "): [shown(row[name]) for row in rows] for name in rows[0]}
    texts = [[heading, *(cell.plain for cell in cells)] for heading, cells in columns.items()]
    shortest = [max(cell_len(word) for text in column for word in text.split()) for column in texts]
    longest = [max(map(cell_len, column)) for column in texts]
    spare = console.width - sum(shortest) - _GAP * (len(columns) - 1)
    if spare < 0:
        return None
    table = Table(
        box=rich.box.SIMPLE_HEAD if console.is_terminal else None,
        show_edge=False,
        pad_edge=False,
        header_style="bold",
    )
    for name, heading, short, long in zip(rows[0], columns, shortest, longest, strict=True):
        width = min(long, short + spare)
        spare -= width - short
        justify: Literal["left", "right"] = "right" if _are_numbers(rows, name) else "left"
        table.add_column(heading, width=width, justify=justify)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return [table]


def cut_table(rows: Sequence[Mapping[str, Any]], width: int) -> Table:
    """Rows as a table with a line each. Texts that have no room are cut, the longest first."""
    headings = {name: name.replace("_", " ") for name in rows[0]}
    columns = {name: [shown(row[name]) for row in rows] for name in headings}
    widths = {
        name: max(cell_len(heading), *(cell.cell_len for cell in columns[name]))
        for name, heading in headings.items()
    }
    texts = [name for name in headings if not _are_numbers(rows, name)]
    spare = width - sum(widths.values()) - _GAP * (len(widths) - 1)
    while spare < 0 and texts:
        longest = max(texts, key=widths.__getitem__)
        if widths[longest] <= _SHORTEST:
            break
        widths[longest] -= 1
        spare += 1
    table = Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name, heading in headings.items():
        table.add_column(
            heading,
            width=widths[name],
            justify="left" if name in texts else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _are_numbers(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return all(isinstance(row[name], (int, float, Decimal, timedelta, type(None))) for row in rows)


def _list(row: Mapping[str, Any]) -> Table:
    """One row, a line a value."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in row.items():
        table.add_row(name.replace("_", " "), shown(value))
    return table


def print_error(error: DispatchError, *, as_json: bool) -> None:
    """Print what went wrong to standard error."""
    if as_json:
        report = {
            "sqlstate": error.sqlstate or None,
            "message": error.message,
            "detail": error.detail,
            "hint": error.hint,
        }
        print(json.dumps({"error": report}, ensure_ascii=False, indent=2), file=sys.stderr)
        return
    console = screen(error=True)
    label = f"error {error.sqlstate}" if error.sqlstate else "error"
    for style, name, text in (
        ("bold red", label, error.message),
        ("bold", "detail", error.detail),
        ("bold", "hint", error.hint),
    ):
        if text:
            console.print(Text(f"{name}: ", style) + shown(text, keep="\n\t"))


def screen(*, error: bool = False) -> Console:
    """Where output goes: a terminal as it is, anything else without end of lines or colour."""
    file = sys.stderr if error else sys.stdout
    terminal = file.isatty()
    return Console(
        file=file,
        width=None if terminal else _WIDE,
        soft_wrap=not terminal,
        force_terminal=terminal,
        highlight=False,
    )


def shown(value: Any, keep: str = "") -> Text:
    """A value as literal text, with what is not printable (nor among ``keep``) escaped."""
    if value is None:
        return Text("-")
    if isinstance(value, date):
        text = value.isoformat(**({"sep": " "} if hasattr(value, "hour") else {}))
    elif isinstance(value, (Mapping, list)):
        text = json.dumps(value, default=_plain, ensure_ascii=False)
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, timedelta):
        text = _duration(value)
    else:
        text = str(value)
    return Text(
        "".join(
            char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
            for char in text
        )
    )


def _duration(value: timedelta) -> str:
    """A time span in its two largest units: 45 s, 2 h 05 min, 3 d 04 h."""
    seconds = abs(value.total_seconds())
    sign = "-" if value < timedelta(0) else ""
    if seconds < 9.95:
        return f"{sign}{seconds:.1f} s"
    if round(seconds) < 60:
        return f"{sign}{round(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{sign}{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{sign}{hours} h {minutes:02} min"
    days, hours = divmod(hours, 24)
    return f"{sign}{days} d {hours:02} h"


def _plain(value: Any) -> Any:
    """What JSON has no type for, as something that it has."""
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, Iterable):
        return list(value)
    return str(value)
