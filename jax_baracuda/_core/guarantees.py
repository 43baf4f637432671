"""What an op promises about its numbers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """The numerical guarantees of an op for one element type on one platform."""

    accumulator: str
    """The dtype in which terms are combined; "none" where the op only selects or compares."""
    math_precision: str
    """"exact" (no rounding at all), "rounded once" or "faithful" (within one unit in the last place)."""
    deterministic: bool
    """The same inputs give the same bits whatever the scheduling of threads."""
    bit_stable_on_same_hardware: bool
    """The same inputs give the same bits in every run on one kind of device."""
