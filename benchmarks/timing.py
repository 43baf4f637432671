"""Times steps of a loop inside ``jax.jit``, to exclude the time that Python takes to start a program."""

from __future__ import annotations

import functools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_baracuda._core.native import target_name

T = TypeVar("T")
R = TypeVar("R")

Arrays = list[jax.Array]
Step = Callable[[Arrays], tuple[Arrays, Arrays]]
"""``operands -> (operands of the next step, other results)``"""

SECONDS_OF_A_LOOP = 0.005
ASSUMED_BYTES_PER_SECOND = {"cpu": 5e9, "cuda": 1e12}
ASSUMED_SECONDS_TO_START = 1e-5
MIN_STEPS, MAX_STEPS = 1, 200
MAX_SECONDS_OF_A_LOOP = 0.5
"""The total of a loop's runs, beyond which it is not repeated. It exceeds the time that a first run takes to load the
program, which must not count."""
RUNS_TO_WARM_UP = 2
"""The first run loads the program; the second one shows how long a loop takes."""
ITEMS_PER_THREAD = 4
"""In a batch: enough that threads seldom wait for the slowest item."""


LAUNCHED_AS_A_GRAPH = {"xla_gpu_graph_min_graph_size": "1"}
"""For GPUs. By default, XLA launches the body of a loop as one CUDA graph only if it has at least five kernels, as in
most programs. It would launch the few kernels of a single call one by one, which takes longer than many of them run."""


def num_steps(num_bytes: int, platform: str, slowest: float = 0) -> int:
    """The number of steps of a loop whose steps move `num_bytes` each. It is static, so a GPU loops without the host.

    Args:
      slowest: seconds that a step may take in a bad case. The loop must still not take long then.
    """
    seconds = num_bytes / ASSUMED_BYTES_PER_SECOND[platform] + ASSUMED_SECONDS_TO_START
    steps = min(math.ceil(SECONDS_OF_A_LOOP / seconds), MAX_STEPS)
    return max(min(steps, int(MAX_SECONDS_OF_A_LOOP / slowest) if slowest > 0 else MAX_STEPS), MIN_STEPS)


def on_device(device: jax.Device, x: Any) -> jax.ShapeDtypeStruct:
    """The type of an array on this device."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(device))


class Loop:
    """A compiled loop. Its operands are donated and returned, so steps that work in place copy nothing."""

    def __init__(self, step: Step, operands: Sequence[Any], steps: int, device: jax.Device):
        """
        Args:
          operands: the types of the operands.
        """
        types = [on_device(device, x) for x in operands]
        others = jax.eval_shape(step, types)[1]

        def body(_: Any, carry: Any) -> Any:
            operands, _ = jax.lax.optimization_barrier(carry)  # keeps XLA from hoisting the loop-invariant step
            return step(operands)

        def run(operands: Arrays, times: jax.Array) -> Any:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), others)
            loop = functools.partial(jax.lax.fori_loop, 0, steps, body)
            return jax.lax.fori_loop(0, times, lambda _, carry: loop(carry), (operands, zeros))

        self.steps = steps
        options = LAUNCHED_AS_A_GRAPH if device.platform == "gpu" else None
        lowered = jax.jit(run, donate_argnums=0).lower(types, jax.ShapeDtypeStruct((), jnp.int32))
        self._program = lowered.compile(options)

    def kernels(self) -> list[str]:
        """This package's kernels that the compiled program calls."""
        pattern = rf'custom_call_target="{re.escape(target_name(""))}(\w+)"'
        return sorted(set(re.findall(pattern, self._program.as_text() or "")))

    def is_same_program(self, other: Loop) -> bool:
        """Whether both compiled to the same instructions, apart from their names."""
        return self._instructions() == other._instructions()

    def _instructions(self) -> list[str]:
        text = re.sub(r",? metadata=\{[^}]*\}", "", self._program.as_text() or "")
        numbers: dict[str, str] = {}

        def number_of(name: re.Match[str]) -> str:
            return numbers.setdefault(name[0], f"%{len(numbers)}")

        lines = (line for line in text.splitlines() if re.match(r"\s*(ROOT )?%", line))
        return [re.sub(r"%[\w.-]+", number_of, line) for line in lines]

    def time(self, operands: Arrays, times: int) -> tuple[float, Arrays]:
        """Seconds of `times` loops, one after another, and the operands, which may have been written to."""
        start = time.perf_counter()
        operands, _ = jax.block_until_ready(self._program(operands, np.int32(times)))
        return time.perf_counter() - start, operands


def race(loops: Sequence[Loop], operands: Arrays, repeats: int) -> tuple[list[float], Arrays]:
    """Median seconds of a step of each loop, and the operands, which may have been written to.

    The loops run in turns, and every other turn in the opposite order, so that all see the same noise. Each run repeats
    its loop to fill SECONDS_OF_A_LOOP. The first runs warm up; slow loops have no others.
    """
    operands = jax.block_until_ready(operands)
    seconds: list[list[float]] = [[] for _ in loops]
    spent, times = [0.0] * len(loops), [1] * len(loops)
    for number in range(RUNS_TO_WARM_UP + repeats):
        for i, loop in list(enumerate(loops))[:: 1 if number % 2 == 0 else -1]:
            if spent[i] >= MAX_SECONDS_OF_A_LOOP:
                continue
            second, operands = loop.time(operands, times[i])
            spent[i] += second
            seconds[i].append(second / (loop.steps * times[i]))
            if number < RUNS_TO_WARM_UP:
                times[i] = max(round(SECONDS_OF_A_LOOP / second), 1)
    return [statistics.median(of_loop[RUNS_TO_WARM_UP:] or of_loop[-1:]) for of_loop in seconds], operands


def compiled_in_batches(
    compiled: Callable[[T], R], items: Sequence[T], seconds: float | None, say: Callable[[str], None]
) -> Iterator[tuple[T, Callable[[], R]]]:
    """Yields each item, in order, with a function that returns its compiled programs or raises the compiler's error.

    Threads compile a batch of items. Nothing is compiled while the caller times them: on GPUs, XLA autotunes kernels
    during compilation, which would disturb the timing.

    Args:
      seconds: the time limit, after which the remaining items are skipped. None: no limit.
      say: receives progress messages.
    """
    deadline = None if seconds is None else time.monotonic() + seconds

    def seconds_left() -> float | None:
        return None if deadline is None else max(deadline - time.monotonic(), 0)

    threads = os.cpu_count() or 1
    pool = ThreadPoolExecutor(threads)
    try:
        for first in range(0, len(items), threads * ITEMS_PER_THREAD):
            batch = items[first : first + threads * ITEMS_PER_THREAD]
            say(f"compiling {first + 1} to {first + len(batch)} of {len(items)} calls")
            futures = [pool.submit(compiled, item) for item in batch]
            wait(futures, seconds_left())
            for item, future in zip(batch, futures, strict=True):
                if seconds_left() == 0:
                    return
                yield item, future.result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for running compilations
