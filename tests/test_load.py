"""Many threads with different programs for many rounds, and memory that does not grow with the number of calls."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from support.programs import Program, plain_jax, tiny_programs

pytestmark = pytest.mark.thorough

NUM_THREADS = 8
ROUNDS = 1000
CALLS = 10_000
CALLS_OF_WARM_UP = 5000

PROGRAMS = tiny_programs(np.random.default_rng(0))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program_alone(program: Program) -> None:
    """Each program agrees with plain JAX, up to the rounding of numbers around 1."""
    for actual, expected in zip(program.results(), program.expected(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


def test_many_rounds_of_many_threads() -> None:
    """Each thread runs all programs in its own order, so that any two overlap. Results always have the same bits."""
    operands = [jax.device_put(program.operands) for program in PROGRAMS]
    calls = [jax.jit(program.function).lower(*x).compile() for program, x in zip(PROGRAMS, operands, strict=True)]
    expected = [[np.asarray(y).tobytes() for y in jax.tree.leaves(c(*x))] for c, x in zip(calls, operands, strict=True)]
    failures: list[str] = []
    start = threading.Barrier(NUM_THREADS)

    def work(thread: int) -> None:
        order = np.random.default_rng(thread).permutation(np.arange(ROUNDS) % len(PROGRAMS))
        try:
            start.wait()
            for i in order:
                results = jax.tree.leaves(calls[i](*operands[i]))
                for k, (y, bits) in enumerate(zip(results, expected[i], strict=True)):
                    assert np.asarray(y).tobytes() == bits, f"{PROGRAMS[i].name}: result {k} differs"
        except BaseException as error:
            failures.append(f"thread {thread}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "\n".join(failures)


def resident_bytes() -> int:
    """The resident memory of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def growth_of_memory() -> list[int]:
    """How many bytes of the process and of the device, and how many arrays, many calls add: the minimum of two runs."""
    operands = [jax.device_put(program.operands) for program in PROGRAMS]
    # Functions that JAX has not traced yet.
    functions = [lambda *x, program=program: program.function(*x) for program in PROGRAMS]
    calls = [jax.jit(function).lower(*x).compile() for function, x in zip(functions, operands, strict=True)]

    def call(times: int) -> tuple[int, int, int]:
        for i in range(times):
            results = calls[i % len(calls)](*operands[i % len(calls)])
            if i % 100 == 0:
                jax.block_until_ready(results)
        jax.block_until_ready(results)
        del results
        gc.collect()
        statistics = jax.devices()[0].memory_stats() or {"bytes_in_use": 0}
        return resident_bytes(), statistics["bytes_in_use"], len(jax.live_arrays())

    # A leak grows in both runs. A thread pool that reaches a new peak on a busy machine grows in one.
    levels = [call(times) for times in (CALLS_OF_WARM_UP, CALLS // 2, CALLS // 2)]
    growths = [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(levels)]
    return [min(of_both) for of_both in zip(*growths, strict=True)]


def print_growth_of_memory() -> None:
    """Prints the growth with kernels, and with the same programs in plain JAX."""
    growth = growth_of_memory()
    with plain_jax():
        print(*growth, *growth_of_memory())


def test_memory_does_not_grow() -> None:
    """A fresh process grows by less than 100 bytes a call more than with plain JAX, which grows on some GPUs."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("there is no /proc to read the memory of a process from")
    child = subprocess.run(
        [sys.executable, "-c", "import test_load; test_load.print_growth_of_memory()"],
        env=os.environ
        # One arena: by default, glibc gives each thread of a busy machine its own arena, which grows.
        | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    process, device, arrays, of_plain_jax, *_ = map(int, child.stdout.split())
    assert process - max(of_plain_jax, 0) < 100 * (CALLS // 2)
    assert (device, arrays) == (0, 0)
