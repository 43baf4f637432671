"""A pytest plugin. It restores old JAX names that jraph needs, and redirects jraph's calls if REDIRECT is set."""

from __future__ import annotations

import functools
import os
import sys
import types
from typing import Any

import jax
import jax.lib

jax.tree_map, jax.tree_leaves = jax.tree.map, jax.tree.leaves
xla_bridge: Any = types.ModuleType("jax.lib.xla_bridge")
xla_bridge.get_backend = functools.cache(jax.default_backend)
sys.modules[xla_bridge.__name__] = jax.lib.xla_bridge = xla_bridge

if os.environ.get("REDIRECT"):
    import jax_baracuda

    report = jax_baracuda.redirect(indexed_updates=True).install()

    def pytest_terminal_summary(terminalreporter: Any) -> None:
        terminalreporter.write_line(str(report))
