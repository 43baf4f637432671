"""``python -m jax_baracuda check``: each op against plain JAX on the devices here, value and gradient."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_baracuda._core.example import EXAMPLES, Example
from jax_baracuda._tools.platforms import devices_by_platform
from jax_baracuda._tools.table import format_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table with the largest errors; returns 0 if all are within tolerance, else 1."""
    parser = argparse.ArgumentParser(prog="python -m jax_baracuda check", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="seed of the random operands (default: a fresh one)")
    seed = parser.parse_args(arguments).seed
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    rows, failures = [], 0
    for platform, device in devices_by_platform().items():
        for example in EXAMPLES:
            for dtype in example.dtypes:
                value_error, gradient_error = errors(example, dtype, device, seed)
                passed = max(value_error, gradient_error) <= example.tolerance[dtype]
                failures += not passed
                rows.append(
                    (
                        example.name,
                        dtype,
                        platform,
                        f"{value_error:.1e}",
                        f"{gradient_error:.1e}",
                        f"{example.tolerance[dtype]:.0e}",
                        "ok" if passed else "FAILED",
                    )
                )
    print(format_table(("op", "dtype", "on", "error of value", "of gradient", "allowed", ""), rows))
    print(f"\nErrors are ||jax_baracuda - plain JAX|| / ||plain JAX||. Seed: {seed}.")
    print(f"{failures} of {len(rows)} checks failed." if failures else f"All {len(rows)} checks passed.")
    return 1 if failures else 0


def errors(example: Example, dtype: str, device: jax.Device, seed: int) -> tuple[float, float]:
    """Relative errors of value and gradient against plain JAX in float32, on fresh random operands."""
    rng = np.random.default_rng(seed)
    first, *others = example.make_operands(rng, **example.check_sizes)
    operand = jax.device_put(jnp.asarray(first).astype(dtype), device)
    others = [jax.device_put(x, device) for x in others]
    value = example.function(operand, *others, **example.check_sizes)
    expected = example.plain_jax(operand.astype(jnp.float32), *others, **example.check_sizes)
    weights = jax.device_put(rng.normal(size=expected.shape).astype(np.float32), device)

    def gradient(function: Callable[..., Any], operand: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            result = function(x, *others, **example.check_sizes).astype(jnp.float32)
            return jnp.sum(weights * jnp.where(jnp.isfinite(result), result, 0))

        return jax.jit(jax.grad(loss))(operand)

    gradients = gradient(example.function, operand), gradient(example.plain_jax, operand.astype(jnp.float32))
    return _relative_error(value, expected), _relative_error(*gradients)


def _relative_error(actual: jax.Array, expected: jax.Array) -> float:
    actual, expected = (np.asarray(x.astype(jnp.float32), np.float64) for x in (actual, expected))
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True):
        return float("inf")
    norm = np.linalg.norm(expected[finite])
    error = np.linalg.norm(actual[finite] - expected[finite])
    return float(error / norm) if norm else float(error)


if __name__ == "__main__":
    raise SystemExit(main())
