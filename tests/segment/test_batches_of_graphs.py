"""Graphs under ``vmap`` that gather from the same rows: the rows have one gradient for all graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from segment.gather_reference import Graph, gathered
from support import cases
from support.meshes import COLLECTIVES

from jax_baracuda import (
    SegmentPlan,
    forward_mode,
    gather_segment_max,
    gather_segment_mean,
    gather_segment_min,
    gather_segment_sum,
    segment_attention,
    segment_plan,
)

NODES, EDGES, SEGMENTS, BATCH = 40, 60, 30, 3

Function = Callable[..., jax.Array]


def of_sums(function: Function, **options: Any) -> Function:
    return lambda data, weights, *ids, **edges: function(data, *ids, **edges, **options, weights=weights)


def of_rows(function: Function, **options: Any) -> Function:
    return lambda data, weights, *ids, **edges: function(data, *ids, **edges, **options)


FUNCTIONS: dict[str, Function] = {
    "sum": of_rows(gather_segment_sum),
    "weighted sum": of_sums(gather_segment_sum),
    "mean": of_rows(gather_segment_mean),
    "weighted mean": of_sums(gather_segment_mean),
    "max": of_rows(gather_segment_max),
    "first max": of_rows(gather_segment_max, tie_break="first"),
    "min": of_rows(gather_segment_min),
    "attention": lambda data, weights, *ids, **edges: segment_attention(weights, data, *ids, **edges),
}
"""``(data, weights, gather_ids, segment_ids, num_segments)``"""
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def plain(name: str, data: Any, weights: Any, gather_ids: Any, segment_ids: Any, num_segments: int) -> jax.Array:
    """The function in plain JAX. Ids must be in range, or negative to be dropped."""
    rows, kind = jnp.asarray(data)[gather_ids], name.split()[-1]
    if kind in ("max", "min"):
        return getattr(jax.ops, f"segment_{kind}")(rows, segment_ids, num_segments)
    if kind == "attention":
        exponentials = jnp.exp(weights)
        denominators = jax.ops.segment_sum(exponentials, segment_ids, num_segments)
        weights = exponentials / jnp.where(segment_ids < 0, 1, denominators[segment_ids])
    if name not in ("sum", "mean"):
        rows = rows * weights[:, None]
    total = jax.ops.segment_sum(rows, segment_ids, num_segments)
    if kind != "mean":
        return total
    count = jax.ops.segment_sum(jnp.ones(len(segment_ids)), segment_ids, num_segments)
    return total / jnp.maximum(count, 1)[:, None]


def make_arrays(rng: np.random.Generator, *batch: int, nodes: int = NODES) -> tuple[np.ndarray, ...]:
    """Data without ties, weights and ids. Their sums, products and quotients by up to 5 are exact."""
    data = 60 * rng.permutation(nodes * 6).reshape(nodes, 6).astype(np.float32)
    weights = rng.integers(-2, 3, (*batch, EDGES)).astype(np.float32)
    gather_ids = rng.integers(0, nodes, (*batch, EDGES)).astype(np.int32)
    segment_ids = np.stack([np.repeat(np.arange(-2, SEGMENTS - 2), 2)] * int(np.prod(batch))).reshape(*batch, EDGES)
    order = rng.permuted(np.arange(EDGES)[None].repeat(int(np.prod(batch)), 0), axis=1).reshape(*batch, EDGES)
    return data, weights, gather_ids, np.take_along_axis(segment_ids, order, -1).astype(np.int32)


def value_and_gradients(function: Function, num_segments: int = SEGMENTS) -> Function:
    """``(data, weights, gather_ids, segment_ids, d_output)``: the value, and the gradients of data and weights."""

    def run(data: Any, weights: Any, gather_ids: Any, segment_ids: Any, d_output: Any) -> Any:
        output, vjp = jax.vjp(lambda x, w: function(x, w, gather_ids, segment_ids), data, weights)
        return output, *vjp(d_output)

    return run


def call_of(name: str, form: str = "ids") -> Function:
    """A call on one graph."""

    def call(data: Any, weights: Any, gather_ids: Any, segment_ids: Any) -> jax.Array:
        if form == "plan":
            plan = segment_plan(segment_ids, SEGMENTS, gather_ids, data.shape[0])
            return FUNCTIONS[name](data, weights, plan=plan)
        return FUNCTIONS[name](data, weights, gather_ids, segment_ids, SEGMENTS, indices_are_sorted=form == "sorted")

    return call


def plain_call(name: str) -> Function:
    return lambda *arrays: plain(name, *arrays, SEGMENTS)


def mapped(function: Function) -> Function:
    return jax.vmap(function, (None, 0, 0, 0))


@pytest.mark.parametrize("form", ["ids", "plan", "sorted"])
@each_function
def test_gradient_of_shared_rows(rng: np.random.Generator, name: str, form: str) -> None:
    """Values have the bits of single calls, and gradients agree with plain JAX."""
    data, weights, gather_ids, segment_ids = make_arrays(rng, BATCH)
    if form == "sorted":
        segment_ids = np.sort(segment_ids)
    d_output = 60 * rng.integers(-9, 9, (BATCH, SEGMENTS, 6)).astype(np.float32)
    arrays = data, weights, gather_ids, segment_ids
    output, *gradients = jax.jit(value_and_gradients(mapped(call_of(name, form))))(*arrays, d_output)
    single = jax.jit(call_of(name, form))
    for i in range(BATCH):
        cases.assert_same_bits(output[i], np.asarray(single(data, *(x[i] for x in arrays[1:]))))
    expected = jax.jit(value_and_gradients(mapped(plain_call(name))))(*arrays, d_output)
    for actual, of_plain in zip((output, *gradients), expected, strict=True):
        # The terms of attention are rounded, and some sums of them cancel.
        tolerance = {"rtol": 1e-5, "atol": 1e-6 * np.abs(of_plain).max()} if name == "attention" else {"rtol": 0}
        np.testing.assert_allclose(actual, of_plain, **tolerance)
        assert actual.dtype == of_plain.dtype


@pytest.mark.parametrize("form", ["ids", "plan"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "attention"])
def test_memory(rng: np.random.Generator, name: str, form: str) -> None:
    """A gradient allocates neither one gradient for each graph nor an array of edges times features."""
    nodes, edges, features, batch = 2000, 2000, 32, 16
    data = rng.normal(size=(nodes, features)).astype(np.float32)
    weights = rng.normal(size=(batch, edges)).astype(np.float32)
    gather_ids, segment_ids = rng.integers(0, nodes, (batch, edges)), rng.integers(0, SEGMENTS, (batch, edges))
    plans = jax.vmap(lambda g, s: segment_plan(s, SEGMENTS, g, nodes))(gather_ids, segment_ids)

    def call(data: Any, weights: Any, gather_ids: Any, segment_ids: Any, plan: SegmentPlan) -> jax.Array:
        if form == "plan":
            return FUNCTIONS[name](data, weights, plan=plan)
        return FUNCTIONS[name](data, weights, gather_ids, segment_ids, SEGMENTS)

    def loss(data: Any, *edges: Any) -> jax.Array:
        return (jax.vmap(call, (None, 0, 0, 0, 0))(data, *edges) ** 2).sum()

    lowered = jax.jit(jax.grad(loss)).lower(data, weights, gather_ids, segment_ids, plans)
    kinds = {"weighted sum": "sum", "mean": "sum", "weighted mean": "sum", "first max": "max"}
    kernel = f"gather_segment_{kinds.get(name, name)}"
    text = lowered.as_text()
    launches = re.findall(rf"@jax_baracuda\.{kernel}(_with_winner|_backward|)\(", text)
    gradient = re.findall(rf"@jax_baracuda\.{kernel}[a-z_]*\(.*", text)[-1]
    if cases.PLATFORM == "cpu":  # on GPUs the kernel comes after a sort of all graphs' edges
        # The orders of several graphs cannot be merged.
        assert not re.search("(has_plan|indices_are_sorted) = true", gradient)
    assert launches == (["_with_winner", "_backward"] if kernel[-3:] in ("max", "min") else ["", ""])
    of_edges = 4 * batch * edges  # a number for each edge: ids, probabilities, orders
    assert 8 * of_edges < 4 * nodes * features * batch / 3
    if cases.PLATFORM == "cpu":  # on GPUs, sorts need scratch memory, too
        assert lowered.compile().memory_analysis().temp_size_in_bytes < 8 * of_edges


@pytest.mark.parametrize("ids_dtype", cases.INTEGERS)
@pytest.mark.parametrize("form", ["ids", "plan"])
@pytest.mark.parametrize("name", ["weighted sum", "max"])
def test_ids_of_every_dtype(rng: np.random.Generator, name: str, form: str, ids_dtype: str) -> None:
    """Ids out of range stay out of range: they never become a segment of the next graph."""
    nodes, segments = 120, 127
    data, weights, *_ = make_arrays(rng, BATCH, nodes=nodes)
    info = np.iinfo(ids_dtype)
    low = max(info.min, -3)
    with cases.x64_for(ids_dtype):
        gather_ids = rng.integers(low, nodes + 3, (BATCH, EDGES)).astype(ids_dtype)
        segment_ids = rng.integers(low, segments + 1, (BATCH, EDGES)).astype(ids_dtype)
        gather_ids[:, :2], segment_ids[:, 2:4] = (info.min, info.max), (info.min, info.max)
        d_output = 60 * rng.integers(-9, 9, (BATCH, segments, 6)).astype(np.float32)

        def call(data: Any, weights: Any, gather_ids: Any, segment_ids: Any) -> jax.Array:
            if form == "plan":
                plan = segment_plan(segment_ids, segments, gather_ids, nodes)
                return FUNCTIONS[name](data, weights, plan=plan)
            return FUNCTIONS[name](data, weights, gather_ids, segment_ids, segments)

        arrays = data, weights, gather_ids, segment_ids
        _, d_data, d_weights = jax.jit(value_and_gradients(mapped(call)))(*arrays, d_output)
    expected = np.zeros(data.shape)
    for i in range(BATCH):
        graph = Graph(data, gather_ids[i], segment_ids[i], segments, weights[i])
        if name == "max":
            rows, row = gathered(data, gather_ids[i])
            of_edges = cases.reference_max_gradient(d_output[i], rows, segment_ids[i], "split")
            expected += cases.segment_sum(of_edges, row, nodes)
        else:
            expected += graph.gradient_of_data(d_output[i]).exact
    np.testing.assert_array_equal(d_data, expected)
    assert d_weights.shape == weights.shape


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_gradient_of_tangent_without_segments(reduction: str) -> None:
    """Graphs that share their data and have no segments."""
    data, weights = jnp.ones((7, 2)), jnp.ones((3, 5))
    ids = jnp.zeros((3, 5), jnp.int32)
    twin = getattr(forward_mode, f"gather_segment_{reduction}")

    def tangent(data: Any, weights: Any) -> jax.Array:
        mapped_twin = jax.vmap(lambda x, w, ids: twin(x, ids, ids, 0, weights=w), (None, 0, 0))
        return jax.jvp(lambda x, w: mapped_twin(x, w, ids), (data, weights), (data, weights))[1]

    output, vjp = jax.vjp(tangent, data, weights)
    for gradient, x in zip(vjp(output), (data, weights), strict=True):
        np.testing.assert_array_equal(gradient, jnp.zeros_like(x))


@pytest.mark.parametrize("name", ["sum", "max"])
@pytest.mark.parametrize(("segments", "is_joined"), [(2**30 - 1, True), (2**30, False)])
def test_more_segments_than_32_bits_number(name: str, segments: int, is_joined: bool) -> None:
    """If 32 bits cannot number the segments of two graphs together, each graph has its own gradient."""

    def gradient(data: Any, gather_ids: Any, segment_ids: Any, d_output: Any) -> Any:
        def call(data: Any) -> jax.Array:
            return jax.vmap(lambda g, s: FUNCTIONS[name](data, None, g, s, segments))(gather_ids, segment_ids)

        return jax.vjp(call, data)[1](d_output)

    types = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((5, 1), np.float32),
            ((2, 3), np.int32),
            ((2, 3), np.int32),
            ((2, segments, 1), np.float32),
        )
    ]
    assert ("_of_graphs" in str(jax.make_jaxpr(gradient)(*types))) == is_joined


# ----------------------------------------------------------------------------------------------------------------------
# Many devices.


@cases.on_four_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y")], ids=["graphs", "edges", "both"])
@pytest.mark.parametrize("name", ["weighted sum", "mean", "max"])
def test_split_batches(rng: np.random.Generator, name: str, spec: P, axis_type: AxisType) -> None:
    """Graphs that are split over devices stay there. Devices exchange one gradient of the rows."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), (axis_type,) * 2, devices=jax.devices()[:4])
    data, *edges = make_arrays(rng, 4)
    arrays = data, *edges, 60 * rng.integers(-9, 9, (4, SEGMENTS, 6)).astype(np.float32)
    run = jax.jit(value_and_gradients(mapped(call_of(name))))
    expected = run(*arrays)
    with jax.set_mesh(mesh):
        specs = P(), spec, spec, spec, P(spec[0])
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
        program = run.lower(*placed).compile()
        jax.tree.map(np.testing.assert_array_equal, program(*placed), expected)
    exchanged = re.findall(rf" = ([^=]*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", program.as_text())
    # If edges are split, each device merges a part of the extrema and winners.
    merges = {"all-to-all", "all-gather"} if name == "max" and spec != P("x") else set()
    assert {kind for _, kind in exchanged} == {"all-reduce"} | merges
    shapes = re.findall(r"\w+\[([\d,]*)\]", " ".join(types for types, _ in exchanged))
    of_rows = [shape for shape in shapes if str(NODES) in shape.split(",")]
    assert of_rows in (["40,6"], ["40,1,6"])
    assert spec != P("x") or shapes == of_rows
