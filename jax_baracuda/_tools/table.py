"""Tables as plain text."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence

MIN_WIDTH, MAX_WIDTH = 60, 100
"""Lines are as wide as the terminal, within these bounds. Cells are wrapped to fit, and may contain line breaks."""
GAP = "  "


class _Wrapper(textwrap.TextWrapper):
    """Breaks lines at spaces, and words that are wider than a line after underscores: the names of functions."""

    def _split(self, text: str) -> list[str]:
        words = super()._split(text)
        return [
            part for word in words for part in (re.split("(?<=_)(?=.)", word) if len(word) > self.width else [word])
        ]


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
        self._widths = [max(len(line) for text in column for line in text.splitlines() or [""]) for column in columns]
        max_width = min(MAX_WIDTH, max(MIN_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns))
        while sum(self._widths) + len(GAP) * (len(columns) - 1) > max_width:
            self._widths[self._widths.index(max(self._widths))] -= 1
        self.print_row(*(column[0] for column in columns))
        self.print_row(*("-" * width for width in self._widths))

    def print_row(self, *texts: str) -> None:
        cells = (
            [part for line in text.splitlines() for part in _Wrapper(width, break_on_hyphens=False).wrap(line)]
            for text, width in zip(texts, self._widths, strict=True)
        )
        lines = itertools.zip_longest(*cells, fillvalue="")
        self._show("\n".join(GAP.join(map(str.ljust, line, self._widths)).rstrip() for line in lines))
