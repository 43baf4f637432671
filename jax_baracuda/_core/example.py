"""Examples of the public functions on typical operands: what ``check`` verifies and ``race`` times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Example:
    """A public function, the same computation in plain JAX, and operands for both."""

    name: str
    function: Callable[..., Any]
    """``(operand 0, *other operands, **sizes) -> result``; its gradient is with respect to operand 0."""
    plain_jax: Callable[..., Any]
    make_operands: Callable[..., tuple[np.ndarray, ...]]
    """``(rng, **sizes) -> operands``, operand 0 in float32: it is cast to the dtype under test."""
    dtypes: Sequence[str]
    """What operand 0 is cast to."""
    check_sizes: Mapping[str, int]
    race_sizes: Mapping[str, Mapping[str, int]]
    """Sizes of the timed example by platform, "cpu" or "cuda"."""
    tolerance: Mapping[str, float]
    """The largest allowed error of value and gradient by dtype, relative to the reference's norm."""


EXAMPLES: list[Example] = []
"""The examples of all op families, in the order in which they were defined."""
