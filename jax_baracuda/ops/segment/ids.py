"""Ids of rows and segments: checks and canonical forms."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import integer_array

Mode = jax.lax.GatherScatterMode | str | None


def clamps(name: str, mode: Mode) -> bool:
    """Whether ids out of range are clamped rather than dropped."""
    try:
        return jax.lax.GatherScatterMode.from_any(mode) == jax.lax.GatherScatterMode.CLIP
    except ValueError as error:
        raise ValueError(
            f"{name}: mode must be None, 'fill', 'drop', 'clip', 'promise_in_bounds', 'one_hot' or a "
            f"jax.lax.GatherScatterMode, got {mode!r}"
        ) from error


def canonical_edges(
    name: str,
    gather_ids: ArrayLike,
    segment_ids: ArrayLike,
    num_rows: int,
    num_segments: int,
    mode: Mode = None,
) -> tuple[Array, Array]:
    """The ids of edges, ``[E]``: gather ids as int32 that count from the front, and flat segment ids."""
    rows = integer_array(name, "gather_ids", gather_ids)
    segments = integer_array(name, "segment_ids", segment_ids)
    if segments.ndim != 1 or rows.shape != segments.shape:
        raise ValueError(
            f"{name}: gather_ids and segment_ids must have one shape [E], got {rows.shape} and {segments.shape}"
        )
    if not is_at_most(num_rows, jnp.int32):
        raise ValueError(f"{name}: at most 2^31 - 1 rows can be gathered from, got {num_rows}")
    check_num_segments(name, num_segments)
    # Negative ids are wrapped as in jax.numpy. Ids that do not fit in int32 become -1 or `num_rows`.
    rows = wrapped_ids(rows, num_rows)
    if rows.dtype.itemsize == 8 and jnp.issubdtype(rows.dtype, jnp.signedinteger):
        rows = jnp.clip(rows, -1, num_rows)
    elif rows.dtype.itemsize >= 4 and jnp.issubdtype(rows.dtype, jnp.unsignedinteger):
        rows = jnp.minimum(rows, num_rows)
    return rows.astype(jnp.int32), flat_ids(segments, num_segments, clamps(name, mode))


def check_num_segments(name: str, num_segments: int) -> None:
    if not is_at_most(num_segments, jnp.int32):
        raise ValueError(f"{name}: num_segments must be at most 2^31 - 1, got {num_segments}")


def is_at_most(size: int, dtype: Any) -> bool:
    """Whether a dtype can hold this size. Symbolic sizes are less than 2^31, as in JAX."""
    largest = size if jax_versions.is_static_shape((size,)) else np.iinfo(np.int32).max
    return largest <= np.iinfo(dtype).max


def index_dtype(size: int) -> Any:
    """The dtype of row or segment numbers up to `size`. int64 needs :func:`check_numbered` to have passed."""
    return np.int32 if is_at_most(size, np.int32) else np.int64


def clamped_ids(ids: Array, size: int) -> Array:
    """Ids clamped into ``[0, size)``, in 32 or 64 bits."""
    if ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)
    return jnp.clip(ids, 0, size - 1 if is_at_most(size, ids.dtype) else int(jnp.iinfo(ids.dtype).max))


def check_numbered(name: str, what: str, size: int) -> None:
    """Checks that JAX has a dtype that can number this many rows, segments or edges."""
    if index_dtype(size) == np.int64 and jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        raise ValueError(
            f"{name}: {size} {what} are 2^31 or more, whose numbers need int64; set "
            f'jax.config.update("jax_enable_x64", True), or split the {what}'
        )


def wrapped_ids(ids: Array, num_rows: int) -> Array:
    """Row ids with negative ids counted from the end once, as in ``jax.numpy``, in a dtype that fits the result."""
    if not jnp.issubdtype(ids.dtype, jnp.signedinteger):
        return ids
    if not is_at_most(num_rows, ids.dtype):
        ids = ids.astype(index_dtype(num_rows))
    return jnp.where(ids < 0, ids + num_rows, ids)


def static_size(name: str, argument: str, size: int) -> int:
    """A checked number of rows or segments. It may be symbolic, under :mod:`jax.export`."""
    if not hasattr(size, "__index__") and not jax.export.is_symbolic_dim(size):
        raise TypeError(f"{name}: {argument} must be an integer, got {size!r}")
    advice = "a Python integer, or an argument that static_argnames of jax.jit names"
    size = jax_versions.concrete_or_error(size, f"{name}: {argument} must be static: {advice}.")
    if size < 0:
        raise ValueError(f"{name}: {argument} must be non-negative, got {size}")
    return size


def flat_ids(ids: Array, num_segments: int, clamps_ids: bool) -> Array:
    """Ids as int32 or int64 ``[N]``. Ids that do not fit stay out of range, and ascending ids stay ascending."""
    if clamps_ids and num_segments != 0:
        ids = clamped_ids(ids, num_segments)
    return signed_ids(ids.reshape(-1) if ids.ndim != 1 else ids, num_segments)


def signed_ids(ids: Array, num_segments: int) -> Array:
    """Ids as int32 or int64. Ids that do not fit stay out of range, and ascending ids stay ascending."""
    signed = jnp.int64 if ids.dtype.itemsize == 8 or index_dtype(num_segments) == np.int64 else jnp.int32
    maximum = jnp.iinfo(signed).max
    if jnp.iinfo(ids.dtype).max > maximum and is_at_most(num_segments, signed):
        ids = jnp.minimum(ids, ids.dtype.type(maximum))  # a cast would wrap to negative ids, which break the order
    return ids if ids.dtype == signed else ids.astype(signed)
