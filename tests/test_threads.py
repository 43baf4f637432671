"""Many kernels in flight at once, from many Python threads, on thread pools of one thread and of several."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import cases
import jax
import numpy as np
import pytest

from jax_baracuda import segment_max, segment_max_backward

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

    @jax.jit
    def program(data: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        maxima = [segment_max(data, ids[k], segments) for k in range(OPS_PER_PROGRAM // 2)]
        gradients = [segment_max_backward(d_output, data, ids[k]) for k in range(OPS_PER_PROGRAM // 2)]
        return maxima, gradients

    failures: list[str] = []
    start = threading.Barrier(NUM_THREADS)

    def work(thread: int) -> None:
        try:
            expected_maxima = [cases.reference_max(data[thread], i, segments) for i in ids[: OPS_PER_PROGRAM // 2]]
            expected_gradients = [
                cases.reference_gradient(d_output, data[thread], i, "split") for i in ids[: OPS_PER_PROGRAM // 2]
            ]
            start.wait()
            results = [program(data[thread]) for _ in range(CALLS_PER_THREAD)]  # all in flight before any is read
            for maxima, gradients in results:
                for actual, expected in zip(maxima, expected_maxima, strict=True):
                    cases.assert_same_bits(actual, expected)
                for actual, expected in zip(gradients, expected_gradients, strict=True):
                    cases.assert_same_bits(actual, expected)
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
    """All results are right, and nothing waits for ever: a child process, so that a hang fails and does not spread."""
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    environment = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    pin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " if cores == "one core" else ""
    code = f"{pin}import test_threads; test_threads.call_from_many_threads()"
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == f"{NUM_THREADS * CALLS_PER_THREAD * OPS_PER_PROGRAM} calls agree"
