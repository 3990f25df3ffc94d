"""A page that draws itself anew on a terminal until somebody has seen enough."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

try:
    import termios
    import tty
except ImportError:  # no such terminals on Windows: Ctrl-C ends it there
    termios = None  # type: ignore[assignment]

__all__ = ["watch"]

Wait = Callable[[float], str]


def watch(console: Console, draw: Callable[[int], RenderableType], interval: float) -> None:
    """Draw a page each ``interval`` seconds, until q or Ctrl-C is pressed or SIGTERM comes.

    The terminal is afterwards as it was.

    Args:
        console: A terminal.
        draw: Returns the page for the number of lines that there are.
        interval: Seconds between two pages. A key draws the next one at once.
    """
    try:
        with _ended_by_sigterm(), _keys() as wait, Live(console=console, screen=True) as live:
            while True:
                live.update(draw(console.height), refresh=True)
                if wait(interval) in ("q", "Q"):
                    return
    except KeyboardInterrupt:
        return


@contextmanager
def _keys() -> Iterator[Wait]:
    """Give a function that waits for a key, as long as it is told, and returns it or ``""``."""
    if termios is None or not sys.stdin.isatty():

        def sleep(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield sleep
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([file], [], [], seconds)
        return os.read(file, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(file)
        yield wait
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM leave the block, so that the terminal is given back."""

    def leave(number: int, frame: FrameType | None) -> Any:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
