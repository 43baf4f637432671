"""The promises of precision_guarantee, asserted for every op, element type, flag and claim."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, recorded
from support.cases import Expected

from jax_baracuda import precision_guarantee
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.functions import resolved
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.native import KERNEL_PLATFORMS
from jax_baracuda._core.op import OPS
from jax_baracuda._examples.example import Example

RUNS = 20
FLAGS = ("deterministic", "indices_are_sorted")
SUMS_IN_ORDER = {
    *(
        f"{name}{suffix}"
        for name in ("gather_segment_sum", "gather_segment_max_backward", "gather_segment_min_backward")
        for suffix in ("", "_of_graphs")
    ),
    *("segment_softmax", "segment_softmax_backward", "segment_logsumexp"),
    *(name for name in OPS if name.startswith(("segment_attention", "graph_")) and "attention" in name),
}
"""Kernels that always add in a fixed order. Plain JAX, which may be chosen instead, does not on GPUs."""

EVERY_OP_AND_DTYPE = [(name, dtype) for name in sorted(OPS) for dtype in sorted(OPS[name].dtypes_of(name))]


def flags_of(name: str) -> list[dict[str, bool]]:
    """Every combination of the flags that the op takes."""
    taken = {
        *resolved(OPS[name].attributes, OPS[name].targets[name]),
        *(["deterministic"] if name in SUMS_IN_ORDER else []),
    }
    names = [flag for flag in FLAGS if flag in taken]
    return [dict(zip(names, values, strict=True)) for values in itertools.product((False, True), repeat=len(names))]


def sizes_of(example: Example) -> Mapping[str, int]:
    """Enough work for several threads of a CPU, and many rows of a segment."""
    sizes = example.sizes["check"]
    return {**sizes, "row": 3000, "segment": 30, "node": 700, "feature": 48} if "row" in sizes else sizes


def with_flags(call: OpCall, flags: Mapping[str, bool]) -> OpCall:
    operands = list(call.operands)
    names = list(call.operand_dims)
    if flags.get("indices_are_sorted"):
        ids = names.index("segment_ids")
        order = jnp.argsort(operands[ids], axis=-1)
        # Edges keep their two ends: gradients of attention have the maxima of the logits of a segment's edges.
        for position in {ids, names.index("gather_ids")} if "gather_ids" in names else {ids}:
            operands[position] = jnp.take_along_axis(operands[position], order, axis=-1)
    params = {**call.all_params, **flags, "implementation": "kernel"}
    return OpCall(call.op, operands, params)


def expected_results(call: OpCall) -> list[Expected]:
    """What the results may be, by the op's reference in the dtype of the accumulator.

    Values that are accumulated may have the error of some tens of roundings of the largest one.
    """
    dtype, precision = call.dtype, guarantee_of(call).math_precision
    wide = cases.accumulator(dtype) if cases.is_floating(dtype) else dtype
    operands = [x.astype(wide) if x.dtype == dtype else x for x in call.operands]
    results = OpCall(call.op, operands, {**call.all_params, "implementation": "xla"}).reference(*operands)

    def expected(result: np.ndarray, of_dtype: np.dtype) -> Expected:
        if not cases.is_floating(of_dtype):
            return Expected(result.astype(of_dtype), of_dtype)
        exact = result.astype(np.float64)
        info, largest = np.finfo(cases.accumulator(of_dtype)), np.abs(exact[np.isfinite(exact)]).max(initial=0)
        unit = float(info.eps) * np.abs(np.where(np.isfinite(exact), exact, 0))
        if precision == "accumulated":
            error = unit if is_in_float64(call) else 64 * float(info.eps) * largest
        elif precision == "within 2 ulp":
            error = 2 * unit
        else:  # on GPUs, XLA divides in the reference with an error of one unit in the last place
            error = unit if cases.PLATFORM == "cuda" else 0 * unit
        error = float(info.tiny) + error  # zeros have either sign
        return Expected(exact, of_dtype, error)

    return [
        expected(np.asarray(result), np.dtype(of_dtype))
        for result, (_, of_dtype) in zip(results, call.result_types(), strict=True)
    ]


def is_in_float64(call: OpCall) -> bool:
    """Whether the op adds in float64 for the sake of accuracy: nothing but its result is rounded."""
    return call.name.endswith("_in_float64")


def is_accumulated(call: OpCall) -> bool:
    return guarantee_of(call).math_precision == "accumulated"


def guarantee_of(call: OpCall) -> Guarantee:
    flags = {flag: bool(call.params.get(flag)) for flag in FLAGS}
    return precision_guarantee(call.name, call.dtype.name, cases.PLATFORM, **flags)


def check_claims(call: OpCall, guarantee: Guarantee, dtype: str) -> None:
    """The claims about precision are those that the expected results were computed for. No claim is left out."""
    assert dataclasses.asdict(guarantee).keys() == {
        "accumulator",
        "math_precision",
        "deterministic",
        "bit_stable_on_same_hardware",
    }
    assert guarantee.math_precision in ("exact", "rounded once", "within 2 ulp", "accumulated"), (
        "assert here what it keeps"
    )
    accumulator = cases.accumulator(dtype).name if cases.is_floating(jnp.dtype(dtype)) else dtype
    accumulator = "float64" if is_in_float64(call) else accumulator
    assert guarantee.accumulator in ("none", accumulator)
    assert (guarantee.math_precision == "accumulated") <= (guarantee.accumulator == accumulator)


@pytest.mark.parametrize(("name", "dtype"), EVERY_OP_AND_DTYPE)
def test_guarantee(rng: np.random.Generator, name: str, dtype: str) -> None:
    """Each claim about an op holds on this platform, for each combination of flags. An unknown claim fails."""
    with cases.x64_for(dtype):
        call = next(recorded.calls_of(rng, name, dtype, 2, sizes_of))
        variants = [with_flags(call, flags) for flags in flags_of(name)]

    def run_all(all_operands: Sequence[Sequence[jax.Array]]) -> list[list[jax.Array]]:
        return [
            x.op(*x.op.by_name(operands, x.params).values(), **x.all_params)
            for x, operands in zip(variants, all_operands, strict=True)
        ]

    run, all_operands = jax.jit(run_all), [x.operands for x in variants]

    def run_once(_: int) -> list[list[np.ndarray]]:
        with cases.x64_for(dtype):
            return jax.tree.map(np.asarray, run(all_operands))

    with cases.x64_for(dtype):
        text = run.lower(all_operands).as_text()
        assert text.count(f"@jax_baracuda.{name}(") == len(variants), "no kernel serves this call"
    alone = [run_once(0) for _ in range(RUNS)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        concurrently = list(pool.map(run_once, range(RUNS)))

    def all_bits(results: list[list[list[np.ndarray]]], k: int) -> set[bytes]:
        return {b"".join(x.tobytes() for x in result[k]) for result in results}

    for k, variant in enumerate(variants):
        guarantee = guarantee_of(variant)
        check_claims(variant, guarantee, dtype)
        if guarantee.bit_stable_on_same_hardware:
            assert len(all_bits(alone, k)) == 1
        if guarantee.deterministic:
            assert all_bits(alone, k) == all_bits(concurrently, k)
        with cases.x64_for(dtype):
            all_expected = expected_results(variant)
        for results in alone if not guarantee.deterministic else alone[:1]:
            for result, expected in zip(results[k], all_expected, strict=True):
                expected.check(result, str(variant.params))


@pytest.mark.parametrize("name", sorted(OPS))
def test_which_ops_claim_to_be_deterministic(name: str) -> None:
    """All ops claim it, except unsorted floating-point sums on GPUs. These claim it if it is requested. A dtype may be
    given by its name."""
    sums = {f"segment_{name}{suffix}" for name in ("sum", "mean") for suffix in ("", "_in_float64")}
    adds = name in sums | SUMS_IN_ORDER
    for dtype, platform, flags in itertools.product(
        sorted(OPS[name].dtypes_of(name)), KERNEL_PLATFORMS, flags_of(name)
    ):
        guarantee = precision_guarantee(name, dtype, platform, **flags)
        may_vary = adds and platform == "cuda" and cases.is_floating(jnp.dtype(dtype)) and not any(flags.values())
        assert guarantee.deterministic == guarantee.bit_stable_on_same_hardware == (not may_vary)
        assert guarantee == precision_guarantee(name, jnp.dtype(dtype), platform, **flags)


ERRORS = {
    "op": (("no_such_op", "float32", "cpu"), r"name must be one of \[.*'segment_max'.*got 'no_such_op'"),
    "platform": (("segment_max", "float32", "tpu"), r"platform must be one of .*'cpu', 'cuda'.*got 'tpu'"),
    "dtype": (("segment_max", "complex64", "cpu"), r"segment_max has kernels for dtype \[.*got 'complex64'"),
    "no dtype": (("segment_max", "no such dtype", "cpu"), r"segment_max has kernels for dtype \[.*got 'no such dtype'"),
    "dtype of another op": (("segment_max_backward", "int32", "cpu"), r"segment_max_backward has kernels for dtype"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    arguments, message = ERRORS[case]
    with pytest.raises(ValueError, match=f"precision_guarantee: {message}"):
        precision_guarantee(*arguments)
