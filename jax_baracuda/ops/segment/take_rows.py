"""Rows by their numbers, as in an embedding look-up. The gradient is a segment sum."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import as_array, in_automatic_mode
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda.ops.segment.gather_sum import sum_edges
from jax_baracuda.ops.segment.ids import checked_ids, index_dtype, wrapped_ids
from jax_baracuda.ops.segment.plan import SegmentPlan, check_plan
from jax_baracuda.ops.segment.sum import SEGMENT_SUM


def take_rows(
    data: ArrayLike,
    ids: ArrayLike | None = None,
    *,
    indices_are_sorted: bool = False,
    deterministic: bool = False,
    plan: SegmentPlan | None = None,
) -> Array:
    """Rows by their numbers: ``out[..., :] = data[ids[...], :]``, the look-up of embeddings.

    The same as ``data[ids]`` of an integer array, and the same gather of XLA, which it fuses with its neighbours. The
    gradient is a kernel.

    Args:
      data: ``[N, ...]``, the rows, any dtype. Of float16, bfloat16, float32 and float64 the gradient has a kernel.
      ids: any shape, any integer dtype, in any order: the row that each element takes. As in ``data[ids]``, negative
        ids count from the end, and ids out of range name the nearest row. (JAX itself reads ids in arrays modulo 2^32.)
      indices_are_sorted: promises that the numbers of the rows, counted from the front, do not decrease in the order of
        ``ids.reshape(-1)``, which saves the gradient a sort or atomic additions on GPUs. If the promise is false, the
        result may hold anything.
      deterministic: on GPUs, the gradients of a row that unsorted ids take several times are added in an order that
        varies from run to run, unless this is True. Everything else has the same bits in every run anyway.
      plan: instead of `ids`, the edges of a graph as :func:`segment_plan` has sorted them: each takes the row of its
        segment. With ``plan.transposed``, each takes the row that it gathers. The gradient does not sort any more, and
        has the same bits in every run.

    Returns:
      ``ids.shape + data.shape[1:]`` with the dtype of `data`. Under explicit sharding it is split as `ids` and the
      features of `data` are, also where ``data[ids]`` asks for an `out_sharding`.

    Raises:
      TypeError: an argument is no array or has an unsuitable dtype.
      IndexError: `ids` is boolean.
      ValueError: `data` is a scalar, has no rows to take or others than the plan, or both a plan and ids are given.

    Numerical guarantees: the value is exact. In the gradient, rows of 16 bits are added in float32 (float64 in
    float64), and the sum is rounded once to the dtype, where ``data[ids]`` adds in 16 bits and stops counting ones at
    256 or 2048. Bit-equal from run to run, except for gradients on GPUs as said under `deterministic`.

    Gradient: ``d_data[n] = sum { d_out[i] : ids[i] == n }``, the kernel of :func:`segment_sum`; `data` is not kept for
    the backward pass. As in ``data[ids]``, no gradient goes through ids that are out of range, but for a scalar one,
    through which it goes to the nearest row. Derivatives of any order exist. Pass the ids of a batch as one array of
    rank 2: where ``jax.vmap`` maps the ids and not `data`, the gradient makes an array ``[N, ...]`` for each element of
    the batch before it adds them, which takes that much memory. Complex `data` has the gradient of JAX. ``jax.jvp`` and
    ``jax.jacfwd`` of this function need its twin of the same name in :mod:`jax_baracuda.forward_mode`.

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
    if plan is not None:
        return _take_by_plan(name, data, ids, plan)
    if ids is None:
        raise TypeError(f"{name}: ids must be given, or a plan")
    ids = checked_ids(name, ids, "ids")
    if num_rows == 0 and ids.size > 0:
        raise ValueError(f"{name}: data must have rows for {ids.size} ids to take, got shape {data.shape}")
    params = TakeParams(num_rows, bool(indices_are_sorted), bool(deterministic))
    take = _take_rows if jnp.issubdtype(data.dtype, jnp.floating) else _primal
    return take(params, data=data, ids=_row_numbers(ids, num_rows))


def _take_by_plan(name: str, data: Array, ids: ArrayLike | None, plan: SegmentPlan) -> Array:
    check_plan(name, plan, ids=ids)
    num_rows, num_edges = data.shape[0], plan.edge_order.shape[0]
    if plan.num_segments != num_rows:
        raise ValueError(f"{name}: the plan is for {plan.num_segments} segments, got data.shape = {data.shape}")
    if num_rows == 0 and num_edges > 0:
        raise ValueError(f"{name}: data must have rows for {num_edges} edges to take, got shape {data.shape}")
    params = TakeParams(num_rows, indices_are_sorted=False, deterministic=True)
    take = _take_rows if jnp.issubdtype(data.dtype, jnp.floating) else _primal
    return take(params, data=data, ids=plan.edge_segment_ids, order=plan.edge_order, sorted_ids=plan.segment_ids)


def _row_numbers(ids: Array, num_rows: int) -> Array:
    """What JAX makes of ids: from the front, and those of arrays modulo 2^32, where the rows are not more."""
    ids = wrapped_ids(ids, num_rows)
    if ids.ndim == 0 and num_rows > 0:
        ids = jnp.clip(ids, 0, min(num_rows - 1, int(jnp.iinfo(ids.dtype).max)))
    return ids.astype(index_dtype(num_rows))


# ----------------------------------------------------------------------------------------------------------------------
# Explicit sharding: the result is split as the ids are, and the features as those of the data.


def _spec_of_result(data: Array, ids: Array) -> tuple[Any, ...] | None:
    """None outside explicit sharding. (Under ``vmap``, what is split need not show here.)"""
    data_spec, ids_spec = (jax_versions.explicit_spec(jax.typeof(x)) for x in (data, ids))
    if data_spec is None or ids_spec is None:
        return None
    taken = set(_axes_of(ids_spec))
    return (*ids_spec, *(None if taken.intersection(_axes_of((axes,))) else axes for axes in data_spec[1:]))


def _axes_of(spec: tuple[Any, ...]) -> tuple[str, ...]:
    """The mesh axes that split any of these dimensions."""
    entries = ((axes,) if isinstance(axes, str) else axes or () for axes in spec)
    return tuple(itertools.chain.from_iterable(entries))


def _flattened(x: Array, ndim: int) -> Array:
    """The array with its first `ndim` dimensions made one."""
    if ndim == 1:
        return x
    shape = (math.prod(x.shape[:ndim]), *x.shape[ndim:])
    spec = jax_versions.explicit_spec(jax.typeof(x))
    if spec is None:
        return x.reshape(shape)
    flat_spec = (_axes_of(spec[:ndim]) or None, *spec[ndim:])
    [flat] = in_automatic_mode(lambda x: (x.reshape(shape),), jax.typeof(x), flat_spec)(x)
    return flat


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rule.


@dataclasses.dataclass(frozen=True)
class TakeParams:
    """The static arguments of a call."""

    num_rows: int
    indices_are_sorted: bool
    deterministic: bool


def _primal(params: TakeParams, *, data: Array, ids: Array, **_: Array) -> Array:
    def take(data: Array, ids: Array) -> tuple[Array]:
        taken = data.at[ids].get(
            mode="promise_in_bounds", wrap_negative_indices=False, indices_are_sorted=params.indices_are_sorted
        )
        return (taken,)

    spec = _spec_of_result(data, ids)
    call = take if spec is None else in_automatic_mode(take, jax.typeof(data), spec)
    return call(data, ids)[0]


def _forward(params: TakeParams, *, data: Array, **ids: Array) -> tuple[Array, dict[str, Array]]:
    return _primal(params, data=data, **ids), ids


def _backward(params: TakeParams, residuals: dict[str, Array], d_output: Array) -> dict[str, Array]:
    if "order" in residuals:
        order, sorted_ids = residuals["order"], residuals["sorted_ids"]
        return {"data": sum_edges(d_output, order, sorted_ids, num_segments=params.num_rows, indices_are_sorted=True)}
    ids = residuals["ids"]
    rows, row_ids = _flattened(d_output, ids.ndim), _flattened(ids, ids.ndim)
    [d_data] = SEGMENT_SUM(
        rows,
        row_ids,
        num_segments=params.num_rows,
        indices_are_sorted=params.indices_are_sorted,
        deterministic=params.deterministic,
    )
    return {"data": d_data}


_take_rows = KernelVjp("take_rows", _primal, _forward, _backward)
