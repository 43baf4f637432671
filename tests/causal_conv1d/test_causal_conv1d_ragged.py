"""Ragged batches and pools of states: values, gradients, programs in place, errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_conv1d import pools
from causal_conv1d.pools import in_float64, random_batch, random_parameters, random_slots
from support import cases
from support.programs import copies_of

from jax_baracuda import causal_conv1d, causal_conv1d_ragged, causal_conv1d_update

each_dtype = pytest.mark.parametrize("dtype", cases.FLOATING)


def assert_close(actual: Any, expected: np.ndarray, where: str = "") -> None:
    """Rounded once from float32, or float64."""
    assert actual.shape == expected.shape, where
    own, wide = (float(jnp.finfo(dtype).eps) for dtype in (actual.dtype, cases.accumulator(actual.dtype)))
    bound = 0.501 * own * np.abs(expected) + 32 * wide * (1 + np.max(np.abs(expected), initial=0))
    errors = np.abs(np.asarray(actual).astype(np.float64) - expected)
    assert np.all(errors <= bound), (where, np.max(errors))


def assert_equal(actual: Any, expected: np.ndarray, where: str = "") -> None:
    np.testing.assert_array_equal(np.asarray(actual).astype(np.float64), expected, where)


def ragged(arrays: dict[str, Any], batch: Any, activation: str | None = "silu", **options: Any) -> Any:
    names = dict(zip(("cu_seqlens", "state_slots", "has_state"), batch, strict=True))
    return jax.jit(lambda given, names: causal_conv1d_ragged(**given, **names, activation=activation, **options))(
        arrays, names
    )


# ----------------------------------------------------------------------------------------------------------------------
# Ragged batches.

SIZES = (
    # tokens, sequences, channels, slots, entries of a row beyond W - 1
    (1, 1, 4, 1, 0),
    (5, 0, 3, 2, 0),
    (37, 9, 1, 12, 1),
    (60, 20, 8, 30, 0),
    (300, 7, 33, 7, 2),
    (700, 40, 64, 50, 0),
    (130, 130, 516, 140, 0),
    (2100, 3, 12, 4, 0),
)


@each_dtype
@pytest.mark.parametrize("width", [4, 1, 2, 3, 6, 8])
def test_ragged(rng: np.random.Generator, dtype: str, width: int) -> None:
    with cases.x64_for(dtype):
        for i, (tokens, sequences, channels, slots, more) in enumerate(SIZES):
            where = f"{tokens} tokens, {sequences} sequences, {channels} channels"
            own = "float32" if i % 2 and dtype in ("float16", "bfloat16") else dtype
            arrays = random_parameters(
                rng, (tokens, channels), (slots, width - 1 + more), width, dtype, own, has_bias=i % 3 > 0
            )
            batch, activation = random_batch(rng, tokens, sequences, slots), ("silu", None)[i % 2]
            y, states = ragged(arrays, batch, activation, implementation="kernel")
            expected_y, expected_states = in_float64(pools.ragged, arrays, batch, activation)
            assert y.dtype == states.dtype == arrays["x"].dtype
            assert_close(y, expected_y, where)
            assert_equal(states, expected_states, where)


def test_plain_jax(rng: np.random.Generator) -> None:
    """So is the result of plain JAX, for filters that have no kernel, too."""
    for width, tokens, sequences in ((1, 9, 3), (4, 50, 9), (8, 40, 6), (11, 70, 8)):
        arrays = random_parameters(rng, (tokens, 5), (11, width), width)
        batch = random_batch(rng, tokens, sequences, 11)
        y, states = ragged(arrays, batch, implementation="xla")
        expected_y, expected_states = in_float64(pools.ragged, arrays, batch)
        assert_close(y, expected_y, f"width {width}")
        assert_equal(states, expected_states, f"width {width}")


def test_nothing_leaks(rng: np.random.Generator) -> None:
    """NaN in one sequence, in padding, or in a state that no sequence reads reaches nothing else."""
    arrays = random_parameters(rng, (64, 8), (6, 3), 4)
    cu_seqlens, slots = np.array([0, 20, 21, 21, 40, 50]), np.array([3, 0, 5, -1, 2])
    has_state = np.array([True, False, True, True, False])
    batch = cu_seqlens, slots, has_state
    expected_y, expected_states = in_float64(pools.ragged, arrays, batch)
    x, states = arrays["x"], arrays["states"]
    x[21:40] = np.nan
    x[50:] = np.nan
    states[[0, 1, 2, 4, 5]] = np.nan
    y, new = ragged(arrays, batch, implementation="kernel")
    clean = np.r_[0:21, 40:64]
    assert_close(y[clean], expected_y[clean])
    assert np.all(np.isnan(y[21:40]))
    assert np.all(np.asarray(y[50:]) == 0)
    assert_equal(new[np.array([3, 0, 2])], expected_states[[3, 0, 2]])
    assert np.all(np.isnan(new[np.array([1, 4, 5])]))


def test_equal_slots(rng: np.random.Generator) -> None:
    """All sequences of a slot begin with the old state. The last one that is not empty writes its own."""
    arrays = random_parameters(rng, (300, 68), (3, 3), 4)
    for _ in range(5):
        cu_seqlens, _, has_state = random_batch(rng, 300, 100, 3)
        batch = cu_seqlens, rng.integers(0, 3, 100).astype(np.int32), has_state
        y, states = ragged(arrays, batch, implementation="kernel")
        expected_y, expected_states = in_float64(pools.ragged, arrays, batch)
        assert_close(y, expected_y)
        assert_equal(states, expected_states)


def test_invalid_numbers_do_no_harm(rng: np.random.Generator) -> None:
    """Starts and slots may be anything. What no sequence names stays as it is."""
    arrays = random_parameters(rng, (200, 12), (4, 3), 4)
    limits = np.iinfo(np.int32)
    for _ in range(20):
        cu_seqlens = rng.choice([limits.min, -5, -1, 0, 3, 50, 199, 200, 201, 10**6, limits.max], 8).astype(np.int32)
        slots = rng.choice([limits.min, -1, 1, 4, 99, limits.max], 7).astype(np.int32)
        y, states = ragged(arrays, (cu_seqlens, slots, rng.random(7) < 0.5), implementation="kernel")
        assert y.shape == (200, 12)
        assert_equal(states[np.array([0, 2, 3])], arrays["states"][[0, 2, 3]])
    for start in (-3, 7):  # tokens before the first sequence are padding
        batch = np.array([start, 20, 150]), np.array([0, 1]), np.array([True, False])
        y, _ = ragged(arrays, batch, implementation="kernel")
        assert np.all(np.asarray(y[: max(start, 0)]) == 0)
        expected, _ = in_float64(pools.ragged, arrays, (np.array([0, 20, 150]), *batch[1:]))
        assert_close(y[20:], expected[20:])


@pytest.mark.parametrize("ids_dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_integers_of_every_dtype(rng: np.random.Generator, ids_dtype: str) -> None:
    arrays = random_parameters(rng, (90, 8), (9, 3), 4)
    cu_seqlens, slots, has_state = random_batch(rng, 90, 6, 9)
    slots = np.where(slots < 0, 100, slots)
    with cases.x64_for(ids_dtype):
        batch = cu_seqlens.astype(ids_dtype), slots.astype(ids_dtype), has_state
        if ids_dtype.endswith("64"):
            batch[1][0] = 2**32
            slots[0] = -1
        y, states = ragged(arrays, batch)
    expected_y, expected_states = in_float64(pools.ragged, arrays, (cu_seqlens, slots, has_state))
    assert_close(y, expected_y)
    assert_equal(states, expected_states)


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("width", [4, 1, 2, 7])
def test_gradients(rng: np.random.Generator, width: int, implementation: str) -> None:
    with cases.x64_for("float64"):
        for tokens, sequences, slots, channels in ((40, 9, 4, 5), (160, 5, 20, 16)):
            arrays = random_parameters(rng, (tokens, channels), (slots, width), width, "float64")
            cu_seqlens, own_slots, has_state = random_batch(rng, tokens, sequences, slots)
            batch = cu_seqlens, own_slots % (slots + 1), has_state  # some slots are equal
            cotangents = tuple(rng.normal(size=arrays[name].shape) for name in ("x", "states"))

            def pulled(function: Callable[..., Any], arrays: Any = arrays, cotangents: Any = cotangents) -> Any:
                return jax.jit(lambda given: jax.vjp(function, given)[1](cotangents)[0])(arrays)

            expected = pulled(lambda given, batch=batch: pools.ragged(given, batch))
            actual = pulled(lambda given, batch=batch: ragged(given, batch, implementation=implementation))
            for name in arrays:
                np.testing.assert_allclose(actual[name], expected[name], 1e-9, 1e-9, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_of_rounded_numbers(rng: np.random.Generator, dtype: str) -> None:
    """Gradients have the dtypes of their arrays, and are as close to those in float64 as two roundings allow."""
    arrays = random_parameters(rng, (90, 12), (8, 3), 4, dtype, "float32")
    batch = random_batch(rng, 90, 6, 8)
    cotangents = tuple(rng.normal(size=arrays[name].shape).astype(arrays[name].dtype) for name in ("x", "states"))
    actual = jax.vjp(lambda given: ragged(given, batch, implementation="kernel"), arrays)[1](cotangents)[0]
    with cases.x64_for("float64"):
        wide = jax.tree.map(lambda x: x.astype(np.float64), (arrays, cotangents))
        expected = jax.vjp(lambda given: pools.ragged(given, batch), wide[0])[1](wide[1])[0]
    for name, x in arrays.items():
        assert actual[name].dtype == x.dtype, name
        tolerance = 4 * max(float(jnp.finfo(dtype if name in ("x", "states") else "float32").eps), 1e-6)
        scale = np.max(np.abs(expected[name]))
        np.testing.assert_allclose(np.asarray(actual[name], np.float64), expected[name], 0, tolerance * scale, name)


def test_second_derivatives(rng: np.random.Generator) -> None:
    with cases.x64_for("float64"):
        arrays = random_parameters(rng, (20, 3), (4, 2), 3, "float64")
        batch = random_batch(rng, 20, 4, 4)

        def gradient(function: Callable[..., Any]) -> Any:
            def loss(given: Any) -> Any:
                y, states = function(given, batch)
                return jnp.sum(y**2) + jnp.sum(states**3)

            return jax.jit(jax.grad(lambda given: sum(jnp.sum(g**2) for g in jax.grad(loss)(given).values())))(arrays)

        expected = gradient(pools.ragged)
        actual = gradient(lambda given, batch: ragged(given, batch, implementation="kernel"))
        for name in arrays:
            np.testing.assert_allclose(actual[name], expected[name], 1e-8, 1e-8, err_msg=name)


@pytest.mark.parametrize("mapped", [("x",), ("states",), ("cu_seqlens", "state_slots"), ("weight", "bias"), "all"])
def test_vmap(rng: np.random.Generator, mapped: Any) -> None:
    """Mapped and shared operands, in one launch."""
    arrays = [random_parameters(rng, (50, 8), (7, 3), 4) for _ in range(3)]
    batches = [dict(zip(("cu_seqlens", "state_slots", "has_state"), random_batch(rng, 50, 5, 7), strict=True))
               for _ in range(3)]  # fmt: skip
    operands = [own | batch for own, batch in zip(arrays, batches, strict=True)]
    names = tuple(operands[0]) if mapped == "all" else mapped
    given = {name: np.stack([own[name] for own in operands]) if name in names else x for name, x in operands[0].items()}
    axes = {name: 0 if name in names else None for name in given}
    call = lambda own: causal_conv1d_ragged(**own, activation="silu", implementation="kernel")  # noqa: E731
    y, states = jax.jit(jax.vmap(call, (axes,)))(given)
    for i in range(3):
        own = {name: x[i] if name in names else x for name, x in given.items()}
        batch = (own.pop("cu_seqlens"), own.pop("state_slots"), own.pop("has_state"))
        expected_y, expected_states = in_float64(pools.ragged, own, batch)
        assert_close(y[i], expected_y)
        assert_equal(states[i], expected_states)


# ----------------------------------------------------------------------------------------------------------------------
# Decoding with a pool.


def update(
    arrays: dict[str, Any], slots: Any, num_accepted: Any = None, channels_last: bool = True, **more: Any
) -> Any:
    """For ``x [B, T, C]``, in either layout."""

    def call(given: Any, slots: Any, num_accepted: Any) -> Any:
        x = given["x"] if channels_last else jnp.swapaxes(given["x"], 1, 2)
        options = {"channels_last": channels_last, "state_slots": slots, "num_accepted": num_accepted}
        y, states = causal_conv1d_update(x, given["states"], given["weight"], given.get("bias"), **options, **more)
        return y if channels_last else jnp.swapaxes(y, 1, 2), states

    return jax.jit(call)(arrays, slots, num_accepted)


@each_dtype
@pytest.mark.parametrize("width", [4, 1, 2, 7])
def test_update(rng: np.random.Generator, dtype: str, width: int) -> None:
    with cases.x64_for(dtype):
        for i, (sequences, inputs, channels, slots, more) in enumerate(
            ((1, 1, 4, 1, 0), (5, 1, 64, 9, 0), (3, 1, 516, 40, 3), (6, 3, 24, 6, 0), (4, 2, 5, 9, 1), (7, 5, 32, 9, 4))
        ):
            arrays = random_parameters(
                rng, (sequences, inputs, channels), (slots, width - 1 + more), width, dtype, has_bias=i % 2 > 0
            )
            own_slots, activation = random_slots(rng, sequences, slots), ("silu", None)[i % 2]
            expected_y, expected_states = in_float64(pools.updated, arrays, own_slots, None, activation)
            for channels_last in (True, False):
                where = f"{arrays['x'].shape} {channels_last}"
                options = {"activation": activation, "implementation": "kernel"}
                y, states = update(arrays, own_slots, None, channels_last, **options)
                assert_close(y, expected_y, where)
                assert_equal(states, expected_states, where)


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("width", [4, 1, 2, 6])
def test_accepted_inputs(rng: np.random.Generator, width: int, implementation: Any) -> None:
    for sequences, inputs, more in ((3, 1, 0), (5, 4, 0), (6, 2, 3)):
        arrays = random_parameters(rng, (sequences, inputs, 12), (9, max(width - 2, 0) + inputs + more), width)
        slots, num_accepted = random_slots(rng, sequences, 9), rng.integers(-2, inputs + 6, sequences)
        expected_y, expected_states = in_float64(pools.updated, arrays, slots, num_accepted)
        for channels_last in (True, False):
            options = {"activation": "silu", "implementation": implementation}
            y, states = update(arrays, slots, num_accepted.astype(np.int32), channels_last, **options)
            assert_close(y, expected_y)
            assert_equal(states, expected_states)


def test_speculative_decoding(rng: np.random.Generator) -> None:
    """A prompt, then drafts of which some inputs are accepted: the same y as of the accepted inputs alone."""
    width, drafts, channels = 4, 3, 6
    weight = rng.normal(size=(channels, width)).astype(np.float32)
    signals = rng.normal(size=(2, 40, channels)).astype(np.float32)
    expected = causal_conv1d(signals, weight, channels_last=True)
    pool, slots = jnp.full((5, channels, width - 2 + drafts), jnp.nan), np.array([4, 1])
    prompts = np.concatenate([signals[0, :7], signals[1, :2]])
    y, pool = causal_conv1d_ragged(
        prompts, pool, weight, cu_seqlens=np.array([0, 7, 9]), state_slots=slots, has_state=np.zeros(2, bool)
    )
    np.testing.assert_allclose(y, np.concatenate([expected[0, :7], expected[1, :2]]), 1e-5, 1e-5)
    positions, accepted = np.array([7, 2]), np.array([1, 1])
    while positions.max() + drafts <= 40:
        x = rng.normal(size=(2, drafts, channels)).astype(np.float32)  # rejected inputs are anything
        counts = rng.integers(1, drafts + 1, 2)
        for n in range(2):
            x[n, : counts[n]] = signals[n, positions[n] : positions[n] + counts[n]]
        y, pool = causal_conv1d_update(
            x, pool, weight, channels_last=True, state_slots=slots, num_accepted=accepted, implementation="kernel"
        )
        for n in range(2):
            own = expected[n, positions[n] : positions[n] + counts[n]]
            np.testing.assert_allclose(y[n, : counts[n]], own, 1e-5, 1e-5)
        positions, accepted = positions + counts, counts


def test_equal_slots_of_an_update(rng: np.random.Generator) -> None:
    """All sequences of a slot begin with the old state. The last one writes its own."""
    for channels, more in ((64, 0), (6, 2)):
        arrays = random_parameters(rng, (300, 1, channels), (3, 3 + more), 4)
        slots = rng.integers(-1, 4, 300)
        y, states = update(arrays, slots, activation="silu", implementation="kernel")
        expected_y, expected_states = in_float64(pools.updated, arrays, slots)
        assert_close(y, expected_y)
        assert_equal(states, expected_states)


@pytest.mark.parametrize("implementation", ["kernel", "xla"])
@pytest.mark.parametrize("width", [4, 1, 2])
def test_gradients_of_an_update(rng: np.random.Generator, width: int, implementation: Any) -> None:
    with cases.x64_for("float64"):
        for inputs, has_accepted in ((1, False), (3, False), (3, True)):
            arrays = random_parameters(rng, (6, inputs, 5), (5, width + inputs), width, "float64")
            slots, num_accepted = random_slots(rng, 6, 5), rng.integers(1, inputs + 1, 6)

            accepted = num_accepted if has_accepted else None
            functions = (
                lambda given: update(given, slots, accepted, activation="silu", implementation=implementation),  # noqa: B023
                lambda given: pools.updated(given, slots, accepted),  # noqa: B023
            )
            cotangents = tuple(rng.normal(size=arrays[name].shape) for name in ("x", "states"))
            actual, expected = (jax.vjp(f, arrays)[1](cotangents)[0] for f in functions)
            for name in arrays:
                np.testing.assert_allclose(actual[name], expected[name], 1e-9, 1e-9, err_msg=name)


def test_vmap_of_an_update(rng: np.random.Generator) -> None:
    arrays = [random_parameters(rng, (4, 2, 8), (7, 4), 4) for _ in range(3)]
    slots = random_slots(rng, 4, 7)
    given = {name: np.stack([own[name] for own in arrays]) for name in ("x", "states")}
    others = {name: arrays[0][name] for name in ("weight", "bias")}

    def call(own: Any, accepted: Any) -> Any:
        return update(own | others, slots, accepted, activation="silu", implementation="kernel")

    accepted = np.array([[1, 2, 1, 2], [2, 2, 1, 1], [1, 1, 1, 1]])
    y, states = jax.vmap(call)(given, accepted)
    for i in range(3):
        own = {name: x[i] for name, x in given.items()} | others
        expected_y, expected_states = in_float64(pools.updated, own, slots, accepted[i])
        assert_close(y[i], expected_y)
        assert_equal(states[i], expected_states)


# ----------------------------------------------------------------------------------------------------------------------
# In place.


@pytest.mark.parametrize("function", ["ragged", "update", "accepted"])
@pytest.mark.parametrize("is_loop", [False, True], ids=["step", "loop"])
def test_donated_pools_are_updated_in_place(rng: np.random.Generator, is_loop: bool, function: str) -> None:
    pool_shape = (50, 24, 5)
    weight = rng.normal(size=(24, 4)).astype(np.float32)
    slots = np.array([7, 3, 40])

    def step(states: Any, x: Any) -> Any:
        if function == "ragged":
            has_state = np.ones(3, bool)
            options = {"cu_seqlens": np.array([0, 2, 5, 6]), "state_slots": slots, "has_state": has_state}
            y, states = causal_conv1d_ragged(x, states, weight, **options)
        else:
            accepted = {"num_accepted": np.ones(3, np.int32)} if function == "accepted" else {}
            x = jnp.reshape(x, (3, 2, 24))
            y, states = causal_conv1d_update(x, states, weight, channels_last=True, state_slots=slots, **accepted)
        return states, jnp.sum(y)

    def run(states: Any, x: Any) -> Any:
        return jax.lax.scan(step, states, jnp.stack([x] * 4)) if is_loop else step(states, x)

    x, before = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 24), pool_shape))
    states = jnp.array(before)
    compiled = jax.jit(run, donate_argnums=0).lower(states, x).compile()
    assert not copies_of(states, compiled.as_text())
    assert compiled.memory_analysis().alias_size_in_bytes >= states.nbytes
    new, _ = compiled(states, x)
    assert states.is_deleted()
    others = np.setdiff1d(np.arange(50), slots)
    np.testing.assert_array_equal(np.asarray(new)[others], before[others])
    assert not np.any(np.asarray(new)[slots, :, 0] == before[slots, :, 0])


def test_pools_that_are_used_again(rng: np.random.Generator) -> None:
    """Without a donation, the old pool stays as it is."""
    arrays = random_parameters(rng, (40, 8), (6, 3), 4)
    batch = random_batch(rng, 40, 4, 6)
    states = jnp.asarray(arrays["states"])
    y, new = ragged(arrays | {"states": states}, batch)
    assert_equal(states, arrays["states"])
    assert_equal(new, in_float64(pools.ragged, arrays, batch)[1])


# ----------------------------------------------------------------------------------------------------------------------
# Errors.

GOOD: dict[str, Any] = {
    "x": np.ones((9, 6), np.float32),
    "states": np.ones((5, 6, 3), np.float32),
    "weight": np.ones((6, 4), np.float32),
    "cu_seqlens": np.array([0, 4, 9]),
    "state_slots": np.array([0, 1]),
    "has_state": np.array([True, False]),
}
GOOD_UPDATE: dict[str, Any] = {
    "x": np.ones((2, 6, 3), np.float32),
    "state": np.ones((5, 6, 5), np.float32),
    "weight": np.ones((6, 4), np.float32),
    "state_slots": np.array([0, 1]),
    "num_accepted": np.array([1, 1]),
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": np.ones((1, 9, 6), np.float32)}, ValueError, r"x must have shape \[T, C\]"),
        ({"x": np.ones((9, 6), np.int32)}, TypeError, "x must have a real floating dtype"),
        ({"states": np.ones((5, 6, 2), np.float32)}, ValueError, "states must have shape .* K >= W - 1 = 3"),
        ({"states": np.ones((5, 7, 3), np.float32)}, ValueError, "states must have shape"),
        ({"states": np.ones((5, 6, 3), np.float16)}, TypeError, "states must have the dtype of x"),
        ({"cu_seqlens": np.array([0, 4])}, ValueError, r"cu_seqlens must have shape \[N \+ 1\] = \(3,\)"),
        ({"cu_seqlens": np.array([0.0, 4.0, 9.0])}, TypeError, "cu_seqlens must have an integer dtype"),
        ({"cu_seqlens": [0, 4, 9]}, TypeError, "cu_seqlens must be an array"),
        ({"state_slots": np.zeros((2, 1), int)}, ValueError, r"state_slots must have shape \[N\]"),
        ({"state_slots": np.array([True, False])}, TypeError, "state_slots must have an integer dtype"),
        ({"has_state": np.array([1, 0])}, TypeError, "has_state must have dtype bool"),
        ({"has_state": np.array([True])}, ValueError, r"has_state must have shape \[N\] = \(2,\)"),
        ({"weight": np.ones((5, 4), np.float32)}, ValueError, "weight must have shape"),
        ({"activation": "relu"}, ValueError, "activation must be"),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"causal_conv1d_ragged: {message}"):
        causal_conv1d_ragged(**GOOD | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"state_slots": None}, ValueError, "num_accepted needs state_slots"),
        ({"state_slots": np.array([1])}, ValueError, r"state_slots must have shape \[B\] = \(2,\)"),
        ({"state_slots": np.array([1.0, 2.0])}, TypeError, "state_slots must have an integer dtype"),
        ({"num_accepted": np.array([[1, 1]])}, ValueError, r"num_accepted must have shape \[B\] = \(2,\)"),
        ({"num_accepted": np.array([True, True])}, TypeError, "num_accepted must have an integer dtype"),
        ({"state": np.ones((5, 6, 4), np.float32)}, ValueError, r"state must have shape .* K >= W - 2 \+ T = 5"),
        ({"state": np.ones((5, 7, 5), np.float32)}, ValueError, "state must have shape"),
        ({"state": np.ones((6, 5), np.float32)}, ValueError, "state must have shape"),
    ],
)
def test_errors_of_updates(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"causal_conv1d_update: {message}"):
        causal_conv1d_update(**GOOD_UPDATE | changes)


@pytest.mark.parametrize("ends", [(0, 3, 100), (-5, 3, 8), (100, 200, 300), (-9, -5, -1)])
def test_ends_out_of_range(ends: tuple[int, ...]) -> None:
    """They count as the first token and the end of the tokens, with either implementation."""
    x, states = np.arange(1, 9, dtype=np.float32)[:, None], np.full((2, 1, 3), 7, np.float32)
    options = {"state_slots": np.arange(2), "has_state": np.ones(2, bool)}
    weight = np.ones((1, 4), np.float32)
    expected = causal_conv1d_ragged(x, states, weight, cu_seqlens=np.clip(ends, 0, 8), **options)
    for implementation, of_64_bits in itertools.product(("kernel", "xla"), (False, True)):
        with jax.enable_x64(of_64_bits):
            cu_seqlens = jnp.asarray(ends, jnp.int64) if of_64_bits else np.array(ends)
            results = causal_conv1d_ragged(
                x, states, weight, cu_seqlens=cu_seqlens, implementation=implementation, **options
            )
        for got, want in zip(results, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_final_states_of_unsigned_ids() -> None:
    ids = np.array([[0, 0, 1]], np.uint32)
    options = {"segment_ids": ids, "num_segments": 2, "return_final_state": True}
    _, states = causal_conv1d(np.array([[[1.0, 2.0, 5.0]]], np.float32), np.ones((1, 2), np.float32), **options)
    np.testing.assert_array_equal(np.ravel(states), [2, 5])
