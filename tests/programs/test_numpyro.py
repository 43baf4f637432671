"""numpyro: NUTS samples a hierarchical model, where each observation gathers its group's draws by id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import initialize_model

GROUPS, ROWS = 8, 60


def model(ids: jax.Array, x: jax.Array, y: jax.Array) -> None:
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", GROUPS):
        intercept = numpyro.sample("intercept", dist.Normal(mean, scale))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", ROWS):
        numpyro.sample("y", dist.Normal(intercept[ids] + slope[ids] * x, 1), obs=y)


def observations(rng: np.random.Generator) -> tuple[jax.Array, ...]:
    return jnp.asarray(rng.integers(0, GROUPS, ROWS)), *(jnp.asarray(rng.normal(size=ROWS)) for _ in range(2))


def test_samples(rng: np.random.Generator, compare_redirected: Callable[..., Any]) -> None:
    """Two chains under one vmap agree, with gradients of gathers in loops whose length depends on the draws."""
    with jax.enable_x64():

        def sample(*observed: jax.Array) -> Any:
            chains = MCMC(
                NUTS(model), num_warmup=20, num_samples=20, num_chains=2, chain_method="vectorized", progress_bar=False
            )
            chains.run(jax.random.key(0), *observed)
            return chains.get_samples()

        compare_redirected(
            "numpyro, NUTS", sample, *observations(rng), calls=("gradient of a gather",), rtol=1e-6, atol=1e-6
        )


def test_curvature(rng: np.random.Generator, compare_redirected: Callable[..., Any]) -> None:
    """The Hessian of the log density, as for a Laplace approximation, agrees: forward over reverse mode."""
    with jax.enable_x64():
        observed = observations(rng)
        start, potential, *_ = initialize_model(jax.random.key(0), model, model_args=observed)
        calls = ("gradient of a gather",)
        compare_redirected("numpyro, Hessian", jax.hessian(potential), start.z, calls=calls, rtol=1e-9, atol=1e-9)
