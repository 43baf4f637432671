"""Rotation of queries and keys with appends of keys and values to a paged cache, step by step inside a loop."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_baracuda
from benchmarks.harness import BRIEF, Case, Contender
from benchmarks.record import FORWARD
from benchmarks.rope import BASE
from benchmarks.write_rows import CPU_POOLS, Pools, in_loops, make_pools, make_rows, make_slots, scatter
from jax_baracuda._examples.rope import rotate_halves

State = tuple[list[jax.Array], jax.Array, jax.Array]
"""The caches, the rotated queries and the positions."""

QUERY_HEADS = 32
GPU_POOLS = (
    *(Pools(rows, slots=65_536) for rows in (1, 32, 128, 512, 8192)),
    *(Pools(rows, slots=16_384, layers=4) for rows in (32, 512)),
    *(Pools(rows, slots=65_536, heads_first=True) for rows in (32, 512)),
    *(Pools(rows, slots=65_536, dtype="float8_e4m3fn") for rows in (32, 512, 8192)),
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
    """The state of a loop has the positions, which grow by one in each step, and the queries of the last step."""
    rng = np.random.default_rng(0)
    rows = [make_rows(rng, pools, heads) for heads in (QUERY_HEADS, pools.heads, pools.heads)]
    positions = rng.integers(0, 10_000, pools.rows)

    def make_state() -> State:
        return make_pools(pools), jnp.zeros_like(rows[0]), jnp.asarray(positions, jnp.int32)

    return in_loops(pools, _rope_write, _rotate_and_scatter, make_state, rows, make_slots(rng, pools))


def _rope_write(pools: Pools, state: State, rows: Any, slots: jax.Array, layer: jax.Array) -> State:
    dests, _, positions = state
    own = layer if pools.layers else None
    q, *dests = jax_baracuda.rope_write(*rows, *dests, positions, slots, interleaved=False, axis=pools.axis, layer=own)
    return dests, q, positions + 1


def _rotate_and_scatter(
    pools: Pools, state: State, rows: Any, slots: jax.Array, layer: jax.Array, unique_indices: bool = False
) -> State:
    (dests, _, positions), (q, k, v) = state, rows
    inv_freq = BASE ** (-np.arange(0, pools.features, 2, dtype=np.float32) / pools.features)
    angles = (positions.astype(jnp.float32)[:, None] * inv_freq)[:, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    q, k = (rotate_halves(x.astype(jnp.float32), cos, sin).astype(x.dtype) for x in (q, k))
    return scatter(pools, dests, [k, v], slots, layer, unique_indices), q, positions + 1
