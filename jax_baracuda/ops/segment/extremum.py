"""Maximum and minimum of segments.

The forward kernel notes its *winner* on the way (which row attains the maximum, or how many rows share it), so the
backward kernel looks at the data again only where rows tie.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype
from jax_baracuda._core.autodiff import KernelVjp, with_twin
from jax_baracuda._core.dispatch import MB, at_most, on_gpu, uncontended
from jax_baracuda._core.guarantees import EXACT, accumulated
from jax_baracuda._core.op import Op
from jax_baracuda._core.selection import Implementation, selectable
from jax_baracuda.ops.segment.arguments import (
    Mode,
    OutSharding,
    SegmentCall,
    TieBreak,
    canonicalize,
    canonicalize_backward,
)
from jax_baracuda.ops.segment.cells import equal_numbers
from jax_baracuda.ops.segment.definitions import (
    CELLS,
    IDS,
    ORDERED_DTYPES,
    ROUNDED_ONCE,
    ROWS,
    Params,
    gradient_op,
    plan_parameters,
    reduction_op,
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
    reference_gradient,
    reference_winner,
    shares_of_ties,
    winners_over_shards,
)
from jax_baracuda.ops.segment.gather_extremum import (
    GATHER_SEGMENT_MAX,
    GATHER_SEGMENT_MAX_WITH_WINNER,
    GATHER_SEGMENT_MIN,
    GATHER_SEGMENT_MIN_WITH_WINNER,
)
from jax_baracuda.ops.segment.ids import check_numbered, index_dtype
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.shards import index_of_first_row, row_axes_of
from jax_baracuda.ops.segment.sum import SEGMENT_SUM, SEGMENT_SUM_BACKWARD


@selectable
@with_twin
def segment_max(
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    *,
    tie_break: TieBreak = "split",
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Maximum of the rows of each segment: ``out[s, ...] = max { data[n, ...] : segment_ids[n] == s }``.

    A drop-in replacement of :func:`jax.ops.segment_max`.

    Args:
      data: ``[N, ...]``, any dtype of JAX with an order. bool, integers of 8 to 64 bits, float16, bfloat16, float32 and
        float64 have kernels; other dtypes run as plain JAX. More generally, any shape that broadcasts to
        ``segment_ids.shape + data.shape[1:]``.
      segment_ids: ``[N]``, any integer dtype, in any order. Rows whose id is negative or at least `num_segments` are
        dropped. Of rank 0, 2 or more: as in ``jax.ops``, every id labels one ``data.shape[1:]``.
      num_segments: number of segments S, static under ``jit``. Default: ``max(segment_ids) + 1``.
      indices_are_sorted: promises that `segment_ids` is non-decreasing, which is faster on GPUs. If the promise is
        false, the result may hold anything.
      unique_indices: accepted for compatibility; nothing depends on it.
      bucket_size: as in :func:`jax.ops.segment_max`, rows are reduced in buckets of this size, and then the buckets.
        The maximum is the same; under ``tie_break="split"`` tied buckets share the gradient equally first.
      mode: what happens to ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the row is
        dropped. "clip": the id is clamped to ``[0, S - 1]``.
      out_sharding: sharding of the result, for meshes with explicit axes.
      tie_break: who gets the gradient where several rows attain the maximum. "split": all of them, in equal shares,
        as in JAX; the identity of an empty segment (-inf) takes part where the maximum equals it. "first": the
        lowest of these rows, all of it; `data` is then not kept for the backward pass.
      plan: the rows as :func:`segment_plan` has sorted them, instead of `segment_ids`, `num_segments` and `mode`.
        Neither this call nor its gradient sorts any more, and both have the same bits in every run.
      implementation: "kernel", and an error where there is none; "xla" for plain JAX; None: what was faster where
        measured, or what the context :func:`jax_baracuda.implementation` says.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Empty segments hold -inf, the least integer of the dtype, or False.

    Raises:
      TypeError: an argument is no array or has an unsuitable dtype.
      IndexError: `segment_ids` is boolean.
      ValueError: shapes do not fit, `num_segments` is negative, an option is unknown, or `num_segments` is None and
        there are no ids.
      jax.errors.ConcretizationTypeError: `num_segments` is None and `segment_ids` is traced.

    Numerical guarantees: exact. NaN propagates; ``max(-0, +0)`` is ``+0`` in either order; subnormal numbers are
    numbers, not zeros. Bit-equal from run to run and independent of scheduling.

    Gradient: ``d_data[n] = d_out[segment_ids[n]] * share``, where the share is ``1 / number of tied rows`` (the count
    is an exact integer) or 1 for the winner, and exactly 0 for every other row, whatever the cotangent. A segment that
    holds a NaN passes no gradient.
    Derivatives of any order exist. ``jax.jvp`` and ``jax.jacfwd`` of this function need its twin of the same name in
    :mod:`jax_baracuda.forward_mode`.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> segment_ids = jnp.array([0, 0, 2])
      >>> print(jb.segment_max(data, segment_ids, num_segments=3))
      [[  3.   4.]
       [-inf -inf]
       [  5.   6.]]
    """
    name = "segment_max"
    options = {"bucket_size": bucket_size, "plan": plan}
    call = canonicalize(name, data, segment_ids, num_segments, indices_are_sorted, mode, out_sharding, **options)
    return _reduce(name, call, _segment_max, MAXIMUM, tie_break)


@selectable
@with_twin
def segment_min(
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    *,
    tie_break: TieBreak = "split",
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Minimum of the rows of each segment: ``out[s, ...] = min { data[n, ...] : segment_ids[n] == s }``.

    A drop-in replacement of :func:`jax.ops.segment_min`.

    Args:
      data: ``[N, ...]``, any dtype of JAX with an order. bool, integers of 8 to 64 bits, float16, bfloat16, float32 and
        float64 have kernels; other dtypes run as plain JAX. More generally, any shape that broadcasts to
        ``segment_ids.shape + data.shape[1:]``.
      segment_ids: ``[N]``, any integer dtype, in any order. Rows whose id is negative or at least `num_segments` are
        dropped. Of rank 0, 2 or more: as in ``jax.ops``, every id labels one ``data.shape[1:]``.
      num_segments: number of segments S, static under ``jit``. Default: ``max(segment_ids) + 1``.
      indices_are_sorted: promises that `segment_ids` is non-decreasing, which is faster on GPUs. If the promise is
        false, the result may hold anything.
      unique_indices: accepted for compatibility; nothing depends on it.
      bucket_size: as in :func:`jax.ops.segment_min`, rows are reduced in buckets of this size, and then the buckets.
        The minimum is the same; under ``tie_break="split"`` tied buckets share the gradient equally first.
      mode: what happens to ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the row is
        dropped. "clip": the id is clamped to ``[0, S - 1]``.
      out_sharding: sharding of the result, for meshes with explicit axes.
      tie_break: who gets the gradient where several rows attain the minimum. "split": all of them, in equal shares,
        as in JAX; the identity of an empty segment (+inf) takes part where the minimum equals it. "first": the
        lowest of these rows, all of it; `data` is then not kept for the backward pass.
      plan: the rows as :func:`segment_plan` has sorted them, instead of `segment_ids`, `num_segments` and `mode`.
        Neither this call nor its gradient sorts any more, and both have the same bits in every run.
      implementation: "kernel", and an error where there is none; "xla" for plain JAX; None: what was faster where
        measured, or what the context :func:`jax_baracuda.implementation` says.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Empty segments hold +inf, the greatest integer of the dtype, or True.

    Raises:
      TypeError: an argument is no array or has an unsuitable dtype.
      IndexError: `segment_ids` is boolean.
      ValueError: shapes do not fit, `num_segments` is negative, an option is unknown, or `num_segments` is None and
        there are no ids.
      jax.errors.ConcretizationTypeError: `num_segments` is None and `segment_ids` is traced.

    Numerical guarantees: exact. NaN propagates; ``min(-0, +0)`` is ``-0`` in either order; subnormal numbers are
    numbers, not zeros. Bit-equal from run to run and independent of scheduling.

    Gradient: ``d_data[n] = d_out[segment_ids[n]] * share``, where the share is ``1 / number of tied rows`` (the count
    is an exact integer) or 1 for the winner, and exactly 0 for every other row, whatever the cotangent. A segment that
    holds a NaN passes no gradient.
    Derivatives of any order exist. ``jax.jvp`` and ``jax.jacfwd`` of this function need its twin of the same name in
    :mod:`jax_baracuda.forward_mode`.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> segment_ids = jnp.array([0, 0, 2])
      >>> print(jb.segment_min(data, segment_ids, num_segments=3))
      [[ 1.  2.]
       [inf inf]
       [ 5.  6.]]
    """
    name = "segment_min"
    options = {"bucket_size": bucket_size, "plan": plan}
    call = canonicalize(name, data, segment_ids, num_segments, indices_are_sorted, mode, out_sharding, **options)
    return _reduce(name, call, _segment_min, MINIMUM, tie_break)


@selectable
def segment_max_backward(
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    tie_break: TieBreak = "split",
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Gradient of :func:`segment_max`: ``d_data[n, ...] = d_output[segment_ids[n], ...] * share[n, ...]``.

    Args:
      d_output: ``[S, ...]``, the cotangent of the segment maxima; a floating dtype, the same as `data`.
      data: ``[N, ...]``, the rows that were reduced.
      segment_ids: ``[N]``, any integer dtype, in any order. Rows whose id is negative or at least the number of
        segments are dropped. Of rank 0, 2 or more: as in ``jax.ops``, every id labels one ``data.shape[1:]``.
      indices_are_sorted: promises that `segment_ids` is non-decreasing, which is faster on GPUs. If the promise is
        false, the result may hold anything.
      mode: what happens to ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the row is
        dropped. "clip": the id is clamped to ``[0, S - 1]``.
      tie_break: as in :func:`segment_max`: "split" gives every row that attains its segment's maximum an equal share,
        "first" gives the lowest such row all of it.
      plan: the rows as :func:`segment_plan` has sorted them, instead of `segment_ids` and `mode`.
      implementation: "kernel", and an error where there is none; "xla" for plain JAX; None: what was faster where
        measured, or what the context :func:`jax_baracuda.implementation` says.

    Returns:
      ``[N, ...]``, the cotangent of `data`. Rows that do not attain the maximum, that are dropped, or whose segment
      holds a NaN get an exact 0.

    Raises:
      TypeError, IndexError, ValueError: an argument does not fit, as in :func:`segment_max`.

    Numerical guarantees: each element is ``d_output`` divided by the exact integer number of ties, rounded once.
    Bit-equal from run to run.

    Gradient: linear in `d_output`, whose cotangent is the share-weighted sum over each segment's rows; zero with
    respect to `data`. Derivatives of any order and in either mode exist.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data, segment_ids = jnp.array([3.0, 3.0, 1.0, 5.0]), jnp.array([0, 0, 0, 1])
      >>> print(jb.segment_max_backward(jnp.array([10.0, 20.0]), data, segment_ids))
      [ 5.  5.  0. 20.]
      >>> print(jb.segment_max_backward(jnp.array([10.0, 20.0]), data, segment_ids, tie_break="first"))
      [10.  0.  0. 20.]
    """
    return _backward(
        "segment_max_backward", _segment_max, d_output, data, segment_ids, indices_are_sorted, mode, tie_break, plan
    )


@selectable
def segment_min_backward(
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    tie_break: TieBreak = "split",
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Gradient of :func:`segment_min`: ``d_data[n, ...] = d_output[segment_ids[n], ...] * share[n, ...]``.

    Args:
      d_output: ``[S, ...]``, the cotangent of the segment minima; a floating dtype, the same as `data`.
      data: ``[N, ...]``, the rows that were reduced.
      segment_ids: ``[N]``, any integer dtype, in any order. Rows whose id is negative or at least the number of
        segments are dropped. Of rank 0, 2 or more: as in ``jax.ops``, every id labels one ``data.shape[1:]``.
      indices_are_sorted: promises that `segment_ids` is non-decreasing, which is faster on GPUs. If the promise is
        false, the result may hold anything.
      mode: what happens to ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the row is
        dropped. "clip": the id is clamped to ``[0, S - 1]``.
      tie_break: as in :func:`segment_min`: "split" gives every row that attains its segment's minimum an equal share,
        "first" gives the lowest such row all of it.
      plan: the rows as :func:`segment_plan` has sorted them, instead of `segment_ids` and `mode`.
      implementation: "kernel", and an error where there is none; "xla" for plain JAX; None: what was faster where
        measured, or what the context :func:`jax_baracuda.implementation` says.

    Returns:
      ``[N, ...]``, the cotangent of `data`. Rows that do not attain the minimum, that are dropped, or whose segment
      holds a NaN get an exact 0.

    Raises:
      TypeError, IndexError, ValueError: an argument does not fit, as in :func:`segment_min`.

    Numerical guarantees and gradient: as in :func:`segment_max_backward`.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data, segment_ids = jnp.array([3.0, 1.0, 1.0, 5.0]), jnp.array([0, 0, 0, 1])
      >>> print(jb.segment_min_backward(jnp.array([10.0, 20.0]), data, segment_ids))
      [ 0.  5.  5. 20.]
    """
    return _backward(
        "segment_min_backward", _segment_min, d_output, data, segment_ids, indices_are_sorted, mode, tie_break, plan
    )


@selectable
def unsorted_segment_max_backward(
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike,
    *,
    implementation: Implementation | None = None,
) -> Array:
    """Gradient of :func:`segment_max` for ids in any order, the first occurrence of each maximum taking it all.

    ``d_data[n, ...] = d_output[s, ...]`` if n is the lowest row of segment ``s = segment_ids[n]`` that attains the
    maximum, else 0. The same as ``segment_max_backward(d_output, data, segment_ids, tie_break="first")``.

    Args:
      d_output: ``[S, ...]``, the cotangent of the segment maxima; a floating dtype, the same as `data`.
      data: ``[N, ...]``, the rows that were reduced.
      segment_ids: ``[N]``, any integer dtype, in any order; rows with an id outside ``[0, S)`` get 0.
      implementation: "kernel", and an error where there is none; "xla" for plain JAX; None: what was faster where
        measured, or what the context :func:`jax_baracuda.implementation` says.

    Returns:
      ``[N, ...]``, the cotangent of `data`.

    Raises:
      TypeError, IndexError, ValueError: an argument does not fit, as in :func:`segment_max`.

    Numerical guarantees: exact, deterministic, O(N * D) work in total for D features per row.

    Gradient: as in :func:`segment_max_backward`.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data, segment_ids = jnp.array([3.0, 5.0, 3.0, 1.0]), jnp.array([0, 1, 0, 0])
      >>> print(jb.unsorted_segment_max_backward(jnp.array([10.0, 20.0]), data, segment_ids))
      [10. 20.  0.  0.]
    """
    return segment_max_backward(d_output, data, segment_ids, tie_break="first")


def _reduce(name: str, call: SegmentCall, rules: KernelVjp, extremum: Extremum, tie_break: TieBreak) -> Array:
    if call.bucket_size is not None and call.segment_ids.shape[0] == 0:
        raise ValueError(f"{name}: bucket_size needs segment_ids of shape [N] with N > 0, got shape (0,)")
    call = call.in_order(unless=FLOATING_DTYPES)
    params = call.params(ExtremumParams, first_wins=first_gets_all(name, tie_break))
    # Buckets make no difference where the first of tied rows gets the gradient.
    over_buckets = None if params.first_wins else lambda cells, axis: _over_buckets(extremum, cells)
    return call.reduce(rules, params, over_buckets)


def _backward(
    name: str,
    rules: KernelVjp,
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike | None,
    indices_are_sorted: bool,
    mode: Mode,
    tie_break: TieBreak,
    plan: SegmentPlan | None,
) -> Array:
    d_output, call = canonicalize_backward(name, d_output, data, segment_ids, indices_are_sorted, mode, plan)
    # Nothing here depends on `data` smoothly; stopping its gradient spares JAX from finding that out.
    call = call.with_data(jax.lax.stop_gradient(call.data))
    return call.gradient(rules, call.params(ExtremumParams, first_wins=first_gets_all(name, tie_break)), d_output)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _over_buckets(extremum: Extremum, cells: Array) -> Array:
    """The extremum of buckets, of which those that tie share the gradient. It passes none where there is a NaN."""
    return extremum.of_stacked(cells)


@_over_buckets.defjvp
def _over_buckets_jvp(extremum: Extremum, primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    [cells], [d_cells] = primals, tangents
    output = extremum.of_stacked(cells)
    attains = equal_numbers(cells, output[None])
    total = jnp.where(attains, d_cells, 0).sum(0)
    return output, total / jnp.maximum(attains.sum(0), 1).astype(total.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX.


def _reference_reduce(extremum: Extremum, data: Array, ids: Array, *, num_segments: int, **_: Any) -> tuple[Array]:
    return (extremum.of_segments(data, ids, num_segments),)


def _reference_with_winner(
    extremum: Extremum,
    data: Array,
    ids: Array,
    *,
    num_segments: int,
    first_wins: bool,
    with_order: bool,
    **_: Any,
) -> tuple[Array, Array, Array]:
    output = extremum.of_segments(data, ids, num_segments)
    order = jnp.arange(ids.shape[0] if with_order else 1, dtype=index_dtype(ids.shape[0]))
    return output, reference_winner(extremum, data, ids, output, first_wins), order


def _reference_backward(
    d_output: Array, winner: Array, ids: Array, order: Array, *data_and_output: Array, **_: Any
) -> tuple[Array]:
    return (reference_gradient(d_output, winner, ids, *data_and_output),)


def _of_winners(
    take_cells: Callable[..., Sequence[Array]],
    sum_rows: Callable[..., Sequence[Array]],
    d_data: Array,
    winner: Array,
    ids: Array,
    *data_and_output: Array,
    indices_are_sorted: bool,
) -> tuple[Array]:
    """For each cell, what its winner has of `d_data`, or the mean over the members that tie."""
    if 0 in winner.shape or 0 in d_data.shape:
        return (jnp.zeros(winner.shape, d_data.dtype),)

    def means_of_ties() -> Array:
        data, output = data_and_output
        [extrema] = take_cells(output, ids)
        wide = d_data.astype(accumulation_dtype(d_data.dtype))
        flags = {"indices_are_sorted": indices_are_sorted, "deterministic": True}
        [sums] = sum_rows(jnp.where(equal_numbers(data, extrema), wide, 0), ids, num_segments=winner.shape[0], **flags)
        return jnp.where(winner != NO_WINNER, shares_of_ties(sums, winner), 0).astype(d_data.dtype)

    return (of_winners(d_data, winner, winner, winner >= 0, means_of_ties if data_and_output else None),)


# ----------------------------------------------------------------------------------------------------------------------
# Programs of one shard, where the rows of a segment are split over devices. Only results of cells are exchanged.


def _shard_reduce(
    extremum: Extremum,
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    data: Array,
    ids: Array,
    **params: Any,
) -> tuple[Array]:
    [output] = kernel(data, ids)
    row_axes = row_axes_of(axes)
    return (extrema_over_shards(extremum, output, row_axes, axes.get("segment", ())) if row_axes else output,)


def _shard_with_winner(
    extremum: Extremum,
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    data: Array,
    ids: Array,
    *,
    first_wins: bool,
    with_order: bool,
    **params: Any,
) -> Sequence[Array]:
    local_output, local_winner, order = kernel(data, ids)
    row_axes = row_axes_of(axes)
    if not row_axes:
        return local_output, local_winner, order
    first_row = index_of_first_row(ids, row_axes)
    split_over = row_axes, axes.get("segment", ())
    output, winner = winners_over_shards(extremum, local_output, local_winner, first_row, *split_over, first_wins)
    return output, winner, order + first_row if with_order else order


def _shard_backward(
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    d_output: Array,
    winner: Array,
    ids: Array,
    order: Array,
    *data_and_output: Array,
    **_: Any,
) -> Sequence[Array]:
    if row_axes := row_axes_of(axes):
        num_rows, first_row = ids.shape[0], index_of_first_row(ids, row_axes)
        winner = own_winners(winner, first_row, num_rows)
        if order.shape[0] == num_rows:
            # The order of this shard's rows, if the forward pass was split as this one is.
            local = order - first_row
            is_local = jnp.all((local >= 0) & (local < num_rows))
            order = jnp.where(is_local, local, jnp.arange(num_rows, dtype=jnp.int32))
    return kernel(d_output, winner, ids, order, *data_and_output)


def _shard_of_winners(
    op: Callable[[], Op],
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    d_data: Array,
    winner: Array,
    ids: Array,
    *data_and_output: Array,
    **params: Any,
) -> Sequence[Array]:
    """Adds up the shards' parts, unrounded."""
    row_axes = row_axes_of(axes)
    if not row_axes:
        return kernel(d_data, winner, ids, *data_and_output)
    winner = own_winners(winner, index_of_first_row(ids, row_axes), ids.shape[0])
    wide = d_data.astype(accumulation_dtype(d_data.dtype))
    [local] = op().kernel(wide, winner, ids, *data_and_output, **params)
    return (jax.lax.psum(local, row_axes).astype(d_data.dtype),)


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel.


def _backward_plan_parameters(
    d_output: Any, winner: Any, segment_ids: Any, order: Any, *data_and_output: Any, **_: Any
) -> dict[str, int]:
    return plan_parameters(
        d_output,
        segment_ids,
        num_segments=d_output.shape[0],
        has_order=order.shape == segment_ids.shape,
        shares_ties=bool(data_and_output),
    )


# H100, time of plain JAX / kernel: 0.7 (188 loops, with and without winners).
_RULES = (on_gpu("launch-bound: few rows", uncontended, at_most(rows=1 << 14, bytes=16 * MB)),)


def _ops(name: str, extremum: Extremum, aliases_of_backward: tuple[str, ...]) -> tuple[Op, Op, Op]:
    """The ops ``segment_<name>``, ``segment_<name>_with_winner`` and ``segment_<name>_backward``."""

    # Winners are constant almost everywhere: the tangent of the extremum, and the transpose of the gradient, are what
    # the winners have.

    def tangent_with_winner(
        d_data: Array,
        operands: Sequence[Array],
        results: Sequence[Array],
        *,
        first_wins: bool,
        indices_are_sorted: bool,
        **_: Any,
    ) -> Sequence[Array]:
        data, ids = operands
        output, *winner_and_order = results
        data_and_output = () if first_wins else (data, output)
        operands = (winner_and_order[0], ids, *map(jax.lax.stop_gradient, data_and_output))
        return *winners(d_data, *operands, indices_are_sorted=indices_are_sorted), *winner_and_order

    def tangent(d_data: Array, operands: Sequence[Array], _: Any, **params: Any) -> Sequence[Array]:
        """Of the extrema alone, which do not tell what won."""
        results = with_winner(*operands, **params, with_order=False)
        return tangent_with_winner(d_data, operands, results, **params)[:1]

    def transpose_backward(
        _: Any,
        d_results: Sequence[Array],
        winner: Array,
        ids: Array,
        order: Array,
        *data_and_output: Array,
        indices_are_sorted: bool = False,
    ) -> Sequence[Array]:
        return winners(*d_results, winner, ids, *data_and_output, indices_are_sorted=indices_are_sorted)

    def transpose_winners(
        _: Any, d_results: Sequence[Array], winner: Array, ids: Array, *data_and_output: Array, **params: Any
    ) -> Sequence[Array]:
        return backward(*d_results, winner, ids, jnp.zeros(1, jnp.int32), *data_and_output, **params)

    reduction = reduction_op(
        f"segment_{name}",
        results={"output": CELLS},
        reference=functools.partial(_reference_reduce, extremum),
        dtypes=ORDERED_DTYPES,
        guarantee=EXACT,
        xla_rules=_RULES,
        shard_program=functools.partial(_shard_reduce, extremum),
        tangent=tangent,
    )
    with_winner = reduction_op(
        f"segment_{name}_with_winner",
        results=lambda *, with_order, **_: {
            "output": CELLS,
            "winner": CELLS,
            "order": IDS if with_order else ("no order",),
        },
        sizes=lambda *, num_segments, **_: {"segment": num_segments, "no order": 1},
        result_dtypes=lambda data, segment_ids, **_: [data.dtype, *[index_dtype(segment_ids.shape[0])] * 2],
        reference=functools.partial(_reference_with_winner, extremum),
        dtypes=FLOATING_DTYPES,
        guarantee=EXACT,
        attributes=("first_wins",),
        xla_rules=_RULES,
        shard_program=functools.partial(_shard_with_winner, extremum),
        tangent=tangent_with_winner,
    )
    backward = gradient_op(
        f"segment_{name}_backward",
        operands={
            "d_output": CELLS,
            "winner": CELLS,
            "segment_ids": IDS,
            "order": IDS,
            "data": ROWS,
            "output": CELLS,
        },
        plan_parameters=_backward_plan_parameters,
        reference=_reference_backward,
        # H100, time of plain JAX / kernel: 0.54, between elementwise operations 0.45 (60 loops each).
        xla_rules=(on_gpu("gathers and comparisons, which XLA fuses"),),
        guarantee=ROUNDED_ONCE,
        aliases=aliases_of_backward,
        shard_program=_shard_backward,
        transpose=transpose_backward,
    )
    winners = Op(
        name=f"segment_{name}_of_winners",
        operands={"d_data": ROWS, "winner": CELLS, "segment_ids": IDS, "data": ROWS, "output": CELLS},
        results={"cells": CELLS},
        reference=functools.partial(_of_winners, SEGMENT_SUM_BACKWARD.reference, SEGMENT_SUM.reference),
        program=functools.partial(_of_winners, SEGMENT_SUM_BACKWARD.kernel, SEGMENT_SUM.kernel),
        dtypes=FLOATING_DTYPES,
        guarantee=accumulated,
        replicated_dims=("segment",),
        reduction_dims=("row",),
        shard_program=functools.partial(_shard_of_winners, lambda: winners),
        transpose=transpose_winners,
    )
    return reduction, with_winner, backward


SEGMENT_MAX, SEGMENT_MAX_WITH_WINNER, SEGMENT_MAX_BACKWARD = _ops("max", MAXIMUM, ("unsorted_segment_max_backward",))
SEGMENT_MIN, SEGMENT_MIN_WITH_WINNER, SEGMENT_MIN_BACKWARD = _ops("min", MINIMUM, ())


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


@dataclasses.dataclass(frozen=True)
class ExtremumParams(Params):
    first_wins: bool


MIN_ORDERED_ROW_BYTES = 32
MIN_ORDERED_BYTES = 2**23


def _with_order(data: Array, params: Params) -> bool:
    """Whether the forward kernel notes the order that it brings unsorted rows into, for the gradient to follow.

    Worth its memory where rows are wide and too many for the caches.
    """
    if params.indices_are_sorted or not jax_versions.is_static_shape(data.shape):
        return False
    row_bytes = math.prod(data.shape[1:]) * data.dtype.itemsize
    return row_bytes > MIN_ORDERED_ROW_BYTES and data.shape[0] * row_bytes > MIN_ORDERED_BYTES


def _rules(reduction: Op, with_winner: Op, backward: Op, of_edges: Op, of_edges_with_winner: Op) -> KernelVjp:
    """The rule of an extremum. In the order of a plan, rows are what the edges gather that the order numbers."""

    def primal(
        params: ExtremumParams,
        *,
        data: Array,
        segment_ids: Array,
        order: Array | None = None,
        sorted_ids: Array | None = None,
    ) -> Array:
        if order is None:
            return reduction(data, segment_ids, **vars(params))[0]
        return of_edges(data, order, sorted_ids, **vars(params) | {"indices_are_sorted": True})[0]

    def forward(
        params: ExtremumParams,
        *,
        data: Array,
        segment_ids: Array,
        order: Array | None = None,
        sorted_ids: Array | None = None,
    ) -> tuple[Array, tuple[Array, ...]]:
        check_numbered(reduction.name, "rows", segment_ids.shape[0])
        with_order = _with_order(data, params)
        if order is None:
            output, winner, order = with_winner(data, segment_ids, **vars(params), with_order=with_order)
        else:
            flags = vars(params) | {"indices_are_sorted": True, "has_edge_order": True}
            output, winner = of_edges_with_winner(data, order, sorted_ids, order, **flags)
            order = order if with_order else jnp.zeros(1, jnp.int32)
        residuals = (winner, segment_ids, order)
        return output, residuals if params.first_wins else (*residuals, data, output)

    def gradient(params: ExtremumParams, residuals: tuple[Array, ...], d_output: Array) -> dict[str, Array]:
        winner, ids, order, *data_and_output = residuals
        # Which rows win is constant almost everywhere, and the gradient linear in what is left.
        constants = map(jax.lax.stop_gradient, data_and_output)
        [d_data] = backward(d_output, winner, ids, order, *constants, indices_are_sorted=params.indices_are_sorted)
        return {"data": d_data}

    return KernelVjp(reduction.name, primal, forward, gradient)


_segment_max = _rules(
    SEGMENT_MAX, SEGMENT_MAX_WITH_WINNER, SEGMENT_MAX_BACKWARD, GATHER_SEGMENT_MAX, GATHER_SEGMENT_MAX_WITH_WINNER
)
_segment_min = _rules(
    SEGMENT_MIN, SEGMENT_MIN_WITH_WINNER, SEGMENT_MIN_BACKWARD, GATHER_SEGMENT_MIN, GATHER_SEGMENT_MIN_WITH_WINNER
)
