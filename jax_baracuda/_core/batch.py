"""The dimensions that ``vmap`` adds in front of the operands and results of an op.

An operand that a ``vmap`` does not map has a size of 1 there: the batch shares it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax


def joint_size(*sizes: int) -> int:
    """The size of a dimension that arrays with these sizes have together; those of size 1 are broadcast."""
    return next((size for size in sizes if size != 1), 1)


def vmap_sizes(operands: Sequence[Any], num_batch_dims: int) -> tuple[int, ...]:
    """The sizes of the batch dimensions that the operands form together."""
    return tuple(joint_size(*(x.shape[i] for x in operands)) for i in range(num_batch_dims))


def is_shared(shape: Sequence[int], num_batch_dims: int) -> bool:
    """Whether the whole batch shares an operand of this shape."""
    return all(size == 1 for size in shape[:num_batch_dims])


MappedDims = Sequence[Sequence[bool]]
"""Of each batch dimension, which operands it maps."""


def mapped_dims(operands: Sequence[Any], num_batch_dims: int) -> MappedDims:
    """Which operands each batch dimension maps, by their sizes."""
    sizes = vmap_sizes(operands, num_batch_dims)
    return [[x.shape[i] == size for x in operands] for i, size in enumerate(sizes)]


def map_over_batch(function: Callable[..., Any], mapped: MappedDims, *operands: jax.Array) -> Any:
    """Maps a function of arrays without batch dimensions over those that they have."""
    if not mapped:
        return function(*operands)
    inner = functools.partial(map_over_batch, function, mapped[1:])
    operands = tuple(
        x if is_mapped else jax.lax.squeeze(x, [0]) for x, is_mapped in zip(operands, mapped[0], strict=True)
    )
    return jax.vmap(inner, [0 if is_mapped else None for is_mapped in mapped[0]])(*operands)
