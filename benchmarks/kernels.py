"""Prints how long the kernels of cases take on the GPU by themselves, without what lies between them."""

from __future__ import annotations

import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from benchmarks.__main__ import select_cases
from benchmarks.harness import Contender, JaxContender, copy_bytes_per_second
from benchmarks.record import Measurement
from jax_baracuda._tools.command_line import parser_of, run
from jax_baracuda._tools.platforms import default_devices, require_kernels

CALLS = 10
"""Calls per contender; each kernel's time is the median over them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if there is no GPU to profile."""
    parser = parser_of("benchmarks.kernels", __doc__, {0: "the kernels were profiled", 1: "there is no GPU"})
    parser.add_argument("--only", nargs="+", default=[], help="only cases whose name contains one of these texts")
    options = parser.parse_args(arguments)
    if (backend := default_devices()[0].platform) != "gpu":
        print(f"kernels are profiled on GPUs only, and JAX runs on {backend}")
        return 1
    require_kernels(default_devices()[0])
    bandwidth = copy_bytes_per_second()
    print(f"copy: {bandwidth / 1e12:.3f} TB/s on {jax.devices()[0].device_kind}")
    for case in select_cases("gpu", options.only):
        print(case.name, flush=True)
        for contender in case.make_contenders():
            if not isinstance(contender, JaxContender):
                continue
            kernels = kernel_times(contender)
            seconds = sum(number * of_one for number, of_one in kernels.values()) / contender.repetitions
            parts = (f"{number} × {name} {of_one * 1e6:.2f}" for name, (number, of_one) in kernels.items())
            name = Measurement(contender.library, contender.formulation).label
            fraction = case.floor_bytes / seconds / bandwidth
            print(
                f"    {name}: {seconds * 1e6:.2f} µs = {fraction:.2f} of copy; µs in a call: {', '.join(parts)}",
                flush=True,
            )
    return 0


def kernel_times(contender: Contender) -> dict[str, tuple[int, float]]:
    """For each kernel: its launches per call, and its median seconds. Copies and fills by the driver count, too."""
    contender.prepare()
    contender.wait(contender.enqueue())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                contender.wait(contender.enqueue())
        [path] = Path(folder).rglob("*.xplane.pb")
        durations: dict[str, list[float]] = defaultdict(list)
        for name, nanoseconds in _device_events(path):
            durations[name].append(nanoseconds * 1e-9)
    return {name: (round(len(of) / CALLS), statistics.median(of)) for name, of in durations.items() if len(of) >= CALLS}


def _device_events(path: Path) -> Iterator[tuple[str, float]]:
    """Name and duration of each event on a GPU's streams."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                yield from ((short_name(event.name), event.duration_ns) for event in line.events)


def short_name(kernel: str) -> str:
    """The bare function name, without return type, namespaces, template arguments and parameters."""
    without_brackets = kernel.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", without_brackets)) != without_brackets:
        without_brackets = shorter
    return without_brackets.split("::")[-1].split()[-1]


if __name__ == "__main__":
    run(main)
