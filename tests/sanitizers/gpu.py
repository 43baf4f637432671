"""Runs programs of the matrix that reach every strategy of the CUDA kernels, for compute-sanitizer to watch:

    for tool in memcheck racecheck synccheck; do
      compute-sanitizer --tool $tool --error-exitcode 1 python tests/sanitizers/gpu.py
    done

Every array has its own allocation, so memcheck sees each access outside an array. XLA's pool would hide such accesses.
The arguments choose families of ops ("segment", "rope", ...). Finding the programs takes a minute or two:
``--programs FILE`` keeps them for the next run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cuda"
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
# Every program is cached if JAX_COMPILATION_CACHE_DIR is set.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Compiling takes most of the time, so XLA does not autotune. Command buffers are off, because they hide launches.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
)
sys.path.insert(0, str(Path(__file__).parent.parent))

from support.matrix.calls import FAMILIES  # noqa: E402  (after the environment is set)
from support.matrix.generator import Case  # noqa: E402
from support.matrix.run import Compiled  # noqa: E402
from support.matrix.strategies import BATCH_SIZE, covering  # noqa: E402


def read(path: Path) -> Iterator[Case]:
    for fields in json.loads(path.read_text()):
        yield Case(**{**fields, "options": tuple(map(tuple, fields["options"]))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"some of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--programs", type=Path, help="a file that keeps the list of programs; written where it is not")
    arguments = parser.parse_args()
    families = arguments.families or FAMILIES
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"there is no family {' or '.join(sorted(unknown))}, but {', '.join(FAMILIES)}")
    if arguments.programs and arguments.programs.exists():
        programs = list(read(arguments.programs))
    else:
        programs = [case for family in families for case in covering(family, ["cuda"])[0]]
        if arguments.programs:
            arguments.programs.write_text(json.dumps([dataclasses.asdict(case) for case in programs]))
    for case in programs:
        print(case, flush=True)
        compiled = Compiled(case, BATCH_SIZE)
        compiled.results(compiled.draw(0))


if __name__ == "__main__":
    main()
