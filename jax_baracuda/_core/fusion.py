"""What XLA may fuse: an analysis of the program under lowering, for the values that an op reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from jax_baracuda._core.jax_versions import is_static_shape


def is_donated_argument(value: ir.Value[Any]) -> bool:
    """Whether a value of a program under lowering is a donated argument of the whole program."""
    if not isinstance(value, ir.BlockArgument):
        return False
    owner: Any = value.owner.owner.operation  # may be a loop or a shard_map instead of a function
    if owner.name != "func.func" or owner.attributes["sym_name"].value != "main":
        return False
    attributes = ir.DictAttr(ir.ArrayAttr(owner.attributes["arg_attrs"])[value.arg_number])
    return "tf.aliasing_output" in attributes or "jax.buffer_donor" in attributes


def can_fuse(ctx: Any, operands: Sequence[Any]) -> bool:
    """Whether XLA could fuse the computation of the first operand, or of one of the largest, with plain JAX."""
    avals: Sequence[Any] = ctx.avals_in
    sizes = [math.prod(aval.shape) if is_static_shape(aval.shape) else 0 for aval in avals]
    largest = max(sizes)
    return any(_is_computed(ctx, operand) for i, operand in enumerate(operands) if i == 0 or sizes[i] == largest)


_IN_MEMORY = frozenset(
    f"stablehlo.{name}"
    for name in (
        "all_gather all_to_all cholesky collective_broadcast collective_permute constant convolution custom_call dot "
        "dot_general dynamic_update_slice fft optimization_barrier rng rng_bit_generator triangular_solve"
    ).split()
)
"""Operations without a body whose results XLA writes to memory. It also writes the results of all with a body."""


_VIEWS = ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "sdy.sharding_constraint")
"""Operations that leave an array as it is if its number of elements stays the same."""


def _is_computed(ctx: Any, value: ir.Value[Any]) -> bool:
    """Whether XLA may fuse the computation of a value into its reader, instead of writing the value to memory.

    The operation that makes the value decides, such as a gather or an elementwise one. The arguments of a function
    count as written: its callers are unknown.
    """
    operation: Any = value.owner
    if isinstance(operation, ir.Block):
        return False
    if operation.name == "func.call":
        callee = ctx.module_context.symbol_table[ir.FlatSymbolRefAttr(operation.attributes["callee"]).value]
        *_, end = callee.operation.regions[0].blocks[0]
        result = end.operands[ir.OpResult(value).result_number]
        if isinstance(result.owner, ir.Block):
            result = operation.operands[ir.BlockArgument(result).arg_number]
        return _is_computed(ctx, result)
    if operation.name in _VIEWS and _num_elements(operation.operands[0]) == _num_elements(value):
        return _is_computed(ctx, operation.operands[0])
    return operation.name not in _IN_MEMORY and len(operation.regions) == 0


def _num_elements(value: ir.Value[Any]) -> int:
    return math.prod(ir.RankedTensorType(value.type).shape)


_MAX_VISITED = 500


def may_read(ctx: Any, value: ir.Value[Any], array: ir.Value[Any]) -> bool:
    """Whether XLA might compute a value from `array` in the fusion that overwrites `array`.

    False if `array` is an argument of the whole program or of a loop, possibly updated, and the value does not depend
    on this argument. Anything else counts as possible: XLA's simplifications may turn two arrays into one.
    """
    argument = updated_argument(array)
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


def updated_argument(array: ir.Value[Any]) -> ir.Value[Any] | None:
    """The argument of a program, function or loop that an array is, possibly after updates; None if it is none."""
    operation: Any = array.owner
    while not isinstance(operation, ir.Block):
        if operation.name not in (*_VIEWS, "stablehlo.dynamic_update_slice", "stablehlo.optimization_barrier"):
            return None
        result = ir.OpResult(array).result_number
        array = operation.operands[result if operation.name == "stablehlo.optimization_barrier" else 0]
        operation = array.owner
    return array


_LOOP_BODIES = ("closed_call", "eval_jaxpr")
"""The names of the function with the body of a ``scan``, in older and in newer versions of JAX."""


def _has_own_memory(ctx: Any, argument: ir.Value[Any]) -> bool:
    """Whether no other argument of its block can be this array, or computed from it, after XLA has inlined calls."""
    block: Any = argument.owner
    owner: Any = block.owner.operation
    if owner.name != "func.func":
        return bool(owner.name == "stablehlo.while")
    name = owner.attributes["sym_name"].value
    is_called_elsewhere = ctx.module_context.lowering_parameters.for_export
    return name.startswith(_LOOP_BODIES) or (name == "main" and not is_called_elsewhere)
