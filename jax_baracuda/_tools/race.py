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
from jax_baracuda._tools.command_line import integer_from, parser_of
from jax_baracuda._tools.platforms import devices_by_platform, require_kernels
from jax_baracuda._tools.progress import Progress
from jax_baracuda._tools.table import ProgressiveTable

FORWARD, WITH_GRADIENT = "forward", "+ gradient"
"""What is timed: the forward pass alone, and with the gradients."""
MAX_SPREAD = 0.2
"""The spread of times above which a speed-up means little."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table of times for each platform; returns 0."""
    parser = parser_of("jax_baracuda race", __doc__, {0: "everything was timed"})
    parser.add_argument(
        "--repeats",
        type=integer_from(1),
        default=5,
        metavar="N",
        help="timed calls per function, after one to warm up (default: 5)",
    )
    repeats = parser.parse_args(arguments).repeats
    num_timed = num_scattered = 0
    progress = Progress()
    for platform, device in devices_by_platform().items():
        require_kernels(device)
        examples = [example for example in all_examples() if platform in example.sizes]
        progress.print(f"{platform}: {device.device_kind}")
        table = ProgressiveTable(
            progress.print,
            ("function\nsizes, float32", *(name_and_sizes(example, platform) for example in examples)),
            ("timed", FORWARD, WITH_GRADIENT),
            ("ours\n[ms]", "1.23e+03"),
            ("XLA\n[ms]", "1.23e+03"),
            ("speed-up",),
            ("spread",),
        )
        for example in progress.track(examples, len(examples), lambda example: example.name):
            timed = list(race(example, platform, device, repeats))
            passes = [
                (what, f"{ours * 1e3:.3g}", f"{xla * 1e3:.3g}", f"{xla / ours:.1f}x", f"{spread:.0%}")
                for what, ours, xla, spread in timed
            ]
            num_timed += len(timed)
            num_scattered += sum(spread > MAX_SPREAD for *_, spread in timed)
            cells = map("\n".join, zip(*passes, strict=True))
            table.print_row(name_and_sizes(example, platform), *cells)
        progress.print("")
    print(
        f"Times are medians of {repeats} calls. Spread: the distance of their quartiles,\n"
        "relative to the median; the larger one of ours and XLA's."
    )
    if num_scattered:
        print(
            f"WARNING: {num_scattered} of {num_timed} spreads are above {MAX_SPREAD:.0%}: "
            "do not trust their speed-ups.\nStop what else runs on this machine, or ask for more calls: --repeats."
        )
    return 0


def name_and_sizes(example: Example, platform: str) -> str:
    """The function's name and, below, the sizes of the dimensions that the operands have."""
    sizes = (f"{name}={size:,}" for name, size in example.sizes[platform].items() if name in example.dims)
    return f"{example.name}\n{' '.join(sizes)}"


def race(
    example: Example, platform: str, device: jax.Device, repeats: int
) -> Iterator[tuple[str, float, float, float]]:
    """Yields what was timed, the median seconds of this package and of XLA, and the larger spread of the two.

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
    times = [_seconds(function, (operands, cotangents), repeats) for function in compiled]
    for what, ours, xla in zip(passes, times[::2], times[1::2], strict=True):
        yield what, statistics.median(ours), statistics.median(xla), max(relative_spread(ours), relative_spread(xla))


def relative_spread(seconds: Sequence[float]) -> float:
    """The distance between the quartiles, relative to the median."""
    first, median, third = np.percentile(seconds, [25, 50, 75])
    return float((third - first) / median)


def _seconds(function: Callable[..., Any], operands: Sequence[Any], repeats: int) -> list[float]:
    """The times of `repeats` calls, after one to warm up."""
    jax.block_until_ready(function(*operands))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*operands))
        seconds.append(time.perf_counter() - start)
    return seconds
