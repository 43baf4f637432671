"""Attention over the edges of each segment: softmax of given logits and weighted sum of gathered rows."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import accumulation_dtype, as_array
from jax_baracuda._core.autodiff import with_twin
from jax_baracuda._core.docstrings import described_like
from jax_baracuda._core.selection import Implementation, selectable
from jax_baracuda.ops.segment.arguments import Mode, canonicalize_edges
from jax_baracuda.ops.segment.edge_attention import attend, attention_params
from jax_baracuda.ops.segment.gather_sum import by_heads, gather_segment_sum
from jax_baracuda.ops.segment.plan import SegmentPlan


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
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Attention of each segment over the rows that its edges gather: the aggregation of a graph attention layer.

    ``out[s, h, ...] = sum { p[e, h] * data[gather_ids[e], h, ...] : segment_ids[e] == s }``, where
    ``p = segment_softmax(logits, segment_ids, num_segments)``.

    Neither this function nor its gradient writes or reads an array of edges times features, and none of edges times
    heads but `logits` and their gradient.

    Args:
      logits: ``[E]`` or ``[E, H]``, one for each edge and head, a floating dtype. They are cast to float32, or to
        float64 for float64 data. -inf leaves an edge out if its row is finite.
      data: ``[N, ...]``, or ``[N, H, ...]`` for logits ``[E, H]``: the rows (values of nodes), a floating dtype.
        float16, bfloat16, float32 and float64 have kernels. On GPUs, they are fastest where a head has a power of two
        of features, up to 512 bytes; otherwise, data are padded.

    Returns:
      ``[S, ...]`` or ``[S, H, ...]`` with the dtype of `data`. Segments without edges, or whose logits are all -inf,
      hold 0.

    Numerical guarantees: exponentials and sums are computed in float32 (float64 for float64 data), and the result is
    rounded once to the dtype of `data`. Exponentials are those of differences from the segment's maximum, so nothing
    overflows. A logit of NaN or +inf makes its segment and head NaN. Bit-equal from run to run where a kernel runs.
    Where edges are split over devices, the sums of each device are rounded before they are added up. The gradients of
    logits take the sum of ``d_out * out`` from the rounded result.

    Gradient: with ``d_p[e, h] = sum(d_out[segment_ids[e], h] * data[gather_ids[e], h])``, that of `logits` is
    ``p[e, h] * (d_p[e, h] - sum(d_out[s, h] * out[s, h]))``, and that of `data` is a sum of ``p * d_out`` over the
    edges of each row. No gradient of data goes through gather ids that are out of range. Under ``jax.vmap``, data that
    the batch shares get a gradient for each element, and JAX adds these up.

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
    bias, value = by_heads(name, "logits", logits, call)
    edges = call.edges if plan is None else call.edges | {"edge_gather_ids": plan.edge_gather_ids}
    params = attention_params("given", call.num_segments, bool(indices_are_sorted) or plan is not None)
    output = attend(params, value=value, bias=bias.astype(accumulation_dtype(value.dtype)), **edges)
    return output.reshape(call.num_segments, *call.data.shape[1:])
