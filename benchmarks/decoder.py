"""Decoding steps of a transformer, with a position for each example and a KV cache that a loop carries.

Benchmarks time them, and tests examine what XLA compiles them to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import Array

import jax_baracuda as jb
from jax_baracuda._examples import rope

Layout = Literal["BSHD", "BHSD"]
Pair = tuple[Array, Array]
"""Keys and values, or queries and keys."""


class Functions(Protocol):
    """The functions that decoding needs."""

    def rotate(self, q: Array, k: Array, positions: Array, layout: Layout) -> Pair:
        """Rotary embedding of one row of each example; `positions` has shape ``[example]``."""

    def append(self, cache: Pair, rows: Pair, positions: Array, layout: Layout) -> Pair:
        """The cache with a row of each example written at its position."""


class Ours:
    """The functions of this package."""

    def rotate(self, q: Array, k: Array, positions: Array, layout: Layout) -> Pair:
        return jb.rope_qk(q, k, positions[:, None], layout=layout)

    def append(self, cache: Pair, rows: Pair, positions: Array, layout: Layout) -> Pair:
        def write(cache: Pair, rows: Pair, position: Array) -> list[Array]:
            return jb.write_slices(cache, rows, _start(position, layout))

        keys, values = jax.vmap(write)(cache, rows, positions)
        return keys, values


class Plain:
    """The same in plain JAX."""

    def rotate(self, q: Array, k: Array, positions: Array, layout: Layout) -> Pair:
        return rope.rope_qk(q, k, positions[:, None], layout=layout)

    def append(self, cache: Pair, rows: Pair, positions: Array, layout: Layout) -> Pair:
        def write(of_example: Array, row: Array, position: Array) -> Array:
            return jax.lax.dynamic_update_slice(of_example, row, _start(position, layout))

        keys, values = (jax.vmap(write)(x, row, positions) for x, row in zip(cache, rows, strict=True))
        return keys, values


def _start(position: Array, layout: Layout) -> tuple[Any, Any, Any]:
    """The start of the window of an example."""
    return (position, 0, 0) if layout == "BSHD" else (0, position, 0)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A transformer with grouped attention."""

    layout: Layout
    """The layout of the cache: ``[example, position, head, feature]`` or ``[example, head, position, feature]``."""
    examples: int
    length: int
    """The positions that the cache holds."""
    heads: int
    kv_heads: int
    features: int
    """The features of a head."""
    layers: int
    steps: int
    dtype: str

    @property
    def width(self) -> int:
        return self.heads * self.features

    def weight_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the weights of a layer."""
        of_cache = self.kv_heads * self.features
        shapes = {"q": self.width, "k": of_cache, "v": of_cache, "o": self.width, "up": 2 * self.width}
        return {name: (self.width, size) for name, size in shapes.items()} | {"down": (2 * self.width, self.width)}

    def cache_shape(self) -> tuple[int, ...]:
        """The shape of the keys of a layer, and of its values."""
        inner = (self.length, self.kv_heads) if self.layout == "BSHD" else (self.kv_heads, self.length)
        return (self.examples, *inner, self.features)

    def make_weights(self) -> list[dict[str, Array]]:
        """Random weights, scaled so that products with them keep the variance."""
        keys = iter(jax.random.split(jax.random.key(0), self.layers * len(self.weight_shapes())))
        return [
            {
                name: (jax.random.normal(next(keys), shape) * shape[0] ** -0.5).astype(self.dtype)
                for name, shape in self.weight_shapes().items()
            }
            for _ in range(self.layers)
        ]

    def make_caches(self) -> list[Pair]:
        """Empty caches. Each is an array of its own, so that all can be donated."""
        return [
            (jnp.zeros(self.cache_shape(), self.dtype), jnp.zeros(self.cache_shape(), self.dtype))
            for _ in range(self.layers)
        ]

    def make_inputs(self) -> tuple[Array, Array]:
        """Embeddings of the tokens of all steps, ``[step, example, width]``, and the position of each example."""
        shape = (self.steps, self.examples, self.width)
        room = self.length - self.steps
        positions = jnp.arange(self.examples, dtype=jnp.int32) * max(room // self.examples, 1) % room
        return jax.random.normal(jax.random.key(1), shape).astype(self.dtype), positions

    def decode(
        self,
        functions: Functions,
        caches: Sequence[Pair],
        weights: Sequence[dict[str, Array]],
        embeddings: Array,
        positions: Array,
    ) -> tuple[list[Pair], Array]:
        """The caches after all steps, and the features of each step, ``[step, example, width]``."""

        def step(carry: tuple[list[Pair], Array], x: Array) -> tuple[tuple[list[Pair], Array], Array]:
            caches, positions = carry
            new_caches = []
            for cache, of_layer in zip(caches, weights, strict=True):
                x, cache = self._layer(functions, of_layer, x, cache, positions)
                new_caches.append(cache)
            return (new_caches, positions + 1), x

        (new_caches, _), outputs = jax.lax.scan(step, (list(caches), positions), embeddings)
        return new_caches, outputs

    def _layer(
        self, functions: Functions, weights: dict[str, Array], x: Array, cache: Pair, positions: Array
    ) -> tuple[Array, Pair]:
        of_row = normalized(x)
        heads_of_row = (1, -1) if self.layout == "BSHD" else (-1, 1)
        q, k, v = (
            (of_row @ weights[name]).reshape(self.examples, *heads_of_row, self.features) for name in ("q", "k", "v")
        )
        q, k = functions.rotate(q, k, positions, self.layout)
        cache = functions.append(cache, (k, v), positions, self.layout)
        x = x + self._attention(q, cache, positions) @ weights["o"]
        return x + jax.nn.silu(normalized(x) @ weights["up"]) @ weights["down"], cache

    def _attention(self, q: Array, cache: Pair, positions: Array) -> Array:
        """Attention of each example's row to the positions up to its own."""
        keys, values = cache
        axes = "bskd" if self.layout == "BSHD" else "bksd"
        q = q.reshape(self.examples, self.kv_heads, -1, self.features)
        scores = jnp.einsum(f"bkgd,{axes}->bkgs", q, keys, preferred_element_type=jnp.float32) * self.features**-0.5
        is_reached = jnp.arange(self.length) <= positions[:, None, None, None]
        weights = jax.nn.softmax(jnp.where(is_reached, scores, -jnp.inf)).astype(self.dtype)
        return jnp.einsum(f"bkgs,{axes}->bkgd", weights, values).reshape(self.examples, self.width)


def normalized(x: Array) -> Array:
    """`x` divided by its root mean square."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
