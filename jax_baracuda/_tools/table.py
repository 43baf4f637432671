"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of left-aligned text under a header and a rule."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(_format_row(row, widths) for row in (header, ["-" * width for width in widths], *rows))


class ProgressiveTable:
    """The same, row by row as they become known."""

    def __init__(self, *columns: Sequence[str]):
        """Prints the header.

        Args:
          columns: the heading of each column, and texts as long as those that will stand below it.
        """
        self._widths = [max(map(len, column)) for column in columns]
        self.print_row(*(column[0] for column in columns))
        self.print_row(*("-" * width for width in self._widths))

    def print_row(self, *texts: str) -> None:
        print(_format_row(texts, self._widths), flush=True)


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
