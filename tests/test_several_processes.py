"""Operands split over the devices of two processes: results equal those of one device."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
from support import cases
from support.processes import run_python

pytestmark = pytest.mark.thorough

PROGRAM = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
import jax_baracuda as jb

mesh = jax.make_mesh((len(jax.devices()),), ("x",))
assert len(jax.devices()) == 2 * len(jax.local_devices()) == 4
rng = np.random.default_rng(0)


def small_integers(*shape):
    return rng.integers(-2, 3, shape).astype(np.float32)


def with_gradient(function, num_differentiated):
    def run(*operands):
        *operands, cotangent = operands
        rest = operands[num_differentiated:]
        value, pullback = jax.vjp(lambda *x: function(*x, *rest), *operands[:num_differentiated])
        return value, *pullback(cotangent)

    return run


rows, segments, nodes = 64, 10, 12
segment_ids, gather_ids = (rng.integers(0, size, rows).astype(np.int32) for size in (segments, nodes))
split_rows, split_time = P("x"), P(None, None, "x")
x, dy = small_integers(2, 3, 32), small_integers(2, 3, 32)
programs = {
    "segment_max": (
        with_gradient(lambda data, ids: jb.segment_max(data, ids, segments), 1),
        [small_integers(rows, 5), segment_ids, 12 * small_integers(segments, 5)],
        [split_rows, split_rows, P()],
    ),
    "segment_prod": (
        with_gradient(lambda data, ids: jb.segment_prod(data, ids, segments), 1),
        [2.0 ** small_integers(rows, 5), segment_ids, small_integers(segments, 5)],
        [split_rows, split_rows, P()],
    ),
    "causal_conv1d": (
        with_gradient(jb.causal_conv1d, 2),
        [x, small_integers(3, 4), dy],
        [split_time, P(), split_time],
    ),
    "gather_segment_sum": (
        with_gradient(lambda data, *ids: jb.gather_segment_sum(data, *ids, segments), 1),
        [small_integers(nodes, 5), gather_ids, segment_ids, small_integers(segments, 5)],
        [split_rows, split_rows, split_rows, P()],
    ),
}
for name, (function, operands, specs) in programs.items():
    expected = jax.jit(function)(*operands)
    placed = [
        jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index, x=x: x[index])
        for x, spec in zip(operands, specs)
    ]
    results = jax.jit(function, out_shardings=NamedSharding(mesh, P()))(*placed)
    for got, want in zip(results, expected, strict=True):
        np.testing.assert_array_equal(got.addressable_data(0), want, err_msg=name)
    print(name)
"""


@pytest.mark.skipif(cases.PLATFORM != "cpu", reason="two processes cannot share one GPU's memory")
def test_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
    }
    with ThreadPoolExecutor() as executor:
        processes = [executor.submit(run_python, PROGRAM, port, i, **variables) for i in range(2)]
        for process in as_completed(processes):  # the first failure is raised, while the other process waits
            compared = set(process.result().splitlines())
            assert {"segment_max", "segment_prod", "causal_conv1d", "gather_segment_sum"} <= compared
