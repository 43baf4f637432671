"""Binds forward kernels to backward kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import reshard_like
from jax_baracuda._core.functions import jvp_of_nonzero, resolved, with_named
from jax_baracuda._core.selection import SCOPE_NAME, Selection, current_selection, selecting

if TYPE_CHECKING:
    from jax_baracuda._core.op import Op, Transpose

_mode = threading.local()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Types:
    """The types of a call's arrays, as a static residual; None for an array that is not differentiated."""

    named: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(differentiated: Mapping[str, Any]) -> _Types:
        return _Types(tuple((name, None if x is None else jax.typeof(x)) for name, x in differentiated.items()))


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of a call. Derivatives use its `selection`, wherever JAX traces them."""

    params: Hashable
    selection: Selection
    scope: str | None
    """See :func:`jax_baracuda._core.selection.in_named_scope`."""


class KernelVjp:
    """A function of arrays whose reverse-mode derivative is a kernel.

    Called as ``f(params, **arrays)`` with hashable static `params`; an array that a call omits is None.

    By default, ``jax.custom_vjp`` binds `forward` to `backward`. If both modes are asked for (see
    :func:`both_modes`), ``jax.custom_jvp`` does. The tangent is then the transpose of `backward`: it runs kernels
    where the ops have `transposes`, else plain JAX. Its own transpose is `backward` again, with its kernels. If no
    array has a tangent space, the primitives are called directly.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., tuple[Any, Any]],
        backward: Callable[..., Mapping[str, Any]],
        *,
        primal: Callable[..., Any] | None = None,
        symbolic_zeros: bool = False,
    ):
        """
        Args:
          name: the function's name in JAX's errors.
          forward: ``(params, **arrays) -> (result, residuals)``
          backward: ``(params, residuals, cotangent) -> {name: cotangent}``, without arrays that have no tangent space.
            Linear in the cotangent. Its results are cast and resharded to the types of their arrays.
          primal: ``(params, **arrays) -> result``, if it costs less than `forward`. Default: the result of `forward`.
          symbolic_zeros: whether `backward` takes one more argument: ``{name: type}``, None for arrays that are not
            differentiated. It may omit their cotangents.
        """
        self._primal = primal or (lambda params, **arrays: forward(params, **arrays)[0])
        self.forward = forward
        self.backward = backward
        self._symbolic_zeros = symbolic_zeros

        def function(call: _Call, arrays: Mapping[str, Any]) -> Any:
            with selecting(call.selection), jax.named_scope(call.scope) if call.scope else contextlib.nullcontext():
                return self._primal(call.params, **arrays)

        function.__name__ = name
        self._in_reverse_mode = jax.custom_vjp(function, nondiff_argnums=(0,))
        self._in_reverse_mode.defvjp(self._forward_with_types, self._backward_with_types, symbolic_zeros=symbolic_zeros)
        self._in_both_modes = jax.custom_jvp(function, nondiff_argnums=(0,))
        self._in_both_modes.defjvp(self._push_forward, symbolic_zeros=True)

    def __call__(self, params: Hashable, **arrays: Any) -> Any:
        # Cast first: custom_vjp requires that cotangents vary over the same manual axes as the primals.
        leaves, structure = jax.tree.flatten(arrays)
        leaves = list(jax_versions.unify_varying(*leaves))
        arrays = jax.tree.unflatten(structure, leaves)
        if not any(jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves):
            return self._primal(params, **arrays)
        function = self._in_both_modes if is_in_both_modes() else self._in_reverse_mode
        return function(_Call(params, current_selection(), SCOPE_NAME.value), arrays)

    def _forward_with_types(self, call: _Call, primals: Mapping[str, Any]) -> tuple[Any, tuple[_Types, Any]]:
        arrays = differentiated = primals
        if self._symbolic_zeros:
            arrays = jax.tree.map(lambda x: x.value, primals)
            differentiated = jax.tree.map(lambda x: x.value if x.perturbed else None, primals)
        with selecting(call.selection), both_modes():  # forward mode over reverse mode differentiates these ops
            result, residuals = self.forward(call.params, **arrays)
        return result, (_Types.of(differentiated), residuals)

    def _backward_with_types(
        self, call: _Call, residuals: tuple[_Types, Any], cotangent: Any
    ) -> tuple[Mapping[str, Any]]:
        types = dict(residuals[0].named)
        if self._symbolic_zeros:
            if all(isinstance(x, jax.custom_derivatives.SymbolicZero) for x in jax.tree.leaves(cotangent)):
                return (dict.fromkeys(types),)
            cotangent = jax.tree.map(_instantiated, cotangent)
        return (self._pull_back(call, types, residuals[1], cotangent),)

    def _pull_back(self, call: _Call, types: Mapping[str, Any], residuals: Any, cotangent: Any) -> dict[str, Any]:
        """The cotangents of all arrays, in the types of the arrays."""
        of_types = (types,) if self._symbolic_zeros else ()
        with selecting(call.selection), both_modes():
            cotangents = self.backward(call.params, residuals, cotangent, *of_types)
        return {name: _like(cotangents.get(name), type_) for name, type_ in types.items()}

    def _push_forward(
        self, call: _Call, primals: tuple[Mapping[str, Any]], tangents: tuple[Mapping[str, Any]]
    ) -> tuple[Any, Any]:
        """The rule of ``jax.custom_jvp``. The tangent needs only the residuals of reverse mode."""
        [arrays], [of_arrays] = primals, tangents
        nonzero = {
            name: x
            for name, x in of_arrays.items()
            if x is not None and not isinstance(x, jax.custom_derivatives.SymbolicZero)
        }
        types = {name: jax.typeof(x) if name in nonzero else None for name, x in arrays.items()}
        with selecting(call.selection), both_modes():  # JAX may call this outside of the caller's context
            result, residuals = self.forward(call.params, **arrays)
        results, result_structure = jax.tree.flatten(result)
        result_types = [jax.typeof(x) for x in results]
        residual_leaves, residual_structure = jax.tree.flatten(residuals)
        num_residuals = len(residual_leaves)  # the closure below is part of jaxprs and must not hold tracers

        def pull_back(*operands: jax.Array) -> list[jax.Array]:
            own_residuals = jax.tree.unflatten(residual_structure, operands[:num_residuals])
            cotangent = jax.tree.unflatten(result_structure, _with_float0(operands[num_residuals:], result_types))
            cotangents = self._pull_back(call, types, own_residuals, cotangent)
            return [
                jnp.zeros_like(type_) if cotangents[name] is None else cotangents[name]
                for name, type_ in types.items()
                if type_ is not None
            ]

        types_of_inexact = [type_ for type_ in result_types if jnp.issubdtype(type_.dtype, jnp.inexact)]
        pushed = _transposed(pull_back, residual_leaves, list(nonzero.values()), types_of_inexact)
        return result, jax.tree.unflatten(result_structure, _with_float0(pushed, result_types))


def vjp_of_linear(name: str, op: Op) -> Callable[..., list[jax.Array]]:
    """Binds an op that is linear in all differentiable operands to its transpose.

    Args:
      name: the function's name in JAX's errors.
      op: its `transposes` has one entry, for these operands.

    Returns:
      ``(params, *operands)`` -> the results of the op.
    """

    def transpose_of(params: Mapping[str, Any]) -> tuple[tuple[str, ...], Transpose]:
        """The names of the linear operands, and the transpose."""
        [(names, of_op)] = resolved(op.transposes, params).items()
        return names, with_named(of_op, params)

    def forward(params: Mapping[str, Any], **arrays: Any) -> tuple[list[jax.Array], Any]:
        names, _ = transpose_of(params)
        types = _Types.of({name: arrays[name] for name in names})
        others = {name: x for name, x in arrays.items() if name not in names}
        return op.of_arrays(arrays, **params), (types, others)

    def backward(params: Mapping[str, Any], residuals: Any, cotangents: Sequence[jax.Array]) -> dict[str, Any]:
        names, pull_back = transpose_of(params)
        types, others = residuals
        in_order = (others[name] for name in op.operand_names(params) if name in others)
        pulled = pull_back([type_ for _, type_ in types.named], cotangents, *in_order)
        return dict(zip(names, pulled, strict=True))

    vjp = KernelVjp(name, forward, backward)
    return lambda params, *operands: vjp(params, **dict(zip(op.operand_names(params), operands, strict=True)))


def _with_float0(of_inexact: Sequence[jax.Array], types: Sequence[Any]) -> list[Any]:
    """The tangents or cotangents of arrays of these types, given those of inexact ones. The others have none."""
    given = iter(of_inexact)
    return [
        next(given) if jnp.issubdtype(type_.dtype, jnp.inexact) else np.zeros(type_.shape, jax.dtypes.float0)
        for type_ in types
    ]


def _like(cotangent: Any, type_: Any) -> Any:
    """A cotangent, cast and resharded to the type of its primal."""
    if cotangent is None or type_ is None:
        return None
    return reshard_like(cotangent.astype(type_.dtype), type_)


def _instantiated(cotangent: Any) -> jax.Array:
    is_zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if is_zero else cotangent


# ----------------------------------------------------------------------------------------------------------------------
# Which modes a call supports.


def is_in_both_modes() -> bool:
    """Whether a call of :class:`KernelVjp` supports forward mode as well as reverse mode."""
    return getattr(_mode, "is_both", False)


@contextlib.contextmanager
def both_modes() -> Iterator[None]:
    """In this context, calls of :class:`KernelVjp` support forward mode as well as reverse mode."""
    previous = is_in_both_modes()
    _mode.is_both = True
    try:
        yield
    finally:
        _mode.is_both = previous


# ----------------------------------------------------------------------------------------------------------------------
# A primitive for a linear map that is given by its transpose. Transposing the primitive runs the given function.

PullBack = Callable[..., Sequence[jax.Array]]
"""``(*residuals, *cotangents) -> cotangents of the tangents``, linear in the cotangents."""


def _transposed(
    pull_back: PullBack, residuals: Sequence[jax.Array], tangents: Sequence[jax.Array], types: Sequence[Any]
) -> list[jax.Array]:
    """Applies the transpose of `pull_back`.

    Reverse mode runs `pull_back` as it is, with its kernels. Forward mode runs its transpose.

    Args:
      pull_back: must not close over arrays.
      residuals: any arrays.
      tangents: one for each cotangent that `pull_back` returns.
      types: the types of the results, and of the cotangents that `pull_back` takes.
    """

    def push_forward(*operands: jax.Array) -> Sequence[jax.Array]:
        own_residuals, own_tangents = operands[: len(residuals)], operands[len(residuals) :]
        return jax.linear_transpose(lambda *ct: list(pull_back(*own_residuals, *ct)), *types)(list(own_tangents))

    operands = [*residuals, *tangents]
    jaxpr = jax.make_jaxpr(push_forward)(*operands)
    return _transposed_p.bind(*operands, jaxpr=jaxpr, pull_back=pull_back, num_residuals=len(residuals))


def _batch_transposed(
    operands: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    jaxpr: Any,
    pull_back: PullBack,
    num_residuals: int,
) -> tuple[list[jax.Array], list[int]]:
    """Maps all tangents and cotangents, so that the two stay each other's transpose. Residuals may stay shared."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    residuals = operands[:num_residuals]
    # With vmap, because it shards what it broadcasts like the batch.
    tangents = jax.vmap(lambda *own: own[num_residuals:], tuple(axes), axis_size=size)(*operands)

    def mapped(function: Callable[..., Any], num_linear: int) -> Callable[..., Any]:
        return jax.vmap(function, (*axes[:num_residuals], *[0] * num_linear), axis_size=size)

    batched = mapped(jax_versions.jaxpr_as_fun(jaxpr), len(tangents))
    results = _transposed_p.bind(
        *residuals,
        *tangents,
        jaxpr=jax.make_jaxpr(batched)(*residuals, *tangents),
        pull_back=mapped(pull_back, len(jaxpr.out_avals)),
        num_residuals=num_residuals,
    )
    return results, [0] * len(results)


def _jvp_of_transposed(
    primals: Sequence[jax.Array], tangents: Sequence[Any], *, num_residuals: int, **params: Any
) -> tuple[list[jax.Array], list[Any]]:
    """Applies the map to the tangents of its linear operands. JAX differentiates it with respect to the residuals."""
    bind = functools.partial(_transposed_p.bind, **params, num_residuals=num_residuals)
    results = bind(*primals)
    result_tangents = [jax_versions.zero_tangent(x) for x in results]
    if any(not isinstance(x, ad.Zero) for x in tangents[num_residuals:]):
        result_tangents = bind(*primals[:num_residuals], *map(ad.instantiate_zeros, tangents[num_residuals:]))
    if any(not isinstance(x, ad.Zero) for x in tangents[:num_residuals]):

        def of_residuals(*residuals: jax.Array) -> list[jax.Array]:
            return jax_versions.jaxpr_as_fun(params["jaxpr"])(*residuals, *primals[num_residuals:])

        _, by_residuals = jvp_of_nonzero(of_residuals, primals[:num_residuals], tangents[:num_residuals])
        result_tangents = list(map(ad.add_tangents, result_tangents, by_residuals))
    return results, result_tangents


def _transpose_of_transposed(
    cotangents: Sequence[Any], *operands: Any, pull_back: PullBack, num_residuals: int, **_: Any
) -> Any:
    pulled = pull_back(*operands[:num_residuals], *map(ad.instantiate_zeros, cotangents))
    of_tangents = [
        x if ad.is_undefined_primal(tangent) else None
        for x, tangent in zip(pulled, operands[num_residuals:], strict=True)
    ]
    return [None] * num_residuals + of_tangents


_transposed_p = jax_versions.program_primitive(
    "baracuda_transposed", batch=_batch_transposed, jvp=_jvp_of_transposed, transpose=_transpose_of_transposed
)
