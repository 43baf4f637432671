"""Common parts of the ops that gather rows along edges: rows, and programs for GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_baracuda._core.arrays import in_range
from jax_baracuda._core.dispatch import Traits
from jax_baracuda._core.op import Op
from jax_baracuda.ops.segment.cells import gather_or_zeros
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
