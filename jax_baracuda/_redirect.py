"""Redirects calls of JAX's functions to this package's, in unchanged programs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
from jax import Array

from jax_baracuda import _indexed
from jax_baracuda._core import jax_versions, lowering
from jax_baracuda._core.arrays import flag
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.dispatch import Decision
from jax_baracuda._core.jax_versions import Patch
from jax_baracuda._core.selection import (
    REDIRECTION,
    SCOPE_NAME,
    Kinds,
    Scope,
    in_named_scope,
    not_redirected,
    process_scope,
    redirected,
    set_process_scope,
)
from jax_baracuda._indexed import Unserved
from jax_baracuda._segments import DTYPES_OF_FUNCTIONS, segment_update

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OF_SEGMENTS = tuple(f"jax.ops.segment_{name}" for name in ("sum", "prod", "max", "min"))
_EXTREMA = ("jax.ops.segment_max", "jax.ops.segment_min")
_OF_GATHER = "gradient of a gather"
_OF_SLICE = "jax.lax.dynamic_update_slice"
_MARKED = "marked slice updates"
"""What is redirected in the place of "slice_updates" while a program is lowered."""
_KIND_OF_NAME = {
    **dict.fromkeys(_OF_SEGMENTS, "segments"),
    _OF_GATHER: "gather_gradients",
    _OF_SLICE: _MARKED,
}
"""The kinds of calls by their names, which are also their name scopes in programs. Scatters in none of these scopes are
indexed updates."""
_UPDATES = {
    "scatter-add": "x.at[ids].add",
    "scatter-sub": "x.at[ids].subtract",
    "scatter-mul": "x.at[ids].multiply",
    "scatter-max": "x.at[ids].max",
    "scatter-min": "x.at[ids].min",
    "scatter": "x.at[ids].set",
}
_LINE_WIDTH = 80
_NO_CALLS = "no calls that can be redirected (programs compiled before do not count)"


class RedirectReport:
    """Counts the calls that were redirected: what runs for each, a kernel or plain JAX, and why.

    A call counts when it is lowered, that is, once in each program that is compiled. Printing the report lists the
    counts in lines of at most 80 characters; :meth:`with_lines` adds where the calls stand.

    Attributes:
      calls: the number of calls by function, such as ``"jax.ops.segment_sum"``, by what runs, ``"kernel"`` or
        ``"xla"``, and by the reason.
      lines: the number of calls by the line of the program, such as ``"layers.py:12"``, for each key of `calls`. Files
        are relative to the entry of ``sys.path`` that they are in. A gradient has the line of what it is of.
    """

    def __init__(self) -> None:
        self.calls: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.lines: dict[tuple[str, str, str], collections.Counter[str]] = {}

    @property
    def redirected(self) -> collections.Counter[str]:
        """The number of calls by function for which a kernel runs."""
        return collections.Counter(name for name, runs, _ in self.calls.elements() if runs == "kernel")

    @property
    def kept(self) -> collections.Counter[tuple[str, str]]:
        """The number of calls by function and reason for which plain JAX runs."""
        return collections.Counter((name, reason) for name, runs, reason in self.calls.elements() if runs != "kernel")

    def __str__(self) -> str:
        return "\n".join(self._text_of(key) for key in sorted(self.calls)) or _NO_CALLS

    def with_lines(self) -> str:
        """The report, with the lines of the program that make the calls, and how many each makes if it makes several.

        Such as::

          3 x jax.ops.segment_sum: a kernel, expected to be faster
              layers.py:12 (2), train.py:40
        """
        texts = []
        for key in sorted(self.calls):
            texts.append(self._text_of(key))
            lines = sorted(self.lines.get(key, {}).items(), key=lambda item: _in_order_of_lines(item[0]))
            if places := ", ".join(line if count == 1 else f"{line} ({count})" for line, count in lines):
                texts.append(_wrapped("    " + places))
        return "\n".join(texts) or _NO_CALLS

    def _text_of(self, key: tuple[str, str, str]) -> str:
        name, implementation, reason = key
        ran = {"kernel": "a kernel", "xla": "plain JAX"}
        return _wrapped(f"{self.calls[key]} x {name}: {ran[implementation]}, {reason}")


def _in_order_of_lines(line: str) -> tuple[str, int]:
    file, _, number = line.rpartition(":")
    return file, int(number)


def _wrapped(line: str) -> str:
    return textwrap.fill(line, _LINE_WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


# ----------------------------------------------------------------------------------------------------------------------
# The places in JAX that are replaced. Each replacement checks whether to redirect a call.


def _wrap_segments(own: Callable[..., Array]) -> Callable[..., Array]:
    """Replaces the function that all ``jax.ops.segment_*`` call.

    JAX scatters the rows, and the lowering of the scatter is redirected. Maxima, minima and products are redirected
    here, because their gradients have kernels.
    """

    @functools.wraps(own)
    def replacement(name: str, *args: Any, **kwargs: Any) -> Array:
        if not redirected():
            return own(name, *args, **kwargs)
        with in_named_scope(f"jax.ops.{name}"):
            if name in DTYPES_OF_FUNCTIONS and "segments" in redirected():
                with contextlib.suppress(Unserved), not_redirected():  # JAX's functions call each other
                    return segment_update(name, *args, **kwargs)
            return own(name, *args, **kwargs)

    return replacement


def _wrap_slice_update(own: Callable[..., Array]) -> Callable[..., Array]:
    """Marks the updates of the program. Those that JAX writes itself while it lowers a program have no mark."""

    @functools.wraps(own)
    def replacement(*args: Any, **kwargs: Any) -> Array:
        with in_named_scope(_OF_SLICE) if "slice_updates" in redirected() else contextlib.nullcontext():
            return own(*args, **kwargs)

    return replacement


def _while_lowering() -> contextlib.AbstractContextManager[Any]:
    """Context in which slice updates with a mark are redirected, and no more are marked."""
    kinds = redirected()
    return Scope(REDIRECTION, kinds - {"slice_updates"} | {_MARKED} if "slice_updates" in kinds else kinds)


def _scope_of(ctx: Any, is_backward: bool = False, adds: bool = False) -> tuple[str, str] | None:
    """The redirected call in whose scope an operation stands: its name in reports, and its kind.

    Args:
      is_backward: whether the operation is the gradient of another. In loops and functions, its scope does not tell.
      adds: whether it is a scatter that adds. In the scope of an extremum only JAX's derivative has one, to count ties.
    """
    scopes = f"{SCOPE_NAME.value or ''}/{ctx.name_stack}"
    name = max(_KIND_OF_NAME, key=scopes.rfind)
    if name not in scopes:
        return None
    is_derivative = is_backward or "transpose(" in scopes or (adds and name in _EXTREMA)
    is_gradient = is_derivative and name != _OF_GATHER
    return f"gradient of {name}" if is_gradient else name, _KIND_OF_NAME[name]


def _wrap_lowering(primitive: str, own: Callable[..., Any]) -> Callable[..., Any]:
    is_update = primitive in _UPDATES

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        if not (kinds := redirected()):
            return own(ctx, *operands, **params)
        scope = _scope_of(ctx, adds=primitive == _indexed.ADDITION)
        name, kind = scope or (_UPDATES.get(primitive, ""), "indexed_updates")
        if kind not in kinds or not (is_update or kind == _MARKED):
            return own(ctx, *operands, **params)
        serve = functools.partial(_indexed.scatter, primitive) if is_update else _indexed.slice_update
        try:
            decision, result = serve(ctx, *operands, **params)
        except Unserved as reason:
            decision, result = Decision("xla", str(reason)), None
        _count(name, decision, ctx)
        return own(ctx, *operands, **params) if result is None else [result]

    return lower


def _count_op(call: OpCall, decision: Decision, ctx: Any) -> OpCall:
    """Counts and marks a call of an op that stands in the place of JAX's function."""
    # Outside of ``jax.jit``, JAX lowers within the call, which is not redirected again.
    if not (redirected() or SCOPE_NAME.value):
        return call
    scope = _scope_of(ctx, is_backward=call.op.name.endswith("_backward"))
    if scope is None:
        return call
    _count(scope[0], decision, ctx)
    return dataclasses.replace(call, all_params={**call.all_params, "is_redirected": True})


lowering.listeners.append(_count_op)


_SCATTERS, _SLICES = "scatters", "slice updates"
_PLACES: dict[str, Callable[[], list[Patch]]] = {
    _SCATTERS: lambda: [
        jax_versions.patch_of_segment_functions(_wrap_segments),
        jax_versions.patch_of_transposed_gathers(lambda: in_named_scope(_OF_GATHER)),
        *jax_versions.patches_of_lowering(_indexed.SCATTERS, _wrap_lowering),
        jax_versions.patch_of_lowering_by_platform(),
    ],
    _SLICES: lambda: [
        # JAX traces slice updates of its own during lowering: scan writes its stacked results.
        jax_versions.patch_of_lowering_inside(_while_lowering),
        jax_versions.patch_of_slice_update(_wrap_slice_update),
        *jax_versions.patches_of_lowering([jax.lax.dynamic_update_slice_p], _wrap_lowering),
    ],
}
_uses: collections.Counter[str] = collections.Counter()
"""The number of contexts that redirect at each place, plus 1 for the process. If positive, the place is replaced."""
_patches: dict[str, list[Patch]] = {}
"""Those made so far, to be applied again."""
_lock = threading.RLock()  # reentrant: a collected generator may leave its context at any time


def _use(places: Collection[str]) -> None:
    with _lock:
        for name in places:
            if not _uses[name] and not (name in _patches and all(patch.is_current() for patch in _patches[name])):
                _patches[name] = _patches_of(name)
        for name in places:
            _uses[name] += 1
            if _uses[name] == 1:
                for patch in _patches[name]:
                    patch.apply()


def _patches_of(name: str) -> list[Patch]:
    try:
        return _PLACES[name]()
    except (ImportError, AttributeError, KeyError) as error:
        raise NotImplementedError(
            f"redirect: {name} cannot be redirected in jax {jax.__version__}, where they are not done at the place "
            f"that this version of jax_baracuda knows: {error}"
        ) from error


def _release(places: Collection[str]) -> None:
    with _lock:
        for name in places:
            _uses[name] -= 1
            if _uses[name] == 0:
                for patch in _patches[name]:
                    patch.undo()


# ----------------------------------------------------------------------------------------------------------------------
# The reports that count a call: those of the contexts of this thread or, if there are none, of the process.


def _count(name: str, decision: Decision, ctx: Any) -> None:
    key = name, decision.implementation, decision.reason
    line = _line_of(ctx)
    scopes: list[Any] = [scope for scope in REDIRECTION.entered if isinstance(scope, redirect)] or [process_scope()]
    for report in {id(scope): scope.report for scope in scopes if scope is not None}.values():
        with _lock:
            report.lines.setdefault(key, collections.Counter()).update([line] if line else [])
            report.calls[key] += 1


def _line_of(ctx: Any) -> str:
    """Where an operation stands in the program, such as ``"layers.py:12"``; empty if JAX does not know."""
    place = jax_versions.line_of(ctx)
    if place is None:
        return ""
    file, line = place
    return f"{_name_of(file)}:{line}"


@functools.lru_cache(maxsize=1024)
def _name_of(file: str) -> str:
    """The path of a file, relative to the entry of ``sys.path`` that it is in."""
    folders = [os.path.join(entry, "") for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]
    return file.removeprefix(max((folder for folder in folders if file.startswith(folder)), key=len, default=""))


def _taking_keywords_alone(init: Callable[..., None]) -> Callable[..., None]:
    """Refuses positional arguments with advice for those who write ``redirect(f)`` or a bare ``@redirect``."""

    @functools.wraps(init)
    def checked_init(self: Any, *unnamed: Any, **kinds: Any) -> None:
        if unnamed:
            raise TypeError(
                f"redirect: arguments must be given by name, such as segments=True, got {unnamed[0]!r}; to apply it to "
                "a function, write redirect()(f), or @redirect() with parentheses"
            )
        init(self, **kinds)

    return checked_init


class redirect(contextlib.ContextDecorator, Scope[Kinds | None]):  # noqa: N801 (used as a function)
    """Redirects calls of JAX's functions to the functions of this package, in unchanged code.

    A context manager, a decorator and, with :meth:`install`, a setting of the process. These calls are redirected:

    - `segments`: ``jax.ops.segment_sum``, ``segment_max``, ``segment_min`` and ``segment_prod``, however they were
      imported.
    - `gather_gradients`: the gradient of gathering by arrays of ids, as in ``x[ids]``, ``x[..., ids]``, ``x[i, j]`` or
      ``jnp.take(x, ids, axis=0)``. It runs the kernel of :func:`segment_sum`. The gather itself stays XLA's.
    - `indexed_updates`: ``x.at[ids].add``, ``.subtract``, ``.multiply``, ``.max`` and ``.min``, also by several arrays
      of ids or along other axes. A kernel reduces the updates of each row; the result is then joined with the row. Also
      ``.set``, which runs the kernel of :func:`write_rows`: of several updates of a row, the last one is written.
    - `slice_updates`: ``jax.lax.dynamic_update_slice`` and the functions that call it, ``..._in_dim`` and
      ``dynamic_update_index_in_dim``, for example to write caches in loops. On CPUs, where a loop carries a large
      array, a barrier keeps XLA from copying it in each step, or before jax 0.11 the kernel of
      :func:`write_slice`. Under ``jax.vmap``, they stay JAX's.

    For each call, a kernel or plain JAX is picked when the program is lowered, by the rules of the op. Calls that no
    kernel serves run as plain JAX. The report says what runs for each call, and why. Where plain JAX is picked for a
    gather or an update, the program is the same as without the context, except for what XLA is slow at. On GPUs, rows
    such as ``[F, 3]`` are flattened before they are added, outside ``vmap``, and a barrier keeps XLA from fusing a
    negation into a sum; programs that are split over devices have neither. On CPUs, a barrier follows some updates of
    slices.

    Both modes of differentiation apply. The context applies to code traced and lowered inside: ``jax.jit`` keeps one
    trace for each context, so programs that were traced outside are traced again inside, and vice versa. The context
    applies to the thread that enters it. An inner context overrides an outer one and an installed setting. As in other
    contexts of JAX, code that the thread runs at a ``yield`` or ``await`` is inside. Contexts can be left in any order.
    JAX's functions are replaced while a context needs it, and then restored.

    Args:
      segments: whether calls of ``jax.ops`` are redirected.
      gather_gradients: whether gradients of gathers are.
      indexed_updates: whether indexed updates are.
      slice_updates: whether updates of slices are.

    Returns:
      The context manager. Entering it returns its :class:`RedirectReport`, also available as its attribute `report`.

    Raises:
      NotImplementedError: such calls cannot be redirected in this version of JAX. Raised on entering.
      TypeError: an argument is given by position, or is not True or False. Or what is decorated is not callable, or is
        a generator or coroutine function, asynchronous or not, whose body would run after the call.
      RuntimeError: the context is entered inside a function that JAX is tracing, such as one in ``jax.jit``: put it
        around the compiled function. Or it is left more often than it was entered in the thread.

    Wrong arguments raise JAX's own errors.

    Numerical guarantees: where a kernel runs, as for the functions of this package: sums of 16 bits are added in
    float32.

    Example:
      >>> import jax, jax.numpy as jnp, jax_baracuda as jb
      >>> def mean_of_two(data, ids):
      ...     return jax.ops.segment_sum(data, ids, num_segments=2) / 2
      >>> with jb.redirect() as report, jb.implementation("kernel"):
      ...     print(mean_of_two(jnp.array([1.0, 2.0, 3.0]), jnp.array([0, 1, 1])))
      [0.5 2.5]
      >>> print(report)
      1 x jax.ops.segment_sum: a kernel, asked for
    """

    @jax_versions.hiding_frames
    @_taking_keywords_alone
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
        redirected = frozenset(name for name, is_redirected in kinds.items() if flag("redirect", name, is_redirected))
        super().__init__(REDIRECTION, redirected)
        # Slice updates under ``vmap`` are scatters.
        self._places = [_SCATTERS, _SLICES] if "slice_updates" in redirected else [_SCATTERS] if redirected else []
        self.report = RedirectReport()

    @jax_versions.hiding_frames
    def __enter__(self) -> RedirectReport:
        if jax_versions.is_staging():
            raise RuntimeError(
                "redirect: the context is entered inside a function that JAX is tracing, but calls are redirected when "
                "the program is compiled, after this function has returned; put it around the compiled function, as in "
                "redirect()(jax.jit(f))"
            )
        _use(self._places)
        super().__enter__()
        return self.report

    @jax_versions.hiding_frames
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _release(self._places)

    @jax_versions.hiding_frames
    def __call__(self, function: _Function) -> _Function:
        if not callable(function):
            raise TypeError(f"redirect: function must be callable, got {function!r}")
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
        _use(self._places)
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
        _release(old._places)
