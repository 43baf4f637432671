"""jax-pme: electrostatic energies and forces of batches of ionic crystals, by Ewald sums."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from ase.build import bulk
from jaxpme import batched_flat, batched_mixed

from benchmarks.clients import Program

SIZE_OF, SIZES = "crystals", (4, 32)
WAVELENGTH = 1.2
"""The shortest wavelength of the sums in reciprocal space, in angstroms."""


def crystals(count: int) -> list[object]:
    """Disturbed crystals of 64 ions."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        atoms = bulk("NaCl", "rocksalt", a=5.6, cubic=True).repeat(2)
        atoms.set_initial_charges(np.where(atoms.numbers == 11, 1.0, -1.0))
        atoms.positions += 0.1 * rng.normal(size=atoms.positions.shape)
        made.append(atoms)
    return made


def mixed(count: int) -> Program:
    calculator = batched_mixed.Ewald()
    return of_calculator(calculator, calculator.prepare(crystals(count), cutoff=5.0, lr_wavelength=WAVELENGTH))


def flat(count: int) -> Program:
    calculator = batched_flat.Ewald()
    return of_calculator(calculator, calculator.prepare(crystals(count), None, 5.0, lr_wavelength=WAVELENGTH))


def of_calculator(calculator: object, inputs: tuple[object, ...]) -> Program:
    def narrow(x: object) -> jax.Array:
        x = np.asarray(x)
        return jnp.asarray(x, jnp.float32 if x.dtype.kind == "f" else jnp.int32 if x.dtype.kind in "iu" else x.dtype)

    return Program(calculator.energy_forces, jax.tree.map(narrow, inputs), rtol=1e-3, atol=1e-4)


PROGRAMS: dict[str, Callable[[int], Program]] = {"Ewald, flat": flat, "Ewald, mixed": mixed}
