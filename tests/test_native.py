"""The native modules: their exports; missing, broken and too new modules; an import without side effects."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import textwrap
import typing
from pathlib import Path
from types import SimpleNamespace

import jax
import jaxlib
import numpy as np
import pytest
from support import cases, recorded
from support.programs import exact_operands

import jax_baracuda
from jax_baracuda._core import native
from jax_baracuda._core.native import KERNEL_PLATFORMS
from jax_baracuda._core.op import OPS

PACKAGE = Path(jax_baracuda.__file__).parent


def run_python(
    code: str, path: Path | None = None, *arguments: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that finds jax_baracuda in the folder `path`, by default where we found it."""
    search_path = [str(path or PACKAGE.parent), *(entry for entry in sys.path if entry)]
    code = textwrap.dedent(code)
    if path is not None:
        # An editable installation answers imports before the search path does.
        forget = "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'Redirect' not in type(f).__name__]\n"
        code = forget + code
    return subprocess.run(
        [sys.executable, "-W", "always::RuntimeWarning", "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd="/",
    )


@pytest.mark.parametrize("platform", KERNEL_PLATFORMS)
def test_target_table(platform: str) -> None:
    """The C++ table and the Python definitions name the same targets."""
    module = native.NATIVE_MODULES[platform].module
    if module is None:
        cases.skip_for_lack_of(platform, f"{platform}: {native.NATIVE_MODULES[platform].problem}")
    assert set(module.targets()) == set(OPS)
    assert native.NATIVE_MODULES[platform].targets == set(OPS)


@pytest.mark.parametrize("platform", KERNEL_PLATFORMS)
def test_ffi_api_version(platform: str) -> None:
    """Loaded modules were built for an FFI API that is not newer than the runtime's."""
    module = native.NATIVE_MODULES[platform].module
    if module is None:
        cases.skip_for_lack_of(platform, f"{platform}: {native.NATIVE_MODULES[platform].problem}")
    runtime = native.runtime_ffi_api_version()
    assert module.ffi_api_version[0] == runtime[0]
    assert module.ffi_api_version[1] <= runtime[1]
    native.check_ffi_api_version(module.ffi_api_version, runtime, platform)


def test_device_problem() -> None:
    """The CUDA module is asked for problems of a GPU once, and only on demand. CPUs have no problem."""
    answers = ["the GPU is too old; buy another", "", "never asked for"]
    module = SimpleNamespace(device_problem=lambda: answers.pop(0))
    bad, good = (native.NativeModule("cuda", module, frozenset(), None) for _ in range(2))
    assert bad.device_problem == bad.device_problem == "the GPU is too old; buy another"
    assert good.device_problem is good.device_problem is None
    assert answers == ["never asked for"]
    assert native.NativeModule("cpu", module, frozenset(), None).device_problem is None
    assert native.NativeModule("cuda", None, frozenset(), "was not built").device_problem is None


ASK_FOR_PROBLEMS = """
    import ctypes
    from jax_baracuda._core.native import NATIVE_MODULES
    module = NATIVE_MODULES["cuda"].module
    print([module.device_problem(x) for x in ("", "20", "10-virtual", "75-real", "native")])
    print(NATIVE_MODULES["cuda"].device_problem)
    cuda, count, flags, is_active = ctypes.CDLL("libcuda.so.1"), *(ctypes.c_int() for _ in range(3))
    assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    for device in range(count.value):
        cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
        print(f"GPU {device}:", is_active.value)
"""


@pytest.mark.skipif(cases.PLATFORM != "cuda", reason="there is no GPU")
def test_device_problem_of_gpus() -> None:
    """The problem names a GPU that a build does not support. No CUDA context is made on any GPU to find out."""
    child = run_python(ASK_FOR_PROBLEMS)
    assert child.returncode == 0, child.stderr
    problems, own_problem, *contexts = child.stdout.splitlines()
    nothing, old, old_ptx, old_code, native_build = ast.literal_eval(problems)
    for problem in (nothing, old_code):
        assert problem.startswith("this module has no code for GPU 0, ")
        assert "JAX_BARACUDA_CUDA_ARCHITECTURES=" in problem
    assert old == old_ptx == native_build == ""
    assert own_problem == "None"
    assert contexts and all(line.endswith(": 0") for line in contexts)


THROWING_HANDLERS = """
#include <cstdio>
#include <new>
#include <stdexcept>

#include "ffi/core/checked_call.h"

using jax_baracuda::Arguments;

void BadArgument(Arguments&) { throw std::invalid_argument("x is wrong"); }
void NoMemory(Arguments&) { throw std::bad_alloc(); }
void Failure(Arguments&) { throw std::runtime_error("no such thing"); }
void Number(Arguments&) { throw 7; }
XLA_FFI_Error* Print(XLA_FFI_Error_Create_Args* error) {
  std::printf("%d %s\\n", error->errc, error->message);
  return nullptr;
}

int main() {
  XLA_FFI_Api api{};
  api.XLA_FFI_Error_Create = Print;
  XLA_FFI_CallFrame frame{};
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  for (jax_baracuda::Handler* handler : {BadArgument, NoMemory, Failure, Number}) {
    jax_baracuda::CheckedCall("some_op", handler, &frame);
  }
}
"""


def test_exceptions_of_handlers_are_errors(tmp_path: Path) -> None:
    """No exception of any type crosses XLA's C interface."""
    root = Path(__file__).parents[1]
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "program"
    (tmp_path / "main.cc").write_text(THROWING_HANDLERS)
    sources = [tmp_path / "main.cc", root / "ffi" / "core" / "checked_call.cc"]
    flags = ["-std=c++17", f"-I{root}", "-isystem", jax.ffi.include_dir()]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    invalid_argument, resource_exhausted, internal = 3, 8, 13
    assert output.splitlines() == [
        f"{invalid_argument} some_op: x is wrong",
        f"{resource_exhausted} some_op: out of host memory",
        f"{internal} some_op: no such thing",
        f"{internal} some_op: a handler threw what is no std::exception",
    ]


def test_every_kernel_platform_has_a_module_record() -> None:
    assert set(native.NATIVE_MODULES) == set(KERNEL_PLATFORMS)
    assert cases.PLATFORM in KERNEL_PLATFORMS
    for module in native.NATIVE_MODULES.values():
        assert (module.module is None) == (module.problem is not None)


def test_the_cpu_module_knows_why_there_is_no_cuda_module() -> None:
    cpu, cuda = (native.NATIVE_MODULES[platform] for platform in ("cpu", "cuda"))
    if cpu.module is None:
        cases.skip_for_lack_of("cpu", f"cpu: {cpu.problem}")
    if cuda.module is None and cpu.module.without_cuda:  # empty where the two modules were built separately
        assert f"built without CUDA because {cpu.module.without_cuda}; " in cuda.problem
        assert "JAX_BARACUDA_CUDA=ON pip install ." in cuda.problem


@pytest.mark.parametrize(
    ("built", "runtime", "is_fine"),
    [
        ((0, 1), (0, 1), True),
        ((0, 1), (0, 5), True),
        ((0, 2), (0, 1), False),
        ((1, 0), (0, 9), False),
        ((0, 1), (1, 1), False),
    ],
)
def test_check_ffi_api_version(built: tuple[int, int], runtime: tuple[int, int], is_fine: bool) -> None:
    """A handler runs on a runtime of the same major version with the same or a later minor version."""
    if is_fine:
        native.check_ffi_api_version(built, runtime, "some_module")
        return
    expected = (
        rf"jax_baracuda: some_module was built for XLA FFI API {built[0]}\.{built[1]}, but the installed jaxlib "
        rf"{jaxlib.__version__} has {runtime[0]}\.{runtime[1]}\. Install a newer jaxlib .*JAX itself is not affected"
    )
    with pytest.raises(ImportError, match=expected):
        native.check_ffi_api_version(built, runtime, "some_module")


def test_runtime_ffi_api_version_without_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that states no version gives an error that names the header."""
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define SOMETHING_ELSE 1\n")
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.raises(ImportError, match=f"jax_baracuda: {header} does not state the version"):
        native.runtime_ffi_api_version()


def test_module_that_is_too_new(tmp_path: Path) -> None:
    """On an older runtime the import fails with a clear error, registers nothing, and JAX still works."""
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 0\n#define XLA_FFI_API_MINOR 0\n")
    child = run_python(
        f"""
        import jax, jax.numpy as jnp
        registered = []
        jax.ffi.register_ffi_target = lambda name, *args, **kwargs: registered.append(name)
        jax.ffi.include_dir = lambda: {str(tmp_path)!r}
        try:
            import jax_baracuda
        except ImportError as error:
            print(error)
        print(registered, jnp.arange(4).sum())
        """
    )
    assert child.returncode == 0, child.stderr
    error, jax_works = child.stdout.strip().splitlines()
    assert error.startswith("jax_baracuda: jax_baracuda._core._")
    assert "Install a newer jaxlib" in error and "has 0.0" in error
    assert jax_works == "[] 6"


USE_AN_OP = """
    import warnings
    with warnings.catch_warnings(record=True) as at_import:
        warnings.simplefilter("always")
        import jax_baracuda
    import jax, numpy as np
    print("import:", [f"{w.category.__name__}: {w.message}" for w in at_import])
    call = jax.jit(lambda x: jax_baracuda.segment_max(x, np.array([0, 1, 1, 0]), 2))
    data = np.array([1, 5, 5, 2], np.float32)
    print("value:", call(data).tolist())
    print("kernels:", call.lower(data).as_text().count("@jax_baracuda."))
"""

USE_EVERY_OP = """
    import sys
    import warnings
    with warnings.catch_warnings(record=True) as at_import:
        warnings.simplefilter("always")
        import jax_baracuda
    print("import:", [f"{w.category.__name__}: {w.message}" for w in at_import])
    import numpy as np
    import test_native
    with warnings.catch_warnings(record=True) as at_call:
        warnings.simplefilter("always")
        np.savez(sys.argv[1], **test_native.results_of_every_op())
    for message in sorted({f"{w.category.__name__}: {w.message}" for w in at_call}):
        print("call:", message)
"""


def results_of_every_op() -> dict[str, np.ndarray]:
    """Results of programs of examples, at least one for each op."""
    rng = np.random.default_rng(0)
    programs = {(example.name, i): example for op in sorted(OPS) for example, i in recorded.callers()[op][:1]}
    results = {}
    for (name, i), example in programs.items():
        program = jax.jit(recorded.programs_of(example)[i])
        leaves = jax.tree.leaves(program(exact_operands(rng, example)))
        results |= {f"{name}, program {i}, result {k}": np.asarray(x) for k, x in enumerate(leaves)}
    return results


def copy_of_package(folder: Path, cpu_module: bytes | None) -> None:
    """Copies the package, its CPU module replaced by other bytes or left out."""
    shutil.copytree(PACKAGE, folder / "jax_baracuda", ignore=shutil.ignore_patterns("__pycache__", "_cpu.*"))
    if cpu_module is not None:
        if (module := native.NATIVE_MODULES["cpu"].module) is None:
            cases.skip_for_lack_of("cpu", "there is no CPU module")
        (folder / "jax_baracuda" / "_core" / Path(module.__file__).name).write_bytes(cpu_module)


def check_ops_are_plain_jax(child: subprocess.CompletedProcess[str], results: Path, reason: str) -> None:
    """Every op says that it runs as plain JAX, and why. The results are those of the kernels."""
    for op in OPS:
        assert f"call: RuntimeWarning: jax_baracuda: {op} runs as plain JAX on cpu: {reason}" in child.stdout
    expected = results_of_every_op()
    with np.load(results) as actual:
        assert actual.keys() == expected.keys()
        for name, want in expected.items():
            np.testing.assert_allclose(actual[name], want, rtol=2e-5, atol=2e-5, err_msg=name)


def test_missing_cpu_module(tmp_path: Path) -> None:
    """Without its CPU module the package imports silently, and each op says once that it runs as plain JAX, and why."""
    copy_of_package(tmp_path, None)
    child = run_python(USE_EVERY_OP, tmp_path, tmp_path / "results.npz", JAX_PLATFORMS="cpu")
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith("import: []\n")
    problem = f"there is no CPU module in {tmp_path / 'jax_baracuda' / '_core'}"
    check_ops_are_plain_jax(child, tmp_path / "results.npz", problem)


@pytest.mark.parametrize("content", [b"", b"this is no shared library\n" * 1000], ids=["empty", "garbage"])
def test_broken_cpu_module(tmp_path: Path, content: bytes) -> None:
    """With a CPU module that does not load, the import warns, says why, and the ops run as plain JAX."""
    copy_of_package(tmp_path, content)
    child = run_python(USE_AN_OP, tmp_path, JAX_PLATFORMS="cpu")
    assert child.returncode == 0, child.stderr
    of_import, value, kernels = child.stdout.splitlines()
    assert "RuntimeWarning: jax_baracuda: the native module jax_baracuda._core._cpu does not load (" in of_import
    assert of_import.count("RuntimeWarning") == 1 and "reinstall jax_baracuda" in of_import
    assert (value, kernels) == ("value: [2.0, 5.0]", "kernels: 0")
    assert (
        "segment_max runs as plain JAX on cpu: the native module jax_baracuda._core._cpu does not load ("
        in child.stderr
    )


@pytest.mark.versions
def test_import_has_no_side_effects() -> None:
    """Importing prints nothing, warns of nothing, initialises no back end and changes no option of JAX."""
    child = run_python(
        """
        import jax
        from jax._src import xla_bridge
        before = dict(jax.config.values)
        import jax_baracuda
        assert not xla_bridge.backends_are_initialized()
        changed = {name for name, value in jax.config.values.items() if before.get(name, value) is not value}
        assert not changed and set(before) == set(jax.config.values), changed
        """
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")


@pytest.mark.versions
def test_import_adds_little_to_that_of_jax() -> None:
    """The import loads neither tools nor examples. From other packages, it loads only small modules of JAX."""
    child = run_python(
        """
        import sys
        import jax, jax.numpy
        before = set(sys.modules)
        import jax_baracuda
        print(*(name for name in set(sys.modules) - before if name.split(".")[0] not in sys.stdlib_module_names))
        """
    )
    added = {name for name in child.stdout.split() if not name.startswith(("jax_baracuda._core", "jax_baracuda.ops"))}
    own = {"jax_baracuda", *(f"jax_baracuda.{name}" for name in ("forward_mode", "_redirect", "_indexed", "_segments"))}
    of_jax = {"jax.experimental.custom_partitioning", "jax.experimental.xla_metadata", "jax._src.xla_metadata"}
    assert own <= added <= own | of_jax, child.stderr


@pytest.mark.versions
def test_import_needs_no_private_name_of_jax() -> None:
    """If a new JAX renames a private name, features that need the name break, but not the import."""
    child = run_python(
        """
        import builtins
        import_module = builtins.__import__
        def refuse(name, globals=None, *arguments, **options):
            if name.startswith("jax._src") and (globals or {}).get("__name__", "").startswith("jax_baracuda"):
                raise ImportError(name)
            return import_module(name, globals, *arguments, **options)
        builtins.__import__ = refuse
        import jax_baracuda
        """
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")


def test_public_names() -> None:
    """All public names exist and are documented, except type aliases, which cannot have docstrings."""
    assert sorted(jax_baracuda.__all__) == list(jax_baracuda.__all__)
    for name in jax_baracuda.__all__:
        value = getattr(jax_baracuda, name)
        is_alias = typing.get_origin(value) is not None
        assert is_alias or value.__doc__, name
    for name in jax_baracuda.forward_mode.__all__:
        assert getattr(jax_baracuda.forward_mode, name).__doc__, name
