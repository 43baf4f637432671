"""Sum of segments. Its gradient needs the ids alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype
from jax_baracuda._core.autodiff import KernelVjp, with_twin
from jax_baracuda._core.dispatch import MB, at_least, at_most, fused, on_cpu, on_gpu, uncontended, unordered, unsorted
from jax_baracuda._core.guarantees import EXACT
from jax_baracuda._core.selection import Implementation, selectable
from jax_baracuda._core.sharding import MeshAxes
from jax_baracuda.ops.segment.arguments import (
    Mode,
    OutSharding,
    canonicalize,
    canonicalize_without_data,
    reduce_numbers,
    shaped_as_ids,
)
from jax_baracuda.ops.segment.cells import gather_or_zeros, xla_sum
from jax_baracuda.ops.segment.definitions import (
    CELLS,
    IDS,
    WIDE_DTYPES,
    SumParams,
    gradient_op,
    reduction_op,
    sum_guarantee,
)
from jax_baracuda.ops.segment.gather_sum import sum_edges
from jax_baracuda.ops.segment.ids import index_dtype
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.shards import row_axes_of, sum_over_axes


@selectable
@with_twin
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
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Sum of the rows of each segment: ``out[s, ...] = sum { data[n, ...] : segment_ids[n] == s }``.

    A drop-in replacement of :func:`jax.ops.segment_sum`.

    Args:
      data: ``[N, ...]``, any numeric dtype of JAX. Integers, float16, bfloat16, float32 and float64 have kernels
        (integers of less than 32 bits are added as int32 and wrap the same); other dtypes run as plain JAX. More
        generally, any shape that broadcasts to ``segment_ids.shape + data.shape[1:]``.
      segment_ids: ``[N]``, any integer dtype, in any order. Rows whose id is negative or at least `num_segments` are
        dropped. Of rank 0, 2 or more: as in ``jax.ops``, every id labels one ``data.shape[1:]``.
      num_segments: number of segments S, static under ``jit``. Default: ``max(segment_ids) + 1``.
      indices_are_sorted: promises that `segment_ids` is non-decreasing, which is faster on GPUs. If the promise is
        false, the result may hold anything.
      unique_indices: accepted for compatibility; nothing depends on it.
      bucket_size: as in :func:`jax.ops.segment_sum`, rows are added in buckets of this size, and then the buckets.
      mode: what happens to ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the row is
        dropped. "clip": the id is clamped to ``[0, S - 1]``.
      out_sharding: sharding of the result, for meshes with explicit axes.
      deterministic: on GPUs, sums of floating numbers in unsorted segments are added in an order that varies from run
        to run, unless this is True. Everything else has the same bits in every run anyway.
      plan: the rows as :func:`segment_plan` has sorted them, instead of `segment_ids`, `num_segments` and `mode`.
        Neither this call nor its gradient sorts any more, and both have the same bits in every run.
      implementation: "kernel", and an error where there is none; "xla" for plain JAX; None: what was faster where
        measured, or what the context :func:`jax_baracuda.implementation` says.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Empty segments hold 0.

    Raises:
      TypeError: an argument is no array or has an unsuitable dtype.
      IndexError: `segment_ids` is boolean.
      ValueError: shapes do not fit, `num_segments` is negative, an option is unknown, or `num_segments` is None and
        there are no ids.
      jax.errors.ConcretizationTypeError: `num_segments` is None and `segment_ids` is traced.

    Numerical guarantees: floating numbers are added in float32 (float64 for float64) and the sum is rounded once to
    the dtype. Integers are exact and wrap. Bit-equal from run to run, except for floating numbers on GPUs as said under
    `deterministic`.

    Gradient: ``d_data[n] = d_out[segment_ids[n]]``, 0 for dropped rows; `data` is not kept for the backward pass.
    Derivatives of any order exist. ``jax.jvp`` and ``jax.jacfwd`` of this function need its twin of the same name in
    :mod:`jax_baracuda.forward_mode`.

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
    options = {"bucket_size": bucket_size, "plan": plan}
    call = canonicalize(name, data, segment_ids, num_segments, indices_are_sorted, mode, out_sharding, **options)
    call = call.in_order(unless=FLOATING_DTYPES)
    params = call.params(SumParams, deterministic=bool(deterministic))
    return reduce_numbers(name, call, _segment_sum, params, jnp.sum)


@selectable
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
      segment_ids: ``[N]``, any integer dtype, in any order. Rows whose id is negative or at least the number of
        segments are dropped. Of rank 0, 2 or more: as in ``jax.ops``, every id labels one ``data.shape[1:]``.
      mode: what happens to ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the row is
        dropped. "clip": the id is clamped to ``[0, S - 1]``.
      plan: the rows as :func:`segment_plan` has sorted them, instead of `segment_ids` and `mode`.
      implementation: "kernel", and an error where there is none; "xla" for plain JAX; None: what was faster where
        measured, or what the context :func:`jax_baracuda.implementation` says.

    Returns:
      ``segment_ids.shape + d_output.shape[1:]`` with the dtype of `d_output`, the cotangent of the data.

    Raises:
      TypeError, IndexError, ValueError: an argument does not fit, as in :func:`segment_sum`.

    Numerical guarantees: exact. Bit-equal from run to run.

    Gradient: linear in `d_output`, whose cotangent is the :func:`segment_sum` of the cotangents. Derivatives of any
    order and in either mode exist.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> segment_ids = jnp.array([0, 0, 1, -1])  # the last row is in no segment
      >>> print(jb.segment_sum_backward(jnp.array([10.0, 20.0]), segment_ids))
      [10. 10. 20.  0.]
    """
    d_output, ids, ids_shape = canonicalize_without_data("segment_sum_backward", d_output, segment_ids, mode, plan)
    [d_rows] = SEGMENT_SUM_BACKWARD(d_output, ids)
    return shaped_as_ids(d_rows, ids_shape)


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX.


def _reference(data: Array, ids: Array, *, num_segments: int, **_: Any) -> tuple[Array]:
    wide = data.astype(accumulation_dtype(data.dtype))
    return (xla_sum(wide, ids, num_segments).astype(data.dtype),)


LEAST_EXPONENTIAL = {4: 2.0**-120, 8: 2.0**-1000}
"""By the bytes of a number: what exponentials are raised to where they are summed, so that a sum of 0 is one of no
rows."""


def _reference_of_exponentials(data: Array, ids: Array, *, num_segments: int, **_: Any) -> tuple[Array]:
    return (xla_sum(jnp.maximum(jnp.exp(data), LEAST_EXPONENTIAL[data.dtype.itemsize]), ids, num_segments),)


def _reference_backward(d_output: Array, ids: Array, **_: Any) -> tuple[Array]:
    return (gather_or_zeros(d_output, ids),)


# ----------------------------------------------------------------------------------------------------------------------
# The program of one shard, where the rows of a segment are split over devices.


def _shard_program(
    kernel: Callable[..., Sequence[Array]], axes: Mapping[str, tuple[str, ...]], data: Array, ids: Array, **params: Any
) -> Sequence[Array]:
    return (sum_over_shards(axes, data, ids, **params).astype(data.dtype),) if row_axes_of(axes) else kernel(data, ids)


def sum_over_shards(axes: Mapping[str, MeshAxes], data: Array, ids: Array, **params: Any) -> Array:
    """The sums of all rows, where these are split.

    Wide, because the sum of a shard may overflow where that of all rows does not.
    """
    [local] = SEGMENT_SUM.kernel(data.astype(accumulation_dtype(data.dtype)), ids, **params)
    return sum_over_axes(local, row_axes_of(axes), axes.get("segment", ()))


def _shard_program_of_exponentials(
    kernel: Callable[..., Sequence[Array]], axes: Mapping[str, tuple[str, ...]], data: Array, ids: Array, **_: Any
) -> Sequence[Array]:
    [local] = kernel(data, ids)
    return (sum_over_axes(local, row_axes_of(axes), axes.get("segment", ())) if row_axes_of(axes) else local,)


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel.

# H100, time of plain JAX / kernel: 0.8 up to 4 MB, 0.85 for wide rows up to 32 MB, 0.8 for wide rows that it computes
# (48 loops). It is 4 for 1.3M computed rows of 8 numbers, 7 for computed rows of heads, and up to 80 for two segments.
SUM_RULES = (
    on_gpu("launch-bound: XLA takes one launch", unordered, uncontended, at_most(bytes=4 * MB)),
    on_gpu(
        "XLA adds wide rows as it computes them",
        unordered,
        uncontended,
        fused,
        at_least(features=32),
        at_most(rank=2, bytes=1 << 30),
    ),
    on_gpu("rows in the L2 cache", unordered, uncontended, at_least(features=32), at_most(bytes=32 * MB)),
)

SEGMENT_SUM = reduction_op(
    "segment_sum",
    results={"output": CELLS},
    reference=_reference,
    dtypes=WIDE_DTYPES,
    guarantee=sum_guarantee,
    attributes=("deterministic",),
    # Two cores: 0.6 up to 1 MB (9 loops).
    xla_rules=(*SUM_RULES, on_cpu("the call of a kernel takes longer than the sum", unsorted, at_most(bytes=MB))),
    shard_program=_shard_program,
    transpose=lambda _, d_outputs, ids, *, num_segments, **params: SEGMENT_SUM_BACKWARD(d_outputs[0], ids, **params),
)

SEGMENT_SUM_OF_EXPONENTIALS = reduction_op(
    "segment_sum_of_exponentials",
    results={"output": CELLS},
    reference=_reference_of_exponentials,
    dtypes=frozenset({"float32", "float64"}),
    guarantee=sum_guarantee,
    attributes=("deterministic",),
    shard_program=_shard_program_of_exponentials,
)

# A gather. H100, time of plain JAX / kernel: 0.67, between elementwise operations 0.42 (21 loops each). Two cores: 0.3
# to 0.9 for up to 16 features.
SEGMENT_SUM_BACKWARD = gradient_op(
    "segment_sum_backward",
    operands={"d_output": CELLS, "segment_ids": IDS},
    reference=_reference_backward,
    xla_rules=(
        on_gpu("a gather, which XLA fuses with its neighbours"),
        on_cpu("a gather of narrow rows", at_most(features=16)),
    ),
    guarantee=EXACT,
    transpose=lambda d_outputs, d_data, ids, **params: SEGMENT_SUM(
        *d_data, ids, **sum_params(d_outputs[0].shape[0], **params)
    ),
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


def sum_params(num_segments: int, indices_are_sorted: bool = False, deterministic: bool = False) -> dict[str, Any]:
    """What the transpose of a gradient needs; public gradients do not know how the segments were summed."""
    return vars(SumParams(num_segments, indices_are_sorted, deterministic))


def gradient_params(params: SumParams) -> dict[str, Any]:
    """The params of the gradient of a sum, where the shape of the cotangent tells the number of segments."""
    return {"indices_are_sorted": params.indices_are_sorted, "deterministic": params.deterministic}


def count_rows(ids: Array, num_segments: int, indices_are_sorted: bool = False) -> Array:
    """The number of rows of each segment, ``[S]``."""
    return SEGMENT_SUM(
        jnp.ones(ids.shape, index_dtype(ids.shape[0])), ids, **sum_params(num_segments, indices_are_sorted)
    )[0]


def _sum_rows(
    params: SumParams,
    *,
    data: Array,
    segment_ids: Array,
    order: Array | None = None,
    sorted_ids: Array | None = None,
) -> Array:
    """The sums, in the order of a plan where there is one."""
    if order is None:
        return SEGMENT_SUM(data, segment_ids, **vars(params))[0]
    return sum_edges(data, order, sorted_ids, num_segments=params.num_segments, indices_are_sorted=True)


def _forward(params: SumParams, *, data: Array, segment_ids: Array, **order: Array) -> tuple[Array, Array]:
    return _sum_rows(params, data=data, segment_ids=segment_ids, **order), segment_ids


def _backward(params: SumParams, segment_ids: Array, d_output: Array) -> dict[str, Array]:
    [d_data] = SEGMENT_SUM_BACKWARD(d_output, segment_ids, **gradient_params(params))
    return {"data": d_data}


_segment_sum = KernelVjp("segment_sum", _sum_rows, _forward, _backward)
