"""Continuous batching of a hybrid model whose keys, values and states live in pools: the time of a step.

A decode step computes a token of each request in flight, a prefill step ragged prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.continuous_batching import Capacity
from benchmarks.harness import Case, Contender, Effort, JaxContender
from benchmarks.hybrid_model import Functions, HybridModel, Ours, Plain, Pools
from benchmarks.record import FORWARD, OURS, PROGRAMS, XLA


@dataclasses.dataclass(frozen=True)
class Serving:
    """A model, and the sizes of its server."""

    model: HybridModel
    capacity: Capacity
    steps: int
    """The decode steps in a loop inside ``jax.jit``, because on GPUs a step is as short as its launch from Python."""

    @property
    def variant(self) -> str:
        model = self.model
        heads = f"{model.heads}/{model.kv_heads} heads × {model.features}"
        return f"{model.layers} layers of {model.width}, {heads}, {model.dtype}, a step"


GPU_MODEL = HybridModel(
    layers=4, width=1024, heads=16, kv_heads=4, features=128, inner=2048, inner_features=64, memory=16,
    vocabulary=32_000, dtype="bfloat16", page_size=16, chunk=64,
)  # fmt: skip
CPU_MODEL = HybridModel(
    layers=2, width=256, heads=8, kv_heads=2, features=32, inner=512, inner_features=32, memory=16, vocabulary=1000,
    dtype="float32", page_size=16, chunk=32,
)  # fmt: skip
QUICK_MODEL = HybridModel(
    layers=1, width=32, heads=4, kv_heads=2, features=16, inner=64, inner_features=16, memory=8, vocabulary=50,
    dtype="float32", page_size=4, chunk=4,
)  # fmt: skip
GPU_SERVINGS = tuple(
    Serving(
        GPU_MODEL,
        Capacity(requests, 4096, pages_per_request, prompts=64, prompt_tokens=8192, longest=256),
        steps=64,
    )
    for requests, pages_per_request in ((64, 32), (256, 16))
)
CPU_SERVINGS = (
    Serving(CPU_MODEL, Capacity(8, 128, pages_per_request=16, prompts=4, prompt_tokens=256, longest=128), steps=16),
)
QUICK_SERVINGS = (
    Serving(QUICK_MODEL, Capacity(3, 24, pages_per_request=8, prompts=2, prompt_tokens=20, longest=16), steps=2),
)


def cases(backend: str, quick: bool = False) -> Iterator[Case]:
    """Decode steps for each number of requests in flight, and a prefill step."""
    servings = QUICK_SERVINGS if quick else GPU_SERVINGS if backend == "gpu" else CPU_SERVINGS
    for serving in servings:
        capacity, page_size = serving.capacity, serving.model.page_size
        size = f"decode {capacity.requests} requests of up to {capacity.pages_per_request * page_size} tokens"
        yield _case(serving, size, decode_bytes(serving), decode_contenders)
    capacity = servings[0].capacity
    size = f"prefill {capacity.prompts} prompts, {capacity.prompt_tokens} tokens"
    yield _case(servings[0], size, prefill_bytes(servings[0]), prefill_contenders)


def _case(serving: Serving, size: str, floor_bytes: int, contenders: Any) -> Case:
    return Case(
        op=PROGRAMS,
        size=f"serving, {size}",
        variant=serving.variant,
        what=FORWARD,
        floor_bytes=floor_bytes,
        make_contenders=functools.partial(contenders, serving),
        tolerance=2e-2,  # Features are rounded to 16 bits in each layer.
        effort=Effort(seconds_per_contender=2.0),  # a call is many steps
    )


def weight_bytes(model: HybridModel) -> int:
    weights = model.layers * sum(map(math.prod, model.matrix_shapes().values())) + model.vocabulary * model.width
    return weights * jnp.dtype(model.dtype).itemsize


def pool_bytes(model: HybridModel, pages: int, states: int) -> int:
    """The bytes of some pages and states."""
    pools = jax.eval_shape(functools.partial(model.make_pools, pages, states))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools))


def decode_bytes(serving: Serving) -> int:
    """The weights, all pages of each request, and its states, read and written."""
    requests, pages = serving.capacity.requests, serving.capacity.pages_per_request
    states = pool_bytes(serving.model, 0, requests)
    return weight_bytes(serving.model) + pool_bytes(serving.model, requests * pages, 0) + 2 * states


def prefill_bytes(serving: Serving) -> int:
    """The weights, and the written keys, values and states."""
    capacity, model = serving.capacity, serving.model
    return weight_bytes(model) + pool_bytes(model, capacity.prompt_tokens // model.page_size, capacity.prompts)


# ----------------------------------------------------------------------------------------------------------------------
# Contenders. All requests have pages of their own, in random order, as after many have joined and left.


def decode_contenders(serving: Serving) -> Iterator[Contender]:
    rng = np.random.default_rng(0)
    capacity, model = serving.capacity, serving.model
    tokens = rng.integers(0, model.vocabulary, (serving.steps, capacity.requests))
    longest = capacity.pages_per_request * model.page_size - serving.steps
    positions = rng.integers(longest // 4, longest + 1, capacity.requests)
    arrays = tokens, positions, _page_table(rng, serving, capacity.requests), rng.permutation(capacity.requests)
    return _contenders(serving, decode, serving.steps, *arrays)


def prefill_contenders(serving: Serving) -> Iterator[Contender]:
    rng = np.random.default_rng(0)
    capacity, model = serving.capacity, serving.model
    lengths = capacity.longest * np.arange(1, 2 * capacity.prompts, 2) // (2 * capacity.prompts)
    cu_seqlens = np.cumsum([0, *rng.permutation(lengths)])
    tokens = rng.integers(0, model.vocabulary, capacity.prompt_tokens)
    state_slots = rng.permutation(capacity.requests)[: capacity.prompts]
    arrays = tokens, cu_seqlens, _page_table(rng, serving, capacity.prompts), state_slots
    return _contenders(serving, prefill, 1, *arrays)


def _page_table(rng: np.random.Generator, serving: Serving, requests: int) -> np.ndarray:
    pages = rng.permutation(serving.capacity.pages)[: requests * serving.capacity.pages_per_request]
    return pages.reshape(requests, -1)


def _contenders(serving: Serving, run: Any, repetitions: int, *arrays: np.ndarray) -> Iterator[Contender]:
    """This package and plain JAX."""
    for library, functions in ((OURS, Ours()), (XLA, Plain())):
        model, capacity = serving.model, serving.capacity
        pools: Any = model.make_pools(capacity.pages, capacity.requests)
        weights: Any = model.make_weights()
        operands = (jnp.asarray(x, jnp.int32) for x in arrays)
        yield JaxContender(
            library, "", functools.partial(run, serving, functions), pools, weights, *operands,
            repetitions=repetitions, carries_first=True,
        )  # fmt: skip


def decode(
    serving: Serving,
    functions: Functions,
    pools: list[Pools],
    weights: Any,
    tokens: jax.Array,
    positions: jax.Array,
    page_table: jax.Array,
    state_slots: jax.Array,
) -> tuple[list[Pools], jax.Array]:
    """Decodes ``[step, request]`` tokens. Returns the pools, and the largest logit of each, ``[step, request]``."""

    def step(carry: tuple[list[Pools], jax.Array], tokens: jax.Array) -> Any:
        pools, positions = carry
        pools, logits = serving.model.decode(functions, pools, weights, tokens, positions, page_table, state_slots)
        return (pools, positions + 1), logits.max(-1)

    (pools, _), largest = jax.lax.scan(step, (pools, positions), tokens)
    return pools, largest


def prefill(
    serving: Serving, functions: Functions, pools: list[Pools], weights: Any, *arrays: jax.Array
) -> tuple[list[Pools], jax.Array]:
    """Returns the pools, and the largest logit of each prompt."""
    longest = serving.capacity.longest
    pools, logits = serving.model.prefill(functions, pools, weights, *arrays, longest=longest)
    return pools, logits.max(-1)
