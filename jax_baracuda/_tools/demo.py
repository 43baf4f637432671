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
`jax.ops.segment_max` of the gathered messages, and nothing else differs between them. Two more do so with features and
messages in bfloat16; their parameters stay in float32. The gradient of gathered messages is a sum, which plain JAX adds
up in bfloat16, on GPUs by loops of compare-and-swap, and the kernel in float32.
"""

import argparse
import functools
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.example_libraries import optimizers

import jax_baracuda
from jax_baracuda._tools.command_line import CANNOT_RUN, integer_from, output_file, parser_of
from jax_baracuda._tools.platforms import default_devices
from jax_baracuda._tools.progress import Progress

NEIGHBOURS = 10
LABELLED_FRACTION = 0.3
HIDDEN_CHANNELS = 64
WARM_UP_STEPS = 5

# Adam divides every gradient by its usual size. With the customary epsilon of 1e-8, gradients that are mere rounding
# errors would become full steps.
start_adam, adam_step, parameters_of = optimizers.adam(step_size=3e-3, eps=1e-5)

# The runs compute the same formulas, so their first gradients differ only by the rounding of float32 sums: about 1e-7
# of an array's largest entry. Training amplifies such differences: when two neighbours are nearly equal, rounding
# decides which is the maximum. Merely reordering the edges of the graph, and with them the sums in the gradient,
# moves the loss curve by up to 3e-5 of the initial loss. A gradient that misses one of the 64 channels moves it by
# 4e-3.
#
# In bfloat16, plain JAX rounds the partial sums of gradients to 8 bits. First gradients differ by up to 7e-3 on CPUs,
# and losses by up to 1e-3.
GRADIENT_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}
DTYPES = tuple(GRADIENT_TOLERANCE)
"""The dtypes of features and messages."""


class Graph(NamedTuple):
    """N nodes with features and labels, and directed edges.

    Every node receives at least one edge: the maximum over no neighbours would be -inf.
    """

    features: jax.Array  # (N, 64): the pixels of each image, between 0 and 1, in the dtype of all rows
    labels: jax.Array  # (N,) int32: the digit that each image shows
    is_train: jax.Array  # (N,) bool: the nodes whose labels the training may see
    plan: jax_baracuda.SegmentPlan  # of the edges: senders are its gather_ids, receivers its segment_ids, ascending


def fused_maximum(x: jax.Array, graph: Graph) -> jax.Array:
    """The maximum over the neighbours of each node, (N, P), without an array of messages."""
    return jax_baracuda.gather_segment_max(x, plan=graph.plan)


def maximum_of_messages(x: jax.Array, graph: Graph) -> jax.Array:
    """The same in plain JAX, which gathers the messages (E, P) first."""
    senders, receivers = graph.plan.gather_ids, graph.plan.segment_ids
    return jax.ops.segment_max(x[senders], receivers, num_segments=x.shape[0], indices_are_sorted=True)


Aggregate = Callable[[jax.Array, Graph], jax.Array]
Layer = dict[str, jax.Array]
"""The parameters of one GraphSAGE layer."""


@dataclass
class Run:
    """One training run: its aggregation, the state of its optimizer, and the measurements of each step."""

    function: str
    aggregate: Aggregate
    state: Any
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def advance(self, graph: Graph) -> None:
        """Takes one training step."""
        start = time.perf_counter()
        step = len(self.losses)
        self.state, loss, accuracy = jax.block_until_ready(training_step(step, self.state, graph, self.aggregate))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))
        self.accuracies.append(float(accuracy))

    def milliseconds(self) -> float:
        """Median time of a training step, without the warm-up steps."""
        return 1e3 * statistics.median(self.seconds[WARM_UP_STEPS:])


def load_digits_graph(seed: int, dtype: str) -> Graph:
    """Joins each of scikit-learn's digit images with its nearest neighbours, and draws the labelled nodes."""
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    images, labels = load_digits(return_X_y=True)
    nearest = kneighbors_graph(images, NEIGHBOURS)
    # Being a nearest neighbour is not mutual. Edges in both directions give nodes neighbourhoods of different sizes.
    receivers, senders = nearest.maximum(nearest.T).nonzero()
    return Graph(
        features=jnp.asarray(images / 16, dtype),
        labels=jnp.asarray(labels, jnp.int32),
        is_train=jnp.asarray(np.random.default_rng(seed).random(len(labels)) < LABELLED_FRACTION),
        plan=jax_baracuda.segment_plan(receivers, len(labels), senders, len(labels)),
    )


def initial_layer(key: jax.Array, inputs: int, outputs: int) -> Layer:
    """Random parameters from I input to O output channels, with P pooled channels."""
    shapes = {"pool": (inputs, HIDDEN_CHANNELS), "self": (inputs, outputs), "neighbour": (HIDDEN_CHANNELS, outputs)}
    keys = jax.random.split(key, len(shapes))
    weights = {name: jax.nn.initializers.he_normal()(k, shapes[name]) for k, name in zip(keys, shapes, strict=True)}
    return weights | {"pool_bias": jnp.zeros(HIDDEN_CHANNELS), "bias": jnp.zeros(outputs)}


def sage_layer(layer: Layer, x: jax.Array, graph: Graph, aggregate: Aggregate) -> jax.Array:
    """Maps node features of shape (N, I) to (N, O): each node sees itself and the maximum over its neighbours."""
    pooled = jax.nn.relu(x @ layer["pool"] + layer["pool_bias"])  # (N, P)
    strongest = aggregate(pooled, graph)  # (N, P)
    return x @ layer["self"] + strongest @ layer["neighbour"] + layer["bias"]


def loss_and_accuracy(layers: list[Layer], graph: Graph, aggregate: Aggregate) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy over the training nodes, and the fraction of the other nodes that are labelled correctly."""
    hidden, output = jax.tree.map(lambda parameter: parameter.astype(graph.features.dtype), layers)
    x = jax.nn.relu(sage_layer(hidden, graph.features, graph, aggregate))
    logits = sage_layer(output, x, graph, aggregate).astype(jnp.float32)  # (N, 10): one score per node and digit
    log_probabilities = jax.nn.log_softmax(logits)
    cross_entropy = -jnp.take_along_axis(log_probabilities, graph.labels[:, None], axis=1)[:, 0]  # (N,)
    is_correct = jnp.argmax(logits, axis=1) == graph.labels
    return jnp.mean(cross_entropy, where=graph.is_train), jnp.mean(is_correct, where=~graph.is_train)


@functools.partial(jax.jit, static_argnames="aggregate")
def training_step(step: int, state: Any, graph: Graph, aggregate: Aggregate) -> tuple[Any, jax.Array, jax.Array]:
    """The updated state of the optimizer, and the loss and test accuracy before the update."""
    differentiate = jax.value_and_grad(loss_and_accuracy, has_aux=True)
    (loss, accuracy), gradients = differentiate(parameters_of(state), graph, aggregate)
    return adam_step(step, gradients, state), loss, accuracy


def start_runs(seed: int) -> tuple[Run, Run]:
    """One run with `gather_segment_max` and one with `jax.ops.segment_max`, with the same initial parameters."""
    keys = jax.random.split(jax.random.key(seed))
    state = start_adam([initial_layer(keys[0], 64, HIDDEN_CHANNELS), initial_layer(keys[1], HIDDEN_CHANNELS, 10)])
    ours = Run("jax_baracuda.gather_segment_max", fused_maximum, state)
    return ours, Run("jax.ops.segment_max", maximum_of_messages, state)


def train_side_by_side(runs: Sequence[Run], graph: Graph, steps: int) -> None:
    """Trains all runs, one step each in turn, so that other work on this machine affects their timings equally."""
    for _ in Progress().track(range(steps), steps, lambda _: f"training, loss {(runs[0].losses or [np.nan])[-1]:.4f}"):
        for run in runs:
            run.advance(graph)


def gradient_difference(graph: Graph, run: Run, expected: Run) -> float:
    """Largest difference between the current gradients of two runs, relative to each array's largest entry."""
    differentiate = jax.jit(jax.grad(loss_and_accuracy, has_aux=True), static_argnames="aggregate")
    gradients = (differentiate(parameters_of(x.state), graph, aggregate=x.aggregate)[0] for x in (run, expected))
    differences = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))), *gradients)
    return max(jax.tree.leaves(differences))


def loss_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Largest difference between two loss curves over all of their steps, relative to the initial loss."""
    return float(np.max(np.abs(np.subtract(losses, expected))) / expected[0])


def save_plot(runs_of_dtype: Mapping[str, Sequence[Run]], device: jax.Device, path: Path) -> None:
    """Draws loss and test accuracy in float32 over the steps, and all runs' times per step, as a PNG file."""
    # A Figure of its own, without pyplot, needs no display and leaves the caller's choice of a backend alone.
    from matplotlib.figure import Figure

    # The first run is thin and dashed, on top of the second, so that both of two equal curves are visible.
    styles = [
        {"color": "#b3261e", "linewidth": 1.6, "linestyle": (0, (4, 3)), "zorder": 3},
        {"color": "#9db4d0", "linewidth": 5.0, "zorder": 2},
    ]
    figure = Figure(figsize=(13, 4.4), dpi=150, layout="constrained")
    loss_axes, accuracy_axes, time_axes = figure.subplots(1, 3, width_ratios=(4, 4, 3))
    for run, style in zip(runs_of_dtype["float32"], styles, strict=True):
        loss_axes.plot(run.losses, label=run.function, **style)
        accuracy_axes.plot(100 * np.asarray(run.accuracies), label=f"in the end {run.accuracies[-1]:.1%}", **style)
    for dtype, runs in runs_of_dtype.items():
        for run, style in zip(runs, styles, strict=True):
            label = f"{run.function.rsplit('.', 1)[0]}\n{dtype}"
            bars = time_axes.barh([label], [run.milliseconds()], height=0.5, color=style["color"])
            time_axes.bar_label(bars, fmt="%.2f ms", padding=4)
    loss_axes.set(title="Training loss, float32", xlabel="training step", ylabel="cross-entropy [nats]", yscale="log")
    accuracy_axes.set(
        title="Test accuracy, float32", xlabel="training step", ylabel="correct test nodes [%]", ylim=(0, 102)
    )
    time_axes.set(title="Time per training step", xlabel=f"median on {device.device_kind} [ms]")
    time_axes.margins(x=0.35)
    time_axes.invert_yaxis()
    for axes in (loss_axes, accuracy_axes):
        axes.legend(frameon=False)
        axes.grid(axis="y", color="0.9")
    figure.suptitle(
        f"GraphSAGE with max pooling on a graph of handwritten digits, each joined to its {NEIGHBOURS} nearest"
    )
    figure.savefig(path, format="png")


def report_agreement(quantity: str, relative_to: str, difference: float, tolerance: float) -> bool:
    """Prints how much the two runs differ in a quantity, on stderr if too much; returns whether they agree."""
    agree = difference <= tolerance
    print(
        f"{'agreement' if agree else 'DISAGREEMENT'}: {quantity} differ by at most {difference:.1e} "
        f"(allowed: {tolerance:.0e}),\n           relative to {relative_to}",
        file=sys.stdout if agree else sys.stderr,
    )
    return agree


def train_and_report(runs: tuple[Run, Run], graph: Graph, steps: int) -> bool:
    """Trains our run and the reference, prints how they went, and returns whether they agree."""
    ours, reference = runs
    dtype = graph.features.dtype.name
    # By default, some devices round the factors of float32 matrix products to fewer bits, which would amplify the
    # runs' rounding differences.
    with jax.default_matmul_precision("highest"):
        first_gradient_difference = gradient_difference(graph, ours, reference)
        train_side_by_side(runs, graph, steps)
    print(f"{dtype}:")
    for run in runs:
        print(
            f"{run.function:<31}  loss {run.losses[-1]:.6f}, accuracy {run.accuracies[-1]:.1%}, "
            f"{run.milliseconds():.2f} ms/step"
        )
    ratio = reference.milliseconds() / ours.milliseconds()
    print(f"speed:     {ratio:.2f} times that of {reference.function}, by median step time")
    gradients_agree = report_agreement(
        "first gradients", "each array's largest entry", first_gradient_difference, GRADIENT_TOLERANCE[dtype]
    )
    difference = loss_difference(ours.losses, reference.losses)
    losses_agree = report_agreement("losses of all steps", "the initial loss", difference, LOSS_TOLERANCE[dtype])
    return gradients_agree and losses_agree


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo. Returns 0, or 1 if two runs disagree, or 2 if a package that it needs is missing."""
    parser = parser_of(
        "jax_baracuda demo",
        "Trains a graph network with jax_baracuda.gather_segment_max and with jax.ops.segment_max, in float32 and in "
        "bfloat16, checks that both learn the same, and compares their speed.",
        {0: "both learn the same", 1: "they do not"},
    )
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--output", type=output_file, default=Path("demo.png"), help="PNG file for the plot")
    parser.add_argument(
        "--steps",
        type=integer_from(WARM_UP_STEPS + 1),
        default=200,
        help=f"training steps of each run, of which {WARM_UP_STEPS} warm up",
    )
    parser.add_argument(
        "--seed", type=integer_from(0), default=0, help="seed of the initial parameters and of the labelled nodes"
    )
    options = parser.parse_args(arguments)
    if missing := [name for name in ("sklearn", "matplotlib") if importlib.util.find_spec(name) is None]:
        print(
            f"The demo needs {' and '.join(missing)}: pip install '.[demo]' in a clone of the repository",
            file=sys.stderr,
        )
        return CANNOT_RUN

    print(
        "The demo trains a graph network on images of handwritten digits, in float32\n"
        "and bfloat16, once with jax_baracuda and once with jax.ops, and compares them.\n"
        "It takes less than a minute on two cores."
    )
    device = default_devices()[0]
    graphs = {dtype: load_digits_graph(options.seed, dtype) for dtype in DTYPES}
    graph = graphs["float32"]
    print(f"device:    {device.device_kind}")
    print(
        f"graph:     {len(graph.labels)} nodes, {len(graph.plan.edge_order)} edges; {int(graph.is_train.sum())} "
        "nodes are labelled for training"
    )
    runs_of_dtype = {dtype: start_runs(options.seed) for dtype in DTYPES}
    agree = [train_and_report(runs_of_dtype[dtype], graphs[dtype], options.steps) for dtype in DTYPES]
    save_plot(runs_of_dtype, device, options.output)
    print(
        f"plot:      {options.output}\n"
        "next:      docs/recipes.md shows graph networks, Mamba and language models;\n"
        "           python -m jax_baracuda report says which kernels run on this machine"
    )
    return 0 if all(agree) else 1
