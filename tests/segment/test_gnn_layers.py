"""Layers of graph neural networks on our functions, against the same layers on jax.ops in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases

import jax_baracuda as jb

NODES, EDGES, HEADS, WIDTH = 24, 90, 2, 6
FEATURES = HEADS * WIDTH
EDGE_FEATURES = 3
LAYERS = 3

# ----------------------------------------------------------------------------------------------------------------------
# Graphs: the aggregations that layers need, by our functions and by JAX's.


@dataclasses.dataclass(frozen=True)
class Ours:
    """A graph on our functions: by the ids of edges in any order, by sorted ids, or by a plan."""

    senders: Any
    receivers: Any
    num_nodes: int
    form: str = "ids"
    dtype: Any = None
    """The dtype of aggregated rows. None: the dtype of the features."""

    def _edges(self) -> dict[str, Any]:
        if self.form == "plan":
            return {"plan": self._plan()}
        ids = {"gather_ids": self.senders, "segment_ids": self.receivers, "num_segments": self.num_nodes}
        return {**ids, "indices_are_sorted": self.form == "sorted"}

    def _plan(self) -> jb.SegmentPlan:
        return jb.segment_plan(self.receivers, self.num_nodes, self.senders, self.num_nodes)

    def _aggregated(self, function: Callable[..., jax.Array], x: jax.Array, **options: Any) -> jax.Array:
        return function(data=x.astype(self.dtype or x.dtype), **options, **self._edges()).astype(x.dtype)

    def sum(self, x: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        return self._aggregated(jb.gather_segment_sum, x, weights=weights)

    def mean(self, x: jax.Array) -> jax.Array:
        return self._aggregated(jb.gather_segment_mean, x)

    def max(self, x: jax.Array) -> jax.Array:
        return self._aggregated(jb.gather_segment_max, x)

    def min(self, x: jax.Array) -> jax.Array:
        return self._aggregated(jb.gather_segment_min, x)

    def attention(self, logits: jax.Array, x: jax.Array) -> jax.Array:
        return self._aggregated(jb.segment_attention, x, logits=logits)

    def of_senders(self, x: jax.Array) -> jax.Array:
        return jb.take_rows(x, plan=self._plan().transposed) if self.form == "plan" else jb.take_rows(x, self.senders)

    def of_receivers(self, x: jax.Array) -> jax.Array:
        return jb.take_rows(x, plan=self._plan()) if self.form == "plan" else jb.take_rows(x, self.receivers)

    def degrees(self) -> jax.Array:
        ones = jnp.ones(self.receivers.shape, jnp.int32)
        if self.form == "plan":
            return jb.segment_sum(ones, plan=self._plan())
        return jb.segment_sum(ones, self.receivers, self.num_nodes, indices_are_sorted=self.form == "sorted")


@dataclasses.dataclass(frozen=True)
class Plain:
    senders: Any
    receivers: Any
    num_nodes: int

    def _reduced(self, kind: str, rows: jax.Array) -> jax.Array:
        return getattr(jax.ops, f"segment_{kind}")(rows, self.receivers, self.num_nodes)

    def sum(self, x: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        rows = x[self.senders]
        if weights is not None:
            rows *= weights.reshape(*weights.shape, *[1] * (rows.ndim - weights.ndim))
        return self._reduced("sum", rows)

    def mean(self, x: jax.Array) -> jax.Array:
        return self.sum(x) / jnp.maximum(self.degrees(), 1).reshape(-1, *[1] * (x.ndim - 1))

    def max(self, x: jax.Array) -> jax.Array:
        return self._reduced("max", x[self.senders])

    def min(self, x: jax.Array) -> jax.Array:
        return self._reduced("min", x[self.senders])

    def attention(self, logits: jax.Array, x: jax.Array) -> jax.Array:
        exponentials = jnp.exp(logits - jax.lax.stop_gradient(self.of_receivers(self._reduced("max", logits))))
        return self.sum(x, exponentials / self.of_receivers(self._reduced("sum", exponentials)))

    def of_senders(self, x: jax.Array) -> jax.Array:
        return x[self.senders]

    def of_receivers(self, x: jax.Array) -> jax.Array:
        return x[self.receivers]

    def degrees(self) -> jax.Array:
        return self._reduced("sum", jnp.ones(self.receivers.shape, jnp.int32))


Graph = Any
Weights = Mapping[str, jax.Array]
Layer = Callable[[Weights, Graph, jax.Array, jax.Array], jax.Array]


def or_zero(x: jax.Array) -> jax.Array:
    """Replaces the infinities of nodes without edges."""
    return jnp.where(jnp.isfinite(x), x, 0)


# ----------------------------------------------------------------------------------------------------------------------
# Layers: ``(weights, graph, x [N, FEATURES], edge_features [E, EDGE_FEATURES]) -> [N, FEATURES]``.


def gcn(w: Weights, graph: Graph, x: jax.Array, _: jax.Array) -> jax.Array:
    """Kipf and Welling, https://arxiv.org/abs/1609.02907, equation 2."""
    scale = jax.lax.rsqrt(1 + graph.degrees().astype(x.dtype))
    of_edges = graph.of_senders(scale) * graph.of_receivers(scale)
    return (graph.sum(x, of_edges) + x * scale[:, None] ** 2) @ w["w"] + w["b"]


def sage(kind: str, w: Weights, graph: Graph, x: jax.Array, _: jax.Array) -> jax.Array:
    """Hamilton et al., https://arxiv.org/abs/1706.02216, algorithm 1."""
    return jax.nn.relu(jnp.concatenate([x, or_zero(getattr(graph, kind)(x))], axis=1) @ w["w2"] + w["b"])


def gin(w: Weights, graph: Graph, x: jax.Array, _: jax.Array) -> jax.Array:
    """Xu et al., https://arxiv.org/abs/1810.00826, equation 4.1."""
    return jax.nn.relu(((1 + w["b"][0]) * x + graph.sum(x)) @ w["w"]) @ w["v"]


def gat(w: Weights, graph: Graph, x: jax.Array, _: jax.Array) -> jax.Array:
    """Veličković et al., https://arxiv.org/abs/1710.10903, equations 3 to 5."""
    h = (x @ w["w"]).reshape(-1, HEADS, WIDTH)
    of_senders, of_receivers = ((h * w[name]).sum(-1) for name in ("a0", "a1"))
    logits = jax.nn.leaky_relu(graph.of_senders(of_senders) + graph.of_receivers(of_receivers), 0.2)
    return graph.attention(logits, h).reshape(x.shape)


def pna(w: Weights, graph: Graph, x: jax.Array, _: jax.Array) -> jax.Array:
    """Corso et al., https://arxiv.org/abs/2004.05718, equations 2 to 8."""
    mean = graph.mean(x)
    std = jnp.sqrt(jax.nn.relu(graph.mean(x**2) - mean**2) + 0.01)
    aggregated = jnp.concatenate([mean, or_zero(graph.max(x)), or_zero(graph.min(x)), std], axis=1)
    scale = jnp.log1p(graph.degrees().astype(x.dtype))[:, None]
    return jnp.concatenate([aggregated, aggregated * scale], axis=1) @ w["w8"] + w["b"]


def edge_conditioned(w: Weights, graph: Graph, x: jax.Array, edge_features: jax.Array) -> jax.Array:
    """Simonovsky and Komodakis, https://arxiv.org/abs/1704.02901, with a diagonal matrix: one factor for each head."""
    factors = jnp.tanh(edge_features @ w["e0"]) @ w["e1"]
    return (graph.sum(x.reshape(-1, HEADS, WIDTH), factors).reshape(x.shape) + x) @ w["w"] + w["b"]


ALL_LAYERS: dict[str, Layer] = {
    "GCN": gcn,
    **{f"GraphSAGE-{kind}": functools.partial(sage, kind) for kind in ("max", "mean", "sum")},
    "GIN": gin,
    "GAT": gat,
    "PNA": pna,
    "edge-conditioned": edge_conditioned,
}
each_layer = pytest.mark.parametrize("name", ALL_LAYERS)


def make_weights(rng: np.random.Generator, *layers: int) -> dict[str, np.ndarray]:
    shapes = {
        **{name: (FEATURES, FEATURES) for name in ("w", "v")},
        **{f"w{k}": (k * FEATURES, FEATURES) for k in (2, 8)},
        **{f"a{k}": (HEADS, WIDTH) for k in (0, 1)},
        "b": (FEATURES,),
        "e0": (EDGE_FEATURES, 5),
        "e1": (5, HEADS),
    }
    return {
        name: (rng.normal(size=(*layers, *shape)) / np.sqrt(shape[0])).astype(np.float32)
        for name, shape in shapes.items()
    }


def make_edges(rng: np.random.Generator, num_padding: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Random edges: with self loops, duplicates, nodes without edges, and padding with an out-of-range receiver."""
    senders, receivers = rng.integers(0, NODES, EDGES), rng.integers(3, NODES, EDGES)
    senders[:3] = receivers[:3]
    senders[3:6], receivers[3:6] = senders[6:9], receivers[6:9]
    if num_padding > 0:
        senders[-num_padding:], receivers[-num_padding:] = 0, NODES
    order = rng.permutation(EDGES)
    return senders[order].astype(np.int32), receivers[order].astype(np.int32)


def make_features(rng: np.random.Generator, *batch: int) -> np.ndarray:
    return rng.normal(size=(*batch, NODES, FEATURES)).astype(np.float32)


# ----------------------------------------------------------------------------------------------------------------------
# Comparison.


@pytest.fixture(autouse=True)
def products_in_float32() -> Iterator[None]:
    """GPUs would round the factors of matrix products to TF32."""
    with jax.default_matmul_precision("float32"):
        yield


def value_and_gradients(network: Callable[..., jax.Array], arrays: Any, d_output: Any, *others: Any) -> Any:
    """The value, and the gradients of all `arrays`."""

    @jax.jit
    def run(arrays: Any, d_output: Any, *others: Any) -> Any:
        output, vjp = jax.vjp(lambda arrays: network(arrays, *others), arrays)
        return output, *vjp(d_output)

    return run(arrays, d_output, *others)


def in_float64(network: Callable[..., jax.Array], arrays: Any, d_output: Any, *others: Any) -> Any:
    with cases.x64_for("float64"):
        arrays, d_output = jax.tree.map(lambda x: np.asarray(x, np.float64), (arrays, d_output))
        return jax.tree.map(np.asarray, value_and_gradients(network, arrays, d_output, *others))


def check(actual: Any, expected: Any, roundings: int, eps: float = float(np.finfo(np.float32).eps)) -> None:
    """Checks that each error is at most `roundings` roundings of the largest number, which bounds the terms of sums."""
    for (path, x), y in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and np.isfinite(y).all()
        atol = roundings * eps * np.abs(y).max(initial=0)
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=0, atol=atol, err_msg=str(path))


# A layer is two matrix products around a sum of at most EDGES terms. The products sum at most 8 * FEATURES terms; those
# for gradients of weights sum NODES terms. A sum of n terms is rounded n times. The square root of the variance
# magnifies errors by no more than 1 / (2 * sqrt(0.01)) = 5. Other functions are rounded a few times.
ROUNDINGS = 2 * 8 * FEATURES + EDGES + NODES + 5 * 8


@each_layer
def test_layer(rng: np.random.Generator, name: str) -> None:
    """Output and all gradients agree with float64, for edges in any order, sorted edges and a plan."""
    senders, receivers = make_edges(rng)
    layer = ALL_LAYERS[name]
    d_output = make_features(rng)
    arrays = make_weights(rng), make_features(rng), rng.normal(size=(EDGES, EDGE_FEATURES)).astype(np.float32)
    order = np.argsort(receivers, kind="stable")
    is_edge = receivers < NODES
    edges = senders[is_edge], receivers[is_edge]

    def network(graph: type[Any], arrays: Any, senders: Any, receivers: Any, **options: Any) -> jax.Array:
        weights, x, edge_features = arrays
        return layer(weights, graph(senders, receivers, NODES, **options), x, edge_features)

    weights, x, edge_features = arrays
    of_edges = weights, x, edge_features[is_edge]
    expected, of_arrays = in_float64(functools.partial(network, Plain), of_edges, d_output, *edges)
    d_edge_features = np.zeros((EDGES, EDGE_FEATURES))
    d_edge_features[is_edge] = of_arrays[2]
    for form in ("ids", "plan", "sorted"):
        own = order if form == "sorted" else np.arange(EDGES)
        output, gradients = value_and_gradients(
            functools.partial(network, Ours, form=form),
            (weights, x, edge_features[own]),
            d_output,
            senders[own],
            receivers[own],
        )
        check((output, gradients), (expected, (*of_arrays[:2], d_edge_features[own])), ROUNDINGS)


@each_layer
def test_bfloat16(rng: np.random.Generator, name: str) -> None:
    """Sums of 16-bit rows have 32 bits. Only the row, result, cotangent, shares and gradient are rounded to 16 bits."""
    senders, receivers = make_edges(rng, num_padding=0)
    layer = ALL_LAYERS[name]
    x, d_output = (np.asarray(jnp.asarray(make_features(rng), jnp.bfloat16), np.float32) for _ in range(2))
    edge_features = rng.normal(size=(EDGES, EDGE_FEATURES)).astype(np.float32)

    def network(graph: type[Any], arrays: Any, **options: Any) -> jax.Array:
        return layer(arrays[0], graph(senders, receivers, NODES, **options), *arrays[1:])

    arrays = make_weights(rng), x, edge_features
    actual = value_and_gradients(functools.partial(network, Ours, dtype=jnp.bfloat16), arrays, d_output)
    expected = in_float64(functools.partial(network, Plain), arrays, d_output)
    # Each is rounded by half of an eps. The standard deviation magnifies the errors of two means by 5.
    check(actual, expected, 5 * (5 if name == "PNA" else 1), float(jnp.finfo(jnp.bfloat16).eps) / 2)


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE-max", "GIN", "GAT", "PNA", "edge-conditioned"])
def test_network(rng: np.random.Generator, name: str) -> None:
    """Layers in a loop agree with float64, each a checkpoint with a plan."""
    senders, receivers = make_edges(rng, num_padding=0)
    layer = ALL_LAYERS[name]
    arrays = make_weights(rng, LAYERS), make_features(rng), rng.normal(size=(EDGES, EDGE_FEATURES)).astype(np.float32)
    d_output = make_features(rng)

    def network(graph: type[Any], wrap: Callable[..., Any], arrays: Any, **options: Any) -> jax.Array:
        weights, x, edge_features = arrays
        of_edges = graph(senders, receivers, NODES, **options)

        @wrap
        def step(x: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
            return x + jnp.tanh(layer(weights, of_edges, x, edge_features)), None

        return jax.lax.scan(step, x, weights)[0]

    expected = in_float64(functools.partial(network, Plain, lambda step: step), arrays, d_output)
    actual = value_and_gradients(functools.partial(network, Ours, jax.checkpoint, form="plan"), arrays, d_output)
    check(actual, expected, LAYERS * ROUNDINGS)


@pytest.mark.parametrize(
    ("name", "shares_features"), [*((name, True) for name in ALL_LAYERS), ("GAT", False), ("PNA", False)]
)
def test_batch_of_graphs(rng: np.random.Generator, name: str, shares_features: bool) -> None:
    """Graphs are padded to the same number of edges. They have features of their own, or share them."""
    batch = 3
    edges = [make_edges(rng, num_padding) for num_padding in (0, 10, 30)]
    layer = ALL_LAYERS[name]
    weights, edge_features = make_weights(rng), rng.normal(size=(batch, EDGES, EDGE_FEATURES)).astype(np.float32)
    x, d_output = make_features(rng, *(() if shares_features else (batch,))), make_features(rng, batch)

    def ours(arrays: Any, senders: Any, receivers: Any) -> jax.Array:
        def one(weights: Any, x: Any, edge_features: Any, senders: Any, receivers: Any) -> jax.Array:
            return layer(weights, Ours(senders, receivers, NODES), x, edge_features)

        axes = (None, None if shares_features else 0, 0, 0, 0)
        return jax.vmap(one, axes)(*arrays, senders, receivers)

    def plain(arrays: Any) -> jax.Array:
        weights, x, edge_features = arrays
        graphs = [[ids[receivers < NODES] for ids in (senders, receivers)] for senders, receivers in edges]
        outputs = [
            layer(
                weights,
                Plain(*graphs[i], NODES),
                x if shares_features else x[i],
                edge_features[i][edges[i][1] < NODES],
            )
            for i in range(batch)
        ]
        return jnp.stack(outputs)

    arrays = weights, x, edge_features
    actual = value_and_gradients(ours, arrays, d_output, *(np.stack(ids) for ids in zip(*edges, strict=True)))
    check(actual, in_float64(plain, arrays, d_output), batch * ROUNDINGS)


@pytest.mark.parametrize("form", ["ids", "plan"])
@pytest.mark.parametrize("nodes", [0, NODES])
def test_empty_graph(rng: np.random.Generator, nodes: int, form: str) -> None:
    """All layers accept graphs without edges, and graphs without nodes."""
    none = np.zeros(0, np.int32)
    x, edge_features = make_features(rng)[:nodes], np.zeros((0, EDGE_FEATURES), np.float32)
    weights, d_output = make_weights(rng), make_features(rng)[:nodes]

    def layers(graph: Any, arrays: Any) -> jax.Array:
        return sum(layer(*arrays[:1], graph, *arrays[1:]) for layer in ALL_LAYERS.values())

    arrays = weights, x, edge_features
    actual = value_and_gradients(lambda arrays: layers(Ours(none, none, nodes, form), arrays), arrays, d_output)
    if nodes > 0:
        expected = in_float64(lambda arrays: layers(Plain(none, none, nodes), arrays), arrays, d_output)
    else:  # nothing depends on any weight; jax.ops has no segments to add to
        expected = jax.tree.map(np.zeros_like, (d_output, arrays))
    check(actual, expected, len(ALL_LAYERS) * ROUNDINGS)
