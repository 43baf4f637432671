"""Descriptions that the docstrings of the segment functions share.

The docstring of a function describes the arguments that are its own. :func:`described` adds the others.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def _entries(section: str) -> dict[str, str]:
    """The text of each entry of a section, by name."""
    entries = re.findall(r"^  (\w+): (.*?)(?=^  \w|\Z)", section, flags=re.DOTALL | re.MULTILINE)
    return {name: text.rstrip() for name, text in entries}


def described(shared: Mapping[str, str]) -> Callable[[F], F]:
    """Completes a docstring: describes the arguments that it does not, and adds "Raises" if it has no such section."""

    def complete(function: F) -> F:
        head, _, rest = inspect.cleandoc(function.__doc__ or "").partition("Returns:\n")
        head, _, own = head.partition("Args:\n")
        descriptions = {**shared, **_entries(own)}
        arguments = "".join(f"  {name}: {descriptions[name]}\n" for name in inspect.signature(function).parameters)
        if "Raises:\n" not in rest:
            rest = rest.replace("Numerical guarantees:", f"Raises:\n{shared['Raises']}\n\nNumerical guarantees:")
        function.__doc__ = f"{head}Args:\n{arguments}\nReturns:\n{rest}\n"
        return function

    return complete


_IMPLEMENTATION = """
  implementation: "kernel" (an error if there is none) or "xla" (plain JAX). None: what the context
    :func:`jax_baracuda.implementation` selects, by default whichever was measured to be faster.
"""

OF_ROWS = {
    **_entries(
        """
  data: ``[N, ...]``, any dtype of JAX with an order. bool, integers of 8 to 64 bits, float16, bfloat16, float32 and
    float64 have kernels; other dtypes run as plain JAX. More generally, any shape that broadcasts to
    ``segment_ids.shape + data.shape[1:]``.
  segment_ids: ``[N]``, any integer dtype, in any order. Rows whose id is negative or at least the number of segments
    are dropped. Any other rank is accepted as in ``jax.ops``: every id labels one ``data.shape[1:]``.
  num_segments: number of segments S, static under ``jit``. Default: ``max(segment_ids) + 1``.
  indices_are_sorted: promises that `segment_ids` is non-decreasing, which is faster on GPUs. If the promise is
    false, the result may hold anything.
  unique_indices: accepted for compatibility; nothing depends on it.
  mode: what happens to ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the row is
    dropped. "clip": the id is clamped to ``[0, S - 1]``.
  out_sharding: sharding of the result, for meshes with explicit axes.
  deterministic: on GPUs, floating rows with unsorted ids are added in an order that varies from run to run, unless
    this is True. Everything else has the same bits in every run anyway.
  plan: a :func:`segment_plan` of the rows, which replaces `segment_ids`, `num_segments` and `mode`. With a plan,
    neither this call nor its gradient sorts, and both have the same bits in every run.
"""
        + _IMPLEMENTATION
    ),
    "Raises": """\
  TypeError: an argument is not an array or has an unsuitable dtype.
  IndexError: `segment_ids` is boolean.
  ValueError: shapes do not fit, `num_segments` is negative, an option is unknown, or `num_segments` is None and
    there are no ids.
  jax.errors.ConcretizationTypeError: `num_segments` is None and `segment_ids` is traced.""",
}
"""For the functions that reduce rows."""

OF_EDGES = {
    **_entries(
        """
  data: ``[N, ...]``, the rows (features of nodes), a floating dtype. float16, bfloat16, float32 and float64 have
    kernels.
  gather_ids: ``[E]``, any integer dtype, in any order: the row that each edge gathers (its sender). As in
    ``data[gather_ids]``, negative ids count from the end, and ids out of range name the nearest row.
  segment_ids: ``[E]``, any integer dtype, in any order: the segment of each edge (its receiver). Edges whose id is
    negative or at least `num_segments` are dropped.
  num_segments: number of segments S, static under ``jit``.
  weights: factors of the edges, ``[E]``, or ``[E, H]`` for data ``[N, H, ...]``: one for each head. More generally,
    ``[E, *dims]`` where `dims` are the first dimensions of a row. They are cast to the dtype of `data`.
  indices_are_sorted: promises that `segment_ids` is non-decreasing, which saves a sort on GPUs. If the promise is
    false, the result may hold anything.
  mode: what happens to segment ids out of range. None, "fill", "drop", "promise_in_bounds" and "one_hot": the edge
    is dropped. "clip": the id is clamped to ``[0, S - 1]``.
  deterministic: on GPUs, unsorted edges without a plan are added in an order that varies from run to run where that
    was faster: for few edges or narrow rows. True: sort them, so that all runs are bit-equal. Sorted edges, plans
    and their gradients are bit-equal anyway. On CPUs everything is.
  plan: a :func:`segment_plan` of the edges, which replaces `gather_ids`, `segment_ids` and `num_segments`. With a
    plan, neither this call nor its gradient sorts.
"""
        + _IMPLEMENTATION
    ),
    "Raises": """\
  TypeError: an argument is not an array or has an unsuitable dtype, or `num_segments` is missing.
  IndexError: ids are boolean.
  ValueError: shapes do not fit, there are no rows to gather from, an option is unknown, or both a plan and ids are
    given.""",
}
"""For the functions that gather rows along edges."""
