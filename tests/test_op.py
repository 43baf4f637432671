"""Errors in definitions of ops, and ops that are missing in the native modules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases

from jax_baracuda._core import op as op_module
from jax_baracuda._core.arrays import FLOATING_DTYPES
from jax_baracuda._core.guarantees import accumulated
from jax_baracuda._core.native import missing_target
from jax_baracuda._core.op import OPS, Op
from jax_baracuda._core.primitives import define_op


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> dict[str, Op]:
    """A copy of the table of all ops. Definitions of the test are added to it."""
    monkeypatch.setattr(op_module, "OPS", dict(OPS))
    return op_module.OPS


def doubling(name: str, **options: tuple[str, ...]) -> Op:
    dimensions = ("row", "...")
    return define_op(
        name=name,
        operands={"x": dimensions},
        results={"y": dimensions},
        reference=lambda x: (2 * x,),
        dtypes=FLOATING_DTYPES,
        guarantee=accumulated,
        **options,
    )


@pytest.mark.parametrize("option", ["replicated_dims", "reduction_dims"])
def test_dimensions_that_no_array_has(ops: dict[str, Op], option: str) -> None:
    with pytest.raises(ValueError, match="Op double: 'column' is no dimension of an operand or a result"):
        doubling("double", **{option: ("row", "column")})
    assert "double" not in ops


def test_names_are_unique(ops: dict[str, Op]) -> None:
    first = doubling("double")
    with pytest.raises(ValueError, match="Op double is defined twice"):
        dataclasses.replace(first)
    assert ops["double"] is first


def test_op_without_a_native_target_runs_as_plain_jax(ops: dict[str, Op], rng: np.random.Generator) -> None:
    """That happens after an update of the Python files alone."""
    double = doubling("double")
    problem = f"the {cases.PLATFORM} module has no target of this name"
    assert missing_target(cases.PLATFORM, double.name) == problem
    x = rng.normal(size=(3, 4)).astype(np.float32)
    with pytest.warns(RuntimeWarning, match=f"double runs as plain JAX on {cases.PLATFORM}: {problem}"):
        [y] = jax.jit(lambda x: double(x))(jnp.asarray(x))
    np.testing.assert_array_equal(y, 2 * x)
