"""The steps of docs/adding_an_op.md work exactly as written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nanobind
import pytest
from support import cases

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding_an_op.md"
INIT = "jax_baracuda/__init__.py"


def files_of_page() -> dict[str, str]:
    """The files that the page tells its readers to write, and the line to add to the package."""
    blocks = re.findall(
        r"\*\*`([\w./]+)`\*\*:?\n\n```\w+\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    return dict(blocks)


def run(*command: str | Path, cwd: Path, **environment: str) -> None:
    result = subprocess.run(
        [*map(str, command)], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built tree with the files of the page, the whole package, and the native code that all ops share."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("CMakeLists.txt", "pyproject.toml", "ffi/module_cpu.cc", "ffi/module_cuda.cc"):
        (tree / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    for name in ("cmake", "ffi/core", "tests/support"):
        shutil.copytree(ROOT / name, tree / name)
    shutil.copy(ROOT / "tests" / "conftest.py", tree / "tests")
    shutil.copytree(ROOT / "jax_baracuda", tree / "jax_baracuda", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name, text in files_of_page().items():
        if name == INIT:
            text = (tree / name).read_text() + text
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)
    build = tree / "build"
    # Prefer the virtual environment's CMake.
    cmake = shutil.which("cmake", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    assert cmake is not None, "pip install cmake"
    run(
        *(cmake, "-S", tree, "-B", build, "-D", "CMAKE_BUILD_TYPE=Debug"),
        *("-D", f"Python_EXECUTABLE={sys.executable}", "-D", f"nanobind_DIR={nanobind.cmake_dir()}"),
        *("-D", f"JAX_BARACUDA_CUDA={'ON' if cases.PLATFORM == 'cuda' else 'OFF'}"),
        cwd=tree,
    )
    run(cmake, "--build", build, "--parallel", cwd=tree)
    for module in build.glob("_c*.so"):
        shutil.copy(module, tree / "jax_baracuda" / "_core")
    return tree


def test_page_has_all_files() -> None:
    assert len(files_of_page()) == 10
    assert INIT in files_of_page()


def test_op_of_the_page_works(tree: Path) -> None:
    """The tests of the page's op pass, and the tools know the op."""
    environment = {"PYTHONPATH": os.pathsep.join((str(tree), os.environ.get("PYTHONPATH", "")))}
    environment["JAX_BARACUDA_INSTRUMENTED"] = ""
    # An editable installation takes precedence over the search path.
    forget = "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'Redirect' not in type(f).__name__]\n"
    tests = tree / "tests" / "relu_squared"
    arguments = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(tests)]
    pytest_alone = f"import pytest\nsys.exit(pytest.main({arguments}))"
    run(sys.executable, "-c", forget + pytest_alone, cwd=tree, **environment)
    program = """
import jax, numpy as np
from jax_baracuda import forward_mode, precision_guarantee
from jax_baracuda._examples import examples_of
[example] = examples_of("relu_squared")
operands = example.make_operands(np.random.default_rng(0), "float32", "small")
np.testing.assert_array_equal(example.call("small")(**operands), example.plain_call("small")(**operands))
assert jax.jvp(forward_mode.relu_squared, (3.0,), (1.0,)) == (9, 6)
assert precision_guarantee("relu_squared", "bfloat16", "cpu").accumulator == "float32"
"""
    run(sys.executable, "-c", forget + program, cwd=tree, **environment)
