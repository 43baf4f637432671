"""nequix: energies, forces and stresses of a batch of crystals, and training on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jraph
import numpy as np
from nequix.model import Nequix

CRYSTALS, ATOMS, EDGES, SPECIES = 2, 32, 500, 3
"""Atoms and edges of each crystal."""


def crystals(rng: np.random.Generator) -> jraph.GraphsTuple:
    """Random atoms, and edges from each of them to others of its crystal."""
    of_crystal = ATOMS * np.repeat(np.arange(CRYSTALS), EDGES)
    senders = rng.integers(0, ATOMS, CRYSTALS * EDGES)
    receivers = (senders + rng.integers(1, ATOMS, CRYSTALS * EDGES)) % ATOMS
    positions = 3 * rng.normal(size=(CRYSTALS * ATOMS, 3))
    return jraph.GraphsTuple(
        nodes={
            "species": jnp.asarray(rng.integers(0, SPECIES, CRYSTALS * ATOMS)),
            "positions": jnp.asarray(positions, jnp.float32),
        },
        edges={"shifts": jnp.asarray(rng.integers(-1, 2, (CRYSTALS * EDGES, 3)), jnp.float32)},
        globals={"cell": jnp.tile(20 * jnp.eye(3), (CRYSTALS, 1, 1))},
        senders=jnp.asarray(senders + of_crystal),
        receivers=jnp.asarray(receivers + of_crystal),
        n_node=jnp.full(CRYSTALS, ATOMS),
        n_edge=jnp.full(CRYSTALS, EDGES),
    )


def test_training(rng: np.random.Generator, compare_redirected: Callable[..., Any]) -> None:
    """Gradients of a loss of forces, which are gradients of energies, agree."""
    model = Nequix(
        jax.random.key(0),
        n_species=SPECIES,
        lmax=1,
        hidden_irreps="8x0e + 8x1o",
        n_layers=2,
        avg_n_neighbors=EDGES / ATOMS,
    )
    parameters, static = eqx.partition(model, eqx.is_array)

    def loss(parameters: Any, graph: jraph.GraphsTuple) -> Any:
        energies, forces, stresses = eqx.combine(parameters, static)(graph)
        return (energies**2).mean() + (forces**2).mean() + (stresses**2).mean(), (energies, forces, stresses)

    calls = ("gradient of a gather", "x.at[ids].add", "jax.ops.segment_sum")
    step = jax.value_and_grad(loss, has_aux=True)
    compare_redirected("nequix, training", step, parameters, crystals(rng), calls=calls)
