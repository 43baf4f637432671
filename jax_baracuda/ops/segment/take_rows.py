"""Rows by their numbers, as in an embedding look-up. The gradient is a segment sum."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import (
    accumulation_dtype,
    as_array,
    flag,
    in_automatic_mode,
    in_range,
    integer_array,
    reshard_like,
)
from jax_baracuda._core.batch import map_over_batch, with_mapped_dim
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.selection import Implementation, Selection, current_selection, may_run_kernel, selecting
from jax_baracuda._core.sharding import ShardAxes, ShardKernel, mesh_axes
from jax_baracuda.ops.segment.arguments import Accumulator, canonical_accumulator
from jax_baracuda.ops.segment.cells import sum_in_blocks
from jax_baracuda.ops.segment.definitions import of_split_segments, sum_guarantee
from jax_baracuda.ops.segment.ids import check_numbered, clamped_ids, index_dtype, wrapped_ids
from jax_baracuda.ops.segment.plan import SegmentPlan, check_plan, check_size_of_plan, permuted
from jax_baracuda.ops.segment.sum_ops import SEGMENT_SUM, sum_by_plan, sum_op, sum_over_shards


@public_function(has_twin=False)
def take_rows(
    data: ArrayLike,
    ids: ArrayLike | None = None,
    *,
    indices_are_sorted: bool = False,
    deterministic: bool = False,
    accumulator: Accumulator | None = None,
    plan: SegmentPlan | None = None,
    implementation: Implementation | None = None,
) -> Array:
    """Rows by their numbers: ``out[..., :] = data[ids[...], :]``, the look-up of embeddings.

    The same as ``data[ids]`` for an integer array, by the same XLA gather, which XLA fuses with its neighbours. The
    gradient has a kernel, that of :func:`segment_sum`.

    Args:
      data: ``[N, ...]``, the rows, any dtype. The gradients of float16, bfloat16, float32 and float64 have kernels.
      ids: any shape, any integer dtype, in any order: the row that each element takes. As in ``data[ids]``, negative
        ids count from the end, and ids out of range name the nearest row. (As in JAX, array ids are read modulo 2^32.)
      indices_are_sorted: promises that ``ids.reshape(-1)``, with negative ids counted from the end, is non-decreasing,
        which saves the gradient a sort or atomic additions on GPUs. If the promise is false, the result may hold
        anything.
      deterministic: on GPUs, if unsorted ids take a row several times, its gradients are added in an order that varies
        from run to run, unless this is True. Everything else has the same bits in every run anyway.
      accumulator: "float64": the gradients of rows of 16 and 32 bits are added in float64 and rounded once to the
        dtype, as in :func:`segment_sum`; the value is the same.
      plan: a :func:`segment_plan` of the edges of a graph, which replaces `ids`: each edge takes the row of its
        segment. With ``plan.transposed``, each edge takes the row that it gathers. The gradient then does not sort and
        has the same bits in every run. Calls trust it; :meth:`SegmentPlan.validate` checks it.

    Returns:
      ``ids.shape + data.shape[1:]`` with the dtype of `data`. Under explicit sharding, it is sharded like `ids` and the
      features of `data`, also where ``data[ids]`` asks for an `out_sharding`.

    Raises:
      TypeError: an argument is not an array or has an unsuitable dtype.
      ValueError: `data` is a scalar, has no rows to take, or not as many rows as the plan has segments; both a plan and
        ids are given; or `accumulator` is unknown.

    Numerical guarantees: the value is exact. In the gradient, rows of 16 bits are added in float32 (float64 in float64,
    or with `accumulator`), and the sum is rounded once to the dtype. The gradient of ``data[ids]`` adds in 16 bits,
    where a sum of ones stops growing at 256 or 2048. Bit-equal from run to run, except for gradients on GPUs (see
    `deterministic`).

    Gradient: ``d_data[n] = sum { d_out[i] : ids[i] == n }``, the kernel of :func:`segment_sum`; `data` is not kept for
    the backward pass. As in ``data[ids]``, no gradient goes through ids that are out of range, except that a scalar id
    out of range passes it to the nearest row. The function is linear in `data`: derivatives of any order, in either
    mode and in any combination exist. If ``jax.vmap`` maps the ids but not `data`, the gradient of `data` is one sum
    over the whole batch; sorted ids and plans do not save its sort or atomic additions there. Complex `data` has the
    gradient of JAX.

    Example:
      >>> import jax, jax.numpy as jnp, jax_baracuda as jb
      >>> table = jnp.array([[1.0, 4.0], [3.0, 2.0], [5.0, 6.0]])
      >>> tokens = jnp.array([2, 0, -1])
      >>> print(jb.take_rows(table, tokens))
      [[5. 6.]
       [1. 4.]
       [5. 6.]]
      >>> print(jax.grad(lambda table: jb.take_rows(table, tokens).sum())(table))
      [[1. 1.]
       [0. 0.]
       [2. 2.]]
    """
    name = "take_rows"
    data = as_array(name, "data", data)
    if data.ndim == 0:
        raise ValueError(f"{name}: data must have shape [N, ...], got a scalar")
    num_rows = data.shape[0]
    accumulator = canonical_accumulator(name, accumulator, data.dtype)
    check_plan(name, plan, ids=ids)
    if plan is not None:
        return _take_by_plan(name, data, plan, accumulator)
    if ids is None:
        raise TypeError(f"{name}: ids must be given, or a plan")
    ids = integer_array(name, "ids", ids)
    check_numbered(name, "rows", num_rows)
    if num_rows == 0 and ids.size > 0:
        raise ValueError(f"{name}: data must have rows for {ids.size} ids to take, got shape {data.shape}")
    ids = _row_numbers(ids, num_rows)
    flags = {
        "indices_are_sorted": flag(name, "indices_are_sorted", indices_are_sorted),
        "deterministic": flag(name, "deterministic", deterministic),
    }
    return _gather(data, ids, **flags, accumulator=accumulator)


def _take_by_plan(name: str, data: Array, plan: SegmentPlan, accumulator: Accumulator | None) -> Array:
    num_rows, num_edges = data.shape[0], plan.edge_order.shape[0]
    check_size_of_plan(name, plan.num_segments, "segments", "data", data)
    if num_rows == 0 and num_edges > 0:
        raise ValueError(f"{name}: data must have rows for {num_edges} edges to take, got shape {data.shape}")
    order = plan.edge_order, plan.segment_ids
    flags = {"indices_are_sorted": False, "deterministic": may_run_kernel()}
    return _gather(data, plan.edge_segment_ids, *order, **flags, accumulator=accumulator)


def _row_numbers(ids: Array, num_rows: int) -> Array:
    """Ids counted from the front, in the index dtype.

    As in JAX, a scalar id out of range is clamped, and 64-bit ids in arrays are read modulo 2^32 unless there are 2^31
    rows or more.
    """
    ids = wrapped_ids(ids, num_rows)
    if ids.ndim == 0 and num_rows != 0:
        ids = clamped_ids(ids, num_rows)
    return ids.astype(index_dtype(num_rows))


# ----------------------------------------------------------------------------------------------------------------------
# The gather: a primitive, because under ``vmap`` a ``jax.custom_vjp`` computes a gradient of data per batch element. It
# is linear in data, and its transpose is the sum below. The operands after the ids, if any, are the order of a plan.


def _gather(
    data: Array,
    ids: Array,
    *order: Array,
    indices_are_sorted: bool,
    deterministic: bool,
    accumulator: Accumulator | None = None,
    fills: bool = False,
) -> Array:
    """Rows of `data` by ids counted from the front. Ids out of range give zeros if `fills`, else the nearest row."""
    params: dict[str, Any] = {"indices_are_sorted": indices_are_sorted, "deterministic": deterministic, "fills": fills}
    params |= {"accumulator": accumulator, "implementation": current_selection()}  # for the transpose, a segment sum
    return _gather_p.bind(*jax_versions.unify_varying(data, ids, *order), **params, num_batch_dims=0)[0]


def _gathered_type(data: Any, ids: Any, *_: Any, num_batch_dims: int, **__: Any) -> list[Any]:
    """Under explicit sharding, sharded like the ids and like the features of `data`, unless an axis occurs twice."""
    num = num_batch_dims
    shape = (*data.shape[:num], *ids.shape[num:], *data.shape[num + 1 :])
    specs = [jax_versions.explicit_spec(x) for x in (data, ids)]
    like = ids if specs[0] is None and specs[1] is not None else data
    spec = None
    if specs != [None, None]:
        data_spec, ids_spec = (spec or (None,) * x.ndim for spec, x in zip(specs, (data, ids), strict=True))
        batch_spec = (a or b for a, b in zip(data_spec[:num], ids_spec[:num], strict=True))
        spec = _each_axis_once((*batch_spec, *ids_spec[num:], *data_spec[num + 1 :]))
    return [jax_versions.result_aval(like, shape, data.dtype, spec).update(weak_type=data.weak_type)]


def _each_axis_once(spec: Sequence[Any]) -> tuple[Any, ...]:
    entries: list[Any] = []
    taken: set[str] = set()
    for entry in spec:
        axes = mesh_axes(entry)
        entries.append(None if taken.intersection(axes) else entry)
        taken.update(axes)
    return tuple(entries)


def _gather_by_xla(
    data: Array, ids: Array, *_: Array, num_batch_dims: int, indices_are_sorted: bool, fills: bool, **__: Any
) -> Sequence[Array]:
    """An XLA gather, which XLA fuses and partitions."""
    mode: Any = {"mode": "fill", "fill_value": 0} if fills else {"mode": "promise_in_bounds"}

    def take_one(data: Array, ids: Array) -> Array:
        return data.at[ids].get(wrap_negative_indices=False, indices_are_sorted=indices_are_sorted, **mode)

    def take(data: Array, ids: Array) -> tuple[Array]:
        return (map_over_batch(take_one, num_batch_dims, data, ids),)

    [taken_type] = _gathered_type(jax.typeof(data), jax.typeof(ids), num_batch_dims=num_batch_dims)
    spec = jax_versions.explicit_spec(taken_type)
    return (take if spec is None else in_automatic_mode(take, taken_type, spec))(data, ids)


def _batch_gather(
    operands: Sequence[Array], axes: Sequence[int | None], *, num_batch_dims: int, **params: Any
) -> tuple[list[Array], list[int | None]]:
    """If data is mapped, its batch dimension goes first. If only ids are, it is one more dimension of the ids, so that
    data gets a single gradient."""
    if axes[0] is not None:
        mapped, _ = with_mapped_dim(operands, axes)
        return _gather_p.bind(*mapped, **params, num_batch_dims=num_batch_dims + 1), [0]
    data, ids = operands[:2]  # plans of different batch elements cannot be merged
    joined_axis = None if axes[1] is None else num_batch_dims
    if axes[1] is not None:
        ids = jnp.moveaxis(ids, axes[1], num_batch_dims)
    # The ids of a batch are not sorted, even if each element's are. Their sums must stay deterministic nevertheless,
    # unless XLA computes them.
    deterministic = params["indices_are_sorted"] and params["implementation"] != "xla"
    params |= {"indices_are_sorted": False, "deterministic": params["deterministic"] or deterministic}
    return _gather_p.bind(data, ids, **params, num_batch_dims=num_batch_dims), [joined_axis]


def _jvp_of_gather(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> tuple[list[Array], list[Any]]:
    [taken] = _gather_p.bind(*primals, **params)
    if isinstance(tangents[0], ad.Zero):
        return [taken], [jax_versions.zero_tangent(taken)]
    return [taken], _gather_p.bind(tangents[0], *primals[1:], **params)


def _transpose_gather(
    cotangents: Sequence[Any],
    data: Any,
    ids: Array,
    *order: Array,
    num_batch_dims: int,
    fills: bool,
    implementation: Selection,
    accumulator: Accumulator | None,
    **params: Any,
) -> list[Array | None]:
    num_rows = data.aval.shape[num_batch_dims]

    def transpose(d_taken: Array, ids: Array, *order: Array) -> Array:
        if order and accumulator is None:
            return sum_by_plan(d_taken, *order, num_rows)
        flags = params
        if order:
            d_taken, ids = permuted(d_taken, order[0]), order[1]
            flags = params | {"indices_are_sorted": True}
        return sum_taken_rows(d_taken, ids, num_segments=num_rows, accumulator=accumulator, **flags)

    with selecting(implementation):
        d_data = map_over_batch(transpose, num_batch_dims, ad.instantiate_zeros(cotangents[0]), ids, *order)
    return [reshard_like(d_data, data.aval), None, *(None for _ in order)]


_gather_p = jax_versions.primitive_of(
    "baracuda_take_rows",
    _gather_by_xla,
    _gathered_type,
    batch=_batch_gather,
    jvp=_jvp_of_gather,
    transpose=_transpose_gather,
)
_gather_p.def_impl(functools.partial(jax_versions.apply_primitive, _gather_p))  # compiled also outside of ``jax.jit``


# ----------------------------------------------------------------------------------------------------------------------
# Its transpose: a segment sum by ids of any rank. Ids of rank 1 use SEGMENT_SUM. Other ids are flattened within the
# program of each shard, because XLA would all-gather arrays that are split along any but their first dimension.


def sum_taken_rows(d_taken: Array, ids: Array, *, accumulator: Accumulator | None = None, **params: Any) -> Array:
    """The gradient by `data`, given the cotangent of the taken rows ``[*ids.shape, ...]``. Ids count from the front."""
    if ids.ndim == 1:
        return sum_op(accumulator)(d_taken, ids, **params)[0]
    return TAKE_ROWS_BACKWARD(d_taken, ids, ids_ndim=ids.ndim, accumulator=accumulator, **params)[0]


def _row_dims(ids_ndim: int) -> tuple[str, ...]:
    return tuple(f"row{i}" for i in range(ids_ndim))


def _reference(
    d_output: Array, ids: Array, *, num_segments: int, ids_ndim: int, accumulator: Accumulator | None = None
) -> Sequence[Array]:
    if accumulator is not None:
        return sum_op(accumulator).reference(*_flat(d_output, ids), num_segments=num_segments)
    wide = d_output.astype(accumulation_dtype(d_output.dtype))

    def add(ids: Array, num_cells: int) -> Array:
        cells = jnp.zeros((num_cells, *d_output.shape[ids_ndim:]), wide.dtype)
        is_cell = in_range(ids, num_cells)
        return cells.at[jnp.where(is_cell, ids, num_cells)].add(wide, mode="drop")

    return (sum_in_blocks(add, ids, num_segments).astype(d_output.dtype),)


def _flat(d_output: Array, ids: Array) -> tuple[Array, Array]:
    return d_output.reshape(math.prod(ids.shape), *d_output.shape[ids.ndim :]), ids.reshape(-1)


def _shard_program(
    kernel: ShardKernel, axes: ShardAxes, d_output: Array, ids: Array, *, ids_ndim: int, **params: Any
) -> Sequence[Array]:
    row_axes = tuple(axis for dim in _row_dims(ids_ndim) for axis in axes.get(dim, ()))
    if not row_axes:
        return kernel(d_output, ids)
    axes_of_flat = {"row": row_axes, "segment": axes.get("segment", ())}
    d_data = sum_over_shards(axes_of_flat, *_flat(d_output, ids), **params)
    return (d_data.astype(d_output.dtype),)


TAKE_ROWS_BACKWARD = define_op(
    name="take_rows_backward",
    operands=lambda *, ids_ndim: {"d_output": (*_row_dims(ids_ndim), "..."), "ids": _row_dims(ids_ndim)},
    results={"d_data": ("segment", "...")},
    result_sizes=lambda *, num_segments: {"segment": num_segments},
    reference=_reference,
    dtypes=SEGMENT_SUM.dtypes,
    guarantee=sum_guarantee,
    reduction_dims=lambda *, ids_ndim: _row_dims(ids_ndim),
    shard_program=of_split_segments(_shard_program, ids_operand=1),
    program=lambda d_output, ids, *, ids_ndim, accumulator=None, **params: sum_op(accumulator).kernel(
        *_flat(d_output, ids), **params
    ),
    transposes={
        ("d_output",): lambda _, d_results, ids, *, num_segments, ids_ndim, **params: (
            _gather(d_results[0], ids, fills=True, **params),
        ),
    },
)
