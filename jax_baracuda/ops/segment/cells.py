"""What the plain-JAX references of the segment ops share. A cell is one (segment, feature) pair of a result."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def _dropping(reduction: Callable[..., Array]) -> Callable[[Array, Array, int], Array]:
    """A reduction of ``jax.ops`` that drops every id out of range: XLA takes them modulo 2^32 on CPUs."""

    def reduce(data: Array, ids: Array, num_segments: int) -> Array:
        return reduction(data, jnp.where((ids >= 0) & (ids < num_segments), ids, -1), num_segments)

    return reduce


xla_max, xla_min, xla_sum, xla_prod = (
    _dropping(reduction)
    for reduction in (jax.ops.segment_max, jax.ops.segment_min, jax.ops.segment_sum, jax.ops.segment_prod)
)


def per_row(values: Array, like: Array) -> Array:
    """Values of shape ``[N]`` as ``[N, 1, ...]``, to combine with rows (or cells) of the rank of `like`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def gather_segments(cells: Array, ids: Array) -> tuple[Array, Array]:
    """Each row's cells ``[N, ...]``, and whether the row belongs to a segment ``[N, 1, ...]``."""
    is_member = per_row((ids >= 0) & (ids < cells.shape[0]), cells)
    if cells.shape[0] == 0:
        return jnp.zeros((*ids.shape, *cells.shape[1:]), cells.dtype), is_member
    return jnp.take(cells, ids, axis=0, mode="clip"), is_member


def row_numbers(rows: Array) -> Array:
    return per_row(jnp.arange(rows.shape[0], dtype=jnp.int32), rows)


def same_value(x: Array, y: Array) -> Array:
    """Whether two values are equal, a NaN equal to any NaN."""
    return (x == y) | ((x != x) & (y != y))
