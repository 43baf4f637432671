"""Graph neural networks, with this package's functions or in plain JAX: GraphSAGE, GCN, GAT, GATv2, graph transformers,
edge networks and SchNet.

Benchmarks time their training steps, and tests examine what XLA compiles them to.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jax_baracuda as jb
from jax_baracuda._examples.segment import gather, gathered_sum, softmax

Reduction = Literal["max", "sum"]

SLOPE = 0.2
"""The slope of the leaky ReLU in the logits of GAT and GATv2."""

Edges = dict[str, Any]
"""A plan, or the ids of senders and receivers, by the argument names of this package's functions."""


@dataclasses.dataclass(frozen=True)
class Ours:
    """The functions of this package that models need."""

    num_segments: int | None = None
    """None if the edges are a plan."""

    def max(self, h: jax.Array, edges: Edges) -> jax.Array:
        return jb.gather_segment_max(h, num_segments=self.num_segments, **edges)

    def sum(self, h: jax.Array, edges: Edges) -> jax.Array:
        return jb.gather_segment_sum(h, num_segments=self.num_segments, **edges)

    def weighted_sum(self, h: jax.Array, weights: jax.Array, edges: Edges) -> jax.Array:
        return jb.gather_segment_sum(h, weights=weights, num_segments=self.num_segments, **edges)

    def of_senders(self, values: jax.Array, edges: Edges) -> jax.Array:
        plan = edges.get("plan")
        return jb.take_rows(values, edges["gather_ids"]) if plan is None else jb.take_rows(values, plan=plan.transposed)

    def of_receivers(self, values: jax.Array, edges: Edges) -> jax.Array:
        plan = edges.get("plan")
        return jb.take_rows(values, edges["segment_ids"]) if plan is None else jb.take_rows(values, plan=plan)

    def attention(self, logits: jax.Array, h: jax.Array, edges: Edges) -> jax.Array:
        return jb.segment_attention(logits, h, num_segments=self.num_segments, **edges)

    def dot_product_attention(self, query: jax.Array, key: jax.Array, value: jax.Array, edges: Edges) -> jax.Array:
        return jb.graph_dot_product_attention(query, key, value, **edges)

    def additive_attention(self, query: jax.Array, key: jax.Array, weights: jax.Array, edges: Edges) -> jax.Array:
        return jb.graph_additive_attention(query, key, weights, negative_slope=SLOPE, **edges)

    def sum_of_edges(self, messages: jax.Array, edges: Edges) -> jax.Array:
        plan = edges.get("plan")
        if plan is None:
            return jb.segment_sum(messages, edges["segment_ids"], self.num_segments)
        return jb.segment_sum(messages, plan=plan)


@dataclasses.dataclass(frozen=True)
class OursOfSortedEdges(Ours):
    """The functions for a plan of edges that are in the order of their receivers, as in the recipe of edge networks."""

    def of_receivers(self, values: jax.Array, edges: Edges) -> jax.Array:
        return jb.take_rows(values, edges["plan"].segment_ids, indices_are_sorted=True)

    def sum_of_edges(self, messages: jax.Array, edges: Edges) -> jax.Array:
        plan = edges["plan"]
        return jb.segment_sum(messages, plan.segment_ids, plan.num_segments, indices_are_sorted=True)


@dataclasses.dataclass(frozen=True)
class Plain:
    """The same in plain JAX. Ids must be in range; no gradient flows through the maximum in the softmax."""

    num_segments: int

    def max(self, h: jax.Array, edges: Edges) -> jax.Array:
        return jax.ops.segment_max(gather(h, edges["gather_ids"]), edges["segment_ids"], self.num_segments)

    def sum(self, h: jax.Array, edges: Edges) -> jax.Array:
        return gathered_sum(h, num_segments=self.num_segments, **edges)

    def of_senders(self, values: jax.Array, edges: Edges) -> jax.Array:
        return gather(values, edges["gather_ids"])

    def of_receivers(self, values: jax.Array, edges: Edges) -> jax.Array:
        return gather(values, edges["segment_ids"])

    def attention(self, logits: jax.Array, h: jax.Array, edges: Edges) -> jax.Array:
        weights = softmax(logits, edges["segment_ids"], self.num_segments)
        return gathered_sum(h, num_segments=self.num_segments, weights=weights, **edges)

    def dot_product_attention(self, query: jax.Array, key: jax.Array, value: jax.Array, edges: Edges) -> jax.Array:
        products = self.of_receivers(query, edges) * self.of_senders(key, edges)
        return self.attention(products.sum(-1) / math.sqrt(query.shape[-1]), value, edges)

    def additive_attention(self, query: jax.Array, key: jax.Array, weights: jax.Array, edges: Edges) -> jax.Array:
        sums = self.of_receivers(query, edges) + self.of_senders(key, edges)
        return self.attention((weights * jax.nn.leaky_relu(sums, SLOPE)).sum(-1), key, edges)

    def weighted_sum(self, h: jax.Array, weights: jax.Array, edges: Edges) -> jax.Array:
        weights = weights.reshape(weights.shape[0], -1)
        return self.sum_of_edges(self.of_senders(h, edges) * weights, edges)

    def sum_of_edges(self, messages: jax.Array, edges: Edges) -> jax.Array:
        return jax.ops.segment_sum(messages, edges["segment_ids"], self.num_segments)


Model = Callable[[Ours | Plain, Sequence[jax.Array], Any, Edges], jax.Array]
"""``(functions, weights, features, edges) -> features of nodes``. The features are those of nodes; for edge networks,
those of nodes and those of edges; for GCN, those of nodes and the weights of edges; for SchNet, those of nodes and
their positions."""


def training_step(model: Model, ops: Ours | Plain) -> Callable[..., Any]:
    """``(weights, features, edges) -> (loss, gradients of the weights)``"""

    def loss(weights: Sequence[jax.Array], features: Any, edges: Edges) -> jax.Array:
        return jnp.mean(model(ops, weights, features, edges) ** 2)

    return jax.value_and_grad(loss)


def sage(
    reduction: Reduction, ops: Ours | Plain, weights: Sequence[jax.Array], h: jax.Array, edges: Edges
) -> jax.Array:
    """GraphSAGE; nodes without edges aggregate to 0."""
    for w in weights:
        if reduction == "max":
            messages = ops.max(h, edges)
            messages = jnp.where(messages == -jnp.inf, 0, messages)
        else:
            messages = ops.sum(h, edges)
        h = jax.nn.relu(jnp.concatenate([h, messages], axis=-1) @ w)
    return h


def gcn(
    ops: Ours | Plain, weights: Sequence[jax.Array], features: tuple[jax.Array, jax.Array], edges: Edges
) -> jax.Array:
    """Graph convolutions: each edge has a weight, as in a normalized adjacency matrix."""
    h, of_edges = features
    for w in weights:
        h = jax.nn.relu(ops.weighted_sum(h @ w, of_edges, edges))
    return h


def gat(ops: Ours | Plain, weights: Sequence[jax.Array], x: jax.Array, edges: Edges) -> jax.Array:
    """A layer of graph attention."""
    w, of_sender, of_receiver = weights
    h = (x @ w).reshape(-1, *of_sender.shape)
    logits = ops.of_senders((h * of_sender).sum(-1), edges) + ops.of_receivers((h * of_receiver).sum(-1), edges)
    return ops.attention(jax.nn.leaky_relu(logits, SLOPE), h, edges)


def graph_transformer(ops: Ours | Plain, weights: Sequence[jax.Array], x: jax.Array, edges: Edges) -> jax.Array:
    """A layer of dot-product attention over the edges. Weights are ``[features, heads, features of a head]``."""
    query, key, value = (jnp.tensordot(x, w, 1) for w in weights)
    return ops.dot_product_attention(query, key, value, edges)


def gatv2(ops: Ours | Plain, weights: Sequence[jax.Array], x: jax.Array, edges: Edges) -> jax.Array:
    """A layer of additive attention over the edges, with weights as above and those of the logits."""
    query, key = (jnp.tensordot(x, w, 1) for w in weights[:2])
    return ops.additive_attention(query, key, weights[2], edges)


ProductOfEnds = Callable[[Ours | Plain, jax.Array, jax.Array, jax.Array, Edges], jax.Array]
"""``(functions, matrix, features of edges, features of nodes, edges) -> matrix · [edge, sender, receiver]``"""


def product_of_concatenation(ops: Ours | Plain, w: jax.Array, e: jax.Array, x: jax.Array, edges: Edges) -> jax.Array:
    return jnp.concatenate([e, ops.of_senders(x, edges), ops.of_receivers(x, edges)], axis=-1) @ w


def sum_of_products(ops: Ours | Plain, w: jax.Array, e: jax.Array, x: jax.Array, edges: Edges) -> jax.Array:
    of_edge, of_sender, of_receiver = jnp.split(w, 3)
    return e @ of_edge + ops.of_senders(x @ of_sender, edges) + ops.of_receivers(x @ of_receiver, edges)


def edge_network(
    product: ProductOfEnds,
    ops: Ours | Plain,
    weights: Sequence[jax.Array],
    features: tuple[jax.Array, jax.Array],
    edges: Edges,
) -> jax.Array:
    """Steps of message passing with residual nodes and edges, as in MeshGraphNets and GraphCast.

    Messages and updates of nodes are networks of two matrices each: four matrices for each step.
    """
    x, e = features
    for first in range(0, len(weights), 4):
        of_ends, of_message, of_node, of_update = weights[first : first + 4]
        messages = jax.nn.silu(product(ops, of_ends, e, x, edges)) @ of_message
        received = ops.sum_of_edges(messages, edges)
        e = e + messages
        x = x + jax.nn.silu(jnp.concatenate([x, received], axis=-1) @ of_node) @ of_update
    return x


NUM_RADIAL, CUTOFF = 50, 20.0
"""SchNet: the radial functions of a distance, and the largest of their centers."""


def schnet(
    ops: Ours | Plain, weights: Sequence[jax.Array], features: tuple[jax.Array, jax.Array], edges: Edges
) -> jax.Array:
    """The energy of each atom and the force on it, ``[N, 4]``, by continuous filters: weights as wide as the features.

    Forces are derivatives of energies by positions, so a training step takes second derivatives. A layer has five
    matrices: two of filters, one each of senders, sums and updates. The last matrix reads energies.
    """
    x, positions = features
    *of_layers, readout = weights
    centers = jnp.linspace(0, CUTOFF, NUM_RADIAL)

    def total_energy(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        offsets = ops.of_senders(positions, edges) - ops.of_receivers(positions, edges)
        distances = jnp.sqrt((offsets**2).sum(-1) + 1e-6)
        radial, h = jnp.exp(-((distances[:, None] - centers) ** 2)), x
        for first in range(0, len(of_layers), 5):
            of_radial, of_filter, of_sender, of_sum, of_update = of_layers[first : first + 5]
            filters = jax.nn.softplus(radial @ of_radial) @ of_filter
            sums = ops.weighted_sum(h @ of_sender, filters, edges)
            h = h + jax.nn.softplus(sums @ of_sum) @ of_update
        energies = h @ readout
        return energies.sum(), energies

    gradient, energies = jax.grad(total_energy, has_aux=True)(positions)
    return jnp.concatenate([energies, -gradient], axis=-1)
