"""Runs all benchmarks on the default device, prints a table and writes a JSON record."""

from __future__ import annotations

import argparse
from pathlib import Path

import jax

from benchmarks import segment
from benchmarks.harness import RESULTS, Measurement, copy_bytes_per_second, measure, save


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    default = RESULTS / f"{jax.default_backend()}.json"
    parser.add_argument("--output", type=Path, default=default, help="the JSON record (default: %(default)s)")
    parser.add_argument("--only", default="", help="run only cases whose name contains this text")
    options = parser.parse_args()
    bandwidth = copy_bytes_per_second()
    print(f"copy: {bandwidth / 1e12:.3f} TB/s on {jax.devices()[0].device_kind}", flush=True)

    def report(m: Measurement) -> None:
        temporary = "" if m.temporary_bytes is None else f"  temporary {m.temporary_bytes / 2**20:,.0f} MiB"
        print(
            f"{m.case:44} {m.what:19} {m.library:18} {m.milliseconds:9.3f} ms  {m.fraction_of_copy:5.2f} of copy  "
            f"+-{m.spread / 2:.0%}{temporary}",
            flush=True,
        )

    measurements = measure((case for case in segment.cases() if options.only in case.name), bandwidth, report)
    save(measurements, bandwidth, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
