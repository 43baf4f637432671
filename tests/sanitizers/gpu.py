"""Runs small cases of every op on a GPU, for compute-sanitizer to watch:

    for tool in memcheck racecheck synccheck; do
      compute-sanitizer --tool $tool --error-exitcode 1 python tests/sanitizers/gpu.py
    done

Every array is an allocation of its own, so that memcheck sees each access beside one; XLA's pool would hide them. The
arguments choose programs by what their names contain ("segment", "bfloat16", "rope_qk", ...); ``--list`` lists them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cuda"
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
# Every program is kept, where JAX_COMPILATION_CACHE_DIR says where.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Compiling takes most of the time: no trials of kernels of XLA's own, and no command buffers, which hide launches.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
)
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np  # noqa: E402  (after the environment is set)
from small_programs import middle_programs, other_programs, tiny_programs, unreached_strategies  # noqa: E402


def main(arguments: list[str]) -> None:
    rng = np.random.default_rng(0)
    programs = [*tiny_programs(rng), *middle_programs(rng), *other_programs(rng)]
    wanted = [name for name in arguments if name != "--list"]
    programs = [program for program in programs if not wanted or any(name in program.name for name in wanted)]
    if not programs:
        sys.exit(f"no program's name contains {' or '.join(wanted)}; --list lists them")
    with unreached_strategies() as unreached:
        for program in programs:
            print(program.name, flush=True)
            if "--list" not in arguments:
                program.results()
    print(f"{len(programs)} programs")
    if not arguments and unreached:
        sys.exit(f"no program reached {sorted(unreached)}")


if __name__ == "__main__":
    main(sys.argv[1:])
