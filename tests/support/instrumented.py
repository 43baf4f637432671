"""The CPU module that a sanitizer or ``make coverage`` instruments, in the place of the installed one."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

NATIVE_MODULE = "jax_baracuda._core._cpu"


def load(folder: str) -> None:
    """Whoever imports the CPU module from now on gets the one in this folder."""
    assert NATIVE_MODULE not in sys.modules
    [path] = Path(folder).glob("_cpu.*.so")
    spec = importlib.util.spec_from_file_location(NATIVE_MODULE, path)
    assert spec is not None and spec.loader is not None
    sys.modules[NATIVE_MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NATIVE_MODULE])


def first_lines() -> str:
    """Of a program whose results shall have the bits of those here; others take the installed module, a faster one."""
    folder = os.environ.get("JAX_BARACUDA_INSTRUMENTED")
    return f"from support import instrumented\ninstrumented.load({folder!r})\n" if folder else ""
