"""Maximum and minimum of segments.

The forward kernel records a *winner* per cell: the row that attains the extremum, or how many rows tie. The backward
kernel therefore reads the data again only where rows tie. The ops of gathered rows are here, too, because a call with a
plan gathers its rows in the plan's order.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype, check_choice, in_range
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.functions import Params, with_named
from jax_baracuda._core.guarantees import EXACT, accumulated, quotients
from jax_baracuda._core.op import NamedDimensions
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.rules import (
    MB,
    Traits,
    at_most_4_features,
    at_most_16_features,
    few_numbers,
    fused,
    in_cache,
    launch_bound,
    mostly_empty_segments,
    on_cpu,
    on_gpu,
    param,
    single_feature,
    uncontended,
    unordered,
    unsorted,
)
from jax_baracuda._core.selection import Implementation, may_run_kernel
from jax_baracuda._core.sharding import MeshAxes, ShardAxes, ShardKernel
from jax_baracuda.ops.segment.arguments import (
    Mode,
    OutSharding,
    SegmentCall,
    Segments,
    TieBreak,
    canonical_cotangent,
    canonical_segments,
    canonicalize,
    canonicalize_primal,
)
from jax_baracuda.ops.segment.cells import gather_segments, per_row, row_numbers, xla_min, xla_sum
from jax_baracuda.ops.segment.comparisons import (
    equal_numbers,
    extrema_of_segments,
    extrema_of_stacked,
    extrema_over_shards,
    identity_of,
    xla_extrema,
)
from jax_baracuda.ops.segment.definitions import (
    CELLS,
    IDS,
    NOTHING_TO_VECTORISE,
    ORDERED_DTYPES,
    ROWS,
    SEGMENT_FIELDS,
    SHORT_REDUCTION,
    gradient_op,
    index_of_first_row,
    limit_of_32_bits,
    merge_over_shards,
    of_split_segments,
    plan_parameters,
    reduction_op,
    sum_guarantee,
)
from jax_baracuda.ops.segment.edges import (
    NEED_SORTED_EDGES,
    UNALIGNED_ROWS,
    as_gather_ids,
    gather_rows,
    replicated_dims,
    replicated_dims_of_cells,
    sorted_first,
    with_longer_rows,
)
from jax_baracuda.ops.segment.graphs import flat_batch, graph_axes, merge_graphs, renumbered, sum_over_graphs
from jax_baracuda.ops.segment.ids import check_numbered, index_dtype
from jax_baracuda.ops.segment.plan import SegmentPlan, sorted_by_segment, unpermuted, with_shared_sort
from jax_baracuda.ops.segment.sum import segment_sum, segment_sum_backward
from jax_baracuda.ops.segment.sum_ops import SEGMENT_SUM, SEGMENT_SUM_BACKWARD

F = TypeVar("F", bound=Callable[..., Any])

_MINIMUM_FOR_MAXIMUM = {
    "maxim": "minim",
    "Maxim": "Minim",
    "segment_max": "segment_min",
    "argmax": "argmin",
    "max {": "min {",
    "max(-0, +0)`` is ``+0``": "min(-0, +0)`` is ``-0``",
    "-inf": "+inf",
    "least integer": "greatest integer",
    "or False": "or True",
    "A NaN is greater": "A NaN is less",
}


def minimum_of(function_of_maximum: Callable[..., Any], example: str) -> Callable[[F], F]:
    """Derives a minimum's docstring from the maximum's by replacing words, and sets its example."""
    text = inspect.cleandoc(function_of_maximum.__doc__ or "").partition("Example:\n")[0]
    for word, replacement in _MINIMUM_FOR_MAXIMUM.items():
        text = text.replace(word, replacement)

    def described(function: F) -> F:
        function.__doc__ = f"{text}Example:\n{textwrap.indent(inspect.cleandoc(example), '  ')}\n"
        return function

    return described


@public_function(segment_sum)
def segment_max(
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    *,
    tie_break: TieBreak = "split",
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Maximum of the rows of each segment: ``out[s, ...] = max { data[n, ...] : segment_ids[n] == s }``.

    A drop-in replacement of :func:`jax.ops.segment_max`.

    Args:
      data: ``[N, ...]``, any dtype of JAX with an order. bool, integers of 8 to 64 bits, float16, bfloat16, float32 and
        float64 have kernels; other dtypes run as plain JAX. More generally, any shape that broadcasts to
        ``segment_ids.shape + data.shape[1:]``.
      bucket_size: as in :func:`jax.ops.segment_max`, rows are reduced in buckets of this size, and then the buckets.
        The maximum is the same. Under ``tie_break="split"`` tied buckets share the gradient equally, then their rows.
      tie_break: how rows that tie for the maximum share the gradient. "split": equally, as in JAX; if the maximum is
        the identity of an empty segment (-inf), the identity counts as one more tied row. "first": the lowest tied row
        gets all of it, and `data` is not kept for the backward pass.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Empty segments hold -inf, the least integer of the dtype, or False.

    Numerical guarantees: exact. NaN propagates; ``max(-0, +0)`` is ``+0`` in either order; subnormal numbers are
    numbers, not zeros. Bit-equal from run to run and independent of scheduling.

    Gradient: ``d_data[n] = d_out[segment_ids[n]] * share``, where the share is ``1 / number of tied rows`` (the count
    is an exact integer) or 1 for the winner, and exactly 0 for every other row, whatever the cotangent. A segment that
    holds a NaN passes no gradient.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> segment_ids = jnp.array([0, 0, 2])
      >>> print(jb.segment_max(data, segment_ids, num_segments=3))
      [[  3.   4.]
       [-inf -inf]
       [  5.   6.]]
    """
    segments = canonical_segments("segment_max", segment_ids, num_segments, indices_are_sorted, mode, plan)
    return _reduce(canonicalize(segments, data, out_sharding, bucket_size), tie_break, minimum=False)


@public_function()
@minimum_of(
    segment_max,
    """
    >>> import jax.numpy as jnp, jax_baracuda as jb
    >>> data = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
    >>> segment_ids = jnp.array([0, 0, 2])
    >>> print(jb.segment_min(data, segment_ids, num_segments=3))
    [[ 1.  2.]
     [inf inf]
     [ 5.  6.]]
    """,
)
def segment_min(
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Mode = None,
    out_sharding: OutSharding = None,
    *,
    tie_break: TieBreak = "split",
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    segments = canonical_segments("segment_min", segment_ids, num_segments, indices_are_sorted, mode, plan)
    return _reduce(canonicalize(segments, data, out_sharding, bucket_size), tie_break, minimum=True)


@public_function(segment_sum_backward, segment_sum, has_twin=False)
def segment_max_backward(
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    tie_break: TieBreak = "split",
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Gradient of :func:`segment_max`: ``d_data[n, ...] = d_output[segment_ids[n], ...] * share[n, ...]``.

    Args:
      d_output: ``[S, ...]``, the cotangent of the segment maxima; a floating dtype, the same as `data`.
      data: ``[N, ...]``, the rows that were reduced.
      tie_break: as in :func:`segment_max`: "split" gives every row that attains its segment's maximum an equal share,
        "first" gives the lowest such row all of it.

    Returns:
      ``[N, ...]``, the cotangent of `data`. Rows that do not attain the maximum, that are dropped, or whose segment
      holds a NaN get an exact 0.

    Numerical guarantees: each element is ``d_output`` divided by the exact number of ties: rounded once on CPUs,
    within two units in the last place on GPUs, where XLA divides. Bit-equal from run to run.

    Gradient: linear in `d_output`, whose cotangent is the share-weighted sum over each segment's rows; zero with
    respect to `data`. Derivatives of any order and in either mode exist.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data, segment_ids = jnp.array([3.0, 3.0, 1.0, 5.0]), jnp.array([0, 0, 0, 1])
      >>> print(jb.segment_max_backward(jnp.array([10.0, 20.0]), data, segment_ids))
      [ 5.  5.  0. 20.]
      >>> print(jb.segment_max_backward(jnp.array([10.0, 20.0]), data, segment_ids, tie_break="first"))
      [10.  0.  0. 20.]
    """
    name = "segment_max_backward"
    d_output, segments = canonical_cotangent(name, d_output, segment_ids, indices_are_sorted, mode, plan)
    return _backward(segments, data, d_output, tie_break, minimum=False)


@public_function(has_twin=False)
@minimum_of(
    segment_max_backward,
    """
    >>> import jax.numpy as jnp, jax_baracuda as jb
    >>> data, segment_ids = jnp.array([3.0, 1.0, 1.0, 5.0]), jnp.array([0, 0, 0, 1])
    >>> print(jb.segment_min_backward(jnp.array([10.0, 20.0]), data, segment_ids))
    [ 0.  5.  5. 20.]
    """,
)
def segment_min_backward(
    d_output: ArrayLike,
    data: ArrayLike,
    segment_ids: ArrayLike | None = None,
    *,
    indices_are_sorted: bool = False,
    mode: Mode = None,
    tie_break: TieBreak = "split",
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    name = "segment_min_backward"
    d_output, segments = canonical_cotangent(name, d_output, segment_ids, indices_are_sorted, mode, plan)
    return _backward(segments, data, d_output, tie_break, minimum=True)


@public_function(segment_max_backward, has_twin=False)
def unsorted_segment_max_backward(
    d_output: ArrayLike, data: ArrayLike, segment_ids: ArrayLike, *, implementation: Implementation | None = None
) -> Array:
    """Gradient of :func:`segment_max` for ids in any order; the first row that attains a maximum gets all of it.

    ``d_data[n, ...] = d_output[s, ...]`` if n is the lowest row of segment ``s = segment_ids[n]`` that attains the
    maximum, else 0. The same as ``segment_max_backward(d_output, data, segment_ids, tie_break="first")``.

    Numerical guarantees: exact, deterministic, O(N * D) work in total for D features per row.

    Gradient: as in :func:`segment_max_backward`.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> data, segment_ids = jnp.array([3.0, 5.0, 3.0, 1.0]), jnp.array([0, 1, 0, 0])
      >>> print(jb.unsorted_segment_max_backward(jnp.array([10.0, 20.0]), data, segment_ids))
      [10. 20.  0.  0.]
    """
    d_output, segments = canonical_cotangent("unsorted_segment_max_backward", d_output, segment_ids, False, None, None)
    return _backward(segments, data, d_output, "first", minimum=False)


def _reduce(call: SegmentCall, tie_break: TieBreak, minimum: bool) -> Array:
    if call.bucket_size is not None and call.ids.shape[0] == 0:
        raise ValueError(f"{call.name}: bucket_size needs segment_ids of shape [N] with N > 0, got shape (0,)")
    call = call.sorted_by_plan(unless=FLOATING_DTYPES)
    params = call.params(first_wins=first_gets_all(call.name, tie_break), minimum=minimum)
    # If the first of tied rows gets the gradient, buckets make no difference.
    over_buckets = None if params["first_wins"] else functools.partial(_over_buckets, minimum)
    return call.reduce(_extrema[minimum], params, over_buckets)


def _backward(segments: Segments, data: ArrayLike, d_output: Array, tie_break: TieBreak, minimum: bool) -> Array:
    call = canonicalize_primal(segments, data, d_output)
    # The derivative with respect to `data` is zero; stopping it here spares JAX the differentiation.
    call = call.with_data(jax.lax.stop_gradient(call.data))
    params = call.params(first_wins=first_gets_all(call.name, tie_break), minimum=minimum)
    return call.gradient(_extrema[minimum], params, d_output)


def first_gets_all(name: str, tie_break: str) -> bool:
    check_choice(name, "tie_break", tie_break, "split", "first")
    return tie_break == "first"


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _over_buckets(minimum: bool, cells: Array) -> Array:
    """The extremum of buckets. Tied buckets share the gradient equally; a cell with a NaN passes none."""
    return extrema_of_stacked(cells, minimum)


@_over_buckets.defjvp
def _over_buckets_jvp(minimum: bool, primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    [cells], [d_cells] = primals, tangents
    output = extrema_of_stacked(cells, minimum)
    attains = equal_numbers(cells, output[None])
    total = jnp.where(attains, d_cells, 0).sum(0)
    return output, total / jnp.maximum(attains.sum(0), 1).astype(total.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Winners and ties.

NO_WINNER = -1
"""A winner encodes which row attains a cell's extremum:

- the row's number;
- NO_WINNER, if the segment is empty or holds a NaN;
- if ties are split: minus the number (2 or more) of tied members, which include the identity of the reduction.
"""


def _winners(data: Array, ids: Array, output: Array, *, first_wins: bool, minimum: bool) -> Array:
    """The winner of each cell, given the extrema."""
    num_segments = output.shape[0]
    if 0 in output.shape or 0 in data.shape:
        return jnp.full(output.shape, NO_WINNER, index_dtype(data.shape[0]))
    row = row_numbers(data)
    extrema, is_member = gather_segments(output, ids)
    attains = is_member & equal_numbers(data, extrema)
    if first_wins:
        none = jnp.iinfo(row.dtype).max
        first = xla_min(jnp.where(attains, row, none), ids, num_segments)
        return jnp.where(first == none, NO_WINNER, first)
    # One scatter adds up both the count and the row numbers: if a single row attains, the sum is its number.
    of_rows = jnp.stack([attains.astype(row.dtype), jnp.where(attains, row, 0)], axis=-1)
    of_cells = xla_sum(of_rows, ids, num_segments)
    attaining, sole = of_cells[..., 0], of_cells[..., 1]
    members = attaining + (output == identity_of(output.dtype, minimum)).astype(row.dtype)
    return jnp.where(members > 1, -members, jnp.where(attaining == 1, sole, NO_WINNER))


def _cells_of_winners(
    d_rows: Array, winner: Array, row: Array, is_won: Array, sums_of_ties: Callable[[], Array] | None
) -> Array:
    """For each cell, its winner's value in `d_rows`, or 0 without a winner: the transpose of the gradient.

    Args:
      row: the winning row of `d_rows` for each cell.
      is_won: which cells have a winning row.
      sums_of_ties: computes all cells if any are tied. None: the first of tied rows wins.
    """

    def of_rows() -> Array:
        taken = jnp.take_along_axis(d_rows, jnp.clip(row, 0, d_rows.shape[0] - 1), axis=0, mode="promise_in_bounds")
        return jnp.where(is_won, taken, 0)

    if sums_of_ties is None:
        return of_rows()
    return jax.lax.cond((winner < NO_WINNER).any(), sums_of_ties, of_rows)


def shares_of_ties(cells: Array, winner: Array) -> Array:
    """Divides each cell by the number of members that attain its extremum, rounded once."""
    wide = cells.astype(accumulation_dtype(cells.dtype))
    return (wide / jnp.where(winner < NO_WINNER, -winner, 1).astype(wide.dtype)).astype(cells.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# References in plain JAX: of rows.


def _reference(
    data: Array,
    ids: Array,
    *,
    num_segments: int,
    first_wins: bool,
    minimum: bool,
    has_winner: bool,
    is_redirected: bool = False,
) -> tuple[Array, ...]:
    if is_redirected and not has_winner:  # as JAX compares numbers
        return (xla_extrema(data, ids, num_segments, minimum),)
    output = extrema_of_segments(data, ids, num_segments, minimum)
    return (output, _winners(data, ids, output, first_wins=first_wins, minimum=minimum)) if has_winner else (output,)


def _reference_backward(
    d_output: Array, winner: Array, ids: Array, data: Array | None, output: Array | None
) -> tuple[Array]:
    winners, is_member = gather_segments(winner, ids)
    # In the accumulation dtype, so that shares are rounded once.
    cotangents, _ = gather_segments(d_output.astype(accumulation_dtype(d_output.dtype)), ids)
    wins = is_member & (winners == row_numbers(winners))
    gradient = jnp.where(wins, cotangents, 0)
    if data is not None:
        ties = is_member & (winners < NO_WINNER) & equal_numbers(data, gather_segments(output, ids)[0])
        members = jnp.where(ties, -winners, 1).astype(cotangents.dtype)
        gradient = jnp.where(ties, cotangents / members, gradient)
    return (gradient.astype(d_output.dtype),)


def _take_winners(
    gather_cells: Callable[..., Sequence[Array]],
    sum_rows: Callable[..., Sequence[Array]],
    d_data: Array,
    winner: Array,
    ids: Array,
    data: Array | None,
    output: Array | None,
    *,
    indices_are_sorted: bool = False,
) -> tuple[Array]:
    """For each cell, its winner's value in `d_data`, or the mean over the tied members."""
    if 0 in winner.shape or 0 in d_data.shape:
        return (jnp.zeros(winner.shape, d_data.dtype),)

    def means_of_ties() -> Array:
        [extrema] = gather_cells(output, ids)
        wide = d_data.astype(accumulation_dtype(d_data.dtype))
        params = {"num_segments": winner.shape[0], "indices_are_sorted": indices_are_sorted, "deterministic": True}
        [sums] = with_named(sum_rows, params)(jnp.where(equal_numbers(data, extrema), wide, 0), ids)
        return jnp.where(winner != NO_WINNER, shares_of_ties(sums, winner), 0).astype(d_data.dtype)

    return (_cells_of_winners(d_data, winner, winner, winner >= 0, None if data is None else means_of_ties),)


# ----------------------------------------------------------------------------------------------------------------------
# References in plain JAX: of gathered rows.


def _reference_of_edges(
    data: Array, gather_ids: Array, segment_ids: Array, edge_order: Array | None, **params: Any
) -> tuple[Array, ...]:
    rows = gather_rows(data, gather_ids, clips_gather_ids=True)
    output, *winners = with_named(_reference, params)(rows, segment_ids)
    if edge_order is not None and output.size > 0 and edge_order.size > 0:
        [winner] = winners
        # Winners number the edges in their original order.
        winners = [jnp.where(winner >= 0, jnp.take(edge_order, winner, axis=0, mode="clip"), winner)]
    return output, *winners


def _attains(data: Array, gather_ids: Array, output: Array, segment_ids: Array) -> Array:
    """Whether the row that an edge gathers attains the extremum of the edge's segment."""
    rows = gather_rows(data, gather_ids, clips_gather_ids=True)
    return equal_numbers(rows, gather_segments(output, segment_ids)[0])


def _reference_backward_of_edges(
    d_winner: Array, winner: Array, gather_ids: Array, segment_ids: Array, *others: Array | None, num_rows: int
) -> tuple[Array]:
    edge_order, transposed_order, _, transposed_segment_ids, data, output = others
    num_edges = segment_ids.shape[0]
    edges = jnp.arange(num_edges, dtype=index_dtype(num_edges)) if edge_order is None else edge_order
    rows = gather_ids
    if transposed_order is not None:  # a plan's transposed ids also mark gather ids out of range
        rows = jnp.zeros_like(gather_ids).at[transposed_order].set(transposed_segment_ids)[edges]
    winners, is_member = gather_segments(winner, segment_ids)
    cotangents, _ = gather_segments(d_winner.astype(accumulation_dtype(d_winner.dtype)), segment_ids)
    wins = winners == per_row(edges, winners)
    if data is not None:
        wins |= (winners < NO_WINNER) & _attains(data, gather_ids, output, segment_ids)
    return (xla_sum(jnp.where(is_member & wins, cotangents, 0), rows, num_rows).astype(d_winner.dtype),)


def _take_winners_of_edges(
    d_data: Array, winner: Array, gather_ids: Array, segment_ids: Array, data: Array | None, output: Array | None
) -> tuple[Array]:
    num_rows, num_segments = d_data.shape[0], winner.shape[0]
    if 0 in winner.shape or 0 in d_data.shape or 0 in gather_ids.shape:
        return (jnp.zeros(winner.shape, d_data.dtype),)
    row = gather_ids.at[winner].get(mode="clip")
    is_won = (winner >= 0) & in_range(row, num_rows)

    def sums_of_ties() -> Array:
        of_edges = gather_rows(d_data, gather_ids, clips_gather_ids=False).astype(accumulation_dtype(d_data.dtype))
        attains = _attains(data, gather_ids, output, segment_ids)
        sums = xla_sum(jnp.where(attains, of_edges, 0), segment_ids, num_segments)
        return jnp.where(winner != NO_WINNER, sums, 0).astype(d_data.dtype)

    return (_cells_of_winners(d_data, winner, row, is_won, None if data is None else sums_of_ties),)


# ----------------------------------------------------------------------------------------------------------------------
# Programs of one shard, for segments whose rows or edges are split over devices. Devices exchange cells only.


def _own_winners(winner: Array, ids: Array, row_axes: MeshAxes) -> Array:
    """The winners that are rows of this shard, renumbered within it."""
    row = winner - index_of_first_row(ids, row_axes)
    row = jnp.where(in_range(row, ids.shape[0]), row, NO_WINNER)
    return jnp.where(winner >= 0, row, winner)


def _merge_winners(first_wins: bool, minimum: bool, outputs: Array, winners: Array) -> tuple[Array, Array]:
    """The extrema and winners of stacked shards. All-reduces would exchange an array more if ties are split."""
    output = extrema_of_stacked(outputs, minimum)
    attains = equal_numbers(outputs, output[None]) & (winners != NO_WINNER)
    none = jnp.iinfo(jnp.int32).max
    first = jnp.where(attains & (winners >= 0), winners, none).min(0)
    first = jnp.where(first == none, NO_WINNER, first)
    if first_wins:
        return output, first
    identity = (output == identity_of(output.dtype, minimum)).astype(jnp.int32)
    of_shards = jnp.where(winners >= 0, 1, -winners - identity[None])
    members = jnp.where(attains, of_shards, 0).sum(0, dtype=jnp.int32)
    members = jnp.where(members > 0, members + identity, 0)
    return output, jnp.where(members > 1, -members, first)


def _shard_reduce(
    row_dim: str, kernel: ShardKernel, axes: ShardAxes, *operands: Array | None, first_wins: bool, minimum: bool
) -> Sequence[Array]:
    output, *winners = kernel(*operands)
    row_axes, segment_axes = axes.get(row_dim, ()), axes.get("segment", ())
    if not row_axes:
        return output, *winners
    if not winners:
        return (extrema_over_shards(output, row_axes, segment_axes, minimum=minimum),)
    first_row = index_of_first_row(operands[1 if row_dim == "row" else 2], row_axes)
    winner = jnp.where(winners[0] >= 0, winners[0] + first_row, winners[0])
    merge = functools.partial(_merge_winners, first_wins, minimum)
    return merge_over_shards(merge, [output, winner], row_axes, segment_axes)


def _shard_backward(
    kernel: ShardKernel, axes: ShardAxes, d_output: Array, winner: Array, ids: Array, *data_and_output: Array | None
) -> Sequence[Array]:
    if row_axes := axes.get("row", ()):
        winner = _own_winners(winner, ids, row_axes)
    return kernel(d_output, winner, ids, *data_and_output)


def _shard_of_winners(
    kernel: ShardKernel, axes: ShardAxes, d_data: Array, winner: Array, ids: Array, *data_and_output: Array | None
) -> Sequence[Array]:
    """Adds up the shards' cells in the accumulation dtype, rounded once."""
    row_axes = axes.get("row", ())
    if not row_axes:
        return kernel(d_data, winner, ids, *data_and_output)
    winner = _own_winners(winner, ids, row_axes)
    wide = d_data.astype(accumulation_dtype(d_data.dtype))
    [local] = kernel(wide, winner, ids, *data_and_output)
    return (jax.lax.psum(local, row_axes).astype(d_data.dtype),)


def _shard_backward_of_edges(
    kernel: ShardKernel,
    axes: ShardAxes,
    d_winner: Array,
    winner: Array,
    gather_ids: Array,
    segment_ids: Array,
    *others: Array | None,
    num_graph_dims: int = 0,
    **params: Any,
) -> Sequence[Array]:
    """Adds up the shards' sums in the accumulation dtype, rounded once. Edges are not split if there is a plan."""
    edge_axes = axes.get("edge", ())
    all_axes = (*graph_axes(axes, num_graph_dims), *edge_axes)
    if not all_axes:
        return kernel(d_winner, winner, gather_ids, segment_ids, *others)
    if edge_axes:
        winner = _own_winners(winner, segment_ids.reshape(-1, segment_ids.shape[-1])[0], edge_axes)
    *plan, data, output = others
    wide = [None if x is None else x.astype(accumulation_dtype(d_winner.dtype)) for x in (d_winner, data, output)]
    operands = _join(num_graph_dims, wide[0], winner, gather_ids, segment_ids, *plan, *wide[1:])
    [local] = GATHER_SEGMENT_EXTREMUM_BACKWARD.kernel(*operands, **params)
    return (jax.lax.psum(local, all_axes).astype(d_winner.dtype),)


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives of ops. Winners are constant almost everywhere, so both the tangent of the extremum and the transpose of
# the gradient pick the winners' values.


def _tangent(d_data: Array, operands: Sequence[Array], results: Sequence[Array], **params: Any) -> Sequence[Array]:
    data, ids = operands
    output, winner = results if params["has_winner"] else SEGMENT_EXTREMUM(*operands, **params | {"has_winner": True})
    data_and_output = () if params["first_wins"] else map(jax.lax.stop_gradient, (data, output))
    flags = {name: params[name] for name in ("indices_are_sorted", "minimum")}
    return *SEGMENT_EXTREMUM_OF_WINNERS(d_data, winner, ids, *data_and_output, **flags), *results[1:]


def _sums_of_winners(
    d_data: Array, winner: Array, ids: Sequence[Array], data: Array | None, output: Array | None, minimum: bool
) -> Array:
    """For each cell, the row that its winning edge gathers, or the sum over the tied edges, given data and output."""
    data_and_output = () if data is None else map(jax.lax.stop_gradient, (data, output))
    return GATHER_SEGMENT_EXTREMUM_OF_WINNERS(d_data, winner, *ids, *data_and_output, minimum=minimum)[0]


def _tangent_of_edges(
    d_data: Array, operands: Sequence[Array], results: Sequence[Array], **params: Any
) -> Sequence[Array]:
    data, gather_ids, segment_ids, order = operands
    output, winner = (
        results if params["has_winner"] else GATHER_SEGMENT_EXTREMUM(*operands, **params | {"has_winner": True})
    )
    ids = unpermuted_ids([gather_ids, as_gather_ids(segment_ids, params["num_segments"])], order)
    data_and_output = (None, None) if params["first_wins"] else (data, output)
    total = _sums_of_winners(d_data, winner, ids, *data_and_output, params["minimum"])
    return shares_of_ties(total, winner), *results[1:]


def _transpose_backward_of_edges(
    _: Any, d_results: Sequence[Array], winner: Array, *others: Array, minimum: bool
) -> Sequence[Array]:
    gather_ids, segment_ids, order, *_, data, output = others
    ids = unpermuted_ids([gather_ids, segment_ids], order)
    return [_sums_of_winners(d_results[0], winner, ids, data, output, minimum)]


def _transpose_of_gathered_winners(
    avals: Sequence[Any], d_results: Sequence[Array], winner: Array, *others: Array | None, minimum: bool
) -> Sequence[Array]:
    *ids, data, output = others
    operands = d_results[0], winner, *ids, *NO_PLAN, data, output
    params = {"num_rows": avals[0].shape[0], "deterministic": may_run_kernel(), "minimum": minimum}
    return GATHER_SEGMENT_EXTREMUM_BACKWARD(*operands, **params)


def unpermuted_ids(ids: Sequence[Array], order: Array | None) -> Sequence[Array]:
    """Undoes a plan's order on the ids of edges, because winners number the edges in their original order."""
    return ids if order is None else tuple(unpermuted(x, order) for x in ids)


# ----------------------------------------------------------------------------------------------------------------------
# Ops of rows.


def extremum_targets(name: str, **params: bool) -> dict[str, dict[str, bool]]:
    """The native targets of the maximum and the minimum, for calls with these params."""
    return {name.format("max"): {"minimum": False, **params}, name.format("min"): {"minimum": True, **params}}


def _reduction_targets(name: str) -> dict[str, dict[str, bool]]:
    """The native targets of a reduction with and without winners."""
    with_winner = extremum_targets(f"{name}_with_winner", has_winner=True)
    return extremum_targets(name, has_winner=False) | with_winner


def _results(*, has_winner: bool) -> NamedDimensions:
    return {"output": CELLS, "winner": CELLS} if has_winner else {"output": CELLS}


def _result_dtypes(data: Any, ids: Any, *_: Any, has_winner: bool) -> list[Any]:
    return [data.dtype, index_dtype(ids.shape[0])] if has_winner else [data.dtype]


_OF_TIES = dict.fromkeys(("data", "output"), "shares_ties")
"""The optional operands of gradients, by which these find tied rows."""


def _few_bytes(traits: Traits) -> bool:
    """At most 1 MB, or 4 MB in rows of at most 16 numbers, which leave half of the lanes of a warp idle."""
    return traits.measures["bytes"] <= MB or (launch_bound(traits) and at_most_16_features(traits))


LAUNCH_BOUND_EXTREMUM = on_gpu("launch-bound: few bytes", unsorted, uncontended, _few_bytes)

_without_winner = param("has_winner", False)
_SHORT_EXTREMUM = on_cpu(SHORT_REDUCTION.reason, *SHORT_REDUCTION.conditions, _without_winner, at_most_4_features)

# H200, time of plain JAX / kernel: 0.45 to 1.1 for rows of 1 to 16 numbers up to 4 MB, with the gradient 0.3 to 1.0;
# above, and for wider rows, 0.8 to 3.5 and 1.3 to 3.0 (60 calls each). Wider rows up to 1 MB: 0.7 to 0.95 (6 loops).
SEGMENT_EXTREMUM = reduction_op(
    "segment_extremum",
    targets=_reduction_targets("segment_{}"),
    results=_results,
    optional_results={"winner": "has_winner"},
    result_dtypes=_result_dtypes,
    reference=_reference,
    dtypes=lambda *, has_winner: FLOATING_DTYPES if has_winner else ORDERED_DTYPES,
    guarantee=EXACT,
    attributes=lambda *, has_winner: ("indices_are_sorted", *["first_wins"] * has_winner),
    xla_rules=(
        LAUNCH_BOUND_EXTREMUM,
        # Two cores, time of plain JAX / kernel: single numbers that XLA computes 0.14 to 1.1 (40 loops); sorted 0.7 to
        # 5.3 (18 loops). With winners, for the gradient, 0.9 to 1.4.
        on_cpu(NOTHING_TO_VECTORISE.reason, _without_winner, single_feature, fused),
        _SHORT_EXTREMUM,
    ),
    shard_program=functools.partial(_shard_reduce, "row"),
    alternatives=with_shared_sort(lambda: GATHER_SEGMENT_EXTREMUM),
    tangent=_tangent,
)

SEGMENT_EXTREMUM_BACKWARD = gradient_op(
    "segment_extremum_backward",
    targets=extremum_targets("segment_{}_backward"),
    operands={"d_output": CELLS, "winner": CELLS, "segment_ids": IDS, "data": ROWS, "output": CELLS},
    optional=_OF_TIES,
    reference=_reference_backward,
    # H100, time of plain JAX / kernel: 0.54, between elementwise operations 0.45 (60 loops each).
    xla_rules=(on_gpu("gathers and comparisons, which XLA fuses"),),
    guarantee=quotients,
    aliases=("unsorted_segment_max_backward",),
    shard_program=_shard_backward,
    transposes={
        ("d_output",): lambda _, d_data, *others, **params: SEGMENT_EXTREMUM_OF_WINNERS(*d_data, *others, **params)
    },
)

SEGMENT_EXTREMUM_OF_WINNERS = define_op(
    name="segment_extremum_of_winners",
    operands={"d_data": ROWS, "winner": CELLS, "segment_ids": IDS, "data": ROWS, "output": CELLS},
    optional=_OF_TIES,
    results={"cells": CELLS},
    reference=functools.partial(_take_winners, SEGMENT_SUM_BACKWARD.reference, SEGMENT_SUM.reference),
    program=functools.partial(_take_winners, SEGMENT_SUM_BACKWARD.kernel, SEGMENT_SUM.kernel),
    dtypes=FLOATING_DTYPES,
    guarantee=accumulated,
    replicated_dims=("segment",),
    reduction_dims=("row",),
    shard_program=_shard_of_winners,
    transposes={
        ("d_data",): lambda _, d_cells, *others, **params: SEGMENT_EXTREMUM_BACKWARD(*d_cells, *others, **params)
    },
)


# ----------------------------------------------------------------------------------------------------------------------
# Ops of gathered rows. On GPUs, unsorted edges are sorted first, and rows that fit no vectors are padded.

_GATHERED, _EDGES = ("gathered", "..."), ("edge",)
PLAN_FIELDS = ("edge_order", "transposed_order", "transposed_gather_ids", "transposed_segment_ids")
NO_PLAN = (None,) * len(PLAN_FIELDS)
_OPERANDS_OF_BACKWARD: NamedDimensions = {
    "d_winner": CELLS,
    "winner": CELLS,
    "gather_ids": _EDGES,
    "segment_ids": _EDGES,
    **dict.fromkeys(PLAN_FIELDS, _EDGES),
    "data": _GATHERED,
    "output": CELLS,
}


def _plan_parameters_of_backward(d_winner: Any, *_: Any, sizes: Mapping[str, int], has_plan: bool) -> dict[str, int]:
    """The backward op gathers segments and sums by row."""
    transposed = {**sizes, "segment": sizes["gathered"], "gathered": sizes["segment"]}
    return plan_parameters(d_winner, sizes=transposed, indices_are_sorted=has_plan)


def _join(num_graph_dims: int, *operands: Array | None) -> Sequence[Array | None]:
    """Joins the graphs into one: the operands of the backward op, for several graphs without a plan."""
    if num_graph_dims == 0:
        return operands
    *of_edges, data, output = operands
    d_winner, winner, gather_ids, segment_ids, output = flat_batch(num_graph_dims, [*of_edges[:4], output])
    winner = jnp.where(winner < 0, winner, renumbered(winner, segment_ids.shape[1]))
    segment_ids = renumbered(segment_ids, winner.shape[1])
    joined = map(merge_graphs, (d_winner, winner, gather_ids, segment_ids))
    return *joined, *NO_PLAN, data, merge_graphs(output)


def _backward_of_sorted(
    d_winner: Array,
    winner: Array,
    gather_ids: Array,
    segment_ids: Array,
    *others: Array | None,
    num_rows: int,
    **params: Any,
) -> Sequence[Array]:
    order, sorted_rows = sorted_by_segment(gather_ids, num_rows)
    numbers = jnp.arange(order.shape[0], dtype=jnp.int32)
    edges = gather_ids, segment_ids, numbers, order, segment_ids[order], sorted_rows
    data_and_output = others[len(NO_PLAN) :]
    return GATHER_SEGMENT_EXTREMUM_BACKWARD.kernel(
        d_winner, winner, *edges, *data_and_output, num_rows=num_rows, **params
    )


def _decodes_few_empty_cells(traits: Traits) -> bool:
    """Rows are narrow, or most segments have rows: plain JAX decodes the cells of all segments."""
    return traits.measures["features"] < 64 or not mostly_empty_segments(traits)


# H200, time of plain JAX / kernel: 0.15 to 0.8 up to 16 MB of messages, but 1.2 to 2.0 if most segments are empty and
# rows have 64 numbers or more; above 1.1 to 4 (70 calls), rows of 4 0.4 to 0.75.
GATHER_SEGMENT_EXTREMUM = define_op(
    name="gather_segment_extremum",
    targets=_reduction_targets("gather_segment_{}"),
    operands={"data": _GATHERED, "gather_ids": _EDGES, "segment_ids": _EDGES, "edge_order": _EDGES},
    optional={"edge_order": "has_edge_order"},
    results=_results,
    result_dtypes=_result_dtypes,
    reference=_reference_of_edges,
    xla_rules=(
        on_gpu("XLA sorts no edges", unsorted, uncontended, few_numbers, _decodes_few_empty_cells),
        on_gpu("XLA sorts no edges, and narrow rows leave lanes idle", unsorted, uncontended, at_most_4_features),
        _SHORT_EXTREMUM,
    ),
    alternatives={
        on_gpu(NEED_SORTED_EDGES, unsorted): sorted_first(
            lambda: GATHER_SEGMENT_EXTREMUM, lambda arrays, params: params["has_winner"]
        ),
        UNALIGNED_ROWS: with_longer_rows(lambda: GATHER_SEGMENT_EXTREMUM),
    },
    dtypes=FLOATING_DTYPES,
    guarantee=EXACT,
    attributes=lambda *, has_winner: ("indices_are_sorted", *["first_wins", "has_edge_order"] * has_winner),
    replicated_dims=replicated_dims_of_cells,
    reduction_dims=("edge",),
    shard_program=of_split_segments(functools.partial(_shard_reduce, "edge"), ids_operand=2),
    tangent=_tangent_of_edges,
    **SEGMENT_FIELDS,
)

GATHER_SEGMENT_EXTREMUM_BACKWARD = define_op(
    name="gather_segment_extremum_backward",
    targets=extremum_targets("gather_segment_{}_backward"),
    operands=_OPERANDS_OF_BACKWARD,
    optional=dict.fromkeys(PLAN_FIELDS, "has_plan") | _OF_TIES,
    results={"d_data": _GATHERED},
    result_sizes=lambda *, num_rows: {"gathered": num_rows},
    reference=_reference_backward_of_edges,
    # Time of plain JAX / kernel: up to 64 MB 0.5 (H100, 24 loops). Two cores: 0.33 for single features.
    xla_rules=(
        on_gpu("XLA sorts no edges", unordered, in_cache),
        NOTHING_TO_VECTORISE,
    ),
    alternatives={
        on_gpu(NEED_SORTED_EDGES, param("has_plan", False)): _backward_of_sorted,
        UNALIGNED_ROWS: with_longer_rows(lambda: GATHER_SEGMENT_EXTREMUM_BACKWARD),
    },
    dtypes=FLOATING_DTYPES,
    guarantee=sum_guarantee,
    attributes=("has_plan", "shares_ties"),
    plan_parameters=_plan_parameters_of_backward,
    replicated_dims=lambda *, has_plan: replicated_dims(has_edge_order=has_plan),
    reduction_dims=("edge",),
    shard_program=_shard_backward_of_edges,
    transposes={("d_winner",): _transpose_backward_of_edges},
    limit=limit_of_32_bits,
)

GATHER_SEGMENT_EXTREMUM_OF_WINNERS = define_op(
    name="gather_segment_extremum_of_winners",
    operands={
        "d_data": _GATHERED,
        "winner": CELLS,
        "gather_ids": _EDGES,
        "segment_ids": _EDGES,
        "data": _GATHERED,
        "output": CELLS,
    },
    optional=_OF_TIES,
    results={"cells": CELLS},
    reference=_take_winners_of_edges,
    program=_take_winners_of_edges,  # plain JAX, not a kernel: XLA fuses the gather into the sum
    dtypes=FLOATING_DTYPES,
    guarantee=accumulated,
    replicated_dims=("gathered", "segment", "edge"),
    transposes={("d_data",): _transpose_of_gathered_winners},
)

gradient_over_graphs = sum_over_graphs(
    GATHER_SEGMENT_EXTREMUM_BACKWARD,
    _join,
    shared=(list(_OPERANDS_OF_BACKWARD).index("data"),),
    replicated_dims=GATHER_SEGMENT_EXTREMUM_BACKWARD.replicated_dims,
    shard_program=_shard_backward_of_edges,
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules of rows.


def _reduced(params: Params, data: Array, ids: Array, plan: Mapping[str, Array], has_winner: bool) -> list[Array]:
    if not plan:
        return SEGMENT_EXTREMUM(data, ids, **params, has_winner=has_winner)
    order = plan["order"]
    flags = params | {"indices_are_sorted": True, "has_winner": has_winner}
    return GATHER_SEGMENT_EXTREMUM(data, order, plan["sorted_ids"], order if has_winner else None, **flags)


def _primal(params: Params, *, data: Array, segment_ids: Array, **plan: Array) -> Array:
    return _reduced(params, data, segment_ids, plan, has_winner=False)[0]


def _forward(params: Params, *, data: Array, segment_ids: Array, **plan: Array) -> tuple[Array, tuple[Array, ...]]:
    check_numbered("segment_min" if params["minimum"] else "segment_max", "rows", segment_ids.shape[0])
    output, winner = _reduced(params, data, segment_ids, plan, has_winner=True)
    return output, (winner, segment_ids) if params["first_wins"] else (winner, segment_ids, data, output)


def _gradient(params: Params, residuals: tuple[Array, ...], d_output: Array) -> dict[str, Array]:
    winner, ids, *data_and_output = residuals
    # Winners are constant almost everywhere, so the gradient is linear in d_output alone.
    constants = map(jax.lax.stop_gradient, data_and_output)
    flags = {"indices_are_sorted": params["indices_are_sorted"], "minimum": params["minimum"]}
    [d_data] = SEGMENT_EXTREMUM_BACKWARD(d_output, winner, ids, *constants, **flags)
    return {"data": d_data}


_extrema = {
    minimum: KernelVjp(name, _forward, _gradient, primal=_primal)
    for minimum, name in ((False, "segment_max"), (True, "segment_min"))
}
