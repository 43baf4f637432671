"""segment_logsumexp in the table of reductions: data, references and errors."""

from __future__ import annotations

import numpy as np
from segment.reference import Reduction, add, softmax_data
from support import cases
from support.cases import Expected


def reference(data: np.ndarray, ids: np.ndarray, segments: int) -> tuple[np.ndarray, np.ndarray]:
    """The exact results, and bounds of the errors that kernels make before they round."""
    x = data.astype(cases.wider(data.dtype))
    maxima = cases.reference_max(data, ids, segments).astype(x.dtype)
    is_infinite = np.isinf(maxima)
    counts = cases.counts(ids, segments).reshape(-1, *[1] * (data.ndim - 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        is_member = cases.take_cells(~is_infinite, ids)
        distances = np.where(is_member, cases.take_cells(maxima, ids) - x, np.inf)
        terms = np.exp(-distances)
        total = cases.segment_sum(terms, ids, segments)
        output = np.where(is_infinite, maxima, maxima + np.log(total))
        # The distances and the exponentials are rounded, each addition by half an eps, and so is the result.
        of_distances = cases.segment_sum(np.where(terms > 0, terms * distances, 0), ids, segments) / total
        error = of_distances + 4 + counts / 2 + np.abs(output)
    return output, np.where(np.isfinite(output), cases.eps_of(data.dtype) * error, 0)


def value(data: np.ndarray, ids: np.ndarray, segments: int) -> Expected:
    data = data.astype(cases.mean_dtype(data.dtype))  # integers are cast as those of means
    output, error = reference(data, ids, segments)
    return Expected(output, data.dtype, error)


def gradient(d_output: np.ndarray, data: np.ndarray, ids: np.ndarray, segments: int) -> Expected:
    output, error = reference(data, ids, segments)
    is_member = cases.take_cells(np.ones(output.shape, bool), ids)
    cells = np.where(np.isneginf(output), 0, output), error, d_output.astype(output.dtype)
    of_rows, errors, d_rows = (cases.take_cells(x, ids) for x in cells)
    with np.errstate(invalid="ignore"):
        distances = np.where(is_member, of_rows - data, np.inf)
        exact = np.exp(-distances) * d_rows
        relative = errors + cases.eps_of(data.dtype) * (4 + np.abs(distances))
        error = np.where(exact != 0, np.abs(exact) * relative, 0)
    # Kernels treat subnormal weights as zeros.
    of_subnormal = is_member * (1 + np.abs(d_rows)) * float(np.finfo(cases.accumulator(data.dtype)).tiny)
    return Expected(exact, data.dtype, np.where(np.isfinite(error), error, 0) + of_subnormal)


LOGSUMEXP = add(
    Reduction(
        name="segment_logsumexp",
        dtypes=cases.FLOATING,
        make_data=softmax_data,
        value=value,
        gradient=gradient,
        kernels=("segment_logsumexp",),
        derivatives_are_exact=False,
    )
)
