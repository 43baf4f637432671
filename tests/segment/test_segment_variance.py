"""segment_var and segment_std: values and gradients against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support.cases import FLOATING, Expected, Shape, assert_same_bits

import jax_baracuda as jb
from jax_baracuda import forward_mode, segment_std, segment_var

FUNCTIONS = [segment_var, segment_std]
each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
each_ddof = pytest.mark.parametrize("ddof", [0, 1, 3])

SHAPES = (
    Shape(0, (3,), 4),
    Shape(1, (), 1),
    Shape(40, (), 7),
    Shape(257, (3,), 400),
    Shape(300, (33,), 20),
    Shape(3000, (5, 3), 11),
    Shape(9000, (2,), 2),
)


class Reference:
    """Moments of segments in a wider dtype, and bounds of the errors of kernels before they round to the dtype."""

    def __init__(self, data: np.ndarray, ids: np.ndarray, segments: int, ddof: int):
        self.dtype, self.ids, self.eps = data.dtype, ids, cases.eps_of(data.dtype)
        x = data.astype(cases.wider(data.dtype))
        self.count = cases.counts(ids, segments).reshape(-1, *[1] * (data.ndim - 1))
        self.freedom = np.maximum(self.count - ddof, 1)
        self.is_defined = (self.count > ddof) | (ddof == 0)
        mean = cases.segment_sum(x, ids, segments) / np.maximum(self.count, 1)
        is_member = cases.take_cells(np.ones(mean.shape, bool), ids)
        self.differences = np.where(is_member, x - cases.take_cells(mean, ids), 0)
        self.variance = cases.segment_sum(self.differences**2, ids, segments) / self.freedom
        # A mean has the error of its sum, and is rounded. Each difference is rounded once more.
        magnitude = cases.segment_sum(np.abs(x), ids, segments) / np.maximum(self.count, 1)
        self.error_of_mean = np.where(self.count > 1, (2 + np.sqrt(self.count)) * self.eps * magnitude, 0)
        error = cases.take_cells(self.error_of_mean, ids)
        self.error_of_differences = np.where(is_member, error + self.eps * (np.abs(self.differences) + error), 0)
        # Errors that all rows of a segment share, those of the mean, cancel in the sum, but for their square.
        of_squares = self.count * self.error_of_mean**2 / self.freedom
        self.error = of_squares + (4 + np.sqrt(self.count)) * self.eps * (self.variance + of_squares)

    def value(self, is_root: bool) -> Expected:
        exact, error = self.variance, self.error
        if is_root:
            exact, error = np.sqrt(exact), self._error_of_root()
        return Expected(np.where(self.is_defined, exact, np.nan), self.dtype, error)

    def _error_of_root(self) -> np.ndarray:
        root = np.sqrt(self.variance)
        error = np.sqrt(self.variance + self.error) - np.sqrt(np.maximum(self.variance - self.error, 0))
        return np.asarray(error + self.eps * root)

    def gradient(self, d_output: np.ndarray, is_root: bool) -> Expected:
        slope = 2 / self.freedom
        relative = np.full(self.variance.shape, 6 * self.eps)
        if is_root:
            root = np.sqrt(self.variance)
            with np.errstate(divide="ignore", invalid="ignore"):
                slope = np.where(root > 0, slope / (2 * root), 0)
                lowest = np.maximum(root - self._error_of_root(), 0)
                relative = np.where(root > 0, relative + root / lowest - 1, 0)
        slope = np.where(self.is_defined, slope, 0) * d_output.astype(self.variance.dtype)
        of_rows, relative = (cases.take_cells(x, self.ids) for x in (slope, relative))
        exact = of_rows * self.differences
        error = np.abs(of_rows) * self.error_of_differences * (1 + relative) + np.abs(exact) * relative
        # Subnormal products may be zeros, of either sign.
        return Expected(exact, self.dtype, error + float(np.finfo(cases.accumulator(self.dtype)).tiny))


def check(
    function: Callable[..., Any],
    data: np.ndarray,
    ids: np.ndarray,
    segments: int,
    d_output: np.ndarray,
    ddof: int = 0,
    where: str = "",
    **options: Any,
) -> None:
    """Value and gradient have the errors of their arithmetic alone."""
    segment_arguments = () if "plan" in options else (ids, segments)
    value, vjp = jax.vjp(lambda x: function(x, *segment_arguments, ddof=ddof, **options), jnp.asarray(data))
    reference, is_root = Reference(data, ids, segments, ddof), function is segment_std
    reference.value(is_root).check(value, f"{where} value")
    reference.gradient(d_output, is_root).check(vjp(d_output)[0], f"{where} gradient")


@pytest.mark.parametrize("dtype", FLOATING)
@each_ddof
@each_function
def test_values_and_gradients(rng: np.random.Generator, function: Callable[..., Any], ddof: int, dtype: str) -> None:
    """Empty segments, dropped rows, ids in any order, sorted ids, plans, and plain JAX."""
    with cases.x64_for(dtype):
        for shape in SHAPES:
            data = rng.normal(1, 2, (shape.rows, *shape.row_shape)).astype(jnp.dtype(dtype))
            d_output = rng.normal(size=(shape.segments, *shape.row_shape)).astype(data.dtype)
            for is_sorted in (False, True):
                ids = cases.make_ids(rng, shape.rows, shape.segments, is_sorted=is_sorted)
                ways: list[dict[str, Any]] = [{"indices_are_sorted": is_sorted}, {"implementation": "xla"}]
                ways.append({"plan": jb.segment_plan(ids, shape.segments)})
                for options in ways:
                    where = f"{shape} {'sorted' * is_sorted} {list(options)}"
                    check(function, data, ids, shape.segments, d_output, ddof, where, **options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@each_function
def test_large_means_do_not_cancel_small_variances(
    rng: np.random.Generator, function: Callable[..., Any], dtype: str
) -> None:
    """The difference of the mean square and the squared mean would have an error of 6 in float32."""
    data = rng.normal(1e4, 0.1, (400, 3)).astype(dtype)
    ids = cases.make_ids(rng, 400, 20)
    reference = Reference(data, ids, 20, 1)
    assert reference.variance.max() < 0.1 and (reference.error < 0.05 * reference.variance).all()
    with cases.x64_for(dtype):
        check(function, data, ids, 20, np.ones((20, 3), dtype), ddof=1)


@each_function
def test_segments_without_a_variance(function: Callable[..., Any]) -> None:
    """Empty segments hold 0 for ddof=0 and NaN otherwise. Rows of segments without freedom get no gradient."""
    data, ids = np.array([4.0, np.inf, 5.0, 5.0], np.float32), np.array([1, -1, 2, 2])
    for ddof, expected in ((0, [0, 0, 0]), (1, [np.nan, np.nan, 0]), (2, [np.nan] * 3)):
        output, vjp = jax.vjp(lambda x, ddof=ddof: function(x, ids, 3, ddof=ddof), data)
        assert_same_bits(output, np.array(expected, np.float32))
        assert not np.asarray(vjp(jnp.full(3, 7.0))[0]).any()


def test_gradient_where_the_variance_is_zero(rng: np.random.Generator) -> None:
    """Derivatives of every order of the root are 0 there, and unharmed elsewhere."""
    data, ids = np.array([3.0, 3.0, 1.0, 2.0, 7.0], np.float32), np.array([0, 0, 1, 1, 2])
    jacobian = jax.jacrev(lambda x: segment_std(x, ids, 3))
    assert_same_bits(jnp.abs(jacobian(data)), np.array([[0] * 5, [0, 0, 0.5, 0.5, 0], [0] * 5], np.float32))
    for derivative in (jax.jacrev(jacobian), jax.jacfwd(jax.jacrev(lambda x: forward_mode.segment_std(x, ids, 3)))):
        second = np.asarray(derivative(data))
        assert np.isfinite(second).all() and not second[[0, 2]].any()


def in_plain_jax(function: Callable[..., Any], ids: np.ndarray, segments: int, ddof: int) -> Callable[..., Any]:
    """Each segment's rows, reduced by jax.numpy."""
    reduce = jnp.var if function is segment_var else jnp.std
    rows_of = [np.flatnonzero(ids == segment) for segment in range(segments)]
    return lambda data: jnp.stack([reduce(data[rows], axis=0, ddof=ddof) for rows in rows_of])


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "int64"])
@each_function
def test_integers(rng: np.random.Generator, function: Callable[..., Any], dtype: str) -> None:
    """Integers are cast as by jax.numpy.var, and so are booleans."""
    data, ids = rng.integers(0, 2 if dtype == "bool" else 100, (50, 3)).astype(dtype), cases.make_ids(rng, 50, 4)
    with cases.x64_for(dtype):
        output = function(data, ids, 4)
        assert output.dtype == jnp.var(jnp.asarray(data)).dtype
    Reference(data.astype(output.dtype), ids, 4, 0).value(function is segment_std).check(output)


@each_function
def test_complex_numbers(rng: np.random.Generator, function: Callable[..., Any]) -> None:
    """The variance is that of both parts together, a real number; the gradient is that of jax.numpy."""
    ids = np.array([0, 1, 0, 1, 1, -1, 0])
    data = rng.normal(size=(7, 2)) + 1j * rng.normal(size=(7, 2))
    weights = rng.normal(size=(2, 2))
    plain = in_plain_jax(function, ids, 2, 1)
    with jax.enable_x64(True):
        output, gradient = jax.value_and_grad(lambda x: jnp.sum(weights * function(x, ids, 2, ddof=1)))(data)
        expected, expected_gradient = jax.value_and_grad(lambda x: jnp.sum(weights * plain(x)))(data)
        assert function(data, ids, 2).dtype == jnp.float64
    np.testing.assert_allclose(output, expected, rtol=1e-13)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-13, atol=1e-14)


@each_function
def test_errors(function: Callable[..., Any]) -> None:
    name, data, ids = function.__name__, np.ones(3, np.float32), np.arange(3)
    with pytest.raises(TypeError, match=f"{name}: ddof must be an integer, got 0.5"):
        function(data, ids, 3, ddof=0.5)
    with pytest.raises(ValueError, match=f"{name}: ddof must be non-negative, got -1"):
        function(data, ids, 3, ddof=-1)
    with pytest.raises(ValueError, match=f"{name}: data must have one row per id"):
        function(data, ids[:2], 3)
