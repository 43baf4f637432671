"""tunix: decoding with its Llama, which writes a token's keys and values to caches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.llama3 import model as llama3

import jax_baracuda as jb
from benchmarks.clients import Program

SIZE_OF, SIZES = "positions", (32, 1024)
BATCH, TOKENS, WORDS = 4, 16, 1000
CONFIG = llama3.ModelConfig(
    num_layers=4,
    vocab_size=WORDS,
    embed_dim=256,
    hidden_dim=1024,
    num_heads=8,
    head_dim=32,
    num_kv_heads=2,
    rope_theta=500_000,
    norm_eps=1e-5,
)


def our_rope(inputs: jax.Array, positions: jax.Array, head_dim: int, rope_theta: int = 1_000_000) -> jax.Array:
    """Replaces tunix's rotation."""
    return jb.rope(inputs, positions, base=rope_theta, interleaved=False, layout="BSHD")


def with_our_rope() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(llama3, "apply_rope", our_rope)


def program(dtype: Any, length: int) -> Program:
    """Decodes the last tokens that fit into the caches, greedily."""
    graph, state = nnx.split(llama3.Llama3(CONFIG, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)

    def draw(x: jax.Array) -> jax.Array:
        return jnp.asarray(rng.normal(size=x.shape) * x.shape[0] ** -0.5, dtype)

    weights = jax.tree.map(draw, state)
    shape = (BATCH, length, CONFIG.num_kv_heads, CONFIG.head_dim)
    start = length - TOKENS
    caches = {
        f"layer_{i}": {
            "k": jnp.asarray(rng.normal(size=shape), dtype),
            "v": jnp.asarray(rng.normal(size=shape), dtype),
            "end_index": jnp.full(BATCH, start, jnp.int32),
        }
        for i in range(CONFIG.num_layers)
    }

    def decode(weights: Any, caches: Any, first: jax.Array) -> Any:
        def step(carry: Any, position: jax.Array) -> Any:
            caches, tokens = carry
            is_written = jnp.broadcast_to(jnp.arange(length) <= position, (BATCH, 1, length))
            positions = jnp.full((BATCH, 1), position)
            logits, caches = nnx.merge(graph, weights)(tokens[:, None], positions, caches, is_written)
            return (caches, jnp.argmax(logits[:, 0], axis=-1)), logits[:, 0]

        (caches, _), logits = jax.lax.scan(step, (caches, first), jnp.arange(start, length))
        return logits

    exact = dtype == jnp.float32
    return Program(
        decode,
        (weights, caches, jnp.arange(BATCH)),
        rtol=1e-3 if exact else 0.05,
        atol=1e-3 if exact else 0.05,
        edit=with_our_rope,
    )


PROGRAMS: dict[str, Callable[[int], Program]] = {
    "decoding, float32": functools.partial(program, jnp.float32),
    "decoding, bfloat16": functools.partial(program, jnp.bfloat16),
}
