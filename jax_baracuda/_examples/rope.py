"""Example calls of the rotations."""

from __future__ import annotations

from collections.abc import Callable
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


def frequencies(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, sizes: Sizes) -> np.ndarray:
    """Powers of 2: their products with positions are exact. The second row holds their rounding errors, which are 0."""
    return (np.exp2(rng.integers(-12, 1, shape)) * [[1], [0]]).astype(dtype)


def heads_first(head: str) -> Operand:
    return Operand(("example", head, "sequence", "feature"))


def sequence_first(head: str) -> Operand:
    return Operand(("example", "sequence", head, "feature"))


SHARED, OWN = (Operand(dims, integers(0, LAST_POSITION), "int32") for dims in (("sequence",), ("example", "sequence")))
INV_FREQ = Operand(("two", "half"), frequencies, "float32", differentiable=False)

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


def example(
    function: Callable[..., Any],
    plain_jax: Callable[..., Any],
    operands: dict[str, Operand],
    variant: str = "",
    is_timed: bool = False,
    **options: Any,
) -> Example:
    return Example(
        function,
        plain_jax,
        operands,
        {**CHECKED, **TIMED} if is_timed else CHECKED,
        variant,
        options,
    )


X, X_SEQUENCE_FIRST = heads_first("head"), sequence_first("head")
QK = {"q": heads_first("q_head"), "k": heads_first("k_head")}
QK_SEQUENCE_FIRST = {"q": sequence_first("q_head"), "k": sequence_first("k_head")}

EXAMPLES = [
    example(jb.rope, rope, {"x": X}, is_timed=True),
    example(jb.rope, rope, {"x": X}, "half-split", is_timed=True, interleaved=False),
    example(jb.rope, rope, {"x": X, "positions": SHARED}, "positions"),
    example(
        jb.rope,
        rope,
        {"x": X_SEQUENCE_FIRST, "positions": OWN},
        "positions of each example, BSHD",
        layout="BSHD",
    ),
    example(
        jb.rope,
        rope,
        {"x": X_SEQUENCE_FIRST, "positions": OWN},
        "positions of each example, BSHD, half-split",
        layout="BSHD",
        interleaved=False,
    ),
    example(jb.rope, rope, {"x": X, "positions": SHARED, "inv_freq": INV_FREQ}, "frequencies", scale=0.75),
    example(jb.rope_qk, rope_qk, QK, is_timed=True),
    *(
        example(
            jb.rope_qk,
            rope_qk,
            {**operands, "positions": OWN},
            f"a part of the features, {layout}{', half-split' if not interleaved else ''}",
            layout=layout,
            rotary_dim=4,
            interleaved=interleaved,
        )
        for layout, operands in (("BHSD", QK), ("BSHD", QK_SEQUENCE_FIRST))
        for interleaved in (True, False)
    ),
    example(jb.rope_qk, rope_qk, {**QK, "positions": SHARED, "inv_freq": INV_FREQ}, "frequencies", scale=0.75),
    *(
        example(function, plain_jax, {**operands, **others}, variant, is_timed=not variant, **options)
        for function, plain_jax, operands in (
            (jb.rope_backward, rope_backward, {"d_output": X}),
            (jb.rope_qk_backward, rope_qk_backward, {"d_q_output": QK["q"], "d_k_output": QK["k"]}),
        )
        for variant, others, options in (
            ("", {}, {}),
            ("frequencies", {"positions": OWN, "inv_freq": INV_FREQ}, {"scale": 0.75, "interleaved": False}),
        )
    ),
]
