"""``python -m jax_baracuda race``: time of this package against XLA on the devices here."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, value_and_gradient
from jax_baracuda._tools.platforms import devices_by_platform
from jax_baracuda._tools.table import ProgressiveTable


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table of times; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m jax_baracuda race", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="timed calls per function, after one to warm up")
    repeats = parser.parse_args(arguments).repeats
    devices = devices_by_platform()
    races = [(example, platform) for platform in devices for example in all_examples() if platform in example.sizes]
    table = ProgressiveTable(
        ("op", *(example.name for example, _ in races)),
        ("float32", *(sizes_text(example, platform) for example, platform in races)),
        ("on", *(device.device_kind for device in devices.values())),
        ("", "forward + gradient"),
        ("jax_baracuda",),
        ("XLA", "1.23e+03 ms"),
        ("speed-up",),
    )
    for example, platform in races:
        for what, ours, xla in race(example, platform, devices[platform], repeats):
            table.print_row(
                example.name,
                sizes_text(example, platform),
                devices[platform].device_kind,
                what,
                *(f"{seconds * 1e3:.3g} ms" for seconds in (ours, xla)),
                f"{xla / ours:.1f}x",
            )
    print(f"\nMedians of {repeats} calls.")
    return 0


def sizes_text(example: Example, platform: str) -> str:
    """The sizes of the dimensions that the operands have."""
    return " ".join(f"{name}={size:,}" for name, size in example.sizes[platform].items() if name in example.dims)


def race(example: Example, platform: str, device: jax.Device, repeats: int) -> Iterator[tuple[str, float, float]]:
    """Yields what was timed and the median seconds of this package and of XLA.

    The forward pass and, where something is differentiable, the forward pass with the gradients.
    """
    operands = jax.device_put(example.make_operands(np.random.default_rng(), "float32", platform), device)
    calls = example.call(platform), example.plain_call(platform)
    types = jax.eval_shape(calls[0], **operands)
    cotangents = jax.device_put(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), types), device)
    differentiated = example.differentiated("float32")
    passes = {"forward": ()} | ({"forward + gradient": differentiated} if differentiated else {})
    functions = [value_and_gradient(call, names) for names in passes.values() for call in calls]
    lowered = [jax.jit(function).lower(operands, cotangents) for function in functions]
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda program: program.compile(), lowered))
    seconds = [_median_seconds(function, (operands, cotangents), repeats) for function in compiled]
    yield from zip(passes, seconds[::2], seconds[1::2], strict=True)


def _median_seconds(function: Callable[..., Any], operands: Sequence[Any], repeats: int) -> float:
    """Of some calls after one to warm up."""
    jax.block_until_ready(function(*operands))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*operands))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
