"""Prints the contents of the wheels given as arguments. Fails if one bundles or needs a library that it should not.

Sizes of code for a GPU architecture are for unpacked code. The module has the code compressed.
"""

from __future__ import annotations

import collections
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SYSTEM_LIBRARIES = {f"lib{name}" for name in ("c.so.6", "dl.so.2", "gcc_s.so.1", "m.so.6", "pthread.so.0", "rt.so.1")}
LOADER = "ld-linux-x86-64.so.2"


def needed_libraries(module: Path) -> set[str]:
    """The shared libraries that a module needs."""
    dynamic = subprocess.run(["readelf", "--dynamic", module], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))


def bytes_by_architecture(module: Path) -> dict[str, int]:
    """Bytes of machine code (sm_90) and of PTX (compute_80) in a CUDA module, unpacked."""
    files = importlib.metadata.files("nvidia-cuda-cuobjdump") or []
    [cuobjdump] = [file.locate() for file in files if file.name == "cuobjdump"]
    sizes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for kind, prefix in (("elf", "sm"), ("ptx", "compute")):
            extract = [cuobjdump, f"--extract-{kind}", "all", module]
            subprocess.run(extract, cwd=folder, capture_output=True, check=True)
            for extracted in Path(folder).iterdir():
                [architecture] = re.findall(r"\.sm_(\d+\w*)\.", extracted.name)
                sizes[f"{prefix}_{architecture}"] += extracted.stat().st_size
                extracted.unlink()
    return dict(sizes)


def describe(wheel: Path) -> list[str]:
    """Prints the parts of a wheel, and returns its problems."""
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
    problems = []
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        for library in sorted(Path(folder).rglob("*.so*")):
            name = library.relative_to(folder)
            print(f"  {name}: {library.stat().st_size / 2**20:.1f} MiB")
            if name.parts[:2] != ("jax_baracuda", "_core"):
                problems.append(f"{wheel.name} bundles {name}")
            foreign = needed_libraries(library) - SYSTEM_LIBRARIES - {LOADER}
            problems += [f"{wheel.name}: {name} needs {each}" for each in sorted(foreign)]
            if library.name.startswith("_cuda."):
                for architecture, size in sorted(bytes_by_architecture(library).items()):
                    print(f"    {architecture}: {size / 2**20:.1f} MiB unpacked")
    return problems


if __name__ == "__main__":
    sys.exit("\n".join(problem for wheel in sys.argv[1:] for problem in describe(Path(wheel))) or None)
