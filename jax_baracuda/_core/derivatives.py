"""Derivatives without a kernel, as ops of their own.

They run the derivative of an op's plain JAX. XLA's partitioner fails at some of these, and gets others wrong. As ops,
they are split over devices along the dimensions that their definition allows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax

from jax_baracuda._core import jax_versions
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.functions import resolved, with_fixed, with_named

if TYPE_CHECKING:
    from jax_baracuda._core.op import Dimensions, NamedDimensions, Op, ShapeAndDtype
    from jax_baracuda._core.sharding import ShardAxes, ShardKernel

Positions = tuple[int, ...]
Kind = Literal["tangent", "cotangent"]


@functools.cache
def derivative_op(kind: Kind, op: Op, num_operands: int, differentiated: Positions, results: Positions) -> Op:
    """The tangents of some results of an op, or the transpose: the cotangents of some operands.

    Its operands are those of the op, followed by the tangents of the differentiated operands (or the cotangents of the
    results), in which it is linear. Devices split only the independent dimensions of the op, and add up the results
    that lack one.

    Args:
      num_operands: how many operands the call has.
      differentiated: the positions of the operands that have a tangent.
      results: the positions of the results whose tangents or cotangents to use.
    """

    def reference(*arrays: jax.Array, **params: Any) -> Sequence[jax.Array]:
        operands, linear = arrays[:num_operands], list(arrays[num_operands:])

        def of_operands(*operands: jax.Array) -> Sequence[jax.Array]:
            return with_named(op.reference, params)(*op.by_name(operands, params).values())

        of_differentiated = with_fixed(of_operands, operands, differentiated)

        def function(*primals: jax.Array) -> list[jax.Array]:
            of_op = of_differentiated(*primals)
            # A result may be constant, but its cotangents vary over manual axes, as the operands do.
            return list(jax_versions.unify_varying(*(of_op[i] for i in results), *operands)[: len(results)])

        primals = [operands[i] for i in differentiated]
        derivative: Sequence[jax.Array]
        if kind == "tangent":
            _, derivative = jax.jvp(function, primals, linear)
        else:
            derivative = jax.vjp(function, *primals)[1](linear)
        return derivative

    def result_types(*avals: Any, **params: Any) -> list[ShapeAndDtype]:
        if kind == "cotangent":
            return [(avals[i].shape, avals[i].dtype) for i in differentiated]
        of_op = OpCall(op, avals[:num_operands], params).result_types()
        return [of_op[i] for i in results]

    def dimensions(params: Mapping[str, Any]) -> tuple[list[Dimensions], list[Dimensions]]:
        """The dimensions of the own operands and results."""
        of_operands = list(op.operand_dims(params).values())[:num_operands]
        of_results = list(resolved(op.results, params).values())
        inputs, outputs = [of_operands[i] for i in differentiated], [of_results[i] for i in results]
        if kind == "cotangent":
            inputs, outputs = outputs, inputs
        return [*of_operands, *inputs], outputs

    def own_operands(**params: Any) -> NamedDimensions:
        return {f"array{i}": names for i, names in enumerate(dimensions(params)[0])}

    def own_results(**params: Any) -> NamedDimensions:
        return {f"array{i}": names for i, names in enumerate(dimensions(params)[1])}

    def dependent(**params: Any) -> tuple[str, ...]:
        of_operands, of_results = dimensions(params)
        names = {name: None for array in of_operands + of_results for name in array}
        return tuple(name for name in names if name not in op.independent_dims)

    def sum_over_devices(
        kernel: ShardKernel, axes: ShardAxes, *operands: jax.Array, **params: Any
    ) -> Sequence[jax.Array]:
        def total(result: jax.Array, names: Dimensions) -> jax.Array:
            lacking = set(op.independent_dims).difference(names)
            split = [
                a for name, of in axes.items() if ("..." if name.startswith("...") else name) in lacking for a in of
            ]
            return jax.lax.psum(result, split) if split else result

        return list(map(total, kernel(*operands), dimensions(params)[1]))

    def transpose(_: Any, cotangents: Sequence[jax.Array], *operands: jax.Array, **params: Any) -> Sequence[jax.Array]:
        other: Kind = "cotangent" if kind == "tangent" else "tangent"
        return derivative_op(other, op, num_operands, differentiated, results)(*operands, *cotangents, **params)

    return type(op)(
        name=f"{op.name}_{kind}",
        operands=own_operands,
        results=own_results,
        reference=reference,
        result_types=result_types,
        program=reference,
        dtypes=op.dtypes,
        guarantee=op.guarantee,
        replicated_dims=dependent,
        reduction_dims=op.independent_dims,
        independent_dims=op.independent_dims,
        shard_program=sum_over_devices,
        transposes=lambda **params: {tuple(own_operands(**params))[num_operands:]: transpose},
    )
