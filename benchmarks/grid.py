"""A random sample of calls of every function against plain JAX: how the ratios of the times are distributed.

``python -m benchmarks --only grid``. Each function runs as users get it, with the implementation that its
rules pick, in a loop inside ``jax.jit``: forward, and forward with gradient.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks import sample
from benchmarks.harness import environment
from benchmarks.record import FORWARD, LOWEST_RATIO, RESULTS, WITH_GRADIENT, GridRun, Ratio, distribution
from benchmarks.timing import Arrays, Loop, compiled_in_batches, num_steps, race
from jax_baracuda._examples.example import value_and_gradient
from jax_baracuda._tools.command_line import INTERRUPTED, integer_from, output_file, parser_of, run
from jax_baracuda._tools.platforms import default_devices, require_kernels

SEED = 1
"""Differs from the seed of the calls that the rules were fitted to."""
REPEATS = 8
NUM_WORST = 10
TRAFFIC_PER_OPERAND_BYTE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Times the sample, writes the record and prints a summary; returns the exit status."""
    parser = parser_of("benchmarks.grid", __doc__, {0: "all calls were timed, or those that --seconds allow"})
    parser.add_argument(
        "--output", type=output_file, help=f"the JSON record (default: cpu_grid.json or gpu_grid.json in {RESULTS})"
    )
    parser.add_argument("--cases", type=integer_from(1), default=400, help="sampled calls (default: 400)")
    parser.add_argument("--seed", type=integer_from(0), default=SEED, help="of the sample")
    sample.add_functions_option(parser, "public functions (default: all)")
    parser.add_argument("--seconds", type=integer_from(1), help="stop after so many, with what was timed by then")
    options = parser.parse_args(arguments)
    backend = default_devices()[0].platform
    require_kernels(default_devices()[0])
    output = options.output or RESULTS / f"{backend}_grid.json"
    platform = "cuda" if backend == "gpu" else backend
    cases = list(sample.draw(platform, options.cases, options.seed, options.functions))
    grid_run = GridRun(environment(), options.seed, len(cases))
    start = time.perf_counter()
    is_interrupted = False
    try:
        for number, of_case in enumerate(timed(cases, platform, options.seconds), 1):
            grid_run.ratios += of_case
            grid_run.timed_calls += bool(of_case)
            print(f"{number}/{len(cases)}", *of_case, sep="\n    ", flush=True)
    except KeyboardInterrupt:
        is_interrupted = True
        print("interrupted", file=sys.stderr)
    grid_run.seconds = round(time.perf_counter() - start, 1)
    grid_run.save(output)
    print(
        summary(grid_run),
        f"{grid_run.timed_calls} of {len(cases)} calls in {grid_run.seconds:.0f} s, wrote {output}",
        sep="\n",
    )
    return INTERRUPTED if is_interrupted else 0


def timed(cases: Sequence[sample.Case], platform: str, seconds: float | None) -> Iterator[list[Ratio]]:
    """The ratios of each case; an empty list if it cannot run here."""
    device = jax.devices()[0]
    compiled = functools.partial(compiled_case, platform, device)
    for case, compiled_or_error in compiled_in_batches(compiled, cases, seconds, functools.partial(print, flush=True)):
        of_case = []
        sizes = case.sizes_text(platform)
        try:
            types, loops_of_passes = compiled_or_error()
            operands = jax.tree.leaves(sample.operands_of(case, types, platform, device))
            for what, loops in loops_of_passes.items():
                # Two runs of one program differ by up to 30 % if they take microseconds, which says nothing about it.
                is_same = loops[0].is_same_program(loops[1])
                (ours, *others), operands = race(loops[:1] if is_same else loops, operands, REPEATS)
                xla = ours if is_same else others[0]
                kernels = loops[0].kernels()
                of_case.append(Ratio(case.example.name, case.dtype, sizes, what, kernels, ours * 1e3, xla * 1e3))
        except jax.errors.JaxRuntimeError as error:
            print(f"{case.example.name} {case.dtype} {sizes}: {error}", file=sys.stderr)
        yield of_case


def compiled_case(
    platform: str, device: jax.Device, case: sample.Case
) -> tuple[tuple[Any, Any], dict[str, list[Loop]]]:
    """Types of operands and cotangents, and for each pass the loops of this package and of plain JAX."""
    example = case.example
    differentiated = example.differentiated(case.dtype)
    passes = {FORWARD: ()} | ({WITH_GRADIENT: differentiated} if differentiated else {})
    types = sample.types_of(case, platform, device)
    leaves, structure = jax.tree.flatten(types)
    num_bytes = TRAFFIC_PER_OPERAND_BYTE * sum(x.size * x.dtype.itemsize for x in leaves)
    steps = num_steps(num_bytes, platform, case.contended_seconds)
    loops = {
        what: [
            Loop(step_of(value_and_gradient(call(platform), names), structure), leaves, steps, device)
            for call in (example.call, example.plain_call)
        ]
        for what, names in passes.items()
    }
    return types, loops


def step_of(function: Callable[..., Any], structure: Any) -> Callable[[Arrays], tuple[Arrays, Arrays]]:
    """A step that returns its operands unchanged."""

    def step(leaves: Arrays) -> tuple[Arrays, Arrays]:
        return leaves, jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))

    return step


def summary(grid_run: GridRun) -> str:
    """The distribution of ratios, for all functions together and for each, and the worst calls."""
    lines = [line_of("all", grid_run.ratios)] if grid_run.ratios else []
    lines += [line_of(name, of_function) for name, of_function in grid_run.by_function().items()]
    worst = sorted(grid_run.ratios, key=lambda ratio: ratio.ratio)[:NUM_WORST]
    return "\n".join([*lines, "Worst:", *(f"  {ratio}" for ratio in worst)])


def line_of(name: str, ratios: Sequence[Ratio]) -> str:
    median, twentieth, below = distribution(ratios)
    return (
        f"{name}: median {median:.2f}, a twentieth below {twentieth:.2f}, {below} of {len(ratios)} below {LOWEST_RATIO}"
    )


if __name__ == "__main__":
    run(main)
