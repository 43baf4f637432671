"""The definition of an op."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jax_baracuda._core import jax_versions
from jax_baracuda._core.batch import shared_flags, vmap_sizes, without_batch
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.native import KERNEL_PLATFORMS, NATIVE_MODULES, Plan
from jax_baracuda._core.params import count_batch_dims, definition_params, resolve
from jax_baracuda._core.primitive import primitives_of
from jax_baracuda._core.sharding import Dimensions, NamedShapes, joint_sizes, written_out

Shape = tuple[int, ...]
ShapeAndDtype = tuple[Shape, Any]
NamedDimensions = Mapping[str, Dimensions]
"""The dimensions of each operand or result, by its name and in its order."""


@dataclasses.dataclass(frozen=True)
class Op:
    """One native kernel, and what JAX needs to know about it.

    Calling an op binds its primitive: ``results = op(*operands, **params)``, always a list. The functions of a
    definition never see the dimensions that ``vmap`` adds: those are the business of ``_core`` and of the native
    handler, which takes any number of them, so that ``vmap`` is one launch.
    """

    name: str
    """The name of the native target, of the primitive, and in messages."""
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
    aliases: tuple[str, ...] = ()
    """Other public functions whose result is this op's."""
    attributes: tuple[str, ...] = ()
    """The names of the params that the native handler takes. Tuples of integers, however nested, come as one array."""
    plan_parameters: Callable[..., Mapping[str, int]] | None = None
    """``(*operand avals, **params)`` -> the integers from which the native module decides how the kernel runs. The
    module is also told of the batch: its size as ``batch``, and ``<operand>_is_shared`` of each operand."""
    replicated_dims: tuple[str, ...] | Callable[..., tuple[str, ...]] = ()
    """Dimensions that must not be split over devices. Or ``(**params)`` -> these."""
    reduction_dims: tuple[str, ...] = ()
    """Dimensions of the operands that results lack, so that shards have parts of those results."""
    shard_program: Callable[..., Sequence[jax.Array]] | None = None
    """``(kernel, axes, *operands, **params)``: the program of one shard; None: the kernel as it is."""
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
    num_linear: int | Callable[..., int] = 1
    """See `transpose`. Or ``(**params)`` -> the number."""
    transpose: Callable[..., Sequence[jax.Array]] | None = None
    """For an op that is linear in its first `num_linear` operands together and constant in the others:
    ``(avals of the linear operands, cotangents of the results, *other operands, **params) -> their cotangents``.

    Then derivatives are calls of kernels too: the tangent is the op of the tangent.
    """

    def __post_init__(self) -> None:
        if not any(map(callable, (self.operands, self.results, self.replicated_dims))):
            dimensions = {d for names in (*self.operands.values(), *self.results.values()) for d in names}
            for name in (*self.replicated_dims, *self.reduction_dims):
                if name not in dimensions:
                    raise ValueError(f"Op {self.name}: {name!r} is no dimension of an operand or a result")
        _register(self)

    def __call__(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        return self._primitives[0].bind(*jax_versions.unify_varying(*operands), **params)

    def kernel(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        """The kernel alone, without derivatives and sharding: for the shard programs of other ops."""
        return self._primitives[1].bind(*operands, **params)

    @functools.cached_property
    def _primitives(self) -> tuple[Primitive, Primitive]:
        return primitives_of(self)

    def operand_names(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the operands of a call with these params."""
        return tuple(resolve(self.operands, definition_params(params)))

    def types_of_results(self, *operands: Any, **params: Any) -> list[ShapeAndDtype]:
        """The abstract-eval rule, with any number of batch dimensions."""
        num_batch_dims, own_params = count_batch_dims(params), definition_params(params)
        batch, avals = vmap_sizes(operands, num_batch_dims), without_batch(operands, num_batch_dims)
        types = self.result_types or self._named_types
        return [((*batch, *shape), dtype) for shape, dtype in types(*avals, **own_params)]

    def _named_types(self, *operands: Any, **params: Any) -> list[ShapeAndDtype]:
        """Shapes by the names of dimensions, and dtypes."""
        shapes = [tuple(x.shape) for x in operands]
        names = self._dimensions(self.operands, shapes, params)
        sizes = joint_sizes(names, shapes) | (self.sizes(**params) if self.sizes else {})
        results = resolve(self.results, params).values()
        rest = tuple(name for name in sizes if name.startswith("..."))
        dtypes = self.result_dtypes(*operands, **params) if self.result_dtypes else [operands[0].dtype] * len(results)
        return [
            (tuple(sizes[name] for d in names for name in (rest if d == "..." else (d,))), np.dtype(dtype))
            for names, dtype in zip(results, dtypes, strict=True)
        ]

    @staticmethod
    def _dimensions(arrays: Any, shapes: Sequence[Shape], params: Mapping[str, Any]) -> tuple[Dimensions, ...]:
        dimensions = resolve(arrays, params).values()
        return tuple(written_out(names, shape) for names, shape in zip(dimensions, shapes, strict=False))

    def named_shapes(self, operands: Sequence[Any], results: Sequence[Any], params: Mapping[str, Any]) -> NamedShapes:
        """The named dimensions of a call with these shapes and params."""
        num_batch_dims, own_params = count_batch_dims(params), definition_params(params)
        batch = tuple(f"batch{i}" for i in range(num_batch_dims))

        def named(arrays: Any, shapes: Sequence[Shape]) -> tuple[Dimensions, ...]:
            own_shapes = [shape[num_batch_dims:] for shape in shapes]
            return tuple(batch + names for names in self._dimensions(arrays, own_shapes, own_params))

        operand_shapes, result_shapes = (tuple(tuple(x.shape) for x in arrays) for arrays in (operands, results))
        return NamedShapes(
            named(self.operands, operand_shapes), named(self.results, result_shapes), operand_shapes, result_shapes
        )

    def plan(self, platform: str, operands: Sequence[Any], params: Mapping[str, Any]) -> Plan:
        """How the platform's kernel runs a call that it supports: its strategy, and the scratch memory."""
        assert self.plan_parameters is not None
        num_batch_dims = count_batch_dims(params)
        parameters = dict(self.plan_parameters(*without_batch(operands, num_batch_dims), **definition_params(params)))
        if not self.broadcasts:
            parameters |= shared_flags(self.operand_names(params), operands, num_batch_dims)
        # A product of sizes that does not fit is one of an array without elements, in which it can as well be 0.
        fitting = {name: int(value) if value < 2**63 else 0 for name, value in parameters.items()}
        return NATIVE_MODULES[platform].plan(self.name, fitting)

    def unsupported_reason(self, platform: str, operands: Sequence[Any], params: Mapping[str, Any]) -> str | None:
        """Why this call has no kernel on the platform and runs as plain JAX instead; None where it has one."""
        if (problem := self.missing_target(platform)) is not None:
            return problem
        if not all(jax_versions.is_static_shape(aval.shape) for aval in operands):
            return "its shapes are symbolic"
        if np.dtype(operands[0].dtype).name not in self.dtypes:
            return f"there is no kernel for {np.dtype(operands[0].dtype).name}"
        num_batch_dims, own_params = count_batch_dims(params), definition_params(params)
        batch = vmap_sizes(operands, num_batch_dims)
        if any(operands[i].shape[:num_batch_dims] != batch for i in resolve(self.in_place, own_params)):
            return "the batch shares an array that is written"
        if self.limit is None:
            return None
        return self.limit(*without_batch(operands, num_batch_dims), **own_params)

    def missing_target(self, platform: str) -> str | None:
        """Why the op has no kernel at all on the platform, or None."""
        native = NATIVE_MODULES.get(platform)
        if native is None:
            return f"there are kernels for {' and '.join(KERNEL_PLATFORMS)} only"
        if native.problem is not None:
            return native.problem
        if self.name not in native.targets:
            return f"the {platform} module has no target of this name"
        return native.device_problem()


OPS: dict[str, Op] = {}
"""Every op, by name."""


def _register(op: Op) -> None:
    if op.name in OPS:
        raise ValueError(f"Op {op.name} is defined twice")
    OPS[op.name] = op


def precision_guarantee(
    name: str, dtype: Any, platform: str, *, deterministic: bool = False, indices_are_sorted: bool = False
) -> Guarantee:
    """What an op promises about its numbers.

    Args:
      name: the name of a public function or of an op, as ``python -m jax_baracuda report`` lists them: "segment_max",
        "segment_max_backward", ...
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
