"""Sums of gathered rows in NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import cases
from support.cases import Expected

import jax_baracuda
from jax_baracuda import segment_plan

FORMS = ("ids", "plan", "sorted")


def function_of(kind: str) -> Callable[..., jax.Array]:
    return getattr(jax_baracuda, f"gather_segment_{kind}")


def gathered(data: np.ndarray, gather_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``data[gather_ids]`` as in jax.numpy, and the row of each edge, or -1 if the edge passes no gradient."""
    wrapped = np.array([i + len(data) if i < 0 else i for i in gather_ids.astype(object)], object)
    nearest = np.clip(wrapped, 0, len(data) - 1).astype(np.int64)
    return data[nearest], np.where(wrapped == nearest, nearest, -1)


def sum_of_edges(terms: np.ndarray, ids: np.ndarray, segments: int, dtype: np.dtype) -> Expected:
    """The sum of float64 terms. Kernels may round each term, which is a product, before they add it."""
    magnitude = cases.segment_sum(np.abs(terms), ids, segments)
    # Many terms are equal. So are their rounding errors, and these add up.
    count = cases.counts(ids, segments).reshape(-1, *(1 for _ in terms.shape[1:]))
    error = (1 + count / 2) * cases.eps_of(dtype) * magnitude
    return Expected(cases.segment_sum(terms, ids, segments), dtype, error)


@dataclasses.dataclass(frozen=True)
class Graph:
    """The arrays of a call, and its result and gradients."""

    data: np.ndarray
    gather_ids: np.ndarray
    segment_ids: np.ndarray
    num_segments: int
    weights: np.ndarray | None = None
    segment_data: np.ndarray | None = None

    def arrays(self) -> dict[str, np.ndarray]:
        """The differentiable arrays."""
        own = {"data": self.data, "weights": self.weights, "segment_data": self.segment_data}
        return {name: x for name, x in own.items() if x is not None}

    def _scales(self) -> np.ndarray:
        """The weights, to multiply rows with."""
        if self.weights is None:
            return np.ones((len(self.gather_ids), *(1 for _ in self.data.shape[1:])))
        return self.weights.astype(np.float64).reshape(
            *self.weights.shape, *(1 for _ in range(self.data.ndim - self.weights.ndim))
        )

    def value(self) -> Expected:
        rows, _ = gathered(self.data.astype(np.float64), self.gather_ids)
        return sum_of_edges(rows * self._scales(), self.segment_ids, self.num_segments, self.data.dtype)

    def gradient_of_data(self, d_output: np.ndarray) -> Expected:
        _, row = gathered(self.data, self.gather_ids)
        terms = cases.take_cells(d_output.astype(np.float64), self.segment_ids) * self._scales()
        return sum_of_edges(terms, row, len(self.data), self.data.dtype)

    def gradient_of_weights(self, d_output: np.ndarray) -> Expected:
        rows, _ = gathered(self.data.astype(np.float64), self.gather_ids)
        products = rows * cases.take_cells(d_output.astype(np.float64), self.segment_ids)
        axes = tuple(range(self.weights.ndim, products.ndim))
        count = 1 + np.prod([products.shape[axis] for axis in axes])
        error = count * cases.eps_of(self.data.dtype) * np.abs(products).sum(axes)
        return Expected(products.sum(axes), self.data.dtype, error)

    def expected(self, kind: str, d_output: np.ndarray, tie_break: str = "split") -> dict[str, Expected]:
        """The result of the function of this kind, as "value", and the gradients of its arrays."""
        dtype = self.data.dtype
        rows, row = gathered(self.data, self.gather_ids)
        if kind in ("max", "min"):
            reference, gradient = (getattr(cases, f"reference_{kind}{of}") for of in ("", "_gradient"))
            of_edges = gradient(d_output, rows, self.segment_ids, tie_break)
            terms = np.asarray(of_edges, d_output.dtype).astype(np.float64)
            value = Expected(reference(rows, self.segment_ids, self.num_segments), dtype)
            return {"value": value, "data": sum_of_edges(terms, row, len(self.data), d_output.dtype)}
        if kind == "dot":
            rows, d_rows = rows.astype(np.float64), d_output.astype(np.float64)[..., None]
            cells = cases.take_cells(self.segment_data.astype(np.float64), self.segment_ids)
            products = rows * cells
            error = (1 + products.shape[-1]) * cases.eps_of(dtype) * np.abs(products).sum(-1)
            return {
                "value": Expected(products.sum(-1), dtype, error),
                "data": sum_of_edges(d_rows * cells, row, len(self.data), dtype),
                "segment_data": sum_of_edges(d_rows * rows, self.segment_ids, len(self.segment_data), dtype),
            }
        value = self.value()
        if kind == "sum":
            of_weights = {} if self.weights is None else {"weights": self.gradient_of_weights(d_output)}
            return {"value": value, "data": self.gradient_of_data(d_output), **of_weights}
        count = np.maximum(cases.counts(self.segment_ids, self.num_segments), 1)
        count = count.reshape(-1, *(1 for _ in self.data.shape[1:]))
        # The quotient is rounded before the result is.
        error = value.error / count + cases.eps_of(np.float32) * np.abs(value.exact / count)
        shares = d_output.astype(np.float64) / count
        gradient = self.gradient_of_data(shares)
        # The share of a cotangent is rounded to its dtype before it is added up.
        info = jnp.finfo(d_output.dtype)
        of_shares = float(info.eps) * np.abs(shares) + float(info.smallest_subnormal)
        of_data = dataclasses.replace(gradient, error=gradient.error + self.gradient_of_data(of_shares).exact)
        return {"value": Expected(value.exact / count, dtype, error), "data": of_data}


def make_graph(
    rng: np.random.Generator,
    nodes: int,
    edges: int,
    segments: int,
    row_shape: tuple[int, ...],
    dtype: str = "float32",
    weight_dims: int | None = None,
    ids_dtype: str = "int32",
    is_sorted: bool = False,
) -> Graph:
    """A random graph, with out-of-range ids of all kinds."""
    data = cases.cotangent(rng, (nodes, *row_shape), dtype)
    segment_ids = cases.make_ids(rng, edges, segments, ids_dtype, is_sorted=is_sorted)
    gather_ids = cases.make_ids(rng, edges, nodes, ids_dtype)
    weights = None if weight_dims is None else rng.normal(size=(edges, *row_shape[:weight_dims])).astype(data.dtype)
    return Graph(data, gather_ids, segment_ids, segments, weights)


def with_segment_data(rng: np.random.Generator, graph: Graph) -> Graph:
    """The graph of products of rows with those of segments."""
    shape = graph.num_segments, *graph.data.shape[1:]
    return dataclasses.replace(graph, segment_data=cases.cotangent(rng, shape, graph.data.dtype))


def hot_graph(rng: np.random.Generator, row_shape: tuple[int, ...], form: str) -> Graph:
    """A graph in which three quarters of the edges have the same segment, and three quarters gather the same row."""
    graph = make_graph(rng, 90, 6000, 200, row_shape)
    is_hot = rng.random((2, 6000)) < 0.75
    segment_ids = np.where(is_hot[0], 7, graph.segment_ids).astype(np.int32)
    gather_ids = np.where(is_hot[1], 80, graph.gather_ids).astype(np.int32)
    return dataclasses.replace(
        graph, gather_ids=gather_ids, segment_ids=np.sort(segment_ids) if form == "sorted" else segment_ids
    )


def call_of(kind: str, graph: Graph, form: str, **options: Any) -> Callable[..., jax.Array]:
    """``(data, **arrays) -> output`` of the function of this kind, with ids or a plan."""
    edges = {"gather_ids": graph.gather_ids, "segment_ids": graph.segment_ids, "indices_are_sorted": form == "sorted"}
    edges |= {} if kind == "dot" else {"num_segments": graph.num_segments}

    def call(data: Any, **arrays: Any) -> jax.Array:
        if form == "plan":
            plan = segment_plan(graph.segment_ids, graph.num_segments, graph.gather_ids, data.shape[0])
            return function_of(kind)(data, plan=plan, **arrays, **options)
        return function_of(kind)(data, **edges, **arrays, **options)

    return call


def check(kind: str, graph: Graph, form: str, d_output: np.ndarray, **options: Any) -> None:
    """The value and the gradients of all arrays are right, and two runs give the same bits."""

    @jax.jit
    def run(arrays: Any, gather_ids: Any, segment_ids: Any, d_output: Any) -> Any:
        edges = dataclasses.replace(graph, gather_ids=gather_ids, segment_ids=segment_ids)
        output, vjp = jax.vjp(lambda arrays: call_of(kind, edges, form, **options)(**arrays), arrays)
        return {"value": output, **vjp(d_output)[0]}

    with cases.x64_for(d_output.dtype):
        first, second = (run(graph.arrays(), graph.gather_ids, graph.segment_ids, d_output) for _ in range(2))
    for name, allowed in graph.expected(kind, d_output, options.get("tie_break", "split")).items():
        allowed.check(first[name], name)
        cases.assert_same_memory(first[name], np.asarray(second[name]), name)
