"""The dimensions that ``vmap`` adds in front of the operands and results of an op."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_baracuda._core.params import count_batch_dims


def joint_batch(*sizes: int) -> int:
    """The size of the batch that operands with leading dimensions of these sizes form; 1 means shared."""
    return next((size for size in sizes if size != 1), 1)


def batch_of(*operands: Any) -> int:
    """The size of the batch that operands, arrays or their types, form with their leading dimensions."""
    return joint_batch(*(operand.shape[0] for operand in operands))


def over_batch(function: Callable[..., Any], *operands: jax.Array) -> Any:
    """Maps `function` over the leading dimension of the operands; where that is 1, the operand is shared."""
    batch = batch_of(*operands)
    mapped = [x if x.shape[0] == batch else x[0] for x in operands]
    return jax.vmap(function, [0 if x.shape[0] == batch else None for x in operands])(*mapped)


def over_outer_batches(function: Callable[..., Any], num_batch_dims: int, *operands: jax.Array) -> Any:
    """Maps a function of arrays with one batch dimension over those in front of it."""
    if num_batch_dims <= 1:
        return function(*operands)
    return over_batch(functools.partial(over_outer_batches, function, num_batch_dims - 1), *operands)


def joint_sizes(operands: Sequence[Any], num_batch_dims: int) -> tuple[int, ...]:
    """The sizes of the leading batch dimensions that the operands form together."""
    return tuple(joint_batch(*(x.shape[i] for x in operands)) for i in range(num_batch_dims))


def is_shared(shape: Sequence[int], num_batch_dims: int) -> bool:
    """Whether the whole batch shares an operand of this shape."""
    return all(size == 1 for size in shape[:num_batch_dims])


def _shape_with_one_batch(shape: Sequence[int], batch: tuple[int, ...]) -> tuple[int, ...]:
    """An array that the whole batch shares stays shared; any other has all of the batch."""
    return (1 if is_shared(shape, len(batch)) else math.prod(batch), *shape[len(batch) :])


def with_one_batch(avals: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    """The abstract operands of a call as the functions of a definition see them: with one batch dimension."""
    num_batch_dims = count_batch_dims(params)
    if num_batch_dims == 1:
        return avals
    batch = joint_sizes(avals, num_batch_dims)
    return [jax.ShapeDtypeStruct(_shape_with_one_batch(x.shape, batch), x.dtype) for x in avals]


def merge_batch(function: Callable[..., Sequence[jax.Array]], num_batch_dims: int) -> Callable[..., Any]:
    """A function of arrays with one batch dimension as one of arrays with several."""
    if num_batch_dims <= 1:
        return function

    def merged(*operands: jax.Array) -> list[jax.Array]:
        batch = joint_sizes(operands, num_batch_dims)
        flat = []
        for x in operands:
            shape = _shape_with_one_batch(x.shape, batch)
            if shape[0] != math.prod(x.shape[:num_batch_dims]):
                x = jnp.broadcast_to(x, (*batch, *x.shape[num_batch_dims:]))
            flat.append(x.reshape(shape))
        return [x.reshape(*batch, *x.shape[1:]) for x in function(*flat)]

    return merged
