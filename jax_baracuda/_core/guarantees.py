"""The numerical guarantees of ops."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jax_baracuda._core.arrays import accumulation_dtype


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """The numerical guarantees of an op for one element type on one platform."""

    accumulator: str
    """The dtype in which terms are combined; "none" where the op only selects, compares or divides."""
    math_precision: str
    """How far a result may be from exact arithmetic.

    "exact": it is exact (integers: modulo 2 to the number of bits). "rounded once": it is the exact result, rounded to
    the dtype. "within 2 ulp": it is within two units in the last place. "accumulated": terms are added or multiplied in
    some order in the accumulator's dtype, with rounding at each step, and the result is rounded once to the dtype.
    """
    deterministic: bool
    """The same inputs give the same bits, however threads are scheduled."""
    bit_stable_on_same_hardware: bool
    """The same inputs give the same bits in every run on one kind of device."""


EXACT = Guarantee("none", "exact", deterministic=True, bit_stable_on_same_hardware=True)
"""For ops that only select."""
ROUNDED_ONCE = dataclasses.replace(EXACT, math_precision="rounded once")


def quotients(dtype: str, platform: str) -> Guarantee:
    """For ops that divide, and that plain JAX serves on GPUs, where XLA's division of 32 bits is approximate."""
    is_approximate = platform == "cuda" and dtype != "float64"
    return dataclasses.replace(EXACT, math_precision="within 2 ulp") if is_approximate else ROUNDED_ONCE


def accumulated(dtype: str, platform: str) -> Guarantee:
    """For ops that add or multiply floating numbers in a fixed order."""
    accumulator = np.dtype(accumulation_dtype(jnp.dtype(dtype))).name
    return dataclasses.replace(EXACT, accumulator=accumulator, math_precision="accumulated")
