"""Small programs of every public function, with gradients, whose results are the same bits however often they run.

They are the examples of the functions, of data that are small integers: sums may be added in any order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases

from jax_baracuda._core.call import OpCall
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, value_and_gradient

each_function = pytest.mark.parametrize(
    "example", {x.function.__name__: x for x in reversed(all_examples())}.values(), ids=lambda example: example.name
)
"""A parameter: the plainest example of each public function."""


@contextlib.contextmanager
def plain_jax() -> Iterator[None]:
    """What is compiled in this context runs as plain JAX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpCall, "unsupported_reason", lambda *_: "plain JAX is asked for")
        yield


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays, and arrays for it."""

    name: str
    function: Callable[..., Any]
    operands: tuple[np.ndarray, ...]

    def results(self) -> list[np.ndarray]:
        """Of one call, by the kernels."""
        with cases.x64_for(*(x.dtype for x in self.operands)):
            return [np.asarray(x) for x in jax.tree.leaves(jax.jit(self.function)(*self.operands))]

    def expected(self) -> list[np.ndarray]:
        """Of one call, in plain JAX."""
        with plain_jax():
            # A function that JAX has not traced yet.
            return dataclasses.replace(self, function=lambda *operands: self.function(*operands)).results()


def small_integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(dtype)


def some_outside(ids: np.ndarray, num_segments: int) -> np.ndarray:
    """Ids of which some are negative or too large, in the order that they have."""
    return (ids * (num_segments + 2) // num_segments - 1).astype(ids.dtype)


def exact_operands(rng: np.random.Generator, example: Example) -> dict[str, np.ndarray]:
    operands = example.make_operands(rng, "float32", "small")
    for name, operand in example.operands.items():
        if operand.dtype is None:
            operands[name] = small_integers(rng, operands[name].shape, "float32")
    if example.function.__name__.startswith(("segment_", "unsorted_segment_")):
        operands["segment_ids"] = some_outside(operands["segment_ids"], example.sizes["small"]["segment"])
    return operands


def program_of(rng: np.random.Generator, example: Example) -> Program:
    """The example with its gradient, for cotangents that are small integers."""
    if example.function.__name__.startswith("segment_softmax"):
        example = dataclasses.replace(example, options={**example.options, "deterministic": True})
    operands = exact_operands(rng, example)
    call = example.call("small")
    run = value_and_gradient(call, example.differentiated("float32"))

    def program(*arrays: Any) -> Any:
        given = dict(zip(operands, arrays, strict=True))
        cotangents = jax.tree.map(
            lambda y: (jax.lax.iota(jnp.int32, y.size) % 5 - 2).reshape(y.shape).astype(y.dtype),
            jax.eval_shape(call, **given),
        )
        return run(given, cotangents)

    return Program(example.name, program, tuple(operands.values()))


def tiny_programs(rng: np.random.Generator) -> list[Program]:
    """One of each example, at sizes where a call costs about as much as its launch."""
    return [program_of(rng, example) for example in all_examples()]
