"""Every notebook runs without errors, and is kept with the outputs of a complete run."""

import json
import os
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def kernel_of_this_interpreter(folder: Path) -> AsyncKernelManager:
    """A kernel that runs `sys.executable` and imports what the tests import, whatever kernels there are."""
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python",
        # They train, which takes long in programs that are compiled like those of tests.
        "env": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "XLA_FLAGS": ""},
    }
    spec_folder = folder / "kernels" / "python3"
    spec_folder.mkdir(parents=True)
    (spec_folder / "kernel.json").write_text(json.dumps(spec))
    specs = KernelSpecManager(kernel_dirs=[str(spec_folder.parent)])
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.newest_jax_alone
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_stores_its_outputs(path, tmp_path):
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    executed = nbformat.read(path, as_version=4)
    for cell in code_cells(executed):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        executed,
        km=kernel_of_this_interpreter(tmp_path),
        timeout=300,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()  # raises CellExecutionError at the first cell that fails

    for number, (kept, fresh) in enumerate(zip(code_cells(stored), code_cells(executed), strict=True), start=1):
        assert kept.execution_count == number, "run the whole notebook from the top before saving it"
        assert {o.output_type for o in kept.outputs} == {o.output_type for o in fresh.outputs}, kept.source
        assert not any(o.output_type == "error" or o.get("name") == "stderr" for o in kept.outputs), kept.source
