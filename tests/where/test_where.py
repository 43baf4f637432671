"""where and its gradient: values, shapes, dtypes, errors, batches."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support.cases import FLOATING, SUB_BYTE, Expected, assert_same_bits, assert_same_memory, random_bits
from support.kernels import Batch, kernels_of
from support.programs import temp_bytes
from where.reference import (
    GRADIENT_SHAPES,
    KERNEL_DTYPES,
    SHAPES,
    Shapes,
    joint_shape,
    make_condition,
    random_shapes,
    reference,
    reference_gradients,
)

from jax_baracuda import forward_mode, where, where_backward


def make_operands(
    rng: np.random.Generator, shapes: Shapes, dtype: Any = "float32", cond_dtype: Any = "bool"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A condition and random numbers."""
    a, b = (rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes[1:])
    return make_condition(rng, shapes[0], cond_dtype), a, b


def value_and_pullback(function: Callable[..., Any], cond: Any, a: Any, b: Any, dy: Any) -> Any:
    value, vjp = jax.vjp(functools.partial(function, cond), a, b)
    return value, *vjp(dy)


# ----------------------------------------------------------------------------------------------------------------------
# Values and gradients.


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_value(rng: np.random.Generator, dtype: str) -> None:
    """For every shape and both dtypes of conditions, one kernel call selects the exact bits."""
    batch, all_shapes = Batch(), (*SHAPES, *random_shapes(rng, 6))
    for shapes, cond_dtype in itertools.product(all_shapes, ("bool", "uint8")):
        a, b = (random_bits(rng, shape, dtype) for shape in shapes[1:])
        cond = make_condition(rng, shapes[0], cond_dtype)
        check = functools.partial(assert_same_memory, expected=reference(cond, a, b), where=f"{shapes} {cond_dtype}")
        batch.add(where, (cond, a, b), check)
    with cases.x64_for(dtype):
        assert batch.run() == {"where": 2 * len(all_shapes)}


@pytest.mark.parametrize("dtype", SUB_BYTE)
def test_dtypes_of_less_than_a_byte(rng: np.random.Generator, dtype: str) -> None:
    """Dtypes of less than a byte run as plain JAX."""
    a, b = (rng.integers(0, 2, shape).astype(jnp.dtype(dtype)) for shape in ((5, 9), (9,)))
    cond = make_condition(rng, (5, 1))
    assert_same_bits(where(cond, a, b), reference(cond, a, b))
    assert kernels_of(where, cond, a, b) == []


@pytest.mark.parametrize("dtype", FLOATING)
def test_gradient(rng: np.random.Generator, dtype: str) -> None:
    """Gradients, by reverse mode and by the public function: exact without sums, otherwise rounded once."""
    batch, all_shapes = Batch(), (*GRADIENT_SHAPES, *random_shapes(rng, 12))
    for i, shapes in enumerate(all_shapes):
        cond, a, b = make_operands(rng, shapes, dtype, ("bool", "uint8")[i % 2])
        dy = rng.normal(size=joint_shape(shapes)).astype(a.dtype)
        of_a, of_b = reference_gradients(cond, dy, a.shape, b.shape)

        def check(*results: Any, expected: tuple[Expected, ...] = (of_a, of_b), where: str = f"{shapes}") -> None:
            for result, allowed in zip(results[-2:], expected, strict=True):
                allowed.check(result, where)

        batch.add(functools.partial(value_and_pullback, where), (cond, a, b, dy), check)
        backward = functools.partial(where_backward, a_shape=a.shape, b_shape=list(b.shape))
        batch.add(backward, (dy, cond), check)
    with cases.x64_for(dtype):
        called = batch.run()
    assert called["where"] == len(all_shapes)
    # Two calls if both gradients are sums, over different dimensions.
    assert 2 * len(all_shapes) <= called["where_backward"] <= 3 * len(all_shapes)


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "float8_e5m2", "float8_e8m0fnu"])
def test_gradient_of_other_dtypes(rng: np.random.Generator, dtype: str) -> None:
    """Gradients agree with plain JAX. A kernel runs if nothing is summed and the dtype has a zero."""
    with cases.x64_for(dtype):
        cond, a, b = make_condition(rng, (40, 5)), *(random_bits(rng, (40, 5), dtype) for _ in range(2))
        dy = rng.integers(1, 3, (40, 5)).astype(a.dtype)
        ours, plain = (jax.jit(functools.partial(value_and_pullback, f)) for f in (where, jnp.where))
        kernels = ["where", "where_backward"] if dtype != "float8_e8m0fnu" else ["where"]
        assert kernels_of(ours, cond, a, b, dy) == kernels
        value, *gradients = ours(cond, a, b, dy)
        assert_same_memory(value, reference(cond, a, b))  # plain JAX does not keep the bits of every NaN
        for got, want in zip(gradients, plain(cond, a, b, dy)[1:], strict=True):
            assert_same_memory(got, np.asarray(want))
        if dtype == "float8_e8m0fnu":
            return
        _, d_row = where_backward(dy, cond, b_shape=(5,))
        exact = np.where(cond, 0, dy.astype(np.complex128)).sum(axis=0).astype(d_row.dtype)
        assert_same_bits(d_row, exact.astype(dy.dtype))


@pytest.mark.parametrize("dtype", FLOATING)
def test_nothing_leaks(rng: np.random.Generator, dtype: str) -> None:
    """NaN and infinity that are not selected reach neither the value nor the gradients nor their sums."""
    for shapes in (((6, 40),) * 3, ((6, 40), (40,), ()), ((6, 40), (6, 40), (6, 1))):
        cond, a, b = make_operands(rng, shapes, dtype)
        cond[:, ::2] = True
        dy = rng.normal(size=cond.shape).astype(a.dtype)
        dy[:, ::2] = rng.choice([np.nan, np.inf, -np.inf], (6, 20))
        of_b = reference_gradients(cond, dy, a.shape, b.shape)[1]
        with cases.x64_for(dtype):
            of_b.check(where_backward(dy, cond, a_shape=a.shape, b_shape=b.shape)[1])
            of_b.check(value_and_pullback(where, cond, a, b, dy)[2])
            is_bad = np.broadcast_to(np.arange(40) % 2 == 0, (6, 40))
            value = where(is_bad, b, np.where(is_bad, np.asarray(np.nan, a.dtype), a))
        assert np.isfinite(np.asarray(value).astype(np.float64)).all()


def test_positive_long_sums_of_16_bits() -> None:
    """Long sums of positive 16-bit terms do not stagnate, and are rounded once."""
    for dtype in ("bfloat16", "float16"):
        dy = np.full((3, 7001), 1 / 2, jnp.dtype(dtype))
        cond = np.arange(7001) % 3 > 0
        da, db = where_backward(dy, cond, a_shape=(), b_shape=(3, 1))
        np.testing.assert_array_equal(da, np.asarray(3 * cond.sum() / 2).astype(dy.dtype))
        np.testing.assert_array_equal(db, np.full((3, 1), (~cond).sum() / 2).astype(dy.dtype))


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "complex64"])
def test_many_short_rows(rng: np.random.Generator, dtype: str) -> None:
    """Operands with one element per row are right. A CPU expands blocks of them, at one stride and at several."""
    for length in (1, 2, 3, 4, 7, 8, 9, 16, 33, 64, 70, 128, 130):
        rows, calls = 9000 // length, []
        for shape, repeated in (((rows, length), (rows, 1)), ((3, rows // 3 + 1, length), (3, 1, 1)),
                                ((5, 7, rows // 30 + 1, length), (5, 1, rows // 30 + 1, 1))):  # fmt: skip
            for shapes in ((repeated, shape, ()), (shape, shape, repeated), (repeated, repeated, shape)):
                calls.append(make_operands(rng, shapes, dtype))
        # One program for all calls, because compiling takes longest.
        for actual, call in zip(jax.jit(lambda all_calls: [where(*x) for x in all_calls])(calls), calls, strict=True):
            assert_same_memory(actual, reference(*call))


def test_many_dimensions(rng: np.random.Generator) -> None:
    """Operands may be repeated along every other one of many dimensions. Ranks above the kernels' run as plain JAX."""
    cond, a, b = make_operands(rng, ((2, 1) * 8, (1, 2) * 8, (2,) * 16))
    assert kernels_of(where, cond, a, b) == ["where"]
    assert_same_memory(where(cond, a, b), reference(cond, a, b))
    high = [np.asarray(x)[(None,) * 17] for x in (cond, a, b)]
    operands = [jax.ShapeDtypeStruct((1,) * 20 + x.shape, x.dtype) for x in high]
    assert kernels_of(where, *operands) == []


def test_broadcast_operands_are_not_written_out(rng: np.random.Generator) -> None:
    """Repeated operands are not materialized: programs need almost no temporary memory."""
    cond, a, b = make_operands(rng, ((1000, 1), (1000, 300), ()))

    def gradients(cond: Any, a: Any, b: Any) -> Any:
        return jax.vjp(functools.partial(where, cond), a, b)[1](a)

    for function in (where, gradients):
        assert temp_bytes(function, cond, a, b) < a.nbytes / 5


# ----------------------------------------------------------------------------------------------------------------------
# Arguments: dtypes and shapes as in jax.numpy.where.

PYTHON_NUMBERS = (True, 3, 2.5, 1 + 2j)
WIDE_DTYPES = ("int64", "uint64", "float64", "complex128")
NARROW_DTYPES = (
    *("bool", "int4", "int8", "uint8", "int32", "uint32"),
    *("float8_e4m3fn", "bfloat16", "float16", "float32", "complex64"),
)


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """The type of the result, or "refused" if the dtypes have no common one."""
    try:
        result = jax.eval_shape(functools.partial(function, *arguments))
    except ValueError as error:  # older versions of JAX do not export its type
        assert type(error).__name__ == "TypePromotionError"
        return "refused"
    return result.shape, result.dtype, result.weak_type


@pytest.mark.parametrize("x64", [False, True])
def test_promotion(x64: bool) -> None:
    """Results have the dtypes and weak types of jax.numpy.where, for arrays, numbers and weakly typed arrays."""
    with jax.enable_x64(x64):
        arrays = [jnp.ones(2, dtype) for dtype in (*NARROW_DTYPES, *(WIDE_DTYPES if x64 else ()))]
        weak = [jnp.broadcast_to(jnp.asarray(number), (2,)) for number in PYTHON_NUMBERS]
        values = (*arrays, *weak, *PYTHON_NUMBERS, np.float32(1), np.ones(2, np.int16))
        assert any(getattr(value, "weak_type", False) for value in values)
        for a, b in itertools.product(values, values):
            assert outcome(where, True, a, b) == outcome(jnp.where, True, a, b), (a, b)


@pytest.mark.parametrize("x64", [False, True])
def test_weak_results_are_of_the_kernel(rng: np.random.Generator, x64: bool) -> None:
    """A kernel computes weakly typed results: of an array of a narrower kind and a Python number, or of two numbers, in
    either order. Values, gradients and weak types agree with plain JAX."""
    functions = functools.partial(where, implementation="kernel"), jnp.where
    with jax.enable_x64(x64):
        cond = make_condition(rng, (4, 9))
        integers, weak_integers = jnp.arange(9, dtype=np.int32), jnp.broadcast_to(jnp.asarray(7), (4, 9))
        weak_floats = jnp.broadcast_to(jnp.asarray(0.5), (9,))
        pairs = [(integers, 0.5), (weak_integers, 3), (weak_floats, integers), (weak_integers, 2.5), (1 + 2j, integers)]
        pairs += [(integers > 3, 2), (weak_floats, 1j), (2, 3.5), (True, 2), (weak_floats, weak_floats)]
        for pair, is_swapped in itertools.product(pairs, (False, True)):
            a, b = reversed(pair) if is_swapped else pair
            ours, plain = (jax.jit(functools.partial(f, cond)) for f in functions)
            value, expected = ours(a, b), plain(a, b)
            assert value.weak_type and expected.weak_type
            assert jax.typeof(value) == jax.typeof(expected)
            assert_same_bits(value, np.asarray(expected))
            assert kernels_of(ours, a, b) == ["where"]
            moving = [i for i, x in enumerate((a, b)) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.inexact)]

            def derivatives(function: Callable[..., Any], *operands: Any, moving: Any = moving) -> Any:
                def squared(*moved: Any) -> Any:
                    arrays = dict(enumerate(operands)) | dict(zip(moving, moved, strict=True))
                    return function(cond, *arrays.values()) ** 2

                primals = [operands[i] for i in moving]
                result, vjp = jax.vjp(squared, *primals)
                return *jax.jvp(squared, primals, primals), *vjp(result)

            of_each = [derivatives(f, jnp.asarray(a), jnp.asarray(b)) for f in (forward_mode.where, jnp.where)]
            for got, want in zip(*of_each, strict=True):
                assert jax.typeof(got) == jax.typeof(want)
                if want.dtype == jax.dtypes.float0:
                    continue
                np.testing.assert_allclose(got, want, rtol=1e-6)


def test_strict_promotion() -> None:
    with jax.numpy_dtype_promotion("strict"):
        assert outcome(where, True, np.float32(1), np.int32(1)) == "refused"
        assert outcome(where, True, np.float32(1), 2) == ((), np.float32, False)


def test_values_are_promoted(rng: np.random.Generator) -> None:
    cond, a, b = make_operands(rng, ((4, 5),) * 3)
    for first, second in ((a, 0), (1, b), (a.astype(np.int8), b), (a > 0, b.astype(np.float16)), (a, 1 + 2j), (2, 3.5)):
        assert_same_bits(where(cond, first, second), np.asarray(jnp.where(cond, first, second)))


@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, *SUB_BYTE])
def test_conditions_of_every_dtype(rng: np.random.Generator, dtype: str) -> None:
    """Conditions are compared with zero. NaN is not zero."""
    values = rng.choice([0.0, 1.0, 0.0, 2.0], (6, 50)).astype(jnp.dtype(dtype))
    if jnp.issubdtype(values.dtype, jnp.inexact) and dtype not in ("float4_e2m1fn",):
        values[0, :9] = np.asarray(np.nan, np.float32).astype(values.dtype)
    a, b = np.float32(3), np.float32(5)
    with cases.x64_for(dtype):
        assert_same_bits(where(values, a, b), np.asarray(jnp.where(values, a, b)))


@pytest.mark.parametrize("cond", [True, False, 0, 2, 0.5, np.bool_(False)])
def test_conditions_that_are_numbers(cond: Any) -> None:
    assert_same_bits(where(cond, np.arange(3), 7), np.asarray(jnp.where(cond, np.arange(3), 7)))


X = np.ones((2, 3), np.float32)

ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: where(X > 0, None, X), "TypeError: where: a must be an array, got NoneType"),
    "string": (lambda: where(X > 0, X, "b"), "TypeError: where: b must be an array, got str"),
    "key": (lambda: where(True, jax.random.key(0), X), "TypeError: where: a must have a numeric dtype, got key"),
    "shapes": (
        lambda: where(X > 0, X[:, :2], 0),
        "ValueError: where: cond, a and b must have shapes that broadcast against each other, got "
        "(2, 3), (2, 2) and ()",
    ),
    "dy of integers": (
        lambda: where_backward(X.astype(int), X > 0),
        "TypeError: where_backward: d_output must have a floating or complex dtype, got int",
    ),
    "d_output that is no array": (
        lambda: where_backward(None, X > 0),
        "TypeError: where_backward: d_output must be an array",
    ),
    "cond that is larger": (
        lambda: where_backward(X[0], X > 0),
        "ValueError: where_backward: cond must broadcast to the shape of d_output, (3,), got (2, 3)",
    ),
    "a_shape": (
        lambda: where_backward(X, X > 0, a_shape=(2, 2)),
        "ValueError: where_backward: a_shape must broadcast to the shape of d_output, (2, 3), got (2, 2)",
    ),
    "b_shape": (
        lambda: where_backward(X, X > 0, b_shape=(1, 2, 3)),
        "ValueError: where_backward: b_shape must broadcast to the shape of d_output, (2, 3), got (1, 2, 3)",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    call, error = ERRORS[case]
    kind, message = error.split(": ", 1)
    with cases.raises(f"{kind}: {re.escape(message)}"):
        call()


# ----------------------------------------------------------------------------------------------------------------------
# Kernels, residuals and zero gradients.


def test_kernels(rng: np.random.Generator) -> None:
    """Value and gradients are one kernel call each. Gradients of operands that are constant are not computed."""
    cond, a, b = make_operands(rng, ((4, 1), (4, 30), (4, 30)))

    def kernels(function: Callable[..., Any], *operands: Any) -> list[str]:
        def run(dy: Any, *operands: Any) -> Any:
            value, vjp = jax.vjp(function, *operands)
            return value, vjp(dy)

        return kernels_of(run, a, *operands)

    assert kernels(lambda a, b: where(cond, a, b), a, b) == ["where", "where_backward"]
    assert kernels(lambda a: where(cond, a, b), a) == ["where", "where"]
    assert kernels(lambda b: where(cond, a, b), b) == ["where", "where"]
    assert kernels(lambda a: where(cond, a, 0), a) == ["where", "where"]
    assert kernels(lambda a: jax.jit(where)(cond, a, b), a) == ["where", "where"]
    assert kernels(lambda row: where(cond, a, row), b[0]) == ["where", "where_backward"]
    _, vjp = jax.vjp(lambda a, b: where(cond, a, b), a, b)
    kept = [x for x in jax.tree.leaves(vjp) if hasattr(x, "shape")]
    assert [x.shape for x in kept] == [cond.shape], "something else than the condition is kept"


def test_zero_cotangent(rng: np.random.Generator) -> None:
    """A result that nothing depends on has gradients of zero."""
    cond, a, b = make_operands(rng, ((4, 5),) * 3)

    def loss(a: Any, b: Any) -> Any:
        return (jax.lax.stop_gradient(where(cond, a, b)) + a).sum()

    da, db = jax.grad(loss, (0, 1))(a, b)
    np.testing.assert_array_equal(da, np.ones_like(a))
    np.testing.assert_array_equal(db, np.zeros_like(b))


def test_integers_have_no_gradient(rng: np.random.Generator) -> None:
    cond, a, b = make_operands(rng, ((4, 5),) * 3)
    a, b = a.astype(np.int32), b.astype(np.int32)
    _, vjp = jax.vjp(functools.partial(where, cond), a, b)
    assert all(x.dtype == jax.dtypes.float0 for x in vjp(np.zeros((4, 5), jax.dtypes.float0)))
    x = a.astype(np.float32)
    # Mixed with an integer, which has none.
    np.testing.assert_array_equal(jax.grad(lambda x: where(cond, x, b).sum())(x), cond.astype(np.float32))


def test_gradient_of_sums_of_16_bits(rng: np.random.Generator) -> None:
    """The gradient of 16-bit sums is right, though the sums are accumulated in a wider dtype."""
    cond, d_output = make_condition(rng, (5, 1)), rng.normal(size=(5, 40)).astype(jnp.bfloat16)
    _, vjp = jax.vjp(lambda d_output: where_backward(d_output, cond, a_shape=(40,), b_shape=()), d_output)
    d_row, d_scalar = rng.normal(size=40).astype(d_output.dtype), np.asarray(2, d_output.dtype)
    assert_same_memory(vjp((d_row, d_scalar))[0], reference(cond, d_row, d_scalar))
    _, vjp = jax.vjp(lambda d_output: where_backward(d_output, cond, a_shape=(), b_shape=()), d_output)
    expected = np.broadcast_to(reference(cond, d_scalar, -d_scalar), (5, 40))
    assert_same_memory(vjp((d_scalar, -d_scalar))[0], expected)
