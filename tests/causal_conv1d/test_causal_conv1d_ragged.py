"""Ragged batches and pools of states: what the matrix lacks, programs in place, errors."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import FLOATING, assert_same_bits
from support.matrix.run import check_bare
from support.programs import copies_of

from jax_baracuda import causal_conv1d, causal_conv1d_ragged, causal_conv1d_update


def random_call(rng: np.random.Generator, tokens: int, channels: int, slots: int) -> dict[str, np.ndarray]:
    """Tokens, a pool, and a filter of four taps with a bias."""
    shapes = {"x": (tokens, channels), "states": (slots, channels, 3), "weight": (channels, 4), "bias": (channels,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def ragged(arrays: dict[str, Any], cu_seqlens: Any, slots: Any, has_state: Any) -> tuple[np.ndarray, np.ndarray]:
    names = {"cu_seqlens": cu_seqlens, "state_slots": slots, "has_state": has_state}
    y, states = jax.jit(lambda given: causal_conv1d_ragged(**given, activation="silu", implementation="kernel"))(
        arrays | names
    )
    return np.asarray(y), np.asarray(states)


@pytest.mark.parametrize("size", ["few slots", "wide", "long sequences", "wider than kernels"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_ragged(dtype: str, size: str) -> None:
    """The last sequence of a slot that is not empty writes its state, of many sequences, channels or tokens."""
    options = {"bias": "given", "activation": "silu"}
    check_bare("causal_conv1d_ragged", dtype=dtype, size=size, transformation="vjp", **options)


@pytest.mark.parametrize("slots", ["given", "accepted"])
@pytest.mark.parametrize("dtype", FLOATING)
def test_update(dtype: str, slots: str) -> None:
    """The last sequence of a slot writes its state, of one input or several, in either layout."""
    for size, inputs, channels_last in itertools.product(
        ("few slots", "wide", "odd"), ("one", "several"), (None, True)
    ):
        options = {"slots": slots, "inputs": inputs, "channels_last": channels_last}
        check_bare("causal_conv1d_update", dtype=dtype, size=size, transformation="jit", **options)


def test_nothing_leaks(rng: np.random.Generator) -> None:
    """NaN in one sequence, in padding, or in a state that no sequence reads reaches nothing else."""
    arrays = random_call(rng, 64, 8, 6)
    cu_seqlens, slots = np.array([0, 20, 21, 21, 40, 50]), np.array([3, 0, 5, -1, 2])
    batch = cu_seqlens, slots, np.array([True, False, True, True, False])
    expected_y, expected_states = ragged(arrays, *batch)
    x, states = arrays["x"], arrays["states"]
    x[21:40] = np.nan
    x[50:] = np.nan
    states[[0, 1, 2, 4, 5]] = np.nan
    y, new = ragged(arrays, *batch)
    clean = np.r_[0:21, 40:64]
    assert_same_bits(y[clean], expected_y[clean])
    assert np.all(np.isnan(y[21:40]))
    assert np.all(y[50:] == 0)
    assert_same_bits(new[[3, 0, 2]], expected_states[[3, 0, 2]])
    assert np.all(np.isnan(new[[1, 4, 5]]))


def test_invalid_numbers_do_no_harm(rng: np.random.Generator) -> None:
    """Starts and slots may be anything. What no sequence names stays as it is."""
    arrays = random_call(rng, 200, 12, 4)
    limits = np.iinfo(np.int32)
    for _ in range(20):
        cu_seqlens = rng.choice([limits.min, -5, -1, 0, 3, 50, 199, 200, 201, 10**6, limits.max], 8).astype(np.int32)
        slots = rng.choice([limits.min, -1, 1, 4, 99, limits.max], 7).astype(np.int32)
        y, states = ragged(arrays, cu_seqlens, slots, rng.random(7) < 0.5)
        assert y.shape == (200, 12)
        assert_same_bits(states[[0, 2, 3]], arrays["states"][[0, 2, 3]])
    others = np.array([0, 1]), np.array([True, False])
    expected, _ = ragged(arrays, np.array([0, 20, 150]), *others)
    for start in (-3, 7):  # tokens before the first sequence are padding
        y, _ = ragged(arrays, np.array([start, 20, 150]), *others)
        assert np.all(y[: max(start, 0)] == 0)
        assert_same_bits(y[20:], expected[20:])


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
    arrays = random_call(rng, 40, 8, 6)
    states = jnp.asarray(arrays["states"])
    _, new = ragged(arrays | {"states": states}, np.array([0, 30, 40]), np.array([4, 1]), np.array([True, False]))
    assert_same_bits(states, arrays["states"])
    assert np.all((new != arrays["states"]).any(axis=(1, 2)) == np.isin(np.arange(6), [1, 4]))


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
