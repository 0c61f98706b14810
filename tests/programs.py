"""Programs of this checkout, run as a user runs them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def run_example(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess:
    """Run one of the examples with this checkout's cuattn."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        input=stdin,
        capture_output=True,
        encoding="utf-8",
    )
