"""Timing, and the record of a run."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Other libraries need some of the GPU's memory in the same run.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.55")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import jax_baracuda  # noqa: E402

RESULTS = Path(__file__).parent / "results"
MIN_SECONDS_PER_SAMPLE = 0.02
NUM_SAMPLES = 7


@dataclasses.dataclass(frozen=True)
class Contender:
    """One library's version of a case: a function without arguments that enqueues one call and returns its result."""

    library: str
    call: Callable[[], Any]
    wait: Callable[[Any], Any]
    temporary_bytes: int | None = None
    """Memory beside operands and results, where the library tells."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to compute, the fewest bytes that it must move, and who computes it."""

    op: str
    name: str
    what: str
    """"forward" or "forward + gradient"."""
    floor_bytes: int
    contenders: Sequence[Contender]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of a run's record."""

    op: str
    case: str
    what: str
    library: str
    milliseconds: float
    spread: float
    """(largest - smallest) / median of the samples."""
    fraction_of_copy: float
    """floor_bytes over the time, divided by the bandwidth of a copy in the same run."""
    temporary_bytes: int | None


def jax_contender(library: str, function: Callable[..., Any], *operands: jax.Array) -> Contender:
    """A jitted JAX function, compiled ahead of the timing."""
    compiled = jax.jit(function).lower(*operands).compile()
    analysis = compiled.memory_analysis()
    temporary = None if analysis is None else int(analysis.temp_size_in_bytes)
    return Contender(library, lambda: compiled(*operands), jax.block_until_ready, temporary)


def seconds_per_call(contender: Contender) -> list[float]:
    """Samples of the time per call.

    On a GPU each sample enqueues enough calls to drown the cost of waiting for them. On a CPU calls that are not waited
    for would run beside each other, so there each one is.
    """
    waits_for_each = jax.default_backend() == "cpu"

    def sample(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = contender.call()
            if waits_for_each:
                contender.wait(result)
                del result
        if not waits_for_each:
            contender.wait(result)
        return (time.perf_counter() - start) / calls

    sample(1)
    calls = max(1, int(MIN_SECONDS_PER_SAMPLE / sample(1)))
    return [sample(calls) for _ in range(NUM_SAMPLES)]


def copy_bytes_per_second() -> float:
    """Bandwidth of a large copy within the device's memory: bytes read plus bytes written."""
    num_elements = (1 << 29) if jax.default_backend() == "gpu" else (1 << 26)
    x = jnp.arange(num_elements, dtype=jnp.float32)
    seconds = statistics.median(seconds_per_call(jax_contender("copy", jnp.copy, x)))
    return 2 * x.nbytes / seconds


def measure(cases: Iterator[Case], copy_bandwidth: float, report: Callable[[Measurement], None]) -> list[Measurement]:
    """Times every contender of every case."""
    measurements = []
    for case in cases:
        for contender in case.contenders:
            samples = seconds_per_call(contender)
            median = statistics.median(samples)
            measurement = Measurement(
                op=case.op,
                case=case.name,
                what=case.what,
                library=contender.library,
                milliseconds=median * 1e3,
                spread=(max(samples) - min(samples)) / median,
                fraction_of_copy=case.floor_bytes / median / copy_bandwidth,
                temporary_bytes=contender.temporary_bytes,
            )
            report(measurement)
            measurements.append(measurement)
    return measurements


def save(measurements: Sequence[Measurement], copy_bandwidth: float, path: Path) -> None:
    """Writes the record of a run as JSON."""
    record = {
        "device": jax.devices()[0].device_kind if jax.default_backend() == "gpu" else _cpu_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "jax_baracuda": jax_baracuda.__version__,
        "torch": _version("torch"),
        "torch_scatter": _version("torch_scatter"),
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "copy_terabytes_per_second": copy_bandwidth / 1e12,
        "measurements": [dataclasses.asdict(m) for m in measurements],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.split(":")[1].strip() for line in lines if "model name" in line}
    return f"{', '.join(names) or platform.processor()}, {os.cpu_count()} cores"


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return getattr(__import__(package), "__version__", None)
    except ImportError:
        return None
