"""Common parts of the plain-JAX references of the segment ops. A cell is one (segment, feature) pair of a result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import divided, in_range
from jax_baracuda._core.selection import not_redirected
from jax_baracuda.ops.segment.ids import index_dtype


def _dropping(reduction: Callable[..., Array]) -> Callable[[Array, Array, int], Array]:
    """Makes a reduction of ``jax.ops`` drop every id out of range: on CPUs, XLA takes 64-bit ids modulo 2^32."""

    def reduce(data: Array, ids: Array, num_segments: int) -> Array:
        if ids.dtype.itemsize > np.dtype(np.int32).itemsize:
            ids = jnp.where(in_range(ids, num_segments), ids, -1)
        with not_redirected():  # a redirected call may end in this reference, which must not be redirected again
            return reduction(data, ids, num_segments)

    return reduce


xla_max, xla_min, xla_prod, _running_sum = (
    _dropping(reduction)
    for reduction in (jax.ops.segment_max, jax.ops.segment_min, jax.ops.segment_prod, jax.ops.segment_sum)
)

MAX_ROWS_OF_RUNNING_SUM = 2**22
"""XLA adds all rows of a cell to one number, which stops growing: in float32, a sum of ones stays at 2^24."""
BLOCK_ROWS = 2**16
MIN_ROWS_PER_CELL = 8
"""Limits the cells of all blocks to a fraction of the rows."""


def sum_in_blocks(add: Callable[[Array, int], Array], ids: Array, num_segments: int) -> Array:
    """Sums of floating numbers. Many rows are added in blocks, and then the blocks, for accuracy.

    More segments mean longer blocks, so a segment with most of the rows may still be added up in a single block.

    Args:
      add: ``(ids, number of cells) -> sums of rows by their ids [number of cells, ...]``. It drops ids out of range.
      ids: of any rank.
    """
    num_blocks = 1
    if jax_versions.is_static_shape((*ids.shape, num_segments)) and num_segments > 0:
        num_rows = math.prod(ids.shape)
        if num_rows > MAX_ROWS_OF_RUNNING_SUM:
            max_cells = min(num_rows // MIN_ROWS_PER_CELL, int(jnp.iinfo(ids.dtype).max))
            num_blocks = min(num_rows // BLOCK_ROWS, max_cells // num_segments)
    if num_blocks < 2:
        return add(ids, num_segments)
    numbers = jnp.repeat(jnp.arange(num_blocks, dtype=ids.dtype), -(-num_rows // num_blocks))
    block = numbers[:num_rows].reshape(ids.shape)
    is_member = in_range(ids, num_segments)
    cells = add(jnp.where(is_member, ids + block * num_segments, -1), num_blocks * num_segments)
    return cells.reshape(num_blocks, num_segments, *cells.shape[1:]).sum(0)


def are_added_one_by_one(row_shape: Sequence[int], dtype: np.dtype) -> bool:
    """Whether XLA adds the numbers of a row one by one on GPUs.

    It adds vectors of 16 bytes along the last axis. Where these do not fit, as in rows ``[F, 3]``, adding flat rows
    takes a third of the time. On CPUs, a reshape costs nothing.
    """
    if len(row_shape) < 2 or not jax_versions.is_static_shape(row_shape[-1:]):
        return False
    return row_shape[-1] * dtype.itemsize % 16 != 0


def xla_sum(rows: Array, ids: Array, num_segments: int) -> Array:
    row_shape = rows.shape[ids.ndim :]
    if are_added_one_by_one(row_shape, rows.dtype):
        rows = rows.reshape(*ids.shape, math.prod(row_shape))
    return _sum_of_rows(rows, ids, num_segments).reshape(num_segments, *row_shape)


def _sum_of_rows(rows: Array, ids: Array, num_segments: int) -> Array:
    if jax_versions.is_static_shape((num_segments,)) and num_segments == 0:
        # JAX would transpose this scatter into a gather from nothing, which it refuses.
        return jnp.zeros((0, *rows.shape[1:]), rows.dtype)
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        return _running_sum(rows, ids, num_segments)
    return sum_in_blocks(lambda ids, num_cells: _running_sum(rows, ids, num_cells), ids, num_segments)


def per_row(values: Array, like: Array) -> Array:
    """Values of shape ``[N]`` as ``[N, 1, ...]``, to combine with rows (or cells) of the rank of `like`."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def gather_segments(cells: Array, ids: Array) -> tuple[Array, Array]:
    """Each row's cells ``[N, ...]``, and whether the row belongs to a segment ``[N, 1, ...]``."""
    is_member = per_row(in_range(ids, cells.shape[0]), cells)
    if cells.shape[0] == 0:
        return jnp.zeros((*ids.shape, *cells.shape[1:]), cells.dtype), is_member
    return jnp.take(cells, ids, axis=0, mode="clip"), is_member


MIN_WIDTH_OF_A_SELECT = 64


def gather_or_zeros(cells: Array, ids: Array) -> Array:
    """The cells that ids of 32 or 64 bits name, zeros for ids out of range.

    These come from a select, as in JAX. It leaves XLA free to fuse what computes the cells: with an extra row of zeros
    behind them, a step of a network with rows of 64 and 512 numbers took 1.1 times as long. Narrow rows have that row,
    because XLA gathers them in half the time without a select.
    """
    num_cells, *row_shape = cells.shape
    if jax_versions.is_static_shape(cells.shape) and num_cells > 0 and math.prod(row_shape) >= MIN_WIDTH_OF_A_SELECT:
        return cells.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    behind = jnp.concatenate([cells, jnp.zeros((1, *row_shape), cells.dtype)])
    unsigned = ids.astype(f"uint{8 * ids.dtype.itemsize}")  # negative ids become large ones
    return behind.at[jnp.minimum(unsigned, num_cells)].get(mode="promise_in_bounds")


def reduce_in_pairs(combine: Callable[[Any, Any], Any], identity: Any, rows: Any, ids: Array, num_segments: int) -> Any:
    """Combines the rows of each segment two by two, in a fixed order.

    Unlike in a scan, each row enters the result once and no other values are computed. JAX's derivatives of any order
    are therefore products of other rows: without divisions, and without zero cotangents that meet infinities.

    Args:
      combine: an associative function of two pytrees of rows.
      identity: a pytree of scalars.
      rows: a pytree of ``[N, ...]``.
    """
    num_rows = ids.shape[0]
    if num_rows == 0 or num_segments == 0:
        return jax.tree.map(lambda x, one: jnp.full((num_segments, *x.shape[1:]), one, x.dtype), rows, identity)

    def select(where: Array, rows: Any, others: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(per_row(where, x), x, y), rows, others)

    def take(rows: Any, row: Array) -> Any:
        return jax.tree.map(lambda x: jnp.take(x, row, axis=0, mode="clip"), rows)

    order = jnp.argsort(ids, stable=True)
    ids, rows = ids[order], take(rows, order)
    row = jnp.arange(num_rows, dtype=index_dtype(num_rows))
    first = xla_min(row, ids, num_segments)
    first_of_row, is_member = gather_segments(first, ids)
    rank = row - first_of_row
    num_steps = (num_rows - 1).bit_length() if jax_versions.is_static_shape(ids.shape) else 31
    for step in range(num_steps):
        distance = 2**step
        partner_of = functools.partial(jnp.roll, shift=-distance, axis=0)
        has_partner = (
            is_member & (rank & (2 * distance - 1) == 0) & (row < num_rows - distance) & (partner_of(ids) == ids)
        )
        # Rows without a partner combine identities, so that their infinities meet no zero cotangents.
        pair = (select(has_partner, x, identity) for x in (rows, jax.tree.map(partner_of, rows)))
        rows = select(has_partner, combine(*pair), rows)
    is_empty = first == jnp.iinfo(first.dtype).max
    return select(~is_empty, take(rows, first), identity)


def sum_in_float64(rows: Array, ids: Array, num_segments: int) -> Array:
    """Sums of rows of at most 32 bits, rounded to float32."""
    with jax.enable_x64(True):  # elsewhere, float64 may not exist
        return xla_sum(rows.astype(jnp.float64), ids, num_segments).astype(jnp.float32)


def row_numbers(rows: Array) -> Array:
    return per_row(jnp.arange(rows.shape[0], dtype=index_dtype(rows.shape[0])), rows)


def over_counts(total: Array, counts: Array) -> Array:
    """Totals divided by the row counts ``[S]``. Totals without rows stay 0."""
    return divided(total, per_row(jnp.maximum(counts, 1), total).astype(total.dtype))
