"""Derivatives without a kernel, as ops of their own.

They run the derivative of an op's plain JAX. XLA's partitioner fails at some of these, and gets others wrong. As ops,
they are split over devices along the dimensions that their definition allows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jax_baracuda._core.functions import resolved, with_fixed, with_named

if TYPE_CHECKING:
    from jax_baracuda._core.op import Dimensions, NamedDimensions, Op, ShapeAndDtype
    from jax_baracuda._core.sharding import ShardAxes, ShardKernel

Positions = tuple[int, ...]


@functools.cache
def tangent_op(op: Op, num_operands: int, differentiated: Positions, results: Positions) -> Op:
    """The tangents of some results of an op, linear in the tangents of some operands.

    Its operands are those of the op, followed by the tangents.

    Args:
      num_operands: how many operands the call has.
      differentiated: the positions of the operands that have a tangent.
      results: the positions of the results whose tangents to compute.
    """

    def tangents(*arrays: jax.Array, **params: Any) -> Sequence[jax.Array]:
        function, primals = _differentiable(op, arrays[:num_operands], differentiated, results, params)
        _, of_results = jax.jvp(function, primals, list(arrays[num_operands:]))
        return of_results

    def types(*avals: Any, **params: Any) -> list[ShapeAndDtype]:
        of_op = op.types(*avals[:num_operands], **params)
        return [of_op[i] for i in results]

    return _derivative(
        op,
        "tangent",
        num_operands,
        linear=lambda operands, _: [operands[i] for i in differentiated],
        results=lambda _, of_op: [of_op[i] for i in results],
        reference=tangents,
        result_types=types,
        transpose=lambda _, d_results, *operands, **params: cotangent_op(op, num_operands, differentiated, results)(
            *operands, *d_results, **params
        ),
    )


@functools.cache
def cotangent_op(op: Op, num_operands: int, differentiated: Positions, results: Positions) -> Op:
    """The transpose of :func:`tangent_op`: the cotangents of the operands from those of the results."""

    def cotangents(*arrays: jax.Array, **params: Any) -> Sequence[jax.Array]:
        function, primals = _differentiable(op, arrays[:num_operands], differentiated, results, params)
        _, pull_back = jax.vjp(function, *primals)
        return pull_back(list(arrays[num_operands:]))

    return _derivative(
        op,
        "cotangent",
        num_operands,
        linear=lambda _, of_op: [of_op[i] for i in results],
        results=lambda operands, _: [operands[i] for i in differentiated],
        reference=cotangents,
        result_types=lambda *avals, **_: [(avals[i].shape, avals[i].dtype) for i in differentiated],
        transpose=lambda _, tangents, *operands, **params: tangent_op(op, num_operands, differentiated, results)(
            *operands, *tangents, **params
        ),
    )


def _differentiable(
    op: Op, operands: Sequence[jax.Array], differentiated: Positions, results: Positions, params: Mapping[str, Any]
) -> tuple[Callable[..., list[jax.Array]], list[jax.Array]]:
    """The op's plain JAX as a function of the differentiated operands that returns these results, and their values."""
    reference = with_fixed(with_named(op.reference, params), operands, differentiated)

    def some_results(*arrays: jax.Array) -> list[jax.Array]:
        of_op = reference(*arrays)
        return [of_op[i] for i in results]

    return some_results, [operands[i] for i in differentiated]


Choice = Callable[[Sequence["Dimensions"], Sequence["Dimensions"]], Sequence["Dimensions"]]
"""Some of the arrays of an op: ``(dimensions of the operands, of the results) -> dimensions of some of both``."""


def _derivative(
    op: Op,
    kind: str,
    num_operands: int,
    *,
    linear: Choice,
    results: Choice,
    reference: Callable[..., Sequence[jax.Array]],
    **fields: Any,
) -> Op:
    """An op of the operands of `op` and of arrays in which it is linear.

    Devices split only the independent dimensions of `op`, and add up the results that lack one.
    """

    def of_op(params: Mapping[str, Any]) -> tuple[list[Dimensions], list[Dimensions]]:
        operands, all_results = (list(resolved(of, params).values()) for of in (op.operands, op.results))
        return operands[:num_operands], all_results

    def own_operands(**params: Any) -> NamedDimensions:
        of_both = of_op(params)
        return {f"array{i}": dimensions for i, dimensions in enumerate([*of_both[0], *linear(*of_both)])}

    def own_results(**params: Any) -> NamedDimensions:
        return {f"array{i}": dimensions for i, dimensions in enumerate(results(*of_op(params)))}

    def dependent(**params: Any) -> tuple[str, ...]:
        arrays = [*own_operands(**params).values(), *own_results(**params).values()]
        return tuple({name: None for names in arrays for name in names if name not in op.independent_dims})

    def sum_over_devices(
        kernel: ShardKernel, axes: ShardAxes, *operands: jax.Array, **params: Any
    ) -> Sequence[jax.Array]:
        def total(result: jax.Array, dimensions: Dimensions) -> jax.Array:
            lacking = set(op.independent_dims).difference(dimensions)
            split = [
                a for name, of in axes.items() if ("..." if name.startswith("...") else name) in lacking for a in of
            ]
            return jax.lax.psum(result, split) if split else result

        return list(map(total, kernel(*operands), own_results(**params).values()))

    return type(op)(
        name=f"{op.name}_{kind}",
        operands=own_operands,
        results=own_results,
        reference=reference,
        program=reference,
        dtypes=op.dtypes,
        guarantee=op.guarantee,
        replicated_dims=dependent,
        reduction_dims=op.independent_dims,
        independent_dims=op.independent_dims,
        shard_program=sum_over_devices,
        linear=lambda **params: tuple(own_operands(**params))[num_operands:],
        **fields,
    )
