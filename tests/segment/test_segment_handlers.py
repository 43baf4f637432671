"""The native handlers of all segment ops check their calls: an invalid call gives an error, never a crash."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support import cases, handlers
from support.handlers import Array
from support.recorded import direct_calls

from jax_baracuda._core.op import OPS
from jax_baracuda.ops.segment.edge_attention import MAX_HEAD_BYTES
from jax_baracuda.ops.segment.edges import VECTOR_BYTES

OF_ATTENTION = ("segment_attention", "graph_dot_product_attention", "graph_additive_attention")
TARGETS_OF_ATTENTION = sorted(target for target in OPS if target.startswith(OF_ATTENTION))


@pytest.mark.parametrize("target", ["segment_softmax", "segment_softmax_backward"])
def test_negative_number_of_segments_is_refused(target: str) -> None:
    good, _ = direct_calls(target)[0]
    call = dataclasses.replace(good, attributes={**good.attributes, "num_segments": -1})
    assert f"{target}: num_segments" in handlers.refusal(call, "num_segments == -1")


@pytest.mark.parametrize("target", ["segment_max_backward", "segment_min_backward"])
def test_tied_winners_without_data_get_nothing(rng: np.random.Generator, target: str) -> None:
    """Without data and output, a kernel cannot find the tied rows, so they get zeros."""
    call, operands = next(good for good in direct_calls(target) if good[0].operands[0].dtype == "float32")
    call = handlers.good_call(target, call.operands[:3], call.results, call.attributes)
    ids = operands["segment_ids"]
    operands["winner"] = rng.integers(-3, ids.shape[1], operands["winner"].shape).astype(np.int32)
    winner, d_output = (np.take_along_axis(operands[name], ids[..., None], axis=1) for name in ("winner", "d_output"))
    expected = np.where(winner == np.arange(ids.shape[1])[:, None], d_output, 0)
    np.testing.assert_array_equal(call.results_of(operands)["d_data"], expected)


@pytest.mark.parametrize("target", TARGETS_OF_ATTENTION)
@pytest.mark.parametrize("features", [0, 3, 256])
def test_widths_of_heads(target: str, features: int) -> None:
    """CPU kernels take heads of any number of features. On GPUs, these float32 heads are refused: programs pad them."""
    good, _ = next(good for good in direct_calls(target) if good[0].operands[0].dtype == "float32")
    of_heads = good.operands[0].shape[-2:]
    assert of_heads[0] > 0

    def changed(x: Array) -> Array:
        return dataclasses.replace(x, shape=(*x.shape[:-1], features)) if x.shape[-2:] == of_heads else x

    call = dataclasses.replace(
        good, operands=tuple(map(changed, good.operands)), results=tuple(map(changed, good.results))
    )
    if cases.PLATFORM == "cpu":
        call.run()
        return
    least, most = 1 if target.startswith("segment") else VECTOR_BYTES // 4, MAX_HEAD_BYTES // 4
    expected = f"has {features} features of a head, expected a power of two from {least} to {most}"
    assert expected in handlers.refusal(call, f"{features} features")
