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
    except Exception:
        traceback.print_exc()
        status = 1
    finally:
        context.uninstall()
    print(f"\nInside redirect(indexed_updates=True, slice_updates=True), {os.path.basename(script)} ran:\n{report}")
    return status


def _status_of(end: SystemExit) -> int:
    if isinstance(end.code, int | None):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1
