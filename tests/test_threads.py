"""Many kernels in flight at once, from many Python threads, on thread pools of one thread and of several."""

from __future__ import annotations

import concurrent.futures
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rope.reference import Rotation
from segment.reference import MAX, PROD, SOFTMAX, SUM, extremum_gradient_of_rows
from support import cases
from support.processes import run_python
from write_slice.reference import reference_write

from jax_baracuda import (
    causal_conv1d,
    rope,
    segment_max,
    segment_max_backward,
    segment_prod,
    segment_softmax,
    segment_sum,
    where_backward,
    write_slice,
)

NUM_THREADS = 8
OPS_PER_PROGRAM = 16
CALLS_PER_THREAD = 5


def call_from_many_threads() -> None:
    """Each thread runs one program of many independent ops over and over, and compares every result."""
    rows, features, segments = 2000, 64, 40
    rng = np.random.default_rng(0)
    data = rng.integers(-50, 50, (NUM_THREADS, rows, features)).astype(np.float32)
    ids = rng.integers(-1, segments + 1, (OPS_PER_PROGRAM, rows)).astype(np.int32)
    d_output = rng.normal(size=(segments, features)).astype(np.float32)

    def convolve(x: Any, i: Any) -> jax.Array:
        """The difference from the previous row, if both have the same id."""
        weight = np.tile(np.array([-1, 1], np.float32), (features, 1))
        return causal_conv1d(x[None], weight, channels_last=True, segment_ids=i[None])[0]

    def expected_convolution(x: np.ndarray, i: np.ndarray, s: int) -> cases.Expected:
        before = np.concatenate([np.zeros_like(x[:1]), np.where((i[1:] == i[:-1])[:, None], x[:-1], 0)])
        return cases.Expected(x - before, x.dtype)

    def rotate(x: Any, i: Any) -> jax.Array:
        """A rotation with the ids as positions."""
        return rope(x[None, None], i)[0, 0]

    def expected_rotation(x: np.ndarray, i: np.ndarray, s: int) -> cases.Expected:
        expected = Rotation(i).of(x[None, None]).expected()
        return cases.Expected(expected.exact[0, 0], x.dtype, expected.error[0, 0])

    def reverse_and_shift(x: Any, i: Any) -> jax.Array:
        """The rows from the first id on, in reverse order."""
        return write_slice(x, x[::-1], (i[0], 0), mode="drop")

    def expected_shift(x: np.ndarray, i: np.ndarray, s: int) -> cases.Expected:
        return cases.Expected(reference_write(x, x[::-1], (int(i[0]), 0), "drop"), x.dtype)

    # Data are small integers: their sums and the products of their signs are exact.
    calls: list[tuple[Callable[..., jax.Array], Callable[..., cases.Expected]]] = [
        (lambda x, i: segment_max(x, i, segments), MAX.value),
        (
            lambda x, i: segment_max_backward(d_output, x, i),
            lambda x, i, s: MAX.gradient(d_output, x, i, s, tie_break="split"),
        ),
        (lambda x, i: segment_sum(x, i, segments), SUM.value),
        (
            lambda x, i: segment_prod(jnp.where(x < 0, -1.0, 1.0), i, segments),
            lambda x, i, s: PROD.value(np.where(x < 0, -1, 1).astype(x.dtype), i, s),
        ),
        (lambda x, i: segment_softmax(x, i, segments), SOFTMAX.value),
        (convolve, expected_convolution),
        (rotate, expected_rotation),
        (
            lambda x, i: where_backward(x, i[:, None] % 2, b_shape=(features,))[1],
            lambda x, i, s: cases.Expected(np.where(i[:, None] % 2, 0, x).sum(axis=0), x.dtype),
        ),
        (reverse_and_shift, expected_shift),
    ]
    chosen = [calls[k % len(calls)] for k in range(OPS_PER_PROGRAM)]

    @jax.jit
    def program(data: jax.Array) -> list[jax.Array]:
        return [function(data, ids[k]) for k, (function, _) in enumerate(chosen)]

    failures: list[str] = []
    start = threading.Barrier(NUM_THREADS)

    def work(thread: int) -> None:
        try:
            expected = [reference(data[thread], ids[k], segments) for k, (_, reference) in enumerate(chosen)]
            start.wait()
            all_results = [program(data[thread]) for _ in range(CALLS_PER_THREAD)]  # all in flight before any is read
            for results in all_results:
                for actual, allowed in zip(results, expected, strict=True):
                    allowed.check(actual)
        except BaseException as error:
            failures.append(f"thread {thread}: {type(error).__name__}: {error}")
            start.abort()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, "\n".join(failures)
    print(f"{NUM_THREADS * CALLS_PER_THREAD * OPS_PER_PROGRAM} calls agree")


@pytest.mark.parametrize("cores", ["one core", "all cores"])
@pytest.mark.parametrize("devices", [1, 8])
def test_many_threads(devices: int, cores: str) -> None:
    """All results are right, and nothing hangs. They run in a child process, so that a hang fails only this test."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    pin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " if cores == "one core" else ""
    code = f"{pin}import test_threads; test_threads.call_from_many_threads()"
    printed = run_python(code, XLA_FLAGS=f"{flags} --xla_force_host_platform_device_count={devices}")
    assert printed.strip() == f"{NUM_THREADS * CALLS_PER_THREAD * OPS_PER_PROGRAM} calls agree"


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
        extremum_gradient_of_rows(MAX, d_output, *element).astype(np.float32) for element in zip(data, ids, strict=True)
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
