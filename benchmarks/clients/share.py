"""Which share of a program's time its segment operations take: sums by ids, gathers of rows, and slice updates."""

from __future__ import annotations

import collections
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax

INSTRUCTION = r"^\s*(?:ROOT )?%?([\w.-]+) = "
SEGMENT_OPERATION = r"\S+ (?:scatter|gather|dynamic-update-slice)\("


def as_kernel(name: str) -> str:
    """The name of an instruction's GPU kernel."""
    return re.sub(r"\W", "_", name)


def share_of_segment_operations(program: Any, arguments: tuple[Any, ...], runs: int = 5) -> float:
    """The share of the instructions of a compiled program, fusions among them, that contain a segment operation."""
    text = program.as_text()
    bodies: dict[str, str] = dict(re.findall(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    calls: list[tuple[str, str]] = re.findall(INSTRUCTION + r"[^\n]*?(?:calls|to_apply|body)=%?([\w.-]+)", text, re.M)
    own = set(re.findall(INSTRUCTION + SEGMENT_OPERATION, text, re.M))
    own |= {name for name, body in calls if re.search(INSTRUCTION + SEGMENT_OPERATION, bodies.get(body, ""), re.M)}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                jax.block_until_ready(program(*arguments))
        [file] = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    durations = collections.defaultdict(list)
    for plane in profile.planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            for event in line.events:
                name = event.name if on_gpu and line.name.startswith("Stream") else dict(event.stats).get("hlo_op")
                if name is not None and (on_gpu or jax.default_backend() == "cpu"):
                    durations[as_kernel(name)].append(event.duration_ns)
    # Events of a loop contain those of its body.
    loops = {
        as_kernel(name)
        for name, body in calls
        if any(as_kernel(inner) in durations for inner in re.findall(INSTRUCTION, bodies.get(body, ""), re.M))
    }
    # Medians, because other processes may interrupt an event.
    times = {
        name: statistics.median(of_events) * len(of_events)
        for name, of_events in durations.items()
        if name not in loops
    }
    total = sum(times.values())
    return sum(times.get(as_kernel(name), 0) for name in own) / total if total else float("nan")
