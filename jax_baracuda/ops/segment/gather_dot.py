"""Products of the ends of edges: for each edge, the dot product of the row that it gathers and its segment's row."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import (
    FLOATING_DTYPES,
    accumulation_dtype,
    check_same_dtype,
    floating_array,
    replicate_dims,
)
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.dispatch import at_most, fused, in_cache, on_gpu
from jax_baracuda._core.functions import Params
from jax_baracuda._core.guarantees import accumulated
from jax_baracuda._core.op import Op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.selection import Implementation
from jax_baracuda.ops.segment.arguments import Mode, canonicalize_edges_between
from jax_baracuda.ops.segment.cells import gather_segments
from jax_baracuda.ops.segment.definitions import NOTHING_TO_VECTORISE, limit_of_32_bits, plan_parameters
from jax_baracuda.ops.segment.edges import as_gather_ids, gather_rows, replicated_dims
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.sum import gathered_sum, gathered_sum_by_row, sum_over_split_dim


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
# Reference in plain JAX.


def _reference(
    d_output: Array, data: Array, gather_ids: Array, segment_ids: Array, edge_order: Array | None, *, is_wide: bool
) -> tuple[Array]:
    wide = accumulation_dtype(data.dtype)
    if edge_order is not None:  # ids in the order of the edges: cheaper to move than products
        gather_ids, segment_ids = (jnp.zeros_like(ids).at[edge_order].set(ids) for ids in (gather_ids, segment_ids))
    cells, is_member = gather_segments(d_output.astype(wide), segment_ids)
    cells = jnp.where(is_member, cells, 0)  # derivatives multiply the zeros of dropped edges by them
    products = jnp.where(is_member, cells * gather_rows(data, gather_ids, clips_gather_ids=True).astype(wide), 0)
    output = products.sum(axis=-1)
    return (output if is_wide else output.astype(data.dtype),)


# ----------------------------------------------------------------------------------------------------------------------
# The op. It is also the gradient of weights, where the cells are cotangents: hence the name of its first operand.


def _transpose(
    avals: Sequence[Any], d_outputs: Sequence[Array], data: Array, *edges: Array | None, deterministic: bool
) -> Sequence[Array]:
    """The transpose with respect to the cells: the weighted sum."""
    *ids, order = edges
    weighted = *ids, d_outputs[0].astype(data.dtype), order
    return [gathered_sum(data, *weighted, num_segments=avals[0].shape[0], deterministic=deterministic)]


def _transpose_data(
    avals: Sequence[Any], d_outputs: Sequence[Array], cells: Array, *edges: Array | None, deterministic: bool
) -> Sequence[Array]:
    """The transpose with respect to the gathered rows: the weighted sum in the other direction."""
    gather_ids, segment_ids, order = edges
    # No gradient goes through gather ids out of range.
    weighted = as_gather_ids(segment_ids, cells.shape[0]), gather_ids, d_outputs[0].astype(cells.dtype), order
    flags = {"deterministic": deterministic, "clips_gather_ids": False}
    return [gathered_sum(cells, *weighted, num_segments=avals[0].shape[0], **flags)]


GATHER_SEGMENT_DOT = Op(
    name="gather_segment_dot",
    operands={
        "d_output": ("segment", "head", "feature"),
        "data": ("gathered", "head", "feature"),
        **dict.fromkeys(("gather_ids", "segment_ids", "edge_order"), ("edge",)),
    },
    optional={"edge_order": "has_edge_order"},
    defaults={"is_wide": False},
    results={"output": ("edge", "head")},
    result_dtypes=lambda d_output, *_, is_wide: [accumulation_dtype(d_output.dtype) if is_wide else d_output.dtype],
    reference=_reference,
    # Time of plain JAX / kernel: 0.5 (H100, 41 loops), 0.6 to 1.0 for 4M edges of 7 and 8 (H200). Two cores: 0.2 for
    # single features.
    xla_rules=(
        on_gpu("one thread adds up few products, and XLA fuses that with what follows", at_most(feature=8)),
        on_gpu("XLA fuses what makes the rows, too", fused),
        on_gpu("gathers from the L2 cache, fused into the sum over features", in_cache),
        NOTHING_TO_VECTORISE,
    ),
    dtypes=FLOATING_DTYPES,
    guarantee=accumulated,
    attributes=("is_wide", "has_edge_order"),
    plan_parameters=lambda d_output, *_, sizes: plan_parameters(d_output, sizes=sizes),
    replicated_dims=replicated_dims,
    reduction_dims=("feature",),
    shard_program=functools.partial(sum_over_split_dim, "feature"),
    limit=limit_of_32_bits,
    transposes={("d_output",): _transpose, ("data",): _transpose_data},
)


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
