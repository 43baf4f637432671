"""The native handlers of where and its gradient check all arguments: an invalid call gives an error, never a crash."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support import cases
from support.cases import FLOATING
from support.handlers import assert_refused
from where.reference import (
    GRADIENT_DTYPES,
    KERNEL_DTYPES,
    SHAPE,
    make_condition,
    reference_gradients,
    select_call,
    split_call,
)

# ----------------------------------------------------------------------------------------------------------------------
# Valid calls.


SUMS = ((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2))


@pytest.mark.parametrize("dtype", FLOATING)
def test_sums_of_neighbouring_dimensions(rng: np.random.Generator, dtype: str) -> None:
    """Every result is written for sums over dimensions of any size, even 0 and 1."""
    for i, axes in enumerate(SUMS):
        for size in (0, 1, 7):
            shape = (2, *(size if axis in axes else 6 for axis in range(3)))
            call = split_call(dtype, *((axes, ()), ((), axes), (axes, axes))[i % 3], shape=shape)
            cond, d_output = make_condition(rng, shape), rng.normal(size=shape).astype(call.operands[0].aval().dtype)
            results = call.results_of({"d_output": d_output, "cond": cond})
            expected = reference_gradients(cond, d_output, *(x.shape for x in call.results))
            for (name, result), allowed in zip(results.items(), expected, strict=True):
                dataclasses.replace(allowed, dtype=result.dtype).check(result, f"{name} {axes} {size}")


def test_sums_over_nothing(rng: np.random.Generator) -> None:
    """If a device has one element along a summed axis, the sum has the shape of d_output, but its own dtype."""
    call = split_call("bfloat16", a_axes=(1,), b_axes=(1,), shape=(3, 5, 1, 6))
    cond, d_output = make_condition(rng, (3, 5, 1, 6)), rng.normal(size=(3, 5, 1, 6)).astype("bfloat16")
    results = call.results_of({"d_output": d_output, "cond": cond})
    cases.assert_same_memory(results["da"], np.where(cond, d_output, 0).astype(np.float32))
    cases.assert_same_memory(results["db"], np.where(cond, 0, d_output).astype(np.float32))


# ----------------------------------------------------------------------------------------------------------------------
# Invalid calls.


def test_sums_of_other_dtypes_are_refused() -> None:
    for dtype in sorted({*KERNEL_DTYPES, *GRADIENT_DTYPES} - {*FLOATING}):
        call = split_call(a_axes=(1,))
        d_output, db = (dataclasses.replace(x, dtype=dtype) for x in (call.operands[0], call.results[1]))
        call = dataclasses.replace(call, operands=(d_output, call.operands[1]), results=(call.results[0], db))
        assert_refused(call, dtype)


def test_sums_that_no_kernel_takes_are_refused() -> None:
    assert_refused(split_call(a_axes=(0, 2)), "dimensions that are not neighbours", "da")
    assert_refused(split_call(a_axes=(0,), b_axes=(1,)), "two different sums", "db")
    assert_refused(split_call(a_axes=(0, 1), b_axes=(1,)), "two different sums", "db")


def test_output_that_is_larger_than_all_operands_is_refused() -> None:
    good = select_call(shape=(3, 1, 4, 6))
    output = dataclasses.replace(good.results[0], shape=SHAPE)
    assert_refused(dataclasses.replace(good, results=(output,)), "larger output", "output")
