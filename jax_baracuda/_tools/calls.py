"""The calls of ops that a program makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core

from jax_baracuda._core.call import OpCall
from jax_baracuda._core.op import OPS


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program and, after each, those of the programs in it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from equations_of(value)


def traced_calls(function: Callable[..., Any], *operands: Any) -> list[OpCall]:
    """Those that a function makes of operands of these types."""
    ops = {op.primitive: op for op in OPS.values()}
    return [
        OpCall(ops[equation.primitive], [x.aval for x in equation.invars], equation.params)
        for equation in equations_of(jax.make_jaxpr(function)(*operands))
        if equation.primitive in ops
    ]


def calls_and_operands(
    function: Callable[..., Any], *types: Any
) -> tuple[list[OpCall], Callable[..., list[list[jax.Array]]]]:
    """The calls that a function of arrays of these types makes, and a compiled program that runs it.

    The program takes the leaves of the function's arguments, and returns the operands of each call.
    """
    ops = {op.primitive: op for op in OPS.values()}
    closed = jax.make_jaxpr(function)(*types)
    calls: list[OpCall] = []

    def collected(*leaves: jax.Array) -> list[list[jax.Array]]:
        calls.clear()
        arrays: list[list[jax.Array]] = []

        def evaluate(closed: Any, *given: jax.Array) -> list[jax.Array]:
            values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
            values |= dict(zip(closed.jaxpr.invars, given, strict=True))

            def read(atom: Any) -> Any:
                return atom.val if isinstance(atom, jax.extend.core.Literal) else values[atom]

            for equation in closed.jaxpr.eqns:
                operands = [read(x) for x in equation.invars]
                if equation.primitive in ops:
                    calls.append(OpCall(ops[equation.primitive], [x.aval for x in equation.invars], equation.params))
                    arrays.append(operands)
                results: Any
                if "call_jaxpr" in equation.params:  # of a function in both modes
                    results = evaluate(equation.params["call_jaxpr"], *operands)
                else:
                    results = equation.primitive.bind(*operands, **equation.params)
                results = results if equation.primitive.multiple_results else [results]
                values.update(zip(equation.outvars, results, strict=True))
            return [read(x) for x in closed.jaxpr.outvars]

        evaluate(closed, *leaves)
        return arrays

    program = jax.jit(collected).lower(*jax.tree.leaves(types)).compile()
    return calls, program
