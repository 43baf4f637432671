"""Training steps of graph neural networks: loss and gradients of all weights, in one compiled program."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jax_baracuda as jb
from benchmarks.graph import Graph, make_edges
from benchmarks.graph_networks import (
    CUTOFF,
    NUM_RADIAL,
    SLOPE,
    Model,
    Ours,
    OursOfSortedEdges,
    Plain,
    edge_network,
    gat,
    gatv2,
    gcn,
    graph_transformer,
    product_of_concatenation,
    sage,
    schnet,
    sum_of_products,
    training_step,
)
from benchmarks.harness import Case, Contender, JaxContender, TorchContender, torch
from benchmarks.record import OURS, PROGRAMS, WITH_GRADIENT, XLA

try:
    import torch_geometric.utils as geometric
except ImportError:
    geometric = None

SAGE_MAX, SAGE_SUM, GCN, GAT = "GraphSAGE-max", "GraphSAGE-sum", "GCN", "GAT"
GRAPH_TRANSFORMER, GATV2, EDGE_NETWORK, SCHNET = "graph transformer", "GATv2", "edge network", "SchNet"
MODELS: dict[str, Model] = {
    SAGE_MAX: functools.partial(sage, "max"),
    SAGE_SUM: functools.partial(sage, "sum"),
    GCN: gcn,
    GAT: gat,
    GRAPH_TRANSFORMER: graph_transformer,
    GATV2: gatv2,
    EDGE_NETWORK: functools.partial(edge_network, product_of_concatenation),
    SCHNET: schnet,
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A model over a graph. All layers have the same number of features."""

    model: str
    graph: Graph
    layers: int = 1
    heads: int = 1
    dtype: str = "float32"

    @property
    def variant(self) -> str:
        """Heads, layers and dtype."""
        heads = f"{self.heads} heads, " if self.heads > 1 else ""
        return f"{heads}{self.layers} {'layer' if self.layers == 1 else 'layers'}, {self.dtype}"

    def weight_shapes(self) -> list[tuple[int, ...]]:
        """GraphSAGE and GCN: a matrix per layer. GAT: a matrix, and the logits' weights for senders and for receivers.
        Graph transformer: matrices of queries, keys and values. GATv2: those of queries and keys, and the logits'
        weights. Edge network: two matrices of messages and two of nodes for each layer. SchNet: five matrices for each
        layer, and one for energies."""
        width, of_heads = self.graph.features, (self.heads, self.graph.features // self.heads)
        if self.model == GAT:
            return [(width, width), *[of_heads] * 2]
        if self.model == GRAPH_TRANSFORMER:
            return [(width, *of_heads)] * 3
        if self.model == GATV2:
            return [*[(width, *of_heads)] * 2, of_heads]
        if self.model == EDGE_NETWORK:
            return [(3 * width, width), (width, width), (2 * width, width), (width, width)] * self.layers
        if self.model == SCHNET:
            return [*[(NUM_RADIAL, width), *[(width, width)] * 4] * self.layers, (width, 1)]
        return [(width if self.model == GCN else 2 * width, width)] * self.layers


SMALL_EDGES, SMALL_STEPS = 1_000_000, 20
"""On GPUs, steps over fewer edges are timed in a loop of this many steps inside ``jax.jit``, because starting a program
from Python takes longer than such a step. On CPUs, steps take longer, and XLA drops the barrier between equal steps."""
SMALL = Graph("small", 30_000, 200_000, 64, 1.5)
TINY = Graph("tiny", 2_708, 10_556, 64, 1.0)
MESH = Graph("mesh", 40_962, 491_544, 256, 1.0)
"""As many nodes as an icosahedron whose triangles are split six times; 12 edges for each."""
GPU_PROGRAMS = (
    Program(SAGE_MAX, Graph("arxiv", 169_343, 1_166_243, 128, 2.5), layers=3),
    Program(SAGE_SUM, Graph("arxiv", 169_343, 1_166_243, 256, 2.5), layers=3),
    Program(SAGE_MAX, Graph("arxiv", 169_343, 1_166_243, 128, 2.5), layers=3, dtype="bfloat16"),
    Program(SAGE_MAX, Graph("large", 2_449_029, 30_000_000, 32, 2.0), layers=2),
    *(
        Program(GCN, Graph("even", 169_343, 2_332_486, 256, 1.0), layers=3, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ),
    Program(GAT, Graph("arxiv", 169_343, 1_166_243, 128, 1.7), heads=8),
    Program(GRAPH_TRANSFORMER, Graph("arxiv", 169_343, 1_166_243, 128, 1.7), heads=8),
    Program(GRAPH_TRANSFORMER, Graph("arxiv", 169_343, 1_166_243, 256, 1.7), heads=4, dtype="bfloat16"),
    Program(GATV2, Graph("arxiv", 169_343, 1_166_243, 128, 1.7), heads=8),
    *(Program(EDGE_NETWORK, MESH, layers=2, dtype=dtype) for dtype in ("float32", "bfloat16")),
    Program(SCHNET, Graph("atoms", 20_000, 640_000, 128, 1.0), layers=3),
    Program(SAGE_MAX, SMALL, layers=3),
    Program(SAGE_SUM, SMALL, layers=3),
    Program(SAGE_MAX, TINY, layers=3),
)
CPU_PROGRAMS = (
    *(Program(model, graph, layers=3) for graph in (SMALL, TINY) for model in (SAGE_MAX, SAGE_SUM)),
    *(Program(model, SMALL, heads=4) for model in (GRAPH_TRANSFORMER, GATV2)),
)


def cases(backend: str, quick: bool = False) -> Iterator[Case]:
    """All cases for a kind of device. Quick runs use small versions of all GPU cases."""
    for program in GPU_PROGRAMS if backend == "gpu" or quick else CPU_PROGRAMS:
        if quick:
            program = dataclasses.replace(program, graph=program.graph.quick())
        yield Case(
            op=PROGRAMS,
            size=f"{program.model} {program.graph.size}",
            variant=program.variant,
            what=WITH_GRADIENT,
            floor_bytes=floor_bytes(program),
            make_contenders=functools.partial(contenders, program),
            tolerance=2e-2 if program.dtype == "float32" else 1e-1,  # Products in TF32; sums in bfloat16.
        )


def floor_bytes(program: Program) -> int:
    """Bytes of features, ids, weights of edges and of the model, loss and gradients."""
    graph = program.graph
    weights = sum(map(math.prod, program.weight_shapes()))
    rows = graph.nodes + (graph.edges if program.model == EDGE_NETWORK else 0)
    of_edges = graph.edges if program.model == GCN else 0
    element_bytes = jnp.dtype(program.dtype).itemsize
    return element_bytes * (rows * graph.features + of_edges + 2 * weights + 1) + 8 * graph.edges


def contenders(program: Program) -> Iterator[Contender]:
    """This package with and without a plan, plain JAX unchanged and redirected, torch_geometric eager and compiled."""
    graph, nodes = program.graph, program.graph.nodes
    senders, receivers = make_edges(graph)
    x = jax.random.normal(jax.random.key(1), (nodes, graph.features), program.dtype)
    weights = [
        jax.random.normal(jax.random.key(2 + index), shape, program.dtype) / math.sqrt(max(shape))
        for index, shape in enumerate(program.weight_shapes())
    ]
    plan_of = jax.jit(jb.segment_plan, static_argnums=(1, 3))
    ids = {"gather_ids": senders, "segment_ids": receivers}
    if program.model == EDGE_NETWORK:
        e = jax.random.normal(jax.random.key(0), (graph.edges, graph.features), program.dtype)
        order = jnp.argsort(receivers)
        of_sorted = {"plan": plan_of(receivers[order], nodes, senders[order], nodes)}
        step = training_step(functools.partial(edge_network, sum_of_products), OursOfSortedEdges())
        yield of_step(OURS, "recipe", program, step, weights, (x, e[order]), of_sorted)
        yield of_jax(OURS, "no plan", program, Ours(nodes), weights, (x, e), ids)
        yield of_jax(XLA, "", program, Plain(nodes), weights, (x, e), ids)
        return
    plan = plan_of(receivers, nodes, senders, nodes)
    if program.model == SCHNET:
        positions = jax.random.uniform(jax.random.key(0), (nodes, 3), maxval=CUTOFF)
        yield of_jax(OURS, "plan", program, Ours(), weights, (x, positions), {"plan": plan})
        yield of_jax(OURS, "no plan", program, Ours(nodes), weights, (x, positions), ids)
        yield of_jax(XLA, "", program, Plain(nodes), weights, (x, positions), ids)
        return
    features: Any = x
    if program.model == GCN:
        features = x, jax.random.uniform(jax.random.key(0), (graph.edges,), program.dtype)
    yield of_jax(OURS, "plan", program, Ours(), weights, features, {"plan": plan})
    yield of_jax(OURS, "no plan", program, Ours(nodes), weights, features, ids)
    yield of_jax(XLA, "", program, Plain(nodes), weights, features, ids)
    step = training_step(MODELS[program.model], Plain(nodes))
    yield of_step(OURS, "plain JAX, redirected", program, step, weights, features, ids, contender=RedirectedContender)
    if geometric is None or not torch.cuda.is_available():
        return
    torch.set_float32_matmul_precision("high")  # TF32, which is JAX's default.
    torch.compiler.reset()  # Else each program would count as a recompilation of the previous one.
    step = torch_step(program, jax.tree.map(torch.from_dlpack, features), *map(torch.from_dlpack, (senders, receivers)))
    operands = [torch.from_dlpack(w) for w in weights]
    one = torch.ones((), device=operands[0].device)
    for formulation, function in (("eager", step), ("compiled", torch.compile(step, dynamic=False))):
        yield TorchContender("torch_geometric", formulation, function, *operands, cotangent=one, compiles=True)


def of_jax(
    library: str, formulation: str, program: Program, ops: Ours | Plain, weights: list[jax.Array], *operands: Any
) -> JaxContender:
    """The step of a program with the operations of one library."""
    return of_step(library, formulation, program, training_step(MODELS[program.model], ops), weights, *operands)


class RedirectedContender(JaxContender):
    """A function in plain JAX, compiled inside ``redirect``."""

    def prepare(self) -> None:
        with jb.redirect():
            super().prepare()


def of_step(
    library: str,
    formulation: str,
    program: Program,
    step: Callable[..., Any],
    weights: list[jax.Array],
    *operands: Any,
    contender: type[JaxContender] = JaxContender,
) -> JaxContender:
    is_short = jax.default_backend() == "gpu" and program.graph.edges < SMALL_EDGES
    steps = SMALL_STEPS if is_short else 1
    untyped: Any = weights
    return contender(library, formulation, repeated(step, steps), untyped, *operands, repetitions=steps)


def repeated(step: Callable[..., Any], steps: int) -> Callable[..., Any]:
    """Runs equal steps one after another in a loop."""
    if steps == 1:
        return step

    def run(*operands: Any) -> Any:
        # The barrier keeps XLA from hoisting the loop-invariant step out of the loop.
        def next_step(_: Any, results: Any) -> Any:
            return step(*jax.lax.optimization_barrier((operands, results))[0])

        return jax.lax.fori_loop(1, steps, next_step, step(*operands))

    return run


def torch_step(program: Program, features: Any, senders: Any, receivers: Any) -> Callable[..., Any]:
    """The loss as a function of the weights, with torch_geometric's operations."""
    nodes, senders, receivers = program.graph.nodes, senders.long(), receivers.long()
    x, of_edges = features if program.model == GCN else (features, None)
    reduce = "max" if program.model == SAGE_MAX else "sum"

    def sage_loss(*weights: Any) -> Any:
        h = x
        for w in weights:
            messages = geometric.scatter(h.index_select(0, senders), receivers, 0, nodes, reduce)
            h = torch.relu(torch.cat([h, messages], -1) @ w)
        return h.square().mean()

    def gcn_loss(*weights: Any) -> Any:
        h = x
        for w in weights:
            messages = (h @ w).index_select(0, senders) * of_edges.unsqueeze(-1)
            h = torch.relu(geometric.scatter(messages, receivers, 0, nodes, "sum"))
        return h.square().mean()

    def gat_loss(w: Any, of_sender: Any, of_receiver: Any) -> Any:
        h = (x @ w).view(-1, *of_sender.shape)
        by_sender, by_receiver = (h * of_sender).sum(-1), (h * of_receiver).sum(-1)
        logits = by_sender.index_select(0, senders) + by_receiver.index_select(0, receivers)
        return attention_loss(torch.nn.functional.leaky_relu(logits, SLOPE), h)

    def attention_loss(logits: Any, values: Any) -> Any:
        weights = geometric.softmax(logits, receivers, num_nodes=nodes)
        messages = weights.unsqueeze(-1) * values.index_select(0, senders)
        return geometric.scatter(messages, receivers, 0, nodes, "sum").square().mean()

    def transformer_loss(*weights: Any) -> Any:
        query, key, value = (torch.tensordot(x, w, 1) for w in weights)
        products = query.index_select(0, receivers) * key.index_select(0, senders)
        return attention_loss(products.sum(-1) / math.sqrt(query.shape[-1]), value)

    def gatv2_loss(of_query: Any, of_key: Any, of_logits: Any) -> Any:
        query, key = (torch.tensordot(x, w, 1) for w in (of_query, of_key))
        sums = query.index_select(0, receivers) + key.index_select(0, senders)
        return attention_loss((of_logits * torch.nn.functional.leaky_relu(sums, SLOPE)).sum(-1), key)

    losses = {GCN: gcn_loss, GAT: gat_loss, GRAPH_TRANSFORMER: transformer_loss, GATV2: gatv2_loss}
    return losses.get(program.model, sage_loss)
