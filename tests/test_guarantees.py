"""What precision_guarantee promises, asserted for every op, element type and claim."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any

import cases
import jax
import numpy as np
import pytest
from cases import assert_same_bits, assert_same_values

from jax_baracuda import precision_guarantee
from jax_baracuda._core.op import KERNEL_PLATFORMS, OPS

RUNS = 20


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an op, and the results that exact arithmetic, rounded once, gives."""

    operands: tuple[np.ndarray, ...]
    params: dict[str, Any]
    expected: tuple[np.ndarray, ...]


def reference_winner(data: np.ndarray, ids: np.ndarray, segments: int, first_wins: bool) -> np.ndarray:
    """The winner of each cell as the kernels encode it: a row, -1 for nobody, or minus the number of tied members."""
    share = cases.shares(data, ids, segments, "first" if first_wins else "split")
    winner = np.full((segments, *data.shape[1:]), -1, np.int32)
    for cell in np.ndindex(winner.shape):
        rows = np.flatnonzero((ids == cell[0]) & (share[(slice(None), *cell[1:])] > 0))
        if len(rows):
            members = round(1 / share[(rows[0], *cell[1:])])
            winner[cell] = rows[0] if members == 1 else -members
    return winner


def segment_operands(rng: np.random.Generator, dtype: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Two batch elements that share their ids; enough work for several threads of a CPU."""
    rows, features, segments = 3000, 48 if np.dtype(cases.jnp.dtype(dtype)).itemsize > 2 else 120, 30
    data, ids = cases.make_data(rng, (2, rows, features), dtype), cases.make_ids(rng, rows, segments)
    if cases.is_floating(data.dtype):
        data[:, ids == 3, ::4] = -np.inf  # ties with the identity
    ids[ids == 5] = -1  # an empty segment
    return data, ids[None], segments


def segment_max(rng: np.random.Generator, dtype: str) -> Call:
    data, ids, segments = segment_operands(rng, dtype)
    maxima = np.stack([cases.reference_max(x, ids[0], segments) for x in data])
    params = {"num_segments": segments, "indices_are_sorted": False, "first_wins": False}
    return Call((data, ids), params, (maxima,))


def segment_max_with_winner(rng: np.random.Generator, dtype: str) -> Call:
    data, ids, segments = segment_operands(rng, dtype)
    maxima = np.stack([cases.reference_max(x, ids[0], segments) for x in data])
    winner = np.stack([reference_winner(x, ids[0], segments, False) for x in data])
    params = {"num_segments": segments, "indices_are_sorted": False, "first_wins": False}
    return Call((data, ids), params, (maxima, winner))


def segment_max_backward(rng: np.random.Generator, dtype: str) -> Call:
    data, ids, segments = segment_operands(rng, dtype)
    maxima = np.stack([cases.reference_max(x, ids[0], segments) for x in data])
    winner = np.stack([reference_winner(x, ids[0], segments, False) for x in data])
    d_output = cases.cotangent(rng, maxima.shape, dtype)
    gradient = [cases.reference_gradient(d, x, ids[0], "split") for d, x in zip(d_output, data, strict=True)]
    return Call((d_output, winner, ids, data, maxima), {}, (np.stack(gradient),))


CALLS: dict[str, Callable[[np.random.Generator, str], Call]] = {
    "segment_max": segment_max,
    "segment_max_with_winner": segment_max_with_winner,
    "segment_max_backward": segment_max_backward,
}

EVERY_OP_AND_DTYPE = [(name, dtype) for name in sorted(OPS) for dtype in sorted(OPS[name].dtypes)]


def test_every_op_is_tested() -> None:
    assert set(CALLS) == set(OPS)


@pytest.mark.parametrize(("name", "dtype"), EVERY_OP_AND_DTYPE)
def test_guarantee(rng: np.random.Generator, name: str, dtype: str) -> None:
    """Each claim about an op on this platform; a claim that is not known here fails."""
    guarantee = precision_guarantee(name, dtype, cases.PLATFORM)
    call = CALLS[name](rng, dtype)
    with cases.x64_for(dtype):
        run = jax.jit(lambda *operands: OPS[name](*operands, **call.params))
        text = run.lower(*call.operands).as_text()
        assert f"@jax_baracuda.{name}(" in text, "no kernel serves this call"
        alone = [[np.asarray(x) for x in run(*call.operands)] for _ in range(RUNS)]

    def run_in_thread(_: int) -> list[np.ndarray]:
        with cases.x64_for(dtype):
            return [np.asarray(x) for x in run(*call.operands)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        concurrently = list(pool.map(run_in_thread, range(RUNS)))

    def all_bits(results: list[list[np.ndarray]]) -> set[bytes]:
        return {b"".join(x.tobytes() for x in result) for result in results}

    assert guarantee.bit_stable_on_same_hardware, "a claim not to be stable: say here what is claimed instead"
    assert len(all_bits(alone)) == 1
    assert guarantee.deterministic, "a claim not to be deterministic: say here what is claimed instead"
    assert all_bits(alone) == all_bits(concurrently)
    assert guarantee.accumulator == "none", "an op with an accumulator: assert here what it keeps"
    assert guarantee.math_precision in ("exact", "rounded once"), "another precision: assert here what it keeps"
    for actual, expected in zip(alone[0], call.expected, strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize(("name", "dtype"), EVERY_OP_AND_DTYPE)
def test_plain_jax_reference(rng: np.random.Generator, name: str, dtype: str) -> None:
    """The op's plain-JAX twin, from which its derivatives come, has the kernel's values, winners included."""
    call = CALLS[name](rng, dtype)
    with cases.x64_for(dtype):
        results = jax.jit(lambda *operands: OPS[name].reference(*operands, **call.params))(*call.operands)
    # XLA divides with an error of one unit in the last place on GPUs; the kernels round correctly.
    ulp = 0 if OPS[name].guarantee.math_precision == "exact" else float(cases.jnp.finfo(dtype).eps)
    for actual, expected in zip(results, call.expected, strict=True):
        assert_same_values(actual, expected, rtol=ulp)


@pytest.mark.parametrize(("name", "dtype"), EVERY_OP_AND_DTYPE)
def test_guarantees_exist_for_every_platform(name: str, dtype: str) -> None:
    """Each op with a kernel for a dtype has a record for each platform, by name of the dtype and by the dtype."""
    for platform in KERNEL_PLATFORMS:
        guarantee = precision_guarantee(name, dtype, platform)
        assert guarantee == precision_guarantee(name, cases.jnp.dtype(dtype), platform)
        assert {field.name for field in dataclasses.fields(guarantee)} == {
            "accumulator",
            "math_precision",
            "deterministic",
            "bit_stable_on_same_hardware",
        }


ERRORS = {
    "op": (("no_such_op", "float32", "cpu"), r"name must be one of \['segment_max.*got 'no_such_op'"),
    "platform": (("segment_max", "float32", "tpu"), r"platform must be one of .*'cpu', 'cuda'.*got 'tpu'"),
    "dtype": (("segment_max", "complex64", "cpu"), r"segment_max has kernels for dtype \[.*got 'complex64'"),
    "dtype of another op": (("segment_max_backward", "int32", "cpu"), r"segment_max_backward has kernels for dtype"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    arguments, message = ERRORS[case]
    with pytest.raises(ValueError, match=f"precision_guarantee: {message}"):
        precision_guarantee(*arguments)
