"""Selections between arrays in memory: whole, scalar and repeated operands, forward and with the gradients."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_baracuda
from benchmarks.harness import Case, Contender, Effort, JaxContender, TorchContender, torch, with_gradient
from benchmarks.record import FORWARD, OURS, WITH_GRADIENT, XLA

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Shapes of the condition, `a` and `b`; every dtype is a case, forward and with gradient."""

    name: str
    cond: Shape
    a: Shape
    b: Shape
    constant_b: bool = False
    """`b` is the number 0, which has no gradient."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    @property
    def shape(self) -> Shape:
        """The shape of the result, which is the shape of `a`."""
        return self.a

    @property
    def size(self) -> str:
        return f"{self.name}, {' × '.join(map(str, self.shape))}"

    def quick(self) -> Problem:
        """A small version, to see that everything runs."""

        def smaller(shape: Shape) -> Shape:
            return tuple(max(2, size // 256) if size > 64 else size for size in shape)

        return dataclasses.replace(self, cond=smaller(self.cond), a=smaller(self.a), b=smaller(self.b))


def problems(rows: int, columns: int, length: int) -> Iterator[Problem]:
    """Matrices, and masks of attention over sequences of this length."""
    whole = (rows, columns)
    yield Problem("two arrays", whole, whole, whole)
    yield Problem("array and zero", whole, whole, (), constant_b=True)
    yield Problem("rows of two arrays", (rows, 1), whole, whole)
    yield Problem("rows of an array or a vector", (rows, 1), whole, (columns,))
    yield Problem("array and number", whole, whole, ())
    heads = max(1, rows * columns // (length * length))
    scores = (heads, length, length)
    yield Problem("masked scores", (1, length, length), scores, (), constant_b=True)
    odd = length - 1
    yield Problem("masked scores", (1, odd, odd), (heads, odd, odd), (), constant_b=True)


GPU_PROBLEMS = tuple(problems(rows=1 << 19, columns=1 << 10, length=1 << 12))
CPU_PROBLEMS = tuple(problems(rows=1 << 13, columns=1 << 10, length=1 << 10))
EFFORT = Effort(samples=4, seconds_per_sample=0.05, seconds_per_contender=0.25)


def cases(backend: str, quick: bool = False) -> Iterator[Case]:
    """All cases for a kind of device."""
    for problem in GPU_PROBLEMS if backend == "gpu" else CPU_PROBLEMS:
        problem = problem.quick() if quick else problem
        for dtype, what in itertools.product(problem.dtypes, (FORWARD, WITH_GRADIENT)):
            yield Case(
                op="where",
                size=problem.size,
                variant=dtype,
                what=what,
                floor_bytes=floor_bytes(problem, dtype, what),
                make_contenders=functools.partial(contenders, problem, dtype, what),
                tolerance=0.01 if dtype == "bfloat16" else 1e-4,
                effort=EFFORT,
            )


def floor_bytes(problem: Problem, dtype: str, what: str) -> int:
    """Bytes of every operand and result, once each, in the forward and in the backward pass."""
    cond = math.prod(problem.cond)
    whole, a, b = (math.prod(shape) * jnp.dtype(dtype).itemsize for shape in (problem.shape, problem.a, problem.b))
    backward = cond + whole + a + (0 if problem.constant_b else b)
    return cond + a + b + whole + (backward if what == WITH_GRADIENT else 0)


# ----------------------------------------------------------------------------------------------------------------------
# Operands, made on the device. The most recent ones are cached for the next case.


class Operands(NamedTuple):
    cond: jax.Array
    a: jax.Array
    b: jax.Array
    dy: jax.Array


@functools.lru_cache(maxsize=1)
def make_operands(problem: Problem, dtype: str) -> Operands:
    @jax.jit
    def make() -> Operands:
        shapes = (problem.a, problem.b, problem.shape)
        keys = jax.random.split(jax.random.key(0), 4)
        numbers = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys[1:], shapes, strict=True))
        return Operands(jax.random.bernoulli(keys[0], 0.5, problem.cond), *numbers)

    return jax.block_until_ready(make())


# ----------------------------------------------------------------------------------------------------------------------
# Contenders


ADDING_IN_16_BITS = 1e9
"""The tolerance for sums in 16 bits: sums of positive and negative numbers may be arbitrarily wrong."""


def contenders(problem: Problem, dtype: str, what: str) -> Iterator[Contender]:
    """This package, XLA and torch."""
    cond, a, b, dy = make_operands(problem, dtype)
    has_sum = what == WITH_GRADIENT and problem.b != problem.shape and not problem.constant_b
    tolerance = ADDING_IN_16_BITS if has_sum and dtype == "bfloat16" else 0.0
    chosen = (a,) if problem.constant_b else (a, b)
    for library, select in ((OURS, jax_baracuda.where), (XLA, jnp.where)):
        function, operands = _by_choices(select), (*chosen, cond)
        if what == WITH_GRADIENT:
            function, operands = with_gradient(function, len(chosen)), (*operands, dy)
        yield JaxContender(library, "", function, *operands, tolerance=tolerance)
    if torch is None or (jax.default_backend() == "gpu" and not torch.cuda.is_available()):
        return
    torch_cond = torch.from_dlpack(cond.astype(jnp.uint8)).bool()
    operands = [torch.from_dlpack(x) for x in chosen]
    cotangent = None if what == FORWARD else torch.from_dlpack(dy)

    def select(a: Any, b: Any = 0) -> Any:
        return torch.where(torch_cond, a, b)

    yield TorchContender("torch", "where", select, *operands, cotangent=cotangent)


def _by_choices(select: Callable[..., Any]) -> Callable[..., jax.Array]:
    """``(a, cond)`` or ``(a, b, cond)`` -> the selection, between `a` and 0 if there is no `b`."""

    def run(a: jax.Array, *others: jax.Array) -> jax.Array:
        *b, cond = others
        return select(cond, a, *(b or [0]))

    return run
