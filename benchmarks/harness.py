"""Cases, their contenders, and how they are timed."""

from __future__ import annotations

import abc
import dataclasses
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

# Leaves GPU memory for the other libraries of the same run.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.55")
# On CPUs, idle torch threads must not spin while another library is timed.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jax_baracuda  # noqa: E402
from benchmarks.record import (  # noqa: E402
    NO_KERNEL,
    OURS,
    TORCH_PEERS,
    UNSUPPORTED,
    CaseDescription,
    CaseRecord,
    Measurement,
)

try:
    import torch
except ImportError:
    torch = None


def torch_is_usable() -> bool:
    """Whether torch is installed and sees the device that JAX uses."""
    return torch is not None and (jax.default_backend() == "cpu" or torch.cuda.is_available())


class UnsupportedError(Exception):
    """A library does not offer what a case asks for."""


class Contender(abc.ABC):
    """One library's way to compute a case, bound to its operands."""

    temporary_bytes: int | None = None
    """Peak memory beside operands and results, if the library reports it; known after the first call."""

    def __init__(self, library: str, formulation: str, repetitions: int = 1, tolerance: float = 0.0):
        self.library = library
        self.formulation = formulation
        self.repetitions = repetitions
        """The number of times that one call computes the case."""
        self.tolerance = tolerance
        """As :attr:`Case.tolerance`, if this contender may differ more than others."""

    def prepare(self) -> None:  # noqa: B027
        """Compiles. Contenders prepare concurrently, each in its own thread."""

    def warm_up(self) -> None:  # noqa: B027
        """Other work before the first call. Nothing else runs at the same time."""

    @abc.abstractmethod
    def enqueue(self) -> Any:
        """Starts one call and returns its results."""

    @abc.abstractmethod
    def wait(self, results: Any) -> None:
        """Waits until `results` are ready."""

    @abc.abstractmethod
    def first_call(self) -> list[jax.Array]:
        """Warms up and returns the results."""


class JaxContender(Contender):
    """A function of JAX arrays, compiled ahead of the timing."""

    def __init__(
        self,
        library: str,
        formulation: str,
        function: Callable[..., Any],
        *operands: jax.Array | None,
        repetitions: int = 1,
        tolerance: float = 0.0,
        carries_first: bool = False,
    ):
        """
        Args:
          carries_first: the first operand is donated, and the first result becomes the first operand of the next call.
        """
        super().__init__(library, formulation, repetitions, tolerance)
        self._function, self._operands = function, operands
        self._carries_first = carries_first

    def prepare(self) -> None:
        donated = (0,) if self._carries_first else ()
        self._compiled = jax.jit(self._function, donate_argnums=donated).lower(*self._operands).compile()
        if self.library == OURS and f'"{OURS}.' not in self._compiled.as_text():
            self.formulation = ", ".join(filter(None, (self.formulation, NO_KERNEL)))
        analysis = self._compiled.memory_analysis()
        self.temporary_bytes = None if analysis is None else int(analysis.temp_size_in_bytes)

    def enqueue(self) -> Any:
        results = self._compiled(*self._operands)
        if not self._carries_first:
            return results
        first, results = results
        self._operands = (first, *self._operands[1:])
        return results

    def wait(self, results: Any) -> None:
        jax.block_until_ready(results)

    def first_call(self) -> list[jax.Array]:
        return jax.tree.leaves(jax.block_until_ready(self.enqueue()))


class TorchContender(Contender):
    """A function of torch tensors. With cotangents, the gradients of all operands are computed, too."""

    def __init__(
        self,
        library: str,
        formulation: str,
        function: Callable[..., Any],
        *operands: Any,
        cotangent: Any = None,
        compiles: bool = False,
        writes_to_operands: bool = False,
        repetitions: int = 1,
    ):
        """
        Args:
          cotangent: the cotangent of the result, or a tuple with one for each result.
          compiles: the first call compiles or tunes a kernel.
          writes_to_operands: the function writes to its operands, or its gradient to the cotangents: they get copies.
        """
        super().__init__(library, formulation, repetitions)
        self._function, self._operands = function, operands
        self._cotangents = () if cotangent is None else _as_tuple(cotangent)
        self._compiles = compiles
        self._originals = (*self._operands, *self._cotangents) if writes_to_operands else ()
        self._is_on_gpu = operands[0].is_cuda

    def prepare(self) -> None:
        if self._originals:
            copies = [x.clone() for x in self._originals]
            self._operands = copies[: len(self._operands)]
            self._cotangents = tuple(copies[len(self._operands) :])

    def warm_up(self) -> None:
        if self._compiles:
            self.wait(self.enqueue())

    def enqueue(self) -> Any:
        if not self._cotangents:
            with torch.no_grad():
                return _as_tuple(self._function(*self._operands))
        leaves = [operand.detach().requires_grad_() for operand in self._operands]
        outputs = _as_tuple(self._function(*leaves))
        return *(output.detach() for output in outputs), *torch.autograd.grad(outputs, leaves, self._cotangents)

    def wait(self, results: Any) -> None:
        if self._is_on_gpu:
            torch.cuda.synchronize()

    def first_call(self) -> list[jax.Array]:
        for own, original in zip((*self._operands, *self._cotangents), self._originals, strict=False):
            own.copy_(original)
        if self._is_on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
        results = self.enqueue()
        self.wait(results)
        if self._is_on_gpu:
            result_bytes = sum(x.numel() * x.element_size() for x in results)
            self.temporary_bytes = max(0, torch.cuda.max_memory_allocated() - allocated - result_bytes)
        # Integers come as int64, which JAX supports only if 64-bit types are enabled.
        return [jnp.from_dlpack(x.contiguous() if x.is_floating_point() else x.int()) for x in results]


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


class TorchGraphContender(TorchContender):
    """A function of torch tensors whose launches are recorded once in a CUDA graph, to exclude the cost of Python."""

    def warm_up(self) -> None:
        self.wait(super().enqueue())
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._results = super().enqueue()

    def enqueue(self) -> Any:
        self._graph.replay()
        return self._results

    def first_call(self) -> list[jax.Array]:
        results = super().first_call()
        self.temporary_bytes = None  # The graph has allocated its memory before.
        return results


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to time. A slow contender is called less often."""

    samples: int = 5
    seconds_per_sample: float = 0.04
    seconds_per_contender: float = 0.2
    patience: float = 1.0
    """If the first call takes longer than this many seconds, it is the time estimate; else two more calls are."""


@dataclasses.dataclass(frozen=True)
class Case(CaseDescription):
    """A case, its contenders, and how to compare and time them."""

    make_contenders: Callable[[], Iterable[Contender]]
    """This package's contender comes first. The data is made here, too, so cases that are not run cost nothing."""
    tolerance: float
    """Largest sum of absolute differences from this package's result, relative to the sum of its magnitudes."""
    effort: Effort = Effort()


BRIEF = Effort(samples=3, seconds_per_contender=0.12)
QUICK = Effort(samples=3, seconds_per_sample=0.002, seconds_per_contender=0.05)


def with_gradient(function: Callable[..., Any], num_differentiated: int = 1) -> Callable[..., tuple[Any, ...]]:
    """The results of `function`, and the gradients of its first operands. The last operand is the cotangent."""

    def run(*operands: Any) -> tuple[Any, ...]:
        *operands, cotangent = operands
        first, others = operands[:num_differentiated], operands[num_differentiated:]
        results, vjp = jax.vjp(lambda *first: function(*first, *others), *first)
        return results, *vjp(cotangent)

    return run


def measure(case: Case, copy_bandwidth: float, effort: Effort) -> CaseRecord:
    """Compiles, checks and times every contender of a case; samples of the contenders alternate."""
    _free()
    contenders = list(case.make_contenders())
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        prepared = [pool.submit(contender.prepare) for contender in contenders]
    measurements = [Measurement(c.library, c.formulation) for c in contenders]
    first_seconds: dict[int, float] = {}
    expected = None
    for index, (contender, measurement) in enumerate(zip(contenders, measurements, strict=True)):
        try:
            prepared[index].result()
            contender.warm_up()
            start = time.perf_counter()
            results = contender.first_call()
            seconds = time.perf_counter() - start
            expected = results if expected is None else expected
            measurement.disagreement = largest_disagreement(expected, results)
            measurement.temporary_bytes = contender.temporary_bytes
        except Exception as error:  # Record the failure of a contender and go on with the others.
            measurement.failure = summary_of(error)
        else:
            if measurement.disagreement <= max(case.tolerance, contender.tolerance):
                first_seconds[index] = seconds
            else:
                measurement.failure = f"MISMATCH: differs by {measurement.disagreement:.2g} of the magnitude"
        results = None
    del expected
    samples = sample([contenders[i] for i in first_seconds], list(first_seconds.values()), effort)
    for index, seconds_per_call in zip(first_seconds, samples, strict=True):
        seconds = [of_call / contenders[index].repetitions for of_call in seconds_per_call]
        median = statistics.median(seconds)
        measurement = measurements[index]
        measurement.milliseconds = median * 1e3
        measurement.spread = (max(seconds) - min(seconds)) / median
        measurement.samples = len(seconds)
        measurement.fraction_of_copy = case.floor_bytes / median / copy_bandwidth
    return CaseRecord(case.op, case.size, case.variant, case.what, case.floor_bytes, measurements)


def sample(contenders: Sequence[Contender], first_seconds: Sequence[float], effort: Effort) -> list[list[float]]:
    """Seconds per call of each contender, several times. Contenders alternate, so that noise affects all alike."""
    seconds: list[list[float]] = []
    plans = []
    for contender, first in zip(contenders, first_seconds, strict=True):
        once = first if first > effort.patience else min(_seconds_per_call(contender, 1) for _ in range(2))
        calls = max(1, int(effort.seconds_per_sample / once))
        plans.append((calls, max(1, min(effort.samples, int(effort.seconds_per_contender / (calls * once))))))
        seconds.append([once] if calls == 1 else [])
    for _ in range(effort.samples):
        for contender, (calls, wanted), of_contender in zip(contenders, plans, seconds, strict=True):
            if len(of_contender) < wanted:
                of_contender.append(_seconds_per_call(contender, calls))
    return seconds


def _seconds_per_call(contender: Contender, calls: int) -> float:
    """The mean over some calls. On a GPU, it waits once after all calls, to amortise the cost of waiting. On a CPU, it
    waits for each call, because otherwise they would run concurrently."""
    waits_for_each = jax.default_backend() == "cpu"
    start = time.perf_counter()
    for _ in range(calls):
        results = contender.enqueue()
        if waits_for_each:
            contender.wait(results)
            del results
    if not waits_for_each:
        contender.wait(results)
    return (time.perf_counter() - start) / calls


def largest_disagreement(expected: Sequence[jax.Array], actual: Sequence[jax.Array]) -> float:
    # JSON has no infinity.
    return min(1e30, max(float(_disagreement(e, a)) for e, a in zip(expected, actual, strict=True)))


@jax.jit
def _disagreement(expected: jax.Array, actual: jax.Array) -> jax.Array:
    """Sum of the differences relative to the sum of the magnitudes. Elements that are expected to be infinite (empty
    segments) are excluded, because libraries fill them differently."""
    counts = jnp.isfinite(expected)
    expected, actual = (jnp.where(counts, x, 0).astype(jnp.float32) for x in (expected, actual))
    # A NaN must count as a mismatch, and comparisons with NaN are false.
    difference = jnp.nan_to_num(jnp.abs(expected - actual), nan=jnp.inf)
    return jnp.sum(difference) / jnp.maximum(jnp.sum(jnp.abs(expected)), jnp.finfo(jnp.float32).tiny)


def summary_of(error: Exception) -> str:
    text = str(error)
    if isinstance(error, UnsupportedError):
        return f"{UNSUPPORTED}: {text}"
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return "out of memory"
    return f"{type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"


def _free() -> None:
    """Frees the memory that torch caches. JAX has preallocated its own share."""
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def copy_bytes_per_second() -> float:
    """Bandwidth of a large copy within the device's memory: bytes read plus bytes written."""
    if jax.default_backend() == "cpu":
        return _cpu_copy_bytes_per_second()
    copy = JaxContender("XLA", "copy", jnp.copy, jnp.arange(1 << 29, dtype=jnp.float32))
    copy.prepare()
    [result] = copy.first_call()
    [seconds] = sample([copy], [0.0], Effort(seconds_per_sample=0.05))
    return 2 * result.nbytes / statistics.median(seconds)


def _cpu_copy_bytes_per_second() -> float:
    """Copies between existing arrays, because new arrays also cost page faults. One thread per core."""
    source = np.ones(1 << 27, np.float32)
    target = np.zeros_like(source)
    cores = os.cpu_count() or 1
    parts = list(zip(np.array_split(target, cores), np.array_split(source, cores), strict=True))
    seconds = []
    with ThreadPoolExecutor(max_workers=cores) as pool:
        for _ in range(7):
            start = time.perf_counter()
            list(pool.map(lambda part: np.copyto(*part), parts))
            seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds)


def environment() -> dict[str, Any]:
    """The device, and the versions of all libraries involved."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform == "gpu" else _cpu_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "platform": device.client.platform_version.replace("\n", ", "),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "jax_baracuda": jax_baracuda.__version__,
        "torch": _version("torch"),
        "torch_cuda": None if torch is None else torch.version.cuda,
        **{name: _version(name) for name in TORCH_PEERS},
        "commit": os.environ.get("BENCHMARK_COMMIT") or _commit(),
    }


def _commit() -> str | None:
    folder = str(Path(__file__).parent)
    return _output("git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


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
        module = __import__(package)
    except ImportError:
        return None
    if hasattr(module, "__version__"):
        return module.__version__
    distributions = metadata.packages_distributions().get(package, [])
    return metadata.version(distributions[0]) if distributions else None
