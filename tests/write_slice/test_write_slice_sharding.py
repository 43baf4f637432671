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
from support.meshes import MESH_SHAPE, collectives
from write_slice.reference import MODES, of_batch, random_bits, reference_take, reference_write

from jax_baracuda import write_slice, write_slices

pytestmark = cases.on_two_devices

each_mode = pytest.mark.parametrize("mode", MODES)

# A cache [examples, times, heads].
CACHE, NEW = (8, 24, 6), (8, 5, 6)
SPLITS = {
    "examples": P("a", None, None),
    "heads": P(None, None, "b"),
    "times": P(None, "a", None),
    "times over both axes": P(None, ("a", "b"), None),
    "examples and times": P("b", "a", None),
    "times and heads": P(None, "a", "b"),
}
STARTS = (0, 3, 4, 11, 19, 20, 22, 23, 24, 40, -2, -5, -24, -40)
"""Starts of windows within one shard, across several, at the ends, and outside."""


def make_mesh(axis_type: AxisType) -> Mesh:
    return jax.make_mesh(MESH_SHAPE, ("a", "b"), axis_types=(axis_type,) * 2)


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
    spec, mesh = SPLITS[split], make_mesh(axis_type)
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


@each_mode
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_gradient(rng: np.random.Generator, axis_type: AxisType, split: str, mode: str) -> None:
    """The only collective sums the window of a split cotangent over the devices that have its parts."""
    spec, mesh = SPLITS[split], make_mesh(axis_type)
    dest, source, dy = (rng.integers(-9, 9, shape).astype(np.float32) for shape in (CACHE, NEW, CACHE))

    def gradient(cache: Any, new: Any, start: Any, dy: Any) -> Any:
        return jax.vjp(lambda d, s: write_slice(d, s, (0, start, 0), mode=mode), cache, new)[1](dy)

    with jax.set_mesh(mesh):
        operands = put(mesh, dest, spec), put(mesh, source, small(spec)), 3, put(mesh, dy, spec)
        counts = collectives(gradient, *operands)
        assert sum(counts.values()) == counts["all-reduce"] == (spec[1] is not None), counts
        run = jax.jit(gradient)
        for start in STARTS[::3]:
            rest, taken = run(operands[0], operands[1], start, operands[3])
            expected = reference_take(dy, NEW, (0, start, 0), mode)
            np.testing.assert_array_equal(rest, expected[0])
            np.testing.assert_array_equal(taken, expected[1])
            assert rest.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
            assert taken.sharding.is_equivalent_to(NamedSharding(mesh, small(spec)), 3)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_source_that_is_split_differently(rng: np.random.Generator, axis_type: AxisType) -> None:
    """The source is resharded like the cache, not the reverse. Its gradient has the sharding of the source."""
    mesh = make_mesh(axis_type)
    dest, source = (rng.integers(-9, 9, shape).astype(np.float32) for shape in (CACHE, (8, 8, 6)))

    def write(cache: Any, new: Any) -> Any:
        return write_slice(cache, new, (0, jnp.int32(9), 0))

    expected = reference_write(dest, source, (0, 9, 0))
    for spec in SPLITS.values():
        for source_spec in (P("a"), P(None, "a"), P(None, "b", None), P()):
            with jax.set_mesh(mesh):
                cache, new = put(mesh, dest, spec), put(mesh, source, source_spec)
                result, vjp = jax.jit(lambda c, n: jax.vjp(write, c, n))(cache, new)
                np.testing.assert_array_equal(result, expected)
                _, taken = jax.jit(vjp)(result)
                np.testing.assert_array_equal(taken, source)
                if axis_type == AxisType.Explicit:  # otherwise the result may also be sharded like the source
                    assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
                    assert taken.sharding.is_equivalent_to(NamedSharding(mesh, source_spec), 3)


@each_mode
@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("a", "b"), P(("a", "b"))], ids=str)
def test_per_example_positions(rng: np.random.Generator, spec: P, mode: str) -> None:
    """Under vmap, each element may have its own window, with examples, times or both split over devices."""
    mesh = make_mesh(AxisType.Auto)
    dest, source = random_bits(rng, CACHE, "int16"), random_bits(rng, NEW, "int16")
    starts = rng.integers(-26, 26, 8).astype(np.int32)
    write = jax.vmap(lambda d, s, i: write_slice(d, s, (i, 0), mode=mode))
    batch = P(spec[0])
    operands = put(mesh, dest, spec), put(mesh, source, batch), put(mesh, starts, batch)
    result = jax.jit(write)(*operands)
    assert_same_memory(result, of_batch(lambda d, s, i: reference_write(d, s, (i, 0), mode), dest, source, starts))
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    assert sum(collectives(write, *operands).values()) == 0


def test_keys_and_values_that_are_split_differently(rng: np.random.Generator) -> None:
    """Each of several arrays in one launch keeps its sharding."""
    mesh = make_mesh(AxisType.Auto)
    dests = [random_bits(rng, CACHE, dtype) for dtype in ("float32", "int8")]
    sources = [random_bits(rng, NEW, dtype) for dtype in ("float32", "int8")]
    specs = [P(None, "a", "b"), P("b", None, None)]

    def write(dests: Any, sources: Any, i: Any) -> Any:
        return write_slices(dests, sources, start_indices_of_each=[(0, i, 0), (0, i + 1, 0)])

    placed = [put(mesh, x, spec) for x, spec in zip(dests, specs, strict=True)]
    assert sum(collectives(write, placed, sources, 7).values()) == 0
    for k, result in enumerate(jax.jit(write)(placed, sources, 7)):
        assert_same_memory(result, reference_write(dests[k], sources[k], (0, 7 + k, 0)))
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, specs[k]), 3)


def test_times_that_do_not_divide_evenly(rng: np.random.Generator) -> None:
    mesh = make_mesh(AxisType.Auto)
    dest, source = random_bits(rng, (8, 23, 6), "int32"), random_bits(rng, NEW, "int32")

    @jax.jit
    def write(dest: Any, start: Any) -> Any:
        dest = jax.lax.with_sharding_constraint(dest, NamedSharding(mesh, P(None, "a", "b")))
        return write_slice(dest, source, (0, start, 0))

    for start in (0, 4, 20, -1):
        assert_same_memory(write(dest, start), reference_write(dest, source, (0, start, 0)))


@pytest.mark.parametrize("split", ["examples", "times", "times and heads"])
def test_decode_loop_over_a_sharded_cache(rng: np.random.Generator, split: str) -> None:
    """A decode loop needs no collective, and copies no shard."""
    mesh, spec = make_mesh(AxisType.Auto), SPLITS[split]
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


@each_mode
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(rng: np.random.Generator, check_vma: bool, mode: str) -> None:
    """Values and gradients of local caches are right. The gradient of a replicated array is summed over devices."""
    mesh = make_mesh(AxisType.Auto)
    dest, source = (rng.integers(-9, 9, shape).astype(np.float32) for shape in (CACHE, (1, 5, 6)))
    weights = rng.integers(-9, 9, CACHE).astype(np.float32)
    starts = rng.integers(-26, 26, MESH_SHAPE[0]).astype(np.int32)

    def write_local(dest: Any, source: Any, starts: Any) -> Any:
        return jax.vmap(lambda d: write_slice(d, source[0], (starts[0], 0), mode=mode))(dest)

    mapped = jax.shard_map(
        write_local, mesh=mesh, in_specs=(P("a"), P(), P("a")), out_specs=P("a"), check_vma=check_vma
    )
    each = starts.repeat(8 // MESH_SHAPE[0])
    expected = of_batch(lambda d, i: reference_write(d, source[0], (i, 0), mode), dest, each)
    np.testing.assert_array_equal(jax.jit(mapped)(dest, source, starts), expected)
    assert sum(collectives(mapped, dest, source, starts).values()) == 0
    gradient = jax.jit(jax.grad(lambda d, s: (mapped(d, s, starts) * weights).sum(), (0, 1)))(dest, source)
    rests, takens = of_batch(lambda w, i: reference_take(w, (5, 6), (i, 0), mode), weights, each)
    np.testing.assert_array_equal(gradient[0], rests)
    np.testing.assert_array_equal(gradient[1], takens.sum(axis=0)[None])


def test_shard_map_over_one_of_two_axes(rng: np.random.Generator) -> None:
    """Results are right if the other axis is left to the partitioner."""
    mesh = make_mesh(AxisType.Auto)
    dest, source = random_bits(rng, CACHE, "float32"), random_bits(rng, NEW, "float32")
    write = functools.partial(write_slice, start_indices=(0, jnp.int32(17), 0))
    mapped = jax.shard_map(
        write, mesh=mesh, in_specs=(P("a"), P("a")), out_specs=P("a"), axis_names={"a"}, check_vma=False
    )
    placed = put(mesh, dest, P("a", None, "b")), put(mesh, source, P("a", None, "b"))
    assert_same_memory(jax.jit(mapped)(*placed), reference_write(dest, source, (0, 17, 0)))


def test_arrays_that_different_vmaps_map(rng: np.random.Generator) -> None:
    """If each device has one element of the inner batch, the array of that batch looks shared. Results are right."""
    keys, values = (rng.normal(size=(MESH_SHAPE[0], 6, n)).astype(np.float32) for n in (4, 2))

    def write(keys: Any, values: Any) -> Any:
        return write_slices([keys, values], [2 * keys[:3], 3 * values[:3]], ((1, 4), 0))

    of_all = jax.jit(jax.vmap(jax.vmap(write, (None, 0)), (0, None)))
    mesh = jax.make_mesh(MESH_SHAPE, ("inner", "other"), axis_types=(AxisType.Auto,) * 2)
    placed = jax.device_put(values, NamedSharding(mesh, P("inner")))
    for got, want in zip(of_all(keys, placed), of_all(keys, values), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("spec", [SPLITS["examples"], SPLITS["heads"], P(None, None, None)], ids=str)
def test_plain_form_is_dynamic_update_slice(rng: np.random.Generator, spec: P) -> None:
    """In plain JAX, the choice on GPUs, a loop that writes rows has the instructions of dynamic_update_slice."""
    mesh = make_mesh(AxisType.Auto)
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
    mesh, x = make_mesh(axis_type), rng.normal(size=(8, 6)).astype(np.float32)

    def write(x: Any) -> Any:
        h = x + 1
        return write_slice(h[:, None], h[:, :-1][:, None], (0, 0, jnp.int32(1)), implementation="xla")

    with jax.set_mesh(mesh):
        result = jax.jit(write)(put(mesh, x, P("a")))
    assert_same_memory(result[:, 0], np.concatenate([x[:, :1] + 1, x[:, :-1] + 1], axis=1))
