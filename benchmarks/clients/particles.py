"""Atoms that force fields are given: a disturbed cubic crystal in a periodic box, and its pairs of neighbours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.spatial import cKDTree

ELEMENTS = (1, 6, 7, 8)
SPACING, DISTURBANCE = 2.3, 0.1
CUTOFF = 4.5
"""In angstroms. An atom then has some 31 neighbours."""


@dataclasses.dataclass(frozen=True)
class Atoms:
    """Atoms and the pairs of them that are closer than the cutoff, each pair in both directions, sorted by centre."""

    numbers: np.ndarray
    positions: np.ndarray
    box: float
    centres: np.ndarray
    others: np.ndarray
    shifts: np.ndarray
    """``[pairs, 3]``, the number of boxes by which the other atom is displaced."""


def crystal(count: int, cutoff: float = CUTOFF) -> Atoms:
    """`count` atoms in a box that may have vacant sites."""
    rng = np.random.default_rng(0)
    side = round(np.ceil(count ** (1 / 3)))
    box = side * SPACING
    sites = np.stack(np.meshgrid(*[np.arange(side)] * 3), axis=-1).reshape(-1, 3)[:count] * SPACING
    positions = (sites + DISTURBANCE * rng.normal(size=sites.shape)) % box
    pairs = cKDTree(positions, boxsize=box).query_pairs(cutoff, output_type="ndarray")
    centres, others = np.concatenate([pairs, pairs[:, ::-1]]).astype(np.int32).T
    order = np.lexsort((others, centres))
    centres, others = centres[order], others[order]
    shifts = -np.round((positions[others] - positions[centres]) / box)
    return Atoms(rng.choice(ELEMENTS, count), positions, box, centres, others, shifts)


def random_weights(init: Callable[..., Any], *arguments: Any) -> Any:
    """Normal weights of the shapes that `init` would return, which takes long to run."""
    rng = np.random.default_rng(1)

    def draw(shape: jax.ShapeDtypeStruct) -> jax.Array:
        inputs = max(shape.shape[-2], 1) if len(shape.shape) > 1 else 100  # biases and scales are small
        return jnp.asarray(rng.normal(size=shape.shape) * inputs**-0.5, shape.dtype)

    return jax.tree.map(draw, jax.eval_shape(init, *arguments))


def training_step(energy_and_forces: Callable[[Any, Any], tuple[jax.Array, jax.Array]]) -> Callable[..., Any]:
    """The loss of energies and forces, and its gradient by the weights."""

    def loss(weights: Any, data: Any) -> jax.Array:
        energy, forces = energy_and_forces(weights, data)
        return jnp.mean((energy / len(forces)) ** 2) + jnp.mean((forces - 0.1) ** 2)

    return jax.value_and_grad(loss)
