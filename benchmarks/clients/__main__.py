"""Times programs of other packages in plain JAX, redirected and edited, and compares their results."""

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
from jax_baracuda._tools.command_line import parser_of, run, whole_number
from jax_baracuda._tools.table import format_table

MIN_ROUNDS, MAX_ROUNDS = 5, 200
MAX_DIFFERENCE = 1.02
"""A program whose time differs by less than this gains nothing."""
HEADER = ("client", "program", "size", "plain", "redirected", "ratio", "edited", "ratio", "first trace", "segments")


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
    """Times a program, and tells what is unexpected on the standard error."""
    redirect = jb.redirect(indexed_updates=True, slice_updates=True)

    def lower(context: contextlib.AbstractContextManager[Any]) -> tuple[jax.stages.Lowered, float]:
        """The program, and how long its trace takes. It is lowered inside the context, too."""
        jax.clear_caches()
        with context:
            start = time.perf_counter()
            traced = jax.jit(lambda *arguments: program.step(*arguments)).trace(*program.arguments)
            seconds_to_trace = time.perf_counter() - start
            return traced.lower(), seconds_to_trace

    lower(contextlib.nullcontext())  # some packages compute tables on the way, once
    edits = [] if program.edit is None else [program.edit()]
    lowered = [lower(context) for context in (contextlib.nullcontext(), redirect, *edits)]
    compiled = [functools.partial(variant.compile(), *program.arguments) for variant, _ in lowered]
    expected, *results = [jax.block_until_ready(call()) for call in compiled]
    for name, result in zip(("redirected", "edited"), results, strict=False):
        if difference := disagreement(program, result, expected):
            print(f"  {name}: {difference}", file=sys.stderr)
    print("  " + str(redirect.report).replace("\n", "\n  "), file=sys.stderr)
    plain, redirected, *edited = medians(compiled, seconds)
    gains = plain / min(redirected, *edited, plain) > MAX_DIFFERENCE
    share = "" if gains else f"{share_of_segment_operations(compiled[0].func, program.arguments):.0%}"
    return [
        f"{plain * 1e3:.3g} ms",
        f"{redirected * 1e3:.3g} ms",
        f"{plain / redirected:.2f}",
        *((f"{edited[0] * 1e3:.3g} ms", f"{plain / edited[0]:.2f}") if edited else ("", "")),
        f"{lowered[1][1] / lowered[0][1]:.2f}",
        share,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = parser_of("benchmarks.clients", __doc__, {0: "all programs ran and agree", 1: "a program did not run"})
    parser.add_argument("--only", nargs="+", choices=MODULES, default=MODULES, help="packages")
    parser.add_argument("--program", help="programs whose names start like this")
    parser.add_argument("--sizes", nargs="+", type=whole_number(1), help="instead of the sizes of the tests")
    parser.add_argument("--seconds", type=whole_number(1), default=2, help="how long each program is timed, at least")
    options = parser.parse_args(arguments)
    rows, failures = [], 0
    for module in options.only:
        try:
            package = of_package(module)
        except ImportError as error:
            print(f"{module}: {error}", file=sys.stderr)
            failures += 1
            continue
        for size in options.sizes or [package.SMALL]:
            for name, make in package.PROGRAMS.items():
                if not name.startswith(options.program or ""):
                    continue
                print(f"{module}, {name}, {size} {package.SIZE_OF}", file=sys.stderr, flush=True)
                try:
                    rows.append([module, name, str(size), *row_of(make(size), options.seconds)])
                    print("  " + " | ".join(rows[-1]), file=sys.stderr, flush=True)
                except Exception as error:  # the other programs still run
                    failures += 1
                    print(f"  {type(error).__name__}: {str(error)[:500]}", file=sys.stderr, flush=True)
    print(f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores, jax {jax.__version__}")
    print(format_table(HEADER, rows))
    return bool(failures)


if __name__ == "__main__":
    run(main)
