"""``python -m jax_baracuda report | check | race | tune``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import jax_baracuda as jb
from jax_baracuda._core import selection
from jax_baracuda._core.native import NativeModule
from jax_baracuda._core.op import OPS
from jax_baracuda._core.selection import Row, TuningTable
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example
from jax_baracuda._tools import check, grid, race, report, tune
from jax_baracuda._tools.calls import traced_calls
from jax_baracuda._tools.table import format_table
from jax_baracuda._tools.timing import prepared


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> list[Example]:
    """The examples at sizes that take no time, each in one of its dtypes, that of segment_max first and in float32.

    What a test puts in their place is used instead.
    """
    small = [
        dataclasses.replace(
            example,
            sizes={use: example.sizes["small"] for use in example.sizes},
            dtypes=(example.dtypes[number % len(example.dtypes)],),
        )
        for number, example in enumerate(sorted(all_examples(), key=lambda example: example.name != "segment_max"))
    ]
    for tool in (check, race):
        monkeypatch.setattr(tool, "all_examples", lambda: small)
    return small


def test_every_function_of_arrays_has_an_example() -> None:
    """And is timed by ``race`` on every platform."""
    examples = all_examples()
    assert len({example.name for example in examples}) == len(examples)
    functions = {name for name in jb.__all__ if inspect.isfunction(getattr(jb, name))}
    expected = functions - {"implementation", "precision_guarantee", "rope_frequencies", "segment_plan"}
    for use in ("small", "check", "cpu", "cuda"):
        assert {example.function.__name__ for example in examples if use in example.sizes} == expected, use


def test_examples_are_not_imported_with_the_package() -> None:
    code = "import sys, jax_baracuda; assert not any('_examples' in name for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_report_names_versions_modules_devices_and_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([]) == 0
    text = capsys.readouterr().out
    for expected in (jb.__version__, jax.__version__, str(jax.devices()[0]), "XLA FFI API", *OPS):
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


def test_check_passes_and_prints_one_row_per_example(
    examples: list[Example], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--seed", "3"]) == 0
    text = capsys.readouterr().out
    num_rows = len(examples) * len(check.devices_by_platform())
    assert text.count("  ok") == num_rows
    assert f"All {num_rows} checks passed." in text and "Seed: 3" in text


def replaced(example: Example, change: Callable[..., jax.Array]) -> Example:
    """The example of a function of which something is wrong: ``change(function, data, **others)``."""
    wrong = functools.wraps(example.function)(lambda data, **others: change(example.function, data, **others))
    return dataclasses.replace(example, function=wrong)


def errors_of(example: Example) -> tuple[float, float | None]:
    [(_, value_error, gradient_error)] = check.errors(example, jax.devices()[0], seed=0)
    return value_error, gradient_error


def test_check_fails_where_an_op_is_wrong(examples: list[Example], capsys: pytest.CaptureFixture[str]) -> None:
    examples[:] = [replaced(examples[0], lambda f, data, **others: 1.01 * f(data, **others))]
    assert check.main([]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_check_sees_an_error_in_the_gradient_alone(examples: list[Example]) -> None:
    def wrong_gradient(function: Callable[..., jax.Array], data: jax.Array, **others: Any) -> jax.Array:
        return function(data * 1.01 - jax.lax.stop_gradient(data) * 0.01, **others)

    wrong = replaced(examples[0], wrong_gradient)
    value_error, gradient_error = errors_of(wrong)
    assert value_error < 1e-5
    np.testing.assert_allclose(gradient_error, 0.01, rtol=1e-3)


def test_check_sees_one_wrong_element(examples: list[Example]) -> None:
    wrong = replaced(examples[0], lambda f, data, **others: f(data, **others).at[0, 0].add(0.01))
    assert errors_of(wrong)[0] > 1e-3


def test_check_sees_a_value_that_is_not_finite_by_mistake(examples: list[Example]) -> None:
    for value in (np.inf, np.nan):
        wrong = replaced(examples[0], lambda f, data, value=value, **others: f(data, **others).at[0, 0].set(value))
        assert errors_of(wrong)[0] > 1


def test_race_prints_forward_and_gradient_of_each_example(
    examples: list[Example], capsys: pytest.CaptureFixture[str]
) -> None:
    assert race.main(["--repeats", "1"]) == 0
    text = capsys.readouterr().out
    timed = [example for platform in race.devices_by_platform() for example in examples if platform in example.sizes]
    with_gradient = [example for example in timed if example.differentiated("float32")]
    assert text.count(" ms ") == 2 * (len(timed) + len(with_gradient))
    assert text.count("forward + gradient") == len(with_gradient)


def test_tables_grow_row_by_row(examples: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    """The heading is there before anything is computed, and each row before the next is."""
    num_lines: list[int] = []
    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *texts, **options: printed.append((*texts, options)))
    monkeypatch.setattr(race, "race", lambda *_: num_lines.append(len(printed)) or [("forward", 1.0, 2.0)])
    race.main([])
    assert num_lines == list(range(2, 2 + len(num_lines)))
    assert all(options == {"flush": True} for *_, options in printed[: len(num_lines) + 2])


def test_tune_writes_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the ops of sampled calls and their gradients; rows of other devices are kept."""
    pytest.importorskip("rich")
    pytest.importorskip("sklearn")
    kept = Row("tpu", "write_slice", "xla", 0.5)
    monkeypatch.setattr(tune, "packaged_table", lambda: TuningTable((kept,)))
    monkeypatch.setattr(tune, "race", lambda loops, operands, repeats: [2.0, 1.0])
    monkeypatch.setattr(grid, "MAX_BYTES", dict.fromkeys(grid.MAX_BYTES, 2**16))
    path = tmp_path / "tuning.json"
    assert tune.main(["--output", str(path), "--cases", "9", "--functions", "rope"]) == 0
    first, *rows = TuningTable.read(path).rows
    assert first == kept
    assert {row.op for row in rows} == {"rope", "rope_backward"}
    assert all(row.implementation == "xla" and row.ratio == 0.5 for row in rows)
    assert f"{len(rows) + 1} rows" in capsys.readouterr().out


class Timed(NamedTuple):
    """A call with sizes and options, as far as the search for rows looks at it."""

    params: dict[str, bool]
    of_dims: dict[str, int]

    def sizes(self) -> dict[str, int]:
        return self.of_dims


def test_rows_are_where_plain_jax_is_faster(rng: np.random.Generator) -> None:
    """Small sorted calls here. Beyond what was timed, nothing is said."""
    pytest.importorskip("sklearn")
    measurements = []
    for _ in range(200):
        rows, is_sorted = int(rng.integers(10, 10_000)), bool(rng.random() < 0.5)
        is_faster = is_sorted and rows <= 1000
        call = Timed({"indices_are_sorted": is_sorted, "deterministic": False}, {"row": rows, "bytes": 4 * rows})
        measurements.append(tune.Measurement(call, 0.5 if is_faster else 2.0))
    boxes = list(tune.boxes_for_xla(measurements))
    assert boxes
    for options, sizes, ratio in boxes:
        assert dict(options) == {"indices_are_sorted": True, "deterministic": False} and round(ratio, 6) == 0.5
        assert dict(sizes)["bytes"][1] <= 4000

    def picks_xla(call: Timed) -> bool:
        return any(
            all(call.params[name] == value for name, value in options)
            and all((low or 0) <= call.of_dims[name] <= (high or np.inf) for name, (low, high) in sizes)
            for options, sizes, _ in boxes
        )

    wrong = [m for m in measurements if picks_xla(m.call) != (m.ratio < 1)]
    assert len(wrong) <= 2  # the tree cuts between calls


def test_plain_jax_that_breaks_a_promise_is_no_choice() -> None:
    data, ids = jax.ShapeDtypeStruct((4, 2), np.float32), jax.ShapeDtypeStruct((4,), np.int32)

    def has_choice(function: Callable[..., Any], **options: Any) -> bool:
        [call] = traced_calls(lambda data, ids: function(data, ids, num_segments=3, **options), data, ids)
        object.__setattr__(call, "unsupported_reason", lambda platform: None)  # as if the kernels were there
        return tune.has_choice(call, "cuda")

    assert has_choice(jb.segment_sum) and has_choice(jb.segment_max)
    assert not has_choice(jb.segment_sum, deterministic=True)
    assert not has_choice(jb.segment_sum, indices_are_sorted=True)
    assert has_choice(jb.segment_max, indices_are_sorted=True)


def test_prepared_keeps_the_order() -> None:
    for workers in (0, 1, 3, 20):
        assert [get() for _, get in prepared(lambda x: x * x, range(10), workers)] == [x * x for x in range(10)]


def test_sampled_calls_differ_and_fit() -> None:
    cases = list(grid.sample("cpu", 100, 0))
    assert [case.sizes_text("cpu") for case in cases] == [case.sizes_text("cpu") for case in grid.sample("cpu", 100, 0)]
    assert len({case.sizes_text("cpu") for case in cases}) > 90
    for case in cases:
        assert 4 * grid.largest_elements(case.example, case.example.sizes["cpu"]) <= grid.MAX_BYTES["cpu"]
        for operand in case.example.operand_types(case.dtype, "cpu").values():
            assert 0 not in operand.shape
    assert {case.ids for case in cases} == {"", "uniform", "power law"}


def test_report_says_what_is_picked_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TuningTable((Row("cpu", "rope", "xla", 0.5, "2 cores"), Row("cuda", "rope", "xla", 0.5, "2 cores")))
    monkeypatch.setattr(selection, "packaged_table", lambda: table)
    text = report._choices()
    for op in ("rope", "where_backward", "write_slice", "write_slice_backward", "causal_conv1d_update", "segment_max"):
        assert f"\n{op} " in text, op
    assert text.count("XLA takes 0.50 of the kernel's time") == len(report.devices_by_platform())


def test_format_table_aligns_columns() -> None:
    lines = format_table(("a", "bb"), [("xxx", "y")]).splitlines()
    assert lines == ["a    bb", "---  --", "xxx  y"]


def test_command_line_lists_the_tools() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "jax_baracuda", "--help"], capture_output=True, text=True, check=True, cwd="/"
    )
    for tool in ("report", "check", "race", "tune", "demo"):
        assert tool in result.stdout
    unknown = subprocess.run(
        [sys.executable, "-m", "jax_baracuda", "nonsense"], capture_output=True, text=True, check=False, cwd="/"
    )
    assert unknown.returncode == 2 and "nonsense" in unknown.stderr
