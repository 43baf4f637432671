"""Batches of graphs that gather from the same rows, joined into one graph with the edges and segments of all.

Each batch dimension keeps its own name until the program of one shard joins them, so a batch that is split over devices
stays split.
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
from jax_baracuda._core.batch import map_over_batch, mapped_dims, vmap_sizes
from jax_baracuda._core.op import NamedDimensions, Op, with_named
from jax_baracuda._core.sharding import ShardAxes


def op_of_graphs(op: Op, join: Callable[..., Sequence[Array]], *, shared: Sequence[str] = (), **fields: Any) -> Op:
    """The sum of an op's result over graphs.

    Args:
      op: has one result and a `transpose`. Each operand holds cells of a graph, belongs to its edges, or is shared.
      join: ``(num_graph_dims, *operands)`` -> the operands of `op`.
      shared: the names of operands that all graphs share. The others have the graph dimensions in front, whose sizes
        may be 1.
      fields: fields of the new op that do not follow from `op`.
    """

    def own_operands(**params: Any) -> NamedDimensions:
        return with_named(op.operands, params)() if callable(op.operands) else op.operands

    def operands(*, num_graph_dims: int, **params: Any) -> NamedDimensions:
        graphs = _graph_dims(num_graph_dims)
        own = own_operands(**params)
        return {name: dims if name in shared else (*graphs, *dims) for name, dims in own.items()}

    def run(function: Callable[..., Sequence[Array]], *operands: Array, num_graph_dims: int, **params: Any) -> Any:
        return with_named(function, params)(*join(num_graph_dims, *operands))

    def transpose(
        avals: Sequence[Any], d_results: Sequence[Array], *others: Array, num_graph_dims: int, **params: Any
    ) -> Sequence[Array]:
        """Applies the transpose of `op` for each graph to the cotangent of the sum."""
        own_avals = [jax.ShapeDtypeStruct(x.shape[num_graph_dims:], x.dtype) for x in avals]
        names = list(own_operands(**params))[len(avals) :]
        arrays = _with_graph_dims(dict(zip(names, others, strict=True)), num_graph_dims, shared)

        def transpose_one(*others: Array) -> Sequence[Array]:
            assert op.transpose is not None
            return tuple(with_named(op.transpose, params)(own_avals, d_results, *others))

        return map_over_batch(transpose_one, mapped_dims(arrays, num_graph_dims), *arrays)

    return Op(
        name=f"{op.name}_of_graphs",
        operands=operands,
        results=op.results,
        sizes=op.sizes,
        result_dtypes=op.result_dtypes,
        reference=functools.partial(run, op.reference),
        program=functools.partial(run, op.kernel),
        dtypes=op.dtypes,
        guarantee=op.guarantee,
        reduction_dims=lambda *, num_graph_dims: (*_graph_dims(num_graph_dims), "edge"),
        transpose=transpose,
        **fields,
    )


def sum_over_graphs(
    op: Op,
    of_graphs: Op,
    num_graph_dims: int,
    operands: Mapping[str, Array],
    *,
    shared: Sequence[str] = (),
    **params: Any,
) -> Array:
    """The result of an op for one graph or, with `num_graph_dims`, summed over a batch of graphs in one call.

    Args:
      op: has one result.
      of_graphs: the result of :func:`op_of_graphs` for it.
    """
    if num_graph_dims == 0:
        return op(*operands.values(), **params)[0]
    own = [x for name, x in operands.items() if name not in shared]
    num_graphs = math.prod(vmap_sizes(own, num_graph_dims))
    own_sizes = [x.shape[num_graph_dims] for x in own]
    is_static = jax_versions.is_static_shape((num_graphs, *own_sizes))
    if is_static and num_graphs * max(own_sizes) <= np.iinfo(np.int32).max:
        return of_graphs(*operands.values(), num_graph_dims=num_graph_dims, **params)[0]
    # The edges and segments of all graphs exceed int32 or have no static number: compute one result per graph.
    arrays = _with_graph_dims(operands, num_graph_dims, shared)
    results = map_over_batch(lambda *x: op(*x, **params)[0], mapped_dims(arrays, num_graph_dims), *arrays)
    return results.sum(tuple(range(num_graph_dims)))


def _with_graph_dims(operands: Mapping[str, Array], num_graph_dims: int, shared: Sequence[str]) -> list[Array]:
    """The operands. Shared ones get graph dimensions of size 1."""
    new_dims = range(num_graph_dims)
    return [jnp.expand_dims(x, new_dims) if name in shared else x for name, x in operands.items()]


def graph_axes(axes: ShardAxes, num_graph_dims: int) -> tuple[str, ...]:
    """The mesh axes that split the graphs, in the program of one shard."""
    return tuple(axis for dim in _graph_dims(num_graph_dims) for axis in axes.get(dim, ()))


def _graph_dims(num_graph_dims: int) -> tuple[str, ...]:
    return tuple(f"graph{i}" for i in range(num_graph_dims))


# ----------------------------------------------------------------------------------------------------------------------
# Arrays ``[*graphs, size, ...]`` as ``[all graphs * size, ...]``.


def whole_batch(num_graph_dims: int, arrays: Sequence[Array]) -> list[Array]:
    """Arrays with all graph dimensions merged into one, ``[G, ...]``."""
    sizes = vmap_sizes(arrays, num_graph_dims)
    num_graphs = math.prod(sizes)
    own_shapes = [x.shape[num_graph_dims:] for x in arrays]
    return [
        jnp.broadcast_to(x, (*sizes, *shape)).reshape(num_graphs, *shape)
        for x, shape in zip(arrays, own_shapes, strict=True)
    ]


def merged(array: Array) -> Array:
    """``[G, size, ...]`` as ``[G * size, ...]``."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def numbered_through(ids: Array, size: int) -> Array:
    """Ids ``[G, ...]`` in ``[0, size)`` within each graph, renumbered across all graphs. Ids out of range become -1."""
    first = (jnp.arange(ids.shape[0], dtype=jnp.int32) * size).reshape(-1, *[1] * (ids.ndim - 1))
    return jnp.where((ids >= 0) & (ids < size), ids.astype(jnp.int32) + first, -1)
