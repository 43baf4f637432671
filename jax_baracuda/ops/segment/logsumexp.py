"""Logarithm of the sum of exponentials of segments.

The kernel returns the maximum of each cell and the total of exp(x - maximum), from which value and gradient follow. The
logarithm alone would not do: of large numbers, it keeps too few digits of the total for the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.functions import Params
from jax_baracuda._core.guarantees import accumulated
from jax_baracuda._core.public import public_function
from jax_baracuda._core.rules import at_most_64_features, few_numbers, on_gpu, uncontended, unordered
from jax_baracuda._core.selection import Implementation
from jax_baracuda._core.sharding import MeshAxes, ShardAxes, ShardKernel
from jax_baracuda.ops.segment.arguments import Mode, OutSharding, as_inexact, canonical_segments, canonicalize
from jax_baracuda.ops.segment.cells import gather_or_zeros, gather_segments, xla_max, xla_sum
from jax_baracuda.ops.segment.definitions import (
    CELLS,
    IDS,
    ROWS,
    gradient_op,
    merge_over_shards,
    reduction_op,
    sum_guarantee,
)
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.sum import segment_sum
from jax_baracuda.ops.segment.sum_ops import SEGMENT_SUM


@public_function(segment_sum)
def segment_logsumexp(
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Logarithm of the sum of the exponentials of each segment's rows.

    ``out[s, ...] = log(sum { exp(data[n, ...]) : segment_ids[n] == s })``, without overflow.

    Args:
      data: ``[N, ...]``, any real dtype of JAX. float16, bfloat16, float32 and float64 have kernels; integers and bool
        are cast to float32 (64-bit integers under x64 to float64); other dtypes run as plain JAX. More generally, any
        shape that broadcasts to ``segment_ids.shape + data.shape[1:]``.
      plan: a :func:`segment_plan` of the rows, which replaces `segment_ids`, `num_segments` and `mode`. With a plan,
        neither this call nor its gradient sorts. Calls trust it; :meth:`SegmentPlan.validate` checks it.

    Returns:
      ``[S, ...]`` with the dtype of `data`, or of its cast. Segments without rows hold -inf, and so do segments whose
      rows are all -inf. NaN propagates. Otherwise a row of inf gives inf.

    Numerical guarantees: the exponentials are those of differences from the segment's maximum. They are added in
    float32 (float64 for float64). The result is rounded once to the dtype, and so is the gradient. Bit-equal from run
    to run, except where plain JAX serves a call on GPUs (see `deterministic`), as it does derivatives beyond the first.

    Gradient: ``d_data[n] = d_out[s] * exp(data[n] - m[s]) / sum { exp(data[k] - m[s]) : segment_ids[k] == s }`` with
    ``s = segment_ids[n]`` and the maximum m of the segment, so its errors do not grow with the size of `data`; 0 for
    dropped rows and in segments whose result is -inf.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data, segment_ids = jnp.array([1000.0, 1000.0, 3.0]), jnp.array([0, 0, 2])
      >>> print([f"{x:.3f}" for x in jb.segment_logsumexp(data, segment_ids, num_segments=3)])
      ['1000.693', '-inf', '3.000']
    """
    name = "segment_logsumexp"
    segments = canonical_segments(name, segment_ids, num_segments, indices_are_sorted, mode, plan)
    call = canonicalize(segments, data, out_sharding)
    if jnp.issubdtype(call.data.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: data must have a real dtype, got {call.data.dtype}")
    call = call.with_data(as_inexact(call.data)).sorted_by_plan()
    return call.reduce(_segment_logsumexp, call.params(deterministic=deterministic))


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX. The maximum counts as a constant in derivatives: the value does not depend on the number that
# is subtracted.


def _reference(data: Array, ids: Array, *, num_segments: int) -> tuple[Array, Array]:
    wide = data.astype(accumulation_dtype(data.dtype))
    maxima = xla_max(jax.lax.stop_gradient(wide), ids, num_segments)
    of_rows, is_member = gather_segments(_subtracted(maxima), ids)
    exponentials = jnp.exp(jnp.where(is_member, wide - of_rows, -jnp.inf))
    return maxima, xla_sum(exponentials, ids, num_segments)


def _subtracted(maxima: Array) -> Array:
    """The maximum, or 0 where it is -inf: -inf - -inf would be NaN."""
    return jnp.where(maxima == -jnp.inf, 0, maxima)


def _logarithms(maxima: Array, totals: Array) -> Array:
    is_finite = jnp.isfinite(maxima)
    return jnp.where(is_finite, maxima + jnp.log(jnp.where(is_finite, totals, 1)), maxima)


def _reference_backward(scales: Array, data: Array, maxima: Array, ids: Array) -> tuple[Array]:
    """``scales * exp(data - maxima)``"""
    of_rows, is_member = gather_segments(_subtracted(maxima), ids)
    exponentials = jnp.exp(jnp.where(is_member, data.astype(maxima.dtype) - of_rows, -jnp.inf))
    return ((exponentials * gather_or_zeros(scales, ids)).astype(data.dtype),)


# ----------------------------------------------------------------------------------------------------------------------
# The program of one shard, for segments whose rows are split over devices. Devices exchange cells only.


def states_over_shards(states: Sequence[Array], row_axes: MeshAxes, segment_axes: MeshAxes = ()) -> Sequence[Array]:
    """The maxima and totals over all shards. If the row axes also split the segments, those of the own segments."""

    def merge(maxima: Array, totals: Array) -> Sequence[Array]:
        largest = maxima.max(axis=0)
        return largest, (totals * jnp.exp(maxima - _subtracted(largest))).sum(axis=0)

    return merge_over_shards(merge, states, row_axes, segment_axes)


def _shard_program(kernel: ShardKernel, axes: ShardAxes, data: Array, ids: Array) -> Sequence[Array]:
    states, row_axes = kernel(data, ids), axes.get("row", ())
    return states_over_shards(states, row_axes, axes.get("segment", ())) if row_axes else states


# ----------------------------------------------------------------------------------------------------------------------
# Ops. The first has a native kernel. XLA fuses the gathers and the arithmetic of the second, which needs none.


def _weighted_sum(rows: Array, data: Array, maxima: Array, ids: Array, **flags: bool) -> Sequence[Array]:
    """Sums of rows times ``exp(data - maxima)``: the tangent of the totals, and the transpose of the gradient."""
    wide = data.astype(maxima.dtype)
    [weights] = SEGMENT_LOGSUMEXP_BACKWARD(jnp.ones_like(maxima), wide, maxima, ids, **flags)
    return SEGMENT_SUM(weights * rows.astype(weights.dtype), ids, num_segments=maxima.shape[0], **flags)


def _tangent(
    d_data: Array,
    operands: Sequence[Array],
    results: Sequence[Array],
    *,
    indices_are_sorted: bool,
    deterministic: bool,
) -> Sequence[Array]:
    data, ids = operands
    maxima, _ = results
    flags = {"indices_are_sorted": indices_are_sorted, "deterministic": deterministic}
    [d_totals] = _weighted_sum(d_data, data, maxima, ids, **flags)
    return jnp.zeros_like(maxima), d_totals


SEGMENT_LOGSUMEXP = reduction_op(
    "segment_logsumexp",
    results={"maxima": CELLS, "totals": CELLS},
    result_dtypes=lambda data, segment_ids: [accumulation_dtype(data.dtype)] * 2,
    reference=_reference,
    # H200, time of plain JAX / kernel: 0.2 to 0.8 up to 2.5M numbers, 0.9 to 1.4 from 5M on; 1.1 for 10,000 rows of 32.
    xla_rules=(on_gpu("XLA sorts no rows", unordered, uncontended, few_numbers, at_most_64_features),),
    dtypes=FLOATING_DTYPES,
    guarantee=sum_guarantee,
    shard_program=_shard_program,
    tangent=_tangent,
)

SEGMENT_LOGSUMEXP_BACKWARD = gradient_op(
    "segment_logsumexp_backward",
    operands={"scales": CELLS, "data": ROWS, "maxima": CELLS, "segment_ids": IDS},
    result_dtypes=lambda scales, data, *_: [data.dtype],
    reference=_reference_backward,
    program=_reference_backward,
    guarantee=accumulated,
    transposes={("scales",): lambda _, d_results, *others, **params: _weighted_sum(*d_results, *others, **params)},
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


def _forward(params: Params, *, data: Array, segment_ids: Array) -> tuple[Array, tuple[Array, ...]]:
    maxima, totals = SEGMENT_LOGSUMEXP(data, segment_ids, **params)
    return _logarithms(maxima, totals).astype(data.dtype), (data, maxima, totals, segment_ids)


def _backward(params: Params, residuals: tuple[Array, ...], d_output: Array) -> dict[str, Array]:
    data, maxima, totals, segment_ids = residuals
    scales = d_output.astype(maxima.dtype) / jnp.where(jnp.isfinite(maxima), totals, 1)
    flags = {name: params[name] for name in ("indices_are_sorted", "deterministic")}
    [d_data] = SEGMENT_LOGSUMEXP_BACKWARD(scales, data, maxima, segment_ids, **flags)
    return {"data": d_data}


_segment_logsumexp = KernelVjp("segment_logsumexp", _forward, _backward)
