"""Replaces the installed CPU module by one that a sanitizer or ``make coverage`` instruments."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

NATIVE_MODULE = "jax_baracuda._core._cpu"


def load(folder: str) -> None:
    """Makes later imports of the CPU module return the one in this folder."""
    assert NATIVE_MODULE not in sys.modules
    [path] = Path(folder).glob("_cpu.*.so")
    spec = importlib.util.spec_from_file_location(NATIVE_MODULE, path)
    assert spec is not None and spec.loader is not None
    sys.modules[NATIVE_MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NATIVE_MODULE])


def first_lines() -> str:
    """First lines of a program whose results must have the same bits as those of this process.

    Other programs use the installed module, which is faster.
    """
    folder = os.environ.get("JAX_BARACUDA_INSTRUMENTED")
    return f"from support import instrumented\ninstrumented.load({folder!r})\n" if folder else ""
