"""Loads the native modules and registers their handlers with XLA."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import types
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import jaxlib.version


class Plan(NamedTuple):
    """How a native kernel runs a call."""

    strategy: str
    scratch_bytes: int
    """The size of the scratch memory, which is an extra last result."""


@dataclasses.dataclass(frozen=True)
class NativeModule:
    """A native module, or the reason why it is missing."""

    platform: str
    """JAX's name of the platform: "cpu" or "cuda"."""
    module: types.ModuleType | None
    targets: frozenset[str]
    problem: str | None
    """Why `module` is None, and what to do about it."""

    @functools.cached_property
    def device_problem(self) -> str | None:
        """Why a local device of the platform cannot run the kernels, and what to do about it; None if all can.

        Creates no CUDA context. None if there is no GPU at all: programs may be exported for one.
        """
        return None if self.module is None or self.platform == "cpu" else self.module.device_problem() or None

    def plan(self, target: str, parameters: dict[str, int]) -> Plan:
        """How the target runs a call with these extents and flags."""
        assert self.module is not None
        return Plan(*self.module.plan(target, parameters))

    def strategies(self) -> dict[str, tuple[str, ...]]:
        """The strategies of each target, from which `plan` chooses."""
        assert self.module is not None
        return self.module.strategies()


def runtime_ffi_api_version() -> tuple[int, int]:
    """The (major, minor) version of XLA's FFI API in the installed jaxlib, read from the header that it ships."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text()
    found = [re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
    if not all(found):
        raise ImportError(f"jax_baracuda: {header} does not state the version of XLA's FFI API")
    major, minor = (int(match.group(1)) for match in found if match)
    return major, minor


def check_ffi_api_version(built: tuple[int, int], runtime: tuple[int, int], module_name: str) -> None:
    """Raises ImportError unless handlers built for FFI API `built` run on jaxlib's `runtime`.

    A handler that is newer than the runtime must not be registered: it would leave JAX without a backend.
    """
    if built[0] != runtime[0] or built[1] > runtime[1]:
        raise ImportError(
            f"jax_baracuda: {module_name} was built for XLA FFI API {built[0]}.{built[1]}, but the installed jaxlib "
            f"{jaxlib.version.__version__} has {runtime[0]}.{runtime[1]}. Install a newer jaxlib "
            "(pip install -U jax jaxlib) or build jax_baracuda from source against this one. "
            "JAX itself is not affected."
        )


def _load(platform: str, name: str, missing: str) -> NativeModule:
    full_name = f"jax_baracuda._core.{name}"
    try:
        module = importlib.import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name != full_name:
            raise
        return NativeModule(platform, None, frozenset(), missing)
    except ImportError as error:
        problem = f"the native module {full_name} does not load ({error}); reinstall jax_baracuda"
        warnings.warn(f"jax_baracuda: {problem}. Its ops run as plain JAX on {platform}.", RuntimeWarning, stacklevel=2)
        return NativeModule(platform, None, frozenset(), problem)
    check_ffi_api_version(module.ffi_api_version, runtime_ffi_api_version(), full_name)
    targets = module.targets()
    for target, handler in targets.items():
        jax.ffi.register_ffi_target(target_name(target), handler, platform={"cpu": "cpu", "cuda": "CUDA"}[platform])
    return NativeModule(platform, module, frozenset(targets), None)


def target_name(target: str) -> str:
    """The name under which XLA knows a handler."""
    return f"jax_baracuda.{target}"


def missing_target(platform: str, target: str | None) -> str | None:
    """Why the platform has no handler of this name (None: any handler); None if it has one."""
    native = NATIVE_MODULES.get(platform)
    if native is None:
        return f"there are kernels for {' and '.join(KERNEL_PLATFORMS)} only"
    if native.problem is not None:
        return native.problem
    if target is not None and target not in native.targets:
        return f"the {platform} module has no target of this name"
    return native.device_problem


KERNEL_PLATFORMS = ("cpu", "cuda")

_cpu = _load(
    "cpu",
    "_cpu",
    f"there is no CPU module in {Path(__file__).parent}; if that is a source tree, install it (pip install .) and "
    "run from another folder, else reinstall jax_baracuda",
)
_reason = getattr(_cpu.module, "without_cuda", "")
_cuda = _load(
    "cuda",
    "_cuda",
    f"this installation was built without CUDA{_reason and f' because {_reason}'}; "
    "in a clone of the repository, JAX_BARACUDA_CUDA=ON pip install . builds the CUDA kernels",
)
NATIVE_MODULES: dict[str, NativeModule] = {native.platform: native for native in (_cpu, _cuda)}
