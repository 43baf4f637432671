"""Mean of segments. Its gradient needs the ids and the number of rows of each segment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.functions import Params
from jax_baracuda._core.guarantees import quotients
from jax_baracuda._core.op import Op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.rules import on_cpu, on_gpu
from jax_baracuda._core.selection import Implementation
from jax_baracuda._core.sharding import ShardAxes, ShardKernel
from jax_baracuda.ops.segment.arguments import (
    Accumulator,
    Mode,
    OutSharding,
    as_inexact,
    canonical_accumulator,
    canonical_cotangent,
    canonical_segments,
    canonicalize,
)
from jax_baracuda.ops.segment.cells import gather_or_zeros, over_counts, xla_sum
from jax_baracuda.ops.segment.definitions import (
    BELOW_FLOAT64,
    CELLS,
    COUNTS,
    IDS,
    float64_guarantee,
    gradient_op,
    reduction_op,
    sum_guarantee,
)
from jax_baracuda.ops.segment.ids import check_numbered, index_dtype
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.sum import segment_sum, segment_sum_backward
from jax_baracuda.ops.segment.sum_ops import (
    RULES_IN_FLOAT64,
    SUM_RULES,
    count_rows,
    gradient_params,
    sum_by_plan,
    sum_op,
    sum_over_shards,
    wide_sums,
)


@public_function(segment_sum)
def segment_mean(
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    deterministic: bool = False,
    accumulator: Accumulator | None = None,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Mean of the rows of each segment: ``out[s, ...] = mean { data[n, ...] : segment_ids[n] == s }``.

    Args:
      data: ``[N, ...]``, any dtype of JAX. float16, bfloat16, float32 and float64 have kernels; integers and bool are
        cast as by :func:`jax.numpy.mean`, to float32 (64-bit integers under x64 to float64); other dtypes run as plain
        JAX. More generally, any shape that broadcasts to ``segment_ids.shape + data.shape[1:]``.

    Returns:
      ``[S, ...]`` with the dtype of `data`, or of its cast. Empty segments hold 0.

    Numerical guarantees: the sum is accumulated in float32 (float64 for float64, or with `accumulator`), divided there
    by the exact number of rows, and rounded once to the dtype. (Where devices share a segment, the sum of each device
    is rounded to float32, and these sums are added in float32.) Bit-equal from run to run, except on GPUs (see
    `deterministic`).

    Gradient: ``d_data[n] = d_out[s] / number of rows of s`` with ``s = segment_ids[n]``, 0 for dropped rows; `data` is
    not kept for the backward pass.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> segment_ids = jnp.array([0, 0, 2])
      >>> print(jb.segment_mean(data, segment_ids, num_segments=3))
      [[2. 3.]
       [0. 0.]
       [5. 6.]]
    """
    name = "segment_mean"
    segments = canonical_segments(name, segment_ids, num_segments, indices_are_sorted, mode, plan)
    check_numbered(name, "rows", segments.ids.shape[0])
    call = canonicalize(segments, data, out_sharding)
    call = call.with_data(as_inexact(call.data))
    accumulator = canonical_accumulator(name, accumulator, call.data.dtype)
    call = call.sorted_by_plan(unless=FLOATING_DTYPES if accumulator is None else frozenset())
    return call.reduce(_segment_mean, call.params(deterministic=deterministic, accumulator=accumulator))


@public_function(segment_sum_backward, segment_sum, has_twin=False)
def segment_mean_backward(
    d_output: ArrayLike,
    segment_ids: ArrayLike | None = None,
    *,
    mode: Mode = None,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Gradient of :func:`segment_mean`: ``d_data[n, ...] = d_output[s, ...] / number of rows of s``, s the id of row n.

    Args:
      d_output: ``[S, ...]``, the cotangent of the segment means, a floating dtype.

    Returns:
      ``segment_ids.shape + d_output.shape[1:]`` with the dtype of `d_output`, the cotangent of the data. Dropped rows
      get 0.

    Numerical guarantees: each element is ``d_output`` divided by the exact number of rows: rounded once on CPUs, within
    two units in the last place on GPUs, where XLA divides. Bit-equal from run to run.

    Gradient: linear in `d_output`, whose cotangent is the :func:`segment_mean` of the cotangents. Derivatives of any
    order and in either mode exist.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> segment_ids = jnp.array([0, 0, 1, -1])  # the last row is in no segment
      >>> print(jb.segment_mean_backward(jnp.array([10.0, 20.0]), segment_ids))
      [ 5.  5. 20.  0.]
    """
    name = "segment_mean_backward"
    d_output, segments = canonical_cotangent(name, d_output, segment_ids, False, mode, plan)
    check_numbered(name, "rows", segments.ids.shape[0])
    counted_ids = segments.ids if plan is None else plan.segment_ids
    count = count_rows(counted_ids, d_output.shape[0], indices_are_sorted=plan is not None)
    [d_rows] = SEGMENT_MEAN_BACKWARD(d_output, count, segments.ids)
    return segments.shaped_as_ids(d_rows)


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX.

_MIN_ROWS_TO_DIVIDE_FIRST = 4
"""Per segment: from this many on, it is faster to write the segments' quotients before gathering them."""


def _reference(accumulator: Accumulator | None, data: Array, ids: Array, *, num_segments: int) -> tuple[Array, Array]:
    total = wide_sums(accumulator, data, ids, num_segments)
    count = xla_sum(jnp.ones(ids.shape, index_dtype(ids.shape[0])), ids, num_segments)
    return over_counts(total, count).astype(data.dtype), count


def _reference_backward(d_output: Array, count: Array, ids: Array) -> tuple[Array]:
    quotients = over_counts(d_output.astype(accumulation_dtype(d_output.dtype)), count).astype(d_output.dtype)
    shapes = (*ids.shape, d_output.shape[0])
    if jax_versions.is_static_shape(shapes) and ids.shape[0] >= _MIN_ROWS_TO_DIVIDE_FIRST * d_output.shape[0]:
        quotients = jax.lax.optimization_barrier(quotients)  # fused with the gather, the division would run per row
    return (gather_or_zeros(quotients, ids),)


# ----------------------------------------------------------------------------------------------------------------------
# The program of one shard, for segments whose rows are split over devices.


def _shard_program(
    accumulator: Accumulator | None, kernel: ShardKernel, axes: ShardAxes, data: Array, ids: Array, **params: Any
) -> Sequence[Array]:
    if not axes.get("row", ()):
        return kernel(data, ids)
    total = sum_over_shards(axes, data, ids, accumulator=accumulator, **params)
    count = sum_over_shards(axes, jnp.ones(ids.shape, jnp.int32), ids, **params)
    return divided_by_counts(total, count, SEGMENT_MEAN_BACKWARD.kernel).astype(data.dtype), count


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel.


def _mean_op(name: str, accumulator: Accumulator | None, **fields: Any) -> Op:
    return reduction_op(
        name,
        results={"output": CELLS, "count": COUNTS},
        result_dtypes=lambda data, segment_ids: [data.dtype, index_dtype(segment_ids.shape[0])],
        reference=functools.partial(_reference, accumulator),
        attributes=("indices_are_sorted", "deterministic"),
        shard_program=functools.partial(_shard_program, accumulator),
        transposes={
            ("data",): lambda _, d_results, ids, *, num_segments, **params: SEGMENT_MEAN_BACKWARD(
                d_results[0],
                count_rows(ids, num_segments),
                ids,
                **gradient_params({**params, "accumulator": accumulator}),
            ),
        },
        **fields,
    )


SEGMENT_MEAN = _mean_op("segment_mean", None, dtypes=FLOATING_DTYPES, guarantee=sum_guarantee, xla_rules=SUM_RULES)

SEGMENT_MEAN_IN_FLOAT64 = _mean_op(
    "segment_mean_in_float64",
    "float64",
    dtypes=BELOW_FLOAT64,
    guarantee=float64_guarantee,
    xla_rules=RULES_IN_FLOAT64,
)

# A gather of quotients. H100, time of plain JAX / kernel: 0.54, between elementwise operations 0.42 (33 loops each).
# Two cores: 0.52 (8 loops).
SEGMENT_MEAN_BACKWARD = gradient_op(
    "segment_mean_backward",
    operands={"d_output": CELLS, "count": COUNTS, "segment_ids": IDS},
    reference=_reference_backward,
    xla_rules=(on_gpu("a gather, which XLA fuses with its neighbours"), on_cpu("a gather")),
    guarantee=quotients,
    transposes={
        ("d_output",): lambda d_outputs, d_data, count, ids, *, accumulator=None, **params: (
            _sum_over_counts(d_data[0], count, ids, accumulator, num_segments=d_outputs[0].shape[0], **params),
        ),
    },
)


def _sum_over_counts(d_data: Array, count: Array, ids: Array, accumulator: Accumulator | None, **params: Any) -> Array:
    """The transpose of the gradient, for any count, which need not be the number of rows."""
    [total] = sum_op(accumulator)(d_data.astype(accumulation_dtype(d_data.dtype)), ids, **params)
    return divided_by_counts(total, count).astype(d_data.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


def divided_by_counts(
    cells: Array, counts: Array, divide: Callable[..., Sequence[Array]] = SEGMENT_MEAN_BACKWARD
) -> Array:
    """Cells divided by the numbers of their rows, with the guarantee of :data:`SEGMENT_MEAN_BACKWARD`.

    Args:
      divide: the op of the gradient of means or, in the program of a shard, its kernel.
    """
    segments = jnp.arange(cells.shape[0], dtype=index_dtype(cells.shape[0]))
    [quotients] = divide(cells, jnp.maximum(counts, 1), segments)
    return quotients


def _forward(params: Params, *, data: Array, segment_ids: Array, **plan: Array) -> tuple[Array, tuple[Array, Array]]:
    if not plan:
        op = SEGMENT_MEAN if params["accumulator"] is None else SEGMENT_MEAN_IN_FLOAT64
        output, count = op(data, segment_ids, **params.without("accumulator"))
    else:
        total = sum_by_plan(data, **plan, num_segments=params["num_segments"], is_wide=True)
        count = count_rows(plan["sorted_ids"], params["num_segments"], indices_are_sorted=True)
        output = divided_by_counts(total, count).astype(data.dtype)
    return output, (count, segment_ids)


def _backward(params: Params, residuals: tuple[Array, Array], d_output: Array) -> dict[str, Array]:
    [d_data] = SEGMENT_MEAN_BACKWARD(d_output, *residuals, **gradient_params(params))
    return {"data": d_data}


_segment_mean = KernelVjp("segment_mean", _forward, _backward)
