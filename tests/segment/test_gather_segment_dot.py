"""gather_segment_dot: values and gradients against NumPy, dropped edges, and errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from segment.gather_reference import FORMS, gathered, sum_of_edges
from support import cases
from support.cases import Expected

from jax_baracuda import gather_segment_dot, segment_plan


@dataclasses.dataclass(frozen=True)
class Ends:
    """The arrays of a call, and its result and gradients."""

    data: np.ndarray
    segment_data: np.ndarray
    gather_ids: np.ndarray
    segment_ids: np.ndarray
    """As kernels see them: a segment id out of range drops the edge."""

    def call(self, form: str, **options: Any) -> Callable[..., jax.Array]:
        """``(data, segment_data) -> products``"""
        if form == "plan":
            num_segments, num_rows = len(self.segment_data), len(self.data)
            plan = segment_plan(self.segment_ids, num_segments, self.gather_ids, num_rows)
            return lambda *arrays: gather_segment_dot(*arrays, plan=plan, **options)
        options |= {"sorted": {"indices_are_sorted": True}}.get(form, {})
        return lambda *arrays: gather_segment_dot(*arrays, self.gather_ids, self.segment_ids, **options)

    def value(self) -> Expected:
        rows, _ = gathered(self.data.astype(np.float64), self.gather_ids)
        products = rows * cases.take_cells(self.segment_data.astype(np.float64), self.segment_ids)
        error = (1 + products.shape[-1]) * cases.eps_of(self.data.dtype) * np.abs(products).sum(-1)
        return Expected(products.sum(-1), self.data.dtype, error)

    def gradient_of_data(self, d_output: np.ndarray) -> Expected:
        _, row = gathered(self.data, self.gather_ids)
        cells = cases.take_cells(self.segment_data.astype(np.float64), self.segment_ids)
        return sum_of_edges(d_output.astype(np.float64)[..., None] * cells, row, len(self.data), self.data.dtype)

    def gradient_of_segment_data(self, d_output: np.ndarray) -> Expected:
        rows, _ = gathered(self.data.astype(np.float64), self.gather_ids)
        terms = d_output.astype(np.float64)[..., None] * rows
        return sum_of_edges(terms, self.segment_ids, len(self.segment_data), self.data.dtype)


def make_ends(
    rng: np.random.Generator,
    nodes: int,
    edges: int,
    segments: int,
    row_shape: tuple[int, ...],
    dtype: str = "float32",
    *,
    is_sorted: bool = False,
) -> Ends:
    """Random arrays, with out-of-range ids of all kinds."""
    data, segment_data = (cases.cotangent(rng, (size, *row_shape), dtype) for size in (nodes, segments))
    segment_ids = cases.make_ids(rng, edges, segments, is_sorted=is_sorted)
    return Ends(data, segment_data, cases.make_ids(rng, edges, nodes), segment_ids)


def check(ends: Ends, call: Callable[..., jax.Array], d_output: np.ndarray) -> None:
    output, vjp = jax.vjp(jax.jit(call), ends.data, ends.segment_data)
    d_data, d_segment_data = vjp(d_output)
    ends.value().check(output, "value")
    ends.gradient_of_data(d_output).check(d_data, "gradient of data")
    ends.gradient_of_segment_data(d_output).check(d_segment_data, "gradient of segment_data")


# (nodes, edges, segments, row_shape)
SIZES = (
    (1, 1, 1, (1,)),
    (5, 0, 4, (3,)),
    (6, 20, 0, (2,)),
    (7, 30, 3, (0,)),
    (50, 400, 41, (3,)),
    (50, 4000, 900, (3, 5)),
    (300, 9000, 700, (4, 16)),
    (300, 9000, 5, (2, 3, 4)),
    (200, 9000, 3, (128,)),
    (700, 5000, 600, (1, 33)),
    (40, 3000, 50, (1100,)),
)


@cases.each_pair(sizes=SIZES, dtype=cases.FLOATING, form=FORMS)
def test_value_and_gradients(rng: np.random.Generator, sizes: Any, dtype: str, form: str) -> None:
    """Every size, dtype and form of ids gives the right products, in the order of the ids, and the right gradients."""
    ends = make_ends(rng, *sizes, dtype, is_sorted=form == "sorted")
    d_output = cases.cotangent(rng, (len(ends.gather_ids), *sizes[-1][:-1]), dtype)
    with cases.x64_for(dtype):
        check(ends, ends.call(form), d_output)


def test_clipped_ids(rng: np.random.Generator) -> None:
    """With mode "clip", ids out of range name the nearest segment."""
    ends = make_ends(rng, 40, 500, 30, (2, 8))
    clipped = dataclasses.replace(ends, segment_ids=np.clip(ends.segment_ids, 0, 29))
    check(clipped, ends.call("ids", mode="clip"), cases.cotangent(rng, (500, 2), "float32"))


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("form", ["ids", "plan"])
def test_dropped_edges(rng: np.random.Generator, form: str, implementation: str) -> None:
    """The product of a dropped edge is 0 and passes no gradient, whatever its row and its cotangent hold."""
    ends = make_ends(rng, 6, 40, 5, (4,))
    of_nan = rng.random(40) < 0.3
    gather_ids = np.where(of_nan, 5, rng.integers(0, 5, 40)).astype(np.int32)
    segment_ids = np.where(of_nan, 5, rng.integers(0, 5, 40)).astype(np.int32)
    data = ends.data.copy()
    data[5] = np.nan
    ends = dataclasses.replace(ends, data=data, gather_ids=gather_ids, segment_ids=segment_ids)
    call = ends.call(form, implementation=implementation)
    output, vjp = jax.vjp(call, ends.data, ends.segment_data)
    np.testing.assert_array_equal(np.asarray(output)[of_nan], 0)
    assert np.isfinite(output).all()
    d_data, d_segment_data = vjp(np.where(of_nan, np.inf, 1).astype(np.float32))
    np.testing.assert_array_equal(np.asarray(d_data)[5], 0)
    assert np.isfinite(d_data).all() and np.isfinite(d_segment_data).all()


DATA, CELLS, IDS = np.ones((4, 3), np.float32), np.ones((2, 3), np.float32), np.zeros(5, np.int32)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        ("TypeError: floating dtype, got bool", lambda: gather_segment_dot(DATA, CELLS > 0, IDS, IDS)),
        (
            "TypeError: segment_data must have the dtype of data, got float16 and float32",
            lambda: gather_segment_dot(DATA, CELLS.astype(np.float16), IDS, IDS),
        ),
        (
            r"ValueError: data must be \[N, ..., D\] and segment_data .* got \(4,\) and \(2,\)",
            lambda: gather_segment_dot(DATA[:, 0], CELLS[:, 0], IDS, IDS),
        ),
        (r"ValueError: got \(4, 3\) and \(2, 2\)", lambda: gather_segment_dot(DATA, CELLS[:, :2], IDS, IDS)),
        (r"ValueError: one shape \[E\]", lambda: gather_segment_dot(DATA, CELLS, IDS, IDS[1:])),
        (
            r"ValueError: the plan is for 3 segments, got segment_data.shape = \(2, 3\)",
            lambda: gather_segment_dot(DATA, CELLS, plan=segment_plan(IDS, 3, IDS, 4)),
        ),
        (
            r"ValueError: the plan is for 7 rows, got data.shape = \(4, 3\)",
            lambda: gather_segment_dot(DATA, CELLS, plan=segment_plan(IDS, 2, IDS, 7)),
        ),
    ],
)
def test_errors(error: str, call: Callable[[], Any]) -> None:
    with cases.raises(error, "^gather_segment_dot: .*"):
        call()
