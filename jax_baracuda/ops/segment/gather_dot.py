"""Products of the ends of edges: for each edge, the dot product of the row that it gathers and its segment's row."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import check_same_dtype, floating_array, replicate_dims
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.functions import Params
from jax_baracuda._core.public import public_function
from jax_baracuda._core.selection import Implementation
from jax_baracuda.ops.segment.arguments import Mode, canonicalize_edges_between
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.sum_ops import GATHER_SEGMENT_DOT, gathered_sum, gathered_sum_by_row


@public_function()
def gather_segment_dot(
    data: ArrayLike,
    segment_data: ArrayLike,
    gather_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Dot products of the rows at both ends of each edge: a sampled product of two dense matrices.

    ``out[e, ...] = sum(data[gather_ids[e], ..., :] * segment_data[segment_ids[e], ..., :])``, over the last dimension.

    The same as ``(data[gather_ids] * segment_data[segment_ids]).sum(-1)``. The kernels of this function and of its
    gradient write and read no array of edges times features.

    Args:
      data: ``[N, ..., D]``, the rows (features of nodes), a floating dtype. float16, bfloat16, float32 and float64 have
        kernels. Dimensions in the middle are heads, each with products of its own.
      segment_data: ``[S, ..., D]`` with the dtype of `data`, one row for each segment.
      gather_ids: ``[E]``, any integer dtype, in any order: the row that each edge gathers (its sender). As in
        ``data[gather_ids]``, negative ids count from the end, and ids out of range name the nearest row.
      segment_ids: ``[E]``, any integer dtype, in any order: the segment of each edge (its receiver). Edges whose id is
        negative or at least S are dropped: their products are 0.
      indices_are_sorted: promises that `segment_ids` is non-decreasing, which saves the gradient of `segment_data` a
        sort on GPUs. If the promise is false, the result may hold anything.
      mode: what happens to segment ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the edge
        is dropped. "clip": the id is clamped to ``[0, S - 1]``.
      deterministic: on GPUs, the gradients of unsorted edges without a plan are added in an order that varies from run
        to run where that was faster, unless this is True. Everything else has the same bits in every run anyway.
      plan: a :func:`segment_plan` of the edges, which replaces `gather_ids` and `segment_ids`. The gradient then does
        not sort. The products are in the order of the ids from which the plan was made. Calls trust it;
        :meth:`SegmentPlan.validate` checks it.

    Returns:
      ``[E, ...]`` with the dtype of `data` and its dimensions in the middle.

    Raises:
      TypeError: an argument is not an array or has an unsuitable dtype, or ids and plan are missing.
      ValueError: shapes do not fit, there are no rows to gather from, an option is unknown, or both a plan and ids are
        given.

    Numerical guarantees: products are added in float32 (float64 for float64), and the sum is rounded once to the dtype.
    Bit-equal from run to run, except for gradients on GPUs (see `deterministic`).

    Gradient: ``d_data[n] = sum { d_out[e] * segment_data[segment_ids[e]] : gather_ids[e] == n }``, likewise
    ``d_segment_data[s] = sum { d_out[e] * data[gather_ids[e]] : segment_ids[e] == s }``, by the kernel of
    :func:`gather_segment_sum` with weights. No gradient of `data` goes through gather ids that are out of range.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> segment_data = jnp.array([[1.0, 0.0], [1.0, 1.0]])
      >>> senders, receivers = jnp.array([0, 1, 2, 1]), jnp.array([1, 1, 0, 0])
      >>> print(jb.gather_segment_dot(data, segment_data, senders, receivers))
      [5. 5. 5. 3.]
    """
    name = "gather_segment_dot"
    data, segment_data = floating_array(name, "data", data), floating_array(name, "segment_data", segment_data)
    check_same_dtype(name, "segment_data", segment_data, "data", data)
    if data.ndim < 2 or data.shape[1:] != segment_data.shape[1:]:
        raise ValueError(
            f"{name}: data must be [N, ..., D] and segment_data [S, ..., D], with the same dimensions after the first; "
            f"got {data.shape} and {segment_data.shape}"
        )
    call = canonicalize_edges_between(
        name, "data", data, "segment_data", segment_data, gather_ids, segment_ids, mode, plan
    )
    params = call.params(indices_are_sorted, deterministic)
    heads = data.shape[1:-1]
    output = _gathered_dot(params, data=_of_heads(data), segment_data=_of_heads(segment_data), **call.edges)
    return output.reshape(output.shape[0], *heads)


def _of_heads(rows: Array) -> Array:
    """Rows ``[N, ..., D]`` as ``[N, H, D]``."""
    heads = range(1, rows.ndim - 1)
    return replicate_dims(rows, heads).reshape(rows.shape[0], math.prod(rows.shape[1:-1]), rows.shape[-1])


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rule.


def _forward(params: Params, **arrays: Array) -> tuple[Array, dict[str, Array]]:
    operands = {**arrays, "d_output": arrays["segment_data"]}
    return GATHER_SEGMENT_DOT.of_arrays(operands, deterministic=params["deterministic"])[0], arrays


def _backward(params: Params, residuals: Mapping[str, Array], d_output: Array) -> dict[str, Array]:
    """Weighted sums over the edges of each row and of each segment."""
    d_data = gathered_sum_by_row(params, residuals, residuals["segment_data"], d_output)
    d_segment_data = gathered_sum(
        residuals["data"],
        residuals["gather_ids"],
        residuals["segment_ids"],
        d_output,
        residuals.get("edge_order"),
        num_segments=params["num_segments"],
        indices_are_sorted=params["indices_are_sorted"],
        deterministic=params["deterministic"],
    )
    return {"data": d_data, "segment_data": d_segment_data}


_gathered_dot = KernelVjp("gather_segment_dot", _forward, _backward)
