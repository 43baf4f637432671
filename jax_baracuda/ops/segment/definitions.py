"""Common parts of the definitions of segment ops: dimensions, dtypes, params, guarantees, programs of shards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_baracuda._core.arrays import FLOATING_DTYPES, INTEGER_DTYPES
from jax_baracuda._core.call import num_features
from jax_baracuda._core.functions import with_named
from jax_baracuda._core.guarantees import EXACT, Guarantee, accumulated
from jax_baracuda._core.op import NamedDimensions, OfParams, Op
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.rules import call_bound, on_cpu, single_feature, unsorted
from jax_baracuda._core.sharding import MeshAxes, ShardAxes, ShardKernel
from jax_baracuda.ops.segment.ids import signed_ids

ORDERED_DTYPES = FLOATING_DTYPES | INTEGER_DTYPES | {"bool"}
WIDE_DTYPES = FLOATING_DTYPES | {"int32", "uint32", "int64", "uint64"}
BELOW_FLOAT64 = FLOATING_DTYPES - {"float64"}

ROWS = ("row", "...")
IDS = ("row",)
CELLS = ("segment", "...")
COUNTS = ("segment",)

NOTHING_TO_VECTORISE = on_cpu("a single feature leaves the kernel nothing to vectorise", single_feature)
# Two cores, time of plain JAX / kernel, for rows in memory and rows that XLA computes (200 loops): sums and means 0.2
# to 1.3, mostly 0.5 to 0.9. Extrema, and sums of gathered rows: 0.25 to 0.98, once 1.2, in rows of 1 and 3 numbers;
# 0.6 to 2.1 in rows of 16 and 64.
SHORT_REDUCTION = on_cpu("calling a kernel takes longer than the reduction", unsorted, call_bound)


def product_guarantee(dtype: str, platform: str) -> Guarantee:
    if jnp.issubdtype(dtype, jnp.floating):
        return accumulated(dtype, platform)
    return dataclasses.replace(EXACT, accumulator=dtype)


def sum_guarantee(dtype: str, platform: str, *, deterministic: bool, indices_are_sorted: bool) -> Guarantee:
    """Like products, except that GPUs may add unsorted floating rows by atomics, in an order that varies.

    Some ops have kernels that add in a fixed order, but plain JAX, which may be picked, does not.
    """
    guarantee = product_guarantee(dtype, platform)
    is_stable = platform == "cpu" or deterministic or indices_are_sorted or guarantee.math_precision == "exact"
    return dataclasses.replace(guarantee, deterministic=is_stable, bit_stable_on_same_hardware=is_stable)


def float64_guarantee(dtype: str, platform: str, *, deterministic: bool, indices_are_sorted: bool) -> Guarantee:
    """That of sums, added in float64."""
    guarantee = sum_guarantee(dtype, platform, deterministic=deterministic, indices_are_sorted=indices_are_sorted)
    return dataclasses.replace(guarantee, accumulator="float64")


def plan_parameters(
    values: Any,
    *_: Any,
    sizes: Mapping[str, int],
    indices_are_sorted: bool = False,
    deterministic: bool = False,
    has_weights: bool = False,
) -> dict[str, int]:
    """The parameters from which the native modules plan a call. `values` gives the element type."""
    return {
        "rows": sizes["row" if "row" in sizes else "edge"],
        "gathered_rows": sizes.get("gathered", 0),
        "segments": sizes["segment"],
        "features": num_features(sizes),
        "heads": sizes.get("head", 1),
        "element_bytes": np.dtype(values.dtype).itemsize,
        "is_floating": jnp.issubdtype(values.dtype, jnp.floating),
        "indices_are_sorted": indices_are_sorted,
        "deterministic": deterministic,
        "has_weights": has_weights,
    }


def limit_of_32_bits(*_: Any, sizes: Mapping[str, int]) -> str | None:
    """Kernels number winners in int32, and segments, or the rows that edges gather, in uint32."""
    if sizes["row" if "row" in sizes else "edge"] >= np.iinfo(np.int32).max:
        return "it has 2^31 - 1 rows or more"
    segments = max(sizes["segment"], sizes.get("gathered", 0))
    return "it has 2^32 - 1 segments or more" if segments >= np.iinfo(np.uint32).max else None


SEGMENT_FIELDS: Any = {
    "result_sizes": lambda *, num_segments: {"segment": num_segments},
    "plan_parameters": plan_parameters,
    "limit": limit_of_32_bits,
}
"""The fields of ops whose param `num_segments` is the number of segments."""


def reduction_op(
    name: str,
    *,
    results: OfParams[NamedDimensions],
    shard_program: ShardProgram,
    **fields: Any,
) -> Op:
    """An op of (data, segment_ids) whose results are cells. `shard_program`: for rows split over devices."""
    defaults = SEGMENT_FIELDS | {
        "attributes": ("indices_are_sorted",),
        "reduction_dims": ("row",),
        "shard_program": of_split_segments(shard_program, ids_operand=1),
    }
    return define_op(name=name, operands={"data": ROWS, "segment_ids": IDS}, results=results, **(defaults | fields))


def gradient_op(name: str, *, operands: NamedDimensions, **fields: Any) -> Op:
    """An op of d_output, segment_ids and others whose result is the cotangent of the data."""
    defaults = {
        # Gradients gather, so it makes no difference how the rows were summed.
        "plan_parameters": lambda d_output, *_, sizes: plan_parameters(d_output, sizes=sizes),
        "replicated_dims": ("segment",),
        "limit": limit_of_32_bits,
    }
    return define_op(
        name=name, operands=operands, results={"d_data": ROWS}, dtypes=FLOATING_DTYPES, **(defaults | fields)
    )


# ----------------------------------------------------------------------------------------------------------------------
# The program of one shard, for rows (or edges) or segments that are split over devices.

ShardProgram = Callable[..., Sequence[Array]]
"""``(kernel, axes, *operands, **params) -> results``: see :attr:`jax_baracuda._core.op.Op.shard_program`."""


def index_of_first_row(segment_ids: Array, row_axes: Sequence[str]) -> Array:
    """The global index of this shard's first row."""
    return (jax.lax.axis_index(row_axes) * segment_ids.shape[0]).astype(jnp.int32)


def sum_over_axes(cells: Array, row_axes: MeshAxes, segment_axes: MeshAxes) -> Array:
    """The sum over the shards: an all-reduce, or a reduce-scatter if the row axes also split the segments."""
    if segment_axes == row_axes:
        return jax.lax.psum_scatter(cells, row_axes, tiled=True)
    return jax.lax.psum(cells, row_axes)


def merge_over_shards(
    merge: Callable[..., Sequence[Array]], cells: Sequence[Array], row_axes: MeshAxes, segment_axes: MeshAxes
) -> Sequence[Array]:
    """Merges the cells of all shards. If the row axes also split the segments, each device gets its own segments.

    For merges that an all-reduce cannot do, or only with more arrays. An all-to-all gives each device a part of the
    segments to merge, which costs half the exchange of an all-reduce of every array. An all-gather, the other half,
    brings the results to all devices.

    Args:
      merge: ``(*cells of all shards [shards, segments, ...]) -> cells [segments, ...]``.
      cells: the cells of this shard.
    """
    num_shards, num_segments = jax.lax.axis_size(row_axes), cells[0].shape[0]
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


def of_split_segments(shard_program: ShardProgram, *, ids_operand: int) -> ShardProgram:
    """Extends a program for split rows to split segments.

    If different axes split segments and rows, each device reduces only its own segments: ids of other segments are out
    of its range. If the same axes do, each device computes cells of all segments from its rows; devices exchange them,
    and each keeps its own segments.

    Args:
      shard_program: the program for split rows. It may return only the cells of this device's segments.
      ids_operand: the position of the operand with the segment ids.
    """

    def program(kernel: ShardKernel, axes: ShardAxes, *operands: Array, **params: Any) -> Sequence[Array]:
        segment_axes = axes.get("segment", ())
        if not segment_axes:
            return with_named(shard_program, params)(kernel, axes, *operands)
        num_segments = params["num_segments"]
        num_own = num_segments // jax.lax.axis_size(segment_axes)
        first = jax.lax.axis_index(segment_axes) * num_own
        # Of the other dimensions, only rows may be split by the same axes: cells have all others, too.
        other_axes = {axis for name, of in axes.items() if name != "segment" for axis in of}
        if other_axes.isdisjoint(segment_axes):
            own = {"num_segments": num_own}
            ids = signed_ids(operands[ids_operand], num_segments)
            ids = jnp.maximum(ids, -1) - first  # ascending ids stay ascending
            operands = (*operands[:ids_operand], ids, *operands[ids_operand + 1 :])
            return with_named(shard_program, params | own)(functools.partial(kernel, **own), axes, *operands)
        return [
            jax.lax.dynamic_slice_in_dim(cells, first, num_own) if cells.shape[0] == num_segments else cells
            for cells in with_named(shard_program, params)(kernel, axes, *operands)
        ]

    return program
