"""Serves an ASGI application on a free port of the loopback interface."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from tests.support import wait_for


@contextlib.contextmanager
def serve(application: Any, port: int = 0) -> Iterator[str]:
    """Serve it from a thread until the ``with`` block ends; gives the URL, without a slash."""
    server = uvicorn.Server(
        uvicorn.Config(
            application,
            log_level="error",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=1,
        )
    )
    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive())
            assert server.started, "the dashboard does not start"
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
