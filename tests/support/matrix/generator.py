"""Cases of the matrix: the constraints that exclude some, and a small set that covers every pair of values."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from support.matrix.calls import CALLS, Call, Constraint, is_inexact, load_all

TRANSFORMATIONS = (
    "eager",
    "jit",
    "donated",
    "scan",
    "loop",
    "export",
    "vjp",
    "vjp of vmap",
    "checkpoint",
    "grad of grad",
    "jacrev",
    "jvp",
    "linearize",
    "jvp of grad",
    "hessian",
    "grad of jvp",
    "export of vjp",
)
"""Each is applied to one element of the batch, then mapped over the batch; "vjp of vmap" in the opposite order. "scan"
scans over the outer batch instead of vmap. All except "eager" run under jit."""

DERIVATIVES = TRANSFORMATIONS[TRANSFORMATIONS.index("vjp") :]
SECOND_DERIVATIVES = ("grad of grad", "jvp of grad", "hessian", "grad of jvp")
FORWARD = ("jvp", "linearize", "grad of jvp")
"""These apply forward mode first, so they need the function's twin in ``forward_mode``."""
JACOBIANS = ("jacrev", "hessian")
EXPORTS = ("export", "export of vjp")
"""With ``jax.export``, for CPUs and GPUs in one program; half of them have some symbolic sizes."""

SHARDINGS = ("single", "auto", "explicit", "shard_map", "shard_map, check_vma=False", "partly manual")
SHARD_MAPS = SHARDINGS[3:]

FACTORS = ("dtype", "size", "transformation", "batch", "sharding", "implementation")

IMPLEMENTATIONS = ("kernel", "xla", "rules")
"""The kernel wherever there is one; plain JAX; what the rules of the ops pick, which may mix both in a program."""

Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination of values. Its seed determines everything else that is random."""

    op: str
    dtype: str
    size: str
    transformation: str
    batch: str
    """"none", "one:<operand>", "all", or "nested": two levels that each map random operands."""
    sharding: str
    implementation: str
    options: tuple[tuple[str, Any], ...]
    """The options that differ from the bare call."""
    seed: int

    def call(self) -> Call:
        return load_all()[self.op]

    def all_options(self) -> dict[str, Any]:
        return {name: values[0] for name, values in self.call().options.items()} | dict(self.options)

    def sizes(self) -> Mapping[str, Any]:
        return all_sizes(self.call())[self.size]

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FACTORS} | self.all_options()

    def recipe(self) -> str:
        return (
            "from support.matrix.generator import Case\nfrom support.matrix.run import check\n"
            f"check({self!r})  # PYTHONPATH=tests, {len(jax.devices())} {jax.devices()[0].platform} devices"
        )


def all_sizes(call: Call) -> dict[str, Mapping[str, Any]]:
    return {**call.sizes, **call.large_sizes}


def is_empty(sizes: Mapping[str, Any]) -> bool:
    """Whether an array has no element."""
    return any(0 in x if isinstance(x, tuple) else x == 0 for x in sizes.values())


def is_large(sizes: Mapping[str, Any]) -> bool:
    """Whether a Jacobian would take long."""
    flat = itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in sizes.values())
    return math.prod(max(x, 1) for x in flat) > 1500


ABSENT_OPERAND = (None, "pair", "integer", "negative")

CONSTRAINTS = (
    Constraint(
        "only floating and complex numbers have derivatives",
        lambda transformation, dtype: transformation in DERIVATIVES and not is_inexact(dtype),
    ),
    Constraint(
        "JAX's own arithmetic lacks 8-bit numbers, and Jacobians of complex ones",
        lambda transformation, dtype: (
            transformation in DERIVATIVES
            and (dtype.startswith("float8") or dtype.startswith("complex") and transformation in JACOBIANS)
        ),
    ),
    Constraint(
        "there is no batch to map inside the derivative, or to scan",
        lambda transformation, batch: transformation in ("vjp of vmap", "scan") and batch == "none",
    ),
    Constraint(
        "XLA's CPU back end aborts on 16-bit sums over devices in partly manual programs",
        lambda transformation, dtype, sharding: (
            sharding == "partly manual"
            and dtype in ("float16", "bfloat16")
            and transformation in DERIVATIVES
            and jax.default_backend() == "cpu"
        ),
    ),
    Constraint(
        "XLA's GPU back end takes no rows of 4-bit numbers out of an array that end within a byte",
        lambda transformation, dtype: transformation == "scan" and dtype == "int4" and jax.default_backend() == "gpu",
    ),
    Constraint(
        "what JAX's partitioner splits cannot be exported",
        lambda transformation, sharding: transformation in EXPORTS and sharding != "single",
    ),
    Constraint(
        "outside of jit, shard_map is interpreted by JAX, one operation after the other, each of them under jit",
        lambda transformation, sharding: transformation == "eager" and sharding in SHARD_MAPS,
    ),
)


@functools.cache
def constraints_of(op: str) -> tuple[Constraint, ...]:
    call = load_all()[op]
    sizes = all_sizes(call)
    jacobians = Constraint(
        "Jacobians of large arrays",
        lambda transformation, size: transformation in JACOBIANS and is_large(sizes[size]),
    )
    presence = tuple(
        Constraint(
            f"{name} is absent",
            lambda batch, value, name=name: batch == f"one:{name}" and value in ABSENT_OPERAND,
            ("batch", name),
        )
        for name in call.operands
        if name in call.options
    )
    empty = Constraint(
        "XLA refuses empty arrays in manual programs, or crashes, also in its own operations (x[:0], for example)",
        # A filter of one tap has an empty state.
        lambda sharding, size: sharding in SHARD_MAPS and (is_empty(sizes[size]) or sizes[size].get("tap") == 1),
    )
    empty_jacobians = Constraint(
        "JAX cannot reshape an empty Jacobian in explicit mode",
        lambda sharding, size, transformation: (
            sharding == "explicit" and transformation in JACOBIANS and is_empty(sizes[size])
        ),
    )
    deterministic = Constraint(
        "XLA adds up rows in an order that varies from run to run on GPUs",
        lambda implementation, transformation, deterministic: (
            implementation == "xla"
            and deterministic is True
            and (transformation in EXPORTS or jax.default_backend() == "gpu")
        ),
    )
    of_options = (deterministic,) if "deterministic" in call.options else ()
    return (*CONSTRAINTS, jacobians, empty, empty_jacobians, *of_options, *presence, *call.constraints)


@functools.cache
def factors_of(op: str, several_devices: bool, with_large: bool = False) -> dict[str, tuple[Any, ...]]:
    """The values of each factor; the bare call has the first."""
    call = load_all()[op]
    transformations = tuple(
        name
        for name in TRANSFORMATIONS
        if (call.differentiable or name not in DERIVATIVES) and (call.has_carry or name != "loop")
    )
    return {
        "dtype": call.dtypes,
        "size": tuple(all_sizes(call) if with_large else call.sizes),
        "transformation": transformations,
        "batch": ("none", *(f"one:{name}" for name in call.operands), "all", "nested"),
        "sharding": SHARDINGS if several_devices else ("single",),
        "implementation": IMPLEMENTATIONS,
        **call.options,
    }


Pair = tuple[tuple[str, Any], tuple[str, Any]]

NOT_CHOSEN = object()
"""The placeholder for a factor without a value."""


class Space:
    """All combinations of values that the constraints of an op allow."""

    def __init__(self, op: str, several_devices: bool, with_large: bool = False):
        self.op = op
        self.factors = factors_of(op, several_devices, with_large)
        self._position = {name: i for i, name in enumerate(self.factors)}
        # Constraints are evaluated once, because searches consult them very often.
        forbidden = {constraint: set(self._forbidden_by(constraint)) for constraint in constraints_of(op)}
        self._forbidden = [(constraint, values) for constraint, values in forbidden.items() if values]
        self._of_factor = {name: [item for item in self._forbidden if name in item[0].factors] for name in self.factors}
        self.constrained = {name: values for name, values in self.factors.items() if self._of_factor[name]}
        """The factors that occur in constraints. Any value of another factor fits all combinations."""

    def _forbidden_by(self, constraint: Constraint) -> Iterator[tuple[Any, ...]]:
        """The combinations of values that the constraint forbids."""
        return (x for x in itertools.product(*map(self.factors.get, constraint.factors)) if constraint.forbids(*x))

    def forbidden(self, values: Values, changed: str | None = None) -> Constraint | None:
        """The constraint that forbids these values of some or all factors; None if none does."""
        for constraint, combinations in self._forbidden if changed is None else self._of_factor[changed]:
            if tuple([values.get(name, NOT_CHOSEN) for name in constraint.factors]) in combinations:
                return constraint
        return None

    def completed(self, values: Values, order: Mapping[str, Sequence[Any]]) -> dict[str, Any] | None:
        """These values and, for each other factor in `order`, the first value that fits; None if there is none."""
        if self.forbidden(values) is not None:
            return None
        return self._completed(dict(values), [name for name in order if name not in values], order)

    def _completed(self, values: dict[str, Any], rest: list[str], order: Values) -> dict[str, Any] | None:
        if not rest:
            return values
        name, *rest = rest
        for value in order[name]:
            chosen = {**values, name: value}
            if self.forbidden(chosen, name) is None and (found := self._completed(chosen, rest, order)) is not None:
                return found
        return None

    @functools.cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """All pairs of values of two factors that occur in some combination."""
        return tuple(self._pairs())

    def _pairs(self) -> Iterator[Pair]:
        @functools.cache
        def exists(constrained_values: tuple[tuple[str, Any], ...]) -> bool:
            return self.completed(dict(constrained_values), self.constrained) is not None

        for (first, first_values), (second, second_values) in itertools.combinations(self.factors.items(), 2):
            for a, b in itertools.product(first_values, second_values):
                pair = (first, a), (second, b)
                if exists(tuple(item for item in pair if item[0] in self.constrained)):
                    yield pair

    def sorted_pair(self, a: tuple[str, Any], b: tuple[str, Any]) -> Pair:
        """Two values in the order of `pairs`."""
        return (a, b) if self._position[a[0]] < self._position[b[0]] else (b, a)

    def bare(self, **chosen: Any) -> dict[str, Any] | None:
        return self.completed(chosen, self.factors)

    def case(self, values: Values, seed: int) -> Case:
        options = CALLS[self.op].options
        return Case(
            self.op,
            **{name: values[name] for name in FACTORS},
            options=tuple((name, values[name]) for name in options if values[name] != options[name][0]),
            seed=seed,
        )

    def random(self, rng: np.random.Generator) -> Case:
        """A random combination."""
        order = {name: shuffled(rng, values) for name, values in self.factors.items()}
        for name in CALLS[self.op].options:  # most calls have few options
            if rng.random() < 0.4:
                order[name] = self.factors[name]
        order = {name: order[name] for name in shuffled(rng, tuple(order))}
        values = self.completed({}, order)
        assert values is not None
        return self.case(values, int(rng.integers(2**31)))


@functools.cache
def space_of(op: str, several_devices: bool, with_large: bool = False) -> Space:
    return Space(op, several_devices, with_large)


def shuffled(rng: np.random.Generator, values: Sequence[Any]) -> list[Any]:
    return [values[i] for i in rng.permutation(len(values))]


def _pairs_of(values: Values) -> set[Pair]:
    return set(itertools.combinations(values.items(), 2))


@functools.cache
def cover(op: str, several_devices: bool, seed: int = 0) -> tuple[Case, ...]:
    """A small set of cases that covers every pair of values that the constraints allow; the bare calls come first."""
    space = space_of(op, several_devices)
    rng = np.random.default_rng(seed)
    cases: list[dict[str, Any]] = []
    missing = dict.fromkeys(space.pairs)

    def add(values: dict[str, Any]) -> None:
        values = {name: values[name] for name in space.factors}
        cases.append(values)
        for pair in _pairs_of(values):
            missing.pop(pair, None)

    for name in ("transformation", "sharding"):
        for value in space.factors[name]:
            batch = {"batch": "all"} if value in ("vjp of vmap", "scan") else {}
            if (values := space.bare(**{name: value}, **batch)) is not None:
                add(values)
    if "vjp" in space.factors["transformation"]:
        for value in space.factors["sharding"]:
            if (values := space.bare(transformation="vjp", sharding=value)) is not None:
                add(values)

    def num_met(values: Values, name: str, value: Any) -> int:
        return sum(space.sorted_pair((name, value), other) in missing for other in values.items())

    while missing:
        (first, a), (second, b) = next(iter(missing))
        values = {first: a, second: b}

        # Each further factor takes the value that covers most missing pairs, if it can be completed.
        for name in shuffled(rng, [name for name in space.factors if name not in values]):
            ranked = sorted(
                shuffled(rng, space.factors[name]), key=functools.partial(num_met, values, name), reverse=True
            )
            order = {name: ranked} | {other: space.constrained[other] for other in space.constrained if other != name}
            found = space.completed(values, order)
            assert found is not None
            values[name] = found[name]
        add(values)
    return tuple(space.case(values, seed=seed * 1_000_003 + number) for number, values in enumerate(cases))
