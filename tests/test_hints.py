"""Hints and the page that explains them name the same problems."""

from __future__ import annotations

import re
from pathlib import Path

from pydispatch.migrate import sql_root

ROOT = Path(__file__).parent.parent
LEVELS = {"critical", "warning", "info"}


def test_every_hint_is_on_the_operations_page_and_tried() -> None:
    view = (sql_root() / "views" / "20_hints.sql").read_text()
    level = rf"(?:'(?:{'|'.join(LEVELS)})'|end)(?: as level)?"
    given = set(re.findall(rf"{level},\s+'([a-z_]+)'", view)) - LEVELS
    assert len(given) > 10
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.split("\n## Hints\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)) == given
    tests = (ROOT / "pgtap" / "test_94_hints.sql").read_text()
    assert {hint for hint in given if f"{hint}: " not in tests} == set()
