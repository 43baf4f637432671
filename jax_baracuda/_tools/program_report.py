"""``python -m jax_baracuda report --of script.py``: what runs for the calls of a program that can be redirected."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence

import jax_baracuda


def report_of(script: str, arguments: Sequence[str]) -> int:
    """Runs a script with its calls redirected, and prints the report. Returns the exit status of the script."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))  # as Python does for a script
    context = jax_baracuda.redirect(indexed_updates=True, slice_updates=True)
    status = 0
    report = context.install()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = _status_of(end)
    except Exception as error:
        _print_error(error)
        status = 1
    finally:
        context.uninstall()
    print(f"\nInside redirect(indexed_updates=True, slice_updates=True), {os.path.basename(script)} ran:\n{report}")
    return status


def _print_error(error: Exception) -> None:
    """Prints an error of the script as Python does for a script: without the frames that run it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))


def _status_of(end: SystemExit) -> int:
    if isinstance(end.code, int | None):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1
