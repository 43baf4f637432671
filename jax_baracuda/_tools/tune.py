"""``python -m jax_baracuda tune``: kernels against plain JAX on the devices here, as a table of what to pick."""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_baracuda._core.autodiff import both_modes
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.guarantees import Guarantee
from jax_baracuda._core.rules import reference_of_call
from jax_baracuda._core.selection import (
    Implementation,
    Interval,
    Row,
    TuningTable,
    device_name,
    forbids_xla,
    packaged_table,
)
from jax_baracuda._examples.example import value_and_gradient
from jax_baracuda._tools import grid
from jax_baracuda._tools.calls import calls_and_operands, equations_of
from jax_baracuda._tools.command_line import (
    CANNOT_RUN,
    INTERRUPTED,
    missing_packages,
    output_file,
    parser_of,
    whole_number,
)
from jax_baracuda._tools.platforms import devices_by_platform, require_kernels
from jax_baracuda._tools.progress import Progress
from jax_baracuda._tools.timing import Arrays, Loop, Step, compiled_in_batches, num_steps, on_device, race

MAX_RATIO_FOR_XLA = 0.95
"""Closer ones are noise, and a kernel needs no more memory than its results."""
MAX_MEAN_OF_A_ROW, MAX_RATIO_AMONG_XLA = 0.9, 1.1
"""Of the calls that a row picks plain JAX for: their geometric mean, and what nine tenths of them keep below."""
MIN_CALLS_OF_A_ROW = 8
MAX_ROWS_OF_AN_OP = 6
MIN_WEIGHT, MAX_WEIGHT = 0.01, 2.0
"""Of a call in the search for rows: the logarithm of its ratio, within these."""


class Measurement(NamedTuple):
    """A call of an op, and the time of plain JAX divided by that of the kernel."""

    call: OpCall
    ratio: float
    fuses: bool = False
    """Whether it was timed between elementwise operations, which XLA fuses with plain JAX."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the table of what was timed, also if that was interrupted; returns the exit status."""
    parser = parser_of("jax_baracuda tune", __doc__, {0: "all calls were timed, or those that --seconds allow"})
    parser.add_argument(
        "--output", type=output_file, default=Path("tuning.json"), help="the file (default: tuning.json)"
    )
    parser.add_argument(
        "--cases", type=whole_number(1), default=400, help="sampled calls of public functions (default: 400)"
    )
    parser.add_argument(
        "--repeats", type=whole_number(1), default=5, help="timed loops of each call, after one to warm up (default: 5)"
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of the sample")
    grid.add_functions_option(parser, "public functions whose ops are timed (default: all)")
    parser.add_argument(
        "--seconds", type=whole_number(1), help="stop after so many on each platform, with what was timed by then"
    )
    options = parser.parse_args(arguments)
    if problem := missing_packages("tune", ("sklearn",), "bench"):
        print(problem, file=sys.stderr)
        return CANNOT_RUN

    table = packaged_table()
    progress = Progress()
    is_interrupted = False
    for platform, device in devices_by_platform().items():
        require_kernels(device)
        measurements: list[Measurement] = []
        cases = list(grid.sample(platform, options.cases, options.seed, options.functions))
        progress.print(f"{platform}: {device.device_kind}")
        compiled = functools.partial(compiled_case, platform, device)
        coming = compiled_in_batches(compiled, cases, options.seconds, progress.print)
        num_timed = 0
        try:
            for case, compiled_or_error in progress.track(coming, len(cases), lambda item: item[0].example.name):
                measurements += timed(case, compiled_or_error(), platform, device, options.repeats)
                num_timed += 1
        except KeyboardInterrupt:
            is_interrupted = True
        print(f"{platform}: {len(measurements)} loops of {num_timed} of {len(cases)} calls were timed")
        table = updated(table, measurements, platform, device)
        table.write(options.output)
        if is_interrupted:
            break
    print(f"{options.output}: {len(table.rows)} rows. Use it by jax_baracuda.implementation(table=...).")
    return INTERRUPTED if is_interrupted else 0


class CompiledCall(NamedTuple):
    """A call of an op, in loops that are ready to be timed."""

    call: OpCall
    position: int
    """Among all calls of ops in the example's program."""
    loops: dict[bool, list[Loop]]
    """The kernel's and plain JAX's, by whether the call stands between elementwise operations in them."""


class CompiledCase(NamedTuple):
    """The different ops that an example and its gradient call, where there is a choice."""

    types: tuple[Any, Any]
    """Of operands and cotangents of the example."""
    operands_of_calls: Callable[..., list[list[jax.Array]]]
    """The example's program, from the leaves of operands and cotangents to the operands of each call in it."""
    calls: list[CompiledCall]


def compiled_case(platform: str, device: jax.Device, case: grid.Case) -> CompiledCase:
    call_of_function, names = case.example.call(platform), case.example.differentiated(case.dtype)

    def forward_and_gradient(operands: Any, cotangents: Any) -> Any:
        with both_modes():
            value = call_of_function(**operands)
        return value, value_and_gradient(call_of_function, names)(operands, cotangents) if names else ()

    types = types_of(case, platform, device)
    calls, operands_of_calls = calls_and_operands(forward_and_gradient, *types)
    by_op = {call.op.name: (call, position) for position, call in enumerate(calls) if has_choice(call, platform)}
    compiled = []
    for call, position in by_op.values():
        steps = num_steps(call.sizes()["bytes"], platform, case.contended_seconds)
        loops = {
            fuses: [loop_of(call, fuses, implementation, steps, device) for implementation in ("kernel", "xla")]
            for fuses in ((False, True) if has_neighbours(call) else (False,))
        }
        compiled.append(CompiledCall(call, position, loops))
    return CompiledCase(types, operands_of_calls, compiled)


def timed(
    case: grid.Case, compiled: CompiledCase, platform: str, device: jax.Device, repeats: int
) -> Iterator[Measurement]:
    arrays = compiled.operands_of_calls(*jax.tree.leaves(operands_of(case, compiled.types, platform, device)))
    for call, position, loops_by_fuses in compiled.calls:
        operands = arrays[position]
        for fuses, loops in loops_by_fuses.items():
            (kernel, xla), operands = race(loops, operands, repeats)
            yield Measurement(call, xla / kernel, fuses)


def types_of(case: grid.Case, platform: str, device: jax.Device) -> tuple[Any, Any]:
    """Of the operands of an example's call, and of cotangents of its results."""
    operands = case.example.operand_types(case.dtype, platform)
    cotangents = jax.eval_shape(case.example.call(platform), **operands)
    return jax.tree.map(functools.partial(on_device, device), (operands, cotangents))


def operands_of(case: grid.Case, types: tuple[Any, Any], platform: str, device: jax.Device) -> tuple[Any, Any]:
    """Operands and cotangents of these types, made by the host: nothing is compiled for them."""
    operands = case.example.make_operands(np.random.default_rng(0), case.dtype, platform)
    cotangents = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), types[1])
    return jax.device_put((operands, cotangents), device)


def has_choice(call: OpCall, platform: str) -> bool:
    """Whether there is a kernel, and plain JAX keeps what the op promises of memory and of its results' bits."""
    writes_messages = call.op.name.startswith("gather_") and platform == "cpu"  # edges times features; GPUs fuse them
    if call.unsupported_reason(platform) is not None or writes_messages or forbids_xla(call, platform):
        return False
    return platform == "cpu" or not promises_bits(call, platform) or not adds_by_scatter(call)


def promises_bits(call: OpCall, platform: str) -> bool:
    guarantee = call.op.guarantee
    if isinstance(guarantee, Guarantee):
        return guarantee.deterministic
    options = {name: call.params.get(name, False) for name in ("deterministic", "indices_are_sorted")}
    return guarantee(call.dtype.name, platform, **options).deterministic


def adds_by_scatter(call: OpCall) -> bool:
    """Whether plain JAX adds up or multiplies floating numbers in an order that varies from run to run on GPUs."""
    program = jax.make_jaxpr(functools.partial(reference_of_call, call.op, **call.all_params))(*call.operands)
    return any(
        equation.primitive.name.replace("_", "-") in ("scatter-add", "scatter-mul")
        and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.inexact)
        for equation in equations_of(program)
    )


def has_neighbours(call: OpCall) -> bool:
    """Whether elementwise operations can stand before and after: what a step writes in place is the next one's."""
    return 0 not in call.resolve(call.op.in_place) and jnp.issubdtype(call.dtype, jnp.inexact)


def loop_of(call: OpCall, fuses: bool, implementation: Implementation, steps: int, device: jax.Device) -> Loop:
    return Loop(step_of(call, fuses, implementation), call.operands, steps, device)


def step_of(call: OpCall, fuses: bool, implementation: Implementation) -> Step:
    """A call, in place where the op is: what a step writes, the next one takes."""
    written = dict(call.resolve(call.op.in_place))

    def step(operands: Arrays) -> tuple[Arrays, Arrays]:
        own = [sine_of(operands[0]), *operands[1:]] if fuses else operands
        results = call.op.primitive.bind(*own, **{**call.all_params, "implementation": implementation})
        if fuses:
            results = [sine_of(x) for x in results]
        next_operands = [results[written[i]] if i in written else x for i, x in enumerate(operands)]
        return next_operands, [x for i, x in enumerate(results) if i not in written.values()]

    return step


def sine_of(x: jax.Array) -> jax.Array:
    """Of floating numbers: an operation that XLA fuses, and does not simplify."""
    return jnp.sin(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def updated(table: TuningTable, measurements: Sequence[Measurement], platform: str, device: jax.Device) -> TuningTable:
    """The table with these measurements in place of older ones of the same ops on the device.

    What a row of all GPUs decides stays so: it knows more than the time of a call.
    """
    name = device_name(platform)
    measured = f"{f'{os.cpu_count()} cores' if platform == 'cpu' else device.device_kind}, jax {jax.__version__}"
    decided = {row.op for row in table.rows if row.device == platform != name}
    by_op: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        if measurement.call.op.name not in decided:
            by_op.setdefault(measurement.call.op.name, []).append(measurement)
    rows = [row for row in table.rows if not (row.device == name and row.op in by_op)]
    for op, of_op in sorted(by_op.items()):
        for fuses in (False, True):
            for box in boxes_for_xla([m for m in of_op if m.fuses == fuses]):
                ratio = round(box.ratio, 2)
                rows.append(Row(name, op, "xla", ratio, measured, box.dtypes, box.options, box.sizes, fuses))
    return TuningTable(tuple(rows))


class Box(NamedTuple):
    """Where plain JAX is faster."""

    dtypes: tuple[str, ...]
    """Empty: any."""
    options: tuple[tuple[str, bool], ...]
    sizes: tuple[tuple[str, Interval], ...]
    ratio: float
    """The geometric mean there."""


def boxes_for_xla(measurements: Sequence[Measurement]) -> Iterator[Box]:
    """The leaves of a decision tree that asks for dtypes, options and sizes, in which plain JAX is faster."""
    from sklearn.tree import DecisionTreeClassifier

    if len(measurements) < MIN_CALLS_OF_A_ROW:
        return
    flags, sizes = features_of(measurements)
    dtypes = sorted({m.call.dtype.name for m in measurements})
    names = [*dtypes, *flags, *sizes]
    ratios = np.array([m.ratio for m in measurements])
    is_xla = ratios < MAX_RATIO_FOR_XLA
    if not is_xla.any():
        return
    features = np.array([features_of_call(m.call, dtypes, flags, sizes) for m in measurements])
    tree = DecisionTreeClassifier(max_leaf_nodes=MAX_ROWS_OF_AN_OP, min_samples_leaf=MIN_CALLS_OF_A_ROW, random_state=0)
    tree.fit(features, is_xla, sample_weight=np.clip(np.abs(np.log(ratios)), MIN_WEIGHT, MAX_WEIGHT))
    leaves = tree.apply(features)
    for leaf, bounds in leaves_of(tree.tree_, names):
        of_leaf = ratios[leaves == leaf]
        mean = statistics.geometric_mean(of_leaf)
        if mean < MAX_MEAN_OF_A_ROW and np.quantile(of_leaf, 0.9) <= MAX_RATIO_AMONG_XLA:
            # Larger calls than those that were timed are the kernel's, which is made for them.
            most = max(m.call.sizes()["bytes"] for m, of in zip(measurements, leaves, strict=True) if of == leaf)
            low, high = bounds.get("bytes", (None, None))
            bounds |= {"bytes": (low, most if high is None else min(most, high))}
            is_set = {name: low is not None for name, (low, _) in bounds.items() if name in (*dtypes, *flags)}
            options = _promised_flags(measurements) | {name: is_set[name] for name in flags if name in is_set}
            intervals = tuple((name, interval) for name, interval in bounds.items() if name not in is_set)
            yield Box(dtypes_of_leaf(dtypes, is_set), tuple(options.items()), intervals, mean)


def dtypes_of_leaf(dtypes: Sequence[str], is_set: Mapping[str, bool]) -> tuple[str, ...]:
    """The one that a leaf is of, or all but those that it is not of; empty if it asks for none."""
    one = [name for name in dtypes if is_set.get(name)]
    others = [name for name in dtypes if name not in is_set]
    return tuple(one or (others if len(others) < len(dtypes) else ()))


def features_of_call(call: OpCall, dtypes: Sequence[str], flags: Sequence[str], sizes: Sequence[str]) -> list[float]:
    of_call = call.sizes()
    return [
        *(float(call.dtype.name == name) for name in dtypes),
        *(float(call.params[name]) for name in flags),
        *(math.log2(max(of_call[name], 1)) for name in sizes),
    ]


def _promised_flags(measurements: Sequence[Measurement]) -> dict[str, bool]:
    """Options that all timed calls have in common, as others promise bits that plain JAX does not."""
    params = [m.call.params for m in measurements]
    return {
        name: params[0][name]
        for name in ("deterministic", "indices_are_sorted")
        if all(name in of_call and of_call[name] == params[0][name] for of_call in params)
    }


def features_of(measurements: Sequence[Measurement]) -> tuple[list[str], list[str]]:
    """The flags and the sizes that all calls have, and in which some differ."""
    params = [m.call.params for m in measurements]
    sizes = [m.call.sizes() for m in measurements]
    flags = [name for name, value in params[0].items() if isinstance(value, bool)]

    def differing(names: Sequence[str], calls: Sequence[Mapping[str, Any]]) -> list[str]:
        of_all = [name for name in names if all(name in call for call in calls)]
        return [name for name in of_all if len({call[name] for call in calls}) > 1]

    return differing(flags, params), differing(list(sizes[0]), sizes)


def leaves_of(tree: Any, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Interval]]]:
    """The leaves of a tree that asks for logarithms, and the intervals of the features in each."""

    def below(node: int, bounds: dict[str, Interval]) -> Iterator[tuple[int, dict[str, Interval]]]:
        left, right = tree.children_left[node], tree.children_right[node]
        if left == right:
            yield node, bounds
            return
        name = names[tree.feature[node]]
        greatest = int(2 ** tree.threshold[node])
        low, high = bounds.get(name, (None, None))
        yield from below(left, bounds | {name: (low, greatest)})
        yield from below(right, bounds | {name: (greatest + 1, high)})

    yield from below(0, {})
