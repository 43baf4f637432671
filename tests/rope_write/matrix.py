"""The declaration of `rope_write` for the matrix of combinations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rope.matrix import rotated
from support.matrix.calls import (
    ABSENT,
    FLOATING,
    Operand,
    Options,
    Problem,
    Sizes,
    declare,
    integers,
    numbers,
    passed,
)
from write_rows.matrix import reference as written
from write_rows.matrix import slots

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
    sections = (1, rotary // 2 - 1) if options["sections"] else None

    def bound(angle_errors: float | None) -> Callable[..., Any]:
        rotate = functools.partial(rotated, 1, angle_errors, {**options, "layout": "BSHD", "base": ABSENT})

        def call(
            q: Any, k: Any, v: Any, key_cache: Any, value_cache: Any, positions: Any, slots: Any, layer: Any = None
        ) -> Any:
            q, k = (rotate(x[None], positions, None)[0] for x in (q, k))
            return (q, *(written(*x, slots, axis, layer) for x in ((key_cache, k), (value_cache, v))))

        return call

    def apply(function: Callable[..., Any], **arrays: Any) -> Any:
        chosen = passed(options, "axis", "interleaved", "rotary_dim", "scale")
        if options["rotary_offset"]:
            chosen["rotary_offset"] = offset
        return function(**arrays, sections=sections, **chosen)

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
        reference=bound(None),
        majorant=bound(1.0 if dtype == "float64" else 0.0),
        results=(rows["q"], *caches.values()),
        terms=2,
        carry=(3, 1),
    )


declare(
    name="rope_write",
    dtypes=FLOATING,
    sizes=SIZES,
    large_sizes=LARGE_SIZES,
    options=OPTIONS,
    problem=_problem,
    has_carry=True,
)
