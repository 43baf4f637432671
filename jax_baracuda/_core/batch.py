"""The dimensions that ``vmap`` adds in front of the operands and results of an op.

If ``vmap`` does not map an operand, its added dimension has size 1: the batch shares the operand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_baracuda._core import jax_versions


def joint_size(*sizes: int) -> int:
    """The size of a dimension after broadcasting: size 1 takes the others' size."""
    return next((size for size in sizes if size != 1), 1)


def vmap_sizes(operands: Sequence[Any], num_batch_dims: int) -> tuple[int, ...]:
    """The sizes of the batch dimensions, after broadcasting the operands. Some operands may be None, here and below."""
    return tuple(joint_size(*(x.shape[i] for x in operands if x is not None)) for i in range(num_batch_dims))


def is_shared(shape: Sequence[int], num_batch_dims: int) -> bool:
    """Whether the whole batch shares an operand of this shape."""
    return all(size == 1 for size in shape[:num_batch_dims])


def with_mapped_dim(operands: Sequence[jax.Array], axes: Sequence[int | None]) -> tuple[list[jax.Array], int]:
    """The operands of a batching rule with the mapped dimension in front, and its size; unmapped ones have size 1."""
    arrays = [x[None] if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)]
    return arrays, joint_size(*(x.shape[0] for x in arrays))


MappedDims = Sequence[Sequence[bool]]
"""For each batch dimension, which operands it maps."""


def mapped_dims(operands: Sequence[Any], num_batch_dims: int) -> MappedDims:
    """Which operands each batch dimension maps: those with its full size."""
    sizes = vmap_sizes(operands, num_batch_dims)
    return [[x is not None and x.shape[i] == size for x in operands] for i, size in enumerate(sizes)]


def map_over_batch(function: Callable[..., Any], num_batch_dims: int, *operands: jax.Array | None) -> Any:
    """Maps a function over the batch dimensions of the operands; the function does not see them."""
    return map_over_dims(function, mapped_dims(operands, num_batch_dims), *operands)


def map_over_dims(function: Callable[..., Any], mapped: MappedDims, *operands: jax.Array | None) -> Any:
    """The same, where sizes do not tell which operands a dimension maps, as in the program of a shard."""
    if not mapped:
        return function(*operands)
    inner = functools.partial(map_over_dims, function, mapped[1:])
    operands = tuple(
        x if is_mapped or x is None else jax.lax.squeeze(x, [0])
        for x, is_mapped in zip(operands, mapped[0], strict=True)
    )
    return jax.vmap(inner, [0 if is_mapped else None for is_mapped in mapped[0]])(*operands)


def map_together(results: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the results. If ``vmap`` maps any of the results or arrays, it then maps all results.

    For functions with a result that depends on only some of the arrays. If ``vmap`` maps only some results of a
    ``jax.custom_vjp`` function, JAX counts the cotangents of the others once per element of the batch.
    """
    return tuple(_map_together.bind(*results, *arrays, num_results=len(results)))


def _first(*values: Any, num_results: int) -> list[Any]:
    return list(values[:num_results])


def _batch(
    values: Sequence[jax.Array], axes: Sequence[int | None], *, num_results: int
) -> tuple[list[jax.Array], list[int]]:
    arrays, size = with_mapped_dim(values, axes)
    mapped = [jnp.broadcast_to(x, (size, *x.shape[1:])) for x in arrays]
    return _map_together.bind(*mapped, num_results=num_results), [0] * num_results


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, num_results: int
) -> tuple[list[jax.Array], list[Any]]:
    return _map_together.bind(*primals, num_results=num_results), list(tangents[:num_results])


def _transpose(cotangents: Sequence[Any], *values: Any, num_results: int) -> list[Any]:
    return [*cotangents, *[None] * (len(values) - num_results)]


_map_together = jax_versions.primitive_of(
    "baracuda_map_together", _first, _first, batch=_batch, jvp=_jvp, transpose=_transpose
)
