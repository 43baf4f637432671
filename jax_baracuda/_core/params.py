"""The params of a call, and the fields of a definition that may depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def resolve(value: Any, params: Mapping[str, Any]) -> Any:
    """A field of a definition that may depend on the params of a call."""
    return value(**params) if callable(value) else value


def count_batch_dims(params: Mapping[str, Any]) -> int:
    """How many leading dimensions of a call's operands and results ``vmap`` has added."""
    return params.get("num_batch_dims", 0)


def definition_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The params as the functions of a definition take them."""
    return {name: value for name, value in params.items() if name != "num_batch_dims"}
