"""A call of an op as JAX's rules see it, and what follows from the op's definition for its types and params."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import element_bits, in_automatic_mode
from jax_baracuda._core.batch import is_shared, map_over_batch, vmap_sizes
from jax_baracuda._core.functions import keyword_names, resolved, with_named
from jax_baracuda._core.native import NATIVE_MODULES, Plan, missing_target
from jax_baracuda._core.op import Dimensions, Op, Shape, ShapeAndDtype, Transpose
from jax_baracuda._core.selection import KERNEL_IF_ANY, Selection, selecting
from jax_baracuda._core.sharding import NamedShapes, spec_entries


def written_out(dimensions: Dimensions, shape: Sequence[int]) -> Dimensions:
    """`dimensions` with "..." written out: trailing dimension k is named "...k"."""
    if dimensions[-1:] != ("...",):
        return dimensions
    leading = dimensions[:-1]
    return (*leading, *[f"...{k}" for k in range(len(shape) - len(leading))])


NamedShape = tuple[tuple[str, ...], tuple[int, ...]]
"""The names of an array's dimensions, and its shape."""


def joint_sizes(arrays: Sequence[NamedShape]) -> dict[str, int]:
    """The size of each named dimension; size-1 dimensions take the others' size."""
    sizes: dict[str, int] = {}
    for names, shape in arrays:
        for name, size in zip(names, shape, strict=True):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
    return sizes


def num_features(sizes: Mapping[str, int]) -> int:
    """The product of the dimensions "head", "feature" and all without a name."""
    return math.prod([size for dim, size in sizes.items() if dim in ("head", "feature") or dim.startswith("...")])


@dataclasses.dataclass(frozen=True, eq=False)
class OpCall:
    """A call of an op as JAX's rules see it: with the dimensions that ``vmap`` has added.

    The functions of a definition do not see these dimensions.
    """

    op: Op
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
        of_core = ("num_batch_dims", "implementation", "donated", "shares_sort")
        return {name: value for name, value in self.all_params.items() if name not in of_core}

    @functools.cached_property
    def name(self) -> str:
        """The name of the native target, also used in messages."""
        return next(name for name, params in self.op.targets.items() if params.items() <= self.all_params.items())

    @functools.cached_property
    def transposes(self) -> dict[tuple[int, ...], Transpose]:
        """The transposes of the op, by the positions of the operands in which it is linear."""
        names, transposes = list(self.operand_dims), self.resolve(self.op.transposes)
        return {tuple(map(names.index, of)): x for of, x in transposes.items() if set(of).issubset(names)}

    @functools.cached_property
    def selection(self) -> Selection:
        """The implementation that the call asks for."""
        return self.all_params.get("implementation")

    @property
    def kernel_selection(self) -> Selection:
        """The selection for the calls that this call's kernel makes. A shard's call may have no kernel."""
        return "kernel" if self.selection == "kernel" else KERNEL_IF_ANY

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the first operand."""
        return np.dtype(self.operands[0].dtype)

    @functools.cached_property
    def batch(self) -> tuple[int, ...]:
        """The sizes of the batch dimensions, after broadcasting the operands."""
        return vmap_sizes(self.operands, self.num_batch_dims) if self.num_batch_dims else ()

    @functools.cached_property
    def own_operands(self) -> Sequence[Any]:
        """The types of the operands as the functions of a definition see them."""
        if self.num_batch_dims == 0:
            return self.operands
        return [jax.ShapeDtypeStruct(x.shape[self.num_batch_dims :], x.dtype) for x in self.operands]

    @functools.cached_property
    def main_operands(self) -> list[int]:
        """The positions of the first operand and of the largest ones."""
        shapes = [x.shape for x in self.operands]
        sizes = [math.prod(shape) if jax_versions.is_static_shape(shape) else 0 for shape in shapes]
        return [i for i, size in enumerate(sizes) if i == 0 or size == max(sizes)]

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the definition, given the params that it names, and the sizes if it names them."""
        names_sizes = "sizes" in (keyword_names(function) or ())
        return with_named(function, {**self.params, "sizes": self.sizes} if names_sizes else self.params)

    def of_operands(self, function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
        """A function of the call's operands: a function of the definition, with the params and its `first` arguments
        filled in."""
        return lambda *operands: self.bound(function)(*first, *self.op.by_name(operands, self.params).values())

    @functools.cached_property
    def operand_dims(self) -> dict[str, Dimensions]:
        """The dimensions of the operands."""
        return self.op.operand_dims(self.params)

    def resolve(self, field: Any) -> Any:
        """The value of a field of the definition: a field that is a function is called with the params."""
        return resolved(field, self.params)

    def dims(self, field: Any) -> tuple[str, ...]:
        """The dimensions that a field of the definition names, with "..." written out."""
        names: tuple[str, ...] = self.resolve(field)
        unnamed = (name for name in self.named_shapes.all_sizes if name.startswith("..."))
        return (*names, *unnamed) if "..." in names else names

    def result_types(self) -> list[ShapeAndDtype]:
        """The shapes and dtypes of the results, with the batch dimensions."""
        types_of = self.op.result_types
        types = self.of_operands(types_of)(*self.own_operands) if types_of is not None else self._named_types()
        return [((*self.batch, *shape), dtype) for shape, dtype in types]

    def result_avals(self) -> list[Any]:
        """The types of the results, with the shardings of explicit mode."""
        types = self.result_types()
        specs = [jax_versions.explicit_spec(aval) for aval in self.operands]
        if all(spec is None for spec in specs):
            return [jax_versions.result_aval(self.operands[0], shape, dtype, None) for shape, dtype in types]
        has_mesh = next(aval for aval, spec in zip(self.operands, specs, strict=True) if spec is not None)
        shapes = self.named_shapes
        assignment = shapes.assign([*specs, *(None for _ in types)], self.dims(self.op.replicated_dims))
        return [
            jax_versions.result_aval(has_mesh, shape, dtype, spec_entries(names, assignment))
            for (shape, dtype), names in zip(types, shapes.results, strict=True)
        ]

    def reference(self, *operands: jax.Array) -> list[jax.Array]:
        """The call in plain JAX. Under explicit sharding, mesh axes are automatic inside; results get a sharding."""
        # When JAX differentiates a jitted function, its constants are NumPy arrays, which take no tracer as an index.
        operands = tuple(map(jnp.asarray, operands))
        own_reference = self.of_operands(self.op.reference)

        def reference(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(map_over_batch(own_reference, self.num_batch_dims, *operands))

        types = [jax.typeof(x) for x in operands]
        if any(jax_versions.explicit_spec(x) is not None for x in types):
            results = OpCall(self.op, types, self.all_params).result_avals()
            reference = in_automatic_mode(reference, results[0], *(result.sharding.spec for result in results))
        with selecting(self.selection):
            return list(reference(*operands))

    def _named_types(self) -> list[ShapeAndDtype]:
        """The types of the results, with shapes derived from the named dimensions."""
        op, operands, sizes = self.op, self.own_operands, self.sizes
        results = self.resolve(op.results).values()
        rest = tuple(name for name in sizes if name.startswith("..."))
        dtypes = (
            self.of_operands(op.result_dtypes)(*operands) if op.result_dtypes else [operands[0].dtype] * len(results)
        )
        return [
            (tuple(sizes[name] for d in names for name in (rest if d == "..." else (d,))), np.dtype(dtype))
            for names, dtype in zip(results, dtypes, strict=True)
        ]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the named dimensions, without those that ``vmap`` has added."""
        of_operands = joint_sizes(self._with_names(self.operand_dims, [x.shape for x in self.own_operands]))
        return {**of_operands, **self.resolve(self.op.result_sizes)}

    def _with_names(self, arrays: Any, shapes: Sequence[Shape], num_batch_dims: int = 0) -> list[NamedShape]:
        """The shapes of operands or results, which start with the batch dimensions, and the names of all dimensions."""
        batch = tuple(f"batch{i}" for i in range(num_batch_dims))
        names_of_each = self.resolve(arrays).values()
        return [
            (batch + written_out(names, shape[num_batch_dims:]), shape)
            for names, shape in zip(names_of_each, shapes, strict=False)
        ]

    @functools.cached_property
    def named_shapes(self) -> NamedShapes:
        """The named dimensions of the operands and results."""
        op, num_batch_dims = self.op, self.num_batch_dims
        operands = self._with_names(self.operand_dims, [x.shape for x in self.operands], num_batch_dims)
        results = self._with_names(op.results, [shape for shape, _ in self.result_types()], num_batch_dims)
        sizes = joint_sizes(operands + results)

        def without_broadcast(arrays: Sequence[NamedShape]) -> tuple[tuple[str | None, ...], ...]:
            return tuple(
                tuple(name if size == sizes[name] else None for name, size in zip(*array, strict=True))
                for array in arrays
            )

        return NamedShapes(without_broadcast(operands), without_broadcast(results), sizes)

    @functools.cached_property
    def measures(self) -> dict[str, int]:
        """What rules compare: the sizes of the named dimensions, and these.

        "batch": the number of its elements. "rows": those of data, or the edges, in the whole batch. "ids": those of
        segments, fewer than the rows if a batch shares them. "features": see :func:`num_features`. "bytes": of all
        operands and results. "element_bits": of the narrowest operand. "row_bytes": of the first operand.
        """
        sizes = self.sizes
        row_dim = next((name for name in ("row", "edge") if name in sizes), None)
        types = [*((x.shape, x.dtype) for x in self.operands), *self.result_types()]
        ids = dict(zip(self.operand_dims, self.operands, strict=False)).get("segment_ids")
        num_bits = sum(math.prod(shape) * element_bits(dtype) for shape, dtype in types)
        return {
            **sizes,
            "batch": math.prod(self.batch),
            **({} if row_dim is None else {"rows": math.prod(self.batch) * sizes[row_dim]}),
            **({} if ids is None else {"ids": math.prod(ids.shape)}),
            "features": num_features(sizes),
            "bytes": num_bits // 8,
            "element_bits": min(element_bits(x.dtype) for x in self.operands),
            "row_bytes": math.prod(self.own_operands[0].shape[1:]) * self.dtype.itemsize,
        }

    def plan(self, platform: str) -> Plan:
        """The strategy and the scratch memory of the platform's kernel, for a call that it supports."""
        op = self.op
        assert op.plan_parameters is not None
        parameters = dict(self.of_operands(op.plan_parameters)(*self.own_operands))
        if not op.broadcasts:
            size = math.prod(self.batch)
            parameters["batch"] = size
            for name, operand in zip(self.operand_dims, self.operands, strict=False):
                parameters[f"{name}_is_shared"] = size != 1 and is_shared(operand.shape, self.num_batch_dims)
        # A product of sizes overflows only for an array without elements, where 0 serves as well.
        fitting = {name: int(value) if value < 2**63 else 0 for name, value in parameters.items()}
        return NATIVE_MODULES[platform].plan(self.name, fitting)

    def has_static_shapes(self) -> bool:
        """Whether no size in the operands or the params is symbolic."""
        is_symbolic = any(map(jax.export.is_symbolic_dim, self.params.values()))
        return not is_symbolic and all([jax_versions.is_static_shape(x.shape) for x in self.operands])

    def missing_target(self, platform: str) -> str | None:
        """Why the platform has no native target for this call; None if it has one."""
        return missing_target(platform, None if self.op.program is not None else self.name)

    def unsupported_reason(self, platform: str) -> str | None:
        """Why the kernel on the platform does not support this call; None if it does."""
        return self.missing_target(platform) or self.problem()

    def problem(self) -> str | None:
        """Why no kernel supports this call, on any platform; None if there may be one."""
        op = self.op
        if not self.has_static_shapes():
            return "its shapes are symbolic"
        dtypes = self.resolve(op.dtypes)
        for i in (0, *itertools.chain(*self.transposes)):
            if (dtype := self.operands[i].dtype.name) not in dtypes:
                return f"there is no kernel for {dtype}"
        if any(self.operands[i].shape[: self.num_batch_dims] != self.batch for i in self.resolve(op.in_place)):
            return "the batch shares an array that is written"
        return self.of_operands(op.limit)(*self.own_operands) if op.limit is not None else None

    def attributes(self) -> dict[str, Any]:
        """The params that the native handler takes."""
        params = self.params
        attributes = {
            name: np.array(jax.tree.leaves(params[name]), np.int64) if isinstance(params[name], tuple) else params[name]
            for name in self.resolve(self.op.attributes)
        }
        return attributes if self.op.broadcasts else attributes | {"num_batch_dims": np.int64(self.num_batch_dims)}
