"""The demo learns, its two runs agree, and its exit status says so."""

import sys

import jax
import numpy as np
import pytest

from jax_baracuda._tools import demo


def test_demo_succeeds_and_writes_its_plot(tmp_path, capsys):
    plot = tmp_path / "plot.png"
    assert demo.main(["--steps", "12", "--seed", "1", "--output", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    printed = capsys.readouterr()
    assert printed.out.count("agreement: ") == 4
    assert max(map(len, printed.out.replace(str(tmp_path), "").splitlines())) <= 80
    assert printed.err == ""


@pytest.mark.parametrize("dtype", demo.DTYPES)
def test_both_runs_learn_the_same(dtype):
    graph = demo.load_digits_graph(seed=0, dtype=dtype)
    runs = demo.start_runs(seed=0)
    assert demo.gradient_difference(graph, *runs) <= demo.GRADIENT_TOLERANCE[dtype]
    demo.train_side_by_side(runs, graph, steps=60)
    ours, reference = runs
    assert demo.loss_difference(ours.losses, reference.losses) <= demo.LOSS_TOLERANCE[dtype]
    for run in runs:
        assert len(run.losses) == len(run.accuracies) == len(run.seconds) == 60
        assert run.losses[-1] < 0.05 * run.losses[0]
        assert run.accuracies[-1] >= 0.95


def test_graph_gives_every_node_neighbours_in_ascending_order():
    graph = demo.load_digits_graph(seed=0, dtype="float32")
    receivers = np.asarray(graph.plan.segment_ids)
    assert np.all(np.diff(receivers) >= 0)
    assert np.bincount(receivers, minlength=len(graph.labels)).min() >= demo.NEIGHBOURS


def test_a_wrong_gradient_fails_the_demo(tmp_path, capsys, monkeypatch):
    def with_gradient_too_large(x, graph):
        maximum = demo.maximum_of_messages(x, graph)
        return 1.01 * maximum - 0.01 * jax.lax.stop_gradient(maximum)

    monkeypatch.setattr(demo, "fused_maximum", with_gradient_too_large)
    assert demo.main(["--steps", "6", "--output", str(tmp_path / "plot.png")]) == 1
    assert "DISAGREEMENT: first gradients" in capsys.readouterr().err


def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    plot = tmp_path / "plot.png"
    assert demo.main(["--output", str(plot)]) == 2
    assert not plot.exists()
    message = capsys.readouterr().err
    assert "sklearn" in message
    assert "pip install '.[demo]'" in message
