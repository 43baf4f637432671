"""Properties of segment_sum and segment_mean alone: the accumulator, special values, exact counts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from segment.reference import MEAN, SUM, Reduction
from support import cases
from support.cases import FLOATING, Shape, assert_same_bits
from support.kernels import Batch, kernels_of

import jax_baracuda as jb
from jax_baracuda import segment_mean, segment_mean_backward, segment_sum, segment_sum_backward

each_sum = pytest.mark.parametrize("reduction", [SUM, MEAN], ids=str)

ROUNDING_SHAPES = (
    Shape(1000, (), 1),
    Shape(50_000, (), 7),
    Shape(9000, (3,), 40),
    Shape(3000, (33,), 5),
    Shape(20_000, (128,), 900),
    Shape(400, (130,), 1000),
)


@pytest.mark.parametrize("sign", ["of both signs", "positive"])
@pytest.mark.parametrize("dtype", FLOATING)
@each_sum
def test_rounding(rng: np.random.Generator, reduction: Reduction, dtype: str, sign: str) -> None:
    """Sums and means have the error of their accumulator and one rounding. 16-bit types accumulate in float32."""
    batch = Batch()
    for shape in ROUNDING_SHAPES:
        for is_sorted in (False, True):
            data = rng.normal(size=(shape.rows, *shape.row_shape)) * np.exp2(rng.integers(-4, 5, shape.rows)).reshape(
                -1, *(1 for _ in shape.row_shape)
            )
            data = (data if sign == "of both signs" else np.abs(data)).astype(jnp.dtype(dtype))
            ids = cases.make_ids(rng, shape.rows, shape.segments, is_sorted=is_sorted)
            expected = reduction.value(data, ids, shape.segments)
            assert np.asarray(expected.error).any()
            for options in reduction.options:
                batch.add(
                    lambda x, i, s=shape, o={"indices_are_sorted": is_sorted, **options}: reduction(
                        x, i, s.segments, **o
                    ),
                    (data, ids),
                    lambda output, e=expected, where=f"{shape} {is_sorted} {options}": e.check(output, where),
                )
    with cases.x64_for(dtype):
        batch.run()


@pytest.mark.parametrize("width", [1, 3, 8, 40, 513])
def test_every_float16_number_is_its_own_sum(width: int) -> None:
    """A sum of one number is that number, at any width: subnormal numbers, infinities and NaN included."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    rows = -(-len(numbers) // width)
    data = np.resize(numbers, (rows, width))
    expected = np.where(data == 0, np.float16(0), data)  # a sum that starts at +0 is +0
    for ids in (np.arange(rows), np.arange(rows)[::-1]):
        order = slice(None) if ids[0] == 0 else slice(None, None, -1)
        assert_same_bits(segment_sum(data, ids, rows), expected[order], f"{width} sum")
        assert_same_bits(segment_mean(data, ids, rows), expected[order], f"{width} mean")


def test_intermediate_sums_out_of_range_of_float16() -> None:
    """The accumulator has the range of float32, so only the result may overflow. A mean never does."""
    data = np.array([6e4, 6e4, 6e4, -6e4, -6e4, 6e4, 6e4], np.float16)
    ids = np.array([0, 0, 0, 0, 0, 1, 1])
    assert_same_bits(segment_sum(data, ids, 2), np.array([6e4, np.inf], np.float16))
    assert_same_bits(segment_mean(data, ids, 2), np.array([1.2e4, 6e4], np.float16))


@pytest.mark.parametrize("dtype", FLOATING)
def test_subnormal_numbers(rng: np.random.Generator, dtype: str) -> None:
    """Subnormal numbers are summed exactly, and their means are rounded once.

    Atomic additions on GPUs treat subnormal numbers as zeros, so GPUs are tested without atomics.
    """
    options = {"deterministic": cases.PLATFORM == "cuda"}
    np_dtype = jnp.dtype(dtype)
    magnitudes = rng.integers(0, 5, (40, 6)).astype(f"uint{8 * np_dtype.itemsize}").view(np_dtype)
    data, ids = np.where(rng.random((40, 6)) < 0.4, -magnitudes, magnitudes), cases.make_ids(rng, 40, 7)
    total = cases.segment_sum(data, ids, 7)
    with cases.x64_for(dtype):
        assert_same_bits(segment_sum(data, ids, 7, **options), cases.rounded(total, dtype))
        mean = total / np.maximum(cases.counts(ids, 7), 1)[:, None]
        assert_same_bits(segment_mean(data, ids, 7, **options), cases.rounded(mean, dtype))
        d_output = magnitudes[:7]
        assert_same_bits(segment_sum_backward(d_output, ids), cases.take_cells(d_output, ids))
        expected = cases.reference_mean_gradient(d_output, data, ids)
        expected.check(segment_mean_backward(d_output, ids))


@pytest.mark.parametrize("count", [1, 3, 255, 257, 2049, 70_001])
def test_mean_divides_by_an_exact_count(count: int) -> None:
    """Value and gradient divide by the exact number of rows, also if 16 bits cannot hold it, and round once."""
    for dtype in FLOATING:
        data = np.zeros((count, 2), jnp.dtype(dtype))
        data[-1] = [30, -7]
        d_output, ids = np.array([[30.0, -7.0]], data.dtype), np.zeros(count, np.int32)
        expected = cases.rounded(d_output.astype(np.float64) / count, dtype)
        with cases.x64_for(dtype):
            output, d_data = MEAN.pullback(data, ids, 1, d_output)
        assert_same_bits(output, expected)
        assert_same_bits(d_data, np.broadcast_to(expected, data.shape))


IMPLEMENTATIONS: tuple[jb.Implementation, ...] = ("kernel", "xla")
COUNTS = (257, 2049, 1, 4099, 3, 771)
"""float16 holds all whole numbers up to 2048, bfloat16 up to 256."""


def test_16_bit_cotangents_of_means_are_divided_in_float32(rng: np.random.Generator) -> None:
    """So they are in the gradients of both means, here of edges that gather a row each, and in the public gradient."""
    ids = rng.permutation(np.repeat(np.arange(len(COUNTS), dtype=np.int32), COUNTS))

    def gradients(d_output: Any, data: Any) -> list[Any]:
        edges = jnp.arange(len(ids)), ids, len(COUNTS)
        means = (lambda x: segment_mean(x, ids, len(COUNTS)), lambda x: jb.gather_segment_mean(x, *edges))
        return [*(jax.vjp(mean, data)[1](d_output)[0] for mean in means), segment_mean_backward(d_output, ids)]

    for dtype in ("bfloat16", "float16"):
        data = np.zeros((len(ids), 5)).astype(jnp.dtype(dtype))
        d_output = rng.normal(size=(len(COUNTS), 5)).astype(jnp.dtype(dtype))
        for implementation in IMPLEMENTATIONS:
            with jb.implementation(implementation):
                for actual in jax.jit(gradients)(d_output, data):
                    cases.reference_mean_gradient(d_output, data, ids).check(np.asarray(actual))


@pytest.mark.parametrize("x64", [False, True], ids=["x64 off", "x64 on"])
def test_mean_of_integers(rng: np.random.Generator, x64: bool) -> None:
    """The same kernel averages integers and booleans as floating-point numbers, with the dtype of jnp.mean."""
    ids = cases.make_ids(rng, 50, 4)
    for dtype in ("bool", *cases.INTEGERS):
        if dtype in ("int64", "uint64") and not x64:
            continue
        data = rng.integers(0, 100, (50, 3)).astype(dtype)
        with jax.enable_x64(x64):
            call = jax.jit(lambda x: segment_mean(x, ids, 4))
            assert kernels_of(call, data) == ["segment_mean"]
            output = call(data)
            assert output.dtype == jnp.mean(jnp.asarray(data)).dtype
        MEAN.value(data, ids, 4).check(output, dtype)


def test_mean_without_rows() -> None:
    """An empty segment has mean 0. Its cotangent, even NaN, does not affect the gradient."""
    data, ids = np.ones((3, 2), np.float32), np.array([1, 1, -1])
    d_output = np.array([[np.nan, np.inf], [4, 6], [np.nan, -np.inf]], np.float32)
    output, d_data = MEAN.pullback(data, ids, 3, d_output)
    assert_same_bits(output, np.array([[0, 0], [1, 1], [0, 0]], np.float32))
    assert_same_bits(d_data, np.array([[2, 3], [2, 3], [0, 0]], np.float32))


@pytest.mark.parametrize("ids_dtype", ["int8", "int32", "uint32"])
@pytest.mark.parametrize("segments", [0, 1, 300])
@each_sum
def test_plain_jax_of_gradients(rng: np.random.Generator, reduction: Reduction, segments: int, ids_dtype: str) -> None:
    """Rows with ids out of range get zeros, also if the ids' dtype is too narrow for the number of segments."""
    ids = rng.integers(0 if ids_dtype == "uint32" else -3, 100, 500).astype(ids_dtype)
    cells = rng.normal(size=(segments, 3)).astype(np.float32)
    function = getattr(jb, reduction.name)
    _, vjp = jax.vjp(lambda data: function(data, ids, segments, implementation="xla"), jnp.ones((500, 3)))
    is_member = (ids.astype(int) >= 0) & (ids.astype(int) < segments)
    counts = np.bincount(ids[is_member], minlength=segments) if reduction is MEAN else np.ones(segments, int)
    expected = np.zeros((500, 3), np.float32)
    expected[is_member] = (cells / np.maximum(counts, 1)[:, None].astype(np.float32))[ids[is_member]]
    # On GPUs, XLA divides with an error of one unit in the last place.
    np.testing.assert_array_max_ulp(np.asarray(vjp(cells)[0]), expected, 1 if cases.PLATFORM == "cuda" else 0)
