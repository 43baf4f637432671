"""Properties of segment_argmax and segment_argmin alone: the first winner, NaN, zeros of both signs, integers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from segment.reference import ARGMAX, ARGMIN, Batch, Reduction, kernels_in
from support import cases
from support.cases import FLOATING, INTEGERS, Shape, assert_same_bits

each_arg = pytest.mark.parametrize("reduction", [ARGMAX, ARGMIN], ids=str)


@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
@each_arg
def test_first_of_many_ties(rng: np.random.Generator, reduction: Reduction, is_sorted: bool) -> None:
    """The lowest of equal rows wins, whatever its position, also if the rows equal the identity."""
    batch = Batch()
    for dtype in ("float32", "bfloat16", "int32", "uint32", "int8", "uint8", "bool"):
        info_or_none = None if dtype == "bool" else jnp.iinfo(dtype) if "int" in dtype else jnp.finfo(dtype)
        for fill in (0, 1) if info_or_none is None else (0, info_or_none.min, info_or_none.max):
            for shape in (Shape(5000, (), 7), Shape(3000, (33,), 3), Shape(300, (3,), 1000)):
                data = np.full((shape.rows, *shape.row_shape), fill, jnp.dtype(dtype))
                ids = cases.make_ids(rng, shape.rows, shape.segments, is_sorted=is_sorted)
                expected = reduction.value(data, ids, shape.segments)
                batch.add(
                    lambda x, i, s=shape.segments: reduction(x, i, s, indices_are_sorted=is_sorted),
                    (data, ids),
                    lambda actual, e=expected, where=f"{dtype} {fill} {shape}": e.check(actual, where),
                )
    batch.run()


@each_arg
def test_infinite_data(reduction: Reduction) -> None:
    """A segment whose rows all equal the identity has a winner."""
    for value in (-np.inf, np.inf, np.nan):
        data = np.full((3, 2), value, np.float32)
        assert_same_bits(
            reduction(data, np.array([2, 0, 0]), 4), np.array([[1] * 2, [3] * 2, [0] * 2, [3] * 2], np.int32)
        )


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("dtype", FLOATING)
@each_arg
def test_subnormal_numbers(rng: np.random.Generator, reduction: Reduction, dtype: str, implementation: str) -> None:
    """Subnormal numbers differ from zero and from each other. Zeros of both signs are equal."""
    magnitudes = rng.integers(0, 4, (60, 5)).astype(f"uint{8 * jnp.dtype(dtype).itemsize}").view(jnp.dtype(dtype))
    data = np.where(rng.random((60, 5)) < 0.5, -magnitudes, magnitudes)
    ids = cases.make_ids(rng, 60, 20)
    with cases.x64_for(dtype):
        reduction.value(data, ids, 20).check(reduction(data, ids, 20, implementation=implementation))


@each_arg
def test_result_is_int32(rng: np.random.Generator, reduction: Reduction) -> None:
    """The result is int32 for every dtype of data, with 64-bit types on and off. Each runs by the kernel."""
    for dtype in ("bool", *INTEGERS, *FLOATING):
        data, ids = cases.make_data(rng, (30, 2), dtype), cases.make_ids(rng, 30, 4, "int64")
        with cases.x64_for(dtype, ids.dtype):
            call = jax.jit(lambda x, i: reduction(x, i, 4))
            assert kernels_in(call.lower(data, ids).as_text()) == [reduction.name]
            reduction.value(data, ids, 4).check(call(data, ids), dtype)


@each_arg
def test_no_rows(reduction: Reduction) -> None:
    assert_same_bits(reduction(np.ones((0, 2), np.float32), np.zeros(0, int), 3), np.zeros((3, 2), np.int32))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_dtypes_without_kernel(dtype: str) -> None:
    """Dtypes without a kernel run as plain JAX, also if they have no infinity."""
    data, ids = np.array([1, 3, 3, 2]).astype(jnp.dtype(dtype)), np.array([0, 0, 0, 1])
    assert_same_bits(ARGMAX(data, ids, 3), np.array([1, 3, 4], np.int32))
    assert_same_bits(ARGMIN(data, ids, 3), np.array([0, 3, 4], np.int32))
