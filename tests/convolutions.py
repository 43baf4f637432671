"""Problems for the causal convolution, its NumPy reference in float64, and comparison by the norm of the error."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_baracuda import causal_conv1d

TOLERANCE = {"float16": 5e-4, "bfloat16": 4e-3, "float32": 1e-6, "float64": 1e-14}
"""The largest error of outputs and of dx by dtype, relative to the reference's norm."""
PARAMETER_FACTOR = 10
"""By how much more the gradients of parameters may err, which are long sums."""

LAYOUTS = (False, True)
"""Values of channels_last."""


def in_layout(signal: Any, channels_last: bool) -> Any:
    """A signal ``[..., C, L]`` with its channels last if so asked; also the way back."""
    return signal.swapaxes(-1, -2) if channels_last else signal


@dataclasses.dataclass(frozen=True)
class Problem:
    """A convolution, signals always ``[B, C, L]``."""

    arrays: dict[str, np.ndarray]
    """What has a gradient: x, weight, and of bias and initial_state what is there."""
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
        """The arrays as they are passed."""
        return self.arrays | {"x": in_layout(self.arrays["x"], channels_last)}

    def call(self, arrays: dict[str, Any], channels_last: bool, function: Any = causal_conv1d) -> tuple[Any, Any]:
        """y and the final state, of these arrays in place of the problem's."""
        return function(
            **arrays,
            segment_ids=self.segment_ids,
            activation=self.activation,
            channels_last=channels_last,
            return_final_state=True,
        )


def make_problem(
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
) -> Problem:
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
    return Problem(arrays, make_ids(rng, examples, length) if has_ids else None, activation)


def make_ids(rng: np.random.Generator, examples: int, length: int) -> np.ndarray:
    """Sequences of very different lengths, one after the other; every id comes back later, so that some are split."""
    starts = rng.random((examples, length)) < rng.choice([0.02, 0.5], (examples, 1))
    return (np.cumsum(starts, axis=1) % 3 - 1).astype(np.int32)


# ----------------------------------------------------------------------------------------------------------------------
# The reference: float64 (sums in extended precision), one tap after the other.


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.longdouble)


@dataclasses.dataclass(frozen=True)
class History:
    """The inputs before and from t = 0, and which of them belong to the sequence of which."""

    inputs: np.ndarray
    """[B, C, W-1+L]"""
    ids: np.ndarray
    """[B, W-1+L]"""

    @classmethod
    def of(cls, problem: Problem) -> History:
        x = _wide(problem.arrays["x"])
        state = problem.arrays.get("initial_state")
        state = np.zeros(problem.state_shape) if state is None else _wide(state)
        ids = np.zeros((x.shape[0], x.shape[2]), int) if problem.segment_ids is None else problem.segment_ids
        before = np.repeat(ids[:, :1], problem.width - 1, axis=1) if x.shape[2] else np.zeros(state.shape[::2], int)
        return cls(np.concatenate([state, x], axis=2), np.concatenate([before, ids], axis=1))

    def back(self, steps: int, width: int) -> tuple[np.ndarray, np.ndarray, slice]:
        """For every t, the input so many steps back, 0 if of another sequence; whether it is of the same; where it is.

        An input of another sequence may be NaN: it is replaced, not multiplied.
        """
        where = slice(width - 1 - steps, self.inputs.shape[2] - steps)
        is_same = (self.ids[:, where] == self.ids[:, width - 1 :])[:, None]
        return np.where(is_same, self.inputs[:, :, where], 0), is_same, where

    def taps(self, width: int) -> np.ndarray:
        """Bit j of each input says whether the input j steps back is of the same sequence."""
        bits = [self.back(steps, width)[1][:, 0].astype(np.uint8) << steps for steps in range(width)]
        return np.bitwise_or.reduce(bits)

    def is_kept(self, width: int) -> np.ndarray:
        """Which of the last W - 1 inputs belong to the sequence of the last."""
        return (self.ids[:, self.ids.shape[1] - (width - 1) :] == self.ids[:, -1:])[:, None]


def _linear_part(problem: Problem, history: History) -> np.ndarray:
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


def reference(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """y and the final state."""
    history = History.of(problem)
    z = _linear_part(problem, history)
    y = z * _sigmoid(z) if problem.activation else z
    end = history.inputs.shape[2]
    state = np.where(history.is_kept(problem.width), history.inputs[:, :, end - (problem.width - 1) :], 0)
    return y, state


def reference_gradients(problem: Problem, dy: np.ndarray, d_final_state: np.ndarray) -> dict[str, np.ndarray]:
    """The gradients of all arrays that are there, for these cotangents of y and of the final state."""
    history, width = History.of(problem), problem.width
    z, weight = _linear_part(problem, history), _wide(problem.arrays["weight"])
    dz = _wide(dy)
    if problem.activation:
        s = _sigmoid(z)
        dz = dz * s * (1 + z * (1 - s))
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


# ----------------------------------------------------------------------------------------------------------------------
# Another reference, in plain JAX, for derivatives of any order: a product with the matrix of all pairs of times.


def plain_convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: np.ndarray | None = None,
    activation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """y and the final state of signals ``[B, C, L]``."""
    examples, channels, length = x.shape
    width = weight.shape[1]
    state = jnp.zeros((examples, channels, width - 1), x.dtype) if initial_state is None else initial_state
    inputs = jnp.concatenate([state, x], axis=2)
    ids = np.zeros((examples, length), int) if segment_ids is None else segment_ids
    input_ids = np.concatenate([np.repeat(ids[:, :1], width - 1, axis=1), ids], axis=1)
    times = np.arange(length + width - 1)
    uses = times[None, :, None] == np.arange(length)[:, None, None] + np.arange(width)  # [t, input, k]
    is_same = ids[:, :, None] == input_ids[:, None, :]  # [b, t, input]
    z = jnp.einsum(
        "bci,tik,bti,ck->bct", inputs, uses.astype(x.dtype), is_same.astype(x.dtype), weight, precision="highest"
    )
    z = z if bias is None else z + bias[:, None]
    final_state = jnp.where(is_same[:, -1, None, length:], inputs[:, :, length:], 0)
    return jax.nn.silu(z) if activation else z, final_state


# ----------------------------------------------------------------------------------------------------------------------
# Comparison.


def assert_close(actual: Any, expected: Any, where: str = "", *, factor: float = 1, dtype: Any = None) -> None:
    """The error's norm is within the tolerance of the dtype, by default that of `actual`, relative to the expected.

    Terms have a size of about 1. Where they cancel in all of the few elements of a result, the norm is that of ones.
    """
    actual = np.asarray(actual)
    assert actual.shape == expected.shape, f"{where} shape {actual.shape}, expected {expected.shape}"
    tolerance = factor * TOLERANCE[jnp.dtype(actual.dtype if dtype is None else dtype).name]
    expected = np.asarray(expected).astype(np.float64)
    norm = max(np.linalg.norm(expected), np.sqrt(expected.size))
    error = np.linalg.norm(actual.astype(np.float64) - expected)
    assert error <= tolerance * norm, f"{where} relative error {error / norm:.2e}, not {tolerance}"


def assert_gradients_close(
    problem: Problem, actual: dict[str, Any], expected: dict[str, np.ndarray], channels_last: bool, where: str = ""
) -> None:
    """Gradients as of `problem.operands`; each has the dtype of its primal."""
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        assert gradient.dtype == problem.arrays[name].dtype, f"{where} {name} {gradient.dtype}"
        gradient = in_layout(gradient, channels_last) if name == "x" else gradient
        factor = PARAMETER_FACTOR if name in ("weight", "bias") else 1
        assert_close(gradient, expected[name], f"{where} d_{name}", factor=factor)
