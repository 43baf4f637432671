"""Random causal convolutions, a NumPy reference in extended precision, and bounds on rounding errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from support import cases
from support.cases import Expected

from jax_baracuda import causal_conv1d

LAYOUTS = (False, True)
"""Values of channels_last."""


def in_layout(signal: Any, channels_last: bool) -> Any:
    """Moves the channels of a signal ``[..., C, L]`` last, if `channels_last`. The same call moves them back."""
    return signal.swapaxes(-1, -2) if channels_last else signal


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution. Its signals have shape ``[B, C, L]``, whatever the layout of a call."""

    arrays: dict[str, np.ndarray]
    """The differentiable operands: x, weight, and bias and initial_state if present."""
    segment_ids: np.ndarray | None = None
    activation: str | None = None

    @property
    def dtype(self) -> Any:
        return self.arrays["x"].dtype

    @property
    def width(self) -> int:
        return self.arrays["weight"].shape[1]

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (*self.arrays["x"].shape[:2], self.width - 1)

    def operands(self, channels_last: bool) -> dict[str, np.ndarray]:
        """The arrays in the layout of a call."""
        return self.arrays | {"x": in_layout(self.arrays["x"], channels_last)}

    def call(self, arrays: dict[str, Any], channels_last: bool, function: Any = causal_conv1d) -> tuple[Any, Any]:
        """y and the final state, computed from these arrays instead of the problem's."""
        return function(
            **arrays,
            segment_ids=self.segment_ids,
            activation=self.activation,
            channels_last=channels_last,
            return_final_state=True,
        )


def make_convolution(
    rng: np.random.Generator,
    shape: tuple[int, int, int],
    width: int,
    dtype: Any = "float32",
    *,
    parameter_dtype: Any = None,
    has_bias: bool = True,
    has_state: bool = False,
    has_ids: bool = False,
    activation: str | None = "silu",
) -> Convolution:
    """Random operands of a convolution of ``shape == (B, C, L)``."""
    examples, channels, length = shape
    parameter_dtype = parameter_dtype or dtype

    def normal(dtype: Any, *size: int) -> np.ndarray:
        return rng.normal(size=size).astype(jnp.dtype(dtype))

    arrays = {"x": normal(dtype, *shape), "weight": normal(parameter_dtype, channels, width)}
    if has_bias:
        arrays["bias"] = normal(parameter_dtype, channels)
    if has_state:
        arrays["initial_state"] = normal(dtype, examples, channels, width - 1)
    return Convolution(arrays, make_ids(rng, examples, length) if has_ids else None, activation)


def make_ids(rng: np.random.Generator, examples: int, length: int) -> np.ndarray:
    """Ids of packed sequences of very different lengths. Ids recur, so a sequence may be in several parts."""
    starts = rng.random((examples, length)) < rng.choice([0.02, 0.5], (examples, 1))
    return (np.cumsum(starts, axis=1) % 3 - 1).astype(np.int32)


# ----------------------------------------------------------------------------------------------------------------------
# The reference, in extended precision, one tap at a time.


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.longdouble)


@dataclasses.dataclass(frozen=True)
class History:
    """The inputs, with the initial state before t = 0, and the sequence id of each."""

    inputs: np.ndarray
    """[B, C, W-1+L]"""
    ids: np.ndarray
    """[B, W-1+L]"""

    @classmethod
    def of(cls, problem: Convolution) -> History:
        x = _wide(problem.arrays["x"])
        state = problem.arrays.get("initial_state")
        state = np.zeros(problem.state_shape) if state is None else _wide(state)
        ids = np.zeros((x.shape[0], x.shape[2]), int) if problem.segment_ids is None else problem.segment_ids
        before = np.repeat(ids[:, :1], problem.width - 1, axis=1) if x.shape[2] else np.zeros(state.shape[::2], int)
        return cls(np.concatenate([state, x], axis=2), np.concatenate([before, ids], axis=1))

    def back(self, steps: int, width: int) -> tuple[np.ndarray, np.ndarray, slice]:
        """For every t, the input `steps` back, or 0 if of another sequence; a same-sequence mask; the inputs' slice.

        An input of another sequence may be NaN. So it is replaced, not multiplied by 0.
        """
        where = slice(width - 1 - steps, self.inputs.shape[2] - steps)
        is_same = (self.ids[:, where] == self.ids[:, width - 1 :])[:, None]
        return np.where(is_same, self.inputs[:, :, where], 0), is_same, where

    def is_kept(self, width: int) -> np.ndarray:
        """Which of the last W - 1 inputs belong to the last input's sequence."""
        return (self.ids[:, self.ids.shape[1] - (width - 1) :] == self.ids[:, -1:])[:, None]


def _linear_part(problem: Convolution, history: History) -> np.ndarray:
    weight = _wide(problem.arrays["weight"])
    z = np.zeros(problem.arrays["x"].shape, np.longdouble)
    for steps in range(problem.width):
        inputs, _, _ = history.back(steps, problem.width)
        z += weight[:, problem.width - 1 - steps, None] * inputs
    if (bias := problem.arrays.get("bias")) is not None:
        z += _wide(bias)[:, None]
    return z


def _sigmoid(z: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-z))


def reference(problem: Convolution) -> tuple[np.ndarray, np.ndarray]:
    """y and the final state."""
    history = History.of(problem)
    z = _linear_part(problem, history)
    y = z * _sigmoid(z) if problem.activation else z
    end = history.inputs.shape[2]
    state = np.where(history.is_kept(problem.width), history.inputs[:, :, end - (problem.width - 1) :], 0)
    return y, state


def _linear_gradients(
    problem: Convolution, history: History, dz: np.ndarray, d_final_state: np.ndarray
) -> dict[str, np.ndarray]:
    """The gradients of all differentiable operands, given the cotangent of the linear part."""
    width, weight = problem.width, _wide(problem.arrays["weight"])
    d_inputs, dweight = np.zeros_like(history.inputs), np.zeros_like(weight)
    for steps in range(width):
        inputs, is_same, where = history.back(steps, width)
        d_inputs[:, :, where] += np.where(is_same, weight[:, width - 1 - steps, None] * dz, 0)
        dweight[:, width - 1 - steps] = (dz * inputs).sum(axis=(0, 2))
    end = d_inputs.shape[2]
    d_inputs[:, :, end - (width - 1) :] += np.where(history.is_kept(width), _wide(d_final_state), 0)
    gradients = {
        "x": d_inputs[:, :, width - 1 :],
        "weight": dweight,
        "bias": dz.sum(axis=(0, 2)),
        "initial_state": d_inputs[:, :, : width - 1],
    }
    return {name: gradients[name] for name in problem.arrays}


def _d_linear_part(problem: Convolution, history: History, dy: np.ndarray) -> np.ndarray:
    """The cotangent of the linear part."""
    dz = _wide(dy)
    if problem.activation:
        z = _linear_part(problem, history)
        s = _sigmoid(z)
        dz = dz * s * (1 + z * (1 - s))
    return dz


# ----------------------------------------------------------------------------------------------------------------------
# Bounds on the rounding error of each element, for the dtype's accumulator. Each operation adds half an eps of its
# result. The partial sums of a sum, in any order, are at most the sum of its terms' magnitudes.


def _magnitudes(problem: Convolution) -> Convolution:
    """A convolution whose sums are the sums of the terms' magnitudes."""
    arrays = {name: np.abs(array) for name, array in problem.arrays.items()}
    return dataclasses.replace(problem, arrays=arrays, activation=None)


def _sum_error(problem: Convolution) -> float:
    """The relative error of sums over the taps: each term is rounded as a product, then in up to W additions."""
    return (problem.width + 1) / 2 * cases.eps_of(problem.dtype)


def _linear_part_error(problem: Convolution) -> np.ndarray:
    magnitudes = _magnitudes(problem)
    return _sum_error(problem) * _linear_part(magnitudes, History.of(magnitudes))


def _sigmoid_error(problem: Convolution, z: np.ndarray) -> np.ndarray:
    """The relative error: from rounding z, an exponential within 2 units in the last place, a sum and a quotient."""
    return cases.eps_of(problem.dtype) * (2 + (1 - _sigmoid(z)) * (2 + np.abs(z)))


def _d_linear_part_error(problem: Convolution, dy: np.ndarray) -> np.ndarray:
    dy = np.abs(_wide(dy))
    if not problem.activation:
        return np.zeros_like(dy)
    z, eps = _linear_part(problem, History.of(problem)), cases.eps_of(problem.dtype)
    # The slope of silu, s + s z (1 - s), changes by at most half the error of z. Each of its operations is rounded.
    of_slope = _linear_part_error(problem) / 2
    of_slope = of_slope + _sigmoid(z) * (1 + np.abs(z)) * (_sigmoid_error(problem, z) + 4 * eps)
    return dy * of_slope


def expected_outputs(problem: Convolution) -> tuple[Expected, np.ndarray]:
    """y, and the final state, which is exact."""
    y, state = reference(problem)
    error = _linear_part_error(problem)
    if problem.activation:
        z = _linear_part(problem, History.of(problem))
        smallest = float(np.finfo(cases.accumulator(problem.dtype)).tiny)  # exp(-z) overflows if exp(z) is smaller
        error = 1.1 * error + np.abs(y) * (_sigmoid_error(problem, z) + cases.eps_of(problem.dtype))  # 1.1: max slope
        error = error + np.abs(z) * smallest
    return Expected(y, problem.dtype, error), state.astype(problem.dtype)


def _squares(problem: Convolution) -> Convolution:
    """A convolution whose sums are the sums of the terms' squares."""
    arrays = {name: _wide(array) ** 2 for name, array in problem.arrays.items()}
    return dataclasses.replace(problem, arrays=arrays, activation=None)


def expected_gradients(problem: Convolution, dy: np.ndarray, d_final_state: np.ndarray) -> dict[str, Expected]:
    """The gradients of all differentiable operands. Each has the dtype of its primal."""
    history, eps = History.of(problem), cases.eps_of(problem.dtype)
    dz = _d_linear_part(problem, history, dy)
    dz_error = _d_linear_part_error(problem, dy)
    exact = _linear_gradients(problem, history, dz, d_final_state)

    def sums(terms: Convolution, dz: np.ndarray, d_final_state: np.ndarray) -> dict[str, np.ndarray]:
        return _linear_gradients(terms, History.of(terms), dz, d_final_state)

    magnitudes, squares, nothing = _magnitudes(problem), _squares(problem), np.zeros(problem.state_shape)
    of_terms = sums(magnitudes, np.abs(dz), np.abs(d_final_state))
    handed_on = sums(magnitudes, dz_error, nothing)
    squares_of_terms, squares_handed_on = (sums(squares, x**2, nothing) for x in (dz, dz_error))
    roundings = 1 + np.sqrt(dz.shape[0] * dz.shape[2])

    def error(name: str) -> np.ndarray:
        if name not in ("weight", "bias"):
            return handed_on[name] + _sum_error(problem) * of_terms[name]
        # Errors of many terms are independent: their sum stays below six standard deviations. In long sums, an
        # accumulator adds some tens of terms. Partial sums are then added in pairs, or in float64.
        of_sum = np.minimum(roundings * of_terms[name], 64 * np.sqrt(squares_of_terms[name]))
        return np.minimum(handed_on[name], 6 * np.sqrt(squares_handed_on[name])) + eps * of_sum

    return {name: Expected(exact[name], problem.arrays[name].dtype, error(name)) for name in exact}


def part_of(expected: Expected, index: Any) -> Expected:
    """The expected values of the elements at an index."""
    error = np.broadcast_to(expected.error, expected.exact.shape)
    return dataclasses.replace(expected, exact=expected.exact[index], error=error[index])


# ----------------------------------------------------------------------------------------------------------------------
# Comparison.


def check_outputs(problem: Convolution, channels_last: bool, y: Any, final_state: Any, where: str = "") -> None:
    expected_y, expected_state = expected_outputs(problem)
    assert not y.weak_type, where
    expected_y.check(in_layout(y, channels_last), f"{where} y")
    cases.assert_same_bits(final_state, expected_state, f"{where} final state")


def check_gradients(
    actual: dict[str, Any], expected: dict[str, Expected], channels_last: bool, where: str = ""
) -> None:
    """Checks gradients with respect to `Convolution.operands`."""
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        gradient = in_layout(gradient, channels_last) if name == "x" else gradient
        expected[name].check(gradient, f"{where} d_{name}")
