"""A hash of what a partitioned program runs, equal in all processes that run the same code."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_baracuda._core.native import NATIVE_MODULES

_IMPORTED_AT = time.time()

_VERSIONED = ("jax", "jaxlib", "numpy")
"""Packages whose functions are identified by name: JAX's own cache keys hold its version."""


def digest(*values: Any) -> str | None:
    """A hash of the package's own code and of these values, or None if the hash could be equal for different programs.

    Values may be numbers, strings, arrays, records and functions. A function is hashed by its code, so replacing it at
    run time changes the hash.
    """
    package = _digest_of_package()
    if package is None:
        return None
    try:
        content = repr((package, _content(values, {})))
    except TypeError:
        return None
    return hashlib.sha256(content.encode()).hexdigest()


@functools.cache
def _digest_of_package() -> str | None:
    """A hash of the files that this process has loaded; None if a file has changed since."""
    folder = Path(__file__).parents[1]
    files = sorted(folder.rglob("*.py"))
    files += [Path(str(native.module.__file__)) for native in NATIVE_MODULES.values() if native.module is not None]
    content = hashlib.sha256()
    for file in files:
        if file.stat().st_mtime > _IMPORTED_AT:
            return None
        with file.open("rb") as opened:
            content.update(hashlib.file_digest(opened, "sha256").digest())
    return content.hexdigest()


def _content(value: Any, seen: dict[int, int]) -> Any:
    """A value as nested tuples of numbers and strings; `seen` numbers the functions and records that it holds.

    Raises:
      TypeError: the content of the value is unknown.
    """
    if value is None or value is ... or isinstance(value, bool | int | float | complex | str | bytes | enum.Enum):
        return value
    kind = type(value).__qualname__
    if isinstance(value, np.ndarray | np.generic):
        return kind, str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, np.dtype):
        return kind, str(value)
    if isinstance(value, tuple | list):
        return kind, tuple(_content(x, seen) for x in value)
    if isinstance(value, Mapping):
        return kind, tuple((_content(key, seen), _content(x, seen)) for key, x in value.items())
    if isinstance(value, frozenset):
        return kind, tuple(sorted(repr(_content(x, seen)) for x in value))
    if isinstance(value, types.CodeType):
        return kind, value.co_code, value.co_names, value.co_varnames, _content(value.co_consts, seen)
    if isinstance(value, types.CellType):
        return kind, _content(value.cell_contents, seen)
    parts: Any = None
    if isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] not in _VERSIONED:
        parts = value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Fields that are no arguments follow from the others.
        parts = [getattr(value, field.name) for field in dataclasses.fields(value) if field.init]
    if parts is not None:
        if (number := seen.get(id(value))) is not None:
            return kind, number
        seen[id(value)] = len(seen)
        return kind, _content(parts, seen)
    if not hasattr(value, "__qualname__"):
        raise TypeError(f"{value!r} is no number, array, record or function")
    return kind, value.__module__, value.__qualname__
