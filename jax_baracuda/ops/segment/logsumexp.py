"""Logarithm of the sum of exponentials of segments. Its gradient needs the rows and the result before rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype
from jax_baracuda._core.autodiff import KernelVjp, with_twin
from jax_baracuda._core.docstrings import described_like
from jax_baracuda._core.guarantees import accumulated
from jax_baracuda._core.selection import Implementation, may_run_kernel, selectable
from jax_baracuda._core.sharding import ShardAxes, ShardKernel
from jax_baracuda.ops.segment.arguments import Mode, OutSharding, as_inexact, canonical_segments, canonicalize
from jax_baracuda.ops.segment.cells import gather_or_zeros, gather_segments, xla_max, xla_sum
from jax_baracuda.ops.segment.definitions import (
    CELLS,
    IDS,
    ROWS,
    Params,
    gradient_op,
    merge_over_shards,
    reduction_op,
)
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.sum import SEGMENT_SUM, segment_sum, sum_params


@selectable
@with_twin
@described_like(segment_sum)
def segment_logsumexp(
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
    """Logarithm of the sum of the exponentials of each segment's rows.

    ``out[s, ...] = log(sum { exp(data[n, ...]) : segment_ids[n] == s })``, without overflow.

    Args:
      data: ``[N, ...]``, any real dtype of JAX. float16, bfloat16, float32 and float64 have kernels; integers and bool
        are cast to float32 (64-bit integers under x64 to float64); other dtypes run as plain JAX. More generally, any
        shape that broadcasts to ``segment_ids.shape + data.shape[1:]``.
      plan: a :func:`segment_plan` of the rows, which replaces `segment_ids`, `num_segments` and `mode`. With a plan,
        neither this call nor its gradient sorts.

    Returns:
      ``[S, ...]`` with the dtype of `data`, or of its cast. Segments without rows hold -inf, and so do segments whose
      rows are all -inf. NaN propagates. Otherwise a row of inf gives inf.

    Numerical guarantees: the exponentials are those of differences from the segment's maximum. They are added in
    float32 (float64 for float64). The result is rounded once to the dtype. Bit-equal from run to run. The weights of
    the gradient follow from the result in float32 (float64): their relative error grows with it, to ``|out| * 2^-24``
    (``|out| * 2^-53``), so that a float32 result of 10^4 leaves them three digits. For larger numbers, take the
    gradient from :func:`segment_softmax`.

    Gradient: ``d_data[n] = d_out[s] * exp(data[n] - out[s])`` with ``s = segment_ids[n]``, where ``out`` is the result
    before rounding; 0 for dropped rows and in segments whose result is -inf.

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
    return call.reduce(_segment_logsumexp, call.params(Params))


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX.


def _reference(data: Array, ids: Array, *, num_segments: int) -> tuple[Array]:
    wide = data.astype(accumulation_dtype(data.dtype))
    maxima = xla_max(jax.lax.stop_gradient(wide), ids, num_segments)
    maxima = jnp.where(jnp.isinf(maxima), 0, maxima)
    of_rows, is_member = gather_segments(maxima, ids)
    total = xla_sum(jnp.exp(jnp.where(is_member, wide - of_rows, -jnp.inf)), ids, num_segments)
    return (jnp.where(total == 0, -jnp.inf, maxima + jnp.log(jnp.where(total == 0, 1, total))),)


def _reference_backward(d_output: Array, data: Array, output: Array, ids: Array) -> tuple[Array]:
    # 0 in place of -inf: then the exponentials of rows of -inf are 0, not NaN.
    of_rows, is_member = gather_segments(jnp.where(output == -jnp.inf, 0, output), ids)
    weights = jnp.exp(jnp.where(is_member, data.astype(output.dtype) - of_rows, -jnp.inf))
    d_rows = gather_or_zeros(d_output, ids).astype(output.dtype)
    return ((weights * d_rows).astype(d_output.dtype),)


# ----------------------------------------------------------------------------------------------------------------------
# The program of one shard, for segments whose rows are split over devices. Devices exchange cells only.


def _shard_program(kernel: ShardKernel, axes: ShardAxes, data: Array, ids: Array) -> Sequence[Array]:
    output = kernel(data, ids)
    if not axes.get("row", ()):
        return output

    def merge(outputs: Array) -> Sequence[Array]:
        return [jax.nn.logsumexp(outputs, axis=0)]

    return merge_over_shards(merge, output, axes.get("row", ()), axes.get("segment", ()))


# ----------------------------------------------------------------------------------------------------------------------
# Ops. The first has a native kernel. XLA fuses the gathers and the arithmetic of the second, which needs none.


def _weighted_sum(rows: Array, data: Array, output: Array, ids: Array, **params: Any) -> Sequence[Array]:
    """Sums of rows times ``exp(data - output)``: the tangent, and the transpose of the gradient."""
    [weights] = SEGMENT_LOGSUMEXP_BACKWARD(jnp.ones_like(output), data, output, ids, **params)
    params = sum_params(output.shape[0], **params, deterministic=may_run_kernel())
    return SEGMENT_SUM(weights * rows.astype(weights.dtype), ids, **params)


def _tangent(
    d_data: Array, operands: Sequence[Array], results: Sequence[Array], *, indices_are_sorted: bool
) -> Sequence[Array]:
    data, ids = operands
    return _weighted_sum(d_data, data, *results, ids, indices_are_sorted=indices_are_sorted)


def _transpose_backward(
    d_outputs: Sequence[Any], d_data: Sequence[Array], *others: Array, **params: Any
) -> Sequence[Array]:
    return [x.astype(d_outputs[0].dtype) for x in _weighted_sum(*d_data, *others, **params)]


SEGMENT_LOGSUMEXP = reduction_op(
    "segment_logsumexp",
    results={"output": CELLS},
    result_dtypes=lambda data, segment_ids: [accumulation_dtype(data.dtype)],
    reference=_reference,
    dtypes=FLOATING_DTYPES,
    guarantee=accumulated,
    shard_program=_shard_program,
    tangent=_tangent,
)

SEGMENT_LOGSUMEXP_BACKWARD = gradient_op(
    "segment_logsumexp_backward",
    operands={"d_output": CELLS, "data": ROWS, "output": CELLS, "segment_ids": IDS},
    reference=_reference_backward,
    program=_reference_backward,
    guarantee=accumulated,
    transpose=_transpose_backward,
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


def _forward(params: Params, *, data: Array, segment_ids: Array) -> tuple[Array, tuple[Array, ...]]:
    [output] = SEGMENT_LOGSUMEXP(data, segment_ids, **vars(params))
    return output.astype(data.dtype), (data, output, segment_ids)


def _backward(params: Params, residuals: tuple[Array, ...], d_output: Array) -> dict[str, Array]:
    [d_data] = SEGMENT_LOGSUMEXP_BACKWARD(d_output, *residuals, indices_are_sorted=params.indices_are_sorted)
    return {"data": d_data}


_segment_logsumexp = KernelVjp("segment_logsumexp", _forward, _backward)
