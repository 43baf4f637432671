"""What docs/troubleshooting.md quotes is what the package says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OF_JAX = (
    "can't apply forward-mode",
    "jvp) to a custom_vjp function",
    "Cannot serialize code with custom calls whose targets have no compatibility guarantees",
)

pytestmark = pytest.mark.newest_jax_alone


def messages() -> str:
    """Every string of the Python files, with dots for what is filled in, and of the file that looks for GPUs."""
    found = []
    for path in (ROOT / "jax_baracuda").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    source = (ROOT / "ffi" / "core" / "device_problem.cu").read_text()
    found.extend(re.findall(r'"([^"\n]*)"', source))
    return "\n".join(found)


def quotations() -> list[str]:
    """The fixed parts of what stands in italics."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"(?<!\*)\*(?!\*)([^*\n]+)\*", page)
    parts = [part.strip(" ,.:()") for text in quoted for part in re.split("…", text)]
    return sorted({part for part in parts if len(part) > 3})


def test_quotations_are_of_the_package() -> None:
    assert len(quotations()) > 30
    text = messages()
    assert [part for part in quotations() if part not in OF_JAX and part not in text] == []
