"""Averages after very many steps: drifts, saturated counts, weights long forgotten."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from oracles import ULP

import emaopt
from emaopt import schedules

LAST = 2**31 - 1


def of_a_drift(decay, start, rise, steps):
    """The average of start + rise·i, i = 1 ... steps: its value at the mean age."""
    left = decay**steps
    age = decay / (1 - decay) - steps * left / (1 - left)
    return start + rise * (steps - age)


@pytest.mark.parametrize("decay", [0.99999, np.float32(0.99999)])
@pytest.mark.parametrize(
    ("options", "bound"),
    [({}, 4e-5), ({"every": 8}, 4e-5), ({"compensated": True}, 4 * ULP)],
)
def test_two_million_steps_in_one_loop(decay, options, bound):
    steps = 2_000_000
    average = emaopt.params_ema(decay, **options)
    # Exact in float32 to the last step: constants, and drifts of one spacing a step.
    params = jnp.array([0.1, -3.3, 1.0, -1.0])
    rise = np.float32([0, 0, 1, -1]) * np.float32(ULP)

    @jax.jit
    def train(params):
        def step(_, carry):
            params, state = carry
            updates, state = average.update(jnp.asarray(rise), state, params)
            return optax.apply_updates(params, updates), state

        params, state = lax.fori_loop(0, steps, step, (params, average.init(params)))
        return params, emaopt.eval_params(state, params)

    last, found = train(params)
    every = options.get("every", 1)
    first = np.asarray(params, np.float64)
    rise = rise.astype(np.float64)
    np.testing.assert_array_equal(last, first + steps * rise)
    expected = of_a_drift(float(decay) ** every, first, every * rise, steps // every)
    error = np.abs(found - expected) / np.abs(expected)
    assert error.max() < bound


@pytest.mark.parametrize(
    "decay",
    [
        0.9,
        schedules.warmup(0.9999),
        schedules.inverse_gamma(),
        schedules.exponential_ramp(0.9999, 1000),
        schedules.uniform(),
        schedules.power(0.1),
    ],
)
def test_the_count_saturates(decay):
    average = emaopt.params_ema(decay)
    update = jax.jit(average.update)
    params = {"w": jnp.full(3, 2.0)}
    zero = jax.tree.map(jnp.zeros_like, params)
    state = average.init(params)
    for _ in range(2):
        _, state = update(zero, state, params)
    near = jnp.int32(LAST - 2)
    state = state._replace(step=near, ema=state.ema._replace(count=near))
    for k in range(1, 5):
        _, state = update(zero, state, params)
        assert state.step == state.ema.count == min(LAST - 2 + k, LAST)
    found = emaopt.eval_params(state, params)["w"]
    np.testing.assert_allclose(found, 2, rtol=4 * ULP)
    if callable(decay):
        assert 0.99 < decay(jnp.int32(LAST)) <= 1
    assert update._cache_size() == 1


@pytest.mark.parametrize("decay", [0.5, 0.9, np.float32(0.9), 0.1])
@pytest.mark.parametrize("compensated", [False, True])
def test_a_decay_power_that_underflows(decay, compensated):
    steps = 3000

    @jax.jit
    def run(values):
        def step(state, x):
            state = emaopt.update(state, x, decay)
            rest = state.residual.of_decay_power
            return state, (state.decay_power, rest, emaopt.corrected(state))

        return lax.scan(step, emaopt.init(values[0], compensated=compensated), values)

    # Ones that become zeros: the average goes the way of the decay power.
    values = np.where(np.arange(steps)[:, None] < steps // 3, [[3.0, 1.0]], [[3.0, 0]])
    state, (powers, rests, found) = run(values.astype(np.float32))
    assert not np.isnan(found).any()
    exact = np.float64(decay) ** np.arange(1, steps + 1)
    large = exact > 1e-30
    np.testing.assert_allclose(powers[large], exact[large], rtol=4 * ULP)
    assert np.all(np.diff(powers) <= 0)
    assert state.weight == 1
    # What is taken off in a step, α·βᵗ, is 0 below the least normal number.
    rest = float(jnp.finfo(np.float32).tiny) / (1 - float(decay))
    assert 0 <= state.decay_power <= rest
    assert rests[-1] == 0
    np.testing.assert_allclose(found[:, 0], 3, rtol=4 * ULP)
    assert 0 <= found[-1, 1] <= rest


def test_values_that_underflow_take_no_longer():
    steps, width = 500, 4096

    @functools.partial(jax.jit, static_argnames="compensated")
    def run(x, compensated):
        state = emaopt.init(x, compensated=compensated, warm_start=True)
        return lax.fori_loop(
            0, steps, lambda _, state: emaopt.update(state, x, 0.9), state
        )

    def seconds(x, compensated):
        start = time.perf_counter()
        jax.block_until_ready(run(x, compensated))
        return time.perf_counter() - start

    normal, denormal = jnp.full(width, 1.0), jnp.full(width, 1e-40)
    for compensated in (False, True):
        taken = [
            [seconds(x, compensated) for x in (normal, denormal)] for _ in range(6)
        ]
        # The first call compiles. Not flushed, such numbers take many times longer.
        usual, tiny = np.min(taken[1:], axis=0)
        assert tiny < 5 * usual
