"""One call of an op: the types of its operands, its params, and what follows from them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import element_bits
from jax_baracuda._core.batch import is_shared, vmap_sizes
from jax_baracuda._core.definition import Dimensions, OpDefinition, ShapeAndDtype, with_named
from jax_baracuda._core.native import NATIVE_MODULES, Plan, missing_target
from jax_baracuda._core.selection import Selection
from jax_baracuda._core.sharding import NamedShapes


def written_out(dimensions: Dimensions, shape: Sequence[int]) -> Dimensions:
    """`dimensions` with "..." written out: trailing dimension k is named "...k"."""
    if dimensions[-1:] != ("...",):
        return dimensions
    leading = dimensions[:-1]
    return leading + tuple(f"...{k}" for k in range(len(shape) - len(leading)))


def joint_sizes(names_of_each: Sequence[Dimensions], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """The size of each named dimension; size-1 dimensions take the others' size."""
    sizes: dict[str, int] = {}
    for names, shape in zip(names_of_each, shapes, strict=True):
        for name, size in zip(names, shape, strict=True):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
    return sizes


@dataclasses.dataclass(frozen=True, eq=False)
class OpCall:
    """A call of an op as JAX's rules see it: with the dimensions that ``vmap`` has added.

    The functions of a definition do not see these dimensions.
    """

    op: OpDefinition
    operands: Sequence[Any]
    """The types of the operands."""
    all_params: Mapping[str, Any]
    """The params of the primitive."""

    @functools.cached_property
    def num_batch_dims(self) -> int:
        """How many leading dimensions of operands and results ``vmap`` has added."""
        return self.all_params.get("num_batch_dims", 0)

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """The params for the functions of a definition: all except the params that only ``_core`` uses."""
        of_core = ("num_batch_dims", "implementation")
        return {name: value for name, value in self.all_params.items() if name not in of_core}

    @functools.cached_property
    def name(self) -> str:
        """The name of the native target, also used in messages."""
        return next(name for name, params in self.op.targets.items() if params.items() <= self.all_params.items())

    @functools.cached_property
    def linear(self) -> list[int]:
        """The positions of the operands in which an op with a `transpose` is linear."""
        names = list(self.resolve(self.op.operands))
        return [names.index(name) for name in self.resolve(self.op.linear) or names[:1]]

    @functools.cached_property
    def selection(self) -> Selection:
        """The implementation that the call asks for."""
        return self.all_params.get("implementation")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the first operand."""
        return np.dtype(self.operands[0].dtype)

    @functools.cached_property
    def batch(self) -> tuple[int, ...]:
        """The sizes of the batch dimensions, after broadcasting the operands."""
        return vmap_sizes(self.operands, self.num_batch_dims)

    @functools.cached_property
    def own_operands(self) -> Sequence[Any]:
        """The types of the operands as the functions of a definition see them."""
        if self.num_batch_dims == 0:
            return self.operands
        return [jax.ShapeDtypeStruct(x.shape[self.num_batch_dims :], x.dtype) for x in self.operands]

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the definition, given the params that it names."""
        return with_named(function, self.params)

    def resolve(self, field: Any) -> Any:
        """The value of a field of the definition: a field that is a function is called with the params."""
        return self.bound(field)() if callable(field) else field

    def result_types(self) -> list[ShapeAndDtype]:
        """The shapes and dtypes of the results, with the batch dimensions."""
        types = self.bound(self.op.result_types)(*self.own_operands) if self.op.result_types else self._named_types()
        return [((*self.batch, *shape), dtype) for shape, dtype in types]

    def _named_types(self) -> list[ShapeAndDtype]:
        """The types of the results, with shapes derived from the named dimensions."""
        op, operands = self.op, self.own_operands
        shapes = [tuple(x.shape) for x in operands]
        sizes = joint_sizes(self._dimensions(op.operands, shapes), shapes) | dict(self.resolve(op.sizes or {}))
        results = self.resolve(op.results).values()
        rest = tuple(name for name in sizes if name.startswith("..."))
        dtypes = self.bound(op.result_dtypes)(*operands) if op.result_dtypes else [operands[0].dtype] * len(results)
        return [
            (tuple(sizes[name] for d in names for name in (rest if d == "..." else (d,))), np.dtype(dtype))
            for names, dtype in zip(results, dtypes, strict=True)
        ]

    def _dimensions(self, arrays: Any, shapes: Sequence[Sequence[int]]) -> tuple[Dimensions, ...]:
        dimensions = self.resolve(arrays).values()
        return tuple(written_out(names, shape) for names, shape in zip(dimensions, shapes, strict=False))

    def named_shapes(self, results: Sequence[Any]) -> NamedShapes:
        """The named dimensions of the operands, and of results of these types."""
        batch = tuple(f"batch{i}" for i in range(self.num_batch_dims))

        def named(arrays: Any, shapes: Sequence[Sequence[int]]) -> tuple[Dimensions, ...]:
            own_shapes = [shape[self.num_batch_dims :] for shape in shapes]
            return tuple(batch + names for names in self._dimensions(arrays, own_shapes))

        operand_shapes, result_shapes = (tuple(tuple(x.shape) for x in arrays) for arrays in (self.operands, results))
        operand_names, result_names = named(self.op.operands, operand_shapes), named(self.op.results, result_shapes)
        sizes = joint_sizes(operand_names + result_names, operand_shapes + result_shapes)
        return NamedShapes(operand_names, result_names, operand_shapes, result_shapes, sizes)

    def sizes(self) -> dict[str, int]:
        """The sizes that rules use: the named dimensions, "features" (the product of "head", "feature" and all unnamed
        dimensions), "bytes" (of all operands and results), "element_bits" (of the narrowest operand), "rank" and
        "row_bytes" (of the first operand)."""
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self.result_types()]
        sizes = self.named_shapes(results).sizes
        unnamed = [name for name in sizes if name.startswith("...")]
        num_bits = sum(math.prod(x.shape) * element_bits(x.dtype) for x in (*self.operands, *results))
        return {
            **{name: size for name, size in sizes.items() if name not in unnamed},
            "features": math.prod(sizes.get(name, 1) for name in (*unnamed, "head", "feature")),
            "bytes": num_bits // 8,
            "element_bits": min(element_bits(x.dtype) for x in self.operands),
            "rank": len(self.own_operands[0].shape),
            "row_bytes": math.prod(self.own_operands[0].shape[1:]) * self.dtype.itemsize,
        }

    def plan(self, platform: str) -> Plan:
        """The strategy and the scratch memory of the platform's kernel, for a call that it supports."""
        op = self.op
        assert op.plan_parameters is not None
        parameters = dict(self.bound(op.plan_parameters)(*self.own_operands))
        if not op.broadcasts:
            size = math.prod(self.batch)
            parameters["batch"] = size
            for name, operand in zip(self.resolve(op.operands), self.operands, strict=False):
                parameters[f"{name}_is_shared"] = size != 1 and is_shared(operand.shape, self.num_batch_dims)
        # A product of sizes overflows only for an array without elements, where 0 serves as well.
        fitting = {name: int(value) if value < 2**63 else 0 for name, value in parameters.items()}
        return NATIVE_MODULES[platform].plan(self.name, fitting)

    def has_static_shapes(self) -> bool:
        """Whether no size in the operands or the params is symbolic."""
        is_symbolic = any(map(jax_versions.is_symbolic, self.params.values()))
        return not is_symbolic and all(jax_versions.is_static_shape(x.shape) for x in self.operands)

    def missing_target(self, platform: str) -> str | None:
        """Why the platform has no native target for this call; None if it has one."""
        return missing_target(platform, None if self.op.program is not None else self.name)

    def unsupported_reason(self, platform: str) -> str | None:
        """Why the kernel on the platform does not support this call; None if it does."""
        op = self.op
        if (problem := self.missing_target(platform)) is not None:
            return problem
        if not self.has_static_shapes():
            return "its shapes are symbolic"
        for dtype in (self.operands[i].dtype.name for i in (0, *self.linear)):
            if dtype not in op.dtypes:
                return f"there is no kernel for {dtype}"
        if any(self.operands[i].shape[: self.num_batch_dims] != self.batch for i in self.resolve(op.in_place)):
            return "the batch shares an array that is written"
        return self.bound(op.limit)(*self.own_operands) if op.limit is not None else None

    def attributes(self) -> dict[str, Any]:
        """The params that the native handler takes."""
        params = self.params
        attributes = {
            name: np.array(jax.tree.leaves(params[name]), np.int64) if isinstance(params[name], tuple) else params[name]
            for name in self.op.attributes
        }
        return attributes if self.op.broadcasts else attributes | {"num_batch_dims": np.int64(self.num_batch_dims)}
