"""What XLA makes of programs with our ops: memory, and command buffers (CUDA graphs)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cases
import jax
import numpy as np
import pytest

import jax_baracuda


@pytest.mark.parametrize("is_sorted", [False, True], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("tie_break", cases.TIE_BREAKS)
def test_no_temporary_of_the_size_of_the_data(tie_break: str, is_sorted: bool) -> None:
    """Forward and gradient need less than a fifth of the data's memory beside operands and results."""
    num_rows, num_features, num_segments = 200_000, 128, 5000
    data = jax.ShapeDtypeStruct((num_rows, num_features), np.float32)
    ids = jax.ShapeDtypeStruct((num_rows,), np.int32)
    d_output = jax.ShapeDtypeStruct((num_segments, num_features), np.float32)

    def forward(data: jax.Array, ids: jax.Array) -> jax.Array:
        return jax_baracuda.segment_max(data, ids, num_segments, indices_are_sorted=is_sorted, tie_break=tie_break)

    def forward_and_gradient(data: jax.Array, ids: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        output, vjp = jax.vjp(lambda data: forward(data, ids), data)
        return output, *vjp(d_output)

    for function, operands in ((forward, (data, ids)), (forward_and_gradient, (data, ids, d_output))):
        analysis = jax.jit(function).lower(*operands).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < num_rows * num_features * 4 / 5


COMMAND_BUFFER_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import jax_baracuda

def program(data, ids, sorted_ids, d_output):
    results = []
    for i, is_sorted in ((ids, False), (sorted_ids, True)):
        for tie_break in ("split", "first"):
            output, vjp = jax.vjp(
                lambda x: jax_baracuda.segment_max(x, i, 50, indices_are_sorted=is_sorted, tie_break=tie_break), data)
            results += [output, *vjp(d_output)]
        results.append(jax_baracuda.segment_max(data[:, 0], i, 50, indices_are_sorted=is_sorted))
    return results

compiled = None
rng = np.random.default_rng()
for repetition in range(4):
    ids = rng.integers(-1, 51, 3000).astype(np.int32)
    operands = [jnp.asarray(x) for x in (
        np.round(rng.normal(size=(3000, 64)), 1).astype(np.float32), ids, np.sort(ids),
        rng.normal(size=(50, 64)).astype(np.float32))]
    if compiled is None:
        compiled = jax.jit(program).lower(*operands).compile()
        assert compiled.as_text().count('custom_call_target="jax_baracuda.') == 10
    with jax.default_device(jax.devices("cpu")[0]):
        expected = program(*(jax.device_put(x, jax.devices("cpu")[0]) for x in operands))
    for got, want in zip(compiled(*operands), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
"""


def test_all_kernels_run_inside_command_buffers(tmp_path: Path) -> None:
    """On a GPU, XLA captures every op in a CUDA graph, and replays with other inputs give the right results."""
    if cases.PLATFORM != "cuda":
        cases.skip_for_lack_of("cuda", "command buffers are a feature of GPUs")
    flags = f"--xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    result = subprocess.run(
        [sys.executable, "-c", COMMAND_BUFFER_PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cuda,cpu"},
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    [thunks] = tmp_path.glob("*jit_program*thunk_sequence_after_thunk_passes.txt")
    calls = [line for line in thunks.read_text().splitlines() if "kCustomCall" in line]
    assert len(calls) == 10
    assert all(line.startswith(" ") for line in calls), f"not inside a command buffer:\n{thunks.read_text()}"
