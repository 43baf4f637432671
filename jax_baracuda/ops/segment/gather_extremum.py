"""Maximum and minimum of gathered rows over segments: message passing on graphs without an array of messages.

The forward kernel records which edge wins each cell. For each row, the gradient adds up the cotangents of the cells
that its edges won. If tied edges share a cell, the gradient finds them by comparing their rows with the extremum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.batch import map_over_batch
from jax_baracuda._core.functions import Params
from jax_baracuda._core.public import public_function
from jax_baracuda._core.selection import Implementation
from jax_baracuda.ops.segment.arguments import EdgeCall, Mode, TieBreak, canonicalize_edges
from jax_baracuda.ops.segment.batched_vjp import BatchedVjp
from jax_baracuda.ops.segment.edges import as_gather_ids
from jax_baracuda.ops.segment.extremum import (
    GATHER_SEGMENT_EXTREMUM,
    NO_PLAN,
    PLAN_FIELDS,
    first_gets_all,
    gradient_over_graphs,
    minimum_of,
    shares_of_ties,
    unpermuted_ids,
)
from jax_baracuda.ops.segment.gather_sum import gather_segment_sum
from jax_baracuda.ops.segment.ids import check_numbered
from jax_baracuda.ops.segment.plan import SegmentPlan


@public_function(gather_segment_sum)
def gather_segment_max(
    data: ArrayLike,
    gather_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    tie_break: TieBreak = "split",
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Maximum of gathered rows over the edges of each segment: one layer of message passing.

    ``out[s, ...] = max { data[gather_ids[e], ...] : segment_ids[e] == s }``

    The same as ``segment_max(data[gather_ids], segment_ids, num_segments)``. The kernels of this function and of its
    gradient write and read no array of edges times features.

    Args:
      tie_break: how edges that tie for the maximum share the gradient. "split": equally, as in JAX; if the maximum is
        the identity of an empty segment (-inf), the identity counts as one more tied edge. "first": the lowest tied
        edge gets all of it, and `data` is not kept for the backward pass.
      deterministic: on GPUs, the gradients of unsorted edges without a plan are added in an order that varies from run
        to run where that was faster: for few edges or narrow rows. True: sort them, so that all runs are bit-equal.
        Sorted edges and plans are bit-equal anyway. On CPUs everything is.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Segments without edges hold -inf.

    Numerical guarantees: exact. NaN propagates; ``max(-0, +0)`` is ``+0`` in either order; subnormal numbers are
    numbers, not zeros. The gradient adds up in float32 (float64 for float64). Bit-equal from run to run, except for
    gradients on GPUs (see `deterministic`).

    Gradient: ``d_data[n] = sum { d_out[segment_ids[e]] * share[e] : gather_ids[e] == n }``, where the share is
    ``1 / number of tied edges`` or 1 for the winner, and exactly 0 for every other edge. A segment that holds a NaN
    passes no gradient, nor do gather ids that are out of range. If ``jax.vmap`` maps the ids but not `data`, the
    gradient is one sum over the edges of the whole batch, and plans do not save its sort. Derivatives treat winners
    and shares as constants; if ties are split, those beyond the first need an array of edges times features.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> senders, receivers = jnp.array([0, 1, 2, 1]), jnp.array([1, 1, 0, 0])
      >>> print(jb.gather_segment_max(data, senders, receivers, num_segments=2))
      [[5. 6.]
       [3. 4.]]
    """
    call = canonicalize_edges("gather_segment_max", data, gather_ids, segment_ids, num_segments, mode, plan)
    return _reduce(call, indices_are_sorted, tie_break, deterministic, minimum=False)


@public_function()
@minimum_of(
    gather_segment_max,
    """
    >>> import jax.numpy as jnp, jax_baracuda as jb
    >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
    >>> senders, receivers = jnp.array([0, 1, 2, 1]), jnp.array([1, 1, 0, 0])
    >>> print(jb.gather_segment_min(data, senders, receivers, num_segments=2))
    [[3. 2.]
     [1. 2.]]
    """,
)
def gather_segment_min(
    data: ArrayLike,
    gather_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    tie_break: TieBreak = "split",
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    call = canonicalize_edges("gather_segment_min", data, gather_ids, segment_ids, num_segments, mode, plan)
    return _reduce(call, indices_are_sorted, tie_break, deterministic, minimum=True)


def _reduce(call: EdgeCall, indices_are_sorted: bool, tie_break: TieBreak, deterministic: bool, minimum: bool) -> Array:
    options = {"first_wins": first_gets_all(call.name, tie_break), "minimum": minimum}
    params = call.params(indices_are_sorted, deterministic, **options)
    return _gathered_extrema[minimum](params, data=call.data, **call.edges)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


def _params_of_reduction(params: Params) -> dict[str, Any]:
    return {name: params[name] for name in ("num_segments", "indices_are_sorted", "first_wins", "minimum")}


def _primal(params: Params, *, data: Array, gather_ids: Array, segment_ids: Array, **_: Array) -> Array:
    return GATHER_SEGMENT_EXTREMUM(data, gather_ids, segment_ids, **_params_of_reduction(params), has_winner=False)[0]


def _forward(params: Params, **arrays: Array) -> tuple[Array, dict[str, Array]]:
    name = "gather_segment_min" if params["minimum"] else "gather_segment_max"
    check_numbered(name, "edges", arrays["segment_ids"].shape[0])
    output, winner = GATHER_SEGMENT_EXTREMUM.of_arrays(arrays, **_params_of_reduction(params), has_winner=True)
    return output, {"winner": winner} if params["first_wins"] else {"winner": winner, "output": output}


def _gradient(params: Params, num_joined: int, residuals: Mapping[str, Array], d_output: Array) -> dict[str, Array]:
    operands: dict[str, Array | None] = {**residuals}
    ids = operands["gather_ids"], operands["segment_ids"]
    order = operands.get("edge_order")
    if order is not None and num_joined > 0:  # plans of different batch elements cannot be merged
        ids = map_over_batch(lambda order, *ids: unpermuted_ids(ids, order), num_joined, order, *ids)
        order = None
    gather_ids, segment_ids = ids
    if order is None:
        segment_ids = as_gather_ids(segment_ids, params["num_segments"])
    d_winner = d_output if params["first_wins"] else shares_of_ties(d_output, residuals["winner"])
    # Winners are constant almost everywhere, so the gradient is linear in d_output alone.
    data_and_output = (operands.get(x) for x in ("data", "output"))
    constants = (None if x is None else jax.lax.stop_gradient(x) for x in data_and_output)
    plan = NO_PLAN if order is None else (operands[x] for x in PLAN_FIELDS)
    d_data = gradient_over_graphs(
        num_joined,
        [d_winner, residuals["winner"], gather_ids, segment_ids, *plan, *constants],
        num_rows=params["num_rows"],
        deterministic=params["deterministic"],
        minimum=params["minimum"],
    )
    return {"data": d_data}


_gathered_extrema = {
    minimum: BatchedVjp(
        name, _forward, _gradient, primal=_primal, keeps_data=lambda params, _: not params["first_wins"]
    )
    for minimum, name in ((False, "gather_segment_max"), (True, "gather_segment_min"))
}
