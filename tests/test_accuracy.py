"""The accuracy that the documentation promises, against float64.

1 ulp is 2⁻²³ of the average of |x|. Several kinds of values run side by side, in
columns, through one compiled program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracles import DECAYS, ULP, corrected, ulps

import emaopt

IN_BETWEEN = (0.03, 0.3, 0.49999, 0.7499999, 0.75, 0.9375, 0.9993, 0.9999973)
LONG = 2_000_000


def values(steps, rng):
    """Noise, constants, drifts, and values spread over 12 decades, as columns."""
    t = np.arange(steps) / steps
    signs = rng.choice([-1.0, 1.0], steps)
    columns = (
        rng.normal(size=steps),
        rng.normal(size=steps) + 100,
        np.full(steps, 0.1),
        np.full(steps, -1.0),
        1 + t,
        signs * 10 ** rng.uniform(-6, 6, steps),
        10 ** (6 - 12 * t),
        10 ** (12 * t - 6),
        np.where(t == 0, 1e6, 1e-6),
    )
    return np.stack(columns, axis=1).astype(np.float32)


def slow_values(steps, rng):
    """Noise, constants, drifts, steps and periods, Fibonacci numbers among them.

    The columns that swing about 1/2 cross a power of two with every period: there the
    spacing of float32 changes, and with it what rounding leaves.
    """
    t = np.arange(steps)
    columns = [
        rng.normal(size=steps),
        1 + 0.1 * rng.normal(size=steps),
        np.full(steps, 0.1),
        np.full(steps, 3.3),
        1 + t / steps,
        np.where(t < steps // 2, 0.01, 1),
        np.where(t < steps // 2, 1, 0.01),
    ]
    columns += [np.where(t % p < p / 2, 1, 0) for p in (2, 3, 8, 89, 144, 1000)]
    columns += [0.5 + np.sin(2 * np.pi * t / p) for p in (2, 4, 34, 55)]
    columns += [t % p * (2 / (p - 1)) for p in (4, 16, 89)]
    return np.stack(columns, axis=1).astype(np.float32)


@functools.partial(jax.jit, static_argnames="compensated")
def averages(x, decay, compensated):
    def step(state, row):
        state = emaopt.update(state, row, decay)
        return state, emaopt.corrected(state)

    return lax.scan(step, emaopt.init(x[0], compensated=compensated), x)[1]


@pytest.mark.parametrize(
    "steps", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", [float, np.float32])
def test_ema_scan_is_right_to_4_ulp(steps, kind, rng):
    x = values(steps, rng)
    static = kind is float
    run = jax.jit(emaopt.ema_scan, static_argnums=1 if static else ())
    for decay in (*DECAYS[1:], *(IN_BETWEEN if steps < 100_000 else ())):
        found = run(x, kind(decay))["corrected"]
        error = ulps(found, x, kind(decay)).max(axis=0)
        np.testing.assert_array_less(error, 4, err_msg=f"decay {decay}")


@pytest.mark.parametrize("kind", [float, np.float32])
def test_decay_0_returns_the_values_bit_for_bit(kind, rng):
    x = values(1000, rng)
    out = emaopt.ema_scan(x, kind(0))
    np.testing.assert_array_equal(out["corrected"], x)
    np.testing.assert_array_equal(out["final_state"], x[-1])
    np.testing.assert_array_equal(averages(x, kind(0), compensated=False), x)


def test_first_output_is_the_first_value_to_1_ulp(rng):
    x = values(1, rng)
    decays = np.float32([*DECAYS, *rng.uniform(0, 1, 200), 1 - 2.0**-24])
    decays = np.append(decays, 1 - np.float32(10) ** rng.uniform(-7, 0, 200))
    decays = np.float32(decays[decays < 1])
    forms = {
        "ema_scan": lambda b: emaopt.ema_scan(x, b)["corrected"],
        "update": lambda b: averages(x, b, compensated=False),
    }
    for name, form in forms.items():
        traced = np.asarray(jax.jit(jax.vmap(form))(decays))
        known = np.stack([form(b) for b in DECAYS])
        for found in (traced, known):
            error = np.abs(found.astype(np.float64) - x) / (ULP * np.abs(x))
            assert error.max() <= 1, name


@pytest.mark.slow
def test_weight_and_decay_power_are_right_to_4_ulp_under_any_schedule(rng):
    steps = 1_000_000
    t = np.arange(steps)
    near_1 = 1 - 10 ** rng.uniform(-7, -1, steps)
    schedules = np.float32(
        [
            np.full(steps, 1 - 2.0**-24),
            np.full(steps, 1 - 2.0**-23),
            np.full(steps, 0.999999),
            (1 + t) / (10 + t),
            np.minimum(near_1, 1 - 2.0**-24),
            np.where(t % 2, 1 - 2.0**-24, 0.99999),
            np.where(t < 100_000, 1 - 2.0**-24, 0.9999),
            1 - 1e-5 * (1 + np.sin(t / 1e4)) / 2 - 1e-6,
            np.where(rng.uniform(size=steps) < 1e-5, 0.3, 1 - 2.0**-22),
            np.where(t == 500_000, 0, 1 - 2.0**-24),
        ]
    )

    @jax.jit
    @jax.vmap
    def run(decays):
        def step(state, decay):
            state = emaopt.update(state, jnp.float32(1), decay)
            return state, (state.weight, state.decay_power)

        return lax.scan(step, emaopt.init(jnp.float32(0)), decays)[1]

    weight, power = (np.asarray(out, np.float64) for out in run(schedules))
    with np.errstate(divide="ignore"):
        logs = np.cumsum(np.log(schedules.astype(np.float64)), axis=1)
    error = np.abs(weight + np.expm1(logs)) / (ULP * -np.expm1(logs))
    np.testing.assert_array_less(error.max(axis=1), 4)
    large = np.exp(logs) >= 1e-6
    error = np.abs(power - np.exp(logs)) / (ULP * np.exp(np.maximum(logs, -14)))
    np.testing.assert_array_less(np.where(large, error, 0).max(axis=1), 4)


@pytest.mark.parametrize("decay", [*DECAYS[1:6], *IN_BETWEEN])
def test_no_digit_of_a_known_decay_is_lost(decay):
    # n steps multiply by n what float32 cuts off the decay: until it is 1e-6, up to 7.
    steps = min(int(np.log(1e-6) / np.log(decay)), 100_000)

    @jax.jit
    def run(state):
        def step(state, _):
            state = emaopt.update(state, jnp.float32(1), decay)
            return state, state.decay_power

        return lax.scan(step, state, None, steps)[1]

    found = np.asarray(run(emaopt.init(jnp.float32(0))), np.float64)
    expected = decay ** np.arange(1, steps + 1)
    np.testing.assert_array_less(np.abs(found - expected) / (ULP * expected), 4)


@pytest.mark.parametrize("decay", [0.74, 0.9993])
def test_no_digit_of_a_traced_float64_decay_is_lost(decay, x64):
    x = np.full((20_000, 1), 1e-6, np.float32)
    x[0] = 1e6
    found = jax.jit(emaopt.ema_scan)(x, np.float64(decay))["corrected"]
    assert found.dtype == np.float32
    assert ulps(found, x, decay).max() < 4


def test_update_without_extra_memory_stays_near_for_20_000_steps(rng):
    x = slow_values(20_000, rng)
    for decay in (*DECAYS[1:], *IN_BETWEEN, 0.9995, 0.99995):
        found = averages(x, np.float32(decay), compensated=False)
        error = ulps(found, x, np.float32(decay)).max(axis=0) * ULP
        np.testing.assert_array_less(error, 2e-5, err_msg=f"decay {decay}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decay", "bound"),
    [(0.999, 5e-6), (0.9999, 1.5e-5), (0.99999, 4e-5), (0.999999, 1e-4)],
)
def test_update_over_two_million_steps(decay, bound, rng):
    x = slow_values(LONG, rng)
    for compensated, limit in ((False, bound / ULP), (True, 4)):
        found = np.asarray(averages(x, np.float32(decay), compensated))
        for column in range(x.shape[1]):
            # One column at a time: the oracle in float64 takes eight times its memory.
            error = ulps(found[:, column], x[:, column], np.float32(decay)).max()
            assert error < limit, (compensated, column)


def test_float64_is_right_to_the_last_digits_of_float64(x64, rng):
    x = rng.normal(size=(500, 4)) + 1
    for decay in (0.1, 0.9, 0.9999, 1 - 2.0**-40):
        alpha = 1 - np.longdouble(decay)
        m, w = np.zeros(4, np.longdouble), np.longdouble(0)
        expected = []
        for row in x.astype(np.longdouble):
            m, w = decay * m + alpha * row, decay * w + alpha
            expected.append(m / w)
        for form in (
            lambda b: emaopt.ema_scan(x, b)["corrected"],
            lambda b: averages(x, b, compensated=True),
        ):
            found = np.asarray(jax.jit(form)(np.float64(decay)))
            assert found.dtype == np.float64
            error = np.abs(found - np.array(expected)) / corrected(np.abs(x), decay)
            assert error.max() < 4 * 2.0**-52
