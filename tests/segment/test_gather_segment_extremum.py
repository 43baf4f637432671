"""gather_segment_max and gather_segment_min: subnormal numbers, hot segments, transformations, memory, errors."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from segment.gather_reference import FORMS, call_of, check, function_of, hot_graph, make_graph
from support import cases
from support.kernels import kernels_of
from support.programs import temp_bytes

import jax_baracuda
from jax_baracuda import Implementation, forward_mode, segment_plan

each_kind = pytest.mark.parametrize("kind", ["max", "min"])


@pytest.mark.parametrize("implementation", [None, "kernel", "xla"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tie_break", ["split", "first"])
@each_kind
def test_subnormal_numbers(
    rng: np.random.Generator, kind: str, tie_break: str, form: str, implementation: Implementation | None
) -> None:
    """Value and derivatives tell subnormal numbers from zeros, also if their implementations are chosen separately."""
    graph = make_graph(rng, 30, 90, 20, (3,), "float32", is_sorted=form == "sorted")
    magnitudes = rng.integers(0, 3, graph.data.shape).astype(np.uint32).view(np.float32)
    graph = dataclasses.replace(graph, data=np.where(rng.random(magnitudes.shape) < 0.4, -magnitudes, magnitudes))
    d_output = cases.cotangent(rng, (20, 3), "float32")
    call = call_of(kind, graph, form, tie_break=tie_break, implementation=implementation)
    output, pull_back = jax.vjp(call, jnp.asarray(graph.data))
    expected = graph.expected(kind, d_output, tie_break)
    expected["value"].check(output, "value")
    expected["data"].check(pull_back(d_output)[0], "gradient")
    # The pushforward is the transpose of the pullback.
    tangent = rng.normal(size=graph.data.shape)
    twin = functools.partial(getattr(forward_mode, f"gather_segment_{kind}"), tie_break=tie_break)
    ids = graph.gather_ids, graph.segment_ids, 20
    pushed = jax.jvp(
        lambda x: twin(x, *ids, implementation=implementation), (graph.data,), (tangent.astype(np.float32),)
    )[1]
    product = (expected["data"].exact * tangent).sum()
    np.testing.assert_allclose((np.asarray(pushed, np.float64) * d_output).sum(), product, 1e-5, 1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tie_break", ["split", "first", None], ids=["max", "first max", "sum"])
@pytest.mark.parametrize("features", [1, 33, 64, 300])
def test_hot_segment_among_few_edges(rng: np.random.Generator, features: int, tie_break: str | None, form: str) -> None:
    """Most edges have one segment and gather one row: on GPUs, more edges than a block takes at once."""
    graph = hot_graph(rng, (features,), form)
    d_output = cases.cotangent(rng, (graph.num_segments, features), "float32")
    if tie_break is None:
        check("sum", graph, form, d_output)
    else:
        with_ties = dataclasses.replace(graph, data=np.round(graph.data))
        check("max", with_ties, form, d_output, tie_break=tie_break)


# ----------------------------------------------------------------------------------------------------------------------
# Transformations.


SECOND_DERIVATIVES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "forward over reverse": lambda loss: lambda x, v: jax.jvp(jax.grad(loss), (x,), (v,))[1],
    "reverse over reverse": lambda loss: jax.grad(lambda x, v: (jax.grad(loss)(x) * v).sum()),
}
"""``loss -> (data, vector) -> Hessian times vector``"""


def sum_of_cubes(call: Callable[[Any], jax.Array]) -> Callable[[Any], jax.Array]:
    def loss(data: Any) -> jax.Array:
        output = call(data)
        return (jnp.where(jnp.isfinite(output), output, 0) ** 3).sum()

    return loss


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tie_break", ["split", "first"])
@each_kind
def test_second_derivatives(rng: np.random.Generator, kind: str, tie_break: str, form: str) -> None:
    """Winners and shares are constants, also with ties, NaN, ids out of range and segments without edges."""
    graph = make_graph(rng, 20, 90, 30, (3,), is_sorted=form == "sorted")
    data = rng.integers(-2, 3, (20, 3)).astype(np.float32)
    data[4, 1] = np.nan
    graph = dataclasses.replace(graph, data=data)
    call = call_of(kind, graph, form, tie_break=tie_break)
    output, jacobian = jax.jit(lambda data: (call(data), jax.jacrev(call)(data)))(data)
    output, jacobian = np.asarray(output, np.float64), np.asarray(jacobian, np.float64)  # the first derivative
    output = np.where(np.isfinite(output), output, 0)
    vector = rng.normal(size=data.shape).astype(np.float32)
    tangent = np.einsum("sfng,ng->sf", jacobian, vector.astype(np.float64))
    expected = np.einsum("sfng,sf->ng", jacobian, 6 * output * tangent)
    assert np.abs(expected).max() > 1
    for mode, transform in SECOND_DERIVATIVES.items():
        actual = jax.jit(transform(sum_of_cubes(call)))(data, vector)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max(), err_msg=mode)
    twin = functools.partial(getattr(forward_mode, f"gather_segment_{kind}"), tie_break=tie_break)
    ids = graph.gather_ids, graph.segment_ids, graph.num_segments
    plan = segment_plan(ids[1], ids[2], ids[0], len(data))
    bound = functools.partial(twin, plan=plan) if form == "plan" else lambda x: twin(x, *ids)
    actual = jax.jit(lambda data, vector: jax.jvp(bound, (data,), (vector,))[1])(data, vector)
    np.testing.assert_allclose(actual, tangent, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["ids", "plan"])
@pytest.mark.parametrize("mapped", [False, True], ids=["one", "batch"])
def test_no_array_of_edges_times_features_in_second_derivatives(
    rng: np.random.Generator, mapped: bool, form: str
) -> None:
    """If the first of equal edges wins, second derivatives need no such array."""
    nodes, edges, segments, features = 100, 50_000, 100, 64
    batch = (2,) if mapped else ()
    data, vector = rng.normal(size=(2, nodes, features)).astype(np.float32)
    ids = rng.integers(0, nodes, (*batch, edges)), rng.integers(0, segments, (*batch, edges))

    def product(data: Any, vector: Any, *ids: Any) -> Any:
        def of_graph(data: Any, gather_ids: Any, segment_ids: Any) -> jax.Array:
            plan = segment_plan(segment_ids, segments, gather_ids, nodes) if form == "plan" else None
            own_ids = () if form == "plan" else (gather_ids, segment_ids, segments)
            return function_of("max")(data, *own_ids, tie_break="first", plan=plan)

        call = jax.vmap(of_graph, (None, 0, 0)) if mapped else of_graph
        return [t(sum_of_cubes(lambda x: call(x, *ids)))(data, vector) for t in SECOND_DERIVATIVES.values()]

    part = 4 if cases.PLATFORM == "cpu" else 2  # on GPUs, sorts need scratch memory, too
    messages = 4 * edges * features * math.prod(batch)
    assert temp_bytes(product, data, vector, *ids) < messages / part


@pytest.mark.parametrize("kind", ["max", "min", "mean", "sum"])
def test_no_array_of_edges_times_features(rng: np.random.Generator, kind: str) -> None:
    """Neither the forward pass nor the gradient of data allocates such an array, on any back end."""
    nodes, edges, segments, features = 100, 50_000, 100, 256
    graph = make_graph(rng, nodes, edges, segments, (features,))

    def loss(data: jax.Array, gather_ids: jax.Array, segment_ids: jax.Array) -> jax.Array:
        return (function_of(kind)(data, gather_ids, segment_ids, segments) ** 2).sum()

    of_gradient = temp_bytes(jax.grad(loss), graph.data, graph.gather_ids, graph.segment_ids)
    assert of_gradient < edges * features  # a quarter of the messages


@pytest.mark.parametrize(
    ("edges", "segments", "features", "platform", "runs_kernel"),
    [
        (30_000, 3_000, 64, "cuda", False),
        (30_000, 300_000, 64, "cuda", True),
        (30_000, 300_000, 16, "cuda", False),
        (100, 100, 4, "cpu", False),
        (100, 100, 16, "cpu", True),
    ],
)
def test_few_edges_are_left_to_xla(
    monkeypatch: pytest.MonkeyPatch,
    cuda_module: None,
    edges: int,
    segments: int,
    features: int,
    platform: str,
    runs_kernel: bool,
) -> None:
    """Unless plain JAX would decode many cells of empty segments, and on CPUs only narrow rows."""
    cases.use_rules(monkeypatch)
    ids = jax.ShapeDtypeStruct((edges,), "int32")
    called = kernels_of(
        lambda data, ids: jax_baracuda.gather_segment_max(data, ids, ids, segments),
        *(jax.ShapeDtypeStruct((1000, features), "float32"), ids),
        platform=platform,
    )
    assert ("gather_segment_max" in called) == runs_kernel


# ----------------------------------------------------------------------------------------------------------------------
# Errors.

DATA, IDS = np.ones((4, 3), np.float32), np.zeros(5, np.int32)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (r"TypeError: floating dtype, got \(5,\) of int32", lambda f: f(IDS, IDS, IDS, 2)),
        ("TypeError: num_segments must be given, or a plan", lambda f: f(DATA, IDS, IDS)),
        ("ValueError: must have rows for 5 edges", lambda f: f(DATA[:0], IDS, IDS, 2)),
        ("ValueError: num_segments must be non-negative, got -1", lambda f: f(DATA, IDS, IDS, -1)),
        ("ValueError: for 4 rows, got data.shape", lambda f: f(DATA[:3], plan=segment_plan(IDS, 2, IDS, 4))),
    ],
)
@pytest.mark.parametrize("kind", ["max", "min", "mean", "sum"])
def test_errors(kind: str, error: str, call: Callable[..., Any]) -> None:
    with cases.raises(error, f"^gather_segment_{kind}: .*"):
        call(function_of(kind))


def test_tie_break_is_checked() -> None:
    with pytest.raises(ValueError, match="gather_segment_max: tie_break must be 'split' or 'first', got 'last'"):
        jax_baracuda.gather_segment_max(DATA, IDS, IDS, 2, tie_break="last")
