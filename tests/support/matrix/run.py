"""Runs a case: the op and its reference under one transformation, compared element by element.

The allowed error of an element is ``(4 + 4 sqrt(terms)) * eps of the accumulator * majorant``, and then the rounding of
the result to its dtype. The majorant is the sum of the magnitudes of the terms: the same transformation of the
reference, applied to absolute values. If JAX or the op rounds in between (a gradient that is added up over a batch,
second derivatives), some eps of the dtype times the majorant are added. Selections, extrema, gathers and windows must
equal the reference bit by bit. If the majorant is out of range, terms of the result may be, too, so any result passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.cases import is_floating
from support.matrix.calls import Dims, Draw, Operand, Problem, as_tuple, is_inexact
from support.matrix.generator import DERIVATIVES, EXPORTS, FORWARD, JACOBIANS, SECOND_DERIVATIVES, SHARD_MAPS, Case

import jax_baracuda

AXES = ("a", "b")
WIDE = ("int64", "uint64", "float64", "complex128")


def num_devices() -> int:
    """A power of two: at most 4 simulated CPU devices, or at most 8 GPUs."""
    max_devices = 4 if jax.devices()[0].platform == "cpu" else 8
    return 1 << min(len(jax.devices()), max_devices).bit_length() - 1


@functools.cache
def mesh_of(axis_type: AxisType) -> Mesh:
    shape = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2)}[num_devices()]
    return Mesh(np.array(jax.devices()[: num_devices()]).reshape(shape), AXES, axis_types=(axis_type,) * 2)


# ----------------------------------------------------------------------------------------------------------------------
# The arrays of a case.


@dataclasses.dataclass(frozen=True)
class Level:
    """A dimension that vmap or a scan maps."""

    name: str
    size: int
    axes: tuple[int | None, ...]
    """The mapped axis of each operand; None: not mapped."""


@dataclasses.dataclass(frozen=True)
class Array:
    """An argument of a program."""

    name: str
    dims: Dims
    """All dimensions, including mapped ones."""
    element: Dims
    """The dimensions of one element of the batch."""
    axes: tuple[int | None, ...]
    """The mapped axis for each level, or None. Its position counts the mapped axes of inner levels."""
    dtype: str
    draw: Draw
    has_sign: bool = False

    def draw_all(self, rng: np.random.Generator, size_of: Callable[[str], int], levels: Sequence[Level]) -> np.ndarray:
        element = tuple(size_of(name) for name in self.element)
        mapped = [level.size for level, axis in zip(levels, self.axes, strict=True) if axis is not None]
        dtype = jnp.dtype(self.dtype)
        elements = [np.asarray(self.draw(rng, element, dtype), dtype) for _ in range(math.prod(mapped))]
        array = np.array(elements, dtype).reshape((*mapped, *element))
        # Moves the axis of each level, innermost first, to its place behind the outer ones.
        for depth in range(len(mapped) - 1, -1, -1):
            axis = [axis for axis in self.axes if axis is not None][depth]
            array = np.moveaxis(array, depth, depth + axis)
        return array


@dataclasses.dataclass(frozen=True)
class Output:
    """A result of a program."""

    kind: str
    """"value", "gradient" or "tangent"."""
    dims: Dims
    dtype: str | None
    """None: the case's dtype, or the reference's if that is not inexact."""


class Plan:
    """Everything about a case except its data."""

    def __init__(self, case: Case, batch_size: int | None = None):
        """With a batch of this size; None: a random size."""
        self.case = case
        self.batch_size = batch_size
        self.call = case.call()
        self.sizes = case.sizes()
        self.options = case.all_options()
        self.problem: Problem = self.call.problem(case.dtype, self.options, self.sizes)
        self.rng = np.random.default_rng([case.seed, 1])
        operands = self.problem.operands
        self.levels = self._levels(operands)
        self.operands = tuple(
            self._array(x.name, x.dims, self._axes(i), x.dtype or case.dtype, x.draw, x.has_sign)
            for i, x in enumerate(operands)
        )
        self.differentiated = tuple(
            i for i, x in enumerate(operands) if x.differentiable and is_inexact(x.dtype or case.dtype)
        )
        self.result_dtypes = self.problem.result_dtypes or (None,) * len(self.problem.results)
        self.extras, self.outputs = self._extras_and_outputs()
        self.arrays = (*self.operands, *self.extras)
        self.is_x64 = any(x.dtype in WIDE for x in self.arrays) or any(
            isinstance(value, str) and value.endswith("int64") for value in self.options.values()
        )
        self.uses_grad = bool(self.rng.random() < 0.5)
        self.uses_while = bool(self.rng.random() < 0.5)
        self.uses_symbols = bool(self.rng.random() < 0.5)
        self.mesh: Mesh | None = None
        self.assignment: dict[str, tuple[str, ...]] = {}
        self.own_assignments: dict[str, dict[str, tuple[str, ...]]] = {}
        """The assignments of arrays that are each split in a way of their own."""
        self.manual: frozenset[str] = frozenset()
        self.is_inside = False
        if case.sharding != "single":
            self._shard()

    def size_of(self, name: str) -> int:
        return size_of_dim(name, self.sizes, self.levels)

    # The batch.

    def _levels(self, operands: Sequence[Operand]) -> tuple[Level, ...]:
        batch = self.case.batch
        if batch == "none":
            return ()
        size = 4 if self.case.sharding != "single" else int(self.rng.choice([4, 3, 1, 0], p=[0.55, 0.3, 0.1, 0.05]))
        if self.batch_size is not None:
            size = self.batch_size
        if batch == "nested":
            mapped_of_each = [self._some(len(operands)) for _ in range(2)]
            sizes = (size, 2)
        else:
            mapped = [batch == "all" or batch == f"one:{x.name}" for x in operands]
            assert any(mapped), f"{self.case}: no such operand"
            mapped_of_each, sizes = [mapped], (size,)
        ranks = [len(x.dims) for x in operands]
        levels = []
        for depth in range(len(sizes) - 1, -1, -1):
            axes: list[int | None] = []
            for i, is_mapped in enumerate(mapped_of_each[depth]):
                is_first = (depth == 0 and self.case.transformation == "scan") or (
                    # JAX confuses the sharding of any other mapped axis with the first axis's.
                    self.case.sharding == "explicit" and jax.__version_info__ < (0, 9)
                )
                axes.append((0 if is_first else int(self.rng.integers(ranks[i] + 1))) if is_mapped else None)
                ranks[i] += is_mapped
            levels.insert(0, Level(("outer", "inner")[depth], sizes[depth], tuple(axes)))
        return tuple(levels)

    def _some(self, count: int) -> list[bool]:
        chosen = self.rng.random(count) < 0.5
        chosen[self.rng.integers(count)] = True
        return [bool(x) for x in chosen]

    def _axes(self, operand: int) -> tuple[int | None, ...]:
        return tuple(level.axes[operand] for level in self.levels)

    def _array(
        self, name: str, element: Dims, axes: tuple[int | None, ...], dtype: str, draw: Draw, has_sign: bool = False
    ) -> Array:
        dims = list(element)
        for level, axis in zip(reversed(self.levels), reversed(axes), strict=True):
            if axis is not None:
                dims.insert(axis, level.name)
        return Array(name, tuple(dims), element, axes, dtype, draw, has_sign)

    # Cotangents, tangents and results.

    def _extras_and_outputs(self) -> tuple[tuple[Array, ...], tuple[Output, ...]]:
        case, problem = self.case, self.problem
        batch = tuple(level.name for level in self.levels)
        first = (0,) * len(self.levels)
        values = tuple(
            Output("value", (*batch, *dims), dtype)
            for dims, dtype in zip(problem.results, self.result_dtypes, strict=True)
        )
        if case.transformation == "loop":
            assert problem.carry is not None
            operand = self.operands[problem.carry[0]]
            return (), (Output("value", (*batch, *operand.element), operand.dtype),)
        if case.transformation not in DERIVATIVES:
            return (), values
        cotangents = [
            self._array(f"d_{k}", dims, first, dtype or case.dtype, problem.draw_cotangents)
            for k, (dims, dtype) in enumerate(zip(problem.results, self.result_dtypes, strict=True))
            if is_inexact(self._dtype_of_result(k))
        ]
        primals = [self.operands[i] for i in self.differentiated]
        if case.transformation == "jacrev":
            return (), (Output("gradient", (*batch, *problem.results[0], *primals[0].element), primals[0].dtype),)
        if case.transformation == "hessian":
            return tuple(cotangents), (Output("gradient", (*batch, *primals[0].element * 2), primals[0].dtype),)
        tangents = [
            dataclasses.replace(x, name=f"t_{x.name}", draw=problem.draw_cotangents, has_sign=False) for x in primals
        ]
        if case.transformation in ("jvp", "linearize"):
            of_results = [dataclasses.replace(x, kind="tangent") for x, _ in zip(values, cotangents, strict=False)]
            return tuple(tangents), (*values, *of_results)
        if case.transformation == "vjp of vmap":
            return tuple(cotangents), (*values, *(Output("gradient", x.dims, x.dtype) for x in primals))
        gradients = [Output("gradient", (*batch, *x.element), x.dtype) for x in primals]
        if case.transformation == "grad of grad":
            second = [self._array(f"dd_{x.name}", x.element, first, x.dtype, problem.draw_cotangents) for x in primals]
            of_cotangents = [Output("gradient", x.dims, x.dtype) for x in cotangents]
            return (*cotangents, *second), (*gradients, *gradients, *of_cotangents)
        if case.transformation == "jvp of grad":
            tangents += [dataclasses.replace(x, name=f"t_{x.name}") for x in cotangents]
            return (*cotangents, *tangents), (*gradients, *gradients)
        if case.transformation == "grad of jvp":
            return (*tangents, *cotangents), (*gradients, *gradients)
        return tuple(cotangents), (*values, *gradients)

    def _dtype_of_result(self, k: int) -> str:
        if self.result_dtypes[k] is not None:
            return self.result_dtypes[k]
        return self.case.dtype if self.call.differentiable else "int32"

    def types(self) -> list[jax.ShapeDtypeStruct]:
        """The types of all arrays. In exports with symbolic sizes, free and mapped dimensions are symbolic."""
        dims = {name: self.size_of(name) for x in self.arrays for name in x.dims}
        if self.case.transformation in EXPORTS and self.uses_symbols:
            free = {*self.problem.free, *(level.name for level in self.levels)}
            names = sorted(name for name in free.intersection(dims) if dims[name] >= 2)
            scope = jax.export.SymbolicScope([f"{name} >= 2" for name in names])
            dims |= zip(names, jax.export.symbolic_shape(",".join(names), scope=scope), strict=True) if names else {}
        return [jax.ShapeDtypeStruct(tuple(dims[name] for name in x.dims), jnp.dtype(x.dtype)) for x in self.arrays]

    # Devices.

    def _shard(self) -> None:
        sharding, problem = self.case.sharding, self.problem
        self.mesh = mesh_of(AxisType.Explicit if sharding == "explicit" else AxisType.Auto)
        all_dims = {name for x in self.operands for name in x.dims if not name.startswith("1")}
        batch = {level.name for level in self.levels}
        if sharding == "explicit" and self.case.transformation == "scan":
            batch -= {"outer"}  # JAX cannot scan over a split axis
            all_dims -= {"outer"}
        if sharding in SHARD_MAPS:
            # XLA's partitioner refuses sums over a manual axis of size 1 beside an automatic axis, also in plain JAX.
            partly = AXES[1:] if self.mesh.shape[AXES[1]] > 1 else AXES[:1]
            self.manual = frozenset(partly if sharding == "partly manual" else AXES)
        order = AXES[::-1] if self.rng.random() < 0.5 else AXES
        is_inside = self.rng.random() < 0.5
        free = set(problem.free) | (batch if is_inside else set())
        for axis in order:
            allowed = free if axis in self.manual else all_dims
            self._split_some_dim(self.assignment, allowed & all_dims, axis)
        if not self.manual and self.rng.random() < 0.7:
            of_batch = {name: axes for name, axes in self.assignment.items() if name in batch}
            taken = {axis for axes in of_batch.values() for axis in axes}
            for x in self.arrays:
                own = self.own_assignments[x.name] = dict(of_batch)
                for axis in (axis for axis in order if axis not in taken):
                    self._split_some_dim(own, {name for name in x.element if not name.startswith("1")}, axis)
        if self.manual:
            self.is_inside = is_inside and self._may_be_inside()
            if not self.is_inside:
                for name in batch:
                    self.assignment[name] = tuple(x for x in self.assignment.get(name, ()) if x not in self.manual)

    def _split_some_dim(self, assignment: dict[str, tuple[str, ...]], dims: set[str], axis: str) -> None:
        """With probability 0.9, splits one of these dimensions along one more mesh axis."""
        fitting = sorted(name for name in dims if self._may_split(name, (*assignment.get(name, ()), axis)))
        if fitting and self.rng.random() < 0.9:
            name = fitting[self.rng.integers(len(fitting))]
            assignment[name] = (*assignment.get(name, ()), axis)

    def _may_split(self, name: str, axes: tuple[str, ...]) -> bool:
        """Whether these mesh axes may split a dimension. Uneven splits need an automatic program."""
        assert self.mesh is not None
        size, shards = self.size_of(name), math.prod(self.mesh.shape[x] for x in axes)
        if self.case.sharding == "auto" and self.case.transformation != "eager":
            return size >= shards
        return shards == 1 or (size > 0 and size % shards == 0)

    def _may_be_inside(self) -> bool:
        """Whether the transformation may be applied inside ``shard_map``: not if it sums over devices."""
        transformation = self.case.transformation
        if transformation in (*JACOBIANS, "loop"):
            return False
        if transformation not in DERIVATIVES or transformation in ("jvp", "linearize"):
            return True
        split = {name for name, axes in self.assignment.items() if self.manual.intersection(axes)}
        return all(split <= set(self.operands[i].dims) for i in self.differentiated)

    def spec_of(self, array: Array, only_even: bool = False) -> P:
        return self.spec(array.dims, None, only_even, self.own_assignments.get(array.name))

    def spec(
        self,
        dims: Dims,
        axes: frozenset[str] | None = None,
        only_even: bool = False,
        assignment: Mapping[str, tuple[str, ...]] | None = None,
    ) -> P:
        assignment = self.assignment if assignment is None else assignment
        entries = []
        for name in dims:
            split = tuple(x for x in assignment.get(name, ()) if axes is None or x in axes)
            if only_even and split and self.size_of(name) % math.prod(self.mesh.shape[x] for x in split) != 0:
                split = ()
            entries.append(split[0] if len(split) == 1 else (split or None))
        return P(*entries)

    # Programs.

    def program(self, function: Callable[..., Any], is_reference: bool) -> Callable[..., tuple[Any, ...]]:
        """``(*arrays) -> outputs``: the case's transformation of a function of the operands of one element, by name."""
        function = _of_positions(function, [x.name for x in self.operands])
        is_manual = bool(self.manual) and not is_reference
        if is_manual and not self.is_inside:
            specs = [self.spec(x.element, self.manual) for x in self.operands]
            function = self._shard_map(function, specs, [self.spec(x, self.manual) for x in self.problem.results])
        program = self._transformed(function, is_reference)
        if is_manual and self.is_inside:
            specs = [self.spec(x.dims, self.manual) for x in self.arrays]
            program = self._shard_map(program, specs, [self.spec(x.dims, self.manual) for x in self.outputs])
        if self.case.sharding == "auto" and not is_reference and self.case.transformation != "eager":
            program = self._constrained(program)
        return program

    def _shard_map(
        self, function: Callable[..., Any], in_specs: Sequence[P], out_specs: Sequence[P]
    ) -> Callable[..., Any]:
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(in_specs),
            out_specs=tuple(out_specs),
            axis_names=self.manual,
            check_vma=self.case.sharding != "shard_map, check_vma=False",
        )

    def _constrained(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Shards the arrays inside the program, because only there a mesh can split dimensions unevenly."""

        def constrained(*arrays: Any) -> Any:
            placed = (
                jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, self.spec_of(x)))
                for array, x in zip(arrays, self.arrays, strict=True)
            )
            return program(*placed)

        return constrained

    def _mapped(self, function: Callable[..., Any], arrays: Sequence[Array], scans: bool = False) -> Callable[..., Any]:
        for depth in range(len(self.levels) - 1, -1, -1):
            axes = tuple(x.axes[depth] for x in arrays)
            function = _scanned(function, axes) if scans and depth == 0 else jax.vmap(function, axes)
        return function

    def _transformed(self, function: Callable[..., Any], is_reference: bool) -> Callable[..., Any]:
        transformation, count = self.case.transformation, len(self.operands)
        wrap = {"jit": jax.jit, "checkpoint": jax.checkpoint}.get(transformation)
        if wrap is not None and not is_reference:
            function = wrap(function)
        if transformation == "loop":
            function = self._loop(function, is_reference)
        if transformation not in DERIVATIVES:
            return self._mapped(function, self.arrays, scans=transformation == "scan" and not is_reference)
        if transformation == "vjp of vmap":
            return functools.partial(_vjp, self._mapped(function, self.operands), count, self.differentiated)
        rule = RULES[transformation]
        if transformation in ("vjp", "export of vjp") and self.uses_grad and not is_reference:
            is_real = not any(x.dtype.startswith("complex") for x in self.arrays)
            rule = _value_and_grad if is_real and self.case.sharding in ("single", "auto") else rule
        rule = _jvp if is_reference and rule is _linearize else rule
        return self._mapped(functools.partial(rule, function, count, self.differentiated), self.arrays)

    def _loop(self, function: Callable[..., Any], is_reference: bool) -> Callable[..., Any]:
        operand, result = self.problem.carry

        def twice(*operands: Any) -> tuple[Any]:
            def step(carry: Any) -> Any:
                return _like(function(*operands[:operand], carry, *operands[operand + 1 :])[result], carry)

            if is_reference:
                return (step(step(operands[operand])),)
            if self.uses_while:
                _, carry = jax.lax.while_loop(
                    lambda state: state[0] < 2, lambda state: (state[0] + 1, step(state[1])), (0, operands[operand])
                )
                return (carry,)
            return (jax.lax.fori_loop(0, 2, lambda _, carry: step(carry), operands[operand]),)

        return twice


def size_of_dim(name: str, sizes: Mapping[str, Any], levels: Sequence[Level] = ()) -> int:
    if name.startswith("1"):
        return 1
    derived = {
        "state": lambda: sizes["tap"] - 1,
        "old": lambda: sizes["tap"] + 2,
        "half": lambda: sizes["feature"] // 2,
        "pair": lambda: 2,
        "two": lambda: 2,
        **{level.name: lambda level=level: level.size for level in levels},
    }
    if name in derived:
        return derived[name]()
    if name.startswith("feature") and "features" in sizes:
        return sizes["features"][int(name.removeprefix("feature") or 0)]
    return sizes[name]


def _of_positions(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """A function of arrays by name as one of arrays by position, whose result is a tuple."""
    return lambda *arrays: as_tuple(function(**dict(zip(names, arrays, strict=True))))


# ----------------------------------------------------------------------------------------------------------------------
# Transformations of a function of operands to a tuple.


def _scanned(function: Callable[..., Any], axes: Sequence[int | None]) -> Callable[..., Any]:
    """Applies the function to one element after the other, along axis 0 of the mapped arrays."""

    def scanned(*arrays: Any) -> Any:
        def step(carry: None, elements: Sequence[Any]) -> tuple[None, Any]:
            remaining = iter(elements)
            of_step = (x if axis is None else next(remaining) for x, axis in zip(arrays, axes, strict=True))
            return carry, function(*of_step)

        xs = tuple(x for x, axis in zip(arrays, axes, strict=True) if axis is not None)
        return jax.lax.scan(step, None, xs)[1]

    return scanned


def _split(
    function: Callable[..., Any], operands: Sequence[Any], positions: Sequence[int]
) -> tuple[Callable[..., Any], list[Any]]:
    """A function of only the operands at these positions, and these operands."""

    def of_some(*some: Any) -> Any:
        everything = list(operands)
        for i, x in zip(positions, some, strict=True):
            everything[i] = x
        return function(*everything)

    return of_some, [operands[i] for i in positions]


def _like(cotangent: Any, primal: Any) -> Any:
    """Under explicit sharding, a cotangent must be sharded as its primal."""
    sharding = getattr(jax.typeof(primal), "sharding", None)
    if sharding is not None and sharding.mesh.explicit_axes and jax.typeof(cotangent).sharding != sharding:
        return jax.sharding.reshard(cotangent, sharding)
    return cotangent


def _pullback(function: Callable[..., Any], *operands: Any) -> tuple[Any, Callable[..., Any]]:
    """``jax.vjp``, with a pullback that takes the cotangents of the floating results alone."""

    def of_floating(*operands: Any) -> tuple[Any, Any]:
        results = function(*operands)
        return [y for y in results if jnp.issubdtype(y.dtype, jnp.inexact)], results

    floating, pull, results = jax.vjp(of_floating, *operands, has_aux=True)
    return results, lambda *cotangents: pull(list(map(_like, cotangents, floating)))


def _vjp(function: Callable[..., Any], count: int, positions: Sequence[int], *arrays: Any) -> tuple[Any, ...]:
    of_some, some = _split(function, arrays[:count], positions)
    results, pull = _pullback(of_some, *some)
    return (*results, *pull(*arrays[count:]))


def _value_and_grad(
    function: Callable[..., Any], count: int, positions: Sequence[int], *arrays: Any
) -> tuple[Any, ...]:
    of_some, some = _split(function, arrays[:count], positions)

    def loss(*some: Any) -> tuple[Any, Any]:
        results = of_some(*some)
        floating = [y for y in results if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.sum(y * ct) for y, ct in zip(floating, arrays[count:], strict=True)).astype(jnp.float32), results

    (_, results), gradients = jax.value_and_grad(loss, tuple(range(len(some))), has_aux=True)(*some)
    return (*results, *gradients)


def _gradient(
    function: Callable[..., Any], operands: Sequence[Any], positions: Sequence[int]
) -> Callable[..., tuple[Any, ...]]:
    """``(*operands at these positions, *cotangents) -> gradients``"""

    def gradient(*some_and_cotangents: Any) -> tuple[Any, ...]:
        of_some, _ = _split(function, operands, positions)
        _, pull = _pullback(of_some, *some_and_cotangents[: len(positions)])
        return pull(*some_and_cotangents[len(positions) :])

    return gradient


def _grad_of_grad(function: Callable[..., Any], count: int, positions: Sequence[int], *arrays: Any) -> tuple[Any, ...]:
    operands, extras = arrays[:count], arrays[count:]
    cotangents, second = extras[: -len(positions)], extras[-len(positions) :]
    some = [operands[i] for i in positions]
    gradients, pull = jax.vjp(_gradient(function, operands, positions), *some, *cotangents)
    return (*gradients, *pull(tuple(_like(ct, x) for ct, x in zip(second, gradients, strict=True))))


def _jvp_of_grad(function: Callable[..., Any], count: int, positions: Sequence[int], *arrays: Any) -> tuple[Any, ...]:
    operands, extras = arrays[:count], arrays[count:]
    num_cotangents = (len(extras) - len(positions)) // 2
    primals = (*(operands[i] for i in positions), *extras[:num_cotangents])
    tangents = tuple(map(_like, extras[num_cotangents:], primals))
    gradients, pushed = jax.jvp(_gradient(function, operands, positions), primals, tangents)
    return (*gradients, *pushed)


def _grad_of_jvp(function: Callable[..., Any], count: int, positions: Sequence[int], *arrays: Any) -> tuple[Any, ...]:
    operands, tangents, cotangents = arrays[:count], arrays[count:][: len(positions)], arrays[count + len(positions) :]
    of_some, some = _split(function, operands, positions)

    def pushed(*some_and_tangents: Any) -> tuple[Any, ...]:
        primals, tangents = some_and_tangents[: len(positions)], some_and_tangents[len(positions) :]
        return _tangents(*jax.jvp(of_some, primals, tangents))

    results, pull = jax.vjp(pushed, *some, *map(_like, tangents, some))
    return pull(tuple(map(_like, cotangents, results)))


def _hessian(function: Callable[..., Any], count: int, positions: Sequence[int], *arrays: Any) -> tuple[Any, ...]:
    of_one, [x] = _split(function, arrays[:count], positions[:1])

    def loss(x: Any) -> Any:
        floating = [y for y in of_one(x) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.sum(y * _like(ct, y)) for y, ct in zip(floating, arrays[count:], strict=True))

    return (jax.hessian(loss)(x),)


def _jacrev(function: Callable[..., Any], count: int, positions: Sequence[int], *arrays: Any) -> tuple[Any, ...]:
    of_one, [x] = _split(function, arrays[:count], positions[:1])
    return (jax.jacrev(lambda x: of_one(x)[0])(x),)


def _tangents(results: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(t for y, t in zip(results, tangents, strict=True) if jnp.issubdtype(y.dtype, jnp.inexact))


def _jvp(function: Callable[..., Any], count: int, positions: Sequence[int], *arrays: Any) -> tuple[Any, ...]:
    of_some, some = _split(function, arrays[:count], positions)
    results, tangents = jax.jvp(of_some, tuple(some), tuple(map(_like, arrays[count:], some)))
    return (*results, *_tangents(results, tangents))


def _linearize(function: Callable[..., Any], count: int, positions: Sequence[int], *arrays: Any) -> tuple[Any, ...]:
    of_some, some = _split(function, arrays[:count], positions)
    results, linear = jax.linearize(of_some, *some)
    return (*results, *_tangents(results, linear(*map(_like, arrays[count:], some))))


RULES = {
    "vjp": _vjp,
    "checkpoint": _vjp,
    "export of vjp": _vjp,
    "grad of grad": _grad_of_grad,
    "jacrev": _jacrev,
    "jvp": _jvp,
    "linearize": _linearize,
    "jvp of grad": _jvp_of_grad,
    "hessian": _hessian,
    "grad of jvp": _grad_of_jvp,
}
"""``(function, number of operands, positions of the differentiated ones, *arrays) -> outputs``"""


# ----------------------------------------------------------------------------------------------------------------------
# Running and comparing.


class Mismatch(AssertionError):
    """A result is wrong."""


def _elements(x: jax.Array) -> np.ndarray:
    """The elements of an array. jax 0.10.2 cannot read an empty array that is split, not even ``x + 1``."""
    return np.asarray(x) if x.size > 0 else np.empty(x.shape, x.dtype)


def _bounded(x: np.ndarray, largest: float) -> np.ndarray:
    """The array with smaller finite numbers: products with float32 parameters, and sums over devices, fit float16."""
    if x.dtype != np.float32:
        return x
    return np.where(np.isfinite(x) & (np.abs(x) > largest), np.copysign(np.float32(largest), x), x)


def _without_subnormals(x: np.ndarray) -> np.ndarray:
    if not is_floating(x.dtype):
        return x
    magnitude = np.abs(_wide(x))
    return np.where((magnitude > 0) & (magnitude < float(jnp.finfo(x.dtype).tiny)), np.zeros((), x.dtype), x)


def _wide(x: np.ndarray) -> Any:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.astype(np.complex128)
    return x.astype(np.float64) if is_floating(x.dtype) else x


class Compiled:
    """The programs of a case, for any number of draws of its data."""

    def __init__(self, case: Case, batch_size: int | None = None):
        """With a batch of this size; None: a random size."""
        self.case = case
        self.plan = plan = Plan(case, batch_size)
        function = plan.call.forward_mode if case.transformation in FORWARD else plan.call.function
        assert function is not None, f"{case.op} has no forward mode"
        self.actual = plan.program(functools.partial(plan.problem.apply, function), is_reference=False)
        if case.transformation in EXPORTS:
            self.actual = self._exported(self.actual)
        elif case.transformation != "eager":
            donated = tuple(range(len(plan.arrays))) if case.transformation == "donated" else ()
            self.actual = jax.jit(self.actual, donate_argnums=donated)
        self.needs_majorant = not all(self._is_exact(output) for output in plan.outputs)
        self.reference = self._reference()

    def _exported(self, program: Callable[..., Any]) -> Callable[..., Any]:
        @functools.cache
        def exported() -> jax.export.Exported:
            export = jax.export.export(
                jax.jit(program), platforms=("cpu", "cuda"), disabled_checks=jax_baracuda.DISABLE_JAX_EXPORT_CHECKS
            )
            with warnings.catch_warnings():  # without a CUDA module, calls run as plain JAX there
                warnings.filterwarnings("ignore", ".* runs as plain JAX on cuda", RuntimeWarning)
                return export(*self.plan.types())

        return lambda *arrays: exported().call(*arrays)

    def _reference(self) -> Callable[..., Any]:
        plan = self.plan
        exact = plan.program(plan.problem.reference, is_reference=True)
        majorant = plan.program(plan.problem.majorant or plan.problem.reference, is_reference=True)

        def both(arrays: Sequence[Any]) -> tuple[Any, Any]:
            if not self.needs_majorant:
                return exact(*arrays), None
            magnitudes = [
                jnp.abs(array) if is_inexact(array.dtype) and not x.has_sign else array
                for array, x in zip(arrays, plan.arrays, strict=True)
            ]
            return exact(*arrays), majorant(*magnitudes)

        # If the shape of the result depends on the ids, they must be concrete.
        if plan.options.get("num_segments", "given") is None:
            return both
        # It runs once, so its cost is mostly compilation.
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.jit(both, compiler_options=options)

    def draw(self, number: int) -> list[np.ndarray]:
        plan = self.plan
        rng = np.random.default_rng([self.case.seed, 2, number])
        arrays = [x.draw_all(rng, plan.size_of, plan.levels) for x in plan.arrays]
        if self.case.dtype == "float16":
            arrays = [_bounded(x, 16) for x in arrays]
        return [_without_subnormals(x) for x in arrays] if self._loses_subnormals() else arrays

    def _loses_subnormals(self) -> bool:
        """Whether XLA may treat subnormal numbers as zeros in mere copies. Its partitioner gathers rows by sums over
        devices; only take_rows is left to it. CPUs with AVX512-BF16 convert bfloat16 so, also to move arrays: to
        broadcast them, for example. A kernel alone keeps them."""
        case = self.case
        is_split = case.sharding in ("auto", "explicit", "partly manual")
        if case.dtype == "bfloat16":
            is_kernel_alone = (case.transformation, case.batch, case.sharding) == ("jit", "none", "single")
            return (
                not is_kernel_alone or case.implementation != "kernel" or self.plan.options.get("data_rows") == "shared"
            )
        return is_split and case.op == "take_rows"

    def context(self) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        stack.enter_context(jax.enable_x64(self.plan.is_x64))
        if self.case.implementation == "xla":
            stack.enter_context(jax_baracuda.implementation("xla"))
        elif self.case.implementation == "rules":
            stack.enter_context(jax_baracuda.implementation(None))
        if self.case.sharding == "explicit":
            stack.enter_context(jax.set_mesh(self.plan.mesh))
        return stack

    def place(self, arrays: Sequence[np.ndarray]) -> list[jax.Array]:
        plan = self.plan
        if plan.mesh is None:
            return [jnp.asarray(x) for x in arrays]
        return [
            jax.device_put(array, NamedSharding(plan.mesh, plan.spec_of(x, only_even=True)))
            for array, x in zip(arrays, plan.arrays, strict=True)
        ]

    def results(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results of the op under test."""
        with self.context():
            return [_elements(x) for x in self.actual(*self.place(arrays))]

    def check(self, number: int = 0) -> None:
        """Runs one draw of data; raises :class:`Mismatch` if a result is wrong."""
        arrays = self.draw(number)
        actual = self.results(arrays)
        with jax.enable_x64(True):
            exact, magnitude = self.reference([jnp.asarray(_wide(x)) for x in arrays])
            exact = [np.asarray(x) for x in exact]
            magnitude = itertools.repeat(None) if magnitude is None else [np.asarray(x) for x in magnitude]
        if not len(actual) == len(exact) == len(self.plan.outputs):
            raise Mismatch(f"{len(actual)} results, expected {len(exact)}, declared {len(self.plan.outputs)}")
        # A result below the range of normal numbers has an absolute error, which its next factor multiplies.
        finite = [np.abs(x[np.isfinite(x)]) for x in map(_wide, arrays) if is_floating(x.dtype)]
        factor = max([1.0, *(float(x.max()) for x in finite if x.size)])
        for k, (output, got, want, scale) in enumerate(zip(self.plan.outputs, actual, exact, magnitude, strict=False)):
            self._compare(f"draw {number}, result {k} ({output.kind})", output, got, want, scale, factor)

    def _is_exact(self, output: Output) -> bool:
        if output.kind == "value":
            return self.plan.problem.exact_value
        return (
            self.plan.problem.exact_gradient
            and self.case.transformation in ("vjp", "checkpoint")
            and self.case.sharding not in SHARD_MAPS
        )

    def _roundings(self, output: Output) -> int:
        """How often intermediate results are rounded to the dtype, before the final rounding."""
        assignments = (self.plan.assignment, *self.plan.own_assignments.values())
        own = self.plan.problem.roundings
        own += any(assignment.get(name) for name in self.plan.problem.rounded_dims for assignment in assignments)
        if self.case.transformation == "loop":
            return 2 + 2 * own
        if output.kind == "value":
            return own
        own += self.plan.problem.gradient_roundings
        of_second = dict.fromkeys(SECOND_DERIVATIVES, 6)
        return own + {**of_second, "jvp": 3, "linearize": 3}.get(self.case.transformation, 2)

    def _rounding_eps(self, output: Output, info: Any) -> float:
        """The eps of a rounding. A gradient in a wide dtype may be a sum over the batch in the dtype of the case."""
        if self.case.transformation == "vjp of vmap" and output.kind == "gradient":
            return max(float(info.eps), float(jnp.finfo(self.case.dtype).eps))
        return float(info.eps)

    def _smallest_subnormal(self, output: Output, info: Any) -> float:
        """Without check_vma, JAX divides cotangents in their own dtype by the number of devices that share a result."""
        if self.case.sharding == "shard_map, check_vma=False" and output.kind == "gradient":
            return max(float(info.smallest_subnormal), float(jnp.finfo(self.case.dtype).smallest_subnormal))
        return float(info.smallest_subnormal)

    def _compare(
        self, where: str, output: Output, got: np.ndarray, want: np.ndarray, scale: np.ndarray | None, factor: float
    ) -> None:
        dtype = jnp.dtype(output.dtype or (self.case.dtype if is_inexact(want.dtype) else want.dtype))
        if got.dtype != dtype:
            raise Mismatch(f"{where}: dtype {got.dtype}, expected {dtype}")
        if got.shape != want.shape:
            raise Mismatch(f"{where}: shape {got.shape}, expected {want.shape}")
        if not is_inexact(dtype):
            _report(where, got == want, got, want, None)
        elif self._is_exact(output):
            with np.errstate(invalid="ignore", over="ignore"):
                wide, rounded = _wide(got), _wide(want.astype(dtype))
                fits = (wide == rounded) | (np.isnan(wide) & np.isnan(rounded))
                # XLA's partitioner gathers rows by sums over devices, which lose the sign of -0. take_rows is XLA's.
                keeps_sign = self.case.sharding == "single" or self.case.op != "take_rows"
                if output.kind == "value" and is_floating(dtype) and keeps_sign:
                    fits &= (np.signbit(wide) == np.signbit(rounded)) | np.isnan(wide)
            _report(where, fits, got, want, None)
        elif jnp.issubdtype(dtype, jnp.complexfloating):
            part = jnp.finfo(dtype).dtype
            for name in ("real", "imag"):
                # The magnitude of a complex number bounds both of its parts.
                parts = getattr(got, name), getattr(want, name)
                self._within(f"{where}, {name}", output, *parts, np.abs(scale), factor, part)
        else:
            self._within(where, output, got, want, scale, factor, dtype)

    def _within(
        self,
        where: str,
        output: Output,
        got: np.ndarray,
        want: np.ndarray,
        scale: np.ndarray,
        factor: float,
        dtype: Any,
    ) -> None:
        info = jnp.finfo(dtype)
        accumulator = np.finfo(np.float64 if info.bits == 64 else np.float32)
        terms, roundings = self.plan.problem.terms, self._roundings(output)
        largest = min(float(accumulator.max), float(info.max)) if roundings else float(accumulator.max)
        with np.errstate(invalid="ignore", over="ignore"):
            error = (4 + 4 * math.sqrt(terms)) * float(accumulator.eps) * scale + 4 * float(accumulator.tiny)
            of_subnormal = factor * self._smallest_subnormal(output, info)
            error = error + roundings * (self._rounding_eps(output, info) * scale + of_subnormal)
            if info.bits == 64:  # the reference is no wider, and may add and multiply in sequence
                error = error + terms * float(info.eps) * scale
            is_finite = np.isfinite(want)
            if (is_finite & np.isnan(scale)).any():
                raise Mismatch(f"{where}: the majorant of the reference is NaN where the reference is finite")
            error = np.where(is_finite, error, 0)
            low, high = (_wide(x.astype(dtype)) for x in (want - error, want + error))
            wide = _wide(got)
            fits = ((low <= wide) & (wide <= high)) | (np.isnan(wide) & np.isnan(want))
            fits |= is_finite & (scale > largest)  # terms are out of range, so any result passes
        _report(where, fits, got, want, error)


def _report(where: str, fits: Any, got: np.ndarray, want: np.ndarray, error: np.ndarray | None) -> None:
    fits = np.asarray(fits)
    if fits.all():
        return
    first = tuple(int(i) for i in np.argwhere(~fits)[0])
    within = "" if error is None else f" within {np.asarray(error)[first]:.3g}"
    raise Mismatch(
        f"{where}: {(~fits).sum()} of {fits.size} elements of shape {fits.shape} are wrong, the first at {first}: "
        f"{got[first]!r}, expected {want[first]!r}{within}"
    )


def check(case: Case, draws: int = 1) -> None:
    """Runs a case on some draws of data; raises what went wrong."""
    compiled = Compiled(case)
    for number in range(draws):
        compiled.check(number)
