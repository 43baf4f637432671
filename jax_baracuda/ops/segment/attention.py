"""Attention over the edges of each segment: softmax of logits and weighted sum of gathered rows."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import as_array
from jax_baracuda._core.autodiff import with_twin
from jax_baracuda._core.docstrings import described_like
from jax_baracuda._core.selection import Implementation, selectable
from jax_baracuda.ops.segment.arguments import EdgeCall, Mode, canonicalize_edges
from jax_baracuda.ops.segment.gather_sum import (
    GatherSumParams,
    check_weights,
    gather_segment_sum,
    gathered_sum,
    reduce_weighted,
)
from jax_baracuda.ops.segment.ids import index_dtype
from jax_baracuda.ops.segment.plan import SegmentPlan, permuted, unpermuted
from jax_baracuda.ops.segment.softmax import segment_softmax


@selectable
@with_twin
@described_like(gather_segment_sum)
def segment_attention(
    logits: ArrayLike,
    data: ArrayLike,
    gather_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Attention of each segment over the rows that its edges gather: the aggregation of a graph attention layer.

    ``out[s, h, ...] = sum { p[e, h] * data[gather_ids[e], h, ...] : segment_ids[e] == s }``, where
    ``p = segment_softmax(logits, segment_ids, num_segments)``.

    Neither this function nor its gradient writes or reads an array of edges times features. Per edge, only its
    probabilities are kept.

    Args:
      logits: ``[E]`` or ``[E, H]``, one for each edge and head, a floating dtype.
      data: ``[N, ...]``, or ``[N, H, ...]`` for logits ``[E, H]``: the rows (values of nodes), a floating dtype.
        float16, bfloat16, float32 and float64 have kernels.
      deterministic: on GPUs, the exponentials and the terms of unsorted edges without a plan are added in an order that
        varies from run to run where that was faster. True: sort them, so that all runs are bit-equal. Sorted edges,
        plans and their gradients are bit-equal anyway. On CPUs everything is.

    Returns:
      ``[S, ...]`` or ``[S, H, ...]`` with the dtype of `data`. Segments without edges hold 0.

    Numerical guarantees: those of :func:`segment_softmax`, whose probabilities are rounded to the dtype of `logits`,
    and of :func:`gather_segment_sum`. Bit-equal from run to run, except on GPUs (see `deterministic`).

    Gradient: that of `logits` is the gradient of the softmax, applied to the gradient of the weights: products of
    cotangents and gathered rows. That of `data` is the weighted sum over the edges of each row, also under ``jax.vmap``
    as in :func:`gather_segment_sum`.

    Source: Veličković et al., Graph Attention Networks, https://arxiv.org/abs/1710.10903, equations 3 and 6.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> senders, receivers = jnp.array([0, 1, 2]), jnp.array([1, 1, 0])
      >>> print(jb.segment_attention(jnp.zeros(3), data, senders, receivers, num_segments=2))
      [[5. 6.]
       [2. 3.]]
    """
    name = "segment_attention"
    logits = as_array(name, "logits", logits)
    if logits.ndim == 0 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"{name}: logits must be [E, ...] with a floating dtype, got {logits.shape} of {logits.dtype}")
    call = canonicalize_edges(name, data, gather_ids, segment_ids, num_segments, mode, plan)
    check_weights(name, "logits", logits, call)
    params = call.params(GatherSumParams, indices_are_sorted, deterministic, is_mean=False)
    flags = {"indices_are_sorted": params.indices_are_sorted, "deterministic": params.deterministic}
    if plan is not None:
        # Sorted once: the sum then reads the weights, and its gradient writes theirs, in the order of the plan.
        logits = permuted(logits, plan.edge_order)
        call = _numbered_in_order(call)
    weights = segment_softmax(logits, call.edges["segment_ids"], call.num_segments, **flags)
    return reduce_weighted(gathered_sum, call, params, weights)


def _numbered_in_order(call: EdgeCall) -> EdgeCall:
    """The call with its edges renumbered in the order of their plan."""
    edges = dict(call.edges)
    order = edges.pop("edge_order")
    places = unpermuted(jnp.arange(order.shape[0], dtype=index_dtype(order.shape[0])), order)
    edges["transposed_order"] = permuted(places, edges["transposed_order"])
    return dataclasses.replace(call, edges=edges)
