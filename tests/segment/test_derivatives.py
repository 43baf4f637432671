"""Derivatives of all segment functions, for every form of the ids."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from segment.reference import plain_mean, plain_prod, plain_softmax, plain_sum
from support import cases

import jax_baracuda
from jax_baracuda import Implementation, forward_mode, segment_plan

NODES, EDGES, SEGMENTS = 5, 7, 3
SENDERS, RECEIVERS = np.array([4, 0, 1, 0, 3, 2, 4]), np.array([2, 0, 2, 0, 1, -1, 2])


def plain_max(data: jax.Array, ids: np.ndarray, segments: int) -> jax.Array:
    """The maximum, for data without ties and without empty segments."""
    return jnp.stack([data[ids == segment].max(axis=0) for segment in range(segments)])


def plain_min(data: jax.Array, ids: np.ndarray, segments: int) -> jax.Array:
    return -plain_max(-data, ids, segments)


OF_ROWS = {"sum": plain_sum, "mean": plain_mean, "max": plain_max, "min": plain_min, "prod": plain_prod}
OF_EDGES = ("sum", "mean", "max", "min")
FORMS = ("ids", "sorted ids", "plan", "plan of a graph")

Function = Callable[..., jax.Array]


def functions_of(name: str, form: str, module: Any = jax_baracuda, **options: Any) -> tuple[Function, Function]:
    """The function ``(data [EDGES or NODES, 2], logits [EDGES, 2])`` with this form of ids, and its plain JAX."""
    senders, receivers = SENDERS, RECEIVERS
    if form == "sorted ids":
        order = np.argsort(receivers, kind="stable")
        senders, receivers = senders[order], receivers[order]
    if form == "plan of a graph" or (form == "plan" and name in ("segment_attention", *map(of_edges, OF_EDGES))):
        edges: dict[str, Any] = {"plan": segment_plan(receivers, SEGMENTS, senders, NODES)}
    elif form == "plan":
        edges = {"plan": segment_plan(receivers, SEGMENTS)}
    else:
        edges = {"segment_ids": receivers, "num_segments": SEGMENTS, "indices_are_sorted": form == "sorted ids"}
        if name == "segment_attention" or name.startswith("gather"):
            edges["gather_ids"] = senders
    ours = functools.partial(getattr(module, name), **options)
    if name == "segment_attention":

        def attention(data: jax.Array, logits: jax.Array) -> jax.Array:
            weights = plain_softmax(logits, receivers, SEGMENTS)
            return plain_sum(data[senders] * weights, receivers, SEGMENTS)

        return lambda data, logits: ours(logits, data, **edges), attention
    if name == "segment_softmax":
        return lambda data, _: ours(data, **edges), lambda data, _: plain_softmax(data, receivers, SEGMENTS)
    reduce = OF_ROWS[name.rpartition("_")[2]]
    if name.startswith("gather"):
        return lambda data, _: ours(data, **edges), lambda data, _: reduce(data[senders], receivers, SEGMENTS)
    return lambda data, _: ours(data, **edges), lambda data, _: reduce(data, receivers, SEGMENTS)


def of_edges(kind: str) -> str:
    return f"gather_segment_{kind}"


NAMES = (*(f"segment_{kind}" for kind in OF_ROWS), "segment_softmax", *map(of_edges, OF_EDGES), "segment_attention")
each_function = pytest.mark.parametrize("name", NAMES)
each_form = pytest.mark.parametrize("form", FORMS)


def problem_of(rng: np.random.Generator, name: str) -> tuple[np.ndarray, np.ndarray]:
    rows = NODES if name == "segment_attention" or name.startswith("gather") else EDGES
    data = rng.permutation(2 * rows).reshape(rows, 2) / rows - 0.9  # no ties, no zeros
    return data.astype(np.float32), rng.normal(size=(EDGES, 2)).astype(np.float32)


@each_form
@each_function
def test_forward_over_reverse(rng: np.random.Generator, name: str, form: str) -> None:
    """Hessians and their products with tangents, alone and in a batch, agree with reverse over reverse of plain JAX."""
    ours, plain = functions_of(name, form)
    arrays = problem_of(rng, name)
    tangents = tuple(rng.normal(size=x.shape).astype(x.dtype) for x in arrays)
    batch = tuple(np.stack([x, x[::-1]]) for x in arrays)

    def gradient(function: Function) -> Callable[..., Any]:
        return jax.grad(lambda *x: (function(*x) ** 3).sum(), argnums=(0, 1))

    def push(*x: jax.Array) -> Any:
        return jax.jvp(gradient(ours), x, tangents)[1]

    @jax.jit
    def forward_over_reverse() -> Any:
        hessian = jax.jacfwd(gradient(ours), argnums=(0, 1))(*arrays)
        return hessian, push(*arrays), jax.vmap(push)(*batch)

    @jax.jit
    def reverse_over_reverse(arrays: Any, tangents: Any, batch: Any) -> Any:
        hessian = jax.jacrev(gradient(plain), argnums=(0, 1))

        def product(*x: jax.Array) -> Any:
            rows = (zip(row, tangents, strict=True) for row in hessian(*x))
            return tuple(sum(jnp.tensordot(h, v, v.ndim) for h, v in row) for row in rows)

        return hessian(*arrays), product(*arrays), jax.vmap(product)(*batch)

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), (arrays, tangents, batch))
        expected = reverse_over_reverse(*wide)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), forward_over_reverse(), expected)


OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(("segment_max", "segment_min"), ({}, {"tie_break": "first"}, {"bucket_size": 2})),
    **dict.fromkeys(("gather_segment_max", "gather_segment_min"), ({}, {"tie_break": "first"})),
    "segment_sum": ({}, {"bucket_size": 2}),
    "segment_prod": ({}, {"bucket_size": 2}),
}


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("form", ["ids", "plan of a graph"])
@each_function
def test_strict_promotion(name: str, form: str, implementation: Implementation) -> None:
    """No derivative needs implicit promotion of dtypes or ranks."""
    rows = NODES if name == "segment_attention" or name.startswith("gather") else EDGES
    arrays = jax.ShapeDtypeStruct((rows, 2), jnp.bfloat16), jax.ShapeDtypeStruct((EDGES, 2), jnp.bfloat16)
    for options in OPTIONS.get(name, ({},)):
        if form == "plan of a graph" and "bucket_size" in options:
            continue  # plans refuse buckets
        function, twin = (
            functions_of(name, form, module, **options, implementation=implementation)[0]
            for module in (jax_baracuda, forward_mode)
        )
        gradient = jax.grad(lambda *x, f=function: (f(*x) ** 2).sum(), argnums=(0, 1))

        def derivatives(*x: Any, gradient: Callable[..., Any] = gradient, twin: Function = twin) -> Any:
            return jax.jvp(twin, x, x), jax.jvp(gradient, x, x), jax.vjp(gradient, *x)[1](x)

        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            jax.jit(derivatives).lower(*arrays)
            jax.jit(jax.vmap(gradient)).lower(*(jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in arrays))


OF_DATA = ("max", "min", "mean", "sum", "prod", "argmax", "argmin")


def public_calls(dtype: str, implementation: Implementation) -> list[Callable[..., Any]]:
    """``(data, ids, cells)``: reductions and public gradients."""

    def ours(name: str, *args: Any) -> Any:
        return getattr(jax_baracuda, name)(*args, implementation=implementation)

    names = [x for x in OF_DATA if not (dtype == "bool" and x in ("sum", "prod"))]
    calls = [lambda x, ids, _, name=name: ours(f"segment_{name}", x, ids, SEGMENTS) for name in names]
    if jnp.issubdtype(dtype, jnp.floating):
        calls += [
            *(lambda x, ids, d, k=kind: ours(f"segment_{k}_backward", d, x, ids) for kind in ("max", "min", "prod")),
            *(lambda x, ids, d, k=kind: ours(f"segment_{k}_backward", d, ids) for kind in ("sum", "mean")),
            lambda x, ids, _: ours("segment_softmax_backward", x, x, ids, SEGMENTS),
            lambda x, ids, d: jax.vjp(lambda y: ours("take_rows", y, ids), d)[1](x),
            lambda x, ids, d: jax.vjp(lambda y: ours("take_rows", y, ids[None]), d)[1](x[None]),
        ]
    return calls


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("dtype", ["int8", "uint32", "bool", "bfloat16", "float32"])
def test_strict_promotion_of_values_and_public_gradients(dtype: str, implementation: Implementation) -> None:
    shapes = ((EDGES, 2), dtype), ((EDGES,), np.int16), ((SEGMENTS, 2), dtype)
    for call in public_calls(dtype, implementation):
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            jax.jit(call).lower(*(jax.ShapeDtypeStruct(*x) for x in shapes))
            jax.jit(jax.vmap(call)).lower(*(jax.ShapeDtypeStruct((2, *shape), dtype) for shape, dtype in shapes))


@cases.on_two_devices
@pytest.mark.parametrize("kind", ["segment_max", "segment_min", "segment_prod", "gather_segment_max"])
def test_strict_promotion_in_the_programs_of_shards(kind: str) -> None:
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    data, ids = (jax.device_put(x, NamedSharding(mesh, P("x"))) for x in (np.ones((4, 3), jnp.bfloat16), np.arange(4)))
    edges = (ids, ids) if kind.startswith("gather") else (ids,)

    def loss(data: jax.Array, edges: tuple[jax.Array, ...]) -> jax.Array:
        return (getattr(jax_baracuda, kind)(data, *edges, 4) ** 2).sum()

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.jit(jax.grad(loss)).lower(data, edges).compile()
