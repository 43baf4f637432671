"""Writes a window of an array in place, at a position known only at run time, like an append to a KV cache.

If the array is donated or carried by a loop, it is updated in its own memory, and no byte outside the window is
touched. The gradient extracts the window from the cotangent and leaves zeros there, also in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import (
    DIFFERENTIABLE_DTYPES,
    DTYPES_OF_WHOLE_BYTES,
    as_array,
    as_bits,
    check_choice,
    check_one_for_each,
    check_same_dtype,
    element_bits,
    in_range,
    is_integer,
    of_bits,
)
from jax_baracuda._core.autodiff import vjp_of_linear
from jax_baracuda._core.functions import Params, placed
from jax_baracuda._core.guarantees import EXACT
from jax_baracuda._core.op import NamedDimensions
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.rules import SHORT_COPY, at_least, launch_bound, on_cpu, on_gpu
from jax_baracuda._core.selection import Implementation
from jax_baracuda._core.sharding import MeshAxes, ShardAxes, ShardKernel

WriteMode = Literal["clip", "drop"]
StartIndex = ArrayLike | tuple[int, int]
"""The window's start along one axis, or its ``(start, end)``."""
StartIndices = Sequence[StartIndex] | Array | np.ndarray


@public_function()
def write_slice(
    dest: ArrayLike,
    source: ArrayLike,
    start_indices: StartIndices,
    *,
    mode: WriteMode = "clip",
    implementation: Implementation | None = None,
) -> Array:
    """Writes an array into a window of another, which is updated in place if donated, like an append to a KV cache.

    ``dest[start_0:end_0, start_1:end_1, ...] = source`` as a function that returns the new `dest`.

    Args:
      dest: an array of any dtype. More than 8 axes run as plain JAX.
      source: an array with the rank and dtype of `dest`. No axis is longer than in `dest`.
      start_indices: one entry for each axis d of `dest`:

        * a pair ``(start, end)`` of Python integers with ``0 <= start <= end <= dest.shape[d]`` and
          ``end - start == source.shape[d]``, or
        * a start alone, a Python integer or a scalar array of any integer dtype, traced or not; the end is then
          ``start + source.shape[d]``, and `mode` says what happens if the window reaches beyond the array.

        A one-dimensional array of starts is also accepted.
      mode: "clip" moves the window inside, as ``jax.lax.dynamic_update_slice`` does: a negative start counts from the
        end of the axis, and then the window is moved to the nearest place where all of it is inside. "drop" does not
        move the window (a negative start lies before the array) and writes only the part that lies inside, so a full
        cache is never overwritten.

    Returns:
      The updated array, with the shape and dtype of `dest`.

    Raises:
      TypeError: an argument is not an array, dtypes differ, or a start is not an integer scalar.
      ValueError: shapes do not fit, a pair is out of range, or the mode is unknown. Nothing runs before these checks.

    In place: if ``dest`` is donated to ``jax.jit`` or carried by a loop, and not used afterwards, it is updated in its
    own memory, at a cost that depends only on the window. Otherwise, and outside of ``jax.jit``, XLA copies it first
    and the original stays unchanged. Under ``jax.vmap``, one launch writes the windows of a whole batch, each at its
    own position.

    Numerical guarantees: exact copies of bits, NaN payloads included. Bit-equal from run to run.

    Gradient: ``dest`` gets the cotangent with zeros in the window. ``source`` gets the window of the cotangent, with
    zeros for elements that were dropped. Integer arrays have none. Only the starts are kept for the backward pass.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> cache, row, position = jnp.zeros((4, 2)), jnp.ones((1, 2)), jnp.int32(2)
      >>> print(jb.write_slice(cache, row, (position, 0)))
      [[0. 0.]
       [0. 0.]
       [1. 1.]
       [0. 0.]]
    """
    name = "write_slice"
    update = _canonicalize(name, "dest", "source", dest, source, "start_indices", start_indices, mode)
    [result] = _write([update], mode)
    return result


@public_function(write_slice)
def write_slices(
    dests: Sequence[ArrayLike],
    sources: Sequence[ArrayLike],
    start_indices: StartIndices | None = None,
    *,
    start_indices_of_each: Sequence[StartIndices] | None = None,
    mode: WriteMode = "clip",
    implementation: Implementation | None = None,
) -> list[Array]:
    """:func:`write_slice` for several arrays in one launch, as for the keys and the values of a KV cache.

    ``dests[i][start_0:end_0, ...] = sources[i]`` for all i.

    Args:
      dests: a list or tuple of arrays; shapes and dtypes may differ. An array that occurs twice is updated in two
        copies.
      sources: as many arrays, each with the rank and dtype of its `dest`. No axis is longer than in its `dest`.
      start_indices: as in :func:`write_slice`, shared by all arrays.
      start_indices_of_each: replaces `start_indices` by a list with separate start indices for each array.

    Returns:
      The list of the updated arrays.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> caches = [jnp.zeros((4, 1)), jnp.zeros((4, 2))]
      >>> rows = [jnp.ones((1, 1)), jnp.full((1, 2), 2.0)]
      >>> keys, values = jb.write_slices(caches, rows, (jnp.int32(2), 0))
      >>> print(keys.tolist(), values.tolist())
      [[0.0], [0.0], [1.0], [0.0]] [[0.0, 0.0], [0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
    """
    name = "write_slices"
    if not isinstance(dests, list | tuple):
        raise TypeError(f"{name}: dests must be a list or tuple of arrays, got {type(dests).__name__}")
    check_one_for_each(name, "sources", sources, dests)
    start_indices = _start_indices_of_each(name, dests, start_indices, start_indices_of_each)
    updates = [
        _canonicalize(name, f"dests[{i}]", f"sources[{i}]", dest, source, what, starts, mode)
        for i, (dest, source, (what, starts)) in enumerate(zip(dests, sources, start_indices, strict=True))
    ]
    return _write(updates, mode)


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX.


class Window(NamedTuple):
    """The window along one axis. An axis that is written as a whole has none."""

    array: int
    """The index of the array."""
    axis: int
    start_operand: int
    """The index of the start operand."""
    size: int
    num_shards: int
    """In the program of one device: the number of devices over which the axis is split."""


class Placement(NamedTuple):
    """The position of a window along an axis, after it has been moved inside."""

    start: Array
    """As in JAX's slices: negative starts count from the end, then the start is clamped."""
    moved: Array | int
    """The number of elements by which the window was moved."""
    cut: Array | int = 0
    """For a window longer than the array: the number of elements to cut off its beginning, which lie outside."""


def _index_dtype() -> Any:
    return jax.dtypes.canonicalize_dtype(jnp.int64)


def _placement(start: Array, window: Window, part: Array | None, dim: int, drop: bool) -> Placement:
    """The placement within an array or, if its axis is split over devices, within one part, of `dim` elements."""
    info, bounds = jnp.iinfo(start.dtype), jnp.iinfo(_index_dtype())
    index = jnp.clip(start, max(info.min, bounds.min), min(info.max, bounds.max)).astype(_index_dtype())
    if part is None and not drop:
        return Placement(index, 0)
    size, whole_dim = window.size, dim * window.num_shards
    # Beyond these bounds, a window that is not moved is entirely outside.
    index = jnp.clip(index, -size, whole_dim) if drop else _clamped(index, size, whole_dim)
    cut: Array | int = 0
    if part is not None:
        index -= part.astype(_index_dtype()) * dim
        cut = jnp.clip(-index, 0, max(size - dim, 0))
        size = min(size, dim)
        index = jnp.clip(index + cut, -size, dim)
    inside = jnp.clip(index, 0, dim - size)
    return Placement(inside, inside - index, cut)


def _clamped(start: Array, size: int, dim: int) -> Array:
    if jax_versions.is_static_shape((dim,)) and dim > jnp.iinfo(start.dtype).max:
        return start  # JAX cannot index the whole axis with this dtype either
    return jnp.clip(jnp.where(start < 0, start + dim, start), 0, dim - size)


def _shifted(window: Array, placements: Sequence[Placement], sign: int) -> tuple[Array, Array | bool]:
    """The window's content, shifted like the window was moved (sign -1: back), and which of its elements are valid."""
    is_known: Array | bool = True
    for axis, (_, moved, _) in enumerate(placements):
        if isinstance(moved, int):
            continue
        window = jnp.roll(window, -sign * moved, axis)
        index = jax.lax.broadcasted_iota(moved.dtype, window.shape, axis) + sign * moved
        is_known &= in_range(index, window.shape[axis])
    return window, is_known


OwnWindows = Sequence[tuple[Window, Array, Array | None]]
"""The windows of an array, with their starts and, for axes split over devices, the index of this device's part."""


def _placements(dest: Array, windows: OwnWindows, drop: bool) -> tuple[list[Placement], list[int]]:
    """The placements along all axes of an array, and the sizes of the part of its window that fits inside."""
    placements, sizes = [Placement(jnp.zeros((), _index_dtype()), 0)] * dest.ndim, list(dest.shape)
    for window, start, part in windows:
        dim = dest.shape[window.axis]
        placements[window.axis] = _placement(start, window, part, dim, drop)
        sizes[window.axis] = min(window.size, dim)
    return placements, sizes


def _write_one(dest: Array, source: Array, windows: OwnWindows, drop: bool) -> Array:
    placements, sizes = _placements(dest, windows, drop)
    corner = [placement.start for placement in placements]
    if tuple(sizes) != source.shape:
        source = jax.lax.dynamic_slice(source, [placement.cut for placement in placements], sizes)
    source, is_known = _shifted(source, placements, sign=1)
    if is_known is not True:
        source = jnp.where(is_known, source, jax.lax.dynamic_slice(dest, corner, sizes))
    return jax.lax.dynamic_update_slice(dest, source, corner)


def _extract_one(cotangent: Array, windows: OwnWindows, drop: bool) -> tuple[Array, Array]:
    """The array with zeros in the window, and the window."""
    placements, sizes = _placements(cotangent, windows, drop)
    # Clamped here, because XLA merges a slice of a slice by adding their starts, which is wrong if XLA clamps them.
    starts_inside = [_clamped(*of) for of in zip((p.start for p in placements), sizes, cotangent.shape, strict=True)]
    extracted = jax.lax.dynamic_slice(cotangent, starts_inside, sizes)
    extracted, is_known = _shifted(extracted, placements, sign=-1)
    extracted = extracted if is_known is True else jnp.where(is_known, extracted, 0)
    whole_sizes = list(cotangent.shape)
    for window, *_ in windows:
        whole_sizes[window.axis] = window.size
    if sizes != whole_sizes:
        nothing = jnp.zeros(whole_sizes, extracted.dtype)
        extracted = jax.lax.dynamic_update_slice(nothing, extracted, [placement.cut for placement in placements])
    return _write_one(cotangent, jnp.zeros_like(extracted), windows, drop), extracted


def _windows_of_each(num_arrays: int, windows: Sequence[Window], positions: Sequence[Array]) -> list[OwnWindows]:
    """The windows of each array. `positions`: the operands after the arrays, which are starts and then parts."""
    parts = iter(positions[_num_starts(windows) :])
    bound = [(w, positions[w.start_operand], next(parts) if w.num_shards > 1 else None) for w in windows]
    return [[of_one for of_one in bound if of_one[0].array == i] for i in range(num_arrays)]


def _reference_write(*operands: Array, ranks: Sequence[int], windows: Sequence[Window], drop: bool) -> list[Array]:
    num = len(ranks)
    windows_of_each = _windows_of_each(num, windows, operands[2 * num :])
    return [
        of_bits(_write_one(as_bits(dest), as_bits(source), own_windows, drop), dest.dtype)
        for dest, source, own_windows in zip(operands[:num], operands[num : 2 * num], windows_of_each, strict=True)
    ]


def _reference_extract(*operands: Array, ranks: Sequence[int], windows: Sequence[Window], drop: bool) -> list[Array]:
    num = len(ranks)
    arrays = zip(operands[:num], _windows_of_each(num, windows, operands[num:]), strict=True)
    pairs = [[of_bits(part, x.dtype) for part in _extract_one(as_bits(x), own, drop)] for x, own in arrays]
    return [*(rest for rest, _ in pairs), *(extracted for _, extracted in pairs)]


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel.

MAX_AXES = 8

DTYPES = DTYPES_OF_WHOLE_BYTES | {"int2", "uint2", "int4", "uint4", "float4_e2m1fn"}


def _dimension(array: int, axis: int) -> str:
    return f"{array}.{axis}"


def _window_dimension(window: Window) -> str:
    return f"window of {_dimension(window.array, window.axis)}"


def _dest_dimensions(name: str, ranks: Sequence[int]) -> NamedDimensions:
    return {f"{name}_{i}": tuple(_dimension(i, axis) for axis in range(rank)) for i, rank in enumerate(ranks)}


def _source_dimensions(name: str, ranks: Sequence[int], windows: Sequence[Window]) -> NamedDimensions:
    dimensions = {array: list(names) for array, names in _dest_dimensions(name, ranks).items()}
    for window in windows:
        dimensions[f"{name}_{window.array}"][window.axis] = _window_dimension(window)
    return {array: tuple(names) for array, names in dimensions.items()}


def _num_starts(windows: Sequence[Window]) -> int:
    return 1 + max((window.start_operand for window in windows), default=-1)


def _start_dimensions(windows: Sequence[Window]) -> NamedDimensions:
    """The (scalar) dimensions of the start operands, then of the part index of each axis that is split over devices."""
    num_parts = sum(window.num_shards > 1 for window in windows)
    return {f"start_{i}": () for i in range(_num_starts(windows))} | {f"part_{i}": () for i in range(num_parts)}


def _plan_parameters(*operands: Any, ranks: Sequence[int], windows: Sequence[Window], drop: bool) -> dict[str, int]:
    dests = operands[: len(ranks)]
    parameters = {"arrays": len(dests), "drop": drop}
    for i, dest in enumerate(dests):
        parameters |= {f"rank_{i}": dest.ndim, f"bits_{i}": element_bits(dest.dtype)}
        for axis, size in enumerate(dest.shape):
            parameters |= {f"size_{i}_{axis}": size, f"has_window_{i}_{axis}": False}
    for window in windows:
        axis_name = f"{window.array}_{window.axis}"
        parameters |= {
            f"has_window_{axis_name}": True,
            f"window_{axis_name}": window.size,
            f"shards_{axis_name}": window.num_shards,
            f"start_operand_{axis_name}": window.start_operand,
        }
    return parameters


def _split_windows(
    axes: ShardAxes, windows: Sequence[Window]
) -> tuple[tuple[Window, ...], list[Array], list[MeshAxes]]:
    """In the program of one device: the windows, the device's part index for each split axis, and the mesh axes that
    split each window's axis."""
    split = [axes.get(_dimension(window.array, window.axis), ()) for window in windows]
    parts = [jax.lax.axis_index(names).astype(jnp.int32) for names in split if names]
    windows = tuple(
        window._replace(num_shards=jax.lax.axis_size(names)) if names else window
        for window, names in zip(windows, split, strict=True)
    )
    return windows, parts, split


def _shard_write(kernel: ShardKernel, axes: ShardAxes, *operands: Array, windows: Sequence[Window]) -> Sequence[Array]:
    """Each device writes the part of a window that lies within its part of the axis."""
    windows, parts, _ = _split_windows(axes, windows)
    return kernel(*operands, *parts, windows=windows)


def _shard_extract(
    kernel: ShardKernel, axes: ShardAxes, *operands: Array, windows: Sequence[Window], ranks: Sequence[int]
) -> Sequence[Array]:
    """Each device extracts the part of a window within its part of the axis, with zeros elsewhere; an all-reduce adds
    the parts."""
    local_windows, parts, split = _split_windows(axes, windows)
    results = kernel(*operands, *parts, windows=local_windows)
    rest, extracted = results[: len(ranks)], results[len(ranks) :]
    for window, names in zip(windows, split, strict=True):
        if names:
            extracted[window.array] = jax.lax.psum(extracted[window.array], names)
    return [*rest, *extracted]


# Extracting a window and leaving zeros is the transpose of writing it, and vice versa.


def _transpose_extract(_: Any, cotangents: Sequence[Array], *starts: Array, **params: Any) -> Sequence[Array]:
    return WRITE_SLICE(*cotangents, *starts, **params)


def _transpose_write(
    _: Any, cotangents: Sequence[Array], *starts: Array, ranks: Sequence[int], windows: Sequence[Window], drop: bool
) -> list[Array | None]:
    """The cotangents of all dests, then of all sources. None for integer arrays, which have no derivatives."""
    chosen = [i for i, cotangent in enumerate(cotangents) if jnp.issubdtype(cotangent.dtype, jnp.inexact)]
    own = [window for window in windows if window.array in chosen]
    used = sorted({window.start_operand for window in own})
    gradients = WRITE_SLICE_BACKWARD(
        *(cotangents[i] for i in chosen),
        *(starts[i] for i in used),
        ranks=tuple(ranks[i] for i in chosen),
        windows=tuple(w._replace(array=chosen.index(w.array), start_operand=used.index(w.start_operand)) for w in own),
        drop=drop,
    )
    return placed(gradients, [*chosen, *(len(ranks) + i for i in chosen)], 2 * len(ranks))


_FIELDS = {
    "guarantee": EXACT,
    "attributes": ("windows", "drop"),
    "plan_parameters": _plan_parameters,
    "limit": lambda *_, ranks: f"an array has more than {MAX_AXES} axes" if max(ranks) > MAX_AXES else None,
    "replicated_dims": lambda *, windows: tuple(map(_window_dimension, windows)),
    "in_place": lambda *, ranks: {i: i for i in range(len(ranks))},
}


_WHOLE_BYTES = at_least(element_bits=8)


# H100, time of plain JAX / kernel: 0.83 to 1.28 (20 loops); in programs XLA fuses the write with what computes the
# window. Two cores: 0.3 (loops of windows of 4 bytes to 4 MB).
WRITE_SLICE = define_op(
    name="write_slice",
    operands=lambda *, ranks, windows: {
        **_dest_dimensions("dest", ranks),
        **_source_dimensions("source", ranks, windows),
        **_start_dimensions(windows),
    },
    results=lambda *, ranks: _dest_dimensions("dest", ranks),
    result_dtypes=lambda *operands, ranks: [x.dtype for x in operands[: len(ranks)]],
    reference=_reference_write,
    dtypes=DTYPES,
    aliases=("write_slices",),
    xla_rules=(
        on_gpu("XLA writes a slice in place, in any layout of the array", _WHOLE_BYTES),
        on_cpu("XLA's update takes less time than the call of a kernel", _WHOLE_BYTES),
    ),
    shard_program=_shard_write,
    transposes=lambda *, ranks: {
        (*_dest_dimensions("dest", ranks), *_dest_dimensions("source", ranks)): _transpose_write
    },
    **_FIELDS,
)

WRITE_SLICE_BACKWARD = define_op(
    name="write_slice_backward",
    operands=lambda *, ranks, windows: {
        **_dest_dimensions("d_output", ranks),
        **_start_dimensions(windows),
    },
    results=lambda *, ranks, windows: {
        **_dest_dimensions("d_dest", ranks),
        **_source_dimensions("d_source", ranks, windows),
    },
    result_sizes=lambda *, windows: {_window_dimension(window): window.size for window in windows},
    result_dtypes=lambda *operands, ranks: [x.dtype for x in operands[: len(ranks)]] * 2,
    reference=_reference_extract,
    dtypes=DIFFERENTIABLE_DTYPES,
    xla_rules=(
        on_gpu("launch-bound: a copy and a slice", launch_bound),
        SHORT_COPY,
    ),
    shard_program=_shard_extract,
    transposes=lambda *, ranks: {tuple(_dest_dimensions("d_output", ranks)): _transpose_extract},
    **_FIELDS,
)


_write_op = vjp_of_linear("write_slice", WRITE_SLICE)


# ----------------------------------------------------------------------------------------------------------------------
# Canonicalisation of arguments.


class _Update(NamedTuple):
    """Checked arguments of one write."""

    dest: Array
    source: Array
    starts: tuple[int | Array | None, ...]
    """The start along each axis, or None if the whole axis is written."""


def _write(updates: Sequence[_Update], mode: WriteMode) -> list[Array]:
    """The results of all updates, in order."""
    results: list[Array] = [update.dest if update.dest.ndim > 0 else update.source for update in updates]
    chosen = [i for i, update in enumerate(updates) if update.dest.ndim > 0 and 0 not in update.source.shape]
    windows: list[Window] = []
    starts: dict[Any, Array] = {}  # without duplicates
    for array, update in enumerate(updates[i] for i in chosen):
        for axis, start in enumerate(update.starts):
            if start is not None:
                is_static = isinstance(start, int)
                key = start if is_static else ("array", id(start))
                starts.setdefault(key, _scalar(start) if is_static else start)
                start_operand = list(starts).index(key)
                windows.append(Window(array, axis, start_operand, update.source.shape[axis], num_shards=1))
    if chosen:
        ranks = tuple(updates[i].dest.ndim for i in chosen)
        params = Params(ranks=ranks, windows=tuple(windows), drop=mode == "drop")
        dests, sources = [updates[i].dest for i in chosen], [updates[i].source for i in chosen]
        written = _write_op(params, *dests, *sources, *starts.values())
        for i, result in zip(chosen, written, strict=True):
            results[i] = result
    return results


def _scalar(value: int) -> Array:
    """An integer as an array. It has 64 bits only if it needs them, because 64-bit types must be enabled."""
    dtype = next(d for d in (np.int32, np.uint32, np.int64) if np.iinfo(d).min <= value <= np.iinfo(d).max)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"write_slice: a start of {value} needs jax_enable_x64, because it does not fit in 32 bits")
    return jnp.asarray(value, dtype)


def _start_indices_of_each(
    name: str, dests: Sequence[Any], start_indices: Any, start_indices_of_each: Any
) -> list[tuple[str, Any]]:
    """The start indices of each array, and their names for error messages."""
    if (start_indices is None) == (start_indices_of_each is None):
        given = "both" if start_indices is not None else "neither"
        raise TypeError(f"{name}: one of start_indices and start_indices_of_each must be given, got {given}")
    if start_indices is not None:
        return [("start_indices", start_indices)] * len(dests)
    check_one_for_each(name, "start_indices_of_each", start_indices_of_each, dests)
    return [(f"start_indices_of_each[{i}]", of_one) for i, of_one in enumerate(start_indices_of_each)]


def _entries(name: str, what: str, start_indices: Any) -> list[Any]:
    if isinstance(start_indices, jax.Array | np.ndarray) and start_indices.ndim != 1:
        raise ValueError(f"{name}: {what} as an array must be of one dimension, got shape {start_indices.shape}")
    if isinstance(start_indices, str | Mapping) or not isinstance(start_indices, Iterable):
        raise TypeError(
            f"{name}: {what} must be a sequence with one entry for each axis, got {type(start_indices).__name__}"
        )
    return list(start_indices)


def _canonicalize(
    name: str,
    dest_name: str,
    source_name: str,
    dest: ArrayLike,
    source: ArrayLike,
    what: str,
    start_indices: Any,
    mode: WriteMode,
) -> _Update:
    check_choice(name, "mode", mode, "clip", "drop")
    dest, source = as_array(name, dest_name, dest), as_array(name, source_name, source)
    check_same_dtype(name, source_name, source, dest_name, dest)
    is_too_long = any(
        jax_versions.is_static_shape((size, dim)) and size > dim
        for size, dim in zip(source.shape, dest.shape, strict=False)
    )
    if source.ndim != dest.ndim or is_too_long:
        raise ValueError(
            f"{name}: {source_name} must have the rank of {dest_name}, of shape {dest.shape}, and be longer along no "
            f"axis, got shape {source.shape}"
        )
    entries = _entries(name, what, start_indices)
    if len(entries) != dest.ndim:
        raise ValueError(
            f"{name}: {what} must have one entry for each axis of {dest_name}, of shape {dest.shape}, "
            f"got {len(entries)} entries"
        )
    starts = tuple(
        _checked_start(f"{name}: {what}[{axis}]", entry, source.shape[axis], dest.shape[axis], mode)
        for axis, entry in enumerate(entries)
    )
    return _Update(dest, source, starts)


def _checked_start(what: str, entry: Any, size: int, dim: int, mode: WriteMode) -> int | Array | None:
    """The start of a window, clamped if it is static, or None if the window is the whole axis."""
    if isinstance(entry, list | tuple):
        if len(entry) != 2 or not all(map(is_integer, entry)):
            raise TypeError(f"{what} must be a pair (start, end) of Python integers or a start alone, got {entry!r}")
        start, end = map(operator.index, entry)
        if not 0 <= start <= end <= dim or end - start != size:
            raise ValueError(
                f"{what} must be a pair (start, end) with 0 <= start <= end <= {dim}, the size of the axis, and "
                f"end - start = {size}, that of the source, got {(start, end)}"
            )
        return None if size == dim else start
    if isinstance(entry, np.ndarray) and np.issubdtype(entry.dtype, np.integer):
        entry = entry[()] if entry.ndim == 0 else jnp.asarray(entry)
    if not is_integer(entry):
        if not isinstance(entry, jax.Array) or not jnp.issubdtype(entry.dtype, jnp.integer):
            dtype = f" of dtype {entry.dtype}" if isinstance(entry, jax.Array | np.ndarray) else ""
            raise TypeError(
                f"{what} must be an integer or a pair of Python integers, got {type(entry).__name__}{dtype}"
            )
        if entry.ndim != 0:
            raise TypeError(
                f"{what} must be a scalar, got an array of shape {entry.shape}; for one start per example, map over "
                "the examples with jax.vmap"
            )
        if mode == "clip" and size == dim:
            return None
        return entry.astype(jnp.int8) if jnp.iinfo(entry.dtype).bits < 8 else entry
    start = operator.index(entry)
    if not jax_versions.is_static_shape((size, dim)):
        return start
    if mode == "clip":
        start = min(max(start + dim if start < 0 else start, 0), dim - size)
    else:
        start = min(max(start, -size), dim)
    return None if start == 0 and size == dim else start
