"""Redirects calls of JAX's functions to this package's, in unchanged programs."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_baracuda import forward_mode
from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import FLOATING_DTYPES, INTEGER_DTYPES, broadcasts, reshard_like
from jax_baracuda._core.dispatch import Site, decide
from jax_baracuda._core.op import OPS, OpCall
from jax_baracuda._core.selection import (
    REDIRECTION,
    Kinds,
    Scope,
    current_selection,
    not_redirected,
    process_scope,
    redirected,
    set_process_scope,
)
from jax_baracuda.ops.segment.definitions import ORDERED_DTYPES
from jax_baracuda.ops.segment.take_rows import sum_taken_rows
from jax_baracuda.ops.write_rows import DTYPES as DTYPES_OF_ROWS
from jax_baracuda.ops.write_slice import DTYPES, MAX_AXES

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NUMBERS = FLOATING_DTYPES | INTEGER_DTYPES
_DTYPES = {
    "segment_sum": _NUMBERS,
    "segment_prod": _NUMBERS,
    "segment_max": ORDERED_DTYPES,
    "segment_min": ORDERED_DTYPES,
    "write_rows": DTYPES_OF_ROWS,
}
_UPDATES: dict[str, tuple[str, str, Callable[[Array, Array], Array]]] = {
    "scatter_add": ("add", "segment_sum", jnp.add),
    "scatter_mul": ("multiply", "segment_prod", jnp.multiply),
    "scatter_max": ("max", "segment_max", jnp.maximum),
    "scatter_min": ("min", "segment_min", jnp.minimum),
}
"""By the name of JAX's scatter: the method of ``x.at[ids]``, the function that reduces the updates of each row, and the
function that joins the result with the row. ``x.at[ids].set`` reduces nothing and is not among them."""


class RedirectReport:
    """Counts the calls that were redirected and those left to JAX, at tracing or in code without ``jax.jit``.

    A call in a compiled program counts once per trace. Printing the report lists the counts.

    Attributes:
      redirected: the number of calls by function, such as ``"jax.ops.segment_sum"``.
      kept: the number of calls that JAX kept, by function and reason.
    """

    def __init__(self) -> None:
        self.redirected: collections.Counter[str] = collections.Counter()
        self.kept: collections.Counter[tuple[str, str]] = collections.Counter()

    def __str__(self) -> str:
        lines = [f"{count} x {name}: redirected" for name, count in sorted(self.redirected.items())]
        lines += [f"{count} x {name}: left to JAX, {reason}" for (name, reason), count in sorted(self.kept.items())]
        return "\n".join(lines) or "no calls"


class _Unserved(Exception):
    """Why a call is left to JAX."""


# ----------------------------------------------------------------------------------------------------------------------
# Which calls are served. This is checked before our functions run: wrong arguments raise JAX's own errors, and an error
# in our functions is not mistaken for an unserved call.


def _require(is_served: bool, reason: str) -> None:
    if not is_served:
        raise _Unserved(reason)


def _as_array(value: Any) -> Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _Unserved(f"an argument is no array: {error}") from error


def _as_arrays(*values: Any) -> list[Array]:
    """The arguments of a function that takes arrays and numbers, but no lists."""
    for value in values:
        is_array = isinstance(value, jax.Array | np.ndarray | np.generic | int | float | complex)
        _require(is_array or hasattr(value, "__jax_array__"), f"an argument is no array, but {type(value).__name__}")
    return [_as_array(value) for value in values]


def _require_static(*sizes: Any) -> None:
    _require(jax_versions.is_static_shape(sizes), "sizes are symbolic or unknown")


def _require_updates(name: str, array: Any, rows_shape: tuple[int, ...], mode: Any) -> None:
    """Checks an array that broadcasts to one row for each id, as the function of this name takes it."""
    _require(array.dtype.name in _DTYPES[name], f"there is no kernel for dtype {array.dtype}")
    _require_static(*array.shape, *rows_shape)
    fits = broadcasts(array.shape, rows_shape)
    _require(fits, f"arrays of shape {array.shape} do not fit ids, which need {rows_shape}")
    try:
        jax.lax.GatherScatterMode.from_any(mode)
    except ValueError as error:
        raise _Unserved(str(error)) from error


def _require_kernel(name: str, rows: Any, ids_shape: tuple[int, ...], num_segments: int, is_sorted: bool) -> None:
    """Refuses 32- and 64-bit reductions on GPUs if the rules of the op leave them to XLA for rows that it can fuse.

    Assumes that XLA can fuse the rows, as it mostly can: the lowering cannot tell, because the gradient of a gather is
    in an inner ``jit``. 16-bit numbers are always redirected, because JAX rounds their sums after each term.
    """
    if jax.default_backend() != "gpu" or rows.dtype.itemsize < 4 or current_selection() is not None:
        return
    num_rows = math.prod(ids_shape)
    types = (
        jax.ShapeDtypeStruct((num_rows, *rows.shape[len(ids_shape) :]), rows.dtype),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
    )
    op = OPS[name]
    params = {"num_segments": num_segments, "indices_are_sorted": is_sorted, **op.targets[name]}
    decision = decide(OpCall(op, types, params), Site("cuda", fuses=True))
    _require(decision.implementation == "kernel", f"{decision.reason} (segments and rows of {rows.dtype} on a GPU)")


# ----------------------------------------------------------------------------------------------------------------------
# The calls. Each function has the signature of the internal function of JAX that it replaces.


def _segment_update(
    name: str,
    data: Any,
    segment_ids: Any,
    scatter_op: Any,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    reducer: Any = None,
    mode: Any = None,
    out_sharding: Any = None,
) -> Array:
    _require(name in _DTYPES, "there is no such function")
    data, ids = _as_arrays(data, segment_ids)
    _require(jnp.issubdtype(ids.dtype, jnp.integer), f"ids of dtype {ids.dtype}")
    _require_updates(name, data, (*ids.shape, *data.shape[1:]), mode)
    if bucket_size is not None:
        is_size = isinstance(bucket_size, int | np.integer) and bucket_size > 0
        _require(is_size and ids.ndim == 1 and out_sharding is None, f"bucket_size={bucket_size!r} of these arguments")
    _require(out_sharding is None or not out_sharding.spec.unreduced, "an unreduced out_sharding is asked for")
    if num_segments is None:
        _require(ids.size > 0, "num_segments is missing, and there are no ids")
        largest = jnp.max(ids)
        _require(not isinstance(largest, jax.core.Tracer), "num_segments is missing, and ids are traced")
        num_segments = int(largest) + 1
    _require_static(num_segments)
    _require(num_segments >= 0, f"num_segments={num_segments}")
    _require_kernel(name, data, ids.shape, num_segments, indices_are_sorted)
    options = {"bucket_size": bucket_size, "mode": mode, "out_sharding": out_sharding}
    return getattr(forward_mode, name)(data, ids, num_segments, indices_are_sorted, unique_indices, **options)


def _scatter_update(
    x: Any,
    idx: Any,
    y: Any,
    scatter_op: Any,
    indices_are_sorted: bool,
    unique_indices: bool,
    mode: Any = None,
    normalize_indices: bool = True,
    out_sharding: Any = None,
) -> Array:
    is_set = scatter_op.__name__ == "scatter"
    _, name, join = ("set", "write_rows", None) if is_set else _UPDATES[scatter_op.__name__]
    [ids] = idx if isinstance(idx, tuple) and len(idx) == 1 else (idx,)
    is_vector = hasattr(ids, "dtype") and jnp.issubdtype(ids.dtype, jnp.signedinteger) and ids.ndim == 1
    _require(is_vector, "the index is not one vector of signed integers")
    x, y = _as_array(x), _as_array(y)
    _require(x.dtype.name in _DTYPES[name], f"there is no kernel for dtype {x.dtype}")
    _require(not x.weak_type, "the array, and so the result, is weakly typed")
    _require(jnp.result_type(x, y) == x.dtype, f"updates of dtype {y.dtype} of an array of dtype {x.dtype}")
    is_exact = name not in ("segment_max", "segment_min") or not jnp.issubdtype(x.dtype, jnp.floating)
    _require(is_exact, "in the gradient of JAX, a row and the updates that are equal to it have equal shares")
    _require(x.ndim > 0, "the array is a scalar")
    _require(out_sharding is None, "an out_sharding is asked for")
    num_rows = x.shape[0]
    rows = jax.ShapeDtypeStruct((*ids.shape, *x.shape[1:]), x.dtype)
    y = y.astype(x.dtype)
    _require_updates(name, y, rows.shape, mode)
    _require_static(num_rows)
    _require(num_rows <= jnp.iinfo(ids.dtype).max, f"ids of dtype {ids.dtype} for {num_rows} rows")
    if join is not None:
        _require_kernel(name, rows, ids.shape, num_rows, indices_are_sorted)
    if normalize_indices:
        ids = jnp.where(ids < 0, ids + ids.dtype.type(num_rows), ids)  # `indices_are_sorted` refers to these
    updates = jnp.broadcast_to(y, rows.shape)
    if join is None:
        is_clipped = jax.lax.GatherScatterMode.from_any(mode) == jax.lax.GatherScatterMode.CLIP
        return forward_mode.write_rows(x, updates, jnp.clip(ids, 0, num_rows - 1) if is_clipped else ids)
    return join(x, getattr(forward_mode, name)(updates, ids, num_rows, indices_are_sorted, mode=mode))


def _sum_taken(
    cotangent: Array,
    operand: Any,
    indices: Array,
    *,
    dimension_numbers: Any,
    slice_sizes: tuple[int, ...],
    unique_indices: bool,
    indices_are_sorted: bool,
    mode: Any,
    fill_value: Any,
) -> Array:
    takes_rows = (
        indices.shape[-1] == 1
        and slice_sizes == (1, *operand.shape[1:])
        and dimension_numbers.start_index_map == dimension_numbers.collapsed_slice_dims == (0,)
        and not dimension_numbers.operand_batching_dims
        and dimension_numbers.offset_dims == tuple(range(indices.ndim - 1, cotangent.ndim))
        and indices.ndim > 1
    )
    _require(takes_rows, "it takes other parts than rows by an array of ids")
    _require(cotangent.dtype.name in FLOATING_DTYPES, f"there is no kernel for dtype {cotangent.dtype}")
    _require(indices.dtype.name in ("int32", "int64"), f"ids of dtype {indices.dtype}")
    _require_static(*cotangent.shape, *operand.shape)
    ids = jax.lax.squeeze(indices, (indices.ndim - 1,))
    num_rows = operand.shape[0]
    if mode == jax.lax.GatherScatterMode.CLIP:
        ids = jnp.clip(ids, 0, num_rows - 1)
    cotangent, ids = jax_versions.unify_varying(cotangent, ids)
    is_sorted = indices_are_sorted and ids.ndim == 1
    _require_kernel("segment_sum", cotangent, ids.shape, num_rows, is_sorted)
    d_data = sum_taken_rows(cotangent, ids, num_rows=num_rows, indices_are_sorted=is_sorted, deterministic=False)
    return reshard_like(d_data, operand)


def _slice_update(operand: Any, update: Any, start_indices: Any, *, allow_negative_indices: Any = True) -> Array:
    operand, update = _as_arrays(operand, update)
    dtype, ndim = operand.dtype, operand.ndim
    _require(dtype.name in DTYPES, f"there is no kernel for dtype {dtype}")
    _require(update.dtype == dtype, f"an update of dtype {update.dtype} of an array of dtype {dtype}")
    _require(ndim <= MAX_AXES, f"the array has more than {MAX_AXES} axes")
    _require_static(*operand.shape, *update.shape)
    fits = update.ndim == ndim and all(part <= size for part, size in zip(update.shape, operand.shape, strict=True))
    _require(fits, f"an update of shape {update.shape} of an array of shape {operand.shape}")
    _require(not (operand.weak_type and update.weak_type), "the result is weakly typed")
    starts = _starts_of(start_indices, operand.shape, allow_negative_indices)
    return forward_mode.write_slice(operand, update, starts)


def _starts_of(start_indices: Any, shape: tuple[int, ...], allow_negative_indices: Any) -> list[Any]:
    """Start indices for :func:`write_slice`."""
    is_vector = isinstance(start_indices, jax.Array | np.ndarray) and start_indices.ndim == 1
    is_sequence = is_vector or isinstance(start_indices, list | tuple)
    _require(is_sequence and len(start_indices) == len(shape), f"no start index for each axis of shape {shape}")
    from_end = allow_negative_indices
    from_end = [from_end] * len(shape) if isinstance(from_end, bool) else list(from_end)
    _require(len(from_end) == len(shape), "allow_negative_indices has another length")
    starts = list(start_indices)
    are_scalars = all(isinstance(x, int) or (hasattr(x, "dtype") and x.ndim == 0) for x in starts)
    _require(are_scalars, "the start indices are no numbers")
    dtypes = {jax.dtypes.canonicalize_dtype(getattr(x, "dtype", type(x))) for x in starts}
    are_alike = len(dtypes) <= 1 and all(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes)
    _require(are_alike, "the start indices are not integers of one dtype")
    return [_start(*of_axis, *dtypes) for of_axis in zip(starts, shape, from_end, strict=True)]


def _start(start: Any, size: int, counts_from_end: bool, dtype: Any) -> Any:
    """A start index for :func:`write_slice`, where negative ones count from the end."""
    is_known = isinstance(start, int | np.integer)
    if max(size, abs(int(start)) if is_known else 0) > jnp.iinfo(dtype).max:
        raise _Unserved(f"a start index {f'of {start} ' if is_known else ''}of dtype {dtype} for {size} elements")
    if is_known:
        _require(counts_from_end or start >= 0, f"a start index of {start} that does not count from the end")
    if is_known or counts_from_end or jnp.issubdtype(dtype, jnp.unsignedinteger):
        return start
    return jnp.maximum(start, 0)


# ----------------------------------------------------------------------------------------------------------------------
# The places in JAX that are replaced. Each replacement checks whether to redirect a call.


def _wrap(kind: str, name_of: Callable[..., str | None], function: Callable[..., Array]) -> jax_versions.Wrap:
    """Replaces JAX's function by ours where calls are redirected and ours serves them.

    Args:
      name_of: ``(*args)`` -> the call's name, if any.
    """

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            name = name_of(*args) if kind in redirected() else None
            if name is None:
                return own(*args, **kwargs)
            with not_redirected():  # JAX's functions call each other
                try:
                    result, unserved = function(*args, **kwargs), None
                except _Unserved as reason:
                    unserved = str(reason)
                _count(name, unserved)
                return result if unserved is None else own(*args, **kwargs)

        return replacement

    return wrap


def _name_of_update(x: Any, idx: Any, y: Any, scatter_op: Any, *_: Any) -> str | None:
    name = getattr(scatter_op, "__name__", "")
    if name == "scatter":
        return "x.at[ids].set"
    return f"x.at[ids].{_UPDATES[name][0]}" if name in _UPDATES else None


@contextlib.contextmanager
def _redirected_slice_updates() -> Iterator[None]:
    wrap = _wrap("slice_updates", lambda *_: "jax.lax.dynamic_update_slice", _slice_update)
    # JAX traces slice updates of its own during lowering: scan writes its stacked results.
    with jax_versions.lowering_inside(not_redirected), jax_versions.wrapped_slice_update(wrap):
        yield


_PLACES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "segments": functools.partial(
        jax_versions.wrapped_in_scatter,
        "_segment_update",  # all jax.ops.segment_* call it
        _wrap("segments", lambda name, *_: f"jax.ops.{name}", _segment_update),
    ),
    "indexed_updates": functools.partial(
        jax_versions.wrapped_in_scatter,
        "_scatter_update",  # all x.at[ids].add(y) and so on call it
        _wrap("indexed_updates", _name_of_update, _scatter_update),
    ),
    "gather_gradients": functools.partial(
        jax_versions.wrapped_transpose_of_gather,
        _wrap("gather_gradients", lambda *_: "gradient of a gather", _sum_taken)(lambda *_, **__: None),
    ),
    "slice_updates": _redirected_slice_updates,
}
_uses: collections.Counter[str] = collections.Counter()
"""The number of contexts that redirect at each place, plus 1 for the process. If positive, the place is replaced."""
_patches: dict[str, contextlib.ExitStack] = {}
_lock = threading.RLock()  # reentrant: a collected generator may leave its context at any time


def _use_places(kinds: Kinds) -> None:
    with _lock, contextlib.ExitStack() as undo:
        for name in kinds:
            _uses[name] += 1
            undo.callback(_release_places, [name])
            if _uses[name] == 1:
                _patches[name] = contextlib.ExitStack()
                try:
                    _patches[name].enter_context(_PLACES[name]())
                except (ImportError, AttributeError, KeyError) as error:
                    raise NotImplementedError(
                        f"redirect: {name} cannot be redirected in jax {jax.__version__}, where they are not done at "
                        f"the place that this version of jax_baracuda knows: {error}"
                    ) from error
        undo.pop_all()


def _release_places(kinds: Iterable[str]) -> None:
    with _lock:
        for name in kinds:
            _uses[name] -= 1
            if _uses[name] == 0:
                _patches.pop(name).close()


# ----------------------------------------------------------------------------------------------------------------------
# The reports that count a call: those of the contexts of this thread or, if there are none, of the process.


def _count(name: str, unserved: str | None) -> None:
    scopes: list[Any] = [scope for scope in REDIRECTION.entered if isinstance(scope, redirect)] or [process_scope()]
    for report in {id(scope): scope.report for scope in scopes if scope is not None}.values():
        with _lock:
            if unserved is None:
                report.redirected[name] += 1
            else:
                report.kept[name, unserved] += 1


class redirect(contextlib.ContextDecorator, Scope[Kinds | None]):  # noqa: N801 (used as a function)
    """Redirects calls of JAX's functions to the functions of this package, in unchanged code.

    A context manager, a decorator and, with :meth:`install`, a setting of the process. These calls are redirected if
    our functions serve them, and are left to JAX otherwise:

    - `segments`: ``jax.ops.segment_sum``, ``segment_max``, ``segment_min`` and ``segment_prod``, however they were
      imported.
    - `gather_gradients`: the gradient of gathering rows by an array of ids, as in ``x[ids]`` or
      ``jnp.take(x, ids, axis=0)``. It runs the kernel of :func:`segment_sum`. The gather itself stays XLA's.
    - `indexed_updates`: ``x.at[ids].add`` and ``.multiply`` of rows by a vector of ids, for integers also ``.max`` and
      ``.min``. A kernel reduces the updates of each row; the result is then joined with the row. Also ``.set``, which
      runs :func:`write_rows`: of several updates of a row, the last one is written.
    - `slice_updates`: ``jax.lax.dynamic_update_slice`` and the functions that call it, ``..._in_dim`` and
      ``dynamic_update_index_in_dim``, for example to write caches in loops. They run :func:`write_slice`. Under
      ``jax.vmap``, it writes the windows of a whole batch at once.

    On GPUs, reductions of 32 and 64 bits are left to XLA if the rules of the op say that XLA is faster when it fuses
    the computation of the rows: mostly sums of wide rows, and small calls.

    Forward and reverse mode apply, as to :mod:`jax_baracuda.forward_mode`. The context applies to code traced inside:
    ``jax.jit`` keeps one trace for each context, so programs that were traced outside are traced again inside, and vice
    versa. The context applies to the thread that enters it. An inner context overrides an outer one and an installed
    setting. As in other contexts of JAX, code that the thread runs at a ``yield`` or ``await`` is inside. Contexts can
    be left in any order. JAX's functions are replaced while a context needs it, and then restored.

    Args:
      segments: whether calls of ``jax.ops`` are redirected.
      gather_gradients: whether gradients of gathers are.
      indexed_updates: whether indexed updates are.
      slice_updates: whether updates of slices are.

    Returns:
      The context manager. Entering it returns its :class:`RedirectReport`, also available as its attribute `report`.

    Raises:
      NotImplementedError: such calls cannot be redirected in this version of JAX. Raised on entering.
      TypeError: the decorated function is a generator or coroutine function, asynchronous or not. Its body would run
        after the call.
      RuntimeError: the context is left more often than it was entered in the thread.

    Wrong arguments raise JAX's own errors: calls that our functions do not serve are left to JAX before our functions
    run.

    Numerical guarantees: as for the functions of this package. Sums of 16 bits are added in float32.

    Example:
      >>> import jax, jax.numpy as jnp, jax_baracuda as jb
      >>> def mean_of_two(data, ids):
      ...     return jax.ops.segment_sum(data, ids, num_segments=2) / 2
      >>> with jb.redirect() as report:
      ...     print(mean_of_two(jnp.array([1.0, 2.0, 3.0]), jnp.array([0, 1, 1])))
      [0.5 2.5]
      >>> print(report)
      1 x jax.ops.segment_sum: redirected
    """

    def __init__(
        self,
        *,
        segments: bool = True,
        gather_gradients: bool = True,
        indexed_updates: bool = False,
        slice_updates: bool = False,
    ) -> None:
        kinds = {
            "segments": segments,
            "gather_gradients": gather_gradients,
            "indexed_updates": indexed_updates,
            "slice_updates": slice_updates,
        }
        self._kinds = frozenset(name for name, is_redirected in kinds.items() if is_redirected)
        super().__init__(REDIRECTION, self._kinds)
        self.report = RedirectReport()

    def __enter__(self) -> RedirectReport:
        _use_places(self._kinds)
        super().__enter__()
        return self.report

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _release_places(self._kinds)

    def __call__(self, function: _Function) -> _Function:
        tests = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
        if any(test(f) for test in tests for f in (function, type(function).__call__)):
            raise TypeError(
                f"redirect: function must be no generator or coroutine function, whose body runs after the call, got "
                f"{function!r}; enter the context inside it"
            )
        return super().__call__(function)

    def install(self) -> RedirectReport:
        """Redirects these calls in the whole process, in every thread, until :meth:`uninstall`.

        Clears JAX's caches, because existing traces were made without it.
        """
        _use_places(self._kinds)
        _redirect_process(self)
        return self.report

    @staticmethod
    def uninstall() -> None:
        """Undoes :meth:`install`, and clears JAX's caches again."""
        _redirect_process(None)


def _redirect_process(new: redirect | None) -> None:
    with _lock:
        old = process_scope()
        set_process_scope(new)
    if isinstance(old, redirect):
        _release_places(old._kinds)
