"""Rotation of queries and keys with appends of keys and values to a paged cache, step by step inside a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_baracuda
from benchmarks.harness import Case, Contender
from benchmarks.record import FORWARD, OURS, XLA
from benchmarks.rope import BASE
from benchmarks.write_rows import Pools, scatter
from benchmarks.write_slice import BRIEF, STEPS, InPlaceContender
from jax_baracuda._examples.rope import rotate_halves

RotateAndWrite = Callable[..., Any]
"""``(pools, q, rows, positions, slots, layer) -> (pools, rotated q)``"""

QUERY_HEADS = 32
GPU_POOLS = (
    *(Pools(rows, slots=65_536) for rows in (1, 32, 128, 512, 8192)),
    *(Pools(rows, slots=16_384, layers=4) for rows in (32, 512)),
    *(Pools(rows, slots=65_536, heads_first=True) for rows in (32, 512)),
    *(Pools(rows, slots=65_536, dtype="float8_e4m3fn") for rows in (32, 512, 8192)),
)
CPU_POOLS = tuple(
    Pools(rows, slots=16_384, dtype=dtype, row_dtype=dtype) for dtype in ("float32", "bfloat16") for rows in (1, 8, 64)
)


def cases(backend: str, quick: bool = False) -> Iterator[Case]:
    """All cases for a kind of device."""
    for pools in GPU_POOLS if backend == "gpu" else CPU_POOLS:
        pools = pools.quick() if quick else pools
        of_queries = 2 * pools.rows * QUERY_HEADS * pools.features * jnp.dtype(pools.row_dtype).itemsize
        yield Case(
            op="rope_write",
            size=f"{pools.size}, {QUERY_HEADS} heads of queries",
            variant=pools.variant,
            what=FORWARD,
            floor_bytes=pools.step_bytes + of_queries,
            make_contenders=functools.partial(contenders, pools),
            tolerance=0.15,
            effort=BRIEF,
        )


# ----------------------------------------------------------------------------------------------------------------------
# Contenders


def contenders(pools: Pools) -> Iterator[Contender]:
    unique = functools.partial(_rotate_and_scatter, pools, unique_indices=True)
    for library, name, step in (
        (OURS, "", functools.partial(_rope_write, pools)),
        (XLA, ".at[slots].set", functools.partial(_rotate_and_scatter, pools)),
        (XLA, ".at[slots].set, unique_indices", unique),
    ):
        yield InPlaceContender(library, name, functools.partial(_loop, step, pools), *_operands(pools),
                               repetitions=STEPS)  # fmt: skip


def _operands(pools: Pools) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    heads = (QUERY_HEADS, pools.heads, pools.heads)
    rows = [jnp.asarray(rng.integers(-8, 8, (pools.rows, h, pools.features)), pools.row_dtype) for h in heads]
    positions = jnp.asarray(rng.integers(0, 10_000, pools.rows), jnp.int32)
    slots = jnp.asarray(rng.permutation(pools.slots)[: pools.rows], jnp.int32)
    dests = [jnp.zeros(pools.shape, pools.dtype) for _ in range(2)]
    return (dests, jnp.zeros_like(rows[0])), rows, positions, slots


def _loop(step: RotateAndWrite, pools: Pools, state: Any, rows: Any, positions: jax.Array, slots: jax.Array) -> Any:
    """Takes other positions and slots, and another layer, in each step. The queries are those of the last step."""
    q, *keys_and_values = rows

    def run(i: jax.Array, carry: Any) -> Any:
        (dests, _), positions, slots = carry
        state = step(dests, q, keys_and_values, positions, slots, i % max(pools.layers, 1))
        return state, positions + 1, (slots + pools.rows) % pools.slots

    return lax.fori_loop(0, STEPS, run, (state, positions, slots))[0]


def _rope_write(
    pools: Pools, dests: Any, q: jax.Array, rows: Any, positions: jax.Array, slots: jax.Array, layer: jax.Array
) -> Any:
    own = layer if pools.layers else None
    q, *dests = jax_baracuda.rope_write(
        q, rows[0], rows[1], dests[0], dests[1], positions, slots, interleaved=False, axis=pools.axis, layer=own
    )
    return dests, q


def _rotate_and_scatter(
    pools: Pools,
    dests: Any,
    q: jax.Array,
    rows: Any,
    positions: jax.Array,
    slots: jax.Array,
    layer: jax.Array,
    unique_indices: bool = False,
) -> Any:
    inv_freq = BASE ** (-np.arange(0, pools.features, 2, dtype=np.float32) / pools.features)
    angles = (positions.astype(jnp.float32)[:, None] * inv_freq)[:, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    q, k = (rotate_halves(x.astype(jnp.float32), cos, sin).astype(x.dtype) for x in (q, rows[0]))
    return scatter(pools, dests, [k, rows[1]], slots, layer, unique_indices), q
