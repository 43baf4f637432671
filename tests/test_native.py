"""The native modules: their exports; missing, broken and too new modules; an import without side effects."""

from __future__ import annotations

import ast
import json
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
import pytest
from support import cases

import jax_baracuda
from jax_baracuda._core import native
from jax_baracuda._core.native import KERNEL_PLATFORMS
from jax_baracuda._core.op import OPS

PACKAGE = Path(jax_baracuda.__file__).parent


def run_python(code: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that finds jax_baracuda in the folder `path`, by default where we found it."""
    search_path = [str(path or PACKAGE.parent), *(entry for entry in sys.path if entry)]
    code = textwrap.dedent(code)
    if path is not None:
        # An editable installation answers imports before the search path does.
        forget = "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'Redirect' not in type(f).__name__]\n"
        code = forget + code
    return subprocess.run(
        [sys.executable, "-W", "always::RuntimeWarning", "-c", code],
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

XLA_FFI_Error* NoMemory(XLA_FFI_CallFrame*) { throw std::bad_alloc(); }
XLA_FFI_Error* Failure(XLA_FFI_CallFrame*) { throw std::runtime_error("no such thing"); }
XLA_FFI_Error* Number(XLA_FFI_CallFrame*) { throw 7; }
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
  for (XLA_FFI_Handler* handler : {NoMemory, Failure, Number}) jax_baracuda::CheckedCall(handler, &frame);
}
"""


def test_exceptions_of_handlers_are_errors(tmp_path: Path) -> None:
    """No exception of any type crosses XLA's C interface."""
    root = Path(__file__).parents[1]
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path / "program"
    (tmp_path / "main.cc").write_text(THROWING_HANDLERS)
    sources = [tmp_path / "main.cc", *(root / "ffi" / "core" / f"checked_call{part}.cc" for part in ("", "_cpu"))]
    flags = ["-std=c++17", f"-I{root}", "-isystem", jax.ffi.include_dir()]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(program)], check=True)
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    resource_exhausted, internal = 8, 13
    assert output.splitlines() == [
        f"{resource_exhausted} jax_baracuda: out of host memory",
        f"{internal} jax_baracuda: no such thing",
        f"{internal} jax_baracuda: a handler threw what is no std::exception",
    ]


def test_every_kernel_platform_has_a_module_record() -> None:
    assert set(native.NATIVE_MODULES) == set(KERNEL_PLATFORMS)
    assert cases.PLATFORM in KERNEL_PLATFORMS
    for module in native.NATIVE_MODULES.values():
        assert (module.module is None) == (module.problem is not None)


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

USE_THE_OPS = """
    import warnings
    with warnings.catch_warnings(record=True) as at_import:
        warnings.simplefilter("always")
        import jax_baracuda
    import jax, jax.numpy as jnp, numpy as np
    print("import:", [f"{w.category.__name__}: {w.message}" for w in at_import])
    assert jnp.arange(4).sum() == 6
    data, ids = np.array([1, 5, 5, 2], np.float32), np.array([0, 1, 1, 0])
    loss = lambda x: (jnp.array([3, 8]) * jax_baracuda.segment_max(x, ids, 2)).sum()
    with warnings.catch_warnings(record=True) as at_call:
        warnings.simplefilter("always")
        print("value:", jax_baracuda.segment_max(data, ids, 2).tolist())
        print("gradient:", jax.grad(loss)(data).tolist())
        print("kernels:", jax.jit(jax.grad(loss)).lower(data).as_text().count("@jax_baracuda."))
        for reduce in (jax_baracuda.segment_max, jax_baracuda.segment_min, jax_baracuda.segment_sum,
                       jax_baracuda.segment_mean, jax_baracuda.segment_prod, jax_baracuda.segment_softmax,
                       jax_baracuda.segment_logsumexp):
            jax.grad(lambda x: reduce(x, ids, 2).sum())(data)
            print(reduce.__name__, reduce(data, ids, 2).tolist())
        for reduce in (jax_baracuda.segment_argmax, jax_baracuda.segment_argmin):
            print(reduce.__name__, reduce(data, ids, 2).tolist())
        for reduce in (jax_baracuda.gather_segment_max, jax_baracuda.gather_segment_min,
                       jax_baracuda.gather_segment_mean):
            jax.grad(lambda x: reduce(x, ids, ids, 2).sum())(data)
            print(reduce.__name__, reduce(data, ids, ids, 2).tolist())
        print("segment_order", jax_baracuda.segment_plan(ids, 2).edge_order.tolist())
        gathered = lambda x, w: jax_baracuda.gather_segment_sum(x, ids, ids, 2, weights=w).sum()
        jax.grad(gathered, (0, 1))(data, data)
        print("gather_segment_sum", jax_baracuda.gather_segment_sum(data, ids, ids, 2).tolist())
        print("gather_segment_dot", jax_baracuda.gather_segment_dot(data[:, None], data[:2, None], ids, ids).tolist())
        nodes, edges = data.reshape(4, 1, 1), (np.arange(4), ids)
        attend = lambda x: jax_baracuda.graph_dot_product_attention(x[:2], x, x, *edges)[:, 0, 0]
        jax.grad(lambda x: attend(x).sum())(nodes)
        print("graph_dot_product_attention", attend(nodes).tolist())
        attend = lambda x: jax_baracuda.graph_additive_attention(x[:2], x, x[0], *edges)[:, 0, 0]
        jax.grad(lambda x: attend(x).sum())(nodes)
        print("graph_additive_attention", attend(nodes).tolist())
        attend = lambda x: jax_baracuda.segment_attention(np.zeros(4, np.float32), x, *edges, 2)
        jax.grad(lambda x: attend(x).sum())(data)
        print("segment_attention", attend(data).tolist())
        signal, weight = data[None, None], np.array([[2, 1]], np.float32)
        jax.grad(lambda x: jax_baracuda.causal_conv1d(x, weight).sum())(signal)
        print("causal_conv1d", jax_baracuda.causal_conv1d(signal, weight)[0, 0].tolist())
        y, state = jax_baracuda.causal_conv1d_update(signal[:, :, -1], signal[:, :, :-1], weight)
        print("causal_conv1d_update", [*y[0].tolist(), *state[0, 0].tolist()])
        pair = data.reshape(1, 1, 1, 4), np.array([7])
        jax.grad(lambda x: sum(y.sum() for y in jax_baracuda.rope_qk(x, x, pair[1])))(pair[0])
        jax.grad(lambda x: jax_baracuda.rope(x, pair[1]).sum())(pair[0])
        print("rope", jax_baracuda.rope(*pair)[0, 0, 0].tolist())
        print("where", jax_baracuda.where(data > 2, data, -1).tolist())
        print("where_backward", np.concatenate(jax_baracuda.where_backward(data, data > 2)).tolist())
        jax.grad(lambda x: jax_baracuda.write_slice(x, data[:2], [1]).sum())(data)
        print("write_slice", jax_baracuda.write_slice(data, data[:2], [1]).tolist())
        slots = np.array([3, -1, 3])
        jax.grad(lambda x: jax_baracuda.write_rows(x, data[:3], slots).sum())(data)
        print("write_rows", jax_baracuda.write_rows(data, data[:3], slots).tolist())
    for message in sorted({f"{w.category.__name__}: {w.message}" for w in at_call}):
        print("call:", message)
"""


def copy_of_package(folder: Path, cpu_module: bytes | None) -> None:
    """Copies the package, its CPU module replaced by other bytes or left out."""
    shutil.copytree(PACKAGE, folder / "jax_baracuda", ignore=shutil.ignore_patterns("__pycache__", "_cpu.*"))
    if cpu_module is not None:
        if (module := native.NATIVE_MODULES["cpu"].module) is None:
            cases.skip_for_lack_of("cpu", "there is no CPU module")
        (folder / "jax_baracuda" / "_core" / Path(module.__file__).name).write_bytes(cpu_module)


VALUES = {
    "segment_max": [2, 5],
    "segment_min": [1, 5],
    "segment_sum": [3, 10],
    "segment_mean": [1.5, 5],
    "segment_prod": [2, 25],
    "segment_softmax": [0.26894142, 0.5, 0.5, 0.73105858],
    "segment_logsumexp": [2.31326169, 5.69314718],
    "segment_argmax": [3, 1],
    "segment_argmin": [0, 1],
    "segment_order": [0, 3, 1, 2],
    "gather_segment_max": [1, 5],
    "gather_segment_min": [1, 5],
    "gather_segment_mean": [1, 5],
    "gather_segment_sum": [2, 10],
    "gather_segment_dot": [1, 25, 25, 1],
    "graph_dot_product_attention": [1.73105858, 5],
    "graph_additive_attention": [1.73105858, 5],
    "segment_attention": [1.5, 5],
    "causal_conv1d": [1, 7, 15, 12],
    "causal_conv1d_update": [12, 5, 5, 2],
    "rope": [-2.5310307, 4.4264979, 4.8478693, 2.3448162],
    "where": [-1, 5, 5, -1],
    "where_backward": [0, 5, 5, 0, 1, 0, 0, 2],
    "write_slice": [1, 1, 5, 2],
    "write_rows": [1, 5, 5, 5],
}


def check_values(output: str) -> None:
    assert "value: [2.0, 5.0]" in output
    assert "gradient: [0.0, 4.0, 4.0, 3.0]" in output
    printed = dict(line.split(" ", 1) for line in output.splitlines() if line.split(" ", 1)[0] in VALUES)
    assert {name: pytest.approx(values) for name, values in VALUES.items()} == {
        name: json.loads(values) for name, values in printed.items()
    }


def check_ops_are_plain_jax(output: str, reason: str) -> None:
    check_values(output)
    assert "kernels: 0" in output
    for op in OPS:
        assert f"call: RuntimeWarning: jax_baracuda: {op} runs as plain JAX on cpu: {reason}" in output, output


def test_whole_package_for_comparison() -> None:
    """The script of the two tests below, with the package as it is: kernels run, nothing warns."""
    if cases.native_problem("cpu") is not None:
        cases.skip_for_lack_of("cpu", "there is no CPU module")
    child = run_python(USE_THE_OPS, JAX_PLATFORMS="cpu")
    assert child.returncode == 0, child.stderr
    check_values(child.stdout)
    assert child.stdout.startswith("import: []\n")
    assert "kernels: 2" in child.stdout
    assert "Warning" not in child.stdout


def test_missing_cpu_module(tmp_path: Path) -> None:
    """Without its CPU module the package imports silently, and each op says once that it runs as plain JAX, and why."""
    copy_of_package(tmp_path, None)
    child = run_python(USE_THE_OPS, tmp_path, JAX_PLATFORMS="cpu")
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith("import: []\n")
    check_ops_are_plain_jax(child.stdout, f"there is no CPU module in {tmp_path / 'jax_baracuda' / '_core'}")


@pytest.mark.parametrize("content", [b"", b"this is no shared library\n" * 1000], ids=["empty", "garbage"])
def test_broken_cpu_module(tmp_path: Path, content: bytes) -> None:
    """With a CPU module that does not load, the import warns, says why, and the ops run as plain JAX."""
    copy_of_package(tmp_path, content)
    # Only garbage is tested with every op, because that takes long.
    child = run_python(USE_THE_OPS if content else USE_AN_OP, tmp_path, JAX_PLATFORMS="cpu")
    assert child.returncode == 0, child.stderr
    problem = "the native module jax_baracuda._core._cpu does not load ("
    assert f"RuntimeWarning: jax_baracuda: {problem}" in child.stdout.splitlines()[0]
    assert child.stdout.splitlines()[0].count("RuntimeWarning") == 1
    assert "reinstall jax_baracuda" in child.stdout.splitlines()[0]
    if content:
        check_ops_are_plain_jax(child.stdout, problem)
    else:
        assert "value: [2.0, 5.0]\nkernels: 0\n" in child.stdout


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
    own = {"jax_baracuda", "jax_baracuda.forward_mode", "jax_baracuda._redirect"}
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
