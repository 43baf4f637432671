"""Whole programs with our ops: XLA copies or transposes no operand first, and no more caches than in plain JAX."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases
from support.pages import run_examples

import jax_baracuda as jb
from benchmarks import decoder as decoding
from benchmarks import graph_networks, hybrid_model
from benchmarks.decoder import Decoder
from benchmarks.graph_networks import (
    NUM_RADIAL,
    Model,
    edge_network,
    gat,
    gcn,
    product_of_concatenation,
    sage,
    schnet,
    sum_of_products,
    training_step,
)
from benchmarks.hybrid_model import HybridModel


@pytest.fixture(autouse=True)
def products_in_float32() -> Iterator[None]:
    """GPUs would round products to TF32."""
    with jax.default_matmul_precision("float32"):
        yield


# ----------------------------------------------------------------------------------------------------------------------
# Compiled programs, as XLA prints them.

FREE = ("bitcast", "reshape", "get-tuple-element", "optimization-barrier", "copy-done")
"""Opcodes that pass an array on unchanged."""
MOVING = ("copy", "copy-start", "transpose")
MIN_ELEMENTS = 1024
"""Moves of smaller arrays do not slow a model down. For instance, XLA copies counters that a loop carries."""

INSTRUCTION = re.compile(
    r"\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>\((?:[^()]|\([^()]*\))*\)|\S+) (?P<opcode>[\w\-]+)\((?P<rest>.*)"
)
ATTRIBUTES = re.compile(r"\), \w+=.*")
SHAPE = re.compile(r"\w+\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a computation."""

    name: str
    opcode: str
    elements: int
    """The number of elements of the result, or of the largest result."""
    operands: tuple[str, ...]
    text: str

    def called(self) -> str:
        """The computation of a fusion."""
        match = re.search(r"calls=%([\w.\-]+)", self.text)
        assert match is not None, self.text
        return match[1]


Computation = dict[str, Instruction]


def parsed(text: str) -> dict[str, Computation]:
    """The computations of a module, and the instructions of each."""
    computations: dict[str, Computation] = {}
    for line in text.splitlines():
        if heading := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            computation = computations[heading[1]] = {}
        elif match := INSTRUCTION.match(line):
            elements = max(
                (math.prod(map(int, filter(None, x.split(",")))) for x in SHAPE.findall(match["type"])), default=0
            )
            operands = tuple(re.findall(r"%([\w.\-]+)", ATTRIBUTES.sub("", match["rest"])))
            computation[match["name"]] = Instruction(match["name"], match["opcode"], elements, operands, line.strip())
    return computations


def only_moves(computation: Computation) -> bool:
    """Whether a fusion only changes the layout."""
    opcodes = {instruction.opcode for instruction in computation.values()}
    return bool(opcodes & {*MOVING}) and opcodes <= {*MOVING, *FREE, "parameter", "tuple"}


def moves(computations: dict[str, Computation]) -> Iterator[Instruction]:
    """All instructions that write an array elsewhere or in another layout, and do nothing else."""
    fused = {x.called() for computation in computations.values() for x in computation.values() if x.opcode == "fusion"}
    for name, computation in computations.items():
        if name not in fused:
            yield from (x for x in computation.values() if is_move(x, computations))


def is_move(instruction: Instruction, computations: dict[str, Computation]) -> bool:
    if instruction.opcode == "fusion":
        return only_moves(computations[instruction.called()])
    return instruction.opcode in MOVING


def moved_operands(computations: dict[str, Computation]) -> Iterator[str]:
    """The operands of our ops that XLA copies, or writes in another layout, for our ops alone."""
    for computation in computations.values():
        for call in our_calls(computation):
            for operand in call.operands:
                source = source_of(operand, computation, computations)
                if source.elements >= MIN_ELEMENTS and is_move(source, computations):
                    yield f"{call.text[:200]} takes {source.text}"


def source_of(name: str, computation: Computation, computations: dict[str, Computation]) -> Instruction:
    """The instruction that makes an array. XLA fuses slices of operands with our call; then look outside the fusion."""
    source = computation[name]
    while source.opcode in FREE:
        source = computation[source.operands[0]]
    if source.opcode == "parameter":
        for caller in computations.values():
            for fusion in caller.values():
                if fusion.opcode == "fusion" and computations[fusion.called()] is computation:
                    number = re.search(r"parameter\((\d+)\)", source.text)
                    assert number is not None, source.text
                    return source_of(fusion.operands[int(number[1])], caller, computations)
    return source


def our_calls(computation: Computation) -> list[Instruction]:
    return [x for x in computation.values() if 'custom_call_target="jax_baracuda.' in x.text]


def compiled(program: Callable[..., Any], *operands: Any, donated: Sequence[int] = ()) -> dict[str, Computation]:
    text = jax.jit(lambda *x: program(*x), donate_argnums=donated).lower(*operands).compile().as_text()
    computations = parsed(text)
    assert sum(len(x) for x in computations.values()) > 3, text
    return computations


# ----------------------------------------------------------------------------------------------------------------------
# Programs.


@pytest.fixture(autouse=True)
def only_windows_have_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps only the rules of windows, which concern layouts. Other rules would leave small arrays to XLA."""
    windows = ("write_slice", "write_slice_backward")
    cases.use_rules(monkeypatch, lambda op: op.xla_rules if op.name in windows else ())


DECODERS = {
    layout: Decoder(layout, examples=4, length=64, heads=8, kv_heads=2, features=16, layers=2, steps=3, dtype=dtype)
    for layout, dtype in (("BSHD", "float32"), ("BHSD", "bfloat16"))
}
NODES, EDGES, WIDTH = 500, 4000, 32


def decoding_program(decoder: Decoder, functions: decoding.Functions) -> dict[str, Computation]:
    operands = decoder.make_caches(), decoder.make_weights(), *decoder.make_inputs()
    return compiled(functools.partial(decoder.decode, functions), *operands, donated=[0])


SERVED = HybridModel(
    layers=2, width=32, heads=4, kv_heads=2, features=16, inner=64, inner_features=16, memory=8, vocabulary=50,
    dtype="float32", page_size=8, chunk=8,
)  # fmt: skip
POOLS = SERVED.make_pools(pages=64, state_slots=40)
SERVER_STEPS = ("decode", "prefill")


def server_program(step: str, functions: hybrid_model.Functions) -> dict[str, Computation]:
    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32)

    if step == "decode":
        run, sizes = SERVED.decode, ((4,), (4,), (4, 2), (4,))
    else:
        run, sizes = functools.partial(SERVED.prefill, longest=12), ((24,), (4,), (3, 2), (3,))
    operands = POOLS, SERVED.make_weights(), *(integers(*shape) for shape in sizes)
    return compiled(functools.partial(run, functions), *operands, donated=[0])


def graph_program(model: Model, weights: Sequence[tuple[int, ...]], with_plan: bool) -> dict[str, Computation]:
    rng = np.random.default_rng(0)
    senders, receivers = (jnp.asarray(rng.integers(0, NODES, EDGES), jnp.int32) for _ in range(2))
    ids = {"gather_ids": senders, "segment_ids": receivers}
    edges = {"plan": jb.segment_plan(receivers, NODES, senders, NODES)} if with_plan else ids
    step = training_step(model, graph_networks.Ours(None if with_plan else NODES))
    arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in weights]
    return compiled(step, arrays, jax.ShapeDtypeStruct((NODES, WIDTH), np.float32), edges)


def gradient_program(model: Callable[..., jax.Array], *operands: Any) -> dict[str, Computation]:
    """The program of the value and of the gradient by the first operand."""
    return compiled(jax.value_and_grad(lambda *x: (model(*x) ** 2).sum()), *operands)


def mamba_block(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Projection, convolution along time, a gate, and the projection back; x is ``[example, time, feature]``."""
    u, gate = jnp.split(x @ parameters["in"], 2, axis=-1)
    u = jb.causal_conv1d(u, parameters["weight"], parameters["bias"], activation="silu", channels_last=True)
    return x + (u * jax.nn.silu(gate)) @ parameters["out"]


def mamba_program() -> dict[str, Computation]:
    shapes = {"in": (WIDTH, 4 * WIDTH), "weight": (2 * WIDTH, 4), "bias": (2 * WIDTH,), "out": (2 * WIDTH, WIDTH)}
    parameters = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    return gradient_program(mamba_block, parameters, jax.ShapeDtypeStruct((3, 130, WIDTH), np.float32))


def attention(weights: dict[str, jax.Array], x: jax.Array, layout: str) -> jax.Array:
    """Causal attention with rotated queries and keys; x is ``[example, position, feature]``."""
    axes = "bshd" if layout == "BSHD" else "bhsd"
    q, k, v = (jnp.einsum(f"bsf,fhd->{axes}", x, weights[name]) for name in ("q", "k", "v"))
    q, k = jb.rope_qk(q, k, layout=layout)
    of_keys = axes.replace("s", "t")
    scores = jnp.einsum(f"{axes},{of_keys}->bhst", q, k) * q.shape[-1] ** -0.5
    is_before = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    probabilities = jax.nn.softmax(jb.where(is_before, scores, -jnp.inf))
    return jnp.einsum(f"bhst,{of_keys},hdf->bsf", probabilities, v, weights["o"])


def attention_program(layout: str) -> dict[str, Computation]:
    shapes = {**dict.fromkeys("qkv", (WIDTH, 4, 16)), "o": (4, 16, WIDTH)}
    weights = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    return gradient_program(
        functools.partial(attention, layout=layout), weights, jax.ShapeDtypeStruct((2, 66, WIDTH), np.float32)
    )


SAGE_WEIGHTS, GAT_WEIGHTS = [(2 * WIDTH, WIDTH)] * 2, [(WIDTH, WIDTH), *[(4, WIDTH // 4)] * 2]
PROGRAMS: dict[str, Callable[[], dict[str, Computation]]] = {
    **{
        f"decoding, {layout}": functools.partial(decoding_program, decoder, decoding.Ours())
        for layout, decoder in DECODERS.items()
    },
    **{
        f"{name}, {'plan' if with_plan else 'no plan'}": functools.partial(graph_program, model, weights, with_plan)
        for name, model, weights in (
            ("GraphSAGE-max", functools.partial(sage, "max"), SAGE_WEIGHTS),
            ("GraphSAGE-sum", functools.partial(sage, "sum"), SAGE_WEIGHTS),
            ("GAT", gat, GAT_WEIGHTS),
        )
        for with_plan in (True, False)
    },
    "Mamba block": mamba_program,
    **{f"server, {step}": functools.partial(server_program, step, hybrid_model.Ours()) for step in SERVER_STEPS},
    **{f"attention, {layout}": functools.partial(attention_program, layout) for layout in DECODERS},
}


OWN_MOVES = {f"attention, {layout}": 2 for layout in DECODERS}
"""How many operands a program itself reorders. Products over heads have the order BHSD, and projections have BSHD. With
BSHD, the cotangents of queries and keys are reordered before the gradient of the rotation. With BHSD, queries and keys
are reordered before the rotation."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_operand_is_moved(name: str) -> None:
    computations = PROGRAMS[name]()
    assert any(our_calls(computation) for computation in computations.values())
    moved = list(moved_operands(computations))
    assert len(moved) <= OWN_MOVES.get(name, 0), moved


@pytest.mark.parametrize("layout", DECODERS)
def test_no_cache_is_copied_that_plain_jax_leaves_alone(layout: str) -> None:
    decoder = DECODERS[layout]
    ours, plain = (
        [x.text for x in moves(decoding_program(decoder, functions)) if x.elements == math.prod(decoder.cache_shape())]
        for functions in (decoding.Ours(), decoding.Plain())
    )
    assert len(ours) <= len(plain), ours


@pytest.mark.parametrize("functions", [hybrid_model.Ours(), hybrid_model.Plain()], ids=["ours", "plain JAX"])
@pytest.mark.parametrize("step", SERVER_STEPS)
def test_no_pool_of_a_server_is_copied(step: str, functions: hybrid_model.Functions) -> None:
    """The pools are larger than all other arrays."""
    smallest = min(pool.size for pool in jax.tree.leaves(POOLS))
    assert not [x.text for x in moves(server_program(step, functions)) if x.elements >= smallest]


def test_final_state_leaves_the_signal_in_order() -> None:
    """A state and a channels-last signal order their axes differently. That must not reorder the signal."""

    def prefill(x: jax.Array, weight: jax.Array, taps: jax.Array) -> Any:
        u, gate = jnp.split(x @ weight, 2, axis=-1)
        y, state = jb.causal_conv1d(u, taps, channels_last=True, return_final_state=True, implementation="kernel")
        return y * gate, state

    shapes = (3, 130, WIDTH), (WIDTH, 4 * WIDTH), (2 * WIDTH, 4)
    for computation in compiled(prefill, *(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)).values():
        for instruction in computation.values():
            for shape, layout in re.findall(r"\[([\d,]+)\]\{([\d,]+)", instruction.text):
                if math.prod(map(int, shape.split(","))) >= 3 * 130 * 2 * WIDTH:
                    axes = [int(axis) for axis in layout.split(",")]
                    assert axes == sorted(axes, reverse=True), instruction.text


def test_moves_are_found() -> None:
    """These functions find an operand with reordered axes, alone and in a loop, and an array copied for a write."""
    x = jax.ShapeDtypeStruct((4, 50, 6, 32), np.float32)

    def rotate(x: Any) -> Any:
        return jb.rope(jnp.swapaxes(x, 1, 2), implementation="kernel")

    def rotate_often(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.swapaxes(rotate(x), 1, 2), x)

    def write(x: Any) -> Any:
        return jb.write_slice(x, x[:1], (0, 0, 0, 0), implementation="kernel") + x

    for program in (rotate, rotate_often, write):
        computations = compiled(program, x)
        if program is not rotate_often:  # GPUs carry the array in the other order through the loop
            assert list(moved_operands(computations)), program
        assert any(instruction.elements == math.prod(x.shape) for instruction in moves(computations))


@pytest.mark.parametrize(
    "model",
    [functools.partial(sage, "max"), functools.partial(sage, "sum"), gcn, gat],
    ids=["GraphSAGE-max", "GraphSAGE-sum", "GCN", "GAT"],
)
def test_graph_networks_learn_as_in_plain_jax(rng: np.random.Generator, model: Model) -> None:
    """Loss and gradients of the models in benchmarks agree with plain JAX. The last node has no incoming edges."""
    nodes, edges, width, heads = 40, 300, 12, 3
    graph = {"gather_ids": rng.integers(0, nodes, edges), "segment_ids": rng.integers(0, nodes - 1, edges)}
    shapes = {gat: [(width, width), (heads, 4), (heads, 4)], gcn: [(width, width)] * 2}
    weights = [rng.normal(size=shape).astype(np.float32) for shape in shapes.get(model, [(2 * width, width)] * 2)]
    x = rng.normal(size=(nodes, width)).astype(np.float32)
    features = (x, rng.normal(size=edges).astype(np.float32)) if model is gcn else x
    ours, plain = (
        jax.jit(training_step(model, functions(nodes)))(weights, features, graph)
        for functions in (graph_networks.Ours, graph_networks.Plain)
    )
    for ours_of_it, plain_of_it in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(ours_of_it, plain_of_it, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_plan", [False, True], ids=["ids", "plan of sorted edges"])
def test_edge_networks_learn_as_in_plain_jax(rng: np.random.Generator, with_plan: bool) -> None:
    """Loss and gradients agree with plain JAX, and programs by the recipe write nothing of edges × 3 widths."""
    shapes = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (2 * WIDTH, WIDTH), (WIDTH, WIDTH)] * 2
    weights = [(0.2 * rng.normal(size=shape)).astype(np.float32) for shape in shapes]
    x, e = (rng.normal(size=(size, WIDTH)).astype(np.float32) for size in (NODES, EDGES))
    senders, receivers = rng.integers(0, NODES, (2, EDGES))
    concatenated = functools.partial(edge_network, product_of_concatenation)
    ids = {"gather_ids": senders, "segment_ids": receivers}
    expected = jax.jit(training_step(concatenated, graph_networks.Plain(NODES)))(weights, (x, e), ids)
    step = training_step(concatenated, graph_networks.Ours(NODES))
    operands: tuple[Any, ...] = weights, (x, e), ids
    if with_plan:
        order = np.argsort(receivers)
        plan = jb.segment_plan(receivers[order], NODES, senders[order], NODES)
        step = training_step(functools.partial(edge_network, sum_of_products), graph_networks.OursOfSortedEdges())
        operands = weights, (x, e[order]), {"plan": plan}
        assert f"f32[{EDGES},{3 * WIDTH}]" not in jax.jit(step).lower(*operands).compile().as_text()
    actual = jax.jit(step)(*operands)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("with_plan", [False, True], ids=["ids", "plan"])
def test_force_fields_learn_as_in_plain_jax(rng: np.random.Generator, with_plan: bool) -> None:
    """Energies, forces and the gradients of a loss of both, which take second derivatives of weighted sums."""
    shapes = [(NUM_RADIAL, WIDTH), *[(WIDTH, WIDTH)] * 4] * 2 + [(WIDTH, 1)]
    with jax.enable_x64(True):
        weights = [rng.normal(size=shape) / np.sqrt(max(shape)) for shape in shapes]
        features = rng.normal(size=(NODES, WIDTH)), rng.uniform(0, 10, (NODES, 3))
        senders, receivers = rng.integers(0, NODES, (2, EDGES))
        ids = {"gather_ids": senders, "segment_ids": receivers}
        plan = {"plan": jb.segment_plan(receivers, NODES, senders, NODES)}
        edges = plan if with_plan else ids
        plain, ours = graph_networks.Plain(NODES), graph_networks.Ours(None if with_plan else NODES)
        for function in (schnet, lambda ops, *operands: training_step(schnet, ops)(*operands)):
            expected = jax.jit(functools.partial(function, plain))(weights, features, ids)
            actual = jax.jit(functools.partial(function, ours))(weights, features, edges)
            for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9 * np.abs(want).max())


@pytest.mark.versions
def test_examples_of_the_front_page(capsys: pytest.CaptureFixture[str]) -> None:
    """The example runs, and prints what the page shows."""
    page = Path(__file__).parents[1] / "README.md"
    run_examples(page)
    printed = capsys.readouterr().out
    assert printed and f"```\n{printed}```" in page.read_text()
