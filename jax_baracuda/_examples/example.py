"""An example call of a public function, and its parts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Sizes = Mapping[str, int]
"""The sizes of named dimensions."""
Draw = Callable[[np.random.Generator, tuple[int, ...], Sizes], np.ndarray]
"""``(rng, shape, sizes of all dimensions) -> array``, which is cast to the operand's dtype"""
Tolerance = dict[str, tuple[float, float]]
"""The largest allowed error of an element of a value and of a gradient, by dtype."""

EXACT: Tolerance = {"float32": (0, 0), "bfloat16": (0, 0), "float16": (0, 0)}
ROUNDED_ONCE: Tolerance = {"float32": (2e-6, 2e-6), "bfloat16": (4e-3, 4e-3), "float16": (5e-4, 5e-4)}
"""For float32: the effect of another order of sums. For 16 bits: a little more than half of the spacing at 1."""

REPEATED_AFTER = 1_000_003


def repeated(make: Callable[[int], np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """The array ``make(count)``, repeated to fill `shape`: much faster than drawing that many numbers."""
    return np.resize(make(min(math.prod(shape), REPEATED_AFTER)), shape)


def normal(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    """Normally distributed numbers."""
    return repeated(lambda count: rng.standard_normal(count, np.float32), shape)


def integers(low: int, high: int) -> Draw:
    """Integers from `low` to `high` - 1."""
    return lambda rng, shape, sizes: rng.integers(low, high, shape)


def flags(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    """True or False."""
    return repeated(lambda count: rng.random(count) < 0.5, shape)


def distinct_slots(rng: np.random.Generator, shape: tuple[int, ...], sizes: Sizes) -> np.ndarray:
    """Numbers of slots without duplicates, -1 for some."""
    slots = [rng.permutation(sizes["slot"])[: shape[-1]] for _ in range(math.prod(shape[:-1]))]
    return np.where(rng.random(shape) < 0.2, -1, np.reshape(slots, shape))


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array of a call."""

    dims: tuple[str, ...]
    """A name that starts with "1" is a dimension of size 1, which is broadcast."""
    draw: Draw = normal
    dtype: str | None = None
    """None: the dtype under test."""
    differentiable: bool = True
    """Whether it is differentiable if its dtype is floating."""


@dataclasses.dataclass(frozen=True)
class SizeOf:
    """The value of an option, or of an element of one: the size of a dimension."""

    dim: str


def by_name(function: Callable[..., Any], **arguments: Any) -> Any:
    """The plainest call: operands and options are keyword arguments."""
    return function(**arguments)


def of_pairs(
    function: Callable[..., Any], *, keys: Any, values: Any, new_keys: Any, new_values: Any, **others: Any
) -> Any:
    """The call of a function of lists."""
    return function([keys, values], [new_keys, new_values], **others)


@dataclasses.dataclass(frozen=True)
class Example:
    """A call of a public function, and the same call in plain JAX.

    ``check`` verifies it, ``race`` times it, and tests and benchmarks take operands and references from it.
    """

    function: Callable[..., Any]
    plain_jax: Callable[..., Any]
    """Takes the same arguments as `function` and returns the same result."""
    operands: Mapping[str, Operand]
    sizes: Mapping[str, Sizes]
    """The sizes for each use: "small" for launch-bound programs, "check", and for examples that ``race`` times also its
    platforms "cpu" and "cuda"."""
    variant: str = ""
    """How it differs from the first example of the function."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments that are not arrays; sizes are :class:`SizeOf`."""
    apply: Callable[..., Any] = by_name
    """``(function, **operands, **options)``: the call."""
    mapped: str | None = None
    """The dimension that ``jax.vmap`` maps, in front of the other dimensions of each operand."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    tolerance: Tolerance = dataclasses.field(default_factory=lambda: ROUNDED_ONCE)

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.function.__name__, self.variant)))

    @property
    def dims(self) -> set[str]:
        """The dimensions of the operands and options."""
        of_operands = (dim for operand in self.operands.values() for dim in operand.dims)
        of_options = (value.dim for value in jax.tree.leaves(dict(self.options)) if isinstance(value, SizeOf))
        return {*of_operands, *of_options, *filter(None, [self.mapped])}

    def differentiated(self, dtype: str) -> tuple[str, ...]:
        """The names of the operands to differentiate; none if the function is itself a gradient.

        Programs rarely differentiate a gradient again, and compiling its derivative is slow.
        """
        if self.function.__name__.endswith("_backward"):
            return ()
        return tuple(
            name
            for name, operand in self.operands.items()
            if operand.differentiable and jnp.issubdtype(jnp.dtype(operand.dtype or dtype), jnp.floating)
        )

    def operand_types(self, dtype: str, use: str) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the operands, with the sizes for a use."""
        front = () if self.mapped is None else (self.mapped,)
        return {
            name: jax.ShapeDtypeStruct(
                tuple(1 if dim.startswith("1") else self.sizes[use][dim] for dim in (*front, *operand.dims)),
                jnp.dtype(operand.dtype or dtype),
            )
            for name, operand in self.operands.items()
        }

    def make_operands(self, rng: np.random.Generator, dtype: str, use: str) -> dict[str, np.ndarray]:
        """Random operands, with the sizes for a use."""
        return {
            name: self.operands[name].draw(rng, x.shape, self.sizes[use]).astype(x.dtype, copy=False)
            for name, x in self.operand_types(dtype, use).items()
        }

    def call(self, use: str) -> Callable[..., Any]:
        """``(**operands) -> results`` of the function."""
        return self._bound(self.function, use)

    def plain_call(self, use: str) -> Callable[..., Any]:
        """The same in plain JAX."""
        return self._bound(self.plain_jax, use)

    def _bound(self, function: Callable[..., Any], use: str) -> Callable[..., Any]:
        sizes = self.sizes[use]
        options = jax.tree.map(lambda x: sizes[x.dim] if isinstance(x, SizeOf) else x, dict(self.options))
        call = functools.partial(self.apply, function, **options)
        # vmap maps one dictionary, because it would map positional arguments of a partial function over other axes.
        return call if self.mapped is None else lambda **operands: jax.vmap(lambda given: call(**given))(operands)


def value_and_gradient(call: Callable[..., Any], names: Sequence[str]) -> Callable[[Any, Any], tuple[Any, Any]]:
    """``(operands, cotangents of the results) -> (results, cotangents of the operands of these names)``"""

    def run(operands: Mapping[str, Any], cotangents: Any) -> tuple[Any, Any]:
        if not names:
            return call(**operands), {}
        value, vjp = jax.vjp(lambda chosen: call(**{**operands, **chosen}), {name: operands[name] for name in names})
        return value, *vjp(cotangents)

    return run
