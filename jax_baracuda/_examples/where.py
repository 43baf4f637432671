"""Example calls of the selection and of its gradient."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

import jax_baracuda as jb
from jax_baracuda._examples.example import EXACT, Example, Operand, SizeOf, Tolerance, flags


def where(cond: Array, a: Array, b: Array) -> Array:
    return jnp.where(cond, a, b)


def where_backward(
    d_output: Array, cond: Array, a_shape: tuple[int, ...] | None = None, b_shape: tuple[int, ...] | None = None
) -> tuple[Array, Array]:
    def summed(x: Array, shape: tuple[int, ...] | None) -> Array:
        """Sums over the leading dimensions that an operand lacks."""
        return x if shape is None else x.sum(range(x.ndim - len(shape)))

    return summed(jnp.where(cond, d_output, 0), a_shape), summed(jnp.where(cond, 0, d_output), b_shape)


CHECKED = {"small": {"head": 2, "query": 3, "key": 37}, "check": {"head": 3, "query": 331, "key": 33}}
TIMED = {"cpu": {"head": 4, "query": 1024, "key": 1024}, "cuda": {"head": 32, "query": 2048, "key": 2048}}

ALL = ("head", "query", "key")
WHOLE, ROW, NUMBER = Operand(ALL), Operand(("key",)), Operand(())
COLUMN = Operand(("head", "query", "1"))
COND = Operand(ALL, flags, "bool")
ROW_COND = Operand(("query", "key"), flags, "bool")
COLUMN_COND = Operand(("head", "1", "1"), flags, "bool")
SUMMED: Tolerance = {"float32": (0, 1e-5), "bfloat16": (0, 4e-3), "float16": (0, 5e-4)}
"""The gradient of a broadcast operand is a sum, whose order differs."""

OF_GRADIENT: Tolerance = {dtype: (error, 0) for dtype, (_, error) in SUMMED.items()}

EXAMPLES = [
    Example(function, plain_jax, operands, {**CHECKED, **timed}, variant, options, tolerance=tolerance)
    for function, plain_jax, operands, timed, variant, options, tolerance in (
        (jb.where, where, {"cond": COND, "a": WHOLE, "b": WHOLE}, TIMED, "", {}, EXACT),
        (jb.where, where, {"cond": COND, "a": ROW, "b": WHOLE}, {}, "row", {}, SUMMED),
        (jb.where, where, {"cond": COND, "a": WHOLE, "b": COLUMN}, {}, "column", {}, SUMMED),
        (jb.where, where, {"cond": COND, "a": WHOLE, "b": NUMBER}, {}, "number", {}, SUMMED),
        (jb.where, where, {"cond": COLUMN_COND, "a": WHOLE, "b": WHOLE}, {}, "cond is a column", {}, EXACT),
        (jb.where, where, {"cond": ROW_COND, "a": WHOLE}, TIMED, "masked scores", {"b": -math.inf}, EXACT),
        (jb.where_backward, where_backward, {"d_output": WHOLE, "cond": COND}, TIMED, "", {}, EXACT),
        (
            *(jb.where_backward, where_backward, {"d_output": WHOLE, "cond": COND}),
            *(TIMED, "row", {"a_shape": (SizeOf("key"),)}, OF_GRADIENT),
        ),
    )
]
