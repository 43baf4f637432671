"""Rotary embeddings and their gradients: values, precision, memory, errors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rope.reference import (
    FAR,
    LAYOUTS,
    PAIRINGS,
    ExpectedRotation,
    Rotation,
    features_shape,
    in_two_rows,
    make_features,
)
from support import cases
from support.cases import FLOATING, INTEGERS, assert_same_bits
from support.kernels import Batch, kernels_of
from support.programs import copies_of

import jax_baracuda as jb
from jax_baracuda import forward_mode, rope, rope_backward, rope_frequencies, rope_qk, rope_qk_backward

each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_pairing = pytest.mark.parametrize("interleaved", PAIRINGS, ids=["interleaved", "half-split"])
each_dtype = pytest.mark.parametrize("dtype", FLOATING)

SIZES = (
    (2, 3, 17, 20),
    (3, 2, 8, 64),
    (1, 5, 33, 12),
    (2, 1, 130, 8),
    (0, 2, 3, 4),
    (2, 0, 3, 4),
    (2, 2, 0, 4),
    (1, 1, 1, 2),
    (5, 3, 1, 64),
    (3, 1, 7, 6),
    (2, 5, 33, 10),
    (1, 2, 1025, 16),
    (2, 9, 4, 128),
    (1, 3, 21, 256),
    (33, 4, 1, 32),
    (2, 2, 5, 518),
    (70, 1, 1, 32),
)
"""(B, H, S, D): empty, decoding, one head, few and many features, multiples of a vector's size and others. They are an
odd number, so that in turns each meets both pairings."""


def make_positions(rng: np.random.Generator, kind: int, examples: int, length: int) -> np.ndarray | None:
    """Positions of each kind: None, ``[S]``, ``[B, S]`` or ``[1, S]``."""
    shape = (None, (length,), (examples, length), (1, length))[kind % 4]
    return None if shape is None else rng.integers(-FAR, FAR, shape, endpoint=True).astype(np.int32)


def make_sections(rng: np.random.Generator, num_pairs: int, count: int) -> tuple[int, ...]:
    """Numbers of pairs with this sum. Some may be 0."""
    ends = np.sort(rng.integers(0, num_pairs + 1, count - 1))
    return tuple(np.diff([0, *ends, num_pairs]).tolist())


def make_rotation(
    rng: np.random.Generator, variant: int, size: tuple[int, int, int, int], layout: str, interleaved: bool
) -> Rotation:
    """Arguments chosen by the number `variant`."""
    examples, _, length, num_features = size
    rotary_dim = (None, None, max(2, num_features // 4 * 2), num_features)[variant // 3 % 4]
    num_rotated = num_features if rotary_dim is None else rotary_dim
    # Rotated features stand first, last, or between others.
    rotary_offset = int(rng.integers(0, num_features - num_rotated + 1)) if variant % 2 else num_features - num_rotated
    num_pairs = num_rotated // 2
    positions, sections = make_positions(rng, variant, examples, length), None
    if positions is not None and variant % 3 == 1:
        sections = make_sections(rng, num_pairs, 2 + variant % 3)
        rows = [make_positions(rng, variant, examples, length) for _ in sections]
        positions = np.stack([x for x in rows if x is not None])
    return Rotation(
        positions,
        base=(10000.0, 500000.0, 13.0)[variant % 3],
        interleaved=interleaved,
        layout=layout,
        rotary_dim=rotary_dim,
        rotary_offset=rotary_offset,
        sections=sections,
        sections_interleaved=variant // 2 % 2 == 1,
        inv_freq=rng.uniform(0, 1.5, num_pairs) if variant % 5 == 4 else None,
        scale=(1.0, 1.0, 0.75, -1.5)[variant // 2 % 4],
    )


def value_and_pullback(
    function: Callable[..., Any], rotation: Rotation, features: tuple[Any, ...], cotangents: tuple[Any, ...], pos: Any
) -> tuple[Any, Any]:
    """Outputs and gradients, as tuples of one or two arrays."""

    def call(*features: Any) -> tuple[Any, ...]:
        outputs = function(*features, pos, **rotation.options())
        return outputs if isinstance(outputs, tuple) else (outputs,)

    outputs, vjp = jax.vjp(call, *features)
    return outputs, vjp(cotangents)


def add_call(
    batch: Batch, rng: np.random.Generator, rotation: Rotation, size: tuple[int, int, int, int], heads: Any, dtype: Any
) -> None:
    """Adds a call and its gradient: of `rope` for one number of heads, of `rope_qk` for two."""
    examples, _, length, num_features = size
    shapes = [features_shape(rotation.layout, examples, h, length, num_features) for h in heads]
    features, cotangents = (tuple(make_features(rng, shape, dtype) for shape in shapes) for _ in range(2))

    def check(outputs: Any, gradients: Any) -> None:
        for direction, inputs, results in ((1, features, outputs), (-1, cotangents, gradients)):
            for x, result in zip(inputs, results, strict=True):
                rotation.of(x, direction).check(result, f"{size} {heads} {dtype} {rotation} direction {direction}")
                assert not result.weak_type

    function = rope if len(heads) == 1 else rope_qk
    call = functools.partial(value_and_pullback, function, rotation)
    batch.add(call, (features, cotangents, rotation.positions), check)


# ----------------------------------------------------------------------------------------------------------------------
# Values and gradients.


@each_layout
@each_dtype
def test_value_and_gradient(rng: np.random.Generator, dtype: str, layout: str) -> None:
    """Both functions are right for both pairings, every kind of positions and size, and varying other arguments; then
    for random small sizes."""
    batch = Batch()
    sizes = itertools.cycle(SIZES)
    calls = [
        (next(sizes), variant, interleaved, 1 + variant % 3)
        for variant, interleaved in itertools.product(range(len(SIZES)), PAIRINGS)
    ]
    for _ in range(5):
        *others, num_pairs, variant, other_heads = rng.integers((0, 0, 0, 1, 0, 0), (4, 6, 41, 41, 60, 4)).tolist()
        calls.append(((*others, 2 * num_pairs), variant, bool(rng.random() < 0.5), other_heads))
    for size, variant, interleaved, other_heads in calls:
        rotation = make_rotation(rng, variant, size, layout, interleaved)
        add_call(batch, rng, rotation, size, (size[1],), dtype)
        add_call(batch, rng, rotation, size, (size[1], other_heads), dtype)
    with cases.x64_for(dtype):
        called = batch.run()
    assert called.keys() == {"rope", "rope_backward", "rope_qk", "rope_qk_backward"}


@each_layout
@each_dtype
def test_plain_jax_with_constant_angles(rng: np.random.Generator, dtype: str, layout: str) -> None:
    """Without positions, plain JAX uses constant tables, which are as exact as kernels."""
    with cases.x64_for(dtype), jb.implementation("xla"):
        for variant, interleaved in itertools.product(range(0, 12, 2), PAIRINGS):
            size = (2, 3, 17, 20)
            rotation = make_rotation(rng, variant, size, layout, interleaved)
            rotation = dataclasses.replace(rotation, positions=None, sections=None)
            shape = features_shape(layout, 2, 3, 17, 20)
            x, cotangent = (make_features(rng, shape, dtype) for _ in range(2))
            call = functools.partial(value_and_pullback, rope, rotation)
            program = jax.jit(lambda x, cotangent, call=call: call((x,), (cotangent,), None))
            assert "cosine" not in program.lower(x, cotangent).as_text()
            [[output], [gradient]] = program(x, cotangent)
            rotation.of(x).check(output, f"{rotation}")
            rotation.of(cotangent, -1).check(gradient, f"{rotation} backward")


@each_pairing
def test_rotations_share_one_table(interleaved: bool) -> None:
    """The rotations of a program share one table of sines and one of cosines, before and after XLA compiles it."""
    x = jnp.ones((2, 3, 64, 32))

    def rotate_often(x: Any) -> Any:
        for _ in range(3):
            x = rope(x + 1, interleaved=interleaved, scale=0.5)
        return rope_qk(x, 2 * x, interleaved=interleaved, scale=0.5)[1]

    def loss(x: Any) -> Any:
        return (jax.jit(rotate_often)(x) ** 2).sum() + (rotate_often(-x) ** 2).sum()

    def loss_of_both(x: Any) -> Any:
        return loss(x) + jax.vmap(loss)(jnp.stack([x, 2 * x])).sum()

    with jb.implementation("xla"):
        assert jax.jit(jax.value_and_grad(loss)).lower(x).as_text().count('dense<"0x') == 2  # literals of many numbers
        lowered = jax.jit(jax.value_and_grad(loss_of_both)).lower(x)
    assert len(re.findall(r"= f32\[\d[\d,]*\]\S* constant\(", lowered.compile().as_text())) == 2


def test_tables_are_told_apart_by_their_contents() -> None:
    """The names of programs, also in caches, distinguish different tables of equal checksum."""
    inv_freq = np.ones(4)
    polynomial = int(f"{0x104C11DB7:b}"[::-1], 2)  # CRC-32 misses a difference by its polynomial
    other = (inv_freq.view(np.uint64) ^ np.array([polynomial, 0, 0, 0], np.uint64)).view(np.float64)
    assert zlib.crc32(inv_freq) == zlib.crc32(other) and (inv_freq != other).any()
    x = jnp.ones((1, 2, 8, 8))
    jaxprs = {str(jax.make_jaxpr(functools.partial(rope, inv_freq=f))(x)) for f in (inv_freq, other, inv_freq.copy())}
    assert len(jaxprs) == 2


def test_which_angles_are_constant() -> None:
    def has_constant_angles(length: int, *positions: Any, **options: Any) -> bool:
        x = jax.ShapeDtypeStruct((1, 2, length, 128), np.float32)
        return "constant_angles=ConstantAngles" in str(
            jax.make_jaxpr(functools.partial(rope, **options))(x, *positions)
        )

    assert has_constant_angles(16384)
    assert has_constant_angles(8, inv_freq=np.ones(64))
    assert not has_constant_angles(16385)  # more than 8 MB
    assert not has_constant_angles(8, np.arange(8))
    assert not has_constant_angles(8, inv_freq=jnp.ones((2, 64)))


@each_layout
@each_dtype
def test_many_rows(rng: np.random.Generator, dtype: str, layout: str) -> None:
    """The GPU's strategy for many rows is right: in vectors and in single pairs, with every kind of positions."""
    batch, length = Batch(), 3011 if cases.PLATFORM == "cuda" else 301
    for (kind, features), interleaved in itertools.product(enumerate((16, 14, 16, 14)), PAIRINGS):
        positions, sections = make_positions(rng, kind, 6, length), None
        if kind == 2:
            sections = (1, 2, 1)
            positions = np.stack([make_positions(rng, kind, 6, length) for _ in sections])
        rotation = Rotation(
            positions,
            interleaved=interleaved,
            layout=layout,
            rotary_dim=(8, 10)[kind % 2],
            rotary_offset=(0, 3, 8, 4)[kind],
            sections=sections,
        )
        add_call(batch, rng, rotation, (6, 8, length, features), (8, 2)[: 1 + kind // 2], dtype)
    with cases.x64_for(dtype):
        batch.run()


def as_in_gpt_j(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """Rotates x ``[B, H, S, D]`` by positions ``[B, S]``, with repeated angles and swapped neighbours."""
    size = x.shape[-1]
    angles = np.repeat(positions[:, None, :, None] * (1.0 / base ** (np.arange(0, size, 2) / size)), 2, axis=-1)
    swapped = np.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)
    return x * np.cos(angles) + swapped * np.sin(angles)


def test_formulations_of_multimodal_models(rng: np.random.Generator) -> None:
    """M-RoPE splits the angles of three positions by contiguous sections, or by every third pair. MLA rotates the last
    features, with neighbours as pairs."""
    x = rng.normal(size=(2, 3, 9, 16)).astype(np.float32)
    positions = rng.integers(0, 5000, (3, 2, 9))
    angles = positions[..., None] / 10000.0 ** (np.arange(0, 16, 2) / 16)
    contiguous = np.concatenate(
        [
            part[i % 3]
            for i, part in enumerate(np.split(np.concatenate([angles] * 2, axis=-1), [2, 5, 8, 10, 13], axis=-1))
        ],
        axis=-1,
    )
    in_turns = angles[0].copy()
    for axis, size in ((1, 2), (2, 2)):
        in_turns[..., axis : 3 * size : 3] = angles[axis][..., axis : 3 * size : 3]
    for sections, interleaved, expected in (
        ((2, 3, 3), False, contiguous),
        ((4, 2, 2), True, np.concatenate([in_turns] * 2, axis=-1)),
    ):
        swapped = np.concatenate([-x[..., 8:], x[..., :8]], axis=-1).astype(np.float64)
        turned = x * np.cos(expected[:, None]) + swapped * np.sin(expected[:, None])
        result = rope(x, positions, interleaved=False, sections=sections, sections_interleaved=interleaved)
        np.testing.assert_allclose(result, turned, rtol=0, atol=2e-6)
    nope, pe = np.split(x, [10], axis=-1)
    result = rope(x, positions[0], rotary_offset=10)
    np.testing.assert_array_equal(result[..., :10], nope)
    expected = as_in_gpt_j(pe.astype(np.float64), positions[0], 10000.0)
    np.testing.assert_allclose(result[..., 10:], expected, rtol=0, atol=2e-6)


@each_layout
@each_dtype
def test_rope_qk_equals_two_ropes(rng: np.random.Generator, dtype: str, layout: str) -> None:
    """rope_qk gives the bits of rope, for any numbers of heads."""
    for heads in ((4, 1), (1, 1), (3, 5), (6, 2)):
        q, k = (make_features(rng, features_shape(layout, 2, h, 19, 32), dtype) for h in heads)
        positions = make_positions(rng, 2, 2, 19)
        for interleaved in PAIRINGS:
            options = {"interleaved": interleaved, "layout": layout, "rotary_dim": 24}
            with cases.x64_for(dtype):
                both = rope_qk(q, k, positions, **options)
                alone = [rope(x, positions, **options) for x in (q, k)]
            for got, want in zip(both, alone, strict=True):
                assert_same_bits(got, np.asarray(want))


def test_float8_runs_as_plain_jax(rng: np.random.Generator) -> None:
    """A dtype without kernels runs as plain JAX."""
    x = make_features(rng, (2, 3, 9, 8), "float8_e4m3fn")
    positions = make_positions(rng, 2, 2, 9)
    for interleaved in PAIRINGS:
        rotation = Rotation(positions, interleaved=interleaved, rotary_dim=6)
        call = jax.jit(lambda x, rotation=rotation: rope(x, positions, **rotation.options()))
        assert kernels_of(call, x) == []
        y = call(x)
        assert y.dtype == x.dtype
        expected = rotation.of(x).exact.astype(np.float64)
        error = np.abs(np.asarray(y).astype(np.float64) - expected)
        assert (error <= 0.07 * np.abs(expected) + 2e-3).all()


def test_kernels(rng: np.random.Generator) -> None:
    """Each function is one kernel call, and so is each derivative. Features are not residuals."""
    q, k = make_features(rng, (2, 4, 50, 8), "float32"), make_features(rng, (2, 1, 50, 8), "float32")

    def both(q: Any, k: Any) -> Any:
        return rope_qk(q, k)

    def gradient(x: Any, power: int = 3) -> Any:
        return jax.grad(lambda x: (rope(x) ** power).sum())(x)

    assert kernels_of(rope, q) == ["rope"]
    assert kernels_of(both, q, k) == ["rope_qk"]
    assert kernels_of(rope_backward, q) == ["rope_backward"]
    assert kernels_of(gradient, q) == ["rope", "rope_backward"]
    of_both = jax.grad(lambda q, k: sum((x**2).sum() for x in both(q, k)), argnums=(0, 1))
    assert kernels_of(of_both, q, k) == ["rope_qk", "rope_qk_backward"]
    twice = jax.grad(lambda x: (gradient(x) ** 2).sum())
    assert kernels_of(twice, q) == ["rope", "rope_backward"] * 2
    tangent = functools.partial(jax.jvp, forward_mode.rope)
    assert kernels_of(lambda x: tangent((x,), (x + 1,)), q) == ["rope", "rope"]
    _, vjp = jax.vjp(lambda q, k: rope_qk(q, k), q, k)
    assert all(x.size < k.size for x in jax.tree.leaves(vjp) if hasattr(x, "shape"))


# ----------------------------------------------------------------------------------------------------------------------
# Precision.


def far_positions(rng: np.random.Generator, count: int) -> np.ndarray:
    """The first positions, the last ones up to 2^20, and random ones between."""
    some = rng.integers(0, FAR, count, endpoint=True)
    some[:20], some[-20:] = np.arange(20), FAR - np.arange(20)
    return some.astype(np.int32)


def units_off(expected: ExpectedRotation, actual: Any) -> np.ndarray:
    """The errors of the rotated features, in units in the last place of their pairs' lengths."""
    rotary_dim = expected.rotated.shape[-1]
    error = np.abs(np.asarray(actual)[..., :rotary_dim].astype(np.longdouble) - expected.rotated)
    return (error / expected.units()).astype(np.float64)


@each_pairing
@each_dtype
def test_precision_to_a_million_positions(rng: np.random.Generator, dtype: str, interleaved: bool) -> None:
    """float32 is within 2 units of the pair's length. For 16 bits, at least 99% of results are correctly rounded."""
    functions = ((rope, 1), (rope_backward, -1), (lambda x, *args, **kw: rope_qk(x[:, :1], x, *args, **kw)[1], 1))
    for base, rotary_dim in ((10000.0, 128), (500000.0, 64)):
        rotation = Rotation(far_positions(rng, 700), base, interleaved, rotary_dim=rotary_dim)
        # Pairs of numbers of similar size, and of very different sizes.
        sizes = rng.choice([1, 1, 1, 1000], (1, 2, 700, 128))
        x = (rng.normal(size=sizes.shape) * sizes).astype(jnp.dtype(dtype))
        for function, direction in functions:
            with cases.x64_for(dtype):
                y = function(x, rotation.positions, **rotation.options())
            expected = rotation.of(x, direction)
            expected.check(y)
            if dtype == "float32":
                assert units_off(expected, y).max() <= 2
            if jnp.dtype(dtype).itemsize == 2:
                right = np.asarray(y)[..., :rotary_dim] == expected.rotated.astype(np.float64).astype(x.dtype)
                assert right.mean() >= 0.99, f"{right.mean():.4f}"


@each_pairing
@each_dtype
def test_precision_beyond_a_million_positions(rng: np.random.Generator, dtype: str, interleaved: bool) -> None:
    """Results are right up to the ends of int32, with frequencies that float32 represents exactly."""
    ends = np.array([-(2**31), 2**31 - 1, -(2**31) + 1, 2**30, -(2**24) - 1, 2**24 + 1])
    positions = np.concatenate([ends, rng.integers(-(2**31), 2**31, 300)]).astype(np.int32)
    inv_freq = rng.uniform(0, 1, 32).astype(np.float32)
    inv_freq[:5] = 1, 0.5, 2.0**-30, 0, np.nextafter(np.float32(1), np.float32(0))
    rotation = Rotation(positions, interleaved=interleaved, inv_freq=inv_freq.astype(np.float64))
    x = make_features(rng, (1, 2, len(positions), 64), dtype)
    with cases.x64_for(dtype):
        y = rope(x, positions, **rotation.options())
    rotation.of(x).check(y)


def test_precision_of_long_positions(rng: np.random.Generator) -> None:
    """Positions beyond int32 are exact if float64 represents them. Others still give a rotation by some angle."""
    positions = np.array([2**32, 2**32 + 1, -(2**33) - 7, 2**40 + 12345, 2**52 + 1])
    rotation = Rotation(positions, inv_freq=np.array([1.0, 0.25, 2.0**-20, 2.0**-40]))
    extreme = np.array([2**63 - 1, -(2**63), 2**62, -(2**55), 0])
    with jax.enable_x64(True):
        for dtype in ("float32", "float64"):
            x = make_features(rng, (1, 3, 5, 8), dtype)
            rotation.of(x).check(rope(x, positions, **rotation.options()))
            y = np.asarray(rope(x, extreme))
            lengths = np.hypot(x[..., ::2], x[..., 1::2])
            np.testing.assert_allclose(np.hypot(y[..., ::2], y[..., 1::2]), lengths, rtol=1e-6)


@each_dtype
def test_frequencies_of_every_kind(rng: np.random.Generator, dtype: str) -> None:
    """NumPy frequencies keep their full precision, whatever x64 is. So do sums of two rows, even traced ones."""
    x, positions = make_features(rng, (1, 2, 50, 16), dtype), far_positions(rng, 50)
    inv_freq = rng.uniform(0, 1, 8)
    narrow, half = inv_freq.astype(np.float32), inv_freq.astype(np.float16)
    rows = np.stack([narrow, (inv_freq - narrow).astype(np.float32)])
    with cases.x64_for(dtype):
        for given, counts in (
            (inv_freq, inv_freq),
            (narrow.astype(np.float64), narrow),
            (in_two_rows(narrow), narrow),
            (rows, rows.astype(np.float64).sum(axis=0)),
            (jnp.asarray(rows), rows.astype(np.float64).sum(axis=0)),
            (in_two_rows(half), half),
            (in_two_rows(jnp.asarray(half, jnp.bfloat16)), np.asarray(jnp.asarray(half, jnp.bfloat16))),
            (np.arange(8) % 2, np.arange(8) % 2),
            (jnp.arange(8) % 2, np.arange(8) % 2),
        ):
            expected = Rotation(positions, inv_freq=counts.astype(np.float64)).of(x)
            expected.check(rope(x, positions, inv_freq=given), f"{given!r}")
            if isinstance(given, jax.Array):
                traced = jax.jit(lambda x, f: rope(x, positions, inv_freq=f))(x, given)
                expected.check(traced, f"{given!r} traced")


def test_frequencies_of_64_bits_of_jax(rng: np.random.Generator) -> None:
    """With 64-bit types on, JAX frequencies keep their full precision for features of fewer bits, too."""
    x, positions, inv_freq = make_features(rng, (1, 2, 50, 16), "float32"), far_positions(rng, 50), rng.uniform(0, 1, 8)
    with jax.enable_x64(True):
        y = jax.jit(lambda x, f: rope(x, positions, inv_freq=f))(x, inv_freq)
    Rotation(positions, inv_freq=inv_freq).of(x).check(y)


def test_scaled_frequencies(rng: np.random.Generator) -> None:
    """The results of rope_frequencies are valid arguments of rope."""
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.5,
    }
    inv_freq, scale = rope_frequencies(64, 10000.0, scaling)
    assert scale > 1 and inv_freq.shape == (16,)
    x = make_features(rng, (2, 3, 20, 64), "bfloat16")
    options = {"inv_freq": inv_freq, "scale": scale, "rotary_dim": 2 * len(inv_freq)}
    Rotation(**options).of(x).check(rope(x, **options))


def test_inv_freq_is_a_constant(rng: np.random.Generator) -> None:
    x, inv_freq = make_features(rng, (1, 2, 5, 8), "float32"), rng.uniform(0, 1, 4).astype(np.float32)
    inv_freq = in_two_rows(inv_freq)
    for function in (rope, forward_mode.rope):
        gradient = jax.grad(lambda f, function=function: (function(x, inv_freq=f) ** 3).sum())(inv_freq)
        assert_same_bits(gradient, np.zeros((2, 4), np.float32))


@pytest.mark.parametrize("positions_dtype", [*INTEGERS, "int4"])
def test_positions_of_every_dtype(rng: np.random.Generator, positions_dtype: str) -> None:
    info = jnp.iinfo(positions_dtype)
    values = rng.integers(max(int(info.min), -FAR), min(int(info.max), FAR), (2, 30), endpoint=True)
    x = make_features(rng, (2, 3, 30, 8), "float32")
    with cases.x64_for(positions_dtype):
        y = rope(x, values.astype(jnp.dtype(positions_dtype)))
    Rotation(values).of(x).check(y)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize(
    ("positions_dtype", "x64"), [("uint32", False), ("uint32", True), ("uint64", True), ("int64", True)]
)
def test_positions_beyond_int32(rng: np.random.Generator, positions_dtype: str, x64: bool, implementation: Any) -> None:
    """Positions are exact in every function and derivative, up to the maximum of their dtype."""
    last = np.iinfo(positions_dtype).max
    some = [2**31 - 1, 2**31, 2**31 + 12345, 2**32 - 1, min(2**40 + 7, last), min(2**52 + 1, last), last, 0]
    positions = np.array(some, positions_dtype)
    rotation = Rotation(positions, inv_freq=2.0 ** -np.array([0, 20, 32, 63]))
    q, k = (make_features(rng, (1, heads, 8, 8), "float32") for heads in (3, 2))
    options = {**rotation.options(), "implementation": implementation}
    with jax.enable_x64(x64):

        @jax.jit
        def program(q: Any, k: Any, positions: Any) -> list[Any]:
            forward = functools.partial(rope_qk, positions=positions, **options)
            _, pull_back = jax.vjp(lambda q, k: (*forward(q, k), rope(q, positions, **options)), q, k)
            dq, dk = pull_back((jnp.zeros_like(q), k, q))
            twin = functools.partial(forward_mode.rope, positions=positions, **options)
            rotated, tangent = jax.jvp(twin, (q,), (2 * q,))
            return [*forward(q, k), dq, dk, rope_backward(k, positions, **options), rotated, tangent / 2]

        results = program(q, k, positions)
    expected = [(q, 1), (k, 1), (q, -1), (k, -1), (k, -1), (q, 1), (q, 1)]
    for result, (x, direction) in zip(results, expected, strict=True):
        rotation.of(x, direction).check(result, f"{positions_dtype} {direction}")


def test_kernels_name_positions_that_they_do_not_take() -> None:
    x = np.ones((1, 2, 4, 8), np.float32)
    message = "rope: implementation='kernel' is asked for, .*positions of int32 and int64, not of uint32"
    with jax.enable_x64(False), pytest.raises(ValueError, match=message):
        rope(x, jnp.arange(4, dtype=jnp.uint32), implementation="kernel")


@pytest.mark.parametrize("outside", [np.array([2**31, 0]), np.array([0, -(2**31) - 1]), np.array([2**32], np.uint64)])
def test_positions_of_numpy_that_do_not_fit_without_64_bit_types(outside: np.ndarray) -> None:
    """Such positions are refused, because JAX would drop their upper bits."""
    x = np.ones((1, 2, len(outside), 8), np.float32)
    for function in (rope, forward_mode.rope, rope_backward):
        with jax.enable_x64(False), pytest.raises(ValueError, match=r"positions must fit u?int32 .*jax_enable_x64"):
            function(x, outside, layout="BHSD")


# ----------------------------------------------------------------------------------------------------------------------
# Special values.


@each_layout
@each_pairing
@each_dtype
def test_nan_and_infinity_stay_in_their_pair(
    rng: np.random.Generator, dtype: str, interleaved: bool, layout: str
) -> None:
    x = make_features(rng, features_shape(layout, 2, 3, 17, 24), dtype)
    for bad in (np.nan, np.inf, -np.inf):
        x[rng.random(x.shape) < 0.02] = bad
    rotation = Rotation(
        rng.integers(1, FAR, 17).astype(np.int32), interleaved=interleaved, layout=layout, rotary_dim=20
    )
    with cases.x64_for(dtype):
        y = rope(x, rotation.positions, **rotation.options())
    expected = rotation.of(x)
    assert 0.03 < (~np.isfinite(expected.exact)).mean() < 0.2
    expected.check(y)


@each_layout
@each_pairing
@each_dtype
def test_passthrough_features_keep_their_bits(
    rng: np.random.Generator, dtype: str, interleaved: bool, layout: str
) -> None:
    """All bits are kept, even those of NaN and subnormal numbers."""
    shape = features_shape(layout, 2, 3, 9, 22)
    unsigned = f"uint{8 * jnp.dtype(dtype).itemsize}"
    bits = rng.integers(0, np.iinfo(unsigned).max, shape, dtype=unsigned, endpoint=True)
    for rotary_dim in (2, 8, 10, 20):
        with cases.x64_for(dtype):
            y = rope(bits.view(jnp.dtype(dtype)), interleaved=interleaved, layout=layout, rotary_dim=rotary_dim)
        np.testing.assert_array_equal(np.asarray(y).view(unsigned)[..., rotary_dim:], bits[..., rotary_dim:])


@each_dtype
def test_position_zero_is_the_identity(rng: np.random.Generator, dtype: str) -> None:
    x = make_features(rng, (2, 3, 5, 16), dtype)
    with cases.x64_for(dtype):
        assert_same_bits(rope(x, np.zeros(5, np.int32)), x)
        assert_same_bits(rope(x, np.zeros(5, np.int32), scale=0.5), x / 2)
        assert not np.asarray(rope(x, scale=0)).any()


# ----------------------------------------------------------------------------------------------------------------------
# Memory.


FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "rope": (rope, 1),
    "rope_backward": (rope_backward, -1),
    "rope_qk": (rope_qk, 1),
    "rope_qk_backward": (rope_qk_backward, -1),
}


def features_for(rng: np.random.Generator, name: str, layout: str, dtype: Any = "float32") -> tuple[np.ndarray, ...]:
    shapes = [features_shape(layout, 2, heads, 37, 40) for heads in ((6, 2) if "qk" in name else (6,))]
    return tuple(make_features(rng, shape, dtype) for shape in shapes)


@each_layout
@each_pairing
@pytest.mark.parametrize("name", FUNCTIONS)
def test_donated_features_are_rotated_in_place(
    rng: np.random.Generator, name: str, interleaved: bool, layout: str
) -> None:
    """Features are not copied. The result of donated ones is in the same memory, with passthrough features, too."""
    function, direction = FUNCTIONS[name]
    for rotary_dim, dtype in ((None, "float32"), (24, "bfloat16")):
        rotation = Rotation(make_positions(rng, 2, 2, 37), 1e4, interleaved, layout, rotary_dim)
        features = features_for(rng, name, layout, dtype)
        arguments = tuple(range(len(features)))
        call = functools.partial(function, **rotation.options())
        for donated, num_bytes in (((), 0), (arguments, sum(x.nbytes for x in features))):
            run = jax.jit(call, donate_argnums=donated)
            compiled = run.lower(*features, rotation.positions).compile()
            assert not copies_of(features[-1], compiled.as_text())
            assert compiled.memory_analysis().alias_size_in_bytes == num_bytes
        given = [jnp.array(x) for x in features]
        places = [x.unsafe_buffer_pointer() for x in given]
        results = jax.tree.leaves(run(*given, rotation.positions))
        assert all(x.is_deleted() for x in given)
        assert [x.unsafe_buffer_pointer() for x in results] == places
        for x, result in zip(features, results, strict=True):
            rotation.of(x, direction).check(result)


@pytest.mark.parametrize("strict", ["numpy_rank_promotion", "transfer_guard_host_to_device"])
def test_strict_settings_of_jax_without_jit(rng: np.random.Generator, strict: str) -> None:
    x = jnp.asarray(make_features(rng, (2, 3, 8, 8), "float32"))
    positions = jnp.asarray(make_positions(rng, 2, 2, 8))
    with getattr(jax, strict)({"numpy_rank_promotion": "raise"}.get(strict, "disallow")):
        for function in (rope, forward_mode.rope, rope_backward):
            function(x)
            function(x, positions)


# ----------------------------------------------------------------------------------------------------------------------
# Errors.

X, K, POSITIONS, INV_FREQ = (
    np.ones((2, 6, 9, 8), np.float32),
    np.ones((2, 3, 9, 8), np.float32),
    np.zeros((2, 9), np.int32),
    np.ones(4),
)

# Changed arguments, and the error after the function's name. X is the first argument.
Errors = dict[str, tuple[dict[str, Any], str]]

COMMON_ERRORS: Errors = {
    "None": ({"X": None}, "TypeError: X must be an array, got NoneType"),
    "integer": ({"X": X.astype(np.int32)}, "TypeError: X must have a real floating dtype, got int32"),
    "bool": ({"X": X > 0}, "TypeError: X must have a real floating dtype, got bool"),
    "complex": ({"X": X.astype(np.complex64)}, "TypeError: X must have a real floating dtype, got complex64"),
    "of rank 3": ({"X": X[0]}, r"ValueError: X must have shape \[B, H, S, D\] .*got \(6, 9, 8\)"),
    "of rank 5": ({"X": X[None]}, r"ValueError: X must have shape \[B, H, S, D\] .*got \(1, 2, 6, 9, 8\)"),
    "of rank 3, other layout": ({"X": X[0], "layout": "BSHD"}, r"ValueError: X must have shape \[B, S, H, D\] .*got"),
    "odd D": ({"X": X[..., :7], "K": K[..., :7]}, "ValueError: X must have an even .* D .*got D = 7"),
    "no D": ({"X": X[..., :0], "K": K[..., :0]}, "ValueError: X must have an even .* D .*got D = 0"),
    "positions of other length": (
        {"positions": POSITIONS[:, :8]},
        r"ValueError: positions must have shape \[S\] = \(9,\) or \[B, S\] = \(2, 9\) \(layout='BHSD'\), got \(2, 8\)",
    ),
    "positions of other examples": ({"positions": np.zeros((3, 9), int)}, r"ValueError: positions .*got \(3, 9\)"),
    "positions of rank 0": ({"positions": 3}, r"ValueError: positions must have shape .*got \(\)"),
    "positions of rank 3": ({"positions": POSITIONS[None]}, r"ValueError: positions .*got \(1, 2, 9\)"),
    "positions of three axes": (
        {"positions": np.stack([POSITIONS] * 3)},
        r"ValueError: positions must have shape .*got \(3, 2, 9\).*M-RoPE",
    ),
    "positions of three axes, shared": (
        {"positions": np.zeros((3, 9), np.int32)},
        r"ValueError: positions must have shape .*got \(3, 9\).*M-RoPE",
    ),
    "sections of another sum": (
        {"positions": np.zeros((3, 9), np.int32), "sections": (1, 1, 1)},
        r"ValueError: sections must sum to rotary_dim / 2 = 4, the number of pairs, got \(1, 1, 1\)",
    ),
    "sections are negative": (
        {"positions": np.zeros((2, 9), np.int32), "sections": (-1, 5)},
        r"ValueError: sections\[0\] must be .*-1",
    ),
    "sections are a number": ({"sections": 4}, "TypeError: sections must be a tuple of integers, .*, got 4"),
    "sections without positions": ({"sections": (1, 3)}, "ValueError: positions must be given with sections"),
    "positions without sections": (
        {"positions": POSITIONS, "sections": (1, 2, 1)},
        r"ValueError: positions must have shape \[sections, S\] = \(3, 9\) or \[sections, B, S\] = \(3, 2, 9\)",
    ),
    "rotary_offset is negative": ({"rotary_offset": -1}, "ValueError: rotary_offset must be .*-1"),
    "rotary_offset is too large": (
        {"rotary_offset": 6, "rotary_dim": 4},
        "ValueError: rotary_dim must be even and at most .* from rotary_offset = 6 on, 2, got 4",
    ),
    "base is zero": ({"base": 0}, "ValueError: base must be finite and positive, got 0"),
    "base is negative": ({"base": -10.0}, "ValueError: base must be finite and positive, got -10.0"),
    "base is infinite": ({"base": np.inf}, "ValueError: base must be finite and positive, got inf"),
    "base is NaN": ({"base": np.nan}, "ValueError: base must be finite and positive, got nan"),
    "base is text": ({"base": "1e4"}, "TypeError: base must be a real number, got '1e4'"),
    "base is an array": ({"base": np.ones(4)}, "TypeError: base must be a real number, got an array of dtype float64"),
    "base is bool": ({"base": True}, "TypeError: base must be a real number, got True"),
    "layout is unknown": ({"layout": "SBHD"}, "ValueError: layout must be None, 'BHSD' or 'BSHD', got 'SBHD'"),
    "layout is no text": ({"layout": 1}, "ValueError: layout must be None, 'BHSD' or 'BSHD', got 1"),
    "rotary_dim is odd": ({"rotary_dim": 5}, "ValueError: rotary_dim must be even .* 8, got 5"),
    "rotary_dim is too large": ({"rotary_dim": 10}, "ValueError: rotary_dim must be even and at most .* 8, got 10"),
    "rotary_dim is zero": ({"rotary_dim": 0}, "ValueError: rotary_dim must be 2 or more, got 0"),
    "rotary_dim is negative": ({"rotary_dim": -2}, "ValueError: rotary_dim must be 2 or more, got -2"),
    "rotary_dim is a float": ({"rotary_dim": 4.0}, "TypeError: rotary_dim must be an integer, got 4.0"),
    "rotary_dim is bool": ({"rotary_dim": True}, "TypeError: rotary_dim must be an integer, got True"),
    "inv_freq is complex": ({"inv_freq": INV_FREQ * 1j}, "TypeError: inv_freq must have a real dtype, got complex128"),
    "inv_freq is bool": ({"inv_freq": INV_FREQ > 0}, "TypeError: inv_freq must have a real dtype, got bool"),
    "inv_freq is too short": (
        {"inv_freq": INV_FREQ[:3]},
        r"ValueError: inv_freq must have shape \[rotary_dim / 2\] = \(4,\), .*got \(3,\)",
    ),
    "inv_freq of rank 2": ({"inv_freq": INV_FREQ[None]}, r"ValueError: inv_freq must have shape .*got \(1, 4\)"),
    "inv_freq of fewer bits": (
        {"inv_freq": INV_FREQ.astype(np.float32)},
        r"TypeError: inv_freq of shape \(4,\) must have dtype float64, got float32.* pass the sum of two "
        r"rows, shape \(2, 4\)",
    ),
    "inv_freq of fewer bits, of JAX": (
        {"inv_freq": jnp.asarray(INV_FREQ, jnp.bfloat16)},
        r"TypeError: inv_freq of shape \(4,\) must have dtype float64, got bfloat16",
    ),
    "inv_freq does not fit rotary_dim": (
        {"inv_freq": INV_FREQ, "rotary_dim": 4},
        r"ValueError: inv_freq must have shape \[rotary_dim / 2\] = \(2,\), .*got \(4,\)",
    ),
    "scale is infinite": ({"scale": np.inf}, "ValueError: scale must be finite, got inf"),
    "scale is NaN": ({"scale": np.nan}, "ValueError: scale must be finite, got nan"),
    "scale is an array": ({"scale": jnp.ones(())}, "TypeError: scale must be a real number, got"),
    "scale is None": ({"scale": None}, "TypeError: scale must be a real number, got None"),
}

SINGLE_ERRORS: Errors = {
    "layout is needed": (
        {"X": np.ones((2, 9, 9, 8), np.float32)},
        r"ValueError: layout must be given where there are as many heads as positions.* got X of shape \(2, 9, 9, 8\)",
    ),
    "positions in the other layout": (
        {"positions": POSITIONS, "layout": "BSHD"},
        r"ValueError: positions must have shape \[S\] = \(6,\) or \[B, S\] = \(2, 6\) \(layout='BSHD'\), got \(2, 9\)",
    ),
}

PAIR_ERRORS: Errors = {
    "layout is needed": (
        dict.fromkeys(("X", "K"), np.ones((2, 9, 9, 8), np.float32)),
        r"ValueError: layout must be given .* got X of shape \(2, 9, 9, 8\) and K of shape \(2, 9, 9, 8\)",
    ),
    "K is integer": ({"K": K.astype(int)}, "TypeError: K must have a real floating dtype, got int"),
    "K of rank 3": ({"K": K[0]}, r"ValueError: K must have shape \[B, H, S, D\] .*got \(3, 9, 8\)"),
    "K has other dtype": ({"K": K.astype(np.float16)}, "TypeError: K must have the dtype of X, float32, got float16"),
    "K of other examples": ({"K": K[:1]}, r"ValueError: K must have the shape of X, .*got \(1, 3, 9, 8\)"),
    "K of other length": ({"K": K[:, :, :8]}, r"ValueError: K must have the shape of X, .*got \(2, 3, 8, 8\)"),
    "K of other size": ({"K": K[..., :6]}, r"ValueError: K must have the shape of X, .*got \(2, 3, 9, 6\)"),
    "K in the other layout": ({"layout": "BSHD"}, "ValueError: K must have the shape of X, .*heads in dimension 2"),
}

# The function, its arguments and its errors.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], Errors]] = {
    "rope": (rope, {"x": X}, COMMON_ERRORS | SINGLE_ERRORS),
    "forward_mode.rope": (forward_mode.rope, {"x": X}, COMMON_ERRORS | SINGLE_ERRORS),
    "rope_backward": (rope_backward, {"d_output": X}, COMMON_ERRORS | SINGLE_ERRORS),
    "rope_qk": (rope_qk, {"q": X, "k": K}, COMMON_ERRORS | PAIR_ERRORS),
    "rope_qk_backward": (rope_qk_backward, {"d_q_output": X, "d_k_output": K}, COMMON_ERRORS | PAIR_ERRORS),
}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, (_, _, errors) in CALLS.items() for case in errors], ids=str
)
def test_errors(name: str, case: str) -> None:
    """The message names the function, the argument, the value given and the values allowed; under jit, too."""
    function, arguments, errors = CALLS[name]
    changed, error = errors[case]
    names = dict(zip(("X", "K"), arguments, strict=False))
    changed = {names.get(key, key): value for key, value in changed.items() if key != "K" or key in names}
    for placeholder, argument in names.items():
        error = re.sub(rf"\b{placeholder}\b", argument, error)
    for call in (function, lambda **arguments: jax.jit(lambda: function(**arguments))()):
        with cases.raises(error, f"^{function.__name__}: "):
            call(**(arguments | changed))


def test_layout_may_be_omitted_where_shapes_show_it() -> None:
    """Callers may omit layout if one array has more or fewer heads than positions, or one head at one position."""
    rope(np.ones((2, 9, 8, 8), np.float32))
    rope(np.ones((2, 1, 1, 8), np.float32))
    rope_qk(np.ones((2, 9, 9, 8), np.float32), np.ones((2, 3, 9, 8), np.float32))


def test_numbers_must_not_be_traced() -> None:
    for argument in ("base", "scale"):
        with pytest.raises(TypeError, match=f"rope: {argument} must be a real number, got a traced array"):
            jax.jit(lambda value, argument=argument: rope(X, **{argument: value}))(2.0)
