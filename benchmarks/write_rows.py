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
from benchmarks.harness import Case, Contender
from benchmarks.record import FORWARD, OURS, XLA
from benchmarks.write_slice import BRIEF, STEPS, InPlaceContender

Write = Callable[..., Any]
"""``(pools, rows, slots, layer) -> pools``"""


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
    def new_shape(self) -> tuple[int, ...]:
        return self.rows, self.heads, self.features

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
    unique = functools.partial(scatter, pools, unique_indices=True)
    for library, name, write in (
        (OURS, "", functools.partial(_write, pools)),
        (XLA, ".at[slots].set", functools.partial(scatter, pools)),
        (XLA, ".at[slots].set, unique_indices", unique),
    ):
        yield InPlaceContender(library, name, functools.partial(_loop, write, pools), *_operands(pools),
                               repetitions=STEPS)  # fmt: skip


def _operands(pools: Pools) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    rows = [jnp.asarray(rng.integers(-8, 8, pools.new_shape), pools.row_dtype) for _ in range(2)]
    slots = jnp.asarray(rng.permutation(pools.slots)[: pools.rows], jnp.int32)
    return [jnp.zeros(pools.shape, pools.dtype) for _ in range(2)], rows, slots


def _loop(write: Write, pools: Pools, dests: Any, rows: Any, slots: jax.Array) -> Any:
    """Writes to other slots, and another layer, in each step."""

    def step(i: jax.Array, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        dests, slots = state
        return write(dests, rows, slots, i % max(pools.layers, 1)), (slots + pools.rows) % pools.slots

    return lax.fori_loop(0, STEPS, step, (dests, slots))[0]


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
