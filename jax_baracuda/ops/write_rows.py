"""Writes rows to slots of pools in place, like appends of keys and values to a paged cache.

Slots are known only at run time. If the pools are donated or carried by a loop, they are updated in their own memory,
and no byte outside the slots is touched. Numbers are scaled and converted on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import (
    DIFFERENTIABLE_DTYPES,
    DTYPES_OF_WHOLE_BYTES,
    accumulation_dtype,
    as_array,
    as_bits,
    check_one_for_each,
    divided,
    in_range,
    index_array,
    is_integer,
    of_bits,
    static_type_error,
)
from jax_baracuda._core.autodiff import vjp_of_linear
from jax_baracuda._core.functions import Params, placed
from jax_baracuda._core.guarantees import ROUNDED_ONCE
from jax_baracuda._core.op import NamedDimensions, Op
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.rules import SHORT_COPY, Rule, at_least, at_most, on_cpu, on_gpu, param
from jax_baracuda._core.selection import Implementation, not_redirected
from jax_baracuda._core.sharding import MeshAxes, ShardAxes, ShardKernel


@public_function()
def write_rows(
    dests: ArrayLike | Sequence[ArrayLike],
    rows: ArrayLike | Sequence[ArrayLike],
    slots: ArrayLike,
    *,
    axis: int = 0,
    layer: ArrayLike | None = None,
    scale: ArrayLike | Sequence[ArrayLike | None] | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """Writes rows to slots of one or several pools, which are updated in place if donated, like a paged KV cache.

    ``dests[slots[t]] = rows[t]`` for each t, as a function that returns the new `dests`. One launch writes pools of
    one kind, such as keys and values.

    Args:
      dests: a pool, or a list or tuple of pools, such as those of keys and values. A pool is
        ``[slots, ...]`` of any dtype; all pools have the same number of slots. Elements of less than a byte run as
        plain JAX.
      rows: one array for each pool, in the same structure: ``[T, ...]``, where ``...`` are the dimensions of the pool
        without those of slots and layers. Rows of another dtype are converted to that of the pool.
      slots: ``[T]``, integers. Rows with a negative slot are skipped, and so are those beyond the last slot. Of several
        rows with the same slot, the last one is written.
      axis: the axis of slots in a pool. 1 for pools with heads first, ``[heads, slots, ...]``. The rows are
        ``[T, heads, ...]`` all the same.
      layer: an integer, traced or not, if pools have a first dimension of layers: ``[layers, slots, ...]``. `axis` does
        not count this dimension. Only this layer is written. A layer out of range is skipped.
      scale: divides the rows in float32 before they are converted: one number, or ``[heads]``, the size of the second
        dimension of the rows. A constant for derivatives. If there are several pools, a list or tuple with the scale of
        each, which may be None.

    Returns:
      The updated pools, in the structure of `dests`.

    Raises:
      TypeError: an argument is not an array; `slots` or `layer` has no integer dtype; `axis` is not an integer; or
        complex rows are scaled or written to real pools.
      ValueError: shapes or structures do not fit. Nothing runs before these checks.

    In place: if pools are donated to ``jax.jit`` or carried by a loop, and not used afterwards, they are updated in
    their own memory, at a cost that depends only on the rows. Otherwise, and outside of ``jax.jit``, XLA copies them
    first and the originals stay unchanged.

    Numerical guarantees: rows with the dtype of the pool and no scale are exact copies of bits, NaN payloads included.
    Others are ``(rows.astype(float32) / scale).astype(dtype)``: each number is rounded to the nearest, ties to even.
    Numbers beyond the range become inf, or NaN in the float8 types without inf. In integer pools they become the
    nearest integer in range, and NaN becomes 0. Bit-equal from run to run.

    Gradient: each pool gets the cotangent with zeros in the slots that were written. Rows get the cotangent of their
    slot, divided by the scale, and zeros if they were not written. Integer arrays have none.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> keys, rows, slots = jnp.zeros((4, 2)), jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), jnp.array([2, -1, 0])
      >>> print(jb.write_rows(keys, rows, slots))
      [[5. 6.]
       [0. 0.]
       [1. 2.]
       [0. 0.]]
    """
    name = "write_rows"
    is_one = not isinstance(dests, list | tuple)
    all_dests, all_rows, all_scales = _as_lists(name, is_one, dests, rows, scale)
    labels = [""] if is_one else [f"[{i}]" for i in range(len(all_dests))]
    names = [PoolNames(f"dests{label}", f"rows{label}", f"scale{label}") for label in labels]
    results: list[Array] = []
    if names:
        results = _write(checked_write(name, names, all_dests, all_rows, slots, axis, layer, all_scales), axis)
    if is_one:
        return results[0]
    return results if isinstance(dests, list) else tuple(results)


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX.


class WriteOperands(NamedTuple):
    """The operands of the ops by kind. The gradient has no rows; ops that also do something else have `others`."""

    pools: Sequence[Array]
    rows: Sequence[Array]
    slots: Array
    layer: Array | None
    scales: Sequence[Array | None]
    others: Sequence[Array] = ()

    @staticmethod
    def of(operands: Sequence[Array], has_layer: bool, scales: Sequence[int], has_rows: bool = True) -> WriteOperands:
        num, rest = len(scales), iter(operands)
        pools = [next(rest) for _ in range(num)]
        rows = [next(rest) for _ in range(num if has_rows else 0)]
        slots, layer = next(rest), next(rest) if has_layer else None
        of_pools = [next(rest) if kind else None for kind in scales]
        return WriteOperands(pools, rows, slots, layer, of_pools, list(rest))

    def flat(self) -> list[Array]:
        optional = [self.layer, *self.scales]
        return [*self.pools, *self.rows, self.slots, *(x for x in optional if x is not None), *self.others]

    def params(self, axis: int) -> Params:
        """The params of a write."""
        return Params(
            ranks=tuple(x.ndim for x in self.rows),
            axis=int(axis),
            has_layer=self.layer is not None,
            scales=tuple(0 if x is None else PER_HEAD if x.ndim else ONE_SCALE for x in self.scales),
            has_unique_slots=False,
        )


MAX_COMPARED_ROWS = 32
"""For at most this many rows, comparing each with all later ones takes less time than a sort."""


def is_last_of_slot(slots: Array) -> Array:
    """Which rows are the last ones of their slot."""
    [count] = slots.shape
    if count == 1:
        return jnp.ones(slots.shape, bool)
    positions = jax.lax.iota(jnp.int32, count)
    if isinstance(count, int) and count <= MAX_COMPARED_ROWS:  # an exported program may have a symbolic count
        is_later = positions[:, None] < positions[None]
        return ~jnp.any(is_later & (slots[:, None] == slots[None]), axis=1)
    in_order, order = jax.lax.sort((slots, positions), num_keys=1, is_stable=True)
    is_last = jnp.concatenate([in_order[1:] != in_order[:-1], jnp.ones(1, bool)])
    return _set(jnp.zeros_like(is_last), (order,), is_last)


def _set(array: Array, index: tuple[Any, ...], values: Array) -> Array:
    """Writes to distinct indices. Those out of range are dropped."""
    with not_redirected():  # a redirected call may end here
        return array.at[index].set(values, mode="drop", unique_indices=True)


def _index(pool: Array, slots: Array, layer: Array | None, axis: int, are_unique: bool) -> tuple[Any, ...]:
    """The index of all rows in a pool, without duplicates: rows that are not written have indices out of range."""
    num_slots = pool.shape[axis if layer is None else axis + 1]
    is_written = in_range(slots, num_slots)
    if not are_unique:
        is_written &= is_last_of_slot(slots)
    if layer is not None:
        is_written &= in_range(layer, pool.shape[0])
    slots = jnp.where(is_written, slots, num_slots + jax.lax.iota(jnp.int32, slots.shape[0]))
    of_layer = () if layer is None else (jnp.maximum(layer, 0),)
    return (*of_layer, *[slice(None)] * axis, slots)


def _scaled(numbers: Array, scale: Array | None) -> Array:
    """``numbers / scale`` in float32."""
    if scale is None:
        return numbers
    scale = scale.reshape(-1, *[1] * (numbers.ndim - 2)) if scale.ndim else scale
    return divided(numbers.astype(jnp.float32), scale)


def _converted(numbers: Array, dtype: Any) -> Array:
    """Numbers in `dtype`: real numbers beyond the range of integers become the nearest integer in range."""
    if not jnp.issubdtype(dtype, jnp.integer) or numbers.dtype == dtype:
        return numbers.astype(dtype)
    limits = jnp.iinfo(dtype)
    if jnp.issubdtype(numbers.dtype, jnp.integer):
        own = jnp.iinfo(numbers.dtype)
        return jnp.clip(numbers, max(limits.min, own.min), min(limits.max, own.max)).astype(dtype)
    if jnp.issubdtype(numbers.dtype, jnp.floating):
        # 16-bit floats do not hold the limits. XLA itself converts to the nearest integer of types wider than 16 bits.
        numbers = jnp.round(numbers.astype(accumulation_dtype(numbers.dtype)))
        numbers = jnp.clip(numbers, limits.min, limits.max) if limits.bits <= 16 else numbers
    return numbers.astype(dtype)


def _with_rows(pool: Array, rows: Array, index: tuple[Any, ...], axis: int) -> Array:
    if not isinstance(index[0], Array):  # without a layer, JAX expects the rows on the axis of slots
        rows = jnp.moveaxis(rows, 0, axis)
    return of_bits(_set(as_bits(pool), index, as_bits(rows)), pool.dtype)


def reference_write(
    *operands: Array, axis: int, has_layer: bool, scales: Sequence[int], has_unique_slots: bool
) -> list[Array]:
    pools, rows, slots, layer, of_pools, _ = WriteOperands.of(operands, has_layer, scales)
    index = _index(pools[0], slots, layer, axis, has_unique_slots)
    return [
        _with_rows(pool, _converted(_scaled(x, scale), pool.dtype), index, axis)
        for pool, x, scale in zip(pools, rows, of_pools, strict=True)
    ]


def _reference_backward(
    *operands: Array,
    axis: int,
    has_layer: bool,
    scales: Sequence[int],
    has_unique_slots: bool,
    row_dtypes: Sequence[str],
) -> list[Array]:
    cotangents, _, slots, layer, of_pools, _ = WriteOperands.of(operands, has_layer, scales, has_rows=False)
    index = _index(cotangents[0], slots, layer, axis, has_unique_slots)
    rest, taken = [], []
    for cotangent, scale, dtype in zip(cotangents, of_pools, row_dtypes, strict=True):
        of_rows = of_bits(as_bits(cotangent).at[index].get(mode="fill", fill_value=0), cotangent.dtype)
        of_rows = of_rows if has_layer else jnp.moveaxis(of_rows, axis, 0)
        rest.append(_with_rows(cotangent, jnp.zeros_like(of_rows), index, axis))
        taken.append(_scaled(of_rows, scale).astype(dtype))
    return [*rest, *taken]


# ----------------------------------------------------------------------------------------------------------------------
# Ops. The first has a native kernel. XLA gathers and writes zeros for the second.

CONVERTIBLE_ROWS = frozenset({"float32", "float16", "bfloat16"})
"""The dtypes of rows that the kernel scales and converts."""
CONVERTIBLE_POOLS = CONVERTIBLE_ROWS | {"float8_e4m3fn", "float8_e5m2", "int8"}


def kernel_converts(of_rows: Any, of_pool: Any, has_scale: bool) -> bool:
    """Whether kernels write rows to a pool of these dtypes."""
    if of_rows == of_pool and not has_scale:
        return True
    return of_rows.name in CONVERTIBLE_ROWS and of_pool.name in CONVERTIBLE_POOLS


def pool_dimensions(name: str, ranks: Sequence[int], axis: int, has_layer: bool) -> NamedDimensions:
    """`ranks`: those of the pools, without layers."""
    layer = ("layer",) if has_layer else ()
    return {
        f"{name}_{i}": (*layer, *("slot" if d == axis else f"{i}.{d}" for d in range(rank)))
        for i, rank in enumerate(ranks)
    }


def row_dimensions(name: str, ranks: Sequence[int], axis: int) -> NamedDimensions:
    return {f"{name}_{i}": ("row", *(f"{i}.{d}" for d in range(rank) if d != axis)) for i, rank in enumerate(ranks)}


def other_dimensions(ranks: Sequence[int], axis: int, has_layer: bool, scales: Sequence[int]) -> NamedDimensions:
    rows = row_dimensions("scale", ranks, axis)
    of_scales = {
        name: dimensions[1:2] if kind == PER_HEAD else ()
        for (name, dimensions), kind in zip(rows.items(), scales, strict=True)
        if kind
    }
    return {"slots": ("row",)} | ({"layer": ()} if has_layer else {}) | of_scales


ONE_SCALE, PER_HEAD = 1, 2
"""The kinds of scales that the handler knows; 0: none."""

ATTRIBUTES_OF_WRITE = ("axis", "has_layer", "has_unique_slots", "scales")


def _plan_parameters(*operands: Any, has_layer: bool, scales: Sequence[int]) -> dict[str, int]:
    pools, rows, *_ = WriteOperands.of(operands, has_layer, scales)
    converts = any(scales) or any(x.dtype != pool.dtype for x, pool in zip(rows, pools, strict=True))
    return {"elements": sum(x.size for x in rows) * min(pools[0].size, 1), "converts": converts}


def _within_shard(index: Array, axes: MeshAxes, size: int) -> Array:
    """An index counted from the start of this device's part of a dimension, of `size` elements; -1 before that part."""
    if not axes:
        return index
    begin = jax.lax.axis_index(axes).astype(jnp.int32) * size
    return jnp.where(index >= begin, index - begin, -1)


def _local_operands(own: WriteOperands, axes: ShardAxes, axis: int) -> list[Array]:
    """The operands in the program of a shard, which writes what lies in its part of the slots and layers."""
    has_layer = own.layer is not None
    slots = _within_shard(own.slots, axes.get("slot", ()), own.pools[0].shape[axis + has_layer])
    if own.layer is not None:
        own = own._replace(layer=_within_shard(own.layer, axes.get("layer", ()), own.pools[0].shape[0]))
    return own._replace(slots=slots).flat()


def shard_write(
    kernel: ShardKernel, axes: ShardAxes, *operands: Array, axis: int, has_layer: bool, scales: Sequence[int]
) -> Sequence[Array]:
    return kernel(*_local_operands(WriteOperands.of(operands, has_layer, scales), axes, axis))


def _shard_backward(
    kernel: ShardKernel, axes: ShardAxes, *operands: Array, axis: int, has_layer: bool, scales: Sequence[int]
) -> Sequence[Array]:
    """Each device gathers what lies in its part, with zeros elsewhere; an all-reduce adds the parts."""
    own = WriteOperands.of(operands, has_layer, scales, has_rows=False)
    results = kernel(*_local_operands(own, axes, axis))
    names = (*axes.get("slot", ()), *axes.get("layer", ()))
    rest, taken = results[: len(scales)], results[len(scales) :]
    return [*rest, *(jax.lax.psum(x, names) if names else x for x in taken)]


def unique_first(op: Callable[[], Op]) -> dict[Rule, Callable[..., Sequence[Array]]]:
    """For many rows, the program that leaves out all but the last row of a slot, then calls the kernel of `op`."""

    def program(*operands: Array, has_layer: bool, scales: Sequence[int], **params: Any) -> Sequence[Array]:
        own = WriteOperands.of(operands, has_layer, scales)
        own = own._replace(slots=jnp.where(is_last_of_slot(own.slots), own.slots, -1))
        params |= {"has_layer": has_layer, "scales": scales, "has_unique_slots": True}
        return op().kernel(*own.flat(), **params)

    reason = "the kernel compares each row with all later ones"
    return {on_gpu(reason, param("has_unique_slots", False), at_least(row=1 << 17)): program}


def transpose_write(
    types: Sequence[Any],
    cotangents: Sequence[Array],
    *others: Array,
    has_layer: bool,
    scales: tuple[int, ...],
    ranks: tuple[int, ...],
    **params: Any,
) -> list[Array | None]:
    """The cotangents of all pools, then of all rows. None for integer pools and their rows."""
    own = WriteOperands.of([*cotangents, *others], has_layer, scales, has_rows=False)
    chosen = [i for i, cotangent in enumerate(cotangents) if jnp.issubdtype(cotangent.dtype, jnp.inexact)]
    if not chosen:
        return [None] * (2 * len(cotangents))

    def of_chosen(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[i] for i in chosen)

    gradients = WRITE_ROWS_BACKWARD(
        *own._replace(pools=of_chosen(own.pools), scales=of_chosen(own.scales)).flat(),
        has_layer=has_layer,
        scales=of_chosen(scales),
        ranks=of_chosen(ranks),
        row_dtypes=of_chosen([x.dtype.name for x in types[len(ranks) :]]),
        **params,
    )
    return placed(gradients, [*chosen, *(len(ranks) + i for i in chosen)], 2 * len(ranks))


_FIELDS: dict[str, Any] = {
    # Scaled numbers are rounded twice: in float32 and to the dtype of the pool.
    "guarantee": ROUNDED_ONCE,
    "replicated_dims": ("row",),
    "in_place": lambda *, ranks: {i: i for i in range(len(ranks))},
}

# Two cores, appends of 8 × 128 numbers, time of plain JAX / kernel: in loops 0.4 to 0.8 with 1 to 8 rows, 0.6 to 0.9
# with 16 and 32, which take 1.4 to 1.8 in calls of their own. XLA copies pools of 8 bits in every step: up to 10 KB
# 0.07 to 1.0, once 1.4 (12 loops).
WRITE_ROWS = define_op(
    name="write_rows",
    operands=lambda *, ranks, axis, has_layer, scales: {
        **pool_dimensions("dest", ranks, axis, has_layer),
        **row_dimensions("rows", ranks, axis),
        **other_dimensions(ranks, axis, has_layer, scales),
    },
    results=lambda *, ranks, axis, has_layer: pool_dimensions("result", ranks, axis, has_layer),
    result_dtypes=lambda *operands, ranks: [x.dtype for x in operands[: len(ranks)]],
    reference=reference_write,
    dtypes=DTYPES_OF_WHOLE_BYTES,
    attributes=ATTRIBUTES_OF_WRITE,
    plan_parameters=_plan_parameters,
    alternatives=unique_first(lambda: WRITE_ROWS),
    xla_rules=(
        on_cpu(
            "XLA's update of a few rows takes less time than the call of a kernel",
            at_most(rows=8),
            at_least(element_bits=16),
        ),
        SHORT_COPY,
    ),
    shard_program=shard_write,
    transposes=lambda *, ranks, axis, has_layer: {
        (*pool_dimensions("dest", ranks, axis, has_layer), *row_dimensions("rows", ranks, axis)): transpose_write
    },
    **_FIELDS,
)

WRITE_ROWS_BACKWARD = define_op(
    name="write_rows_backward",
    operands=lambda *, ranks, axis, has_layer, scales: {
        **pool_dimensions("d_output", ranks, axis, has_layer),
        **other_dimensions(ranks, axis, has_layer, scales),
    },
    results=lambda *, ranks, axis, has_layer: {
        **pool_dimensions("d_dest", ranks, axis, has_layer),
        **row_dimensions("d_rows", ranks, axis),
    },
    result_dtypes=lambda *operands, row_dtypes: [
        *(x.dtype for x in operands[: len(row_dtypes)]),
        *map(np.dtype, map(jnp.dtype, row_dtypes)),
    ],
    reference=_reference_backward,
    program=_reference_backward,
    dtypes=DIFFERENTIABLE_DTYPES,
    shard_program=_shard_backward,
    transposes=lambda *, ranks, axis, has_layer: {
        tuple(
            pool_dimensions("d_output", ranks, axis, has_layer)
        ): lambda _, cotangents, *others, row_dtypes, **params: WRITE_ROWS(*cotangents, *others, **params)
    },
    **_FIELDS,
)


_write_op = vjp_of_linear("write_rows", WRITE_ROWS)


# ----------------------------------------------------------------------------------------------------------------------
# Canonicalisation of arguments.


class PoolNames(NamedTuple):
    """The names of the arguments that belong to a pool, for messages."""

    dest: str
    rows: str
    scale: str


def _write(own: WriteOperands, axis: int) -> list[Array]:
    """Converts rows in plain JAX where the kernel does not."""
    rows, scales = [], []
    for pool, x, scale in zip(own.pools, own.rows, own.scales, strict=True):
        converts = kernel_converts(x.dtype, pool.dtype, scale is not None)
        rows.append(x if converts else _converted(_scaled(x, scale), pool.dtype))
        scales.append(scale if converts else None)
    if own.slots.shape[0] == 0:
        return list(own.pools)
    own = own._replace(rows=rows, scales=scales)
    return _write_op(own.params(axis), *own.flat())


def _as_lists(name: str, is_one: bool, dests: Any, rows: Any, scale: Any) -> Sequence[Sequence[Any]]:
    """The pools, their rows and their scales. `is_one`: whether there is one pool, which is no list."""
    if not is_one:
        scale = [None] * len(dests) if scale is None else scale
        check_one_for_each(name, "rows", rows, dests)
        check_one_for_each(name, "scale", scale, dests)
        return dests, rows, scale
    for argument, value in (("rows", rows), ("scale", scale)):
        if isinstance(value, list | tuple):
            raise TypeError(
                f"{name}: {argument} must be an array if dests is one, got {type(value).__name__}; for several pools, "
                "dests is a list or tuple, too"
            )
    return [dests], [rows], [scale]


def checked_write(
    name: str,
    names: Sequence[PoolNames],
    dests: Sequence[Any],
    rows: Sequence[Any],
    slots: Any,
    axis: Any,
    layer: Any,
    scales: Sequence[Any],
) -> WriteOperands:
    """The checked arguments of a write."""
    dests = [as_array(name, own.dest, dest) for own, dest in zip(names, dests, strict=True)]
    rows = [as_array(name, own.rows, x) for own, x in zip(names, rows, strict=True)]
    slots = index_array(name, "slots", slots)
    if slots.ndim != 1:
        advice = "; slots[None] and rows[None] write one row" if slots.ndim == 0 else ""
        raise ValueError(f"{name}: slots must have shape [T], one for each row, got {slots.shape}{advice}")
    if not is_integer(axis):
        raise static_type_error(name, "axis", "an integer", axis)
    if layer is not None:
        layer = index_array(name, "layer", layer)
        if layer.ndim != 0:
            raise TypeError(f"{name}: layer must be a scalar, got shape {layer.shape}")
    first = int(layer is not None)
    checked_scales = []
    for own, dest, x, scale in zip(names, dests, rows, scales, strict=True):
        rank = dest.ndim - first
        if rank < 1:
            letters = "[layers, slots, ...] with layer" if first else "[slots, ...]"
            raise ValueError(f"{name}: {own.dest} must have shape {letters}, got {dest.shape}")
        if not 0 <= axis < rank:
            raise ValueError(
                f"{name}: axis must be 0 or more, and less than {rank}, the dimensions of {own.dest} of shape "
                f"{dest.shape}{' without layers' if first else ''}, got {axis}"
            )
        leading, num_slots = dest.shape[:first], dest.shape[first + axis]
        expected = (slots.shape[0], *dest.shape[first : first + axis], *dest.shape[first + axis + 1 :])
        if (leading, num_slots) != (dests[0].shape[:first], dests[0].shape[first + axis]):
            raise ValueError(
                f"{name}: {own.dest} must have the layers and slots of {names[0].dest}, of shape {dests[0].shape}, "
                f"got shape {dest.shape}"
            )
        if x.shape != expected:
            raise ValueError(
                f"{name}: {own.rows} must have shape {expected} for {slots.shape[0]} slots and {own.dest} of shape "
                f"{dest.shape}, got {x.shape}{_advice_on_rows(own, dest, x, slots.shape[0], axis, first)}"
            )
        if jax_versions.is_static_shape((num_slots, *slots.shape)) and num_slots + slots.shape[0] >= 2**31:
            raise ValueError(f"{name}: {own.dest} must have less than 2^31 slots and rows, got {num_slots} slots")
        checked_scales.append(_checked_scale(name, own, dest, x, scale))
    return WriteOperands(dests, rows, slots, layer, checked_scales)


def _advice_on_rows(own: PoolNames, dest: Array, rows: Array, num_rows: int, axis: int, first: int) -> str:
    """What the caller may have meant, if the rows fit the pool with another `layer` or `axis`."""

    def fits(axis: int, first: int) -> bool:
        shape = dest.shape[first:]
        return len(shape) > axis and rows.shape == (num_rows, *shape[:axis], *shape[axis + 1 :])

    if not first and fits(axis, 1):
        return f"; if {own.dest} has layers first, pass layer="
    if first and fits(axis, 0):
        return f"; if {own.dest} has no layers, leave out layer="
    if axis == 0 and fits(1, first):
        return f"; if {own.dest} has heads before slots, pass axis=1"
    if axis == 1 and fits(0, first):
        return f"; if {own.dest} has slots before heads, leave out axis="
    return ""


def _checked_scale(name: str, own: PoolNames, dest: Array, rows: Array, scale: Any) -> Array | None:
    is_complex = jnp.issubdtype(rows.dtype, jnp.complexfloating)
    if is_complex and (scale is not None or not jnp.issubdtype(dest.dtype, jnp.complexfloating)):
        raise TypeError(f"{name}: {own.rows} must be real to be scaled or written to {dest.dtype}, got {rows.dtype}")
    if scale is None:
        return None
    scale = as_array(name, own.scale, scale)
    if not (jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)):
        raise TypeError(f"{name}: {own.scale} must have a real dtype, got {scale.dtype}")
    if scale.shape not in ((), rows.shape[1:2]):
        raise ValueError(
            f"{name}: {own.scale} must be a scalar or have shape {rows.shape[1:2]}, the second dimension of "
            f"{own.rows} of shape {rows.shape}, got shape {scale.shape}"
        )
    return jax.lax.stop_gradient(scale.astype(jnp.float32))
