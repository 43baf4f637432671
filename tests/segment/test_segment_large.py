"""Arrays of more than 2^31 elements: rows and cells beyond are read and written where they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from segment.reference import MAX
from support import cases, handlers
from support.cases import assert_same_bits
from support.handlers import Array
from support.large import require_gpu_memory, require_memory

from jax_baracuda import gather_segment_max, gather_segment_sum, segment_max, segment_sum, segment_sum_backward
from jax_baracuda.ops.segment.order import SEGMENT_ORDER

LARGE_ROWS, LARGE_FEATURES, LARGE_SEGMENTS = 2**26 + 5, 33, 1009


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
    require_gpu_memory(40)
    data = large_data(jnp.bfloat16)
    ids = jnp.arange(LARGE_ROWS, dtype=jnp.int32) % LARGE_SEGMENTS
    d_output = jnp.ones((LARGE_SEGMENTS, LARGE_FEATURES), jnp.bfloat16)
    pullback = jax.jit(lambda x, d: MAX.pullback(x, ids, LARGE_SEGMENTS, d)[1])
    d_data = pullback(data, d_output)
    tail = slice(LARGE_ROWS - 4 * LARGE_SEGMENTS, LARGE_ROWS)
    expected = cases.reference_max_gradient(
        np.asarray(d_output), np.asarray(data[tail]), np.asarray(ids[tail]), "split"
    )
    assert_same_bits(d_data[tail], expected)
    assert float(jnp.abs(d_data[: LARGE_ROWS - 4 * LARGE_SEGMENTS]).max()) == 0


@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
def test_sum_of_more_than_2_31_elements(is_sorted: bool) -> None:
    """Each row is counted in its segment once, those beyond element 2^31 too: sums of ones and of row parities."""
    require_gpu_memory(20)
    rows = jnp.arange(LARGE_ROWS, dtype=jnp.int32)
    rows_per_segment = -(-LARGE_ROWS // LARGE_SEGMENTS)
    ids = rows // rows_per_segment if is_sorted else rows % LARGE_SEGMENTS
    # float32 counts to 2^24; a segment has 2^16 rows. The last feature tells rows beyond element 2^31 from the others.
    data = jnp.ones((LARGE_ROWS, LARGE_FEATURES), jnp.bfloat16)
    is_last = rows >= LARGE_ROWS - 2 * LARGE_SEGMENTS
    data = data.at[:, -1].set(is_last.astype(jnp.bfloat16))
    total = jax.jit(lambda x, i: segment_sum(x, i, LARGE_SEGMENTS, indices_are_sorted=is_sorted))(data, ids)
    counts = np.bincount(np.asarray(ids), minlength=LARGE_SEGMENTS)
    expected = np.repeat(counts[:, None], LARGE_FEATURES, axis=1).astype(np.float32)
    expected[:, -1] = np.bincount(np.asarray(ids), weights=np.asarray(is_last), minlength=LARGE_SEGMENTS)
    assert_same_bits(total, expected.astype(jnp.bfloat16))


def test_sum_into_more_than_2_31_elements() -> None:
    """Sums of segments whose cells have numbers of 2^31 and more arrive there, and nowhere else."""
    require_gpu_memory(20)
    segments = np.array([0, 1, LARGE_ROWS // 2, LARGE_ROWS - 1, LARGE_ROWS - 1, LARGE_ROWS, LARGE_ROWS])
    data = np.arange(1, 1 + 7 * LARGE_FEATURES).reshape(7, LARGE_FEATURES).astype(np.float16)
    output = jax.jit(lambda data, ids: segment_sum(data, ids, LARGE_ROWS))(data, segments)
    expected = [data[0], data[1], data[2], data[3] + data[4]]
    np.testing.assert_array_equal(output[jnp.asarray(segments[:4])], np.stack(expected))
    assert int((output != 0).sum()) == 4 * LARGE_FEATURES


def test_gather_of_more_than_2_31_elements() -> None:
    """The gradient of a sum writes each row's cotangent, also beyond element 2^31."""
    require_gpu_memory(20)
    ids = jnp.arange(LARGE_ROWS, dtype=jnp.int32) % (LARGE_SEGMENTS + 1)  # the last is dropped
    d_output = jnp.arange(LARGE_SEGMENTS, dtype=jnp.float32)[:, None] % 251 + jnp.arange(LARGE_FEATURES) % 5
    d_output = d_output.astype(jnp.bfloat16)
    d_data = jax.jit(segment_sum_backward)(d_output, ids)
    is_right = jax.jit(
        lambda d_data: jnp.all(d_data == jnp.where(ids[:, None] < LARGE_SEGMENTS, jnp.take(d_output, ids, axis=0), 0))
    )
    assert bool(is_right(d_data))
    for row in (0, LARGE_ROWS // 2, LARGE_ROWS - 1, LARGE_ROWS - 2):
        segment = int(ids[row])
        expected = np.asarray(d_output[segment]) if segment < LARGE_SEGMENTS else np.zeros(LARGE_FEATURES)
        np.testing.assert_array_equal(np.asarray(d_data[row]), expected)


@pytest.mark.skipif(cases.PLATFORM != "cuda", reason="CPUs have no grids")
def test_more_blocks_than_a_grid_can_have_are_an_error() -> None:
    """A batch of which each element takes a block: a count cut to 32 bits would be 2, and the other results garbage."""
    require_gpu_memory(10)
    d_output, ids = Array("d_output", (1, 1, 1), "bfloat16"), Array("segment_ids", (1, 1), "int32")
    call = handlers.good_call(
        "segment_sum_backward", [d_output, ids], [Array("d_data", (2**32 + 2, 1, 1), "bfloat16")], {}
    )
    assert "launch of MapFlatKernel: CUDA error" in handlers.refusal(call, "2^32 + 2 blocks")


LARGE_EDGES, WIDE_FEATURES = 1_050_000, 2051
"""Their product is more than 2^31, and nothing that large is in memory."""


@pytest.mark.parametrize("name", ["sum", "max"])
def test_more_than_2_31_products_of_edges_and_features(rng: np.random.Generator, name: str) -> None:
    """Small integers, which are added without rounding; no two rows have the same number in a column."""
    num_rows, num_segments = 67, 61
    gather_ids, segment_ids = rng.integers(0, num_rows, LARGE_EDGES), rng.integers(0, num_segments - 1, LARGE_EDGES)
    data = rng.permuted(np.tile(np.arange(num_rows) - 33.0, (WIDE_FEATURES, 1)), axis=1).T
    d_output = rng.integers(-3, 4, (num_segments, WIDE_FEATURES)).astype(np.float64)
    num_edges = np.zeros((num_segments, num_rows))
    np.add.at(num_edges, (segment_ids, gather_ids), 1)
    if name == "sum":
        expected, d_expected = num_edges @ data, num_edges.T @ d_output
    else:
        candidates = np.where((num_edges > 0)[..., None], data, -np.inf)
        expected, d_expected = candidates.max(axis=1), np.zeros_like(data)
        segments, columns = np.ogrid[: num_segments - 1, :WIDE_FEATURES]  # the last segment is empty
        np.add.at(d_expected, (candidates.argmax(axis=1)[:-1], columns), d_output[segments, columns])

    def reduce(data: jax.Array) -> jax.Array:
        ids = jnp.asarray(gather_ids, jnp.int32), jnp.asarray(segment_ids, jnp.int32)
        if name == "sum":
            return gather_segment_sum(data, *ids, num_segments, implementation="kernel")
        return gather_segment_max(data, *ids, num_segments, tie_break="first", implementation="kernel")

    output, vjp = jax.vjp(reduce, jnp.asarray(data, jnp.float32))
    [d_data] = vjp(jnp.asarray(d_output, jnp.float32))
    np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(d_data, d_expected)


def test_order_of_more_than_2_30_rows() -> None:
    """Rows are counted in more than 30 bits: their order is ascending, and stable, and has each row once."""
    require_gpu_memory(40)
    rows, segments = 2**30 + 12345, 1009

    def counts_of_errors() -> tuple[jax.Array, ...]:
        ids = (jnp.arange(rows, dtype=jnp.uint32) * jnp.uint32(2654435761) >> 8).astype(jnp.int32) % segments
        order, sorted_ids = SEGMENT_ORDER(ids, num_segments=segments)
        is_same = sorted_ids[1:] == sorted_ids[:-1]
        return (
            (ids[order] != sorted_ids).sum(),
            (sorted_ids[1:] < sorted_ids[:-1]).sum(),
            (is_same & (order[1:] <= order[:-1])).sum(),
        )

    assert [int(count) for count in jax.jit(counts_of_errors)()] == [0, 0, 0]
