"""Segment reductions: rows of an array reduced by an integer label, with the semantics of ``jax.ops.segment_*``.

They are what message passing on graphs, point clouds and recommender models aggregate with: maximum, minimum, sum,
mean and product of the rows of each segment, the row that attains the maximum or minimum, and softmax over the rows of
each segment. Each forward kernel keeps what makes its gradient cheapest. The maximum notes its *winner* on the way
(which row attains it, or how many rows share it), so the backward kernel looks at the data again only where rows tie;
sum and mean need the ids alone; the product is kept as mantissa and exponent, out of which any one row can be divided.

The file reads top to bottom: public functions, reference in plain JAX, ops (one per native kernel), derivative rules,
canonicalisation of arguments, examples.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import FLOATING_DTYPES, as_array, compute_dtype, in_automatic_mode, split_as, split_like
from jax_baracuda._core.autodiff import Differentiable
from jax_baracuda._core.batch import batch_of, over_batch
from jax_baracuda._core.docstrings import with_shared_parts
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.op import Op

TieBreak = Literal["split", "first"]
Mode = jax.lax.GatherScatterMode | str | None
OutSharding = NamedSharding | PartitionSpec | None

_documented = with_shared_parts(
    {
        "ordered_data": """\
data: ``[N, ...]``, any dtype of JAX with an order. bool, integers of 8 to 64 bits, float16, bfloat16, float32 and
  float64 have kernels; other dtypes run as plain JAX. More generally, any shape that broadcasts to
  ``segment_ids.shape + data.shape[1:]``.""",
        "row_numbers": """\
``[S, ...]``, int32: a row number in ``[0, N)``, or N for an empty segment. Where `segment_ids` is not of rank 1,
rows are numbered through all ids in order, and N is the number of ids.""",
        "gradient_of_extremum": """\
Gradient: ``d_data[n] = d_out[segment_ids[n]] * share``, where the share is ``1 / number of tied rows`` (the count
is an exact integer) or 1 for the winner, and exactly 0 for every other row, whatever the cotangent. A segment that
holds a NaN passes no gradient.""",
        "segment_ids": """\
segment_ids: ``[N]``, any integer dtype, in any order. Rows whose id is negative or at least the number of segments
  are dropped. Of rank 0, 2 or more: as in ``jax.ops``, every id labels one ``data.shape[1:]``.""",
        "reduction_arguments": """\
segment_ids: ``[N]``, any integer dtype, in any order. Rows whose id is negative or at least `num_segments` are
  dropped. Of rank 0, 2 or more: as in ``jax.ops``, every id labels one ``data.shape[1:]``.
num_segments: number of segments S, static under ``jit``. Default: ``max(segment_ids) + 1``.
indices_are_sorted: promises that `segment_ids` is non-decreasing, which is faster on GPUs. If the promise is
  false, the result may hold anything.
unique_indices: accepted for compatibility; nothing depends on it.""",
        "mode": """\
mode: what happens to ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the row is
  dropped. "clip": the id is clamped to ``[0, S - 1]``.""",
        "mode_and_sharding": """\
mode: what happens to ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the row is
  dropped. "clip": the id is clamped to ``[0, S - 1]``.
out_sharding: sharding of the result, for meshes with explicit axes.""",
        "deterministic": """\
deterministic: on GPUs, sums of floating numbers in unsorted segments are added in an order that varies from run to
  run, unless this is True. Everything else has the same bits in every run anyway.""",
        "raises": """\
TypeError: an argument is no array or has an unsuitable dtype.
IndexError: `segment_ids` is boolean.
ValueError: shapes do not fit, `num_segments` is negative, an option is unknown, or `num_segments` is None and there
  are no ids.
jax.errors.ConcretizationTypeError: `num_segments` is None and `segment_ids` is traced.""",
        "forward_mode": """\
Derivatives of any order exist. ``jax.jvp`` and ``jax.jacfwd`` of this function need its twin of the same name in
:mod:`jax_baracuda.forward_mode`.""",
    }
)


# ----------------------------------------------------------------------------------------------------------------------
# Maximum and minimum.


@_documented
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
      {ordered_data}
      {reduction_arguments}
      bucket_size: as in :func:`jax.ops.segment_max`, rows are reduced in buckets of this size, and then the buckets.
        The maximum is the same; under ``tie_break="split"`` tied buckets share the gradient equally first.
      {mode_and_sharding}
      tie_break: who gets the gradient where several rows attain the maximum. "split": all of them, in equal shares,
        as in JAX; the identity of an empty segment (-inf) takes part where the maximum equals it. "first": the
        lowest of these rows, all of it; `data` is then not kept for the backward pass.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Empty segments hold -inf, the least integer of the dtype, or False.

    Raises:
      {raises}

    Numerical guarantees: exact. NaN propagates; ``max(-0, +0)`` is ``+0`` in either order; subnormal numbers are
    numbers, not zeros. Bit-equal from run to run and independent of scheduling.

    {gradient_of_extremum}
    {forward_mode}
    """
    name = "segment_max"
    call = _canonicalize(name, data, segment_ids, num_segments, indices_are_sorted, mode, out_sharding, bucket_size)
    return _reduce_extremum(name, call, _segment_max, jnp.max, tie_break)


@_documented
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
      {ordered_data}
      {reduction_arguments}
      bucket_size: as in :func:`jax.ops.segment_min`, rows are reduced in buckets of this size, and then the buckets.
        The minimum is the same; under ``tie_break="split"`` tied buckets share the gradient equally first.
      {mode_and_sharding}
      tie_break: who gets the gradient where several rows attain the minimum. "split": all of them, in equal shares,
        as in JAX; the identity of an empty segment (+inf) takes part where the minimum equals it. "first": the
        lowest of these rows, all of it; `data` is then not kept for the backward pass.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Empty segments hold +inf, the greatest integer of the dtype, or True.

    Raises:
      {raises}

    Numerical guarantees: exact. NaN propagates; ``min(-0, +0)`` is ``-0`` in either order; subnormal numbers are
    numbers, not zeros. Bit-equal from run to run and independent of scheduling.

    {gradient_of_extremum}
    {forward_mode}
    """
    name = "segment_min"
    call = _canonicalize(name, data, segment_ids, num_segments, indices_are_sorted, mode, out_sharding, bucket_size)
    return _reduce_extremum(name, call, _segment_min, jnp.min, tie_break)


@_documented
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
      {segment_ids}
      indices_are_sorted: promises that `segment_ids` is non-decreasing.
      {mode}
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
    """
    return _extremum_backward(
        "segment_max_backward", _segment_max, d_output, data, segment_ids, indices_are_sorted, mode, tie_break
    )


@_documented
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
      {segment_ids}
      indices_are_sorted: promises that `segment_ids` is non-decreasing.
      {mode}
      tie_break: as in :func:`segment_min`: "split" gives every row that attains its segment's minimum an equal share,
        "first" gives the lowest such row all of it.

    Returns:
      ``[N, ...]``, the cotangent of `data`. Rows that do not attain the minimum, that are dropped, or whose segment
      holds a NaN get an exact 0.

    Raises:
      TypeError, IndexError, ValueError: an argument does not fit, as in :func:`segment_min`.

    Numerical guarantees and gradient: as in :func:`segment_max_backward`.
    """
    return _extremum_backward(
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
    """
    return segment_max_backward(d_output, data, segment_ids, tie_break="first")


@_documented
def segment_argmax(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Mode = None,
    out_sharding: OutSharding = None,
) -> Array:
    """The row that attains each segment's maximum: ``out[s, ...] = argmax { data[n, ...] : segment_ids[n] == s }``.

    The lowest such row where several attain it, as in :func:`numpy.argmax`.

    Args:
      {ordered_data}
      {reduction_arguments}
      {mode_and_sharding}

    Returns:
      {row_numbers}

    Raises:
      {raises}

    Numerical guarantees: exact. A NaN is greater than every number, the first NaN wins; -0 and +0 are equal.
    Bit-equal from run to run and independent of scheduling.

    Gradient: none, the result is an integer.
    """
    return _row_of_extremum(SEGMENT_ARGMAX, data, segment_ids, num_segments, indices_are_sorted, mode, out_sharding)


@_documented
def segment_argmin(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Mode = None,
    out_sharding: OutSharding = None,
) -> Array:
    """The row that attains each segment's minimum: ``out[s, ...] = argmin { data[n, ...] : segment_ids[n] == s }``.

    The lowest such row where several attain it, as in :func:`numpy.argmin`.

    Args:
      {ordered_data}
      {reduction_arguments}
      {mode_and_sharding}

    Returns:
      {row_numbers}

    Raises:
      {raises}

    Numerical guarantees: exact. A NaN is less than every number, the first NaN wins; -0 and +0 are equal.
    Bit-equal from run to run and independent of scheduling.

    Gradient: none, the result is an integer.
    """
    return _row_of_extremum(SEGMENT_ARGMIN, data, segment_ids, num_segments, indices_are_sorted, mode, out_sharding)


# ----------------------------------------------------------------------------------------------------------------------
# Sum and mean.


@_documented
def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    *,
    deterministic: bool = False,
) -> Array:
    """Sum of the rows of each segment: ``out[s, ...] = sum { data[n, ...] : segment_ids[n] == s }``.

    A drop-in replacement of :func:`jax.ops.segment_sum`.

    Args:
      data: ``[N, ...]``, any numeric dtype of JAX. Integers, float16, bfloat16, float32 and float64 have kernels
        (integers of less than 32 bits are added as int32 and wrap the same); other dtypes run as plain JAX. More
        generally, any shape that broadcasts to ``segment_ids.shape + data.shape[1:]``.
      {reduction_arguments}
      bucket_size: as in :func:`jax.ops.segment_sum`, rows are added in buckets of this size, and then the buckets.
      {mode_and_sharding}
      {deterministic}

    Returns:
      ``[S, ...]`` with the dtype of `data`. Empty segments hold 0.

    Raises:
      {raises}

    Numerical guarantees: floating numbers are added in float32 (float64 for float64) and the sum is rounded once to
    the dtype. Integers are exact and wrap. Bit-equal from run to run, except for floating numbers on GPUs as said under
    `deterministic`.

    Gradient: ``d_data[n] = d_out[segment_ids[n]]``, 0 for dropped rows; `data` is not kept for the backward pass.
    {forward_mode}
    """
    name = "segment_sum"
    call = _canonicalize(name, data, segment_ids, num_segments, indices_are_sorted, mode, out_sharding, bucket_size)
    params = call.params(_SumParams, deterministic=bool(deterministic))
    return _reduce_arithmetic(name, call, _segment_sum, params, jnp.sum)


@_documented
def segment_sum_backward(d_output: ArrayLike, segment_ids: ArrayLike, *, mode: Mode = None) -> Array:
    """Gradient of :func:`segment_sum`: ``d_data[n, ...] = d_output[segment_ids[n], ...]``, 0 for dropped rows.

    Args:
      d_output: ``[S, ...]``, the cotangent of the segment sums, a floating dtype.
      {segment_ids}
      {mode}

    Returns:
      ``segment_ids.shape + d_output.shape[1:]`` with the dtype of `d_output`, the cotangent of the data.

    Raises:
      TypeError, IndexError, ValueError: an argument does not fit, as in :func:`segment_sum`.

    Numerical guarantees: exact. Bit-equal from run to run.

    Gradient: linear in `d_output`, whose cotangent is the :func:`segment_sum` of the cotangents. Derivatives of any
    order and in either mode exist.
    """
    d_output, ids, ids_shape = _canonicalize_without_data("segment_sum_backward", d_output, segment_ids, mode)
    [d_rows] = SEGMENT_SUM_BACKWARD(d_output[None], ids[None])
    return _shaped_as_ids(d_rows[0], ids_shape)


@_documented
def segment_mean(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    deterministic: bool = False,
) -> Array:
    """Mean of the rows of each segment: ``out[s, ...] = mean { data[n, ...] : segment_ids[n] == s }``.

    Args:
      data: ``[N, ...]``, any dtype of JAX. float16, bfloat16, float32 and float64 have kernels; integers and bool are
        cast as by :func:`jax.numpy.mean`, to float32 (64-bit integers under x64 to float64); other dtypes run as plain
        JAX. More generally, any shape that broadcasts to ``segment_ids.shape + data.shape[1:]``.
      {reduction_arguments}
      {mode_and_sharding}
      {deterministic}

    Returns:
      ``[S, ...]`` with the dtype of `data`, or of its cast. Empty segments hold 0.

    Raises:
      {raises}

    Numerical guarantees: the sum is accumulated in float32 (float64 for float64), divided there by the exact number of
    rows, and rounded once to the dtype. Bit-equal from run to run, except on GPUs as said under `deterministic`.

    Gradient: ``d_data[n] = d_out[s] / number of rows of s`` with ``s = segment_ids[n]``, 0 for dropped rows; `data` is
    not kept for the backward pass.
    {forward_mode}
    """
    call = _canonicalize("segment_mean", data, segment_ids, num_segments, indices_are_sorted, mode, out_sharding)
    return call.with_inexact_data().reduce(_segment_mean, call.params(_SumParams, deterministic=bool(deterministic)))


@_documented
def segment_mean_backward(d_output: ArrayLike, segment_ids: ArrayLike, *, mode: Mode = None) -> Array:
    """Gradient of :func:`segment_mean`: ``d_data[n, ...] = d_output[s, ...] / number of rows of s``, s the id of row n.

    Args:
      d_output: ``[S, ...]``, the cotangent of the segment means, a floating dtype.
      {segment_ids}
      {mode}

    Returns:
      ``segment_ids.shape + d_output.shape[1:]`` with the dtype of `d_output`, the cotangent of the data. Dropped rows
      get 0.

    Raises:
      TypeError, IndexError, ValueError: an argument does not fit, as in :func:`segment_mean`.

    Numerical guarantees: each element is ``d_output`` divided by the exact number of rows, rounded once. Bit-equal from
    run to run.

    Gradient: linear in `d_output`, whose cotangent is the :func:`segment_mean` of the cotangents. Derivatives of any
    order and in either mode exist.
    """
    d_output, ids, ids_shape = _canonicalize_without_data("segment_mean_backward", d_output, segment_ids, mode)
    count = _count_rows(ids[None], d_output.shape[0])
    [d_rows] = SEGMENT_MEAN_BACKWARD(d_output[None], count, ids[None])
    return _shaped_as_ids(d_rows[0], ids_shape)


# ----------------------------------------------------------------------------------------------------------------------
# Product.


@_documented
def segment_prod(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: OutSharding = None,
) -> Array:
    """Product of the rows of each segment: ``out[s, ...] = prod { data[n, ...] : segment_ids[n] == s }``.

    A drop-in replacement of :func:`jax.ops.segment_prod`, with a gradient also where ids repeat.

    Args:
      data: ``[N, ...]``, any numeric dtype of JAX. Integers, float16, bfloat16, float32 and float64 have kernels
        (integers of less than 32 bits are multiplied as int32 and wrap the same); other dtypes run as plain JAX. More
        generally, any shape that broadcasts to ``segment_ids.shape + data.shape[1:]``.
      {reduction_arguments}
      bucket_size: as in :func:`jax.ops.segment_prod`, rows are multiplied in buckets of this size, then the buckets.
      {mode_and_sharding}

    Returns:
      ``[S, ...]`` with the dtype of `data`. Empty segments hold 1.

    Raises:
      {raises}

    Numerical guarantees: floating numbers are multiplied in float32 (float64 for float64) with an exponent of their
    own, so nothing overflows or underflows on the way: the product is finite where the exact one is. It is rounded once
    to the dtype. NaN propagates, and so does zero times infinity. Integers are exact and wrap. Bit-equal from run to
    run and independent of scheduling.

    Gradient: ``d_data[n] = d_out[segment_ids[n]] * product of the segment's other rows``, right also where rows are
    zero, infinite or of extreme magnitude; 0 for dropped rows.
    {forward_mode}
    """
    name = "segment_prod"
    call = _canonicalize(name, data, segment_ids, num_segments, indices_are_sorted, mode, out_sharding, bucket_size)
    return _reduce_arithmetic(name, call, _segment_prod, call.params(_Params), jnp.prod)


@_documented
def segment_prod_backward(
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
) -> Array:
    """Gradient of :func:`segment_prod`: ``d_data[n, ...] = d_output[s, ...] * product of the other rows of s``.

    Here s is the id of row n.

    Args:
      d_output: ``[S, ...]``, the cotangent of the segment products; a floating dtype, the same as `data`.
      data: ``[N, ...]``, the rows that were multiplied.
      {segment_ids}
      indices_are_sorted: promises that `segment_ids` is non-decreasing.
      {mode}

    Returns:
      ``[N, ...]``, the cotangent of `data`. Dropped rows get 0.

    Raises:
      TypeError, IndexError, ValueError: an argument does not fit, as in :func:`segment_prod`.

    Numerical guarantees: the product of the others neither overflows nor underflows on the way; zeros, infinities and
    NaN among the rows are counted, so a row's own value never spoils its gradient. Bit-equal from run to run.

    Gradient: linear in `d_output`; with respect to `data` it is the product of all but two rows. Derivatives of any
    order and in either mode exist.
    """
    d_output, call = _canonicalize_backward(
        "segment_prod_backward", d_output, data, segment_ids, indices_are_sorted, mode
    )
    return call.gradient(_segment_prod, call.params(_Params), d_output)


# ----------------------------------------------------------------------------------------------------------------------
# Softmax.


@_documented
def segment_softmax(
    logits: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    deterministic: bool = False,
) -> Array:
    """Softmax over the rows of each segment.

    ``out[n, ...] = exp(logits[n, ...] - m[s, ...]) / sum { exp(logits[k, ...] - m[s, ...]) : segment_ids[k] == s }``,
    where ``s = segment_ids[n]`` and m is the :func:`segment_max` of the logits.

    Args:
      logits: ``[N, ...]``, any real floating dtype of JAX. float16, bfloat16, float32 and float64 have kernels; other
        dtypes run as plain JAX. More generally, any shape that broadcasts to ``segment_ids.shape + logits.shape[1:]``.
      {reduction_arguments}
      {mode_and_sharding}
      {deterministic}

    Returns:
      ``segment_ids.shape + logits.shape[1:]`` (the shape of `logits`) with the dtype of `logits`. Dropped rows get 0.

    Raises:
      {raises}

    Numerical guarantees: computed in float32 (float64 for float64) and rounded once to the dtype; nothing overflows. A
    row of -inf gets 0. A segment that holds a NaN, whose maximum is +inf, or whose rows are all -inf gives NaN, as in
    :func:`jax.nn.softmax`. Bit-equal from run to run, except on GPUs as said under `deterministic`.

    Gradient: ``d_logits[n] = out[n] * (d_out[n] - sum { out[k] * d_out[k] : segment_ids[k] == segment_ids[n] })``, 0
    for dropped rows; the result and the ids are kept for the backward pass, not the logits.
    {forward_mode}
    """
    name = "segment_softmax"
    call = _canonicalize(
        name, logits, segment_ids, num_segments, indices_are_sorted, mode, out_sharding, data_name="logits"
    )
    if not jnp.issubdtype(call.data.dtype, jnp.floating):
        raise TypeError(f"{name}: logits must have a real floating dtype, got {call.data.dtype}")
    return call.map_rows(_segment_softmax, call.params(_SumParams, deterministic=bool(deterministic)))


@_documented
def segment_softmax_backward(
    d_probabilities: ArrayLike,
    probabilities: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    deterministic: bool = False,
) -> Array:
    """Gradient of :func:`segment_softmax`: ``d_logits = p * (d_p - sum of p * d_p over the row's segment)``.

    Args:
      d_probabilities: ``[N, ...]``, the cotangent of the probabilities; a floating dtype and shape, those of
        `probabilities`.
      probabilities: ``[N, ...]``, the result of :func:`segment_softmax`.
      {segment_ids}
      num_segments: number of segments S, static under ``jit``. Default: ``max(segment_ids) + 1``.
      indices_are_sorted: promises that `segment_ids` is non-decreasing.
      {mode}
      {deterministic}

    Returns:
      ``[N, ...]``, the cotangent of the logits. Dropped rows get 0.

    Raises:
      TypeError, IndexError, ValueError: an argument does not fit, as in :func:`segment_softmax`.

    Numerical guarantees: computed in float32 (float64 for float64) and rounded once to the dtype. Bit-equal from run to
    run, except on GPUs as said under `deterministic`.

    Gradient: linear in `d_probabilities`, quadratic in `probabilities`. Derivatives of any order and in either mode
    exist.
    """
    name = "segment_softmax_backward"
    d_probabilities = as_array(name, "d_probabilities", d_probabilities)
    call = _canonicalize(
        name, probabilities, segment_ids, num_segments, indices_are_sorted, mode, None, data_name="probabilities"
    )
    shape = (*call.ids_shape, *call.data.shape[1:])
    _check_like(name, "d_probabilities", d_probabilities, "probabilities", call.data, shape)
    _check_like(name, "probabilities", call.data, "d_probabilities", d_probabilities, shape)
    operands = call.rows(call.data)[None], call.rows(d_probabilities)[None], call.segment_ids[None]
    params = call.params(_SumParams, deterministic=bool(deterministic))
    [d_rows] = SEGMENT_SOFTMAX_BACKWARD(*operands, **dataclasses.asdict(params))
    return _shaped_as_ids(d_rows[0], call.ids_shape)


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX. A cell is one (segment, feature) pair of the result.


def _dropping(reduction: Callable[..., Array]) -> Callable[[Array, Array, int], Array]:
    """A reduction of ``jax.ops`` that drops every id out of range: XLA takes them modulo 2^32 on CPUs."""

    def reduce(data: Array, ids: Array, num_segments: int) -> Array:
        return reduction(data, jnp.where((ids >= 0) & (ids < num_segments), ids, -1), num_segments)

    return reduce


_xla_max, _xla_min, _xla_sum, _xla_prod = (
    _dropping(reduction)
    for reduction in (jax.ops.segment_max, jax.ops.segment_min, jax.ops.segment_sum, jax.ops.segment_prod)
)


def _per_row(values: Array, like: Array) -> Array:
    """Values of shape ``[N]`` as ``[N, 1, ...]``, to combine with rows (or cells) of the rank of `like`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _take_cells(cells: Array, ids: Array) -> tuple[Array, Array]:
    """Each row's cells ``[N, ...]``, and whether the row belongs to a segment ``[N, 1, ...]``."""
    is_member = _per_row((ids >= 0) & (ids < cells.shape[0]), cells)
    if cells.shape[0] == 0:
        return jnp.zeros((*ids.shape, *cells.shape[1:]), cells.dtype), is_member
    return jnp.take(cells, ids, axis=0, mode="clip"), is_member


def _row_numbers(rows: Array) -> Array:
    return _per_row(jnp.arange(rows.shape[0], dtype=jnp.int32), rows)


# Maximum and minimum.

NO_WINNER = -1
"""A winner is the row that attains a cell's extremum, or NO_WINNER (the segment is empty or holds a NaN), or, where
ties are shared, minus the number (2 or more) of members that attain it, the identity of the reduction included."""


@dataclasses.dataclass(frozen=True)
class _Extremum:
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
        return _xla_max(data, ids, num_segments)
    ordered = _ordered(data)
    cells = _xla_max(_wide_integers(ordered), ids, num_segments)
    infinity = _ordered(jnp.asarray(-jnp.inf, data.dtype))
    return _from_ordered(jnp.maximum(cells, infinity.astype(cells.dtype)).astype(ordered.dtype), data.dtype)


def _min_of_segments(data: Array, ids: Array, num_segments: int) -> Array:
    if not jnp.issubdtype(data.dtype, jnp.floating) or data.dtype.itemsize < 2:
        return _xla_min(data, ids, num_segments)
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


_MAXIMUM = _Extremum(_max_of_segments, _all_max, -math.inf, "min")
_MINIMUM = _Extremum(_min_of_segments, _all_min, math.inf, "max")


def _reference_winner(extremum: _Extremum, data: Array, ids: Array, output: Array, first_wins: bool) -> Array:
    num_segments = output.shape[0]
    if 0 in output.shape or 0 in data.shape:
        return jnp.full(output.shape, NO_WINNER, jnp.int32)
    extrema, is_member = _take_cells(output, ids)
    attains = is_member & (data == extrema)
    none = jnp.iinfo(jnp.int32).max
    first = _xla_min(jnp.where(attains, _row_numbers(data), none), ids, num_segments)
    first = jnp.where(first == none, NO_WINNER, first)
    if first_wins:
        return first
    members = _xla_sum(attains.astype(jnp.int32), ids, num_segments)
    members += output == extremum.identity(output.dtype)
    return jnp.where(members > 1, -members, first)


def _reference_gradient(d_output: Array, winner: Array, ids: Array, *data_and_output: Array) -> Array:
    """What the gradient kernels of maximum and minimum compute, for one batch element."""
    winners, is_member = _take_cells(winner, ids)
    # Wide, because the transpose adds up the cotangents of a segment's rows.
    cotangents, _ = _take_cells(d_output.astype(compute_dtype(d_output.dtype)), ids)
    wins = is_member & (winners == _row_numbers(winners))
    gradient = jnp.where(wins, cotangents, 0)
    if data_and_output:
        data, output = data_and_output
        ties = is_member & (winners < NO_WINNER) & (data == _take_cells(output, ids)[0])
        gradient = jnp.where(ties, cotangents / jnp.where(ties, -winners, 1), gradient)
    return gradient.astype(d_output.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 3, 4))
def _reference_extremum(extremum: _Extremum, data: Array, ids: Array, num_segments: int, first_wins: bool) -> Array:
    return extremum.of_segments(data, ids, num_segments)


@_reference_extremum.defjvp
def _reference_extremum_jvp(
    extremum: _Extremum,
    num_segments: int,
    first_wins: bool,
    primals: tuple[Array, Array],
    tangents: tuple[Array, Array],
) -> tuple[Array, Array]:
    data, ids = primals
    output = _reference_extremum(extremum, data, ids, num_segments, first_wins)
    winner = _reference_winner(extremum, data, ids, output, first_wins)

    def gradient(d_output: Array) -> Array:
        return _reference_gradient(d_output, winner, ids, *(() if first_wins else (data, output)))

    # The tangent is the transpose of the gradient, which keeps the two consistent by construction.
    [d_output] = jax.linear_transpose(gradient, output)(tangents[0])
    return output, d_output


def _reference_reduce_extremum(
    extremum: _Extremum, data: Array, ids: Array, *, num_segments: int, first_wins: bool, **_: Any
) -> tuple[Array]:
    return (over_batch(lambda d, i: _reference_extremum(extremum, d, i, num_segments, first_wins), data, ids),)


def _reference_with_winner(
    extremum: _Extremum,
    data: Array,
    ids: Array,
    *,
    num_segments: int,
    first_wins: bool,
    with_order: bool,
    **_: Any,
) -> tuple[Array, Array, Array]:
    def output_winner_order(data: Array, ids: Array) -> tuple[Array, Array, Array]:
        output = _reference_extremum(extremum, data, ids, num_segments, first_wins)
        order = jnp.arange(ids.shape[0] if with_order else 1, dtype=jnp.int32)
        return output, _reference_winner(extremum, data, ids, output, first_wins), order

    return over_batch(output_winner_order, data, ids)


def _reference_extremum_backward(
    d_output: Array, winner: Array, ids: Array, order: Array, *data_and_output: Array
) -> tuple[Array]:
    return (over_batch(_reference_gradient, d_output, winner, ids, *data_and_output),)


def _reference_row_of_extremum(
    extremum: _Extremum, data: Array, ids: Array, *, num_segments: int, **_: Any
) -> tuple[Array]:
    def row_of_extremum(data: Array, ids: Array) -> Array:
        none = jnp.asarray(data.shape[0], jnp.int32)
        data = data.astype(compute_dtype(data.dtype))  # some narrow dtypes have no infinity
        extrema, is_member = _take_cells(extremum.of_segments(data, ids, num_segments), ids)
        attains = is_member & _same_value(data, extrema)
        first = _xla_min(jnp.where(attains, _row_numbers(data), none), ids, num_segments)
        return jnp.minimum(first, none)

    return (over_batch(row_of_extremum, data, ids),)


def _same_value(x: Array, y: Array) -> Array:
    """Whether two values are equal, a NaN equal to any NaN."""
    return (x == y) | ((x != x) & (y != y))


# Sum and mean.


def _reference_sum(data: Array, ids: Array, *, num_segments: int, **_: Any) -> tuple[Array]:
    def total(data: Array, ids: Array) -> Array:
        wide = data.astype(compute_dtype(data.dtype))
        return _xla_sum(wide, ids, num_segments).astype(data.dtype)

    return (over_batch(total, data, ids),)


def _reference_sum_backward(d_output: Array, ids: Array, **_: Any) -> tuple[Array]:
    def gradient(d_output: Array, ids: Array) -> Array:
        cotangents, is_member = _take_cells(d_output.astype(compute_dtype(d_output.dtype)), ids)
        return jnp.where(is_member, cotangents, 0).astype(d_output.dtype)

    return (over_batch(gradient, d_output, ids),)


def _reference_mean(data: Array, ids: Array, *, num_segments: int, **_: Any) -> tuple[Array, Array]:
    def mean_and_count(data: Array, ids: Array) -> tuple[Array, Array]:
        total = _xla_sum(data.astype(compute_dtype(data.dtype)), ids, num_segments)
        count = _xla_sum(jnp.ones(ids.shape, jnp.int32), ids, num_segments)
        return _divided(total, _per_row(count, total), data.dtype), count

    return over_batch(mean_and_count, data, ids)


def _divided(total: Array, count: Array, dtype: Any) -> Array:
    """Totals over the number of their rows; those of no rows are 0 and stay so."""
    return (total / jnp.maximum(count, 1).astype(total.dtype)).astype(dtype)


def _reference_mean_backward(d_output: Array, count: Array, ids: Array, **_: Any) -> tuple[Array]:
    def gradient(d_output: Array, count: Array, ids: Array) -> Array:
        cotangents, is_member = _take_cells(d_output.astype(compute_dtype(d_output.dtype)), ids)
        count, _ = _take_cells(_per_row(count, d_output), ids)
        return jnp.where(is_member, _divided(cotangents, count, d_output.dtype), 0)

    return (over_batch(gradient, d_output, count, ids),)


# Product: its value in mantissa and exponent, its derivatives from products in pairs.


class _Product(NamedTuple):
    """A product of floating numbers that neither overflows nor underflows on the way.

    The mantissa has the sign of all members; its magnitude, in [1, 2), and the exponent are those of the members that
    are neither zero nor infinite nor NaN, which `packed` counts, up to 2 of each kind.
    """

    mantissa: Array
    packed: Array
    """exponent * 64 + 16 * NaNs + 4 * infinities + zeros"""


_ZEROS, _INFINITIES, _NANS = 0, 2, 4
"""The bits where the counts of `packed` are."""
_EXPONENT = 6

_MOST_EXPONENT = 2**25 - 4096
"""Beyond this every product is zero or infinite anyway, whatever one more or less member does."""


def _count_of(packed: Array, kind: int) -> Array:
    return (packed >> kind) & 3


def _pack(exponent: Array, counts: Mapping[int, Array]) -> Array:
    packed = jnp.clip(exponent, -_MOST_EXPONENT, _MOST_EXPONENT) << _EXPONENT
    for kind, count in counts.items():
        packed += jnp.minimum(count, 2) << kind
    return packed


def _product_of_one(x: Array) -> _Product:
    """Takes numbers apart by their bits, so that subnormal ones are not taken for zero."""
    info, bias, unsigned = _format_of(x.dtype)
    bits = jax.lax.bitcast_convert_type(x, unsigned)
    sign_bit, fraction_mask, one = (
        unsigned.type(value) for value in (1 << (info.bits - 1), (1 << info.nmant) - 1, bias << info.nmant)
    )
    magnitude = bits & (sign_bit - 1)
    field = (magnitude >> info.nmant).astype(jnp.int32)
    is_zero, is_finite = magnitude == 0, field <= 2 * bias
    is_infinite = ~is_finite & (magnitude & fraction_mask == 0)
    is_ordinary = is_finite & ~is_zero
    # The leading bit of a subnormal number moves to where that of a normal one is.
    shift = jnp.where(field == 0, jax.lax.clz(magnitude).astype(jnp.int32) - (info.bits - 1 - info.nmant), 0)
    fraction = jnp.where(is_ordinary, (magnitude << shift.astype(unsigned)) & fraction_mask, unsigned.type(0))
    mantissa = (bits & sign_bit) | one | fraction
    exponent = jnp.where(is_ordinary, jnp.maximum(field, 1) - shift - bias, 0)
    kinds = {_ZEROS: is_zero, _INFINITIES: is_infinite, _NANS: ~is_finite & ~is_infinite}
    return _Product(
        jax.lax.bitcast_convert_type(mantissa, x.dtype),
        _pack(exponent, {kind: of_kind.astype(jnp.int32) for kind, of_kind in kinds.items()}),
    )


def _product_of_both(a: _Product, b: _Product) -> _Product:
    mantissa = a.mantissa * b.mantissa
    carries = jnp.abs(mantissa) >= 2
    exponent = (a.packed >> _EXPONENT) + (b.packed >> _EXPONENT) + carries
    counts = {kind: _count_of(a.packed, kind) + _count_of(b.packed, kind) for kind in (_ZEROS, _INFINITIES, _NANS)}
    return _Product(jnp.where(carries, 0.5 * mantissa, mantissa), _pack(exponent, counts))


def _product_of_others(product: _Product, member: Array) -> Array:
    """The product of all members but one."""
    one = _product_of_one(member)
    exponent = (product.packed >> _EXPONENT) - (one.packed >> _EXPONENT)

    def count(kind: int) -> Array:
        # A count of two stands for two or more, of which at least one is left, and one is as good as more.
        count = _count_of(product.packed, kind)
        return jnp.where((_count_of(one.packed, kind) == 1) & (count == 1), 0, count)

    packed = _pack(exponent, {kind: count(kind) for kind in (_ZEROS, _INFINITIES, _NANS)})
    return _product_value(_Product(product.mantissa / one.mantissa, packed))


def _product_value(product: _Product) -> Array:
    mantissa, packed = product
    has_zero, has_infinity, has_nan = (_count_of(packed, kind) > 0 for kind in (_ZEROS, _INFINITIES, _NANS))
    value = _scaled(mantissa, packed >> _EXPONENT)
    value = jnp.where(has_infinity, jnp.copysign(jnp.inf, mantissa).astype(value.dtype), value)
    value = jnp.where(has_zero, jnp.copysign(0, mantissa).astype(value.dtype), value)
    return jnp.where(has_nan | (has_zero & has_infinity), jnp.nan, value)


def _scaled(mantissa: Array, exponent: Array) -> Array:
    """``mantissa * 2**exponent``, rounded once; by its bits, so that subnormal results are not flushed to zero."""
    info, bias, unsigned = _format_of(mantissa.dtype)
    one = _product_of_one(mantissa)
    exponent += one.packed >> _EXPONENT
    bits = jax.lax.bitcast_convert_type(one.mantissa, unsigned)
    leading_bit, sign_bit = unsigned.type(1 << info.nmant), unsigned.type(1 << (info.bits - 1))
    significand = (bits & (leading_bit - unsigned.type(1))) | leading_bit
    # A subnormal number has fewer bits: those cut off round the others to nearest, ties to even.
    cut = jnp.clip(1 - bias - exponent, 0, info.nmant + 2).astype(unsigned)
    kept = significand >> cut
    rest, half = significand - (kept << cut), (unsigned.type(1) << cut) >> 1
    kept += ((rest > half) | ((rest == half) & (kept % 2 == 1))) & (cut > 0)
    # Where the leading bit is there, it adds 1 to the exponent.
    field = jnp.clip(exponent + bias - 1, 0, 2 * bias).astype(unsigned)
    magnitude = jnp.where(exponent > bias, unsigned.type((2 * bias + 1) << info.nmant), (field << info.nmant) + kept)
    return jax.lax.bitcast_convert_type((bits & sign_bit) | magnitude, mantissa.dtype)


def _format_of(dtype: Any) -> tuple[Any, int, np.dtype]:
    """What a floating dtype consists of: its ``finfo``, the bias of its exponent, and the unsigned type of its bits."""
    info = jnp.finfo(dtype)
    return info, info.maxexp - 1, np.dtype(f"uint{info.bits}")


def _reduce_in_pairs(
    combine: Callable[[Any, Any], Any], identity: Any, rows: Any, ids: Array, num_segments: int
) -> Any:
    """Combines the rows of each segment two by two, in a fixed order.

    Unlike a scan, each row enters the result once and nothing else is computed, so the derivatives that JAX finds of
    any order are products of other rows, without division, and without zero cotangents that meet infinities.

    Args:
      combine: an associative function of two pytrees of rows.
      identity: a pytree of scalars.
      rows: a pytree of ``[N, ...]``.
    """
    num_rows = ids.shape[0]
    if num_rows == 0 or num_segments == 0:
        return jax.tree.map(lambda x, one: jnp.full((num_segments, *x.shape[1:]), one, x.dtype), rows, identity)

    def select(where: Array, rows: Any, others: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(_per_row(where, x), x, y), rows, others)

    def take(rows: Any, row: Array) -> Any:
        return jax.tree.map(lambda x: jnp.take(x, row, axis=0, mode="clip"), rows)

    order = jnp.argsort(ids, stable=True)
    ids, rows = ids[order], take(rows, order)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    first = _xla_min(row, ids, num_segments)
    first_of_row, is_member = _take_cells(first, ids)
    rank = row - first_of_row
    num_steps = (num_rows - 1).bit_length() if jax_versions.is_static_shape(ids.shape) else 31
    for step in range(num_steps):
        distance = 2**step

        def partner_of(x: Array, distance: int = distance) -> Array:
            return jnp.roll(x, -distance, axis=0)

        has_partner = (
            is_member & (rank & (2 * distance - 1) == 0) & (row < num_rows - distance) & (partner_of(ids) == ids)
        )
        # Rows without a partner combine identities, so that no infinity of theirs meets a zero cotangent.
        pair = (select(has_partner, x, identity) for x in (rows, jax.tree.map(partner_of, rows)))
        rows = select(has_partner, combine(*pair), rows)
    is_empty = first == jnp.iinfo(first.dtype).max
    return select(~is_empty, take(rows, first), identity)


def _product_in_pairs(data: Array, ids: Array, num_segments: int) -> Array:
    """The product in plain arithmetic, which JAX differentiates to any order; it may overflow on the way."""
    wide = data.astype(compute_dtype(data.dtype))
    return _reduce_in_pairs(jnp.multiply, 1, wide, ids, num_segments).astype(data.dtype)


def _reference_residual(data: Array, ids: Array, num_segments: int) -> _Product:
    """The product as mantissa and exponent, without a derivative."""
    wide = jax.lax.stop_gradient(data).astype(compute_dtype(data.dtype))
    return _reduce_in_pairs(_product_of_both, _Product(1, 0), _product_of_one(wide), ids, num_segments)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _reference_product(data: Array, ids: Array, num_segments: int) -> Array:
    return _product_value(_reference_residual(data, ids, num_segments)).astype(data.dtype)


@_reference_product.defjvp
def _reference_product_jvp(
    num_segments: int, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    data, ids = primals
    return _reference_product(data, ids, num_segments), jax.jvp(
        lambda data: _product_in_pairs(data, ids, num_segments), (data,), (tangents[0],)
    )[1]


def _has_exponent(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _reference_prod(data: Array, ids: Array, *, num_segments: int, **_: Any) -> tuple[Array]:
    def product(data: Array, ids: Array) -> Array:
        if _has_exponent(data.dtype):
            return _reference_product(data, ids, num_segments)
        if jnp.issubdtype(data.dtype, jnp.inexact):
            return _product_in_pairs(data, ids, num_segments)
        return _xla_prod(data, ids, num_segments)

    return (over_batch(product, data, ids),)


def _reference_prod_with_residual(
    data: Array, ids: Array, *, num_segments: int, **_: Any
) -> tuple[Array, Array, Array]:
    def product(data: Array, ids: Array) -> tuple[Array, Array, Array]:
        if _has_exponent(data.dtype):
            return _reference_product(data, ids, num_segments), *_reference_residual(data, ids, num_segments)
        output = _product_in_pairs(data, ids, num_segments)
        return output, jnp.zeros_like(output), jnp.zeros(output.shape, jnp.int32)  # not used for complex numbers

    return over_batch(product, data, ids)


def _product_gradient_in_pairs(d_output: Array, data: Array, ids: Array) -> Array:
    """The gradient in plain arithmetic, which JAX differentiates to any order."""
    _, vjp = jax.vjp(lambda data: _product_in_pairs(data, ids, d_output.shape[0]), data)
    return vjp(d_output)[0]


@jax.custom_jvp
def _reference_product_gradient(d_output: Array, mantissa: Array, packed: Array, data: Array, ids: Array) -> Array:
    (mantissa, is_member), (packed, _), (cotangents, _) = (_take_cells(x, ids) for x in (mantissa, packed, d_output))
    dtype = mantissa.dtype
    others = _product_of_others(_Product(mantissa, packed), data.astype(dtype))
    # As cotangents * others, but for subnormal numbers, which XLA flushes to zero on CPUs.
    factors = (_product_of_one(x) for x in (cotangents.astype(dtype), others))
    gradient = _product_value(_product_of_both(*factors))
    return jnp.where(is_member, gradient, 0).astype(data.dtype)


@_reference_product_gradient.defjvp
def _reference_product_gradient_jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    d_output, _, _, data, ids = primals
    gradient = _reference_product_gradient(*primals)
    of_both = functools.partial(_product_gradient_in_pairs, ids=ids)
    return gradient, jax.jvp(of_both, (d_output, data), (tangents[0], tangents[3]))[1]


def _reference_prod_backward(d_output: Array, mantissa: Array, packed: Array, data: Array, ids: Array) -> tuple[Array]:
    if _has_exponent(data.dtype):
        return (over_batch(_reference_product_gradient, d_output, mantissa, packed, data, ids),)
    return (over_batch(_product_gradient_in_pairs, d_output, data, ids),)


def _transpose_prod_backward(
    d_outputs: Sequence[Any], d_data: Sequence[Array], mantissa: Array, packed: Array, data: Array, ids: Array
) -> list[Array]:
    [d_output] = d_outputs

    def of_one(d_data: Array, data: Array, ids: Array) -> Array:
        # The gradient is a product with the transposed Jacobian of the segments' products.
        products = functools.partial(_product_in_pairs, ids=ids, num_segments=d_output.shape[1])
        return jax.jvp(products, (data,), (d_data,))[1].astype(d_output.dtype)

    def of_all(*operands: Array) -> tuple[Array]:
        return (over_batch(of_one, *operands),)

    spec = jax_versions.explicit_spec(d_output)
    if spec is not None:
        of_all = in_automatic_mode(of_all, d_output, (None, *spec[1:]))
    return list(of_all(*d_data, data, ids))


# Softmax.


def _exponentials(logits: Array, ids: Array, maxima: Array) -> Array:
    """``exp(logits - maximum of the segment)`` in the dtype of computation, 0 for dropped rows."""
    maxima, is_member = _take_cells(maxima, ids)
    dtype = compute_dtype(logits.dtype)
    return jnp.exp(jnp.where(is_member, logits.astype(dtype) - maxima.astype(dtype), -jnp.inf))


def _normalized(exponentials: Array, ids: Array, denominators: Array, dtype: Any) -> Array:
    denominators, is_member = _take_cells(denominators, ids)
    return (exponentials / jnp.where(is_member, denominators, 1)).astype(dtype)


def _reference_softmax(logits: Array, ids: Array, *, num_segments: int, **_: Any) -> tuple[Array]:
    def softmax(logits: Array, ids: Array) -> Array:
        wide = logits.astype(compute_dtype(logits.dtype))
        exponentials = _exponentials(wide, ids, _xla_max(jax.lax.stop_gradient(wide), ids, num_segments))
        denominators = _xla_sum(exponentials, ids, num_segments)
        return _normalized(exponentials, ids, denominators, logits.dtype)

    return (over_batch(softmax, logits, ids),)


def _weighted_cotangents(probabilities: Array, d_probabilities: Array) -> Array:
    dtype = compute_dtype(probabilities.dtype)
    return probabilities.astype(dtype) * d_probabilities.astype(dtype)


def _softmax_gradient(probabilities: Array, d_probabilities: Array, ids: Array, means: Array) -> Array:
    """`means` are the segments' sums of :func:`_weighted_cotangents`."""
    means, is_member = _take_cells(means, ids)
    gradient = probabilities.astype(means.dtype) * (d_probabilities.astype(means.dtype) - means)
    return jnp.where(is_member, gradient, 0).astype(probabilities.dtype)


def _reference_softmax_backward(
    probabilities: Array, d_probabilities: Array, ids: Array, *, num_segments: int, **_: Any
) -> tuple[Array]:
    def gradient(probabilities: Array, d_probabilities: Array, ids: Array) -> Array:
        weighted = _weighted_cotangents(probabilities, d_probabilities)
        means = _xla_sum(weighted, ids, num_segments)
        return _softmax_gradient(probabilities, d_probabilities, ids, means)

    return (over_batch(gradient, probabilities, d_probabilities, ids),)


# ----------------------------------------------------------------------------------------------------------------------
# Programs of one shard, where the rows of a segment are split over devices. Only results of cells are exchanged.


def _first_row(ids: Array, row_axes: Sequence[str]) -> Array:
    """The number, among all rows, of this shard's first row."""
    return (jax.lax.axis_index(row_axes) * ids.shape[1]).astype(jnp.int32)


def _shard_extremum(
    extremum: _Extremum,
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    data: Array,
    ids: Array,
    **params: Any,
) -> tuple[Array]:
    [output] = kernel(data, ids)
    row_axes = axes.get("row", ())
    return (extremum.over_axes(output, row_axes) if row_axes else output,)


def _shard_with_winner(
    extremum: _Extremum,
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
    row_axes = axes.get("row", ())
    if not row_axes:
        return local_output, local_winner, order
    output = extremum.over_axes(local_output, row_axes)
    first_row = _first_row(ids, row_axes)
    order = order + first_row if with_order else order
    none = jnp.iinfo(jnp.int32).max
    attains = (local_output == output) & (local_winner != NO_WINNER)
    row = jnp.where(attains & (local_winner >= 0), local_winner + first_row, none)
    if first_wins:
        row = jax.lax.pmin(row, row_axes)
        return output, jnp.where(row == none, NO_WINNER, row), order
    identity = (output == extremum.identity(output.dtype)).astype(jnp.int32)
    local_members = jnp.where(local_winner >= 0, 1, -local_winner - identity)
    # A sole winner's row number is the sum over the shards, of which one has it.
    members, row = jax.lax.psum((jnp.where(attains, local_members, 0), jnp.where(row == none, 0, row)), row_axes)
    sole = (members == 1) & (identity == 0)
    winner = jnp.where(members == 0, NO_WINNER, jnp.where(sole, row, -members - identity))
    return output, winner, order


def _shard_extremum_backward(
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    d_output: Array,
    winner: Array,
    ids: Array,
    order: Array,
    *data_and_output: Array,
) -> Sequence[Array]:
    if row_axes := axes.get("row", ()):
        num_rows, first_row = ids.shape[1], _first_row(ids, row_axes)
        row = winner - first_row
        row = jnp.where((row >= 0) & (row < num_rows), row, NO_WINNER)
        winner = jnp.where(winner >= 0, row, winner)
        if order.shape[1] == num_rows:
            # The order of this shard's rows, if the forward pass was split as this one is.
            local = order - first_row
            is_local = jnp.all((local >= 0) & (local < num_rows), axis=1, keepdims=True)
            order = jnp.where(is_local, local, jnp.arange(num_rows, dtype=jnp.int32))
    return kernel(d_output, winner, ids, order, *data_and_output)


def _shard_row_of_extremum(
    extremum: _Extremum,
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    data: Array,
    ids: Array,
    **params: Any,
) -> tuple[Array]:
    [row] = kernel(data, ids)
    row_axes = axes.get("row", ())
    if not row_axes:
        return (row,)
    num_rows, num_all_rows = ids.shape[1], jax.lax.psum(ids.shape[1], row_axes)
    is_found = row < num_rows
    value = jnp.take_along_axis(data, jnp.minimum(row, num_rows - 1), axis=1)
    value = jnp.where(is_found, value, extremum.identity(value.dtype))
    attains = is_found & _same_value(value, extremum.over_axes(value, row_axes))
    return (jax.lax.pmin(jnp.where(attains, row + _first_row(ids, row_axes), num_all_rows), row_axes),)


def _shard_sum(
    kernel: Callable[..., Sequence[Array]], axes: Mapping[str, tuple[str, ...]], data: Array, ids: Array, **params: Any
) -> Sequence[Array]:
    row_axes = axes.get("row", ())
    return (_sum_over_shards(row_axes, data, ids, **params).astype(data.dtype),) if row_axes else kernel(data, ids)


def _sum_over_shards(row_axes: Sequence[str], data: Array, ids: Array, **params: Any) -> Array:
    """The sums of all rows. Wide, because the sum of a shard may overflow where that of all rows does not."""
    [local] = SEGMENT_SUM.kernel(data.astype(compute_dtype(data.dtype)), ids, **params)
    return jax.lax.psum(local, row_axes)


def _shard_mean(
    kernel: Callable[..., Sequence[Array]], axes: Mapping[str, tuple[str, ...]], data: Array, ids: Array, **params: Any
) -> Sequence[Array]:
    row_axes = axes.get("row", ())
    if not row_axes:
        return kernel(data, ids)
    total = _sum_over_shards(row_axes, data, ids, **params)
    count = _sum_over_shards(row_axes, jnp.ones((1, ids.shape[1]), jnp.int32), ids, **params)
    count = jnp.broadcast_to(count, total.shape[:2])
    return _divided(total, count.reshape(*count.shape, *[1] * (total.ndim - 2)), data.dtype), count


def _shard_prod_with_residual(
    kernel: Callable[..., Sequence[Array]], axes: Mapping[str, tuple[str, ...]], data: Array, ids: Array, **params: Any
) -> Sequence[Array]:
    output, *residual = kernel(data, ids)
    if row_axes := axes.get("row", ()):
        of_shards = jax.lax.all_gather(_Product(*residual), row_axes)
        num_shards = of_shards.packed.shape[0]
        each = [jax.tree.map(lambda x, i=i: x[i], of_shards) for i in range(num_shards)]
        residual = functools.reduce(_product_of_both, each)
        output = _product_value(residual).astype(output.dtype)
    return output, *residual


def _shard_prod(
    kernel: Callable[..., Sequence[Array]], axes: Mapping[str, tuple[str, ...]], data: Array, ids: Array, **params: Any
) -> Sequence[Array]:
    row_axes = axes.get("row", ())
    if not row_axes:
        return kernel(data, ids)
    if _has_exponent(data.dtype):
        # The product of the shards may be in range where a shard's own is not.
        with_residual = functools.partial(SEGMENT_PROD_WITH_RESIDUAL.kernel, **params)
        return _shard_prod_with_residual(with_residual, axes, data, ids)[:1]
    [output] = kernel(data, ids)
    return (jnp.prod(jax.lax.all_gather(output, row_axes), axis=0, dtype=output.dtype),)


def _shard_softmax(
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    logits: Array,
    ids: Array,
    *,
    num_segments: int,
    indices_are_sorted: bool,
    deterministic: bool,
) -> Sequence[Array]:
    row_axes = axes.get("row", ())
    if not row_axes:
        return kernel(logits, ids)
    call = {"num_segments": num_segments, "indices_are_sorted": indices_are_sorted}
    [maxima] = SEGMENT_MAX.kernel(logits, ids, first_wins=False, **call)
    exponentials = over_batch(_exponentials, logits, ids, _all_max(maxima, row_axes))
    denominators = _sum_over_shards(row_axes, exponentials, ids, deterministic=deterministic, **call)
    normalized = functools.partial(_normalized, dtype=logits.dtype)
    return (over_batch(normalized, exponentials, ids, denominators),)


def _shard_softmax_backward(
    kernel: Callable[..., Sequence[Array]],
    axes: Mapping[str, tuple[str, ...]],
    probabilities: Array,
    d_probabilities: Array,
    ids: Array,
    **params: Any,
) -> Sequence[Array]:
    row_axes = axes.get("row", ())
    if not row_axes:
        return kernel(probabilities, d_probabilities, ids)
    means = _sum_over_shards(row_axes, _weighted_cotangents(probabilities, d_probabilities), ids, **params)
    return (over_batch(_softmax_gradient, probabilities, d_probabilities, ids, means),)


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel.

ORDERED_DTYPES = FLOATING_DTYPES | {"bool"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
WIDE_DTYPES = FLOATING_DTYPES | {"int32", "uint32", "int64", "uint64"}

ROWS = ("batch", "row", "...")
IDS = ("batch", "row")
CELLS = ("batch", "segment", "...")
COUNTS = ("batch", "segment")


def _cells(dtype: Any, data: Any, ids: Any, num_segments: int) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of a result of cells."""
    shape = (batch_of(data, ids), num_segments, *data.shape[2:])
    return shape, np.dtype(dtype)


def _plan_parameters(
    data: Any,
    ids: Any,
    *,
    num_segments: int,
    batch: int | None = None,
    indices_are_sorted: bool = False,
    deterministic: bool = False,
    has_order: bool = False,
    shares_ties: bool = False,
    **_: Any,
) -> dict[str, int]:
    """What the native modules ask of a call; `data` has the element type and the features."""
    batch = batch_of(data, ids) if batch is None else batch
    return {
        "batch": batch,
        "rows": ids.shape[1],
        "segments": num_segments,
        "features": math.prod(data.shape[2:]),
        "data_is_shared": data.shape[0] != batch,
        "ids_are_shared": ids.shape[0] != batch,
        "element_bytes": np.dtype(data.dtype).itemsize,
        "is_floating": jnp.issubdtype(data.dtype, jnp.floating),
        "indices_are_sorted": indices_are_sorted,
        "deterministic": deterministic,
        "has_order": has_order,
        "shares_ties": shares_ties,
    }


def _gradient_plan_parameters(
    cells: Any, *others: Any, ids: int, has_order: bool = False, shares_ties: bool = False, **_: Any
) -> dict[str, int]:
    """The same of a gradient of ``[batch, segment, ...]``; the operand number `ids` is the ids."""
    arrays = (cells, *others)
    options = {"batch": batch_of(*arrays), "has_order": has_order, "shares_ties": shares_ties}
    return _plan_parameters(cells, arrays[ids], num_segments=cells.shape[1], **options)


def _extremum_backward_plan_parameters(
    d_output: Any, winner: Any, ids: Any, order: Any, *data_and_output: Any, **_: Any
) -> dict[str, int]:
    options = {"has_order": order.shape[1] == ids.shape[1], "shares_ties": bool(data_and_output)}
    return _gradient_plan_parameters(d_output, winner, ids, order, *data_and_output, ids=2, **options)


def _beyond_32_bits(num_rows: int, num_segments: int) -> str | None:
    """Winners are int32 and segments uint32 in the kernels."""
    if num_rows >= np.iinfo(np.int32).max:
        return "it has 2^31 - 1 rows or more"
    return "it has 2^32 - 1 segments or more" if num_segments >= np.iinfo(np.uint32).max else None


def _reduction_op(name: str, *, attributes: tuple[str, ...] = (), **fields: Any) -> Op:
    """An op of (data, ids) whose results are cells."""
    return Op(
        name=name,
        operands=(ROWS, IDS),
        attributes=("indices_are_sorted", *attributes),
        plan_parameters=_plan_parameters,
        whole=("segment",),
        reduced=("row",),
        kernel_limit=lambda data, ids, *, num_segments, **_: _beyond_32_bits(ids.shape[1], num_segments),
        **fields,
    )


def _gradient_op(name: str, *, operands: tuple[tuple[str, ...], ...], **fields: Any) -> Op:
    """An op of (cells, ..., ids, ...) whose result is the cotangent of the data."""
    ids = operands.index(IDS)

    def result_types(*arrays: Any, **_: Any) -> list[tuple[tuple[int, ...], Any]]:
        batch = batch_of(*arrays)
        return [((batch, arrays[ids].shape[1], *arrays[0].shape[2:]), arrays[0].dtype)]

    defaults = {"plan_parameters": functools.partial(_gradient_plan_parameters, ids=ids)}
    return Op(
        name=name,
        operands=operands,
        results=(ROWS,),
        result_types=result_types,
        dtypes=FLOATING_DTYPES,
        whole=("segment",),
        kernel_limit=lambda *arrays, **_: _beyond_32_bits(arrays[ids].shape[1], arrays[0].shape[1]),
        **(defaults | fields),
    )


SELECTION = Guarantee(accumulator="none", math_precision="exact", deterministic=True, bit_stable_on_same_hardware=True)
DIVISION = dataclasses.replace(SELECTION, math_precision="rounded once")


def _product_guarantee(dtype: str, platform: str, **_: bool) -> Guarantee:
    if not jnp.issubdtype(dtype, jnp.floating):
        return dataclasses.replace(SELECTION, accumulator=dtype)
    accumulator = np.dtype(compute_dtype(jnp.dtype(dtype))).name
    return dataclasses.replace(SELECTION, accumulator=accumulator, math_precision="accumulated")


def _sum_guarantee(dtype: str, platform: str, *, deterministic: bool, indices_are_sorted: bool) -> Guarantee:
    """As of products, but unsorted floating sums on GPUs are added in the order in which threads come."""
    guarantee = _product_guarantee(dtype, platform)
    is_stable = platform == "cpu" or deterministic or indices_are_sorted or guarantee.math_precision == "exact"
    return dataclasses.replace(guarantee, deterministic=is_stable, bit_stable_on_same_hardware=is_stable)


def _extremum_ops(name: str, extremum: _Extremum, aliases_of_backward: tuple[str, ...]) -> tuple[Op, Op, Op]:
    """The ops ``segment_<name>``, ``segment_<name>_with_winner`` and ``segment_<name>_backward``."""
    reduction = _reduction_op(
        f"segment_{name}",
        results=(CELLS,),
        result_types=lambda data, ids, *, num_segments, **_: [_cells(data.dtype, data, ids, num_segments)],
        reference=functools.partial(_reference_reduce_extremum, extremum),
        dtypes=ORDERED_DTYPES,
        guarantee=SELECTION,
        shard_program=functools.partial(_shard_extremum, extremum),
    )
    with_winner = _reduction_op(
        f"segment_{name}_with_winner",
        results=(CELLS, CELLS, IDS),
        result_types=lambda data, ids, *, num_segments, with_order, **_: [
            _cells(data.dtype, data, ids, num_segments),
            _cells(np.int32, data, ids, num_segments),
            ((batch_of(data, ids), ids.shape[1] if with_order else 1), np.dtype(np.int32)),
        ],
        reference=functools.partial(_reference_with_winner, extremum),
        dtypes=FLOATING_DTYPES,
        guarantee=SELECTION,
        attributes=("first_wins",),
        shard_program=functools.partial(_shard_with_winner, extremum),
    )
    backward = _gradient_op(
        f"segment_{name}_backward",
        operands=(CELLS, CELLS, IDS, IDS, ROWS, CELLS),
        plan_parameters=_extremum_backward_plan_parameters,
        reference=_reference_extremum_backward,
        guarantee=DIVISION,
        aliases=aliases_of_backward,
        shard_program=_shard_extremum_backward,
    )
    return reduction, with_winner, backward


SEGMENT_MAX, SEGMENT_MAX_WITH_WINNER, SEGMENT_MAX_BACKWARD = _extremum_ops(
    "max", _MAXIMUM, ("unsorted_segment_max_backward",)
)
SEGMENT_MIN, SEGMENT_MIN_WITH_WINNER, SEGMENT_MIN_BACKWARD = _extremum_ops("min", _MINIMUM, ())

SEGMENT_ARGMAX, SEGMENT_ARGMIN = (
    _reduction_op(
        name,
        results=(CELLS,),
        result_types=lambda data, ids, *, num_segments, **_: [_cells(np.int32, data, ids, num_segments)],
        reference=functools.partial(_reference_row_of_extremum, extremum),
        dtypes=WIDE_DTYPES,
        guarantee=SELECTION,
        shard_program=functools.partial(_shard_row_of_extremum, extremum),
    )
    for name, extremum in (("segment_argmax", _MAXIMUM), ("segment_argmin", _MINIMUM))
)

SEGMENT_SUM = _reduction_op(
    "segment_sum",
    results=(CELLS,),
    result_types=lambda data, ids, *, num_segments, **_: [_cells(data.dtype, data, ids, num_segments)],
    reference=_reference_sum,
    dtypes=WIDE_DTYPES,
    guarantee=_sum_guarantee,
    attributes=("deterministic",),
    shard_program=_shard_sum,
    transpose=lambda _, d_outputs, ids, *, num_segments, **params: SEGMENT_SUM_BACKWARD(d_outputs[0], ids, **params),
)

SEGMENT_SUM_BACKWARD = _gradient_op(
    "segment_sum_backward",
    operands=(CELLS, IDS),
    reference=_reference_sum_backward,
    guarantee=SELECTION,
    transpose=lambda d_outputs, d_data, ids, **params: SEGMENT_SUM(
        *d_data, ids, **_sum_params(d_outputs[0].shape[1], **params)
    ),
)

SEGMENT_MEAN = _reduction_op(
    "segment_mean",
    results=(CELLS, COUNTS),
    result_types=lambda data, ids, *, num_segments, **_: [
        _cells(data.dtype, data, ids, num_segments),
        ((batch_of(data, ids), num_segments), np.dtype(np.int32)),
    ],
    reference=_reference_mean,
    dtypes=FLOATING_DTYPES,
    guarantee=_sum_guarantee,
    attributes=("deterministic",),
    shard_program=_shard_mean,
    transpose=lambda _, d_results, ids, *, num_segments, **params: SEGMENT_MEAN_BACKWARD(
        d_results[0], _count_rows(ids, num_segments), ids, **params
    ),
)

SEGMENT_MEAN_BACKWARD = _gradient_op(
    "segment_mean_backward",
    operands=(CELLS, COUNTS, IDS),
    reference=_reference_mean_backward,
    guarantee=DIVISION,
    transpose=lambda d_outputs, d_data, count, ids, **params: SEGMENT_MEAN(
        *d_data, ids, **_sum_params(d_outputs[0].shape[1], **params)
    )[:1],
)

SEGMENT_PROD = _reduction_op(
    "segment_prod",
    results=(CELLS,),
    result_types=lambda data, ids, *, num_segments, **_: [_cells(data.dtype, data, ids, num_segments)],
    reference=_reference_prod,
    dtypes=WIDE_DTYPES,
    guarantee=_product_guarantee,
    shard_program=_shard_prod,
)

SEGMENT_PROD_WITH_RESIDUAL = _reduction_op(
    "segment_prod_with_residual",
    results=(CELLS, CELLS, CELLS),
    result_types=lambda data, ids, *, num_segments, **_: [
        _cells(dtype, data, ids, num_segments) for dtype in (data.dtype, compute_dtype(data.dtype), np.int32)
    ],
    reference=_reference_prod_with_residual,
    dtypes=FLOATING_DTYPES,
    guarantee=_product_guarantee,
    shard_program=_shard_prod_with_residual,
)

SEGMENT_PROD_BACKWARD = _gradient_op(
    "segment_prod_backward",
    operands=(CELLS, CELLS, CELLS, ROWS, IDS),
    reference=_reference_prod_backward,
    guarantee=_product_guarantee,
    transpose=_transpose_prod_backward,
)

SEGMENT_SOFTMAX, SEGMENT_SOFTMAX_BACKWARD = (
    Op(
        name=name,
        operands=operands,
        results=(ROWS,),
        result_types=lambda *arrays, **_: [((batch_of(*arrays), *arrays[0].shape[1:]), arrays[0].dtype)],
        reference=reference,
        dtypes=FLOATING_DTYPES,
        guarantee=_sum_guarantee,
        attributes=("num_segments", "indices_are_sorted", "deterministic"),
        plan_parameters=lambda *arrays, **params: _plan_parameters(_batched(arrays[:-1]), arrays[-1], **params),
        shard_program=shard_program,
        kernel_limit=lambda *arrays, num_segments, **_: _beyond_32_bits(arrays[-1].shape[1], num_segments),
    )
    for name, operands, reference, shard_program in (
        ("segment_softmax", (ROWS, IDS), _reference_softmax, _shard_softmax),
        ("segment_softmax_backward", (ROWS, ROWS, IDS), _reference_softmax_backward, _shard_softmax_backward),
    )
)


def _batched(arrays: Sequence[Any]) -> Any:
    """The first array that the batch does not share, if there is one."""
    return next((x for x in arrays if x.shape[0] != 1), arrays[0])


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


@dataclasses.dataclass(frozen=True)
class _Params:
    """The static arguments of a segment reduction, under the names that the ops take them by."""

    num_segments: int
    indices_are_sorted: bool


@dataclasses.dataclass(frozen=True)
class _ExtremumParams(_Params):
    first_wins: bool


@dataclasses.dataclass(frozen=True)
class _SumParams(_Params):
    deterministic: bool


def _sum_params(num_segments: int, indices_are_sorted: bool = False, deterministic: bool = False) -> dict[str, Any]:
    """What the transpose of a gradient needs; public gradients do not know how the segments were summed."""
    return dataclasses.asdict(_SumParams(num_segments, indices_are_sorted, deterministic))


def _options(params: _SumParams) -> dict[str, Any]:
    """The params of the gradient of a sum, where the shape of the cotangent tells the number of segments."""
    return {"indices_are_sorted": params.indices_are_sorted, "deterministic": params.deterministic}


def _first_result(op: Op) -> Callable[..., Array]:
    return lambda params, *arrays: op(*arrays, **dataclasses.asdict(params))[0]


def _count_rows(ids: Array, num_segments: int) -> Array:
    """The number of rows of each segment ``[batch, S]``, for ids ``[batch, N]``."""
    ones = jnp.ones((1, ids.shape[1]), jnp.int32)
    return SEGMENT_SUM(ones, ids, **_sum_params(num_segments))[0]


LEAST_ORDERED_ROW_BYTES = 32
LEAST_ORDERED_BYTES = 2**23


def _with_order(data: Array, params: _Params) -> bool:
    """Whether the forward kernel notes the order that it brings unsorted rows into, for the gradient to follow.

    Worth its memory where rows are wide and too many for the caches.
    """
    if params.indices_are_sorted or not jax_versions.is_static_shape(data.shape):
        return False
    row_bytes = math.prod(data.shape[2:]) * data.dtype.itemsize
    return row_bytes > LEAST_ORDERED_ROW_BYTES and data.shape[1] * row_bytes > LEAST_ORDERED_BYTES


def _extremum_rules(reduction: Op, with_winner: Op, backward: Op) -> Differentiable:
    def forward(params: _ExtremumParams, data: Array, ids: Array) -> tuple[Array, tuple[Array, ...]]:
        output, winner, order = with_winner(
            data, ids, **dataclasses.asdict(params), with_order=_with_order(data, params)
        )
        residuals = (winner, ids, order)
        return output, residuals if params.first_wins else (*residuals, data, output)

    def gradient(params: _ExtremumParams, residuals: tuple[Array, ...], d_output: Array) -> tuple[Array, None]:
        [d_data] = backward(d_output, *residuals)
        return d_data, None

    return Differentiable(_first_result(reduction), forward, gradient)


_segment_max = _extremum_rules(SEGMENT_MAX, SEGMENT_MAX_WITH_WINNER, SEGMENT_MAX_BACKWARD)
_segment_min = _extremum_rules(SEGMENT_MIN, SEGMENT_MIN_WITH_WINNER, SEGMENT_MIN_BACKWARD)


def _segment_sum_forward(params: _SumParams, data: Array, ids: Array) -> tuple[Array, Array]:
    return _first_result(SEGMENT_SUM)(params, data, ids), ids


def _segment_sum_vjp(params: _SumParams, ids: Array, d_output: Array) -> tuple[Array, None]:
    [d_data] = SEGMENT_SUM_BACKWARD(d_output, ids, **_options(params))
    return d_data, None


_segment_sum = Differentiable(_first_result(SEGMENT_SUM), _segment_sum_forward, _segment_sum_vjp)


def _segment_mean_forward(params: _SumParams, data: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    output, count = SEGMENT_MEAN(data, ids, **dataclasses.asdict(params))
    return output, (count, ids)


def _segment_mean_vjp(params: _SumParams, residuals: tuple[Array, Array], d_output: Array) -> tuple[Array, None]:
    [d_data] = SEGMENT_MEAN_BACKWARD(d_output, *residuals, **_options(params))
    return d_data, None


_segment_mean = Differentiable(_first_result(SEGMENT_MEAN), _segment_mean_forward, _segment_mean_vjp)


def _segment_prod_forward(params: _Params, data: Array, ids: Array) -> tuple[Array, tuple[Array, ...]]:
    output, mantissa, packed = SEGMENT_PROD_WITH_RESIDUAL(data, ids, **dataclasses.asdict(params))
    # The gradient depends on the data, through the residual as well; its derivative comes from the data alone.
    return output, (jax.lax.stop_gradient(mantissa), packed, data, ids)


def _segment_prod_vjp(params: _Params, residuals: tuple[Array, ...], d_output: Array) -> tuple[Array, None]:
    [d_data] = SEGMENT_PROD_BACKWARD(d_output, *residuals)
    return d_data, None


_segment_prod = Differentiable(_first_result(SEGMENT_PROD), _segment_prod_forward, _segment_prod_vjp)


def _segment_softmax_forward(params: _SumParams, logits: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    [probabilities] = SEGMENT_SOFTMAX(logits, ids, **dataclasses.asdict(params))
    return probabilities, (probabilities, ids)


def _segment_softmax_vjp(
    params: _SumParams, residuals: tuple[Array, Array], d_probabilities: Array
) -> tuple[Array, None]:
    probabilities, ids = residuals
    [d_logits] = SEGMENT_SOFTMAX_BACKWARD(probabilities, d_probabilities, ids, **dataclasses.asdict(params))
    return d_logits, None


_segment_softmax = Differentiable(_first_result(SEGMENT_SOFTMAX), _segment_softmax_forward, _segment_softmax_vjp)


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

    def params(self, params_type: Callable[..., Any], **options: Any) -> Any:
        return params_type(num_segments=self.num_segments, indices_are_sorted=self.indices_are_sorted, **options)

    def with_data(self, data: Array) -> _SegmentCall:
        return dataclasses.replace(self, data=data)

    def with_inexact_data(self) -> _SegmentCall:
        """Integers and bool as floating numbers, as in ``jax.numpy.mean``."""
        dtype = self.data.dtype
        if jnp.issubdtype(dtype, jnp.inexact):
            return self
        return self.with_data(self.data.astype(jnp.float64 if dtype.itemsize == 8 else jnp.float32))

    def with_wide_integers(self) -> _SegmentCall:
        """bool and integers of less than 32 bits as int32."""
        dtype = self.data.dtype
        is_narrow = not jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4
        return self.with_data(self.data.astype(jnp.int32)) if is_narrow else self

    def rows(self, data: Array) -> Array:
        """`data` as one row per id, ``[N, ...]``."""
        row_shape = data.shape[1:]
        if data.shape != (*self.ids_shape, *row_shape):
            data = jnp.broadcast_to(data, (*self.ids_shape, *row_shape))
        return data if len(self.ids_shape) == 1 else data.reshape(-1, *row_shape)

    def reduce(
        self,
        reduction: Callable[..., Array],
        params: _Params,
        reduce_buckets: Callable[..., Array] | None = None,
    ) -> Array:
        """Applies a segment reduction to the rows.

        Args:
          reduction: ``(params, data [1, N, ...], ids [1, N]) -> [1, S, ...]``
          params: of the reduction without buckets.
          reduce_buckets: reduces the leading axis of the buckets' results; None: without buckets.
        """
        use_buckets = self.bucket_size is not None and reduce_buckets is not None
        if use_buckets:
            num_buckets = -(-self.segment_ids.shape[0] // self.bucket_size)
            params = dataclasses.replace(params, num_segments=num_buckets * self.num_segments, indices_are_sorted=False)

        def call(data: Array, ids: Array) -> Array:
            if use_buckets:
                bucket = jnp.arange(ids.shape[0], dtype=ids.dtype) // self.bucket_size
                is_member = (ids >= 0) & (ids < self.num_segments)
                ids = jnp.where(is_member, ids + bucket * self.num_segments, -1)
            output = reduction(params, self.rows(data)[None], ids[None])[0]
            if use_buckets:
                output = output.reshape(num_buckets, self.num_segments, *output.shape[1:])
                output = reduce_buckets(output, axis=0).astype(output.dtype)
            return output

        return self._with_out_sharding(call)

    def map_rows(self, function: Callable[..., Array], params: _Params) -> Array:
        """Applies ``(params, data [1, N, ...], ids [1, N]) -> [1, N, ...]`` to the rows."""

        def call(data: Array, ids: Array) -> Array:
            return _shaped_as_ids(function(params, self.rows(data)[None], ids[None])[0], self.ids_shape)

        return self._with_out_sharding(call)

    def gradient(self, rules: Differentiable, params: _Params, d_output: Array) -> Array:
        """The cotangent of the data, given that of the cells ``[S, ...]``."""
        data, ids, d_output = jax_versions.unify_varying(self.data, self.segment_ids, d_output)
        rows = self.rows(data)
        _, residuals = rules.forward(params, rows[None], ids[None])
        d_rows, _ = rules.backward(params, residuals, d_output[None])
        [d_data] = jax.linear_transpose(self.rows, data)(split_like(d_rows[0], jax.typeof(rows)))
        return d_data

    def _with_out_sharding(self, call: Callable[[Array, Array], Array]) -> Array:
        if self.out_sharding is not None:
            explicit_axes = self.out_sharding.mesh.explicit_axes
            call = jax.sharding.auto_axes(call, axes=explicit_axes, out_sharding=self.out_sharding)
        return call(self.data, self.segment_ids)


def _over_buckets(reduce: Callable[..., Array]) -> Callable[..., Array]:
    """A maximum or minimum that passes no gradient where there is a NaN; that of JAX divides zero by zero."""

    def over_buckets(cells: Array, axis: int) -> Array:
        if not jnp.issubdtype(cells.dtype, jnp.inexact):
            return reduce(cells, axis=axis)
        has_nan = jnp.any(cells != cells, axis=axis, keepdims=True)
        reduced = reduce(jnp.where(has_nan, 0, cells), axis=axis)
        return jnp.where(jnp.squeeze(has_nan, axis), jnp.nan, reduced)

    return over_buckets


def _shaped_as_ids(rows: Array, ids_shape: tuple[int, ...]) -> Array:
    return rows if len(ids_shape) == 1 else rows.reshape(*ids_shape, *rows.shape[1:])


def _reduce_extremum(
    name: str, call: _SegmentCall, rules: Differentiable, reduce_buckets: Callable[..., Array], tie_break: TieBreak
) -> Array:
    if call.bucket_size is not None and call.segment_ids.shape[0] == 0:
        raise ValueError(f"{name}: bucket_size needs segment_ids of shape [N] with N > 0, got shape (0,)")
    params = call.params(_ExtremumParams, first_wins=_first_wins(name, tie_break))
    # Buckets make no difference where the first of tied rows gets the gradient.
    return call.reduce(rules, params, None if params.first_wins else _over_buckets(reduce_buckets))


def _extremum_backward(
    name: str,
    rules: Differentiable,
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike,
    indices_are_sorted: bool,
    mode: Mode,
    tie_break: TieBreak,
) -> Array:
    d_output, call = _canonicalize_backward(name, d_output, data, segment_ids, indices_are_sorted, mode)
    # Nothing here depends on `data` smoothly; stopping its gradient spares JAX from finding that out.
    call = call.with_data(jax.lax.stop_gradient(call.data))
    return call.gradient(rules, call.params(_ExtremumParams, first_wins=_first_wins(name, tie_break)), d_output)


def _row_of_extremum(op: Op, *arguments: Any) -> Array:
    call = _canonicalize(op.name, *arguments)
    call = call.with_data(jax.lax.stop_gradient(call.data)).with_wide_integers()
    return call.reduce(_first_result(op), call.params(_Params))


def _reduce_arithmetic(
    name: str, call: _SegmentCall, rules: Differentiable, params: _Params, reduce_buckets: Callable[..., Array]
) -> Array:
    if call.data.dtype == jnp.bool_:
        raise TypeError(f"{name}: data must have a numeric dtype, got bool")
    # Arithmetic modulo 2^32 is also right modulo 2^16 and 2^8.
    return call.with_wide_integers().reduce(rules, params, reduce_buckets).astype(call.data.dtype)


def _canonicalize(
    name: str,
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None,
    indices_are_sorted: bool,
    mode: Mode,
    out_sharding: OutSharding,
    bucket_size: int | None = None,
    data_name: str = "data",
) -> _SegmentCall:
    """Checks the arguments that all segment reductions share; raises what ``jax.ops`` raises, in clearer words."""
    data = as_array(name, data_name, data)
    ids = _checked_ids(name, segment_ids)
    row_shape = data.shape[1:]
    if not _broadcasts(data.shape, (*ids.shape, *row_shape)):
        raise ValueError(
            f"{name}: {data_name} must have one row per id, that is, a shape that broadcasts to segment_ids.shape + "
            f"{data_name}.shape[1:] = {(*ids.shape, *row_shape)}; got {data_name}.shape = {data.shape}, "
            f"segment_ids.shape = {ids.shape}"
        )
    num_segments = _canonical_num_segments(name, ids, num_segments)
    clamps = _clamps(name, mode)
    if bucket_size is not None:
        _check_bucket_size(name, bucket_size, ids)
        if out_sharding is not None:
            raise NotImplementedError(f"{name}: out_sharding cannot be combined with bucket_size")
    sharding = jax_versions.canonicalize_sharding(out_sharding, name)
    if sharding is not None and sharding.spec.unreduced:
        raise NotImplementedError(f"{name}: out_sharding must not be unreduced, got {sharding.spec}")
    return _SegmentCall(
        data=data,
        segment_ids=_follow_rows(_flat_ids(ids, num_segments, clamps), data),
        ids_shape=ids.shape,
        num_segments=num_segments,
        indices_are_sorted=bool(indices_are_sorted),
        bucket_size=bucket_size,
        out_sharding=sharding,
    )


def _canonicalize_backward(
    name: str,
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike,
    indices_are_sorted: bool,
    mode: Mode,
) -> tuple[Array, _SegmentCall]:
    """Checks the arguments of a gradient that depends on the data."""
    d_output = _cotangent_of_cells(name, d_output)
    call = _canonicalize(name, data, segment_ids, d_output.shape[0], indices_are_sorted, mode, None)
    _check_like(name, "d_output", d_output, "data", call.data, (d_output.shape[0], *call.data.shape[1:]))
    return d_output, call


def _canonicalize_without_data(
    name: str, d_output: ArrayLike, segment_ids: ArrayLike, mode: Mode
) -> tuple[Array, Array, tuple[int, ...]]:
    """Checks the arguments of a gradient that needs no data; also gives the shape of the ids, which are flattened."""
    d_output = _cotangent_of_cells(name, d_output)
    if not jnp.issubdtype(d_output.dtype, jnp.inexact):
        raise TypeError(f"{name}: d_output must have a floating dtype, got {d_output.dtype}")
    ids = _checked_ids(name, segment_ids)
    return d_output, _flat_ids(ids, d_output.shape[0], _clamps(name, mode)), ids.shape


def _cotangent_of_cells(name: str, d_output: ArrayLike) -> Array:
    d_output = as_array(name, "d_output", d_output)
    if d_output.ndim == 0:
        raise ValueError(f"{name}: d_output must have shape [num_segments, ...], got a scalar")
    return d_output


def _check_like(name: str, argument: str, value: Array, like_name: str, like: Array, shape: tuple[int, ...]) -> None:
    """Checks that a cotangent has the floating dtype of `like`, and the shape that fits to it."""
    if value.dtype != like.dtype or not jnp.issubdtype(value.dtype, jnp.inexact):
        raise TypeError(
            f"{name}: {argument} and {like_name} must have the same floating dtype, got {value.dtype} and {like.dtype}"
        )
    if value.shape != shape:
        raise ValueError(f"{name}: {argument} must have shape {shape} to fit {like_name}, got {value.shape}")


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    offset = len(target) - len(shape)
    return offset >= 0 and all(size in (1, target[offset + i]) for i, size in enumerate(shape))


def _checked_ids(name: str, segment_ids: ArrayLike) -> Array:
    ids = as_array(name, "segment_ids", segment_ids)
    if ids.dtype == jnp.bool_:
        raise IndexError(f"{name}: segment_ids must have an integer dtype, got bool")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name}: segment_ids must have an integer dtype, got {ids.dtype}")
    return ids


def _clamps(name: str, mode: Mode) -> bool:
    """Whether ids out of range are clamped rather than dropped."""
    try:
        return jax.lax.GatherScatterMode.from_any(mode) == jax.lax.GatherScatterMode.CLIP
    except ValueError:
        if mode == "one_hot":  # a mode that older versions of JAX do not know
            return False
    raise ValueError(
        f"{name}: mode must be None, 'fill', 'drop', 'clip', 'promise_in_bounds', 'one_hot' or a "
        f"jax.lax.GatherScatterMode, got {mode!r}"
    )


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
    if ids.ndim != 1:
        raise ValueError(f"{name}: bucket_size needs segment_ids of shape [N], got shape {ids.shape}")


def _flat_ids(ids: Array, num_segments: int, clamps: bool) -> Array:
    """Ids as int32 or int64 ``[N]``. What does not fit stays out of range, and ascending ids stay ascending."""
    if clamps and num_segments > 0:
        ids = jnp.clip(ids, 0, min(num_segments - 1, int(jnp.iinfo(ids.dtype).max)))
    ids = ids.reshape(-1) if ids.ndim != 1 else ids
    signed = jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32
    most = jnp.iinfo(signed).max
    if jnp.iinfo(ids.dtype).max > most and num_segments <= most:
        ids = jnp.minimum(ids, ids.dtype.type(most))  # to wrap would make them negative, in front of all others
    return ids if ids.dtype == signed else ids.astype(signed)


def _follow_rows(ids: Array, data: Array) -> Array:
    """Under explicit sharding, splits the ids over devices as the rows of `data` are."""
    return split_as(ids, data, (0,)) if data.shape[:1] == ids.shape else ids


def _first_wins(name: str, tie_break: str) -> bool:
    if tie_break not in ("split", "first"):
        raise ValueError(f"{name}: tie_break must be 'split' or 'first', got {tie_break!r}")
    return tie_break == "first"
