"""Bounds on the rounding errors of a program's results, from the number of roundings and the magnitude of its terms.

Results are sums of products. Each rounding multiplies a product by 1 + d with |d| <= u, where u is half an eps. After n
roundings, the relative error of the product is at most n u / (1 - n u). The error of a sum of products is at most this
fraction of the sum of their magnitudes. These magnitudes are the results of the program's majorant: the same program,
applied to magnitudes, with sums in place of differences.
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
"""Primitives that move or select numbers without rounding."""

SUMS = ("add", "add_any", "sub", "reduce_sum", "scatter-add")


def roundings(program: Callable[..., Any], *operands: Any) -> int:
    """The maximum number of roundings of a term in the results of a program in plain JAX.

    A product has the roundings of all its factors plus one; a sum of n terms, those of its terms plus n. Functions such
    as exp, which JAX computes to within an eps, count as two roundings.
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
    """The error of each element is within the bound for `num_roundings` roundings of the terms of its sum."""
    relative = num_roundings * cases.eps_of(dtype) / 2
    error = relative / (1 - relative) * np.asarray(magnitude, np.float64)
    Expected(np.asarray(exact, np.float64), dtype, error).check(actual, where)
