"""The recipes of docs/recipes_pyg.md agree with the layers of PyTorch Geometric: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.pages import run_examples
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv, SoftmaxAggregation, TransformerConv

PAGE = Path(__file__).parents[2] / "docs" / "recipes_pyg.md"
RECIPES = run_examples(PAGE)

NODES, WIDTH, OUT = 40, 6, 5
DTYPES = ["float32", "float64"]
WITH_PLAN = pytest.mark.parametrize("with_plan", [False, True], ids=["edges", "plan"])
IN_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def random_edges(rng: np.random.Generator) -> np.ndarray:
    """Random edges with isolated nodes, nodes without senders, duplicate edges, and self loops, some of them twice."""
    edges = rng.integers(0, NODES - 8, (2, 150))
    edges[1, edges[1] < 4] = 10
    loops = np.array([[1, 5, 5, 7], [1, 5, 5, 7]])
    edges = np.concatenate([edges, edges[:, :20], loops], axis=1)
    return rng.permutation(edges, axis=1)


def as_jax(tensor: torch.Tensor) -> jax.Array:
    return jnp.asarray(tensor.detach().numpy())


def weights_of(layer: torch.nn.Module) -> dict[str, jax.Array]:
    return {name: as_jax(parameter) for name, parameter in layer.named_parameters()}


def check(
    dtype: str,
    rng: np.random.Generator,
    layer: torch.nn.Module,
    of_torch: Callable[[torch.Tensor], torch.Tensor],
    of_jax: Callable[[dict[str, jax.Array], jax.Array], jax.Array],
    rows: int = NODES,
) -> None:
    """Compares the values, and the gradients of features and of all weights, for the same random cotangent."""
    layer.to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in layer.parameters():  # biases and attention must not be zero
            parameter.copy_(torch.as_tensor(rng.normal(size=parameter.shape) * 0.5))
    x = torch.tensor(rng.normal(size=(rows, WIDTH)), dtype=getattr(torch, dtype), requires_grad=True)
    expected = of_torch(x)
    cotangent = torch.as_tensor(rng.normal(size=expected.shape), dtype=x.dtype)
    expected.backward(cotangent)

    weights = weights_of(layer)
    actual, pullback = jax.vjp(jax.jit(of_jax), weights, as_jax(x))
    of_weights, of_x = pullback(as_jax(cotangent))
    assert actual.dtype == of_x.dtype == dtype
    close = dict(rtol=1e-10, atol=1e-10) if dtype == "float64" else dict(rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(actual, expected.detach(), **close)
    np.testing.assert_allclose(of_x, x.grad, **close)
    assert weights.keys() == of_weights.keys()
    for name, parameter in layer.named_parameters():
        gradient = 0 if parameter.grad is None else parameter.grad  # None: the layer does not use it
        np.testing.assert_allclose(of_weights[name], gradient, **close, err_msg=name)


def edges_of(edge_index: np.ndarray, with_plan: bool, self_loops: bool = False) -> dict[str, Any]:
    senders, receivers = jnp.asarray(edge_index)
    if self_loops:
        senders, receivers = RECIPES["with_self_loops"](senders, receivers, NODES)
    return RECIPES["edges_of"](senders, receivers, NODES, with_plan)


@IN_DTYPE
@WITH_PLAN
@pytest.mark.parametrize("aggr", ["mean", "max"])
@pytest.mark.parametrize("root_weight", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_sage_conv(
    rng: np.random.Generator, dtype: str, with_plan: bool, aggr: str, root_weight: bool, normalize: bool
) -> None:
    with jax.enable_x64(dtype == "float64"):
        edge_index = random_edges(rng)
        edges = edges_of(edge_index, with_plan)
        layer = SAGEConv(WIDTH, OUT, aggr=aggr, normalize=normalize, root_weight=root_weight)
        check(
            dtype,
            rng,
            layer,
            lambda x: layer(x, torch.as_tensor(edge_index)),
            lambda weights, x: RECIPES["sage_conv"](weights, x, edges, aggr, normalize),
        )


@IN_DTYPE
@WITH_PLAN
@pytest.mark.parametrize("concat", [True, False], ids=["concat", "mean"])
@pytest.mark.parametrize("self_loops", [True, False])
@pytest.mark.parametrize("bias, slope, heads", [(True, 0.2, 3), (False, 0.01, 1)])
@pytest.mark.parametrize("layer_type, recipe", [(GATConv, "gat_conv"), (GATv2Conv, "gatv2_conv")])
def test_gat_conv(
    rng: np.random.Generator,
    layer_type: type[torch.nn.Module],
    recipe: str,
    dtype: str,
    with_plan: bool,
    concat: bool,
    self_loops: bool,
    bias: bool,
    slope: float,
    heads: int,
) -> None:
    with jax.enable_x64(dtype == "float64"):
        edge_index = random_edges(rng)
        edges = edges_of(edge_index, with_plan, self_loops)
        options = dict(concat=concat, add_self_loops=self_loops, bias=bias, negative_slope=slope)
        layer = layer_type(WIDTH, OUT, heads, **options)
        check(
            dtype,
            rng,
            layer,
            lambda x: layer(x, torch.as_tensor(edge_index)),
            lambda weights, x: RECIPES[recipe](weights, x, edges, concat, slope),
        )


@IN_DTYPE
@WITH_PLAN
@pytest.mark.parametrize("concat", [True, False], ids=["concat", "mean"])
@pytest.mark.parametrize("root_weight", [True, False])
@pytest.mark.parametrize("bias, heads", [(True, 3), (False, 1)])
def test_transformer_conv(
    rng: np.random.Generator, dtype: str, with_plan: bool, concat: bool, root_weight: bool, bias: bool, heads: int
) -> None:
    with jax.enable_x64(dtype == "float64"):
        edge_index = random_edges(rng)
        edges = edges_of(edge_index, with_plan)
        layer = TransformerConv(WIDTH, OUT, heads, concat=concat, root_weight=root_weight, bias=bias)
        check(
            dtype,
            rng,
            layer,
            lambda x: layer(x, torch.as_tensor(edge_index)),
            lambda weights, x: RECIPES["transformer_conv"](weights, x, edges, heads, concat, root_weight),
        )


@IN_DTYPE
@WITH_PLAN
@pytest.mark.parametrize("train_eps", [True, False])
def test_gin_conv(rng: np.random.Generator, dtype: str, with_plan: bool, train_eps: bool) -> None:
    with jax.enable_x64(dtype == "float64"):
        edge_index = random_edges(rng)
        edges = edges_of(edge_index, with_plan)
        mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, 7), torch.nn.Tanh(), torch.nn.Linear(7, OUT))
        layer = GINConv(mlp, eps=0.25, train_eps=train_eps)

        def of_jax(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            def mlp(h: jax.Array) -> jax.Array:
                h = jnp.tanh(h @ weights["nn.0.weight"].T + weights["nn.0.bias"])
                return h @ weights["nn.2.weight"].T + weights["nn.2.bias"]

            return RECIPES["gin_conv"](weights["eps"] if train_eps else 0.25, mlp, x, edges)

        check(dtype, rng, layer, lambda x: layer(x, torch.as_tensor(edge_index)), of_jax)


@IN_DTYPE
@WITH_PLAN
@pytest.mark.parametrize("self_loops", [True, False])
def test_gcn_conv(rng: np.random.Generator, dtype: str, with_plan: bool, self_loops: bool) -> None:
    with jax.enable_x64(dtype == "float64"):
        edge_index = random_edges(rng)
        edges = edges_of(edge_index, with_plan, self_loops)
        degree_weights = RECIPES["gcn_weights"](edges, NODES, dtype)
        layer = GCNConv(WIDTH, OUT, add_self_loops=self_loops)
        check(
            dtype,
            rng,
            layer,
            lambda x: layer(x, torch.as_tensor(edge_index)),
            lambda weights, x: RECIPES["gcn_conv"](weights, x, edges, degree_weights),
        )


@IN_DTYPE
@WITH_PLAN
@pytest.mark.parametrize("channels", [1, WIDTH])
def test_softmax_aggregation(rng: np.random.Generator, dtype: str, with_plan: bool, channels: int) -> None:
    import jax_baracuda as jb

    with jax.enable_x64(dtype == "float64"):
        index = rng.integers(0, NODES - 5, 100)
        ids = jnp.asarray(index)
        segments = {"plan": jb.segment_plan(ids, NODES)} if with_plan else {"index": ids, "num_segments": NODES}
        layer = SoftmaxAggregation(t=0.7, learn=True, channels=channels)
        check(
            dtype,
            rng,
            layer,
            lambda x: layer(x, torch.as_tensor(index), dim_size=NODES),
            lambda weights, x: RECIPES["softmax_aggregation"](weights["t"], x, **segments),
            rows=100,
        )


@IN_DTYPE
@WITH_PLAN
@pytest.mark.parametrize("channels", [1, WIDTH])
def test_softmax_aggregation_of_senders(rng: np.random.Generator, dtype: str, with_plan: bool, channels: int) -> None:
    with jax.enable_x64(dtype == "float64"):
        edge_index = random_edges(rng)
        edges = edges_of(edge_index, with_plan)
        layer = SoftmaxAggregation(t=0.7, learn=True, channels=channels)
        senders, receivers = torch.as_tensor(edge_index)
        check(
            dtype,
            rng,
            layer,
            lambda x: layer(x[senders], receivers, dim_size=NODES),
            lambda weights, x: RECIPES["gathered_softmax_aggregation"](weights["t"], x, edges),
        )


def test_times(rng: np.random.Generator, timings: Callable[..., None]) -> None:
    """Times forward passes on the CPU in JAX and in PyTorch, for the table alone."""
    edge_index, nodes = rng.integers(0, 2000, (2, 20000)), 2000
    senders, receivers = jnp.asarray(edge_index, jnp.int32)
    edges = RECIPES["edges_of"](senders, receivers, nodes)
    x = rng.normal(size=(nodes, 32)).astype(np.float32)
    layer = SAGEConv(32, 32, aggr="max")
    weights, ours = weights_of(layer), jax.jit(lambda weights, x: RECIPES["sage_conv"](weights, x, edges, "max"))

    def theirs() -> torch.Tensor:
        with torch.no_grad():
            return layer(torch.as_tensor(x), torch.as_tensor(edge_index))

    timings("PyG SAGEConv-max", lambda: ours(weights, jnp.asarray(x)), theirs)
