"""Draws a record: ``python -m benchmarks.plots benchmarks/results/gpu.json``, an SVG for each op and an overview, or
one of a random sample of calls.

Figures fit on a phone, and adapt to dark pages.
"""

from __future__ import annotations

import dataclasses
import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.artist import Artist  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from benchmarks.record import (  # noqa: E402
    FORWARD,
    LOWEST_RATIO,
    OURS,
    PROGRAMS,
    WITH_GRADIENT,
    XLA,
    CaseRecord,
    GridRun,
    Run,
    load,
    mean_over,
    milliseconds_text,
    others,
)
from jax_baracuda._tools.command_line import parser_of, run  # noqa: E402

# Okabe and Ito's palette, which is distinguishable for colour-blind readers and in greyscale.
COLORS = ("#0072b2", "#e69f00", "#999999")
TEXT, FAINT, GRID = "#222222", "#777777", "#e6e6e6"
DARK = {TEXT: "#d8d8d8", FAINT: "#a0a0a0", GRID: "#3a3a3a"}
"""The colours that take the place of others on a dark page."""
BAR = 0.26
"""Height of one bar, in units of the distance between rows."""
WIDTH = 4.8
LEFT = 1.42
"""Width of the panels' labels, in inches."""
INCHES_PER_ROW = 0.46
LINE = 0.19
"""Height of a line of text above the panels, in inches."""
RATIO_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
plt.rcParams.update(
    {
        "font.family": ["DejaVu Sans", "sans-serif"],
        "font.size": 8.5,
        "text.color": TEXT,
        "axes.labelcolor": TEXT,
        "axes.edgecolor": FAINT,
        "xtick.color": TEXT,
        "ytick.color": TEXT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "jax_baracuda",  # the same bytes in every run
    }
)

Contestant = tuple[str, tuple[str, ...]]
"""A label, and its libraries; the fastest of them counts."""


def contestants(cases: Sequence[CaseRecord]) -> list[Contestant]:
    libraries = others(cases)
    result = [(OURS, (OURS,)), ("the fastest of several formulations in plain JAX", (XLA,))]
    return result + ([(f"the fastest of {', '.join(libraries)}", tuple(libraries))] if libraries else [])


def draw_op(run: Run, op: str) -> Figure:
    """Every case of an op; forward on the left, with gradient on the right."""
    cases = run.of_op(op)
    by_name = {(case.size, case.variant, case.what): case for case in cases}
    rows: list[tuple[str, str]] = list(dict.fromkeys((case.size, case.variant) for case in cases))
    # A heading above the rows of each size takes most of a row.
    positions, headings, y = [], [], 0.0
    for index, (size, _) in enumerate(rows):
        if index == 0 or size != rows[index - 1][0]:
            headings.append((size, y))
            y += 0.8
        positions.append(y)
        y += 1
    whats = [what for what in (FORWARD, WITH_GRADIENT) if any(case.what == what for case in cases)]

    everyone = contestants(cases)
    figure, axes = _panels(run, everyone, f"Speed of {op}", "", whats, y)
    for panel, what in zip(axes, whats, strict=True):
        for (size, variant), position in zip(rows, positions, strict=True):
            case = by_name.get((size, variant, what))
            if case is not None:
                _bars(panel, everyone, position, lambda libraries, case=case: _value_and_text(case, libraries))
            else:
                panel.text(0.01, position, "not measured", color=FAINT, va="center", fontsize=7.5)
        panel.set_yticks(positions, [textwrap.fill(variant, 22) for _, variant in rows], fontsize=7.5)
    for size, position in headings:
        axes[0].annotate(
            size,
            (0, position + 0.1),
            xycoords=("axes fraction", "data"),
            xytext=(-(LEFT - 0.05) * 72, 0),
            textcoords="offset points",
            weight="bold",
            va="center",
        )
    _make_room_for_texts(axes)
    return figure


def draw_overview(run: Run) -> Figure:
    """Geometric means over the cases of each op in which all contestants take part, so that bars are comparable."""
    whats = [what for what in (FORWARD, WITH_GRADIENT) if any(case.what == what for case in run.cases)]
    ops = run.ops()
    everyone = contestants(run.cases)
    subtitle = "geometric means over its cases"
    figure, axes = _panels(run, everyone, "Mean speed of each function", subtitle, whats, len(ops) - 0.2)
    for panel, what in zip(axes, whats, strict=True):
        for position, op in enumerate(ops):
            of_what = [case for case in run.of_op(op) if case.what == what]

            def value_and_text(libraries: Sequence[str], cases: list[CaseRecord] = of_what) -> tuple[float, str]:
                common = [c for c in cases if all(c.fastest(*names) for _, names in everyone)]
                mean = mean_over(common, lambda common_case: common_case.fastest(*libraries).fraction_of_copy)
                return (0, "failed") if mean is None else (mean, f"{mean:.2f}")

            if of_what:
                _bars(panel, everyone, position, value_and_text)
            else:
                panel.text(0.01, position, "no gradient", color=FAINT, va="center", fontsize=7.5)
        panel.set_yticks(range(len(ops)), [op.replace(" ", "\n") for op in ops])
    _make_room_for_texts(axes)
    return figure


def draw_grid(run: GridRun) -> Figure:
    """The distribution of the ratios of sampled calls."""
    top, height = 4 * LINE + 0.2, 3.9
    figure, panel = plt.subplots(figsize=(WIDTH, height))
    figure.subplots_adjust(left=0.12, right=0.96, top=1 - top / height, bottom=0.5 / height)
    for what, color in zip((FORWARD, WITH_GRADIENT), COLORS, strict=False):
        ratios = sorted(ratio.ratio for ratio in run.ratios if ratio.what == what)
        if not ratios:
            continue
        edges = np.linspace(0, 100, len(ratios) + 1)
        slower = 100 * sum(ratio < LOWEST_RATIO for ratio in ratios) / len(ratios)
        label = f"{what}: median {np.median(ratios):.2f}, {slower:.0f}% of {len(ratios)} below {LOWEST_RATIO}"
        panel.stairs(ratios, edges, baseline=None, color=color, linewidth=2, label=label)
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    panel.set_ylim(min(low, 0.45), max(high, 2.2))
    ticks = [x for x in RATIO_TICKS if panel.get_ylim()[0] <= x <= panel.get_ylim()[1]]
    panel.set_yticks(ticks, [f"{x:g}×" for x in ticks])
    panel.minorticks_off()
    panel.set_xlim(0, 100)
    panel.xaxis.set_major_formatter("{x:.0f}%")
    panel.grid(color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.axhline(1, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
    panel.axhline(LOWEST_RATIO, color=FAINT, linewidth=1, linestyle=(0, (1, 2)), zorder=0.9)
    panel.set_xlabel("share of calls, from the least gain to the greatest", loc="right")
    handles, labels = panel.get_legend_handles_labels()
    _head(figure, "Times as fast as plain JAX", "a random sample of calls", run, handles, labels)
    return figure


def _head(
    figure: Figure,
    title: str,
    subtitle: str,
    run: Run | GridRun,
    handles: Sequence[Artist],
    labels: Sequence[str],
) -> None:
    """Above the panels: the title, what was measured and where, and a line of the legend for each label."""
    height = figure.get_figheight()
    device = f"{run.environment['device']}, jax {run.environment['jax']}"
    figure.text(0.01, 1 - 0.06 / height, title, weight="bold", fontsize=11, va="top")
    text = f"{device}: {subtitle}" if subtitle else device
    figure.text(0.01, 1 - (LINE + 0.09) / height, text, color=FAINT, va="top")
    place = (-0.005, 1 - (2 * LINE + 0.06) / height)
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=place, frameon=False, handlelength=1.2, labelspacing=0.25
    )


def _panels(
    run: Run, everyone: Sequence[Contestant], title: str, subtitle: str, whats: Sequence[str], height: float
) -> tuple[Figure, list[Axes]]:
    """An empty panel for each of `whats`, `height` rows high, with title and legend above."""
    top, bottom = (2 + len(everyone)) * LINE + 0.45, 0.5
    inches = height * INCHES_PER_ROW + top + bottom
    figure, axes = plt.subplots(1, len(whats), figsize=(WIDTH, inches), sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(left=LEFT / WIDTH, right=0.97, top=1 - top / inches, bottom=bottom / inches, wspace=0.08)
    panels = list(axes[0])
    for panel, what in zip(panels, whats, strict=True):
        panel.set_title(what, fontsize=9)
        panel.set_ylim(height - 0.4, -0.5)
        panel.axvline(1, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
        panel.grid(axis="x", color=GRID, linewidth=0.8)
        panel.set_axisbelow(True)
        panel.tick_params(axis="y", length=0)
    panels[-1].set_xlabel("fraction of a copy's speed (longer is better)", loc="right")
    handles = [Patch(color=color) for color in COLORS[: len(everyone)]]
    _head(figure, title, subtitle, run, handles, [label for label, _ in everyone])
    return figure, panels


def _make_room_for_texts(panels: Sequence[Axes]) -> None:
    panels[0].set_xlim(0, 1.3 * max(1.0, *(bar.get_width() for panel in panels for bar in panel.patches)))


def _bars(
    panel: Axes,
    everyone: Sequence[Contestant],
    position: float,
    value_and_text: Callable[[Sequence[str]], tuple[float, str]],
) -> None:
    """One bar per contestant around a position, its text at the end."""
    for index, ((_, libraries), color) in enumerate(zip(everyone, COLORS, strict=False)):
        y = position + (index - (len(everyone) - 1) / 2) * BAR
        value, text = value_and_text(libraries)
        panel.barh(y, value, height=BAR * 0.92, color=color)
        panel.annotate(text, (value, y), (2, 0), textcoords="offset points", va="center", fontsize=7)


def _value_and_text(case: CaseRecord, libraries: Sequence[str]) -> tuple[float, str]:
    measurement = case.fastest(*libraries)
    if measurement is None:
        has_failed = any(m.library in libraries and not m.is_unsupported for m in case.measurements)
        return 0, "failed" if has_failed else "none"
    return measurement.fraction_of_copy, f"{milliseconds_text(measurement.milliseconds)} ms"


def draw_cases(run: Run) -> dict[str, Figure]:
    """Figures by name: an overview of the ops, and each op."""
    of_ops = dataclasses.replace(run, cases=[case for case in run.cases if case.op != PROGRAMS])
    if not of_ops.cases:
        return {}
    return {"overview": draw_overview(of_ops), **{op: draw_op(of_ops, op) for op in of_ops.ops()}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the plots; returns the exit status."""
    parser = parser_of("benchmarks.plots", __doc__, {0: "the plots were drawn"})
    parser.add_argument("record", type=Path)
    parser.add_argument("--output", type=Path, help="the folder to write to (default: that of the record)")
    options = parser.parse_args(arguments)
    try:
        record = load(options.record)
    except ValueError as error:
        parser.error(str(error))
    figures = {"": draw_grid(record)} if isinstance(record, GridRun) else draw_cases(record)
    if not figures:
        parser.error("no case to draw")
    folder = options.output or options.record.parent
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        path = folder / f"{'_'.join([options.record.stem, *name.split()])}.svg"
        save(figure, path)
        plt.close(figure)
        print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
    return 0


def save(figure: Figure, path: Path) -> None:
    """Writes an SVG of one line without background, whose texts and lines follow the colours of the page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    rules = "".join(
        f'[style*="{name}: {light}"] {{{name}: {dark} !important}}'
        for light, dark in DARK.items()
        for name in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>"
    path.write_text(" ".join(text.getvalue().replace("<defs>", f"{style} <defs>", 1).split()) + "\n")


if __name__ == "__main__":
    run(main)
