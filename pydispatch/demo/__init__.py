"""``pydispatch demo``: policies at work on a private Postgres, and proof that they were kept.

Everything is real: the migrations, procrastinate's app, its worker and our driver. Six tenants
send some hundred jobs; the worker writes down when each job began and ended, and at the end that
log is held against every limit. The exit status is 1 when a promise was broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Iterator

import psycopg

from pydispatch.cli_output import print_error
from pydispatch.demo.report import Report, measure
from pydispatch.demo.scene import Scene
from pydispatch.demo.screen import Screen
from pydispatch.errors import DispatchError
from pydispatch.migrate import migrate

__all__ = ["main"]

INTERRUPTED = 130


def main(*, as_json: bool = False) -> int:
    """Run the demo and return its exit status.

    0: every promise was kept; 1: one was broken, or the demo could not run; 130: interrupted.

    Args:
        as_json: Print the closing report as one JSON document, and nothing else.
    """
    logging.getLogger("procrastinate").setLevel(logging.CRITICAL)  # a stop is no news here
    screen = Screen(as_json=as_json)
    try:
        # Not at the top: it needs the extra "embedded", and says so.
        from pydispatch.embedded import EmbeddedPostgres

        with _interruptible(), EmbeddedPostgres(settings={"max_connections": "50"}) as server:
            screen.say(f"PostgreSQL {_version(server.dsn())} on a private socket, as it was made")
            applied = migrate(server.dsn(), with_procrastinate=True)
            screen.say(f"applied procrastinate's schema and {len(applied) - 1} files of ours")
            report = asyncio.run(_play(server.dsn(), screen))
    except (KeyboardInterrupt, asyncio.CancelledError):
        screen.say("interrupted: everything is stopped")
        return INTERRUPTED
    except RuntimeError as error:
        print_error(DispatchError(str(error), sqlstate=""), as_json=as_json)
        return 1
    screen.close(report)
    return 0 if report.kept else 1


async def _play(dsn: str, screen: Screen) -> Report:
    """Let everything run until all jobs did, and measure what happened."""
    began = time.monotonic()
    with _cancelled_by_signals():
        async with Scene(dsn) as scene:
            with screen.live(scene.tenants):
                while not await scene.is_over():
                    screen.show(await scene.look(), time.monotonic() - began)
                    await asyncio.sleep(screen.pause)
                screen.show(await scene.look(), time.monotonic() - began)
    with psycopg.connect(dsn) as connection:
        return measure(connection, scene.tenants, time.monotonic() - began)


@contextlib.contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """End the running task in order, where KeyboardInterrupt would break into anything."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Take SIGTERM for what SIGINT is, so that neither leaves a server behind."""
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _version(dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        return connection.info.parameter_status("server_version") or "?"
