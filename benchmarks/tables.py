"""Prints a record as a Markdown table: ``python -m benchmarks.tables benchmarks/results/gpu.json``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def markdown(record: dict[str, Any]) -> str:
    """One row per case; milliseconds of each library, the fastest in bold, and this package's fraction of a copy."""
    measurements = record["measurements"]
    libraries = list(dict.fromkeys(m["library"] for m in measurements))
    cases = dict.fromkeys((m["case"], m["what"]) for m in measurements)
    rows = [["case", "", *libraries, "fraction of copy"], ["---"] * (len(libraries) + 3)]
    for case, what in cases:
        of_case = {m["library"]: m for m in measurements if (m["case"], m["what"]) == (case, what)}
        fastest = min(m["milliseconds"] for m in of_case.values())
        cells = []
        for library in libraries:
            if library not in of_case:
                cells.append("")
                continue
            milliseconds = of_case[library]["milliseconds"]
            text = f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"
            cells.append(f"**{text}**" if milliseconds == fastest else text)
        rows.append([case, what, *cells, f"{of_case['jax_baracuda']['fraction_of_copy']:.2f}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("record", type=Path)
    record = json.loads(parser.parse_args().record.read_text())
    print(f"{record['device']}, jax {record['jax']}, copy {record['copy_terabytes_per_second']:.3g} TB/s\n")
    print(markdown(record))


if __name__ == "__main__":
    main()
