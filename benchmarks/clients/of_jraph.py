"""jraph: training steps of a graph network over a batch of small graphs, and of graph attention over one graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import jraph
import numpy as np

import jax_baracuda as jb
from benchmarks.clients import Program

SIZE_OF, SIZES = "edges", (2000, 60_000)
EDGES_PER_NODE, EDGES_PER_GRAPH, WIDTH = 6, 100, 32
PARTS_OF_INPUTS = {"edges": 4, "nodes": 4, "globals": 3}
"""How many arrays of features the graph network concatenates to update edges, nodes and globals."""

Model = Callable[[Any, jraph.GraphsTuple], jax.Array]


def random_graphs(graphs: int, edges: int, dtype: Any) -> jraph.GraphsTuple:
    """A batch of graphs that have `edges` edges each."""
    rng = np.random.default_rng(0)
    nodes = edges // EDGES_PER_NODE
    first_nodes = np.repeat(np.arange(graphs) * nodes, edges)
    senders, receivers = jnp.asarray(first_nodes + rng.integers(0, nodes, (2, graphs * edges)), jnp.int32)
    return jraph.GraphsTuple(
        nodes=jnp.asarray(rng.normal(size=(graphs * nodes, WIDTH)), dtype),
        edges=jnp.asarray(rng.normal(size=(graphs * edges, WIDTH)), dtype),
        globals=jnp.zeros((graphs, WIDTH), dtype),
        senders=senders,
        receivers=receivers,
        n_node=jnp.full(graphs, nodes),
        n_edge=jnp.full(graphs, edges),
    )


def random_weights(dtype: Any, **shapes: tuple[int, int]) -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, dtype) for name, shape in shapes.items()}


def graph_network(weights: Any, graph: jraph.GraphsTuple) -> jax.Array:
    def dense(name: str) -> Callable[..., jax.Array]:
        return lambda *parts: jax.nn.relu(jnp.concatenate(parts, axis=-1) @ weights[name])

    network = jraph.GraphNetwork(dense("edges"), dense("nodes"), dense("globals"))
    return network(network(graph)).globals


def graph_attention(weights: Any, graph: jraph.GraphsTuple) -> jax.Array:
    layer = jraph.GAT(
        lambda nodes: nodes @ weights["query"],
        lambda sent, received, _: jax.nn.leaky_relu((sent + received) @ weights["logit"]),
    )
    return layer(graph).nodes


def our_gat(query: Callable[..., jax.Array], logit: Callable[..., jax.Array]) -> Callable[..., jraph.GraphsTuple]:
    """Replaces jraph's layer."""

    def apply(graph: jraph.GraphsTuple) -> jraph.GraphsTuple:
        plan = graph.globals
        nodes = query(graph.nodes)
        sent, received = jb.take_rows(nodes, plan=plan.transposed), jb.take_rows(nodes, plan=plan)
        attended = jb.segment_attention(logit(sent, received, graph.edges)[:, 0], nodes, plan=plan)
        return graph._replace(nodes=jax.nn.leaky_relu(attended))

    return apply


def with_our_gat() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(jraph, "GAT", our_gat)


def training_step(model: Model, weights: Any, graph: jraph.GraphsTuple, is_exact: bool, **options: Any) -> Program:
    def loss(weights: Any, graph: jraph.GraphsTuple) -> jax.Array:
        return jnp.mean(jnp.square(model(weights, graph).astype(jnp.float32)))

    tolerances = {} if is_exact else {"rtol": 0.05, "atol": 0.05}
    return Program(jax.value_and_grad(loss), (weights, graph), **tolerances, **options)


def network_program(dtype: Any, edges: int) -> Program:
    weights = random_weights(dtype, **{name: (parts * WIDTH, WIDTH) for name, parts in PARTS_OF_INPUTS.items()})
    graph = random_graphs(edges // EDGES_PER_GRAPH, EDGES_PER_GRAPH, dtype)
    return training_step(graph_network, weights, graph, dtype == jnp.float32)


def attention_program(dtype: Any, edges: int) -> Program:
    graph = random_graphs(1, edges, dtype)
    nodes = len(graph.nodes)
    # jraph's layer ignores globals. They carry the plan to ours.
    graph = graph._replace(globals=jb.segment_plan(graph.receivers, nodes, graph.senders, nodes))
    weights = random_weights(dtype, query=(WIDTH, WIDTH), logit=(WIDTH, 1))
    return training_step(graph_attention, weights, graph, dtype == jnp.float32, edit=with_our_gat)


PROGRAMS: dict[str, Callable[[int], Program]] = {
    f"{name}, {jnp.dtype(dtype)}": functools.partial(make, dtype)
    for name, make in (("GraphNetwork", network_program), ("GAT", attention_program))
    for dtype in (jnp.float32, jnp.bfloat16)
}
