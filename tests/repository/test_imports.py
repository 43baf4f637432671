"""How the files of the package import each other."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import jax_baracuda

ROOT = Path(jax_baracuda.__file__).parents[1]


def imported_files(file: Path) -> set[Path]:
    """The package's files that a file imports, wherever in the file."""
    files = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax_baracuda"):
            folder = ROOT.joinpath(*(node.module or "").split("."))
            names = [folder.with_suffix(".py"), *(folder / f"{alias.name}.py" for alias in node.names)]
            files |= {path for path in names if path.exists()}
    return files - {file}


def test_no_files_import_each_other() -> None:
    """Nor do they in a longer circle, not even within functions or for types alone."""
    imports = {file: imported_files(file) for file in (ROOT / "jax_baracuda").rglob("*.py")}
    assert sum(map(len, imports.values())) > 100
    graphlib.TopologicalSorter(imports).prepare()  # raises an error that names a circle
