"""Compiled programs with our ops: their memory, and command buffers (CUDA graphs)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_conv1d import reference as convolutions
from rope import reference as rotations
from segment.reference import REDUCTIONS, Reduction
from support import cases
from support.cases import Shape
from support.processes import run_python
from support.programs import temp_bytes

from jax_baracuda import rope_qk


@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_no_temporary_of_the_size_of_the_data(reduction: Reduction, is_sorted: bool) -> None:
    """Forward and gradient need less than a fifth of the data's memory beside operands and results."""
    num_rows, num_features, num_segments = 200_000, 128, 5000
    data = jax.ShapeDtypeStruct((num_rows, num_features), np.float32)
    ids = jax.ShapeDtypeStruct((num_rows,), np.int32)
    shape = reduction.result_shape(Shape(num_rows, (num_features,), num_segments))
    cotangent = jax.ShapeDtypeStruct(shape, np.float32)
    for options in reduction.options:
        options = {"indices_are_sorted": is_sorted} | options
        programs = [(functools.partial(reduction, num_segments=num_segments, **options), (data, ids))]
        if reduction.gradient is not None:
            pullback = functools.partial(reduction.pullback, segments=num_segments, **options)
            programs.append((lambda x, i, d, f=pullback: f(x, i, cotangent=d), (data, ids, cotangent)))
        for program, operands in programs:
            assert temp_bytes(program, *operands) < num_rows * num_features * 4 / 5, options


@pytest.mark.parametrize("channels_last", convolutions.LAYOUTS, ids=["channels first", "channels last"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_temporary_of_the_size_of_the_signal(dtype: str, channels_last: bool) -> None:
    """A convolution with all options, and its gradients, need less than a fifth of the signal's memory beside it."""
    examples, channels, length, width = 4, 640, 2100, 4
    shapes = {
        "x": (examples, length, channels) if channels_last else (examples, channels, length),
        "weight": (channels, width),
        "bias": (channels,),
        "initial_state": (examples, channels, width - 1),
    }
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape in shapes.items()}
    ids = jax.ShapeDtypeStruct((examples, length), np.int32)
    outputs = arrays["x"], arrays["initial_state"]

    def convolve(arrays: Any, ids: Any) -> Any:
        return convolutions.Convolution(arrays, ids, "silu").call(arrays, channels_last)

    def gradients(arrays: Any, ids: Any, outputs: Any) -> Any:
        return jax.vjp(lambda arrays: convolve(arrays, ids), arrays)[1](outputs)

    for program, operands in ((convolve, (arrays, ids)), (gradients, (arrays, ids, outputs))):
        assert temp_bytes(program, *operands) < arrays["x"].size * arrays["x"].dtype.itemsize / 5


@pytest.mark.parametrize("layout", rotations.LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_temporary_of_the_size_of_the_features(dtype: str, layout: str) -> None:
    """Rotations and their gradients need less than a fifth of the features' memory beside them: no table of angles."""
    q, k = (
        jax.ShapeDtypeStruct(rotations.features_shape(layout, 2, heads, 2000, 128), jnp.dtype(dtype))
        for heads in (4, 1)
    )
    positions = jax.ShapeDtypeStruct((2, 2000), np.int32)

    def rotate(q: Any, k: Any, positions: Any) -> Any:
        return rope_qk(q, k, positions, layout=layout)

    def gradients(q: Any, k: Any, positions: Any) -> Any:
        return jax.vjp(lambda q, k: rotate(q, k, positions), q, k)[1]((q, k))

    for program in (rotate, gradients):
        assert temp_bytes(program, q, k, positions) < k.size * k.dtype.itemsize / 5


COMMAND_BUFFER_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from causal_conv1d.reference import LAYOUTS, Convolution, in_layout
from jax_baracuda import causal_conv1d_update, rope, rope_qk, where, write_slice, write_slices
from segment.reference import PROD, REDUCTIONS  # which imports support.cases: kernels wherever there are

def program(data, ids, sorted_ids, cells, rows):
    results = []
    x, weight, bias = data.reshape(4, 64, 750), data[:64, :4], data[:64, 0]
    state, packed = x[:, :, :3], sorted_ids.reshape(4, 750)
    for channels_last in LAYOUTS:
        for sequence_ids in (None, packed):
            def convolve(x, weight, bias, state):
                arrays = {"x": x, "weight": weight, "bias": bias, "initial_state": state}
                return Convolution(arrays, sequence_ids, "silu").call(arrays, channels_last)
            signal = in_layout(x, channels_last)
            outputs, vjp = jax.vjp(convolve, signal, weight, bias, state)
            results += [*outputs, *vjp((signal, state))]
        for new in (x[:, :, 0], signal):
            results += causal_conv1d_update(new, state, weight, bias, channels_last=channels_last)
    features = data.reshape(2, 3, 500, 64)
    for layout in ("BHSD", "BSHD"):
        for interleaved in (True, False):
            for positions in (None, ids.reshape(2, 1500)[:, : features.shape[2 if layout == "BHSD" else 1]]):
                def rotate(q, k):
                    options = {"layout": layout, "interleaved": interleaved}
                    return rope(q, positions, **options), rope_qk(q, k, positions, **options)
                outputs, vjp = jax.vjp(rotate, features, features)
                results += [*jax.tree.leaves(outputs), *vjp(outputs)]
    for b in (data + 1, data[0], data[:, :1], data[0, 0]):
        outputs, vjp = jax.vjp(lambda a, b: where(data > 0, a, b), data, b)
        results += [outputs, *vjp(rows)]
    for mode in ("clip", "drop"):
        written, vjp = jax.vjp(lambda d, s: write_slice(d, s, (ids[0], ids[1]), mode=mode), data, cells)
        results += [written, *vjp(data)]
        results.append(jax.vmap(lambda d, i: write_slice(d, bias, (i,), mode=mode))(x[:, 0], ids[:4]))
    nibbles = (packed % 8).astype(jnp.int4)
    results += write_slices([data, nibbles], [rows[:9], nibbles[:2]], (ids[2], ids[3]))
    for i, is_sorted in ((ids, False), (sorted_ids, True)):
        for reduction in REDUCTIONS:
            x = jnp.exp2(jnp.round(data)) if reduction is PROD else data
            for options in reduction.options:
                options = {"indices_are_sorted": is_sorted} | options
                if reduction.gradient is None:
                    results.append(reduction(x, i, 50, **options))
                    continue
                cotangent = rows if reduction.result_has_rows else cells
                results += reduction.pullback(x, i, 50, cotangent, **options)
                results.append(reduction(x[:, 0], i, 50, **options))
    return results

compiled = None
rng = np.random.default_rng()
for repetition in range(4):
    ids = rng.integers(-1, 51, 3000).astype(np.int32)
    operands = [jnp.asarray(x) for x in (
        np.round(rng.normal(size=(3000, 64)), 1).astype(np.float32), ids, np.sort(ids),
        rng.normal(size=(50, 64)).astype(np.float32), rng.normal(size=(3000, 64)).astype(np.float32))]
    if compiled is None:
        compiled = jax.jit(program).lower(*operands).compile()
        print(compiled.as_text().count('custom_call_target="jax_baracuda.'))
    with jax.default_device(jax.devices("cpu")[0]):
        expected = program(*(jax.device_put(x, jax.devices("cpu")[0]) for x in operands))
    for got, want in zip(compiled(*operands), expected, strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
"""


def test_all_kernels_run_inside_command_buffers(tmp_path: Path) -> None:
    """On a GPU, XLA captures every op in a CUDA graph, and replays with other inputs give the right results."""
    if cases.PLATFORM != "cuda":
        cases.skip_for_lack_of("cuda", "command buffers are a feature of GPUs")
    flags = f"--xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    printed = run_python(COMMAND_BUFFER_PROGRAM, cwd=tmp_path, XLA_FLAGS=flags, JAX_PLATFORMS="cuda,cpu")
    [thunks] = tmp_path.glob("*jit_program*thunk_sequence_after_thunk_passes.txt")
    calls = [line for line in thunks.read_text().splitlines() if "kCustomCall" in line]
    assert len(calls) == int(printed) >= 119
    assert all(line.startswith(" ") for line in calls), f"not inside a command buffer:\n{thunks.read_text()}"
