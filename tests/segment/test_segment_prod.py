"""Properties of segment_prod alone: zeros, infinities and extreme magnitudes, in the product and its gradient."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from segment.matrix import reference_prod
from segment.reference import PROD
from support import cases
from support.cases import FLOATING, Shape, assert_same_bits
from support.kernels import Batch
from support.programs import small_integers

from jax_baracuda import Implementation, forward_mode, segment_prod, segment_prod_backward


def check_value_and_gradient(
    data: np.ndarray, ids: np.ndarray, segments: int, cotangent: np.ndarray | None = None, where: str = ""
) -> None:
    """Checks value and gradient. If the ids are sorted, checks them also with ``indices_are_sorted``."""
    cotangent = np.ones((segments, *data.shape[1:]), data.dtype) if cotangent is None else cotangent
    value, gradient = PROD.value(data, ids, segments), PROD.gradient(cotangent, data, ids, segments)
    with cases.x64_for(data.dtype):
        for is_sorted in {False, bool((np.diff(ids) >= 0).all())}:
            output, d_data = PROD.pullback(data, ids, segments, cotangent, indices_are_sorted=is_sorted)
            value.check(output, where)
            value.check(segment_prod(data, ids, segments, is_sorted), where)
            gradient.check(d_data, f"{where} gradient")


@pytest.mark.parametrize("num_zeros", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("special", [0.0, -0.0, np.inf, -np.inf, np.nan])
def test_counts_of_special_values(rng: np.random.Generator, special: float, num_zeros: int) -> None:
    """Zeros, infinities or NaN in rows far apart: exactly one passes a gradient to its own row, several to none."""
    data = np.exp2(rng.integers(-1, 2, (3000, 40)) * rng.choice([0, 1], (3000, 40), p=[0.99, 0.01])).astype(np.float32)
    ids = np.sort(rng.integers(0, 2, 3000))
    for feature in range(40):
        data[rng.choice(3000, num_zeros, replace=False), feature] = special
    check_value_and_gradient(data, ids, 2)
    shuffled = rng.permutation(3000)
    check_value_and_gradient(data[shuffled], ids[shuffled], 2)


@pytest.mark.parametrize("order", ["large first", "small first", "alternating", "random"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_intermediate_products_out_of_range(rng: np.random.Generator, dtype: str, order: str) -> None:
    """Product and gradient are exact, also if partial products overflow or underflow."""
    max_exponent = int(jnp.finfo(dtype).maxexp) - 1
    for half in (1, 20, 3000):
        exponents = np.repeat([max_exponent, -max_exponent], half)
        if order == "small first":
            exponents = exponents[::-1]
        elif order == "alternating":
            exponents = exponents.reshape(2, half).T.reshape(-1)
        elif order == "random":
            exponents = rng.permutation(exponents)
        exponents = np.append(exponents, 3)
        column = np.exp2(exponents.astype(np.float64))
        signs = rng.choice([-1.0, 1.0], (len(column), 5))
        data = (column[:, None] * signs).astype(jnp.dtype(dtype))
        ids = np.zeros(len(data), np.int32)
        cotangent = np.full((1, 5), 1.0, data.dtype)
        check_value_and_gradient(data, ids, 1, cotangent, f"{half} {order}")
        with cases.x64_for(dtype):
            assert_same_bits(np.abs(segment_prod(data, ids, 1)), np.full((1, 5), 8, data.dtype))


@pytest.mark.parametrize(
    ("implementation", "order"), [("kernel", "large first"), ("kernel", "small first"), ("xla", "large first")]
)
@pytest.mark.parametrize(("dtype", "exponent", "half"), [("float64", 1000, 40_000), ("float32", 120, 290_000)])
def test_exponents_of_partial_products_beyond_25_bits(
    dtype: str, exponent: int, half: int, order: str, implementation: Implementation
) -> None:
    """Product and gradient are exact, also if partial products have very large exponents."""
    exponents = np.repeat([exponent, -exponent] if order == "large first" else [-exponent, exponent], half)
    column = np.exp2(np.append(exponents, 3).astype(np.float64)).astype(dtype)
    ids = np.zeros(len(column), np.int32)

    @functools.partial(jax.jit, static_argnums=1)
    def pullback(data: jax.Array, is_sorted: bool) -> tuple[jax.Array, jax.Array]:
        reduce = functools.partial(segment_prod, indices_are_sorted=is_sorted, implementation=implementation)
        output, pull_back = jax.vjp(lambda x: reduce(x, ids, 1), data)
        return output, pull_back(jnp.ones_like(output))[0]

    for width, is_sorted in [(1, False)] if implementation == "xla" else itertools.product((1, 2, 9), (False, True)):
        data = np.repeat(column[:, None], width, axis=1)
        with cases.x64_for(dtype):
            output, d_data = pullback(data, is_sorted)
            assert_same_bits(output, np.full((1, width), 8, dtype))
            assert_same_bits(d_data, 8 / data)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_exponents_of_partial_products_beyond_32_bits(is_sorted: bool) -> None:
    """A kernel's product is exact, although the product of the large factors alone is about 2^(2^31)."""
    half = 17_500_000
    data = np.repeat(np.array([2.0**126, 2.0**-126], jnp.bfloat16), half)
    data[-1] *= 2
    product = segment_prod(data, np.zeros(len(data), np.int32), 1, is_sorted, implementation="kernel")
    assert_same_bits(product, np.array([2], jnp.bfloat16))


@cases.on_two_devices
@pytest.mark.parametrize("of_cells", [P(), P("x")], ids=str)
def test_products_of_shards_out_of_range(of_cells: P) -> None:
    """Product and gradient are right, although one device has only large factors and another only small ones."""
    half, mesh = 40_000, jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    with jax.enable_x64(True):
        data = np.repeat(np.exp2([1000.0, -1000.0]), half)[:, None] * np.ones(3)
        placed = jax.device_put(data, NamedSharding(mesh, P("x")))

        def pullback(data: jax.Array) -> tuple[jax.Array, jax.Array]:
            output, pull_back = jax.vjp(lambda x: segment_prod(x, np.zeros(2 * half, np.int32), 2), data)
            output = jax.lax.with_sharding_constraint(output, NamedSharding(mesh, of_cells))
            return output, pull_back(jnp.ones_like(output))[0]

        output, d_data = jax.jit(pullback)(placed)
        np.testing.assert_array_equal(output, np.ones((2, 3)))
        np.testing.assert_array_equal(d_data, 1 / data)


@pytest.mark.parametrize(("features", "segments"), [(1, 300), (1, 3000), (7, 3000), (40, 2), (40, 2500), (100, 3000)])
@pytest.mark.parametrize("dtype", FLOATING)
def test_few_unusual_rows_among_ordinary_ones(
    rng: np.random.Generator, dtype: str, features: int, segments: int
) -> None:
    """Kernels on CPUs first multiply as if all products were ordinary numbers, then find those that were not."""
    info = jnp.finfo(dtype)
    huge, small = (1.25 * 2.0 ** (exponent * 3 // 4) for exponent in (info.maxexp, info.minexp))
    data = rng.uniform(0.8, 1.25, (6000, features)) * rng.choice([-1.0, 1.0], (6000, features))
    ids = rng.integers(-2, segments + 2, len(data)).astype(np.int32)
    # In some segments, two rows bring a product out of range, and the next two bring it back.
    for factor in (huge, small):
        first = 4 * rng.permutation(len(data) // 4)[:60]
        for row, value in enumerate((factor, factor, 1 / factor, 1 / factor)):
            data[first + row], ids[first + row] = value, ids[first]
    some = rng.random(data.shape) < 0.003
    data[some] = rng.choice([0.0, np.inf, np.nan, huge, small], some.sum())
    cotangent = rng.uniform(1, 2, (segments, features)).astype(jnp.dtype(dtype))
    data = data.astype(jnp.dtype(dtype))
    check_value_and_gradient(data, ids, segments, cotangent)
    order = np.argsort(ids, kind="stable")
    check_value_and_gradient(data[order], ids[order], segments, cotangent)


@pytest.mark.parametrize("dtype", FLOATING)
def test_subnormal_factors_and_products(rng: np.random.Generator, dtype: str) -> None:
    """Subnormal factors and products are not zeros, and lose no precision."""
    info = jnp.finfo(dtype)
    smallest = float(info.smallest_subnormal)
    lift = float(2.0 ** min(info.maxexp - 1, 100))
    columns = np.array(
        [
            [smallest, lift],
            [3 * smallest, 2],
            [smallest, 0.5],
            [float(info.tiny), 0.25],
            [5 * smallest, -1],
            [lift, lift],
        ]
    ).T
    data, ids = columns.astype(jnp.dtype(dtype)), np.zeros(2, np.int32)
    check_value_and_gradient(data, ids, 1)
    data = np.concatenate([data] * 20)  # a segment each, out of order
    ids = (
        np.tile(rng.permutation(20), 2)
        .reshape(2, 20)
        .T.reshape(-1)[np.argsort(np.tile(np.arange(20), 2), kind="stable")]
    )
    check_value_and_gradient(data, ids.astype(np.int32), 20)


@pytest.mark.parametrize("dtype", FLOATING)
def test_cotangents_bring_gradients_back_into_range(dtype: str) -> None:
    """The gradient is right, also if the product of the other rows is out of range but the gradient is in range."""
    powers = int(jnp.finfo(dtype).maxexp) - 2
    largest = jnp.finfo(jnp.promote_types(dtype, "float32")).maxexp // powers
    data = np.concatenate([np.full(largest + 2, 2.0**powers), [0.0, 1.0, 3.0]])
    for scaled, exponents in (
        (data, (-powers, -powers - 3)),
        (1 / np.where(data == 0, np.inf, data), (powers, powers)),
    ):
        for first, count in itertools.product((0, 1), range(1, len(data) + 1)):
            rows = np.roll(scaled, first)[:count].astype(jnp.dtype(dtype))[:, None] * np.ones(37, jnp.dtype(dtype))
            cotangent = np.ldexp(np.linspace(-1.5, 1.5, 37), exponents[first]).astype(jnp.dtype(dtype))[None]
            check_value_and_gradient(rows, np.zeros(count, np.int32), 1, cotangent, f"{first} {count}")


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_derivatives_whose_products_of_others_leave_the_range(dtype: str, implementation: Implementation) -> None:
    """Derivatives are right if a cotangent or tangent brings an out-of-range product of other rows back into range."""
    power = int(jnp.finfo(dtype).maxexp) - 28
    ids = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 3])
    exponents = np.array([0, -power, -power, 0, power, power, power, power, -power, 5])
    of_tangents = np.array([power, -power, -power, -power, 0, 0, -power, -power, -power, 3])
    data, tangent = (np.ldexp(1.5, x).astype(jnp.dtype(dtype)) for x in (exponents, of_tangents))
    tangent[3] = 0  # times a product that is out of range
    cotangent = np.ldexp(1.5, [power, -power, -power, 2]).astype(jnp.dtype(dtype))
    with cases.x64_for(dtype):
        gradient = segment_prod_backward(cotangent, data, ids, implementation=implementation)
        PROD.gradient(cotangent, data, ids, 4).check(gradient)
        output, pushed = jax.jvp(
            lambda x: forward_mode.segment_prod(x, ids, 4, implementation=implementation), (data,), (tangent,)
        )
        PROD.value(data, ids, 4).check(output)
        others = np.array([np.prod(np.longdouble(data)[(ids == ids[i]) & (np.arange(10) != i)]) for i in range(10)])
        expected = cases.segment_sum(others * tangent.astype(np.longdouble), ids, 4).astype(jnp.dtype(dtype))
        np.testing.assert_allclose(np.asarray(pushed), expected, 4 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", FLOATING)
def test_rounding(rng: np.random.Generator, dtype: str) -> None:
    """Products round the accumulator at most once for each factor, and the result once."""
    batch = Batch()
    for shape in (
        Shape(60, (), 9),
        Shape(2000, (), 3),
        Shape(900, (5,), 40),
        Shape(500, (33,), 2),
        Shape(90, (9,), 200),
    ):
        for is_sorted in (False, True):
            # Logarithms of mean 0: the product of n such factors is about exp(sqrt(n) / 2).
            data = np.exp(rng.normal(size=(shape.rows, *shape.row_shape)) / 2)
            data = (data * rng.choice([-1.0, 1.0], data.shape)).astype(jnp.dtype(dtype))
            ids = cases.make_ids(rng, shape.rows, shape.segments, is_sorted=is_sorted)
            cotangent = cases.cotangent(rng, (shape.segments, *shape.row_shape), dtype)
            value = PROD.value(data, ids, shape.segments)
            gradient = PROD.gradient(cotangent, data, ids, shape.segments)

            def check(output, d_data, value=value, gradient=gradient, where=f"{shape} {is_sorted}") -> None:
                value.check(output, where)
                gradient.check(d_data, f"{where} gradient")

            batch.add(
                lambda x, i, d, s=shape.segments, o=is_sorted: PROD.pullback(x, i, s, d, indices_are_sorted=o),
                (data, ids, cotangent),
                check,
            )
    with cases.x64_for(dtype):
        batch.run()


def test_higher_derivatives_with_zeros(rng: np.random.Generator) -> None:
    """The first three derivatives, with 0 to 3 zeros in a segment, equal those of a product in plain JAX.

    They are exact, because they are polynomials of small integers.
    """
    data, ids = rng.choice([-3.0, -2.0, -1.0, 1.0, 2.0, 3.0], (8, 4)), np.array([0, 0, 0, 0, 1, 1, 1, -1])
    for segment, num_zeros in np.ndindex(2, 4):
        data[rng.choice(np.flatnonzero(ids == segment), num_zeros, replace=False), num_zeros] = 0
    u, v, w = small_integers(rng, (3, 8, 4), "float64")

    def derivatives(reduce):
        loss = lambda x: jnp.vdot(reduce(x, jnp.asarray(ids), 2), jnp.arange(1.0, 9.0).reshape(2, 4))  # noqa: E731
        first = lambda x: jnp.vdot(jax.grad(loss)(x), u)  # noqa: E731
        second = lambda x: jnp.vdot(jax.grad(first)(x), v)  # noqa: E731
        return jax.jit(
            lambda x: (jax.grad(loss)(x), jax.hessian(loss)(x), jax.grad(second)(x), jax.jvp(second, (x,), (w,))[1])
        )

    with jax.enable_x64(True):
        for actual, expected in zip(derivatives(segment_prod)(data), derivatives(reference_prod)(data), strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_gradient_of_dropped_and_lone_rows() -> None:
    """The only row of a segment gets the cotangent unchanged, whatever its value. A dropped row always gets 0."""
    data = np.array([np.nan, np.inf, 0, 5, np.nan, 0], np.float32)
    ids = np.array([0, 1, 2, 3, -1, 7])
    cotangent = np.array([2, 3, np.inf, np.nan], np.float32)
    _, d_data = PROD.pullback(data, ids, 4, cotangent)
    assert_same_bits(d_data, np.array([2, 3, np.inf, np.nan, 0, 0], np.float32))
    assert_same_bits(segment_prod_backward(cotangent, data, ids), np.asarray(d_data))


def test_complex_numbers(rng: np.random.Generator) -> None:
    """Complex products run as plain JAX. A row's gradient is the product of its segment's other rows."""
    data = (rng.normal(size=(6, 3)) + 1j * rng.normal(size=(6, 3))).astype(np.complex64)
    data[1, 0] = 0
    ids, cotangent = np.array([0, 0, 2, 2, 2, 5]), rng.normal(size=(3, 3)).astype(np.complex64)
    output, pull_back = jax.vjp(lambda x: segment_prod(x, ids, 3), data)
    np.testing.assert_allclose(output, [data[ids == i].prod(axis=0) for i in range(3)], rtol=1e-5)
    others = [data[(ids == ids[i]) & (np.arange(6) != i)].prod(axis=0) * (ids[i] < 3) for i in range(6)]
    expected = np.array(others) * cotangent[np.minimum(ids, 2)]
    np.testing.assert_allclose(pull_back(cotangent)[0], expected, rtol=1e-5)


@cases.on_two_devices
def test_complex_numbers_whose_rows_are_split(rng: np.random.Generator) -> None:
    """Value, gradient and tangent equal those of one device."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    data, tangent = (rng.normal(size=(2, 8, 3)) + 1j * rng.normal(size=(2, 8, 3))).astype(np.complex64)
    ids = np.array([0, 1, 1, 2, 0, 1, 4, -1])

    def derivatives(data: jax.Array, ids: jax.Array, tangent: jax.Array) -> list[jax.Array]:
        value, vjp = jax.vjp(lambda data: segment_prod(data, ids, 4), data)
        tangents = jax.jvp(lambda data: forward_mode.segment_prod(data, ids, 4), (data,), (tangent,))
        return [value, *vjp(value), *tangents]

    placed = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in (data, ids, tangent)]
    for split, whole in zip(jax.jit(derivatives)(*placed), derivatives(data, ids, tangent), strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-5, atol=1e-6)
