"""The decay schedules against their formulas in float64, and the weights they give."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest

import emaopt
from emaopt import schedules

# Name: our schedule, and the formula in float64.
CASES = {
    "warmup": (
        schedules.warmup(0.9999),
        lambda t: np.minimum(0.9999, (1 + t) / (10 + t)),
    ),
    "inverse_gamma": (
        schedules.inverse_gamma(max_decay=1.0),
        lambda t: -np.expm1(-2 / 3 * np.log1p(t)),
    ),
    "inverse_gamma, bounded": (
        schedules.inverse_gamma(20, 0.75, min_decay=0.1, max_decay=0.999),
        lambda t: np.clip(1 - (1 + t / 20) ** -0.75, 0.1, 0.999),
    ),
    "exponential_ramp": (
        schedules.exponential_ramp(),
        lambda t: 0.9999 * (1 - np.exp(-t / 2000)),
    ),
    "uniform": (schedules.uniform(), lambda t: 1 - 1 / (t + 1)),
    "uniform, window": (
        schedules.uniform(window=100),
        lambda t: 1 - 1 / np.minimum(t + 1, 100),
    ),
    "power": (schedules.power(6.94), lambda t: (t / (t + 1)) ** 7.94),
    "power, gamma 0": (schedules.power(0), lambda t: t / (t + 1)),
    "power, sigma_rel": (
        schedules.power(sigma_rel=0.1),
        # 6.9372... is the largest root of the cubic, as found by numpy.roots.
        lambda t: (t / (t + 1)) ** (1 + np.roots([1, 7, -84, -88]).real.max()),
    ),
}
COUNTS = [0, 1, 2, 3, 9, 10, 99, 100, 12_345, 10**6, 2**24, 2**24 + 1, 2**31 - 1]
every_schedule = pytest.mark.parametrize("name", CASES)


@every_schedule
def test_values_of_every_kind_of_count(name):
    schedule, formula = CASES[name]
    traced = jax.jit(schedule)
    for count in COUNTS:
        expected = formula(np.float64(count))
        for kind in (int, np.int32, np.int64, np.float64, jnp.int32):
            found = schedule(kind(count))
            assert (found.dtype, found.shape, found.weak_type) == (np.float32, (), 0)
            # Half an ulp for β, and two for log and exp, relative to what they make.
            bound = oracles.ULP * (0.5 + 8 * min(expected, 1 - expected))
            assert abs(float(found) - expected) <= bound, (count, kind)
            assert 0 <= found <= 1
        np.testing.assert_allclose(
            traced(jnp.int32(count)), found, atol=oracles.ULP, rtol=0
        )
    many = schedule(jnp.asarray(COUNTS))
    np.testing.assert_allclose(many, formula(np.float64(COUNTS)), atol=2e-7)
    assert np.all(np.diff(many) >= 0)


@every_schedule
def test_the_first_update_is_always_taken(name):
    schedule, formula = CASES[name]
    state = emaopt.init(jnp.float32(0))
    state = emaopt.update(state, jnp.float32(3), schedule)
    np.testing.assert_allclose(emaopt.corrected(state), 3, rtol=oracles.ULP)
    np.testing.assert_allclose(state.weight, 1 - formula(0.0), rtol=oracles.ULP)


@pytest.mark.usefixtures("x64")
@every_schedule
def test_x64_and_scan_change_nothing(name):
    schedule, formula = CASES[name]
    assert schedule(jnp.int64(7)).dtype == schedule(7).dtype == np.float32
    _, found = jax.lax.scan(
        lambda count, _: (count + 1, schedule(count)), jnp.int32(0), length=20
    )
    np.testing.assert_allclose(found, formula(np.arange(20.0)), atol=2 * oracles.ULP)


@every_schedule
def test_the_average_is_the_recurrence_with_the_schedule(name, rng):
    schedule, _ = CASES[name]
    values = rng.normal(size=(50, 2)).astype(np.float32)
    average = emaopt.ema(schedule)

    @jax.jit
    def emit(values):
        def step(state, value):
            return average.update(value, state)[::-1]

        return jax.lax.scan(step, average.init(values[0]), values)[1]

    decays = np.asarray(schedule(jnp.arange(50)), np.float64)
    expected = oracles.ema(values, decays).corrected
    np.testing.assert_allclose(emit(values), expected, atol=16 * oracles.ULP)


def weights(schedule, steps):
    """The weights of the updates in the last average, in float64."""
    decays = np.asarray(schedule(jnp.arange(steps)), np.float64)
    weight = oracles.ema(np.eye(steps), decays).corrected[-1]
    np.testing.assert_allclose(weight.sum(), 1, rtol=1e-6)
    return weight


def test_uniform_weighs_all_alike_and_power_as_a_power_of_time():
    np.testing.assert_allclose(weights(schedules.uniform(), 200), 1 / 200, rtol=1e-4)
    windowed = weights(schedules.uniform(window=10), 200)
    expected = 0.1 * 0.9 ** np.arange(200)[::-1]
    np.testing.assert_allclose(windowed[20:], expected[20:], rtol=1e-4)
    i = np.arange(1, 201) / 200
    powered = weights(schedules.power(4.0), 200)
    np.testing.assert_allclose(powered, np.diff(i**5, prepend=0), rtol=1e-4)
    geometric = weights(schedules.inverse_gamma(power=1.0, max_decay=1.0), 200)
    np.testing.assert_allclose(geometric, 1 / 200, rtol=1e-4)
    assert weights(schedules.warmup(0.9999), 1000)[-100:].sum() > 0.5


@pytest.mark.parametrize("sigma_rel", [0.01, 0.05, 0.1, 0.25, 12**-0.5])
def test_sigma_rel_is_the_width_of_the_weights(sigma_rel):
    gamma = schedules.gamma_from_sigma_rel(sigma_rel)
    # The largest root of the cubic of the published relation, another way.
    cubic = [1, 7, 16 - sigma_rel**-2, 12 - sigma_rel**-2]
    np.testing.assert_allclose(gamma, np.roots(cubic).real.max(), atol=1e-7, rtol=1e-9)
    steps = 2000
    weight = weights(schedules.power(sigma_rel=sigma_rel), steps)
    time = np.arange(1, steps + 1) / steps
    mean = np.sum(weight * time)
    width = math.sqrt(np.sum(weight * (time - mean) ** 2))
    np.testing.assert_allclose(width, sigma_rel, rtol=0.01)


def test_joined_schedules_and_counts_before_their_turn():
    joined = optax.join_schedules(
        [schedules.uniform(), schedules.warmup(0.999), lambda count: 0.75], [10, 30]
    )
    with jax.debug_nans(True), jax.debug_infs(True):
        found = [float(joined(count)) for count in (0, 9, 10, 29, 30)]
    np.testing.assert_allclose(found, [0, 0.9, 0.1, 20 / 29, 0.75], rtol=2e-7)
    optimizer = emaopt.params_ema(joined)
    state = optimizer.init(jnp.float32(0))
    _, state = jax.jit(optimizer.update)(jnp.float32(2), state, jnp.float32(0))
    assert emaopt.eval_params(state, jnp.float32(0)) == 2


@pytest.mark.parametrize(
    ("make", "error", "found"),
    [
        (lambda: schedules.warmup(1.0), ValueError, r"decay must be in \[0, 1\), got "),
        (lambda: schedules.warmup("a"), TypeError, "decay must be a real number in"),
        (lambda: schedules.warmup(True), TypeError, "decay must be a real number in"),
        (lambda: schedules.warmup(None), TypeError, "decay must be a real number in"),
        (lambda: schedules.inverse_gamma(0), ValueError, r"inv_gamma must be in \(0, "),
        (
            lambda: schedules.inverse_gamma(power=math.nan),
            ValueError,
            r"power must be in \(0, inf\), got nan",
        ),
        (
            lambda: schedules.inverse_gamma(min_decay=0.9, max_decay=0.5),
            ValueError,
            "min_decay must not be above max_decay, got 0.9 and 0.5",
        ),
        (
            lambda: schedules.inverse_gamma(max_decay=1.1),
            ValueError,
            r"max_decay must be in \[0, 1\], got 1.1",
        ),
        (lambda: schedules.exponential_ramp(2), ValueError, r"decay must be in \[0, 1"),
        (
            lambda: schedules.exponential_ramp(tau=math.inf),
            ValueError,
            r"tau must be in \(0, inf\), got inf",
        ),
        (lambda: schedules.uniform(0), ValueError, "window must be a whole number >= "),
        (lambda: schedules.uniform(2.5), ValueError, "window must be a whole number >"),
        (schedules.power, ValueError, "give gamma or sigma_rel, and not both; got nei"),
        (
            functools.partial(schedules.power, 1.0, sigma_rel=0.1),
            ValueError,
            "give gamma or sigma_rel, and not both; got both",
        ),
        (lambda: schedules.power(-0.5), ValueError, r"gamma must be in \[0, inf\), go"),
        (
            lambda: schedules.power(sigma_rel=0.3),
            ValueError,
            r"sigma_rel must be in \(0, 12\*\*-0.5\], got 0.3",
        ),
        (lambda: schedules.gamma_from_sigma_rel(0), ValueError, "sigma_rel must be in"),
    ],
)
def test_wrong_arguments(make, error, found):
    with pytest.raises(error, match=found):
        make()


def test_arguments_may_be_traced():
    @jax.jit
    def first(decay, tau, gamma, window):
        made = (
            schedules.warmup(decay),
            schedules.inverse_gamma(tau, max_decay=decay),
            schedules.exponential_ramp(decay, tau),
            schedules.power(gamma),
            schedules.uniform(window),
        )
        return [schedule(100) for schedule in made]

    found = first(jnp.float32(0.999), jnp.float32(50), jnp.float32(2), 4)
    expected = [
        101 / 110,
        1 - 3 ** (-2 / 3),
        0.999 * -np.expm1(-2),
        (100 / 101) ** 3,
        0.75,
    ]
    np.testing.assert_allclose(found, expected, rtol=4 * oracles.ULP)
