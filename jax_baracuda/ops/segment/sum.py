"""Sum of segments. Its gradient needs only the ids.

The op of gathered rows is here, too, because a call with a plan gathers its rows in the plan's order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype, in_range
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.dispatch import (
    GB,
    MB,
    Traits,
    at_least,
    at_most,
    at_most_4_features,
    at_most_16_features,
    call_bound,
    fused,
    in_cache,
    in_memory,
    launch_bound,
    on_cpu,
    on_gpu,
    param,
    single_feature,
    uncontended,
    unordered,
    unsorted,
)
from jax_baracuda._core.functions import Params
from jax_baracuda._core.guarantees import EXACT
from jax_baracuda._core.op import NamedDimensions, Op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.selection import Implementation, may_run_kernel
from jax_baracuda._core.sharding import ShardAxes, ShardKernel
from jax_baracuda.ops.segment.arguments import (
    Accumulator,
    Mode,
    OutSharding,
    canonical_accumulator,
    canonical_cotangent,
    canonical_segments,
    canonicalize,
    reduce_numbers,
)
from jax_baracuda.ops.segment.cells import gather_or_zeros, per_row, sum_in_float64, xla_sum
from jax_baracuda.ops.segment.definitions import (
    BELOW_FLOAT64,
    CELLS,
    IDS,
    SEGMENT_FIELDS,
    WIDE_DTYPES,
    float64_guarantee,
    gradient_op,
    of_split_segments,
    reduction_op,
    sum_guarantee,
    sum_over_axes,
)
from jax_baracuda.ops.segment.edges import (
    NEED_SORTED_EDGES,
    UNALIGNED_ROWS,
    as_gather_ids,
    gather_rows,
    replicated_dims,
    replicated_dims_of_cells,
    sorted_first,
    transposed_edges,
    with_longer_rows,
)
from jax_baracuda.ops.segment.graphs import flat_batch, graph_axes, merge_graphs, renumbered, sum_over_graphs
from jax_baracuda.ops.segment.ids import index_dtype
from jax_baracuda.ops.segment.plan import SegmentPlan, with_shared_sort


@public_function()
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
    accumulator: Accumulator | None = None,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Sum of the rows of each segment: ``out[s, ...] = sum { data[n, ...] : segment_ids[n] == s }``.

    A drop-in replacement of :func:`jax.ops.segment_sum`.

    Args:
      data: ``[N, ...]``, any numeric dtype of JAX. Integers, float16, bfloat16, float32 and float64 have kernels
        (integers of less than 32 bits are added as int32 and wrap the same); other dtypes run as plain JAX. More
        generally, any shape that broadcasts to ``segment_ids.shape + data.shape[1:]``.
      segment_ids: ``[N]``, any integer dtype, in any order. Rows whose id is negative or at least the number of
        segments are dropped. Any other rank is accepted as in ``jax.ops``: every id labels one ``data.shape[1:]``.
      num_segments: number of segments S, static under ``jit``. Default: ``max(segment_ids) + 1``.
      indices_are_sorted: promises that `segment_ids` is non-decreasing, which is faster on GPUs. If the promise is
        false, the result may hold anything.
      unique_indices: accepted for compatibility; nothing depends on it.
      bucket_size: as in :func:`jax.ops.segment_sum`, rows are added in buckets of this size, and then the buckets. It
        has no effect with `accumulator`.
      mode: what happens to ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the row is
        dropped. "clip": the id is clamped to ``[0, S - 1]``.
      out_sharding: sharding of the result, for meshes with explicit axes.
      deterministic: on GPUs, floating rows with unsorted ids are added in an order that varies from run to run, unless
        this is True. Everything else has the same bits in every run anyway.
      accumulator: "float64": rows of 16 and 32 bits are added in float64, also if ``jax_enable_x64`` is off and float64
        arrays do not exist, and so are those of all derivatives; the result still has the dtype of `data`. Rows with a
        plan are moved into its order first. Integers and float64 stay as they are.
      plan: a :func:`segment_plan` of the rows, which replaces `segment_ids`, `num_segments` and `mode`. With a plan,
        neither this call nor its gradient sorts, and both have the same bits in every run. Calls trust it;
        :meth:`SegmentPlan.validate` checks it.

    Returns:
      ``[S, ...]`` with the dtype of `data`. Empty segments hold 0.

    Raises:
      TypeError: an argument is not an array or has an unsuitable dtype.
      ValueError: shapes do not fit, `num_segments` is negative, an option is unknown, or `num_segments` is None and
        there are no ids.
      jax.errors.ConcretizationTypeError: `num_segments` is None and `segment_ids` is traced.

    Numerical guarantees: floating numbers are added in float32 (float64 for float64, or with `accumulator`) and the sum
    is rounded once to the dtype. (Where devices share a segment, the sum of each device is rounded to float32, and
    these sums are added in float32.) Integers are exact and wrap. Bit-equal from run to run, except for floating
    numbers on GPUs (see `deterministic`).

    Gradient: ``d_data[n] = d_out[segment_ids[n]]``, 0 for dropped rows; `data` is not kept for the backward pass.

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
    segments = canonical_segments(name, segment_ids, num_segments, indices_are_sorted, mode, plan)
    call = canonicalize(segments, data, out_sharding, bucket_size)
    accumulator = canonical_accumulator(name, accumulator, call.data.dtype)
    call = call.sorted_by_plan(unless=FLOATING_DTYPES if accumulator is None else frozenset())
    params = call.params(deterministic=deterministic, accumulator=accumulator)
    over_buckets = functools.partial(jnp.sum, axis=0) if accumulator is None else None
    return reduce_numbers(call, _segment_sum, params, over_buckets)


@public_function(segment_sum, has_twin=False)
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
      plan: a :func:`segment_plan` of the rows, which replaces `segment_ids` and `mode`. Calls trust it;
        :meth:`SegmentPlan.validate` checks it.

    Returns:
      ``segment_ids.shape + d_output.shape[1:]`` with the dtype of `d_output`, the cotangent of the data.

    Raises:
      TypeError, ValueError: an argument does not fit, as in :func:`segment_sum`.

    Numerical guarantees: exact. Bit-equal from run to run.

    Gradient: linear in `d_output`, whose cotangent is the :func:`segment_sum` of the cotangents. Derivatives of any
    order and in either mode exist.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> segment_ids = jnp.array([0, 0, 1, -1])  # the last row is in no segment
      >>> print(jb.segment_sum_backward(jnp.array([10.0, 20.0]), segment_ids))
      [10. 10. 20.  0.]
    """
    d_output, segments = canonical_cotangent("segment_sum_backward", d_output, segment_ids, False, mode, plan)
    [d_rows] = SEGMENT_SUM_BACKWARD(d_output, segments.ids)
    return segments.shaped_as_ids(d_rows)


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX.


def wide_sums(accumulator: Accumulator | None, data: Array, ids: Array, num_segments: int) -> Array:
    """The sums before they are rounded to the dtype of the data."""
    if accumulator is not None:
        return sum_in_float64(data, ids, num_segments)
    return xla_sum(data.astype(accumulation_dtype(data.dtype)), ids, num_segments)


def _reference(accumulator: Accumulator | None, data: Array, ids: Array, *, num_segments: int) -> tuple[Array]:
    return (wide_sums(accumulator, data, ids, num_segments).astype(data.dtype),)


def _reference_backward(d_output: Array, ids: Array) -> tuple[Array]:
    return (gather_or_zeros(d_output, ids),)


# ----------------------------------------------------------------------------------------------------------------------
# The program of one shard, for segments whose rows are split over devices.


def _shard_program(
    accumulator: Accumulator | None, kernel: ShardKernel, axes: ShardAxes, data: Array, ids: Array, **params: Any
) -> Sequence[Array]:
    if not axes.get("row", ()):
        return kernel(data, ids)
    return (sum_over_shards(axes, data, ids, accumulator=accumulator, **params).astype(data.dtype),)


def sum_over_shards(
    axes: ShardAxes, data: Array, ids: Array, *, accumulator: Accumulator | None = None, **params: Any
) -> Array:
    """The sums over all shards, in the accumulation dtype: one shard's sum may overflow where the total does not."""
    [local] = sum_op(accumulator).kernel(data.astype(accumulation_dtype(data.dtype)), ids, **params)
    return sum_over_axes(local, axes.get("row", ()), axes.get("segment", ()))


# ----------------------------------------------------------------------------------------------------------------------
# Ops of rows: one per native kernel.


def _own_ids(traits: Traits) -> bool:
    """No batch shares the ids. XLA would transpose the rows of such a batch, and its result."""
    return traits.measures["ids"] == traits.measures["rows"]


def _few_rows(traits: Traits) -> bool:
    """At most one row for 64 segments."""
    return 64 * traits.measures["rows"] <= traits.measures["batch"] * traits.measures["segment"]


def _are_added_by_xla(traits: Traits) -> bool:
    """Whether rows are single features, or wide, and take at most 1 GB.

    Rows of a few numbers are often forces, or logits of heads, which programs add to both ends of an edge. XLA would
    compute them twice.
    """
    features = traits.measures["features"]
    return (features == 1 or features >= 16) and traits.measures["bytes"] <= GB


def _are_added_in_less_time_than_sorted(traits: Traits) -> bool:
    """Whether rows and sums fit in the cache or, in 32 bits, take at most 128 MB or have less than 64 numbers a row.

    XLA adds 16 bits as float32.
    """
    measures = traits.measures
    has_32_bits = measures["row_bytes"] == 4 * measures["features"]
    return in_cache(traits) or (has_32_bits and (measures["bytes"] <= 128 * MB or measures["features"] < 64))


# Times of plain JAX / kernel. Launch-bound: 0.8 up to 4 MB (H100). Rows that XLA computes for one sum: 0.25 to 1.0 for
# 200,000 to 5M rows, 1.1 to 1.9 where they have 32 numbers or more and one of few segments has a tenth of them (H200,
# 160 calls); up to 80 for two segments, 5 to 10 where XLA computes the softmax of an attention again for each feature.
# Rows of 2 to 15 numbers go to the kernel, which a whole force field gains from: 1.25. Rows in memory:
# 0.4 to 0.75, once 1.06, up to 64 MB; in float32 0.7 to 1.0 up to 128 MB (18 loops), 0.9 to 1.3 up to 240 MB
# (10 loops); beyond that 0.8 to 1.3 in rows of 32, 1.2 to 2.0 in longer ones (H200). Steps of jraph's GAT over 1.2M and
# 2M edges, in rows of 32: 0.83 and 0.89.
_LAUNCH_BOUND = on_gpu("launch-bound: XLA takes one launch", unordered, uncontended, launch_bound)
SUM_RULES = (
    _LAUNCH_BOUND,
    on_gpu("XLA adds rows as it computes them", unordered, uncontended, _own_ids, fused, _are_added_by_xla),
    on_gpu(
        "the sort of the ids takes longer",
        unordered,
        uncontended,
        _own_ids,
        at_least(features=32),
        _are_added_in_less_time_than_sorted,
    ),
)


def _sum_op(name: str, accumulator: Accumulator | None, **fields: Any) -> Op:
    return reduction_op(
        name,
        results={"output": CELLS},
        reference=functools.partial(_reference, accumulator),
        defaults={"indices_are_sorted": False, "deterministic": False},
        attributes=("indices_are_sorted", "deterministic"),
        shard_program=functools.partial(_shard_program, accumulator),
        transposes={
            ("data",): lambda _, d_outputs, ids, **params: SEGMENT_SUM_BACKWARD(
                d_outputs[0], ids, **gradient_params({**params, "accumulator": accumulator})
            ),
        },
        **fields,
    )


SEGMENT_SUM = _sum_op(
    "segment_sum",
    None,
    dtypes=WIDE_DTYPES,
    guarantee=sum_guarantee,
    # Two cores: 0.6 up to 1 MB (9 loops); up to 1M unsorted single numbers that XLA computes 0.2 to 1.2, mostly 0.6 to
    # 0.9 (24 loops); other rows 0.7 to 2.8 where XLA computes the rows (8 calls). It may compute them again
    # for their other readers: a step of jraph's GAT took twice as long. The gradient of a cross-entropy: 0.5 to 0.7,
    # since XLA adds single numbers in place to the array that a program adds the sums to.
    xla_rules=(
        *SUM_RULES,
        on_cpu("calling a kernel takes longer than the sum", unsorted, call_bound, in_memory),
        on_cpu("XLA adds single numbers as it computes them", unsorted, single_feature, fused),
        on_cpu(
            "few numbers are added to a large array, which XLA may do in place",
            unsorted,
            _own_ids,
            _few_rows,
            single_feature,
        ),
    ),
    alternatives=with_shared_sort(lambda: GATHER_SEGMENT_SUM, clips_gather_ids=True, is_wide=False),
)

# H200, time of plain JAX / kernel: 0.2 for rows of 1, 0.35 of 2, 0.5 to 0.8 of 4, 1.0 to 1.5 of 8, 2 to 4 above; up to
# 4 MB 0.2 to 0.9 for any rows (40 calls).
RULES_IN_FLOAT64 = (
    _LAUNCH_BOUND,
    on_gpu("XLA adds narrow rows in less time than a sort", unordered, uncontended, at_most_4_features),
)

SEGMENT_SUM_IN_FLOAT64 = _sum_op(
    "segment_sum_in_float64",
    "float64",
    dtypes=BELOW_FLOAT64,
    guarantee=float64_guarantee,
    xla_rules=RULES_IN_FLOAT64,
)


def sum_op(accumulator: Accumulator | None) -> Op:
    return SEGMENT_SUM if accumulator is None else SEGMENT_SUM_IN_FLOAT64


# A gather. H100, time of plain JAX / kernel: 0.67, between elementwise operations 0.42 (21 loops each). Two cores: 0.3
# to 0.9 for up to 16 features.
SEGMENT_SUM_BACKWARD = gradient_op(
    "segment_sum_backward",
    operands={"d_output": CELLS, "segment_ids": IDS},
    reference=_reference_backward,
    xla_rules=(
        on_gpu("a gather, which XLA fuses with its neighbours"),
        on_cpu("a gather of narrow rows", at_most_16_features),
    ),
    guarantee=EXACT,
    transposes={
        ("d_output",): lambda d_outputs, d_data, ids, *, accumulator=None, **params: sum_op(accumulator)(
            *d_data, ids, num_segments=d_outputs[0].shape[0], **params
        ),
    },
)


# ----------------------------------------------------------------------------------------------------------------------
# Sums of gathered rows.


def _reference_of_edges(
    data: Array,
    gather_ids: Array,
    segment_ids: Array,
    weights: Array | None,
    edge_order: Array | None,
    *,
    num_segments: int,
    clips_gather_ids: bool,
    is_wide: bool,
) -> tuple[Array]:
    wide = accumulation_dtype(data.dtype)
    rows = gather_rows(data, gather_ids, clips_gather_ids).astype(wide)
    if weights is not None:
        weights = weights.astype(wide)
        if edge_order is not None:
            weights = jnp.take(weights, edge_order, axis=0, mode="clip")
        takes_part = in_range(segment_ids, num_segments)
        takes_part &= clips_gather_ids | in_range(gather_ids, data.shape[0])
        # In derivatives, the zero cotangent of a dropped edge is multiplied by its weight, which may be NaN.
        weights = jnp.where(per_row(takes_part, weights), weights, 0)
        rows = jnp.where(per_row(takes_part, rows), rows * weights[..., None], 0)
    output = xla_sum(rows, segment_ids, num_segments)
    return (output if is_wide else output.astype(data.dtype),)


def sum_over_split_dim(
    dim: str, kernel: ShardKernel, axes: ShardAxes, data: Array, *operands: Array | None, is_wide: bool
) -> Sequence[Array]:
    """Sums over a split dimension, in the accumulation dtype: one shard's sum may overflow where the total does not."""
    dim_axes = axes.get(dim, ())
    if not dim_axes:
        return kernel(data, *operands)
    [local] = kernel(data, *operands, is_wide=True)
    output = sum_over_axes(local, dim_axes, axes.get("segment", ()))
    return (output if is_wide else output.astype(data.dtype),)


def _operands_of_edges(*, has_weights: bool) -> NamedDimensions:
    return {
        "data": ("gathered", "head", "feature") if has_weights else ("gathered", "..."),
        **dict.fromkeys(("gather_ids", "segment_ids"), ("edge",)),
        "weights": ("edge", "head"),
        "edge_order": ("edge",),
    }


def _transpose_of_edges(
    avals: Sequence[Any],
    d_outputs: Sequence[Array],
    *operands: Array | None,
    num_segments: int,
    deterministic: bool,
) -> Sequence[Array]:
    """The same op in the other direction: edges gather segments and are summed by row."""
    [aval], [d_output] = avals, d_outputs
    gather_ids, segment_ids, weights, edge_order = operands
    d_output = d_output if weights is None else d_output.astype(aval.dtype)  # weights have the dtype of the data
    edges = as_gather_ids(segment_ids, num_segments), gather_ids, weights, edge_order
    flags = {"clips_gather_ids": False, "deterministic": deterministic}
    return [gathered_sum(d_output, *edges, num_segments=aval.shape[0], **flags).astype(aval.dtype)]


def _transpose_weights(
    _: Sequence[Any],
    d_outputs: Sequence[Array],
    data: Array,
    *edges: Array | None,
    clips_gather_ids: bool,
    deterministic: bool,
) -> Sequence[Array]:
    """The transpose with respect to the weights: products of the ends of each edge."""
    from jax_baracuda.ops.segment.gather_dot import GATHER_SEGMENT_DOT  # that module imports this one

    gather_ids, segment_ids, edge_order = edges
    if not clips_gather_ids:
        segment_ids = jnp.where(in_range(gather_ids, data.shape[0]), segment_ids, -1)
    operands = d_outputs[0].astype(data.dtype), data, gather_ids, segment_ids, edge_order
    return GATHER_SEGMENT_DOT(*operands, deterministic=deterministic)


def _suit_two_steps(traits: Traits) -> bool:
    """Whether sorted edges are faster in two steps: a gather by XLA, then a segment sum.

    The fused kernel walks the edges of a tile one by one, which takes as long for narrow rows as for wide ones.
    H200, time of two steps / fused: 0.35 to 0.75 for rows of 4, 8 and 16 bytes (4,000 to 16M edges); for other rows of
    up to 64 bytes 0.4 to 0.8 for 4,000 edges, 1.0 to 2.0 from 60,000 on.
    """
    num_edges, features, row_bytes = (traits.measures[name] for name in ("edge", "features", "row_bytes"))
    if traits.params["is_wide"]:  # the gathered rows are written in the accumulation dtype
        row_bytes = max(row_bytes, 4 * features)
    fit_vectors = features & (features - 1) == 0 and num_edges * row_bytes <= GB
    return min(row_bytes, num_edges) > 0 and (
        (row_bytes <= 64 and num_edges <= 1 << 14) or (row_bytes <= 16 and fit_vectors)
    )


def _gather_first(
    data: Array,
    gather_ids: Array,
    segment_ids: Array,
    weights: None,
    edge_order: None,
    *,
    num_segments: int,
    deterministic: bool,
    clips_gather_ids: bool,
    is_wide: bool,
) -> Sequence[Array]:
    rows = gather_rows(data, gather_ids, clips_gather_ids)
    rows = rows.astype(accumulation_dtype(data.dtype)) if is_wide else rows
    flags = {"indices_are_sorted": True, "deterministic": deterministic}
    return SEGMENT_SUM.kernel(rows, segment_ids, num_segments=num_segments, **flags)


def _sums_fit_cache(traits: Traits) -> bool:
    """XLA adds 32 bits and more to the result itself, but 16-bit numbers to a float32 array, which should be small."""
    measures = traits.measures
    num_sums = measures["batch"] * measures["segment"] * measures["features"]
    return measures["element_bits"] > 16 or 4 * num_sums <= 32 * MB


# Time of plain JAX / kernel: 0.35 (H100, 76 loops); with 16 bits and more than 32 MB of sums 1.15 to 2.5 (H200).
GATHER_SEGMENT_SUM = Op(
    name="gather_segment_sum",
    operands=_operands_of_edges,
    optional={"weights": "has_weights", "edge_order": "has_edge_order"},
    defaults={"indices_are_sorted": False, "deterministic": False, "clips_gather_ids": True, "is_wide": False},
    results=lambda *, has_weights: {"output": ("segment", "head", "feature") if has_weights else CELLS},
    result_dtypes=lambda data, *_, is_wide: [accumulation_dtype(data.dtype) if is_wide else data.dtype],
    reference=_reference_of_edges,
    dtypes=FLOATING_DTYPES,
    guarantee=sum_guarantee,
    attributes=("indices_are_sorted", "clips_gather_ids", "is_wide", "has_weights", "has_edge_order"),
    replicated_dims=replicated_dims_of_cells,
    reduction_dims=("edge",),
    shard_program=of_split_segments(functools.partial(sum_over_split_dim, "edge"), ids_operand=2),
    xla_rules=(
        on_gpu(
            "XLA sorts no edges, which takes longer than the sum",
            unordered,
            uncontended,
            _sums_fit_cache,
            at_most(rows=1 << 18),
        ),
        on_gpu("XLA sorts no edges, and narrow rows leave lanes idle", unordered, uncontended, at_most_16_features),
    ),
    alternatives={
        on_gpu(NEED_SORTED_EDGES, unsorted): sorted_first(
            lambda: GATHER_SEGMENT_SUM, lambda arrays, params: arrays["weights"] is not None
        ),
        on_gpu("narrow rows leave lanes idle", param("has_weights", False), _suit_two_steps): _gather_first,
        UNALIGNED_ROWS: with_longer_rows(lambda: GATHER_SEGMENT_SUM),
    },
    transposes={("data",): _transpose_of_edges, ("weights",): _transpose_weights},
    **SEGMENT_FIELDS,
)
"""`clips_gather_ids`: whether gather ids out of range give the nearest row, else zeros. `is_wide`: whether the sums are
not rounded, but stay in the accumulation dtype."""


# ----------------------------------------------------------------------------------------------------------------------
# The sum over the graphs of a batch: the gradient of rows that all graphs share.


def _join(num_graph_dims: int, *operands: Array | None) -> Sequence[Array | None]:
    cells, gathered, segments, weights, edge_order = flat_batch(num_graph_dims, operands)
    if edge_order is not None:
        num_edges = segments.shape[1]
        edge_order = renumbered(jnp.clip(edge_order, 0, max(num_edges - 1, 0)), num_edges)
    return [merge_graphs(x) for x in (cells, renumbered(gathered, cells.shape[1]), segments, weights, edge_order)]


def _shard_of_graphs(
    kernel: ShardKernel, axes: ShardAxes, *operands: Array | None, num_graph_dims: int, is_wide: bool, **params: Any
) -> Sequence[Array]:
    split = {"edge": (*graph_axes(axes, num_graph_dims), *axes.get("edge", ()))}
    if not split["edge"]:
        return kernel(*operands)
    kernel_of_one = functools.partial(GATHER_SEGMENT_SUM.kernel, **params, is_wide=is_wide)
    return sum_over_split_dim("edge", kernel_of_one, split, *_join(num_graph_dims, *operands), is_wide=is_wide)


_gathered_sum = sum_over_graphs(
    GATHER_SEGMENT_SUM, _join, replicated_dims=replicated_dims, shard_program=_shard_of_graphs
)


def gathered_sum(
    data: Array,
    gather_ids: Array,
    segment_ids: Array,
    weights: Array | None = None,
    edge_order: Array | None = None,
    *,
    num_graph_dims: int = 0,
    **params: Any,
) -> Array:
    """Sums of gathered rows.

    Args:
      weights: ``[E, H]`` for data ``[N, H, D]``.
      edge_order: the number of each edge, by which it finds its weight.
      num_graph_dims: the number of leading dimensions of all arrays that number the graphs of a batch, to sum over.
      params: those of :data:`GATHER_SEGMENT_SUM`.
    """
    numbers = None if weights is None else edge_order
    return _gathered_sum(num_graph_dims, [data, gather_ids, segment_ids, weights, numbers], **params)


def gathered_sum_by_row(
    params: Params, edges: Mapping[str, Array], cells: Array, weights: Array | None, num_graph_dims: int = 0
) -> Array:
    """The sums over the edges of each row, which gather cells of segments: gradients by the rows."""
    *ids, order = transposed_edges(edges, params["num_segments"])
    return gathered_sum(
        cells,
        *ids,
        weights,
        order,
        num_segments=params["num_rows"],
        indices_are_sorted=order is not None and num_graph_dims == 0,  # plans of different graphs cannot be merged
        deterministic=params["deterministic"],
        clips_gather_ids=False,
        num_graph_dims=num_graph_dims,
    )


def sum_by_plan(data: Array, order: Array, sorted_ids: Array, num_segments: int, is_wide: bool = False) -> Array:
    """Sums of rows in the order of a plan. `is_wide`: unrounded, in the accumulation dtype."""
    flags = {"indices_are_sorted": True, "deterministic": may_run_kernel(), "is_wide": is_wide}
    return gathered_sum(data, order, sorted_ids, num_segments=num_segments, **flags)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


def gradient_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The params of the gradient of a sum. The number of segments follows from the shape of the cotangent."""
    names = ("indices_are_sorted", "deterministic", "accumulator")
    return {name: params[name] for name in names if params.get(name) is not None}


def count_rows(ids: Array, num_segments: int, indices_are_sorted: bool = False) -> Array:
    """The number of rows of each segment, ``[S]``."""
    ones = jnp.ones(ids.shape, index_dtype(ids.shape[0]))
    return SEGMENT_SUM(ones, ids, num_segments=num_segments, indices_are_sorted=indices_are_sorted)[0]


def _forward(params: Params, *, data: Array, segment_ids: Array, **plan: Array) -> tuple[Array, Array]:
    if plan:
        return sum_by_plan(data, **plan, num_segments=params["num_segments"]), segment_ids
    return sum_op(params["accumulator"])(data, segment_ids, **params.without("accumulator"))[0], segment_ids


def _backward(params: Params, segment_ids: Array, d_output: Array) -> dict[str, Array]:
    [d_data] = SEGMENT_SUM_BACKWARD(d_output, segment_ids, **gradient_params(params))
    return {"data": d_data}


_segment_sum = KernelVjp("segment_sum", _forward, _backward)
