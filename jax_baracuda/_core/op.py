"""Ops: definitions as JAX primitives."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from jax_baracuda._core import jax_versions
from jax_baracuda._core.definition import OpDefinition, with_named
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.lowering import lower_kernel, register_lowerings
from jax_baracuda._core.native import KERNEL_PLATFORMS
from jax_baracuda._core.rules import abstract_eval, batch, jvp, transpose
from jax_baracuda._core.selection import current_selection

if TYPE_CHECKING:
    from jax.extend.core import Primitive


@dataclasses.dataclass(frozen=True, eq=False)
class Op(OpDefinition):
    """A definition, bound by a primitive: ``results = op(*operands, **params)``, always a list."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        """The op's primitive, and the primitive of its kernel alone, which has the param `donated` as well."""
        primitive = _declare(self, f"baracuda_{self.name}")
        kernel = _declare(self, f"baracuda_{self.name}_kernel")
        primitive.def_impl(functools.partial(jax_versions.apply_primitive, primitive))
        jax_versions.require_devices_during_lowering(primitive)
        ad.primitive_jvps[primitive] = functools.partial(jvp, self, primitive)
        ad.primitive_transposes[primitive] = functools.partial(transpose, self)
        for platform in KERNEL_PLATFORMS:
            mlir.register_lowering(kernel, functools.partial(lower_kernel, self, platform), platform=platform)
        register_lowerings(self, primitive, kernel)
        return primitive, kernel


def _declare(op: Op, name: str) -> Primitive:
    primitive = jax_versions.new_primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(functools.partial(abstract_eval, op))
    batching.primitive_batchers[primitive] = functools.partial(batch, op, primitive)
    return primitive


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
    """The numerical guarantees of an op.

    Args:
      name: the name of an op, as ``python -m jax_baracuda report`` lists them: "segment_max", "segment_max_backward",
        ... A function that calls several ops, such as `segment_attention`, has their guarantees.
      dtype: the element type.
      platform: "cpu" or "cuda".
      deterministic: whether the function is called with ``deterministic=True``.
      indices_are_sorted: whether it is called with ``indices_are_sorted=True``.

    Returns:
      A record with ``accumulator`` (the dtype in which terms are combined, "none" for pure selection),
      ``math_precision`` ("exact", "rounded once", "faithful" or "accumulated"), ``deterministic`` (independent of
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
    if dtype_name not in op.dtypes:
        raise ValueError(f"precision_guarantee: {name} has kernels for dtype {sorted(op.dtypes)}, got {dtype_name!r}")
    if isinstance(op.guarantee, Guarantee):
        return op.guarantee
    flags = {"deterministic": deterministic, "indices_are_sorted": indices_are_sorted}
    guarantee: Guarantee = with_named(op.guarantee, flags)(dtype_name, platform)
    return guarantee
