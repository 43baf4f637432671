"""``python -m jax_baracuda report | check | race``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support.matrix.calls import load_all

import benchmarks.__main__ as benchmarks_main
import benchmarks.grid as grid_benchmark
import jax_baracuda as jb
from benchmarks import kernels, many_devices, sample, timing
from jax_baracuda._core.native import NativeModule
from jax_baracuda._core.op import OPS
from jax_baracuda._core.rules import Rule
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example
from jax_baracuda._tools import check, demo, race, report
from jax_baracuda._tools.command_line import CANNOT_RUN, exit_status
from jax_baracuda._tools.platforms import BackendError
from jax_baracuda._tools.progress import Progress
from jax_baracuda._tools.table import format_table


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> list[Example]:
    """All examples at small sizes, each in one of its dtypes. segment_max comes first, in float32.

    Tests may replace the elements of the list.
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
    """Every function also has sizes for ``race`` on every platform."""
    examples = all_examples()
    assert len({example.name for example in examples}) == len(examples)
    for use in ("small", "check", "cpu", "cuda"):
        assert {example.function.__name__ for example in examples if use in example.sizes} == set(load_all()), use


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


def test_report_names_a_platform_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says that a GPU other than CUDA's has no kernels."""
    monkeypatch.setattr(report, "devices_by_platform", dict)
    monkeypatch.setattr(report, "default_devices", lambda: [SimpleNamespace(platform="gpu")])
    text = " ".join(report._ops().split())
    assert text.count(" rocm ") == text.count("there are kernels for cpu and cuda") == len(OPS)


def test_check_passes_and_prints_one_row_per_example(
    examples: list[Example], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--seed", "3"]) == 0
    text = capsys.readouterr().out
    num_rows = len(examples) * len(check.devices_by_platform())
    assert text.count("  ok") == num_rows
    assert f"All {num_rows} checks passed." in text and "Seed: 3" in text


def replaced(example: Example, change: Callable[..., jax.Array]) -> Example:
    """The example with a wrong function: ``change(function, data, **others)``."""
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


def test_check_sees_another_shape() -> None:
    assert check._largest_error(jnp.ones((2, 3)), jnp.ones((2, 3))) == 0
    assert check._largest_error(jnp.ones((1, 3)), jnp.ones((2, 3))) == np.inf


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
    assert text.count("  forward  ") == len(timed)
    assert text.count("  + gradient  ") == len(with_gradient)


def test_tables_grow_row_by_row(examples: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    """The heading is printed before anything is computed, and each row before the next one is computed."""
    num_lines: list[int] = []
    printed: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *texts, **options: printed.append((*texts, options)))
    monkeypatch.setattr(race, "race", lambda *_: num_lines.append(len(printed)) or [("forward", 1.0, 2.0, 0.0)])
    monkeypatch.setattr(race, "devices_by_platform", lambda: {"cpu": jax.devices()[0]})
    race.main([])
    assert num_lines == list(range(3, 3 + len(num_lines)))  # after the device, the heading and its rule
    assert all(options == {"flush": True} for *_, options in printed[: len(num_lines) + 3])


def test_nothing_is_compiled_while_a_batch_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items come in order. An item's compilation error is raised when its result is requested."""
    compiled: list[int] = []
    said: list[str] = []

    def compile_item(item: int) -> int:
        time.sleep(0.01)
        compiled.append(item)
        return 10 // (item - 3)

    for threads in (1, 2):
        compiled.clear()
        monkeypatch.setattr(timing.os, "cpu_count", lambda threads=threads: threads)
        size = threads * timing.ITEMS_PER_THREAD
        items = range(2 * size + 1)
        for item, result in timing.compiled_in_batches(compile_item, items, None, said.append):
            assert len(compiled) == min((item // size + 1) * size, len(items))
            time.sleep(0.02)
            with pytest.raises(ZeroDivisionError) if item == 3 else contextlib.nullcontext():
                assert result() == 10 // (item - 3)
    assert sorted(compiled) == list(items)
    assert said[-1] == "compiling 17 to 17 of 17 calls"


def test_batches_end_in_time() -> None:
    """Batches end in time, even if compiling takes longer. Results compiled before are still returned."""
    items = range(1000)
    assert list(timing.compiled_in_batches(lambda _: time.sleep(0.5), items, 0.1, lambda _: None)) == []
    num_timed = 0
    for _, result in timing.compiled_in_batches(lambda item: item, items, 0.2, lambda _: None):
        assert result() == num_timed
        num_timed += 1
        time.sleep(0.01)
    assert 0 < num_timed <= 20


def test_a_race_repeats_what_is_short() -> None:
    """Medians exclude warm-up runs, unless a loop has no other runs."""

    class Runs:
        def __init__(self, steps: int, *seconds: float) -> None:
            self.steps, self.seconds, self.times = steps, list(seconds), []

        def time(self, operands: list[int], times: int) -> tuple[float, list[int]]:
            self.times.append(times)
            return self.seconds.pop(0), [operands[0] + 1]

    short = Runs(10, 9.0e-3, 1e-3, 5e-3, 15e-3, 10e-3, 1.0)
    long, longer = Runs(1, 0.4, 0.3, 0.2), Runs(2, 0.6, 0.2)
    seconds, operands = timing.race([short, long, longer], [0], 3)
    assert seconds == pytest.approx([10e-3 / (5 * 10), 0.3, 0.3])
    assert short.times == [1, 1, 5, 5, 5] and long.times == [1, 1] and longer.times == [1]
    assert operands == [8]


def test_a_loop_runs_its_steps_as_often_as_asked() -> None:
    loop = timing.Loop(lambda x: ([x[0] + 1], []), [jax.ShapeDtypeStruct((3,), np.float32)], 7, jax.devices("cpu")[0])
    for times in (1, 4):
        seconds, [result] = loop.time([jnp.zeros(3)], times)
        assert seconds > 0
        np.testing.assert_array_equal(result, np.full(3, 7.0 * times))


def test_kernels_of_a_compiled_loop() -> None:
    call = jax.ShapeDtypeStruct((2, 1, 16, 8), np.float32)
    for implementation, expected in (("kernel", ["rope"]), ("xla", [])):
        step = functools.partial(jb.rope, implementation=implementation)
        loop = timing.Loop(lambda x, step=step: (x, [step(*x)]), [call], 1, jax.devices("cpu")[0])
        assert loop.kernels() == expected


def test_sample_of_calls_beside_plain_jax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record has the distribution of ratios, and gives a table and a plot."""
    pytest.importorskip("matplotlib")
    from benchmarks import plots, tables
    from benchmarks.record import FORWARD, WITH_GRADIENT, load

    monkeypatch.setattr(sample, "MAX_BYTES", dict.fromkeys(sample.MAX_BYTES, 2**16))
    path = tmp_path / "cpu_grid.json"
    assert grid_benchmark.main(["--output", str(path), "--cases", "2", "--functions", "rope"]) == 0
    run = load(path)
    assert (run.sampled_calls, run.timed_calls) == (2, 2)
    assert [ratio.what for ratio in run.ratios] == [FORWARD, WITH_GRADIENT] * 2
    for ratio in run.ratios:
        assert ratio.ratio > 0 and set(ratio.kernels) <= {"rope", "rope_backward"}
    assert "2 of 2 calls" in capsys.readouterr().out
    tables.main([str(path)])
    assert "\n| rope | 4 | " in capsys.readouterr().out
    plots.main([str(path)])
    assert path.with_suffix(".svg").stat().st_size > 1000


def test_sampled_calls_differ_and_fit(rng: np.random.Generator) -> None:
    """Whatever the seed: each call accepts the sizes that were drawn for it, and fits in memory."""
    seed = int(rng.integers(1 << 20))
    cases, again = (list(sample.draw("cpu", 400, seed)) for _ in range(2))
    assert [case.sizes_text("cpu") for case in cases] == [case.sizes_text("cpu") for case in again]
    assert len({case.sizes_text("cpu") for case in cases}) > 360
    for case in cases:
        assert 4 * sample.largest_elements(case.example, case.example.sizes["cpu"]) <= sample.MAX_BYTES["cpu"]
        operands, results = sample.types_of(case, "cpu", jax.devices()[0])
        assert all(0 not in x.shape for x in jax.tree.leaves((operands, results)))
        for name, operand in case.example.operands.items():
            if operand.dtype == "int32":  # some draws of ids need enough of what they number
                operand.draw(rng, operands[name].shape, case.example.sizes["cpu"])
    assert {case.ids for case in cases} == {"", "uniform", "power law"}


def test_sampled_calls_leave_out_what_takes_minutes() -> None:
    """Segments are small where plain JAX on GPUs adds rows one by one: for 16-bit numbers, exponentials, variances."""
    cases = list(sample.draw("cuda", 300, 0))
    contended = [case for case in cases if case.contended_rows]
    wide = {case.example.function.__name__ for case in contended if np.dtype(case.dtype).itemsize == 4}
    attention = {"segment_attention", "graph_dot_product_attention", "graph_additive_attention"}
    of_rows = {"segment_softmax", "segment_softmax_backward", "segment_logsumexp", "segment_var", "segment_std"}
    assert wide == of_rows | attention
    assert any(np.dtype(case.dtype).itemsize == 2 for case in contended)
    assert all(case.contended_rows <= sample.MAX_CONTENDED_ROWS for case in cases)
    assert any(case.example.sizes["cuda"].get("segment") == 2 for case in contended)
    slowest = max(case.contended_seconds for case in cases)
    assert timing.num_steps(1000, "cuda", slowest) * slowest <= timing.MAX_SECONDS_OF_A_LOOP
    assert timing.num_steps(1000, "cuda", 0.0) == timing.MAX_STEPS


def test_ids_by_a_power_law(rng: np.random.Generator) -> None:
    """The number of ids in each segment follows the power law, and all ids are in range."""
    sizes = {"segment": 100}
    ids = sample.power_law_ids(rng, (100_000,), sizes)
    assert (ids == np.floor(ids)).all() and ids.min() >= 0 and ids.max() < 100
    below = np.arange(1, 100)
    np.testing.assert_allclose([(ids < i).mean() for i in below], (below / 100) ** (1 / sample.POWER), atol=0.01)
    ordered = sample.sorted_power_law_ids(rng, (4, 1000), sizes)
    assert (np.diff(ordered, axis=1) >= 0).all()


def test_report_says_what_is_picked_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [Rule(platform, "of this test", ()) for platform in ("cpu", "cuda")]
    cases.use_rules(monkeypatch, lambda op: rules if op.name == "where" else ())
    text = report._choices()
    for op in ("rope", "where_backward", "write_slice", "write_slice_backward", "causal_conv1d_update", "segment_max"):
        assert f"\n{op} " in text, op
    assert text.count("of this test") == len(report.devices_by_platform())


def test_race_says_how_much_times_scatter(
    examples: list[Example], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert race.relative_spread([2.0]) == 0
    np.testing.assert_allclose(race.relative_spread([8.0, 9.0, 10.0, 11.0, 30.0]), 0.2)
    del examples[1:]
    for spread, warns in ((0.19, False), (0.21, True)):
        monkeypatch.setattr(race, "race", lambda *_, spread=spread: [("forward", 1e-3, 2e-3, spread)])
        assert race.main([]) == 0
        text = capsys.readouterr().out
        assert ("WARNING" in text) == warns
        assert f"{spread:.0%}" in text


def test_format_table_aligns_columns() -> None:
    lines = format_table(("a", "bb"), [("xxx", "y")]).splitlines()
    assert lines == ["a    bb", "---  --", "xxx  y"]


def test_tables_fit_100_columns() -> None:
    """The widest column is wrapped without losing words. A cell may have several lines."""
    words = [f"word{number}" for number in range(60)]
    lines = format_table(("short", "long"), [("a\nb", " ".join(words))]).splitlines()
    assert max(map(len, lines)) <= 100
    assert [line[:1] for line in lines[2:4]] == ["a", "b"]
    assert " ".join(line[len("short  ") :] for line in lines[2:]).split() == words


def test_tables_break_long_names_after_underscores_and_no_other_words() -> None:
    """So that commands can be copied."""
    lines = format_table(("a", "b"), [("VARIABLE_OF_A_BUILD=ON command " * 9, "name_" * 30)]).splitlines()[2:]
    assert sum(line.startswith("VARIABLE_OF_A_BUILD=ON command") for line in lines) == 9
    assert all(line.endswith("name_") for line in lines if "name" in line)


@pytest.mark.parametrize("columns", [80, 100])
def test_tools_fit_the_terminal(
    columns: int, examples: list[Example], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 100 columns are used. Without a terminal, no control characters are printed."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(check, "errors", lambda *_: [("bfloat16", 0.0, 0.0)])
    monkeypatch.setattr(race, "all_examples", all_examples)
    monkeypatch.setattr(race, "race", lambda *_: [("forward", 1e-3, 1e-3, 0.0), ("+ gradient", 1.0, 1.0, 1.0)])
    for platform in ("cpu", "cuda"):
        for tool in (check, race):
            monkeypatch.setattr(tool, "devices_by_platform", lambda platform=platform: {platform: jax.devices()[0]})
            assert tool.main([]) == 0
    assert report.main([]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert text.replace("\n", "").isprintable()
    assert "spreads are above 20%: do not trust their speed-ups" in text


def ended(tool: Any, arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status of a command line that ends in its parser, and what it printed."""
    with pytest.raises(SystemExit) as stop:
        tool.main(arguments)
    return stop.value.code, "".join(capsys.readouterr())


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal = on_terminal(monkeypatch)
    progress = Progress()
    for item in progress.track(range(3), 3, lambda number: f"[item] {number}"):
        progress.print(f"[row] {item} " + "x" * 150)
    text = terminal.getvalue()
    assert "\x1b[" in text and "3/3" in text and "[item] 2" in text
    assert all(f"[row] {item} " + "x" * 150 + "\n" in text for item in range(3))


def test_check_fails_without_a_device_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports that there is no device, instead of passing without failures."""
    monkeypatch.setattr(jax, "devices", lambda *_: (_ for _ in ()).throw(AssertionError()))
    with pytest.raises(BackendError, match=r"^JAX cannot start a backend \(JAX_PLATFORMS is .*AssertionError$"):
        check.main([])
    monkeypatch.setattr(jax, "devices", lambda platform=None: (_ for _ in ()).throw(RuntimeError()) if platform else [])
    with pytest.raises(BackendError, match="There are kernels for cpu and cuda; JAX has"):
        check.main([])


def run_tool(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_report_where_jax_cannot_start() -> None:
    """The report still has the versions, the modules and the reason."""
    result = run_tool("jax_baracuda", "report", JAX_PLATFORMS="nonsense")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    for expected in (jb.__version__, jax.__version__, "native module", "JAX_PLATFORMS is 'nonsense'"):
        assert expected in result.stdout


@pytest.mark.parametrize(
    ("line", "status", "printed"),
    [
        ("print(sys.argv[1:])", 0, "['--steps', '3']"),
        ("jax.ops.segment_max(jnp.ones(9), jnp.zeros(9, int), 2)", 0, "1 x jax.ops.segment_max: "),
        ("jax.ops.segment_max(jnp.ones(9), jnp.zeros(9, int), 2)", 0, "\n    script.py:2\n"),
        ("sys.exit(3)", 3, "no calls that can be redirected"),
        ("sys.exit('no data')", 1, "no data"),
        ("raise ValueError('a mistake')", 1, "ValueError: a mistake"),
    ],
)
def test_report_of_a_script(line: str, status: int, printed: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys, jax, jax.numpy as jnp\n{line}\n")
    result = run_tool("jax_baracuda", "report", "--of", str(script), "--steps", "3")
    assert result.returncode == status
    assert printed in result.stdout + result.stderr
    assert "script.py ran:" in result.stdout
    assert "runpy" not in result.stderr and "_tools" not in result.stderr


def test_report_of_no_script(tmp_path: Path) -> None:
    for arguments in ([], [str(tmp_path)], ["-m", "json"]):
        result = run_tool("jax_baracuda", "report", "--of", *arguments)
        assert result.returncode == CANNOT_RUN and "--of needs a file with a Python script, got" in result.stderr


def test_exit_status_of_a_tool(capsys: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> Callable[[], int]:
        def main() -> int:
            raise error

        return main

    assert [exit_status(lambda status=status: status) for status in (0, 1)] == [0, 1]
    assert exit_status(raising(KeyboardInterrupt())) == 130
    assert exit_status(raising(BackendError("no device"))) == 2
    assert capsys.readouterr().err == "interrupted\nno device\n"
    with pytest.raises(ZeroDivisionError):  # an error of a tool itself is not hidden
        exit_status(raising(ZeroDivisionError()))


WRITE_UNTIL_CLOSED = """
import sys
from jax_baracuda._tools.command_line import run
def main():
    print("first", flush=True)
    sys.stdin.readline()
    print("second")
    return 0
run(main)
"""


END_BESIDE_A_THREAD = """
import threading
from jax_baracuda._tools.command_line import run
def main():
    threading.Thread(target=threading.Event().wait).start()
    print("row")
    {}
run(main)
"""


@pytest.mark.parametrize(
    ("end", "status", "error"), [("raise KeyboardInterrupt", 130, "interrupted\n"), ("return 0", 0, "")]
)
def test_a_tool_that_ends_waits_for_no_thread(end: str, status: int, error: str) -> None:
    command = [sys.executable, "-c", END_BESIDE_A_THREAD.format(end)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (child.returncode, child.stdout, child.stderr) == (status, "row\n", error)


def test_a_closed_pipe_is_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_UNTIL_CLOSED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout.readline() == "first\n"
        child.stdout.close()
        child.stdin.write("go on\n")
        child.stdin.close()
        assert child.stderr.read() == ""
        assert child.wait() == 128 + signal.SIGPIPE


def test_interrupted_benchmarks_keep_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmarks_main, "measure", interrupted)
    monkeypatch.setattr(benchmarks_main, "copy_bytes_per_second", lambda: 1e12)
    assert benchmarks_main.main(["--quick", "--only", "rope"]) == 130
    assert "interrupted after 0 of " in capsys.readouterr().out


@cases.on_two_devices
@pytest.mark.parametrize("tool", [benchmarks_main, many_devices])
def test_benchmarks_say_that_no_name_fits(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    status, text = ended(tool, ["--quick", "--only", "nonsense", "--output", str(record)], capsys)
    assert status == 2 and "has a name with nonsense" in text
    assert not record.exists()


REFUSED = [
    *((race, ["--repeats", repeats], "argument --repeats: ") for repeats in ("0", "-1", "many")),
    *((x, ["--seed", "-1"], "--seed: must be at least 0, got -1") for x in (check, demo, grid_benchmark)),
    (grid_benchmark, ["--functions", "rope", "nonsense"], "argument --functions: invalid choice: 'nonsense'"),
]


@pytest.mark.parametrize(("tool", "arguments", "message"), REFUSED)
def test_arguments_out_of_range(
    tool: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = ended(tool, arguments, capsys)
    assert status == 2 and message in text


@pytest.mark.parametrize("tool", [demo, benchmarks_main, grid_benchmark, many_devices])
def test_what_cannot_be_written_is_said_first(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, problem in ((tmp_path / "missing" / "file", "there is no folder"), (tmp_path, "is a folder")):
        status, text = ended(tool, ["--output", str(path)], capsys)
        assert status == 2 and "argument --output: " in text and problem in text


@pytest.mark.parametrize("tool", [benchmarks_main, grid_benchmark, many_devices, kernels])
def test_help_of_benchmarks_needs_no_device(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --help, benchmarks report that there is no device."""
    monkeypatch.setattr(jax, "devices", lambda *_: (_ for _ in ()).throw(RuntimeError("none")))
    with pytest.raises(BackendError, match="JAX cannot start a backend"):
        tool.main([])
    status, text = ended(tool, ["--help"], capsys)
    assert status == 0 and "Exit status: 0 if " in text


RUN_WITHOUT_EDITABLE_INSTALLATION = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
name, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "tool",
    [
        "benchmarks --quick",
        "benchmarks.grid --cases 1",
        "benchmarks.many_devices --quick",
        "jax_baracuda race",
        "jax_baracuda check",
    ],
)
def test_tools_that_compare_kernels_need_them(tool: str, tmp_path: Path) -> None:
    """Tools report it if a clone without native modules hides the installed package."""
    for module in (jb, benchmarks_main):
        folder = Path(inspect.getfile(module)).parent
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("*.so", "results"))
    devices = "--xla_force_host_platform_device_count=2"
    result = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT_EDITABLE_INSTALLATION, *tool.split()],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == CANNOT_RUN, result.stderr
    assert f"no kernels on cpu: jax_baracuda is imported from {tmp_path / 'jax_baracuda'}" in result.stderr
    assert "pip install --editable ." in result.stderr
    assert " ms" not in result.stdout


def test_files_that_cannot_be_used_are_no_traceback(tmp_path: Path) -> None:
    missing = run_tool("benchmarks.tables", str(tmp_path / "missing.json"))
    assert missing.returncode == 2
    assert missing.stderr == f"[Errno 2] No such file or directory: '{tmp_path / 'missing.json'}'\n"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "jax_baracuda", "report"]
        child = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (child.returncode, child.stderr) == (2, "[Errno 28] No space left on device\n")


@pytest.mark.parametrize("tool", ["report", "check", "race", "demo"])
def test_help_names_the_exit_statuses(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = ended(importlib.import_module(f"jax_baracuda._tools.{tool}"), ["--help"], capsys)
    assert status == 0 and "Exit status: 0 if " in text and "130 if Ctrl-C" in text.replace("\n", " ")


def test_command_line_lists_the_tools() -> None:
    result = run_tool("jax_baracuda", "--help")
    for tool in ("report", "check", "race", "demo"):
        assert tool in result.stdout
    assert result.returncode == 0
    unknown = run_tool("jax_baracuda", "nonsense")
    assert unknown.returncode == 2 and "nonsense" in unknown.stderr


@cases.on_two_devices
def test_scaling_over_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times one share, all shares on one device and the split program, for kernels and plain JAX, without failures."""
    path = tmp_path / "record.json"
    assert many_devices.main(["--quick", "--only", "rope", "--output", str(path)]) == 0
    [program] = json.loads(path.read_text())["programs"]
    assert program["failure"] is None
    for times in program["milliseconds"].values():
        assert times.keys() == {"share", "all", "split"}
        assert min(times.values()) > 0
    assert capsys.readouterr().out.count("strong") == 2


@pytest.mark.parametrize("reader", ["tables", "plots"])
def test_records_of_other_tools_are_refused(reader: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "record.json"
    path.write_text('{"devices": 2, "programs": []}')
    status, text = ended(importlib.import_module(f"benchmarks.{reader}"), [str(path)], capsys)
    assert status == 2 and "expected a record with cases or with ratios, got one with devices, programs" in text
