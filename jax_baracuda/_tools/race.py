"""``python -m jax_baracuda race``: time of this package against XLA on the devices here."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_baracuda._core.example import EXAMPLES, Example
from jax_baracuda._tools.platforms import devices_by_platform
from jax_baracuda._tools.table import format_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table of times; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m jax_baracuda race", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="timed calls per function, after one to warm up")
    repeats = parser.parse_args(arguments).repeats
    rows = []
    for platform, device in devices_by_platform().items():
        for example in EXAMPLES:
            for what, ours, xla in race(example, platform, device, repeats):
                sizes = " ".join(f"{name}={size:,}" for name, size in example.race_sizes[platform].items())
                rows.append((example.name, sizes, device.device_kind, what, ours * 1e3, xla * 1e3))
    print(
        format_table(
            ("op", "float32", "on", "", "jax_baracuda", "XLA", "speed-up"),
            [(*row[:4], f"{row[4]:.3g} ms", f"{row[5]:.3g} ms", f"{row[5] / row[4]:.1f}x") for row in rows],
        )
    )
    print(f"\nMedians of {repeats} calls.")
    return 0


def race(example: Example, platform: str, device: jax.Device, repeats: int) -> Iterator[tuple[str, float, float]]:
    """Yields what was timed and the median seconds of this package and of XLA, for forward and forward + gradient."""
    sizes = example.race_sizes[platform]
    rng = np.random.default_rng()
    operands = [jax.device_put(x, device) for x in example.make_operands(rng, **sizes)]

    def forward(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(lambda *operands: function(*operands, **sizes))

    def forward_and_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(cotangent: jax.Array, first: jax.Array, *others: jax.Array) -> Any:
            value, vjp = jax.vjp(lambda x: function(x, *others, **sizes), first)
            return value, vjp(cotangent)

        return jax.jit(run)

    yield "forward", *(_median_seconds(forward(f), operands, repeats) for f in (example.function, example.plain_jax))
    result = forward(example.function)(*operands)
    cotangent = jax.device_put(jnp.asarray(rng.normal(size=result.shape), result.dtype), device)
    yield (
        "forward + gradient",
        *(
            _median_seconds(forward_and_gradient(f), [cotangent, *operands], repeats)
            for f in (example.function, example.plain_jax)
        ),
    )


def _median_seconds(function: Callable[..., Any], operands: Sequence[jax.Array], repeats: int) -> float:
    jax.block_until_ready(function(*operands))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*operands))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
