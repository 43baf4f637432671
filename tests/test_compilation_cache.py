"""JAX's persistent compilation cache never takes the sharded program of one op for that of another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_baracuda import segment_max, segment_min, segment_prod, segment_sum

PROGRAM = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_baracuda

# What differs between two processes or none, so that only what the program holds tells the ops apart.
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
mesh = jax.make_mesh((len(jax.devices()),), ("rows",))
data, ids = np.float32([[1], [2], [2], [-1]] * 8), np.int32([0, 1] * 16)
operands = jax.device_put(data, NamedSharding(mesh, P("rows"))), jax.device_put(ids, NamedSharding(mesh, P("rows")))
for name, expected in (("max", [2, 2]), ("min", [1, -1]), ("sum", [24, 8]), ("prod", [2**8, 2**8])):
    reduce = getattr(jax_baracuda, f"segment_{name}")
    result = jax.jit(lambda data, ids: reduce(data, ids, 2))(*operands)
    np.testing.assert_array_equal(result[:, 0], np.float32(expected), err_msg=name)
"""

pytestmark = pytest.mark.skipif(len(jax.devices()) == 1, reason="there is only one device")


def test_programs_of_different_ops_are_different_entries(tmp_path: Path) -> None:
    """Two processes with one cache: each op's answer is its own, compiled or read."""
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert child.returncode == 0, child.stderr
    assert list(tmp_path.iterdir())


def test_programs_hold_what_the_op_is() -> None:
    """Apart from the address of a Python object, sharded programs of different ops or options differ."""
    mesh = jax.make_mesh((len(jax.devices()),), ("rows",))
    sharding = NamedSharding(mesh, P("rows"))
    data = jax.ShapeDtypeStruct((16, 3), np.float32, sharding=sharding)
    ids = jax.ShapeDtypeStruct((16,), np.int32, sharding=sharding)
    texts = set()
    calls = [(f, {}) for f in (segment_max, segment_min, segment_sum, segment_prod)]
    calls += [(segment_sum, {"deterministic": True}), (segment_sum, {"indices_are_sorted": True})]
    for function, options in calls:
        text = jax.jit(lambda data, ids, f=function, o=options: f(data, ids, 4, **o)).lower(data, ids).as_text()
        texts.add(re.sub(r'backend_config = "\d+"', "", text))
    assert len(texts) == len(calls)
