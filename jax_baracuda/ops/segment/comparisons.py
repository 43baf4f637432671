"""How numbers compare, on every backend: NaN propagates, -0 is below +0, and subnormal numbers are not zeros."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_baracuda._core.sharding import MeshAxes
from jax_baracuda.ops.segment.cells import xla_max, xla_min
from jax_baracuda.ops.segment.definitions import merge_over_shards


def _has_ordered_bits(dtype: Any) -> bool:
    """Whether to compare by bits: all floats except 8-bit ones, which XLA compares correctly in a wider dtype."""
    return jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize > 1


def equal_numbers(x: Array, y: Array) -> Array:
    """``x == y``, by the bits of floating numbers: on CPUs, XLA compares subnormal numbers as zeros."""
    if not _has_ordered_bits(x.dtype):
        return x == y
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits_of_x, bits_of_y = (jax.lax.bitcast_convert_type(z, integer) for z in (x, y))
    # -0 and +0 are equal: all their bits except the sign are 0.
    are_zeros = (bits_of_x | bits_of_y) << 1 == 0
    return ((bits_of_x == bits_of_y) & ~jnp.isnan(y)) | are_zeros


def same_value(x: Array, y: Array) -> Array:
    """Whether two values are equal, where any NaN equals any NaN."""
    return equal_numbers(x, y) | ((x != x) & (y != y))


# ----------------------------------------------------------------------------------------------------------------------
# Extrema.


def identity_of(dtype: Any, minimum: bool) -> np.ndarray:
    """The extremum of no rows."""
    if jnp.issubdtype(dtype, jnp.inexact):
        value = math.inf if minimum else -math.inf
    elif dtype == jnp.bool_:
        value = minimum
    else:
        value = jnp.iinfo(dtype).max if minimum else jnp.iinfo(dtype).min
    return np.asarray(value, dtype)


def _ordered(x: Array, nan_is_least: bool = False) -> Array:
    """Maps floating numbers to integers of the same order, with NaN above (or below) all others and -0 below +0."""
    signed = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), signed)
    ordered = jnp.where(bits < 0, bits ^ jnp.iinfo(signed).max, bits)
    return jnp.where(jnp.isnan(x), jnp.iinfo(signed).min, ordered) if nan_is_least else ordered


def _from_ordered(ordered: Array, dtype: Any) -> Array:
    return jax.lax.bitcast_convert_type(jnp.where(ordered < 0, ordered ^ jnp.iinfo(ordered.dtype).max, ordered), dtype)


def xla_extrema(data: Array, ids: Array, num_segments: int, minimum: bool) -> Array:
    return (xla_min if minimum else xla_max)(data, ids, num_segments)


def extrema_of_segments(data: Array, ids: Array, num_segments: int, minimum: bool) -> Array:
    """The extremum of each segment.

    A minimum is not a negated maximum: in some fusions XLA computes ``-x`` as ``0 - x``, which is never -0.
    """
    if not _has_ordered_bits(data.dtype):
        return xla_extrema(data, ids, num_segments, minimum)
    ordered = _ordered(data, nan_is_least=minimum)
    # Devices that share rows reduce these cells, and collective libraries have no 16-bit integers.
    wide = ordered.astype(jnp.int32) if ordered.dtype.itemsize < 4 else ordered
    cells = xla_extrema(wide, ids, num_segments, minimum)
    infinity = _ordered(jnp.asarray(identity_of(data.dtype, minimum))).astype(cells.dtype)
    clipped = jnp.minimum(cells, infinity) if minimum else jnp.maximum(cells, infinity)
    return _from_ordered(clipped.astype(ordered.dtype), data.dtype)


def _by_order(reduce: Callable[[Array], Array], x: Array, minimum: bool) -> Array:
    """Reduces integers of the same order as `x`."""
    if not _has_ordered_bits(x.dtype):
        return reduce(x)
    return _from_ordered(reduce(_ordered(x, nan_is_least=minimum)), x.dtype)


def extrema_of_stacked(x: Array, minimum: bool) -> Array:
    """The extrema along the first axis, which numbers shards or buckets."""
    return _by_order(lambda x: x.min(0) if minimum else x.max(0), x, minimum)


def extrema_over_shards(
    local_output: Array, row_axes: MeshAxes, segment_axes: MeshAxes = (), *, minimum: bool
) -> Array:
    """The extrema over all shards. If the row axes also split the segments, each device gets its own segments."""
    if segment_axes == row_axes or local_output.dtype.itemsize < 4:  # an all-reduce needs at least 32 bits
        return merge_over_shards(lambda x: [extrema_of_stacked(x, minimum)], [local_output], row_axes, segment_axes)[0]
    # The minimum is the complement of the maximum of complements.
    reduce = (lambda x: ~jax.lax.pmax(~x, row_axes)) if minimum else (lambda x: jax.lax.pmax(x, row_axes))
    return _by_order(reduce, local_output, minimum)
