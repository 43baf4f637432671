"""Runs the examples on documentation pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def run_examples(page: Path) -> dict[str, Any]:
    """Runs a page's Python blocks in order, as one program. Returns the program's global names."""
    program: dict[str, Any] = {}
    for block in re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block[1], page.name, "exec"), program)
    return program
