"""The example in the docstring of each public function runs, and prints what it says."""

from __future__ import annotations

import doctest
import inspect

import pytest

import jax_baracuda

FUNCTIONS = [name for name in jax_baracuda.__all__ if inspect.isfunction(getattr(jax_baracuda, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example(name: str) -> None:
    docstring = inspect.getdoc(getattr(jax_baracuda, name))
    assert "\nExample:\n" in docstring, f"{name}: the docstring has no section 'Example:'"
    example = doctest.DocTestParser().get_doctest(docstring, {}, name, None, None)
    assert example.examples, f"{name}: the example has no line that begins with '>>> '"
    output: list[str] = []
    failed, _ = doctest.DocTestRunner().run(example, out=output.append)
    assert failed == 0, "".join(output)


def test_all_functions_are_looked_at() -> None:
    assert {"segment_max", "rope", "where_backward", "rope_frequencies"} <= set(FUNCTIONS)
