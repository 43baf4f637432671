"""``python -m jax_baracuda report``: what is installed, and what serves each op on each device here, and why."""

from __future__ import annotations

import argparse
import itertools
import platform as python_platform
from collections.abc import Sequence

import jax
import jaxlib

import jax_baracuda
from jax_baracuda._core.native import NATIVE_MODULES, NativeModule, runtime_ffi_api_version
from jax_baracuda._core.op import OPS
from jax_baracuda._core.selection import choose
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import value_and_gradient
from jax_baracuda._tools.calls import traced_calls
from jax_baracuda._tools.platforms import devices_by_platform
from jax_baracuda._tools.race import sizes_text
from jax_baracuda._tools.table import format_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns 0."""
    argparse.ArgumentParser(prog="python -m jax_baracuda report", description=__doc__).parse_args(arguments)
    print("\n\n".join([_versions(), _modules(), _devices(), _ops(), _choices()]))
    return 0


def _versions() -> str:
    major, minor = runtime_ffi_api_version()
    return format_table(
        ("package", "version"),
        [
            ("jax_baracuda", jax_baracuda.__version__),
            ("jax", jax.__version__),
            ("jaxlib", f"{jaxlib.__version__} (XLA FFI API {major}.{minor})"),
            ("Python", python_platform.python_version()),
        ],
    )


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
    if (problem := native.device_problem()) is not None:
        state += f", but not used: {problem}"
    return state


def _devices() -> str:
    rows = [(str(device), device.device_kind, device.platform) for device in jax.devices()]
    return format_table(("device", "kind", "platform"), rows)


def _ops() -> str:
    here = devices_by_platform()
    if "gpu" in {device.platform for device in jax.devices()} and "cuda" not in here:
        here["rocm"] = jax.devices()[0]
    rows = []
    for op in OPS.values():
        for platform in here:
            problem = op.missing_target(platform)
            served_by = "plain JAX, because " + problem if problem else "kernel for " + ", ".join(sorted(op.dtypes))
            rows.append((op.name, platform, served_by))
    return format_table(("op", "on", "served by"), rows)


def _choices() -> str:
    """What is picked for the first example that calls an op, at the sizes of ``race`` where it has those."""
    rows = []
    for platform in devices_by_platform():
        found: set[str] = set()
        for example in all_examples():
            use = platform if platform in example.sizes else "check"
            operands = example.operand_types("float32", use)
            cotangents = jax.eval_shape(example.call(use), **operands)
            programs = [value_and_gradient(example.call(use), x) for x in ((), example.differentiated("float32"))]
            for call in itertools.chain(*(traced_calls(program, operands, cotangents) for program in programs)):
                if call.op.name not in found:
                    found.add(call.op.name)
                    choice = choose(call, platform)
                    of_call = f"{example.name} {sizes_text(example, use)}"
                    rows.append((call.op.name, platform, of_call, choice.implementation, choice.reason))
    return format_table(("op", "on", "in the example", "picked", "because"), rows)


if __name__ == "__main__":
    raise SystemExit(main())
