"""The JAX primitives that an op becomes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from jax.interpreters import ad, batching, mlir

from jax_baracuda._core import jax_versions
from jax_baracuda._core.lowering import lower_kernel, register_lowerings
from jax_baracuda._core.native import KERNEL_PLATFORMS
from jax_baracuda._core.rules import abstract_eval, batch, jvp, transpose

if TYPE_CHECKING:
    from jax.extend.core import Primitive

    from jax_baracuda._core.op import Op


def primitives_of(op: Op) -> tuple[Primitive, Primitive]:
    """The op's primitive, and the primitive of its kernel alone, which has the param `donated` as well."""
    primitive = _declare(op, f"baracuda_{op.name}")
    kernel = _declare(op, f"baracuda_{op.name}_kernel")
    primitive.def_impl(functools.partial(jax_versions.apply_primitive, primitive))
    jax_versions.require_devices_during_lowering(primitive)
    for each in (primitive, kernel):
        batching.primitive_batchers[each] = functools.partial(batch, op, each)
    ad.primitive_jvps[primitive] = functools.partial(jvp, op, primitive)
    ad.primitive_transposes[primitive] = functools.partial(transpose, op)
    for platform in KERNEL_PLATFORMS:
        mlir.register_lowering(kernel, functools.partial(lower_kernel, op, platform), platform=platform)
    register_lowerings(op, primitive, kernel)
    return primitive, kernel


def _declare(op: Op, name: str) -> Primitive:
    primitive = jax_versions.new_primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(functools.partial(abstract_eval, op))
    return primitive
