"""Padding of gathered rows on GPUs, so that vector loads fit."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_baracuda as jb
from jax_baracuda._core.dispatch import Site, Traits, program_of
from jax_baracuda._tools.calls import traced_calls
from jax_baracuda.ops.segment import edges

ROWS, EDGES, SEGMENTS = 20, 300, 17
CALLS = {
    "sum": (jb.gather_segment_sum, {}),
    "weighted sum": (jb.gather_segment_sum, {"weights": True}),
    "max": (jb.gather_segment_max, {}),
    "min, first": (jb.gather_segment_min, {"tie_break": "first"}),
}


@pytest.mark.parametrize("dims", [(33,), (3, 15)])
@pytest.mark.parametrize("name", CALLS)
def test_longer_rows(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str, dims: tuple[int, ...]
) -> None:
    """On any device, a reduction by a plan and its gradient are the same with longer rows."""
    monkeypatch.setattr(edges, "MIN_EDGES", 1)
    monkeypatch.setattr(edges, "MIN_EDGES_PER_ROW", 1)
    function, options = CALLS[name]
    data = jnp.asarray(rng.integers(-2, 3, (ROWS, *dims)), jnp.bfloat16)
    senders, receivers = (rng.integers(0, size, EDGES).astype(np.int32) for size in (ROWS, SEGMENTS))
    plan = jb.segment_plan(receivers, SEGMENTS, senders, ROWS)
    if "weights" in options:
        shape = (EDGES,) if len(dims) == 1 else (EDGES, dims[0])
        options = {"weights": jnp.asarray(rng.integers(1, 4, shape), jnp.bfloat16)}

    def value_and_gradient(data: jax.Array) -> Any:
        output, vjp = jax.vjp(lambda data: function(data, plan=plan, **options), data)
        return output, vjp(output)

    calls = [call for call in traced_calls(value_and_gradient, data) if call.op.programs]
    assert len(calls) == 2
    for call in calls:
        operands = [_values(rng, aval) for aval in call.operands]
        program = call.of_operands(program_of(call, Site("cuda")))
        features = math.prod(operands[0].shape[2 if "weights" in options else 1 :])  # of a head, or of a row
        assert f",{features + -features % 8}] = pad[" in str(jax.make_jaxpr(program)(*operands))
        unpadded = call.op(*call.op.by_name(operands, call.params).values(), **call.params)
        for actual, expected in zip(jax.jit(program)(*operands), unpadded, strict=True):
            np.testing.assert_array_equal(actual, expected)


def _values(rng: np.random.Generator, aval: Any) -> jax.Array:
    """Small integers, which add up exactly. Some ids and winners are out of range."""
    low, high = (-2, ROWS + 2) if aval.dtype == np.int32 else (-2, 3)
    return jnp.asarray(np.sort(rng.integers(low, high, aval.shape), axis=0), aval.dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "num_edges", "is_longer"),
    [
        ((1000, 33), "bfloat16", 2**17, True),
        ((1000, 33), "bfloat16", 2**17 - 1, False),  # few edges
        ((60000, 33), "bfloat16", 2**17, False),  # many rows
        ((1000, 33), "float32", 2**17, True),
        ((1000, 40), "bfloat16", 2**17, False),  # vectors fit
        ((1000, 20), "bfloat16", 2**17, False),  # vectors of 8 bytes fit
        ((1000, 5), "float32", 2**17, False),  # would be much longer
        ((1000, 3), "float32", 2**17, False),  # would still be short
        ((1000, 11, 3), "bfloat16", 2**17, True),
        ((1000, 8, 4), "float32", 2**17, False),
        ((1000,), "float32", 2**17, False),
        ((1000, 0), "float32", 2**17, False),
    ],
)
def test_which_rows_are_made_longer(shape: tuple[int, ...], dtype: str, num_edges: int, is_longer: bool) -> None:
    features = math.prod(shape[1:])
    assert edges.fit_no_vectors(_traits(shape[0], features, dtype, num_edges)) == is_longer


def _traits(rows: int, features: int, dtype: str, num_edges: int, **of_head: int) -> Traits:
    sizes = {"gathered": rows, "segment": 1000, "edge": num_edges, "features": features, **of_head}
    return Traits({}, {**sizes, "row_bytes": features * jnp.dtype(dtype).itemsize}, fuses=False)


def test_heads_are_made_longer_one_by_one() -> None:
    assert edges.fit_no_vectors(_traits(1000, 21, "float32", 2**17, feature=7))
    assert not edges.fit_no_vectors(_traits(1000, 24, "float32", 2**17, feature=8))
    assert not edges.fit_no_vectors(_traits(1000, 15, "float32", 2**17, feature=5))  # would be much longer
