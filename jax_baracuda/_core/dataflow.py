"""Where the values of a program come from, while JAX lowers it: what XLA may fuse, overwrite or copy.

`ctx` is the context of the rule that lowers a call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jax_baracuda._core.native import target_name

_VIEWS = ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "sdy.sharding_constraint")
"""Operations that repeat elements, or leave an array as it is if its number of elements stays the same."""


def origin(ctx: Any, value: ir.Value[Any]) -> ir.Value[Any]:
    """The value whose elements a value holds, before :data:`_VIEWS` of it and the functions that return it."""
    while not isinstance(operation := value.owner, ir.Block):
        if operation.name == "func.call":
            value = returned(ctx, value)
        elif operation.name in _VIEWS:
            value = operation.operands[0]
        else:
            break
    return value


def returned(ctx: Any, value: ir.Value[Any]) -> ir.Value[Any]:
    """What a function returns for the result of a call: a value in the function, or an operand of the call."""
    operation: Any = value.owner
    result = results_of(ctx, operation)[ir.OpResult(value).result_number]
    if isinstance(result.owner, ir.Block):
        return operation.operands[ir.BlockArgument(result).arg_number]
    return result


def results_of(ctx: Any, call: Any) -> Sequence[ir.Value[Any]]:
    """The values that a called function returns, in its own block."""
    callee = ctx.module_context.symbol_table[ir.FlatSymbolRefAttr(call.attributes["callee"]).value]
    *_, end = callee.operation.regions[0].blocks[0]
    return end.operands


def num_elements(value: ir.Value[Any]) -> int:
    return math.prod(ir.RankedTensorType(value.type).shape)


_MAX_VISITED = 500
"""Longer searches would take more time than they are worth."""


# ----------------------------------------------------------------------------------------------------------------------
# Fusion: which values XLA may compute inside their readers.


_IN_MEMORY = frozenset(
    f"stablehlo.{name}"
    for name in (
        "all_gather all_to_all cholesky collective_broadcast collective_permute constant convolution custom_call dot "
        "dot_general dynamic_update_slice fft optimization_barrier rng rng_bit_generator triangular_solve"
    ).split()
)
"""Operations without a body whose results XLA writes to memory. It also writes the results of all with a body."""


def is_computed(ctx: Any, value: ir.Value[Any]) -> bool:
    """Whether XLA may fuse the computation of a value into its reader, instead of writing the value to memory.

    The operation that makes the value decides, such as a gather or an elementwise one. The arguments of a function
    count as written: its callers are unknown.
    """
    operation: Any = value.owner
    if isinstance(operation, ir.Block):
        return False
    if operation.name == "func.call":
        return is_computed(ctx, returned(ctx, value))
    if operation.name in _VIEWS and num_elements(operation.operands[0]) == num_elements(value):
        return is_computed(ctx, operation.operands[0])
    return not _is_in_memory(operation)


def _is_in_memory(operation: Any) -> bool:
    """Whether XLA writes the result of an operation to memory."""
    return not _multiplies(operation) and (operation.name in _IN_MEMORY or len(operation.regions) > 0)


def _multiplies(operation: Any) -> bool:
    """Whether an operation is a product that adds up nothing: for XLA, a multiplication."""
    if operation.name != "stablehlo.dot_general":
        return False
    numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    shape = ir.RankedTensorType(operation.operands[0].type).shape
    return math.prod(shape[dim] for dim in numbers.lhs_contracting_dimensions) == 1


def is_negated(ctx: Any, value: ir.Value[Any]) -> bool:
    """Whether the numbers of a value are negated, and then at most converted, where XLA may fuse that."""
    operation: Any = origin(ctx, value).owner
    while not isinstance(operation, ir.Block) and operation.name == "stablehlo.convert":
        operation = origin(ctx, operation.operands[0]).owner
    return not isinstance(operation, ir.Block) and operation.name == "stablehlo.negate"


def may_be_computed(value: ir.Value[Any]) -> bool:
    """Whether a value is an argument of a function that the program calls. XLA may fuse what its callers pass."""
    if not isinstance(value.owner, ir.Block):
        return False
    return _function_of(value) not in (None, "main")


def repeats_softmax(ctx: Any, value: ir.Value[Any]) -> bool:
    """Whether a fusion would compute the weights of an attention again for each feature that they multiply.

    It would compute exponentials of differences from gathered maxima behind a broadcast. Weights that a matrix product
    reads from memory are not computed again.
    """
    seen: set[Any] = set()
    pending = [(value, False)]  # and whether its numbers are repeated
    while pending and len(seen) < _MAX_VISITED:
        value, is_repeated = pending.pop()
        operation: Any = value.owner
        if (value, is_repeated) in seen or isinstance(operation, ir.Block):
            continue
        seen.add((value, is_repeated))
        if _is_written_for_another(value):
            continue
        if operation.name == "func.call":  # its result may depend on any operand
            pending += [(x, is_repeated) for x in (returned(ctx, value), *operation.operands)]
            continue
        if is_repeated and _is_softmax(ctx, operation):
            return True
        if not _is_in_memory(operation):
            pending += [(x, is_repeated or _repeats(operation, x)) for x in operation.operands]
    return False


def _is_written_for_another(value: ir.Value[Any]) -> bool:
    """Whether a matrix product that was lowered before reads a value from memory."""
    return any([_is_of_a_product(use.owner) for use in value.uses])


def _is_of_a_product(operation: Any) -> bool:
    """Whether an operation is a matrix product, or passes its operand to one."""
    if operation.name in ("stablehlo.reshape", "stablehlo.transpose"):
        return _is_written_for_another(operation.results[0])
    return operation.name == "stablehlo.dot_general" and not _multiplies(operation)


def _repeats(operation: Any, operand: ir.Value[Any]) -> bool:
    """Whether an operation uses each number of an operand for several numbers of the result."""
    can_repeat = operation.name == "stablehlo.broadcast_in_dim" or _multiplies(operation)
    return can_repeat and 1 < num_elements(operand) < num_elements(operation.results[0])


def _is_softmax(ctx: Any, operation: Any) -> bool:
    """Whether an operation is the exponential of a difference from numbers that are gathered, as maxima are."""
    if operation.name != "stablehlo.exponential" or isinstance(operation.operands[0].owner, ir.Block):
        return False
    difference: Any = operation.operands[0].owner
    return difference.name == "stablehlo.subtract" and _is_gathered(ctx, difference.operands[1])


def _is_gathered(ctx: Any, value: ir.Value[Any]) -> bool:
    """Whether numbers are gathered, also if a select replaces those of ids out of range."""
    operation: Any = origin(ctx, value).owner
    if isinstance(operation, ir.Block):
        return False
    if operation.name == "stablehlo.select":
        return any(_is_gathered(ctx, x) for x in operation.operands[1:])
    return operation.name == "stablehlo.gather"


# ----------------------------------------------------------------------------------------------------------------------
# Memory: which arrays are arguments that XLA may overwrite, and which values may be read from them.


def is_donated_argument(value: ir.Value[Any]) -> bool:
    """Whether a value of a program under lowering is a donated argument of the whole program."""
    if not isinstance(value, ir.BlockArgument):
        return False
    if _function_of(value) != "main":
        return False
    attributes = ir.DictAttr(ir.ArrayAttr(_owner(value).attributes["arg_attrs"])[value.arg_number])
    return "tf.aliasing_output" in attributes or "jax.buffer_donor" in attributes


def is_carried(array: ir.Value[Any]) -> bool:
    """Whether an array is one that a loop carries, possibly after updates."""
    argument = updated_argument(array)
    return argument is not None and _is_of_loop(argument)


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


def _has_own_memory(ctx: Any, argument: ir.Value[Any]) -> bool:
    """Whether no other argument of its block can be this array, or computed from it, after XLA has inlined calls."""
    is_called_elsewhere = ctx.module_context.lowering_parameters.for_export
    return _is_of_loop(argument) or (_function_of(argument) == "main" and not is_called_elsewhere)


_LOOP_BODIES = ("closed_call", "eval_jaxpr")
"""The names of the function with the body of a ``scan``, in older and in newer versions of JAX."""


def _is_of_loop(argument: ir.Value[Any]) -> bool:
    return _owner(argument).name == "stablehlo.while" or (_function_of(argument) or "").startswith(_LOOP_BODIES)


def _function_of(argument: ir.Value[Any]) -> str | None:
    """The name of the function with this argument; None if it belongs to a loop or a branch."""
    owner = _owner(argument)
    return str(owner.attributes["sym_name"].value) if owner.name == "func.func" else None


def _owner(argument: Any) -> Any:
    """The operation that an argument belongs to: a function, a loop, a branch or a shard_map."""
    return argument.owner.owner.operation
