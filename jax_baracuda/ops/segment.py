"""Segment reductions: rows of an array reduced by an integer label, with the semantics of ``jax.ops.segment_*``.

``segment_max`` is what message passing on graphs, point clouds and recommender models aggregate with. Its forward
kernel can note each maximum's *winner* on the way (which row attains it, or how many rows share it), and then the
backward kernel writes the gradient without looking at the data again, except where rows tie.

The file reads top to bottom: public functions, reference in plain JAX, ops (one per native kernel), derivative rules,
canonicalisation of arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.autodiff import Differentiable
from jax_baracuda._core.example import EXAMPLES, Example
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.op import Op, joint_batch

TieBreak = Literal["split", "first"]
Mode = jax.lax.GatherScatterMode | str | None


def segment_max(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
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
        dropped. Of rank 0, 2 or more: as in :func:`jax.ops.segment_max`, every id labels one ``data.shape[1:]``.
      num_segments: number of segments S, static under ``jit``. Default: ``max(segment_ids) + 1``.
      indices_are_sorted: promises that `segment_ids` is non-decreasing, which is faster on GPUs. If the promise is
        false, segments may get a maximum of only some of their rows.
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
      ValueError: shapes do not fit, `num_segments` is negative, `mode` or `tie_break` is unknown, or `num_segments` is
        None and there are no ids.
      jax.errors.ConcretizationTypeError: `num_segments` is None and `segment_ids` is traced.

    Numerical guarantees: exact. NaN propagates; ``max(-0, +0)`` is ``+0`` in either order; subnormal numbers are
    numbers, not zeros. Bit-equal from run to run and independent of scheduling.

    Gradient: ``d_data[n] = d_out[segment_ids[n]] * share``, where the share is ``1 / number of tied rows`` (the count
    is an exact integer) or 1 for the winner, and exactly 0 for every other row, whatever the cotangent. A segment that
    holds a NaN passes no gradient. Derivatives of any order exist. ``jax.jvp`` and ``jax.jacfwd`` of this function
    need :func:`jax_baracuda.forward_mode.segment_max`.
    """
    call = _canonicalize(
        "segment_max", data, segment_ids, num_segments, indices_are_sorted, bucket_size, mode, out_sharding
    )
    return call.reduce(_segment_max, _first_wins("segment_max", tie_break), reduce_buckets=jnp.max)


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
      segment_ids: ``[N]``, any integer dtype, in any order.
      indices_are_sorted: promises that `segment_ids` is non-decreasing.
      mode: as in :func:`segment_max`.
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
    respect to `data`. Derivatives of any order exist.
    """
    name = "segment_max_backward"
    d_output = _as_array(name, "d_output", d_output)
    if d_output.ndim == 0:
        raise ValueError(f"{name}: d_output must have shape [num_segments, ...], got a scalar")
    call = _canonicalize(name, data, segment_ids, d_output.shape[0], indices_are_sorted, None, mode, None)
    if d_output.dtype != call.data.dtype or not jnp.issubdtype(d_output.dtype, jnp.inexact):
        raise TypeError(
            f"{name}: d_output and data must have the same floating dtype, got {d_output.dtype} and {call.data.dtype}"
        )
    if d_output.shape[1:] != call.data.shape[1:]:
        raise ValueError(
            f"{name}: d_output must have shape {(d_output.shape[0], *call.data.shape[1:])} to fit data, "
            f"got {d_output.shape}"
        )
    params = _Params(d_output.shape[0], bool(indices_are_sorted), _first_wins(name, tie_break))
    d_rows = _segment_max_gradient(params, d_output[None], call.rows(call.data)[None], call.segment_ids[None])[0]
    [d_data] = jax.linear_transpose(call.rows, call.data)(d_rows)
    return d_data


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
    """
    return segment_max_backward(d_output, data, segment_ids, tie_break="first")


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX. A cell is one (segment, feature) pair of the result.

NO_WINNER = -1
"""A winner is the row that attains a cell's maximum, or NO_WINNER (the segment is empty or holds a NaN), or, where ties
are shared, minus the number (2 or more) of members that attain it, the identity of the reduction included."""


def _over_batch(function: Callable[..., Any], *operands: Array) -> Any:
    """Maps `function` over the leading dimension of the operands; where that is 1, the operand is shared."""
    batch = joint_batch(*(x.shape[0] for x in operands))
    mapped = [x if x.shape[0] == batch else x[0] for x in operands]
    return jax.vmap(function, [0 if x.shape[0] == batch else None for x in operands])(*mapped)


def _take_cells(cells: Array, ids: Array) -> tuple[Array, Array]:
    """Each row's cells ``[N, ...]``, and whether the row belongs to a segment ``[N, 1, ...]``."""
    is_member = ((ids >= 0) & (ids < cells.shape[0])).reshape(-1, *[1] * (cells.ndim - 1))
    return jnp.take(cells, ids, axis=0, mode="clip"), is_member


def _row_numbers(rows: Array) -> Array:
    return jnp.arange(rows.shape[0], dtype=jnp.int32).reshape(-1, *[1] * (rows.ndim - 1))


def _reference_winner(data: Array, ids: Array, output: Array, first_wins: bool) -> Array:
    num_segments = output.shape[0]
    if 0 in output.shape or 0 in data.shape:
        return jnp.full(output.shape, NO_WINNER, jnp.int32)
    maxima, is_member = _take_cells(output, ids)
    attains = is_member & (data == maxima)
    none = jnp.iinfo(jnp.int32).max
    first = jax.ops.segment_min(jnp.where(attains, _row_numbers(data), none), ids, num_segments)
    first = jnp.where(first == none, NO_WINNER, first)
    if first_wins:
        return first
    members = jax.ops.segment_sum(attains.astype(jnp.int32), ids, num_segments)
    members += output == _max_identity(output.dtype)
    return jnp.where(members > 1, -members, first)


def _max_identity(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def _reference_gradient(d_output: Array, winner: Array, ids: Array, *data_and_output: Array) -> Array:
    """What :data:`SEGMENT_MAX_BACKWARD` computes, for one batch element."""
    if 0 in d_output.shape:
        return jnp.zeros((*ids.shape, *d_output.shape[1:]), d_output.dtype)
    winners, is_member = _take_cells(winner, ids)
    cotangents, _ = _take_cells(d_output, ids)
    wins = is_member & (winners == _row_numbers(winners))
    gradient = jnp.where(wins, cotangents, 0)
    if data_and_output:
        data, output = data_and_output
        ties = is_member & (winners < NO_WINNER) & (data == _take_cells(output, ids)[0])
        compute_dtype = jnp.float32 if d_output.dtype.itemsize < 4 else d_output.dtype
        shares = (cotangents.astype(compute_dtype) / jnp.where(ties, -winners, 1)).astype(d_output.dtype)
        gradient = jnp.where(ties, shares, gradient)
    return gradient


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _reference_max(data: Array, ids: Array, num_segments: int, first_wins: bool) -> Array:
    return jax.ops.segment_max(data, ids, num_segments)


@_reference_max.defjvp
def _reference_max_jvp(
    num_segments: int, first_wins: bool, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    data, ids = primals
    output = _reference_max(data, ids, num_segments, first_wins)
    winner = _reference_winner(data, ids, output, first_wins)

    def gradient(d_output: Array) -> Array:
        return _reference_gradient(d_output, winner, ids, *(() if first_wins else (data, output)))

    # The tangent is the transpose of the gradient, which keeps the two consistent by construction.
    [d_output] = jax.linear_transpose(gradient, output)(tangents[0])
    return output, d_output


def _reference_segment_max(
    data: Array, ids: Array, *, num_segments: int, indices_are_sorted: bool, first_wins: bool
) -> tuple[Array]:
    return (_over_batch(lambda d, i: _reference_max(d, i, num_segments, first_wins), data, ids),)


def _reference_segment_max_with_winner(
    data: Array, ids: Array, *, num_segments: int, indices_are_sorted: bool, first_wins: bool
) -> tuple[Array, Array]:
    def max_and_winner(data: Array, ids: Array) -> tuple[Array, Array]:
        output = _reference_max(data, ids, num_segments, first_wins)
        return output, _reference_winner(data, ids, output, first_wins)

    return _over_batch(max_and_winner, data, ids)


def _reference_segment_max_backward(
    d_output: Array, winner: Array, ids: Array, *data_and_output: Array
) -> tuple[Array]:
    return (_over_batch(_reference_gradient, d_output, winner, ids, *data_and_output),)


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel.

FLOATING_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
ORDERED_DTYPES = FLOATING_DTYPES | {"bool"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}

ROWS = ("batch", "row", "...")
IDS = ("batch", "row")
CELLS = ("batch", "segment", "...")


def _cells_shape(data: Any, ids: Any, num_segments: int) -> tuple[int, ...]:
    return (joint_batch(data.shape[0], ids.shape[0]), num_segments, *data.shape[2:])


def _scratch_parameters(
    data: Any, ids: Any, *, num_segments: int, indices_are_sorted: bool, **_: Any
) -> dict[str, int]:
    batch = joint_batch(data.shape[0], ids.shape[0])
    return {
        "batch": batch,
        "rows": ids.shape[1],
        "segments": num_segments,
        "features": math.prod(data.shape[2:]),
        "data_is_shared": data.shape[0] != batch,
        "ids_are_shared": ids.shape[0] != batch,
        "element_bytes": np.dtype(data.dtype).itemsize,
        "indices_are_sorted": indices_are_sorted,
    }


def _beyond_32_bits(ids: Any, num_segments: int) -> str | None:
    """Winners are int32 and segments uint32 in the kernels."""
    if ids.shape[1] >= np.iinfo(np.int32).max:
        return "it has 2^31 - 1 rows or more"
    return "it has 2^32 - 1 segments or more" if num_segments >= np.iinfo(np.uint32).max else None


def _all_max(x: Array, axes: Sequence[str]) -> Array:
    """``jax.lax.pmax`` that propagates NaN and orders -0 below +0 on every backend."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        signed = jnp.dtype(f"int{8 * x.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), signed)
        ordered = _all_max(jnp.where(bits < 0, bits ^ jnp.iinfo(signed).max, bits), axes)
        return jax.lax.bitcast_convert_type(jnp.where(ordered < 0, ordered ^ jnp.iinfo(signed).max, ordered), x.dtype)
    # Collective libraries have no 16-bit integers and no booleans.
    wide = jnp.int32 if x.dtype.itemsize < 4 else x.dtype
    return jax.lax.pmax(x.astype(wide), axes).astype(x.dtype)


def _shard_segment_max(
    kernel: Callable[..., Sequence[Array]], axes: Mapping[str, tuple[str, ...]], data: Array, ids: Array, **params: Any
) -> tuple[Array]:
    [output] = kernel(data, ids)
    row_axes = axes.get("row", ())
    return (_all_max(output, row_axes) if row_axes else output,)


def _shard_segment_max_with_winner(
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    data: Array,
    ids: Array,
    *,
    first_wins: bool,
    **params: Any,
) -> Sequence[Array]:
    local_output, local_winner = kernel(data, ids)
    row_axes = axes.get("row", ())
    if not row_axes:
        return local_output, local_winner
    output = _all_max(local_output, row_axes)
    first_row = jax.lax.axis_index(row_axes) * ids.shape[1]
    none = jnp.iinfo(jnp.int32).max
    attains = (local_output == output) & (local_winner != NO_WINNER)
    row = jnp.where(attains & (local_winner >= 0), local_winner + first_row.astype(jnp.int32), none)
    if first_wins:
        row = jax.lax.pmin(row, row_axes)
        return output, jnp.where(row == none, NO_WINNER, row)
    identity = (output == -jnp.inf).astype(jnp.int32)
    local_members = jnp.where(local_winner >= 0, 1, -local_winner - identity)
    # A sole winner's row number is the sum over the shards, of which one has it.
    members, row = jax.lax.psum((jnp.where(attains, local_members, 0), jnp.where(row == none, 0, row)), row_axes)
    sole = (members == 1) & (identity == 0)
    winner = jnp.where(members == 0, NO_WINNER, jnp.where(sole, row, -members - identity))
    return output, winner


def _shard_segment_max_backward(
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    d_output: Array,
    winner: Array,
    ids: Array,
    *data_and_output: Array,
) -> Sequence[Array]:
    if row_axes := axes.get("row", ()):
        num_rows = ids.shape[1]
        row = winner - (jax.lax.axis_index(row_axes) * num_rows).astype(jnp.int32)
        row = jnp.where((row >= 0) & (row < num_rows), row, NO_WINNER)
        winner = jnp.where(winner >= 0, row, winner)
    return kernel(d_output, winner, ids, *data_and_output)


SELECTION = Guarantee(accumulator="none", math_precision="exact", deterministic=True, bit_stable_on_same_hardware=True)

SEGMENT_MAX = Op(
    name="segment_max",
    operands=(ROWS, IDS),
    results=(CELLS,),
    result_types=lambda data, ids, *, num_segments, **_: [(_cells_shape(data, ids, num_segments), data.dtype)],
    reference=_reference_segment_max,
    dtypes=ORDERED_DTYPES,
    guarantee=SELECTION,
    attributes=("indices_are_sorted",),
    scratch=_scratch_parameters,
    whole=("segment",),
    reduced=("row",),
    shard_program=_shard_segment_max,
    kernel_limit=lambda data, ids, *, num_segments, **_: _beyond_32_bits(ids, num_segments),
)

SEGMENT_MAX_WITH_WINNER = Op(
    name="segment_max_with_winner",
    operands=(ROWS, IDS),
    results=(CELLS, CELLS),
    result_types=lambda data, ids, *, num_segments, **_: [
        (_cells_shape(data, ids, num_segments), data.dtype),
        (_cells_shape(data, ids, num_segments), np.dtype(np.int32)),
    ],
    reference=_reference_segment_max_with_winner,
    dtypes=FLOATING_DTYPES,
    guarantee=SELECTION,
    attributes=("indices_are_sorted", "first_wins"),
    scratch=_scratch_parameters,
    whole=("segment",),
    reduced=("row",),
    shard_program=_shard_segment_max_with_winner,
    kernel_limit=lambda data, ids, *, num_segments, **_: _beyond_32_bits(ids, num_segments),
)

SEGMENT_MAX_BACKWARD = Op(
    name="segment_max_backward",
    operands=(CELLS, CELLS, IDS, ROWS, CELLS),
    results=(ROWS,),
    result_types=lambda d_output, winner, ids, *data_and_output: [
        (
            (
                joint_batch(*(x.shape[0] for x in (d_output, winner, ids, *data_and_output))),
                ids.shape[1],
                *d_output.shape[2:],
            ),
            d_output.dtype,
        )
    ],
    reference=_reference_segment_max_backward,
    dtypes=FLOATING_DTYPES,
    guarantee=Guarantee(
        accumulator="none", math_precision="rounded once", deterministic=True, bit_stable_on_same_hardware=True
    ),
    whole=("segment",),
    shard_program=_shard_segment_max_backward,
    kernel_limit=lambda d_output, winner, ids, *_: _beyond_32_bits(ids, d_output.shape[1]),
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


@dataclasses.dataclass(frozen=True)
class _Params:
    """The static arguments of a segment reduction, under the names that the ops take them by."""

    num_segments: int
    indices_are_sorted: bool
    first_wins: bool


def _segment_max_primal(params: _Params, data: Array, ids: Array) -> Array:
    [output] = SEGMENT_MAX(data, ids, **dataclasses.asdict(params))
    return output


def _segment_max_forward(params: _Params, data: Array, ids: Array) -> tuple[Array, tuple[Array, ...]]:
    output, winner = SEGMENT_MAX_WITH_WINNER(data, ids, **dataclasses.asdict(params))
    return output, (winner, ids) if params.first_wins else (winner, ids, data, output)


def _segment_max_vjp(params: _Params, residuals: tuple[Array, ...], d_output: Array) -> tuple[Array, None]:
    [d_data] = SEGMENT_MAX_BACKWARD(d_output, *residuals)
    return d_data, None


_segment_max = Differentiable(_segment_max_primal, _segment_max_forward, _segment_max_vjp)


def _segment_max_gradient(params: _Params, d_output: Array, data: Array, ids: Array) -> Array:
    # Nothing here depends on `data` smoothly; stopping its gradient spares JAX from finding that out.
    data = jax.lax.stop_gradient(data)
    _, residuals = _segment_max_forward(params, data, ids)
    d_data, _ = _segment_max_vjp(params, residuals, d_output)
    return d_data


# ----------------------------------------------------------------------------------------------------------------------
# Canonicalisation of arguments, shared by the whole family.


@dataclasses.dataclass(frozen=True)
class _SegmentCall:
    """Checked arguments of a segment reduction."""

    data: Array
    """Broadcasts to [*ids_shape, ...]"""
    segment_ids: Array
    """[N], int32 or int64; out of range means dropped"""
    ids_shape: tuple[int, ...]
    num_segments: int
    indices_are_sorted: bool
    bucket_size: int | None
    out_sharding: NamedSharding | None

    def rows(self, data: Array) -> Array:
        """`data` as one row per id, ``[N, ...]``."""
        row_shape = data.shape[1:]
        if data.shape != (*self.ids_shape, *row_shape):
            data = jnp.broadcast_to(data, (*self.ids_shape, *row_shape))
        return data if len(self.ids_shape) == 1 else data.reshape(-1, *row_shape)

    def reduce(self, reduction: Differentiable, first_wins: bool, reduce_buckets: Callable[..., Array]) -> Array:
        """Applies a segment reduction to the rows.

        Args:
          reduction: ``(params, data [1, N, ...], ids [1, N]) -> [1, S, ...]``
          first_wins: whether the first of tied rows gets the gradient; then buckets make no difference.
          reduce_buckets: reduces the leading axis of the buckets' results.
        """
        use_buckets = self.bucket_size is not None and not first_wins
        num_buckets = -(-self.segment_ids.shape[0] // self.bucket_size) if use_buckets else 1
        params = _Params(num_buckets * self.num_segments, self.indices_are_sorted and not use_buckets, first_wins)

        def call(data: Array, ids: Array) -> Array:
            if use_buckets:
                bucket = jnp.arange(ids.shape[0], dtype=ids.dtype) // self.bucket_size
                is_member = (ids >= 0) & (ids < self.num_segments)
                ids = jnp.where(is_member, ids + bucket * self.num_segments, -1)
            output = reduction(params, self.rows(data)[None], ids[None])[0]
            if use_buckets:
                output = reduce_buckets(output.reshape(num_buckets, self.num_segments, *output.shape[1:]), axis=0)
            return output

        if self.out_sharding is not None:
            explicit_axes = self.out_sharding.mesh.explicit_axes
            call = jax.sharding.auto_axes(call, axes=explicit_axes, out_sharding=self.out_sharding)
        return call(self.data, self.segment_ids)


def _canonicalize(
    name: str,
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None,
    indices_are_sorted: bool,
    bucket_size: int | None,
    mode: Mode,
    out_sharding: NamedSharding | PartitionSpec | None,
) -> _SegmentCall:
    """Checks the arguments that all segment reductions share; raises what ``jax.ops`` raises, in clearer words."""
    data = _as_array(name, "data", data)
    ids = _as_array(name, "segment_ids", segment_ids)
    if ids.dtype == jnp.bool_:
        raise IndexError(f"{name}: segment_ids must have an integer dtype, got bool")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name}: segment_ids must have an integer dtype, got {ids.dtype}")
    row_shape = data.shape[1:]
    if not _broadcasts(data.shape, (*ids.shape, *row_shape)):
        raise ValueError(
            f"{name}: data must have one row per id, that is, a shape that broadcasts to segment_ids.shape + "
            f"data.shape[1:] = {(*ids.shape, *row_shape)}; got data.shape = {data.shape}, "
            f"segment_ids.shape = {ids.shape}"
        )
    num_segments = _canonical_num_segments(name, ids, num_segments)
    try:
        clamps = jax.lax.GatherScatterMode.from_any(mode) == jax.lax.GatherScatterMode.CLIP
    except ValueError:
        if mode != "one_hot":  # a mode that older versions of JAX do not know
            raise ValueError(
                f"{name}: mode must be None, 'fill', 'drop', 'clip', 'promise_in_bounds', 'one_hot' or a "
                f"jax.lax.GatherScatterMode, got {mode!r}"
            ) from None
        clamps = False
    if bucket_size is not None:
        _check_bucket_size(name, bucket_size, ids)
        if out_sharding is not None:
            raise NotImplementedError(f"{name}: out_sharding cannot be combined with bucket_size")
    sharding = jax_versions.canonicalize_sharding(out_sharding, name)
    if sharding is not None and sharding.spec.unreduced:
        raise NotImplementedError(f"{name}: out_sharding must not be unreduced, got {sharding.spec}")
    if clamps and num_segments > 0:
        ids = jnp.clip(ids, 0, min(num_segments - 1, int(jnp.iinfo(ids.dtype).max)))
    return _SegmentCall(
        data=data,
        segment_ids=_follow_rows(_signed_ids(ids.reshape(-1) if ids.ndim != 1 else ids), data),
        ids_shape=ids.shape,
        num_segments=num_segments,
        indices_are_sorted=bool(indices_are_sorted),
        bucket_size=bucket_size,
        out_sharding=sharding,
    )


def _as_array(name: str, argument: str, value: ArrayLike) -> Array:
    is_array = hasattr(value, "__jax_array__") or hasattr(value, "__array__")
    if not is_array and not isinstance(value, int | float | complex | bool):
        raise TypeError(f"{name}: {argument} must be an array, got {type(value).__name__}")
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"{name}: {argument} must have a numeric dtype, got {array.dtype}")
    return array


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    offset = len(target) - len(shape)
    return offset >= 0 and all(size in (1, target[offset + i]) for i, size in enumerate(shape))


def _canonical_num_segments(name: str, ids: Array, num_segments: int | None) -> int:
    if num_segments is None:
        if ids.size == 0:
            raise ValueError(f"{name}: num_segments is None, but segment_ids is empty and gives no number of segments")
        num_segments = jnp.max(ids) + 1 if isinstance(ids, jax.core.Tracer) else int(jnp.max(ids)) + 1
    if not hasattr(num_segments, "__index__"):
        raise TypeError(f"{name}: num_segments must be an integer, got {num_segments!r}")
    num_segments = jax_versions.concrete_or_error(num_segments, f"{name}: num_segments must be static.")
    if num_segments < 0:
        raise ValueError(f"{name}: num_segments must be non-negative, got {num_segments}")
    return num_segments


def _check_bucket_size(name: str, bucket_size: int, ids: Array) -> None:
    message = f"{name}: bucket_size must be a positive integer, got {bucket_size!r}"
    if not isinstance(bucket_size, int | np.integer) or bucket_size < 0:
        raise TypeError(message)
    if bucket_size == 0:
        raise ZeroDivisionError(message)
    if ids.ndim != 1 or ids.shape[0] == 0:
        raise ValueError(f"{name}: bucket_size needs segment_ids of shape [N] with N > 0, got shape {ids.shape}")


def _signed_ids(ids: Array) -> Array:
    """Ids as int32 or int64. What does not fit wraps to a negative number, and so stays out of range."""
    wide = ids.dtype.itemsize == 8
    return ids if ids.dtype == (jnp.int64 if wide else jnp.int32) else ids.astype(jnp.int64 if wide else jnp.int32)


def _follow_rows(ids: Array, data: Array) -> Array:
    """Under explicit sharding, splits the ids over devices as the rows of `data` are."""
    spec, ids_spec = (jax_versions.explicit_spec(jax.typeof(x)) for x in (data, ids))
    if spec is None or ids_spec is None or data.shape[:1] != ids.shape or spec[0] == ids_spec[0]:
        return ids
    return jax.sharding.reshard(ids, PartitionSpec(spec[0]))


def _first_wins(name: str, tie_break: str) -> bool:
    if tie_break not in ("split", "first"):
        raise ValueError(f"{name}: tie_break must be 'split' or 'first', got {tie_break!r}")
    return tie_break == "first"


# ----------------------------------------------------------------------------------------------------------------------
# Examples for `python -m jax_baracuda check` and `race`.


def _example_operands(
    rng: np.random.Generator, *, num_rows: int, num_features: int, num_segments: int, is_sorted: bool
) -> tuple[np.ndarray, np.ndarray]:
    ids = rng.integers(0, num_segments, num_rows, dtype=np.int32)
    # Rounding makes ties, which the gradient has to share.
    return np.round(rng.normal(size=(num_rows, num_features)), 2).astype(np.float32), np.sort(ids) if is_sorted else ids


def _add_examples() -> None:
    for name, is_sorted in (("segment_max", False), ("segment_max, sorted ids", True)):

        def call(function: Callable[..., Array], is_sorted: bool = is_sorted) -> Callable[..., Array]:
            return lambda data, ids, *, num_segments, **_: function(
                data, ids, num_segments, indices_are_sorted=is_sorted
            )

        EXAMPLES.append(
            Example(
                name=name,
                function=call(segment_max),
                plain_jax=call(jax.ops.segment_max),
                make_operands=functools.partial(_example_operands, is_sorted=is_sorted),
                dtypes=("float32", "bfloat16", "float16"),
                check_sizes={"num_rows": 20_000, "num_features": 33, "num_segments": 3_000},
                race_sizes={
                    "cpu": {"num_rows": 292_000, "num_features": 128, "num_segments": 42_000},
                    "cuda": {"num_rows": 1_166_243, "num_features": 128, "num_segments": 169_343},
                },
                # The share of a tie is rounded once here, and once more per factor in plain JAX.
                tolerance={"float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4},
            )
        )


_add_examples()
