"""Convolutions with states in a pool, as servers run them: prefill of ragged batches, and steps of decoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_baracuda
from benchmarks.harness import BRIEF, Case, Contender
from benchmarks.record import FORWARD, OURS, XLA
from benchmarks.write_slice import InPlaceContender
from jax_baracuda._examples import causal_conv1d as plain_jax

WIDTH = 4


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A ragged batch whose sequences all begin with a state."""

    tokens: int
    channels: int
    sequences: int
    slots: int
    dtype: str = "bfloat16"
    op = "causal_conv1d_ragged"
    steps = 8

    @property
    def size(self) -> str:
        return f"{self.tokens} × {self.channels}, {self.sequences} sequences"

    @property
    def step_bytes(self) -> int:
        numbers = self.channels * (2 * self.tokens + 2 * self.sequences * (WIDTH - 1) + WIDTH + 1)
        return numbers * jnp.dtype(self.dtype).itemsize

    def quick(self) -> Prefill:
        """A small version, to see that everything runs."""
        return dataclasses.replace(self, tokens=256, channels=64, sequences=4, slots=8)

    def operands(self, rng: np.random.Generator) -> tuple[Any, ...]:
        x = jnp.asarray(rng.standard_normal((self.tokens, self.channels), np.float32), self.dtype)
        inner = np.sort(rng.choice(np.arange(1, self.tokens), self.sequences - 1, replace=False))
        cu_seqlens = jnp.asarray(np.concatenate([[0], inner, [self.tokens]]), jnp.int32)
        return x, cu_seqlens, jnp.ones(self.sequences, bool)

    @staticmethod
    def call(module: Any, states: Any, parameters: Any, slots: Any, x: Any, cu_seqlens: Any, has_state: Any) -> Any:
        options = {"cu_seqlens": cu_seqlens, "state_slots": slots, "has_state": has_state, "activation": "silu"}
        return module.causal_conv1d_ragged(x, states, *parameters, **options)


@dataclasses.dataclass(frozen=True)
class Decode:
    """One new input for each sequence."""

    sequences: int
    channels: int
    slots: int
    dtype: str = "bfloat16"
    op = "causal_conv1d_update with a pool"
    steps = 100

    @property
    def size(self) -> str:
        return f"{self.sequences} × {self.channels}, pool of {self.slots}"

    @property
    def step_bytes(self) -> int:
        return self.channels * (self.sequences * 2 * WIDTH + WIDTH + 1) * jnp.dtype(self.dtype).itemsize

    def quick(self) -> Decode:
        """A small version, to see that everything runs."""
        return dataclasses.replace(self, sequences=4, channels=64, slots=16)

    def operands(self, rng: np.random.Generator) -> tuple[Any, ...]:
        return (jnp.asarray(rng.standard_normal((self.sequences, self.channels), np.float32), self.dtype),)

    @staticmethod
    def call(module: Any, states: Any, parameters: Any, slots: Any, x: Any) -> Any:
        update = getattr(module, "causal_conv1d_update_pool", jax_baracuda.causal_conv1d_update)
        return update(x, states, *parameters, state_slots=slots, activation="silu")


GPU_PROBLEMS = (Prefill(65_536, 4096, 64, 512), Prefill(8192, 4096, 16, 512), Decode(256, 8192, 4096))
CPU_PROBLEMS = (Prefill(2048, 1024, 8, 64), Decode(16, 2048, 64))


def cases(backend: str, quick: bool = False) -> Iterator[Case]:
    """All cases for a kind of device."""
    for problem in GPU_PROBLEMS if backend == "gpu" else CPU_PROBLEMS:
        problem = problem.quick() if quick else problem
        yield Case(
            op=problem.op,
            size=problem.size,
            variant=problem.dtype,
            what=FORWARD,
            floor_bytes=problem.step_bytes,
            make_contenders=functools.partial(contenders, problem),
            tolerance=0.05,
            effort=BRIEF,
        )


def contenders(problem: Prefill | Decode) -> Iterator[Contender]:
    for library, module in ((OURS, jax_baracuda), (XLA, plain_jax)):
        call: Callable[..., Any] = functools.partial(_loop, functools.partial(problem.call, module), problem)
        yield InPlaceContender(library, "", call, *operands_of(problem), repetitions=problem.steps)


def operands_of(problem: Prefill | Decode) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((problem.channels, WIDTH)) * 0.3, rng.standard_normal(problem.channels)
    parameters = jnp.asarray(weight, jnp.float32), jnp.asarray(bias, jnp.float32)
    states = jnp.zeros((problem.slots, problem.channels, WIDTH - 1), problem.dtype)
    slots = jnp.asarray(rng.permutation(problem.slots)[: problem.sequences], jnp.int32)
    x, *others = problem.operands(rng)
    return (states, x), parameters, slots, *others


def _loop(
    call: Callable[..., Any],
    problem: Prefill | Decode,
    states_and_x: tuple[jax.Array, jax.Array],
    parameters: Any,
    slots: jax.Array,
    *others: Any,
) -> tuple[jax.Array, jax.Array]:
    """Each step takes other slots, and the result of the step before as its inputs."""

    def step(_: Any, carry: Any) -> Any:
        (states, x), slots = carry
        y, states = call(states, parameters, slots, x, *others)
        return (states, y.astype(x.dtype)), (slots + problem.sequences) % problem.slots

    return lax.fori_loop(0, problem.steps, step, (states_and_x, slots))[0]
