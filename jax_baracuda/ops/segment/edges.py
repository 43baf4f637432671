"""Common parts of the ops that gather rows along edges: rows, and programs for kernels with sorted edges or vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_baracuda._core.arrays import in_range
from jax_baracuda._core.functions import resolved
from jax_baracuda._core.op import Op
from jax_baracuda._core.rules import Traits, on_gpu
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
# Programs for kernels that need sorted edges, or load rows by vectors if these fit.

NEED_SORTED_EDGES = "the kernel takes sorted edges only"


def sorted_first(op: Callable[[], Op], needs_numbers: Callable[..., bool]) -> Callable[..., list[Array]]:
    """The program that sorts the edges of an op by segment, and then calls its kernel.

    Args:
      needs_numbers: ``(operands by name, params)`` -> whether the kernel reads the number of each edge, such as to find
        its weight.
    """

    def program(*operands: Array | None, **params: Any) -> list[Array]:
        arrays = dict(zip(resolved(op().operands, params), operands, strict=True))
        order, sorted_ids = sorted_by_segment(arrays["segment_ids"], params["num_segments"])
        numbers = order if arrays["edge_order"] is None else arrays["edge_order"][order]
        arrays |= {"gather_ids": arrays["gather_ids"][order], "segment_ids": sorted_ids}
        arrays["edge_order"] = numbers if needs_numbers(arrays, params) else None
        return op().kernel(*arrays.values(), **params | {"indices_are_sorted": True})

    return program


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


UNALIGNED_ROWS = on_gpu("no vectors fit the rows", fit_no_vectors)


def with_longer_rows(op: Callable[[], Op]) -> Callable[..., list[Array]]:
    """The program that pads rows, or those of each head, to whole vectors, and then calls the kernel of an op.

    It drops the added features of the results.
    """

    def program(*operands: Array | None, **params: Any) -> list[Array]:
        dims_of_each = list(resolved(op().operands, params).values())
        num_leading = len(dims_of_each[0]) - 1
        row_shape = operands[0].shape[num_leading:]
        features = math.prod(row_shape)
        added = _lacking(features, operands[0].dtype.itemsize)

        def longer(x: Array) -> Array:
            flat = x.reshape(*x.shape[:num_leading], features)
            return jnp.pad(flat, [(0, 0)] * num_leading + [(0, added)])

        has_features = [dims[-1] in ("...", "feature") for dims in dims_of_each]
        padded = (longer(x) if use and x is not None else x for use, x in zip(has_features, operands, strict=True))
        results = op().kernel(*padded, **params)
        return [x[..., :features].reshape(*x.shape[:-1], *row_shape) for x in results]

    return program
