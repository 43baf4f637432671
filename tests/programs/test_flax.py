"""flax: decoding attention that writes its caches with write_slice, and a model that writes both caches at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_baracuda as jb

BATCH, LENGTH, HEADS, KV_HEADS, WIDTH = 3, 12, 4, 2, 32
UPDATE = "jax.lax.dynamic_update_slice"


class AttentionWithOneWrite(nnx.MultiHeadAttention):
    """The same attention, but one call writes both keys and values."""

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = self.query(x), self.key(x), self.value(x)
        position = self.cache_index[...]
        caches = [self.cached_key[...], self.cached_value[...]]
        keys, values = jb.write_slices(caches, [key, value], (0, position, 0, 0))
        self.cached_key[...], self.cached_value[...], self.cache_index[...] = keys, values, position + 1
        is_written = jnp.arange(keys.shape[1]) <= position
        return self.out(nnx.dot_product_attention(query, keys, values, mask=is_written))


def decoder(module: type[nnx.MultiHeadAttention] = nnx.MultiHeadAttention) -> tuple[Callable[..., Any], Any]:
    """A function from a state and a token to the next state and the token's output; and an initial state."""
    attention = module(HEADS, WIDTH, num_kv_heads=KV_HEADS, decode=True, rngs=nnx.Rngs(0))
    attention.init_cache((BATCH, LENGTH, WIDTH))
    graph, start = nnx.split(attention)

    def next_token(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        attention = nnx.merge(graph, state)
        output = attention(x[:, None])
        return nnx.state(attention), output

    return next_token, start


def linen_decoder() -> tuple[Callable[..., Any], Any]:
    attention = flax.linen.MultiHeadDotProductAttention(HEADS, decode=True)
    variables = attention.init(jax.random.key(0), jnp.zeros((BATCH, LENGTH, WIDTH)))

    def next_token(variables: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        output, cache = attention.apply(variables, x[:, None], mutable=["cache"])
        return {**variables, **cache}, output

    return next_token, variables


def tokens(rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.normal(size=(LENGTH, BATCH, WIDTH)), jnp.float32)


@pytest.mark.parametrize("decoder", [decoder, linen_decoder], ids=["nnx", "linen"])
def test_decoding_step_by_step(rng: np.random.Generator, decoder: Callable[[], tuple[Callable[..., Any], Any]]) -> None:
    """Outputs and caches after each token are the same."""
    next_token, expected_state = decoder()
    redirect = jb.redirect(slice_updates=True)
    plain, redirected = jax.jit(next_token), redirect(jax.jit(next_token, donate_argnums=0))
    state = jax.tree.map(jnp.copy, expected_state)
    for x in tokens(rng):
        expected_state, expected = plain(expected_state, x)
        state, output = redirected(state, x)
        jax.tree.map(
            lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
            (output, state),
            (expected, expected_state),
        )
    assert redirect.report.redirected == {UPDATE: 2}  # keys and values, in one trace for all tokens


def loss_of_decoding(next_token: Callable[..., Any], state: Any, xs: jax.Array) -> Any:
    """Decodes all tokens in a loop, and differentiates it through the caches."""

    def loss(xs: jax.Array) -> tuple[jax.Array, Any]:
        last, outputs = jax.lax.scan(next_token, state, xs)
        return (outputs**2).sum(), (jax.tree.leaves(last), outputs)

    return jax.value_and_grad(loss, has_aux=True)(xs)


def test_decoding_in_a_loop(rng: np.random.Generator, compare_redirected: Callable[..., Any]) -> None:
    next_token, state = decoder()
    step = functools.partial(loss_of_decoding, next_token)
    compare_redirected("flax.nnx attention, decoding", step, state, tokens(rng), calls=(UPDATE,))


def test_one_write_of_keys_and_values(rng: np.random.Generator, timings: Callable[..., None]) -> None:
    xs, (theirs, start), (ours, own_start) = tokens(rng), decoder(), decoder(AttentionWithOneWrite)
    plain, written_once = (jax.jit(functools.partial(loss_of_decoding, step)) for step in (theirs, ours))
    expected, actual = plain(start, xs), written_once(own_start, xs)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5), actual, expected)
    program = str(jax.make_jaxpr(ours)(own_start, xs[0]))
    assert program.count("baracuda_write_slice") == 1
    assert "dynamic_update_slice" not in program
    timings("flax.nnx attention, one write", lambda: written_once(own_start, xs), lambda: plain(start, xs))
