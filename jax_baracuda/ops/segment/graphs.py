"""Sums over batches of graphs that gather from the same rows, joined into one graph with the edges and segments of all.

Each batch dimension keeps its own name until the program of one shard joins the graphs, so a batch that is split over
devices stays split.
"""

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
from jax_baracuda._core.batch import map_over_batch, vmap_sizes
from jax_baracuda._core.functions import resolved, with_named
from jax_baracuda._core.op import NamedDimensions, Op
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.sharding import ShardAxes
from jax_baracuda.ops.segment.cells import per_row


def sum_over_graphs(
    op: Op, join: Callable[..., Sequence[Array | None]], *, shared: Sequence[int] = (), **fields: Any
) -> Callable[..., Array]:
    """A function that sums an op's result over a batch of graphs, in one call.

    Args:
      op: has one result, and `transposes` by its first operand. Each operand holds cells of a graph, belongs to its
        edges, or is shared.
      join: ``(num_graph_dims, *operands)`` -> the operands of `op`.
      shared: the positions of operands that all graphs share. The others have the graph dimensions in front, whose
        sizes may be 1.
      fields: fields of the op of the sum that do not follow from `op`.

    Returns:
      ``(num_graph_dims, operands, **params)`` -> the sum. Without graph dimensions, it is the result of `op`.
    """
    of_graphs = _op_of_graphs(op, join, shared, fields)

    def total(num_graph_dims: int, operands: Sequence[Array | None], **params: Any) -> Array:
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
        results = map_over_batch(lambda *x: op(*x, **params)[0], num_graph_dims, *arrays)
        return results.sum(tuple(range(num_graph_dims)))

    return total


def _op_of_graphs(
    op: Op, join: Callable[..., Sequence[Array | None]], shared: Sequence[int], fields: Mapping[str, Any]
) -> Op:
    """The op of the sum, in which each graph dimension has a name."""
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
        return map_over_batch(transpose_one, num_graph_dims, *arrays)

    return define_op(
        name=f"{op.name}_of_graphs",
        operands=operands,
        optional=op.optional,
        defaults=op.defaults,
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


# ----------------------------------------------------------------------------------------------------------------------
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
