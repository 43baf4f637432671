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
    """``[E]``: what each of these gathers; -1 or `num_rows` where the id is out of range."""
    segment_ids: Array
    """``[E]``: its segment, ascending; `num_segments` for a dropped edge."""
    edge_segment_ids: Array
    """``[E]``: the segment of each edge in their own order; -1 or `num_segments` for a dropped edge."""
    transposed_order: Array
    """``[E]``: edges by the row that they gather."""
    transposed_gather_ids: Array
    """``[E]``: the segment of each of these; -1 or `num_segments` for a dropped edge."""
    transposed_segment_ids: Array
    """``[E]``: its row, ascending; `num_rows` where the id is out of range."""
    edge_gather_ids: Array
    """``[E]``: what each edge gathers, in their own order; -1 or `num_rows` where the id is out of range."""
    num_segments: int = dataclasses.field(metadata={"static": True})
    num_rows: int = dataclasses.field(metadata={"static": True})

    @property
    def transposed(self) -> SegmentPlan:
        """The plan of the edges in the other direction: from their segments to the rows that they gather."""
        return SegmentPlan(
            edge_order=self.transposed_order,
            gather_ids=self.transposed_gather_ids,
            segment_ids=self.transposed_segment_ids,
            edge_segment_ids=self.edge_gather_ids,
            transposed_order=self.edge_order,
            transposed_gather_ids=self.gather_ids,
            transposed_segment_ids=self.segment_ids,
            edge_gather_ids=self.edge_segment_ids,
            num_segments=self.num_rows,
            num_rows=self.num_segments,
        )


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
      A :class:`SegmentPlan`, whose orders are stable sorts of the ids. Its property `transposed` is the plan of the
      same edges in the other direction.

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
    rows, segments = _in_32_bits(rows, num_rows), _in_32_bits(segments, num_segments)
    order, transposed_order = (
        jnp.argsort(_dropped_last(ids, size), stable=True).astype(jnp.int32)
        for ids, size in ((segments, num_segments), (rows, num_rows))
    )
    return SegmentPlan(
        edge_order=order,
        gather_ids=rows[order],
        segment_ids=_dropped_last(segments, num_segments)[order],
        edge_segment_ids=segments,
        transposed_order=transposed_order,
        transposed_gather_ids=segments[transposed_order],
        transposed_segment_ids=_dropped_last(rows, num_rows)[transposed_order],
        edge_gather_ids=rows,
        num_segments=num_segments,
        num_rows=num_rows,
    )


def _in_32_bits(ids: Array, size: int) -> Array:
    """Ids as int32, those out of range by one: on the side where they are."""
    return jnp.clip(ids, -1, size).astype(jnp.int32)


def _dropped_last(ids: Array, size: int) -> Array:
    return jnp.where(ids < 0, size, ids)
