"""What the maxima and minima of segments and of gathered rows share: their order, winners, ties and derivatives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_baracuda._core.arrays import accumulation_dtype
from jax_baracuda._core.sharding import MeshAxes
from jax_baracuda.ops.segment.cells import (
    equal_numbers,
    gather_segments,
    has_ordered_bits,
    row_numbers,
    xla_max,
    xla_min,
    xla_sum,
)
from jax_baracuda.ops.segment.ids import index_dtype
from jax_baracuda.ops.segment.shards import merge_over_shards

NO_WINNER = -1
"""A winner is the row that attains a cell's extremum, or NO_WINNER (the segment is empty or holds a NaN), or, where
ties are shared, minus the number (2 or more) of members that attain it, the identity of the reduction included."""


class Extremum(NamedTuple):
    """What tells the maximum and the minimum apart."""

    of_segments: Callable[..., Array]
    """``(data, ids, num_segments)``"""
    over_axes: Callable[[Array, Sequence[str]], Array]
    """Over the axes of a mesh."""
    of_stacked: Callable[[Array], Array]
    """Along the first axis: of shards or buckets."""
    infinity: float
    integer_bound: str

    def identity(self, dtype: Any) -> np.ndarray:
        """The extremum of no rows."""
        if jnp.issubdtype(dtype, jnp.inexact):
            value = self.infinity
        else:
            value = self.infinity > 0 if dtype == jnp.bool_ else getattr(jnp.iinfo(dtype), self.integer_bound)
        return np.asarray(value, dtype)


def _ordered(x: Array, nan_is_least: bool = False) -> Array:
    """Floating numbers as integers of the same order, with NaN above (or below) all others and -0 below +0."""
    signed = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), signed)
    ordered = jnp.where(bits < 0, bits ^ jnp.iinfo(signed).max, bits)
    return jnp.where(jnp.isnan(x), jnp.iinfo(signed).min, ordered) if nan_is_least else ordered


def _from_ordered(ordered: Array, dtype: Any) -> Array:
    return jax.lax.bitcast_convert_type(jnp.where(ordered < 0, ordered ^ jnp.iinfo(ordered.dtype).max, ordered), dtype)


def _wide_integers(x: Array) -> Array:
    """Collective libraries have no 16-bit integers and no booleans."""
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x


def _max_of_segments(data: Array, ids: Array, num_segments: int) -> Array:
    """``jax.ops.segment_max`` that propagates NaN on every backend, also where it becomes a maximum over devices."""
    if not has_ordered_bits(data.dtype):
        return xla_max(data, ids, num_segments)
    ordered = _ordered(data)
    cells = xla_max(_wide_integers(ordered), ids, num_segments)
    infinity = _ordered(jnp.asarray(-jnp.inf, data.dtype))
    return _from_ordered(jnp.maximum(cells, infinity.astype(cells.dtype)).astype(ordered.dtype), data.dtype)


def _min_of_segments(data: Array, ids: Array, num_segments: int) -> Array:
    """Without a negation, as all minima: in some fusions XLA computes it as ``0 - x``, which has no -0."""
    if not has_ordered_bits(data.dtype):
        return xla_min(data, ids, num_segments)
    ordered = _ordered(data, nan_is_least=True)
    cells = xla_min(_wide_integers(ordered), ids, num_segments)
    infinity = _ordered(jnp.asarray(jnp.inf, data.dtype))
    return _from_ordered(jnp.minimum(cells, infinity.astype(cells.dtype)).astype(ordered.dtype), data.dtype)


def _all_max(x: Array, axes: Sequence[str]) -> Array:
    """``jax.lax.pmax`` that propagates NaN and orders -0 below +0 on every backend."""
    if has_ordered_bits(x.dtype):
        return _from_ordered(_all_max(_ordered(x), axes), x.dtype)
    return jax.lax.pmax(_wide_integers(x), axes).astype(x.dtype)


def _all_min(x: Array, axes: Sequence[str]) -> Array:
    """``jax.lax.pmin`` that propagates NaN and orders -0 below +0 on every backend."""
    if has_ordered_bits(x.dtype):
        return _from_ordered(_all_min(_ordered(x, nan_is_least=True), axes), x.dtype)
    return ~_all_max(~x, axes)


def _max_of_stacked(x: Array) -> Array:
    """The maximum along the first axis, with NaN propagated and -0 below +0 on every backend."""
    if has_ordered_bits(x.dtype):
        return _from_ordered(_ordered(x).max(0), x.dtype)
    return x.max(0)


def _min_of_stacked(x: Array) -> Array:
    if has_ordered_bits(x.dtype):
        return _from_ordered(_ordered(x, nan_is_least=True).min(0), x.dtype)
    return x.min(0)


MAXIMUM = Extremum(_max_of_segments, _all_max, _max_of_stacked, -math.inf, "min")
MINIMUM = Extremum(_min_of_segments, _all_min, _min_of_stacked, math.inf, "max")


def reference_winner(extremum: Extremum, data: Array, ids: Array, output: Array, first_wins: bool) -> Array:
    num_segments = output.shape[0]
    if 0 in output.shape or 0 in data.shape:
        return jnp.full(output.shape, NO_WINNER, index_dtype(data.shape[0]))
    row = row_numbers(data)
    extrema, is_member = gather_segments(output, ids)
    attains = is_member & equal_numbers(data, extrema)
    if first_wins:
        none = jnp.iinfo(row.dtype).max
        first = xla_min(jnp.where(attains, row, none), ids, num_segments)
        return jnp.where(first == none, NO_WINNER, first)
    # In one scatter: where one row attains the extremum, the sum of the numbers of such rows is its number.
    of_rows = jnp.stack([attains.astype(row.dtype), jnp.where(attains, row, 0)], axis=-1)
    of_cells = xla_sum(of_rows, ids, num_segments)
    attaining, sole = of_cells[..., 0], of_cells[..., 1]
    members = attaining + (output == extremum.identity(output.dtype)).astype(row.dtype)
    return jnp.where(members > 1, -members, jnp.where(attaining == 1, sole, NO_WINNER))


def reference_gradient(d_output: Array, winner: Array, ids: Array, *data_and_output: Array) -> Array:
    """What the gradient kernels of maximum and minimum compute."""
    winners, is_member = gather_segments(winner, ids)
    # Wide, so that shares are rounded once.
    cotangents, _ = gather_segments(d_output.astype(accumulation_dtype(d_output.dtype)), ids)
    wins = is_member & (winners == row_numbers(winners))
    gradient = jnp.where(wins, cotangents, 0)
    if data_and_output:
        data, output = data_and_output
        ties = is_member & (winners < NO_WINNER) & equal_numbers(data, gather_segments(output, ids)[0])
        members = jnp.where(ties, -winners, 1).astype(cotangents.dtype)
        gradient = jnp.where(ties, cotangents / members, gradient)
    return gradient.astype(d_output.dtype)


def of_winners(
    d_rows: Array, winner: Array, row: Array, is_won: Array, sums_of_ties: Callable[[], Array] | None
) -> Array:
    """For each cell, what its winner has of `d_rows`, 0 where there is none: the transpose of the gradient.

    Args:
      row: of `d_rows`, which each cell takes where no rows tie.
      is_won: which cells have one.
      sums_of_ties: the cells where rows do tie, of which no winner tells; None: the first of tied rows wins.
    """

    def of_rows() -> Array:
        taken = jnp.take_along_axis(d_rows, jnp.clip(row, 0, d_rows.shape[0] - 1), axis=0, mode="promise_in_bounds")
        return jnp.where(is_won, taken, 0)

    if sums_of_ties is None:
        return of_rows()
    return jax.lax.cond((winner < NO_WINNER).any(), sums_of_ties, of_rows)


def shares_of_ties(cells: Array, winner: Array) -> Array:
    """The cells divided by the number of members that attain the extremum of each, rounded once."""
    wide = cells.astype(accumulation_dtype(cells.dtype))
    return (wide / jnp.where(winner < NO_WINNER, -winner, 1).astype(wide.dtype)).astype(cells.dtype)


def own_winners(winner: Array, first_row: Array, num_rows: int) -> Array:
    """The winners among the rows of this shard, by their number in it."""
    row = winner - first_row
    row = jnp.where((row >= 0) & (row < num_rows), row, NO_WINNER)
    return jnp.where(winner >= 0, row, winner)


def extrema_over_shards(
    extremum: Extremum, local_output: Array, row_axes: MeshAxes, segment_axes: MeshAxes = ()
) -> Array:
    """The extrema of all rows: where segments are split as rows are, of the segments of each device."""
    if segment_axes == row_axes or local_output.dtype.itemsize < 4:  # an all-reduce would need wider numbers
        return merge_over_shards(lambda x: [extremum.of_stacked(x)], [local_output], row_axes, segment_axes)[0]
    return extremum.over_axes(local_output, row_axes)


def winners_over_shards(
    extremum: Extremum,
    local_output: Array,
    local_winner: Array,
    first_row: Array,
    row_axes: MeshAxes,
    segment_axes: MeshAxes,
    first_wins: bool,
) -> Sequence[Array]:
    """The extrema and winners of all rows, given those of each shard's: where segments are split as rows are, of the
    segments of each device."""
    row = jnp.where(local_winner >= 0, local_winner + first_row, local_winner)
    if first_wins and segment_axes != row_axes:
        output = extremum.over_axes(local_output, row_axes)
        none = jnp.iinfo(jnp.int32).max
        attains = equal_numbers(local_output, output) & (row != NO_WINNER)
        row = jax.lax.pmin(jnp.where(attains, row, none), row_axes)
        return output, jnp.where(row == none, NO_WINNER, row)
    # All-reduces would exchange three arrays of cells: extrema, numbers of members, and the rows of sole ones.
    merge = functools.partial(_merge_winners, extremum, first_wins)
    return merge_over_shards(merge, [local_output, row], row_axes, segment_axes)


def _merge_winners(extremum: Extremum, first_wins: bool, outputs: Array, winners: Array) -> tuple[Array, Array]:
    output = extremum.of_stacked(outputs)
    attains = equal_numbers(outputs, output[None]) & (winners != NO_WINNER)
    none = jnp.iinfo(jnp.int32).max
    first = jnp.where(attains & (winners >= 0), winners, none).min(0)
    first = jnp.where(first == none, NO_WINNER, first)
    if first_wins:
        return output, first
    identity = (output == extremum.identity(output.dtype)).astype(jnp.int32)
    of_shards = jnp.where(winners >= 0, 1, -winners - identity[None])
    members = jnp.where(attains, of_shards, 0).sum(0, dtype=jnp.int32)
    members = jnp.where(members > 0, members + identity, 0)
    return output, jnp.where(members > 1, -members, first)


def first_gets_all(name: str, tie_break: str) -> bool:
    if tie_break not in ("split", "first"):
        raise ValueError(f"{name}: tie_break must be 'split' or 'first', got {tie_break!r}")
    return tie_break == "first"
