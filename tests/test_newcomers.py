"""The mistakes of a first hour: each is refused, and the message says what to do."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_baracuda as jb

IDS = np.array([0, 1, 0, 2, 1, 0])
OTHER_IDS = np.array([0, 1, 0, 2, 1, 1])
ROWS = np.ones((6, 2), np.float32)
HEADS = np.ones((6, 1, 2), np.float32)
LOGITS = np.ones(6, np.float32)
REDUCTIONS = (
    *(jb.segment_sum, jb.segment_max, jb.segment_min, jb.segment_prod, jb.segment_mean, jb.segment_var, jb.segment_std),
    *(jb.segment_argmax, jb.segment_argmin, jb.segment_softmax, jb.segment_logsumexp),
)
GATHERED: dict[str, Callable[..., Any]] = {
    **{
        f.__name__: lambda *ids, f=f, **options: f(ROWS, *ids, *([3] if len(ids) == 2 else []), **options)
        for f in (jb.gather_segment_sum, jb.gather_segment_mean, jb.gather_segment_max, jb.gather_segment_min)
    },
    "gather_segment_dot": lambda *ids, **options: jb.gather_segment_dot(ROWS, ROWS[:3], *ids, **options),
    "segment_attention": lambda *ids, **options: jb.segment_attention(
        LOGITS, ROWS, *ids, *([3] if len(ids) == 2 else []), **options
    ),
    "graph_dot_product_attention": lambda *ids, **options: jb.graph_dot_product_attention(
        HEADS[:3], HEADS, HEADS, *ids, **options
    ),
    "graph_additive_attention": lambda *ids, **options: jb.graph_additive_attention(
        HEADS[:3], HEADS, np.ones((1, 2), np.float32), *ids, **options
    ),
}
"""Functions of edges, called with ``gather_ids, segment_ids`` or with a plan."""


def plan(ids: np.ndarray = IDS) -> jb.SegmentPlan:
    return jb.segment_plan(ids, 3, ids, 6)


@pytest.mark.parametrize("function", REDUCTIONS, ids=lambda f: f.__name__)
def test_a_missing_number_of_segments_under_jit(function: Callable[..., Any]) -> None:
    name = function.__name__
    with pytest.raises(jax.errors.ConcretizationTypeError, match=f"{name}: .*pass num_segments=, because segment_ids"):
        jax.jit(lambda ids: function(ROWS, ids))(IDS)
    with pytest.raises(jax.errors.ConcretizationTypeError, match=f"{name}: num_segments must be static: .*static_argn"):
        jax.jit(lambda ids, n: function(ROWS, ids, n))(IDS, 3)
    np.testing.assert_array_equal(function(ROWS, IDS), jax.jit(lambda ids: function(ROWS, ids, 3))(IDS))


@pytest.mark.parametrize("function", [jb.gather_segment_sum, jb.gather_segment_max], ids=lambda f: f.__name__)
def test_a_missing_number_of_segments_of_edges(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=f"^{function.__name__}: num_segments must be given, or a plan"):
        function(ROWS, IDS, IDS)
    with pytest.raises(TypeError, match=f"^{function.__name__}: segment_ids must be given, or a plan"):
        function(ROWS, IDS, None, 3)


@pytest.mark.parametrize("name", [f.__name__ for f in REDUCTIONS] + list(GATHERED) + ["take_rows"])
def test_a_plan_by_position(name: str) -> None:
    call = GATHERED.get(name, lambda *ids: getattr(jb, name)(ROWS, *ids))
    with pytest.raises(TypeError, match=rf"^{name}: \w*ids must not be a SegmentPlan; pass it by name, as plan="):
        call(plan())


@pytest.mark.parametrize("name", GATHERED)
def test_ids_as_a_plan(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: plan must be a SegmentPlan, got ndarray; segment_plan makes one"):
        GATHERED[name](plan=IDS)


@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.parametrize("shapes", [((6, 1), (6,)), ((6,), (6, 1)), ((6, 1), (1, 6)), ((1, 6), (1, 6)), ((1,), (6,))])
def test_ids_that_would_broadcast(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    senders, receivers = (np.resize(IDS, shape) for shape in shapes)
    with pytest.raises(ValueError, match=f"^{name}: gather_ids and segment_ids must have one shape"):
        GATHERED[name](senders, receivers)


@pytest.mark.parametrize("dtype", [np.bool_, np.float32])
def test_ids_that_are_not_integers(dtype: Any) -> None:
    ids = IDS.astype(dtype)
    calls = {
        **{f.__name__: lambda f=f: f(ROWS, ids, 3) for f in REDUCTIONS},
        **{name: lambda call=call: call(ids, IDS) for name, call in GATHERED.items()},
        "take_rows": lambda: jb.take_rows(ROWS, ids),
        "segment_plan": lambda: jb.segment_plan(ids, 3),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^{name}: .*ids must have an integer dtype, got {ids.dtype}"):
            call()


def test_a_list_as_data() -> None:
    with pytest.raises(TypeError, match="^segment_sum: data must be an array, got list; jnp.asarray makes one"):
        jb.segment_sum([[1.0, 2.0]], IDS[:1], 1)
    with pytest.raises(TypeError, match="^rope: x must be an array, got tuple; jnp.asarray makes one"):
        jb.rope((1.0, 2.0))


def test_a_plan_of_another_graph() -> None:
    """The call trusts the plan; `validate` finds out."""
    assert jb.gather_segment_sum(ROWS, plan=plan(OTHER_IDS)).shape == (3, 2)
    plan().validate(IDS, IDS)
    with pytest.raises(ValueError, match="SegmentPlan.validate: the plan is of other ids: edge_segment_ids"):
        plan(OTHER_IDS).validate(IDS)
    with pytest.raises(ValueError, match="SegmentPlan.validate: the plan is of other ids: edge_gather_ids"):
        jb.segment_plan(IDS, 3, OTHER_IDS, 6).validate(gather_ids=IDS)


def test_a_plan_as_a_static_argument() -> None:
    program = jax.jit(lambda x, plan: jb.gather_segment_sum(x, plan=plan), static_argnames="plan")
    with pytest.raises(
        ValueError, match="pass it to compiled programs as an ordinary argument, without static_argnums"
    ):
        program(ROWS, plan=plan())


@pytest.mark.parametrize("name", ["rope_qk", "rope_qk_backward"])
def test_heads_that_follow_the_sequence(name: str) -> None:
    q, k = jnp.ones((2, 16, 8, 4)), jnp.ones((2, 16, 2, 4))
    function = getattr(jb, name)
    with pytest.raises(ValueError, match=rf'^{name}: .*; for arrays \[B, S, H, D\] pass layout="BSHD"(\n|$)'):
        function(q, k)
    assert [x.shape for x in function(q, k, layout="BSHD")] == [q.shape, k.shape]
    with pytest.raises(ValueError, match=rf"^{name}: .*; got \(2, 16, 2, 4\)(\n|$)"):
        function(q, k, layout="BHSD")  # the caller has said so
    with pytest.raises(ValueError, match=rf"^{name}: .*; got \(2, 9, 7, 4\)(\n|$)"):
        function(q, jnp.ones((2, 9, 7, 4)))  # fits neither layout


def test_positions_of_a_sequence_before_the_heads() -> None:
    x = jnp.ones((2, 16, 8, 4))
    for positions in (jnp.arange(16), jnp.zeros((2, 16), int)):
        with pytest.raises(
            ValueError, match=r'^rope: positions must .*; for arrays \[B, S, H, D\] pass layout="BSHD"(\n|$)'
        ):
            jb.rope(x, positions)
        assert jb.rope(x, positions, layout="BSHD").shape == x.shape


def test_layouts_of_other_convolutions() -> None:
    x = jnp.ones((2, 16, 8))
    with pytest.raises(
        ValueError, match=r"^causal_conv1d: weight .*; for x of shape \[B, L, C\] pass channels_last=Tr"
    ):
        jb.causal_conv1d(x, jnp.ones((8, 4)))
    with pytest.raises(ValueError, match=r"^causal_conv1d: weight .*; weights \[C, 1, W\], as those of PyTorch, are"):
        jb.causal_conv1d(x, jnp.ones((16, 1, 4)))


def test_tracebacks_show_the_callers_lines_alone() -> None:
    def wrong_call() -> None:
        jb.gather_segment_sum(ROWS, IDS, IDS[:2], 3)

    for program in (wrong_call, jax.jit(wrong_call)):
        with pytest.raises(ValueError, match="^gather_segment_sum: ") as error:
            program()
        shown = [frame.filename for frame in traceback.extract_tb(error.value.__traceback__)]
        assert shown and not [name for name in shown if name.startswith(jb.__path__[0])]
