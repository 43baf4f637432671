"""A progress bar for the tools."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Progress:
    """Prints text above a progress bar, on a terminal if rich is installed; else prints only the text."""

    def __init__(self) -> None:
        terminal = next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)
        self._console = None
        if terminal is not None and importlib.util.find_spec("rich") is not None:
            from rich.console import Console

            self._console = Console(file=terminal)

    def track(self, items: Iterable[T], total: int, describe: Callable[[T], str]) -> Iterator[T]:
        """Yields the items; the bar shows the count, and describes the current item."""
        if self._console is None:
            yield from items
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        description = TextColumn("{task.description}", markup=False)
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), description
        with Bar(*columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
            task = bar.add_task("", total=total)
            for item in items:
                bar.update(task, description=describe(item))
                yield item
                bar.advance(task)

    def print(self, text: str) -> None:
        """Prints above the bar, at once."""
        if self._console is None or self._console.file is not sys.stdout:
            print(text, flush=True)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
