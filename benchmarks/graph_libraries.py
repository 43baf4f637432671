"""Times training steps of jraph's and jraphx's layers as they are and redirected, on a graph of arxiv's size.

It also times some of the layers written with this package's functions and a plan.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np
from flax import nnx
from jraphx.nn import conv

import jax_baracuda as jb
from benchmarks import graph_networks
from jax_baracuda._tools.command_line import integer_from, parser_of, run
from jax_baracuda._tools.table import format_table

NODES, EDGES, WIDTH, HEADS = 169_343, 1_166_243, 128, 8
POWER, REPEATS = 2.5, 11

Step = Callable[[Any, jax.Array, Any], Any]
"""``(weights, features of nodes, edges) -> (loss, gradients of the weights)``"""


def make_edges(nodes: int, edges: int) -> tuple[jax.Array, jax.Array]:
    """Uniform senders, and receivers by a power law."""
    rng = np.random.default_rng(0)
    receivers = rng.permutation(nodes)[(nodes * rng.random(edges) ** POWER).astype(np.int64)]
    return jnp.asarray(rng.integers(0, nodes, edges), jnp.int32), jnp.asarray(receivers, jnp.int32)


def training_step(model: Callable[[Any, jax.Array, jax.Array], jax.Array]) -> Step:
    return jax.value_and_grad(lambda weights, nodes, edges: jnp.mean(model(weights, nodes, edges) ** 2))


def of_jraphx(layer: nnx.Module) -> tuple[Step, Any]:
    graph, weights, others = nnx.split(layer, nnx.Param, ...)
    return training_step(lambda weights, h, edges: nnx.merge(graph, weights, others)(h, edges)), weights


def of_jraph(nodes: int, edges: int) -> Iterator[tuple[str, Step, Any]]:
    rng = np.random.default_rng(1)

    def graph(h: jax.Array, edge_index: jax.Array) -> jraph.GraphsTuple:
        senders, receivers = edge_index
        counts = {"n_node": jnp.array([nodes]), "n_edge": jnp.array([edges])}
        return jraph.GraphsTuple(nodes=h, edges=None, globals=None, senders=senders, receivers=receivers, **counts)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, jnp.float32)

    def convolution(weight: jax.Array, h: jax.Array, edge_index: jax.Array) -> jax.Array:
        layer = jraph.GraphConvolution(lambda h: h @ weight, symmetric_normalization=True)
        return layer(graph(h, edge_index)).nodes

    def interaction(weights: Any, h: jax.Array, edge_index: jax.Array) -> jax.Array:
        def dense(weight: jax.Array, *parts: jax.Array) -> jax.Array:
            return jax.nn.relu(jnp.concatenate(parts, axis=-1) @ weight)

        network = jraph.GraphNetwork(
            update_edge_fn=lambda edges, sent, received, _: dense(weights[0], sent, received),
            update_node_fn=lambda h, sent, received, _: dense(weights[1], h, received),
        )
        return network(graph(h, edge_index)).nodes

    yield "jraph GraphConvolution", training_step(convolution), normal(WIDTH, WIDTH)
    yield "jraph GraphNetwork", training_step(interaction), [normal(2 * WIDTH, WIDTH) for _ in range(2)]


def cases(nodes: int, edges: int) -> Iterator[tuple[str, Step, Any, Step | None, Any]]:
    """Name, step and weights; then step and weights of this package's functions, if they have the same aggregation."""
    rngs = nnx.Rngs(0)
    size = WIDTH // HEADS
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(2 * WIDTH, WIDTH)) * 0.06, jnp.float32)

    def fused(model: Any) -> Step:
        return graph_networks.training_step(model, graph_networks.Ours())

    sage_max = fused(functools.partial(graph_networks.sage, "max"))
    gat_weights = (weight[:WIDTH], *(jnp.full((HEADS, size), 0.1) for _ in range(2)))
    layers: list[tuple[str, nnx.Module, Step | None, Any]] = [
        ("jraphx SAGEConv, max", conv.SAGEConv(WIDTH, WIDTH, aggr="max", rngs=rngs), sage_max, [weight]),
        ("jraphx SAGEConv, mean", conv.SAGEConv(WIDTH, WIDTH, rngs=rngs), None, None),
        ("jraphx GATConv", conv.GATConv(WIDTH, size, heads=HEADS, rngs=rngs), fused(graph_networks.gat), gat_weights),
        ("jraphx GCNConv", conv.GCNConv(WIDTH, WIDTH, rngs=rngs), None, None),
        ("jraphx GINConv", conv.GINConv(nnx.Linear(WIDTH, WIDTH, rngs=rngs)), None, None),
    ]
    for name, layer, of_ours, our_weights in layers:
        yield name, *of_jraphx(layer), of_ours, our_weights
    for name, step, weights in of_jraph(nodes, edges):
        yield name, step, weights, None, None


def compile_step(step: Step, inputs: tuple[Any, ...]) -> Any:
    return jax.jit(step).lower(*inputs).compile()


def milliseconds(programs: list[Callable[[], Any]]) -> list[float]:
    """Median times. The programs take turns."""
    rounds = []
    for _ in range(REPEATS + 2):
        times = []
        for program in programs:
            start = time.perf_counter()
            jax.block_until_ready(program())
            times.append((time.perf_counter() - start) * 1e3)
        rounds.append(times)
    return [statistics.median(times) for times in zip(*rounds[2:], strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = parser_of("benchmarks.graph_libraries", __doc__, {0: "all layers were measured"})
    parser.add_argument("--scale", type=integer_from(1), default=1, help="how many times smaller the graph is")
    scale = parser.parse_args(arguments).scale
    nodes, edges = NODES // scale, EDGES // scale
    h = jax.random.normal(jax.random.key(0), (nodes, WIDTH))
    senders, receivers = make_edges(nodes, edges)
    edge_index = jnp.stack([senders, receivers])
    plan = jax.jit(jb.segment_plan, static_argnums=(1, 3))(receivers, nodes, senders, nodes)
    rows = []
    for name, step, weights, of_ours, our_weights in cases(nodes, edges):
        redirect = jb.redirect()
        inputs = (weights, h, edge_index)
        compiled = [(compile_step(step, inputs), inputs), (redirect(compile_step)(step, inputs), inputs)]
        if of_ours is not None:
            inputs = (our_weights, h, {"plan": plan})
            compiled.append((compile_step(of_ours, inputs), inputs))
        memory = [program.memory_analysis().temp_size_in_bytes / 2**20 for program, _ in compiled]
        times = milliseconds([functools.partial(program, *inputs) for program, inputs in compiled])
        texts = [f"{time:.2f} ms, {mib:.0f} MiB" for time, mib in zip(times, memory, strict=True)]
        rows.append((name, *texts, *[""] * (3 - len(texts))))
        print(f"{name}: {redirect.report}".replace("\n", "; "), file=sys.stderr)
    print(f"{nodes} nodes, {edges} edges, {WIDTH} features, on {jax.devices()[0].device_kind}")
    print(format_table(("layer", "as it is", "redirected", "own functions, plan"), rows))
    return 0


if __name__ == "__main__":
    run(main)
