"""The table of example calls: one module a family of ops, each with a list ``EXAMPLES``.

It is not imported with the package. Tools, tests and benchmarks find in it what they need to know about each public
function; a function without an example fails a test.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from jax_baracuda._examples.example import Example


@functools.cache
def all_examples() -> tuple[Example, ...]:
    """Those of all families."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return tuple(example for module in modules for example in getattr(module, "EXAMPLES", ()))


def examples_of(function_name: str) -> tuple[Example, ...]:
    """Those of one public function, the plainest first."""
    return tuple(example for example in all_examples() if example.function.__name__ == function_name)
