"""Sum of segments. Its gradient needs only the ids."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import FLOATING_DTYPES
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.functions import Params
from jax_baracuda._core.public import public_function
from jax_baracuda._core.selection import Implementation
from jax_baracuda.ops.segment.arguments import (
    Accumulator,
    Mode,
    OutSharding,
    canonical_accumulator,
    canonical_cotangent,
    canonical_segments,
    canonicalize,
    reduce_numbers,
)
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.sum_ops import SEGMENT_SUM_BACKWARD, gradient_params, sum_by_plan, sum_op


@public_function()
def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    *,
    deterministic: bool = False,
    accumulator: Accumulator | None = None,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Sum of the rows of each segment: ``out[s, ...] = sum { data[n, ...] : segment_ids[n] == s }``.

    A drop-in replacement of :func:`jax.ops.segment_sum`.

    Args:
      data: ``[N, ...]``, any numeric dtype of JAX. Integers, float16, bfloat16, float32 and float64 have kernels
        (integers of less than 32 bits are added as int32 and wrap the same); other dtypes run as plain JAX. More
        generally, any shape that broadcasts to ``segment_ids.shape + data.shape[1:]``.
      segment_ids: ``[N]``, any integer dtype, in any order. Rows whose id is negative or at least the number of
        segments are dropped. Any other rank is accepted as in ``jax.ops``: every id labels one ``data.shape[1:]``.
      num_segments: number of segments S, static under ``jit``. Default: ``max(segment_ids) + 1``.
      indices_are_sorted: promises that `segment_ids` is non-decreasing, which is faster on GPUs. If the promise is
        false, the result may hold anything.
      unique_indices: accepted for compatibility; nothing depends on it.
      bucket_size: as in :func:`jax.ops.segment_sum`, rows are added in buckets of this size, and then the buckets. It
        has no effect with `accumulator`.
      mode: what happens to ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the row is
        dropped. "clip": the id is clamped to ``[0, S - 1]``.
      out_sharding: sharding of the result, for meshes with explicit axes.
      deterministic: on GPUs, floating rows with unsorted ids are added in an order that varies from run to run, unless
        this is True. Everything else has the same bits in every run anyway.
      accumulator: "float64": rows of 16 and 32 bits are added in float64, also if ``jax_enable_x64`` is off and float64
        arrays do not exist, and so are those of all derivatives; the result still has the dtype of `data`. Rows with a
        plan are moved into its order first. Integers and float64 stay as they are.
      plan: a :func:`segment_plan` of the rows, which replaces `segment_ids`, `num_segments` and `mode`. With a plan,
        neither this call nor its gradient sorts, and both have the same bits in every run. Calls trust it;
        :meth:`SegmentPlan.validate` checks it.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Empty segments hold 0.

    Raises:
      TypeError: an argument is not an array or has an unsuitable dtype.
      ValueError: shapes do not fit, `num_segments` is negative, an option is unknown, or `num_segments` is None and
        there are no ids.
      jax.errors.ConcretizationTypeError: `num_segments` is None and `segment_ids` is traced.

    Numerical guarantees: floating numbers are added in float32 (float64 for float64, or with `accumulator`) and the sum
    is rounded once to the dtype. (Where devices share a segment, the sum of each device is rounded to float32, and
    these sums are added in float32.) Integers are exact and wrap. Bit-equal from run to run, except for floating
    numbers on GPUs (see `deterministic`).

    Gradient: ``d_data[n] = d_out[segment_ids[n]]``, 0 for dropped rows; `data` is not kept for the backward pass.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> segment_ids = jnp.array([0, 0, 2])
      >>> print(jb.segment_sum(data, segment_ids, num_segments=3))
      [[4. 6.]
       [0. 0.]
       [5. 6.]]
    """
    name = "segment_sum"
    segments = canonical_segments(name, segment_ids, num_segments, indices_are_sorted, mode, plan)
    call = canonicalize(segments, data, out_sharding, bucket_size)
    accumulator = canonical_accumulator(name, accumulator, call.data.dtype)
    call = call.sorted_by_plan(unless=FLOATING_DTYPES if accumulator is None else frozenset())
    params = call.params(deterministic=deterministic, accumulator=accumulator)
    over_buckets = functools.partial(jnp.sum, axis=0) if accumulator is None else None
    return reduce_numbers(call, _segment_sum, params, over_buckets)


@public_function(segment_sum, has_twin=False)
def segment_sum_backward(
    d_output: ArrayLike,
    segment_ids: ArrayLike | None = None,
    *,
    mode: Mode = None,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Gradient of :func:`segment_sum`: ``d_data[n, ...] = d_output[segment_ids[n], ...]``, 0 for dropped rows.

    Args:
      d_output: ``[S, ...]``, the cotangent of the segment sums, a floating dtype.
      plan: a :func:`segment_plan` of the rows, which replaces `segment_ids` and `mode`. Calls trust it;
        :meth:`SegmentPlan.validate` checks it.

    Returns:
      ``segment_ids.shape + d_output.shape[1:]`` with the dtype of `d_output`, the cotangent of the data.

    Raises:
      TypeError, ValueError: an argument does not fit, as in :func:`segment_sum`.

    Numerical guarantees: exact. Bit-equal from run to run.

    Gradient: linear in `d_output`, whose cotangent is the :func:`segment_sum` of the cotangents. Derivatives of any
    order and in either mode exist.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> segment_ids = jnp.array([0, 0, 1, -1])  # the last row is in no segment
      >>> print(jb.segment_sum_backward(jnp.array([10.0, 20.0]), segment_ids))
      [10. 10. 20.  0.]
    """
    d_output, segments = canonical_cotangent("segment_sum_backward", d_output, segment_ids, False, mode, plan)
    [d_rows] = SEGMENT_SUM_BACKWARD(d_output, segments.ids)
    return segments.shaped_as_ids(d_rows)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rule.


def _forward(params: Params, *, data: Array, segment_ids: Array, **plan: Array) -> tuple[Array, Array]:
    if plan:
        return sum_by_plan(data, **plan, num_segments=params["num_segments"]), segment_ids
    return sum_op(params["accumulator"])(data, segment_ids, **params.without("accumulator"))[0], segment_ids


def _backward(params: Params, segment_ids: Array, d_output: Array) -> dict[str, Array]:
    [d_data] = SEGMENT_SUM_BACKWARD(d_output, segment_ids, **gradient_params(params))
    return {"data": d_data}


_segment_sum = KernelVjp("segment_sum", _forward, _backward)
