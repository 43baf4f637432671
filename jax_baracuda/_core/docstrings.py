"""Docstrings with parts that several functions share."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def with_shared_parts(parts: Mapping[str, str]) -> Callable[[F], F]:
    """Decorator: a docstring's line ``{name}`` becomes ``parts[name]``, indented as that line is."""

    def fill(function: F) -> F:
        if function.__doc__:  # absent under python -OO
            function.__doc__ = re.sub(
                r"^( *)\{(\w+)\}$",
                lambda match: textwrap.indent(parts[match[2]], match[1]),
                function.__doc__,
                flags=re.MULTILINE,
            )
        return function

    return fill
