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
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.dataflow import is_carried, may_be_computed
from jax_baracuda._core.dispatch import Decision, decide
from jax_baracuda._core.known_values import is_ascending, splat_of
from jax_baracuda._core.lowering import MIN_UNFUSED_BYTES, adds_slowly, lower_without_mesh, site_of
from jax_baracuda._core.native import KERNEL_PLATFORMS
from jax_baracuda._core.op import Op
from jax_baracuda._core.rules import KB, Rule, Site, at_least, mostly_empty_segments, on_cpu, on_gpu
from jax_baracuda._core.selection import (
    KERNEL_IF_ANY,
    SCOPE_NAME,
    Scope,
    Selection,
    current_selection,
    not_redirected,
    selecting,
)
from jax_baracuda.ops.segment.cells import are_added_one_by_one
from jax_baracuda.ops.segment.comparisons import identity_of
from jax_baracuda.ops.segment.extremum import SEGMENT_EXTREMUM
from jax_baracuda.ops.segment.ids import clamped_ids, signed_ids
from jax_baracuda.ops.segment.product import SEGMENT_PROD
from jax_baracuda.ops.segment.sum_ops import SEGMENT_SUM
from jax_baracuda.ops.write_rows import WRITE_ROWS
from jax_baracuda.ops.write_slice import WRITE_SLICE, Window


class Unserved(Exception):
    """Why a call is left to JAX."""


def require(is_served: bool, reason: str) -> None:
    if not is_served:
        raise Unserved(reason)


_Types = tuple[tuple[tuple[int, ...], Any], ...]
"""The shapes and dtypes of operands."""
_Run = Callable[..., Sequence[Array]]
"""Runs an op: its kernel, or the op split over devices."""


class _Service(NamedTuple):
    """The call of an op that may serve calls of a primitive, all of them with operands of the same types."""

    call: OpCall
    order: Sequence[int]
    """For each operand of the op's call, the operand of the primitive that it is made of."""
    compute: Callable[..., Array]
    """``(run, *operands of the primitive)`` -> the result."""
    rules: tuple[Rule, ...] = ()
    """Where plain JAX is faster, besides the rules of the op."""


def _cached(service_of: Callable[..., _Service]) -> Callable[..., _Service]:
    """Caches what serves a call, or why nothing does: programs repeat their calls."""

    @jax_versions.cached
    def service_or_reason(*args: Any) -> _Service | str:
        try:
            return service_of(*args)
        except Unserved as reason:
            return str(reason)

    @functools.wraps(service_of)
    def of_cache(*args: Any) -> _Service:
        service = service_or_reason(*args)
        if isinstance(service, str):
            raise Unserved(service)
        return service

    return of_cache


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


def _rows_of(types: _Types, numbers: Any) -> _Rows:
    """The rows that a scatter moves, from the types of its operands and its dimension numbers."""
    (shape, _), (of_ids, _), (of_updates, _) = types
    indexed = tuple(numbers.scatter_dims_to_operand_dims)
    require(jax_versions.is_static_shape((*shape, *of_ids, *of_updates)), "its sizes are symbolic")
    of_operand = tuple(numbers.operand_batching_dims)
    of_indices = tuple(numbers.scatter_indices_batching_dims)
    windows = [d for d in range(len(shape)) if d not in numbers.inserted_window_dims and d not in of_operand]
    in_updates = dict(zip(windows, numbers.update_window_dims, strict=True))
    require(bool(indexed), "it has no index")
    require(
        set(indexed) == set(numbers.inserted_window_dims)
        and all(of_updates[in_updates[d]] == shape[d] for d in windows),
        "its indices are slices, or name parts of rows",
    )
    first = min(indexed)
    require(indexed == tuple(range(first, first + len(indexed))), "its indexed axes are not neighbours in order")
    require(of_indices == tuple(range(len(of_indices))), "its batch is not the leading axes")
    require(of_operand in ((), tuple(range(first))), "its batch is not the leading axes")
    scattered = [d for d in range(len(of_updates)) if d not in numbers.update_window_dims]
    ids_axes, batch_axes = scattered[len(of_operand) :], scattered[: len(of_operand)]
    batch_axes = batch_axes or [in_updates[d] for d in range(first)]
    rows_axes = [in_updates[d] for d in range(first + len(indexed), len(shape))]
    sizes = tuple(shape[d] for d in indexed)
    require(len(sizes) == 1 or math.prod(sizes) < 2**31, "its indexed axes have 2^31 elements or more")
    require([*batch_axes, *ids_axes, *rows_axes] == list(range(len(of_updates))), "its rows would be transposed")
    return _Rows(
        batch=math.prod(shape[:first]) if first else None,
        shares_ids=not of_operand,
        indexed=sizes,
        num_rows=math.prod(of_updates[d] for d in ids_axes),
        has_flat_ids=len(ids_axes) == 1,
        row_shape=tuple(of_updates[d] for d in rows_axes),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Scatters.

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
    negates: bool = False
    """Whether negated updates are reduced."""


def _extremum(minimum: bool) -> _Reduction:
    params = {"first_wins": False, "minimum": minimum, "has_winner": False}
    identity = functools.partial(identity_of, minimum=minimum)
    return _Reduction(SEGMENT_EXTREMUM, params, identity, jnp.minimum if minimum else jnp.maximum, widens=False)


def _added(x: Array, totals: Array) -> Array:
    """The sums. Rows without updates stay as they are: ``-0 + 0`` would be 0."""
    return jnp.where(totals == 0, x, x + totals)


ADDITION, SUBTRACTION, WRITE = "scatter-add", "scatter-sub", "scatter"
_SUM = _Reduction(SEGMENT_SUM, {"deterministic": False}, lambda _: 0, _added, widens=True)
_REDUCTIONS = {
    ADDITION: _SUM,
    SUBTRACTION: _SUM._replace(negates=True),
    "scatter-mul": _Reduction(SEGMENT_PROD, {"has_residual": False}, lambda _: 1, jnp.multiply, widens=True),
    "scatter-max": _extremum(minimum=False),
    "scatter-min": _extremum(minimum=True),
}
SCATTERS = [
    jax.lax.scatter_p,
    jax.lax.scatter_add_p,
    jax.lax.scatter_sub_p,
    jax.lax.scatter_mul_p,
    jax.lax.scatter_max_p,
    jax.lax.scatter_min_p,
]


def scatter(primitive: str, ctx: Any, *operands: Any, dimension_numbers: Any, **params: Any) -> tuple[Decision, Any]:
    """Decides what serves a scatter, and lowers it unless JAX's own rule has to.

    Returns:
      The decision, and the value of the result. None: plain JAX was picked, and JAX's rule lowers the scatter.

    Raises:
      Unserved: no op does what the scatter does, and JAX's rule lowers it.
    """
    platform, is_write = _platform_of(ctx), primitive == WRITE
    require(not is_write or params["update_jaxpr"] is None, "a function is applied to rows")
    clips = params["mode"] == jax.lax.GatherScatterMode.CLIP
    selection = current_selection() or (KERNEL_IF_ANY if _rounds_each_term(ctx, platform) else None)
    of_call = (_types_of(ctx), dimension_numbers, clips, selection)
    if is_write:
        service = _service_of_write(*of_call)
    else:
        operand, indices, _ = operands
        replaces = _is_identity(primitive, ctx, operand)
        is_promised_sorted = params["indices_are_sorted"]
        is_sorted = is_promised_sorted, not is_promised_sorted and is_ascending(ctx, indices)
        service = _service_of_reduction(primitive, *of_call, replaces, *is_sorted)
    site = _site(service, platform, ctx, operands)
    decision, result = _lowered(service, site, ctx, operands)
    # With devices that split the program, one may have a part of any axis.
    if result is None and primitive in (ADDITION, SUBTRACTION) and platform == "cuda" and not site.is_split:
        result = _add_on_gpu(primitive, ctx, operands, dimension_numbers, params)
    return decision, result


def _is_identity(primitive: str, ctx: Any, operand: Any) -> bool:
    """Whether the rows that a reduction updates have no effect on its result."""
    splat = splat_of(ctx, operand)
    is_identity = splat is not None and splat == _REDUCTIONS[primitive].identity(ctx.avals_in[0].dtype)
    return is_identity and not (splat == 0 and np.signbit(splat))


@_cached
def _service_of_reduction(
    primitive: str,
    types: _Types,
    numbers: Any,
    clips: bool,
    selection: Selection,
    replaces: bool,
    is_promised_sorted: bool,
    ascends: bool,
) -> _Service:
    """What may serve a scatter that reduces rows. `ascends`: whether the indices are known to ascend."""
    rows, dtype = _rows_of(types, numbers), types[0][1]
    reduction = _REDUCTIONS[primitive]
    is_narrow = reduction.widens and dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.integer)
    promises = is_promised_sorted and rows.has_flat_ids and rows.shares_ids
    is_sorted = len(rows.indexed) == 1 and (promises or ascends)
    params = {**reduction.params, "num_segments": rows.num_segments, "indices_are_sorted": is_sorted}
    params |= {} if rows.batch is None else {"num_batch_dims": 1}
    types_of_op = (
        jax.ShapeDtypeStruct((*rows.leading, rows.num_rows, *rows.row_shape), jnp.int32 if is_narrow else dtype),
        jax.ShapeDtypeStruct((*rows.leading_of_ids, rows.num_rows), np.int32),
    )

    def compute(run: _Run, operand: Array, indices: Array, updates: Array) -> Array:
        data = jax.lax.reshape(updates, types_of_op[0].shape)
        data = data.astype(types_of_op[0].dtype) if is_narrow else data
        data = -data if reduction.negates else data
        [reduced] = run(data, rows.ids(indices, clips), **params)
        reduced = jax.lax.reshape(reduced.astype(dtype) if is_narrow else reduced, operand.shape)
        return reduced if replaces else reduction.join(operand, reduced)

    call = _call(reduction.op, types_of_op, params, selection)
    return _Service(call, (2, 1), compute, () if replaces else _RULES_OF_JOIN)


def _add_on_gpu(primitive: str, ctx: Any, operands: Sequence[Any], numbers: Any, params: dict[str, Any]) -> Any:
    """JAX's scatter of flat rows, or with a barrier between a negation and the scatter; None if neither helps."""
    rows, dtype = _rows_of(_types_of(ctx), numbers), ctx.avals_in[2].dtype
    is_flat = rows.batch is None and are_added_one_by_one(rows.row_shape, dtype)
    subtracts = primitive == SUBTRACTION
    # XLA adds unique rows without atomic operations, and 16 bits by compare-and-swap, negated or not.
    may_be_slow = not params["unique_indices"] and dtype.itemsize >= 4
    has_barrier = may_be_slow and adds_slowly(ctx, operands[2], dtype, subtracts)
    if not (is_flat or has_barrier):
        return None
    num_features = math.prod(rows.row_shape)

    def add(operand: Array, indices: Array, updates: Array) -> list[Array]:
        shape, of_numbers = operand.shape, numbers
        updates = -updates if subtracts else updates
        updates = jax.lax.optimization_barrier(updates) if has_barrier else updates
        if is_flat:
            of_ids = updates.shape[: updates.ndim - len(rows.row_shape)]
            operand, updates = operand.reshape(*rows.indexed, num_features), updates.reshape(*of_ids, num_features)
            of_numbers = numbers._replace(update_window_dims=(len(of_ids),))
        flags = {name: params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
        return [jax.lax.scatter_add(operand, indices, updates, of_numbers, **flags).reshape(shape)]

    return _lowered_by(add, ctx, operands)


@_cached
def _service_of_write(types: _Types, numbers: Any, clips: bool, selection: Selection) -> _Service:
    rows, dtype = _rows_of(types, numbers), types[0][1]
    require(rows.batch is None, "vmap maps it over several arrays")
    require(rows.num_segments + rows.num_rows < 2**31, "there are 2^31 rows or more")
    params = {"ranks": (1 + len(rows.row_shape),), "axis": 0, "has_layer": False, "scales": (0,)}
    params["has_unique_slots"] = False
    types_of_op = (
        jax.ShapeDtypeStruct((rows.num_segments, *rows.row_shape), dtype),
        jax.ShapeDtypeStruct((rows.num_rows, *rows.row_shape), dtype),
        jax.ShapeDtypeStruct((rows.num_rows,), np.int32),
    )

    def compute(run: _Run, operand: Array, indices: Array, updates: Array) -> Array:
        slots = jnp.clip(rows.ids(indices, clips), -1, rows.num_segments).astype(jnp.int32)
        pool, own = (jax.lax.reshape(x, of.shape) for x, of in zip((operand, updates), types_of_op, strict=False))
        return jax.lax.reshape(run(pool, own, slots, **params)[0], operand.shape)

    return _Service(_call(WRITE_ROWS, types_of_op, params, selection), (0, 2, 1), compute, _RULES_OF_WRITE)


# ----------------------------------------------------------------------------------------------------------------------
# Slice updates.

# Two cores, loops that carry an array of 256 KB to 32 MB, time of plain JAX without / with a barrier: 0.9 to 1.05 where
# the loop reads the window, or the whole array for matrix products, and 20 to 55 where it reads the sum of the window,
# since XLA then copies the array in each step. Before jax 0.11, a barrier changes nothing; without / with a kernel: 0.3
# to 1.0 for the window, 10 to 65 for its sum, 1.0 to 11 for the whole array.
_MIN_CARRIED_BYTES = 64 * KB
_MIN_WINDOWS = 8
"""An array of at least so many windows takes much longer to copy than a window."""


def slice_update(ctx: Any, *operands: Any) -> tuple[Decision, Any]:
    """Decides what serves an update of a slice, and lowers it unless JAX's own rule has to, like :func:`scatter`."""
    platform = _platform_of(ctx)
    may_copy = current_selection() is None and platform == "cpu" and _may_copy(ctx, operands[0])
    needs_kernel = may_copy and not jax_versions.keeps_barriers()
    service = _service_of_slice(_types_of(ctx), KERNEL_IF_ANY if needs_kernel else current_selection())
    # `misreads` is about a read before the update of `write_slice`, which JAX's own update does not have.
    site = dataclasses.replace(_site(service, platform, ctx, operands), misreads=False)
    decision, result = _lowered(service, site, ctx, operands)
    if may_copy and result is None:
        reason = "a loop carries the array: a barrier keeps XLA from copying it in each step"
        return Decision("xla", reason), _lowered_with_barrier(ctx, operands)
    if may_copy:
        return Decision("kernel", "a loop carries the array, which XLA might copy in each step"), result
    return decision, result


def _lowered_with_barrier(ctx: Any, operands: Sequence[Any]) -> Any:
    """JAX's update, which XLA does not fuse with what reads the window."""

    def update(*operands: Array) -> list[Array]:
        return [jax.lax.optimization_barrier(jax.lax.dynamic_update_slice_p.bind(*operands))]

    return _lowered_by(update, ctx, operands)


@_cached
def _service_of_slice(types: _Types, selection: Selection) -> _Service:
    (shape, _), (part, _), *starts = types
    require(all(of_start.itemsize >= 4 for _, of_start in starts), "its starts have fewer than 32 bits")
    require(jax_versions.is_static_shape((*shape, *part)), "its sizes are symbolic")
    require(0 not in part and part != shape, "it writes the whole array or nothing")
    axes = [axis for axis, size in enumerate(shape) if part[axis] != size]
    windows = tuple(Window(0, axis, i, part[axis], num_shards=1) for i, axis in enumerate(axes))
    params = {"ranks": (len(shape),), "windows": windows, "drop": False}
    order = (0, 1, *(2 + axis for axis in axes))

    def compute(run: _Run, operand: Array, update: Array, *starts: Array) -> Array:
        # The kernel counts negative starts from the end. JAX has done so already.
        return run(operand, update, *(jnp.maximum(starts[axis], 0) for axis in axes), **params)[0]

    types_of_op = [jax.ShapeDtypeStruct(*types[i]) for i in order]
    return _Service(_call(WRITE_SLICE, types_of_op, params, selection), order, compute)


def _may_copy(ctx: Any, operand: Any) -> bool:
    """Whether XLA's CPU back end might copy a large array of which an update writes a small part: in loops."""
    if not all(jax_versions.is_static_shape(x.shape) for x in ctx.avals_in[:2]):
        return False
    array, window = [math.prod(x.shape) * x.dtype.itemsize for x in ctx.avals_in[:2]]
    is_small_part = MIN_UNFUSED_BYTES <= window <= array // _MIN_WINDOWS
    return array >= _MIN_CARRIED_BYTES and is_small_part and is_carried(operand)


# ----------------------------------------------------------------------------------------------------------------------
# The decision.


def _platform_of(ctx: Any) -> str:
    platforms = jax_versions.platforms_of(ctx)
    require(len(platforms) == 1 and platforms[0] in KERNEL_PLATFORMS, "there are kernels for CPUs and CUDA only")
    return str(platforms[0])


def _types_of(ctx: Any) -> _Types:
    return tuple([(x.shape, x.dtype) for x in ctx.avals_in])


def _rounds_each_term(ctx: Any, platform: str) -> bool:
    """Whether plain JAX rounds each intermediate result, as XLA does where it emulates atomic operations of 16 bits."""
    dtype = ctx.avals_in[0].dtype
    return platform == "cuda" and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _call(op: Op, types: Sequence[Any], params: dict[str, Any], selection: Selection) -> OpCall:
    call = OpCall(op, types, {**params, "implementation": selection})
    if (problem := call.problem()) is not None:
        raise Unserved(problem)
    return call


def _site(service: _Service, platform: str, ctx: Any, operands: Sequence[Any]) -> Site:
    """Where a call stands."""
    of_call = [operands[i] for i in service.order]
    site = site_of(service.call, platform, ctx, of_call)
    if platform == "cuda" and may_be_computed(of_call[0]):
        site = dataclasses.replace(site, fuses=True)
    module = ctx.module_context
    if site.is_split and (module.lowering_parameters.for_export or not jax_versions.knows_devices(module.axis_context)):
        raise Unserved("the program is split over devices that are not known yet")
    return site


_decision = jax_versions.cached(decide)


def _lowered(service: _Service, site: Site, ctx: Any, operands: Sequence[Any]) -> tuple[Decision, Any]:
    call = service.call
    decision = _decision(call, site, service.rules)
    if decision.implementation == "xla":
        return decision, None
    run = call.op if site.is_split else functools.partial(call.op.kernel, shares_sort=site.shares_sort)
    with selecting(call.kernel_selection):
        return decision, _lowered_by(lambda *arrays: [service.compute(run, *arrays)], ctx, operands)


def _lowered_by(function: Callable[..., Sequence[Array]], ctx: Any, operands: Sequence[Any]) -> Any:
    """The only result of a function of the operands, in which nothing is redirected."""
    with not_redirected(), Scope(SCOPE_NAME, None):
        [result] = lower_without_mesh(function, ctx, operands)
    return jax_versions.lower_with_sharding_in_types(ctx, result, ctx.avals_out[0])
