"""Programs that serve reductions on GPUs: orders of rows by segments, which XLA computes once, and longer rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support.kernels import kernels_in

import jax_baracuda as jb
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.dispatch import alternative_of
from jax_baracuda._core.op import Op
from jax_baracuda._core.rules import Site, Traits
from jax_baracuda._tools.calls import traced_calls
from jax_baracuda.ops.segment import edges
from jax_baracuda.ops.segment.plan import SEGMENT_ORDER

NODES, EDGES, SEGMENTS = 30, 200, 17


def assert_is_order(ids: np.ndarray, segments: int, order: Any = None) -> None:
    """Asserts that SEGMENT_ORDER of each row of `ids` is a stable sort, with ids out of range at the end.

    Args:
      order: the results of SEGMENT_ORDER. Default: those of a batch.
    """
    if order is None:
        order = jax.jit(jax.vmap(lambda ids: SEGMENT_ORDER(ids, num_segments=segments)))(ids)
    is_member = (ids >= 0) & (ids < segments)
    expected = np.argsort(np.where(is_member, ids, segments), axis=-1, kind="stable")
    np.testing.assert_array_equal(order[0], expected)
    in_order = np.take_along_axis(np.where(is_member, ids, segments), expected, axis=-1)
    np.testing.assert_array_equal(order[1], in_order)


@pytest.mark.parametrize("segments", [1, 7, 300, 100_000])
@pytest.mark.parametrize("rows", [0, 1, 500])
def test_order(rng: np.random.Generator, rows: int, segments: int) -> None:
    assert_is_order(rng.integers(-2, segments + 3, (3, rows)).astype(np.int32), segments)


@pytest.mark.parametrize("segments", [1, 7, 300, 100_000])
@pytest.mark.parametrize("rows", [0, 1, 500])
def test_order_of_constants(rng: np.random.Generator, rows: int, segments: int) -> None:
    """A program holds the order of constant ids, which NumPy finds."""
    ids = rng.integers(-2, segments + 3, rows).astype(np.int32)
    program = jax.jit(lambda: SEGMENT_ORDER(jnp.asarray(ids), num_segments=segments))
    assert not kernels_in(program.lower().as_text())
    assert_is_order(ids, segments, program())


@pytest.mark.parametrize("segments", [1, 600, 2**18, 2**31 - 1], ids=["1 digit", "2 digits", "3 digits", "4 digits"])
@pytest.mark.parametrize(
    ("batch", "rows"), [(1, 16_385), (3, 20_000), (1, 2**19 + 1), (1, 1_150_000)], ids=["few", "batch", "many", "wave"]
)
def test_order_of_many_rows(rng: np.random.Generator, batch: int, rows: int, segments: int) -> None:
    """GPUs sort many rows digit by digit, in tiles of three sizes. A third of the rows is in one segment."""
    ids = rng.integers(-2, segments, (batch, rows)).astype(np.int32)
    assert_is_order(np.where(rng.random((batch, rows)) < 0.3, np.int32(segments // 2), ids), segments)


def graph(rng: np.random.Generator) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows with ties, ids of edges, and weights. Some ids are out of range."""
    data = jnp.asarray(rng.integers(-2, 3, (NODES, 2, 3)), jnp.float32)
    senders = jnp.asarray(rng.integers(-NODES - 2, NODES + 3, EDGES), jnp.int32)
    receivers = jnp.asarray(rng.integers(-1, SEGMENTS + 2, EDGES), jnp.int32)
    return data, senders, receivers, jnp.asarray(rng.integers(1, 4, (EDGES, 2)), jnp.float32)


def message_passing(kind: str, *, tie_break: str = "split", is_weighted: bool = False) -> Any:
    """The value and the gradients of a call without a plan."""

    def call(data: Any, senders: Any, receivers: Any, weights: Any) -> Any:
        options: dict[str, Any] = {"tie_break": tie_break} if kind in ("max", "min") else {}
        if is_weighted:
            options["weights"] = weights
        return (getattr(jb, f"gather_segment_{kind}")(data, senders, receivers, SEGMENTS, **options) ** 2).sum()

    return jax.value_and_grad(call, (0, 3))


CALLS = {
    "sum": message_passing("sum"),
    "weighted sum": message_passing("sum", is_weighted=True),
    "max": message_passing("max"),
    "min, first": message_passing("min", tie_break="first"),
}


def unsorted_calls(name: str, *operands: Any) -> list[OpCall]:
    return [call for call in traced_calls(CALLS[name], *operands) if call.op.alternatives]


@pytest.mark.parametrize("name", CALLS)
def test_programs_on_gpu(rng: np.random.Generator, name: str) -> None:
    """The programs for GPUs compute the op's results on any device, also with an order of the edges."""
    calls = unsorted_calls(name, *graph(rng))
    assert calls
    for call in calls:
        params: dict[str, Any] = dict(call.params)
        operands = [_operand(rng, operand) for operand in call.operands]
        program = _program(call.op, operands, params)
        expected = call.op(*call.op.by_name(operands, params).values(), **params)
        for actual, wanted in zip(jax.jit(program)(*operands), expected, strict=True):
            np.testing.assert_array_equal(actual, wanted)
        if "has_edge_order" in params and (params.get("has_weights") or "first_wins" in params):
            order = jnp.asarray(rng.permutation(EDGES), jnp.int32)
            flags = {**params, "has_edge_order": True}
            ordered = jax.jit(_program(call.op, [*operands, order], flags))(*operands, order)
            for actual, wanted in zip(ordered, call.op(*operands, order, **flags), strict=True):
                np.testing.assert_array_equal(actual, wanted)


def _program(op: Op, operands: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """The program that serves a call on GPUs."""
    call = OpCall(op, operands, params)
    return call.of_operands(alternative_of(call, Site("cuda")))


def _operand(rng: np.random.Generator, aval: Any) -> jax.Array:
    """Small integers, which add up exactly. Some ids and winners are out of range."""
    low, high = (-2, EDGES // 4) if aval.dtype == np.int32 else (-2, 3)
    return jnp.asarray(rng.integers(low, high, aval.shape), aval.dtype)


def sorted_sum(data: Any, gather_ids: Any, segment_ids: Any) -> jax.Array:
    return jb.gather_segment_sum(data, gather_ids, segment_ids, SEGMENTS, indices_are_sorted=True)


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("clips_gather_ids", [False, True])
@pytest.mark.parametrize("features", [1, 3, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_rows_of_sorted_edges(
    rng: np.random.Generator, dtype: str, features: int, clips_gather_ids: bool, is_wide: bool
) -> None:
    """GPUs gather narrow rows first, then sum them without another sort. On any device, that gives the op's results."""
    data, senders, receivers, _ = graph(rng)
    data, receivers = jnp.tile(data[:, 0, :1], features).astype(dtype), jnp.sort(receivers)
    [call, *_] = traced_calls(sorted_sum, data, senders, receivers)
    params = call.params | {"is_wide": is_wide, "clips_gather_ids": clips_gather_ids}
    program = _program(call.op, [data, senders, receivers], params)
    assert "segment_order" not in str(jax.make_jaxpr(program)(data, senders, receivers))
    [actual] = jax.jit(program)(data, senders, receivers)
    [expected] = call.op(data, senders, receivers, **params)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("edges", "features", "dtype", "gathers_first"),
    [
        (2**14, 16, "float32", True),
        (2**14, 17, "float32", False),
        (2**14 + 1, 16, "float32", False),
        (2**26, 4, "float32", True),
        (2**26 + 1, 4, "float32", False),
        (2**20, 3, "float32", False),
        (2**14, 32, "bfloat16", True),
        (2**18, 8, "float32", False),
        (2**20, 8, "bfloat16", True),
        (0, 1, "float32", False),
        (10, 0, "float32", False),
    ],
)
def test_which_sorted_edges_take_two_steps(edges: int, features: int, dtype: str, gathers_first: bool) -> None:
    types = [jax.ShapeDtypeStruct(shape, of) for shape, of in (((edges + 1, features), dtype), ((edges,), "int32"))]
    [call, *_] = traced_calls(sorted_sum, *types, types[1])
    assert (alternative_of(call, Site("cuda")) is not None) == gathers_first


@pytest.mark.skipif(cases.PLATFORM != "cuda", reason="only GPUs need an order")
def test_a_program_sorts_once(rng: np.random.Generator) -> None:
    """Two layers and their gradients need two orders: by receivers and by senders."""
    data, senders, receivers, _ = graph(rng)

    def loss(data: Any, senders: Any, receivers: Any) -> Any:
        for _ in range(2):
            messages = jb.gather_segment_max(data, senders, receivers, NODES)
            data = data + jnp.where(jnp.isfinite(messages), messages, 0)
            data = data + jb.gather_segment_sum(data, senders, receivers, NODES)
        return (data**2).sum()

    text = jax.jit(jax.grad(loss)).lower(data, senders, receivers).compile().as_text()
    assert text.count('custom_call_target="jax_baracuda.segment_order"') == 2


# ----------------------------------------------------------------------------------------------------------------------
# Rows that are made longer, so that vector loads fit.

REDUCTIONS = {
    "sum": (jb.gather_segment_sum, {}),
    "weighted sum": (jb.gather_segment_sum, {"weights": True}),
    "max": (jb.gather_segment_max, {}),
    "min, first": (jb.gather_segment_min, {"tie_break": "first"}),
}


@pytest.mark.parametrize("dims", [(33,), (3, 15)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_longer_rows(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str, dims: tuple[int, ...]
) -> None:
    """On any device, a reduction by a plan and its gradient are the same with longer rows."""
    monkeypatch.setattr(edges, "MIN_EDGES", 1)
    monkeypatch.setattr(edges, "MIN_EDGES_PER_ROW", 1)
    function, options = REDUCTIONS[name]
    data = jnp.asarray(rng.integers(-2, 3, (NODES, *dims)), jnp.bfloat16)
    senders, receivers = (rng.integers(0, size, EDGES).astype(np.int32) for size in (NODES, SEGMENTS))
    plan = jb.segment_plan(receivers, SEGMENTS, senders, NODES)
    if "weights" in options:
        shape = (EDGES,) if len(dims) == 1 else (EDGES, dims[0])
        options = {"weights": jnp.asarray(rng.integers(1, 4, shape), jnp.bfloat16)}

    def value_and_gradient(data: jax.Array) -> Any:
        output, vjp = jax.vjp(lambda data: function(data, plan=plan, **options), data)
        return output, vjp(output)

    calls = [call for call in traced_calls(value_and_gradient, data) if call.op.alternatives]
    assert len(calls) == 2
    for call in calls:
        operands = [jnp.sort(_operand(rng, aval), axis=0) for aval in call.operands]
        program = call.of_operands(alternative_of(call, Site("cuda")))
        features = math.prod(operands[0].shape[2 if "weights" in options else 1 :])  # of a head, or of a row
        assert f",{features + -features % 8}] = pad[" in str(jax.make_jaxpr(program)(*operands))
        unpadded = call.op(*call.op.by_name(operands, call.params).values(), **call.params)
        for actual, expected in zip(jax.jit(program)(*operands), unpadded, strict=True):
            np.testing.assert_array_equal(actual, expected)


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
    return Traits({}, {**sizes, "row_bytes": features * jnp.dtype(dtype).itemsize}, Site("cuda"))


def test_heads_are_made_longer_one_by_one() -> None:
    assert edges.fit_no_vectors(_traits(1000, 21, "float32", 2**17, feature=7))
    assert not edges.fit_no_vectors(_traits(1000, 24, "float32", 2**17, feature=8))
    assert not edges.fit_no_vectors(_traits(1000, 15, "float32", 2**17, feature=5))  # would be much longer
