"""Times training steps of jraph's and jraphx's layers as they are and redirected, on a graph of arxiv's size.

Beside them, what the same layer takes where it is written with this package's functions and a plan.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np
from flax import nnx
from jraphx.nn import conv

import jax_baracuda as jb
from jax_baracuda._examples import graph_networks
from jax_baracuda._tools.table import format_table

NODES, EDGES, WIDTH, HEADS = 169_343, 1_166_243, 128, 8
POWER, REPEATS = 2.5, 11

Step = Callable[[Any, jax.Array], Any]
"""``(weights, features of nodes) -> (loss, gradients of the weights)``"""


def make_edges(nodes: int, edges: int) -> tuple[jax.Array, jax.Array]:
    """Senders, uniform, and receivers by a power law."""
    rng = np.random.default_rng(0)
    receivers = rng.permutation(nodes)[(nodes * rng.random(edges) ** POWER).astype(np.int64)]
    return jnp.asarray(rng.integers(0, nodes, edges), jnp.int32), jnp.asarray(receivers, jnp.int32)


def training_step(model: Callable[[Any, jax.Array], jax.Array]) -> Step:
    return jax.value_and_grad(lambda weights, nodes: jnp.mean(model(weights, nodes) ** 2))


def of_jraphx(layer: nnx.Module, senders: jax.Array, receivers: jax.Array) -> tuple[Step, Any]:
    graph, weights, others = nnx.split(layer, nnx.Param, ...)
    edge_index = jnp.stack([senders, receivers])
    return training_step(lambda weights, nodes: nnx.merge(graph, weights, others)(nodes, edge_index)), weights


def of_jraph(senders: jax.Array, receivers: jax.Array, nodes: int) -> Iterator[tuple[str, Step, Any]]:
    graph = jraph.GraphsTuple(
        nodes=None,
        edges=None,
        globals=None,
        senders=senders,
        receivers=receivers,
        n_node=jnp.array([nodes]),
        n_edge=jnp.array([senders.size]),
    )
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, jnp.float32)

    def convolution(weight: jax.Array, h: jax.Array) -> jax.Array:
        layer = jraph.GraphConvolution(lambda h: h @ weight, symmetric_normalization=True)
        return layer(graph._replace(nodes=h)).nodes

    def interaction(weights: Any, h: jax.Array) -> jax.Array:
        network = jraph.GraphNetwork(
            update_edge_fn=lambda edges, sent, received, _: jax.nn.relu(
                jnp.concatenate([sent, received], -1) @ weights[0]
            ),
            update_node_fn=lambda h, sent, received, _: jax.nn.relu(jnp.concatenate([h, received], -1) @ weights[1]),
        )
        return network(graph._replace(nodes=h)).nodes

    yield "jraph GraphConvolution", training_step(convolution), normal(WIDTH, WIDTH)
    yield "jraph GraphNetwork", training_step(interaction), [normal(2 * WIDTH, WIDTH) for _ in range(2)]


def cases(nodes: int, edges: int) -> Iterator[tuple[str, Step, Any, Step | None, Any]]:
    """Name, step and weights; step and weights of this package's functions, where they make the same layer."""
    senders, receivers = make_edges(nodes, edges)
    plan = jax.jit(jb.segment_plan, static_argnums=(1, 3))(receivers, nodes, senders, nodes)
    rngs = nnx.Rngs(0)
    size = WIDTH // HEADS
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(2 * WIDTH, WIDTH)) * 0.06, jnp.float32)

    def fused(model: Any) -> Step:
        return graph_networks.training_step(model, graph_networks.Ours())

    def with_plan(step: Any) -> Step:
        return lambda weights, h: step(weights, h, {"plan": plan})

    sage_max = with_plan(fused(functools.partial(graph_networks.sage, "max")))
    sage_sum = with_plan(fused(functools.partial(graph_networks.sage, "sum")))
    gat_weights = (weight[:WIDTH], *(jnp.full((HEADS, size), 0.1) for _ in range(2)))
    layers: list[tuple[str, nnx.Module, Step | None, Any]] = [
        ("jraphx SAGEConv, max", conv.SAGEConv(WIDTH, WIDTH, aggr="max", rngs=rngs), sage_max, [weight]),
        ("jraphx SAGEConv, mean", conv.SAGEConv(WIDTH, WIDTH, rngs=rngs), sage_sum, [weight]),
        (
            "jraphx GATConv",
            conv.GATConv(WIDTH, size, heads=HEADS, rngs=rngs),
            with_plan(fused(graph_networks.gat)),
            gat_weights,
        ),
        ("jraphx GCNConv", conv.GCNConv(WIDTH, WIDTH, rngs=rngs), None, None),
        ("jraphx GINConv", conv.GINConv(nnx.Linear(WIDTH, WIDTH, rngs=rngs)), None, None),
    ]
    for name, layer, of_ours, our_weights in layers:
        yield name, *of_jraphx(layer, senders, receivers), of_ours, our_weights
    for name, step, weights in of_jraph(senders, receivers, nodes):
        yield name, step, weights, None, None


def milliseconds(programs: list[Callable[[], Any]]) -> list[float]:
    """Medians; the programs take turns."""
    rounds = []
    for _ in range(REPEATS + 2):
        times = []
        for program in programs:
            start = time.perf_counter()
            jax.block_until_ready(program())
            times.append((time.perf_counter() - start) * 1e3)
        rounds.append(times)
    return [statistics.median(times) for times in zip(*rounds[2:], strict=True)]


def main(scale: int) -> None:
    """
    Args:
      scale: by how much the graph is smaller than arxiv's.
    """
    nodes, edges = NODES // scale, EDGES // scale
    h = jax.random.normal(jax.random.key(0), (nodes, WIDTH))
    rows = []
    for name, step, weights, of_ours, our_weights in cases(nodes, edges):
        redirect = jb.redirect(gather_gradients=True, indexed_updates=True)
        programs = [(jax.jit(step), weights), (jax.jit(redirect(step)), weights)]
        if of_ours is not None:
            programs.append((jax.jit(of_ours), our_weights))
        compiled = [(program.lower(w, h).compile(), w) for program, w in programs]
        memory = [program.memory_analysis().temp_size_in_bytes / 2**20 for program, _ in compiled]
        times = milliseconds([functools.partial(program, w, h) for program, w in compiled])
        plain, redirected, *fused = times
        texts = [f"{time:.2f} ms, {mib:.0f} MiB" for time, mib in zip(times, memory, strict=True)]
        rows.append((name, *texts, *[""] * (3 - len(texts)), f"{plain / redirected:.2f}"))
        print(f"{name}: {redirect.report}".replace("\n", "; "), file=sys.stderr)
    print(f"{nodes} nodes, {edges} edges, {WIDTH} features, on {jax.devices()[0].device_kind}")
    print(format_table(("layer", "as it is", "redirected", "own functions", "ratio"), rows))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
