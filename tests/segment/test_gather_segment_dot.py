"""gather_segment_dot: clipped and dropped edges, and errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from segment.gather_reference import call_of, make_graph, with_segment_data
from support import cases

from jax_baracuda import gather_segment_dot, segment_plan


def test_clipped_ids(rng: np.random.Generator) -> None:
    """With mode "clip", ids out of range name the nearest segment."""
    graph = with_segment_data(rng, make_graph(rng, 40, 500, 30, (2, 8)))
    d_output = cases.cotangent(rng, (500, 2), "float32")
    clipped = dataclasses.replace(graph, segment_ids=np.clip(graph.segment_ids, 0, 29))
    output, vjp = jax.vjp(lambda arrays: call_of("dot", graph, "ids", mode="clip")(**arrays), graph.arrays())
    for name, allowed in clipped.expected("dot", d_output).items():
        allowed.check({"value": output, **vjp(d_output)[0]}[name], name)


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("form", ["ids", "plan"])
def test_dropped_edges(rng: np.random.Generator, form: str, implementation: str) -> None:
    """The product of a dropped edge is 0 and passes no gradient, whatever its row and its cotangent hold."""
    graph = with_segment_data(rng, make_graph(rng, 6, 40, 5, (4,)))
    of_nan = rng.random(40) < 0.3
    gather_ids = np.where(of_nan, 5, rng.integers(0, 5, 40)).astype(np.int32)
    segment_ids = np.where(of_nan, 5, rng.integers(0, 5, 40)).astype(np.int32)
    graph.data[5] = np.nan
    graph = dataclasses.replace(graph, gather_ids=gather_ids, segment_ids=segment_ids)
    call = call_of("dot", graph, form, implementation=implementation)
    output, vjp = jax.vjp(lambda arrays: call(**arrays), graph.arrays())
    np.testing.assert_array_equal(np.asarray(output)[of_nan], 0)
    assert np.isfinite(output).all()
    [gradients] = vjp(np.where(of_nan, np.inf, 1).astype(np.float32))
    np.testing.assert_array_equal(np.asarray(gradients["data"])[5], 0)
    assert np.isfinite(gradients["data"]).all() and np.isfinite(gradients["segment_data"]).all()


DATA, CELLS, IDS = np.ones((4, 3), np.float32), np.ones((2, 3), np.float32), np.zeros(5, np.int32)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        ("TypeError: floating dtype, got bool", lambda: gather_segment_dot(DATA, CELLS > 0, IDS, IDS)),
        (
            "TypeError: segment_data must have the dtype of data, float32, got float16",
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
