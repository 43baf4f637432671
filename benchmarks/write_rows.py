"""Appends of keys and values to the pools of a paged cache, step by step inside a loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_baracuda
from benchmarks.harness import BRIEF, Case, Contender
from benchmarks.record import FORWARD, OURS, XLA
from benchmarks.write_slice import STEPS, InPlaceContender

Step = Callable[..., Any]
"""``(pools, state, rows, slots, layer) -> state``. The state, such as both arrays, is donated."""


@dataclasses.dataclass(frozen=True)
class Pools:
    """The pools of keys and values, and the number of rows that each step appends to both."""

    rows: int
    slots: int = 131_072
    layers: int = 0
    """0: no dimension of layers."""
    heads_first: bool = False
    dtype: str = "bfloat16"
    row_dtype: str = "bfloat16"
    heads: int = 8
    features: int = 128

    @property
    def axis(self) -> int:
        return 1 if self.heads_first else 0

    @property
    def shape(self) -> tuple[int, ...]:
        layers = (self.layers,) if self.layers else ()
        of_slots = (self.heads, self.slots) if self.heads_first else (self.slots, self.heads)
        return (*layers, *of_slots, self.features)

    @property
    def size(self) -> str:
        return f"2 × {' × '.join(map(str, self.shape))}, {self.rows} {'row' if self.rows == 1 else 'rows'}"

    @property
    def variant(self) -> str:
        names = ["layers" if self.layers else "", "heads first" if self.heads_first else ""]
        conversion = self.dtype if self.dtype == self.row_dtype else f"{self.row_dtype} to {self.dtype}"
        return ", ".join(filter(None, (*names, conversion)))

    @property
    def step_bytes(self) -> int:
        numbers = 2 * self.rows * self.heads * self.features
        return numbers * (jnp.dtype(self.dtype).itemsize + jnp.dtype(self.row_dtype).itemsize) + 4 * self.rows

    def quick(self) -> Pools:
        """A small version, to see that everything runs."""
        return dataclasses.replace(self, rows=min(self.rows, 8), slots=256)


GPU_POOLS = (
    *(Pools(rows) for rows in (1, 32, 512, 8192)),
    *(Pools(rows, slots=16_384, layers=8) for rows in (1, 32, 512, 8192)),
    *(Pools(rows, heads_first=True) for rows in (1, 32, 512, 8192)),
    *(Pools(rows, dtype="float8_e4m3fn") for rows in (1, 32, 512, 8192)),
)
CPU_POOLS = tuple(
    Pools(rows, slots=16_384, dtype=dtype, row_dtype=dtype) for dtype in ("float32", "bfloat16") for rows in (1, 8, 64)
)


def cases(backend: str, quick: bool = False) -> Iterator[Case]:
    """All cases for a kind of device."""
    for pools in GPU_POOLS if backend == "gpu" else CPU_POOLS:
        pools = pools.quick() if quick else pools
        yield Case(
            op="write_rows",
            size=pools.size,
            variant=pools.variant,
            what=FORWARD,
            floor_bytes=pools.step_bytes,
            make_contenders=functools.partial(contenders, pools),
            tolerance=0.0,
            effort=BRIEF,
        )


# ----------------------------------------------------------------------------------------------------------------------
# Contenders


def contenders(pools: Pools) -> Iterator[Contender]:
    rng = np.random.default_rng(0)
    rows = [make_rows(rng, pools, pools.heads) for _ in range(2)]
    return in_loops(pools, _write, scatter, lambda: make_pools(pools), rows, make_slots(rng, pools))


def in_loops(
    pools: Pools, ours: Step, theirs: Step, make_state: Callable[[], Any], rows: Any, slots: jax.Array
) -> Iterator[Contender]:
    """A step of this package, and of plain JAX without and with the promise that slots are unique."""
    for library, name, step in (
        (OURS, "", ours),
        (XLA, ".at[slots].set", theirs),
        (XLA, ".at[slots].set, unique_indices", functools.partial(theirs, unique_indices=True)),
    ):
        loop = functools.partial(_loop, step, pools)
        yield InPlaceContender(library, name, loop, make_state(), rows, slots, repetitions=STEPS)


def _loop(step: Step, pools: Pools, state: Any, rows: Any, slots: jax.Array) -> Any:
    """Writes to other slots, and another layer, in each step."""

    def run(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        state, slots = carry
        return step(pools, state, rows, slots, i % max(pools.layers, 1)), (slots + pools.rows) % pools.slots

    return lax.fori_loop(0, STEPS, run, (state, slots))[0]


def make_pools(pools: Pools) -> list[jax.Array]:
    return [jnp.zeros(pools.shape, pools.dtype) for _ in range(2)]


def make_rows(rng: np.random.Generator, pools: Pools, heads: int) -> jax.Array:
    return jnp.asarray(rng.integers(-8, 8, (pools.rows, heads, pools.features)), pools.row_dtype)


def make_slots(rng: np.random.Generator, pools: Pools) -> jax.Array:
    return jnp.asarray(rng.permutation(pools.slots)[: pools.rows], jnp.int32)


def _write(pools: Pools, dests: Any, rows: Any, slots: jax.Array, layer: jax.Array) -> Any:
    return jax_baracuda.write_rows(dests, rows, slots, axis=pools.axis, layer=layer if pools.layers else None)


def scatter(
    pools: Pools, dests: Any, rows: Any, slots: jax.Array, layer: jax.Array, unique_indices: bool = False
) -> list[jax.Array]:
    def write(dest: jax.Array, new: jax.Array) -> jax.Array:
        index = (layer, slots) if pools.layers else (slice(None), slots) if pools.heads_first else (slots,)
        new = new.astype(pools.dtype)
        new = jnp.moveaxis(new, 0, 1) if pools.heads_first else new
        return dest.at[index].set(new, mode="drop", unique_indices=unique_indices)

    return [write(dest, new) for dest, new in zip(dests, rows, strict=True)]
