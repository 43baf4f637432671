"""Small programs of every public function, with gradients, whose results have the same bits in every run.

They are the functions' examples with small integers as data, so that sums are exact in any order of additions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
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

FIRST_EXAMPLES = {x.function.__name__: x for x in reversed(all_examples())}
"""The simplest example of each public function."""
NOT_OF_INTEGERS = ("segment_softmax", "segment_var", "segment_std")
"""Functions that add up other numbers than their operands, which need not be integers."""

each_function = pytest.mark.parametrize("example", FIRST_EXAMPLES.values(), ids=lambda example: example.name)
"""A test parameter: the simplest example of each public function."""


def differentiable_operands(example: Example) -> list[str]:
    """The operands to differentiate, also those of a public gradient; none if all results are integers."""
    results = jax.tree.leaves(jax.eval_shape(example.call("small"), **example.operand_types("float32", "small")))
    if not any(jnp.issubdtype(y.dtype, jnp.floating) for y in results):
        return []
    return [name for name, operand in example.operands.items() if operand.dtype is None and operand.differentiable]


@contextlib.contextmanager
def plain_jax() -> Iterator[None]:
    """Programs compiled in this context run as plain JAX."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpCall, "unsupported_reason", lambda *_: "plain JAX is asked for")
        yield


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays, and its operands."""

    name: str
    function: Callable[..., Any]
    operands: tuple[np.ndarray, ...]

    def results(self) -> list[np.ndarray]:
        """The results of one call with the kernels."""
        with cases.x64_for(*(x.dtype for x in self.operands)):
            return [np.asarray(x) for x in jax.tree.leaves(jax.jit(self.function)(*self.operands))]

    def expected(self) -> list[np.ndarray]:
        """The results of one call in plain JAX."""
        with plain_jax():
            # A new function, so that JAX traces it again.
            return dataclasses.replace(self, function=lambda *operands: self.function(*operands)).results()


def small_integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(dtype)


def small_floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers whose products and sums are exact in any order."""
    return small_integers(rng, shape, "float32")


def integers_like(x: Any) -> jax.Array:
    """Small integers of a type."""
    return (jax.lax.iota(jnp.int32, x.size) % 5 - 2).reshape(x.shape).astype(x.dtype)


def some_outside(ids: np.ndarray, num_segments: int) -> np.ndarray:
    """The ids, some of them made negative or too large; their order is unchanged."""
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
    """The example with its gradient; the cotangents are small integers."""
    if example.function.__name__.startswith(NOT_OF_INTEGERS):
        example = dataclasses.replace(example, options={**example.options, "deterministic": True})
    operands = exact_operands(rng, example)
    call = example.call("small")
    run = value_and_gradient(call, example.differentiated("float32"))

    def program(*arrays: Any) -> Any:
        given = dict(zip(operands, arrays, strict=True))
        return run(given, jax.tree.map(integers_like, jax.eval_shape(call, **given)))

    return Program(example.name, program, tuple(operands.values()))


def tiny_programs(rng: np.random.Generator) -> list[Program]:
    """A launch-bound program for each example."""
    return [program_of(rng, example) for example in all_examples()]


def sum_of_squares(results: Any) -> jax.Array:
    """Of the finite floating numbers: extrema of empty segments are infinite."""
    floating = (x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating))
    return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0.0) ** 2) for x in floating)


def temp_bytes(function: Callable[..., Any], *operands: Any) -> int:
    """The memory that the compiled program needs beside operands and results."""
    return jax.jit(function).lower(*operands).compile().memory_analysis().temp_size_in_bytes


def copies_of(array: Any, text: str) -> list[str]:
    """The sizes of arrays, as large as this one or larger, that a compiled program copies or transposes."""
    sizes = re.findall(r"= \(?\w+\[([\d,]+)\]\S* (?:[^ (]+ )*(?:copy(?:-start)?|transpose)\(", text)
    return [shape for shape in sizes if math.prod(map(int, shape.split(","))) >= array.size]


def assert_same(example: Example, actual: Any, expected: Any, where: Any = "") -> None:
    """Asserts the same bits on CPUs. On GPUs, XLA may round differently in another program."""
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if cases.PLATFORM == "cpu":
            np.testing.assert_array_equal(got, want, err_msg=str(where))
        else:
            tolerance = max(example.tolerance["float32"])
            scale = np.abs(want, where=np.isfinite(want), out=np.zeros(np.shape(want))).max(initial=1)
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale, err_msg=str(where))
