"""write_rows on several devices: right results, sharded like the pools, without gathering the pools."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases
from support.cases import assert_same_memory
from support.meshes import MESH_SHAPE, collectives, make_mesh
from write_rows.reference import random_slots, reference_write

from jax_baracuda import write_rows

pytestmark = cases.on_two_devices

# Pools [layers, slots, heads, features].
POOL, ROWS = (4, 16, 4, 6), (9, 4, 6)
NAMES = ("a", "b")
SPLITS = {
    "heads": P(None, None, "b", None),
    "slots": P(None, "a", None, None),
    "layers": P("a", None, None, None),
    "layers and slots": P("b", "a", None, None),
    "slots and heads": P(None, "a", "b", None),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_pool(rng: np.random.Generator, axis_type: AxisType, split: str) -> None:
    """Each device writes what lies in its part, in place and without collectives. The result is sharded as the pool."""
    spec, mesh = SPLITS[split], make_mesh(axis_type, NAMES)
    dest, rows = rng.normal(size=POOL).astype(np.float32), rng.normal(size=ROWS).astype(np.float32)

    def write(pool: Any, rows: Any, slots: Any, layer: Any) -> Any:
        return write_rows(pool, rows, slots, layer=layer, implementation="kernel")

    with jax.set_mesh(mesh):
        put = lambda x, of: jax.device_put(x, NamedSharding(mesh, of))  # noqa: E731
        of_rows = put(rows, P(None, spec[2], None))
        assert sum(collectives(write, put(dest, spec), of_rows, np.zeros(9, np.int32), 1).values()) == 0
        step = jax.jit(write, donate_argnums=0)
        for layer in (0, 1, 3, -1, 4):
            slots, pool = random_slots(rng, 9, 16), put(dest, spec)
            result = step(pool, of_rows, slots, layer)
            assert pool.is_deleted()
            assert_same_memory(result, reference_write(dest, rows, slots, 0, layer), f"layer {layer}")
            assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)


def test_shard_map(rng: np.random.Generator) -> None:
    """In shard_map, each device has pools and slots of its own."""
    mesh = jax.make_mesh(MESH_SHAPE[:1], ("a",), axis_types=(AxisType.Auto,))
    num = MESH_SHAPE[0]
    dest, rows = rng.normal(size=(num * 5, 3)).astype(np.float32), rng.normal(size=(num * 4, 3)).astype(np.float32)
    slots = np.concatenate([random_slots(rng, 4, 5) for _ in range(num)])
    write = jax.shard_map(write_rows, mesh=mesh, in_specs=(P("a"), P("a"), P("a")), out_specs=P("a"))
    expected = [
        reference_write(*x) for x in zip(np.split(dest, num), np.split(rows, num), np.split(slots, num), strict=True)
    ]
    assert_same_memory(jax.jit(write)(dest, rows, slots), np.concatenate(expected))
