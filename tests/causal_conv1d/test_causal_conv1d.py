"""causal_conv1d, its gradient and its update: values, sequences, states, errors."""

from __future__ import annotations

import functools
import inspect
import itertools
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_conv1d import matrix
from causal_conv1d import reference as convolutions
from causal_conv1d.reference import (
    LAYOUTS,
    Convolution,
    check_gradients,
    check_outputs,
    expected_gradients,
    expected_outputs,
    in_layout,
    make_convolution,
    part_of,
)
from support import cases
from support.cases import FLOATING, Expected, assert_same_bits
from support.kernels import Batch, kernels_of
from support.programs import copies_of

from jax_baracuda import causal_conv1d, causal_conv1d_backward, causal_conv1d_update, forward_mode

WIDTHS = range(1, 9)
WIDER = (9, 17, 40)
"""Widths that have no kernel."""
OPTIONS = tuple(
    {"has_bias": bias, "has_state": state, "has_ids": ids, "activation": activation}
    for bias, state, ids, activation in itertools.product((True, False), (False, True), (False, True), ("silu", None))
)

SHAPES = (
    (2, 34, 20),
    (2, 13, 37),
    (3, 8, 64),
    (1, 21, 5),
    (2, 1, 90),
    (2, 66, 18),
    (2, 3, 0),
    (0, 3, 4),
    (2, 0, 4),
    (1, 1, 1),
    (3, 9, 1),
    (2, 5, 2),
    (2, 17, 3),
    (2, 8, 64),
    (3, 33, 130),
    (1, 1100, 9),
    (1, 257, 31),
    (2, 6, 1026),
    (1, 8, 4099),
)
"""(B, C, L): empty, shorter than a filter, odd, and sizes that reach every path of the kernels. They are an odd number,
so that in turns each meets both activations."""

each_layout = pytest.mark.parametrize("channels_last", LAYOUTS, ids=["channels first", "channels last"])
each_dtype = pytest.mark.parametrize("dtype", FLOATING)


def cotangents(rng: np.random.Generator, problem: Convolution) -> tuple[np.ndarray, np.ndarray]:
    """Random cotangents of y ``[B, C, L]`` and of the final state."""
    return tuple(
        rng.normal(size=shape).astype(problem.dtype) for shape in (problem.arrays["x"].shape, problem.state_shape)
    )


def value_and_pullback(problem: Convolution, channels_last: bool, arrays: Any, *d_outputs: Any) -> Any:
    outputs, vjp = jax.vjp(lambda arrays: problem.call(arrays, channels_last), arrays)
    return outputs, vjp(d_outputs)[0]


def add_call(batch: Batch, rng: np.random.Generator, problem: Convolution, channels_last: bool, where: str) -> None:
    """Adds a call and the check of its outputs and of the gradients of all arrays."""
    dy, d_state = cotangents(rng, problem)
    operands = problem.operands(channels_last)
    dy_in_layout = in_layout(dy, channels_last)

    def check(outputs: Any, gradients: Any) -> None:
        check_outputs(problem, channels_last, *outputs, where)
        expected = expected_gradients(problem, dy, d_state)
        check_gradients(gradients, expected, channels_last, where)

    call = functools.partial(value_and_pullback, problem, channels_last)
    batch.add(call, (operands, dy_in_layout, d_state), check)


# ----------------------------------------------------------------------------------------------------------------------
# Values and gradients.


def test_reference_itself(rng: np.random.Generator) -> None:
    """The NumPy reference agrees with np.convolve. Its outputs and gradients agree with the reference of the matrix,
    also for packed sequences."""
    problem = make_convolution(rng, (2, 3, 20), 4, "float64", activation=None)
    x, weight, bias = problem.arrays.values()
    y, _ = convolutions.reference(problem)
    for example, channel in np.ndindex(2, 3):
        expected = np.convolve(x[example, channel], weight[channel, ::-1])[:20] + bias[channel]
        np.testing.assert_allclose(y[example, channel].astype(np.float64), expected, rtol=1e-12, atol=1e-12)

    def of_matrix(problem: Convolution, arrays: dict[str, Any]) -> Any:
        activation = jax.nn.silu if problem.activation else lambda z: z
        operands = (arrays.get(name) for name in ("x", "weight", "bias", "initial_state"))
        return matrix.reference(activation, *operands, problem.segment_ids)

    for options in OPTIONS:
        problem = make_convolution(rng, (2, 3, 20), 4, "float64", **options)
        dy, d_state = cotangents(rng, problem)
        with jax.enable_x64(True):
            outputs, vjp = jax.vjp(functools.partial(of_matrix, problem), problem.arrays)
            check_outputs(problem, False, *outputs, str(options))
            expected = expected_gradients(problem, dy, d_state)
            check_gradients(vjp((dy, d_state))[0], expected, False, str(options))


@each_dtype
@pytest.mark.parametrize("count", [1, 11])
def test_comparison_sees_every_element(rng: np.random.Generator, dtype: str, count: int) -> None:
    """The comparison accepts the exact numbers. It finds each wrong 0, unless 0 is within the error."""
    problem = make_convolution(rng, (1, 2, 4099), 4, dtype, has_state=True)
    dy, d_state = cotangents(rng, problem)
    gradients = expected_gradients(problem, dy, d_state)
    for name, expected in ({"y": expected_outputs(problem)[0]} | gradients).items():
        exact = cases.rounded(expected.exact, dtype)
        expected.check(exact, name)
        visible = np.flatnonzero(np.abs(expected.exact) > 2 * expected.error)
        assert len(visible) >= 0.99 * exact.size, name
        wrong = exact.copy()
        wrong.flat[rng.choice(visible, min(count, len(visible)), replace=False)] = 0
        with pytest.raises(AssertionError, match=f"{min(count, len(visible))} of {exact.size} elements are wrong"):
            expected.check(wrong)


@each_layout
@each_dtype
def test_value_and_gradient(rng: np.random.Generator, dtype: str, channels_last: bool) -> None:
    """Every width, with varying options, sizes and parameter dtypes; then random small sizes. Filters of more than 8
    taps run in plain JAX."""
    batch = Batch()
    sizes = itertools.cycle(SHAPES)
    narrow = dtype in ("float16", "bfloat16")
    for width in (*WIDTHS, *WIDER):
        for k in range(4):
            options = OPTIONS[(4 * width + k + 5 * channels_last) % len(OPTIONS)]
            parameter_dtype = "float32" if narrow and k % 2 else dtype
            shape = next(sizes)
            problem = make_convolution(rng, shape, width, dtype, parameter_dtype=parameter_dtype, **options)
            add_call(batch, rng, problem, channels_last, f"{shape} width {width} {parameter_dtype} {options}")
    for i in rng.choice(len(OPTIONS), 5, replace=False):
        shape, width = tuple(rng.integers(0, (4, 21, 41)).tolist()), int(rng.integers(1, 13))
        problem = make_convolution(rng, shape, width, dtype, **OPTIONS[i])
        add_call(batch, rng, problem, channels_last, f"{shape} width {width} {OPTIONS[i]}")
    with cases.x64_for(dtype):
        called = batch.run()
    assert called.keys() == {"causal_conv1d", "causal_conv1d_backward"}


def test_long_sums(rng: np.random.Generator) -> None:
    """Gradients of parameters over 2^20 terms have no larger errors than sums of some tens of terms."""
    problem = make_convolution(rng, (4, 1, 2**18 + 3), 4)
    dy, d_state = cotangents(rng, problem)
    expected = expected_gradients(problem, dy, np.zeros_like(d_state))
    for channels_last in LAYOUTS:
        arrays = problem.operands(channels_last)
        options = {"activation": problem.activation, "channels_last": channels_last}
        results = causal_conv1d_backward(in_layout(dy, channels_last), *arrays.values(), **options)
        check_gradients(dict(zip(arrays, results, strict=True)), expected, channels_last)


def test_positive_long_sums_of_16_bits(rng: np.random.Generator) -> None:
    """Long sums of positive 16-bit terms do not stagnate, and are rounded once."""
    for dtype, channels_last in itertools.product(("float16", "bfloat16"), LAYOUTS):
        x = np.ones((3, 2, 7001), jnp.dtype(dtype))
        dy = np.full_like(x, 1 / 2)
        weight, bias = np.ones((2, 3), np.float32), np.zeros(2, np.float32)
        operands = (in_layout(dy, channels_last), in_layout(x, channels_last), weight, bias)
        _, dweight, dbias = causal_conv1d_backward(*operands, channels_last=channels_last)
        np.testing.assert_array_equal(dbias, np.full(2, 3 * 7001 / 2))
        np.testing.assert_array_equal(dweight, np.tile(3 * np.array([6999, 7000, 7001]) / 2, (2, 1)))


def test_extreme_activations() -> None:
    """Where exp overflows or underflows, silu is 0 or z, and its gradient is 0 or 1."""
    z = np.array([-1e4, -200, -89, -88, 0, 88, 89, 200, 1e4], np.float32).reshape(1, 1, -1)
    weight = np.ones((1, 1), np.float32)
    y, vjp = jax.vjp(lambda x: causal_conv1d(x, weight, activation="silu"), z)
    wide = z.astype(np.float64)
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-wide))
    np.testing.assert_allclose(y, wide * s, rtol=1e-6, atol=1e-36)
    np.testing.assert_allclose(vjp(np.ones_like(z))[0], s * (1 + wide * (1 - s)), rtol=1e-6, atol=1e-35)


def test_float8_runs_as_plain_jax(rng: np.random.Generator) -> None:
    """A dtype without kernels runs as plain JAX, here with float32 parameters."""
    problem = make_convolution(
        rng, (2, 4, 9), 3, "float8_e4m3fn", parameter_dtype="float32", has_state=True, has_ids=True
    )
    for channels_last in LAYOUTS:
        operands = problem.operands(channels_last)
        call = jax.jit(lambda arrays, c=channels_last: problem.call(arrays, c))
        assert kernels_of(call, operands) == []
        y, state = call(operands)
        check_outputs(problem, channels_last, y, state, f"channels last: {channels_last}")


def test_kernels(rng: np.random.Generator) -> None:
    """Value and gradient are one kernel call each. The only residuals are the arguments."""
    problem = make_convolution(rng, (2, 6, 50), 4, has_state=True, has_ids=True)
    for channels_last in LAYOUTS:
        operands = problem.operands(channels_last)
        call = jax.jit(lambda arrays, c=channels_last: problem.call(arrays, c))
        assert kernels_of(call, operands) == ["causal_conv1d"]
        gradient = jax.jit(jax.grad(lambda arrays, call=call: (call(arrays)[0] ** 2).sum()))
        assert kernels_of(gradient, operands) == ["causal_conv1d", "causal_conv1d_backward"]
        _, vjp = jax.vjp(call, operands)
        kept = [x for x in jax.tree.leaves(vjp) if hasattr(x, "shape")]
        assert kept, "this version of JAX does not show the residuals"
        assert sum(x.size >= 2 * 6 * 50 for x in kept) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Packed sequences.


@each_layout
@each_dtype
def test_nothing_leaks_from_other_sequences(rng: np.random.Generator, dtype: str, channels_last: bool) -> None:
    """NaN and infinity in the inputs and cotangents of one sequence do not reach other sequences."""
    ids = np.array([[0] * 6 + [1] * 5 + [0] * 6 + [2] * 2] * 2)
    for bad, width in ((np.nan, 4), (np.inf, 4), (np.nan, 9)):
        problem = make_convolution(rng, (2, 9, ids.shape[1]), width, dtype, has_state=True)
        problem.arrays["x"][:, :, ids[0] == 1] = bad
        problem = Convolution(problem.arrays, ids, problem.activation)
        dy, d_state = cotangents(rng, problem)
        dy[:, :, ids[0] == 1] = bad
        with cases.x64_for(dtype):
            (y, state), gradients = value_and_pullback(
                problem, channels_last, problem.operands(channels_last), in_layout(dy, channels_last), d_state
            )
        others = ids[0] != 1
        x, dy = (np.where(others, signal, 0).astype(signal.dtype) for signal in (problem.arrays["x"], dy))
        clean = Convolution(problem.arrays | {"x": x}, ids, problem.activation)
        expected_y, expected_state = expected_outputs(clean)
        expected = expected_gradients(clean, dy, d_state)
        of_others = np.s_[:, :, others]
        part_of(expected_y, of_others).check(np.asarray(in_layout(y, channels_last))[of_others])
        part_of(expected["x"], of_others).check(np.asarray(in_layout(gradients["x"], channels_last))[of_others])
        expected["initial_state"].check(gradients["initial_state"])
        assert_same_bits(state, expected_state)


@each_layout
@pytest.mark.parametrize("function", [causal_conv1d, forward_mode.causal_conv1d], ids=["kernel", "plain JAX"])
def test_nothing_leaks_into_gradients_of_weights(
    rng: np.random.Generator, function: Callable[..., Any], channels_last: bool
) -> None:
    """NaN or infinity in a sequence of one input reaches the gradient of the last tap, but of no other tap."""
    problem = make_convolution(rng, (2, 5, 12), 4, has_state=True, activation=None)
    ids = np.array([[0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2]] * 2)
    x = problem.arrays["x"].copy()
    x[:, :, 5] = 0
    expected = expected_gradients(
        Convolution(problem.arrays | {"x": x}, ids), x, np.zeros(problem.state_shape, np.float32)
    )
    dy = in_layout(x, channels_last)
    for bad in (np.nan, np.inf):
        problem.arrays["x"][:, :, 5] = bad
        packed = Convolution(problem.arrays, ids)
        _, vjp = jax.vjp(lambda a, p=packed: p.call(a, channels_last, function)[0], packed.operands(channels_last))
        gradients = vjp(dy)[0]
        part_of(expected["weight"], np.s_[:, :-1]).check(gradients["weight"][:, :-1])
        expected["x"].check(in_layout(gradients["x"], channels_last))


@pytest.mark.parametrize("ids_dtype", [*cases.INTEGERS, "int4"])
def test_ids_of_every_dtype(rng: np.random.Generator, ids_dtype: str) -> None:
    """Ids are compared in their own dtype, up to its extremes. They may differ in the high bits alone."""
    info = jnp.iinfo(ids_dtype)
    values = [int(info.min), int(info.max), 0, 1, *([2**32, 2**33] if info.bits == 64 else [])]
    ids = np.array(rng.choice(np.array(values, object), (2, 30)), object)
    ids = ids.astype(np.int64 if info.min < 0 else np.uint64).astype(jnp.dtype(ids_dtype))
    for width in (4, 9):
        problem = Convolution(make_convolution(rng, (2, 3, 30), width).arrays, ids, "silu")
        with cases.x64_for(ids_dtype):
            y, state = problem.call(problem.arrays, False)
        check_outputs(problem, False, y, state, f"{ids_dtype} width {width}")


# ----------------------------------------------------------------------------------------------------------------------
# States and decoding.


@pytest.mark.parametrize("channels_last", LAYOUTS)
@pytest.mark.parametrize("width", [1, 2, 4, 9])
def test_states_of_every_packed_sequence(rng: np.random.Generator, width: int, channels_last: bool) -> None:
    """Each is the final state of the signal cut off after the sequence; also if ids recur or are missing."""
    num_segments, length = 6, 19
    for has_state, ids_dtype in ((False, "int32"), (True, "int8"), (True, "uint16")):
        problem = make_convolution(rng, (3, 5, length), width, has_state=has_state and width > 1)
        ids = (np.cumsum(rng.random((3, length)) < 0.3, axis=1) % 5).astype(ids_dtype)
        ids[:, 0] = 5

        def states_of(arrays: Any, ids: Any = ids, activation: Any = problem.activation) -> Any:
            options = {"activation": activation, "channels_last": channels_last, "segment_ids": ids}
            return causal_conv1d(**arrays, **options, return_final_state=True, num_segments=num_segments)

        arrays = problem.operands(channels_last)
        (y, states), pull = jax.vjp(jax.jit(states_of), arrays)
        assert_same_bits(y, causal_conv1d(**arrays, activation=problem.activation, channels_last=channels_last,
                                          segment_ids=ids))  # fmt: skip
        assert states.shape == (3, num_segments, 5, width - 1)
        d_states = rng.normal(size=states.shape).astype(np.float32)
        gradients = pull((jnp.zeros_like(y), d_states))[0]
        d_inputs = np.zeros((3, 5, width - 1 + length))
        before = problem.arrays.get("initial_state", np.zeros((3, 5, width - 1), np.float32))
        inputs = np.concatenate([before, problem.arrays["x"]], axis=2)
        input_ids = np.concatenate([np.repeat(ids[:, :1], width - 1, axis=1), ids], axis=1)
        for b, s in np.ndindex(3, num_segments):
            places = np.flatnonzero(input_ids[b] == s)
            expected = np.zeros((5, width - 1), np.float32)
            if len(places) > 0:
                own = slice(places[-1] + 2 - width, places[-1] + 1)
                is_own = input_ids[b, own] == s
                expected = np.where(is_own, inputs[b, :, own], 0)
                d_inputs[b, :, own] += np.where(is_own, d_states[b, s], 0)
            assert_same_bits(states[b, s], expected)
        np.testing.assert_allclose(in_layout(gradients["x"], channels_last), d_inputs[:, :, width - 1 :], 1e-5, 1e-5)
        if "initial_state" in gradients:
            np.testing.assert_allclose(gradients["initial_state"], d_inputs[:, :, : width - 1], 1e-5, 1e-5)


def test_number_of_segments_without_states_is_refused() -> None:
    for options in ({"segment_ids": IDS}, {"return_final_state": True}):
        with pytest.raises(ValueError, match="causal_conv1d: num_segments needs segment_ids and return_final_state"):
            causal_conv1d(X, WEIGHT, num_segments=2, **options)
    with pytest.raises(ValueError, match="causal_conv1d: num_segments must be 0 or more"):
        causal_conv1d(X, WEIGHT, segment_ids=IDS, return_final_state=True, num_segments=-1)


def as_convolution(problem: Convolution, state: np.ndarray) -> Convolution:
    """An update as a convolution: its initial state is the most recent part of the update's state."""
    recent = state[:, :, state.shape[2] - (problem.width - 1) :]
    return Convolution(problem.arrays | {"initial_state": recent}, None, problem.activation)


def shifted_state(problem: Convolution, state: np.ndarray) -> np.ndarray:
    return np.concatenate([state, problem.arrays["x"]], axis=2)[:, :, problem.arrays["x"].shape[2] :]


def expected_gradients_of_update(
    problem: Convolution, state: np.ndarray, dy: np.ndarray, d_new_state: np.ndarray
) -> dict[str, Expected]:
    """The gradients of the problem's arrays and of the state.

    The convolution's final state is the end of the new state. The filter may also read the older inputs in the new
    state. The two cotangents of such an input are added in the dtype.
    """
    as_one, num_new = as_convolution(problem, state), problem.arrays["x"].shape[2]
    older = state.shape[2] - (problem.width - 1)
    expected = expected_gradients(as_one, dy, d_new_state[:, :, older:])
    exact, error = np.zeros((2, *state.shape[:2], state.shape[2] + num_new), np.longdouble)
    for all_inputs, of_kernel in ((exact, "exact"), (error, "error")):
        parts = [getattr(expected[name], of_kernel) for name in ("initial_state", "x")]
        all_inputs[:, :, older:] = np.concatenate(parts, axis=2)
    moved = np.s_[:, :, num_new : num_new + older]
    error[moved] += (np.abs(exact[moved]) + error[moved]) * float(jnp.finfo(problem.dtype).eps) / 2
    exact[moved] += d_new_state[:, :, :older]
    of_inputs = Expected(exact, problem.dtype, error)
    del expected["initial_state"]
    in_state, new = np.s_[:, :, : state.shape[2]], np.s_[:, :, state.shape[2] :]
    return expected | {"x": part_of(of_inputs, new), "state": part_of(of_inputs, in_state)}


UPDATES = (
    *(
        (width, extra, new_inputs, 11)
        for width, extra, new_inputs in itertools.product((1, 2, 3, 4, 8, *WIDER), (0, 1, 5), (1, 2, 7))
        if (width + extra + new_inputs) % 2 or width == 4
    ),
    *((width, extra, 1, 8) for width, extra in itertools.product((1, 4, 5, 6, 7, 8), (0, 1))),  # vectors of channels
)
"""(W, K - (W - 1), T, C)"""


@each_layout
@each_dtype
def test_update(rng: np.random.Generator, dtype: str, channels_last: bool) -> None:
    """y, the new state and all gradients are right, for states of minimum length and longer, and one input or more."""
    batch = Batch()
    for width, extra, new_inputs, channels in UPDATES:
        problem = make_convolution(rng, (2, channels, new_inputs), width, dtype, has_bias=(width + extra) % 3 > 0)
        state = rng.normal(size=(2, channels, width - 1 + extra)).astype(problem.dtype)
        dy = rng.normal(size=(2, channels, new_inputs)).astype(problem.dtype)
        d_new_state = rng.normal(size=state.shape).astype(problem.dtype)
        where = f"width {width}, {extra} more, {new_inputs} inputs, {channels} channels"

        def update(arrays: Any, state: Any, dy: Any, d_new_state: Any, problem: Convolution = problem) -> Any:
            call = functools.partial(causal_conv1d_update, activation=problem.activation, channels_last=channels_last)
            outputs, vjp = jax.vjp(lambda arrays, state: call(state=state, **arrays), arrays, state)
            return outputs, vjp((dy, d_new_state))

        def check(
            outputs: Any,
            gradients: Any,
            problem: Convolution = problem,
            state: np.ndarray = state,
            dy: np.ndarray = dy,
            d_new_state: np.ndarray = d_new_state,
            where: str = where,
        ) -> None:
            y, new_state = outputs
            as_one = as_convolution(problem, state)
            expected_outputs(as_one)[0].check(in_layout(y, channels_last), where)
            assert_same_bits(new_state, shifted_state(problem, state), where)
            of_arrays, d_state = gradients
            expected = expected_gradients_of_update(problem, state, dy, d_new_state)
            expected.pop("state").check(d_state, f"{where} d_state")
            check_gradients(of_arrays, expected, channels_last, where)

        batch.add(update, (problem.operands(channels_last), state, in_layout(dy, channels_last), d_new_state), check)
    with cases.x64_for(dtype):
        num_kernels = sum(width in WIDTHS for width, *_ in UPDATES)
        assert batch.run() == {"causal_conv1d_update": num_kernels, "causal_conv1d_backward": num_kernels}


STATE_SHAPE = (7, 24, 5)


@pytest.mark.parametrize("loop", ["step", "scan", "fori_loop"])
def test_donated_state_is_updated_in_place(rng: np.random.Generator, loop: str) -> None:
    """A decoding step, alone or in a loop, updates a donated state in place, without a copy."""
    examples, channels, num_states = STATE_SHAPE
    weight, bias = rng.normal(size=(channels, 4)).astype(np.float32), rng.normal(size=channels).astype(np.float32)
    x = rng.normal(size=(9, examples, channels)).astype(np.float32)
    state = rng.normal(size=STATE_SHAPE).astype(np.float32)

    def step(state: Any, x: Any) -> Any:
        y, state = causal_conv1d_update(x, state, weight, bias, activation="silu")
        return state, y

    def fori_loop(state: Any, x: Any) -> Any:
        def body(i: Any, carry: Any) -> Any:
            state, total = carry
            state, y = step(state, x[i])
            return state, total + y

        return jax.lax.fori_loop(0, x.shape[0], body, (state, jnp.zeros(STATE_SHAPE[:2])))

    functions = {"step": lambda s, x: step(s, x[0]), "scan": lambda s, x: jax.lax.scan(step, s, x)}
    run = jax.jit(functions.get(loop, fori_loop), donate_argnums=0)
    compiled = run.lower(state, x).compile()
    assert not copies_of(state, compiled.as_text())
    assert compiled.memory_analysis().alias_size_in_bytes >= state.nbytes
    donated = jnp.array(state)
    new_state, _ = run(donated, x)
    assert donated.is_deleted()
    num_steps = 1 if loop == "step" else len(x)
    expected = np.concatenate([state, np.moveaxis(x[:num_steps], 0, 2)], axis=2)[:, :, num_steps:]
    assert_same_bits(new_state, expected)


# ----------------------------------------------------------------------------------------------------------------------
# Errors.

X, WEIGHT, B, STATE = (np.ones(shape, np.float32) for shape in ((2, 6, 9), (6, 4), (6,), (2, 6, 3)))
IDS = np.zeros((2, 9), np.int32)

# Changed arguments, the exception, and the message after the function's name.
COMMON_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "x is None": ({"x": None}, "TypeError: x must be an array, got NoneType"),
    "x is integer": ({"x": X.astype(np.int32)}, "TypeError: x must have a real floating dtype, got int32"),
    "x is bool": ({"x": X > 0}, "TypeError: x must have a real floating dtype, got bool"),
    "x is complex": ({"x": X.astype(np.complex64)}, "TypeError: x must have a real floating dtype, got complex64"),
    "weight is integer": ({"weight": WEIGHT.astype(int)}, "TypeError: weight must have dtype float32 .*got int"),
    "weight has other dtype": (
        {"weight": WEIGHT.astype(np.float16)},
        "TypeError: weight must have dtype float32 where x has float32, got float16",
    ),
    "weight of 16 bits, of another kind": (
        {"x": X.astype(jnp.bfloat16), "weight": WEIGHT.astype(np.float16)},
        "TypeError: weight must have dtype bfloat16 or float32 where x has bfloat16, got float16",
    ),
    "weight of rank 3": (
        {"weight": WEIGHT[:, None]},
        r"ValueError: weight must have shape \[C, W\] = \(6, W\) .*got \(6, 1, 4\)",
    ),
    "weight of other channels": (
        {"weight": WEIGHT[:5]},
        r"ValueError: weight must have shape \[C, W\] = \(6, W\) to fit x of shape \[B, C, L\] .*\(2, 6.*got \(5, 4\)",
    ),
    "width 0": ({"weight": WEIGHT[:, :0]}, r"ValueError: weight .* W >= 1, got \(6, 0\)"),
    "bias is a number": ({"bias": 1.0}, r"ValueError: bias must have shape \[C\] = \(6,\) .*got \(\)"),
    "bias has other dtype": ({"bias": B.astype(np.float16)}, "TypeError: bias must have dtype float32 .*got float16"),
    "bias of other channels": ({"bias": B[:5]}, r"ValueError: bias must have shape \[C\] = \(6,\) .*got \(5,\)"),
    "bias of rank 2": ({"bias": B[:, None]}, r"ValueError: bias must have shape \[C\] = \(6,\) .*got \(6, 1\)"),
    "unknown activation": (
        {"activation": "relu"},
        "ValueError: activation must be None, 'silu' or 'swish', got 'relu'",
    ),
    "activation is a function": ({"activation": jax.nn.silu}, "ValueError: activation must be None, 'silu' or 'swish'"),
    "channels elsewhere": ({"channels_last": True}, r"ValueError: weight must have shape .*x of shape \[B, L, C\]"),
}

SEQUENCE_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "x of rank 2": ({"x": X[0]}, r"ValueError: x must have shape \[B, C, L\] .*got \(6, 9\)"),
    "x of rank 4": ({"x": X[None]}, r"ValueError: x must have shape \[B, C, L\] .*got \(1, 2, 6, 9\)"),
    "state has other dtype": (
        {"initial_state": STATE.astype(np.float16)},
        "TypeError: initial_state must have the dtype of x, float32, got float16",
    ),
    "state is too long": (
        {"initial_state": np.ones((2, 6, 4), np.float32)},
        r"ValueError: initial_state must have shape .* = \(2, 6, 3\) .*got \(2, 6, 4\)",
    ),
    "state has channels last": (
        {"initial_state": STATE.swapaxes(1, 2)},
        r"ValueError: initial_state must have shape .* = \(2, 6, 3\) .*got \(2, 3, 6\)",
    ),
    "ids of rank 1": (
        {"segment_ids": IDS[0]},
        r"ValueError: segment_ids must have shape \[B, L\] = \(2, 9\), got \(9,",
    ),
    "ids of other length": (
        {"segment_ids": IDS[:, :8]},
        r"ValueError: segment_ids must have shape \[B, L\] = \(2, 9\), got \(2, 8\)",
    ),
}

BACKWARD_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "d_output has other dtype": (
        {"d_output": X.astype(np.float16)},
        "TypeError: d_output must have the dtype of x, float32, got float16",
    ),
    "d_output has other shape": (
        {"d_output": X[:, :, :8]},
        r"ValueError: d_output must have shape \(2, 6, 9\) .*got \(2, 6, 8\)",
    ),
    "d_final_state has other dtype": (
        {"d_final_state": STATE.astype(np.float16)},
        "TypeError: d_final_state must have the dtype of x, float32, got float16",
    ),
    "d_final_state has other shape": (
        {"d_final_state": STATE[:, :, :2]},
        r"ValueError: d_final_state must have shape .* = \(2, 6, 3\) .*got \(2, 6, 2\)",
    ),
}

UPDATE_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "x of rank 1": ({"x": B}, r"ValueError: x must have shape .*got \(6,\)"),
    "state has other dtype": (
        {"state": STATE.astype(np.float16)},
        "TypeError: state must have the dtype of x, float32, got float16",
    ),
    "state is too short": (
        {"state": STATE[:, :, :2]},
        r"ValueError: state must have shape \[B, C, K\] = \(2, 6, K\) with K >= W - 1 = 3 .*got \(2, 6, 2\)",
    ),
    "state of other examples": (
        {"state": STATE[:1]},
        r"ValueError: state must have shape .*\(2, 6, K\).*got \(1, 6, 3\)",
    ),
    "state of other channels": ({"state": STATE[:, :4]}, r"ValueError: state must have shape .*got \(2, 4, 3\)"),
    "state of rank 2": ({"state": STATE[:, :, 0]}, r"ValueError: state must have shape .*got \(2, 6\)"),
}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "causal_conv1d": (causal_conv1d, {"x": X, "weight": WEIGHT, "bias": B}, COMMON_ERRORS | SEQUENCE_ERRORS),
    "forward_mode": (
        forward_mode.causal_conv1d,
        {"x": X, "weight": WEIGHT, "bias": B},
        COMMON_ERRORS | SEQUENCE_ERRORS,
    ),
    "causal_conv1d_backward": (
        causal_conv1d_backward,
        {"d_output": X, "x": X, "weight": WEIGHT, "bias": B},
        COMMON_ERRORS | SEQUENCE_ERRORS | BACKWARD_ERRORS,
    ),
    "causal_conv1d_update": (
        causal_conv1d_update,
        {"x": X, "state": STATE, "weight": WEIGHT, "bias": B},
        COMMON_ERRORS | UPDATE_ERRORS,
    ),
}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, (_, _, errors) in CALLS.items() for case in errors], ids=str
)
def test_errors(name: str, case: str) -> None:
    """The message names the function, the argument, the value given and the values allowed; under jit, too."""
    function, arguments, errors = CALLS[name]
    changed, error = errors[case]
    for call in (function, lambda **arguments: jax.jit(lambda: function(**arguments))()):
        with cases.raises(error, f"^{function.__name__}: "):
            call(**(arguments | changed))


def test_no_kernel_is_asked_for_wider_filters() -> None:
    weight, state = np.ones((6, 9), np.float32), np.ones((2, 6, 8), np.float32)
    for function, *arrays in (
        (causal_conv1d, X, weight),
        (causal_conv1d_backward, X, X, weight),
        (causal_conv1d_update, X, state, weight),
    ):
        function(*arrays)
        pattern = f"^{function.__name__}: implementation='kernel' is asked for, .*: the filter has more than 8 taps"
        with pytest.raises(ValueError, match=pattern):
            function(*arrays, implementation="kernel")


def test_overloads_have_the_arguments_of_the_function() -> None:
    """Overloads differ from the function only in `return_final_state` and the return type."""
    parameters = inspect.signature(causal_conv1d).parameters
    overloads = typing.get_overloads(causal_conv1d)
    assert len(overloads) == 3
    for overloaded in overloads:
        of_overload = inspect.signature(overloaded).parameters
        assert list(of_overload) == list(parameters)
        for name in parameters.keys() - {"return_final_state"}:
            assert of_overload[name] == parameters[name]


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize(("dtype", "limit"), [("float16", 2048), ("bfloat16", 256)])
def test_ties_are_rounded_to_even(rng: np.random.Generator, dtype: str, limit: int, channels_last: bool) -> None:
    """Sums of integers are exact in float32, and often in the middle of two numbers of 16 bits."""
    x, weight = rng.integers(-limit, limit + 1, (2, 20, 70)), np.ones((20, 4), jnp.dtype(dtype))
    exact = sum(np.pad(x, ((0, 0), (0, 0), (back, 0)))[..., : x.shape[2]] for back in range(4))
    layout = (lambda array: np.swapaxes(array, 1, 2)) if channels_last else np.asarray
    output = causal_conv1d(layout(x).astype(weight.dtype), weight, channels_last=channels_last)
    np.testing.assert_array_equal(np.asarray(output), layout(exact).astype(weight.dtype))
