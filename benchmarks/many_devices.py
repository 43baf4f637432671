"""Scaling over the devices of this host: programs whose operands are split, beside plain JAX.

Weak scaling is the time of one share on one device, divided by the time of one share per device on all devices: 1 if
nothing is lost. Strong scaling is the time of all shares on one device, divided by their time on all devices: the
number of devices if nothing is lost.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_baracuda as jb
from benchmarks import graph_networks
from benchmarks.harness import (
    Effort,
    JaxContender,
    environment,
    largest_disagreement,
    sample,
    summary_of,
    with_gradient,
)
from benchmarks.record import OURS, XLA, milliseconds_text
from jax_baracuda._examples import causal_conv1d, rope
from jax_baracuda._examples import segment as plain_segment
from jax_baracuda._tools.command_line import output_file, parser_of, run
from jax_baracuda._tools.platforms import default_devices, require_kernels
from jax_baracuda._tools.progress import Progress

AXIS = "x"
ALL_REDUCE = "all-reduce"
FULL, QUICK = Effort(seconds_per_sample=0.05, seconds_per_contender=0.5), Effort(1, 0.001, 0.01)
TOLERANCE, TOLERANCE_OF_16_BITS = 2e-3, 2e-2
"""Largest sum of absolute differences, relative to the sum of magnitudes: for sums in different orders and products in
TF32, and for programs where plain JAX rounds intermediate results to 16 bits."""

Array = jax.Array
Split = tuple[P, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A computation whose operands grow with the number of shares."""

    name: str
    split: str
    """The name of the dimensions that are split over devices."""
    sizes: Mapping[str, int]
    """The sizes of a share's dimensions."""
    make: Callable[..., Sequence[Array]]
    """``(number of shares, **sizes)`` -> the operands."""
    specs: Split
    """The partition specs of the operands."""
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    result: P | None = None
    """The partition spec of the result. None leaves it to XLA."""
    tolerance: float = TOLERANCE
    reduced: tuple[int, ...] = ()
    """The shape of the float32 array to all-reduce, for programs that need no other exchange."""


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def ids(seed: int, count: int, size: int) -> Array:
    return jax.random.randint(jax.random.key(seed), (count,), 0, size)


def rows_of_segments(shares: int, *, rows: int, width: int, segments: int) -> Sequence[Array]:
    return normal(0, rows * shares, width), ids(1, rows * shares, segments), normal(2, segments, width)


def segment_programs(scale: int) -> Iterator[Program]:
    sizes = {"rows": 16_777_216 // scale, "width": 32, "segments": 1_179_648 // scale}
    split_rows, cells = (P(AXIS), P(AXIS), P()), (sizes["segments"], sizes["width"])
    reductions = {
        "segment_max": (jb.segment_max, jax.ops.segment_max),
        "segment_sum": (jb.segment_sum, jax.ops.segment_sum),
    }
    for name, functions in reductions.items():
        ours, plain = (functools.partial(f, num_segments=sizes["segments"]) for f in functions)
        yield Program(
            name, "rows", sizes, rows_of_segments, split_rows, ours=_drop(ours), plain=_drop(plain), reduced=cells
        )
        yield Program(
            f"{name}, gradient",
            "rows",
            sizes,
            rows_of_segments,
            split_rows,
            ours=with_gradient(ours),
            plain=with_gradient(plain),
            reduced=cells,
        )
        yield Program(
            name,
            "rows and segments",
            sizes,
            rows_of_segments,
            (P(AXIS), P(AXIS), P(AXIS)),
            ours=_drop(ours),
            plain=_drop(plain),
            result=P(AXIS),
        )
    softmax_sizes = sizes | {"rows": 8_388_608 // scale, "width": 4}
    yield Program(
        "segment_softmax",
        "rows",
        softmax_sizes,
        rows_of_segments,
        split_rows,
        ours=_drop(functools.partial(jb.segment_softmax, num_segments=sizes["segments"])),
        plain=_drop(functools.partial(plain_segment.softmax, num_segments=sizes["segments"])),
        reduced=(softmax_sizes["segments"], softmax_sizes["width"]),
    )


def _drop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Drops the last operand, the cotangent, which the value does not need."""
    return lambda *operands: function(*operands[:-1])


def edges_of_graph(shares: int, *, nodes: int, width: int, edges: int) -> Sequence[Array]:
    return (
        normal(0, nodes, width),
        ids(1, edges * shares, nodes),
        ids(2, edges * shares, nodes),
        normal(3, nodes, width),
    )


def graph_programs(scale: int) -> Iterator[Program]:
    sizes = {"nodes": 169_984 // scale, "width": 128, "edges": 1_166_336 // scale}
    nodes = sizes["nodes"]

    def ours(data: Array, senders: Array, receivers: Array) -> Array:
        return jb.gather_segment_sum(data, senders, receivers, nodes)

    def plain(data: Array, senders: Array, receivers: Array) -> Array:
        return plain_segment.gathered_sum(data, gather_ids=senders, segment_ids=receivers, num_segments=nodes)

    programs = {"ours": with_gradient(ours), "plain": with_gradient(plain)}
    split_edges = P(AXIS), P(AXIS)
    yield Program("gather_segment_sum, gradient", "edges", sizes, edges_of_graph, (P(), *split_edges, P()), **programs)
    yield Program(
        "gather_segment_sum, gradient",
        "edges and nodes",
        sizes,
        edges_of_graph,
        (P(AXIS), *split_edges, P(AXIS)),
        **programs,
        result=P(AXIS),
    )
    weights = [normal(4 + i, 2 * sizes["width"], sizes["width"]) / 16 for i in range(3)]

    def step(ops: Any) -> Callable[..., Any]:
        training_step = graph_networks.training_step(functools.partial(graph_networks.sage, "sum"), ops)
        return lambda data, senders, receivers, _: training_step(
            weights, data, {"gather_ids": senders, "segment_ids": receivers}
        )

    yield Program(
        "training step of GraphSAGE, 3 layers",
        "edges",
        sizes,
        edges_of_graph,
        (P(), *split_edges, P()),
        ours=step(graph_networks.Ours(nodes)),
        plain=step(graph_networks.Plain(nodes)),
    )


def sequences(shares: int, *, examples: int, time: int, channels: int, split_time: bool = False) -> Sequence[Array]:
    shape = (examples, time * shares, channels) if split_time else (examples * shares, time, channels)
    x, cotangent = (normal(seed, *shape, dtype=jnp.bfloat16) for seed in (0, 1))
    return x, normal(2, channels, 4, dtype=jnp.bfloat16), normal(3, channels, dtype=jnp.bfloat16), cotangent


def sequence_programs(scale: int) -> Iterator[Program]:
    sizes = {"examples": 4, "time": 8192 // scale, "channels": 4096}
    options: dict[str, Any] = {"activation": "silu", "channels_last": True}
    convolutions = {
        "ours": with_gradient(functools.partial(jb.causal_conv1d, **options)),
        "plain": with_gradient(functools.partial(causal_conv1d.causal_conv1d, **options)),
    }
    of_examples, of_time = P(AXIS), P(None, AXIS)
    rounded: dict[str, Any] = {"tolerance": TOLERANCE_OF_16_BITS}
    split_time = functools.partial(sequences, split_time=True)
    name = "causal_conv1d, gradient"
    yield Program(name, "examples", sizes, sequences, (of_examples, P(), P(), of_examples), **convolutions, **rounded)
    yield Program(name, "time", sizes, split_time, (of_time, P(), P(), of_time), **convolutions, **rounded)
    width = sizes["channels"] // 4
    into, out = normal(5, width, 2 * sizes["channels"]) / 32, normal(6, sizes["channels"], width) / 64

    def block(convolve: Callable[..., Array]) -> Callable[..., Any]:
        """The projections, the convolution and the gate of a Mamba block."""

        def forward(x: Array, weight: Array, bias: Array) -> Array:
            inner, gate = jnp.split(x[..., :width] @ into.astype(x.dtype), 2, axis=-1)
            return (convolve(inner, weight, bias, **options) * jax.nn.silu(gate)) @ out.astype(x.dtype)

        return lambda x, weight, bias, _: jax.value_and_grad(
            lambda x: jnp.mean(forward(x, weight, bias).astype(jnp.float32) ** 2)
        )(x)

    yield Program(
        "Mamba block without its scan, gradient",
        "time",
        sizes,
        split_time,
        (of_time, P(), P(), of_time),
        ours=block(jb.causal_conv1d),
        plain=block(causal_conv1d.causal_conv1d),
        **rounded,
    )
    heads = {"examples": 4, "heads": 32, "time": 8192 // scale, "features": 128}
    yield Program(
        "rope",
        "sequence",
        heads,
        lambda shares, *, examples, heads, time, features: [
            normal(0, examples, heads, time * shares, features, dtype=jnp.bfloat16)
        ],
        (P(None, None, AXIS),),
        ours=lambda x: jb.rope(x, interleaved=False, layout="BHSD"),
        plain=lambda x: rope.rope(x, interleaved=False, layout="BHSD"),
        **rounded,
    )


STEPS = 64


def append(write: Callable[..., Array], cache: Array, rows: Array) -> Array:
    """Writes one row per head at consecutive positions."""
    return jax.lax.fori_loop(0, STEPS, lambda step, cache: write(cache, rows[step], (0, step, 0, 0)), cache)


def decoding_programs(scale: int) -> Iterator[Program]:
    sizes = {"examples": 16, "length": 4096 // scale, "heads": 8, "features": 128}

    def caches(
        shares: int, *, examples: int, length: int, heads: int, features: int, split: str = "heads"
    ) -> Sequence[Array]:
        length, heads = (length * shares, heads) if split == "sequence" else (length, heads * shares)
        rows = normal(0, STEPS, examples, 1, heads, features, dtype=jnp.bfloat16)
        return normal(1, examples, length, heads, features, dtype=jnp.bfloat16), rows

    functions = {
        "ours": functools.partial(append, jb.write_slice),
        "plain": functools.partial(append, jax.lax.dynamic_update_slice),
    }
    name = f"{STEPS} appends to a cache"
    yield Program(name, "heads", sizes, caches, (P(None, None, AXIS), P(None, None, None, AXIS)), **functions)
    by_sequence = functools.partial(caches, split="sequence")
    yield Program(name, "sequence", sizes, by_sequence, (P(None, AXIS), P()), **functions)


FAMILIES = (segment_programs, graph_programs, sequence_programs, decoding_programs)


@dataclasses.dataclass
class Scaling:
    """The milliseconds of a program, with this package and in plain JAX, on one device and on all devices."""

    program: str
    split: str
    milliseconds: dict[str, dict[str, float]]
    """By library: "share" and "all" on one device, "split" on all devices. Also "split" of an all-reduce alone."""
    failure: str | None = None

    def weak(self, library: str) -> float:
        return self.milliseconds[library]["share"] / self.milliseconds[library]["split"]

    def strong(self, library: str) -> float:
        return self.milliseconds[library]["all"] / self.milliseconds[library]["split"]

    def describe(self) -> str:
        if self.failure is not None:
            return f"{self.program}, {self.split} split\n    failed: {self.failure}"
        of_each = (
            f"{library} {milliseconds_text(times['split'])} ms (weak {self.weak(library):.2f}, "
            f"strong {self.strong(library):.2f})"
            for library, times in self.milliseconds.items()
            if library != ALL_REDUCE
        )
        lines = [f"{self.program}, {self.split} split", "   ".join(of_each)]
        if ALL_REDUCE in self.milliseconds:
            alone = self.milliseconds[ALL_REDUCE]["split"]
            over_parts = self.milliseconds[OURS]["split"] / (self.milliseconds[OURS]["share"] + alone)
            lines.append(f"all-reduce alone {milliseconds_text(alone)} ms: {over_parts:.2f} of a share and it")
        return "\n    ".join(lines)


def measure(program: Program, num_devices: int, effort: Effort) -> Scaling:
    """Compares the results of all contenders, then times the contenders in turns."""
    mesh = jax.make_mesh((num_devices,), (AXIS,), (AxisType.Auto,))
    share, everything = (program.make(shares, **program.sizes) for shares in (1, num_devices))
    shardings = [NamedSharding(mesh, spec) for spec in program.specs]
    split = [jax.device_put(x, sharding) for x, sharding in zip(everything, shardings, strict=True)]

    def constrained(function: Callable[..., Any]) -> Callable[..., Any]:
        if program.result is None:
            return function
        sharding = NamedSharding(mesh, program.result)
        return lambda *operands: jax.lax.with_sharding_constraint(function(*operands), sharding)

    contenders = {
        (library, what): JaxContender(library, what, constrained(function) if what == "split" else function, *operands)
        for library, function in ((OURS, program.ours), (XLA, program.plain))
        for what, operands in (("share", share), ("all", everything), ("split", split))
    }
    if program.reduced:
        add = jax.shard_map(lambda x: jax.lax.psum(x, AXIS), mesh=mesh, in_specs=P(AXIS), out_specs=P())
        parts = jax.device_put(normal(9, num_devices, *program.reduced), NamedSharding(mesh, P(AXIS)))
        contenders[ALL_REDUCE, "split"] = JaxContender(ALL_REDUCE, "split", add, parts)
    for contender in contenders.values():
        contender.prepare()
    expected = contenders[XLA, "all"].first_call()
    for (library, what), contender in contenders.items():
        results = contender.first_call()
        if what != "share" and library != ALL_REDUCE:
            disagreement = largest_disagreement(expected, jax.device_put(results, jax.devices()[0]))
            if disagreement > program.tolerance:
                raise ValueError(f"{library} {what} differs from plain JAX on one device by {disagreement:.2g}")
    del expected, results
    samples = sample(list(contenders.values()), [0.0] * len(contenders), effort)
    milliseconds: dict[str, dict[str, float]] = {library: {} for library, _ in contenders}
    for (library, what), of_contender in zip(contenders, samples, strict=True):
        milliseconds[library][what] = statistics.median(of_contender) * 1e3
    return Scaling(program.name, program.split, milliseconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    statuses = {0: "all programs were measured", 1: "a program failed, or its results differ"}
    parser = parser_of("benchmarks.many_devices", __doc__, statuses)
    parser.add_argument("--output", type=output_file, help="the JSON record")
    parser.add_argument("--only", nargs="+", default=[], help="run programs whose name has one of these texts")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    options = parser.parse_args(arguments)
    num_devices = len(default_devices())
    if num_devices < 2:
        parser.error("there is only one device; on CPUs, XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two")
    require_kernels(default_devices()[0])
    scale = 128 if options.quick else 1 if jax.default_backend() == "gpu" else 64
    programs = [
        program
        for family in FAMILIES
        for program in family(scale)
        if not options.only or any(text in program.name for text in options.only)
    ]
    if not programs:
        parser.error(f"no program has a name with {' or '.join(options.only)}")
    progress = Progress()
    progress.print(f"{len(programs)} programs on {num_devices} × {jax.devices()[0].device_kind}")
    scalings = []
    for program in progress.track(programs, len(programs), lambda program: program.name):
        try:
            scalings.append(measure(program, num_devices, QUICK if options.quick else FULL))
        except Exception as error:  # One failing program must not end the run.
            scalings.append(Scaling(program.name, program.split, {}, summary_of(error)))
        progress.print(scalings[-1].describe())
        if options.output is not None:
            record = {"environment": environment(), "devices": num_devices, "is_quick": options.quick}
            content = {**record, "programs": [dataclasses.asdict(scaling) for scaling in scalings]}
            options.output.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(scaling.failure is not None for scaling in scalings))


if __name__ == "__main__":
    run(main)
