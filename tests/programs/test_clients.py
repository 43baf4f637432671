"""The programs of ``benchmarks.clients``: graph networks, force fields, Ewald sums, language models and simulations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from programs.conftest import Timings, assert_close

from benchmarks.clients import MODULES, programs_of, small_program

NAMES = [(module, name) for module in MODULES for name in programs_of(module)]
EDITED = [
    (module, name) for module, name in NAMES if module in ("energnn", "tunix") or name.startswith(("GAT", "ViSNet"))
]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda value: value)
def test_redirected(compare_redirected: Callable[..., Any], module: str, name: str) -> None:
    program = small_program(module, name)
    compare_redirected(f"{module}, {name}", program.step, *program.arguments, rtol=program.rtol, atol=program.atol)


@pytest.mark.parametrize(("module", "name"), EDITED, ids=lambda value: value)
def test_edited(timings: Timings, module: str, name: str) -> None:
    """The package's sums, gathers or rotations are replaced by ours. If they are deterministic, all runs are equal."""
    program = small_program(module, name)
    assert program.edit is not None
    plain, edited = (jax.jit(lambda *arguments: program.step(*arguments)) for _ in range(2))

    def run_edited() -> Any:
        with program.edit():
            return edited(*program.arguments)

    jax.clear_caches()  # inner jits are traced again
    results = run_edited()
    jax.clear_caches()
    expected = plain(*program.arguments)
    jax.tree.map(lambda a, e: assert_close(a, e, program.rtol, program.atol, name), results, expected)
    if name.endswith("deterministic"):
        jax.tree.map(np.testing.assert_array_equal, run_edited(), results)
    timings(f"{module}, {name}, edited", run_edited, lambda: plain(*program.arguments))
