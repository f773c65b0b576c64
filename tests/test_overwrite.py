"""`overwrite`: the average becomes the parameters, every few calls."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from jax import lax

import emaopt


def train(optimizer, params, gradients):
    """The parameters after each step, all steps in one compiled scan."""

    @jax.jit
    def scanned(params, gradients):
        def step(carry, gradient):
            params, state = carry
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            average = emaopt.eval_params(state, params, which=0)
            return (params, state), (params, average)

        return lax.scan(step, (params, optimizer.init(params)), gradients)

    (_, state), (history, averages) = scanned(params, gradients)
    return history, averages, state


def switched(start_value, updates, decay, every, start, warm_start):
    """Switch EMA in float64: parameters and averages after each step."""
    p = np.float64(start_value)
    m, w = (p, 1.0) if warm_start else (np.zeros_like(p), 0.0)
    parameters, averages = [], []
    for call, update in enumerate(np.float64(updates), start=1):
        p = p + update
        if call > start:
            m, w = decay * m + (1 - decay) * p, decay * w + (1 - decay)
            if (call - start) % every == 0:
                p = m / w
        elif warm_start:
            m = p
        parameters.append(p)
        averages.append(m / w if w else p)
    return np.stack(parameters), np.stack(averages)


@pytest.mark.parametrize("warm_start", [False, True])
@pytest.mark.parametrize(("every", "start"), [(1, 0), (3, 0), (4, 5)])
def test_the_parameters_become_their_average(every, start, warm_start, rng):
    gradients = rng.normal(size=(20, 3)).astype(np.float32)
    first = rng.normal(size=3).astype(np.float32)
    options = {"every": every, "start": start, "warm_start": warm_start}
    optimizer = optax.chain(optax.scale(-1.0), emaopt.overwrite(0.9, **options))
    history, averages, _ = train(optimizer, jnp.asarray(first), gradients)
    expected = switched(first, -gradients, 0.9, **options)
    scale = np.abs(expected[0]).max() + np.abs(gradients).sum(0).max()
    np.testing.assert_allclose(history, expected[0], atol=4 * oracles.ULP * scale)
    np.testing.assert_allclose(averages, expected[1], atol=4 * oracles.ULP * scale)


def test_between_the_writings_updates_are_untouched():
    average = emaopt.overwrite(0.9, every=3)
    params, updates = jnp.float32(1), jnp.float32(0.1)
    state = average.init(params)
    emitted = []
    for _ in range(3):
        update, state = average.update(updates, state, params)
        emitted.append(float(update))
    assert emitted[:2] == [np.float32(0.1)] * 2
    # The parameters were 1.1 after every call, so that is their average.
    np.testing.assert_allclose(emitted[2], 0.1, rtol=2**-23 / 0.1)


def test_composes_with_an_average_of_what_it_wrote(rng):
    gradients = rng.normal(size=12).astype(np.float32)
    optimizer = optax.named_chain(
        ("sgd", optax.sgd(1.0)),
        ("switch", emaopt.overwrite(0.5, every=2)),
        ("slow", emaopt.params_ema(0.75)),
    )
    history, _, state = train(optimizer, jnp.float32(0), gradients)
    expected, _ = switched(0.0, -gradients, 0.5, 2, 0, False)
    np.testing.assert_allclose(history, expected, atol=64 * oracles.ULP)
    slow = emaopt.eval_params(state, jnp.float32(0), which="slow")
    np.testing.assert_allclose(
        slow, oracles.ema(expected, 0.75).corrected[-1], atol=64 * oracles.ULP
    )
    with pytest.raises(LookupError, match=r"found 2 averages of the same leaves"):
        emaopt.eval_params(state, jnp.float32(0))


def test_a_skipped_step_writes_nothing_again():
    optimizer = optax.chain(
        optax.zero_nans(), emaopt.overwrite(0.5, every=2, skip_nonfinite=True)
    )
    updates = jnp.array([1.0, 1.0, jnp.inf])
    state, params = optimizer.init(jnp.float32(0)), jnp.float32(0)
    emitted = []
    for update in updates:
        update, state = optimizer.update(update, state, params)
        emitted.append(float(update))
        params = params + (update if np.isfinite(update) else 0)
    np.testing.assert_allclose(emitted, [1, 5 / 3 - 1, np.inf], rtol=4 * oracles.ULP)
    assert (state[1].step, state[1].ema.count) == (2, 2)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("gradients", [jnp.bfloat16, jnp.float32])
def test_bfloat16_parameters_become_the_rounded_average(gradients, rng):
    params = jnp.asarray(1 + rng.uniform(size=64), jnp.bfloat16)
    average = emaopt.overwrite(0.5, every=2)
    state = average.init(params)
    for _ in range(2):
        updates = jnp.full(64, 0.125, gradients)
        updates, state = jax.jit(average.update)(updates, state, params)
        assert updates.dtype == gradients
        params = optax.apply_updates(params, updates)
    expected = emaopt.eval_params(state, params)
    # Of a size: the difference is exact, and so is the sum.
    np.testing.assert_array_equal(params, expected)


def test_leaves_that_are_no_floats_keep_their_updates():
    params = {"w": jnp.ones(2), "n": jnp.arange(2), "k": jax.random.key(0), "z": None}
    none = np.zeros(2, jax.dtypes.float0)
    updates = params | {"n": none, "k": none}
    average = emaopt.overwrite(0.5, every=1)
    state = average.init(params)
    emitted, state = average.update(updates, state, params)
    np.testing.assert_array_equal(emitted["w"], 1)
    assert emitted["n"] is none
    assert emitted["k"] is none
    assert emitted["z"] is None


def test_hyperparameters_and_gradients():
    def last(params, decay):
        optimizer = optax.chain(
            optax.sgd(0.1),
            optax.inject_hyperparams(emaopt.overwrite)(decay=decay, every=2),
        )
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(params, state, params)
            params = optax.apply_updates(params, updates)
        return params

    # (b·0.9 + 0.81)·p / (b + 1)
    value, slopes = jax.jit(jax.value_and_grad(last, argnums=(0, 1)))(
        jnp.float32(2), jnp.float32(0.5)
    )
    np.testing.assert_allclose(value, 2 * 1.26 / 1.5, rtol=4 * oracles.ULP)
    expected = [1.26 / 1.5, 2 * (0.9 - 0.81) / 1.5**2]
    np.testing.assert_allclose(slopes, expected, rtol=16 * oracles.ULP)


def test_errors():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'e"):
        emaopt.overwrite(0.9)
    with pytest.raises(ValueError, match="every must be a whole number >= 1, got 0"):
        emaopt.overwrite(0.9, every=0)
    with pytest.raises(ValueError, match="start must be a whole number >= 0, got -1"):
        emaopt.overwrite(0.9, every=1, start=-1)
    average = emaopt.overwrite(0.9, every=1)
    state = average.init(jnp.ones(2))
    with pytest.raises(ValueError, match="overwrite averages the parameters after"):
        average.update(jnp.ones(2), state)
    with pytest.raises(AssertionError, match=r"updates at the root: found shape \(3,"):
        average.update(jnp.ones(3), state, jnp.ones(2))
