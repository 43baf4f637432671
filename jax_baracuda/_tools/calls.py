"""The calls of ops that a program makes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_baracuda._core.call import OpCall
from jax_baracuda._core.op import OPS, Op


def traced_calls(function: Callable[..., Any], *operands: Any) -> list[OpCall]:
    """Those that a function makes of operands of these types."""
    ops = {op.primitive: op for op in OPS.values()}

    def calls_in(jaxpr: Any) -> Iterator[OpCall]:
        for equation in jaxpr.eqns:
            if equation.primitive in ops:
                yield OpCall(ops[equation.primitive], [x.aval for x in equation.invars], equation.params)
            for value in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(value, "eqns"):
                    yield from calls_in(value)

    return list(calls_in(jax.make_jaxpr(function)(*operands)))


def run_calls(function: Callable[..., Any], *operands: Any) -> list[tuple[OpCall, list[jax.Array]]]:
    """Runs a function outside of ``jax.jit``; returns the calls that it makes, and their operands."""
    calls: list[tuple[OpCall, list[jax.Array]]] = []

    def recorded(op: Op, run: Callable[..., Any], *operands: jax.Array, **params: Any) -> Any:
        calls.append((OpCall(op, [jax.typeof(x) for x in operands], params), list(operands)))
        return run(*operands, **params)

    with contextlib.ExitStack() as stack:
        for op in OPS.values():
            stack.callback(op.primitive.def_impl, op.primitive.impl)
            op.primitive.def_impl(functools.partial(recorded, op, op.primitive.impl))
        function(*operands)
    return calls
