"""Times loops in which plain JAX writes to a cache, as they are and redirected."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_baracuda as jb
from jax_baracuda._tools.command_line import parser_of, run
from jax_baracuda._tools.table import format_table

BATCH, HEADS, SIZE, STEPS, RUNS = 2, 4, 64, 64, 5


def attention(row: jax.Array, cache: jax.Array, position: jax.Array) -> jax.Array:
    scores = jnp.einsum("bhd,bshd->bhs", row[:, 0], cache)
    scores = jnp.where(jnp.arange(cache.shape[1]) <= position, scores, -jnp.inf)
    return jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores), cache)


READS: dict[str, Callable[..., jax.Array]] = {
    "its row": lambda row, cache, position: cache[:, position],
    "the sum of its row": lambda row, cache, position: cache[:, position].sum(),
    "attention": attention,
}


def decode(read: Callable[..., jax.Array], cache: jax.Array, rows: jax.Array) -> Any:
    def step(cache: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        position, row = at
        cache = jax.lax.dynamic_update_slice(cache, row, (0, position, 0, 0))
        return cache, read(row, cache, position)

    return jax.lax.scan(step, cache, (jnp.arange(STEPS), rows))


def milliseconds_of_a_step(read: Callable[..., jax.Array], length: int, redirected: bool) -> float:
    compiled = jax.jit(lambda cache, rows: decode(read, cache, rows), donate_argnums=0)
    rows = jax.random.normal(jax.random.key(0), (STEPS, BATCH, 1, HEADS, SIZE))
    times = []
    with jb.redirect(slice_updates=True) if redirected else contextlib.nullcontext():
        for _ in range(RUNS + 1):  # the first one compiles
            cache = jax.block_until_ready(jnp.zeros((BATCH, length, HEADS, SIZE)))
            start = time.perf_counter()
            jax.block_until_ready(compiled(cache, rows))
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3 / STEPS


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser_of("benchmarks.slice_updates", __doc__, {0: "all programs were measured"}).parse_args(arguments)
    table = []
    for what, read in READS.items():
        for length in (2048, 16384):
            plain, redirected = (milliseconds_of_a_step(read, length, inside) for inside in (False, True))
            table.append((what, str(length), f"{plain:.3f}", f"{redirected:.3f}"))
    print(f"ms a step, jax {jax.__version__} on {jax.devices()[0].device_kind}")
    print(format_table(("a step reads", "positions", "plain JAX", "redirected"), table))
    return 0


if __name__ == "__main__":
    run(main)
