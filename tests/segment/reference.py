"""The table of segment reductions: data, references with error bounds, kernels, and formulas in plain JAX."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import cases
from support.cases import FLOATING, KERNEL_DTYPES, WIDE_INTEGERS, Expected, Shape

import jax_baracuda

Options = dict[str, Any]


def value_and_pullback(function: Callable[..., Any], x: Any, cotangent: Any) -> tuple[jax.Array, jax.Array]:
    value, vjp = jax.vjp(function, x)
    return value, vjp(cotangent)[0]


# ----------------------------------------------------------------------------------------------------------------------
# Data. Results for it are exact except for one rounding, so that any mistake shows in the bits.


def _sprinkled(rng: np.random.Generator, data: np.ndarray, specials: Sequence[float], rate: float) -> np.ndarray:
    """The data with special values in random places, each at this rate."""
    pick = rng.random(data.shape)
    for i, special in enumerate(specials):
        data = np.where((pick >= i * rate) & (pick < (i + 1) * rate), special, data)
    return data


def _rate(shape: Shape) -> float:
    """The rate of special values: most segments have none of a kind, and some have one, two or more."""
    return min(0.1, 0.3 * shape.segments / max(shape.rows, 1))


def extremum_data(rng: np.random.Generator, shape: Shape, dtype: Any) -> np.ndarray:
    return cases.make_data(rng, (shape.rows, *shape.row_shape), dtype)


def sum_data(rng: np.random.Generator, shape: Shape, dtype: Any) -> np.ndarray:
    """Integers that use all bits of narrow dtypes. Their sums need a wider accumulator, and are exact in it."""
    size, dtype = (shape.rows, *shape.row_shape), jnp.dtype(dtype)
    if not cases.is_floating(dtype):
        return cases.make_data(rng, size, dtype)
    limit = 250 if dtype == jnp.bfloat16 else 1000
    data = rng.integers(-limit, limit + 1, size) * rng.choice([-1.0, 1.0], size)  # zeros of both signs
    return _sprinkled(rng, data, (np.nan, np.inf, -np.inf, -0.0), _rate(shape) / 2).astype(dtype)


def prod_data(rng: np.random.Generator, shape: Shape, dtype: Any) -> np.ndarray:
    """Powers of two. Their products reach far beyond the range of the dtype, and into its subnormal numbers."""
    size, dtype = (shape.rows, *shape.row_shape), jnp.dtype(dtype)
    if not cases.is_floating(dtype):
        return cases.make_data(rng, size, dtype) | np.asarray(rng.random(size) < 0.9, dtype)
    # A product of n random factors has about sqrt(n) times the exponent of one.
    range_of_exponents = int(-jnp.finfo(dtype).minexp)
    limit = np.clip(range_of_exponents / np.sqrt(1 + shape.rows / max(shape.segments, 1)), 1, range_of_exponents // 2)
    data = np.exp2(rng.integers(-int(limit), int(limit) + 1, size)) * rng.choice([-1.0, 1.0], size)
    rate = _rate(shape)
    data = _sprinkled(rng, data, (0.0, -0.0), rate)
    return _sprinkled(rng, data, (np.nan, np.inf, -np.inf), rate / 4).astype(dtype)


def softmax_data(rng: np.random.Generator, shape: Shape, dtype: Any) -> np.ndarray:
    """Logits of all sizes, some segments with infinities or NaN."""
    data = rng.normal(size=(shape.rows, *shape.row_shape)) * rng.choice([1.0, 5.0, 30.0, 3e4], shape.rows).reshape(
        -1, *(1 for _ in shape.row_shape)
    )
    data = _sprinkled(rng, data, (-np.inf,), 0.1)
    with np.errstate(over="ignore"):  # float16 has no numbers that large
        return _sprinkled(rng, data, (np.nan, np.inf), _rate(shape) / 4).astype(jnp.dtype(dtype))


# ----------------------------------------------------------------------------------------------------------------------
# The table.


@dataclasses.dataclass(frozen=True, eq=False)
class Reduction:
    """A function of (data, segment_ids, num_segments, ...), and what tests need to know about it."""

    name: str
    dtypes: tuple[str, ...]
    """The dtypes that have kernels."""
    make_data: Callable[[np.random.Generator, Shape, Any], np.ndarray]
    value: Callable[[np.ndarray, np.ndarray, int], Expected]
    """``(data, ids, segments)``"""
    gradient: Callable[..., Expected] | None = None
    """``(cotangent, data, ids, segments, options)``. Softmax takes the probabilities in place of the data."""
    options: tuple[Options, ...] = ({},)
    """Keyword arguments that choose between ways to compute the value or the gradient."""
    kernels: tuple[str, ...] = ()
    """The targets of the value and of its gradient."""
    call_backward: Callable[..., jax.Array] | None = None
    """``(cotangent, data, ids, segments, **options)``: the public backward function, if there is one."""
    derivatives_are_exact: bool = True
    """For small integers, derivatives of every order are exact, or tests have bounds of their errors."""
    result_has_rows: bool = False
    """The result is one row per row of data, not one per segment."""
    has_buckets: bool = False

    def __str__(self) -> str:
        return self.name.removeprefix("segment_")

    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        return getattr(jax_baracuda, self.name)(*args, **options)

    def in_forward_mode(self, *args: Any, **options: Any) -> jax.Array:
        # A function with an integer result needs no twin: its derivative is zero in both modes.
        return getattr(jax_baracuda.forward_mode if self.gradient else jax_baracuda, self.name)(*args, **options)

    def pullback(
        self, data: Any, ids: Any, segments: int, cotangent: Any, **options: Any
    ) -> tuple[jax.Array, jax.Array]:
        """The value, and the gradient with respect to the data for this cotangent of the value."""
        return value_and_pullback(lambda x: self(x, ids, segments, **options), jnp.asarray(data), cotangent)

    @property
    def by_jax(self) -> Callable[..., jax.Array] | None:
        """The function of this name in ``jax.ops``."""
        return getattr(jax.ops, self.name, None)

    def result_shape(self, shape: Shape) -> tuple[int, ...]:
        return (shape.rows if self.result_has_rows else shape.segments, *shape.row_shape)

    def residual(self, data: np.ndarray, output: Any) -> np.ndarray:
        """The argument of `gradient` after the cotangent: the data, or the rounded result."""
        return np.asarray(output) if self.result_has_rows else data


def _extremum(kind: str) -> Reduction:
    value, gradient = getattr(cases, f"reference_{kind}"), getattr(cases, f"reference_{kind}_gradient")

    def call_backward(d: Any, data: Any, ids: Any, segments: int, *, tie_break: str, **options: Any) -> jax.Array:
        backward = getattr(jax_baracuda, f"segment_{kind}_backward")
        return backward(d, data, ids, tie_break=tie_break, **options)

    return Reduction(
        name=f"segment_{kind}",
        dtypes=KERNEL_DTYPES,
        make_data=extremum_data,
        value=lambda data, ids, segments: Expected(value(data, ids, segments), data.dtype),
        gradient=lambda d, data, ids, segments, tie_break: Expected(gradient(d, data, ids, tie_break), d.dtype),
        options=({"tie_break": "split"}, {"tie_break": "first"}),
        kernels=(f"segment_{kind}_with_winner", f"segment_{kind}_backward"),
        call_backward=call_backward,
        has_buckets=True,
    )


def _arg_extremum(kind: str) -> Reduction:
    value = getattr(cases, f"reference_arg{kind}")
    return Reduction(
        name=f"segment_arg{kind}",
        dtypes=KERNEL_DTYPES,
        make_data=extremum_data,
        value=lambda data, ids, segments: Expected(value(data, ids, segments), np.int32),
        kernels=(f"segment_arg{kind}",),
    )


DETERMINISTIC = ({"deterministic": False}, {"deterministic": True})

MAX = _extremum("max")
MIN = _extremum("min")
SUM = Reduction(
    name="segment_sum",
    dtypes=(*FLOATING, *WIDE_INTEGERS),
    make_data=sum_data,
    value=cases.reference_sum,
    gradient=lambda d, data, ids, segments, deterministic: cases.reference_sum_gradient(d, data, ids),
    options=DETERMINISTIC,
    kernels=("segment_sum", "segment_sum_backward"),
    call_backward=lambda d, data, ids, segments, deterministic, **options: jax_baracuda.segment_sum_backward(
        d, ids, **options
    ),
    has_buckets=True,
)
MEAN = Reduction(
    name="segment_mean",
    dtypes=FLOATING,
    make_data=sum_data,
    value=cases.reference_mean,
    gradient=lambda d, data, ids, segments, deterministic: cases.reference_mean_gradient(d, data, ids),
    options=DETERMINISTIC,
    kernels=("segment_mean", "segment_mean_backward"),
    call_backward=lambda d, data, ids, segments, deterministic, **options: jax_baracuda.segment_mean_backward(
        d, ids, **options
    ),
)
PROD = Reduction(
    name="segment_prod",
    dtypes=(*FLOATING, *WIDE_INTEGERS),
    make_data=prod_data,
    value=cases.reference_prod,
    gradient=lambda d, data, ids, segments: cases.reference_prod_gradient(d, data, ids),
    kernels=("segment_prod_with_residual", "segment_prod_backward"),
    call_backward=lambda d, data, ids, segments, **options: jax_baracuda.segment_prod_backward(d, data, ids, **options),
    has_buckets=True,
)
SOFTMAX = Reduction(
    name="segment_softmax",
    dtypes=FLOATING,
    make_data=softmax_data,
    value=cases.reference_softmax,
    gradient=lambda d, p, ids, segments, deterministic: cases.reference_softmax_gradient(d, p, ids, segments),
    options=DETERMINISTIC,
    kernels=("segment_softmax", "segment_softmax_backward"),
    call_backward=lambda d, p, ids, segments, **options: jax_baracuda.segment_softmax_backward(
        d, p, ids, segments, **options
    ),
    result_has_rows=True,
)
ARGMAX = _arg_extremum("max")
ARGMIN = _arg_extremum("min")

DIFFERENTIABLE = [MAX, MIN, SUM, MEAN, PROD, SOFTMAX]
REDUCTIONS = [*DIFFERENTIABLE, ARGMAX, ARGMIN]


def add(reduction: Reduction) -> Reduction:
    """Adds a reduction to the table: for a file ``reduction.py`` in another folder of tests."""
    REDUCTIONS.append(reduction)
    if reduction.gradient is not None:
        DIFFERENTIABLE.append(reduction)
    return reduction


for _path in sorted(Path(__file__).parents[1].glob("*/reduction.py")):
    importlib.import_module(f"{_path.parent.name}.reduction")

LIKE_JAX = (MAX, MIN, SUM, PROD)
"""The reductions that jax.ops has, too."""


def options_id(options: Options) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "default"


def errors_of_softmax(data: np.ndarray, ids: np.ndarray, cotangent: np.ndarray, segments: int) -> list[np.ndarray]:
    """Bounds of the rounding errors of the probabilities, and of the gradient computed from them."""
    value = SOFTMAX.value(data, ids, segments)
    p, error = value.exact, value.error
    own = cases.reference_softmax_gradient(cotangent, p.astype(data.dtype), ids, segments).error

    def summed(rows: np.ndarray) -> np.ndarray:
        return cases.take_cells(cases.segment_sum(rows, ids, segments), ids)

    d = np.abs(cotangent)
    return [error, own + error * (d + summed(p * d)) + p * summed(error * d)]
