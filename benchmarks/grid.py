"""A random sample of calls of every function against plain JAX: how the ratios of the times are distributed.

``python -m benchmarks --only grid``. Each function runs as users get it, with what the tuning table picks, in a loop
inside ``jax.jit``: forward, and forward with gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness import environment
from benchmarks.record import FORWARD, RESULTS, WITH_GRADIENT
from jax_baracuda._core.selection import choose
from jax_baracuda._examples.example import value_and_gradient
from jax_baracuda._tools import grid
from jax_baracuda._tools.calls import traced_calls
from jax_baracuda._tools.command_line import INTERRUPTED, parser_of, positive_number, run
from jax_baracuda._tools.timing import Arrays, Loop, num_steps, prepared, race, workers_for
from jax_baracuda._tools.tune import operands_of

SEED = 1
"""Another one than that of the calls that the table was made from."""
REPEATS = 5
LOWEST_RATIO = 0.97
"""A user who gets less loses more than what times scatter by."""
NUM_WORST = 10
TRAFFIC_PER_OPERAND_BYTE = 3


@dataclasses.dataclass(frozen=True)
class Ratio:
    """What one call takes, and the same in plain JAX."""

    function: str
    """And its variant."""
    dtype: str
    sizes: str
    what: str
    """:data:`benchmarks.record.FORWARD` or :data:`benchmarks.record.WITH_GRADIENT`."""
    picked: str
    """The implementation of each op in it."""
    milliseconds: float
    xla_milliseconds: float

    @property
    def ratio(self) -> float:
        """Plain JAX's time divided by ours."""
        return self.xla_milliseconds / self.milliseconds

    def __str__(self) -> str:
        return (
            f"{self.ratio:.2f}: {self.function}, {self.dtype}, {self.sizes}, {self.what}: {self.milliseconds:.4f} ms, "
            f"plain JAX {self.xla_milliseconds:.4f} ({self.picked})"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Times the sample, writes the record and prints a summary; returns the exit status."""
    backend = jax.default_backend()
    parser = parser_of("benchmarks.grid", __doc__, {0: "all calls were timed"})
    parser.add_argument("--output", type=Path, default=RESULTS / f"{backend}_grid.json", help="the JSON record")
    parser.add_argument("--cases", type=positive_number, default=400, help="sampled calls (default: 400)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the sample")
    parser.add_argument("--functions", nargs="+", default=(), help="public functions (default: all)")
    options = parser.parse_args(arguments)
    platform = "cuda" if backend == "gpu" else backend
    cases = list(grid.sample(platform, options.cases, options.seed, options.functions))
    ratios: list[Ratio] = []
    start = time.perf_counter()
    is_complete = False
    try:
        for done, of_case in enumerate(timed(cases, platform), 1):
            ratios += of_case
            print(f"{done}/{len(cases)}", *of_case, sep="\n    ", flush=True)
        is_complete = True
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    seconds = time.perf_counter() - start
    record = {"environment": environment(), "seed": options.seed, "seconds": round(seconds, 1)}
    record["ratios"] = [dataclasses.asdict(ratio) for ratio in ratios]
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(summary(ratios), f"{seconds:.0f} s, wrote {options.output}", sep="\n")
    return 0 if is_complete else INTERRUPTED


def timed(cases: Sequence[grid.Case], platform: str) -> Iterator[list[Ratio]]:
    """The ratios of each case; none of one that cannot run here."""
    prepare = functools.partial(prepared_passes, platform, jax.devices()[0])
    for case, passes in prepared(prepare, cases, workers_for(platform)):
        of_case = []
        try:
            for what, picked, operands, loops in passes():
                ours, xla = (seconds * 1e3 for seconds in race(loops, operands, REPEATS))
                sizes = case.sizes_text(platform)
                of_case.append(Ratio(case.example.name, case.dtype, sizes, what, picked, ours, xla))
        except jax.errors.JaxRuntimeError as error:
            print(f"{case.example.name} {case.dtype} {case.sizes_text(platform)}: {error}", file=sys.stderr)
        yield of_case


def prepared_passes(
    platform: str, device: jax.Device, case: grid.Case
) -> list[tuple[str, str, list[jax.Array], list[Loop]]]:
    """Of the forward pass, and with the gradient: what is picked, operands, and the loops of ours and of plain JAX."""
    example, dtype = case.example, case.dtype
    operands, cotangents = operands_of(example, dtype, platform, device)
    differentiated = example.differentiated(dtype)
    passes = {FORWARD: ()} | ({WITH_GRADIENT: differentiated} if differentiated else {})
    num_bytes = TRAFFIC_PER_OPERAND_BYTE * sum(x.nbytes for x in jax.tree.leaves((operands, cotangents)))
    prepared_here = []
    for what, names in passes.items():
        functions = [value_and_gradient(call(platform), names) for call in (example.call, example.plain_call)]
        picks = {call.op.name: choose(call, platform) for call in traced_calls(functions[0], operands, cotangents)}
        picked = ", ".join(f"{name}: {choice.implementation}" for name, choice in picks.items())
        leaves, structure = jax.tree.flatten((operands, cotangents))
        loops = [Loop(step_of(function, structure), leaves, num_steps(num_bytes, platform)) for function in functions]
        prepared_here.append((what, picked, [x.copy() for x in leaves], loops))
    return prepared_here


def step_of(function: Callable[..., Any], structure: Any) -> Callable[[Arrays], tuple[Arrays, Arrays]]:
    """A step that leaves its operands as they are."""

    def step(leaves: Arrays) -> tuple[Arrays, Arrays]:
        return leaves, jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))

    return step


def summary(ratios: Sequence[Ratio]) -> str:
    """The distribution, for all functions together and by function, and the calls that lose most."""
    by_function: dict[str, list[float]] = {}
    for ratio in ratios:
        by_function.setdefault(ratio.function.split(",")[0], []).append(ratio.ratio)
    lines = [line_of("all", [ratio.ratio for ratio in ratios])] if ratios else []
    lines += [line_of(name, of_function) for name, of_function in sorted(by_function.items())]
    worst = sorted(ratios, key=lambda ratio: ratio.ratio)[:NUM_WORST]
    return "\n".join([*lines, "Worst:", *(f"  {ratio}" for ratio in worst)])


def line_of(name: str, ratios: Sequence[float]) -> str:
    below = sum(ratio < LOWEST_RATIO for ratio in ratios)
    return (
        f"{name}: median {statistics.median(ratios):.2f}, a twentieth below {np.quantile(ratios, 0.05):.2f}, "
        f"{below} of {len(ratios)} below {LOWEST_RATIO}"
    )


if __name__ == "__main__":
    run(main)
