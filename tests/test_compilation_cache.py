"""JAX's persistent compilation cache finds sharded programs again, and never confuses the programs of two ops."""

from __future__ import annotations

import contextlib
import gc
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases
from support.processes import run_python

import jax_baracuda
from jax_baracuda import rope, segment_max, segment_min, segment_prod, segment_sum
from jax_baracuda._core.native import NATIVE_MODULES
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, value_and_gradient

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

SUM = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import jax_baracuda
from jax_baracuda._core.op import OPS

exec(sys.argv[2])
sharding = NamedSharding(jax.make_mesh((len(jax.devices()),), ("rows",)), P("rows"))
operands = jax.device_put((np.ones(32, np.float32), np.int32([0, 1] * 16)), (sharding, sharding))
print(*jax.jit(lambda data, ids: jax_baracuda.segment_sum(data, ids, 2))(*operands))
"""

FROM_COPY = """
import sys
sys.path.insert(0, sys.argv[3])
sys.meta_path[:] = [x for x in sys.meta_path if getattr(x, "__module__", "").startswith("_frozen_importlib")]
"""
"""Makes Python find the copy. Without it, an editable installation finds the package before any path does."""

pytestmark = [cases.on_two_devices, pytest.mark.thorough]


@pytest.mark.versions
def test_two_processes_share_the_entries_of_a_cache(tmp_path: Path) -> None:
    """Each op gives its own results, compiled or cached, and the second process compiles nothing."""
    entries = []
    for _ in range(2):
        run_python(PROGRAM, tmp_path)
        entries.append({path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")})
    assert len(entries[0]) >= 4, "an entry for each op"
    assert entries[0] == entries[1]


def _sum_and_entries(tmp_path: Path, first_lines: str = "", tree: Path | None = None) -> tuple[list[float], int]:
    """The numbers that :data:`SUM` prints, and how many entries the cache has afterwards."""
    cache = tmp_path / "cache"
    cache.mkdir(exist_ok=True)
    printed = run_python((FROM_COPY if tree else "") + SUM, cache, first_lines, tree)
    return [float(x) for x in printed.split()], len(list(cache.glob("*-cache")))


def test_replaced_shard_program_is_compiled_again(tmp_path: Path) -> None:
    """A function that is replaced in memory changes no file, but the cache must not return the old program."""
    replace = """
own = OPS["segment_sum"].shard_program
def more(*args, **kwargs): return [x + SHIFT for x in own(*args, **kwargs)]
object.__setattr__(OPS["segment_sum"], "shard_program", more)
"""
    assert _sum_and_entries(tmp_path)[0] == [16, 16]
    results, num_entries = _sum_and_entries(tmp_path, replace.replace("SHIFT", "100"))
    assert results == [116, 116]
    assert _sum_and_entries(tmp_path, replace.replace("SHIFT", "100")) == (results, num_entries)
    assert _sum_and_entries(tmp_path, replace.replace("SHIFT", "200"))[0] == [216, 216]


@pytest.fixture
def copy_of_package(tmp_path: Path) -> Path:
    """A folder that holds the package, with the CPU module that is loaded here."""
    source, tree = Path(jax_baracuda.__file__).parent, tmp_path / "tree"
    shutil.copytree(source, tree / "jax_baracuda", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    module = NATIVE_MODULES["cpu"].module
    assert module is not None and module.__file__ is not None
    shutil.copy(module.__file__, tree / "jax_baracuda" / "_core")
    return tree


@pytest.mark.versions
def test_edited_package_is_compiled_again(tmp_path: Path, copy_of_package: Path) -> None:
    """An edit of the Python code or of the native code causes a new compilation, also under the same version."""
    assert _sum_and_entries(tmp_path, tree=copy_of_package)[0] == [16, 16]
    edited = copy_of_package / "jax_baracuda" / "ops" / "segment" / "definitions.py"
    with edited.open("a") as file:
        file.write("\n_own = sum_over_axes\ndef sum_over_axes(*args):\n    return _own(*args) + 100\n")
    results, num_entries = _sum_and_entries(tmp_path, tree=copy_of_package)
    assert results == [116, 116]
    assert _sum_and_entries(tmp_path, tree=copy_of_package) == (results, num_entries)
    [native] = (copy_of_package / "jax_baracuda" / "_core").glob("_cpu*.so")
    with native.open("ab") as module:
        module.write(b"0")
    assert _sum_and_entries(tmp_path, tree=copy_of_package)[1] > num_entries


def test_package_edited_after_its_import_shares_no_entry(tmp_path: Path, copy_of_package: Path) -> None:
    """The loaded code differs from the files, so no other process may use its entries."""
    edit = "from pathlib import Path; import jax_baracuda; Path(jax_baracuda._core.op.__file__).touch()"
    entries = [_sum_and_entries(tmp_path, edit, copy_of_package)[1] for _ in range(2)]
    assert entries[1] > entries[0]


def _operand_types() -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The types of sharded data and ids."""
    mesh = jax.make_mesh((len(jax.devices()),), ("rows",))
    sharding = NamedSharding(mesh, P("rows"))
    return (
        jax.ShapeDtypeStruct((16, 3), np.float32, sharding=sharding),
        jax.ShapeDtypeStruct((16,), np.int32, sharding=sharding),
    )


def _names_of_partitioned_calls(function: Callable[..., object], *operands: object, **named: object) -> list[str]:
    text = jax.jit(function).lower(*operands, **named).as_text()
    return re.findall(r'@jax_baracuda.partitioned.*backend_config = "([^"]*)"', text)


def test_programs_hold_what_the_op_is() -> None:
    """Partitioned calls have different names if they differ in op, option, size or setting."""
    data, ids = _operand_types()
    calls: list[tuple[Callable[..., jax.Array], dict[str, bool], int]] = [
        (f, {}, 4) for f in (segment_max, segment_min, segment_sum, segment_prod)
    ]
    calls += [(segment_sum, {"deterministic": True}, 4), (segment_sum, {"indices_are_sorted": True}, 4)]
    calls += [(segment_sum, {}, 5)]
    names = []
    for precision in (None, "float32"):
        with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
            for function, options, size in calls:
                names += _names_of_partitioned_calls(
                    lambda data, ids, f=function, o=options, s=size: f(data, ids, s, **o), data, ids
                )
    assert len(names) == len(set(names)) == 2 * len(calls)


def test_programs_hold_constants_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with different constants have different names, even if checksums or printed constants are equal."""
    monkeypatch.setattr(zlib, "crc32", lambda _: 0)
    sharding = NamedSharding(jax.make_mesh((len(jax.devices()),), ("heads",)), P(None, "heads"))
    x = jax.ShapeDtypeStruct((1, 8, 16, 4), np.float32, sharding=sharding)
    names = []
    for base in (10_000, 20_000):
        names += _names_of_partitioned_calls(lambda x, base=base: rope(x, base=base), x)
    assert len(names) == len(set(names)) == 2


@pytest.mark.versions
@pytest.mark.parametrize("example", all_examples(), ids=lambda example: example.name)
def test_every_partitioned_call_has_a_name(example: Example, rng: np.random.Generator) -> None:
    """The name describes the call. It is not the address of an object, which another process cannot find."""
    operands = example.make_operands(rng, "float32", "small")
    whole = NamedSharding(jax.make_mesh((len(jax.devices()),), ("all",)), P())
    call = example.call("small")
    run = value_and_gradient(call, example.differentiated("float32"))
    names = _names_of_partitioned_calls(
        lambda **operands: run(operands, jax.tree.map(jax.numpy.ones_like, jax.eval_shape(call, **operands))),
        **jax.device_put(operands, whole),
    )
    assert not any(name.isdigit() for name in names), names


@pytest.mark.versions
@pytest.mark.parametrize("deleted", [0, 1])
def test_programs_that_share_a_name_outlive_each_other(deleted: int) -> None:
    """Deleting one of two programs with the same name leaves the other usable: JAX keeps the named object for it."""
    data, ids = _operand_types()
    lowered = [jax.jit(lambda data, ids: segment_max(data, ids, 4)).lower(data, ids) for _ in range(2)]
    del lowered[deleted]
    gc.collect()
    values, segments = np.arange(48, dtype=np.float32).reshape(16, 3), np.arange(16, dtype=np.int32) % 4
    operands = jax.device_put((values, segments), (data.sharding, ids.sharding))
    np.testing.assert_array_equal(lowered[0].compile()(*operands), values[-4:])
