"""write_slice on several devices: right results, sharded like the arrays, without gathering the arrays."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases
from support.cases import assert_same_memory
from support.meshes import MESH_SHAPE, collectives, make_mesh
from write_slice.reference import MODES, random_bits, reference_write

from jax_baracuda import write_slice, write_slices

pytestmark = cases.on_two_devices

each_mode = pytest.mark.parametrize("mode", MODES)

# A cache [examples, times, heads].
CACHE, NEW = (8, 24, 6), (8, 5, 6)
NAMES = ("a", "b")
SPLITS = {
    "times over both axes": P(None, ("a", "b"), None),
    "times": P(None, "a", None),
    "examples": P("a", None, None),
    "heads": P(None, None, "b"),
    "examples and times": P("b", "a", None),
    "times and heads": P(None, "a", "b"),
}
STARTS = (0, 3, 4, 11, 19, 20, 22, 23, 24, 40, -2, -5, -24, -40)
"""Starts of windows within one shard, across several, at the ends, and outside."""


def put(mesh: Mesh, x: Any, spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def small(split: P) -> P:
    """The spec of the source: like the cache's, but not split along the axis of the window."""
    return P(split[0], None, split[2])


@each_mode
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_cache(rng: np.random.Generator, axis_type: AxisType, split: str, mode: str) -> None:
    """Each device writes its part of the window in place, without collectives. The result has the cache's sharding."""
    spec, mesh = SPLITS[split], make_mesh(axis_type, NAMES)
    dest, source = random_bits(rng, CACHE, "int32"), random_bits(rng, NEW, "int32")

    def write(cache: Any, new: Any, start: Any) -> Any:
        return write_slice(cache, new, (0, start, 0), mode=mode)

    with jax.set_mesh(mesh):
        new = put(mesh, source, small(spec))
        assert sum(collectives(write, put(mesh, dest, spec), new, 3).values()) == 0
        step = jax.jit(write, donate_argnums=0)
        text = step.lower(put(mesh, dest, spec), new, 3).compile().as_text()
        assert text.count('custom_call_target="jax_baracuda.write_slice"') == 1
        assert "copy(" not in text
        for start in STARTS:
            cache = put(mesh, dest, spec)
            result = step(cache, new, start)
            assert cache.is_deleted()
            assert_same_memory(result, reference_write(dest, source, (0, start, 0), mode), f"start {start}")
            assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)


@pytest.mark.parametrize("split", ["examples", "times", "times and heads"])
def test_decode_loop_over_a_sharded_cache(rng: np.random.Generator, split: str) -> None:
    """A decode loop needs no collective, and copies no shard."""
    mesh, spec = make_mesh(names=NAMES), SPLITS[split]
    row = random_bits(rng, (8, 1, 6), "int16")

    def fill(cache: Any) -> Any:
        return jax.lax.fori_loop(0, 24, lambda i, cache: write_slice(cache, row, (0, i, 0)), cache)

    cache = put(mesh, random_bits(rng, CACHE, "int16"), spec)
    local = ",".join(str(size) for size in cache.addressable_shards[0].data.shape)
    compiled = jax.jit(fill, donate_argnums=0).lower(cache).compile()
    copies = [line for line in compiled.as_text().splitlines() if f"= s16[{local}]" in line and " copy(" in line]
    assert not copies
    assert sum(collectives(fill, cache).values()) == 0
    assert_same_memory(compiled(cache), np.broadcast_to(row, CACHE).copy())


def test_arrays_that_different_vmaps_map(rng: np.random.Generator) -> None:
    """If each device has one element of the inner batch, the array of that batch looks shared. Results are right."""
    keys, values = (rng.normal(size=(MESH_SHAPE[0], 6, n)).astype(np.float32) for n in (4, 2))

    def write(keys: Any, values: Any) -> Any:
        return write_slices([keys, values], [2 * keys[:3], 3 * values[:3]], ((1, 4), 0))

    of_all = jax.jit(jax.vmap(jax.vmap(write, (None, 0)), (0, None)))
    mesh = make_mesh(names=("inner", "other"))
    placed = jax.device_put(values, NamedSharding(mesh, P("inner")))
    for got, want in zip(of_all(keys, placed), of_all(keys, values), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("spec", [SPLITS["examples"], SPLITS["heads"], P(None, None, None)], ids=str)
def test_plain_form_is_dynamic_update_slice(rng: np.random.Generator, spec: P) -> None:
    """In plain JAX, the choice on GPUs, a loop that writes rows has the instructions of dynamic_update_slice."""
    mesh = make_mesh(names=NAMES)
    cache = put(mesh, random_bits(rng, CACHE, "int32"), spec)
    rows = put(mesh, random_bits(rng, (CACHE[1], CACHE[0], 1, CACHE[2]), "int32"), P(None, *small(spec)))

    def instructions(write: Any) -> list[str]:
        def append(cache: Any, rows: Any) -> Any:
            def write_row(step: Any, cache: Any) -> Any:
                return write(cache, rows[step], (0, step, 0))

            return jax.lax.fori_loop(0, CACHE[1], write_row, cache)

        text = jax.jit(append).lower(cache, rows).compile().as_text()
        return sorted(re.findall(r" = (\S+ [\w-]+)\(", text))

    assert instructions(functools.partial(write_slice, implementation="xla")) == instructions(
        jax.lax.dynamic_update_slice
    )


@cases.where_barriers_are_kept
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_windows_computed_from_the_array_itself(rng: np.random.Generator, axis_type: AxisType) -> None:
    """A source may read dest in the program of a shard, too, which knows only its arguments."""
    mesh, x = make_mesh(axis_type, NAMES), rng.normal(size=(8, 6)).astype(np.float32)

    def write(x: Any) -> Any:
        h = x + 1
        return write_slice(h[:, None], h[:, :-1][:, None], (0, 0, jnp.int32(1)), implementation="xla")

    with jax.set_mesh(mesh):
        result = jax.jit(write)(put(mesh, x, P("a")))
    assert_same_memory(result[:, 0], np.concatenate([x[:, :1] + 1, x[:, :-1] + 1], axis=1))
