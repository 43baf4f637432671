"""What an op becomes in a program of XLA: a call of its kernel, in the parts of a mesh or whole, or plain JAX."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_baracuda._core import jax_versions
from jax_baracuda._core.batch import is_shared, map_over_batch, mapped_dims, vmap_sizes
from jax_baracuda._core.native import KERNEL_PLATFORMS, target_name
from jax_baracuda._core.params import count_batch_dims, definition_params, resolve
from jax_baracuda._core.rules import reference_of_call
from jax_baracuda._core.sharding import MeshAxes, partitioned
from jax_baracuda._core.version import VERSION

if TYPE_CHECKING:
    from jax_baracuda._core.op import Op


def register_lowerings(op: Op, primitive: Primitive, kernel: Primitive) -> None:
    mlir.register_lowering(primitive, functools.partial(_lower_reference, op))
    for platform in KERNEL_PLATFORMS:
        mlir.register_lowering(primitive, functools.partial(_lower, op, kernel, platform), platform=platform)


def _lower_reference(op: Op, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    return mlir.lower_fun(functools.partial(reference_of_call, op, **params), multiple_results=True)(ctx, *operands)


def lower_with_donation(
    op: Op, kernel: Primitive, by_platform: Primitive, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any
) -> Any:
    """The kernel of the one platform that the program is for. A program for several is never given memory to reuse."""
    platforms = jax_versions.platforms_of(ctx)
    if len(platforms) == 1 and platforms[0] in KERNEL_PLATFORMS:
        return _lower(op, kernel, platforms[0], ctx, *operands, **params)
    return mlir.lower_fun(functools.partial(by_platform.bind, **params), multiple_results=True)(ctx, *operands)


def _lower(
    op: Op, kernel: Primitive, platform: str, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any
) -> Any:
    if op.unsupported_reason(platform, ctx.avals_in, params) is not None:
        if (problem := op.missing_target(platform)) is not None:
            _warn_once(f"jax_baracuda: {op.name} runs as plain JAX on {platform}: {problem}")
        return _lower_reference(op, ctx, *operands, **params)

    donated = tuple(i for i in op.in_place_if_donated if jax_versions.is_donated_argument(operands[i]))
    has_empty_array = any(0 in aval.shape for aval in [*ctx.avals_in, *ctx.avals_out])
    if has_empty_array and jax_versions.is_in_shard_map(ctx.module_context.axis_context):
        return _lower_reference(op, ctx, *operands, **params)  # XLA loses calls of empty arrays there
    if has_empty_array or not jax_versions.partitioner_splits(ctx.module_context.axis_context):
        # In a partially manual shard_map, the automatic axes then see whole arrays.
        return _call_target(op, platform, ctx, *operands, donated=donated, **params)

    own_params = definition_params(params)
    mapped = mapped_dims(ctx.avals_in, count_batch_dims(params))

    def shard_program(axes: dict[str, MeshAxes], *shards: jax.Array) -> Sequence[jax.Array]:
        run_kernel = functools.partial(kernel.bind, **own_params, donated=donated)
        program = (
            functools.partial(op.shard_program, run_kernel, axes, **own_params) if op.shard_program else run_kernel
        )
        return tuple(map_over_batch(program, mapped, *shards))

    shapes = op.named_shapes(ctx.avals_in, ctx.avals_out, params)
    run_kernel = functools.partial(kernel.bind, **params, donated=donated)
    replicated_dims = resolve(op.replicated_dims, own_params)
    call = partitioned(run_kernel, shard_program, shapes, replicated_dims, op.reduction_dims)
    # A partitioned call holds no more than its shapes and the address of a Python object. Without the op's name and its
    # params, JAX's persistent compilation cache could take one program for another.
    identity = f"{op.name}({params | {'donated': donated}}) of jax_baracuda {VERSION}"
    with set_xla_metadata(jax_baracuda_op=identity):
        results = mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
    return [
        jax_versions.lower_with_sharding_in_types(ctx, result, aval)
        for result, aval in zip(results, ctx.avals_out, strict=True)
    ]


def lower_kernel(
    op: Op,
    platform: str,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    donated: tuple[int, ...] = (),
    **params: Any,
) -> Any:
    """Of the kernel in the program of a shard, whose shapes the kernel may support where it does not the whole's."""
    if op.unsupported_reason(platform, ctx.avals_in, params) is not None:
        return _lower_reference(op, ctx, *operands, **params)
    return _call_target(op, platform, ctx, *operands, donated=donated, **params)


def _call_target(
    op: Op, platform: str, ctx: mlir.LoweringRuleContext, *operands: Any, donated: tuple[int, ...], **params: Any
) -> Any:
    """The call of the native target."""
    ctx, operands = _with_whole_batch(ctx, operands, count_batch_dims(params))
    num_results = len(ctx.avals_out)
    if op.plan_parameters is not None:
        scratch_bytes = op.plan(platform, ctx.avals_in, params).scratch_bytes
        if scratch_bytes > 0:
            scratch = jax.core.ShapedArray((scratch_bytes,), np.dtype(np.uint8))
            ctx = ctx.replace(avals_out=[*ctx.avals_out, scratch])
    donated_in_place = {i: op.in_place_if_donated[i] for i in donated}
    in_place = {
        operand: result
        for operand, result in (dict(resolve(op.in_place, definition_params(params))) | donated_in_place).items()
        if ctx.avals_in[operand].shape == ctx.avals_out[result].shape
    }
    rule = jax.ffi.ffi_lowering(target_name(op.name), operand_output_aliases=in_place)
    return rule(ctx, *operands, **attributes_of(op, params))[:num_results]


def _with_whole_batch(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Any], num_batch_dims: int
) -> tuple[mlir.LoweringRuleContext, list[Any]]:
    """A handler takes operands that have the whole batch or share it, none that share some of its dimensions."""
    batch = vmap_sizes(ctx.avals_in, num_batch_dims)
    avals, values = list(ctx.avals_in), list(operands)
    for i, aval in enumerate(ctx.avals_in):
        if aval.shape[:num_batch_dims] != batch and not is_shared(aval.shape, num_batch_dims):
            # Without the shardings of explicit mode: the arrays are those of one device.
            own = jax.core.ShapedArray(aval.shape, aval.dtype)
            avals[i] = jax.core.ShapedArray((*batch, *aval.shape[num_batch_dims:]), aval.dtype)
            broadcast = mlir.lower_fun(
                functools.partial(jnp.broadcast_to, shape=avals[i].shape), multiple_results=False
            )
            with jax_versions.without_abstract_mesh():
                [values[i]] = broadcast(ctx.replace(avals_in=[own], avals_out=[avals[i]]), operands[i])
    return ctx.replace(avals_in=avals), values


def attributes_of(op: Op, params: Mapping[str, Any]) -> dict[str, Any]:
    """What the native handler takes of the params."""
    attributes = {
        name: np.array(jax.tree.leaves(params[name]), np.int64) if isinstance(params[name], tuple) else params[name]
        for name in op.attributes
    }
    return attributes if op.broadcasts else attributes | {"num_batch_dims": np.int64(count_batch_dims(params))}


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
