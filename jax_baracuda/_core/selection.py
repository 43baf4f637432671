"""What the caller selects, by a context or an argument: an implementation, and calls of JAX to redirect.

JAX's cache keys include the values of contexts, so JAX keeps one trace for each. An implementation becomes a param of
the primitives, and :mod:`.dispatch` chooses by it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final, Generic, Literal, TypeVar, get_args

import jax

from jax_baracuda._core import jax_versions
from jax_baracuda._core.arrays import check_choice

T = TypeVar("T")


class ScopedValue(threading.local, Generic[T]):
    """A value set by the :class:`Scope` that this thread entered last. The attributes are each thread's own."""

    def __init__(self, function: str, context: Any) -> None:
        """
        Args:
          function: the public function whose contexts set the value; errors name it.
          context: from ``jax.make_user_context``, with the value outside of all scopes.
        """
        self.function = function
        self._context = context
        self._innermost: contextlib.AbstractContextManager[Any] | None = None
        self.entered: list[Scope[T]] = []
        """The scopes that this thread has entered and not left, in the order of entering."""

    @property
    def value(self) -> T:
        return self._context.value

    def update(self) -> None:
        """Tells JAX the value, after `entered` has changed.

        JAX's contexts restore the previous value, so they must be left in reverse order. To allow any order, only the
        last scope's context is entered.
        """
        if self._innermost is not None:
            self._innermost.__exit__(None, None, None)
        self._innermost = self._context(self.entered[-1].scoped) if self.entered else None
        if self._innermost is not None:
            self._innermost.__enter__()


class Scope(contextlib.AbstractContextManager[Any], Generic[T]):
    """Context in which a :class:`ScopedValue` has a value.

    It can be entered several times. Scopes can be left in any order, as interleaved generators and tasks do.
    """

    def __init__(self, variable: ScopedValue[T], scoped: T) -> None:
        self._variable = variable
        self.scoped = scoped
        """The value in this context."""

    def __enter__(self) -> Any:
        self._variable.entered.append(self)
        self._variable.update()

    def __exit__(self, *_: object) -> None:
        entered = self._variable.entered
        if not any(scope is self for scope in entered):
            raise RuntimeError(
                f"{self._variable.function}: the context is left in a thread that is not in it: it was left before, or "
                "entered in another thread; leave it once for each time it is entered, in the same thread"
            )
        del entered[max(i for i, scope in enumerate(entered) if scope is self)]
        self._variable.update()


# ----------------------------------------------------------------------------------------------------------------------
# The implementation.

Implementation = Literal["kernel", "xla"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

KERNEL_IF_ANY: Final = "kernel if any"
"""The kernel wherever there is one, faster or not."""

Selection = Implementation | Literal["kernel if any"] | None
"""None: the rules of the op decide."""

_of_context: ScopedValue[Selection] = ScopedValue("implementation", jax.make_user_context(None))
_of_call = threading.local()


def current_selection() -> Selection:
    """The implementation that the running call asks for."""
    selections = getattr(_of_call, "selections", None)
    return selections[-1] if selections else _of_context.value


def may_run_kernel() -> bool:
    """Whether the running call may use a kernel, which can add in the same order in every run."""
    return current_selection() != "xla"


@contextlib.contextmanager
def selecting(selection: Selection) -> Iterator[None]:
    """Ops bound in this context ask for `selection`, which overrides the user's context."""
    selections = _of_call.__dict__.setdefault("selections", [])
    selections.append(selection)
    try:
        yield
    finally:
        selections.pop()


@jax_versions.hiding_frames
def implementation(name: Implementation | None = None) -> contextlib.AbstractContextManager[Any]:
    """Context in which all functions of this package use one implementation.

    A function's argument ``implementation=`` overrides the context, and an inner context overrides an outer one. The
    context applies to the thread that enters it, and to functions that are called, that is, traced, inside. A gradient
    uses the implementation of the forward call. Contexts can be left in any order. ``jax.jit`` keeps one trace for each
    context.

    Args:
      name: "kernel": the kernels of this package, and an error if there is none for a call. "xla": plain JAX, which
        XLA can fuse with what surrounds it and give any layout. None: whichever is faster by the rules of the op.

    Returns:
      The context manager.

    Raises:
      ValueError: the name is unknown.
      RuntimeError: the context is left more often than it was entered in the thread.

    Example:
      >>> import jax, jax.numpy as jnp, jax_baracuda as jb
      >>> with jb.implementation("xla"):
      ...     program = jax.make_jaxpr(jb.rope)(jnp.ones((1, 2, 16, 8)))
      >>> print("implementation=xla" in str(program))
      True
    """
    check_choice("implementation", "implementation", name, *IMPLEMENTATIONS, None)
    return Scope(_of_context, name)


# ----------------------------------------------------------------------------------------------------------------------
# Redirection.


Kinds = frozenset[str]
"""The kinds of calls that are redirected, as the arguments of :class:`jax_baracuda.redirect` name them."""

REDIRECTION: ScopedValue[Kinds | None] = ScopedValue("redirect", jax.make_user_context(None))
"""What the context redirects; None outside of contexts."""

_process_scope: Scope[Kinds | None] | None = None


def process_scope() -> Scope[Kinds | None] | None:
    """The scope that applies to all threads outside of their contexts."""
    return _process_scope


def set_process_scope(scope: Scope[Kinds | None] | None) -> None:
    """Sets the scope, and clears JAX's caches, so that functions are traced again."""
    global _process_scope
    _process_scope = scope
    jax.clear_caches()


def redirected() -> Kinds:
    """What is redirected in this thread: by its context, else by the process."""
    if (of_context := REDIRECTION.value) is not None:
        return of_context
    return (_process_scope.scoped if _process_scope is not None else None) or frozenset()


def not_redirected() -> contextlib.AbstractContextManager[Any]:
    """Context in which nothing is redirected in this thread."""
    return Scope(REDIRECTION, frozenset()) if redirected() else contextlib.nullcontext()


SCOPE_NAME: ScopedValue[str | None] = ScopedValue("redirect", jax.make_user_context(None))
"""The name scope of the redirected call that is traced; None outside of these."""


@contextlib.contextmanager
def in_named_scope(name: str) -> Iterator[None]:
    """Context in which operations have this name scope.

    A plain ``jax.named_scope`` is lost where JAX compiles an operation or a function by itself. There, the name is the
    value of :data:`SCOPE_NAME`.
    """
    with Scope(SCOPE_NAME, name), jax.named_scope(name):
        yield
