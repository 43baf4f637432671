"""The CPU module that a sanitizer or ``make coverage`` instruments, in the place of the installed one."""

from __future__ import annotations

import importlib.util
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
