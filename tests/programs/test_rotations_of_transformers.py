"""rope_qk and rope_frequencies against the rotary embeddings of Hugging Face's transformers, on random positions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from programs import rotations_of_transformers as oracle
from programs.rotations_of_transformers import HEADS, KV_HEADS, MODELS, SIZE, TRAINED

import jax_baracuda as jb

BATCH, LENGTH = 2, 24


def queries_and_keys(rng: np.random.Generator, dtype: Any = jnp.float32) -> list[np.ndarray]:
    """``[B, H, S, D]``, in float32 with the precision of `dtype`."""
    shapes = [(BATCH, heads, LENGTH, SIZE) for heads in (HEADS, KV_HEADS)]
    return [np.asarray(jnp.asarray(rng.normal(size=shape), dtype).astype(jnp.float32)) for shape in shapes]


def tolerance(x: np.ndarray, length: int, scale: float, dtype: Any) -> float:
    """transformers rounds frequencies and angles to float32. In 16 bits, it rounds sines, products and their sum."""
    of_angle = 3 * length * np.finfo(np.float32).eps
    of_products = 4 * float(jnp.finfo(dtype).eps)
    return float((of_angle + of_products) * scale * np.abs(x).max() * 2**0.5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_rotation(rng: np.random.Generator, name: str, dtype: Any) -> None:
    model = MODELS[name]
    q, k = queries_and_keys(rng, dtype)
    several = (len(model.sections),) if model.sections else ()
    positions = rng.integers(0, model.length, (*several, BATCH, LENGTH))
    positions[..., 0, 0] = model.length - 1  # some frequencies depend on the largest position
    expected = model.rotate(q, k, positions, jnp.dtype(dtype).name)
    inv_freq, scale = jb.rope_frequencies(
        SIZE, 10000.0, model.rope_parameters, seq_len=model.length, max_position_embeddings=TRAINED
    )
    actual = jb.rope_qk(
        jnp.asarray(q, dtype),
        jnp.asarray(k, dtype),
        jnp.asarray(positions),
        interleaved=model.interleaved,
        layout="BHSD",
        rotary_dim=2 * len(inv_freq),
        inv_freq=inv_freq,
        scale=scale,
        sections=model.sections or None,
        sections_interleaved=model.sections_interleaved,
    )
    for ours, theirs, x in zip(actual, expected, (q, k), strict=True):
        assert ours.dtype == dtype
        atol = tolerance(x, model.length, scale, dtype)
        np.testing.assert_allclose(np.asarray(ours, np.float32), theirs, rtol=0, atol=atol)
        of_model = np.abs(theirs[..., : 2 * len(inv_freq)] - x[..., : 2 * len(inv_freq)])
        assert np.median(of_model) > 10 * atol or dtype == jnp.bfloat16  # the comparison sees the rotation


def test_gptj(rng: np.random.Generator) -> None:
    q, k = (x.transpose(0, 2, 1, 3) for x in queries_and_keys(rng))
    positions = rng.integers(0, TRAINED, (BATCH, LENGTH))
    expected = oracle.rotate_by_gptj(q, k, positions, SIZE // 2)
    actual = jb.rope_qk(q, k, positions, interleaved=True, layout="BSHD", rotary_dim=SIZE // 2)
    for ours, theirs, x in zip(actual, expected, (q, k), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance(x, TRAINED, 1, jnp.float32))
