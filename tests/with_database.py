"""Run a command with a database at hand: ``python -m tests.with_database pg_prove pgtap``.

The database holds procrastinate's schema, ours and pgTAP. The command finds it through libpq's
variables, and the server's own programs, such as psql, in its path.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.fixtures import create_database, load_pgtap, start_server


def main(command: list[str]) -> int:
    """Run the command and return its exit status."""
    with start_server() as server:
        create_database(server, "dispatch")
        load_pgtap(server.dsn("dispatch"))
        environment = {
            **os.environ,
            **server.environment("dispatch"),
            "PATH": f"{server.bin_dir}{os.pathsep}{os.environ['PATH']}",
        }
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
