"""What only segment_logsumexp does: infinities, and the values of ``jax.nn.logsumexp``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases

from jax_baracuda import segment_logsumexp


@pytest.mark.parametrize("dtype", cases.FLOATING)
def test_special_values(dtype: str) -> None:
    """Empty segments give -inf. Rows of inf give inf, unless there is NaN. The largest numbers do not overflow."""
    largest = float(jnp.finfo(dtype).max)
    segments = [[], [-np.inf, -np.inf], [-np.inf, 2], [np.inf, -np.inf, 1], [np.nan, np.inf], [largest, largest]]
    expected = [-np.inf, -np.inf, 2, np.inf, np.nan, largest]
    ids = np.repeat(np.arange(len(segments)), [len(rows) for rows in segments])
    with cases.x64_for(dtype):
        output = segment_logsumexp(jnp.asarray(sum(segments, []), dtype), ids, len(segments))
    np.testing.assert_array_equal(np.asarray(output, np.float64), expected)


def test_masked_segments_have_no_gradient() -> None:
    """The gradient is 0 where all rows are -inf, and for dropped rows of any value."""
    data, ids = jnp.array([-jnp.inf, -jnp.inf, 1.0, jnp.inf, jnp.nan]), jnp.array([0, 0, 1, -1, 2])
    gradient = jax.grad(lambda x: segment_logsumexp(x, ids, 2)[1])(data)
    np.testing.assert_array_equal(gradient, [0, 0, 1, 0, 0])


@pytest.mark.parametrize("rows", [1, 1000, 70_000])
def test_one_segment(rng: np.random.Generator, rows: int) -> None:
    """Value and gradient are those of JAX's own function."""
    data, ids = rng.normal(0, 30, (rows, 3)).astype(np.float32), np.zeros(rows, np.int32)
    value, vjp = jax.vjp(lambda x: segment_logsumexp(x, ids, 1)[0], data)
    expected, vjp_of_jax = jax.vjp(lambda x: jax.nn.logsumexp(x, axis=0), data)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(vjp(value)[0], vjp_of_jax(value)[0], rtol=1e-4, atol=1e-6)


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match="segment_logsumexp: data must have a real dtype, got complex64"):
        segment_logsumexp(np.zeros(3, np.complex64), np.arange(3))
