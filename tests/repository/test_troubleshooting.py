"""docs/troubleshooting.md quotes the package exactly, and has every reason why a kernel is unsupported or missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_JAX = (
    "Transpose rule (for reverse-mode differentiation) for 'custom_vjp_call' not implemented",
    "Cannot serialize code with custom calls whose targets have no compatibility guarantees",
)


def nodes_of_package() -> Iterator[ast.AST]:
    for path in (ROOT / "jax_baracuda").rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text()))


def strings(tree: ast.AST) -> Iterator[str]:
    """The strings in a tree, with an ellipsis for each inserted value."""
    if isinstance(tree, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in tree.values)
    elif isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree.value
    else:
        for child in ast.iter_child_nodes(tree):
            yield from strings(child)


def messages() -> str:
    """Every string of the Python files, and of the native file that looks for GPUs."""
    found = [text for node in nodes_of_package() if isinstance(node, ast.Module) for text in strings(node)]
    source = (ROOT / "ffi" / "core" / "device_problem_cuda.cc").read_text()
    found.extend(re.findall(r'"([^"\n]*)"', source))
    return "\n".join(found)


def reasons() -> set[str]:
    """The reasons why a kernel is unsupported, and the problems of native modules.

    Advice may follow a semicolon.
    """
    texts = set()
    for node in nodes_of_package():
        if isinstance(node, ast.FunctionDef) and re.search("limit|^problem$|missing_target", node.name):
            returned = [part for part in ast.walk(node) if isinstance(part, ast.Return)]
            texts |= {text for value in returned for text in strings(value)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "_load":
            texts |= set(strings(node.args[2]))
    return texts


def quotations() -> list[str]:
    """The fixed parts of the texts in italics."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"(?<!\*)\*(?!\*)([^*\n]+)\*", page)
    parts = [part.strip(" ,.:()") for text in quoted for part in re.split("…", text)]
    return sorted({part for part in parts if len(part) > 3})


def test_quotations_are_of_the_package() -> None:
    assert len(quotations()) > 30
    text = messages()
    assert [part for part in quotations() if part not in OF_JAX and part not in text] == []


def test_reasons_are_on_the_page() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert len(reasons()) > 12
    parts = {text: [part.strip(" ,.:()") for part in text.split(";")[0].split("…")] for text in reasons()}
    assert [text for text, of_text in parts.items() if not all(part in page for part in of_text)] == []
