"""Declarations of `where` and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from support.matrix.calls import FLOATING, Call, Operand, Options, Problem, Rule, declare, numbers, special

import jax_baracuda as jb

Sizes = Mapping[str, Any]

ALL = ("d0", "d1", "d2")
SHAPES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "equal": (ALL, ALL, ALL),
    "a is a scalar": (ALL, (), ALL),
    "b is a scalar": (ALL, ALL, ()),
    "a is a row": (ALL, ("d2",), ALL),
    "b is a column": (ALL, ALL, ("d0", "d1", "1c")),
    "a repeats in the middle": (ALL, ("d0", "1m", "d2"), ALL),
    "both are rows": (ALL, ("d2",), ("1r", "d2")),
    "cond is a column": (("d0", "1x", "1y"), ALL, ALL),
    "cond is a row": (("d1", "d2"), ALL, ("d0", "1z", "d2")),
    "cond repeats along rows": (("d0", "d1", "1x"), ALL, ALL),
    "cond is a row, b is a scalar": (("d2",), ALL, ()),
    "cond is a scalar": ((), ALL, ALL),
}


def condition(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    flags = rng.random(shape) < 0.5
    return flags if dtype == np.bool_ else np.where(flags, rng.integers(1, 100, shape), 0).astype(dtype)


SIZES: dict[str, Sizes] = {
    "small": {"d0": 4, "d1": 2, "d2": 8},
    "odd": {"d0": 3, "d1": 5, "d2": 7},
    "one": {"d0": 1, "d1": 1, "d2": 1},
    "empty": {"d0": 3, "d1": 0, "d2": 4},
    "vectors": {"d0": 4, "d1": 8, "d2": 64},
    "many rows": {"d0": 60, "d1": 50, "d2": 4},
    "long rows": {"d0": 2, "d1": 2, "d2": 2600},
}
LARGE_SIZES: dict[str, Sizes] = {
    "large": {"d0": 64, "d1": 128, "d2": 512},
    "large, odd": {"d0": 63, "d1": 129, "d2": 515},
    "tall": {"d0": 300, "d1": 3001, "d2": 4},
    "tall, odd": {"d0": 301, "d1": 3001, "d2": 3},
    "long rows, large": {"d0": 32, "d1": 64, "d2": 2048},
    "wide": {"d0": 3, "d1": 2, "d2": 300_001},
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
        apply=lambda function, *arrays: function(*arrays),
        reference=lambda cond, a, b: jnp.where(cond != 0, a, b),
        results=(ALL,),
        terms=max(1, sizes["d0"] * sizes["d1"] * sizes["d2"]),
        free=ALL,
        exact_value=True,
        exact_gradient=options["shapes"] in ("equal", "cond is a scalar", "cond is a column"),
        carry=(1, 0) if a == ALL else (2, 0),
    )


declare(
    Call(
        name="where",
        function=jb.where,
        forward_mode=jb.forward_mode.where,
        dtypes=DTYPES,
        sizes=SIZES,
        large_sizes=LARGE_SIZES,
        options={**OPTIONS, "values": ("numbers", "special")},
        operands=("cond", "a", "b"),
        problem=_where_problem,
        rules=(
            Rule(
                "no operand of a selection between rows has the shape of its result",
                ("shapes", "transformation"),
                lambda shapes, transformation: shapes == "both are rows" and transformation == "loop",
            ),
        ),
        has_carry=True,
    )
)


def _sum_to(x: Any, dims: tuple[str, ...]) -> Any:
    """Summed over the dimensions that these lack."""
    missing = [axis for axis, name in enumerate(ALL) if name not in dims]
    x = x.sum(axis=tuple(missing), keepdims=True)
    ones = len(ALL) - len(dims)
    return x.reshape(x.shape[ones:])


def _shape(dims: tuple[str, ...], sizes: Sizes) -> tuple[int, ...]:
    return tuple(1 if name.startswith("1") else sizes[name] for name in dims)


def _backward_problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    cond, a, b = SHAPES[options["shapes"]]
    # By default, shapes are that of dy.
    given = {name: dims for name, dims in (("a_shape", a), ("b_shape", b)) if dims != ALL or dtype == "float16"}

    def apply(function: Callable[..., Any], d_output: Any, cond: Any) -> Any:
        sizes = dict(zip(ALL, d_output.shape, strict=True))  # under shard_map, those of one device
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
        terms=max(1, sizes["d0"] * sizes["d1"] * sizes["d2"]),
        free=tuple(name for name in ALL if name in a and name in b),
        exact_value=a == b == ALL,
        exact_gradient=True,
    )


declare(
    Call(
        name="where_backward",
        function=jb.where_backward,
        forward_mode=jb.where_backward,
        dtypes=(*FLOATING, "complex64"),
        sizes=SIZES,
        large_sizes=LARGE_SIZES,
        options=OPTIONS,
        operands=("d_output", "cond"),
        problem=_backward_problem,
    )
)
