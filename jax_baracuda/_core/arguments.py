"""Checks of arguments that are Python numbers."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np


def real_number(function: str, argument: str, value: Any, *, positive: bool = False) -> float:
    """A finite real number, as a Python float."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{function}: {argument} must be a real number, got {value!r}")
    number = float(value)
    if not math.isfinite(number) or (positive and number <= 0):
        raise ValueError(f"{function}: {argument} must be finite{' and positive' if positive else ''}, got {value!r}")
    return number


def whole_number(function: str, argument: str, value: Any, *, minimum: int) -> int:
    """An integer that is `minimum` or more."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{function}: {argument} must be an integer, got {value!r}")
    if value < minimum:
        raise ValueError(f"{function}: {argument} must be {minimum} or more, got {value!r}")
    return int(value)
