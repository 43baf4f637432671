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
"""The names of an array's dimensions; the last one may be "...", any number of trailing dimensions."""
NamedDimensions = Mapping[str, Dimensions]
"""The dimensions of each operand or result, by its name and in its order."""


def with_named(function: Callable[..., Any], params: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of a definition, with those of the params that it names."""
    names = _params_of(function)
    return functools.partial(function, **{name: x for name, x in params.items() if names is None or name in names})


@functools.cache
def _params_of(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of keyword-only arguments; None: any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True, eq=False)
class OpDefinition:
    """One native kernel, and what JAX needs to know about it.

    The functions of a definition take those of the params that they name as keyword-only arguments. They never see the
    dimensions that ``vmap`` adds: those are the business of ``_core`` and of the native handler, which takes any number
    of them, so that ``vmap`` is one launch.
    """

    name: str
    """The name of the primitive."""
    operands: NamedDimensions | Callable[..., NamedDimensions]
    """By name and in order; callers may omit trailing ones. Or ``(**params)`` -> these."""
    results: NamedDimensions | Callable[..., NamedDimensions]
    """By name and in order. Or ``(**params)`` -> these."""
    reference: Callable[..., Sequence[jax.Array]]
    """The same computation in plain JAX: serves what has no kernel, and every derivative of the op."""
    dtypes: frozenset[str]
    """The element types of the first operand for which there is a kernel."""
    guarantee: Guarantee | Callable[..., Guarantee]
    """Or ``(dtype name, platform, *, deterministic, indices_are_sorted) -> Guarantee`` where it depends on these."""
    sizes: Callable[..., Mapping[str, int]] | None = None
    """``(**params)`` -> the sizes of dimensions of the results that no operand has."""
    result_dtypes: Callable[..., Sequence[Any]] | None = None
    """``(*operand avals, **params)`` -> the dtypes of the results; None: all have that of the first operand."""
    result_types: Callable[..., Sequence[ShapeAndDtype]] | None = None
    """``(*operand avals, **params)`` -> ``[(shape, dtype), ...]``, where names and sizes of dimensions do not tell."""
    targets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """The native targets by name, each with the params of the calls that it serves. Empty: one of the op's name."""
    aliases: tuple[str, ...] = ()
    """Other public functions whose result is this op's."""
    attributes: tuple[str, ...] = ()
    """The names of the params that the native handler takes. Tuples of integers, however nested, come as one array."""
    plan_parameters: Callable[..., Mapping[str, int]] | None = None
    """``(*operand avals, **params)`` -> the integers from which the native module decides how the kernel runs. The
    module is also told of the batch: its size as ``batch``, and ``<operand>_is_shared`` of each operand."""
    replicated_dims: tuple[str, ...] | Callable[..., tuple[str, ...]] = ()
    """Dimensions that must not be split over devices. Or ``(**params)`` -> these."""
    reduction_dims: tuple[str, ...] | Callable[..., tuple[str, ...]] = ()
    """Operand dimensions that are summed away. Where one is sharded, each device has a partial result. Or
    ``(**params)`` -> these."""
    min_shard_sizes: Callable[..., Mapping[str, int]] | None = None
    """``(sizes of the named dimensions, **params)`` -> the minimum shard size of dimensions with halo exchange. Smaller
    shards, and those over axes in another order than the mesh's, are replicated."""
    shard_program: Callable[..., Sequence[jax.Array]] | None = None
    """``(kernel, axes, *operands, **params)``: the program of one shard; None: the kernel as it is."""
    program: Callable[..., Sequence[jax.Array]] | None = None
    """``(*operands, **params)``: calls of other ops' kernels, for an op that has no native target of its own."""
    program_on_gpu: Callable[..., Callable[..., Sequence[jax.Array]] | None] | None = None
    """``(*operand avals, **params)`` -> the program ``(*operands)`` of kernels that a call becomes on GPUs, such as a
    sort, which XLA shares between calls, and the kernel of sorted rows; None: the kernel."""
    shards_reference: bool = False
    """Whether plain JAX, too, runs shard by shard in `shard_program`, where XLA's partitioner would gather operands."""
    xla_rules: tuple[Rule, ...] = ()
    """Where plain JAX is faster than the kernel."""
    limit: Callable[..., str | None] | None = None
    """``(*operand avals, **params)`` -> why the kernel does not support these shapes or params, or None."""
    in_place: Mapping[int, int] | Callable[..., Mapping[int, int]] = dataclasses.field(default_factory=dict)
    """{position of an operand: position of the result that may be written to its memory}, where both have one shape.
    XLA first copies an operand that is used again. Or ``(**params)`` -> these."""
    in_place_if_donated: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """As `in_place`, but only where the operand is a donated argument of the compiled program. For ops that are as fast
    out of place, where a copy by XLA would double the time."""
    broadcasts: tuple[str, ...] = ()
    """The operands that broadcast along every dimension, as in ``jax.numpy``. ``vmap`` then adds one more dimension of
    the same kind, for the functions of the definition and for the handler."""
    linear: tuple[str, ...] | Callable[..., tuple[str, ...]] = ()
    """The operands in which an op with a `transpose` is linear together; empty: the first. Or ``(**params)`` ->
    these."""
    transpose: Callable[..., Sequence[jax.Array]] | None = None
    """``(avals of the linear operands, cotangents of the results, *other operands, **params)`` -> the cotangents of the
    linear operands. Where no other operand has a tangent, derivatives are then calls of kernels: the tangent is the op
    of the tangent."""
    tangent: Callable[..., Sequence[jax.Array]] | None = None
    """``(tangent of the first operand, operands, results, **params)`` -> the tangents of the results, where no other
    operand has one. Use when the tangent follows from the results. Integer results have none."""

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
