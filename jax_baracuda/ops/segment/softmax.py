"""Softmax over the rows of each segment. Its gradient needs the result, not the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype, as_array, floating_array
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.functions import Params
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.rules import at_most_4_features, at_most_64_features, in_cache, on_gpu, uncontended, unordered
from jax_baracuda._core.selection import Implementation
from jax_baracuda._core.sharding import ShardAxes, ShardKernel
from jax_baracuda.ops.segment.arguments import Mode, OutSharding, canonical_segments, canonicalize, check_like
from jax_baracuda.ops.segment.cells import gather_segments, xla_sum
from jax_baracuda.ops.segment.definitions import IDS, NOTHING_TO_VECTORISE, ROWS, SEGMENT_FIELDS, sum_guarantee
from jax_baracuda.ops.segment.logsumexp import SEGMENT_LOGSUMEXP, states_over_shards
from jax_baracuda.ops.segment.plan import SegmentPlan, unpermuted
from jax_baracuda.ops.segment.sum import segment_sum
from jax_baracuda.ops.segment.sum_ops import sum_over_shards


@public_function(segment_sum)
def segment_softmax(
    logits: ArrayLike,
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
    """Softmax over the rows of each segment.

    ``out[n, ...] = exp(logits[n, ...] - m[s, ...]) / sum { exp(logits[k, ...] - m[s, ...]) : segment_ids[k] == s }``,
    where ``s = segment_ids[n]`` and m is the :func:`segment_max` of the logits.

    Args:
      logits: ``[N, ...]``, any real floating dtype of JAX. float16, bfloat16, float32 and float64 have kernels; other
        dtypes run as plain JAX. More generally, any shape that broadcasts to ``segment_ids.shape + logits.shape[1:]``.

    Returns:
      ``segment_ids.shape + logits.shape[1:]`` (the shape of `logits`) with the dtype of `logits`. Dropped rows get 0.

    Numerical guarantees: computed in float32 (float64 for float64) and rounded once to the dtype; nothing overflows. A
    row of -inf gets 0. A segment that holds a NaN, whose maximum is +inf, or whose rows are all -inf gives NaN, as in
    :func:`jax.nn.softmax`. Bit-equal from run to run, except where plain JAX serves a call on GPUs (see
    `deterministic`).

    Gradient: ``d_logits[n] = out[n] * (d_out[n] - sum { out[k] * d_out[k] : segment_ids[k] == segment_ids[n] })``, 0
    for dropped rows; the result and the ids are kept for the backward pass, not the logits.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> logits, segment_ids = jnp.array([1.0, 1.0, 7.0]), jnp.array([0, 0, 1])
      >>> print(jb.segment_softmax(logits, segment_ids, num_segments=2))
      [0.5 0.5 1. ]
    """
    name = "segment_softmax"
    segments = canonical_segments(name, segment_ids, num_segments, indices_are_sorted, mode, plan)
    call = canonicalize(segments, floating_array(name, "logits", logits), out_sharding, data_name="logits")
    ordered = call.sorted_by_plan()

    def softmax(params: Params, **arrays: Array) -> Array:
        return segments.shaped_as_ids(_segment_softmax(params, **arrays))

    probabilities = ordered.reduce(softmax, ordered.params(deterministic=deterministic))
    return probabilities if plan is None else unpermuted(probabilities, plan.edge_order)


@public_function(segment_sum, has_twin=False)
def segment_softmax_backward(
    d_output: ArrayLike,
    probabilities: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Gradient of :func:`segment_softmax`: ``d_logits = p * (d_p - sum of p * d_p over the row's segment)``.

    Args:
      d_output: ``[N, ...]``, the cotangent of the probabilities; a floating dtype. Dtype and shape are those of
        `probabilities`.
      probabilities: ``[N, ...]``, the result of :func:`segment_softmax`.

    Returns:
      ``[N, ...]``, the cotangent of the logits. Dropped rows get 0.

    Numerical guarantees: computed in float32 (float64 for float64) and rounded once to the dtype. Bit-equal from run to
    run, except where plain JAX serves a call on GPUs (see `deterministic`).

    Gradient: linear in `d_output`, quadratic in `probabilities`. Derivatives of any order and in either mode exist.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> probabilities, segment_ids = jnp.array([0.5, 0.5, 1.0]), jnp.array([0, 0, 1])
      >>> d_output = jnp.array([4.0, 0.0, 8.0])
      >>> print(jb.segment_softmax_backward(d_output, probabilities, segment_ids, num_segments=2))
      [ 1. -1.  0.]
    """
    name = "segment_softmax_backward"
    d_output = as_array(name, "d_output", d_output)
    segments = canonical_segments(name, segment_ids, num_segments, indices_are_sorted, mode, plan)
    call = canonicalize(segments, probabilities, data_name="probabilities")
    shape = (*call.ids_shape, *call.data.shape[1:])
    check_like(name, "d_output", d_output, "probabilities", call.data, shape)
    check_like(name, "probabilities", call.data, "d_output", d_output, shape)
    ordered = call.sorted_by_plan()
    params = ordered.params(deterministic=deterministic)
    rows = (x.rows(x.data) for x in (ordered, call.with_data(d_output).sorted_by_plan()))
    [d_rows] = SEGMENT_SOFTMAX_BACKWARD(*rows, ordered.ids, **params)
    return segments.shaped_as_ids(d_rows if plan is None else unpermuted(d_rows, plan.edge_order))


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX.


def _probabilities(logits: Array, ids: Array, maxima: Array, totals: Array) -> Array:
    """``exp(logits - maximum) / total`` of each row's segment, 0 for dropped rows."""
    (maxima, is_member), (totals, _) = gather_segments(maxima, ids), gather_segments(totals, ids)
    weights = jnp.exp(jnp.where(is_member, logits.astype(maxima.dtype) - maxima, -jnp.inf))
    return (weights / jnp.where(is_member, totals, 1)).astype(logits.dtype)


def _reference(logits: Array, ids: Array, *, num_segments: int) -> tuple[Array]:
    return (_probabilities(logits, ids, *SEGMENT_LOGSUMEXP.reference(logits, ids, num_segments=num_segments)),)


def _weighted_cotangents(probabilities: Array, d_output: Array) -> Array:
    dtype = accumulation_dtype(probabilities.dtype)
    return probabilities.astype(dtype) * d_output.astype(dtype)


def _softmax_gradient(probabilities: Array, d_output: Array, ids: Array, means: Array) -> Array:
    """`means` are the segments' sums of :func:`_weighted_cotangents`."""
    means, is_member = gather_segments(means, ids)
    gradient = probabilities.astype(means.dtype) * (d_output.astype(means.dtype) - means)
    return jnp.where(is_member, gradient, 0).astype(probabilities.dtype)


def _reference_backward(probabilities: Array, d_output: Array, ids: Array, *, num_segments: int) -> tuple[Array]:
    means = xla_sum(_weighted_cotangents(probabilities, d_output), ids, num_segments)
    return (_softmax_gradient(probabilities, d_output, ids, means),)


# ----------------------------------------------------------------------------------------------------------------------
# Programs of one shard, for segments whose rows are split over devices. Devices exchange cells only.


def _shard_program(
    kernel: ShardKernel,
    axes: ShardAxes,
    logits: Array,
    ids: Array,
    *,
    num_segments: int,
    indices_are_sorted: bool,
) -> Sequence[Array]:
    row_axes = axes.get("row", ())
    if not row_axes:
        return kernel(logits, ids)
    states = SEGMENT_LOGSUMEXP.kernel(logits, ids, num_segments=num_segments, indices_are_sorted=indices_are_sorted)
    return (_probabilities(logits, ids, *states_over_shards(states, row_axes)),)


def _shard_backward(
    kernel: ShardKernel, axes: ShardAxes, probabilities: Array, d_output: Array, ids: Array, **params: Any
) -> Sequence[Array]:
    if not axes.get("row", ()):
        return kernel(probabilities, d_output, ids)
    means = sum_over_shards(axes, _weighted_cotangents(probabilities, d_output), ids, **params)
    return (_softmax_gradient(probabilities, d_output, ids, means),)


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel.

_FIELDS: Any = SEGMENT_FIELDS | {
    "dtypes": FLOATING_DTYPES,
    "guarantee": sum_guarantee,
    "attributes": ("num_segments", "indices_are_sorted"),
}

SEGMENT_SOFTMAX = define_op(
    name="segment_softmax",
    operands={"logits": ROWS, "segment_ids": IDS},
    results={"probabilities": ROWS},
    reference=_reference,
    # H200, time of plain JAX / kernel: 0.15 to 0.9 for rows of 4 and 8 up to 64 MB, 0.4 to 1.1 for rows of 33 and 64;
    # 0.6 to 0.7 for 1M to 20M rows of 1 and 2 (50 loops). Two cores: 0.5 for single features, gradients 0.66.
    xla_rules=(
        on_gpu("XLA sorts no rows", unordered, uncontended, in_cache),
        on_gpu("XLA adds narrow rows in less time than a sort", unordered, uncontended, at_most_4_features),
        NOTHING_TO_VECTORISE,
    ),
    shard_program=_shard_program,
    # The Jacobian is symmetric, so the backward op also maps tangents.
    tangent=lambda d_logits, operands, results, **params: SEGMENT_SOFTMAX_BACKWARD(
        *results, d_logits, operands[1], **params
    ),
    **_FIELDS,
)

SEGMENT_SOFTMAX_BACKWARD = define_op(
    name="segment_softmax_backward",
    operands={"probabilities": ROWS, "d_output": ROWS, "segment_ids": IDS},
    results={"d_logits": ROWS},
    reference=_reference_backward,
    # H200: 0.2 for rows of 1 to 3, 0.3 for 4, 0.4 to 0.8 for 8 to 64 (20,000 to 20M rows, 40 loops).
    xla_rules=(on_gpu("XLA sorts no rows", unordered, uncontended, at_most_64_features), NOTHING_TO_VECTORISE),
    shard_program=_shard_backward,
    transposes={
        ("d_output",): lambda _, d_results, probabilities, ids, **params: SEGMENT_SOFTMAX_BACKWARD(
            probabilities, *d_results, ids, **params
        ),
    },
    **_FIELDS,
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


def _forward(params: Params, *, data: Array, segment_ids: Array) -> tuple[Array, tuple[Array, Array]]:
    [probabilities] = SEGMENT_SOFTMAX(data, segment_ids, **params)
    return probabilities, (probabilities, segment_ids)


def _backward(params: Params, residuals: tuple[Array, Array], d_output: Array) -> dict[str, Array]:
    probabilities, segment_ids = residuals
    [d_logits] = SEGMENT_SOFTMAX_BACKWARD(probabilities, d_output, segment_ids, **params)
    return {"data": d_logits}


_segment_softmax = KernelVjp("segment_softmax", _forward, _backward)
