"""``python -m jax_baracuda tune``: kernels against plain JAX on the devices here, as a table of what to pick."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_baracuda._core.call import OpCall
from jax_baracuda._core.selection import Implementation, Interval, Row, TuningTable, device_name, packaged_table
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, value_and_gradient
from jax_baracuda._tools.calls import run_calls
from jax_baracuda._tools.platforms import devices_by_platform

SCALES = (1 / 24, 1 / 5, 1)
"""Of the dimensions that have MIN_SCALED_SIZE elements or more in the examples that are timed."""
MIN_SCALED_SIZE = 1000
SECONDS_OF_A_RUN = 0.03
MIN_STEPS, MAX_STEPS = 2, 10_000
"""Of the loop that is timed."""
MAX_RATIO_FOR_XLA = 0.95
"""Closer ones are noise, and a kernel needs no more memory than its results."""


class Measurement(NamedTuple):
    """A call of an op, and how long it takes."""

    call: OpCall
    ratio: float
    """The time of plain JAX divided by that of the kernel."""

    @property
    def kind(self) -> tuple[Any, ...]:
        """Calls of one kind differ in their sizes only."""
        options = tuple(sorted(item for item in self.call.params.items() if isinstance(item[1], bool | str)))
        return self.call.op.name, self.call.dtype.name, options, len(self.call.operands), self.call.num_batch_dims


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the table; returns 0, or 2 if a package that it needs is missing."""
    parser = argparse.ArgumentParser(prog="python -m jax_baracuda tune", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("tuning.json"), help="the file (default: tuning.json)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each call, after two to warm up")
    parser.add_argument("--functions", nargs="+", help="public functions whose ops are timed (default: all)")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("rich") is None:
        print("tune needs rich: pip install 'jax_baracuda[bench]'", file=sys.stderr)
        return 2
    from rich.progress import track

    names = options.functions or {example.function.__name__ for example in all_examples()}
    programs = [
        (platform, device, example, dtype, scale)
        for platform, device in devices_by_platform().items()
        for example in all_examples()
        if platform in example.sizes and example.function.__name__ in names
        for dtype, scale in itertools.product(example.dtypes, SCALES)
    ]
    table = packaged_table()
    for platform, of_platform in itertools.groupby(
        track(programs, description="timing"), key=lambda program: program[0]
    ):
        measurements = [
            measurement
            for _, device, example, dtype, scale in of_platform
            for measurement in measure(scaled(example, platform, scale), platform, device, dtype, options.repeats)
        ]
        table = updated(table, measurements, platform, jax.devices(platform)[0])
        table.write(options.output)
    print(f"{options.output}: {len(table.rows)} rows. Use it by jax_baracuda.implementation(table=...).")
    return 0


def scaled(example: Example, platform: str, scale: float) -> Example:
    sizes = {
        dim: max(round(size * scale), 1) if size >= MIN_SCALED_SIZE else size
        for dim, size in example.sizes[platform].items()
    }
    return dataclasses.replace(example, sizes={platform: sizes})


def measure(example: Example, platform: str, device: jax.Device, dtype: str, repeats: int) -> Iterator[Measurement]:
    """Of the ops that an example and its gradient call, where there is a kernel."""
    rng = np.random.default_rng(0)
    operands = jax.device_put(example.make_operands(rng, dtype, platform), device)
    types = jax.eval_shape(example.call(platform), **operands)
    cotangents = jax.device_put(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), types), device)
    for call, arrays in run_calls(
        value_and_gradient(example.call(platform), example.differentiated(dtype)), operands, cotangents
    ):
        if call.unsupported_reason(platform) is None:
            kernel, xla = race(call, arrays, repeats)
            yield Measurement(call, xla / kernel)


def race(call: OpCall, operands: Sequence[jax.Array], repeats: int) -> tuple[float, float]:
    """Median seconds of a call by the kernel, and in plain JAX."""
    loops = [Loop(call, implementation, operands) for implementation in ("kernel", "xla")]
    seconds = [[loop.seconds_of_step() for loop in loops] for _ in range(repeats)]  # in turn: both see the same noise
    kernel, xla = map(statistics.median, zip(*seconds, strict=True))
    return kernel, xla


class Loop:
    """A compiled loop of calls that takes long enough to be timed.

    Its operands are donated and returned: where the op works in place, nothing is copied.
    """

    def __init__(self, call: OpCall, implementation: Implementation, operands: Sequence[jax.Array]):
        self._operands = [jnp.copy(x) for x in operands]
        self._steps, steps = 0, MIN_STEPS
        while self._steps < steps:
            self._steps = steps
            self._program = jax.jit(repeated(call, implementation, steps), donate_argnums=0)
            self.seconds_of_step()
            seconds = max(self.seconds_of_step(), 1e-9)
            steps = min(math.ceil(SECONDS_OF_A_RUN / seconds), MAX_STEPS)
            steps = steps if steps > 2 * self._steps else self._steps

    def seconds_of_step(self) -> float:
        start = time.perf_counter()
        self._operands, results = self._program(self._operands)
        jax.block_until_ready((self._operands, results))
        return (time.perf_counter() - start) / self._steps


def repeated(call: OpCall, implementation: Implementation, steps: int) -> Callable[..., Any]:
    """A loop of calls, in place where the op is: what a step writes, the next one takes."""
    written = dict(call.resolve(call.op.in_place))
    types = call.result_types()
    others = [i for i in range(len(types)) if i not in written.values()]

    def step(_: Any, carry: Any) -> Any:
        operands, _ = jax.lax.optimization_barrier(carry)  # else XLA would move the call out of the loop
        results = call.op.primitive.bind(*operands, **{**call.all_params, "implementation": implementation})
        next_operands = [results[written[i]] if i in written else x for i, x in enumerate(operands)]
        return next_operands, [results[i] for i in others]

    def run(operands: list[jax.Array]) -> Any:
        return jax.lax.fori_loop(0, steps, step, (operands, [jnp.zeros(*types[i]) for i in others]))

    return run


def updated(table: TuningTable, measurements: Sequence[Measurement], platform: str, device: jax.Device) -> TuningTable:
    """The table with these measurements in place of older ones of the same ops on the device."""
    name = device_name(platform)
    measured = f"{f'{os.cpu_count()} cores' if platform == 'cpu' else device.device_kind}, jax {jax.__version__}"
    ops = {measurement.call.op.name for measurement in measurements}
    rows = [row for row in table.rows if not (row.device == name and row.op in ops)]
    by_kind = sorted(measurements, key=lambda x: (x.kind, x.call.sizes()["bytes"]))
    for (op, dtype, options, num_operands, num_batch_dims), of_kind in itertools.groupby(by_kind, key=lambda x: x.kind):
        points = [(x.call.sizes()["bytes"], x.ratio) for x in of_kind]
        for interval, ratio in intervals(points):
            implementation: Implementation = "xla" if ratio < MAX_RATIO_FOR_XLA else "kernel"
            counts = ("operands", (num_operands, num_operands)), ("batch_dims", (num_batch_dims, num_batch_dims))
            sizes = (*counts, ("bytes", interval)) if interval != (None, None) else counts
            rows.append(Row(name, op, implementation, round(ratio, 2), measured, (dtype,), options, sizes))
    return TuningTable(tuple(rows))


def intervals(points: Sequence[tuple[int, float]]) -> Iterator[tuple[Interval, float]]:
    """Of the sizes, in ascending order, where the same is faster; with the geometric mean of the ratios there."""
    low = None
    groups = [list(group) for _, group in itertools.groupby(points, key=lambda x: x[1] < MAX_RATIO_FOR_XLA)]
    for group, following in itertools.zip_longest(groups, groups[1:]):
        high = None if following is None else math.isqrt(group[-1][0] * following[0][0])
        yield (low, high), statistics.geometric_mean(ratio for _, ratio in group)
        low = high


if __name__ == "__main__":
    raise SystemExit(main())
