"""Properties of segment_softmax alone: large and infinite logits, shift invariance, its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from segment.reference import SOFTMAX
from support import cases
from support.cases import FLOATING, assert_same_bits

from jax_baracuda import implementation, segment_softmax, segment_softmax_backward

each_dtype = pytest.mark.parametrize("dtype", FLOATING)


def both_orders(logits: np.ndarray, ids: np.ndarray, segments: int) -> list[jax.Array]:
    """The probabilities for unsorted ids, twice, and for sorted ids, restored to the order of the rows."""
    order = np.argsort(ids, kind="stable")
    is_sorted = segment_softmax(logits[order], ids[order], segments, indices_are_sorted=True)
    return [
        segment_softmax(logits, ids, segments),
        segment_softmax(logits, ids, segments, deterministic=True),
        is_sorted[np.argsort(order)],
    ]


@each_dtype
def test_large_logits(rng: np.random.Generator, dtype: str) -> None:
    """Logits up to the greatest finite number do not overflow, and their differences are kept."""
    top = float(jnp.finfo(dtype).max)
    columns = [[1e4, 1e4, 1e4 - 8], [top, top, -top], [-top, -top, -top], [top, 0, 1], [-1e4, -1e4 - 8, 0]]
    logits = np.array(columns).T.astype(jnp.dtype(dtype))
    for ids in (np.zeros(3, np.int32), np.array([0, 0, 1], np.int32), np.array([1, 0, 1], np.int32)):
        expected = SOFTMAX.value(logits, ids, 2)
        with cases.x64_for(dtype):
            for actual in both_orders(logits, ids, 2):
                expected.check(actual)
                assert np.isfinite(np.asarray(actual).astype(np.float64)).all()


@each_dtype
def test_masked_rows(dtype: str) -> None:
    """A logit of -inf has probability +0. A segment is NaN if it has only such logits, or any NaN or +inf."""
    logits = np.array([-np.inf, 2, 2, -np.inf, -np.inf, 5, np.inf, 1, np.nan, 1, 7], jnp.dtype(dtype))
    ids = np.array([0, 0, 0, 1, 1, 2, 3, 3, 4, 4, -1])
    expected = np.array([0, 0.5, 0.5, *[np.nan] * 2, 1, *[np.nan] * 4, 0], logits.dtype)
    with cases.x64_for(dtype):
        for actual in both_orders(logits, ids, 5):
            assert_same_bits(actual, expected)


@each_dtype
def test_shift_invariance(rng: np.random.Generator, dtype: str) -> None:
    """Adding one number to all logits of a segment changes no bit of a kernel's result, if the additions are exact."""
    logits, ids = rng.integers(-8, 9, (200, 5)).astype(np.float64), cases.make_ids(rng, 200, 9)
    shift = rng.integers(-100, 100, (9, 5)).astype(np.float64)
    shifted = (logits + cases.take_cells(shift, ids)).astype(jnp.dtype(dtype))
    with cases.x64_for(dtype):
        for options in ({"deterministic": True}, {}):
            with implementation("kernel"):
                plain, moved = (segment_softmax(x, ids, 9, **options) for x in (logits.astype(shifted.dtype), shifted))
            assert_same_bits(moved, np.asarray(plain))
            SOFTMAX.value(shifted, ids, 9).check(plain)
            SOFTMAX.value(shifted, ids, 9).check(moved)


@each_dtype
def test_backward_of_any_probabilities(rng: np.random.Generator, dtype: str) -> None:
    """The backward function accepts any probabilities, also if they do not sum to 1."""
    p, d = rng.normal(size=(2, 400, 5)).astype(jnp.dtype(dtype))
    ids = cases.make_ids(rng, 400, 30)
    expected = SOFTMAX.gradient(d, p, ids, 30, deterministic=False)
    order = np.argsort(ids, kind="stable")
    with cases.x64_for(dtype):
        expected.check(segment_softmax_backward(d, p, ids, 30))
        expected.check(segment_softmax_backward(d, p, ids, 30, deterministic=True))
        is_sorted = segment_softmax_backward(d[order], p[order], ids[order], 30, indices_are_sorted=True)
        expected.check(is_sorted[np.argsort(order)])


@pytest.mark.parametrize("asked_for", ["kernel", "xla"])
@pytest.mark.parametrize("bad_cotangent", [np.nan, np.inf])
def test_nan_stays_in_its_segment(rng: np.random.Generator, asked_for: str, bad_cotangent: float) -> None:
    """NaN and infinite logits or cotangents of one segment do not reach the rows of another."""
    logits, ids = rng.normal(size=(50, 3)).astype(np.float32), rng.integers(-1, 6, 50)
    logits[ids == 2] = np.nan
    logits[ids == 3] = np.inf
    cotangent = rng.normal(size=logits.shape).astype(np.float32)
    cotangent[ids == 4] = bad_cotangent
    with implementation(asked_for):
        output, d_logits = SOFTMAX.pullback(logits, ids, 5, cotangent)
    for result, bad in ((output, (2, 3)), (d_logits, (2, 3, 4))):
        is_bad = np.isin(ids, bad)
        assert np.isnan(np.asarray(result)[is_bad]).all() and np.isfinite(np.asarray(result)[~is_bad]).all()
    dropped = (ids < 0) | (ids >= 5)
    assert_same_bits(np.asarray(d_logits)[dropped], np.zeros((dropped.sum(), 3), np.float32))


@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
def test_few_rows_of_many_segments(rng: np.random.Generator, is_sorted: bool) -> None:
    """On CPUs, memory grows with the rows, not with the segments."""
    segments = 2**31 - 2 if cases.PLATFORM == "cpu" else 10_000_000
    logits = rng.normal(size=(60, 3)).astype(np.float32)
    ids = rng.choice([-5, -1, 0, 3, segments // 2, segments - 1, segments, 2**31 - 1], 60).astype(np.int32)
    if is_sorted:
        ids.sort()
    numbers = np.unique(ids, return_inverse=True)[1].astype(np.int32)
    numbers[(ids < 0) | (ids >= segments)] = -1
    cotangent = rng.normal(size=logits.shape).astype(np.float32)
    expected = SOFTMAX.value(logits, numbers, 8)
    with implementation("kernel"):
        probabilities = segment_softmax(logits, ids, segments, indices_are_sorted=is_sorted)
        expected.check(probabilities, "probabilities")
        gradient = segment_softmax_backward(probabilities, cotangent, ids, segments, indices_are_sorted=is_sorted)
        of_numbers = segment_softmax_backward(probabilities, cotangent, numbers, 8)
    np.testing.assert_allclose(gradient, of_numbers, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [-1000, 0], ids=["before and beyond", "beyond"])
def test_few_rows_of_no_segment(rng: np.random.Generator, first: int) -> None:
    """With many segments, CPUs number those that have rows. Rows are dropped also if no segment has any."""
    segments, num_rows = 100_000, 40
    ids = rng.integers(first, 1000, num_rows)
    ids = np.where(ids < 0, ids, ids + segments).astype(np.int32)
    p, d = rng.normal(size=(2, num_rows, 3)).astype(np.float32)
    with implementation("kernel"):
        for is_sorted in (False, True):
            own = np.sort(ids) if is_sorted else ids
            results = (
                segment_softmax(p, own, segments, indices_are_sorted=is_sorted),
                segment_softmax_backward(d, p, own, segments, indices_are_sorted=is_sorted),
            )
            for result in results:
                assert_same_bits(result, np.zeros_like(p))
