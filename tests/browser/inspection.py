"""What can be computed in a page: contrast, width, structure, focus. See ``inspection.js``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Page

SCRIPT = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


def faint_text(page: Page) -> list[str]:
    """Return texts, large ones too, whose contrast with what is behind them is below 4.5."""
    return list(_call(page, "faintText", 4.5))


def structure(page: Page) -> list[str]:
    """Return what is wrong with headings, tables, labels, ids and names."""
    return list(_call(page, "structure"))


def too_wide(page: Page) -> list[str]:
    """Return what makes the page wider than its window."""
    return list(_call(page, "tooWide"))


def intruders(page: Page) -> list[str]:
    """Return elements that somebody else's text became."""
    return list(_call(page, "intruders"))


def brightness(page: Page) -> float:
    """Return how bright the page's ground is: 0 (black) to 255 (white)."""
    return float(_call(page, "brightness"))


def mark_stops(page: Page) -> int:
    """Number what the keyboard has to reach, in the page's order; return how many there are."""
    return int(_call(page, "markStops"))


def focused(page: Page) -> dict[str, Any] | None:
    """Describe what has the focus: stop (its number), html, ring, inSight. None: nothing has it."""
    element: dict[str, Any] | None = _call(page, "focused")
    return element


def _call(page: Page, function: str, argument: object = None) -> Any:
    return page.evaluate(f"argument => {{ {SCRIPT}; return {function}(argument); }}", argument)
