"""Attention over edges in NumPy: of given logits, and of logits from queries and keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support import cases

import jax_baracuda
from jax_baracuda import segment_plan

NEGATIVE_SLOPE = 0.2


@dataclasses.dataclass
class EdgeAttention:
    """The arrays of a call."""

    kind: str
    """"given logits", "dot product" or "additive"."""
    arrays: dict[str, np.ndarray]
    gather_ids: np.ndarray
    segment_ids: np.ndarray
    num_segments: int

    @property
    def takes_logits(self) -> bool:
        return self.kind == "given logits"

    @property
    def gathered(self) -> np.ndarray:
        """The array whose rows edges gather."""
        return self.arrays["data" if self.takes_logits else "key"]

    @property
    def dtype(self) -> Any:
        return self.gathered.dtype

    @property
    def masks(self) -> np.ndarray:
        """What edges add to their logits: the bias, or the logits themselves."""
        return self.arrays["logits" if self.takes_logits else "bias"]

    def call(self, form: str = "ids", **options: Any) -> Callable[[Any], jax.Array]:
        """``(arrays) -> result``"""
        function = public(self.kind)
        if form == "plan":
            plan = segment_plan(self.segment_ids, self.num_segments, self.gather_ids, len(self.gathered))
            return lambda arrays: function(**arrays, plan=plan, **options)
        forms = {"sorted": {"indices_are_sorted": True}, "clip": {"mode": "clip"}, "xla": {"implementation": "xla"}}
        options |= forms.get(form, {})
        options |= {"num_segments": self.num_segments} if self.takes_logits else {}
        ids = {"gather_ids": self.gather_ids, "segment_ids": self.segment_ids}
        return lambda arrays: function(**arrays, **ids, **options)

    def d_output(self, rng: np.random.Generator) -> np.ndarray:
        features = self.arrays.get("value", self.gathered).shape[1:]
        return rng.normal(size=(self.num_segments, *features)).astype(self.dtype)

    def run(self, form: str, d_output: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The result, and the gradients of all arrays."""

        def value_and_pullback(arrays: Any, d_output: Any) -> tuple[jax.Array, Any]:
            output, vjp = jax.vjp(self.call(form), arrays)
            return output, *vjp(d_output)

        with cases.x64_for(*(x.dtype for x in self.arrays.values())):
            return jax.jit(value_and_pullback)(self.arrays, d_output)

    def check(self, form: str, d_output: np.ndarray, **exact: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The results, each within the error of the arithmetic, and of rounded results where gradients use these."""
        output, gradients = self.run(form, d_output)
        check(self, output, gradients, reference(self, d_output, form, **exact))
        return output, gradients


def public(kind: str) -> Callable[..., jax.Array]:
    name = "segment_attention" if kind == "given logits" else f"graph_{kind.replace(' ', '_')}_attention"
    return getattr(jax_baracuda, name)


@dataclasses.dataclass
class Result:
    """An exact result, and what the errors of a kernel are relative to."""

    exact: np.ndarray
    of_arithmetic: np.ndarray
    """The sums of the magnitudes of the terms, to which rounding errors in the accumulator are relative."""
    of_output: np.ndarray
    """The effect of a relative error of 1 of the result, from whose rounded elements gradients are computed."""


def _zeros(shape: tuple[int, ...], dtype: Any) -> Result:
    return Result(*(np.zeros(shape, dtype) for _ in range(3)))


def of_segment(logits: np.ndarray, sizes: np.ndarray, value: np.ndarray, d_output: np.ndarray) -> tuple[Any, Any, Any]:
    """The sum of the values ``[E, H, D]`` of one segment's edges, weighted by the softmax of their logits ``[E, H]``.

    Returns the result and the gradients of logits and values, each as the fields of a `Result`.

    Args:
      sizes: the magnitudes to which the errors of the logits are relative.
    """
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        highest = logits.max(axis=0)
        exponentials = np.exp(logits - np.where(highest == -np.inf, 0, highest))
        total = exponentials.sum(axis=0)
        p = exponentials / np.where(total == 0, 1, total)
    inflated = p * (1 + sizes + sizes.max(axis=0))
    output = (p[..., None] * value).sum(axis=0)
    of_magnitudes = (inflated[..., None] * abs(value)).sum(axis=0)
    d_p, size_of_d_p = (d_output * value).sum(-1), (abs(d_output) * abs(value)).sum(-1)
    d_logits = (
        p * (d_p - (p * d_p).sum(axis=0)),
        inflated * (size_of_d_p + (inflated * size_of_d_p).sum(axis=0)),
        p * (abs(d_output) * abs(output)).sum(-1),
    )
    d_value = p[..., None] * d_output, inflated[..., None] * abs(d_output)
    return (output, of_magnitudes, np.zeros_like(output)), d_logits, (*d_value, np.zeros_like(value))


def reference(
    call: EdgeAttention, d_output: np.ndarray, form: str, logits: np.ndarray | None = None
) -> tuple[Result, dict[str, Result]]:
    """The result and the gradients, in loops over segments. Given logits have one dimension of heads, and their data
    one of features.

    Args:
      logits: the exact logits ``[E, H]``, in place of those that follow from queries and keys.
    """
    wide = cases.wider(call.dtype)
    arrays = {name: array.astype(wide) for name, array in call.arrays.items()}
    d_output = d_output.astype(wide)
    if call.takes_logits:
        heads, features = arrays["logits"].shape[1:], arrays["data"].shape[arrays["logits"].ndim :]
        by_heads = math.prod(heads), math.prod(features)
        arrays["logits"] = arrays["logits"].reshape(len(call.segment_ids), by_heads[0])
        arrays["data"], d_output = (x.reshape(len(x), *by_heads) for x in (arrays["data"], d_output))
    key = arrays["data" if call.takes_logits else "key"]
    query, value = arrays.get("query"), arrays.get("value", key)
    num_segments, num_rows = call.num_segments, len(key)
    rows = np.where(call.gather_ids < 0, call.gather_ids + num_rows, call.gather_ids)
    has_gradient = (rows >= 0) & (rows < num_rows)
    rows = np.clip(rows, 0, max(num_rows - 1, 0))
    ids = cases.in_mode(call.segment_ids, num_segments, "clip" if form == "clip" else None)
    output = _zeros((num_segments, *value.shape[1:]), wide)
    gradients = {name: _zeros(array.shape, wide) for name, array in arrays.items()}

    def add(name: str, place: Any, terms: tuple[np.ndarray, ...]) -> None:
        for total, of_edges in zip(vars(gradients[name]).values(), terms, strict=True):
            np.add.at(total, place, of_edges)

    for segment in np.unique(ids[(ids >= 0) & (ids < num_segments)]):
        edges = np.flatnonzero(ids == segment)
        k, v, g = key[rows[edges]], value[rows[edges]], d_output[segment]
        chosen = has_gradient[edges]
        if call.takes_logits:
            of_edges = arrays["logits"][edges]
            size = np.where(np.isfinite(of_edges), abs(of_edges), 0)
        elif call.kind == "additive":
            weights, x = arrays["score_weights"], query[segment] + k
            slope = np.where(x >= 0, 1, NEGATIVE_SLOPE).astype(wide)
            by_query = by_key = weights * slope
            of_edges = (weights * slope * x).sum(-1)
            size = (abs(weights) * (abs(query[segment]) + abs(k))).sum(-1)
        else:
            scale = 1 / np.sqrt(wide.type(max(query.shape[2], 1)))
            by_query, by_key = scale * k, scale * np.broadcast_to(query[segment], k.shape)
            of_edges = scale * (query[segment] * k).sum(-1)
            size = scale * (abs(query[segment]) * abs(k)).sum(-1)
        if "bias" in arrays:
            bias = arrays["bias"][edges].reshape(len(edges), -1)
            of_edges, size = of_edges + bias, size + np.where(np.isfinite(bias), abs(bias), 0)
        if logits is not None:
            of_edges, size = logits[edges].astype(wide), np.zeros_like(size)
        results, d_logits, to_value = of_segment(of_edges, size, v, g)
        for total, terms in zip(vars(output).values(), results, strict=True):
            total[segment] = terms
        gathered = "value" if "value" in arrays else "data" if call.takes_logits else "key"
        add(gathered, rows[edges][chosen], tuple(x[chosen] for x in to_value))
        if call.takes_logits:
            add("logits", edges, d_logits)
            continue
        add("query", segment, tuple((x[..., None] * y).sum(0) for x, y in _with_sizes(d_logits, by_query)))
        if "bias" in arrays:
            is_shared = arrays["bias"].ndim == 1
            add("bias", edges, tuple(x.sum(-1) if is_shared else x for x in d_logits))
        if call.kind == "additive":
            add("score_weights", ..., tuple((x[..., None] * y).sum(0) for x, y in _with_sizes(d_logits, slope * x)))
        to_key = tuple((d[..., None] * y)[chosen] for d, y in _with_sizes(d_logits, by_key))
        add("key", rows[edges][chosen], to_key)
    return output, gradients


def _with_sizes(of_logits: tuple[np.ndarray, ...], factor: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return zip(of_logits, (factor, abs(factor), abs(factor)), strict=True)


def check(
    call: EdgeAttention, actual: Any, gradients: dict[str, Any], expected: tuple[Result, dict[str, Result]]
) -> None:
    """Every element is within the error of the arithmetic, and of rounded results where gradients use these."""
    terms = len(call.segment_ids) + math.prod(expected[0].exact.shape[1 if call.takes_logits else 2 :])
    terms += 0 if call.takes_logits else call.arrays["query"].shape[2]
    arithmetic = (4 + 4 * math.sqrt(terms)) * cases.eps_of(call.dtype)
    rounding = float(jnp.finfo(call.dtype).eps)
    tiny = 4 * float(jnp.finfo(call.dtype).smallest_subnormal) * (np.dtype(call.dtype).itemsize == 2)
    assert gradients.keys() == expected[1].keys()
    for name, array, of in (("output", actual, expected[0]), *((x, gradients[x], expected[1][x]) for x in gradients)):
        error = arithmetic * of.of_arithmetic + rounding * of.of_output
        if name == "bias" and np.ndim(array) == 1:  # the gradients of its heads are rounded and added up
            error = error + call.arrays["query"].shape[1] * rounding * of.of_arithmetic
        own_dtype = call.arrays[name].dtype if name in call.arrays else call.dtype
        if call.takes_logits:  # these may have another dtype than the arithmetic, to which their gradient is rounded
            error = error + abs(of.exact) * float(jnp.finfo(own_dtype).eps)
        error = error + tiny + float(jnp.finfo(jnp.float32).tiny)
        exact, error = (x.reshape(np.shape(array)) for x in (of.exact, error))
        cases.Expected(exact, own_dtype, error).check(array, name)
