"""Every notebook runs at small size, agrees with plain JAX, and is stored with the outputs of a complete run."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

import jax_baracuda

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
NAMES = ["graph_network", "language_model", "quickstart", "several_devices"]
VERDICT = re.compile(r"\bagrees?\b.*: *(True|False)$", re.MULTILINE)
"""How a notebook prints a comparison. The words alone do not match, because a language model may write them."""
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|Users|root|tmp|usr|opt|var|work|mnt|workspace)/|[A-Z]:\\")
WARNING = re.compile(r":\d+: \w*Warning: ")

of_each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def kernel_of_this_interpreter(folder: Path) -> AsyncKernelManager:
    """A kernel that runs `sys.executable` with the tests' import path, whatever kernels are installed."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python",
        "env": {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "JAX_BARACUDA_NOTEBOOK_SIZE": "small",
            # With one GPU, CPUs serve as several devices.
            "JAX_PLATFORMS": f"{platforms},cpu" if platforms not in ("", "cpu") else platforms,
        },
    }
    spec_folder = folder / "kernels" / "python3"
    spec_folder.mkdir(parents=True)
    (spec_folder / "kernel.json").write_text(json.dumps(spec))
    specs = KernelSpecManager(kernel_dirs=[str(spec_folder.parent)])
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds_of_output(cell: nbformat.NotebookNode) -> set[str]:
    """Without stderr: XLA reports slow compilation there, and a busy machine delivers that below a later cell."""
    return {output.output_type for output in cell.outputs if output.get("name") != "stderr"}


def printed_errors(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == "stderr")


def texts(cell: nbformat.NotebookNode) -> Iterator[str]:
    """The text outputs of a cell."""
    for output in cell.outputs:
        shown = output.get("data", {"text/plain": output.get("text", "")})
        yield from (value for kind, value in shown.items() if kind.startswith("text/"))


def printed(notebook: nbformat.NotebookNode) -> str:
    return "".join(output.text for cell in code_cells(notebook) for output in cell.outputs if "text" in output)


def names_of_packages(source: str) -> Iterator[str]:
    """The imports and all attributes of a cell: `jb.rope` for a package `jb`, `.shape` for anything else."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield f"{node.value.id if isinstance(node.value, ast.Name) else ''}.{node.attr}"


def is_public(name: str) -> bool:
    package, *parts = name.split(".")
    if package == "jb":
        return parts[0] in (*jax_baracuda.__all__, "__version__")
    if package == "jax_baracuda":
        return not parts  # `import jax_baracuda as jb`
    return all(part in ("__version__", "__file__", "__name__") or not part.startswith("_") for part in parts)


def test_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@of_each_notebook
def test_runs_in_small_and_agrees_with_plain_jax(path: Path, tmp_path: Path) -> None:
    stored, executed = (nbformat.read(path, as_version=4) for _ in range(2))
    for cell in code_cells(executed):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        executed,
        km=kernel_of_this_interpreter(tmp_path),
        timeout=300,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()  # raises CellExecutionError at the first cell that fails

    for kept, fresh in zip(code_cells(stored), code_cells(executed), strict=True):
        assert kinds_of_output(kept) == kinds_of_output(fresh), kept.source
        assert "Warning" not in printed_errors(fresh), printed_errors(fresh)
    verdicts = VERDICT.findall(printed(executed))
    assert verdicts and "False" not in verdicts, printed(executed)
    assert len(VERDICT.findall(printed(stored))) == len(verdicts), "the outputs are those of another version"


@of_each_notebook
def test_is_kept_with_the_outputs_of_a_complete_run(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    for number, cell in enumerate(code_cells(stored), start=1):
        assert cell.execution_count == number, "run the whole notebook from the top before saving it"
        assert not any(o.output_type == "error" or o.get("name") == "stderr" for o in cell.outputs), cell.source
        for text in texts(cell):
            assert not MACHINE_PATH.search(text), text
            assert not WARNING.search(text), text
    assert any("image/png" in o.get("data", {}) for cell in code_cells(stored) for o in cell.outputs)
    assert "False" not in VERDICT.findall(printed(stored))


@of_each_notebook
def test_uses_public_names_alone(path: Path) -> None:
    names = {name for cell in code_cells(nbformat.read(path, as_version=4)) for name in names_of_packages(cell.source)}
    assert "jax_baracuda" in names
    assert not [name for name in sorted(names) if not is_public(name)]
