"""rope_write against NumPy, and against rope_qk and write_rows: values, gradients, programs in place, errors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rope_write.reference import LAYERS, RopeWrite, make_call
from support import cases
from support.cases import FLOATING, assert_same_bits, assert_same_values
from support.kernels import Batch, kernels_in
from support.programs import copies_of

from jax_baracuda import rope_write

each_dtype = pytest.mark.parametrize("dtype", FLOATING)
each_implementation = pytest.mark.parametrize("implementation", ["kernel", "xla"])

CONVERSIONS = (
    ("float32", "bfloat16"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
    ("bfloat16", "int8"),
    ("float16", "float32"),
)
ROTATIONS = (
    {},
    {"rotary_dim": 4},
    {"rotary_offset": 8},
    {"rotary_offset": 3, "rotary_dim": 10, "scale": -1.5},
    {"sections": (3, 1, 4)},
    {"sections": (3, 3, 2), "sections_interleaved": True, "base": 500.0},
    {"sections": (1, 1), "rotary_offset": 12},
    {"inv_freq": np.array([0.7, 1e-3])[np.arange(8) % 2]},
)
"""Options of rotations of 16 features."""
PLACES = ((0, None), (1, None), (0, 1), (1, 0), (0, -1), (1, LAYERS))
"""Axes of slots, and layers, also out of range."""


def run(call: RopeWrite, function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return jax.jit(function or (lambda *arrays: call.run(*arrays, **options)))(*call.arrays)


# ----------------------------------------------------------------------------------------------------------------------
# Values.


@each_implementation
@each_dtype
def test_values(rng: np.random.Generator, dtype: str, implementation: str) -> None:
    """Rotations, places and pairings in turn, with duplicate slots and slots out of range."""
    options = list(itertools.product(ROTATIONS, PLACES, (True, False)))
    batch = Batch()
    with cases.x64_for(dtype):
        for i in rng.choice(len(options), 8, replace=False):
            rotation, (axis, layer), interleaved = options[i]
            call = make_call(rng, dtype, axis=axis, layer=layer, interleaved=interleaved, **rotation)
            run = functools.partial(call.run, implementation=implementation)
            batch.add(run, call.arrays, lambda *results, call=call: call.check(results))
        batch.run()


def add_comparison(batch: Batch, call: RopeWrite) -> None:
    """Adds a comparison, bit by bit, with rope_qk and write_rows."""

    def check(*results: Any) -> None:
        for got, want in zip(results[:3], results[3:], strict=True):
            assert_same_bits(got, np.asarray(want), str(call.rotation))

    batch.add(lambda *x: (*call.run(*x, implementation="kernel"), *call.one_after_the_other(*x)), call.arrays, check)


@pytest.mark.parametrize("dtypes", [*((x, x) for x in FLOATING), *CONVERSIONS], ids=str)
def test_equals_two_kernels(rng: np.random.Generator, dtypes: tuple[str, str]) -> None:
    """The bits are those of rope_qk, then write_rows: a sample of all combinations of options."""
    scales = (None, "one", "per head") if dtypes in CONVERSIONS else (None,)
    options = list(itertools.product(ROTATIONS, PLACES, (True, False), scales, (1, 5, 40)))
    batch = Batch()
    with cases.x64_for(dtypes[0]):
        for i in rng.choice(len(options), 40, replace=False):
            rotation, (axis, layer), interleaved, of_rows, tokens = options[i]
            call = make_call(
                rng, *dtypes, axis=axis, layer=layer, scales=of_rows, tokens=tokens, interleaved=interleaved, **rotation
            )
            add_comparison(batch, call)
        batch.run()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_of_tokens(rng: np.random.Generator, dtype: str) -> None:
    """The last token of a slot wins, with few slots and many, and with rows that fit vectors or do not."""
    batch = Batch()
    for tokens, interleaved in itertools.product((1, 2, 7, 64, 300, 2049), (True, False)):
        for features, heads in (((64, 32), (8, 2, 2)), ((10, 3), (3, 1, 5)), ((128, 128), (40, 8, 8))):
            if tokens > 1000 and features[0] == 128:
                continue
            slots = int(rng.choice([1, 13, 3000]))
            call = make_call(
                rng, dtype, tokens=tokens, features=features, heads=heads, interleaved=interleaved, slots=slots
            )
            add_comparison(batch, call)
    batch.run()


def test_sizes_without_work(rng: np.random.Generator) -> None:
    """No tokens, no slots, or no heads of queries, keys or values."""
    for options in ({"tokens": 0}, {"heads": (0, 2, 3)}, {"heads": (4, 0, 3)}, {"heads": (4, 2, 0)}):
        call = make_call(rng, "float32", **options)
        for implementation in ("kernel", "xla"):
            results = run(call, implementation=implementation)
            for got, want in zip(results, run(call, call.one_after_the_other), strict=True):
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    q = np.ones((3, 2, 4), np.float32)
    empty = np.ones((0, 2, 4), np.float32)
    rotated, keys, values = rope_write(q, q, q, empty, empty, np.arange(3), np.arange(3))
    assert keys.shape == values.shape == (0, 2, 4)
    assert_same_bits(rotated[0], q[0])


def test_one_launch(rng: np.random.Generator) -> None:
    """A call is one kernel, and so is a batch of vmap. The gradient rotates once."""
    call = make_call(rng, "float32", layer=1)
    text = jax.jit(lambda *x: call.run(*x, implementation="kernel")).lower(*call.arrays).as_text()
    assert kernels_in(text) == ["rope_write"]

    def loss(*arrays: Any) -> Any:
        return sum((x**2).sum() for x in call.run(*arrays, implementation="kernel"))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4))).lower(*call.arrays).as_text()
    assert kernels_in(gradient) == ["rope_write", "rope_qk_backward"]


def test_vmap(rng: np.random.Generator) -> None:
    """One launch for any mapped operands."""
    calls = [make_call(rng, "bfloat16", scales="per head", axis=1) for _ in range(3)]
    names = ("q", "k", "v", "key_cache", "value_cache", "positions", "slots", "k_scale", "v_scale")

    def one(*arrays: Any) -> Any:
        of_scales = dict(zip(("k_scale", "v_scale"), arrays[7:], strict=True))
        return rope_write(*arrays[:7], axis=1, **of_scales, implementation="kernel")

    for shared in ((), ("positions", "slots"), ("q", "k", "k_scale"), ("v", "v_scale")):
        mapped = tuple(None if name in shared else 0 for name in names)
        of_names = {name: [getattr(call, name) for call in calls] for name in names}
        operands = [x[0] if axis is None else np.stack(x) for x, axis in zip(of_names.values(), mapped, strict=True)]
        function = jax.jit(jax.vmap(one, mapped))
        assert kernels_in(function.lower(*operands).as_text()) == ["rope_write"]
        for i in range(3):
            each = [x if axis is None else x[i] for x, axis in zip(operands, mapped, strict=True)]
            for got, want in zip(function(*operands), one(*each), strict=True):
                assert_same_bits(got[i], np.asarray(want), str(shared))


# ----------------------------------------------------------------------------------------------------------------------
# Gradients.


@each_implementation
@pytest.mark.parametrize("dtypes", [*((x, x) for x in FLOATING), ("bfloat16", "float8_e4m3fn"), ("float32", "int8")])
def test_gradient(rng: np.random.Generator, dtypes: tuple[str, str], implementation: str) -> None:
    """The gradients of all arrays are those of rope_qk and write_rows."""
    batch = Batch()
    with cases.x64_for(dtypes[0]):
        for rotation, (axis, layer) in zip(ROTATIONS, itertools.cycle(PLACES), strict=False):
            scales = "per head" if dtypes[0] != dtypes[1] else None
            call = make_call(rng, *dtypes, axis=axis, layer=layer, scales=scales, **rotation)
            add_gradient(batch, rng, call, implementation)
        batch.run()


def add_gradient(batch: Batch, rng: np.random.Generator, call: RopeWrite, implementation: str) -> None:
    results = jax.eval_shape(call.one_after_the_other, *call.arrays)
    is_floating = [jnp.issubdtype(x.dtype, jnp.inexact) for x in results]
    cotangents = tuple(rng.normal(size=x.shape).astype(x.dtype) for x in results)
    differentiated = [0, 1, 2, *(i + 3 for i in range(2) if is_floating[i + 1])]

    def gradient(function: Callable[..., Any], arrays: Any, cotangents: Any) -> Any:
        def of_floating(*chosen: Any) -> Any:
            given = list(arrays)
            for i, x in zip(differentiated, chosen, strict=True):
                given[i] = x
            return [x for x, use in zip(function(*given), is_floating, strict=True) if use]

        chosen = [x for x, use in zip(cotangents, is_floating, strict=True) if use]
        return jax.vjp(of_floating, *(arrays[i] for i in differentiated))[1](chosen)

    def both(arrays: Any, cotangents: Any) -> Any:
        run = functools.partial(call.run, implementation=implementation)
        return tuple(gradient(f, arrays, cotangents) for f in (run, call.one_after_the_other))

    def check(got: Any, want: Any) -> None:
        for x, y in zip(got, want, strict=True):
            if implementation == "kernel":
                assert_same_values(x, y)  # integer caches give zeros, which two kernels rotate to -0
                continue
            tolerance = {8: 1e-12, 4: 1e-5, 2: 2e-2, 1: 0.1}[y.dtype.itemsize]
            x, y = (np.asarray(z, np.float64) for z in (x, y))
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)

    batch.add(both, (call.arrays, cotangents), check)


# ----------------------------------------------------------------------------------------------------------------------
# Programs in place.


@pytest.mark.parametrize("place", [(0, None), (1, None), (0, 1), (1, 1)], ids=str)
def test_caches_are_written_in_place(rng: np.random.Generator, place: tuple[int, int | None]) -> None:
    """Donated caches keep their memory, and a loop does not copy those that it carries."""
    axis, layer = place
    call = make_call(rng, "bfloat16", axis=axis, layer=layer, slots=200, tokens=3)
    expected = run(call, implementation="kernel")
    caches = [jnp.array(x) for x in (call.key_cache, call.value_cache)]
    addresses = {x.unsafe_buffer_pointer() for x in caches}

    def step(caches: Any, q: Any, k: Any, v: Any) -> Any:
        return call.run(q, k, v, *caches, implementation="kernel")

    donated = jax.jit(step, donate_argnums=0)
    assert not copies_of(call.key_cache, donated.lower(caches, call.q, call.k, call.v).compile().as_text())
    results = donated(caches, call.q, call.k, call.v)
    assert {x.unsafe_buffer_pointer() for x in results[1:]} == addresses
    for got, want in zip(results, expected, strict=True):
        assert_same_bits(got, np.asarray(want))

    def loop(caches: Any, q: Any, k: Any, v: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda i, caches: list(step(caches, q, k, v)[1:]), caches)

    caches = [jnp.array(x) for x in (call.key_cache, call.value_cache)]
    compiled = jax.jit(loop, donate_argnums=0).lower(caches, call.q, call.k, call.v).compile()
    assert not copies_of(call.key_cache, compiled.as_text())
    for got, want in zip(compiled(caches, call.q, call.k, call.v), expected[1:], strict=True):
        assert_same_bits(got, np.asarray(want))


# ----------------------------------------------------------------------------------------------------------------------
# Errors.


def test_errors() -> None:
    x, cache = np.zeros((4, 2, 6), np.float32), np.zeros((5, 2, 6), np.float32)
    p = s = np.zeros(4, np.int32)
    for match, error, function in (
        ("q must have a real floating dtype, got int32", TypeError,
         lambda: rope_write(x.astype(np.int32), x, x, cache, cache, p, s)),
        ("k must have the dtype of q, float32, got float16", TypeError,
         lambda: rope_write(x, x.astype(np.float16), x, cache, cache, p, s)),
        (r"v must have shape \[T, heads, features\], got \(4, 12\)", ValueError,
         lambda: rope_write(x, x, x.reshape(4, 12), cache, cache, p, s)),
        (r"v must have shape \[T, heads, features\] with as many tokens as q of shape \(4, 2, 6\), got \(3", ValueError,
         lambda: rope_write(x, x, x[:3], cache, cache, p, s)),
        (r"slots must have shape \[T\] = \(4,\), one for each token, got \(3,\)", ValueError,
         lambda: rope_write(x, x, x, cache, cache, p, s[:3])),
        ("k must have as many features as q, 6", ValueError, lambda: rope_write(x, x[..., :4], x, cache, cache, p, s)),
        ("axis must be 0 or 1", ValueError, lambda: rope_write(x, x, x, cache, cache, p, s, axis=2)),
        (r"k must have shape \(4, 2, 5\) for 4 slots and key_cache", ValueError,
         lambda: rope_write(x, x, x, cache[..., :5], cache, p, s)),
        ("value_cache must have the layers and slots of key_cache", ValueError,
         lambda: rope_write(x, x, x, cache, cache[:4], p, s)),
        (r"k_scale must be a scalar or have shape \(2,\)", ValueError,
         lambda: rope_write(x, x, x, cache, cache, p, s, k_scale=np.ones(3))),
        ("slots must have an integer dtype", TypeError, lambda: rope_write(x, x, x, cache, cache, p, p * 1.0)),
        (r"positions must have shape \[T\] = \(4,\), got \(3,\)", ValueError,
         lambda: rope_write(x, x, x, cache, cache, p[:3], s)),
        (r"positions must have shape \[sections, T\] = \(2, 4\), got \(4,\)", ValueError,
         lambda: rope_write(x, x, x, cache, cache, p, s, sections=(1, 2))),
        ("positions must have an integer dtype", TypeError, lambda: rope_write(x, x, x, cache, cache, p * 1.0, s)),
        ("rotary_dim must be even", ValueError, lambda: rope_write(x, x, x, cache, cache, p, s, rotary_dim=3)),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^rope_write: {match}"):
            function()
