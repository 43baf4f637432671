"""The table of cases, the inputs made from it, independent NumPy references, and exact comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_baracuda._core.native import NATIVE_MODULES

PLATFORM = {"gpu": "cuda"}.get(jax.devices()[0].platform, jax.devices()[0].platform)
"""The platform that the tests run on, under the name that native modules have."""

REQUIRED_PLATFORM = os.environ.get("JAX_BARACUDA_REQUIRE")

FLOATING = ("float16", "bfloat16", "float32", "float64")
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
KERNEL_DTYPES = ("bool", *INTEGERS, *FLOATING)
TIE_BREAKS = ("split", "first")

Values = Literal["special", "distinct", "ties"]


def native_problem(platform: str) -> str | None:
    """Why the platform has no kernels here, or None."""
    if platform not in NATIVE_MODULES:
        return f"jax_baracuda has kernels for {sorted(NATIVE_MODULES)}"
    return NATIVE_MODULES[platform].problem


def skip_for_lack_of(platform: str, reason: str) -> NoReturn:
    """Skips the running test, or fails it where JAX_BARACUDA_REQUIRE asks for that platform."""
    if platform == REQUIRED_PLATFORM:
        pytest.fail(f"JAX_BARACUDA_REQUIRE={REQUIRED_PLATFORM}: {reason}", pytrace=False)
    pytest.skip(reason)


def x64_for(*dtypes: Any) -> contextlib.AbstractContextManager[Any]:
    """Context with 64-bit types on if one of the dtypes needs it, and off otherwise."""
    return jax.enable_x64(any(jnp.dtype(dtype).name in ("int64", "uint64", "float64") for dtype in dtypes))


# ----------------------------------------------------------------------------------------------------------------------
# Inputs.


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one segment reduction: data ``[rows, *row_shape]``, result ``[segments, *row_shape]``."""

    rows: int
    row_shape: tuple[int, ...]
    segments: int

    def __str__(self) -> str:
        return f"{self.rows}x{'x'.join(map(str, self.row_shape)) or 'scalar'}to{self.segments}"


SHAPES = (
    Shape(0, (3,), 4),
    Shape(1, (), 1),
    Shape(7, (), 3),
    Shape(1000, (), 37),
    Shape(1003, (1,), 5),
    Shape(257, (3,), 4000),
    Shape(129, (7,), 1),
    Shape(64, (8,), 16),
    Shape(300, (33,), 20),
    Shape(2000, (128,), 50),
    Shape(9000, (2,), 2),
    Shape(70_001, (), 9),
    Shape(3000, (64,), 2000),
    Shape(150, (1500,), 100),
    Shape(50, (5, 3), 11),
    Shape(20, (0,), 4),
    Shape(9, (2,), 0),
)
"""Small enough for NumPy, and such that every way through a kernel is taken: one thread or block and several, cells
that fit in a cache or in shared memory and cells that do not, narrow rows and wide ones, few segments and many."""

BIG_SHAPE = Shape(66_000, (130,), 9000)
"""Big enough for a GPU to sort the ids first, and for a CPU to group the rows by segment, in every dtype."""


def make_data(rng: np.random.Generator, shape: Sequence[int], dtype: Any, values: Values = "special") -> np.ndarray:
    """Random data.

    Args:
      values: "special": few distinct values, hence ties, mixed with NaN, infinities, zeros of both signs and the
        extremes of the dtype. "ties": the same without NaN and infinities. "distinct": floating values far apart.
    """
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        return rng.random(shape) < 0.2
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        full_range = rng.integers(int(info.min), int(info.max), shape, dtype=np.dtype(dtype), endpoint=True)
        pick = rng.random(shape)
        few = rng.integers(0, 3, shape).astype(dtype)
        data = np.where(pick < 0.3, few, full_range)
        return np.where(pick > 0.9, dtype.type(info.min), data).astype(dtype)
    if values == "distinct":
        size = int(np.prod(shape, dtype=np.int64))
        return ((rng.permutation(size) - size / 2) / 8).reshape(shape).astype(dtype)
    data = rng.integers(-3, 4, shape) * rng.choice([-1.0, 1.0], shape)  # zeros of both signs
    if values == "special":
        pick = rng.random(shape)
        minus_nan = np.copysign(np.nan, -1)
        for i, special in enumerate((np.nan, minus_nan, np.inf, -np.inf, -np.inf, -np.inf)):
            rate = 0.004 if i < 3 else 0.05
            data = np.where((pick >= 0.05 * i) & (pick < 0.05 * i + rate), special, data)
    return data.astype(dtype)


def make_ids(
    rng: np.random.Generator, rows: int, segments: int, dtype: Any = "int32", is_sorted: bool = False
) -> np.ndarray:
    """Random ids, about one in ten of them negative or too large, as far as the dtype goes."""
    info = jnp.iinfo(jnp.dtype(dtype))
    least, most = int(info.min), int(info.max)
    ids = rng.integers(0, max(segments, 1), rows).astype(object)
    outside = rng.choice(np.array([-1, -segments, -(2**31), 2**31, 2**32, 2**63, segments, least, most], object), rows)
    ids = np.clip(np.where(rng.random(rows) < 0.1, outside, ids), least, most)
    ids = np.sort(ids) if is_sorted else ids
    return ids.astype(np.int64 if least < 0 else np.uint64).astype(jnp.dtype(dtype))


def cotangent(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Random cotangents, none of them small enough to underflow when it is shared."""
    return (rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 100, shape)).astype(jnp.dtype(dtype))


# ----------------------------------------------------------------------------------------------------------------------
# References: NumPy, one segment after the other, floating arithmetic in float64.


def is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def identity(dtype: Any) -> Any:
    """The maximum of no rows."""
    if is_floating(dtype):
        return -np.inf
    return False if dtype == np.bool_ else jnp.iinfo(dtype).min


def in_mode(ids: np.ndarray, segments: int, mode: str | None) -> np.ndarray:
    """The ids as Python integers, clamped for mode "clip"."""
    ids = ids.astype(object)
    return np.clip(ids, 0, segments - 1) if mode == "clip" and segments > 0 else ids


def _members(ids: np.ndarray, segments: int) -> list[tuple[int, np.ndarray]]:
    """The segments that have rows, each with the numbers of its rows."""
    rows: dict[int, list[int]] = {}
    for row, segment in enumerate(ids.tolist()):
        if 0 <= segment < segments:
            rows.setdefault(segment, []).append(row)
    return [(segment, np.array(numbers)) for segment, numbers in rows.items()]


def reference_max(data: np.ndarray, ids: np.ndarray, segments: int, mode: str | None = None) -> np.ndarray:
    """The maxima in the data's dtype."""
    output = np.full((segments, *data.shape[1:]), identity(data.dtype), data.dtype)
    for segment, rows in _members(in_mode(ids, segments, mode), segments):
        values = data[rows]
        if is_floating(data.dtype):
            wide = values.astype(np.float64)
            maxima = wide.max(axis=0)  # NaN where there is one
            only_minus_zero = (np.signbit(wide) | (wide != 0)).all(axis=0)
            maxima = np.where(maxima == 0, np.where(only_minus_zero, -0.0, 0.0), maxima)
            output[segment] = maxima.astype(data.dtype)
        else:
            output[segment] = values.max(axis=0)
    return output


def reference_gradient(
    d_output: np.ndarray, data: np.ndarray, ids: np.ndarray, tie_break: str, mode: str | None = None
) -> np.ndarray:
    """The cotangent of the data, each element rounded once from float64."""
    segments = d_output.shape[0]
    gradient = np.zeros(data.shape, np.float64)
    for segment, rows in _members(in_mode(ids, segments, mode), segments):
        values = data[rows].astype(np.float64)
        maxima = values.max(axis=0)
        gets_share = values == maxima  # nowhere if the maximum is NaN
        if tie_break == "first":
            gets_share &= np.cumsum(gets_share, axis=0) == 1
            members = np.ones(maxima.shape)
        else:
            members = gets_share.sum(axis=0) + (maxima == -np.inf)
        shares = d_output[segment].astype(np.float64) / np.maximum(members, 1)
        gradient[rows] = np.where(gets_share, shares, 0.0)
    return gradient.astype(data.dtype)


def shares(data: np.ndarray, ids: np.ndarray, segments: int, tie_break: str, mode: str | None = None) -> np.ndarray:
    """Each row's share of its cell's cotangent, in float64."""
    ones = np.ones((segments, *data.shape[1:]))
    return reference_gradient(ones, data.astype(np.float64), ids, tie_break, mode)


def segment_sum(terms: np.ndarray, ids: np.ndarray, segments: int) -> np.ndarray:
    """Sums of rows in float64."""
    total = np.zeros((segments, *terms.shape[1:]))
    for segment, rows in _members(ids, segments):
        total[segment] = terms[rows].astype(np.float64).sum(axis=0)
    return total


# ----------------------------------------------------------------------------------------------------------------------
# Comparison.


def assert_same_bits(actual: Any, expected: np.ndarray) -> None:
    """Same dtype, shape and bits; a NaN equals any NaN."""
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if is_floating(expected.dtype) and expected.dtype.itemsize > 1:
        both_nan = np.isnan(actual) & np.isnan(expected)
        unsigned = f"uint{8 * expected.dtype.itemsize}"
        same = both_nan | (np.ascontiguousarray(actual).view(unsigned) == np.ascontiguousarray(expected).view(unsigned))
    elif jnp.issubdtype(expected.dtype, jnp.inexact):
        actual, expected = (x.astype(np.complex128) for x in (actual, expected))
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    else:
        same = actual == expected
    if not same.all():
        where = np.argwhere(~same)
        first = tuple(where[0])
        raise AssertionError(
            f"{len(where)} of {same.size} elements differ, the first at {tuple(map(int, first))}: "
            f"{actual[first]!r}, expected {expected[first]!r}"
        )


def assert_same_values(actual: Any, expected: Any, rtol: float = 0) -> None:
    """Same dtype, shape and values; for references that do not order zeros by their signs on every platform."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    if is_floating(expected.dtype):
        actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=0, strict=True)
