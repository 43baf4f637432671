"""The attention of Gemma with its rotations replaced by rope: value and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemma.gm.math import _positional_embeddings
from gemma.gm.nn import _modules

import jax_baracuda as jb

BATCH, LENGTH, WIDTH, SIZE = 2, 12, 16, 8


class Rotations:
    """Replaces Gemma's function, which rotates queries and keys in two calls, and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, inputs: jax.Array, positions: jax.Array, *, base_frequency: int, scale_factor: float = 1.0
    ) -> jax.Array:
        self.calls += 1
        inv_freq, _ = jb.rope_frequencies(
            inputs.shape[-1], float(base_frequency), {"rope_type": "linear", "factor": scale_factor}
        )
        return jb.rope(inputs, positions, interleaved=False, layout="BSHD", inv_freq=inv_freq)


def test_rotation_takes_gemmas_arguments(rng: np.random.Generator) -> None:
    """rope_qk for queries and keys agrees with Gemma's function for each of them."""
    q, k = (jnp.asarray(rng.normal(size=(BATCH, LENGTH, heads, SIZE)), jnp.float32) for heads in (4, 2))
    positions = jnp.asarray(rng.integers(0, 4000, (BATCH, LENGTH)))

    def theirs(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        rotated = (_positional_embeddings.apply_rope(x, positions, base_frequency=10_000) for x in (q, k))
        return tuple(rotated)

    def ours(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jb.rope_qk(q, k, positions, interleaved=False, layout="BSHD")

    expected, pullback = jax.vjp(theirs, q, k)
    actual, our_pullback = jax.vjp(ours, q, k)
    for a, e in zip((*actual, *our_pullback(expected)), (*expected, *pullback(expected)), strict=True):
        # Gemma's angles are float32: at position 4000 they are rounded to 2.4e-4. Ours are not rounded.
        np.testing.assert_allclose(a, e, atol=2e-3)


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_attention(
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    timings: Callable[..., None],
    kv_heads: int,
    scale: float,
) -> None:
    attention = _modules.Attention(
        num_heads=4,
        num_kv_heads=kv_heads,
        features=WIDTH,
        head_dim=SIZE,
        attn_type=_modules.AttentionType.GLOBAL,
        query_pre_attn_scalar=SIZE**-0.5,
        rope_scale_factor=scale,
        use_qk_norm=True,
    )
    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, WIDTH)), jnp.float32)
    positions = jnp.arange(LENGTH) + jnp.asarray([[0], [30]])
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (BATCH, LENGTH, LENGTH))
    cotangent = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    shapes = jax.eval_shape(attention.init, jax.random.key(0), x, positions, None, mask)
    weights = jax.tree.map(lambda s: jnp.asarray(0.5 * rng.normal(size=s.shape), s.dtype), shapes)

    def compiled() -> Callable[[Any, jax.Array], Any]:
        def loss(weights: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = attention.apply(weights, x, positions, None, mask)[1]
            return (out * cotangent).sum(), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    theirs = compiled()
    expected = theirs(weights, x)
    rotations = Rotations()
    monkeypatch.setattr(_positional_embeddings, "apply_rope", rotations)
    ours = compiled()
    actual = ours(weights, x)
    assert rotations.calls == 2  # of the query and of the key, in one trace
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4), actual, expected)
    timings(f"gemma attention, {kv_heads} kv heads", lambda: ours(weights, x), lambda: theirs(weights, x))
