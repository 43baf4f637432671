"""Maximum and minimum of gathered rows over segments: message passing on graphs without an array of messages.

The forward kernel notes which edge wins each cell. The gradient adds up, for each row, the cotangents of the cells that
its edges won. Where tied edges share, the rows tell, too: what a row has in common with the extremum won it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype
from jax_baracuda._core.autodiff import with_twin
from jax_baracuda._core.batch import map_over_batch, mapped_dims
from jax_baracuda._core.batched_autodiff import BatchedVjp
from jax_baracuda._core.dispatch import (
    MB,
    at_most,
    mostly_empty_segments,
    on_cpu,
    on_gpu,
    uncontended,
    unordered,
    unsorted,
)
from jax_baracuda._core.guarantees import EXACT, accumulated
from jax_baracuda._core.op import NamedDimensions, Op
from jax_baracuda._core.selection import Implementation, current_selection, selectable
from jax_baracuda.ops.segment.arguments import Mode, TieBreak
from jax_baracuda.ops.segment.cells import equal_numbers, gather_segments, put_back, xla_sum
from jax_baracuda.ops.segment.definitions import limit_of_32_bits, plan_parameters, sum_guarantee
from jax_baracuda.ops.segment.edges import (
    GatherParams,
    as_gather_ids,
    as_rows,
    canonicalize_edges,
    gather_rows,
    limit_of_edges,
    replicated_dims,
    replicated_dims_of_cells,
)
from jax_baracuda.ops.segment.extrema import (
    MAXIMUM,
    MINIMUM,
    NO_WINNER,
    Extremum,
    extrema_over_shards,
    first_gets_all,
    of_winners,
    own_winners,
    reference_winner,
    shares_of_ties,
    winners_over_shards,
)
from jax_baracuda.ops.segment.graphs import (
    graph_axes,
    merged,
    numbered_through,
    op_of_graphs,
    sum_over_graphs,
    whole_batch,
)
from jax_baracuda.ops.segment.ids import check_numbered, index_dtype
from jax_baracuda.ops.segment.order import sorted_by_segment
from jax_baracuda.ops.segment.padding import features_to_add, with_features
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.shards import index_of_first_row, of_split_segments


@selectable
@with_twin
def gather_segment_max(
    data: ArrayLike,
    gather_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    tie_break: TieBreak = "split",
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Maximum of gathered rows over the edges of each segment: one layer of message passing.

    ``out[s, ...] = max { data[gather_ids[e], ...] : segment_ids[e] == s }``

    The same as ``segment_max(data[gather_ids], segment_ids, num_segments)``, but no array of edges times features is
    written or read, neither here nor by the gradient.

    Args:
      data: ``[N, ...]``, the rows (features of nodes), a floating dtype. float16, bfloat16, float32 and float64 have
        kernels.
      gather_ids: ``[E]``, any integer dtype, in any order: the row that each edge gathers (its sender). As in
        ``data[gather_ids]``, negative ids count from the end, and ids out of range name the nearest row.
      segment_ids: ``[E]``, any integer dtype, in any order: the segment of each edge (its receiver). Edges whose id is
        negative or at least `num_segments` are dropped.
      num_segments: number of segments S, static under ``jit``.
      indices_are_sorted: promises that `segment_ids` is non-decreasing, which saves a sort on GPUs. If the promise is
        false, the result may hold anything.
      mode: what happens to segment ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the edge
        is dropped. "clip": the id is clamped to ``[0, S - 1]``.
      tie_break: who gets the gradient where several edges attain the maximum. "split": all of them, in equal shares,
        as in JAX; the identity of an empty segment (-inf) takes part where the maximum equals it. "first": the
        lowest of these edges, all of it; `data` is then not kept for the backward pass.
      deterministic: on GPUs, the gradients of unsorted edges without a plan are added in an order that varies from run
        to run, where that was faster: where they are few, or their rows narrow. True: bit-equal from run to run, by a
        sort. Sorted edges and plans are bit-equal anyway. On CPUs everything is.
      plan: the edges as :func:`segment_plan` has sorted them, instead of `gather_ids`, `segment_ids` and
        `num_segments`. Neither this call nor its gradient sorts any more.
      implementation: "kernel", and an error where there is none; "xla" for plain JAX; None: what was faster where
        measured, or what the context :func:`jax_baracuda.implementation` says.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Segments without edges hold -inf.

    Raises:
      TypeError: an argument is no array or has an unsuitable dtype, or `num_segments` is missing.
      IndexError: ids are boolean.
      ValueError: shapes do not fit, there are no rows to gather from, an option is unknown, or both a plan and ids are
        given.

    Numerical guarantees: exact. NaN propagates; ``max(-0, +0)`` is ``+0`` in either order; subnormal numbers are
    numbers, not zeros. The gradient adds up in float32 (float64 for float64). Bit-equal from run to run, except for
    gradients on GPUs as said under `deterministic`.

    Gradient: ``d_data[n] = sum { d_out[segment_ids[e]] * share[e] : gather_ids[e] == n }``, where the share is
    ``1 / number of tied edges`` or 1 for the winner, and exactly 0 for every other edge. A segment that holds a NaN
    passes no gradient, nor do gather ids that are out of range. Where ``jax.vmap`` maps the ids and not `data`, the
    gradient is one sum over the edges of the whole batch, whose sort plans do not save. Derivatives of any order
    exist, for which winners and shares are constants; with ties to split, those beyond the first have an array of edges
    times features. ``jax.jvp`` and ``jax.jacfwd`` of this function need its twin of the same name in
    :mod:`jax_baracuda.forward_mode`.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> senders, receivers = jnp.array([0, 1, 2, 1]), jnp.array([1, 1, 0, 0])
      >>> print(jb.gather_segment_max(data, senders, receivers, num_segments=2))
      [[5. 6.]
       [3. 4.]]
    """
    name = "gather_segment_max"
    ids = gather_ids, segment_ids, num_segments
    return _reduce(name, _gather_segment_max, data, *ids, indices_are_sorted, mode, tie_break, deterministic, plan)


@selectable
@with_twin
def gather_segment_min(
    data: ArrayLike,
    gather_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    tie_break: TieBreak = "split",
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Minimum of gathered rows over the edges of each segment: one layer of message passing.

    ``out[s, ...] = min { data[gather_ids[e], ...] : segment_ids[e] == s }``

    The same as ``segment_min(data[gather_ids], segment_ids, num_segments)``, but no array of edges times features is
    written or read, neither here nor by the gradient.

    Args:
      data: ``[N, ...]``, the rows (features of nodes), a floating dtype. float16, bfloat16, float32 and float64 have
        kernels.
      gather_ids: ``[E]``, any integer dtype, in any order: the row that each edge gathers (its sender). As in
        ``data[gather_ids]``, negative ids count from the end, and ids out of range name the nearest row.
      segment_ids: ``[E]``, any integer dtype, in any order: the segment of each edge (its receiver). Edges whose id is
        negative or at least `num_segments` are dropped.
      num_segments: number of segments S, static under ``jit``.
      indices_are_sorted: promises that `segment_ids` is non-decreasing, which saves a sort on GPUs. If the promise is
        false, the result may hold anything.
      mode: what happens to segment ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the edge
        is dropped. "clip": the id is clamped to ``[0, S - 1]``.
      tie_break: who gets the gradient where several edges attain the minimum. "split": all of them, in equal shares,
        as in JAX; the identity of an empty segment (+inf) takes part where the minimum equals it. "first": the
        lowest of these edges, all of it; `data` is then not kept for the backward pass.
      deterministic: on GPUs, the gradients of unsorted edges without a plan are added in an order that varies from run
        to run, where that was faster: where they are few, or their rows narrow. True: bit-equal from run to run, by a
        sort. Sorted edges and plans are bit-equal anyway. On CPUs everything is.
      plan: the edges as :func:`segment_plan` has sorted them, instead of `gather_ids`, `segment_ids` and
        `num_segments`. Neither this call nor its gradient sorts any more.
      implementation: "kernel", and an error where there is none; "xla" for plain JAX; None: what was faster where
        measured, or what the context :func:`jax_baracuda.implementation` says.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Segments without edges hold +inf.

    Raises:
      TypeError: an argument is no array or has an unsuitable dtype, or `num_segments` is missing.
      IndexError: ids are boolean.
      ValueError: shapes do not fit, there are no rows to gather from, an option is unknown, or both a plan and ids are
        given.

    Numerical guarantees: exact. NaN propagates; ``min(-0, +0)`` is ``-0`` in either order; subnormal numbers are
    numbers, not zeros. The gradient adds up in float32 (float64 for float64). Bit-equal from run to run, except for
    gradients on GPUs as said under `deterministic`.

    Gradient: as that of :func:`gather_segment_max`. Derivatives of any order exist. ``jax.jvp`` and
    ``jax.jacfwd`` of this function need its twin of the same name in :mod:`jax_baracuda.forward_mode`.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> senders, receivers = jnp.array([0, 1, 2, 1]), jnp.array([1, 1, 0, 0])
      >>> print(jb.gather_segment_min(data, senders, receivers, num_segments=2))
      [[3. 2.]
       [1. 2.]]
    """
    name = "gather_segment_min"
    ids = gather_ids, segment_ids, num_segments
    return _reduce(name, _gather_segment_min, data, *ids, indices_are_sorted, mode, tie_break, deterministic, plan)


def _reduce(
    name: str,
    rules: BatchedVjp,
    data: ArrayLike,
    gather_ids: ArrayLike | None,
    segment_ids: ArrayLike | None,
    num_segments: int | None,
    indices_are_sorted: bool,
    mode: Mode,
    tie_break: TieBreak,
    deterministic: bool,
    plan: SegmentPlan | None,
) -> Array:
    first_wins = first_gets_all(name, tie_break)
    data = as_rows(name, data)
    edges = canonicalize_edges(name, data, gather_ids, segment_ids, num_segments, mode, plan)
    params = ExtremumParams(**edges.params(data, indices_are_sorted, deterministic), first_wins=first_wins)
    return rules(params, data=data, **edges.arrays())


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX.


def _reference(
    extremum: Extremum,
    data: Array,
    gather_ids: Array,
    segment_ids: Array,
    *,
    num_segments: int,
    first_wins: bool,
    **_: Any,
) -> tuple[Array]:
    rows = gather_rows(data, gather_ids, clips_gather_ids=True)
    return (extremum.of_segments(rows, segment_ids, num_segments),)


def _reference_with_winner(
    extremum: Extremum,
    data: Array,
    gather_ids: Array,
    segment_ids: Array,
    *edge_order: Array,
    num_segments: int,
    first_wins: bool,
    **_: Any,
) -> tuple[Array, Array]:
    rows = gather_rows(data, gather_ids, clips_gather_ids=True)
    output = extremum.of_segments(rows, segment_ids, num_segments)
    winner = reference_winner(extremum, rows, segment_ids, output, first_wins)
    if edge_order and winner.size > 0 and edge_order[0].size > 0:
        winner = jnp.where(winner >= 0, jnp.take(edge_order[0], winner, axis=0, mode="clip"), winner)
    return output, winner


def _attains(data: Array, gather_ids: Array, output: Array, segment_ids: Array) -> Array:
    """Whether the row that an edge gathers has the extremum of its segment."""
    rows = gather_rows(data, gather_ids, clips_gather_ids=True)
    return equal_numbers(rows, gather_segments(output, segment_ids)[0])


def _reference_backward(
    d_winner: Array,
    winner: Array,
    gather_ids: Array,
    segment_ids: Array,
    *others: Array,
    num_rows: int,
    has_plan: bool,
    shares_ties: bool,
    **_: Any,
) -> tuple[Array]:
    edge_order, transposed_order, _, transposed_rows = others[:4] if has_plan else (None, None, None, None)
    num_edges = segment_ids.shape[0]
    edges = jnp.arange(num_edges, dtype=index_dtype(num_edges)) if edge_order is None else edge_order
    rows = gather_ids
    if transposed_order is not None:  # with a plan, these tell which gather ids were out of range
        rows = jnp.zeros_like(gather_ids).at[transposed_order].set(transposed_rows)[edges]
    winners, is_member = gather_segments(winner, segment_ids)
    cotangents, _ = gather_segments(d_winner.astype(accumulation_dtype(d_winner.dtype)), segment_ids)
    wins = winners == edges.reshape(-1, *[1] * (winners.ndim - 1))
    if shares_ties:
        data, output = others[-2:]
        attains = _attains(data, gather_ids, output, segment_ids)
        wins |= (winners < NO_WINNER) & attains
    return (xla_sum(jnp.where(is_member & wins, cotangents, 0), rows, num_rows).astype(d_winner.dtype),)


def _reference_of_winners(
    d_data: Array,
    winner: Array,
    gather_ids: Array,
    segment_ids: Array,
    *data_and_output: Array,
    shares_ties: bool,
) -> tuple[Array]:
    num_rows, num_segments = d_data.shape[0], winner.shape[0]
    if 0 in winner.shape or 0 in d_data.shape or 0 in gather_ids.shape:
        return (jnp.zeros(winner.shape, d_data.dtype),)
    row = gather_ids.at[winner].get(mode="clip")
    is_won = (winner >= 0) & (row >= 0) & (row < num_rows)

    def sums_of_ties() -> Array:
        data, output = data_and_output
        of_edges = gather_rows(d_data, gather_ids, clips_gather_ids=False).astype(accumulation_dtype(d_data.dtype))
        attains = _attains(data, gather_ids, output, segment_ids)
        sums = xla_sum(jnp.where(attains, of_edges, 0), segment_ids, num_segments)
        return jnp.where(winner != NO_WINNER, sums, 0).astype(d_data.dtype)

    return (of_winners(d_data, winner, row, is_won, sums_of_ties if shares_ties else None),)


# ----------------------------------------------------------------------------------------------------------------------
# Programs of one shard, where the edges of a segment are split over devices.


def _edge_axes(axes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return axes.get("edge", ())


def _shard_reduce(
    extremum: Extremum,
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    *operands: Array,
    **_: Any,
) -> Sequence[Array]:
    [output] = kernel(*operands)
    edge_axes = _edge_axes(axes)
    return (extrema_over_shards(extremum, output, edge_axes, axes.get("segment", ())) if edge_axes else output,)


def _shard_with_winner(
    extremum: Extremum,
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    *operands: Array,
    first_wins: bool,
    **_: Any,
) -> Sequence[Array]:
    output, winner = kernel(*operands)
    edge_axes = _edge_axes(axes)
    if not edge_axes:
        return output, winner
    first_edge = index_of_first_row(operands[2], edge_axes)
    split_over = edge_axes, axes.get("segment", ())
    return winners_over_shards(extremum, output, winner, first_edge, *split_over, first_wins)


def _shard_backward(
    op: Callable[[], Op],
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    d_winner: Array,
    winner: Array,
    gather_ids: Array,
    segment_ids: Array,
    *data_and_output: Array,
    num_graph_dims: int = 0,
    **params: Any,
) -> Sequence[Array]:
    """Adds up the shards' sums, unrounded."""
    edge_axes = _edge_axes(axes)
    all_axes = (*graph_axes(axes, num_graph_dims), *edge_axes)
    if not all_axes:
        return kernel(d_winner, winner, gather_ids, segment_ids, *data_and_output)
    if edge_axes:
        num_edges = segment_ids.shape[-1]
        first_edge = index_of_first_row(segment_ids.reshape(-1, num_edges)[0], edge_axes)
        winner = own_winners(winner, first_edge, num_edges)
    wide = [x.astype(accumulation_dtype(d_winner.dtype)) for x in (d_winner, *data_and_output)]
    operands = _join(num_graph_dims, wide[0], winner, gather_ids, segment_ids, *wide[1:])
    [local] = op().kernel(*operands, **params)
    return (jax.lax.psum(local, all_axes).astype(d_winner.dtype),)


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel.

_ROWS, _EDGES, _CELLS = ("gathered", "..."), ("edge",), ("segment", "...")
_SHARED = ("data",)
"""The operands of a gradient that all graphs of a batch share."""


def _operands(*, has_edge_order: bool = False, **_: Any) -> NamedDimensions:
    operands = {"data": _ROWS, "gather_ids": _EDGES, "segment_ids": _EDGES}
    return operands | {"edge_order": _EDGES} if has_edge_order else operands


def _operands_of_backward(*, has_plan: bool, shares_ties: bool, **_: Any) -> NamedDimensions:
    operands = {"d_winner": _CELLS, "winner": _CELLS, "gather_ids": _EDGES, "segment_ids": _EDGES}
    if has_plan:
        names = ("edge_order", "transposed_order", "transposed_gather_ids", "transposed_segment_ids")
        operands |= dict.fromkeys(names, _EDGES)
    return operands | {"data": _ROWS, "output": _CELLS} if shares_ties else operands


def _plan_parameters(data: Any, gather_ids: Any, segment_ids: Any, *_: Any, **params: Any) -> dict[str, int]:
    return {**plan_parameters(data, segment_ids, **params), "gathered_rows": data.shape[0]}


def _plan_parameters_of_backward(
    d_winner: Any, winner: Any, gather_ids: Any, *_: Any, num_rows: int, has_plan: bool, **__: Any
) -> dict[str, int]:
    parameters = plan_parameters(d_winner, gather_ids, num_segments=num_rows, indices_are_sorted=has_plan)
    return {**parameters, "gathered_rows": d_winner.shape[0]}


def _join(
    num_graph_dims: int, d_winner: Array, winner: Array, gather_ids: Array, segment_ids: Array, *data_and_output: Array
) -> Sequence[Array]:
    """The operands of a gradient without a plan, of all graphs as one."""
    if num_graph_dims == 0:
        return d_winner, winner, gather_ids, segment_ids, *data_and_output
    of_graphs = [d_winner, winner, gather_ids, segment_ids, *data_and_output[1:]]
    d_winner, winner, gather_ids, segment_ids, *output = whole_batch(num_graph_dims, of_graphs)
    winner = jnp.where(winner < 0, winner, numbered_through(winner, segment_ids.shape[1]))
    segment_ids = numbered_through(segment_ids, winner.shape[1])
    arrays = map(merged, (d_winner, winner, gather_ids, segment_ids))
    return *arrays, *data_and_output[:1], *map(merged, output)


def _operands_of_winners(*, shares_ties: bool) -> NamedDimensions:
    operands = {"d_data": _ROWS, "winner": _CELLS, "gather_ids": _EDGES, "segment_ids": _EDGES}
    return operands | {"data": _ROWS, "output": _CELLS} if shares_ties else operands


def _ops(name: str, extremum: Extremum) -> tuple[Op, Op, Op, Op]:
    """The ops ``gather_segment_<name>``, ``..._with_winner``, ``..._backward``, and the last one's sum over graphs."""

    # Winners are constant almost everywhere: the tangent of the extremum, and the transpose of the gradient, are linear
    # functions of what the winners gather.

    def cells_of_winners(d_data: Array, winner: Array, ids: Sequence[Array], data_and_output: Sequence[Array]) -> Array:
        """For each cell, what its winner gathers, or the sum over the edges that tie."""
        constants = [winner, *ids, *map(jax.lax.stop_gradient, data_and_output)]
        return winners(d_data, *constants, shares_ties=bool(data_and_output))[0]

    def tangent_with_winner(
        d_data: Array,
        operands: Sequence[Array],
        results: Sequence[Array],
        *,
        num_segments: int,
        first_wins: bool,
        **_: Any,
    ) -> Sequence[Array]:
        data, gather_ids, segment_ids, *order = operands
        output, winner = results
        ids = _in_own_order([gather_ids, as_gather_ids(segment_ids, num_segments)], *order)
        total = cells_of_winners(d_data, winner, ids, [] if first_wins else [data, output])
        return shares_of_ties(total, winner), winner

    def tangent(d_data: Array, operands: Sequence[Array], _: Any, **params: Any) -> Sequence[Array]:
        """Of the extrema alone, which do not tell what won."""
        params["has_edge_order"] = False
        return tangent_with_winner(d_data, operands, with_winner(*operands, **params), **params)[:1]

    def transpose_backward(
        _: Any, d_results: Sequence[Array], winner: Array, *others: Array, has_plan: bool, **__: Any
    ) -> Sequence[Array]:
        ids, order, data_and_output = others[:2], others[2:3], others[6:]
        if not has_plan:
            order, data_and_output = (), others[2:]
        return [cells_of_winners(d_results[0], winner, _in_own_order(ids, *order), data_and_output)]

    def transpose_winners(
        avals: Sequence[Any], d_results: Sequence[Array], *others: Array, shares_ties: bool
    ) -> Sequence[Array]:
        flags = {"has_plan": False, "shares_ties": shares_ties, "deterministic": current_selection() != "xla"}
        return backward(d_results[0], *others, num_rows=avals[0].shape[0], **flags)

    # On GPUs the edges are brought into order first, and odd rows made longer.

    def with_longer_rows(
        kernel: Callable[..., Sequence[Array]], data: Any, num_edges: int, num_segments: int, rows: Sequence[int] = (0,)
    ) -> Callable[..., Sequence[Array]] | None:
        added = features_to_add(data, num_edges, num_segments)
        return with_features(kernel, added, rows=rows) if added else None

    def reduction_on_gpu(
        data: Any, gather_ids: Any, segment_ids: Any, *, indices_are_sorted: bool, num_segments: int, **params: Any
    ) -> Callable[..., Sequence[Array]] | None:
        kernel = functools.partial(reduction.kernel, num_segments=num_segments, indices_are_sorted=True, **params)

        def program(data: Array, gather_ids: Array, segment_ids: Array) -> Sequence[Array]:
            order, sorted_ids = sorted_by_segment(segment_ids, num_segments)
            return kernel(data, gather_ids[order], sorted_ids)

        if not indices_are_sorted:
            return program
        return with_longer_rows(kernel, data, gather_ids.shape[0], num_segments)

    def with_winner_on_gpu(
        data: Any,
        gather_ids: Any,
        *_: Any,
        indices_are_sorted: bool,
        has_edge_order: bool,
        num_segments: int,
        **params: Any,
    ) -> Callable[..., Sequence[Array]] | None:
        kernel = functools.partial(with_winner.kernel, num_segments=num_segments, indices_are_sorted=True, **params)

        def program(data: Array, gather_ids: Array, segment_ids: Array, *numbers: Array) -> Sequence[Array]:
            order, sorted_ids = sorted_by_segment(segment_ids, num_segments)
            edges = gather_ids[order], sorted_ids, numbers[0][order] if has_edge_order else order
            return kernel(data, *edges, has_edge_order=True)

        if not indices_are_sorted:
            return program
        kernel_of_sorted = functools.partial(kernel, has_edge_order=has_edge_order)
        return with_longer_rows(kernel_of_sorted, data, gather_ids.shape[0], num_segments)

    def backward_on_gpu(
        d_winner: Any, winner: Any, gather_ids: Any, *_: Any, has_plan: bool, num_rows: int, **params: Any
    ) -> Callable[..., Sequence[Array]] | None:
        kernel = functools.partial(backward.kernel, num_rows=num_rows, has_plan=True, **params)

        def program(
            d_winner: Array, winner: Array, gather_ids: Array, segment_ids: Array, *data_and_output: Array
        ) -> Sequence[Array]:
            order, sorted_rows = sorted_by_segment(gather_ids, num_rows)
            numbers = jnp.arange(order.shape[0], dtype=jnp.int32)
            edges = gather_ids, segment_ids, numbers, order, segment_ids[order], sorted_rows
            return kernel(d_winner, winner, *edges, *data_and_output)

        if not has_plan:
            return program
        names = list(_operands_of_backward(has_plan=True, shares_ties=True))
        rows = [names.index(name) for name in ("d_winner", "winner", "data", "output")]
        return with_longer_rows(kernel, d_winner, gather_ids.shape[0], num_rows, rows)

    # H100, time of plain JAX / kernel: 0.4, gradients up to 64 MB 0.5 (48 and 24 loops). Two cores: gradients of single
    # features 0.33.
    rules = (
        on_gpu("launch-bound: XLA sorts no edges", unsorted, uncontended, at_most(rows=1 << 14)),
        on_gpu("XLA sorts no edges, and narrow rows leave lanes idle", unsorted, uncontended, at_most(features=2)),
        on_gpu("XLA sorts no edges of mostly empty segments", unsorted, mostly_empty_segments, at_most(rows=1 << 16)),
    )
    rules_of_backward = (
        on_gpu("XLA sorts no edges", unordered, at_most(bytes=64 * MB)),
        on_cpu("a single feature leaves the kernel nothing to vectorise", at_most(features=1)),
    )
    of_edges: dict[str, Any] = {
        "operands": _operands,
        "sizes": lambda *, num_segments, **_: {"segment": num_segments},
        "dtypes": FLOATING_DTYPES,
        "guarantee": EXACT,
        "plan_parameters": _plan_parameters,
        "reduction_dims": ("edge",),
        "limit": limit_of_edges,
    }
    extrema, extrema_and_winners = {"output": _CELLS}, {"output": _CELLS, "winner": _CELLS}
    of_split_edges = functools.partial(of_split_segments, row_dims=("edge",), ids_operand=2)
    reduction = Op(
        name=f"gather_segment_{name}",
        results=extrema,
        reference=functools.partial(_reference, extremum),
        xla_rules=rules,
        program_on_gpu=reduction_on_gpu,
        attributes=("indices_are_sorted",),
        replicated_dims=("gathered",),
        shard_program=of_split_edges(functools.partial(_shard_reduce, extremum), results=extrema),
        tangent=tangent,
        **of_edges,
    )
    with_winner = Op(
        name=f"gather_segment_{name}_with_winner",
        results=extrema_and_winners,
        result_dtypes=lambda data, gather_ids, *_, **__: [data.dtype, index_dtype(gather_ids.shape[0])],
        reference=functools.partial(_reference_with_winner, extremum),
        xla_rules=rules,
        program_on_gpu=with_winner_on_gpu,
        attributes=("indices_are_sorted", "first_wins", "has_edge_order"),
        replicated_dims=replicated_dims_of_cells,
        shard_program=of_split_edges(functools.partial(_shard_with_winner, extremum), results=extrema_and_winners),
        tangent=tangent_with_winner,
        **of_edges,
    )
    backward = Op(
        name=f"gather_segment_{name}_backward",
        operands=_operands_of_backward,
        results={"d_data": _ROWS},
        sizes=lambda *, num_rows, **_: {"gathered": num_rows},
        reference=_reference_backward,
        xla_rules=rules_of_backward,
        program_on_gpu=backward_on_gpu,
        dtypes=FLOATING_DTYPES,
        guarantee=sum_guarantee,
        attributes=("has_plan", "shares_ties"),
        plan_parameters=_plan_parameters_of_backward,
        replicated_dims=lambda *, has_plan, **_: replicated_dims(has_edge_order=has_plan),
        reduction_dims=("edge",),
        shard_program=functools.partial(_shard_backward, lambda: backward),
        transpose=transpose_backward,
        limit=lambda d_winner, winner, gather_ids, *_, num_rows, **__: limit_of_32_bits(gather_ids.shape[0], num_rows),
    )
    winners = Op(
        name=f"gather_segment_{name}_of_winners",
        operands=_operands_of_winners,
        results={"cells": _CELLS},
        reference=_reference_of_winners,
        program=_reference_of_winners,  # plain JAX, too, on each device: XLA adds up rows as it gathers them
        dtypes=FLOATING_DTYPES,
        guarantee=accumulated,
        replicated_dims=("gathered", "segment", "edge"),
        transpose=transpose_winners,
    )
    of_graphs = op_of_graphs(
        backward,
        _join,
        shared=_SHARED,
        replicated_dims=backward.replicated_dims,
        shard_program=functools.partial(_shard_backward, lambda: backward),
    )
    return reduction, with_winner, backward, of_graphs


_OPS_OF_MAX, _OPS_OF_MIN = _ops("max", MAXIMUM), _ops("min", MINIMUM)
GATHER_SEGMENT_MAX, GATHER_SEGMENT_MAX_WITH_WINNER = _OPS_OF_MAX[:2]
GATHER_SEGMENT_MIN, GATHER_SEGMENT_MIN_WITH_WINNER = _OPS_OF_MIN[:2]


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


@dataclasses.dataclass(frozen=True)
class ExtremumParams(GatherParams):
    first_wins: bool


def _rules(reduction: Op, with_winner: Op, backward: Op, backward_of_graphs: Op) -> BatchedVjp:
    def primal(params: ExtremumParams, *, data: Array, gather_ids: Array, segment_ids: Array, **_: Array) -> Array:
        return reduction(
            data,
            gather_ids,
            segment_ids,
            num_segments=params.num_segments,
            indices_are_sorted=params.indices_are_sorted,
            first_wins=params.first_wins,
        )[0]

    def forward(params: ExtremumParams, **arrays: Array) -> tuple[Array, dict[str, Array]]:
        check_numbered(reduction.name, "edges", arrays["segment_ids"].shape[0])
        order = [arrays["edge_order"]] if "edge_order" in arrays else []
        output, winner = with_winner(
            *(arrays[name] for name in ("data", "gather_ids", "segment_ids")),
            *order,
            num_segments=params.num_segments,
            indices_are_sorted=params.indices_are_sorted,
            first_wins=params.first_wins,
            has_edge_order=bool(order),
        )
        return output, {"winner": winner} if params.first_wins else {"winner": winner, "output": output}

    def gradient(
        params: ExtremumParams, num_joined: int, residuals: Mapping[str, Array], d_output: Array
    ) -> dict[str, Array]:
        has_plan = "edge_order" in residuals
        operands = dict(residuals)
        if has_plan and num_joined > 0:
            names = ("edge_order", "gather_ids", "segment_ids")  # the orders of several plans make none together
            arrays = [operands[name] for name in names]
            ids = map_over_batch(
                lambda order, *ids: _in_own_order(ids, order), mapped_dims(arrays, num_joined), *arrays
            )
            operands |= dict(zip(names[1:], ids, strict=True))
            has_plan = False
        if not has_plan:
            operands["segment_ids"] = as_gather_ids(operands["segment_ids"], params.num_segments)
        operands["d_winner"] = d_output if params.first_wins else shares_of_ties(d_output, residuals["winner"])
        flags = {
            "has_plan": has_plan,
            "shares_ties": not params.first_wins,
            "deterministic": params.deterministic,
        }
        # Which edges win is constant almost everywhere, and the gradient linear in what is left.
        operands |= {name: jax.lax.stop_gradient(operands[name]) for name in ("data", "output") if name in operands}
        operands = {name: operands[name] for name in _operands_of_backward(**flags)}
        d_data = sum_over_graphs(
            backward, backward_of_graphs, num_joined, operands, shared=_SHARED, num_rows=params.num_rows, **flags
        )
        return {"data": d_data}

    return BatchedVjp(
        reduction.name,
        primal,
        forward,
        gradient,
        shared="data",
        keeps_shared=lambda params, _: not params.first_wins,
    )


def _in_own_order(ids: Sequence[Array], order: Array | None = None) -> Sequence[Array]:
    """The ids of edges that a plan has sorted, in the order that winners are numbered in."""
    return ids if order is None else tuple(put_back(x, order) for x in ids)


_gather_segment_max, _gather_segment_min = _rules(*_OPS_OF_MAX), _rules(*_OPS_OF_MIN)
