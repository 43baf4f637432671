"""Python programs in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_python(program: str, *arguments: object, cwd: Path | None = None, **variables: str) -> str:
    """Runs a program with the tests' import path and returns its output. Raises if the program fails or hangs."""
    child = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
    )
    assert child.returncode == 0, child.stderr[-10_000:]
    return child.stdout
