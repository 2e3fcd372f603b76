"""The pendulum's equation of motion, integrated by a Runge-Kutta scheme of fourth order in JAX.

    angle'' = -frequency**2 * sin(angle) - damping * angle' + drive * cos(DRIVE_FREQUENCY * time)

In float32, which JAX computes in unless the whole process is switched to 64 bits: over 20 s rounding moves the angle by
1e-6 rad, and the camera's noise is ten thousand times that.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

RELEASE = (1.2, 0.0)  # rad, rad/s: the state at time 0
DRIVE_FREQUENCY = 2.0  # rad/s

SAMPLES, INTERVAL = 400, 0.05  # s
STEPS = 2  # of the integrator between two samples; with four the angles differ by 1e-6 rad


class Parameters(NamedTuple):
    """What is to be found, all positive; arrays of either framework, of any one shape."""

    frequency: Any  # rad/s, of small swings
    damping: Any  # 1/s
    drive: Any  # rad/s²


UNITS = Parameters("rad/s", "1/s", "rad/s²")


def simulate(parameters: Parameters) -> jax.Array:
    """Return the angle (SAMPLES,) in rad at INTERVAL, 2 INTERVAL, ..., for parameters without dimensions."""
    dt = INTERVAL / STEPS

    def rate(time: jax.Array, state: jax.Array) -> jax.Array:
        angle, velocity = state
        pull = -(parameters.frequency**2) * jnp.sin(angle) - parameters.damping * velocity
        return jnp.stack([velocity, pull + parameters.drive * jnp.cos(DRIVE_FREQUENCY * time)])

    def step(state: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        time = number * dt
        k1 = rate(time, state)
        k2 = rate(time + dt / 2, state + dt / 2 * k1)
        k3 = rate(time + dt / 2, state + dt / 2 * k2)
        k4 = rate(time + dt, state + dt * k3)
        state = state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return state, state[0]

    _, angles = jax.lax.scan(step, jnp.asarray(RELEASE), jnp.arange(SAMPLES * STEPS))
    return angles[STEPS - 1 :: STEPS]
