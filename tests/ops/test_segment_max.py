"""segment_max and its gradient against NumPy references, JAX's own segment_max, and under every transformation."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    BIG_SHAPE,
    FLOATING,
    INTEGERS,
    KERNEL_DTYPES,
    SHAPES,
    TIE_BREAKS,
    Shape,
    assert_same_bits,
    assert_same_values,
)
from jax.test_util import check_grads

import jax_baracuda
from jax_baracuda import segment_max, segment_max_backward, unsorted_segment_max_backward
from jax_baracuda._core.op import OPS

GatherScatterMode = jax.lax.GatherScatterMode


def kernels_in(text: str) -> list[str]:
    """The targets of jax_baracuda that a lowered program calls, in order."""
    return re.findall(r"custom_call @jax_baracuda\.(\w+)\(", text)


def value_and_pullback(reduce: Callable[..., Any], data: Any, d_output: Any) -> tuple[jax.Array, jax.Array]:
    output, vjp = jax.vjp(reduce, data)
    return output, vjp(d_output)[0]


# ----------------------------------------------------------------------------------------------------------------------
# Values.


@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_value(rng: np.random.Generator, dtype: str, shape: Shape, is_sorted: bool) -> None:
    """The kernel's maxima are the NumPy reference's, bit for bit, for every dtype, size and order of ids."""
    data = cases.make_data(rng, (shape.rows, *shape.row_shape), dtype)
    ids = cases.make_ids(rng, shape.rows, shape.segments, is_sorted=is_sorted)
    reduce = jax.jit(functools.partial(segment_max, num_segments=shape.segments, indices_are_sorted=is_sorted))
    with cases.x64_for(dtype):
        lowered = reduce.lower(data, ids)
        output = reduce(data, ids)
    assert kernels_in(lowered.as_text()) == ["segment_max"]
    assert not output.weak_type
    assert_same_bits(output, cases.reference_max(data, ids, shape.segments))


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "bfloat16", "float32", "float64"])
def test_big_value(rng: np.random.Generator, dtype: str) -> None:
    """As test_value, for more rows, in an order that takes the rows of a segment from everywhere."""
    test_value(rng, dtype, BIG_SHAPE, False)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_value_equals_jax(rng: np.random.Generator, dtype: str) -> None:
    """Eagerly, the answer is that of jax.ops.segment_max."""
    data, ids = cases.make_data(rng, (200, 6), dtype), cases.make_ids(rng, 200, 30)
    with cases.x64_for(dtype):
        assert_same_values(segment_max(data, ids, 30), jax.ops.segment_max(data, ids, 30))


@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("ids_dtype", [*INTEGERS, "int4", "uint4"])
def test_ids_dtype(rng: np.random.Generator, ids_dtype: str, is_sorted: bool) -> None:
    """Ids of every integer dtype; those out of range are dropped and never wrap, up to the ends of their dtype."""
    data, ids = cases.make_data(rng, (300, 5), "float32"), cases.make_ids(rng, 300, 6, ids_dtype, is_sorted)
    d_output = cases.cotangent(rng, (6, 5), "float32")
    reduce = functools.partial(segment_max, num_segments=6, indices_are_sorted=is_sorted)
    with cases.x64_for(ids_dtype):
        output, d_data = jax.jit(functools.partial(value_and_pullback, functools.partial(reduce, segment_ids=ids)))(
            data, d_output
        )
        by_jax = jax.ops.segment_max(data, ids, 6)
    expected = cases.reference_max(data, ids, 6)
    assert_same_bits(output, expected)
    assert_same_values(by_jax, expected)
    assert_same_bits(d_data, cases.reference_gradient(d_output, data, ids, "split"))


@pytest.mark.parametrize(
    "mode", [None, "fill", "drop", "clip", "promise_in_bounds", "one_hot", *GatherScatterMode], ids=str
)
def test_mode(rng: np.random.Generator, mode: Any) -> None:
    """Mode "clip" clamps ids, every other mode drops what is out of range; value and gradient."""
    clips = mode in ("clip", GatherScatterMode.CLIP)
    data, ids = cases.make_data(rng, (100, 3), "float32"), cases.make_ids(rng, 100, 8)
    d_output = cases.cotangent(rng, (8, 3), "float32")
    reduce = functools.partial(segment_max, segment_ids=ids, num_segments=8, mode=mode)
    output, d_data = value_and_pullback(reduce, jnp.asarray(data), d_output)
    assert_same_bits(output, cases.reference_max(data, ids, 8, "clip" if clips else None))
    assert_same_bits(d_data, cases.reference_gradient(d_output, data, ids, "split", "clip" if clips else None))
    backward = segment_max_backward(d_output, data, ids, mode=mode)
    assert_same_bits(backward, cases.reference_gradient(d_output, data, ids, "split", "clip" if clips else None))


@pytest.mark.parametrize("ids_dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_clip_clamps_by_value(ids_dtype: str) -> None:
    """Clipping looks at the id's value in its own dtype: the greatest uint64 is the last segment, not the first."""
    info = np.iinfo(ids_dtype)
    ids = np.array([info.min, info.max, 1, 2], ids_dtype)
    data = np.array([1, 2, 3, 4], np.float32)
    for segments in (1, 3, 300):
        with cases.x64_for(ids_dtype):
            output = segment_max(data, ids, segments, mode="clip")
        assert_same_bits(output, cases.reference_max(data, ids, segments, "clip"))


def test_clip_without_segments() -> None:
    assert segment_max(np.ones(3, np.float32), np.arange(3), 0, mode="clip").shape == (0,)


SPECIALS = (np.nan, np.copysign(np.nan, -1), np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0)


def special_columns(length: int) -> np.ndarray:
    """Every sequence of this length of NaN, infinities, zeros and ones of both signs: ``[length, 8 ** length]``."""
    return np.array(list(itertools.product(SPECIALS, repeat=length))).T


@pytest.mark.parametrize("filler", [-2.0, -np.inf])
@pytest.mark.parametrize("dtype", FLOATING)
def test_special_values_far_apart(rng: np.random.Generator, dtype: str, filler: float) -> None:
    """Sequences of three special values in rows far apart, which different threads or blocks reduce, then merge."""
    columns = special_columns(3)
    data = np.full((1500, columns.shape[1]), filler, jnp.dtype(dtype))
    data[[10, 700, 1499]] = columns.astype(data.dtype)
    ids = np.zeros(len(data), np.int32)
    d_output = np.full((1, columns.shape[1]), 3000, data.dtype)
    for tie_break in TIE_BREAKS:
        reduce = functools.partial(segment_max, segment_ids=ids, num_segments=1, tie_break=tie_break)
        with cases.x64_for(dtype):
            output, d_data = jax.jit(functools.partial(value_and_pullback, reduce))(data, d_output)
            assert_same_bits(jax.jit(reduce)(data), cases.reference_max(data, ids, 1))
        assert_same_bits(output, cases.reference_max(data, ids, 1))
        assert_same_bits(d_data, cases.reference_gradient(d_output, data, ids, tie_break))


@pytest.mark.parametrize("layout", ["wide rows", "scalar rows", "narrow rows"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_special_values_exhaustively(dtype: str, layout: str) -> None:
    """Every sequence of one to four NaN, infinities, zeros and ones of both signs, value and gradient."""
    for length in range(1, 5):
        columns = special_columns(length)
        if layout == "wide rows":  # a cell per feature
            data, ids, segments = columns, np.zeros(length, np.int32), 1
        else:  # a cell per segment
            width = 1 if layout == "scalar rows" else 2
            segments = columns.shape[1] // width
            data = columns.reshape(length * segments, width)
            data = data[:, 0] if width == 1 else data
            ids = np.tile(np.arange(segments, dtype=np.int32), length)
        data = data.astype(jnp.dtype(dtype))
        d_output = np.full((segments, *data.shape[1:]), 3, data.dtype)
        expected = cases.reference_max(data, ids, segments)
        with cases.x64_for(dtype):
            assert_same_bits(segment_max(data, ids, segments), expected)
            for tie_break in TIE_BREAKS:
                reduce = functools.partial(segment_max, segment_ids=ids, num_segments=segments, tie_break=tie_break)
                output, d_data = jax.jit(functools.partial(value_and_pullback, reduce))(data, d_output)
                assert_same_bits(output, expected)
                assert_same_bits(d_data, cases.reference_gradient(d_output, data, ids, tie_break))


@pytest.mark.parametrize("dtype", FLOATING)
def test_subnormal_numbers(rng: np.random.Generator, dtype: str) -> None:
    """Numbers below the smallest normal one are neither rounded to zero nor tied with it, in value and gradient."""
    np_dtype = jnp.dtype(dtype)
    magnitudes = rng.integers(0, 5, (40, 6)).astype(f"uint{8 * np_dtype.itemsize}").view(np_dtype)
    data = np.where(rng.random((40, 6)) < 0.4, -magnitudes, magnitudes)
    ids = cases.make_ids(rng, 40, 7)
    d_output = cases.cotangent(rng, (7, 6), dtype)
    with cases.x64_for(dtype):
        assert_same_bits(segment_max(data, ids, 7), cases.reference_max(data, ids, 7))
        for tie_break in TIE_BREAKS:
            d_data = segment_max_backward(d_output, data, ids, tie_break=tie_break)
            assert_same_bits(d_data, cases.reference_gradient(d_output, data, ids, tie_break))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_empty_segments(dtype: str) -> None:
    """Segments without rows hold the identity: -inf, the least integer, False."""
    with cases.x64_for(dtype):
        output = segment_max(np.ones((2, 3), jnp.dtype(dtype)), np.array([4, 4]), 6)
    expected = np.full((6, 3), cases.identity(jnp.dtype(dtype)), jnp.dtype(dtype))
    expected[4] = 1
    assert_same_bits(output, expected)


def test_number_of_segments_from_ids() -> None:
    """num_segments=None takes the greatest id plus one, eagerly."""
    data = np.arange(4, dtype=np.float32)
    assert_same_bits(segment_max(data, np.array([0, 5, 1, 1])), np.array([0, 3, *[-np.inf] * 3, 1], np.float32))
    assert segment_max(data, np.array([-3, -1, -1, -2])).shape == (0,)
    assert segment_max(data, np.array([255, 0, 0, 0], np.uint8)).shape == (256,)
    with jax.enable_x64(False):
        assert segment_max(data, np.array([127, 0, 0, 0], np.int8)).shape == (128,)


@pytest.mark.parametrize("num_segments", [np.int64(3), np.array(3), 3], ids=["np.int64", "0-d array", "int"])
def test_number_of_segments_types(num_segments: Any) -> None:
    assert segment_max(np.ones(2, np.float32), np.arange(2), num_segments).shape == (3,)


BROADCAST_CASES = {
    "python scalar": ((), (4,), 2.5),
    "numpy scalar": ((), (4,), np.float32(2.5)),
    "scalar data and id": ((), (), np.float32(2.5)),
    "one row for all ids": ((1,), (4,), None),
    "one wide row for all ids": ((1, 3), (4,), None),
    "one feature": ((4, 1), (4,), None),
    "ids of rank 2": ((2, 3, 3), (2, 3), None),
    "ids of rank 2 and one block of data": ((1, 3, 3), (2, 3), None),
    "ids of rank 2 and a row for all": ((3,), (2,), None),
}


@pytest.mark.parametrize("case", BROADCAST_CASES)
def test_broadcasting(rng: np.random.Generator, case: str) -> None:
    """Data broadcast over the ids as in jax.ops, which gives the value and the gradient to compare with."""
    data_shape, ids_shape, data = BROADCAST_CASES[case]
    if data is None:
        data = rng.integers(-3, 4, data_shape).astype(np.float32)
    ids = rng.integers(-1, 4, ids_shape)
    try:
        expected = jax.ops.segment_max(data, ids, 3)
    except ValueError:  # what JAX refuses, so do we
        with pytest.raises(ValueError, match="segment_max: data must have one row per id"):
            segment_max(data, ids, 3)
        return
    output = segment_max(data, ids, 3)
    assert not output.weak_type and not expected.weak_type
    assert_same_bits(output, np.asarray(expected))
    weights = rng.integers(1, 9, expected.shape).astype(np.float32)
    gradients = [
        jax.grad(lambda x, reduce=reduce: jnp.vdot(jnp.maximum(reduce(x, ids, 3), -9), weights))(data)
        for reduce in (segment_max, jax.ops.segment_max)
    ]
    # The shares of ties are sums of at most 6 quotients of integers below 10.
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-6, atol=0)


def test_ids_of_rank_2_label_blocks(rng: np.random.Generator) -> None:
    """With ids [A, B], data are [A, B, ...]-broadcastable to ids.shape + data.shape[1:]; compared with NumPy."""
    data = rng.normal(size=(1, 4)).astype(np.float32)
    ids = rng.integers(-1, 3, (5, 1))
    expected = jax.ops.segment_max(data.reshape(1, 4)[:, :1], ids[:, 0], 3)
    np.testing.assert_array_equal(segment_max(data[:, :1], ids[:, 0], 3), expected)
    rows = np.broadcast_to(data, (5, 1, 4)).reshape(5, 4)
    assert_same_bits(segment_max(data, ids, 3), cases.reference_max(rows, ids.reshape(-1), 3))


@pytest.mark.parametrize("x64", [False, True], ids=["x64 off", "x64 on"])
def test_never_weakly_typed(x64: bool) -> None:
    """Python scalars and weakly typed arrays give a strongly typed result of JAX's default dtype."""
    with jax.enable_x64(x64):
        for value in (2.0, 2, jnp.asarray(2.0), jnp.asarray(2)):
            output = segment_max(value, np.array([0, 1]), 2)
            expected = jax.ops.segment_max(value, np.array([0, 1]), 2)
            assert not output.weak_type
            assert_same_bits(output, np.asarray(expected))
        gradient = jax.grad(lambda x: segment_max(x, np.array([0, 1]), 2).sum())(2.0)
        assert gradient.dtype == jnp.result_type(float) and gradient == 2


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64"])
def test_64_bit_numpy_inputs_with_x64_off(rng: np.random.Generator, dtype: str) -> None:
    """With 64-bit types off, NumPy inputs of such types become 32-bit ones, as everywhere in JAX."""
    data, ids = rng.integers(0, 99, (20, 2)).astype(dtype), rng.integers(0, 4, 20)
    with jax.enable_x64(False):
        output = segment_max(data, ids, 4)
    assert_same_bits(output, cases.reference_max(data.astype(dtype.replace("64", "32")), ids, 4))


@pytest.mark.parametrize("bucket_size", [1, 3, 8, 50, 64, 200])
def test_bucket_size_value(rng: np.random.Generator, bucket_size: int) -> None:
    """Buckets change nothing in the value, whatever their size."""
    for dtype in ("float32", "int16", "bool"):
        data, ids = cases.make_data(rng, (50, 3), dtype), cases.make_ids(rng, 50, 6)
        output = segment_max(data, ids, 6, bucket_size=bucket_size)
        assert_same_bits(output, cases.reference_max(data, ids, 6))


WITHOUT_KERNEL = [
    name
    for name in (
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e4m3b11fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn",
        "int2",
        "uint2",
        "int4",
        "uint4",
        "complex64",
        "complex128",
    )
    if hasattr(jnp, name)
]


def small_data(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Few small values, which every dtype can hold."""
    low = 0 if dtype.startswith("u") or dtype == "float8_e8m0fnu" else -2
    values = rng.integers(low, 2, shape).astype(np.float32)
    if dtype.startswith("complex"):
        return (values + 1j * rng.integers(-2, 2, shape)).astype(dtype)
    return values.astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", WITHOUT_KERNEL)
def test_dtypes_without_kernel(rng: np.random.Generator, dtype: str) -> None:
    """They run as plain JAX: no custom call, the answer of jax.ops, under jit and vmap too."""
    data, ids = small_data(rng, (3, 40, 2), dtype), rng.integers(-1, 9, 40)
    with cases.x64_for("float64" if dtype == "complex128" else dtype):
        data = jnp.asarray(data)
        call = jax.jit(lambda x: segment_max(x, ids, 8))
        assert kernels_in(call.lower(data[0]).as_text()) == []
        expected = np.stack([np.asarray(jax.ops.segment_max(x, ids, 8)) for x in data])
        assert_same_bits(call(data[0]), expected[0])
        assert_same_bits(jax.vmap(call)(data), expected)


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("dtype", [name for name in WITHOUT_KERNEL if "int" not in name and name != "float8_e8m0fnu"])
def test_gradient_of_dtypes_without_kernel(rng: np.random.Generator, dtype: str, tie_break: str) -> None:
    """Where jax.ops has a gradient, ours is the same: no rounding here, as ties are of 1, 2 or 4 rows."""
    data = small_data(rng, (3, 1, 2), dtype)
    rows = np.concatenate([data[:1], data[1:2].repeat(2, 0), data[2:].repeat(4, 0)])[:, 0]
    ids = np.array([0, 1, 1, 2, 2, 2, 2])
    with cases.x64_for("float64" if dtype == "complex128" else dtype):
        rows = jnp.asarray(rows)
        ones = jnp.ones((3, 2), rows.dtype)
        output, gradient = value_and_pullback(lambda x: segment_max(x, ids, 3, tie_break=tie_break), rows, ones)
        expected_output, expected = value_and_pullback(lambda x: jax.ops.segment_max(x, ids, 3), rows, ones)
        backward = segment_max_backward(ones, rows, ids, tie_break=tie_break)
    has_nan = np.isnan(np.asarray(expected_output).astype(np.complex64)).any()  # kinds without infinities
    assert_same_bits(output, np.asarray(expected_output))
    if tie_break == "split":
        assert_same_bits(gradient, np.asarray(expected))
    elif not has_nan:
        first = np.zeros((7, 2))
        first[[0, 1, 3]] = 1
        assert_same_bits(gradient, first.astype(rows.dtype))
    assert_same_bits(backward, np.asarray(gradient))


# ----------------------------------------------------------------------------------------------------------------------
# Gradients.


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATING)
def test_gradient(rng: np.random.Generator, dtype: str, shape: Shape, is_sorted: bool, tie_break: str) -> None:
    """Maxima and shares are the NumPy reference's bit for bit: ties, the identity as a member, NaN, dropped rows."""
    data = cases.make_data(rng, (shape.rows, *shape.row_shape), dtype)
    ids = cases.make_ids(rng, shape.rows, shape.segments, is_sorted=is_sorted)
    d_output = cases.cotangent(rng, (shape.segments, *shape.row_shape), dtype)
    reduce = functools.partial(
        segment_max,
        segment_ids=ids,
        num_segments=shape.segments,
        indices_are_sorted=is_sorted,
        tie_break=tie_break,
    )
    pullback = jax.jit(functools.partial(value_and_pullback, reduce))
    with cases.x64_for(dtype):
        output, d_data = pullback(data, d_output)
    assert_same_bits(output, cases.reference_max(data, ids, shape.segments))
    assert_same_bits(d_data, cases.reference_gradient(d_output, data, ids, tie_break))


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_big_gradient(rng: np.random.Generator, dtype: str, tie_break: str) -> None:
    """As test_gradient, for more rows, in an order that takes the rows of a segment from everywhere."""
    test_gradient(rng, dtype, BIG_SHAPE, False, tie_break)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("row_shape", [(), (3,)], ids=["scalars", "triples"])
def test_many_narrow_rows(rng: np.random.Generator, row_shape: tuple[int, ...], dtype: str) -> None:
    """So many rows of few features that a GPU skips, in the end, most of those that cannot be a maximum."""
    rows, segments = (1 << 24) + 77, 70_000
    ids = rng.integers(-1, segments + 1, rows, dtype=np.int32)
    ids[ids == 17] = 18  # an empty segment
    data = jnp.asarray(rng.normal(size=(rows, *row_shape)).astype(np.float32) * 1000).astype(dtype)
    output = segment_max(data, ids, segments)
    wide = np.asarray(data.astype(jnp.float32)) if dtype == "bfloat16" else np.asarray(data)
    is_member = (ids >= 0) & (ids < segments)
    expected = np.full((segments, *row_shape), cases.identity(jnp.dtype(wide.dtype)), wide.dtype)
    np.maximum.at(expected, ids[is_member], wide[is_member])
    np.testing.assert_array_equal(np.asarray(output.astype(wide.dtype)), expected)
    if dtype != "int32":
        d_data = segment_max_backward(jnp.ones_like(output), data, ids, tie_break="first")
        received = np.zeros_like(expected)
        np.add.at(received, ids[is_member], np.asarray(d_data.astype(jnp.float32))[is_member])
        np.testing.assert_array_equal(received, np.isfinite(expected))  # each cell's cotangent arrives exactly once
        takes = np.asarray(d_data.astype(jnp.float32)) == 1
        np.testing.assert_array_equal(wide[takes], expected[np.clip(ids, 0, segments - 1)][takes])


@pytest.mark.parametrize("values", ["distinct", "ties"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradient_equals_jax(rng: np.random.Generator, dtype: str, values: cases.Values) -> None:
    """On finite data, the gradient of jax.ops.segment_max, which rounds a share twice and ours once."""
    data, ids = cases.make_data(rng, (200, 5), dtype, values), cases.make_ids(rng, 200, 12)
    d_output = cases.cotangent(rng, (12, 5), dtype)
    with cases.x64_for(dtype):
        _, ours = value_and_pullback(lambda x: segment_max(x, ids, 12), jnp.asarray(data), d_output)
        _, by_jax = value_and_pullback(lambda x: jax.ops.segment_max(x, ids, 12), jnp.asarray(data), d_output)
    np.testing.assert_allclose(ours, by_jax, rtol=2 * jnp.finfo(dtype).eps, atol=0)
    if values == "distinct":
        np.testing.assert_array_equal(ours, by_jax)


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATING)
def test_losers_get_exact_zeros(rng: np.random.Generator, dtype: str, bad: float, tie_break: str) -> None:
    """A cotangent that is not finite reaches the winners and no other row (JAX's own gradient gives NaN there)."""
    data, ids = cases.make_data(rng, (60, 4), dtype, "ties"), cases.make_ids(rng, 60, 5)
    d_output = np.full((5, 4), bad, jnp.dtype(dtype))
    with cases.x64_for(dtype):
        _, d_data = value_and_pullback(
            lambda x: segment_max(x, ids, 5, tie_break=tie_break), jnp.asarray(data), d_output
        )
    gets_share = cases.shares(data, ids, 5, tie_break) > 0
    assert gets_share.any() and not gets_share.all()
    assert_same_bits(d_data, np.where(gets_share, bad, 0).astype(data.dtype))


@pytest.mark.parametrize("count", [2, 3, 256, 257, 2049, 70_001])
@pytest.mark.parametrize("dtype", FLOATING)
def test_many_ties(dtype: str, count: int) -> None:
    """The number of ties is an exact integer, also where the dtype cannot count that far."""
    data = np.full((count + 2, 2), 5, jnp.dtype(dtype))
    data[0] = data[-1] = 4
    d_output = np.array([[30.0, -7.0]], data.dtype)
    with cases.x64_for(dtype):
        d_data = segment_max_backward(d_output, data, np.zeros(count + 2, np.int32))
    expected = np.broadcast_to((d_output.astype(np.float64) / count).astype(data.dtype), data.shape).copy()
    expected[0] = expected[-1] = 0
    assert_same_bits(d_data, expected)


@pytest.mark.parametrize("dtype", FLOATING)
def test_ties_by_hand(dtype: str) -> None:
    """-0 and +0 tie; -inf ties with the identity; NaN passes nothing; "first" takes the lowest row."""
    data = np.array([-0.0, 0.0, -np.inf, -np.inf, -np.inf, np.nan, 7, 3, 3, 1], jnp.dtype(dtype))
    ids = np.array([0, 0, 1, 2, 2, 3, 3, 4, 4, 4])
    ones = np.ones(6, data.dtype)
    third = data.dtype.type(1 / 3)
    with cases.x64_for(dtype):
        split = segment_max_backward(ones, data, ids)
        first = unsorted_segment_max_backward(ones, data, ids)
    assert_same_bits(split, np.array([0.5, 0.5, 0.5, third, third, 0, 0, 0.5, 0.5, 0], data.dtype))
    assert_same_bits(first, np.array([1, 0, 1, 1, 0, 0, 0, 1, 0, 0], data.dtype))


@pytest.mark.parametrize("bucket_size", [1, 4, 7, 40, 64])
def test_bucket_size_gradient(rng: np.random.Generator, bucket_size: int) -> None:
    """Tied buckets share first, then the rows within; compared with NumPy and with jax.ops. "first" ignores buckets."""
    rows, segments = 40, 3
    data = rng.integers(0, 3, (rows, 4)).astype(np.float32)
    ids = cases.make_ids(rng, rows, segments)
    d_output = cases.cotangent(rng, (segments, 4), "float32")
    buckets = [slice(i, i + bucket_size) for i in range(0, rows, bucket_size)]
    maxima = np.stack([cases.reference_max(data[b], ids[b], segments) for b in buckets])
    num_tied_buckets = (maxima == maxima.max(axis=0)).sum(axis=0)
    expected = np.concatenate(
        [
            cases.reference_gradient(
                np.where(maxima[k] == maxima.max(axis=0), d_output / num_tied_buckets, 0).astype(np.float64),
                data[b].astype(np.float64),
                ids[b],
                "split",
            )
            for k, b in enumerate(buckets)
        ]
    )
    _, ours = value_and_pullback(
        lambda x: segment_max(x, ids, segments, bucket_size=bucket_size), jnp.asarray(data), d_output
    )
    _, by_jax = value_and_pullback(
        lambda x: jax.ops.segment_max(x, ids, segments, bucket_size=bucket_size), jnp.asarray(data), d_output
    )
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(ours, expected, rtol=2 * eps, atol=0)  # two divisions, and JAX's product by a quotient
    np.testing.assert_allclose(ours, by_jax, rtol=3 * eps, atol=0)
    _, first = value_and_pullback(
        lambda x: segment_max(x, ids, segments, bucket_size=bucket_size, tie_break="first"), jnp.asarray(data), d_output
    )
    assert_same_bits(first, cases.reference_gradient(d_output, data, ids, "first"))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32"])
def test_gradient_of_integers(dtype: str) -> None:
    """Integers have no tangent space: float0 for data and for ids."""
    data, ids = np.ones(4, jnp.dtype(dtype)), np.array([0, 1, 1, 0])
    loss = lambda data, ids: segment_max(data, ids, 2).astype(jnp.float32).sum()  # noqa: E731
    for gradient in jax.grad(loss, argnums=(0, 1), allow_int=True)(data, ids):
        assert gradient.dtype == jax.dtypes.float0 and gradient.shape == (4,)
    _, d_ids = jax.grad(loss, argnums=(0, 1), allow_int=True)(data.astype(np.float32), ids)
    assert d_ids.dtype == jax.dtypes.float0


# ----------------------------------------------------------------------------------------------------------------------
# The backward functions.


def transposed_sum_close(actual: Any, weights: np.ndarray, cotangents: np.ndarray, ids: np.ndarray, dtype: str) -> None:
    """Compares sums of weighted rows; rounding may add up to one eps of the absolute terms per term."""
    segments = actual.shape[0]
    terms = weights * cotangents.astype(np.float64)
    expected = cases.segment_sum(terms, ids, segments)
    bound = cases.segment_sum(np.abs(terms), ids, segments) * jnp.finfo(dtype).eps * np.bincount(ids[ids >= 0]).max()
    error = np.abs(np.asarray(actual).astype(np.float64) - expected)
    assert (error <= bound).all(), f"largest error {error.max()}, allowed there {bound.flat[error.argmax()]}"


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_backward(rng: np.random.Generator, dtype: str, tie_break: str) -> None:
    """The public backward functions: the reference's bits, the same as the gradient, eagerly and under jit."""
    data, ids = cases.make_data(rng, (150, 7), dtype), cases.make_ids(rng, 150, 20)
    d_output = cases.cotangent(rng, (20, 7), dtype)
    expected = cases.reference_gradient(d_output, data, ids, tie_break)
    backward = functools.partial(segment_max_backward, tie_break=tie_break)
    with cases.x64_for(dtype):
        assert_same_bits(backward(d_output, data, ids), expected)
        text = jax.jit(backward).lower(d_output, data, ids).as_text()
        assert_same_bits(jax.jit(backward)(d_output, data, ids), expected)
        if tie_break == "first":
            assert_same_bits(unsorted_segment_max_backward(d_output, data, ids), expected)
        order = np.argsort(ids, kind="stable")
        is_sorted = backward(d_output, data[order], ids[order], indices_are_sorted=True)
    assert_same_bits(is_sorted, expected[order])
    assert kernels_in(text) == ["segment_max_with_winner", "segment_max_backward"]


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_backward_is_linear_in_d_output(rng: np.random.Generator, dtype: str, tie_break: str) -> None:
    """Its derivative by d_output is the share-weighted sum over rows, that by data is zero."""
    data, ids = cases.make_data(rng, (90, 4), dtype), rng.integers(-1, 9, 90)
    ids[ids >= 8] = -1
    d_output, cotangents = cases.cotangent(rng, (8, 4), dtype), cases.cotangent(rng, (90, 4), dtype)
    weights = cases.shares(data, ids, 8, tie_break)
    with cases.x64_for(dtype):
        d_output = jnp.asarray(d_output)
        _, vjp = jax.vjp(lambda d, x: segment_max_backward(d, x, ids, tie_break=tie_break), d_output, jnp.asarray(data))
        d_d_output, d_data = vjp(jnp.asarray(cotangents))
        _, tangent = jax.jvp(
            lambda d: segment_max_backward(d, data, ids, tie_break=tie_break), (d_output,), (2 * d_output,)
        )
        twice = segment_max_backward(2 * d_output, data, ids, tie_break=tie_break)
    transposed_sum_close(d_d_output, weights, cotangents, ids, dtype)
    assert_same_bits(d_data, np.zeros_like(data))
    np.testing.assert_allclose(tangent, twice, rtol=2 * jnp.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
def test_backward_transposes(rng: np.random.Generator, tie_break: str) -> None:
    """jax.linear_transpose of the backward function, and of a pullback, is the share-weighted sum over rows."""
    data, ids = cases.make_data(rng, (30, 2), "float32", "ties"), rng.integers(-1, 5, 30)
    d_output, cotangents = cases.cotangent(rng, (5, 2), "float32"), cases.cotangent(rng, (30, 2), "float32")
    _, pullback = jax.vjp(lambda x: segment_max(x, ids, 5, tie_break=tie_break), jnp.asarray(data))
    weights = cases.shares(data, ids, 5, tie_break)
    for function in (
        lambda d: segment_max_backward(d, data, ids, tie_break=tie_break),
        lambda d: pullback(d)[0],
    ):
        [transposed] = jax.linear_transpose(function, d_output)(cotangents)
        transposed_sum_close(transposed, weights, cotangents, ids, "float32")


def test_backward_with_broadcast_data(rng: np.random.Generator) -> None:
    """Where data broadcast over the ids, their cotangent is summed back to their shape."""
    data, ids = rng.normal(size=(1, 3)).astype(np.float32), np.array([0, 2, 2, 2])
    d_output = rng.integers(1, 9, (3, 3)).astype(np.float32)
    for tie_break in TIE_BREAKS:
        d_data = segment_max_backward(d_output, data, ids, tie_break=tie_break)
        # All rows are equal: each segment with rows gives its cotangent in shares that sum to it.
        np.testing.assert_allclose(d_data, (d_output[0] + d_output[2])[None], rtol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Transformations.

Reduce = Callable[[Any, Any], jax.Array]

TRANSFORMATIONS: dict[str, Callable[[Reduce], Reduce]] = {
    "eager": lambda reduce: reduce,
    "jit": jax.jit,
    "jit of jit": lambda reduce: jax.jit(lambda data, ids: jax.jit(reduce)(data, ids)),
    "checkpoint": jax.checkpoint,
    "checkpoint, nothing saveable": lambda reduce: jax.jit(
        jax.checkpoint(reduce, policy=jax.checkpoint_policies.nothing_saveable)
    ),
    "scan": lambda reduce: lambda data, ids: jax.lax.scan(lambda c, x: (c, reduce(x, ids)), 0, data[None])[1][0],
    "map over ids": lambda reduce: lambda data, ids: jax.lax.map(lambda i: reduce(data, i), jnp.stack([ids, ids]))[1],
    "fori_loop": lambda reduce: (
        lambda data, ids: jax.lax.fori_loop(
            0, 2, lambda i, output: reduce(data, ids), jnp.zeros_like(reduce(data, ids))
        )
    ),
    "cond": lambda reduce: jax.jit(
        lambda data, ids: jax.lax.cond(
            ids.sum() > -(10**9), reduce, lambda data, ids: jnp.zeros_like(reduce(data, ids)), data, ids
        )
    ),
    "switch": lambda reduce: (
        lambda data, ids: jax.lax.switch(jnp.int32(1), [lambda data, ids: reduce(-data, ids), reduce], data, ids)
    ),
    "vmap of one": lambda reduce: lambda data, ids: jax.vmap(reduce)(data[None], ids[None])[0],
    "forward over checkpointed scan": lambda reduce: (
        lambda data, ids: jax.lax.scan(jax.checkpoint(lambda c, i: (c, reduce(data, i))), 0, ids[None])[1][0]
    ),
}


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_transformation(rng: np.random.Generator, transformation: str, dtype: str, tie_break: str) -> None:
    """Value and gradient under each transformation are the reference's bits."""
    data, ids = cases.make_data(rng, (40, 3), dtype), cases.make_ids(rng, 40, 9, "int16")
    d_output = cases.cotangent(rng, (9, 3), dtype)
    reduce = TRANSFORMATIONS[transformation](lambda data, ids: segment_max(data, ids, 9, tie_break=tie_break))
    data, ids = jnp.asarray(data), jnp.asarray(ids)
    expected = cases.reference_max(np.asarray(data), np.asarray(ids), 9)
    assert_same_bits(reduce(data, ids), expected)
    output, d_data = value_and_pullback(lambda x: reduce(x, ids), data, d_output)
    assert_same_bits(output, expected)
    assert_same_bits(d_data, cases.reference_gradient(d_output, np.asarray(data), np.asarray(ids), tie_break))


@pytest.mark.parametrize("x64", [False, True], ids=["x64 off", "x64 on"])
@pytest.mark.parametrize("ids_dtype", ["int32", "int64", "uint8"])
def test_x64(rng: np.random.Generator, x64: bool, ids_dtype: str) -> None:
    """32-bit data give 32-bit results whether 64-bit types are on or off."""
    data, ids = cases.make_data(rng, (40, 3), "float32"), rng.integers(0, 9, 40).astype(ids_dtype)
    d_output = cases.cotangent(rng, (9, 3), "float32")
    with jax.enable_x64(x64):
        output, d_data = value_and_pullback(lambda x: segment_max(x, ids, 9), jnp.asarray(data), d_output)
    assert_same_bits(output, cases.reference_max(data, ids, 9))
    assert_same_bits(d_data, cases.reference_gradient(d_output, data, ids, "split"))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("tie_break", TIE_BREAKS)
def test_donated(rng: np.random.Generator, tie_break: str) -> None:
    """Donating operands whose buffers fit the results changes no result."""
    data, ids = cases.make_data(rng, (64, 4), "float32"), cases.make_ids(rng, 64, 64)
    d_output = cases.cotangent(rng, (64, 4), "float32")

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def call(data: jax.Array, ids: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        reduce = functools.partial(segment_max, segment_ids=ids, num_segments=64, tie_break=tie_break)
        return *value_and_pullback(reduce, data, d_output), ids

    output, d_data, _ = call(*(jnp.array(x) for x in (data, ids, d_output)))
    assert_same_bits(output, cases.reference_max(data, ids, 64))
    assert_same_bits(d_data, cases.reference_gradient(d_output, data, ids, tie_break))
    value = jax.jit(lambda data, ids: segment_max(data, ids, 64), donate_argnums=0)(jnp.array(data), ids)
    assert_same_bits(value, cases.reference_max(data, ids, 64))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("data_axis", [None, 0, 1, 2, -1])
@pytest.mark.parametrize("ids_axis", [None, 0, 1])
def test_vmap(rng: np.random.Generator, data_axis: int | None, ids_axis: int | None, dtype: str) -> None:
    """Value and gradient mapped over data, ids or both, along any axis: one kernel call, one answer per element."""
    if data_axis is None and ids_axis is None:
        with pytest.raises(ValueError, match="vmap"):
            jax.vmap(lambda x: segment_max(x, np.zeros(3, int), 2), None)(np.ones(3))
        return
    batch, rows, segments = 5, 30, 6
    data = cases.make_data(rng, (batch, rows, 4), dtype)
    ids = np.stack([cases.make_ids(rng, rows, segments) for _ in range(batch)])
    data = data[:1].repeat(batch, 0) if data_axis is None else data
    ids = ids[:1].repeat(batch, 0) if ids_axis is None else ids
    d_output = cases.cotangent(rng, (batch, segments, 4), "float16").astype(data.dtype)
    data_operand = data[0] if data_axis is None else np.moveaxis(data, 0, data_axis)
    ids_operand = ids[0] if ids_axis is None else np.moveaxis(ids, 0, ids_axis)

    reduce = jax.jit(jax.vmap(lambda data, ids: segment_max(data, ids, segments), (data_axis, ids_axis)))
    assert kernels_in(reduce.lower(data_operand, ids_operand).as_text()) == ["segment_max"]
    expected = np.stack([cases.reference_max(x, i, segments) for x, i in zip(data, ids, strict=True)])
    assert_same_bits(reduce(data_operand, ids_operand), expected)
    if dtype == "int8":
        return
    for tie_break in TIE_BREAKS:
        pullback = jax.jit(
            jax.vmap(
                lambda data, ids, d_output, tie_break=tie_break: value_and_pullback(
                    lambda x: segment_max(x, ids, segments, tie_break=tie_break), data, d_output
                ),
                (data_axis, ids_axis, 0),
            )
        )
        text = pullback.lower(data_operand, ids_operand, d_output).as_text()
        assert kernels_in(text) == ["segment_max_with_winner", "segment_max_backward"]
        output, d_data = pullback(data_operand, ids_operand, d_output)
        assert_same_bits(output, expected)
        for k in range(batch):
            assert_same_bits(d_data[k], cases.reference_gradient(d_output[k], data[k], ids[k], tie_break))


@pytest.mark.parametrize("mapped", ["data", "ids", "both"])
@pytest.mark.parametrize("shape", [Shape(2000, (40,), 10), Shape(60, (40,), 300), Shape(2000, (64,), 1500)], ids=str)
def test_vmap_of_larger_problems(rng: np.random.Generator, shape: Shape, mapped: str) -> None:
    """Batches of problems each of which several threads or blocks share."""
    batch = 3
    data = cases.make_data(rng, (batch, shape.rows, *shape.row_shape), "float32")
    ids = np.stack([cases.make_ids(rng, shape.rows, shape.segments) for _ in range(batch)])
    d_output = cases.cotangent(rng, (batch, shape.segments, *shape.row_shape), "float32")
    axes = (0 if mapped != "ids" else None, 0 if mapped != "data" else None, 0)
    operands = [x if axis == 0 else x[0] for x, axis in zip((data, ids, d_output), axes, strict=True)]
    for tie_break in TIE_BREAKS:
        pullback = jax.vmap(
            lambda data, ids, d_output, tie_break=tie_break: value_and_pullback(
                lambda x: segment_max(x, ids, shape.segments, tie_break=tie_break), data, d_output
            ),
            axes,
        )
        output, d_data = jax.jit(pullback)(*operands)
        for k in range(batch):
            rows, row_ids, cells = (
                operand[k] if axis == 0 else operand for operand, axis in zip(operands, axes, strict=True)
            )
            assert_same_bits(output[k], cases.reference_max(rows, row_ids, shape.segments))
            assert_same_bits(d_data[k], cases.reference_gradient(cells, rows, row_ids, tie_break))


@pytest.mark.parametrize("data_levels", ["outer", "inner", "both", "none"])
@pytest.mark.parametrize("ids_levels", ["outer", "inner", "both", "none"])
def test_nested_vmap(rng: np.random.Generator, data_levels: str, ids_levels: str) -> None:
    """Two levels of vmap, each operand mapped at either level, both or none: still one kernel call."""
    outer, inner, rows, segments = 2, 3, 20, 4

    def axes_and_operand(levels: str, full: np.ndarray) -> tuple[int | None, int | None, np.ndarray, np.ndarray]:
        outer_axis, inner_axis = (0 if levels in (name, "both") else None for name in ("outer", "inner"))
        operand = full if outer_axis is not None else full[0]
        if inner_axis is None:
            operand = operand[:, 0] if outer_axis is not None else operand[0]
            full = full[:, :1].repeat(inner, 1)
        full = full[:1].repeat(outer, 0) if outer_axis is None else full
        return outer_axis, inner_axis, operand, full

    full_data = cases.make_data(rng, (outer, inner, rows, 2), "float32")
    full_ids = np.stack([cases.make_ids(rng, rows, segments) for _ in range(outer * inner)])
    data_outer, data_inner, data, full_data = axes_and_operand(data_levels, full_data)
    ids_outer, ids_inner, ids, full_ids = axes_and_operand(ids_levels, full_ids.reshape(outer, inner, rows))
    d_output = cases.cotangent(rng, (outer, inner, segments, 2), "float32")

    def pullback(data: jax.Array, ids: jax.Array, d_output: jax.Array) -> tuple[jax.Array, jax.Array]:
        return value_and_pullback(lambda x: segment_max(x, ids, segments), data, d_output)

    call = jax.jit(jax.vmap(jax.vmap(pullback, (data_inner, ids_inner, 0)), (data_outer, ids_outer, 0)))
    assert kernels_in(call.lower(data, ids, d_output).as_text()) == ["segment_max_with_winner", "segment_max_backward"]
    output, d_data = call(data, ids, d_output)
    for o, i in itertools.product(range(outer), range(inner)):
        assert_same_bits(output[o, i], cases.reference_max(full_data[o, i], full_ids[o, i], segments))
        expected = cases.reference_gradient(d_output[o, i], full_data[o, i], full_ids[o, i], "split")
        assert_same_bits(d_data[o, i], expected)


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
def test_vmap_over_cotangents_only(rng: np.random.Generator, tie_break: str) -> None:
    """jax.jacrev maps the pullback over cotangents while data, ids and winners stay shared."""
    data, ids = cases.make_data(rng, (12, 2), "float32", "ties"), cases.make_ids(rng, 12, 3)
    reduce = functools.partial(segment_max, segment_ids=ids, num_segments=3, tie_break=tie_break)
    jacobian = jax.jacrev(reduce)(jnp.asarray(data))
    expected = np.zeros((3, 2, 12, 2), np.float32)
    weights = cases.shares(data, ids, 3, tie_break).astype(np.float32)
    for row, feature in np.ndindex(data.shape):
        if 0 <= ids[row] < 3:
            expected[ids[row], feature, row, feature] = weights[row, feature]
    assert_same_bits(jacobian, expected)
    assert_same_bits(jax.jit(jax.jacrev(reduce))(data), expected)


@pytest.mark.parametrize("mapped", ["data", "ids", "both"])
def test_vmap_over_winners_only(rng: np.random.Generator, mapped: str) -> None:
    """A cotangent shared by the whole batch, with mapped data or ids."""
    data = cases.make_data(rng, (4, 20, 3), "float32")
    ids = np.stack([cases.make_ids(rng, 20, 5) for _ in range(4)])
    d_output = cases.cotangent(rng, (5, 3), "float32")
    axes = (0 if mapped != "ids" else None, 0 if mapped != "data" else None)
    operands = [x if axis == 0 else x[0] for x, axis in zip((data, ids), axes, strict=True)]
    for tie_break in TIE_BREAKS:
        backward = jax.vmap(
            lambda data, ids, tie_break=tie_break: segment_max_backward(d_output, data, ids, tie_break=tie_break), axes
        )
        d_data = backward(*operands)
        for k in range(4):
            element = [x[k] if axis == 0 else x for x, axis in zip(operands, axes, strict=True)]
            assert_same_bits(d_data[k], cases.reference_gradient(d_output, *element, tie_break))


@pytest.mark.parametrize("batch", [0, 1])
def test_vmap_of_empty_and_single_batch(batch: int) -> None:
    """A mapped axis of size 0 or 1, over data, ids, or both."""
    data, ids = np.ones((batch, 6, 2), np.float32), np.zeros((batch, 6), np.int32)
    for axes in ((0, None), (None, 0), (0, 0)):
        operands = [
            x if axis == 0 else y
            for x, y, axis in zip((data, ids), (np.ones((6, 2), np.float32), np.zeros(6, np.int32)), axes, strict=True)
        ]
        output = jax.vmap(lambda data, ids: segment_max(data, ids, 3), axes)(*operands)
        assert output.shape == (batch, 3, 2)
        gradient = jax.vmap(jax.grad(lambda data, ids: segment_max(data, ids, 3)[0].sum()), axes)(*operands)
        assert_same_bits(gradient, np.full((batch, 6, 2), 1 / 6, np.float32))


def test_vmap_of_empty_batch_equals_jax() -> None:
    output = jax.vmap(lambda x: jax.ops.segment_max(x, np.zeros(6, int), 3))(np.ones((0, 6, 2), np.float32))
    assert output.shape == (0, 3, 2)


def test_vmap_out_axes_and_of_grad(rng: np.random.Generator) -> None:
    """out_axes, and per-example gradients of a loss."""
    data, ids = cases.make_data(rng, (3, 25, 4), "float32", "ties"), rng.integers(0, 5, 25)
    output = jax.vmap(lambda x: segment_max(x, ids, 5), out_axes=2)(data)
    expected = np.stack([cases.reference_max(x, ids, 5) for x in data], axis=2)
    assert_same_bits(output, expected)
    gradient = jax.vmap(jax.grad(lambda x: (3 * segment_max(x, ids, 5)).sum()))(data)
    threes = np.full((5, 4), 3, np.float32)
    assert_same_bits(gradient, np.stack([cases.reference_gradient(threes, x, ids, "split") for x in data]))


def test_residuals(rng: np.random.Generator) -> None:
    """With tie_break="first" the data are not kept for the backward pass; with "split" they are."""
    data, ids = jnp.asarray(cases.make_data(rng, (50, 6), "float32")), cases.make_ids(rng, 50, 9)
    for tie_break, keeps_data in (("first", False), ("split", True)):
        _, vjp = jax.vjp(lambda x, tie_break=tie_break: segment_max(x, ids, 9, tie_break=tie_break), data)
        residuals = [x for x in jax.tree.leaves(vjp) if hasattr(x, "shape")]
        assert residuals, "this version of JAX does not show the residuals"
        sizes = [x.size for x in residuals]
        assert any(x.dtype == np.float32 for x in residuals) == keeps_data
        assert (data.size in sizes) == keeps_data


def test_kernels_of_the_gradient() -> None:
    """The gradient calls two kernels and nothing of XLA's scatters; the value alone calls one."""
    data, ids = np.ones((8, 2), np.float32), np.zeros(8, np.int32)
    for tie_break in TIE_BREAKS:
        loss = lambda x, tie_break=tie_break: segment_max(x, ids, 3, tie_break=tie_break).sum()  # noqa: E731
        text = jax.jit(jax.grad(loss)).lower(data).as_text()
        assert kernels_in(text) == ["segment_max_with_winner", "segment_max_backward"]
        assert "scatter" not in text
        assert kernels_in(jax.jit(loss).lower(data).as_text()) == ["segment_max"]
        assert "scatter" not in jax.jit(loss).lower(data).as_text()


# ----------------------------------------------------------------------------------------------------------------------
# Higher derivatives and forward mode.


def jacobian(data: np.ndarray, ids: np.ndarray, segments: int, tie_break: str) -> np.ndarray:
    """d output / d data as a matrix ``[segments * features, rows * features]``, in float64."""
    weights = cases.shares(data, ids, segments, tie_break)
    rows, features = data.shape
    matrix = np.zeros((segments, features, rows, features))
    for row, feature in np.ndindex(rows, features):
        if 0 <= ids[row] < segments:
            matrix[ids[row], feature, row, feature] = weights[row, feature]
    return matrix.reshape(segments * features, rows * features)


def smooth_problem(rng: np.random.Generator, values: cases.Values) -> tuple[np.ndarray, np.ndarray]:
    """Finite float64 data [10, 2] in 3 segments, all of them with rows; some rows dropped."""
    data = cases.make_data(rng, (10, 2), "float64", values)
    return data, rng.permutation(np.array([0, 0, 0, 1, 1, 2, 2, 2, -1, 3]))


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("values", ["distinct", "ties"])
def test_higher_derivatives(rng: np.random.Generator, values: cases.Values, tie_break: str) -> None:
    """Derivatives of sum(output ** 3) up to the third against their closed forms, and every way to the second."""
    data, ids = smooth_problem(rng, values)
    a = jacobian(data, ids, 3, tie_break)
    output = cases.reference_max(data, ids, 3).reshape(-1)
    hessian = a.T @ np.diag(6 * output) @ a
    u, v = rng.normal(size=(2, *data.shape))

    def loss(x: jax.Array) -> jax.Array:
        return (segment_max(x, ids, 3, tie_break=tie_break) ** 3).sum()

    def close(actual: Any, expected: np.ndarray) -> None:
        np.testing.assert_allclose(np.asarray(actual).reshape(expected.shape), expected, rtol=1e-13, atol=1e-12)

    with jax.enable_x64(True):
        x = jnp.asarray(data)
        close(jax.grad(loss)(x), a.T @ (3 * output**2))
        close(jax.jit(jax.hessian(loss))(x), hessian)
        if tie_break == "split":
            close(jax.jit(jax.jacrev(jax.jacrev(loss)))(x), hessian)
        hvp_forward = jax.jit(lambda x, v: jax.jvp(jax.grad(loss), (x,), (v,))[1])
        hvp_reverse = jax.jit(lambda x, v: jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), v))(x))
        close(hvp_forward(x, v), hessian @ v.reshape(-1))
        close(hvp_reverse(x, v), hessian @ v.reshape(-1))
        close(jax.vmap(hvp_forward, (None, 0))(x, jnp.stack([u, v]))[0], hessian @ u.reshape(-1))
        checkpointed = jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(jax.checkpoint(loss))(x), v)))
        close(checkpointed(x), hessian @ v.reshape(-1))
        third = jax.jit(jax.grad(lambda x: jnp.vdot(hvp_reverse(x, v), u)))(x)
        close(third, a.T @ (6 * (a @ u.reshape(-1)) * (a @ v.reshape(-1))))


def test_higher_derivatives_equal_jax(rng: np.random.Generator) -> None:
    """The Hessian and a Hessian-vector product are those of jax.ops.segment_max."""
    data, ids = smooth_problem(rng, "ties")
    with jax.enable_x64(True):
        hessians = [
            jax.jit(jax.hessian(lambda x, f=f: jnp.sin(f(x, ids, 3)).sum()))(data)
            for f in (segment_max, jax.ops.segment_max)
        ]
    np.testing.assert_allclose(*hessians, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_forward_mode(rng: np.random.Generator, dtype: str, tie_break: str) -> None:
    """jvp, jacfwd, linearize of the forward-mode function, and grad of its jvp, against the matrix of shares."""
    data, ids = smooth_problem(rng, "ties")
    data = data.astype(dtype)
    tangent = rng.normal(size=data.shape).astype(dtype)
    a = jacobian(data, ids, 3, tie_break)
    output = cases.reference_max(data, ids, 3)
    reduce = functools.partial(
        jax_baracuda.forward_mode.segment_max, segment_ids=ids, num_segments=3, tie_break=tie_break
    )

    def close(actual: Any, expected: np.ndarray) -> None:
        eps = jnp.finfo(dtype).eps  # sums of at most three terms of size 4
        np.testing.assert_allclose(np.asarray(actual).reshape(expected.shape), expected, rtol=8 * eps, atol=30 * eps)

    with cases.x64_for(dtype):
        x, t = jnp.asarray(data), jnp.asarray(tangent)
        primal, pushed = jax.jvp(reduce, (x,), (t,))
        assert_same_bits(primal, output)
        close(pushed, a @ tangent.reshape(-1))
        assert kernels_in(jax.jit(lambda x, t: jax.jvp(reduce, (x,), (t,))).lower(x, t).as_text())[0] == "segment_max"
        primal, linear = jax.linearize(reduce, x)
        assert_same_bits(primal, output)
        close(linear(t), a @ tangent.reshape(-1))
        close(jax.jit(jax.jacfwd(reduce))(x), a.reshape(3, 2, 10, 2))
        close(jax.vmap(lambda t: jax.jvp(reduce, (x,), (t,))[1])(t[None])[0], a @ tangent.reshape(-1))
        close(jax.grad(lambda x: reduce(x).sum())(x), a.sum(0))
        mixed = jax.grad(lambda x: (jax.jvp(lambda x: reduce(x) ** 2, (x,), (t,))[1]).sum())(x)
        close(mixed, a.T @ (2 * (a @ tangent.reshape(-1))))


def test_forward_mode_values(rng: np.random.Generator) -> None:
    """The forward-mode function has the plain function's values, for dtypes with and without a tangent space."""
    ids = cases.make_ids(rng, 30, 4)
    for dtype in ("float32", "bfloat16", "int8", "bool"):
        data = cases.make_data(rng, (30, 2), dtype)
        assert_same_bits(jax_baracuda.forward_mode.segment_max(data, ids, 4), cases.reference_max(data, ids, 4))


def test_forward_mode_is_confined() -> None:
    """Calling a forward-mode function leaves the plain one as it was, even after an error."""
    data, ids = jnp.ones(3), np.zeros(3, int)
    jax_baracuda.forward_mode.segment_max(data, ids, 1)
    with pytest.raises(ValueError, match="mode"):
        jax_baracuda.forward_mode.segment_max(data, ids, 1, mode="no such mode")
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: segment_max(x, ids, 1), (data,), (data,))


FORWARD_MODE_CALLS: dict[str, Callable[[Callable[..., Any], jax.Array], Any]] = {
    "jvp": lambda reduce, x: jax.jvp(reduce, (x,), (x,)),
    "jvp under jit": lambda reduce, x: jax.jit(lambda x: jax.jvp(reduce, (x,), (x,)))(x),
    "jacfwd": lambda reduce, x: jax.jacfwd(reduce)(x),
    "linearize": lambda reduce, x: jax.linearize(reduce, x)[1](x),
}


@pytest.mark.parametrize("call", FORWARD_MODE_CALLS)
def test_plain_function_refuses_forward_mode(call: str) -> None:
    """JAX's own message tells what is wrong."""
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff .jvp. to a custom_vjp function"):
        FORWARD_MODE_CALLS[call](lambda x: segment_max(x, np.zeros(3, int), 1), jnp.ones(3))


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
def test_check_grads(rng: np.random.Generator, tie_break: str) -> None:
    """Finite differences agree to second order, on data without ties."""
    data, ids = smooth_problem(rng, "distinct")
    with jax.enable_x64(True):
        x = jnp.asarray(data)
        reduce = functools.partial(segment_max, segment_ids=ids, num_segments=3, tie_break=tie_break)
        check_grads(lambda x: reduce(x) ** 2, (x,), order=2, modes=["rev"])
        forward = functools.partial(jax_baracuda.forward_mode.segment_max, segment_ids=ids, num_segments=3)
        check_grads(lambda x: forward(x, tie_break=tie_break) ** 2, (x,), order=2, modes=["fwd", "rev"])
        d_output = jnp.asarray(rng.normal(size=(3, 2)))
        check_grads(lambda d: segment_max_backward(d, x, ids) ** 2, (d_output,), order=2, modes=["fwd", "rev"])


# ----------------------------------------------------------------------------------------------------------------------
# Errors.

ROWS = np.ones((4, 2), np.float32)
IDS = np.array([0, 1, 1, 0])
CELLS = np.ones((2, 2), np.float32)

ERRORS: dict[str, tuple[Callable[..., Any], tuple[type[Exception], ...], str]] = {
    "data is a list": (lambda f: f([1.0], IDS, 2), (TypeError,), "data must be an array, got list"),
    "data is None": (lambda f: f(None, IDS, 2), (TypeError,), "data must be an array, got NoneType"),
    "data are keys": (lambda f: f(jax.random.split(jax.random.key(0), 4), IDS, 2), (TypeError,), "data .* got key"),
    "ids are a list": (lambda f: f(ROWS, [0, 1, 1, 0], 2), (TypeError,), "segment_ids must be an array, got list"),
    "ids are bool": (lambda f: f(ROWS, IDS > 0, 2), (IndexError,), "segment_ids must have an integer dtype, got bool"),
    "ids are float": (
        lambda f: f(ROWS, IDS.astype(np.float32), 2),
        (TypeError,),
        "segment_ids must have an integer dtype, got float32",
    ),
    "rows do not fit": (
        lambda f: f(ROWS[:3], IDS, 2),
        (ValueError,),
        r"data must have one row per id.*data.shape = \(3, 2\).*segment_ids.shape = \(4,\)",
    ),
    "num_segments negative": (lambda f: f(ROWS, IDS, -1), (ValueError,), "num_segments must be non-negative, got -1"),
    "num_segments float": (lambda f: f(ROWS, IDS, 2.0), (TypeError,), "num_segments must be an integer, got 2.0"),
    "num_segments missing and no ids": (
        lambda f: f(ROWS[:0], IDS[:0]),
        (ValueError,),
        "num_segments is None, but segment_ids is empty",
    ),
    "num_segments missing under jit": (
        lambda f: jax.jit(lambda ids: f(ROWS, ids))(IDS),
        (jax.errors.ConcretizationTypeError,),
        "num_segments must be static",
    ),
    "num_segments traced": (
        lambda f: jax.jit(lambda s: f(ROWS, IDS, s))(2),
        (jax.errors.ConcretizationTypeError,),
        "num_segments must be static",
    ),
    "unknown mode": (lambda f: f(ROWS, IDS, 2, mode="wrap"), (ValueError,), "mode must be None, 'fill'.*got 'wrap'"),
    "bucket_size zero": (lambda f: f(ROWS, IDS, 2, bucket_size=0), (ZeroDivisionError,), "bucket_size .*got 0"),
    "bucket_size negative": (lambda f: f(ROWS, IDS, 2, bucket_size=-2), (TypeError,), "bucket_size .*got -2"),
    "bucket_size float": (lambda f: f(ROWS, IDS, 2, bucket_size=2.0), (TypeError,), "bucket_size .*got 2.0"),
    "bucket_size without rows": (
        lambda f: f(ROWS[:0], IDS[:0], 2, bucket_size=2),
        (ValueError,),
        r"bucket_size needs .*got shape \(0,\)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    """The exception type is that of jax.ops.segment_max; the message names function, argument and what was given."""
    call, exceptions, message = ERRORS[case]
    with pytest.raises(exceptions, match=f"(?s)segment_max: {message}"):
        call(segment_max)
    with pytest.raises(exceptions):
        call(jax.ops.segment_max)


BACKWARD_ERRORS: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "d_output is a scalar": (lambda f: f(np.float32(1), ROWS, IDS), ValueError, "d_output must have shape .*scalar"),
    "d_output is a list": (lambda f: f([1.0], ROWS, IDS), TypeError, "d_output must be an array, got list"),
    "dtypes differ": (
        lambda f: f(CELLS.astype(np.float16), ROWS, IDS),
        TypeError,
        "d_output and data must have the same floating dtype, got float16 and float32",
    ),
    "dtype is integer": (
        lambda f: f(CELLS.astype(np.int32), ROWS.astype(np.int32), IDS),
        TypeError,
        "d_output and data must have the same floating dtype, got int32 and int32",
    ),
    "features differ": (
        lambda f: f(np.ones((2, 3), np.float32), ROWS, IDS),
        ValueError,
        r"d_output must have shape \(2, 2\) to fit data, got \(2, 3\)",
    ),
    "ranks differ": (
        lambda f: f(np.ones(2, np.float32), ROWS, IDS),
        ValueError,
        r"d_output must have shape \(2, 2\) to fit data, got \(2,\)",
    ),
    "rows do not fit": (lambda f: f(CELLS, ROWS[:3], IDS), ValueError, "data must have one row per id"),
    "ids are bool": (lambda f: f(CELLS, ROWS, IDS > 0), IndexError, "segment_ids must have an integer dtype, got bool"),
    "ids are float": (lambda f: f(CELLS, ROWS, ROWS[:, 0]), TypeError, "segment_ids must have an integer dtype"),
    "data are a list": (lambda f: f(CELLS, [1.0], IDS), TypeError, "data must be an array, got list"),
}


@pytest.mark.parametrize("function", [segment_max_backward, unsorted_segment_max_backward])
@pytest.mark.parametrize("case", BACKWARD_ERRORS)
def test_backward_errors(case: str, function: Callable[..., Any]) -> None:
    call, exception, message = BACKWARD_ERRORS[case]
    with pytest.raises(exception, match=f"segment_max_backward: {message}"):
        call(function)


@pytest.mark.parametrize("tie_break", ["last", None, True])
def test_unknown_tie_break(tie_break: Any) -> None:
    with pytest.raises(ValueError, match=f"segment_max: tie_break must be 'split' or 'first', got {tie_break!r}"):
        segment_max(ROWS, IDS, 2, tie_break=tie_break)
    with pytest.raises(ValueError, match=f"segment_max_backward: tie_break must be .* got {tie_break!r}"):
        segment_max_backward(CELLS, ROWS, IDS, tie_break=tie_break)


def result(shape: tuple[int, ...], dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


DATA_B = np.ones((1, 4, 3), np.float32)
IDS_B = np.zeros((1, 4), np.int32)
CELLS_B = np.ones((1, 2, 3), np.float32)
WINNER_B = np.zeros((1, 2, 3), np.int32)
OUT, OUT_WINNER = result((1, 2, 3)), result((1, 2, 3), np.int32)

# Target, results, operands, attributes to change, and what the error says.
HANDLER_ERRORS: dict[str, tuple[str, Any, tuple[np.ndarray, ...], dict[str, Any], str]] = {
    "data without batch": ("segment_max", OUT, (DATA_B[0], IDS_B), {}, r"segment_max: data has shape \[4,3\]"),
    "data with other rows": ("segment_max", OUT, (DATA_B[:, :3], IDS_B), {}, r"segment_max: data .*4 rows"),
    "data with other batch": (
        "segment_max",
        result((3, 2, 3)),
        (DATA_B.repeat(2, 0), IDS_B),
        {},
        r"segment_max: data has shape \[2,4,3\], .*batch = 3",
    ),
    "data of rank 0": ("segment_max", OUT, (DATA_B[0, 0, 0], IDS_B), {}, r"segment_max: data has shape \[\]"),
    "data complex": (
        "segment_max",
        result((1, 2, 3), np.complex64),
        (DATA_B.astype(np.complex64), IDS_B),
        {},
        "segment_max: data has XLA element type .* no kernel",
    ),
    "ids without batch": ("segment_max", OUT, (DATA_B, IDS_B[0]), {}, r"segment_max: segment_ids has shape \[4\]"),
    "ids of rank 3": ("segment_max", OUT, (DATA_B, IDS_B[..., None]), {}, "segment_max: segment_ids has shape"),
    "ids with other batch": (
        "segment_max",
        result((3, 2, 3)),
        (DATA_B, IDS_B.repeat(2, 0)),
        {},
        "segment_max: segment_ids .*batch = 3",
    ),
    "ids int16": ("segment_max", OUT, (DATA_B, IDS_B.astype(np.int16)), {}, "segment_max: segment_ids has XLA element"),
    "ids float": ("segment_max", OUT, (DATA_B, IDS_B.astype(np.float32)), {}, "segment_max: segment_ids has XLA"),
    "output of rank 0": ("segment_max", result(()), (DATA_B, IDS_B), {}, r"segment_max: output has shape \[\]"),
    "output of rank 1": ("segment_max", result((1,)), (DATA_B, IDS_B), {}, r"segment_max: output has shape \[1\]"),
    "output of rank 2": ("segment_max", result((1, 2)), (DATA_B, IDS_B), {}, r"segment_max: output has shape \[1,2\]"),
    "output with other features": ("segment_max", result((1, 2, 4)), (DATA_B, IDS_B), {}, "segment_max: output has"),
    "output of other dtype": ("segment_max", OUT_WINNER, (DATA_B, IDS_B), {}, "segment_max: output has XLA element"),
    "operand missing": ("segment_max", OUT, (DATA_B,), {}, "[Ww]rong number of arguments"),
    "operand too many": ("segment_max", OUT, (DATA_B, IDS_B, IDS_B), {}, "[Ww]rong number of arguments"),
    "attribute missing": (
        "segment_max",
        OUT,
        (DATA_B, IDS_B),
        {"indices_are_sorted": None},
        "[Ww]rong number of attributes",
    ),
    "attribute of other type": ("segment_max", OUT, (DATA_B, IDS_B), {"indices_are_sorted": 1.5}, "PRED|bool"),
    "winner of other dtype": (
        "segment_max_with_winner",
        (OUT, OUT),
        (DATA_B, IDS_B),
        {},
        "segment_max_with_winner: winner has XLA element type",
    ),
    "winner of other shape": (
        "segment_max_with_winner",
        (OUT, result((1, 3, 3), np.int32)),
        (DATA_B, IDS_B),
        {},
        r"segment_max_with_winner: winner has shape \[1,3,3\], expected \[1,2,3\]",
    ),
    "winner of integers": (
        "segment_max_with_winner",
        (OUT_WINNER, OUT_WINNER),
        (DATA_B.astype(np.int32), IDS_B),
        {},
        "segment_max_with_winner: data has XLA element type .* no kernel",
    ),
    "backward: winner of other shape": (
        "segment_max_backward",
        result((1, 4, 3)),
        (CELLS_B, WINNER_B[:, :1], IDS_B),
        {},
        "segment_max_backward: winner has shape",
    ),
    "backward: winner float": (
        "segment_max_backward",
        result((1, 4, 3)),
        (CELLS_B, CELLS_B, IDS_B),
        {},
        "segment_max_backward: winner has XLA element type",
    ),
    "backward: d_output of other dtype": (
        "segment_max_backward",
        result((1, 4, 3)),
        (CELLS_B.astype(np.float16), WINNER_B, IDS_B),
        {},
        "segment_max_backward: d_output has XLA element type",
    ),
    "backward: d_output of other features": (
        "segment_max_backward",
        result((1, 4, 3)),
        (CELLS_B[..., :2], WINNER_B, IDS_B),
        {},
        "segment_max_backward: d_output has shape",
    ),
    "backward: integers": (
        "segment_max_backward",
        result((1, 4, 3), np.int32),
        (WINNER_B, WINNER_B, IDS_B),
        {},
        "segment_max_backward: d_output has XLA element type .* no kernel",
    ),
    "backward: d_data of other rows": (
        "segment_max_backward",
        result((1, 5, 3)),
        (CELLS_B, WINNER_B, IDS_B),
        {},
        "segment_max_backward: d_data has shape",
    ),
    "backward: d_data of rank 1": (
        "segment_max_backward",
        result((4,)),
        (CELLS_B, WINNER_B, IDS_B),
        {},
        r"segment_max_backward: d_data has shape \[4\]",
    ),
    "backward: data without output": (
        "segment_max_backward",
        result((1, 4, 3)),
        (CELLS_B, WINNER_B, IDS_B, DATA_B),
        {},
        "segment_max_backward: expected both data and output",
    ),
    "backward: one operand too many": (
        "segment_max_backward",
        result((1, 4, 3)),
        (CELLS_B, WINNER_B, IDS_B, DATA_B, CELLS_B, CELLS_B),
        {},
        "segment_max_backward: expected both data and output",
    ),
    "backward: data of other shape": (
        "segment_max_backward",
        result((1, 4, 3)),
        (CELLS_B, WINNER_B, IDS_B, DATA_B[:, :2], CELLS_B),
        {},
        "segment_max_backward: data has shape",
    ),
    "backward: data of other dtype": (
        "segment_max_backward",
        result((1, 4, 3)),
        (CELLS_B, WINNER_B, IDS_B, DATA_B.astype(np.float16), CELLS_B),
        {},
        "segment_max_backward: data has XLA element type",
    ),
    "backward: output of other shape": (
        "segment_max_backward",
        result((1, 4, 3)),
        (CELLS_B, WINNER_B, IDS_B, DATA_B, CELLS_B[:, :1]),
        {},
        "segment_max_backward: output has shape",
    ),
    "backward: output of other dtype": (
        "segment_max_backward",
        result((1, 4, 3)),
        (CELLS_B, WINNER_B, IDS_B, DATA_B, WINNER_B),
        {},
        "segment_max_backward: output has XLA element type",
    ),
    "backward: output and winner of other batch": (
        "segment_max_backward",
        result((2, 4, 3)),
        (CELLS_B, WINNER_B, IDS_B, DATA_B, CELLS_B.repeat(2, 0)),
        {},
        "segment_max_backward: output has shape",
    ),
    "backward: ids of other rows": (
        "segment_max_backward",
        result((1, 4, 3)),
        (CELLS_B, WINNER_B, IDS_B[:, :2]),
        {},
        "segment_max_backward: d_data has shape",
    ),
}


@pytest.mark.parametrize("case", HANDLER_ERRORS)
def test_handler_refuses(case: str) -> None:
    """The native handlers trust nothing: what does not fit gives a Python error that names op and argument."""
    target, results, operands, changes, message = HANDLER_ERRORS[case]
    attributes = {name: False for name in OPS[target].attributes} | changes
    attributes = {name: value for name, value in attributes.items() if value is not None}
    call = jax.jit(lambda *x: jax.ffi.ffi_call(f"jax_baracuda.{target}", results)(*x, **attributes))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(*operands))


# ----------------------------------------------------------------------------------------------------------------------
# More than 2^31 elements.

LARGE_ROWS, LARGE_FEATURES, LARGE_SEGMENTS = 2**26 + 5, 33, 1009


def require_memory(gigabytes_on_device: int) -> None:
    """Skips where the device has less free memory; on CPUs also unless JAX_BARACUDA_TEST_LARGE asks for it."""
    if cases.PLATFORM == "cpu":
        if os.environ.get("JAX_BARACUDA_TEST_LARGE") != "1":
            pytest.skip("on CPUs, arrays with more than 2^31 elements are tested with JAX_BARACUDA_TEST_LARGE=1 only")
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        stats = jax.devices()[0].memory_stats() or {}
        free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    if free < gigabytes_on_device * 1e9:
        pytest.skip(f"needs {gigabytes_on_device} GB of free memory, there are {free / 1e9:.1f} GB")


def large_value(row: Any, feature: Any) -> Any:
    """Small numbers, but for the last two rows of each segment, which lie beyond element 2^31 and hold its maximum."""
    is_last = row >= LARGE_ROWS - 2 * LARGE_SEGMENTS
    return np.where(is_last, (row + 3 * feature) % 120, (row * 7 + feature * 13) % 101 - 125).astype(np.int8)


def large_data(dtype: Any) -> jax.Array:
    def formula() -> jax.Array:
        shape = (LARGE_ROWS, LARGE_FEATURES)
        row, feature = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        is_last = row >= LARGE_ROWS - 2 * LARGE_SEGMENTS
        return jnp.where(is_last, (row + 3 * feature) % 120, (row * 7 + feature * 13) % 101 - 125).astype(dtype)

    return jax.jit(formula)()


@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
def test_more_than_2_31_elements_of_data(is_sorted: bool) -> None:
    """Rows whose elements have numbers of 2^31 and more are read where they are."""
    require_memory(12 if cases.PLATFORM == "cpu" else 40)
    assert (LARGE_ROWS - 2 * LARGE_SEGMENTS) * LARGE_FEATURES > 2**31
    data = large_data(jnp.int8)
    rows = np.arange(LARGE_ROWS, dtype=np.int32)
    rows_per_segment = -(-LARGE_ROWS // LARGE_SEGMENTS)
    ids = rows // rows_per_segment if is_sorted else rows % LARGE_SEGMENTS
    reduce = jax.jit(lambda data, ids: segment_max(data, ids, LARGE_SEGMENTS, indices_are_sorted=is_sorted))
    output = np.asarray(reduce(data, jnp.asarray(ids)))
    feature = np.arange(LARGE_FEATURES)
    for segment in (0, 1, 2, 500, LARGE_SEGMENTS - 3, LARGE_SEGMENTS - 2, LARGE_SEGMENTS - 1):
        expected = large_value(np.flatnonzero(ids == segment)[:, None], feature).max(axis=0)
        np.testing.assert_array_equal(output[segment], expected)


def test_more_than_2_31_elements_of_output() -> None:
    """Segments whose cells have numbers of 2^31 and more are written where they belong."""
    require_memory(12 if cases.PLATFORM == "cpu" else 40)
    segments = np.array([0, 1, LARGE_ROWS // 2, LARGE_ROWS - 2, LARGE_ROWS - 1, LARGE_ROWS, LARGE_ROWS])
    data = np.arange(7 * LARGE_FEATURES).reshape(7, LARGE_FEATURES).astype(np.int8)
    output = jax.jit(lambda data, ids: segment_max(data, ids, LARGE_ROWS))(data, segments)
    np.testing.assert_array_equal(output[jnp.asarray(segments[:5])], data[:5])
    others = jnp.asarray([2, 3, LARGE_ROWS // 2 + 1, LARGE_ROWS - 4, LARGE_ROWS - 3])
    np.testing.assert_array_equal(output[others], np.full((5, LARGE_FEATURES), -128, np.int8))


def test_gradient_of_more_than_2_31_elements() -> None:
    """The gradient of rows beyond element 2^31: the last row of a segment wins a feature, or the last but one."""
    if cases.PLATFORM == "cpu":
        pytest.skip("takes 20 GB of memory: on GPUs only")
    require_memory(40)
    data = large_data(jnp.bfloat16)
    ids = jnp.arange(LARGE_ROWS, dtype=jnp.int32) % LARGE_SEGMENTS
    d_output = jnp.ones((LARGE_SEGMENTS, LARGE_FEATURES), jnp.bfloat16)
    pullback = jax.jit(lambda x, d: value_and_pullback(lambda x: segment_max(x, ids, LARGE_SEGMENTS), x, d)[1])
    d_data = pullback(data, d_output)
    tail = slice(LARGE_ROWS - 4 * LARGE_SEGMENTS, LARGE_ROWS)
    expected = cases.reference_gradient(np.asarray(d_output), np.asarray(data[tail]), np.asarray(ids[tail]), "split")
    assert_same_bits(d_data[tail], expected)
    assert float(jnp.abs(d_data[: LARGE_ROWS - 4 * LARGE_SEGMENTS]).max()) == 0
