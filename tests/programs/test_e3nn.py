"""e3nn-jax: an equivariant layer that sums messages with scatter_sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

NODES, EDGES = 60, 700
IRREPS = e3nn.Irreps("4x0e + 4x1o + 2x2e")


@pytest.mark.parametrize("sized", [True, False], ids=["ids", "sizes"])
def test_layer(rng: np.random.Generator, compare_redirected: Callable[..., Any], sized: bool) -> None:
    """Values and gradients agree, for receivers given by ids or by their numbers of edges."""
    positions, features = (jnp.asarray(rng.normal(size=(NODES, n)), jnp.float32) for n in (3, IRREPS.dim))
    senders, receivers = rng.integers(0, NODES, EDGES), np.sort(rng.integers(0, NODES, EDGES))
    senders = np.where(senders == receivers, (senders + 1) % NODES, senders)
    to = {"dst": receivers, "output_size": NODES} if sized else {"nel": np.bincount(receivers, minlength=NODES)}
    to = {name: jnp.asarray(value) if name != "output_size" else value for name, value in to.items()}
    cotangent = jnp.asarray(rng.normal(size=(NODES, IRREPS.dim)), jnp.float32)

    def layer(positions: jax.Array, features: jax.Array) -> jax.Array:
        directions = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
        harmonics = e3nn.spherical_harmonics("0e + 1o", directions, normalize=True)
        messages = e3nn.tensor_product(
            e3nn.IrrepsArray(IRREPS, features)[senders], harmonics, filter_ir_out="0e + 1o + 2e"
        )
        summed = e3nn.scatter_sum(messages, **to) / (EDGES / NODES) ** 0.5
        return e3nn.norm_activation(summed.filter(IRREPS), [jax.nn.sigmoid] * len(summed.filter(IRREPS).irreps)).array

    def step(positions: jax.Array, features: jax.Array) -> Any:
        values, pull_back = jax.vjp(layer, positions, features)
        return values, pull_back(jnp.resize(cotangent, values.shape))

    calls = ("x.at[ids].add",) if not sized else ("gradient of a gather",)
    compare_redirected(
        f"e3nn-jax, scatter_sum by {'ids' if sized else 'sizes'}", step, positions, features, calls=calls
    )
