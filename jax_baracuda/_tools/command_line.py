"""Shared by the tools' command lines: parsing of arguments, and exit statuses."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from jax_baracuda._tools.platforms import BackendError

CANNOT_RUN = 2
"""The exit status for wrong arguments, a missing package, or no device."""
INTERRUPTED = 128 + signal.SIGINT
"""Like `PIPE_CLOSED`, the status that shells report for a program ended by this signal."""
PIPE_CLOSED = 128 + signal.SIGPIPE


def parser_of(program: str, description: str | None, statuses: Mapping[int, str]) -> argparse.ArgumentParser:
    """A parser whose help lists the given exit statuses, and the ones common to all tools.

    Args:
      program: what follows "python -m".
    """
    all_statuses = {**statuses, CANNOT_RUN: "it could not run, and says why", INTERRUPTED: "Ctrl-C interrupted it"}
    texts = (f"{status} if {meaning}" for status, meaning in all_statuses.items())
    return argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description and description.replace("`", ""),
        epilog=f"Exit status: {'; '.join(texts)}.",
    )


def integer_from(minimum: int) -> Callable[[str], int]:
    """A function that parses an integer argument of at least `minimum`."""

    def parse(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {number}")
        return number

    parse.__name__ = "whole number"  # argparse's messages name the type
    return parse


def output_file(text: str) -> Path:
    """Parses the name of a file to write. Errors in it are reported before anything is computed."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    return path


def exit_status(main: Callable[[], int]) -> int:
    """Runs a tool; returns its exit status, also if Ctrl-C interrupts it or its output pipe is closed."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except BackendError as error:
        print(error, file=sys.stderr)
        return CANNOT_RUN
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:  # A file that cannot be read, or a full disk
        _discard_output()
        print(error, file=sys.stderr)
        return CANNOT_RUN


def _discard_output() -> None:
    """Redirects stdout to nothing. Otherwise the flush at exit would raise the error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a tool, and ends the process with its exit status."""
    status = exit_status(main)
    if status == INTERRUPTED or threading.active_count() > 1:
        # Threads may still be compiling. Python would wait for them, and JAX's threads may crash at Python's exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)
