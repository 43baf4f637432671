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
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.guarantees import EXACT
from jax_baracuda._core.op import Op
from jax_baracuda.ops.segment.arguments import (
    Mode,
    OutSharding,
    SegmentCall,
    TieBreak,
    canonicalize,
    canonicalize_backward,
)
from jax_baracuda.ops.segment.cells import gather_segments, row_numbers, xla_max, xla_min, xla_sum
from jax_baracuda.ops.segment.definitions import (
    CELLS,
    IDS,
    ORDERED_DTYPES,
    ROUNDED_ONCE,
    ROWS,
    Params,
    first_result,
    gradient_op,
    index_of_first_row,
    plan_parameters,
    reduction_op,
    row_axes_of,
)


def segment_max(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    *,
    tie_break: TieBreak = "split",
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
    call = canonicalize(name, data, segment_ids, num_segments, indices_are_sorted, mode, out_sharding, bucket_size)
    return _reduce(name, call, _segment_max, jnp.max, tie_break)


def segment_min(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    *,
    tie_break: TieBreak = "split",
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
    call = canonicalize(name, data, segment_ids, num_segments, indices_are_sorted, mode, out_sharding, bucket_size)
    return _reduce(name, call, _segment_min, jnp.min, tie_break)


def segment_max_backward(
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    tie_break: TieBreak = "split",
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
        "segment_max_backward", _segment_max, d_output, data, segment_ids, indices_are_sorted, mode, tie_break
    )


def segment_min_backward(
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    tie_break: TieBreak = "split",
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
        "segment_min_backward", _segment_min, d_output, data, segment_ids, indices_are_sorted, mode, tie_break
    )


def unsorted_segment_max_backward(d_output: ArrayLike, data: ArrayLike, segment_ids: ArrayLike) -> Array:
    """Gradient of :func:`segment_max` for ids in any order, the first occurrence of each maximum taking it all.

    ``d_data[n, ...] = d_output[s, ...]`` if n is the lowest row of segment ``s = segment_ids[n]`` that attains the
    maximum, else 0. The same as ``segment_max_backward(d_output, data, segment_ids, tie_break="first")``.

    Args:
      d_output: ``[S, ...]``, the cotangent of the segment maxima; a floating dtype, the same as `data`.
      data: ``[N, ...]``, the rows that were reduced.
      segment_ids: ``[N]``, any integer dtype, in any order; rows with an id outside ``[0, S)`` get 0.

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


def _reduce(
    name: str, call: SegmentCall, rules: KernelVjp, reduce_buckets: Callable[..., Array], tie_break: TieBreak
) -> Array:
    if call.bucket_size is not None and call.segment_ids.shape[0] == 0:
        raise ValueError(f"{name}: bucket_size needs segment_ids of shape [N] with N > 0, got shape (0,)")
    params = call.params(ExtremumParams, first_wins=first_gets_all(name, tie_break))
    # Buckets make no difference where the first of tied rows gets the gradient.
    return call.reduce(rules, params, None if params.first_wins else _over_buckets(reduce_buckets))


def _backward(
    name: str,
    rules: KernelVjp,
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike,
    indices_are_sorted: bool,
    mode: Mode,
    tie_break: TieBreak,
) -> Array:
    d_output, call = canonicalize_backward(name, d_output, data, segment_ids, indices_are_sorted, mode)
    # Nothing here depends on `data` smoothly; stopping its gradient spares JAX from finding that out.
    call = call.with_data(jax.lax.stop_gradient(call.data))
    return call.gradient(rules, call.params(ExtremumParams, first_wins=first_gets_all(name, tie_break)), d_output)


def first_gets_all(name: str, tie_break: str) -> bool:
    if tie_break not in ("split", "first"):
        raise ValueError(f"{name}: tie_break must be 'split' or 'first', got {tie_break!r}")
    return tie_break == "first"


def _over_buckets(reduce: Callable[..., Array]) -> Callable[..., Array]:
    """A maximum or minimum that passes no gradient where there is a NaN; that of JAX divides zero by zero."""

    def over_buckets(cells: Array, axis: int) -> Array:
        if not jnp.issubdtype(cells.dtype, jnp.inexact):
            return reduce(cells, axis=axis)
        has_nan = jnp.any(cells != cells, axis=axis, keepdims=True)
        reduced = reduce(jnp.where(has_nan, 0, cells), axis=axis)
        return jnp.where(jnp.squeeze(has_nan, axis), jnp.nan, reduced)

    return over_buckets


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX.

NO_WINNER = -1
"""A winner is the row that attains a cell's extremum, or NO_WINNER (the segment is empty or holds a NaN), or, where
ties are shared, minus the number (2 or more) of members that attain it, the identity of the reduction included."""


@dataclasses.dataclass(frozen=True)
class Extremum:
    """What tells the maximum and the minimum apart."""

    of_segments: Callable[..., Array]
    """``(data, ids, num_segments)``"""
    over_axes: Callable[[Array, Sequence[str]], Array]
    """Over the axes of a mesh."""
    infinity: float
    integer_bound: str

    def identity(self, dtype: Any) -> np.ndarray:
        """The extremum of no rows."""
        if jnp.issubdtype(dtype, jnp.inexact):
            value = self.infinity
        else:
            value = self.infinity > 0 if dtype == jnp.bool_ else getattr(jnp.iinfo(dtype), self.integer_bound)
        return np.asarray(value, dtype)


def _ordered(x: Array) -> Array:
    """Floating numbers as integers of the same order, with NaN above all others and -0 below +0."""
    signed = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), signed)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(signed).max, bits)


def _from_ordered(ordered: Array, dtype: Any) -> Array:
    return jax.lax.bitcast_convert_type(jnp.where(ordered < 0, ordered ^ jnp.iinfo(ordered.dtype).max, ordered), dtype)


def _wide_integers(x: Array) -> Array:
    """Collective libraries have no 16-bit integers and no booleans."""
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x


def _max_of_segments(data: Array, ids: Array, num_segments: int) -> Array:
    """``jax.ops.segment_max`` that propagates NaN on every backend, also where it becomes a maximum over devices."""
    if not jnp.issubdtype(data.dtype, jnp.floating) or data.dtype.itemsize < 2:
        return xla_max(data, ids, num_segments)
    ordered = _ordered(data)
    cells = xla_max(_wide_integers(ordered), ids, num_segments)
    infinity = _ordered(jnp.asarray(-jnp.inf, data.dtype))
    return _from_ordered(jnp.maximum(cells, infinity.astype(cells.dtype)).astype(ordered.dtype), data.dtype)


def _min_of_segments(data: Array, ids: Array, num_segments: int) -> Array:
    if not jnp.issubdtype(data.dtype, jnp.floating) or data.dtype.itemsize < 2:
        return xla_min(data, ids, num_segments)
    return -_max_of_segments(-data, ids, num_segments)


def _all_max(x: Array, axes: Sequence[str]) -> Array:
    """``jax.lax.pmax`` that propagates NaN and orders -0 below +0 on every backend."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return _from_ordered(_all_max(_ordered(x), axes), x.dtype)
    return jax.lax.pmax(_wide_integers(x), axes).astype(x.dtype)


def _all_min(x: Array, axes: Sequence[str]) -> Array:
    """``jax.lax.pmin`` that propagates NaN and orders -0 below +0 on every backend."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return -_all_max(-x, axes)
    return ~_all_max(~x, axes)


MAXIMUM = Extremum(_max_of_segments, _all_max, -math.inf, "min")
MINIMUM = Extremum(_min_of_segments, _all_min, math.inf, "max")


def reference_winner(extremum: Extremum, data: Array, ids: Array, output: Array, first_wins: bool) -> Array:
    num_segments = output.shape[0]
    if 0 in output.shape or 0 in data.shape:
        return jnp.full(output.shape, NO_WINNER, jnp.int32)
    extrema, is_member = gather_segments(output, ids)
    attains = is_member & (data == extrema)
    none = jnp.iinfo(jnp.int32).max
    first = xla_min(jnp.where(attains, row_numbers(data), none), ids, num_segments)
    first = jnp.where(first == none, NO_WINNER, first)
    if first_wins:
        return first
    members = xla_sum(attains.astype(jnp.int32), ids, num_segments)
    members += output == extremum.identity(output.dtype)
    return jnp.where(members > 1, -members, first)


def _reference_gradient(d_output: Array, winner: Array, ids: Array, *data_and_output: Array) -> Array:
    """What the gradient kernels of maximum and minimum compute."""
    winners, is_member = gather_segments(winner, ids)
    # Wide, because the transpose adds up the cotangents of a segment's rows.
    cotangents, _ = gather_segments(d_output.astype(accumulation_dtype(d_output.dtype)), ids)
    wins = is_member & (winners == row_numbers(winners))
    gradient = jnp.where(wins, cotangents, 0)
    if data_and_output:
        data, output = data_and_output
        ties = is_member & (winners < NO_WINNER) & (data == gather_segments(output, ids)[0])
        gradient = jnp.where(ties, cotangents / jnp.where(ties, -winners, 1), gradient)
    return gradient.astype(d_output.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 3, 4))
def reference_extremum(extremum: Extremum, data: Array, ids: Array, num_segments: int, first_wins: bool) -> Array:
    return extremum.of_segments(data, ids, num_segments)


@reference_extremum.defjvp
def _reference_extremum_jvp(
    extremum: Extremum,
    num_segments: int,
    first_wins: bool,
    primals: tuple[Array, Array],
    tangents: tuple[Array, Array],
) -> tuple[Array, Array]:
    data, ids = primals
    output = reference_extremum(extremum, data, ids, num_segments, first_wins)
    winner = reference_winner(extremum, data, ids, output, first_wins)

    def gradient(d_output: Array) -> Array:
        return _reference_gradient(d_output, winner, ids, *(() if first_wins else (data, output)))

    # The tangent is the transpose of the gradient, which keeps the two consistent by construction.
    [d_output] = jax.linear_transpose(gradient, output)(tangents[0])
    return output, d_output


def _reference_reduce(
    extremum: Extremum, data: Array, ids: Array, *, num_segments: int, first_wins: bool, **_: Any
) -> tuple[Array]:
    return (reference_extremum(extremum, data, ids, num_segments, first_wins),)


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
    output = reference_extremum(extremum, data, ids, num_segments, first_wins)
    order = jnp.arange(ids.shape[0] if with_order else 1, dtype=jnp.int32)
    return output, reference_winner(extremum, data, ids, output, first_wins), order


def _reference_backward(
    d_output: Array, winner: Array, ids: Array, order: Array, *data_and_output: Array
) -> tuple[Array]:
    return (_reference_gradient(d_output, winner, ids, *data_and_output),)


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
    return (extremum.over_axes(output, row_axes) if row_axes else output,)


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
    output, winner = winners_over_shards(extremum, local_output, local_winner, first_row, row_axes, first_wins)
    return output, winner, order + first_row if with_order else order


def winners_over_shards(
    extremum: Extremum,
    local_output: Array,
    local_winner: Array,
    first_row: Array,
    row_axes: Sequence[str],
    first_wins: bool,
) -> tuple[Array, Array]:
    """The extrema and winners of all rows, given those of each shard's."""
    output = extremum.over_axes(local_output, row_axes)
    none = jnp.iinfo(jnp.int32).max
    attains = (local_output == output) & (local_winner != NO_WINNER)
    row = jnp.where(attains & (local_winner >= 0), local_winner + first_row, none)
    if first_wins:
        row = jax.lax.pmin(row, row_axes)
        return output, jnp.where(row == none, NO_WINNER, row)
    identity = (output == extremum.identity(output.dtype)).astype(jnp.int32)
    local_members = jnp.where(local_winner >= 0, 1, -local_winner - identity)
    # A sole winner's row number is the sum over the shards, of which one has it.
    members, row = jax.lax.psum((jnp.where(attains, local_members, 0), jnp.where(row == none, 0, row)), row_axes)
    sole = (members == 1) & (identity == 0)
    return output, jnp.where(members == 0, NO_WINNER, jnp.where(sole, row, -members - identity))


def _shard_backward(
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    d_output: Array,
    winner: Array,
    ids: Array,
    order: Array,
    *data_and_output: Array,
) -> Sequence[Array]:
    if row_axes := row_axes_of(axes):
        num_rows, first_row = ids.shape[0], index_of_first_row(ids, row_axes)
        row = winner - first_row
        row = jnp.where((row >= 0) & (row < num_rows), row, NO_WINNER)
        winner = jnp.where(winner >= 0, row, winner)
        if order.shape[0] == num_rows:
            # The order of this shard's rows, if the forward pass was split as this one is.
            local = order - first_row
            is_local = jnp.all((local >= 0) & (local < num_rows))
            order = jnp.where(is_local, local, jnp.arange(num_rows, dtype=jnp.int32))
    return kernel(d_output, winner, ids, order, *data_and_output)


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


def _ops(name: str, extremum: Extremum, aliases_of_backward: tuple[str, ...]) -> tuple[Op, Op, Op]:
    """The ops ``segment_<name>``, ``segment_<name>_with_winner`` and ``segment_<name>_backward``."""
    reduction = reduction_op(
        f"segment_{name}",
        results={"output": CELLS},
        reference=functools.partial(_reference_reduce, extremum),
        dtypes=ORDERED_DTYPES,
        guarantee=EXACT,
        shard_program=functools.partial(_shard_reduce, extremum),
    )
    with_winner = reduction_op(
        f"segment_{name}_with_winner",
        results=lambda *, with_order, **_: {
            "output": CELLS,
            "winner": CELLS,
            "order": IDS if with_order else ("no order",),
        },
        sizes=lambda *, num_segments, **_: {"segment": num_segments, "no order": 1},
        result_dtypes=lambda data, segment_ids, **_: [data.dtype, np.int32, np.int32],
        reference=functools.partial(_reference_with_winner, extremum),
        dtypes=FLOATING_DTYPES,
        guarantee=EXACT,
        attributes=("first_wins",),
        shard_program=functools.partial(_shard_with_winner, extremum),
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
        guarantee=ROUNDED_ONCE,
        aliases=aliases_of_backward,
        shard_program=_shard_backward,
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


def _rules(reduction: Op, with_winner: Op, backward: Op) -> KernelVjp:
    def forward(params: ExtremumParams, *, data: Array, segment_ids: Array) -> tuple[Array, tuple[Array, ...]]:
        with_order = _with_order(data, params)
        output, winner, order = with_winner(data, segment_ids, **vars(params), with_order=with_order)
        residuals = (winner, segment_ids, order)
        return output, residuals if params.first_wins else (*residuals, data, output)

    def gradient(params: ExtremumParams, residuals: tuple[Array, ...], d_output: Array) -> dict[str, Array]:
        [d_data] = backward(d_output, *residuals)
        return {"data": d_data}

    return KernelVjp(reduction.name, first_result(reduction), forward, gradient)


_segment_max = _rules(SEGMENT_MAX, SEGMENT_MAX_WITH_WINNER, SEGMENT_MAX_BACKWARD)
_segment_min = _rules(SEGMENT_MIN, SEGMENT_MIN_WITH_WINNER, SEGMENT_MIN_BACKWARD)
