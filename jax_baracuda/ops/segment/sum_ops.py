"""The ops of sums: of rows, of gathered rows, and the products of the ends of edges that are the gradient of weights.

They are in one file, because the derivatives and alternatives of each are others of these ops.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_baracuda._core.arrays import FLOATING_DTYPES, accumulation_dtype, in_range
from jax_baracuda._core.functions import Params
from jax_baracuda._core.guarantees import EXACT, accumulated
from jax_baracuda._core.op import NamedDimensions, Op
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.rules import (
    GB,
    MB,
    Traits,
    at_least,
    at_most,
    at_most_4_features,
    at_most_16_features,
    fused,
    in_cache,
    launch_bound,
    on_cpu,
    on_gpu,
    param,
    single_feature,
    uncontended,
    unordered,
    unsorted,
)
from jax_baracuda._core.selection import may_run_kernel
from jax_baracuda._core.sharding import ShardAxes, ShardKernel
from jax_baracuda.ops.segment.arguments import Accumulator
from jax_baracuda.ops.segment.cells import gather_or_zeros, gather_segments, per_row, sum_in_float64, xla_sum
from jax_baracuda.ops.segment.definitions import (
    BELOW_FLOAT64,
    CELLS,
    IDS,
    NOTHING_TO_VECTORISE,
    SEGMENT_FIELDS,
    SHORT_REDUCTION,
    WIDE_DTYPES,
    float64_guarantee,
    gradient_op,
    limit_of_32_bits,
    of_split_segments,
    plan_parameters,
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
from jax_baracuda.ops.segment.plan import with_shared_sort

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


def _are_added_in_less_time_than_sorted(traits: Traits) -> bool:
    """Whether rows and sums fit in the cache or, in 32 bits, take at most 128 MB or have less than 64 numbers a row.

    XLA adds 16 bits as float32.
    """
    measures = traits.measures
    has_32_bits = measures["row_bytes"] == 4 * measures["features"]
    return in_cache(traits) or (has_32_bits and (measures["bytes"] <= 128 * MB or measures["features"] < 64))


# Times of plain JAX / kernel. Launch-bound: 0.8 up to 4 MB (H100); 0.45 to 0.8 for two segments of 1,200 rows, 0.8 to
# 1.6 for those of 3,000 (H200, 10 loops). Rows that XLA computes for one sum: 0.25 to 1.0 for 200,000 to 5M rows, 1.1
# to 1.9 where they have 32 numbers or more and one of few segments has a tenth of them (H200, 160 calls); up to 80 for
# two segments, 5 to 10 where XLA computes the softmax of an attention again for each feature. Force fields, whose
# forces are rows of 3: 0.99 (13 programs). Rows in memory: 0.4 to 0.75, once 1.06, up to 64 MB; in float32 0.7 to 1.0
# up to 128 MB (18 loops), 0.9 to 1.3 up to 240 MB (10 loops); beyond that 0.8 to 1.3 in rows of 32, 1.2 to 2.0 in
# longer ones (H200). Steps of jraph's GAT over 1.2M and 2M edges, in rows of 32: 0.83 and 0.89.
_LAUNCH_BOUND = on_gpu("launch-bound: XLA takes one launch", unordered, uncontended, launch_bound)
SUM_RULES = (
    _LAUNCH_BOUND,
    on_gpu("XLA adds rows as it computes them", unordered, uncontended, _own_ids, fused, at_most(bytes=GB)),
    on_gpu(
        "the sort of the ids takes longer",
        unordered,
        uncontended,
        _own_ids,
        at_least(features=32),
        _are_added_in_less_time_than_sorted,
    ),
    SHORT_REDUCTION,
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
    # Two cores: up to 1M unsorted single numbers that XLA computes 0.2 to 1.2, mostly 0.6 to 0.9 (24 loops); other rows
    # 0.7 to 2.8 where XLA computes the rows (8 calls). It may compute them again for their other readers: a step of
    # jraph's GAT took twice as long. The gradient of a cross-entropy: 0.5 to 0.7, since XLA adds single numbers in
    # place to the array that a program adds the sums to.
    xla_rules=(
        *SUM_RULES,
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


def gradient_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The params of the gradient of a sum. The number of segments follows from the shape of the cotangent."""
    names = ("indices_are_sorted", "deterministic", "accumulator")
    return {name: params[name] for name in names if params.get(name) is not None}


def count_rows(ids: Array, num_segments: int, indices_are_sorted: bool = False) -> Array:
    """The number of rows of each segment, ``[S]``."""
    ones = jnp.ones(ids.shape, index_dtype(ids.shape[0]))
    return SEGMENT_SUM(ones, ids, num_segments=num_segments, indices_are_sorted=indices_are_sorted)[0]


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
        rows = rows * jnp.where(per_row(takes_part, weights), weights, 0)[..., None]
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
GATHER_SEGMENT_SUM = define_op(
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
        on_cpu(SHORT_REDUCTION.reason, *SHORT_REDUCTION.conditions, at_most_4_features),
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
# Products of the ends of edges: the gradient of weights, where the cells are cotangents. Hence the name of the first
# operand.


def _reference_of_dot(
    d_output: Array, data: Array, gather_ids: Array, segment_ids: Array, edge_order: Array | None, *, is_wide: bool
) -> tuple[Array]:
    wide = accumulation_dtype(data.dtype)
    if edge_order is not None:  # ids in the order of the edges: cheaper to move than products
        gather_ids, segment_ids = (jnp.zeros_like(ids).at[edge_order].set(ids) for ids in (gather_ids, segment_ids))
    cells, is_member = gather_segments(d_output.astype(wide), segment_ids)
    cells = jnp.where(is_member, cells, 0)  # derivatives multiply the zeros of dropped edges by them
    products = jnp.where(is_member, cells * gather_rows(data, gather_ids, clips_gather_ids=True).astype(wide), 0)
    output = products.sum(axis=-1)
    return (output if is_wide else output.astype(data.dtype),)


def _transpose_cells(
    avals: Sequence[Any], d_outputs: Sequence[Array], data: Array, *edges: Array | None, deterministic: bool
) -> Sequence[Array]:
    """The transpose with respect to the cells: the weighted sum."""
    *ids, order = edges
    weighted = *ids, d_outputs[0].astype(data.dtype), order
    return [gathered_sum(data, *weighted, num_segments=avals[0].shape[0], deterministic=deterministic)]


def _transpose_data(
    avals: Sequence[Any], d_outputs: Sequence[Array], cells: Array, *edges: Array | None, deterministic: bool
) -> Sequence[Array]:
    """The transpose with respect to the gathered rows: the weighted sum in the other direction."""
    gather_ids, segment_ids, order = edges
    # No gradient goes through gather ids out of range.
    weighted = as_gather_ids(segment_ids, cells.shape[0]), gather_ids, d_outputs[0].astype(cells.dtype), order
    flags = {"deterministic": deterministic, "clips_gather_ids": False}
    return [gathered_sum(cells, *weighted, num_segments=avals[0].shape[0], **flags)]


GATHER_SEGMENT_DOT = define_op(
    name="gather_segment_dot",
    operands={
        "d_output": ("segment", "head", "feature"),
        "data": ("gathered", "head", "feature"),
        **dict.fromkeys(("gather_ids", "segment_ids", "edge_order"), ("edge",)),
    },
    optional={"edge_order": "has_edge_order"},
    defaults={"is_wide": False},
    results={"output": ("edge", "head")},
    result_dtypes=lambda d_output, *_, is_wide: [accumulation_dtype(d_output.dtype) if is_wide else d_output.dtype],
    reference=_reference_of_dot,
    # Time of plain JAX / kernel: 0.5 (H100, 41 loops), 0.6 to 1.0 for 4M edges of 7 and 8 (H200). Two cores: 0.2 for
    # single features.
    xla_rules=(
        on_gpu("one thread adds up few products, and XLA fuses that with what follows", at_most(feature=8)),
        on_gpu("XLA fuses what makes the rows, too", fused),
        on_gpu("gathers from the L2 cache, fused into the sum over features", in_cache),
        NOTHING_TO_VECTORISE,
    ),
    dtypes=FLOATING_DTYPES,
    guarantee=accumulated,
    attributes=("is_wide", "has_edge_order"),
    plan_parameters=lambda d_output, *_, sizes: plan_parameters(d_output, sizes=sizes),
    replicated_dims=replicated_dims,
    reduction_dims=("feature",),
    shard_program=functools.partial(sum_over_split_dim, "feature"),
    limit=limit_of_32_bits,
    transposes={("d_output",): _transpose_cells, ("data",): _transpose_data},
)
