"""JAX's strict settings: every public function passes wherever plain JAX passes, with its derivatives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example

# JAX's own derivatives of a few operations fail in these settings: only programs whose plain JAX passes are tested.
IMPLEMENTATIONS = (None, "kernel", "xla")
each_example = pytest.mark.parametrize("example", all_examples(), ids=lambda x: x.name)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@contextlib.contextmanager
def strict_tracing() -> Iterator[None]:
    """The settings that concern what is traced and lowered."""
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.enable_checks(True),
        jax.checking_leaks(),
    ):
        yield


def programs_of(example: Example) -> dict[str, Callable[..., Any]]:
    """``(differentiated operands, other operands) -> results``: the function, its derivatives, and a batch of it."""
    call = example.call("small")
    names = [name for name, x in example.operands.items() if x.differentiable and x.dtype is None]

    def value(chosen: Any, others: Any) -> Any:
        return call(**chosen, **others)

    def loss(chosen: Any, others: Any) -> Any:
        floating = [y for y in jax.tree.leaves(value(chosen, others)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.sum(y * y) for y in floating)

    def gradient(chosen: Any, others: Any) -> Any:
        return jax.grad(loss)(chosen, others)

    def second_gradient(chosen: Any, others: Any) -> Any:
        return jax.grad(lambda chosen: sum(jnp.sum(y * y) for y in gradient(chosen, others).values()))(chosen)

    def tangent_of_gradient(chosen: Any, others: Any) -> Any:
        return jax.jvp(lambda chosen: gradient(chosen, others), (chosen,), (chosen,))

    programs = {"value": value}
    if names and any(jnp.issubdtype(y.dtype, jnp.inexact) for y in jax.tree.leaves(result_types(example))):
        programs |= {
            "gradient": gradient,
            "gradient of gradient": second_gradient,
            "tangent of gradient": tangent_of_gradient,
        }
    return programs


def result_types(example: Example) -> Any:
    return jax.eval_shape(example.call("small"), **example.operand_types("float32", "small"))
