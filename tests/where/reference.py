"""Shapes for `where`, and its NumPy references: values bit by bit, gradients in extended precision."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from support import cases, handlers
from support.cases import Expected
from support.handlers import Array, Call

from jax_baracuda.ops.where import WHERE, WHERE_BACKWARD

KERNEL_DTYPES = tuple(sorted(WHERE.dtypes_of("where")))
GRADIENT_DTYPES = tuple(sorted(WHERE_BACKWARD.dtypes_of("where_backward")))

Shape = tuple[int, ...]
Shapes = tuple[Shape, Shape, Shape]
"""The shapes of the condition, `a` and `b`."""

ALTERNATING = ((2, 1, 3, 1, 2, 1, 3), (1, 3, 1, 2, 1, 3, 1), (2, 3, 3, 2, 2, 3, 3))

SHAPES: tuple[Shapes, ...] = (
    ((), (), ()),
    ((0, 3), (3,), ()),
    ((4,), (4,), (0, 1)),
    ((1,), (1, 1), ()),
    ((3,), (3,), (3,)),
    ((5, 7, 33), (5, 7, 33), (5, 7, 33)),
    ((40_001,), (40_001,), (40_001,)),
    ((999,), (999,), ()),
    ((999,), (), (999,)),
    ((1001,), (), (1,)),
    ((), (257,), (257,)),
    ((), (), (33, 5)),
    ((16, 1), (16, 48), (48,)),
    ((48,), (16, 1), (16, 48)),
    ((16, 1), (16, 33), (16, 33)),
    ((33,), (16, 33), ()),
    ((50, 1), (1, 3), (50, 3)),
    ((2, 1, 16, 16), (2, 3, 16, 16), ()),
    ((2, 1, 7, 7), (2, 3, 7, 7), ()),
    ((4, 1, 6), (5, 1), (4, 5, 6)),
    ((4, 1, 50, 1), (1, 40, 1, 30), (4, 40, 50, 30)),
    ALTERNATING,
)
"""These reach every path of the kernels: whole vectors and a rest; rows of whole vectors; rows that end inside a vector
or are shorter than one; operands that are repeated along no, one, all, or every other dimension."""

GRADIENT_SHAPES: tuple[Shapes, ...] = (
    *SHAPES,
    ((3000, 24), (3000, 24), (24,)),
    ((3000, 24), (24,), (3000, 24)),
    ((3000, 1), (3000, 5), (5,)),
    ((700, 64), (700, 64), (700, 1)),
    ((700, 65), (700, 1), (700, 65)),
    ((20, 1500), (20, 1500), (20, 1)),
    ((60, 2600), (2600,), (60, 2600)),
    ((60, 2601), (2601,), ()),
    ((70_003,), (), ()),
    ((70_003,), (70_003,), ()),
    ((9, 300), (300,), (9, 1)),
    ((9, 300), (1, 300), (300,)),
    ((6, 20, 30), (6, 1, 30), (6, 20, 30)),
    ((6, 200, 3), (6, 1, 3), (6, 1, 3)),
    ((6, 5, 4, 30), (6, 1, 4, 1), (6, 5, 4, 30)),
    ((1, 5, 4, 1), (6, 5, 4, 30), (1, 5, 1, 30)),
)
"""The additional shapes have sums for one operand and for both: over first, middle, last and several dimensions, of
few and many rows, short and long."""


def random_shapes(rng: np.random.Generator, count: int) -> tuple[Shapes, ...]:
    """Shapes of up to five dimensions, each of which any of the three operands may repeat."""
    shapes = (rng.choice([1, 2, 3, 5, 8, 17], rng.integers(6)) for _ in range(count))
    return tuple(
        tuple(tuple(np.where(rng.random(len(shape)) < 0.5, 1, shape).tolist()) for _ in range(3)) for shape in shapes
    )


def make_condition(rng: np.random.Generator, shape: Shape, dtype: Any = "bool") -> np.ndarray:
    """A condition of bools, or of bytes: about half of them are zero, the others have any value."""
    flags = rng.random(shape) < 0.5
    return flags if jnp.dtype(dtype) == np.bool_ else np.where(flags, rng.integers(1, 256, shape), 0).astype(np.uint8)


def reference(cond: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`np.where` for operands of one dtype. It copies bits."""
    cond, a, b = np.broadcast_arrays(cond != 0, a, b)
    result = b.copy()
    result[cond] = a[cond]
    return result


def _summed(terms: np.ndarray, shape: Shape) -> Expected:
    """The terms, which are 0 where nothing is selected, summed to the shape of the operand. Without a sum, terms keep
    their bits."""
    new = terms.ndim - len(shape)
    axes = tuple(
        axis for axis in range(terms.ndim) if axis < new or (shape[axis - new] == 1 and terms.shape[axis] != 1)
    )
    count = math.prod(terms.shape[axis] for axis in axes)
    if count == 1:
        return Expected(terms.reshape(shape), terms.dtype)
    wide = terms.astype(np.longdouble)
    with np.errstate(invalid="ignore"):  # the sum of opposite infinities is NaN
        total, magnitude = (x.sum(axis=axes).reshape(shape) for x in (wide, np.abs(wide)))
    return Expected(total, terms.dtype, (1 + np.sqrt(count)) * cases.eps_of(terms.dtype) * magnitude)


def reference_gradients(
    cond: np.ndarray, d_output: np.ndarray, a_shape: Shape, b_shape: Shape
) -> tuple[Expected, Expected]:
    zero = np.zeros((), d_output.dtype)
    return _summed(reference(cond, d_output, zero), a_shape), _summed(reference(cond, zero, d_output), b_shape)


def joint_shape(shapes: Shapes) -> Shape:
    return np.broadcast_shapes(*shapes)


# ----------------------------------------------------------------------------------------------------------------------
# Direct calls of the native targets.

SHAPE = (3, 5, 4, 6)


def select_call(dtype: str = "float32", cond_dtype: str = "bool", shape: tuple[int, ...] = SHAPE) -> Call:
    a, b, output = (Array(name, shape, dtype) for name in ("a", "b", "output"))
    return handlers.good_call("where", (a, b, Array("cond", shape, cond_dtype)), (output,), {})


def split_call(
    dtype: str = "float32", a_axes: tuple[int, ...] = (), b_axes: tuple[int, ...] = (), shape: tuple[int, ...] = SHAPE
) -> Call:
    """A gradient that sums over these axes, counted without the batch."""

    def cotangent(name: str, axes: tuple[int, ...]) -> Array:
        own = (shape[0], *(1 if axis in axes else size for axis, size in enumerate(shape[1:])))
        return Array(name, own, cases.accumulator(dtype).name if axes else dtype)

    operands = Array("d_output", shape, dtype), Array("cond", shape, "bool")

    def from_the_end(axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(1 + axis - len(shape) for axis in axes)

    results = cotangent("da", a_axes), cotangent("db", b_axes)
    axes = {"a_axes": from_the_end(a_axes), "b_axes": from_the_end(b_axes)}
    return handlers.good_call("where_backward", operands, results, axes)
