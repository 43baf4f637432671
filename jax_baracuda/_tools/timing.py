"""Times of steps of a loop inside ``jax.jit``, so that what Python takes to start a program is not among them."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")
R = TypeVar("R")

Arrays = list[jax.Array]
Step = Callable[[Arrays], tuple[Arrays, Arrays]]
"""``operands -> (operands of the next step, other results)``"""

SECONDS_OF_A_LOOP = 0.005
ASSUMED_BYTES_PER_SECOND = {"cpu": 5e9, "cuda": 1e12}
ASSUMED_SECONDS_TO_START = 1e-5
MIN_STEPS, MAX_STEPS = 1, 200
MAX_SECONDS_OF_A_RACE = 1.0
"""Beyond that, loops are not repeated any more."""


def num_steps(num_bytes: int, platform: str) -> int:
    """Of a loop of steps that move so many bytes. A static number: a GPU loops without asking the host."""
    seconds = num_bytes / ASSUMED_BYTES_PER_SECOND[platform] + ASSUMED_SECONDS_TO_START
    return min(max(math.ceil(SECONDS_OF_A_LOOP / seconds), MIN_STEPS), MAX_STEPS)


class Loop:
    """A compiled loop. Its operands are donated and come back: where a step works in place, nothing is copied."""

    def __init__(self, step: Step, operands: Sequence[Any], steps: int):
        """
        Args:
          operands: their types.
        """
        others = jax.eval_shape(step, list(operands))[1]

        def body(_: Any, carry: Any) -> Any:
            operands, _ = jax.lax.optimization_barrier(carry)  # else XLA would move what is the same out of the loop
            return step(operands)

        def run(operands: Arrays) -> Any:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), others)
            return jax.lax.fori_loop(0, steps, body, (operands, zeros))

        self._steps = steps
        self._program = jax.jit(run, donate_argnums=0).lower(list(operands)).compile()

    def time(self, operands: Arrays) -> tuple[float, Arrays]:
        """Seconds of a step, and the operands, which may have been written to."""
        start = time.perf_counter()
        operands, _ = jax.block_until_ready(self._program(operands))
        return (time.perf_counter() - start) / self._steps, operands


def race(loops: Sequence[Loop], operands: Arrays, repeats: int) -> list[float]:
    """Median seconds of a step of each loop, after one run to warm up. They run in turn: all see the same noise."""
    rounds: list[list[float]] = []
    start = time.perf_counter()
    for _ in range(repeats + 1):
        seconds = []
        for loop in loops:
            second, operands = loop.time(operands)
            seconds.append(second)
        rounds.append(seconds)
        if time.perf_counter() - start > MAX_SECONDS_OF_A_RACE:
            break
    return [statistics.median(of_loop) for of_loop in zip(*(rounds[1:] or rounds), strict=True)]


def workers_for(platform: str) -> int:
    """Threads that prepare what comes next: none where the processor is timed that they would run on."""
    return 0 if platform == "cpu" else max((os.cpu_count() or 1) - 2, 1)


def prepared(prepare: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[tuple[T, Callable[[], R]]]:
    """What is prepared of each item, in order, when it is called for: by threads that are a few items ahead."""
    if workers == 0:
        yield from ((item, functools.partial(prepare, item)) for item in items)
        return
    with ThreadPoolExecutor(workers) as pool:
        coming = collections.deque(pool.submit(prepare, item) for item in items[:workers])
        try:
            for item, following in itertools.zip_longest(items, items[workers:]):
                yield item, coming.popleft().result
                if following is not None:
                    coming.append(pool.submit(prepare, following))
        finally:
            pool.shutdown(cancel_futures=True)
