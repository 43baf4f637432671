"""Prints a record as Markdown tables: ``python -m benchmarks.tables benchmarks/results/gpu.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import (
    FORWARD,
    LOWEST_RATIO,
    OURS,
    PROGRAMS,
    TORCH_PEERS,
    WITH_GRADIENT,
    XLA,
    CaseRecord,
    GridRun,
    Run,
    distribution,
    load,
    mean_over,
    milliseconds_text,
    others,
)
from jax_baracuda._tools.command_line import parser_of, run


def markdown(run: Run, only: str = "") -> str:
    """An overview, and for each op a table of the cases whose name contains `only`."""
    parts = [header(run), overview(run)]
    for op in run.ops():
        if cases := [case for case in run.of_op(op) if only in case.name]:
            parts += [f"### {op}", summary(cases), (programs if op == PROGRAMS else table)(cases)]
    return "\n\n".join(parts)


def header(run: Run) -> str:
    names = ("jax_baracuda", "driver", "jax", "torch", *TORCH_PEERS)
    versions = ", ".join(f"{name} {run.environment[name]}" for name in names if run.environment.get(name))
    text = f"{run.environment['device']}, {versions}, copy {run.copy_terabytes_per_second:.3g} TB/s"
    return (
        text + (" (quick run: no real sizes)" if run.is_quick else "") + ("" if run.is_complete else " (interrupted)")
    )


def grid_table(run: GridRun) -> str:
    """The distribution of the ratios: a row for all functions together, and one per function."""
    rows = [["function", "ratios", "median", "a twentieth below", f"below {LOWEST_RATIO}"]]
    for name, ratios in [("all", run.ratios), *run.by_function().items()]:
        median, twentieth, below = distribution(ratios)
        rows.append([name, str(len(ratios)), f"{median:.2f}", f"{twentieth:.2f}", str(below)])
    text = (
        f"{run.environment['device']}, jax {run.environment['jax']}: {run.timed_calls} calls of a random sample (seed "
        f"{run.seed}), forward and with gradient; time of plain JAX / time of this package"
    )
    return f"{text}\n\n{_markdown_table(rows)}"


def overview(run: Run) -> str:
    """One row per op: geometric means over its cases of the fraction of a copy and of the speed-ups."""
    libraries = others(run.cases)
    peers = [("XLA", (XLA,)), *([(" / ".join(libraries), tuple(libraries))] if libraries else [])]
    rows = [["op", "", "cases", "of copy", *(f"speed-up over {name}" for name, _ in peers)]]
    for op in run.ops():
        for what in (FORWARD, WITH_GRADIENT):
            if cases := [case for case in run.of_op(op) if case.what == what]:
                of_copy = mean_over(cases, lambda case: (ours := case.fastest(OURS)) and ours.fraction_of_copy)
                speed_ups = [mean_over(cases, lambda case, names=names: case.speed_up(*names)) for _, names in peers]
                of_copy = None if op == PROGRAMS else of_copy
                cells = [_number(of_copy, "{:.2f}"), *(_number(speed_up, "{:.1f}×") for speed_up in speed_ups)]
                rows.append([op, what, str(len(cases)), *cells])
    return _markdown_table(rows)


def summary(cases: Sequence[CaseRecord]) -> str:
    """The geometric mean of the speed-up over XLA, forward and with gradient."""
    parts = []
    for what in (FORWARD, WITH_GRADIENT):
        of_what = [case for case in cases if case.what == what and case.speed_up(XLA) is not None]
        if of_what:
            speed_up = mean_over(of_what, lambda case: case.speed_up(XLA))
            parts.append(f"{what} {speed_up:.1f}× ({len(of_what)} {'case' if len(of_what) == 1 else 'cases'})")
    return f"Speed-up over XLA, geometric mean: {', '.join(parts)}." if parts else "No comparison with XLA."


def table(cases: Sequence[CaseRecord]) -> str:
    """One row per size and variant: milliseconds of each library's fastest formulation, forward / forward + gradient,
    and this package's fraction of a copy. The fastest time is bold."""
    libraries = list(dict.fromkeys(m.library for case in cases for m in case.measurements if not m.is_unsupported))
    whats = dict.fromkeys(case.what for case in cases)
    rows = [[f"milliseconds {' / '.join(whats)}", *libraries, "of copy"]]
    alike: dict[tuple[str, str], list[CaseRecord]] = {}
    for case in cases:
        alike.setdefault((case.size, case.variant), []).append(case)
    for (size, variant), of_row in alike.items():
        cells = [[_cell(case, library) for case in of_row] for library in libraries]
        cells.append([_number((ours := case.fastest(OURS)) and ours.fraction_of_copy, "{:.2f}") for case in of_row])
        rows.append(
            [f"{size}, {variant}", *(" / ".join(text or "–" for text in cell) if any(cell) else "" for cell in cells)]
        )
    return _markdown_table(rows)


def programs(cases: Sequence[CaseRecord]) -> str:
    """One row per program: :meth:`CaseRecord.time_and_memory` of each contender."""
    labels = list(dict.fromkeys(m.label for case in cases for m in case.measurements))
    rows = [["milliseconds, speed-up over XLA, memory beside operands and results", *labels]]
    for case in cases:
        texts = {m.label: case.time_and_memory(m) for m in case.measurements}
        rows.append([f"{case.size}, {case.variant}", *(texts.get(label, "") for label in labels)])
    return _markdown_table(rows)


def formulations(cases: Sequence[CaseRecord], library: str = XLA) -> str:
    """How often each formulation of a library was its fastest, as text."""
    names = [m.formulation for case in cases if (m := case.fastest(library)) is not None]
    counts = sorted(((names.count(name), name) for name in set(names)), reverse=True)
    return ", ".join(f"{name} {count}×" for count, name in counts)


def _cell(case: CaseRecord, library: str) -> str:
    measurement = case.fastest(library)
    if measurement is None:
        return "failed" if any(m.library == library and not m.is_unsupported for m in case.measurements) else ""
    text = milliseconds_text(measurement.milliseconds)
    return f"**{text}**" if measurement is case.fastest(*case.libraries()) else text


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    heading, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *body))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit status."""
    parser = parser_of("benchmarks.tables", __doc__, {0: "the tables were printed"})
    parser.add_argument("record", type=Path)
    parser.add_argument("--only", default="", help="detail only cases whose name contains this text")
    parser.add_argument("--formulations", action="store_true", help="say which of XLA's formulations were the fastest")
    options = parser.parse_args(arguments)
    try:
        record = load(options.record)
    except ValueError as error:
        parser.error(str(error))
    if isinstance(record, GridRun):
        print(grid_table(record))
        return 0
    print(markdown(record, options.only))
    if options.formulations:
        print("\n" + "\n".join(f"{op}: {formulations(record.of_op(op))}" for op in record.ops()))
    return 0


if __name__ == "__main__":
    run(main)
