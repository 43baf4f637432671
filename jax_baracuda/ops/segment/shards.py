"""The program of one shard, for rows (or edges) or segments that are split over devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_baracuda._core.op import NamedDimensions, with_named
from jax_baracuda._core.sharding import MeshAxes, ShardAxes, ShardKernel
from jax_baracuda.ops.segment.ids import signed_ids

ShardProgram = Callable[..., Sequence[Array]]
"""``(kernel, axes, *operands, **params) -> results``: see :attr:`jax_baracuda._core.op.Op.shard_program`."""


def row_axes_of(axes: ShardAxes) -> MeshAxes:
    """The mesh axes that split the rows, in the program of one shard."""
    return axes.get("row", ())


def index_of_first_row(segment_ids: Array, row_axes: Sequence[str]) -> Array:
    """The global index of this shard's first row."""
    return (jax.lax.axis_index(row_axes) * segment_ids.shape[0]).astype(jnp.int32)


def sum_over_axes(cells: Array, row_axes: MeshAxes, segment_axes: MeshAxes = ()) -> Array:
    """The sum over the shards: an all-reduce, or a reduce-scatter if the row axes also split the segments."""
    if segment_axes == row_axes:
        return jax.lax.psum_scatter(cells, row_axes, tiled=True)
    return jax.lax.psum(cells, row_axes)


def merge_over_shards(
    merge: Callable[..., Sequence[Array]], cells: Sequence[Array], row_axes: MeshAxes, segment_axes: MeshAxes = ()
) -> Sequence[Array]:
    """Merges the cells of all shards. If the row axes also split the segments, each device gets its own segments.

    For merges that an all-reduce cannot do, or only with more arrays. An all-to-all gives each device a part of the
    segments to merge, which costs half the exchange of an all-reduce of every array. An all-gather, the other half,
    brings the results to all devices.

    Args:
      merge: ``(*cells of all shards [shards, segments, ...]) -> cells [segments, ...]``.
      cells: the cells of this shard.
    """
    num_shards, num_segments = jax.lax.psum(1, row_axes), cells[0].shape[0]
    lacking = -num_segments % num_shards

    def part_of_all(x: Array) -> Array:
        if lacking:
            x = jnp.pad(x, [(0, lacking), *[(0, 0)] * (x.ndim - 1)])
        parts = x.reshape(num_shards, x.shape[0] // num_shards, *x.shape[1:])
        return jax.lax.all_to_all(parts, row_axes, split_axis=0, concat_axis=0)

    results = merge(*map(part_of_all, cells))
    if segment_axes == row_axes:
        return results
    return [jax.lax.all_gather(x, row_axes, tiled=True)[:num_segments] for x in results]


def of_split_segments(
    shard_program: ShardProgram,
    *,
    results: NamedDimensions | Callable[..., NamedDimensions],
    row_dims: tuple[str, ...] | Callable[..., tuple[str, ...]],
    ids_operand: int,
    size: str = "num_segments",
) -> ShardProgram:
    """Extends a program for split rows to split segments.

    If different axes split segments and rows, each device reduces only its own segments: ids of other segments are out
    of its range. If the same axes do, each device computes cells of all segments from its rows; devices exchange them,
    and each keeps its own segments.

    Args:
      shard_program: the program for split rows. It may return only the cells of this device's segments.
      results: the dimensions of the results, or ``(**params)`` -> these.
      row_dims: the reduced dimensions, or ``(**params)`` -> these.
      ids_operand: the position of the operand with the segment ids.
      size: the name of the parameter that holds the number of segments.
    """

    def program(kernel: ShardKernel, axes: ShardAxes, *operands: Array, **params: Any) -> Sequence[Array]:
        segment_axes = axes.get("segment", ())
        if not segment_axes:
            return with_named(shard_program, params)(kernel, axes, *operands)
        num_own = params[size] // jax.lax.psum(1, segment_axes)
        first = jax.lax.axis_index(segment_axes) * num_own
        names_of_rows = with_named(row_dims, params)() if callable(row_dims) else row_dims
        if {axis for name in names_of_rows for axis in axes.get(name, ())}.isdisjoint(segment_axes):
            own = {size: num_own}
            ids = signed_ids(operands[ids_operand], params[size])
            ids = jnp.maximum(ids, -1) - first  # ascending ids stay ascending
            operands = (*operands[:ids_operand], ids, *operands[ids_operand + 1 :])
            return with_named(shard_program, params | own)(functools.partial(kernel, **own), axes, *operands)
        names_of_results = (with_named(results, params)() if callable(results) else results).values()
        results_of_shard = with_named(shard_program, params)(kernel, axes, *operands)
        return [
            jax.lax.dynamic_slice_in_dim(result, first, num_own)
            if names[0] == "segment" and result.shape[0] == params[size]
            else result
            for names, result in zip(names_of_results, results_of_shard, strict=True)
        ]

    return program
