"""The pgTAP files are plain SQL: pgTAP's own runner takes them as pytest does."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import psycopg
import pytest

from pydispatch.embedded import EmbeddedPostgres
from tests.extensions import UnavailableError, unpack_debian

FILES = sorted(Path(__file__).parent.parent.glob("pgtap/test_*.sql"))


@pytest.fixture
def pg_prove() -> list[str]:
    """The command, installed or unpacked from Debian's package."""
    if installed := shutil.which("pg_prove"):
        return [installed]
    perl = shutil.which("perl")
    if perl is None:
        pytest.skip("no perl to run pg_prove with")
    try:
        package = unpack_debian("libtap-parser-sourcehandler-pgtap-perl")
    except UnavailableError as error:
        pytest.skip(f"no pg_prove: {error}")
    return [perl, f"-I{package}/usr/share/perl5", f"{package}/usr/bin/pg_prove"]


def test_files_pass_under_pg_prove(
    pg_prove: list[str], server: EmbeddedPostgres, pgtap_connection: psycopg.Connection
):
    environment = {
        **os.environ,
        **server.environment(pgtap_connection.info.dbname),
        "PATH": f"{server.bin_dir}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [*pg_prove, *map(str, FILES)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Result: PASS" in done.stdout
