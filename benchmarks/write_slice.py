"""In-place appends to a KV cache, step by step inside a loop, and a write into an array that is not donated."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_baracuda
from benchmarks.harness import BRIEF, Case, Contender, JaxContender
from benchmarks.record import FORWARD, OURS, XLA

STEPS = 100
"""Steps in one call, because a single step is shorter than its launch from Python."""

Write = Callable[[Any, Any, Any], Any]
"""``(caches, new rows, position or positions) -> caches``"""


@dataclasses.dataclass(frozen=True)
class Cache:
    """A cache, and the number of rows that each step appends to it."""

    shape: tuple[int, ...]
    time_axis: int
    rows: int
    dtype: str = "bfloat16"

    @property
    def size(self) -> str:
        return f"{' × '.join(map(str, self.shape))}, {self.rows} {'row' if self.rows == 1 else 'rows'}"

    def quick(self) -> Cache:
        """A small version, to see that everything runs."""
        shape = tuple(max(1, size // 16) if size > 512 else size for size in self.shape)
        return dataclasses.replace(self, shape=shape, rows=min(self.rows, 2))

    @property
    def new_shape(self) -> tuple[int, ...]:
        return tuple(self.rows if axis == self.time_axis else size for axis, size in enumerate(self.shape))

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        bits = 4 if self.dtype == "int4" else 8 * jnp.dtype(self.dtype).itemsize
        return math.prod(shape) * bits // 8


BATCH_FIRST, TIME_FIRST = ((32, 8192, 8, 128), 1), ((8192, 32, 8, 128), 0)
GPU_CACHES = tuple(
    Cache(*layout, rows, dtype)
    for dtype in ("bfloat16", "float8_e4m3fn", "int4")
    for layout in (BATCH_FIRST, TIME_FIRST)
    for rows in (1, 16, 512)
)
CPU_CACHES = (
    Cache((4, 1024, 8, 128), 1, 1, "float32"),
    Cache((4, 65536, 8, 128), 1, 1, "float32"),
    Cache((4, 65536, 8, 128), 1, 1, "bfloat16"),
    Cache((4, 65536, 8, 128), 1, 64, "float32"),
)
"""Caches of 16 MiB and of 1 GiB: a step takes equally long in both."""


def cases(backend: str, quick: bool = False) -> Iterator[Case]:
    """All cases for a kind of device."""
    for cache in GPU_CACHES if backend == "gpu" else CPU_CACHES:
        cache = cache.quick() if quick else cache
        yield _case(cache, "", 2 * cache.bytes_of(cache.new_shape), loop_contenders)
        if cache.time_axis == 1 and cache.rows == 1:
            floor_bytes = 2 * cache.bytes_of(cache.new_shape)
            yield _case(cache, "per example", floor_bytes, per_example_contenders)
            yield _case(cache, "K and V", 2 * floor_bytes, pair_contenders)
            yield _case(cache, "not donated", 2 * cache.bytes_of(cache.shape), copying_contenders)


def _case(cache: Cache, what: str, floor_bytes: int, contenders: Callable[[Cache], Iterator[Contender]]) -> Case:
    return Case(
        op="write_slice",
        size=cache.size,
        variant=", ".join(filter(None, (what, cache.dtype))),
        what=FORWARD,
        floor_bytes=floor_bytes,
        make_contenders=functools.partial(contenders, cache),
        tolerance=0.0,
        effort=BRIEF,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Contenders


class InPlaceContender(JaxContender):
    """A function whose first operand is donated and replaced by its result for the next call."""

    def prepare(self) -> None:
        self._compiled = jax.jit(self._function, donate_argnums=0).lower(*self._operands).compile()

    def enqueue(self) -> Any:
        results = self._compiled(*self._operands)
        self._operands = (results, *self._operands[1:])
        return results


def _integers(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Pseudo-random numbers from -8 to 7, which are faster to make than those of ``jax.random``."""

    @jax.jit
    def make() -> jax.Array:
        number = sum(lax.broadcasted_iota(jnp.uint32, shape, axis) * (40503 + 2 * axis) for axis in range(len(shape)))
        return ((((number + seed) * jnp.uint32(2654435761)) >> 28).astype(jnp.int8) - 8).astype(dtype)

    return jax.block_until_ready(make())


def _loop(write: Write, cache: Cache, caches: Any, new: Any, positions: jax.Array) -> Any:
    """Appends at successive positions. The loop carries the positions beside the caches, as in decoding, and wraps
    around when the cache is full."""
    num_positions = cache.shape[cache.time_axis] - cache.rows + 1

    def step(_: jax.Array, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        caches, positions = state
        return write(caches, new, positions), (positions + cache.rows) % num_positions

    return lax.fori_loop(0, STEPS, step, (caches, positions))[0]


def _in_loops(
    cache: Cache, ours: Write, theirs: Write, formulation: str, copies: int = 1, positions: Any = 0
) -> Iterator[Contender]:
    for library, name, write in ((OURS, "", ours), (XLA, formulation, theirs)):
        caches = [_integers(seed, cache.shape, cache.dtype) for seed in range(copies)]
        new = [_integers(7 + seed, cache.new_shape, cache.dtype) for seed in range(copies)]
        operands = (caches, new) if copies > 1 else (caches[0], new[0])
        loop = functools.partial(_loop, write, cache)
        yield InPlaceContender(library, name, loop, *operands, jnp.asarray(positions, jnp.int32), repetitions=STEPS)


def _at(cache: Cache, position: Any) -> tuple[Any, ...]:
    return tuple(position if axis == cache.time_axis else 0 for axis in range(len(cache.shape)))


def _write(cache: Cache, dest: jax.Array, new: jax.Array, position: Any) -> jax.Array:
    return jax_baracuda.write_slice(dest, new, _at(cache, position))


def _update(cache: Cache, dest: jax.Array, new: jax.Array, position: Any) -> jax.Array:
    return lax.dynamic_update_slice(dest, new, _at(cache, position))


def loop_contenders(cache: Cache) -> Iterator[Contender]:
    ours, theirs = (functools.partial(write, cache) for write in (_write, _update))
    return _in_loops(cache, ours, theirs, "dynamic_update_slice")


def per_example_contenders(cache: Cache) -> Iterator[Contender]:
    """Every example has its own position."""

    def vmapped(write: Callable[..., jax.Array]) -> Write:
        return jax.vmap(lambda dest, new, position: write(dest, new, (position, 0, 0)))

    ours, theirs = vmapped(jax_baracuda.write_slice), vmapped(lax.dynamic_update_slice)
    positions = np.arange(cache.shape[0]) * 37 % (cache.shape[1] // 2)
    return _in_loops(cache, ours, theirs, "dynamic_update_slice under vmap", positions=positions)


def pair_contenders(cache: Cache) -> Iterator[Contender]:
    def theirs(caches: Any, new: Any, position: Any) -> list[jax.Array]:
        return [_update(cache, d, s, position) for d, s in zip(caches, new, strict=True)]

    def ours(caches: Any, new: Any, position: Any) -> list[jax.Array]:
        return jax_baracuda.write_slices(caches, new, _at(cache, position))

    return _in_loops(cache, ours, theirs, "two dynamic_update_slices", copies=2)


def copying_contenders(cache: Cache) -> Iterator[Contender]:
    """The array is not donated, so all of it is copied."""
    operands = _integers(0, cache.shape, cache.dtype), _integers(7, cache.new_shape, cache.dtype), jnp.int32(5)
    for library, name, write in ((OURS, "", _write), (XLA, "dynamic_update_slice", _update)):
        yield JaxContender(library, name, functools.partial(write, cache), *operands)
