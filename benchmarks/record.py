"""The record of a run, written by ``python -m benchmarks`` and read by the tables and the plots."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
OURS, XLA = "jax_baracuda", "XLA"
TORCH_PEERS = ("torch_scatter", "torch_geometric", "causal_conv1d", "fla", "liger_kernel")
"""Packages beside torch whose versions are recorded."""
UNSUPPORTED = "unsupported"
"""The prefix of a failure that only means that a library does not offer this."""
NO_KERNEL = "no kernel"
"""The formulation, or its suffix, of programs of this package that pick plain JAX for every op."""
FORWARD, WITH_GRADIENT = "forward", "forward + gradient"
LOWEST_RATIO = 0.97
"""A sampled call with a lower ratio is slower by more than measurement noise."""
PROGRAMS = "programs"
"""The op name of whole programs. All contenders and their memory are shown, without a fraction of a copy."""


@dataclasses.dataclass
class Measurement:
    """One contender's time in one case, or why there is none."""

    library: str
    formulation: str
    milliseconds: float | None = None
    """Median of the samples."""
    spread: float | None = None
    """(largest - smallest) / median of the samples."""
    samples: int = 0
    fraction_of_copy: float | None = None
    """The case's minimum of bytes over the time, divided by the bandwidth of a copy in the same run."""
    temporary_bytes: int | None = None
    """Peak memory beside operands and results, if the library reports it."""
    disagreement: float | None = None
    """Sum of the absolute differences from this package's result, relative to the sum of its magnitudes."""
    failure: str | None = None

    @property
    def label(self) -> str:
        return self.library + (f" ({self.formulation})" if self.formulation else "")

    @property
    def is_unsupported(self) -> bool:
        return self.failure is not None and self.failure.startswith(UNSUPPORTED)


@dataclasses.dataclass(frozen=True)
class CaseDescription:
    """A computation, and the minimum of bytes that it must move."""

    op: str
    size: str
    variant: str
    what: str
    """:data:`FORWARD` or :data:`WITH_GRADIENT`."""
    floor_bytes: int
    """Each operand read once and each result written once, in the forward and in the backward pass."""

    @property
    def name(self) -> str:
        return f"{self.op} {self.size}, {self.variant}, {self.what}"


@dataclasses.dataclass(frozen=True)
class CaseRecord(CaseDescription):
    """The measurements of one case."""

    measurements: list[Measurement]

    def libraries(self) -> list[str]:
        return list(dict.fromkeys(m.library for m in self.measurements))

    def fastest(self, *libraries: str) -> Measurement | None:
        """The fastest measurement of some libraries."""
        timed = [m for m in self.measurements if m.milliseconds is not None and m.library in libraries]
        return min(timed, key=lambda m: m.milliseconds, default=None)

    def speed_up(self, *libraries: str) -> float | None:
        """The fastest time of the given libraries over the time of this package."""
        ours, theirs = self.fastest(OURS), self.fastest(*libraries)
        return None if ours is None or theirs is None else theirs.milliseconds / ours.milliseconds

    def time_and_memory(self, measurement: Measurement) -> str:
        """A measurement of this case as text: milliseconds, speed-up over XLA, and MiB if known."""
        if measurement.milliseconds is None:
            return "unsupported" if measurement.is_unsupported else "failed"
        parts, xla = [f"{milliseconds_text(measurement.milliseconds)} ms"], self.fastest(XLA)
        if xla is not None and measurement.library != XLA:
            parts.append(f"{xla.milliseconds / measurement.milliseconds:.2f}×")
        if measurement.temporary_bytes is not None:
            mebibytes = measurement.temporary_bytes / 2**20
            parts.append(f"{mebibytes:.0f} MiB" if mebibytes >= 10 else f"{mebibytes:.2g} MiB")
        return ", ".join(parts)


@dataclasses.dataclass
class Run:
    """The record of a run."""

    environment: dict[str, Any]
    """The device and the versions of all libraries involved."""
    copy_terabytes_per_second: float
    is_quick: bool = False
    is_complete: bool = False
    seconds: float = 0.0
    cases: list[CaseRecord] = dataclasses.field(default_factory=list)

    def save(self, path: Path) -> None:
        _replace(path, self)

    def ops(self) -> list[str]:
        return list(dict.fromkeys(case.op for case in self.cases))

    def of_op(self, op: str) -> list[CaseRecord]:
        return [case for case in self.cases if case.op == op]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The time of one sampled call with this package and in plain JAX."""

    function: str
    """The function and its variant."""
    dtype: str
    sizes: str
    what: str
    """:data:`FORWARD` or :data:`WITH_GRADIENT`."""
    kernels: list[str]
    """This package's kernels in the compiled program; empty if XLA computes everything."""
    milliseconds: float
    xla_milliseconds: float

    @property
    def ratio(self) -> float:
        """Plain JAX's time divided by ours."""
        return self.xla_milliseconds / self.milliseconds

    def __str__(self) -> str:
        return (
            f"{self.ratio:.2f}: {self.function}, {self.dtype}, {self.sizes}, {self.what}: {self.milliseconds:.4f} ms, "
            f"plain JAX {self.xla_milliseconds:.4f} ({', '.join(self.kernels) or 'no kernel'})"
        )


@dataclasses.dataclass
class GridRun:
    """The record of a random sample of calls."""

    environment: dict[str, Any]
    seed: int
    sampled_calls: int
    """The requested number of calls, in random order."""
    timed_calls: int = 0
    """The number of calls, from the start of that order, that fit in the time and could run."""
    seconds: float = 0.0
    ratios: list[Ratio] = dataclasses.field(default_factory=list)

    def save(self, path: Path) -> None:
        _replace(path, self)

    def by_function(self) -> dict[str, list[Ratio]]:
        """The ratios of each function, all variants together, in alphabetical order."""
        functions: dict[str, list[Ratio]] = {}
        for ratio in sorted(self.ratios, key=lambda ratio: ratio.function.split(",")[0]):
            functions.setdefault(ratio.function.split(",")[0], []).append(ratio)
        return functions


def _replace(path: Path, record: Run | GridRun) -> None:
    """Replaces the file atomically, so that an interruption leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n")
    temporary.replace(path)


def others(cases: Iterable[CaseRecord]) -> list[str]:
    """The libraries beside this package and XLA."""
    libraries = dict.fromkeys(m.library for case in cases for m in case.measurements if not m.is_unsupported)
    return [library for library in libraries if library not in (OURS, XLA)]


def load(path: Path) -> Run | GridRun:
    """
    Raises:
      ValueError: the file is not a record of cases or of sampled calls.
    """
    content = json.loads(path.read_text())
    if "ratios" in content:
        return GridRun(**{**content, "ratios": [Ratio(**ratio) for ratio in content["ratios"]]})
    if "cases" not in content:
        raise ValueError(f"{path}: expected a record with cases or with ratios, got one with {', '.join(content)}")
    cases = [
        CaseRecord(**{**case, "measurements": [Measurement(**m) for m in case["measurements"]]})
        for case in content.pop("cases")
    ]
    return Run(**content, cases=cases)


def mean_over(cases: Sequence[CaseRecord], value: Callable[[CaseRecord], float | None]) -> float | None:
    """Geometric mean of a value over the cases where it is not None."""
    values = [v for v in map(value, cases) if v is not None]
    return statistics.geometric_mean(values) if values else None


def distribution(ratios: Sequence[Ratio]) -> tuple[float, float, int]:
    """The median, the 5% quantile, and the number of ratios below :data:`LOWEST_RATIO`."""
    values = [ratio.ratio for ratio in ratios]
    return statistics.median(values), float(np.quantile(values, 0.05)), sum(x < LOWEST_RATIO for x in values)


def milliseconds_text(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"
