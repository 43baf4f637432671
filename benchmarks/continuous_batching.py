"""A server with continuous batching: requests join as soon as there is room, and leave when they are complete."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from benchmarks.hybrid_model import Functions, HybridModel, Weights

Step = Callable[..., Any]
"""``(pools, weights, ...) -> (pools, logits)``, or tokens instead of logits."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and the number of tokens to generate."""

    prompt: Sequence[int]
    num_new: int


@dataclasses.dataclass(frozen=True)
class Capacity:
    """The static sizes of a server. The steps compile once for them."""

    requests: int
    """The requests in flight."""
    pages: int
    """The pages of the pools."""
    pages_per_request: int
    prompts: int
    """The prompts of a prefill step."""
    prompt_tokens: int
    """The tokens of a prefill step, all prompts together."""
    longest: int
    """The tokens of the longest prompt."""


@dataclasses.dataclass
class InFlight:
    """A request in flight."""

    number: int
    """Its place among all requests."""
    request: Request
    pages: list[int]
    generated: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.generated) == self.request.num_new

    @property
    def position(self) -> int:
        """The position of the last generated token."""
        return len(self.request.prompt) + len(self.generated) - 1


class Server:
    """Generates greedily. The state slot of a request is its place in the batch."""

    def __init__(
        self, model: HybridModel, capacity: Capacity, functions: Functions, weights: tuple[Array, list[Weights]]
    ):
        self._model, self._capacity, self._weights = model, capacity, weights
        self._pools = model.make_pools(capacity.pages, capacity.requests)
        self._free_pages = list(range(capacity.pages))
        self._in_flight: list[InFlight | None] = [None] * capacity.requests
        prefill = functools.partial(model.prefill, functions, longest=capacity.longest)
        self._decode, self._prefill = (
            jax.jit(greedy(step), donate_argnums=0) for step in (functools.partial(model.decode, functions), prefill)
        )

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """The new tokens of each request."""
        for request in requests:
            self._check(request)
        waiting = collections.deque(enumerate(requests))
        generated: list[list[int]] = [[] for _ in requests]
        while waiting or any(self._in_flight):
            if joined := self._join(waiting):
                self._compute_prompts(joined)
            for slot, own in enumerate(self._in_flight):
                if own is not None and own.is_complete:
                    generated[own.number] = own.generated
                    self._free_pages += own.pages
                    self._in_flight[slot] = None
            if any(self._in_flight):
                self._decode_token()
        return generated

    def _num_pages(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.num_new) // self._model.page_size)

    def _check(self, request: Request) -> None:
        capacity = self._capacity
        if not 0 < len(request.prompt) <= min(capacity.longest, capacity.prompt_tokens):
            raise ValueError(f"a prompt must have 1 to {capacity.longest} tokens, got {len(request.prompt)}")
        if self._num_pages(request) > min(capacity.pages_per_request, capacity.pages):
            raise ValueError(
                f"a request must fit in {capacity.pages_per_request} pages, got {self._num_pages(request)}"
            )

    def _join(self, waiting: collections.deque[tuple[int, Request]]) -> list[int]:
        """Gives slots and pages to the first requests that wait. Returns their slots."""
        joined: list[int] = []
        num_tokens = 0
        free = [slot for slot, own in enumerate(self._in_flight) if own is None]
        while waiting and len(joined) < min(len(free), self._capacity.prompts):
            number, request = waiting[0]
            num_tokens, num_pages = num_tokens + len(request.prompt), self._num_pages(request)
            if num_tokens > self._capacity.prompt_tokens or num_pages > len(self._free_pages):
                break
            waiting.popleft()
            slot = free[len(joined)]
            self._in_flight[slot] = InFlight(number, request, [self._free_pages.pop() for _ in range(num_pages)])
            joined.append(slot)
        return joined

    def _compute_prompts(self, slots: Sequence[int]) -> None:
        capacity = self._capacity
        own = [request for slot in slots if (request := self._in_flight[slot]) is not None]
        tokens = np.zeros(capacity.prompt_tokens, np.int32)
        joined = np.concatenate([np.asarray(x.request.prompt, np.int32) for x in own])
        tokens[: joined.size] = joined
        cu_seqlens = np.full(capacity.prompts + 1, joined.size, np.int32)
        cu_seqlens[: len(own) + 1] = np.cumsum([0, *(len(x.request.prompt) for x in own)])
        state_slots = np.full(capacity.prompts, -1, np.int32)
        state_slots[: len(own)] = slots
        self._step(self._prefill, own, tokens, cu_seqlens, self._page_table(own, capacity.prompts), state_slots)

    def _decode_token(self) -> None:
        size = self._capacity.requests
        tokens, positions = np.zeros((2, size), np.int32)
        state_slots = np.full(size, -1, np.int32)
        for slot, own in enumerate(self._in_flight):
            if own is not None:
                tokens[slot], positions[slot], state_slots[slot] = own.generated[-1], own.position, slot
        self._step(
            self._decode, self._in_flight, tokens, positions, self._page_table(self._in_flight, size), state_slots
        )

    def _page_table(self, requests: Sequence[InFlight | None], size: int) -> np.ndarray:
        table = np.zeros((size, self._capacity.pages_per_request), np.int32)
        for row, own in zip(table, requests, strict=False):
            if own is not None:
                row[: len(own.pages)] = own.pages
        return table

    def _step(self, step: Step, requests: Sequence[InFlight | None], *arrays: np.ndarray) -> None:
        """Runs a step, and appends a token to each request."""
        self._pools, tokens = step(self._pools, self._weights, *arrays)
        for own, token in zip(requests, np.asarray(tokens).tolist(), strict=False):
            if own is not None:
                own.generated.append(token)


def greedy(step: Step) -> Step:
    """The step that returns the most likely tokens instead of logits."""

    def run(*operands: Any) -> tuple[Any, Array]:
        pools, logits = step(*operands)
        return pools, logits.argmax(-1)

    return run
