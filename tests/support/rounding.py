"""What rounding may change in the results of a program, from how often its terms are rounded and how large they are.

Results are sums of products. A product that is rounded n times, each time by a factor of 1 + d with |d| <= u, u half an
eps, changes by at most n u / (1 - n u) of itself; a sum of products, by as much of the sum of their magnitudes. These
magnitudes are what the same program makes of magnitudes, with sums in place of differences: its majorant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from support import cases
from support.cases import Expected

EXACT = frozenset(
    "abs broadcast_in_dim concatenate convert_element_type copy gather iota max min neg optimization_barrier pad "
    "reduce_max reshape select_n slice split squeeze stack stop_gradient transpose".split()
)
"""Primitives that move or choose numbers."""

SUMS = ("add", "add_any", "sub", "reduce_sum", "scatter-add")


def roundings(program: Callable[..., Any], *operands: Any) -> int:
    """How often the terms of the results of a program in plain JAX are rounded at the most.

    A product is rounded as often as its factors together, and once more; a sum of n terms, n times more than its terms.
    Functions such as exp, which JAX computes to within an eps, count as two roundings.
    """
    jaxpr = jax.make_jaxpr(program)(*operands).jaxpr
    return max(_of_results(jaxpr, [0] * len(jaxpr.invars)), default=0)


def _of_results(jaxpr: Any, of_operands: Sequence[int]) -> list[int]:
    known = dict(zip(jaxpr.invars, of_operands, strict=True))

    def of(x: Any) -> int:
        return 0 if isinstance(x, Literal) else known.get(x, 0)

    for equation in jaxpr.eqns:
        operands = [of(x) for x in equation.invars]
        inner = next(_programs_in(equation.params), None)
        if inner is None:
            results = [_of_equation(equation, operands)] * len(equation.outvars)
        else:
            results = _of_results(inner, operands)
        known.update(zip(equation.outvars, results, strict=True))
    return [of(x) for x in jaxpr.outvars]


def _programs_in(params: dict[str, Any]) -> Iterator[Any]:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in params:
            yield getattr(params[name], "jaxpr", params[name])


def _of_equation(equation: Any, operands: Sequence[int]) -> int:
    name = equation.primitive.name
    if not cases.is_floating(equation.outvars[0].aval.dtype):
        return 0
    if name in EXACT:
        return max(operands, default=0)
    if name in SUMS:
        terms = math.prod(equation.invars[0].aval.shape) // max(math.prod(equation.outvars[0].aval.shape), 1)
        return max(operands) + (max(terms, 1) if name == "reduce_sum" else len(equation.invars) - 1)
    if name == "integer_pow":
        exponent = abs(equation.params["y"])
        return exponent * operands[0] + exponent
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return sum(operands) + 1 + math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    if name in ("mul", "div"):
        return sum(operands) + 1
    if name in ("exp", "logistic"):
        return operands[0] + 2
    raise NotImplementedError(f"how often is a term rounded in {equation}?")


def assert_within(
    actual: Any, exact: Any, magnitude: Any, num_roundings: int, dtype: Any = np.float64, where: str = ""
) -> None:
    """Each element is right but for so many roundings of the terms that it is the sum of."""
    relative = num_roundings * cases.eps_of(dtype) / 2
    error = relative / (1 - relative) * np.asarray(magnitude, np.float64)
    Expected(np.asarray(exact, np.float64), dtype, error).check(actual, where)
