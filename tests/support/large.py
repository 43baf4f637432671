"""Arrays with more than 2^31 elements: their memory requirements and their contents."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest
from support import cases


def require_memory(gigabytes_on_device: int) -> None:
    """Skips the test if the device has less free memory; on CPUs also unless JAX_BARACUDA_TEST_LARGE is 1."""
    if cases.PLATFORM == "cpu":
        if os.environ.get("JAX_BARACUDA_TEST_LARGE") != "1":
            pytest.skip("on CPUs, arrays with more than 2^31 elements are tested with JAX_BARACUDA_TEST_LARGE=1 only")
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        stats = jax.devices()[0].memory_stats() or {}
        free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    if free < gigabytes_on_device * 1e9:
        pytest.skip(f"needs {gigabytes_on_device} GB of free memory, there are {free / 1e9:.1f} GB")


def require_gpu_memory(gigabytes: int) -> None:
    if cases.PLATFORM == "cpu":
        pytest.skip(f"takes {gigabytes} GB of memory: on GPUs only")
    require_memory(gigabytes)


def noise(shape: tuple[int, ...], seed: int) -> jax.Array:
    """Pseudorandom numbers between -1 and 1, in bfloat16."""

    def formula() -> jax.Array:
        total = jnp.full(shape, seed, jnp.uint32)
        for axis in range(len(shape)):
            total = (total ^ jax.lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(2654435761)
            total = total ^ (total >> 15)
        return ((total >> 8).astype(jnp.float32) / 2**23 - 1).astype(jnp.bfloat16)

    return jax.jit(formula)()
