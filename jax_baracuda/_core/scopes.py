"""Values that contexts set for one thread. JAX's cache keys include them."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import Any, Generic, TypeVar

import jax

T = TypeVar("T")


class ScopedValue(Generic[T]):
    """A value of this thread, set by the :class:`Scope` entered last. JAX keeps one trace for each value."""

    def __init__(self, function: str, default: T) -> None:
        """
        Args:
          function: the public function whose contexts set the value; errors name it.
          default: the value outside of all contexts.
        """
        self.function = function
        self._of_jax = jax.make_user_context(default)
        self._thread = _Thread()

    @property
    def value(self) -> T:
        """The value in this thread."""
        value: T = self._of_jax.value
        return value

    @property
    def entered(self) -> list[Scope[T]]:
        """The contexts that this thread has entered and not left, in the order of entering."""
        return self._thread.entered

    def update(self) -> None:
        """Tells JAX the value, after `entered` has changed.

        JAX's contexts restore the previous value, so they must be left in reverse order. To allow any order, only the
        last scope's context is entered.
        """
        if self._thread.of_jax is not None:
            self._thread.of_jax.__exit__(None, None, None)
            self._thread.of_jax = None
        if self.entered:
            self._thread.of_jax = self._of_jax(self.entered[-1].scoped)
            self._thread.of_jax.__enter__()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entered: list[Scope[Any]] = []
        self.of_jax: contextlib.AbstractContextManager[Any] | None = None


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered = self._variable.entered
        if not any(scope is self for scope in entered):
            raise RuntimeError(
                f"{self._variable.function}: the context is left in a thread that is not in it: it was left before, or "
                "entered in another thread; leave it once for each time it is entered, in the same thread"
            )
        del entered[max(i for i, scope in enumerate(entered) if scope is self)]
        self._variable.update()
