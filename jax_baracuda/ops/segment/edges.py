"""Common parts of the ops that gather rows along edges: rows, programs for GPUs, and batches of graphs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import in_range
from jax_baracuda._core.batch import map_over_batch, mapped_dims, vmap_sizes
from jax_baracuda._core.dispatch import Traits
from jax_baracuda._core.functions import resolved, with_named
from jax_baracuda._core.op import NamedDimensions, Op
from jax_baracuda._core.sharding import ShardAxes
from jax_baracuda.ops.segment.cells import gather_or_zeros, per_row
from jax_baracuda.ops.segment.plan import sorted_by_segment


def gather_rows(data: Array, gather_ids: Array, clips_gather_ids: bool) -> Array:
    """The rows that ids name. Ids out of range give the nearest row or zeros, and no gradient goes through them."""
    if data.shape[0] == 0:
        return jnp.zeros((*gather_ids.shape, *data.shape[1:]), data.dtype)
    if clips_gather_ids:
        return data.at[gather_ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return gather_or_zeros(data, gather_ids)


def as_gather_ids(segment_ids: Array, num_segments: int) -> Array:
    """The segments that edges gather from in the backward pass, -1 for dropped edges."""
    return jnp.where(in_range(segment_ids, num_segments), segment_ids, -1).astype(jnp.int32)


def transposed_edges(edges: Mapping[str, Array], num_segments: int) -> tuple[Array, Array, Array | None]:
    """The edges of the gradient, which gather segments: gather ids, segment ids and, of a plan, their order."""
    if "transposed_order" in edges:
        return edges["transposed_gather_ids"], edges["transposed_segment_ids"], edges["transposed_order"]
    return as_gather_ids(edges["segment_ids"], num_segments), edges["gather_ids"], None


def replicated_dims_of_cells(*, has_edge_order: bool) -> tuple[str, ...]:
    """For ops whose results are cells: without an edge order, each device may compute its own segments."""
    return ("gathered", "segment", "edge") if has_edge_order else ("gathered",)


def replicated_dims(*, has_edge_order: bool) -> tuple[str, ...]:
    """For other ops. An edge order refers to all edges, so they are replicated with it."""
    return ("gathered", "segment", "edge") if has_edge_order else ("gathered", "segment")


# ----------------------------------------------------------------------------------------------------------------------
# Programs for GPUs, whose kernels need sorted edges and load rows by vectors if these fit.


def sorted_edges(
    gather_ids: Array, segment_ids: Array, edge_order: Array | None, num_segments: int
) -> tuple[Array, Array, Array]:
    """The gather ids and segment ids of the edges sorted by segment, and the numbers of these edges."""
    order, sorted_ids = sorted_by_segment(segment_ids, num_segments)
    return gather_ids[order], sorted_ids, order if edge_order is None else edge_order[order]


VECTOR_BYTES = 16
MIN_VECTOR_BYTES = 8
"""Rows that vectors of this size fit are not padded: it gained only -20% to 25% for 20 to 300 bfloat16 numbers."""
MAX_GROWTH = 4 / 3
MIN_ROW_BYTES = 32
MIN_EDGES = 2**17
MIN_EDGES_PER_ROW = 3
"""Edges per row, counting gathered and written rows together, because padding copies each row once."""


def fit_no_vectors(traits: Traits) -> bool:
    """Whether a kernel loads the rows of many edges number by number, and longer rows would pay.

    A kernel loads rows by the largest vectors that fit, so rows of 33 bfloat16 numbers are loaded one number at a time.
    Measured on an H200 (jax 0.11.2): padding them to 40 took 13M gathering edges from 1.65 ms to 0.58.
    """
    measures = traits.measures
    if measures["row_bytes"] == 0:
        return False
    features = measures.get("feature", measures["features"])
    element_bytes = measures["row_bytes"] // measures["features"]
    longer = features + _lacking(features, element_bytes)
    return (
        features * element_bytes % MIN_VECTOR_BYTES > 0
        and longer <= MAX_GROWTH * features
        and measures["row_bytes"] // features * longer >= MIN_ROW_BYTES
        and measures["edge"] >= max(MIN_EDGES, MIN_EDGES_PER_ROW * (measures["gathered"] + measures["segment"]))
    )


def _lacking(features: int, element_bytes: int) -> int:
    """The number of features that a row (or the row of a head) lacks to be whole vectors."""
    return -features % (VECTOR_BYTES // element_bytes)


def with_longer_rows(
    op: Op, operands: Sequence[Array | None], padded: Sequence[int] = (0,), *, has_heads: bool = False, **params: Any
) -> list[Array]:
    """Pads the rows of some operands to whole vectors, calls the kernel, and drops the added features of its results.

    Args:
      padded: the positions of the operands to pad.
      has_heads: whether each head of a row is padded.
    """
    first_dim = 2 if has_heads else 1
    dims = operands[0].shape[first_dim:]
    features = math.prod(dims)
    added = _lacking(features, operands[0].dtype.itemsize)

    def longer(x: Array) -> Array:
        return jnp.pad(x.reshape(*x.shape[:first_dim], features), [(0, 0)] * first_dim + [(0, added)])

    longer_operands = (longer(x) if i in padded and x is not None else x for i, x in enumerate(operands))
    results = op.kernel(*longer_operands, **params)
    return [x[..., :features].reshape(*x.shape[:-1], *dims) for x in results]


# ----------------------------------------------------------------------------------------------------------------------
# Batches of graphs that gather from the same rows, joined into one graph with the edges and segments of all. Each batch
# dimension keeps its own name until the program of one shard joins them, so a batch that is split over devices stays
# split.


def op_of_graphs(
    op: Op, join: Callable[..., Sequence[Array | None]], *, shared: Sequence[int] = (), **fields: Any
) -> Op:
    """The sum of an op's result over graphs.

    Args:
      op: has one result, and `transposes` by its first operand. Each operand holds cells of a graph, belongs to its
        edges, or is shared.
      join: ``(num_graph_dims, *operands)`` -> the operands of `op`.
      shared: the positions of operands that all graphs share. The others have the graph dimensions in front, whose
        sizes may be 1.
      fields: fields of the new op that do not follow from `op`.
    """

    assert not callable(op.transposes)
    linear, transpose_of_op = next(iter(op.transposes.items()))

    def operands(*, num_graph_dims: int, **params: Any) -> NamedDimensions:
        graphs, own = _graph_dims(num_graph_dims), resolved(op.operands, params)
        return {name: dims if i in shared else (*graphs, *dims) for i, (name, dims) in enumerate(own.items())}

    def run(
        function: Callable[..., Sequence[Array]], *operands: Array | None, num_graph_dims: int, **params: Any
    ) -> Any:
        return with_named(function, params)(*join(num_graph_dims, *operands))

    def transpose(
        avals: Sequence[Any], d_results: Sequence[Array], *others: Array | None, num_graph_dims: int, **params: Any
    ) -> Sequence[Array]:
        """Applies the transpose of `op` for each graph to the cotangent of the sum."""
        own_avals = [jax.ShapeDtypeStruct(x.shape[num_graph_dims:], x.dtype) for x in avals]
        arrays = _with_graph_dims(others, num_graph_dims, [i - len(avals) for i in shared])
        transpose_one = functools.partial(with_named(transpose_of_op, params), own_avals, d_results)
        return map_over_batch(transpose_one, mapped_dims(arrays, num_graph_dims), *arrays)

    return Op(
        name=f"{op.name}_of_graphs",
        operands=operands,
        optional=op.optional,
        results=op.results,
        result_sizes=op.result_sizes,
        result_dtypes=op.result_dtypes,
        reference=functools.partial(run, op.reference),
        program=functools.partial(run, op.kernel),
        dtypes=op.dtypes,
        guarantee=op.guarantee,
        reduction_dims=lambda *, num_graph_dims: (*_graph_dims(num_graph_dims), "edge"),
        transposes={linear: transpose},
        **fields,
    )


def sum_over_graphs(
    op: Op,
    of_graphs: Op,
    num_graph_dims: int,
    operands: Sequence[Array | None],
    *,
    shared: Sequence[int] = (),
    **params: Any,
) -> Array:
    """The result of an op for one graph or, with `num_graph_dims`, summed over a batch of graphs in one call.

    Args:
      op: has one result.
      of_graphs: the result of :func:`op_of_graphs` for it.
    """
    if num_graph_dims == 0:
        return op(*operands, **params)[0]
    own = [x for i, x in enumerate(operands) if i not in shared and x is not None]
    num_graphs = math.prod(vmap_sizes(own, num_graph_dims))
    own_sizes = [x.shape[num_graph_dims] for x in own]
    is_static = jax_versions.is_static_shape((num_graphs, *own_sizes))
    if is_static and num_graphs * max(own_sizes) <= np.iinfo(np.int32).max:
        return of_graphs(*operands, num_graph_dims=num_graph_dims, **params)[0]
    # The edges and segments of all graphs exceed int32 or have no static number: compute one result per graph.
    arrays = _with_graph_dims(operands, num_graph_dims, shared)
    results = map_over_batch(lambda *x: op(*x, **params)[0], mapped_dims(arrays, num_graph_dims), *arrays)
    return results.sum(tuple(range(num_graph_dims)))


def _with_graph_dims(
    operands: Sequence[Array | None], num_graph_dims: int, shared: Sequence[int]
) -> list[Array | None]:
    """The operands. Shared ones get graph dimensions of size 1."""
    new_dims = range(num_graph_dims)
    return [x if x is None or i not in shared else jnp.expand_dims(x, new_dims) for i, x in enumerate(operands)]


def graph_axes(axes: ShardAxes, num_graph_dims: int) -> tuple[str, ...]:
    """The mesh axes that split the graphs, in the program of one shard."""
    return tuple(axis for dim in _graph_dims(num_graph_dims) for axis in axes.get(dim, ()))


def _graph_dims(num_graph_dims: int) -> tuple[str, ...]:
    return tuple(f"graph{i}" for i in range(num_graph_dims))


# Arrays ``[*graphs, size, ...]`` as ``[all graphs * size, ...]``.


def flat_batch(num_graph_dims: int, arrays: Sequence[Any]) -> list[Any]:
    """Arrays with all graph dimensions merged into one, ``[G, ...]``. None stays None, here and below."""
    sizes = vmap_sizes(arrays, num_graph_dims)

    def flat(x: Array) -> Array:
        shape = x.shape[num_graph_dims:]
        return jnp.broadcast_to(x, (*sizes, *shape)).reshape(math.prod(sizes), *shape)

    return [None if x is None else flat(x) for x in arrays]


def merge_graphs(array: Array | None) -> Array | None:
    """``[G, size, ...]`` as ``[G * size, ...]``."""
    return None if array is None else array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def renumbered(ids: Array, size: int) -> Array:
    """Ids ``[G, ...]`` in ``[0, size)`` within each graph, renumbered across all graphs. Ids out of range become -1."""
    first = per_row(jnp.arange(ids.shape[0], dtype=jnp.int32) * size, ids)
    return jnp.where(in_range(ids, size), ids.astype(jnp.int32) + first, -1)
