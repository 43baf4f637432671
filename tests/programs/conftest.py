"""Programs of other packages, which `make clients` installs in an environment of their own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from support import cases

import jax_baracuda as jb
from jax_baracuda._tools.table import format_table

Timings = Callable[[str, Callable[[], Any], Callable[[], Any]], None]

MIN_ROUNDS, MAX_ROUNDS, SECONDS_OF_ROUNDS = 7, 500, 1.0
"""How often a program is timed. Steps of a tenth of a millisecond vary by a fifth between calls."""
_rows: list[tuple[str, str, str, str]] = []


def assert_close(results: Any, expected: Any, rtol: float, atol: float, name: str) -> None:
    """Scales `atol` by the largest number, if above 1: after cancellation, a sum is only as exact as its terms."""
    largest = float(np.max(np.abs(expected), initial=1))
    np.testing.assert_allclose(results, expected, rtol, atol * largest, err_msg=name)


def seconds_of_a_call(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


@pytest.fixture(scope="session")
def timings() -> Timings:
    """``timings(name, patched, unpatched)``: times both in turns, and adds their medians to the final table.

    Tests compare the results of kernels, but they time the implementations that the rules of ops choose. For this, both
    programs are traced again.
    """

    def add(name: str, patched: Callable[[], Any], unpatched: Callable[[], Any]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            cases.use_rules(patch)
            jax.clear_caches()
            compiled = [seconds_of_a_call(program) for program in (patched, unpatched) for _ in range(2)]
            rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, round(SECONDS_OF_ROUNDS / (compiled[1] + compiled[3]))))
            times = [(seconds_of_a_call(patched), seconds_of_a_call(unpatched)) for _ in range(rounds)]
        jax.clear_caches()
        ours, theirs = map(statistics.median, zip(*times, strict=True))
        _rows.append((name, f"{ours * 1e3:.2f} ms", f"{theirs * 1e3:.2f} ms", f"{theirs / ours:.2f}"))

    return add


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Matrix products are in float32, not TF32, on GPUs, too: programs are compared to more digits."""
    with jax.default_matmul_precision("float32"):
        yield


@pytest.fixture
def require_calls() -> Callable[..., None]:
    """``require_calls(report, calls=())``: asserts that a call was redirected, and a call of each function in `calls`.

    A call also counts if plain JAX was picked for it.
    """

    def require(report: jb.RedirectReport, calls: Sequence[str] = ()) -> None:
        found = {name for name, *_ in report.calls}
        assert found, report
        assert found.issuperset(calls), f"{calls} in\n{report}"

    return require


@pytest.fixture
def compare_redirected(timings: Timings, require_calls: Callable[..., None]) -> Callable[..., Any]:
    """``compare_redirected(name, step, *arguments, calls=(...))``: compares and times a step with and without redirect.

    Both are compiled. A call must have been redirected, and a call of each function in `calls`.
    """

    def compare(
        name: str,
        step: Callable[..., Any],
        *arguments: Any,
        calls: Sequence[str] = (),
        rtol: float = 2e-4,
        atol: float = 1e-6,
    ) -> Any:
        jax.clear_caches()  # calls are counted while they are traced, in inner jits, too
        redirect = jb.redirect(indexed_updates=True, slice_updates=True)
        plain, redirected = jax.jit(step), redirect(jax.jit(step))
        expected, results = plain(*arguments), redirected(*arguments)
        jax.tree.map(lambda a, b: assert_close(a, b, rtol, atol, name), results, expected)
        require_calls(redirect.report, calls)
        timings(name, lambda: redirected(*arguments), lambda: plain(*arguments))
        return results

    return compare


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _rows:
        terminalreporter.section(f"times on {jax.devices()[0].device_kind}")
        terminalreporter.write_line(format_table(("program", "with jax_baracuda", "as it is", "ratio"), _rows))
