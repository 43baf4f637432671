"""Settings that must be there before JAX is imported, and what all tests share.

Variables:
  JAX_PLATFORMS=cuda: run the same tests on a GPU.
  JAX_BARACUDA_REQUIRE=cuda (or cpu): fail where the tests would run on another platform, or skip for lack of it.
  JAX_BARACUDA_TEST_SEED=<int>: other random inputs than those of seed 0.
  JAX_BARACUDA_TEST_LARGE=1: also run, on a CPU, the tests of arrays with more than 2^31 elements.
"""

from __future__ import annotations

import os
import zlib

# Both flags concern one back end and are ignored by the other.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Results and scratch memory are full of ones before a kernel starts: what it does not write shows.
os.environ.setdefault("JAX_BARACUDA_POISON", "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from support import cases  # noqa: E402  (after the environment is set)

NEWEST_JAX_ALONE_OF_HANDLERS: dict[str, tuple[str, ...]] = {
    "test_causal_conv1d_handlers.py": (
        "test_bad_shapes_are_refused",
        "test_bad_dtypes_are_refused",
        "test_dtypes_without_kernels_are_refused",
        "test_bad_widths_are_refused",
        "test_empty_states_are_refused",
        "test_short_states_are_refused",
        "test_other_layouts_are_refused",
    ),
    "test_rope_handlers.py": (
        "test_what_fits_is_right",
        "test_many_rows",
        "test_bad_shapes_are_refused",
        "test_bad_dtypes_are_refused",
        "test_dtypes_without_kernels_are_refused",
        "test_bad_rotary_dims_are_refused",
    ),
    "test_segment_handlers.py": ("test_bad_shapes_are_refused", "test_bad_dtypes_are_refused"),
    "test_where_handlers.py": (
        "test_other_shapes_are_refused",
        "test_other_dtypes_are_refused",
        "test_elements_of_less_than_a_byte_are_refused",
    ),
    "test_write_slice_handlers.py": (
        "test_starts_far_out_of_range",
        "test_whole_words",
        "test_large_windows",
        "test_bad_shapes_are_refused",
        "test_bad_ranks_are_refused",
        "test_bad_dtypes_are_refused",
        "test_bad_windows_are_refused",
    ),
}
"""Tests of handlers, by file, that have the marker `newest_jax_alone`; others are marked where they stand."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(item, "originalname", None) in NEWEST_JAX_ALONE_OF_HANDLERS.get(item.path.name, ()):
            item.add_marker(pytest.mark.newest_jax_alone)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers of this test's own; the seed is part of every failure."""
    seed = [int(os.environ.get("JAX_BARACUDA_TEST_SEED", "0")), zlib.crc32(request.node.nodeid.encode())]
    request.node.add_report_section("setup", "random seed", f"np.random.default_rng({seed})")
    return np.random.default_rng(seed)


@pytest.fixture(scope="session", autouse=True)
def kernels_are_there() -> None:
    """Without the platform's native module the ops would be plain JAX, and the tests would prove nothing."""
    if cases.REQUIRED_PLATFORM not in (None, cases.PLATFORM):
        pytest.fail(f"JAX_BARACUDA_REQUIRE={cases.REQUIRED_PLATFORM}, but JAX runs on {cases.PLATFORM}", pytrace=False)
    if (problem := cases.native_problem(cases.PLATFORM)) is not None:
        pytest.fail(f"there are no kernels for {cases.PLATFORM}: {problem}", pytrace=False)
