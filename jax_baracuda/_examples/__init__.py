"""The table of example calls: one module for each family of ops, with a list ``EXAMPLES``.

The package does not import it. Tools, tests and benchmarks take calls of each public function from it. A test fails if
a public function has no example.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from jax_baracuda._examples.example import Example


@functools.cache
def all_examples() -> tuple[Example, ...]:
    """The examples of all families."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return tuple(example for module in modules for example in getattr(module, "EXAMPLES", ()))


def examples_of(function_name: str) -> tuple[Example, ...]:
    """The examples of one public function, the plainest first."""
    return tuple(example for example in all_examples() if example.function.__name__ == function_name)
