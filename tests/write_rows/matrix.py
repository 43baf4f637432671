"""The declaration of `write_rows` for the matrix of combinations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from support.matrix.calls import (
    ABSENT,
    FLOATING,
    Constraint,
    Draw,
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

SIZES: dict[str, Sizes] = {
    "small": {"layer": 2, "slot": 12, "token": 8, "head": 4, "feature": 8},
    "odd": {"layer": 3, "slot": 13, "token": 7, "head": 3, "feature": 5},
    "one": {"layer": 1, "slot": 1, "token": 1, "head": 1, "feature": 1},
    "many duplicates": {"layer": 2, "slot": 3, "token": 40, "head": 2, "feature": 4},
    "empty": {"layer": 2, "slot": 6, "token": 0, "head": 2, "feature": 4},
}
LARGE_SIZES: dict[str, Sizes] = {
    "prefill": {"layer": 2, "slot": 20_000, "token": 8192, "head": 4, "feature": 64},
    "decode": {"layer": 4, "slot": 40_000, "token": 64, "head": 8, "feature": 128},
    "long odd rows": {"layer": 1, "slot": 40, "token": 30, "head": 3, "feature": 30_001},
    "sorted first": {"layer": 1, "slot": 100_000, "token": 140_000, "head": 1, "feature": 2},
}


def slots(size: int) -> Draw:
    """Random slots. Some are out of range, and some are the limits of the dtype."""
    return integers_and_limits(range(-2, size + 3))


def reference(dest: Any, rows: Any, slots: Any, axis: int, layer: Any) -> Any:
    """Gathers for each slot its last row, by comparing all slots with all rows."""
    if rows.shape[0] == 0:
        return dest
    if layer is not None:
        is_layer = jnp.arange(dest.shape[0]).reshape(-1, *[1] * (dest.ndim - 1)) == layer
        return jnp.where(is_layer, jnp.stack([reference(x, rows, slots, axis, None) for x in dest]), dest)
    num_slots = dest.shape[axis]
    is_inside = (slots >= 0) & (slots < num_slots)
    positions = jnp.where(is_inside, slots, num_slots).astype(jnp.int32)
    last = jnp.full(num_slots + 1, -1).at[positions].max(jnp.arange(rows.shape[0]))[:num_slots]
    taken = jnp.moveaxis(jnp.take(rows, jnp.maximum(last, 0), axis=0), 0, axis)
    return jnp.where((last >= 0).reshape(-1, *[1] * (dest.ndim - 1 - axis)), taken, dest)


OPTIONS = {
    "axis": (ABSENT, 1),
    "layer": (ABSENT, "int32", "int8"),
    "slots": ("int32", "int64", "uint8", "uint32"),
    "pools": ("one", "two"),
    "conversion": (ABSENT, "float32"),
    "values": ("numbers", "special"),
}


def _problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    axis, has_layer, num = options["axis"] or 0, options["layer"] is not ABSENT, 2 if options["pools"] == "two" else 1
    draw = special if options["values"] == "special" and dtype in FLOATING else numbers
    heads = ["head", "feature"]
    heads.insert(axis, "slot")
    pool, rows = (*(("layer",) if has_layer else ()), *heads), ("token", "head", "feature")

    def apply(function: Callable[..., Any], slots: Any, layer: Any = None, **arrays: Any) -> Any:
        given = ([arrays[name] for name in of_kind] for of_kind in zip(*names, strict=True))
        arguments = (x[0] if num == 1 else x for x in given)
        return function(*arguments, slots, layer=layer, **passed(options, "axis"))

    def of_all(slots: Any, layer: Any = None, **arrays: Any) -> Any:
        return [reference(arrays[pool], arrays[own_rows], slots, axis, layer) for pool, own_rows in names]

    of_layer = Operand("layer", (), slots(sizes["layer"]), dtype=options["layer"])
    row_dtype = options["conversion"]
    names = [("dests", "rows")] if num == 1 else [("keys", "new_keys"), ("values", "new_values")]
    return Problem(
        operands=(
            *(Operand(name, pool, draw) for name, _ in names),
            *(Operand(name, rows, draw, dtype=row_dtype) for _, name in names),
            Operand("slots", ("token",), slots(sizes["slot"]), dtype=options["slots"]),
            *((of_layer,) if has_layer else ()),
        ),
        apply=apply,
        reference=of_all,
        results=(pool,) * num,
        free=("head", "feature"),
        exact_value=True,
        exact_gradient=True,
        carry=(0, 0),
    )


def _has(operand: str, pools: str) -> bool:
    return operand in ("slots", "layer") or (operand in ("dests", "rows")) == (pools == "one")


declare(
    name="write_rows",
    dtypes=(*FLOATING, "int32", "int8", "bool", "uint16", "complex64", "float8_e4m3fn"),
    sizes=SIZES,
    large_sizes=LARGE_SIZES,
    options=OPTIONS,
    problem=_problem,
    constraints=(
        Constraint(
            "vmap maps an operand that the call has",
            lambda batch, pools: batch.startswith("one:") and not _has(batch[4:], pools),
        ),
        Constraint(
            "conversions to other dtypes are not those of NumPy and have tests of their own",
            lambda conversion, dtype: conversion is not ABSENT and dtype not in FLOATING,
        ),
    ),
    has_carry=True,
)
