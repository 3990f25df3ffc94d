"""What is installed from a package index carries the SQL and the dashboard's files."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from pydispatch.migrate import sql_files

ROOT = Path(__file__).parent.parent


def test_wheel_carries_every_file_that_is_no_python(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("dispatch_policy-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = set(archive.namelist())
    assert {f"pydispatch/sql/{file.name}" for file in sql_files()} <= carried
    assert "pydispatch/py.typed" in carried
    web = ROOT / "pydispatch" / "web"
    pages = [file for file in web.rglob("*") if file.suffix in (".css", ".html", ".js", ".svg")]
    assert len(pages) > 10
    assert {str(file.relative_to(ROOT)) for file in pages} <= carried
