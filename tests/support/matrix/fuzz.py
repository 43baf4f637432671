"""Runs random cases without end: ``make fuzz``, or ``PYTHONPATH=tests python -m support.matrix.fuzz --seconds 60``.

Several threads run different programs at once, each on several draws of data. A failure prints its recipe, and the
fuzz continues. The exit status is 1 if there was a failure, else 0.
"""

from __future__ import annotations

from support import matrix  # isort: skip  (sets the environment before JAX is loaded)

import argparse
import contextlib
import dataclasses
import functools
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable

import jax
import numpy as np
from support.matrix.calls import load_all
from support.matrix.generator import Case, space_of
from support.matrix.run import Compiled, num_devices

assert matrix

DRAWS = 4
"""The number of draws of data for each program."""


def random_case(rng: np.random.Generator, with_large: bool) -> Case:
    """A random op, and a random combination of all factors. Large sizes are rare, because they are slow."""
    ops = sorted(load_all())
    op = ops[rng.integers(len(ops))]
    return space_of(op, num_devices() > 1, with_large and rng.random() < 0.3).random(rng)


@dataclasses.dataclass
class Fuzz:
    """The state that the threads share."""

    seed: int
    max_cases: int | None
    deadline: float | None
    report: Callable[[str], None]
    with_large: bool
    draws: int = DRAWS
    num_started: int = 0
    num_cases: int = 0
    num_programs: int = 0
    failures: list[Case] = dataclasses.field(default_factory=list)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    large: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    """One large case at a time: several would not fit into the memory of a device."""

    def next_case(self) -> Case | None:
        with self.lock:
            is_late = self.deadline is not None and time.monotonic() > self.deadline
            if is_late or (self.max_cases is not None and self.num_started >= self.max_cases):
                return None
            number = self.num_started
            self.num_started += 1
            return random_case(np.random.default_rng([self.seed, number]), self.with_large)

    def work(self) -> None:
        while (case := self.next_case()) is not None:
            ran = 0
            try:
                is_large = case.size in case.call().large_sizes
                with self.large if is_large else contextlib.nullcontext():
                    compiled = Compiled(case)
                    for number in range(1 if is_large else self.draws):
                        compiled.check(number)
                        ran += 1
            except Exception as error:  # any error is a finding
                ran += 1
                with self.lock:
                    self.failures.append(case)
                what = "".join(traceback.format_exception_only(error)).strip()
                self.report(f"\n# FAILURE: {what[:2000]}\n{case.recipe()}")
            with self.lock:
                self.num_cases += ran
                self.num_programs += 1

    def run(self, threads: int, tick: Callable[[Fuzz], None] = lambda fuzz: None) -> None:
        workers = [threading.Thread(target=self.work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            time.sleep(0.1)
            tick(self)
        for worker in workers:
            worker.join()

    def summary(self) -> str:
        return f"{self.num_cases} cases, {self.num_programs} programs, {len(self.failures)} failures, seed {self.seed}"


def has_large_sizes() -> bool:
    """Whether to run large sizes, which are too slow on a CPU."""
    return jax.devices()[0].platform != "cpu"


def _summaries(every: float = 15) -> Callable[[Fuzz], None]:
    """A function that prints a summary, at most once in so many seconds."""
    last = [time.monotonic()]

    def tick(fuzz: Fuzz) -> None:
        if time.monotonic() - last[0] > every:
            last[0] = time.monotonic()
            print(fuzz.summary(), flush=True)

    return tick


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=None, help="how long to go on (default: 60)")
    parser.add_argument("--programs", type=int, default=None, help="how many programs to run instead")
    parser.add_argument("--seed", type=int, default=None, help="of all that is random (default: a random one)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draws", type=int, default=DRAWS, help="of data, for each program")
    arguments = parser.parse_args()
    seconds = 60 if arguments.seconds is None and arguments.programs is None else arguments.seconds
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.threads} threads, {num_devices()} {jax.devices()[0].platform} devices", flush=True)
    deadline = None if seconds is None else time.monotonic() + seconds
    report = functools.partial(print, flush=True)
    fuzz = Fuzz(seed, arguments.programs, deadline, report, has_large_sizes(), arguments.draws)
    fuzz.run(arguments.threads, _summaries())
    print(fuzz.summary(), flush=True)
    return 1 if fuzz.failures else 0


if __name__ == "__main__":
    sys.exit(main())
