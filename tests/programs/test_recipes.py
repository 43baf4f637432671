"""The recipes that need packages of this environment run, and their assertions hold."""

from __future__ import annotations

from pathlib import Path

from support.pages import run_examples

DOCS = Path(__file__).parents[2] / "docs"


def test_recipes() -> None:
    run_examples(DOCS / "recipes_libraries.md")
