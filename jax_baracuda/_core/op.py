"""The definition of an op."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_baracuda._core import jax_versions
from jax_baracuda._core.call import Dimensions
from jax_baracuda._core.dispatch import Rule
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.native import KERNEL_PLATFORMS
from jax_baracuda._core.primitive import primitives_of
from jax_baracuda._core.selection import current_selection

if TYPE_CHECKING:
    from jax.extend.core import Primitive

Shape = tuple[int, ...]
ShapeAndDtype = tuple[Shape, Any]
NamedDimensions = Mapping[str, Dimensions]
"""The dimensions of each operand or result, by its name and in its order."""


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One native kernel, and what JAX needs to know about it.

    Calling an op binds its primitive: ``results = op(*operands, **params)``, always a list. The functions of a
    definition never see the dimensions that ``vmap`` adds: those are the business of ``_core`` and of the native
    handler, which takes any number of them, so that ``vmap`` is one launch.
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
    """Dimensions of the operands that results lack, so that shards have parts of those results, if they are not among
    those that a call replicates. Or ``(**params)`` -> these."""
    min_shard_sizes: Callable[..., Mapping[str, int]] | None = None
    """``(sizes of the named dimensions, **params)`` -> the least that a device may have of those along which neighbours
    exchange something: split finer, or over axes in another order than the mesh's, they stay whole."""
    shard_program: Callable[..., Sequence[jax.Array]] | None = None
    """``(kernel, axes, *operands, **params)``: the program of one shard; None: the kernel as it is."""
    program: Callable[..., Sequence[jax.Array]] | None = None
    """``(*operands, **params)``: calls of other ops' kernels, for an op that has no native target of its own."""
    program_on_gpu: Callable[..., Callable[..., Sequence[jax.Array]] | None] | None = None
    """``(*operand avals, **params)`` -> the program ``(*operands)`` of kernels that a call becomes on GPUs, such as one
    of other params after an op that prepares its operands, for XLA to share between calls; None: the kernel."""
    shards_reference: bool = False
    """Whether plain JAX runs shard by shard, too, in `shard_program`: where XLA's partitioner would gather operands."""
    xla_rules: tuple[Rule, ...] = ()
    """Where plain JAX is faster than the kernel."""
    limit: Callable[..., str | None] | None = None
    """``(*operand avals, **params)`` -> why the kernel does not support these shapes or params, or None."""
    in_place: Mapping[int, int] | Callable[..., Mapping[int, int]] = dataclasses.field(default_factory=dict)
    """{operand number: number of the result that may be written to its memory}, where both have one shape. An operand
    that is used again is copied by XLA first. Or ``(**params)`` -> these."""
    in_place_if_donated: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """As `in_place`, but only where the operand is a donated argument of the compiled program: for results that are as
    fast to write elsewhere, where a copy by XLA would double the time."""
    broadcasts: bool = False
    """Whether operands broadcast against each other along every dimension, as in ``jax.numpy``. What ``vmap`` adds is
    then one dimension more of the same kind, for the functions of the definition and for the handler."""
    first_linear: int = 0
    """See `transpose`."""
    num_linear: int | Callable[..., int] = 1
    """See `transpose`. Or ``(**params)`` -> the number."""
    transpose: Callable[..., Sequence[jax.Array]] | None = None
    """For an op that is linear in `num_linear` operands together, from `first_linear` on, where no other has a tangent:
    ``(avals of the linear operands, cotangents of the results, *other operands, **params) -> their cotangents``.

    Then derivatives are calls of kernels too: the tangent is the op of the tangent.
    """
    tangent: Callable[..., Sequence[jax.Array]] | None = None
    """``(tangent of the first operand, operands, results, **params)`` -> the tangents of the results, where no other
    operand has one and the results tell more than the reference; those of integers are ignored."""

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
        if self.program is None:
            _register(self)

    def __call__(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        selection = current_selection()
        if selection is not None:
            params["implementation"] = selection
        return self.primitive.bind(*jax_versions.unify_varying(*operands), **params)

    def kernel(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        """The kernel alone, without derivatives and sharding: for the shard programs of other ops."""
        return self._primitives[1].bind(*operands, **params)

    @property
    def primitive(self) -> Primitive:
        return self._primitives[0]

    @functools.cached_property
    def _primitives(self) -> tuple[Primitive, Primitive]:
        return primitives_of(self)


OPS: dict[str, Op] = {}
"""The op of each native target, by the target's name."""


def _register(op: Op) -> None:
    for target in op.targets:
        if target in OPS:
            raise ValueError(f"Op {target} is defined twice")
        OPS[target] = op


def precision_guarantee(
    name: str, dtype: Any, platform: str, *, deterministic: bool = False, indices_are_sorted: bool = False
) -> Guarantee:
    """What an op promises about its numbers.

    Args:
      name: the name of an op, as ``python -m jax_baracuda report`` lists them: "segment_max", "segment_max_backward",
        ... Functions that are made of other ones, such as `segment_attention`, have the guarantees of those.
      dtype: the element type.
      platform: "cpu" or "cuda".
      deterministic: whether the function is called with ``deterministic=True``.
      indices_are_sorted: whether it is called with ``indices_are_sorted=True``.

    Returns:
      A record with ``accumulator`` (the dtype in which terms are combined, "none" for pure selection),
      ``math_precision`` ("exact", "rounded once", "faithful" or "accumulated"), ``deterministic`` (independent of
      thread scheduling) and ``bit_stable_on_same_hardware``.

    Raises:
      ValueError: there is no such op, or it has no kernel for this dtype or platform. What runs then is XLA's, and its
        guarantees are XLA's.

    Example:
      >>> import jax_baracuda as jb
      >>> promise = jb.precision_guarantee("segment_sum", "bfloat16", "cpu")
      >>> print(promise.accumulator, promise.deterministic)
      float32 True
    """
    by_name = OPS | {alias: op for op in OPS.values() for alias in op.aliases}
    op = by_name.get(name)
    if op is None:
        raise ValueError(f"precision_guarantee: name must be one of {sorted(by_name)}, got {name!r}")
    if platform not in KERNEL_PLATFORMS:
        raise ValueError(f"precision_guarantee: platform must be one of {KERNEL_PLATFORMS}, got {platform!r}")
    try:
        dtype_name = jnp.dtype(dtype).name
    except TypeError:
        dtype_name = str(dtype)
    if dtype_name not in op.dtypes:
        raise ValueError(f"precision_guarantee: {name} has kernels for dtype {sorted(op.dtypes)}, got {dtype_name!r}")
    if isinstance(op.guarantee, Guarantee):
        return op.guarantee
    return op.guarantee(dtype_name, platform, deterministic=deterministic, indices_are_sorted=indices_are_sorted)
