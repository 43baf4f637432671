"""Attention over the edges of each segment: softmax of logits and weighted sum of gathered rows."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import as_array
from jax_baracuda._core.autodiff import with_twin
from jax_baracuda._core.selection import Implementation, selectable
from jax_baracuda.ops.segment.arguments import Mode
from jax_baracuda.ops.segment.cells import in_order
from jax_baracuda.ops.segment.descriptions import OF_EDGES, described
from jax_baracuda.ops.segment.edges import GatherParams, as_rows, canonicalize_edges
from jax_baracuda.ops.segment.gather_sum import gathered_sum, reduce_weighted
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.softmax import segment_softmax


@selectable
@with_twin
@described(OF_EDGES)
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
    as in :func:`gather_segment_sum`. Derivatives of any order exist. ``jax.jvp`` and ``jax.jacfwd`` of this function
    need its twin of the same name in :mod:`jax_baracuda.forward_mode`.

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
    logits, data = as_array(name, "logits", logits), as_rows(name, data)
    if logits.ndim == 0 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"{name}: logits must be [E, ...] with a floating dtype, got {logits.shape} of {logits.dtype}")
    edges = canonicalize_edges(name, data, gather_ids, segment_ids, num_segments, mode, plan)
    num_edges = edges.segment_ids.shape[0]
    if logits.shape[0] != num_edges or logits.shape[1:] != data.shape[1 : logits.ndim]:
        raise ValueError(
            f"{name}: logits must be [E] or [E, *dims], where dims are the first dimensions of a row of data; got "
            f"logits.shape = {logits.shape} for {num_edges} edges and data.shape = {data.shape}"
        )
    params = edges.params(GatherParams, data, indices_are_sorted, deterministic)
    if plan is None:
        weights = segment_softmax(
            logits,
            edges.segment_ids,
            edges.num_segments,
            indices_are_sorted=params.indices_are_sorted,
            deterministic=params.deterministic,
        )
    else:
        # Sorted once: the sum then reads the weights, and its gradient writes theirs, in the order of the plan.
        ordered = in_order(logits, plan.edge_order)
        weights = segment_softmax(ordered, plan.segment_ids, plan.num_segments, indices_are_sorted=True)
        edges = edges.in_order()
    return reduce_weighted(gathered_sum, params, data, weights, edges)
