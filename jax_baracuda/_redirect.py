"""Programs that call JAX's own functions run on ours, unchanged."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_baracuda import forward_mode
from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import FLOATING_DTYPES, INTEGER_DTYPES, reshard_like
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.dispatch import Site, decide
from jax_baracuda._core.redirection import (
    NOTHING,
    Redirection,
    current_redirection,
    not_redirected,
    redirect_process,
    redirecting,
)
from jax_baracuda._core.selection import current_selection
from jax_baracuda.ops.segment.definitions import ORDERED_DTYPES
from jax_baracuda.ops.segment.sum import SEGMENT_SUM
from jax_baracuda.ops.segment.take_rows import sum_taken_rows
from jax_baracuda.ops.write_slice import MAX_AXES, WRITE_SLICE

_Function = TypeVar("_Function", bound=Callable[..., Any])

_NUMBERS = FLOATING_DTYPES | INTEGER_DTYPES
_DTYPES = {
    "segment_sum": _NUMBERS,
    "segment_prod": _NUMBERS,
    "segment_max": ORDERED_DTYPES,
    "segment_min": ORDERED_DTYPES,
}
_UPDATES: dict[str, tuple[str, Callable[[Array, Array], Array]]] = {
    "scatter_add": ("segment_sum", jnp.add),
    "scatter_mul": ("segment_prod", jnp.multiply),
    "scatter_max": ("segment_max", jnp.maximum),
    "scatter_min": ("segment_min", jnp.minimum),
}
"""By the name of JAX's scatter: the reduction of the updates of each row, and how it is joined with the row."""


_FEW_SEGMENTS = 64
_MANY_ROWS_OF_A_SEGMENT = 2048
"""On GPUs, XLA adds rows of 32 and 64 bits to segments as it computes them, by atomics of the processor; a kernel reads
them from memory, where they must be written first. What is left to XLA was faster there in whole programs (H200):
unsorted rows of more segments than these few, sorted ones unless segments have so many rows on average."""
_MAX_SMALL, _MAX_SMALL_NARROW, _MAX_NARROW = 1 << 22, 10_000_000, 32
"""Likewise, with the gradients of both: maxima of so many elements, and of so many where a row has that few."""


class RedirectReport:
    """What was redirected, and what was not, while programs were traced or run without ``jax.jit``.

    A call in a compiled program counts once for every trace. Printed, it is a list.

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
# The calls. Each function has the signature of JAX's internal function in whose place it is.


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
    **out_sharding: Any,
) -> Array:
    if name not in _DTYPES:
        raise _Unserved("there is no such function")
    dtype = jnp.result_type(data)
    if dtype.name not in _DTYPES[name]:
        raise _Unserved(f"there is no kernel for dtype {dtype}")
    if num_segments is not None and _xla_may_be_faster(dtype, num_segments):
        if name == "segment_sum":
            _require_long_sums(dtype, np.size(segment_ids), num_segments, indices_are_sorted)
        elif name in ("segment_max", "segment_min"):
            _require_many_rows(dtype, np.size(data), np.size(segment_ids))
    options = {"bucket_size": bucket_size, "mode": mode, **out_sharding}
    return getattr(forward_mode, name)(data, segment_ids, num_segments, indices_are_sorted, unique_indices, **options)


def _xla_may_be_faster(dtype: jnp.dtype, num_segments: int) -> bool:
    return dtype.itemsize >= 4 and num_segments > _FEW_SEGMENTS and jax.default_backend() == "gpu"


def _require_long_sums(dtype: jnp.dtype, num_rows: int, num_segments: int, indices_are_sorted: bool) -> None:
    if not indices_are_sorted or num_rows < _MANY_ROWS_OF_A_SEGMENT * num_segments:
        raise _Unserved(f"on GPUs XLA adds {dtype} as it computes the rows")


def _require_many_rows(dtype: jnp.dtype, num_elements: int, num_rows: int) -> None:
    limit = _MAX_SMALL_NARROW if num_elements <= _MAX_NARROW * num_rows else _MAX_SMALL
    if num_elements <= limit and not isinstance(current_selection(), str):
        raise _Unserved(f"on GPUs XLA takes {num_elements:,} elements of {dtype} as it computes them, which is faster")


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
    name, join = _UPDATES[scatter_op.__name__]
    [ids] = idx if isinstance(idx, tuple) and len(idx) == 1 else (idx,)
    if not hasattr(ids, "dtype") or not jnp.issubdtype(ids.dtype, jnp.signedinteger) or ids.ndim != 1:
        raise _Unserved("the index is not one vector of signed integers")
    x, y = jnp.asarray(x), jnp.asarray(y)
    if jnp.result_type(x, y) != x.dtype:
        raise _Unserved(f"updates of dtype {y.dtype} of an array of dtype {x.dtype}")
    if x.dtype.name not in _DTYPES[name]:
        raise _Unserved(f"there is no kernel for dtype {x.dtype}")
    if name in ("segment_max", "segment_min") and jnp.issubdtype(x.dtype, jnp.floating):
        raise _Unserved("in the gradient of JAX, a row and the updates that are equal to it have equal shares")
    if x.ndim == 0 or out_sharding is not None:
        raise _Unserved("the array is a scalar" if x.ndim == 0 else "an out_sharding is asked for")
    num_rows = x.shape[0]
    if num_rows > jnp.iinfo(ids.dtype).max:
        raise _Unserved(f"ids of dtype {ids.dtype} for {num_rows} rows")
    if name == "segment_sum" and _xla_may_be_faster(x.dtype, num_rows):
        _require_long_sums(x.dtype, ids.size, num_rows, indices_are_sorted)
    if normalize_indices:
        ids = jnp.where(ids < 0, ids + ids.dtype.type(num_rows), ids)  # it is these that are promised to be sorted
    rows = jnp.broadcast_to(y.astype(x.dtype), (*ids.shape, *x.shape[1:]))
    return join(x, getattr(forward_mode, name)(rows, ids, num_rows, indices_are_sorted, mode=mode))


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
    if not takes_rows:
        raise _Unserved("it takes other parts than rows by an array of ids")
    if cotangent.dtype.name not in FLOATING_DTYPES:
        raise _Unserved(f"there is no kernel for dtype {cotangent.dtype}")
    if indices.dtype.name not in ("int32", "int64"):
        raise _Unserved(f"ids of dtype {indices.dtype}")
    ids = jax.lax.squeeze(indices, (indices.ndim - 1,))
    num_rows = operand.shape[0]
    if mode == jax.lax.GatherScatterMode.CLIP:
        ids = jnp.clip(ids, 0, num_rows - 1)
    cotangent, ids = jax_versions.unify_varying(cotangent, ids)
    is_sorted = indices_are_sorted and ids.ndim == 1
    _require_kernel_of_computed_rows(cotangent, ids, num_rows, is_sorted)
    d_data = sum_taken_rows(cotangent, ids, num_rows=num_rows, indices_are_sorted=is_sorted, deterministic=False)
    return reshard_like(d_data, operand)


def _require_kernel_of_computed_rows(cotangent: Array, ids: Array, num_rows: int, is_sorted: bool) -> None:
    """Refuses what the table leaves to XLA where it computes the rows on the way, as it mostly can with cotangents.

    The lowering cannot see what makes them where the gradient of a gather is in an inner ``jit``. Sums of 16-bit
    numbers in plain JAX are no alternative: they are rounded after each term.
    """
    if jax.default_backend() != "gpu" or cotangent.dtype.itemsize < 4:
        return
    rows = jax.ShapeDtypeStruct((ids.size, *cotangent.shape[ids.ndim :]), cotangent.dtype)
    params = {"num_segments": num_rows, "indices_are_sorted": is_sorted, "deterministic": False}
    params["implementation"] = current_selection()
    call = OpCall(SEGMENT_SUM, (rows, jax.ShapeDtypeStruct((ids.size,), ids.dtype)), params)
    decision = decide(call, Site("cuda", fuses=True))
    if decision.implementation == "xla":
        raise _Unserved(decision.reason)


def _slice_update(operand: Any, update: Any, start_indices: Any, *, allow_negative_indices: Any = True) -> Array:
    own = functools.partial(jax.lax.dynamic_update_slice, allow_negative_indices=allow_negative_indices)
    result = jax.eval_shape(lambda: own(operand, update, start_indices))  # JAX refuses what it does not take
    if result.dtype.name not in WRITE_SLICE.dtypes:
        raise _Unserved(f"there is no kernel for dtype {result.dtype}")
    if result.ndim > MAX_AXES or not jax_versions.is_static_shape(result.shape):
        raise _Unserved(f"the array has more than {MAX_AXES} axes" if result.ndim > MAX_AXES else "shapes are symbolic")
    if result.weak_type:
        raise _Unserved("the result is weakly typed")
    may_be_negative = np.broadcast_to(allow_negative_indices, result.ndim)
    starts = [
        _start(start, size, counts_from_end)
        for start, size, counts_from_end in zip(start_indices, result.shape, may_be_negative, strict=True)
    ]
    return forward_mode.write_slice(operand, update, starts)


def _start(start: Any, size: int, counts_from_end: bool) -> Any:
    """A start index as :func:`write_slice` takes it, of which a negative one counts from the end."""
    dtype = jax.dtypes.canonicalize_dtype(getattr(start, "dtype", int))
    is_known = isinstance(start, int | np.integer)
    if max(size, abs(int(start)) if is_known else 0) > jnp.iinfo(dtype).max:
        raise _Unserved(f"a start index {f'of {start} ' if is_known else ''}of dtype {dtype} for {size} elements")
    if is_known or counts_from_end or jnp.issubdtype(dtype, jnp.unsignedinteger):
        return start
    return jnp.maximum(start, 0)


def _or_else(
    name: str, own: Callable[..., Array] | None, function: Callable[..., Array], *args: Any, **kwargs: Any
) -> Array | None:
    """The call by our function, or JAX's own where that does not serve it; None where that is None."""
    try:
        with not_redirected():
            result = function(*args, **kwargs)
    except _Unserved as reason:
        _count(lambda report: report.kept, (name, str(reason)))
    except (TypeError, ValueError, IndexError, NotImplementedError) as error:  # of JAX's own, in its words, if it fails
        _count(lambda report: report.kept, (name, str(error)))
    else:
        _count(lambda report: report.redirected, name)
        return result
    if own is None:
        return None
    with not_redirected():  # JAX's functions call each other
        return own(*args, **kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# The places in JAX: what stands there asks for each call whether it is to be redirected.


def _wrap_segment_update(own: Callable[..., Array]) -> Callable[..., Array | None]:
    @functools.wraps(own)
    def segment_update(name: str, *args: Any, **kwargs: Any) -> Array | None:
        if not current_redirection().segments:
            return own(name, *args, **kwargs)
        return _or_else(f"jax.ops.{name}", own, _segment_update, name, *args, **kwargs)

    return segment_update


def _wrap_scatter_update(own: Callable[..., Array]) -> Callable[..., Array | None]:
    @functools.wraps(own)
    def scatter_update(x: Any, idx: Any, y: Any, scatter_op: Any, *args: Any, **kwargs: Any) -> Array | None:
        scatter_name = getattr(scatter_op, "__name__", "")
        if not current_redirection().indexed_updates or scatter_name not in _UPDATES:
            return own(x, idx, y, scatter_op, *args, **kwargs)
        name = {"scatter_mul": "multiply"}.get(scatter_name, scatter_name.removeprefix("scatter_"))
        return _or_else(f"x.at[ids].{name}", own, _scatter_update, x, idx, y, scatter_op, *args, **kwargs)

    return scatter_update


def _wrap_slice_update(own: Callable[..., Array]) -> Callable[..., Array | None]:
    def slice_update(*args: Any, **kwargs: Any) -> Array | None:
        if not current_redirection().slice_updates:
            return own(*args, **kwargs)
        return _or_else("jax.lax.dynamic_update_slice", own, _slice_update, *args, **kwargs)

    return slice_update


def _transpose_of_gather(*args: Any, **params: Any) -> Array | None:
    if not current_redirection().gather_gradients:
        return None
    return _or_else("gradient of a gather", None, _sum_taken, *args, **params)


def _redirect_slice_updates() -> None:
    jax_versions.wrap_lowering(not_redirected)  # there, scan writes slices of its stacked results
    jax_versions.wrap_slice_update(_wrap_slice_update)


_PLACES: dict[str, Callable[[], None]] = {
    "segments": functools.partial(jax_versions.wrap_segment_update, _wrap_segment_update),
    "indexed_updates": functools.partial(jax_versions.wrap_scatter_update, _wrap_scatter_update),
    "gather_gradients": functools.partial(jax_versions.wrap_transpose_of_gather, _transpose_of_gather),
    "slice_updates": _redirect_slice_updates,
}
_wrapped: set[str] = set()
_lock = threading.Lock()


def _wrap(redirection: Redirection) -> None:
    """Once in a process: what is wrapped passes calls on to JAX wherever nothing is redirected."""
    with _lock:
        for name, wrap in _PLACES.items():
            if getattr(redirection, name) and name not in _wrapped:
                try:
                    wrap()
                except (ImportError, AttributeError, KeyError) as error:
                    raise NotImplementedError(
                        f"redirect: {name} cannot be redirected in jax {jax.__version__}, where they are not done at "
                        f"the place that this version of jax_baracuda knows: {error}"
                    ) from error
                _wrapped.add(name)


# ----------------------------------------------------------------------------------------------------------------------
# The contexts of this thread, whose reports count, and the report of the process.


class _Entered(threading.local):
    def __init__(self) -> None:
        self.contexts: list[tuple[redirect, contextlib.AbstractContextManager[Any]]] = []


_entered = _Entered()
_report_of_process: RedirectReport | None = None


def _count(counter: Callable[[RedirectReport], collections.Counter[Any]], key: Any) -> None:
    reports: list[RedirectReport | None] = [owner.report for owner, _ in _entered.contexts]
    reports = reports or [_report_of_process]
    for report in {id(x): x for x in reports if x is not None}.values():
        with _lock:
            counter(report)[key] += 1


class redirect(contextlib.ContextDecorator):  # noqa: N801 (used as a function)
    """Calls of JAX's own functions run on the functions of this package, in code that stays as it is.

    A context manager, a decorator, and with :meth:`install` a setting of the process. Inside, these calls are
    redirected wherever our functions serve them; JAX keeps the others:

    - `segments`: ``jax.ops.segment_sum``, ``segment_max``, ``segment_min`` and ``segment_prod``, however they were
      imported.
    - `gather_gradients`: the gradient of rows that an array of ids gathers, as in ``x[ids]`` or
      ``jnp.take(x, ids, axis=0)``: the kernel of :func:`segment_sum`. The gather itself stays XLA's.
    - `indexed_updates`: ``x.at[ids].add`` and ``.multiply`` of rows by a vector of ids, for integers also ``.max`` and
      ``.min``: the updates of each row are reduced by a kernel and joined with it.
    - `slice_updates`: ``jax.lax.dynamic_update_slice`` and the functions that call it, ``..._in_dim`` and
      ``dynamic_update_index_in_dim``, as caches in loops do: :func:`write_slice`, which under ``jax.vmap`` writes the
      windows of a whole batch at once.

    On GPUs, sums of 32 and 64 bits over more than 64 segments are left to XLA, which adds rows as it computes them,
    unless they are sorted and have 2048 rows a segment on average: in whole programs that was faster.

    Forward and reverse mode apply, as to :mod:`jax_baracuda.forward_mode`. What counts is where code is traced:
    ``jax.jit`` keeps one trace for each context, so that programs that were traced outside are traced again inside, and
    the other way round. The context belongs to the thread that enters it; an inner context goes before an outer one and
    before what is installed. As in other contexts of JAX, what the thread runs at a ``yield`` or ``await`` is inside.

    Args:
      segments: whether calls of ``jax.ops`` are redirected.
      gather_gradients: whether gradients of gathers are.
      indexed_updates: whether indexed updates are.
      slice_updates: whether updates of slices are.

    Returns:
      The context manager. Entered, it gives its :class:`RedirectReport`, which is also its attribute `report`.

    Raises:
      NotImplementedError: the version of JAX has no place where such calls can be redirected.
      TypeError: a generator or a coroutine function is decorated: its body runs after the call.

    Numerical guarantees: of the functions of this package. Sums of 16 bits are added in float32.

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
        self._redirection = Redirection(
            bool(segments), bool(gather_gradients), bool(indexed_updates), bool(slice_updates)
        )
        self.report = RedirectReport()
        _wrap(self._redirection)

    def __enter__(self) -> RedirectReport:
        context = redirecting(self._redirection)
        context.__enter__()
        _entered.contexts.append((self, context))
        return self.report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Tasks and generators may leave theirs in any order: what was entered later is left, too, and entered again.
        later: list[redirect] = []
        owner = None
        while owner is not self:
            owner, context = _entered.contexts.pop()
            context.__exit__(None, None, None)
            later.append(owner)
        for owner in reversed(later[:-1]):
            owner.__enter__()

    def __call__(self, function: _Function) -> _Function:
        if any(test(function) for test in (inspect.isgeneratorfunction, inspect.iscoroutinefunction)):
            raise TypeError(
                f"redirect: function must be no generator or coroutine function, whose body runs after the call, got "
                f"{function!r}; enter the context inside it"
            )
        return super().__call__(function)

    def install(self) -> RedirectReport:
        """Redirects these calls in the whole process, in every thread, until :meth:`uninstall`.

        JAX's caches are cleared, because traces that are there were made without it.
        """
        global _report_of_process
        _report_of_process = self.report
        redirect_process(self._redirection)
        return self.report

    @staticmethod
    def uninstall() -> None:
        """Ends what :meth:`install` began; JAX's caches are cleared again."""
        global _report_of_process
        _report_of_process = None
        redirect_process(NOTHING)
