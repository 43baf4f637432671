"""Sums of gathered rows over the edges of graphs, with and without a plan, against plain JAX and cuSPARSE."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_baracuda
from benchmarks.harness import Case, Contender, JaxContender, TorchContender, torch, with_gradient
from benchmarks.record import FORWARD, OURS, WITH_GRADIENT, XLA
from benchmarks.segment import short_count
from jax_baracuda._examples.segment import gathered_sum


@dataclasses.dataclass(frozen=True)
class Graph:
    """A random graph. Senders are uniform; receivers are node ``nodes * u ** power`` for uniform u, then shuffled."""

    name: str
    nodes: int
    edges: int
    features: int
    power: float

    @property
    def size(self) -> str:
        return f"{self.name} {short_count(self.edges)} edges × {self.features}, {short_count(self.nodes)} nodes"

    def quick(self) -> Graph:
        """A small version, to see that everything runs."""
        return dataclasses.replace(self, nodes=self.nodes // 64, edges=self.edges // 64)


GPU_GRAPHS = (
    Graph("arxiv", 169_343, 1_166_243, 128, 2.5),
    Graph("arxiv", 169_343, 1_166_243, 256, 2.5),
    Graph("products", 2_449_029, 61_859_140, 32, 2.0),
    Graph("mesh", 30_000, 200_000, 64, 1.5),
)
CPU_GRAPHS = (Graph("mesh", 30_000, 200_000, 64, 1.5),)
ORDERS = ("plan", "unsorted")


def cases(backend: str, quick: bool = False) -> Iterator[Case]:
    """All cases for a kind of device."""
    for graph in GPU_GRAPHS if backend == "gpu" else CPU_GRAPHS:
        graph = graph.quick() if quick else graph
        for order, what in itertools.product(ORDERS, (FORWARD, WITH_GRADIENT)):
            yield Case(
                op="gather_segment_sum",
                size=graph.size,
                variant=f"power law, {order}, float32",
                what=what,
                floor_bytes=floor_bytes(graph, what),
                make_contenders=functools.partial(contenders, graph, order, what),
                tolerance=1e-3,
            )


def floor_bytes(graph: Graph, what: str) -> int:
    """Bytes of every operand and result, once each, in the forward and in the backward pass."""
    forward = 2 * graph.nodes * graph.features * 4 + 2 * graph.edges * 4
    return 2 * forward if what == WITH_GRADIENT else forward


@functools.lru_cache(maxsize=1)
def make_edges(graph: Graph) -> tuple[jax.Array, jax.Array]:
    """Senders and receivers."""
    rng = np.random.default_rng(0)
    receivers = rng.permutation(graph.nodes)[(graph.nodes * rng.random(graph.edges) ** graph.power).astype(np.int64)]
    senders = rng.integers(0, graph.nodes, graph.edges)
    return jnp.asarray(senders, jnp.int32), jnp.asarray(receivers, jnp.int32)


def contenders(graph: Graph, order: str, what: str) -> Iterator[Contender]:
    """This package, plain JAX, and torch's product with a sparse matrix."""
    senders, receivers = make_edges(graph)
    data, cotangent = (
        jax.random.normal(jax.random.key(seed), (graph.nodes, graph.features), jnp.float32) for seed in (1, 2)
    )
    nodes = graph.nodes
    if order == "plan":
        plan = jax.jit(jax_baracuda.segment_plan, static_argnums=(1, 3))(receivers, nodes, senders, nodes)
        yield of_jax(OURS, what, lambda x, plan: jax_baracuda.gather_segment_sum(x, plan=plan), data, cotangent, plan)
    else:
        ours = functools.partial(jax_baracuda.gather_segment_sum, num_segments=nodes)
        yield of_jax(OURS, what, ours, data, cotangent, senders, receivers)
    plain = functools.partial(gathered_sum, num_segments=nodes)
    yield of_jax(XLA, what, plain, data, cotangent, senders, receivers)
    if torch is None or not torch.cuda.is_available() or order != "plan":
        return
    by_receiver = np.argsort(np.asarray(receivers), kind="stable")
    matrix, transposed = (
        csr_matrix(np.asarray(rows)[by], np.asarray(columns)[by], nodes)
        for rows, columns, by in (
            (receivers, senders, by_receiver),
            (senders, receivers, np.argsort(np.asarray(senders), kind="stable")),
        )
    )

    class Product(torch.autograd.Function):
        """The product of matrix and rows. Its gradient uses the transposed matrix, which is prepared as well."""

        @staticmethod
        def forward(_: Any, rows: Any) -> Any:
            return matrix @ rows

        @staticmethod
        def backward(_: Any, d_output: Any) -> Any:
            return transposed @ d_output

    of_torch = torch.from_dlpack(cotangent) if what == WITH_GRADIENT else None
    yield TorchContender("torch", "sparse CSR", Product.apply, torch.from_dlpack(data), cotangent=of_torch)


def of_jax(
    library: str, what: str, function: Callable[..., jax.Array], data: jax.Array, cotangent: jax.Array, *edges: Any
) -> JaxContender:
    if what == FORWARD:
        return JaxContender(library, "", function, data, *edges)
    return JaxContender(library, "", with_gradient(function), data, *edges, cotangent)


def csr_matrix(rows: np.ndarray, columns: np.ndarray, nodes: int) -> Any:
    """The adjacency matrix with ones for edges. `rows` must be ascending."""
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=nodes))]).astype(np.int32)
    arrays = (torch.from_numpy(x).cuda() for x in (offsets, columns.copy(), np.ones(len(columns), np.float32)))
    return torch.sparse_csr_tensor(*arrays, size=(nodes, nodes))
