"""Attention of each segment over the rows that its edges gather, with logits computed from queries and keys.

The softmax of a segment is kept as the maximum of its logits and the total of ``exp(logit - maximum)``. The gradients
compute the logits again, so neither pass writes an array of edges times features, or of edges times heads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype, as_array, real_number
from jax_baracuda._core.autodiff import KernelVjp, with_twin
from jax_baracuda._core.dispatch import on_cpu, on_gpu, unsorted
from jax_baracuda._core.docstrings import described_like
from jax_baracuda._core.functions import with_named
from jax_baracuda._core.guarantees import accumulated
from jax_baracuda._core.op import NamedDimensions, Op
from jax_baracuda._core.selection import Implementation, selectable
from jax_baracuda._core.sharding import ShardAxes, ShardKernel
from jax_baracuda.ops.segment.arguments import EdgeCall, Mode, canonicalize_edges
from jax_baracuda.ops.segment.cells import gather_segments, xla_max, xla_sum
from jax_baracuda.ops.segment.definitions import limit_of_32_bits, plan_parameters
from jax_baracuda.ops.segment.edges import as_gather_ids, sorted_edges
from jax_baracuda.ops.segment.gather_sum import gather_segment_sum
from jax_baracuda.ops.segment.plan import SegmentPlan


@selectable
@with_twin
@described_like(gather_segment_sum)
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
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Dot-product attention over the edges of a graph: the aggregation of a graph transformer.

    ``out[s, h] = sum { p[e, h] * value[gather_ids[e], h] : segment_ids[e] == s }``, where p is the softmax, over the
    edges of each segment, of
    ``logit[e, h] = scale * sum(query[segment_ids[e], h] * key[gather_ids[e], h]) + bias[e, h]``.

    The same as :func:`jax.nn.dot_product_attention` with a mask that holds the edges. Neither this function nor its
    gradient writes or reads an array of edges times features, and none of edges times heads but `bias` and its
    gradient.

    Args:
      query: ``[S, H, D]``, one for each segment (receiver) and head, a floating dtype. float16, bfloat16, float32 and
        float64 have kernels, for heads of up to 512 bytes. They are fastest where D and Dv are the same power of two;
        otherwise, arrays are padded.
      key: ``[N, H, D]`` with the dtype of `query`, one for each row (sender) and head.
      value: ``[N, H, Dv]`` with the dtype of `query`.
      bias: ``[E]``, or ``[E, H]``: one for each head. A floating dtype; it is cast to that of `query`. -inf leaves an
        edge out. None: no bias.
      scale: of the dot products, a static number. Default: ``1 / sqrt(D)``.

    Returns:
      ``[S, H, Dv]`` with the dtype of `query`. Segments without edges, or whose logits are all -inf, hold 0.

    Raises:
      TypeError: an argument is not an array or a number, or has an unsuitable dtype; ids or a plan are missing.
      IndexError: ids are boolean.
      ValueError: shapes do not fit, there are no rows to gather from, an option is unknown, or both a plan and ids are
        given.

    Numerical guarantees: logits, exponentials and sums are computed in float32 (float64 for float64), and the result is
    rounded once to the dtype. Exponentials are those of differences from the segment's maximum, so nothing overflows.
    A logit of NaN or +inf makes its segment and head NaN. Bit-equal from run to run where a kernel runs. Where edges
    are split over devices, the sums of each device are rounded before they are added up. The gradients of logits take
    the sum of ``d_out * out`` from the rounded result. Products and logits must be finite in float32 (float64).

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
    _check_like(name, "key", key, "[N, H, D] with H and D of query", query.shape[1:], query)
    if value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"{name}: value must be [N, H, Dv] with N and H of key, got value.shape = {value.shape} and "
            f"key.shape = {key.shape}"
        )
    if scale is None:
        scale = 1 / math.sqrt(max(query.shape[2], 1))
    scale = real_number(name, "scale", scale)
    call = _canonicalize(name, query, key, gather_ids, segment_ids, mode, plan)
    arrays = {"query": query, "key": key, "value": value} | _bias(name, bias, query, call)
    width = _padded_width(max(query.shape[2], value.shape[2]), query.dtype)
    arrays |= {x: _padded(arrays[x], width) for x in ("query", "key", "value")}
    params = AttentionParams(_is_sorted(indices_are_sorted, call), is_additive=False, scale=scale, negative_slope=0.0)
    return _graph_attention(params, **arrays, **call.edges)[..., : value.shape[2]]


@selectable
@with_twin
@described_like(gather_segment_sum)
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
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Additive attention over the edges of a graph: the aggregation of a GATv2 layer.

    ``out[s, h] = sum { p[e, h] * key[gather_ids[e], h] : segment_ids[e] == s }``, where p is the softmax, over the
    edges of each segment, of ``logit[e, h] = sum(score_weights[h] * leaky_relu(query[segment_ids[e], h] +
    key[gather_ids[e], h], negative_slope)) + bias[e, h]``. The keys are the values, too.

    Neither this function nor its gradient writes or reads an array of edges times features, and none of edges times
    heads but `bias` and its gradient.

    Args:
      query: ``[S, H, D]``, the transformed features of each segment (receiver), a floating dtype. float16, bfloat16,
        float32 and float64 have kernels, for heads of up to 512 bytes. They are fastest where D is a power of two;
        otherwise, arrays are padded.
      key: ``[N, H, D]`` with the dtype of `query`, the transformed features of each row (sender).
      score_weights: ``[H, D]``, a floating dtype; they are cast to that of `query`.
      bias: ``[E]``, or ``[E, H]``: one for each head. A floating dtype; it is cast to that of `query`. -inf leaves an
        edge out. None: no bias.
      negative_slope: the slope of the leaky ReLU for negative numbers, static.

    Returns:
      ``[S, H, D]`` with the dtype of `query`. Segments without edges, or whose logits are all -inf, hold 0.

    Raises:
      TypeError: an argument is not an array or a number, or has an unsuitable dtype; ids or a plan are missing.
      IndexError: ids are boolean.
      ValueError: shapes do not fit, there are no rows to gather from, an option is unknown, or both a plan and ids are
        given.

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
    _check_like(name, "key", key, "[N, H, D] with H and D of query", query.shape[1:], query)
    score_weights = _floating(name, "score_weights", score_weights)
    if score_weights.shape != query.shape[1:]:
        raise ValueError(
            f"{name}: score_weights must be [H, D] with H and D of query, got score_weights.shape = "
            f"{score_weights.shape} and query.shape = {query.shape}"
        )
    negative_slope = real_number(name, "negative_slope", negative_slope)
    call = _canonicalize(name, query, key, gather_ids, segment_ids, mode, plan)
    arrays = {"query": query, "key": key, "score_weights": score_weights.astype(query.dtype)}
    arrays |= _bias(name, bias, query, call)
    width = _padded_width(query.shape[2], query.dtype)
    arrays |= {x: _padded(arrays[x], width) for x in ("query", "key", "score_weights")}
    params = AttentionParams(
        _is_sorted(indices_are_sorted, call), is_additive=True, scale=1.0, negative_slope=negative_slope
    )
    return _graph_attention(params, **arrays, **call.edges)[..., : query.shape[2]]


# ----------------------------------------------------------------------------------------------------------------------
# Checks.


def _floating(name: str, argument: str, value: ArrayLike) -> Array:
    array = as_array(name, argument, value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}: {argument} must have a floating dtype, got {array.dtype}")
    return array


def _heads(name: str, argument: str, value: ArrayLike, query: Array | None = None) -> Array:
    array = _floating(name, argument, value)
    if array.ndim != 3:
        raise ValueError(f"{name}: {argument} must have the dimensions [rows, heads, features], got {array.shape}")
    if query is not None and array.dtype != query.dtype:
        raise TypeError(f"{name}: {argument} must have the dtype of query, got {array.dtype} and {query.dtype}")
    return array


def _check_like(name: str, argument: str, array: Array, expected: str, dims: tuple[int, ...], query: Array) -> None:
    if array.shape[1:] != dims:
        raise ValueError(
            f"{name}: {argument} must be {expected}, got {argument}.shape = {array.shape} and "
            f"query.shape = {query.shape}"
        )


def _canonicalize(
    name: str,
    query: Array,
    key: Array,
    gather_ids: ArrayLike | None,
    segment_ids: ArrayLike | None,
    mode: Mode,
    plan: SegmentPlan | None,
) -> EdgeCall:
    if plan is None and (gather_ids is None or segment_ids is None):
        raise TypeError(f"{name}: gather_ids and segment_ids must be given, or a plan")
    num_segments = query.shape[0] if plan is None else None
    call = canonicalize_edges(name, key, gather_ids, segment_ids, num_segments, mode, plan, data_name="key")
    if call.num_segments != query.shape[0]:
        raise ValueError(f"{name}: the plan is for {call.num_segments} segments, got query.shape = {query.shape}")
    return call


def _bias(name: str, bias: ArrayLike | None, query: Array, call: EdgeCall) -> dict[str, Array]:
    """The bias as ``[E, H]``, by its name; nothing if there is none."""
    if bias is None:
        return {}
    bias = _floating(name, "bias", bias)
    num_edges, num_heads = call.edges["segment_ids"].shape[0], query.shape[1]
    if bias.shape not in ((num_edges,), (num_edges, num_heads)):
        raise ValueError(
            f"{name}: bias must be [E] or [E, H], that is, ({num_edges},) or ({num_edges}, {num_heads}), "
            f"got {bias.shape}"
        )
    of_heads = bias[:, None] if bias.ndim == 1 else bias
    return {"bias": jnp.broadcast_to(of_heads.astype(query.dtype), (num_edges, num_heads))}


def _is_sorted(indices_are_sorted: bool, call: EdgeCall) -> bool:
    return bool(indices_are_sorted) or "edge_order" in call.edges


VECTOR_BYTES, MAX_HEAD_BYTES = 16, 512
"""Kernels load the features of a head by vectors, with up to one for each thread of a warp, a power of two in all."""


def _padded_width(width: int, dtype: Any) -> int:
    """The features of a head for a kernel; the same where a head is too wide for one."""
    bytes_of_one = np.dtype(dtype).itemsize
    if jax.export.is_symbolic_dim(width):  # there is no kernel
        return width
    if width * bytes_of_one > MAX_HEAD_BYTES:
        return width
    return max(VECTOR_BYTES // bytes_of_one, 1 << (width - 1).bit_length() if width > 0 else 0)


def _padded(array: Array, width: int) -> Array:
    lacking = width - array.shape[-1]
    return array if lacking == 0 else jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, lacking)])


# ----------------------------------------------------------------------------------------------------------------------
# References in plain JAX. Edges that take no part have rows of zeros: in derivatives, theirs may be infinite.


def _take_part(cells: Array, gathered: Array, gather_ids: Array, segment_ids: Array, clips_gather_ids: bool) -> Array:
    """Whether each edge takes part, ``[E, 1]``."""
    takes_part = (segment_ids >= 0) & (segment_ids < cells.shape[0]) & (gathered.shape[0] > 0)
    if not clips_gather_ids:
        takes_part &= (gather_ids >= 0) & (gather_ids < gathered.shape[0])
    return takes_part[:, None]


def _of_edges(array: Array, ids: Array, takes_part: Array) -> Array:
    """The rows of each edge in the accumulation dtype, zeros for edges that take no part."""
    rows, _ = gather_segments(array, ids)
    mask = takes_part.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(mask, rows, 0).astype(accumulation_dtype(array.dtype))


@dataclasses.dataclass(frozen=True)
class _Score:
    """The logits of edges, from arrays ``[E, H, D]`` in the accumulation dtype."""

    is_additive: bool
    scale: float
    negative_slope: float
    weights: Array | None

    def logits(self, query: Array, key: Array) -> Array:
        if self.is_additive:
            return (self.weights * self.leaky(query + key)).sum(-1)
        return self.scale * (query * key).sum(-1)

    def leaky(self, x: Array) -> Array:
        return jnp.where(x >= 0, x, self.negative_slope * x)

    def by_query(self, query: Array, key: Array) -> Array:
        """The derivative of the logits by the features of the query."""
        if self.is_additive:
            return self.weights * jnp.where(query + key >= 0, 1, self.negative_slope)
        return self.scale * key

    def by_key(self, query: Array, key: Array) -> Array:
        return self.by_query(query, key) if self.is_additive else self.scale * query


@dataclasses.dataclass(frozen=True)
class _ScoredEdges:
    """What enters the logits of edges, ``[E, H, D]`` in the accumulation dtype, and the logits ``[E, H]``."""

    score: _Score
    queries: Array
    keys: Array
    values: Array
    logits: Array
    takes_part: Array
    edge_order: Array | None

    def differentiated(self, d_outputs: Array, maxima: Array, totals: Array, means: Array) -> tuple[Array, Array]:
        """The probabilities and the cotangents of the logits, given the cells of each edge's segment."""
        is_empty = totals == 0
        inverse = jnp.where(is_empty, 0, 1 / jnp.where(is_empty, 1, totals))
        distances = self.logits - maxima
        distances -= jax.lax.stop_gradient(jnp.maximum(distances, 0))  # the maximum may have been rounded otherwise
        probabilities = jnp.where(self.takes_part, jnp.exp(distances) * inverse, 0)
        return probabilities, probabilities * ((d_outputs * self.values).sum(-1) - means)


def _scored(
    query: Array,
    key: Array,
    optional: Sequence[Array],
    ids_of_queries: Array,
    ids_of_keys: Array,
    takes_part: Array,
    *,
    is_additive: bool,
    has_bias: bool,
    scale: float,
    negative_slope: float,
) -> _ScoredEdges:
    wide = accumulation_dtype(query.dtype)
    left = list(optional)
    value = None if is_additive else left.pop(0)
    bias = left.pop(0) if has_bias else None
    weights = left.pop(0).astype(wide)[None] if is_additive else None
    edge_order = left.pop(0) if left else None
    score = _Score(is_additive, float(scale), float(negative_slope), weights)
    queries, keys = _of_edges(query, ids_of_queries, takes_part), _of_edges(key, ids_of_keys, takes_part)
    values = keys if value is None else _of_edges(value, ids_of_keys, takes_part)
    logits = score.logits(queries, keys)
    if bias is not None:
        in_order = bias if edge_order is None else jnp.take(bias, edge_order, axis=0, mode="clip")
        logits += jnp.where(takes_part, in_order, 0).astype(wide)
    return _ScoredEdges(score, queries, keys, values, logits, takes_part, edge_order)


def _reference(
    query: Array, key: Array, gather_ids: Array, segment_ids: Array, *optional: Array, **params: Any
) -> Sequence[Array]:
    num_segments = query.shape[0]
    takes_part = _take_part(query, key, gather_ids, segment_ids, clips_gather_ids=True)
    edges = with_named(_scored, params)(query, key, optional, segment_ids, gather_ids, takes_part)
    lowest = jnp.finfo(edges.logits.dtype).min
    maxima = jnp.maximum(xla_max(jax.lax.stop_gradient(edges.logits), segment_ids, num_segments), lowest)
    weights = jnp.where(takes_part, jnp.exp(edges.logits - _of_edges(maxima, segment_ids, takes_part)), 0)
    totals = xla_sum(weights, segment_ids, num_segments)
    sums = xla_sum(weights[..., None] * edges.values, segment_ids, num_segments)
    output = sums / jnp.where(totals == 0, 1, totals)[..., None]
    return output.astype(query.dtype), maxima, totals


def _reference_by_segment(
    query: Array,
    key: Array,
    d_output: Array,
    maxima: Array,
    totals: Array,
    means: Array,
    gather_ids: Array,
    segment_ids: Array,
    *optional: Array,
    **params: Any,
) -> Sequence[Array]:
    takes_part = _take_part(query, key, gather_ids, segment_ids, clips_gather_ids=True)
    edges = with_named(_scored, params)(query, key, optional, segment_ids, gather_ids, takes_part)
    score, queries, keys = edges.score, edges.queries, edges.keys
    of_segments = (_of_edges(x, segment_ids, takes_part) for x in (d_output, maxima, totals, means))
    _, d_logits = edges.differentiated(*of_segments)

    def summed(rows: Array) -> Array:
        return xla_sum(rows, segment_ids, query.shape[0])

    results = [summed(d_logits[..., None] * score.by_query(queries, keys)).astype(query.dtype)]
    if params["has_bias"]:
        d_bias = d_logits.astype(query.dtype)
        order = edges.edge_order
        results.append(d_bias if order is None else jnp.zeros_like(d_bias).at[order].set(d_bias))
    if score.is_additive:
        results.append(summed(d_logits[..., None] * score.leaky(queries + keys)))
    return results


def _reference_by_row(
    query: Array,
    key: Array,
    d_output: Array,
    maxima: Array,
    totals: Array,
    means: Array,
    gather_ids: Array,
    segment_ids: Array,
    *optional: Array,
    **params: Any,
) -> Sequence[Array]:
    takes_part = _take_part(key, query, gather_ids, segment_ids, clips_gather_ids=False)
    edges = with_named(_scored, params)(query, key, optional, gather_ids, segment_ids, takes_part)
    d_outputs, *softmax = (_of_edges(x, gather_ids, takes_part) for x in (d_output, maxima, totals, means))
    probabilities, d_logits = edges.differentiated(d_outputs, *softmax)
    d_keys = d_logits[..., None] * edges.score.by_key(edges.queries, edges.keys)
    d_values = probabilities[..., None] * d_outputs
    of_rows = [d_keys + d_values] if edges.score.is_additive else [d_keys, d_values]
    return [xla_sum(x, segment_ids, key.shape[0]).astype(query.dtype) for x in of_rows]


# ----------------------------------------------------------------------------------------------------------------------
# Ops. In the gradient by row, edges gather segments and are sorted by row.

_CELLS, _GATHERED = ("segment", "head", "feature"), ("gathered", "head", "feature")
_EDGES = {"gather_ids": ("edge",), "segment_ids": ("edge",)}


def _optional_operands(
    dims_of_value: tuple[str, ...], is_additive: bool, has_bias: bool, has_edge_order: bool
) -> NamedDimensions:
    return {
        **({} if is_additive else {"value": dims_of_value}),
        **({"bias": ("edge", "head")} if has_bias else {}),
        **({"score_weights": ("head", "feature")} if is_additive else {}),
        **({"edge_order": ("edge",)} if has_edge_order else {}),
    }


def _of_softmax(dims: tuple[str, ...]) -> NamedDimensions:
    return {"d_output": dims, **dict.fromkeys(("maxima", "totals", "means"), dims[:2])}


def _operands(*, is_additive: bool, has_bias: bool, has_edge_order: bool) -> NamedDimensions:
    optional = _optional_operands(_GATHERED, is_additive, has_bias, has_edge_order)
    return {"query": _CELLS, "key": _GATHERED, **_EDGES, **optional}


def _operands_by_segment(*, is_additive: bool, has_bias: bool, has_edge_order: bool) -> NamedDimensions:
    optional = _optional_operands(_GATHERED, is_additive, has_bias, has_edge_order)
    return {"query": _CELLS, "key": _GATHERED, **_of_softmax(_CELLS), **_EDGES, **optional}


def _operands_by_row(*, is_additive: bool, has_bias: bool, has_edge_order: bool) -> NamedDimensions:
    optional = _optional_operands(_CELLS, is_additive, has_bias, has_edge_order)
    return {"query": _GATHERED, "key": _CELLS, **_of_softmax(_GATHERED), **_EDGES, **optional}


def _results_by_segment(*, is_additive: bool, has_bias: bool) -> NamedDimensions:
    return {
        "d_query": _CELLS,
        **({"d_bias": ("edge", "head")} if has_bias else {}),
        **({"d_score_weights": _CELLS} if is_additive else {}),
    }


# ----------------------------------------------------------------------------------------------------------------------
# The programs of one shard, for edges that are split over devices. Devices exchange cells only.


def _merge_over_shards(kernel: ShardKernel, axes: ShardAxes, query: Array, *others: Array) -> Sequence[Array]:
    output, maxima, totals = kernel(query, *others)
    edge_axes = axes.get("edge", ())
    if not edge_axes:
        return output, maxima, totals
    largest = jax.lax.pmax(maxima, edge_axes)
    of_shard = totals * jnp.exp(maxima - largest)
    total = jax.lax.psum(of_shard, edge_axes)
    share = of_shard / jnp.where(total == 0, 1, total)
    merged = jax.lax.psum(share[..., None] * output.astype(total.dtype), edge_axes)
    return merged.astype(output.dtype), largest, total


def _summed(cells: Array, axes: ShardAxes) -> Array:
    edge_axes = axes.get("edge", ())
    if not edge_axes:
        return cells
    return jax.lax.psum(cells.astype(accumulation_dtype(cells.dtype)), edge_axes).astype(cells.dtype)


def _shard_by_segment(kernel: ShardKernel, axes: ShardAxes, *operands: Array, has_bias: bool) -> Sequence[Array]:
    d_query, *others = kernel(*operands)
    of_edges = others[:has_bias]  # the gradient of the bias
    return [_summed(d_query, axes), *of_edges, *(_summed(x, axes) for x in others[has_bias:])]


def _shard_by_row(kernel: ShardKernel, axes: ShardAxes, *operands: Array) -> Sequence[Array]:
    return [_summed(x, axes) for x in kernel(*operands)]


def _replicated_dims(*, has_edge_order: bool) -> tuple[str, ...]:
    """An edge order refers to all edges, so they are replicated with it."""
    return ("segment", "gathered", "feature", *(("edge",) if has_edge_order else ()))


def _attention_op(name: str, *, cells: int, first_ids: int, **fields: Any) -> Op:
    """An op of edges.

    Args:
      cells: the position of the operand, query or key, that has one row for each segment; edges gather the other one.
      first_ids: the position of the gather ids, which the segment ids follow.
    """

    def plan_parameters_of(*operands: Any, **params: Any) -> dict[str, int]:
        own, gathered = operands[cells], operands[1 - cells]
        segment_ids = operands[first_ids + 1]
        return {
            **plan_parameters(own, segment_ids, num_segments=own.shape[0], **params),
            "gathered_rows": gathered.shape[0],
            "heads": own.shape[1],
        }

    def limit(*operands: Any) -> str | None:
        own, gathered = operands[cells], operands[1 - cells]
        if own.shape[2] * own.dtype.itemsize > MAX_HEAD_BYTES:
            return f"a head has more than {MAX_HEAD_BYTES} bytes"
        return limit_of_32_bits(operands[first_ids].shape[0], max(own.shape[0], gathered.shape[0]))

    def sort_first(*operands: Array, has_bias: bool, has_edge_order: bool, **params: Any) -> Sequence[Array]:
        order = operands[-1:] if has_edge_order else ()
        others = operands[: len(operands) - len(order)]
        gather_ids, segment_ids = others[first_ids : first_ids + 2]
        *edges, numbers = sorted_edges(gather_ids, segment_ids, order, others[cells].shape[0])
        in_order = [*others[:first_ids], *edges, *others[first_ids + 2 :], *([numbers] if has_bias else [])]
        params |= {"indices_are_sorted": True, "has_bias": has_bias, "has_edge_order": has_bias}
        return op.kernel(*in_order, **params)

    why = "the kernel takes sorted edges only"
    op = Op(
        name=name,
        dtypes=FLOATING_DTYPES,
        guarantee=accumulated,
        attributes=("indices_are_sorted", "is_additive", "has_bias", "has_edge_order", "scale", "negative_slope"),
        plan_parameters=plan_parameters_of,
        replicated_dims=_replicated_dims,
        reduction_dims=("edge",),
        programs={on_gpu(why, unsorted): sort_first, on_cpu(why, unsorted): sort_first},
        limit=limit,
        **fields,
    )
    return op


GRAPH_ATTENTION = _attention_op(
    "graph_attention",
    cells=0,
    first_ids=2,
    operands=_operands,
    results={"output": _CELLS, "maxima": _CELLS[:2], "totals": _CELLS[:2]},
    result_dtypes=lambda query, *_: [query.dtype, *[accumulation_dtype(query.dtype)] * 2],
    reference=_reference,
    shard_program=_merge_over_shards,
)

GRAPH_ATTENTION_BACKWARD_BY_SEGMENT = _attention_op(
    "graph_attention_backward_by_segment",
    cells=0,
    first_ids=6,
    operands=_operands_by_segment,
    results=_results_by_segment,
    result_dtypes=lambda query, *_, is_additive, has_bias: [
        *[query.dtype] * (1 + has_bias),
        *[accumulation_dtype(query.dtype)] * is_additive,
    ],
    reference=_reference_by_segment,
    shard_program=_shard_by_segment,
)

GRAPH_ATTENTION_BACKWARD_BY_ROW = _attention_op(
    "graph_attention_backward_by_row",
    cells=1,
    first_ids=6,
    operands=_operands_by_row,
    results=lambda *, is_additive: {"d_key": _CELLS, **({} if is_additive else {"d_value": _CELLS})},
    reference=_reference_by_row,
    shard_program=_shard_by_row,
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rule.


@dataclasses.dataclass(frozen=True)
class AttentionParams:
    """The static arguments of attention over edges."""

    indices_are_sorted: bool
    is_additive: bool
    scale: float
    negative_slope: float


def _call(
    op: Op, params: AttentionParams, required: Sequence[Array], optional: Mapping[str, Array], *, is_sorted: bool
) -> list[Array]:
    """Calls an op. `optional` has the operands that not every call has, and may have others."""
    has_bias = "bias" in optional
    flags = {"is_additive": params.is_additive, "has_bias": has_bias}
    flags["has_edge_order"] = has_bias and "edge_order" in optional  # the order tells whose bias to read
    names = _optional_operands((), **flags)
    # NumPy's numbers keep 64 bits in the attributes of a call.
    numbers = {"scale": np.float64(params.scale), "negative_slope": np.float64(params.negative_slope)}
    return op(*required, *(optional[x] for x in names), indices_are_sorted=is_sorted, **flags, **numbers)


def _forward(params: AttentionParams, **arrays: Array) -> tuple[Array, dict[str, Array]]:
    required = [arrays[x] for x in ("query", "key", "gather_ids", "segment_ids")]
    output, maxima, totals = _call(GRAPH_ATTENTION, params, required, arrays, is_sorted=params.indices_are_sorted)
    return output, arrays | {"output": output, "maxima": maxima, "totals": totals}


def _backward(params: AttentionParams, residuals: Mapping[str, Array], d_output: Array) -> dict[str, Array]:
    query, key, output, maxima, totals = (residuals[x] for x in ("query", "key", "output", "maxima", "totals"))
    means = (d_output.astype(maxima.dtype) * output.astype(maxima.dtype)).sum(-1)
    of_segments = [query, key, d_output, maxima, totals, means]
    gather_ids, segment_ids = residuals["gather_ids"], residuals["segment_ids"]

    [d_query, *others] = _call(
        GRAPH_ATTENTION_BACKWARD_BY_SEGMENT,
        params,
        [*of_segments, gather_ids, segment_ids],
        residuals,
        is_sorted=params.indices_are_sorted,
    )
    has_plan = "edge_order" in residuals
    if has_plan:
        edges = [residuals["transposed_gather_ids"], residuals["transposed_segment_ids"]]
        transposed = {**residuals, "edge_order": residuals["transposed_order"]}
    else:
        edges, transposed = [as_gather_ids(segment_ids, query.shape[0]), gather_ids], dict(residuals)
    [d_key, *d_value] = _call(
        GRAPH_ATTENTION_BACKWARD_BY_ROW, params, [*of_segments, *edges], transposed, is_sorted=has_plan
    )
    d_arrays = {"query": d_query, "key": d_key}
    if "bias" in residuals:
        d_arrays["bias"] = others.pop(0)
    if params.is_additive:
        d_arrays["score_weights"] = others.pop(0).sum(0)
    else:
        [d_arrays["value"]] = d_value
    return d_arrays


_graph_attention = KernelVjp("graph_attention", _forward, _backward)
