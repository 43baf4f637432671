"""``python -m jax_baracuda report | check | race``."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jax_baracuda
from jax_baracuda._core.example import EXAMPLES, Example
from jax_baracuda._core.native import NativeModule
from jax_baracuda._core.op import OPS
from jax_baracuda._tools import check, race, report
from jax_baracuda._tools.table import format_table

SMALL = {
    "num_rows": 500,
    "num_features": 6,
    "num_segments": 40,
    "num_examples": 2,
    "num_channels": 5,
    "num_heads": 2,
    "length": 60,
}


def small_examples() -> list[Example]:
    """All examples, that of segment_max first."""
    examples = sorted(EXAMPLES, key=lambda example: example.name != "segment_max")
    sizes = [{name: SMALL[name] for name in example.check_sizes} for example in examples]
    return [
        dataclasses.replace(example, check_sizes=small, race_sizes={"cpu": small, "cuda": small})
        for example, small in zip(examples, sizes, strict=True)
    ]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> list[Example]:
    """The examples of the package at sizes that take no time; what a test puts in their place is used instead."""
    listed = small_examples()
    for tool in (check, race):
        monkeypatch.setattr(tool, "EXAMPLES", listed)
    return listed


def test_report_names_versions_modules_devices_and_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([]) == 0
    text = capsys.readouterr().out
    for expected in (jax_baracuda.__version__, jax.__version__, str(jax.devices()[0]), "XLA FFI API", *OPS):
        assert expected in text


def test_report_says_why_a_module_is_not_used() -> None:
    module = SimpleNamespace(
        device_problem=lambda: "the driver is too old",
        ffi_api_version=(0, 1),
        compiler_version="13",
        architectures="90",
    )
    state = report._module_state(NativeModule("cuda", module, frozenset(), None))
    assert state.startswith("loaded") and state.endswith("but not used: the driver is too old")


def test_check_passes_and_prints_one_row_per_example_and_dtype(
    examples: list[Example], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--seed", "3"]) == 0
    text = capsys.readouterr().out
    num_rows = sum(len(example.dtypes) for example in examples) * len(check.devices_by_platform())
    assert text.count("  ok") == num_rows
    assert f"All {num_rows} checks passed." in text and "Seed: 3" in text


def broken(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda *operands, **sizes: 1.01 * function(*operands, **sizes)


def test_check_fails_where_an_op_is_wrong(examples: list[Example], capsys: pytest.CaptureFixture[str]) -> None:
    examples[0] = dataclasses.replace(examples[0], function=broken(examples[0].function))
    assert check.main([]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_check_sees_an_error_in_the_gradient_alone(examples: list[Example]) -> None:
    def wrong_gradient(data: jax.Array, ids: jax.Array, **sizes: int) -> jax.Array:
        return examples[0].function(data * 1.01 - jax.lax.stop_gradient(data) * 0.01, ids, **sizes)

    device = jax.devices()[0]
    wrong = dataclasses.replace(examples[0], function=wrong_gradient)
    value_error, gradient_error = check.errors(wrong, "float32", device, seed=0)
    assert value_error < 1e-5
    np.testing.assert_allclose(gradient_error, 0.01, rtol=1e-3)


def test_check_sees_a_value_that_is_infinite_by_mistake(examples: list[Example]) -> None:
    def infinite(data: jax.Array, ids: jax.Array, **sizes: int) -> jax.Array:
        return examples[0].function(data, ids, **sizes).at[0, 0].set(np.inf)

    wrong = dataclasses.replace(examples[0], function=infinite)
    assert check.errors(wrong, "float32", jax.devices()[0], seed=0)[0] > 1


def test_race_prints_forward_and_gradient_of_each_example(
    examples: list[Example], capsys: pytest.CaptureFixture[str]
) -> None:
    assert race.main(["--repeats", "1"]) == 0
    text = capsys.readouterr().out
    num_platforms = len(race.devices_by_platform())
    assert text.count(" ms ") >= 4 * len(examples) * num_platforms
    assert text.count("forward + gradient") == len(examples) * num_platforms


def test_format_table_aligns_columns() -> None:
    lines = format_table(("a", "bb"), [("xxx", "y")]).splitlines()
    assert lines == ["a    bb", "---  --", "xxx  y"]


def test_command_line_lists_the_tools() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "jax_baracuda", "--help"], capture_output=True, text=True, check=True, cwd="/"
    )
    for tool in ("report", "check", "race", "demo"):
        assert tool in result.stdout
    unknown = subprocess.run(
        [sys.executable, "-m", "jax_baracuda", "nonsense"], capture_output=True, text=True, check=False, cwd="/"
    )
    assert unknown.returncode == 2 and "nonsense" in unknown.stderr
