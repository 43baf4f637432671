"""Property tests: value and gradient of any small segment reduction or rotation agree with the NumPy reference."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from segment.reference import DIFFERENTIABLE, REDUCTIONS, Reduction
from support import cases

pytestmark = pytest.mark.thorough

SETTINGS = settings(
    deadline=None,
    max_examples=int(os.environ.get("JAX_BARACUDA_FUZZ_EXAMPLES", "150")),
    print_blob=True,
)

IDS_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

# Other tests cover subnormal numbers. Numbers up to 2^100 keep partial sums in range: overflow depends on the order.
floats = st.one_of(
    st.sampled_from([np.nan, float(np.copysign(np.nan, -1)), np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0]),
    st.integers(-3, 3).map(float),
    st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
)


def data_of(dtype: Any, shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    dtype = jnp.dtype(dtype)
    if dtype == np.bool_:
        return hnp.arrays(np.bool_, shape)
    if cases.is_floating(dtype):

        def rounded(x: np.ndarray) -> np.ndarray:
            with np.errstate(over="ignore"):  # to infinity in float16
                return x.astype(dtype)

        return hnp.arrays(np.float64, shape, elements=floats).map(rounded)
    info = np.iinfo(dtype)
    few = st.sampled_from([info.min, info.max, 0, 1])
    return hnp.arrays(dtype, shape, elements=st.one_of(few, st.integers(int(info.min), int(info.max))))


@st.composite
def problems(
    draw: st.DrawFn, reductions: tuple[Reduction, ...], dtypes: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """A reduction, data, ids and options. There are few sizes, so that compiled programs are reused."""
    reduction = draw(st.sampled_from(reductions))
    dtype = draw(st.sampled_from(reduction.dtypes if dtypes is None else dtypes))
    rows = draw(st.sampled_from([0, 1, 2, 3, 8, 30]))
    row_shape = draw(st.sampled_from([(), (1,), (2,), (9,), (2, 2)]))
    segments = draw(st.sampled_from([0, 1, 2, 5]))
    ids_dtype = np.dtype(draw(st.sampled_from(IDS_DTYPES)))
    info = np.iinfo(ids_dtype)
    id_elements = st.one_of(
        st.integers(max(-2, int(info.min)), segments + 1), st.integers(int(info.min), int(info.max))
    )
    ids = draw(hnp.arrays(ids_dtype, rows, elements=id_elements))
    is_sorted = draw(st.booleans())
    options = {"indices_are_sorted": is_sorted, "mode": draw(st.sampled_from([None, "clip"]))}
    options |= draw(st.sampled_from(reduction.options))
    return {
        "reduction": reduction,
        "data": draw(data_of(dtype, (rows, *row_shape))),
        "ids": np.sort(ids) if is_sorted else ids,
        "segments": segments,
        "options": tuple(options.items()),
    }


@functools.partial(jax.jit, static_argnames=("reduction", "segments", "options"))
def value(reduction: Reduction, data: Any, ids: Any, *, segments: int, options: tuple[Any, ...]) -> jax.Array:
    return reduction(data, ids, segments, **dict(options))


@functools.partial(jax.jit, static_argnames=("reduction", "segments", "options"))
def value_and_gradient(
    reduction: Reduction, data: Any, ids: Any, cotangent: Any, *, segments: int, options: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    return reduction.pullback(data, ids, segments, cotangent, **dict(options))


def expected_value(problem: dict[str, Any]) -> cases.Expected:
    ids = cases.in_mode(problem["ids"], problem["segments"], dict(problem["options"])["mode"])
    return problem["reduction"].value(problem["data"], ids, problem["segments"])


@SETTINGS
@given(problem=problems(REDUCTIONS))
def test_value(problem: dict[str, Any]) -> None:
    with cases.x64_for(problem["data"].dtype, problem["ids"].dtype):
        output = value(**problem)
    expected_value(problem).check(output)


@SETTINGS
@given(problem=problems(DIFFERENTIABLE, cases.FLOATING), random=st.data())
def test_gradient(problem: dict[str, Any], random: st.DataObject) -> None:
    reduction, data, segments = (problem[name] for name in ("reduction", "data", "segments"))
    options = dict(problem["options"])
    # A share of a cotangent must not be subnormal. At most 30 rows tie.
    cotangents = st.one_of(st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0]), st.integers(-100, 100).map(float))
    shape = reduction.result_shape(cases.Shape(len(data), data.shape[1:], segments))
    cotangent = random.draw(hnp.arrays(np.float64, shape, elements=cotangents), label="cotangent").astype(data.dtype)
    with cases.x64_for(data.dtype, problem["ids"].dtype):
        output, gradient = value_and_gradient(**problem, cotangent=cotangent)
    expected_value(problem).check(output)
    ids = cases.in_mode(problem["ids"], segments, options["mode"])
    of_reduction = {name: options[name] for name in reduction.options[0]}
    expected = reduction.gradient(cotangent, reduction.residual(data, output), ids, segments, **of_reduction)
    expected.check(gradient)
