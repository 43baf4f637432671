"""What is known of the numbers in arrays of a program, while JAX lowers it.

`ctx` is the context of the rule that lowers a call.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from jax_baracuda._core.dataflow import num_elements, origin, results_of


def splat_of(ctx: Any, value: ir.Value[Any]) -> bool | int | float | None:
    """The number that an array holds everywhere; None if it is unknown or complex."""
    elements = _constant(origin(ctx, value))
    if elements is None or not elements.is_splat:
        return None
    for kind in (ir.FloatAttr, ir.BoolAttr, ir.IntegerAttr):
        with contextlib.suppress(ValueError, TypeError):  # also if it is complex
            return kind(elements.get_splat_value()).value
    return None


def is_ascending(ctx: Any, ids: ir.Value[Any]) -> bool:
    """Whether ids are known to ascend: constants, and what ``jnp.sort`` returns."""
    if math.prod(shape := ir.RankedTensorType(ids.type).shape) != max(shape, default=0):
        return False
    source = origin(ctx, ids)
    if not isinstance(source.owner, ir.Block) and source.owner.name == "stablehlo.sort":
        is_whole = list(ir.RankedTensorType(source.type).shape) == [max(shape)]
        return is_whole and _sorts(source.owner, ir.OpResult(source).result_number)
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
        if num_elements(value) > MAX_KNOWN_INTEGERS:
            return None
        operands = [known(x, arguments) for x in operation.operands]
        if operation.name == "func.call":
            return known(results_of(ctx, operation)[ir.OpResult(value).result_number], operands)
        if any(x is None for x in operands):
            return None
        return _EVALUATED[operation.name](value, *operands)

    return known(value)


def _is_array(value: ir.Value[Any]) -> bool:
    """Whether a value is an array, and no token of an ordered effect."""
    with contextlib.suppress(ValueError, TypeError):
        return ir.RankedTensorType(value.type) is not None
    return False


def _constant(value: ir.Value[Any]) -> Any:
    """The elements of a constant array, as a ``DenseElementsAttr``; None if the value is no such array."""
    operation: Any = value.owner
    if isinstance(operation, ir.Block) or operation.name != "stablehlo.constant":
        return None
    with contextlib.suppress(ValueError, TypeError):
        return ir.DenseElementsAttr(operation.attributes["value"])
    return None


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
