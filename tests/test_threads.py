"""Many kernels in flight at once, from many Python threads, on thread pools of one thread and of several."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from segment.reference import MAX, SUM
from support import cases, programs
from support.processes import run_python

from jax_baracuda import causal_conv1d, segment_max, segment_sum

NUM_THREADS = 8
CALLS_PER_THREAD = 5


def call_from_many_threads() -> None:
    """Each thread runs one program of all public functions and their gradients over and over, with enough work for
    several threads. All results have the bits of a call alone."""
    rng = np.random.default_rng(0)
    examples = [dataclasses.replace(x, sizes={"small": x.sizes["check"]}) for x in programs.FIRST_EXAMPLES.values()]
    # Each thread has numbers of its own: results that are computed from another thread's memory differ.
    of_threads = [[programs.program_of(rng, example) for example in examples] for _ in range(NUM_THREADS)]
    functions = of_threads[0]
    operands = [jax.device_put([function.operands for function in own]) for own in of_threads]

    def call_all(all_operands: Any) -> Any:
        return [f.function(*x) for f, x in zip(functions, all_operands, strict=True)]

    program = jax.jit(call_all).lower(operands[0]).compile()
    expected = [jax.tree.map(lambda x: np.asarray(x).tobytes(), program(own)) for own in operands]
    start = threading.Barrier(NUM_THREADS)

    def work(thread: int) -> None:
        start.wait()
        all_results = [program(operands[thread]) for _ in range(CALLS_PER_THREAD)]  # all in flight before any is read
        for results in all_results:
            for function, actual, bits in zip(functions, results, expected[thread], strict=True):
                assert jax.tree.map(lambda x: np.asarray(x).tobytes(), actual) == bits, function.name

    with concurrent.futures.ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(work, range(NUM_THREADS)))
    print("all calls agree")


@pytest.mark.parametrize("cores", ["one core", "all cores"])
@pytest.mark.parametrize("devices", [1, 8])
def test_many_threads(devices: int, cores: str) -> None:
    """All results are the same, and nothing hangs. They run in a child process, so that a hang fails only this test."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    pin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " if cores == "one core" else ""
    code = f"{pin}import test_threads; test_threads.call_from_many_threads()"
    printed = run_python(code, XLA_FLAGS=f"{flags} --xla_force_host_platform_device_count={devices}")
    assert printed.strip() == "all calls agree"


def test_two_threads_with_tables_of_two_sizes() -> None:
    """Two threads may run one kernel at the same time, one with little shared memory and one with much."""
    rounds = 2000 if cases.PLATFORM == "cuda" else 20
    rng = np.random.default_rng(0)
    data = rng.integers(-50, 50, (180_000, 4)).astype(np.float32)
    ids_of = {segments: rng.integers(-1, segments + 1, len(data)).astype(np.int32) for segments in (8, 170)}
    start, failures = threading.Barrier(2), []

    def work(segments: int, ids: np.ndarray) -> None:
        try:
            program = jax.jit(lambda x, i: segment_sum(x, i, segments))
            arguments = jax.device_put((data, ids))
            expected = SUM.value(data, ids, segments)
            start.wait()
            for _ in range(rounds):
                result = program(*arguments)
            expected.check(result)
        except BaseException as error:
            failures.append(f"{segments} segments: {type(error).__name__}: {error}")
            start.abort()

    threads = [threading.Thread(target=work, args=case) for case in ids_of.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "\n".join(failures)


def exact_convolution(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The convolution of integers along the last axis."""
    width, length = weight.shape[-1], x.shape[-1]
    padded = np.pad(x, ((0, 0), (0, 0), (width - 1, 0)))
    return sum(weight[:, k, None] * padded[..., k : k + length] for k in range(width))


def test_different_programs_on_every_device(rng: np.random.Generator) -> None:
    """Two threads for each device and one for all devices: gradients of a batch that is sorted as one, sums with little
    and with much shared memory, and a convolution without a state that is split over the devices."""
    devices = jax.devices()[:4]
    rows, segments, rounds = (100_000, 5000, 50) if cases.PLATFORM == "cuda" else (2000, 100, 5)
    data = rng.integers(-20, 20, (3, rows, 32)).astype(np.float32)
    ids = rng.integers(-9, segments + 9, (3, rows), dtype=np.int32)
    d_output = rng.normal(size=(segments, 32)).astype(np.float32)
    x = rng.integers(-9, 9, (len(devices), 6, 500)).astype(np.float32)
    weight = rng.integers(-9, 9, (6, 4)).astype(np.float32)

    def gradients(data: jax.Array, ids: jax.Array) -> jax.Array:
        loss = lambda x, i: (d_output * segment_max(x, i, segments)).sum()  # noqa: E731
        return jax.vmap(jax.grad(loss))(data, ids)

    def sums(data: jax.Array, ids: jax.Array) -> list[jax.Array]:
        return [segment_sum(data[0], ids[0], n) for n in (8, 170)]

    expected_gradients = [
        MAX.gradient(d_output, *element, segments, tie_break="split").exact for element in zip(data, ids, strict=True)
    ]
    expected_sums = [SUM.value(data[0], ids[0], n).exact for n in (8, 170)]
    mesh = Mesh(np.array(devices), ("devices",))
    split, whole = NamedSharding(mesh, P("devices")), NamedSharding(mesh, P())
    threads = [
        *((gradients, jax.device_put((data, ids), device), expected_gradients) for device in devices),
        *((sums, jax.device_put((data, ids), device), expected_sums) for device in devices),
        (causal_conv1d, jax.device_put((x, weight), (split, whole)), exact_convolution(x, weight)),
    ]
    start = threading.Barrier(len(threads))

    def work(function: Callable[..., Any], operands: Any, expected: Any) -> None:
        program = jax.jit(function)
        start.wait()
        for _ in range(rounds):
            results = program(*operands)
            for actual, exact in zip(results, expected, strict=True):
                np.testing.assert_array_equal(np.asarray(actual), exact)

    with concurrent.futures.ThreadPoolExecutor(len(threads)) as pool:
        for future in [pool.submit(work, *thread) for thread in threads]:
            future.result()
