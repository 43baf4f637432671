"""Declarations of the rotations, and their reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from support.matrix.calls import (
    ABSENT,
    FLOATING,
    Constraint,
    Operand,
    Options,
    Problem,
    Sizes,
    declare,
    integers,
    numbers,
    passed,
)

BASE = 10000.0


def rotated(direction: int, angle_errors: float | None, options: Options, x: Any, positions: Any, inv_freq: Any) -> Any:
    """Rotates x, whose layout is in the options. With `angle_errors`, the majorant: the errors of angles, relative."""
    heads_first = options["layout"] != "BSHD"
    x = x if heads_first else jnp.swapaxes(x, 1, 2)
    size = x.shape[3]
    rotary = options["rotary_dim"] or size
    offset = size - rotary if options["rotary_offset"] else 0
    if inv_freq is None:
        inv_freq = jnp.asarray((options["base"] or BASE) ** (-np.arange(0, rotary, 2, dtype=np.float64) / rotary))
    inv_freq = inv_freq.sum(axis=0) if inv_freq.ndim == 2 else inv_freq
    positions = jnp.arange(x.shape[2])[None] if positions is None else positions
    positions = positions[None] if positions.ndim == 1 else positions
    if options["sections"] is ABSENT:
        positions = positions[..., None]
    else:
        pairs = np.arange(rotary // 2)
        is_second = pairs % 2 == 1 if options["sections"] == "interleaved" else pairs >= 1
        positions = positions.reshape(2, *(positions.shape[1:-1] or (1,)), x.shape[2], 1)
        positions = jnp.where(is_second, positions[1], positions[0])
    angle = positions.astype(jnp.float64)[:, None] * inv_freq
    scale = 1.0 if options["scale"] is ABSENT else options["scale"]
    cos, sin = scale * jnp.cos(angle), direction * scale * jnp.sin(angle)
    is_majorant = angle_errors is not None
    if is_majorant:  # the length of the pair, and the rounding error of the angle
        cos = sin = abs(scale) * (1 + angle_errors * jnp.abs(angle))
    before, turned, after = jnp.split(x, [offset, offset + rotary], axis=-1)
    interleaved = options["interleaved"] is not False
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else jnp.split(turned, 2, axis=-1)
    minus = 1 if is_majorant else -1
    pair = (first * cos + minus * second * sin, second * cos + first * sin)
    turned = jnp.stack(pair, axis=-1).reshape(turned.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    result = jnp.concatenate([before, turned, after], axis=-1)
    return result if heads_first else jnp.swapaxes(result, 1, 2)


SIZES: dict[str, Sizes] = {
    "small": {"example": 2, "head": 4, "q_head": 4, "k_head": 2, "sequence": 24, "feature": 8},
    "odd": {"example": 3, "head": 3, "q_head": 5, "k_head": 1, "sequence": 5, "feature": 6},
    "one": {"example": 1, "head": 1, "q_head": 1, "k_head": 1, "sequence": 1, "feature": 4},
    "empty": {"example": 2, "head": 2, "q_head": 2, "k_head": 2, "sequence": 0, "feature": 4},
    "no heads": {"example": 2, "head": 0, "q_head": 2, "k_head": 0, "sequence": 2, "feature": 4},
    "vectors": {"example": 2, "head": 2, "q_head": 4, "k_head": 2, "sequence": 16, "feature": 64},
}
LARGE_SIZES: dict[str, Sizes] = {
    "many rows": {"example": 2, "head": 8, "q_head": 8, "k_head": 2, "sequence": 2048, "feature": 128},
    "few rows": {"example": 4, "head": 8, "q_head": 32, "k_head": 8, "sequence": 1, "feature": 128},
    "many rows, no vectors": {"example": 2, "head": 8, "q_head": 8, "k_head": 8, "sequence": 4096, "feature": 36},
    "odd features": {"example": 2, "head": 9, "q_head": 9, "k_head": 3, "sequence": 999, "feature": 70},
}
MAX_POSITION = 1 << 20
MAX_POSITION_64 = 1 << 10


def _problem(
    names: tuple[str, ...], heads: tuple[str, ...], direction: int, dtype: str, options: Options, sizes: Sizes
) -> Problem:
    def dims(head: str) -> tuple[str, ...]:
        return ("example", *(("sequence", head) if options["layout"] == "BSHD" else (head, "sequence")), "feature")

    operands = [Operand(name, dims(head), numbers) for name, head in zip(names, heads, strict=True)]
    if options["positions"]:
        of_each, positions_dtype = options["positions"].split(" ")
        most = MAX_POSITION_64 if dtype == "float64" else MAX_POSITION
        shape = ("sequence",) if of_each == "shared" else ("example", "sequence")
        shape = shape if options["sections"] is ABSENT else ("two", *shape)
        operands.append(Operand("positions", shape, integers(-most, most), dtype=positions_dtype))
    if options["inv_freq"]:
        wide = "float64" if dtype == "float64" else "float32"
        pair = "half" if options["rotary_dim"] is ABSENT else "pair"
        operands.append(
            Operand(
                "inv_freq",
                ("two", pair),
                lambda rng, shape, d: (rng.uniform(0.001, 1, shape) * [[1], [1e-8]]).astype(d),
                wide,
                differentiable=False,
                has_sign=True,
            )
        )

    def bound(angle_errors: float | None) -> Callable[..., Any]:
        def call(positions: Any = None, inv_freq: Any = None, **features: Any) -> Any:
            return [rotated(direction, angle_errors, options, x, positions, inv_freq) for x in features.values()]

        return call

    def apply(function: Callable[..., Any], **arrays: Any) -> Any:
        chosen = passed(options, "base", "interleaved", "layout", "rotary_dim", "scale")
        size = sizes["feature"]
        rotary = options["rotary_dim"] or size
        if options["rotary_offset"]:
            chosen["rotary_offset"] = size - rotary
        if options["sections"]:
            chosen["sections_interleaved"] = options["sections"] == "interleaved"
            second = rotary // 4 if chosen["sections_interleaved"] else rotary // 2 - 1
            chosen["sections"] = (rotary // 2 - second, second)
        return function(**arrays, **chosen)

    return Problem(
        operands=tuple(operands),
        apply=apply,
        reference=bound(None),
        majorant=bound(1.0 if dtype == "float64" else 0.0),  # the others have exact angles
        results=tuple(map(dims, heads)),
        terms=2,
        free=("example", *(heads if len(heads) == 1 else ()), *(("sequence",) if options["positions"] else ())),
        carry=(0, 0),
    )


OPTIONS = {
    "positions": (ABSENT, "shared int32", "own int32", "own int64", "shared int16", "own uint32"),
    "base": (ABSENT, 500.0),
    "interleaved": (ABSENT, False),
    "layout": (ABSENT, "BSHD"),
    "rotary_dim": (ABSENT, 4),
    "rotary_offset": (ABSENT, "last"),
    "sections": (ABSENT, "contiguous", "interleaved"),
    "inv_freq": (ABSENT, "given"),
    "scale": (ABSENT, 0.75),
}

for _name, _names, _heads, _direction in (
    ("rope", ("x",), ("head",), 1),
    ("rope_backward", ("d_output",), ("head",), -1),
    ("rope_qk", ("q", "k"), ("q_head", "k_head"), 1),
    ("rope_qk_backward", ("d_q_output", "d_k_output"), ("q_head", "k_head"), -1),
):
    declare(
        name=_name,
        dtypes=FLOATING,
        sizes=SIZES,
        large_sizes=LARGE_SIZES,
        options=OPTIONS,
        problem=lambda dtype, options, sizes, names=_names, heads=_heads, direction=_direction: _problem(
            names, heads, direction, dtype, options, sizes
        ),
        constraints=(
            Constraint(
                "frequencies that are given need no base",
                lambda base, inv_freq: base is not ABSENT and inv_freq is not ABSENT,
            ),
            Constraint("sections need positions", lambda sections, positions: bool(sections) and positions is ABSENT),
            Constraint(
                "with all features, the rotated ones are the last ones, too",
                lambda rotary_dim, rotary_offset: rotary_dim is ABSENT and rotary_offset is not ABSENT,
            ),
        ),
        has_carry=True,
    )
