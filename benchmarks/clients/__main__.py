"""Times programs of other packages in plain JAX, redirected and edited, and compares their results.

It prints the rows of a Markdown table, the small programs of all packages first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import jax_baracuda as jb
from benchmarks.clients import MODULES, Program, of_package
from benchmarks.clients.share import share_of_segment_operations
from jax_baracuda._tools.command_line import integer_from, parser_of, run

MIN_ROUNDS, MAX_ROUNDS = 5, 200
MAX_DIFFERENCE = 1.02
"""A program whose time differs by less than this gains nothing."""
HEADER = ("package", "program", "size", "plain", "redirected", "edited", "first trace", "segment operations")
DIFFERS = "differs"
"""A cell says this if results do not agree with those of plain JAX."""


def seconds_of_a_call(program: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program())
    return time.perf_counter() - start


def medians(programs: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Median seconds of each program. They take turns, so that all see the same noise."""
    of_a_round = sum(max(seconds_of_a_call(program) for _ in range(2)) for program in programs)
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, round(seconds / of_a_round)))
    times = [[seconds_of_a_call(program) for program in programs] for _ in range(rounds)]
    return [statistics.median(of_program) for of_program in zip(*times, strict=True)]


def disagreement(program: Program, results: Any, expected: Any) -> str:
    """Empty if the results agree."""
    for actual, right in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        actual, right = (np.asarray(x, np.float64) for x in (actual, right))
        largest = float(np.max(np.abs(right[np.isfinite(right)]), initial=0))
        if not np.allclose(actual, right, program.rtol, program.atol * largest, equal_nan=True):
            return f"differs by {np.nanmax(np.abs(actual - right)):.2g} of {largest:.2g}"
    return ""


def row_of(program: Program, seconds: float) -> list[str]:
    """Times a program. Tells on the standard error what ran, and by how much results differ if they do not agree."""

    def lower(context: contextlib.AbstractContextManager[Any]) -> tuple[jax.stages.Lowered, float]:
        """The program, lowered inside the context, and the seconds of a core that tracing and lowering it take."""
        jax.clear_caches()
        with context:
            start = time.process_time()
            lowered = jax.jit(lambda *arguments: program.step(*arguments)).lower(*program.arguments)
            return lowered, time.process_time() - start

    redirects = [jb.redirect(indexed_updates=True, slice_updates=True) for _ in range(2)]
    # In turns, and the faster of two, because some packages compute tables on the way, once.
    pairs = [(lower(contextlib.nullcontext()), lower(redirect)) for redirect in redirects]
    first_traces = [min(seconds for _, seconds in of_variant) for of_variant in zip(*pairs, strict=True)]
    edits = [] if program.edit is None else [lower(program.edit())]
    compiled = [functools.partial(lowered.compile(), *program.arguments) for lowered, _ in [*pairs[-1], *edits]]
    print("  " + str(redirects[-1].report).replace("\n", "\n  "), file=sys.stderr)
    expected, *results = [jax.block_until_ready(call()) for call in compiled]
    differences = [disagreement(program, result, expected) for result in results]
    plain, *others = medians(compiled, seconds)
    cells = [f"{plain * 1e3:.3g} ms"]
    for median, difference in zip(others, differences, strict=True):
        cells.append(f"{median * 1e3:.3g} ms ({plain / median:.2f})" + (f", {DIFFERS}" if difference else ""))
        if difference:
            print(f"  {difference}", file=sys.stderr)
    gains = plain / min(plain, *others) > MAX_DIFFERENCE
    share = "" if gains else f"{share_of_segment_operations(compiled[0].func, program.arguments):.0%}"
    return [*cells, *[""] * (1 - len(edits)), f"{first_traces[1] / first_traces[0]:.2f}", share]


def print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    statuses = {0: "all programs ran and agree", 1: "a program did not run, or its results differ"}
    parser = parser_of("benchmarks.clients", __doc__, statuses)
    parser.add_argument("--only", nargs="+", choices=MODULES, default=MODULES, help="packages")
    parser.add_argument("--program", help="programs whose names start like this")
    parser.add_argument("--sizes", nargs="+", type=integer_from(1), help="instead of those of the table")
    parser.add_argument("--seconds", type=integer_from(1), default=2, help="how long each program is timed, at least")
    options = parser.parse_args(arguments)
    failures = 0
    runs: list[tuple[int, str, int]] = []
    for module in options.only:
        try:
            runs += [(rank, module, size) for rank, size in enumerate(options.sizes or of_package(module).SIZES)]
        except ImportError as error:
            print(f"{module}: {error}", file=sys.stderr)
            failures += 1
    print(f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}\n")
    print_row(*HEADER)
    print_row(*["---"] * len(HEADER))
    for _, module, size in sorted(runs, key=lambda run: run[0]):
        package = of_package(module)
        for name, make in package.PROGRAMS.items():
            if not name.startswith(options.program or ""):
                continue
            title = (module.replace("_", "-"), name, f"{size:,} {package.SIZE_OF}")
            print(", ".join(title), file=sys.stderr, flush=True)
            try:
                cells = row_of(make(size), options.seconds)
            except Exception as error:  # the other programs still run
                failures += 1
                print(f"  {type(error).__name__}: {str(error)[:500]}", file=sys.stderr, flush=True)
            else:
                failures += any(DIFFERS in cell for cell in cells)
                print_row(*title, *cells)
    return bool(failures)


if __name__ == "__main__":
    run(main)
