"""Variance and standard deviation of segments, in two passes: first the means, then the squares of differences."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import accumulation_dtype, in_range, reshard_as
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.functions import Params
from jax_baracuda._core.public import public_function
from jax_baracuda._core.selection import Implementation
from jax_baracuda.ops.segment.arguments import Mode, OutSharding, Segments, as_inexact, canonical_segments, canonicalize
from jax_baracuda.ops.segment.cells import per_row
from jax_baracuda.ops.segment.ids import check_numbered, static_size
from jax_baracuda.ops.segment.mean import SEGMENT_MEAN, segment_mean
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.sum import segment_sum
from jax_baracuda.ops.segment.sum_ops import SEGMENT_SUM, SEGMENT_SUM_BACKWARD, gradient_params


@public_function(segment_mean, segment_sum)
def segment_var(
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    ddof: int = 0,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Variance of the rows of each segment.

    ``out[s, ...] = sum { |data[n, ...] - mean[s, ...]|^2 : segment_ids[n] == s } / (number of rows of s - ddof)``,
    where ``mean`` is the :func:`segment_mean` of the data.

    Args:
      ddof: a static, non-negative integer, as in :func:`jax.numpy.var`: 0 for the variance of the rows, 1 for an
        unbiased estimate from a sample.
      plan: a :func:`segment_plan` of the rows, which replaces `segment_ids`, `num_segments` and `mode`. The rows are
        moved into its order once for both passes, without a sort, and all runs have the same bits. Calls trust it;
        :meth:`SegmentPlan.validate` checks it.

    Returns:
      ``[S, ...]`` with the dtype of `data`, or of its cast; real for complex numbers. Segments of at most `ddof` rows
      hold NaN, as in :func:`jax.numpy.var`. For ``ddof=0``, empty segments hold 0, like those of :func:`segment_mean`.

    Numerical guarantees: in float32 (float64 for float64), the mean is computed first, and then the sum of the squared
    differences from it. So a mean that is large beside the differences does not cancel them. The result is rounded to
    the dtype at the end. Bit-equal from run to run, except on GPUs (see `deterministic`).

    Gradient: ``d_data[n] = d_out[s] * 2 * (data[n] - mean[s]) / (number of rows of s - ddof)`` with
    ``s = segment_ids[n]``; 0 for dropped rows and in segments of at most `ddof` rows. No sum is needed for it; `data`
    and the means are kept.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data, segment_ids = jnp.array([1.0, 3.0, 5.0, 4.0]), jnp.array([0, 0, 0, 2])
      >>> print(jb.segment_var(data, segment_ids, num_segments=3, ddof=1))
      [ 4. nan nan]
    """
    segments = canonical_segments("segment_var", segment_ids, num_segments, indices_are_sorted, mode, plan)
    return _reduce(lambda variance: variance, segments, data, out_sharding, deterministic, ddof)


@public_function(segment_var, segment_mean, segment_sum)
def segment_std(
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    ddof: int = 0,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Standard deviation of the rows of each segment, the square root of :func:`segment_var`.

    ``out[s, ...] = sqrt(segment_var(data, segment_ids, num_segments, ddof=ddof)[s, ...])``

    Numerical guarantees: those of :func:`segment_var`. The root is taken before the variance is rounded to the dtype.

    Gradient: ``d_data[n] = d_out[s] * (data[n] - mean[s]) / ((number of rows of s - ddof) * out[s])`` with
    ``s = segment_ids[n]``. It is 0, not NaN, where the computed variance is 0, as in a segment of one row; 0 for
    dropped rows and in segments of at most `ddof` rows. Derivatives of higher order are 0 there, too. Equal rows whose
    mean is rounded have a tiny variance instead, whose gradient is rounding alone.

    Example:
      >>> import jax, jax.numpy as jnp, jax_baracuda as jb
      >>> data, segment_ids = jnp.array([1.0, 3.0, 4.0]), jnp.array([0, 0, 1])
      >>> print(jb.segment_std(data, segment_ids, num_segments=2))
      [1. 0.]
      >>> print(jax.grad(lambda x: jb.segment_std(x, segment_ids, num_segments=2).sum())(data))
      [-0.5  0.5  0. ]
    """
    segments = canonical_segments("segment_std", segment_ids, num_segments, indices_are_sorted, mode, plan)
    return _reduce(_root, segments, data, out_sharding, deterministic, ddof)


def _reduce(
    of_variance: Callable[[Array], Array],
    segments: Segments,
    data: ArrayLike,
    out_sharding: OutSharding,
    deterministic: bool,
    ddof: int,
) -> Array:
    """A function of the variance, applied before rounding to the dtype of the data (of its real part, if complex)."""
    check_numbered(segments.name, "rows", segments.ids.shape[0])
    call = canonicalize(segments, data, out_sharding)
    call = call.with_data(as_inexact(call.data)).sorted_by_plan()
    ddof = static_size(segments.name, "ddof", ddof)

    def reduction(params: Params, **arrays: Array) -> Array:
        return of_variance(_wide_variance(params, **arrays)).astype(jnp.finfo(call.data.dtype).dtype)

    return call.reduce(reduction, call.params(deterministic=deterministic, ddof=ddof))


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules. JAX would also differentiate by the means: a sum of differences, which is 0 except for rounding.


def _differences(params: Params, data: Array, mean: Array, ids: Array) -> Array:
    """The rows minus the means of their segments, in the dtype of the means; 0 for dropped rows of any value."""
    [of_rows] = SEGMENT_SUM_BACKWARD(mean, ids, **gradient_params(params))
    is_member = per_row(in_range(ids, params["num_segments"]), data)
    return jnp.where(is_member, data.astype(mean.dtype) - of_rows, 0)


def _over_freedom(params: Params, cells: Array, mean: Array, count: Array) -> Array:
    """Cells divided by the degrees of freedom of their segments, or by 1 if there are none."""
    divisors = per_row(jnp.maximum(count - params["ddof"], 1), cells).astype(cells.dtype)
    # Like `divided`, which would compare the cells. JAX cannot transpose this if they are a cotangent.
    return cells / jnp.where(mean == mean, divisors, 1)


def _forward(params: Params, *, data: Array, segment_ids: Array) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    segment_ids = reshard_as(segment_ids, data, (0,))
    of_sums = {"num_segments": params["num_segments"], **gradient_params(params)}
    mean, count = SEGMENT_MEAN(data.astype(accumulation_dtype(data.dtype)), segment_ids, **of_sums)
    difference = _differences(params, data, mean, segment_ids)
    [total] = SEGMENT_SUM(jnp.real(difference * jnp.conj(difference)), segment_ids, **of_sums)
    variance = _over_freedom(params, total, mean, count)
    if params["ddof"] > 0:
        variance = jnp.where(per_row(count > params["ddof"], variance), variance, jnp.nan)
    return variance, (data, mean, count, segment_ids)


def _backward(params: Params, residuals: tuple[Array, Array, Array, Array], d_output: Array) -> dict[str, Array]:
    data, mean, count, segment_ids = residuals
    d_total = jnp.where(per_row(count > params["ddof"], d_output), _over_freedom(params, d_output, mean, count), 0)
    [d_squares] = SEGMENT_SUM_BACKWARD(d_total, segment_ids, **gradient_params(params))
    return {"data": 2 * jnp.conj(_differences(params, data, mean, segment_ids)) * d_squares}


_wide_variance = KernelVjp("segment_var", _forward, _backward)


@jax.custom_jvp
def _root(variance: Array) -> Array:
    """The square root. Its derivatives are 0 at 0, where they would be infinite, and at NaN."""
    return jnp.sqrt(variance)


@_root.defjvp
def _jvp_of_root(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    [variance], [d_variance] = primals, tangents
    has_slope, root = variance > 0, _root(variance)
    slope = jnp.where(has_slope, 0.5 / jnp.where(has_slope, root, 1), 0)
    return root, slope * d_variance
