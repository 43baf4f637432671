"""Example calls of writing rows to slots."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_baracuda as jb
from jax_baracuda._examples.example import EXACT, Example, Operand, Sizes, by_name, distinct_slots, of_pairs


def write_rows(dests: Any, rows: Any, slots: Array, axis: int = 0, layer: Array | None = None) -> Any:
    """For slots that are all different."""
    if isinstance(dests, list):
        return [write_rows(dest, own, slots, axis, layer) for dest, own in zip(dests, rows, strict=True)]
    size = dests.shape[axis if layer is None else axis + 1]
    slots = jnp.where(slots < 0, size, slots)
    if layer is not None:
        return dests.at[layer, slots].set(rows, mode="drop")
    index = (*[slice(None)] * axis, slots)
    return dests.at[index].set(jnp.moveaxis(rows, 0, axis), mode="drop")


def number_of_layer(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    return rng.integers(0, sizes["layer"], shape)


SIZES = {
    "small": {"example": 3, "layer": 2, "slot": 9, "token": 4, "head": 5, "feature": 8},
    "check": {"example": 5, "layer": 3, "slot": 301, "token": 67, "head": 7, "feature": 33},
}
PAGED = {
    "cpu": {"slot": 16_384, "token": 64, "head": 8, "feature": 128},
    "cuda": {"slot": 262_144, "token": 512, "head": 8, "feature": 128},
}

SLOTS = {"slots": Operand(("token",), distinct_slots, "int32")}
ONE = {"dests": Operand(("slot", "head", "feature")), "rows": Operand(("token", "head", "feature"))}
LAYERS = {"dests": Operand(("layer", "slot", "head", "feature")), "rows": Operand(("token", "head", "feature"))}
LAYER = {"layer": Operand((), number_of_layer, "int32")}
HEADS_FIRST = {"dests": Operand(("head", "slot", "feature")), "rows": Operand(("token", "head", "feature"))}
BOTH = {
    "keys": Operand(("slot", "head", "feature")),
    "values": Operand(("slot", "head", "feature")),
    "new_keys": Operand(("token", "head", "feature")),
    "new_values": Operand(("token", "head", "feature")),
}


EXAMPLES = [
    Example(jb.write_rows, write_rows, operands, sizes, variant, options, apply, mapped, tolerance=EXACT)
    for operands, sizes, variant, options, apply, mapped in (
        (ONE | SLOTS, SIZES, "", {}, by_name, None),
        (BOTH | SLOTS, SIZES | PAGED, "keys and values", {}, of_pairs, None),
        (LAYERS | SLOTS | LAYER, SIZES, "a layer", {}, by_name, None),
        (HEADS_FIRST | SLOTS, SIZES, "heads first", {"axis": 1}, by_name, None),
        (ONE | SLOTS, SIZES, "slots an example", {}, by_name, "example"),
    )
]
