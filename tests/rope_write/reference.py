"""Calls of rope_write for tests, and their reference: a NumPy rotation, then a NumPy write of rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from rope.reference import Rotation
from support import cases
from write_rows.reference import assert_same_numbers, random_slots, reference_write

import jax_baracuda as jb

SLOTS, LAYERS = 13, 2


@dataclasses.dataclass(frozen=True)
class RopeWrite:
    """The arguments of a call."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    rotation: Rotation
    axis: int = 0
    layer: int | None = None
    k_scale: Any = None
    v_scale: Any = None

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.q, self.k, self.v, self.key_cache, self.value_cache

    def rotation_options(self) -> dict[str, Any]:
        options = self.rotation.options()
        del options["layout"]
        return options

    def run(self, *arrays: Any, function: Any = jb.rope_write, implementation: str | None = None) -> Any:
        """The call, with other arrays than its own."""
        return function(
            *arrays,
            self.positions,
            self.slots,
            axis=self.axis,
            layer=self.layer,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            implementation=implementation,
            **self.rotation_options(),
        )

    def one_after_the_other(self, q: Any, k: Any, v: Any, key_cache: Any, value_cache: Any) -> Any:
        """The same by two kernels."""
        options, positions = self.rotation_options(), self.positions
        positions = positions if self.rotation.sections is None else positions[:, None]
        q, k = jb.rope_qk(q[None], k[None], positions, layout="BSHD", implementation="kernel", **options)
        caches = jb.write_rows(
            [key_cache, value_cache],
            [k[0], v],
            self.slots,
            axis=self.axis,
            layer=self.layer,
            scale=[self.k_scale, self.v_scale],
            implementation="kernel",
        )
        return q[0], *caches

    def check(self, results: Any) -> None:
        """Compares with NumPy. Rotations have their usual errors; everything else is exact.

        Caches of keys that convert are not compared: numbers that rotations round in another way may convert to others.
        """
        q, keys, values = map(np.asarray, results)
        self.rotation.of(self.q[None]).check(q[None], "q")
        expected = reference_write(self.value_cache, self.v, self.slots, self.axis, self.layer, self.v_scale)
        copied = expected.dtype == self.v.dtype and self.v_scale is None
        (cases.assert_same_memory if copied else assert_same_numbers)(values, expected, "values")
        assert keys.dtype == self.key_cache.dtype and keys.shape == self.key_cache.shape
        if self.key_cache.dtype != self.k.dtype or self.k_scale is not None:
            return
        by_slot, before = (self._by_slot(x) for x in (keys, self.key_cache))
        last = {slot: t for t, slot in enumerate(self.slots.tolist()) if 0 <= slot < SLOTS}
        if self.layer is not None and not 0 <= self.layer < LAYERS:
            last = {}
        rest = [i for i in range(len(by_slot)) if i not in last]
        cases.assert_same_memory(by_slot[rest], before[rest], "other slots")
        if last:
            tokens = list(last.values())
            of_tokens = dataclasses.replace(self.rotation, positions=self.positions[..., None, tokens])
            of_tokens.of(self.k[None, tokens]).check(by_slot[None, list(last)], "keys")
        if self.layer is not None:
            others = [i for i in range(LAYERS) if i != self.layer]
            cases.assert_same_memory(keys[others], self.key_cache[others], "other layers")

    def _by_slot(self, cache: np.ndarray) -> np.ndarray:
        """The layer of a cache that is written, ``[slots, heads, features]``."""
        layer = 0 if self.layer is None or not 0 <= self.layer < LAYERS else self.layer
        return np.moveaxis(cache if self.layer is None else cache[layer], self.axis, 0)


def make_call(
    rng: np.random.Generator,
    dtype: str,
    cache_dtype: str | None = None,
    *,
    tokens: int = 9,
    heads: tuple[int, int, int] = (4, 2, 3),
    features: tuple[int, int] = (16, 8),
    axis: int = 0,
    layer: int | None = None,
    scales: str | None = None,
    sections: tuple[int, ...] | None = None,
    slots: int = SLOTS,
    **rotation: Any,
) -> RopeWrite:
    """A call with random numbers. `features`: of keys and of values. `scales`: None, "one" or "per head"."""

    def numbers(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(jnp.dtype(dtype))

    def cache(heads: int, size: int) -> np.ndarray:
        shape = [heads, size]
        shape.insert(axis, slots)
        leading = [] if layer is None else [LAYERS]
        return cases.random_bits(rng, (*leading, *shape), jnp.dtype(cache_dtype or dtype))

    def scale(heads: int) -> Any:
        if scales is None:
            return None
        return np.float32(rng.uniform(0.1, 3, heads if scales == "per head" else ()))

    leading = () if sections is None else (len(sections),)
    positions = rng.integers(-(2**20), 2**20, (*leading, tokens)).astype(np.int32)
    of_tokens = positions[None] if sections is None else positions[:, None]
    return RopeWrite(
        *(numbers(tokens, h, d) for h, d in zip(heads, (features[0], *features), strict=True)),
        key_cache=cache(heads[1], features[0]),
        value_cache=cache(heads[2], features[1]),
        positions=positions,
        slots=random_slots(rng, tokens, slots),
        rotation=Rotation(of_tokens, layout="BSHD", sections=sections, **rotation),
        axis=axis,
        layer=layer,
        k_scale=scale(heads[1]),
        v_scale=scale(heads[2]),
    )
