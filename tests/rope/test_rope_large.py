"""Features of more than 2^31 elements: kernels rotate the elements beyond 2^31 by the right positions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rope.reference import LAYOUTS, PAIRINGS, Rotation
from support.large import noise, require_gpu_memory

from jax_baracuda import rope, rope_backward, rope_qk

CHECKED = 40
"""The number of rows compared at each end."""


def ends(x: Any, axis: int) -> np.ndarray:
    """The first and the last rows along an axis."""
    # jax.numpy may slice with 32-bit starts.
    parts = [jax.lax.slice_in_dim(x, start, start + CHECKED, axis=axis) for start in (0, x.shape[axis] - CHECKED)]
    return np.concatenate([np.asarray(part) for part in parts], axis=axis)


# Sizes in the layout, and the axis along which both ends are compared.
SHAPES: dict[str, tuple[tuple[int, int, int, int], int]] = {
    "many examples": ((2**18 + 3, 64, 1, 130), 0),
    "many heads": ((1, 2**24 + 3, 2, 66), 1),
    "many heads or positions": ((1, 2, 2**24 + 3, 66), 2),
    "many features": ((1, 1, 3, 2**30 + 2), 3),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", PAIRINGS, ids=["interleaved", "half-split"])
def test_more_than_2_31_elements(shape: str, interleaved: bool, layout: str) -> None:
    require_gpu_memory(25)
    sizes, axis = SHAPES[shape]
    assert np.prod(sizes, dtype=np.int64) > 2**31
    sequence_axis = 2 if layout == "BHSD" else 1
    options = {"interleaved": interleaved, "layout": layout, "rotary_dim": min(sizes[3], 34)}
    positions = np.arange(sizes[sequence_axis])
    rotation = Rotation(ends(positions, 0) if axis == sequence_axis else positions, **options)
    x = noise(sizes, 1)
    checked = ends(x, axis)
    for function, direction in ((rope, 1), (rope_backward, -1)):
        y = jax.jit(lambda x, function=function: function(x, **options))(x)
        rotation.of(checked, direction).check(ends(y, axis), f"direction {direction}")
        del y


@pytest.mark.parametrize("interleaved", PAIRINGS, ids=["interleaved", "half-split"])
def test_few_pairs_among_many_features(interleaved: bool) -> None:
    """In place, a kernel visits only the rotated pairs. A few pairs that lie far apart are rotated right."""
    require_gpu_memory(25)
    sizes = (1, 2**15 + 3, 2, 2**15 + 8)
    assert np.prod(sizes, dtype=np.int64) > 2**31
    options = {"interleaved": interleaved, "rotary_dim": 8}
    x = noise(sizes, 3)
    checked = ends(x, 1)
    y = jax.jit(lambda x: rope(x, **options), donate_argnums=0)(x)
    Rotation(np.arange(2), **options).of(checked).check(ends(y, 1))


def test_many_positions_of_each_example() -> None:
    """Positions beyond element 2^31 are read right, too."""
    require_gpu_memory(60)
    examples, length = 2**16 + 1, 2**15
    positions = jax.jit(
        lambda: (
            jax.lax.broadcasted_iota(jnp.int32, (examples, length), 0) * 7
            + jax.lax.broadcasted_iota(jnp.int32, (examples, length), 1)
        )
    )()
    assert positions.size > 2**31
    x = noise((examples, 1, length, 2), 2)
    y, z = jax.jit(rope_qk)(x, x, positions)
    checked = np.array([0, 1, examples - 2, examples - 1])
    of_checked = np.asarray(x[checked])
    for result in (y, z):
        Rotation(np.asarray(positions[checked])).of(of_checked).check(np.asarray(result[checked]))
