"""Every op in every pair of dtype, size, option, transformation, batch and sharding."""

from __future__ import annotations

from support import matrix  # isort: skip  (sets the environment before JAX is loaded)

import dataclasses
import inspect
import itertools
import os
import pickle
import traceback

import jax
import numpy as np
import pytest
from support.matrix import strategies
from support.matrix.calls import FAMILIES, Dims, load_all
from support.matrix.fuzz import Fuzz
from support.matrix.generator import FACTORS, Case, cover, factors_of, space_of
from support.matrix.run import check, num_devices

import jax_baracuda
from jax_baracuda import forward_mode
from jax_baracuda._core.native import NATIVE_MODULES
from jax_baracuda._examples import all_examples, examples_of

pytestmark = pytest.mark.thorough

assert matrix

SEED = int(os.environ.get("JAX_BARACUDA_TEST_SEED", "0"))
CHUNK = 12
STRIDE = int(os.environ.get("JAX_BARACUDA_MATRIX_STRIDE", "4"))
"""Beside the bare calls, one in this many cases runs. ``make matrix`` runs all of them."""
BARE_STRIDE = max(STRIDE // 4, 1)
"""The stride of bare calls on one device, which the tests of each op make, too."""
LINEAR = {"take_rows"}  # a primitive, whose transpose is the backward kernel
NOT_OPS = {"implementation", "precision_guarantee", "rope_frequencies", "segment_plan"}
"""Functions that are not of arrays, or make what other functions take."""

OPS = sorted(load_all())
each_op = pytest.mark.parametrize("op", OPS)


def test_every_public_function_is_declared() -> None:
    functions = {name for name in jax_baracuda.__all__ if inspect.isfunction(getattr(jax_baracuda, name))}
    assert set(OPS) == {example.function.__name__ for example in all_examples()} == functions - NOT_OPS
    twins = {op for op in OPS if not op.endswith("_backward")}
    assert set(forward_mode.__all__) == set(dir(forward_mode)) == twins | {"rope_frequencies", "segment_plan"}
    assert all(load_all()[name].forward_mode is getattr(forward_mode, name) for name in twins)


@each_op
def test_forward_mode_avoids_custom_vjp(op: str) -> None:
    """Differentiable functions are bound to a backward kernel. Their twins are not, but have the same docstrings."""
    example = examples_of(op)[0]
    operands = example.make_operands(np.random.default_rng(SEED), "float32", "small")
    twin = getattr(forward_mode, op, None)
    example_of_twin = dataclasses.replace(example, function=load_all()[op].forward_mode)
    calls = [x.call("small") for x in (example, example_of_twin)]
    programs = [str(jax.make_jaxpr(lambda x, call=call: call(**x))(operands)) for call in calls]
    is_bound = bool(example.differentiated("float32")) and op not in LINEAR
    of_function, of_twin = (any(x in p for x in ("custom_vjp_call", "baracuda_batched_vjp")) for p in programs)
    assert of_function == is_bound
    assert not of_twin
    if twin is not None:
        assert (twin.__name__, twin.__doc__) == (op, example.function.__doc__)
        assert inspect.signature(twin) == inspect.signature(example.function)
        assert pickle.loads(pickle.dumps(twin)) is twin


@each_op
def test_operands_are_those_of_the_examples(op: str) -> None:
    """Operands have the same names. Their dimensions in examples all occur in cases."""
    call = load_all()[op]
    declared: dict[str, set[Dims]] = {}
    for case in cover(op, False, SEED):
        for operand in call.problem(case.dtype, case.all_options(), case.sizes()).operands:
            declared.setdefault(operand.name, set()).add(_named(operand.dims))
    assert set(declared) == set(call.operands)
    for example in examples_of(op):
        for name, operand in example.operands.items():
            assert _named(operand.dims) in declared[name], (example.name, name)


def _named(dims: Dims) -> Dims:
    """The dimensions, with one common name for all dimensions of size 1."""
    return tuple("1" if name.startswith("1") else name for name in dims)


@each_op
@pytest.mark.parametrize("several_devices", [True, False], ids=["several devices", "one device"])
def test_cases_meet_every_pair_of_values(op: str, several_devices: bool) -> None:
    space = space_of(op, several_devices)
    met = set()
    for case in cover(op, several_devices, SEED):
        values = case.values()
        assert space.forbidden(values) is None, case
        met |= set(itertools.combinations(((name, values[name]) for name in space.factors), 2))
    possible = set(space.pairs)
    assert possible <= met, f"{len(possible - met)} of {len(possible)} pairs are not met: {list(possible - met)[:5]}"


@each_op
def test_every_bare_call_is_met(op: str) -> None:
    cases = cover(op, True, SEED)
    bare = {(case.transformation, case.sharding) for case in cases if not case.options and case.batch == "none"}
    for sharding in factors_of(op, True)["sharding"]:
        assert any(("jit", sharding) == pair or ("eager", sharding) == pair for pair in bare), sharding
        assert load_all()[op].differentiable is False or ("vjp", sharding) in bare, sharding


def _cases(op: str) -> list[Case]:
    cases = cover(op, num_devices() > 1, SEED)
    bare = [case for case in cases if not case.options and case.batch == "none"]
    on_one_device = [case for case in bare if case.sharding == "single"]
    split = [case for case in bare if case.sharding != "single"]
    drawn = {*cases[::STRIDE], *split, *on_one_device[::BARE_STRIDE]}
    return [case for case in cases if case in drawn]


def _chunks() -> list[tuple[str, int]]:
    return [(op, number) for op in OPS for number in range(-(-len(_cases(op)) // CHUNK))]


@pytest.mark.parametrize(("op", "chunk"), _chunks())
def test_combinations(op: str, chunk: int) -> None:
    failures = []
    for case in _cases(op)[chunk * CHUNK : (chunk + 1) * CHUNK]:
        try:
            check(case)
        except Exception as error:  # the other cases of the chunk still run
            what = "".join(traceback.format_exception_only(error)).strip()
            failures.append(f"{what[:1500]}\n{case.recipe()}")
    assert not failures, f"{len(failures)} cases failed:\n\n" + "\n\n".join(failures)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy_is_reached(family: str) -> None:
    platforms = [name for name, native in NATIVE_MODULES.items() if native.module is not None]
    assert platforms
    for names in (names for platform in platforms for names in NATIVE_MODULES[platform].strategies().values()):
        assert 0 < len(names) == len(set(names))
    _, problems = strategies.covering(family, platforms)
    assert not problems, "\n".join(problems)


def test_fuzz() -> None:
    reports: list[str] = []
    fuzz = Fuzz(SEED, 40, None, reports.append, with_large=False, draws=2)
    fuzz.run(threads=2)
    assert fuzz.num_programs == 40
    assert not fuzz.failures, f"{fuzz.summary()}\n" + "\n".join(reports)


def test_recipe_recreates_its_case() -> None:
    case = cover(OPS[0], True, SEED)[-1]
    assert eval(repr(case), {"Case": Case}) == case
    assert set(FACTORS) <= set(case.values())
