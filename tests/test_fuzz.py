"""Property tests: any small segment reduction, value and gradient, equals the NumPy reference bit for bit."""

from __future__ import annotations

import functools
import os
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
from cases import FLOATING, KERNEL_DTYPES, TIE_BREAKS, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jax_baracuda import segment_max, segment_max_backward

SETTINGS = settings(
    deadline=None,
    max_examples=int(os.environ.get("JAX_BARACUDA_FUZZ_EXAMPLES", "150")),
    print_blob=True,
)

IDS_DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

# Numbers below the smallest normal one have a test of their own.
floats = st.one_of(
    st.sampled_from([np.nan, float(np.copysign(np.nan, -1)), np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0]),
    st.integers(-3, 3).map(float),
    st.floats(width=32, allow_subnormal=False),
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
def problems(draw: st.DrawFn, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Data, ids and options of a segment reduction; sizes are few, so that compiled programs are used again."""
    dtype = draw(st.sampled_from(dtypes))
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
    return {
        "data": draw(data_of(dtype, (rows, *row_shape))),
        "ids": np.sort(ids) if is_sorted else ids,
        "segments": segments,
        "is_sorted": is_sorted,
        "mode": draw(st.sampled_from([None, "clip"])),
    }


@functools.partial(jax.jit, static_argnames=("segments", "is_sorted", "mode"))
def value(data: Any, ids: Any, *, segments: int, is_sorted: bool, mode: str | None) -> jax.Array:
    return segment_max(data, ids, segments, is_sorted, mode=mode)


@functools.partial(jax.jit, static_argnames=("segments", "is_sorted", "mode", "tie_break"))
def value_and_gradient(
    data: Any, ids: Any, d_output: Any, *, segments: int, is_sorted: bool, mode: str | None, tie_break: str
) -> tuple[jax.Array, ...]:
    output, vjp = jax.vjp(lambda x: segment_max(x, ids, segments, is_sorted, mode=mode, tie_break=tie_break), data)
    backward = segment_max_backward(d_output, data, ids, indices_are_sorted=is_sorted, mode=mode, tie_break=tie_break)
    return output, vjp(d_output)[0], backward


@SETTINGS
@given(problem=problems(KERNEL_DTYPES))
def test_value(problem: dict[str, Any]) -> None:
    data, ids, segments, mode = (problem[name] for name in ("data", "ids", "segments", "mode"))
    with cases.x64_for(data.dtype, ids.dtype):
        output = value(**problem)
        assert_same_bits(output, cases.reference_max(data, ids, segments, mode))


@SETTINGS
@given(problem=problems(FLOATING), tie_break=st.sampled_from(TIE_BREAKS), random=st.data())
def test_gradient(problem: dict[str, Any], tie_break: str, random: st.DataObject) -> None:
    data, ids, segments, mode = (problem[name] for name in ("data", "ids", "segments", "mode"))
    # Of cotangents, a share must not be below the smallest normal number: 30 rows tie at most.
    cotangents = st.one_of(st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0]), st.integers(-100, 100).map(float))
    cells = hnp.arrays(np.float64, (segments, *data.shape[1:]), elements=cotangents)
    d_output = random.draw(cells, label="d_output").astype(data.dtype)
    with cases.x64_for(data.dtype, ids.dtype):
        output, gradient, backward = value_and_gradient(**problem, d_output=d_output, tie_break=tie_break)
    assert_same_bits(output, cases.reference_max(data, ids, segments, mode))
    expected = cases.reference_gradient(d_output, data, ids, tie_break, mode)
    assert_same_bits(gradient, expected)
    assert_same_bits(backward, expected)


@SETTINGS
@given(problem=problems(("float32", "int16")), order=st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(problem: dict[str, Any], order: Any) -> None:
    """A permutation of the rows leaves the maxima as they are and permutes the shares of a split gradient."""
    data, ids, segments = problem["data"], problem["ids"], problem["segments"]
    permutation = np.array(order.sample(range(len(ids)), len(ids)), np.int64)
    options = {"segments": segments, "is_sorted": False, "mode": problem["mode"]}
    with cases.x64_for(ids.dtype):
        assert_same_bits(value(data[permutation], ids[permutation], **options), np.asarray(value(data, ids, **options)))
        if data.dtype == np.float32:
            d_output = np.ones((segments, *data.shape[1:]), np.float32)
            options["tie_break"] = "split"
            _, gradient, _ = value_and_gradient(data, ids, d_output, **options)
            _, permuted, _ = value_and_gradient(data[permutation], ids[permutation], d_output, **options)
            assert_same_bits(permuted, np.asarray(gradient)[permutation])
