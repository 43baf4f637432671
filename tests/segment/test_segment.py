"""Tests of all segment reductions: values, gradients, arguments, tangents, errors."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from segment.reference import (
    ARGMAX,
    ARGMIN,
    DIFFERENTIABLE,
    LIKE_JAX,
    MAX,
    MEAN,
    MIN,
    PROD,
    REDUCTIONS,
    SOFTMAX,
    SUM,
    Options,
    Reduction,
)
from support import cases, recorded
from support.cases import (
    BIG_SHAPE,
    FLOATING,
    INTEGERS,
    MOSTLY_EMPTY_SHAPES,
    POWER_LAW_SHAPES,
    SHAPES,
    Expected,
    Shape,
    assert_same_bits,
    assert_same_values,
)
from support.kernels import Batch, kernels_in
from support.programs import small_integers

import jax_baracuda
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.native import NATIVE_MODULES
from jax_baracuda._core.op import OPS

GatherScatterMode = jax.lax.GatherScatterMode

each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)


def each_reduction_and_dtype(reductions: tuple[Reduction, ...]) -> pytest.MarkDecorator:
    pairs = [pytest.param(r, dtype, id=f"{r}-{dtype}") for r in reductions for dtype in r.dtypes]
    return pytest.mark.parametrize(("reduction", "dtype"), pairs)


def add_calls(
    batch: Batch,
    rng: np.random.Generator,
    reduction: Reduction,
    dtype: str,
    shape: Shape,
    ids: np.ndarray,
    is_sorted: bool,
    data: np.ndarray | None = None,
) -> collections.Counter[str]:
    """Adds the value and any gradient, for all options of the reduction. Returns the kernels that these calls run."""
    data = reduction.make_data(rng, shape, dtype) if data is None else data
    cotangent = cases.cotangent(rng, reduction.result_shape(shape), dtype) if cases.is_floating(data.dtype) else None
    kernels: collections.Counter[str] = collections.Counter()
    where = f"{shape} {'sorted' if is_sorted else 'unsorted'}"
    expected = reduction.value(data, ids, shape.segments)
    for options in reduction.options:
        arguments = {"indices_are_sorted": is_sorted, **options}

        def check_value(output: jax.Array, where: str = f"{where} {options}") -> None:
            assert not output.weak_type
            expected.check(output, where)

        batch.add(functools.partial(reduction, num_segments=shape.segments, **arguments), (data, ids), check_value)
        kernels[reduction.name] += 1
        if reduction.gradient is None or cotangent is None:
            continue

        def check_gradient(
            output: jax.Array, d_data: jax.Array, options: Options = options, where: str = f"{where} {options} gradient"
        ) -> None:
            expected.check(output, where)
            residual = reduction.residual(data, output)
            reduction.gradient(cotangent, residual, ids, shape.segments, **options).check(d_data, where)

        pullback = functools.partial(reduction.pullback, segments=shape.segments, **arguments)
        batch.add(lambda data, ids, d, f=pullback: f(data, ids, cotangent=d), (data, ids, cotangent), check_gradient)
        kernels.update(reduction.kernels)
    return kernels


# ----------------------------------------------------------------------------------------------------------------------
# Values and gradients.


@each_reduction_and_dtype(REDUCTIONS)
def test_value_and_gradient(rng: np.random.Generator, reduction: Reduction, dtype: str) -> None:
    """Kernels agree with the NumPy reference in values and gradients, for every dtype, size and order of ids."""
    batch, kernels = Batch(), collections.Counter()
    for shape, is_sorted in itertools.product(SHAPES, (False, True)):
        ids = cases.make_ids(rng, shape.rows, shape.segments, is_sorted=is_sorted)
        kernels += add_calls(batch, rng, reduction, dtype, shape, ids, is_sorted)
    with cases.x64_for(dtype):
        called = batch.run()
    # Their counts depend on how JAX treats gradients of empty arrays.
    assert called.keys() == kernels.keys()


@pytest.mark.parametrize("of_ids", ["own", "shared", "sorted", "own, of shared rows"])
@pytest.mark.parametrize("row_shape", [(), (3,), (8,), (4, 44)], ids=str)
@each_reduction
def test_batch_of_many_small_problems(
    rng: np.random.Generator, reduction: Reduction, row_shape: tuple[int, ...], of_ids: str
) -> None:
    """Values and gradients under ``vmap``, of more elements than GPUs have multiprocessors: each has few rows."""
    size, shape = 601 if len(row_shape) < 2 else 271, Shape(101, row_shape, 24)
    dtype = str(rng.choice([x for x in reduction.dtypes if x != "bool"]))
    number = () if of_ids == "shared" else (size,)
    ids = rng.integers(-3, shape.segments + 3, (*number, shape.rows)).astype(np.int32)
    if of_ids == "sorted":
        ids.sort(axis=-1)
    shares_data = of_ids == "own, of shared rows"
    data = np.stack([reduction.make_data(rng, shape, dtype) for _ in range(1 if shares_data else size)])
    is_differentiable = reduction.gradient is not None and cases.is_floating(data.dtype)
    d_output = np.stack([cases.cotangent(rng, reduction.result_shape(shape), dtype) for _ in range(size)])
    options = reduction.options[-1] if is_differentiable else {}
    arguments = {"indices_are_sorted": of_ids == "sorted", **options}

    def of_one(data: jax.Array, ids: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        if is_differentiable:
            return reduction.pullback(data, ids, shape.segments, d_output, **arguments)
        return (reduction(data, ids, shape.segments, **arguments),)

    with cases.x64_for(dtype):
        axes = (None if shares_data else 0, None if of_ids == "shared" else 0, 0)
        output, *d_data = jax.jit(jax.vmap(of_one, axes))(data[0] if shares_data else data, ids, d_output)
    data = np.broadcast_to(data, (size, *data.shape[1:]))
    for b in rng.choice(size, 20, replace=False):
        own_ids = ids if of_ids == "shared" else ids[b]
        reduction.value(data[b], own_ids, shape.segments).check(output[b], f"element {b}")
        if is_differentiable:
            residual = reduction.residual(data[b], output[b])
            expected = reduction.gradient(d_output[b], residual, own_ids, shape.segments, **options)
            expected.check(d_data[0][b], f"gradient of element {b}")


def strategy_of_batch(
    platform: str, elements: int, rows: int, segments: int, features: int, dtype: str, own: int = 1
) -> str:
    """How a platform sums a batch of unsorted rows. `own`: the number of elements with ids of their own."""
    types = [jax.ShapeDtypeStruct((elements, rows, features), dtype), jax.ShapeDtypeStruct((own, rows), np.int32)]
    params = {"num_segments": segments, "indices_are_sorted": False, "deterministic": True, "num_batch_dims": 1}
    return OpCall(OPS["segment_sum"], types, params).plan(platform).strategy


@pytest.mark.skipif(NATIVE_MODULES["cuda"].module is None, reason="plans of CUDA kernels are in their module")
def test_strategy_of_batches_that_share_ids() -> None:
    """It takes the batches of test_batch_of_many_small_problems, up to its limits."""
    taken = [
        *((264, 1024, 256, 2, "float32"), (601, 101, 24, 1, "float16"), (271, 101, 24, 176, "float64")),
        *((264, 64, 1, 7, "float32"), (5000, 9, 3, 1, "bfloat16"), (264, 512, 20, 20, "float32")),
    ]
    others = [
        *((263, 1024, 256, 2, "float32"), (264, 1025, 256, 2, "float32"), (264, 1024, 257, 2, "float32")),
        *((264, 65, 1, 7, "float32"), (264, 1000, 20, 32, "float32"), (264, 83, 9, 33, "bfloat16")),
        (264, 64, 1, 7, "float32", 264),
    ]
    assert {strategy_of_batch("cuda", *call) for call in taken} == {"batch_of_few_rows"}
    assert "batch_of_few_rows" not in {strategy_of_batch("cuda", *call) for call in others}


def test_strategy_of_batches_of_few_rows_on_cpus() -> None:
    """It takes the batches of test_batch_of_many_small_problems, up to its limits, also with ids of their own."""
    taken = [
        *((64, 1024, 256, 16, "float32"), (601, 101, 24, 1, "float16"), (271, 0, 8, 256, "float64")),
        *((64, 9, 9, 400, "bfloat16"), (100_000, 9, 4, 16, "float32", 100_000)),
    ]
    others = [
        *((63, 1024, 256, 16, "float32"), (64, 1025, 256, 16, "float32"), (64, 1024, 257, 16, "float32")),
        *((64, 9, 9, 228, "float64"), (64, 9, 9, 456, "bfloat16")),
    ]
    assert {strategy_of_batch("cpu", *call) for call in taken} == {"batch_of_few_rows"}
    assert "batch_of_few_rows" not in {strategy_of_batch("cpu", *call) for call in others}


UNEVEN = {
    "power law": (POWER_LAW_SHAPES, cases.power_law_ids),  # one segment has a third of all rows and most have few
    "mostly empty": (MOSTLY_EMPTY_SHAPES, cases.make_ids),  # two to 25 segments to a row
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", UNEVEN)
@each_reduction
def test_uneven_segments(rng: np.random.Generator, reduction: Reduction, name: str, dtype: str) -> None:
    """Like test_value_and_gradient, if most segments have few rows or none."""
    batch = Batch()
    shapes, make_ids = UNEVEN[name]
    for shape, is_sorted in itertools.product(shapes, (False, True)):
        ids = make_ids(rng, shape.rows, shape.segments, is_sorted=is_sorted)
        add_calls(batch, rng, reduction, dtype, shape, ids, is_sorted)
    batch.run()


BIG = [(r, "float32") for r in REDUCTIONS] + [(r, "bfloat16") for r in (MAX, SUM)] + [(ARGMAX, "int64"), (SUM, "int64")]


@pytest.mark.parametrize(("reduction", "dtype"), BIG, ids=str)
def test_big(rng: np.random.Generator, reduction: Reduction, dtype: str) -> None:
    """Like test_value_and_gradient, for more rows, with the rows of each segment scattered over the whole array."""
    ids = cases.make_ids(rng, BIG_SHAPE.rows, BIG_SHAPE.segments)
    with cases.x64_for(dtype):
        add_calls(batch := Batch(), rng, reduction, dtype, BIG_SHAPE, ids, False)
        batch.run()


SPECIALS = (np.nan, np.copysign(np.nan, -1), np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0)
SPECIALS_OF = {PROD: (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -2.0, 0.5), SOFTMAX: (np.nan, *SPECIALS[2:7], -300.0)}
FILLERS = {MAX: (-np.inf, -2), ARGMAX: (-np.inf,), MIN: (np.inf, 2), ARGMIN: (np.inf,), PROD: (1,), SOFTMAX: (-np.inf,)}
"""What is between special values in rows far apart; other reductions have zeros there."""


@pytest.mark.parametrize("layout", ["wide rows", "scalar rows", "narrow rows", "far apart"])
@pytest.mark.parametrize("dtype", FLOATING)
@each_reduction
def test_special_values_exhaustively(rng: np.random.Generator, reduction: Reduction, dtype: str, layout: str) -> None:
    """Every sequence of one to four special values is right, also in rows that different threads or blocks reduce."""
    batch = Batch()
    for length in range(1, 5) if layout != "far apart" else (3,):
        columns = np.array(list(itertools.product(SPECIALS_OF.get(reduction, SPECIALS), repeat=length))).T
        for filler in FILLERS.get(reduction, (0,)) if layout == "far apart" else (0,):
            data, ids, segments = columns, np.zeros(length, np.int32), 1  # a cell per feature
            if layout == "far apart":
                data, ids = np.full((1500, columns.shape[1]), float(filler)), np.zeros(1500, np.int32)
                data[[10, 700, 1499]] = columns
            elif layout != "wide rows":  # a cell per segment
                width = 1 if layout == "scalar rows" else 2
                segments = columns.shape[1] // width
                data = columns[:, : width * segments].reshape(length * segments, width)
                data = data[:, 0] if width == 1 else data
                ids = np.tile(np.arange(segments, dtype=np.int32), length)
            shape, data = Shape(len(data), data.shape[1:], segments), data.astype(jnp.dtype(dtype))
            add_calls(batch, rng, reduction, dtype, shape, ids, False, data)
    with cases.x64_for(dtype):
        batch.run()


@each_reduction
def test_ids_dtypes(rng: np.random.Generator, reduction: Reduction) -> None:
    """Ids may have any integer dtype. Ids out of range are dropped and never wrap, up to the limits of the dtype."""
    shape = Shape(300, (5,), 6)
    for x64 in (True, False):
        batch = Batch()
        for ids_dtype, is_sorted in itertools.product((*INTEGERS, "int4", "uint4"), (False, True)):
            if ids_dtype in ("int64", "uint64") and not x64:
                continue
            ids = cases.make_ids(rng, 300, 6, ids_dtype, is_sorted)
            add_calls(batch, rng, reduction, "float32", shape, ids, is_sorted)
        with jax.enable_x64(x64):
            batch.run()


@pytest.mark.parametrize(
    "mode", [None, "fill", "drop", "clip", "promise_in_bounds", "one_hot", *GatherScatterMode], ids=str
)
@each_reduction
def test_mode(rng: np.random.Generator, reduction: Reduction, mode: Any) -> None:
    """Mode "clip" clamps ids. Every other mode drops ids out of range, in value, gradient and backward function."""
    shape = Shape(100, (3,), 8)
    data, ids = reduction.make_data(rng, shape, "float32"), cases.make_ids(rng, 100, 8)
    effective_ids = cases.in_mode(ids, 8, "clip" if mode in ("clip", GatherScatterMode.CLIP) else None)
    options = reduction.options[0]
    if reduction.gradient is None:
        reduction.value(data, effective_ids, 8).check(reduction(data, ids, 8, mode=mode))
        return
    cotangent = cases.cotangent(rng, reduction.result_shape(shape), "float32")
    output, d_data = reduction.pullback(data, ids, 8, cotangent, mode=mode)
    reduction.value(data, effective_ids, 8).check(output)
    residual = reduction.residual(data, output)
    expected = reduction.gradient(cotangent, residual, effective_ids, 8, **options)
    expected.check(d_data)
    if reduction.call_backward is not None:
        expected.check(reduction.call_backward(cotangent, residual, ids, 8, mode=mode, **options))


@pytest.mark.parametrize("reduction", [SUM, MEAN], ids=str)
@pytest.mark.parametrize("row_shape", [(3,), (8, 8)], ids=["narrow", "wide"])
def test_gradients_of_dropped_rows_in_plain_jax(
    rng: np.random.Generator, reduction: Reduction, row_shape: tuple[int, ...]
) -> None:
    """They are zeros, also if the cotangents are NaN."""
    shape = Shape(100, row_shape, 8)
    data, ids = reduction.make_data(rng, shape, "float32"), cases.make_ids(rng, 100, 8)
    cotangent = cases.cotangent(rng, reduction.result_shape(shape), "float32")
    _, d_data = reduction.pullback(data, ids, 8, cotangent, implementation="xla")
    reduction.gradient(cotangent, data, cases.in_mode(ids, 8, None), 8, deterministic=False).check(d_data)
    _, d_data = reduction.pullback(data, ids, 8, np.full_like(cotangent, np.nan), implementation="xla")
    is_dropped = (ids < 0) | (ids >= 8)
    assert is_dropped.any()
    np.testing.assert_array_equal(np.isnan(d_data).reshape(100, -1).all(1), ~is_dropped)
    np.testing.assert_array_equal(np.asarray(d_data)[is_dropped], 0)


@each_reduction
def test_clip_clamps_by_value(reduction: Reduction) -> None:
    """Clipping compares ids in their own dtype: the greatest uint64 becomes the last segment, not the first."""
    data = np.array([1, 2, 4, 8], np.float32)
    for ids_dtype, segments in itertools.product(("int8", "uint8", "int32", "uint32", "int64", "uint64"), (1, 3, 300)):
        info = np.iinfo(ids_dtype)
        ids = np.array([info.min, info.max, 1, 2], ids_dtype)
        with cases.x64_for(ids_dtype):
            output = reduction(data, ids, segments, mode="clip")
        reduction.value(data, cases.in_mode(ids, segments, "clip"), segments).check(output, f"{ids_dtype} {segments}")
    assert reduction(data[:3], np.arange(3), 0, mode="clip").shape == ((3,) if reduction.result_has_rows else (0,))


EMPTY_VALUES = {MAX: -np.inf, MIN: np.inf, SUM: 0, MEAN: 0, PROD: 1, ARGMAX: 2, ARGMIN: 2}


@pytest.mark.parametrize("reduction", EMPTY_VALUES, ids=str)
def test_empty_segments(reduction: Reduction) -> None:
    """Empty segments have the identity of the reduction. For argmax and argmin, they have the number of rows."""
    for dtype in reduction.dtypes:
        dtype = jnp.dtype(dtype)
        empty = EMPTY_VALUES[reduction]
        if not np.isfinite(empty) and not cases.is_floating(dtype):
            limits = (False, True) if dtype == np.bool_ else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
            empty = limits[empty > 0]
        with cases.x64_for(dtype):
            output = reduction(np.ones((2, 3), dtype), np.array([4, -4]), 6)
        expected = np.full((6, 3), empty, np.int32 if reduction in (ARGMAX, ARGMIN) else dtype)
        expected[4] = 0 if reduction in (ARGMAX, ARGMIN) else 1
        assert_same_bits(output, expected)


@pytest.mark.parametrize("hot", ["no segment", "one segment", "all in one"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("reduction", [r for r in REDUCTIONS if r is not SOFTMAX], ids=str)
def test_many_narrow_sorted_rows(rng: np.random.Generator, reduction: Reduction, width: int, hot: str) -> None:
    """Narrow sorted rows are reduced right, also with many empty segments, a hot one, and ids out of range."""
    rows, segments = 200_000, 150_000
    ids = np.sort(rng.integers(-segments // 10, segments + segments // 10, rows)).astype(np.int32)
    if hot == "one segment":
        ids[rows // 3 : 3 * rows // 4] = ids[rows // 3]
        ids = np.sort(ids)
    elif hot == "all in one":
        ids[:] = segments // 2
        ids[-1] = segments
    data = rng.choice([-2, -1, -0.5, 0.5, 1, 2], (rows, width)).astype(np.float32)
    expected = reduction.value(data, ids, segments)
    for is_sorted in (False, True):
        expected.check(reduction(data, ids, segments, indices_are_sorted=is_sorted), f"promised: {is_sorted}")


@pytest.mark.parametrize("segments", [1500, 3500])
@pytest.mark.parametrize("reduction", [r for r in REDUCTIONS if r is not SOFTMAX], ids=str)
def test_gaps_of_few_sorted_rows(rng: np.random.Generator, reduction: Reduction, segments: int) -> None:
    """All segments without rows are filled, also before the first row, behind the last one, and in a batch."""
    ids = np.sort(rng.integers(-50, segments + 50, (3, 2000)), axis=1).astype(np.int32)
    ids[1, :40], ids[2, 700:] = -1, segments
    data = rng.choice([-2, -1, -0.5, 0.5, 1, 2], (3, 2000, 2)).astype(np.float32)

    def reduced(data: jax.Array, ids: jax.Array) -> Any:
        return reduction(data, ids, segments, indices_are_sorted=True)

    results = jax.vmap(reduced)(data, ids)
    for i in range(3):
        expected = reduction.value(data[i], ids[i], segments)
        expected.check(results[i], f"element {i}")
        expected.check(reduced(data[i], ids[i]), f"alone {i}")


@each_reduction
def test_number_of_segments_from_ids(reduction: Reduction) -> None:
    """Eagerly, num_segments=None means the greatest id plus one. NumPy integers and 0-d arrays are accepted, too."""
    data = np.arange(1, 5, dtype=np.float32)
    cases_of_ids = (
        (np.array([0, 5, 1, 1]), 6),
        (np.array([-3, -1, -1, -2]), 0),
        (np.array([255, 0, 0, 0], np.uint8), 256),
        (np.array([127, 0, 0, 0], np.int8), 128),
    )
    for ids, segments in cases_of_ids:
        for x64 in (False, True):
            with jax.enable_x64(x64):
                reduction.value(data, ids, segments).check(reduction(data, ids))
    for segments in (np.int64(3), np.array(3), 3):
        reduction.value(data, np.arange(4), 3).check(reduction(data, np.arange(4), segments))


def test_signatures() -> None:
    """Positional arguments are those of jax.ops, in the same order. Additional arguments are keyword-only."""
    flags = ["indices_are_sorted", "unique_indices", "mode", "out_sharding"]
    for reduction in REDUCTIONS:
        for module in (jax_baracuda, jax_baracuda.forward_mode) if reduction.gradient else (jax_baracuda,):
            parameters = inspect.signature(getattr(module, reduction.name)).parameters.values()
            positional = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
            if reduction in LIKE_JAX:
                of_jax = list(inspect.signature(reduction.by_jax).parameters)
                assert positional[: len(of_jax)] == of_jax  # out_sharding came later than jax 0.8
                assert positional[len(of_jax) :] in ([], ["out_sharding"])
            else:
                assert positional[1:] == ["segment_ids", "num_segments"]
            keyword = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]
            ours = [
                *reduction.options[0],
                *(["accumulator"] if reduction in (SUM, MEAN) else []),
                "plan",
                "implementation",
            ]
            assert keyword == [*([] if reduction in LIKE_JAX else flags), *ours]


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


def test_ids_of_leading_axes_are_to_be_flattened() -> None:
    with pytest.raises(ValueError, match="flatten the ids and the axes that they label"):
        SUM(np.ones((3, 4, 2)), np.zeros((3, 4), int), 5)


@pytest.mark.parametrize("case", BROADCAST_CASES)
def test_broadcasting(rng: np.random.Generator, case: str) -> None:
    """Data broadcast over the ids as in jax.ops. Values and gradients equal those of jax.ops where it has them."""
    data_shape, ids_shape, data = BROADCAST_CASES[case]
    if data is None:
        data = rng.integers(-3, 4, data_shape).astype(np.float32)
    ids = rng.integers(-1, 4, ids_shape)
    for reduction in LIKE_JAX:
        try:
            expected = reduction.by_jax(data, ids, 3)
        except ValueError:  # an error in JAX must be one here
            with pytest.raises(ValueError, match=f"{reduction.name}: data must have one row per id"):
                reduction(data, ids, 3)
            continue
        output = reduction(data, ids, 3)
        assert not output.weak_type and not expected.weak_type
        assert_same_values(output, np.asarray(expected))
        weights = rng.integers(1, 9, expected.shape).astype(np.float32)

        def loss(x: Any, reduce: Callable[..., Any], weights: np.ndarray = weights) -> jax.Array:
            return jnp.vdot(jnp.clip(reduce(x, ids, 3), -1e3, 1e3), weights)

        gradient = jax.grad(loss)(data, reduction)
        assert gradient.shape == np.shape(data)
        if reduction is not PROD:  # jax.ops has no gradient of products
            # Sums of at most 6 positive shares. Both round a share twice and add 5 times, each time by half an eps.
            by_jax = np.asarray(jax.grad(loss)(data, reduction.by_jax))
            Expected(by_jax, by_jax.dtype, 7 * cases.eps_of(by_jax.dtype) * np.abs(by_jax)).check(gradient)


def broadcast_rows(data: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """One row per id, from data that broadcast over the ids."""
    return np.broadcast_to(data, (*ids.shape, *data.shape[1:])).reshape(-1, *data.shape[1:])


@pytest.mark.parametrize("reduction", [r for r in REDUCTIONS if r not in LIKE_JAX], ids=str)
def test_broadcasting_where_jax_has_no_function(rng: np.random.Generator, reduction: Reduction) -> None:
    """Reductions that jax.ops lacks broadcast the same way: results equal those of the rows written out."""
    for data_shape, ids_shape in (((1,), (4,)), ((1, 3), (4,)), ((4, 1), (4,)), ((2, 3), (2,))):
        data = rng.integers(-3, 4, data_shape).astype(np.float32)
        ids = rng.integers(-1, 4, ids_shape)
        output = reduction(data, ids, 3)
        reduction.value(broadcast_rows(data, ids), ids, 3).check(output, str((data_shape, ids_shape)))
    if reduction.gradient is not None:
        data, ids = rng.normal(size=(1, 3)).astype(np.float32), np.array([0, 2, 2, 2])
        rows = broadcast_rows(data, ids)
        cotangent = rng.normal(size=reduction.result_shape(Shape(4, (3,), 3))).astype(np.float32)
        _, d_data = reduction.pullback(data, ids, 3, cotangent)
        _, d_rows = reduction.pullback(rows, ids, 3, cotangent)
        rows = np.asarray(d_rows, np.float64)
        error = 3 / 2 * cases.eps_of(np.float32) * np.abs(rows).sum(axis=0, keepdims=True)  # of 3 additions
        Expected(rows.sum(axis=0, keepdims=True), np.float32, error).check(d_data)


@pytest.mark.parametrize("x64", [False, True], ids=["x64 off", "x64 on"])
@each_reduction
def test_never_weakly_typed(reduction: Reduction, x64: bool) -> None:
    """Python scalars and weakly typed arrays give a strongly typed result of JAX's default dtype."""
    ids = np.array([0, 1])
    with jax.enable_x64(x64):
        for value in (2.0, 2, jnp.asarray(2.0), jnp.asarray(2)):
            is_integer = jnp.issubdtype(jnp.asarray(value).dtype, jnp.integer)
            if reduction is SOFTMAX and (is_integer or jnp.ndim(value) == 0):
                continue
            output = reduction(value, ids, 2)
            assert not output.weak_type
            if reduction.by_jax is not None:
                assert_same_bits(output, np.asarray(reduction.by_jax(value, ids, 2)))
        if reduction in LIKE_JAX:
            gradient = jax.grad(lambda x: reduction(x, ids, 2).sum())(2.0)
            assert gradient.dtype == jnp.result_type(float) and gradient == 2


@pytest.mark.parametrize("reduction", [r for r in REDUCTIONS if r.has_buckets], ids=str)
def test_bucket_size_value(rng: np.random.Generator, reduction: Reduction) -> None:
    """Buckets of any size do not change the value, except for the rounding of 16-bit sums and products."""
    for dtype, bucket_size in itertools.product(("float32", "int32"), (1, 3, 8, 50, 64, 200)):
        data, ids = reduction.make_data(rng, Shape(50, (3,), 6), dtype), cases.make_ids(rng, 50, 6)
        if reduction is PROD and cases.is_floating(data.dtype):
            data = np.where(data == 0, 2, np.sign(data))  # a bucket's product must be in range
        output = reduction(data, ids, 6, bucket_size=bucket_size)
        reduction.value(data, ids, 6).check(output, f"{dtype} {bucket_size}")
        assert_same_values(output, reduction.by_jax(data, ids, 6, bucket_size=bucket_size))


@pytest.mark.parametrize("reduction", [SUM, PROD], ids=str)
def test_buckets_without_rows(reduction: Reduction) -> None:
    data, ids = np.ones((0, 2), np.float32), np.zeros(0, int)
    expected = np.asarray(reduction.by_jax(data, ids, 3, bucket_size=2))
    assert_same_bits(reduction(data, ids, 3, bucket_size=2), expected)


@pytest.mark.parametrize("reduction", [SUM, PROD], ids=str)
def test_bucket_size_gradient(rng: np.random.Generator, reduction: Reduction) -> None:
    """Buckets of any size do not change the gradient, also if products have zeros."""
    data, ids = rng.integers(-2, 3, (40, 4)).astype(np.float32), cases.make_ids(rng, 40, 9)
    cotangent = cases.cotangent(rng, (9, 4), "float32")
    for bucket_size in (1, 7, 64):
        _, d_data = reduction.pullback(data, ids, 9, cotangent, bucket_size=bucket_size)
        expected = reduction.gradient(cotangent, data, ids, 9, **reduction.options[0])
        np.testing.assert_array_equal(d_data, expected.exact.astype(np.float32))  # zeros have either sign


WITHOUT_KERNEL = [
    name
    for name in (
        "float8_e3m4",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn",
        "int2",
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


@pytest.mark.parametrize("dtype", [*WITHOUT_KERNEL, "int8", "uint16"])
def test_dtypes_without_kernel(rng: np.random.Generator, dtype: str) -> None:
    """They run as plain JAX, except sums and products of narrow integers. Results equal jax.ops, also under vmap.
    Sums and products of narrow floating-point numbers accumulate in float32 here, too.
    """
    if jax.__version_info__ < (0, 9) and dtype.lstrip("u") in ("int2", "int4", "float4_e2m1fn"):
        pytest.skip("XLA of jaxlib 0.8 scatters packed numbers wrongly, or crashes")
    data, ids = small_data(rng, (3, 40, 2), dtype), rng.integers(-1, 9, 40)
    for reduction in LIKE_JAX:
        if dtype in reduction.dtypes or (dtype == "float8_e8m0fnu" and reduction is SUM):  # e8m0 has no zero
            continue
        with cases.x64_for("float64" if dtype == "complex128" else dtype):
            data = jnp.asarray(data)
            call = lambda x, reduction=reduction: reduction(x, ids, 8)  # noqa: E731
            both = jax.jit(lambda x, call=call: (call(x[0]), jax.vmap(call)(x)))
            text = both.lower(data).as_text()
            is_narrow_sum = reduction in (SUM, PROD) and cases.is_floating(data.dtype)
            wide = data.astype(jnp.float32) if is_narrow_sum else data
            if dtype in ("int2", "uint2") and reduction in (SUM, PROD):  # XLA on GPUs disagrees with NumPy there
                wide = data.astype(np.int32)
            by_jax = jax.jit(lambda x, reduction=reduction: reduction.by_jax(x, ids, 8))
            expected = np.stack([np.asarray(by_jax(x)).astype(data.dtype) for x in wide])
            of_one, of_all = both(data)
            if kernels_in(text):
                # Sums and products of narrow integers run as those of wide ones and are then truncated.
                assert reduction in (SUM, PROD) and jnp.issubdtype(data.dtype, jnp.integer)
            assert_same_bits(of_one, expected[0], str(reduction))
            assert_same_bits(of_all, expected, str(reduction))


@each_reduction
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "int64", "float8_e4m3fn", "float8_e5m2"])
def test_values_of_other_dtypes(rng: np.random.Generator, reduction: Reduction, dtype: str) -> None:
    """Means of integers are floating. Softmax refuses integers. Narrow floats accumulate in float32 and round once."""
    ids = np.concatenate([np.arange(5), rng.integers(-1, 6, 40)])  # no segment is empty
    data = rng.random((45, 2)) < 0.5 if dtype == "bool" else small_data(rng, (45, 2), dtype)
    if (reduction is SOFTMAX and not dtype.startswith("float8")) or (reduction in (SUM, PROD) and dtype == "bool"):
        with cases.x64_for(dtype), pytest.raises(TypeError, match=rf"{reduction.name}: .*{dtype}"):
            reduction(data, ids, 5)
        return
    if dtype == "float8_e4m3fn" and reduction in (MAX, MIN):
        # The dtype has no infinity to start a maximum with, so results are NaN, as in jax.ops.
        expected = cases.Expected(np.full((5, 2), np.nan, np.float32), data.dtype)
    elif dtype.startswith("float8"):
        expected = reduction.value(data.astype(np.float32), ids, 5)
        if expected.dtype == np.float32:
            expected = dataclasses.replace(expected, dtype=data.dtype)
    else:
        expected = reduction.value(data, ids, 5)
    with cases.x64_for(dtype):
        expected.check(reduction(data, ids, 5))


@pytest.mark.parametrize("reduction", [MAX, MIN, SUM, MEAN, PROD], ids=str)
def test_gradient_of_integers(reduction: Reduction) -> None:
    """Gradients of integer data and of ids are float0."""
    ids = np.array([0, 1, 1, 0])
    loss = lambda data, ids: reduction(data, ids, 2).astype(jnp.float32).sum()  # noqa: E731
    for dtype in ("int8", "uint32"):
        for gradient in jax.grad(loss, argnums=(0, 1), allow_int=True)(np.ones(4, dtype), ids):
            assert gradient.dtype == jax.dtypes.float0 and gradient.shape == (4,)
    d_data, d_ids = jax.grad(loss, argnums=(0, 1), allow_int=True)(np.ones(4, np.float32), ids)
    assert d_ids.dtype == jax.dtypes.float0 and d_data.dtype == np.float32


@pytest.mark.parametrize("reduction", [ARGMAX, ARGMIN], ids=str)
def test_rows_of_winners_have_no_derivative(reduction: Reduction) -> None:
    """Winning rows are integers: derivatives through them are exact zeros, in reverse and forward mode."""
    data, ids = jnp.arange(4.0), np.array([0, 1, 1, 0])
    gradient = jax.grad(lambda x: (x[reduction(x, ids, 2)] ** 2).sum())(data)
    expected = np.zeros(4, np.float32)
    np.add.at(expected, np.asarray(reduction(data, ids, 2)), 2 * np.asarray(data)[np.asarray(reduction(data, ids, 2))])
    assert_same_bits(gradient, expected)
    for function in (reduction, reduction.in_forward_mode):
        _, tangent = jax.jvp(lambda x, function=function: function(x, ids, 2), (data,), (data,))
        assert tangent.dtype == jax.dtypes.float0


# ----------------------------------------------------------------------------------------------------------------------
# Residuals and kernels.


KEPT_FOR_BACKWARD = [(SUM, {}, 0), (MEAN, {}, 0), (PROD, {}, 1), (SOFTMAX, {}, 1)]
KEPT_FOR_BACKWARD += [(r, {"tie_break": of}, of == "split") for r in (MAX, MIN) for of in ("split", "first")]
"""The number of residuals that are as large as the data or larger."""


def test_residuals(rng: np.random.Generator) -> None:
    """Linear reductions keep no residual of the size of the data; nonlinear ones keep one, unless they know the winners
    of all cells."""
    shape = Shape(500, (6,), 9)
    for reduction, options, count in KEPT_FOR_BACKWARD:
        data, ids = jnp.asarray(reduction.make_data(rng, shape, "float32")), cases.make_ids(rng, 500, 9)
        _, vjp = jax.vjp(lambda x, r=reduction, o=options, ids=ids: r(x, ids, 9, **o), data)
        kept = [x for x in jax.tree.leaves(vjp) if hasattr(x, "shape")]
        assert kept, "this version of JAX does not show the residuals"
        assert sum(x.size >= data.size for x in kept) == count, (reduction, options)


@each_reduction
def test_kernels(reduction: Reduction) -> None:
    """Value and gradient call the kernels. Their programs have no scatter or gather of XLA."""
    data, ids = np.ones((8, 2), np.float32), np.zeros(8, np.int32)
    for options in reduction.options:
        call = jax.jit(lambda x, options=options: reduction(x, ids, 3, **options))
        texts = [call.lower(data).as_text()]
        assert kernels_in(texts[0]) == [reduction.name]
        if reduction.gradient is not None and len(reduction.kernels) > 1:
            gradient = jax.jit(jax.grad(lambda x, call=call: (call(x) ** 2).sum()))
            texts.append(gradient.lower(data).as_text())
            assert kernels_in(texts[1]) == list(reduction.kernels)
        for text in texts:
            assert "scatter" not in text and "gather" not in text


# ----------------------------------------------------------------------------------------------------------------------
# Forward mode.


KERNELS_OF_TANGENTS = {
    "segment_max": ["segment_max_with_winner", "segment_sum", "segment_sum_backward"],
    "segment_min": ["segment_min_with_winner", "segment_sum", "segment_sum_backward"],
    "segment_sum": ["segment_sum", "segment_sum"],
    "segment_mean": ["segment_mean", "segment_mean_backward", "segment_sum"],
    "segment_prod": ["segment_prod_with_residual", "segment_sum"],  # the terms of the sum are plain JAX
    "segment_softmax": ["segment_softmax", "segment_softmax_backward"],
}


@pytest.mark.parametrize(
    ("reduction", "options"), [(r, r.options[0]) for r in DIFFERENTIABLE] + [(MAX, {"tie_break": "first"})], ids=str
)
def test_tangents_are_kernels(rng: np.random.Generator, reduction: Reduction, options: Options) -> None:
    """Tangents run as kernels without a scatter. So do tangents of gradients that are linear in all tangents."""
    data, ids = jnp.asarray(rng.normal(size=(2, 30, 3)), jnp.float32), cases.make_ids(rng, 30, 4)

    def call(function: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        return function(x, ids, 4, **options)

    def lowered(function: Callable[..., jax.Array]) -> str:
        with jax_baracuda.implementation("kernel"):
            text = jax.jit(lambda x, t: jax.jvp(function, (x,), (t,))).lower(*data).as_text()
        assert "stablehlo.scatter" not in text
        return text

    kernels = sorted(kernels_in(lowered(functools.partial(call, reduction.in_forward_mode))))
    if options.get("tie_break") == "first":
        assert kernels == ["segment_max_with_winner"]  # the winners select the tangents
    else:
        assert kernels == KERNELS_OF_TANGENTS.get(reduction.name, [reduction.name, "segment_sum"])
    # Gradients of products and softmax, for example, are not linear in the data's tangents.
    if reduction.derivatives_are_exact and reduction not in (PROD, SOFTMAX):
        of_gradient = kernels_in(lowered(jax.grad(lambda x: (call(reduction, x) ** 2).sum())))
        assert set(of_gradient) >= set(reduction.kernels)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("reduction", [MAX, MIN, PROD, SOFTMAX], ids=str)
def test_tangents_against_gradients(rng: np.random.Generator, reduction: Reduction, dtype: str) -> None:
    """Tangents are sums over rows, weighted by the gradient of ones. Tangents of losing rows may be NaN."""
    shape, batch = Shape(40, (3,), 12), Batch()
    ids = np.stack([cases.make_ids(rng, shape.rows, shape.segments) for _ in range(2)])
    data = np.stack([reduction.make_data(rng, shape, dtype) for _ in range(2)])
    if reduction is PROD:  # the product of all other rows must be in range of the dtype
        data = rng.choice([0.5, -1.0, 1.0, 2.0, 0.0, np.inf, np.nan], data.shape, p=[0.2] * 4 + [0.1, 0.05, 0.05])
    data, tangents = data.astype(dtype), small_integers(rng, data.shape, dtype)

    def weights_of(i: int, options: Options) -> np.ndarray:
        ones, wide = np.ones((shape.segments, *shape.row_shape)), data[i].astype(np.float64)
        return np.asarray(reduction.gradient(ones, wide, ids[i], shape.segments, **options).exact, np.float64)

    def add(maps: tuple[bool, bool], options: Options, implementation: str = "kernel") -> None:
        is_shared = [not is_mapped for is_mapped in maps]
        elements = [tuple(0 if shared else i for shared in is_shared) for i in range(2)]

        def jvp(data: jax.Array, ids: jax.Array, tangent: jax.Array) -> tuple[jax.Array, jax.Array]:
            call = functools.partial(reduction.in_forward_mode, **options, implementation=implementation)
            return jax.jvp(lambda x: call(x, ids, shape.segments), (data,), (tangent,))

        own_tangents = tangents
        if reduction in (MAX, MIN):
            loses = np.stack([weights_of(i, options) == 0 for i in range(2)])
            any_number = rng.choice([np.nan, np.inf, -np.inf], tangents.shape).astype(dtype)
            if not maps[0]:
                loses[1] = loses[0]
            own_tangents = np.where(loses, any_number, tangents)

        def check(values: jax.Array, actual: jax.Array) -> None:
            for i, (of_data, of_ids) in enumerate(elements):
                where, own_ids, t = f"{maps} {options} {implementation} {i}", ids[of_ids], own_tangents[i]
                if reduction is SOFTMAX:
                    residual = np.asarray(values[i])
                    reduction.gradient(t, residual, own_ids, shape.segments, **options).check(actual[i], where)
                    continue
                weights = weights_of(of_data, options)
                with np.errstate(invalid="ignore"):  # infinite products have no tangent
                    terms = np.where(weights != 0, weights * t.astype(np.float64), 0)
                sums = cases.segment_sum(terms, own_ids, shape.segments)
                Expected(sums, dtype, cases.sum_error(terms, own_ids, shape.segments, dtype)).check(actual[i], where)

        axes = tuple(0 if is_mapped else None for is_mapped in maps)
        operands = [x if is_mapped else x[0] for x, is_mapped in zip((data, ids), maps, strict=True)]
        batch.add(jax.vmap(jvp, (*axes, 0)), (*operands, own_tangents), check)

    for options in reduction.options:
        add((True, True), options)
        add((False, False), options)
    if dtype == "float64":  # in narrower dtypes, XLA may leave intermediate results such as probabilities unrounded
        add((False, False), reduction.options[0], "xla")
    with cases.x64_for(dtype), np.errstate(invalid="ignore"):
        batch.run()


# ----------------------------------------------------------------------------------------------------------------------
# Errors.

ROWS = np.ones((4, 2), np.float32)
IDS = np.array([0, 1, 1, 0])
CELLS = np.ones((2, 2), np.float32)

# The call, and the error after the function's name.
ERRORS: dict[str, tuple[Callable[..., Any], str]] = {
    "data is None": (lambda f: f(None, IDS, 2), "TypeError: (data|logits) must be an array, got NoneType"),
    "rows do not fit": (
        lambda f: f(ROWS[:3], IDS, 2),
        r"ValueError: (data|logits) must have one row per id.*shape = \(3, 2\).*segment_ids.shape = \(4,\)",
    ),
    "num_segments negative": (lambda f: f(ROWS, IDS, -1), "ValueError: num_segments must be non-negative, got -1"),
    "num_segments float": (lambda f: f(ROWS, IDS, 2.0), "TypeError: num_segments must be an integer, got 2.0"),
    "num_segments missing and no ids": (
        lambda f: f(ROWS[:0], IDS[:0]),
        "ValueError: num_segments is None, but segment_ids is empty",
    ),
    "num_segments missing under jit": (
        lambda f: jax.jit(lambda ids: f(ROWS, ids))(IDS),
        "ConcretizationTypeError: num_segments must be static",
    ),
    "num_segments traced": (
        lambda f: jax.jit(lambda s: f(ROWS, IDS, s))(2),
        "ConcretizationTypeError: num_segments must be static",
    ),
    "unknown mode": (lambda f: f(ROWS, IDS, 2, mode="wrap"), "ValueError: mode must be None, 'fill'.*got 'wrap'"),
    "bucket_size zero": (lambda f: f(ROWS, IDS, 2, bucket_size=0), "ZeroDivisionError: bucket_size .*got 0"),
    "bucket_size negative": (lambda f: f(ROWS, IDS, 2, bucket_size=-2), "TypeError: bucket_size .*got -2"),
    "bucket_size float": (lambda f: f(ROWS, IDS, 2, bucket_size=2.0), "TypeError: bucket_size .*got 2.0"),
    "bucket_size of ids of two dimensions": (
        lambda f: f(np.ones(3, np.float32), np.zeros((2, 3), np.int32), 2, bucket_size=2),
        r"ValueError: bucket_size needs segment_ids of shape \[N\], got shape \(2, 3\)",
    ),
    "bucket_size without rows": (
        lambda f: f(ROWS[:0], IDS[:0], 2, bucket_size=2),
        r"ValueError: bucket_size needs .*got shape \(0,\)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    """The exception type is that of jax.ops. The message names the function, the argument and its value."""
    call, error = ERRORS[case]
    for reduction in REDUCTIONS:
        if "without rows" in case and reduction in (SUM, PROD):
            continue  # no error in jax.ops, which reduces no buckets
        if "bucket_size" in case and not reduction.has_buckets:
            with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_size'"):
                call(reduction)
            continue
        for function in (reduction, reduction.in_forward_mode):
            with cases.raises(error, f"{reduction.name}: "):
                call(function)
        if reduction.by_jax is not None:
            with pytest.raises(Exception) as by_jax:
                call(reduction.by_jax)
            assert by_jax.type.__name__ == error.partition(":")[0]


BACKWARD_ERRORS: dict[str, tuple[Callable[..., Any], str, tuple[Reduction, ...]]] = {
    "cotangent is a scalar": (
        lambda f: f(np.float32(1), ROWS, IDS, 2),
        "ValueError: d_output must have shape .*scalar",
        (MAX, MIN, SUM, MEAN, PROD),
    ),
    "cotangent is an integer": (
        lambda f: f(CELLS.astype(np.int32), ROWS, IDS, 2),
        "TypeError: d_(output|probabilities) .*floating dtype, got int32",
        DIFFERENTIABLE,
    ),
    "dtypes differ": (
        lambda f: f(ROWS.astype(np.float16), ROWS, IDS, 2),
        "TypeError: d_output and (data|probabilities) must have the same floating dtype, got float16 and float32",
        (MAX, MIN, PROD, SOFTMAX),
    ),
    "features differ": (
        lambda f: f(np.ones((4, 3), np.float32), ROWS, IDS, 2),
        r"ValueError: d_(output|probabilities) must have .*shape.* got .*\(4, 3\)",
        (MAX, MIN, PROD, SOFTMAX),
    ),
    "ranks differ": (
        lambda f: f(np.ones(4, np.float32), ROWS, IDS, 2),
        r"ValueError: d_(output|probabilities) must have .*shape.* got .*\(4,\)",
        (MAX, MIN, PROD, SOFTMAX),
    ),
    "rows do not fit": (
        lambda f: f(CELLS, ROWS[:3], IDS, 2),
        "ValueError: (data|probabilities) must have one row per id",
        (MAX, MIN, PROD),
    ),
    "unknown mode": (lambda f: f(ROWS, ROWS, IDS, 2, mode="wrap"), "ValueError: mode must be None", DIFFERENTIABLE),
}


@pytest.mark.parametrize("case", BACKWARD_ERRORS)
def test_backward_errors(case: str) -> None:
    call, error, reductions = BACKWARD_ERRORS[case]
    for reduction in reductions:
        if reduction.call_backward is None:
            continue  # its gradient has no function of its own
        backward = functools.partial(reduction.call_backward, **reduction.options[0])
        with cases.raises(error, f"{reduction.name}_backward: "):
            call(backward)


def test_out_sharding_errors() -> None:
    """Buckets cannot be combined with out_sharding."""
    for reduction in REDUCTIONS:
        if reduction.has_buckets:
            with pytest.raises(NotImplementedError, match=f"{reduction.name}: out_sharding cannot be combined"):
                reduction(ROWS, IDS, 2, bucket_size=2, out_sharding=PartitionSpec())


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
@pytest.mark.parametrize("ids_dtype", ["uint32", "uint64"])
def test_sorted_unsigned_ids_beyond_the_signed_ones(
    rng: np.random.Generator, ids_dtype: str, reduction: Reduction
) -> None:
    """Ascending unsigned ids stay ascending in the kernel, which drops those out of range, in every batch element."""
    rows, segments, batch = 40, 6, 3
    top = np.iinfo(ids_dtype).max
    ids = np.sort(rng.choice(np.array([0, 1, 2, 4, top // 2, top // 2 + 1, top], ids_dtype), (batch, rows)), axis=1)
    data = reduction.make_data(rng, Shape(rows, (4,), segments), "float32")
    with cases.x64_for(ids_dtype):
        results = jax.jit(jax.vmap(lambda i: reduction(data, i, segments, indices_are_sorted=True)))(ids)
        with recorded.recording() as calls:
            reduction(data, ids[0], segments, indices_are_sorted=True)
    for call in calls:
        [ids_of_kernel] = [x for name, x in zip(call.op.operands, call.operands, strict=False) if name == "segment_ids"]
        np.testing.assert_array_equal(ids_of_kernel, np.sort(ids_of_kernel))  # differences of int32 would wrap
    for result, of_one in zip(results, ids, strict=True):
        reduction.value(data, of_one, segments).check(result)
