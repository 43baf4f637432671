"""JAX's persistent compilation cache finds sharded programs again, and never takes one op's for that of another."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases
from support.processes import run_python

from jax_baracuda import segment_max, segment_min, segment_prod, segment_sum

PROGRAM = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_baracuda

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

pytestmark = cases.on_two_devices


def test_two_processes_share_the_entries_of_a_cache(tmp_path: Path) -> None:
    """Each op's answer is its own, compiled or read, and the second process compiles nothing again."""
    entries = []
    for _ in range(2):
        run_python(PROGRAM, tmp_path)
        entries.append({path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")})
    assert len(entries[0]) >= 4, "an entry for each op"
    assert entries[0] == entries[1]


def _operand_types() -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Of sharded data and ids."""
    mesh = jax.make_mesh((len(jax.devices()),), ("rows",))
    sharding = NamedSharding(mesh, P("rows"))
    return (
        jax.ShapeDtypeStruct((16, 3), np.float32, sharding=sharding),
        jax.ShapeDtypeStruct((16,), np.int32, sharding=sharding),
    )


def test_programs_hold_what_the_op_is() -> None:
    """Sharded programs of different ops, options or sizes differ in the names of what is partitioned."""
    data, ids = _operand_types()
    calls: list[tuple[Callable[..., jax.Array], dict[str, bool], int]] = [
        (f, {}, 4) for f in (segment_max, segment_min, segment_sum, segment_prod)
    ]
    calls += [(segment_sum, {"deterministic": True}, 4), (segment_sum, {"indices_are_sorted": True}, 4)]
    calls += [(segment_sum, {}, 5)]
    names = []
    for function, options, size in calls:
        text = jax.jit(lambda data, ids, f=function, o=options, s=size: f(data, ids, s, **o)).lower(data, ids).as_text()
        names += re.findall(r'@CustomSPMDPartitioning.*backend_config = "(\w+)"', text)
    assert len(names) == len(set(names)) == len(calls)


@pytest.mark.parametrize("deleted", [0, 1])
def test_programs_that_share_a_name_outlive_each_other(deleted: int) -> None:
    """JAX holds what is found by a name only as long as a program that uses it."""
    data, ids = _operand_types()
    lowered = [jax.jit(lambda data, ids: segment_max(data, ids, 4)).lower(data, ids) for _ in range(2)]
    del lowered[deleted]
    gc.collect()
    values, segments = np.arange(48, dtype=np.float32).reshape(16, 3), np.arange(16, dtype=np.int32) % 4
    operands = jax.device_put((values, segments), (data.sharding, ids.sharding))
    np.testing.assert_array_equal(lowered[0].compile()(*operands), values[-4:])
