"""The errors of averages in float32 against float64, as numerics.md shows them.

    python docs/accuracy.py --steps 100000

prints the table for another number of steps.
"""

import argparse
import os

# Before jax starts: its compiler writes into the page how long it simplifies.
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.signal
from jax import lax

import emaopt

ULP = 2.0**-23
DECAYS = (0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)


def values(steps, seed=0):
    """Noise, noise about 100, a constant, a drift, values over 12 decades: columns."""
    rng = np.random.default_rng(seed)
    t = np.arange(steps) / steps
    columns = (
        rng.normal(size=steps),
        rng.normal(size=steps) + 100,
        np.full(steps, 0.1),
        1 + t,
        rng.choice([-1.0, 1.0], steps) * 10 ** rng.uniform(-6, 6, steps),
    )
    return np.stack(columns, axis=1).astype(np.float32)


def in_float64(x, decay):
    """m_t / w_t, by SciPy's linear filter."""
    x = np.asarray(x, np.float64)
    m = scipy.signal.lfilter([1 - decay], [1, -decay], x, axis=0)
    weight = -np.expm1(np.arange(1, len(x) + 1) * np.log(decay))
    return m / weight.reshape(-1, *[1] * (x.ndim - 1))


def errors(found, x, decay):
    """The error of every average, relative to the average of |x|."""
    error = np.abs(np.asarray(found, np.float64) - in_float64(x, decay))
    return error / in_float64(np.abs(x), decay)


def scanned(step, state, x):
    return jax.jit(lambda x: lax.scan(step, state, x)[1])(x)


def by_scan(method):
    def run(x, decay):
        state = emaopt.init(x[0], compensated=True)
        return jax.jit(
            lambda x: emaopt.scan(state, x, decay, method=method)[1],
        )(x)

    return run


def by_update(compensated):
    def run(x, decay):
        def step(state, row):
            state = emaopt.update(state, row, decay)
            return state, emaopt.corrected(state)

        return scanned(step, emaopt.init(x[0], compensated=compensated), x)

    return run


def by_optax(x, decay):
    transformation = optax.ema(decay)

    def step(state, row):
        average, state = transformation.update(row, state)
        return state, average

    return scanned(step, transformation.init(jnp.asarray(x[0])), x)


def as_written(x, decay):
    """The recurrence and 1 − βᵗ, in float32 and with nothing else."""

    def step(carry, row):
        m, count = carry
        m, count = decay * m + (1 - decay) * row, count + 1
        return (m, count), m / (1 - jnp.float32(decay) ** count)

    return scanned(step, (jnp.zeros_like(x[0]), jnp.int32(0)), x)


FORMS = {
    "scan": by_scan("scan"),
    "blocked": by_scan("blocked"),
    "associative": by_scan("associative"),
    "update, compensated": by_update(True),
    "update": by_update(False),
    "optax.ema": by_optax,
    "as written": as_written,
}


def measure(steps, forms=FORMS, decays=DECAYS):
    """The worst error of each form (rows) at each decay (columns), in ulp."""
    x = values(steps)
    return {
        name: [errors(run(x, decay), x, decay).max() / ULP for decay in decays]
        for name, run in forms.items()
    }


def table(measured, decays=DECAYS):
    lines = ["1 − β".ljust(19) + "".join(f"{1 - decay:8.0g}" for decay in decays)]
    for name, row in measured.items():
        cells = (f"{e:8.1f}" if e < 100 else f"{e:8,.0f}" for e in row)
        lines.append(name.ljust(19) + "".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    print(f"worst error in {steps:,} steps, ulp of the average of |x|")
    print(table(measure(steps)))
