"""Draws a record: ``python -m benchmarks.plots benchmarks/results/gpu.json``, one PNG per op and one overview, or
one PNG of a random sample of calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.patheffects import withStroke  # noqa: E402

from benchmarks.record import (  # noqa: E402
    FORWARD,
    LOWEST_RATIO,
    NO_KERNEL,
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
COLORS = ("#0072B2", "#E69F00", "#999999")
TEXT, FAINT = "#222222", "#777777"
BAR = 0.26
"""Height of one bar, in units of the distance between rows."""
INCHES_PER_ROW = 0.46
RATIO_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": "#BBBBBB",
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 130,
    "figure.facecolor": "white",
}

Contestant = tuple[str, tuple[str, ...]]
"""A label, and its libraries; the fastest of them counts."""


def contestants(cases: Sequence[CaseRecord]) -> list[Contestant]:
    libraries = others(cases)
    result = [(OURS, (OURS,)), ("XLA, fastest of several formulations", (XLA,))]
    return result + ([(f"{' / '.join(libraries)}, fastest", tuple(libraries))] if libraries else [])


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
    figure, axes = _panels(run, everyone, op, whats, y, left_inches=2.45)
    for panel, what in zip(axes, whats, strict=True):
        for (size, variant), position in zip(rows, positions, strict=True):
            case = by_name.get((size, variant, what))
            if case is not None:
                _bars(panel, everyone, position, lambda libraries, case=case: _value_and_text(case, libraries))
            else:
                panel.text(0.01, position, "not measured", color=FAINT, va="center", fontsize=8)
        panel.set_yticks(positions, [_variant_text(variant) for _, variant in rows])
    for size, position in headings:
        axes[0].annotate(
            size,
            (0, position + 0.1),
            xycoords=("axes fraction", "data"),
            xytext=(-2.35 * 72, 0),
            textcoords="offset points",
            weight="bold",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    _make_room_for_texts(axes)
    return figure


def draw_overview(run: Run) -> Figure:
    """Geometric means over the cases of each op in which all contestants take part, so that bars are comparable."""
    whats = [what for what in (FORWARD, WITH_GRADIENT) if any(case.what == what for case in run.cases)]
    ops = run.ops()
    everyone = contestants(run.cases)
    title = "Geometric mean over the cases in which all take part"
    figure, axes = _panels(run, everyone, title, whats, len(ops) - 0.2, left_inches=1.9)
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
                panel.text(0.01, position, "no gradient", color=FAINT, va="center", fontsize=8)
        panel.set_yticks(range(len(ops)), ops)
    _make_room_for_texts(axes)
    return figure


def draw_programs(run: Run) -> Figure:
    """Speed of whole programs relative to plain JAX."""
    cases = run.of_op(PROGRAMS)
    contenders = ((OURS, "plan"), (OURS, ""), (OURS, NO_KERNEL), ("torch_geometric", "compiled"))
    labels = ("jax_baracuda, plain JAX = 1", "torch_geometric, compiled")
    height, top, bottom = len(cases) - 0.2, 0.75, 0.62
    inches = height * INCHES_PER_ROW + top + bottom
    with plt.rc_context(STYLE):
        figure, panel = plt.subplots(figsize=(10.0, inches))
    figure.subplots_adjust(left=0.42, right=0.97, top=1 - top / inches, bottom=bottom / inches)
    for position, case in enumerate(cases):
        plain = case.fastest(XLA)
        timed = [m for m in case.measurements if (m.library, m.formulation) in contenders and m.milliseconds]
        for index, measurement in enumerate(timed):
            ratio = plain.milliseconds / measurement.milliseconds
            y = position + (index - (len(timed) - 1) / 2) * BAR
            panel.barh(y, ratio, height=BAR * 0.92, color=COLORS[0 if measurement.library == OURS else 2])
            text = f"{ratio:.2f}×   {milliseconds_text(measurement.milliseconds)} ms"
            halo = [withStroke(linewidth=2, foreground="white")]
            at = (ratio, y)
            panel.annotate(text, at, (3, 0), textcoords="offset points", va="center", fontsize=7, path_effects=halo)
    panel.set_yticks(range(len(cases)), [f"{case.size}\n{case.variant}" for case in cases], fontsize=7)
    panel.set_ylim(height - 0.4, -0.5)
    panel.axvline(1, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
    panel.tick_params(axis="y", length=0)
    panel.set_xlim(0, 1.15 * max(bar.get_width() for bar in panel.patches))
    figure.text(0.97, 0.1 / inches, "times as fast as plain JAX (longer is better)", fontsize=8.5, ha="right")
    figure.text(0.01, 1 - 0.12 / inches, "Whole programs", weight="bold", fontsize=13, va="top")
    _name_device(figure, run, 1 - 0.15 / inches)
    handles = [Patch(color=color, label=label) for color, label in zip(COLORS[::2], labels, strict=True)]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.003, 1 - 0.36 / inches),
        ncols=2,
        frameon=False,
        fontsize=9,
        handlelength=1.2,
    )
    return figure


def draw_grid(run: GridRun) -> Figure:
    """The distribution of the ratios of sampled calls."""
    height, top, bottom = 4.2, 0.8, 0.55
    with plt.rc_context(STYLE):
        figure, panel = plt.subplots(figsize=(10.0, height))
    figure.subplots_adjust(left=0.07, right=0.97, top=1 - top / height, bottom=bottom / height)
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
    panel.grid(color="#E6E6E6", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.axhline(1, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
    panel.axhline(LOWEST_RATIO, color=FAINT, linewidth=1, linestyle=(0, (1, 2)), zorder=0.9)
    figure.text(0.97, 0.1 / height, "share of calls, from the least gain to the greatest", fontsize=8.5, ha="right")
    title = "Times as fast as plain JAX: a random sample of calls"
    figure.text(0.01, 1 - 0.12 / height, title, weight="bold", fontsize=13, va="top")
    _name_device(figure, run, 1 - 0.15 / height)
    place = (0.003, 1 - 0.36 / height)
    figure.legend(loc="upper left", bbox_to_anchor=place, ncols=2, frameon=False, fontsize=9, handlelength=1.2)
    return figure


def _name_device(figure: Figure, run: Run | GridRun, y: float) -> None:
    device = f"{run.environment['device']}, jax {run.environment['jax']}"
    figure.text(0.97, y, device, color=FAINT, fontsize=9, va="top", ha="right")


def _panels(
    run: Run, everyone: Sequence[Contestant], title: str, whats: Sequence[str], height: float, left_inches: float
) -> tuple[Figure, list[Axes]]:
    """An empty panel for each of `whats`, `height` rows high, with title and legend above."""
    width, top, bottom = 10.0, 1.0, 0.62
    inches = height * INCHES_PER_ROW + top + bottom
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(whats), figsize=(width, inches), sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(
        left=left_inches / width, right=0.97, top=1 - top / inches, bottom=bottom / inches, wspace=0.06
    )
    panels = list(axes[0])
    for panel, what in zip(panels, whats, strict=True):
        panel.set_title(what, fontsize=10)
        panel.set_ylim(height - 0.4, -0.5)
        panel.axvline(1, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
        panel.grid(axis="x", color="#E6E6E6", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.tick_params(axis="y", length=0)
    unit = "the fewest bytes that must move, over the time, as a fraction of the speed of a copy (longer is better)"
    figure.text(0.97, 0.1 / inches, unit, fontsize=8.5, ha="right")
    figure.text(0.01, 1 - 0.12 / inches, title, weight="bold", fontsize=13, va="top")
    _name_device(figure, run, 1 - 0.15 / inches)
    labels = [label for label, _ in everyone]
    figure.legend(
        handles=[Patch(color=color, label=label) for color, label in zip(COLORS, labels, strict=False)],
        loc="upper left",
        bbox_to_anchor=(0.003, 1 - 0.36 / inches),
        ncols=len(COLORS),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
    )
    return figure, panels


def _make_room_for_texts(panels: Sequence[Axes]) -> None:
    panels[0].set_xlim(0, 1.18 * max(1.0, *(bar.get_width() for panel in panels for bar in panel.patches)))


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
        halo = [withStroke(linewidth=2, foreground="white")]
        panel.annotate(text, (value, y), (3, 0), textcoords="offset points", va="center", fontsize=7, path_effects=halo)


def _value_and_text(case: CaseRecord, libraries: Sequence[str]) -> tuple[float, str]:
    measurement = case.fastest(*libraries)
    if measurement is None:
        has_failed = any(m.library in libraries and not m.is_unsupported for m in case.measurements)
        return 0, "failed" if has_failed else "none"
    return measurement.fraction_of_copy, f"{milliseconds_text(measurement.milliseconds)} ms"


def _variant_text(variant: str) -> str:
    return variant.replace("float32", "f32").replace("bfloat16", "bf16")


def draw_cases(run: Run) -> dict[str, Figure]:
    """Figures by name: whole programs, an overview of the ops, and each op."""
    figures = {"programs": draw_programs(run)} if run.of_op(PROGRAMS) else {}
    of_ops = dataclasses.replace(run, cases=[case for case in run.cases if case.op != PROGRAMS])
    if of_ops.cases:
        figures |= {"overview": draw_overview(of_ops), **{op: draw_op(of_ops, op) for op in of_ops.ops()}}
    return figures


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
        path = folder / f"{'_'.join([options.record.stem, *name.split()])}.png"
        save(figure, path)
        plt.close(figure)
        print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
    return 0


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG with a palette of few colours, which takes a third of the size."""
    figure.canvas.draw()
    Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB").quantize(48).save(path, optimize=True)


if __name__ == "__main__":
    run(main)
