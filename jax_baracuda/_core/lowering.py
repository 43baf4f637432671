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
from jax_baracuda._core.batch import is_shared, joint_sizes, merge_batch
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
    if op.missing_kernel(platform, ctx.avals_in, params) is not None:
        if (problem := op.missing_target(platform)) is not None:
            _warn_once(f"jax_baracuda: {op.name} runs as plain JAX on {platform}: {problem}")
        return _lower_reference(op, ctx, *operands, **params)

    donated = tuple(i for i in op.in_place_if_donated if jax_versions.is_donated_argument(operands[i]))
    own_params = definition_params(params)
    run_kernel = functools.partial(kernel.bind, **params, donated=donated)
    has_empty_array = any(0 in aval.shape for aval in [*ctx.avals_in, *ctx.avals_out])
    if has_empty_array and jax_versions.is_in_shard_map(ctx.module_context.axis_context):
        return _lower_reference(op, ctx, *operands, **params)  # XLA loses calls of empty arrays there
    if has_empty_array or not jax_versions.partitioner_splits(ctx.module_context.axis_context):
        # In a partially manual shard_map, the automatic axes then see whole arrays.
        return mlir.lower_fun(run_kernel, multiple_results=True)(ctx, *operands)

    def shard_program(axes: dict[str, MeshAxes], *shards: jax.Array) -> Sequence[jax.Array]:
        if op.shard_program is None:
            return tuple(run_kernel(*shards))
        kernel_of_one_batch = functools.partial(kernel.bind, **own_params, donated=donated)
        program = functools.partial(op.shard_program, kernel_of_one_batch, axes, **own_params)
        # A part of an operand may have sizes of 1 where the operand does not: the batch shares it no more than before.
        batch = joint_sizes(shards, count_batch_dims(params))
        shards = tuple(
            shard
            if is_shared(aval.shape, len(batch))
            else jnp.broadcast_to(shard, (*batch, *shard.shape[len(batch) :]))
            for aval, shard in zip(ctx.avals_in, shards, strict=True)
        )
        return tuple(merge_batch(program, len(batch))(*shards))

    layout = op.layout(ctx.avals_in, ctx.avals_out, params)
    call = partitioned(run_kernel, shard_program, layout, resolve(op.whole, own_params), op.reduced)
    # A partitioned call holds no more than its shapes and the address of a Python object. Without the op's name and its
    # params, JAX's persistent compilation cache could take one program for another.
    identity = f"{op.name}({own_params | {'donated': donated}}) of jax_baracuda {VERSION}"
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
    if op.missing_kernel(platform, ctx.avals_in, params) is not None:
        return _lower_reference(op, ctx, *operands, **params)
    if count_batch_dims(params) > 1:
        kernel = functools.partial(op.kernel, **definition_params(params), donated=donated)
        # Explicit sharding would refuse to merge dimensions; here the arrays are those of one device.
        shapes = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
        with jax_versions.without_abstract_mesh():
            merged = mlir.lower_fun(merge_batch(kernel, count_batch_dims(params)), multiple_results=True)
            return merged(ctx.replace(avals_in=shapes), *operands)
    num_results = len(ctx.avals_out)
    if op.plan_parameters is not None:
        scratch_bytes = op.plan(platform, ctx.avals_in, params).scratch_bytes
        if scratch_bytes > 0:
            scratch = jax.core.ShapedArray((scratch_bytes,), np.dtype(np.uint8))
            ctx = ctx.replace(avals_out=[*ctx.avals_out, scratch])
    donated_in_place = {i: op.in_place_if_donated[i] for i in donated}
    in_place = {
        operand: result
        for operand, result in (dict(resolve(op.in_place, params)) | donated_in_place).items()
        if ctx.avals_in[operand].shape == ctx.avals_out[result].shape
    }
    rule = jax.ffi.ffi_lowering(target_name(op.name), operand_output_aliases=in_place)
    return rule(ctx, *operands, **attributes_of(op, params))[:num_results]


def attributes_of(op: Op, params: Mapping[str, Any]) -> dict[str, Any]:
    """What the native handler takes of the params, and the number of its leading batch dimensions."""
    attributes = {
        name: np.array(jax.tree.leaves(params[name]), np.int64) if isinstance(params[name], tuple) else params[name]
        for name in op.attributes
    }
    return attributes | ({"num_batch_dims": count_batch_dims(params)} if op.takes_batch_dims else {})


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
