"""Functions with some of their arguments given, and static arguments by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.interpreters import ad


class Params(dict[str, Any]):
    """The static arguments of a call by name, mostly named like the params of an op: a dict that can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def without(self, name: str) -> Params:
        return Params((own, value) for own, value in self.items() if own != name)


def with_named(function: Callable[..., Any], params: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of a definition, given the params that it names."""
    names = keyword_names(function)
    return functools.partial(function, **{name: x for name, x in params.items() if names is None or name in names})


@functools.cache
def keyword_names(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of a function's keyword-only arguments; None if it takes any name."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def resolved(field: Any, params: Mapping[str, Any]) -> Any:
    """The value of a field of a definition: a field that is a function is called with the params that it names."""
    return with_named(field, params)() if callable(field) else field


def with_fixed(function: Callable[..., Any], operands: Sequence[Any], free: Sequence[int]) -> Callable[..., Any]:
    """A function of the operands at the positions `free`, with the others fixed."""

    def of_free(*free_operands: jax.Array) -> Any:
        all_operands = list(operands)
        for i, x in zip(free, free_operands, strict=True):
            all_operands[i] = x
        return function(*all_operands)

    return of_free


def placed(values: Iterable[Any], positions: Iterable[int], size: int) -> list[Any]:
    """A list of this size, with the values at these positions and None elsewhere."""
    by_position = dict(zip(positions, values, strict=True))
    return [by_position.get(i) for i in range(size)]


def jvp_of_nonzero(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """``jax.jvp`` with respect to the primals whose tangents are not symbolic zeros."""
    nonzero = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    return jax.jvp(
        with_fixed(function, primals, nonzero), [primals[i] for i in nonzero], [tangents[i] for i in nonzero]
    )
