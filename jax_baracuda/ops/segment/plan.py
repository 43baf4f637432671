"""The order of the edges of a graph, computed once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda.ops.segment.arguments import canonical_edges, static_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentPlan:
    """The edges of a graph in the order of their receivers and in that of their senders; see :func:`segment_plan`.

    A pytree of arrays of int32: pass it to compiled programs as an argument.
    """

    edge_order: Array
    """``[E]``: edges by segment, in their own order within one, dropped edges last."""
    gather_ids: Array
    """``[E]``: what each of these gathers."""
    segment_ids: Array
    """``[E]``: its segment, ascending; `num_segments` for a dropped edge."""
    transposed_order: Array
    """``[E]``: edges by the row that they gather."""
    transposed_gather_ids: Array
    """``[E]``: the segment of each of these; `num_segments` for a dropped edge."""
    transposed_segment_ids: Array
    """``[E]``: its row, ascending; `num_rows` where the id was out of range."""
    num_segments: int = dataclasses.field(metadata={"static": True})
    num_rows: int = dataclasses.field(metadata={"static": True})


def segment_plan(segment_ids: ArrayLike, num_segments: int, gather_ids: ArrayLike, num_rows: int) -> SegmentPlan:
    """The order of the edges of a graph, for calls that share it: no call sorts any more.

    Edge e goes from row ``gather_ids[e]`` to segment ``segment_ids[e]``, as in :func:`gather_segment_sum`.

    Args:
      segment_ids: ``[E]``, any integer dtype, in any order. Edges whose id is negative or at least `num_segments` are
        dropped.
      num_segments: number of segments S, static under ``jit``.
      gather_ids: ``[E]``, any integer dtype, in any order. Negative ids count from the end; ids out of range name the
        nearest row, and no gradient goes through them, as in ``data[gather_ids]``.
      num_rows: number of rows N of the data, static under ``jit``.

    Returns:
      A :class:`SegmentPlan`, whose orders are stable sorts of the ids.

    Raises:
      TypeError, IndexError, ValueError: an argument does not fit.

    Gradient: there is none; ids have no tangents.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> plan = jb.segment_plan(jnp.array([1, 0, 1]), 2, jnp.array([2, 0, 1]), 3)
      >>> print(plan.edge_order, plan.segment_ids, plan.gather_ids)
      [1 0 2] [0 1 1] [0 2 1]
    """
    name = "segment_plan"
    num_segments = static_size(name, "num_segments", num_segments)
    num_rows = static_size(name, "num_rows", num_rows)
    rows, segments = canonical_edges(name, gather_ids, segment_ids, num_rows, num_segments)
    nearest_rows = jnp.clip(rows, 0, max(num_rows - 1, 0))
    segments, rows = _in_range(segments, num_segments), _in_range(rows, num_rows)
    order, transposed_order = (jnp.argsort(ids, stable=True).astype(jnp.int32) for ids in (segments, rows))
    return SegmentPlan(
        edge_order=order,
        gather_ids=nearest_rows[order],
        segment_ids=segments[order],
        transposed_order=transposed_order,
        transposed_gather_ids=segments[transposed_order],
        transposed_segment_ids=rows[transposed_order],
        num_segments=num_segments,
        num_rows=num_rows,
    )


def _in_range(ids: Array, size: int) -> Array:
    """Ids as int32, `size` for those out of range."""
    return jnp.where((ids >= 0) & (ids < size), ids, size).astype(jnp.int32)
