"""fennol: energies and forces of its models, and training on both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from fennol import FENNIX

from benchmarks.clients import Program
from benchmarks.clients.particles import CUTOFF, crystal, training_step

SIZE_OF, SIZES = "atoms", (64, 256)
ANGLES_WITHIN = 3.5
"""In angstroms: ANI looks at the angles of these pairs."""

MODELS: dict[str, dict[str, Any]] = {
    "PaiNN": {"module_name": "PAINN", "dim": 64, "nchannels": 64},
    "HIPNN": {"module_name": "HIPNN", "dim": 64},
    "CRATE": {"module_name": "CRATE"},
    "NewtonNet": {"module_name": "NEWTONNET", "dim": 64},
    "ANI": {"module_name": "ANI_AEV", "species_order": "H,C,N,O", "graph_angle_key": "angles"},
}
OF_ANGLES = {
    "angles": {"module_name": "GRAPH_FILTER", "cutoff": ANGLES_WITHIN, "parent_graph": "graph", "graph_key": "angles"},
    "extension": {"module_name": "GRAPH_ANGULAR_EXTENSION", "graph_key": "angles"},
}


def model_and_data(name: str, count: int) -> tuple[FENNIX, Any]:
    """A model with random weights, and atoms with their pairs, which fennol would find in quadratic time."""
    energy = {"module_name": "NEURAL_NET", "neurons": [32, 1], "input_key": "embedding"}
    model = FENNIX(
        cutoff=CUTOFF,
        rng_key=jax.random.PRNGKey(0),
        modules={"embedding": MODELS[name], "energy": energy},
        preprocessing=OF_ANGLES if name == "ANI" else {},
        energy_terms=["energy"],
    )
    atoms = crystal(count)
    cell = np.eye(3, dtype=np.float32)[None] * atoms.box
    vectors = atoms.positions[atoms.others] - atoms.positions[atoms.centres] + atoms.shifts * atoms.box
    pairs = {
        "edge_src": atoms.centres,
        "edge_dst": atoms.others,
        "d12": (vectors**2).sum(axis=1).astype(np.float32),
        "pbc_shifts": atoms.shifts.astype(np.int32),
        "overflow": False,
    }
    data = {
        "species": atoms.numbers.astype(np.int32),
        "coordinates": atoms.positions.astype(np.float32),
        "natoms": np.array([count], np.int32),
        "batch_index": np.zeros(count, np.int32),
        "cells": cell,
        "reciprocal_cells": np.linalg.inv(cell),
        "graph": pairs,
    }
    _, *rest = model.preprocessing.layers
    for layer in rest:
        _, data = layer(layer.init(), data)
    return model, jax.tree.map(jax.numpy.asarray, data)


def program(name: str, trains: bool, count: int) -> Program:
    model, data = model_and_data(name, count)

    def energy_and_forces(weights: Any, data: Any) -> tuple[jax.Array, jax.Array]:
        energy, forces, _ = model._energy_and_forces(weights, data)
        return energy, forces

    return Program(training_step(energy_and_forces) if trains else energy_and_forces, (model.variables, data))


PROGRAMS: dict[str, Callable[[int], Program]] = {
    **{name: functools.partial(program, name, False) for name in MODELS},
    **{f"{name}, training": functools.partial(program, name, True) for name in ("PaiNN", "HIPNN")},
}
