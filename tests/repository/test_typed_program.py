"""A user's typed program. It runs here, and in ``make lint`` mypy checks it against the package's signatures."""

from __future__ import annotations

from typing import NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import jax_baracuda as jb


class Parameters(NamedTuple):
    embedding: jax.Array
    filters: jax.Array
    projection: jax.Array


class Cache(NamedTuple):
    keys: jax.Array
    window: jax.Array
    length: jax.Array


def decode(parameters: Parameters, cache: Cache, token: jax.Array) -> tuple[Cache, jax.Array]:
    """One token of a small language model: a convolution, a cache of rotated keys, attention under a mask."""
    x = assert_type(jb.take_rows(parameters.embedding, token[None]), jax.Array)
    x, window = jb.causal_conv1d_update(x, cache.window, parameters.filters, activation="silu")
    inv_freq, scale = jb.rope_frequencies(x.shape[-1], base=1e4)
    key = assert_type(jb.rope(x[None, None], cache.length[None], inv_freq=inv_freq, scale=scale), jax.Array)
    keys = assert_type(jb.write_slice(cache.keys, key[0, 0], (cache.length, 0)), jax.Array)
    is_past = jnp.arange(keys.shape[0]) <= cache.length
    scores = assert_type(jb.where(is_past, x @ keys.T, -1e9), jax.Array)
    return Cache(keys, window, cache.length + 1), jax.nn.softmax(scores) @ keys @ parameters.projection


def aggregate(features: jax.Array, senders: np.ndarray, receivers: np.ndarray) -> jax.Array:
    """The sum, the maximum and the mean over the neighbours of each node."""
    num_nodes = features.shape[0]
    plan = assert_type(jb.segment_plan(receivers, num_nodes, senders, num_nodes), jb.SegmentPlan)
    with jb.implementation("xla"):
        total = jb.segment_sum(features[senders], receivers, num_segments=num_nodes)
    strongest = assert_type(jb.gather_segment_max(features, plan=plan), jax.Array)
    return total + strongest + jb.segment_mean(features[senders], receivers, num_segments=num_nodes)


def test_decoding_is_differentiable() -> None:
    parameters = Parameters(jnp.eye(5, 4), jnp.ones((4, 2)), jnp.eye(4))
    empty = Cache(jnp.zeros((8, 4)), jnp.zeros((1, 4, 1)), jnp.int32(0))

    def loss(parameters: Parameters) -> tuple[jax.Array, Cache]:
        cache, logits = decode(parameters, empty, jnp.int32(1))
        return jnp.sum(logits), cache

    gradient, cache = jax.jit(jax.grad(loss, has_aux=True))(parameters)
    # The first token is rotated by angle 0, and attends only to itself.
    np.testing.assert_allclose(cache.keys[0], jax.nn.silu(parameters.embedding[1]), rtol=1e-6)
    np.testing.assert_allclose(gradient.projection, np.repeat(cache.keys[:1].T, 4, axis=1), rtol=1e-6)


def test_aggregation() -> None:
    features = jnp.asarray([[1.0], [4.0], [2.0]])
    senders, receivers = np.asarray([1, 2, 0, 1]), np.asarray([0, 0, 1, 2])
    result = aggregate(features, senders, receivers)
    np.testing.assert_array_equal(result, [[6 + 4 + 3], [1 + 1 + 1], [4 + 4 + 4]])


def test_return_types_follow_the_options() -> None:
    x, filters = jnp.ones((1, 4, 6)), jnp.ones((4, 2))
    y = assert_type(jb.causal_conv1d(x, filters), jax.Array)
    with_state = assert_type(jb.causal_conv1d(x, filters, return_final_state=True), tuple[jax.Array, jax.Array])
    np.testing.assert_array_equal(with_state[0], y)
    tangent = jax.jvp(lambda x: jb.forward_mode.causal_conv1d(x, filters), (x,), (x,))[1]
    np.testing.assert_array_equal(tangent, y)
