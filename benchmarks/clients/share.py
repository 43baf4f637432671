"""Which share of a program's time its segment operations take: sums by ids, gathers of rows, and slice updates."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import jax

SEGMENT_OPERATIONS = re.compile(r"= \S+ (?:scatter|gather|dynamic-update-slice|custom-call)\(")


def as_kernel(name: str) -> str:
    """The name of an instruction's GPU kernel."""
    return re.sub(r"\W", "_", name)


def share_of_segment_operations(program: Any, arguments: tuple[Any, ...], runs: int = 3) -> float:
    """The share of the instructions of a compiled program, fusions among them, that contain a segment operation."""
    text = program.as_text()
    bodies: dict[str, str] = dict(re.findall(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    calls = dict(re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = [^\n]*?calls=%?([\w.-]+)", text, re.M))
    own = set(re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = \S+ (?:scatter|gather)\(", text, re.M))
    own |= {name for name, body in calls.items() if SEGMENT_OPERATIONS.search(bodies.get(body, ""))}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                jax.block_until_ready(program(*arguments))
        [file] = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    own = {as_kernel(name) for name in own}
    total = ours = 0.0
    for plane in profile.planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            for event in line.events:
                name = event.name if on_gpu and line.name.startswith("Stream") else dict(event.stats).get("hlo_op")
                if name is not None and (on_gpu or jax.default_backend() == "cpu"):
                    total += event.duration_ns
                    ours += event.duration_ns if as_kernel(name) in own else 0
    return ours / total if total else float("nan")
