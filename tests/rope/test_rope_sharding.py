"""Rotary embeddings on several devices: default positions in a batch, and donated shards."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rope.reference import Rotation, make_features
from support import cases
from support.cases import assert_same_bits
from support.meshes import collectives, make_mesh
from support.programs import copies_of

from jax_baracuda import rope

pytestmark = cases.on_two_devices


def put(x: np.ndarray, spec: P) -> jax.Array:
    mesh = make_mesh()
    return jax.device_put(x, NamedSharding(mesh, spec))


def test_batch_of_vmap_with_default_positions(rng: np.random.Generator) -> None:
    """If the sequence is split, each shard has its own default positions, in a batch, too."""
    x = make_features(rng, (8, 2, 3, 16, 8), "float32")
    placed, function = put(x, P("x", None, None, "y", None)), jax.vmap(rope)
    assert_same_bits(jax.jit(function)(placed), np.asarray(function(x)))
    assert sum(collectives(function, placed).values()) == 0


def test_donated_shards_are_rotated_in_place(rng: np.random.Generator) -> None:
    """Each shard of a donated array is rotated in place, even if the sequence is split."""
    features = make_features(rng, (8, 8, 16, 12), "float32")
    x = put(features, P("x", None, "y", None))
    places = [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
    run = jax.jit(rope, donate_argnums=0)
    assert not copies_of(x.addressable_shards[0].data, run.lower(x).compile().as_text())
    y = run(x)
    assert x.is_deleted()
    assert [shard.data.unsafe_buffer_pointer() for shard in y.addressable_shards] == places
    Rotation().of(features).check(y)
