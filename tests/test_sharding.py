"""Ops on several devices: the answer of one device, sharded results, and no gathering of the operands."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_baracuda

NUM_SEGMENTS = 12
# (devices along rows, devices along features): 8 on CPUs, where they are simulated; as many as there are on GPUs.
MESH_SHAPE = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2)}[1 << min(len(jax.devices()), 8).bit_length() - 1]

pytestmark = pytest.mark.skipif(MESH_SHAPE == (1, 1), reason="there is only one device")

TIE_BREAKS = ("split", "first")


def make_mesh(axis_type: AxisType) -> Mesh:
    return jax.make_mesh(MESH_SHAPE, ("rows", "features"), axis_types=(axis_type,) * 2)


def make_operands(seed: int, num_rows: int = 64, num_features: int = 6) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows with many ties, NaN, infinities and dropped ids; the ids; and a cotangent of the maxima."""
    rng = np.random.default_rng(seed)
    data = np.round(rng.normal(size=(num_rows, num_features))).astype(np.float32)
    data[rng.integers(num_rows), 0] = np.nan
    data[rng.integers(num_rows, size=3), 1] = -np.inf
    data[rng.integers(num_rows, size=9), 2] = -0.0
    ids = rng.integers(-2, NUM_SEGMENTS + 2, num_rows).astype(np.int32)
    d_output = rng.normal(size=(NUM_SEGMENTS, num_features)).astype(np.float32)
    return jnp.asarray(data), jnp.asarray(ids), jnp.asarray(d_output)


def value_and_gradient(tie_break: str, data: jax.Array, ids: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
    reduce = functools.partial(
        jax_baracuda.segment_max, segment_ids=ids, num_segments=NUM_SEGMENTS, tie_break=tie_break
    )
    output, vjp = jax.vjp(reduce, data)
    return output, *vjp(d_output)


def collectives(function: Callable[..., object], *operands: jax.Array) -> dict[str, int]:
    """How often each collective occurs in the compiled program."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    names = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    return {name: len(re.findall(rf"= \S+ {name}(?:-start)?\(|= \(.*\) {name}(?:-start)?\(", text)) for name in names}


# Partition specs of data [rows, features], and how many all-reduces value and gradient take.
SPLITS = {
    "rows": (P("rows", None), 2),
    "features": (P(None, "features"), 0),
    "rows and features": (P("rows", "features"), 2),
    "rows over both axes": (P(("rows", "features"), None), 2),
}


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
def test_sharded_operands_give_the_single_device_answer(axis_type: AxisType, split: str, tie_break: str) -> None:
    data, ids, d_output = make_operands(seed=0)
    expected = value_and_gradient(tie_break, data, ids, d_output)
    spec, num_all_reduces = SPLITS[split]
    mesh = make_mesh(axis_type)
    operands = (
        jax.device_put(data, NamedSharding(mesh, spec)),
        jax.device_put(ids, NamedSharding(mesh, P(spec[0]))),
        jax.device_put(d_output, NamedSharding(mesh, P(None, spec[1]))),
    )
    with jax.set_mesh(mesh):
        function = functools.partial(value_and_gradient, tie_break)
        output, d_data = jax.jit(function)(*operands)
        np.testing.assert_array_equal(output, expected[0])
        np.testing.assert_array_equal(np.signbit(output), np.signbit(expected[0]))
        np.testing.assert_array_equal(d_data, expected[1])
        assert d_data.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        assert output.sharding.is_equivalent_to(NamedSharding(mesh, P(None, spec[1])), 2)

        counts = collectives(function, *operands)
        assert counts["all-reduce"] == num_all_reduces, counts
        assert sum(counts.values()) == counts["all-reduce"], counts


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "bfloat16", "float16"])
def test_row_sharded_maximum_of_narrow_dtypes(dtype: str) -> None:
    rng = np.random.default_rng(1)
    data = jnp.asarray(rng.integers(0, 100, (64, 3))).astype(dtype)
    ids = jnp.asarray(rng.integers(-1, NUM_SEGMENTS, 64))
    mesh = make_mesh(AxisType.Auto)
    sharded = jax.device_put(data, NamedSharding(mesh, P(("rows", "features"), None)))
    output = jax.jit(lambda x, i: jax_baracuda.segment_max(x, i, NUM_SEGMENTS))(sharded, ids)
    expected = jax.ops.segment_max(data, ids, NUM_SEGMENTS)
    assert output.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(output), np.asarray(expected))


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
def test_rows_that_do_not_divide_evenly(tie_break: str) -> None:
    data, ids, d_output = make_operands(seed=2, num_rows=65)
    mesh = make_mesh(AxisType.Auto)

    def function(data: jax.Array, ids: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        data = jax.lax.with_sharding_constraint(data, NamedSharding(mesh, P("rows", "features")))
        return value_and_gradient(tie_break, data, ids, d_output)

    actual = jax.jit(function)(data, ids, d_output)
    for got, expected in zip(actual, value_and_gradient(tie_break, data, ids, d_output), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)], ids=["data", "ids", "both"])
def test_sharded_batch_of_vmap(mapped: tuple[int | None, int | None]) -> None:
    operands = [make_operands(seed) for seed in range(8)]
    data, ids, d_output = (jnp.stack(arrays) for arrays in zip(*operands, strict=True))
    data, ids = (x if axis == 0 else x[0] for x, axis in zip((data, ids), mapped, strict=True))
    function = jax.vmap(functools.partial(value_and_gradient, "split"), (*mapped, 0))
    expected = function(data, ids, d_output)
    mesh = make_mesh(AxisType.Auto)
    batch_split = NamedSharding(mesh, P("rows"))
    whole = NamedSharding(mesh, P())
    placed = (
        *(jax.device_put(x, batch_split if axis == 0 else whole) for x, axis in zip((data, ids), mapped, strict=True)),
        jax.device_put(d_output, batch_split),
    )
    for got, want in zip(jax.jit(function)(*placed), expected, strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.sharding.is_equivalent_to(batch_split, got.ndim)
    assert sum(collectives(function, *placed).values()) == 0


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_features(check_vma: bool, tie_break: str) -> None:
    data, ids, d_output = make_operands(seed=3)
    mesh = make_mesh(AxisType.Auto)
    function = jax.shard_map(
        functools.partial(value_and_gradient, tie_break),
        mesh=mesh,
        in_specs=(P(None, "features"), P(), P(None, "features")),
        out_specs=(P(None, "features"), P(None, "features")),
        check_vma=check_vma,
    )
    expected = value_and_gradient(tie_break, data, ids, d_output)
    for got, want in zip(jax.jit(function)(data, ids, d_output), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert sum(collectives(function, data, ids, d_output).values()) == 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_through_shard_map_of_replicated_data(check_vma: bool) -> None:
    """Data that all devices share, ids that differ: the gradient is the sum over the devices."""
    data, ids, _ = make_operands(seed=4)
    data = jnp.where(jnp.isfinite(data), data, 0.5)
    mesh = make_mesh(AxisType.Auto)
    all_ids = jnp.stack([jnp.roll(ids, shift) for shift in range(MESH_SHAPE[0])])

    def loss_of(one_ids: jax.Array, data: jax.Array) -> jax.Array:
        maxima = jax_baracuda.segment_max(data, one_ids, NUM_SEGMENTS)
        return jnp.sum(jnp.where(jnp.isfinite(maxima), jnp.sin(maxima), 0))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P(), check_vma=check_vma)
    def loss(ids: jax.Array, data: jax.Array) -> jax.Array:
        return jax.lax.psum(loss_of(ids[0], data), "rows")

    expected = jax.grad(lambda data: sum(loss_of(one, data) for one in all_ids))(data)
    np.testing.assert_allclose(jax.grad(loss, argnums=1)(all_ids, data), expected, rtol=1e-5, atol=1e-6)


def test_varying_result_is_not_accepted_as_replicated() -> None:
    data, ids, _ = make_operands(seed=5)
    function = jax.shard_map(
        lambda data, ids: jax_baracuda.segment_max(data, ids, NUM_SEGMENTS),
        mesh=make_mesh(AxisType.Auto),
        in_specs=(P("rows"), P("rows")),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="out_specs"):
        function(data, ids)


def test_shard_map_over_one_of_two_axes() -> None:
    """The other axis stays with the partitioner; the answer is right."""
    data, ids, d_output = make_operands(seed=6)
    mesh = make_mesh(AxisType.Auto)
    function = jax.shard_map(
        functools.partial(value_and_gradient, "split"),
        mesh=mesh,
        in_specs=(P(None, "features"), P(), P(None, "features")),
        out_specs=(P(None, "features"), P(None, "features")),
        axis_names={"features"},
    )
    placed = jax.device_put(data, NamedSharding(mesh, P("rows", "features")))
    expected = value_and_gradient("split", data, ids, d_output)
    for got, want in zip(jax.jit(function)(placed, ids, d_output), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("data_spec", [P("rows", "features"), P(None, "features"), P()])
@pytest.mark.parametrize("ids_spec", [P("rows"), P()])
def test_explicit_mode_types(data_spec: P, ids_spec: P) -> None:
    """The result's type says how it is sharded, whatever the sharding of the ids."""
    data, ids, d_output = make_operands(seed=7)
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(data, NamedSharding(mesh, data_spec)),
            jax.device_put(ids, NamedSharding(mesh, ids_spec)),
        )

        @jax.jit
        def function(data: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            output, vjp = jax.vjp(lambda data: jax_baracuda.segment_max(data, ids, NUM_SEGMENTS), data)
            feature_axis = data_spec[1] if len(data_spec) > 1 else None
            assert tuple(jax.typeof(output).sharding.spec) == (None, feature_axis)
            [d_data] = vjp(jax.sharding.reshard(d_output, P(None, feature_axis)))
            assert jax.typeof(d_data).sharding.spec == jax.typeof(data).sharding.spec
            return output, d_data

        expected = value_and_gradient("split", data, ids, d_output)
        for got, want in zip(function(*placed), expected, strict=True):
            np.testing.assert_array_equal(got, want)


def test_out_sharding() -> None:
    data, ids, _ = make_operands(seed=8)
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = jax.device_put(data, NamedSharding(mesh, P("rows", None)))

        @jax.jit
        def function(data: jax.Array) -> jax.Array:
            output = jax_baracuda.segment_max(data, ids, NUM_SEGMENTS, out_sharding=P("rows", "features"))
            assert tuple(jax.typeof(output).sharding.spec) == ("rows", "features")
            return output

        np.testing.assert_array_equal(function(placed), jax_baracuda.segment_max(data, ids, NUM_SEGMENTS))
