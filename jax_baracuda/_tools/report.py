"""``python -m jax_baracuda report``: what is installed, and what serves each op on each device here, and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import os
import platform as python_platform
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib.version

import jax_baracuda
from jax_baracuda._core.dispatch import decide
from jax_baracuda._core.native import NATIVE_MODULES, NativeModule, missing_target, runtime_ffi_api_version
from jax_baracuda._core.op import OPS
from jax_baracuda._core.rules import Site
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import value_and_gradient
from jax_baracuda._tools.calls import traced_calls
from jax_baracuda._tools.command_line import parser_of
from jax_baracuda._tools.platforms import BackendError, default_devices, devices_by_platform
from jax_baracuda._tools.table import format_table

PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
VARIABLES = ("JAX_PLATFORMS", "JAX_ENABLE_X64", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
"""The variables that decide which devices JAX finds and what it loads."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns 0, or 1 if JAX has no device to report on. With ``--of``: the status of the script."""
    statuses = {0: "JAX has a device that there are kernels for", 1: "it has none, or cannot start"}
    parser = parser_of("jax_baracuda report", __doc__, statuses)
    parser.usage = f"{parser.prog} [-h] [--of script.py [argument ...]]"
    parser.add_argument(
        "--of",
        nargs=argparse.REMAINDER,
        help="script.py [argument ...]: instead, run this script inside jax_baracuda.redirect, and report what ran for "
        "its calls of jax.ops, its gathers' gradients, indexed updates and slice updates, why, and in which lines they "
        "stand; the exit status is that of the script",
    )
    options = parser.parse_args(arguments)
    if options.of is not None:
        if not options.of or not Path(options.of[0]).is_file():
            parser.error(f"--of needs a file with a Python script, got {' '.join(options.of) or 'nothing'}")
        return _report_of(options.of[0], options.of[1:])
    # First what needs no device: it may show why JAX cannot start.
    print("\n\n".join(filter(None, (_versions(), _variables(), _modules()))), flush=True)
    try:
        print(f"\n{_devices()}\n\n{_ops()}\n\n{_choices()}")
    except BackendError as error:
        print(f"\n{error}")
        return 1
    return 0


def _versions() -> str:
    major, minor = runtime_ffi_api_version()
    plugins = {name: _installed_version(name) for name in PLUGINS}
    return format_table(
        ("package", "version"),
        [
            ("jax_baracuda", jax_baracuda.__version__),
            ("jax", jax.__version__),
            ("jaxlib", f"{jaxlib.version.__version__} (XLA FFI API {major}.{minor})"),
            *((name, version) for name, version in plugins.items() if version is not None),
            ("Python", python_platform.python_version()),
        ],
    )


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _variables() -> str:
    names = (*VARIABLES, *sorted(name for name in os.environ if name.startswith("JAX_BARACUDA_")))
    rows = [(name, os.environ[name]) for name in names if name in os.environ]
    return format_table(("variable", "value"), rows) if rows else ""


def _modules() -> str:
    rows = [(native.platform, _module_state(native)) for native in NATIVE_MODULES.values()]
    return format_table(("native module", "state"), rows)


def _module_state(native: NativeModule) -> str:
    if native.module is None:
        return f"not available: {native.problem}"
    major, minor = native.module.ffi_api_version
    state = f"loaded, built for XLA FFI API {major}.{minor}"
    if native.platform == "cuda":
        state += f", CUDA {native.module.compiler_version}, GPU architectures {native.module.architectures}"
    if (problem := native.device_problem) is not None:
        state += f", but not used: {problem}"
    return state


def _devices() -> str:
    rows = [(str(device), device.device_kind, device.platform) for device in default_devices()]
    return format_table(("device", "kind", "platform"), rows)


def _ops() -> str:
    here = devices_by_platform()
    default = default_devices()
    if "gpu" in {device.platform for device in default} and "cuda" not in here:
        here["rocm"] = default[0]
    rows = []
    for name, op in OPS.items():
        for platform in here:
            problem = missing_target(platform, name)
            dtypes = ", ".join(sorted(op.dtypes_of(name)))
            served_by = "plain JAX, because " + problem if problem else "kernel for " + dtypes
            rows.append((name, platform, served_by))
    return format_table(("op", "on", "served by"), rows)


def _choices() -> str:
    """The choice for the first example that calls each op, at the sizes of ``race`` if the example has them."""
    rows = []
    for platform in devices_by_platform():
        found: set[str] = set()
        for example in all_examples():
            use = platform if platform in example.sizes else "check"
            operands = example.operand_types("float32", use)
            cotangents = jax.eval_shape(example.call(use), **operands)
            programs = [value_and_gradient(example.call(use), x) for x in ((), example.differentiated("float32"))]
            for call in itertools.chain(*(traced_calls(program, operands, cotangents) for program in programs)):
                if call.name not in found:
                    found.add(call.name)
                    choice, fused = (decide(call, Site(platform, fuses)) for fuses in (False, True))
                    picked: str = choice.implementation
                    rows.append((call.name, platform, picked, choice.reason))
                    if fused.implementation != picked:
                        rows.append((call.name, platform, f"{fused.implementation} if fused", fused.reason))
    table = format_table(("op", "on", "picked", "because"), rows)
    return (
        f"{table}\n\nPicked for float32 calls of the sizes that race times; other calls may differ.\n"
        "If fused: where an elementwise operation or a gather, which XLA fuses, makes the\nfirst operand."
    )


# ----------------------------------------------------------------------------------------------------------------------
# ``--of``: what runs for the calls of a program that can be redirected.


def _report_of(script: str, arguments: Sequence[str]) -> int:
    """Runs a script with its calls redirected, and prints the report. Returns the exit status of the script."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as Python does for a script
    context = jax_baracuda.redirect(indexed_updates=True, slice_updates=True)
    status = 0
    report = context.install()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = _status_of(end)
    except Exception as error:
        _print_error(error)
        status = 1
    finally:
        context.uninstall()
    kinds = "indexed_updates=True, slice_updates=True"
    print(f"\nInside redirect({kinds}), {os.path.basename(script)} ran:\n{report.with_lines()}")
    return status


def _print_error(error: Exception) -> None:
    """Prints an error of the script as Python does for a script: without the frames that run it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))


def _status_of(end: SystemExit) -> int:
    if isinstance(end.code, int | None):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1
