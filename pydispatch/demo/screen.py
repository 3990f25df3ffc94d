"""What the demo shows: live on a terminal, plain lines elsewhere, one JSON document on request."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Literal

import rich.box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pydispatch.cli_output import print_json
from pydispatch.demo.report import Report, TenantReport
from pydispatch.demo.scene import Look, Tenant

__all__ = ["Screen"]

_PAGE = 108  # columns where there is no terminal; with less, the limits are left out


class Screen:
    """Where the demo talks to.

    Attributes:
        pause: Seconds between two looks worth showing.
    """

    def __init__(self, *, as_json: bool) -> None:
        terminal = sys.stdout.isatty()
        self._as_json = as_json
        self._console = Console(width=None if terminal else _PAGE, highlight=False)
        self._wide = self._console.width >= _PAGE
        self._live: Live | None = None
        self._tenants: tuple[Tenant, ...] = ()
        self._line_at = 0.0
        self.pause = 0.1

    def say(self, line: str) -> None:
        """Print a line, unless JSON is wanted."""
        if not self._as_json:
            self._console.print(line)

    @contextlib.contextmanager
    def live(self, tenants: tuple[Tenant, ...]) -> Iterator[None]:
        """Show progress until the end of the block; on a terminal in place."""
        self._tenants = tenants
        self.say(f"{sum(tenant.jobs for tenant in tenants)} jobs of {len(tenants)} tenants:")
        if self._as_json or not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, refresh_per_second=8) as self._live:
            yield
        self._live = None

    def show(self, looks: dict[str, Look], seconds: float) -> None:
        """Show where the jobs are."""
        if self._live is not None:
            self._live.update(self._progress(looks, seconds))
        elif seconds >= self._line_at:
            self._line_at = seconds + 1
            done = "  ".join(
                f"{tenant.name} {looks[tenant.name].done}/{tenant.jobs}" for tenant in self._tenants
            )
            self.say(f"{seconds:5.1f} s  {done}")

    def _progress(self, looks: dict[str, Look], seconds: float) -> Table:
        table = self._table(
            ("waiting", "right"),
            ("running", "right"),
            ("done", "right"),
            (f"after {seconds:.1f} s", "left"),
            ("", "left"),
        )
        for tenant in self._tenants:
            look = looks[tenant.name]
            self._add(
                table,
                tenant,
                str(look.waiting),
                str(look.running),
                f"{look.done}/{tenant.jobs}",
                ProgressBar(total=tenant.jobs, completed=look.done, width=20 if self._wide else 15),
                Text(look.why if look.waiting and look.why else "", "dim"),
            )
        return table

    def close(self, report: Report) -> None:
        """Show the closing table and what was proven."""
        if self._as_json:
            print_json(report.as_dict())
            return
        table = self._table(
            ("jobs", "right"),
            ("at once", "right"),
            ("admitted/s", "right"),
            ("started/s", "right"),
            ("first wait", "right"),
            ("last wait", "right"),
        )
        for limits, row in zip(report.tenants, report.reports, strict=True):
            self._add(table, limits, *_cells(limits, row))
        self._console.print()
        self._console.print(table)
        self._console.print(
            "Most seen / most allowed, from the log that the jobs kept. A start trails its "
            f"admission by the time in the queue (up to {report.longest_in_queue * 1000:.0f} ms), "
            "which the bound of started/s allows for.",
            style="dim",
        )
        self._console.print()
        style = "bold green" if report.kept else "bold red"
        self._console.print(Text(report.proven, style))

    def _table(self, *columns: tuple[str, Literal["left", "right"]]) -> Table:
        """Make a table of tenants."""
        table = Table(box=rich.box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        table.add_column("tenant", no_wrap=True)
        if self._wide:
            table.add_column("limits", no_wrap=True)
        for name, justify in columns:
            table.add_column(name, justify=justify, no_wrap=True)
        return table

    def _add(self, table: Table, tenant: Tenant, *cells: RenderableType) -> None:
        """Add a tenant's row."""
        table.add_row(tenant.name, *([tenant.limits] if self._wide else []), *cells)


def _cells(limits: Tenant, row: TenantReport) -> list[Text]:
    bound = row.most_in_a_second(limits)
    bound_of_starts = row.most_in_a_second(limits, row.longest_in_queue or 0)
    return [
        Text(str(row.ran)) if row.ran == limits.jobs else _beside(row.ran, limits.jobs, good=False),
        _beside(row.running, limits.cap),
        _beside(row.admitted, bound),
        _beside(row.started, bound_of_starts),
        _seconds(row.first_wait),
        _seconds(row.last_wait),
    ]


def _beside(seen: int, allowed: int | None, good: bool | None = None) -> Text:
    if allowed is None:
        return Text(str(seen))
    good = seen <= allowed if good is None else good
    return Text(f"{seen} / {allowed}", "green" if good else "bold red")


def _seconds(value: float | None) -> Text:
    return Text("-" if value is None else f"{value:.2f} s")
