"""The definition of an op, and the JAX primitive that it becomes."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import in_automatic_mode, split_like
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.native import NATIVE_MODULES, Plan, target_name
from jax_baracuda._core.sharding import Dimensions, Layout, MeshAxes, named_dimensions, partitioned

VERSION = importlib.metadata.version("jax_baracuda")

KERNEL_PLATFORMS = ("cpu", "cuda")

ShapeAndDtype = tuple[tuple[int, ...], Any]


@dataclasses.dataclass(frozen=True)
class Op:
    """One native kernel, and everything that JAX has to know of it.

    Calling an op binds its primitive: ``results = op(*operands, **params)``, always a list. Every operand and every
    result has a leading batch dimension, which is 1 in operands that the whole batch shares: so ``vmap`` is one launch.
    The functions of a definition see it in any case; calls may omit it where `batch_optional` says so. Each ``vmap``
    of a call adds one more dimension in front, so that a batch that is split over devices stays split; the functions
    of a definition see all of them as one.
    """

    name: str
    """The name of the native target, of the primitive, and in messages."""
    operands: tuple[Dimensions, ...] | Callable[..., tuple[Dimensions, ...]]
    """The dimensions of each operand, in order; trailing operands may be left out of a call. Or ``(**params)`` -> the
    dimensions, where they depend on layouts and options."""
    results: tuple[Dimensions, ...] | Callable[..., tuple[Dimensions, ...]]
    result_types: Callable[..., Sequence[ShapeAndDtype]]
    """``(*operand avals, **params) -> [(shape, dtype), ...]``, the abstract-eval rule."""
    reference: Callable[..., Sequence[jax.Array]]
    """The same computation in plain JAX: serves what has no kernel, and every derivative of the op."""
    dtypes: frozenset[str]
    """The element types of the first operand for which there is a kernel."""
    guarantee: Guarantee | Callable[..., Guarantee]
    """Or ``(dtype name, platform, *, deterministic, indices_are_sorted) -> Guarantee`` where it depends on these."""
    aliases: tuple[str, ...] = ()
    """Other public functions whose result is this op's."""
    attributes: tuple[str, ...] = ()
    """The names of the params that the native handler takes. Tuples of integers, however nested, come as one array."""
    plan_parameters: Callable[..., Mapping[str, int]] | None = None
    """``(*operand avals, **params)`` -> the integers from which the native module decides how the kernel runs."""
    whole: tuple[str, ...] | Callable[..., tuple[str, ...]] = ()
    """Dimensions that must not be split over devices. Or ``(**params)`` -> these."""
    reduced: tuple[str, ...] = ()
    """Dimensions of the operands that results lack, so that shards have parts of those results."""
    shard_program: Callable[..., Sequence[jax.Array]] | None = None
    """``(kernel, axes, *operands, **params)``: the program of one shard; None: the kernel as it is."""
    kernel_limit: Callable[..., str | None] | None = None
    """``(*operand avals, **params)`` -> why the kernel does not take this call, or None."""
    in_place: Mapping[int, int] | Callable[..., Mapping[int, int]] = dataclasses.field(default_factory=dict)
    """{operand number: number of the result that may be written to its memory}, where both have one shape. An operand
    that is used again is copied by XLA first. Or ``(**params)`` -> these."""
    in_place_if_donated: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """As `in_place`, but only where the operand is a donated argument of the compiled program: for results that are as
    fast to write elsewhere, where a copy by XLA would double the time."""
    batch_optional: bool = False
    """Whether operands and results may lack the batch dimension, all of them together: calls have the param `batched`,
    and the handler takes it. For ops in place: XLA before jax 0.11 copies what is reshaped on its way into the call."""
    num_linear: int | Callable[..., int] = 1
    """See `transpose`. Or ``(**params)`` -> the number."""
    transpose: Callable[..., Sequence[jax.Array]] | None = None
    """For an op that is linear in its first `num_linear` operands together and constant in the others:
    ``(avals of the linear operands, cotangents of the results, *other operands, **params) -> their cotangents``.

    Then derivatives are calls of kernels too: the tangent is the op of the tangent. A cotangent may have the whole
    batch where its operand is shared.
    """

    def __post_init__(self) -> None:
        if not callable(self.operands) and not callable(self.results):
            dimensions = {name for names in self.operands + self.results for name in names}
            for name in (() if callable(self.whole) else self.whole) + self.reduced:
                if name not in dimensions:
                    raise ValueError(f"Op {self.name}: {name!r} is no dimension of an operand or a result")
            for names in self.operands + self.results:
                if names[:1] != ("batch",):
                    raise ValueError(f"Op {self.name}: the first dimension must be 'batch', got {names}")
        _register(self)

    def __call__(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        return self._primitives[0].bind(*jax_versions.unify_varying(*operands), **params)

    def kernel(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        """The kernel alone, without derivatives and sharding: for the shard programs of other ops."""
        return self._primitives[1].bind(*operands, **params)

    @functools.cached_property
    def _primitives(self) -> tuple[Primitive, Primitive]:
        return _primitives_of(self)

    def types_of_results(self, *operands: Any, **params: Any) -> list[ShapeAndDtype]:
        """The abstract-eval rule, with any number of batch dimensions."""
        num_batch_dims = _num_batch_dims(params)
        types = self.result_types(*_with_one_batch(operands, params), **_without_num_batch_dims(params))
        batch = _joint_sizes(operands, num_batch_dims)
        return [((*batch, *shape[1:]), dtype) for shape, dtype in types]

    def layout(self, operands: Sequence[Any], results: Sequence[Any], params: Mapping[str, Any]) -> Layout:
        """The named dimensions of a call with these shapes and params."""
        operand_shapes, result_shapes = (tuple(tuple(x.shape) for x in arrays) for arrays in (operands, results))
        batch = tuple(f"batch{i}" for i in range(_num_batch_dims(params)))
        own_params = _without_num_batch_dims(params)
        operand_names, result_names = (
            tuple(batch + dimensions[1:] for dimensions in of_params(names, own_params))
            for names in (self.operands, self.results)
        )
        return Layout(
            tuple(named_dimensions(names, shape) for names, shape in zip(operand_names, operand_shapes, strict=False)),
            tuple(named_dimensions(names, shape) for names, shape in zip(result_names, result_shapes, strict=True)),
            operand_shapes,
            result_shapes,
        )

    def plan(self, platform: str, operands: Sequence[Any], params: Mapping[str, Any]) -> Plan:
        """How the platform's kernel runs a call that it takes: the strategy that it chooses, and the scratch memory."""
        assert self.plan_parameters is not None
        parameters = self.plan_parameters(*_with_one_batch(operands, params), **_without_num_batch_dims(params))
        # A product of sizes that does not fit is one of an array without elements, in which it can as well be 0.
        fitting = {name: int(value) if value < 2**63 else 0 for name, value in parameters.items()}
        return NATIVE_MODULES[platform].plan(self.name, fitting)

    def missing_kernel(self, platform: str, operands: Sequence[Any], params: Mapping[str, Any]) -> str | None:
        """Why this call has no kernel on the platform and runs as plain JAX instead; None where it has one."""
        if (problem := self.missing_target(platform)) is not None:
            return problem
        if not all(jax_versions.is_static_shape(aval.shape) for aval in operands):
            return "its shapes are symbolic"
        if np.dtype(operands[0].dtype).name not in self.dtypes:
            return f"there is no kernel for {np.dtype(operands[0].dtype).name}"
        if self.kernel_limit is None:
            return None
        return self.kernel_limit(*_with_one_batch(operands, params), **_without_num_batch_dims(params))

    def missing_target(self, platform: str) -> str | None:
        """Why the op has no kernel at all on the platform, or None."""
        native = NATIVE_MODULES.get(platform)
        if native is None:
            return f"there are kernels for {' and '.join(KERNEL_PLATFORMS)} only"
        if native.problem is not None:
            return native.problem
        if self.name not in native.targets:
            return f"the {platform} module has no target of this name"
        return native.device_problem()


def _num_batch_dims(params: Mapping[str, Any]) -> int:
    """How many leading dimensions of a call's operands and results are those of a batch."""
    return params.get("num_batch_dims", 1) if params.get("batched", True) else 0


def _without_num_batch_dims(params: Mapping[str, Any]) -> dict[str, Any]:
    """The params as the functions of a definition take them."""
    return {name: value for name, value in params.items() if name != "num_batch_dims"}


def _joint_sizes(operands: Sequence[Any], num_batch_dims: int) -> tuple[int, ...]:
    """The sizes of the leading batch dimensions that the operands form together."""
    return tuple(joint_batch(*(x.shape[i] for x in operands)) for i in range(num_batch_dims))


def _with_one_batch(avals: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    """The abstract operands of a call as the functions of a definition see them: with one batch dimension."""
    num_batch_dims = _num_batch_dims(params)
    if num_batch_dims == 1:
        return avals
    batch = _joint_sizes(avals, num_batch_dims)
    return [jax.ShapeDtypeStruct(_shape_with_one_batch(x.shape, batch), x.dtype) for x in avals]


def _is_shared(shape: Sequence[int], num_batch_dims: int) -> bool:
    """Whether the whole batch shares an operand of this shape."""
    return all(size == 1 for size in shape[:num_batch_dims])


def _shape_with_one_batch(shape: Sequence[int], batch: tuple[int, ...]) -> tuple[int, ...]:
    """An array that the whole batch shares stays shared; any other has all of the batch."""
    return (1 if _is_shared(shape, len(batch)) else math.prod(batch), *shape[len(batch) :])


def _merge_batch(function: Callable[..., Sequence[jax.Array]], num_batch_dims: int) -> Callable[..., Any]:
    """A function of arrays with one batch dimension as one of arrays with several."""
    if num_batch_dims <= 1:
        return function

    def merged(*operands: jax.Array) -> list[jax.Array]:
        batch = _joint_sizes(operands, num_batch_dims)
        flat = []
        for x in operands:
            shape = _shape_with_one_batch(x.shape, batch)
            if shape[0] != math.prod(x.shape[:num_batch_dims]):
                x = jnp.broadcast_to(x, (*batch, *x.shape[num_batch_dims:]))
            flat.append(x.reshape(shape))
        return [x.reshape(*batch, *x.shape[1:]) for x in function(*flat)]

    return merged


def _over_outer_batches(function: Callable[..., Any], num_batch_dims: int, *operands: jax.Array) -> Any:
    """Maps a function of arrays with one batch dimension over those in front of it."""
    if num_batch_dims <= 1:
        return function(*operands)
    return over_batch(functools.partial(_over_outer_batches, function, num_batch_dims - 1), *operands)


def of_params(value: Any, params: Mapping[str, Any]) -> Any:
    """A field of a definition that may depend on the params of a call."""
    return value(**params) if callable(value) else value


def joint_batch(*sizes: int) -> int:
    """The size of the batch that operands with leading dimensions of these sizes form; 1 means shared."""
    return next((size for size in sizes if size != 1), 1)


def batch_of(*operands: Any) -> int:
    """The size of the batch that operands, arrays or their types, form with their leading dimensions."""
    return joint_batch(*(operand.shape[0] for operand in operands))


def over_batch(function: Callable[..., Any], *operands: jax.Array) -> Any:
    """Maps `function` over the leading dimension of the operands; where that is 1, the operand is shared."""
    batch = batch_of(*operands)
    mapped = [x if x.shape[0] == batch else x[0] for x in operands]
    return jax.vmap(function, [0 if x.shape[0] == batch else None for x in operands])(*mapped)


OPS: dict[str, Op] = {}
"""Every op, by name."""


def _register(op: Op) -> None:
    if op.name in OPS:
        raise ValueError(f"Op {op.name} is defined twice")
    OPS[op.name] = op


def precision_guarantee(
    name: str, dtype: Any, platform: str, *, deterministic: bool = False, indices_are_sorted: bool = False
) -> Guarantee:
    """What an op promises about its numbers.

    Args:
      name: the name of a public function or of an op, as ``python -m jax_baracuda report`` lists them: "segment_max",
        "segment_max_backward", ...
      dtype: the element type.
      platform: "cpu" or "cuda".
      deterministic: whether the function is called with ``deterministic=True``.
      indices_are_sorted: whether it is called with ``indices_are_sorted=True``.

    Returns:
      A record with ``accumulator`` (the dtype in which terms are combined, "none" for pure selection),
      ``math_precision`` ("exact", "rounded once", "faithful" or "accumulated"), ``deterministic`` (independent of
      thread scheduling) and ``bit_stable_on_same_hardware``.

    Raises:
      ValueError: there is no such op, or it has no kernel for this dtype or platform. What runs then is XLA's, and its
        guarantees are XLA's.
    """
    by_name = OPS | {alias: op for op in OPS.values() for alias in op.aliases}
    op = by_name.get(name)
    if op is None:
        raise ValueError(f"precision_guarantee: name must be one of {sorted(by_name)}, got {name!r}")
    if platform not in KERNEL_PLATFORMS:
        raise ValueError(f"precision_guarantee: platform must be one of {KERNEL_PLATFORMS}, got {platform!r}")
    try:
        dtype_name = jnp.dtype(dtype).name
    except TypeError:
        dtype_name = str(dtype)
    if dtype_name not in op.dtypes:
        raise ValueError(f"precision_guarantee: {name} has kernels for dtype {sorted(op.dtypes)}, got {dtype_name!r}")
    if isinstance(op.guarantee, Guarantee):
        return op.guarantee
    return op.guarantee(dtype_name, platform, deterministic=deterministic, indices_are_sorted=indices_are_sorted)


def _primitives_of(op: Op) -> tuple[Primitive, Primitive]:
    """The op's primitive, and the primitive of its kernel alone, which has the param `donated` as well."""
    primitive = _declare(op, f"baracuda_{op.name}")
    kernel = _declare(op, f"baracuda_{op.name}_kernel")
    primitive.def_impl(functools.partial(jax_versions.apply_primitive, primitive))
    jax_versions.require_devices_during_lowering(primitive)
    batching.primitive_batchers[primitive] = functools.partial(_batch, op, primitive)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, op, primitive)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, op)
    for platform in KERNEL_PLATFORMS:
        mlir.register_lowering(kernel, functools.partial(_lower_kernel, op, platform), platform=platform)
    if op.in_place_if_donated:
        by_platform = _declare(op, f"baracuda_{op.name}_by_platform")
        jax_versions.require_devices_during_lowering(by_platform)
        _register_lowerings(op, by_platform, kernel)
        # If it were cacheable, it would see arguments of a function of its own, never those of the program.
        lower = functools.partial(_lower_with_donation, op, kernel, by_platform)
        mlir.register_lowering(primitive, lower, cacheable=False)
    else:
        _register_lowerings(op, primitive, kernel)
    return primitive, kernel


def _register_lowerings(op: Op, primitive: Primitive, kernel: Primitive) -> None:
    mlir.register_lowering(primitive, functools.partial(_lower_reference, op))
    for platform in KERNEL_PLATFORMS:
        mlir.register_lowering(primitive, functools.partial(_lower, op, kernel, platform), platform=platform)


def _declare(op: Op, name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(functools.partial(_abstract_eval, op))
    return primitive


def _abstract_eval(op: Op, *operands: Any, donated: tuple[int, ...] = (), **params: Any) -> list[Any]:
    types = op.types_of_results(*operands, **params)
    specs = [jax_versions.explicit_spec(aval) for aval in operands]
    if all(spec is None for spec in specs):
        return [jax_versions.result_aval(operands[0], shape, dtype, None) for shape, dtype in types]
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    layout = op.layout(operands, results, params)
    whole = of_params(op.whole, _without_num_batch_dims(params))
    assignment = layout.assign([*specs, *(None for _ in results)], whole)
    return [
        jax_versions.result_aval(operands[0], shape, dtype, layout.spec(names, shape, assignment))
        for (shape, dtype), names in zip(types, layout.results, strict=True)
    ]


def _batch(
    op: Op, primitive: Primitive, operands: Sequence[jax.Array], axes: Sequence[int | None], **params: Any
) -> tuple[list[jax.Array], list[int]]:
    """Puts the mapped axis in front; operands that are not mapped stay shared."""
    mapped_size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    operands = [x[None] if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)]
    num_batch_dims = _num_batch_dims(params)
    if num_batch_dims == 0:
        params = params | {"batched": True}
        for i in of_params(op.in_place, params):
            operands[i] = jnp.broadcast_to(operands[i], (mapped_size, *operands[i].shape[1:]))
    else:
        params = params | {"num_batch_dims": num_batch_dims + 1}
    results = primitive.bind(*operands, **params)
    return results, [0] * len(results)


def _reference_of(
    op: Op, operands: Sequence[Any], free: Sequence[int], params: Mapping[str, Any]
) -> Callable[..., list[jax.Array]]:
    """The op's reference as a function of the operands at the positions `free`, the others fixed."""

    def reference(*free_operands: jax.Array) -> list[jax.Array]:
        all_operands = list(operands)
        for i, x in zip(free, free_operands, strict=True):
            all_operands[i] = x
        return _reference(op, *all_operands, **params)

    return reference


def _reference(op: Op, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Calls the reference. Under explicit sharding its axes are automatic, and only its results have a sharding."""

    num_batch_dims = _num_batch_dims(params)
    own_reference = functools.partial(op.reference, **_without_num_batch_dims(params))

    def reference(*operands: jax.Array) -> tuple[jax.Array, ...]:
        if num_batch_dims == 0:
            return tuple(x[0] for x in own_reference(*(x[None] for x in operands)))
        return tuple(_over_outer_batches(own_reference, num_batch_dims, *operands))

    avals = [jax.typeof(x) for x in operands]
    if any(jax_versions.explicit_spec(aval) is not None for aval in avals):
        results = _abstract_eval(op, *avals, **params)
        reference = in_automatic_mode(reference, results[0], *(result.sharding.spec for result in results))
    return list(reference(*operands))


def _jvp(
    op: Op, primitive: Primitive, primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any
) -> tuple[list[jax.Array], list[Any]]:
    """The primal from the kernel, the tangent from the reference: linear in the tangents, so JAX transposes it."""
    results = primitive.bind(*primals, **params)
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    num_linear = of_params(op.num_linear, _without_num_batch_dims(params))
    if op.transpose is not None and all(i < num_linear for i in moving):
        linear = [
            # An integer has no tangent. Itself in its place fits as well as any, since its result has none either.
            ad.instantiate_zeros(tangent) if jnp.issubdtype(primal.dtype, jnp.inexact) else primal
            for primal, tangent in zip(primals[:num_linear], tangents[:num_linear], strict=True)
        ]
        result_tangents = primitive.bind(*linear, *primals[num_linear:], **params)
    else:
        reference = _reference_of(op, primals, moving, params)
        _, result_tangents = jax.jvp(reference, [primals[i] for i in moving], [tangents[i] for i in moving])
    return results, [
        tangent if jnp.issubdtype(result.dtype, jnp.inexact) else jax_versions.zero_tangent(result)
        for result, tangent in zip(results, result_tangents, strict=True)
    ]


def _transpose(op: Op, cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    """The transpose with respect to the operands that the op is linear in."""
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
    results: list[Any] = [None] * len(operands)
    own_params, num_batch_dims = _without_num_batch_dims(params), _num_batch_dims(params)
    num_linear = of_params(op.num_linear, own_params)
    if op.transpose is not None and all(i < num_linear for i in linear):
        avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in operands[:num_linear]]
        own_avals = avals
        if num_batch_dims > 1:
            own_avals = [jax.ShapeDtypeStruct(x.shape[num_batch_dims - 1 :], x.dtype) for x in avals]

        def transpose(*arrays: jax.Array) -> Sequence[jax.Array]:
            return op.transpose(own_avals, arrays[: len(cotangents)], *arrays[len(cotangents) :], **own_params)

        transposed = _over_outer_batches(transpose, num_batch_dims, *cotangents, *operands[num_linear:])
        for i in linear:
            results[i] = _sum_over_shared_batch(transposed[i], avals[i])
        return results
    reference = _reference_of(op, operands, linear, params)
    transpose = jax.linear_transpose(reference, *(operands[i].aval for i in linear))
    for i, x in zip(linear, transpose(cotangents), strict=True):
        results[i] = split_like(x, operands[i].aval)
    return results


def _sum_over_shared_batch(cotangent: jax.Array, primal: Any) -> jax.Array:
    """The cotangent of an operand that (a dimension of) the batch shares, in its shape and sharding."""
    sizes = zip(cotangent.shape, primal.shape, strict=True)
    shared = tuple(axis for axis, (size, own_size) in enumerate(sizes) if size != own_size)
    return split_like(jnp.sum(cotangent, shared, keepdims=True) if shared else cotangent, primal)


def _lower_reference(op: Op, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
    return mlir.lower_fun(functools.partial(_reference, op, **params), multiple_results=True)(ctx, *operands)


def _lower_with_donation(
    op: Op, kernel: Primitive, by_platform: Primitive, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any
) -> Any:
    """The kernel of the one platform that the program is for. A program for several is never given memory to reuse."""
    platforms = jax_versions.platforms_of(ctx)
    if len(platforms) == 1 and platforms[0] in KERNEL_PLATFORMS:
        return _lower(op, kernel, platforms[0], ctx, *operands, **params)
    return mlir.lower_fun(functools.partial(by_platform.bind, **params), multiple_results=True)(ctx, *operands)


def _lower(
    op: Op, kernel: Primitive, platform: str, ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any
) -> Any:
    if op.missing_kernel(platform, ctx.avals_in, params) is not None:
        if (problem := op.missing_target(platform)) is not None:
            _warn_once(f"jax_baracuda: {op.name} runs as plain JAX on {platform}: {problem}")
        return _lower_reference(op, ctx, *operands, **params)

    donated = tuple(i for i in op.in_place_if_donated if jax_versions.is_donated_argument(operands[i]))
    own_params = _without_num_batch_dims(params)
    run_kernel = functools.partial(kernel.bind, **params, donated=donated)
    has_empty_array = any(0 in aval.shape for aval in [*ctx.avals_in, *ctx.avals_out])
    if has_empty_array and jax_versions.is_in_shard_map(ctx.module_context.axis_context):
        return _lower_reference(op, ctx, *operands, **params)  # XLA loses calls of empty arrays there
    if has_empty_array or not jax_versions.partitioner_splits(ctx.module_context.axis_context):
        # In a partially manual shard_map, the automatic axes then see whole arrays.
        return mlir.lower_fun(run_kernel, multiple_results=True)(ctx, *operands)

    def shard_program(axes: dict[str, MeshAxes], *shards: jax.Array) -> Sequence[jax.Array]:
        if op.shard_program is None:
            return tuple(run_kernel(*shards))
        kernel_of_one_batch = functools.partial(kernel.bind, **own_params, donated=donated)
        program = functools.partial(op.shard_program, kernel_of_one_batch, axes, **own_params)
        # A part of an operand may have sizes of 1 where the operand does not: the batch shares it no more than before.
        batch = _joint_sizes(shards, _num_batch_dims(params))
        shards = tuple(
            shard
            if _is_shared(aval.shape, len(batch))
            else jnp.broadcast_to(shard, (*batch, *shard.shape[len(batch) :]))
            for aval, shard in zip(ctx.avals_in, shards, strict=True)
        )
        return tuple(_merge_batch(program, len(batch))(*shards))

    layout = op.layout(ctx.avals_in, ctx.avals_out, params)
    call = partitioned(run_kernel, shard_program, layout, of_params(op.whole, own_params), op.reduced)
    # A partitioned call holds no more than its shapes and the address of a Python object. Without the op's name and its
    # params, JAX's persistent compilation cache could take one program for another.
    identity = f"{op.name}({own_params | {'donated': donated}}) of jax_baracuda {VERSION}"
    with set_xla_metadata(jax_baracuda_op=identity):
        results = mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
    return [
        jax_versions.lower_with_sharding_in_types(ctx, result, aval)
        for result, aval in zip(results, ctx.avals_out, strict=True)
    ]


def _lower_kernel(
    op: Op,
    platform: str,
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    donated: tuple[int, ...] = (),
    **params: Any,
) -> Any:
    if op.missing_kernel(platform, ctx.avals_in, params) is not None:
        return _lower_reference(op, ctx, *operands, **params)
    if _num_batch_dims(params) > 1:
        kernel = functools.partial(op.kernel, **_without_num_batch_dims(params), donated=donated)
        # Explicit sharding would refuse to merge dimensions; here the arrays are those of one device.
        shapes = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
        with jax_versions.without_abstract_mesh():
            merged = mlir.lower_fun(_merge_batch(kernel, _num_batch_dims(params)), multiple_results=True)
            return merged(ctx.replace(avals_in=shapes), *operands)
    num_results = len(ctx.avals_out)
    if op.plan_parameters is not None:
        scratch_bytes = op.plan(platform, ctx.avals_in, params).scratch_bytes
        if scratch_bytes > 0:
            scratch = jax.core.ShapedArray((scratch_bytes,), np.dtype(np.uint8))
            ctx = ctx.replace(avals_out=[*ctx.avals_out, scratch])
    donated_in_place = {i: op.in_place_if_donated[i] for i in donated}
    in_place = {
        operand: result
        for operand, result in (dict(of_params(op.in_place, params)) | donated_in_place).items()
        if ctx.avals_in[operand].shape == ctx.avals_out[result].shape
    }
    rule = jax.ffi.ffi_lowering(target_name(op.name), operand_output_aliases=in_place)
    return rule(ctx, *operands, **attributes_of(op, params))[:num_results]


def attributes_of(op: Op, params: Mapping[str, Any]) -> dict[str, Any]:
    """What the native handler takes of the params."""
    return {
        name: np.array(jax.tree.leaves(params[name]), np.int64) if isinstance(params[name], tuple) else params[name]
        for name in op.attributes
    }


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
