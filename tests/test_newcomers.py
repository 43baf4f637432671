"""The mistakes of a first hour: each is refused, and the message says what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_baracuda as jb

IDS = np.array([0, 1, 0, 2, 1, 0])
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


def plan() -> jb.SegmentPlan:
    return jb.segment_plan(IDS, 3, IDS, 6)


@pytest.mark.parametrize("function", REDUCTIONS, ids=lambda f: f.__name__)
def test_a_missing_number_of_segments_under_jit(function: Callable[..., Any]) -> None:
    name = function.__name__
    with pytest.raises(jax.errors.ConcretizationTypeError, match=f"{name}: .*pass num_segments=, because segment_ids"):
        jax.jit(lambda ids: function(ROWS, ids))(IDS)
    with pytest.raises(jax.errors.ConcretizationTypeError, match=f"{name}: num_segments must be static: .*static_argn"):
        jax.jit(lambda ids, n: function(ROWS, ids, n))(IDS, 3)
    np.testing.assert_array_equal(function(ROWS, IDS), jax.jit(lambda ids: function(ROWS, ids, 3))(IDS))


@pytest.mark.parametrize("dtype", [">f4", "object", "M8[s]", "U1"])
def test_dtypes_of_numpy_that_jax_lacks(dtype: str) -> None:
    """Such as the big-endian numbers of FITS files, and lists of lists of several lengths."""
    rows = np.ones(6).astype(dtype)
    message = f"must have a dtype that JAX accepts, in native byte order, got {re.escape(str(rows.dtype))}"
    for name, call in {
        "segment_sum: data": lambda: jb.segment_sum(rows, IDS, 3),
        "take_rows: ids": lambda: jb.take_rows(ROWS, rows),
        "where: b": lambda: jb.where(LOGITS > 0, LOGITS, rows),
        "write_slice: source": lambda: jb.write_slice(LOGITS, rows[:2], (1,)),
    }.items():
        with pytest.raises(TypeError, match=f"{name} {message}"):
            call()


@pytest.mark.parametrize("name", [f.__name__ for f in REDUCTIONS] + list(GATHERED) + ["take_rows"])
def test_a_plan_by_position(name: str) -> None:
    call = GATHERED.get(name, lambda *ids: getattr(jb, name)(ROWS, *ids))
    with pytest.raises(TypeError, match=rf"^{name}: \w*ids must not be a SegmentPlan; pass it by name, as plan="):
        call(plan())


def test_plans_that_were_mapped_over() -> None:
    """Stacked plans without ``jax.vmap``, and plans in a tree of parameters that is cast."""
    stacked, cast = (jax.tree.map(f, plan()) for f in (lambda x: jnp.stack([x, x]), lambda x: x.astype(jnp.bfloat16)))
    for name, call in {
        "gather_segment_sum": lambda plan: jb.gather_segment_sum(ROWS, plan=plan),
        "segment_softmax": lambda plan: jb.segment_softmax(LOGITS, plan=plan),
        "take_rows": lambda plan: jb.take_rows(ROWS[:3], plan=plan),
    }.items():
        with pytest.raises(ValueError, match=rf"{name}: .* must have shape \[E\], got \(2, 6\); jax.vmap maps over"):
            call(stacked)
        with pytest.raises(TypeError, match=f"{name}: .* must be int32, got bfloat16; leave the plan out"):
            call(cast)
        with pytest.raises(TypeError, match=f"{name}: the arrays of plan must be arrays, got NoneType; segment_plan"):
            call(jax.tree.map(lambda _: None, plan()))
        np.testing.assert_array_equal(jax.vmap(call)(stacked)[0], call(plan()))


@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.parametrize("shapes", [((6, 1), (6,)), ((6,), (6, 1)), ((6, 1), (1, 6)), ((1, 6), (1, 6)), ((1,), (6,))])
def test_ids_that_would_broadcast(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    senders, receivers = (np.resize(IDS, shape) for shape in shapes)
    with pytest.raises(ValueError, match=f"^{name}: gather_ids and segment_ids must have one shape"):
        GATHERED[name](senders, receivers)


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


TOKENS = np.ones((7, 4), np.float32)
FILTERS = np.ones((4, 3), np.float32)
STATES = np.ones((5, 4, 3), np.float32)
SLOTS = np.array([0, 1])


def ragged(**changes: Any) -> Any:
    arguments = {"x": TOKENS, "states": STATES, "weight": FILTERS, "cu_seqlens": np.array([0, 3, 7])}
    return jb.causal_conv1d_ragged(**arguments | {"state_slots": SLOTS, "has_state": SLOTS > 0} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight": FILTERS.T},
            r"weight .* to fit x of shape \[T, C\] = \(7, 4\), got .*; weights \[W, C\] are weight.T",
        ),
        ({"weight": FILTERS[:, None]}, r"weight .* x of shape \[T, C\] = \(7, 4\), got .* are weight\[:, 0\] here"),
        (
            {"bias": np.ones(7, np.float32)},
            r"bias must have shape \[C\] = \(4,\) to fit x of shape \[T, C\] = \(7, 4\), got",
        ),
        (
            {"state_slots": np.arange(3)},
            r"cu_seqlens must have shape \[N \+ 1\] = \(4,\) for state_slots of shape \[N\] = ",
        ),
    ],
)
def test_ragged_batches_in_the_layout_of_the_caller(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^causal_conv1d_ragged: {message}"):
        ragged(**changes)


@pytest.mark.parametrize("options", [{}, {"state_slots": SLOTS}])
def test_inputs_of_updates(options: dict[str, Any]) -> None:
    for shape in ((4,), (), (2, 4, 3, 1)):
        x, message = (
            np.ones(shape, np.float32),
            r"x must have shape \[B, C\] or \[B, C, T\] \(channels_last=False\), with or ",
        )
        with pytest.raises(
            ValueError, match=f"^causal_conv1d_update: {message}without state_slots, got {re.escape(str(shape))}"
        ):
            jb.causal_conv1d_update(x, STATES, FILTERS, **options)
    x = np.ones((2, 4), np.float32)
    with pytest.raises(
        ValueError, match=r"^causal_conv1d_update: weight .* to fit x of shape \[B, C\] = \(2, 4\), got \(3, 4\)"
    ):
        jb.causal_conv1d_update(x, STATES, FILTERS.T, **options)


def test_a_pool_of_states_without_slots() -> None:
    with pytest.raises(ValueError, match="^causal_conv1d_update: state .*; a pool of states needs state_slots"):
        jb.causal_conv1d_update(np.ones((2, 4), np.float32), STATES, FILTERS)


def test_layers_and_heads_of_pools() -> None:
    rows, slots = np.ones((5, 2, 4), np.float32), np.arange(5)
    pool, layers = np.zeros((9, 2, 4), np.float32), np.zeros((3, 9, 2, 4), np.float32)
    for arguments, options, advice in (
        ((layers, rows, slots), {}, "if dests has layers first, pass layer="),
        ((pool, rows, slots), {"layer": 0}, "if dests has no layers, leave out layer="),
        ((np.moveaxis(pool, 1, 0), rows, slots), {}, "if dests has heads before slots, pass axis=1"),
        ((pool, rows, slots), {"axis": 1}, "if dests has slots before heads, leave out axis="),
    ):
        with pytest.raises(ValueError, match=f"^write_rows: rows must have shape .*; {advice}(\n|$)"):
            jb.write_rows(*arguments, **options)
    with pytest.raises(
        TypeError, match="^write_rows: rows must be an array if dests is one, got list; for several pools"
    ):
        jb.write_rows(pool, [rows], slots)
    with pytest.raises(
        ValueError, match=r"^write_rows: slots must have shape \[T\], .*; slots\[None\] and rows\[None\] write"
    ):
        jb.write_rows(pool, rows[0], 3)


FEATURES = np.ones((2, 4, 6, 8), np.float32)
SIGNALS = FEATURES[:, :, 0]
POSITIONS = np.ones((3, 6), int)
OF_ROPE: dict[str, Any] = {"sections": (2, 1, 1), "sections_interleaved": True, "rotary_offset": 0, "rotary_dim": 8}
STATIC: dict[str, tuple[Callable[..., Any], Any]] = {
    **{name: (lambda **x: jb.rope(FEATURES, POSITIONS, **OF_ROPE | x), value) for name, value in OF_ROPE.items()},
    **{name: (lambda **x: jb.rope(FEATURES, **x), 2.0) for name in ("base", "scale")},
    "interleaved": (lambda **x: jb.rope(FEATURES, **x), True),
    "channels_last": (lambda **x: jb.causal_conv1d(SIGNALS, FILTERS, **x), False),
    "return_final_state": (lambda **x: jb.causal_conv1d(SIGNALS, FILTERS, **x), True),
    "num_segments": (
        lambda **x: jb.causal_conv1d(SIGNALS, FILTERS, segment_ids=np.zeros((2, 8), int), return_final_state=True, **x),
        3,
    ),
    "axis": (lambda **x: jb.write_rows(ROWS, ROWS, IDS, **x), 0),
    "indices_are_sorted": (lambda **x: jb.segment_sum(ROWS, IDS, 3, **x), False),
    "deterministic": (lambda **x: jb.segment_mean(ROWS, IDS, 3, **x), True),
    "segments": (jb.redirect, True),
}
"""Arguments that must be known when a program is traced: a call, and a value that it takes."""


@pytest.mark.parametrize("name", STATIC)
def test_arguments_that_must_not_be_traced(name: str) -> None:
    call, value = STATIC[name]
    call(**{name: value})
    of_array = jnp.asarray(value)
    with pytest.raises(
        TypeError, match=rf"^\w+: {name} must be .*, got an array of dtype \w+ .* must be a Python value"
    ):
        call(**{name: of_array})
    with pytest.raises(
        TypeError, match=rf"^\w+: {name} must be .*, got a traced array .*static_argnames of jax.jit(\n|$)"
    ):
        jax.jit(lambda x: [call(**{name: x})][:0])(of_array)


@pytest.mark.parametrize("name", [name for name, (_, value) in STATIC.items() if isinstance(value, bool)])
@pytest.mark.parametrize("value", ["no", None, 2, np.array([True, False])])
def test_truth_values(name: str, value: Any) -> None:
    """Python takes the string "no" for true."""
    with pytest.raises(TypeError, match=rf"^\w+: {name} must be True or False, got"):
        STATIC[name][0](**{name: value})


@pytest.mark.parametrize("name", GATHERED)
def test_promises_about_edges(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: indices_are_sorted must be True or False, got 'no'"):
        GATHERED[name](IDS, IDS, indices_are_sorted="no")


def test_sections() -> None:
    with pytest.raises(
        TypeError, match=r"^rope: sections must be a tuple of integers, such as \(16, 24, 24\), got 4(\n|$)"
    ):
        jb.rope(FEATURES, POSITIONS, sections=4)
    with pytest.raises(
        TypeError, match=r"^rope: sections\[0\] must be an integer, got a traced array .*static_argnames"
    ):
        jax.jit(lambda sections: jb.rope(FEATURES, POSITIONS, sections=sections))((2, 1, 1))
    with pytest.raises(
        ValueError, match="^rope: rotary_offset must be less than the number of features D of x, 8, got 8"
    ):
        jb.rope(FEATURES, rotary_offset=8)


def test_positions_of_three_axes_without_sections() -> None:
    q, cache = np.ones((6, 1, 8), np.float32), np.zeros((9, 1, 8), np.float32)
    with pytest.raises(ValueError, match=r"^rope_write: positions must have shape \[T\] .*\(M-RoPE\) need sections"):
        jb.rope_write(q, q, q, cache, cache, POSITIONS, IDS)


def test_starts_that_are_no_integers() -> None:
    for start, got in ((1.0, "float"), (np.float32(1), "float32"), (jnp.ones(()), "ArrayImpl of dtype float32")):
        with pytest.raises(TypeError, match=rf"write_slice: start_indices\[0\] must be an integer or .*, got {got}\n"):
            jb.write_slice(LOGITS, LOGITS[:2], (start,))


def test_batches_of_one() -> None:
    for call in (lambda: jb.rope(FEATURES[0]), lambda: jb.causal_conv1d(FEATURES[0, 0], FILTERS)):
        with pytest.raises(ValueError, match=r"^\w+: x must have shape .*; x\[None\] is a batch of one(\n|$)"):
            call()
    q, cache = np.ones((2, 3, 1, 8), np.float32), np.zeros((9, 1, 8), np.float32)
    with pytest.raises(ValueError, match=r"^rope_write: q must have shape .*; for a batch .* pass q.reshape\(-1, "):
        jb.rope_write(q, q, q, cache, cache, IDS, IDS)


@pytest.mark.parametrize("argument", [abs, True])
def test_redirect_of_a_function_without_parentheses(argument: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^redirect: arguments must be given by name.*write redirect\(\)\(f\), or @redirect\(\)"
    ):
        jb.redirect(argument)
    with pytest.raises(TypeError, match="^redirect: function must be callable, got 5"):
        jb.redirect()(5)


def wrong_rope_write() -> None:
    jb.rope_write(HEADS, HEADS, HEADS, HEADS, HEADS, IDS, IDS[:2])


WRONG_CALLS: tuple[Callable[[], Any], ...] = (
    lambda: jb.gather_segment_sum(ROWS, IDS, IDS[:2], 3),
    lambda: jb.write_rows(ROWS, ROWS, IDS[:2]),
    lambda: jb.causal_conv1d_ragged(TOKENS, STATES, FILTERS.T, cu_seqlens=IDS, state_slots=IDS, has_state=IDS > 0),
    lambda: jb.causal_conv1d_update(TOKENS[0], STATES, FILTERS),
    lambda: jb.rope(FEATURES, sections=(4,)),
    lambda: jb.take_rows(ROWS, IDS, accumulator="float32"),
    lambda: jb.segment_plan(IDS, 3, IDS[:2], 6),
    lambda: jb.rope_frequencies(8, scaling={"rope_type": "none"}),
    lambda: jb.precision_guarantee("segment_total", "float32", "cpu"),
    lambda: jb.implementation("gpu"),
    wrong_rope_write,
)


@pytest.mark.parametrize("wrong_call", WRONG_CALLS, ids=range(len(WRONG_CALLS)))
def test_tracebacks_show_the_callers_lines_alone(wrong_call: Callable[[], Any]) -> None:
    for program in (wrong_call, jax.jit(wrong_call)):
        with pytest.raises(ValueError, match="^[a-z_0-9]+: ") as error:
            program()
        shown = [frame.filename for frame in traceback.extract_tb(error.value.__traceback__)]
        assert shown and not [name for name in shown if name.startswith(tuple(jb.__path__))]
