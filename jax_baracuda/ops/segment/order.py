"""The order of rows by segment, as a separate op: XLA merges equal calls of it within a program."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_baracuda._core.guarantees import EXACT
from jax_baracuda._core.op import Op
from jax_baracuda.ops.segment.definitions import IDS, limit_of_32_bits, plan_parameters
from jax_baracuda.ops.segment.ids import index_dtype


def in_32_bits(ids: Array, size: int) -> Array:
    """Ids as int32; out-of-range ids become -1 or `size`."""
    return jnp.clip(ids, -1, size).astype(jnp.int32)


def sorted_by_segment(segment_ids: Array, num_segments: int) -> tuple[Array, Array]:
    """The order of the rows and the sorted segment ids. Rows without a segment come last, with the id `num_segments`.

    Always runs the kernel, so it is for use within an op's program.
    """
    order, sorted_ids = SEGMENT_ORDER.kernel(in_32_bits(segment_ids, num_segments), num_segments=num_segments)
    return order, sorted_ids


def _reference(segment_ids: Array, *, num_segments: int) -> tuple[Array, Array]:
    is_member = (segment_ids >= 0) & (segment_ids < num_segments)
    ids = jnp.where(is_member, segment_ids, num_segments)
    order = jnp.argsort(ids, stable=True).astype(index_dtype(ids.shape[0]))
    return order, ids[order]


SEGMENT_ORDER = Op(
    name="segment_order",
    operands={"segment_ids": IDS},
    results={"order": IDS, "sorted_ids": IDS},
    result_dtypes=lambda ids: [index_dtype(ids.shape[0]), np.int32],
    reference=_reference,
    dtypes=frozenset({"int32"}),
    guarantee=EXACT,
    attributes=("num_segments",),
    plan_parameters=lambda ids, *, num_segments: plan_parameters(ids, ids, num_segments=num_segments),
    replicated_dims=IDS,
    limit=lambda ids, *, num_segments: limit_of_32_bits(ids.shape[0], num_segments),
)
"""``(segment_ids [N] of int32) -> (order [N], sorted_ids [N])``, a stable sort."""
