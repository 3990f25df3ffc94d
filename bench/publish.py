"""Writes a run into the documentation: ``make bench-docs`` or ``python -m bench.publish FILE``.

The tables go between their marks in docs/performance.md, the curve into its picture, which needs
matplotlib (the extra ``bench``). What is said about the numbers is written by hand, and has to be
read again after each run.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.report import number

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/performance.md"
PICTURE = ROOT / "docs/images/performance.svg"


def publish(document: dict[str, Any], page: str) -> str:
    """Return the page with the tables of a run, as ``python -m bench --json`` wrote it.

    Raises:
        ValueError: The page lacks a mark.
    """
    for name, text in (
        ("machine", _machine(document)),
        ("rows", _rows(document["rows"])),
        ("curve", _curve(document["curve"])),
    ):
        if text:
            begin = page.index(f"<!-- {name} -->\n") + len(f"<!-- {name} -->\n")
            page = page[:begin] + text + page[page.index("<!-- end -->", begin) :]
    return page


def _machine(document: dict[str, Any]) -> str:
    server = document["server"]
    return (
        f"PostgreSQL {server['server_version'].split()[0]}, Python {document['python']}, "
        f"{document['cpus']} CPUs; {document['repeat']} repetitions; {document['at'][:10]}.\n"
    )


def _rows(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| what | pydispatch | reference | bar | measured | range | met |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        ours, reference = (
            *(number(statistics.median(values)) for values in row["details"].values()),
            *("", ""),
        )[:2]
        unit = "" if row["unit"] == "x" else f" {row['unit']}"
        values = f"{number(min(row['values']))} to {number(max(row['values']))}"
        lines.append(
            f"| {row['what']} | {ours} | {reference} | {'≥' if row['at_least'] else '≤'} "
            f"{number(row['bar'])}{unit} | {number(row['measured'])}{unit} | {values} | "
            f"{'yes' if row['met'] else 'no'} |"
        )
    return "".join(f"{line}\n" for line in lines) if rows else ""


def _curve(points: list[dict[str, Any]]) -> str:
    lines = [
        "| partitions | staged jobs | tick | over bare | staging 1,000 | over bare |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {point['partitions']:,} | {point['jobs']:,} "
        f"| {number(point['tick_ms'])} ms | {number(point['tick_ms'] / point['bare_tick_ms'])} "
        f"| {number(point['stage_ms'])} ms | {number(point['stage_ms'] / point['bare_stage_ms'])} |"
        for point in points
    ]
    return "".join(f"{line}\n" for line in lines) if points else ""


def main(
    source: Annotated[Path, typer.Argument(help="What `python -m bench --json` wrote.")],
) -> None:
    """Write the tables and the picture of a run into docs/."""
    document = json.loads(source.read_text(encoding="utf-8"))
    PAGE.write_text(publish(document, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if document["curve"]:
        from bench.draw import main as draw  # matplotlib is wanted for the picture alone

        draw(source, PICTURE)


if __name__ == "__main__":
    typer.run(main)
