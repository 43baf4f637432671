"""Runs pytest with the CPU module that a sanitizer instruments (``make sanitize`` builds it).

    python tests/sanitizers/cpu.py build/sanitize-address tests/sanitizers/workload.py
    python tests/sanitizers/cpu.py build/sanitize-thread tests/test_load.py -k rounds

The folder's name ends in the sanitizer's. Only that module is instrumented, neither Python nor XLA:

- address (and undefined behaviour): each array that XLA or a kernel allocates is guarded. The arrays inside a program
  share one allocation, so programs of a single op show the most. A finding ends the process.
- thread: the sanitizer does not see XLA's own synchronisation. ffi/core/thread_sanitizer.h tells it about this order.
  Calls of the standard library are ignored (`ignore_noninstrumented_modules`), so a report is about our code.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    # Python and XLA free little of their memory when they end.
    "address": {
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:strict_init_order=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    },
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=1:die_after_fork=0:history_size=5"},
}
# The sanitizer, not pytest, handles signals. Its report is not captured. All tests run in one process.
PYTEST = ["-m", "pytest", "-p", "no:faulthandler", "-p", "no:xdist", "-p", "no:cacheprovider", "--capture=sys"]


def library(name: str) -> str:
    """The path of a library that comes with the compiler."""
    compiler = os.environ.get("CXX", "g++")
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    path = path.strip()
    if not os.path.isabs(path):
        sys.exit(f"{compiler} has no {name}: install the sanitizers' runtimes, which come with GCC")
    return path


def command(arguments: list[str]) -> list[str]:
    """The pytest command, without address randomisation: ThreadSanitizer needs its address range free."""
    pytest = [sys.executable, *PYTEST, *arguments]
    setarch = shutil.which("setarch")
    if setarch and subprocess.run([setarch, "-R", "true"], capture_output=True, check=False).returncode == 0:
        return [setarch, platform.machine(), "-R", *pytest]
    return pytest


def run(folder: Path, arguments: list[str]) -> int:
    """Runs pytest in a process that starts with the sanitizer's runtime."""
    sanitizer = folder.name.rpartition("-")[2]
    if sanitizer not in RUNTIMES:
        sys.exit(f"{folder}: its name must end in one of {sorted(RUNTIMES)}")
    # The C++ library, too: a runtime that starts before this library does not see its exceptions.
    runtimes = [library(RUNTIMES[sanitizer]), library("libstdc++.so")]
    environment = os.environ | OPTIONS[sanitizer] | {"LD_PRELOAD": " ".join(runtimes), "JAX_PLATFORMS": "cpu"}
    environment["JAX_BARACUDA_INSTRUMENTED"] = str(folder.absolute())
    # The threads of XLA's pool, whatever the machine has.
    environment.setdefault("NPROC", "4")
    return subprocess.run(command(arguments), env=environment, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
