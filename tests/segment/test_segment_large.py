"""Arrays of more than 2^31 elements: kernels read and write the elements beyond 2^31 in the right places."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
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

import jax_baracuda
from jax_baracuda import (
    Implementation,
    forward_mode,
    gather_segment_max,
    gather_segment_sum,
    segment_max,
    segment_plan,
    segment_sum,
    segment_sum_backward,
)
from jax_baracuda.ops.segment.plan import SEGMENT_ORDER

LARGE_ROWS, LARGE_FEATURES, LARGE_SEGMENTS = 2**26 + 5, 33, 1009


def large_value(row: Any, feature: Any, numpy: Any = np) -> Any:
    """Small numbers, but the last two rows of each segment hold its maximum. These rows are beyond element 2^31."""
    is_last = row >= LARGE_ROWS - 2 * LARGE_SEGMENTS
    return numpy.where(is_last, (row + 3 * feature) % 120, (row * 7 + feature * 13) % 101 - 125).astype(np.int8)


def large_data(dtype: Any) -> jax.Array:
    def formula() -> jax.Array:
        shape = (LARGE_ROWS, LARGE_FEATURES)
        return large_value(*(jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1)), jnp).astype(dtype)

    return jax.jit(formula)()


@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
def test_more_than_2_31_elements_of_data(is_sorted: bool) -> None:
    """The maximum includes rows beyond element 2^31."""
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
    """The maxima of segments beyond element 2^31 of the result are written to their cells."""
    require_memory(12 if cases.PLATFORM == "cpu" else 40)
    segments = np.array([0, 1, LARGE_ROWS // 2, LARGE_ROWS - 2, LARGE_ROWS - 1, LARGE_ROWS, LARGE_ROWS])
    data = np.arange(7 * LARGE_FEATURES).reshape(7, LARGE_FEATURES).astype(np.int8)
    output = jax.jit(lambda data, ids: segment_max(data, ids, LARGE_ROWS))(data, segments)
    np.testing.assert_array_equal(output[jnp.asarray(segments[:5])], data[:5])
    others = jnp.asarray([2, 3, LARGE_ROWS // 2 + 1, LARGE_ROWS - 4, LARGE_ROWS - 3])
    np.testing.assert_array_equal(output[others], np.full((5, LARGE_FEATURES), -128, np.int8))


def test_gradient_of_more_than_2_31_elements() -> None:
    """The gradient reaches rows beyond element 2^31. One of a segment's last two rows wins each feature."""
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
    """A sum of ones counts each row once, also beyond element 2^31. The last feature counts the last rows alone."""
    require_gpu_memory(20)
    rows = jnp.arange(LARGE_ROWS, dtype=jnp.int32)
    rows_per_segment = -(-LARGE_ROWS // LARGE_SEGMENTS)
    ids = rows // rows_per_segment if is_sorted else rows % LARGE_SEGMENTS
    # float32 counts to 2^24, and a segment has 2^16 rows. The last feature is 1 only in rows beyond element 2^31.
    data = jnp.ones((LARGE_ROWS, LARGE_FEATURES), jnp.bfloat16)
    is_last = rows >= LARGE_ROWS - 2 * LARGE_SEGMENTS
    data = data.at[:, -1].set(is_last.astype(jnp.bfloat16))
    total = jax.jit(lambda x, i: segment_sum(x, i, LARGE_SEGMENTS, indices_are_sorted=is_sorted))(data, ids)
    counts = np.bincount(np.asarray(ids), minlength=LARGE_SEGMENTS)
    expected = np.repeat(counts[:, None], LARGE_FEATURES, axis=1).astype(np.float32)
    expected[:, -1] = np.bincount(np.asarray(ids), weights=np.asarray(is_last), minlength=LARGE_SEGMENTS)
    assert_same_bits(total, expected.astype(jnp.bfloat16))


def test_sum_into_more_than_2_31_elements() -> None:
    """The sums of segments beyond element 2^31 of the result are written to their cells, and nowhere else."""
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
    """Each batch element takes a block. A count truncated to 32 bits would be 2, and other results would be garbage."""
    require_gpu_memory(10)
    d_output, ids = Array("d_output", (1, 1, 1), "bfloat16"), Array("segment_ids", (1, 1), "int32")
    call = handlers.good_call(
        "segment_sum_backward", [d_output, ids], [Array("d_data", (2**32 + 2, 1, 1), "bfloat16")], {}
    )
    assert "launch of MapFlatKernel: CUDA error" in handlers.refusal(call, "2^32 + 2 blocks")


LARGE_EDGES, WIDE_FEATURES = 1_050_000, 2051
"""Their product exceeds 2^31. No array of that size is allocated."""


@pytest.mark.parametrize("name", ["sum", "max"])
def test_more_than_2_31_products_of_edges_and_features(rng: np.random.Generator, name: str) -> None:
    """Value and gradient are exact: data are small integers, and no column has the same number twice."""
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


NUM_TERMS = 2**23
TENTHS = np.full(NUM_TERMS, 0.1, np.float32)
ONE_SEGMENT = np.zeros(NUM_TERMS, np.int32)
SUMS_OF_TENTHS: dict[str, Callable[..., Any]] = {
    "segment_sum": lambda x, ids, **options: jax_baracuda.segment_sum(x, ids, 1, **options),
    "segment_mean": lambda x, ids, **options: NUM_TERMS * jax_baracuda.segment_mean(x, ids, 1, **options),
    "segment_softmax": lambda x, ids, **options: (
        0.1 * NUM_TERMS**2 * jax_baracuda.segment_softmax(jnp.log(x.at[0].set(1)), ids, 1, **options)[1:2]
    ),
    "gather_segment_sum": lambda x, ids, **options: jax_baracuda.gather_segment_sum(x[:1], ids, ids, 1, **options),
    "segment_attention": lambda x, ids, **options: (
        NUM_TERMS * jax_baracuda.segment_attention(jnp.log(x.at[0].set(1)), x[:1], ids, ids, 1, **options)
    ),
    "take_rows": lambda x, ids, **options: jax.grad(lambda y: x @ jax_baracuda.take_rows(y, ids, **options))(x[:1]),
    "take_rows by a matrix": lambda x, ids, **options: jax.grad(
        lambda y: x @ jax_baracuda.take_rows(y, ids.reshape(2, -1), **options).reshape(-1)
    )(x[:1]),
    "gather_segment_max": lambda x, ids, **options: jax.grad(
        lambda y: x @ jax_baracuda.gather_segment_max(y, ids, jnp.arange(NUM_TERMS), NUM_TERMS, **options)
    )(x[:1]),
}
"""Sums of many tenths, in values and gradients."""


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("name", SUMS_OF_TENTHS)
def test_sums_of_so_many_terms_that_a_running_sum_loses_digits(
    name: str, implementation: Implementation | None
) -> None:
    """A running sum in float32 would be off by some percent. It stops growing at 2^24 times the size of a term."""
    function = functools.partial(SUMS_OF_TENTHS[name], implementation=implementation)
    actual = jax.jit(function)(TENTHS, ONE_SEGMENT)
    np.testing.assert_allclose(actual, [0.1 * NUM_TERMS], rtol=5e-3)  # blocks of 2^16 rows are off by 1e-3


MANY = 2**31 + 5
MODULES = (jax_baracuda, forward_mode)


def lowered(function: Callable[..., Any]) -> str:
    """The program of ``(data [MANY], ids [MANY])``. It is never run."""
    data, ids = jax.ShapeDtypeStruct((MANY,), np.float32), jax.ShapeDtypeStruct((MANY,), np.int32)
    return jax.jit(function).lower(data, ids).as_text()


def derivatives(call: Callable[..., jax.Array], twin: Callable[..., jax.Array]) -> Callable[..., Any]:
    def of_both(data: jax.Array, ids: jax.Array) -> Any:
        gradient = jax.grad(lambda x: (call(x, ids) ** 2).sum())
        return jax.jvp(gradient, (data,), (data,)), jax.jvp(lambda x: twin(x, ids), (data,), (data,))

    return of_both


def of_edges(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, ids: function(x[:9], ids, ids, 7)


def with_plan(x: jax.Array, ids: jax.Array) -> Any:
    def loss(x: jax.Array, plan: Any) -> jax.Array:
        product, extremum = jax_baracuda.segment_prod(x, plan=plan), jax_baracuda.gather_segment_max(x[:9], plan=plan)
        return product.sum() + extremum.sum() + jax_baracuda.segment_attention(x, x[:9], plan=plan).sum()

    return jax.grad(loss)(x, segment_plan(ids, 7, ids, 9))


NUMBER_NO_ROWS: dict[str, Callable[..., Any]] = {
    "segment_max": lambda x, ids: jax_baracuda.segment_max(x, ids, 7),
    "segment_max in buckets": lambda x, ids: jax_baracuda.segment_max(x, ids, 7, bucket_size=2**30),
    "gather_segment_min": lambda x, ids: jax_baracuda.gather_segment_min(x[:9], ids, ids, 7),
    "segment_attention": lambda x, ids: jax_baracuda.segment_attention(x, x[:9], ids, ids, 7),
    "take_rows": lambda x, ids: jax.grad(lambda y: jax_baracuda.take_rows(y, ids).sum())(x[:9]),
    **{
        f"derivatives of {name}": derivatives(*(functools.partial(getattr(x, name), num_segments=7) for x in MODULES))
        for name in ("segment_sum", "segment_softmax")
    },
}
NUMBER_ROWS: dict[str, Callable[..., Any]] = {
    "segment_argmax": lambda x, ids: jax_baracuda.segment_argmax(x, ids, 7),
    "segment_argmin": lambda x, ids: jax_baracuda.segment_argmin(x, ids, 7),
    "segment_mean": lambda x, ids: jax_baracuda.segment_mean(x, ids, 7),
    "segment_prod": lambda x, ids: jax_baracuda.segment_prod(x, ids, 7),
    "gather_segment_mean": lambda x, ids: jax_baracuda.gather_segment_mean(x[:9], ids, ids, 7),
    "segment_plan": lambda x, ids: segment_plan(ids, 7, ids, 9),
    "calls with a plan": with_plan,
    "take_rows of many": lambda x, ids: jax.grad(lambda y: jax_baracuda.take_rows(y, ids[:9]).sum())(x),
    "many segments": lambda x, ids: jax.grad(lambda y: jax_baracuda.segment_mean(y, ids[:9], MANY).sum())(x[:9]),
    **{
        f"derivatives of {name}": derivatives(*(functools.partial(getattr(x, name), num_segments=7) for x in MODULES))
        for name in ("segment_max", "segment_min", "segment_mean", "segment_prod")
    },
    **{
        f"derivatives of {name}": derivatives(*(of_edges(getattr(x, name)) for x in MODULES))
        for name in ("gather_segment_max", "gather_segment_min", "gather_segment_mean")
    },
}
"""Programs that number or count rows."""


@pytest.mark.parametrize("name", [*NUMBER_NO_ROWS, *NUMBER_ROWS])
def test_programs_of_2_31_rows_and_more(name: str) -> None:
    """Programs number rows in 64 bits, which requires x64. Without it, their error says so."""
    call = (NUMBER_NO_ROWS | NUMBER_ROWS)[name]
    of_32_bits = rf"iota.*tensor<{MANY}xi32>"
    with jax.enable_x64(True):
        assert not re.search(of_32_bits, lowered(call))
    with jax.enable_x64(False):
        if name in NUMBER_NO_ROWS:
            assert not re.search(of_32_bits, lowered(call))
        else:
            with pytest.raises(ValueError, match=rf"\w+: {MANY} \w+ are 2\^31 or more.*jax_enable_x64"):
                lowered(call)


def test_dtypes_of_row_numbers() -> None:
    """Row numbers are int32 if the number of rows fits, and int64 otherwise."""
    with jax.enable_x64(True):
        for rows, dtype in ((MANY, np.int64), (2**31, np.int64), (2**31 - 1, np.int32)):
            data, ids = jax.ShapeDtypeStruct((rows,), np.int8), jax.ShapeDtypeStruct((rows,), np.int64)
            assert jax.eval_shape(lambda x, ids: jax_baracuda.segment_argmax(x, ids, 3), data, ids).dtype == dtype
            plan = jax.eval_shape(lambda ids: segment_plan(ids, 3), ids)
            assert (plan.edge_order.dtype, plan.segment_ids.dtype) == (dtype, np.int32)


def test_order_of_more_than_2_30_rows() -> None:
    """The order of more than 2^30 rows is ascending and stable."""
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
