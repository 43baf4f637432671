"""Ops on several devices: results equal those of one device, and are sharded."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from segment.reference import (
    DIFFERENTIABLE,
    MAX,
    MEAN,
    MIN,
    PROD,
    REDUCTIONS,
    SOFTMAX,
    SUM,
    Options,
    Reduction,
    errors_of_softmax,
    options_id,
)
from support import cases, programs
from support.cases import Expected, Shape
from support.kernels import kernels_in
from support.meshes import MESH_SHAPE, collectives, exchanges_in, make_mesh

import jax_baracuda
from jax_baracuda import forward_mode, segment_plan, segment_prod_backward
from jax_baracuda._core.sharding import mesh_axes
from jax_baracuda._examples import example as an_example

NUM_SEGMENTS = 12
NAMES = ("rows", "features")
pytestmark = cases.on_two_devices

each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
each_differentiable = pytest.mark.parametrize("reduction", DIFFERENTIABLE, ids=str)
each_way = pytest.mark.parametrize(
    ("reduction", "options"),
    [(r, r.options[0]) for r in REDUCTIONS] + [(MAX, {"tie_break": "first"}), (SUM, {"deterministic": True})],
    ids=lambda x: str(x) if isinstance(x, Reduction) else options_id(x),
)


def make_operands(
    reduction: Reduction, seed: int, num_rows: int = 64, num_features: int = 6
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows with many ties, NaN, infinities and dropped ids; the ids; and a cotangent of the result."""
    rng = np.random.default_rng(seed)
    data = np.round(rng.normal(size=(num_rows, num_features))).astype(np.float32)
    data[rng.integers(num_rows), 0] = np.nan
    data[rng.integers(num_rows, size=3), 1] = -np.inf
    data[rng.integers(num_rows, size=9), 2] = -0.0
    ids = rng.integers(-2, NUM_SEGMENTS + 2, num_rows).astype(np.int32)
    shape = reduction.result_shape(Shape(num_rows, (num_features,), NUM_SEGMENTS))
    return jnp.asarray(data), jnp.asarray(ids), jnp.asarray(rng.normal(size=shape).astype(np.float32))


def value_and_gradient(
    reduction: Reduction, options: Options, data: jax.Array, ids: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, ...]:
    if reduction.gradient is None:
        return (reduction(data, ids, NUM_SEGMENTS, **options),)
    return reduction.pullback(data, ids, NUM_SEGMENTS, cotangent, **options)


EPS = float(np.finfo(np.float32).eps)


def rounding_of_sums(num_terms: int) -> float:
    """How much sums of this many terms may differ, relative to the sum of their magnitudes."""
    return (4 + 4 * math.sqrt(num_terms)) * EPS


def errors_of_reference(
    reduction: Reduction, data: np.ndarray, ids: np.ndarray, *cotangent: np.ndarray, segments: int
) -> list[Any]:
    """Bounds of the rounding errors of the value, and of the gradient for a cotangent."""
    bounds = [reduction.value(data, ids, segments)]
    bounds += [reduction.gradient(d, data, ids, segments, **reduction.options[0]) for d in cotangent]
    return [bound.error for bound in bounds]


def assert_same(
    reduction: Reduction, actual: Sequence[jax.Array], expected: Sequence[jax.Array], *operands: jax.Array
) -> None:
    """Asserts the results of one device, exactly if all arithmetic is exact. XLA may round a quotient differently.

    Args:
      operands: data, ids and cotangent, or batches of some of them.
    """
    if reduction is SOFTMAX or not reduction.derivatives_are_exact:
        errors_of = errors_of_softmax if reduction is SOFTMAX else functools.partial(errors_of_reference, reduction)
        errors_of = functools.partial(errors_of, segments=NUM_SEGMENTS)
        if np.ndim(operands[-1]) == 3:
            shapes = [np.shape(x)[-rank:] for x, rank in zip(operands, (2, 1, 2), strict=True)]
            batches = (np.broadcast_to(x, (8, *shape)) for x, shape in zip(operands, shapes, strict=True))
            errors = map(np.stack, zip(*(errors_of(*one) for one in zip(*batches, strict=True)), strict=True))
        else:
            errors = errors_of(*map(np.asarray, operands))
        errors = [2 * error for error in errors]  # both answers have one
    else:
        errors = [EPS * np.abs(want) if reduction is MEAN else 0.0 for want in expected]
    assert len(actual) == len(expected)
    for got, want, error in zip(map(np.asarray, actual), map(np.asarray, expected), errors, strict=False):
        if reduction not in (MAX, MIN):
            got = np.where(got == want, want, got)  # a zero may have either sign
        Expected(want, want.dtype, error).check(got)


def cells_or_rows(reduction: Reduction, spec: P) -> P:
    """The spec of the result, for this spec of the data."""
    return spec if reduction.result_has_rows else P(None, *spec[1:])


# Partition specs of data [rows, features].
SPLITS = {
    "rows": P("rows", None),
    "features": P(None, "features"),
    "rows and features": P("rows", "features"),
    "rows over both axes": P(("rows", "features"), None),
}


@pytest.mark.parametrize(
    ("axis_type", "split"),
    [
        *((AxisType.Auto, split) for split in SPLITS),
        (AxisType.Explicit, "rows and features"),
        (AxisType.Explicit, "rows"),
    ],
    ids=lambda x: str(x),
)
@each_way
def test_sharded_operands_give_the_single_device_answer(
    reduction: Reduction, options: Options, axis_type: AxisType, split: str
) -> None:
    """Results are right and sharded. Devices exchange only cells, so no operand is gathered."""
    data, ids, cotangent = make_operands(reduction, seed=0)
    function = functools.partial(value_and_gradient, reduction, options)
    expected = jax.jit(function)(data, ids, cotangent)
    spec, mesh = SPLITS[split], make_mesh(axis_type, NAMES)
    result_spec = cells_or_rows(reduction, spec)
    operands = (
        jax.device_put(data, NamedSharding(mesh, spec)),
        jax.device_put(ids, NamedSharding(mesh, P(spec[0]))),
        jax.device_put(cotangent, NamedSharding(mesh, result_spec)),
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(*operands).compile()
        actual = compiled(*operands)
    assert_same(reduction, actual, expected, data, ids, cotangent)
    for result, its_spec in zip(actual, (result_spec, spec), strict=False):
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, its_spec), 2)
    of_rows, of_features = (math.prod(mesh.shape[axis] for axis in mesh_axes(entry)) for entry in (*spec, None)[:2])
    cells = -(-NUM_SEGMENTS // of_rows) * of_rows * data.shape[1] // of_features
    assert all(x.size <= cells * (of_rows > 1) for x in exchanges_in(compiled.as_text()))


@pytest.mark.parametrize("dtype", cases.FLOATING)
@pytest.mark.parametrize("kind", ["large", "small", "far apart", "special"])
def test_softmax_of_logits_beyond_exponentials(rng: np.random.Generator, dtype: str, kind: str) -> None:
    """Every segment is right, also where the exponentials of its logits overflow or are all zero."""
    logits, ids, _ = make_operands(SOFTMAX, seed=1)
    logits = np.asarray(logits, np.float64)
    if kind == "special":
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[ids == 2] = -np.inf
        logits[np.flatnonzero(ids == 3)[:1]] = np.nan
        logits[np.flatnonzero(ids == 4)[-1:]] = np.inf
    else:
        offset = {"large": 2e4, "small": -2e4, "far apart": rng.choice([-2e4, 0, 2e4], (len(ids), 1))}[kind]
        logits = logits + offset
    logits = logits.astype(jnp.dtype(dtype))
    mesh = make_mesh(AxisType.Auto, NAMES)
    with cases.x64_for(dtype):
        split = [jax.device_put(x, NamedSharding(mesh, P("rows"))) for x in (logits, np.asarray(ids))]
        actual = jax.jit(lambda x, i: SOFTMAX(x, i, NUM_SEGMENTS))(*split)
        SOFTMAX.value(logits, np.asarray(ids), NUM_SEGMENTS).check(actual)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "bfloat16", "float16"])
def test_row_sharded_results_of_narrow_dtypes(dtype: str) -> None:
    """Results of narrow dtypes are exact. Their sums and products over devices need a wide accumulator, or wrap."""
    rng, num_devices = np.random.default_rng(1), math.prod(MESH_SHAPE)
    for reduction in REDUCTIONS:
        if dtype == "bool" and reduction in (SUM, PROD) or reduction is SOFTMAX:
            continue
        data = (
            rng.integers(0, 100, (64, 3))
            if reduction is not PROD
            else rng.choice([1, 2, 3], (64, 3), p=[0.6, 0.3, 0.1])
        )
        data, ids = jnp.asarray(data).astype(dtype), rng.integers(-1, NUM_SEGMENTS, 64)
        sharded = jax.device_put(data, NamedSharding(make_mesh(AxisType.Auto, NAMES), P(("rows", "features"), None)))
        compiled = (
            jax.jit(lambda x, i, reduction=reduction: reduction(x, i, NUM_SEGMENTS)).lower(sharded, ids).compile()
        )
        output, expected = compiled(sharded, ids), reduction(data, ids, NUM_SEGMENTS)
        assert output.dtype == expected.dtype
        assert_same(reduction, [output], [expected], data, ids)
        widens = dtype == "bfloat16" and cases.PLATFORM == "cpu"  # as XLA's CPU back end does
        if reduction in (MAX, MIN) and not widens:
            num_cells = -(-NUM_SEGMENTS // num_devices) * num_devices * 3
            traffic = sum(exchange.traffic for exchange in exchanges_in(compiled.as_text()))
            assert 0 < traffic <= 2 * num_cells * data.dtype.itemsize


@pytest.mark.versions
@each_reduction
def test_shards_run_what_is_picked_for_the_call(reduction: Reduction) -> None:
    """Plain JAX in a program split by rows calls no kernel, also not that of another op."""
    data, ids, cotangent = make_operands(reduction, seed=1)
    sharded = jax.device_put(data, NamedSharding(make_mesh(AxisType.Auto, NAMES), P("rows", None)))
    for implementation in ("xla", "kernel"):

        def run(data: jax.Array, implementation: str = implementation) -> tuple[jax.Array, ...]:
            return value_and_gradient(reduction, {"implementation": implementation}, data, ids, cotangent)

        compiled = jax.jit(run).lower(sharded).compile().as_text()
        assert bool(kernels_in(compiled)) == (implementation == "kernel")


def test_row_sharded_sums_need_no_16_bit_collective() -> None:
    """Sums, means and products are right if they are in range, but the partial results of devices are not."""
    data = jnp.asarray(np.tile([[6e4], [-6e4]], (32, 1)).repeat(2, axis=1)).astype(jnp.float16)
    data = jnp.concatenate([data[::2], data[1::2]])  # each device has numbers of one sign
    ids = jnp.zeros(64, jnp.int32)
    sharded = jax.device_put(data, NamedSharding(make_mesh(AxisType.Auto, NAMES), P("rows", None)))
    for reduction in (SUM, MEAN):
        output = jax.jit(lambda x, reduction=reduction: reduction(x, ids, 1))(sharded)
        np.testing.assert_array_equal(output, np.zeros((1, 2), np.float16))
    powers = np.exp2(np.repeat(np.array([100, -100], np.float32), 32))[:, None]
    sharded = jax.device_put(powers, NamedSharding(make_mesh(AxisType.Auto, NAMES), P("rows", None)))
    for reduce in (lambda x: PROD(x, ids, 1), lambda x: PROD.pullback(x, ids, 1, jnp.ones((1, 1)))[0]):
        np.testing.assert_array_equal(jax.jit(reduce)(sharded), np.ones((1, 1)))


@pytest.mark.versions
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@each_differentiable
def test_tangents_of_split_rows(reduction: Reduction, axis_type: AxisType) -> None:
    """Tangents equal those of one device, also with NaN, which XLA's maximum may lose. Devices exchange only cells."""
    data, ids, _ = make_operands(reduction, seed=11)
    tangent = jnp.asarray(np.random.default_rng(0).integers(-9, 10, data.shape).astype(np.float32))
    function = getattr(forward_mode, reduction.name)

    def value_and_tangent(data: jax.Array, tangent: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.jvp(lambda x: function(x, ids, NUM_SEGMENTS), (data,), (tangent,))

    expected = jax.jit(value_and_tangent)(data, tangent, ids)
    mesh = make_mesh(axis_type, NAMES)
    with jax.set_mesh(mesh):
        specs = P("rows", "features"), P("rows", "features"), P("rows")
        placed = jax.device_put((data, tangent, ids), tuple(NamedSharding(mesh, spec) for spec in specs))
        program = jax.jit(value_and_tangent).lower(*placed).compile()
        actual = program(*placed)
    of_cells = 2 * NUM_SEGMENTS * data.shape[1]  # values and tangents, which XLA may exchange as one array
    assert of_cells < data.size and all(x.size <= of_cells for x in exchanges_in(program.as_text()))
    # Several devices add the shares of ties, or rounded terms, in another order.
    if reduction in (MAX, MIN) or not reduction.derivatives_are_exact:
        assert_same(reduction, actual[:1], expected[:1], data, ids)
        magnitude = np.asarray(value_and_tangent(data, jnp.abs(tangent), ids)[1])
        Expected(np.asarray(expected[1]), np.float32, rounding_of_sums(len(data)) * magnitude).check(actual[1])
    else:  # the Jacobian of softmax is symmetric: a tangent is rounded like a gradient
        assert_same(reduction, actual, expected, data, ids, tangent)


@pytest.mark.versions
@each_reduction
def test_varying_result_is_refused_as_replicated(reduction: Reduction) -> None:
    data, ids, _ = make_operands(reduction, seed=5)
    function = jax.shard_map(
        lambda data, ids: reduction(data, ids, NUM_SEGMENTS),
        mesh=make_mesh(AxisType.Auto, NAMES),
        in_specs=(P("rows"), P("rows")),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="out_specs"):
        function(data, ids)


@pytest.mark.parametrize("of_rows", ["a", "b", ("a", "b"), ("b", "a")], ids=str)
@each_reduction
def test_shard_map_that_leaves_two_axes(reduction: Reduction, of_rows: str | tuple[str, ...]) -> None:
    """The results are right whichever axes split the rows. The partitioner does not tell its axes apart."""
    if len(jax.devices()) < 8:
        pytest.skip("three axes of two devices each need 8")
    data, ids, cotangent = make_operands(reduction, seed=12)
    mesh = jax.make_mesh((2, 2, 2), ("features", "a", "b"), axis_types=(AxisType.Auto,) * 3)
    mapped = functools.partial(value_and_gradient, reduction, reduction.options[0])
    expected = mapped(data, ids, cotangent)
    spec = P(None, "features")
    function = jax.shard_map(
        mapped, mesh=mesh, in_specs=(spec, P(), spec), out_specs=(spec,) * len(expected), axis_names={"features"}
    )
    specs = P(of_rows, "features"), P(of_rows), cells_or_rows(reduction, P(of_rows, "features"))
    placed = [jax.device_put(x, NamedSharding(mesh, its)) for x, its in zip((data, ids, cotangent), specs, strict=True)]
    assert_same(reduction, jax.jit(function)(*placed), expected, data, ids, cotangent)


@pytest.mark.versions
@each_reduction
def test_out_sharding(reduction: Reduction) -> None:
    data, ids, cotangent = make_operands(reduction, seed=8)
    expected = reduction(data, ids, NUM_SEGMENTS)
    mesh = make_mesh(AxisType.Explicit, NAMES)
    with jax.set_mesh(mesh):
        placed = jax.device_put(data, NamedSharding(mesh, P("rows", None)))

        @jax.jit
        def function(data: jax.Array) -> jax.Array:
            output = reduction(data, ids, NUM_SEGMENTS, out_sharding=P("rows", "features"))
            assert tuple(jax.typeof(output).sharding.spec) == ("rows", "features")
            return output

        assert_same(reduction, [function(placed)], [expected], data, ids, cotangent)


@pytest.mark.versions
@programs.each_function
def test_program_is_split_under_the_settings_of_its_lowering(
    example: an_example.Example, rng: np.random.Generator
) -> None:
    """XLA requests the program of a shard when it compiles: here, after the context of 64-bit types has ended."""
    call = example.call("small")
    run = an_example.value_and_gradient(call, example.differentiated("float64"))

    def function(operands: dict[str, Any]) -> Any:
        return run(operands, jax.tree.map(lambda y: jnp.ones(y.shape, y.dtype), jax.eval_shape(call, **operands)))

    operands = example.make_operands(rng, "float64", "small")
    all_dims = [dim for operand in example.operands.values() for dim in operand.dims]
    split = next((dim for dim in all_dims if example.sizes["small"].get(dim, 1) % 2 == 0), None)
    mesh = Mesh(np.array(jax.devices()[:2]), ("devices",))
    with jax.enable_x64(True):
        expected = jax.jit(function)(operands)
        placed = {
            name: jax.device_put(x, NamedSharding(mesh, P(*("devices" if dim == split else None for dim in dims))))
            for (name, x), dims in zip(operands.items(), (x.dims for x in example.operands.values()), strict=True)
        }
        lowered = jax.jit(function).lower(placed)
    program = lowered.compile()
    with jax.enable_x64(True):
        actual = program(placed)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.versions
def test_partitioner_leaves_settings_as_they_were(rng: np.random.Generator) -> None:
    """Compilation leaves JAX's settings unchanged, although the lowering had different ones."""
    data, ids, _ = make_operands(SUM, seed=13)
    placed = jax.device_put((data, ids), NamedSharding(make_mesh(AxisType.Auto, NAMES), P("rows")))
    with jax.numpy_dtype_promotion("strict"):
        lowered = jax.jit(lambda data, ids: SUM(data, ids, NUM_SEGMENTS)).lower(*placed)
    before = dict(jax.config.values)
    lowered.compile()
    assert jax.config.values == before


def test_gradient_by_rows_that_all_devices_share(rng: np.random.Generator) -> None:
    """Only the cotangent varies over devices. With a plan, the gradient returns to the order of the rows."""
    mesh = make_mesh(AxisType.Auto, NAMES)
    shards = mesh.shape["rows"]
    data, ids = rng.normal(size=16).astype(np.float32), rng.integers(0, NUM_SEGMENTS, 16)
    d_output = rng.normal(size=(shards, NUM_SEGMENTS)).astype(np.float32)

    def of_shard(d_output: jax.Array, data: jax.Array, ids: jax.Array) -> jax.Array:
        return segment_prod_backward(d_output[0], data, plan=segment_plan(ids, NUM_SEGMENTS))[None]

    sharded = jax.shard_map(of_shard, mesh=mesh, in_specs=(P("rows"), P(), P()), out_specs=P("rows"))
    expected = [segment_prod_backward(x, data, ids) for x in d_output]
    np.testing.assert_allclose(jax.jit(sharded)(d_output, data, ids), expected, rtol=1e-6)


def test_second_derivatives_exchange_sums_only() -> None:
    """Derivatives without a kernel are split along independent dimensions: examples, or features of segments."""
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))

    def split(array: np.ndarray, *spec: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    rng, size = np.random.default_rng(0), jax.device_count()
    x, logits = rng.normal(size=(size, 6, 16)), rng.normal(size=(20, size))
    weight, ids = rng.normal(size=(6, 4)).astype(np.float32), rng.integers(0, 5, 20)

    def second(function: Any) -> Any:
        first = jax.grad(lambda x: jnp.sum(function(x) ** 2))
        return jax.grad(lambda x: jnp.sum(first(x) ** 2))

    of_examples = second(lambda x: jax_baracuda.causal_conv1d(x, weight, activation="silu"))
    assert not any(collectives(of_examples, split(x.astype(np.float32), "all")).values())
    of_features = second(lambda logits: jax_baracuda.segment_softmax(logits, ids, 5))
    assert not any(collectives(of_features, split(logits.astype(np.float32), None, "all")).values())
