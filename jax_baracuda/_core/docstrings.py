"""Docstrings of related functions: each says only what differs from its model, and ``help`` shows all of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any


def add_descriptions(function: Callable[..., Any], docstring: str | None) -> None:
    """Adds what a function's docstring lacks from another docstring: arguments of the function, and sections."""
    if function.__doc__ is None or docstring is None:  # Python may run without docstrings
        return
    added, own = _sections(docstring), _sections(inspect.cleandoc(function.__doc__))
    descriptions = _arguments(added.get("Args", "")) | _arguments(own.get("Args", ""))
    described = (descriptions[name] for name in inspect.signature(function).parameters if name in descriptions)
    own["Args"] = "\n".join(["Args:", *described])
    function.__doc__ = "\n\n".join((added | own).values())


def extend_section(function: Callable[..., Any], title: str, text: str) -> None:
    """Adds text to a section of a docstring, if it has this section."""
    sections = _sections(inspect.cleandoc(function.__doc__ or ""))
    if title in sections:
        sections[title] += f"\n{text}"
        function.__doc__ = "\n\n".join(sections.values())


def _sections(docstring: str) -> dict[str, str]:
    """The sections by title. The title of the text before the first section is empty."""
    first, *sections = re.split(r"\n\n(?=[A-Z][a-z ]*:\s)", docstring.rstrip())
    return {"": first} | {section.partition(":")[0]: section for section in sections}


def _arguments(section: str) -> dict[str, str]:
    """The descriptions in a section "Args", by the name of the argument."""
    return {entry.partition(":")[0].strip(): entry.rstrip() for entry in re.split(r"\n(?=  \w)", section)[1:]}
