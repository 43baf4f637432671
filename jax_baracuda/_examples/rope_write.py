"""Example calls of the rotation that writes to a paged cache."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_baracuda as jb
from jax_baracuda._examples.example import Example, Operand, distinct_slots, integers
from jax_baracuda._examples.rope import LAST_POSITION, rope
from jax_baracuda._examples.write_rows import number_of_layer, write_rows


def rope_write(
    q: Array,
    k: Array,
    v: Array,
    key_cache: Array,
    value_cache: Array,
    positions: Array,
    slots: Array,
    *,
    axis: int = 0,
    layer: Array | None = None,
    sections: tuple[int, ...] | None = None,
    **rotation: Any,
) -> tuple[Array, Array, Array]:
    """For slots that are all different, and sections of neighbouring pairs of halves."""

    def rotated(x: Array) -> Array:
        if sections is None:
            return rope(x[None], positions, layout="BSHD", **rotation)[0]
        of_sections = [rope(x[None], of_section, layout="BSHD", **rotation)[0] for of_section in positions]
        of_halves = np.tile(np.repeat(np.arange(len(sections)), sections), 2)
        section = np.pad(of_halves, (0, x.shape[-1] - len(of_halves)))
        return jnp.select([section == i for i in range(len(sections))], of_sections)

    key_cache, value_cache = write_rows([key_cache, value_cache], [rotated(k), v], slots, axis, layer)
    return rotated(q), key_cache, value_cache


SIZES = {
    "small": {"layer": 2, "slot": 9, "token": 4, "q_head": 4, "head": 2, "feature": 8, "section": 2},
    "check": {"layer": 3, "slot": 301, "token": 67, "q_head": 6, "head": 3, "feature": 32, "section": 2},
}
PAGED = {
    "cpu": {"slot": 16_384, "token": 64, "q_head": 32, "head": 8, "feature": 128},
    "cuda": {"slot": 65_536, "token": 512, "q_head": 32, "head": 8, "feature": 128},
}

ROWS = {
    "q": Operand(("token", "q_head", "feature")),
    "k": Operand(("token", "head", "feature")),
    "v": Operand(("token", "head", "feature")),
}
SLOTS = {"slots": Operand(("token",), distinct_slots, "int32")}
POSITIONS = {"positions": Operand(("token",), integers(0, LAST_POSITION), "int32")}
OF_SECTIONS = {"positions": Operand(("section", "token"), integers(0, LAST_POSITION), "int32")}
LAYER = {"layer": Operand((), number_of_layer, "int32")}


def caches(*dims: str) -> dict[str, Operand]:
    return {"key_cache": Operand(dims), "value_cache": Operand(dims)}


FLAT, HEADS_FIRST = caches("slot", "head", "feature"), caches("head", "slot", "feature")
LAYERS = caches("layer", "slot", "head", "feature")
HALVES = {"interleaved": False}

EXAMPLES = [
    Example(jb.rope_write, rope_write, {**ROWS, **of_caches, **others, **SLOTS}, sizes, variant, options)
    for of_caches, others, sizes, variant, options in (
        (FLAT, POSITIONS, SIZES | PAGED, "", HALVES),
        (LAYERS, POSITIONS | LAYER, SIZES, "a layer", {}),
        (HEADS_FIRST, POSITIONS, SIZES, "heads first", {"axis": 1}),
        (FLAT, OF_SECTIONS, SIZES, "sections", {**HALVES, "rotary_dim": 8, "sections": (1, 3)}),
    )
]
