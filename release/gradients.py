"""A small program for an installed package: its kernels load, and gradients agree with plain JAX."""

from collections.abc import Callable

import jax
import numpy as np

import jax_baracuda as jb
from jax_baracuda._core.native import NATIVE_MODULES

assert NATIVE_MODULES["cpu"].problem is None, NATIVE_MODULES["cpu"].problem
rng = np.random.default_rng(0)
data, ids = rng.normal(size=(1000, 16)).astype(np.float32), rng.integers(0, 100, 1000)


def gradient(reduction: Callable[..., jax.Array]) -> jax.Array:
    return jax.jit(jax.grad(lambda x: (reduction(x, ids, 100) ** 2).sum()))(data)


np.testing.assert_allclose(gradient(jb.segment_max), gradient(jax.ops.segment_max), rtol=1e-5, atol=1e-5)
np.testing.assert_allclose(gradient(jb.segment_sum), gradient(jax.ops.segment_sum), rtol=1e-5, atol=1e-5)
print(f"jax_baracuda {jb.__version__}, jax {jax.__version__}: gradients agree")
