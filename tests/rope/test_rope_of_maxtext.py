"""rope and rope_frequencies against the formulas of maxtext's rotary embeddings, in float64, on random positions."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax_baracuda as jb

BATCH, LENGTH, HEADS, SIZE = 2, 16, 4, 32
ROUNDED = {jnp.float32: 2.0**-22, jnp.bfloat16: 2.0**-7}


def frequencies(size: int, max_timescale: float, linear_factor: float = 1.0) -> np.ndarray:
    """``RotaryEmbedding`` with a smallest timescale of 1."""
    return 1 / (max_timescale ** (2 * np.arange(size // 2) / size) * linear_factor)


def of_llama(inv_freq: np.ndarray) -> np.ndarray:
    """``LLaMARotaryEmbedding`` with its scale, whose constants are those of Llama 3.1."""
    turns = 8192 * inv_freq / (2 * np.pi)
    smooth = (turns - 1) / (4 - 1)
    between = (1 - smooth) * inv_freq / 8 + smooth * inv_freq
    return np.where(turns > 4, inv_freq, np.where(turns < 1, inv_freq / 8, between))


def of_yarn(truncate: bool) -> np.ndarray:
    """``YarnRotaryEmbedding``, 40 times as long as trained."""

    def pair_that_turns(times: float) -> float:
        return SIZE * math.log(4096 / (times * 2 * math.pi)) / (2 * math.log(1e4))

    low, high = pair_that_turns(32), pair_that_turns(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, SIZE - 1)
    ramp = np.clip((np.arange(SIZE // 2) - low) / (high - low), 0, 1)
    inv_freq = frequencies(SIZE, 1e4)
    return inv_freq / 40 * ramp + inv_freq * (1 - ramp)


def rotate(x: np.ndarray, angles: np.ndarray, interleaved: bool, scale: float = 1.0) -> np.ndarray:
    """Features ``[B, S, H, D]`` as complex numbers, multiplied. Features beyond the angles ``[B, S, pairs]`` stay."""
    size = 2 * angles.shape[-1]
    rotated, rest = x[..., :size].astype(np.float64), x[..., size:]
    pairs = rotated.reshape(*x.shape[:-1], -1, 2) if interleaved else np.stack(np.split(rotated, 2, axis=-1), axis=-1)
    product = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles[:, :, None]) * scale
    parts = np.stack([product.real, product.imag], axis=-1)
    joined = parts.reshape(rotated.shape) if interleaved else np.concatenate([parts[..., 0], parts[..., 1]], axis=-1)
    return np.concatenate([joined, rest], axis=-1)


LLAMA = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
UNSCALED_YARN = {**YARN, "attention_factor": 1.0}
QWEN = {"rope_type": "default", "partial_rotary_factor": 0.25}

# The frequencies and the scale by maxtext's formulas, the base and the scaling of rope_frequencies, and the pairing.
CLASSES: dict[str, tuple[np.ndarray, float, float, dict[str, Any], bool]] = {
    "RotaryEmbedding": (frequencies(SIZE, 1e4), 1.0, 1e4, {}, False),
    "RotaryEmbedding, other timescale": (frequencies(SIZE, 5e5), 1.0, 5e5, {}, False),
    "RotaryEmbedding, linear": (frequencies(SIZE, 1e6, 8.0), 1.0, 1e6, {"rope_type": "linear", "factor": 8.0}, False),
    "Qwen3NextRotaryEmbedding": (frequencies(SIZE // 4, 1e7), 1.0, 1e7, QWEN, False),
    "LLaMARotaryEmbedding": (frequencies(SIZE, 5e5), 1.0, 5e5, {}, True),
    "LLaMARotaryEmbedding, scaled": (of_llama(frequencies(SIZE, 5e5)), 1.0, 5e5, LLAMA, True),
    "YarnRotaryEmbedding": (of_yarn(truncate=True), 1.0, 1e4, UNSCALED_YARN, True),
    "YarnRotaryEmbedding, halves": (of_yarn(truncate=True), 1.0, 1e4, UNSCALED_YARN, False),
    "YarnRotaryEmbedding, not truncated, scaled": (
        of_yarn(truncate=False),
        0.1 * math.log(40) + 1,
        1e4,
        {**YARN, "truncate": False},
        True,
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CLASSES)
def test_class(rng: np.random.Generator, name: str, dtype: Any) -> None:
    """Where maxtext moves rotated pairs apart, ours leaves them where they were."""
    expected_freq, expected_scale, base, parameters, interleaved = CLASSES[name]
    inv_freq, scale = jb.rope_frequencies(SIZE, base, parameters)
    np.testing.assert_allclose(inv_freq, expected_freq, rtol=1e-12)
    assert scale == pytest.approx(expected_scale, rel=1e-12)

    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, HEADS, SIZE)), dtype)
    positions = rng.integers(0, 16384, (BATCH, LENGTH))
    exact = rotate(np.asarray(x, np.float64), positions[:, :, None] * expected_freq, interleaved, expected_scale)
    options = {"interleaved": interleaved, "layout": "BSHD", "rotary_dim": 2 * len(inv_freq)}
    y = jb.rope(x, jnp.asarray(positions), inv_freq=inv_freq, scale=scale, **options)
    largest = float(np.abs(exact).max())
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=0, atol=ROUNDED[dtype] * largest)


def patches_of_llama(side: int) -> np.ndarray:
    """Columns and rows of a square of patches, from 1 on, and a class token that is not rotated."""
    number = np.arange(side**2)
    return np.concatenate([[number % side + 1, number // side + 1], np.zeros((2, 1), int)], axis=1)


def patches_of_qwen(height: int, width: int, block: int) -> np.ndarray:
    """Rows and columns of patches, square block by square block."""
    places = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"))
    blocks = places.reshape(2, height // block, block, width // block, block)
    return blocks.swapaxes(2, 3).reshape(2, -1)


VISION = {
    "LlamaVisionRotaryEmbedding": (patches_of_llama(4), True),
    "Qwen3OmniMoeVisionRotaryEmbedding": (patches_of_qwen(4, 6, 2), False),
}
"""Two positions of each patch, and whether pairs are neighbours."""


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", VISION)
def test_vision_class(rng: np.random.Generator, name: str, dtype: Any) -> None:
    """Each of the two positions rotates half of the pairs, by the same frequencies."""
    positions, interleaved = VISION[name]
    of_half = frequencies(SIZE // 2, 1e4)
    x = jnp.asarray(rng.normal(size=(BATCH, positions.shape[1], HEADS, SIZE)), dtype)
    angles = np.concatenate([at[None, :, None] * of_half for at in positions], axis=-1)
    exact = rotate(np.asarray(x, np.float64), angles, interleaved)
    y = jb.rope(
        x,
        jnp.asarray(positions),
        inv_freq=np.concatenate([of_half, of_half]),
        sections=(SIZE // 4, SIZE // 4),
        interleaved=interleaved,
        layout="BSHD",
    )
    largest = float(np.abs(exact).max())
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=0, atol=ROUNDED[dtype] * largest)
