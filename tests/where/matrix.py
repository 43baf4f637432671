"""Declarations of `where` and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from support.matrix.calls import (
    FLOATING,
    Constraint,
    Operand,
    Options,
    Problem,
    Sizes,
    by_name,
    declare,
    numbers,
    special,
)

ALL = ("head", "query", "key")
SHAPES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "equal": (ALL, ALL, ALL),
    "a is a scalar": (ALL, (), ALL),
    "b is a scalar": (ALL, ALL, ()),
    "a is a row": (ALL, ("key",), ALL),
    "b is a column": (ALL, ALL, ("head", "query", "1c")),
    "a repeats in the middle": (ALL, ("head", "1m", "key"), ALL),
    "both are rows": (ALL, ("key",), ("1r", "key")),
    "cond is a column": (("head", "1x", "1y"), ALL, ALL),
    "cond is a row": (("query", "key"), ALL, ("head", "1z", "key")),
    "cond repeats along rows": (("head", "query", "1x"), ALL, ALL),
    "cond is a row, b is a scalar": (("key",), ALL, ()),
    "cond is a scalar": ((), ALL, ALL),
}


def condition(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    flags = rng.random(shape) < 0.5
    return flags if dtype == np.bool_ else np.where(flags, rng.integers(1, 100, shape), 0).astype(dtype)


SIZES: dict[str, Sizes] = {
    "small": {"head": 4, "query": 2, "key": 8},
    "odd": {"head": 3, "query": 5, "key": 7},
    "one": {"head": 1, "query": 1, "key": 1},
    "empty": {"head": 3, "query": 0, "key": 4},
    "vectors": {"head": 4, "query": 8, "key": 64},
    "many rows": {"head": 60, "query": 50, "key": 4},
    "long rows": {"head": 2, "query": 2, "key": 2600},
}
LARGE_SIZES: dict[str, Sizes] = {
    "large": {"head": 64, "query": 128, "key": 512},
    "large, odd": {"head": 63, "query": 129, "key": 515},
    "tall": {"head": 300, "query": 3001, "key": 4},
    "tall, odd": {"head": 301, "query": 3001, "key": 3},
    "long rows, large": {"head": 32, "query": 64, "key": 2048},
    "wide": {"head": 3, "query": 2, "key": 300_001},
}

OPTIONS = {"shapes": tuple(SHAPES), "cond_dtype": ("bool", "uint8", "int32")}
DTYPES = (*FLOATING, "complex64", "int32", "int8", "uint16", "int64", "bool", "float8_e5m2", "float8_e4m3fn")


def _where_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    cond, a, b = SHAPES[options["shapes"]]
    draw = special if options["values"] == "special" and dtype in FLOATING else numbers
    return Problem(
        operands=(
            Operand("cond", cond, condition, dtype=options["cond_dtype"]),
            Operand("a", a, draw),
            Operand("b", b, draw),
        ),
        apply=by_name(options),
        reference=lambda cond, a, b: jnp.where(cond != 0, a, b),
        results=(ALL,),
        terms=max(1, sizes["head"] * sizes["query"] * sizes["key"]),
        free=ALL,
        exact_value=True,
        exact_gradient=options["shapes"] in ("equal", "cond is a scalar", "cond is a column"),
        carry=(1, 0) if a == ALL else (2, 0),
    )


declare(
    name="where",
    dtypes=DTYPES,
    sizes=SIZES,
    large_sizes=LARGE_SIZES,
    options={**OPTIONS, "values": ("numbers", "special")},
    problem=_where_problem,
    constraints=(
        Constraint(
            "no operand of a selection between rows has the shape of its result",
            lambda shapes, transformation: shapes == "both are rows" and transformation == "loop",
        ),
    ),
    has_carry=True,
)


def _sum_to(x: Any, dims: tuple[str, ...]) -> Any:
    """Sums x over the dimensions that `dims` lacks."""
    missing = [axis for axis, name in enumerate(ALL) if name not in dims]
    x = x.sum(axis=tuple(missing), keepdims=True)
    ones = len(ALL) - len(dims)
    return x.reshape(x.shape[ones:])


def _shape(dims: tuple[str, ...], sizes: Sizes) -> tuple[int, ...]:
    return tuple(1 if name.startswith("1") else sizes[name] for name in dims)


def _backward_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    cond, a, b = SHAPES[options["shapes"]]
    # The default shapes are the shape of d_output.
    given = {name: dims for name, dims in (("a_shape", a), ("b_shape", b)) if dims != ALL or dtype == "float16"}

    def apply(function: Callable[..., Any], d_output: Any, cond: Any) -> Any:
        sizes = dict(zip(ALL, d_output.shape, strict=True))  # under shard_map, the sizes on one device
        return function(d_output, cond, **{name: _shape(dims, sizes) for name, dims in given.items()})

    return Problem(
        operands=(
            Operand("d_output", ALL, numbers),
            Operand("cond", cond, condition, dtype=options["cond_dtype"]),
        ),
        apply=apply,
        reference=lambda d_output, cond: (
            _sum_to(jnp.where(cond != 0, d_output, 0), a),
            _sum_to(jnp.where(cond != 0, 0, d_output), b),
        ),
        results=(a, b),
        terms=max(1, sizes["head"] * sizes["query"] * sizes["key"]),
        free=tuple(name for name in ALL if name in a and name in b),
        exact_value=a == b == ALL,
        exact_gradient=True,
    )


declare(
    name="where_backward",
    dtypes=(*FLOATING, "complex64"),
    sizes=SIZES,
    large_sizes=LARGE_SIZES,
    options=OPTIONS,
    problem=_backward_problem,
)
