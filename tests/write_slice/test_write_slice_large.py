"""Arrays of more than 2^31 and 2^32 elements: windows beyond are written and taken at the right place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import assert_same_memory
from support.large import require_memory
from write_slice.reference import random_bits, reference_write

from jax_baracuda import write_slice


def part_of(x: jax.Array, start: int, count: int) -> np.ndarray:
    """A part of a vector. jax.numpy may slice with 32-bit starts."""
    return np.asarray(jax.lax.slice_in_dim(x, start, start + count))


@pytest.mark.parametrize("start", [0, 2**31 - 10, 2**31 + 7, 2**31 + 990, 2**32 - 1])
def test_long_axis(rng: np.random.Generator, start: int) -> None:
    """uint32 starts reach beyond element 2^31. Starts beyond the end are clipped."""
    require_memory(6)
    length, source = 2**31 + 1000, random_bits(rng, (15,), "uint8")
    dest = jax.jit(lambda: jnp.full(length, 77, jnp.uint8))()
    write = jax.jit(lambda d, s, i: write_slice(d, s, (i,)), donate_argnums=0)
    result = write(dest, source, np.uint32(start))
    inside = min(start, length - 15)
    first, end = max(0, inside - 20), min(length, inside + 35)
    expected = reference_write(np.full(end - first, 77, np.uint8), source, [inside - first])
    assert_same_memory(part_of(result, first, end - first), expected)
    assert int(jnp.sum((result != 77).astype(jnp.uint32))) == int((source != 77).sum())


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_many_rows(rng: np.random.Generator, dtype: str) -> None:
    """Packed elements beyond 2^32, or bytes beyond 2^31, are written at odd columns. Other rows are unchanged."""
    require_memory(8)
    rows, columns = (2**17 + 9 if dtype == "int4" else 2**16 + 9), 2**15 + 1
    dest = jax.jit(lambda: jnp.full((rows, columns), 3, dtype))()
    source = random_bits(rng, (5, 101), dtype)
    write = jax.jit(lambda d, s, i, j: write_slice(d, s, (i, j)), donate_argnums=0)
    starts = (rows - 6, 12_345)
    result = write(dest, source, *starts)
    taken = np.asarray(jax.lax.slice_in_dim(result, rows - 8, rows))
    expected = reference_write(np.full((8, columns), 3, taken.dtype), source, (2, starts[1]))
    assert_same_memory(taken, expected)
    assert_same_memory(np.asarray(result[:8]), np.full((8, columns), 3, taken.dtype))


def test_gradient(rng: np.random.Generator) -> None:
    require_memory(12)
    rows, columns = 2**16 + 9, 2**15 + 1
    dy: Any = jax.jit(
        lambda: jax.lax.broadcasted_iota(jnp.uint32, (rows, columns), 0).astype(jnp.uint8).astype(jnp.bfloat16)
    )()
    source = np.zeros((5, 101), jnp.bfloat16)

    def gradient(dy: Any, i: Any) -> Any:
        dest = jnp.zeros_like(dy)
        return jax.vjp(lambda d, s: write_slice(d, s, (i, 12_345)), dest, source)[1](dy)

    rest, taken = jax.jit(gradient, donate_argnums=0)(dy, rows - 6)
    row = np.arange(rows - 8, rows)[:, None] % 256
    expected = np.broadcast_to(row, (8, columns)).copy()
    np.testing.assert_array_equal(np.asarray(taken, np.float32), expected[2:7, 12_345 : 12_345 + 101])
    expected[2:7, 12_345 : 12_345 + 101] = 0
    np.testing.assert_array_equal(np.asarray(jax.lax.slice_in_dim(rest, rows - 8, rows), np.float32), expected)
