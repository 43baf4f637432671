"""Lowers an op to XLA: to a call of its kernel, on one device or on the shards of a mesh, or to plain JAX."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import element_bits
from jax_baracuda._core.batch import is_shared, map_over_batch, map_over_dims, mapped_dims
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.dataflow import (
    is_computed,
    is_donated_argument,
    is_negated,
    may_read,
    repeats_softmax,
    updated_argument,
)
from jax_baracuda._core.dispatch import Decision, adds_up, alternative_of, decide, missing_kernel
from jax_baracuda._core.known_values import is_ascending, known_integers
from jax_baracuda._core.native import KERNEL_PLATFORMS, target_name
from jax_baracuda._core.rules import Site
from jax_baracuda._core.selection import KERNEL_IF_ANY, not_redirected, redirected, selecting
from jax_baracuda._core.sharding import ShardAxes, partitioned

Listener = Callable[[OpCall, Decision, mlir.LoweringRuleContext], OpCall]
listeners: list[Listener] = []
"""Called with each call of an op that is lowered, and with the decision. They return the call. ``redirect`` gives those
that stand in the place of JAX's functions the param `is_redirected`."""


def lower(platform: str, call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Any:
    """Lowers an op on a platform with kernels."""
    call = _with_sorted_ids(call, ctx, operands)
    site = site_of(call, platform, ctx, operands)
    decision = decide(call, site)
    for listen in listeners:
        call = listen(call, decision, ctx)
    with not_redirected():  # the plain JAX of an op stays plain JAX
        return _lower_as_decided(decision, site, call, ctx, operands)


def _with_sorted_ids(call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> OpCall:
    """The call, with the promise that its ids are sorted if they are known to be."""
    if call.params.get("indices_are_sorted") is not False or "segment_ids" not in call.operand_dims:
        return call
    if not is_ascending(ctx, operands[list(call.operand_dims).index("segment_ids")]):
        return call
    return dataclasses.replace(call, all_params={**call.all_params, "indices_are_sorted": True})


def _lower_as_decided(
    decision: Decision, site: Site, call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]
) -> Any:
    runs_kernel = decision.implementation == "kernel"
    if call.selection != "xla" and (problem := call.missing_target(site.platform)) is not None:
        _warn_once(f"jax_baracuda: {call.name} runs as plain JAX on {site.platform}: {problem}")
    if not runs_kernel:
        operands = _with_barriers(call, ctx, operands)
    is_plain = not runs_kernel or call.op.program is call.op.reference
    # Programs with partitioned calls cannot be exported.
    if site.is_split and not (is_plain and ctx.module_context.lowering_parameters.for_export):
        return _lower_partitioned(call, site, runs_kernel, ctx, operands)
    # Not split, or exported in plain JAX, or in a shard_map that leaves several axes automatic: each device along them
    # gets whole arrays.
    return _lower_reference(call, ctx, operands) if is_plain else _call_target(call, site, ctx, operands)


def lower_elsewhere(call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Any:
    """Lowers an op on a platform without kernels."""
    if call.selection == "kernel":
        platforms = [platform for platform in jax_versions.platforms_of(ctx) if platform not in KERNEL_PLATFORMS]
        raise missing_kernel(call, platforms, f"there are kernels for {' and '.join(KERNEL_PLATFORMS)} only")
    with not_redirected():
        return _lower_reference(call, ctx, _with_barriers(call, ctx, operands))


def lower_kernel(platform: str, call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Any:
    """Lowers the kernel in the program of a shard or of a redirected call.

    It may support the whole array's shapes, but not the shard's.
    """
    with not_redirected():
        params = call.all_params
        site = Site(platform, donated=params.get("donated", ()), shares_sort=params.get("shares_sort", False))
        # The caller has picked plain JAX already, also for a deterministic call that has no kernel.
        if call.selection == "xla" or decide(call, site).implementation == "xla":
            return _lower_reference(call, ctx, operands)
        return _call_target(call, site, ctx, operands)


def site_of(call: OpCall, platform: str, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Site:
    """Where a call stands. `ctx` lowers the call, or the operation of JAX that the call replaces."""
    module, types = ctx.module_context, [*call.operands, *ctx.avals_out]
    has_empty_array = any([0 in x.shape for x in types])
    is_for_one_platform = len(module.platforms) == 1  # a branch for one of several platforms would copy the array
    in_place = call.resolve(call.op.in_place_if_donated) if is_for_one_platform else ()
    is_partitioned = jax_versions.automatic_axis(module.axis_context) is not None or jax_versions.partitioner_splits(
        module.axis_context
    )
    return Site(
        platform,
        fuses=_can_fuse(call, ctx, operands),
        donated=tuple(i for i in in_place if is_donated_argument(operands[i])),
        is_split=is_partitioned and not has_empty_array,
        misreads=not jax_versions.keeps_barriers() and bool(_rereading_operands(call, ctx, operands)),
        shares_sort=bool(redirected()) and not is_partitioned and _sorts_rows(call, platform),
        loses_empty_calls=has_empty_array and jax_versions.is_in_shard_map(module.axis_context),
    )


def _can_fuse(call: OpCall, ctx: Any, operands: Sequence[Any]) -> bool:
    """Whether XLA could fuse the computation of the first operand, or of one of the largest, with plain JAX."""
    has_segments = "segment_ids" in call.operand_dims  # the search takes time, and others have no attention weights
    main = [operands[i] for i in call.main_operands]
    return any([is_computed(ctx, x) and not (has_segments and repeats_softmax(ctx, x)) for x in main])


def _sorts_rows(call: OpCall, platform: str) -> bool:
    """Whether the kernel first sorts the ids of floating rows."""
    return bool(
        call.op.plan_parameters is not None
        and call.num_batch_dims == 0
        and jnp.issubdtype(call.dtype, jnp.floating)
        and call.unsupported_reason(platform) is None
        and call.plan(platform).strategy == "sort_then_tiles"
    )


def _lower_reference(call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Any:
    unfused: list[int] = []
    if list(jax_versions.platforms_of(ctx)) == ["cpu"] and call.has_static_shapes():
        written: list[Any] = [ctx.avals_in[i] for i in _written_operands(call)]
        if sum(math.prod(aval.shape) * element_bits(aval.dtype) // 8 for aval in written) >= MIN_UNFUSED_BYTES:
            # On CPUs, XLA fuses an in-place update with a read of part of the result, and then copies the whole array.
            in_place = call.resolve(call.op.in_place)
            unfused = [r for i, r in in_place.items() if updated_argument(operands[i]) is not None]

    def reference(*operands: jax.Array) -> list[jax.Array]:
        results = call.reference(*operands)
        return [jax.lax.optimization_barrier(x) if i in unfused else x for i, x in enumerate(results)]

    return mlir.lower_fun(reference, multiple_results=True)(ctx, *operands)


MIN_UNFUSED_BYTES = 256
"""Smaller updates get no barrier. It would count as an access to the whole array, and XLA compiles a loop as one
function only if a step accesses less than 1 KB."""


def _written_operands(call: OpCall) -> list[int]:
    """The operands that plain JAX writes into the arrays that are updated in place."""
    in_place = call.resolve(call.op.in_place)
    return [i for factor in call.transposes for i in factor if i not in in_place] if in_place else []


def _with_barriers(call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Sequence[Any]:
    """The operands of plain JAX, behind barriers where XLA must not fuse them.

    Two kinds have barriers: updates that may read the array that they overwrite, because XLA misses such a read through
    a reshape, and on GPUs rows that are negated before they are added.
    """
    values = list(operands)
    for i in {*_rereading_operands(call, ctx, operands), *_negated_operands(call, ctx, operands)}:
        aval = ctx.avals_in[i]
        unfused = mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False)
        [values[i]] = unfused(ctx.replace(avals_in=[aval], avals_out=[aval]), values[i])
    return values


def _negated_operands(call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> list[int]:
    """The rows that are negated and then added: see :func:`adds_slowly`. Only sums are linear in the rows."""
    is_sum = adds_up(call.op) and (0,) in call.transposes
    if not is_sum or list(jax_versions.platforms_of(ctx)) != ["cuda"]:
        return []
    return [0] if adds_slowly(ctx, operands[0], call.dtype) else []


def adds_slowly(ctx: mlir.LoweringRuleContext, rows: Any, dtype: Any, subtracts: bool = False) -> bool:
    """Whether XLA for GPUs adds rows slowly, because it fuses their negation into the sum.

    That takes as long as a subtraction, for which GPUs have no atomic operation. 219,040 sorted rows of 3, 16 and 64
    numbers took 10, 13 and 13 times as long as behind a barrier (H200), and integers took no longer. The forces on both
    ends of an edge are such rows.
    """
    return jnp.issubdtype(dtype, jnp.floating) and (subtracts or is_negated(ctx, rows))


def _rereading_operands(call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> list[int]:
    """The written operands that may be computed from the array that they overwrite."""
    arrays = [operands[i] for i in call.resolve(call.op.in_place)]
    written = _written_operands(call)
    return [i for i in written if any(may_read(ctx, operands[i], array) for array in arrays)]


def _lower_partitioned(
    call: OpCall, site: Site, runs_kernel: bool, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]
) -> Any:
    """The call, split over devices. The choice is made once, for the programs of all shards."""
    op, kernel = call.op, call.op.kernel_primitive
    axis_context: Any = ctx.module_context.axis_context
    automatic_axis = jax_versions.automatic_axis(axis_context)
    mapped = mapped_dims(ctx.avals_in, call.num_batch_dims)
    of_kernel = {"donated": site.donated, "implementation": call.kernel_selection}
    chosen = of_kernel if runs_kernel else {"implementation": "xla"}
    params = {**call.all_params, **chosen}

    def shard_program(axes: ShardAxes, *shards: jax.Array) -> Sequence[jax.Array]:
        run_kernel = functools.partial(op.kernel, **call.params, **chosen)
        program = (
            call.of_operands(op.shard_program, run_kernel, axes) if op.shard_program else call.of_operands(run_kernel)
        )
        with selecting(KERNEL_IF_ANY if runs_kernel else "xla"):  # also what other ops compute for the program
            return tuple(map_over_dims(program, mapped, *shards))

    partitioned_call = partitioned(
        call.named_shapes,
        call.dims(op.replicated_dims),
        call.dims(op.reduction_dims),
        call.bound(op.min_shard_sizes)() if op.min_shard_sizes else {},
        functools.partial(kernel.bind, **params),
        shard_program,
        axis_context.mesh if automatic_axis is not None else None,
    )
    with jax_versions.partitioning_over(automatic_axis):
        results = mlir.lower_fun(partitioned_call, multiple_results=True)(ctx, *operands)
    jax_versions.finish_partitioned_call(ctx, results[0].owner, call.name, op, params)
    return [
        jax_versions.lower_with_sharding_in_types(ctx, result, aval)
        for result, aval in zip(results, ctx.avals_out, strict=True)
    ]


def _call_target(call: OpCall, site: Site, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Any:
    """Lowers to a call of the native target, or to the op's program of several kernels."""
    op = call.op
    if (constants := _constant_results(call, ctx, operands)) is not None:
        return lower_without_mesh(lambda *_: [jnp.asarray(x) for x in constants], ctx, operands)
    if (program := op.program or alternative_of(call, site)) is not None:
        mapped_program = functools.partial(map_over_batch, call.of_operands(program), call.num_batch_dims)
        with selecting(KERNEL_IF_ANY):
            return lower_without_mesh(mapped_program, ctx, operands)
    ctx, operands = _with_whole_batch(call, ctx, operands)
    num_results = len(ctx.avals_out)
    if op.plan_parameters is not None:
        scratch_bytes = call.plan(site.platform).scratch_bytes
        if scratch_bytes > 0:
            scratch = jax.core.ShapedArray((scratch_bytes,), np.dtype(np.uint8))
            ctx = ctx.replace(avals_out=[*ctx.avals_out, scratch])
    of_donated = call.resolve(op.in_place_if_donated)
    in_place = dict(call.resolve(op.in_place)) | {i: of_donated[i] for i in site.donated}
    avals_in: Sequence[Any] = ctx.avals_in
    avals_out: Sequence[Any] = ctx.avals_out
    aliases = {
        operand: result for operand, result in in_place.items() if avals_in[operand].shape == avals_out[result].shape
    }
    rule = jax.ffi.ffi_lowering(target_name(call.name), operand_output_aliases=aliases)
    return rule(ctx, *operands, **call.attributes())[:num_results]


def _constant_results(
    call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]
) -> Sequence[np.ndarray] | None:
    """The results of a call whose operands are constants of the program, if the op computes such results in advance."""
    if call.op.of_constants is None or call.num_batch_dims > 0:
        return None
    known = [known_integers(ctx, x) for x in operands]
    return None if any(x is None for x in known) else call.of_operands(call.op.of_constants)(*known)


def lower_without_mesh(
    function: Callable[..., Sequence[jax.Array]], ctx: mlir.LoweringRuleContext, operands: Sequence[Any]
) -> Any:
    """Lowers a function of the arrays of one device, where explicit shardings do not apply."""
    avals: Sequence[Sequence[Any]] = (ctx.avals_in, ctx.avals_out)
    with jax_versions.without_abstract_mesh():
        avals_in, avals_out = ([jax.core.ShapedArray(x.shape, x.dtype) for x in xs] for xs in avals)
        rule = mlir.lower_fun(function, multiple_results=True)
        return rule(ctx.replace(avals_in=avals_in, avals_out=avals_out), *operands)


def _with_whole_batch(
    call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]
) -> tuple[mlir.LoweringRuleContext, Sequence[Any]]:
    """Broadcasts operands that share only some batch dimensions. A handler takes those that share all or none."""
    num_batch_dims = call.num_batch_dims
    avals: list[Any] = list(ctx.avals_in)
    values = list(operands)
    for i, aval in enumerate(avals):
        if aval.shape[:num_batch_dims] != call.batch and not is_shared(aval.shape, num_batch_dims):
            avals[i] = jax.core.ShapedArray((*call.batch, *aval.shape[num_batch_dims:]), aval.dtype)
            broadcast = functools.partial(jnp.broadcast_to, shape=avals[i].shape)
            of_one = ctx.replace(avals_in=[aval], avals_out=[avals[i]])
            [values[i]] = lower_without_mesh(lambda x, broadcast=broadcast: [broadcast(x)], of_one, [operands[i]])
    return ctx.replace(avals_in=avals), values


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
