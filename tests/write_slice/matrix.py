"""Declarations of `write_slice` and `write_slices`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from support.matrix.calls import (
    ABSENT,
    FLOATING,
    Constraint,
    Operand,
    Options,
    Problem,
    Sizes,
    declare,
    integers_and_limits,
    numbers,
    passed,
    special,
)
from support.matrix.generator import DERIVATIVES, SHARD_MAPS

SIZES: dict[str, Sizes] = {
    "small": {"example": 4, "part": 2, "time": 16, "new": 4, "feature": 8, "head": 2},
    "odd": {"example": 3, "part": 2, "time": 13, "new": 5, "feature": 7, "head": 3},
    "one": {"example": 1, "part": 1, "time": 1, "new": 1, "feature": 1, "head": 1},
    "one row": {"example": 4, "part": 3, "time": 24, "new": 1, "feature": 16, "head": 2},
    "whole": {"example": 2, "part": 2, "time": 6, "new": 6, "feature": 4, "head": 2},
    "empty": {"example": 2, "part": 1, "time": 6, "new": 0, "feature": 4, "head": 2},
}
LARGE_SIZES: dict[str, Sizes] = {
    "large": {"example": 8, "part": 5, "time": 2048, "new": 300, "feature": 128, "head": 4},
    "large, odd": {"example": 3, "part": 2, "time": 4001, "new": 1001, "feature": 333, "head": 3},
    "append": {"example": 32, "part": 30, "time": 1024, "new": 1, "feature": 256, "head": 8},
    "long odd rows": {"example": 1, "part": 1, "time": 12_000, "new": 9001, "feature": 1001, "head": 1},
    "short of blocks": {"example": 16, "part": 15, "time": 64, "new": 35, "feature": 128, "head": 64},
}
DTYPES = (*FLOATING, "int32", "int8", "bool", "uint16", "complex64", "float8_e4m3fn", "int4")


def reference_write(dest: Any, source: Any, start: Sequence[Any], drop: bool) -> Any:
    """Gathers the source along each axis, by the index in the source of each index of the array."""
    index_of_each, is_inside = [], jnp.ones((), bool)
    for axis, first in enumerate(start):
        dim, size = dest.shape[axis], source.shape[axis]
        if isinstance(first, int):
            first = np.int64(first)
        elif first.dtype == jnp.uint64:
            first = jnp.minimum(first, np.uint64(2**62)).astype(jnp.int64)
        first = first.astype(jnp.int64)
        if not drop:
            first = jnp.clip(jnp.where(first < 0, first + dim, first), 0, dim - size)
        first = jnp.clip(first, -(2**40), 2**40)
        index = jnp.arange(dim) - first
        shape = [1] * dest.ndim
        shape[axis] = dim
        is_inside = is_inside & ((index >= 0) & (index < size)).reshape(shape)
        index_of_each.append(jnp.clip(index, 0, max(size - 1, 0)))
    if 0 in source.shape:
        return dest
    taken = source
    for axis, index in enumerate(index_of_each):
        taken = jnp.take(taken, index, axis=axis)
    return jnp.where(is_inside, taken, dest)


def _start_indices(options: Options, sizes: Sizes, dims: tuple[str, ...], start: Any) -> tuple[Any, tuple[Any, ...]]:
    """The argument `start_indices`, and the start of each axis for the reference. `start`: the operand, or None."""
    time, new = sizes["time"], sizes["new"]
    of_kind = {"pair": (time - new) // 2, "integer": time - 1, "negative": -1}
    at = of_kind[options["start"]] if start is None else start
    as_given = (at, at + new) if options["start"] == "pair" else at
    of_axes, starts = (tuple(x if name == "time" else 0 for name in dims) for x in (as_given, at))
    return of_axes, starts


def _start_operand(options: Options, sizes: Sizes) -> tuple[Operand, ...]:
    if options["start"] in ("pair", "integer", "negative"):
        return ()
    # About half of the starts are out of range.
    around, inside = range(-sizes["new"] - 2, sizes["time"] + 3), range(sizes["time"] - sizes["new"] + 1)
    return (Operand("start", (), integers_and_limits(around, inside), dtype=options["start"]),)


def _write_slice_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    dims = AXES[options["axes"]]
    windowed = {"time": "new"} | ({"example": "part"} if options["axes"] == "two of three" else {})
    draw = special if options["values"] == "special" and dtype in FLOATING else numbers
    source = tuple(windowed.get(name, name) for name in dims)
    drop = options["mode"] == "drop"

    def apply(function: Callable[..., Any], dest: Any, source: Any, start: Any = None) -> Any:
        return function(dest, source, _start_indices(options, sizes, dims, start)[0], **passed(options, "mode"))

    return Problem(
        operands=(Operand("dest", dims, draw), Operand("source", source, draw), *_start_operand(options, sizes)),
        apply=apply,
        reference=lambda dest, source, start=None: reference_write(
            dest, source, _start_indices(options, sizes, dims, start)[1], drop
        ),
        results=(dims,),
        free=tuple(name for name in dims if name not in windowed),
        exact_value=True,
        exact_gradient=True,
        carry=(0, 0),
    )


OPTIONS = {
    "start": ("int32", "pair", "integer", "negative", "int64", "uint8", "uint32"),
    "mode": (ABSENT, "drop", "clip"),
    "values": ("numbers", "special"),
}

AXES = {
    "one of two": ("time", "feature"),
    "one of four": ("example", "head", "time", "feature"),
    "two of three": ("example", "time", "feature"),
}
"""The dimensions of an array, by the number of dimensions that the window covers in part."""

declare(
    name="write_slice",
    dtypes=DTYPES,
    sizes=SIZES,
    large_sizes=LARGE_SIZES,
    options={**OPTIONS, "axes": tuple(AXES)},
    problem=_write_slice_problem,
    has_carry=True,
)


def _write_slices_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    keys, values = ("example", "time", "feature"), ("example", "time", "head")
    draw = special if options["values"] == "special" and dtype in FLOATING else numbers
    drop = options["mode"] == "drop"
    second = "int32" if options["second"] == "int32" else None

    def source(dims: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("new" if name == "time" else name for name in dims)

    def apply(function: Callable[..., Any], start: Any = None, **arrays: Any) -> Any:
        dests, sources = ([arrays[f"{new}{name}"] for name in ("keys", "values")] for new in ("", "new_"))
        of_each = [_start_indices(options, sizes, dims, start)[0] for dims in (keys, values)]
        if options["start_indices"] == "of each" or options["start"] == "pair":
            return function(dests, sources, start_indices_of_each=of_each, **passed(options, "mode"))
        return function(dests, sources, of_each[0], **passed(options, "mode"))

    def reference(start: Any = None, **arrays: Any) -> Any:
        return [
            reference_write(arrays[name], arrays[f"new_{name}"], _start_indices(options, sizes, dims, start)[1], drop)
            for name, dims in (("keys", keys), ("values", values))
        ]

    return Problem(
        operands=(
            Operand("keys", keys, draw),
            Operand("values", values, numbers if second else draw, dtype=second),
            Operand("new_keys", source(keys), draw),
            Operand("new_values", source(values), numbers if second else draw, dtype=second),
            *_start_operand(options, sizes),
        ),
        apply=apply,
        reference=reference,
        results=(keys, values),
        result_dtypes=(None, second),
        free=("example",),
        exact_value=True,
        exact_gradient=True,
        carry=(0, 0),
    )


declare(
    name="write_slices",
    dtypes=("float32", "bfloat16", "float16", "float64", "int8", "int4"),
    sizes=SIZES,
    large_sizes=LARGE_SIZES,
    options={**OPTIONS, "start_indices": ("of all", "of each"), "second": ("same", "int32")},
    problem=_write_slices_problem,
    constraints=(
        Constraint(
            "JAX wants float0 cotangents of integers to vary over the axes of shard_map, and no array can",
            lambda second, sharding, transformation: (
                second == "int32" and sharding in SHARD_MAPS and transformation in DERIVATIVES
            ),
        ),
    ),
    has_carry=True,
)
