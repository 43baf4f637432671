"""The calls of ops that a program makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_baracuda._core.call import OpCall
from jax_baracuda._core.op import OPS


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program, each followed by the equations of the programs in it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from equations_of(value)


def traced_calls(function: Callable[..., Any], *operands: Any) -> list[OpCall]:
    """The calls of ops that a function makes for operands of these types."""
    ops = {op.primitive: op for op in OPS.values()}
    return [
        OpCall(ops[equation.primitive], [x.aval for x in equation.invars], equation.params)
        for equation in equations_of(jax.make_jaxpr(function)(*operands))
        if equation.primitive in ops
    ]
