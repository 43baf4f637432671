"""Attention of each segment over the rows that its edges gather: from given logits, or from queries and keys."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import accumulation_dtype, as_array, check_same_dtype, floating_array, real_number
from jax_baracuda._core.public import public_function
from jax_baracuda._core.selection import Implementation
from jax_baracuda.ops.segment.arguments import EdgeCall, Mode, canonicalize_edges, canonicalize_edges_between
from jax_baracuda.ops.segment.edge_attention import attend, attention_params, padded_heads
from jax_baracuda.ops.segment.gather_sum import by_heads, gather_segment_sum
from jax_baracuda.ops.segment.plan import SegmentPlan


@public_function(gather_segment_sum)
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

    The kernels of this function and of its gradient write and read no array of edges times features. Their only arrays
    of edges times heads are `logits` and their gradient.

    Args:
      logits: ``[E]`` or ``[E, H]``, one for each edge and head, a floating dtype. They are cast to float32, or to
        float64 for float64 data. -inf leaves an edge out if its row is finite.
      data: ``[N, ...]``, or ``[N, H, ...]`` for logits ``[E, H]``: the rows (values of nodes), a floating dtype.
        float16, bfloat16, float32 and float64 have kernels. On GPUs, they are fastest where a head has a power of two
        of features, up to 512 bytes; otherwise, data are padded.
      deterministic: on GPUs, unsorted edges without a plan may be added in an order that varies from run to run if they
        are few. True: sort them, so that value and gradient have the same bits in every run. Sorted edges and plans
        give the same bits anyway. On CPUs everything does.

    Returns:
      ``[S, ...]`` or ``[S, H, ...]`` with the dtype of `data`. Segments without edges, or whose logits are all -inf,
      hold 0.

    Numerical guarantees: exponentials and sums are computed in float32 (float64 for float64 data), and the result is
    rounded once to the dtype of `data`. Exponentials are those of differences from the segment's maximum, so nothing
    overflows. A logit of NaN or +inf makes its segment and head NaN. Bit-equal from run to run, except where plain JAX
    serves a call on GPUs (see `deterministic`). Where edges are split over devices, the sums of each device are rounded
    before they are added up. The gradients of logits take the sum of ``d_out * out`` from the rounded result. Tangents
    and derivatives beyond the first are plain JAX, whose sums have no fixed order on GPUs.

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
    bias, value = by_heads(call, "logits", logits)
    edges = call.edges if plan is None else call.edges | {"edge_gather_ids": plan.edge_gather_ids}
    params = attention_params("given", call.params(indices_are_sorted, deterministic))
    output = attend(params, value=value, bias=bias.astype(accumulation_dtype(value.dtype)), **edges)
    return output.reshape(call.num_segments, *call.data.shape[1:])


@public_function(segment_attention, gather_segment_sum)
def graph_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    gather_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Dot-product attention over the edges of a graph: the aggregation of a graph transformer.

    ``out[s, h] = sum { p[e, h] * value[gather_ids[e], h] : segment_ids[e] == s }``, where p is the softmax, over the
    edges of each segment, of
    ``logit[e, h] = scale * sum(query[segment_ids[e], h] * key[gather_ids[e], h]) + bias[e, h]``.

    The same as :func:`jax.nn.dot_product_attention` with a mask that holds the edges. The kernels of this function and
    of its gradient write and read no array of edges times features. Their only arrays of edges times heads are
    `bias` and its gradient.

    Args:
      query: ``[S, H, D]``, one for each segment (receiver) and head, a floating dtype. float16, bfloat16, float32 and
        float64 have kernels, for heads of up to 512 bytes. They are fastest where D and Dv are the same, on GPUs a
        power of two; otherwise, arrays are padded.
      key: ``[N, H, D]`` with the dtype of `query`, one for each row (sender) and head.
      value: ``[N, H, Dv]`` with the dtype of `query`.
      bias: ``[E]``, or ``[E, H]``: one for each head. A floating dtype; it is cast to float32, or to float64 for
        float64 queries. -inf leaves an edge out. None: no bias.
      scale: of the dot products, a static number. Default: ``1 / sqrt(D)``, for which D must be known.

    Returns:
      ``[S, H, Dv]`` with the dtype of `query`. Segments without edges, or whose logits are all -inf, hold 0.

    Raises:
      TypeError: an argument is not an array or a number, or has an unsuitable dtype; ids or a plan are missing.
      ValueError: shapes do not fit, there are no rows to gather from, an option is unknown, or both a plan and ids are
        given.

    Numerical guarantees: those of :func:`segment_attention`. Logits are computed in float32 (float64 for float64),
    where they and their products must be finite.

    Gradient: with ``d_p[e, h] = sum(d_out[segment_ids[e], h] * value[gather_ids[e], h])`` and
    ``d_logit[e, h] = p[e, h] * (d_p[e, h] - sum(d_out[s, h] * out[s, h]))``, those of `query` and `key` are sums of
    ``scale * d_logit * key`` and ``scale * d_logit * query`` over the edges of each segment and each row, that of
    `value` is a sum of ``p * d_out`` over the edges of each row, and that of `bias` is ``d_logit``. No gradient of
    `key` and `value` goes through gather ids that are out of range.

    Source: Shi et al., Masked Label Prediction, https://arxiv.org/abs/2009.03509, equations 3 and 4; the running
    maximum is that of Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> query, key = jnp.zeros((2, 1, 4)), jnp.ones((3, 1, 4))
      >>> value = jnp.array([[[1.0, 4.0]], [[3.0, 2.0]], [[5.0, 6.0]]])
      >>> senders, receivers = jnp.array([0, 1, 2]), jnp.array([1, 1, 0])
      >>> print(jb.graph_dot_product_attention(query, key, value, senders, receivers)[:, 0])
      [[5. 6.]
       [2. 3.]]
    """
    name = "graph_dot_product_attention"
    query = _heads(name, "query", query)
    key, value = (_heads(name, argument, x, query) for argument, x in (("key", key), ("value", value)))
    _check_key(name, key, query)
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"{name}: value must be [N, H, Dv] with N and H of key, got value.shape = {value.shape} and "
            f"key.shape = {key.shape}"
        )
    if scale is None:
        if jax.export.is_symbolic_dim(query.shape[2]):
            raise ValueError(f"{name}: scale must be given for a symbolic number of features, got {query.shape[2]}")
        scale = 1 / math.sqrt(max(query.shape[2], 1))
    scale = _number(name, "scale", scale, query)
    call = canonicalize_edges_between(name, "key", key, "query", query, gather_ids, segment_ids, mode, plan)
    arrays = {"query": query, "key": key, "value": value} | _bias(call, bias, query)
    width = max(query.shape[2], value.shape[2])
    arrays |= {x: padded_heads(arrays[x], width) for x in ("query", "key", "value")}
    params = attention_params("dot_product", call.params(indices_are_sorted, deterministic), scale=scale)
    return attend(params, **arrays, **call.edges)[..., : value.shape[2]]


@public_function(graph_dot_product_attention, gather_segment_sum)
def graph_additive_attention(
    query: ArrayLike,
    key: ArrayLike,
    score_weights: ArrayLike,
    gather_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    negative_slope: float = 0.2,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Additive attention over the edges of a graph: the aggregation of a GATv2 layer.

    ``out[s, h] = sum { p[e, h] * key[gather_ids[e], h] : segment_ids[e] == s }``, where p is the softmax, over the
    edges of each segment, of ``logit[e, h] = sum(score_weights[h] * leaky_relu(query[segment_ids[e], h] +
    key[gather_ids[e], h], negative_slope)) + bias[e, h]``. The keys are the values, too.

    The kernels of this function and of its gradient write and read no array of edges times features. Their only arrays
    of edges times heads are `bias` and its gradient.

    Args:
      query: ``[S, H, D]``, the transformed features of each segment (receiver), a floating dtype. float16, bfloat16,
        float32 and float64 have kernels, for heads of up to 512 bytes. On GPUs, they are fastest where D is a power of
        two; otherwise, arrays are padded.
      key: ``[N, H, D]`` with the dtype of `query`, the transformed features of each row (sender).
      score_weights: ``[H, D]``, a floating dtype; they are cast to that of `query`.
      negative_slope: the slope of the leaky ReLU for negative numbers, static.

    Returns:
      ``[S, H, D]`` with the dtype of `query`. Segments without edges, or whose logits are all -inf, hold 0.

    Numerical guarantees: those of :func:`graph_dot_product_attention`.

    Gradient: with d_logit as in :func:`graph_dot_product_attention` and ``g = d_logit * score_weights * (1 where
    query + key is at least 0, else negative_slope)`` for each edge, that of `query` is the sum of g over the edges of
    each segment, that of `key` the sum of ``g + p * d_out`` over the edges of each row, that of `score_weights` the sum
    of ``d_logit * leaky_relu(query + key)`` over all edges, and that of `bias` is d_logit. No gradient of `key` goes
    through gather ids that are out of range.

    Source: Brody et al., How Attentive are Graph Attention Networks?, https://arxiv.org/abs/2105.14491, equation 7.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> query, score_weights = jnp.zeros((2, 1, 2)), jnp.zeros((1, 2))
      >>> key = jnp.array([[[1.0, 4.0]], [[3.0, 2.0]], [[5.0, 6.0]]])
      >>> senders, receivers = jnp.array([0, 1, 2]), jnp.array([1, 1, 0])
      >>> print(jb.graph_additive_attention(query, key, score_weights, senders, receivers)[:, 0])
      [[5. 6.]
       [2. 3.]]
    """
    name = "graph_additive_attention"
    query = _heads(name, "query", query)
    key = _heads(name, "key", key, query)
    _check_key(name, key, query)
    score_weights = floating_array(name, "score_weights", score_weights)
    if score_weights.shape != query.shape[1:]:
        raise ValueError(
            f"{name}: score_weights must be [H, D] with H and D of query, got score_weights.shape = "
            f"{score_weights.shape} and query.shape = {query.shape}"
        )
    negative_slope = _number(name, "negative_slope", negative_slope, query)
    call = canonicalize_edges_between(name, "key", key, "query", query, gather_ids, segment_ids, mode, plan)
    arrays = {"query": query, "key": key, "score_weights": score_weights.astype(query.dtype)}
    arrays |= _bias(call, bias, query)
    flags = call.params(indices_are_sorted, deterministic)
    params = attention_params("additive", flags, negative_slope=negative_slope)
    return attend(params, **arrays, **call.edges)


# ----------------------------------------------------------------------------------------------------------------------
# Checks.


def _heads(name: str, argument: str, value: ArrayLike, query: Array | None = None) -> Array:
    array = floating_array(name, argument, value)
    if array.ndim != 3:
        raise ValueError(f"{name}: {argument} must have the dimensions [rows, heads, features], got {array.shape}")
    if query is not None:
        check_same_dtype(name, argument, array, "query", query)
    return array


def _check_key(name: str, key: Array, query: Array) -> None:
    if key.shape[1:] != query.shape[1:]:
        raise ValueError(
            f"{name}: key must be [N, H, D] with H and D of query, got key.shape = {key.shape} and "
            f"query.shape = {query.shape}"
        )


def _number(name: str, argument: str, value: Any, query: Array) -> float:
    """A real number that is finite in the dtype in which the kernels compute logits."""
    number = real_number(name, argument, value)
    dtype = accumulation_dtype(query.dtype)
    if abs(number) > float(jnp.finfo(dtype).max):
        raise ValueError(f"{name}: {argument} must be finite in {np.dtype(dtype).name}, got {value!r}")
    return number


def _bias(call: EdgeCall, bias: ArrayLike | None, query: Array) -> dict[str, Array]:
    """The bias as ``[E, H]``, by its name; nothing if there is none."""
    if bias is None:
        return {}
    bias = floating_array(call.name, "bias", bias)
    num_edges, num_heads = call.edges["segment_ids"].shape[0], query.shape[1]
    if bias.shape not in ((num_edges,), (num_edges, num_heads)):
        raise ValueError(
            f"{call.name}: bias must be [E] or [E, H], that is, ({num_edges},) or ({num_edges}, {num_heads}), "
            f"got {bias.shape}"
        )
    of_heads = bias[:, None] if bias.ndim == 1 else bias
    return {"bias": jnp.broadcast_to(of_heads.astype(accumulation_dtype(query.dtype)), (num_edges, num_heads))}
