"""Attention over edges, from logits that are computed or given: the ops, the references and the derivative rule.

The softmax of a segment is kept as the maximum of its logits and the total of ``exp(logit - maximum)``. The gradients
compute the logits again. So no kernel writes an array of edges times features, and the only arrays of edges times
heads are biases, given logits and their gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype, in_range
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.functions import Params, resolved
from jax_baracuda._core.op import Dimensions, NamedDimensions, Op
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.rules import Traits, few_numbers, on_cpu, on_gpu, uncontended, unordered, unsorted
from jax_baracuda._core.sharding import ShardAxes, ShardKernel
from jax_baracuda.ops.segment.cells import gather_segments, xla_max, xla_sum
from jax_baracuda.ops.segment.definitions import SEGMENT_FIELDS, limit_of_32_bits, sum_guarantee
from jax_baracuda.ops.segment.edges import (
    NEED_SORTED_EDGES,
    VECTOR_BYTES,
    replicated_dims,
    sorted_first,
    transposed_edges,
)

Score = Literal["dot_product", "additive", "given"]
"""What the logits are computed from: queries and keys, or the bias alone ("given")."""

# ----------------------------------------------------------------------------------------------------------------------
# Operands and results. The first operand has the rows that edges gather. In the gradient by row, edges gather segments,
# and the segments of the call are the rows of keys and values.

_CELLS, _GATHERED = ("segment", "head", "feature"), ("gathered", "head", "feature")
_OPTIONAL = {"bias": "has_bias", "edge_order": "has_edge_order"}
_SOFTMAX, _ENDS_OF_EDGES = ("maxima", "totals", "means"), ("gather_ids", "segment_ids")


def _dims(names: Sequence[str], *, rows: Dimensions, segments: Dimensions) -> NamedDimensions:
    """The dimensions of operands or results: `rows` of keys and values, and `segments` of queries."""
    dims = {
        **dict.fromkeys(("key", "value", "d_key", "d_value"), rows),
        **dict.fromkeys(("query", "d_output", "d_query", "d_score_weights"), segments),
        **dict.fromkeys(_SOFTMAX, segments[:2]),
        **dict.fromkeys(("bias", "d_bias"), ("edge", "head")),
        **dict.fromkeys((*_ENDS_OF_EDGES, "edge_order", "rows_of_edges"), ("edge",)),
        "score_weights": ("head", "feature"),
    }
    return {name: dims[name] for name in names}


def _operands(*, score: Score) -> NamedDimensions:
    names = {
        "dot_product": ("key", *_ENDS_OF_EDGES, "query", "value", "bias", "edge_order"),
        "additive": ("key", *_ENDS_OF_EDGES, "query", "bias", "score_weights", "edge_order"),
        "given": ("value", *_ENDS_OF_EDGES, "bias", "edge_order"),
    }
    return _dims(names[score], rows=_GATHERED, segments=_CELLS)


def _operands_by_segment(*, score: Score) -> NamedDimensions:
    last = {"dot_product": ("value", "bias"), "additive": ("bias", "score_weights")}
    names = ("key", "query", "d_output", *_SOFTMAX, *_ENDS_OF_EDGES, *last[score], "edge_order")
    return _dims(names, rows=_GATHERED, segments=_CELLS)


def _operands_by_row(*, score: Score) -> NamedDimensions:
    last = {
        "dot_product": ("query", "key", "value", "bias", "edge_order"),
        "additive": ("query", "key", "bias", "score_weights", "edge_order"),
        "given": ("value", "bias", "edge_order", "rows_of_edges"),
    }
    return _dims(("d_output", *_SOFTMAX, *_ENDS_OF_EDGES, *last[score]), rows=_CELLS, segments=_GATHERED)


def _results_by_segment(*, score: Score, has_bias: bool) -> NamedDimensions:
    names = ("d_query", *["d_bias"] * has_bias, *["d_score_weights"] * (score == "additive"))
    return _dims(names, rows=_GATHERED, segments=_CELLS)


def _results_by_row(*, score: Score) -> NamedDimensions:
    names = {"dot_product": ("d_key", "d_value"), "additive": ("d_key",), "given": ("d_value", "d_bias")}
    return _dims(names[score], rows=_CELLS, segments=_GATHERED)


def _by_name(operands_of: Callable[..., NamedDimensions], operands: Sequence[Any], score: Score) -> dict[str, Any]:
    return dict(zip(operands_of(score=score), operands, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# References in plain JAX. Edges that take no part get rows of zeros: infinite ones would give NaN in derivatives.


def _of_edges(array: Array, ids: Array, takes_part: Array) -> Array:
    """The rows of each edge in the accumulation dtype, zeros for edges that take no part."""
    rows, _ = gather_segments(array, ids)
    mask = takes_part.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(mask, rows, 0).astype(accumulation_dtype(array.dtype))


@dataclasses.dataclass(frozen=True)
class _ComputedScore:
    """The scores of edges, from queries and keys ``[E, H, D]`` in the accumulation dtype."""

    is_additive: bool
    scale: float
    negative_slope: float
    weights: Array | None
    queries: Array
    keys: Array

    def logits(self) -> Array:
        if self.is_additive:
            return (self.weights * self.leaky_sums()).sum(-1)
        return self.scale * (self.queries * self.keys).sum(-1)

    def leaky_sums(self) -> Array:
        x = self.queries + self.keys
        return jnp.where(x >= 0, x, self.negative_slope * x)

    def by_query(self) -> Array:
        """The derivative of the logits by the features of the query."""
        if self.is_additive:
            return self.weights * jnp.where(self.queries + self.keys >= 0, 1, self.negative_slope)
        return self.scale * self.keys

    def by_key(self) -> Array:
        return self.by_query() if self.is_additive else self.scale * self.queries


@dataclasses.dataclass(frozen=True)
class _ScoredEdges:
    """The logits ``[E, H]`` and the values ``[E, H, D]`` of edges, in the accumulation dtype."""

    score: _ComputedScore | None
    """None if the logits are given."""
    values: Array
    logits: Array
    takes_part: Array
    """``[E, 1]``"""

    def differentiated(self, d_outputs: Array, maxima: Array, totals: Array, means: Array) -> tuple[Array, Array]:
        """The probabilities and the cotangents of the logits, given the cells of each edge's segment."""
        is_empty = totals == 0
        inverse = jnp.where(is_empty, 0, 1 / jnp.where(is_empty, 1, totals))
        distances = self.logits - maxima
        distances -= jax.lax.stop_gradient(jnp.maximum(distances, 0))  # at most 0, however the maximum was rounded
        probabilities = jnp.where(self.takes_part, jnp.exp(distances) * inverse, 0)
        return probabilities, probabilities * ((d_outputs * self.values).sum(-1) - means)


def _scored(
    arrays: Mapping[str, Array], segments_of_edges: Array, rows_of_edges: Array, takes_part: Array, **params: Any
) -> _ScoredEdges:
    wide = accumulation_dtype(next(iter(arrays.values())).dtype)
    takes_part = takes_part[:, None]
    score, logits = None, jnp.zeros((), wide)
    if params["score"] != "given":
        weights = arrays["score_weights"].astype(wide)[None] if params["score"] == "additive" else None
        score = _ComputedScore(
            params["score"] == "additive",
            float(params["scale"]),
            float(params["negative_slope"]),
            weights,
            _of_edges(arrays["query"], segments_of_edges, takes_part),
            _of_edges(arrays["key"], rows_of_edges, takes_part),
        )
        logits = score.logits()
    if (bias := arrays["bias"]) is not None:
        order = arrays["edge_order"]
        in_order = bias if order is None else jnp.take(bias, order, axis=0, mode="clip")
        logits += jnp.where(takes_part, in_order, 0)
    has_values = "value" in arrays
    values = _of_edges(arrays["value"], rows_of_edges, takes_part) if has_values else score.keys
    return _ScoredEdges(score, values, logits, takes_part)


def _in_original_order(of_edges: Array, edge_order: Array | None) -> Array:
    return of_edges if edge_order is None else jnp.zeros_like(of_edges).at[edge_order].set(of_edges)


def _reference(*operands: Array, num_segments: int, **params: Any) -> Sequence[Array]:
    arrays = _by_name(_operands, operands, params["score"])
    gather_ids, segment_ids = arrays["gather_ids"], arrays["segment_ids"]
    takes_part = in_range(segment_ids, num_segments) & (operands[0].shape[0] > 0)
    edges = _scored(arrays, segment_ids, gather_ids, takes_part, **params)
    lowest = jnp.finfo(edges.logits.dtype).min
    maxima = jnp.maximum(xla_max(jax.lax.stop_gradient(edges.logits), segment_ids, num_segments), lowest)
    distances = edges.logits - _of_edges(maxima, segment_ids, takes_part)
    weights = jnp.where(edges.takes_part, jnp.exp(distances), 0)
    totals = xla_sum(weights, segment_ids, num_segments)
    # Divides the weights of edges: to divide cells, XLA would read and write all of them once more. No segment adds
    # dropped edges, so their divisors may be anything.
    divisors, _ = gather_segments(jnp.where(totals == 0, 1, totals), segment_ids)
    probabilities = weights / divisors
    output = xla_sum(probabilities[..., None] * edges.values, segment_ids, num_segments)
    return output.astype(operands[0].dtype), maxima, totals


def _reference_by_segment(*operands: Array, num_segments: int, **params: Any) -> Sequence[Array]:
    arrays = _by_name(_operands_by_segment, operands, params["score"])
    gather_ids, segment_ids = arrays["gather_ids"], arrays["segment_ids"]
    takes_part = in_range(segment_ids, num_segments) & (operands[0].shape[0] > 0)
    edges = _scored(arrays, segment_ids, gather_ids, takes_part, **params)
    of_segments = (_of_edges(arrays[x], segment_ids, takes_part) for x in ("d_output", "maxima", "totals", "means"))
    _, d_logits = edges.differentiated(*of_segments)

    def summed(rows: Array) -> Array:
        return xla_sum(rows, segment_ids, num_segments)

    results = [summed(d_logits[..., None] * edges.score.by_query()).astype(operands[0].dtype)]
    if params["has_bias"]:
        results.append(_in_original_order(d_logits, arrays["edge_order"]))
    if edges.score.is_additive:
        results.append(summed(d_logits[..., None] * edges.score.leaky_sums()))
    return results


def _reference_by_row(*operands: Array, num_segments: int, **params: Any) -> Sequence[Array]:
    arrays = _by_name(_operands_by_row, operands, params["score"])
    segments_of_edges, rows = arrays["gather_ids"], arrays["segment_ids"]
    takes_part = in_range(segments_of_edges, operands[0].shape[0]) & (num_segments > 0)
    rows_of_edges, has_row = rows, in_range(rows, num_segments)
    if params["score"] == "given":  # edges without a row have logits, and gradients of these
        order, nearest = arrays["edge_order"], arrays["rows_of_edges"]
        in_order = nearest if order is None else jnp.take(nearest, order, mode="clip")
        rows_of_edges = jnp.where(has_row, rows, in_order)
    else:
        takes_part &= has_row
    edges = _scored(arrays, segments_of_edges, rows_of_edges, takes_part, **params)
    of_segments = ("d_output", "maxima", "totals", "means")
    d_outputs, *softmax = (_of_edges(arrays[x], segments_of_edges, takes_part) for x in of_segments)
    probabilities, d_logits = edges.differentiated(d_outputs, *softmax)

    def summed(of_rows: Array) -> Array:
        return xla_sum(of_rows, rows, num_segments).astype(operands[0].dtype)

    d_values = probabilities[..., None] * d_outputs
    if edges.score is None:
        return [summed(d_values), _in_original_order(d_logits, arrays["edge_order"])]
    d_keys = d_logits[..., None] * edges.score.by_key()
    return [summed(d_keys + d_values)] if edges.score.is_additive else [summed(d_keys), summed(d_values)]


# ----------------------------------------------------------------------------------------------------------------------
# The programs of one shard, for edges that are split over devices. Devices exchange cells only.


def _merge_over_shards(kernel: ShardKernel, axes: ShardAxes, *operands: Array) -> Sequence[Array]:
    output, maxima, totals = kernel(*operands)
    edge_axes = axes.get("edge", ())
    if not edge_axes:
        return output, maxima, totals
    largest = jax.lax.pmax(maxima, edge_axes)
    of_shard = totals * jnp.exp(maxima - largest)
    total = jax.lax.psum(of_shard, edge_axes)
    share = of_shard / jnp.where(total == 0, 1, total)
    merged = jax.lax.psum(share[..., None] * output.astype(total.dtype), edge_axes)
    return merged.astype(output.dtype), largest, total


def _sum_over_shards(
    results_of: Callable[..., NamedDimensions], kernel: ShardKernel, axes: ShardAxes, *operands: Array, **params: Any
) -> Sequence[Array]:
    edge_axes = axes.get("edge", ())

    def summed(cells: Array) -> Array:
        return jax.lax.psum(cells.astype(accumulation_dtype(cells.dtype)), edge_axes).astype(cells.dtype)

    pairs = zip(resolved(results_of, params), kernel(*operands), strict=True)
    return [x if name == "d_bias" or not edge_axes else summed(x) for name, x in pairs]


# ----------------------------------------------------------------------------------------------------------------------
# Heads for kernels. On GPUs, each thread of a head has a vector of its features, and the threads add up their terms
# pairwise, so the number of features is a power of two. CPUs take any number.

MAX_HEAD_BYTES = 512
"""A head has at most one vector for each thread of a warp, see ``AttentionCall::MaxHeadFeatures`` in C++."""


def _width_for_gpus(features: int, element_bytes: int, score: Score) -> int:
    """The features of a head, or of a part of it: a power of two. Given logits need no whole vectors."""
    smallest, largest = (1 if score == "given" else VECTOR_BYTES // element_bytes), MAX_HEAD_BYTES // element_bytes
    return min(max(smallest, 1 << (features - 1).bit_length() if features > 0 else 1), largest)


def _does_not_fit_gpus(traits: Traits) -> bool:
    heads, features = traits.measures["head"], traits.measures["feature"]
    if heads == 0 or features == 0:
        return heads > 0
    element_bytes = traits.measures["row_bytes"] // (heads * features)
    return _width_for_gpus(features, element_bytes, traits.params["score"]) != features


def padded_heads(array: Array, width: int) -> Array:
    """The array with `width` features of a head."""
    lacking = width - array.shape[-1]
    return array if lacking == 0 else jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, lacking)])


def _with_fitting_heads(op: Op, *operands: Array | None, **params: Any) -> Sequence[Array]:
    """Pads the features of heads. Those of wide heads are split into parts with the same logits, if these are given."""
    _, heads, features = operands[0].shape
    width = _width_for_gpus(features, operands[0].dtype.itemsize, params["score"])
    parts = max(1, -(-features // width))

    def fitting(name: str, dims: tuple[str, ...], x: Array | None) -> Array | None:
        if x is None:
            return None
        if dims[-1] == "feature":
            longer = padded_heads(x, parts * width)
            return longer if parts == 1 else longer.reshape(x.shape[0], heads * parts, width)
        if dims[-1] != "head" or parts == 1:
            return x
        of_parts = jnp.broadcast_to(x[:, :, None], (*x.shape, parts))
        if name == "means":  # the sum over the parts is that of the head
            of_parts = jnp.where(jnp.arange(parts) == 0, of_parts, 0)
        return of_parts.reshape(x.shape[0], heads * parts)

    def of_heads(name: str, dims: tuple[str, ...], x: Array) -> Array:
        if dims[-1] == "feature":
            return x.reshape(x.shape[0], heads, parts * width)[..., :features]
        if parts == 1:
            return x
        of_parts = x.reshape(x.shape[0], heads, parts)
        return of_parts.sum(-1) if name == "d_bias" else of_parts[..., 0]

    dims_of_operands, dims_of_results = (resolved(x, params) for x in (op.operands, op.results))
    named = zip(dims_of_operands.items(), operands, strict=True)
    results = op.kernel(*(fitting(name, dims, x) for (name, dims), x in named), **params)
    return [of_heads(name, dims, x) for (name, dims), x in zip(dims_of_results.items(), results, strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# Ops.


def _attention_op(name: str, operands_of: Callable[..., NamedDimensions], **fields: Any) -> Op:
    def limit(*operands: Any, score: Score, sizes: Mapping[str, int]) -> str | None:
        head_bytes = sizes["feature"] * operands[0].dtype.itemsize
        if head_bytes > MAX_HEAD_BYTES and score != "given":
            return f"a head has more than {MAX_HEAD_BYTES} bytes"
        return limit_of_32_bits(sizes=sizes)

    def fit_heads(*operands: Array | None, **params: Any) -> Sequence[Array]:
        return _with_fitting_heads(op, *operands, **params)

    sort_first = sorted_first(lambda: op, lambda arrays, params: arrays["bias"] is not None)
    op = define_op(
        name=name,
        operands=operands_of,
        optional=_OPTIONAL,
        dtypes=FLOATING_DTYPES,
        # H200, time of plain JAX / kernel: 0.4 to 0.8 up to 16 MB, 0.7 to 1.25 for 33 MB, above 0.85 to 3 (90 calls).
        xla_rules=(on_gpu("XLA sorts no edges, and caches their messages", unordered, uncontended, few_numbers),),
        guarantee=sum_guarantee,
        attributes=("indices_are_sorted", "has_bias", "has_edge_order", "scale", "negative_slope"),
        replicated_dims=lambda *, has_edge_order: (*replicated_dims(has_edge_order=has_edge_order), "feature"),
        reduction_dims=("edge",),
        alternatives={
            on_gpu("the threads of a head have vectors of it", _does_not_fit_gpus): fit_heads,
            on_gpu(NEED_SORTED_EDGES, unsorted): sort_first,
            on_cpu(NEED_SORTED_EDGES, unsorted): sort_first,
        },
        **SEGMENT_FIELDS | {"limit": limit},
        **fields,
    )
    return op


GRAPH_ATTENTION = _attention_op(
    "graph_attention",
    _operands,
    targets={
        "graph_dot_product_attention": {"score": "dot_product"},
        "graph_additive_attention": {"score": "additive"},
        "segment_attention": {"score": "given"},
    },
    results={"output": _CELLS, "maxima": _CELLS[:2], "totals": _CELLS[:2]},
    result_dtypes=lambda gathered, *_: [gathered.dtype, *[accumulation_dtype(gathered.dtype)] * 2],
    reference=_reference,
    shard_program=_merge_over_shards,
)

GRAPH_ATTENTION_BACKWARD_BY_SEGMENT = _attention_op(
    "graph_attention_backward_by_segment",
    _operands_by_segment,
    targets={
        "graph_dot_product_attention_d_query": {"score": "dot_product"},
        "graph_additive_attention_d_query": {"score": "additive"},
    },
    results=_results_by_segment,
    result_dtypes=lambda key, *_, score, has_bias: [
        key.dtype,
        *[accumulation_dtype(key.dtype)] * (has_bias + (score == "additive")),
    ],
    reference=_reference_by_segment,
    shard_program=functools.partial(_sum_over_shards, _results_by_segment),
)

GRAPH_ATTENTION_BACKWARD_BY_ROW = _attention_op(
    "graph_attention_backward_by_row",
    _operands_by_row,
    targets={
        "graph_dot_product_attention_d_key": {"score": "dot_product"},
        "graph_additive_attention_d_key": {"score": "additive"},
        "segment_attention_backward": {"score": "given"},
    },
    results=_results_by_row,
    result_dtypes=lambda d_output, *_, score: [
        accumulation_dtype(d_output.dtype) if name == "d_bias" else d_output.dtype
        for name in _results_by_row(score=score)
    ],
    reference=_reference_by_row,
    shard_program=functools.partial(_sum_over_shards, _results_by_row),
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rule.


def _call(op: Op, params: Params, arrays: Mapping[str, Array], num_segments: int, *, is_sorted: bool) -> list[Array]:
    """Calls an op with those of the arrays that it takes."""
    if "bias" not in arrays:  # the order only tells whose bias to read
        arrays = {name: x for name, x in arrays.items() if name != "edge_order"}
    return op.of_arrays(arrays, **params | {"num_segments": num_segments, "indices_are_sorted": is_sorted})


def attention_params(score: Score, params: Params, scale: float = 1.0, negative_slope: float = 0.0) -> Params:
    """The static arguments of attention over edges, given those of the edges."""
    # NumPy's numbers keep 64 bits in the attributes of a call.
    numbers = {"scale": np.float64(scale), "negative_slope": np.float64(negative_slope)}
    names = ("num_segments", "indices_are_sorted", "deterministic")
    return Params({name: params[name] for name in names}, score=score, **numbers)


def _forward(params: Params, **arrays: Array) -> tuple[Array, dict[str, Array]]:
    is_sorted = params["indices_are_sorted"]
    output, maxima, totals = _call(GRAPH_ATTENTION, params, arrays, params["num_segments"], is_sorted=is_sorted)
    return output, arrays | {"output": output, "maxima": maxima, "totals": totals}


def _backward(params: Params, residuals: Mapping[str, Array], d_output: Array) -> dict[str, Array]:
    wide = residuals["maxima"].dtype
    means = (d_output.astype(wide) * residuals["output"].astype(wide)).sum(-1)
    arrays = {**residuals, "d_output": d_output, "means": means}
    d_arrays: dict[str, Array] = {}
    if params["score"] != "given":
        op, num_segments = GRAPH_ATTENTION_BACKWARD_BY_SEGMENT, params["num_segments"]
        names = _results_by_segment(score=params["score"], has_bias="bias" in arrays)
        results = _call(op, params, arrays, num_segments, is_sorted=params["indices_are_sorted"])
        d_arrays |= dict(zip(names, results, strict=True))

    gather_ids, segment_ids, order = transposed_edges(arrays, params["num_segments"])
    edges = {"gather_ids": gather_ids, "segment_ids": segment_ids}
    if order is not None:
        edges["edge_order"] = order
    if params["score"] == "given":
        edges["rows_of_edges"] = arrays["edge_gather_ids" if order is not None else "gather_ids"]
    arrays |= edges
    num_rows = arrays["value" if params["score"] == "given" else "key"].shape[0]
    results = _call(GRAPH_ATTENTION_BACKWARD_BY_ROW, params, arrays, num_rows, is_sorted=order is not None)
    d_arrays |= dict(zip(_results_by_row(score=params["score"]), results, strict=True))
    if params["score"] == "additive":
        d_arrays["d_score_weights"] = d_arrays["d_score_weights"].sum(0)
    return {name.removeprefix("d_"): x for name, x in d_arrays.items()}


attend = KernelVjp("graph_attention", _forward, _backward)
"""``(params, *, query, key, value, bias, score_weights, **edges) -> output [S, H, D]``

Edges have the names of the fields of a plan, for given logits also `edge_gather_ids` if there is a plan. Given logits
are the bias, in the accumulation dtype; there is no query and no key.
"""
