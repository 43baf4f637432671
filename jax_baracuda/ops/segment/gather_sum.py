"""Sum of gathered rows over segments: message passing on graphs without an array of messages."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype, as_array, with_whole_dims
from jax_baracuda._core.autodiff import with_twin
from jax_baracuda._core.batch import map_over_batch, mapped_dims
from jax_baracuda._core.batched_autodiff import BatchedVjp
from jax_baracuda._core.dispatch import MB, at_most, fused, on_cpu, on_gpu, unordered
from jax_baracuda._core.guarantees import accumulated
from jax_baracuda._core.op import NamedDimensions, Op
from jax_baracuda._core.selection import Implementation, selectable
from jax_baracuda.ops.segment.arguments import Mode
from jax_baracuda.ops.segment.cells import gather_segments
from jax_baracuda.ops.segment.definitions import limit_of_32_bits, plan_parameters
from jax_baracuda.ops.segment.edges import (
    Edges,
    GatherParams,
    as_gather_ids,
    as_rows,
    canonicalize_edges,
    gather_rows,
    replicated_dims,
)
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.sum import GATHER_SEGMENT_SUM, sum_edges, sum_over_split_dim


@selectable
@with_twin
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

    The same as ``segment_sum(weights * data[gather_ids], segment_ids, num_segments)``, but neither this function nor
    its gradient writes or reads an array of edges times features. (Exception: on GPUs, without weights, that array is
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
        plan, neither this call nor its gradient sorts.
      implementation: "kernel" (an error if there is none) or "xla" (plain JAX). None: what the context
        :func:`jax_baracuda.implementation` selects, by default whichever was measured to be faster.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Segments without edges hold 0.

    Raises:
      TypeError: an argument is not an array or has an unsuitable dtype, or `num_segments` is missing.
      IndexError: ids are boolean.
      ValueError: shapes do not fit, there are no rows to gather from, or both a plan and ids are given.

    Numerical guarantees: terms are added in float32 (float64 for float64), and the sum is rounded once to the dtype.
    Bit-equal from run to run, except on GPUs (see `deterministic`).

    Gradient: ``d_data[n] = sum { weights[e] * d_out[segment_ids[e]] : gather_ids[e] == n }``, by the same kernel over
    the edges of each row, and ``d_weights[e] = sum(data[gather_ids[e]] * d_out[segment_ids[e]])`` over the features
    that a weight scales. No gradient of data goes through gather ids that are out of range. If ``jax.vmap`` maps ids or
    weights but not `data`, the gradient of `data` is one sum over the edges of the whole batch, and plans do not save
    its sort. Derivatives of any order exist. ``jax.jvp`` and ``jax.jacfwd`` of this function need its twin of the same
    name in :mod:`jax_baracuda.forward_mode`.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> senders, receivers = jnp.array([0, 1, 2, 1]), jnp.array([1, 1, 0, 0])
      >>> print(jb.gather_segment_sum(data, senders, receivers, num_segments=2))
      [[8. 8.]
       [4. 6.]]
    """
    name = "gather_segment_sum"
    data = as_rows(name, data)
    edges = canonicalize_edges(name, data, gather_ids, segment_ids, num_segments, mode, plan)
    params = edges.params(GatherParams, data, indices_are_sorted, deterministic)
    return reduce_edges(name, gathered_sum, params, data, weights, edges)


def reduce_edges(
    name: str, rules: BatchedVjp, params: GatherParams, data: Array, weights: ArrayLike | None, edges: Edges
) -> Array:
    """Applies a reduction to the gathered rows, with or without weights."""
    if weights is None:
        return rules(params, data=data, **edges.arrays())
    weights = as_array(name, "weights", weights)
    dims, num_edges = weights.shape[1:], edges.segment_ids.shape[0]
    if weights.ndim == 0 or weights.shape[0] != num_edges or data.shape[1 : weights.ndim] != dims:
        raise ValueError(
            f"{name}: weights must be [E] or [E, *dims], where dims are the first dimensions of a row of data; got "
            f"weights.shape = {weights.shape} for {num_edges} edges and data.shape = {data.shape}"
        )
    return reduce_weighted(rules, params, data, weights, edges)


def reduce_weighted(rules: BatchedVjp, params: GatherParams, data: Array, weights: Array, edges: Edges) -> Array:
    """Applies a reduction to the gathered rows times their weights ``[E, *dims]``."""
    num_edges, heads = weights.shape[0], math.prod(weights.shape[1:])
    weights, data = (with_whole_dims(x, range(1, weights.ndim)) for x in (weights, data))
    data = with_whole_dims(data, range(weights.ndim, data.ndim))
    features = math.prod(data.shape[weights.ndim :])
    output = rules(
        params,
        data=data.reshape(data.shape[0], heads, features),
        weights=weights.astype(data.dtype).reshape(num_edges, heads),
        **edges.arrays(),
    )
    return output.reshape(edges.num_segments, *data.shape[1:])


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX.


def _reference_dot(
    d_output: Array, data: Array, gather_ids: Array, segment_ids: Array, *edge_order: Array, is_wide: bool
) -> tuple[Array]:
    wide = accumulation_dtype(data.dtype)
    cells, is_member = gather_segments(d_output.astype(wide), segment_ids)
    cells = jnp.where(is_member, cells, 0)  # in derivatives, the zeros of dropped edges meet their cells
    products = jnp.where(is_member, cells * gather_rows(data, gather_ids, clips_gather_ids=True).astype(wide), 0)
    output = products.sum(axis=-1)
    if edge_order:
        output = jnp.zeros_like(output).at[edge_order[0]].set(output)
    return (output if is_wide else output.astype(data.dtype),)


# ----------------------------------------------------------------------------------------------------------------------
# The op of the gradient of weights.


def _operands_of_dot(*, has_edge_order: bool) -> NamedDimensions:
    operands: dict[str, tuple[str, ...]] = {
        "d_output": ("segment", "head", "feature"),
        "data": ("gathered", "head", "feature"),
        "gather_ids": ("edge",),
        "segment_ids": ("edge",),
    }
    return operands | {"edge_order": ("edge",)} if has_edge_order else operands


def _plan_parameters_of_dot(d_output: Any, data: Any, gather_ids: Any, segment_ids: Any, *_: Any) -> dict[str, int]:
    return {**plan_parameters(data, segment_ids, num_segments=d_output.shape[0]), "heads": data.shape[1]}


def _transpose_dot(
    avals: Sequence[Any],
    d_outputs: Sequence[Array],
    data: Array,
    gather_ids: Array,
    segment_ids: Array,
    *edge_order: Array,
    deterministic: bool,
) -> Sequence[Array]:
    """The transpose with respect to the cells: the weighted sum."""
    weights = d_outputs[0].astype(data.dtype)
    params = {"indices_are_sorted": False, "clips_gather_ids": True, "is_wide": False}
    flags = {"has_weights": True, "has_edge_order": bool(edge_order), "deterministic": deterministic}
    return GATHER_SEGMENT_SUM(
        data, gather_ids, segment_ids, weights, *edge_order, num_segments=avals[0].shape[0], **params, **flags
    )


GATHER_SEGMENT_DOT = Op(
    name="gather_segment_dot",
    operands=_operands_of_dot,
    results={"d_weights": ("edge", "head")},
    result_dtypes=lambda d_output, *_, is_wide: [accumulation_dtype(d_output.dtype) if is_wide else d_output.dtype],
    reference=_reference_dot,
    # H100, time of plain JAX / kernel: 0.5 (41 loops). Two cores: products of single features 0.2.
    xla_rules=(
        on_gpu("XLA fuses what makes the rows, too", unordered, fused),
        on_gpu("gathers from the L2 cache, fused into the sum over features", unordered, at_most(bytes=64 * MB)),
        on_cpu("a single feature leaves the kernel nothing to vectorise", at_most(features=1)),
    ),
    dtypes=FLOATING_DTYPES,
    guarantee=accumulated,
    attributes=("is_wide", "has_edge_order"),
    plan_parameters=_plan_parameters_of_dot,
    replicated_dims=replicated_dims,
    reduction_dims=("feature",),
    shard_program=functools.partial(sum_over_split_dim, "feature"),
    limit=lambda d_output, data, gather_ids, segment_ids, *_: limit_of_32_bits(segment_ids.shape[0], d_output.shape[0]),
    transpose=_transpose_dot,
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rule.


def sum_gathered(
    params: GatherParams,
    *,
    data: Array,
    gather_ids: Array,
    segment_ids: Array,
    weights: Array | None = None,
    edge_order: Array | None = None,
    is_wide: bool = False,
    **_: Array,
) -> Array:
    """The sums. `is_wide`: unrounded, in the accumulation dtype."""
    return sum_edges(
        data,
        gather_ids,
        segment_ids,
        weights,
        edge_order,
        num_segments=params.num_segments,
        indices_are_sorted=params.indices_are_sorted,
        deterministic=params.deterministic,
        is_wide=is_wide,
    )


def _forward(params: GatherParams, **arrays: Array) -> tuple[Array, dict[str, Array]]:
    return sum_gathered(params, **arrays), {}


def gradient_of_sum(
    params: GatherParams, num_joined: int, residuals: Mapping[str, Array], d_output: Array
) -> dict[str, Array]:
    """The cotangents of weighted sums; for `num_joined`, see :class:`BatchedVjp`."""
    edges = dict(residuals)
    data, weights, edge_order = (edges.pop(name, None) for name in ("data", "weights", "edge_order"))
    gather_ids, segment_ids = edges.pop("gather_ids"), edges.pop("segment_ids")
    has_plan = bool(edges)
    if has_plan:
        transposed = edges["transposed_gather_ids"], edges["transposed_segment_ids"]
    else:
        transposed = as_gather_ids(segment_ids, params.num_segments), gather_ids
    d_data = sum_edges(
        d_output,
        *transposed,
        weights,
        edges.get("transposed_order"),
        num_graph_dims=num_joined,
        num_segments=params.num_rows,
        indices_are_sorted=has_plan and num_joined == 0,  # plans of different batch elements cannot be merged
        deterministic=params.deterministic,
        clips_gather_ids=False,
    )
    if weights is None:
        return {"data": d_data}
    orders = () if edge_order is None else (edge_order,)

    def gradient_of_weights(*arrays: Array) -> Array:
        d_output, *edges = arrays
        flags = {"is_wide": False, "has_edge_order": bool(orders), "deterministic": params.deterministic}
        return GATHER_SEGMENT_DOT(d_output, data, *edges, **flags)[0]

    arrays = d_output, gather_ids, segment_ids, *orders
    return {"data": d_data, "weights": map_over_batch(gradient_of_weights, mapped_dims(arrays, num_joined), *arrays)}


def keeps_data(params: GatherParams, names: Sequence[str]) -> bool:
    """Whether the gradient needs `data`: only the gradient of weights does."""
    return "weights" in names


gathered_sum = BatchedVjp(
    "gather_segment_sum", sum_gathered, _forward, gradient_of_sum, shared="data", keeps_shared=keeps_data
)
