"""The native modules name a strategy for every call. Cases of the matrix reach every strategy of every kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_baracuda._core.native import NATIVE_MODULES
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, value_and_gradient
from jax_baracuda._tools.calls import traced_calls

LOADED = [platform for platform, native in NATIVE_MODULES.items() if native.module is not None]

each_platform = pytest.mark.parametrize("platform", LOADED)


@each_platform
def test_every_op_has_strategies(platform: str) -> None:
    for op, names in NATIVE_MODULES[platform].strategies().items():
        assert names, op
        assert len(set(names)) == len(names), op


@each_platform
@pytest.mark.parametrize("example", all_examples(), ids=lambda example: example.name)
def test_calls_of_public_functions_have_a_strategy(platform: str, example: Example) -> None:
    """Calls with their gradients, alone and mapped over a batch, have a strategy that the native module names."""
    operands = example.make_operands(np.random.default_rng(0), "float32", "check")
    call = example.call("check")
    names = example.differentiated("float32")

    def with_gradient(operands: Any) -> Any:
        return value_and_gradient(call, names)(operands, call(**operands))

    def mapped(operands: Any) -> Any:
        first = next(iter(operands))
        stacked = operands | {first: jnp.stack([operands[first]] * 2)}
        return jax.vmap(with_gradient, [{name: 0 if name == first else None for name in operands}])(stacked)

    strategies = NATIVE_MODULES[platform].strategies()
    count = 0
    for traced in (with_gradient, mapped):
        for one in traced_calls(traced, operands):
            if one.name in strategies and one.unsupported_reason(platform) is None:
                assert one.plan(platform).strategy in strategies[one.name]
                count += 1
    assert count >= 2
