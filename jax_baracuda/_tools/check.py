"""``python -m jax_baracuda check``: examples of every function against plain JAX on the devices here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_baracuda._core.selection import KERNEL_IF_ANY, selecting
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, value_and_gradient
from jax_baracuda._tools.command_line import integer_from, parser_of
from jax_baracuda._tools.platforms import devices_by_platform, require_kernels
from jax_baracuda._tools.progress import Progress
from jax_baracuda._tools.table import ProgressiveTable


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table with the largest errors; returns 0 if all are within tolerance, else 1."""
    statuses = {0: "all errors are within tolerance", 1: "any is not"}
    parser = parser_of("jax_baracuda check", __doc__, statuses)
    parser.add_argument(
        "--seed", type=integer_from(0), default=None, help="seed of the random operands (default: a fresh one)"
    )
    seed = parser.parse_args(arguments).seed
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    devices = devices_by_platform()
    for device in devices.values():
        require_kernels(device)
    examples = all_examples()
    progress = Progress()
    table = ProgressiveTable(
        progress.print,
        ("function", *(example.name for example in examples)),
        ("dtype", "bfloat16"),
        ("on", *devices),
        ("error of\nvalue", "1.0e-06"),
        ("allowed", "1.0e-06"),
        ("error of\ngradient", "1.0e-06"),
        ("allowed", "1.0e-06"),
        ("result", "FAILED"),
    )
    to_check = [(example, platform) for platform in devices for example in examples]
    num_checks = num_failures = 0
    for example, platform in progress.track(to_check, len(to_check), lambda pair: f"{pair[0].name} on {pair[1]}"):
        with selecting(KERNEL_IF_ANY):
            errors_by_dtype = list(errors(example, devices[platform], seed))
        for dtype, value_error, gradient_error in errors_by_dtype:
            value_allowed, gradient_allowed = example.tolerance[dtype]
            passed = value_error <= value_allowed and (gradient_error or 0) <= gradient_allowed
            num_checks, num_failures = num_checks + 1, num_failures + (not passed)
            of_gradient = ("none", "") if gradient_error is None else (gradient_error, gradient_allowed)
            texts = (x if isinstance(x, str) else f"{x:.1e}" for x in (value_error, value_allowed, *of_gradient))
            table.print_row(example.name, dtype, platform, *texts, "ok" if passed else "FAILED")
    print(
        "\nErrors are the largest of any element:\n"
        f"|jax_baracuda - plain JAX| / max(|plain JAX|, its root mean square).\nSeed: {seed}."
    )
    print(f"{num_failures} of {num_checks} checks failed." if num_failures else f"All {num_checks} checks passed.")
    return 1 if num_failures else 0


def errors(example: Example, device: jax.Device, seed: int) -> Iterator[tuple[str, float, float | None]]:
    """Yields each dtype with the errors of value and gradient against plain JAX in float32, for random operands.

    The error of the gradient is None if nothing is differentiable.
    """
    expected_call = jax.jit(value_and_gradient(example.plain_call("check"), example.differentiated("float32")))
    for dtype in example.dtypes:
        rng = np.random.default_rng(seed)
        names = example.differentiated(dtype)
        operands = jax.device_put(example.make_operands(rng, dtype, "check"), device)
        call = example.call("check")
        cotangents = jax.device_put(_random_cotangents(rng, jax.eval_shape(call, **operands)), device)
        actual = jax.jit(value_and_gradient(call, names))(operands, cotangents)
        expected = expected_call(*(jax.tree.map(_wide, arrays) for arrays in (operands, cotangents)))
        value_error, gradient_error = (_largest_error(*results) for results in zip(actual, expected, strict=True))
        yield dtype, value_error, gradient_error if names else None


def _random_cotangents(rng: np.random.Generator, results: Any) -> Any:
    """Random cotangents of mean 1. With mean 0, sums could nearly cancel, and their relative errors would be large."""
    return jax.tree.map(lambda x: rng.normal(1, size=x.shape).astype(x.dtype), results)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _largest_error(actual: Any, expected: Any) -> float:
    """The largest error of all elements, relative to the expected value or the array's root mean square if larger."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max((_largest_error_of_array(*pair) for pair in pairs), default=0.0)


def _largest_error_of_array(actual_array: jax.Array, expected_array: jax.Array) -> float:
    actual, expected = (np.asarray(_wide(x)).astype(np.float64) for x in (actual_array, expected_array))
    finite = np.isfinite(expected)
    if actual.shape != expected.shape or not np.array_equal(actual[~finite], expected[~finite], equal_nan=True):
        return math.inf
    actual, expected = actual[finite], expected[finite]
    difference = np.abs(actual - expected)
    if not difference.any():
        return 0.0
    scale = np.maximum(np.abs(expected), np.sqrt(np.mean(expected**2)))
    largest = np.max(difference / np.where(scale > 0, scale, 1))
    return math.inf if np.isnan(largest) else float(largest)
