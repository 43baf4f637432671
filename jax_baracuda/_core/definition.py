"""The definition of an op: pure data."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jax_baracuda._core.dispatch import Rule
from jax_baracuda._core.guarantees import Guarantee

Shape = tuple[int, ...]
ShapeAndDtype = tuple[Shape, Any]
Dimensions = tuple[str, ...]
"""The names of an array's dimensions. A last name "..." stands for any number of trailing dimensions."""
NamedDimensions = Mapping[str, Dimensions]
"""The dimensions of each operand or result, by name and in order."""


def with_named(function: Callable[..., Any], params: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of a definition, given the params that it names."""
    names = _params_of(function)
    return functools.partial(function, **{name: x for name, x in params.items() if names is None or name in names})


@functools.cache
def _params_of(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of a function's keyword-only arguments; None if it takes any name."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True, eq=False)
class OpDefinition:
    """One native kernel, and what JAX needs to know about it.

    Each function of a definition takes the params that it needs as keyword-only arguments. It never sees the dimensions
    that ``vmap`` adds: ``_core`` and the native handler deal with them. The handler takes any number of them, so
    ``vmap`` is one launch.
    """

    name: str
    """The name of the primitive."""
    operands: NamedDimensions | Callable[..., NamedDimensions]
    """By name and in order; callers may omit trailing ones. Or ``(**params)`` -> these."""
    results: NamedDimensions | Callable[..., NamedDimensions]
    """By name and in order. Or ``(**params)`` -> these."""
    reference: Callable[..., Sequence[jax.Array]]
    """The same computation in plain JAX. It serves calls without a kernel, and derivatives that neither `transpose` nor
    `tangent` gives."""
    dtypes: frozenset[str]
    """The dtypes that the kernel supports, of the first operand and of those in `linear`."""
    guarantee: Guarantee | Callable[..., Guarantee]
    """Or ``(dtype name, platform, *, deterministic, indices_are_sorted) -> Guarantee`` where it depends on these."""
    sizes: Callable[..., Mapping[str, int]] | None = None
    """``(**params)`` -> the sizes of result dimensions that no operand has."""
    result_dtypes: Callable[..., Sequence[Any]] | None = None
    """``(*operand avals, **params)`` -> the dtypes of the results; None: all have the dtype of the first operand."""
    result_types: Callable[..., Sequence[ShapeAndDtype]] | None = None
    """``(*operand avals, **params)`` -> ``[(shape, dtype), ...]``, if named dimensions do not determine the results."""
    targets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """The native targets by name, each with the params of the calls it serves. Empty: one target with the op's name."""
    aliases: tuple[str, ...] = ()
    """Other public functions that return this op's result."""
    attributes: tuple[str, ...] = ()
    """The names of the params that the native handler takes. Tuples of integers, nested or not, become one array."""
    plan_parameters: Callable[..., Mapping[str, int]] | None = None
    """``(*operand avals, **params)`` -> the integers from which the native module chooses a strategy. ``_core`` adds
    the size of the batch as ``batch``, and ``<operand>_is_shared`` for each operand."""
    replicated_dims: tuple[str, ...] | Callable[..., tuple[str, ...]] = ()
    """Dimensions that must not be split over devices. Or ``(**params)`` -> these."""
    reduction_dims: tuple[str, ...] | Callable[..., tuple[str, ...]] = ()
    """Operand dimensions that are summed away. Where one is sharded, each device has a partial result. Or
    ``(**params)`` -> these."""
    min_shard_sizes: Callable[..., Mapping[str, int]] | None = None
    """``(sizes of the named dimensions, **params)`` -> the minimum shard size of dimensions with halo exchange. A
    dimension is replicated if its shards would be smaller, or if its axes are not in the order of the mesh."""
    shard_program: Callable[..., Sequence[jax.Array]] | None = None
    """``(kernel, axes, *operands, **params)``: the program of one shard; None: the kernel as it is. `kernel` is the
    reference if plain JAX serves the call, because XLA's partitioner might gather the operands of the reference."""
    program: Callable[..., Sequence[jax.Array]] | None = None
    """``(*operands, **params)``: calls of other ops' kernels, for an op that has no native target of its own."""
    programs: Mapping[Rule, Callable[..., Sequence[jax.Array]]] = dataclasses.field(default_factory=dict)
    """Programs ``(*operands, **params)`` of several kernels. The first whose rule holds serves in place of the kernel.
    Example: a sort, which XLA shares between calls, then the kernel for sorted rows."""
    xla_rules: tuple[Rule, ...] = ()
    """Where plain JAX is faster than the kernel."""
    limit: Callable[..., str | None] | None = None
    """``(*operand avals, **params)`` -> why these shapes or params are unsupported, or None."""
    in_place: Mapping[int, int] | Callable[..., Mapping[int, int]] = dataclasses.field(default_factory=dict)
    """{position of an operand: position of the result that may alias it}. They alias if their shapes are equal. XLA
    first copies an operand that is used again. Or ``(**params)`` -> these."""
    in_place_if_donated: Mapping[int, int] | Callable[..., Mapping[int, int]] = dataclasses.field(default_factory=dict)
    """Like `in_place`, but only if the operand is a donated argument of the compiled program. For ops that are as fast
    out of place: a copy by XLA would double their time."""
    broadcasts: tuple[str, ...] = ()
    """The operands that broadcast along every dimension, as in ``jax.numpy``. ``vmap`` then adds one more such
    dimension, which the functions of the definition and the handler see like any other."""
    linear: tuple[str, ...] | Callable[..., tuple[str, ...]] = ()
    """The operands in which an op with a `transpose` is jointly linear; empty: the first. Or ``(**params)`` ->
    these."""
    transpose: Callable[..., Sequence[jax.Array]] | None = None
    """``(avals of the linear operands, cotangents of the results, *other operands, **params)`` -> the cotangents of the
    linear operands. If no other operand has a tangent, derivatives then run kernels: the result's tangent is the op
    applied to the operands' tangents."""
    tangent: Callable[..., Sequence[jax.Array]] | None = None
    """``(tangent of the first operand, operands, results, **params)`` -> the tangents of the results, if no other
    operand has a tangent. Use when the tangent follows from the results. Integer results have none."""

    def __post_init__(self) -> None:
        named = [of for of in (self.operands, self.results) if not callable(of)]
        listed = [of for of in (self.replicated_dims, self.reduction_dims) if not callable(of)]
        if len(named) == len(listed) == 2:
            dimensions = {d for of in named for names in of.values() for d in names}
            for name in itertools.chain(*listed):
                if name not in dimensions:
                    raise ValueError(f"Op {self.name}: {name!r} is no dimension of an operand or a result")
        if not self.targets:
            object.__setattr__(self, "targets", {self.name: {}})
