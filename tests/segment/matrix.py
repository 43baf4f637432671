"""Declarations of the segment reductions, and their references."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.cases import identity, is_floating
from support.matrix.calls import (
    ABSENT,
    FLOATING,
    Constraint,
    Draw,
    Operand,
    Options,
    Problem,
    Sizes,
    ascending,
    by_name,
    declare,
    finite_numbers,
    integers,
    is_member,
    numbers,
    operand_names,
    passed,
    segment_sum,
    special,
    special_numbers,
    take_cells,
    ties,
    wide_ids,
    with_dropped,
)
from support.matrix.generator import DERIVATIVES, SECOND_DERIVATIVES

import jax_baracuda

# ----------------------------------------------------------------------------------------------------------------------
# References. Rows are [N, ...], ids [N], floating numbers float64.


def _ordered_bits(x: Any) -> Any:
    """Integers that sort as the floating-point numbers do, -0 below +0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int64)
    return jnp.where(bits < 0, bits ^ np.int64(np.iinfo(np.int64).max), bits)


def _equal(x: Any, y: Any) -> Any:
    """Whether numbers are equal. On CPUs, XLA's floating-point comparisons treat subnormal numbers as zeros."""
    if not is_floating(x.dtype):
        return x == y
    bits_of_x, bits_of_y = (jax.lax.bitcast_convert_type(z, jnp.int64) for z in (x, y))
    # Test the bits of both together: LLVM turns a test of one number's bits into a floating-point comparison.
    are_zeros = (bits_of_x | bits_of_y) << 1 == 0
    return ~jnp.isnan(x) & ~jnp.isnan(y) & ((bits_of_x == bits_of_y) | are_zeros)


def _from_ordered_bits(bits: Any) -> Any:
    bits = jnp.where(bits < 0, bits ^ np.int64(np.iinfo(np.int64).max), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float64)


def _counts(data: Any, ids: Any, num_segments: int) -> Any:
    """The number of rows of each segment, in the rank of the data."""
    return segment_sum(jnp.ones(ids.shape), ids, num_segments).reshape(-1, *[1] * (data.ndim - 1))


def plain_max(data: Any, ids: Any, num_segments: int) -> Any:
    """The maximum by a total order of integers. It does not depend on the order in which XLA scatters."""
    is_float = is_floating(data.dtype)
    keys = _ordered_bits(jnp.where(jnp.isnan(data), 0, data)) if is_float else data.astype(jnp.int64)
    if data.dtype == jnp.uint64:
        keys = jax.lax.bitcast_convert_type(data, jnp.int64) ^ np.int64(np.iinfo(np.int64).min)
    is_empty = _counts(data, ids, num_segments) == 0
    ids = with_dropped(ids, num_segments)
    maxima = jax.ops.segment_max(keys, ids, num_segments + 1)[:num_segments]
    if is_float:
        has_nan = jax.ops.segment_max(jnp.isnan(data).astype(jnp.int32), ids, num_segments + 1)[:num_segments] > 0
        maxima = jnp.where(has_nan, jnp.nan, _from_ordered_bits(maxima))
    elif data.dtype == jnp.uint64:
        maxima = jax.lax.bitcast_convert_type(maxima ^ np.int64(np.iinfo(np.int64).min), jnp.uint64)
    return jnp.where(is_empty, identity(data.dtype), maxima).astype(data.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def reference_max(data: Any, ids: Any, num_segments: int, first_wins: bool, counts_identity: bool) -> Any:
    return plain_max(data, ids, num_segments)


@reference_max.defjvp
def _reference_max_jvp(
    num_segments: int, first_wins: bool, counts_identity: bool, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    data, ids = primals
    output = plain_max(data, ids, num_segments)
    share = _shares(data, ids, output, first_wins, counts_identity)
    return output, segment_sum(jnp.where(share > 0, share * tangents[0], 0), ids, num_segments)


def _shares(data: Any, ids: Any, output: Any, first_wins: bool, counts_identity: bool) -> Any:
    num_segments = output.shape[0]
    attains = _equal(data, take_cells(output, ids, jnp.nan))
    if first_wins:
        row = jnp.arange(data.shape[0]).reshape(-1, *[1] * (data.ndim - 1))
        last = np.int64(np.iinfo(np.int64).max)
        first = ~plain_max(~jnp.where(attains, row, last), ids, num_segments)
        return (attains & (take_cells(first, ids) == row)).astype(jnp.float64)
    count = segment_sum(attains.astype(jnp.float64), ids, num_segments)
    count += counts_identity & (output == -np.inf)
    return jnp.where(attains, 1 / jnp.maximum(take_cells(count, ids), 1), 0)


@jax.custom_jvp
def _negative(x: Any) -> Any:
    """``-x``, also of zeros: in some fusions XLA computes ``0 - x``."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int64)
    return jax.lax.bitcast_convert_type(bits ^ np.int64(np.iinfo(np.int64).min), jnp.float64)


@_negative.defjvp
def _negative_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _negative(*primals), -tangents[0]


def _reversed(x: Any) -> Any:
    return _negative(x) if is_floating(x.dtype) else ~x


def _in_buckets(reduce: Callable[..., Any], over: Callable[..., Any], bucket_size: int | None) -> Callable[..., Any]:
    """``(data, ids, num_segments)``: reduces in buckets first if there is a `bucket_size`."""
    if bucket_size is None:
        return reduce

    def call(data: Any, ids: Any, num_segments: int) -> Any:
        buckets = -(-ids.shape[0] // bucket_size)
        bucket = jnp.arange(ids.shape[0]) // bucket_size
        ids = wide_ids(ids)
        joint = jnp.where((ids >= 0) & (ids < num_segments), ids + bucket * num_segments, -1)
        cells = reduce(data, joint, buckets * num_segments)
        return over(cells, jnp.tile(jnp.arange(num_segments), buckets), num_segments)

    return call


def _extremum(is_max: bool, first_wins: bool, bucket_size: int | None) -> Callable[..., Any]:
    def reduce(counts_identity: bool, data: Any, ids: Any, num_segments: int) -> Any:
        if is_max:
            return reference_max(data, ids, num_segments, first_wins, counts_identity)
        return _reversed(reference_max(_reversed(data), ids, num_segments, first_wins, counts_identity))

    parts = (functools.partial(reduce, counts) for counts in (True, False))
    return _in_buckets(*parts, None if first_wins else bucket_size)


def reference_arg(is_max: bool, data: Any, ids: Any, num_segments: int) -> Any:
    data = data if is_max else _reversed(data)
    output = plain_max(data, ids, num_segments)
    cells = take_cells(output, ids)
    attains = is_member(ids, num_segments, data) & (_equal(data, cells) | ((data != data) & (cells != cells)))
    row = jnp.arange(data.shape[0]).reshape(-1, *[1] * (data.ndim - 1))
    first = ~plain_max(~jnp.where(attains, row, data.shape[0]), ids, num_segments)
    return jnp.clip(first, 0, data.shape[0]).astype(jnp.int32)


def reference_mean(data: Any, ids: Any, num_segments: int) -> Any:
    return segment_sum(data, ids, num_segments) / jnp.maximum(_counts(data, ids, num_segments), 1)


MAX_DENSE_ELEMENTS = 1 << 20


def reference_prod(data: Any, ids: Any, num_segments: int) -> Any:
    if not is_floating(data.dtype):
        return jax.ops.segment_prod(data, with_dropped(ids, num_segments), num_segments + 1)[:num_segments]
    if num_segments * math.prod(data.shape) > MAX_DENSE_ELEMENTS:  # then there are no zeros
        is_negative = segment_sum((data < 0).astype(jnp.int32), ids, num_segments) % 2
        return (1 - 2 * is_negative) * jnp.exp(segment_sum(jnp.log(jnp.abs(data)), ids, num_segments))
    ids = wide_ids(ids)
    is_of = ids[None] == jnp.arange(num_segments)[:, None]
    terms = jnp.where(is_of.reshape(*is_of.shape, *[1] * (data.ndim - 1)), data[None], 1)
    # Pairwise products, because JAX's product has no second derivative at zeros.
    while terms.shape[1] > 1:
        if terms.shape[1] % 2:
            terms = jnp.concatenate([terms, jnp.ones_like(terms[:, :1])], axis=1)
        terms = terms[:, ::2] * terms[:, 1::2]
    return terms[:, 0] if terms.shape[1] else jnp.ones((num_segments, *data.shape[1:]))


@jax.custom_jvp
def _magnitude(x: Any) -> Any:
    """The absolute value, with a derivative of 1."""
    return jnp.abs(x)


_magnitude.defjvp(lambda primals, tangents: (_magnitude(*primals), *tangents))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _inverse_power(k: int, x: Any) -> Any:
    """``x**-k``, with positive derivatives."""
    return x**-k


@_inverse_power.defjvp
def _inverse_power_jvp(k: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _inverse_power(k, *primals), k * _inverse_power(k + 1, *primals) * tangents[0]


@jax.custom_jvp
def _log(x: Any) -> Any:
    """The logarithm, with positive derivatives of every order."""
    return jnp.log(x)


_log.defjvp(lambda primals, tangents: (_log(*primals), _inverse_power(1, *primals) * tangents[0]))


def majorant_prod(data: Any, ids: Any, num_segments: int) -> Any:
    """The product of magnitudes. Its derivatives of every order are free of subtractions."""
    data = _magnitude(data)
    if num_segments * math.prod(data.shape) > MAX_DENSE_ELEMENTS:
        return jnp.exp(segment_sum(_log(data), ids, num_segments))
    return reference_prod(data, ids, num_segments)


def reference_var(ddof: int, data: Any, ids: Any, num_segments: int) -> Any:
    count = _counts(data, ids, num_segments)
    difference = data - take_cells(reference_mean(data, ids, num_segments), ids)
    variance = segment_sum(difference**2, ids, num_segments) / jnp.maximum(count - ddof, 1)
    return jnp.where((count > ddof) | (ddof == 0), variance, jnp.nan)


def reference_std(ddof: int, data: Any, ids: Any, num_segments: int) -> Any:
    """The root of the variance. All its derivatives are 0 where the variance is 0 or NaN."""
    variance = reference_var(ddof, data, ids, num_segments)
    root = jnp.sqrt(jnp.where(variance > 0, variance, 1))
    return jnp.where(variance > 0, root, jax.lax.stop_gradient(variance))


def majorant_var(ddof: int, data: Any, ids: Any, num_segments: int) -> Any:
    """The sum of squared sums of magnitudes: a rounded mean has an error of the size of the magnitudes."""
    magnitude = _magnitude(data)
    mean = take_cells(reference_mean(magnitude, ids, num_segments), ids)
    count = _counts(data, ids, num_segments)
    return segment_sum((magnitude + mean) ** 2, ids, num_segments) / jnp.maximum(count - ddof, 1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 3))
def _positive_std(ddof: int, data: Any, ids: Any, num_segments: int) -> Any:
    """The standard deviation, or what rounding in float64 makes of 0. Its derivatives are free of subtractions."""
    of_rounding = 1e-8 * jnp.sqrt(majorant_var(ddof, data, ids, num_segments))
    of_rounding = jnp.where(of_rounding == 0, 1, of_rounding)
    exact = reference_std(ddof, data, ids, num_segments)
    return jnp.where(exact > of_rounding, exact, of_rounding)


@_positive_std.defjvp
def _positive_std_jvp(ddof: int, num_segments: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    data, ids = primals
    _, tangent = jax.jvp(lambda x: majorant_var(ddof, x, ids, num_segments), (data,), tangents[:1])
    output = _positive_std(ddof, data, ids, num_segments)
    return output, _inverse_power(1, output) * tangent / 2


def majorant_std(ddof: int, data: Any, ids: Any, num_segments: int) -> Any:
    """The error of the root is that of the variance, divided by the root."""
    inverse = _inverse_power(1, _positive_std(ddof, data, ids, num_segments))
    return majorant_var(ddof, data, ids, num_segments) * inverse


def reference_softmax(logits: Any, ids: Any, num_segments: int) -> Any:
    maxima = jax.lax.stop_gradient(plain_max(logits, ids, num_segments))
    has_segment = is_member(ids, num_segments, logits)
    exponentials = jnp.exp(jnp.where(has_segment, logits - take_cells(maxima, ids), -jnp.inf))
    total = take_cells(segment_sum(exponentials, ids, num_segments), ids, 1)
    return exponentials / total


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def majorant_softmax(logits: Any, ids: Any, num_segments: int) -> Any:
    """The probabilities, times the factor by which a rounded exponent increases their relative error."""
    maxima = take_cells(plain_max(logits, ids, num_segments), ids)
    distance = jnp.where(jnp.isfinite(logits) & jnp.isfinite(maxima), maxima - logits, 0)
    distance = jnp.minimum(distance, 1e3)  # farther away, probabilities are 0, and the difference may be inf
    return reference_softmax(logits, ids, num_segments) * (1 + jnp.abs(distance))


@majorant_softmax.defjvp
def _majorant_softmax_jvp(num_segments: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    logits, ids = primals
    p = majorant_softmax(logits, ids, num_segments)
    mean = take_cells(segment_sum(p * tangents[0], ids, num_segments), ids)
    return p, p * (tangents[0] + mean)


def _softmax_gradient(sign: int, d_p: Any, p: Any, ids: Any, num_segments: int) -> Any:
    gradient = p * (d_p + sign * take_cells(segment_sum(p * d_p, ids, num_segments), ids))
    return jnp.where(is_member(ids, num_segments, p), gradient, 0)


# ----------------------------------------------------------------------------------------------------------------------
# Data.


MAX_EXTREME_FACTORS = 24
"""The product of this many extreme factors is in the range of the reference's float64."""


def factors(num_rows: int, extreme: bool = False) -> Draw:
    """Factors for `num_rows` rows, shared or not. Products neither overflow nor underflow. Small arrays have zeros.

    With `extreme`, partial or final products of small arrays leave the range of the dtype.
    """
    widest = min(0.22, 20 / math.sqrt(max(num_rows, 1)))

    def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if not is_floating(dtype):
            return numbers(rng, shape, dtype) | np.asarray(1, dtype)
        of_this_size = widest if shape[0] == num_rows else min(widest, 40 / max(num_rows, 1))
        data = rng.choice([-1.0, 1.0], shape) * np.exp(rng.uniform(-of_this_size, of_this_size, shape))
        if extreme and num_rows <= MAX_EXTREME_FACTORS and dtype.name in ("float32", "bfloat16"):
            data = np.ldexp(data, rng.integers(-40, 41, shape))
        if num_rows * math.prod(shape[1:]) < 2000:
            data = np.where(rng.random(shape) < 0.08, 0.0, data)
        return data.astype(dtype)

    return draw


def logits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    data = rng.uniform(-3, 3, shape).astype(dtype)
    few = np.array([-np.inf]) if rng.random() < 0.7 else special_numbers(dtype)
    return np.where(rng.random(shape) < 0.05, few[rng.integers(len(few), size=shape)].astype(dtype), data)


def finite_logits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return rng.uniform(-3, 3, shape).astype(dtype)


def probabilities(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return rng.uniform(0.05, 1, shape).astype(dtype)


def ids_of(num_segments: int, is_sorted: bool) -> Draw:
    """Random ids. About one in ten is out of range, in either direction, up to the limits of the dtype."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        info = np.iinfo(dtype)
        ids = rng.integers(0, max(num_segments, 1), shape).astype(object)
        outside = rng.choice(np.array([-1, num_segments, int(info.min), int(info.max)], object), shape)
        ids = np.clip(np.where(rng.random(shape) < 0.1, outside, ids), int(info.min), int(info.max))
        ids = ids.astype(np.int64 if info.min < 0 else np.uint64).astype(dtype)
        return np.sort(ids, axis=-1) if is_sorted else ids

    return draw


def row_numbers_of(num_rows: int) -> Draw:
    """Random row numbers; negative ones count from the end. None is out of range: JAX's derivatives disagree there. The
    tangent is that of the nearest row, the gradient is dropped, and the second gradient is not."""
    return integers(-num_rows, num_rows - 1)


# ----------------------------------------------------------------------------------------------------------------------
# Declarations.

SIZES: dict[str, Sizes] = {
    "small": {"row": 16, "features": (4,), "segment": 6},
    "odd": {"row": 13, "features": (3,), "segment": 5},
    "scalars": {"row": 24, "features": (), "segment": 3},
    "one": {"row": 1, "features": (1,), "segment": 1},
    "empty": {"row": 0, "features": (3,), "segment": 4},
    "no segments": {"row": 5, "features": (2,), "segment": 0},
    "three axes": {"row": 8, "features": (2, 4), "segment": 12},
    "no features": {"row": 6, "features": (0,), "segment": 3},
}
MIDDLE_SIZES: dict[str, Sizes] = {
    "many rows, few segments": {"row": 9000, "features": (2,), "segment": 2},
    "many narrow rows": {"row": 20_000, "features": (), "segment": 4000},
    "wide rows": {"row": 160, "features": (1500,), "segment": 100},
    "rows to group": {"row": 40_000, "features": (130,), "segment": 6000},
    "mostly empty": {"row": 3001, "features": (33,), "segment": 9000},
}
LARGE_SIZES: dict[str, Sizes] = {
    **MIDDLE_SIZES,
    "ordered": {"row": 100_000, "features": (32,), "segment": 5_000},
    "ordered, narrow": {"row": 70_000, "features": (3,), "segment": 6_000},
    "few wide rows": {"row": 16_000, "features": (500,), "segment": 500},
    "few wider rows": {"row": 16_000, "features": (600,), "segment": 500},
    "ordered, odd": {"row": 300_001, "features": (33,), "segment": 20_001},
    "ordered, wide": {"row": 70_000, "features": (256,), "segment": 30_000},
    "ordered, few segments": {"row": 300_000, "features": (64,), "segment": 100},
    "table": {"row": 500_000, "features": (4,), "segment": 200_000},
    "shared table": {"row": 500_000, "features": (16,), "segment": 100},
    "private table": {"row": 300_000, "features": (8,), "segment": 20},
    "numbers of few segments": {"row": 70_001, "features": (), "segment": 5},
    "filtered": {"row": 1 << 24, "features": (1,), "segment": 1 << 16},
    "table in parts": {"row": 786_448, "features": (64,), "segment": 98_306},
}

FROM_IDS = Constraint(
    "the number of segments comes from the ids only where these are known",
    lambda num_segments, transformation: num_segments is ABSENT and transformation != "eager",
)
FROM_UNBATCHED_IDS = Constraint(
    "the number of segments comes from the ids only where these are not mapped",
    lambda num_segments, batch: num_segments is ABSENT and batch in ("all", "nested", "one:segment_ids"),
)
FROM_SOME_IDS = Constraint(
    "there is no greatest id of none, and where it is large so is the result",
    lambda num_segments, size: num_segments is ABSENT and size in ("empty", "no segments", *LARGE_SIZES),
)
FROM_WHOLE_IDS = Constraint(
    "the number of segments of sharded ids needs a host round trip that explicit mode and shard_map lack",
    lambda num_segments, sharding: num_segments is ABSENT and sharding not in ("single", "auto"),
)
PLAN_HAS_MODE = Constraint(
    "a plan has an order and a mode of its own",
    lambda plan, mode: plan is not ABSENT and mode is not ABSENT,
)
PLAN_HAS_NUMBER = Constraint(
    "a plan has a number of segments of its own",
    lambda plan, num_segments: plan is not ABSENT and num_segments is ABSENT,
)
PLAN_HAS_NO_BUCKETS = Constraint(
    "a plan cannot be combined with buckets",
    lambda plan, bucket_size: plan is not ABSENT and bucket_size is not ABSENT,
)
NO_EMPTY_BUCKETS = Constraint(
    "buckets need rows",
    lambda bucket_size, size: bucket_size is not ABSENT and size in ("empty", "no segments"),
)
NO_HUGE_BUCKETS = Constraint(
    "buckets of three rows of a large array have too many cells",
    lambda bucket_size, size: bucket_size is not ABSENT and size in LARGE_SIZES,
)
NO_HUGE_DERIVATIVES = Constraint(
    "derivatives of a batch of the largest arrays may take more memory than a device has, in plain JAX",
    lambda size, batch, transformation: (
        size in ("filtered", "table in parts")
        and transformation in DERIVATIVES
        and (batch == "nested" or batch != "none" and transformation != "vjp")
    ),
)
BUCKET_CONSTRAINTS = (NO_EMPTY_BUCKETS, NO_HUGE_BUCKETS, PLAN_HAS_NO_BUCKETS)
NO_EXTREME_BUCKETS = Constraint(
    "products of buckets are rounded to the dtype, out of whose range they may be",
    lambda values, bucket_size: values == "extreme" and bucket_size is not ABSENT,
)
EXTREME_FIRST_DERIVATIVES = Constraint(
    "second derivatives of products may leave the range of numbers on the way",
    lambda values, transformation: values == "extreme" and transformation in SECOND_DERIVATIVES,
)
EXTREME_GRADIENTS = Constraint(
    "derivatives of gradients of products may leave the range of numbers on the way",
    lambda values, transformation: values == "extreme" and transformation in DERIVATIVES,
)
NO_SLOPE_AT_ZERO = Constraint(
    "equal rows have a variance of 0, or what rounding makes of it, where the root is not smooth",
    lambda data_rows, transformation: data_rows == "shared" and transformation in DERIVATIVES,
)
NO_CLIP_TO_NOTHING = Constraint(
    "mode 'clip' has no segment to clip to",
    lambda mode, size: mode == "clip" and size == "no segments",
)
NARROW_IDS = Constraint(
    "8-bit ids do not reach the segments",
    lambda ids_dtype, size: ids_dtype in ("int8", "uint8") and size in LARGE_SIZES,
)

COMMON = {
    "num_segments": ("given", ABSENT),
    "indices_are_sorted": (ABSENT, True),
    "unique_indices": (ABSENT, False),
    "mode": (ABSENT, "clip", "drop"),
    "ids_dtype": ("int32", "int64", "uint8", "int16", "uint32"),
    "data_rows": ("own", "shared"),
    "plan": (ABSENT, "of rows", "of edges"),
}
COMMON_CONSTRAINTS = (
    FROM_IDS,
    FROM_UNBATCHED_IDS,
    FROM_SOME_IDS,
    FROM_WHOLE_IDS,
    NO_CLIP_TO_NOTHING,
    NARROW_IDS,
    PLAN_HAS_MODE,
    PLAN_HAS_NUMBER,
    NO_HUGE_DERIVATIVES,
)


def _features(sizes: Sizes) -> tuple[str, ...]:
    return tuple(f"feature{i or ''}" for i in range(len(sizes["features"])))


def _ids(options: Options, sizes: Sizes) -> Operand:
    num_segments = sizes["segment"]
    if options.get("num_segments", "given") is ABSENT:
        draw = integers(-1, max(num_segments, 1) - 1)
        draw = ascending(draw) if options["indices_are_sorted"] else draw
    else:
        draw = ids_of(num_segments, bool(options.get("indices_are_sorted")))
    return Operand("segment_ids", ("row",), draw, dtype=options.get("ids_dtype", "int32"))


def _call_of_rows(
    options: Options,
    num_segments: int,
    keywords: Sequence[str],
    function: Callable[..., Any],
    segment_ids: Any,
    **others: Any,
) -> Any:
    """Calls `function` with the ids, or with a plan made from them."""
    if options["plan"]:
        keywords = [key for key in keywords if key != "mode"]
        # Functions of rows ignore the gather ids of a plan.
        num_rows = segment_ids.shape[0]
        gather = (jnp.arange(num_rows)[::-1], num_rows) if options["plan"] == "of edges" else ()
        plan = jax_baracuda.segment_plan(segment_ids, num_segments, *gather)
        return function(**others, plan=plan, **passed(options, *keywords))
    kwargs = {"num_segments": num_segments} if options.get("num_segments", ABSENT) is not ABSENT else {}
    return function(**others, segment_ids=segment_ids, **kwargs, **passed(options, *keywords))


def _num_segments(options: Options, sizes: Sizes, ids: Any) -> int:
    takes_number = options["num_segments"] is not ABSENT
    return sizes["segment"] if takes_number else max(np.asarray(ids).tolist(), default=-1) + 1


def _clipped(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    """The reference, with ids clipped if the mode is 'clip'."""
    if mode != "clip":
        return function

    def call(data: Any, ids: Any, num_segments: int) -> Any:
        return function(data, jnp.clip(ids.astype(jnp.int64), 0, num_segments - 1), num_segments)

    return call


def declare_reduction(
    name: str,
    dtypes: tuple[str, ...],
    reference_of: Callable[[Options], Callable[..., Any]],
    draw_of: Callable[[Options, Sizes], Draw],
    *,
    majorant_of: Callable[[Options], Callable[..., Any]] | None = None,
    options: Mapping[str, tuple[Any, ...]],
    properties: Callable[[str, Options], dict[str, Any]] = lambda dtype, options: {},
    has_rows: bool = False,
    is_selection: bool = False,
    constraints: tuple[Constraint, ...] = (),
) -> None:
    keywords = ("indices_are_sorted", "unique_indices", "mode", *(key for key in options if key != "values"))
    data_name, _ = operand_names(name)

    def problem(dtype: str, chosen: Options, sizes: Sizes) -> Problem:
        features = _features(sizes)
        row = "1row" if chosen["data_rows"] == "shared" else "row"
        buckets = 0 if chosen.get("bucket_size") is ABSENT else -(-sizes["row"] // chosen["bucket_size"])

        def bound(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(segment_ids: Any, **others: Any) -> Any:
                [data] = others.values()
                data = jnp.broadcast_to(data, (*segment_ids.shape, *data.shape[1:]))
                num_segments = _num_segments(chosen, sizes, segment_ids)
                return _clipped(function, chosen["mode"])(data, segment_ids, num_segments)

            return call

        has_sign = majorant_of is not None or is_selection
        return Problem(
            operands=(
                Operand(data_name, (row, *features), draw_of(chosen, sizes), has_sign=has_sign),
                _ids(chosen, sizes),
            ),
            apply=functools.partial(_call_of_rows, chosen, sizes["segment"], keywords),
            reference=bound(reference_of(chosen)),
            majorant=None if majorant_of is None else bound(majorant_of(chosen)),
            results=(("row" if has_rows else "segment", *features),),
            terms=max(sizes["row"], 1),
            # Each bucket is rounded, by at most half an eps. Relative errors of factors add up.
            roundings=min(buckets, 1) if majorant_of is None else (buckets + 1) // 2,
            gradient_roundings=sizes["row"] // 2 if chosen["data_rows"] == "shared" else 0,
            free=features,
            draw_cotangents=numbers if majorant_of is None else finite_numbers,
            **properties(dtype, chosen),
        )

    of_dtype = {"deterministic": True} if "deterministic" in options else {"dtype": dtypes[3]}
    in_float64 = [{"accumulator": "float64"}] if "accumulator" in options else []
    kernels = ({}, of_dtype, *in_float64)
    strategies = [{"indices_are_sorted": flag, **more} for flag in (ABSENT, True) for more in kernels]
    declare(
        name=name,
        dtypes=dtypes,
        sizes=SIZES,
        large_sizes=LARGE_SIZES,
        options={**COMMON, **options},
        strategy_options=(*strategies, {"plan": "of rows"}),
        problem=problem,
        constraints=(*COMMON_CONSTRAINTS, *(BUCKET_CONSTRAINTS if "bucket_size" in options else ()), *constraints),
    )


ORDERED = ("float32", "bfloat16", "float16", "float64", "int32", "uint32", "int64", "uint64", "int8", "uint16", "bool")
SUMMABLE = ("float32", "bfloat16", "float16", "float64", "int32", "uint32", "int64", "uint64", "int8", "uint16")
VALUES = {"values": ("ties", "special")}
FACTORS = {"values": ("ordinary", "extreme")}


def _ties_or_special(options: Options, sizes: Sizes) -> Draw:
    return special if options["values"] == "special" else ties


for _name, _is_max in (("segment_max", True), ("segment_min", False)):
    declare_reduction(
        _name,
        ORDERED,
        lambda options, is_max=_is_max: _extremum(is_max, options["tie_break"] == "first", options["bucket_size"]),
        _ties_or_special,
        options={"bucket_size": (ABSENT, 3), "tie_break": (ABSENT, "first"), **VALUES},
        is_selection=True,
        properties=lambda dtype, options: {"exact_value": True},
    )

for _name, _is_max in (("segment_argmax", True), ("segment_argmin", False)):
    declare_reduction(
        _name,
        ORDERED,
        lambda options, is_max=_is_max: functools.partial(reference_arg, is_max),
        _ties_or_special,
        options=VALUES,
        is_selection=True,
        properties=lambda dtype, options: {"exact_value": True},
    )

declare_reduction(
    "segment_sum",
    SUMMABLE,
    lambda options: _in_buckets(segment_sum, segment_sum, options["bucket_size"]),
    lambda options, sizes: numbers,
    options={"bucket_size": (ABSENT, 3), "deterministic": (ABSENT, True), "accumulator": (ABSENT, "float64")},
    properties=lambda dtype, options: {
        "exact_value": not is_floating(dtype),
        "exact_gradient": options["data_rows"] == "own",
    },
)
declare_reduction(
    "segment_mean",
    FLOATING,
    lambda options: reference_mean,
    lambda options, sizes: numbers,
    options={"deterministic": (ABSENT, True), "accumulator": (ABSENT, "float64")},
)
for _name, _reference, _majorant in (
    ("segment_var", reference_var, majorant_var),
    ("segment_std", reference_std, majorant_std),
):
    declare_reduction(
        _name,
        FLOATING,
        lambda options, reference=_reference: functools.partial(reference, options["ddof"] or 0),
        lambda options, sizes: finite_logits,
        majorant_of=lambda options, majorant=_majorant: functools.partial(majorant, options["ddof"] or 0),
        options={"ddof": (ABSENT, 1), "deterministic": (ABSENT, True)},
        constraints=(NO_SLOPE_AT_ZERO,) if _name == "segment_std" else (),
    )
declare_reduction(
    "segment_prod",
    SUMMABLE,
    lambda options: _in_buckets(reference_prod, reference_prod, options["bucket_size"]),
    lambda options, sizes: factors(sizes["row"], options["values"] == "extreme"),
    majorant_of=lambda options: _in_buckets(majorant_prod, majorant_prod, options["bucket_size"]),
    options={"bucket_size": (ABSENT, 3), **FACTORS},
    properties=lambda dtype, options: {"exact_value": not is_floating(dtype)},
    constraints=(NO_EXTREME_BUCKETS, EXTREME_FIRST_DERIVATIVES),
)
declare_reduction(
    "segment_softmax",
    FLOATING,
    lambda options: reference_softmax,
    lambda options, sizes: logits if options["values"] == "special" else finite_logits,
    majorant_of=lambda options: majorant_softmax,
    options={"deterministic": (ABSENT, True), "values": ("finite", "special")},
    has_rows=True,
)


# Gradients.


def _declare_gradient(
    name: str,
    options: Mapping[str, tuple[Any, ...]],
    gradient_of: Callable[[Options], Callable[..., Any]],
    draw_data: Callable[[Options, Sizes], Draw] | None,
    *,
    majorant_of: Callable[[Options], Callable[..., Any]] | None = None,
    data_is_selection: bool = False,
    exact_value: bool = False,
    constraints: tuple[Constraint, ...] = (),
) -> None:
    """A gradient ``(d_output, [data,] ids)``. Its reference is ``(d_output, [data,] ids, num_segments)``."""
    keywords = tuple(key for key in options if key not in ("values", "ids_dtype", "mode", "plan"))

    def problem(dtype: str, chosen: Options, sizes: Sizes) -> Problem:
        features = _features(sizes)
        num_segments = sizes["segment"]
        data: tuple[Operand, ...] = ()
        if draw_data is not None:
            data = (Operand("data", ("row", *features), draw_data(chosen, sizes), has_sign=data_is_selection),)

        def bound(gradient: Callable[..., Any]) -> Callable[..., Any]:
            def call(d_output: Any, segment_ids: Any, **data: Any) -> Any:
                if chosen["mode"] == "clip":
                    segment_ids = jnp.clip(segment_ids.astype(jnp.int64), 0, num_segments - 1)
                return gradient(d_output, *data.values(), segment_ids, num_segments)

            return call

        # Nonlinear functions do not define the product of an infinite cotangent and zero.
        draw = numbers if majorant_of is None else finite_numbers
        return Problem(
            operands=(Operand("d_output", ("segment", *features), draw), *data, _ids(chosen, sizes)),
            apply=functools.partial(_call_of_rows, chosen, num_segments, ("mode", *keywords)),
            reference=bound(gradient_of(chosen)),
            majorant=None if majorant_of is None else bound(majorant_of(chosen)),
            results=(("row", *features),),
            terms=max(sizes["row"], 1),
            free=features,
            exact_value=exact_value,
            draw_cotangents=draw,
        )

    declare(
        name=name,
        dtypes=FLOATING,
        sizes=SIZES,
        large_sizes=LARGE_SIZES,
        options=options,
        problem=problem,
        constraints=(NO_CLIP_TO_NOTHING, NARROW_IDS, PLAN_HAS_MODE, *constraints),
    )


IDS_OPTIONS = {name: COMMON[name] for name in ("mode", "ids_dtype", "plan")}


def _vjp(function: Callable[..., Any]) -> Callable[..., Any]:
    """``(d_output, data, ids, num_segments)``"""

    def gradient(d_output: Any, data: Any, ids: Any, num_segments: int) -> Any:
        return jax.vjp(lambda data: function(data, ids, num_segments), data)[1](d_output)[0]

    return gradient


def _vjp_without_data(function: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(d_output: Any, ids: Any, num_segments: int) -> Any:
        return _vjp(function)(d_output, jnp.zeros((*ids.shape, *d_output.shape[1:])), ids, num_segments)

    return gradient


for _name, _is_max in (("segment_max_backward", True), ("segment_min_backward", False)):
    _declare_gradient(
        _name,
        {"indices_are_sorted": (ABSENT, True), **IDS_OPTIONS, "tie_break": (ABSENT, "first"), **VALUES},
        lambda options, is_max=_is_max: _vjp(_extremum(is_max, options["tie_break"] == "first", None)),
        _ties_or_special,
        data_is_selection=True,
    )
_declare_gradient(
    "unsorted_segment_max_backward",
    {**IDS_OPTIONS, "mode": (ABSENT,), "plan": (ABSENT,), **VALUES},
    lambda options: _vjp(_extremum(True, True, None)),
    _ties_or_special,
    data_is_selection=True,
    exact_value=True,
)
_declare_gradient(
    "segment_sum_backward", IDS_OPTIONS, lambda options: _vjp_without_data(segment_sum), None, exact_value=True
)
_declare_gradient("segment_mean_backward", IDS_OPTIONS, lambda options: _vjp_without_data(reference_mean), None)
_declare_gradient(
    "segment_prod_backward",
    {"indices_are_sorted": (ABSENT, True), **IDS_OPTIONS, **FACTORS},
    lambda options: _vjp(reference_prod),
    lambda options, sizes: factors(sizes["row"], options["values"] == "extreme"),
    majorant_of=lambda options: _vjp(majorant_prod),
    constraints=(EXTREME_GRADIENTS,),
)


def _softmax_backward_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    features = _features(sizes)

    def of_sign(sign: int) -> Callable[..., Any]:
        def call(d_output: Any, probabilities: Any, segment_ids: Any) -> Any:
            gradient = functools.partial(_softmax_gradient, sign, d_output)
            return _clipped(gradient, options["mode"])(
                probabilities, segment_ids, _num_segments(options, sizes, segment_ids)
            )

        return call

    keywords = ("indices_are_sorted", "mode", "deterministic")
    return Problem(
        operands=(
            Operand("d_output", ("row", *features), finite_numbers),
            Operand("probabilities", ("row", *features), probabilities),
            _ids(options, sizes),
        ),
        apply=functools.partial(_call_of_rows, options, sizes["segment"], keywords),
        reference=of_sign(-1),
        majorant=of_sign(1),
        results=(("row", *features),),
        terms=max(sizes["row"], 1),
        free=features,
        carry=(0, 0),
        draw_cotangents=finite_numbers,
    )


declare(
    name="segment_softmax_backward",
    dtypes=FLOATING,
    sizes=SIZES,
    large_sizes=LARGE_SIZES,
    options={
        "num_segments": ("given", ABSENT),
        "indices_are_sorted": (ABSENT, True),
        **IDS_OPTIONS,
        "deterministic": (ABSENT, True),
    },
    problem=_softmax_backward_problem,
    constraints=COMMON_CONSTRAINTS,
    has_carry=True,
)


# Sums of gathered rows.


def _call_by_edges(
    options: Options,
    num_segments: int | None,
    function: Callable[..., Any],
    data: Any,
    gather_ids: Any,
    segment_ids: Any,
    **others: Any,
) -> Any:
    """Calls `function` with the ids of edges, or with a plan made from them.

    `num_segments` is None if the function takes it from an array with a row for each segment.
    """
    others |= {"data": data} | passed(options, *(x for x in ("tie_break", "deterministic") if x in options))
    if options["plan"]:
        count = others["segment_data"].shape[0] if num_segments is None else num_segments
        return function(**others, plan=jax_baracuda.segment_plan(segment_ids, count, gather_ids, data.shape[0]))
    others |= passed(options, "indices_are_sorted", "mode")
    others |= {} if num_segments is None else {"num_segments": num_segments}
    return function(**others, gather_ids=gather_ids, segment_ids=segment_ids)


def _edges(options: Options, sizes: Sizes) -> tuple[Operand, Operand]:
    gather_ids = Operand("gather_ids", ("row",), row_numbers_of(sizes["node"]), dtype=options["gather_dtype"])
    return gather_ids, _ids(options, sizes)


def _weighted(rows: Any, weights: Any) -> Any:
    return rows * weights.reshape(*weights.shape, *[1] * (rows.ndim - weights.ndim))


def _gather_problem(
    reduction_of: Callable[[Options], Callable[..., Any]],
    draw_of: Callable[[Options, Sizes], Draw],
    dtype: str,
    options: Options,
    sizes: Sizes,
) -> Problem:
    features, num_segments = _features(sizes), sizes["segment"]
    dims = {ABSENT: None, "edge": (), "head": features[:1]}[options.get("weights", ABSENT)]
    weights = () if dims is None else (Operand("weights", ("row", *dims), numbers),)
    selects = "tie_break" in options

    def reference(data: Any, gather_ids: Any, segment_ids: Any, weights: Any = None) -> Any:
        reduction = _clipped(reduction_of(options), options["mode"])
        rows = data[wide_ids(gather_ids)]
        if weights is None:
            return reduction(rows, segment_ids, num_segments)
        # Dropped edges take no part, also in derivatives: NaN times the zero that they get back would be NaN.
        ids = wide_ids(segment_ids)
        is_dropped = (options["mode"] != "clip") & ((ids < 0) | (ids >= num_segments))
        rows, factors = (jnp.where(is_dropped.reshape(-1, *[1] * (x.ndim - 1)), 0, x) for x in (rows, weights))
        return reduction(_weighted(rows, factors), segment_ids, num_segments)

    return Problem(
        operands=(
            Operand("data", ("node", *features), draw_of(options, sizes), has_sign=selects),
            *_edges(options, sizes),
            *weights,
        ),
        apply=functools.partial(_call_by_edges, options, num_segments),
        reference=reference,
        results=(("segment", *features),),
        exact_value=selects,
        terms=max(sizes["row"], 1),
        free=features if dims is None else features[len(dims) :],
    )


def _attention_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    features, num_segments = _features(sizes), sizes["segment"]
    heads = features[:1]

    def reference_of(sign: int) -> Callable[..., Any]:
        softmax = reference_softmax if sign < 0 else majorant_softmax

        def reference(logits: Any, data: Any, gather_ids: Any, segment_ids: Any) -> Any:
            weights = _clipped(softmax, options["mode"])(logits, segment_ids, num_segments)
            rows = _weighted(data[wide_ids(gather_ids)], weights)
            return _clipped(segment_sum, options["mode"])(rows, segment_ids, num_segments)

        return reference

    return Problem(
        operands=(
            Operand("logits", ("row", *heads), finite_logits, has_sign=True),
            Operand("data", ("node", *features), finite_numbers),
            *_edges(options, sizes),
        ),
        apply=functools.partial(_call_by_edges, options, num_segments),
        reference=reference_of(-1),
        majorant=reference_of(1),
        results=(("segment", *features),),
        terms=max(sizes["row"], 1),
        free=features[len(heads) :],
        draw_cotangents=finite_numbers,
    )


def _dot_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    features, num_segments = _features(sizes), sizes["segment"]

    def reference(data: Any, segment_data: Any, gather_ids: Any, segment_ids: Any) -> Any:
        ids = wide_ids(segment_ids)
        ids = jnp.clip(ids, 0, num_segments - 1) if options["mode"] == "clip" else ids
        # Dropped edges take no part, also in derivatives: NaN times 0 would be NaN.
        rows = jnp.where(is_member(ids, num_segments, data), data[wide_ids(gather_ids)], 0)
        return (rows * take_cells(segment_data, ids)).sum(-1)

    return Problem(
        operands=(
            Operand("data", ("node", *features), numbers),
            Operand("segment_data", ("segment", *features), numbers),
            *_edges(options, sizes),
        ),
        apply=functools.partial(_call_by_edges, options, None),
        reference=reference,
        results=(("row", *features[:-1]),),
        terms=max(sizes["row"], *sizes["features"][-1:], 1),
        free=features[:-1],
    )


def _with_nodes(sizes: Mapping[str, Sizes]) -> dict[str, Sizes]:
    """Adds a number of nodes: as many as segments if these are few, so that gradients have few rows, too."""
    return {
        name: {**of_name, "node": of_name["segment"] if "few segments" in name else max(of_name["row"] // 4, 1)}
        for name, of_name in sizes.items()
    }


def _declare_gathered(
    name: str,
    problem: Callable[..., Problem],
    options: Mapping[str, tuple[Any, ...]],
    strategy_options: Sequence[Mapping[str, Any]],
    constraints: Sequence[Constraint] = (),
    dtypes: Sequence[str] = FLOATING,
    min_row_ndim: int = 0,
) -> None:
    """Declares a function that gathers along edges. `min_row_ndim`: the least number of dimensions of a row."""

    def with_features(sizes: Mapping[str, Sizes]) -> dict[str, Sizes]:
        return {name: of_name for name, of_name in sizes.items() if len(of_name["features"]) >= min_row_ndim}

    large_sizes = {name: LARGE_SIZES[name] for name in (*MIDDLE_SIZES, "ordered", "ordered, odd")}
    declare(
        name=name,
        dtypes=dtypes,
        sizes=_with_nodes(with_features(SIZES)),
        large_sizes=_with_nodes(with_features(large_sizes)),
        options={
            **options,
            "indices_are_sorted": (ABSENT, True),
            "mode": (ABSENT, "clip", "drop"),
            "plan": (ABSENT, True),
            "ids_dtype": COMMON["ids_dtype"],
            "gather_dtype": COMMON["ids_dtype"],
        },
        strategy_options=strategy_options,
        problem=problem,
        constraints=(NO_CLIP_TO_NOTHING, NARROW_IDS, PLAN_HAS_MODE, *constraints),
    )


HEADS_ARE_FEATURES = Constraint(
    "heads are the first dimension of features",
    lambda weights, size: weights == "head" and size in ("scalars", "many narrow rows"),
)
for _name, _reduction in (("gather_segment_sum", segment_sum), ("gather_segment_mean", reference_mean)):
    _declare_gathered(
        _name,
        functools.partial(
            _gather_problem, lambda options, reduction=_reduction: reduction, lambda options, sizes: numbers
        ),
        {"weights": (ABSENT, "edge", "head"), "deterministic": (ABSENT, True)},
        ({}, {"indices_are_sorted": True}, {"weights": "head"}),
        (HEADS_ARE_FEATURES,),
    )
for _name, _is_max in (("gather_segment_max", True), ("gather_segment_min", False)):
    _declare_gathered(
        _name,
        functools.partial(
            _gather_problem,
            lambda options, is_max=_is_max: _extremum(is_max, options["tie_break"] == "first", None),
            _ties_or_special,
        ),
        {"tie_break": (ABSENT, "first"), "deterministic": (ABSENT, True), **VALUES},
        ({}, {"indices_are_sorted": True}, {"tie_break": "first"}, {"plan": True}),
    )
_declare_gathered(
    "gather_segment_dot",
    _dot_problem,
    {"deterministic": (ABSENT, True)},
    ({}, {"indices_are_sorted": True}, {"plan": True}),
    min_row_ndim=1,
)
_declare_gathered(
    "segment_attention",
    _attention_problem,
    {},
    ({}, {"indices_are_sorted": True}, {"plan": True}),
)


# Rows by their numbers.


TAKE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "indices_are_sorted": (ABSENT, True),
    "deterministic": (ABSENT, True),
    "accumulator": (ABSENT, "float64"),
}


def _take_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    features, is_sorted = _features(sizes), options["indices_are_sorted"] is not ABSENT
    ids_dims = ("row",) if options["ids_rank"] == 1 else ("row", "column")
    draw = ascending(integers(0, sizes["node"] - 1)) if is_sorted else row_numbers_of(sizes["node"])
    return Problem(
        operands=(
            Operand("data", ("node", *features), numbers),
            Operand("ids", ids_dims, draw, dtype=options["ids_dtype"]),
        ),
        apply=by_name(options, *TAKE_OPTIONS),
        reference=lambda data, ids: data[wide_ids(ids)],
        results=((*ids_dims, *features),),
        exact_value=True,
        terms=max(sizes["row"] * (sizes["column"] if options["ids_rank"] == 2 else 1), 1),
        free=(*ids_dims, *features),
    )


declare(
    name="take_rows",
    dtypes=FLOATING,
    sizes={name: {**of_name, "column": 2} for name, of_name in _with_nodes(SIZES).items()},
    large_sizes={name: {**of_name, "column": 2} for name, of_name in _with_nodes(MIDDLE_SIZES).items()},
    options={**TAKE_OPTIONS, "ids_rank": (1, 2), "ids_dtype": COMMON["ids_dtype"]},
    problem=_take_problem,
)
