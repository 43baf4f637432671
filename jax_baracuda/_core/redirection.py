"""Which calls of JAX are redirected. JAX's cache keys include it, so JAX keeps one trace for each value."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax

from jax_baracuda._core.scopes import Scope, ScopedValue


@dataclasses.dataclass(frozen=True)
class Redirection:
    """The kinds of calls that are redirected."""

    segments: bool = False
    gather_gradients: bool = False
    indexed_updates: bool = False
    slice_updates: bool = False


NOTHING = Redirection()

REDIRECTION: ScopedValue[Redirection | None] = ScopedValue("redirect", None)
"""What the context redirects; None outside of contexts."""

_of_process = NOTHING


def current_redirection() -> Redirection:
    """What is redirected in this thread: by its context, else by the process."""
    of_context = REDIRECTION.value
    return _of_process if of_context is None else of_context


def not_redirected() -> contextlib.AbstractContextManager[Any]:
    """Context in which nothing is redirected in this thread."""
    return contextlib.nullcontext() if current_redirection() == NOTHING else Scope(REDIRECTION, NOTHING)


def redirect_process(redirection: Redirection) -> None:
    """Redirects these calls in all threads, outside of contexts. Functions are traced again."""
    global _of_process
    _of_process = redirection
    jax.clear_caches()
