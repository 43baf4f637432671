"""mujoco-mjx: steps of many worlds, in which linked capsules fall on a plane."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from mujoco import mjx

from benchmarks.clients import Program

SIZE_OF, SIZES = "worlds", (4, 256)
STEPS = 5
WORLD = """
<mujoco>
  <option iterations="2" ls_iterations="4"/>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body pos="0 0 .3">
      <freejoint/>
      <geom type="capsule" size=".05" fromto="0 0 0 .3 0 0"/>
      <body pos=".3 0 0">
        <joint type="hinge" axis="0 1 0"/>
        <geom type="capsule" size=".05" fromto="0 0 0 .3 0 0"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""


def falling(worlds: int) -> Program:
    model = mjx.put_model(mujoco.MjModel.from_xml_string(WORLD))
    start = mjx.make_data(model)
    velocities = jnp.asarray(np.random.default_rng(0).normal(size=(worlds, len(start.qvel))), jnp.float32)

    def simulate(velocities: jax.Array) -> tuple[jax.Array, jax.Array]:
        def of_world(velocity: jax.Array) -> tuple[jax.Array, jax.Array]:
            data = start.replace(qvel=velocity)
            data, _ = jax.lax.scan(lambda data, _: (mjx.step(model, data), None), data, length=STEPS)
            return data.qpos, data.qvel

        return jax.vmap(of_world)(velocities)

    return Program(simulate, (velocities,))


PROGRAMS: dict[str, Callable[[int], Program]] = {"falling": falling}
