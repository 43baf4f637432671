"""jraphx: layers of graph networks, trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jraphx.nn import conv, norm, pool

NODES, EDGES, WIDTH, STEPS = 300, 2000, 16, 4


def mlp(inputs: int, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(inputs, WIDTH, rngs=rngs), nnx.relu)


LAYERS: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "SAGEConv, mean": lambda rngs: conv.SAGEConv(WIDTH, WIDTH, rngs=rngs),
    "SAGEConv, max": lambda rngs: conv.SAGEConv(WIDTH, WIDTH, aggr="max", rngs=rngs),
    "GATConv": lambda rngs: conv.GATConv(WIDTH, WIDTH // 4, heads=4, rngs=rngs),
    "GATv2Conv": lambda rngs: conv.GATv2Conv(WIDTH, WIDTH // 4, heads=4, rngs=rngs),
    "GCNConv": lambda rngs: conv.GCNConv(WIDTH, WIDTH, rngs=rngs),
    "GINConv": lambda rngs: conv.GINConv(mlp(WIDTH, rngs), train_eps=True),
    "EdgeConv": lambda rngs: conv.EdgeConv(mlp(2 * WIDTH, rngs)),
    "TransformerConv": lambda rngs: conv.TransformerConv(WIDTH, WIDTH // 4, heads=4, rngs=rngs),
}
CALLS = {"SAGEConv, max": ["jax.ops.segment_max"], "EdgeConv": ["jax.ops.segment_max"]}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_trained(rng: np.random.Generator, compare_redirected: Callable[..., Any], name: str) -> None:
    with jax.enable_x64():  # in float32, Adam would divide rounding errors by themselves
        train_layer(rng, compare_redirected, name)


def train_layer(rng: np.random.Generator, compare_redirected: Callable[..., Any], name: str) -> None:
    rngs = nnx.Rngs(0)
    graph, state, others = nnx.split((LAYERS[name](rngs), norm.GraphNorm(WIDTH, rngs=rngs)), nnx.Param, ...)
    state = jax.tree.map(lambda x: x.astype(jnp.float64), state)
    nodes = jnp.asarray(rng.normal(size=(NODES, WIDTH)))
    edge_index = jnp.asarray(rng.integers(0, NODES, (2, EDGES)))
    batch = jnp.sort(jnp.asarray(rng.integers(0, 5, NODES)))
    target = jnp.asarray(rng.normal(size=(5, WIDTH)))
    optimiser = optax.adam(1e-2)

    def loss(state: Any, edge_index: jax.Array) -> jax.Array:
        layer, normalise = nnx.merge(graph, state, others)
        hidden = normalise(layer(nodes, edge_index), batch, 5)
        return jnp.mean((pool.global_mean_pool(hidden, batch, 5) - target) ** 2)

    def train(state: Any, edge_index: jax.Array) -> Any:
        def step(carry: Any, _: None) -> Any:
            state, moments = carry
            value, gradient = jax.value_and_grad(loss)(state, edge_index)
            updates, moments = optimiser.update(gradient, moments)
            return (optax.apply_updates(state, updates), moments), value

        (state, _), losses = jax.lax.scan(step, (state, optimiser.init(state)), length=STEPS)
        return losses, jax.grad(loss)(state, edge_index)

    losses, _ = compare_redirected(
        f"jraphx, {name}",
        train,
        state,
        edge_index,
        calls=CALLS.get(name, ["jax.ops.segment_sum"]),
        rtol=1e-8,
        atol=1e-10,
    )
    assert losses[-1] < losses[0]
