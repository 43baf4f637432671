"""Padding of gathered rows on GPUs, so that vector loads fit."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_baracuda as jb
from jax_baracuda._tools.calls import traced_calls
from jax_baracuda.ops.segment import padding

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
    monkeypatch.setattr(padding, "MIN_EDGES", 1)
    monkeypatch.setattr(padding, "MIN_EDGES_PER_ROW", 1)
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

    calls = [call for call in traced_calls(value_and_gradient, data) if call.op.program_on_gpu is not None]
    assert len(calls) == 2
    for call in calls:
        operands = [_values(rng, aval) for aval in call.operands]
        program = call.op.program_on_gpu(*operands, **call.params)
        features = math.prod(operands[0].shape[2 if "weights" in options else 1 :])  # of a head, or of a row
        assert program is not None
        assert f",{features + -features % 8}] = pad[" in str(jax.make_jaxpr(program)(*operands))
        for actual, expected in zip(jax.jit(program)(*operands), call.op(*operands, **call.params), strict=True):
            np.testing.assert_array_equal(actual, expected)


def _values(rng: np.random.Generator, aval: Any) -> jax.Array:
    """Small integers, which add up exactly. Some ids and winners are out of range."""
    low, high = (-2, ROWS + 2) if aval.dtype == np.int32 else (-2, 3)
    return jnp.asarray(np.sort(rng.integers(low, high, aval.shape), axis=0), aval.dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "edges", "added"),
    [
        ((1000, 33), "bfloat16", 2**17, 7),
        ((1000, 33), "bfloat16", 2**17 - 1, 0),  # few edges
        ((60000, 33), "bfloat16", 2**17, 0),  # many rows
        ((1000, 33), "float32", 2**17, 3),
        ((1000, 40), "bfloat16", 2**17, 0),  # vectors fit
        ((1000, 20), "bfloat16", 2**17, 0),  # vectors of 8 bytes fit
        ((1000, 5), "float32", 2**17, 0),  # would be much longer
        ((1000, 3), "float32", 2**17, 0),  # would still be short
        ((1000, 11, 3), "bfloat16", 2**17, 7),
        ((1000, 8, 4), "float32", 2**17, 0),
        ((1000,), "float32", 2**17, 0),
        ((1000, 0), "float32", 2**17, 0),
    ],
)
def test_which_rows_are_made_longer(shape: tuple[int, ...], dtype: str, edges: int, added: int) -> None:
    assert padding.features_to_add(jax.ShapeDtypeStruct(shape, dtype), edges, 1000) == added


def test_heads_are_made_longer_one_by_one() -> None:
    data = jax.ShapeDtypeStruct((1000, 3, 7), "float32")
    assert padding.features_to_add(data, 2**17, 1000) == 3
    assert padding.features_to_add(data, 2**17, 1000, first_dim=2) == 1
