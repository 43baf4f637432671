"""The declaration of `rope_write` for the matrix of combinations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from rope.matrix import BASE
from support.matrix.calls import (
    ABSENT,
    FLOATING,
    Call,
    Constraint,
    Operand,
    Options,
    Problem,
    declare,
    integers,
    numbers,
    passed,
)
from write_rows.matrix import reference as written
from write_rows.matrix import slots

Sizes = Mapping[str, Any]

SIZES: dict[str, Sizes] = {
    "small": {"section": 2, "layer": 2, "slot": 12, "token": 8, "q_head": 4, "head": 2, "feature": 8},
    "odd": {"section": 2, "layer": 3, "slot": 13, "token": 7, "q_head": 3, "head": 1, "feature": 6},
    "one": {"section": 2, "layer": 1, "slot": 1, "token": 1, "q_head": 1, "head": 1, "feature": 4},
    "many duplicates": {"section": 2, "layer": 2, "slot": 3, "token": 40, "q_head": 2, "head": 2, "feature": 4},
    "empty": {"section": 2, "layer": 2, "slot": 6, "token": 0, "q_head": 2, "head": 2, "feature": 4},
}
LARGE_SIZES: dict[str, Sizes] = {
    "prefill": {"section": 2, "layer": 2, "slot": 20_000, "token": 4096, "q_head": 8, "head": 2, "feature": 128},
    "decode": {"section": 2, "layer": 4, "slot": 40_000, "token": 64, "q_head": 32, "head": 8, "feature": 128},
    "sorted first": {"section": 2, "layer": 1, "slot": 100_000, "token": 140_000, "q_head": 1, "head": 1, "feature": 4},
}

OPTIONS = {
    "axis": (ABSENT, 1),
    "layer": (ABSENT, "int32", "int8"),
    "slots": ("int32", "int64", "uint8"),
    "interleaved": (ABSENT, False),
    "rotary_dim": (ABSENT, 4),
    "rotary_offset": (ABSENT, "last"),
    "sections": (ABSENT, "two"),
    "scale": (ABSENT, 0.75),
}


def _problem(dtype: str, options: Options, sizes: Sizes) -> Problem:
    axis, has_layer = options["axis"] or 0, options["layer"] is not ABSENT
    size = sizes["feature"]
    rotary = options["rotary_dim"] or size
    offset = size - rotary if options["rotary_offset"] else 0
    sections = (rotary // 2 - 1, 1) if options["sections"] else None

    def rotated(x: Any, positions: Any, is_majorant: bool) -> Any:
        inv_freq = jnp.asarray(BASE ** (-np.arange(0, rotary, 2, dtype=np.float64) / rotary))
        of_pairs = positions[:, None] if sections is None else positions[np.repeat([0, 1], sections)].T
        angle = (of_pairs.astype(jnp.float64) * inv_freq)[:, None]
        scale = options["scale"] or 1.0
        cos, sin = scale * jnp.cos(angle), scale * jnp.sin(angle)
        if is_majorant:  # the length of the pair, and the rounding error of the angle in float64
            cos = sin = scale * (1 + jnp.abs(angle) * (dtype == "float64"))
        before, turned, after = jnp.split(x, [offset, offset + rotary], axis=-1)
        halves = options["interleaved"] is False
        first, second = jnp.split(turned, 2, axis=-1) if halves else (turned[..., ::2], turned[..., 1::2])
        pair = (first * cos + (1 if is_majorant else -1) * second * sin, second * cos + first * sin)
        turned = jnp.concatenate(pair, axis=-1) if halves else jnp.stack(pair, axis=-1).reshape(turned.shape)
        return jnp.concatenate([before, turned, after], axis=-1)

    def bound(is_majorant: bool) -> Callable[..., Any]:
        def call(q: Any, k: Any, v: Any, keys: Any, values: Any, positions: Any, at: Any, layer: Any = None) -> Any:
            k = rotated(k, positions, is_majorant)
            caches = (written(*x, at, axis, layer) for x in ((keys, k), (values, v)))
            return (rotated(q, positions, is_majorant), *caches)

        return call

    def apply(function: Callable[..., Any], *arrays: Any) -> Any:
        chosen = passed(options, "axis", "interleaved", "rotary_dim", "scale")
        if options["rotary_offset"]:
            chosen["rotary_offset"] = offset
        if has_layer:
            chosen["layer"] = arrays[7]
        return function(*arrays[:7], sections=sections, **chosen)

    def cache() -> tuple[str, ...]:
        dims = ["head", "feature"]
        dims.insert(axis, "slot")
        return (*(("layer",) if has_layer else ()), *dims)

    rows = {"q": ("token", "q_head", "feature"), "k": ("token", "head", "feature"), "v": ("token", "head", "feature")}
    caches = {"key_cache": cache(), "value_cache": cache()}
    positions = ("token",) if sections is None else ("section", "token")
    of_layer = Operand("layer", (), slots(sizes["layer"]), dtype=options["layer"])
    return Problem(
        operands=(
            *(Operand(name, dims, numbers) for name, dims in (rows | caches).items()),
            Operand("positions", positions, integers(-1000, 1000), dtype="int32"),
            Operand("slots", ("token",), slots(sizes["slot"]), dtype=options["slots"]),
            *((of_layer,) if has_layer else ()),
        ),
        apply=apply,
        reference=bound(False),
        majorant=bound(True),
        results=(rows["q"], *caches.values()),
        terms=2,
        carry=(3, 1),
    )


declare(
    Call(
        name="rope_write",
        dtypes=FLOATING,
        sizes=SIZES,
        large_sizes=LARGE_SIZES,
        options=OPTIONS,
        problem=_problem,
        constraints=(
            Constraint(
                "vmap maps an operand that the call has",
                lambda batch, layer: batch == "one:layer" and layer is ABSENT,
            ),
        ),
        has_carry=True,
    )
)
