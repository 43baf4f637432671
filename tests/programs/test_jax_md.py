"""jax-md: a simulation with cells and neighbour lists, its forces, and a potential matched to forces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_md import energy, partition, simulate, space

PARTICLES, BOX, STEPS = 128, 6.0, 20


def particles_of_a_crystal(rng: np.random.Generator) -> jax.Array:
    lattice = np.stack(np.meshgrid(*[np.arange(6)] * 3), axis=-1).reshape(-1, 3)[:PARTICLES] * (BOX / 6)
    return jnp.asarray(lattice + 0.02 * rng.normal(size=lattice.shape))


def lennard_jones() -> tuple[Any, Any, Any]:
    """The shift of particles, the neighbour list, and the energy of pairs, where each pair is listed twice."""
    displacement, shift = space.periodic(BOX)
    neighbours, of_energy = energy.lennard_jones_neighbor_list(
        displacement, BOX, sigma=0.9, r_cutoff=1.8, r_onset=1.5, format=partition.Sparse, per_particle=True
    )
    return shift, neighbours, of_energy


def test_simulation(rng: np.random.Generator, compare_redirected: Callable[..., Any]) -> None:
    """Energies of particles are segment sums. Forces are their gradients, with gradients of gathers."""
    with jax.enable_x64():
        shift, neighbours, of_energy = lennard_jones()
        positions = particles_of_a_crystal(rng)
        listed = neighbours.allocate(positions, extra_capacity=16)

        def total(positions: jax.Array, neighbor: Any) -> jax.Array:
            return of_energy(positions, neighbor=neighbor).sum()

        start, step = simulate.nve(total, shift, 1e-3)

        def run(positions: jax.Array) -> Any:
            state = start(jax.random.key(0), positions, kT=0.1, neighbor=listed)

            def next_state(carry: Any, _: None) -> Any:
                state, listed = carry
                listed = listed.update(state.position)
                state = step(state, neighbor=listed)
                return (state, listed), of_energy(state.position, neighbor=listed)

            (state, last), energies = jax.lax.scan(next_state, (state, listed), length=STEPS)
            return state.position, state.momentum, energies, last.did_buffer_overflow

        *_, overflow = compare_redirected("jax-md, Lennard-Jones", run, positions, rtol=1e-9, atol=1e-9)
        assert not overflow


def test_force_matching(rng: np.random.Generator, compare_redirected: Callable[..., Any]) -> None:
    """The gradient of a gradient, as in fitting a potential, agrees."""
    with jax.enable_x64():
        _, neighbours, of_energy = lennard_jones()
        positions = particles_of_a_crystal(rng)
        listed = neighbours.allocate(positions, extra_capacity=16)
        forces = jnp.asarray(rng.normal(size=positions.shape))

        def loss(parameters: dict[str, jax.Array], positions: jax.Array) -> jax.Array:
            total = lambda positions: of_energy(positions, neighbor=listed, **parameters).sum()  # noqa: E731
            return jnp.mean((-jax.grad(total)(positions) - forces) ** 2)

        parameters = {"sigma": jnp.float64(0.85), "epsilon": jnp.float64(1.1)}
        fit = jax.value_and_grad(loss, argnums=(0, 1))
        compare_redirected("jax-md, force matching", fit, parameters, positions, rtol=1e-9, atol=1e-9)
