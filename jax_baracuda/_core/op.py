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
from jax_baracuda._core.batch import joint_sizes, with_one_batch
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.native import KERNEL_PLATFORMS, NATIVE_MODULES, Plan
from jax_baracuda._core.params import count_batch_dims, definition_params, resolve
from jax_baracuda._core.primitive import primitives_of
from jax_baracuda._core.sharding import Dimensions, Layout, named_dimensions

ShapeAndDtype = tuple[tuple[int, ...], Any]


@dataclasses.dataclass(frozen=True)
class Op:
    """One native kernel, and everything that JAX has to know of it.

    Calling an op binds its primitive: ``results = op(*operands, **params)``, always a list. Every operand and every
    result has a leading batch dimension, which is 1 in operands that the whole batch shares: so ``vmap`` is one launch.
    The functions of a definition see it in any case; calls may omit it where `batch_optional` says so. Each ``vmap``
    of a call adds one more dimension in front, so that a batch that is split over devices stays split; the functions
    of a definition see all of them as one.
    """

    name: str
    """The name of the native target, of the primitive, and in messages."""
    operands: tuple[Dimensions, ...] | Callable[..., tuple[Dimensions, ...]]
    """The dimensions of each operand, in order; trailing operands may be left out of a call. Or ``(**params)`` -> the
    dimensions, where they depend on layouts and options."""
    results: tuple[Dimensions, ...] | Callable[..., tuple[Dimensions, ...]]
    result_types: Callable[..., Sequence[ShapeAndDtype]]
    """``(*operand avals, **params) -> [(shape, dtype), ...]``, the abstract-eval rule."""
    reference: Callable[..., Sequence[jax.Array]]
    """The same computation in plain JAX: serves what has no kernel, and every derivative of the op."""
    dtypes: frozenset[str]
    """The element types of the first operand for which there is a kernel."""
    guarantee: Guarantee | Callable[..., Guarantee]
    """Or ``(dtype name, platform, *, deterministic, indices_are_sorted) -> Guarantee`` where it depends on these."""
    aliases: tuple[str, ...] = ()
    """Other public functions whose result is this op's."""
    attributes: tuple[str, ...] = ()
    """The names of the params that the native handler takes. Tuples of integers, however nested, come as one array."""
    takes_batch_dims: bool = True
    """Whether the handler takes the attribute `num_batch_dims`, which one that treats all dimensions alike need not."""
    plan_parameters: Callable[..., Mapping[str, int]] | None = None
    """``(*operand avals, **params)`` -> the integers from which the native module decides how the kernel runs."""
    whole: tuple[str, ...] | Callable[..., tuple[str, ...]] = ()
    """Dimensions that must not be split over devices. Or ``(**params)`` -> these."""
    reduced: tuple[str, ...] = ()
    """Dimensions of the operands that results lack, so that shards have parts of those results."""
    shard_program: Callable[..., Sequence[jax.Array]] | None = None
    """``(kernel, axes, *operands, **params)``: the program of one shard; None: the kernel as it is."""
    kernel_limit: Callable[..., str | None] | None = None
    """``(*operand avals, **params)`` -> why the kernel does not take this call, or None."""
    in_place: Mapping[int, int] | Callable[..., Mapping[int, int]] = dataclasses.field(default_factory=dict)
    """{operand number: number of the result that may be written to its memory}, where both have one shape. An operand
    that is used again is copied by XLA first. Or ``(**params)`` -> these."""
    in_place_if_donated: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """As `in_place`, but only where the operand is a donated argument of the compiled program: for results that are as
    fast to write elsewhere, where a copy by XLA would double the time."""
    batch_optional: bool = False
    """Whether operands and results may lack the batch dimension, all of them together: calls have the param `batched`.
    For ops in place: XLA before jax 0.11 copies what is reshaped on its way into the call."""
    num_linear: int | Callable[..., int] = 1
    """See `transpose`. Or ``(**params)`` -> the number."""
    transpose: Callable[..., Sequence[jax.Array]] | None = None
    """For an op that is linear in its first `num_linear` operands together and constant in the others:
    ``(avals of the linear operands, cotangents of the results, *other operands, **params) -> their cotangents``.

    Then derivatives are calls of kernels too: the tangent is the op of the tangent. A cotangent may have the whole
    batch where its operand is shared.
    """

    def __post_init__(self) -> None:
        if not callable(self.operands) and not callable(self.results):
            dimensions = {name for names in self.operands + self.results for name in names}
            for name in (() if callable(self.whole) else self.whole) + self.reduced:
                if name not in dimensions:
                    raise ValueError(f"Op {self.name}: {name!r} is no dimension of an operand or a result")
            for names in self.operands + self.results:
                if names[:1] != ("batch",):
                    raise ValueError(f"Op {self.name}: the first dimension must be 'batch', got {names}")
        _register(self)

    def __call__(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        return self._primitives[0].bind(*jax_versions.unify_varying(*operands), **params)

    def kernel(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        """The kernel alone, without derivatives and sharding: for the shard programs of other ops."""
        return self._primitives[1].bind(*operands, **params)

    @functools.cached_property
    def _primitives(self) -> tuple[Primitive, Primitive]:
        return primitives_of(self)

    def types_of_results(self, *operands: Any, **params: Any) -> list[ShapeAndDtype]:
        """The abstract-eval rule, with any number of batch dimensions."""
        num_batch_dims = count_batch_dims(params)
        types = self.result_types(*with_one_batch(operands, params), **definition_params(params))
        batch = joint_sizes(operands, num_batch_dims)
        return [((*batch, *shape[1:]), dtype) for shape, dtype in types]

    def layout(self, operands: Sequence[Any], results: Sequence[Any], params: Mapping[str, Any]) -> Layout:
        """The named dimensions of a call with these shapes and params."""
        operand_shapes, result_shapes = (tuple(tuple(x.shape) for x in arrays) for arrays in (operands, results))
        batch = tuple(f"batch{i}" for i in range(count_batch_dims(params)))
        own_params = definition_params(params)
        operand_names, result_names = (
            tuple(batch + dimensions[1:] for dimensions in resolve(names, own_params))
            for names in (self.operands, self.results)
        )
        return Layout(
            tuple(named_dimensions(names, shape) for names, shape in zip(operand_names, operand_shapes, strict=False)),
            tuple(named_dimensions(names, shape) for names, shape in zip(result_names, result_shapes, strict=True)),
            operand_shapes,
            result_shapes,
        )

    def plan(self, platform: str, operands: Sequence[Any], params: Mapping[str, Any]) -> Plan:
        """How the platform's kernel runs a call that it takes: the strategy that it chooses, and the scratch memory."""
        assert self.plan_parameters is not None
        parameters = self.plan_parameters(*with_one_batch(operands, params), **definition_params(params))
        # A product of sizes that does not fit is one of an array without elements, in which it can as well be 0.
        fitting = {name: int(value) if value < 2**63 else 0 for name, value in parameters.items()}
        return NATIVE_MODULES[platform].plan(self.name, fitting)

    def missing_kernel(self, platform: str, operands: Sequence[Any], params: Mapping[str, Any]) -> str | None:
        """Why this call has no kernel on the platform and runs as plain JAX instead; None where it has one."""
        if (problem := self.missing_target(platform)) is not None:
            return problem
        if not all(jax_versions.is_static_shape(aval.shape) for aval in operands):
            return "its shapes are symbolic"
        if np.dtype(operands[0].dtype).name not in self.dtypes:
            return f"there is no kernel for {np.dtype(operands[0].dtype).name}"
        if self.kernel_limit is None:
            return None
        return self.kernel_limit(*with_one_batch(operands, params), **definition_params(params))

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
