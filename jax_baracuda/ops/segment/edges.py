"""Common parts of the ops that gather rows along edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_baracuda._core.dispatch import Traits
from jax_baracuda._core.op import Op
from jax_baracuda.ops.segment.cells import gather_or_zeros
from jax_baracuda.ops.segment.definitions import limit_of_32_bits
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
    return jnp.where((segment_ids >= 0) & (segment_ids < num_segments), segment_ids, -1).astype(jnp.int32)


def replicated_dims_of_cells(*, has_edge_order: bool) -> tuple[str, ...]:
    """For ops whose results are cells: without an edge order, each device may compute its own segments."""
    return ("gathered", "segment", "edge") if has_edge_order else ("gathered",)


def replicated_dims(*, has_edge_order: bool) -> tuple[str, ...]:
    """For other ops. An edge order refers to all edges, so they are replicated with it."""
    return ("gathered", "segment", "edge") if has_edge_order else ("gathered", "segment")


def limit_of_edges(data: Any, gather_ids: Any, segment_ids: Any, *_: Any, num_segments: int) -> str | None:
    return limit_of_32_bits(segment_ids.shape[0], num_segments)


# ----------------------------------------------------------------------------------------------------------------------
# Programs for GPUs, whose kernels need sorted edges and load rows by vectors if these fit.


def sorted_edges(
    gather_ids: Array, segment_ids: Array, edge_order: Sequence[Array], num_segments: int
) -> tuple[Array, Array, Array]:
    """The gather ids and segment ids of the edges sorted by segment, and the numbers of these edges."""
    order, sorted_ids = sorted_by_segment(segment_ids, num_segments)
    return gather_ids[order], sorted_ids, edge_order[0][order] if edge_order else order


VECTOR_BYTES = 16
MIN_VECTOR_BYTES = 8
"""Rows that vectors of this size fit gain too little: -20% to 25% for 20 to 300 bfloat16 numbers."""
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
    sizes = traits.sizes
    if sizes["row_bytes"] == 0:
        return False
    features, element_bytes = sizes.get("feature", sizes["features"]), sizes["row_bytes"] // sizes["features"]
    longer = features + _lacking(features, element_bytes)
    return (
        features * element_bytes % MIN_VECTOR_BYTES > 0
        and longer <= MAX_GROWTH * features
        and sizes["row_bytes"] // features * longer >= MIN_ROW_BYTES
        and sizes["edge"] >= max(MIN_EDGES, MIN_EDGES_PER_ROW * (sizes["gathered"] + sizes["segment"]))
    )


def _lacking(features: int, element_bytes: int) -> int:
    """The number of features that a row (or the row of a head) lacks to be whole vectors."""
    return -features % (VECTOR_BYTES // element_bytes)


def with_longer_rows(
    op: Op, operands: Sequence[Array], padded: Sequence[int] = (0,), *, has_heads: bool = False, **params: Any
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

    results = op.kernel(*(longer(x) if i in padded else x for i, x in enumerate(operands)), **params)
    return [x[..., :features].reshape(*x.shape[:-1], *dims) for x in results]
