"""A server whose requests join and leave generates the tokens of each request alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import hybrid_model
from benchmarks.continuous_batching import Capacity, Request, Server
from benchmarks.hybrid_model import Functions, HybridModel

MODEL = HybridModel(
    layers=2, width=32, heads=4, kv_heads=2, features=16, inner=64, inner_features=16, memory=8, vocabulary=50,
    dtype="float32", page_size=4, chunk=4,
)  # fmt: skip
CAPACITY = Capacity(requests=3, pages=14, pages_per_request=6, prompts=2, prompt_tokens=20, longest=12)
FUNCTIONS = {"ours": hybrid_model.Ours(), "plain JAX": hybrid_model.Plain()}
WEIGHTS = MODEL.make_weights()


# ----------------------------------------------------------------------------------------------------------------------
# The model of one sequence in NumPy. It has no pools: each token is computed from all tokens before it.


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def normalized(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def mamba_block(weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    inner, memory_size, taps = MODEL.inner, MODEL.memory, MODEL.taps
    gate, inputs, steps = np.split(normalized(x) @ weights["into"], [inner, inner + MODEL.channels], axis=-1)
    before = np.concatenate([np.zeros((taps - 1, MODEL.channels)), inputs])
    inputs = silu(
        np.stack([(before[t : t + taps].T * weights["taps"]).sum(-1) for t in range(len(x))]) + weights["bias"]
    )
    steps = np.log1p(np.exp(steps + weights["step"]))
    memory = np.zeros((MODEL.inner_heads, MODEL.inner_features, memory_size))
    outputs = []
    for u, write, read, step in zip(*np.split(inputs, [inner, inner + memory_size], axis=-1), steps, strict=True):
        u = u.reshape(MODEL.inner_heads, -1)
        decay = np.exp(-step * np.exp(weights["log_decay"]))
        memory = decay[:, None, None] * memory + step[:, None, None] * u[:, :, None] * write
        outputs.append((memory @ read + weights["skip"][:, None] * u).reshape(-1))
    return normalized(np.stack(outputs) * silu(gate)) @ weights["out"]


def rotated(x: np.ndarray) -> np.ndarray:
    """Rotates features half of a head apart; x is ``[position, head, feature]``."""
    half = MODEL.features // 2
    angles = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def attention_block(weights: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    q, k, v = (
        (normalized(x) @ weights[name]).reshape(len(x), heads, MODEL.features)
        for name, heads in (("q", MODEL.heads), ("k", MODEL.kv_heads), ("v", MODEL.kv_heads))
    )
    q, k = rotated(q), rotated(k)
    k, v = (np.repeat(part, MODEL.heads // MODEL.kv_heads, axis=1) for part in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(MODEL.features)
    scores = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
    attended = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), v)
    return attended.reshape(len(x), -1) @ weights["o"]


def generated_alone(request: Request) -> list[int]:
    table, layers = jax.tree.map(lambda x: np.asarray(x, np.float64), WEIGHTS)
    tokens = list(request.prompt)
    for _ in range(request.num_new):
        x = table[tokens]
        for weights in layers:
            x = x + mamba_block(weights, x)
            x = x + attention_block(weights, x)
        tokens.append(int((table @ normalized(x[-1])).argmax()))
    return tokens[len(request.prompt) :]


# ----------------------------------------------------------------------------------------------------------------------
# Tests.


def random_requests(rng: np.random.Generator, count: int) -> list[Request]:
    """Prompts of all lengths, more than fit at once. Some requests are complete after their prompt."""
    lengths = [1, CAPACITY.longest, *rng.integers(1, CAPACITY.longest + 1, count - 2)]
    return [Request(rng.integers(0, MODEL.vocabulary, n).tolist(), int(rng.integers(1, 10))) for n in lengths]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tokens_are_those_of_each_request_alone(rng: np.random.Generator, name: str) -> None:
    requests = random_requests(rng, 12)
    server = Server(MODEL, CAPACITY, FUNCTIONS[name], WEIGHTS)
    assert server.generate(requests) == [generated_alone(request) for request in requests]
    assert sorted(server._free_pages) == list(range(CAPACITY.pages))
    # Pages and states that other requests have used do not matter.
    assert server.generate(requests[:4]) == [generated_alone(request) for request in requests[:4]]


def test_steps_compile_once(rng: np.random.Generator) -> None:
    class Counting(hybrid_model.Ours):
        """Counts how often JAX traces a layer."""

        decoded = computed = 0

        def convolve_tokens(self, *arguments: Any) -> Any:
            self.decoded += 1
            return super().convolve_tokens(*arguments)

        def convolve_prompts(self, *arguments: Any) -> Any:
            self.computed += 1
            return super().convolve_prompts(*arguments)

    functions = Counting()
    Server(MODEL, CAPACITY, functions, WEIGHTS).generate(random_requests(rng, 6))
    assert functions.decoded == functions.computed == MODEL.layers


@pytest.mark.parametrize("name", FUNCTIONS)
def test_slots_of_no_request_are_not_written(rng: np.random.Generator, name: str) -> None:
    functions: Functions = FUNCTIONS[name]
    before = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), MODEL.make_pools(CAPACITY.pages, CAPACITY.requests)
    )
    page_table = jnp.array([[3, 1], [5, 6]])
    tokens, positions, state_slots = jnp.array([4, 9]), jnp.array([6, 2]), jnp.array([2, -1])
    cu_seqlens = jnp.array([0, 3, 3])  # one prompt, and 5 tokens of padding
    decode = functools.partial(MODEL.decode, functions)
    prefill = functools.partial(MODEL.prefill, functions, longest=CAPACITY.longest)
    decoded, _ = jax.jit(decode)(before, WEIGHTS, tokens, positions, page_table, state_slots)
    computed, _ = jax.jit(prefill)(before, WEIGHTS, jnp.arange(8), cu_seqlens, page_table, state_slots)
    for after, slots in ((decoded, [1 * MODEL.page_size + 2]), (computed, 3 * MODEL.page_size + np.arange(3))):
        for old, new in zip(before, after, strict=True):
            for pool, x, y in zip(old._fields, old, new, strict=True):
                written = np.unique(np.argwhere(np.asarray(x) != np.asarray(y))[:, 0])
                assert written.tolist() == list(slots if pool in ("keys", "values") else [2])


def test_requests_that_do_not_fit() -> None:
    server = Server(MODEL, CAPACITY, FUNCTIONS["ours"], WEIGHTS)
    with pytest.raises(ValueError, match="a prompt must have 1 to 12 tokens, got 13"):
        server.generate([Request([1] * 13, 1)])
    with pytest.raises(ValueError, match="a request must fit in 6 pages, got 8"):
        server.generate([Request([1] * 10, 20)])
