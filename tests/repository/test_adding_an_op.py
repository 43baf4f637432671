"""The files of docs/adding_an_op.md are those of the tree, and its steps work exactly as written: in a copy of the tree
without the op, the suite finds the op of the page, and it passes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nanobind
import pytest
from support import cases

from jax_baracuda._core.native import NATIVE_MODULES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding_an_op.md"
INIT = "jax_baracuda/__init__.py"
OP = "segment_logsumexp"

BOTH_MODULES = '''
"""The installed native module, and the one with the op of the page, as one module. Its op is that of the page."""

from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path


def _loaded(path):
    name = Path(__file__).stem
    module = module_from_spec(spec_from_loader(name, ExtensionFileLoader(name, str(path))))
    module.__spec__.loader.exec_module(module)
    return module


_MODULES = [_loaded(path) for path in sorted(Path(__file__).parent.glob(f"*/{Path(__file__).stem}.*so"))]
ffi_api_version = max(module.ffi_api_version for module in _MODULES)


def targets():
    return {name: handler for module in _MODULES for name, handler in module.targets().items()}


def strategies():
    return {name: of_target for module in _MODULES for name, of_target in module.strategies().items()}


def plan(target, parameters):
    *_, module = [module for module in _MODULES if target in module.targets()]
    return module.plan(target, parameters)


def device_problem():
    return "".join(module.device_problem() for module in _MODULES)
'''


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
    assert result.returncode == 0, f"{command}\n{result.stdout[-6000:]}\n{result.stderr[-3000:]}"


def without_public_name(text: str, import_line: str) -> str:
    """The package's module without the import of the op, and without its name in ``__all__``."""
    return text.replace(import_line, "").replace(f'    "{OP}",\n', "")


def with_public_name(text: str, import_line: str) -> str:
    """The package's module with one more import, and with the op's name in its place in ``__all__``."""
    imports, listed = text.split("\n\n__version__"), re.findall(r'^    ("\w+",)$', text, flags=re.MULTILINE)
    following = min(name for name in listed if name > f'"{OP}"')
    text = f"\n{import_line}\n__version__".join(imports)
    return text.replace(f"    {following}", f'    "{OP}",\n    {following}')


def copied_tree(tree: Path) -> None:
    """Copies the whole tree without the op of the page, and follows the page in the copy."""
    of_page = files_of_page()
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file() and (name == INIT or name not in of_page):  # neither deleted nor of the op
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    for name, text in of_page.items():
        if name == INIT:
            text = with_public_name(without_public_name((tree / name).read_text(), text), text)
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)


def copied_native_code(tree: Path, native: Path) -> None:
    """The native code of the tree, without the sources of other ops: building them all takes minutes."""
    for name in ("cmake", "ffi"):
        shutil.copytree(tree / name, native / name)
    for name in ("CMakeLists.txt", "pyproject.toml"):
        shutil.copy(tree / name, native / name)
    kept = {native / name for name in files_of_page()}
    for source in [*native.glob("ffi/*/**/*.cc"), *native.glob("ffi/*/**/*.cu")]:
        if source.parent.name not in ("core", "engine") and source not in kept:
            source.unlink()


def compile_cuda_kernels(native: Path) -> None:
    """Compiles the CUDA kernels of the page, where there is a compiler."""
    build = native / "build"
    of_page = {str(native / name) for name in files_of_page() if name.endswith(".cu")}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"] in of_page:
            [output] = re.findall(r" -o (\S+)", entry["command"])
            (build / output).parent.mkdir(parents=True, exist_ok=True)
            run(*shlex.split(entry["command"]), cwd=build)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the whole tree, with the files of the page and native modules that have its op."""
    tree, native = tmp_path / "tree", tmp_path / "native"
    copied_tree(tree)
    copied_native_code(tree, native)
    build = native / "build"
    # Prefer the virtual environment's CMake.
    cmake = shutil.which("cmake", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    assert cmake is not None, "pip install cmake"
    is_gpu = cases.PLATFORM == "cuda"
    compiles_cuda = is_gpu or shutil.which("nvcc") is not None or Path("/usr/local/cuda/bin/nvcc").exists()
    run(
        *(cmake, "-S", native, "-B", build, "-D", "CMAKE_BUILD_TYPE=Debug", "-D", "CMAKE_EXPORT_COMPILE_COMMANDS=ON"),
        *("-D", f"Python_EXECUTABLE={sys.executable}", "-D", f"nanobind_DIR={nanobind.cmake_dir()}"),
        *("-D", f"JAX_BARACUDA_CUDA={'ON' if compiles_cuda else 'OFF'}"),
        # Where no GPU runs the CUDA kernels, they need not be fast.
        *(() if is_gpu else ("-D", "JAX_BARACUDA_CUDA_ARCHITECTURES=90-real")),
        *(() if is_gpu else ("-D", "CMAKE_CUDA_FLAGS=--Ofast-compile=max")),
        cwd=native,
    )
    for name in ("_cpu", "_cuda") if is_gpu else ("_cpu",):
        run(cmake, "--build", build, "--target", name, "--parallel", cwd=native)
        core = tree / "jax_baracuda" / "_core"
        (core / f"{name}.py").write_text(BOTH_MODULES)
        installed = NATIVE_MODULES[name.removeprefix("_")].module
        assert installed is not None
        [of_page] = build.glob(f"{name}.*so")
        for folder, module in (("installed", Path(installed.__file__)), ("page", of_page)):
            (core / folder).mkdir(exist_ok=True)
            shutil.copy(module, core / folder / module.name)
    if not is_gpu:
        compile_cuda_kernels(native)
    return tree


def test_files_of_the_page_are_those_of_the_tree() -> None:
    of_page = files_of_page()
    assert of_page.pop(INIT) in (ROOT / INIT).read_text()
    assert of_page == {name: (ROOT / name).read_text() for name in of_page}


def test_page_has_all_files() -> None:
    folders = {str(Path(name).parent) for name in files_of_page()}
    assert folders == {
        "jax_baracuda",
        "jax_baracuda/ops/segment",
        "jax_baracuda/_examples",
        "ffi/segment/logsumexp",
        "tests/segment_logsumexp",
    }


SUITE_OF_THE_OP = " or ".join(
    (
        OP.removeprefix("segment_"),
        "every_op_",
        "every_public_function",
        "has_an_example",
        "public_names",
        "native_targets",
    )
)
"""Cases of the op, by its name, and the tests that find an op or a function that is not declared everywhere."""


def test_op_of_the_page_works(tree: Path) -> None:
    """The tests of the page's op pass, and so does all that the suite derives from its definition and its tables."""
    # Parts of what is random, unless the run names other ones.
    environment = {"JAX_BARACUDA_TEST_STRIDE": "3", "JAX_BARACUDA_MALFORMED_CALLS": "20"} | os.environ
    environment |= {"JAX_BARACUDA_INSTRUMENTED": "", "JAX_BARACUDA_MATRIX_STRIDE": "61"}
    environment |= {"PYTHONPATH": os.pathsep.join((str(tree), os.environ.get("PYTHONPATH", "")))}
    # An editable installation takes precedence over the search path.
    forget = "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'Redirect' not in type(f).__name__]\n"
    arguments = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", SUITE_OF_THE_OP, "tests"]
    pytest_alone = f"import pytest\nsys.exit(pytest.main({arguments}))"
    run(sys.executable, "-c", forget + pytest_alone, cwd=tree, **environment)
