"""``python -m jax_baracuda race``: time of this package against XLA on the devices here."""

from __future__ import annotations

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
from jax_baracuda._tools.command_line import parser_of, whole_number
from jax_baracuda._tools.platforms import devices_by_platform, require_kernels
from jax_baracuda._tools.progress import Progress
from jax_baracuda._tools.table import ProgressiveTable

FORWARD, WITH_GRADIENT = "forward", "+ gradient"
"""What is timed: the forward pass alone, and with the gradients."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table of times for each platform; returns 0."""
    parser = parser_of("jax_baracuda race", __doc__, {0: "everything was timed"})
    parser.add_argument(
        "--repeats",
        type=whole_number(1),
        default=5,
        metavar="N",
        help="timed calls per function, after one to warm up (default: 5)",
    )
    repeats = parser.parse_args(arguments).repeats
    progress = Progress()
    for platform, device in devices_by_platform().items():
        require_kernels(device)
        examples = [example for example in all_examples() if platform in example.sizes]
        progress.print(f"{platform}: {device.device_kind}")
        table = ProgressiveTable(
            progress.print,
            ("op", *(example.name for example in examples)),
            ("float32", *(sizes_text(example, platform) for example in examples)),
            ("", FORWARD, WITH_GRADIENT),
            ("ours [ms]", "1.23e+03"),
            ("XLA [ms]", "1.23e+03"),
            ("speed-up",),
        )
        for example in progress.track(examples, len(examples), lambda example: example.name):
            passes = [
                (what, f"{ours * 1e3:.3g}", f"{xla * 1e3:.3g}", f"{xla / ours:.1f}x")
                for what, ours, xla in race(example, platform, device, repeats)
            ]
            cells = map("\n".join, zip(*passes, strict=True))
            table.print_row(example.name, sizes_text(example, platform), *cells)
        progress.print("")
    print(f"Medians of {repeats} calls.")
    return 0


def sizes_text(example: Example, platform: str) -> str:
    """The sizes of the dimensions that the operands have."""
    return " ".join(f"{name}={size:,}" for name, size in example.sizes[platform].items() if name in example.dims)


def race(example: Example, platform: str, device: jax.Device, repeats: int) -> Iterator[tuple[str, float, float]]:
    """Yields what was timed, the median seconds of this package, and the median seconds of XLA.

    Times the forward pass and, if anything is differentiable, the forward pass with the gradients.
    """
    operands = jax.device_put(example.make_operands(np.random.default_rng(), "float32", platform), device)
    calls = example.call(platform), example.plain_call(platform)
    types = jax.eval_shape(calls[0], **operands)
    cotangents = jax.device_put(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), types), device)
    differentiated = example.differentiated("float32")
    passes = {FORWARD: ()} | ({WITH_GRADIENT: differentiated} if differentiated else {})
    functions = [value_and_gradient(call, names) for names in passes.values() for call in calls]
    lowered = [jax.jit(function).lower(operands, cotangents) for function in functions]
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda program: program.compile(), lowered))
    seconds = [_median_seconds(function, (operands, cotangents), repeats) for function in compiled]
    yield from zip(passes, seconds[::2], seconds[1::2], strict=True)


def _median_seconds(function: Callable[..., Any], operands: Sequence[Any], repeats: int) -> float:
    """The median time of `repeats` calls, after one to warm up."""
    jax.block_until_ready(function(*operands))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*operands))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
