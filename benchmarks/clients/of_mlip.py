"""mlip: energies and forces of MACE, NequIP, ViSNet and eSEN, training on both, and ViSNet's deterministic mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import mlip.models.visnet.layer
import numpy as np
from mlip.data import DatasetInfo
from mlip.data.helpers.dummy_init_graph import get_dummy_graph_for_model_init
from mlip.graph import EdgeOrdering, Graph, GraphEdges, GraphGlobals, GraphNodes
from mlip.models import Esen, ForceField, Mace, Nequip, Visnet
from mlip.models.predictors import ConservativePredictor
from mlip.typing.properties import Properties

import jax_baracuda as jb
from benchmarks.clients import Program
from benchmarks.clients.particles import CUTOFF, ELEMENTS, Atoms, crystal, random_weights, training_step

SIZE_OF, SIZES = "atoms", (64, 256)

MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "MACE": (Mace, {"num_channels": 32, "l_max": 2, "correlation": 2}),
    "NequIP": (Nequip, {"num_layers": 3, "target_irreps": "32x0e + 32x0o + 16x1o + 16x1e", "l_max": 2}),
    "ViSNet": (Visnet, {"num_layers": 3, "num_channels": 64}),
    "eSEN": (Esen, {"num_layers": 2, "sphere_channels": 32, "hidden_channels": 32, "edge_channels": 32}),
}


def as_graph(atoms: Atoms) -> Graph:
    """mlip's graph, without its own search of neighbours."""
    as_ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    of_system = {"cell": np.eye(3, dtype=np.float32)[None] * atoms.box, "weight": np.ones(1, np.float32)}
    return Graph(
        nodes=GraphNodes(positions=jnp.asarray(atoms.positions, jnp.float32), atomic_numbers=as_ints(atoms.numbers)),
        edges=GraphEdges(shifts=jnp.asarray(atoms.shifts, jnp.float32)),
        globals=GraphGlobals(**jax.tree.map(jnp.asarray, of_system)),
        n_node=as_ints([len(atoms.numbers)]),
        n_edge=as_ints([len(atoms.centres)]),
        senders=as_ints(atoms.centres),
        receivers=as_ints(atoms.others),
        ordering=EdgeOrdering.SENDER,
    )


def our_sum(data: Any, segment_ids: jax.Array, num_segments: int, deterministic: bool = False) -> jax.Array:
    """Replaces mlip's sum of messages."""
    return jb.segment_sum(data, segment_ids, num_segments, deterministic=deterministic)


def with_our_sum() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(mlip.models.visnet.layer, "segment_sum", our_sum)


def program(name: str, trains: bool, count: int, **options: Any) -> Program:
    kind, usual = MODELS[name]
    atoms = crystal(count)
    neighbours = len(atoms.centres) / count
    info = DatasetInfo(
        atomic_energies_map={number: -float(number) for number in ELEMENTS},
        graph_cutoff_angstrom=CUTOFF,
        avg_num_neighbors=neighbours,
        avg_r_min_angstrom=1.8,
    )
    network = kind(kind.Config(**usual, **options), info)
    wanted = Properties()
    predictor = ConservativePredictor(
        mlip_network=network,
        required_properties=wanted,
        energy_head=ForceField.get_energy_head(network.config, wanted, network),
    )
    weights = random_weights(predictor.init, jax.random.key(0), get_dummy_graph_for_model_init())

    def energy_and_forces(weights: Any, graph: Graph) -> tuple[jax.Array, jax.Array]:
        result = predictor.apply(weights, graph)
        return result.globals.energy, result.nodes.forces

    return Program(
        training_step(energy_and_forces) if trains else energy_and_forces,
        (weights, as_graph(atoms)),
        rtol=1e-3,
        atol=1e-4,
        edit=with_our_sum if name == "ViSNet" else None,
    )


PROGRAMS: dict[str, Callable[[int], Program]] = {
    **{name: functools.partial(program, name, False) for name in MODELS},
    "MACE, training": functools.partial(program, "MACE", True),
    "ViSNet, training": functools.partial(program, "ViSNet", True),
    "ViSNet, deterministic": functools.partial(program, "ViSNet", False, deterministic_scatter_ops=True),
}
