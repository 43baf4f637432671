"""A language model with Mamba-2 and attention blocks, as a server runs it: a step decodes a token of each request, or
computes ragged prompts. Keys, values and states live in pools.

Benchmarks time its steps, and tests examine what XLA compiles them to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

import jax_baracuda as jb
from benchmarks.decoder import normalized
from jax_baracuda._examples import rope

Pair = tuple[Array, Array]
Weights = dict[str, Array]


class Pools(NamedTuple):
    """The pools of a layer. All are donated to each step."""

    keys: Array
    """``[slot, head, feature]``. A page is a number of adjacent slots."""
    values: Array
    windows: Array
    """The last inputs of the convolution, ``[state slot, channel, taps - 1]``."""
    memories: Array
    """The states of the scan, ``[state slot, head, feature, memory]``."""


class Prompts(NamedTuple):
    """Where the tokens of ragged prompts are."""

    cu_seqlens: Array
    """``[prompt + 1]``: the first token of each prompt, and their total. Tokens after it are padding."""
    of_tokens: Array
    """``[token]``: the prompt of each token. That of padding is out of range."""
    positions: Array
    """``[token]``: positions in the prompt."""
    rows: Array
    """``[prompt, longest]``: the tokens of each prompt, followed by others."""

    @staticmethod
    def of(cu_seqlens: Array, num_tokens: int, longest: int) -> Prompts:
        tokens = jnp.arange(num_tokens)
        of_tokens = jnp.searchsorted(cu_seqlens, tokens, side="right") - 1
        rows = cu_seqlens[:-1, None] + jnp.arange(longest)
        return Prompts(cu_seqlens, of_tokens, tokens - cu_seqlens[of_tokens], jnp.minimum(rows, num_tokens - 1))

    @property
    def lengths(self) -> Array:
        return jnp.diff(self.cu_seqlens)

    def padded(self, of_tokens: Array) -> Array:
        """``[token, ...]`` as ``[prompt, longest, ...]``."""
        return of_tokens[self.rows]

    def flat(self, padded: Array) -> Array:
        """The inverse of :meth:`padded`. Rows of padding are undefined."""
        return padded[self.of_tokens, self.positions]


class Functions(Protocol):
    """The functions that read and write pools. Slots of -1 are those of no request: nothing is written."""

    def rotate_and_append(
        self, q: Array, k: Array, v: Array, keys: Array, values: Array, positions: Array, slots: Array
    ) -> tuple[Array, Array, Array]:
        """The rotated queries, and the pools with the rotated keys and the values of each token, all ``[token, head,
        feature]``."""

    def convolve_prompts(
        self, x: Array, states: Array, weight: Array, bias: Array, prompts: Prompts, slots: Array
    ) -> Pair:
        """Causal convolution of each prompt with SiLU, and the pool with the state of each prompt's end."""

    def convolve_tokens(self, x: Array, states: Array, weight: Array, bias: Array, slots: Array) -> Pair:
        """The same for the next token of each request, and the pool with their new states."""

    def write(self, pool: Array, rows: Array, slots: Array) -> Array:
        """The pool with a row for each slot."""


class Ours:
    """The functions of this package."""

    def rotate_and_append(
        self, q: Array, k: Array, v: Array, keys: Array, values: Array, positions: Array, slots: Array
    ) -> tuple[Array, Array, Array]:
        return jb.rope_write(q, k, v, keys, values, positions, slots, interleaved=False)

    def convolve_prompts(
        self, x: Array, states: Array, weight: Array, bias: Array, prompts: Prompts, slots: Array
    ) -> Pair:
        return jb.causal_conv1d_ragged(
            x, states, weight, bias, activation="silu", cu_seqlens=prompts.cu_seqlens, state_slots=slots,
            has_state=jnp.zeros(slots.shape, bool),
        )  # fmt: skip

    def convolve_tokens(self, x: Array, states: Array, weight: Array, bias: Array, slots: Array) -> Pair:
        return jb.causal_conv1d_update(x, states, weight, bias, activation="silu", state_slots=slots)

    def write(self, pool: Array, rows: Array, slots: Array) -> Array:
        return jb.write_rows(pool, rows, slots)


class Plain:
    """The same in plain JAX."""

    def rotate_and_append(
        self, q: Array, k: Array, v: Array, keys: Array, values: Array, positions: Array, slots: Array
    ) -> tuple[Array, Array, Array]:
        q, k = (x[0] for x in rope.rope_qk(q[None], k[None], positions, interleaved=False, layout="BSHD"))
        return q, self.write(keys, k, slots), self.write(values, v, slots)

    def convolve_prompts(
        self, x: Array, states: Array, weight: Array, bias: Array, prompts: Prompts, slots: Array
    ) -> Pair:
        taps = weight.shape[1]
        inputs = jnp.pad(x, ((taps - 1, 0), (0, 0)))
        y = bias.astype(jnp.float32)
        for k in range(taps):
            is_of_prompt = prompts.positions >= taps - 1 - k
            y += weight[:, k] * jnp.where(is_of_prompt[:, None], inputs[k : k + x.shape[0]], 0).astype(jnp.float32)
        back = jnp.arange(taps - 1, 0, -1)  # the state: the last inputs of each prompt, and zeros before its first one
        windows = x[prompts.cu_seqlens[1:, None] - back]
        windows = jnp.where((prompts.lengths[:, None] >= back)[:, :, None], windows, 0)
        return jax.nn.silu(y).astype(x.dtype), self.write(states, windows.swapaxes(1, 2), slots)

    def convolve_tokens(self, x: Array, states: Array, weight: Array, bias: Array, slots: Array) -> Pair:
        windows = jnp.concatenate([states[slots], x[:, :, None]], axis=-1)
        y = (windows.astype(jnp.float32) * weight).sum(-1) + bias
        return jax.nn.silu(y).astype(x.dtype), self.write(states, windows[:, :, 1:], slots)

    def write(self, pool: Array, rows: Array, slots: Array) -> Array:
        slots = jnp.where(slots < 0, pool.shape[0], slots)  # JAX counts negative indices from the end
        return pool.at[slots].set(rows, mode="drop")


@dataclasses.dataclass(frozen=True)
class HybridModel:
    """Each layer is a Mamba-2 block and a block of grouped attention."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    features: int
    """The features of a head."""
    inner: int
    """The width of a Mamba block."""
    inner_features: int
    """The features of a head of a Mamba block."""
    memory: int
    """The states of each feature of a Mamba block."""
    vocabulary: int
    dtype: str
    page_size: int
    chunk: int
    """The tokens of a chunk of the scan. It divides the number of tokens of a prefill step."""
    taps: int = 4

    @property
    def inner_heads(self) -> int:
        return self.inner // self.inner_features

    @property
    def channels(self) -> int:
        """The channels of the convolution: inputs, writes to the memory and reads of it."""
        return self.inner + 2 * self.memory

    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the matrices of a layer."""
        return {
            "into": (self.width, self.inner + self.channels + self.inner_heads),
            "out": (self.inner, self.width),
            "q": (self.width, self.heads * self.features),
            "k": (self.width, self.kv_heads * self.features),
            "v": (self.width, self.kv_heads * self.features),
            "o": (self.heads * self.features, self.width),
        }

    def make_weights(self) -> tuple[Array, list[Weights]]:
        """The table of tokens, and the weights of each layer: random, and products with them keep the variance."""
        keys = iter(jax.random.split(jax.random.key(0), 1 + 9 * self.layers))

        def normal(*shape: int, scale: float = 1.0) -> Array:
            return (scale * jax.random.normal(next(keys), shape)).astype(self.dtype)

        table = normal(self.vocabulary, self.width, scale=self.width**-0.5)
        return table, [
            {
                **{name: normal(*shape, scale=shape[0] ** -0.5) for name, shape in self.matrix_shapes().items()},
                "taps": normal(self.channels, self.taps, scale=self.taps**-0.5),
                "bias": normal(self.channels, scale=0.1),
                "step": normal(self.inner_heads),
                "log_decay": jnp.log(jnp.linspace(1.0, 8.0, self.inner_heads)),
                "skip": jnp.ones(self.inner_heads),
            }
            for _ in range(self.layers)
        ]

    def make_pools(self, pages: int, state_slots: int) -> list[Pools]:
        """Empty pools. Each is an array of its own, so that all can be donated."""
        cache = (pages * self.page_size, self.kv_heads, self.features)
        windows = (state_slots, self.channels, self.taps - 1)
        memories = (state_slots, self.inner_heads, self.inner_features, self.memory)
        return [
            Pools(*(jnp.zeros(shape, self.dtype) for shape in (cache, cache, windows)), jnp.zeros(memories))
            for _ in range(self.layers)
        ]

    def decode(
        self,
        functions: Functions,
        pools: Sequence[Pools],
        weights: tuple[Array, Sequence[Weights]],
        tokens: Array,
        positions: Array,
        page_table: Array,
        state_slots: Array,
    ) -> tuple[list[Pools], Array]:
        """The next token of each request.

        Args:
          tokens: ``[request]``.
          positions: ``[request]``, those of the tokens.
          page_table: ``[request, page]``, the pages of each request in the pools.
          state_slots: ``[request]``, -1 where there is no request.

        Returns:
          The pools, and the logits of the token that follows, ``[request, vocabulary]``.
        """
        table, of_layers = weights
        slots = self._slots(jnp.where(state_slots >= 0, positions, -1), page_table)
        x, new_pools = table[tokens], []
        for of_layer, own in zip(of_layers, pools, strict=True):
            gate, inputs, steps = self._into(of_layer, x)
            inputs, windows = functions.convolve_tokens(
                inputs, own.windows, of_layer["taps"], of_layer["bias"], state_slots
            )
            y, memories = self._scan_tokens(of_layer, inputs, steps, own.memories[state_slots])
            x = x + self._gated(y, gate) @ of_layer["out"]
            memories = functions.write(own.memories, memories, state_slots)
            q, k, v = self._queries_keys_values(of_layer, x)
            q, keys, values = functions.rotate_and_append(q, k, v, own.keys, own.values, positions, slots)
            attended = self._attention(q[:, None], keys, values, positions[:, None], page_table)
            x = x + attended[:, 0] @ of_layer["o"]
            new_pools.append(Pools(keys, values, windows, memories))
        return new_pools, self._logits(table, x)

    def prefill(
        self,
        functions: Functions,
        pools: Sequence[Pools],
        weights: tuple[Array, Sequence[Weights]],
        tokens: Array,
        cu_seqlens: Array,
        page_table: Array,
        state_slots: Array,
        longest: int,
    ) -> tuple[list[Pools], Array]:
        """Ragged prompts, all from their first token.

        Args:
          tokens: ``[token]``, the prompts one after another, then padding.
          cu_seqlens: ``[prompt + 1]``, the first token of each prompt, and their total.
          page_table: ``[prompt, page]``, the pages of each prompt in the pools.
          state_slots: ``[prompt]``, -1 where there is no prompt.
          longest: the maximum length of a prompt.

        Returns:
          The pools, and the logits of the token that follows each prompt, ``[prompt, vocabulary]``.
        """
        table, of_layers = weights
        prompts = Prompts.of(cu_seqlens, tokens.shape[0], longest)
        page_table = page_table[:, : -(-longest // self.page_size)]
        is_token = prompts.of_tokens < state_slots.shape[0]
        slots = self._slots(jnp.where(is_token, prompts.positions, -1), page_table[prompts.of_tokens])
        x, new_pools = table[tokens], []
        for of_layer, own in zip(of_layers, pools, strict=True):
            gate, inputs, steps = self._into(of_layer, x)
            inputs, windows = functions.convolve_prompts(
                inputs, own.windows, of_layer["taps"], of_layer["bias"], prompts, state_slots
            )
            y, memories = self._scan_prompts(of_layer, inputs, jnp.where(is_token[:, None], steps, 0), prompts)
            x = x + self._gated(y, gate) @ of_layer["out"]
            memories = functions.write(own.memories, memories, state_slots)
            q, k, v = self._queries_keys_values(of_layer, x)
            q, keys, values = functions.rotate_and_append(q, k, v, own.keys, own.values, prompts.positions, slots)
            attended = self._attention_of_prompts(prompts.padded(q), keys, values, page_table)
            x = x + prompts.flat(attended) @ of_layer["o"]
            new_pools.append(Pools(keys, values, windows, memories))
        return new_pools, self._logits(table, x[cu_seqlens[1:] - 1])

    def _slots(self, positions: Array, page_table: Array) -> Array:
        """The slot of each position, given the pages of its request; -1 for negative positions."""
        pages = jnp.take_along_axis(page_table, positions[:, None] // self.page_size, axis=1)[:, 0]
        return jnp.where(positions >= 0, pages * self.page_size + positions % self.page_size, -1)

    def _into(self, weights: Weights, x: Array) -> tuple[Array, Array, Array]:
        """The gate, the inputs of the convolution, and the time steps of the scan."""
        gate, inputs, steps = jnp.split(
            normalized(x) @ weights["into"], [self.inner, self.inner + self.channels], axis=-1
        )
        return gate, inputs, jax.nn.softplus((steps + weights["step"]).astype(jnp.float32))

    def _of_scan(self, inputs: Array) -> tuple[Array, Array, Array]:
        """The inputs of the scan ``[..., head, feature]``, and its writes and reads ``[..., memory]``."""
        x, write, read = jnp.split(inputs, [self.inner, self.inner + self.memory], axis=-1)
        return x.reshape(*x.shape[:-1], self.inner_heads, self.inner_features), write, read

    def _scan_tokens(self, weights: Weights, inputs: Array, steps: Array, memories: Array) -> Pair:
        """A step of the selective scan for each request, and the new memories."""
        x, write, read = (part.astype(jnp.float32) for part in self._of_scan(inputs))
        decay = jnp.exp(-steps * jnp.exp(weights["log_decay"]))
        scaled = steps[:, :, None] * x
        memories = decay[:, :, None, None] * memories + scaled[:, :, :, None] * write[:, None, None, :]
        y = (memories * read[:, None, None, :]).sum(-1) + weights["skip"][:, None] * x
        return y.reshape(-1, self.inner), memories

    def _scan_prompts(self, weights: Weights, inputs: Array, steps: Array, prompts: Prompts) -> Pair:
        """The selective scan of each prompt, and the memories at their ends.

        As in Mamba-2, a chunk is computed as attention whose weights decay with time, and chunks pass on memories. A
        chunk passes on that of its last prompt. Steps of padding are 0.
        """
        chunks = (-1, self.chunk)
        x, write, read = (part.reshape(*chunks, *part.shape[1:]) for part in self._of_scan(inputs))
        steps = steps.reshape(*chunks, self.inner_heads)
        prompt = prompts.of_tokens.reshape(chunks)
        decayed = jnp.cumsum(-steps * jnp.exp(weights["log_decay"]), axis=1)  # [chunk, token, head], since its start
        scaled = (steps[..., None] * x).astype(x.dtype)

        # Within a chunk.
        is_before = jnp.tril(prompt[:, :, None] == prompt[:, None, :])
        scores = jnp.einsum("cin,cjn->cij", read, write, preferred_element_type=jnp.float32)
        of_heads = decayed.swapaxes(1, 2)
        between = of_heads[:, :, :, None] - of_heads[:, :, None, :]
        mixed = (scores[:, None] * _decay(between, is_before[:, None])).astype(x.dtype)
        y = jnp.einsum("chij,cjhp->cihp", mixed, scaled, preferred_element_type=jnp.float32)

        # From chunk to chunk.
        last = prompt[:, -1]
        until_end = jnp.where((prompt == last[:, None])[..., None], jnp.exp(decayed[:, -1:] - decayed), 0)
        added = _outer_sum(until_end, scaled, write)
        is_same = jnp.tril(last[:, None] == last)
        memories = jnp.einsum("hcd,dhpn->chpn", _decay(_sums_between(decayed[:, -1].T), is_same), added)
        memories = jnp.concatenate([jnp.zeros_like(memories[:1]), memories[:-1]])  # those before each chunk
        continues = prompt == jnp.concatenate([jnp.full(1, -1), last[:-1]])[:, None]
        since_start = jnp.where(continues[..., None], jnp.exp(decayed), 0)
        y += since_start[..., None] * jnp.einsum("cin,chpn->cihp", read, memories.astype(x.dtype))
        y += weights["skip"][:, None] * x

        # At the ends of prompts.
        chunk, token = jnp.divmod(prompts.cu_seqlens[1:] - 1, self.chunk)
        of_end = decayed[chunk, token][:, None]
        is_own = (prompt[chunk] == jnp.arange(chunk.size)[:, None]) & (jnp.arange(self.chunk) <= token[:, None])
        until_end = jnp.where(is_own[..., None], jnp.exp(of_end - decayed[chunk]), 0)
        final = _outer_sum(until_end, scaled[chunk], write[chunk])
        final += since_start[chunk, token][:, :, None, None] * memories[chunk]
        return y.reshape(-1, self.inner).astype(x.dtype), final

    def _gated(self, y: Array, gate: Array) -> Array:
        return normalized(y.astype(gate.dtype) * jax.nn.silu(gate))

    def _queries_keys_values(self, weights: Weights, x: Array) -> list[Array]:
        of_tokens = normalized(x)
        return [(of_tokens @ weights[name]).reshape(x.shape[0], -1, self.features) for name in ("q", "k", "v")]

    def _attention(self, q: Array, keys: Array, values: Array, positions: Array, page_table: Array) -> Array:
        """Attention of each token of a request to the positions up to its own."""
        requests, tokens = positions.shape
        keys, values = self._of_pages(keys, page_table), self._of_pages(values, page_table)
        q = q.reshape(requests, tokens, self.kv_heads, -1, self.features)
        scores = jnp.einsum("rtkgd,rskd->rkgts", q, keys, preferred_element_type=jnp.float32) * self.features**-0.5
        is_reached = jnp.arange(keys.shape[1]) <= positions[:, None, None, :, None]
        weights = jax.nn.softmax(jnp.where(is_reached, scores, -jnp.inf)).astype(values.dtype)
        return jnp.einsum("rkgts,rskd->rtkgd", weights, values).reshape(requests, tokens, -1)

    def _attention_of_prompts(self, q: Array, keys: Array, values: Array, page_table: Array) -> Array:
        """Causal attention in each prompt. GPUs have it as one kernel for 16 bits."""
        keys, values = (self._of_pages(pool, page_table)[:, : q.shape[1]] for pool in (keys, values))
        is_one_kernel = jax.default_backend() == "gpu" and q.dtype.itemsize == 2
        attended = jax.nn.dot_product_attention(
            q, keys, values, is_causal=True, implementation="cudnn" if is_one_kernel else "xla"
        )
        return attended.reshape(*q.shape[:2], -1)

    def _of_pages(self, pool: Array, page_table: Array) -> Array:
        """The pages of each request, ``[request, position, head, feature]``."""
        pages = pool.reshape(-1, self.page_size, self.kv_heads, self.features)[page_table]
        return pages.reshape(page_table.shape[0], -1, self.kv_heads, self.features)

    def _logits(self, table: Array, x: Array) -> Array:
        return jnp.matmul(normalized(x), table.T, preferred_element_type=jnp.float32)


def _decay(exponents: Array, is_kept: Array) -> Array:
    return jnp.exp(jnp.where(is_kept, exponents, -jnp.inf))


def _sums_between(x: Array) -> Array:
    """``sum(x[..., j + 1 : i + 1])`` as ``[..., i, j]`` for j <= i. Differences of longer sums would be less exact."""
    size = x.shape[-1]
    of_rows = jnp.where(jnp.tri(size, k=-1, dtype=bool), x[..., :, None], 0)
    return jnp.cumsum(of_rows, axis=-2)


def _outer_sum(decay: Array, x: Array, write: Array) -> Array:
    """The sum over tokens of ``decay * x * write``, ``[..., head, feature, memory]``."""
    weighted = (decay[..., None] * x).astype(x.dtype)
    return jnp.einsum("cjhp,cjn->chpn", weighted, write, preferred_element_type=jnp.float32)
