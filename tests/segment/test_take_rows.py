"""take_rows: values, gradients, transformations, sharding and errors, against plain JAX and NumPy."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from segment.gather_reference import gathered
from support import cases
from support.meshes import COLLECTIVES
from support.programs import small_floats, temp_bytes

from jax_baracuda import forward_mode, segment_plan, take_rows

# (rows, row_shape, ids_shape)
SHAPES = (
    (1, (), (1,)),
    (5, (3,), (0,)),
    (0, (3,), (0,)),
    (0, (), (2, 0)),
    (7, (0,), (30,)),
    (7, (2, 0), (3, 4)),
    (50, (), (400,)),
    (50, (3,), (20, 20)),
    (50, (4, 2, 3), (5, 1, 7)),
    (9, (6,), ()),
    (9, (), ()),
    (40, (33,), (3000,)),
    (500, (64,), (4, 300)),
    (3, (128,), (2000,)),
    (40, (1100,), (700,)),
)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: " of ".join("x".join(map(str, x)) for x in s[1:]))
each_dtype = pytest.mark.parametrize("dtype", cases.FLOATING)


def make_ids(rng: np.random.Generator, rows: int, shape: tuple[int, ...], dtype: Any = np.int32) -> np.ndarray:
    """Random ids. Most are in range, counted from either end; the others are out of range."""
    info = np.iinfo(dtype)
    ids = rng.integers(-rows - 3, rows + 3, shape, endpoint=True)
    return np.clip(ids, int(info.min), int(info.max)).astype(dtype)


def check(data: np.ndarray, ids: np.ndarray, d_output: np.ndarray, **options: Any) -> None:
    """Checks the value bit by bit, and the gradient within the error of its accumulator and one rounding."""
    output, vjp = jax.vjp(jax.jit(lambda x: take_rows(x, ids, **options)), data)
    [gradient] = vjp(jnp.asarray(d_output))
    flat_ids = ids.reshape(-1)
    values, rows = gathered(data, flat_ids)
    if ids.ndim == 0:  # a scalar id out of range passes its gradient to the nearest row
        rows = np.where(rows >= 0, rows, 0 if ids < 0 else len(data) - 1)
    cases.assert_same_bits(output, values.reshape((*ids.shape, *data.shape[1:])))
    d_rows = d_output.reshape(ids.size, *data.shape[1:])
    cases.reference_sum(d_rows, rows, len(data)).check(gradient, "gradient")


@each_shape
@each_dtype
def test_value_and_gradient(rng: np.random.Generator, shape: Any, dtype: str) -> None:
    rows, row_shape, ids_shape = shape
    data = rng.normal(size=(rows, *row_shape)).astype(jnp.dtype(dtype))
    ids = make_ids(rng, rows, ids_shape)
    d_output = np.asarray(cases.cotangent(rng, (*ids_shape, *row_shape), dtype))
    with cases.x64_for(dtype):
        check(data, ids, d_output)
        check(data, ids, d_output, deterministic=True)
        ascending = np.sort(np.where(ids < 0, ids + rows, ids), axis=None).clip(0).reshape(ids_shape).astype(ids.dtype)
        check(data, ascending, d_output, indices_are_sorted=True)


@pytest.mark.parametrize("rows", [5, 127, 128, 300])
@pytest.mark.parametrize("ids_dtype", cases.INTEGERS)
def test_ids_mean_what_they_mean_in_jax_numpy(rng: np.random.Generator, ids_dtype: str, rows: int) -> None:
    """Ids mean the same as in jax.numpy, up to the limits of their dtype. JAX gets 8-bit ids as 16-bit ones.
    For scalars beyond 32 bits, XLA's CPU back end uses different rows for value and gradient.
    """
    info = np.iinfo(ids_dtype)
    ends = [0, rows - 1, rows, rows + 1, -1, -rows, -rows - 1, -2 * rows - 1, 2**31, 2**32 + 2, -(2**40)]
    ids = [x for x in (*ends, info.min, info.max) if info.min <= x <= info.max] + list(range(min(rows, 100)))
    ids = np.array(ids, ids_dtype)
    data = np.round(10 * rng.normal(size=(rows, 3))).astype(np.float32)
    d_output = np.round(10 * rng.normal(size=(len(ids), 3))).astype(np.float32)
    with cases.x64_for(ids_dtype):
        of_jax = ids.astype(np.int16) if ids_dtype == "int8" else ids
        output, vjp = jax.vjp(lambda x: take_rows(x, ids), data)
        expected, plain_vjp = jax.vjp(lambda x: x[of_jax], jnp.asarray(data))
        np.testing.assert_array_equal(output, expected)
        np.testing.assert_array_equal(vjp(d_output)[0], plain_vjp(d_output)[0])
        ours, of_plain = (jax.jit(jax.value_and_grad(loss_of(take))) for take in (take_rows, plain))
        for one, one_of_jax in zip(ids[:13], of_jax[:13], strict=True):
            near = np.asarray(one_of_jax).clip(max(-(2**31), info.min), min(2**31 - 1, info.max))
            actual, expected = ours(data, np.asarray(one)), of_plain(data, near)
            jax.tree.map(lambda x, y, one=one: np.testing.assert_array_equal(x, y, str(one)), actual, expected)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "float8_e4m3fn"])
def test_other_dtypes(rng: np.random.Generator, dtype: str) -> None:
    data = rng.integers(0, 2, (6, 4)).astype(jnp.dtype(dtype))
    ids = make_ids(rng, 6, (3, 5))
    cases.assert_same_bits(jax.jit(take_rows)(data, ids), np.asarray(jnp.asarray(data)[ids]))
    if jnp.issubdtype(data.dtype, jnp.inexact):
        gradients = [
            jax.grad(lambda x, take=take: (take(x, ids).astype(jnp.complex64) * 2).real.sum())(jnp.asarray(data))
            for take in (take_rows, lambda x, i: x[i])
        ]
        cases.assert_same_bits(gradients[0], np.asarray(gradients[1]))


def test_python_numbers_and_weak_types() -> None:
    data = jnp.arange(6.0).reshape(3, 2)
    for number in (0, 2, -1, -3):
        np.testing.assert_array_equal(take_rows(data, number), data[number])
    weak = jnp.broadcast_to(jnp.asarray(1.0), (3,))
    assert take_rows(weak, np.array([0])).dtype == weak[np.array([0])].dtype
    assert jax.typeof(take_rows(weak, np.array([0]))) == jax.typeof(weak[np.array([0])])


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1.0), ("float16", 0.25)])
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"indices_are_sorted": True}], ids=str)
def test_hot_rows_of_16_bits(rng: np.random.Generator, options: dict[str, bool], dtype: str, scale: float) -> None:
    """Sums of many rows are accurate to half a unit in the last place. 16-bit accumulators would stop growing."""
    ids = np.repeat(np.int32([3, 5]), (100_000, 77_777))
    d_output = np.full((len(ids), 2), scale, jnp.dtype(dtype))
    d_output[:, 1] = rng.uniform(0.1, 0.2, len(ids))
    data = jnp.zeros((8, 2), dtype)
    [gradient] = jax.vjp(lambda x: take_rows(x, ids, **options), data)[1](jnp.asarray(d_output))
    exact = np.zeros((8, 2))
    np.add.at(exact, ids, d_output.astype(np.float64))
    half_a_unit = np.float64(jnp.finfo(dtype).eps) / 2 * np.exp2(np.floor(np.log2(np.maximum(exact, 1))))
    error = np.abs(np.asarray(gradient).astype(np.float64) - exact)
    assert (error[:, 0] <= half_a_unit[:, 0]).all(), error  # sums in float32 are exact
    np.testing.assert_array_less(error[:, 1], 1.01 * half_a_unit[:, 1] + (exact[:, 1] == 0))
    [of_jax] = jax.vjp(lambda x: x[ids], data)[1](jnp.asarray(d_output))
    assert cases.PLATFORM != "cpu" or float(of_jax[3, 0]) < exact[3, 0] / 10


# ----------------------------------------------------------------------------------------------------------------------
# Transformations.


def plain(data: Any, ids: Any) -> jax.Array:
    return jnp.asarray(data)[ids]


def loss_of(take: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda data, ids: (take(data, ids) ** 2).sum()


Levels = tuple[tuple[int | None, int | None], ...]
"""The axes of data and ids that each ``vmap`` maps, from the outermost."""


def map_over(levels: Levels, function: Callable[..., Any]) -> Callable[..., Any]:
    for axes in reversed(levels):
        function = jax.vmap(function, axes)
    return function


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"indices_are_sorted": True}], ids=str)
@pytest.mark.parametrize(
    "levels",
    [
        ((None, 0),),
        ((None, 1),),
        ((0, None),),
        ((1, None),),
        ((0, 0),),
        ((None, 1), (None, 0)),
        ((None, 0), (0, None)),
        ((0, None), (None, 0)),
        ((0, 0), (None, 0)),
        ((None, 0), (0, 1)),
        ((1, 0), (0, None)),
        ((None, 0), (1, 0), (None, 1)),
    ],
    ids=str,
)
def test_maps_of_gradients_and_gradients_of_maps(
    rng: np.random.Generator, levels: Levels, options: dict[str, bool]
) -> None:
    """Both equal those of plain JAX, whose sums are exact here."""
    sizes, ids_shape, is_sorted = (3, 2, 4)[: len(levels)], (2, 5), "indices_are_sorted" in options

    def draw(axes: tuple[int | None, ...], of_element: Callable[[], np.ndarray]) -> np.ndarray:
        if not axes:
            return of_element()
        size = sizes[-len(axes)]
        elements = [draw(axes[1:], of_element) for _ in range(size)]
        return elements[0] if axes[0] is None else np.stack(elements, axes[0])

    def draw_ids() -> np.ndarray:
        return np.sort(rng.integers(0, 7, 10)).reshape(ids_shape) if is_sorted else rng.integers(-7, 7, ids_shape)

    data = draw(tuple(axes[0] for axes in levels), lambda: small_floats(rng, 7, 3))
    ids = draw(tuple(axes[1] for axes in levels), draw_ids)
    d_output = small_floats(rng, *sizes, *ids_shape, 3)

    def results(take: Callable[..., jax.Array]) -> Any:
        def gradient(data: jax.Array, ids: jax.Array, d_output: jax.Array) -> jax.Array:
            return jax.vjp(lambda data: take(data, ids), data)[1](d_output)[0]

        taken, vjp = jax.vjp(lambda data: map_over(levels, take)(data, ids), jnp.asarray(data))
        with_cotangents = tuple((*axes, 0) for axes in levels)
        return taken, vjp(d_output)[0], map_over(with_cotangents, gradient)(data, ids, d_output)

    ours, of_jax = (
        jax.jit(lambda take=take: results(take))() for take in (functools.partial(take_rows, **options), plain)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, of_jax)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_memory_of_a_shared_table(rng: np.random.Generator, rank: int) -> None:
    """If the batch shares the data, they have one gradient, at any depth of vmap, as in plain JAX."""
    data, ids = np.ones((20_000, 32), np.float32), rng.integers(-20_000, 20_000, (8, 4, 64)[3 - rank :])

    def bytes_of_gradient(take: Callable[..., jax.Array]) -> int:
        mapped = map_over(((None, 0),) * rank, take)
        return temp_bytes(jax.grad(lambda data: (mapped(data, ids) ** 2).sum()), data)

    assert bytes_of_gradient(take_rows) < min(bytes_of_gradient(plain), data.nbytes) + data.nbytes


def test_mapped_plans_of_a_shared_table(rng: np.random.Generator) -> None:
    """Mapped plans give one gradient of a shared table. A vmap over features may share a plan."""
    nodes, edges, batch = 50_000, 40, 16
    ids, other_ids = rng.integers(0, nodes, (2, batch, edges))
    plans = jax.vmap(lambda ids, other_ids: segment_plan(ids, nodes, other_ids, nodes))(ids, other_ids)
    data, d_output = small_floats(rng, nodes, 4), small_floats(rng, batch, edges, 4)
    for plans_of_end, ids_of_end in ((plans, ids), (plans.transposed, other_ids)):

        def gradient(data: jax.Array, d_output: jax.Array, plans: Any = plans_of_end) -> tuple[jax.Array, jax.Array]:
            taken, vjp = jax.vjp(lambda data: jax.vmap(lambda plan: take_rows(data, plan=plan))(plans), data)
            return taken, vjp(d_output)[0]

        program = jax.jit(gradient).lower(data, d_output).compile()
        assert program.memory_analysis().temp_size_in_bytes < 4 * data.nbytes
        taken, actual = program(data, d_output)
        np.testing.assert_array_equal(taken, data[ids_of_end])
        exact = np.zeros(data.shape)
        np.add.at(exact, ids_of_end, d_output.astype(np.float64))
        np.testing.assert_array_equal(actual, exact)

    plan = segment_plan(ids[0], nodes, other_ids[0], nodes)
    columns, d_columns = data.T, d_output[:4, :, 0]
    taken, vjp = jax.vjp(jax.vmap(lambda column: take_rows(column, plan=plan)), columns)
    np.testing.assert_array_equal(taken, columns[:, ids[0]])
    exact = np.zeros(columns.shape)
    np.add.at(exact, (slice(None), ids[0]), d_columns.astype(np.float64))
    np.testing.assert_array_equal(vjp(d_columns)[0], exact)


def test_integers_have_no_tangent(rng: np.random.Generator) -> None:
    data, ids = rng.integers(0, 9, (5, 2)), rng.integers(0, 5, 7)
    no_tangents = [np.zeros(x.shape, jax.dtypes.float0) for x in (data, ids)]
    taken, tangent = jax.jvp(take_rows, (data, ids), tuple(no_tangents))
    np.testing.assert_array_equal(taken, data[ids])
    assert tangent.dtype == jax.dtypes.float0
    scale = jax.grad(lambda x: (x * take_rows(data, ids)).sum())(2.0)
    assert scale == data[ids].sum()


def test_the_value_is_fused_by_xla(rng: np.random.Generator) -> None:
    """The program of the value is that of plain JAX, under ``vmap``."""
    data, ids = small_floats(rng, 500, 64), rng.integers(0, 500, (8, 32))

    def entry(take: Callable[..., jax.Array]) -> list[str]:
        mapped = jax.vmap(lambda data, ids: take(data, ids) * 3 + 1, (None, 0))
        text = jax.jit(mapped).lower(data, ids).compile().as_text()
        assert "custom-call" not in text
        return re.findall(r" = \S+ ([a-z-]+)\(", text[text.index("ENTRY") :])

    of_ours = entry(take_rows)
    assert of_ours == entry(plain)
    assert "fusion" in of_ours and "gather" not in of_ours


def test_the_gradient_is_one_kernel(rng: np.random.Generator) -> None:
    """The gradient is one kernel, for ids of higher rank, too. The value is XLA's gather."""
    data, ids = small_floats(rng, 20, 4), make_ids(rng, 20, (3, 7))
    assert "jax_baracuda" not in jax.jit(take_rows).lower(data, ids).as_text()
    text = jax.jit(jax.grad(loss_of(take_rows))).lower(data, ids).as_text()
    assert text.count("@jax_baracuda.segment_sum(") == 1
    assert "scatter" not in text


@pytest.mark.parametrize("shape", [(30,), (5, 6)], ids=str)
def test_derivative_of_the_gradient(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    """The gradient is linear. Its transpose takes rows, and gives zeros for ids out of range."""
    ids = make_ids(rng, 6, shape)
    d_output, dd_data = small_floats(rng, *shape, 4), small_floats(rng, 6, 4)
    matrix = np.asarray(jax.jacrev(lambda x: take_rows(x, ids))(np.zeros(6, np.float32)))

    def gradient(d_output: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: take_rows(x, ids), np.zeros((6, 4), np.float32))[1](d_output)[0]

    actual, vjp = jax.vjp(gradient, d_output)
    np.testing.assert_array_equal(actual, np.tensordot(matrix, d_output, axes=(range(len(shape)),) * 2))
    np.testing.assert_array_equal(vjp(dd_data)[0], matrix @ dd_data)


# ----------------------------------------------------------------------------------------------------------------------
# Sharding.


def collectives_of(program: Any) -> list[tuple[str, str]]:
    """The (first) type and the kind of each collective."""
    return re.findall(rf" = \(?(\w+\[[\d,]*\])[^=]*? ({'|'.join(COLLECTIVES)})(?:-start)?\(", program.as_text())


@cases.on_four_devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
@pytest.mark.parametrize("ids_spec", [P("x"), P(None, "x"), P("x", "y"), P("y", "x"), P(None, ("x", "y"))], ids=str)
@pytest.mark.parametrize("data_spec", [P(None, None), P(None, "y"), P("x", None)], ids=str)
def test_collectives_of_the_gradient(rng: np.random.Generator, data_spec: P, ids_spec: P, axis_type: AxisType) -> None:
    """Whichever dimensions are split, the gradient has no more collectives than plain JAX, also under ``vmap``."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), (axis_type,) * 2, devices=jax.devices()[:4])
    automatic = jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    data, ids = small_floats(rng, 12, 6), make_ids(rng, 12, (8, 16))
    expected = np.zeros_like(data)
    is_row = (ids >= -12) & (ids < 12)
    np.add.at(expected, ids[is_row], 2 * data[ids[is_row]])

    def compiled(take: Callable[..., jax.Array], mesh: jax.sharding.Mesh) -> tuple[list[Any], jax.Array]:
        with jax.set_mesh(mesh):
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((data, data_spec), (ids, ids_spec))]
            program = jax.jit(jax.grad(loss_of(take))).lower(*placed).compile()
            return collectives_of(program), program(*placed)

    of_jax, _ = compiled(plain, automatic)  # explicit sharding cannot take rows by split ids
    takes = [take_rows, jax.vmap(take_rows, (None, 0))]
    if axis_type == AxisType.Explicit and ids_spec[0] in set(data_spec) - {None}:
        takes.pop()  # JAX refuses a vmap over an axis that also splits an unmapped operand
    for take in takes:
        of_ours, gradient = compiled(take, mesh)
        np.testing.assert_array_equal(gradient, expected)
        assert len(of_ours) <= len(of_jax), (of_ours, of_jax)
        if data_spec == P(None, None):
            assert of_ours == [("f32[12,6]", "all-reduce")]
        if "y" not in str(data_spec):  # otherwise the ids are gathered, and the features stay split
            assert {kind for _, kind in of_ours} <= {kind for _, kind in of_jax}


@cases.on_four_devices
@pytest.mark.parametrize("ids_spec", [P(), P("x"), P(None, "x"), P("x", "y"), P(("x", "y"))], ids=str)
@pytest.mark.parametrize("data_spec", [P(None, None), P(None, "y"), P("x", None), P("x", "y")], ids=str)
def test_explicit_types(rng: np.random.Generator, data_spec: P, ids_spec: P) -> None:
    """The result has the sharding of ids and features, or JAX's if JAX has one. The gradient has that of the data."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    data, ids = small_floats(rng, 8, 6), rng.integers(-8, 8, (4, 4))
    expected = data[ids], jax.grad(loss_of(plain))(jnp.asarray(data), ids)
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(data, NamedSharding(mesh, data_spec)),
            jax.device_put(ids, NamedSharding(mesh, ids_spec)),
        )
        output = take_rows(*placed)
        actual_spec = jax.typeof(output).sharding.spec
        if data_spec[0] is None and not any(ids_spec):
            assert actual_spec == jax.typeof(placed[0][placed[1]]).sharding.spec
        ids_axes = tuple(jax.typeof(placed[1]).sharding.spec)
        feature_axes = None if "y" in str(ids_spec) else data_spec[1]
        assert tuple(actual_spec) == (*ids_axes, *(None,) * (2 - len(ids_axes)), feature_axes)
        np.testing.assert_array_equal(output, expected[0])
        for function in (take_rows, forward_mode.take_rows):
            gradient = jax.jit(jax.grad(loss_of(function)))(*placed)
            assert gradient.sharding.is_equivalent_to(placed[0].sharding, 2)
            np.testing.assert_array_equal(gradient, expected[1])


# ----------------------------------------------------------------------------------------------------------------------
# Errors.

DATA, IDS = np.ones((4, 3), np.float32), np.zeros(5, np.int32)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        ("TypeError: ids must be an array, got slice", lambda: take_rows(DATA, slice(2))),
        ("TypeError: ids must have an integer dtype, got bool", lambda: take_rows(DATA, True)),
        (r"ValueError: data must have shape \[N, ...\], got a scalar", lambda: take_rows(np.float32(1), IDS)),
        (r"ValueError: must have rows for 5 ids to take, got shape \(0, 3\)", lambda: take_rows(DATA[:0], IDS)),
        ("ValueError: must have rows for 1 ids to take", lambda: take_rows(DATA[:0], 0)),
    ],
)
def test_errors(error: str, call: Callable[[], Any]) -> None:
    with cases.raises(error, "^take_rows: .*"):
        call()


# ----------------------------------------------------------------------------------------------------------------------
# Plans.


@pytest.mark.parametrize("dtype", cases.FLOATING)
def test_plan(rng: np.random.Generator, dtype: str) -> None:
    """Rows at both ends of edges, and their derivatives, are the same by a plan and by ids."""
    nodes, segments, edges = 30, 20, 500
    gather_ids, segment_ids = rng.integers(0, nodes, edges), rng.integers(0, segments, edges)
    plan = segment_plan(segment_ids, segments, gather_ids, nodes)
    for plan_of_end, ids, count in ((plan, segment_ids, segments), (plan.transposed, gather_ids, nodes)):
        data = rng.integers(-4, 5, (count, 3)).astype(dtype)
        cotangent = rng.integers(-4, 5, (edges, 3)).astype(dtype)
        with cases.x64_for(dtype):
            taken, vjp = jax.vjp(lambda data, plan=plan_of_end: take_rows(data, plan=plan), data)
            expected, plain_vjp = jax.vjp(lambda data, ids=ids: data[ids], jnp.asarray(data))
            np.testing.assert_array_equal(taken, expected)
            np.testing.assert_array_equal(vjp(cotangent)[0], plain_vjp(cotangent)[0])

            def loss(take: Callable[[Any], Any], data: Any) -> Any:
                return (take(data) ** 3).sum()

            ours, plain = (
                jax.jit(jax.hessian(functools.partial(loss, take)))(data[:, 0])
                for take in (lambda x, plan=plan_of_end: take_rows(x, plan=plan), lambda x, ids=ids: x[ids])
            )
            np.testing.assert_array_equal(ours, plain)


def test_errors_of_plans() -> None:
    ids = np.zeros(5, np.int32)
    plan = segment_plan(ids, 2, ids, 4)
    for error, call in (
        ("ValueError: for 2 segments, got data.shape", lambda: take_rows(np.ones((4, 3)), plan=plan)),
        (
            r"ValueError: must have rows for 5 edges to take, got shape \(0, 3\)",
            lambda: take_rows(np.ones((0, 3)), plan=segment_plan(ids, 0)),
        ),
    ):
        with cases.raises(error, "take_rows: .*"):
            call()
