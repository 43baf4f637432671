"""Properties of segment_max and segment_min alone: ties and their winners, special values."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from segment.reference import ARGMAX, ARGMIN, MAX, MIN, Reduction, value_and_pullback
from support import cases
from support.cases import FLOATING, TIE_BREAKS, Expected, assert_same_bits
from support.kernels import kernels_of
from support.programs import small_integers

import jax_baracuda
from jax_baracuda import unsorted_segment_max_backward

each_extremum = pytest.mark.parametrize("extremum", [MAX, MIN], ids=str)


def flip(extremum: Reduction, data: np.ndarray) -> np.ndarray:
    """The data or, for the minimum, the data with reversed order: minima are then in the places of the maxima."""
    return data if extremum is MAX else cases.order_reversed(data)


# ----------------------------------------------------------------------------------------------------------------------
# Special values.


def tiny_data(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Zeros and subnormal numbers of both signs."""
    magnitudes = rng.integers(0, 5, shape).astype(f"uint{8 * jnp.dtype(dtype).itemsize}").view(jnp.dtype(dtype))
    return np.where(rng.random(shape) < 0.4, -magnitudes, magnitudes)


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("dtype", FLOATING)
@each_extremum
def test_subnormal_numbers(rng: np.random.Generator, extremum: Reduction, dtype: str, implementation: str) -> None:
    """Subnormal numbers are not rounded to zero and do not tie with it, in value, place and derivatives."""
    data = tiny_data(rng, (40, 6), dtype)
    ids = cases.make_ids(rng, 40, 7)
    cotangent = cases.cotangent(rng, (7, 6), dtype)
    tangent = cases.cotangent(rng, (40, 6), dtype)
    is_member = ids == np.arange(7)[:, None]
    with cases.x64_for(dtype):
        for options in extremum.options:
            output, d_data = extremum.pullback(data, ids, 7, cotangent, **options, implementation=implementation)
            extremum.value(data, ids, 7).check(output)
            expected = extremum.gradient(cotangent, data, ids, 7, **options)
            expected = cases.divided_by_xla(expected) if implementation == "xla" else expected
            expected.check(d_data)
            d_data = extremum.call_backward(cotangent, data, ids, 7, **options, implementation=implementation)
            expected.check(d_data, "public gradient")
            shares = cases.shares(flip(extremum, data), ids, 7, options["tie_break"])
            pushed = jax.jvp(
                lambda x, o=options: extremum.in_forward_mode(x, ids, 7, **o, implementation=implementation),
                (data,),
                (tangent,),
            )[1]
            exact = np.tensordot(is_member, shares * tangent.astype(np.float64), 1)
            rounding = 4 * float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(np.asarray(pushed, np.float64), exact, rounding, rounding)
        place = ARGMAX if extremum is MAX else ARGMIN
        place.value(data, ids, 7).check(place(data, ids, 7, implementation=implementation), "place")


NARROW_ROWS = (
    (MAX, "float32", ()),
    (MAX, "bfloat16", (3,)),
    (MIN, "float32", ()),
)


@pytest.mark.parametrize(("extremum", "dtype", "row_shape"), NARROW_ROWS, ids=str)
def test_many_narrow_rows(
    rng: np.random.Generator, extremum: Reduction, dtype: str, row_shape: tuple[int, ...]
) -> None:
    """With many narrow rows, a GPU skips most rows that cannot be a maximum. Results are right."""
    rows, segments = (1 << 24) + 77, 70_000
    ids = rng.integers(-1, segments + 1, rows, dtype=np.int32)
    ids[ids == 17] = 18  # an empty segment
    data = jnp.asarray(rng.normal(size=(rows, *row_shape)).astype(np.float32) * 1000).astype(dtype)
    output = extremum(data, ids, segments)
    wide = np.asarray(data.astype(jnp.float32)) if dtype == "bfloat16" else np.asarray(data)
    is_member = (ids >= 0) & (ids < segments)
    # Dropped rows go to an additional segment. NumPy is fast with one column at a time.
    maxima = np.full((*row_shape, segments + 1), cases.identity(jnp.dtype(wide.dtype)), wide.dtype)
    for feature in np.ndindex(row_shape):
        column = np.ascontiguousarray(flip(extremum, wide)[..., *feature])
        np.maximum.at(maxima[feature], np.where(is_member, ids, segments), column)
    expected = flip(extremum, np.moveaxis(maxima, -1, 0)[:segments])
    np.testing.assert_array_equal(np.asarray(output.astype(wide.dtype)), expected)
    if dtype != "int32":
        d_data = extremum.call_backward(jnp.ones_like(output), data, ids, segments, tie_break="first")
        d_data = np.asarray(d_data.astype(jnp.float32))
        takers = np.nonzero(d_data)  # one row of each cell
        assert is_member[takers[0]].all() and (d_data[takers] == 1).all()
        cells = ids[takers[0]], *takers[1:]
        received = np.zeros_like(expected)
        np.add.at(received, cells, 1)
        np.testing.assert_array_equal(received, np.isfinite(expected))  # each cell's cotangent arrives exactly once
        np.testing.assert_array_equal(wide[takers], expected[cells])


# ----------------------------------------------------------------------------------------------------------------------
# Ties.


@pytest.mark.parametrize("dtype", FLOATING)
@each_extremum
def test_losers_have_no_derivative(rng: np.random.Generator, extremum: Reduction, dtype: str) -> None:
    """A cotangent that is not finite reaches only the winners. In JAX's own gradient, the losers get NaN. Tangents of
    losers that are not finite reach nothing."""
    data, ids = cases.make_data(rng, (60, 4), dtype, "ties"), cases.make_ids(rng, 60, 5)
    for bad, tie_break in itertools.product((np.nan, np.inf, -np.inf), TIE_BREAKS):
        shares, cotangent = cases.shares(data, ids, 5, tie_break), np.full((5, 4), bad, jnp.dtype(dtype))
        of_winners = np.where(shares > 0, small_integers(rng, data.shape, dtype), 0)
        tangent = np.where(shares > 0, of_winners, bad).astype(data.dtype)
        twin = functools.partial(extremum.in_forward_mode, tie_break=tie_break)
        assert (shares > 0).any() and not (shares > 0).all()
        terms = shares * of_winners.astype(np.float64)
        expected = Expected(cases.segment_sum(terms, ids, 5), dtype, cases.sum_error(terms, ids, 5, dtype))
        with cases.x64_for(dtype):
            _, d_data = extremum.pullback(flip(extremum, data), ids, 5, cotangent, tie_break=tie_break)
            assert_same_bits(d_data, np.where(shares > 0, bad, 0).astype(data.dtype))
            _, pushed = jax.jvp(lambda x, f=twin: f(x, ids, 5), (flip(extremum, data),), (tangent,))
            gradient = functools.partial(extremum.call_backward, tie_break=tie_break)
            _, pullback = jax.vjp(lambda d, f=gradient: f(d, flip(extremum, data), ids, 5), np.ones_like(cotangent))
            [pulled] = pullback(jnp.asarray(tangent))
        expected.check(pushed, f"tangent {bad} {tie_break}")
        expected.check(pulled, f"gradient of the gradient {bad} {tie_break}")


@pytest.mark.parametrize("dtype", FLOATING)
@each_extremum
def test_many_ties(extremum: Reduction, dtype: str) -> None:
    """The number of ties is an exact integer, also if the dtype cannot hold it."""
    for count in (2, 3, 256, 257, 2049, 70_001):
        data = np.full((count + 2, 2), 5, jnp.dtype(dtype))
        data[0] = data[-1] = 4
        d_output = np.array([[30.0, -7.0]], data.dtype)
        ids = np.zeros(count + 2, np.int32)
        with cases.x64_for(dtype):
            d_data = extremum.call_backward(d_output, flip(extremum, data), ids, 1, tie_break="split")
        expected = np.broadcast_to((d_output.astype(np.float64) / count).astype(data.dtype), data.shape).copy()
        expected[0] = expected[-1] = 0
        assert_same_bits(d_data, expected)


@pytest.mark.parametrize("dtype", FLOATING)
@each_extremum
def test_ties_by_hand(extremum: Reduction, dtype: str) -> None:
    """-0 and +0 tie. -inf ties with the identity. NaN passes no gradient. "first" takes the lowest row."""
    data = np.array([-0.0, 0.0, -np.inf, -np.inf, -np.inf, np.nan, 7, 3, 3, 1], jnp.dtype(dtype))
    ids = np.array([0, 0, 1, 2, 2, 3, 3, 4, 4, 4])
    ones = np.ones(6, data.dtype)
    third = data.dtype.type(1 / 3)
    data = flip(extremum, data)
    with cases.x64_for(dtype):
        split = extremum.call_backward(ones, data, ids, 6, tie_break="split")
        first = [extremum.call_backward(ones, data, ids, 6, tie_break="first")]
        if extremum is MAX:
            first.append(unsorted_segment_max_backward(ones, data, ids))
    assert_same_bits(split, np.array([0.5, 0.5, 0.5, third, third, 0, 0, 0.5, 0.5, 0], data.dtype))
    for gradient in first:
        assert_same_bits(gradient, np.array([1, 0, 1, 1, 0, 0, 0, 1, 0, 0], data.dtype))


@pytest.mark.parametrize("unit", [1, np.finfo(np.float32).smallest_subnormal], ids=["normal", "subnormal"])
@pytest.mark.parametrize("bucket_size", [1, 7, 40, 64])
@each_extremum
def test_bucket_size_gradient(rng: np.random.Generator, extremum: Reduction, bucket_size: int, unit: float) -> None:
    """Tied buckets share the gradient first, then the rows within them, as in jax.ops. "first" ignores buckets."""
    rows, segments = 40, 3
    data = rng.integers(0, 3, (rows, 4)).astype(np.float32) * np.float32(unit)
    ids = cases.make_ids(rng, rows, segments)
    d_output = cases.cotangent(rng, (segments, 4), "float32")
    buckets = [slice(i, i + bucket_size) for i in range(0, rows, bucket_size)]
    maxima = np.stack([cases.reference_max(data[b], ids[b], segments) for b in buckets])
    num_tied_buckets = (maxima == maxima.max(axis=0)).sum(axis=0)
    expected = np.concatenate(
        [
            cases.reference_max_gradient(
                np.where(maxima[k] == maxima.max(axis=0), d_output / num_tied_buckets, 0).astype(np.float64),
                data[b].astype(np.float64),
                ids[b],
                "split",
            )
            for k, b in enumerate(buckets)
        ]
    )
    first_expected = cases.reference_max_gradient(d_output, data, ids, "first")
    data = jnp.asarray(flip(extremum, data))
    options = {"bucket_size": bucket_size}
    output, ours = extremum.pullback(data, ids, segments, d_output, **options)
    extremum.value(np.asarray(data), ids, segments).check(output)
    by_jax = functools.partial(extremum.by_jax, segment_ids=ids, num_segments=segments, **options)
    expected_by_jax = jax.jit(lambda x: value_and_pullback(by_jax, x, d_output)[1])(data)
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(ours, expected, rtol=2 * eps, atol=0)  # two divisions, and JAX's product by a quotient
    if unit == 1:  # on CPUs, JAX treats subnormal numbers as zeros
        np.testing.assert_allclose(ours, expected_by_jax, rtol=3 * eps, atol=0)
    _, first = extremum.pullback(data, ids, segments, d_output, tie_break="first", **options)
    assert_same_bits(first, first_expected)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "complex64"])
@each_extremum
def test_gradient_of_dtypes_without_kernel(rng: np.random.Generator, extremum: Reduction, dtype: str) -> None:
    """The gradient equals that of jax.ops. Ties of 1, 2 or 4 rows make it exact."""
    if not hasattr(jnp, dtype):
        pytest.skip(f"this version of JAX has no {dtype}")
    values = rng.integers(-2, 2, (3, 2)) + (1j * rng.integers(-2, 2, (3, 2)) if "complex" in dtype else 0)
    rows = np.repeat(values, (1, 2, 4), axis=0).astype(jnp.dtype(dtype))
    ids = np.array([0, 1, 1, 2, 2, 2, 2])
    with cases.x64_for("float64" if dtype == "complex128" else dtype):
        rows = jnp.asarray(rows)
        ones = jnp.ones((3, 2), rows.dtype)
        by_jax = functools.partial(extremum.by_jax, segment_ids=ids, num_segments=3)
        expected_output, expected = value_and_pullback(by_jax, rows, ones)
        has_nan = np.isnan(np.asarray(expected_output).astype(np.complex64)).any()  # dtypes without infinities
        for tie_break in TIE_BREAKS:
            output, gradient = extremum.pullback(rows, ids, 3, ones, tie_break=tie_break)
            backward = extremum.call_backward(ones, rows, ids, 3, tie_break=tie_break)
            assert_same_bits(output, np.asarray(expected_output))
            if tie_break == "split":
                assert_same_bits(gradient, np.asarray(expected))
            elif not has_nan:
                first = np.zeros((7, 2))
                first[[0, 1, 3]] = 1
                assert_same_bits(gradient, first.astype(rows.dtype))
            assert_same_bits(backward, np.asarray(gradient))


@each_extremum
def test_backward_with_broadcast_data(rng: np.random.Generator, extremum: Reduction) -> None:
    """The cotangent of data that broadcast over the ids is summed to the shape of the data."""
    data, ids = rng.normal(size=(1, 3)).astype(np.float32), np.array([0, 2, 2, 2, 2])
    d_output = rng.integers(1, 9, (3, 3)).astype(np.float32)
    for options in extremum.options:
        d_data = extremum.call_backward(d_output, data, ids, 3, **options)
        # All rows are equal. Each segment's cotangent goes to one row, or in quarters to four, and the sum restores it.
        assert_same_bits(d_data, (d_output[0] + d_output[2])[None])


@pytest.mark.parametrize("tie_break", ["last", None, True])
@each_extremum
def test_unknown_tie_break(extremum: Reduction, tie_break: Any) -> None:
    data, ids, cells = np.ones((4, 2), np.float32), np.array([0, 1, 1, 0]), np.ones((2, 2), np.float32)
    message = f"tie_break must be 'split' or 'first', got {tie_break!r}"
    with pytest.raises(ValueError, match=f"{extremum.name}: {message}"):
        extremum(data, ids, 2, tie_break=tie_break)
    with pytest.raises(ValueError, match=f"{extremum.name}_backward: {message}"):
        extremum.call_backward(cells, data, ids, 2, tie_break=tie_break)


def test_unsorted_backward_names_itself() -> None:
    with pytest.raises(ValueError, match="segment_max_backward: data must have one row per id"):
        unsorted_segment_max_backward(np.ones((2, 2), np.float32), np.ones((3, 2), np.float32), np.arange(4))


@pytest.mark.parametrize(("size", "mapped"), [(3, "both"), (3, "data"), (2, "ids")])
@each_extremum
def test_gradient_of_a_large_batch(rng: np.random.Generator, extremum: Reduction, size: int, mapped: str) -> None:
    """A GPU sorts the rows of the whole batch together."""
    rows, segments = (100_000, 5000) if cases.PLATFORM == "cuda" else (2000, 100)
    data = rng.integers(-20, 20, (size, rows, 32)).astype(np.float32)
    ids = rng.integers(-segments // 9, segments + segments // 9, (size, rows), dtype=np.int32)
    d_output = rng.normal(size=(segments, 32)).astype(np.float32)
    axes = (0 if mapped != "ids" else None, 0 if mapped != "data" else None)
    operands = [x if axis == 0 else x[0] for x, axis in zip((data, ids), axes, strict=True)]
    loss = lambda x, i: (d_output * extremum(x, i, segments)).sum()  # noqa: E731
    d_data = jax.jit(jax.vmap(jax.grad(loss), axes))(*operands)
    for k in range(size):
        element = [x[k] if axis == 0 else x for x, axis in zip(operands, axes, strict=True)]
        extremum.gradient(d_output, *element, segments, tie_break="split").check(d_data[k], f"element {k}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_shares_that_are_subnormal(dtype: str) -> None:
    """Subnormal shares are rounded once, and to even if the quotient is halfway between two numbers."""
    bits = np.arange(1, 3 << (jnp.finfo(dtype).nmant + 1), dtype=np.uint16)
    cotangent = bits.view(jnp.dtype(dtype))[None]
    for members in (2, 3, 4, 6, 8, 64):
        data, ids = np.ones((members, len(bits)), cotangent.dtype), np.zeros(members, np.int32)
        expected = MAX.gradient(cotangent, data, ids, 1, tie_break="split")
        expected.check(MAX.call_backward(cotangent, data, ids, 1, tie_break="split"), f"{members} members")


@each_extremum
def test_winners_that_no_one_uses(rng: np.random.Generator, extremum: Reduction) -> None:
    """A softmax subtracts extrema that it does not differentiate: then no kernel looks for winners."""
    data, ids = rng.standard_normal((40, 3)).astype(np.float32), rng.integers(0, 5, 40)
    extremum_of_segments = getattr(jax_baracuda, extremum.name)

    def shifted(data: jax.Array, is_constant: bool) -> jax.Array:
        extrema = extremum_of_segments(data, ids, 5)
        return jnp.sum(jnp.exp(data - (jax.lax.stop_gradient(extrema) if is_constant else extrema)[ids]))

    def gradient(data: jax.Array, is_constant: bool = True) -> jax.Array:
        return jax.grad(shifted)(data, is_constant)

    def in_a_loop(data: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x - gradient(x), None), data, None, length=2)[0]

    with jax_baracuda.implementation("kernel"):
        assert f"{extremum.name}_with_winner" in kernels_of(lambda data: gradient(data, is_constant=False), data)
        assert kernels_of(gradient, data) == kernels_of(in_a_loop, data) == [extremum.name]
        assert kernels_of(jax.vmap(gradient), data[None]) == [extremum.name]
