"""`where` on more than 2^31 elements: kernels read and write the right elements beyond 2^31."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from support import cases
from support.large import require_memory

from jax_baracuda import where, where_backward

ROWS, COLUMNS = 2**25 + 3, 65
CHECKED = np.array([0, 1, 2**24, ROWS - 2, ROWS - 1])
"""The compared rows. The last two lie beyond element 2^31."""


def numbers(seed: int) -> jax.Array:
    """Bytes that differ from element to element."""

    def formula() -> jax.Array:
        row, column = (jax.lax.broadcasted_iota(jnp.uint32, (ROWS, COLUMNS), axis) for axis in (0, 1))
        return ((row * jnp.uint32(2654435761) + column * jnp.uint32(40503) + jnp.uint32(seed)) >> 13).astype(jnp.uint8)

    return jax.jit(formula)()


def test_more_than_2_31_elements() -> None:
    """Values are right for a full condition, and for one repeated along rows that are not whole vectors."""
    require_memory(12 if cases.PLATFORM == "cpu" else 20)
    assert (ROWS - 2) * COLUMNS > 2**31
    a, b, cond = (numbers(seed) for seed in (1, 2, 3))
    first, second = (np.asarray(x[CHECKED]) for x in (a, b))
    for condition in (cond & 1, cond[:, :1] & 1):
        value = np.asarray(jax.jit(where)(condition, a, b)[CHECKED])
        np.testing.assert_array_equal(value, np.where(np.asarray(condition[CHECKED]), first, second))


def test_gradient_of_more_than_2_31_elements() -> None:
    """Gradients are right. The terms are small integers, so sums over a row are exact."""
    require_memory(24 if cases.PLATFORM == "cpu" else 40)
    dy = jax.jit(lambda x: (x & 15).astype(jnp.bfloat16))(numbers(1))
    cond = jax.jit(lambda x: x & 1)(numbers(2))
    backward = jax.jit(lambda cond, dy: (where_backward(dy, cond), where_backward(dy, cond, b_shape=(ROWS, 1))))
    (da, db), (da_too, db_of_rows) = backward(cond, dy)
    wanted, flags = np.asarray(dy[CHECKED]).astype(np.float32), np.asarray(cond[CHECKED])
    for got in (da, da_too):
        np.testing.assert_array_equal(np.asarray(got[CHECKED]).astype(np.float32), np.where(flags, wanted, 0))
    np.testing.assert_array_equal(np.asarray(db[CHECKED]).astype(np.float32), np.where(flags, 0, wanted))
    sums = np.where(flags, 0, wanted).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(db_of_rows[CHECKED]), sums.astype(db_of_rows.dtype))
