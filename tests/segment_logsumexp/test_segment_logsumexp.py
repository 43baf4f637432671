"""What only segment_logsumexp does: infinities, gradients of large numbers, the values of ``jax.nn.logsumexp``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from segment_logsumexp.reduction import LOGSUMEXP
from support import cases
from support.cases import Expected

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


@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", cases.FLOATING)
def test_equal_rows_share_the_gradient(rng: np.random.Generator, dtype: str, sign: int, is_sorted: bool) -> None:
    """The n equal rows of a segment have the gradient 1 / n, however large they are."""
    counts = np.array([3, 1, 40, 7])
    ids = np.repeat(np.arange(4), counts)
    ids = ids if is_sorted else rng.permutation(ids)
    with cases.x64_for(dtype):
        data = jnp.full(len(ids), sign * min(1e9, float(jnp.finfo(dtype).max)), dtype)

        def total(x: jax.Array) -> jax.Array:
            return segment_logsumexp(x, ids, 4, indices_are_sorted=is_sorted).sum()

        gradient = jax.grad(total)(data)
    expected = (1 / counts.astype(cases.accumulator(dtype))).astype(jnp.dtype(dtype))[ids]
    cases.assert_same_bits(gradient, expected)


@pytest.mark.parametrize("dtype", cases.FLOATING)
def test_gradient_of_large_rows(rng: np.random.Generator, dtype: str) -> None:
    """The gradient of 1000 rows near 10^4 has the errors of small rows, and so has its own gradient."""
    ids = cases.make_ids(rng, 1000, 5)
    data = (1e4 + rng.normal(0, 3, (1000, 2))).astype(jnp.dtype(dtype))
    d_output = rng.normal(size=(5, 2)).astype(data.dtype)
    tangent = rng.normal(size=data.shape).astype(data.dtype)
    with cases.x64_for(dtype):

        def gradient(x: jax.Array) -> jax.Array:
            return jax.vjp(lambda x: segment_logsumexp(x, ids, 5), x)[1](d_output)[0]

        first, second_vjp = jax.vjp(gradient, jnp.asarray(data))
        [second] = second_vjp(jnp.asarray(tangent))
    LOGSUMEXP.gradient(d_output, data, ids, 5).check(first)
    check_second_derivative(second, d_output, tangent, data, ids)


def check_second_derivative(
    actual: jax.Array, d_output: np.ndarray, tangent: np.ndarray, data: np.ndarray, ids: np.ndarray
) -> None:
    """The gradient of sum(tangent * gradient) is d_output * w * (tangent - mean), w the weights, mean that of them."""

    def mean(rows: np.ndarray) -> np.ndarray:
        return cases.take_cells(cases.segment_sum(weights * rows, ids, len(d_output)), ids)

    of_ones = LOGSUMEXP.gradient(np.ones_like(d_output), data, ids, len(d_output))
    weights = of_ones.exact
    d_rows, rows = cases.take_cells(d_output.astype(weights.dtype), ids), tangent.astype(weights.dtype)
    relative = of_ones.error / np.where(weights > 0, weights, 1)
    # Each term has the error of its weight, and products and differences are rounded. So are the terms of the mean, and
    # their sum. The two terms of the result are rounded to the dtype of the data before they are added.
    eps, magnitude = cases.eps_of(data.dtype), np.abs(rows) + mean(np.abs(rows))
    error = (relative + 4 * eps) * magnitude + mean(np.abs(rows) * (relative + (2 + np.sqrt(len(rows))) * eps))
    info = jnp.finfo(data.dtype)
    error = np.abs(d_rows) * weights * (error + float(info.eps) * magnitude) + 2 * float(info.smallest_subnormal)
    Expected(d_rows * weights * (rows - mean(rows)), data.dtype, error).check(actual)


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match="segment_logsumexp: data must have a real dtype, got complex64"):
        segment_logsumexp(np.zeros(3, np.complex64), np.arange(3))
