"""JAX's strict settings: every public function and its derivatives pass under them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from support import programs

import jax_baracuda as jb
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example

Arrays = Mapping[str, Any]
each_example = pytest.mark.parametrize("example", all_examples(), ids=lambda x: x.name)


def programs_of(example: Example) -> dict[str, Callable[[Arrays, Arrays], Any]]:
    """``(differentiated operands, other operands) -> results``: second derivatives, which contain the function and its
    gradient, and a batch of gradients. Without derivatives: the function and a batch of it."""

    def value(chosen: Arrays, others: Arrays) -> Any:
        return example.call("small")(**chosen, **others)

    def gradient(chosen: Arrays, others: Arrays) -> Arrays:
        return jax.grad(lambda chosen: programs.sum_of_squares(value(chosen, others)))(chosen)

    def gradient_of_gradient(chosen: Arrays, others: Arrays) -> Arrays:
        return jax.grad(lambda chosen: programs.sum_of_squares(gradient(chosen, others)))(chosen)

    def tangent_of_gradient(chosen: Arrays, others: Arrays) -> Arrays:
        return jax.jvp(lambda chosen: gradient(chosen, others), (chosen,), (chosen,))[1]

    if not programs.differentiable_operands(example):
        return {"value": value, "vmap of value": jax.vmap(value)}
    return {
        "gradient of gradient": gradient_of_gradient,
        "tangent of gradient": tangent_of_gradient,
        "vmap of gradient": jax.vmap(gradient),
    }


def operands_of(
    rng: np.random.Generator, example: Example, program: str, dtype: str = "float32"
) -> tuple[Arrays, Arrays]:
    """The differentiated operands and the others, on a device."""
    operands = example.make_operands(rng, dtype, "small")
    if program.startswith("vmap"):
        operands = {name: np.stack([x, x]) for name, x in operands.items()}
    names = programs.differentiable_operands(example)
    chosen = {name: x for name, x in operands.items() if name in names}
    return jax.device_put((chosen, {name: x for name, x in operands.items() if name not in names}))


@contextlib.contextmanager
def strict_about_programs() -> Iterator[None]:
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.enable_checks(True),
        jax.checking_leaks(),
    ):
        yield


def failures_of(
    rng: np.random.Generator,
    example: Example,
    implementations: Sequence[str | None],
    run: Callable[[Callable[..., Any], tuple[Arrays, Arrays]], Any],
) -> list[str]:
    failures = []
    for name, program in programs_of(example).items():
        operands = operands_of(rng, example, name, "bfloat16")
        for asked_for in implementations:
            try:
                with jb.implementation(asked_for):
                    run(program, operands)
            except Exception as error:  # the other programs still run
                failures.append(f"{name}, implementation={asked_for}: {type(error).__name__}: {str(error)[:300]}")
    return failures


@each_example
def test_ranks_dtypes_and_leaks(rng: np.random.Generator, example: Example) -> None:
    """Tracing and lowering need no implicit promotion, also of 16-bit numbers, and leak no tracer."""

    def lower(program: Callable[..., Any], operands: tuple[Arrays, Arrays]) -> None:
        with strict_about_programs():
            jax.jit(program).lower(*operands)

    # Examples of a function are traced alike, except in plain JAX.
    implementations = (None, "kernel", "xla") if example in programs.FIRST_EXAMPLES.values() else ("xla",)
    assert not (failures := failures_of(rng, example, implementations, lower)), "\n".join(failures)


@programs.each_function
@pytest.mark.parametrize("asked_for", ["kernel", "xla"])
def test_transfers_and_nans(rng: np.random.Generator, example: Example, asked_for: str) -> None:
    """A program transfers nothing, and makes no NaN from finite numbers."""
    all_programs = programs_of(example)
    operands = {name: operands_of(rng, example, name) for name in all_programs}
    call_all = jax.jit(lambda operands: {name: run(*operands[name]) for name, run in all_programs.items()})
    with jb.implementation(asked_for):
        with jax.transfer_guard("disallow"):
            jax.block_until_ready(call_all(operands))
        with jax.debug_nans(True):  # JAX reads the results from the device
            jax.block_until_ready(call_all(operands))


def test_debug_nans_finds_those_of_kernels() -> None:
    """The error names the primitive: eagerly, under jit and vmap, and in a gradient."""
    data, ids = jnp.array([1.0, -jnp.inf, jnp.inf]), jnp.zeros(3, int)
    of_sum = {"eager": jb.segment_sum, "jit": jax.jit(jb.segment_sum, static_argnums=2)}
    with jb.implementation("kernel"), jax.debug_nans(True):
        for function in of_sum.values():
            with pytest.raises(FloatingPointError, match="baracuda_segment_sum"):
                function(data, ids, 2)
        with pytest.raises(FloatingPointError, match="baracuda_segment_sum"):
            jax.vmap(lambda x: jb.segment_sum(x, ids, 2))(jnp.stack([data, data]))
        with pytest.raises(FloatingPointError, match="baracuda_segment_prod"):
            jax.grad(lambda x: jb.segment_prod(x, ids, 2)[0])(jnp.array([1.0, 0.0, jnp.inf]))


def test_automatic_checks_of_checkify_leave_results_alone() -> None:
    """As documented, they see neither NaN nor ids out of range inside our functions. A user's own checks work, and
    results are the same."""
    data, ids = jnp.array([1.0, -jnp.inf, jnp.inf]), jnp.array([0, 0, 0])

    def loss(data: jax.Array, ids: jax.Array) -> jax.Array:
        rows = jb.take_rows(jb.segment_sum(data, ids, 2), ids)
        checkify.check(jnp.all(ids < 7), "ids are too large")
        return jb.segment_max(jb.gather_segment_sum(rows, ids, ids, 3), ids, 2)[0]

    for function in (loss, jax.grad(loss)):
        checked = jax.jit(checkify.checkify(function, errors=checkify.all_checks))
        for own_ids in (ids, ids.at[1].set(5)):
            error, result = checked(data, own_ids)
            assert error.get() is None
            np.testing.assert_array_equal(result, function(data, own_ids))
        assert "ids are too large" in checked(data, ids.at[1].set(7))[0].get()
