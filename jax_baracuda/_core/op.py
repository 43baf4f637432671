"""Ops: what JAX needs to know about each native kernel."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_baracuda._core import jax_versions
from jax_baracuda._core.functions import resolved, with_named
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.native import KERNEL_PLATFORMS, target_name
from jax_baracuda._core.rules import Rule
from jax_baracuda._core.selection import KERNEL_IF_ANY, current_selection

if TYPE_CHECKING:
    from jax.extend.core import Primitive

Shape = tuple[int, ...]
ShapeAndDtype = tuple[Shape, Any]
Dimensions = tuple[str, ...]
"""The names of an array's dimensions. A last name "..." stands for any number of trailing dimensions."""
NamedDimensions = Mapping[str, Dimensions]
"""The dimensions of each operand or result, by name and in order."""
Transpose = Callable[..., Sequence[jax.Array | None]]
"""``(avals of the linear operands, cotangents of the results, *other operands, **params)`` -> the cotangents of the
linear operands, None for those without."""
Transposes = Mapping[tuple[str, ...], Transpose]

T = TypeVar("T")
OfParams: TypeAlias = T | Callable[..., T]
"""A field of a definition: its value, or a function ``(**params)`` -> the value."""


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One native kernel, and what JAX needs to know about it.

    Each function of a definition takes the params that it needs as keyword-only arguments, and as `sizes` those of the
    named dimensions. It never sees the dimensions that ``vmap`` adds: ``_core`` and the native handler deal with them.
    The handler takes any number of them, so ``vmap`` is one launch.
    """

    name: str
    """The name of the primitive."""
    operands: OfParams[NamedDimensions]
    """By name and in order. A call may lack the `optional` ones: callers pass None or omit trailing ones, and the
    functions of the definition get None."""
    results: OfParams[NamedDimensions]
    """By name and in order."""
    reference: Callable[..., Sequence[jax.Array]]
    """The same computation in plain JAX. It serves calls without a kernel, and derivatives that neither `transposes`
    nor `tangent` gives."""
    dtypes: OfParams[frozenset[str]]
    """The dtypes that the kernel supports, of the first operand and of those in `transposes`."""
    guarantee: Guarantee | Callable[..., Guarantee]
    """Or ``(dtype name, platform, *, deterministic, indices_are_sorted) -> Guarantee`` where it depends on these."""
    optional: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """{operand that a call may lack: the param that says whether the call has it}. Callers need not pass this param."""
    optional_results: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """{result that a call may lack: the param that says whether the call has it}. JAX drops unused ones."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The params that callers may omit, and their values."""
    result_sizes: OfParams[Mapping[str, int]] = dataclasses.field(default_factory=dict)
    """The sizes of dimensions that no operand has."""
    result_dtypes: Callable[..., Sequence[Any]] | None = None
    """``(*operand avals, **params)`` -> the dtypes of the results; None: all have the dtype of the first operand."""
    result_types: Callable[..., Sequence[ShapeAndDtype]] | None = None
    """``(*operand avals, **params)`` -> ``[(shape, dtype), ...]``, if named dimensions do not determine the results."""
    targets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """The native targets by name, each with the params of the calls it serves. Empty: one target with the op's name."""
    aliases: tuple[str, ...] = ()
    """Other public functions that return this op's result."""
    attributes: OfParams[tuple[str, ...]] = ()
    """The names of the params that the native handler takes. Tuples of integers, nested or not, become one array."""
    plan_parameters: Callable[..., Mapping[str, int]] | None = None
    """``(*operand avals, **params)`` -> the integers from which the native module chooses a strategy. ``_core`` adds
    the size of the batch as ``batch``, and ``<operand>_is_shared`` for each operand."""
    replicated_dims: OfParams[tuple[str, ...]] = ()
    """Dimensions that must not be split over devices."""
    reduction_dims: OfParams[tuple[str, ...]] = ()
    """Operand dimensions that are summed away. Where one is sharded, each device has a partial result."""
    independent_dims: tuple[str, ...] = ("...",)
    """Dimensions whose slices do not depend on each other, as if ``vmap`` had mapped them; a result that lacks one is a
    sum over it. Only along these may devices split a derivative that has no kernel. "...": all dimensions without a
    name."""
    min_shard_sizes: Callable[..., Mapping[str, int]] | None = None
    """``(**params)`` -> the minimum shard size of dimensions with halo exchange. A dimension is replicated if its
    shards would be smaller, or if its axes are not in the order of the mesh."""
    shard_program: Callable[..., Sequence[jax.Array]] | None = None
    """``(kernel, axes, *operands, **params)``: the program of one shard; None: the kernel as it is. `kernel` is the
    reference if plain JAX serves the call, because XLA's partitioner might gather the operands of the reference."""
    program: Callable[..., Sequence[jax.Array]] | None = None
    """``(*operands, **params)``: calls of other ops' kernels, for an op that has no native target of its own."""
    alternatives: Mapping[Rule, Callable[..., Sequence[jax.Array]]] = dataclasses.field(default_factory=dict)
    """Programs ``(*operands, **params)`` of several kernels. The first whose rule holds serves in place of the kernel.
    Example: a sort, which XLA shares between calls, then the kernel for sorted rows."""
    xla_rules: tuple[Rule, ...] = ()
    """Where plain JAX is faster than the kernel."""
    of_constants: Callable[..., Sequence[np.ndarray]] | None = None
    """``(*operands, **params)`` -> the results, of NumPy arrays. It replaces the kernel where all operands are known
    integers (:func:`.known_values.known_integers`), outside of ``vmap`` and on one device."""
    limit: Callable[..., str | None] | None = None
    """``(*operand avals, **params)`` -> why these shapes or params are unsupported, or None."""
    in_place: OfParams[Mapping[int, int]] = dataclasses.field(default_factory=dict)
    """{position of an operand: position of the result that may alias it}. They alias if their shapes are equal. XLA
    first copies an operand that is used again."""
    in_place_if_donated: OfParams[Mapping[int, int]] = dataclasses.field(default_factory=dict)
    """Like `in_place`, but only if the operand is a donated argument of the compiled program. For ops that are as fast
    out of place: a copy by XLA would double their time."""
    broadcasts: tuple[str, ...] = ()
    """The operands that broadcast along every dimension, as in ``jax.numpy``. ``vmap`` then adds one more such
    dimension, which the functions of the definition and the handler see like any other."""
    transposes: OfParams[Transposes] = dataclasses.field(default_factory=dict)
    """{operands, by name, in which the op is jointly linear while all others are fixed: its transpose}. Several entries
    are like the factors of a product. If only these operands have tangents, derivatives run kernels: the result's
    tangent is the op applied to the tangents of an entry, summed over the entries."""
    tangent: Callable[..., Sequence[jax.Array]] | None = None
    """``(tangent of the first operand, operands, results, **params)`` -> the tangents of the results, if no other
    operand has a tangent. Use when the tangent follows from the results. Integer results have none."""
    primitive: Primitive = dataclasses.field(init=False)
    """The op as JAX sees it. Its rules, and those of `kernel_primitive`, are from :func:`.primitives.define_op`."""
    kernel_primitive: Primitive = dataclasses.field(init=False)
    """The kernel alone. Its params `donated` and `shares_sort` are those of its :class:`.rules.Site`."""

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
        for target in self.targets if self.program is None else ():
            if target in OPS:
                raise ValueError(f"Op {target} is defined twice")
            OPS[target] = self
        for field, suffix in {"primitive": "", "kernel_primitive": "_kernel"}.items():
            object.__setattr__(self, field, jax_versions.new_primitive(f"baracuda_{self.name}{suffix}"))

    def __call__(self, *operands: jax.Array | None, **params: Any) -> list[jax.Array]:
        """The results of the op, always a list."""
        if (selection := current_selection()) is not None:
            params["implementation"] = selection
        present, params = self._present(operands, params)
        return self.primitive.bind(*jax_versions.unify_varying(*present), **params)

    def of_arrays(self, arrays: Mapping[str, jax.Array], **params: Any) -> list[jax.Array]:
        """The results for operands by name, among other arrays."""
        return self(*(arrays.get(name) for name in self.operand_names(params)), **params)

    def dtypes_of(self, target: str) -> frozenset[str]:
        """The dtypes that a native target, or an alias, supports."""
        return resolved(self.dtypes, self.targets.get(target, {}))

    def kernel(self, *operands: jax.Array | None, **params: Any) -> list[jax.Array]:
        """The kernel alone, without derivatives and sharding: for programs of other ops, and for redirected calls."""
        present, params = self._present(operands, params)
        selection = current_selection() or KERNEL_IF_ANY
        return self.kernel_primitive.bind(*present, **{"implementation": selection, **params})

    def operand_names(self, params: Mapping[str, Any]) -> list[str]:
        """The names of all operands, before it is known which of them a call has."""
        return list(resolved(self.operands, {**dict.fromkeys(self.optional.values(), False), **params}))

    def _present(
        self, operands: Sequence[jax.Array | None], params: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The operands that are not None, and the params, with defaults and those that say which operands these are."""
        params = {**self.defaults, **params}
        if not self.optional:
            return list(operands), params
        given = dict(zip(self.operand_names(params), operands, strict=False))
        assert all(x is not None or name in self.optional for name, x in given.items()), self.name
        params |= {flag: given.get(name) is not None for name, flag in self.optional.items()}
        return [x for x in given.values() if x is not None], params

    def operand_dims(self, params: Mapping[str, Any]) -> dict[str, Dimensions]:
        """The dimensions of the operands that a call with these params has."""
        operands: NamedDimensions = resolved(self.operands, params)
        return {
            name: dims
            for name, dims in operands.items()
            if name not in self.optional or params.get(self.optional[name])
        }

    def by_name(self, operands: Sequence[Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """All operands of the definition by name, None for those that a call with these params lacks."""
        given = dict(zip(self.operand_dims(params), operands, strict=False))
        return {name: given.get(name) for name in resolved(self.operands, params)}


OPS: dict[str, Op] = {}
"""The op of each native target, by the target's name."""


def disabled_export_checks() -> tuple[jax.export.DisabledSafetyCheck, ...]:
    """By default, JAX exports only custom calls that keep their meaning in later versions: some of XLA's own."""
    return tuple(jax.export.DisabledSafetyCheck.custom_call(target_name(target)) for target in OPS)


@jax_versions.hiding_frames
def precision_guarantee(
    name: str, dtype: Any, platform: str, *, deterministic: bool = False, indices_are_sorted: bool = False
) -> Guarantee:
    """The numerical guarantees of an op.

    Args:
      name: the name of an op, as ``python -m jax_baracuda report`` lists them: "segment_max", "segment_max_backward",
        ... A function that calls several ops, such as `segment_var`, has their guarantees.
      dtype: the element type.
      platform: "cpu" or "cuda".
      deterministic: whether the function is called with ``deterministic=True``.
      indices_are_sorted: whether it is called with ``indices_are_sorted=True``.

    Returns:
      A record with ``accumulator`` (the dtype in which terms are combined, "none" for pure selection),
      ``math_precision`` ("exact", "rounded once", "within 2 ulp" or "accumulated"), ``deterministic`` (independent of
      thread scheduling) and ``bit_stable_on_same_hardware``.

    Raises:
      ValueError: there is no such op, or it has no kernel for this dtype or platform. Then plain JAX runs, with
        XLA's guarantees.

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
    dtypes = op.dtypes_of(name)
    if dtype_name not in dtypes:
        raise ValueError(f"precision_guarantee: {name} has kernels for dtype {sorted(dtypes)}, got {dtype_name!r}")
    if isinstance(op.guarantee, Guarantee):
        return op.guarantee
    flags = {"deterministic": deterministic, "indices_are_sorted": indices_are_sorted}
    return with_named(op.guarantee, flags)(dtype_name, platform)
