"""The docstring example of each public function runs, and prints the output that it shows."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest
from support.matrix.calls import FAMILIES, is_of_family

import jax_baracuda

FUNCTIONS = [name for name in jax_baracuda.__all__ if name.islower() and callable(getattr(jax_baracuda, name))]


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


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "min" in name])
def test_functions_of_minima_speak_of_minima(name: str) -> None:
    """The docstrings of minima do not mention maxima, although they are made from the docstrings of maxima."""
    docstring = inspect.getdoc(getattr(jax_baracuda, name))
    assert "minim" in docstring and not re.search("[Mm]axim|_max|argmax|max [{]", docstring)


OF_EDGES = (
    *(f"gather_segment_{kind}" for kind in ("sum", "mean", "max", "min", "dot")),
    *("segment_attention", "segment_plan"),
)
"""These docstrings describe edges, where the other segment functions describe rows."""

OF_ONE_FUNCTION = {
    "segment": {"bucket_size", "d_output", "data", "plan", "segment_ids", "tie_break"},
    "causal_conv1d": {"x"},
    "graph_attention": {"key", "query"},
    "rope": {"d_output"},
    "where": {"cond"},
    "write_slice": {"start_indices"},
}
"""Arguments with different meanings in a family. Every other argument has one description in the family."""


def arguments_of(docstring: str) -> dict[str, str]:
    """The descriptions of the arguments."""
    [section] = re.findall(r"^Args:\n(.*?)\n\n(?=\S)", docstring, flags=re.DOTALL | re.MULTILINE)
    return dict(re.findall(r"^  (\w+): (.*?)(?=^  \w|\Z)", section + "\n", flags=re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_described(name: str) -> None:
    """All arguments are described in the order of the signature, also those described in another docstring."""
    function = getattr(jax_baracuda, name)
    assert list(arguments_of(inspect.getdoc(function))) == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_descriptions_agree(family: str) -> None:
    """The functions of a family describe a shared argument in the same words."""
    descriptions: dict[str, dict[str, list[str]]] = {}
    for name in FUNCTIONS:
        if is_of_family(name, family) and name not in ("rope_frequencies", *OF_EDGES):
            for argument, text in arguments_of(inspect.getdoc(getattr(jax_baracuda, name))).items():
                descriptions.setdefault(argument, {}).setdefault(text, []).append(name)
    different = {argument for argument, texts in descriptions.items() if len(texts) > 1}
    different -= OF_ONE_FUNCTION.get(family, set())
    assert not different, {x: descriptions[x] for x in different}
