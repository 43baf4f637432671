"""Example calls of the rotations."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_baracuda as jb
from jax_baracuda._examples.example import Example, Operand, Sizes, integers

# ----------------------------------------------------------------------------------------------------------------------
# Plain JAX

LAST_POSITION = 1 << 13
"""The exclusive upper bound of positions that are operands: plain JAX looks their angles up in a table."""


def rotate_adjacent(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates features (2i, 2i + 1) by cosines and sines that broadcast to the pairs."""
    first, second = x[..., ::2], x[..., 1::2]
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)


def rotate_halves(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates features (i, i + D/2)."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rope(
    x: Array,
    positions: Array | None = None,
    *,
    interleaved: bool = True,
    layout: str = "BHSD",
    rotary_dim: int | None = None,
    inv_freq: Any = None,
    scale: float = 1.0,
    direction: int = 1,
) -> Array:
    """The rotation, with sine and cosine from tables. If the frequencies are constants, the tables are, too."""
    head_axis, sequence_axis = (1, 2) if layout == "BHSD" else (2, 1)
    size = rotary_dim or x.shape[3]
    inv_freq = jb.rope_frequencies(size)[0] if inv_freq is None else inv_freq.sum(axis=0)
    numpy = np if isinstance(inv_freq, np.ndarray) else jnp
    angles = numpy.outer(np.arange(x.shape[sequence_axis] if positions is None else LAST_POSITION), inv_freq)
    cos, sin = (jnp.asarray(scale * f(angles), x.dtype) for f in (numpy.cos, numpy.sin))
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = (jnp.expand_dims(t[None] if t.ndim == 2 else t, head_axis) for t in (cos, direction * sin))
    rotated = (rotate_adjacent if interleaved else rotate_halves)(x[..., :size], cos, sin)
    return rotated if size == x.shape[3] else jnp.concatenate([rotated, x[..., size:]], axis=-1)


def rope_qk(q: Array, k: Array, positions: Array | None = None, **options: Any) -> tuple[Array, Array]:
    return rope(q, positions, **options), rope(k, positions, **options)


def rope_backward(d_output: Array, positions: Array | None = None, **options: Any) -> Array:
    return rope(d_output, positions, direction=-1, **options)


def rope_qk_backward(
    d_q_output: Array, d_k_output: Array, positions: Array | None = None, **options: Any
) -> tuple[Array, Array]:
    return rope_qk(d_q_output, d_k_output, positions, direction=-1, **options)


# ----------------------------------------------------------------------------------------------------------------------
# Operands


def frequencies(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    """Powers of 2: their products with positions are exact. The second row holds their rounding errors, which are 0."""
    return np.exp2(rng.integers(-12, 1, shape)) * [[1], [0]]


def features(head: str, layout: str = "BHSD") -> Operand:
    return Operand(("example", *((head, "sequence") if layout == "BHSD" else ("sequence", head)), "feature"))


SHARED, OWN = (
    {"positions": Operand(dims, integers(0, LAST_POSITION), "int32")}
    for dims in (("sequence",), ("example", "sequence"))
)
INV_FREQ = {"inv_freq": Operand(("two", "half"), frequencies, "float32", differentiable=False)}
HALVES, BSHD, PART, SCALED = {"interleaved": False}, {"layout": "BSHD"}, {"rotary_dim": 4}, {"scale": 0.75}

# ----------------------------------------------------------------------------------------------------------------------
# The table

CHECKED = {
    "small": {"example": 2, "head": 3, "q_head": 3, "k_head": 3, "sequence": 5, "feature": 8, "half": 4, "two": 2},
    "check": {"example": 2, "head": 3, "q_head": 4, "k_head": 2, "sequence": 1027, "feature": 64, "half": 32, "two": 2},
}
TIMED = {
    "cpu": {"example": 1, "head": 32, "q_head": 24, "k_head": 8, "sequence": 1024, "feature": 128},
    "cuda": {"example": 4, "head": 32, "q_head": 24, "k_head": 8, "sequence": 8192, "feature": 128},
}


X, X_BSHD = features("head"), features("head", "BSHD")
QK, QK_BSHD = ({"q": features("q_head", layout), "k": features("k_head", layout)} for layout in ("BHSD", "BSHD"))
D_QK = {"d_q_output": QK["q"], "d_k_output": QK["k"]}

EXAMPLES = [
    Example(function, plain_jax, operands, {**CHECKED, **timed}, variant, options)
    for function, plain_jax, operands, timed, variant, options in (
        (jb.rope, rope, {"x": X}, TIMED, "", {}),
        (jb.rope, rope, {"x": X}, TIMED, "half-split", HALVES),
        (jb.rope, rope, {"x": X, **SHARED}, {}, "positions", {}),
        (jb.rope, rope, {"x": X_BSHD, **OWN}, {}, "positions of each example, BSHD", BSHD),
        (jb.rope, rope, {"x": X_BSHD, **OWN}, {}, "positions of each example, BSHD, half-split", BSHD | HALVES),
        (jb.rope, rope, {"x": X, **SHARED, **INV_FREQ}, {}, "frequencies", SCALED),
        (jb.rope_qk, rope_qk, QK, TIMED, "", {}),
        (jb.rope_qk, rope_qk, QK | OWN, {}, "a part of the features, BHSD", PART),
        (jb.rope_qk, rope_qk, QK | OWN, {}, "a part of the features, BHSD, half-split", PART | HALVES),
        (jb.rope_qk, rope_qk, QK_BSHD | OWN, {}, "a part of the features, BSHD", PART | BSHD),
        (jb.rope_qk, rope_qk, QK_BSHD | OWN, {}, "a part of the features, BSHD, half-split", PART | BSHD | HALVES),
        (jb.rope_qk, rope_qk, {**QK, **SHARED, **INV_FREQ}, {}, "frequencies", SCALED),
        (jb.rope_backward, rope_backward, {"d_output": X}, TIMED, "", {}),
        (jb.rope_backward, rope_backward, {"d_output": X, **OWN, **INV_FREQ}, {}, "frequencies", SCALED | HALVES),
        (jb.rope_qk_backward, rope_qk_backward, D_QK, TIMED, "", {}),
        (jb.rope_qk_backward, rope_qk_backward, {**D_QK, **OWN, **INV_FREQ}, {}, "frequencies", SCALED | HALVES),
    )
]
