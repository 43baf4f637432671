"""Which calls of JAX the running code has redirected: part of the keys of JAX's caches, so of every trace."""

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
"""What contexts redirect; None outside of them."""

_of_process = NOTHING


def current_redirection() -> Redirection:
    """What is redirected here: by the context of this thread, or else in the whole process."""
    of_context = REDIRECTION.value
    return _of_process if of_context is None else of_context


def not_redirected() -> contextlib.AbstractContextManager[Any]:
    """Context of this thread in which JAX's functions are JAX's own."""
    return contextlib.nullcontext() if current_redirection() == NOTHING else Scope(REDIRECTION, NOTHING)


def redirect_process(redirection: Redirection) -> None:
    """Redirects these calls in all threads, outside of contexts. Programs are traced again."""
    global _of_process
    _of_process = redirection
    jax.clear_caches()
