"""Makes primitives of JAX of an op: their rules for types, batching, derivatives, unused results and lowering."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import reshard_like
from jax_baracuda._core.batch import map_over_batch, with_mapped_dim
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.functions import resolved, with_fixed, with_named
from jax_baracuda._core.lowering import lower, lower_elsewhere, lower_kernel
from jax_baracuda._core.native import KERNEL_PLATFORMS
from jax_baracuda._core.op import Dimensions, NamedDimensions, Op, ShapeAndDtype
from jax_baracuda._core.selection import selecting
from jax_baracuda._core.sharding import ShardAxes, ShardKernel

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn, Primitive


P = ParamSpec("P")


def _registering(make_op: Callable[P, Op]) -> Callable[P, Op]:
    @functools.wraps(make_op)
    def define_op(*args: P.args, **fields: P.kwargs) -> Op:
        op = make_op(*args, **fields)
        _register_rules(op)
        return op

    return define_op


define_op = _registering(Op)
"""Defines an op: makes an :class:`.op.Op` of these fields, and gives its primitives their rules."""


def _register_rules(op: Op) -> None:
    primitive, kernel_primitive = op.primitive, op.kernel_primitive
    for of in (primitive, kernel_primitive):
        of.def_abstract_eval(functools.partial(_result_types, op))
        batching.primitive_batchers[of] = functools.partial(_batch, op, of)
    primitive.def_impl(functools.partial(jax_versions.apply_primitive, primitive))
    ad.primitive_jvps[primitive] = functools.partial(_jvp, op)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, op)
    if op.optional_results:
        jax_versions.register_dead_code_rule(primitive, functools.partial(_drop_unused_results, op))
    rules = {platform: _lowering(op, lower, platform) for platform in KERNEL_PLATFORMS}
    rule = functools.partial(jax_versions.lower_by_platform, primitive.name, rules, _lowering(op, lower_elsewhere))
    # Not cacheable: otherwise JAX lowers an op in its own function, where the origin of the operands is hidden.
    mlir.register_lowering(primitive, rule, cacheable=False)
    for platform in KERNEL_PLATFORMS:
        mlir.register_lowering(kernel_primitive, _lowering(op, lower_kernel, platform), platform, cacheable=False)


def _result_types(op: Op, *types: Any, **params: Any) -> list[Any]:
    # On tracing, because the import of this package must need no private name of JAX.
    jax_versions.require_devices_during_lowering(op.primitive)
    return OpCall(op, types, params).result_avals()


def _lowering(op: Op, rule: Callable[..., Any], *platform: str) -> Callable[..., Any]:
    return lambda ctx, *operands, **params: rule(*platform, OpCall(op, ctx.avals_in, params), ctx, operands)


def _batch(
    op: Op, primitive: Primitive, operands: Sequence[Any], axes: Sequence[int | None], **params: Any
) -> tuple[list[jax.Array], list[int]]:
    """The batching rule: puts the mapped axis in front.

    Unmapped operands stay shared, except those written in place and, if the op broadcasts, those that do not broadcast.
    """
    call = OpCall(op, operands, params)
    operands, size = with_mapped_dim(operands, axes)
    to_broadcast = call.resolve(op.in_place)
    if op.broadcasts:
        names = call.operand_dims
        to_broadcast = [i for i, name in zip(range(len(operands)), names, strict=False) if name not in op.broadcasts]
    for i in to_broadcast:
        operands[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape[1:]))
    if not op.broadcasts:
        params = {**params, "num_batch_dims": call.num_batch_dims + 1}
    results = primitive.bind(*operands, **params)
    return results, [0] * len(results)


def _jvp(op: Op, primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[Any]]:
    """The JVP rule. The primal is from the kernel. The tangent is from the op itself, `tangent` or the reference.

    The tangent is linear in the tangents of the operands, so JAX can transpose it.
    """
    call, primitive = OpCall(op, primals, params), op.primitive
    results = primitive.bind(*primals, **params)
    nonzero_tangents = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    factors = list(call.transposes)
    if factors and set(nonzero_tangents).issubset(itertools.chain(*factors)):

        def term(factor: Sequence[int]) -> Sequence[jax.Array]:
            operands = list(primals)
            for i in factor:
                # Integer operands stay as they are: they have no tangents, nor have the results that they become.
                if jnp.issubdtype(primals[i].dtype, jnp.inexact):
                    operands[i] = ad.instantiate_zeros(tangents[i])
            return primitive.bind(*operands, **params)

        varying = [factor for factor in factors if not set(factor).isdisjoint(nonzero_tangents)]
        terms = [term(factor) for factor in varying or factors[:1]]
        result_tangents = [functools.reduce(operator.add, of_result) for of_result in zip(*terms, strict=True)]
    elif (tangent_of := op.tangent) is not None and nonzero_tangents == [0]:

        def tangent(first: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
            operands = tuple(op.by_name(arrays[: len(primals)], call.params).values())
            return call.bound(tangent_of)(first, operands, arrays[len(primals) :])

        result_tangents = _map_over_batch(call, tangent, tangents[0], *primals, *results)
    else:
        inexact = tuple(i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact))
        tangents_of = derivative_op("tangent", op, len(primals), tuple(nonzero_tangents), inexact).primitive
        given = jax_versions.unify_varying(*primals, *(tangents[i] for i in nonzero_tangents))
        pushed = dict(zip(inexact, tangents_of.bind(*given, **params), strict=True))
        result_tangents = [reshard_like(pushed[i], jax.typeof(x)) if i in pushed else x for i, x in enumerate(results)]
    return results, [
        tangent if jnp.issubdtype(result.dtype, jnp.inexact) else jax_versions.zero_tangent(result)
        for result, tangent in zip(results, result_tangents, strict=True)
    ]


def _transpose(op: Op, cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    """The transpose rule, with respect to the undefined primals. The op is linear in them."""
    types = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in operands]
    call = OpCall(op, types, params)
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
    results: list[Any] = [None] * len(operands)
    factor = next((factor for factor in call.transposes if set(linear).issubset(factor)), None)
    if factor is not None:

        def transpose(*arrays: jax.Array) -> Sequence[jax.Array]:
            own_types = [call.own_operands[i] for i in factor]
            transpose_of = call.bound(call.transposes[factor])
            return transpose_of(own_types, arrays[: len(cotangents)], *arrays[len(cotangents) :])

        names = list(call.operand_dims)
        of_factor = {names[i] for i in factor}
        others = (x for name, x in op.by_name(operands, call.params).items() if name not in of_factor)
        transposed = _map_over_batch(call, transpose, *cotangents, *others)
        for i in linear:
            x = transposed[factor.index(i)]
            results[i] = ad.Zero(call.operands[i]) if x is None else _sum_over_shared_batch(x, call.operands[i])
        return results
    inexact = tuple(i for i, x in enumerate(cotangents) if jnp.issubdtype(x.dtype, jnp.inexact))
    cotangents_of = derivative_op("cotangent", op, len(operands), tuple(linear), inexact).primitive
    # The op is linear in the undefined primals, so its derivative is the same at zeros.
    primals = (ad.instantiate_zeros(ad.Zero(x.aval)) if i in linear else x for i, x in enumerate(operands))
    given = jax_versions.unify_varying(*primals, *(cotangents[i] for i in inexact))
    for i, x in zip(linear, cotangents_of.bind(*given, **params), strict=True):
        results[i] = _sum_over_shared_batch(x, call.operands[i])
    return results


def _drop_unused_results(op: Op, are_used: Sequence[bool], equation: JaxprEqn) -> tuple[list[bool], JaxprEqn | None]:
    """The rule that removes unused results: the whole call if all are unused, else the unused optional ones."""
    uses_operands = [any(are_used)] * len(equation.invars)
    if not any(are_used):
        return uses_operands, None
    names = resolved(op.results, equation.params)
    is_left = [is_used or name not in op.optional_results for name, is_used in zip(names, are_used, strict=True)]
    flags = {op.optional_results[name]: False for name, left in zip(names, is_left, strict=True) if not left}
    outvars = list(itertools.compress(equation.outvars, is_left))
    return uses_operands, equation.replace(outvars=outvars, params={**equation.params, **flags})


def _map_over_batch(call: OpCall, function: Callable[..., Any], *arrays: jax.Array | None) -> Any:
    with selecting(call.selection):
        return map_over_batch(function, call.num_batch_dims, *arrays)


def _sum_over_shared_batch(cotangent: jax.Array, primal: Any) -> jax.Array:
    """Sums a cotangent over the batch dimensions that share its operand, and gives it the operand's sharding."""
    sizes = zip(cotangent.shape, primal.shape, strict=True)
    shared = tuple(axis for axis, (size, own_size) in enumerate(sizes) if size != own_size)
    return reshard_like(jnp.sum(cotangent, shared, keepdims=True) if shared else cotangent, primal)


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives without a kernel, as ops of their own.
#
# They run the derivative of an op's plain JAX. XLA's partitioner fails at some of these, and gets others wrong. As ops,
# they are split over devices along the dimensions that their definition allows.

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

    return define_op(
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
