"""Every seam between JAX versions, and every import from ``jax._src``: no other file has either.

What is private is imported where it is used: a name that a new JAX no longer has breaks the calls that need it, not
``import jax_baracuda``.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jax._src.lib.mlir import ir
    from jax.extend.core import ClosedJaxpr, Primitive

__all__ = [
    "apply_primitive",
    "canonicalize_sharding",
    "concrete_or_error",
    "explicit_spec",
    "is_donated_argument",
    "is_in_shard_map",
    "is_static_shape",
    "lower_with_sharding_in_types",
    "jaxpr_as_fun",
    "name_partitioned_call",
    "new_primitive",
    "partitioner_splits",
    "platforms_of",
    "require_devices_during_lowering",
    "result_aval",
    "unify_varying",
    "varying_axes",
    "without_abstract_mesh",
    "wrap_scatter_update",
    "wrap_segment_update",
    "wrap_transpose_of_gather",
    "zero_tangent",
]


def new_primitive(name: str) -> Primitive:
    """A primitive of this name. ``jax.extend``, whose class it is in public, imports Pallas, which takes long."""
    try:
        from jax._src.core import Primitive
    except ImportError:
        from jax.extend.core import Primitive

    return Primitive(name)


def jaxpr_as_fun(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    """A traced program as a function. ``jax.extend`` is imported here, for the reason above."""
    from jax.extend.core import jaxpr_as_fun

    return jaxpr_as_fun(jaxpr)


def apply_primitive(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """What a primitive does outside of ``jax.jit``: it is compiled, and run."""
    from jax._src import dispatch

    return dispatch.apply_primitive(primitive, *operands, **params)


def lower_with_sharding_in_types(ctx: Any, value: Any, aval: Any) -> Any:
    """The value of a lowering with the sharding that its type has under explicit sharding."""
    from jax._src.interpreters import mlir

    return mlir.lower_with_sharding_in_types(ctx, value, aval)


def canonicalize_sharding(sharding: Any, name: str) -> Any:
    """A sharding, or a partition spec of the mesh in context, as a sharding."""
    from jax._src.sharding_impls import canonicalize_sharding

    return canonicalize_sharding(sharding, name)


def require_devices_during_lowering(primitive: Primitive) -> None:
    """Tells JAX that the primitive's lowering must know its devices, as ``custom_partitioning`` does."""
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(primitive)


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes (of ``shard_map`` with ``check_vma``) over which a value varies."""
    if hasattr(aval, "manual_axis_type"):  # jax >= 0.10
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(aval.vma)


def _cast_to_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if hasattr(jax.lax, "pcast"):  # jax >= 0.9
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)


def unify_varying(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Makes all arrays vary over the union of their manual axes; the transpose of the cast is a ``psum``."""
    axes_of_each = [varying_axes(jax.typeof(x)) for x in arrays]
    union = frozenset[str]().union(*axes_of_each)
    return tuple(
        _cast_to_varying(x, tuple(sorted(union - axes))) if union - axes else x
        for x, axes in zip(arrays, axes_of_each, strict=True)
    )


def explicit_spec(aval: Any) -> tuple[Any, ...] | None:
    """The partition spec in the array's type, one entry per dimension; None outside explicit sharding."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or not sharding.mesh.explicit_axes:
        return None
    spec = tuple(sharding.spec)
    return spec + (None,) * (aval.ndim - len(spec))


def result_aval(like: Any, shape: Sequence[int], dtype: Any, spec: Sequence[Any] | None) -> Any:
    """The abstract value of a result: `shape` and `dtype`, the varying axes and the mesh of the operand `like`."""
    sharding = getattr(like, "sharding", None)
    if sharding is None:
        return like.update(shape=tuple(shape), dtype=dtype, weak_type=False)
    entries = tuple(spec) if spec is not None else (None,) * len(shape)
    sharding = sharding.update(spec=sharding.spec.update(partitions=entries))
    return like.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=sharding)


def is_static_shape(shape: Sequence[Any]) -> bool:
    """Whether every dimension is a number (and not symbolic, as in ``jax.export``)."""
    from jax._src import core

    return core.is_constant_shape(tuple(shape))


def is_donated_argument(value: ir.Value[Any]) -> bool:
    """Whether a value of a program under lowering is an argument of the whole program whose memory is given up."""
    from jax._src.lib.mlir import ir

    if not isinstance(value, ir.BlockArgument):
        return False
    owner = value.owner.owner.operation  # of a loop or a shard_map, no function
    if owner.name != "func.func" or owner.attributes["sym_name"].value != "main":
        return False
    attributes = ir.DictAttr(ir.ArrayAttr(owner.attributes["arg_attrs"])[value.arg_number])
    return "tf.aliasing_output" in attributes or "jax.buffer_donor" in attributes


def platforms_of(ctx: Any) -> Sequence[str]:
    """The platforms that a lowering is for: several in a program that ``jax.export`` makes for several."""
    from jax._src.interpreters import mlir

    return mlir._platforms_for_eqn(ctx)


def concrete_or_error(value: Any, context: str) -> Any:
    """`value` as an index, or ``ConcretizationTypeError`` where it is traced."""
    from jax._src import core

    return core.concrete_dim_or_error(value, context)


def partitioner_splits(axis_context: Any) -> bool:
    """Whether JAX's partitioner splits the program of a lowering over devices, and can ask an op how.

    Not inside ``shard_map``, where nothing is left to split; or, if some of its axes are automatic, nobody can ask.
    """
    from jax._src.sharding_impls import ShardingContext

    return isinstance(axis_context, ShardingContext) and axis_context.num_devices > 1


def name_partitioned_call(ctx: Any, call: Any, identity: str) -> None:
    """Lets the partitioner find what to do for a call by a name, in place of the address of a Python object.

    Two processes then lower a program to the same module, which JAX's persistent compilation cache finds again.

    Args:
      ctx: the lowering's context.
      call: the operation that ``custom_partitioning`` became.
      identity: calls with the same one, of the same types on the same devices, are split alike.
    """
    from jax._src import custom_partitioning
    from jax._src.lib.mlir import ir

    callbacks = getattr(custom_partitioning, "_sharding_callbacks", None)
    if callbacks is None:  # the address stays: the program runs, and is compiled in every process
        return
    info = callbacks[call.attributes["backend_config"].value.encode()]
    devices = ctx.module_context.axis_context.device_assignment
    parts = identity, ctx.avals_in, ctx.avals_out, platforms_of(ctx), info.mesh, devices
    name = hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()
    # JAX holds it weakly: whichever program is compiled last needs it.
    ctx.module_context.add_keepalive(callbacks.setdefault(name.encode(), info))
    call.attributes["backend_config"] = ir.StringAttr.get(name)


def is_in_shard_map(axis_context: Any) -> bool:
    """Whether the program of a lowering is one of ``shard_map``."""
    from jax._src.sharding_impls import SPMDAxisContext

    return isinstance(axis_context, SPMDAxisContext)


def without_abstract_mesh() -> contextlib.AbstractContextManager[Any]:
    """Context for collectives inside a partitioned program.

    A mesh with explicit axes in context makes the collectives' types refer to it, which the partitioner then refuses
    ("Unsupported reduction computation", jax 0.11).
    """
    from jax._src import mesh

    return mesh.use_abstract_mesh(mesh.empty_abstract_mesh)


def zero_tangent(primal: jax.Array) -> Any:
    """The symbolic zero tangent of a value."""
    from jax._src import ad_util

    if hasattr(ad_util, "p2tz"):  # jax >= 0.11
        return ad_util.p2tz(primal)
    return ad_util.Zero.from_primal_value(primal)


def wrap_segment_update(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts `wrap` of it in the place of the one function that all of ``jax.ops.segment_*`` call.

    Raises:
      ImportError, AttributeError: this JAX has no such function.
    """
    from jax._src.ops import scatter

    scatter._segment_update = wrap(scatter._segment_update)


def wrap_scatter_update(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """The same for the function of all indexed updates, ``x.at[ids].add(y)`` and so on."""
    from jax._src.ops import scatter

    scatter._scatter_update = wrap(scatter._scatter_update)


def wrap_transpose_of_gather(sum_taken: Callable[..., jax.Array | None]) -> None:
    """Makes `sum_taken` the gradient of gathers, and JAX's own where it returns None.

    Args:
      sum_taken: ``(cotangent, type of the operand, indices, **params of jax.lax.gather_p) -> cotangent of the operand``

    Raises:
      ImportError, AttributeError, KeyError: this JAX has no rule where it is looked for.
    """
    from jax._src.interpreters import ad

    gather_p = jax.lax.gather_p
    if gather_p in ad.primitive_transposes:  # jax < 0.11
        own_rule = ad.primitive_transposes[gather_p]

        def rule(cotangent: Any, operand: Any, indices: Any, **params: Any) -> Any:
            result = None
            if not isinstance(cotangent, ad.Zero) and ad.is_undefined_primal(operand):
                result = sum_taken(cotangent, operand.aval, indices, **params)
            return own_rule(cotangent, operand, indices, **params) if result is None else [result, None]

        ad.primitive_transposes[gather_p] = rule
        return
    own_accumulation, accumulator = ad.fancy_transposes[gather_p], ad.ValAccum

    def accumulate(cotangent: Any, operand: Any, indices: Any, **params: Any) -> None:
        result = None
        if not isinstance(cotangent, ad.Zero) and isinstance(operand, accumulator):
            result = sum_taken(cotangent, operand.aval, indices, **params)
        if result is None:
            own_accumulation(cotangent, operand, indices, **params)
        else:
            operand.accum(result)

    ad.fancy_transposes[gather_p] = accumulate
