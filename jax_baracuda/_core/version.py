"""The version of the package."""

from __future__ import annotations

import importlib.metadata

VERSION = importlib.metadata.version("jax_baracuda")
