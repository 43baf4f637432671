"""Example calls of writing windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_baracuda as jb
from jax_baracuda._examples.example import EXACT, Example, Operand, Sizes, of_pairs


def write_slice(dest: Array, source: Array, start_indices: Sequence[Any], mode: str = "clip") -> Array:
    if mode == "clip":
        return jax.lax.dynamic_update_slice(dest, source, start_indices)
    # Pads every side, so that a window outside of `dest` is not moved.
    padded = jnp.pad(dest, [(size, size) for size in source.shape])
    start_indices = [start + size for start, size in zip(start_indices, source.shape, strict=True)]
    written = jax.lax.dynamic_update_slice(padded, source, start_indices)
    return jax.lax.slice(written, source.shape, np.add(source.shape, dest.shape).tolist())


def write_slices(
    dests: Sequence[Array], sources: Sequence[Array], start_indices: Sequence[Any], mode: str = "clip"
) -> list[Array]:
    return [write_slice(dest, source, start_indices, mode) for dest, source in zip(dests, sources, strict=True)]


def append(function: Callable[..., Array], dest: Array, source: Array, start: Array, **options: Any) -> Array:
    """Writes at a position along the second-to-last dimension."""
    return function(dest, source, (*(0,) * (dest.ndim - 2), start, 0), **options)


def write_part(function: Callable[..., Array], dest: Array, source: Array, start: Array, **options: Any) -> Array:
    """Writes from index 1 of the first dimension on."""
    return function(dest, source, (1, start, 0), **options)


def append_both(function: Callable[..., list[Array]], start: Array, **others: Any) -> Any:
    return of_pairs(function, **others, start_indices=(0, start, 0))


def inside(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    return rng.integers(0, sizes["time"] - sizes["new"] + 1, shape)


def across_the_end(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    return rng.integers(sizes["time"] - sizes["new"] + 1, sizes["time"], shape)


PART = {
    "small": {"example": 3, "part": 2, "time": 9, "new": 4, "feature": 13, "head": 5},
    "check": {"example": 5, "part": 3, "time": 301, "new": 17, "feature": 33, "head": 7},
}
STEP = {
    "small": PART["small"],
    "check": {"example": 5, "time": 301, "new": 1, "feature": 33},
    "cpu": {"example": 8, "time": 4096, "new": 1, "feature": 512},
    "cuda": {"example": 32, "time": 8192, "new": 1, "feature": 512},
}
ROW = {
    "cpu": {"time": 32_768, "new": 1, "feature": 512},
    "cuda": {"time": 262_144, "new": 1, "feature": 512},
}
PAIR = {
    "cpu": {"example": 8, "time": 2048, "new": 64, "feature": 512, "head": 512},
    "cuda": {"example": 32, "time": 4096, "new": 64, "feature": 512, "head": 512},
}

PLANE = {"dest": Operand(("time", "feature")), "source": Operand(("new", "feature"))}
BOX = {"dest": Operand(("example", "time", "feature")), "source": Operand(("part", "new", "feature"))}
BOTH = {
    "keys": Operand(("example", "time", "feature")),
    "values": Operand(("example", "time", "head")),
    "new_keys": Operand(("example", "new", "feature")),
    "new_values": Operand(("example", "new", "head")),
}
START, LATE = ({"start": Operand((), draw, "int32")} for draw in (inside, across_the_end))
DROP: dict[str, Any] = {"mode": "drop"}

EXAMPLES = [
    Example(function, plain_jax, operands, sizes, variant, options, apply, mapped, tolerance=EXACT)
    for function, plain_jax, operands, sizes, variant, options, apply, mapped in (
        (jb.write_slice, write_slice, PLANE | START, PART | ROW, "", {}, append, None),
        (jb.write_slice, write_slice, PLANE | START, STEP, "a position an example", {}, append, "example"),
        (jb.write_slice, write_slice, PLANE | LATE, PART, "clip at the end", {}, append, None),
        (jb.write_slice, write_slice, PLANE | LATE, PART, "drop at the end", DROP, append, None),
        (jb.write_slice, write_slice, BOX | LATE, PART, "clip along two dimensions", {}, write_part, None),
        (jb.write_slice, write_slice, BOX | LATE, PART, "drop along two dimensions", DROP, write_part, None),
        (jb.write_slices, write_slices, BOTH | START, PART | PAIR, "", {}, append_both, None),
        (jb.write_slices, write_slices, BOTH | LATE, PART, "drop at the end", DROP, append_both, None),
    )
]
