"""The row that attains the maximum or minimum of each segment."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import accumulation_dtype, in_automatic_mode
from jax_baracuda._core.guarantees import EXACT
from jax_baracuda._core.public import public_function
from jax_baracuda._core.selection import Implementation
from jax_baracuda._core.sharding import ShardAxes, ShardKernel
from jax_baracuda.ops.segment.arguments import (
    Mode,
    OutSharding,
    SegmentCall,
    canonical_segments,
    canonicalize,
    with_wide_integers,
)
from jax_baracuda.ops.segment.cells import gather_segments, row_numbers, xla_min
from jax_baracuda.ops.segment.comparisons import extrema_of_segments, extrema_over_shards, identity_of, same_value
from jax_baracuda.ops.segment.definitions import CELLS, WIDE_DTYPES, index_of_first_row, reduction_op
from jax_baracuda.ops.segment.extremum import LAUNCH_BOUND_EXTREMUM, extremum_targets, minimum_of, segment_max
from jax_baracuda.ops.segment.ids import check_numbered, index_dtype
from jax_baracuda.ops.segment.plan import SegmentPlan


@public_function(segment_max, has_twin=False)
def segment_argmax(
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """The row that attains each segment's maximum: ``out[s, ...] = argmax { data[n, ...] : segment_ids[n] == s }``.

    If several rows attain it, the lowest, as in :func:`numpy.argmax`.

    Args:
      plan: a :func:`segment_plan` of the rows, which replaces `segment_ids`, `num_segments` and `mode`. With a plan,
        the call does not sort. Calls trust it; :meth:`SegmentPlan.validate` checks it.

    Returns:
      ``[S, ...]``, int32 (int64 for 2^31 rows or more): a row number in ``[0, N)``, or N for an empty segment. If the
      rank of `segment_ids` is not 1, row numbers are positions in the flattened ids, and N is the number of ids.

    Numerical guarantees: exact. A NaN is greater than every number, and the first NaN wins; -0 and +0 are equal.
    Bit-equal from run to run and independent of scheduling.

    Gradient: none, the result is an integer.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> segment_ids = jnp.array([0, 0, 2])
      >>> print(jb.segment_argmax(data, segment_ids, num_segments=3))  # segment 1 is empty
      [[1 0]
       [3 3]
       [2 2]]
    """
    segments = canonical_segments("segment_argmax", segment_ids, num_segments, indices_are_sorted, mode, plan)
    return _arg_extremum(canonicalize(segments, data, out_sharding), minimum=False)


@public_function(has_twin=False)
@minimum_of(
    segment_argmax,
    """
    >>> import jax.numpy as jnp, jax_baracuda as jb
    >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
    >>> segment_ids = jnp.array([0, 0, 2])
    >>> print(jb.segment_argmin(data, segment_ids, num_segments=3))  # segment 1 is empty
    [[0 1]
     [3 3]
     [2 2]]
    """,
)
def segment_argmin(
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    segments = canonical_segments("segment_argmin", segment_ids, num_segments, indices_are_sorted, mode, plan)
    return _arg_extremum(canonicalize(segments, data, out_sharding), minimum=True)


def _arg_extremum(call: SegmentCall, minimum: bool) -> Array:
    check_numbered(call.name, "rows", call.ids.shape[0])
    plan = call.plan
    call = call.with_data(with_wide_integers(jax.lax.stop_gradient(call.data))).sorted_by_plan()
    rows = call.reduce(
        lambda params, **arrays: SEGMENT_ARG_EXTREMUM.of_arrays(arrays, **params)[0], call.params(minimum=minimum)
    )
    if plan is None:
        return rows
    # Within a segment, the plan's order ascends, so its first row is the lowest.
    num_rows = plan.edge_order.shape[0]
    if num_rows == 0:
        return rows

    def in_own_order(order: Array, rows: Array) -> tuple[Array]:
        return (order.at[rows].get(mode="fill", fill_value=num_rows),)

    spec = jax_versions.explicit_spec(jax.typeof(rows))
    if spec is not None:
        in_own_order = in_automatic_mode(in_own_order, jax.typeof(rows), spec)
    return in_own_order(plan.edge_order, rows)[0]


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX.


def _reference(data: Array, ids: Array, *, num_segments: int, minimum: bool) -> tuple[Array]:
    none = jnp.asarray(data.shape[0], index_dtype(data.shape[0]))
    data = data.astype(accumulation_dtype(data.dtype))  # some narrow dtypes have no infinity
    extrema, is_member = gather_segments(extrema_of_segments(data, ids, num_segments, minimum), ids)
    attains = is_member & same_value(data, extrema)
    first = xla_min(jnp.where(attains, row_numbers(data), none), ids, num_segments)
    return (jnp.minimum(first, none),)


# ----------------------------------------------------------------------------------------------------------------------
# The program of one shard, for segments whose rows are split over devices.


def _shard_program(kernel: ShardKernel, axes: ShardAxes, data: Array, ids: Array, *, minimum: bool) -> tuple[Array]:
    [row] = kernel(data, ids)
    row_axes = axes.get("row", ())
    if not row_axes:
        return (row,)
    num_rows, num_all_rows = ids.shape[0], jax.lax.psum(ids.shape[0], row_axes)
    is_found = row < num_rows
    value = jnp.take_along_axis(data, jnp.minimum(row, num_rows - 1), axis=0)
    value = jnp.where(is_found, value, identity_of(value.dtype, minimum))
    attains = is_found & same_value(value, extrema_over_shards(value, row_axes, minimum=minimum))
    return (jax.lax.pmin(jnp.where(attains, row + index_of_first_row(ids, row_axes), num_all_rows), row_axes),)


# ----------------------------------------------------------------------------------------------------------------------
# Op.


SEGMENT_ARG_EXTREMUM = reduction_op(
    "segment_arg_extremum",
    targets=extremum_targets("segment_arg{}"),
    results={"winner": CELLS},
    result_dtypes=lambda data, segment_ids: [index_dtype(segment_ids.shape[0])],
    reference=_reference,
    dtypes=WIDE_DTYPES,
    guarantee=EXACT,
    # H200, time of plain JAX / kernel: 0.2 to 1.0 for rows of 1 to 16 numbers up to 4 MB, 1.0 to 2.6 above; 1.2 to 4.6
    # for rows of 64 and 128 (90 calls).
    xla_rules=(LAUNCH_BOUND_EXTREMUM,),
    shard_program=_shard_program,
)
