"""Rotates queries and keys, and writes keys and values to slots of a paged cache: one launch for a step of a server.

The rotation is that of :mod:`jax_baracuda.ops.rope`, the write that of :mod:`jax_baracuda.ops.write_rows`, and so are
the derivatives: the gradient of the caches and rows, then the rotation by the negative angles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_baracuda._core.arrays import (
    FLOATING_DTYPES,
    accumulation_dtype,
    check_same_dtype,
    check_shape,
    floating_array,
    index_array,
    is_integer,
)
from jax_baracuda._core.autodiff import vjp_of_linear
from jax_baracuda._core.functions import Params, with_named
from jax_baracuda._core.guarantees import accumulated
from jax_baracuda._core.op import NamedDimensions
from jax_baracuda._core.primitives import define_op
from jax_baracuda._core.public import public_function
from jax_baracuda._core.selection import Implementation
from jax_baracuda.ops.rope import (
    ADVICE_ON_SECTIONS,
    ATTRIBUTES_OF_ROTATION,
    ROPE,
    Rotation,
    integer_positions,
    positions_limit,
    reference_rotation,
    rope,
)
from jax_baracuda.ops.rope_frequencies import DEFAULT_BASE
from jax_baracuda.ops.write_rows import (
    ATTRIBUTES_OF_WRITE,
    CONVERTIBLE_POOLS,
    PoolNames,
    WriteOperands,
    checked_write,
    kernel_converts,
    other_dimensions,
    pool_dimensions,
    reference_write,
    row_dimensions,
    shard_write,
    transpose_write,
    unique_first,
)


@public_function(rope)
def rope_write(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    positions: ArrayLike,
    slots: ArrayLike,
    *,
    base: float = DEFAULT_BASE,
    interleaved: bool = True,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    inv_freq: ArrayLike | None = None,
    scale: float = 1.0,
    axis: int = 0,
    layer: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[Array, Array, Array]:
    """:func:`rope_qk` of the queries and keys of tokens, then :func:`write_rows` of keys and values, in one launch.

    ``q, k = rope_qk(q, k, positions)``, ``key_cache[slots[t]] = k[t]``, ``value_cache[slots[t]] = v[t]`` for each token
    t, as a function that returns the rotated queries and the new caches.

    Args:
      q: ``[T, H, D]``, the queries of T tokens, of any sequences; a real floating dtype.
      k: ``[T, K, D]``, with the dtype of `q`. The number of heads may differ.
      v: ``[T, V, E]``, with the dtype of `q`. Heads and features may differ from those of `k`.
      key_cache: ``[slots, K, D]``, or ``[K, slots, D]`` with ``axis=1``; with `layer`, a dimension of layers comes
        first. Keys are rotated in the dtype of `k` and then converted to that of the cache, as by :func:`write_rows`.
      value_cache: ``[slots, V, E]``, or ``[V, slots, E]`` with ``axis=1``; with as many slots and layers.
      positions: ``[T]``, integers as in :func:`rope`; ``[sections, T]`` with `sections`.
      slots: ``[T]``, integers. Tokens with a negative slot, or one beyond the last, are rotated and not written. Of
        several tokens with the same slot, the last one is written.
      axis: the axis of slots in the caches, without the layers: 0, or 1 for heads first.
      layer: an integer, traced or not, if caches have a first dimension of layers. Only this layer is written; none
        if it is out of range.
      k_scale: divides the rotated keys in float32 before they are converted: one number, or ``[K]``. A constant for
        derivatives.
      v_scale: the same for the values: one number, or ``[V]``.

    Returns:
      ``(q, key_cache, value_cache)``: the rotated queries and the updated caches, with the shapes and dtypes of the
      arguments.

    Raises:
      TypeError: an argument is not an array or number, or has an unsuitable dtype.
      ValueError: shapes do not fit; options of the rotation are wrong as in :func:`rope`; `axis` is not 0 or 1. Nothing
        runs before these checks.

    In place: if caches are donated to ``jax.jit`` or carried by a loop, and not used afterwards, they are updated in
    their own memory. Otherwise, and outside of ``jax.jit``, XLA copies them first and the originals stay unchanged.

    Numerical guarantees: those of :func:`rope_qk` and :func:`write_rows`; with kernels, the same bits as one after the
    other. Bit-equal from run to run.

    Gradient: that of :func:`write_rows`, then the inverse rotation of the cotangents of queries and keys. No features
    are kept for the backward pass.

    Example:
      >>> import jax.numpy as jnp, jax_baracuda as jb
      >>> q, k, v = jnp.ones((3, 4, 8)), jnp.ones((3, 2, 8)), jnp.ones((3, 2, 8))  # [T, H, D], fewer keys than queries
      >>> caches, positions, slots = jnp.zeros((2, 16, 2, 8)), jnp.array([0, 7, 8]), jnp.array([5, 2, -1])
      >>> q_rotated, keys, values = jb.rope_write(q, k, v, *caches, positions, slots)
      >>> print(jnp.array_equal(q_rotated[0], q[0]), keys[5, 0, 0], values.sum())  # nothing turns at position 0
      True 1.0 32.0
    """
    name = "rope_write"
    options = Rotation(base, interleaved, rotary_dim, rotary_offset, sections, sections_interleaved, inv_freq, scale)
    rows = {argument: floating_array(name, argument, x) for argument, x in (("q", q), ("k", k), ("v", v))}
    _check_rows(name, rows)
    q = rows["q"]
    slots = index_array(name, "slots", slots)
    check_shape(name, "slots", slots, q.shape[:1], "[T]", why=", one for each token")
    if not is_integer(axis) or axis not in (0, 1):
        raise ValueError(f"{name}: axis must be 0 or 1, the axis of slots in caches [slots, H, D], got {axis!r}")
    names = [PoolNames("key_cache", "k", "k_scale"), PoolNames("value_cache", "v", "v_scale")]
    caches, scales = (key_cache, value_cache), (k_scale, v_scale)
    write = checked_write(name, names, caches, (rows["k"], rows["v"]), slots, axis, layer, scales)
    rotation, frequencies, _ = options.checked(name, "q", q.shape[2], np.dtype(accumulation_dtype(q.dtype)))
    positions = _checked_positions(name, positions, q.shape[0], rotation["sections"])
    if q.shape[0] == 0:
        return q, *write.pools
    operands = *write.flat(), q, frequencies, positions
    key_cache, value_cache, q = _rope_write(Params(write.params(axis), **rotation), *operands)
    return q, key_cache, value_cache


# ----------------------------------------------------------------------------------------------------------------------
# Reference in plain JAX. Operands are those of write_rows, then q, frequencies and positions.


_OF_TOKENS = {"heads_first": False, "constant_angles": None}
"""The params of a rotation of tokens, which are the sequence of a single example. So are their positions."""


def _reference(*operands: Array, **params: Any) -> list[Array]:
    own = WriteOperands.of(operands, params["has_layer"], params["scales"])
    [keys, values], [q, frequencies, positions] = own.rows, own.others
    rotate = with_named(reference_rotation, {**params, **_OF_TOKENS, "inverse": False})
    q, keys = rotate(q[None], keys[None], frequencies, jnp.expand_dims(positions, -2))
    caches = with_named(reference_write, params)(*own._replace(rows=[keys[0], values]).flat())
    return [*caches, q[0]]


# ----------------------------------------------------------------------------------------------------------------------
# The op.


_QUERIES = ("row", "q_head", "feature")


def _linear_dimensions(ranks: Sequence[int], axis: int, has_layer: bool) -> NamedDimensions:
    return {**pool_dimensions("dest", ranks, axis, has_layer), **row_dimensions("rows", ranks, axis)}


def _plan_parameters(
    *operands: Any, has_layer: bool, scales: Sequence[int], rotary_dim: int, rotary_offset: int, interleaved: bool
) -> dict[str, int]:
    own = WriteOperands.of(operands, has_layer, scales)
    q = own.others[0]
    return {
        "features": q.shape[2],
        "value_features": own.rows[1].shape[2],
        "rotary_dim": rotary_dim,
        "rotary_offset": rotary_offset,
        "interleaved": interleaved,
        "element_bytes": np.dtype(q.dtype).itemsize,
    }


MAX_ROTARY_DIM = 4096
"""The kernel on GPUs keeps the sines and cosines of a row in shared memory."""


def _limit(*operands: Any, has_layer: bool, scales: Sequence[int], sections: tuple[int, ...], rotary_dim: int) -> Any:
    own = WriteOperands.of(operands, has_layer, scales)
    if rotary_dim > MAX_ROTARY_DIM:
        return f"kernels rotate at most {MAX_ROTARY_DIM} features, not {rotary_dim}"
    for pool, rows, kind in zip(own.pools, own.rows, scales, strict=True):
        if rows.dtype.name not in FLOATING_DTYPES or not kernel_converts(rows.dtype, pool.dtype, kind != 0):
            return f"kernels do not convert {rows.dtype.name} to {pool.dtype.name}"
    return positions_limit(*operands, sections=sections)


WRITE_PARAMS = ("ranks", "axis", "has_layer", "scales", "has_unique_slots")


def _transpose(types: Sequence[Any], cotangents: Sequence[Array], *others: Array, **params: Any) -> list[Array | None]:
    """The cotangents of caches, keys, values and queries. None for those of integer caches."""
    d_caches, d_q = cotangents[:2], cotangents[2]
    *of_write, frequencies, positions = others
    write = {name: params.pop(name) for name in WRITE_PARAMS}
    d_key_cache, d_value_cache, d_k, d_v = transpose_write(types[:4], d_caches, *of_write, **write)
    features = [x[None] for x in (d_q, d_k) if x is not None]
    rotated = ROPE(
        *features,
        frequencies,
        jnp.expand_dims(positions, -2),
        num_arrays=len(features),
        inverse=True,
        **_OF_TOKENS,
        **params,
    )
    return [d_key_cache, d_value_cache, None if d_k is None else rotated[1][0], d_v, rotated[0][0]]


def _dtypes(*, scales: Sequence[int] | None = None) -> frozenset[str]:
    """Those of queries, keys and values. In a call, whose params are known, also those of caches that convert."""
    return FLOATING_DTYPES if scales is None else FLOATING_DTYPES | CONVERTIBLE_POOLS


ROPE_WRITE = define_op(
    name="rope_write",
    operands=lambda *, ranks, axis, has_layer, scales, sections: {
        **_linear_dimensions(ranks, axis, has_layer),
        **other_dimensions(ranks, axis, has_layer, scales),
        "q": _QUERIES,
        "frequencies": ("part", "pair"),
        "positions": (*(("section",) if len(sections) > 0 else ()), "row"),
    },
    results=lambda *, ranks, axis, has_layer: {
        **pool_dimensions("result", ranks, axis, has_layer),
        "q_out": _QUERIES,
    },
    result_dtypes=lambda *operands: [operands[0].dtype, operands[1].dtype, operands[-3].dtype],
    reference=_reference,
    dtypes=_dtypes,
    guarantee=accumulated,
    attributes=(*ATTRIBUTES_OF_WRITE, *ATTRIBUTES_OF_ROTATION),
    plan_parameters=_plan_parameters,
    limit=_limit,
    alternatives=unique_first(lambda: ROPE_WRITE),
    # The features of keys are those of the last dimension of the first pool.
    replicated_dims=("row", "section", "part", "pair", "feature", "0.2"),
    shard_program=shard_write,
    in_place={0: 0, 1: 1},
    transposes=lambda *, ranks, axis, has_layer: {(*_linear_dimensions(ranks, axis, has_layer), "q"): _transpose},
)


_rope_write = vjp_of_linear("rope_write", ROPE_WRITE)


# ----------------------------------------------------------------------------------------------------------------------
# Canonicalisation of arguments.


def _check_rows(name: str, rows: dict[str, Array]) -> None:
    q = rows["q"]
    for argument, x in rows.items():
        check_same_dtype(name, argument, x, "q", q)
        if x.ndim != 3:
            advice = ""
            if x.ndim == 4:
                advice = f"; for a batch [B, S, heads, features] pass {argument}.reshape(-1, *{argument}.shape[2:])"
            raise ValueError(f"{name}: {argument} must have shape [T, heads, features], got {x.shape}{advice}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(
                f"{name}: {argument} must have shape [T, heads, features] with as many tokens as q of shape {q.shape}, "
                f"got {x.shape}"
            )
    if rows["k"].shape[2] != q.shape[2]:
        raise ValueError(f"{name}: k must have as many features as q, {q.shape[2]}, got shape {rows['k'].shape}")


def _checked_positions(name: str, positions: ArrayLike, tokens: int, sections: tuple[int, ...]) -> Array:
    positions = integer_positions(name, positions)
    expected = (len(sections), tokens) if sections else (tokens,)
    letters = "[sections, T]" if sections else "[T]"
    advice = ADVICE_ON_SECTIONS if not sections and positions.ndim == 2 and positions.shape[0] == 3 else ""
    check_shape(name, "positions", positions, expected, letters, advice=advice)
    return positions
