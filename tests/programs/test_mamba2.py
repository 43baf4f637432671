"""mamba2-jax, trained and decoded, with its convolution replaced by causal_conv1d and causal_conv1d_update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from mamba2_jax import modeling

import jax_baracuda as jb

CONFIG = modeling.Mamba2Config(
    vocab_size=50, hidden_size=16, state_size=8, head_dim=8, chunk_size=8, num_hidden_layers=2
)
BATCH, LENGTH, STEPS = 2, 16, 3


def patch(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Replaces the convolution, and counts the traced calls of each function."""
    calls: Counter[str] = Counter()

    def convolve(self: Any, x: jax.Array, conv_state: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        weight = self.conv.kernel[:][:, 0, :].T
        bias = None if self.conv.bias is None else self.conv.bias[:]
        if conv_state is not None:
            calls["update"] += 1
            return jb.causal_conv1d_update(x, conv_state, weight, bias, channels_last=True)
        calls["whole"] += 1
        return jb.causal_conv1d(x, weight, bias, channels_last=True, return_final_state=True)

    monkeypatch.setattr(modeling.DepthwiseConv1d, "__call__", convolve)
    return calls


def model_and_tokens(rng: np.random.Generator) -> tuple[Any, Any, jax.Array]:
    graph, state = nnx.split(modeling.Mamba2ForCausalLM(CONFIG, rngs=nnx.Rngs(0)))
    return graph, state, jnp.asarray(rng.integers(0, CONFIG.vocab_size, (BATCH, LENGTH)))


def training_step(graph: Any, tokens: jax.Array, optimiser: optax.GradientTransformation) -> Callable[..., Any]:
    def loss(state: Any) -> jax.Array:
        return nnx.merge(graph, state)(tokens, labels=tokens)["loss"]

    @jax.jit
    def step(state: Any, memory: Any) -> tuple[jax.Array, Any, Any, Any]:
        value, gradients = jax.value_and_grad(loss)(state)
        updates, memory = optimiser.update(gradients, memory)
        return value, gradients, optax.apply_updates(state, updates), memory

    return step


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5), actual, expected)


def test_training(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, timings: Callable[..., None]) -> None:
    graph, state, tokens = model_and_tokens(rng)
    optimiser = optax.sgd(0.1)
    start = (state, optimiser.init(state))

    def train(step: Callable[..., Any]) -> list[Any]:
        carry, results = start, []
        for _ in range(STEPS):
            value, gradients, *carry = step(*carry)
            results.append((value, gradients))
        return results

    theirs = training_step(graph, tokens, optimiser)
    expected = train(theirs)
    calls = patch(monkeypatch)
    ours = training_step(graph, tokens, optimiser)
    actual = train(ours)
    assert calls == {"whole": CONFIG.num_hidden_layers}  # one trace for all steps
    assert_close(actual, expected)
    assert actual[-1][0] < actual[0][0]
    timings("mamba2-jax, a training step", lambda: ours(*start), lambda: theirs(*start))


def test_decoding(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, timings: Callable[..., None]) -> None:
    graph, state, tokens = model_and_tokens(rng)

    def decoder() -> Callable[..., Any]:
        @jax.jit
        def decode(state: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            model = nnx.merge(graph, state)
            prompt = model(tokens[:, :8])

            def next_token(cache: Any, token: jax.Array) -> tuple[Any, jax.Array]:
                outputs = model(token[:, None], cache=cache)
                return outputs["cache"], outputs["logits"][:, 0]

            cache, logits = jax.lax.scan(next_token, prompt["cache"], tokens[:, 8:].T)
            return jnp.concatenate([prompt["logits"], logits.swapaxes(0, 1)], axis=1), cache

        return decode

    theirs = decoder()
    expected = theirs(state, tokens)
    calls = patch(monkeypatch)
    ours = decoder()
    actual = ours(state, tokens)
    assert calls["whole"] == CONFIG.num_hidden_layers
    assert calls["update"] >= CONFIG.num_hidden_layers
    assert_close(actual, expected)
    whole = nnx.merge(graph, state)(tokens)["logits"]
    np.testing.assert_allclose(actual[0], whole, rtol=1e-4, atol=1e-4)
    timings("mamba2-jax, decoding", lambda: ours(state, tokens), lambda: theirs(state, tokens))
