"""Rotary embeddings for tests, a NumPy reference in extended precision, and error bounds by the pairs' lengths."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from support import cases

LAYOUTS = ("BHSD", "BSHD")
PAIRINGS = (True, False)
"""Values of interleaved."""

FAR = 2**20
"""Angles are exact up to this position."""


def features_shape(layout: str, examples: int, heads: int, length: int, size: int) -> tuple[int, int, int, int]:
    return (examples, heads, length, size) if layout == "BHSD" else (examples, length, heads, size)


def make_features(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.normal(size=shape).astype(jnp.dtype(dtype))


def _in_pairs(features: np.ndarray, interleaved: bool) -> np.ndarray:
    """``[..., P, 2]``: the two features of each pair."""
    if interleaved:
        return features.reshape(*features.shape[:-1], features.shape[-1] // 2, 2)
    return np.stack(np.split(features, 2, axis=-1), axis=-1)


def _from_pairs(pairs: np.ndarray, interleaved: bool) -> np.ndarray:
    if interleaved:
        return pairs.reshape(*pairs.shape[:-2], 2 * pairs.shape[-2])
    return np.concatenate([pairs[..., 0], pairs[..., 1]], axis=-1)


@dataclasses.dataclass(frozen=True)
class ExpectedRotation:
    """The expected result of a rotation."""

    rotated: np.ndarray
    """The rotated features, exact."""
    lengths: np.ndarray
    """The length of each rotated feature's pair."""
    angle_errors: np.ndarray
    """Bounds on the errors of the angles."""
    passthrough: np.ndarray
    """The features that are not rotated."""
    offset: int
    """How many of these stand before the rotated ones."""

    def _with_passthrough(self, rotated: np.ndarray, passthrough: np.ndarray) -> np.ndarray:
        before, after = np.split(passthrough, [self.offset], axis=-1)
        return np.concatenate([before, rotated, after], axis=-1)

    @property
    def exact(self) -> np.ndarray:
        return self._with_passthrough(self.rotated, self.passthrough.astype(np.longdouble))

    def units(self) -> np.ndarray:
        """The unit in the last place of the length of each rotated pair, in the accumulator."""
        with np.errstate(invalid="ignore", over="ignore"):
            return np.spacing(self.lengths.astype(cases.accumulator(self.passthrough.dtype))).astype(np.longdouble)

    def expected(self) -> cases.Expected:
        """The features, rounded to the dtype. Rotated ones are within 2 units for float32, 8 for float64, and 4 for 16
        bits, where sines are computed in float32."""
        dtype = self.passthrough.dtype
        num_units = {8: 8, 4: 2, 2: 4}[dtype.itemsize]
        with np.errstate(invalid="ignore"):
            error = num_units * self.units() + self.angle_errors * self.lengths
        return cases.Expected(self.exact, dtype, self._with_passthrough(error, np.zeros(self.passthrough.shape)))

    def check(self, actual: Any, where: str = "") -> None:
        """Checks the rotated features within their errors, and the others exactly."""
        self.expected().check(actual, where)
        end = self.offset + self.rotated.shape[-1]
        rest = np.delete(np.asarray(actual), np.s_[self.offset : end], axis=-1)
        cases.assert_same_bits(rest, self.passthrough, f"{where} passthrough")


def in_two_rows(inv_freq: Any) -> Any:
    """Frequencies of fewer than 64 bits as the sum of two rows. The second row is zero."""
    return jnp.stack([inv_freq, jnp.zeros_like(inv_freq)])


@dataclasses.dataclass(frozen=True)
class Rotation:
    """The arguments of a rotation, except the features."""

    positions: np.ndarray | None = None
    base: float = 10000.0
    interleaved: bool = True
    layout: str = "BHSD"
    rotary_dim: int | None = None
    rotary_offset: int = 0
    sections: tuple[int, ...] | None = None
    sections_interleaved: bool = False
    inv_freq: np.ndarray | None = None
    scale: float = 1.0

    def options(self) -> dict[str, Any]:
        """The keyword arguments, except positions, which may be traced."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}

    def num_rotated(self, size: int) -> int:
        return size - self.rotary_offset if self.rotary_dim is None else self.rotary_dim

    def section_of_pair(self) -> list[int]:
        """The section of each pair, found as models do: by splitting the pairs, or by slices of every n-th pair."""
        assert self.sections is not None
        count = len(self.sections)
        if not self.sections_interleaved:
            return [i for i in range(count) for _ in range(self.sections[i])]
        section = [0] * sum(self.sections)
        for i in range(1, count):
            for pair in range(i, count * self.sections[i], count):
                if pair < len(section):
                    section[pair] = i
        return section

    def angles(self, shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        """The angles ``[B or 1, S, P]`` for features of this shape, and bounds on their errors.

        For float64, angles are float64 products. For other dtypes, they are exact. The bounds cover kernels' rounding:
        their frequencies are sums of two float32 numbers, their angles are float64. This matters at large positions.
        """
        length = shape[2 if self.layout == "BHSD" else 1]
        rotary_dim = self.num_rotated(shape[3])
        positions = np.arange(length) if self.positions is None else self.positions
        if self.sections is None:
            positions = positions.reshape(1 if positions.ndim == 1 else len(positions), length, 1)
        else:
            positions = np.stack([positions[i] for i in self.section_of_pair()], axis=-1)
            positions = positions.reshape(-1 if positions.size else shape[0], length, rotary_dim // 2)
        inv_freq = self.inv_freq
        if inv_freq is None:
            inv_freq = 1 / self.base ** (np.arange(0, rotary_dim, 2) / rotary_dim)
        if jnp.dtype(dtype) == np.float64:
            angles = positions.astype(np.float64) * inv_freq.astype(np.float64)
            return angles, np.zeros(angles.shape)
        positions, inv_freq = positions.astype(np.longdouble), inv_freq.astype(np.longdouble)
        rest = inv_freq - inv_freq.astype(np.float32)
        missing = np.abs(rest - rest.astype(np.float32))
        angles = positions * inv_freq
        return angles, 2.0**-52 * np.abs(angles) + np.abs(positions) * missing

    def of(self, features: np.ndarray, direction: int = 1) -> ExpectedRotation:
        """The rotation by the angles, or (direction -1) by the negative angles."""
        begin, end = self.rotary_offset, self.rotary_offset + self.num_rotated(features.shape[-1])
        angles, errors = (
            np.expand_dims(x.astype(np.longdouble), 1 + LAYOUTS.index(self.layout))
            for x in self.angles(features.shape, features.dtype)
        )
        angles = direction * angles
        scale = np.longdouble(self.scale)
        cos, sin = scale * np.cos(angles), scale * np.sin(angles)
        first, second = np.moveaxis(_in_pairs(features[..., begin:end].astype(np.longdouble), self.interleaved), -1, 0)
        with np.errstate(invalid="ignore"):
            rotated = np.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
            lengths = np.repeat(np.abs(scale) * np.hypot(first, second)[..., None], 2, axis=-1)
        errors = np.broadcast_to(errors[..., None], rotated.shape)
        rotated, lengths, errors = (_from_pairs(pairs, self.interleaved) for pairs in (rotated, lengths, errors))
        return ExpectedRotation(rotated, lengths, errors, np.delete(features, np.s_[begin:end], axis=-1), begin)
