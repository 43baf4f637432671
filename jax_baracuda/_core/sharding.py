"""How an op runs on many devices: the mesh axes that split its dimensions, and the program of one shard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_baracuda._core import jax_versions
from jax_baracuda._core.selection import not_redirected

MeshAxes = tuple[str, ...]
ShardAxes = Mapping[str, MeshAxes]
"""In the program of one shard: the mesh axes that split each named dimension."""
ShardKernel = Callable[..., Sequence[jax.Array]]
"""In the program of one shard: the kernel, ``(*operands, **changed params) -> results``."""


def mesh_axes(entry: Any) -> MeshAxes:
    """The mesh axes of one entry of a partition spec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


class NamedShapes(NamedTuple):
    """The named dimensions of every operand and result of one call. A dimension that is broadcast is None."""

    operands: tuple[tuple[str | None, ...], ...]
    results: tuple[tuple[str | None, ...], ...]
    all_sizes: Mapping[str, int]
    """The size of each named dimension, with those that ``vmap`` has added."""

    def rule(
        self, replicated_dims: Sequence[str], reduction_dims: Sequence[str]
    ) -> tuple[str, dict[str, tuple[str, ...]]]:
        """The op as a Shardy sharding rule in einsum notation, with its reduction and replication factors."""
        factors = {name: f"d{i}" for i, name in enumerate(self.all_sizes)}
        broadcast = (f"one{i}" for i in itertools.count())
        operands, results = (
            ", ".join(
                " ".join(next(broadcast) if name is None else factors[name] for name in names) for names in arrays
            )
            for arrays in (self.operands, self.results)
        )
        reduced = set(reduction_dims).difference(replicated_dims, *self.results)
        # Shardy requires the factors in the order of their first occurrence.
        return f"{operands} -> {results}", {
            "reduction_factors": tuple(f for name, f in factors.items() if name in reduced),
            "need_replication_factors": tuple(f for name, f in factors.items() if name in replicated_dims),
        }

    def assign(self, specs: Sequence[Sequence[Any] | None], replicated_dims: Sequence[str]) -> dict[str, MeshAxes]:
        """Gives each dimension the mesh axes of the first array that splits it. No axis splits an array twice.

        No axis splits both a dimension that all results lack, such as edges, and another dimension of operands, such as
        features. Otherwise a device would have only some features of its edges, and no device the other features.
        """
        assignment: dict[str, MeshAxes] = {name: () for name in replicated_dims if name in self.all_sizes}
        names_of_each = self.operands + self.results
        of_operands = {name for names in self.operands for name in names}
        reduced = of_operands.difference(*self.results)

        def beside(name: str) -> set[str]:
            """The axes that already split other dimensions and so must not split this one."""
            together = {other for names in names_of_each if name in names for other in names}
            together |= (of_operands if name in reduced else set()) | (reduced if name in of_operands else set())
            return {axis for other in together if other is not None for axis in assignment.get(other, ())}

        for names, spec in zip(names_of_each, specs, strict=True):
            for name, entry in zip(names, spec or (), strict=False):
                axes = mesh_axes(entry)
                if axes and name is not None and name not in assignment and not beside(name).intersection(axes):
                    assignment[name] = axes
        return assignment


def spec_entries(names: Sequence[str | None], assignment: ShardAxes) -> tuple[Any, ...]:
    """The partition spec entries of an array: the assigned axes; None for a dimension that is broadcast."""
    return tuple((name and assignment.get(name)) or None for name in names)


def partitioned(
    shapes: NamedShapes,
    replicated_dims: Sequence[str],
    reduction_dims: Sequence[str],
    min_shard_sizes: Mapping[str, int],
    kernel: Callable[..., Sequence[jax.Array]],
    shard_program: Callable[..., Sequence[jax.Array]],
    program_mesh: Mesh | None,
) -> Callable[..., Sequence[jax.Array]]:
    """`kernel` as a function that JAX's partitioner splits over devices instead of gathering its operands.

    Args:
      shapes: the dimensions along which it may be split.
      replicated_dims: those that must not be.
      reduction_dims: those that are summed away.
      min_shard_sizes: the minimum shard size of dimensions with halo exchange.
      kernel: the computation on whole arrays.
      shard_program: the computation on one shard: ``(axes, *operands) -> results``, where `axes` maps the name of each
        dimension to the mesh axes that split it.
      program_mesh: the mesh of the whole program, if the partitioner splits calls over a part of it.
    """

    def can_be_split(mesh: Any, name: str, axes: MeshAxes) -> bool:
        shard_size, rest = divmod(shapes.all_sizes[name], math.prod(mesh.shape[axis] for axis in axes))
        if name in min_shard_sizes:
            # Shards exchange halos with jax.lax.ppermute, which requires the axes in the order of the mesh.
            in_mesh_order = tuple(axis for axis in mesh.axis_names if axis in axes)
            return rest == 0 and shard_size >= min_shard_sizes[name] and axes == in_mesh_order
        return rest == 0

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> tuple[Any, ...]:
        arrays = [*arg_shapes, *result_shapes]
        specs = [tuple(getattr(array.sharding, "spec", ())) for array in arrays]
        assignment = {
            name: axes for name, axes in shapes.assign(specs, replicated_dims).items() if can_be_split(mesh, name, axes)
        }

        def shardings(arrays: Sequence[Sequence[str | None]]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, PartitionSpec(*spec_entries(names, assignment))) for names in arrays)

        def shard(*operands: jax.Array) -> Sequence[jax.Array]:
            with jax_versions.without_abstract_mesh(), not_redirected():
                return shard_program(assignment, *operands)

        return (
            program_mesh or mesh,  # the shard's collectives run on its devices
            shard,
            shardings(shapes.results),
            shardings(shapes.operands),
        )

    @custom_partitioning
    def partitioned_call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(kernel(*operands))

    rule, factors = shapes.rule(replicated_dims, reduction_dims)
    partitioned_call.def_partition(partition, sharding_rule=rule, **factors)
    return partitioned_call
