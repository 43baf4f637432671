"""The mesh of the tests on several devices, and what a program exchanges over it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import jax

MESH_SHAPE = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2)}[1 << min(len(jax.devices()), 8).bit_length() - 1]
"""Of a mesh of two axes: 8 devices on CPUs, where they are simulated; as many as there are on GPUs."""

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def collectives(function: Callable[..., object], *operands: jax.Array) -> dict[str, int]:
    """How often each collective occurs in the compiled program."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    return {
        name: len(re.findall(rf"= \S+ {name}(?:-start)?\(|= \(.*\) {name}(?:-start)?\(", text)) for name in COLLECTIVES
    }


def exchanged_elements(function: Callable[..., object], *operands: jax.Array) -> list[int]:
    """How many elements the arrays have that the collectives of the compiled program return."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    collective = "|".join(COLLECTIVES)
    shapes = [
        shape
        for results in re.findall(rf"= (\S+|\(.*?\)) (?:{collective})(?:-start)?\(", text)
        for shape in re.findall(r"\[([\d,]*)\]", results)
    ]
    return [math.prod(int(size) for size in shape.split(",") if size) for shape in shapes]
