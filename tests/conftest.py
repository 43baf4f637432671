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

NEWEST_JAX_ALONE: dict[str, tuple[str, ...]] = {
    "test_causal_conv1d.py": (
        "test_reference_itself",
        "test_sizes",
        "test_any_small_problem",
        "test_long_sums",
        "test_positive_long_sums_of_16_bits",
        "test_extreme_activations",
        "test_packed_sequences_are_as_if_alone",
        "test_nothing_leaks_from_other_sequences",
        "test_nothing_leaks_into_gradients_of_taps",
        "test_chunks_that_hand_on_a_state",
        "test_update",
        "test_decoding_is_the_convolution",
    ),
    "test_causal_conv1d_handlers.py": (
        "test_bad_shapes_are_refused",
        "test_bad_dtypes_are_refused",
        "test_dtypes_without_kernels_are_refused",
        "test_bad_widths_are_refused",
        "test_empty_states_are_refused",
        "test_short_states_are_refused",
        "test_other_layouts_are_refused",
    ),
    "test_rope.py": (
        "test_reference_itself",
        "test_sizes",
        "test_any_small_problem",
        "test_both_at_once_are_each_alone",
        "test_precision_to_a_million_positions",
        "test_precision_beyond",
        "test_precision_of_long_positions",
        "test_nan_and_infinity_stay_in_their_pair",
        "test_what_stays_is_the_same_bits",
        "test_position_zero_is_the_identity",
    ),
    "test_rope_frequencies.py": (
        "test_by_hand",
        "test_exactness",
        "test_errors",
        "test_missing_keys",
        "test_unknown_keys",
    ),
    "test_rope_handlers.py": (
        "test_what_fits_is_right",
        "test_many_rows",
        "test_bad_shapes_are_refused",
        "test_bad_dtypes_are_refused",
        "test_dtypes_without_kernels_are_refused",
        "test_bad_rotary_dims_are_refused",
    ),
    "test_segment.py": ("test_value_and_gradient", "test_power_law", "test_big", "test_clip_clamps_by_value"),
    "test_segment_argmax.py": ("test_special_values_exhaustively", "test_first_of_many_ties", "test_infinite_data"),
    "test_segment_handlers.py": ("test_bad_shapes_are_refused", "test_bad_dtypes_are_refused"),
    "test_segment_max.py": (
        "test_special_values_far_apart",
        "test_special_values_exhaustively",
        "test_subnormal_numbers",
        "test_many_narrow_rows",
        "test_losers_get_exact_zeros",
        "test_many_ties",
        "test_ties_by_hand",
        "test_order_is_a_hint",
        "test_order_of_a_batch",
    ),
    "test_segment_prod.py": (
        "test_special_values_exhaustively",
        "test_counts_of_special_values",
        "test_magnitudes_beyond_the_range_on_the_way",
        "test_subnormal_factors_and_products",
        "test_rounding",
        "test_integers_wrap",
    ),
    "test_segment_softmax.py": (
        "test_rows_of_a_segment_sum_to_one",
        "test_large_logits",
        "test_special_values_exhaustively",
        "test_masked_rows",
        "test_shift_invariance",
        "test_nan_stays_in_its_segment",
    ),
    "test_segment_sum.py": (
        "test_rounding",
        "test_special_values_by_hand",
        "test_subnormal_numbers",
        "test_integers_wrap",
        "test_mean_divides_by_an_exact_count",
        "test_linearity",
    ),
    "test_where.py": (
        "test_nothing_leaks",
        "test_positive_long_sums_of_16_bits",
        "test_many_short_rows",
        "test_many_dimensions",
        "test_gradient_of_sums_of_16_bits",
    ),
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
    "test_fuzz.py": (
        "test_value",
        "test_gradient",
        "test_order_of_rows_does_not_matter",
        "test_relations",
        "test_rotation",
    ),
    "test_guarantees.py": ("test_guarantee", "test_what_is_claimed_to_be_the_same_in_every_run"),
    "test_load.py": ("test_memory_does_not_grow",),
    "test_matrix.py": (
        "test_cases_meet_every_pair_of_values",
        "test_every_value_is_met_and_so_are_the_bare_calls",
        "test_every_strategy_is_reached",
        "test_combinations",
        "test_fuzz",
    ),
    "test_notebooks.py": ("test_notebook_runs_and_is_kept_with_outputs",),
}
"""Tests, by file, that find nothing more with a second version of JAX. They ask what kernels compute and refuse, and
kernels are the same sources, built with the same headers, whatever JAX runs them; or they need no JAX. They have the
marker `newest_jax_alone`, and CI leaves them out where it runs the oldest JAX (``-m "not newest_jax_alone"``).

What is not listed runs everywhere: arguments and errors, transformations, sharding, derivatives, dtypes, aliasing, the
native interface, and what handlers do with the right call and with a wrong number of buffers and attributes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(item, "originalname", None) in NEWEST_JAX_ALONE.get(item.path.name, ()):
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
