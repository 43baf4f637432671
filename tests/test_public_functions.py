"""What holds for every public function: under transformations and in batches of any size, values and gradients are
those of the plain call."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, programs
from support.kernels import kernels_in

from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, by_name, value_and_gradient

Arrays = Mapping[str, Any]
Function = Callable[[Arrays], Any]


def last(results: Any) -> Any:
    return jax.tree.map(lambda x: x[-1], results)


def stacked(arrays: Arrays, size: int = 2) -> Arrays:
    return jax.tree.map(lambda x: jnp.stack([x] * size), arrays)


TRANSFORMATIONS: dict[str, Callable[[Function, Function], Function]] = {
    "jit of jit": lambda f, _: jax.jit(lambda x: jax.jit(f)(x)),
    "checkpoint": lambda f, _: jax.checkpoint(f),
    "checkpoint, nothing saveable": lambda f, _: jax.jit(
        jax.checkpoint(f, policy=jax.checkpoint_policies.nothing_saveable)
    ),
    "scan": lambda f, _: lambda x: last(jax.lax.scan(lambda c, x: (c, f(x)), 0, stacked(x))[1]),
    "checkpointed scan": lambda f, _: (
        lambda x: last(jax.lax.scan(jax.checkpoint(lambda c, _: (c, f(x))), 0, None, length=2)[1])
    ),
    "fori_loop": lambda f, zeros: lambda x: jax.lax.fori_loop(0, 2, lambda i, _: f(x), zeros(x)),
    "cond": lambda f, zeros: jax.jit(lambda x: jax.lax.cond(jax.tree.leaves(x)[0].ravel()[0] == 99, zeros, f, x)),
    "switch": lambda f, zeros: lambda x: jax.lax.switch(jnp.int32(1), [zeros, f], x),
}
"""``(function, function of the same results that are zeros) -> transformed function``"""


def batch_of(x: jax.Array, sizes: list[int]) -> jax.Array:
    """Different arrays like this one, along as many batch dimensions."""
    elements = [jnp.roll(x, i, 0) if x.ndim else x + i for i in range(math.prod(sizes))]
    return jnp.stack(elements or [x])[: len(elements)].reshape(*sizes, *x.shape)


def call_of(example: Example) -> Function:
    call = example.call("small")
    return lambda operands: call(**operands)


def with_gradient(example: Example, function: Function) -> Callable[[Arrays], Any]:
    """The function's results and the gradient; the cotangents are small integers."""
    run = value_and_gradient(lambda **operands: function(operands), example.differentiated("float32"))

    def program(operands: Arrays) -> Any:
        types = jax.eval_shape(function, operands)
        return run(operands, jax.tree.map(programs.integers_like, types))

    return program


def exact_operands(rng: np.random.Generator, example: Example) -> Arrays:
    return jax.tree.map(jnp.asarray, programs.exact_operands(rng, example))


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@programs.each_function
def test_transformation(rng: np.random.Generator, example: Example, transformation: str) -> None:
    """Values and gradients are those of the function itself."""
    function, operands = call_of(example), exact_operands(rng, example)

    def zeros(operands: Arrays) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, operands))

    transformed = TRANSFORMATIONS[transformation](function, zeros)
    expected = with_gradient(example, function)(operands)
    programs.assert_same(example, with_gradient(example, transformed)(operands), expected)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@programs.each_function
def test_donated(rng: np.random.Generator, example: Example) -> None:
    """Values and gradients are the same if all operands are donated, or one that is used again. Others keep theirs."""
    program, operands = with_gradient(example, call_of(example)), exact_operands(rng, example)
    before = jax.tree.map(np.array, operands)
    expected = jax.jit(program)(operands)
    programs.assert_same(example, jax.jit(program, donate_argnums=0)(jax.tree.map(jnp.copy, operands)), expected)

    def used_again(donated: Arrays, others: Arrays) -> Any:
        return program({**donated, **others}), jax.tree.map(lambda x: ~x if x.dtype == bool else x + x, donated)

    for name, x in operands.items():
        others = {key: other for key, other in operands.items() if key != name}
        results, doubled = jax.jit(used_again, donate_argnums=0)({name: jnp.copy(x)}, others)
        programs.assert_same(example, results, expected, name)
        cases.assert_same_bits(doubled[name], ~before[name] if x.dtype == bool else before[name] + before[name], name)
    for name, x in operands.items():
        cases.assert_same_bits(x, before[name], name)


@programs.each_function
def test_batches(rng: np.random.Generator, example: Example) -> None:
    """A batch over each operand alone, over all of them, or nested, is one call of each kernel. Its elements are right,
    also if there are none or one."""
    program, operands = with_gradient(example, call_of(example)), exact_operands(rng, example)
    lowered = jax.jit(program).lower(operands)
    kernels, of_one = collections.Counter(kernels_in(lowered.as_text())), lowered.compile()
    names = tuple(operands)
    for mapped in ((names,), *(((name,),) for name in names if len(names) > 1), (names[:1], names[-1:])):
        axes = [{name: 0 if name in of_level else None for name in names} for of_level in mapped]
        nested = functools.reduce(lambda f, axes: jax.vmap(f, (axes,)), axes, program)
        for size in (2,) if len(mapped) > 1 else (0, 1, 3) if names[0] in mapped[0] else (3,):
            front = (size,) * len(mapped)
            batched = {
                name: batch_of(x, [size for of_level in mapped if name in of_level]) for name, x in operands.items()
            }
            lowered = jax.jit(nested).lower(batched)
            if size > 1:
                assert collections.Counter(kernels_in(lowered.as_text())) == kernels, mapped
            results = lowered.compile()(batched)
            assert all(x.shape[: len(front)] == front for x in jax.tree.leaves(results))
            for index in np.ndindex(*front):
                # The last level is the outermost.
                levels = list(zip(mapped, reversed(index), strict=True))
                own = [tuple(i for of_level, i in reversed(levels) if name in of_level) for name in names]
                element = {name: batched[name][at] for name, at in zip(names, own, strict=True)}
                programs.assert_same(
                    example, jax.tree.map(lambda x, i=index: x[i], results), of_one(element), (mapped, index)
                )


@programs.each_function
def test_64_bit_numpy_inputs_with_x64_off(rng: np.random.Generator, example: Example) -> None:
    """With 64-bit types off, 64-bit NumPy inputs become 32-bit arrays, as everywhere in JAX."""
    operands = programs.exact_operands(rng, example)
    wide = {np.dtype(name): f"{name[:-2]}64" for name in ("float32", "int32", "uint32")}
    function = call_of(example)
    with jax.enable_x64(False):
        actual = function({name: x.astype(wide.get(x.dtype, x.dtype)) for name, x in operands.items()})
        expected = function(operands)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        cases.assert_same_bits(got, np.asarray(want))


@programs.each_function
def test_random_keys_are_refused(rng: np.random.Generator, example: Example) -> None:
    operands = programs.exact_operands(rng, example)
    name = next(name for name, operand in example.operands.items() if operand.dtype is None)
    keys = jax.random.split(jax.random.key(0), operands[name].shape)
    with pytest.raises(TypeError, match=rf"^{example.function.__name__}: \S+ must have a numeric dtype, got key"):
        call_of(example)({**operands, name: keys})


OF_A_LIST = "must be an array, got list; jnp.asarray makes one"
REFUSED_LISTS = {
    ("write_rows", "dests"): "rows must be a list or tuple with one entry for each of the",
    ("write_rows", "rows"): "rows must be an array if dests is one, got list",
}
"""The messages for lists of numbers where lists of arrays are allowed, by function and operand."""


@pytest.mark.parametrize("example", all_examples(), ids=lambda example: example.name)
def test_operands_that_are_no_arrays_or_have_wrong_dtypes(rng: np.random.Generator, example: Example) -> None:
    """The error names the function and the operand. Lists of numbers are refused, as in JAX; ids and starts must be
    integers."""
    operands = example.make_operands(rng, "float32", "small")
    function = example.function.__name__.removeprefix("unsorted_")  # an alias

    def refused(name: str, value: Any, error: Any, message: str) -> None:
        with pytest.raises(error, match=rf"{function}: .*{message}"):
            example.call("small")(**{**operands, name: value})

    for name, x in operands.items():
        if x.ndim and example.mapped is None and example.apply is by_name:
            refused(name, x.tolist(), TypeError, REFUSED_LISTS.get((function, name), OF_A_LIST))
        if x.dtype == np.int32:
            for dtype in (np.bool_, np.float32):
                refused(name, x.astype(dtype), TypeError, f"must (have|be) an integer.*{np.dtype(dtype)}")
