"""Only the database's clock counts: the package asks no other for the time of day."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pydispatch

PACKAGE = Path(pydispatch.__file__).parent
CLOCK = re.compile(r"(.*\.)?(now|utcnow|today|fromtimestamp|time_ns|localtime|gmtime)|time\.time")


def asked(code: str) -> list[str]:
    """Return the functions called in a program that tell the time of day."""
    calls = [node.func for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return [name for name in map(ast.unparse, calls) if CLOCK.fullmatch(name)]


def test_the_package_never_asks_this_machine_for_the_time_of_day() -> None:
    found = {
        str(file.relative_to(PACKAGE)): asked(file.read_text(encoding="utf-8"))
        for file in PACKAGE.rglob("*.py")
    }
    assert len(found) > 10
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_such_a_call_would_be_seen() -> None:
    for call in (
        "datetime.now(utc)",
        "datetime.datetime.utcnow()",
        "time.time()",
        "time.time_ns()",
    ):
        assert asked(f"x = {call}") == [call.partition("(")[0]]
