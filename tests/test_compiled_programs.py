"""What XLA makes of programs with our ops: memory, and command buffers (CUDA graphs)."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import cases
import jax
import numpy as np
import pytest
from cases import Shape
from reductions import REDUCTIONS, Reduction


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
            analysis = jax.jit(program).lower(*operands).compile().memory_analysis()
            assert analysis.temp_size_in_bytes < num_rows * num_features * 4 / 5, options


COMMAND_BUFFER_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from reductions import PROD, REDUCTIONS

def program(data, ids, sorted_ids, cells, rows):
    results = []
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
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-4)
"""


def test_all_kernels_run_inside_command_buffers(tmp_path: Path) -> None:
    """On a GPU, XLA captures every op in a CUDA graph, and replays with other inputs give the right results."""
    if cases.PLATFORM != "cuda":
        cases.skip_for_lack_of("cuda", "command buffers are a feature of GPUs")
    tests = Path(__file__).parent
    flags = f"--xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    result = subprocess.run(
        [sys.executable, "-c", COMMAND_BUFFER_PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ
        | {
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": "cuda,cpu",
            "PYTHONPATH": os.pathsep.join(path for path in [str(tests), *sys.path] if path),
        },
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    [thunks] = tmp_path.glob("*jit_program*thunk_sequence_after_thunk_passes.txt")
    calls = [line for line in thunks.read_text().splitlines() if "kCustomCall" in line]
    assert len(calls) == int(result.stdout) >= 60
    assert all(line.startswith(" ") for line in calls), f"not inside a command buffer:\n{thunks.read_text()}"
