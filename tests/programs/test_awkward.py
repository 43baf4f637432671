"""awkward's reducers of ragged arrays: values, forward and reverse mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import awkward as ak
import jax
import numpy as np
import pytest

import jax_baracuda as jb

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="awkward's arrays of JAX are on CPUs: it refuses another default"
)

LISTS = 40
REDUCERS = ["sum", "max", "min", "prod", "any", "all", "argmax", "argmin"]


@pytest.fixture(autouse=True)
def on_jax() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    ak.jax.register_and_check()
    jax.config.update("jax_enable_x64", before)  # awkward sets it for the whole process, also for other packages
    with jax.enable_x64():
        yield


def ragged(rng: np.random.Generator) -> ak.Array:
    lengths = rng.integers(1, 6, LISTS)
    lists = ak.unflatten(rng.normal(size=lengths.sum()), lengths)
    return ak.to_backend(lists, "jax")


def in_both(function: Callable[[], Any]) -> tuple[Any, Any, jb.redirect]:
    """The result without and with a redirect, and the redirect."""
    jax.clear_caches()
    redirect = jb.redirect(indexed_updates=True)
    expected = function()
    with redirect:
        return expected, function(), redirect


def assert_equal(actual: ak.Array, expected: ak.Array) -> None:
    actual, expected = (np.asarray(ak.to_numpy(ak.to_backend(x, "cpu"))) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize("name", REDUCERS)
def test_reducer(rng: np.random.Generator, require_calls: Callable[..., None], name: str) -> None:
    array = ragged(rng)
    expected, result, redirect = in_both(lambda: getattr(ak, name)(array, axis=-1))
    assert_equal(result, expected)
    require_calls(redirect.report)


@pytest.mark.parametrize("name", ["sum", "max", "min", "prod"])
def test_forward_mode(rng: np.random.Generator, require_calls: Callable[..., None], name: str) -> None:
    array = ragged(rng)
    tangent = ak.unflatten(ak.to_backend(rng.normal(size=len(ak.flatten(array))), "jax"), ak.num(array))

    def jvp() -> Any:
        return jax.jvp(lambda x: getattr(ak, name)(x, axis=-1), (array,), (tangent,))

    expected, result, redirect = in_both(jvp)
    for a, b in zip(result, expected, strict=True):
        assert_equal(a, b)
    require_calls(redirect.report)


@pytest.mark.parametrize("name", ["sum", "max", "min", "prod"])
def test_reverse_mode(
    rng: np.random.Generator, timings: Callable[..., None], require_calls: Callable[..., None], name: str
) -> None:
    array = ragged(rng)

    def gradient() -> Any:
        value, pull_back = jax.vjp(lambda x: getattr(ak, name)(x, axis=-1), array)
        return ak.flatten(pull_back(value)[0])

    expected, result, redirect = in_both(gradient)
    assert_equal(result, expected)
    require_calls(redirect.report)
    timings(f"awkward, {name} with gradient", jb.redirect()(gradient), gradient)
