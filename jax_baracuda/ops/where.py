"""Selection between two arrays, element by element, with a gradient that reads the cotangent once.

Elements are moved as bytes, so every dtype of whole bytes has kernels. Operands are broadcast inside the kernels, never
in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import (
    DIFFERENTIABLE_DTYPES,
    DTYPES_OF_WHOLE_BYTES,
    FLOATING_DTYPES,
    accumulation_dtype,
    as_array,
    as_bits,
    broadcasts,
    of_bits,
    reshard_like,
)
from jax_baracuda._core.autodiff import KernelVjp
from jax_baracuda._core.batch import joint_size
from jax_baracuda._core.guarantees import EXACT, accumulated
from jax_baracuda._core.op import Shape, ShapeAndDtype
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.rules import call_bound, fused, in_cache, on_cpu, on_gpu
from jax_baracuda._core.selection import Implementation
from jax_baracuda._core.sharding import ShardAxes, ShardKernel

Axes = tuple[int, ...]
"""Axes, counted from the end."""


@public_function()
def where(cond: ArrayLike, a: ArrayLike, b: ArrayLike, *, implementation: Implementation | None = None) -> Array:
    """Selects elements of `a` where `cond` holds, and of `b` elsewhere: ``jax.numpy.where`` with three arguments.

    Inside a larger computation, ``jax.numpy.where`` is usually the better choice: XLA fuses it with its neighbours,
    while this function reads its operands from memory and writes its result to memory. Use it for selections between
    arrays that are in memory anyway, and for their gradients: both cotangents take one pass.

    Args:
      cond: bool, or uint8 with 0 for false. Other dtypes are compared with 0 first, as ``jax.numpy.where`` does.
      a: any dtype.
      b: any dtype. `a` and `b` are promoted to a common dtype. bool, 8- to 64-bit integers, every float8, float16,
        bfloat16, float32, float64 and complex numbers have kernels; 2- and 4-bit types run as plain JAX.

    Returns:
      An array with the shape to which all three arguments broadcast, and the dtype to which JAX promotes `a` and `b`.
      It is weakly typed where the result of ``jax.numpy.where`` is, e.g. for an array of integers and the number 0.5.

    Raises:
      TypeError: an argument is not an array or number, or has no numeric dtype.
      ValueError: the shapes do not broadcast against each other, or a kernel is asked for and there is none.

    Numerical guarantees: every element is copied bit by bit, payloads of NaN and signs of zeros included.

    Gradient: as in :func:`where_backward`, with respect to `a` and `b`, each only if it is differentiated. Only `cond`
    is kept for the backward pass.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> cond = jnp.array([[True], [False]])
      >>> print(jb.where(cond, jnp.array([1.0, 2.0]), 0))
      [[1. 2.]
       [0. 0.]]
    """
    name = "where"
    cond, a, b = _as_condition(name, cond), as_array(name, "a", a), as_array(name, "b", b)
    dtype, is_weak = jax.dtypes.result_type(a, b, return_weak_type_flag=True)
    try:
        jnp.broadcast_shapes(cond.shape, a.shape, b.shape)
    except ValueError as error:
        raise ValueError(
            f"{name}: cond, a and b must have shapes that broadcast against each other, got {cond.shape}, {a.shape} "
            f"and {b.shape}"
        ) from error
    a, b = (x if x.dtype == dtype else jax.lax.convert_element_type(x, dtype) for x in (a, b))
    rank = max(a.ndim, b.ndim, cond.ndim)
    selected = _where(None, a=_pad_rank(a, rank), b=_pad_rank(b, rank), cond=_pad_rank(cond, rank))
    return jax_versions.as_weak(selected) if is_weak else selected


@public_function(has_twin=False)
def where_backward(
    d_output: ArrayLike,
    cond: ArrayLike,
    *,
    a_shape: Sequence[int] | None = None,
    b_shape: Sequence[int] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Array, Array]:
    """Gradient of :func:`where`, both cotangents in one pass over `d_output`.

    ``da = where(cond, d_output, 0)`` and ``db = where(cond, 0, d_output)``, each summed over the axes along
    which `a` or `b` is broadcast.

    Args:
      d_output: the cotangent of the result, a floating or complex dtype.
      cond: as in :func:`where`; its shape must broadcast to that of `d_output`.
      a_shape: the shape of `a`, which must broadcast to that of `d_output`. Default: that of `d_output`.
      b_shape: the shape of `b`, likewise.

    Returns:
      ``(da, db)`` with the shapes of `a` and `b` and the dtype of `d_output`.

    Raises:
      TypeError: an argument is not an array, or `d_output` has no floating or complex dtype.
      ValueError: a shape does not broadcast to that of `d_output`.

    Numerical guarantees: elements that are not summed are those of `d_output` bit by bit, or 0. An element that is not
    selected contributes nothing, even if it is NaN or infinite. Sums are accumulated in float32 (float64 and complex
    numbers in their own dtype) and rounded once. Bit-equal from run to run.

    Gradient: derivatives of any order and in either mode exist.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> d_output, cond = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[True, False], [True, True]])
      >>> da, db = jb.where_backward(d_output, cond, b_shape=(2,))
      >>> print(da.tolist(), db.tolist())
      [[1.0, 0.0], [3.0, 4.0]] [0.0, 2.0]
    """
    name = "where_backward"
    d_output, cond = as_array(name, "d_output", d_output), _as_condition(name, cond)
    if not jnp.issubdtype(d_output.dtype, jnp.inexact):
        raise TypeError(f"{name}: d_output must have a floating or complex dtype, got {d_output.dtype}")
    shapes = []
    for argument, shape in (("cond", cond.shape), ("a_shape", a_shape), ("b_shape", b_shape)):
        shapes.append(d_output.shape if shape is None else tuple(shape))
        if not broadcasts(shapes[-1], d_output.shape):
            raise ValueError(
                f"{name}: {argument} must broadcast to the shape of d_output, {d_output.shape}, got {shapes[-1]}"
            )
    rank = d_output.ndim
    shapes_of_rank = ((1,) * (rank - len(shape)) + shape for shape in shapes[1:])
    gradients = _cotangents(d_output, _pad_rank(cond, rank), *shapes_of_rank)
    da, db = (jax.lax.squeeze(x, range(rank - len(shape))) for x, shape in zip(gradients, shapes[1:], strict=True))
    return da, db


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX. From here on, arrays have equal ranks.


def _select(cond: Array, a: Array, b: Array) -> Array:
    return of_bits(jnp.where(cond, as_bits(a), as_bits(b)), a.dtype)


def _reference_backward(d_output: Array, cond: Array, *, a_axes: Axes, b_axes: Axes) -> tuple[Array, Array]:
    zero = jnp.zeros((), d_output.dtype)
    pairs = (_select(cond, d_output, zero), a_axes), (_select(cond, zero, d_output), b_axes)
    da, db = (jnp.sum(x, axes, accumulation_dtype(x.dtype), keepdims=True) if axes else x for x, axes in pairs)
    return da, db


# ----------------------------------------------------------------------------------------------------------------------
# Ops: one per native kernel.

MAX_DIMENSIONS = 32

DIMENSIONS = ("...",)


def _limit_of_rank(*operands: Any) -> str | None:
    return f"there are more than {MAX_DIMENSIONS} dimensions" if operands[0].ndim > MAX_DIMENSIONS else None


def _limit_of_backward(d_output: Any, cond: Any, *, a_axes: Axes, b_axes: Axes) -> str | None:
    if (a_axes or b_axes) and np.dtype(d_output.dtype).name not in FLOATING_DTYPES:
        return f"there is no kernel for sums of {d_output.dtype}"
    return _limit_of_rank(d_output)


def _backward_types(d_output: Any, cond: Any, *, a_axes: Axes, b_axes: Axes) -> list[ShapeAndDtype]:
    def of_one(axes: Axes) -> ShapeAndDtype:
        shape = list(d_output.shape)
        for axis in axes:
            shape[axis] = 1
        return tuple(shape), np.dtype(accumulation_dtype(d_output.dtype)) if axes else d_output.dtype

    return [of_one(a_axes), of_one(b_axes)]


def _shape_parameters(dtype: Any, **shapes: Shape) -> dict[str, int]:
    """The plan parameters of shapes of equal ranks, one per size."""
    sizes = {f"{name}_size_{i}": size for name, shape in shapes.items() for i, size in enumerate(shape)}
    [rank] = {len(shape) for shape in shapes.values()}
    return {"rank": rank, "element_bytes": np.dtype(dtype).itemsize, **sizes}


def _plan_parameters(a: Any, b: Any, cond: Any) -> dict[str, int]:
    output = tuple(joint_size(*sizes) for sizes in zip(a.shape, b.shape, cond.shape, strict=True))
    return _shape_parameters(a.dtype, output=output, a=a.shape, b=b.shape, cond=cond.shape)


def _backward_plan_parameters(d_output: Any, cond: Any, **axes: Axes) -> dict[str, int]:
    (da, da_dtype), (db, db_dtype) = _backward_types(d_output, cond, **axes)
    whole = d_output.shape, d_output.dtype
    return {
        **_shape_parameters(d_output.dtype, d_output=d_output.shape, cond=cond.shape, da=da, db=db),
        "a_is_summed": (da, da_dtype) != whole,
        "b_is_summed": (db, db_dtype) != whole,
    }


def _shard_backward(
    kernel: ShardKernel, mesh_axes: ShardAxes, *operands: Array, a_axes: Axes, b_axes: Axes
) -> Sequence[Array]:
    """Where summed axes are split over devices, the shards' sums are added up."""
    rank = operands[0].ndim

    def total(cotangent: Array, axes: Axes) -> Array:
        split = tuple(name for axis in axes for name in mesh_axes.get(f"...{rank + axis}", ()))
        return jax.lax.psum(cotangent, split) if split else cotangent

    da, db = kernel(*operands)
    return total(da, a_axes), total(db, b_axes)


def _transpose_backward(
    avals: Sequence[Any], cotangents: Sequence[Array], cond: Array, *, a_axes: Axes, b_axes: Axes
) -> Sequence[Array]:
    [d_output] = avals
    [result] = WHERE(*(x.astype(d_output.dtype) for x in cotangents), cond)
    shape = d_output.shape
    return (result if result.shape == shape else reshard_like(jnp.broadcast_to(result, shape), d_output),)


# H100, time of plain JAX / kernel: 0.53 between elementwise operations (13 loops), 0.95 alone up to 64 MB (13 loops).
# Two cores: 0.6 to 0.9 up to 1 MB (9 loops).
_RULES = (
    on_gpu("XLA fuses a selection with its neighbours", fused),
    on_gpu("both copy at the speed of the L2 cache, and XLA keeps any layout", in_cache),
    on_cpu("calling a kernel takes longer than the selection", call_bound),
)

WHERE = define_op(
    name="where",
    operands={"a": DIMENSIONS, "b": DIMENSIONS, "cond": DIMENSIONS},
    results={"output": DIMENSIONS},
    reference=lambda a, b, cond: (_select(cond, a, b),),
    dtypes=DTYPES_OF_WHOLE_BYTES,
    guarantee=EXACT,
    plan_parameters=_plan_parameters,
    limit=_limit_of_rank,
    xla_rules=_RULES,
    broadcasts=("a", "b", "cond"),
    transposes={
        ("a", "b"): lambda avals, d_outputs, cond: _cotangents(d_outputs[0], cond, *(x.shape for x in avals)),
    },
)

WHERE_BACKWARD = define_op(
    name="where_backward",
    operands={"d_output": DIMENSIONS, "cond": DIMENSIONS},
    results={"da": DIMENSIONS, "db": DIMENSIONS},
    result_types=_backward_types,
    reference=_reference_backward,
    dtypes=DIFFERENTIABLE_DTYPES,
    # Of sums, for dtypes that kernels sum. Elements that are not summed are exact.
    guarantee=lambda dtype, platform: accumulated(dtype, platform) if dtype in FLOATING_DTYPES else EXACT,
    plan_parameters=_backward_plan_parameters,
    shard_program=_shard_backward,
    limit=_limit_of_backward,
    xla_rules=_RULES,
    broadcasts=("cond",),
    transposes={("d_output",): _transpose_backward},
)


# ----------------------------------------------------------------------------------------------------------------------
# Derivative rules.


def _forward(params: None, *, a: Array, b: Array, cond: Array) -> tuple[Array, Array]:
    return WHERE(a, b, cond)[0], cond


def _backward(params: None, cond: Array, d_output: Array, types: Mapping[str, Any]) -> dict[str, Array | None]:
    shapes = (None if types[name] is None else types[name].shape for name in ("a", "b"))
    da, db = _cotangents(d_output, cond, *shapes)
    return {"a": da, "b": db}


_where = KernelVjp("where", _forward, _backward, symbolic_zeros=True)


def _cotangents(d_output: Array, cond: Array, a_shape: Shape | None, b_shape: Shape | None) -> list[Array | None]:
    """The cotangents of operands of these shapes, or None where the shape is None."""
    axes_of_each = [None if shape is None else _repeated_axes(shape, d_output.shape) for shape in (a_shape, b_shape)]
    native = [None if axes is None else _largest_contiguous_axes(axes, d_output.shape) for axes in axes_of_each]
    a_axes, b_axes = native
    if a_axes is not None and b_axes is not None and (not a_axes or not b_axes or a_axes == b_axes):
        gradients = WHERE_BACKWARD(d_output, cond, a_axes=a_axes, b_axes=b_axes)
    else:
        gradients = [None if axes is None else _one_cotangent(d_output, cond, axes, k) for k, axes in enumerate(native)]
    return [
        None if gradient is None else _summed(gradient, axes).astype(d_output.dtype)
        for gradient, axes in zip(gradients, axes_of_each, strict=True)
    ]


def _one_cotangent(d_output: Array, cond: Array, axes: Axes, k: int) -> Array:
    """The cotangent of `a` (k = 0) or `b` (k = 1), without writing the other one."""
    if axes:
        return WHERE_BACKWARD(d_output, cond, a_axes=axes, b_axes=axes)[k]
    zero = jnp.zeros((1,) * d_output.ndim, d_output.dtype)
    [selected] = WHERE(*((zero, d_output) if k else (d_output, zero)), cond)
    return selected


def _summed(gradient: Array, axes: Axes) -> Array:
    """Completes a kernel's sum over some of these axes to the sum over all of them."""
    rest = [axis for axis in axes if gradient.shape[axis] != 1]
    return jnp.sum(gradient, rest, keepdims=True) if rest else gradient


def _repeated_axes(shape: Shape, whole: Shape) -> Axes:
    """The axes along which `shape` is broadcast to `whole`."""
    rank = len(whole)
    return tuple(axis - rank for axis, sizes in enumerate(zip(shape, whole, strict=True)) if sizes[0] == 1 != sizes[1])


def _largest_contiguous_axes(axes: Axes, shape: Shape) -> Axes:
    """The group of adjacent axes with the most elements: a kernel sums one such group."""
    groups: list[Axes] = [()]
    for axis in axes:
        last = groups[-1]
        are_neighbours = last and all(size == 1 for size in shape[last[-1] + 1 : axis])
        groups = [*groups[:-1], (*last, axis)] if are_neighbours else [*groups, (axis,)]
    return max(groups, key=lambda group: math.prod(shape[axis] for axis in group) if group else -1)


def _pad_rank(array: Array, rank: int) -> Array:
    """Prepends dimensions of size 1."""
    return jax.lax.expand_dims(array, range(rank - array.ndim))


# ----------------------------------------------------------------------------------------------------------------------
# Canonicalisation of arguments.


def _as_condition(name: str, cond: ArrayLike) -> Array:
    """The condition as bool or uint8."""
    cond = as_array(name, "cond", cond)
    return cond if cond.dtype in (np.bool_, np.uint8) else cond != 0
