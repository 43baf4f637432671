"""Sum and mean of gathered rows over segments: message passing on graphs without an array of messages."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import as_array, replicate_dims
from jax_baracuda._core.batch import map_over_batch
from jax_baracuda._core.functions import Params
from jax_baracuda._core.public import public_function
from jax_baracuda._core.selection import Implementation
from jax_baracuda.ops.segment.arguments import EdgeCall, Mode, canonicalize_edges
from jax_baracuda.ops.segment.batched_vjp import BatchedVjp
from jax_baracuda.ops.segment.ids import check_numbered
from jax_baracuda.ops.segment.mean import divided_by_counts
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.sum_ops import GATHER_SEGMENT_DOT, count_rows, gathered_sum, gathered_sum_by_row


@public_function()
def gather_segment_sum(
    data: ArrayLike,
    gather_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    weights: ArrayLike | None = None,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Sum of gathered rows over the edges of each segment: one layer of message passing.

    ``out[s, ...] = sum { weights[e] * data[gather_ids[e], ...] : segment_ids[e] == s }``

    The same as ``segment_sum(weights * data[gather_ids], segment_ids, num_segments)``. The kernels of this function and
    of its gradient write and read no array of edges times features. (Exception: on GPUs, without weights, that array is
    written for rows of up to 16 bytes or for few edges, where this is faster.)

    Args:
      data: ``[N, ...]``, the rows (features of nodes), a floating dtype. float16, bfloat16, float32 and float64 have
        kernels.
      gather_ids: ``[E]``, any integer dtype, in any order: the row that each edge gathers (its sender). As in
        ``data[gather_ids]``, negative ids count from the end, and ids out of range name the nearest row.
      segment_ids: ``[E]``, any integer dtype, in any order: the segment of each edge (its receiver). Edges whose id is
        negative or at least `num_segments` are dropped.
      num_segments: number of segments S, static under ``jit``.
      weights: factors of the edges, ``[E]``, or ``[E, H]`` for data ``[N, H, ...]``: one for each head. More generally,
        ``[E, *dims]`` where `dims` are the first dimensions of a row. They are cast to the dtype of `data`.
      indices_are_sorted: promises that `segment_ids` is non-decreasing, which saves a sort on GPUs. If the promise is
        false, the result may hold anything.
      mode: what happens to segment ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the edge
        is dropped. "clip": the id is clamped to ``[0, S - 1]``.
      deterministic: on GPUs, unsorted edges without a plan are added in an order that varies from run to run where that
        was faster: for few edges or narrow rows. True: sort them, so that all runs are bit-equal. Sorted edges, plans
        and their gradients are bit-equal anyway. On CPUs everything is.
      plan: a :func:`segment_plan` of the edges, which replaces `gather_ids`, `segment_ids` and `num_segments`. With a
        plan, neither this call nor its gradient sorts. Calls trust it; :meth:`SegmentPlan.validate` checks it.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Segments without edges hold 0.

    Raises:
      TypeError: an argument is not an array or has an unsuitable dtype, or `num_segments` is missing.
      ValueError: shapes do not fit, there are no rows to gather from, an option is unknown, or both a plan and ids are
        given.

    Numerical guarantees: terms are added in float32 (float64 for float64), and the sum is rounded once to the dtype.
    Bit-equal from run to run, except on GPUs (see `deterministic`).

    Gradient: ``d_data[n] = sum { weights[e] * d_out[segment_ids[e]] : gather_ids[e] == n }``, by the same kernel over
    the edges of each row, and ``d_weights[e] = sum(data[gather_ids[e]] * d_out[segment_ids[e]])`` over the features
    that a weight scales. No gradient of data goes through gather ids that are out of range. If ``jax.vmap`` maps ids or
    weights but not `data`, the gradient of `data` is one sum over the edges of the whole batch, and plans do not save
    its sort.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> senders, receivers = jnp.array([0, 1, 2, 1]), jnp.array([1, 1, 0, 0])
      >>> print(jb.gather_segment_sum(data, senders, receivers, num_segments=2))
      [[8. 8.]
       [4. 6.]]
    """
    call = canonicalize_edges("gather_segment_sum", data, gather_ids, segment_ids, num_segments, mode, plan)
    params = call.params(indices_are_sorted, deterministic, is_mean=False)
    return _reduce(_gather_segment_sum, call, params, weights)


@public_function(gather_segment_sum)
def gather_segment_mean(
    data: ArrayLike,
    gather_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    weights: ArrayLike | None = None,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Mean of gathered rows over the edges of each segment: one layer of message passing.

    ``out[s, ...] = mean { weights[e] * data[gather_ids[e], ...] : segment_ids[e] == s }``

    The same as ``segment_mean(weights * data[gather_ids], segment_ids, num_segments)``, by the kernels of
    :func:`gather_segment_sum`. The divisor is the number of edges, whatever their weights.

    Numerical guarantees: terms are added in float32 (float64 for float64), the sum is divided there by the exact number
    of edges, and rounded once to the dtype. Bit-equal from run to run, except on GPUs (see `deterministic`).

    Gradient: the cotangent is divided by the number of edges and rounded to the dtype; then it is the gradient of
    :func:`gather_segment_sum`, also under ``jax.vmap``. No gradient of data goes through gather ids that are out of
    range.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> senders, receivers = jnp.array([0, 1, 2, 1]), jnp.array([1, 1, 0, 0])
      >>> print(jb.gather_segment_mean(data, senders, receivers, num_segments=2))
      [[4. 4.]
       [2. 3.]]
    """
    name = "gather_segment_mean"
    call = canonicalize_edges(name, data, gather_ids, segment_ids, num_segments, mode, plan)
    check_numbered(name, "edges", call.edges["segment_ids"].shape[0])
    params = call.params(indices_are_sorted, deterministic, is_mean=True)
    return _reduce(_gather_segment_mean, call, params, weights)


def _reduce(reduction: BatchedVjp, call: EdgeCall, params: Params, weights: ArrayLike | None) -> Array:
    """Applies a reduction to the gathered rows, with or without weights."""
    if weights is None:
        return reduction(params, data=call.data, **call.edges)
    weights, data = by_heads(call, "weights", as_array(call.name, "weights", weights))
    output = reduction(params, data=data, weights=weights.astype(data.dtype), **call.edges)
    return output.reshape(call.num_segments, *call.data.shape[1:])


def by_heads(call: EdgeCall, argument: str, weights: Array) -> tuple[Array, Array]:
    """Weights (or logits) ``[E, *dims]`` of the edges as ``[E, H]``, and the data as ``[N, H, features]``."""
    data, num_edges = call.data, call.edges["segment_ids"].shape[0]
    if weights.ndim == 0 or weights.shape != (num_edges, *data.shape[1 : weights.ndim]):
        raise ValueError(
            f"{call.name}: {argument} must be [E] or [E, *dims], where dims are the first dimensions of a row of data; "
            f"got {argument}.shape = {weights.shape} for {num_edges} edges and data.shape = {data.shape}"
        )
    heads = math.prod(weights.shape[1:])
    weights, data = (replicate_dims(x, range(1, weights.ndim)) for x in (weights, data))
    data = replicate_dims(data, range(weights.ndim, data.ndim))
    features = math.prod(data.shape[weights.ndim :])
    return weights.reshape(num_edges, heads), data.reshape(data.shape[0], heads, features)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rule.


def _divided(params: Params, cells: Array, segment_ids: Array) -> Array:
    """Cells divided by the numbers of their edges."""
    return divided_by_counts(cells, count_rows(segment_ids, params["num_segments"], params["indices_are_sorted"]))


def _forward(params: Params, **arrays: Array) -> tuple[Array, dict[str, Array]]:
    flags = {name: params[name] for name in ("num_segments", "indices_are_sorted", "deterministic")}
    edges = arrays["gather_ids"], arrays["segment_ids"], arrays.get("weights"), arrays.get("edge_order")
    total = gathered_sum(arrays["data"], *edges, is_wide=params["is_mean"], **flags)
    if params["is_mean"]:
        total = _divided(params, total, arrays["segment_ids"]).astype(arrays["data"].dtype)
    return total, {}


def _backward(params: Params, num_joined: int, residuals: Mapping[str, Array], d_output: Array) -> dict[str, Array]:
    """The cotangents of weighted sums; for `num_joined`, see :class:`BatchedVjp`."""
    gather_ids, segment_ids, weights = (residuals.get(name) for name in ("gather_ids", "segment_ids", "weights"))
    if params["is_mean"]:
        d_output = map_over_batch(functools.partial(_divided, params), num_joined, d_output, segment_ids)
    d_data = gathered_sum_by_row(params, residuals, d_output, weights, num_joined)
    if weights is None:
        return {"data": d_data}
    data = residuals["data"]

    def gradient_of_weights(d_output: Array, *edges: Array | None) -> Array:
        return GATHER_SEGMENT_DOT(d_output, data, *edges, deterministic=params["deterministic"])[0]

    edges = gather_ids, segment_ids, residuals.get("edge_order")
    d_weights = map_over_batch(gradient_of_weights, num_joined, d_output, *edges)
    return {"data": d_data, "weights": d_weights}


_gather_segment_sum, _gather_segment_mean = (
    # Only the gradient of weights needs the data.
    BatchedVjp(name, _forward, _backward, keeps_data=lambda _, names: "weights" in names)
    for name in ("gather_segment_sum", "gather_segment_mean")
)
