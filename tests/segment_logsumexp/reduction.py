"""segment_logsumexp in the table of reductions: data, references and errors."""

from __future__ import annotations

import numpy as np
from segment.reference import DETERMINISTIC, Reduction, add, softmax_data
from support import cases
from support.cases import Expected


def states(data: np.ndarray, ids: np.ndarray, segments: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The exact maxima and totals of exp(data - maximum), and the relative errors of the totals of kernels."""
    x = data.astype(cases.wider(data.dtype))
    maxima = cases.reference_max(data, ids, segments).astype(x.dtype)
    counts = cases.counts(ids, segments).reshape(-1, *[1] * (data.ndim - 1))
    distances = distances_from(maxima, x, ids)
    terms = np.exp(-distances)
    totals = cases.segment_sum(terms, ids, segments)
    with np.errstate(invalid="ignore", divide="ignore"):
        # The distances and the exponentials are rounded, and each addition by half an eps.
        of_distances = cases.segment_sum(np.where(terms > 0, terms * distances, 0), ids, segments) / totals
    return maxima, totals, cases.eps_of(data.dtype) * (of_distances + 4 + counts / 2)


def distances_from(maxima: np.ndarray, data: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The distances of the rows from the maxima of their segments; inf for dropped rows and in segments of -inf."""
    is_near = cases.take_cells(~np.isneginf(maxima), ids)
    with np.errstate(invalid="ignore"):
        return np.where(is_near, cases.take_cells(maxima, ids) - data, np.inf)


def value(data: np.ndarray, ids: np.ndarray, segments: int) -> Expected:
    data = data.astype(cases.mean_dtype(data.dtype))  # integers are cast as those of means
    maxima, totals, error = states(data, ids, segments)
    with np.errstate(invalid="ignore", divide="ignore"):
        output = np.where(np.isinf(maxima), maxima, maxima + np.log(totals))
        # The logarithm and the sum are rounded.
        error = error + cases.eps_of(data.dtype) * (1 + np.abs(output))
    return Expected(output, data.dtype, np.where(np.isfinite(output), error, 0))


def gradient(
    d_output: np.ndarray, data: np.ndarray, ids: np.ndarray, segments: int, *, deterministic: bool = False
) -> Expected:
    """The errors depend on the distances of the rows from the maximum, not on the size of the result."""
    maxima, totals, error = states(data, ids, segments)
    d_rows = cases.take_cells(d_output.astype(maxima.dtype), ids)
    is_finite = np.isfinite(maxima)
    divisors = np.where(cases.take_cells(is_finite, ids), cases.take_cells(totals, ids), 1)
    distances = distances_from(maxima, data, ids)
    with np.errstate(invalid="ignore"):
        exact = np.exp(-distances) / divisors * d_rows
        relative = cases.take_cells(np.where(is_finite, error, 0), ids) + cases.eps_of(data.dtype) * (4 + distances)
        error = np.where(exact != 0, np.abs(exact) * relative, 0)
    # Kernels treat subnormal weights as zeros.
    of_subnormal = (1 + np.abs(d_rows)) * float(np.finfo(cases.accumulator(data.dtype)).tiny)
    return Expected(exact, data.dtype, np.where(np.isfinite(error), error, 0) + of_subnormal)


LOGSUMEXP = add(
    Reduction(
        name="segment_logsumexp",
        dtypes=cases.FLOATING,
        make_data=softmax_data,
        value=value,
        gradient=gradient,
        options=DETERMINISTIC,
        kernels=("segment_logsumexp",),
        derivatives_are_exact=False,
    )
)
