"""The choice between a kernel and plain JAX: on request, and by rules. Results of both agree."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import cases, programs, recorded
from support.kernels import kernels_in, kernels_of, lowered
from support.matrix.calls import load_all
from support.meshes import collectives

import jax_baracuda as jb
from benchmarks import graph_networks
from jax_baracuda._core.call import OpCall
from jax_baracuda._core.dispatch import decide
from jax_baracuda._core.native import NATIVE_MODULES, NativeModule
from jax_baracuda._core.op import OPS
from jax_baracuda._core.rules import (
    MAX_ROWS_OF_AN_UNCONTENDED_SEGMENT,
    Condition,
    Rule,
    Site,
    Traits,
    at_least,
    at_most,
    fused,
    param,
    unordered,
)
from jax_baracuda._core.selection import KERNEL_IF_ANY, selecting
from jax_baracuda._examples import all_examples
from jax_baracuda._examples.example import Example, value_and_gradient
from jax_baracuda._tools.calls import traced_calls


def runs_kernel(function: Callable[..., Any], *operands: Any, **options: Any) -> bool:
    targets = kernels_of(function, *operands, **options)
    return any(target != "partitioned" for target in targets)  # that one only says how the call is split


@pytest.fixture
def users_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops' own rules, as users have them."""
    cases.use_rules(monkeypatch)


def set_rules(monkeypatch: pytest.MonkeyPatch, **rules: Rule) -> None:
    """Sets one rule for each of these ops, and none for others."""
    cases.use_rules(monkeypatch, lambda op: tuple(rule for name, rule in rules.items() if name in op.targets))


def plain_jax(platform: str, *conditions: Condition) -> Rule:
    return Rule(platform, "of this test", conditions)


X = jax.ShapeDtypeStruct((2, 3, 8, 16), np.float32)
IDS = np.array([1, 0])


CALLS = [
    pytest.param(example, by_plan, id=f"{example.name}{' by a plan' if by_plan else ''}")
    for example in programs.FIRST_EXAMPLES.values()
    for by_plan in (False, True)[: 1 + recorded.takes_plan(example)]
    if example.function is not jb.take_rows
]
"""The first example of each function whose value a kernel may compute."""

OPS_OF_USERS = sorted(load_all())


# ----------------------------------------------------------------------------------------------------------------------
# Requests for an implementation.


@pytest.mark.parametrize(("example", "by_plan"), CALLS)
def test_argument(rng: np.random.Generator, example: Example, by_plan: bool) -> None:
    """The argument overrides the context, in the function and in its gradient."""
    operands, names = example.make_operands(rng, "float32", "small"), example.differentiated("float32")
    plan = recorded.plan_of(example, operands) if by_plan else None

    def call(operands: Any, asked_for: Any) -> Any:
        with_argument = dataclasses.replace(example, options={**example.options, "implementation": asked_for})
        return recorded.by_plan(with_argument, operands, plan) if by_plan else with_argument.call("small")(**operands)

    def gradient(operands: Any, asked_for: str) -> Any:
        chosen = {name: operands[name] for name in names}
        # With the value: the gradients of writes are gathers in plain JAX.
        return jax.value_and_grad(
            lambda x: sum(jnp.sum(y) for y in jax.tree.leaves(call({**operands, **x}, asked_for)))
        )(chosen)

    for asked_for, other, expected in (("kernel", "xla", True), ("xla", "kernel", False)):
        with jb.implementation(other):
            for program in (call, gradient)[: 2 if names else 1]:
                assert runs_kernel(functools.partial(program, asked_for=asked_for), operands) == expected
    for wrong in ("cuda", 1, True, ["xla"]):
        with pytest.raises(ValueError, match="implementation must be 'kernel', 'xla' or None"):
            call(operands, wrong)


def test_value_of_take_rows() -> None:
    """The value is always XLA's gather."""
    assert not runs_kernel(lambda x: jb.take_rows(x, IDS, implementation="kernel"), X)


@pytest.mark.parametrize("ids", [IDS, IDS.reshape(1, 2)], ids=["vector", "matrix"])
@pytest.mark.parametrize(("asked_for", "other", "expected"), [("kernel", "xla", True), ("xla", "kernel", False)])
def test_gradient_of_take_rows(ids: np.ndarray, asked_for: str, other: str, expected: bool) -> None:
    """The gradient follows the argument or, without one, the context."""
    batch = jax.ShapeDtypeStruct((3, *X.shape), X.dtype)

    def gradient(x: Any, **options: Any) -> Any:
        return jax.grad(lambda x: jb.take_rows(x, ids, **options).sum())(x)

    with jb.implementation(other):
        assert runs_kernel(lambda x: gradient(x, implementation=asked_for), X) == expected
        assert runs_kernel(jax.vmap(gradient), batch) != expected


def test_every_public_function_has_the_argument() -> None:
    for name in OPS_OF_USERS:
        parameter = inspect.signature(getattr(jb, name)).parameters["implementation"]
        assert (parameter.kind, parameter.default) == (inspect.Parameter.KEYWORD_ONLY, None), name


def test_context_of_all_functions() -> None:
    """A context applies to segment functions, too. Contexts nest, and an exception ends them."""
    ids = jax.ShapeDtypeStruct((2,), np.int32)

    def reduction(x: Any, ids: Any) -> Any:
        return jb.segment_sum(x, ids, 3)

    assert runs_kernel(jb.rope, X) and runs_kernel(reduction, X, ids)
    with jb.implementation(None):
        rules_pick_kernel = runs_kernel(jb.rope, X)
    assert rules_pick_kernel or cases.PLATFORM != "cpu"
    with jb.implementation("xla"):
        assert not runs_kernel(jb.rope, X) and not runs_kernel(reduction, X, ids)
        with jb.implementation("kernel"):
            assert runs_kernel(jb.rope, X)
        with jb.implementation(None):
            assert runs_kernel(jb.rope, X) == rules_pick_kernel
        with pytest.raises(KeyError), jb.implementation("kernel"):
            raise KeyError
        assert not runs_kernel(jb.rope, X)
    assert runs_kernel(jb.rope, X)
    with pytest.raises(ValueError, match="implementation must be"):
        jb.implementation("cuda")


def test_context_belongs_to_a_thread() -> None:
    seen: list[bool] = []
    with jb.implementation("xla"):
        thread = threading.Thread(target=lambda: seen.append(runs_kernel(jb.rope, X)))
        thread.start()
        thread.join()
        assert not runs_kernel(jb.rope, X)
    assert seen == [True]


def test_contexts_left_in_the_order_of_entering() -> None:
    """Generators that take turns do this. The context that was entered last counts, and none at the end."""

    def inside(context: contextlib.AbstractContextManager[Any]) -> Iterator[bool]:
        with context:
            while True:
                yield runs_kernel(jb.rope, X)

    generators = [inside(jb.implementation(name)) for name in ("xla", "kernel", "xla")]
    assert [next(generator) for generator in generators] == [False, True, False]
    generators[1].close()
    assert not runs_kernel(jb.rope, X)
    generators[0].close()
    assert not next(generators[2])
    generators[2].close()
    assert runs_kernel(jb.rope, X)


def test_one_context_entered_several_times() -> None:
    plain, kernel = jb.implementation("xla"), jb.implementation("kernel")
    with plain, kernel, plain:
        assert not runs_kernel(jb.rope, X)
    assert runs_kernel(jb.rope, X)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="implementation: the context is left in a thread that is not in it"):
            plain.__exit__(None, None, None)
    assert runs_kernel(jb.rope, X)


def test_leaving_brings_back_the_traces_of_before() -> None:
    traces = []

    @jax.jit
    def program(x: Any) -> Any:
        traces.append(x)
        return jb.rope(x)

    x = np.ones(X.shape, X.dtype)
    program(x)
    for _ in range(2):
        with jb.implementation("xla"), jb.implementation("kernel"):
            program(x)
        program(x)
    assert len(traces) == 2


def test_gradient_uses_what_the_function_was_called_with() -> None:
    def gradient_elsewhere(x: Any, d: Any) -> Any:
        with jb.implementation("xla"):
            _, vjp = jax.vjp(jb.rope, x)
        with jb.implementation("kernel"):
            return vjp(d)

    assert not runs_kernel(gradient_elsewhere, X, X)
    with jb.implementation("xla"):
        assert not runs_kernel(lambda x: jax.hessian(lambda x: jb.rope(x).sum())(x), X)
        assert not runs_kernel(lambda x: jax.jvp(jb.forward_mode.rope, (x,), (x,)), X)
        assert not runs_kernel(
            jax.vmap(jax.vmap(lambda x: jb.rope(x[None]))), jax.ShapeDtypeStruct((2, 2, 3, 8, 16), "f4")
        )


def test_inner_jit_is_traced_for_each_context() -> None:
    inner = jax.jit(jb.rope)
    assert runs_kernel(inner, X)
    with jb.implementation("xla"):
        assert not runs_kernel(inner, X)
    assert runs_kernel(inner, X)


# ----------------------------------------------------------------------------------------------------------------------
# Missing kernels.


def test_missing_kernel_is_an_error(cuda_module: None) -> None:
    x8 = jax.ShapeDtypeStruct(X.shape, jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="rope: .* dtype float8_e4m3fn on cpu: there is no kernel for float8_e4m3fn"):
        lowered(lambda x: jb.rope(x, implementation="kernel"), x8, platform="cpu")
    with pytest.raises(ValueError, match="rope: .* dtype float32 on tpu: there are kernels for cpu and cuda only"):
        lowered(lambda x: jb.rope(x, implementation="kernel"), X, platform="tpu")
    assert runs_kernel(lambda x: jb.rope(x, implementation="kernel"), X, platform="cuda")
    long, ids = (jax.ShapeDtypeStruct((2**31,), dtype) for dtype in (np.float32, np.int8))
    with pytest.raises(ValueError, match=r"segment_sum: .* on cpu: it has 2\^31 - 1 rows or more"):
        lowered(lambda x, ids: jb.segment_sum(x, ids, 2, implementation="kernel"), long, ids, platform="cpu")
    with pytest.raises(ValueError, match=f"write_slice: .* on {cases.PLATFORM}: an array has more than 8 axes"):
        d = jnp.ones((2,) * 9)
        jb.write_slice(d, d[:1], (1,) + (0,) * 8, implementation="kernel")
    with jb.implementation("kernel"), pytest.raises(ValueError, match="rope: implementation='kernel' is asked for"):
        lowered(jb.rope, x8, platform="cpu")
    assert not runs_kernel(lambda x: jb.rope(x, implementation="xla"), x8)


IDS_OF_ROWS, ROWS = jax.ShapeDtypeStruct((4,), np.int32), jax.ShapeDtypeStruct((4, 2), np.float32)


@pytest.mark.parametrize(
    ("name", "of_sums"),
    [
        *((name, {}) for name in ("segment_sum", "segment_mean", "segment_softmax", "segment_logsumexp")),
        *((name, {"accumulator": "float64"}) for name in ("segment_sum", "segment_mean")),
    ],
)
def test_plain_jax_cannot_promise_an_order_on_gpus(cuda_module: None, name: str, of_sums: dict[str, Any]) -> None:
    def call(data: Any, ids: Any, **options: Any) -> Any:
        return getattr(jb, name)(data, ids, num_segments=3, implementation="xla", **of_sums, **options)

    def deterministic(data: Any, ids: Any) -> Any:
        return call(data, ids, deterministic=True)

    with pytest.raises(ValueError, match=rf"{name}\w*: implementation='xla' is asked for and deterministic=True"):
        lowered(deterministic, ROWS, IDS_OF_ROWS, platform="cuda")
    assert not runs_kernel(call, ROWS, IDS_OF_ROWS, platform="cuda")
    assert not runs_kernel(deterministic, ROWS, IDS_OF_ROWS, platform="cpu")


@pytest.mark.parametrize("use", ["small", "check"])
@pytest.mark.parametrize(
    "example",
    [
        *(x for x in all_examples() if x.options.get("indices_are_sorted")),
        *(
            dataclasses.replace(x, variant="deterministic", options={**x.options, "deterministic": True})
            for x in programs.FIRST_EXAMPLES.values()
            if "deterministic" in inspect.signature(x.function).parameters
        ),
    ],
    ids=lambda example: example.name,
)
def test_sums_keep_their_order_on_gpus(users_rules: None, cuda_module: None, example: Example, use: str) -> None:
    """Sums of sorted rows and deterministic ones promise the same bits in every run. Plain JAX adds by atomics."""
    types, call = example.operand_types("float32", use), example.call(use)
    run = value_and_gradient(call, example.differentiated("float32"))
    text = lowered(run, types, jax.eval_shape(call, **types), platform="cuda")
    scatters = re.findall(r'"stablehlo\.scatter".*?\n\s*\}\)', text, re.DOTALL)
    assert not [x for x in scatters if re.search(r"stablehlo\.add .*tensor<f\d", x)]


@pytest.mark.parametrize("name", ["segment_sum", "segment_mean"])
def test_gradients_that_add_nothing_need_no_order(users_rules: None, cuda_module: None, name: str) -> None:
    """With deterministic=True, kernels add up rows on GPUs. Gradients that only gather follow the rules of their op."""

    def pull_back(data: Any, ids: Any, d_output: Any) -> Any:
        value, vjp = jax.vjp(lambda x: getattr(jb, name)(x, ids, num_segments=3, deterministic=True), data)
        return value, vjp(d_output)

    text = lowered(pull_back, ROWS, IDS_OF_ROWS, jax.ShapeDtypeStruct((3, 2), np.float32), platform="cuda")
    assert f"@jax_baracuda.{name}(" in text and f"@jax_baracuda.{name}_backward(" not in text


EDGES = np.array([1, 0, 2, 1]), np.array([1, 0, 1, 2]), 3


@pytest.mark.parametrize(
    ("function", "sums"),
    [
        (jb.gather_segment_sum, "segment_sum"),  # so few rows are gathered first
        (jb.gather_segment_mean, "segment_sum"),
        (jb.gather_segment_max, "gather_segment_max_backward"),
    ],
    ids=["sum", "mean", "max"],
)
def test_sums_of_gathered_rows_keep_their_order(
    monkeypatch: pytest.MonkeyPatch, cuda_module: None, function: Callable[..., Any], sums: str
) -> None:
    """On GPUs, rules choose plain JAX only for unsorted edges without a plan, and only if no order is requested."""
    rule = plain_jax("cuda", unordered)
    set_rules(monkeypatch, gather_segment_sum=rule, gather_segment_max_backward=rule, segment_sum=rule)

    def sums_by_kernels(*edges: Any, **options: Any) -> bool:
        def value_and_gradient(data: Any, cotangent: Any) -> Any:
            value, pull_back = jax.vjp(lambda x: function(x, *edges, **options), data)
            return value, pull_back(cotangent)

        text = lowered(value_and_gradient, ROWS, jax.ShapeDtypeStruct((3, 2), np.float32), platform="cuda")
        return f"@jax_baracuda.{sums}(" in text

    assert not sums_by_kernels(*EDGES)
    assert sums_by_kernels(*EDGES, deterministic=True)
    assert sums_by_kernels(*EDGES, indices_are_sorted=True)
    assert sums_by_kernels(plan=jb.segment_plan(EDGES[1], 3, EDGES[0], 4))
    assert not sums_by_kernels(*EDGES, indices_are_sorted=True, implementation="xla")
    with pytest.raises(ValueError, match="implementation='xla' is asked for and deterministic=True"):
        sums_by_kernels(*EDGES, deterministic=True, implementation="xla")


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["vector", "matrix"])
def test_plain_gradient_of_take_rows_on_gpus(cuda_module: None, shape: tuple[int, ...]) -> None:
    """The gradient itself requests an order, but not if plain JAX is requested."""

    def gradient(data: Any, ids: Any) -> Any:
        return jax.grad(lambda data: jb.take_rows(data, ids.reshape(shape), indices_are_sorted=True).sum())(data)

    mapped_ids = jax.ShapeDtypeStruct((3, 4), np.int32)
    with jb.implementation("xla"):
        assert not runs_kernel(jax.vmap(gradient, (None, 0)), ROWS, mapped_ids, platform="cuda")


def test_plain_attention_on_gpus(cuda_module: None) -> None:
    def attention(data: Any, ids: Any) -> Any:
        return jb.segment_attention(data[:, 0], data, ids, ids, 4)

    with jb.implementation("xla"):
        assert not runs_kernel(attention, ROWS, IDS_OF_ROWS, platform="cuda")


def test_kernel_of_a_module_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NATIVE_MODULES, "cuda", NativeModule("cuda", None, frozenset(), "there is no compiler"))
    with pytest.raises(ValueError, match="rope: .* on cuda: there is no compiler"):
        lowered(lambda x: jb.rope(x, implementation="kernel"), X, platform="cuda")


# ----------------------------------------------------------------------------------------------------------------------
# The choice without a request.


def decode(cache: Any, rows: Any) -> Any:
    """Decoding steps. Each appends a row of each example to a cache [B, S, H, D], and attention reads the cache."""

    def step(carry: Any, row: Any) -> Any:
        cache, position = carry
        cache = jb.write_slice(cache, row, (0, position, 0, 0))
        scores = jnp.einsum("bhd,bshd->bhs", row[:, 0].astype(jnp.float32), cache.astype(jnp.float32))
        return (cache, position + 1), scores.sum(axis=-1)

    return jax.lax.scan(step, (cache, jnp.int32(3)), rows)


def test_decode_loop(users_rules: None, cuda_module: None) -> None:
    """On GPUs, XLA writes the row for any dtype of at least a byte. A kernel writes smaller elements."""
    for dtype, expected in (("bfloat16", False), ("float32", False), ("float8_e4m3fn", False), ("int4", True)):
        cache = jax.ShapeDtypeStruct((2, 32, 4, 8), jnp.dtype(dtype))
        rows = jax.ShapeDtypeStruct((5, 2, 1, 4, 8), jnp.dtype(dtype))
        assert runs_kernel(decode, cache, rows, platform="cuda") == expected, dtype
    cache, rows = (jax.ShapeDtypeStruct(x.shape, np.float32) for x in (cache, rows))
    with jb.implementation("kernel"):
        assert runs_kernel(decode, cache, rows, platform="cuda")
    both = lambda d, s: jb.write_slices([d, d], [s, s], (0, 3, 0, 0))  # noqa: E731
    assert not runs_kernel(both, cache, jax.ShapeDtypeStruct((2, 1, 4, 8), np.float32), platform="cuda")
    assert runs_kernel(jb.rope, jax.ShapeDtypeStruct(X.shape, jnp.bfloat16), platform="cuda")


def test_decode_loop_on_cpus(users_rules: None) -> None:
    """On CPUs, XLA writes the row faster than a kernel starts. A kernel writes elements smaller than a byte."""
    for dtype, expected in (("bfloat16", False), ("float32", False), ("int4", True)):
        for length in (32, 4096):
            rows = jax.ShapeDtypeStruct((5, 2, 1, 4, 8), jnp.dtype(dtype))
            cache = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.dtype(dtype))
            assert runs_kernel(decode, cache, rows, platform="cpu") == expected, (dtype, length)


def test_one_trace_serves_several_platforms(monkeypatch: pytest.MonkeyPatch, cuda_module: None) -> None:
    set_rules(monkeypatch, rope=plain_jax("cuda"), where=plain_jax("cpu"))
    traced = jax.jit(lambda x: (jb.rope(x), jb.where(x > 0, x, 2 * x))).trace(X)
    for platform, served in (("cpu", ["rope"]), ("cuda", ["where"])):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert [name for name in ("rope", "where") if f"@jax_baracuda.{name}(" in text] == served


def test_printed_programs_have_no_addresses() -> None:
    """Equal programs of two processes are printed alike."""
    batch = jax.vmap(lambda data: jb.gather_segment_sum(data, jnp.arange(2), jnp.arange(2), 2))
    text = str(jax.make_jaxpr(batch)(jnp.ones((3, 2, 4))))
    assert "BatchedVjp(gather_segment_sum)" in text and " at 0x" not in text


def call_of(op: str, *operands: Any, **params: Any) -> OpCall:
    return OpCall(OPS[op], operands, params)


def test_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule applies on its platform if all its conditions hold. The decision gives its reason."""
    monkeypatch.setattr(OpCall, "unsupported_reason", lambda *_: None)
    options = {"channels_last": False, "silu": True, "has_bias": False}
    set_rules(monkeypatch, causal_conv1d=plain_jax("cuda", param("silu", True), at_most(time=256), at_least(channel=8)))

    def decided(length: int = 256, channels: int = 8, platform: str = "cuda", **changes: Any) -> tuple[str, str]:
        operands = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((2, channels, length), (channels, 4))]
        params = {**options, "has_initial_state": False, "has_same_sequence": False, **changes}
        return decide(call_of("causal_conv1d", *operands, **params), Site(platform))

    assert decided() == ("xla", "of this test")
    for unlike in ({"length": 257}, {"channels": 7}, {"platform": "cpu"}, {"silu": False}):
        assert decided(**unlike).implementation == "kernel", unlike
    assert decided(implementation=KERNEL_IF_ANY).implementation == "kernel"


@pytest.mark.parametrize(
    ("features", "implementation"),
    [((), "xla"), ((16,), "xla"), ((17,), "kernel"), ((2, 8), "xla"), ((2, 9), "kernel")],
)
def test_rules_of_features(monkeypatch: pytest.MonkeyPatch, features: tuple[int, ...], implementation: str) -> None:
    """The condition counts the elements of a row, whatever its rank."""
    monkeypatch.setattr(OpCall, "unsupported_reason", lambda *_: None)
    set_rules(monkeypatch, segment_sum=plain_jax("cuda", at_most(features=16)))
    operands = jax.ShapeDtypeStruct((5, *features), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.int32)
    params = {"num_segments": 3, "indices_are_sorted": False, "deterministic": False}
    assert decide(call_of("segment_sum", *operands, **params), Site("cuda")).implementation == implementation


@pytest.mark.parametrize(
    ("dtype", "num_rows", "width", "implementation"),
    [
        ("float32", 300_000, 64, "xla"),
        ("float32", 500_000, 64, "kernel"),
        ("float32", 3_000_000, 32, "xla"),
        ("bfloat16", 600_000, 32, "xla"),
        ("bfloat16", 1_200_000, 32, "kernel"),
    ],
)
def test_sums_that_take_less_time_than_a_sort(
    users_rules: None, monkeypatch: pytest.MonkeyPatch, dtype: str, num_rows: int, width: int, implementation: str
) -> None:
    """On GPUs, XLA adds up to 128 MB of 32 bits, narrow rows of any size, and 64 MB of 16 bits, which it adds in 32."""
    monkeypatch.setattr(OpCall, "unsupported_reason", lambda *_: None)
    operands = jax.ShapeDtypeStruct((num_rows, width), jnp.dtype(dtype)), jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    params = {"num_segments": num_rows // 6, "indices_are_sorted": False, "deterministic": False}
    assert decide(call_of("segment_sum", *operands, **params), Site("cuda")).implementation == implementation


@pytest.mark.parametrize("is_first", [True, False])
def test_contended_segments_are_the_kernels(users_rules: None, monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    """Kernels sum contended segments, because XLA's atomic additions to a cell wait for each other."""
    monkeypatch.setattr(OpCall, "unsupported_reason", lambda *_: None)
    num_rows = 2 * MAX_ROWS_OF_AN_UNCONTENDED_SEGMENT + (0 if is_first else 1)
    operands = jax.ShapeDtypeStruct((num_rows,), jnp.float32), jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    params = {"num_segments": 2, "indices_are_sorted": False, "deterministic": False}
    decision = decide(call_of("segment_sum", *operands, **params), Site("cuda"))
    assert decision.implementation == ("xla" if is_first else "kernel")


def test_rules_are_few() -> None:
    """An op that needs more than three rules on a platform needs a better kernel."""
    for op in OPS.values():
        for platform in ("cpu", "cuda"):
            rules = [rule for rule in op.xla_rules if rule.platform == platform]
            assert len(rules) <= 3, (op.name, platform)
            assert all(rule.reason for rule in rules)
        assert len(op.alternatives) <= 3 and all(rule.reason for rule in op.alternatives), op.name


@pytest.mark.parametrize("example", [x for x in all_examples() if x.mapped is None], ids=lambda example: example.name)
def test_every_condition_applies_to_every_call(example: Example) -> None:
    """Conditions find the sizes that they ask for, on whatever platform their rule holds."""
    types = example.operand_types("float32", "small")
    for program in recorded.programs_of(example):
        for call in traced_calls(program, types):
            traits = Traits(call.params, call.measures, Site("cuda", fuses=True))
            for rule in (*call.op.xla_rules, *call.op.alternatives):
                for condition in rule.conditions:
                    assert condition(traits) in (True, False), rule.reason


def test_sizes_of_heads() -> None:
    [call] = traced_calls(
        lambda x: jb.gather_segment_sum(x, IDS, IDS, 3, weights=jnp.ones((2, 4))), jnp.ones((2, 4, 5))
    )
    assert call.measures.items() >= {"head": 4, "feature": 5, "features": 20}.items()
    traits = Traits(call.params, call.measures, Site("cuda"))
    assert at_most(features=20)(traits) and not at_most(features=19)(traits)


N = jax.ShapeDtypeStruct((2, 16), np.float32)
OPERANDS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "an argument": (lambda x: x, False),
    "a reshaped argument": (lambda x: x.reshape(1, 2, 16).reshape(2, 16), False),
    "a product of matrices": (lambda x: x @ jnp.ones((16, 16)), False),
    "a reduction": (lambda x: jnp.ones((3, 2, 16)).at[0].set(x).max(0), False),
    "a sorted array": (lambda x: jnp.sort(x, axis=0), False),
    "a gather": (lambda x: x[jnp.array([1, 0])], True),
    "a function of JAX": (lambda x: jax.nn.relu(x), True),
    "an inner function": (lambda x: jax.jit(lambda x: x.reshape(2, 16) * 2)(x), True),
    "an inner function that returns its argument": (lambda x: jax.jit(lambda x: (x, x + 1))(x)[0], False),
    "a product": (lambda x: x * x[:, :1], True),
    "a product by einsum": (lambda x: jnp.einsum("i,ij->ij", x[:, 0], x), True),
    "a reshaped product": (lambda x: (x * x).reshape(2, 16), True),
    "a cotangent": (lambda x: jax.grad(lambda x: (x**3).sum())(x), True),
}


@pytest.mark.parametrize("operand", OPERANDS)
def test_operands_that_xla_computes(monkeypatch: pytest.MonkeyPatch, operand: str) -> None:
    """Some rules apply only if a fusion of XLA would compute the first operand as it is read."""
    make, is_computed = OPERANDS[operand]
    set_rules(monkeypatch, segment_sum=plain_jax(cases.PLATFORM, fused))

    def sums(x: Any) -> Any:
        return jb.segment_sum(make(x), IDS, 3)

    assert runs_kernel(sums, N) != is_computed
    assert runs_kernel(lambda x: jax.vmap(sums)(x[None]), N) != is_computed
    assert runs_kernel(lambda x: jax.lax.map(sums, x[None]), N) != is_computed
    assert runs_kernel(lambda x: jax.jit(lambda y: sums(y))(x), N) != is_computed
    assert runs_kernel(jax.grad(lambda x: (sums(x) ** 2).sum()), N)  # the gradient has no such rule


def test_donated_arguments_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel runs whatever a rule says: plain JAX would rotate into a new array and copy it."""
    set_rules(monkeypatch, rope=plain_jax(cases.PLATFORM))
    for donated, is_kernel in (((), False), ((0,), True)):
        text = jax.jit(lambda x: jb.rope(x), donate_argnums=donated).lower(X).as_text()
        assert ("@jax_baracuda." in text) == is_kernel


def test_kernel_if_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel runs whatever a rule says. A missing kernel is no error."""
    set_rules(monkeypatch, rope=plain_jax(cases.PLATFORM))

    def rotate(x: Any) -> Any:
        with selecting(KERNEL_IF_ANY):
            return jb.rope(x)

    assert runs_kernel(rotate, X) and not runs_kernel(jb.rope, X)
    assert not runs_kernel(rotate, jax.ShapeDtypeStruct(X.shape, jnp.float8_e4m3fn))


LARGE_GRAPHS: dict[str, tuple[graph_networks.Model, int, int, list[tuple[int, ...]]]] = {
    "maxima": (functools.partial(graph_networks.sage, "max"), 169_343, 1_166_243, [(256, 128)] * 2),
    "maxima, 30M edges": (functools.partial(graph_networks.sage, "max"), 2_449_029, 30_000_000, [(64, 32)] * 2),
    "sums": (functools.partial(graph_networks.sage, "sum"), 169_343, 1_166_243, [(512, 256)] * 2),
    "attention": (graph_networks.gat, 169_343, 1_166_243, [(128, 128), (8, 16), (8, 16)]),
}


@pytest.mark.parametrize("name", LARGE_GRAPHS)
def test_large_graphs_run_by_kernels(users_rules: None, cuda_module: None, name: str) -> None:
    """On GPUs, kernels run training steps that take several times as long in plain JAX (docs/performance.md)."""
    model, nodes, edges, weights = LARGE_GRAPHS[name]
    step = graph_networks.training_step(model, graph_networks.Ours(nodes))
    ids = jax.ShapeDtypeStruct((edges,), jnp.int32)
    features = jax.ShapeDtypeStruct((nodes, weights[0][0] if name == "attention" else weights[0][1]), jnp.float32)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in weights]
    text = lowered(step, arrays, features, {"gather_ids": ids, "segment_ids": ids}, platform="cuda")
    kernels = set(kernels_in(text))
    expected = {
        "maxima": {"gather_segment_max_with_winner", "gather_segment_max_backward"},
        "sums": {"gather_segment_sum"},
        "attention": {"segment_attention", "segment_attention_backward"},
    }
    assert kernels >= expected[name.partition(",")[0]] | {"segment_order"}
    scattered = re.findall(r"^ *}\) : .* tensor<1166243x([0-9x]+)xf32>\) ->", text, re.M)
    assert len(scattered) == text.count('"stablehlo.scatter"')
    assert scattered == (["8"] * 2 if name == "attention" else [])  # gradients by logits, which XLA computes as it adds


# ----------------------------------------------------------------------------------------------------------------------
# Results agree.

ONES_AND_NANS = np.array([[1.0, np.nan, np.inf], [np.nan, 2.0, -np.inf]], np.float32)


@pytest.mark.parametrize("asked_for", ["kernel", "xla"])
def test_zeros_are_exact(asked_for: str) -> None:
    """Elements that are not selected, and elements that are overwritten, get zeros, whatever the cotangent."""
    cond = ~np.isfinite(ONES_AND_NANS)
    da, db = jb.where_backward(ONES_AND_NANS, cond, implementation=asked_for)
    np.testing.assert_array_equal(da, np.where(cond, ONES_AND_NANS, 0))
    np.testing.assert_array_equal(db, np.where(cond, 0, ONES_AND_NANS))
    write = lambda d, s: jb.write_slice(d, s, (0, 1), mode="drop", implementation=asked_for)  # noqa: E731
    dest, source = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    d_dest, d_source = jax.vjp(write, dest, source)[1](ONES_AND_NANS)
    np.testing.assert_array_equal(d_dest, np.concatenate([ONES_AND_NANS[:, :1], np.zeros((2, 2))], axis=1))
    np.testing.assert_array_equal(d_source, np.concatenate([ONES_AND_NANS[:, 1:], np.zeros((2, 1))], axis=1))


@cases.on_two_devices
class TestSharding:
    """Plain JAX exchanges no more between devices than a kernel does."""

    SPLITS: Mapping[str, P] = {"times": P(None, "a", None), "examples": P("a", None, None), "heads": P(None, None, "a")}

    @pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
    def mesh(self, request: pytest.FixtureRequest) -> Iterator[jax.sharding.Mesh]:
        mesh = jax.make_mesh((len(jax.devices()),), ("a",), axis_types=(request.param,))
        with jax.set_mesh(mesh):
            yield mesh

    @pytest.mark.parametrize("mode", ["clip", "drop"])
    @pytest.mark.parametrize("split", SPLITS)
    @pytest.mark.parametrize("is_long", [True, False])
    def test_write_slice(
        self, rng: np.random.Generator, mesh: jax.sharding.Mesh, split: str, mode: str, is_long: bool
    ) -> None:
        """Windows may lie within a shard, cross several, or be longer than one. Gradients are right, too."""
        spec = self.SPLITS[split]
        num = len(jax.devices())
        time = 4 * num
        size = 3 * num if is_long else 1
        dest, source, d_output = (rng.normal(size=(num, n, num)).astype("f4") for n in (time, size, time))
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
        operands = put(dest, spec), put(source, P(spec[0], None, spec[2])), put(d_output, spec)

        def program(dest: Any, source: Any, d_output: Any, start: Any, asked_for: str) -> Any:
            def write(dest: Any, source: Any) -> Any:
                return jb.write_slice(dest, source, (0, start, 0), mode=mode, implementation=asked_for)

            result, vjp = jax.vjp(write, dest, source)
            return result, vjp(d_output)

        kernel, xla = (
            lambda *x, asked_for=asked_for: program(*x, asked_for=asked_for) for asked_for in ("kernel", "xla")
        )
        counts = [sum(collectives(f, *operands, 3).values()) for f in (kernel, xla)]
        assert counts[1] <= counts[0]
        assert not runs_kernel(xla, *operands, 3)
        types = [jax.tree.map(lambda x: jax.typeof(x), jax.eval_shape(f, *operands, 3)) for f in (kernel, xla)]
        assert types[0] == types[1]
        compiled = jax.jit(xla)
        for start in (0, 3, 4 * num - 5, 4 * num + 3, -3, -size - 1):
            expected = program(dest, source, d_output, np.int32(start), "kernel")
            for got, want in zip(jax.tree.leaves(compiled(*operands, start)), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(got, want, str(start))

    @pytest.mark.parametrize("name", ["segment_sum", "gather_segment_sum"])
    def test_reductions(self, monkeypatch: pytest.MonkeyPatch, mesh: jax.sharding.Mesh, name: str) -> None:
        """Rules apply to them. Each device reduces its own rows, as a kernel does."""
        set_rules(monkeypatch, **{name: plain_jax(cases.PLATFORM)})
        num = len(jax.devices())
        rows = np.ones((2 * num, 2), np.float32), np.arange(2 * num, dtype=np.int32) % 3
        data, ids = (jax.device_put(x, NamedSharding(mesh, P("a"))) for x in rows)
        of_edges = (ids,) if name.startswith("gather") else ()

        def call(data: Any, ids: Any, asked_for: str | None = None) -> Any:
            return getattr(jb, name)(data, *of_edges, ids, 3, implementation=asked_for)

        by_rule, by_kernel = (functools.partial(call, asked_for=asked_for) for asked_for in (None, "kernel"))
        assert not runs_kernel(by_rule, data, ids)
        assert collectives(by_rule, data, ids) == collectives(by_kernel, data, ids)
