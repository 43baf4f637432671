"""Tables as plain text."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Sequence

MAX_WIDTH = 100
"""The maximum width of a line: cells are wrapped to fit. A cell may also contain line breaks."""
GAP = "  "


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of left-aligned text under a header and a rule."""
    widths = _fitting([max(map(len, column)) for column in zip(header, *rows, strict=True)])
    return "\n".join(_format_row(row, widths) for row in (header, ["-" * width for width in widths], *rows))


class ProgressiveTable:
    """The same table, printed row by row."""

    def __init__(self, show: Callable[[str], None], *columns: Sequence[str]):
        """Prints the header.

        Args:
          show: prints a line.
          columns: the heading of each column, and texts as long as the longest below it.
        """
        self._show = show
        self._widths = _fitting([max(map(len, column)) for column in columns])
        self.print_row(*(column[0] for column in columns))
        self.print_row(*("-" * width for width in self._widths))

    def print_row(self, *texts: str) -> None:
        self._show(_format_row(texts, self._widths))


def _fitting(widths: Sequence[int]) -> list[int]:
    """The widths of columns, after narrowing the widest until a line fits."""
    fitting = list(widths)
    while sum(fitting) + len(GAP) * (len(fitting) - 1) > MAX_WIDTH:
        fitting[fitting.index(max(fitting))] -= 1
    return fitting


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        [part for line in text.splitlines() for part in textwrap.wrap(line, width)]
        for text, width in zip(row, widths, strict=True)
    )
    lines = itertools.zip_longest(*cells, fillvalue="")
    return "\n".join(GAP.join(map(str.ljust, line, widths)).rstrip() for line in lines)
