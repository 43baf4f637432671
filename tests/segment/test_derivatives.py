"""Derivatives of all segment functions: the modes in which they are taken, and every way to give the ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from segment.reference import plain_mean, plain_prod, plain_softmax, plain_sum

import jax_baracuda
from jax_baracuda import segment_plan

NODES, EDGES, SEGMENTS = 5, 7, 3
SENDERS, RECEIVERS = np.array([4, 0, 1, 0, 3, 2, 4]), np.array([2, 0, 2, 0, 1, -1, 2])


def plain_max(data: jax.Array, ids: np.ndarray, segments: int) -> jax.Array:
    """Without ties and empty segments."""
    return jnp.stack([data[ids == segment].max(axis=0) for segment in range(segments)])


def plain_min(data: jax.Array, ids: np.ndarray, segments: int) -> jax.Array:
    return -plain_max(-data, ids, segments)


def plain_take(data: jax.Array, ids: np.ndarray) -> jax.Array:
    return data[np.maximum(ids, 0)]


OF_ROWS = {"sum": plain_sum, "mean": plain_mean, "max": plain_max, "min": plain_min, "prod": plain_prod}
OF_EDGES = ("sum", "mean", "max", "min")
FORMS = ("ids", "sorted ids", "plan", "plan of a graph")

Function = Callable[..., jax.Array]


def functions_of(name: str, form: str) -> tuple[Function, Function]:
    """The function ``(data [EDGES or NODES, 2], logits [EDGES, 2])`` with ids given in this form, and in plain JAX."""
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
    ours = getattr(jax_baracuda, name)
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
    """Hessians, and their products with tangents, alone and in a batch, against reverse over reverse of plain JAX."""
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
            return tuple(
                sum(jnp.tensordot(h, v, v.ndim) for h, v in zip(row, tangents, strict=True)) for row in hessian(*x)
            )

        return hessian(*arrays), product(*arrays), jax.vmap(product)(*batch)

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), (arrays, tangents, batch))
        expected = reverse_over_reverse(*wide)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), forward_over_reverse(), expected)
