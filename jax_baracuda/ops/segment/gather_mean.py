"""Mean of gathered rows over segments: their sum over the number of edges."""

from __future__ import annotations

from collections.abc import Mapping

from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import accumulation_dtype
from jax_baracuda._core.autodiff import with_twin
from jax_baracuda._core.batch import map_over_batch, mapped_dims
from jax_baracuda._core.batched_autodiff import BatchedVjp
from jax_baracuda._core.selection import Implementation, selectable
from jax_baracuda.ops.segment.arguments import GatherParams, Mode, canonicalize_edges
from jax_baracuda.ops.segment.descriptions import OF_EDGES, described
from jax_baracuda.ops.segment.gather_sum import gradient_of_sum, keeps_data, reduce_edges, sum_gathered
from jax_baracuda.ops.segment.ids import check_numbered
from jax_baracuda.ops.segment.mean import divided_by_counts
from jax_baracuda.ops.segment.plan import SegmentPlan
from jax_baracuda.ops.segment.sum import count_rows


@selectable
@with_twin
@described(OF_EDGES)
def gather_segment_mean(
    data: ArrayLike,
    gather_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    weights: ArrayLike | None = None,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Mean of gathered rows over the edges of each segment: one layer of message passing.

    ``out[s, ...] = mean { weights[e] * data[gather_ids[e], ...] : segment_ids[e] == s }``

    The same as ``segment_mean(weights * data[gather_ids], segment_ids, num_segments)``, but neither this function nor
    its gradient writes or reads an array of edges times features. The divisor is the number of edges, whatever their
    weights.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Segments without edges hold 0.

    Numerical guarantees: terms are added in float32 (float64 for float64), the sum is divided there by the exact number
    of edges, and rounded once to the dtype. Bit-equal from run to run, except on GPUs (see `deterministic`).

    Gradient: the cotangent is divided by the number of edges and rounded to the dtype; then it is the gradient of
    :func:`gather_segment_sum`, also under ``jax.vmap``. No gradient of data goes through gather ids that are out of
    range. Derivatives of any order exist. ``jax.jvp`` and ``jax.jacfwd`` of this function need its twin of the same
    name in :mod:`jax_baracuda.forward_mode`.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> senders, receivers = jnp.array([0, 1, 2, 1]), jnp.array([1, 1, 0, 0])
      >>> print(jb.gather_segment_mean(data, senders, receivers, num_segments=2))
      [[4. 4.]
       [2. 3.]]
    """
    name = "gather_segment_mean"
    call = canonicalize_edges(name, data, gather_ids, segment_ids, num_segments, mode, plan)
    params = call.params(GatherParams, indices_are_sorted, deterministic)
    return reduce_edges(name, _gather_segment_mean, call, params, weights)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rule.


def _over_counts(cells: Array, segment_ids: Array, params: GatherParams) -> Array:
    """Cells divided by the numbers of their edges."""
    return divided_by_counts(cells, count_rows(segment_ids, params.num_segments, params.indices_are_sorted))


def _primal(params: GatherParams, *, data: Array, segment_ids: Array, **others: Array) -> Array:
    check_numbered("gather_segment_mean", "edges", segment_ids.shape[0])
    total = sum_gathered(params, data=data, segment_ids=segment_ids, **others, is_wide=True)
    return _over_counts(total, segment_ids, params).astype(data.dtype)


def _forward(params: GatherParams, **arrays: Array) -> tuple[Array, dict[str, Array]]:
    return _primal(params, **arrays), {}


def _backward(
    params: GatherParams, num_joined: int, residuals: Mapping[str, Array], d_output: Array
) -> dict[str, Array]:
    def gradient_of_division(d_output: Array, segment_ids: Array) -> Array:
        wide = d_output.astype(accumulation_dtype(d_output.dtype))
        return _over_counts(wide, segment_ids, params).astype(d_output.dtype)

    arrays = d_output, residuals["segment_ids"]
    d_sum = map_over_batch(gradient_of_division, mapped_dims(arrays, num_joined), *arrays)
    return gradient_of_sum(params, num_joined, residuals, d_sum)


_gather_segment_mean = BatchedVjp(
    "gather_segment_mean", _primal, _forward, _backward, shared="data", keeps_shared=keeps_data
)
