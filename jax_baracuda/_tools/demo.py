"""Demo: train a graph network whose aggregation is `gather_segment_max`, and compare it with `jax.ops.segment_max`.

    python -m jax_baracuda demo

The data are the 1797 handwritten digits (8 x 8 pixels) that scikit-learn ships. Each image is a node of a graph, joined
to the images most like it, and some of the nodes carry a label. A GraphSAGE network with max pooling (Hamilton, Ying
and Leskovec, "Inductive Representation Learning on Large Graphs", 2017) learns to label the others. In each of its
layers

    h_v = W_self x_v + W_neighbour max_{u in N(v)} relu(W_pool x_u + b_pool) + b

the maximum over the neighbours N(v) of every node v is one call of `gather_segment_max`, differentiated at every
training step. The plan of the edges is made once, before the training.

Two runs train side by side from the same initial parameters, one with `jax_baracuda.gather_segment_max` and one with
`jax.ops.segment_max` of the gathered messages, and nothing else differs between them.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_baracuda
from jax_baracuda._tools.command_line import CANNOT_RUN, missing_packages, output_file, parser_of, whole_number
from jax_baracuda._tools.platforms import default_devices

NEIGHBOURS = 10
LABELLED_FRACTION = 0.3
HIDDEN_CHANNELS = 64
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 5

# The runs compute the same formulas, so their first gradients differ only by the rounding of float32 sums: about 1e-7
# of an array's largest entry. Training amplifies such differences: when two neighbours are nearly equal, rounding
# decides which is the maximum. Merely reordering the edges of the graph, and with them the sums in the gradient,
# moves the loss curve by up to 3e-5 of the initial loss. A gradient that misses one of the 64 channels moves it by
# 4e-3.
GRADIENT_TOLERANCE = 1e-5
LOSS_TOLERANCE = 1e-3


class Graph(NamedTuple):
    """N nodes with features and labels, and E directed edges, sorted by receiver.

    Every node receives at least one edge: the maximum over no neighbours would be -inf.
    """

    features: jax.Array  # (N, 64) float32: the pixels of each image, between 0 and 1
    labels: jax.Array  # (N,) int32: the digit that each image shows
    is_train: jax.Array  # (N,) bool: the nodes whose labels the training may see
    senders: jax.Array  # (E,) int32
    receivers: jax.Array  # (E,) int32, ascending
    plan: jax_baracuda.SegmentPlan  # of the edges


def fused_maximum(x: jax.Array, graph: Graph) -> jax.Array:
    """The maximum over the neighbours of each node, (N, P), without an array of messages."""
    return jax_baracuda.gather_segment_max(x, plan=graph.plan)


def maximum_of_messages(x: jax.Array, graph: Graph) -> jax.Array:
    """The same in plain JAX, which gathers the messages (E, P) first."""
    return jax.ops.segment_max(x[graph.senders], graph.receivers, num_segments=x.shape[0], indices_are_sorted=True)


Aggregate = Callable[[jax.Array, Graph], jax.Array]


class SageLayer(NamedTuple):
    """Parameters of one GraphSAGE layer from I input to O output channels, with P pooled channels."""

    pool_weight: jax.Array  # (I, P)
    pool_bias: jax.Array  # (P,)
    self_weight: jax.Array  # (I, O)
    neighbour_weight: jax.Array  # (P, O)
    bias: jax.Array  # (O,)


class AdamState(NamedTuple):
    """Running means of the gradients and of their squares, shaped like the parameters, and the steps taken so far."""

    mean: Any
    mean_square: Any
    steps: jax.Array


@dataclass
class Run:
    """One training run: its aggregation, its current state, and the measurements of each step."""

    function: str
    aggregate: Aggregate
    parameters: list[SageLayer]
    adam: AdamState
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def median_milliseconds(self) -> float:
        """Median time of a training step, without the warm-up steps."""
        return 1e3 * statistics.median(self.seconds[WARM_UP_STEPS:])


def load_digits_graph(seed: int) -> Graph:
    """Joins each of scikit-learn's digit images with its nearest neighbours, and draws the labelled nodes."""
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    images, labels = load_digits(return_X_y=True)
    nearest = kneighbors_graph(images, NEIGHBOURS)
    # Being a nearest neighbour is not mutual. Edges in both directions give nodes neighbourhoods of different sizes.
    edges = nearest.maximum(nearest.T).tocsr()
    edges.sort_indices()
    is_train = np.random.default_rng(seed).random(len(labels)) < LABELLED_FRACTION
    senders = jnp.asarray(edges.indices, jnp.int32)
    receivers = jnp.asarray(np.repeat(np.arange(len(labels)), np.diff(edges.indptr)), jnp.int32)
    return Graph(
        features=jnp.asarray(images / 16, jnp.float32),
        labels=jnp.asarray(labels, jnp.int32),
        is_train=jnp.asarray(is_train),
        senders=senders,
        receivers=receivers,
        plan=jax_baracuda.segment_plan(receivers, len(labels), senders, len(labels)),
    )


def initial_parameters(key: jax.Array, channels: Sequence[int]) -> list[SageLayer]:
    """Random parameters of the layers between the given channel counts, from the input to the output."""
    scaled_normal = jax.nn.initializers.he_normal()
    layers = []
    for inputs, outputs in zip(channels[:-1], channels[1:], strict=True):
        key, pool_key, self_key, neighbour_key = jax.random.split(key, 4)
        layers.append(
            SageLayer(
                pool_weight=scaled_normal(pool_key, (inputs, HIDDEN_CHANNELS), jnp.float32),
                pool_bias=jnp.zeros(HIDDEN_CHANNELS, jnp.float32),
                self_weight=scaled_normal(self_key, (inputs, outputs), jnp.float32),
                neighbour_weight=scaled_normal(neighbour_key, (HIDDEN_CHANNELS, outputs), jnp.float32),
                bias=jnp.zeros(outputs, jnp.float32),
            )
        )
    return layers


def sage_layer(layer: SageLayer, x: jax.Array, graph: Graph, aggregate: Aggregate) -> jax.Array:
    """Maps node features of shape (N, I) to (N, O): each node sees itself and the maximum over its neighbours."""
    pooled = jax.nn.relu(x @ layer.pool_weight + layer.pool_bias)  # (N, P)
    strongest = aggregate(pooled, graph)  # (N, P)
    return x @ layer.self_weight + strongest @ layer.neighbour_weight + layer.bias


def network(parameters: list[SageLayer], graph: Graph, aggregate: Aggregate) -> jax.Array:
    """Logits of shape (N, 10): one score per node and digit."""
    *hidden_layers, last_layer = parameters
    x = graph.features
    for layer in hidden_layers:
        x = jax.nn.relu(sage_layer(layer, x, graph, aggregate))
    return sage_layer(last_layer, x, graph, aggregate)


def loss_and_accuracy(parameters: list[SageLayer], graph: Graph, aggregate: Aggregate) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy over the training nodes, and the fraction of the other nodes that are labelled correctly."""
    logits = network(parameters, graph, aggregate)
    log_probabilities = jax.nn.log_softmax(logits)
    cross_entropy = -jnp.take_along_axis(log_probabilities, graph.labels[:, None], axis=1)[:, 0]  # (N,)
    is_correct = jnp.argmax(logits, axis=1) == graph.labels
    loss = jnp.mean(cross_entropy, where=graph.is_train)
    accuracy = jnp.mean(is_correct, where=~graph.is_train)
    return loss, accuracy


def adam_update(parameters: Any, gradients: Any, state: AdamState) -> tuple[Any, AdamState]:
    """One step of Adam (Kingma and Ba, 2014): the updated parameters and state."""
    # Adam divides every gradient by its usual size. With the customary epsilon of 1e-8, gradients that are mere
    # rounding errors would become full steps.
    decay, decay_square, epsilon = 0.9, 0.999, 1e-5
    steps = state.steps + 1
    mean = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, state.mean, gradients)
    mean_square = jax.tree.map(lambda s, g: decay_square * s + (1 - decay_square) * g**2, state.mean_square, gradients)

    def moved(parameter: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        unbiased_mean, unbiased_mean_square = m / (1 - decay**steps), s / (1 - decay_square**steps)
        return parameter - LEARNING_RATE * unbiased_mean / (jnp.sqrt(unbiased_mean_square) + epsilon)

    return jax.tree.map(moved, parameters, mean, mean_square), AdamState(mean, mean_square, steps)


@functools.partial(jax.jit, static_argnames="aggregate")
def training_step(
    parameters: list[SageLayer], adam: AdamState, graph: Graph, aggregate: Aggregate
) -> tuple[list[SageLayer], AdamState, jax.Array, jax.Array]:
    """Updated parameters and Adam state, and the loss and test accuracy before the update."""
    differentiate = jax.value_and_grad(loss_and_accuracy, has_aux=True)
    (loss, accuracy), gradients = differentiate(parameters, graph, aggregate)
    parameters, adam = adam_update(parameters, gradients, adam)
    return parameters, adam, loss, accuracy


def start_runs(seed: int) -> tuple[Run, Run]:
    """One run with `gather_segment_max` and one with `jax.ops.segment_max`, with the same initial parameters."""
    parameters = initial_parameters(jax.random.key(seed), (64, HIDDEN_CHANNELS, 10))
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    adam = AdamState(mean=zeros, mean_square=zeros, steps=jnp.zeros((), jnp.int32))
    ours = Run("jax_baracuda.gather_segment_max", fused_maximum, parameters, adam)
    reference = Run("jax.ops.segment_max", maximum_of_messages, parameters, adam)
    return ours, reference


def advance(run: Run, graph: Graph) -> None:
    """Takes one training step of a run, and notes its loss, its accuracy and its duration."""
    start = time.perf_counter()
    results = jax.block_until_ready(training_step(run.parameters, run.adam, graph, run.aggregate))
    run.seconds.append(time.perf_counter() - start)
    run.parameters, run.adam, loss, accuracy = results
    run.losses.append(float(loss))
    run.accuracies.append(float(accuracy))


def train_side_by_side(runs: Sequence[Run], graph: Graph, steps: int) -> None:
    """Trains all runs, one step each in turn, so that other work on this machine affects their timings equally."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=steps, loss=float("nan"))
        for _ in range(steps):
            for run in runs:
                advance(run, graph)
            progress.update(task, advance=1, loss=runs[0].losses[-1])


@functools.partial(jax.jit, static_argnames="aggregate")
def loss_gradients(parameters: list[SageLayer], graph: Graph, aggregate: Aggregate) -> list[SageLayer]:
    """Gradients of the training loss, shaped like the parameters."""
    gradients, _ = jax.grad(loss_and_accuracy, has_aux=True)(parameters, graph, aggregate)
    return gradients


def gradient_difference(graph: Graph, run: Run, expected: Run) -> float:
    """Largest difference between the current gradients of two runs, relative to each array's largest entry."""

    def relative_difference(a: jax.Array, b: jax.Array) -> float:
        return float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))

    differences = jax.tree.map(
        relative_difference,
        loss_gradients(run.parameters, graph, run.aggregate),
        loss_gradients(expected.parameters, graph, expected.aggregate),
    )
    return max(jax.tree.leaves(differences))


def loss_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Largest difference between two loss curves over all of their steps, relative to the initial loss."""
    return float(np.max(np.abs(np.subtract(losses, expected))) / expected[0])


def save_plot(runs: Sequence[Run], device: jax.Device, path: Path) -> None:
    """Draws the loss and the test accuracy of all runs over the steps, and their times per step, as a PNG file."""
    # A Figure of its own, without pyplot, needs no display and leaves the caller's choice of a backend alone.
    from matplotlib.figure import Figure

    # The first run is thin and dashed, on top of the second, so that both of two equal curves are visible.
    styles = [
        {"color": "#b3261e", "linewidth": 1.6, "linestyle": (0, (4, 3)), "zorder": 3},
        {"color": "#9db4d0", "linewidth": 5.0, "solid_capstyle": "round", "zorder": 2},
    ]
    figure = Figure(figsize=(13, 4.4), dpi=150, layout="constrained")
    loss_axes, accuracy_axes, time_axes = figure.subplots(1, 3, width_ratios=(4, 4, 3))
    for run, style in zip(runs, styles, strict=True):
        loss_axes.plot(run.losses, label=run.function, **style)
        accuracy_axes.plot(100 * np.asarray(run.accuracies), **style)

    loss_axes.set(title="Training loss", xlabel="training step", ylabel="cross-entropy [nats]", yscale="log")
    loss_axes.legend(frameon=False)
    accuracy_axes.set(title="Test accuracy", xlabel="training step", ylabel="correct test nodes [%]", ylim=(0, 102))
    accuracy_axes.annotate(
        f"{100 * runs[0].accuracies[-1]:.1f} %",
        xy=(1, 100 * runs[0].accuracies[-1]),
        xycoords=("axes fraction", "data"),
        xytext=(-6, -14),
        textcoords="offset points",
        ha="right",
        va="top",
    )

    bars = time_axes.barh(
        [run.function.rsplit(".", 1)[0] for run in runs],
        [run.median_milliseconds() for run in runs],
        color=[style["color"] for style in styles],
        height=0.5,
    )
    time_axes.bar_label(bars, fmt="%.2f ms", padding=4)
    time_axes.set(title="Time per training step", xlabel=f"median on {device.device_kind} [ms]")
    time_axes.margins(x=0.35)
    time_axes.invert_yaxis()

    for axes in (loss_axes, accuracy_axes, time_axes):
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (loss_axes, accuracy_axes):
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    figure.suptitle(
        f"GraphSAGE with max pooling on a graph of handwritten digits, each joined to its {NEIGHBOURS} nearest"
    )
    figure.savefig(path, format="png")


def report_agreement(quantity: str, difference: float, tolerance: float) -> bool:
    """Prints how much the two runs differ in a quantity, on stderr if too much; returns whether they agree."""
    agree = difference <= tolerance
    print(
        f"{'agreement' if agree else 'DISAGREEMENT'}: {quantity}: the runs differ by at most {difference:.1e} "
        f"(tolerance {tolerance:.0e})",
        file=sys.stdout if agree else sys.stderr,
    )
    return agree


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line of the demo."""
    parser = parser_of(
        "jax_baracuda demo",
        "Trains a graph network with jax_baracuda.gather_segment_max and with jax.ops.segment_max, checks that both "
        "learn the same, and compares their speed.",
        {0: "both learn the same", 1: "they do not"},
    )
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--output", type=output_file, default=Path("demo.png"), help="PNG file for the plot")
    parser.add_argument(
        "--steps",
        type=whole_number(WARM_UP_STEPS + 1),
        default=200,
        help=f"training steps of each run, of which {WARM_UP_STEPS} warm up",
    )
    parser.add_argument(
        "--seed", type=whole_number(0), default=0, help="seed of the initial parameters and of the labelled nodes"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo. Returns 0, or 1 if the two runs disagree, or 2 if a package that it needs is missing."""
    options = parse_arguments(arguments)
    if problem := missing_packages("The demo", ("sklearn", "matplotlib", "rich"), "demo"):
        print(problem, file=sys.stderr)
        return CANNOT_RUN

    device = default_devices()[0]
    graph = load_digits_graph(options.seed)
    ours, reference = start_runs(options.seed)

    print(f"device:    {device.device_kind}")
    print(
        f"graph:     {len(graph.labels)} nodes, {len(graph.senders)} edges; "
        f"{int(graph.is_train.sum())} nodes are labelled for training, the others are the test"
    )
    # By default, some devices round the factors of float32 matrix products to fewer bits, which would amplify the
    # runs' rounding differences.
    with jax.default_matmul_precision("highest"):
        first_gradient_difference = gradient_difference(graph, ours, reference)
        train_side_by_side((ours, reference), graph, options.steps)
    save_plot((ours, reference), device, options.output)

    for run in (ours, reference):
        print(
            f"{run.function + ':':<33} final loss {run.losses[-1]:.6f}, "
            f"test accuracy {run.accuracies[-1]:.1%}, {run.median_milliseconds():.2f} ms per training step (median)"
        )
    ratio = reference.median_milliseconds() / ours.median_milliseconds()
    print(f"speed:     {ratio:.2f} training steps with {ours.function} in the time of one with {reference.function}")
    print(f"plot:      {options.output}")
    gradients_agree = report_agreement(
        "first gradients, relative to each array's largest entry", first_gradient_difference, GRADIENT_TOLERANCE
    )
    losses_agree = report_agreement(
        "losses of all steps, relative to the initial loss",
        loss_difference(ours.losses, reference.losses),
        LOSS_TOLERANCE,
    )
    return 0 if gradients_agree and losses_agree else 1
