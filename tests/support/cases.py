"""The table of cases, the inputs made from it, independent NumPy references, and comparison within stated errors."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_baracuda._core import jax_versions, selection
from jax_baracuda._core.native import NATIVE_MODULES
from jax_baracuda._core.op import OPS, Op
from jax_baracuda._core.rules import Rule
from jax_baracuda._core.selection import ScopedValue

# Tests run kernels wherever one exists, even if it is slower, unless they request something else.
selection._of_context = ScopedValue("implementation", jax.make_user_context(selection.KERNEL_IF_ANY))

PLATFORM = {"gpu": "cuda"}.get(jax.devices()[0].platform, jax.devices()[0].platform)
"""The platform that the tests run on, as native modules name it."""

REQUIRED_PLATFORM = os.environ.get("JAX_BARACUDA_REQUIRE")

FLOATING = ("float16", "bfloat16", "float32", "float64")
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
KERNEL_DTYPES = ("bool", *INTEGERS, *FLOATING)
WIDE_INTEGERS = ("int32", "uint32", "int64", "uint64")
SUB_BYTE = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")
"""The dtypes of less than a byte."""
TIE_BREAKS = ("split", "first")

where_barriers_are_kept = pytest.mark.skipif(
    not jax_versions.keeps_barriers(), reason="XLA of jax < 0.11 fuses a window with the array that it overwrites"
)
on_two_devices = pytest.mark.skipif(len(jax.devices()) < 2, reason="there is only one device")
on_four_devices = pytest.mark.skipif(len(jax.devices()) < 4, reason="there are less than four devices")

Values = Literal["special", "distinct", "ties"]


def use_rules(monkeypatch: pytest.MonkeyPatch, rules_of: Callable[[Op], Sequence[Rule]] | None = None) -> None:
    """The behaviour that users get: unless they request an implementation, the rules of ops (or `rules_of`) decide."""
    monkeypatch.setattr(selection, "_of_context", ScopedValue("implementation", jax.make_user_context(None)))
    if rules_of is not None:
        for op in OPS.values():
            monkeypatch.setitem(vars(op), "xla_rules", tuple(rules_of(op)))  # no setattr: ops are frozen


def each_pair(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """Pairwise testing of three parameters: all pairs of the first two, with the values of the third in turn.

    If the third has no more values than the others, few cases cover every pair of values of any two parameters.
    """
    first, second, third = (tuple(of) for of in values.values())
    drawn = [(a, b, third[(i + j) % len(third)]) for i, a in enumerate(first) for j, b in enumerate(second)]
    return pytest.mark.parametrize(list(values), drawn, ids=lambda value: re.sub(r"\W+", "-", str(value)).strip("-"))


def native_problem(platform: str) -> str | None:
    """Why the platform has no kernels here, or None."""
    if platform not in NATIVE_MODULES:
        return f"jax_baracuda has kernels for {sorted(NATIVE_MODULES)}"
    return NATIVE_MODULES[platform].problem


def skip_for_lack_of(platform: str, reason: str) -> NoReturn:
    """Skips the running test, or fails it if JAX_BARACUDA_REQUIRE names that platform."""
    if platform == REQUIRED_PLATFORM:
        pytest.fail(f"JAX_BARACUDA_REQUIRE={REQUIRED_PLATFORM}: {reason}", pytrace=False)
    pytest.skip(reason)


def x64_for(*dtypes: Any) -> contextlib.AbstractContextManager[Any]:
    """Context with 64-bit types enabled if one of the dtypes needs them, and disabled otherwise."""
    wide = ("int64", "uint64", "float64", "complex128")
    return jax.enable_x64(any(jnp.dtype(dtype).name in wide for dtype in dtypes))


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
    Shape(12_001, (33,), 3),
    Shape(4000, (5,), 60),
)
"""Small enough for NumPy, but they cover every path of a kernel: one or several threads and blocks, cells that fit in a
cache or in shared memory and cells that do not, narrow and wide rows, few and many segments."""

POWER_LAW_SHAPES = (Shape(70_000, (), 4000), Shape(70_000, (7,), 90), Shape(20_000, (7,), 90), Shape(9000, (130,), 700))
"""For ids with a few very frequent and many rare ones: see :func:`power_law_ids`."""

MOSTLY_EMPTY_SHAPES = (
    Shape(90_000, (), 270_001),
    Shape(30_000, (8,), 60_000),
    Shape(5000, (33,), 10_001),
    Shape(200, (130,), 5000),
)
"""Most segments have no rows. For such sizes, GPUs fill all results before they reduce the rows."""

BIG_SHAPE = Shape(66_000, (130,), 9000)
"""Big enough that, in every dtype, a GPU sorts the ids first and a CPU groups the rows by segment."""


def make_data(rng: np.random.Generator, shape: Sequence[int], dtype: Any, values: Values = "special") -> np.ndarray:
    """Random data.

    Args:
      values: "special": few distinct values (hence ties), mixed with NaN, infinities, zeros of both signs and the
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


def random_bits(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Random bit patterns of a dtype of whole bytes, including every kind of NaN."""
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype).reshape(tuple(shape))


def make_ids(
    rng: np.random.Generator, rows: int, segments: int, dtype: Any = "int32", is_sorted: bool = False
) -> np.ndarray:
    """Random ids; about one in ten is negative or too large, if the dtype allows it."""
    info = jnp.iinfo(jnp.dtype(dtype))
    minimum, maximum = int(info.min), int(info.max)
    ids = rng.integers(0, max(segments, 1), rows).astype(object)
    some = np.array([-1, -segments, -(2**31), 2**31, 2**32, 2**63, segments, minimum, maximum], object)
    outside = rng.choice(some, rows)
    ids = np.clip(np.where(rng.random(rows) < 0.1, outside, ids), minimum, maximum)
    ids = np.sort(ids) if is_sorted else ids
    return ids.astype(np.int64 if minimum < 0 else np.uint64).astype(jnp.dtype(dtype))


def power_law_ids(rng: np.random.Generator, rows: int, segments: int, is_sorted: bool = False) -> np.ndarray:
    """One id has about a third of the rows, most have few or none; one row in twenty is dropped."""
    ranks = np.minimum(rng.zipf(1.5, rows) - 1, segments)
    ids = np.where(rng.random(rows) < 0.05, -1, rng.permutation(segments + 1)[ranks])
    return (np.sort(ids) if is_sorted else ids).astype(np.int32)


def cotangent(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Random cotangents, large enough not to underflow when they are divided among ties."""
    return (rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 100, shape)).astype(jnp.dtype(dtype))


# ----------------------------------------------------------------------------------------------------------------------
# References: NumPy, floating arithmetic in float64 or wider.


def is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)


def accumulator(dtype: Any) -> np.dtype[Any]:
    """The dtype that kernels accumulate a floating dtype in."""
    return np.dtype(np.float32 if jnp.dtype(dtype).itemsize < 4 else dtype)


def eps_of(dtype: Any) -> float:
    """The machine epsilon of the accumulator: the spacing of its numbers at 1."""
    return float(np.finfo(accumulator(dtype)).eps)


def wider(dtype: Any) -> np.dtype[Any]:
    """A dtype whose rounding errors are negligible compared with those of the accumulator of `dtype`."""
    return np.dtype(np.longdouble if accumulator(dtype).itemsize > 4 else np.float64)


def rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounds exact values, or values of the accumulator, to the dtype of the result."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(accumulator(dtype)).astype(jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Expected:
    """The results that a kernel may return: any number within `error` of `exact`, rounded to `dtype`."""

    exact: np.ndarray
    dtype: Any
    error: np.ndarray | float = 0.0
    """Absolute. 0 if only the final rounding is possible; the result is then checked bit for bit."""

    def check(self, actual: Any, where: str = "") -> None:
        dtype = jnp.dtype(self.dtype)
        error = np.broadcast_to(self.error, self.exact.shape)
        if not is_floating(dtype) or not error.any():
            assert_same_bits(actual, rounded(self.exact, dtype) if is_floating(dtype) else self.exact, where)
            return
        actual = np.asarray(actual)
        assert (actual.dtype, actual.shape) == (dtype, self.exact.shape), f"{where} {actual.dtype}{actual.shape}"
        with np.errstate(invalid="ignore"):  # infinity minus infinity, replaced below; signalling NaN
            error = np.where(np.isfinite(self.exact), error, 0)
            low, high = (rounded(x, dtype).astype(np.float64) for x in (self.exact - error, self.exact + error))
            wide = actual.astype(np.float64)
        fits = ((low <= wide) & (wide <= high)) | (np.isnan(wide) & np.isnan(low))
        if not fits.all():
            first = tuple(np.argwhere(~fits)[0])
            raise AssertionError(
                f"{where} {(~fits).sum()} of {fits.size} elements are wrong, the first at {tuple(map(int, first))}: "
                f"{actual[first]!r}, expected {self.exact[first]!r} with an error of {error[first]:.3g}"
            )


def identity(dtype: Any) -> Any:
    """The maximum over no rows."""
    if is_floating(dtype):
        return -np.inf
    return False if dtype == np.bool_ else jnp.iinfo(dtype).min


def order_reversed(data: np.ndarray) -> np.ndarray:
    """Maps values so that their order is reversed: the maximum of the result is the minimum of the data."""
    return -data if is_floating(data.dtype) else ~data


def in_mode(ids: np.ndarray, segments: int, mode: str | None) -> np.ndarray:
    """The ids, clamped for mode "clip"."""
    clamps = mode == "clip" and segments > 0
    return np.clip(ids.astype(object), 0, segments - 1).astype(np.int64) if clamps else ids


def _members(ids: np.ndarray, segments: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each number of rows n that occurs: the segments [k] with n rows, and the indices of their rows [n, k]."""
    inside = np.flatnonzero((ids >= 0) & (ids < segments))
    of_row = ids[inside].astype(np.int64)
    rows = inside[np.argsort(of_row, kind="stable")]
    numbers, starts, lengths = np.unique(np.sort(of_row), return_index=True, return_counts=True)
    for length in np.unique(lengths):
        of_length = lengths == length
        yield numbers[of_length], rows[starts[of_length] + np.arange(length)[:, None]]


def counts(ids: np.ndarray, segments: int) -> np.ndarray:
    """The number of rows of each segment."""
    count = np.zeros(segments, np.int64)
    for numbers, rows in _members(ids, segments):
        count[numbers] = len(rows)
    return count


def take_cells(cells: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The cells of each row's segment, 0 for dropped rows."""
    taken = np.zeros((len(ids), *cells.shape[1:]), cells.dtype)
    for numbers, rows in _members(ids, len(cells)):
        taken[rows] = cells[numbers]
    return taken


def reference_max(data: np.ndarray, ids: np.ndarray, segments: int, mode: str | None = None) -> np.ndarray:
    """The maxima in the data's dtype."""
    output = np.full((segments, *data.shape[1:]), identity(data.dtype), data.dtype)
    for numbers, rows in _members(in_mode(ids, segments, mode), segments):
        values = data[rows]
        if is_floating(data.dtype):
            wide = values.astype(np.float64)
            maxima = wide.max(axis=0)  # NaN if a value is NaN
            only_minus_zero = (np.signbit(wide) | (wide != 0)).all(axis=0)
            maxima = np.where(maxima == 0, np.where(only_minus_zero, -0.0, 0.0), maxima)
            output[numbers] = maxima.astype(data.dtype)
        else:
            output[numbers] = values.max(axis=0)
    return output


def reference_min(data: np.ndarray, ids: np.ndarray, segments: int, mode: str | None = None) -> np.ndarray:
    """The minima in the data's dtype."""
    return order_reversed(reference_max(order_reversed(data), ids, segments, mode))


def reference_max_gradient(
    d_output: np.ndarray, data: np.ndarray, ids: np.ndarray, tie_break: str, mode: str | None = None
) -> np.ndarray:
    """The cotangent of the data, each element rounded once from float64."""
    segments = d_output.shape[0]
    gradient = np.zeros(data.shape, np.float64)
    for numbers, rows in _members(in_mode(ids, segments, mode), segments):
        values = data[rows].astype(np.float64)
        maxima = values.max(axis=0)
        gets_share = values == maxima  # False everywhere if the maximum is NaN
        if tie_break == "first":
            gets_share &= np.cumsum(gets_share, axis=0) == 1
            members = np.ones(maxima.shape)
        else:
            members = gets_share.sum(axis=0) + (maxima == -np.inf)
        shares = d_output[numbers].astype(np.float64) / np.maximum(members, 1)
        gradient[rows] = np.where(gets_share, shares, 0.0)
    return gradient.astype(data.dtype)


def reference_min_gradient(
    d_output: np.ndarray, data: np.ndarray, ids: np.ndarray, tie_break: str, mode: str | None = None
) -> np.ndarray:
    return reference_max_gradient(d_output, order_reversed(data), ids, tie_break, mode)


def shares(data: np.ndarray, ids: np.ndarray, segments: int, tie_break: str, mode: str | None = None) -> np.ndarray:
    """The fraction of a cell's cotangent that each row gets in the gradient of the maximum, in float64."""
    ones = np.ones((segments, *data.shape[1:]))
    return reference_max_gradient(ones, data.astype(np.float64), ids, tie_break, mode)


def reference_argmax(data: np.ndarray, ids: np.ndarray, segments: int) -> np.ndarray:
    """The first row that attains the maximum, or the first NaN; the number of rows for empty segments."""
    winner = np.full((segments, *data.shape[1:]), data.shape[0], np.int32)
    for numbers, rows in _members(ids, segments):
        values = data[rows].astype(np.float64) if is_floating(data.dtype) else data[rows]
        first = values.argmax(axis=0, keepdims=True)
        winner[numbers] = np.take_along_axis(rows.reshape(*rows.shape, *(1 for _ in data.shape[1:])), first, 0)[0]
    return winner


def reference_argmin(data: np.ndarray, ids: np.ndarray, segments: int) -> np.ndarray:
    return reference_argmax(order_reversed(data), ids, segments)


def segment_sum(terms: np.ndarray, ids: np.ndarray, segments: int) -> np.ndarray:
    """Sums of rows: of integers modulo 2^bits, of floating data in extended precision."""
    wide = np.longdouble if is_floating(terms.dtype) else terms.dtype
    total = np.zeros((segments, *terms.shape[1:]), wide)
    with np.errstate(invalid="ignore"):  # the sum of opposite infinities is NaN
        for numbers, rows in _members(ids, segments):
            total[numbers] = terms[rows].astype(wide).sum(axis=0, dtype=wide) + np.dtype(wide).type(0)
    return total


def sum_error(terms: np.ndarray, ids: np.ndarray, segments: int, dtype: Any) -> np.ndarray:
    """The rounding error of sums of terms in the accumulator of `dtype`, in any order of the additions.

    Each of n additions rounds a partial sum by half an eps; the partial sum is at most the sum of magnitudes. These
    errors are independent, so they grow like a random walk. Sums of small integers are exact.
    """
    with np.errstate(invalid="ignore"):
        magnitude = segment_sum(np.abs(terms.astype(np.longdouble)), ids, segments)
        is_whole = segment_sum((terms != np.round(terms.astype(np.float64))).astype(np.float64), ids, segments) == 0
    eps = eps_of(dtype)
    n = counts(ids, segments).reshape(-1, *(1 for _ in terms.shape[1:]))
    is_exact = (is_whole & (magnitude * eps <= 1)) | (n <= 1) | ~np.isfinite(magnitude)
    return np.where(is_exact, 0, (1 + np.sqrt(n)) * eps * magnitude)


def reference_sum(data: np.ndarray, ids: np.ndarray, segments: int) -> Expected:
    total = segment_sum(data, ids, segments)
    error = sum_error(data, ids, segments, data.dtype) if is_floating(data.dtype) else 0.0
    return Expected(total, data.dtype, error)


def mean_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype of means: the dtype of floating data; float64 for integers of 64 bits; float32 for other integers."""
    if is_floating(dtype):
        return jnp.dtype(dtype)
    return np.dtype(np.float64 if jnp.dtype(dtype).itemsize == 8 else np.float32)


def _divided(cells: np.ndarray, count: np.ndarray, dtype: Any) -> np.ndarray:
    """Quotients, rounded once to the accumulator of `dtype`."""
    compute_dtype = accumulator(dtype)
    divisor = np.maximum(count, 1).reshape(-1, *(1 for _ in cells.shape[1:])).astype(compute_dtype)
    with np.errstate(over="ignore", under="ignore"):
        return cells.astype(compute_dtype) / divisor


def reference_mean(data: np.ndarray, ids: np.ndarray, segments: int) -> Expected:
    dtype, count = mean_dtype(data.dtype), counts(ids, segments)
    total = reference_sum(data.astype(dtype), ids, segments)
    mean = _divided(total.exact, count, dtype)
    error = np.where(
        total.error > 0, _divided(np.asarray(total.error), count, np.float64) + eps_of(dtype) * abs(mean), 0
    )
    return Expected(mean, dtype, error)


def reference_sum_gradient(d_output: np.ndarray, data: np.ndarray, ids: np.ndarray) -> Expected:
    return Expected(take_cells(d_output, ids), d_output.dtype)


def reference_mean_gradient(d_output: np.ndarray, data: np.ndarray, ids: np.ndarray) -> Expected:
    quotients = _divided(d_output, counts(ids, len(d_output)), d_output.dtype)
    return Expected(take_cells(quotients, ids), d_output.dtype)


def divided_by_xla(expected: Expected) -> Expected:
    """What plain JAX returns for these quotients: XLA's division on GPUs is within 2 ulp, except for float64."""
    if PLATFORM == "cpu" or jnp.dtype(expected.dtype) == np.float64:
        return expected
    magnitudes = np.abs(np.where(np.isfinite(expected.exact), expected.exact, 0), dtype=np.float64)
    return dataclasses.replace(expected, error=2 * float(np.finfo(np.float32).eps) * magnitudes)


@dataclasses.dataclass(frozen=True)
class _Factors:
    """Floating numbers split into mantissa and exponent, so that their products neither overflow nor underflow."""

    mantissa: np.ndarray
    """Its magnitude is in [0.5, 1), and 0.5 for zeros, infinities and NaN. Its sign is the number's."""
    exponent: np.ndarray
    zeros: np.ndarray
    infinities: np.ndarray
    nans: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> _Factors:
        wide = values.astype(np.longdouble)
        is_ordinary = np.isfinite(wide) & (wide != 0)
        mantissa, exponent = np.frexp(np.where(is_ordinary, wide, np.copysign(0.5, wide)))
        exponent = np.where(is_ordinary, exponent, 1).astype(np.int64)
        return cls(mantissa, exponent, *(x.astype(np.int64) for x in (wide == 0, np.isinf(wide), np.isnan(wide))))

    def product(self) -> _Factors:
        """The product along the first axis."""
        mantissa, exponent = self.mantissa, self.exponent.sum(axis=0)
        while len(mantissa) > 1:
            if len(mantissa) % 2:
                mantissa = np.concatenate([mantissa, np.ones_like(mantissa[:1])])
            mantissa, shift = np.frexp(mantissa[::2] * mantissa[1::2])
            exponent = exponent + shift.astype(np.int64).sum(axis=0)
        return _Factors(mantissa[0], exponent, *(x.sum(axis=0) for x in (self.zeros, self.infinities, self.nans)))

    def value(self) -> np.ndarray:
        exponent = np.clip(self.exponent, -(2**15), 2**15).astype(np.int32)
        with np.errstate(over="ignore", under="ignore"):
            value = np.ldexp(self.mantissa, exponent)
        value = np.where(self.zeros > 0, np.copysign(0, self.mantissa), value)
        value = np.where(self.infinities > 0, np.copysign(np.inf, self.mantissa), value)
        return np.where((self.nans > 0) | ((self.zeros > 0) & (self.infinities > 0)), np.nan, value)

    def __getitem__(self, index: Any) -> _Factors:
        return _Factors(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))


def _product_error(values: np.ndarray, product: np.ndarray, dtype: Any) -> np.ndarray:
    """The rounding error of the product of the values along the first axis; 0 if all are powers of two."""
    with np.errstate(invalid="ignore"):
        is_power = (np.abs(np.frexp(values.astype(np.float64))[0]) == 0.5) | ~np.isfinite(values.astype(np.float64))
        roundings = np.maximum((~is_power & (values != 0)).sum(axis=0) - 1, 0)
        return np.where(np.isfinite(product), roundings * eps_of(dtype) * np.abs(product), 0)


def reference_prod(data: np.ndarray, ids: np.ndarray, segments: int) -> Expected:
    """The products of integers modulo 2^bits, and of floating data as if their range were unbounded."""
    if not is_floating(data.dtype):
        product = np.ones((segments, *data.shape[1:]), data.dtype)
        for numbers, rows in _members(ids, segments):
            product[numbers] = data[rows].prod(axis=0, dtype=data.dtype)
        return Expected(product, data.dtype)
    product = np.ones((segments, *data.shape[1:]), np.longdouble)
    error = np.zeros(product.shape, np.longdouble)
    for numbers, rows in _members(ids, segments):
        product[numbers] = _Factors.of(data[rows]).product().value()
        error[numbers] = _product_error(data[rows], product[numbers], data.dtype)
    return Expected(product, data.dtype, error)


def products_of_others(values: np.ndarray) -> np.ndarray:
    """For each value along the first axis, the product of all others."""
    factors, n = _Factors.of(values), len(values)
    if n <= 64:
        others = np.array([[k for k in range(n) if k != i] for i in range(n)], np.int64).T  # [n - 1, n]
        return factors[others].product().value() if n > 1 else np.ones(values.shape, np.longdouble)
    # With many values, divide the total product by each value: in extended precision mantissas divide accurately.
    total = factors.product()
    rest = (getattr(total, name) - getattr(factors, name) for name in ("exponent", "zeros", "infinities", "nans"))
    return _Factors(total.mantissa / factors.mantissa, *rest).value()


def reference_prod_gradient(d_output: np.ndarray, data: np.ndarray, ids: np.ndarray) -> Expected:
    """The cotangent times the product of the segment's other rows; that product may exceed the range of any dtype."""
    gradient = np.zeros(data.shape, np.longdouble)
    error = np.zeros(data.shape, np.longdouble)
    wide = accumulator(data.dtype)
    for numbers, rows in _members(ids, len(d_output)):
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            gradient[rows] = products_of_others(data[rows]) * d_output[numbers].astype(np.longdouble)
            # Roundings: the product of all rows, the division by one row, and the product with the cotangent.
            relative = _product_error(np.concatenate([data[rows], data[rows][:2]]), gradient[rows], data.dtype)
            is_subnormal = (relative > 0) & (np.abs(gradient[rows]) < 2 * float(np.finfo(wide).tiny))
            error[rows] = relative + np.where(is_subnormal, float(np.finfo(wide).smallest_subnormal), 0)
    return Expected(gradient, data.dtype, error)


def reference_softmax(logits: np.ndarray, ids: np.ndarray, segments: int) -> Expected:
    """Softmax over the rows of each segment, 0 for dropped rows."""
    wide = wider(logits.dtype)
    probabilities, error = np.zeros((2, *logits.shape), wide)
    eps, tiny = eps_of(logits.dtype), float(np.finfo(accumulator(logits.dtype)).tiny)
    for _, rows in _members(ids, segments):
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            x = logits[rows].astype(wide)
            x = x - x.max(axis=0)
            terms = np.exp(x)
            p = probabilities[rows] = terms / terms.sum(axis=0)
            # The difference, the exponential, the sum and the quotient are rounded; few of these terms are large.
            relative = eps * (np.where(p > 0, np.abs(x), 0) + 4 + np.sqrt(len(rows)))
            error[rows] = np.where(np.isfinite(p), relative * p + (len(rows) > 1) * 2 * tiny, 0)
    return Expected(probabilities, logits.dtype, error)


def reference_softmax_gradient(
    d_probabilities: np.ndarray, probabilities: np.ndarray, ids: np.ndarray, segments: int
) -> Expected:
    """The cotangent of the logits, computed from the rounded probabilities."""
    wide = wider(probabilities.dtype)
    gradient, error = np.zeros((2, *probabilities.shape), wide)
    eps = eps_of(probabilities.dtype)
    for _, rows in _members(ids, segments):
        p, d = (x[rows].astype(wide) for x in (probabilities, d_probabilities))
        with np.errstate(invalid="ignore"):
            gradient[rows] = p * (d - (p * d).sum(axis=0))
            error[rows] = (3 + np.sqrt(len(rows))) * eps * np.abs(p) * (np.abs(d) + np.abs(p * d).sum(axis=0))
    return Expected(gradient, probabilities.dtype, error + float(np.finfo(accumulator(probabilities.dtype)).tiny))


# ----------------------------------------------------------------------------------------------------------------------
# Comparison.


@contextlib.contextmanager
def raises(error: str, prefix: str = "") -> Iterator[None]:
    """The block raises an error, given as "type: pattern of the message after the prefix"."""
    kind, _, message = error.partition(": ")
    with pytest.raises(Exception, match=f"(?s){prefix}{message}") as raised:
        yield
    assert raised.type.__name__ == kind, repr(raised.value)


def _assert_all(same: np.ndarray, actual: np.ndarray, expected: np.ndarray, where: str) -> None:
    if not same.all():
        wrong = np.argwhere(~same)
        first = tuple(wrong[0])
        raise AssertionError(
            f"{where} {len(wrong)} of {same.size} elements differ, the first at {tuple(map(int, first))}: "
            f"{actual[first]!r}, expected {expected[first]!r}"
        )


def _of_type(actual: Any, expected: np.ndarray, where: str) -> np.ndarray:
    """The array, whose dtype and shape must be the expected ones."""
    actual = np.asarray(actual)
    assert actual.dtype == expected.dtype, f"{where} dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{where} shape {actual.shape}, expected {expected.shape}"
    return actual


def assert_same_bits(actual: Any, expected: np.ndarray, where: str = "") -> None:
    """Same dtype, shape and bits; a NaN equals any NaN."""
    actual = _of_type(actual, expected, where)
    if is_floating(expected.dtype) and expected.dtype.itemsize > 1:
        both_nan = np.isnan(actual) & np.isnan(expected)
        unsigned = f"uint{8 * expected.dtype.itemsize}"
        same = both_nan | (np.ascontiguousarray(actual).view(unsigned) == np.ascontiguousarray(expected).view(unsigned))
    elif jnp.issubdtype(expected.dtype, jnp.inexact):
        with np.errstate(invalid="ignore"):  # signalling NaN
            actual, expected = (x.astype(np.complex128) for x in (actual, expected))
            same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    else:
        same = actual == expected
    _assert_all(same, actual, expected, where)


def assert_same_memory(actual: Any, expected: np.ndarray, where: str = "") -> None:
    """Same dtype, shape and bits, including the bits of NaN."""
    actual = _of_type(actual, expected, where)
    ours, theirs = (np.frombuffer(x.tobytes(), np.uint8).reshape(*x.shape, x.itemsize) for x in (actual, expected))
    _assert_all((ours == theirs).all(axis=-1), actual, expected, where)


def assert_same_values(actual: Any, expected: Any, rtol: float = 0) -> None:
    """Same dtype, shape and values; for references that do not order -0 and +0 on every platform."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    if is_floating(expected.dtype):
        actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=0, strict=True)
