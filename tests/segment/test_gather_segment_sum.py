"""Values and gradients of all functions that gather along edges; gather_segment_sum, segment_plan and the handler."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from segment.gather_reference import FORMS, call_of, check, make_graph, with_segment_data
from support import cases, handlers
from support.programs import small_floats
from support.recorded import GoodCall, direct_calls

import jax_baracuda
from jax_baracuda import SegmentPlan, gather_segment_sum, implementation, segment_plan
from jax_baracuda._examples.segment import gathered_sum

# (nodes, edges, segments, row_shape)
GRAPHS = (
    (1, 1, 1, ()),
    (5, 0, 4, (3,)),
    (6, 20, 0, (2,)),
    (7, 30, 3, (0,)),
    (50, 400, 41, ()),
    (50, 400, 41, (3,)),
    (50, 4000, 900, (3, 5)),
    (300, 9000, 700, (8,)),
    (300, 9000, 700, (4, 16)),
    (300, 9000, 5, (2, 3, 11)),
    (200, 30_000, 3, (128,)),
    (2000, 30_000, 40_000, (33,)),
    (40, 3000, 50, (1100,)),
)
# (nodes, edges, segments, row_shape, weight_dims)
GRAPHS_WITH_WEIGHTS = (
    (50, 400, 41, (), 0),
    (50, 400, 41, (3,), 0),
    (50, 4000, 900, (3, 5), 1),
    (300, 9000, 700, (4, 16), 1),
    (300, 9000, 700, (4, 16), 0),
    (300, 9000, 5, (2, 3, 4), 2),
    (300, 9000, 5, (64,), 1),
    (700, 5000, 600, (33,), 1),
    (300, 40_000, 900, (4, 32), 2),
    (2000, 30_000, 40_000, (33,), 0),
    (700, 5000, 600, (7, 20), 1),
)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, str]]] = [
    *(("sum", sizes, {}) for sizes in (*GRAPHS, *GRAPHS_WITH_WEIGHTS)),
    *(("mean", sizes, {}) for sizes in GRAPHS),
    *(
        (kind, sizes, {"tie_break": tie_break})
        for kind, tie_break in (("max", "split"), ("max", "first"), ("min", "split"))
        for sizes in GRAPHS
    ),
    *(("dot", sizes, {}) for sizes in (*GRAPHS, (1, 1, 1, (1,)), (700, 5000, 600, (1, 33))) if sizes[3]),
]


@cases.each_pair(call=CALLS, dtype=cases.FLOATING, form=FORMS)
def test_value_and_gradients(rng: np.random.Generator, call: Any, dtype: str, form: str) -> None:
    """Every size, dtype and form of ids gives the right value and gradients. Extrema are exact, also with NaN,
    infinities, zeros of both signs and ties."""
    kind, (nodes, edges, segments, row_shape, *weight_dims), options = call
    graph = make_graph(rng, nodes, edges, segments, row_shape, dtype, *weight_dims, is_sorted=form == "sorted")
    if kind in ("max", "min"):
        graph = dataclasses.replace(graph, data=cases.make_data(rng, graph.data.shape, dtype))
    if kind == "dot":
        graph = with_segment_data(rng, graph)
    of_results = (edges, *row_shape[:-1]) if kind == "dot" else (segments, *row_shape)
    check(kind, graph, form, cases.cotangent(rng, of_results, dtype), **options)


SMALL_GRAPHS: list[tuple[str, int | None, tuple[str, ...]]] = [
    *((kind, None, mapped) for kind in ("sum", "mean", "max", "min") for mapped in (("data",), ("data", "ids"))),
    *(("sum", 1, mapped) for mapped in (("data",), ("weights",), ("data", "weights"), ("data", "weights", "ids"))),
]
"""The function, the dimensions of its weights, and what the elements of a batch do not share."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row_shape", [(1,), (2, 3), (4, 5)], ids=str)
@pytest.mark.parametrize(("kind", "weight_dims", "mapped"), SMALL_GRAPHS, ids=str)
def test_batch_of_many_small_graphs(
    rng: np.random.Generator, kind: str, weight_dims: int | None, mapped: tuple[str, ...], row_shape: Any, form: str
) -> None:
    """Values and gradients under ``vmap`` of so many graphs that CPUs take several at a time."""
    dtype = str(rng.choice(cases.FLOATING))
    graph = make_graph(rng, 12, 31, 9, row_shape, dtype, weight_dims, is_sorted=form == "sorted")
    others = [make_graph(rng, 12, 31, 9, row_shape, dtype, weight_dims, is_sorted=form == "sorted") for _ in range(70)]
    own = {"data", "weights"} & {*mapped} | ({"gather_ids", "segment_ids"} if "ids" in mapped else set())
    graphs = [dataclasses.replace(graph, **{name: getattr(other, name) for name in own}) for other in others]
    d_output = np.stack([cases.cotangent(rng, (9, *row_shape), dtype) for _ in graphs])

    def run(arrays: Any, d_output: Any) -> Any:
        ids = {name: arrays.pop(name) for name in ("gather_ids", "segment_ids")}
        call = call_of(kind, dataclasses.replace(graph, **ids), form)
        output, vjp = jax.vjp(lambda arrays: call(**arrays), arrays)
        return {"value": output, **vjp(d_output)[0]}

    arrays = graph.arrays() | {"gather_ids": graph.gather_ids, "segment_ids": graph.segment_ids}
    arrays |= {name: np.stack([getattr(graph, name) for graph in graphs]) for name in own}
    axes = {name: 0 if name in own else None for name in arrays}
    with cases.x64_for(dtype), implementation("kernel"):
        results = jax.jit(jax.vmap(run, (axes, 0)))(arrays, d_output)
    for i in (0, 1, *rng.integers(2, 69, 5), 69):
        for name, allowed in graphs[i].expected(kind, d_output[i]).items():
            allowed.check(results[name][i], f"{name} of element {i}")


@pytest.mark.parametrize("ids_dtype", cases.INTEGERS)
@pytest.mark.parametrize("form", ["ids", "plan"])
def test_ids_of_every_dtype(rng: np.random.Generator, ids_dtype: str, form: str) -> None:
    """Ids may be any numbers of their dtype, up to its limits."""
    graph = make_graph(rng, 40, 3000, 30, (5,), ids_dtype=ids_dtype)
    d_output = cases.cotangent(rng, (30, 5), "float32")
    with cases.x64_for(ids_dtype):
        output, vjp = jax.vjp(call_of("sum", graph, form), graph.data)
        graph.value().check(output)
        graph.gradient_of_data(d_output).check(vjp(d_output)[0])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("form", ["ids", "plan"])
@pytest.mark.parametrize("name", ["gather_segment_sum", "gather_segment_mean", "gather_segment_dot"])
def test_second_derivatives(rng: np.random.Generator, name: str, form: str, dtype: str) -> None:
    """Derivatives of gradients are those of plain JAX, also with ids out of range, through which no gradient goes."""
    rows, edges, segments = 9, 200, 6
    senders, receivers = rng.integers(-rows - 3, rows + 3, edges), rng.integers(-2, segments + 2, edges)
    wrapped = np.where(senders < 0, senders + rows, senders)
    nearest, exists = np.clip(wrapped, 0, rows - 1), (wrapped == np.clip(wrapped, 0, rows - 1))[:, None, None]
    is_member = (receivers >= 0) & (receivers < segments)
    counts = np.maximum(np.bincount(receivers[is_member], minlength=segments), 1)[:, None, None]

    def plain(data: jax.Array, other: jax.Array) -> jax.Array:
        taken = data[nearest]
        taken = jnp.where(exists, taken, jax.lax.stop_gradient(taken))
        if name == "gather_segment_dot":
            products = (taken * other[np.clip(receivers, 0, segments - 1)]).sum(-1)
            return jnp.where(is_member[:, None], products, 0)
        ids = np.where(is_member, receivers, -1)
        total = jax.ops.segment_sum(taken * other[..., None], ids, segments)
        return total / counts if name == "gather_segment_mean" else total

    def ours(data: jax.Array, other: jax.Array) -> jax.Array:
        given = {"gather_ids": senders, "segment_ids": receivers}
        arguments = {"plan": segment_plan(receivers, segments, senders, rows)} if form == "plan" else given
        function = getattr(jax_baracuda, name)
        if name == "gather_segment_dot":
            return function(data, other, **arguments)
        return function(data, weights=other, **arguments, **({} if form == "plan" else {"num_segments": segments}))

    def of_gradients(function: Callable[..., jax.Array], data: jax.Array, other: jax.Array) -> jax.Array:
        gradients = jax.grad(lambda *x: (function(*x) ** 2).sum(), (0, 1))(data, other)
        return sum((x**2).sum() for x in gradients)

    with jax.enable_x64(True):
        shape = (segments, 2, 4) if name == "gather_segment_dot" else (edges, 2)
        operands = [jnp.asarray(rng.normal(size=x), dtype) for x in ((rows, 2, 4), shape)]
        actual = jax.jit(jax.grad(functools.partial(of_gradients, ours), (0, 1)))(*operands)
        exact = [x.astype(jnp.float64) for x in operands]
        expected = jax.grad(functools.partial(of_gradients, plain), (0, 1))(*exact)
        # Each of five passes rounds its results; the sums of a pass have terms of either sign.
        error = 1e-12 if dtype == "float64" else 5 * 2.0**-8
        for x, y in zip(actual, expected, strict=True):
            np.testing.assert_allclose(x.astype(jnp.float64), y, rtol=0, atol=error * np.abs(y).max())


# ----------------------------------------------------------------------------------------------------------------------
# Plans.


def test_plan_holds_stable_orders(rng: np.random.Generator) -> None:
    graph = make_graph(rng, 40, 3000, 30, (2,))
    plan = segment_plan(graph.segment_ids, 30, graph.gather_ids, 40)
    outside = np.where(graph.segment_ids.astype(np.int64) < 0, -1, 30)
    segments = np.where((graph.segment_ids >= 0) & (graph.segment_ids < 30), graph.segment_ids, outside)
    wrapped = graph.gather_ids + np.where(graph.gather_ids < 0, 40, 0).astype(np.int64)
    rows = np.clip(wrapped, -1, 40)
    order, transposed = (
        np.argsort(np.where(ids < 0, size, ids), kind="stable") for ids, size in ((segments, 30), (rows, 40))
    )
    expected = SegmentPlan(
        edge_order=order,
        gather_ids=rows[order],
        segment_ids=np.where(segments < 0, 30, segments)[order],
        edge_segment_ids=segments,
        transposed_order=transposed,
        transposed_gather_ids=segments[transposed],
        transposed_segment_ids=np.where(rows < 0, 40, rows)[transposed],
        edge_gather_ids=rows,
        num_segments=30,
        num_rows=40,
    )
    assert {x.dtype for x in jax.tree.leaves(plan)} == {np.dtype(np.int32)}
    jax.tree.map(np.testing.assert_array_equal, plan, expected)
    back = segment_plan(plan.edge_gather_ids, 40, np.where(segments < 0, -100, segments), 30)
    jax.tree.map(np.testing.assert_array_equal, plan.transposed, back)


def test_plan_passes_through_transformations(rng: np.random.Generator) -> None:
    """A plan may be an argument of jit, beside donated data, in a loop, and under grad, vmap and checkpoint."""
    nodes, edges, segments = 30, 500, 30
    data = small_floats(rng, nodes, 8)
    ids = rng.integers(0, nodes, edges), rng.integers(0, segments, edges)
    plan = jax.jit(segment_plan, static_argnums=(1, 3))(ids[1], segments, ids[0], nodes)
    expected = gathered_sum(jnp.asarray(data), *ids, segments)
    np.testing.assert_array_equal(jax.jit(lambda x, plan: gather_segment_sum(x, plan=plan))(data, plan), expected)
    looped, _ = jax.lax.scan(
        lambda carry, _: ((gather_segment_sum(carry[0], plan=carry[1]) % 5, carry[1]), None), (data, plan), length=3
    )
    want = data
    for _ in range(3):
        want = gathered_sum(jnp.asarray(want), *ids, segments) % 5
    np.testing.assert_array_equal(looped[0], want)
    for wrap in (lambda f: f, jax.checkpoint):
        loss = wrap(lambda x, plan: (gather_segment_sum(x, plan=plan) ** 2).sum())
        gradient = jax.jit(jax.grad(loss))(data, plan)
        np.testing.assert_array_equal(gradient, jax.grad(lambda x: (gathered_sum(x, *ids, segments) ** 2).sum())(data))
    plans = jax.tree.map(lambda *leaves: jnp.stack(leaves), plan, segment_plan(ids[0], segments, ids[1], nodes))
    both = jax.vmap(lambda plan: gather_segment_sum(data, plan=plan))(plans)
    np.testing.assert_array_equal(both[0], expected)
    np.testing.assert_array_equal(both[1], gathered_sum(jnp.asarray(data), ids[1], ids[0], segments))
    donated = jax.jit(lambda x, plan: gather_segment_sum(x, plan=plan), donate_argnums=(0,))
    np.testing.assert_array_equal(donated(jnp.array(data), plan), expected)


# ----------------------------------------------------------------------------------------------------------------------
# Errors.

DATA, IDS = np.ones((4, 3), np.float32), np.zeros(5, np.int32)
PLAN = dict(segment_ids=IDS, num_segments=2, gather_ids=IDS, num_rows=4)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (r"ValueError: one shape \[E\], got \(4,\) and \(5,\)", lambda: gather_segment_sum(DATA, IDS[1:], IDS, 2)),
        (
            r"ValueError: num_segments must be at most 2\^31 - 1, got 2147483648",
            lambda: gather_segment_sum(DATA, IDS, IDS, 2**31),
        ),
        (
            r"ValueError: at most 2\^31 - 1 rows can be gathered from, got 2147483648",
            lambda: jax.eval_shape(
                lambda data: gather_segment_sum(data, IDS, IDS, 2), jax.ShapeDtypeStruct((2**31,), np.float32)
            ),
        ),
        (r"ValueError: weights must be \[E\]", lambda: gather_segment_sum(DATA, IDS, IDS, 2, weights=np.ones(4))),
        (r"ValueError: weights must be \[E\]", lambda: gather_segment_sum(DATA, IDS, IDS, 2, weights=np.ones((5, 2)))),
        ("ValueError: mode must be None", lambda: gather_segment_sum(DATA, IDS, IDS, 2, mode="wrong")),
        (
            r"ValueError: segment_plan: num_segments must be at most 2\^31 - 1",
            lambda: segment_plan(**PLAN | {"num_segments": 2**40}),
        ),
        ("ValueError: segment_plan: num_rows must be non-negative", lambda: segment_plan(**PLAN | {"num_rows": -2})),
        ("TypeError: num_segments must be an integer", lambda: segment_plan(**PLAN | {"num_segments": 2.0})),
        ("ValueError: one shape", lambda: segment_plan(**PLAN | {"gather_ids": IDS[:3]})),
    ],
)
def test_errors(error: str, call: Callable[[], Any]) -> None:
    with cases.raises(error, "^(?=gather_segment_sum: |segment_plan: ).*"):
        call()


# ----------------------------------------------------------------------------------------------------------------------
# The handler.


def good_call(target: str, **attributes: bool) -> GoodCall:
    """A valid call with these attributes, and its operands."""
    return next(good for good in direct_calls(target) if attributes.items() <= good[0].attributes.items())


each_order = pytest.mark.parametrize("is_in_range", [True, False], ids=("one edge", "out of range"))


def no_permutation(edges: int, is_in_range: bool) -> np.ndarray:
    return np.array([0] * edges if is_in_range else [-1, 2**31 - 1, *range(2, edges)], np.int32)


@each_order
def test_products_of_edges_that_no_order_names(is_in_range: bool) -> None:
    """They are 0. Each number of another edge is that of a place that names it. Numbers out of range are clipped."""
    call, operands = good_call("gather_segment_dot", has_edge_order=True)
    batch, edges = operands["edge_order"].shape
    order = no_permutation(edges, is_in_range)
    of_places = call.results_of({**operands, "edge_order": np.tile(np.arange(edges, dtype=np.int32), (batch, 1))})
    output = call.results_of({**operands, "edge_order": np.tile(order, (batch, 1))})
    [of_places], [output], named = of_places.values(), output.values(), np.clip(order, 0, edges - 1)
    for b, edge in np.ndindex(batch, edges):
        places = of_places[b][named == edge]
        assert (output[b, edge] == (places if len(places) else np.zeros_like(output[b, :1]))).any(axis=0).all()


@pytest.mark.skipif(cases.PLATFORM != "cpu", reason="on GPUs, no kernel notes what edges won")
@each_order
def test_edges_that_no_order_names_win_nothing(is_in_range: bool) -> None:
    """Their gradient is 0, whatever the scratch memory held before."""
    call, operands = good_call("gather_segment_max_backward", has_plan=True)
    order = np.tile(no_permutation(operands["edge_order"].shape[1], is_in_range), (len(operands["edge_order"]), 1))
    operands = {**operands, "winner": np.full_like(operands["winner"], -1), "edge_order": order}
    libc, m_perturb = ctypes.CDLL(None), -6
    try:
        assert libc.mallopt(m_perturb, 0xAA)  # new memory has the other bits
        d_data = call.results_of(operands)["d_data"]
    finally:
        libc.mallopt(m_perturb, 0)
    np.testing.assert_array_equal(d_data, 0)


@pytest.mark.skipif(cases.PLATFORM != "cpu", reason="GPUs add in another order")
def test_edges_without_a_row_among_others(rng: np.random.Generator) -> None:
    """The gradient adds the edges of a row in order, bit by bit, also where some of them have no segment."""
    edges, nodes, segments = 100_000, 20_000, 50
    gather_ids = np.sort(rng.integers(0, nodes, edges)).astype(np.int32)
    segment_ids = np.where(rng.random(edges) < 0.3, segments + 1, rng.integers(0, segments, edges)).astype(np.int32)
    cotangents = (rng.standard_normal(segments) * 10 ** rng.uniform(-3, 3, segments)).astype(np.float32)
    expected = np.zeros(nodes, np.float32)
    exists = segment_ids < segments
    np.add.at(expected, gather_ids[exists], cotangents[segment_ids[exists]])
    with implementation("kernel"):
        _, pull = jax.vjp(lambda x: gather_segment_sum(x, gather_ids, segment_ids, segments), jnp.zeros(nodes))
        np.testing.assert_array_equal(pull(cotangents)[0], expected)


@pytest.mark.skipif(cases.PLATFORM == "cpu", reason="the CPU kernels take edges in any order")
@pytest.mark.parametrize("target", ["gather_segment_sum", "gather_segment_max", "gather_segment_min_with_winner"])
def test_unsorted_edges_are_refused(target: str) -> None:
    call, _ = good_call(target, indices_are_sorted=True)
    unsorted = dataclasses.replace(call, attributes={**call.attributes, "indices_are_sorted": False})
    handlers.assert_refused(unsorted, "unsorted", "indices_are_sorted")


def test_weights_and_a_plan_in_plain_jax(rng: np.random.Generator) -> None:
    """Weights and their gradient are in the order of the ids, not in the order of the plan."""
    data, weights = small_floats(rng, 20, 3), small_floats(rng, 400)
    gather_ids, segment_ids = rng.integers(0, 20, 400), rng.integers(0, 11, 400)  # id 10 is out of range
    cotangent = small_floats(rng, 10, 3)
    plan = segment_plan(segment_ids, 10, gather_ids, 20)
    output, pull_back = jax.vjp(
        lambda x, w: gather_segment_sum(x, weights=w, plan=plan, implementation="xla"), data, weights
    )
    expected, d_data, of_segment = np.zeros((10, 3)), np.zeros((20, 3)), np.concatenate([cotangent, np.zeros((1, 3))])
    inside = segment_ids < 10
    np.add.at(expected, segment_ids[inside], (weights[:, None] * data[gather_ids])[inside])
    np.add.at(d_data, gather_ids, weights[:, None] * of_segment[segment_ids])
    np.testing.assert_array_equal(output, expected)
    gradients = pull_back(cotangent)
    np.testing.assert_array_equal(gradients[0], d_data)
    np.testing.assert_array_equal(gradients[1], (data[gather_ids] * of_segment[segment_ids]).sum(axis=1))
