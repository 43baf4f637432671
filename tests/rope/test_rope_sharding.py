"""Rotary embeddings on several devices: the same bits as on one device, sharded results and no collectives."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rope.reference import FAR, LAYOUTS, Rotation, copies_in, features_shape, make_features
from support import cases
from support.cases import Expected, assert_same_bits
from support.meshes import MESH_SHAPE, collectives

from jax_baracuda import rope, rope_qk

pytestmark = cases.on_two_devices

each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_axis_type = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)

EXAMPLES, HEADS, LENGTH, FEATURES = 8, (8, 4), 16, 12

# How (examples, heads, sequence) are split. The heads of q and k are split over the same devices.
SPLITS: dict[str, tuple[Any, Any, Any]] = {
    "examples": ("x", None, None),
    "heads": (None, "y", None),
    "sequence": (None, None, "x"),
    "examples and heads": ("x", "y", None),
    "sequence and heads": (None, "y", "x"),
    "examples and sequence": ("x", None, "y"),
    "sequence over both axes": (None, None, ("x", "y")),
    "examples over both axes": (("x", "y"), None, None),
}

POSITIONS = ("default", "shared", "of each example")


def make_mesh(axis_type: AxisType) -> Mesh:
    return jax.make_mesh(MESH_SHAPE, ("x", "y"), axis_types=(axis_type,) * 2)


def features_spec(split: tuple[Any, Any, Any], layout: str, features: Any = None) -> P:
    examples, heads, sequence = split
    return P(examples, heads, sequence, features) if layout == "BHSD" else P(examples, sequence, heads, features)


def make_operands(rng: np.random.Generator, layout: str, positions: str) -> dict[str, np.ndarray]:
    operands = {
        name: make_features(rng, features_shape(layout, EXAMPLES, heads, LENGTH, FEATURES), "float32")
        for name, heads in (("q", HEADS[0]), ("k", HEADS[1]), ("dq", HEADS[0]), ("dk", HEADS[1]))
    }
    if positions != "default":
        shape = (LENGTH,) if positions == "shared" else (EXAMPLES, LENGTH)
        operands["positions"] = rng.integers(0, FAR, shape).astype(np.int32)
    return operands


def specs_of(split: tuple[Any, Any, Any], layout: str, operands: Mapping[str, np.ndarray]) -> dict[str, P]:
    """The specs of all operands."""
    specs = {name: features_spec(split, layout) for name in operands}
    if "positions" in operands:
        examples, _, sequence = split
        specs["positions"] = P(sequence) if operands["positions"].ndim == 1 else P(examples, sequence)
    return specs


def put(mesh: Mesh, operands: Mapping[str, Any], specs: Mapping[str, P]) -> dict[str, jax.Array]:
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in operands.items()}


def outputs_and_gradients(layout: str, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs and gradients, by the name of the operand with their shape."""
    positions = operands.get("positions")
    alone, vjp_alone = jax.vjp(lambda q: rope(q, positions, layout=layout), operands["q"])
    (q, k), vjp = jax.vjp(lambda q, k: rope_qk(q, k, positions, layout=layout), operands["q"], operands["k"])
    dq, dk = vjp((operands["dq"], operands["dk"]))
    return {"q": (alone, q, dq, *vjp_alone(operands["dq"])), "k": (k, dk)}


def assert_same(actual: Any, expected: Any) -> None:
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same_bits(got, np.asarray(want))


@each_layout
@pytest.mark.parametrize("positions", POSITIONS)
@each_axis_type
def test_sharded_operands(rng: np.random.Generator, axis_type: AxisType, positions: str, layout: str) -> None:
    """Results have the same bits as on one device and the sharding of the operands. There are no collectives."""
    operands = make_operands(rng, layout, positions)
    function = functools.partial(outputs_and_gradients, layout)
    expected, mesh = function(operands), make_mesh(axis_type)
    for where, split in SPLITS.items():
        specs = specs_of(split, layout, operands)
        with jax.set_mesh(mesh):
            placed = put(mesh, operands, specs)
            actual = jax.jit(function)(placed)
            assert sum(collectives(function, placed).values()) == 0, where
        assert_same(actual, expected)
        for name, results in actual.items():
            for x in results:
                assert x.sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), 4), f"{where} {x.sharding}"


@each_layout
@each_axis_type
def test_features_that_are_split(rng: np.random.Generator, axis_type: AxisType, layout: str) -> None:
    """Split features are gathered, since pairs may lie apart. Results are right; gradients have the primals' types."""
    operands = make_operands(rng, layout, "shared")
    function = functools.partial(outputs_and_gradients, layout)
    expected, mesh = function(operands), make_mesh(axis_type)
    spec = features_spec(("x", None, None), layout, "y")
    with jax.set_mesh(mesh):
        placed = put(mesh, operands, {name: spec for name in operands} | {"positions": P()})

        def run(operands: dict[str, Any]) -> Any:
            if axis_type == AxisType.Auto:
                return function(operands)
            # In explicit mode, cotangents have the types of the results. These are not split along features.
            whole = {name: jax.sharding.reshard(operands[name], P(*spec[:3], None)) for name in ("dq", "dk")}
            results = function(operands | whole)
            assert jax.typeof(results["q"][2]) == jax.typeof(operands["q"])
            assert jax.typeof(results["k"][1]) == jax.typeof(operands["k"])
            return results

        assert_same(jax.jit(run)(placed), expected)


@each_layout
def test_keys_and_positions_that_are_split_differently(rng: np.random.Generator, layout: str) -> None:
    """In explicit mode, k (except its heads) and positions are sharded like q. Gradients have their primals' types."""
    operands = make_operands(rng, layout, "of each example")
    function = functools.partial(outputs_and_gradients, layout)
    expected, mesh = function(operands), make_mesh(AxisType.Explicit)
    heads, other_heads, examples = (None, "y", None), (None, "x", None), ("x", None, None)
    of_all = ("x", None, "y")
    for q_split, k_split, positions_spec in (
        (heads, other_heads, P()),
        (examples, heads, P("y", "x")),
        (heads, examples, P("x", None)),
        (of_all, heads, P(None, ("x", "y"))),
        (other_heads, of_all, P("x", "y")),
        (examples, (None, None, None), P("x", None)),
        ((None, None, None), of_all, P()),
    ):
        specs = {"q": features_spec(q_split, layout), "k": features_spec(k_split, layout), "positions": positions_spec}
        with jax.set_mesh(mesh):
            placed = put(mesh, operands, specs | {"dq": P(), "dk": P()})

            def run(operands: dict[str, Any]) -> Any:
                options = {"positions": operands["positions"], "layout": layout}
                (q, k), vjp = jax.vjp(lambda q, k: rope_qk(q, k, **options), operands["q"], operands["k"])
                of_q = jax.sharding.reshard(operands["dq"], jax.typeof(q).sharding)
                of_k = jax.sharding.reshard(operands["dk"], jax.typeof(k).sharding)
                dq, dk = vjp((of_q, of_k))
                assert jax.typeof(dq) == jax.typeof(operands["q"]) == jax.typeof(q)
                assert jax.typeof(dk) == jax.typeof(operands["k"])
                return q, k, dq, dk

            actual = jax.jit(run)(placed)
        (_, q, dq, _), (k, dk) = expected["q"], expected["k"]
        assert_same(actual, (q, k, dq, dk))


@each_layout
def test_sizes_that_do_not_divide_evenly(rng: np.random.Generator, layout: str) -> None:
    mesh = make_mesh(AxisType.Auto)
    x = make_features(rng, features_shape(layout, 3, 5, 13, 8), "float32")
    for split in (("x", None, None), (None, "x", None), (None, None, "x")):

        def constrained(x: Any, split: Any = split) -> Any:
            sharding = NamedSharding(mesh, features_spec(split, layout))
            return rope(jax.lax.with_sharding_constraint(x, sharding), layout=layout)

        assert_same(jax.jit(constrained)(x), rope(x, layout=layout))


@pytest.mark.parametrize("mapped", ["q", "positions", "all"])
def test_sharded_batch_of_vmap(rng: np.random.Generator, mapped: str) -> None:
    """The mapped axis and the sequence may both be split over devices, without collectives."""
    batch = [make_operands(rng, "BHSD", "shared") for _ in range(8)]
    is_mapped = {name: mapped in (name, "all") or name in ("dq", "dk") for name in batch[0]}
    operands = {name: np.stack([one[name] for one in batch]) if is_mapped[name] else x for name, x in batch[0].items()}
    axes = {name: 0 if is_mapped[name] else None for name in operands}
    function = jax.vmap(functools.partial(outputs_and_gradients, "BHSD"), (axes,))
    expected, mesh = function(operands), make_mesh(AxisType.Auto)
    specs = specs_of((None, None, "y"), "BHSD", batch[0])
    specs = {name: P("x", *spec) if is_mapped[name] else spec for name, spec in specs.items()}
    placed = put(mesh, operands, specs)
    assert_same(jax.jit(function)(placed), expected)
    assert sum(collectives(function, placed).values()) == 0


def test_batch_of_vmap_with_default_positions(rng: np.random.Generator) -> None:
    """If the sequence is split, each shard has its own default positions, in a batch, too."""
    x = make_features(rng, (8, *features_shape("BHSD", 2, 3, LENGTH, 8)), "float32")
    mesh = make_mesh(AxisType.Auto)
    placed = jax.device_put(x, NamedSharding(mesh, P("x", None, None, "y", None)))
    function = jax.vmap(rope)
    assert_same(jax.jit(function)(placed), function(x))
    assert sum(collectives(function, placed).values()) == 0


def test_donated_shards_are_rotated_in_place(rng: np.random.Generator) -> None:
    """Each shard of a donated array is rotated in place, even if the sequence is split."""
    operands, mesh = make_operands(rng, "BHSD", "default"), make_mesh(AxisType.Auto)
    x = jax.device_put(operands["q"], NamedSharding(mesh, P("x", None, "y", None)))
    places = [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
    run = jax.jit(rope, donate_argnums=0)
    assert copies_in(run.lower(x).compile().as_text()) == []
    y = run(x)
    assert x.is_deleted()
    assert [shard.data.unsafe_buffer_pointer() for shard in y.addressable_shards] == places
    Rotation().of(operands["q"]).check(y)


@pytest.mark.parametrize("check_vma", [True, False])
@each_layout
def test_shard_map(rng: np.random.Generator, layout: str, check_vma: bool) -> None:
    """Each device rotates its part by its part of the positions, without collectives."""
    operands = make_operands(rng, layout, "of each example")
    function = functools.partial(outputs_and_gradients, layout)
    expected, mesh = function(operands), make_mesh(AxisType.Auto)
    for split in SPLITS.values():
        specs = specs_of(split, layout, operands)
        out_specs = {"q": (specs["q"],) * 4, "k": (specs["k"],) * 2}
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=out_specs, check_vma=check_vma)
        assert_same(jax.jit(mapped)(operands), expected)
        assert sum(collectives(mapped, operands).values()) == 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_replicated_operands(rng: np.random.Generator, check_vma: bool) -> None:
    """With split queries and replicated keys and positions, the gradient of the keys is summed over devices."""
    operands = make_operands(rng, "BHSD", "shared")
    operands = {
        name: x[:2, :1] if name in ("k", "dk") else x[:2] for name, x in operands.items() if name != "positions"
    }
    positions = np.arange(LENGTH)[::-1].astype(np.int32)

    def loss(q: Any, k: Any, dq: Any, dk: Any) -> Any:
        y, z = rope_qk(q, k, positions)
        return (y * dq).sum() + (z**2 * dk).sum()

    split = P(None, "y", None, None)
    mapped = jax.shard_map(
        lambda *args: jax.lax.psum(loss(*args), "y"),
        mesh=make_mesh(AxisType.Auto),
        in_specs=(split, P(), split, P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    arguments = tuple(operands[name] for name in ("q", "k", "dq", "dk"))
    dq, dk = jax.jit(jax.grad(mapped, argnums=(0, 1)))(*arguments)
    expected_dq, expected_dk = jax.grad(loss, argnums=(0, 1))(*arguments)
    assert_same_bits(dq, np.asarray(expected_dq))
    # Without check_vma, equal numbers are summed over all devices. Each addition rounds by half an eps.
    exact = MESH_SHAPE[1] * np.asarray(expected_dk, np.float64)
    num_additions = 0 if check_vma else math.prod(MESH_SHAPE) - 1
    Expected(exact, np.float32, num_additions * cases.eps_of(np.float32) / 2 * np.abs(exact)).check(dk)


def test_shard_map_over_one_of_two_axes(rng: np.random.Generator) -> None:
    """Results are right if the other axis is left to the partitioner."""
    operands = make_operands(rng, "BHSD", "shared")
    function = functools.partial(outputs_and_gradients, "BHSD")
    mesh = make_mesh(AxisType.Auto)
    specs = specs_of((None, "y", None), "BHSD", operands)
    out_specs = {"q": (specs["q"],) * 4, "k": (specs["k"],) * 2}
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=out_specs, axis_names={"y"})
    placed = put(mesh, operands, specs_of(("x", "y", None), "BHSD", operands))
    assert_same(jax.jit(mapped)(placed), function(operands))


def test_outputs_are_those_of_the_reference(rng: np.random.Generator) -> None:
    """The results on one device, which the tests above compare with, are right."""
    operands = make_operands(rng, "BSHD", "of each example")
    rotation = Rotation(operands["positions"], layout="BSHD")
    results = outputs_and_gradients("BSHD", operands)
    alone, q, *of_dq = results["q"]
    k, dk = results["k"]
    for x, direction, names in (("q", 1, (alone, q)), ("dq", -1, of_dq), ("k", 1, (k,)), ("dk", -1, (dk,))):
        for result in names:
            rotation.of(operands[x], direction).check(result)
