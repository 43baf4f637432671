"""where on several devices: the accumulation dtype of sums that devices split."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases
from support.cases import assert_same_memory
from support.meshes import make_mesh
from where.reference import make_condition

from jax_baracuda import where, where_backward

pytestmark = cases.on_two_devices


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int32", "complex64"])
def test_dtypes(rng: np.random.Generator, dtype: str) -> None:
    """Devices with a single row of a sum use the same accumulation dtype as devices with more."""
    mesh = make_mesh()
    # Sums of small integers are exact.
    a, b, dy = (rng.integers(-8, 9, shape).astype(jnp.dtype(dtype)) for shape in ((8, 6, 4), (4,), (8, 6, 4)))
    cond = make_condition(rng, (8, 6, 4))
    with cases.x64_for(dtype):
        split = NamedSharding(mesh, P(("x", "y"), None, None))
        placed = [jax.device_put(x, split if x.ndim == 3 else NamedSharding(mesh, P())) for x in (cond, a, b, dy)]
        assert_same_memory(jax.jit(where)(*placed[:3]), np.asarray(where(cond, a, b)))
        if dtype == "int32":
            return
        backward = functools.partial(where_backward, b_shape=(4,))
        for got, want in zip(jax.jit(backward)(placed[3], placed[0]), backward(dy, cond), strict=True):
            assert_same_memory(got, np.asarray(want))
