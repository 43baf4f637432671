"""Lowers an op to XLA: to a call of its kernel, on one device or on the shards of a mesh, or to plain JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import element_bits
from jax_baracuda._core.batch import is_shared, map_over_batch, mapped_dims
from jax_baracuda._core.dispatch import Decision, Site, alternative_of, decide, missing_kernel
from jax_baracuda._core.native import KERNEL_PLATFORMS, target_name
from jax_baracuda._core.selection import KERNEL_IF_ANY, not_redirected, redirected
from jax_baracuda._core.sharding import ShardAxes, partitioned

if TYPE_CHECKING:
    from jax_baracuda._core.op import OpCall


Listener = Callable[["OpCall", Decision, mlir.LoweringRuleContext], None]
listeners: list[Listener] = []
"""Called with each call of an op that is lowered, and with the decision."""


def lower(platform: str, call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Any:
    """Lowers an op on a platform with kernels."""
    call = _with_sorted_ids(call, ctx, operands)
    site = site_of(call, platform, ctx, operands)
    decision = decide(call, site)
    for listen in listeners:
        listen(call, decision, ctx)
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
    platform, runs_kernel = site.platform, decision.implementation == "kernel"
    if call.selection != "xla" and (problem := call.missing_target(platform)) is not None:
        _warn_once(f"jax_baracuda: {call.name} runs as plain JAX on {platform}: {problem}")
    if not runs_kernel:
        operands = _with_unfused_updates(call, ctx, operands)
    is_plain = not runs_kernel or call.op.program is call.op.reference
    # Programs with partitioned calls cannot be exported.
    if is_plain and (not site.is_split or ctx.module_context.lowering_parameters.for_export):
        return _lower_reference(call, ctx, operands)
    if not site.is_split:
        # This includes a shard_map that leaves several axes automatic: each device along them gets whole arrays.
        return _call_target(call, site, ctx, operands)
    # The choice is made once, for the whole program.
    strict = call.selection == "kernel"
    chosen = {"donated": site.donated, "implementation": "kernel" if strict else KERNEL_IF_ANY}
    return _lower_partitioned(call, chosen if runs_kernel else {"implementation": "xla"}, ctx, operands)


def lower_elsewhere(call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Any:
    """Lowers an op on a platform without kernels."""
    if call.selection == "kernel":
        platforms = [platform for platform in jax_versions.platforms_of(ctx) if platform not in KERNEL_PLATFORMS]
        raise missing_kernel(call, platforms, f"there are kernels for {' and '.join(KERNEL_PLATFORMS)} only")
    with not_redirected():
        return _lower_reference(call, ctx, _with_unfused_updates(call, ctx, operands))


def lower_kernel(platform: str, call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Any:
    """Lowers the kernel in the program of a shard or of a redirected call.

    It may support the whole array's shapes, but not the shard's.
    """
    with not_redirected():
        params = call.all_params
        site = Site(platform, donated=params.get("donated", ()), sorts_apart=params.get("sorts_apart", False))
        if decide(call, site).implementation == "xla":
            return _lower_reference(call, ctx, operands)
        return _call_target(call, site, ctx, operands)


def site_of(call: OpCall, platform: str, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Site:
    """Where a call stands. `ctx` is that of the call or of what it serves."""
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
        donated=tuple(i for i in in_place if _is_donated_argument(operands[i])),
        is_split=is_partitioned and not has_empty_array,
        misreads=not jax_versions.keeps_barriers() and bool(_rereading_operands(call, ctx, operands)),
        sorts_apart=bool(redirected()) and not is_partitioned and _sorts_rows(call, platform),
        loses_empty_calls=has_empty_array and jax_versions.is_in_shard_map(module.axis_context),
    )


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
            unfused = [r for i, r in in_place.items() if _updated_argument(operands[i]) is not None]

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


def _with_unfused_updates(call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> Sequence[Any]:
    """The operands of plain JAX, behind barriers where an update may read the array that it overwrites.

    XLA misses such a read if it goes through a reshape.
    """
    values = list(operands)
    for i in _rereading_operands(call, ctx, operands):
        aval = ctx.avals_in[i]
        unfused = mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False)
        [values[i]] = unfused(ctx.replace(avals_in=[aval], avals_out=[aval]), values[i])
    return values


def _rereading_operands(call: OpCall, ctx: mlir.LoweringRuleContext, operands: Sequence[Any]) -> list[int]:
    """The written operands that may be computed from the array that they overwrite."""
    arrays = [operands[i] for i in call.resolve(call.op.in_place)]
    written = _written_operands(call)
    return [i for i in written if any(_may_read(ctx, operands[i], array) for array in arrays)]


def _lower_partitioned(
    call: OpCall, chosen: Mapping[str, Any], ctx: mlir.LoweringRuleContext, operands: Sequence[Any]
) -> Any:
    """The call, split over devices. `chosen` are extra params of the kernel in the program of a shard."""
    op, kernel = call.op, call.op.kernel_primitive
    axis_context: Any = ctx.module_context.axis_context
    automatic_axis = jax_versions.automatic_axis(axis_context)
    mapped = mapped_dims(ctx.avals_in, call.num_batch_dims)
    params = {**call.all_params, **chosen}

    def shard_program(axes: ShardAxes, *shards: jax.Array) -> Sequence[jax.Array]:
        run_kernel = functools.partial(op.kernel, **call.params, **chosen)
        program = (
            call.of_operands(op.shard_program, run_kernel, axes) if op.shard_program else call.of_operands(run_kernel)
        )
        return tuple(map_over_batch(program, mapped, *shards))

    partitioned_call = partitioned(
        call,
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
        mapped = mapped_dims(ctx.avals_in, call.num_batch_dims)
        return lower_without_mesh(functools.partial(map_over_batch, call.of_operands(program), mapped), ctx, operands)
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


# ----------------------------------------------------------------------------------------------------------------------
# What XLA may fuse: an analysis of the program under lowering, for the values that an op reads.


def _is_donated_argument(value: ir.Value[Any]) -> bool:
    """Whether a value of a program under lowering is a donated argument of the whole program."""
    if not isinstance(value, ir.BlockArgument):
        return False
    if _function_of(value) != "main":
        return False
    attributes = ir.DictAttr(ir.ArrayAttr(_owner(value).attributes["arg_attrs"])[value.arg_number])
    return "tf.aliasing_output" in attributes or "jax.buffer_donor" in attributes


def _can_fuse(call: OpCall, ctx: Any, operands: Sequence[Any]) -> bool:
    """Whether XLA could fuse the computation of the first operand, or of one of the largest, with plain JAX."""
    has_segments = "segment_ids" in call.operand_dims  # the search takes time, and others have no attention weights
    main = [operands[i] for i in call.main_operands]
    return any([_is_computed(ctx, x) and not (has_segments and _repeats_softmax(ctx, x)) for x in main])


_IN_MEMORY = frozenset(
    f"stablehlo.{name}"
    for name in (
        "all_gather all_to_all cholesky collective_broadcast collective_permute constant convolution custom_call dot "
        "dot_general dynamic_update_slice fft optimization_barrier rng rng_bit_generator triangular_solve"
    ).split()
)
"""Operations without a body whose results XLA writes to memory. It also writes the results of all with a body."""


_VIEWS = ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "sdy.sharding_constraint")
"""Operations that repeat elements, or leave an array as it is if its number of elements stays the same."""


def _is_computed(ctx: Any, value: ir.Value[Any]) -> bool:
    """Whether XLA may fuse the computation of a value into its reader, instead of writing the value to memory.

    The operation that makes the value decides, such as a gather or an elementwise one. The arguments of a function
    count as written: its callers are unknown.
    """
    operation: Any = value.owner
    if isinstance(operation, ir.Block):
        return False
    if operation.name == "func.call":
        return _is_computed(ctx, _returned(ctx, value))
    if operation.name in _VIEWS and _num_elements(operation.operands[0]) == _num_elements(value):
        return _is_computed(ctx, operation.operands[0])
    return operation.name not in _IN_MEMORY and len(operation.regions) == 0


def _repeats_softmax(ctx: Any, value: ir.Value[Any]) -> bool:
    """Whether a fusion would compute the weights of an attention again for each feature that they multiply.

    It would compute exponentials of differences from gathered maxima behind a broadcast.
    """
    seen: set[Any] = set()
    pending = [(value, False)]  # and whether its numbers are repeated
    while pending and len(seen) < _MAX_VISITED:
        value, is_repeated = pending.pop()
        operation: Any = value.owner
        if (value, is_repeated) in seen or isinstance(operation, ir.Block):
            continue
        seen.add((value, is_repeated))
        if operation.name == "func.call":  # its result may depend on any operand
            pending += [(x, is_repeated) for x in (_returned(ctx, value), *operation.operands)]
            continue
        if is_repeated and _is_softmax(ctx, operation):
            return True
        if operation.name not in _IN_MEMORY and len(operation.regions) == 0:
            pending += [(x, is_repeated or _expands(operation)) for x in operation.operands]
    return False


def _expands(operation: Any) -> bool:
    """Whether each number of an array is used for several numbers of the result."""
    is_broadcast = operation.name == "stablehlo.broadcast_in_dim"
    return is_broadcast and 1 < _num_elements(operation.operands[0]) < _num_elements(operation.results[0])


def _is_softmax(ctx: Any, operation: Any) -> bool:
    """Whether an operation is the exponential of a difference from numbers that are gathered, as maxima are."""
    if operation.name != "stablehlo.exponential" or isinstance(operation.operands[0].owner, ir.Block):
        return False
    difference: Any = operation.operands[0].owner
    return difference.name == "stablehlo.subtract" and _is_gathered(ctx, difference.operands[1])


def _is_gathered(ctx: Any, value: ir.Value[Any]) -> bool:
    """Whether numbers are gathered, also if a select replaces those of ids out of range."""
    operation: Any = _origin(ctx, value).owner
    if isinstance(operation, ir.Block):
        return False
    if operation.name == "stablehlo.select":
        return any(_is_gathered(ctx, x) for x in operation.operands[1:])
    return operation.name == "stablehlo.gather"


def _num_elements(value: ir.Value[Any]) -> int:
    return math.prod(ir.RankedTensorType(value.type).shape)


_MAX_VISITED = 500


def _may_read(ctx: Any, value: ir.Value[Any], array: ir.Value[Any]) -> bool:
    """Whether XLA might compute a value from `array` in the fusion that overwrites `array`.

    False if `array` is an argument of the whole program or of a loop, possibly updated, and the value does not depend
    on this argument. Anything else counts as possible: XLA's simplifications may turn two arrays into one.
    """
    argument = _updated_argument(array)
    if argument is None or not _has_own_memory(ctx, argument):
        return True
    seen: set[Any] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if current == argument or len(seen) > _MAX_VISITED:
            return True
        if current in seen or isinstance(current.owner, ir.Block):
            continue
        if current.owner.name in ("stablehlo.case", "stablehlo.if"):  # their branches read more than operands
            return True
        seen.add(current)
        pending += current.owner.operands
    return False


def _updated_argument(array: ir.Value[Any]) -> ir.Value[Any] | None:
    """The argument of a program, function or loop that an array is, possibly after updates; None if it is none."""
    operation: Any = array.owner
    while not isinstance(operation, ir.Block):
        of_each = operation.name == "stablehlo.optimization_barrier" or _writes_slices(operation)
        if not of_each and operation.name not in (*_VIEWS, "stablehlo.dynamic_update_slice"):
            return None
        array = operation.operands[ir.OpResult(array).result_number if of_each else 0]
        operation = array.owner
    return array


def _writes_slices(operation: Any) -> bool:
    """Whether an operation is the kernel that updates slices, whose results are its first operands."""
    return operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == target_name(
        "write_slice"
    )


_LOOP_BODIES = ("closed_call", "eval_jaxpr")
"""The names of the function with the body of a ``scan``, in older and in newer versions of JAX."""


def _has_own_memory(ctx: Any, argument: ir.Value[Any]) -> bool:
    """Whether no other argument of its block can be this array, or computed from it, after XLA has inlined calls."""
    is_called_elsewhere = ctx.module_context.lowering_parameters.for_export
    return _is_of_loop(argument) or (_function_of(argument) == "main" and not is_called_elsewhere)


def is_carried(array: ir.Value[Any]) -> bool:
    """Whether an array is one that a loop carries, possibly after updates."""
    argument = _updated_argument(array)
    return argument is not None and _is_of_loop(argument)


def _is_of_loop(argument: ir.Value[Any]) -> bool:
    return _owner(argument).name == "stablehlo.while" or (_function_of(argument) or "").startswith(_LOOP_BODIES)


def _function_of(argument: ir.Value[Any]) -> str | None:
    """The name of the function with this argument; None if it belongs to a loop or a branch."""
    owner = _owner(argument)
    return str(owner.attributes["sym_name"].value) if owner.name == "func.func" else None


def _owner(argument: Any) -> Any:
    """The operation that an argument belongs to: a function, a loop, a branch or a shard_map."""
    return argument.owner.owner.operation


def may_be_computed(value: ir.Value[Any]) -> bool:
    """Whether a value is an argument of a function that the program calls. XLA may fuse what its callers pass."""
    if not isinstance(value.owner, ir.Block):
        return False
    return _function_of(value) not in (None, "main")


def splat_of(ctx: Any, value: ir.Value[Any]) -> bool | int | float | None:
    """The number that an array holds everywhere; None if it is unknown or complex."""
    elements = _constant(_origin(ctx, value))
    if elements is None or not elements.is_splat:
        return None
    for kind in (ir.FloatAttr, ir.BoolAttr, ir.IntegerAttr):
        with contextlib.suppress(ValueError, TypeError):  # also if it is complex
            return kind(elements.get_splat_value()).value
    return None


def _constant(value: ir.Value[Any]) -> Any:
    """The elements of a constant array, as a ``DenseElementsAttr``; None if the value is no such array."""
    operation: Any = value.owner
    if isinstance(operation, ir.Block) or operation.name != "stablehlo.constant":
        return None
    with contextlib.suppress(ValueError, TypeError):
        return ir.DenseElementsAttr(operation.attributes["value"])
    return None


def _origin(ctx: Any, value: ir.Value[Any]) -> ir.Value[Any]:
    """The value whose elements a value holds, before :data:`_VIEWS` of it and the functions that return it."""
    while not isinstance(operation := value.owner, ir.Block):
        if operation.name == "func.call":
            value = _returned(ctx, value)
        elif operation.name in _VIEWS:
            value = operation.operands[0]
        else:
            break
    return value


def _returned(ctx: Any, value: ir.Value[Any]) -> ir.Value[Any]:
    """What a function returns for the result of a call: a value in the function, or an operand of the call."""
    operation: Any = value.owner
    result = _results_of(ctx, operation)[ir.OpResult(value).result_number]
    if isinstance(result.owner, ir.Block):
        return operation.operands[ir.BlockArgument(result).arg_number]
    return result


def _results_of(ctx: Any, call: Any) -> Sequence[ir.Value[Any]]:
    """The values that a called function returns, in its own block."""
    callee = ctx.module_context.symbol_table[ir.FlatSymbolRefAttr(call.attributes["callee"]).value]
    *_, end = callee.operation.regions[0].blocks[0]
    return end.operands


def is_ascending(ctx: Any, ids: ir.Value[Any]) -> bool:
    """Whether ids are known to ascend: constants, and what ``jnp.sort`` returns."""
    if math.prod(shape := ir.RankedTensorType(ids.type).shape) != max(shape, default=0):
        return False
    origin = _origin(ctx, ids)
    if not isinstance(origin.owner, ir.Block) and origin.owner.name == "stablehlo.sort":
        is_whole = list(ir.RankedTensorType(origin.type).shape) == [max(shape)]
        return is_whole and _sorts(origin.owner, ir.OpResult(origin).result_number)
    known = known_integers(ctx, ids)
    return known is not None and ascend(known.reshape(-1))


def ascend(ids: np.ndarray) -> bool:
    return bool(np.all(ids[:-1] <= ids[1:]))


def _sorts(operation: Any, result: int) -> bool:
    """Whether a sort makes this result ascend: it is the first, and the sort compares nothing else."""
    block = operation.regions[0].blocks[0]
    comparison, *rest = block
    return bool(
        result == 0
        and len(rest) == 1
        and comparison.name == "stablehlo.compare"
        and "LT" in str(comparison.attributes["comparison_direction"])
        and list(comparison.operands) == [block.arguments[0], block.arguments[1]]
    )


MAX_KNOWN_INTEGERS = 1 << 20
_MAX_EVALUATED = 50
"""The treatment of negative ids and the clipping of ids take fewer operations."""
_COMPARISONS = {"LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal}


def known_integers(ctx: Any, value: ir.Value[Any]) -> np.ndarray | None:
    """The elements of an array of integers or bool that the program computes from constants; None if unknown."""
    num_evaluated = 0

    def known(value: ir.Value[Any], arguments: Sequence[np.ndarray | None] = ()) -> np.ndarray | None:
        """`arguments`: those of the function that computes the value."""
        nonlocal num_evaluated
        operation: Any = value.owner
        if isinstance(operation, ir.Block):
            number = ir.BlockArgument(value).arg_number
            return arguments[number] if number < len(arguments) else None
        num_evaluated += 1
        is_evaluated = operation.name == "func.call" or operation.name in _EVALUATED
        if num_evaluated > _MAX_EVALUATED or not is_evaluated or not _is_array(value):
            return None
        if _num_elements(value) > MAX_KNOWN_INTEGERS:
            return None
        operands = [known(x, arguments) for x in operation.operands]
        if operation.name == "func.call":
            return known(_results_of(ctx, operation)[ir.OpResult(value).result_number], operands)
        if any(x is None for x in operands):
            return None
        return _EVALUATED[operation.name](value, *operands)

    return known(value)


def _is_array(value: ir.Value[Any]) -> bool:
    """Whether a value is an array, and no token of an ordered effect."""
    with contextlib.suppress(ValueError, TypeError):
        return ir.RankedTensorType(value.type) is not None
    return False


def _integers_of_constant(value: ir.Value[Any]) -> np.ndarray | None:
    elements = _constant(value)
    array = None if elements is None else np.asarray(elements)
    return array if array is not None and array.dtype.kind in "iub" else None


def _converted(value: ir.Value[Any], x: np.ndarray) -> np.ndarray | None:
    name = str(ir.RankedTensorType(value.type).element_type)
    is_integer = name in ("i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64")
    return x.astype(name.replace("i", "int")) if is_integer else None


def _broadcast(value: ir.Value[Any], x: np.ndarray) -> np.ndarray | None:
    operation: Any = value.owner
    shape, dims = ir.RankedTensorType(value.type).shape, list(operation.attributes["broadcast_dimensions"])
    if dims != sorted(dims):  # a transpose, which JAX itself does not write so
        return None
    own = dict(zip(dims, x.shape, strict=True))
    return np.broadcast_to(x.reshape([own.get(d, 1) for d in range(len(shape))]), shape)


def _compared(value: ir.Value[Any], x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    operation: Any = value.owner
    direction = str(operation.attributes["comparison_direction"])
    return next((compare(x, y) for name, compare in _COMPARISONS.items() if name in direction), None)


_EVALUATED: dict[str, Callable[..., Any]] = {
    "stablehlo.add": lambda _, x, y: x + y,
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.clamp": lambda _, low, x, high: np.clip(x, low, high),
    "stablehlo.compare": _compared,
    "stablehlo.constant": _integers_of_constant,
    "stablehlo.convert": _converted,
    "stablehlo.maximum": lambda _, x, y: np.maximum(x, y),
    "stablehlo.minimum": lambda _, x, y: np.minimum(x, y),
    "stablehlo.reshape": lambda value, x: x.reshape(ir.RankedTensorType(value.type).shape),
    "stablehlo.select": lambda _, condition, x, y: np.where(condition, x, y),
}
"""Operations on integers: ``(result, *operands) -> its elements``."""
