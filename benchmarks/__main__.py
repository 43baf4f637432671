"""Runs the benchmarks on the default device, prints each case and writes a JSON record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import jax

from benchmarks import (
    causal_conv1d,
    decoding,
    graph,
    grid,
    programs,
    rope,
    rope_write,
    segment,
    serving,
    state_pools,
    where,
    write_rows,
    write_slice,
)
from benchmarks.harness import QUICK, Case, copy_bytes_per_second, environment, measure, summary_of
from benchmarks.record import OURS, PROGRAMS, RESULTS, XLA, CaseRecord, Measurement, Run, milliseconds_text
from jax_baracuda._tools.command_line import INTERRUPTED, output_file, parser_of, run
from jax_baracuda._tools.platforms import default_devices, require_kernels
from jax_baracuda._tools.progress import Progress

FAMILIES = (
    segment,
    graph,
    causal_conv1d,
    state_pools,
    rope,
    where,
    write_slice,
    write_rows,
    rope_write,
    programs,
    decoding,
    serving,
)
"""Modules with a function ``cases(backend, quick)`` that yields :class:`Case`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status. An interrupted run records the cases measured so far."""
    statuses = {0: "all cases were measured", 1: "this package failed, or XLA computed something else"}
    parser = parser_of("benchmarks", __doc__, statuses)
    parser.add_argument(
        "--output",
        type=output_file,
        help=f"the JSON record (default: cpu.json or gpu.json in {RESULTS} if all cases are run in full)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="run only cases whose name contains one of these texts, or the random sample of calls: grid",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few samples, to see that everything runs")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    options = parser.parse_args(arguments)
    backend = default_devices()[0].platform
    if options.only == ["grid"] and not options.list:
        return grid.main(
            [
                *(["--output", str(options.output)] if options.output else []),
                *(["--cases", "20"] if options.quick else []),
            ]
        )
    cases = list(select_cases(backend, options.only, options.quick))
    if not cases:
        parser.error(f"no case on {backend} has a name with {' or '.join(options.only)}: see --list")
    if options.list:
        for case in cases:
            print(case.name)
        return 0
    require_kernels(default_devices()[0])
    output = options.output or (None if options.only or options.quick else RESULTS / f"{backend}.json")

    progress = Progress()
    say = progress.print
    bandwidth = copy_bytes_per_second()
    say(f"{len(cases)} cases; copy: {bandwidth / 1e12:.3f} TB/s on {jax.devices()[0].device_kind}")
    run = Run(environment(), bandwidth / 1e12, options.quick)
    start = time.perf_counter()
    is_serious, failures = False, []
    try:
        for case in progress.track(cases, len(cases), lambda case: case.name):
            try:
                result = measure(case, bandwidth, QUICK if options.quick else case.effort)
            except Exception as error:  # One case that cannot be set up must not end the run.
                result = CaseRecord(case.op, case.size, case.variant, case.what, case.floor_bytes, [])
                result.measurements.append(Measurement(OURS, "", failure=summary_of(error)))
            run.cases.append(result)
            run.is_complete = len(run.cases) == len(cases)
            run.seconds = round(time.perf_counter() - start, 1)
            if output is not None:
                run.save(output)
            say(f"{case.name}\n    {describe(result)}")
            for m in result.measurements:
                if m.failure is not None and not m.is_unsupported:
                    failures.append(f"{case.name}: {m.label}: {m.failure}")
                    say(f"!!! {failures[-1]}")
                    # If XLA disagrees, the result is in doubt. If only a peer disagrees, the peer is wrong.
                    is_serious |= m.library == OURS or (m.library == XLA and m.disagreement is not None)
    except KeyboardInterrupt:
        say(f"interrupted after {len(run.cases)} of {len(cases)} cases")
    if failures:
        say("\n    ".join(["Failed:", *failures]))
    say(f"{run.seconds:.0f} s" + (f", wrote {output}" if output is not None else ", no record written"))
    if not run.is_complete:
        return INTERRUPTED
    return 1 if is_serious else 0


def select_cases(backend: str, only: Sequence[str] = (), quick: bool = False) -> Iterator[Case]:
    """The cases of all families, or only those whose name contains one of the texts in `only`."""
    all_cases = (case for family in FAMILIES for case in family.cases(backend, quick))
    return (case for case in all_cases if not only or any(text in case.name for text in only))


def describe(case: CaseRecord) -> str:
    """One line: each library's fastest time, its formulation and its fraction of the copy bandwidth. For a program:
    each contender's time and memory."""
    if case.op == PROGRAMS:
        return "   ".join(f"{m.label} {case.time_and_memory(m)}" for m in case.measurements)
    fastest = filter(None, (case.fastest(library) for library in case.libraries()))
    return "   ".join(
        f"{m.label} {milliseconds_text(m.milliseconds)} ms = {m.fraction_of_copy:.2f} of copy" for m in fastest
    )


if __name__ == "__main__":
    run(main)
