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
    lines: list[str] = []
    table = ProgressiveTable(lines.append, *zip(header, *rows, strict=True))
    for row in rows:
        table.print_row(*row)
    return "\n".join(lines)


class ProgressiveTable:
    """The same table, printed row by row."""

    def __init__(self, show: Callable[[str], None], *columns: Sequence[str]):
        """Prints the header.

        Args:
          show: prints a line.
          columns: the heading of each column, and texts as long as the longest below it.
        """
        self._show = show
        self._widths = [max(map(len, column)) for column in columns]
        while sum(self._widths) + len(GAP) * (len(columns) - 1) > MAX_WIDTH:
            self._widths[self._widths.index(max(self._widths))] -= 1
        self.print_row(*(column[0] for column in columns))
        self.print_row(*("-" * width for width in self._widths))

    def print_row(self, *texts: str) -> None:
        cells = (
            [part for line in text.splitlines() for part in textwrap.wrap(line, width)]
            for text, width in zip(texts, self._widths, strict=True)
        )
        lines = itertools.zip_longest(*cells, fillvalue="")
        self._show("\n".join(GAP.join(map(str.ljust, line, self._widths)).rstrip() for line in lines))
