"""Gathers and scatters of JAX on the kernels: which of them move whole rows, and how these are lowered.

A scatter serves ``x.at[...].add`` and its relatives, ``jax.ops.segment_*`` and the gradients of gathers. It moves rows
if its indices name leading axes of the array, or of each of a batch of arrays, and its updates cover all axes behind
these. Several indexed axes count as one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_baracuda._core import jax_versions
from jax_baracuda._core.dispatch import (
    Decision,
    Rule,
    Site,
    at_least,
    decide,
    mostly_empty_segments,
    on_cpu,
    on_gpu,
)
from jax_baracuda._core.lowering import is_ascending, lower_without_mesh, may_be_computed, site_of, splat_of
from jax_baracuda._core.op import Op, OpCall
from jax_baracuda._core.selection import (
    KERNEL_IF_ANY,
    SCOPE_NAME,
    Scope,
    current_selection,
    not_redirected,
    selecting,
)
from jax_baracuda.ops.segment.cells import are_added_one_by_one
from jax_baracuda.ops.segment.comparisons import identity_of
from jax_baracuda.ops.segment.extremum import SEGMENT_EXTREMUM
from jax_baracuda.ops.segment.ids import clamped_ids, signed_ids
from jax_baracuda.ops.segment.product import SEGMENT_PROD
from jax_baracuda.ops.segment.sum import SEGMENT_SUM
from jax_baracuda.ops.write_rows import WRITE_ROWS


class _Unserved(Exception):
    """Why a call is left to JAX."""


def _require(is_served: bool, reason: str) -> None:
    if not is_served:
        raise _Unserved(reason)


# ----------------------------------------------------------------------------------------------------------------------
# Rows.


class _Rows(NamedTuple):
    """An array ``[*batch, *indexed, *row_shape]`` as ``[batch, num_segments, *row_shape]``.

    The indices are ``[*batch, *ids, len(indexed)]`` or, if the batch shares them, ``[*ids, len(indexed)]``. The updates
    are ``[*batch, *ids, *row_shape]``.
    """

    batch: int | None
    """None: there is one array."""
    shares_ids: bool
    indexed: tuple[int, ...]
    """The sizes of the indexed axes."""
    num_rows: int
    """The number of updates of each array."""
    has_flat_ids: bool
    row_shape: tuple[int, ...]

    @property
    def num_segments(self) -> int:
        return math.prod(self.indexed)

    @property
    def leading_of_ids(self) -> tuple[int, ...]:
        return (1,) if self.batch is not None and self.shares_ids else self.leading

    @property
    def leading(self) -> tuple[int, ...]:
        return () if self.batch is None else (self.batch,)

    def ids(self, indices: Array, clips: bool) -> Array:
        """The numbers of the rows, ``[batch, num_rows]``; out of range where an index is, unless `clips`."""
        shape = (*self.leading_of_ids, self.num_rows)
        if len(self.indexed) == 1:
            [size], ids = self.indexed, jax.lax.reshape(indices, shape)
            return signed_ids(clamped_ids(ids, size) if clips and size else ids, size)
        indices = jax.lax.reshape(indices, (*shape, len(self.indexed)))
        ids, is_in_range = jnp.int32(0), jnp.bool_(True)
        for axis, size in enumerate(self.indexed):
            own = indices[..., axis]
            own = clamped_ids(own, size) if clips and size else signed_ids(own, size)
            is_in_range &= (own >= 0) & (own < size)
            ids = ids * size + jnp.clip(own, 0, max(size - 1, 0)).astype(jnp.int32)
        return jnp.where(is_in_range, ids, -1)


def _rows_of(operand: Any, indices: Any, updates: Any, numbers: Any) -> _Rows:
    """The rows that a scatter moves, from the types of its operands and its dimension numbers."""
    shape, indexed = operand.shape, tuple(numbers.scatter_dims_to_operand_dims)
    _require(jax_versions.is_static_shape((*shape, *indices.shape, *updates.shape)), "its sizes are symbolic")
    of_operand = tuple(numbers.operand_batching_dims)
    of_indices = tuple(numbers.scatter_indices_batching_dims)
    windows = [d for d in range(len(shape)) if d not in numbers.inserted_window_dims and d not in of_operand]
    in_updates = dict(zip(windows, numbers.update_window_dims, strict=True))
    _require(bool(indexed), "it has no index")
    _require(
        set(indexed) == set(numbers.inserted_window_dims)
        and all(updates.shape[in_updates[d]] == shape[d] for d in windows),
        "it takes or writes parts of rows",
    )
    first = min(indexed)
    _require(indexed == tuple(range(first, first + len(indexed))), "its indexed axes are not neighbours in order")
    _require(of_indices == tuple(range(len(of_indices))), "its batch is not the leading axes")
    _require(of_operand in ((), tuple(range(first))), "its batch is not the leading axes")
    scattered = [d for d in range(len(updates.shape)) if d not in numbers.update_window_dims]
    ids_axes, batch_axes = scattered[len(of_operand) :], scattered[: len(of_operand)]
    batch_axes = batch_axes or [in_updates[d] for d in range(first)]
    rows_axes = [in_updates[d] for d in range(first + len(indexed), len(shape))]
    sizes = tuple(shape[d] for d in indexed)
    _require(len(sizes) == 1 or math.prod(sizes) < 2**31, "its indexed axes have 2^31 elements or more")
    _require([*batch_axes, *ids_axes, *rows_axes] == list(range(len(updates.shape))), "its rows would be transposed")
    return _Rows(
        batch=math.prod(shape[:first]) if first else None,
        shares_ids=not of_operand,
        indexed=sizes,
        num_rows=math.prod(updates.shape[d] for d in ids_axes),
        has_flat_ids=len(ids_axes) == 1,
        row_shape=tuple(updates.shape[d] for d in rows_axes),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Scatters.

_Run = Callable[..., Sequence[Array]]
"""Runs an op: its kernel, or the op split over devices."""


# A kernel reads and writes the whole array, where XLA may write a few rows in place.
_FEW_ROWS = "few rows of an array are updated, which XLA may do in place"
_RULES_OF_JOIN = (on_cpu(_FEW_ROWS, mostly_empty_segments), on_gpu(_FEW_ROWS, mostly_empty_segments))

# Two busy cores, time of plain JAX / kernel: 0.7 to 1.0 for up to 8,000 rows of 64 to 1,024 numbers, in loops to 1.2,
# 0.02 to 0.2 for 20,000 to 100,000 narrow rows. XLA copies float8 arrays in every step.
_RULES_OF_WRITE = (on_cpu("XLA writes rows in place in as little time", at_least(element_bits=16)),)


class _Reduction(NamedTuple):
    """What serves a scatter that reduces the updates of a row."""

    op: Op
    params: dict[str, Any]
    identity: Callable[[Any], Any]
    """``(dtype) -> the reduction of no updates``"""
    join: Callable[[Array, Array], Array]
    widens: bool
    """Whether narrow integers are reduced in 32 bits."""


def _extremum(minimum: bool) -> _Reduction:
    params = {"first_wins": False, "minimum": minimum, "has_winner": False}
    identity = functools.partial(identity_of, minimum=minimum)
    return _Reduction(SEGMENT_EXTREMUM, params, identity, jnp.minimum if minimum else jnp.maximum, widens=False)


def _added(x: Array, totals: Array) -> Array:
    """The sums. Rows without updates keep a -0, to which a total of 0 would add up as 0."""
    return jnp.where(totals == 0, x, x + totals)


_REDUCTIONS = {
    "scatter-add": _Reduction(SEGMENT_SUM, {"deterministic": False}, lambda _: 0, _added, widens=True),
    "scatter-mul": _Reduction(SEGMENT_PROD, {"has_residual": False}, lambda _: 1, jnp.multiply, widens=True),
    "scatter-max": _extremum(minimum=False),
    "scatter-min": _extremum(minimum=True),
}
WRITE = "scatter"
SCATTERS = [
    jax.lax.scatter_p,
    jax.lax.scatter_add_p,
    jax.lax.scatter_mul_p,
    jax.lax.scatter_max_p,
    jax.lax.scatter_min_p,
]


def scatter(
    primitive: str, ctx: Any, operand: Any, indices: Any, updates: Any, *, dimension_numbers: Any, **params: Any
) -> tuple[Decision, Any]:
    """Decides what serves a scatter, and lowers it unless JAX's own rule has to.

    Returns:
      The decision, and the value of the result. None: JAX's rule lowers the scatter.
    """
    try:
        _require(
            list(jax_versions.platforms_of(ctx)) in (["cpu"], ["cuda"]), "there are kernels for CPUs and CUDA only"
        )
        return _scatter(primitive, ctx, operand, indices, updates, dimension_numbers, **params)
    except _Unserved as reason:
        return Decision("xla", str(reason)), None


def _scatter(
    primitive: str, ctx: Any, operand: Any, indices: Any, updates: Any, numbers: Any, **params: Any
) -> tuple[Decision, Any]:
    rows = _rows_of(ctx.avals_in[0], ctx.avals_in[1], ctx.avals_in[2], numbers)
    clips = params["mode"] == jax.lax.GatherScatterMode.CLIP
    if primitive == WRITE:
        _require(params["update_jaxpr"] is None, "a function is applied to rows")
        return _write(ctx, rows, clips, operand, indices, updates)
    reduction, dtype = _REDUCTIONS[primitive], ctx.avals_in[0].dtype
    op, is_narrow = reduction.op, reduction.widens and dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.integer)
    splat = splat_of(ctx, operand)
    replaces = splat == reduction.identity(dtype) and not (splat == 0 and np.signbit(splat))
    is_sorted = len(rows.indexed) == 1 and (
        (params["indices_are_sorted"] and rows.has_flat_ids and rows.shares_ids) or is_ascending(ctx, indices)
    )
    of_op = {**reduction.params, "num_segments": rows.num_segments, "indices_are_sorted": is_sorted}
    of_batch = {} if rows.batch is None else {"num_batch_dims": 1}
    types = (
        jax.ShapeDtypeStruct((*rows.leading, rows.num_rows, *rows.row_shape), jnp.int32 if is_narrow else dtype),
        jax.ShapeDtypeStruct((*rows.leading_of_ids, rows.num_rows), np.int32),
    )

    def program(run: _Run, operand: Array, indices: Array, updates: Array) -> Array:
        data = jax.lax.reshape(updates, types[0].shape)
        data = data.astype(types[0].dtype) if is_narrow else data
        [reduced] = run(data, rows.ids(indices, clips), **of_op, **of_batch)
        reduced = jax.lax.reshape(reduced.astype(dtype) if is_narrow else reduced, operand.shape)
        return reduced if replaces else reduction.join(operand, reduced)

    call = _call(ctx, op, types, {**of_op, **of_batch})
    site = _site(call, ctx, [2, 1], [operand, indices, updates])
    rules = () if replaces else _RULES_OF_JOIN
    decision, result = _lowered(call, site, rules, ctx, program, operand, indices, updates)
    is_slow = rows.batch is None and are_added_one_by_one(rows.row_shape, ctx.avals_in[2].dtype)
    if result is None and is_slow and primitive == "scatter-add" and site.platform == "cuda":
        if not site.is_split:  # a device may have a part of any axis
            result = _add_flat_rows(ctx, rows, numbers, params, operand, indices, updates)
    return decision, result


def _add_flat_rows(ctx: Any, rows: _Rows, numbers: Any, params: dict[str, Any], *operands: Any) -> Any:
    """JAX's scatter of flat rows."""
    num_features = math.prod(rows.row_shape)

    def add(operand: Array, indices: Array, updates: Array) -> list[Array]:
        of_ids = updates.shape[: updates.ndim - len(rows.row_shape)]
        flat = jax.lax.scatter_add_p.bind(
            operand.reshape(*rows.indexed, num_features),
            indices,
            updates.reshape(*of_ids, num_features),
            dimension_numbers=numbers._replace(update_window_dims=(len(of_ids),)),
            **params,
        )
        return [flat.reshape(operand.shape)]

    with not_redirected(), Scope(SCOPE_NAME, None):
        [result] = lower_without_mesh(add, ctx, operands)
    return jax_versions.lower_with_sharding_in_types(ctx, result, ctx.avals_out[0])


def _write(ctx: Any, rows: _Rows, clips: bool, operand: Any, indices: Any, updates: Any) -> tuple[Decision, Any]:
    _require(rows.batch is None, "it writes rows of several arrays")
    _require(rows.num_segments + rows.num_rows < 2**31, "there are 2^31 rows or more")
    params = {"ranks": (1 + len(rows.row_shape),), "axis": 0, "has_layer": False, "scales": (0,)}
    params["has_unique_slots"] = False
    dtype = ctx.avals_in[0].dtype
    types = (
        jax.ShapeDtypeStruct((rows.num_segments, *rows.row_shape), dtype),
        jax.ShapeDtypeStruct((rows.num_rows, *rows.row_shape), dtype),
        jax.ShapeDtypeStruct((rows.num_rows,), np.int32),
    )

    def program(run: _Run, operand: Array, indices: Array, updates: Array) -> Array:
        slots = jnp.clip(rows.ids(indices, clips), -1, rows.num_segments).astype(jnp.int32)
        pool, own = (jax.lax.reshape(x, of.shape) for x, of in zip((operand, updates), types, strict=False))
        return jax.lax.reshape(run(pool, own, slots, **params)[0], operand.shape)

    call = _call(ctx, WRITE_ROWS, types, params)
    site = _site(call, ctx, [0, 2, 1], [operand, indices, updates])
    return _lowered(call, site, _RULES_OF_WRITE, ctx, program, operand, indices, updates)


# ----------------------------------------------------------------------------------------------------------------------
# The decision.


def _call(ctx: Any, op: Op, types: Sequence[Any], params: dict[str, Any]) -> OpCall:
    selection = current_selection()
    call = OpCall(op, types, params)
    dtype = types[0].dtype
    _require(dtype.name in call.resolve(op.dtypes), f"there is no kernel for dtype {dtype.name}")
    if selection is None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 and _platform(ctx) == "cuda":
        selection = KERNEL_IF_ANY  # plain JAX rounds after each term, by atomic operations that 16 bits do not have
    return OpCall(op, types, {**params, "implementation": selection})


def _platform(ctx: Any) -> str:
    [platform] = jax_versions.platforms_of(ctx)
    return platform


def _site(call: OpCall, ctx: Any, order: Sequence[int], operands: Sequence[Any]) -> Site:
    """Where a call stands whose operands are those of the primitive in this order."""
    platform = _platform(ctx)
    of_call = ctx.replace(avals_in=[ctx.avals_in[i] for i in order])
    site = site_of(call, platform, of_call, [operands[i] for i in order])
    if platform == "cuda" and may_be_computed(operands[order[0]]):
        site = dataclasses.replace(site, fuses=True)
    module = ctx.module_context
    if site.is_split and (module.lowering_parameters.for_export or not jax_versions.knows_devices(module.axis_context)):
        raise _Unserved("the program is split over devices that are not known yet")
    return site


def _lowered(
    call: OpCall, site: Site, rules: Sequence[Rule], ctx: Any, program: Callable[..., Array], *operands: Any
) -> tuple[Decision, Any]:
    decision = decide(call, site, rules)
    if decision.implementation == "xla":
        return decision, None
    run = call.op if site.is_split else functools.partial(call.op.kernel, sorts_apart=site.sorts_apart)
    with (
        not_redirected(),
        Scope(SCOPE_NAME, None),
        selecting("kernel" if call.selection == "kernel" else KERNEL_IF_ANY),
    ):
        [result] = lower_without_mesh(lambda *arrays: [program(run, *arrays)], ctx, operands)
    return decision, jax_versions.lower_with_sharding_in_types(ctx, result, ctx.avals_out[0])
